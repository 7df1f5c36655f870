"""Rotary tables and the plain rotation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag import Rotary, apply_rotary, block_diagonal_attention, rotary_tables
from blockdiag.common.rotary import rotate, rotate_back


def test_rotary_tables_hold_the_standard_angles():
    cos, sin = rotary_tables(100, 8, theta=100.0)
    angle = 99 * 100.0 ** (-2 * 3 / 8)
    assert cos.shape == sin.shape == (100, 4) and cos.dtype == jnp.float32
    np.testing.assert_allclose([cos[99, 3], sin[99, 3]], [np.cos(angle), np.sin(angle)], rtol=1e-6)
    np.testing.assert_array_equal(cos[0], 1)


def test_rotary_tables_of_large_positions_keep_precision():
    cos, _ = rotary_tables(1_000_000, 2)
    np.testing.assert_allclose(cos[-1, 0], np.cos(999_999.0), atol=1e-6)


def test_rotary_tables_have_the_requested_dtype():
    cos, sin = rotary_tables(4, 8, dtype=jnp.bfloat16)
    assert cos.dtype == sin.dtype == jnp.bfloat16


@pytest.mark.parametrize("interleaved", [False, True])
def test_apply_rotary_rotates_pairs(interleaved):
    x = jnp.arange(1.0, 5.0).reshape(1, 1, 4)
    cos, sin = jnp.asarray([[0.0, 1.0]]), jnp.asarray([[1.0, 0.0]])  # a quarter turn of pair 0, none of pair 1
    expected = [-2.0, 1.0, 3.0, 4.0] if interleaved else [-3.0, 2.0, 1.0, 4.0]
    np.testing.assert_array_equal(apply_rotary(x, cos, sin, interleaved=interleaved)[0, 0], jnp.asarray(expected))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotate_back_is_the_transpose_of_rotate(interleaved):
    """Random tables also scale, so that the adjoint differs from the inverse."""
    x, y = jax.random.normal(jax.random.key(0), (2, 7, 3, 8))
    cos, sin = jax.random.normal(jax.random.key(1), (2, 7, 1, 4))
    left = jnp.vdot(rotate(x, cos, sin, interleaved), y)
    right = jnp.vdot(x, rotate_back(y, cos, sin, interleaved))
    np.testing.assert_allclose(left, right, rtol=1e-5)


def test_apply_rotary_with_batched_tables_keeps_dtype_and_shape():
    x = jnp.ones((2, 5, 3, 8), jnp.bfloat16)
    cos, sin = jnp.zeros((2, 5, 4)), jnp.ones((2, 5, 4))
    rotated = apply_rotary(x, cos, sin)
    assert rotated.dtype == jnp.bfloat16 and rotated.shape == x.shape
    np.testing.assert_array_equal(rotated[..., :4], -1)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_fused_rotation_equals_rotating_first(implementation, interleaved):
    query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 20, 2, 8))
    tables = rotary_tables(20, 8)
    fused = block_diagonal_attention(
        query,
        key,
        value,
        block_size=8,
        rotary=Rotary(*tables, interleaved=interleaved),
        implementation=implementation,
    )
    query, key = (apply_rotary(x, *tables, interleaved=interleaved) for x in (query, key))
    plain = block_diagonal_attention(query, key, value, block_size=8)
    np.testing.assert_allclose(fused, plain, rtol=1e-5, atol=1e-5)


def test_rotary_positions_shared_by_a_batch_equal_broadcast_positions():
    query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 20, 2, 8))
    tables = rotary_tables(40, 8)
    positions = jnp.arange(20, dtype=jnp.int32) + 11
    shared, full = (
        block_diagonal_attention(query, key, value, block_size=8, rotary=Rotary(*tables, positions=p))
        for p in (positions, jnp.broadcast_to(positions, (2, 20)))
    )
    np.testing.assert_array_equal(shared, full)


def test_rotary_is_a_pytree_with_static_options():
    rotary = Rotary(*rotary_tables(4, 8), interleaved=True, apply_to=["key"])
    assert len(jax.tree.leaves(rotary)) == 2
    doubled = jax.tree.map(lambda x: 2 * x, rotary)
    assert doubled.interleaved and doubled.apply_to == ("key",)
    assert jax.jit(lambda rotary: rotary.cos.sum())(rotary) == rotary.cos.sum()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(max_position=0, head_dim=8), "`max_position` must be at least 1"),
        (dict(max_position=4, head_dim=7), "`head_dim` must be even"),
        (dict(max_position=4, head_dim=8, theta=0.0), "`theta` must be positive"),
    ],
)
def test_rotary_tables_with_bad_arguments_raise_value_error(arguments, message):
    with pytest.raises(ValueError, match=message):
        rotary_tables(**arguments)


def test_apply_rotary_with_bad_arguments_raises_value_error():
    tables = rotary_tables(5, 8)
    with pytest.raises(ValueError, match="`x` must have shape"):
        apply_rotary(jnp.ones((5, 8)), *tables)
    with pytest.raises(ValueError, match="`cos` must have shape"):
        apply_rotary(jnp.ones((6, 2, 8)), *tables)
    with pytest.raises(ValueError, match="`apply_to` must name"):
        Rotary(*tables, apply_to=("queries",))
