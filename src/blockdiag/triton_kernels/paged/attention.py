"""Kernels of paged attention: queries attend to one split of a sequence's keys, then the splits are merged.

They are tuned for few queries. On Hopper, `hopper_prompts`, `hopper_eight_bit_prompts` and `hopper_latent` replace them
for some prompts and latent caches; all other calls are computed here.

The queries of all heads that share a key head are rows of one tile, so the cache is read once. Few rows become the
right operand of products, after the keys or the transposed values. Tensor cores accept 8 rows there. Each warp then
holds its own keys, and widens keys of eight bits once.

Head dimensions beyond 256 are multiplied in two parts, each a power of two. A latent cache has no values of its own:
they are the first columns of its keys, and one tile in shared memory is an operand of both products.

Each split writes a normalised float32 output and its base-2 log-sum-exp. A second kernel merges the splits in a fixed
order.
"""

# Device code is laid out by hand: one argument per line would hide what a kernel does.
# fmt: off

import triton
import triton.language as tl

from blockdiag.triton_kernels.paged.arguments import MergeArrays, SplitArrays, SplitScalars
from blockdiag.triton_kernels.paged.places import (
    GRAIN,
    entry_of,
    place_of,
    rows_of_heads,
    split_bounds,
)

LOG_2 = tl.constexpr(0.6931471805599453)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def cache_rows(arrays, scalars, o_key, m_key, batch, SHAPE: tl.constexpr, SPAN: tl.constexpr):
    """Return the pool rows of keys, int64. Out-of-range page numbers are clamped.

    SPAN is the alignment of the tile: if it divides the page size, the whole tile lies in one page.
    """
    PAGE_SIZE: tl.constexpr = SHAPE.page_size
    if SHAPE.has_page_table:
        p_pages = arrays.page_table + batch.to(tl.int64) * scalars.max_pages
        if PAGE_SIZE % SPAN == 0:
            # The whole tile lies in one page.
            b_slot = tl.min(o_key, 0) // PAGE_SIZE
            b_page = tl.load(p_pages + tl.minimum(b_slot, scalars.max_pages - 1))
        else:
            b_page = tl.load(p_pages + o_key // PAGE_SIZE, mask=m_key, other=0)
        b_page = tl.minimum(tl.maximum(b_page, 0), scalars.num_pages - 1)
        return b_page.to(tl.int64) * PAGE_SIZE + o_key % PAGE_SIZE
    return batch.to(tl.int64) * PAGE_SIZE + o_key


@triton.jit
def tile_row(arrays, scalars, at, batch, SHAPE: tl.constexpr):
    """Return the pool row, int64, of the first key of a tile that lies in one page.

    The rows of its keys are this scalar plus constants, so that addresses take few registers.
    """
    PAGE_SIZE: tl.constexpr = SHAPE.page_size
    if SHAPE.has_page_table:
        slot = tl.minimum(at // PAGE_SIZE, scalars.max_pages - 1)
        page = tl.load(arrays.page_table + batch.to(tl.int64) * scalars.max_pages + slot)
        page = tl.minimum(tl.maximum(page, 0), scalars.num_pages - 1)
        return page.to(tl.int64) * PAGE_SIZE + at % PAGE_SIZE
    else:
        return batch.to(tl.int64) * PAGE_SIZE + at


@triton.jit
def widen_byte(b_byte, KIND: tl.constexpr):
    """Convert eight-bit numbers, held as the low bytes of unsigned 16-bit integers, to float16."""
    return b_byte.to(tl.uint8).to(KIND, bitcast=True).to(tl.float16)


@triton.jit
def widen_pairs(b_pair, KIND: tl.constexpr, MACHINE: tl.constexpr):
    """Convert pairs of eight-bit numbers, held as unsigned 16-bit integers, to two float16 blocks.

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
    elif MACHINE and KIND.is_int8():
        # The float16 with the upper byte 0x64 and the lower byte b is 1024 + b. With the sign bit of an integer x
        # flipped, b is x + 128, so that 1152 (0x6480) is subtracted.
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 shifted, even, odd, offset;
            mov.b32 offset, 0x64806480;
            xor.b32 shifted, $2, 0x80808080;
            prmt.b32 even, shifted, 0x64646464, 0x4240;
            prmt.b32 odd, shifted, 0x64646464, 0x4341;
            sub.rn.f16x2 $0, even, offset;
            sub.rn.f16x2 $1, odd, offset;
            }
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
def seen_keys(o_key, m_key, b_position, SHAPE: tl.constexpr, OPTIONS: tl.constexpr, KEY_AXIS: tl.constexpr):
    """Return which rows see which keys of a tile."""
    ROW_AXIS: tl.constexpr = 1 - KEY_AXIS
    m_seen = along(m_key, KEY_AXIS)
    if OPTIONS.is_causal and SHAPE.query_tokens > 1:
        m_seen = m_seen & (along(o_key, KEY_AXIS) <= along(b_position, ROW_AXIS))
    elif OPTIONS.right is not None:
        m_seen = m_seen & (along(o_key, KEY_AXIS) <= along(b_position + OPTIONS.right, ROW_AXIS))
    if OPTIONS.left is not None:
        m_seen = m_seen & (along(o_key, KEY_AXIS) >= along(b_position - OPTIONS.left, ROW_AXIS))
    return m_seen


@triton.jit
def multiply(b_cache, b_rows, b_sum, TILE: tl.constexpr):
    """Return `b_sum` plus the product of keys or values and rows, in the tile's order."""
    if TILE.is_keys_first:
        return tl.dot(b_cache, b_rows, b_sum, input_precision=TILE.precision)
    else:
        return tl.dot(b_rows, b_cache, b_sum, input_precision=TILE.precision)


@triton.jit
def add_scores(b_cache, b_rows, b_scores, b_factor, TILE: tl.constexpr):
    """Return `b_scores` plus the product of some columns of keys and queries; `b_scores` is None for the first columns.

    With `masks_edges`, the scores are multiplied by their factor here. The compiler would otherwise accumulate the
    second product onto the first, and each warp group would compute all scores. A factor on each prevents this.
    """
    if TILE.masks_edges:
        b_product = multiply(b_cache, b_rows, None, TILE) * along(b_factor, 1 if TILE.is_keys_first else 0)
        if b_scores is None:
            return b_product
        else:
            return b_scores + b_product
    else:
        return multiply(b_cache, b_rows, b_scores, TILE)


@triton.jit
def scaled_query(b_query, b_power, ROW_AXIS: tl.constexpr):
    """Divide each row of queries by its power of two and convert it to float16."""
    return (b_query.to(tl.float32) / along(b_power, ROW_AXIS)).to(tl.float16)


@triton.jit
def load_query(query, b_place, o_column, m_row, SHAPE: tl.constexpr, ROW_AXIS: tl.constexpr):
    """Load some columns of a tile of queries; zero where masked."""
    b_at = along(b_place, ROW_AXIS) * SHAPE.head_dim + along(o_column, 1 - ROW_AXIS)
    m_column = o_column < SHAPE.head_dim
    return tl.load(query + b_at, mask=along(m_row, ROW_AXIS) & along(m_column, 1 - ROW_AXIS), other=0.0)


@triton.jit
def store_output(target, b_place, o_column, b_output, m_row, SHAPE: tl.constexpr, ROW_AXIS: tl.constexpr):
    """Store some columns of a tile of results."""
    b_at = along(b_place, ROW_AXIS) * SHAPE.value_dim + along(o_column, 1 - ROW_AXIS)
    tl.store(target + b_at, b_output.to(target.dtype.element_ty),
             mask=along(m_row, ROW_AXIS) & along(o_column < SHAPE.value_dim, 1 - ROW_AXIS))


@triton.jit
def paged_splits(arrays: SplitArrays, scalars: SplitScalars, SHAPE: tl.constexpr, TILE: tl.constexpr,
                 OPTIONS: tl.constexpr):
    """Compute the attention of a tile of rows to the keys of one split.

    With a single split (`is_whole`) the kernel writes the final results. Otherwise it writes partial results
    [split, batch, query_tokens, query_heads, value_dim].

    SHAPE is a PagedShape, TILE a SplitTile, OPTIONS a SplitOptions.
    """
    ROWS: tl.constexpr = TILE.rows
    KEYS: tl.constexpr = TILE.keys
    GROUP: tl.constexpr = SHAPE.group_size
    LEFT: tl.constexpr = OPTIONS.left
    RIGHT: tl.constexpr = OPTIONS.right
    KEY_KIND: tl.constexpr = OPTIONS.key_kind
    VALUE_KIND: tl.constexpr = OPTIONS.value_kind
    # Axes of the scores. Keys have their columns along ROW_AXIS; queries and results have theirs along KEY_AXIS.
    KEY_AXIS: tl.constexpr = 0 if TILE.is_keys_first else 1
    ROW_AXIS: tl.constexpr = 1 - KEY_AXIS
    # An unaligned tile may lie in two pages, whatever the page size is. page_size + 1 never divides page_size.
    SPAN: tl.constexpr = KEYS if TILE.is_aligned else SHAPE.page_size + 1
    part = tl.program_id(0)
    key_head = tl.program_id(1)
    batch = tl.program_id(2)
    entries = tl.num_programs(2)
    if SHAPE.is_long:
        part = tl.program_id(2)
        batch = tl.program_id(0)
        entries = tl.num_programs(0)
    split = part // TILE.row_tiles
    sequence, keys, queries, written, first_query, query_row = place_of(arrays, scalars, batch, SHAPE)
    if OPTIONS.is_causal and (SHAPE.entries != "sequences"):
        # The keys after a tile's last query are left out, so that splits divide the others.
        keys = tl.minimum(keys, tl.maximum(first_query + queries, 0))
    first_row = part % TILE.row_tiles * ROWS
    o_row = first_row + tl.arange(0, ROWS)
    m_row = o_row < queries * GROUP
    b_position = first_query + o_row // GROUP
    # The first key that any query of the sequence sees. Only visible keys are divided among the splits.
    start = 0
    if LEFT is not None:
        start = tl.maximum(first_query - LEFT, 0) // GRAIN * GRAIN
    first, end = split_bounds(split, scalars.num_splits, scalars.split_size, keys, start)
    first_position = first_query + first_row // GROUP
    last_position = first_query + tl.minimum((first_row + ROWS - 1) // GROUP, queries - 1)
    if LEFT is not None:
        first = tl.maximum(first, tl.maximum(first_position - LEFT, 0) // GRAIN * GRAIN)
    if OPTIONS.is_causal:
        end = tl.minimum(end, last_position + 1)
    elif RIGHT is not None:
        end = tl.minimum(end, last_position + RIGHT + 1)
    if SHAPE.entries != "sequences":
        # Tiles may have fewer rows than programs for them.
        end = tl.where(first_row < queries * GROUP, end, first)

    b_place = rows_of_heads(o_row, query_row, key_head, SHAPE)
    # Even and odd columns of eight-bit keys and values are multiplied separately.
    KEY_STEP: tl.constexpr = 1 if KEY_KIND is None else 2
    VALUE_STEP: tl.constexpr = 1 if VALUE_KIND is None else 2
    o_column = tl.arange(0, TILE.columns // KEY_STEP)
    m_column = o_column < SHAPE.head_dim // KEY_STEP
    o_value = tl.arange(0, TILE.value_columns // VALUE_STEP)
    m_value = o_value < SHAPE.value_dim // VALUE_STEP
    b_query = load_query(arrays.query, b_place, o_column * KEY_STEP, m_row, SHAPE, ROW_AXIS)
    if TILE.more_columns > 0:
        o_more = (TILE.columns // KEY_STEP) + tl.arange(0, TILE.more_columns // KEY_STEP)
        m_more = o_more < SHAPE.head_dim // KEY_STEP
        b_query_more = load_query(arrays.query, b_place, o_more * KEY_STEP, m_row, SHAPE, ROW_AXIS)
    b_factor = tl.zeros([ROWS], tl.float32) + scalars.scale
    if OPTIONS.has_score_scale:
        b_factor *= tl.load(arrays.score_scale + sequence * SHAPE.key_heads + key_head)
    if KEY_KIND is not None:
        # float16 represents all eight-bit numbers. Queries are scaled by a power of two to a maximum below 2, so that
        # they fit float16, too.
        b_wide = b_query.to(tl.float32)
        b_wide_odd = load_query(arrays.query, b_place, o_column * 2 + 1, m_row, SHAPE, ROW_AXIS).to(tl.float32)
        b_largest = tl.maximum(tl.max(tl.abs(b_wide), KEY_AXIS), tl.max(tl.abs(b_wide_odd), KEY_AXIS))
        if TILE.more_columns > 0:
            b_query_more_odd = load_query(arrays.query, b_place, o_more * 2 + 1, m_row, SHAPE, ROW_AXIS)
            b_largest = tl.maximum(b_largest, tl.max(tl.abs(b_query_more.to(tl.float32)), KEY_AXIS))
            b_largest = tl.maximum(b_largest, tl.max(tl.abs(b_query_more_odd.to(tl.float32)), KEY_AXIS))
        b_power = tl.exp2(tl.floor(tl.log2(tl.where((b_largest > 0) & (b_largest < float("inf")), b_largest, 1.0))))
        b_query = (b_wide / along(b_power, ROW_AXIS)).to(tl.float16)
        b_query_odd = (b_wide_odd / along(b_power, ROW_AXIS)).to(tl.float16)
        if TILE.more_columns > 0:
            b_query_more = scaled_query(b_query_more, b_power, ROW_AXIS)
            b_query_more_odd = scaled_query(b_query_more_odd, b_power, ROW_AXIS)
        b_factor *= b_power
        p_key_pairs = arrays.key.to(tl.pointer_type(tl.uint16))
    LINES: tl.constexpr = TILE.value_columns // VALUE_STEP
    OUTPUT: tl.constexpr = [LINES, ROWS] if TILE.is_keys_first else [ROWS, LINES]
    if VALUE_KIND is not None:
        if SHAPE.has_values:
            p_value_pairs = arrays.value.to(tl.pointer_type(tl.uint16))
        b_output_odd = tl.zeros(OUTPUT, tl.float32)
    if not OPTIONS.has_soft_cap:
        b_factor *= LOG2_E
    b_output = tl.zeros(OUTPUT, tl.float32)
    b_max = tl.zeros([ROWS], tl.float32) + float("-inf")
    # If keys come first, each thread accumulates its own part of a row's sum. The parts are reduced at the end.
    PARTS: tl.constexpr = [KEYS // (16 * TILE.num_warps), TILE.num_warps, 2, 8, ROWS]
    if TILE.is_keys_first:
        b_sums = tl.zeros([TILE.num_warps, 8, ROWS], tl.float32)
    else:
        b_sums = tl.zeros([ROWS], tl.float32)
    for at in tl.range(first, end, KEYS, num_stages=TILE.loop_stages):
        o_key = at + tl.arange(0, KEYS)
        m_key = o_key < end
        if TILE.masks_edges and SHAPE.page_size % SPAN == 0:
            b_cache = tile_row(arrays, scalars, at, sequence, SHAPE) + tl.arange(0, KEYS)
        else:
            b_cache = cache_rows(arrays, scalars, o_key, m_key, sequence, SHAPE, SPAN)
        b_cache = b_cache * SHAPE.key_heads + key_head
        m_key_tile = along(m_key, KEY_AXIS) & along(m_column, ROW_AXIS)
        m_value_tile = along(m_key, ROW_AXIS) & along(m_value, KEY_AXIS)
        o_key_tile = along(b_cache, KEY_AXIS) * (SHAPE.head_dim // KEY_STEP) + along(o_column, ROW_AXIS)
        o_value_tile = along(b_cache, ROW_AXIS) * (SHAPE.value_dim // VALUE_STEP) + along(o_value, KEY_AXIS)
        if KEY_KIND is None:
            b_key = tl.load(arrays.key + o_key_tile, mask=m_key_tile, other=0.0)
            b_scores = add_scores(b_key, b_query, None, b_factor, TILE)
        else:
            b_key = tl.load(p_key_pairs + o_key_tile, mask=m_key_tile, other=0)
            b_even, b_odd = widen_pairs(b_key, KEY_KIND, OPTIONS.has_machine_code)
            b_scores = add_scores(b_even, b_query, None, b_factor, TILE)
            b_scores = add_scores(b_odd, b_query_odd, b_scores, b_factor, TILE)
        if TILE.more_columns > 0:
            m_more_tile = along(m_key, KEY_AXIS) & along(m_more, ROW_AXIS)
            o_more_tile = along(b_cache, KEY_AXIS) * (SHAPE.head_dim // KEY_STEP) + along(o_more, ROW_AXIS)
            if KEY_KIND is None:
                b_more = tl.load(arrays.key + o_more_tile, mask=m_more_tile, other=0.0)
                b_scores = add_scores(b_more, b_query_more, b_scores, b_factor, TILE)
            else:
                b_more = tl.load(p_key_pairs + o_more_tile, mask=m_more_tile, other=0)
                b_more_even, b_more_odd = widen_pairs(b_more, KEY_KIND, OPTIONS.has_machine_code)
                b_scores = add_scores(b_more_even, b_query_more, b_scores, b_factor, TILE)
                b_scores = add_scores(b_more_odd, b_query_more_odd, b_scores, b_factor, TILE)
        if not TILE.masks_edges:
            b_scores *= along(b_factor, ROW_AXIS)
        if OPTIONS.has_key_scale:
            b_key_scale = tl.load(arrays.key_scale + b_cache, mask=m_key, other=0.0)
            b_scores *= along(b_key_scale, KEY_AXIS)
        if OPTIONS.has_soft_cap:
            # tanh(x) = 1 - 2 / (1 + e^2x), which is accurate enough at both ends.
            b_exp = tl.exp2(b_scores * (2.0 * LOG2_E / scalars.soft_cap))
            b_scores = (1.0 - 2.0 / (1.0 + b_exp)) * (scalars.soft_cap * LOG2_E)
        if TILE.masks_edges:
            # The compiler arranges warps alike for both products of a chain, so each warp group would compute all
            # scores. A branch between the products ends the chain, and the warp groups divide the keys.
            is_edge = at + KEYS > end
            if OPTIONS.is_causal and SHAPE.query_tokens > 1:
                is_edge = is_edge | (at + KEYS - 1 > first_position)
            elif RIGHT is not None:
                is_edge = is_edge | (at + KEYS - 1 > first_position + RIGHT)
            if LEFT is not None:
                is_edge = is_edge | (at < last_position - LEFT)
            if is_edge:
                m_seen = seen_keys(o_key, m_key, b_position, SHAPE, OPTIONS, KEY_AXIS)
                b_scores = tl.where(m_seen, b_scores, float("-inf"))
        else:
            m_seen = seen_keys(o_key, m_key, b_position, SHAPE, OPTIONS, KEY_AXIS)
            b_scores = tl.where(m_seen, b_scores, float("-inf"))
        b_new_max = tl.maximum(b_max, tl.max(b_scores, KEY_AXIS))
        # For rows that have seen no key yet, -inf - -inf would be NaN.
        b_base = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
        b_shrink = tl.exp2(b_max - b_base)
        b_weights = tl.exp2(b_scores - along(b_base, ROW_AXIS))
        if TILE.is_keys_first:
            b_sums = b_sums * b_shrink[None, None, :] + tl.sum(tl.sum(tl.reshape(b_weights, PARTS), 2), 0)
        else:
            b_sums = b_sums * b_shrink + tl.sum(b_weights, 1)
        b_output *= along(b_shrink, ROW_AXIS)
        if OPTIONS.value_scale == "token":
            if SHAPE.has_values:
                b_weights *= along(tl.load(arrays.value_scale + b_cache, mask=m_key, other=0.0), KEY_AXIS)
            else:
                b_weights *= along(b_key_scale, KEY_AXIS)
        if SHAPE.has_values:
            if VALUE_KIND is None:
                b_value = tl.load(arrays.value + o_value_tile, mask=m_value_tile, other=0.0)
            else:
                b_value = tl.load(p_value_pairs + o_value_tile, mask=m_value_tile, other=0)
        else:
            b_value = tl.trans(b_key)
        if VALUE_KIND is None:
            b_output = multiply(b_value, b_weights.to(b_value.dtype), b_output, TILE)
        else:
            if SHAPE.has_values or TILE.is_keys_first:
                b_even, b_odd = widen_pairs(b_value, VALUE_KIND, OPTIONS.has_machine_code)
            else:
                # The right operand of products is in shared memory, so both products take one tile of wide numbers.
                b_even, b_odd = tl.trans(b_even), tl.trans(b_odd)
            b_weights = b_weights.to(tl.float16)
            b_output_odd *= along(b_shrink, ROW_AXIS)
            b_output = multiply(b_even, b_weights, b_output, TILE)
            b_output_odd = multiply(b_odd, b_weights, b_output_odd, TILE)
        b_max = b_new_max

    b_sum = tl.sum(tl.sum(b_sums, 0), 0) if TILE.is_keys_first else b_sums
    if OPTIONS.is_whole and OPTIONS.has_sinks:
        # The sink adds to the softmax's denominator but has no value.
        b_sink = tl.load(arrays.sinks + key_head * GROUP + o_row % GROUP) * LOG2_E
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
    if OPTIONS.value_scale == "head":
        b_norm *= tl.load(arrays.value_scale + sequence * SHAPE.key_heads + key_head)
    b_log_sum = tl.where(b_sum == 0, float("-inf"), b_max + tl.log2(b_sum))
    m_there = o_row < written * GROUP
    if OPTIONS.is_whole:
        target = arrays.output
        b_norm = tl.where(m_row, b_norm, 0.0)
        m_store = m_there
        tl.store(arrays.log_sum + b_place, tl.where(m_row, b_log_sum * LOG_2, float("-inf")), mask=m_there)
    else:
        target = arrays.part
        # Parts of rows that saw no key are not stored, because the merge ignores them.
        m_store = m_row & (b_sum != 0)
        if SHAPE.entries != "sequences":
            b_place = rows_of_heads(o_row, batch.to(tl.int64) * SHAPE.query_tokens, key_head, SHAPE)
        b_place += split.to(tl.int64) * entries * (SHAPE.query_tokens * SHAPE.query_heads)
        tl.store(arrays.part_sum + b_place, tl.where(m_row, b_log_sum, float("-inf")), mask=m_there)
    b_norm = along(b_norm, ROW_AXIS)
    store_output(target, b_place, o_value * VALUE_STEP, b_output * b_norm, m_store, SHAPE, ROW_AXIS)
    if VALUE_KIND is not None:
        store_output(target, b_place, o_value * 2 + 1, b_output_odd * b_norm, m_store, SHAPE, ROW_AXIS)


@triton.jit
def merge_row(arrays, row, rows, num_parts, num_tiles, MERGE: tl.constexpr):
    """Merge the parts of one row of [batch, query_tokens, query_heads] in a fixed order and store the result.

    With a table of tiles, it is stored in the row's place among the packed ones. MERGE is a MergeConstants.
    """
    PARTS: tl.constexpr = MERGE.parts
    VALUE_COLUMNS: tl.constexpr = MERGE.value_columns
    o_value = tl.arange(0, VALUE_COLUMNS)
    m_value = o_value < MERGE.value_dim
    place = row
    is_there = True
    if MERGE.entries != "sequences":
        token = (row // MERGE.query_heads % MERGE.query_tokens).to(tl.int32)
        p_tile = entry_of(arrays, row // (MERGE.query_heads * MERGE.query_tokens), num_tiles, MERGE.entries)
        written = tl.load(p_tile + 1)
        is_there = token < written
        if MERGE.most is not None:
            is_there = is_there & (written <= MERGE.most)
        is_inside = tl.load(p_tile + 3) >= 0
        place = (tl.load(p_tile).to(tl.int64) + token) * MERGE.query_heads + row % MERGE.query_heads
        num_parts = tl.where(is_there & is_inside, num_parts, 0)
        m_value = m_value & is_there
    largest = float("-inf")
    if MERGE.has_sinks:
        largest = tl.load(arrays.sinks + row % MERGE.query_heads) * LOG2_E
        if MERGE.has_query_lengths:
            # Rows without a query have no sink.
            token = row // MERGE.query_heads % MERGE.query_tokens
            queries = tl.load(arrays.query_lengths + row // (MERGE.query_heads * MERGE.query_tokens))
            largest = tl.where(token < queries, largest, float("-inf"))
        if MERGE.entries != "sequences":
            largest = tl.where(is_inside, largest, float("-inf"))
    total = tl.where(largest == float("-inf"), 0.0, 1.0)
    b_output = tl.zeros([VALUE_COLUMNS], tl.float32)
    for first in range(0, num_parts, PARTS):
        o_split = first + tl.arange(0, PARTS)
        o_part = o_split.to(tl.int64) * rows + row
        m_split = o_split < num_parts
        b_log = tl.load(arrays.part_sum + o_part, mask=m_split, other=float("-inf"))
        # Parts are loaded even if they were not stored, so that the load need not wait for the sums.
        b_part = tl.load(arrays.part + o_part[:, None] * MERGE.value_dim + o_value[None, :],
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
    p_output = arrays.output + place * MERGE.value_dim + o_value
    tl.store(p_output, (b_output * norm).to(arrays.output.dtype.element_ty), mask=m_value)
    # `tl.maximum` drops NaN. For a row of NaN scores `largest` is still -inf, and the total is NaN.
    log_sum = tl.where(total == 0, float("-inf"), (largest + tl.log2(total)) * LOG_2)
    tl.store(arrays.log_sum + place, log_sum, mask=is_there)


@triton.jit
def paged_merge(arrays: MergeArrays, rows, num_splits, num_tiles, MERGE: tl.constexpr):
    """Merge the splits of one row in each program."""
    merge_row(arrays, tl.program_id(0).to(tl.int64), rows, num_splits, num_tiles, MERGE)
