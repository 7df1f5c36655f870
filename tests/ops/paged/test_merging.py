"""`merge_attention_states`: merged states of parts of the keys."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag import merge_attention_states, paged_attention
from tests.ops.block_diagonal.test_transformations import assert_close, random_arrays
from tests.ops.paged_support import integers, simple_arguments, zeros
from tests.support import compiled_quickly

attend = functools.partial(paged_attention, return_residual=True)


def test_merged_states_of_parts_match_the_whole():
    """Attention to the first keys and to the rest is merged, as sequences of arrays and stacked."""
    arguments = simple_arguments(tokens=2) | dict(kv_lengths=integers(12, 9))
    expected = attend(**arguments, is_causal=False)
    first = attend(**(arguments | dict(kv_lengths=integers(8, 8))), is_causal=False)
    rest = arguments | dict(page_table=arguments["page_table"][:, 2:], kv_lengths=integers(4, 1))
    nothing = attend(**(arguments | dict(kv_lengths=integers(0, 0))))
    outputs, lses = zip(first, nothing, attend(**rest, is_causal=False), strict=True)
    assert_close(merge_attention_states(outputs, lses), expected)
    assert_close(merge_attention_states(jnp.stack(outputs), jnp.stack(lses)), expected)


def test_merge_ignores_parts_with_a_log_sum_exp_of_minus_infinity():
    outputs = jnp.asarray([[[1.0], [jnp.nan], [3.0]], [[jnp.nan], [jnp.inf], [5.0]]])
    lses = jnp.asarray([[0.5, -jnp.inf, 1.0], [-jnp.inf, -jnp.inf, 1.0]])
    output, lse = merge_attention_states(outputs, lses)
    np.testing.assert_allclose(output[:, 0], [1, 0, 4])
    np.testing.assert_allclose(lse, [0.5, -np.inf, 1 + np.log(2)], rtol=1e-6)


def test_merging_rounds_once_and_repeats():
    outputs = random_arrays((5, 3, 4, 8), dtype=jnp.bfloat16)[0]
    lses = random_arrays((5, 3, 4), seed=1)[0] * 30
    output, lse = merge_attention_states(outputs, lses)
    assert output.dtype == jnp.bfloat16 and lse.dtype == jnp.float32
    weights = np.exp(np.asarray(lses, np.float64) - np.log(np.exp(np.asarray(lses, np.float64)).sum(axis=0)))
    exact = (np.asarray(outputs, np.float64) * weights[..., None]).sum(axis=0)
    np.testing.assert_allclose(np.asarray(output, np.float64), exact, rtol=2**-8, atol=1e-6)
    np.testing.assert_array_equal(merge_attention_states(outputs, lses)[0], output)


def test_merging_is_differentiable():
    outputs, lses = random_arrays((3, 4, 8))[0], jnp.asarray([[0.0] * 4, [-jnp.inf] * 4, [-jnp.inf, 0, 1, 2]])

    def total(outputs, lses):
        output, lse = merge_attention_states(outputs, lses)
        return jnp.sum(jnp.sin(output)) + jnp.sum(lse)

    gradients = compiled_quickly(jax.grad(total, (0, 1)))(outputs, lses)
    assert all(np.isfinite(x).all() for x in gradients)
    step = jnp.zeros_like(lses).at[2, 3].set(1e-2)
    difference = (total(outputs, lses + step) - total(outputs, lses - step)) / 2e-2
    np.testing.assert_allclose(gradients[1][2, 3], difference, rtol=1e-2)


@pytest.mark.parametrize(
    ("outputs", "lses", "message"),
    [
        (
            zeros(2, 3, 4),
            zeros(2, 4),
            r"`lses` must have the shape of `outputs` without its last axis, .* got \(2, 4\)",
        ),
        (zeros(0, 3, 4), zeros(0, 3), "of at least one part"),
        ([], [], "`outputs` must be one or more arrays"),
        (
            [zeros(3, 4), zeros(2, 4)],
            zeros(2, 3),
            r"`outputs` must be one or more arrays of one shape .* 'float32\[2, 4\]'\]",
        ),
        (zeros(2, 3, 4), zeros(2, 3, dtype=jnp.int32), "`lses` must have a floating dtype, got int32"),
    ],
)
def test_merge_with_invalid_arguments_raises_value_error(outputs, lses, message):
    with pytest.raises(ValueError, match=message):
        merge_attention_states(outputs, lses)
