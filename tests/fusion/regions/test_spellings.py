"""Tests of attention as other code writes it, with various operations and dtypes between scores and softmax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from blockdiag import NotFusible, explain, fuse
from tests.fusion.fusion_support import alternated

BATCH, TOKENS, WIDTH = 4, 20, 16
POSITIONS = np.arange(TOKENS)
AWAY = POSITIONS[:, None] - POSITIONS[None, :]


def attention_of(change):
    """Return an attention function that applies `change` to scores and other arrays before the softmax."""

    def attention(query, key, value, *others):
        return jax.nn.softmax(change(query @ key.mT / 4, *others), axis=-1) @ value

    return attention


def behind_a_barrier(query, key, value):
    """Use the second of two values that pass an optimisation barrier together."""
    _, scores = lax.optimization_barrier((query @ key.mT, key @ query.mT / 4))
    _, weights = lax.optimization_barrier((scores, jax.nn.softmax(scores, axis=-1)))
    return weights @ value


def three_cases(scores):
    away = jnp.broadcast_to(jnp.asarray(AWAY), scores.shape)
    return jnp.select([away < 0, away < 4], [jnp.full_like(scores, -jnp.inf), scores], scores - 2)


def one_of_three(query, key, value, which):
    """Select one of three functions of the scores by `which` [B]."""

    def one(query, key, value, which):
        changes = (lambda x: x, lambda x: 3 * jnp.tanh(x), lambda x: x - jnp.abs(jnp.asarray(AWAY, x.dtype)))
        scores = [change(query @ key.T / 4) for change in changes]
        return jax.nn.softmax(lax.select_n(jnp.full(scores[0].shape, which), *scores), axis=-1) @ value

    return jax.vmap(one)(query, key, value, which)


def wrapped_positions(scores):
    """Mask by differences of 8-bit positions, which wrap around: 60 - -70 is -126."""
    position = jnp.asarray(POSITIONS * 10 - 90, jnp.int8)
    return jnp.where(((position[:, None] - position[None, :]) >= 0)[None], scores, -1.0)


def largest_number_before_a_factor(query, key, value):
    """Return attention in which the scores of some pairs, times 4, are infinite, and `nan_to_num` makes them finite."""
    scores = jnp.where(AWAY == 3, jnp.inf, query @ key.mT)
    return jax.nn.softmax(jnp.nan_to_num(scores) / 4, axis=-1) @ value


def powers_of_two(query, key, value):
    """Return attention with exponentials that are powers of the number 2."""
    scores = query @ key.mT / 4
    power = 2.0 ** (scores - lax.stop_gradient(scores.max(axis=-1, keepdims=True)))
    return power / power.sum(axis=-1, keepdims=True) @ value


def sinks_in_base_2(query, key, value, sink):
    """Return attention by exp2 with a sink [B], a further logit of each row."""
    scores = jnp.concatenate([query @ key.mT / 4, jnp.broadcast_to(sink[:, None, None], (BATCH, TOKENS, 1))], axis=-1)
    power = jnp.exp2(scores - lax.stop_gradient(scores.max(axis=-1, keepdims=True)))
    return (power / power.sum(axis=-1, keepdims=True))[..., :-1] @ value


def largest_taken_away_twice(query, key, value, sink):
    """Subtract the maximum before a softmax with a sink [B] subtracts it again, as models of Hugging Face do."""
    logits = jnp.concatenate([query @ key.mT / 4, jnp.broadcast_to(sink[:, None, None], (BATCH, TOKENS, 1))], axis=-1)
    logits = logits - logits.max(axis=-1, keepdims=True)
    return jax.nn.softmax(logits, axis=-1)[..., :-1] @ value


def times_reciprocal(of):
    """Return an attention function that multiplies exponentials by `of(total)`, with their sum as `total`."""

    def attention(query, key, value):
        scores = query @ key.mT / 4
        power = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
        return (of(power.sum(axis=-1, keepdims=True)) * power) @ value

    return attention


def divided_last_by_heads(query, key, value):
    """Divide a result that has tokens before heads by sums that have heads before tokens."""
    query, key, value = (x.reshape(BATCH, TOKENS, 2, WIDTH // 2) for x in (query, key, value))
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) / 4
    power = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    output = jnp.einsum("bnts,bsnh->btnh", power, value) / power.sum(axis=-1).transpose(0, 2, 1)[..., None]
    return output.reshape(BATCH, TOKENS, WIDTH)


def tied_rows(query, key, value):
    """Share weights between the rows of an alignment: products sum over rows and features, which are not adjacent."""
    scores = jnp.einsum("rth,rsh->ts", query, key) / 8
    return jnp.einsum("ts,rsh->rth", jax.nn.softmax(scores, axis=-1), value)


def segments(dtype):
    """Return a change that masks by segments, from a product of one_hot [B, T, 3] as integers or booleans."""

    def change(scores, one_hot):
        one_hot = one_hot.astype(dtype)
        return jnp.where(one_hot @ one_hot.mT > jnp.zeros((), dtype), scores, -1e9)

    return change


def product_bias(scores, pair, weights):
    """Add a bias that a layer with weights [2, 5], wider than the pairs, makes of pair [B, T, T, 2]."""
    return scores + jnp.tanh(pair @ weights).sum(axis=-1)


def positions_layer(scores, first, second):
    """Add a bias that two layers make of positions, as in Swin v2."""
    table = jnp.stack([jnp.asarray(AWAY, jnp.float32), jnp.asarray(AWAY**2, jnp.float32)], axis=-1) / TOKENS
    return scores + (jax.nn.relu(table @ first) @ second)[None, :, :, 0]


def windows_apart(scores, mask):
    """Separate windows from images for the sole purpose of adding mask [2, T, T], as in Swin."""
    return (scores.reshape(BATCH // 2, 2, TOKENS, TOKENS) + mask[None]).reshape(scores.shape)


def softmax_apart(query, key, value, mask):
    """Separate windows from images for the softmax as well as for mask [2, T, T]."""
    scores = (query @ key.mT / 4).reshape(BATCH // 2, 2, TOKENS, TOKENS) + mask[None]
    return jax.nn.softmax(scores, axis=-1).reshape(BATCH, TOKENS, TOKENS) @ value


def _normal(*shape):
    return jnp.asarray(np.random.default_rng(len(shape)).normal(size=shape), jnp.float32)


ONE_HOT = jnp.asarray(np.eye(3)[np.random.default_rng(0).integers(0, 3, (BATCH, TOKENS))], jnp.float32)
CASES = {
    "behind_a_barrier": (behind_a_barrier,),
    "three_cases": (attention_of(three_cases),),
    "one_of_three": (one_of_three, jnp.arange(BATCH) % 3),
    "wrapped_positions": (attention_of(wrapped_positions),),
    "sinks_in_base_2": (sinks_in_base_2, _normal(BATCH) + 3),
    "whole_segments": (attention_of(segments(jnp.int32)), ONE_HOT),
    "true_segments": (attention_of(segments(bool)), ONE_HOT),
    "product_bias": (attention_of(product_bias), _normal(BATCH, TOKENS, TOKENS, 2), _normal(2, 5)),
    "positions_layer": (attention_of(positions_layer), _normal(2, 6), _normal(6, 1)),
    "windows_apart": (attention_of(windows_apart), _normal(2, TOKENS, TOKENS)),
    "softmax_apart": (softmax_apart, _normal(2, TOKENS, TOKENS)),
    "named": (attention_of(lambda scores: checkpoint_name(scores, "scores")),),
    "largest_taken_away_twice": (largest_taken_away_twice, _normal(BATCH)),
    "times_reciprocal": (times_reciprocal(jnp.reciprocal),),
    "times_one_over": (times_reciprocal(lambda total: 1 / total),),
    "divided_last_by_heads": (divided_last_by_heads,),
    "tied_rows": (tied_rows,),
    "largest_number": (attention_of(lambda scores: jnp.where(AWAY == 3, jnp.finfo(scores.dtype).max, scores)),),
    "largest_number_before_a_factor": (largest_number_before_a_factor,),
    "powers_of_two": (powers_of_two,),
    "logarithms": (attention_of(lambda scores: jnp.log2(1 + scores**2)),),
}


def operands(others=()):
    return [_normal(BATCH, TOKENS, WIDTH) + i for i in range(3)] + list(others)


def with_gradients(function, arrays):
    floating = [i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.floating)]

    def compute(*given):
        return function(*(given[floating.index(i)] if i in floating else x for i, x in enumerate(arrays)))

    output, pull = jax.vjp(compute, *(arrays[i] for i in floating))
    return [output, *pull(jnp.cos(jnp.arange(output.size, dtype=jnp.float32)).reshape(output.shape))]


@pytest.mark.parametrize(("name", "implementation"), alternated(CASES))
def test_attention_spellings_match_the_reference_with_gradients(name, implementation):
    function, *others = CASES[name]
    arrays = operands(others)
    found = with_gradients(fuse(function, implementation=implementation), arrays)
    for actual, expected in zip(found, with_gradients(function, arrays), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5 * max(1.0, float(np.abs(expected).max())))


@pytest.mark.parametrize("name", ["divided_last_by_heads", "times_one_over", "tied_rows"])
def test_attention_spellings_leave_no_scores_outside(name):
    function, *others = CASES[name]
    found = explain(function)(*operands(others))
    (region,) = found.regions
    assert region.has_softmax and region.skipped == 0
    assert not {"dot_general", "exp", "reduce_sum"} & set(found.outside)


def test_reciprocal_of_another_numerator_raises_not_fusible():
    with pytest.raises(NotFusible):
        fuse(times_reciprocal(lambda total: 2 / total))(*operands())


def masked_by_rows_and_columns(query, key, value):
    """Mask the sum over keys by columns, but the weights by rows."""
    mask = value[..., 0] > 0
    power = jnp.exp(query @ key.mT / 4)
    total = jnp.where(mask[:, None, :], power, 0).sum(axis=-1, keepdims=True)
    return jnp.where(mask[:, :, None], power / total, 0) @ value


def two_axes(query, key, value):
    scores = jnp.einsum("bth,bsuh->btsu", query, key.reshape(BATCH, TOKENS // 2, 2, WIDTH))
    weights = jax.nn.softmax(scores, axis=(-1, -2)) ** 2
    return jnp.einsum("btsu,bsuh->bth", weights, value.reshape(BATCH, TOKENS // 2, 2, WIDTH))


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (masked_by_rows_and_columns, "whose sum has a different mask"),
        (two_axes, "`integer_pow` of a softmax"),
    ],
)
def test_unfusible_spellings_are_named_in_the_error(function, words):
    arrays = operands()
    with pytest.raises(NotFusible, match=words):
        fuse(function)(*arrays)


@pytest.mark.parametrize(
    ("dtypes", "words"),
    [
        (
            ("float32", "float32", "int8"),
            "take values of bfloat16, float16, float32, float8_e4m3fn, float8_e5m2, got int8",
        ),
        (("float32", "bfloat16", "bfloat16"), "got bfloat16 and float32"),
        (("int32", "int32", "float32"), "int8, got int32"),
    ],
)
def test_kernels_with_unsupported_dtypes_raise_not_implemented_error(dtypes, words):
    def attention(query, key, value):
        scores = lax.dot_general(query, key, (((2,), (2,)), ((0,), (0,))), preferred_element_type=jnp.float32)
        return jnp.matmul(jax.nn.softmax(scores / 4, axis=-1), value, preferred_element_type=jnp.float32)

    with jax.numpy_dtype_promotion("standard"):
        arrays = [x.astype(dtype) for x, dtype in zip(operands(), dtypes, strict=True)]
        with pytest.raises(NotImplementedError, match=words):
            fuse(attention, implementation="triton")(*arrays)
        expected = attention(*arrays)
        allowed = 2e-2 if "bfloat16" in dtypes else 1e-4
        found = fuse(attention, implementation="xla")(*arrays)
        np.testing.assert_allclose(found, expected, rtol=0, atol=allowed * float(np.abs(expected).max()))


def _scaled(*shape):
    return _normal(*shape) / shape[-2]


def _attend(x, query, key, value):
    """Return attention of projections with biases, with heads in the layout of Flax."""
    query, key, value = ((x @ w + b[None, None]).reshape(BATCH, TOKENS, 2, WIDTH // 2) for w, b in (query, key, value))
    weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", query, key) / 3, axis=-1)
    return jnp.einsum("bnts,bsnh->btnh", weights, value).reshape(x.shape)


def _centred(x):
    return x - x.mean(axis=-1, keepdims=True)


def decoder(x, layers):
    for *projections, first, second in layers:
        x += _attend(_centred(x), *projections)
        x += jax.nn.gelu(_centred(x) @ first) @ second
    return x


def decoder_of_experts(x, layers):
    """Run attention and experts; first and second [E, ..] hold an expert for each quarter of the batch."""
    for *projections, first, second in layers:
        x += _attend(x, *projections)
        hidden = jax.nn.relu(jnp.einsum("etd,edf->etf", x, first[:, : x.shape[-1]]))
        x += jnp.einsum("etf,efd->etd", hidden, second)
    return x


def pairs_and_tokens(x, layers):
    """Run layers as in Evoformer: tokens make pairs, which a layer turns into the bias of the next attention."""
    pair = jnp.zeros((BATCH, TOKENS, TOKENS, 40))
    for query, key, value, first, second in layers:
        pair += jnp.tanh(x @ first)[:, :, None] * (x @ first)[:, None]
        scores = (x @ query[0]) @ (x @ key[0]).mT / 4 + (_centred(pair) @ second)[..., 0]
        x += jax.nn.softmax(scores, axis=-1) @ (x @ value[0])
    return x


@pytest.mark.parametrize("model", [decoder, decoder_of_experts, pairs_and_tokens])
def test_models_fuse_all_attention_and_nothing_else(model):
    lead = (BATCH,) if model is decoder_of_experts else ()
    projection = (_scaled(WIDTH, WIDTH), _normal(WIDTH) / 4)
    layer = [projection] * 3 + [_scaled(*lead, WIDTH, 40), _scaled(*lead, 40, WIDTH)]
    arrays = (_normal(BATCH, TOKENS, WIDTH), [layer, layer])
    found = explain(model)(*arrays).regions
    assert len(found) == 2 and all("softmax" in str(region) and "no softmax" not in str(region) for region in found)
    value, pull = jax.vjp(model, *arrays)
    fused, pull_fused = jax.vjp(fuse(model, implementation="xla"), *arrays)
    largest = max(float(np.abs(x).max()) for x in jax.tree.leaves(pull(value)))
    pairs = zip(jax.tree.leaves((fused, pull_fused(value))), jax.tree.leaves((value, pull(value))), strict=True)
    for actual, expected in pairs:
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5 * largest)


def test_explain_names_loops_that_may_contain_attention():
    def model(query, key, value):
        attention = attention_of(lambda scores: scores)
        first = attention(query, key, value)
        return lax.while_loop(lambda x: jnp.sum(x) > 1e9, lambda x: attention(x, key, value), first)

    found = explain(model)(*operands())
    assert len(found.regions) == 1
    assert found.unopened.startswith("there may be more in `while`, at ") and found.unopened in str(found)
    assert explain(attention_of(lambda scores: scores))(*operands()).unopened is None


@pytest.mark.parametrize("implementation", ["xla", "triton", None])
@pytest.mark.parametrize("shape", [(0, 20, 20, 16), (2, 0, 20, 16), (2, 20, 0, 16), (2, 20, 20, 0)])
def test_fuse_of_empty_arrays_keeps_shapes(shape, implementation):
    batch, queries, keys, width = shape
    arrays = [jnp.ones((batch, queries, width)), jnp.ones((batch, keys, width)), jnp.ones((batch, keys, 8))]
    function = attention_of(lambda scores: scores)
    if implementation == "triton" and width == 0:
        with pytest.raises(NotImplementedError, match="take no empty arrays"):
            fuse(function, implementation=implementation)(*arrays)
        return
    output, *gradients = with_gradients(fuse(function, implementation=implementation), arrays)
    assert output.shape == (batch, queries, 8) and [x.shape for x in gradients] == [x.shape for x in arrays]
    # Without keys the result is 0. Otherwise it is a mean of ones, whose rounding by XLA depends on the processor.
    np.testing.assert_allclose(output, 0 if keys == 0 else 1, rtol=2 * np.finfo(np.float32).eps)
