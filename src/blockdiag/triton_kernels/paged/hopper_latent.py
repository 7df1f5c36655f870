"""Kernel in Gluon for Hopper: queries attend to a split of a latent cache, whose values are columns of its keys.

It computes what `attention.paged_splits` does, for 16-bit keys of 576 columns with values in the first 512. A program
has a tile of 64 rows. The results of a tile, 64 x 512, take half of the registers of a multiprocessor, so that there is
one program on each.

| warps | function | work |
|---|---|---|
| 4 + 4 | `add_values` | products of weights and values, for half of the columns each |
| 4 | `weigh` | scores, weights, and their sums |
| 4 | `load` | find keys in the pages; load queries and keys |

Each chunk of keys is one tile in shared memory, an operand of both products. Its last 64 columns belong to keys alone.
Once the scores are there, the weights of the chunk take their place.
"""

# Device code is laid out by hand: one argument per line would hide what a kernel does.
# fmt: off

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from blockdiag.triton_kernels.dense.hopper_forward import LN_2, WARPS
from blockdiag.triton_kernels.launch.gluon_names import thread_barrier
from blockdiag.triton_kernels.paged.arguments import SplitArrays, SplitScalars
from blockdiag.triton_kernels.paged.attention import place_of, rows_of_heads, split_bounds
from blockdiag.triton_kernels.paged.configs import SPLIT_GRAIN
from blockdiag.triton_kernels.paged.hopper_prompts import COPYING, LOG2_E, copy_rows, find_pages, pool_rows
from blockdiag.triton_kernels.parts.hopper_tiles import make_barriers
from blockdiag.triton_kernels.parts.resident_tiles import partial_sums

GRAIN = gl.constexpr(SPLIT_GRAIN)
# Chunks of keys in shared memory.
SLOTS = gl.constexpr(2)


class Memory(NamedTuple):
    """Shared memory and barriers of a program.

    Attributes:
        query, query_more: the two parts of the columns of queries.
        key: the first part of the columns of keys, which are the values.
        key_more: the second part, then the weights of the chunk.
        shrink: factors of the results before a chunk.
        norm: factors of the results at the end, 0 for rows that see no key.
        row_numbers: rows in the pool of the keys of a chunk, or rows of queries.
    """

    query: Any
    query_more: Any
    key: Any
    key_more: Any
    shrink: Any
    norm: Any
    row_numbers: Any
    query_full: Any
    key_full: Any
    key_empty: Any
    weights_full: Any
    norm_full: Any


class Span(NamedTuple):
    """The rows of a program, and the keys that they see.

    Attributes:
        sequence, key_head, batch, split: what the program computes, and how many entries there are to compute.
        first_row: the first of the program's rows, among those of its sequence or tile of queries.
        query_row, position: the row of the first query among all, and its position.
        rows, written: rows with queries, and rows that the launch writes.
        first, end: the keys that any row sees.
    """

    sequence: Any
    key_head: Any
    batch: Any
    entries: Any
    split: Any
    first_row: Any
    query_row: Any
    position: Any
    rows: Any
    written: Any
    first: Any
    end: Any


@gluon.jit
def span_of(arrays, scalars, SHAPE: gl.constexpr, TILE: gl.constexpr, OPTIONS: gl.constexpr):
    """Return the Span of a program."""
    GROUP: gl.constexpr = SHAPE.group_size
    part = gl.program_id(0)
    key_head = gl.program_id(1)
    batch = gl.program_id(2)
    entries = gl.num_programs(2)
    if SHAPE.is_long:
        part = gl.program_id(2)
        batch = gl.program_id(0)
        entries = gl.num_programs(0)
    split = part // TILE.row_tiles
    sequence, keys, queries, written, position, query_row = place_of(arrays, scalars, batch, SHAPE)
    if OPTIONS.is_causal and (SHAPE.entries != "sequences"):
        # The keys after a tile's last query are left out, so that splits divide the others.
        keys = gl.minimum(keys, gl.maximum(position + queries, 0))
    first_row = part % TILE.row_tiles * TILE.rows
    start = 0
    if OPTIONS.left is not None:
        start = gl.maximum(position - OPTIONS.left, 0) // GRAIN * GRAIN
    first, end = split_bounds(split, scalars.num_splits, scalars.split_size, keys, start)
    last_position = position + gl.minimum((first_row + TILE.rows - 1) // GROUP, queries - 1)
    if OPTIONS.left is not None:
        first = gl.maximum(first, gl.maximum(position + first_row // GROUP - OPTIONS.left, 0) // GRAIN * GRAIN)
    if OPTIONS.is_causal:
        end = gl.minimum(end, last_position + 1)
    elif OPTIONS.right is not None:
        end = gl.minimum(end, last_position + OPTIONS.right + 1)
    # Programs may have no rows.
    end = gl.where(first_row < queries * GROUP, end, first)
    return Span(sequence, key_head, batch, entries, split, first_row, query_row, position, queries * GROUP,
                written * GROUP, first, end)


@gluon.jit
def chunks_of(span, TILE: gl.constexpr):
    """Return the number of chunks of keys."""
    return gl.maximum(span.end - span.first + TILE.keys - 1, 0) // TILE.keys


@gluon.jit
def load(memory, arrays, scalars, SHAPE: gl.constexpr, TILE: gl.constexpr, OPTIONS: gl.constexpr):
    """Load the queries, then chunks of keys."""
    ROWS: gl.constexpr = TILE.rows
    KEYS: gl.constexpr = TILE.keys
    COLUMNS: gl.constexpr = TILE.columns
    MORE: gl.constexpr = TILE.more_columns
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    span = span_of(arrays, scalars, SHAPE, TILE, OPTIONS)
    row_numbers = memory.row_numbers
    o_row = span.first_row + gl.arange(0, ROWS, LINE)
    b_place = rows_of_heads(o_row, span.query_row, span.key_head, SHAPE)
    row_numbers.store(gl.where(o_row < span.rows, b_place, -1).to(gl.int32))
    o_key = span.first + gl.arange(0, KEYS, LINE)
    b_page = find_pages(arrays, scalars, o_key, span.end, span.sequence, SHAPE)
    thread_barrier()
    copy_rows(memory.query, arrays.query, row_numbers, COLUMNS + MORE, 0, ROWS, COLUMNS)
    copy_rows(memory.query_more, arrays.query, row_numbers, COLUMNS + MORE, COLUMNS, ROWS, MORE)
    async_copy.mbarrier_arrive(memory.query_full.index(0), increment_count=False)
    WIDTH: gl.constexpr = SHAPE.key_heads * (COLUMNS + MORE)
    column = span.key_head * (COLUMNS + MORE)
    for at in range(chunks_of(span, TILE)):
        slot = at % SLOTS
        b_row = pool_rows(scalars, b_page, o_key, span.end, SHAPE)
        # The pages of the next chunk arrive while this one is copied.
        o_key = o_key + KEYS
        b_page = find_pages(arrays, scalars, o_key, span.end, span.sequence, SHAPE)
        mbarrier.wait(memory.key_empty.index(slot), at // SLOTS % 2 ^ 1)
        # All threads have read the numbers of the last rows.
        thread_barrier()
        row_numbers.store(b_row)
        thread_barrier()
        copy_rows(memory.key.index(slot), arrays.key, row_numbers, WIDTH, column, KEYS, COLUMNS)
        copy_rows(memory.key_more.index(slot), arrays.key, row_numbers, WIDTH, column + COLUMNS, KEYS, MORE)
        async_copy.mbarrier_arrive(memory.key_full.index(slot), increment_count=False)


@gluon.jit
def mask(b_score, r_k, b_first, b_last, span, at, OPTIONS: gl.constexpr):
    """Return scores, -inf where a row does not see a key of chunk `at`."""
    m_seen = gl.expand_dims(r_k, 0) <= gl.expand_dims(b_last, 1)
    if OPTIONS.left is not None:
        m_seen = m_seen & (gl.expand_dims(r_k, 0) >= gl.expand_dims(b_first, 1))
    return gl.where(m_seen, b_score, float("-inf"))


@gluon.jit
def weigh(memory, arrays, scalars, SHAPE: gl.constexpr, TILE: gl.constexpr, OPTIONS: gl.constexpr):
    """Compute the weights of each chunk, and what belongs to rows: the factors of results and the log-sum-exps."""
    KEYS: gl.constexpr = TILE.keys
    GROUP: gl.constexpr = SHAPE.group_size
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, KEYS, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    span = span_of(arrays, scalars, SHAPE, TILE, OPTIONS)
    o_row = span.first_row + gl.arange(0, TILE.rows, ROW)
    m_row = o_row < span.rows
    b_position = span.position + o_row // GROUP
    b_first = b_position
    if OPTIONS.left is not None:
        b_first = b_position - OPTIONS.left
    b_last = gl.full_like(b_position, 0) + (span.end - 1)
    # The first position after which a key is hidden from some row, and the last before which it is.
    hidden_after = span.end
    if OPTIONS.right is not None:
        b_last = gl.minimum(b_last, b_position + OPTIONS.right)
        hidden_after = gl.minimum(hidden_after, span.position + span.first_row // GROUP + OPTIONS.right + 1)
    hidden_before = 0
    if OPTIONS.left is not None:
        hidden_before = gl.max(b_first, 0)
    unit = scalars.scale * LOG2_E
    slope = 0.0
    if OPTIONS.has_soft_cap:
        slope = 2.0 * unit / scalars.soft_cap
        unit = scalars.soft_cap * LOG2_E
    b_none = gl.zeros([TILE.rows, KEYS], gl.float32, S)
    b_largest = gl.full([TILE.rows], float("-inf"), gl.float32, ROW)
    b_total = partial_sums(b_none)
    PART: gl.constexpr = gl.SliceLayout(1, b_total.type.layout)
    mbarrier.wait(memory.query_full.index(0), 0)
    for at in range(chunks_of(span, TILE)):
        slot = at % SLOTS
        mbarrier.wait(memory.key_full.index(slot), at // SLOTS % 2)
        fence_async_shared()
        b_score = warpgroup_mma(memory.query, memory.key.index(slot).permute((1, 0)), b_none, use_acc=False,
                                is_async=True)
        b_score = warpgroup_mma(memory.query_more, memory.key_more.index(slot).permute((1, 0)), b_score, is_async=True)
        b_score = warpgroup_mma_wait(0, deps=[b_score])
        if OPTIONS.has_soft_cap:
            # tanh(x) = 1 - 2 / (1 + e^2x), which is accurate enough at both ends.
            b_score = 1.0 - 2.0 / (1.0 + gl.exp2(b_score * slope))
        key = span.first + at * KEYS
        if (key + KEYS > hidden_after) | (key < hidden_before):
            b_score = mask(b_score, key + gl.arange(0, KEYS, gl.SliceLayout(0, S)), b_first, b_last, span, at, OPTIONS)
        b_before = b_largest
        b_largest = gl.maximum(b_before, gl.max(b_score, 1))
        # Rows that have seen no key yet count from 0.
        b_base = gl.where(b_largest == float("-inf"), 0.0, b_largest) * unit
        b_power = gl.exp2(b_score * unit - gl.expand_dims(b_base, 1))
        b_shrink = gl.exp2(b_before * unit - b_base)
        b_total = b_total * gl.expand_dims(gl.convert_layout(b_shrink, PART), 1) + partial_sums(b_power)
        # All warps' products have completed, so weights can take the place of keys.
        thread_barrier()
        memory.key_more.index(slot).store(b_power.to(memory.key_more.dtype))
        memory.shrink.index(slot).store(b_shrink)
        fence_async_shared()
        thread_barrier()
        mbarrier.arrive(memory.weights_full.index(slot), count=1)
    b_sum = gl.convert_layout(gl.sum(b_total, 1), ROW)
    b_exponent = b_largest * unit
    b_factor = gl.full_like(b_sum, 1.0)
    if OPTIONS.is_whole and OPTIONS.has_sinks:
        # The sink adds to the softmax's denominator but has no value.
        b_sink = gl.load(arrays.sinks + span.key_head * GROUP + o_row % GROUP) * LOG2_E
        b_base = gl.maximum(b_exponent, b_sink)
        # Both may be -inf.
        b_base = gl.where(b_base == float("-inf"), 0.0, b_base)
        b_factor = gl.exp2(b_exponent - b_base)
        b_sum = b_sum * b_factor + gl.exp2(b_sink - b_base)
        b_exponent = b_base
    is_empty = b_sum == 0
    b_log_sum = gl.where(is_empty | (o_row >= span.rows), float("-inf"), b_exponent + gl.log2(b_sum))
    memory.norm.store(gl.where(is_empty, 0.0, b_factor / b_sum))
    thread_barrier()
    mbarrier.arrive(memory.norm_full.index(0), count=1)
    if OPTIONS.is_whole:
        p_log_sum = arrays.log_sum
        b_log_sum = b_log_sum * LN_2
    else:
        p_log_sum = arrays.part_sum
    gl.store(p_log_sum + place_in(o_row, span, SHAPE, OPTIONS), b_log_sum, mask=o_row < span.written)


@gluon.jit
def place_in(o_row, span, SHAPE: gl.constexpr, OPTIONS: gl.constexpr):
    """Return where the results of rows are."""
    row = span.query_row
    if (not OPTIONS.is_whole) and (SHAPE.entries != "sequences"):
        row = span.batch.to(gl.int64) * SHAPE.query_tokens
    b_place = rows_of_heads(o_row, row, span.key_head, SHAPE)
    if not OPTIONS.is_whole:
        b_place += span.split.to(gl.int64) * span.entries * (SHAPE.query_tokens * SHAPE.query_heads)
    return b_place


@gluon.jit
def add_values(memory, arrays, scalars, HALF: gl.constexpr, SHAPE: gl.constexpr, TILE: gl.constexpr,
               OPTIONS: gl.constexpr):
    """Compute half of the columns of the results."""
    WIDTH: gl.constexpr = TILE.value_columns // 2
    # An instruction with more columns needs more registers than a thread has at the start.
    R: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, WIDTH // 2, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, R)
    span = span_of(arrays, scalars, SHAPE, TILE, OPTIONS)
    b_output = gl.zeros([TILE.rows, WIDTH], gl.float32, R)
    for at in range(chunks_of(span, TILE)):
        slot = at % SLOTS
        mbarrier.wait(memory.weights_full.index(slot), at // SLOTS % 2)
        # These have arrived, because the weights have been computed from them.
        mbarrier.wait(memory.key_full.index(slot), at // SLOTS % 2)
        fence_async_shared()
        b_output = b_output * gl.expand_dims(memory.shrink.index(slot).load(ROW), 1)
        value = memory.key.index(slot).slice(HALF * WIDTH, WIDTH, 1)
        b_output = warpgroup_mma(memory.key_more.index(slot), value, b_output, is_async=True)
        b_output = warpgroup_mma_wait(0, deps=[b_output])
        thread_barrier()
        mbarrier.arrive(memory.key_empty.index(slot), count=1)
    o_row = span.first_row + gl.arange(0, TILE.rows, ROW)
    mbarrier.wait(memory.norm_full.index(0), 0)
    b_norm = memory.norm.load(ROW)
    if OPTIONS.is_whole:
        target = arrays.output
        m_store = o_row < span.written
        b_norm = gl.where(o_row < span.rows, b_norm, 0.0)
    else:
        target = arrays.part
        # Parts of rows that saw no key are not stored, because the merge ignores them.
        m_store = (o_row < span.rows) & (b_norm != 0)
    b_norm = gl.expand_dims(b_norm, 1)
    o_column = HALF * WIDTH + gl.expand_dims(gl.arange(0, WIDTH, gl.SliceLayout(0, R)), 0)
    b_place = gl.expand_dims(place_in(o_row, span, SHAPE, OPTIONS), 1) * SHAPE.value_dim + o_column
    # A selection, not a product: a value that no query sees may be NaN.
    b_output = gl.where(b_norm == 0.0, 0.0, b_output * b_norm)
    gl.store(target + b_place, b_output.to(target.dtype.element_ty),
             mask=gl.expand_dims(m_store, 1) & (o_column >= 0))


@gluon.jit
def latent_splits(arrays: SplitArrays, scalars: SplitScalars, SHAPE: gl.constexpr, TILE: gl.constexpr,
                  OPTIONS: gl.constexpr):
    """Compute the attention of a tile of rows to the keys of one split; see `attention.paged_splits`."""
    dtype: gl.constexpr = arrays.query.dtype.element_ty
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    TILES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    # Weights take the place of the second part of keys.
    gl.static_assert(TILE.rows == TILE.keys and TILE.keys == TILE.more_columns)
    memory = Memory(
        query=gl.allocate_shared_memory(dtype, [TILE.rows, TILE.columns], TILES),
        query_more=gl.allocate_shared_memory(dtype, [TILE.rows, TILE.more_columns], TILES),
        key=gl.allocate_shared_memory(dtype, [SLOTS, TILE.keys, TILE.columns], TILES),
        key_more=gl.allocate_shared_memory(dtype, [SLOTS, TILE.keys, TILE.more_columns], TILES),
        shrink=gl.allocate_shared_memory(gl.float32, [SLOTS, TILE.rows], PLAIN),
        norm=gl.allocate_shared_memory(gl.float32, [TILE.rows], PLAIN),
        row_numbers=gl.allocate_shared_memory(gl.int32, [TILE.rows], PLAIN),
        query_full=make_barriers(1, COPYING),
        key_full=make_barriers(SLOTS, COPYING),
        key_empty=make_barriers(SLOTS, 2),
        weights_full=make_barriers(SLOTS, 1),
        norm_full=make_barriers(1, 1),
    )
    fence_async_shared()
    thread_barrier()
    gl.warp_specialize(
        [
            (add_values, (memory, arrays, scalars, 0, SHAPE, TILE, OPTIONS)),
            (add_values, (memory, arrays, scalars, 1, SHAPE, TILE, OPTIONS)),
            (weigh, (memory, arrays, scalars, SHAPE, TILE, OPTIONS)),
            (load, (memory, arrays, scalars, SHAPE, TILE, OPTIONS)),
        ],
        [4, 4, 4],
        [168, 120, 48],
    )
