"""Forward pass of block-diagonal attention: one key tile per query tile, so one softmax and no running statistics."""

# Device code is laid out by hand: one argument per line would hide what a kernel does.
# fmt: off

import triton
import triton.language as tl

from blockdiag.triton_kernels.parts.tiles import (
    load_operand,
    load_rotary,
    paired_scores,
    rotate,
    score_mask,
    store_operand,
    tile_span,
)


@triton.jit
def block_diagonal_forward(
    query, key, value, p_tiles, p_cos, p_sin, p_positions, output,
    num_items, sequence_length, scale_log2, table_rows,
    QUERY_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, FULL: tl.constexpr, TABLE: tl.constexpr, CAUSAL: tl.constexpr,
    ROTATE_QUERY: tl.constexpr, ROTATE_KEY: tl.constexpr, ROTATE_VALUE: tl.constexpr, INTERLEAVED: tl.constexpr,
    POSITIONS: tl.constexpr, PACKED: tl.constexpr, PAIRED: tl.constexpr, PAIRED_VALUE: tl.constexpr,
    PRECISION: tl.constexpr, DESCRIPTORS: tl.constexpr, WARP_SPECIALIZE: tl.constexpr, LOOP_STAGES: tl.constexpr,
):
    """One item is one query head of one tile; heads of a tile are neighbours: rotary rows and shared K/V stay in L2."""
    GROUP: tl.constexpr = QUERY_HEADS // KEY_HEADS
    # One array [tokens, N + 2K, H] may hold query, key and value, or their gradients, so that a projection needs no
    # copies around the attention.
    QUERY_ROW: tl.constexpr = QUERY_HEADS + 2 * KEY_HEADS if PACKED else QUERY_HEADS
    KEY_ROW: tl.constexpr = QUERY_HEADS + 2 * KEY_HEADS if PACKED else KEY_HEADS
    KEY_FIRST: tl.constexpr = QUERY_HEADS if PACKED else 0
    VALUE_FIRST: tl.constexpr = QUERY_HEADS + KEY_HEADS if PACKED else 0
    if PACKED:
        key = query
        value = query
    ROTARY: tl.constexpr = ROTATE_QUERY or ROTATE_KEY or ROTATE_VALUE
    STORE_DESCRIPTOR: tl.constexpr = DESCRIPTORS and FULL
    for item in tl.range(tl.program_id(0), num_items, tl.num_programs(0), num_stages=LOOP_STAGES,
                         warp_specialize=WARP_SPECIALIZE):
        tile = item // QUERY_HEADS
        head = item % QUERY_HEADS
        key_head = head // GROUP
        k_head = KEY_FIRST + key_head
        v_head = VALUE_FIRST + key_head
        start, rows, written, position = tile_span(p_tiles, tile, sequence_length, BLOCK_SIZE, TABLE, FULL)

        b_q0, b_q1 = load_operand(query, start, rows, head, QUERY_ROW, HEAD_DIM, ROWS, COLUMNS, FULL, DESCRIPTORS,
                                  PAIRED, INTERLEAVED)
        b_k0, b_k1 = load_operand(key, start, rows, k_head, KEY_ROW, HEAD_DIM, ROWS, COLUMNS, FULL, DESCRIPTORS,
                                  PAIRED, INTERLEAVED)
        b_v0, b_v1 = load_operand(value, start, rows, v_head, KEY_ROW, HEAD_DIM, ROWS, COLUMNS, FULL, DESCRIPTORS,
                                  PAIRED_VALUE, INTERLEAVED)
        if ROTARY:
            b_cos, b_sin = load_rotary(p_cos, p_sin, p_positions, start, rows, position, table_rows, HEAD_DIM // 2,
                                       ROWS, COLUMNS // 2, POSITIONS)
            if ROTATE_QUERY:
                b_q0, b_q1 = rotate(b_q0, b_q1, b_cos, b_sin)
            if ROTATE_KEY:
                b_k0, b_k1 = rotate(b_k0, b_k1, b_cos, b_sin)
            if ROTATE_VALUE:
                b_v0, b_v1 = rotate(b_v0, b_v1, b_cos, b_sin)

        b_scores = paired_scores(b_q0, b_q1, b_k0, b_k1, PAIRED, PRECISION) * scale_log2  # [ROWS, ROWS]
        if CAUSAL or not FULL:
            b_scores = tl.where(score_mask(rows, ROWS, FULL, CAUSAL), b_scores, float("-inf"))
        b_weights = tl.exp2(b_scores - tl.max(b_scores, 1)[:, None])
        # Rounding the weights before they are normalised and dividing the f32 product halves the largest error: the
        # largest weight of a row is then exactly 1.
        b_norm = (1.0 / tl.sum(b_weights, 1))[:, None]
        b_weights = b_weights.to(b_v0.dtype)

        b_o0 = (tl.dot(b_weights, b_v0, input_precision=PRECISION) * b_norm).to(b_v0.dtype)
        b_o1 = b_o0
        if PAIRED_VALUE:
            b_o1 = (tl.dot(b_weights, b_v1, input_precision=PRECISION) * b_norm).to(b_v0.dtype)
        store_operand(output, b_o0, b_o1, start, written, head, QUERY_HEADS, HEAD_DIM, ROWS, COLUMNS, FULL,
                      STORE_DESCRIPTOR, PAIRED_VALUE, INTERLEAVED)
