"""The Mosaic GPU kernels in Pallas's CPU interpreter, against the reference, and their lowering for CUDA without a GPU.

The interpreter hands out device and shared memory filled with NaN, so an element that is never written is found.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag.common.rotary_problem import RotaryProblem
from blockdiag.ops.block_diagonal import pallas as block_diagonal
from blockdiag.ops.block_diagonal import reference
from blockdiag.ops.block_diagonal.problem import BlockDiagonalProblem
from blockdiag.pallas_kernels.block_diagonal.backward import BackwardSchedule, backward_call
from blockdiag.pallas_kernels.block_diagonal.backward import default_schedule as default_backward_schedule
from blockdiag.pallas_kernels.block_diagonal.forward import ForwardSchedule, forward_call
from blockdiag.pallas_kernels.block_diagonal.forward import default_schedule as default_forward_schedule
from blockdiag.pallas_kernels.pipeline import SHARED_BUDGET_BYTES
from tests.support import compiled_quickly

BLOCK_SIZE = 64
# The largest error, relative to the largest element: one rounding of the result and one of P or dS before a product.
TOLERANCE = {"bfloat16": 2e-2, "float16": 3e-3}


def make_problem(
    blocks: int = 2,
    query_heads: int = 1,
    key_heads: int = 1,
    head_dim: int = 64,
    *,
    dtype: str = "bfloat16",
    is_causal: bool = False,
    scale: float | None = None,
    sequences: int = 1,
) -> BlockDiagonalProblem:
    """Return a problem of full tiles in `sequences` sequences of `blocks` blocks each."""
    return BlockDiagonalProblem(
        tokens=sequences * blocks * BLOCK_SIZE,
        query_heads=query_heads,
        key_heads=key_heads,
        head_dim=head_dim,
        dtype=dtype,
        block_size=BLOCK_SIZE,
        sequence_length=blocks * BLOCK_SIZE,
        num_tiles=sequences * blocks,
        is_causal=is_causal,
        scale=head_dim**-0.5 if scale is None else scale,
    )


def make_arrays(problem: BlockDiagonalProblem, seed: int = 0) -> tuple[jax.Array, ...]:
    """Return random query, key, value and output cotangent."""
    heads = (problem.query_heads, problem.key_heads, problem.key_heads, problem.query_heads)
    return tuple(
        jax.random.normal(random_key, (problem.tokens, count, problem.head_dim), jnp.dtype(problem.dtype))
        for random_key, count in zip(jax.random.split(jax.random.key(seed), 4), heads, strict=True)
    )


def compute(implementation, problem: BlockDiagonalProblem, query, key, value, cotangent, **options) -> list[jax.Array]:
    """Return output, dQ, dK and dV."""
    output = implementation.forward(problem, query, key, value, None, None, **options)
    gradients = implementation.backward(problem, query, key, value, None, None, cotangent, **options)
    return [output, *gradients]


@functools.cache
def compiled(implementation, problem: BlockDiagonalProblem, **options) -> Callable[..., list[jax.Array]]:
    """Return `compute` as a function of the arrays, compiled once for all tests of a problem."""
    return compiled_quickly(functools.partial(compute, implementation, problem, **options))


def run(implementation, problem: BlockDiagonalProblem, arrays: tuple[jax.Array, ...], **options) -> list[jax.Array]:
    return compiled(implementation, problem, **options)(*arrays)


def expected(problem: BlockDiagonalProblem, arrays: tuple[jax.Array, ...]) -> list[jax.Array]:
    """Return the results of the reference in float32, which rounds nowhere."""
    wide = dataclasses.replace(problem, dtype="float32")
    return run(reference, wide, tuple(array.astype(jnp.float32) for array in arrays))


def assert_close(results: list[jax.Array], wanted: list[jax.Array], tolerance: float) -> None:
    for name, result, want in zip(("output", "dq", "dk", "dv"), results, wanted, strict=True):
        assert result.shape == want.shape
        # NumPy compiles nothing.
        error = np.abs(np.asarray(result, np.float32) - want).max()
        assert error <= tolerance * np.abs(want).max(), f"{name}: {error}"


SUPPORTED = {
    "plain": make_problem(3, 2, 2),
    "one block, one head": make_problem(1, 1, 1),
    "causal float16": make_problem(dtype="float16", is_causal=True),
    "causal head_dim 128": make_problem(head_dim=128, is_causal=True),
    "two sequences, odd head count, large scale": make_problem(1, 3, 3, sequences=2, scale=1.5),
    "grouped": make_problem(2, 6, 2),
    "multi-query head_dim 128, causal": make_problem(2, 3, 1, 128, is_causal=True),
    "head_dim 192": make_problem(2, 1, 1, 192),
    "head_dim 256": make_problem(2, 1, 1, 256, is_causal=True),
}


@pytest.mark.parametrize("name", SUPPORTED)
def test_output_and_gradients_equal_the_reference(name):
    problem = SUPPORTED[name]
    assert block_diagonal.supports(problem) is None
    arrays = make_arrays(problem)
    results = run(block_diagonal, problem, arrays, interpret=True)
    assert all(result.dtype == jnp.dtype(problem.dtype) for result in results)
    assert_close(results, expected(problem, arrays), TOLERANCE[problem.dtype])


def unsupported_problems() -> dict[str, BlockDiagonalProblem]:
    plain = make_problem(3, 2, 2)
    rotary = RotaryProblem(
        interleaved=False,
        query=True,
        key=True,
        value=False,
        table_rows=192,
        table_dtype="float32",
        positions="sequence",
    )
    return {
        "dtype": dataclasses.replace(plain, dtype="float32"),
        "block_size": dataclasses.replace(plain, block_size=32, num_tiles=6),
        "tile table": dataclasses.replace(plain, sequence_length=None),
        "multiple of block_size": dataclasses.replace(plain, tokens=190, sequence_length=190),
        "head_dim": dataclasses.replace(plain, head_dim=80),
        "at most 256": dataclasses.replace(plain, head_dim=320),
        "128 when query heads share": make_problem(2, 4, 2, 192),
        "rotary": dataclasses.replace(plain, rotary=rotary),
        "0 tokens": dataclasses.replace(plain, tokens=0, num_tiles=0),
    }


@pytest.mark.parametrize("word", unsupported_problems())
def test_unsupported_problems_are_declined_with_a_remedy(word):
    problem = unsupported_problems()[word]
    reason = block_diagonal.supports(problem)
    assert reason is not None
    assert word in reason
    assert "use implementation=" in reason
    arrays = make_arrays(problem)
    with pytest.raises(NotImplementedError, match="use implementation="):
        block_diagonal.forward(problem, *arrays[:3], None, None, interpret=True)
    with pytest.raises(NotImplementedError, match="use implementation="):
        block_diagonal.backward(problem, *arrays[:3], None, None, arrays[3], interpret=True)


def test_unexpected_tiles_raise_value_error():
    problem = make_problem(1, 1, 1)
    arrays = make_arrays(problem)
    with pytest.raises(ValueError, match="tiles"):
        block_diagonal.forward(problem, *arrays[:3], jnp.zeros((1, 3), jnp.int32), None, interpret=True)


def test_kernels_are_available_where_jax_has_mosaic_gpu():
    assert block_diagonal.available() is None


@pytest.mark.parametrize(
    ("consumers", "key_stages", "query_stages", "programs", "key_heads"),
    [(1, 1, 1, 2, 3), (3, 4, 4, 2, 3), (2, 3, 4, 1, 1)],
)
def test_results_do_not_depend_on_the_schedule(consumers, key_stages, query_stages, programs, key_heads):
    problem = make_problem(3, 3, key_heads, is_causal=True)
    arrays = make_arrays(problem)
    stages = {"consumers": consumers, "key_stages": key_stages, "query_stages": query_stages}
    options = {"interpret": True, "programs": programs}

    @compiled_quickly
    def scheduled(query, key, value, cotangent):
        output = forward_call(problem, query, key, value, schedule=ForwardSchedule(**stages), **options)
        schedule = BackwardSchedule(**stages, separate_scores=consumers != 3)
        return output, *backward_call(problem, query, key, value, cotangent, schedule=schedule, **options)

    for result, want in zip(scheduled(*arrays), run(block_diagonal, problem, arrays, interpret=True), strict=True):
        assert (result == want).all()


def test_repeated_calls_agree_bitwise():
    problem = SUPPORTED["plain"]
    arrays = make_arrays(problem)
    first, second = (run(block_diagonal, problem, arrays, interpret=True) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert (one == other).all()


POISONED = make_problem(3, 1, 1)


@pytest.mark.parametrize("poison", [jnp.nan, jnp.inf])
def test_nan_and_inf_stay_in_their_block(poison):
    problem = POISONED
    arrays = make_arrays(problem)
    poisoned = tuple(array.at[BLOCK_SIZE : 2 * BLOCK_SIZE].set(poison) for array in arrays)
    clean = run(block_diagonal, problem, arrays, interpret=True)
    for result, want in zip(run(block_diagonal, problem, poisoned, interpret=True), clean, strict=True):
        for rows in (slice(0, BLOCK_SIZE), slice(2 * BLOCK_SIZE, None)):
            assert (result[rows] == want[rows]).all()
        assert jnp.isnan(result[BLOCK_SIZE : 2 * BLOCK_SIZE]).any()


@pytest.mark.parametrize("name", SUPPORTED)
def test_default_schedules_fit_in_shared_memory(name):
    problem = SUPPORTED[name]
    assert default_forward_schedule(problem).shared_bytes(problem) <= SHARED_BUDGET_BYTES
    assert default_backward_schedule(problem).shared_bytes(problem) <= SHARED_BUDGET_BYTES


@pytest.mark.parametrize("name", ["plain", "grouped", "causal head_dim 128", "head_dim 256"])
def test_calls_lower_for_cuda_without_a_gpu_to_one_kernel_and_nothing_else(name):
    """Keys and values are not repeated or copied, and device memory has no scratch space."""
    problem = SUPPORTED[name]
    query, key, value, cotangent = make_arrays(problem)
    calls = {
        "block_diagonal_forward": (
            lambda *arrays: block_diagonal.forward(problem, *arrays, None, None),
            (query, key, value),
        ),
        "block_diagonal_backward": (
            lambda query, key, value, cotangent: block_diagonal.backward(
                problem, query, key, value, None, None, cotangent
            ),
            (query, key, value, cotangent),
        ),
    }
    for call, arrays in calls.values():
        text = jax.jit(call).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("stablehlo.custom_call @mosaic_gpu_v2") == 1
        assert "stablehlo.broadcast" not in text
        assert "stablehlo.concatenate" not in text
        assert f"tensor<{problem.tokens}x{problem.tokens}" not in text


def test_results_vary_over_the_axes_of_a_shard_map_as_the_inputs_do():
    problem = make_problem(1)
    arrays = make_arrays(problem)
    mesh = jax.make_mesh((1,), ("shards",), axis_types=(jax.sharding.AxisType.Auto,))

    def body(*arrays):
        results = compute(block_diagonal, problem, *arrays, interpret=True)
        assert all(jax.typeof(result).manual_axis_type.varying == {"shards"} for result in results)
        return tuple(results)

    specification = jax.sharding.PartitionSpec("shards")
    jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specification, out_specs=specification)).trace(*arrays)
