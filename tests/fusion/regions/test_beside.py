"""Tests of operands derived from other scores: masks and biases of another product, scores of the previous layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag import NotFusible, explain, fuse
from tests.fusion.fusion_support import alternated, arrays, assert_alike, assert_fused

BATCH, HEADS, TOKENS, WIDTH = 2, 2, 35, 16
OPERAND, INDEX = (BATCH, HEADS, TOKENS, WIDTH), (BATCH, TOKENS, 8)


def scores(query, key):
    return query @ key.mT / 4


def attend(found, value):
    return jax.nn.softmax(found, axis=-1) @ value


def best(query, key, value, left, right):
    """Return attention to the keys that another product ranks highest."""
    index = left @ right.mT
    least = jax.lax.top_k(index, 8)[0][..., -1:]
    return attend(jnp.where((index >= least)[:, None], scores(query, key), -jnp.inf), value)


def standardised(query, key, value, left, right):
    index = left @ right.mT
    index = (index - index.mean(-1, keepdims=True)) / index.std(-1, keepdims=True)
    return attend(scores(query, key) + index[:, None], value)


def logarithm(query, key, value, left, right):
    """Return attention biased by the logarithm of another attention's weights."""
    bias = jnp.log(jax.nn.softmax(left @ right.mT, axis=-1) + 1e-6)
    return attend(scores(query, key) + bias[:, None], value)


def of_the_layer_before(query, key, value, second):
    """Add the scores of one layer to those of the next."""
    first = scores(query, key)
    middle = attend(first, value) + second
    return attend(scores(middle, key) + first, value)


def scaled_after(query, key, value, factor):
    """Subtract the largest score before a factor that is an argument."""
    found = scores(query, key)
    found = found - found.max(axis=-1, keepdims=True)
    return attend(found * factor[None, :, None, None], value)


def divided_after(query, key, value, width):
    found = scores(query, key)
    found = found - found.mean(axis=-1, keepdims=True)
    return attend(found / (1 + jnp.abs(width))[:, None, :, None], value)


def logs_of_both(query, key, value):
    """Return the result and the log-sum-exp, made from the maximum and the sum without their last axes."""
    found = scores(query, key)
    largest = found.max(-1, keepdims=True)
    powers = jnp.exp(found - largest)
    total = powers.sum(-1, keepdims=True)
    log_sum = largest[..., 0] + jnp.log(total[..., 0])
    return jnp.concatenate([(powers / total) @ value, log_sum[..., None]], -1)


# Each entry has a function, the number of query-by-key arrays that are read, and the shapes of further arguments.
FUNCTIONS = {
    "best": (best, 1, INDEX, INDEX),
    "standardised": (standardised, 1, INDEX, INDEX),
    "logarithm": (logarithm, 1, INDEX, INDEX),
    "layer before": (of_the_layer_before, 0, OPERAND),
    "scaled": (scaled_after, 0, (HEADS,)),
    "divided": (divided_after, 0, (BATCH, TOKENS)),
    "logarithms": (logs_of_both, 0),
}


@pytest.mark.parametrize(("name", "implementation"), alternated(FUNCTIONS))
def test_operands_from_other_scores_match_the_reference_with_gradients(name, implementation):
    function, _, *shapes = FUNCTIONS[name]
    given = arrays(OPERAND, OPERAND, OPERAND, *shapes)
    assert_fused(function, given, implementation, 1e-4)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_operands_from_other_scores_read_the_expected_leaves(name):
    function, pairs, *shapes = FUNCTIONS[name]
    explanation = explain(function)(*arrays(OPERAND, OPERAND, OPERAND, *shapes))
    roles = [leaf.role for region in explanation.regions for leaf in region.leaves]
    assert roles.count("score") == pairs and "query" in roles and not explanation.scores


def test_row_statistic_of_the_same_scores_raises_not_fusible():
    """No other product could be the attention, so the message describes the first attempt."""

    def function(query, key, value):
        found = scores(query, key)
        return attend(jnp.where(found >= jax.lax.top_k(found, 8)[0][..., -1:], found, -jnp.inf), value)

    with pytest.raises(NotFusible, match="a value computed from all scores of a row"):
        fuse(function)(*arrays(OPERAND, OPERAND, OPERAND))


# Float masks made by NumPy, and masks inside exponentials.

LONG = 256
PLACES = np.arange(LONG)
CAUSAL = PLACES[:, None] >= PLACES[None, :]
SLOPES = np.float32([0.5, 0.25])[:, None, None]
NUMBERS = {
    "infinity": np.triu(np.full((LONG, LONG), -np.inf, np.float32), 1),
    "finite": ((1 - CAUSAL) * np.float32(-1e9)).astype(np.float32),
    "window": np.where(np.abs(PLACES[:, None] - PLACES) < 50, 0, -1e9).astype(np.float32),
    "slopes": np.where(CAUSAL, -SLOPES * np.abs(PLACES[:, None] - PLACES), -np.inf).astype(np.float32),
    "of jax.numpy": jnp.triu(jnp.full((LONG, LONG), -jnp.inf), 1),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_float_masks_are_not_arrays_and_skip_tiles(name):
    def function(query, key, value):
        mask = jnp.asarray(NUMBERS[name])
        return attend(scores(query, key) + (mask if mask.ndim == 3 else mask[None])[None], value)

    given = arrays(*[(1, HEADS, LONG, WIDTH)] * 3)
    (region,) = explain(function)(*given).regions
    assert region.skipped > 0.4 and "score" not in [leaf.role for leaf in region.leaves]
    assert_fused(function, given)
    assert_alike([jax.jit(fuse(function))(*given)], [function(*given)])


CHANGES = {
    "decay": lambda x, mask: x * jnp.exp(jnp.where(mask, -jnp.abs(x), -jnp.inf)),
    "sigmoid": lambda x, mask: jax.nn.sigmoid(jnp.where(mask, x, -jnp.inf)),
    "sigmoid of a sum": lambda x, mask: jax.nn.sigmoid(x + jnp.where(mask, 0.0, -1e9)),
    "silu": lambda x, mask: jax.nn.silu(jnp.where(mask, x, -1e9)),
    "over places": lambda x, mask: (
        jnp.where(mask, jax.nn.relu(x), 0.0) / jnp.arange(1.0, LONG + 1)[None, None, :, None]
    ),
    "places of floating numbers": lambda x, _: jnp.where(
        (jnp.arange(LONG, dtype=x.dtype)[:, None] >= jnp.arange(LONG, dtype=x.dtype)[None, :])[None, None],
        jax.nn.sigmoid(x),
        0.0,
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_masks_before_exponentials_skip_tiles(name):
    def function(query, key, value):
        return CHANGES[name](scores(query, key), jnp.asarray(CAUSAL)[None, None]) @ value

    given = arrays(*[(1, HEADS, LONG, WIDTH)] * 3)
    (region,) = explain(function)(*given).regions
    assert region.skipped > 0.4
    assert_fused(function, given, tolerance=1e-4)
