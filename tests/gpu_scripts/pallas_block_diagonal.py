"""Check and time the Mosaic GPU block-diagonal kernels on a Hopper GPU, variant by variant.

Run with `PYTHONPATH=src python tests/gpu_scripts/pallas_block_diagonal.py`. Every line of the timing table gives the
time and its ratio to a copy of the same number of bytes. A variant that fails prints its traceback, and the rest runs.
"""

import statistics
import time
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from blockdiag.ops.block_diagonal.problem import BlockDiagonalProblem
from blockdiag.pallas_kernels.block_diagonal.backward import BackwardSchedule, backward_call
from blockdiag.pallas_kernels.block_diagonal.forward import ForwardSchedule, forward_call

TOKENS = 262_144
CHECKED_SHAPES = [  # query heads, key heads, head_dim, is_causal, dtype
    (8, 8, 128, False, "bfloat16"),
    (16, 16, 64, True, "float16"),
    (8, 2, 128, True, "bfloat16"),
    (6, 2, 64, False, "bfloat16"),
    (3, 3, 192, True, "bfloat16"),
    (2, 2, 256, False, "bfloat16"),
]


def problem_of(tokens: int, heads: int, key_heads: int, head_dim: int, is_causal: bool, dtype: str) -> Any:
    return BlockDiagonalProblem(
        tokens=tokens,
        query_heads=heads,
        key_heads=key_heads,
        head_dim=head_dim,
        dtype=dtype,
        block_size=64,
        sequence_length=tokens,
        num_tiles=tokens // 64,
        is_causal=is_causal,
        scale=head_dim**-0.5,
    )


def arrays_of(problem: BlockDiagonalProblem) -> tuple[jax.Array, ...]:
    heads = (problem.query_heads, problem.key_heads, problem.key_heads, problem.query_heads)
    keys = jax.random.split(jax.random.key(0), 4)
    return tuple(
        jax.random.normal(key, (problem.tokens, count, problem.head_dim), jnp.dtype(problem.dtype))
        for key, count in zip(keys, heads, strict=True)
    )


def dense(problem: BlockDiagonalProblem, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Return the same attention in float32, block by block."""
    size = problem.block_size

    def blocks(array: jax.Array, repeats: int) -> jax.Array:
        array = jnp.repeat(array.astype(jnp.float32), repeats, axis=1)
        return array.reshape(-1, size, *array.shape[1:])

    query, key, value = blocks(query, 1), blocks(key, problem.group_size), blocks(value, problem.group_size)
    scores = jnp.einsum("bqnh,bknh->bnqk", query, key, precision="highest") * problem.scale
    if problem.is_causal:
        scores = jnp.where(jnp.tril(jnp.ones((size, size), bool)), scores, -jnp.inf)
    output = jnp.einsum("bnqk,bknh->bqnh", jax.nn.softmax(scores), value, precision="highest")
    return output.reshape(problem.tokens, problem.query_heads, problem.head_dim)


def relative_errors(results: tuple[jax.Array, ...], expected: tuple[jax.Array, ...]) -> list[float]:
    return [
        float(jnp.abs(result.astype(jnp.float32) - want).max() / jnp.abs(want).max())
        for result, want in zip(results, expected, strict=True)
    ]


def check(shape: tuple) -> None:
    problem = problem_of(64 * 1000, *shape)
    query, key, value, cotangent = arrays_of(problem)
    forward = jax.jit(lambda *arrays: forward_call(problem, *arrays, interpret=False))
    backward = jax.jit(lambda *arrays: backward_call(problem, *arrays, interpret=False))
    results = (forward(query, key, value), *backward(query, key, value, cotangent))
    again = (forward(query, key, value), *backward(query, key, value, cotangent))

    @jax.jit
    def reference(query, key, value, cotangent):
        wide = [array.astype(jnp.float32) for array in (query, key, value)]
        output, pullback = jax.vjp(lambda *arrays: dense(problem, *arrays), *wide)
        return output, *pullback(cotangent.astype(jnp.float32))

    errors = relative_errors(results, reference(query, key, value, cotangent))
    same = all(bool((one == two).all()) for one, two in zip(results, again, strict=True))
    verdict = "ok" if max(errors) < 0.02 and same else "WRONG"
    print(f"check {shape}: {verdict} relative errors {[f'{e:.4f}' for e in errors]} repeatable {same}", flush=True)


def milliseconds(function: Callable, *arrays: jax.Array, calls: int = 20, repeats: int = 5) -> float:
    """Return the median over `repeats` of the wall time per call, for `calls` queued calls."""
    jax.block_until_ready(function(*arrays))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls):
            result = function(*arrays)
        jax.block_until_ready(result)
        times.append((time.perf_counter() - start) / calls * 1e3)
    return statistics.median(times)


def copy_rate() -> float:
    """Return the bytes per millisecond, read and written, of the fastest plain copy."""
    array = jax.random.normal(jax.random.key(1), (1 << 29,), jnp.bfloat16)
    copies = {"jnp.copy": jax.jit(jnp.copy), "negative": jax.jit(jnp.negative)}
    rates = {name: 2 * array.nbytes / milliseconds(copy, array) for name, copy in copies.items()}
    print({name: f"{rate / 1e6:.0f} GB/s" for name, rate in rates.items()}, flush=True)
    return max(rates.values())


def report(name: str, function: Callable, arrays: tuple, moved: int, rate: float) -> None:
    try:
        start = time.perf_counter()
        compiled = jax.jit(function).lower(*arrays).compile()
        compile_seconds = time.perf_counter() - start
        spent = milliseconds(compiled, *arrays)
    except Exception:
        print(f"{name}: FAILED\n{traceback.format_exc(limit=4)}", flush=True)
        return
    ratio = spent / (moved / rate)
    print(f"{name}: {spent:.4f} ms, {ratio:.3f}x copy (compiled in {compile_seconds:.1f} s)", flush=True)


def time_shape(heads: int, key_heads: int, head_dim: int, forwards: list, backwards: list, rate: float) -> None:
    problem = problem_of(TOKENS, heads, key_heads, head_dim, False, "bfloat16")
    query, key, value, cotangent = arrays_of(problem)
    name = f"N{heads} K{key_heads} H{head_dim}"
    for stages in forwards:
        schedule = ForwardSchedule(**stages)
        report(
            f"{name} forward {stages}",
            lambda *arrays, schedule=schedule: forward_call(problem, *arrays, interpret=False, schedule=schedule),
            (query, key, value),
            2 * (query.nbytes + key.nbytes),
            rate,
        )
    for stages in backwards:
        schedule = BackwardSchedule(**stages)
        report(
            f"{name} backward {stages}",
            lambda *arrays, schedule=schedule: backward_call(problem, *arrays, interpret=False, schedule=schedule),
            (query, key, value, cotangent),
            3 * query.nbytes + 4 * key.nbytes,
            rate,
        )


def forward_stages(consumers: int, stages: int, key_stages: int | None = None, **options: Any) -> dict:
    return {"consumers": consumers, "query_stages": stages, "key_stages": key_stages or stages, **options}


def backward_stages(consumers: int, stages: int, key_stages: int | None = None, **options: Any) -> dict:
    return {"consumers": consumers, "query_stages": stages, "key_stages": key_stages or stages, **options}


def main() -> None:
    device = jax.devices()[0]
    print(device.device_kind, "jax", jax.__version__, flush=True)
    for shape in CHECKED_SHAPES:
        try:
            check(shape)
        except Exception:
            print(f"check {shape}: FAILED\n{traceback.format_exc(limit=6)}", flush=True)
    rate = copy_rate()
    one, unsafe = {"separate_scores": False}, {"automatic_barriers": False}
    time_shape(
        *(8, 8, 128),
        [forward_stages(2, 4), forward_stages(3, 4), forward_stages(2, 4, **unsafe), forward_stages(3, 3)],
        [
            backward_stages(2, 3),
            backward_stages(2, 3, **unsafe),
            backward_stages(3, 3, **one),
            backward_stages(2, 2),
            backward_stages(1, 3),
        ],
        rate,
    )
    time_shape(
        *(16, 16, 64),
        [forward_stages(2, 8), forward_stages(3, 8), forward_stages(2, 8, **unsafe), forward_stages(3, 6)],
        [backward_stages(2, 6), backward_stages(3, 6, **one), backward_stages(2, 6, **unsafe), backward_stages(3, 3)],
        rate,
    )
    time_shape(*(8, 2, 128), [forward_stages(2, 6, 2)], [backward_stages(2, 4, 2), backward_stages(1, 3, 2)], rate)


if __name__ == "__main__":
    main()
