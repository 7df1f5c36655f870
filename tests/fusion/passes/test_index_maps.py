"""Tests of masks and biases behind index maps, such as slices, concatenations and gathers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag import explain, fuse
from blockdiag.fusion.program import trace
from tests.fusion.fusion_support import (
    alternated,
    arrays,
    assert_alike,
    assert_fused,
    compiled_gradients,
    expected_results,
)

BATCH, HEADS, TOKENS, LONGEST, WIDTH = 2, 2, 40, 64, 16
OPERAND = (BATCH, HEADS, TOKENS, WIDTH)
HALF = TOKENS // 2


def causal(queries, keys):
    return jnp.tril(jnp.ones((queries, keys), bool))


def set_before(start, size):
    """Return a causal mask in which all queries also see `size` keys from `start`."""
    return causal(TOKENS, TOKENS).at[:, start : start + size].set(True)


def several(axis):
    return jnp.stack([causal(TOKENS, LONGEST), jnp.ones((TOKENS, LONGEST), bool)], axis)


# Masks [T, S], or with batch axes, that depend on no argument.
MASKS = {
    "corner of a longer one": lambda: causal(LONGEST, LONGEST)[:TOKENS, :TOKENS],
    "corner of NumPy's": lambda: jnp.asarray(np.tril(np.ones((LONGEST, LONGEST), bool)))[None, None, :TOKENS, :TOKENS],
    "last rows": lambda: causal(LONGEST, LONGEST)[LONGEST - TOKENS :, -TOKENS:],
    "every other place": lambda: causal(2 * TOKENS, 3 * TOKENS)[1::2, ::3],
    "with a batch": lambda: jnp.broadcast_to(causal(LONGEST, LONGEST), (BATCH, 1, LONGEST, LONGEST))[
        :, :, 7 : 7 + TOKENS, 5 : 5 + TOKENS
    ],
    "one part": lambda: jnp.split(causal(TOKENS, 2 * TOKENS), 2, axis=1)[0],
    "prefix before": lambda: jnp.concatenate([jnp.ones((TOKENS, 9), bool), causal(TOKENS, TOKENS - 9)], axis=1),
    "prefix set": lambda: set_before(0, 9),
    "some set": lambda: set_before(13, 8),
    "updated": lambda: jax.lax.dynamic_update_slice(causal(TOKENS, TOKENS), jnp.ones((8, 8), bool), (3, 35)),
    "rows joined": lambda: jnp.concatenate([jnp.ones((5, TOKENS), bool), causal(TOKENS - 5, TOKENS)]),
    "blocks": lambda: jnp.block(
        [[causal(HALF, HALF), jnp.zeros((HALF, HALF), bool)], [causal(HALF, HALF), causal(HALF, HALF)]]
    ),
    "padded": lambda: jnp.pad(causal(TOKENS - 8, TOKENS - 8), ((8, 0), (5, 3)), constant_values=True),
    "turned round": lambda: jnp.flip(jnp.triu(jnp.ones((TOKENS, TOKENS), bool))),
    "rolled": lambda: jnp.roll(causal(TOKENS, TOKENS), 3, axis=1),
    "tiled": lambda: jnp.tile(causal(TOKENS, HALF), (1, 2)),
    "repeated": lambda: jnp.repeat(jnp.repeat(causal(8, 8), 5, axis=0), 5, axis=1),
    "Kronecker product": lambda: jnp.kron(jnp.eye(4), jnp.ones((10, 10))) > 0,
    "diagonal blocks": lambda: jax.scipy.linalg.block_diag(*[jnp.ones((n, n)) for n in (7, 20, 13)]) > 0,
    "rows and columns apart": lambda: (
        jax.lax.ge(
            jax.lax.broadcasted_iota(jnp.int32, (LONGEST, 1), 0) + 1,
            jax.lax.broadcasted_iota(jnp.int32, (1, LONGEST), 1),
        )
        & (jax.lax.broadcasted_iota(jnp.int32, (1, LONGEST), 0) < 1)
    )[3 : 3 + TOKENS, :TOKENS],
    "one for each head": lambda: jnp.stack([causal(TOKENS, TOKENS), jnp.ones((TOKENS, TOKENS), bool)]),
    "one of several": lambda: several(1)[:, 0, :TOKENS],
    "taken from several": lambda: jnp.unstack(several(-1), axis=-1)[0][:, :TOKENS],
    "turned and cut": lambda: causal(LONGEST, LONGEST).T[:TOKENS, 3 : 3 + TOKENS][::-1],
}


def masked(make):
    def function(query, key, value, *more):
        scores = query @ key.mT / 4
        return jax.nn.softmax(jnp.where(make(*more), scores, -1e9), axis=-1) @ value

    return function


def at_offset(offset):
    """Return the causal mask of queries after `offset` other tokens."""
    return jax.lax.dynamic_slice(causal(LONGEST, LONGEST), (offset, 0), (TOKENS, TOKENS))


def at_positions(positions):
    """Return the rows of a causal mask at positions [T]."""
    return causal(LONGEST, TOKENS)[positions]


def taken(positions):
    return jnp.take(causal(LONGEST, LONGEST), positions, axis=0)[:, :TOKENS]


def of_segments(segments):
    """Return a causal mask within segments [B, LONGEST]."""
    same = (segments[:, :, None] == segments[:, None, :])[:, None]
    return same[..., :TOKENS, :TOKENS] & causal(LONGEST, LONGEST)[None, None, :TOKENS, :TOKENS]


def after_prefix(lengths):
    """Return a causal mask with lengths [B] of the keys after the first nine."""
    seen = jnp.arange(TOKENS - 9)[None, :] < lengths[:, None]
    return (
        jnp.concatenate([jnp.ones((BATCH, 9), bool), seen], axis=1)[:, None, None, :]
        & causal(TOKENS, TOKENS)[None, None]
    )


GIVEN = {
    "offset": (at_offset, jnp.int32(7)),
    "offset beyond the end": (at_offset, jnp.int32(LONGEST)),
    "positions": (at_positions, jnp.arange(TOKENS)[::-1]),
    "positions beyond the end": (taken, jnp.arange(TOKENS) + 30),
    "segments": (of_segments, jnp.asarray(np.sort(np.random.default_rng(0).integers(0, 3, (BATCH, LONGEST)), 1))),
    "lengths": (after_prefix, jnp.asarray([3, 25])),
}


def pairs_of(function, given):
    """Return the arrays of queries by keys that regions read."""
    regions = [region for found in trace(function, given, {}).regions.values() for region in found]
    assert regions
    return [leaf for region in regions for leaf in region.leaves if leaf.role == "score"]


@pytest.mark.parametrize("name", MASKS)
def test_position_masks_are_not_arrays_and_match_the_reference(name):
    function, given = masked(MASKS[name]), arrays(OPERAND, OPERAND, OPERAND)
    assert not pairs_of(function, given)
    assert_fused(function, given)


@pytest.mark.parametrize("name", GIVEN)
def test_masks_of_traced_arguments_are_not_arrays_and_match_the_reference(name):
    make, argument = GIVEN[name]
    function, given = masked(make), [*arrays(OPERAND, OPERAND, OPERAND), argument]
    assert not pairs_of(function, given)
    np.testing.assert_allclose(fuse(function)(*given), function(*given), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["corner of a longer one", "blocks", "rolled", "tiled", "Kronecker product"])
def test_position_mask_kernels_match_the_reference(name):
    function, given = masked(MASKS[name]), arrays(OPERAND, OPERAND, OPERAND)
    found = compiled_gradients(fuse(function, implementation="triton"), given)
    assert_alike(found, expected_results(function, given))


@pytest.mark.parametrize("name", ["offset", "positions", "segments"])
def test_traced_mask_kernels_match_the_reference(name):
    make, argument = GIVEN[name]
    function, given = masked(make), [*arrays(OPERAND, OPERAND, OPERAND), argument]
    found = fuse(function, implementation="triton")(*given)
    np.testing.assert_allclose(found, function(*given), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_sliced_bias_of_slopes_has_its_gradient(implementation):
    """A bias for the longest sequence is sliced to this one."""

    def function(query, key, value, slopes):
        places = jnp.arange(LONGEST, dtype=query.dtype)
        bias = -jax.nn.softplus(slopes)[:, None, None] * jnp.abs(places[:, None] - places[None, :])[None]
        return jax.nn.softmax(query @ key.mT / 4 + bias[None, :, :TOKENS, :TOKENS], axis=-1) @ value

    given = arrays(OPERAND, OPERAND, OPERAND, (HEADS,))
    assert not pairs_of(function, given)
    assert_fused(function, given, implementation)


def test_sliced_additive_mask_skips_tiles():
    """An additive mask also becomes a function of positions; as an array it would not be inspected."""
    x = jax.ShapeDtypeStruct((1, 1, 512, WIDTH), jnp.float32)

    def function(query, key, value):
        bias = jnp.where(causal(1024, 1024), 0.0, -1e9)[:512, :512]
        return jax.nn.softmax(query @ key.mT + bias[None, None], axis=-1) @ value

    (region,) = explain(function)(x, x, x).regions
    assert region.skipped > 0.4 and {leaf.role for leaf in region.leaves} == {"query", "key", "row", "column"}


@pytest.mark.parametrize("axis", [0, 1])
def test_bias_arrays_of_pairs_are_read_as_they_are(axis):
    """An array that the user gives for each query and key is read in full."""

    def function(query, key, value, bias):
        whole = jnp.concatenate([bias, jnp.zeros_like(bias)], axis)
        whole = whole[:, :TOKENS] if axis else whole[:TOKENS]
        return jax.nn.softmax(query @ key.mT / 4 + whole[None, None], axis=-1) @ value

    given = arrays(OPERAND, OPERAND, OPERAND, (TOKENS, TOKENS))
    assert len(pairs_of(function, given)) == 1
    assert_fused(function, given)


def test_scatter_at_traced_indices_is_not_rewritten():
    """A scatter of more than one window has no index map for its elements."""
    each = jnp.arange(TOKENS)
    function = masked(lambda places: causal(TOKENS, TOKENS).at[each, places].set(True))
    given = [*arrays(OPERAND, OPERAND, OPERAND), (each + 1) % TOKENS]
    assert len(pairs_of(function, given)) == 1
    assert_alike([fuse(function)(*given)], [function(*given)])


def test_scatter_on_a_known_diagonal_is_not_an_array():
    each = jnp.arange(TOKENS)
    function = masked(lambda: causal(TOKENS, TOKENS).at[each, (each + 1) % TOKENS].set(True))
    given = arrays(OPERAND, OPERAND, OPERAND)
    assert not pairs_of(function, given)
    assert_fused(function, given)


def test_explain_of_abstract_mask_arguments_skips_nothing():
    """Abstract arguments have no values, so it is not known which tiles are dead."""
    x, number = jax.ShapeDtypeStruct(OPERAND, jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
    segments = jax.ShapeDtypeStruct((BATCH, LONGEST), jnp.int32)
    for make, argument in ((at_offset, number), (of_segments, segments)):
        (region,) = explain(masked(make))(x, x, x, argument).regions
        assert region.live is None and region.skipped == 0


@pytest.mark.parametrize("implementation", ["xla", "triton"])
@pytest.mark.parametrize(
    "make",
    [
        lambda bias: jnp.pad(bias, ((0, 0), (8, 0))),
        lambda bias: jnp.concatenate([jnp.zeros((TOKENS, 8)), bias], 1),
        lambda bias: jax.lax.dynamic_update_slice(jnp.zeros((TOKENS, TOKENS)), bias, (0, 8)),
    ],
    ids=["pad", "concatenate", "update"],
)
def test_padded_bias_elements_do_not_contribute_to_gradients(make, implementation):
    """The logarithm has no derivative before the first position."""

    def function(query, key, value, slope):
        bias = slope * jnp.log(1.0 + jnp.arange(TOKENS)[:, None] + jnp.arange(TOKENS - 8)[None, :])
        return jax.nn.softmax(query @ key.mT / 4 + make(bias)[None, None], axis=-1) @ value

    with jax.numpy_dtype_promotion("standard"):
        given = [*arrays(OPERAND, OPERAND, OPERAND), jnp.float32(0.5)]
        assert not pairs_of(function, given)
        found = compiled_gradients(fuse(function, implementation=implementation), given)
        assert_alike(found, expected_results(function, given), 1e-4)


@pytest.mark.parametrize("implementation", ["xla", "triton"])
@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_positions_that_overflow_their_dtype_wrap_around(dtype, implementation):
    """There are more positions than their dtype can count."""
    places = 300

    def function(query, key, value):
        order = jnp.arange(places, dtype=dtype)
        mask = order[:, None] >= order[None, :]
        return jax.nn.softmax(jnp.where(mask[None, None], query @ key.mT, -1e9), axis=-1) @ value

    given = arrays(*[(1, 1, places, 8)] * 3)
    found = fuse(function, implementation=implementation)(*given)
    np.testing.assert_allclose(found, function(*given), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_vmapped_mask_offsets_match_the_reference(implementation):
    """A mapped slice has another offset for each index."""

    def one(query, key, value, offset):
        mask = jax.lax.dynamic_slice(causal(LONGEST, TOKENS), (offset, 0), (TOKENS, TOKENS))
        return jax.nn.softmax(jnp.where(mask[None], query @ key.mT / 4, -1e9), axis=-1) @ value

    def function(*given):
        return jax.vmap(one)(*given)

    given = [*arrays(OPERAND, OPERAND, OPERAND), jnp.asarray([3, 60])]
    assert not pairs_of(function, given)
    found = fuse(function, implementation=implementation)(*given)
    np.testing.assert_allclose(found, function(*given), rtol=2e-5, atol=2e-5)


CUT = {
    "at an offset": lambda bias, first: jax.lax.dynamic_slice_in_dim(bias, first, HALF, 1),
    "the last rows": lambda bias, first: bias[:, -HALF:],
    "turned round": lambda bias, first: bias[:, HALF:, ::-1][:, :, ::-1],
}


@pytest.mark.parametrize(("name", "implementation"), alternated(CUT))
def test_sliced_distance_tables_stay_distance_leaves(name, implementation):
    """A bias that is read from a table by distance is sliced afterwards, as in a decoding step."""

    def function(query, key, value, table):
        places = jnp.arange(TOKENS)
        bias = table[:, jnp.clip(places[:, None] - places[None, :], 0, 7)]
        return jax.nn.softmax(query @ key.mT / 4 + CUT[name](bias, jnp.int32(3))[None], axis=-1) @ value

    given = arrays((BATCH, HEADS, HALF, WIDTH), OPERAND, OPERAND, (HEADS, 8))
    roles = {x.role for region in trace(function, given, {}).all_regions() for x in region.leaves}
    assert "distance" in roles and "score" not in roles
    assert_fused(function, given, implementation)
