"""Backward pass of block-diagonal attention in one kernel.

It needs only query, key, value and the output's cotangent. The weights are recomputed from the single key tile, and
rowsum(P * dP) replaces rowsum(O * dO). So neither the output nor a log-sum-exp is a residual. Nothing is accumulated
through memory, and P and dP stay in f32 until dS is formed.
"""

# Device code is laid out by hand: one argument per line would hide what a kernel does.
# fmt: off

import triton
import triton.language as tl

from blockdiag.triton_kernels.block_diagonal.arguments import BackwardScalars, Tables
from blockdiag.triton_kernels.block_diagonal.operands import load_operand, load_rotary, store_operand
from blockdiag.triton_kernels.parts.tiles import paired_scores, rotate, rotate_adjoint, score_mask, tile_span


@triton.jit
def sum_over_rows(b_sum, b_weights, b_rows, GROUP: tl.constexpr, TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr):
    """Return weights^T rows, accumulated in `b_sum` over a group of query heads. A group of one does not accumulate.

    TRANSPOSED computes rows^T weights and transposes the result. On Blackwell [128, 64] takes half the tensor memory of
    [64, 128], and all three gradients must fit beside the scores.
    """
    if TRANSPOSED:
        b_sum = tl.trans(tl.dot(tl.trans(b_rows), b_weights, input_precision=PRECISION))
    elif GROUP == 1:
        b_sum = tl.dot(tl.trans(b_weights), b_rows, input_precision=PRECISION)
    else:
        b_sum = tl.dot(tl.trans(b_weights), b_rows, acc=b_sum, input_precision=PRECISION)
    return b_sum


@triton.jit
def sum_over_columns(b_weights, b_rows, TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr):
    """Return weights rows. TRANSPOSED is as in `sum_over_rows`."""
    if TRANSPOSED:
        b_sum = tl.trans(tl.dot(tl.trans(b_rows), tl.trans(b_weights), input_precision=PRECISION))
    else:
        b_sum = tl.dot(b_weights, b_rows, input_precision=PRECISION)
    return b_sum


@triton.jit
def block_diagonal_backward(query, key, value, output_cotangent, tables: Tables, d_query, d_key, d_value, num_units,
                            scalars: BackwardScalars, SHAPE: tl.constexpr, ROTARY: tl.constexpr, TILE: tl.constexpr):
    """Compute the gradients of units; a unit is one key head of one tile with all its query heads.

    Units and their query heads form one flat loop, because Triton prefetches only across iterations of the innermost
    loop, and the prefetch keeps memory busy. dK and dV stay in registers over a unit's query heads.

    SHAPE is a Shape, ROTARY a Rotary, TILE a Tile.
    """
    ROWS: tl.constexpr = TILE.rows
    GROUP: tl.constexpr = SHAPE.group_size
    PRECISION: tl.constexpr = TILE.precision
    if SHAPE.is_packed:
        key = query
        value = query
        d_key = d_query
        d_value = d_query
    ROTATES: tl.constexpr = ROTARY.rotates_query or ROTARY.rotates_key or ROTARY.rotates_value
    TRANSPOSED: tl.constexpr = TILE.warp_specialize and GROUP == 1
    HALF_COLUMNS: tl.constexpr = TILE.columns // 2
    QK_COLUMNS: tl.constexpr = HALF_COLUMNS if TILE.is_paired else TILE.columns
    V_COLUMNS: tl.constexpr = HALF_COLUMNS if TILE.is_value_paired else TILE.columns
    first_unit = tl.program_id(0)
    num_programs = tl.num_programs(0)
    num_items = tl.cdiv(tl.maximum(num_units - first_unit, 0), num_programs) * GROUP
    b_dk0 = tl.zeros([ROWS, QK_COLUMNS], tl.float32)
    b_dk1 = b_dk0
    b_dv0 = tl.zeros([ROWS, V_COLUMNS], tl.float32)
    b_dv1 = b_dv0
    for item in tl.range(0, num_items, num_stages=TILE.loop_stages, warp_specialize=TILE.warp_specialize):
        unit = first_unit + item // GROUP * num_programs
        member = item % GROUP
        tile = unit // SHAPE.key_heads
        key_head = unit % SHAPE.key_heads
        k_head = SHAPE.first_key + key_head
        v_head = SHAPE.first_value + key_head
        head = key_head * GROUP + member
        start, rows, written, position = tile_span(tables.tiles, tile, scalars.sequence_length, TILE.block_size,
                                                   SHAPE.has_tiles, TILE.is_full)

        b_q0, b_q1 = load_operand(query, start, rows, head, SHAPE.query_row, SHAPE, ROTARY, TILE, TILE.is_paired)
        b_k0, b_k1 = load_operand(key, start, rows, k_head, SHAPE.key_row, SHAPE, ROTARY, TILE, TILE.is_paired)
        b_v0, b_v1 = load_operand(value, start, rows, v_head, SHAPE.key_row, SHAPE, ROTARY, TILE, TILE.is_value_paired)
        b_do0, b_do1 = load_operand(output_cotangent, start, rows, head, SHAPE.query_heads, SHAPE, ROTARY, TILE,
                                    TILE.is_value_paired)
        dtype: tl.constexpr = b_q0.dtype
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
        b_p = tl.exp2(b_scores - tl.max(b_scores, 1)[:, None])
        b_p = b_p / tl.sum(b_p, 1)[:, None]
        b_dp = paired_scores(b_do0, b_do1, b_v0, b_v1, TILE.is_value_paired, PRECISION)  # [ROWS, ROWS]
        b_ds = (b_p * (b_dp - tl.sum(b_p * b_dp, 1)[:, None]) * scalars.scale).to(dtype)
        b_p = b_p.to(dtype)

        # Rows beyond the tile's end are zero in q and do, so they add nothing to dk and dv.
        b_dv0 = sum_over_rows(b_dv0, b_p, b_do0, GROUP, TRANSPOSED, PRECISION)
        if TILE.is_value_paired:
            b_dv1 = sum_over_rows(b_dv1, b_p, b_do1, GROUP, TRANSPOSED, PRECISION)
        b_dq0 = sum_over_columns(b_ds, b_k0, TRANSPOSED, PRECISION)
        b_dq1 = b_dq0
        if TILE.is_paired:
            b_dq1 = sum_over_columns(b_ds, b_k1, TRANSPOSED, PRECISION)
        if ROTARY.rotates_query:
            b_dq0, b_dq1 = rotate_adjoint(b_dq0, b_dq1, b_cos, b_sin)
        store_operand(d_query, b_dq0.to(dtype), b_dq1.to(dtype), start, written, head, SHAPE.query_row, SHAPE, ROTARY,
                      TILE, TILE.is_paired)
        b_dk0 = sum_over_rows(b_dk0, b_ds, b_q0, GROUP, TRANSPOSED, PRECISION)
        if TILE.is_paired:
            b_dk1 = sum_over_rows(b_dk1, b_ds, b_q1, GROUP, TRANSPOSED, PRECISION)

        if GROUP == 1 or member == GROUP - 1:
            if ROTARY.rotates_value:
                b_dv0, b_dv1 = rotate_adjoint(b_dv0, b_dv1, b_cos, b_sin)
            store_operand(d_value, b_dv0.to(dtype), b_dv1.to(dtype), start, written, v_head, SHAPE.key_row, SHAPE,
                          ROTARY, TILE, TILE.is_value_paired)
            if ROTARY.rotates_key:
                b_dk0, b_dk1 = rotate_adjoint(b_dk0, b_dk1, b_cos, b_sin)
            store_operand(d_key, b_dk0.to(dtype), b_dk1.to(dtype), start, written, k_head, SHAPE.key_row, SHAPE, ROTARY,
                          TILE, TILE.is_paired)
            b_dk0 = tl.zeros([ROWS, QK_COLUMNS], tl.float32)
            b_dk1 = b_dk0
            b_dv0 = tl.zeros([ROWS, V_COLUMNS], tl.float32)
            b_dv1 = b_dv0
