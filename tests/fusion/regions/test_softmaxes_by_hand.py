"""Tests of softmaxes by hand with random changes: every function that fuses gives the right results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import stop_gradient

from blockdiag import NotFusible, fuse
from tests.fusion.fusion_random_parts import Draws
from tests.fusion.fusion_support import assert_alike, with_gradients
from tests.support import compiled_quickly

BATCH, HEADS, QUERIES, KEYS, WIDTH = 2, 2, 6, 7, 4
SEEDS = [
    pytest.param(range(20), id="some"),
    pytest.param(range(20, 48), id="others", marks=pytest.mark.exhaustive),
]
FEWEST_FUSED = 0.35
"""The fraction of seeds that must fuse; most changes leave no softmax."""
# The choices of an unchanged softmax. Each of them is kept with a probability of two thirds.
AS_IT_IS = {
    "hidden": "none", "exponential": "exp", "factor": 1.0, "shift": "largest", "weights": "as they are",
    "sum of": "as they are", "beside the sum": "nothing", "guard": "none", "divided": "early", "after": "nothing",
}  # fmt: skip
CHANGES = {
    "hidden": ("-inf", "-1e9", "added"),
    "exponential": ("exp2",),
    "factor": (1.4426950408889634, 0.5),
    "shift": ("without gradient", "mean", "of other scores", "of a row", "of other heads", "none"),
    "weights": ("masked", "masked otherwise", "times mask", "scaled", "squared", "more", "of rows", "still"),
    "sum of": ("weights", "masked", "masked otherwise", "times mask", "scaled", "squared", "other", "still", "swapped"),
    "beside the sum": ("sink", "sink without factor", "zero", "one", "little"),
    "guard": ("little", "at least little", "at least one", "unless zero"),
    "divided": ("late", "reciprocal", "late reciprocal", "log", "twice"),
    "after": ("no NaN", "masked", "of rows", "again", "less than one"),
}


@pytest.fixture(autouse=True)
def promotion():
    """Allow implicit promotion of dtypes and ranks, on which users' functions may rely."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def choices(seed):
    """Return the random choice of each part of the softmax."""
    draw = Draws(seed)
    return {
        name: draw(name, options) if draw(f"{name} is changed", (False, False, True)) else AS_IT_IS[name]
        for name, options in CHANGES.items()
    }


def operands(seed):
    numbers = np.random.default_rng(seed)
    shapes = [(BATCH, HEADS, x, WIDTH) for x in (QUERIES, KEYS, KEYS, KEYS)]
    floats = [
        jnp.asarray(numbers.normal(size=x), jnp.float32) for x in (*shapes, (BATCH, HEADS, QUERIES, 1), (HEADS, 1, 1))
    ]
    # Each query sees the first key.
    masks = [jnp.asarray(numbers.random((x, 1, QUERIES, KEYS)) < 0.6).at[..., 0].set(True) for x in (BATCH, 1)]
    return floats, masks


def attention(chosen, masks):
    """Return attention by the chosen softmax; `other` is a second key, `row` is [B, N, T, 1] and `sink` [N, 1, 1]."""
    seen, otherwise = masks
    exponential = jnp.exp if chosen["exponential"] == "exp" else jnp.exp2
    factor = chosen["factor"]

    def largest(scores):
        return scores.max(axis=-1, keepdims=True)

    def changed(name, power, row):
        return {
            "as they are": lambda: power,
            "masked": lambda: jnp.where(seen, power, 0.0),
            "masked otherwise": lambda: jnp.where(otherwise, power, 0.0),
            "times mask": lambda: power * seen,
            "scaled": lambda: power * 3,
            "squared": lambda: power * power,
            "more": lambda: power + 1e-3,
            "of rows": lambda: power * row,
            "still": lambda: stop_gradient(power),
            "swapped": lambda: power[:, ::-1],
        }[name]()

    def function(query, key, value, other, row, sink):
        scores = jnp.einsum("bnth,bnsh->bnts", query, key)
        others = jnp.einsum("bnth,bnsh->bnts", query, other)
        hidden = {
            "none": lambda: scores,
            "-inf": lambda: jnp.where(seen, scores, -jnp.inf),
            "-1e9": lambda: jnp.where(seen, scores, -1e9),
            "added": lambda: scores + jnp.where(seen, 0.0, -1e9),
        }[chosen["hidden"]]()
        shift = {
            "largest": lambda: largest(hidden),
            "without gradient": lambda: stop_gradient(largest(hidden)),
            "mean": lambda: scores.mean(axis=-1, keepdims=True),
            "of other scores": lambda: largest(others),
            "of a row": lambda: row,
            "of other heads": lambda: largest(hidden)[:, ::-1],
            "none": lambda: 0.0,
        }[chosen["shift"]]()
        exponent = (hidden - shift) * factor
        power = exponential(exponent)
        weights = changed(chosen["weights"], power, row)
        summed = {"weights": lambda: weights, "other": lambda: exponential(others - largest(others))}.get(
            chosen["sum of"], lambda: changed(chosen["sum of"], power, row)
        )()
        total = summed.sum(axis=-1, keepdims=True)
        total += {
            "nothing": lambda: 0.0,
            "sink": lambda: exponential((sink - shift) * factor),
            "sink without factor": lambda: jnp.exp(sink - shift),
            "zero": lambda: exponential(-shift * factor),
            "one": lambda: 1.0,
            "little": lambda: 1e-9,
        }[chosen["beside the sum"]]()
        total = {
            "none": lambda: total,
            "little": lambda: total + 1e-9,
            "at least little": lambda: jnp.maximum(total, 1e-9),
            "at least one": lambda: jnp.maximum(total, 1.0),
            "unless zero": lambda: jnp.where(total == 0, 1.0, total),
        }[chosen["guard"]]()

        def product(weights):
            weights = {
                "nothing": lambda: weights,
                "no NaN": lambda: jnp.nan_to_num(weights),
                "masked": lambda: jnp.where(seen, weights, 0.0),
                "of rows": lambda: weights * row,
                "again": lambda: weights / (weights.sum(axis=-1, keepdims=True) + 1e-6),
                "less than one": lambda: 1 - weights,
            }[chosen["after"]]()
            return jnp.einsum("bnts,bnsh->bnth", weights, value)

        return {
            "early": lambda: product(weights / total),
            "late": lambda: product(weights) / total,
            "reciprocal": lambda: product(weights * (1 / total)),
            "late reciprocal": lambda: product(weights) * (1 / total),
            "log": lambda: product(jnp.exp(exponent - jnp.log(total))),
            "twice": lambda: product(weights / total) / total,
        }[chosen["divided"]]()

    return function


def results(function, floats):
    return compiled_quickly(lambda *given: with_gradients(function, given))(*floats)


@pytest.mark.parametrize("seeds", SEEDS)
def test_randomly_changed_softmaxes_that_fuse_match_the_reference(seeds):
    fused = []
    for seed in seeds:
        chosen, (floats, masks) = choices(seed), operands(seed)
        function = attention(chosen, masks)
        try:
            found = results(fuse(function), floats)
        except NotFusible:
            continue
        fused.append(seed)
        expected = results(function, floats)
        if all(jnp.isfinite(x).all() for x in expected):
            scale = max(float(np.abs(x).max()) for x in expected)
            for one, other in zip(found, expected, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4 * scale, err_msg=str(chosen))
    assert len(fused) >= FEWEST_FUSED * len(seeds)


def test_unchanged_softmax_by_hand_matches_the_reference():
    (floats, masks) = operands(0)
    function = attention(AS_IT_IS, masks)
    assert_alike(results(fuse(function), floats), results(function, floats))
