"""Static descriptions of a call, shared by every implementation.

A problem is everything about a call that is known before any array element is: sizes, dtypes and options, as plain
hashable data. Public functions build one, `supports` functions judge it, kernels and launch plans are functions of it.
This module imports neither jax nor torch, so that device code may use it without them.
"""

from dataclasses import dataclass
from typing import Literal

from blockdiag.common.sizes import smaller_bound

PositionSource = Literal["sequence", "explicit", "token"]

MOST_TILE_ROWS = 256
"""Rows of the longest blocks whose scores are in one piece: longer ones are computed a tile of them at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RotaryProblem:
    """How rotary embedding is fused into an attention call.

    Attributes:
        interleaved: pairs are (2i, 2i + 1); otherwise (i, i + H/2).
        query, key, value: which operands are rotated.
        table_rows: rows of the cos and sin tables, P in [P, H/2].
        table_dtype: dtype name of both tables.
        positions: where a token's table row comes from: its position within its sequence, an explicit int32 array
            over tokens, or the token's own index in the flattened token axis.
    """

    interleaved: bool
    query: bool
    key: bool
    value: bool
    table_rows: int
    table_dtype: str
    positions: PositionSource


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


def count_uniform_tiles(tokens: int, sequence_length: int, block_size: int) -> int:
    """Tiles of `tokens // sequence_length` equal sequences, back to back."""
    return tokens // max(sequence_length, 1) * -(-sequence_length // block_size)


def count_offset_tiles(tokens: int, num_sequences: int, block_size: int) -> int:
    """Rows of `tiles_from_offsets`: enough for any offsets of `num_sequences` sequences over `tokens` rows."""
    # Rows before the first offset and after the last are two more segments, of padding.
    return _most_tiles(tokens, num_sequences + 2, block_size)


def count_length_tiles(tokens: int, num_blocks: int, block_size: int) -> int:
    """Rows of `tiles_from_lengths`: enough for any lengths of `num_blocks` blocks over `tokens` rows."""
    return _most_tiles(tokens, num_blocks + 1, block_size)


def _most_tiles(tokens: int, segments: int, block_size: int) -> int:
    """The most tiles that `segments` segments, `tokens` rows together, can be cut into."""
    return smaller_bound(tokens, (tokens + segments * (block_size - 1)) // block_size)
