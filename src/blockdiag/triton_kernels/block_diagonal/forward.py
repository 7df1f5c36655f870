"""Forward pass of block-diagonal attention: one key tile per query tile, so one softmax and no running statistics."""

# Device code is laid out by hand: one argument per line would hide what a kernel does.
# fmt: off

import triton
import triton.language as tl

from blockdiag.triton_kernels.block_diagonal.arguments import ForwardScalars, Tables
from blockdiag.triton_kernels.block_diagonal.operands import load_operand, load_rotary, store_operand
from blockdiag.triton_kernels.parts.tiles import paired_scores, rotate, score_mask, tile_span


@triton.jit
def block_diagonal_forward(query, key, value, tables: Tables, output, num_items, scalars: ForwardScalars,
                           SHAPE: tl.constexpr, ROTARY: tl.constexpr, TILE: tl.constexpr):
    """Compute items: one query head of one tile each. Heads of a tile are neighbours, so shared rows stay in L2.

    SHAPE is a Shape, ROTARY a Rotary, TILE a Tile.
    """
    ROWS: tl.constexpr = TILE.rows
    GROUP: tl.constexpr = SHAPE.group_size
    PRECISION: tl.constexpr = TILE.precision
    if SHAPE.is_packed:
        key = query
        value = query
    ROTATES: tl.constexpr = ROTARY.rotates_query or ROTARY.rotates_key or ROTARY.rotates_value
    for item in tl.range(tl.program_id(0), num_items, tl.num_programs(0), num_stages=TILE.loop_stages,
                         warp_specialize=TILE.warp_specialize):
        tile = item // SHAPE.query_heads
        head = item % SHAPE.query_heads
        key_head = head // GROUP
        k_head = SHAPE.first_key + key_head
        v_head = SHAPE.first_value + key_head
        start, rows, written, position = tile_span(tables.tiles, tile, scalars.sequence_length, TILE.block_size,
                                                   SHAPE.has_tiles, TILE.is_full)

        b_q0, b_q1 = load_operand(query, start, rows, head, SHAPE.query_row, SHAPE, ROTARY, TILE, TILE.is_paired)
        b_k0, b_k1 = load_operand(key, start, rows, k_head, SHAPE.key_row, SHAPE, ROTARY, TILE, TILE.is_paired)
        b_v0, b_v1 = load_operand(value, start, rows, v_head, SHAPE.key_row, SHAPE, ROTARY, TILE, TILE.is_value_paired)
        if ROTATES:
            b_cos, b_sin = load_rotary(tables, start, rows, position, scalars.table_rows, SHAPE, ROTARY, TILE)
            if ROTARY.rotates_query:
                b_q0, b_q1 = rotate(b_q0, b_q1, b_cos, b_sin)
            if ROTARY.rotates_key:
                b_k0, b_k1 = rotate(b_k0, b_k1, b_cos, b_sin)
            if ROTARY.rotates_value:
                b_v0, b_v1 = rotate(b_v0, b_v1, b_cos, b_sin)

        b_scores = paired_scores(b_q0, b_q1, b_k0, b_k1, TILE.is_paired, PRECISION) * scalars.scale_log2  # [ROWS, ROWS]
        if SHAPE.is_causal or not TILE.is_full:
            b_scores = tl.where(score_mask(rows, ROWS, TILE.is_full, SHAPE.is_causal), b_scores, float("-inf"))
        b_weights = tl.exp2(b_scores - tl.max(b_scores, 1)[:, None])
        # Rounding the weights before they are normalised and dividing the f32 product halves the largest error: the
        # largest weight of a row is then exactly 1.
        b_norm = (1.0 / tl.sum(b_weights, 1))[:, None]
        b_weights = b_weights.to(b_v0.dtype)

        b_o0 = (tl.dot(b_weights, b_v0, input_precision=PRECISION) * b_norm).to(b_v0.dtype)
        b_o1 = b_o0
        if TILE.is_value_paired:
            b_o1 = (tl.dot(b_weights, b_v1, input_precision=PRECISION) * b_norm).to(b_v0.dtype)
        store_operand(output, b_o0, b_o1, start, written, head, SHAPE.query_heads, SHAPE, ROTARY, TILE,
                      TILE.is_value_paired)
