"""Tests of softmaxes by hand that are divided after the product, and of guards for masked exponentials."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag import NotFusible, fuse
from tests.fusion.fusion_support import (
    alternated,
    assert_alike,
    assert_fused,
    compiled_gradients,
    expected_results,
)

TOKENS, WIDTH = 21, 16
SEEN = np.tril(np.ones((1, TOKENS, TOKENS), bool))
GUARDS = {
    "none": lambda total: total,
    "epsilon": lambda total: total + 1e-9,
    "bound": lambda total: jnp.maximum(total, 1e-9),
    "choice": lambda total: jnp.where(total == 0, 1.0, total),
}
POWERS = ("plain", "masked", "masked, largest of what is seen")


def operands(lead=(3,), count=3):
    draw = np.random.default_rng(0)
    return [jnp.asarray(draw.normal(size=(*lead, TOKENS, WIDTH)), jnp.float32) for _ in range(count)]


def by_hand(powers, guard, hidden, is_late):
    """Return attention with a softmax of masked scores.

    Args:
        powers: the kind of exponentials, one of POWERS.
        hidden: the score of keys that are not seen.
    """

    def attention(query, key, value):
        scores = jnp.where(SEEN, query @ key.mT / 4, hidden)
        largest = scores.max(-1, keepdims=True)
        if powers == POWERS[2]:
            largest = scores.max(-1, keepdims=True, where=SEEN, initial=-np.inf)
        power = jnp.exp(scores - largest)
        if powers != "plain":
            power = jnp.where(SEEN, power, 0.0)
        total = GUARDS[guard](power.sum(-1, keepdims=True))
        return (power @ value) / total if is_late else (power / total) @ value

    return attention


@pytest.mark.parametrize("hidden", [-np.inf, -1e9, -1e30])
@pytest.mark.parametrize("powers", POWERS)
def test_guarded_softmaxes_by_hand_match_the_reference(powers, hidden):
    given = operands()
    for guard, is_late in itertools.product(GUARDS, (False, True)):
        function = by_hand(powers, guard, hidden, is_late)
        found = compiled_gradients(fuse(function, implementation="xla"), given)
        assert_alike(found, expected_results(function, given))


@pytest.mark.parametrize("powers", POWERS)
def test_guarded_softmax_kernels_match_the_reference(powers):
    given = operands((1,))
    function = by_hand(powers, "epsilon", -np.inf, is_late=True)
    found = compiled_gradients(fuse(function, implementation="triton"), given)
    assert_alike(found, expected_results(function, given))


def grouped(order):
    """Merge groups and their heads before the division, as MaxText does; `order` permutes the axes of the sums."""

    def attention(query, key, value):
        scores = jnp.einsum("btkgd,bskd->bkgts", query, key)
        power = jnp.exp(scores - scores.max(-1, keepdims=True))
        total = jnp.transpose(power.sum(-1, keepdims=True), order).reshape(2, TOKENS, 4, 1)
        return jnp.einsum("bkgts,bskd->btkgd", power, value).reshape(2, TOKENS, 4, WIDTH) / total

    return attention


def test_merged_heads_before_late_division_match_the_reference():
    draw = np.random.default_rng(0)
    shapes = [(2, TOKENS, 2, 2, WIDTH), (2, TOKENS, 2, WIDTH), (2, TOKENS, 2, WIDTH)]
    given = [jnp.asarray(draw.normal(size=shape) / 2, jnp.float32) for shape in shapes]
    function = grouped((0, 3, 1, 2, 4))
    assert_alike(compiled_gradients(fuse(function, implementation="xla"), given), expected_results(function, given))
    with pytest.raises(NotFusible):
        fuse(grouped((0, 3, 2, 1, 4)))(*given)


def test_late_division_with_a_sink_matches_the_reference():
    def function(query, key, value, sink):
        scores = jnp.where(SEEN, query @ key.mT / 4, -jnp.inf)
        largest = jnp.maximum(scores.max(-1, keepdims=True), sink[:, None, None])
        power = jnp.exp(scores - largest)
        return (power @ value) / (power.sum(-1, keepdims=True) + jnp.exp(sink[:, None, None] - largest))

    given = [*operands(), jnp.asarray([0.3, -1.0, 2.0])]
    assert_alike(compiled_gradients(fuse(function, implementation="xla"), given), expected_results(function, given))


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("has_sink", [False, True])
def test_base_2_exponentials_match_the_reference(is_late, has_sink):
    def function(query, key, value, sink):
        sink = sink[:, None, None] / np.log(2)
        scores = jnp.where(SEEN, query @ key.mT / (4 * np.log(2)), -jnp.inf)
        largest = scores.max(-1, keepdims=True)
        largest = jnp.maximum(largest, sink) if has_sink else largest
        power = jnp.exp2(scores - largest)
        total = power.sum(-1, keepdims=True) + (jnp.exp2(sink - largest) if has_sink else 0)
        return (power @ value) / total if is_late else (power / total) @ value

    given = [*operands(), jnp.asarray([0.3, -1.0, 2.0])]
    for implementation in ("xla", "triton"):
        found = compiled_gradients(fuse(function, implementation=implementation), given)
        assert_alike(found, expected_results(function, given))


@pytest.mark.parametrize("powers", POWERS[:2])
def test_exponentials_divided_by_their_l1_norm_match_the_reference(powers):
    def function(query, key, value):
        scores = jnp.where(SEEN, query @ key.mT / 4, -jnp.inf)
        power = jnp.exp(scores - scores.max(-1, keepdims=True))
        power = power if powers == "plain" else jnp.where(SEEN, power, 0.0)
        return power / jnp.linalg.norm(power, ord=1, axis=-1, keepdims=True) @ value

    assert_fused(function, operands(), "xla")


def a_sink_of_another_base(query, key, value):
    scores = query @ key.mT / 4
    largest = jnp.maximum(scores.max(-1, keepdims=True), 1.0)
    power = jnp.exp2(scores - largest)
    return (power / (power.sum(-1, keepdims=True) + jnp.exp(1.0 - largest))) @ value


def less_than_what_is_seen(query, key, value):
    """The largest score may belong to a masked key, so that the sum is smaller than its guard."""
    scores = 40 * query @ key.mT
    power = jnp.where(SEEN, jnp.exp(scores - scores.max(-1, keepdims=True)), 0.0)
    return (power @ value) / (power.sum(-1, keepdims=True) + 1e-7)


def others_seen(query, key, value):
    scores = jnp.where(SEEN, -1e30, 40 * query @ key.mT)
    power = jnp.where(SEEN, jnp.exp(scores - scores.max(-1, keepdims=True)), 0.0)
    return (power @ value) / (power.sum(-1, keepdims=True) + 1e-7)


def seen_the_other_way(query, key, value):
    """Mask the exponentials by the transpose of the scores' mask."""
    seen = jnp.asarray(SEEN)
    scores = jnp.where(seen.mT, 40 * query @ key.mT, -1e30)
    power = jnp.where(seen, jnp.exp(scores - scores.max(-1, keepdims=True)), 0.0)
    return (power @ value) / (power.sum(-1, keepdims=True) + 1e-7)


def sum_of_what_is_seen(query, key, value):
    """Leave the weights of hidden keys out of the sum."""
    scores = query @ key.mT / 4
    power = jnp.exp(scores - scores.max(-1, keepdims=True))
    return (power @ value) / jnp.where(SEEN, power, 0.0).sum(-1, keepdims=True)


def sum_of_others(query, key, value):
    scores = query @ key.mT / 4
    power = jnp.exp(scores - scores.max(-1, keepdims=True))
    return (power @ value) / (power**2).sum(-1, keepdims=True)


def sums_of_other_rows(query, key, value):
    scores = query @ key.mT / 4
    power = jnp.exp(scores - scores.max(-1, keepdims=True))
    return (power @ value) / power.sum(-1, keepdims=True)[:, ::-1]


@pytest.mark.parametrize(
    "function",
    [
        a_sink_of_another_base,
        less_than_what_is_seen,
        others_seen,
        seen_the_other_way,
        sum_of_what_is_seen,
        sum_of_others,
        sums_of_other_rows,
    ],
)
def test_quotients_that_are_not_softmaxes_raise_not_fusible(function):
    with pytest.raises(NotFusible):
        fuse(function)(*operands())


@jax.jit
def twice(query, key, value):
    scores = query @ key.mT / 4
    power = jnp.exp(scores - scores.max(-1, keepdims=True))
    result = power @ value
    return jnp.concatenate([result / jnp.maximum(power.sum(-1, keepdims=True), 1e-9), result], axis=-1)


def test_product_that_is_also_returned_matches_the_reference():
    given = operands()
    assert_alike(compiled_gradients(fuse(twice, implementation="xla"), given), expected_results(twice, given))


APART = np.abs(np.arange(TOKENS)[:, None] - np.arange(TOKENS)).astype(np.float32)
CHANGES = {
    "scaled": lambda power: power / 0.9,
    "negative": lambda power: -power,
    "less by distance": lambda power: power * jnp.exp(-0.1 * APART)[None],
    "masked": lambda power: jnp.where(APART < 9, power, 0.0),
    "masked and scaled": lambda power: jnp.where(APART < 9, power / 0.9, 0.0) * 2,
    "moved": lambda power: (power.swapaxes(-1, -2) * 3).swapaxes(-1, -2),
}


@pytest.mark.parametrize(("change", "is_late", "implementation"), alternated(itertools.product(CHANGES, [False, True])))
def test_powers_changed_before_the_division_match_the_reference(change, is_late, implementation):
    """The sum is that of the unchanged exponentials, as with dropout of weights."""

    def attention(query, key, value):
        scores = query @ key.mT / 4
        power = jnp.exp(scores - scores.max(-1, keepdims=True))
        changed, total = CHANGES[change](power), power.sum(-1, keepdims=True)
        return changed @ value / total if is_late else changed / total @ value

    assert_fused(attention, operands(), implementation)


def test_powers_dropped_before_the_division_keep_the_mean():
    def attention(query, key, value, keep):
        scores = query @ key.mT / 4
        power = jnp.exp(scores - scores.max(-1, keepdims=True))
        kept = jax.random.bernoulli(jax.random.key(0), keep, power.shape)
        return jnp.where(kept, power / keep, 0.0) @ value / power.sum(-1, keepdims=True)

    query, key, _ = operands()
    total = fuse(attention)(query, key, jnp.ones_like(query), 0.5)[..., 0]
    assert 0.1 < float(total.std()) < 0.5 and abs(float(total.mean()) - 1) < 0.1


def in_turn(query, key, value, sink):
    """Compute exponentials as kernels do, with log2(e) in the exponent, a sink and the reciprocal of the sum."""
    scores = query @ key.mT / 4
    largest = jnp.maximum(scores.max(-1, keepdims=True), sink)
    power = jnp.exp2((scores - largest) * 1.4426950408889634)
    total = power.sum(-1, keepdims=True) + jnp.exp2((sink - largest) * 1.4426950408889634)
    return power @ value * (1 / total)


def halved(query, key, value, sink):
    scores = jnp.where(SEEN, query @ key.mT + 0 * sink, -jnp.inf)
    power = jnp.exp((scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True))) / 2)
    return power / jnp.maximum(power.sum(-1, keepdims=True), 1e-9) @ value


@pytest.mark.parametrize("implementation", ["xla", "triton"])
@pytest.mark.parametrize("function", [in_turn, halved])
def test_exponents_scaled_after_the_maximum_match_the_reference(function, implementation):
    sink = jnp.asarray(np.random.default_rng(4).normal(size=(3, 1, 1)), jnp.float32)
    assert_fused(function, [*operands(), sink], implementation)


def test_sink_with_another_scale_raises_not_fusible():
    def attention(query, key, value):
        scores = query @ key.mT / 4
        largest = scores.max(-1, keepdims=True)
        power = jnp.exp((scores - largest) * 2)
        return power @ value / (power.sum(-1, keepdims=True) + jnp.exp(1 - largest))

    with pytest.raises(NotFusible):
        fuse(attention)(*operands())


@pytest.mark.parametrize("number", [-0.5, 0.0, 0.5])
def test_constant_added_to_the_sum_matches_the_reference(number):
    """The constant is the exponential of a logit, unless it is negative."""

    def attention(query, key, value):
        power = jnp.exp(query @ key.mT / 4)
        return power @ value / (power.sum(-1, keepdims=True) + number)

    assert_fused(attention, operands())


def test_bfloat16_exponents_outside_attention_are_not_rewritten():
    """In bfloat16, a difference that is taken after the factor would be rounded more."""

    def function(query, key, value):
        weights = jnp.exp((value - value.max(-1, keepdims=True)) * 3)
        return jax.nn.softmax(query @ key.mT) @ value, weights / weights.sum(-1, keepdims=True)

    given = [8 * x.astype(jnp.bfloat16) for x in operands()]
    found, expected = jax.jit(fuse(function))(*given), jax.jit(function)(*given)
    np.testing.assert_array_equal(np.float32(found[1]), np.float32(expected[1]))
