"""Tests of weights added to softmaxes, of products written as other operations, and of axes of size 1."""

import itertools

import jax
import jax.numpy as jnp
import pytest

from blockdiag import NotFusible, explain, fuse
from blockdiag.fusion.program import trace
from tests.fusion.fusion_support import (
    alternated,
    arrays,
    assert_alike,
    assert_as_good_as_written,
    assert_fused,
    compiled_gradients,
    expected_results,
)

BATCH, HEADS, TOKENS, WIDTH = 2, 4, 21, 16


def scores(query, key):
    return query @ key.mT / 4


def weights(query, key):
    return jax.nn.softmax(scores(query, key), axis=-1)


def beside_identity(query, key, value):
    return (0.5 * weights(query, key) + 0.5 * jnp.eye(TOKENS)[None, None]) @ value


def beside_array(query, key, value, array):
    """Add an array [T, T] to weights, such as distances or edges in molecule attention."""
    return (0.5 * weights(query, key) + 0.5 * array[None, None]) @ value


def less_uniform(query, key, value):
    """Subtract the uniform weights of a causal mask, as shaped attention does."""
    seen = jnp.tril(jnp.ones((TOKENS, TOKENS)))
    return (weights(query, key) - (seen / jnp.arange(1.0, TOKENS + 1)[:, None])[None, None]) @ value


def beside_relu(query, key, value):
    """Add squared ReLU weights, as adaptive sparse transformers do."""
    return (weights(query, key) + 0.3 * jax.nn.relu(scores(query, key)) ** 2) @ value


def beside_number(query, key, value):
    return (weights(query, key) + 1 / TOKENS) @ value


def gated_sigmoid(query, key, value, gate):
    """Mix softmax and sigmoid weights by the share gate [N] of each head."""
    share = jax.nn.sigmoid(gate)[None, :, None, None]
    return (share * weights(query, key) + (1 - share) * jax.nn.sigmoid(scores(query, key))) @ value


def from_zeros(query, key, value):
    return sum(0.5 * jax.nn.softmax(factor * scores(query, key), axis=-1) for factor in (1, 2)) @ value


def points_by_sums(query, key, value, x, y):
    """Sum coordinates x and y [B, N, S, points] separately, as AlphaFold's code does."""
    mixed = weights(query, key)
    coordinates = [jnp.sum(mixed[..., None] * points[:, :, None], axis=-2) for points in (x, y)]
    return jnp.concatenate([mixed @ value, *coordinates], axis=-1)


def sum_of_moved_axes(query, key, value):
    mixed = jnp.moveaxis(weights(query, key), 1, -1)[..., None]
    return (value.swapaxes(1, 2)[:, None] * mixed).sum(2)


def mean_of_heads(query, key, value):
    """Average weights over heads for one head of values, as interpretable attention does."""
    return weights(query, key).mean(1) @ value[:, 0]


def heads_by_einsum(query, key, value):
    return jnp.einsum("bhij,bjd->bid", weights(query, key), value[:, 0])


def weighted_heads(query, key, value, gate):
    """Sum weights over heads with factors gate [N]."""
    return 2.0 * jnp.einsum("bhij,h->bij", weights(query, key), gate) @ value[:, 0]


def heads_of_each_query(query, key, value, gate):
    """Sum weights over heads with factors gate [B, N, T]."""
    return jnp.einsum("bjd,bij->bdi", value[:, 0], jnp.einsum("bhij,bhi->bij", weights(query, key), gate))


def mixture_of_softmaxes(query, key, value, gate):
    """Mix two softmaxes for each of two heads by gate [B, T, 2, 2]."""
    pairs = weights(query, key).reshape(BATCH, 2, 2, TOKENS, TOKENS)
    mixed = jnp.einsum("bmhij,bimh->bmij", pairs, jax.nn.softmax(gate, axis=-1))
    return jnp.einsum("bmij,bmjd->bmid", mixed, value[:, :2])


def head_mask(query, key, value, mask):
    """Multiply weights by a mask [N] of heads, as Hugging Face's Flax BERT does."""
    return jnp.einsum("...hqk,h->...hqk", weights(query, key), mask) @ value


def nothing_in_front(query, key, value):
    """Pad scores by one more key of score 0."""
    return jax.nn.softmax(jnp.pad(scores(query, key), ((0, 0),) * 3 + ((1, 0),)), axis=-1)[..., 1:] @ value


def nothing_behind(query, key, value):
    return jax.nn.softmax(jnp.pad(scores(query, key), ((0, 0),) * 3 + ((0, 1),)), axis=-1)[..., :-1] @ value


def differences(query, key, value, points, slopes):
    """Subtract a term for each coordinate of differences of points [B, T, 2], one of them with slopes [N]."""
    away = points[:, :, None] - points[:, None]
    terms = jnp.abs(away[..., 0])[:, None] * slopes[None, :, None, None] + jax.nn.softplus(away)[:, None, ..., 1]
    return jax.nn.softmax(scores(query, key) - terms, axis=-1) @ value


def first_score_taken_away(query, key, value):
    found = scores(query, key)
    return jax.nn.softmax(jnp.tanh(found) - found[..., :1], axis=-1) @ value


FUNCTIONS = {
    "differences": (differences, (BATCH, TOKENS, 2), (HEADS,)),
    "first score taken away": (first_score_taken_away,),
    "beside identity": (beside_identity,),
    "beside an array": (beside_array, (TOKENS, TOKENS)),
    "less uniform": (less_uniform,),
    "beside relu": (beside_relu,),
    "beside a number": (beside_number,),
    "gated sigmoid": (gated_sigmoid, (HEADS,)),
    "from zeros": (from_zeros,),
    "points by sums": (points_by_sums, (BATCH, HEADS, TOKENS, 2), (BATCH, HEADS, TOKENS, 2)),
    "sum of moved axes": (sum_of_moved_axes,),
    "mean of heads": (mean_of_heads,),
    "heads by einsum": (heads_by_einsum,),
    "weighted heads": (weighted_heads, (HEADS,)),
    "heads of each query": (heads_of_each_query, (BATCH, HEADS, TOKENS)),
    "mixture of softmaxes": (mixture_of_softmaxes, (BATCH, TOKENS, 2, 2)),
    "head mask": (head_mask, (HEADS,)),
    "nothing in front": (nothing_in_front,),
    "nothing behind": (nothing_behind,),
}
OPERAND = (BATCH, HEADS, TOKENS, WIDTH)


def pairs_outside(function, given):
    """Return the primitives outside of regions whose results have both queries and keys."""
    program = trace(function, given, {})
    needed = program.needed()
    made = [x for x in program.jaxpr.jaxpr.eqns if x.outvars[0] in needed and x.outvars[0] not in program.regions]
    return [x.primitive.name for x in made if sum(size >= TOKENS for size in x.outvars[0].aval.shape) > 1]


@pytest.mark.parametrize(("name", "implementation"), alternated(FUNCTIONS))
def test_canonicalised_products_match_the_reference_with_gradients(name, implementation):
    function, *shapes = FUNCTIONS[name]
    given = arrays(OPERAND, OPERAND, OPERAND, *shapes)
    assert_fused(function, given, implementation)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_canonicalised_products_keep_scores_out_of_memory(name):
    function, *shapes = FUNCTIONS[name]
    given = arrays(OPERAND, OPERAND, OPERAND, *shapes)
    assert explain(function)(*given).regions and not pairs_outside(function, given)


@pytest.mark.parametrize("name", ["beside relu", "points by sums", "weighted heads", "mixture of softmaxes"])
def test_canonicalised_products_in_bfloat16_are_accurate(name):
    function, *shapes = FUNCTIONS[name]
    given = [x.astype(jnp.bfloat16) for x in arrays(OPERAND, OPERAND, OPERAND, *shapes)]
    assert_as_good_as_written(function, fuse(function, implementation="xla"), given)


@pytest.mark.parametrize("implementation", ["xla", "triton"])
@pytest.mark.parametrize("lead", [(1,), (1, 1), (3, 1)])
@pytest.mark.parametrize("change", [jax.nn.sigmoid, jnp.tril], ids=["sigmoid", "tril"])
def test_batch_axes_of_size_one_match_the_reference(change, lead, implementation):
    """`jnp.matmul` leaves batch axes of size 1 out of its products."""
    given = arrays(*[(*lead, TOKENS, WIDTH)] * 3)

    def function(query, key, value):
        return change(scores(query, key)) @ value

    assert_fused(function, given, implementation)


def one_query_by_sums(query, key, value):
    """Attend from query [B, N, H] to key and value [B, S, N, H] by sums, as recommenders do."""
    weights = jax.nn.softmax(jnp.sum(query[:, None] * key, -1) / 4, axis=1)
    return jnp.sum(weights[..., None] * value, axis=1)


def pooled_by_sums(values, query, _):
    """Pool values [B, S, H] with query [H] by sums."""
    weights = jax.nn.softmax(jnp.tanh(values @ query), axis=1)
    return jnp.sum(weights[..., None] * values, axis=1)


def places(query, key, value):
    """Return the expectation of one number per key, value [B, T], for query and key [B, T, H]."""
    return jnp.sum(weights(query, key) * value[:, None, :], -1)


def scores_by_sums(query, key, value):
    """Return attention of operands [B, T, H] with scores written as sums."""
    return jax.nn.softmax(jnp.sum(query[:, :, None] * key[:, None], -1) / 4, axis=-1) @ value


def scores_by_sums_beside_a_sink(query, key, value, sink):
    """Return attention of operands [B, T, H] with scores written as sums, next to a sink [B]."""
    scores = jnp.sum(query[:, :, None] * key[:, None], -1) / 4
    scores = jnp.concatenate([scores, jnp.broadcast_to(sink[:, None, None], (BATCH, TOKENS, 1))], axis=-1)
    return jax.nn.softmax(scores, axis=-1)[..., :-1] @ value


BY_SUMS = {
    "one query": (
        one_query_by_sums,
        (BATCH, HEADS, WIDTH),
        (BATCH, TOKENS, HEADS, WIDTH),
        (BATCH, TOKENS, HEADS, WIDTH),
    ),
    "pooled": (pooled_by_sums, (BATCH, TOKENS, WIDTH), (WIDTH,), ()),
    "places": (places, (BATCH, TOKENS, WIDTH), (BATCH, TOKENS, WIDTH), (BATCH, TOKENS)),
    "scores": (scores_by_sums, *[(BATCH, TOKENS, WIDTH)] * 3),
    "scores beside a sink": (scores_by_sums_beside_a_sink, *[(BATCH, TOKENS, WIDTH)] * 3, (BATCH,)),
}


@pytest.mark.parametrize("implementation", ["xla", "triton"])
@pytest.mark.parametrize("name", BY_SUMS)
def test_queries_without_an_axis_and_scores_by_sums_match_the_reference(name, implementation):
    function, *shapes = BY_SUMS[name]
    given = arrays(*shapes)
    (region,) = explain(function)(*given).regions
    assert {leaf.role for leaf in region.leaves} - {"scalar"} == {"query", "key"}
    assert_fused(function, given, implementation)


def test_sums_of_weights_without_values_stay_outside_the_region():
    """Numbers of each query and key are not values, so their sum is computed as written."""

    def function(query, key, value):
        mixed = weights(query, key)
        far = jnp.abs(jnp.arange(TOKENS)[:, None] - jnp.arange(TOKENS)[None, :]).astype(mixed.dtype)
        return mixed @ value + jnp.sum(mixed * far[None, None], -1, keepdims=True)

    given = arrays(OPERAND, OPERAND, OPERAND)
    assert len(explain(function)(*given).regions) == 1
    assert_fused(function, given)


def test_features_of_additive_scores_stay_in_tiles():
    """Additive scores, as in graph attention, need no array of queries by keys by features."""

    def function(query, key, value, out):
        hidden = jax.nn.leaky_relu(query[:, :, None] + key[:, None], 0.2)
        return jax.nn.softmax(jnp.sum(out[None, None, None, :] * hidden, -1), axis=-1) @ value

    given = arrays(*[(BATCH, TOKENS, WIDTH)] * 3, (WIDTH,))
    (region,) = explain(function)(*given).regions
    assert "score" not in {leaf.role for leaf in region.leaves}
    assert_fused(function, given)


def squared_relu(query, key, value):
    mixed = jax.nn.relu(scores(query, key)) ** 2
    return (mixed / (mixed.sum(-1, keepdims=True) + 1e-6)) @ value


def masked_again(query, key, value):
    kept = (jnp.arange(TOKENS) % 3 > 0).astype(query.dtype)
    mixed = weights(query, key) * kept[(None,) * (query.ndim - 1)]
    return (mixed / (mixed.sum(-1, keepdims=True) + 1e-6)) @ value


def averaged_heads(query, key, value):
    """Average weights over heads, with a term that has no heads."""
    return (weights(query, key) + 1e-6).mean(1) @ value[:, 0]


LEADS = [(2, 2), (1, 2), (2, 1), (1, 1), (1,)]


@pytest.mark.parametrize(
    ("function", "lead", "implementation"),
    alternated(
        [
            *itertools.product((squared_relu, masked_again), LEADS),
            *itertools.product((averaged_heads,), LEADS[:-1]),
        ]
    ),
)
def test_divided_or_averaged_weights_with_axes_of_size_one_match_the_reference(function, lead, implementation):
    given = arrays(*[(*lead, TOKENS, WIDTH)] * 3)
    assert_fused(function, given, implementation, 1e-4)


@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_elementwise_factors_inside_an_einsum_match_the_reference(implementation):
    """The einsum multiplies weights or scores elementwise by an array with the same axes."""

    def gated(query, key, value, gate):
        mixed = jax.nn.softmax(jnp.einsum("bqnh,bknh->bnqk", query, key), axis=-1)
        return jnp.einsum("bnqk,bnqk,bknh->bqnh", mixed, gate, value)

    def decayed(query, key, value, decay):
        return jnp.einsum("bqnh,bknh,bnqk,bknd->bqnd", query, key, jnp.exp(decay), value)

    given = arrays(*[(BATCH, TOKENS, HEADS, WIDTH)] * 3, (BATCH, HEADS, TOKENS, TOKENS))
    for function in (gated, decayed):
        assert len(explain(function)(*given).regions) == 1
        found = compiled_gradients(fuse(function, implementation=implementation), given)
        assert_alike(found, expected_results(function, given), 1e-4)


def test_dense_layers_with_a_batch_of_one_raise_not_fusible():
    x, into, out = arrays((1, TOKENS, WIDTH), (WIDTH, 64), (64, WIDTH))
    with pytest.raises(NotFusible):
        fuse(lambda x, into, out: jax.nn.sigmoid(x @ into) @ out)(x, into, out)


def test_nonlinear_function_of_a_softmax_beside_it_raises_not_fusible():
    def function(query, key, value):
        mixed = weights(query, key)
        return (mixed - mixed**2) @ value

    with pytest.raises(NotFusible, match="`integer_pow` of a softmax"):
        fuse(function)(*arrays(OPERAND, OPERAND, OPERAND))


def test_flipped_softmax_beside_another_raises_not_fusible():
    def function(query, key, value):
        return (weights(query, key) + weights(key, query)[:, ::-1]) @ value

    with pytest.raises(NotFusible, match=r"`rev` \(flip, \[::-1\]\) of weights"):
        fuse(function)(*arrays(OPERAND, OPERAND, OPERAND))


def test_projections_of_products_written_as_sums_match_the_reference():
    def function(query, key, value, project):
        return (weights(query, key)[..., None] * value[..., None, :, :]).sum(axis=-2) @ project

    shape = (BATCH, HEADS, TOKENS, WIDTH)
    given = arrays(shape, shape, shape, (WIDTH, WIDTH))
    assert_fused(function, given)
    assert "score" not in {leaf.role for region in trace(function, given, {}).all_regions() for leaf in region.leaves}


def test_sums_of_rounded_products_match_the_reference():
    def function(query, key, value):
        products = weights(query, key)[..., None] * value[:, :, None]
        total = (8 * weights(query, key)).sum(1).astype(jnp.int32).astype(jnp.float32)
        whole = jnp.sum((8 * products).astype(jnp.int32).astype(jnp.float32), axis=-2)
        return weights(query, key) @ value + (total @ value[:, 0])[:, None] + whole

    given = arrays(OPERAND, OPERAND, OPERAND)
    assert_alike(compiled_gradients(fuse(function, implementation="xla"), given), expected_results(function, given))
