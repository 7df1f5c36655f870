"""The static description of a call of key convolution, shared by every implementation.

It imports neither jax nor torch.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from blockdiag.common.operation import Operation
from blockdiag.common.sizes import is_symbolic
from blockdiag.common.tile_counts import count_offset_tiles, count_uniform_tiles

Activation = Literal["silu"]

MAX_SIZE = 8
_MOST_TILE_ROWS = 128
_FEWEST_TILE_ROWS = 16


KEY_CONVOLUTION = Operation("key_convolution", "blockdiag.ops.key_convolution", ("reference", "xla", "triton"))


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyConvolutionProblem:
    """One call over a flattened token axis: key [tokens, K, H], weights [groups, size, K, H].

    Attributes:
        tokens: rows of the flattened token axis, every batch row and mapped axis included.
        key_heads, head_dim: K and H. Channels are independent, so that kernels see K * H of them.
        size: taps of the convolution, 1..8.
        groups: number of equal parts of the token axis and the tiles, each with its own weights; more than one only in
            mapped calls.
        dtype: dtype name of key, output and the key's gradient.
        weights_dtype: dtype name of the weights and their gradient: that of the key, or "float32".
        activation: function applied to the weighted sum; None for the identity.
        has_residual: whether the key itself is added.
        sequence_length: tokens of each sequence if all sequences are equally long, back to back, and there is no tile
            table. None if a tile table int32 [num_tiles, 3] says where sequences lie (see `common.packing`).
        tile_rows: maximum rows of a tile; at least `size - 1`, so that a tap reaches no further than the adjacent tile.
        num_tiles: number of tiles that the launch covers; rows of the tile table if there is one.
    """

    operation: ClassVar[Operation] = KEY_CONVOLUTION

    tokens: int
    key_heads: int
    head_dim: int
    size: int
    groups: int
    dtype: str
    weights_dtype: str
    activation: Activation | None
    has_residual: bool
    sequence_length: int | None
    tile_rows: int
    num_tiles: int

    @property
    def is_empty(self) -> bool:
        """True if there are no tokens to compute anything from."""
        return self.tokens == 0

    @property
    def channels(self) -> int:
        """Elements of a token's key, K * H."""
        return self.key_heads * self.head_dim

    @property
    def is_uniform(self) -> bool:
        """True if sequences are equally long, so that no tile table is needed."""
        return self.sequence_length is not None


def count_tiles(tokens: int, length: int, num_sequences: int | None) -> tuple[int, int]:
    """Return the rows of a tile and the number of tiles, both from shapes alone.

    Args:
        tokens: rows of the token axis.
        length: tokens of each sequence of a uniform call.
        num_sequences: number of sequences of a packed call; None for a uniform one.
    """
    if num_sequences is None:
        rows = _tile_rows(length)
        return rows, count_uniform_tiles(tokens, length, rows)
    # Tiles are sized for sequences of mean length.
    rows = _tile_rows(tokens // max(num_sequences, 1))
    return rows, count_offset_tiles(tokens, num_sequences, rows)


def _tile_rows(length: int) -> int:
    """Return the smallest power of two that holds a sequence of `length` tokens, within limits."""
    if is_symbolic(length):
        return _MOST_TILE_ROWS
    return max(_FEWEST_TILE_ROWS, min(_MOST_TILE_ROWS, 1 << max(length - 1, 0).bit_length()))
