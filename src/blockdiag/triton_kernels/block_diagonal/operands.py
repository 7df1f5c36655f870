"""Device helpers of block-diagonal attention that load and store one head of a tile.

SHAPE is a Shape, ROTARY a Rotary, and TILE a Tile or a Chunk. An operand of a rotated product is paired, see
`parts.tiles`.
"""

# Device code is laid out by hand: one argument per line would hide what a kernel does.
# fmt: off

import triton
import triton.language as tl

from blockdiag.triton_kernels.parts.tiles import load_block, store_block


@triton.jit
def load_operand(source, start, rows, head, ROW_HEADS: tl.constexpr, SHAPE: tl.constexpr, ROTARY: tl.constexpr,
                 TILE: tl.constexpr, PAIRED: tl.constexpr):
    """Load a tile of one head of [tokens, ROW_HEADS, head_dim].

    Returns the first and second elements of its pairs if PAIRED, otherwise the whole block twice.
    """
    HEAD_DIM: tl.constexpr = SHAPE.head_dim
    HALF: tl.constexpr = HEAD_DIM // 2
    STRIDE: tl.constexpr = ROW_HEADS * HEAD_DIM
    ROWS: tl.constexpr = TILE.rows
    COLUMNS: tl.constexpr = TILE.columns
    FULL: tl.constexpr = TILE.is_full
    DESCRIPTOR: tl.constexpr = TILE.has_descriptors
    if PAIRED and not ROTARY.is_interleaved:
        b_first = load_block(source, start, rows, head * HEAD_DIM, STRIDE, HALF, ROWS, COLUMNS // 2, FULL, DESCRIPTOR)
        b_second = load_block(source, start, rows, head * HEAD_DIM + HALF, STRIDE, HALF, ROWS, COLUMNS // 2, FULL,
                              DESCRIPTOR)
    else:
        b_first = load_block(source, start, rows, head * HEAD_DIM, STRIDE, HEAD_DIM, ROWS, COLUMNS, FULL, DESCRIPTOR)
        b_second = b_first
        if PAIRED:
            b_first, b_second = tl.split(tl.reshape(b_first, [ROWS, COLUMNS // 2, 2]))
    return b_first, b_second


@triton.jit
def store_operand(target, b_first, b_second, start, written, head, ROW_HEADS: tl.constexpr, SHAPE: tl.constexpr,
                  ROTARY: tl.constexpr, TILE: tl.constexpr, PAIRED: tl.constexpr):
    """Inverse of `load_operand`. TMA stores full tiles only."""
    HEAD_DIM: tl.constexpr = SHAPE.head_dim
    HALF: tl.constexpr = HEAD_DIM // 2
    STRIDE: tl.constexpr = ROW_HEADS * HEAD_DIM
    ROWS: tl.constexpr = TILE.rows
    COLUMNS: tl.constexpr = TILE.columns
    FULL: tl.constexpr = TILE.is_full
    DESCRIPTOR: tl.constexpr = TILE.has_descriptors and TILE.is_full
    if PAIRED and not ROTARY.is_interleaved:
        store_block(target, b_first, start, written, head * HEAD_DIM, STRIDE, HALF, ROWS, COLUMNS // 2, FULL,
                    DESCRIPTOR)
        store_block(target, b_second, start, written, head * HEAD_DIM + HALF, STRIDE, HALF, ROWS, COLUMNS // 2, FULL,
                    DESCRIPTOR)
    else:
        b_block = b_first
        if PAIRED:
            b_block = tl.reshape(tl.join(b_first, b_second), [ROWS, COLUMNS])
        store_block(target, b_block, start, written, head * HEAD_DIM, STRIDE, HEAD_DIM, ROWS, COLUMNS, FULL, DESCRIPTOR)


@triton.jit
def load_rotary(tables, start, rows, position, table_rows, SHAPE: tl.constexpr, ROTARY: tl.constexpr,
                TILE: tl.constexpr):
    """Return f32 cos and sin of a tile's rows. Out-of-range rows are clamped: traced positions cannot be checked."""
    HALF: tl.constexpr = SHAPE.head_dim // 2
    o_rows = tl.arange(0, TILE.rows)
    m_rows = o_rows < rows
    if ROTARY.positions == 1:
        o_table = tl.load(tables.positions + start + o_rows, mask=m_rows, other=0)
    elif ROTARY.positions == 2:
        o_table = start + o_rows
    else:
        o_table = position + o_rows
    o_table = tl.minimum(tl.maximum(o_table, 0), table_rows - 1).to(tl.int64)[:, None] * HALF
    o_columns = tl.arange(0, TILE.columns // 2)[None, :]
    m_table = m_rows[:, None] & (o_columns < HALF)
    b_cos = tl.load(tables.cos + o_table + o_columns, mask=m_table, other=0.0).to(tl.float32)
    b_sin = tl.load(tables.sin + o_table + o_columns, mask=m_table, other=0.0).to(tl.float32)
    return b_cos, b_sin  # [rows, columns / 2]
