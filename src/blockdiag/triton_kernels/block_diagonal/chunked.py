"""Block-diagonal attention in chunks of rows, for blocks, heads or dtypes that are too large for one tile.

The forward pass is flash attention within a block. The backward pass has two kernels. The first one recomputes each
row's log-sum-exp and rowsum(P * dP) and computes dQ; the second one computes dK and dV. Nothing is accumulated through
memory, so results are repeatable.
"""

# Device code is laid out by hand: one argument per line would hide what a kernel does.
# fmt: off

import triton
import triton.language as tl

from blockdiag.triton_kernels.block_diagonal.arguments import BackwardScalars, ForwardScalars, Tables
from blockdiag.triton_kernels.block_diagonal.operands import load_operand, load_rotary, store_operand
from blockdiag.triton_kernels.parts.tiles import paired_scores, rotate, rotate_adjoint, tile_span


@triton.jit
def load_chunk(source, tables, span, offset, head, table_rows, ROW_HEADS: tl.constexpr, SHAPE: tl.constexpr,
               ROTARY: tl.constexpr, TILE: tl.constexpr, PAIRED: tl.constexpr, ROTATED: tl.constexpr):
    """Load a chunk of a block's operand from row `offset` on, rotated if ROTATED. Rows past the block's end are 0.

    `span` is the block's (first row, rows, rows to write, position), as `tile_span` returns it.
    """
    start, rows, _, position = span
    CHUNK: tl.constexpr = TILE.rows
    chunk_rows = tl.minimum(tl.maximum(rows - offset, 0), CHUNK)
    b_first, b_second = load_operand(source, start + offset, chunk_rows, head, ROW_HEADS, SHAPE, ROTARY, TILE, PAIRED)
    if ROTATED:
        b_cos, b_sin = load_rotary(tables, start + offset, chunk_rows, position + offset, table_rows, SHAPE, ROTARY,
                                   TILE)
        b_first, b_second = rotate(b_first, b_second, b_cos, b_sin)
    return b_first, b_second


@triton.jit
def store_chunk(target, b_first, b_second, tables, span, offset, head, table_rows, ROW_HEADS: tl.constexpr,
                SHAPE: tl.constexpr, ROTARY: tl.constexpr, TILE: tl.constexpr, PAIRED: tl.constexpr,
                ROTATED: tl.constexpr):
    """Store f32 rows of a block's gradient from row `offset` on, rotated back if the operand was ROTATED."""
    start, rows, written, position = span
    CHUNK: tl.constexpr = TILE.rows
    if ROTATED:
        chunk_rows = tl.minimum(tl.maximum(rows - offset, 0), CHUNK)
        b_cos, b_sin = load_rotary(tables, start + offset, chunk_rows, position + offset, table_rows, SHAPE, ROTARY,
                                   TILE)
        b_first, b_second = rotate_adjoint(b_first, b_second, b_cos, b_sin)
    dtype: tl.constexpr = target.dtype.element_ty
    store_operand(target, b_first.to(dtype), b_second.to(dtype), start + offset, written - offset, head, ROW_HEADS,
                  SHAPE, ROTARY, TILE, PAIRED)


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
    query, key, value, tables: Tables, output, scalars: ForwardScalars,
    SHAPE: tl.constexpr, ROTARY: tl.constexpr, TILE: tl.constexpr,
):
    """Compute the output of one chunk of query rows of one head of one block per program.

    SHAPE is a Shape, ROTARY a Rotary, TILE a Chunk.
    """
    if SHAPE.is_packed:
        key = query
        value = query
    CHUNK: tl.constexpr = TILE.rows
    PRECISION: tl.constexpr = TILE.precision
    VALUE_COLUMNS: tl.constexpr = TILE.columns // 2 if TILE.is_value_paired else TILE.columns
    program = tl.program_id(0)
    head = program % SHAPE.query_heads
    offset = program // SHAPE.query_heads % TILE.chunks * CHUNK
    key_head = head // SHAPE.group_size
    k_head = SHAPE.first_key + key_head
    v_head = SHAPE.first_value + key_head
    span = tile_span(tables.tiles, program // SHAPE.query_heads // TILE.chunks, scalars.sequence_length,
                     TILE.block_size, SHAPE.has_tiles, False)
    _, rows, _, _ = span
    b_q0, b_q1 = load_chunk(query, tables, span, offset, head, scalars.table_rows, SHAPE.query_row, SHAPE, ROTARY, TILE,
                            TILE.is_paired, ROTARY.rotates_query)
    b_max = tl.full([CHUNK], float("-inf"), tl.float32)
    b_sum = tl.zeros([CHUNK], tl.float32)
    b_o0 = tl.zeros([CHUNK, VALUE_COLUMNS], tl.float32)
    b_o1 = b_o0
    for step in tl.range(0, key_chunks(offset, rows, CHUNK, SHAPE.is_causal)):
        b_k0, b_k1 = load_chunk(key, tables, span, step * CHUNK, k_head, scalars.table_rows, SHAPE.key_row, SHAPE,
                                ROTARY, TILE, TILE.is_paired, ROTARY.rotates_key)
        b_v0, b_v1 = load_chunk(value, tables, span, step * CHUNK, v_head, scalars.table_rows, SHAPE.key_row, SHAPE,
                                ROTARY, TILE, TILE.is_value_paired, ROTARY.rotates_value)
        # [CHUNK, CHUNK]
        b_scores = paired_scores(b_q0, b_q1, b_k0, b_k1, TILE.is_paired, PRECISION) * scalars.scale_log2
        b_scores = tl.where(chunk_mask(offset, step * CHUNK, rows, CHUNK, SHAPE.is_causal, False), b_scores,
                            float("-inf"))
        b_new_max = tl.maximum(b_max, tl.max(b_scores, 1))
        # Rows past the block's end have seen no key. They subtract 0, because (-inf) - (-inf) would be NaN.
        b_shift = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
        b_p = tl.exp2(b_scores - b_shift[:, None])
        b_decay = tl.exp2(b_max - b_shift)
        b_sum = b_sum * b_decay + tl.sum(b_p, 1)
        b_p = b_p.to(b_v0.dtype)
        b_o0 = tl.dot(b_p, b_v0, acc=b_o0 * b_decay[:, None], input_precision=PRECISION)
        if TILE.is_value_paired:
            b_o1 = tl.dot(b_p, b_v1, acc=b_o1 * b_decay[:, None], input_precision=PRECISION)
        b_max = b_new_max
    b_norm = 1.0 / tl.where(b_sum == 0.0, 1.0, b_sum)[:, None]
    store_chunk(output, b_o0 * b_norm, b_o1 * b_norm, tables, span, offset, head, scalars.table_rows, SHAPE.query_heads,
                SHAPE, ROTARY, TILE, TILE.is_value_paired, False)


@triton.jit
def block_diagonal_chunked_query_gradient(
    query, key, value, output_cotangent, tables: Tables, d_query, p_log_sum, p_delta, scalars: BackwardScalars,
    SHAPE: tl.constexpr, ROTARY: tl.constexpr, TILE: tl.constexpr,
):
    """Compute dQ of one chunk of query rows, their base-2 log-sum-exp and rowsum(P * dP), f32 [tokens, query heads].

    The loop over keys runs twice, because the first dS needs the complete rowsum(P * dP). The cheaper rowsum(O * dO) is
    not available, because the output is no residual.

    SHAPE is a Shape, ROTARY a Rotary, TILE a Chunk.
    """
    if SHAPE.is_packed:
        key = query
        value = query
    CHUNK: tl.constexpr = TILE.rows
    PRECISION: tl.constexpr = TILE.precision
    QUERY_COLUMNS: tl.constexpr = TILE.columns // 2 if TILE.is_paired else TILE.columns
    program = tl.program_id(0)
    head = program % SHAPE.query_heads
    offset = program // SHAPE.query_heads % TILE.chunks * CHUNK
    key_head = head // SHAPE.group_size
    k_head = SHAPE.first_key + key_head
    v_head = SHAPE.first_value + key_head
    span = tile_span(tables.tiles, program // SHAPE.query_heads // TILE.chunks, scalars.sequence_length,
                     TILE.block_size, SHAPE.has_tiles, False)
    start, rows, written, _ = span
    b_q0, b_q1 = load_chunk(query, tables, span, offset, head, scalars.table_rows, SHAPE.query_row, SHAPE, ROTARY, TILE,
                            TILE.is_paired, ROTARY.rotates_query)
    b_do0, b_do1 = load_chunk(output_cotangent, tables, span, offset, head, scalars.table_rows, SHAPE.query_heads,
                              SHAPE, ROTARY, TILE, TILE.is_value_paired, False)
    steps = key_chunks(offset, rows, CHUNK, SHAPE.is_causal)
    b_max = tl.full([CHUNK], float("-inf"), tl.float32)
    b_sum = tl.zeros([CHUNK], tl.float32)
    b_delta = tl.zeros([CHUNK], tl.float32)
    for step in tl.range(0, steps):
        b_k0, b_k1 = load_chunk(key, tables, span, step * CHUNK, k_head, scalars.table_rows, SHAPE.key_row, SHAPE,
                                ROTARY, TILE, TILE.is_paired, ROTARY.rotates_key)
        b_v0, b_v1 = load_chunk(value, tables, span, step * CHUNK, v_head, scalars.table_rows, SHAPE.key_row, SHAPE,
                                ROTARY, TILE, TILE.is_value_paired, ROTARY.rotates_value)
        m_scores = chunk_mask(offset, step * CHUNK, rows, CHUNK, SHAPE.is_causal, False)
        # [CHUNK, CHUNK]
        b_scores = paired_scores(b_q0, b_q1, b_k0, b_k1, TILE.is_paired, PRECISION) * scalars.scale_log2
        b_scores = tl.where(m_scores, b_scores, float("-inf"))
        b_dp = paired_scores(b_do0, b_do1, b_v0, b_v1, TILE.is_value_paired, PRECISION)  # [CHUNK, CHUNK]
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
    o_statistics = (start.to(tl.int64) + o_rows) * SHAPE.query_heads + head
    tl.store(p_log_sum + o_statistics, b_log_sum, mask=o_rows < written)
    tl.store(p_delta + o_statistics, b_delta, mask=o_rows < written)

    b_dq0 = tl.zeros([CHUNK, QUERY_COLUMNS], tl.float32)
    b_dq1 = b_dq0
    for step in tl.range(0, steps):
        b_k0, b_k1 = load_chunk(key, tables, span, step * CHUNK, k_head, scalars.table_rows, SHAPE.key_row, SHAPE,
                                ROTARY, TILE, TILE.is_paired, ROTARY.rotates_key)
        b_v0, b_v1 = load_chunk(value, tables, span, step * CHUNK, v_head, scalars.table_rows, SHAPE.key_row, SHAPE,
                                ROTARY, TILE, TILE.is_value_paired, ROTARY.rotates_value)
        b_scores = paired_scores(b_q0, b_q1, b_k0, b_k1, TILE.is_paired, PRECISION) * scalars.scale_log2
        b_p = tl.exp2(b_scores - b_log_sum[:, None])
        b_p = tl.where(chunk_mask(offset, step * CHUNK, rows, CHUNK, SHAPE.is_causal, False), b_p, 0.0)
        b_dp = paired_scores(b_do0, b_do1, b_v0, b_v1, TILE.is_value_paired, PRECISION)
        b_ds = (b_p * (b_dp - b_delta[:, None]) * scalars.scale).to(b_q0.dtype)
        b_dq0 = tl.dot(b_ds, b_k0, acc=b_dq0, input_precision=PRECISION)
        if TILE.is_paired:
            b_dq1 = tl.dot(b_ds, b_k1, acc=b_dq1, input_precision=PRECISION)
    store_chunk(d_query, b_dq0, b_dq1, tables, span, offset, head, scalars.table_rows, SHAPE.query_row, SHAPE, ROTARY,
                TILE, TILE.is_paired, ROTARY.rotates_query)


@triton.jit
def block_diagonal_chunked_key_gradient(
    query, key, value, output_cotangent, p_log_sum, p_delta, tables: Tables, d_key, d_value,
    scalars: BackwardScalars, SHAPE: tl.constexpr, ROTARY: tl.constexpr, TILE: tl.constexpr,
):
    """Compute dK and dV of one chunk of key rows, summed over query heads and query chunks in one flat loop.

    SHAPE is a Shape, ROTARY a Rotary, TILE a Chunk.
    """
    if SHAPE.is_packed:
        key = query
        value = query
        d_value = d_key
    GROUP: tl.constexpr = SHAPE.group_size
    CHUNK: tl.constexpr = TILE.rows
    PRECISION: tl.constexpr = TILE.precision
    KEY_COLUMNS: tl.constexpr = TILE.columns // 2 if TILE.is_paired else TILE.columns
    VALUE_COLUMNS: tl.constexpr = TILE.columns // 2 if TILE.is_value_paired else TILE.columns
    program = tl.program_id(0)
    key_head = program % SHAPE.key_heads
    k_head = SHAPE.first_key + key_head
    v_head = SHAPE.first_value + key_head
    offset = program // SHAPE.key_heads % TILE.chunks * CHUNK
    span = tile_span(tables.tiles, program // SHAPE.key_heads // TILE.chunks, scalars.sequence_length, TILE.block_size,
                     SHAPE.has_tiles, False)
    start, rows, _, _ = span
    b_k0, b_k1 = load_chunk(key, tables, span, offset, k_head, scalars.table_rows, SHAPE.key_row, SHAPE, ROTARY, TILE,
                            TILE.is_paired, ROTARY.rotates_key)
    b_v0, b_v1 = load_chunk(value, tables, span, offset, v_head, scalars.table_rows, SHAPE.key_row, SHAPE, ROTARY, TILE,
                            TILE.is_value_paired, ROTARY.rotates_value)
    first = 0
    if SHAPE.is_causal:
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
        b_q0, b_q1 = load_chunk(query, tables, span, query_offset, head, scalars.table_rows, SHAPE.query_row, SHAPE,
                                ROTARY, TILE, TILE.is_paired, ROTARY.rotates_query)
        b_do0, b_do1 = load_chunk(output_cotangent, tables, span, query_offset, head, scalars.table_rows,
                                  SHAPE.query_heads, SHAPE, ROTARY, TILE, TILE.is_value_paired, False)
        o_rows = query_offset + tl.arange(0, CHUNK)
        o_statistics = (start.to(tl.int64) + o_rows) * SHAPE.query_heads + head
        b_log_sum = tl.load(p_log_sum + o_statistics, mask=o_rows < rows, other=0.0)
        b_delta = tl.load(p_delta + o_statistics, mask=o_rows < rows, other=0.0)
        # With keys along the rows, P^T and dS^T are the left operands of dV and dK without a transposition.
        # [CHUNK keys, CHUNK queries]
        b_scores = paired_scores(b_k0, b_k1, b_q0, b_q1, TILE.is_paired, PRECISION) * scalars.scale_log2
        b_pt = tl.exp2(b_scores - b_log_sum[None, :])
        b_pt = tl.where(chunk_mask(query_offset, offset, rows, CHUNK, SHAPE.is_causal, True), b_pt, 0.0)
        b_dpt = paired_scores(b_v0, b_v1, b_do0, b_do1, TILE.is_value_paired, PRECISION)
        b_dst = (b_pt * (b_dpt - b_delta[None, :]) * scalars.scale).to(b_q0.dtype)
        b_pt = b_pt.to(b_q0.dtype)
        b_dv0 = tl.dot(b_pt, b_do0, acc=b_dv0, input_precision=PRECISION)
        if TILE.is_value_paired:
            b_dv1 = tl.dot(b_pt, b_do1, acc=b_dv1, input_precision=PRECISION)
        b_dk0 = tl.dot(b_dst, b_q0, acc=b_dk0, input_precision=PRECISION)
        if TILE.is_paired:
            b_dk1 = tl.dot(b_dst, b_q1, acc=b_dk1, input_precision=PRECISION)
    store_chunk(d_key, b_dk0, b_dk1, tables, span, offset, k_head, scalars.table_rows, SHAPE.key_row, SHAPE, ROTARY,
                TILE, TILE.is_paired, ROTARY.rotates_key)
    store_chunk(d_value, b_dv0, b_dv1, tables, span, offset, v_head, scalars.table_rows, SHAPE.key_row, SHAPE, ROTARY,
                TILE, TILE.is_value_paired, ROTARY.rotates_value)
