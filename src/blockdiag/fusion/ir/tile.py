"""Tiles of scores, and the kernels that compute them."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["forward", "rows", "columns", "pairs", "diagonals"]
"""What a kernel of a region computes: results, or gradients by rows, by columns, by pairs of them or by distance."""


@dataclass(frozen=True)
class Tile:
    """Rows and columns of a tile of scores."""

    rows: int
    columns: int
