"""Layouts: conversions between the token axis and tiles of equally many rows, in plain `jax.numpy`.

A layout converts [tokens, ...] to [lead.., rows, ...] and back. Rows of a tile that belong to no block are 0.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from blockdiag.common.packing import count_not_above, running_sum
from blockdiag.common.sizes import is_symbolic, smaller_bound
from blockdiag.ops.block_diagonal.problem import BlockDiagonalProblem
from blockdiag.ops.block_diagonal.tiles import uniform_tiles

type RotaryArrays = tuple[Array, Array, Array | None]


@dataclass(frozen=True)
class EqualSequences:
    """Tiles of equally long sequences, back to back: [sequences, tiles per sequence, b, ...], without any gather."""

    problem: BlockDiagonalProblem
    length: int

    @property
    def rows(self) -> int:
        """Rows of a tile, b."""
        return min(self.problem.block_size, self.length)

    @property
    def lead(self) -> tuple[int, ...]:
        """Axes before the rows of a tile."""
        return self.problem.tokens // self.length, -(-self.length // self.rows)

    @property
    def is_full(self) -> bool:
        """True if every row of every tile is known to belong to a block."""
        return self.length % self.rows == 0

    @property
    def known_lengths(self) -> np.ndarray:
        """Number of rows in the block, int32, for each tile of a sequence."""
        position = np.arange(0, self.length, self.rows, dtype=np.int32)
        return np.minimum(self.length - position, self.rows).astype(np.int32)

    @property
    def lengths(self) -> Array:
        """`known_lengths` as a JAX array."""
        return jnp.asarray(self.known_lengths)

    def to_tiles(self, x: Array) -> Array:
        """Convert [tokens, ...], or [length, ...] of one sequence, to tiles, with 0 in rows outside a block."""
        x = x.reshape(-1, self.length, *x.shape[1:])
        x = jnp.pad(x, [(0, 0), (0, -self.length % self.rows)] + [(0, 0)] * (x.ndim - 2))
        return x.reshape(x.shape[0], -1, self.rows, *x.shape[2:])

    def to_tokens(self, x: Array) -> Array:
        """Convert tiles [sequences, tiles, b, ...] back to [tokens, ...]."""
        x = x.reshape(x.shape[0], -1, *x.shape[3:])[:, : self.length]
        return x.reshape(self.problem.tokens, *x.shape[2:])

    def table_rows(self, source: str, table: Array, positions: Array | None) -> Array:
        """Return the rows of a rotary table [P, H/2] for the tiles, [tiles, b, 1, H/2]; 0 outside every block."""
        if positions is not None:
            rows = clamped_rows(table, positions)
        else:
            # Looked up by position, the rows of one sequence broadcast over all sequences, the layout's first axis.
            count = self.length if source == "sequence" else self.problem.tokens
            rows = clamped_rows(table, jnp.arange(count, dtype=jnp.int32)) if count > len(table) else table[:count]
        return self.to_tiles(rows[:, None, :])


@dataclass(frozen=True)
class TileTable:
    """Tiles of a tile table, [tiles, b, ...], by a gather and a scatter of rows."""

    problem: BlockDiagonalProblem
    tiles: Array
    is_full = False

    @property
    def rows(self) -> int:
        """Rows of a tile, b."""
        return smaller_bound(self.problem.tokens, self.problem.block_size)

    @property
    def lead(self) -> tuple[int, ...]:
        """Axes before the rows of a tile."""
        return (self.problem.num_tiles,)

    @property
    def lengths(self) -> Array:
        """Number of rows in the block, for each tile; 0 or less for a tile without a block."""
        return self.tiles[:, 1]

    @functools.cached_property
    def places(self) -> "Places":
        """The place of each row of each tile."""
        offset = jnp.arange(self.rows, dtype=jnp.int32)[None, :]
        row = jnp.minimum(self.tiles[:, :1] + offset, self.problem.tokens - 1)
        return Places(row, self.tiles[:, 2:] + offset, offset < self.lengths[:, None])

    def to_tiles(self, x: Array) -> Array:
        """Convert [tokens, ...] to tiles, with 0 in rows outside a block."""
        return self.places.gather(x)

    def to_tokens(self, x: Array) -> Array:
        """Convert tiles [tiles, b, ...] back to [tokens, ...], with 0 outside every block."""
        row = jnp.where(self.places.is_inside, self.places.row, self.problem.tokens)
        output = jnp.zeros((self.problem.tokens, *x.shape[2:]), x.dtype)
        return output.at[row].set(x, mode="drop")

    def table_rows(self, source: str, table: Array, positions: Array | None) -> Array:
        """Return the rows of a rotary table [P, H/2] for the tiles, [tiles, b, 1, H/2]; 0 outside every block."""
        return self.places.table_rows(source, table, positions)


@dataclass(frozen=True)
class Places:
    """The token in each row of each tile, [lead.., rows].

    Attributes:
        row: row of the token axis; some valid row where the tile's row has no token.
        position: position of the token within its sequence.
        is_inside: whether the row belongs to a block.
    """

    row: Array
    position: Array
    is_inside: Array

    def gather(self, x: Array) -> Array:
        """Gather [tokens, ...] into tiles."""
        return self._select(x[self.row])

    def table_rows(self, source: str, table: Array, positions: Array | None) -> Array:
        """Return the rows of a rotary table, [lead.., rows, 1, H/2]."""
        index = self.position if source == "sequence" else self.row
        if positions is not None:
            index = positions[self.row]
        return self._select(clamped_rows(table, index)[..., None, :])

    def _select(self, x: Array) -> Array:
        """Set rows outside a block to 0, by selection: 0 * NaN would carry a neighbour's NaN in here."""
        shape = (*self.is_inside.shape, *[1] * (x.ndim - self.is_inside.ndim))
        return jnp.where(self.is_inside.reshape(shape), x, 0)


@dataclass(frozen=True)
class WindowSizes:
    """Sizes of windows, which hold blocks of any length in equally many rows.

    Each block begins at a multiple of `alignment` rows. A tile of up to `alignment` rows then never has rows of two
    blocks, so NaN stays in its block. The number of windows suffices for any block lengths.

    Attributes:
        alignment: a power of two.
        capacity: rows of a window in which blocks may begin. A block that would begin later goes to the next window.
        rows: rows of a window: `capacity` plus the longest block.
        count: number of windows.
    """

    alignment: int
    capacity: int
    rows: int
    count: int


def window_sizes(problem: BlockDiagonalProblem, alignment: int) -> WindowSizes:
    """Return the sizes of windows for a problem with a tile table.

    The capacity is at least four times the longest block, so the extra rows for a window's last block are at most a
    fifth of all rows. Smaller windows keep the lists of tile pairs within a window short.
    """
    longest = -(-smaller_bound(problem.tokens, problem.block_size) // alignment) * alignment
    total = -(-(problem.tokens + problem.num_tiles * (alignment - 1)) // alignment) * alignment
    capacity = max(4 * longest, 8192)
    if is_symbolic(total) or total <= capacity + longest:
        return WindowSizes(alignment, total, total, 1)
    return WindowSizes(alignment, capacity, capacity + longest, -(-total // capacity))


@dataclass(frozen=True)
class Windows:
    """Blocks of a tile table, back to back in windows [windows, rows, ...], by two gathers of rows.

    Where block lengths differ, this takes fewer rows than one tile of maximum length per block.
    """

    problem: BlockDiagonalProblem
    tiles: Array
    sizes: WindowSizes

    @property
    def rows(self) -> int:
        """Rows of a window."""
        return self.sizes.rows

    @property
    def lead(self) -> tuple[int, ...]:
        """Axes before the rows."""
        return (self.sizes.count,)

    @functools.cached_property
    def _groups(self) -> tuple[Array, Array]:
        """The tile of each run of `alignment` rows, [windows, runs], and the run's first row within the tile.

        The row is beyond the tile's last row if the run belongs to no tile.
        """
        sizes, step = self.sizes, self.sizes.alignment
        counts = (jnp.maximum(self.tiles[:, 1], 0) + (step - 1)) // step
        first = running_sum(counts) - counts
        window = first // (sizes.capacity // step)
        place = window * (sizes.rows // step) + first % (sizes.capacity // step)
        if sizes.count == 1:
            place = first
        group = jnp.arange(sizes.count * sizes.rows // step, dtype=jnp.int32)
        # Where several tiles have the same place, all but the last are empty.
        tile = jnp.maximum(count_not_above(place, group) - 1, 0)
        shape = (sizes.count, sizes.rows // step)
        return tile.reshape(shape), ((group - place[tile]) * step).reshape(shape)

    @functools.cached_property
    def places(self) -> Places:
        """The place of each row of each window."""
        tile, first = self._groups
        start, length, position = (column[tile][:, :, None] for column in self.tiles.T)
        offset = first[:, :, None] + jnp.arange(self.sizes.alignment, dtype=jnp.int32)[None, None, :]
        row = jnp.clip(start + offset, 0, self.problem.tokens - 1)
        found = (row, position + offset, (offset >= 0) & (offset < length))
        return Places(*(x.reshape(self.sizes.count, self.rows) for x in found))

    @property
    def segments(self) -> tuple[Array, Array]:
        """Segment numbers of each row as a query and as a key, int32 [windows, rows].

        A query sees the keys with its own number. Both numbers increase from block to block, and rows between two
        blocks have numbers in between. The minimum and maximum of a tile therefore tell which tiles have a block in
        common.
        """
        tile, first = self._groups
        is_used = (first >= 0) & (first < self.tiles[:, 1][tile])
        query = jnp.where(is_used, 2 * tile, -1)
        query, tile = (jnp.repeat(x, self.sizes.alignment, axis=1) for x in (query, tile))
        return query, 2 * tile + jnp.where(self.places.is_inside, 0, 1)

    def to_tiles(self, x: Array) -> Array:
        """Convert [tokens, ...] to windows, with 0 in rows outside a block."""
        return self.places.gather(x)

    def to_tokens(self, x: Array) -> Array:
        """Convert windows [windows, rows, ...] back to [tokens, ...], with 0 outside every block."""
        tokens, count = self.problem.tokens, self.sizes.count * self.rows
        row = jnp.where(self.places.is_inside, self.places.row, tokens).reshape(-1)
        # Scattering row numbers and gathering rows is faster than scattering rows.
        place = jnp.full((tokens,), count, jnp.int32).at[row].set(jnp.arange(count, dtype=jnp.int32), mode="drop")
        return x.reshape(count, *x.shape[2:]).at[place].get(mode="fill", fill_value=0)

    def table_rows(self, source: str, table: Array, positions: Array | None) -> Array:
        """Return the rows of a rotary table [P, H/2] for the windows, [windows, rows, 1, H/2]; 0 outside blocks."""
        return self.places.table_rows(source, table, positions)


type Layout = EqualSequences | TileTable | Windows


def layout_of(problem: BlockDiagonalProblem, tiles: Array | None) -> EqualSequences | TileTable:
    """Return the layout of a call in tiles of `block_size` rows.

    Args:
        problem: the call.
        tiles: its tile table int32 [num_tiles, 3], or None for a uniform problem.
    """
    if tiles is not None:
        return TileTable(problem, tiles)
    if problem.sequence_length is None:
        raise ValueError("`tiles` must be a tile table for a problem that is not uniform, got None")
    if is_symbolic(problem.sequence_length):
        return TileTable(problem, uniform_tiles(problem))
    return EqualSequences(problem, problem.sequence_length)


def clamped_rows(table: Array, index: Array) -> Array:
    """Return rows of a table, with indices clamped to the table."""
    return table[jnp.clip(index, 0, table.shape[0] - 1)]


def split_heads(problem: BlockDiagonalProblem, x: Array) -> Array:
    """Reshape [tokens, N, ...] to [tokens, K, G, ...]."""
    return x.reshape(x.shape[0], problem.key_heads, problem.group_size, *x.shape[2:])


def operand_tiles(layout: Layout, query: Array, key: Array, value: Array) -> tuple[Array, Array, Array]:
    """Return the tiles of query [lead.., rows, K, G, H], and of key and value [lead.., rows, K, H]."""
    query = layout.to_tiles(split_heads(layout.problem, query))
    return query, layout.to_tiles(key), layout.to_tiles(value)


def turn_operands(
    turn: Callable[..., Array], layout: Layout, rotary: RotaryArrays | None, query: Array, key: Array, value: Array
) -> tuple[Array, Array, Array]:
    """Apply `rotate` or `rotate_back` to the tiles of the operands that the problem rotates, each in its own dtype."""
    options = layout.problem.rotary
    if options is None or rotary is None:
        return query, key, value
    *tables, positions = rotary
    cos, sin = (layout.table_rows(options.positions, table, positions) for table in tables)
    if options.query:
        # The query has one more axis than the tables: the group.
        query = turn(query, cos[..., None, :], sin[..., None, :], options.interleaved).astype(query.dtype)
    if options.key:
        key = turn(key, cos, sin, options.interleaved).astype(key.dtype)
    if options.value:
        value = turn(value, cos, sin, options.interleaved).astype(value.dtype)
    return query, key, value
