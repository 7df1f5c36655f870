"""The static description of a call of block-diagonal attention, shared by every implementation.

A problem holds everything about a call that is known before the values of its arrays: sizes, dtypes and options, as
plain hashable data. Public functions build it, `supports` functions check it, and kernels and launch plans are
functions of it. This module imports neither jax nor torch, so that device code may use it without them.
"""

from dataclasses import dataclass
from typing import ClassVar

from blockdiag.common.operation import Operation
from blockdiag.common.rotary_problem import RotaryProblem

MOST_TILE_ROWS = 256
"""Maximum rows of a block whose scores are one tile. The scores of longer blocks are computed tile by tile."""


BLOCK_DIAGONAL = Operation(
    "block_diagonal_attention", "blockdiag.ops.block_diagonal", ("reference", "xla", "triton", "pallas")
)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockDiagonalProblem:
    """One block-diagonal attention call over a flattened token axis.

    query is [tokens, query_heads, head_dim]; key and value are [tokens, key_heads, head_dim].

    Attributes:
        tokens: rows of the flattened token axis, including all batch rows and mapped axes.
        block_size: maximum rows of a block, and so of a tile of the tile table.
        sequence_length: tokens of each sequence if all sequences are equally long, back to back, and there is no tile
            table. None if a tile table int32 [num_tiles, 3] says where the blocks lie.
        num_tiles: number of tiles that the launch covers; rows of the tile table if there is one.
        dtype: dtype name of query, key, value, output and gradients: "bfloat16", "float16", "float32" or "float64".
            Kernels do not support "float64".
        scale: factor on the scores, before the softmax.
        is_packed: whether one array [tokens, N + 2K, H] holds query, key and value, in this order along its heads, and
            another array their gradients. The call's key and value are then None.
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
        """True if there are no tokens to compute anything from."""
        return self.tokens == 0

    @property
    def group_size(self) -> int:
        """Query heads that share one key head, G = N // K."""
        return self.query_heads // self.key_heads

    @property
    def is_long(self) -> bool:
        """True if blocks may be longer than one tile of scores."""
        return self.block_size > MOST_TILE_ROWS

    @property
    def packed_heads(self) -> int:
        """Number of heads of a packed array of query, key and value, N + 2K."""
        return self.query_heads + 2 * self.key_heads

    @property
    def is_uniform(self) -> bool:
        """True if sequences are equally long, so that no tile table is needed."""
        return self.sequence_length is not None

    @property
    def is_full(self) -> bool:
        """True if every tile is known to have exactly `block_size` rows."""
        return self.sequence_length is not None and self.sequence_length % self.block_size == 0
