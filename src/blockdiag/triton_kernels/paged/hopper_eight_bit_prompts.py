"""Kernel in Gluon for Hopper: eight-bit prompts attend to eight-bit paged keys and values, with eight-bit products.

It divides the work as `hopper_prompts` does. Three things differ:

- `load` transposes values, see `parts.transposed_tiles`.
- Weights are rounded to e4m3. They are relative to the largest weight of the row, times a power of two that uses the
  whole range.
- The tensor cores keep about 14 bits of their sums, so the products of each chunk are added to float32 sums.

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
    read_number,
    start_scores,
)
from blockdiag.triton_kernels.launch.gluon_names import thread_barrier
from blockdiag.triton_kernels.paged.arguments import PromptArrays, PromptScalars
from blockdiag.triton_kernels.paged.hopper_prompts import (
    COPYING,
    PromptShape,
    begin_chunk,
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
)
from blockdiag.triton_kernels.parts.hopper_tiles import make_barriers
from blockdiag.triton_kernels.parts.resident_tiles import partial_sums
from blockdiag.triton_kernels.parts.transposed_tiles import rounded, transpose_chunk

# Weights are multiplied by 2 to this power: 256 is below 448, the largest number of e4m3.
OFFSET = gl.constexpr(8.0)
LARGEST = gl.constexpr(256.0)
# Replaces factors that would make exponents or quotients NaN.
TINY = gl.constexpr(1e-37)


@dataclass(frozen=True, kw_only=True)
class EightBitShape(PromptShape):
    """Static properties of a launch.

    Attributes:
        has_score_scale: whether there is a factor of scores for each sequence and key head.
        has_key_scale: whether each token of the pages has a factor of keys.
        value_scale: what a factor of values belongs to.
    """

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
        tiles, items, masked, live: see `dense.hopper_forward.ForwardMemory`.
    """

    query: Any
    key: Any
    value: Any
    turned: Any
    results: Any
    key_scale: Any
    value_scale: Any
    row_numbers: Any
    tiles: Any
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
    item_full: Any
    item_empty: Any


@gluon.jit
def turn_values(memory, number, SHAPE: gl.constexpr):
    """Transpose chunk `number` of values, once it has arrived and its slot is free."""
    SLOTS: gl.constexpr = SHAPE.slots
    slot = number % SLOTS
    mbarrier.wait(memory.staged.index(slot), number // SLOTS % 2)
    mbarrier.wait(memory.value_empty.index(slot), number // SLOTS % 2 ^ 1)
    transpose_chunk(memory.value.index(slot), memory.turned.index(slot),
                    gl.SwizzledSharedLayout(4, 2, memory.value.layout.max_phase, [1, 0]))
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(memory.value_full.index(slot), count=1)


@gluon.jit
def load_scales(memory, arrays, place, b_row, key_head, SHAPE: gl.constexpr):
    """Copy the scales of a chunk's tokens, 0 for tokens that the sequence does not have."""
    o_scale = gl.maximum(b_row, 0).to(gl.int64) * SHAPE.key_heads + key_head
    if SHAPE.has_key_scale:
        memory.key_scale.index(place).store(gl.load(arrays.key_scale + o_scale, mask=b_row >= 0, other=0.0))
    if SHAPE.value_scale == "token":
        memory.value_scale.index(place).store(gl.load(arrays.value_scale + o_scale, mask=b_row >= 0, other=0.0))


@gluon.jit
def load(memory, arrays, scalars, SHAPE: gl.constexpr):
    """Take items, announce them, and load their queries, keys and values."""
    items = scalars.num_tiles * SHAPE.key_heads
    row_numbers = memory.row_numbers
    number = 0
    count = 0
    item = gl.program_id(0)
    tile, key_head = place_of(item, scalars, SHAPE)
    row, queries, position, sequence, keys = read_tile(arrays, scalars, tile, SHAPE)
    while item < items:
        if queries > 0:
            begin, live, masked_at_end, masked = chunks_of(queries, position, keys, SHAPE)
            sequence = gl.maximum(sequence, 0)
            chunk, o_key = keys_of_chunk(0, begin, live, masked_at_end, SHAPE)
            b_page = find_pages(arrays, scalars, o_key, keys, sequence, SHAPE)
            announce(memory, count, item, masked, live)
            load_queries(memory, row_numbers, arrays, row, queries, key_head, count, SHAPE)
            visits = gl.maximum(live, 1)
            for at in range(visits):
                b_row = pool_rows(scalars, b_page, o_key, keys, SHAPE)
                begin_chunk(memory, row_numbers, b_row, chunk, number, SHAPE)
                load_scales(memory, arrays, number % SHAPE.slots, b_row, key_head, SHAPE)
                load_keys(memory, row_numbers, arrays, key_head, number, SHAPE)
                # The chunk that the stage had has been transposed, because there are at least two stages.
                load_values(memory, row_numbers, arrays, key_head, memory.staged, number, SHAPE)
                # The pages of the next chunk arrive while values are transposed.
                chunk, o_key = keys_of_chunk(gl.minimum(at + 1, visits - 1), begin, live, masked_at_end, SHAPE)
                b_page = find_pages(arrays, scalars, o_key, keys, sequence, SHAPE)
                if at > 0:
                    turn_values(memory, number - 1, SHAPE)
                number += 1
            turn_values(memory, number - 1, SHAPE)
            count += 1
        # An item taken earlier might wait for this one while another program is idle.
        item = gl.atomic_add(arrays.counter, 1, sem="relaxed") + gl.num_programs(0)
        tile, key_head = place_of(item, scalars, SHAPE)
        row, queries, position, sequence, keys = read_tile(arrays, scalars, tile, SHAPE)
    announce(memory, count, items, 0, 0)


@gluon.jit
def free_keys(memory, number, SHAPE: gl.constexpr):
    """Free the slot of chunk `number` of keys and scales, once all have been read."""
    thread_barrier()
    mbarrier.arrive(memory.key_empty.index(number % SHAPE.slots), count=1)


@gluon.jit
def finish_scores(memory, numbers, b_products, number, at, masked, SHAPE: gl.constexpr):
    """Return the scores of chunk `number`, which is number `at` of its item; free its slot if there are no more scales.

    The first `masked` chunks of the item are masked.
    """
    slot = number % SHAPE.slots
    C: gl.constexpr = gl.SliceLayout(0, b_products.type.layout)
    chunk = read_number(memory.tiles.index(slot))
    if SHAPE.has_key_scale:
        b_products = b_products * gl.expand_dims(memory.key_scale.index(slot).load(C), 0)
    if SHAPE.value_scale != "token":
        free_keys(memory, number, SHAPE)
    first, last, slope, _unit, is_negative = numbers
    if SHAPE.has_score_scale and not SHAPE.has_soft_cap:
        if is_negative:
            b_products = 0.0 - b_products
    r_k = chunk * SHAPE.chunk + gl.arange(0, SHAPE.chunk, C)
    if at < masked:
        b_score = score((first, last, slope), SHAPE, 0, r_k, b_products)
    else:
        b_score = plain_score((first, last, slope), SHAPE, 0, r_k, b_products)
    return b_score


@gluon.jit
def weigh(memory, numbers, b_products, number, at, masked, state, R: gl.constexpr,
          SHAPE: gl.constexpr):
    """Return the weights of chunk `number`, the factor of the sums before it, and the new state.

    `state` holds, for each row, the largest score, the sum of weights, and the unit of the weights that multiply
    values.
    """
    b_last, b_total, b_scale = state
    P: gl.constexpr = gl.SliceLayout(1, b_total.type.layout)
    _first, _last, _slope, unit, _is_negative = numbers
    b_score = finish_scores(memory, numbers, b_products, number, at, masked, SHAPE)
    b_largest = gl.maximum(b_last, gl.max(b_score, 1))
    # Rows that have seen no key yet count from 0.
    b_base = gl.where(b_largest <= SHAPE.no_key, 0.0, b_largest)
    # The difference first: at large scores, OFFSET would be lost beside a product, and weights would saturate.
    b_power = gl.exp2((b_score - gl.expand_dims(b_base, 1)) * unit + OFFSET)
    b_shrink = gl.exp2((b_last - b_base) * unit)
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
def attend(memory, numbers, query, number, masked, live, SHAPE: gl.constexpr):
    """Attend to the chunks of an item, of which `number` is the first.

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
    visits = gl.maximum(live, 1)
    # An item without keys has one chunk, whose keys are all masked.
    masked = gl.maximum(masked, 1)
    b_products = warpgroup_mma_wait(0, deps=[start_scores(memory, query, query, number, b_none, SHAPE)])
    state = (gl.full([HALF], float("-inf"), gl.float32, ROW), partial_sums(b_none),
             gl.full([HALF], 1.0, gl.float32, ROW))
    for at in range(visits - 1):
        b_weights, b_shrink, state = weigh(memory, numbers, b_products, number + at, at, masked, state, R, SHAPE)
        b_factor = gl.convert_layout(b_shrink, OUT)
        b_next = start_scores(memory, query, query, number + at + 1, b_none, SHAPE)
        b_part = start_values(memory, b_weights, b_zero, number + at, SHAPE)
        b_part, b_products = warpgroup_mma_wait(0, deps=[b_part, b_next])
        free_values(memory, number + at, SHAPE)
        b_output = b_output * gl.expand_dims(b_factor, 1) + b_part
    at = visits - 1
    b_weights, b_shrink, state = weigh(memory, numbers, b_products, number + at, at, masked, state, R, SHAPE)
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
    item, masked, live = next_item(memory, count)
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
        query = memory.query.index(slot).slice(GROUP * HALF, HALF)
        numbers = (first, last, slope, unit, is_negative)
        b_output, b_scale, b_largest, b_sum = attend(memory, numbers, query, number, masked, live, SHAPE)
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
        item, masked, live = next_item(memory, count)
        tile, key_head = place_of(item, scalars, SHAPE)
        row, queries, position, sequence, keys = read_tile(arrays, scalars, tile, SHAPE)


@gluon.jit
def paged_eight_bit_prompts(arrays: PromptArrays, scalars: PromptScalars, SHAPE: gl.constexpr):
    """Compute results and log-sum-exps of the program's items."""
    SLOTS: gl.constexpr = SHAPE.slots
    QUERY_SLOTS: gl.constexpr = SHAPE.query_slots
    CHUNK: gl.constexpr = SHAPE.chunk
    dtype: gl.constexpr = arrays.query.dtype.element_ty
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ROWS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=SHAPE.features, element_bitwidth=8, rank=2)
    TURNED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=CHUNK, element_bitwidth=8, rank=2)
    STAGED: gl.constexpr = gl.SwizzledSharedLayout(16, 2, SHAPE.columns // 16, [1, 0])
    # Threads write pairs of numbers of four neighbouring rows at a time.
    RESULTS: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    memory = Memory(
        query=gl.allocate_shared_memory(dtype, [QUERY_SLOTS, SHAPE.rows, SHAPE.features], ROWS_LAYOUT),
        key=gl.allocate_shared_memory(dtype, [SLOTS, CHUNK, SHAPE.features], ROWS_LAYOUT),
        value=gl.allocate_shared_memory(dtype, [SLOTS, CHUNK, SHAPE.columns], STAGED),
        turned=gl.allocate_shared_memory(dtype, [SHAPE.slots, SHAPE.columns, CHUNK], TURNED),
        results=gl.allocate_shared_memory(gl.float32, [2, SHAPE.rows // 2, SHAPE.columns], RESULTS),
        key_scale=gl.allocate_shared_memory(gl.float32, [SLOTS, CHUNK], PLAIN),
        value_scale=gl.allocate_shared_memory(gl.float32, [SLOTS, CHUNK], PLAIN),
        row_numbers=gl.allocate_shared_memory(gl.int32, [SHAPE.rows], PLAIN),
        tiles=gl.allocate_shared_memory(gl.int32, [SLOTS, 1], PLAIN),
        items=gl.allocate_shared_memory(gl.int32, [AHEAD, 1], PLAIN),
        masked=gl.allocate_shared_memory(gl.int32, [AHEAD, 1], PLAIN),
        live=gl.allocate_shared_memory(gl.int32, [AHEAD, 1], PLAIN),
        query_full=make_barriers(QUERY_SLOTS, COPYING),
        query_empty=make_barriers(QUERY_SLOTS, 2),
        key_full=make_barriers(SLOTS, COPYING),
        key_empty=make_barriers(SLOTS, 2),
        staged=make_barriers(SLOTS, COPYING),
        value_full=make_barriers(SHAPE.slots, 1),
        value_empty=make_barriers(SHAPE.slots, 2),
        item_full=make_barriers(AHEAD, 1),
        item_empty=make_barriers(AHEAD, 2),
    )
    fence_async_shared()
    thread_barrier()
    gl.warp_specialize(
        [
            (compute, (memory, arrays, scalars, 0, SHAPE)),
            (compute, (memory, arrays, scalars, 1, SHAPE)),
            (load, (memory, arrays, scalars, SHAPE)),
        ],
        [4, 4],
        [224, 64],
    )
