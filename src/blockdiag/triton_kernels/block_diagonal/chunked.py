"""Block-diagonal attention in chunks of rows, for blocks, heads or dtypes that are too large for one tile.

The forward pass is flash attention within a block. The backward pass has two kernels. The first one recomputes each
row's log-sum-exp and rowsum(P * dP) and computes dQ; the second one computes dK and dV. Nothing is accumulated through
memory, so results are repeatable.
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
    store_operand,
    tile_span,
)


@triton.jit
def load_chunk(source, p_cos, p_sin, p_positions, start, rows, position, offset, head, table_rows,
               HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr,
               PAIRED: tl.constexpr, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr, POSITIONS: tl.constexpr):
    """Load rows [offset, offset + CHUNK) of a block's operand, rotated if ROTATED. Rows past the block's end are 0."""
    chunk_rows = tl.minimum(tl.maximum(rows - offset, 0), CHUNK)
    b_first, b_second = load_operand(source, start + offset, chunk_rows, head, HEADS, HEAD_DIM, CHUNK, COLUMNS, False,
                                     False, PAIRED, INTERLEAVED)
    if ROTATED:
        b_cos, b_sin = load_rotary(p_cos, p_sin, p_positions, start + offset, chunk_rows, position + offset, table_rows,
                                   HEAD_DIM // 2, CHUNK, COLUMNS // 2, POSITIONS)
        b_first, b_second = rotate(b_first, b_second, b_cos, b_sin)
    return b_first, b_second


@triton.jit
def store_chunk(target, b_first, b_second, p_cos, p_sin, p_positions, start, rows, written, position, offset, head,
                table_rows, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr,
                PAIRED: tl.constexpr, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr, POSITIONS: tl.constexpr):
    """Store f32 rows [offset, offset + CHUNK) of a block's gradient, rotated back if the operand was ROTATED."""
    if ROTATED:
        chunk_rows = tl.minimum(tl.maximum(rows - offset, 0), CHUNK)
        b_cos, b_sin = load_rotary(p_cos, p_sin, p_positions, start + offset, chunk_rows, position + offset, table_rows,
                                   HEAD_DIM // 2, CHUNK, COLUMNS // 2, POSITIONS)
        b_first, b_second = rotate_adjoint(b_first, b_second, b_cos, b_sin)
    dtype: tl.constexpr = target.dtype.element_ty
    store_operand(target, b_first.to(dtype), b_second.to(dtype), start + offset, written - offset, head, HEADS,
                  HEAD_DIM, CHUNK, COLUMNS, False, False, PAIRED, INTERLEAVED)


@triton.jit
def chunk_mask(query_offset, key_offset, rows, CHUNK: tl.constexpr, CAUSAL: tl.constexpr, KEY_ROWS: tl.constexpr):
    """Return the mask of (query, key) pairs that attend in two chunks. KEY_ROWS puts the keys along the rows."""
    o_chunk = tl.arange(0, CHUNK)
    if KEY_ROWS:
        o_query = query_offset + o_chunk[None, :]
        o_key = key_offset + o_chunk[:, None]
    else:
        o_query = query_offset + o_chunk[:, None]
        o_key = key_offset + o_chunk[None, :]
    m_scores = (o_key < rows) & (o_query < rows)
    if CAUSAL:
        m_scores = m_scores & (o_key <= o_query)
    return m_scores


@triton.jit
def key_chunks(query_offset, rows, CHUNK: tl.constexpr, CAUSAL: tl.constexpr):
    """Return how many key chunks the query chunk at `query_offset` sees; 0 past the block's end."""
    visible = rows
    if CAUSAL:
        visible = tl.minimum(rows, query_offset + CHUNK)
    return tl.where(query_offset < rows, tl.cdiv(visible, CHUNK), 0)


@triton.jit
def block_diagonal_chunked_forward(
    query, key, value, p_tiles, p_cos, p_sin, p_positions, output,
    sequence_length, scale_log2, table_rows,
    QUERY_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, COLUMNS: tl.constexpr, TABLE: tl.constexpr, CAUSAL: tl.constexpr,
    ROTATE_QUERY: tl.constexpr, ROTATE_KEY: tl.constexpr, ROTATE_VALUE: tl.constexpr, INTERLEAVED: tl.constexpr,
    POSITIONS: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):
    """Compute the output of one chunk of query rows of one head of one block per program."""
    # In packed calls one array [tokens, N + 2K, H] holds query, key and value, and another one their gradients, so that
    # a projection needs no copies around the attention.
    QUERY_ROW: tl.constexpr = QUERY_HEADS + 2 * KEY_HEADS if PACKED else QUERY_HEADS
    KEY_ROW: tl.constexpr = QUERY_HEADS + 2 * KEY_HEADS if PACKED else KEY_HEADS
    KEY_FIRST: tl.constexpr = QUERY_HEADS if PACKED else 0
    VALUE_FIRST: tl.constexpr = QUERY_HEADS + KEY_HEADS if PACKED else 0
    if PACKED:
        key = query
        value = query
    PAIRED: tl.constexpr = ROTATE_QUERY or ROTATE_KEY
    VALUE_COLUMNS: tl.constexpr = COLUMNS // 2 if ROTATE_VALUE else COLUMNS
    program = tl.program_id(0)
    head = program % QUERY_HEADS
    offset = program // QUERY_HEADS % CHUNKS * CHUNK
    key_head = head // (QUERY_HEADS // KEY_HEADS)
    k_head = KEY_FIRST + key_head
    v_head = VALUE_FIRST + key_head
    start, rows, written, position = tile_span(p_tiles, program // QUERY_HEADS // CHUNKS, sequence_length, BLOCK_SIZE,
                                               TABLE, False)
    b_q0, b_q1 = load_chunk(query, p_cos, p_sin, p_positions, start, rows, position, offset, head, table_rows,
                            QUERY_ROW, HEAD_DIM, CHUNK, COLUMNS, PAIRED, ROTATE_QUERY, INTERLEAVED, POSITIONS)
    b_max = tl.full([CHUNK], float("-inf"), tl.float32)
    b_sum = tl.zeros([CHUNK], tl.float32)
    b_o0 = tl.zeros([CHUNK, VALUE_COLUMNS], tl.float32)
    b_o1 = b_o0
    for step in tl.range(0, key_chunks(offset, rows, CHUNK, CAUSAL)):
        b_k0, b_k1 = load_chunk(key, p_cos, p_sin, p_positions, start, rows, position, step * CHUNK, k_head,
                                table_rows, KEY_ROW, HEAD_DIM, CHUNK, COLUMNS, PAIRED, ROTATE_KEY, INTERLEAVED,
                                POSITIONS)
        b_v0, b_v1 = load_chunk(value, p_cos, p_sin, p_positions, start, rows, position, step * CHUNK, v_head,
                                table_rows, KEY_ROW, HEAD_DIM, CHUNK, COLUMNS, ROTATE_VALUE, ROTATE_VALUE,
                                INTERLEAVED, POSITIONS)
        b_scores = paired_scores(b_q0, b_q1, b_k0, b_k1, PAIRED, PRECISION) * scale_log2  # [CHUNK, CHUNK]
        b_scores = tl.where(chunk_mask(offset, step * CHUNK, rows, CHUNK, CAUSAL, False), b_scores, float("-inf"))
        b_new_max = tl.maximum(b_max, tl.max(b_scores, 1))
        # Rows past the block's end have seen no key. They subtract 0, because (-inf) - (-inf) would be NaN.
        b_shift = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
        b_p = tl.exp2(b_scores - b_shift[:, None])
        b_decay = tl.exp2(b_max - b_shift)
        b_sum = b_sum * b_decay + tl.sum(b_p, 1)
        b_p = b_p.to(b_v0.dtype)
        b_o0 = tl.dot(b_p, b_v0, acc=b_o0 * b_decay[:, None], input_precision=PRECISION)
        if ROTATE_VALUE:
            b_o1 = tl.dot(b_p, b_v1, acc=b_o1 * b_decay[:, None], input_precision=PRECISION)
        b_max = b_new_max
    b_norm = 1.0 / tl.where(b_sum == 0.0, 1.0, b_sum)[:, None]
    store_chunk(output, b_o0 * b_norm, b_o1 * b_norm, p_cos, p_sin, p_positions, start, rows, written, position, offset,
                head, table_rows, QUERY_HEADS, HEAD_DIM, CHUNK, COLUMNS, ROTATE_VALUE, False, INTERLEAVED, POSITIONS)


@triton.jit
def block_diagonal_chunked_query_gradient(
    query, key, value, output_cotangent, p_tiles, p_cos, p_sin, p_positions, d_query, p_log_sum, p_delta,
    sequence_length, scale, scale_log2, table_rows,
    QUERY_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, COLUMNS: tl.constexpr, TABLE: tl.constexpr, CAUSAL: tl.constexpr,
    ROTATE_QUERY: tl.constexpr, ROTATE_KEY: tl.constexpr, ROTATE_VALUE: tl.constexpr, INTERLEAVED: tl.constexpr,
    POSITIONS: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):
    """Compute dQ of one chunk of query rows, their base-2 log-sum-exp and rowsum(P * dP), f32 [tokens, QUERY_HEADS].

    The loop over keys runs twice, because the first dS needs the complete rowsum(P * dP). The cheaper rowsum(O * dO) is
    not available, because the output is no residual.
    """
    # In packed calls one array [tokens, N + 2K, H] holds query, key and value, and another one their gradients, so that
    # a projection needs no copies around the attention.
    QUERY_ROW: tl.constexpr = QUERY_HEADS + 2 * KEY_HEADS if PACKED else QUERY_HEADS
    KEY_ROW: tl.constexpr = QUERY_HEADS + 2 * KEY_HEADS if PACKED else KEY_HEADS
    KEY_FIRST: tl.constexpr = QUERY_HEADS if PACKED else 0
    VALUE_FIRST: tl.constexpr = QUERY_HEADS + KEY_HEADS if PACKED else 0
    if PACKED:
        key = query
        value = query
    PAIRED: tl.constexpr = ROTATE_QUERY or ROTATE_KEY
    QUERY_COLUMNS: tl.constexpr = COLUMNS // 2 if PAIRED else COLUMNS
    program = tl.program_id(0)
    head = program % QUERY_HEADS
    offset = program // QUERY_HEADS % CHUNKS * CHUNK
    key_head = head // (QUERY_HEADS // KEY_HEADS)
    k_head = KEY_FIRST + key_head
    v_head = VALUE_FIRST + key_head
    start, rows, written, position = tile_span(p_tiles, program // QUERY_HEADS // CHUNKS, sequence_length, BLOCK_SIZE,
                                               TABLE, False)
    b_q0, b_q1 = load_chunk(query, p_cos, p_sin, p_positions, start, rows, position, offset, head, table_rows,
                            QUERY_ROW, HEAD_DIM, CHUNK, COLUMNS, PAIRED, ROTATE_QUERY, INTERLEAVED, POSITIONS)
    b_do0, b_do1 = load_chunk(output_cotangent, p_cos, p_sin, p_positions, start, rows, position, offset, head,
                              table_rows, QUERY_HEADS, HEAD_DIM, CHUNK, COLUMNS, ROTATE_VALUE, False, INTERLEAVED,
                              POSITIONS)
    steps = key_chunks(offset, rows, CHUNK, CAUSAL)
    b_max = tl.full([CHUNK], float("-inf"), tl.float32)
    b_sum = tl.zeros([CHUNK], tl.float32)
    b_delta = tl.zeros([CHUNK], tl.float32)
    for step in tl.range(0, steps):
        b_k0, b_k1 = load_chunk(key, p_cos, p_sin, p_positions, start, rows, position, step * CHUNK, k_head,
                                table_rows, KEY_ROW, HEAD_DIM, CHUNK, COLUMNS, PAIRED, ROTATE_KEY, INTERLEAVED,
                                POSITIONS)
        b_v0, b_v1 = load_chunk(value, p_cos, p_sin, p_positions, start, rows, position, step * CHUNK, v_head,
                                table_rows, KEY_ROW, HEAD_DIM, CHUNK, COLUMNS, ROTATE_VALUE, ROTATE_VALUE,
                                INTERLEAVED, POSITIONS)
        m_scores = chunk_mask(offset, step * CHUNK, rows, CHUNK, CAUSAL, False)
        b_scores = paired_scores(b_q0, b_q1, b_k0, b_k1, PAIRED, PRECISION) * scale_log2  # [CHUNK, CHUNK]
        b_scores = tl.where(m_scores, b_scores, float("-inf"))
        b_dp = paired_scores(b_do0, b_do1, b_v0, b_v1, ROTATE_VALUE, PRECISION)  # [CHUNK, CHUNK]
        b_new_max = tl.maximum(b_max, tl.max(b_scores, 1))
        b_shift = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
        b_p = tl.exp2(b_scores - b_shift[:, None])
        b_decay = tl.exp2(b_max - b_shift)
        b_sum = b_sum * b_decay + tl.sum(b_p, 1)
        b_delta = b_delta * b_decay + tl.sum(b_p * b_dp, 1)
        b_max = b_new_max
    b_sum = tl.where(b_sum == 0.0, 1.0, b_sum)
    b_delta = b_delta / b_sum
    b_log_sum = tl.where(b_max == float("-inf"), 0.0, b_max) + tl.log2(b_sum)
    o_rows = offset + tl.arange(0, CHUNK)
    o_statistics = (start.to(tl.int64) + o_rows) * QUERY_HEADS + head
    tl.store(p_log_sum + o_statistics, b_log_sum, mask=o_rows < written)
    tl.store(p_delta + o_statistics, b_delta, mask=o_rows < written)

    b_dq0 = tl.zeros([CHUNK, QUERY_COLUMNS], tl.float32)
    b_dq1 = b_dq0
    for step in tl.range(0, steps):
        b_k0, b_k1 = load_chunk(key, p_cos, p_sin, p_positions, start, rows, position, step * CHUNK, k_head,
                                table_rows, KEY_ROW, HEAD_DIM, CHUNK, COLUMNS, PAIRED, ROTATE_KEY, INTERLEAVED,
                                POSITIONS)
        b_v0, b_v1 = load_chunk(value, p_cos, p_sin, p_positions, start, rows, position, step * CHUNK, v_head,
                                table_rows, KEY_ROW, HEAD_DIM, CHUNK, COLUMNS, ROTATE_VALUE, ROTATE_VALUE,
                                INTERLEAVED, POSITIONS)
        b_scores = paired_scores(b_q0, b_q1, b_k0, b_k1, PAIRED, PRECISION) * scale_log2
        b_p = tl.exp2(b_scores - b_log_sum[:, None])
        b_p = tl.where(chunk_mask(offset, step * CHUNK, rows, CHUNK, CAUSAL, False), b_p, 0.0)
        b_dp = paired_scores(b_do0, b_do1, b_v0, b_v1, ROTATE_VALUE, PRECISION)
        b_ds = (b_p * (b_dp - b_delta[:, None]) * scale).to(b_q0.dtype)
        b_dq0 = tl.dot(b_ds, b_k0, acc=b_dq0, input_precision=PRECISION)
        if PAIRED:
            b_dq1 = tl.dot(b_ds, b_k1, acc=b_dq1, input_precision=PRECISION)
    store_chunk(d_query, b_dq0, b_dq1, p_cos, p_sin, p_positions, start, rows, written, position, offset, head,
                table_rows, QUERY_ROW, HEAD_DIM, CHUNK, COLUMNS, PAIRED, ROTATE_QUERY, INTERLEAVED, POSITIONS)


@triton.jit
def block_diagonal_chunked_key_gradient(
    query, key, value, output_cotangent, p_log_sum, p_delta, p_tiles, p_cos, p_sin, p_positions, d_key, d_value,
    sequence_length, scale, scale_log2, table_rows,
    QUERY_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, COLUMNS: tl.constexpr, TABLE: tl.constexpr, CAUSAL: tl.constexpr,
    ROTATE_QUERY: tl.constexpr, ROTATE_KEY: tl.constexpr, ROTATE_VALUE: tl.constexpr, INTERLEAVED: tl.constexpr,
    POSITIONS: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):
    """Compute dK and dV of one chunk of key rows, summed over query heads and query chunks in one flat loop."""
    # In packed calls one array [tokens, N + 2K, H] holds query, key and value, and another one their gradients, so that
    # a projection needs no copies around the attention.
    QUERY_ROW: tl.constexpr = QUERY_HEADS + 2 * KEY_HEADS if PACKED else QUERY_HEADS
    KEY_ROW: tl.constexpr = QUERY_HEADS + 2 * KEY_HEADS if PACKED else KEY_HEADS
    KEY_FIRST: tl.constexpr = QUERY_HEADS if PACKED else 0
    VALUE_FIRST: tl.constexpr = QUERY_HEADS + KEY_HEADS if PACKED else 0
    if PACKED:
        key = query
        value = query
        d_value = d_key
    GROUP: tl.constexpr = QUERY_HEADS // KEY_HEADS
    PAIRED: tl.constexpr = ROTATE_QUERY or ROTATE_KEY
    KEY_COLUMNS: tl.constexpr = COLUMNS // 2 if PAIRED else COLUMNS
    VALUE_COLUMNS: tl.constexpr = COLUMNS // 2 if ROTATE_VALUE else COLUMNS
    program = tl.program_id(0)
    key_head = program % KEY_HEADS
    k_head = KEY_FIRST + key_head
    v_head = VALUE_FIRST + key_head
    offset = program // KEY_HEADS % CHUNKS * CHUNK
    start, rows, written, position = tile_span(p_tiles, program // KEY_HEADS // CHUNKS, sequence_length, BLOCK_SIZE,
                                               TABLE, False)
    b_k0, b_k1 = load_chunk(key, p_cos, p_sin, p_positions, start, rows, position, offset, k_head, table_rows,
                            KEY_ROW, HEAD_DIM, CHUNK, COLUMNS, PAIRED, ROTATE_KEY, INTERLEAVED, POSITIONS)
    b_v0, b_v1 = load_chunk(value, p_cos, p_sin, p_positions, start, rows, position, offset, v_head, table_rows,
                            KEY_ROW, HEAD_DIM, CHUNK, COLUMNS, ROTATE_VALUE, ROTATE_VALUE, INTERLEAVED, POSITIONS)
    first = 0
    if CAUSAL:
        first = offset // CHUNK
    # A chunk past the block's end has no queries, so its gradient is 0.
    chunks = tl.where(offset < rows, tl.cdiv(rows, CHUNK) - first, 0)
    b_dk0 = tl.zeros([CHUNK, KEY_COLUMNS], tl.float32)
    b_dk1 = b_dk0
    b_dv0 = tl.zeros([CHUNK, VALUE_COLUMNS], tl.float32)
    b_dv1 = b_dv0
    for step in tl.range(0, chunks * GROUP):
        head = key_head * GROUP + step // chunks
        query_offset = (first + step % chunks) * CHUNK
        b_q0, b_q1 = load_chunk(query, p_cos, p_sin, p_positions, start, rows, position, query_offset, head, table_rows,
                                QUERY_ROW, HEAD_DIM, CHUNK, COLUMNS, PAIRED, ROTATE_QUERY, INTERLEAVED, POSITIONS)
        b_do0, b_do1 = load_chunk(output_cotangent, p_cos, p_sin, p_positions, start, rows, position, query_offset,
                                  head, table_rows, QUERY_HEADS, HEAD_DIM, CHUNK, COLUMNS, ROTATE_VALUE, False,
                                  INTERLEAVED, POSITIONS)
        o_rows = query_offset + tl.arange(0, CHUNK)
        o_statistics = (start.to(tl.int64) + o_rows) * QUERY_HEADS + head
        b_log_sum = tl.load(p_log_sum + o_statistics, mask=o_rows < rows, other=0.0)
        b_delta = tl.load(p_delta + o_statistics, mask=o_rows < rows, other=0.0)
        # With keys along the rows, P^T and dS^T are the left operands of dV and dK without a transposition.
        b_scores = paired_scores(b_k0, b_k1, b_q0, b_q1, PAIRED, PRECISION) * scale_log2  # [CHUNK keys, CHUNK queries]
        b_pt = tl.exp2(b_scores - b_log_sum[None, :])
        b_pt = tl.where(chunk_mask(query_offset, offset, rows, CHUNK, CAUSAL, True), b_pt, 0.0)
        b_dpt = paired_scores(b_v0, b_v1, b_do0, b_do1, ROTATE_VALUE, PRECISION)
        b_dst = (b_pt * (b_dpt - b_delta[None, :]) * scale).to(b_q0.dtype)
        b_pt = b_pt.to(b_q0.dtype)
        b_dv0 = tl.dot(b_pt, b_do0, acc=b_dv0, input_precision=PRECISION)
        if ROTATE_VALUE:
            b_dv1 = tl.dot(b_pt, b_do1, acc=b_dv1, input_precision=PRECISION)
        b_dk0 = tl.dot(b_dst, b_q0, acc=b_dk0, input_precision=PRECISION)
        if PAIRED:
            b_dk1 = tl.dot(b_dst, b_q1, acc=b_dk1, input_precision=PRECISION)
    store_chunk(d_key, b_dk0, b_dk1, p_cos, p_sin, p_positions, start, rows, written, position, offset, k_head,
                table_rows, KEY_ROW, HEAD_DIM, CHUNK, COLUMNS, PAIRED, ROTATE_KEY, INTERLEAVED, POSITIONS)
    store_chunk(d_value, b_dv0, b_dv1, p_cos, p_sin, p_positions, start, rows, written, position, offset, v_head,
                table_rows, KEY_ROW, HEAD_DIM, CHUNK, COLUMNS, ROTATE_VALUE, ROTATE_VALUE, INTERLEAVED, POSITIONS)
