"""Tile sizes, and the kinds of kernels of a region."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["forward", "rows", "columns", "pairs", "diagonals", "extras"]
"""The output of a kernel: results, or gradients by rows, by columns, by pairs of these, or by distance.

Those of "extras" belong to logits without values.
"""


@dataclass(frozen=True)
class Tile:
    """The numbers of rows and columns of a tile of scores."""

    rows: int
    columns: int
