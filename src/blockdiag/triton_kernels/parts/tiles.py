"""Device helpers shared by kernels over tiles of a packed token axis: spans, loads and stores, rotation, scores.

Names: `p_` pointers, `b_` block values, `o_` offsets, `m_` masks. An operand is [tokens, heads, head_dim], row-major,
so one head's rows are `row_stride` = heads * head_dim elements apart.

An operand of a rotated product is *paired*: it is held as two half-width blocks with the first and the second elements
of its rotary pairs. Every product over the head dimension becomes the sum of two half-width products. So neither
pairing (adjacent elements, or the two halves of a head) needs a shuffle between threads.
"""

# Device code is laid out by hand: one argument per line would hide what a kernel does.
# fmt: off

import triton
import triton.language as tl


@triton.jit
def tile_span(p_tiles, tile, sequence_length, BLOCK_SIZE: tl.constexpr, TABLE: tl.constexpr, FULL: tl.constexpr):
    """Return (first row, rows that hold tokens, rows to write, position of the first row in its sequence) of a tile.

    A tile of padding holds no tokens but is written with zeros, so that every output row is written.
    """
    if TABLE:
        start = tl.load(p_tiles + tile * 3)
        length = tl.load(p_tiles + tile * 3 + 1)
        position = tl.load(p_tiles + tile * 3 + 2)
        rows = tl.minimum(tl.maximum(length, 0), BLOCK_SIZE)
        written = tl.minimum(tl.abs(length), BLOCK_SIZE)
    else:
        tiles_per_sequence = tl.cdiv(sequence_length, BLOCK_SIZE)
        sequence = tile // tiles_per_sequence
        position = (tile - sequence * tiles_per_sequence) * BLOCK_SIZE
        start = sequence * sequence_length + position
        rows = tl.full((), BLOCK_SIZE, tl.int32) if FULL else tl.minimum(sequence_length - position, BLOCK_SIZE)
        written = rows
    return start, rows, written, position


@triton.jit
def load_block(source, start, rows, column, ROW_STRIDE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
               COLUMNS: tl.constexpr, FULL: tl.constexpr, DESCRIPTOR: tl.constexpr):
    """Load a [ROWS, COLUMNS] block of which [rows, WIDTH] exist; the rest is zero."""
    o_rows = tl.arange(0, ROWS)[:, None]
    if DESCRIPTOR:
        b_block = source.load([start, column])
        if not FULL:
            # TMA also loads rows of the next sequence. They are zeroed, because 0 * NaN would be NaN in a product.
            b_block = tl.where(o_rows < rows, b_block, 0.0).to(b_block.dtype)
    else:
        o_columns = tl.arange(0, COLUMNS)[None, :]
        p_block = source + start.to(tl.int64) * ROW_STRIDE + column + o_rows * ROW_STRIDE + o_columns
        if FULL and COLUMNS == WIDTH:
            b_block = tl.load(p_block)
        elif COLUMNS == WIDTH:
            b_block = tl.load(p_block, mask=o_rows < rows, other=0.0)
        else:
            b_block = tl.load(p_block, mask=(o_rows < rows) & (o_columns < WIDTH), other=0.0)
    return b_block  # [ROWS, COLUMNS]


@triton.jit
def store_block(target, b_block, start, written, column, ROW_STRIDE: tl.constexpr, WIDTH: tl.constexpr,
                ROWS: tl.constexpr, COLUMNS: tl.constexpr, FULL: tl.constexpr, DESCRIPTOR: tl.constexpr):
    """Store the first [written, WIDTH] of a [ROWS, COLUMNS] block."""
    if DESCRIPTOR:
        target.store([start, column], b_block)
    else:
        o_rows = tl.arange(0, ROWS)[:, None]
        o_columns = tl.arange(0, COLUMNS)[None, :]
        p_block = target + start.to(tl.int64) * ROW_STRIDE + column + o_rows * ROW_STRIDE + o_columns
        if FULL and COLUMNS == WIDTH:
            tl.store(p_block, b_block)
        else:
            tl.store(p_block, b_block, mask=(o_rows < written) & (o_columns < WIDTH))


@triton.jit
def rotate(b_first, b_second, b_cos, b_sin):
    """Apply rotary embedding to a paired operand, rounded back to its dtype."""
    dtype: tl.constexpr = b_first.dtype
    b_x = b_first.to(tl.float32)
    b_y = b_second.to(tl.float32)
    return (b_x * b_cos - b_y * b_sin).to(dtype), (b_y * b_cos + b_x * b_sin).to(dtype)


@triton.jit
def rotate_adjoint(b_first, b_second, b_cos, b_sin):
    """Apply the transpose of `rotate` to f32 gradients; exact also for tables with cos^2 + sin^2 != 1."""
    return b_first * b_cos + b_second * b_sin, b_second * b_cos - b_first * b_sin


@triton.jit
def paired_scores(b_a0, b_a1, b_b0, b_b1, PAIRED: tl.constexpr, PRECISION: tl.constexpr):
    """Return the products of all row pairs over the head dimension, f32 [rows of a, rows of b]."""
    b_scores = tl.dot(b_a0, tl.trans(b_b0), input_precision=PRECISION)
    if PAIRED:
        b_scores = tl.dot(b_a1, tl.trans(b_b1), acc=b_scores, input_precision=PRECISION)
    return b_scores


@triton.jit
def score_mask(rows, ROWS: tl.constexpr, FULL: tl.constexpr, CAUSAL: tl.constexpr):
    """Return the mask of (query, key) pairs that attend. Key 0 is always included to keep rows of padding finite."""
    o_query = tl.arange(0, ROWS)[:, None]
    o_key = tl.arange(0, ROWS)[None, :]
    m_scores = (o_key < tl.maximum(rows, 1)) & (o_query >= 0)
    if FULL:
        m_scores = (o_key < ROWS) & (o_query >= 0)
    if CAUSAL:
        m_scores = m_scores & (o_key <= o_query)
    return m_scores
