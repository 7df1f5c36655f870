"""Tile tables: where the blocks of packed sequences lie in the token axis.

A tile table is int32 [num_tiles, 3] with rows (start, length, position). Every row of the token axis lies in exactly
one tile. A positive length is a block. A negative length is that many padding rows, which belong to no block. Zero is
an unused tile. `position` is the position of row `start` within its sequence. The number of tiles depends only on
shapes, so new offsets never cause a recompilation.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from blockdiag.common.sizes import is_symbolic
from blockdiag.common.tile_counts import count_length_tiles, count_offset_tiles

TileTable = Int[Array, "num_tiles 3"]


def tiles_from_offsets(sequence_offsets: Int[Array, " offsets"], tokens: int, block_size: int) -> TileTable:
    """Cut each packed sequence into blocks of `block_size` rows from its start; its last block may be shorter.

    Args:
        sequence_offsets: int32 [num_sequences + 1]; sequence s is rows [offsets[s], offsets[s + 1]). Any values are
            memory safe: offsets are clipped to [0, tokens], and one below its predecessor counts as equal to it.
        tokens: rows of the token axis.
        block_size: rows of a full block.
    """
    num_sequences = sequence_offsets.shape[0] - 1
    offsets = running_maximum(jnp.clip(sequence_offsets, 0, tokens))
    edges = jnp.concatenate([jnp.zeros(1, jnp.int32), offsets, jnp.full(1, tokens, jnp.int32)])
    segment, start, length, position = _cut(edges, count_offset_tiles(tokens, num_sequences, block_size), block_size)
    is_block = (segment >= 1) & (segment <= num_sequences)
    return jnp.stack([start, jnp.where(is_block, length, -length), position], axis=1)


def tiles_from_lengths(block_lengths: Int[Array, " blocks"], tokens: int, block_size: int) -> TileTable:
    """Lay out one block per length, back to back. Each block is its own sequence, with positions from 0.

    Args:
        block_lengths: int32 [num_blocks]. Any values are memory safe: a negative length counts as 0, rows of a block
            beyond `block_size` are padding, and blocks end where the token axis ends.
        tokens: rows of the token axis.
        block_size: maximum rows of a block.
    """
    num_blocks = block_lengths.shape[0]
    ends = running_sum(jnp.clip(block_lengths, 0, tokens))
    # A sum that overflows int32 would decrease; the running maximum keeps the table memory safe even then.
    ends = running_maximum(jnp.clip(ends, 0, tokens))
    edges = jnp.concatenate([jnp.zeros(1, jnp.int32), ends, jnp.full(1, tokens, jnp.int32)])
    segment, start, length, position = _cut(edges, count_length_tiles(tokens, num_blocks, block_size), block_size)
    is_block = (segment < num_blocks) & (position == 0)
    return jnp.stack([start, jnp.where(is_block, length, -length), jnp.zeros_like(position)], axis=1)


def token_positions(tiles: TileTable, tokens: int, block_size: int) -> Int[Array, " tokens"]:
    """Return each token's position within its sequence; the positions of padding rows are arbitrary."""
    offset = jnp.arange(block_size, dtype=jnp.int32)[None, :]
    start, length, position = (column[:, None] for column in tiles.T)
    row = jnp.where(offset < jnp.abs(length), start + offset, tokens)
    return jnp.zeros(tokens, jnp.int32).at[row].set(position + offset, mode="drop")


def _cut(edges: Array, num_tiles: int, block_size: int) -> tuple[Array, Array, Array, Array]:
    """Cut segments [edges[s], edges[s + 1]) into tiles: segment, start, length and position of each tile.

    Tiles are in row order. Unused tiles, with start and length 0, come last.
    """
    counts = (edges[1:] - edges[:-1] + (block_size - 1)) // block_size
    last = running_sum(counts)
    tile = jnp.arange(num_tiles, dtype=jnp.int32)
    segment = count_not_above(last, tile)
    is_used = segment < counts.shape[0]
    segment = jnp.minimum(segment, counts.shape[0] - 1)
    position = jnp.where(is_used, (tile - (last - counts)[segment]) * block_size, 0)
    start = jnp.where(is_used, edges[segment] + position, 0)
    length = jnp.where(is_used, jnp.minimum(edges[segment + 1] - start, block_size), 0)
    return segment, start, length, position


# On a GPU these functions cost by the number of kernels, not by the work in them. Comparing every pair is one fused
# reduction; a scan or a search is several kernels. Device time on an H200, in microseconds (* as chosen here):
#
# | sequences, tokens | prefixes compared, tiles searched | both compared | scans and a search |
# |---|---|---|---|
# | 1,152, 1.6 million | 10.8 * | 15.9 | 15.6 |
# | 64, 262,144 | 7.1 | 5.3 * | 8.5 |
_MOST_COMPARED_PREFIXES = 2048
_MOST_COMPARISONS = 1 << 20


def running_sum(x: Array) -> Array:
    """Return the sums of all prefixes of an int32 array."""
    if not _is_at_most(x.shape[0], _MOST_COMPARED_PREFIXES):
        return jnp.cumsum(x, dtype=jnp.int32)
    return jnp.sum(jnp.where(_is_in_prefix(x.shape[0]), x[None, :], 0), axis=1, dtype=jnp.int32)


def running_maximum(x: Array) -> Array:
    """Return the maxima of all prefixes of a non-negative int32 array."""
    if not _is_at_most(x.shape[0], _MOST_COMPARED_PREFIXES):
        return jax.lax.cummax(x)
    return jnp.max(jnp.where(_is_in_prefix(x.shape[0]), x[None, :], 0), axis=1, initial=0)


def _is_at_most(size: int, bound: int) -> bool:
    """Return whether a size is known to be at most a bound; False for a symbolic size."""
    return not is_symbolic(size) and size <= bound


def _is_in_prefix(size: int) -> Array:
    """Return the mask [prefix, element] of the elements in the prefix that ends with element `prefix`."""
    index = jnp.arange(size, dtype=jnp.int32)
    return index[None, :] <= index[:, None]


def count_not_above(sorted_values: Array, x: Array) -> Array:
    """Return, for each element of `x`, the number of `sorted_values` that are at most that element, int32."""
    return _count_before(sorted_values, x, jnp.less_equal)


def count_below(sorted_values: Array, x: Array) -> Array:
    """Return, for each element of `x`, the number of `sorted_values` below that element, int32."""
    return _count_before(sorted_values, x, jnp.less)


def _count_before(sorted_values: Array, x: Array, is_before: Callable[[Array, Array], Array]) -> Array:
    """Return the number of `sorted_values` [n] that come before each element of `x` [m].

    This replaces `jnp.searchsorted`, which fails inside a `jax.shard_map` that is manual over only some axes of the
    mesh (jax 0.11.2).
    """
    size = sorted_values.shape[0]
    if _is_at_most(size * x.shape[0], _MOST_COMPARISONS):
        return jnp.sum(is_before(sorted_values[None, :], x[:, None]), axis=1, dtype=jnp.int32)
    # An unrolled binary search finds the count bit by bit, from the highest bit.
    count = jnp.zeros(x.shape, jnp.int32)
    for bit in reversed(range(31 if is_symbolic(size) else size.bit_length())):
        # No overflow: `count` has only higher bits so far, so the sum is below 2**31.
        larger = count + (1 << bit)
        value = sorted_values.at[larger - 1].get(mode="clip", wrap_negative_indices=False)
        is_larger = (larger <= size) & is_before(value, x)
        count = jnp.where(is_larger, larger, count)
    return count
