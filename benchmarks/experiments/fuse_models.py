"""Times and temporary memory of a training step of small models, as they stand and fused as a whole.

    PYTHONPATH=src python -m benchmarks.experiments.fuse_models models.csv

Each row is the median of calls one after the other by wall clock, compiled by `jax.jit` with XLA's defaults.
"""

import csv
import datetime
import importlib.metadata
import statistics
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import lax

from blockdiag import fuse

BATCH, TOKENS, LAYERS, HEADS, WIDTH = 4, 4096, 8, 16, 64
CHANNELS = HEADS * WIDTH
CALLS = 25


def attention(query, key, value, mask, bias):
    """query, key and value [B, T, N, H], mask [B, 1, T, T], bias [1, N, T, T]."""
    scores = jnp.einsum("btnh,bsnh->bnts", query, key, preferred_element_type=jnp.float32) * WIDTH**-0.5 + bias
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1).astype(value.dtype)
    return jnp.einsum("bnts,bsnh->btnh", weights, value)


def heads_of(x, weights):
    """Queries, keys and values [B, T, N, H] of x [B, T, C]."""
    return jnp.split((x @ weights["into"]).reshape(*x.shape[:2], 3 * HEADS, WIDTH), 3, axis=2)


def norm(x):
    """Rows of unit mean square."""
    return x * lax.rsqrt(jnp.mean(x.astype(jnp.float32) ** 2, -1, keepdims=True) + 1e-6).astype(x.dtype)


def packed_layers(weights, x, segments, table):
    """A scan over layers that are computed again for gradients; causal documents and T5's bias, made before it."""
    places = jnp.arange(x.shape[1])
    mask = (segments[:, :, None] == segments[:, None, :]) & (places[:, None] >= places[None, :])[None]
    bias = table[jnp.clip(places[:, None] - places[None, :], 0, len(table) - 1)].transpose(2, 0, 1)[None]

    @jax.checkpoint
    def layer(x, weights):
        mixed = attention(*heads_of(norm(x), weights), mask[:, None], bias)
        x = x + mixed.reshape(x.shape) @ weights["out"]
        return x + jax.nn.gelu(norm(x) @ weights["up"]) @ weights["down"], None

    return lax.scan(layer, x, weights)[0]


def with_memory(weights, x, segments, table):
    """One softmax over a memory of half as many keys, and over the sequence up to each token."""
    del segments, table
    query, key, value = heads_of(x, jax.tree.map(lambda x: x[0], weights))
    size = x.shape[1] // 2
    far_key, far_value = 0.5 * key[:, :size], value[:, :size] + 1
    scores = [
        jnp.einsum("btnh,bsnh->bnts", query, y, preferred_element_type=jnp.float32) * WIDTH**-0.5
        for y in (far_key, key)
    ]
    scores[1] = jnp.where(jnp.tri(x.shape[1], dtype=bool), scores[1], -jnp.inf)
    weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1).astype(value.dtype)
    parts = zip((weights[..., :size], weights[..., size:]), (far_value, value), strict=True)
    return sum(jnp.einsum("bnts,bsnh->btnh", x, y) for x, y in parts)


def inputs():
    """Weights of all layers, x [B, T, C], segments [B, T] and a table of biases [32, N]."""
    keys = iter(jax.random.split(jax.random.key(0), 7))

    def normal(*shape):
        return (jax.random.normal(next(keys), shape) * shape[-2] ** -0.5).astype(jnp.bfloat16)

    shapes = {"into": (CHANNELS, 3 * CHANNELS), "out": (CHANNELS, CHANNELS), "up": (CHANNELS, 4 * CHANNELS),
              "down": (4 * CHANNELS, CHANNELS)}  # fmt: skip
    weights = {name: normal(LAYERS, *shape) for name, shape in shapes.items()}
    segments = jnp.sort(jax.random.randint(next(keys), (BATCH, TOKENS), 0, 6), axis=-1)
    return weights, normal(BATCH, TOKENS, CHANNELS), segments, jax.random.normal(next(keys), (32, HEADS))


def compiled(function, weights, x, segments, table):
    """A step: the loss and the gradients of weights, x and the table; and the seconds that it took to compile."""

    def loss(weights, x, table):
        return jnp.mean(function(weights, x, segments, table).astype(jnp.float32) ** 2)

    start = time.perf_counter()
    step = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).lower(weights, x, table).compile()
    return step, time.perf_counter() - start


def rows_of(function, given):
    """What is measured of a model, as it stands and fused, their calls in turn."""
    weights, x, _, table = given
    steps = {name: compiled(f, *given) for name, f in (("jax-jit", function), ("triton", fuse(function)))}
    losses = {name: float(step(weights, x, table)[0]) for name, (step, _) in steps.items()}
    times = {name: [] for name in steps}
    for _ in range(CALLS):
        for name, (step, _) in steps.items():
            start = time.perf_counter()
            jax.block_until_ready(step(weights, x, table))
            times[name].append(1e3 * (time.perf_counter() - start))
    for name, (step, seconds) in steps.items():
        yield {
            "model": function.__name__,
            "implementation": name,
            "median_ms": statistics.median(times[name]),
            "temporary_bytes": step.memory_analysis().temp_size_in_bytes,
            "compile_s": seconds,
            "loss": losses[name],
        }


def write(path, rows):
    """Write a table, with what was measured on and with."""
    shared = {"device": jax.devices()[0].device_kind, "date": datetime.date.today().isoformat()}
    shared |= {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "triton")}
    rows = [row | shared for row in rows]
    with Path(path).open("w", newline="") as file:
        table = csv.DictWriter(file, rows[0], lineterminator="\n")
        table.writeheader()
        table.writerows(rows)


if __name__ == "__main__":
    operands = inputs()
    write(sys.argv[1], [row for function in (packed_layers, with_memory) for row in rows_of(function, operands)])
