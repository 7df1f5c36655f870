"""Tests of squared distances between 16-bit points, which regions compute as products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag import fuse
from blockdiag.fusion.ir.tree import nodes_of
from blockdiag.fusion.program import trace
from blockdiag.triton_kernels.launch.plan import Target
from tests.fusion.codegen.test_plans import launches_of
from tests.support import compiled_quickly
from tests.triton_kernels.plans_support import report_of

BATCH, QUERIES, KEYS, HEADS, FEATURES, POINTS = 2, 19, 37, 2, 8, 3


def between(query_points, key_points):
    return jnp.sum((query_points[:, :, None] - key_points[:, None]) ** 2, axis=(-2, -1))  # [B, T, S, N]


def attention(query, key, query_points, key_points, slope):
    scores = jnp.einsum("btnh,bsnh->btsn", query, key) * FEATURES**-0.5
    scores = scores - 0.1 * jax.nn.softplus(slope)[None, None, None] * between(query_points, key_points)
    return jnp.einsum("btsn,bsnh->btnh", jax.nn.softmax(scores, axis=2), key)


def turned(query, key, query_points, key_points, slope):
    """Write distances as products of equal factors, with heads first, key points without heads and a mask."""
    key_points = key_points[:, :, 0].reshape(BATCH, KEYS, -1)
    difference = key_points[:, None, None] - query_points.swapaxes(1, 2).reshape(BATCH, HEADS, QUERIES, 1, -1)
    distances = jnp.sum(difference * difference, axis=-1)  # [B, N, T, S]
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) - distances / jnp.exp(slope)[None, :, None, None]
    seen = jnp.arange(QUERIES)[:, None] + 9 >= jnp.arange(KEYS)[None, :]
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(jnp.where(seen[None, None], scores, -jnp.inf)), key)


def bells(query, key, query_points, key_points, slope):
    """Return attention with weights that depend on distances alone, without a softmax."""
    weights = jnp.exp(-jnp.square(slope)[None, None, None] * between(query_points, key_points))
    return jnp.einsum("btsn,bsnh->btnh", weights, key) + query


def rooted(query, key, query_points, key_points, slope):
    """Take the root of distances, which magnifies errors in small ones."""
    scores = jnp.einsum("btnh,bsnh->btsn", query, key) - jnp.sqrt(between(query_points, key_points) + 1e-3)
    return jnp.einsum("btsn,bsnh->btnh", jax.nn.softmax(scores, axis=2), key * slope[None, None, :, None])


def returned(query, key, query_points, key_points, slope):
    distances = between(query_points, key_points)
    scores = jnp.einsum("btnh,bsnh->btsn", query, key) - distances
    return jnp.einsum("btsn,bsnh->btnh", jax.nn.softmax(scores, axis=2), key * slope[None, None, :, None]), distances


def operands(dtype, *, offset=0.0):
    """Return the same numbers, which bfloat16 represents exactly, in any dtype."""
    generator = np.random.default_rng(0)
    shapes = [
        (BATCH, QUERIES, HEADS, FEATURES), (BATCH, KEYS, HEADS, FEATURES), (BATCH, QUERIES, HEADS, POINTS, 3),
        (BATCH, KEYS, HEADS, POINTS, 3), (HEADS,),
    ]  # fmt: skip
    found = [generator.normal(size=shape) + (offset if len(shape) == 5 else 0.0) for shape in shapes]
    return [jnp.asarray(np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64), dtype) for x in found]


def products_of(function, dtype):
    """Return the number of products in the scores of each region of a function."""
    found = trace(function, operands(dtype), {}).regions
    regions = [region for regions in found.values() for region in regions]
    return [sum(x.kind == "product" for x in nodes_of(x.score, x.weight)) for x in regions]


def results(function, arguments):
    cotangent = np.random.default_rng(1).normal(size=(BATCH, QUERIES, HEADS, FEATURES))

    def compute(*arguments):
        output, pull = jax.vjp(function, *arguments)
        return output, *pull(jnp.asarray(cotangent, output.dtype))

    return [np.asarray(x, np.float64) for x in compiled_quickly(compute)(*arguments)]


def errors(function, implementation, offset):
    """Yield errors of the fused and of the plain function in bfloat16, for the result and each gradient."""
    with jax.enable_x64(True):
        exact = results(function, operands(jnp.float64, offset=offset))
    arguments = operands(jnp.bfloat16, offset=offset)
    for one, plain, true in zip(
        results(fuse(function, implementation=implementation), arguments),
        results(function, arguments),
        exact,
        strict=True,
    ):
        size = np.sqrt(np.mean(true**2))
        yield tuple(np.sqrt(np.mean((x - true) ** 2)) / size for x in (one, plain))


@pytest.mark.parametrize(("function", "count"), [(attention, 2), (turned, 2), (bells, 1)])
@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_squared_distances_of_bfloat16_points_are_computed_as_products(function, count, implementation):
    assert products_of(function, jnp.bfloat16) == [count]
    for ours, plain in errors(function, implementation, 0.0):
        assert ours < max(1e-2, 1.2 * plain)


@pytest.mark.parametrize("offset", [8.0, 30.0])
def test_squared_distances_far_from_the_origin_are_accurate(offset):
    for ours, plain in errors(attention, "xla", offset):
        assert ours < plain


def test_squared_distances_of_float32_points_stay_differences():
    assert products_of(attention, jnp.float32) == [1]


@pytest.mark.parametrize("function", [rooted, returned])
def test_squared_distances_used_elsewhere_stay_differences(function):
    assert products_of(function, jnp.bfloat16) == [1]


def test_squared_distance_kernels_do_not_spill_in_loops():
    points = jax.ShapeDtypeStruct((2, 256, 4, 4, 3), jnp.bfloat16)
    query = jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.bfloat16)
    slope = jax.ShapeDtypeStruct((4,), jnp.bfloat16)
    ((region,),) = trace(rooted, (query, query, points, points, slope), {}).regions.values()
    found = launches_of(region)
    for name in ("fused_forward", "fused_rows"):
        report = report_of(found[name].plan(Target.for_arch(90)), 90)
        assert not any(depth > 0 and count for depth, count in report.local_accesses.items()), str(report)
