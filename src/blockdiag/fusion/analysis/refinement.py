"""Search for the live tiles of known masks without evaluating every tile.

A mask that depends on the distance between query and key alone has one state per tile offset. For other masks, blocks
of tiles are split in four until each block is dead, full or a single tile. The number of small blocks is proportional
to the number of tiles along the edges of the mask.
"""

from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from blockdiag.fusion.analysis.leaf_ranges import Tiling
from blockdiag.fusion.analysis.mask_states import DEAD, MASKED_TILE, UNDECIDED, MaskStates

# The search evaluates at most this many blocks, or this many per line of tiles if that is more. Undecided blocks are
# then kept as masked, so large masks must be decidable at the level of large blocks.
_MOST_BLOCKS = 1 << 22
_MOST_PER_LINE = 64
# Blocks evaluated at once, few enough that their intermediates stay in cache.
_TOGETHER = 1 << 14


@dataclass(frozen=True, eq=False)
class Blocks:
    """Disjoint blocks of tiles, each with one state; dead blocks are left out.

    Attributes:
        cell: the flat batch index of each block.
        row, column: the first query tile and the first key tile.
        rows, columns: the number of query tiles and of key tiles.
        state: the state of all tiles of the block.
    """

    cell: Any
    row: Any
    column: Any
    rows: Any
    columns: Any
    state: Any

    @classmethod
    def joined(cls, parts: list[Self]) -> Self:
        """Return the concatenation of several sets of blocks."""
        names = cls.__dataclass_fields__
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))

    @property
    def area(self) -> int:
        """The number of tiles in all blocks."""
        return int((self.rows * self.columns).sum())


@dataclass(frozen=True, eq=False)
class Pieces:
    """Runs of consecutive tiles of a line, each with one state.

    Attributes:
        line: the line of each run, numbered consecutively over all batch indices.
        start, stop: the first tile, and the one after the last.
        state: the state of all tiles of the run.
    """

    line: Any
    start: Any
    stop: Any
    state: Any

    @classmethod
    def joined(cls, parts: list[Self]) -> Self:
        """Return the concatenation of several sets of pieces."""
        names = cls.__dataclass_fields__
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def decided_blocks(states: MaskStates, batch: tuple[int, ...]) -> Blocks:
    """Return the tiles that are not dead, as blocks.

    Args:
        batch: sizes of the axes along which masks may differ.
    """
    row_tiles, key_tiles = states.tiling.counts
    cells = int(np.prod(batch, dtype=np.int64))
    levels = [states]
    while max(levels[-1].tiling.counts) > 1:
        last = levels[-1]
        levels.append(replace(last, tiling=last.tiling.coarser(), extents=tuple(x.coarser() for x in last.extents)))
    left = max(_MOST_BLOCKS, _MOST_PER_LINE * cells * (row_tiles + key_tiles))
    found: list[Blocks] = []
    cell = np.arange(cells)
    row = column = np.zeros(cells, np.int64)
    for level in reversed(range(len(levels))):
        state = _states_of(levels[level], level, cell, row, column, batch)
        left -= len(cell)
        is_open = state == UNDECIDED
        if left < 4 * int(is_open.sum()):
            state, is_open = np.where(is_open, MASKED_TILE, state), np.zeros_like(is_open)
        is_left = ~is_open & (state != DEAD)
        first_row, first_column = row[is_left] << level, column[is_left] << level
        rows = np.minimum(1 << level, row_tiles - first_row)
        columns = np.minimum(1 << level, key_tiles - first_column)
        found.append(Blocks(cell[is_left], first_row, first_column, rows, columns, state[is_left]))
        if not is_open.any():
            break
        row_count, column_count = levels[level - 1].tiling.counts
        cell = np.repeat(cell[is_open], 4)
        row = np.repeat(2 * row[is_open], 4) + np.tile([0, 0, 1, 1], int(is_open.sum()))
        column = np.repeat(2 * column[is_open], 4) + np.tile([0, 1, 0, 1], int(is_open.sum()))
        is_there = (row < row_count) & (column < column_count)
        cell, row, column = cell[is_there], row[is_there], column[is_there]
    return Blocks.joined(found)


def _states_of(states: MaskStates, level: int, cell: Any, row: Any, column: Any, batch: tuple[int, ...]) -> Any:
    found = [np.zeros(0, np.int8)]
    for first in range(0, len(cell), _TOGETHER):
        some = slice(first, first + _TOGETHER)
        index = np.unravel_index(cell[some, None], batch) if batch else ()
        compute = states.at if level == 0 else states.of_blocks
        state = compute(row[some, None], column[some, None], index)
        found.append(np.broadcast_to(state, (len(cell[some]), 1))[:, 0])
    return np.concatenate(found)


def pieces_of_blocks(blocks: Blocks, tiling: Tiling, way: str) -> Pieces:
    """Return blocks as pieces of lines.

    Args:
        way: the kind of line. "": one line per query tile, with key tiles. "_t": one line per key tile, with query
            tiles. "_d": one line per diagonal of tiles, with query tiles, from the last key to the last query.
    """
    row_tiles, key_tiles = tiling.counts
    if way == "_d":
        counts = blocks.rows + blocks.columns - 1
        owner, offset = _repeated(counts)
        first = blocks.row - blocks.column - blocks.columns + 1
        # The query tiles of each diagonal of the block.
        shift = first[owner] + offset
        start = np.maximum(blocks.row[owner], blocks.column[owner] + shift)
        stop = np.minimum((blocks.row + blocks.rows)[owner], (blocks.column + blocks.columns)[owner] + shift)
        line = blocks.cell[owner] * (row_tiles + key_tiles - 1) + shift + key_tiles - 1
        return Pieces(line, start, stop, blocks.state[owner])
    if way == "":
        own, owns, other, others, lines = blocks.row, blocks.rows, blocks.column, blocks.columns, row_tiles
    else:
        own, owns, other, others, lines = blocks.column, blocks.columns, blocks.row, blocks.rows, key_tiles
    owner, offset = _repeated(owns)
    line = blocks.cell[owner] * lines + own[owner] + offset
    return Pieces(line, other[owner], (other + others)[owner], blocks.state[owner])


def _repeated(counts: Any) -> tuple[Any, Any]:
    """Return, for owners with these counts of elements, each element's owner and its index within the owner."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)


@dataclass(frozen=True, eq=False)
class OffsetStates:
    """Tile states of masks that depend on distance alone.

    Attributes:
        states: int8 [cells, offsets], see `Tiling.offsets`.
        whole: the number of whole query tiles and of whole key tiles, to which `states` applies.
        edges: the live tiles of a last query tile or key tile that is not whole.
        tiling: the score tiles.
    """

    states: Any
    whole: tuple[int, int]
    edges: Blocks
    tiling: Tiling

    def without_edges(self) -> "OffsetStates":
        """Return the states as if the last tiles were whole and every live tile needed its mask.

        Some dead tiles may then count as live.
        """
        nothing = Blocks(*(x[:0] for x in vars(self.edges).values()))
        return OffsetStates(np.minimum(self.states, MASKED_TILE), self.tiling.counts, nothing, self.tiling)

    def groups(self, way: str) -> list["OffsetLines"]:
        """Return the lines per query tile ("") or per key tile ("_t"), in groups with equal states."""
        tile, step = self.tiling.tile, self.tiling.step
        (row_tiles, key_tiles), (first, last) = self.tiling.counts, self.tiling.offsets
        if way == "":
            own, other, lines, tiles, whole, sign = tile.rows, tile.columns, row_tiles, key_tiles, self.whole, -1
        else:
            own, other, lines, tiles, whole, sign = tile.columns, tile.rows, key_tiles, row_tiles, self.whole[::-1], 1
        line = np.arange(whole[0])
        base, rest = line * own // other, line * own % other
        found = []
        for phase in range(0, other, step):
            members = line[rest == phase]
            if not len(members):
                continue
            most = int(base[members[-1]])
            offset = sign * (np.arange(-most, tiles) * (other // step) - phase // step)
            is_there = (offset >= first) & (offset <= last)
            for cell, states in enumerate(self.states):
                own_states = np.where(is_there, states[offset.clip(first, last) - first], DEAD)
                found.append(OffsetLines(cell * lines + members, base[members], whole[1], own_states, -most))
        return found

    def pieces(self, way: str) -> Pieces:
        """Return the live pieces of all lines, see `pieces_of_blocks`."""
        edges = pieces_of_blocks(self.edges, self.tiling, way)
        if way != "_d":
            return Pieces.joined([*(group.pieces() for group in self.groups(way)), edges])
        row_tiles, key_tiles = self.tiling.counts
        cells, count = self.states.shape
        shift = np.arange(count) - (key_tiles - 1)
        start = np.maximum(shift, 0)
        stop = np.maximum(start, np.minimum(self.whole[0], shift + self.whole[1]))
        line = np.arange(cells * count)
        assert count == row_tiles + key_tiles - 1, "diagonals need square tiles"
        return Pieces.joined(
            [Pieces(line, np.tile(start, cells), np.tile(stop, cells), self.states.reshape(-1)), edges]
        )


@dataclass(frozen=True, eq=False)
class OffsetLines:
    """Lines with the same states relative to a base tile of each line.

    Attributes:
        lines: the numbers of the lines.
        base: the base tile of each line.
        tiles: the number of whole tiles in a line.
        states: int8, the states of consecutive tiles, from `first` on.
        first: the first of these tiles, relative to the base.
    """

    lines: Any
    base: Any
    tiles: int
    states: Any
    first: int

    @property
    def runs(self) -> tuple[Any, Any, Any]:
        """Start, stop and state of each live run of equal states, relative to the base."""
        edges = np.flatnonzero(np.diff(self.states)) + 1
        start = np.concatenate([[0], edges])
        stop = np.concatenate([edges, [len(self.states)]])
        is_left = self.states[start] != DEAD
        return start[is_left] + self.first, stop[is_left] + self.first, self.states[start[is_left]]

    @property
    def reach(self) -> tuple[Any, Any]:
        """The first tile of each line, and the one after the last, relative to the base."""
        return -self.base, self.tiles - self.base

    def _met(self) -> tuple[Any, Any]:
        """Return the first run that each line intersects, and how many runs it intersects."""
        start, stop, _ = self.runs
        least, limit = self.reach
        first = np.searchsorted(stop, least, side="right")
        return first, np.maximum(0, np.searchsorted(start, limit, side="left") - first)

    @property
    def num_pieces(self) -> int:
        """The number of pieces of all lines."""
        return int(self._met()[1].sum())

    def pieces(self) -> Pieces:
        """Return the runs of each line, clipped to the line."""
        start, stop, state = self.runs
        least, limit = self.reach
        first, counts = self._met()
        owner, offset = _repeated(counts)
        run = first[owner] + offset
        base = self.base[owner]
        return Pieces(
            self.lines[owner],
            np.maximum(start[run], least[owner]) + base,
            np.minimum(stop[run], limit[owner]) + base,
            state[run],
        )


def offset_states(states: MaskStates, batch: tuple[int, ...]) -> OffsetStates:
    """Return the tile states of masks that depend on distance alone.

    Args:
        batch: sizes of the axes along which masks may differ.
    """
    tiling = states.tiling
    row_tiles, key_tiles = tiling.counts
    whole = tiling.rows // tiling.tile.rows, tiling.columns // tiling.tile.columns
    cells = int(np.prod(batch, dtype=np.int64))
    count = tiling.offsets[1] - tiling.offsets[0] + 1
    found, parts = [], []
    for cell in range(cells):
        index = tuple(np.full((1, 1), x) for x in np.unravel_index(cell, batch)) if batch else ()
        found.append(np.broadcast_to(states.by_offset(index), (count, 1))[:, 0])
        last = [
            (np.arange(whole[0], row_tiles), np.arange(key_tiles)),
            (np.arange(whole[0]), np.arange(whole[1], key_tiles)),
        ]
        for rows, columns in last:
            row, column = (x.reshape(-1) for x in np.meshgrid(rows, columns, indexing="ij"))
            if len(row):
                state = np.broadcast_to(states.at(row[:, None], column[:, None], index), (len(row), 1))[:, 0]
                row, column, state = (x[state != DEAD] for x in (row, column, state))
                ones = np.ones_like(row)
                parts.append(Blocks(np.full_like(row, cell), row, column, ones, ones, state))
    nothing = np.zeros(0, np.int64)
    no_blocks = Blocks(nothing, nothing, nothing, nothing, nothing, np.zeros(0, np.int8))
    return OffsetStates(np.stack(found), whole, Blocks.joined([no_blocks, *parts]), tiling)
