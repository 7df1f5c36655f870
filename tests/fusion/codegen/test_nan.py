"""Tests of NaN in fused scores: kernels return NaN exactly where XLA does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag import fuse
from tests.fusion.fusion_support import (
    compiled_gradients,
    with_gradients,
)
from tests.ops.nan_support import FUNCTIONS, ROWS, TOKENS, WIDTH, assert_same_nan, attention, operands


@pytest.mark.parametrize("name", FUNCTIONS)
def test_fuse_with_nan_in_scores_gives_nan_where_xla_does(name):
    function = attention(FUNCTIONS[name])
    given = operands()
    expected = with_gradients(function, given)
    found = compiled_gradients(fuse(function, implementation="triton"), given)
    assert_same_nan(found, expected, 1e-4)


@pytest.mark.parametrize("name", ["as they are", "clip", "relu", "abs"])
def test_fuse_with_nan_hidden_by_a_mask_gives_no_nan(name):
    seen = np.tril(np.ones((TOKENS, TOKENS), bool))
    query, key, value, bias = operands()
    bias = jnp.where(seen, jnp.nan_to_num(bias), jnp.nan)
    function = attention(FUNCTIONS[name], seen[None])
    given = (query, key, value, bias)
    found = compiled_gradients(fuse(function, implementation="triton"), given)
    assert not any(np.isnan(x).any() for x in found[:4])
    assert_same_nan(found, with_gradients(function, given), 1e-4)


@pytest.mark.parametrize("name", ["as they are", "clip", "relu", "abs"])
def test_fuse_with_nan_visible_through_a_mask_makes_its_row_nan(name):
    seen = np.tril(np.ones((TOKENS, TOKENS), bool))
    function = attention(FUNCTIONS[name], seen[None])
    given = operands()
    output, d_query, *_ = compiled_gradients(fuse(function, implementation="triton"), given)
    expected, d_expected, *_ = with_gradients(function, given)
    # Key 60 is hidden from query 17, and key 0 is not.
    assert np.isnan(output[np.asarray(ROWS)]).all()
    assert_same_nan([output, d_query], [expected, d_expected], 1e-4)


@pytest.mark.parametrize("sink", [0.5, np.nan, -np.inf])
def test_fuse_with_an_extra_logit_propagates_nan_of_either(sink):
    def attend(query, key, value, bias, sinks):
        scores = jnp.einsum("tnh,snh->nts", query, key) / WIDTH**0.5 + bias
        extra = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))
        weights = jax.nn.softmax(jnp.concatenate([scores, extra], axis=-1), axis=-1)[..., :-1]
        return jnp.einsum("nts,snh->tnh", weights, value)

    given = [*operands(), jnp.asarray([0.5, sink], jnp.float32)]
    found = compiled_gradients(fuse(attend, implementation="triton"), given)
    assert_same_nan(found, with_gradients(attend, given), 1e-4)
