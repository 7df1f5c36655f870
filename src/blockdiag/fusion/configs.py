"""Which tiles the generated kernels use, and Triton's options for them."""

import math
from dataclasses import dataclass

from blockdiag.fusion.kernels import Kind, Tile
from blockdiag.fusion.tiles import value_columns
from blockdiag.fusion.tree import Region
from blockdiag.triton_kernels.block_diagonal_configs import next_power_of_2


@dataclass(frozen=True)
class Config:
    """A tile of scores, and options of Triton's compiler."""

    tile: Tile
    num_warps: int
    num_stages: int


def config_of(region: Region, kind: Kind) -> Config:
    """What two products of tiles and their operands leave room for."""
    is_forward = kind == "forward"
    wide = widest(region)
    is_single = any(leaf.source.dtype.itemsize == 4 and leaf.role in ("query", "key") for leaf in region.leaves)
    rows = min(
        32 if is_single else 128 if is_forward and wide <= 128 else 64, max(16, next_power_of_2(region.sizes["q"]))
    )
    columns = min(32 if is_single else 64 if wide <= 128 else 32, max(16, next_power_of_2(region.sizes["k"])))
    if rows == columns:
        # Axes of tiles are told apart by their sizes.
        columns = columns * 2 if columns < 64 else columns // 2
    return Config(Tile(rows, columns), 8 if rows == 128 and wide > 64 else 4, 3 if is_forward else 2)


def widest(region: Region) -> int:
    """The most columns of values, or features of a query or a key."""
    lines = [value_columns(region), *(leaf.features for leaf in region.leaves)]
    return max(math.prod(region.sizes[label] for label in line) for line in lines)
