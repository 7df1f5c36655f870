"""Tests that several products with the same weights become one region of concatenated values."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from blockdiag import explain, fuse
from blockdiag.fusion.program import trace
from tests.fusion.fusion_support import alternated
from tests.support import compiled_quickly

BOTH = pytest.mark.parametrize("implementation", ["xla", "triton"])
BATCH, QUERIES, KEYS, HEADS, FEATURES, VALUES, POINTS = 2, 19, 37, 2, 8, 6, 3


@functools.cache
def operands(dtype: str = "float32") -> tuple[jax.Array, ...]:
    """Return a query, a key, values, points and a gate."""
    generator = np.random.default_rng(0)
    shapes = [
        (BATCH, QUERIES, HEADS, FEATURES), (BATCH, KEYS, HEADS, FEATURES), (BATCH, KEYS, HEADS, VALUES),
        (HEADS, POINTS, BATCH, KEYS, 3), (BATCH, QUERIES, HEADS, VALUES),
    ]  # fmt: skip
    return tuple(jnp.asarray(generator.normal(size=shape), dtype) for shape in shapes)


def weights_of(query, key):
    return jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", query, key) * FEATURES**-0.5)


def two(query, key, value, points, gate):
    """Use the first result before the second product's values exist, with axes in different orders."""
    weights = weights_of(query, key)
    outputs = jnp.einsum("bnts,bsnv->btnv", weights, value) * jax.nn.sigmoid(gate)
    return outputs.reshape(BATCH, QUERIES, -1), jnp.einsum("npbsx,bnts->xtbnp", jnp.sin(points), weights)


def three(query, key, value, points, gate):
    """Return three products, one of which has one number per key and head as its value."""
    weights = weights_of(query, key).swapaxes(2, 3)
    outputs = jnp.einsum("bnst,bsnv->nbtv", weights, value)
    sums = jnp.einsum("bnst,bsn->bnt", weights, value[..., 0] + value[..., 1])
    return outputs * gate.transpose(2, 0, 1, 3), sums, jnp.einsum("npbsx,bnst->btnpx", points, weights)


def twice(query, key, value, points, gate):
    """Compute the softmax anew for each product."""
    first = jnp.einsum("bnts,bsnv->btnv", weights_of(query, key), value)
    return first * gate, jnp.einsum("bnts,npbsx->btnpx", weights_of(query, key), points)


def differential(query, key, value, points, gate):
    weights = weights_of(query, key) - gate[0, 0, 0, 0] * weights_of(query[::-1], key[::-1])
    return jnp.einsum("bnts,bsnv->btnv", weights, value), jnp.einsum("bnts,npbsx->btnpx", weights, points)


def masked_sigmoid(query, key, value, points, gate):
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) + gate[:, :, :, 0].mT[..., None].swapaxes(1, 2).swapaxes(1, 2)
    seen = jnp.arange(QUERIES)[:, None] + 5 >= jnp.arange(KEYS)[None, :]
    weights = jnp.where(seen[None, None], jax.nn.sigmoid(scores), 0)
    return jnp.einsum("bnts,bsnv->btnv", weights, value), jnp.einsum("bnts,npbsx->btnpx", weights, points)


def whole_layer(query, key, value, points, gate):
    """Compute two pairs of products that depend on each other, so that only one pair can be merged."""
    weights, others = weights_of(query, key), weights_of(query * 2, key + 1)
    first = jnp.einsum("bnts,bsnv->btnv", weights, value)
    second = jnp.einsum("bnts,bsnv->btnv", others, value + first.mean(1)[:, None])
    third = jnp.einsum("bnts,bsnv->btnv", weights, value * second.mean(1)[:, None])
    return first * gate, third, jnp.einsum("bnts,npbsx->btnpx", others, points)


# The number of regions; a combination of two softmaxes has two.
JOINED = {two: 1, three: 1, twice: 1, differential: 2, masked_sigmoid: 1, whole_layer: 3}


def chained(query, key, value, points, gate):
    """Make values from another product's result."""
    weights = weights_of(query, key)
    outputs = jnp.einsum("bnts,bsnv->btnv", weights, value)
    return outputs * gate, jnp.einsum("bnts,bsnv->btnv", weights, value + outputs.sum(1)[:, None])


def shared_values(query, key, value, points, gate):
    """One product's values are the same for all heads."""
    weights = weights_of(query, key)
    return jnp.einsum("bnts,bsnv->btnv", weights, value), jnp.einsum("bnts,bsv->btnv", weights, value[:, :, 0]) * gate


def stopped(query, key, value, points, gate):
    """One product's weights are not differentiated."""
    weights = weights_of(query, key)
    still = jax.lax.stop_gradient(weights)
    return jnp.einsum("bnts,bsnv->btnv", weights, value), jnp.einsum("bnts,npbsx->btnpx", still, points)


def other_combination(query, key, value, points, gate):
    one, other = weights_of(query, key), weights_of(query[::-1], key[::-1])
    outputs = jnp.einsum("bnts,bsnv->btnv", one - 0.5 * other, value)
    return outputs, jnp.einsum("bnts,npbsx->btnpx", one - 0.25 * other, points)


def divided(query, key, value, points, gate):
    """The softmax's sum divides each result."""
    powers = jnp.exp(jnp.einsum("btnh,bsnh->bnts", query, key) * 0.1)
    total = powers.sum(-1)[..., None]
    return jnp.einsum("bnts,bsnv->bntv", powers, value) / total, jnp.einsum("bnts,npbsx->bntpx", powers, points)[
        ..., 0
    ] / total


def too_wide(query, key, value, points, gate):
    weights = weights_of(query, key)
    wide = jnp.tile(points, (1, 1, 1, 1, 84))
    return jnp.einsum("bnts,bsnv->btnv", weights, value), jnp.einsum("bnts,nbsx->btnx", weights, wide[:, 0])


APART = {chained: 2, shared_values: 2, stopped: 2, other_combination: 4, divided: 2, too_wide: 2}


def regions_of(function: Callable[..., Any], *arguments: Any) -> list[Any]:
    found = trace(function, arguments or operands(), {}).regions
    return [region for regions in found.values() for region in regions]


def results(function: Callable[..., Any], arguments: Any, cotangents: Any) -> Any:
    """Return results and the gradients of all operands."""

    @compiled_quickly
    def compute(arguments: Any, cotangents: Any) -> Any:
        outputs, pull = jax.vjp(function, *arguments)
        return outputs, pull(cotangents)

    return compute(arguments, cotangents)


@functools.cache
def cotangents_of(function: Callable[..., Any]) -> Any:
    generator = np.random.default_rng(1)
    shapes = jax.eval_shape(function, *operands())
    return jax.tree.map(lambda x: np.asarray(generator.normal(size=x.shape), np.float32), shapes)


@functools.cache
def exact(function: Callable[..., Any]) -> Any:
    """Return results and gradients in float64."""
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: np.asarray(x, np.float64), (operands(), cotangents_of(function)))
        return jax.tree.map(np.asarray, results(function, *wide))


def check(function: Callable[..., Any], implementation: str) -> None:
    found = results(fuse(function, implementation=implementation), operands(), cotangents_of(function))
    for one, true in zip(jax.tree.leaves(found), jax.tree.leaves(exact(function)), strict=True):
        assert one.shape == true.shape and one.dtype == jnp.float32
        np.testing.assert_allclose(one, true, rtol=0, atol=2e-5 * max(1.0, np.abs(true).max()))


@pytest.mark.parametrize(("function", "implementation"), alternated(JOINED))
def test_products_of_the_same_weights_are_one_region(function, implementation):
    assert len(regions_of(function)) == JOINED[function]
    check(function, implementation)


@pytest.mark.parametrize("function", APART, ids=lambda x: x.__name__)
def test_products_of_different_weights_are_not_merged(function):
    assert len(regions_of(function)) == APART[function]
    check(function, "xla")


def test_products_with_values_of_other_dtypes_are_not_merged():
    def mixed(query, key, value, points, gate):
        weights = weights_of(query, key)
        outputs = jnp.einsum("bnts,bsnv->btnv", weights.astype(jnp.bfloat16), value.astype(jnp.bfloat16))
        return outputs, jnp.einsum("bnts,npbsx->btnpx", weights, points)

    regions = regions_of(mixed)
    assert sorted(region.value.dtype.name for region in regions) == ["bfloat16", "float32"]


@BOTH
def test_merged_products_in_bfloat16_keep_their_dtypes(implementation):
    """Results keep their dtypes, one of which is wider than the values'."""

    def attention(query, key, value, points, gate):
        weights = weights_of(query, key)
        outputs = jnp.einsum("bnts,bsnv->btnv", weights, value)
        wide = jnp.einsum("bnts,npbsx->btnpx", weights, points, preferred_element_type=jnp.float32)
        return outputs * gate, wide

    arguments = operands("bfloat16")
    (region,) = regions_of(attention, *arguments)
    # Rows are padded to a multiple of 16 bytes.
    assert region.value.shape[-1] == 16 and region.value.dtype == jnp.bfloat16
    outputs, pull = jax.vjp(fuse(attention, implementation=implementation), *arguments)
    assert [x.dtype for x in outputs] == [jnp.bfloat16, jnp.float32]
    expected, expected_pull = jax.vjp(attention, *(x.astype(jnp.float32) for x in arguments))
    gradients = pull(jax.tree.map(jnp.cos, outputs))
    wanted = expected_pull(jax.tree.map(jnp.cos, expected))
    for one, true in zip((*outputs, *gradients), (*expected, *wanted), strict=True):
        np.testing.assert_allclose(one.astype(jnp.float32), true, rtol=0, atol=3e-2 * max(1.0, np.abs(true).max()))


def test_unused_product_is_not_computed():
    def first(*arguments):
        return two(*arguments)[0]

    (region,) = explain(first)(*operands()).regions
    assert region.sizes["d"] == VALUES


@pytest.mark.parametrize("wanted", [0, 1])
@BOTH
def test_gradient_of_one_merged_product_matches_the_reference(wanted, implementation):
    def total(function, *arguments):
        return jnp.sum(jnp.sin(function(*arguments)[wanted]))

    places = tuple(range(len(operands())))
    expected = jax.grad(functools.partial(total, two), places)(*operands())
    found = jax.grad(functools.partial(total, fuse(two, implementation=implementation)), places)(*operands())
    for one, true in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, true, rtol=0, atol=2e-5)


@pytest.mark.parametrize("change", [jax.checkpoint, jax.jit, lambda f: lambda *x: jax.vmap(f)(*(y[None] for y in x))])
def test_merged_products_under_transformations_match_the_reference(change):
    def total(function, *arguments):
        return sum(jnp.sum(jnp.sin(x)) for x in change(function)(*arguments))

    expected = jax.value_and_grad(functools.partial(total, two), (0, 1, 3))(*operands())
    found = jax.value_and_grad(functools.partial(total, fuse(two, implementation="xla")), (0, 1, 3))(*operands())
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=2e-5), found, expected)


def test_merged_products_have_second_derivatives():
    def slope(function, query):
        def total(query):
            return sum(jnp.sum(jnp.sin(x)) for x in function(query, *operands()[1:]))

        return jnp.sum(jax.grad(total)(query) ** 2)

    expected = jax.grad(functools.partial(slope, two))(operands()[0])
    found = jax.grad(functools.partial(slope, fuse(two, implementation="xla")))(operands()[0])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


def test_dropout_of_merged_products_uses_the_same_mask():
    def attention(query, key, value, rng):
        weights = weights_of(query, key)
        weights = jnp.where(jax.random.bernoulli(rng, 0.5, weights.shape), weights * 2, 0)
        shape = (BATCH, KEYS, HEADS, VALUES)
        value = jnp.broadcast_to(value, shape)
        return jnp.einsum("bnts,bsnv->btnv", weights, value), jnp.einsum("bnts,bsnv->btnv", weights, -2 * value)

    query, key, value, *_ = operands()
    fused = fuse(attention, implementation="xla")
    assert len(regions_of(attention, query, key, value, jax.random.key(0))) == 1
    one, other = fused(query, key, value, jax.random.key(0))
    np.testing.assert_allclose(other, -2 * one, rtol=1e-6)


def test_explain_of_merged_products_shows_one_region():
    found = explain(two)(*operands())
    (region,) = found.regions
    # 6 columns of values and 9 of points, and zeros up to 16 bytes.
    assert {name: size for name, size in region.sizes.items() if name.startswith("d")} == {"d": 16}
    assert found.source.count("def fused_forward(") == 1
    assert found.outside["concatenate"] == 1 and found.outside["slice"] == 2


def test_products_with_sharded_values_match_the_reference():
    """Axes that are sharded over explicit mesh axes cannot be merged."""

    def attention(query, key, value, gate):
        weights = weights_of(query, key)
        return jnp.einsum("bnts,bsnv->btnv", weights, value), jnp.einsum("bnts,bsnv->btnv", weights, value + 1) * gate

    query, key, value, _, gate = operands()
    expected = attention(query, key, value, gate)
    axes = jax.make_mesh((2,), ("batch",), axis_types=(AxisType.Explicit,), devices=jax.devices("cpu")[:2])
    with jax.set_mesh(axes):
        placed = [jax.device_put(x, NamedSharding(axes, PartitionSpec("batch"))) for x in (query, key, value, gate)]
        found = jax.jit(fuse(attention, implementation="xla"))(*placed)
    for one, true in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, true, rtol=0, atol=2e-5)
