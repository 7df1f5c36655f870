"""Tile tables on a GPU: every form of table in the forward and backward pass, and masks of long arrays."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag import fuse
from blockdiag.fusion.analysis import tile_tables
from blockdiag.fusion.runtime import kernel_choice
from tests.fusion.analysis.test_long_masks import causal, fused_documents, masked, places

pytestmark = pytest.mark.gpu


def global_and_local(query, key):
    row, column = places(query, key)
    return (jnp.abs(row - column) < 300) | (column < 200)


def strided(query, key):
    row, column = places(query, key)
    return (row >= column) & ((row - column) % 256 == 0)


def scattered(query, key):
    size = query.shape[1] // 128
    seen = np.random.default_rng(0).random((size, size)) < 0.4
    return jnp.asarray(np.kron(seen | np.eye(size, dtype=bool), np.ones((128, 128), bool)))


def results(function, given):
    output, pull = jax.vjp(function, *given)
    return output, *pull(jnp.cos(output.astype(jnp.float32)).astype(output.dtype))


def assert_close(found, expected):
    for one, other in zip(found, expected, strict=True):
        one, other = (np.asarray(x, np.float32) for x in (one, other))
        assert np.abs(one - other).max() <= 0.02 * np.abs(other).max()


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize(
    ("mask", "kind"), [(causal, "ranges"), (global_and_local, "ranges"), (strided, "shared"), (scattered, "list")]
)
def test_every_tile_table_form_matches_the_reference_with_gradients(mask, kind, size):
    def function(query, key, value):
        return masked(query, key, value, mask(query, key))

    given = [x.astype(jnp.bfloat16) for x in jax.random.normal(jax.random.key(0), (3, 1, 4096, 2, size))]
    kinds = set()

    def watched(live_tiles, *arguments):
        found = live_tiles(*arguments)
        kinds.update(form.kind for form in found.lists.forms[:2])
        return found

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tile_tables, "_MOST_LISTED_OF_BLOCKS", 0)
        patched.setattr(kernel_choice, "live_tiles", functools.partial(watched, kernel_choice.live_tiles))
        found = jax.jit(functools.partial(results, fuse(function, implementation="triton")))(given)
    assert kinds == {kind}
    wide = [x.astype(jnp.float32) for x in given]
    with jax.default_matmul_precision("highest"):
        assert_close(found, jax.jit(functools.partial(results, function))(wide))


def test_documents_of_a_long_call_match_separate_attention():
    """XLA computes ranges of tiles from segments, because 262,144 tokens have too many tiles for lists."""
    count, length = 256, 1024
    shape = (3, 1, count * length, 1, 64)
    given = [x.astype(jnp.bfloat16) for x in jax.random.normal(jax.random.key(0), shape)]
    segment = jnp.repeat(jnp.arange(count, dtype=jnp.int32), length)[None]

    def alone(query, key, value):
        parts = [x.reshape(count, length, 1, 64) for x in (query, key, value)]
        return masked(*parts, causal(*parts[:2])).reshape(query.shape)

    found = jax.jit(functools.partial(results, lambda *x: fused_documents(*x, segment)))(given)
    wide = [x.astype(jnp.float32) for x in given]
    with jax.default_matmul_precision("highest"):
        assert_close(found, jax.jit(functools.partial(results, alone))(wide))
