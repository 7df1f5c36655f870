"""Groups of arguments of the kernels of key convolution.

Arrays and scalars are groups of run-time arguments; a plan fills them by the names of their fields. The frozen
dataclasses are compile-time values.
"""

from dataclasses import dataclass
from typing import NamedTuple

from blockdiag.triton_kernels.launch.plan import Argument


class ForwardArrays(NamedTuple):
    """The arrays of the forward pass. `tiles` is None if all sequences have one length."""

    key: Argument
    weights: Argument
    tiles: Argument
    output: Argument


class BackwardArrays(NamedTuple):
    """The arrays of the backward pass. `tiles` is None if all sequences have one length.

    `partials` are each tile's parts of the weights' gradient.
    """

    key: Argument
    weights: Argument
    output_cotangent: Argument
    tiles: Argument
    d_key: Argument
    partials: Argument


class ForwardScalars(NamedTuple):
    """The run-time scalars of the forward pass.

    Attributes:
        sequence_length: tokens of every sequence; ignored with a table of tiles.
        tiles_per_group: tiles that have the same weights.
    """

    sequence_length: Argument
    tiles_per_group: Argument


class BackwardScalars(NamedTuple):
    """The run-time scalars of the backward pass; see `ForwardScalars`."""

    sequence_length: Argument
    num_tiles: Argument
    tiles_per_group: Argument


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Sizes and options of a call.

    Attributes:
        channels: elements of a token's key, of all heads.
        size: taps of the convolution.
        has_tiles: whether a table gives the tiles; otherwise all sequences have one length.
        has_silu: whether the weighted sums pass through SiLU.
        has_residual: whether the key is added.
    """

    channels: int
    size: int
    has_tiles: bool
    has_silu: bool
    has_residual: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """Tiles of the kernels.

    Attributes:
        rows: tokens of a tile.
        run: tokens that one thread computes.
        width: channels that one program computes.
    """

    rows: int
    run: int
    width: int
