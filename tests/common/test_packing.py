"""Tile tables cover the token axis, for valid and invalid offsets."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag.common import packing
from blockdiag.common.packing import (
    count_length_tiles,
    count_offset_tiles,
    tiles_from_lengths,
    tiles_from_offsets,
    token_positions,
)
from blockdiag.ops.block_diagonal.problem import BlockDiagonalProblem
from blockdiag.ops.block_diagonal.tiles import uniform_tiles

build_from_offsets = jax.jit(tiles_from_offsets, static_argnums=(1, 2))
build_from_lengths = jax.jit(tiles_from_lengths, static_argnums=(1, 2))


def check_coverage(tiles: np.ndarray, tokens: int, block_size: int):
    """Assert that tiles cover every row once, are short enough, and come in row order before the unused ones."""
    assert tiles.dtype == np.int32
    start, length = tiles[:, 0], tiles[:, 1]
    assert (np.abs(length) <= block_size).all()
    covered = np.zeros(tokens, int)
    for first, rows in zip(start, np.abs(length), strict=True):
        assert rows == 0 or (first >= 0 and first + rows <= tokens)
        covered[first : first + rows] += 1
    assert (covered == 1).all()
    used = start[length != 0]
    assert (np.diff(used) > 0).all()
    assert not length[len(used) :].any()


def expected_blocks(lengths, block_size: int) -> list[tuple[int, int, int]]:
    blocks, start = [], 0
    for length in lengths:
        blocks += [(start + p, min(block_size, length - p), p) for p in range(0, length, block_size)]
        start += length
    return blocks


# Few sizes are drawn, because each one compiles a separate program.
TOKENS = 128


@hypothesis.given(data=st.data(), size=st.sampled_from([0, 1, 4]), block_size=st.sampled_from([1, 7, 16]))
def test_tiles_from_offsets_cover_the_token_axis(data, size, block_size):
    lengths = data.draw(st.lists(st.integers(0, 32), min_size=size, max_size=size))
    if lengths and data.draw(st.booleans()):
        lengths[-1] = TOKENS - sum(lengths[:-1])
    offsets = jnp.asarray(np.cumsum([0, *lengths]), jnp.int32)
    tiles = np.asarray(build_from_offsets(offsets, TOKENS, block_size))
    assert tiles.shape == (count_offset_tiles(TOKENS, len(lengths), block_size), 3)
    check_coverage(tiles, TOKENS, block_size)
    assert [tuple(tile) for tile in tiles if tile[1] > 0] == expected_blocks(lengths, block_size)


@hypothesis.given(data=st.data(), size=st.sampled_from([0, 1, 8]), block_size=st.sampled_from([16, 20]))
def test_tiles_from_lengths_cover_the_token_axis(data, size, block_size):
    # Eight blocks of 16 leave no padding.
    length = st.one_of(st.just(16), st.integers(0, 16))
    lengths = data.draw(st.one_of(st.just([16] * size), st.lists(length, min_size=size, max_size=size)))
    tiles = np.asarray(build_from_lengths(jnp.asarray(lengths, jnp.int32), TOKENS, block_size))
    assert tiles.shape == (count_length_tiles(TOKENS, len(lengths), block_size), 3)
    check_coverage(tiles, TOKENS, block_size)
    assert [tuple(tile) for tile in tiles if tile[1] > 0] == expected_blocks(lengths, block_size)


ANY_INT32 = st.one_of(st.integers(-5, 60), st.integers(-(2**31), 2**31 - 1))


@hypothesis.given(data=st.data(), size=st.sampled_from([1, 2, 5]), block_size=st.sampled_from([1, 7, 16]))
def test_tiles_of_invalid_offsets_and_lengths_cover_the_token_axis(data, size, block_size):
    array = jnp.asarray(data.draw(st.lists(ANY_INT32, min_size=size, max_size=size)), jnp.int32)
    check_coverage(np.asarray(build_from_offsets(array, 50, block_size)), 50, block_size)
    check_coverage(np.asarray(build_from_lengths(array, 50, block_size)), 50, block_size)


def test_tiles_of_traced_offsets_that_start_late_or_decrease_mark_padding():
    offsets = jnp.asarray([3, 10, 7, 12], jnp.int32)
    tiles = np.asarray(build_from_offsets(offsets, 15, 16))
    assert [tuple(tile) for tile in tiles if tile[1]] == [(0, -3, 0), (3, 7, 0), (10, 2, 0), (12, -3, 0)]


def test_rows_of_a_block_beyond_the_block_size_are_padding():
    tiles = np.asarray(build_from_lengths(jnp.asarray([20, 3], jnp.int32), 30, 8))
    assert [tuple(tile) for tile in tiles if tile[1]] == [(0, 8, 0), (8, -8, 0), (16, -4, 0), (20, 3, 0), (23, -7, 0)]


@pytest.mark.parametrize(("length", "block_size"), [(16, 16), (20, 8), (5, 8)])
def test_uniform_tiles_match_the_expected_blocks(length, block_size):
    per_sequence = -(-length // block_size)
    problem = BlockDiagonalProblem(
        tokens=3 * length,
        query_heads=1,
        key_heads=1,
        head_dim=8,
        dtype="float32",
        block_size=block_size,
        sequence_length=length,
        num_tiles=3 * per_sequence,
        is_causal=False,
        scale=1.0,
    )
    tiles = np.asarray(uniform_tiles(problem))
    assert [tuple(tile) for tile in tiles] == expected_blocks([length] * 3, block_size)


def test_token_positions_restart_in_each_sequence():
    offsets = jnp.asarray([0, 5, 5, 14], jnp.int32)
    tiles = build_from_offsets(offsets, 16, 4)
    np.testing.assert_array_equal(token_positions(tiles, 16, 4)[:14], [*range(5), *range(9)])


def test_long_tile_tables_equal_short_ones(monkeypatch):
    """Large tables are built by scans and a search, and small tables by comparing every pair."""

    def build(offsets, lengths):
        return tiles_from_offsets(offsets, 300, 8), tiles_from_lengths(lengths, 300, 20)

    tables = {"short": [], "long": []}
    for name, found in tables.items():
        if name == "long":
            monkeypatch.setattr(packing, "_MOST_COMPARED_PREFIXES", 0)
            monkeypatch.setattr(packing, "_MOST_COMPARISONS", 0)
        compiled = jax.jit(functools.partial(build))
        for seed in range(3):
            generator = np.random.default_rng(seed)
            lengths = jnp.asarray(generator.integers(0, 20, 30), jnp.int32)
            offsets = jnp.asarray(generator.integers(-10, 400, 30), jnp.int32)
            found += compiled(offsets, lengths)
    for first, second in zip(*tables.values(), strict=True):
        np.testing.assert_array_equal(first, second)


def test_tables_are_built_without_loops():
    lowered = build_from_offsets.lower(jnp.zeros(1000, jnp.int32), 100_000, 64).compile().as_text()
    assert " while(" not in lowered and " scatter(" not in lowered
