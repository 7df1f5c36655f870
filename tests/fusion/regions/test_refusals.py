"""Refusals of `fuse`: each message names the first line that breaks a rule, and the rule."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag import NotFusible, explain, fuse
from tests.fusion import fusion_refused

TOKENS = 24


def operands(keys: int = TOKENS) -> list[jax.Array]:
    generator = np.random.default_rng(0)
    shapes = [(2, length, 2, 16) for length in (TOKENS, keys, TOKENS)]
    return [jnp.asarray(generator.normal(size=shape), jnp.float32) for shape in shapes]


def scores_of(query, key):
    return jnp.einsum("bqnh,bknh->bnqk", query, key)


def weighted(weights, value):
    return jnp.einsum("bnqk,bknh->bqnh", weights, value)


def softmax_of(scores):
    return jax.nn.softmax(scores, axis=-1)


def of_scores(change):
    return lambda query, key, value: weighted(softmax_of(change(scores_of(query, key))), value)


def of_weights(change):
    return lambda query, key, value: weighted(change(softmax_of(scores_of(query, key))), value)


def of_more_keys(change):
    """Return attention to 25 keys, of which `change` leaves out one."""
    function = of_scores(change)
    return lambda query, key, value: function(query, jnp.concatenate([key, key[:, :1]], axis=1), value)


def looked_up(places):
    """Return the entry of a table of eight for each place."""
    table = jnp.broadcast_to(jnp.arange(8.0)[None, None, None], (*places.shape[:-1], 8))
    return jnp.take_along_axis(table, jnp.minimum(places, 7).astype(int), axis=-1)


def merged_by_hand(query, key, value):
    """Merge attention to two parts of the keys by hand, with one maximum and no more keys than features."""
    scores = [scores_of(query, x) for x in jnp.split(key, 2, axis=1)]
    largest = jnp.maximum(*(x.max(axis=-1, keepdims=True) for x in scores))
    powers = [jnp.exp(x - largest) for x in scores]
    total = jnp.moveaxis(sum(x.sum(axis=-1) for x in powers), 1, 2)[..., None]
    return sum(weighted(x, y) for x, y in zip(powers, jnp.split(value, 2, axis=1), strict=True)) / total


STANDS_BETWEEN = "cannot be computed tile by tile; it is between the scores and their softmax, at"
WHOLE_ROWS = "a value computed from all scores of a row outside a softmax, at"


def straight_through(weights):
    """Return a one-hot vector of the largest weight, with the derivative of all weights."""
    largest = jax.nn.one_hot(weights.argmax(axis=-1), TOKENS)
    return jax.lax.stop_gradient(largest - weights) + weights


def over_queries(query, key):
    """Return the weights of slot attention, a softmax along queries, before and after normalisation along keys."""
    weights = jax.nn.softmax(scores_of(query, key), axis=-2) + 1e-8
    return weights, weights / weights.sum(axis=-1, keepdims=True)


def slots(query, key, value):
    """Return slot attention of one head by hand, with keys first, as it is mostly written."""
    query, key, value = (x[:, :, 0] for x in (query, key, value))
    scores = jnp.einsum("bkh,bqh->bkq", key, query)
    powers = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    weights = powers / powers.sum(axis=-1, keepdims=True)
    return jnp.einsum("bkq,bkh->bqh", weights / weights.sum(axis=1, keepdims=True), value)


def with_sink(query, key, value, powers, sink, *, is_late):
    """Return attention whose exponentials are divided by their sum plus that of a sink.

    Args:
        powers, sink: functions of the scores and of the sink's logit, both less the largest score.
        is_late: whether the product with values is divided instead of the weights.
    """
    scores = scores_of(query, key)
    largest = scores.max(axis=-1, keepdims=True)
    power = powers(scores - largest)
    total = power.sum(axis=-1, keepdims=True) + sink(1 - largest)
    return weighted(power, value) / jnp.moveaxis(total, 1, 2) if is_late else weighted(power / total, value)


def of_sink(powers, sink, *, is_late=False):
    return lambda query, key, value: with_sink(query, key, value, powers, sink, is_late=is_late)


ALONG_QUERIES = "a softmax along the queries: softmaxes must be along the keys, which "
SAME_BASE = "of scores: additional exponentials, such as a sink's, must have the same base and the same number "


OF_SCORES = {
    "slice": (of_more_keys(lambda scores: scores[..., :-1]), f"`slice` (indexing, roll) of scores {STANDS_BETWEEN}"),
    "sort": (of_scores(lambda scores: jnp.sort(scores, axis=-1)), f"`sort` of scores {STANDS_BETWEEN}"),
    "cumsum": (of_scores(lambda scores: jnp.cumsum(scores, axis=-1)), f"`cumsum` of scores {STANDS_BETWEEN}"),
    "flip": (of_scores(lambda scores: scores[..., ::-1]), f"`rev` (flip, [::-1]) of scores {STANDS_BETWEEN}"),
    "gather": (
        of_scores(lambda scores: scores[..., np.arange(TOKENS)[::-1]]),
        f"`gather` (indexing, take_along_axis) of scores {STANDS_BETWEEN}",
    ),
    "roll": (
        of_scores(lambda scores: jnp.roll(scores, 1, axis=-1)),
        f"`slice` (indexing, roll) of scores {STANDS_BETWEEN}",
    ),
    "mixed heads": (
        of_scores(lambda scores: jnp.einsum("bnqk,nm->bmqk", scores, jnp.eye(2))),
        "`dot_general` (einsum, matmul): a product of scores with another array sums over an axis of 2 that is",
    ),
    "deviation": (
        of_scores(lambda scores: scores / scores.std(axis=-1, keepdims=True)),
        f"`reduce_sum` (sum, mean) along the keys: {WHOLE_ROWS}",
    ),
    "softmax twice": (of_scores(softmax_of), "a softmax of the weights of another softmax: the input of a softmax"),
    "contextual positions": (
        of_scores(lambda scores: scores + looked_up(jnp.cumsum(jax.nn.sigmoid(scores), axis=-1))),
        f"`cumsum` of scores {STANDS_BETWEEN}",
    ),
    "branch": (
        of_scores(lambda scores: jax.lax.cond(scores[0, 0, 0, 0] > 0, jnp.cos, jnp.sin, scores)),
        f"`cond` of scores {STANDS_BETWEEN}",
    ),
}
OF_WEIGHTS = {
    "chosen": (of_weights(lambda weights: jax.lax.top_k(weights, TOKENS)[0]), "`top_k` of weights cannot be computed"),
    "mixed": (
        of_weights(lambda weights: jnp.einsum("bnqk,nm->bmqk", weights, jnp.eye(2))),
        "`dot_general` (einsum, matmul): a product of weights with another array sums over an axis of 2 that is",
    ),
    "normalised again": (
        of_weights(lambda weights: weights / jnp.maximum(weights, 0.01).sum(axis=-1, keepdims=True)),
        "`reduce_sum` (sum, mean) along the keys: a value computed from all weights of a row outside a softmax, at",
    ),
    "large ones": (
        of_weights(lambda weights: jnp.where(weights > 0.1, weights, 0)),
        "`gt` of a softmax: weights may only be added to each other, scaled, masked by 0 and cast, at",
    ),
    "over heads": (
        lambda query, key, value: weighted(jax.nn.softmax(scores_of(query, key), axis=1), value),
        "a softmax along an axis that is neither the queries' nor the keys', such as heads: softmaxes must be along",
    ),
    "over queries": (
        lambda query, key, value: weighted(over_queries(query, key)[0], value),
        ALONG_QUERIES,
    ),
    "slots": (
        lambda query, key, value: weighted(over_queries(query, key)[1], value),
        ALONG_QUERIES,
    ),
    "slots by hand": (slots, ALONG_QUERIES),
    "sink of base 2": (of_sink(jnp.exp, jnp.exp2), f"`add` of `exp2` to the sum of the `exp` {SAME_BASE}"),
    "scores of base 2": (of_sink(jnp.exp2, jnp.exp), f"`add` of `exp` to the sum of the `exp2` {SAME_BASE}"),
    "late sink of base 2": (
        of_sink(jnp.exp, jnp.exp2, is_late=True),
        f"`add` of `exp2` to the sum of the `exp` {SAME_BASE}",
    ),
    "sink less another number": (
        of_sink(jnp.exp, lambda x: jnp.exp(2 * x)),
        f"`add` of `exp` to the sum of the `exp` {SAME_BASE}",
    ),
    "left out": (
        lambda query, key, value: weighted(
            softmax_of(scores_of(query, jnp.concatenate([key, key[:, :1]], axis=1)))[..., :-1], value
        ),
        "`slice` of weights: some of a softmax's keys have no value, at",
    ),
    "no softmax": (
        lambda query, key, value: weighted(jnp.tanh(jnp.sort(scores_of(query, key), axis=-1)), value),
        "`sort` of scores cannot be computed tile by tile; it is between the scores and their product with values",
    ),
    "straight through": (
        lambda query, key, value: weighted(straight_through(softmax_of(scores_of(query, key))), value),
        "`argmax` along the keys: a value computed from all weights of a row outside a softmax, at",
    ),
    "merged by hand": (
        merged_by_hand,
        "`exp` of scores minus their maximum that is not divided by its sum along the keys: ",
    ),
    "loop": (
        lambda query, key, value: jax.lax.while_loop(
            lambda x: jnp.sum(x) > 1e9, lambda x: weighted(softmax_of(scores_of(x, key)), value), query
        ),
        "except possibly in `while` at",
    ),
    "loop over blocks": (
        lambda query, key, value: jax.lax.scan(
            lambda x, _: (weighted(softmax_of(jnp.sort(scores_of(x, key), axis=-1)), value), None), query, length=2
        )[0],
        "nothing inside it can be fused: `sort` of scores cannot be computed tile by tile",
    ),
}
REFUSED = OF_SCORES | OF_WEIGHTS


@pytest.mark.parametrize("name", REFUSED)
def test_messages_name_the_primitive_the_line_and_the_rule(name):
    function, message = REFUSED[name]
    inputs = operands()
    jax.eval_shape(function, *inputs)  # The function itself is valid.
    with pytest.raises(NotFusible, match=re.escape(message)) as failure:
        fuse(function)(*inputs)
    assert re.search(r"test_refusals\.py:\d+", str(failure.value))
    assert explain(function)(*inputs).reason == str(failure.value)


def reason_of(case: fusion_refused.Refused, function) -> str:
    with pytest.raises(NotFusible, match=re.escape(case.says)) as refusal:
        function(*case.operands)
    return str(refusal.value)


@pytest.mark.parametrize("name", fusion_refused.REFUSED)
def test_refusal_names_the_first_line_that_breaks_a_rule(name):
    case = fusion_refused.REFUSED[name]
    jax.eval_shape(case.function, *case.operands)  # The function itself is valid.
    reason = reason_of(case, fuse(case.function))
    # For a loop, the message names the line of the loop and then the line inside it.
    assert int(re.findall(r"fusion_refused\.py:(\d+)", reason)[-1]) == case.line
    assert str(explain(case.function)(*case.operands)) == f"not fusible: {reason}"


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, lambda f: jax.grad(lambda *x: f(*x).sum())])
def test_refusal_under_a_transformation_is_the_same(transform):
    case = fusion_refused.REFUSED["talking_heads"]
    more = fusion_refused.Refused(case.function, case.says, tuple((3, *shape) for shape in case.shapes))
    assert reason_of(more if transform is jax.vmap else case, transform(fuse(case.function))) == reason_of(
        case, fuse(case.function)
    )


def test_refusal_in_a_shard_map_names_a_rule():
    """Parts of such a program cannot be tried separately, so the message names the first obstacle."""
    case = fusion_refused.REFUSED["best_keys"]
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    mapped = jax.shard_map(fuse(case.function), mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    with pytest.raises(NotFusible, match=r"a value computed from all scores .*fusion_refused\.py:\d+"):
        jax.jit(mapped)(*case.operands)


def test_refusal_with_fallback_is_recorded():
    case = fusion_refused.REFUSED["slots"]
    fused = fuse(case.function, fallback=True)
    np.testing.assert_allclose(fused(*case.operands), case.function(*case.operands), rtol=1e-5, atol=1e-5)
    assert fused.fallbacks == [reason_of(case, fuse(case.function))]


def test_refusal_of_mixed_weights_names_a_way_that_is_fused():
    """The remedy is to multiply the weights of each head by the values of all heads and to mix these products."""

    def function(query, key, value):
        products = jnp.einsum("bnqk,bkmh->bnqmh", fusion_refused.softmax_of(query, key), value)
        return jnp.einsum("bnqmh,nm->bqmh", products, fusion_refused.MIX)

    case = fusion_refused.REFUSED["heads_mixed_after_the_softmax"]
    assert "multiply the weights by the values first" in reason_of(case, fuse(case.function))
    fused = fuse(function)(*case.operands)
    np.testing.assert_allclose(fused, case.function(*case.operands), rtol=1e-4, atol=1e-5)


def joined(query, key, value, sink, first: bool):
    """Add a logit without a value before the keys, and drop a weight at the right or the wrong end."""
    logits = jnp.broadcast_to(sink[None, :, None, None], (2, 2, TOKENS, 1))
    weights = softmax_of(jnp.concatenate([logits, scores_of(query, key)], axis=-1))
    return weighted(weights[..., 1:] if first else weights[..., :-1], value)


def test_sinks_are_removed_only_from_where_they_were_joined():
    inputs = (*operands(), jnp.ones(2))
    fused = fuse(joined)(*inputs, first=True)
    np.testing.assert_allclose(fused, joined(*inputs, first=True), rtol=1e-5, atol=1e-5)
    with pytest.raises(NotFusible, match=r"`slice` of weights: some .*test_refusals"):
        fuse(joined)(*inputs, first=False)


def test_returned_weights_are_computed_outside_the_region():
    def function(query, key, value):
        weights = softmax_of(scores_of(query, key))
        return weighted(weights, value), weights

    for one, other in zip(fuse(function)(*operands()), function(*operands()), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    assert explain(function)(*operands()).outside["exp"] == 1


@pytest.mark.parametrize("options", [{}, {"fallback": True}, {"implementation": "xla", "fallback": True}], ids=str)
def test_fuse_of_symbolic_sizes_exports_the_function_as_it_stands(options):
    def attention(query, key, value):
        return jax.nn.softmax(query @ key.mT) @ value

    operand = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 16, 8"), jnp.float32)
    fused = fuse(attention, **options)
    exported = jax.export.export(jax.jit(fused))(operand, operand, operand)
    given = jnp.ones((3, 16, 8))
    np.testing.assert_allclose(exported.call(given, given, given), given, rtol=1e-6)
    assert "concrete sizes" in fused.fallbacks[0]


@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_fuse_of_symbolic_sizes_with_a_named_implementation_raises_not_fusible(implementation):
    def attention(query, key, value):
        return jax.nn.softmax(query @ key.mT) @ value

    operand = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 16, 8"), jnp.float32)
    with pytest.raises(NotFusible, match="needs concrete sizes to choose tiles, got an array of shape"):
        jax.export.export(jax.jit(fuse(attention, implementation=implementation)))(operand, operand, operand)
