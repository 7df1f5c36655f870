"""Tables of the live tiles of each line, in the forms of `tile_lists.py`."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from blockdiag.fusion.analysis.leaf_ranges import Tiling
from blockdiag.fusion.analysis.mask_states import DEAD, FULL, MASKED_TILE, MaskStates
from blockdiag.fusion.analysis.refinement import Blocks, OffsetLines, OffsetStates, Pieces, pieces_of_blocks
from blockdiag.fusion.analysis.tile_lists import SHARED_WIDTH, Form

# The most ranges of a line. Each range costs one more comparison per visited tile.
MOST_RANGES = 6
# The most elements of the lists of all lines. Beyond that, a line with many ranges becomes one masked range, whose dead
# tiles are computed and masked.
_MOST_LISTED = 1 << 24
# Ranges of full and of masked tiles for masks that depend on arrays. A line with more becomes one masked range.
DYNAMIC_FULL, DYNAMIC_MASKED = 2, 4
# Lists of up to this many elements are preferred for masks that are not a function of distance alone, such as prefixes.
# Ranges need 202 registers there instead of 176. The forward pass takes 0.48 ms instead of 0.40 ms (4 x 4,096 tokens,
# 16 heads of 64, a prefix of 512, on an H100), and 1 % longer with gradients. Causal masks and windows gain up to 9 %
# from ranges.
_MOST_LISTED_OF_BLOCKS = 1 << 15
# The most pieces of lines that could share lists but for partial tiles at the ends of queries or keys.
_MOST_APART = 1 << 20
# The most tile states held in memory at once for masks that depend on arrays. Beyond that, tables use ranges.
_MOST_STATES = 1 << 22


@dataclass(frozen=True, eq=False)
class Table:
    """Live tiles of all lines.

    Attributes:
        form: the form of `numbers`.
        counts: int32 [lines, 2], the number of full tiles and of all live tiles of each line.
        numbers: int32 [lines, width]. In the shared form, flat, with the shared lists after the numbers of the lines.
    """

    form: Form
    counts: Any
    numbers: Any


def _counts(line: Any, size: Any, state: Any, lines: int) -> Any:
    full = np.bincount(line[state == FULL], size[state == FULL], lines)
    return np.stack([full, np.bincount(line, size, lines)], axis=-1).astype(np.int32)


def _merged(pieces: Pieces) -> Pieces:
    """Merge adjacent pieces of one state, in the order in which kernels visit them; dead pieces are dropped."""
    is_left = (pieces.state != DEAD) & (pieces.start < pieces.stop)
    line, start, stop, state = (x[is_left] for x in vars(pieces).values())
    order = np.lexsort((start, -state.astype(np.int64), line))
    line, start, stop, state = (x[order] for x in (line, start, stop, state))
    is_first = np.ones(len(line), bool)
    is_first[1:] = (line[1:] != line[:-1]) | (state[1:] != state[:-1]) | (start[1:] != stop[:-1])
    is_last = np.append(is_first[1:], True)[: len(line)]
    return Pieces(line[is_first], start[is_first], stop[is_last], state[is_first])


def _hulls(runs: Pieces, lines: int) -> Pieces:
    """Replace lines with more ranges than dynamic tables hold by one masked range, from the first to the last tile."""
    is_full = runs.state == FULL
    full, masked = (np.bincount(runs.line[x], minlength=lines) for x in (is_full, ~is_full))
    is_long = ((full > DYNAMIC_FULL) | (masked > DYNAMIC_MASKED))[runs.line]
    start, stop = np.full(lines, np.iinfo(np.int64).max), np.zeros(lines, np.int64)
    np.minimum.at(start, runs.line[is_long], runs.start[is_long])
    np.maximum.at(stop, runs.line[is_long], runs.stop[is_long])
    hulls = np.unique(runs.line[is_long])
    state = np.full(len(hulls), MASKED_TILE, np.int8)
    kept = Pieces(*(x[~is_long] for x in vars(runs).values()))
    return _merged(Pieces.joined([kept, Pieces(hulls, start[hulls], stop[hulls], state)]))


def _slots(runs: Pieces, lines: int) -> tuple[int, int, Any]:
    """Return the most full ranges and the most masked ranges of any line, and the range slot of each run."""
    is_full = runs.state == FULL
    key = 2 * runs.line + ~is_full
    starts = np.flatnonzero(np.diff(key, prepend=-1))
    rank = np.arange(len(key)) - np.repeat(starts, np.diff(starts, append=len(key)))
    full, masked = (int(rank[x].max(initial=-1)) + 1 for x in (is_full, ~is_full))
    return full, masked, np.where(is_full, rank, full + rank)


def _ranges(runs: Pieces, lines: int, full: int, masked: int, slot: Any) -> Table:
    """Return the table of runs in the ranges form."""
    size = runs.stop - runs.start
    sizes = np.zeros((lines, max(1, full + masked)), np.int64)
    sizes[runs.line, slot] = size
    ends = np.cumsum(sizes, axis=-1)
    moves = np.zeros_like(sizes)
    moves[runs.line, slot] = runs.start - (ends[runs.line, slot] - size)
    numbers = np.stack([moves, ends], axis=-1).reshape(lines, -1)[:, :-1]
    counts = _counts(runs.line, size, runs.state, lines)
    form = Form("ranges", int(counts.max(initial=0)), full, max(masked, int(full == 0)))
    return Table(form, counts, numbers.astype(np.int32))


def table_of_pieces(pieces: Pieces, lines: int, listed: int = 0) -> Table:
    """Return the table of known pieces: as ranges if no line has many, else as lists.

    Args:
        listed: lists of at most this many elements, over all lines, are preferred to ranges.
    """
    runs = _merged(pieces)
    full, masked, slot = _slots(runs, lines)
    size = runs.stop - runs.start
    most = int(np.bincount(runs.line, size, lines).max(initial=0))
    if full + masked > MOST_RANGES and lines * most > _MOST_LISTED:
        runs = _hulls(runs, lines)
        full, masked, slot = _slots(runs, lines)
    if full + masked <= MOST_RANGES and (lines * most > listed or most == 0):
        return _ranges(runs, lines, full, masked, slot)
    counts = _counts(runs.line, size, runs.state, lines)
    run = np.repeat(np.arange(len(size)), size)
    within = np.arange(len(run)) - np.repeat(np.cumsum(size) - size, size)
    total = counts[:, 1].astype(np.int64)
    place = np.arange(len(run)) - np.repeat(np.cumsum(total) - total, total)
    numbers = np.zeros((lines, most), np.int32)
    numbers[runs.line[run], place] = runs.start[run] + within
    return Table(Form("list", most), counts, numbers)


def shared_table(groups: list[OffsetLines], lines: int) -> Table:
    """Return the table of lines in the shared form; the groups must contain all lines."""
    counts = np.zeros((lines, 2), np.int64)
    numbers = np.zeros((lines, SHARED_WIDTH), np.int64)
    lists, length = [], lines * SHARED_WIDTH
    for group in groups:
        least, limit = group.reach
        own = group.lines
        numbers[own, 0] = group.base
        for part, state in enumerate((FULL, MASKED_TILE)):
            listed = np.flatnonzero(group.states == state) + group.first
            start = np.searchsorted(listed, least)
            # Places of masked tiles continue after those of full tiles, so their start is moved back.
            numbers[own, 1 + part] = length + start - (counts[own, 0] if part else 0)
            counts[own, part] = counts[own, 0] * part + np.searchsorted(listed, limit) - start
            lists.append(listed)
            length += len(listed)
    form = Form("shared", int(counts.max(initial=0)))
    flat = np.concatenate([numbers.reshape(-1), *lists]).astype(np.int32)
    return Table(form, counts.astype(np.int32), flat)


def tables_of_offsets(found: OffsetStates, ways: tuple[str, ...]) -> tuple[dict[str, Table], bool]:
    """Return the tables of masks that depend on distance alone, and whether they distinguish full tiles."""
    cells = len(found.states)
    tables: dict[str, Table] = {}
    for way in ways:
        lines = cells * line_count(found.tiling, way)
        if way == "_d":
            # A diagonal has one state, except where it meets a partial tile.
            tables[way] = table_of_pieces(found.pieces(way), lines)
            continue
        groups = found.groups(way)
        num_pieces = sum(group.num_pieces for group in groups)
        has_edges = found.whole != found.tiling.counts
        if num_pieces > max(MOST_RANGES * lines, _MOST_APART):
            if has_edges:
                return tables_of_offsets(found.without_edges(), ways)[0], False
            tables[way] = shared_table(groups, lines)
            continue
        tables[way] = table_of_pieces(found.pieces(way), lines)
        if tables[way].form.kind == "list" and not has_edges:
            tables[way] = min(tables[way], shared_table(groups, lines), key=lambda table: table.numbers.size)
    return tables, True


def tables_of_blocks(blocks: Blocks, tiling: Tiling, cells: int, ways: tuple[str, ...]) -> dict[str, Table]:
    """Return the table of known blocks for each kind of line."""
    return {
        way: table_of_pieces(
            pieces_of_blocks(blocks, tiling, way), cells * line_count(tiling, way), _MOST_LISTED_OF_BLOCKS
        )
        for way in ways
    }


def line_count(tiling: Tiling, way: str) -> int:
    """Return the number of lines per batch index."""
    row_tiles, key_tiles = tiling.counts
    return {"": row_tiles, "_t": key_tiles, "_d": row_tiles + key_tiles - 1}[way]


def dynamic_tables(states: MaskStates, batch: tuple[int, ...], ways: tuple[str, ...]) -> dict[str, Table]:
    """Return the tables of masks that depend on arrays, computed on their device.

    Counts and numbers have shape [*batch, lines, ..].

    Args:
        batch: the sizes of the axes along which masks differ.
    """
    row_tiles, key_tiles = states.tiling.counts
    is_small = np.prod(batch, dtype=np.int64) * row_tiles * key_tiles <= _MOST_STATES
    # Next to an array of queries by keys, lists are small.
    has_pairs = any(min(np.shape(x.interval.low)[-2:]) > 1 and not x.is_distance for x in states.extents)
    if not is_small and not has_pairs:
        return {way: _dynamic_ranges(states, batch, way) for way in ways}
    row, column = np.arange(row_tiles)[:, None], np.arange(key_tiles)[None, :]
    found = jnp.broadcast_to(states.at(row, column), (*batch, row_tiles, key_tiles))
    return {way: _dynamic_list(_turned(found, way)) for way in ways}


def _turned(states: Any, way: str) -> Any:
    """Return states [.., query tiles, key tiles] as [.., lines, tiles]."""
    if way != "_d":
        return states if way == "" else jnp.swapaxes(states, -1, -2)
    rows, columns = states.shape[-2:]
    row = np.arange(rows)[None, :]
    column = row - np.arange(rows + columns - 1)[:, None] + columns - 1
    is_tile = (column >= 0) & (column < columns)
    return jnp.where(is_tile, states[..., row, column.clip(0, columns - 1)], DEAD)


def _dynamic_list(states: Any) -> Table:
    order = jnp.argsort(-states, axis=-1, stable=True)
    counts = jnp.stack([(states == FULL).sum(-1), (states != DEAD).sum(-1)], -1)
    return Table(Form("list", states.shape[-1]), counts.astype(np.int32), order.astype(np.int32))


def _dynamic_ranges(states: MaskStates, batch: tuple[int, ...], way: str) -> Table:
    """Return ranges computed for a few lines at a time, so that the states of all tiles never exist at once."""
    row_tiles, key_tiles = states.tiling.counts
    lines, tiles = line_count(states.tiling, way), key_tiles if way == "" else row_tiles
    together = max(1, min(lines, _MOST_STATES // int(np.prod([*batch, tiles], dtype=np.int64))))
    other = np.arange(tiles)[None, :]

    def some(first: Any) -> tuple[Any, Any]:
        own = jnp.minimum(first + np.arange(together), lines - 1)[:, None]
        is_tile = None
        match way:
            case "":
                row, column = own, other
            case "_t":
                row, column = other, own
            case _:
                row, column = other, other - own + key_tiles - 1
                is_tile = (column >= 0) & (column < key_tiles)
                column = column.clip(0, key_tiles - 1)
        found = jnp.broadcast_to(states.at(row, column), (*batch, together, tiles))
        return ranges_of(found if is_tile is None else jnp.where(is_tile, found, DEAD))

    parts = jax.lax.map(some, np.arange(0, lines, together, dtype=np.int32))
    counts, numbers = (jnp.moveaxis(x, 0, -3).reshape(*batch, -1, x.shape[-1])[..., :lines, :] for x in parts)
    return Table(Form("ranges", tiles, DYNAMIC_FULL, DYNAMIC_MASKED), counts, numbers)


def ranges_of(states: Any) -> tuple[Any, Any]:
    """Return counts and range numbers of lines, from states [.., lines, tiles]."""
    place = np.arange(states.shape[-1], dtype=np.int32)
    before = jnp.pad(states[..., :-1], [(0, 0)] * (states.ndim - 1) + [(1, 0)])
    starts, sizes = [], []
    is_long = jnp.zeros(states.shape[:-1], bool)
    for state, most in ((FULL, DYNAMIC_FULL), (MASKED_TILE, DYNAMIC_MASKED)):
        is_own = states == state
        run = jnp.cumsum(is_own & (before != state), axis=-1, dtype=np.int32)
        for number in range(1, most + 1):
            is_run = is_own & (run == number)
            starts.append(jnp.argmax(is_run, axis=-1).astype(np.int32))
            sizes.append(is_run.sum(-1, dtype=np.int32))
        is_long = is_long | (run[..., -1] > most)
    is_left = states != DEAD
    first = jnp.argmax(is_left, axis=-1).astype(np.int32)
    stop = jnp.max(jnp.where(is_left, place + 1, 0), axis=-1)
    hull = [jnp.zeros_like(first)] * len(starts)
    start, size = (
        jnp.where(is_long[..., None], jnp.stack([*hull[:-1], whole], -1), jnp.stack(own, -1))
        for whole, own in ((first, starts), (stop - first, sizes))
    )
    end = jnp.cumsum(size, axis=-1, dtype=np.int32)
    numbers = jnp.stack([start - (end - size), end], axis=-1)
    numbers = numbers.reshape(*numbers.shape[:-2], -1)[..., :-1]
    return jnp.stack([end[..., DYNAMIC_FULL - 1], end[..., -1]], -1), numbers


def expanded(form: Form, counts: Any, numbers: Any, tiles: int) -> np.ndarray:
    """Return the states int8 [lines, tiles] that a table of known arrays encodes."""
    counts = np.asarray(counts).reshape(-1, 2)
    place = np.arange(form.most)[None, :]
    if form.kind == "ranges":
        own = np.asarray(numbers).reshape(len(counts), -1)
        part = (place[:, :, None] >= own[:, None, 1::2]).sum(-1)
        tile = place + np.take_along_axis(own[:, 0::2], part, axis=1)
    elif form.kind == "shared":
        base, full, masked = (
            np.asarray(numbers)[: len(counts) * SHARED_WIDTH].reshape(-1, SHARED_WIDTH, 1).swapaxes(0, 1)
        )
        at = np.where(place < counts[:, :1], full, masked) + place
        tile = base + np.asarray(numbers)[np.minimum(at, len(numbers) - 1)]
    else:
        tile = np.asarray(numbers).reshape(len(counts), -1)
    states = np.zeros((len(counts), tiles + 1), np.int8)
    # Places beyond a line's count write to an extra column, which is dropped.
    tile = np.where(place < counts[:, 1:], tile, tiles)
    np.put_along_axis(states, tile, np.where(place < counts[:, :1], FULL, MASKED_TILE).astype(np.int8), 1)
    return states[:, :tiles]
