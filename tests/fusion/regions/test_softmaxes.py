"""Tests of ways to write a softmax, and of functions that only look like a softmax."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import stop_gradient

from blockdiag import NotFusible, fuse


def over_sum(power):
    return power / power.sum(axis=-1, keepdims=True)


def largest(scores):
    return scores.max(axis=-1, keepdims=True)


def log_sum(scores, shift):
    return shift + jnp.log(jnp.exp(scores - shift).sum(axis=-1, keepdims=True))


def hidden(scores):
    mask = jnp.tril(jnp.ones_like(scores))
    return scores + (1 - mask) * -1e9


def numbered(scores):
    mask = jnp.tril(jnp.ones_like(scores))
    return scores + (mask * 1e9 - 1e9)


def low(x):
    return jnp.tril(jnp.ones_like(x)) > 0


def over_some(power, some):
    return power / power.sum(axis=-1, keepdims=True, where=some)


SOFTMAXES = {
    "over the sum": lambda x: over_sum(jnp.exp(x)),
    "less the largest before a factor": lambda x: jax.nn.softmax((x - largest(x)) * 2, axis=-1),
    "less the largest, which stands still, before a term": lambda x: jax.nn.softmax(
        (x - stop_gradient(largest(x))) / 0.5 + jnp.arange(x.shape[-1])[None, None, None] / 9, axis=-1
    ),
    "less the largest before a factor, under a mask that is added": lambda x: jax.nn.softmax(
        (hidden(x) - largest(hidden(x))) * 2, axis=-1
    ),
    "less the largest before a factor and a quotient, under a mask that is added": lambda x: over_sum(
        jnp.exp2(-(stop_gradient(largest(hidden(x))) - hidden(x)) / 0.5)
    ),
    "less the largest before a factor, and a mask of large numbers": lambda x: jax.nn.softmax(
        (numbered(x) - largest(numbered(x))) * 2, axis=-1
    ),
    "less the mean before a factor": lambda x: jax.nn.softmax(-2 * (x.mean(axis=-1, keepdims=True) - x), axis=-1),
    "less the largest": lambda x: over_sum(jnp.exp(x - largest(x))),
    "less the largest, which stands still": lambda x: over_sum(jnp.exp(x - stop_gradient(largest(x)))),
    "less the log-sum-exp": lambda x: jnp.exp(x - jax.nn.logsumexp(x, axis=-1, keepdims=True)),
    "less the log-sum-exp by hand": lambda x: jnp.exp(x - log_sum(x, largest(x))),
    "less the logarithm of the sum": lambda x: jnp.exp(x - jnp.log(jnp.exp(x).sum(axis=-1, keepdims=True))),
    "less the logarithm of a sum of differences computed again": lambda x: jnp.exp(
        (x - largest(x)) - jnp.log(jnp.exp(x - largest(x)).sum(axis=-1, keepdims=True))
    ),
    "of base 2, less the log-sum-exp": lambda x: jnp.exp2((x - log_sum(x, largest(x))) * math.log2(math.e)),
    "exp of log_softmax": lambda x: jnp.exp(jax.nn.log_softmax(x, axis=-1)),
    "of scores that stand still": lambda x: jax.nn.softmax(stop_gradient(x), axis=-1),
    "without NaN": lambda x: jnp.nan_to_num(jax.nn.softmax(x, axis=-1)),
    "0 where it is NaN": lambda x: jnp.where(jnp.isnan(w := jax.nn.softmax(x, axis=-1)), 0.0, w),
    "without NaN, masked and scaled": lambda x: jnp.nan_to_num(
        jax.nn.softmax(x, axis=-1, where=jnp.tril(jnp.ones_like(x)) > 0) / 0.9
    ),
    "where it is finite": lambda x: jnp.where(jnp.isfinite(w := jax.nn.softmax(x, axis=-1)), w, 0.0),
    "which stands still": lambda x: stop_gradient(jax.nn.softmax(x, axis=-1)),
    "over the sum and what is lost beside it": lambda x: (
        (p := jnp.exp(x - stop_gradient(largest(x)))) / (p.sum(axis=-1, keepdims=True) + 1e-9)
    ),
    "powers that stand still": lambda x: stop_gradient(jnp.exp(x)) / jnp.exp(x).sum(axis=-1, keepdims=True),
    "of masked scores, over the sum of those seen": lambda x: over_some(
        jnp.exp((y := jnp.where(low(x), x, -1e9)) - largest(y)), low(x)
    ),
    "masked, over the sum of those seen": lambda x: over_some(jnp.where(low(x), jnp.exp(x - largest(x)), 0.0), low(x)),
    "masked by a factor, over the sum of those seen": lambda x: over_some(jnp.exp(x) * low(x).astype(x.dtype), low(x)),
    "less the largest, twice": lambda x: jax.nn.softmax(x - largest(x), axis=-1),
}
OTHERS = {
    "of scores that a small number masks, over the sum of others": lambda x: over_some(
        jnp.exp((y := jnp.where(low(x), x, -5.0)) - largest(y)), low(x)
    ),
    "of masked scores, over the sum of other keys": lambda x: over_some(
        jnp.exp((y := jnp.where(low(x), x, -1e9)) - largest(y)), ~low(x) | (x > 9)
    ),
    "masked, over the sum of other keys": lambda x: over_some(
        jnp.where(low(x), jnp.exp(x - largest(x)), 0.0), jnp.flip(low(x), -1)
    ),
    "bent less the largest": lambda x: jax.nn.softmax(jnp.tanh(x - largest(x)), axis=-1),
    "a log-sum-exp of other heads": lambda x: jnp.exp(x - jax.nn.logsumexp(x, axis=-1, keepdims=True).swapaxes(0, 1)),
    "a logarithm of other heads": lambda x: jnp.exp(
        x - (largest(x) + jnp.log(jnp.exp(x - largest(x)).sum(axis=-1, keepdims=True)).swapaxes(0, 1))
    ),
    "a small number beside a sum less the largest of other heads": lambda x: (
        (p := jnp.exp(x - largest(x).swapaxes(0, 1))) / (p.sum(axis=-1, keepdims=True) + 1e-9)
    ),
    "another number where it is large": lambda x: jnp.where((w := jax.nn.softmax(x, axis=-1)) == 1.0, 0.0, w),
    "a sum that stands still": lambda x: jnp.exp(x) / stop_gradient(jnp.exp(x).sum(axis=-1, keepdims=True)),
    "a log-sum-exp that stands still": lambda x: jnp.exp(x - stop_gradient(log_sum(x, largest(x)))),
    "a log-sum-exp of another shift": lambda x: jnp.exp(
        x - jnp.log(jnp.exp(x - largest(x)).sum(axis=-1, keepdims=True)) - x.min(axis=-1, keepdims=True)
    ),
    "a log-sum-exp and another number": lambda x: jnp.exp(
        x - (jnp.log(jnp.exp(x - largest(x)).sum(axis=-1, keepdims=True)) + x.min(axis=-1, keepdims=True))
    ),
}


def attention_of(softmax):
    def attention(query, key, value):
        scores = jnp.einsum("btnh,bsnh->bnts", query, key) / 4
        return jnp.einsum("bnts,bsnh->btnh", softmax(scores), value)

    return attention


@pytest.fixture(scope="module")
def arrays():
    generator = np.random.default_rng(0)
    return [jnp.asarray(generator.normal(size=(2, 20, 2, 16)), jnp.float32) for _ in range(3)]


def with_gradients(function, arrays):
    cotangent = jnp.cos(jnp.arange(arrays[0].size, dtype=jnp.float32)).reshape(arrays[0].shape)
    output, pull = jax.vjp(function, *arrays)
    return [output, *pull(cotangent)]


@pytest.mark.parametrize("name", SOFTMAXES)
def test_softmax_spellings_match_the_reference_with_gradients(name, arrays):
    function = attention_of(SOFTMAXES[name])
    found = jax.jit(functools.partial(with_gradients, fuse(function, implementation="xla")))(arrays)
    for actual, expected in zip(found, with_gradients(function, arrays), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=3e-6)


@pytest.mark.parametrize("exponential", [jnp.exp, jnp.exp2])
@pytest.mark.parametrize("factor", [1.0, 1.4426950408889634])
def test_fully_masked_rows_of_scores_without_a_product_are_zero(exponential, factor, arrays):
    query, key, value = arrays
    is_seen = jnp.arange(query.shape[1]) % 3 > 0

    def function(query, key, value):
        scores = query[:, :, None, 0, 0] * key[:, None, :, 0, 0]
        scores = jnp.where(is_seen[None, :, None], scores, -jnp.inf)
        weights = over_sum(exponential((scores - largest(scores)) * factor))
        return jnp.einsum("bts,bsnh->btnh", weights, value)

    found = jax.jit(functools.partial(with_gradients, fuse(function, implementation="xla")))(arrays)
    assert jnp.array_equal(found[0], jnp.where(is_seen[None, :, None, None], found[0], 0.0))
    seen = (query[:, is_seen], key, value)
    cotangent = jnp.cos(jnp.arange(query.size, dtype=jnp.float32)).reshape(query.shape)[:, is_seen]

    def of_seen(query, key, value):
        scores = query[:, :, None, 0, 0] * key[:, None, :, 0, 0]
        weights = over_sum(exponential((scores - largest(scores)) * factor))
        return jnp.einsum("bts,bsnh->btnh", weights, value)

    output, pull = jax.vjp(of_seen, *seen)
    for actual, expected in zip(found, [output, *pull(cotangent)], strict=True):
        actual = actual[:, is_seen] if actual.shape != expected.shape else actual
        np.testing.assert_allclose(actual, expected, rtol=0, atol=3e-6)


@pytest.mark.parametrize("terms", ["truths", "integers"])
def test_non_float_terms_before_a_scale_match_the_reference(terms, arrays):
    positions = jnp.arange(arrays[0].shape[1])

    def softmax(x, positions):
        rows, columns = positions[:, None], positions[None]
        added = (rows < columns) if terms == "truths" else (rows - columns)
        x = x + (added.astype(x.dtype) * (-1e9 if terms == "truths" else -0.25))[None, None]
        return over_sum(jnp.exp((x - largest(x)) * 2))

    def function(query, key, value, positions):
        return attention_of(lambda x: softmax(x, positions))(query, key, value)

    found = with_gradients(lambda *x: fuse(function, implementation="xla")(*x, positions), arrays)
    for actual, expected in zip(found, with_gradients(lambda *x: function(*x, positions), arrays), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=3e-6)


def test_epsilon_lost_in_bfloat16_beside_the_sum_matches_the_reference(arrays):
    def softmax(x):
        power = jnp.exp(x - largest(x))
        return power / (power.sum(axis=-1, keepdims=True) + jnp.bfloat16(1e-6))

    narrow = [x.astype(jnp.bfloat16) for x in arrays]
    function = attention_of(softmax)
    found, exact = fuse(function)(*narrow), function(*narrow)
    np.testing.assert_allclose(found.astype(jnp.float32), exact.astype(jnp.float32), rtol=0, atol=0.03)


def test_integer_values_have_no_gradient(arrays):
    query, key, _ = arrays
    value = jnp.arange(query.size, dtype=jnp.int32).reshape(query.shape) % 7

    def attention(query, key):
        weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", query, key) / 4, axis=-1)
        return jax.lax.dot_general(weights, value, (((3,), (1,)), ((0, 1), (0, 2))), preferred_element_type=jnp.float32)

    def gradients(function):
        return jax.grad(lambda *x: jnp.sum(jnp.sin(function(*x))), (0, 1))(query, key)

    for actual, expected in zip(gradients(fuse(attention)), gradients(attention), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5)


# The third row sees no key; heads differ.
SEEN = np.random.default_rng(2).random((1, 2, 20, 20)) > 0.4
SEEN[:, :, 2] = False


def masked(x):
    return jnp.where(SEEN, x, -jnp.inf)


def total(power):
    return power.sum(axis=-1, keepdims=True)


def safe(shift):
    return jnp.where(jnp.isfinite(shift), shift, 0.0)


GUARDED = {
    "another sum than 0": lambda x: (p := jnp.where(SEEN, jnp.exp(x), 0.0)) / jnp.where(total(p) == 0, 1.0, total(p)),
    "a sum that is not 0": lambda x: (
        (p := jnp.where(SEEN, jnp.exp(x - largest(x)), 0.0)) / jnp.where(total(p) != 0, total(p), 1.0)
    ),
    "a least sum": lambda x: (p := jnp.exp(masked(x) - safe(largest(masked(x))))) / jnp.maximum(total(p), 1e-9),
    "a least sum of 1/2": lambda x: (p := jnp.exp(masked(x) - safe(largest(masked(x))))) / jnp.clip(total(p), min=0.5),
    "a small number": lambda x: (p := jnp.exp(masked(x) - stop_gradient(safe(largest(masked(x)))))) / (total(p) + 1e-6),
    "a bound of the largest": lambda x: (
        (p := jnp.exp(masked(x) - jnp.maximum(largest(masked(x)), -1e30))) / (1e-9 + total(p))
    ),
    "a largest that is not infinite": lambda x: (
        (p := jnp.exp(masked(x) - jnp.where(jnp.isinf(m := largest(masked(x))), 0.0, m))) / (total(p) + 1e-8)
    ),
    "a choice of quotients": lambda x: jnp.where(
        (s := total(p := jnp.where(SEEN, jnp.exp(x - largest(x)), 0.0))) > 0, p / jnp.where(s > 0, s, 1.0), 0.0
    ),
    "booleans as numbers": lambda x: (p := jnp.exp(x) * SEEN.astype(x.dtype)) / jnp.where(total(p) > 0, total(p), 1.0),
    "masked the other way round": lambda x: (
        (p := jnp.where(~SEEN, 0.0, jnp.exp(x - largest(x)))) / jnp.where(total(p) == 0, 1.0, total(p))
    ),
}


@pytest.mark.parametrize("name", GUARDED)
def test_guarded_fully_masked_rows_are_zero(name, arrays):
    function = attention_of(GUARDED[name])
    found = jax.jit(functools.partial(with_gradients, fuse(function, implementation="xla")))(arrays)
    for actual, expected in zip(found, with_gradients(function, arrays), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=4e-6)
    assert not np.any(found[0][:, 2])


@pytest.mark.parametrize("name", ["a least sum", "a choice of quotients"])
def test_guarded_fully_masked_rows_in_kernels_match_the_reference(name, arrays):
    function = attention_of(GUARDED[name])
    found = jax.jit(functools.partial(with_gradients, fuse(function, implementation="triton")))(arrays)
    for actual, expected in zip(found, with_gradients(function, arrays), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=4e-6)


CHANGED = {
    "a number beside a sum without the largest": lambda x: (
        (p := jnp.where(SEEN, jnp.exp(x - largest(x)), 0.0)) / (total(p) + 1e-6)
    ),
    "a bound that sums may reach": lambda x: (p := jnp.exp(x - largest(x))) / jnp.maximum(total(p), 1.5),
    "another largest": lambda x: (
        (p := jnp.exp(x - jnp.where(largest(x) > 0, largest(x), 0.0))) / jnp.maximum(total(p), 0.5)
    ),
    "a choice at another sum": lambda x: (p := jnp.exp(x - largest(x))) / jnp.where(total(p) > 2, total(p), 1.0),
}


@pytest.mark.parametrize("name", CHANGED)
def test_guards_that_change_visible_rows_raise_not_fusible(name, arrays):
    with pytest.raises(NotFusible):
        fuse(attention_of(CHANGED[name]))(*arrays)


MISUSED = {
    "square": (
        lambda x: jax.nn.softmax(x, axis=-1) ** 2,
        "`(square|integer_pow|mul)` of a softmax: weights may only be",
    ),
    "largest": (lambda x: jnp.maximum(jax.nn.softmax(x, axis=-1), 0.1), "`max` of a softmax"),
    "sum": (lambda x: (p := jnp.exp(x)) / stop_gradient(p.sum(axis=-1, keepdims=True)), "gradient of its sum"),
    "epsilon": (lambda x: (p := jnp.exp(x - largest(x))) / (p.sum(axis=-1, keepdims=True) + 1e-3), "rows that see no"),
}


@pytest.mark.parametrize("name", MISUSED)
def test_unsupported_operations_on_a_softmax_are_named_in_the_error(name, arrays):
    change, words = MISUSED[name]
    with pytest.raises(NotFusible, match=words):
        fuse(attention_of(change))(*arrays)


@pytest.mark.parametrize("name", OTHERS)
def test_softmax_lookalikes_raise_not_fusible_and_run_as_written_with_fallback(name, arrays):
    with pytest.raises(NotFusible, match=r"a value computed from all scores of a row|of a softmax"):
        fuse(attention_of(OTHERS[name]))(*arrays)
    function = attention_of(OTHERS[name])
    found = with_gradients(fuse(function, fallback=True), arrays)
    for actual, expected in zip(found, with_gradients(function, arrays), strict=True):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(("hidden", "most"), [(-1e5, 0.004), (-1e6, 0.032), (-1e7, 0.65)])
def test_rows_masked_by_finite_numbers_lose_bounded_gradient_precision(hidden, most, arrays):
    """Weights err by the rounding of one number per row, half a unit in its last place, as the guide says."""
    seen = jnp.arange(arrays[0].shape[1]) % 3 > 0
    pairs = (seen[:, None] & seen[None, :])[None, None]
    function = attention_of(lambda x: jax.nn.softmax(jnp.where(pairs, x, x + hidden), axis=-1))
    found, expected = (with_gradients(f, arrays) for f in (fuse(function, implementation="xla"), function))
    errors = [float(jnp.linalg.norm(x - y) / jnp.linalg.norm(y)) for x, y in zip(found, expected, strict=True)]
    assert errors[0] < 1e-6 and max(errors[1:]) <= most
