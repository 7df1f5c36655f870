"""Kernel in Gluon for Hopper: prompts attend to paged keys and values, with the parts of `dense.hopper_forward`.

An item is a tile of queries of one sequence, with all heads that share one key head, so a tile has up to 128 rows. A
table gives the tiles, see `ops.paged.packed`. Programs are persistent: each takes items from a shared counter until
none is left.

| warps | function | work |
|---|---|---|
| 4 + 4 | `compute` | 64 rows each: products, softmax, results |
| 4 | `load` | take items, find the keys of a chunk in the pages, load queries, keys and values |

Pages may have any size. Each thread of `load` finds one key of a chunk, and shared memory passes its row in the pool to
the threads that copy it. Copies write zeros for keys that a sequence does not have, so that no NaN of an unused row can
reach the results.
"""

# Device code is laid out by hand: one argument per line would hide what a kernel does.
# fmt: off

from dataclasses import dataclass
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from blockdiag.triton_kernels.dense.hopper_forward import (
    AHEAD,
    LN_2,
    WARPS,
    ForwardMemory,
    ForwardShape,
    announce,
    attend,
    next_item,
    write_number,
)
from blockdiag.triton_kernels.launch.gluon_names import load_async, thread_barrier
from blockdiag.triton_kernels.paged.arguments import PromptArrays, PromptScalars
from blockdiag.triton_kernels.parts.hopper_tiles import make_barriers

LOG2_E = gl.constexpr(1.4426950408889634)
# Threads of `load`. Each arrives at the barrier of a slot when its own copies have completed.
COPYING = gl.constexpr(128)
# Vectors of 16 bytes that each thread copies at a time.
COPIES_AT_ONCE = gl.constexpr(2)


@dataclass(frozen=True, kw_only=True)
class PromptShape(ForwardShape):
    """Static properties of a launch.

    Attributes:
        query_heads, key_heads, group: heads, and query heads that share a key head.
        page_size: tokens of a page.
        has_page_table: whether there is a table of pages; without one, sequence b is page b.
        few: sequences with at most this number of queries are left out.
        left, right: keys that a query sees before and after its own position; None is unlimited.
        has_soft_cap: whether scores are bounded by a soft cap.
        has_sinks: whether each query head has a logit that takes part in the softmax without a value.
    """

    query_heads: int
    key_heads: int
    group: int
    page_size: int
    has_page_table: bool
    few: int
    left: int | None
    right: int | None
    has_soft_cap: bool
    has_sinks: bool


@dataclass(frozen=True)
class PromptFunctions:
    """Device functions that compute scores, see `dense.hopper_forward`."""

    score: Any
    plain_score: Any

    def __deepcopy__(self, memo: Any) -> "PromptFunctions":
        # Triton copies the constants that a kernel reads, and functions cannot be copied.
        return self


@gluon.jit
def per_query(scalars, b_position, keys, SHAPE: gl.constexpr):
    """Return the first and last key that each query sees, and the slope of the soft cap."""
    b_first = gl.full_like(b_position, 0)
    if SHAPE.left is not None:
        b_first = b_position - SHAPE.left
    b_last = gl.full_like(b_position, 0) + (keys - 1)
    if SHAPE.right is not None:
        b_last = gl.minimum(b_last, b_position + SHAPE.right)
    return b_first, b_last, scalars.slope


@gluon.jit
def plain_score(numbers, shape, place, r_k, products):
    """Return scores without masks, over a positive factor. `shape` is a PromptShape."""
    _first, _last, slope = numbers
    if shape.has_soft_cap:
        # tanh(x) = 1 - 2 / (1 + e^2x), which is accurate enough at both ends.
        products = 1.0 - 2.0 / (1.0 + gl.exp2(products * slope))
    return products


@gluon.jit
def score(numbers, shape, place, r_k, products):
    """Return scores, -inf where the query does not see the key. `shape` is a PromptShape."""
    b_score = plain_score(numbers, shape, place, r_k, products)
    b_first, b_last, _slope = numbers
    m_seen = gl.expand_dims(r_k, 0) <= gl.expand_dims(b_last, 1)
    if shape.left is not None:
        m_seen = m_seen & (gl.expand_dims(r_k, 0) >= gl.expand_dims(b_first, 1))
    return gl.where(m_seen, b_score, float("-inf"))


SCORES = gl.constexpr(PromptFunctions(score, plain_score))


@gluon.jit
def place_of(item, scalars, SHAPE: gl.constexpr):
    """Return the tile and the key head of an item; those of the last item for numbers beyond.

    The last tiles of a few key heads come first, because under a causal mask they take longest.
    """
    item = gl.minimum(item, scalars.num_tiles * SHAPE.key_heads - 1)
    each = scalars.together * scalars.num_tiles
    first = item // each * scalars.together
    heads = gl.minimum(scalars.together, SHAPE.key_heads - first)
    return scalars.num_tiles - 1 - item % each // heads, first + item % each % heads


@gluon.jit
def take_item(arrays):
    """Return the next item. One taken earlier might wait for the current one while another program is idle."""
    return gl.atomic_add(arrays.counter, 1, sem="relaxed") + gl.num_programs(0)


@gluon.jit
def read_tile(arrays, scalars, tile, SHAPE: gl.constexpr):
    """Return a tile's first row, number of queries, first position and sequence, and the keys of the sequence."""
    p_tile = arrays.tiles + tile * 4
    row = gl.load(p_tile)
    queries = gl.load(p_tile + 1)
    position = gl.load(p_tile + 2)
    sequence = gl.load(p_tile + 3)
    keys = gl.load(arrays.kv_lengths + gl.maximum(sequence, 0))
    keys = gl.minimum(gl.maximum(keys, 0), scalars.max_keys)
    # Rows that belong to no sequence have no keys.
    keys = gl.where(sequence < 0, 0, keys)
    if SHAPE.few > 0:
        whole = gl.load(arrays.tiles + (scalars.num_tiles + gl.maximum(sequence, 0)) * 4 + 1)
        queries = gl.where((sequence >= 0) & (whole <= SHAPE.few), 0, queries)
    return row, queries, position, sequence, keys


@gluon.jit
def head_rows(o_row, row, key_head, SHAPE: gl.constexpr):
    """Return the rows of [packed rows, query_heads] for rows of a tile, which begins at packed row `row`."""
    return (row + o_row // SHAPE.group) * SHAPE.query_heads + key_head * SHAPE.group + o_row % SHAPE.group


@gluon.jit
def chunks_of(queries, position, keys, SHAPE: gl.constexpr):
    """Return the first chunk that a tile sees, the number of chunks, those masked at the end, and all masked ones."""
    CHUNK: gl.constexpr = SHAPE.chunk
    last = keys - 1
    last_by_all = keys - 1
    if SHAPE.right is not None:
        last = gl.minimum(last, position + queries - 1 + SHAPE.right)
        last_by_all = gl.minimum(last_by_all, position + SHAPE.right)
    lowest = 0
    lowest_by_all = 0
    if SHAPE.left is not None:
        lowest = gl.maximum(position - SHAPE.left, 0)
        lowest_by_all = gl.maximum(position + queries - 1 - SHAPE.left, 0)
    begin = lowest // CHUNK
    end = gl.maximum(last + 1 + CHUNK - 1, 0) // CHUNK
    live = gl.maximum(end - begin, 0)
    full_end = gl.minimum(gl.maximum(last_by_all + 1, 0) // CHUNK, end)
    full_begin = gl.maximum((lowest_by_all + CHUNK - 1) // CHUNK, begin)
    masked_at_end = gl.minimum(gl.maximum(end - gl.maximum(full_end, begin), 0), live)
    masked = live - gl.maximum(full_end - full_begin, 0)
    return begin, live, masked_at_end, masked


@gluon.jit
def copy_rows(target, p_source, row_numbers, columns, column, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """Start copying rows of a matrix into shared memory; zeros where the row's number is negative.

    `row_numbers` is a buffer of numbers, `columns` the matrix's width, `column` the first of WIDTH columns.
    """
    VECTOR: gl.constexpr = 128 // target.dtype.primitive_bitwidth
    ACROSS: gl.constexpr = min(WIDTH // VECTOR, 32)
    # Eight rows have the pattern of swizzled memory.
    EACH: gl.constexpr = max(8, COPIES_AT_ONCE * COPYING * VECTOR // WIDTH)
    LINES: gl.constexpr = gl.BlockedLayout([1, VECTOR], [32 // ACROSS, ACROSS], [gl.num_warps(), 1], [1, 0])
    o_column = column + gl.expand_dims(gl.arange(0, WIDTH, gl.SliceLayout(0, LINES)), 0)
    for i in gl.static_range(ROWS // EACH):
        b_row = gl.expand_dims(row_numbers.slice(i * EACH, EACH).load(gl.SliceLayout(1, LINES)), 1)
        p_row = p_source + gl.maximum(b_row, 0).to(gl.int64) * columns + o_column
        load_async(target.slice(i * EACH, EACH), p_row, mask=(b_row >= 0) & (o_column >= 0))


@gluon.jit
def find_pages(arrays, scalars, key, keys, sequence, SHAPE: gl.constexpr):
    """Return the pages of keys, as the table has them."""
    if SHAPE.has_page_table:
        p_page = arrays.page_table + sequence.to(gl.int64) * scalars.max_pages + key // SHAPE.page_size
        page = gl.load(p_page, mask=key < keys, other=0)
    else:
        page = gl.full_like(key, 0) + sequence
    return page


@gluon.jit
def pool_rows(scalars, page, key, keys, SHAPE: gl.constexpr):
    """Return the rows of keys in the pool, -1 for keys that the sequence does not have."""
    page = gl.minimum(gl.maximum(page, 0), scalars.num_pages - 1)
    return gl.where(key < keys, page * SHAPE.page_size + key % SHAPE.page_size, -1)


@gluon.jit
def chunk_of(at, begin, live, masked_at_end):
    """Return number `at` of an item's chunks. Chunks that are masked at the end come first."""
    return gl.where(at < masked_at_end, begin + live - 1 - at, begin + at - masked_at_end)


@gluon.jit
def keys_of_chunk(at, begin, live, masked_at_end, SHAPE: gl.constexpr):
    """Return number `at` of an item's chunks, and its keys."""
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    chunk = chunk_of(at, begin, live, masked_at_end)
    return chunk, chunk * SHAPE.chunk + gl.arange(0, SHAPE.chunk, LINE)


@gluon.jit
def load_queries(memory, row_numbers, arrays, row, queries, key_head, count, SHAPE: gl.constexpr):
    """Start copying the queries of item `count` of the program into their slot, once it is free."""
    ROWS: gl.constexpr = SHAPE.rows
    WIDTH: gl.constexpr = SHAPE.features
    QUERY_SLOTS: gl.constexpr = SHAPE.query_slots
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    slot = count % QUERY_SLOTS
    mbarrier.wait(memory.query_empty.index(slot), count // QUERY_SLOTS % 2 ^ 1)
    o_row = gl.arange(0, ROWS, LINE)
    b_head = head_rows(o_row, row, key_head, SHAPE)
    # All threads have read the last rows' numbers, since `announce` has a barrier.
    row_numbers.slice(0, ROWS).store(gl.where(o_row < queries * SHAPE.group, b_head, -1))
    thread_barrier()
    copy_rows(memory.query.index(slot), arrays.query, row_numbers, WIDTH, 0, ROWS, WIDTH)
    async_copy.mbarrier_arrive(memory.query_full.index(slot), increment_count=False)


@gluon.jit
def begin_chunk(memory, row_numbers, b_row, number, SHAPE: gl.constexpr):
    """Write the rows in the pool of chunk `number` of the program, once the slot of its keys is free."""
    slot = number % SHAPE.slots
    mbarrier.wait(memory.key_empty.index(slot), number // SHAPE.slots % 2 ^ 1)
    # All threads have read the numbers of the last rows.
    thread_barrier()
    row_numbers.slice(0, SHAPE.chunk).store(b_row)


@gluon.jit
def load_keys(memory, row_numbers, arrays, key_head, number, SHAPE: gl.constexpr):
    """Start copying the keys of a chunk that has begun."""
    CHUNK: gl.constexpr = SHAPE.chunk
    WIDTH: gl.constexpr = SHAPE.features
    slot = number % SHAPE.slots
    thread_barrier()
    copy_rows(memory.key.index(slot), arrays.key, row_numbers, SHAPE.key_heads * WIDTH, key_head * WIDTH, CHUNK, WIDTH)
    async_copy.mbarrier_arrive(memory.key_full.index(slot), increment_count=False)


@gluon.jit
def load_values(memory, row_numbers, arrays, key_head, full, number, SHAPE: gl.constexpr):
    """Start copying the values of a chunk whose keys are copied, too. Threads arrive at `full` when they arrive."""
    WIDTH: gl.constexpr = SHAPE.features
    slot = number % SHAPE.slots
    copy_rows(memory.value.index(slot), arrays.value, row_numbers, SHAPE.key_heads * WIDTH, key_head * WIDTH,
              SHAPE.chunk, WIDTH)
    async_copy.mbarrier_arrive(full.index(slot), increment_count=False)


@gluon.jit
def load(memory, row_numbers, arrays, scalars, SHAPE: gl.constexpr):
    """Take items, announce them, and load their queries, keys and values."""
    SLOTS: gl.constexpr = SHAPE.slots
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
            chunk, o_key = keys_of_chunk(0, begin, live, masked_at_end, SHAPE)
            b_page = find_pages(arrays, scalars, o_key, keys, sequence, SHAPE)
            announce(memory, count, item, masked, live)
            load_queries(memory, row_numbers, arrays, row, queries, key_head, count, SHAPE)
            visits = gl.maximum(live, 1)
            for at in range(visits):
                b_row = pool_rows(scalars, b_page, o_key, keys, SHAPE)
                begin_chunk(memory, row_numbers, b_row, number, SHAPE)
                write_number(memory.tiles.index(number % SLOTS), chunk)
                load_keys(memory, row_numbers, arrays, key_head, number, SHAPE)
                # The pages of the next chunk arrive while this one is copied.
                chunk, o_key = keys_of_chunk(gl.minimum(at + 1, visits - 1), begin, live, masked_at_end, SHAPE)
                b_page = find_pages(arrays, scalars, o_key, keys, sequence, SHAPE)
                mbarrier.wait(memory.value_empty.index(number % SLOTS), number // SLOTS % 2 ^ 1)
                load_values(memory, row_numbers, arrays, key_head, memory.value_full, number, SHAPE)
                number += 1
            count += 1
        item = take_item(arrays)
        tile, key_head = place_of(item, scalars, SHAPE)
        row, queries, position, sequence, keys = read_tile(arrays, scalars, tile, SHAPE)
    announce(memory, count, items, 0, 0)


@gluon.jit
def finish_rows(arrays, o_row, row, queries, sequence, key_head, b_exponent, b_sum, SHAPE: gl.constexpr):
    """Store the log-sum-exps of rows, and return the factors that normalise the results, 0 for rows without keys.

    `b_sum` are the sums of weights relative to 2^b_exponent.
    """
    m_row = o_row < queries * SHAPE.group
    b_shrink = gl.full_like(b_sum, 1.0)
    if SHAPE.has_sinks:
        if sequence >= 0:
            p_sink = arrays.sinks + key_head * SHAPE.group + o_row % SHAPE.group
            b_sink = gl.load(p_sink, mask=m_row, other=float("-inf")) * LOG2_E
            b_base = gl.maximum(b_exponent, b_sink)
            # Both may be -inf.
            b_base = gl.where(b_base == float("-inf"), 0.0, b_base)
            b_shrink = gl.exp2(b_exponent - b_base)
            b_sum = b_sum * b_shrink + gl.exp2(b_sink - b_base)
            b_exponent = b_base
    is_empty = b_sum == 0
    b_log_sum = gl.where(is_empty, float("-inf"), (b_exponent + gl.log2(b_sum)) * LN_2)
    gl.store(arrays.log_sum + head_rows(o_row, row, key_head, SHAPE), b_log_sum, mask=m_row)
    return gl.where(is_empty, 0.0, b_shrink / b_sum)


@gluon.jit
def compute(memory, arrays, scalars, GROUP: gl.constexpr, SHAPE: gl.constexpr):
    """Compute the results of 64 rows of each item."""
    HALF: gl.constexpr = SHAPE.rows // 2
    WIDTH: gl.constexpr = SHAPE.columns
    items = scalars.num_tiles * SHAPE.key_heads
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, SHAPE.chunk, 16])
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [WARPS, 1], [1, 0])
    # The key of Triton's cache covers the source of functions that a kernel names, and `SCORES` hides this one.
    gl.static_assert(score is not None)
    b_none = gl.zeros([HALF, SHAPE.chunk], gl.float32, S)
    number = 0
    count = 0
    item, masked, live = next_item(memory, count)
    tile, key_head = place_of(item, scalars, SHAPE)
    row, queries, position, sequence, keys = read_tile(arrays, scalars, tile, SHAPE)
    while item < items:
        o_row = GROUP * HALF + gl.arange(0, HALF, gl.SliceLayout(1, S))
        numbers = per_query(scalars, position + o_row // SHAPE.group, keys, SHAPE)
        slot = count % SHAPE.query_slots
        mbarrier.wait(memory.query_full.index(slot), count // SHAPE.query_slots % 2)
        query = memory.query.index(slot).slice(GROUP * HALF, HALF)
        b_output, _b_more, b_largest, b_sum = attend(memory, SHAPE, 0, numbers, query, query, number, count, masked,
                                                     live, b_none, GROUP, SCORES, SHAPE)
        number += gl.maximum(live, 1)
        # The next tile's numbers arrive while these results leave.
        item, masked, live = next_item(memory, count + 1)
        tile, next_head = place_of(item, scalars, SHAPE)
        next_row, next_queries, position, next_sequence, keys = read_tile(arrays, scalars, tile, SHAPE)
        b_factor = finish_rows(arrays, o_row, row, queries, sequence, key_head, b_largest * SHAPE.unit, b_sum, SHAPE)
        # The products with the queries have completed, so results can take their place.
        b_norm = gl.expand_dims(gl.convert_layout(b_factor, gl.SliceLayout(1, b_output.type.layout)), 1)
        # A selection, not a product: a value that no query sees may be NaN.
        query.store(gl.where(b_norm == 0.0, 0.0, b_output * b_norm).to(memory.query.dtype))
        thread_barrier()
        o_line = GROUP * HALF + gl.expand_dims(gl.arange(0, HALF, gl.SliceLayout(1, LINES)), 1)
        o_column = gl.expand_dims(gl.arange(0, WIDTH, gl.SliceLayout(0, LINES)), 0)
        b_line = head_rows(o_line, row, key_head, SHAPE)
        gl.store(arrays.output + b_line.to(gl.int64) * WIDTH + o_column, query.load(LINES),
                 mask=(o_line < queries * SHAPE.group) & (o_column >= 0))
        thread_barrier()
        mbarrier.arrive(memory.query_empty.index(slot), count=1)
        count += 1
        row = next_row
        queries = next_queries
        sequence = next_sequence
        key_head = next_head


@gluon.jit
def paged_prompts(arrays: PromptArrays, scalars: PromptScalars, SHAPE: gl.constexpr):
    """Compute results and log-sum-exps of the program's items."""
    SLOTS: gl.constexpr = SHAPE.slots
    QUERY_SLOTS: gl.constexpr = SHAPE.query_slots
    dtype: gl.constexpr = arrays.query.dtype.element_ty
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    query = gl.allocate_shared_memory(dtype, [QUERY_SLOTS, SHAPE.rows, SHAPE.features], TILE)
    key = gl.allocate_shared_memory(dtype, [SLOTS, SHAPE.chunk, SHAPE.features], TILE)
    value = gl.allocate_shared_memory(dtype, [SLOTS, SHAPE.chunk, SHAPE.columns], TILE)
    row_numbers = gl.allocate_shared_memory(gl.int32, [SHAPE.rows], PLAIN)
    tiles = gl.allocate_shared_memory(gl.int32, [SLOTS, 1], PLAIN)
    items = gl.allocate_shared_memory(gl.int32, [AHEAD, 1], PLAIN)
    masked = gl.allocate_shared_memory(gl.int32, [AHEAD, 1], PLAIN)
    live = gl.allocate_shared_memory(gl.int32, [AHEAD, 1], PLAIN)
    item_full = make_barriers(AHEAD, 1)
    turns = item_full
    if SHAPE.takes_turns:
        turns = make_barriers(2, 1)
    memory = ForwardMemory(
        query, query, key, key, value, value, query, query, tiles, items, masked, live,
        make_barriers(QUERY_SLOTS, COPYING), make_barriers(QUERY_SLOTS, 2), make_barriers(SLOTS, COPYING),
        make_barriers(SLOTS, 2), make_barriers(SLOTS, COPYING), make_barriers(SLOTS, 2), item_full,
        make_barriers(AHEAD, 2), turns,
    )
    fence_async_shared()
    thread_barrier()
    gl.warp_specialize(
        [
            (compute, (memory, arrays, scalars, 0, SHAPE)),
            (compute, (memory, arrays, scalars, 1, SHAPE)),
            (load, (memory, row_numbers, arrays, scalars, SHAPE)),
        ],
        [4, 4],
        [232, 40],
    )
