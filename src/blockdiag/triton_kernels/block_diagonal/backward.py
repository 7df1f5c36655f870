"""Backward pass of block-diagonal attention in one kernel.

It needs only query, key, value and the output's cotangent. The weights are recomputed from the single key tile, and
rowsum(P * dP) replaces rowsum(O * dO). So neither the output nor a log-sum-exp is a residual. Nothing is accumulated
through memory, and P and dP stay in f32 until dS is formed.
"""

# Device code is laid out by hand: one argument per line would hide what a kernel does.
# fmt: off

import triton
import triton.language as tl

from blockdiag.triton_kernels.parts.tiles import (
    load_operand,
    load_rotary,
    paired_scores,
    rotate,
    rotate_adjoint,
    score_mask,
    store_operand,
    tile_span,
)


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
def block_diagonal_backward(
    query, key, value, output_cotangent, p_tiles, p_cos, p_sin, p_positions, d_query, d_key, d_value,
    num_units, sequence_length, scale, scale_log2, table_rows,
    QUERY_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, FULL: tl.constexpr, TABLE: tl.constexpr, CAUSAL: tl.constexpr,
    ROTATE_QUERY: tl.constexpr, ROTATE_KEY: tl.constexpr, ROTATE_VALUE: tl.constexpr, INTERLEAVED: tl.constexpr,
    POSITIONS: tl.constexpr, PACKED: tl.constexpr, PAIRED: tl.constexpr, PAIRED_VALUE: tl.constexpr,
    PRECISION: tl.constexpr, DESCRIPTORS: tl.constexpr, WARP_SPECIALIZE: tl.constexpr, LOOP_STAGES: tl.constexpr,
):
    """Compute the gradients of units; a unit is one key head of one tile with all its query heads.

    Units and their query heads form one flat loop, because Triton prefetches only across iterations of the innermost
    loop, and the prefetch keeps memory busy. dK and dV stay in registers over a unit's query heads.
    """
    GROUP: tl.constexpr = QUERY_HEADS // KEY_HEADS
    # In packed calls one array [tokens, N + 2K, H] holds query, key and value, and another one their gradients, so that
    # a projection needs no copies around the attention.
    QUERY_ROW: tl.constexpr = QUERY_HEADS + 2 * KEY_HEADS if PACKED else QUERY_HEADS
    KEY_ROW: tl.constexpr = QUERY_HEADS + 2 * KEY_HEADS if PACKED else KEY_HEADS
    KEY_FIRST: tl.constexpr = QUERY_HEADS if PACKED else 0
    VALUE_FIRST: tl.constexpr = QUERY_HEADS + KEY_HEADS if PACKED else 0
    if PACKED:
        key = query
        value = query
        d_key = d_query
        d_value = d_query
    ROTARY: tl.constexpr = ROTATE_QUERY or ROTATE_KEY or ROTATE_VALUE
    STORE_DESCRIPTOR: tl.constexpr = DESCRIPTORS and FULL
    TRANSPOSED: tl.constexpr = WARP_SPECIALIZE and GROUP == 1
    HALF_COLUMNS: tl.constexpr = COLUMNS // 2
    QK_COLUMNS: tl.constexpr = HALF_COLUMNS if PAIRED else COLUMNS
    V_COLUMNS: tl.constexpr = HALF_COLUMNS if PAIRED_VALUE else COLUMNS
    first_unit = tl.program_id(0)
    num_programs = tl.num_programs(0)
    num_items = tl.cdiv(tl.maximum(num_units - first_unit, 0), num_programs) * GROUP
    b_dk0 = tl.zeros([ROWS, QK_COLUMNS], tl.float32)
    b_dk1 = b_dk0
    b_dv0 = tl.zeros([ROWS, V_COLUMNS], tl.float32)
    b_dv1 = b_dv0
    for item in tl.range(0, num_items, num_stages=LOOP_STAGES, warp_specialize=WARP_SPECIALIZE):
        unit = first_unit + item // GROUP * num_programs
        member = item % GROUP
        tile = unit // KEY_HEADS
        key_head = unit % KEY_HEADS
        k_head = KEY_FIRST + key_head
        v_head = VALUE_FIRST + key_head
        head = key_head * GROUP + member
        start, rows, written, position = tile_span(p_tiles, tile, sequence_length, BLOCK_SIZE, TABLE, FULL)

        b_q0, b_q1 = load_operand(query, start, rows, head, QUERY_ROW, HEAD_DIM, ROWS, COLUMNS, FULL, DESCRIPTORS,
                                  PAIRED, INTERLEAVED)
        b_k0, b_k1 = load_operand(key, start, rows, k_head, KEY_ROW, HEAD_DIM, ROWS, COLUMNS, FULL, DESCRIPTORS,
                                  PAIRED, INTERLEAVED)
        b_v0, b_v1 = load_operand(value, start, rows, v_head, KEY_ROW, HEAD_DIM, ROWS, COLUMNS, FULL, DESCRIPTORS,
                                  PAIRED_VALUE, INTERLEAVED)
        b_do0, b_do1 = load_operand(output_cotangent, start, rows, head, QUERY_HEADS, HEAD_DIM, ROWS, COLUMNS, FULL,
                                    DESCRIPTORS, PAIRED_VALUE, INTERLEAVED)
        dtype: tl.constexpr = b_q0.dtype
        if ROTARY:
            b_cos, b_sin = load_rotary(p_cos, p_sin, p_positions, start, rows, position, table_rows, HEAD_DIM // 2,
                                       ROWS, HALF_COLUMNS, POSITIONS)
            if ROTATE_QUERY:
                b_q0, b_q1 = rotate(b_q0, b_q1, b_cos, b_sin)
            if ROTATE_KEY:
                b_k0, b_k1 = rotate(b_k0, b_k1, b_cos, b_sin)
            if ROTATE_VALUE:
                b_v0, b_v1 = rotate(b_v0, b_v1, b_cos, b_sin)

        b_scores = paired_scores(b_q0, b_q1, b_k0, b_k1, PAIRED, PRECISION) * scale_log2  # [ROWS, ROWS]
        if CAUSAL or not FULL:
            b_scores = tl.where(score_mask(rows, ROWS, FULL, CAUSAL), b_scores, float("-inf"))
        b_p = tl.exp2(b_scores - tl.max(b_scores, 1)[:, None])
        b_p = b_p / tl.sum(b_p, 1)[:, None]
        b_dp = paired_scores(b_do0, b_do1, b_v0, b_v1, PAIRED_VALUE, PRECISION)  # [ROWS, ROWS]
        b_ds = (b_p * (b_dp - tl.sum(b_p * b_dp, 1)[:, None]) * scale).to(dtype)
        b_p = b_p.to(dtype)

        # Rows beyond the tile's end are zero in q and do, so they add nothing to dk and dv.
        b_dv0 = sum_over_rows(b_dv0, b_p, b_do0, GROUP, TRANSPOSED, PRECISION)
        if PAIRED_VALUE:
            b_dv1 = sum_over_rows(b_dv1, b_p, b_do1, GROUP, TRANSPOSED, PRECISION)
        b_dq0 = sum_over_columns(b_ds, b_k0, TRANSPOSED, PRECISION)
        b_dq1 = b_dq0
        if PAIRED:
            b_dq1 = sum_over_columns(b_ds, b_k1, TRANSPOSED, PRECISION)
        if ROTATE_QUERY:
            b_dq0, b_dq1 = rotate_adjoint(b_dq0, b_dq1, b_cos, b_sin)
        store_operand(d_query, b_dq0.to(dtype), b_dq1.to(dtype), start, written, head, QUERY_ROW, HEAD_DIM, ROWS,
                      COLUMNS, FULL, STORE_DESCRIPTOR, PAIRED, INTERLEAVED)
        b_dk0 = sum_over_rows(b_dk0, b_ds, b_q0, GROUP, TRANSPOSED, PRECISION)
        if PAIRED:
            b_dk1 = sum_over_rows(b_dk1, b_ds, b_q1, GROUP, TRANSPOSED, PRECISION)

        if GROUP == 1 or member == GROUP - 1:
            if ROTATE_VALUE:
                b_dv0, b_dv1 = rotate_adjoint(b_dv0, b_dv1, b_cos, b_sin)
            store_operand(d_value, b_dv0.to(dtype), b_dv1.to(dtype), start, written, v_head, KEY_ROW,
                          HEAD_DIM, ROWS, COLUMNS, FULL, STORE_DESCRIPTOR, PAIRED_VALUE, INTERLEAVED)
            if ROTATE_KEY:
                b_dk0, b_dk1 = rotate_adjoint(b_dk0, b_dk1, b_cos, b_sin)
            store_operand(d_key, b_dk0.to(dtype), b_dk1.to(dtype), start, written, k_head, KEY_ROW,
                          HEAD_DIM, ROWS, COLUMNS, FULL, STORE_DESCRIPTOR, PAIRED, INTERLEAVED)
            b_dk0 = tl.zeros([ROWS, QK_COLUMNS], tl.float32)
            b_dk1 = b_dk0
            b_dv0 = tl.zeros([ROWS, V_COLUMNS], tl.float32)
            b_dv1 = b_dv0
