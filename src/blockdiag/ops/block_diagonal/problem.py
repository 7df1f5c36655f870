"""Static descriptions of a call, shared by every implementation.

A problem is everything about a call that is known before any array element is: sizes, dtypes and options, as plain
hashable data. Public functions build one, `supports` functions judge it, kernels and launch plans are functions of it.
This module imports neither jax nor torch, so that device code may use it without them.
"""

from dataclasses import dataclass
from typing import ClassVar

from blockdiag.common.operation import Operation
from blockdiag.common.rotary_problem import RotaryProblem

MOST_TILE_ROWS = 256
"""Rows of the longest blocks whose scores are in one piece: longer ones are computed a tile of them at a time."""


BLOCK_DIAGONAL = Operation(
    "block_diagonal_attention", "blockdiag.ops.block_diagonal", ("reference", "xla", "triton", "pallas")
)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockDiagonalProblem:
    """One block-diagonal attention call over a flattened token axis.

    query is [tokens, query_heads, head_dim]; key and value are [tokens, key_heads, head_dim].

    Attributes:
        tokens: rows of the flattened token axis, every batch row and mapped axis included.
        block_size: the most rows a block (and so a tile of the tile table) has.
        sequence_length: tokens of each sequence when all sequences are equally long, back to back; then no tile table
            is given. None when a tile table int32 [num_tiles, 3] says where the blocks lie.
        num_tiles: tiles the launch covers; rows of the tile table when there is one.
        dtype: dtype name of query, key, value, output and gradients: "bfloat16", "float16", "float32", or "float64",
            which array code alone computes.
        scale: factor on the scores, before the softmax.
        is_packed: whether one array [tokens, N + 2K, H] holds query, key and value, in this order along its heads, and
            another one their gradients; the call's key and value are then None.
    """

    operation: ClassVar[Operation] = BLOCK_DIAGONAL

    tokens: int
    query_heads: int
    key_heads: int
    head_dim: int
    dtype: str
    block_size: int
    sequence_length: int | None
    num_tiles: int
    is_causal: bool
    scale: float
    rotary: RotaryProblem | None = None
    is_packed: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether there are no tokens to compute anything from."""
        return self.tokens == 0

    @property
    def group_size(self) -> int:
        """Query heads that share one key head, G = N // K."""
        return self.query_heads // self.key_heads

    @property
    def is_long(self) -> bool:
        """Whether blocks may be longer than one tile of scores."""
        return self.block_size > MOST_TILE_ROWS

    @property
    def packed_heads(self) -> int:
        """Heads of an array that holds query, key and value, N + 2K."""
        return self.query_heads + 2 * self.key_heads

    @property
    def is_uniform(self) -> bool:
        """Whether tiles follow from arithmetic alone, without a tile table."""
        return self.sequence_length is not None

    @property
    def is_full(self) -> bool:
        """Whether every tile is known to have exactly `block_size` rows."""
        return self.sequence_length is not None and self.sequence_length % self.block_size == 0
