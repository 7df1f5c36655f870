"""Least and greatest elements of each leaf of a region, per score tile or per block of tiles.

A block of level n spans 2^n query tiles and 2^n key tiles, fewer at the ends. Extents are as compact as their leaves. A
leaf indexed by queries or keys has one entry per query or key tile. A leaf indexed by distance has one entry per
diagonal of tiles.
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
    """Division of the score matrix into tiles.

    Attributes:
        tile: the rows and columns of one tile.
        rows, columns: the number of queries and of keys.
    """

    tile: Tile
    rows: int
    columns: int

    @property
    def counts(self) -> tuple[int, int]:
        """The number of query tiles and of key tiles."""
        return -(-self.rows // self.tile.rows), -(-self.columns // self.tile.columns)

    @property
    def step(self) -> int:
        """The unit of tile offsets: the first query of a tile minus its first key is a multiple of it."""
        return gcd(self.tile.rows, self.tile.columns)

    @property
    def offsets(self) -> tuple[int, int]:
        """The least and the greatest tile offset, first query minus first key, in units of `step`."""
        (row_tiles, key_tiles), step = self.counts, self.step
        return -(key_tiles - 1) * self.tile.columns // step, (row_tiles - 1) * self.tile.rows // step

    def coarser(self) -> "Tiling":
        """Return the tiling whose tiles have twice as many rows and twice as many columns."""
        return Tiling(Tile(2 * self.tile.rows, 2 * self.tile.columns), self.rows, self.columns)


@dataclass(frozen=True, eq=False)
class Extent:
    """Interval of a leaf in every tile, or in every block of tiles.

    Attributes:
        interval: [*batch, query tiles or 1, key tiles or 1]. For a leaf indexed by distance: [*batch, offsets], see
            `Tiling.offsets`.
        tiling: the tiles. Blocks of tiles are described as larger tiles.
        is_distance: whether the leaf is indexed by distance.
        line: the axis, "q" or "k", of a leaf that grows by one from each query or key to the next.
        start: the first element of such a leaf.
    """

    interval: Interval
    tiling: Tiling
    is_distance: bool = False
    line: str | None = None
    start: int = 0

    @property
    def is_known(self) -> bool:
        """Return whether the interval is known while tracing."""
        return module_of([self.interval]) is np

    @property
    def batch(self) -> tuple[int, ...]:
        """The sizes of the axes before the tile axes."""
        shape = np.broadcast_shapes(np.shape(self.interval.low), np.shape(self.interval.high))
        return shape[: -1 if self.is_distance else -2]

    def at(self, row: Any, column: Any, cell: Sequence[Any] = ()) -> Interval:
        """Return the interval in selected tiles.

        Args:
            row, column: indices of query tiles and of key tiles, broadcastable to [a, b].
            cell: an index array for each batch axis, broadcastable against `row` and `column`. It may have more
                entries than the leaf has batch axes: the last ones count. If empty, all batch elements are returned.
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
        """Return the interval at every tile offset, [offsets, 1].

        The leaf must be indexed by distance, or be constant within each batch element.
        """
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
        """Return the extent in blocks of 2 x 2 tiles; the interval must be known while tracing."""
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
    """Reduce pairs of neighbours along an axis; an odd last element is kept."""
    size = ends.shape[axis]
    if size == 1:
        return ends
    first = np.take(ends, np.arange(0, size, 2), axis)
    return reduce(first, np.take(ends, np.minimum(np.arange(1, size + 1, 2), size - 1), axis))


def constant_extent(tiling: Tiling, low: float, high: float) -> Extent:
    """Return the extent of a leaf that has the same bounds in all tiles."""
    return Extent(Interval(np.full((1, 1), low), np.full((1, 1), high)), tiling)


def distance_extent(tiling: Tiling, line: Any) -> Extent:
    """Return the extent of integers or booleans indexed by distance, [*batch, queries + keys - 1]."""
    xp: Any = np if isinstance(line, np.ndarray) else jnp
    tile = tiling.tile
    first, last = tiling.offsets
    width = tile.rows + tile.columns - 1
    # The distances in a tile begin `tile.columns` - 1 below its offset. Out-of-range ones repeat the end elements.
    start = np.arange(first, last + 1) * tiling.step + tiling.columns - tile.columns
    before, beyond = max(0, -start[0]), max(0, start[-1] + width - line.shape[-1])
    line = xp.pad(line, [(0, 0)] * (line.ndim - 1) + [(before, beyond)], mode="edge")
    reductions = (xp.logical_and, xp.logical_or) if line.dtype == bool else (xp.minimum, xp.maximum)
    ends = [_windows(line, width, reduce)[..., start + before] for reduce in reductions]
    return Extent(Interval(*ends), tiling, is_distance=True)


def _windows(line: Any, width: int, reduce: Any) -> Any:
    """Reduce every window of `width` elements of the last axis by an idempotent operation."""
    done = 1
    while 2 * done <= width:
        line = reduce(line[..., :-done], line[..., done:])
        done *= 2
    rest = width - done
    return reduce(line[..., :-rest], line[..., rest:]) if rest else line
