"""Gradients under `jax.vmap`: each index has separate gradients of mapped and unmapped operands."""

import functools
import importlib.util
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from blockdiag import explain, fuse
from tests.fusion.fusion_support import alternated
from tests.support import compiled_quickly

HAS_TRITON = importlib.util.find_spec("triton") is not None
NEEDS_TRITON = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
BOTH = pytest.mark.parametrize("implementation", ["xla", pytest.param("triton", marks=NEEDS_TRITON)])
INDICES, ROWS, QUERIES, KEYS, HEADS, WIDTH = 3, 2, 19, 37, 2, 16


def biased(query, key, value, bias, row, column, slope):
    """Attend with bias [N, T, S], row [B, T], column [N, S] and slope [].

    The query is [B, T, N, H], and key and value are [B, S, N, H].
    """
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * slope + bias[None]
    scores = scores - 0.5 * row[:, None, :, None] * scores + column[None, :, None, :]
    seen = jnp.arange(QUERIES)[:, None] + 5 >= jnp.arange(KEYS)[None, :]
    weights = jax.nn.softmax(jnp.where(seen[None, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bnts,bsnh->btnh", weights, value)


def of_distances(query, key, value, table):
    """Attend with a bias from table [rows, N], indexed by the distance between query and key."""
    apart = jnp.arange(QUERIES)[:, None] - jnp.arange(KEYS)[None, :]
    bias = table[jnp.clip(apart + 5, 0, len(table) - 1)].transpose(2, 0, 1)
    weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", query, key) + bias[None], axis=-1)
    return jnp.einsum("bnts,bsnh->btnh", weights, value)


def of_places(query, key, value, table):
    """Attend without a softmax and with a bias from table [rows, N], which is not indexed by a distance."""
    places = jnp.arange(QUERIES)[:, None] * jnp.arange(KEYS)[None, :] % len(table)
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) + table[places].transpose(2, 0, 1)[None]
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.sigmoid(scores), value)


def of_regions(query, key, value, factor, sink):
    """Attend in three regions: one with sink [N], and two softmaxes of its result combined by factor [N]."""
    scores = jnp.einsum("btnh,bsnh->bnts", query, key)
    sinks = jnp.broadcast_to(sink[None, :, None, None], (*scores.shape[:-1], 1))
    weights = jax.nn.softmax(jnp.concatenate([scores, sinks], axis=-1), axis=-1)[..., :-1]
    query = jnp.sin(jnp.einsum("bnts,bsnh->btnh", weights, value))
    scores = jnp.einsum("btnh,bsnh->bnts", query, key)
    weights = jax.nn.softmax(scores, axis=-1) - factor[None, :, None, None] * jax.nn.softmax(-scores, axis=-1)
    return jnp.einsum("bnts,bsnh->btnh", weights, value)


QUERY, KEY, VALUE = (ROWS, QUERIES, HEADS, WIDTH), (ROWS, KEYS, HEADS, WIDTH), (ROWS, KEYS, HEADS, WIDTH)
SHAPES = {
    biased: (QUERY, KEY, VALUE, (HEADS, QUERIES, KEYS), (ROWS, QUERIES), (HEADS, KEYS), ()),
    of_distances: (QUERY, KEY, VALUE, (9, HEADS)),
    of_places: (QUERY, KEY, VALUE, (7, HEADS)),
    of_regions: (QUERY, KEY, VALUE, (HEADS,), (HEADS,)),
}


def arrays(function, lead: tuple[int, ...] = (INDICES,)) -> list[np.ndarray]:
    """Return NumPy operands for each index of the mapped axes.

    NumPy takes and stacks them without a program for each shape.
    """
    generator = np.random.default_rng(0)
    return [(0.5 * generator.normal(size=(*lead, *x))).astype(np.float32) for x in SHAPES[function]]


def gradients(function, *inputs):
    """Return the gradients of a scalar with respect to every input."""
    return jax.grad(lambda *given: jnp.sum(jnp.sin(function(*given))), tuple(range(len(inputs))))(*inputs)


def assert_close(found, expected, tolerance=1e-5):
    least = 1e-2 * max(float(np.abs(x).max()) for x in jax.tree.leaves(expected))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance * max(least, np.abs(other).max()))


def in_a_loop(function, axes, *inputs):
    """Compute what `jax.vmap` computes, one index at a time."""
    size = next(len(x) for x, axis in zip(inputs, axes, strict=True) if axis == 0)
    each = [function(*(x if axis is None else x[i] for x, axis in zip(inputs, axes, strict=True))) for i in range(size)]
    return jax.tree.map(lambda *x: np.stack(x), *each)


@functools.cache
def plain(function):
    return compiled_quickly(functools.partial(gradients, function))


def assert_maps(function, axes, implementation):
    """Assert that `jax.vmap` of gradients over these axes (0 or None) matches a loop."""
    inputs = [x[0] if axis is None else x for x, axis in zip(arrays(function), axes, strict=True)]
    fused = functools.partial(gradients, fuse(function, implementation=implementation))
    found = compiled_quickly(jax.vmap(fused, axes))(*inputs)
    assert_close(found, in_a_loop(plain(function), axes, *inputs))


@pytest.mark.parametrize("place", range(len(SHAPES[biased])))
def test_vmap_of_grad_with_one_unmapped_operand_matches_a_loop(place):
    assert_maps(biased, tuple(None if i == place else 0 for i in range(len(SHAPES[biased]))), "xla")


@pytest.mark.parametrize(("function", "first", "implementation"), alternated(itertools.product(SHAPES, [0, None])))
def test_vmap_of_grad_with_unmapped_operands_matches_a_loop(function, first, implementation):
    """Every other operand is mapped, and then the others."""
    axes = (first, None if first == 0 else 0) * len(SHAPES[function])
    assert_maps(function, axes[: len(SHAPES[function])], implementation)


def test_functions_under_test_are_fused_and_cover_every_leaf_role():
    """Nothing of these functions' attention is left to XLA."""
    found = {function: explain(function)(*(x[0] for x in arrays(function))) for function in SHAPES}
    assert [len(x.regions) for x in found.values()] == [1, 1, 1, 3]
    roles = {leaf.role for x in found.values() for region in x.regions for leaf in region.leaves}
    assert roles == {"query", "key", "row", "column", "score", "distance", "scalar"}


@BOTH
def test_nested_vmap_of_grad_matches_a_loop(implementation):
    """No operand is mapped twice, and two are not mapped at all. Mapped axes are not the first ones."""
    query, key, value, table = (x[0] for x in arrays(of_distances))
    queries, tables = np.stack([query, -query, 2 * query]), np.stack([table, 1 - table])
    fused = functools.partial(gradients, fuse(of_distances, implementation=implementation))
    inner, outer = (0, None, None, None), (None, None, None, 0)
    mapped = jax.vmap(jax.vmap(fused, (1, None, None, None)), (None, None, None, 2))
    found = compiled_quickly(mapped)(np.moveaxis(queries, 0, 1), key, value, np.moveaxis(tables, 0, 2))
    by_index = functools.partial(in_a_loop, plain(of_distances), inner)
    assert_close(found, in_a_loop(by_index, outer, queries, key, value, tables))


@BOTH
def test_vmap_of_grad_of_vmap_matches_a_loop(implementation):
    """Gradients of unmapped operands are summed over the inner map, but not over the outer map."""
    query, key, value, table = (x[0] for x in arrays(of_distances))
    queries, tables = np.stack([query, -query]), np.stack([table, 1 - table, table / 2])

    def of_queries(function, *inputs):
        return jax.vmap(function, (0, None, None, None))(*inputs)

    def each(function):
        return functools.partial(gradients, functools.partial(of_queries, function))

    fused = fuse(of_distances, implementation=implementation)
    axes = (None, None, None, 0)
    found = compiled_quickly(jax.vmap(each(fused), axes))(queries, key, value, tables)
    assert_close(found, in_a_loop(compiled_quickly(each(of_distances)), axes, queries, key, value, tables))


@pytest.mark.division("vmap", operation="fuse", kind="manual")
def test_vmap_of_grad_inside_shard_map_matches_the_reference():
    """Gradients of replicated operands must be sums over devices, as the checks of the mesh require."""
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:2])
    axes, specs = (0, None, 0, None), (P("rows"), P(), P("rows"), P())
    given = [x[0] if axis is None else x for x, axis in zip(arrays(of_distances, (4,)), axes, strict=True)]

    def sharded(function):
        mapped = jax.vmap(functools.partial(gradients, function), axes)
        return compiled_quickly(jax.shard_map(mapped, mesh=mesh, in_specs=specs, out_specs=specs))(*given)

    assert_close(sharded(fuse(of_distances, implementation="xla")), sharded(of_distances))


@BOTH
def test_jacrev_matches_the_reference(implementation):
    """Only cotangents are mapped."""
    query, key, value, table = (x[0] for x in arrays(of_distances))

    def few(function, table):
        return jnp.sin(function(query, key, value, table)).sum((0, 2, 3))[:3]

    fused = fuse(of_distances, implementation=implementation)
    found = compiled_quickly(jax.jacrev(functools.partial(few, fused)))(table)
    assert_close(found, compiled_quickly(jax.jacrev(functools.partial(few, of_distances)))(table))


@NEEDS_TRITON
def test_grad_of_vmap_reduces_a_shared_bias_gradient_in_kernels():
    """The gradient of a map has no array of the shared bias gradient for each index. A map of gradients has one."""
    query, key, value, bias, *rest = [x if i < 3 else x[0] for i, x in enumerate(arrays(biased))]
    fused = fuse(biased, implementation="triton")

    def total(bias, *inputs):
        return jnp.sum(fused(*inputs, bias, *rest))

    def of_map(bias):
        return jnp.sum(jax.vmap(total, (None, 0, 0, 0))(bias, query, key, value))

    each = f"f32[{INDICES},{HEADS},{QUERIES},{KEYS}]"
    assert each not in str(jax.make_jaxpr(jax.grad(of_map))(bias))
    assert each in str(jax.make_jaxpr(jax.vmap(jax.grad(total), (None, 0, 0, 0)))(bias, query, key, value))


@BOTH
def test_grad_of_vmap_with_a_shared_bias_matches_a_loop(implementation):
    given = [x if i < 3 else x[0] for i, x in enumerate(arrays(biased))]
    axes = (0, 0, 0, None, None, None, None)
    fused = fuse(biased, implementation=implementation)
    found = compiled_quickly(functools.partial(gradients, lambda *x: jax.vmap(fused, axes)(*x)))(*given)
    each = in_a_loop(plain(biased), axes, *given)
    assert_close(found, [x if axis == 0 else x.sum(0) for x, axis in zip(each, axes, strict=True)])
