"""Where the rows of blocks lie: the token axis as tiles of equally many rows, and back, in plain `jax.numpy`.

A layout turns [tokens, ...] into [lead.., rows, ...] and back. Rows of a tile that belong to no block are 0.
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
    """Tiles of equal sequences, back to back: [sequences, tiles per sequence, b, ...], without any gather."""

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
        """Whether every row of every tile is known to belong to a block."""
        return self.length % self.rows == 0

    @property
    def known_lengths(self) -> np.ndarray:
        """Rows that belong to the block, int32, for each tile of a sequence."""
        position = np.arange(0, self.length, self.rows, dtype=np.int32)
        return np.minimum(self.length - position, self.rows).astype(np.int32)

    @property
    def lengths(self) -> Array:
        """The same as an array of JAX."""
        return jnp.asarray(self.known_lengths)

    def to_tiles(self, x: Array) -> Array:
        """[tokens, ...] in tiles, with 0 in rows outside a block; one sequence's rows, [length, ...], too."""
        x = x.reshape(-1, self.length, *x.shape[1:])
        x = jnp.pad(x, [(0, 0), (0, -self.length % self.rows)] + [(0, 0)] * (x.ndim - 2))
        return x.reshape(x.shape[0], -1, self.rows, *x.shape[2:])

    def to_tokens(self, x: Array) -> Array:
        """The inverse: tiles [sequences, tiles, b, ...] as [tokens, ...]."""
        x = x.reshape(x.shape[0], -1, *x.shape[3:])[:, : self.length]
        return x.reshape(self.problem.tokens, *x.shape[2:])

    def table_rows(self, source: str, table: Array, positions: Array | None) -> Array:
        """Rows of a rotary table [P, H/2] for the rows of the tiles, [tiles, b, 1, H/2]; 0 outside every block."""
        if positions is not None:
            rows = clamped_rows(table, positions)
        else:
            # By position, the rows of one sequence serve all sequences, which are the first axis of the layout.
            count = self.length if source == "sequence" else self.problem.tokens
            rows = clamped_rows(table, jnp.arange(count, dtype=jnp.int32)) if count > len(table) else table[:count]
        return self.to_tiles(rows[:, None, :])


@dataclass(frozen=True)
class TileTable:
    """Tiles that lie where a tile table says: [tiles, b, ...], by a gather and a scatter of rows."""

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
        """Rows that belong to the block, for each tile; 0 or less where there is none."""
        return self.tiles[:, 1]

    @functools.cached_property
    def places(self) -> "Places":
        """Of each row of each tile."""
        offset = jnp.arange(self.rows, dtype=jnp.int32)[None, :]
        row = jnp.minimum(self.tiles[:, :1] + offset, self.problem.tokens - 1)
        return Places(row, self.tiles[:, 2:] + offset, offset < self.lengths[:, None])

    def to_tiles(self, x: Array) -> Array:
        """[tokens, ...] in tiles, with 0 in rows outside a block."""
        return self.places.gather(x)

    def to_tokens(self, x: Array) -> Array:
        """The inverse: tiles [tiles, b, ...] as [tokens, ...], 0 outside every block."""
        row = jnp.where(self.places.is_inside, self.places.row, self.problem.tokens)
        output = jnp.zeros((self.problem.tokens, *x.shape[2:]), x.dtype)
        return output.at[row].set(x, mode="drop")

    def table_rows(self, source: str, table: Array, positions: Array | None) -> Array:
        """Rows of a rotary table [P, H/2] for the rows of the tiles, [tiles, b, 1, H/2]; 0 outside every block."""
        return self.places.table_rows(source, table, positions)


@dataclass(frozen=True)
class Places:
    """What lies in each row of each tile, [lead.., rows].

    Attributes:
        row: of the token axis; any that there is where there is none.
        position: of the token within its sequence.
        is_inside: whether the row belongs to a block.
    """

    row: Array
    position: Array
    is_inside: Array

    def gather(self, x: Array) -> Array:
        """[tokens, ...] in tiles."""
        return self._select(x[self.row])

    def table_rows(self, source: str, table: Array, positions: Array | None) -> Array:
        """Rows of a rotary table, [lead.., rows, 1, H/2]."""
        index = self.position if source == "sequence" else self.row
        if positions is not None:
            index = positions[self.row]
        return self._select(clamped_rows(table, index)[..., None, :])

    def _select(self, x: Array) -> Array:
        """Rows of tiles, 0 outside a block: not a product, because 0 * NaN would carry a neighbour's NaN in here."""
        shape = (*self.is_inside.shape, *[1] * (x.ndim - self.is_inside.ndim))
        return jnp.where(self.is_inside.reshape(shape), x, 0)


@dataclass(frozen=True)
class WindowSizes:
    """How blocks of any length lie in windows of equally many rows.

    Each block begins at a multiple of `alignment` rows, so that no tile of up to so many rows has rows of two blocks:
    NaN stays in its block. Windows are as many as can be needed, whatever the lengths are.

    Attributes:
        alignment: a power of two.
        capacity: a block whose first row comes this many rows after the first one of a window, or later, belongs to
            the next one.
        rows: of a window: `capacity`, and the longest block.
        count: of windows.
    """

    alignment: int
    capacity: int
    rows: int
    count: int


def window_sizes(problem: BlockDiagonalProblem, alignment: int) -> WindowSizes:
    """Windows for a problem with a tile table.

    Few enough that what the last block of each may need, one longest block more, is a fifth of all; so small that lists
    of pairs of tiles within a window stay small.
    """
    longest = -(-smaller_bound(problem.tokens, problem.block_size) // alignment) * alignment
    total = -(-(problem.tokens + problem.num_tiles * (alignment - 1)) // alignment) * alignment
    capacity = max(4 * longest, 8192)
    if is_symbolic(total) or total <= capacity + longest:
        return WindowSizes(alignment, total, total, 1)
    return WindowSizes(alignment, capacity, capacity + longest, -(-total // capacity))


@dataclass(frozen=True)
class Windows:
    """Blocks of a tile table back to back in windows, [windows, rows, ...], by two gathers of rows.

    Where lengths differ this is less than a tile of the most rows for each block.
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
        """For each run of `alignment` rows, [windows, runs]: the tile of the table that it belongs to, and which of
        the tile's rows is its first; beyond its last where it belongs to none."""
        sizes, step = self.sizes, self.sizes.alignment
        counts = (jnp.maximum(self.tiles[:, 1], 0) + (step - 1)) // step
        first = running_sum(counts) - counts
        window = first // (sizes.capacity // step)
        place = window * (sizes.rows // step) + first % (sizes.capacity // step)
        if sizes.count == 1:
            place = first
        group = jnp.arange(sizes.count * sizes.rows // step, dtype=jnp.int32)
        # Of tiles in one place all but the last are empty.
        tile = jnp.maximum(count_not_above(place, group) - 1, 0)
        shape = (sizes.count, sizes.rows // step)
        return tile.reshape(shape), ((group - place[tile]) * step).reshape(shape)

    @functools.cached_property
    def places(self) -> Places:
        """Of each row of each window."""
        tile, first = self._groups
        start, length, position = (column[tile][:, :, None] for column in self.tiles.T)
        offset = first[:, :, None] + jnp.arange(self.sizes.alignment, dtype=jnp.int32)[None, None, :]
        row = jnp.clip(start + offset, 0, self.problem.tokens - 1)
        found = (row, position + offset, (offset >= 0) & (offset < length))
        return Places(*(x.reshape(self.sizes.count, self.rows) for x in found))

    @property
    def segments(self) -> tuple[Array, Array]:
        """A number for each row as a query and as a key, int32 [windows, rows]: equal where the one sees the other.

        Both grow from block to block, and the rows between two blocks have numbers in between, so that the least and
        the greatest number of a tile tell which tiles have a block in common.
        """
        tile, first = self._groups
        is_used = (first >= 0) & (first < self.tiles[:, 1][tile])
        query = jnp.where(is_used, 2 * tile, -1)
        query, tile = (jnp.repeat(x, self.sizes.alignment, axis=1) for x in (query, tile))
        return query, 2 * tile + jnp.where(self.places.is_inside, 0, 1)

    def to_tiles(self, x: Array) -> Array:
        """[tokens, ...] in windows, with 0 in rows outside a block."""
        return self.places.gather(x)

    def to_tokens(self, x: Array) -> Array:
        """The inverse: windows [windows, rows, ...] as [tokens, ...], 0 outside every block."""
        tokens, count = self.problem.tokens, self.sizes.count * self.rows
        row = jnp.where(self.places.is_inside, self.places.row, tokens).reshape(-1)
        # Numbers are scattered, rows gathered: that is the faster way round.
        place = jnp.full((tokens,), count, jnp.int32).at[row].set(jnp.arange(count, dtype=jnp.int32), mode="drop")
        return x.reshape(count, *x.shape[2:]).at[place].get(mode="fill", fill_value=0)

    def table_rows(self, source: str, table: Array, positions: Array | None) -> Array:
        """Rows of a rotary table [P, H/2] for the rows of the windows, [windows, rows, 1, H/2]; 0 outside blocks."""
        return self.places.table_rows(source, table, positions)


type Layout = EqualSequences | TileTable | Windows


def layout_of(problem: BlockDiagonalProblem, tiles: Array | None) -> EqualSequences | TileTable:
    """The layout of a call in tiles of `block_size` rows.

    Args:
        problem: the call.
        tiles: its tile table int32 [num_tiles, 3], None for a uniform problem.
    """
    if tiles is not None:
        return TileTable(problem, tiles)
    if problem.sequence_length is None:
        raise ValueError("`tiles` must be a tile table for a problem that is not uniform, got None")
    if is_symbolic(problem.sequence_length):
        return TileTable(problem, uniform_tiles(problem))
    return EqualSequences(problem, problem.sequence_length)


def clamped_rows(table: Array, index: Array) -> Array:
    """Rows of a table by their numbers, the first or last one for numbers beyond."""
    return table[jnp.clip(index, 0, table.shape[0] - 1)]


def split_heads(problem: BlockDiagonalProblem, x: Array) -> Array:
    """[tokens, N, ...] as [tokens, K, G, ...]."""
    return x.reshape(x.shape[0], problem.key_heads, problem.group_size, *x.shape[2:])


def operand_tiles(layout: Layout, query: Array, key: Array, value: Array) -> tuple[Array, Array, Array]:
    """Query [lead.., rows, K, G, H], key and value [lead.., rows, K, H]."""
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
        # One more axis than the tables have: the group.
        query = turn(query, cos[..., None, :], sin[..., None, :], options.interleaved).astype(query.dtype)
    if options.key:
        key = turn(key, cos, sin, options.interleaved).astype(key.dtype)
    if options.value:
        value = turn(value, cos, sin, options.interleaved).astype(value.dtype)
    return query, key, value
