"""The kernel that appends to a paged cache.

It rotates and rounds new keys and values, stores them in their pages, and computes the mean keys of completed blocks.
One launch does both. A program handles either a few new rows of one head, or one block that the new keys may complete.

For a block's mean, the old keys are read from the pages. The new keys are computed from the operand, with the same
functions as the stored ones. So no program waits for another one's writes.

A row of a head is held as two halves: the first and the second elements of its rotary pairs.
"""

# Device code is laid out by hand: one argument per line would hide what a kernel does.
# fmt: off

import triton
import triton.language as tl

from blockdiag.triton_kernels.append.arguments import AppendArrays, AppendSizes


@triton.jit
def sequence_tokens(arrays, b_sequence, query_tokens, m_row, LAYOUT: tl.constexpr):
    """Return the number of keys of sequences and how many of them are new. Invalid values are clamped."""
    b_keys = tl.maximum(tl.load(arrays.kv_lengths + b_sequence, mask=m_row, other=0), 0)
    b_new = tl.zeros_like(b_keys) + query_tokens
    if LAYOUT.has_query_lengths:
        b_given = tl.load(arrays.query_lengths + b_sequence, mask=m_row, other=0)
        b_new = tl.minimum(tl.maximum(b_given, 0), query_tokens)
    return b_keys, b_new


@triton.jit
def cache_places(arrays, sizes, b_sequence, b_position, m_row, LAYOUT: tl.constexpr):
    """Return the pool rows of positions, int64, and the mask of positions that have a page."""
    m_row = m_row & (b_position >= 0) & (b_position < sizes.max_keys)
    b_page = b_sequence
    if LAYOUT.has_page_table:
        p_page = arrays.page_table + b_sequence.to(tl.int64) * sizes.max_pages + b_position // LAYOUT.page_size
        b_page = tl.load(p_page, mask=m_row, other=-1)
        m_row = m_row & (b_page >= 0) & (b_page < sizes.num_pages)
    return b_page.to(tl.int64) * LAYOUT.page_size + b_position % LAYOUT.page_size, m_row


@triton.jit
def pair_columns(o_pair, FORMAT: tl.constexpr):
    """Return the columns of the first and of the second elements of pairs."""
    if FORMAT.is_interleaved:
        return 2 * o_pair, 2 * o_pair + 1
    else:
        return o_pair, o_pair + FORMAT.half


@triton.jit
def load_halves(source, b_place, head, m_row, FORMAT: tl.constexpr):
    """Load rows of one head of [rows, heads, dim] as two halves, f32 [ROWS, columns] each; zero where masked."""
    o_pair = tl.arange(0, FORMAT.columns)
    o_first, o_second = pair_columns(o_pair, FORMAT)
    p_row = source + (b_place * (FORMAT.heads * FORMAT.dim) + head * FORMAT.dim)[:, None]
    m_first = m_row[:, None] & (o_pair < FORMAT.half)[None, :]
    m_second = m_first & (o_second < FORMAT.dim)[None, :]
    b_first = tl.load(p_row + o_first[None, :], mask=m_first, other=0.0).to(tl.float32)
    b_second = tl.load(p_row + o_second[None, :], mask=m_second, other=0.0).to(tl.float32)
    return b_first, b_second


@triton.jit
def store_halves(target, b_first, b_second, b_place, head, m_row, FORMAT: tl.constexpr):
    """Inverse of `load_halves`. The blocks have the dtype of the target."""
    o_pair = tl.arange(0, FORMAT.columns)
    o_first, o_second = pair_columns(o_pair, FORMAT)
    p_row = target + (b_place * (FORMAT.heads * FORMAT.dim) + head * FORMAT.dim)[:, None]
    m_first = m_row[:, None] & (o_pair < FORMAT.half)[None, :]
    tl.store(p_row + o_first[None, :], b_first, mask=m_first)
    tl.store(p_row + o_second[None, :], b_second, mask=m_first & (o_second < FORMAT.dim)[None, :])


@triton.jit
def rotate_halves(b_first, b_second, arrays, o_row, b_position, m_row, table_rows, FORMAT: tl.constexpr):
    """Apply rotary embedding in f32. Out-of-range table rows are clamped."""
    b_table = b_position
    if FORMAT.has_positions:
        b_table = tl.load(arrays.positions + o_row, mask=m_row, other=0)
    b_table = tl.minimum(tl.maximum(b_table, 0), table_rows - 1).to(tl.int64)
    o_pair = tl.arange(0, FORMAT.columns)
    o_table = b_table[:, None] * FORMAT.half + o_pair[None, :]
    m_table = m_row[:, None] & (o_pair < FORMAT.half)[None, :]
    b_cos = tl.load(arrays.cos + o_table, mask=m_table, other=0.0).to(tl.float32)
    b_sin = tl.load(arrays.sin + o_table, mask=m_table, other=0.0).to(tl.float32)
    return b_first * b_cos - b_second * b_sin, b_second * b_cos + b_first * b_sin


@triton.jit
def row_scale(b_first, b_second, p_scale, b_sequence, head, m_row, FORMAT: tl.constexpr):
    """Return the scale that rows are divided by, f32 [ROWS].

    The scale is given for each sequence and head, computed from the row ("token"), or 1.
    """
    if FORMAT.scale == "token":
        b_magnitude = tl.maximum(tl.abs(b_first), tl.abs(b_second))
        # Maxima ignore NaN, so rows with NaN are found separately.
        m_lost = ((b_first != b_first) | (b_second != b_second)).to(tl.int32)
        b_largest = tl.max(b_magnitude, 1)
        b_scale = tl.div_rn(b_largest, tl.zeros_like(b_largest) + FORMAT.largest)
        b_scale = tl.maximum(b_scale, FORMAT.smallest_scale)
        b_scale = tl.where(tl.max(m_lost, 1) > 0, float("nan"), b_scale)
    elif FORMAT.scale == "head":
        b_scale = tl.load(p_scale + b_sequence * FORMAT.heads + head, mask=m_row, other=1.0)
    else:
        b_scale = tl.full([b_first.shape[0]], 1.0, tl.float32)
    return b_scale


@triton.jit
def round_to_cache(b_x, b_scale, dtype: tl.constexpr, FORMAT: tl.constexpr):
    """Divide f32 values by a scale and convert them to a cache's dtype. Eight-bit values saturate.

    `grid` is set if the machine's conversion to eight bits does not round to nearest even. Values are then rounded by
    adding and subtracting a large offset, whose last bit is the grid's spacing. The later conversion is exact.
    """
    LARGEST: tl.constexpr = FORMAT.largest
    LOWEST: tl.constexpr = FORMAT.lowest
    if FORMAT.scale != "none":
        b_x = tl.div_rn(b_x, tl.broadcast_to(b_scale[:, None], b_x.shape))
    if LARGEST is not None:
        b_x = tl.where(b_x > LARGEST, LARGEST, tl.where(b_x < -LARGEST, -LARGEST, b_x))
        if FORMAT.is_integer:
            # Integers have no NaN.
            b_x = tl.where(b_x == b_x, (b_x + FORMAT.grid) - FORMAT.grid, 0.0)
        elif FORMAT.grid is not None:
            # Round magnitudes and restore the sign bit, because a sum of zero would lose it.
            b_bits = b_x.to(tl.int32, bitcast=True)
            b_power = (b_bits & 0x7F800000).to(tl.float32, bitcast=True)
            b_offset = tl.where(b_power < LOWEST, LOWEST, b_power) * FORMAT.grid
            b_rounded = ((tl.abs(b_x) + b_offset) - b_offset).to(tl.int32, bitcast=True)
            b_x = (b_rounded | (b_bits & -0x80000000)).to(tl.float32, bitcast=True)
    return b_x.to(dtype)


@triton.jit
def cached_row(source, p_scale, arrays, o_row, b_sequence, b_position, head, m_row, table_rows, dtype: tl.constexpr,
               FORMAT: tl.constexpr):
    """Return new rows of one head, rotated and rounded to a cache's `dtype`, and their scale."""
    b_first, b_second = load_halves(source, o_row.to(tl.int64), head, m_row, FORMAT)
    if FORMAT.has_rotary:
        b_first, b_second = rotate_halves(b_first, b_second, arrays, o_row, b_position, m_row, table_rows, FORMAT)
    b_scale = row_scale(b_first, b_second, p_scale, b_sequence, head, m_row, FORMAT)
    b_first = round_to_cache(b_first, b_scale, dtype, FORMAT)
    b_second = round_to_cache(b_second, b_scale, dtype, FORMAT)
    return b_first, b_second, b_scale


@triton.jit
def append_kernel(arrays: AppendArrays, sizes: AppendSizes, LAYOUT: tl.constexpr, TILE: tl.constexpr,
                  KEY: tl.constexpr, VALUE: tl.constexpr):
    """Append a tile of new rows, or compute the mean key of a block that the new rows may complete.

    LAYOUT is a CacheLayout, TILE an AppendTile. KEY and VALUE are the RowFormat of keys and of values. A latent cache
    has no VALUE.
    """
    BLOCK_SIZE: tl.constexpr = LAYOUT.block_size
    BLOCK_ROWS: tl.constexpr = TILE.block_rows
    tile = tl.program_id(0)
    head = tl.program_id(1)
    key_dtype: tl.constexpr = arrays.key_pages.dtype.element_ty
    if tile < sizes.row_tiles:
        o_row = tile * TILE.rows + tl.arange(0, TILE.rows)
        m_row = o_row < sizes.tokens
        if LAYOUT.is_packed:
            b_sequence = tl.load(arrays.sequences + o_row, mask=m_row, other=-1)
            m_row = m_row & (b_sequence >= 0)
            b_token = o_row - tl.load(arrays.first_rows + b_sequence, mask=m_row, other=0)
        else:
            b_sequence = o_row // sizes.query_tokens
            b_token = o_row % sizes.query_tokens
        b_keys, b_new = sequence_tokens(arrays, b_sequence, sizes.query_tokens, m_row, LAYOUT)
        b_position = b_keys - b_new + b_token
        b_place, m_row = cache_places(arrays, sizes, b_sequence, b_position, m_row & (b_token < b_new), LAYOUT)
        b_first, b_second, b_scale = cached_row(arrays.key, arrays.key_scale, arrays, o_row, b_sequence, b_position,
                                                head, m_row, sizes.table_rows, key_dtype, KEY)
        store_halves(arrays.key_pages, b_first, b_second, b_place, head, m_row, KEY)
        if KEY.scale == "token":
            tl.store(arrays.key_scale + b_place * KEY.heads + head, b_scale, mask=m_row)
        if VALUE is not None:
            b_first, b_second, b_scale = cached_row(arrays.value, arrays.value_scale, arrays, o_row, b_sequence,
                                                    b_position, head, m_row, sizes.table_rows,
                                                    arrays.value_pages.dtype.element_ty, VALUE)
            store_halves(arrays.value_pages, b_first, b_second, b_place, head, m_row, VALUE)
            if VALUE.scale == "token":
                tl.store(arrays.value_scale + b_place * VALUE.heads + head, b_scale, mask=m_row)
    elif BLOCK_SIZE is not None:
        sequence = (tile - sizes.row_tiles) // sizes.max_completed
        keys, new = sequence_tokens(arrays, sequence, sizes.query_tokens, sequence >= 0, LAYOUT)
        start = keys - new
        block = tl.maximum(start, 0) // BLOCK_SIZE + (tile - sizes.row_tiles) % sizes.max_completed
        # Compare block numbers, because the end position of a block far behind the keys may overflow 32 bits.
        if (block < keys // BLOCK_SIZE) & (block < sizes.max_keys // BLOCK_SIZE) & (block < sizes.max_blocks):
            first_row = sequence * sizes.query_tokens
            if LAYOUT.is_packed:
                first_row = tl.load(arrays.first_rows + sequence)
            b_sums = tl.zeros([BLOCK_ROWS, KEY.columns], tl.float32)
            b_second_sums = tl.zeros([BLOCK_ROWS, KEY.columns], tl.float32)
            b_found = tl.zeros([BLOCK_ROWS], tl.int32)
            for behind in range(0, BLOCK_SIZE, BLOCK_ROWS):
                o_key = behind + tl.arange(0, BLOCK_ROWS)
                b_position = block * BLOCK_SIZE + o_key
                b_sequence = tl.zeros_like(o_key) + sequence
                b_place, m_key = cache_places(arrays, sizes, b_sequence, b_position, o_key < BLOCK_SIZE, LAYOUT)
                b_found += m_key.to(tl.int32)
                m_new = m_key & (b_position >= start)
                m_old = m_key & (b_position < start)
                b_first, b_second = load_halves(arrays.key_pages, b_place, head, m_old, KEY)
                o_new = first_row + b_position - start
                b_new_first, b_new_second, b_scale = cached_row(
                    arrays.key, arrays.key_scale, arrays, o_new, b_sequence, b_position, head, m_new, sizes.table_rows,
                    key_dtype, KEY)
                if KEY.scale == "head":
                    b_scale = tl.load(arrays.key_scale + b_sequence * KEY.heads + head)
                if KEY.scale == "token":
                    b_old_scale = tl.load(arrays.key_scale + b_place * KEY.heads + head, mask=m_old, other=0.0)
                    b_scale = tl.where(m_new, b_scale, b_old_scale)
                b_first = tl.where(m_new[:, None], b_new_first.to(tl.float32), b_first)
                b_second = tl.where(m_new[:, None], b_new_second.to(tl.float32), b_second)
                # A key without a page may have a scale of NaN.
                b_scale = tl.where(m_key, b_scale, 0.0)
                b_sums += b_first * b_scale[:, None]
                b_second_sums += b_second * b_scale[:, None]
            # If some of the block's keys have no page, the stored mean is left unchanged.
            m_store = tl.zeros([1], tl.int32) + tl.sum(b_found, 0) == BLOCK_SIZE
            o_place = tl.zeros([1], tl.int64) + sequence.to(tl.int64) * sizes.max_blocks + block
            store_halves(arrays.key_centroids, (tl.sum(b_sums, 0) / BLOCK_SIZE)[None, :],
                         (tl.sum(b_second_sums, 0) / BLOCK_SIZE)[None, :], o_place, head, m_store, KEY)
