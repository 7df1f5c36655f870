"""Tests of gradients of small tables that scores read: both ways to sum them match float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag import fuse
from blockdiag.fusion.frontend.trace import flat_jaxpr
from blockdiag.fusion.passes import table_lookups as lookups

WAYS = {"by rows": lookups._by_rows, "by reads": lookups._by_reads}
MODES = {
    "clip": lambda table, indices: jnp.take(table, indices, axis=1, mode="clip"),
    "fill": lambda table, indices: jnp.take(table, indices, axis=1, mode="fill"),
    "promised": lambda table, indices: table.at[:, indices].get(mode="promise_in_bounds"),
    "first axis": lambda table, indices: table[indices],
}


def gather_of(function, *arguments):
    """Return the only gather equation of a function."""
    jaxpr, _ = flat_jaxpr(function, *arguments)
    (found,) = [equation for equation in jaxpr.jaxpr.eqns if equation.primitive.name == "gather"]
    return found


def exact_gradient(reads, indices, cotangent, rows):
    """Return float64 sums over the reads of each row; reads outside the table are clipped or ignored."""
    indices, cotangent = np.asarray(indices)[..., 0].ravel(), np.asarray(cotangent, np.float64)
    axes = [axis for axis in range(cotangent.ndim) if axis not in reads.offsets]
    lines = np.moveaxis(cotangent, axes, range(len(axes))).reshape(indices.size, -1)
    if reads.is_clipped:
        indices = indices.clip(0, rows - 1)
    return np.stack([lines[indices == row].sum(0) for row in range(rows)])


@pytest.mark.parametrize("way", [*WAYS, "by some rows"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("mode", MODES)
def test_table_gradient_matches_float64(mode, dtype, way, monkeypatch):
    if way == "by some rows":
        # Comparisons in parts, as for many gradients.
        monkeypatch.setattr(lookups, "_COMPARED_AT_ONCE", 0)
        way = "by rows"
    outside = 0 if mode in ("promised", "first axis") else 3
    axis, rows = (0, 5) if mode == "first axis" else (1, 21)
    table = jax.random.normal(jax.random.key(0), (5, 21, 2), dtype)
    indices = jax.random.randint(jax.random.key(1), (40, 37), -outside, rows + outside)
    equation = gather_of(MODES[mode], table, indices)
    assert lookups.reads_rows(equation)
    reads = lookups._Reads(equation)
    shape = equation.outvars[0].aval.shape
    cotangent = jax.random.normal(jax.random.key(2), shape, dtype)
    found = jax.jit(functools.partial(WAYS[way], reads))(table, indices[..., None], cotangent)
    assert found.dtype == dtype and found.shape == table.shape
    exact = exact_gradient(reads, indices[..., None], cotangent, rows)
    actual = np.moveaxis(np.asarray(found, np.float64), axis, 0).reshape(rows, -1)
    # Summed in float32: one rounding to the table's dtype, and those of some hundred summands.
    error = float(jnp.finfo(dtype).eps) + 100 * float(jnp.finfo(jnp.float32).eps)
    np.testing.assert_allclose(actual, exact, rtol=error, atol=error * np.abs(exact).max())


@pytest.mark.parametrize(
    "function",
    [
        lambda table, few: table[few[:4]],  # few reads of a row
        lambda table, many: jnp.take(jnp.tile(table, (2000, 1)), many, axis=0),  # many rows
        lambda table, many: table[many, many % 2],  # numbers, not rows
        lambda table, many: table.astype(jnp.int32)[many],  # no gradient
    ],
    ids=["few reads", "many rows", "numbers", "integers"],
)
def test_other_table_reads_are_left_to_xla(function):
    table, indices = jnp.ones((5, 2)), jnp.zeros(60_000, jnp.int32)
    assert not lookups.reads_rows(gather_of(function, table, indices))


def biased(query, key, value, table):
    """Return attention of operands [B, T, N, H] with a bias from table [buckets, N]."""
    distance = jnp.arange(query.shape[1])[:, None] - jnp.arange(key.shape[1])[None, :]
    bias = table[jnp.clip(distance + 4, 0, 8)].transpose(2, 0, 1)[None]
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5 + bias
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, axis=-1), value)


def test_table_gradient_within_fused_attention_matches_the_reference():
    query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 50, 2, 16))
    table = jax.random.normal(jax.random.key(1), (9, 2))
    assert lookups.reads_rows(gather_of(biased, query, key, value, table))

    def loss(function, table):
        return jnp.sum(jnp.sin(function(query, key, value, table)))

    gradient = jax.grad(loss, argnums=1)
    np.testing.assert_allclose(
        jax.jit(functools.partial(gradient, fuse(biased)))(table), gradient(biased, table), rtol=1e-4, atol=1e-5
    )


def test_table_gradient_under_vmap_and_grad_matches_the_reference():
    query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 50, 2, 16))
    tables = jax.random.normal(jax.random.key(1), (3, 9, 2))

    def gradient(function):
        return jax.grad(lambda table: jnp.sum(jnp.sin(function(query, key, value, table))))

    mapped = jax.jit(jax.vmap(gradient(fuse(biased))))(tables)
    np.testing.assert_allclose(mapped, jax.vmap(gradient(biased))(tables), rtol=1e-4, atol=1e-5)

    def again(function):
        return jax.grad(lambda table: jnp.sum(gradient(function)(table) ** 2))

    np.testing.assert_allclose(jax.jit(again(fuse(biased)))(tables[0]), again(biased)(tables[0]), rtol=1e-3, atol=1e-4)
