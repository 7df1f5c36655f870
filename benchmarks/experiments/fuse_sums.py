"""Times and temporary memory of attention whose scores are sums over features that are no products of matrices.

    PYTHONPATH=src python -m benchmarks.experiments.fuse_sums sums.csv

Each row is the median of calls one after the other by wall clock, as the function stands under `jax.jit` and fused, in
turn.
"""

import statistics
import sys
import time

import jax
import jax.numpy as jnp

from benchmarks.experiments.fuse_models import write
from blockdiag import fuse

BATCH, TOKENS, HEADS, WIDTH = 1, 2048, 8, 64
CALLS = 15


def attended(scores, value):
    """scores [B, N, T, S], value [B, S, N, H]."""
    weights = jax.nn.softmax(scores.astype(jnp.float32), axis=-1).astype(value.dtype)
    return jnp.einsum("bnts,bsnh->btnh", weights, value)


def additive(query, key, value, out):
    """query, key, value [B, T, N, H], out [N, H]: Bahdanau et al., 2015."""
    return attended(jnp.einsum("btsnh,nh->bnts", jnp.tanh(query[:, :, None] + key[:, None]), out), value)


def graph_attention(query, key, value, out):
    """query, key, value [B, T, N, H], out [N, H]: Brody et al., 2022."""
    pairs = jax.nn.leaky_relu(query[:, :, None] + key[:, None], 0.2)
    return attended(jnp.einsum("btsnh,nh->bnts", pairs, out), value)


def compiled(function, given):
    """A compiled function and the seconds that this took."""
    start = time.perf_counter()
    step = jax.jit(function).lower(*given).compile()
    return step, time.perf_counter() - start


def with_gradients(function):
    """The gradients of all operands."""
    return jax.grad(lambda *given: jnp.sum(jnp.square(function(*given).astype(jnp.float32))), (0, 1, 2, 3))


def rows_of(function, given):
    """What is measured of a function."""
    both = {"jax-jit": function, "triton": fuse(function, implementation="triton")}
    for kind, change in (("forward", lambda x: x), ("forward and gradients", with_gradients)):
        steps = {name: compiled(change(f), given) for name, f in both.items()}
        times = {name: [] for name in steps}
        for step, _ in steps.values():
            jax.block_until_ready(step(*given))
        for _ in range(CALLS):
            for name, (step, _) in steps.items():
                start = time.perf_counter()
                jax.block_until_ready(step(*given))
                times[name].append(1e3 * (time.perf_counter() - start))
        for name, (step, seconds) in steps.items():
            yield {
                "function": function.__name__,
                "pass": kind,
                "implementation": name,
                "median_ms": statistics.median(times[name]),
                "temporary_bytes": step.memory_analysis().temp_size_in_bytes,
                "compile_s": seconds,
            }


def inputs():
    """query, key, value [B, T, N, H] and out [N, H]."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(BATCH, TOKENS, HEADS, WIDTH)] * 3 + [(HEADS, WIDTH)]
    return [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)]


if __name__ == "__main__":
    operands = inputs()
    write(sys.argv[1], [row for function in (additive, graph_attention) for row in rows_of(function, operands)])
