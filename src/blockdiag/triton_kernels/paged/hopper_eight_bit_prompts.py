"""Kernel in Gluon for Hopper: eight-bit prompts attend to eight-bit paged keys and values, with eight-bit products.

It differs from `hopper_prompts` in this:

- Values are transposed, see `parts.transposed_tiles`.
- The copy engine loads keys and values in boxes of rows that are neighbours in a page. Threads copy rows of pages that
  have fewer than 8, and where tokens have scales.
- Weights are rounded to e4m3. They are relative to the largest weight of the row, times a power of two that uses the
  whole range.
- The tensor cores keep about 14 bits of their sums, so the products of each chunk are added to float32 sums.

| warps | function | work |
|---|---|---|
| 4 + 4 | `compute` | 64 rows each: products, softmax, results |
| 4 | `transpose` | copy queries, transpose values |
| 1 | `load` | take items, have the copy engine load keys and values |

Without boxes, there are four warps that do all the work of the last two: `copy`.

Scales of tokens multiply products of queries and keys, or weights before they are rounded. These weights then have a
unit of their own for each row: the largest one so far becomes 256. Tokens that a row does not see have no influence.
"""

# Device code is laid out by hand: one argument per line would hide what a kernel does.
# fmt: off

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)

from blockdiag.triton_kernels.dense.hopper_eight_bit_forward import free_values, start_values
from blockdiag.triton_kernels.dense.hopper_forward import (
    AHEAD,
    WARPS,
    announce,
    next_item,
    start_scores,
)
from blockdiag.triton_kernels.launch.gluon_names import load_async, reinterpret, thread_barrier, tma_load
from blockdiag.triton_kernels.paged.arguments import PromptArrays, PromptScalars
from blockdiag.triton_kernels.paged.hopper_prompts import (
    COPYING,
    PromptShape,
    begin_chunk,
    chunk_of,
    chunks_of,
    find_pages,
    finish_rows,
    head_rows,
    keys_of_chunk,
    load_keys,
    load_queries,
    load_values,
    per_query,
    place_of,
    plain_score,
    pool_rows,
    read_tile,
    score,
    take_item,
)
from blockdiag.triton_kernels.parts.hopper_tiles import make_barriers
from blockdiag.triton_kernels.parts.resident_tiles import partial_sums
from blockdiag.triton_kernels.parts.transposed_tiles import rounded, transpose_chunk

# Weights are multiplied by 2 to this power: 256 is below 448, the largest number of e4m3.
OFFSET = gl.constexpr(8.0)
LARGEST = gl.constexpr(256.0)
# Replaces factors that would make exponents or quotients NaN.
TINY = gl.constexpr(1e-37)
# Exponents below this number may be differences of products that have been rounded: weights then stay below 448.
EXACT = gl.constexpr(2.0**22)


@dataclass(frozen=True, kw_only=True)
class EightBitShape(PromptShape):
    """Static properties of a launch.

    Attributes:
        box: rows of a box of keys or values that are neighbours in a page, which the copy engine loads; 0 if threads
            copy rows.
        most_score: a bound of scores without scales.
        has_score_scale: whether there is a factor of scores for each sequence and key head.
        has_key_scale: whether each token of the pages has a factor of keys.
        value_scale: what a factor of values belongs to.
    """

    box: int
    most_score: float
    has_score_scale: bool
    has_key_scale: bool
    value_scale: Literal["none", "head", "token"]


class Memory(NamedTuple):
    """Shared memory and barriers of a program.

    Attributes:
        value: chunks of values as they are in the pages.
        turned: transposed chunks of values.
        results: results of a group of warps on their way to memory.
        key_scale, value_scale: scales of the tokens of a chunk.
        row_numbers: rows in the pool of the keys of a chunk, or rows of queries.
        items, masked, live: see `dense.hopper_forward.ForwardMemory`.
    """

    query: Any
    key: Any
    value: Any
    turned: Any
    results: Any
    key_scale: Any
    value_scale: Any
    row_numbers: Any
    items: Any
    masked: Any
    live: Any
    query_full: Any
    query_empty: Any
    key_full: Any
    key_empty: Any
    staged: Any
    value_full: Any
    value_empty: Any
    staged_empty: Any
    item_full: Any
    item_empty: Any


@gluon.jit
def zero_values(value, rows):
    """Zero the rows of a chunk from `rows` on. They are no keys of the sequence, and 0 * NaN would be NaN."""
    ROWS: gl.constexpr = value.shape[0]
    WORDS: gl.constexpr = value.shape[1] // 4
    LINES: gl.constexpr = gl.BlockedLayout([1, 4], [128 // WORDS, WORDS // 4], [gl.num_warps(), 1], [1, 0])
    words = reinterpret(value, gl.int32, [ROWS, WORDS],
                        gl.NVMMASharedLayout(swizzle_byte_width=value.shape[1], element_bitwidth=32, rank=2))
    # All rows at once would not be in registers.
    EACH: gl.constexpr = 32
    o_row = gl.expand_dims(gl.arange(0, EACH, gl.SliceLayout(1, LINES)), 1)
    for i in gl.static_range(ROWS // EACH):
        part = words.slice(i * EACH, EACH)
        b_word = part.load(LINES)
        # Each thread writes only what it has read. The compiler would put a barrier here anyway.
        thread_barrier()
        part.store(gl.where(i * EACH + o_row < rows, b_word, 0))
    thread_barrier()


@gluon.jit
def turn_values(memory, number, rows, SHAPE: gl.constexpr):
    """Transpose chunk `number` of values, once it has arrived and its slot is free. `rows` of its keys exist."""
    SLOTS: gl.constexpr = SHAPE.slots
    slot = number % SLOTS
    mbarrier.wait(memory.staged.index(slot), number // SLOTS % 2)
    if SHAPE.box > 0:
        if rows < SHAPE.chunk:
            zero_values(memory.value.index(slot), rows)
    mbarrier.wait(memory.value_empty.index(slot), number // SLOTS % 2 ^ 1)
    transpose_chunk(memory.value.index(slot), memory.turned.index(slot),
                    gl.NVMMASharedLayout(swizzle_byte_width=SHAPE.columns, element_bitwidth=32, rank=2))
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(memory.value_full.index(slot), count=1)
    if SHAPE.box > 0:
        mbarrier.arrive(memory.staged_empty.index(slot), count=1)


@gluon.jit
def copy_scales(memory, arrays, place, b_row, key_head, SHAPE: gl.constexpr):
    """Start copying the scales of a chunk's tokens, 0 for tokens that the sequence does not have."""
    o_scale = gl.maximum(b_row, 0).to(gl.int64) * SHAPE.key_heads + key_head
    if SHAPE.has_key_scale:
        load_async(memory.key_scale.index(place), arrays.key_scale + o_scale, mask=b_row >= 0)
    if SHAPE.value_scale == "token":
        load_async(memory.value_scale.index(place), arrays.value_scale + o_scale, mask=b_row >= 0)


@gluon.jit
def row_of_box(arrays, scalars, key, keys, sequence, SHAPE: gl.constexpr):
    """Return the first row in the pool of the box that begins with `key`; that of the last key for keys beyond."""
    key = gl.maximum(gl.minimum(key, keys - 1), 0)
    page = sequence
    if SHAPE.has_page_table:
        page = gl.load(arrays.page_table + sequence.to(gl.int64) * scalars.max_pages + key // SHAPE.page_size)
    page = gl.minimum(gl.maximum(page, 0), scalars.num_pages - 1)
    return page * SHAPE.page_size + key % SHAPE.page_size // SHAPE.box * SHAPE.box


@gluon.jit
def load_boxes(memory, arrays, boxes, scalars, chunk, keys, sequence, key_head, number, SHAPE: gl.constexpr):
    """Have the copy engine load chunk `number` of the program, with keys beyond the end, if the pool has them."""
    BOX: gl.constexpr = SHAPE.box
    BOXES: gl.constexpr = SHAPE.chunk // BOX
    # Rows of more boxes would not be in registers.
    EACH: gl.constexpr = min(BOXES, 4)
    slot = number % SHAPE.slots
    key_boxes, value_boxes = boxes
    key_full = memory.key_full.index(slot)
    value_full = memory.staged.index(slot)
    mbarrier.wait(memory.key_empty.index(slot), number // SHAPE.slots % 2 ^ 1)
    mbarrier.wait(memory.staged_empty.index(slot), number // SHAPE.slots % 2 ^ 1)
    mbarrier.expect(key_full, SHAPE.chunk * SHAPE.features)
    mbarrier.expect(value_full, SHAPE.chunk * SHAPE.columns)
    for i in gl.static_range(BOXES // EACH):
        rows = ()
        for j in gl.static_range(EACH):
            key = chunk * SHAPE.chunk + (i * EACH + j) * BOX
            rows += (row_of_box(arrays, scalars, key, keys, sequence, SHAPE),)
        for j in gl.static_range(EACH):
            tma_load(key_boxes, [rows[j], key_head * SHAPE.features], key_full,
                     memory.key.index(slot).slice((i * EACH + j) * BOX, BOX))
            tma_load(value_boxes, [rows[j], key_head * SHAPE.columns], value_full,
                     memory.value.index(slot).slice((i * EACH + j) * BOX, BOX))


@gluon.jit
def load(memory, arrays, boxes, scalars, SHAPE: gl.constexpr):
    """Take items, announce them, and load their keys and values in boxes."""
    items = scalars.num_tiles * SHAPE.key_heads
    number = 0
    count = 0
    item = gl.program_id(0)
    while item < items:
        tile, key_head = place_of(item, scalars, SHAPE)
        _row, queries, position, sequence, keys = read_tile(arrays, scalars, tile, SHAPE)
        if queries > 0:
            begin, live, masked_at_end, masked = chunks_of(queries, position, keys, SHAPE)
            announce(memory, count, item, masked, live)
            for at in range(gl.maximum(live, 1)):
                chunk = chunk_of(at, begin, live, masked_at_end)
                load_boxes(memory, arrays, boxes, scalars, chunk, keys, gl.maximum(sequence, 0), key_head, number,
                           SHAPE)
                number += 1
            count += 1
        item = take_item(arrays)
    announce(memory, count, items, 0, 0)


@gluon.jit
def transpose(memory, arrays, scalars, SHAPE: gl.constexpr):
    """Copy the queries of items, and transpose their values."""
    items = scalars.num_tiles * SHAPE.key_heads
    number = 0
    count = 0
    item, _masked, _live = next_item(memory, count)
    while item < items:
        tile, key_head = place_of(item, scalars, SHAPE)
        row, queries, position, _sequence, keys = read_tile(arrays, scalars, tile, SHAPE)
        begin, live, masked_at_end, _masked = chunks_of(queries, position, keys, SHAPE)
        load_queries(memory, memory.row_numbers, arrays, row, queries, key_head, count, SHAPE)
        for at in range(gl.maximum(live, 1)):
            chunk = chunk_of(at, begin, live, masked_at_end)
            turn_values(memory, number, keys - chunk * SHAPE.chunk, SHAPE)
            number += 1
        count += 1
        item, _masked, _live = next_item(memory, count)


@gluon.jit
def copy(memory, arrays, scalars, SHAPE: gl.constexpr):
    """Take items, announce them, copy their queries, keys, values and scales, and transpose the values."""
    items = scalars.num_tiles * SHAPE.key_heads
    number = 0
    count = 0
    item = gl.program_id(0)
    tile, key_head = place_of(item, scalars, SHAPE)
    row, queries, position, sequence, keys = read_tile(arrays, scalars, tile, SHAPE)
    while item < items:
        if queries > 0:
            begin, live, masked_at_end, masked = chunks_of(queries, position, keys, SHAPE)
            sequence = gl.maximum(sequence, 0)
            _chunk, o_key = keys_of_chunk(0, begin, live, masked_at_end, SHAPE)
            b_page = find_pages(arrays, scalars, o_key, keys, sequence, SHAPE)
            announce(memory, count, item, masked, live)
            load_queries(memory, memory.row_numbers, arrays, row, queries, key_head, count, SHAPE)
            visits = gl.maximum(live, 1)
            for at in range(visits):
                b_row = pool_rows(scalars, b_page, o_key, keys, SHAPE)
                begin_chunk(memory, memory.row_numbers, b_row, number, SHAPE)
                copy_scales(memory, arrays, number % SHAPE.slots, b_row, key_head, SHAPE)
                load_keys(memory, memory.row_numbers, arrays, key_head, number, SHAPE)
                # The chunk that the slot had has been transposed, because there are at least two slots.
                load_values(memory, memory.row_numbers, arrays, key_head, memory.staged, number, SHAPE)
                # The pages of the next chunk arrive while values are transposed.
                _chunk, o_key = keys_of_chunk(gl.minimum(at + 1, visits - 1), begin, live, masked_at_end, SHAPE)
                b_page = find_pages(arrays, scalars, o_key, keys, sequence, SHAPE)
                if at > 0:
                    turn_values(memory, number - 1, SHAPE.chunk, SHAPE)
                number += 1
            turn_values(memory, number - 1, SHAPE.chunk, SHAPE)
            count += 1
        item = take_item(arrays)
        tile, key_head = place_of(item, scalars, SHAPE)
        row, queries, position, sequence, keys = read_tile(arrays, scalars, tile, SHAPE)
    announce(memory, count, items, 0, 0)


@gluon.jit
def free_keys(memory, number, SHAPE: gl.constexpr):
    """Free the slot of chunk `number` of keys and scales, once all have been read."""
    thread_barrier()
    mbarrier.arrive(memory.key_empty.index(number % SHAPE.slots), count=1)


@gluon.jit
def finish_scores(memory, numbers, span, b_products, number, at, SHAPE: gl.constexpr):
    """Return the scores of chunk `number`, which is number `at` of its item; free its slot if there are no more scales.
    """
    slot = number % SHAPE.slots
    C: gl.constexpr = gl.SliceLayout(0, b_products.type.layout)
    begin, live, masked_at_end, masked = span
    if SHAPE.has_key_scale:
        b_products = b_products * gl.expand_dims(memory.key_scale.index(slot).load(C), 0)
    if SHAPE.value_scale != "token":
        free_keys(memory, number, SHAPE)
    first, last, slope, _unit, is_negative, _is_small = numbers
    r_k = chunk_of(at, begin, live, masked_at_end) * SHAPE.chunk + gl.arange(0, SHAPE.chunk, C)
    # An item without keys has one chunk, whose keys are all masked.
    is_masked = at < gl.maximum(masked, 1)
    if SHAPE.has_score_scale and not SHAPE.has_soft_cap:
        # A branch of its own would take registers from all items.
        is_masked = is_masked | is_negative
    if is_masked:
        if SHAPE.has_score_scale and not SHAPE.has_soft_cap:
            b_score = score((first, last, slope), SHAPE, 0, r_k, b_products * gl.where(is_negative, -1.0, 1.0))
        else:
            b_score = score((first, last, slope), SHAPE, 0, r_k, b_products)
    else:
        b_score = plain_score((first, last, slope), SHAPE, 0, r_k, b_products)
    return b_score


@gluon.jit
def differences(b_score, b_base, b_last, unit):
    """Return what `exponents` does, from differences of scores, at any magnitude."""
    return (b_score - gl.expand_dims(b_base, 1)) * unit + OFFSET, (b_last - b_base) * unit


@gluon.jit
def exponents(b_score, b_base, b_last, unit, is_small, SHAPE: gl.constexpr):
    """Return exponents of weights relative to the score `b_base`, + OFFSET, and of the factor of earlier weights.

    These are relative to the score `b_last`.
    """
    if SHAPE.has_key_scale:
        b_power, b_shrink = differences(b_score, b_base, b_last, unit)
    elif is_small:
        # One instruction for each score. Exponents of all chunks contain the same rounded numbers, of up to 2^22, so
        # the factor does, too. The largest weight may differ from 2^OFFSET by a factor of 2^(1/4).
        b_offset = OFFSET - b_base * unit
        b_power = gl.fma(b_score, unit, gl.expand_dims(b_offset, 1))
        b_shrink = b_offset - (OFFSET - b_last * unit)
    else:
        # At large scores, OFFSET would be lost beside a product, and weights would saturate.
        b_power, b_shrink = differences(b_score, b_base, b_last, unit)
    return b_power, b_shrink


@gluon.jit
def weigh(memory, numbers, span, b_products, number, at, state, R: gl.constexpr, SHAPE: gl.constexpr):
    """Return the weights of chunk `number`, the factor of the sums before it, and the new state.

    `state` holds, for each row, the largest score, the sum of weights, and the unit of the weights that multiply
    values.
    """
    b_last, b_total, b_scale = state
    P: gl.constexpr = gl.SliceLayout(1, b_total.type.layout)
    _first, _last, _slope, unit, _is_negative, is_small = numbers
    b_score = finish_scores(memory, numbers, span, b_products, number, at, SHAPE)
    b_largest = gl.maximum(b_last, gl.max(b_score, 1))
    # Rows that have seen no key yet count from 0.
    b_base = gl.where(b_largest <= SHAPE.no_key, 0.0, b_largest)
    b_power, b_shrink = exponents(b_score, b_base, b_last, unit, is_small, SHAPE)
    b_power = gl.exp2(b_power)
    b_shrink = gl.exp2(b_shrink)
    b_total = b_total * gl.expand_dims(gl.convert_layout(b_shrink, P), 1) + partial_sums(b_power)
    if SHAPE.value_scale == "token":
        # Read only now, since registers are scarce.
        C: gl.constexpr = gl.SliceLayout(0, b_power.type.layout)
        b_power = b_power * gl.expand_dims(memory.value_scale.index(number % SHAPE.slots).load(C), 0)
        free_keys(memory, number, SHAPE)
        b_before = b_scale * b_shrink
        b_scale = gl.maximum(gl.maximum(b_before, gl.max(gl.abs(b_power), 1) * (1.0 / LARGEST)), TINY)
        b_power = b_power * gl.expand_dims(1.0 / b_scale, 1)
        b_shrink = b_before / b_scale
    return rounded(b_power, R, memory.turned.dtype), b_shrink, (b_largest, b_total, b_scale)


@gluon.jit
def attend(memory, numbers, span, query, number, SHAPE: gl.constexpr):
    """Attend to the chunks of an item, of which `number` is the first. `span` is what `chunks_of` returns.

    Returns, for each row, the sums of weights times values, their unit, the largest score, and the sum of weights. Sums
    and weights have the factor 2^OFFSET.
    """
    HALF: gl.constexpr = SHAPE.rows // 2
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, SHAPE.chunk, 32])
    R: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, SHAPE.columns, 32])
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    OUT: gl.constexpr = gl.SliceLayout(1, R)
    b_none = gl.zeros([HALF, SHAPE.chunk], gl.float32, S)
    b_zero = gl.zeros([HALF, SHAPE.columns], gl.float32, R)
    b_output = b_zero
    _begin, live, _masked_at_end, _masked = span
    visits = gl.maximum(live, 1)
    b_products = warpgroup_mma_wait(0, deps=[start_scores(memory, query, query, number, b_none, SHAPE)])
    state = (gl.full([HALF], float("-inf"), gl.float32, ROW), partial_sums(b_none),
             gl.full([HALF], 1.0, gl.float32, ROW))
    for at in range(visits - 1):
        b_weights, b_shrink, state = weigh(memory, numbers, span, b_products, number + at, at, state, R, SHAPE)
        b_factor = gl.convert_layout(b_shrink, OUT)
        b_next = start_scores(memory, query, query, number + at + 1, b_none, SHAPE)
        b_part = start_values(memory, b_weights, b_zero, number + at, SHAPE)
        b_part, b_products = warpgroup_mma_wait(0, deps=[b_part, b_next])
        free_values(memory, number + at, SHAPE)
        b_output = b_output * gl.expand_dims(b_factor, 1) + b_part
    at = visits - 1
    b_weights, b_shrink, state = weigh(memory, numbers, span, b_products, number + at, at, state, R, SHAPE)
    b_factor = gl.convert_layout(b_shrink, OUT)
    b_part = warpgroup_mma_wait(0, deps=[start_values(memory, b_weights, b_zero, number + at, SHAPE)])
    free_values(memory, number + at, SHAPE)
    b_output = b_output * gl.expand_dims(b_factor, 1) + b_part
    b_largest, b_total, b_scale = state
    return b_output, b_scale, b_largest, gl.convert_layout(gl.sum(b_total, 1), ROW)


@gluon.jit
def compute(memory, arrays, scalars, GROUP: gl.constexpr, SHAPE: gl.constexpr):
    """Compute the results of 64 rows of each item."""
    HALF: gl.constexpr = SHAPE.rows // 2
    WIDTH: gl.constexpr = SHAPE.columns
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, SHAPE.chunk, 32])
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [WARPS, 1], [1, 0])
    items = scalars.num_tiles * SHAPE.key_heads
    number = 0
    count = 0
    item, _masked, live = next_item(memory, count)
    tile, key_head = place_of(item, scalars, SHAPE)
    row, queries, position, sequence, keys = read_tile(arrays, scalars, tile, SHAPE)
    while item < items:
        o_row = GROUP * HALF + gl.arange(0, HALF, gl.SliceLayout(1, S))
        first, last, slope = per_query(scalars, position + o_row // SHAPE.group, keys, SHAPE)
        unit = scalars.unit
        o_scale = gl.maximum(sequence, 0) * SHAPE.key_heads + key_head
        if SHAPE.has_score_scale:
            score_scale = gl.load(arrays.score_scale + o_scale)
            if SHAPE.has_soft_cap:
                slope = slope * score_scale
            else:
                unit = unit * score_scale
        # Exponents are scores, perhaps times -1, times a positive factor.
        is_negative = unit < 0
        # NaN is preserved.
        unit = gl.where(gl.abs(unit) < TINY, TINY, gl.abs(unit))
        slot = count % SHAPE.query_slots
        mbarrier.wait(memory.query_full.index(slot), count // SHAPE.query_slots % 2)
        if not SHAPE.is_copied:
            # Threads have copied the queries, and products read them.
            fence_async_shared()
        query = memory.query.index(slot).slice(GROUP * HALF, HALF)
        numbers = (first, last, slope, unit, is_negative, unit * SHAPE.most_score < EXACT)
        span = chunks_of(queries, position, keys, SHAPE)
        b_output, b_scale, b_largest, b_sum = attend(memory, numbers, span, query, number, SHAPE)
        if SHAPE.value_scale == "head":
            b_scale = b_scale * gl.load(arrays.value_scale + o_scale)
        number += gl.maximum(live, 1)
        thread_barrier()
        mbarrier.arrive(memory.query_empty.index(slot), count=1)
        b_factor = finish_rows(arrays, o_row, row, queries, sequence, key_head, b_largest * unit - OFFSET,
                               b_sum, SHAPE)
        b_weight = gl.expand_dims(gl.convert_layout(b_factor * b_scale, gl.SliceLayout(1, b_output.type.layout)), 1)
        b_factor = gl.expand_dims(gl.convert_layout(b_factor, gl.SliceLayout(1, b_output.type.layout)), 1)
        # A selection, not a product: a value that no query sees may be NaN.
        results = memory.results.index(GROUP)
        results.store(gl.where(b_factor == 0.0, 0.0, b_output * b_weight))
        thread_barrier()
        o_line = GROUP * HALF + gl.expand_dims(gl.arange(0, HALF, gl.SliceLayout(1, LINES)), 1)
        o_column = gl.expand_dims(gl.arange(0, WIDTH, gl.SliceLayout(0, LINES)), 0)
        b_line = head_rows(o_line, row, key_head, SHAPE)
        gl.store(arrays.output + b_line.to(gl.int64) * WIDTH + o_column, results.load(LINES).to(gl.bfloat16),
                 mask=(o_line < queries * SHAPE.group) & (o_column >= 0))
        count += 1
        # It has a barrier, after which `results` may be written again.
        item, _masked, live = next_item(memory, count)
        tile, key_head = place_of(item, scalars, SHAPE)
        row, queries, position, sequence, keys = read_tile(arrays, scalars, tile, SHAPE)


@gluon.jit
def paged_eight_bit_prompts(arrays: PromptArrays, keys, values, scalars: PromptScalars, SHAPE: gl.constexpr):
    """Compute results and log-sum-exps of the program's items."""
    SLOTS: gl.constexpr = SHAPE.slots
    QUERY_SLOTS: gl.constexpr = SHAPE.query_slots
    CHUNK: gl.constexpr = SHAPE.chunk
    dtype: gl.constexpr = arrays.query.dtype.element_ty
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ROWS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=SHAPE.features, element_bitwidth=8, rank=2)
    TURNED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=CHUNK, element_bitwidth=8, rank=2)
    # Threads write pairs of numbers of four neighbouring rows at a time.
    RESULTS: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    staged = make_barriers(SLOTS, 1 if SHAPE.box > 0 else COPYING)
    staged_empty = staged
    if SHAPE.box > 0:
        staged_empty = make_barriers(SLOTS, 1)
    memory = Memory(
        query=gl.allocate_shared_memory(dtype, [QUERY_SLOTS, SHAPE.rows, SHAPE.features], ROWS_LAYOUT),
        key=gl.allocate_shared_memory(dtype, [SLOTS, CHUNK, SHAPE.features], ROWS_LAYOUT),
        value=gl.allocate_shared_memory(dtype, [SLOTS, CHUNK, SHAPE.columns], ROWS_LAYOUT),
        turned=gl.allocate_shared_memory(dtype, [SHAPE.slots, SHAPE.columns, CHUNK], TURNED),
        results=gl.allocate_shared_memory(gl.float32, [2, SHAPE.rows // 2, SHAPE.columns], RESULTS),
        key_scale=gl.allocate_shared_memory(gl.float32, [SLOTS, CHUNK], PLAIN),
        value_scale=gl.allocate_shared_memory(gl.float32, [SLOTS, CHUNK], PLAIN),
        row_numbers=gl.allocate_shared_memory(gl.int32, [SHAPE.rows], PLAIN),
        items=gl.allocate_shared_memory(gl.int32, [AHEAD, 1], PLAIN),
        masked=gl.allocate_shared_memory(gl.int32, [AHEAD, 1], PLAIN),
        live=gl.allocate_shared_memory(gl.int32, [AHEAD, 1], PLAIN),
        query_full=make_barriers(QUERY_SLOTS, COPYING),
        query_empty=make_barriers(QUERY_SLOTS, 2),
        key_full=make_barriers(SLOTS, 1 if SHAPE.box > 0 else COPYING),
        key_empty=make_barriers(SLOTS, 2),
        staged=staged,
        value_full=make_barriers(SHAPE.slots, 1),
        value_empty=make_barriers(SHAPE.slots, 2),
        staged_empty=staged_empty,
        item_full=make_barriers(AHEAD, 1),
        item_empty=make_barriers(AHEAD, 3 if SHAPE.box > 0 else 2),
    )
    fence_async_shared()
    thread_barrier()
    if SHAPE.box > 0:
        gl.warp_specialize(
            [
                (compute, (memory, arrays, scalars, 0, SHAPE)),
                (compute, (memory, arrays, scalars, 1, SHAPE)),
                (transpose, (memory, arrays, scalars, SHAPE)),
                (load, (memory, arrays, (keys, values), scalars, SHAPE)),
            ],
            [4, 4, 1],
            [224, 40, 24],
        )
    else:
        gl.warp_specialize(
            [
                (compute, (memory, arrays, scalars, 0, SHAPE)),
                (compute, (memory, arrays, scalars, 1, SHAPE)),
                (copy, (memory, arrays, scalars, SHAPE)),
            ],
            [4, 4],
            [224, 56],
        )
