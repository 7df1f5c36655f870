"""Tests of masks that `.at[..].set` writes into scores at known indices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag import NotFusible, explain, fuse
from tests.fusion.fusion_support import alternated, arrays, assert_fused

BATCH, HEADS, TOKENS, WIDTH = 2, 2, 70, 16
SHAPE = (BATCH, HEADS, TOKENS, WIDTH)
ODD = np.arange(1, TOKENS, 2)


def scores(query, key):
    return query @ key.mT / 4


def attend(found, value):
    return jax.nn.softmax(found, axis=-1) @ value


def upper(query, key, value):
    rows, columns = jnp.triu_indices(TOKENS, 1)
    return attend(scores(query, key).at[:, :, rows, columns].set(-jnp.inf), value)


def numpy_upper(query, key, value):
    rows, columns = np.triu_indices(TOKENS, 1)
    return attend(scores(query, key).at[..., rows, columns].set(-1e30), value)


def first_keys(query, key, value):
    """Hide a slice of keys."""
    return attend(scores(query, key).at[..., :5].set(-jnp.inf), value)


def every_second_key(query, key, value):
    return attend(scores(query, key).at[..., ODD].set(-jnp.inf), value)


def own_key(query, key, value):
    """Hide each token from itself."""
    positions = jnp.arange(TOKENS)
    return attend(scores(query, key).at[:, :, positions, positions].set(-jnp.inf), value)


def one_head(query, key, value):
    """Hide the second half of the keys from the first head."""
    return attend(scores(query, key).at[:, 0, :, 35:].set(-jnp.inf), value)


def number_of_an_argument(query, key, value, number):
    """Write an argument, which has a gradient."""
    return attend(scores(query, key).at[..., :5].set(number), value)


def out_of_bounds(query, key, value):
    """Write beyond the last key, where the update is dropped."""
    return attend(scores(query, key).at[..., np.array([3, TOKENS + 2])].set(-jnp.inf), value)


FUNCTIONS = (upper, numpy_upper, first_keys, every_second_key, own_key, one_head, number_of_an_argument, out_of_bounds)


def given(function):
    extra = [jnp.float32(0.5)] if function is number_of_an_argument else []
    return [*arrays(SHAPE, SHAPE, SHAPE), *extra]


@pytest.mark.parametrize(("function", "implementation"), alternated(FUNCTIONS))
def test_scatters_into_scores_match_the_reference_with_gradients(function, implementation):
    assert_fused(function, given(function), implementation)


@pytest.mark.parametrize("function", [upper, numpy_upper], ids=lambda function: function.__name__)
def test_scatters_into_scores_skip_tiles(function):
    (region,) = explain(function)(*given(function)).regions
    assert region.skipped >= 1 / 3
    assert {leaf.role for leaf in region.leaves} == {"query", "key", "row", "column"}


def test_scatter_into_scores_at_traced_indices_raises_not_fusible():
    def function(query, key, value, places):
        return attend(scores(query, key).at[..., places].set(-jnp.inf), value)

    with pytest.raises(NotFusible, match="`scatter` of scores"):
        fuse(function)(*arrays(SHAPE, SHAPE, SHAPE), jnp.array([3, 7]))


def test_scatter_of_arrays_into_scores_raises_not_fusible():
    def function(query, key, value, columns):
        return attend(scores(query, key).at[..., :5].set(columns), value)

    with pytest.raises(NotFusible, match="of scores"):
        fuse(function)(*arrays(SHAPE, SHAPE, SHAPE, (5,)))


def test_scatter_in_a_deep_program_skips_tiles():
    def function(query, key, value, weight):
        for _ in range(300):
            query = jnp.tanh(query @ weight) * 2 - 1
        return upper(query, key, value)

    given = arrays(SHAPE, SHAPE, SHAPE, (WIDTH, WIDTH))
    assert explain(function)(*given).regions[0].skipped >= 1 / 3
