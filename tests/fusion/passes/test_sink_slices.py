"""Tests of one softmax of all heads that is sliced afterwards, as differential attention is often written."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag import NotFusible, explain, fuse
from blockdiag.fusion.passes.sink_slices import Part, Stays, _before_reshape
from tests.fusion.fusion_support import alternated, assert_fused

BATCH, TOKENS, HEADS, WIDTH = 2, 18, 2, 16


def scores_of(query, key):
    """Return causal scores [B, 2 N, T, T] of query and key [B, T, 2 N, H]."""
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * WIDTH**-0.5
    return jnp.where(jnp.tri(TOKENS, dtype=bool)[None, None], scores, -jnp.inf)


def values_of(weights, value):
    return jnp.einsum("bnts,bsnv->btnv", weights, value)


def pairs_of_heads(query, key, value):
    """Follow the code that came with the paper, in which the heads of a pair are adjacent."""
    scores = jnp.matmul(query.swapaxes(1, 2) / 4, key.transpose(0, 2, 3, 1))
    scores = jnp.nan_to_num(scores) + jnp.triu(jnp.full((TOKENS, TOKENS), -jnp.inf), 1)[None, None]
    weights = jax.nn.softmax(scores, axis=-1).reshape(BATCH, HEADS, 2, TOKENS, TOKENS)
    output = jnp.matmul(weights[:, :, 0] - 0.3 * weights[:, :, 1], value.swapaxes(1, 2))
    return output * jax.lax.rsqrt(jnp.mean(output**2, axis=-1, keepdims=True) + 1e-5)


def every_second_head(query, key, value):
    weights = jax.nn.softmax(scores_of(query, key), axis=-1)
    return values_of(weights[:, ::2] - 0.3 * weights[:, 1::2], value)


def halves_of_heads(query, key, value):
    first, second = jnp.split(jax.nn.softmax(scores_of(query, key), axis=-1), 2, axis=1)
    return values_of(first - 0.3 * second, value)


def results_of_pairs(query, key, value):
    """Subtract results instead of weights."""
    weights = jax.nn.softmax(scores_of(query, key), axis=-1).reshape(BATCH, HEADS, 2, TOKENS, TOKENS)
    first, second = (values_of(weights[:, :, i], value) for i in range(2))
    return first - 0.3 * second


def pairs_in_front(query, key, value):
    weights = jax.nn.softmax(scores_of(query, key), axis=-1).reshape(BATCH, HEADS, 2, TOKENS, TOKENS)
    weights = weights.transpose(2, 0, 1, 3, 4)
    return values_of(weights[0] - 0.3 * weights[1], value)


def later_heads(query, key, value):
    return values_of(jax.nn.softmax(scores_of(query, key), axis=-1)[:, 2:], value)


def halves_of_groups(query, key, value):
    """Merge key heads and their groups of two query heads into one axis before the softmax."""
    query = query.reshape(BATCH, TOKENS, HEADS, 2, WIDTH)
    scores = jnp.einsum("btkgh,bskh->bkgts", query, key[:, :, :HEADS]).reshape(BATCH, 2 * HEADS, TOKENS, TOKENS)
    weights = jax.nn.softmax(scores / 4, axis=-1)
    return values_of(weights[:, :HEADS] - 0.3 * weights[:, HEADS:], value)


def halves_with_sinks(query, key, value):
    sinks = jnp.broadcast_to(jnp.arange(2.0 * HEADS)[None, :, None, None], (BATCH, 2 * HEADS, TOKENS, 1))
    weights = jax.nn.softmax(jnp.concatenate([scores_of(query, key), sinks], axis=-1), axis=-1)
    first, second = jnp.split(weights, 2, axis=1)
    return values_of((first - 0.3 * second)[..., :-1], value)


FUNCTIONS = [
    pairs_of_heads, every_second_head, halves_of_heads, results_of_pairs, pairs_in_front, later_heads,
    halves_of_groups, halves_with_sinks,
]  # fmt: skip


def arrays():
    generator = np.random.default_rng(0)
    shapes = [(BATCH, TOKENS, 2 * HEADS, WIDTH)] * 2 + [(BATCH, TOKENS, HEADS, 2 * WIDTH)]
    return [jnp.asarray(generator.normal(size=shape), jnp.float32) for shape in shapes]


@pytest.mark.parametrize(("function", "implementation"), alternated(FUNCTIONS))
def test_sliced_weights_match_the_reference_with_gradients(function, implementation):
    assert_fused(function, arrays(), implementation)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_sliced_weights_leave_no_scores_outside(function):
    found = explain(function)(*arrays())
    assert len(found.regions) == (1 if function is later_heads else 2)
    assert all(region.has_softmax for region in found.regions)
    assert not {"dot_general", "exp"} & set(found.outside)


@pytest.mark.parametrize("function", [x for x in FUNCTIONS if x not in (halves_of_groups, halves_with_sinks)])
def test_masks_of_sliced_weights_are_not_arrays(function):
    """Slices of a mask that all heads share are the mask itself, so that no array is read."""
    for region in explain(function)(*arrays()).regions:
        assert {leaf.role for leaf in region.leaves} == {"query", "key", "row", "column"}


def test_per_head_slopes_of_sliced_weights_are_scalar_leaves():
    def sloped(query, key, value, slopes):
        """Return differential attention with slopes [2 N]."""
        places = jnp.arange(TOKENS, dtype=jnp.float32)
        bias = slopes[:, None, None] * jnp.abs(places[:, None] - places[None, :])[None]
        first, second = jnp.split(jax.nn.softmax(scores_of(query, key) - bias[None], axis=-1), 2, axis=1)
        return values_of(first - 0.3 * second, value)

    given = (*arrays(), jnp.linspace(0.1, 0.4, 2 * HEADS))
    for region in explain(sloped)(*given).regions:
        assert {leaf.role for leaf in region.leaves} == {"query", "key", "row", "column", "scalar"}
    assert_fused(sloped, given, "xla")


def test_sliced_weights_of_an_empty_batch_keep_the_output_shape():
    none = [x[:0] for x in arrays()]
    assert fuse(halves_of_heads)(*none).shape == halves_of_heads(*none).shape


@pytest.mark.parametrize("batch", [3, 0])
def test_before_reshape_maps_slices_through_a_reshape(batch):
    before, after = (batch, 12, 5), (batch, 4, 3, 5)
    assert _before_reshape(before, after, Part(2, 1, 2)) == Part(1, 1, 12, 3)
    assert _before_reshape(before, after, Part(1, 1, 3)) == Part(1, 3, 9)
    assert _before_reshape(after, before, Part(1, 3, 9)) == Part(1, 1, 3)
    with pytest.raises(Stays):
        _before_reshape(before, after, Part(2, 1, 3))


def test_slices_along_keys_raise_not_fusible():
    def attention(query, key, value):
        weights = jax.nn.softmax(scores_of(query, key), axis=-1)
        return values_of(weights[..., 4:], jnp.concatenate([value, value], axis=2)[:, 4:])

    with pytest.raises(NotFusible, match="some of a softmax's keys have no value"):
        fuse(attention)(*arrays())
