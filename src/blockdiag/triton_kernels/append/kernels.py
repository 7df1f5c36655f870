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


@triton.jit
def sequence_tokens(p_kv_lengths, p_query_lengths, b_sequence, query_tokens, m_row, QUERY_LENGTHS: tl.constexpr):
    """Return the number of keys of sequences and how many of them are new. Invalid values are clamped."""
    b_keys = tl.maximum(tl.load(p_kv_lengths + b_sequence, mask=m_row, other=0), 0)
    b_new = tl.zeros_like(b_keys) + query_tokens
    if QUERY_LENGTHS:
        b_given = tl.load(p_query_lengths + b_sequence, mask=m_row, other=0)
        b_new = tl.minimum(tl.maximum(b_given, 0), query_tokens)
    return b_keys, b_new


@triton.jit
def cache_places(p_page_table, b_sequence, b_position, m_row, max_pages, num_pages, max_keys, PAGE_SIZE: tl.constexpr,
                 TABLE: tl.constexpr):
    """Return the pool rows of positions, int64, and the mask of positions that have a page."""
    m_row = m_row & (b_position >= 0) & (b_position < max_keys)
    b_page = b_sequence
    if TABLE:
        p_page = p_page_table + b_sequence.to(tl.int64) * max_pages + b_position // PAGE_SIZE
        b_page = tl.load(p_page, mask=m_row, other=-1)
        m_row = m_row & (b_page >= 0) & (b_page < num_pages)
    return b_page.to(tl.int64) * PAGE_SIZE + b_position % PAGE_SIZE, m_row


@triton.jit
def pair_columns(o_pair, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return the columns of the first and of the second elements of pairs."""
    if INTERLEAVED:
        return 2 * o_pair, 2 * o_pair + 1
    else:
        return o_pair, o_pair + HALF


@triton.jit
def load_halves(source, b_place, head, m_row, HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
                COLUMNS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Load rows of one head of [rows, HEADS, DIM] as two halves, f32 [ROWS, COLUMNS] each; zero where masked."""
    o_pair = tl.arange(0, COLUMNS)
    o_first, o_second = pair_columns(o_pair, HALF, INTERLEAVED)
    p_row = source + (b_place * (HEADS * DIM) + head * DIM)[:, None]
    m_first = m_row[:, None] & (o_pair < HALF)[None, :]
    m_second = m_first & (o_second < DIM)[None, :]
    b_first = tl.load(p_row + o_first[None, :], mask=m_first, other=0.0).to(tl.float32)
    b_second = tl.load(p_row + o_second[None, :], mask=m_second, other=0.0).to(tl.float32)
    return b_first, b_second


@triton.jit
def store_halves(target, b_first, b_second, b_place, head, m_row, HEADS: tl.constexpr, DIM: tl.constexpr,
                 HALF: tl.constexpr, COLUMNS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Inverse of `load_halves`. The blocks have the dtype of the target."""
    o_pair = tl.arange(0, COLUMNS)
    o_first, o_second = pair_columns(o_pair, HALF, INTERLEAVED)
    p_row = target + (b_place * (HEADS * DIM) + head * DIM)[:, None]
    m_first = m_row[:, None] & (o_pair < HALF)[None, :]
    tl.store(p_row + o_first[None, :], b_first, mask=m_first)
    tl.store(p_row + o_second[None, :], b_second, mask=m_first & (o_second < DIM)[None, :])


@triton.jit
def rotate_halves(b_first, b_second, p_cos, p_sin, p_positions, o_row, b_position, m_row, table_rows,
                  HALF: tl.constexpr, COLUMNS: tl.constexpr, EXPLICIT: tl.constexpr):
    """Apply rotary embedding in f32. Out-of-range table rows are clamped."""
    b_table = b_position
    if EXPLICIT:
        b_table = tl.load(p_positions + o_row, mask=m_row, other=0)
    b_table = tl.minimum(tl.maximum(b_table, 0), table_rows - 1).to(tl.int64)
    o_pair = tl.arange(0, COLUMNS)
    o_table = b_table[:, None] * HALF + o_pair[None, :]
    m_table = m_row[:, None] & (o_pair < HALF)[None, :]
    b_cos = tl.load(p_cos + o_table, mask=m_table, other=0.0).to(tl.float32)
    b_sin = tl.load(p_sin + o_table, mask=m_table, other=0.0).to(tl.float32)
    return b_first * b_cos - b_second * b_sin, b_second * b_cos + b_first * b_sin


@triton.jit
def row_scale(b_first, b_second, p_scale, b_sequence, head, m_row, HEADS: tl.constexpr, KIND: tl.constexpr,
              LARGEST: tl.constexpr, SMALLEST_SCALE: tl.constexpr):
    """Return the scale that rows are divided by, f32 [ROWS].

    The scale is given for each sequence and head, computed from the row ("token"), or 1.
    """
    if KIND == "token":
        b_magnitude = tl.maximum(tl.abs(b_first), tl.abs(b_second))
        # Maxima ignore NaN, so rows with NaN are found separately.
        m_lost = ((b_first != b_first) | (b_second != b_second)).to(tl.int32)
        b_largest = tl.max(b_magnitude, 1)
        b_scale = tl.maximum(tl.div_rn(b_largest, tl.zeros_like(b_largest) + LARGEST), SMALLEST_SCALE)
        b_scale = tl.where(tl.max(m_lost, 1) > 0, float("nan"), b_scale)
    elif KIND == "head":
        b_scale = tl.load(p_scale + b_sequence * HEADS + head, mask=m_row, other=1.0)
    else:
        b_scale = tl.full([b_first.shape[0]], 1.0, tl.float32)
    return b_scale


@triton.jit
def round_to_cache(b_x, b_scale, dtype: tl.constexpr, SCALED: tl.constexpr, LARGEST: tl.constexpr, GRID: tl.constexpr,
                   LOWEST: tl.constexpr):
    """Divide f32 values by a scale and convert them to a cache's dtype. Eight-bit floats saturate at finite values.

    GRID is set if the machine's conversion to eight bits does not round to nearest even. Values are then rounded by
    adding and subtracting a large offset, whose last bit is the grid's spacing. The later conversion is exact.
    """
    if SCALED:
        b_x = tl.div_rn(b_x, tl.broadcast_to(b_scale[:, None], b_x.shape))
    if LARGEST is not None:
        b_x = tl.where(b_x > LARGEST, LARGEST, tl.where(b_x < -LARGEST, -LARGEST, b_x))
        if GRID is not None:
            # Round magnitudes and restore the sign bit, because a sum of zero would lose it.
            b_bits = b_x.to(tl.int32, bitcast=True)
            b_power = (b_bits & 0x7F800000).to(tl.float32, bitcast=True)
            b_offset = tl.where(b_power < LOWEST, LOWEST, b_power) * GRID
            b_rounded = ((tl.abs(b_x) + b_offset) - b_offset).to(tl.int32, bitcast=True)
            b_x = (b_rounded | (b_bits & -0x80000000)).to(tl.float32, bitcast=True)
    return b_x.to(dtype)


@triton.jit
def cached_row(source, p_scale, p_cos, p_sin, p_positions, o_row, b_sequence, b_position, head, m_row, table_rows,
               dtype: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, COLUMNS: tl.constexpr,
               INTERLEAVED: tl.constexpr, ROTARY: tl.constexpr, EXPLICIT: tl.constexpr, SCALE: tl.constexpr,
               LARGEST: tl.constexpr, GRID: tl.constexpr, LOWEST: tl.constexpr, SMALLEST_SCALE: tl.constexpr):
    """Return new rows of one head, rotated and rounded to a cache's `dtype`, and their scale."""
    b_first, b_second = load_halves(source, o_row.to(tl.int64), head, m_row, HEADS, DIM, HALF, COLUMNS, INTERLEAVED)
    if ROTARY:
        b_first, b_second = rotate_halves(b_first, b_second, p_cos, p_sin, p_positions, o_row, b_position, m_row,
                                          table_rows, HALF, COLUMNS, EXPLICIT)
    b_scale = row_scale(b_first, b_second, p_scale, b_sequence, head, m_row, HEADS, SCALE, LARGEST, SMALLEST_SCALE)
    b_first = round_to_cache(b_first, b_scale, dtype, SCALE != "none", LARGEST, GRID, LOWEST)
    b_second = round_to_cache(b_second, b_scale, dtype, SCALE != "none", LARGEST, GRID, LOWEST)
    return b_first, b_second, b_scale


@triton.jit
def append_kernel(
    key, value, p_page_table, p_kv_lengths, p_query_lengths, p_sequences, p_first_rows, p_cos, p_sin, p_positions,
    p_key_scale, p_value_scale, key_pages, value_pages, p_key_centroids,
    tokens, query_tokens, max_pages, num_pages, max_keys, table_rows, row_tiles, max_completed, max_blocks,
    HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, COLUMNS: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_HALF: tl.constexpr, VALUE_COLUMNS: tl.constexpr,
    PAGE_SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    PACKED: tl.constexpr, TABLE: tl.constexpr, QUERY_LENGTHS: tl.constexpr,
    ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr, EXPLICIT: tl.constexpr,
    KEY_SCALE: tl.constexpr, VALUE_SCALE: tl.constexpr,
    KEY_LARGEST: tl.constexpr, KEY_GRID: tl.constexpr, KEY_LOWEST: tl.constexpr,
    VALUE_LARGEST: tl.constexpr, VALUE_GRID: tl.constexpr, VALUE_LOWEST: tl.constexpr, SMALLEST_SCALE: tl.constexpr,
):
    tile = tl.program_id(0)
    head = tl.program_id(1)
    key_dtype: tl.constexpr = key_pages.dtype.element_ty
    if tile < row_tiles:
        o_row = tile * ROWS + tl.arange(0, ROWS)
        m_row = o_row < tokens
        if PACKED:
            b_sequence = tl.load(p_sequences + o_row, mask=m_row, other=-1)
            m_row = m_row & (b_sequence >= 0)
            b_token = o_row - tl.load(p_first_rows + b_sequence, mask=m_row, other=0)
        else:
            b_sequence = o_row // query_tokens
            b_token = o_row % query_tokens
        b_keys, b_new = sequence_tokens(p_kv_lengths, p_query_lengths, b_sequence, query_tokens, m_row, QUERY_LENGTHS)
        b_position = b_keys - b_new + b_token
        b_place, m_row = cache_places(p_page_table, b_sequence, b_position, m_row & (b_token < b_new), max_pages,
                                      num_pages, max_keys, PAGE_SIZE, TABLE)
        b_first, b_second, b_scale = cached_row(
            key, p_key_scale, p_cos, p_sin, p_positions, o_row, b_sequence, b_position, head, m_row, table_rows,
            key_dtype, HEADS, DIM, HALF, COLUMNS, INTERLEAVED, ROTARY, EXPLICIT, KEY_SCALE, KEY_LARGEST, KEY_GRID,
            KEY_LOWEST, SMALLEST_SCALE)
        store_halves(key_pages, b_first, b_second, b_place, head, m_row, HEADS, DIM, HALF, COLUMNS, INTERLEAVED)
        if KEY_SCALE == "token":
            tl.store(p_key_scale + b_place * HEADS + head, b_scale, mask=m_row)
        b_first, b_second, b_scale = cached_row(
            value, p_value_scale, None, None, None, o_row, b_sequence, b_position, head, m_row, table_rows,
            value_pages.dtype.element_ty, HEADS, VALUE_DIM, VALUE_HALF, VALUE_COLUMNS, False, False, False,
            VALUE_SCALE, VALUE_LARGEST, VALUE_GRID, VALUE_LOWEST, SMALLEST_SCALE)
        store_halves(value_pages, b_first, b_second, b_place, head, m_row, HEADS, VALUE_DIM, VALUE_HALF, VALUE_COLUMNS,
                     False)
        if VALUE_SCALE == "token":
            tl.store(p_value_scale + b_place * HEADS + head, b_scale, mask=m_row)
    elif BLOCK_SIZE is not None:
        sequence = (tile - row_tiles) // max_completed
        keys, new = sequence_tokens(p_kv_lengths, p_query_lengths, sequence, query_tokens, sequence >= 0, QUERY_LENGTHS)
        start = keys - new
        block = tl.maximum(start, 0) // BLOCK_SIZE + (tile - row_tiles) % max_completed
        # Compare block numbers, because the end position of a block far behind the keys may overflow 32 bits.
        if (block < keys // BLOCK_SIZE) & (block < max_keys // BLOCK_SIZE) & (block < max_blocks):
            first_row = sequence * query_tokens
            if PACKED:
                first_row = tl.load(p_first_rows + sequence)
            b_sums = tl.zeros([BLOCK_ROWS, COLUMNS], tl.float32)
            b_second_sums = tl.zeros([BLOCK_ROWS, COLUMNS], tl.float32)
            b_found = tl.zeros([BLOCK_ROWS], tl.int32)
            for behind in range(0, BLOCK_SIZE, BLOCK_ROWS):
                o_key = behind + tl.arange(0, BLOCK_ROWS)
                b_position = block * BLOCK_SIZE + o_key
                b_sequence = tl.zeros_like(o_key) + sequence
                b_place, m_key = cache_places(p_page_table, b_sequence, b_position, o_key < BLOCK_SIZE, max_pages,
                                              num_pages, max_keys, PAGE_SIZE, TABLE)
                b_found += m_key.to(tl.int32)
                m_new = m_key & (b_position >= start)
                m_old = m_key & (b_position < start)
                b_first, b_second = load_halves(key_pages, b_place, head, m_old, HEADS, DIM, HALF, COLUMNS, INTERLEAVED)
                b_new_first, b_new_second, b_scale = cached_row(
                    key, p_key_scale, p_cos, p_sin, p_positions, first_row + b_position - start, b_sequence,
                    b_position, head, m_new, table_rows, key_dtype, HEADS, DIM, HALF, COLUMNS, INTERLEAVED, ROTARY,
                    EXPLICIT, KEY_SCALE, KEY_LARGEST, KEY_GRID, KEY_LOWEST, SMALLEST_SCALE)
                if KEY_SCALE == "head":
                    b_scale = tl.load(p_key_scale + b_sequence * HEADS + head)
                if KEY_SCALE == "token":
                    b_old_scale = tl.load(p_key_scale + b_place * HEADS + head, mask=m_old, other=0.0)
                    b_scale = tl.where(m_new, b_scale, b_old_scale)
                b_first = tl.where(m_new[:, None], b_new_first.to(tl.float32), b_first)
                b_second = tl.where(m_new[:, None], b_new_second.to(tl.float32), b_second)
                # A key without a page may have a scale of NaN.
                b_scale = tl.where(m_key, b_scale, 0.0)
                b_sums += b_first * b_scale[:, None]
                b_second_sums += b_second * b_scale[:, None]
            # If some of the block's keys have no page, the stored mean is left unchanged.
            m_store = tl.zeros([1], tl.int32) + tl.sum(b_found, 0) == BLOCK_SIZE
            o_place = tl.zeros([1], tl.int64) + sequence.to(tl.int64) * max_blocks + block
            store_halves(p_key_centroids, (tl.sum(b_sums, 0) / BLOCK_SIZE)[None, :],
                         (tl.sum(b_second_sums, 0) / BLOCK_SIZE)[None, :], o_place, head, m_store, HEADS, DIM, HALF,
                         COLUMNS, INTERLEAVED)
