"""The least and greatest element that each leaf of a region has in a tile of scores, or in a block of tiles.

A block of level n has 2^n tiles of queries and 2^n tiles of keys, fewer at the ends. Extents take memory that grows as
the leaves do: lines of tiles for numbers of queries or keys, lines of diagonals for numbers of distances.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from blockdiag.fusion.analysis.interval import Interval, lifted, module_of
from blockdiag.fusion.ir.tile import Tile


@dataclass(frozen=True)
class Tiling:
    """Tiles of scores.

    Attributes:
        tile: rows and columns of a tile.
        rows, columns: queries and keys.
    """

    tile: Tile
    rows: int
    columns: int

    @property
    def counts(self) -> tuple[int, int]:
        """Tiles of queries and of keys."""
        return -(-self.rows // self.tile.rows), -(-self.columns // self.tile.columns)

    @property
    def step(self) -> int:
        """Distances from the first key of a tile to its first query are multiples of this."""
        return gcd(self.tile.rows, self.tile.columns)

    @property
    def offsets(self) -> tuple[int, int]:
        """The least and greatest of these distances, in steps."""
        (row_tiles, key_tiles), step = self.counts, self.step
        return -(key_tiles - 1) * self.tile.columns // step, (row_tiles - 1) * self.tile.rows // step

    def coarser(self) -> "Tiling":
        """Blocks of twice as many tiles of queries and of keys."""
        return Tiling(Tile(2 * self.tile.rows, 2 * self.tile.columns), self.rows, self.columns)


@dataclass(frozen=True, eq=False)
class Extent:
    """The interval of a leaf in every tile, or block of tiles.

    Attributes:
        interval: [*batch, tiles of queries or 1, tiles of keys or 1]; of a leaf of distances [*batch, offsets], see
            `Tiling.offsets`.
        tiling: the tiles, or the blocks as if each were one.
        is_distance: whether it is of a leaf of distances.
        line: the axis, "q" or "k", of numbers that grow by one from each query or key to the next.
        start: the first of these numbers.
    """

    interval: Interval
    tiling: Tiling
    is_distance: bool = False
    line: str | None = None
    start: int = 0

    @property
    def is_known(self) -> bool:
        """Return whether it is known while tracing."""
        return module_of([self.interval]) is np

    @property
    def batch(self) -> tuple[int, ...]:
        """Sizes of the axes before those of tiles."""
        shape = np.broadcast_shapes(np.shape(self.interval.low), np.shape(self.interval.high))
        return shape[: -1 if self.is_distance else -2]

    def at(self, row: Any, column: Any, cell: Sequence[Any] = ()) -> Interval:
        """The interval in some tiles.

        Args:
            row, column: numbers of tiles of queries and of keys, of shapes [a, b] that go together.
            cell: indices of the last axes of the batch in as many tiles; without them the result has all of the batch.
        """
        if self.is_distance:
            tile, step = self.tiling.tile, self.tiling.step
            first, last = self.tiling.offsets
            offset = (row * tile.rows - column * tile.columns) // step
            places = [offset.clip(first, last) - first]
        else:
            shape = np.broadcast_shapes(np.shape(self.interval.low), np.shape(self.interval.high))
            nowhere = np.zeros((1, 1), np.int64)
            places = [place if size > 1 else nowhere for place, size in zip((row, column), shape[-2:], strict=True)]
        return self._read(places, cell)

    def at_offsets(self, cell: Sequence[Any]) -> Interval:
        """The interval in a tile of every offset [offsets, 1], of a leaf of distances or of one number each cell."""
        if self.is_distance:
            return self._read([np.arange(self.interval.low.shape[-1])[:, None]], cell)
        return self._read([np.zeros((1, 1), np.int64)] * 2, cell)

    def _read(self, places: Sequence[Any], cell: Sequence[Any]) -> Interval:
        batch = self.batch
        own = cell[len(cell) - len(batch) :] if cell and batch else [slice(None)] * len(batch)
        index = tuple(
            place if isinstance(place, slice) or size > 1 else np.zeros((1, 1), np.int64)
            for place, size in zip(own, batch, strict=True)
        )
        interval = self.interval
        if self.is_known:
            ends = (np.asarray(x) for x in (interval.low, interval.high))
            interval = Interval(*(np.broadcast_to(x, (*batch, *x.shape[x.ndim - len(places) :])) for x in ends))
            if any(isinstance(place, jax.Array) for place in places):
                interval = lifted(interval)
        return Interval(*(end[(*index, *places)] for end in (interval.low, interval.high)))

    def coarser(self) -> "Extent":
        """The extent in blocks of twice as many tiles; of one that is known."""
        low, high = self.interval.low, self.interval.high
        tiling = self.tiling.coarser()
        if not self.is_distance:
            for axis in (-2, -1):
                low, high = _paired(low, axis, np.minimum), _paired(high, axis, np.maximum)
            return Extent(Interval(low, high), tiling)
        first, last = self.tiling.offsets
        next_first, next_last = tiling.offsets
        tile, step = self.tiling.tile, self.tiling.step
        offsets = np.arange(next_first, next_last + 1) * (tiling.step // step)
        inner = [offsets + row - column for row in (0, tile.rows // step) for column in (0, tile.columns // step)]
        places = [x.clip(first, last) - first for x in inner]
        low = np.minimum.reduce([low[..., x] for x in places])
        high = np.maximum.reduce([high[..., x] for x in places])
        return Extent(Interval(low, high), tiling, is_distance=True)


def _paired(ends: Any, axis: int, reduce: Any) -> Any:
    """One end of two neighbours each along an axis."""
    size = ends.shape[axis]
    if size == 1:
        return ends
    first = np.take(ends, np.arange(0, size, 2), axis)
    return reduce(first, np.take(ends, np.minimum(np.arange(1, size + 1, 2), size - 1), axis))


def constant_extent(tiling: Tiling, low: float, high: float) -> Extent:
    """The extent of a leaf that has the same bounds in all tiles."""
    return Extent(Interval(np.full((1, 1), low), np.full((1, 1), high)), tiling)


def distance_extent(tiling: Tiling, line: Any) -> Extent:
    """The extent of whole numbers or booleans by distance [*batch, queries + keys - 1]."""
    xp: Any = np if isinstance(line, np.ndarray) else jnp
    tile = tiling.tile
    first, last = tiling.offsets
    width = tile.rows + tile.columns - 1
    # The distances of a tile begin `columns` - 1 below its offset. Beyond the ends they are those at the ends.
    start = np.arange(first, last + 1) * tiling.step + tiling.columns - tile.columns
    before, beyond = max(0, -start[0]), max(0, start[-1] + width - line.shape[-1])
    line = xp.pad(line, [(0, 0)] * (line.ndim - 1) + [(before, beyond)], mode="edge")
    reductions = (xp.logical_and, xp.logical_or) if line.dtype == bool else (xp.minimum, xp.maximum)
    ends = [_windows(line, width, reduce)[..., start + before] for reduce in reductions]
    return Extent(Interval(*ends), tiling, is_distance=True)


def _windows(line: Any, width: int, reduce: Any) -> Any:
    """Every `width` neighbours of the last axis reduced by an idempotent operation."""
    done = 1
    while 2 * done <= width:
        line = reduce(line[..., :-done], line[..., done:])
        done *= 2
    rest = width - done
    return reduce(line[..., :-rest], line[..., rest:]) if rest else line
