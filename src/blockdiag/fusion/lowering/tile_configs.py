"""Tile sizes of the generated kernels, and Triton's compile options for them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from blockdiag.fusion.ir.factors import has_masks
from blockdiag.fusion.ir.tile import Kind, Tile
from blockdiag.fusion.ir.tree import Region, nodes_of
from blockdiag.fusion.lowering.eight_bit import is_eight_bit
from blockdiag.fusion.lowering.tile_program import value_columns
from blockdiag.triton_kernels.parts.shapes import next_power_of_2


@dataclass(frozen=True)
class Config:
    """Tile size and options of Triton's compiler."""

    tile: Tile
    num_warps: int
    num_stages: int


# (rows, columns, warps, stages) by kernel and by the larger of features and value columns. The key is 512 where both
# exceed 128; those entries were compiled only, not timed. The others were the fastest of those tried on an H200, for
# 16-bit arrays. A bias of queries by keys is loaded with every tile, so small tiles win there. Biases indexed by
# distance use the same table; neither these nor the tiles of "diagonals" were chosen by timings.
_PLAIN: dict[Kind, dict[int, tuple[int, int, int, int]]] = {
    "forward": {64: (64, 128, 4, 2), 128: (128, 64, 8, 3), 256: (128, 64, 8, 3), 512: (64, 64, 8, 2)},
    "rows": {64: (64, 64, 4, 2), 128: (128, 64, 8, 2), 256: (128, 64, 8, 2), 512: (64, 32, 8, 2)},
    "columns": {64: (64, 64, 4, 2), 128: (32, 64, 4, 3), 256: (32, 128, 8, 3), 512: (16, 64, 8, 2)},
    "pairs": {64: (64, 64, 4, 3), 128: (128, 64, 8, 3), 256: (128, 64, 8, 2), 512: (64, 64, 8, 1)},
    "diagonals": {64: (64, 64, 4, 2), 128: (64, 64, 8, 2), 256: (64, 64, 8, 2), 512: (64, 64, 8, 1)},
}
# With masks and 64 features, smaller tiles leave out more hidden scores, and more programs fit on a multiprocessor. For
# windows of 256 both kernels take 9% to 22% less time; see 2026-11-29-fuse-short-ranges in benchmarks/results/runs.
# Without masks, the forward kernel would take 24% longer.
_MASKED: dict[Kind, dict[int, tuple[int, int, int, int]]] = {
    **_PLAIN,
    "forward": {**_PLAIN["forward"], 64: (64, 64, 4, 2)},
    "columns": {**_PLAIN["columns"], 64: (32, 64, 4, 3)},
}
_BIASED: dict[Kind, dict[int, tuple[int, int, int, int]]] = {
    "forward": {64: (128, 32, 4, 3), 128: (128, 32, 4, 3), 256: (128, 32, 8, 3), 512: (64, 64, 8, 2)},
    "rows": {64: (64, 32, 4, 3), 128: (64, 32, 4, 3), 256: (64, 32, 8, 2), 512: (64, 32, 8, 2)},
    "columns": {64: (32, 64, 4, 3), 128: (32, 64, 4, 3), 256: (32, 64, 8, 2), 512: (16, 64, 8, 2)},
    "pairs": _PLAIN["pairs"],
    "diagonals": _PLAIN["diagonals"],
}

# For regions with many per-query and per-key numbers, which occupy registers beside the scores. Compiled only, not
# timed: with the tiles above, kernels with 24 such numbers spilled hundreds of bytes per thread in the loop.
_MANY_LINES = 8
_LINED: dict[Kind, tuple[int, int, int, int]] = {
    "forward": (64, 32, 4, 3), "rows": (64, 16, 4, 3), "columns": (16, 64, 4, 2), "pairs": (64, 32, 4, 3),
    "diagonals": (32, 32, 4, 3),
}  # fmt: skip

# For regions with a sum over features, whose tiles occupy registers beside those of scores. With 64 features, larger
# and smaller tiles took as long or longer on an H100, and eight warps took longer backward. With more than 128
# features, the gradients need the registers of eight warps.
_SUMMED = (64, 64, 4, 2)
_SUMMED_BACKWARD: dict[int, tuple[int, int, int, int]] = {128: (64, 32, 4, 2), 512: (64, 32, 8, 2)}


def config_of(region: Region, kind: Kind) -> Config:
    """Return the tile size and compile options of a kernel."""
    if kind == "extras":
        # A thread has a row. No tile has keys.
        return Config(_fitting(region, 128, 16), 4, 1)
    features = max((_size(region, leaf.features) for leaf in region.leaves), default=0)
    values = _size(region, value_columns(region))
    operands = [leaf for leaf in region.leaves if leaf.role in ("query", "key")]
    has_many = sum(leaf.role in ("row", "column") for leaf in region.leaves) > _MANY_LINES
    has_sum = any(node.kind == "sum" for node in nodes_of(region.score, region.weight))
    if any(leaf.source.dtype.itemsize == 4 for leaf in operands) or region.value.dtype.itemsize == 4:
        # Float32 products do not use tensor cores, so larger tiles do not pay.
        rows, columns, warps, stages = 32, 32, 8 if has_many and kind == "columns" else 4, 2
        if has_sum and kind != "forward":
            columns, warps = 16, 8
    elif has_sum:
        backward = next(_SUMMED_BACKWARD[wide] for wide in _SUMMED_BACKWARD if features <= wide)
        rows, columns, warps, stages = _SUMMED if kind == "forward" else backward
    elif has_many and max(features, values) <= 128:
        rows, columns, warps, stages = _LINED[kind]
    else:
        has_bias = any(leaf.role in ("score", "distance") for leaf in region.leaves)
        table = (_BIASED if has_bias else _MASKED if region.once(has_masks) else _PLAIN)[kind]
        width = 512 if min(features, values) > 128 else max(features, values)
        rows, columns, warps, stages = table[next(wide for wide in table if width <= wide)]
        if kind == "forward" and not has_bias and features <= 64 < values <= 128:
            warps, stages = 4, 4
    tile = _fitting(region, rows, columns)
    if kind == "diagonals":
        tile = Tile(*[min(tile.rows, tile.columns)] * 2)
    return Config(tile, warps, stages)


def _fitting(region: Region, rows: int, columns: int) -> Tile:
    """Return a tile that is no larger than the padded score matrix."""
    size = {axis: max(16, next_power_of_2(region.sizes[axis])) for axis in ("q", "k")}
    if is_eight_bit(region.value.dtype):
        # Products of eight-bit operands sum at least 32 elements.
        size["k"] = max(32, size["k"])
    return Tile(min(rows, size["q"]), min(columns, size["k"]))


def shared_bytes(region: Region, kind: Kind, config: Config) -> tuple[int, int]:
    """Return estimates of a kernel's shared memory in bytes: the fixed part, and the part per stage."""
    # Arrays of eight bits count as if they had 16, because other operands may have these.
    width = max(2, region.value.dtype.itemsize)
    features = sum(_padded(region, leaf.features) for leaf in region.leaves if leaf.role == "query")
    keys = sum(_padded(region, leaf.features) for leaf in region.leaves if leaf.role == "key")
    values = _padded(region, value_columns(region))
    bias = sum(leaf.source.dtype.itemsize for leaf in region.leaves if leaf.role in ("score", "distance"))
    rows, columns = config.tile.rows, config.tile.columns
    per_row, per_column = features * width, (keys + values) * width
    if kind != "forward":
        per_row += values * width
    scores = rows * columns
    match kind:
        case "columns":
            return columns * per_column + 2 * scores * width, rows * per_row + bias * scores
        case "extras":
            return 0, 0
        case "pairs" | "diagonals":
            return scores * width, rows * per_row + columns * per_column
    return rows * per_row + scores * width, columns * per_column + bias * scores


def _padded(region: Region, labels: Sequence[str]) -> int:
    return next_power_of_2(max(16, _size(region, labels)))


def _size(region: Region, labels: Sequence[str]) -> int:
    return math.prod(region.sizes[label] for label in labels)


def widest(region: Region) -> int:
    """Return the larger of the value columns and the features of any leaf."""
    return max(_size(region, line) for line in (value_columns(region), *(leaf.features for leaf in region.leaves)))
