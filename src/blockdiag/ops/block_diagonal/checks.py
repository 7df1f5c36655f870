"""Checks of the arguments of block-diagonal attention, and the static description that implementations read.

Arrays may be JAX's or torch's. Only their shapes and dtypes are read, and values of index arrays where they are known.
"""

import math
from typing import Any

from blockdiag.common import validation
from blockdiag.common.arrays import dtype_name
from blockdiag.common.rotary_problem import RotaryProblem
from blockdiag.common.sizes import is_symbolic
from blockdiag.common.tile_counts import count_length_tiles, count_offset_tiles, count_uniform_tiles
from blockdiag.ops.block_diagonal.problem import MOST_TILE_ROWS, BlockDiagonalProblem


def describe_call(
    query: Any,
    key: Any,
    *,
    block_size: int,
    sequence_offsets: Any,
    block_lengths: Any,
    rotary: Any,
    scale: float | None,
    is_causal: bool,
    is_packed: bool = False,
) -> BlockDiagonalProblem:
    """Check all arguments except the operands, and describe the call; reads only shape and dtype of query and key.

    Raises:
        ValueError: an argument is wrong; the message names it, its value and the remedy.
    """
    *tokens_shape, query_heads, head_dim = query.shape
    tokens, length = math.prod(tokens_shape), tokens_shape[-1]
    block_size = validation.check_block_size(block_size)
    longest = validation.check_packing(tokens_shape, block_size, sequence_offsets, block_lengths)
    if rotary is not None:
        validation.check_rotary(rotary, tokens_shape, head_dim, longest)
    is_uniform = sequence_offsets is None and block_lengths is None
    # No block is longer than its sequence. Blocks of up to `MOST_TILE_ROWS` rows are one tile of scores.
    if not is_symbolic(length):
        block_size = min(block_size, max(length, MOST_TILE_ROWS))
    if sequence_offsets is not None:
        num_tiles = count_offset_tiles(tokens, sequence_offsets.shape[0] - 1, block_size)
    elif block_lengths is not None:
        num_tiles = count_length_tiles(tokens, block_lengths.shape[0], block_size)
    else:
        num_tiles = count_uniform_tiles(tokens, length, block_size)
    return BlockDiagonalProblem(
        tokens=tokens,
        query_heads=query_heads,
        key_heads=key.shape[-2],
        head_dim=head_dim,
        dtype=dtype_name(query.dtype),
        block_size=block_size,
        sequence_length=length if is_uniform else None,
        num_tiles=num_tiles,
        is_causal=validation.check_is_causal(is_causal),
        scale=validation.check_scale(scale, head_dim),
        rotary=None if rotary is None else _rotary_problem(rotary, is_uniform),
        is_packed=is_packed,
    )


def _rotary_problem(rotary: Any, is_uniform: bool) -> RotaryProblem:
    if rotary.positions is not None:
        positions = "explicit"
    elif not rotary.per_token or (is_uniform and rotary.cos.ndim == 2):
        # A table with one row per token of a sequence, which all sequences share, is a table by position.
        positions = "sequence"
    else:
        positions = "token"
    return RotaryProblem(
        interleaved=rotary.interleaved,
        query="query" in rotary.apply_to,
        key="key" in rotary.apply_to,
        value="value" in rotary.apply_to,
        table_rows=math.prod(rotary.cos.shape[:-1]),
        table_dtype=dtype_name(rotary.cos.dtype),
        positions=positions,
    )
