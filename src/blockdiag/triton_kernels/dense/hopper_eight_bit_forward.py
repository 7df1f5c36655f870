"""Template in Gluon of the forward kernel for Hopper that streams eight-bit keys and values.

It divides the work as `hopper_forward` does, and calls the same generated functions. Two things differ:

- `load` has four warps, which transpose values: see `parts.transposed_tiles`.
- The tensor cores keep about 14 bits of their sums, so the products of each chunk are added to float32 sums.

Weights are relative to the largest one of the row, times a power of two that uses the range of their dtype.
"""

# Device code is laid out by hand: one argument per line would hide what a kernel does.
# fmt: off

from dataclasses import dataclass
from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from blockdiag.triton_kernels.dense.hopper_forward import (
    AHEAD,
    WARPS,
    ForwardShape,
    announce,
    begin_item,
    chunk_at,
    finish_item,
    finish_scores,
    load_chunk_keys,
    load_parts,
    make_ring,
    next_item,
    place_of,
    start_scores,
)
from blockdiag.triton_kernels.launch.gluon_names import thread_barrier
from blockdiag.triton_kernels.parts.hopper_tiles import make_barriers
from blockdiag.triton_kernels.parts.resident_tiles import partial_sums
from blockdiag.triton_kernels.parts.transposed_tiles import rounded, transpose_chunk


@dataclass(frozen=True, kw_only=True)
class EightBitShape(ForwardShape):
    """Static properties of a launch.

    Attributes:
        offset: weights are multiplied by 2 to this power.
    """

    offset: float


class EightBitMemory(NamedTuple):
    """Shared memory and barriers of a program; for the others see `hopper_forward.ForwardMemory`.

    Attributes:
        value, value_more: chunks of values as they are in memory; there is no second part.
        turned: transposed chunks of values.
        staged: values have arrived. `value_full`: they have been transposed.
    """

    query: Any
    query_more: Any
    key: Any
    key_more: Any
    value: Any
    value_more: Any
    turned: Any
    staging: Any
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
                    gl.NVMMASharedLayout(swizzle_byte_width=SHAPE.columns, element_bitwidth=32, rank=2))
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(memory.value_full.index(slot), count=1)


@gluon.jit
def load(memory, matrices, p_counts, p_tiles, p_counter, FUNCTIONS: gl.constexpr, SHAPE: gl.constexpr):
    """Take items, announce them, load their queries, keys and values, and transpose the values."""
    SLOTS: gl.constexpr = SHAPE.slots
    number = 0
    count = 0
    item = gl.program_id(0)
    while item < SHAPE.lines * SHAPE.query_tiles:
        place, list_index, full, live = begin_item(memory, matrices, p_counts, item, count, FUNCTIONS, SHAPE)
        walk = FUNCTIONS.walk(p_counts, p_tiles, list_index)
        following = item
        for at in range(gl.maximum(live, 1)):
            chunk = chunk_at(p_tiles, list_index, walk, at, full, live, FUNCTIONS, SHAPE)
            load_chunk_keys(memory, matrices, place, chunk, number, FUNCTIONS, SHAPE)
            slot = number % SLOTS
            # The chunk that the slot had has been transposed, because there are at least two slots.
            row, column = FUNCTIONS.value_at(place, chunk * SHAPE.chunk)
            load_parts(matrices.value, matrices.value_more, memory.staged, row, column, memory.value, memory.value_more,
                       slot, False)
            if at == 0:
                # The first loads are under way while this waits for memory.
                following = gl.atomic_add(p_counter, 1, sem="relaxed") + gl.num_programs(0)
            else:
                turn_values(memory, number - 1, SHAPE)
            number += 1
        turn_values(memory, number - 1, SHAPE)
        count += 1
        item = following
    announce(memory, count, item, 0, 0)


@gluon.jit
def weigh(memory, arrays, place, numbers, b_products, number, at, masked, b_last, b_total, R: gl.constexpr,
          FUNCTIONS: gl.constexpr, SHAPE: gl.constexpr):
    """Return the weights of chunk `number`, the factor of the sums before it, the largest scores, and the sums."""
    P: gl.constexpr = gl.SliceLayout(1, b_total.type.layout)
    b_score = finish_scores(memory, arrays, place, numbers, b_products, number, at, masked, 0, FUNCTIONS, SHAPE)
    b_largest = gl.maximum(b_last, gl.max(b_score, 1))
    # Rows that have seen no key yet count from 0.
    b_base = gl.where(b_largest <= SHAPE.no_key, 0.0, b_largest)
    # The difference first: at large scores, the offset would be lost beside a product, and weights would saturate.
    b_power = gl.exp2((b_score - gl.expand_dims(b_base, 1)) * SHAPE.unit + SHAPE.offset)
    b_shrink = gl.exp2((b_last - b_base) * SHAPE.unit)
    b_total = b_total * gl.expand_dims(gl.convert_layout(b_shrink, P), 1) + partial_sums(b_power)
    return rounded(b_power, R, memory.turned.dtype), b_shrink, b_largest, b_total


@gluon.jit
def start_values(memory, b_weights, b_zero, number, SHAPE: gl.constexpr):
    """Start the products of weights with the values of chunk `number`."""
    slot = number % SHAPE.slots
    mbarrier.wait(memory.value_full.index(slot), number // SHAPE.slots % 2)
    return warpgroup_mma(b_weights, memory.turned.index(slot).permute((1, 0)), b_zero, use_acc=False,
                           is_async=True)


@gluon.jit
def free_values(memory, number, SHAPE: gl.constexpr):
    """Free the slot of chunk `number` of values, once its products have completed."""
    thread_barrier()
    mbarrier.arrive(memory.value_empty.index(number % SHAPE.slots), count=1)


@gluon.jit
def attend(memory, arrays, place, numbers, query, query_more, number, masked, live, b_none,
           FUNCTIONS: gl.constexpr, SHAPE: gl.constexpr):
    """Attend to the chunks of an item, of which `number` is the first.

    Returns the sums of weights times values and, for each row, the largest score and the sum of weights.
    """
    HALF: gl.constexpr = SHAPE.rows // 2
    COLUMNS: gl.constexpr = SHAPE.columns
    R: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, COLUMNS, 32])
    ROW: gl.constexpr = gl.SliceLayout(1, b_none.type.layout)
    OUT: gl.constexpr = gl.SliceLayout(1, R)
    b_zero = gl.zeros([HALF, COLUMNS], gl.float32, R)
    b_output = b_zero
    b_largest = gl.full([HALF], float("-inf"), gl.float32, ROW)
    b_total = partial_sums(b_none)
    visits = gl.maximum(live, 1)
    # An item without keys has one chunk, whose keys are all masked.
    masked = gl.maximum(masked, 1)
    b_first = start_scores(memory, query, query_more, number, b_none, SHAPE)
    b_products = warpgroup_mma_wait(0, deps=[b_first])
    for at in range(visits - 1):
        b_weights, b_shrink, b_largest, b_total = weigh(
            memory, arrays, place, numbers, b_products, number + at, at, masked, b_largest, b_total, R, FUNCTIONS,
            SHAPE)
        b_factor = gl.convert_layout(b_shrink, OUT)
        b_next = start_scores(memory, query, query_more, number + at + 1, b_none, SHAPE)
        b_part = start_values(memory, b_weights, b_zero, number + at, SHAPE)
        b_part, b_products = warpgroup_mma_wait(0, deps=[b_part, b_next])
        free_values(memory, number + at, SHAPE)
        b_output = b_output * gl.expand_dims(b_factor, 1) + b_part
    at = visits - 1
    b_weights, b_shrink, b_largest, b_total = weigh(
        memory, arrays, place, numbers, b_products, number + at, at, masked, b_largest, b_total, R, FUNCTIONS, SHAPE)
    b_factor = gl.convert_layout(b_shrink, OUT)
    b_part = warpgroup_mma_wait(0, deps=[start_values(memory, b_weights, b_zero, number + at, SHAPE)])
    free_values(memory, number + at, SHAPE)
    b_output = b_output * gl.expand_dims(b_factor, 1) + b_part
    # Sums and weights have the same factor.
    UNIT: gl.constexpr = 2.0 ** -SHAPE.offset
    return b_output * UNIT, b_largest, gl.convert_layout(gl.sum(b_total, 1), ROW) * UNIT


@gluon.jit
def compute(memory, matrices, p_output, p_log_sum, arrays, GROUP: gl.constexpr, FUNCTIONS: gl.constexpr,
            SHAPE: gl.constexpr):
    """Compute the results of 64 queries of each item."""
    HALF: gl.constexpr = SHAPE.rows // 2
    CHUNK: gl.constexpr = SHAPE.chunk
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, CHUNK, 32])
    b_none = gl.zeros([HALF, CHUNK], gl.float32, S)
    number = 0
    count = 0
    item, masked, live = next_item(memory, count)
    while item < SHAPE.lines * SHAPE.query_tiles:
        line, tile = place_of(item, SHAPE)
        place = FUNCTIONS.place(line)
        first = tile * SHAPE.rows + GROUP * HALF
        r_q = first + gl.arange(0, HALF, gl.SliceLayout(1, S))
        numbers = FUNCTIONS.per_query(arrays, place, r_q)
        slot = count % SHAPE.query_slots
        mbarrier.wait(memory.query_full.index(slot), count // SHAPE.query_slots % 2)
        query = memory.query.index(slot).slice(GROUP * HALF, HALF)
        query_more = memory.query_more.index(slot).slice(GROUP * HALF, HALF)
        b_output, b_largest, b_sum = attend(memory, arrays, place, numbers, query, query_more, number, masked, live,
                                            b_none, FUNCTIONS, SHAPE)
        number += gl.maximum(live, 1)
        finish_item(memory, matrices, p_output, p_log_sum, arrays, place, numbers, r_q, first, count, live, b_output, 0,
                    b_largest, b_sum, GROUP, FUNCTIONS, SHAPE)
        count += 1
        item, masked, live = next_item(memory, count)


@gluon.jit
def streamed_eight_bit_forward(matrices, p_output, arrays, p_counts, p_tiles, p_log_sum, p_counter,
                               FUNCTIONS: gl.constexpr, SHAPE: gl.constexpr):
    """Compute results and log-sum-exps of the program's items; see `hopper_forward.streamed_forward`."""
    SLOTS: gl.constexpr = SHAPE.slots
    QUERY_SLOTS: gl.constexpr = SHAPE.query_slots
    CHUNK: gl.constexpr = SHAPE.chunk
    COLUMNS: gl.constexpr = SHAPE.columns
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    TURNED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=CHUNK, element_bitwidth=8, rank=2)
    query_ring, query_more = make_ring(matrices.query, matrices.query_more, QUERY_SLOTS, SHAPE.rows,
                                       SHAPE.features_more > 0)
    key_ring, key_more = make_ring(matrices.key, matrices.key_more, SLOTS, CHUNK, SHAPE.features_more > 0)
    value_ring, value_more = make_ring(matrices.value, matrices.value_more, SLOTS, CHUNK, False)
    turned = gl.allocate_shared_memory(matrices.value.dtype, [SLOTS, COLUMNS, CHUNK], TURNED)
    items = gl.allocate_shared_memory(gl.int32, [AHEAD, 1], PLAIN)
    masked = gl.allocate_shared_memory(gl.int32, [AHEAD, 1], PLAIN)
    live = gl.allocate_shared_memory(gl.int32, [AHEAD, 1], PLAIN)
    tiles = items
    if SHAPE.is_listed:
        tiles = gl.allocate_shared_memory(gl.int32, [SLOTS, 1], PLAIN)
    memory = EightBitMemory(
        query_ring, query_more, key_ring, key_more, value_ring, value_more, turned, query_ring, tiles, items,
        masked, live, make_barriers(QUERY_SLOTS, 1), make_barriers(QUERY_SLOTS, 2), make_barriers(SLOTS, 1),
        make_barriers(SLOTS, 2), make_barriers(SLOTS, 1), make_barriers(SLOTS, 1), make_barriers(SLOTS, 2),
        make_barriers(AHEAD, 1), make_barriers(AHEAD, 2),
    )
    fence_async_shared()
    thread_barrier()
    gl.warp_specialize(
        [
            (compute, (memory, matrices, p_output, p_log_sum, arrays, 0, FUNCTIONS, SHAPE)),
            (compute, (memory, matrices, p_output, p_log_sum, arrays, 1, FUNCTIONS, SHAPE)),
            (load, (memory, matrices, p_counts, p_tiles, p_counter, FUNCTIONS, SHAPE)),
        ],
        [4, 4],
        [224, 64],
    )
