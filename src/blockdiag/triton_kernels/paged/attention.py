"""Kernels of paged attention: few queries attend to one split of a sequence's keys, then the splits are merged.

The queries of all heads that share a key head are rows of one tile, so the cache is read once. Few rows become the
right operand of products, after the keys or the transposed values. Tensor cores accept 8 rows there, and each warp has
its own keys, which are widened once.

Each split writes a normalised float32 output and its base-2 log-sum-exp. A second kernel merges the splits in a fixed
order.
"""

# Device code is laid out by hand: one argument per line would hide what a kernel does.
# fmt: off

import triton
import triton.language as tl

from blockdiag.triton_kernels.paged.configs import SPLIT_GRAIN

LOG_2 = tl.constexpr(0.6931471805599453)
LOG2_E = tl.constexpr(1.4426950408889634)
GRAIN = tl.constexpr(SPLIT_GRAIN)


@triton.jit
def sequence_lengths(p_kv_lengths, p_query_lengths, batch, max_keys, QUERY_TOKENS: tl.constexpr,
                     QUERY_LENGTHS: tl.constexpr):
    """Return the number of keys and queries of a sequence. Invalid values are clamped."""
    keys = tl.minimum(tl.maximum(tl.load(p_kv_lengths + batch), 0), max_keys)
    queries = QUERY_TOKENS
    if QUERY_LENGTHS:
        queries = tl.minimum(tl.maximum(tl.load(p_query_lengths + batch), 0), QUERY_TOKENS)
    return keys, queries


@triton.jit
def split_bounds(split, num_splits, split_size, keys, start):
    """Return the bounds [first, end) of one split of the keys [start, keys)."""
    if split_size == 0:
        grains = tl.cdiv(tl.maximum(keys - start, 0), GRAIN)
        split_size = tl.cdiv(grains, num_splits) * GRAIN
        first = start + split * split_size
    else:
        first = split * split_size
    return tl.maximum(first, start), tl.minimum(first + split_size, keys)


@triton.jit
def cache_rows(p_page_table, o_key, m_key, batch, max_pages, num_pages, PAGE_SIZE: tl.constexpr, TABLE: tl.constexpr,
               SPAN: tl.constexpr):
    """Return the pool rows of keys, int64. Out-of-range page numbers are clamped.

    SPAN is the alignment of the tile: if it divides PAGE_SIZE, the whole tile lies in one page.
    """
    if TABLE:
        if PAGE_SIZE % SPAN == 0:
            # The whole tile lies in one page.
            b_slot = tl.min(o_key, 0) // PAGE_SIZE
            b_page = tl.load(p_page_table + batch.to(tl.int64) * max_pages + tl.minimum(b_slot, max_pages - 1))
        else:
            b_page = tl.load(p_page_table + batch.to(tl.int64) * max_pages + o_key // PAGE_SIZE, mask=m_key, other=0)
        b_page = tl.minimum(tl.maximum(b_page, 0), num_pages - 1)
        return b_page.to(tl.int64) * PAGE_SIZE + o_key % PAGE_SIZE
    return batch.to(tl.int64) * PAGE_SIZE + o_key


@triton.jit
def rows_of_heads(o_row, batch, key_head, QUERY_TOKENS: tl.constexpr, QUERY_HEADS: tl.constexpr, GROUP: tl.constexpr):
    """Return the rows of [batch, QUERY_TOKENS, QUERY_HEADS] for a tile's rows.

    The tile's rows go query by query, with the GROUP heads of one key head for each.
    """
    b_token = o_row // GROUP
    b_head = key_head * GROUP + o_row % GROUP
    return (batch.to(tl.int64) * QUERY_TOKENS + b_token) * QUERY_HEADS + b_head


@triton.jit
def widen_byte(b_byte, KIND: tl.constexpr):
    """Convert eight-bit floats, held as the low bytes of unsigned 16-bit integers, to float16."""
    return b_byte.to(tl.uint8).to(KIND, bitcast=True).to(tl.float16)


@triton.jit
def widen_pairs(b_pair, KIND: tl.constexpr, MACHINE: tl.constexpr):
    """Convert pairs of eight-bit floats, held as unsigned 16-bit integers, to two float16 blocks.

    Pairs move from shared memory to the tensor cores like 16-bit values, while single bytes would be moved one by one.
    A register holds two pairs, whose bytes one instruction reorders.
    """
    if MACHINE and KIND.is_fp8e5():
        # float8_e5m2 is the upper byte of a float16.
        return tl.inline_asm_elementwise(
            """
            prmt.b32 $0, $2, 0, 0x2404;
            prmt.b32 $1, $2, 0, 0x3414;
            """, "=r,=r,r", [b_pair], dtype=(tl.float16, tl.float16), is_pure=True, pack=2)
    elif MACHINE:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 sorted;
            .reg .b16 first, second;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {first, second}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, first;
            cvt.rn.f16x2.e4m3x2 $1, second;
            }
            """, "=r,=r,r", [b_pair], dtype=(tl.float16, tl.float16), is_pure=True, pack=2)
    else:
        return widen_byte(b_pair & 255, KIND), widen_byte(b_pair >> 8, KIND)


@triton.jit
def along(b_line, AXIS: tl.constexpr):
    """Expand a vector to a tile that extends along AXIS."""
    return tl.expand_dims(b_line, 1 - AXIS)


@triton.jit
def multiply(b_cache, b_rows, b_sum, KEYS_FIRST: tl.constexpr, PRECISION: tl.constexpr):
    """Return `b_sum` plus the product of keys or values and rows, in the order that KEYS_FIRST selects."""
    if KEYS_FIRST:
        return tl.dot(b_cache, b_rows, b_sum, input_precision=PRECISION)
    else:
        return tl.dot(b_rows, b_cache, b_sum, input_precision=PRECISION)


@triton.jit
def load_query(query, b_place, o_column, m_row, HEAD_DIM: tl.constexpr, ROW_AXIS: tl.constexpr):
    """Load some columns of a tile of queries; zero where masked."""
    b_at = along(b_place, ROW_AXIS) * HEAD_DIM + along(o_column, 1 - ROW_AXIS)
    return tl.load(query + b_at, mask=along(m_row, ROW_AXIS) & along(o_column < HEAD_DIM, 1 - ROW_AXIS), other=0.0)


@triton.jit
def store_output(target, b_place, o_column, b_output, m_row, VALUE_DIM: tl.constexpr, ROW_AXIS: tl.constexpr):
    """Store some columns of a tile of results."""
    b_at = along(b_place, ROW_AXIS) * VALUE_DIM + along(o_column, 1 - ROW_AXIS)
    tl.store(target + b_at, b_output.to(target.dtype.element_ty),
             mask=along(m_row, ROW_AXIS) & along(o_column < VALUE_DIM, 1 - ROW_AXIS))


@triton.jit
def paged_splits(query, key, value, p_page_table, p_kv_lengths, p_query_lengths, p_sinks, p_score_scale, p_key_scale,
                 p_value_scale, output, p_log_sum, p_part, p_part_sum,
                 max_pages, num_pages, max_keys, num_splits, split_size, scale, soft_cap,
                 QUERY_TOKENS: tl.constexpr, QUERY_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr,
                 HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_COLUMNS: tl.constexpr,
                 PAGE_SIZE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, KEYS_FIRST: tl.constexpr,
                 WARPS: tl.constexpr, ALIGNED: tl.constexpr, ROW_TILES: tl.constexpr, TABLE: tl.constexpr,
                 QUERY_LENGTHS: tl.constexpr, CAUSAL: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
                 SOFT_CAP: tl.constexpr, SINKS: tl.constexpr, SCORE_SCALE: tl.constexpr, KEY_SCALE: tl.constexpr,
                 VALUE_SCALE: tl.constexpr, WHOLE: tl.constexpr, KEY_KIND: tl.constexpr, VALUE_KIND: tl.constexpr,
                 MACHINE: tl.constexpr, PRECISION: tl.constexpr, LOOP_STAGES: tl.constexpr):
    """Compute the attention of a tile of rows to the keys of one split.

    With a single split (WHOLE) the kernel writes the final results. Otherwise it writes partial results
    [split, batch, QUERY_TOKENS, QUERY_HEADS, VALUE_DIM].
    """
    GROUP: tl.constexpr = QUERY_HEADS // KEY_HEADS
    # Axes of the scores. Keys have their columns along ROW_AXIS; queries and results have theirs along KEY_AXIS.
    KEY_AXIS: tl.constexpr = 0 if KEYS_FIRST else 1
    ROW_AXIS: tl.constexpr = 1 - KEY_AXIS
    # An unaligned tile may lie in two pages, whatever the page size is. PAGE_SIZE + 1 never divides PAGE_SIZE.
    SPAN: tl.constexpr = KEYS if ALIGNED else PAGE_SIZE + 1
    split = tl.program_id(0) // ROW_TILES
    key_head = tl.program_id(1)
    batch = tl.program_id(2)
    keys, queries = sequence_lengths(p_kv_lengths, p_query_lengths, batch, max_keys, QUERY_TOKENS, QUERY_LENGTHS)
    first_row = tl.program_id(0) % ROW_TILES * ROWS
    o_row = first_row + tl.arange(0, ROWS)
    m_row = o_row < queries * GROUP
    b_position = keys - queries + o_row // GROUP
    # The first key that any query of the sequence sees. Only visible keys are divided among the splits.
    start = 0
    if LEFT is not None:
        start = tl.maximum(keys - queries - LEFT, 0) // GRAIN * GRAIN
    first, end = split_bounds(split, num_splits, split_size, keys, start)
    first_position = keys - queries + first_row // GROUP
    last_position = keys - queries + tl.minimum((first_row + ROWS - 1) // GROUP, queries - 1)
    if LEFT is not None:
        first = tl.maximum(first, tl.maximum(first_position - LEFT, 0) // GRAIN * GRAIN)
    if CAUSAL:
        end = tl.minimum(end, last_position + 1)
    elif RIGHT is not None:
        end = tl.minimum(end, last_position + RIGHT + 1)

    b_place = rows_of_heads(o_row, batch, key_head, QUERY_TOKENS, QUERY_HEADS, GROUP)
    # Even and odd columns of eight-bit keys and values are multiplied separately.
    KEY_STEP: tl.constexpr = 1 if KEY_KIND is None else 2
    VALUE_STEP: tl.constexpr = 1 if VALUE_KIND is None else 2
    o_column = tl.arange(0, COLUMNS // KEY_STEP)
    m_column = o_column < HEAD_DIM // KEY_STEP
    o_value = tl.arange(0, VALUE_COLUMNS // VALUE_STEP)
    m_value = o_value < VALUE_DIM // VALUE_STEP
    b_query = load_query(query, b_place, o_column * KEY_STEP, m_row, HEAD_DIM, ROW_AXIS)
    b_factor = tl.zeros([ROWS], tl.float32) + scale
    if SCORE_SCALE:
        b_factor *= tl.load(p_score_scale + batch * KEY_HEADS + key_head)
    if KEY_KIND is not None:
        # float16 represents all eight-bit floats. Queries are scaled by a power of two to a maximum below 2, so that
        # they fit float16, too.
        b_wide = b_query.to(tl.float32)
        b_wide_odd = load_query(query, b_place, o_column * 2 + 1, m_row, HEAD_DIM, ROW_AXIS).to(tl.float32)
        b_largest = tl.maximum(tl.max(tl.abs(b_wide), KEY_AXIS), tl.max(tl.abs(b_wide_odd), KEY_AXIS))
        b_power = tl.exp2(tl.floor(tl.log2(tl.where((b_largest > 0) & (b_largest < float("inf")), b_largest, 1.0))))
        b_query = (b_wide / along(b_power, ROW_AXIS)).to(tl.float16)
        b_query_odd = (b_wide_odd / along(b_power, ROW_AXIS)).to(tl.float16)
        b_factor *= b_power
        p_key_pairs = key.to(tl.pointer_type(tl.uint16))
    LINES: tl.constexpr = VALUE_COLUMNS // VALUE_STEP
    OUTPUT: tl.constexpr = [LINES, ROWS] if KEYS_FIRST else [ROWS, LINES]
    if VALUE_KIND is not None:
        p_value_pairs = value.to(tl.pointer_type(tl.uint16))
        b_output_odd = tl.zeros(OUTPUT, tl.float32)
    if not SOFT_CAP:
        b_factor *= LOG2_E
    b_output = tl.zeros(OUTPUT, tl.float32)
    b_max = tl.zeros([ROWS], tl.float32) + float("-inf")
    # With KEYS_FIRST each thread accumulates its own part of a row's sum. The parts are reduced at the end.
    PARTS: tl.constexpr = [KEYS // (16 * WARPS), WARPS, 2, 8, ROWS]
    if KEYS_FIRST:
        b_sums = tl.zeros([WARPS, 8, ROWS], tl.float32)
    else:
        b_sums = tl.zeros([ROWS], tl.float32)
    for at in tl.range(first, end, KEYS, num_stages=LOOP_STAGES):
        o_key = at + tl.arange(0, KEYS)
        m_key = o_key < end
        b_cache = cache_rows(p_page_table, o_key, m_key, batch, max_pages, num_pages, PAGE_SIZE, TABLE,
                             SPAN) * KEY_HEADS + key_head
        m_key_tile = along(m_key, KEY_AXIS) & along(m_column, ROW_AXIS)
        m_value_tile = along(m_key, ROW_AXIS) & along(m_value, KEY_AXIS)
        o_key_tile = along(b_cache, KEY_AXIS) * (HEAD_DIM // KEY_STEP) + along(o_column, ROW_AXIS)
        o_value_tile = along(b_cache, ROW_AXIS) * (VALUE_DIM // VALUE_STEP) + along(o_value, KEY_AXIS)
        if KEY_KIND is None:
            b_key = tl.load(key + o_key_tile, mask=m_key_tile, other=0.0)
            b_scores = multiply(b_key, b_query, None, KEYS_FIRST, PRECISION)
        else:
            b_even, b_odd = widen_pairs(tl.load(p_key_pairs + o_key_tile, mask=m_key_tile, other=0), KEY_KIND, MACHINE)
            b_scores = multiply(b_even, b_query, None, KEYS_FIRST, PRECISION)
            b_scores = multiply(b_odd, b_query_odd, b_scores, KEYS_FIRST, PRECISION)
        b_scores *= along(b_factor, ROW_AXIS)
        if KEY_SCALE:
            b_scores *= along(tl.load(p_key_scale + b_cache, mask=m_key, other=0.0), KEY_AXIS)
        if SOFT_CAP:
            # tanh(x) = 1 - 2 / (1 + e^2x), which is accurate enough at both ends.
            b_exp = tl.exp2(b_scores * (2.0 * LOG2_E / soft_cap))
            b_scores = (1.0 - 2.0 / (1.0 + b_exp)) * (soft_cap * LOG2_E)
        m_seen = along(m_key, KEY_AXIS)
        if CAUSAL and QUERY_TOKENS > 1:
            m_seen = m_seen & (along(o_key, KEY_AXIS) <= along(b_position, ROW_AXIS))
        elif RIGHT is not None:
            m_seen = m_seen & (along(o_key, KEY_AXIS) <= along(b_position + RIGHT, ROW_AXIS))
        if LEFT is not None:
            m_seen = m_seen & (along(o_key, KEY_AXIS) >= along(b_position - LEFT, ROW_AXIS))
        b_scores = tl.where(m_seen, b_scores, float("-inf"))
        b_new_max = tl.maximum(b_max, tl.max(b_scores, KEY_AXIS))
        # For rows that have seen no key yet, -inf - -inf would be NaN.
        b_base = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
        b_shrink = tl.exp2(b_max - b_base)
        b_weights = tl.exp2(b_scores - along(b_base, ROW_AXIS))
        if KEYS_FIRST:
            b_sums = b_sums * b_shrink[None, None, :] + tl.sum(tl.sum(tl.reshape(b_weights, PARTS), 2), 0)
        else:
            b_sums = b_sums * b_shrink + tl.sum(b_weights, 1)
        b_output *= along(b_shrink, ROW_AXIS)
        if VALUE_SCALE == "token":
            b_weights *= along(tl.load(p_value_scale + b_cache, mask=m_key, other=0.0), KEY_AXIS)
        if VALUE_KIND is None:
            b_value = tl.load(value + o_value_tile, mask=m_value_tile, other=0.0)
            b_output = multiply(b_value, b_weights.to(b_value.dtype), b_output, KEYS_FIRST, PRECISION)
        else:
            b_even, b_odd = widen_pairs(tl.load(p_value_pairs + o_value_tile, mask=m_value_tile, other=0), VALUE_KIND,
                                        MACHINE)
            b_weights = b_weights.to(tl.float16)
            b_output_odd *= along(b_shrink, ROW_AXIS)
            b_output = multiply(b_even, b_weights, b_output, KEYS_FIRST, PRECISION)
            b_output_odd = multiply(b_odd, b_weights, b_output_odd, KEYS_FIRST, PRECISION)
        b_max = b_new_max

    b_sum = tl.sum(tl.sum(b_sums, 0), 0) if KEYS_FIRST else b_sums
    if WHOLE and SINKS:
        # The sink adds to the softmax's denominator but has no value.
        b_sink = tl.load(p_sinks + key_head * GROUP + o_row % GROUP) * LOG2_E
        b_new_max = tl.maximum(b_max, b_sink)
        # A sink may be -inf, too.
        b_base = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
        b_shrink = tl.exp2(b_max - b_base)
        b_sum = b_sum * b_shrink + tl.exp2(b_sink - b_base)
        b_output *= along(b_shrink, ROW_AXIS)
        if VALUE_KIND is not None:
            b_output_odd *= along(b_shrink, ROW_AXIS)
        b_max = b_new_max
    b_norm = tl.where(b_sum == 0, 0.0, 1.0 / b_sum)
    if VALUE_SCALE == "head":
        b_norm *= tl.load(p_value_scale + batch * KEY_HEADS + key_head)
    b_log_sum = tl.where(b_sum == 0, float("-inf"), b_max + tl.log2(b_sum))
    m_there = o_row < QUERY_TOKENS * GROUP
    if WHOLE:
        target = output
        b_norm = tl.where(m_row, b_norm, 0.0)
        m_store = m_there
        tl.store(p_log_sum + b_place, tl.where(m_row, b_log_sum * LOG_2, float("-inf")), mask=m_there)
    else:
        target = p_part
        # Parts of rows that saw no key are not stored, because the merge ignores them.
        m_store = m_row & (b_sum != 0)
        b_place += split.to(tl.int64) * tl.num_programs(2) * (QUERY_TOKENS * QUERY_HEADS)
        tl.store(p_part_sum + b_place, tl.where(m_row, b_log_sum, float("-inf")), mask=m_there)
    b_norm = along(b_norm, ROW_AXIS)
    store_output(target, b_place, o_value * VALUE_STEP, b_output * b_norm, m_store, VALUE_DIM, ROW_AXIS)
    if VALUE_KIND is not None:
        store_output(target, b_place, o_value * 2 + 1, b_output_odd * b_norm, m_store, VALUE_DIM, ROW_AXIS)


@triton.jit
def merge_row(p_part, p_part_sum, p_query_lengths, p_sinks, output, p_log_sum, row, rows, num_splits,
              QUERY_TOKENS: tl.constexpr, QUERY_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr,
              VALUE_COLUMNS: tl.constexpr, SPLITS: tl.constexpr, QUERY_LENGTHS: tl.constexpr, SINKS: tl.constexpr):
    """Merge the parts of one row of [batch, QUERY_TOKENS, QUERY_HEADS] in a fixed order and store the result."""
    o_value = tl.arange(0, VALUE_COLUMNS)
    m_value = o_value < VALUE_DIM
    largest = float("-inf")
    if SINKS:
        largest = tl.load(p_sinks + row % QUERY_HEADS) * LOG2_E
        if QUERY_LENGTHS:
            # Rows without a query have no sink.
            token = row // QUERY_HEADS % QUERY_TOKENS
            queries = tl.load(p_query_lengths + row // (QUERY_HEADS * QUERY_TOKENS))
            largest = tl.where(token < queries, largest, float("-inf"))
    total = tl.where(largest == float("-inf"), 0.0, 1.0)
    b_output = tl.zeros([VALUE_COLUMNS], tl.float32)
    for first in range(0, num_splits, SPLITS):
        o_split = first + tl.arange(0, SPLITS)
        o_part = o_split.to(tl.int64) * rows + row
        m_split = o_split < num_splits
        b_log = tl.load(p_part_sum + o_part, mask=m_split, other=float("-inf"))
        # Parts are loaded even if they were not stored, so that the load need not wait for the sums.
        b_part = tl.load(p_part + o_part[:, None] * VALUE_DIM + o_value[None, :],
                         mask=m_split[:, None] & m_value[None, :], other=0.0)
        new_largest = tl.maximum(largest, tl.max(b_log, 0))
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        shrink = tl.exp2(largest - base)
        b_weight = tl.exp2(b_log - base)
        # Discard parts that were not stored. A NaN in the sums still propagates.
        b_part = tl.where((b_log == float("-inf"))[:, None], 0.0, b_part)
        b_output = b_output * shrink + tl.sum(b_part * b_weight[:, None], 0)
        total = total * shrink + tl.sum(b_weight, 0)
        largest = new_largest
    norm = tl.where(total == 0, 0.0, 1.0 / total)
    tl.store(output + row * VALUE_DIM + o_value, (b_output * norm).to(output.dtype.element_ty), mask=m_value)
    # `tl.maximum` drops NaN. For a row of NaN scores `largest` is still -inf, and the total is NaN.
    log_sum = tl.where(total == 0, float("-inf"), (largest + tl.log2(total)) * LOG_2)
    tl.store(p_log_sum + row, log_sum)


@triton.jit
def paged_merge(p_part, p_part_sum, p_query_lengths, p_sinks, output, p_log_sum, rows, num_splits,
                QUERY_TOKENS: tl.constexpr, QUERY_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr,
                VALUE_COLUMNS: tl.constexpr, SPLITS: tl.constexpr, QUERY_LENGTHS: tl.constexpr, SINKS: tl.constexpr):
    """Merge the splits of one row in each program."""
    merge_row(p_part, p_part_sum, p_query_lengths, p_sinks, output, p_log_sum, tl.program_id(0).to(tl.int64), rows,
              num_splits, QUERY_TOKENS, QUERY_HEADS, VALUE_DIM, VALUE_COLUMNS, SPLITS, QUERY_LENGTHS, SINKS)
