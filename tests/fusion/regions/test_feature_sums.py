"""Tests of scores that sum over features without a matrix product, as additive and graph attention do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag import explain, fuse
from blockdiag.fusion.analysis.interval import Interval
from blockdiag.fusion.analysis.range_analysis import bounds
from blockdiag.fusion.frontend.trace import flat_jaxpr
from blockdiag.fusion.ir.tree import FEATURES, Leaf, Node, Source, Unpullable, nodes_of, operation
from blockdiag.fusion.regions.feature_sums import sum_of_features
from blockdiag.fusion.regions.match import find_regions
from blockdiag.triton_kernels.launch.plan import Target
from tests.fusion.codegen.test_plans import launches_of
from tests.fusion.fusion_support import (
    alternated,
    arrays,
    assert_alike,
    assert_fused,
    compiled_gradients,
    with_gradients,
)
from tests.triton_kernels.plans_support import report_of

BATCH, QUERIES, KEYS, HEADS, WIDTH = 2, 37, 35, 2, 12
POINTS = WIDTH // 3
OPERANDS = ((BATCH, QUERIES, WIDTH), (BATCH, KEYS, WIDTH), (BATCH, KEYS, WIDTH), (WIDTH,))


def hidden(query, key):
    return jnp.tanh(query[:, :, None] + key[:, None])  # [B, T, S, C]


def attended(scores, value):
    return jax.nn.softmax(scores, axis=-1) @ value


def additive(query, key, value, out):
    """Bahdanau et al., 2015."""
    return attended(hidden(query, key) @ out, value)


def by_sum(query, key, value, out):
    return attended(jnp.sum(out[None, None, None] * hidden(query, key), axis=-1), value)


def dense(query, key, value, out):
    """Project hidden features by a layer with one output."""
    return attended((hidden(query, key) @ out[:, None])[..., 0], value)


def in_heads(array):
    return array.reshape(*array.shape[:2], HEADS, -1)


def graph_attention(query, key, value, out):
    """Brody et al., 2022."""
    pairs = jax.nn.leaky_relu(in_heads(query)[:, :, None] + in_heads(key)[:, None], 0.2)  # [B, T, S, N, C]
    weights = jax.nn.softmax(jnp.einsum("bijnc,nc->bijn", pairs, out.reshape(HEADS, -1)), axis=2)
    return jnp.einsum("bijn,bjnc->binc", weights, in_heads(value))


def several_outputs(query, key, value, out):
    """Project hidden features by a matrix whose columns are heads."""
    scores = hidden(query, key) @ jnp.stack([out, out[::-1]], axis=1)  # [B, T, S, N]
    return jnp.einsum("bijn,bjnc->binc", jax.nn.softmax(scores, axis=2), in_heads(value))


def differences(query, key, value, out):
    """Return causal attention by absolute differences, with a temperature."""
    scores = -jnp.exp(out[0]) * jnp.abs(query[:, :, None] - key[:, None]).sum(-1)
    seen = jnp.arange(QUERIES)[:, None] >= jnp.arange(KEYS)[None, :]
    return attended(jnp.where(seen[None], scores, -jnp.inf), value)


def beside_product(query, key, value, out):
    """Return attention in which the feature sum also uses the matrix product, computed once for all features."""
    scores = jnp.einsum("bid,bjd->bij", query, key)
    pairs = query[:, :, None] * out[None, None, None] + 0.1 * key[:, None] * scores[..., None]
    return attended(scores + jnp.sum(jax.nn.silu(pairs), axis=-1), value)


def in_points(array):
    return array.reshape(*array.shape[:2], -1, 3)


def points(query, key, value, out):
    """Return attention by weighted distances of points, a sum of sums over three coordinates."""
    squares = jnp.square(in_points(query)[:, :, None] - in_points(key)[:, None]).sum(-1)
    return attended(-jnp.sqrt(squares + 1e-3) @ jax.nn.softplus(out[:POINTS]), value)


def of_two_axes(query, key, value, out):
    """Sum over two axes, with a weight that has one of them."""
    apart = jnp.abs(in_points(query)[:, :, None] - in_points(key)[:, None])
    return attended(-jnp.sum(apart * jax.nn.softplus(out[:POINTS])[None, None, None, :, None], axis=(-1, -2)), value)


def of_numbered(query, key, value, out):
    """Use the index of each feature in its term."""
    turned = (
        query[:, :, None] - key[:, None] * out[None, None, None] + jnp.arange(WIDTH, dtype=out.dtype)[None, None, None]
    )
    return attended(jnp.sum(jnp.sin(turned), axis=-1), value)


def beside_a_sink(query, key, value, out):
    """Add a sink, which is one more logit without a value."""
    sink = jnp.broadcast_to(out[:1, None, None], (BATCH, QUERIES, 1))
    scores = jnp.concatenate([hidden(query, key) @ out, sink], axis=-1)
    return jax.nn.softmax(scores, axis=-1)[..., :-1] @ value


def gated(query, key, value, out):
    """Multiply weights by a feature sum after the softmax."""
    gates = jax.nn.sigmoid(hidden(query, key) @ out)
    return (jax.nn.softmax(jnp.einsum("bid,bjd->bij", query, key), axis=-1) * gates) @ value


FORMS = {
    form.__name__: form
    for form in (
        additive, by_sum, dense, graph_attention, several_outputs, differences, beside_product, points,
        of_two_axes, of_numbered, beside_a_sink, gated,
    )
}  # fmt: skip


def region_of(function, given):
    flat, _ = flat_jaxpr(lambda some: function(*some), given)
    ((region,),) = find_regions(flat.jaxpr).values()
    return region


@pytest.mark.parametrize(("form", "implementation"), alternated(FORMS))
def test_feature_sums_match_the_reference_with_gradients(form, implementation):
    given = arrays(*OPERANDS)
    region = region_of(FORMS[form], given)
    assert any(node.kind == "sum" for node in nodes_of(region.score, region.weight))
    assert "score" not in {leaf.role for leaf in region.leaves}
    # The gradient of the temperature is a small difference of large numbers.
    assert_fused(FORMS[form], given, implementation, 2e-4 if form == "differences" else 2e-5)


@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_feature_sums_repeat_bitwise(implementation):
    given = arrays(*OPERANDS)
    fused = jax.jit(lambda *some: with_gradients(fuse(graph_attention, implementation=implementation), some))
    first, second = fused(*given), fused(*given)
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_feature_sums_of_bfloat16_accumulate_in_float32():
    given = [x.astype(jnp.bfloat16) for x in arrays(*OPERANDS)]
    wide = [x.astype(jnp.float32) for x in given]
    exact = with_gradients(additive, wide)
    naive = with_gradients(additive, given)
    for implementation in ("xla", "triton"):
        found = compiled_gradients(fuse(additive, implementation=implementation), given)
        for own, plain, true in zip(*map(jax.tree.leaves, (found, naive, exact)), strict=True):
            error, other = (np.abs(np.asarray(x, np.float32) - np.asarray(true)).max() for x in (own, plain))
            assert error <= 2 * other + 2 * float(jnp.finfo(jnp.bfloat16).eps) * np.abs(true).max()


@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_vmapped_feature_weights_match_the_reference(implementation):
    """Each index of a mapped axis has weights of its own."""
    *given, out = arrays(*OPERANDS[:3], (3, WIDTH))

    def mapped(function):
        return jax.vmap(lambda out: with_gradients(function, (*given, out)))(out)

    assert_alike(mapped(fuse(additive, implementation=implementation)), mapped(additive), 2e-5)


@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_feature_sums_have_second_derivatives(implementation):
    given = arrays((1, 9, 12), (1, 7, 12), (1, 7, 12), (12,))

    def twice(function):
        def slopes(*some):
            return jax.grad(lambda *x: jnp.sum(jnp.square(function(*x))), (0, 1, 3))(*some)

        return jax.grad(lambda *some: sum(jnp.sum(jnp.square(x)) for x in slopes(*some)), (0, 1, 2, 3))(*given)

    assert_alike(twice(fuse(additive, implementation=implementation)), twice(additive), 1e-4)


@pytest.mark.parametrize("implementation", ["xla", "triton"])
@pytest.mark.parametrize("sizes", [(1, 33), (33, 2)])
def test_feature_sums_of_one_query_or_few_keys_match_the_reference(sizes, implementation):
    queries, keys = sizes
    given = arrays((BATCH, queries, 12), (BATCH, keys, 12), (BATCH, keys, 12), (12,))
    assert_fused(additive, given, implementation)


def test_feature_sum_kernels_have_a_length_independent_of_features():
    def lines(width):
        given = arrays((1, 64, width), (1, 64, width), (1, 64, 16), (width,))
        return len(explain(additive)(*given).source.splitlines())

    assert lines(16) == lines(64) == lines(256)


def test_feature_sums_unroll_few_features_and_leave_many_in_memory():
    """Few features are unrolled into registers; scores of too many features for a loop stay in memory."""
    few = arrays((1, 40, 4), (1, 40, 4), (1, 40, 16), (4,))
    region = region_of(by_sum, few)
    assert not any(node.kind == "sum" for node in nodes_of(region.score))
    assert "score" not in {leaf.role for leaf in region.leaves}
    many = arrays((1, 20, 300), (1, 20, 300), (1, 20, 16), (300,))
    assert "score" in {leaf.role for leaf in region_of(additive, many).leaves}
    assert_fused(additive, many)


def test_products_written_as_feature_sums_are_matrix_products():
    """Neither the number of features nor a sink prevents this."""

    def function(query, key, value, out):
        scores = jnp.sum(query[:, :, None] * key[:, None], axis=-1)
        scores = jnp.concatenate([scores, jnp.broadcast_to(out[:1, None, None], (BATCH, QUERIES, 1))], axis=-1)
        return jax.nn.softmax(scores, axis=-1)[..., :-1] @ value

    found = explain(function)(*arrays(*OPERANDS))
    assert "query" in {leaf.role for leaf in found.regions[0].leaves} and "each feature" not in found.source


def test_feature_products_of_all_heads_are_not_a_loop():
    """Lightning indexers add up functions of the products of all heads, each of which is a product of matrices."""

    def function(query, key, value, out):
        scores = jax.nn.relu(jnp.einsum("binc,bjc->bijn", in_heads(query), key[..., : WIDTH // HEADS]))
        return attended(jnp.sum(scores * out[None, None, None, :HEADS], axis=-1), value)

    given = arrays(*OPERANDS)
    region = region_of(function, given)
    assert [node.kind for node in nodes_of(region.score) if node.kind in ("product", "sum")] == ["product"] * HEADS
    assert_fused(function, given)


@pytest.mark.parametrize("form", [additive, differences])
def test_feature_sums_with_an_added_mask_skip_tiles(form):
    """The feature sum is bounded, so that adding -1e9 masks it."""
    tokens = 256
    given = arrays(*[(1, tokens, WIDTH)] * 3, (WIDTH,))

    def masked(query, key, value, out):
        seen = jnp.arange(tokens)[:, None] >= jnp.arange(tokens)[None, :]
        scores = -jnp.abs(query[:, :, None] - key[:, None]).sum(-1) if form is differences else hidden(query, key) @ out
        return attended(scores + jnp.where(seen, 0.0, -1e9)[None], value)

    (found,) = explain(masked)(*given).regions
    assert found.live is not None and 0.4 < 1 - found.live.mean() < 0.5
    assert_fused(masked, given)


@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_masks_of_large_features_stay_exact(implementation):
    """Features that exceed the assumed bound of query-key products decide a mask, next to a position mask."""
    tokens = 96

    def function(query, key, value):
        far = jnp.abs(query[:, :, None] - key[:, None]) < 3500
        scores = jnp.where(far, -1e9, 0.0).sum(-1)
        seen = jnp.arange(tokens)[:, None] >= jnp.arange(tokens)[None, :]
        return attended(jnp.where(seen[None], scores, -jnp.inf), value)

    given = (jnp.full((1, tokens, WIDTH), 5000.0), jnp.zeros((1, tokens, WIDTH)), *arrays((1, tokens, WIDTH)))
    np.testing.assert_allclose(fuse(function, implementation=implementation)(*given), function(*given), atol=1e-6)


def test_bounds_of_loops_are_finite_only_for_sums():
    """Sums are bounded by their terms; bounds of other loops are unknown."""

    def total(x):
        return jax.lax.fori_loop(0, 10, lambda _, found: found + jnp.abs(x), jnp.ones_like(x))

    def product(x):
        return jax.lax.fori_loop(0, 10, lambda _, found: found * (1 + jnp.abs(x)), jnp.ones_like(x))

    def pair(x):
        """Add a term that depends on the carry."""
        return jax.lax.fori_loop(0, 10, lambda _, two: (two[0] + two[1], two[1] * 2), (jnp.zeros_like(x), x))

    given = [Interval(np.full((1, 1), -2.0), np.full((1, 1), 3.0))]
    aval = jax.ShapeDtypeStruct((16, 16), np.float32)
    (found,) = bounds(jax.make_jaxpr(total)(aval), given)
    assert 0.9 < found.low.item() <= 1 and 31 <= found.high.item() < 31.1
    for loop in (product, pair):
        for found in bounds(jax.make_jaxpr(loop)(aval), given):
            assert np.isneginf(found.low).all() and np.isposinf(found.high).all()


def test_nested_feature_sums_raise_unpullable():
    label, other = f"{FEATURES}00", f"{FEATURES}01"
    leaf = Leaf(Source("x", (3, 5, 7), np.dtype(np.float32)), (("q",), (label,), (other,)), "query", ())
    inner = sum_of_features(Node("leaf", leaf=leaf), {other: 7})
    with pytest.raises(Unpullable, match="sums over features"):
        sum_of_features(operation(jax.lax.neg_p, inner), {label: 5})


@pytest.mark.parametrize(
    ("width", "dtype", "arch"),
    [(64, "bfloat16", 80), (64, "bfloat16", 90), (64, "bfloat16", 100), (256, "bfloat16", 90), (64, "float32", 90)],
)
def test_feature_sum_kernels_do_not_spill_in_loops(width, dtype, arch):
    given = [jnp.zeros(x, dtype) for x in ((1, 256, width), (1, 256, width), (1, 256, 64), (width,))]
    for launch in launches_of(region_of(additive, given)).values():
        report = report_of(launch.plan(Target.for_arch(arch)), arch)
        assert max(report.local_accesses, default=0) < 2, str(report)
