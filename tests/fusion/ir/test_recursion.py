"""Tests that long programs do not overflow Python's stack and that the passes' work per equation is constant."""

import inspect
import sys

import jax
import jax.numpy as jnp
import pytest

from blockdiag import NotFusible, explain, fuse
from blockdiag.fusion.ir.recursion import Steps, finished
from tests.fusion.fusion_support import (
    arrays,
    assert_alike,
    assert_fused,
    expected_results,
    with_gradients,
    work_of_passes,
)

TOKENS, HEADS, WIDTH, CHANNELS = 24, 2, 16, 32
SHAPE = (1, TOKENS, HEADS, WIDTH)
# Time grows with the depth: most of it is tracing and compilation by JAX. Python's own limit is 1,000 calls; JAX and
# the passes need 200 of them, whatever the depth.
LIMIT = 350
DEPTH = LIMIT + 50
# Each addition makes several values.
SCORES_DEPTH = LIMIT


@pytest.fixture(autouse=True)
def low_recursion_limit():
    """Lower Python's recursion limit below the depth of the programs."""
    usual = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + LIMIT)
    yield
    sys.setrecursionlimit(usual)


def attend(query, key, value, change=lambda scores: scores):
    scores = change(jnp.einsum("bqnh,bknh->bnqk", query, key) / 8)
    return jnp.einsum("bnqk,bknh->bqnh", jax.nn.softmax(scores, axis=-1), value)


def stream(x, added, depth=DEPTH):
    """Return a chain of additions without other operations, scaled to the size of one term."""
    half = added / 2
    for i in range(depth):
        x = x + added if i % 2 else x - half
    return x / depth


def projected(x, weights):
    return (jnp.einsum("btc,cnh->btnh", x, one) for one in weights)


def normed(x):
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.square(centred).mean(axis=-1, keepdims=True) + 1e-5)


def rotated(x):
    """Rotate pairs of features, which are sliced and joined again."""
    first, second = x[..., : WIDTH // 2], x[..., WIDTH // 2 :]
    cos, sin = (jnp.moveaxis(f(jnp.arange(TOKENS) / 8)[None, None, None], -1, 1) for f in (jnp.cos, jnp.sin))
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def before_projections(x, added, weights):
    return attend(*projected(stream(x, added), weights))


def before_norms(x, added, weights):
    return attend(*projected(normed(stream(x, added)), weights))


def before_experts(x, added, weights):
    """Multiply by a matrix of each sequence, which might be the weights of another attention."""
    x = stream(x, added)
    return attend(*projected(x + jnp.einsum("btc,bcd->btd", x, x.mT @ x / CHANNELS), weights))


def around_attention(x, added, weights):
    for _ in range(2):
        x = stream(x, added) + attend(*projected(x, weights)).reshape(x.shape)
    return stream(x, added) @ weights[0].reshape(CHANNELS, CHANNELS)


def of_norms(x, added, weights):
    for _ in range(DEPTH // 5):
        x = normed(x + added)
    return attend(*projected(x, weights))


def of_doubles(x, added, weights):
    """Use each value twice."""
    for _ in range(DEPTH):
        x = (x + x) / 2
    return attend(*projected(x + added, weights))


OF_CHANNELS = [before_projections, before_norms, before_experts, around_attention, of_norms, of_doubles]


@pytest.mark.parametrize("function", OF_CHANNELS)
def test_fuse_of_long_residual_streams_with_projections_matches_the_reference(function):
    given = arrays((1, TOKENS, CHANNELS), (CHANNELS,), (3, CHANNELS, HEADS, WIDTH))
    given = [given[0], given[1][None, None], given[2] / 8]
    regions = explain(function)(*given).regions
    assert len(regions) == (2 if function is around_attention else 1)
    assert all({leaf.role for leaf in region.leaves} == {"query", "key"} for region in regions)
    found = with_gradients(fuse(function), given)
    assert_alike(found, expected_results(function, given), tolerance=2e-4)


def of_queries(x, added, key, value):
    return attend(stream(x, added), key, value)


def of_keys(x, added, query, value):
    return attend(query, stream(x, added), value)


def of_values(x, added, query, key):
    return attend(query, key, stream(x, added))


def of_rotated_queries(x, added, key, value):
    return attend(rotated(stream(x, added)), key, value)


def of_results(x, added, key, value):
    return stream(attend(x, key, value), added)


@pytest.mark.parametrize("function", [of_queries, of_keys, of_values, of_rotated_queries, of_results])
def test_fuse_of_long_residual_streams_without_projections_matches_the_reference(function):
    given = arrays(SHAPE, SHAPE, SHAPE, SHAPE)
    (region,) = explain(function)(*given).regions
    assert {leaf.role for leaf in region.leaves} == {"query", "key"}
    assert_fused(function, given, tolerance=2e-4)


def test_fuse_of_many_added_scores_matches_the_reference():
    def function(query, key, value, columns):
        def change(scores):
            for _ in range(SCORES_DEPTH):
                scores = scores + columns
            return scores / (2 * SCORES_DEPTH)

        return attend(query, key, value, change)

    assert_fused(function, arrays(SHAPE, SHAPE, SHAPE, (1, 1, 1, TOKENS)), "xla", tolerance=2e-4)


def test_fuse_of_long_pair_streams_matches_the_reference():
    """A stream of pairs, as in Evoformer, gives a bias by a product or by a slice of its channels."""
    given = arrays(SHAPE, SHAPE, SHAPE, (1, TOKENS, TOKENS, 4), (1, 1, TOKENS, 4), (4, HEADS))

    def multiplied(query, key, value, pairs, added, weight):
        bias = jnp.moveaxis(stream(pairs, added) @ weight, -1, 1)
        return attend(query, key, value, lambda scores: scores + bias)

    def cut(query, key, value, pairs, added, weight):
        bias = jnp.moveaxis(stream(pairs, added)[..., :HEADS] * weight[None, None, :1], -1, 1)
        return attend(query, key, value, lambda scores: scores + bias[..., ::-1])

    for function in (multiplied, cut):
        (region,) = explain(function)(*given).regions
        assert [leaf.role for leaf in region.leaves] == ["query", "key", "score"]
        assert_fused(function, given, tolerance=2e-4)


def test_fuse_of_deep_networks_of_distances_matches_the_reference():
    def function(query, key, value, table, weight):
        distance = jnp.arange(TOKENS)[:, None] - jnp.arange(TOKENS)[None, :]
        bias = table[distance + TOKENS]
        for _ in range(DEPTH):
            bias = bias + jnp.sin(bias) / DEPTH
        bias = jnp.moveaxis(bias @ weight, -1, 0)[None]
        return attend(query, key, value, lambda scores: scores + bias)

    given = arrays(SHAPE, SHAPE, SHAPE, (2 * TOKENS, 4), (4, HEADS))
    (region,) = explain(function)(*given).regions
    assert [leaf.role for leaf in region.leaves] == ["query", "key", "distance"]
    assert_fused(function, given, tolerance=2e-4)


def test_selects_that_share_their_cases_are_visited_once():
    """Without a record of what has been visited, 40 selects of two cases each would take 2^40 steps."""

    def attention(query, key, value):
        scores, away = query @ key.mT, jnp.arange(64)[:, None] - jnp.arange(64)[None, :]
        for i in range(40):
            scores = jnp.where(away > i, scores, jnp.where(away < -i, scores, 3e38))
        return jax.nn.softmax(scores, axis=-1) @ value

    shape = jax.ShapeDtypeStruct((2, 64, 16), jnp.float32)
    (region,) = explain(attention)(shape, shape, shape).regions
    assert region.has_softmax and "fused_forward" in region.kernels


def test_unfusible_scores_above_a_long_stream_raise_not_fusible():
    def function(x, added, weights):
        return attend(*projected(stream(x, added), weights), lambda scores: jnp.sort(scores, axis=-1))

    given = arrays((1, TOKENS, CHANNELS), (1, TOKENS, CHANNELS), (3, CHANNELS, HEADS, WIDTH))
    with pytest.raises(NotFusible, match="`sort` of scores cannot be computed tile by tile"):
        fuse(function)(*given)


@pytest.mark.parametrize("is_projected", [False, True])
def test_fuse_work_per_addition_of_a_long_stream_is_constant(is_projected):
    given = arrays((1, TOKENS, CHANNELS), (1, TOKENS, CHANNELS), (3, CHANNELS, HEADS, WIDTH))
    given = given if is_projected else arrays(SHAPE, SHAPE, SHAPE)

    def function_of(depth):
        def function(x, added, other):
            x = stream(x, added, depth)
            return attend(*projected(x, other)) if is_projected else attend(x, other, other)

        return function

    calls = [work_of_passes(function_of(depth), given) for depth in (200, 400, 600)]
    assert calls[2] - calls[1] <= 1.1 * (calls[1] - calls[0])


def test_steps_receive_exceptions_of_nested_steps():
    def down(depth: int, failure: Exception) -> Steps[int]:
        if not depth:
            raise failure
        return 1 + (yield down(depth - 1, failure))

    def ready(depth: int, failure: Exception) -> Steps[int]:
        try:
            return (yield down(depth, failure))
        except ValueError:
            return -1

    assert finished(ready(5000, ValueError()), ValueError) == -1
    with pytest.raises(ValueError, match="deep"):
        finished(down(5000, ValueError("deep")), ValueError)
    with pytest.raises(KeyError):
        finished(ready(5000, KeyError()), ValueError)
