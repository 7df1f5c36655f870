"""Kernel in Gluon for Hopper: queries attend to a split of a latent cache, whose values are columns of its keys.

It computes what `attention.paged_splits` does, for keys of 576 columns with values in the first 512. Keys have 16 bits,
or eight bits that are widened as they are loaded. A program has a tile of 64 rows. The results of a tile, 64 x 512,
take half of the registers of a multiprocessor, so there is one program on each.

| warps | function | work |
|---|---|---|
| 4 + 4 | `compute` | scores and weights of every other chunk of keys; half of the columns of all value products |
| 1 or 4 | `load_keys`, `copy_keys` or `widen_keys` | find keys in the pages, and load them |

Each chunk of keys is an operand of both products. It arrives and is freed in blocks of columns, since there is room for
two chunks only. The last 64 columns belong to keys alone. Once the scores of a chunk are complete, its weights
overwrite these columns, and both groups read them there. While a group computes the weights of a chunk, its value
product with the previous chunk is in flight, and so are the other group's products. FlashMLA (DeepSeek, 2025) divides
the work likewise.
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

from blockdiag.triton_kernels.dense.hopper_forward import LN_2, WARPS, read_number, write_number
from blockdiag.triton_kernels.launch.gluon_names import thread_barrier
from blockdiag.triton_kernels.paged.arguments import SplitArrays, SplitScalars
from blockdiag.triton_kernels.paged.hopper_latent_keys import (
    BLOCKS,
    ORDER,
    SLOTS,
    chunks_of,
    columns_of,
    copy_keys,
    load_keys,
    span_of,
    widen_keys,
)
from blockdiag.triton_kernels.paged.hopper_prompts import COPYING, LOG2_E, copy_rows
from blockdiag.triton_kernels.paged.places import rows_of_heads
from blockdiag.triton_kernels.parts.hopper_tiles import make_barriers, zero_rows
from blockdiag.triton_kernels.parts.resident_tiles import partial_sums

# The power of 2 up to which weights may grow before the results so far are scaled down.
HEADROOM = gl.constexpr(8.0)


class Memory(NamedTuple):
    """Shared memory and barriers of a program.

    Attributes:
        query, query_more: the two parts of the columns of queries, in the only slot.
        query_slot: its number, 0.
        key: the first part of the columns of keys, which are the values.
        key_more: the second part, then the weights of the chunk.
        base: for each row, the score that the weights of a chunk are relative to.
        shrink, grown: factors of the results before a chunk, and for each warp's rows whether any is not 1.
        total, total_base: for each group, the sums of its weights, and the scores that they are relative to.
        key_scale: scales of the keys of a chunk.
        row_numbers: rows in the pool of the keys of a chunk.
        query_rows: rows of queries.
    """

    query: Any
    query_more: Any
    query_slot: Any
    key: Any
    key_more: Any
    base: Any
    shrink: Any
    grown: Any
    total: Any
    total_base: Any
    key_scale: Any
    row_numbers: Any
    query_rows: Any
    query_full: Any
    key_full: Any
    key_empty: Any
    more_full: Any
    weights_full: Any
    total_full: Any


@gluon.jit
def load_query(memory, arrays, span, GROUP: gl.constexpr, SHAPE: gl.constexpr, TILE: gl.constexpr):
    """Copy half of the rows of queries, and wait for all."""
    HALF: gl.constexpr = TILE.rows // 2
    COLUMNS: gl.constexpr = TILE.columns
    MORE: gl.constexpr = TILE.more_columns
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    o_row = span.first_row + GROUP * HALF + gl.arange(0, HALF, LINE)
    b_place = rows_of_heads(o_row, span.query_row, span.key_head, SHAPE)
    numbers = memory.query_rows.index(GROUP)
    numbers.store(gl.where(o_row < span.rows, b_place, -1).to(gl.int32))
    thread_barrier()
    query = memory.query.index(0).slice(GROUP * HALF, HALF)
    copy_rows(query, arrays.query, numbers, COLUMNS + MORE, 0, HALF, COLUMNS)
    query = memory.query_more.index(0).slice(GROUP * HALF, HALF)
    copy_rows(query, arrays.query, numbers, COLUMNS + MORE, COLUMNS, HALF, MORE)
    async_copy.mbarrier_arrive(memory.query_full.index(0), increment_count=False)
    mbarrier.wait(memory.query_full.index(0), 0)
    fence_async_shared()


@gluon.jit
def zero_values(key, rows):
    """Zero the rows of a chunk from `rows` on. They are no keys of the sequence."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    for i in gl.static_range(key.shape[1] // 64):
        zero_rows(key.slice(i * 64, 64, 1), rows, LINES)


@gluon.jit
def mask(b_score, r_k, b_first, b_last, OPTIONS: gl.constexpr):
    """Return scores, -inf where a row does not see a key."""
    m_seen = gl.expand_dims(r_k, 0) <= gl.expand_dims(b_last, 1)
    if OPTIONS.left is not None:
        m_seen = m_seen & (gl.expand_dims(r_k, 0) >= gl.expand_dims(b_first, 1))
    return gl.where(m_seen, b_score, float("-inf"))


@gluon.jit
def start_scores(memory, at, b_none, LOADING: gl.constexpr):
    """Start the products of queries with chunk `at` of keys, as its blocks arrive."""
    # With a constant, the compiler would keep all descriptors of products in registers, and there are not enough.
    query_slot = read_number(memory.query_slot)
    slot = (at + query_slot) % SLOTS
    query = memory.query.index(query_slot)
    b_score = b_none
    for i in gl.static_range(BLOCKS):
        mbarrier.wait(memory.key_full.index(slot * BLOCKS + ORDER[i]), at // SLOTS % 2)
        if LOADING != "boxes":
            fence_async_shared()
        key = columns_of(memory.key.index(slot), ORDER[i])
        b_score = warpgroup_mma(columns_of(query, ORDER[i]), key.permute((1, 0)), b_score, use_acc=i > 0,
                                is_async=True)
    mbarrier.wait(memory.more_full.index(slot), at // SLOTS % 2)
    if LOADING != "boxes":
        fence_async_shared()
    query = memory.query_more.index(query_slot)
    return warpgroup_mma(query, memory.key_more.index(slot).permute((1, 0)), b_score, is_async=True)


@gluon.jit
def scales_of(memory, at, b_score):
    """Return the scales of the keys of chunk `at`, as a row beside scores."""
    scale = memory.key_scale.index(at % SLOTS)
    return gl.expand_dims(scale.load(gl.SliceLayout(0, b_score.type.layout)), 0)


@gluon.jit
def weigh(memory, at, b_score, b_before, numbers, span, TILE: gl.constexpr, OPTIONS: gl.constexpr):
    """Return the weights of chunk `at`, what they are relative to, and the factors of the results before them.

    Weights are relative to an earlier score of the row until one exceeds it by a factor of 2^HEADROOM.
    """
    b_first, b_last, hidden_before, hidden_after, unit, slope, score_scale = numbers
    key = span.first + at * TILE.keys
    if OPTIONS.has_score_scale:
        b_score = b_score * score_scale
    if OPTIONS.has_key_scale:
        b_score = b_score * scales_of(memory, at, b_score)
    if OPTIONS.has_soft_cap:
        # tanh(x) = 1 - 2 / (1 + e^2x), which is accurate enough at both ends.
        b_score = 1.0 - 2.0 / (1.0 + gl.exp2(b_score * slope))
    if (key + TILE.keys > hidden_after) | (key < hidden_before):
        r_k = key + gl.arange(0, TILE.keys, gl.SliceLayout(0, b_score.type.layout))
        b_score = mask(b_score, r_k, b_first, b_last, OPTIONS)
    b_largest = gl.max(b_score, 1)
    # False for rows that have seen no key yet.
    m_grown = (b_largest - b_before) * unit > HEADROOM
    b_base = gl.where(m_grown, b_largest, b_before)
    b_power = gl.exp2(b_score * unit - gl.expand_dims(counted_from(b_base) * unit, 1))
    b_shrink = gl.where(m_grown, gl.exp2((b_before - b_base) * unit), 1.0)
    # Warps are not reduced here, since that would take two more barriers.
    b_grown = gl.max(gl.reshape(m_grown.to(gl.int32), [WARPS, TILE.rows // WARPS]), 1)
    return b_power, b_base, b_shrink, b_grown


@gluon.jit
def counted_from(b_base):
    """Return scores that weights are relative to; 0 for rows that have seen no key yet."""
    return gl.where(b_base == float("-inf"), 0.0, b_base)


@gluon.jit
def publish(memory, at, b_power, b_base, b_shrink, b_grown, span, LOADING: gl.constexpr, TILE: gl.constexpr,
            OPTIONS: gl.constexpr):
    """Hand the weights of chunk `at` to both groups."""
    slot = at % SLOTS
    # All warps' products have completed, so weights can take the place of keys.
    thread_barrier()
    if LOADING == "boxes":
        rows = span.end - span.first - at * TILE.keys
        if rows < TILE.keys:
            zero_values(memory.key.index(slot), rows)
    if OPTIONS.value_scale == "token":
        # The values are keys, and have their scales.
        b_power = b_power * scales_of(memory, at, b_power)
    memory.key_more.index(slot).store(b_power.to(memory.key_more.dtype))
    memory.base.index(slot).store(b_base)
    memory.shrink.index(slot).store(b_shrink)
    memory.grown.index(slot).store(b_grown)
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(memory.weights_full.index(slot), count=1)


@gluon.jit
def start_values(memory, at, b_output, GROUP: gl.constexpr):
    """Start the products of the weights of chunk `at`, which have been published, with half of the value columns.

    The group that has published them has seen the keys arrive.
    """
    WIDTH: gl.constexpr = b_output.shape[1]
    EACH_WARP: gl.constexpr = gl.BlockedLayout([WARPS], [32], [WARPS], [0])
    slot = at % SLOTS
    if gl.max(memory.grown.index(slot).load(EACH_WARP), 0) > 0:
        b_shrink = memory.shrink.index(slot).load(gl.SliceLayout(1, b_output.type.layout))
        b_output = b_output * gl.expand_dims(b_shrink, 1)
    value = memory.key.index(slot).slice(GROUP * WIDTH, WIDTH, 1)
    return warpgroup_mma(memory.key_more.index(slot), value, b_output, is_async=True)


@gluon.jit
def finish_values(memory, at, b_output, GROUP: gl.constexpr):
    """Return the results once their products with chunk `at` have completed, and free the group's blocks of it."""
    slot = at % SLOTS
    b_output = warpgroup_mma_wait(0, deps=[b_output])
    thread_barrier()
    mbarrier.arrive(memory.key_empty.index(slot * 2 + GROUP), count=1)
    return b_output


@gluon.jit
def compute(memory, arrays, scalars, GROUP: gl.constexpr, LOADING: gl.constexpr, SHAPE: gl.constexpr,
            TILE: gl.constexpr, OPTIONS: gl.constexpr):
    """Weigh every other chunk of keys, and compute half of the columns of the results."""
    KEYS: gl.constexpr = TILE.keys
    HEADS: gl.constexpr = SHAPE.group_size
    WIDTH: gl.constexpr = TILE.value_columns // 2
    RIGHT: gl.constexpr = 0 if OPTIONS.is_causal and OPTIONS.right is None else OPTIONS.right
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, KEYS, 16])
    R: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, WIDTH, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    span = span_of(arrays, scalars, SHAPE, TILE, OPTIONS)
    o_row = span.first_row + gl.arange(0, TILE.rows, ROW)
    b_position = span.position + o_row // HEADS
    b_first = b_position
    b_last = gl.full_like(b_position, 0) + (span.end - 1)
    # Chunks with keys before the one, or from the other on, are masked.
    hidden_before = 0
    hidden_after = span.end
    if OPTIONS.left is not None:
        b_first = b_position - OPTIONS.left
        hidden_before = gl.max(b_first, 0)
    if RIGHT is not None:
        b_last = gl.minimum(b_last, b_position + RIGHT)
        hidden_after = gl.minimum(hidden_after, span.position + span.first_row // HEADS + RIGHT + 1)
    unit = scalars.scale * LOG2_E
    slope = 0.0
    if OPTIONS.has_soft_cap:
        slope = 2.0 * unit / scalars.soft_cap
        unit = scalars.soft_cap * LOG2_E
    score_scale = 1.0
    if OPTIONS.has_score_scale:
        score_scale = gl.load(arrays.score_scale + span.sequence * SHAPE.key_heads + span.key_head)
    numbers = (b_first, b_last, hidden_before, hidden_after, unit, slope, score_scale)
    b_none = gl.zeros([TILE.rows, KEYS], gl.float32, S)
    b_output = gl.zeros([TILE.rows, WIDTH], gl.float32, R)
    b_base = gl.full([TILE.rows], float("-inf"), gl.float32, ROW)
    b_total = partial_sums(b_none)
    PART: gl.constexpr = gl.SliceLayout(1, b_total.type.layout)
    chunks = chunks_of(span, TILE)
    load_query(memory, arrays, span, GROUP, SHAPE, TILE)
    if GROUP == 0:
        if chunks > 0:
            b_score = warpgroup_mma_wait(0, deps=[start_scores(memory, 0, b_none, LOADING)])
            b_power, b_base, b_shrink, b_grown = weigh(memory, 0, b_score, b_base, numbers, span, TILE, OPTIONS)
            publish(memory, 0, b_power, b_base, b_shrink, b_grown, span, LOADING, TILE, OPTIONS)
            b_total = partial_sums(b_power)
            b_output = finish_values(memory, 0, start_values(memory, 0, b_output, GROUP), GROUP)
    for at in range(2 - GROUP, chunks, 2):
        last = (at - 1) % SLOTS
        # The first group frees the last chunk before its scores, since the other group waits for the slot. The other
        # one has its scores by the time the first group has weights.
        if GROUP == 1:
            b_score = warpgroup_mma_wait(0, deps=[start_scores(memory, at, b_none, LOADING)])
        mbarrier.wait(memory.weights_full.index(last), (at - 1) // SLOTS % 2)
        b_before = memory.base.index(last).load(ROW)
        b_output = start_values(memory, at - 1, b_output, GROUP)
        if GROUP == 0:
            b_output = finish_values(memory, at - 1, b_output, GROUP)
            b_score = warpgroup_mma_wait(0, deps=[start_scores(memory, at, b_none, LOADING)])
        b_last_base = b_base
        b_power, b_base, b_shrink, b_grown = weigh(memory, at, b_score, b_before, numbers, span, TILE, OPTIONS)
        if GROUP == 1:
            b_output = finish_values(memory, at - 1, b_output, GROUP)
        publish(memory, at, b_power, b_base, b_shrink, b_grown, span, LOADING, TILE, OPTIONS)
        b_output = start_values(memory, at, b_output, GROUP)
        # The group has not seen how the base grew in the chunk between.
        b_factor = gl.exp2((b_last_base - counted_from(b_base)) * unit)
        b_total = b_total * gl.expand_dims(gl.convert_layout(b_factor, PART), 1) + partial_sums(b_power)
        b_output = finish_values(memory, at, b_output, GROUP)
    # The other group's last chunk.
    if (chunks > 0) & ((chunks - 1) % 2 != GROUP):
        mbarrier.wait(memory.weights_full.index((chunks - 1) % SLOTS), (chunks - 1) // SLOTS % 2)
        b_output = finish_values(memory, chunks - 1, start_values(memory, chunks - 1, b_output, GROUP), GROUP)
    memory.total.index(GROUP).store(gl.convert_layout(gl.sum(b_total, 1), ROW))
    memory.total_base.index(GROUP).store(b_base)
    thread_barrier()
    mbarrier.arrive(memory.total_full.index(0), count=1)
    mbarrier.wait(memory.total_full.index(0), 0)
    store_results(memory, arrays, b_output, unit, span, GROUP, SHAPE, TILE, OPTIONS)


@gluon.jit
def store_results(memory, arrays, b_output, unit, span, GROUP: gl.constexpr, SHAPE: gl.constexpr,
                  TILE: gl.constexpr, OPTIONS: gl.constexpr):
    """Store half of the columns of the results; the first group stores the log-sum-exps, too."""
    WIDTH: gl.constexpr = b_output.shape[1]
    ROW: gl.constexpr = gl.SliceLayout(1, b_output.type.layout)
    o_row = span.first_row + gl.arange(0, TILE.rows, ROW)
    b_base = memory.total_base.index(0).load(ROW)
    b_other = memory.total_base.index(1).load(ROW)
    b_largest = counted_from(gl.maximum(b_base, b_other))
    b_sum = memory.total.index(0).load(ROW) * gl.exp2((b_base - b_largest) * unit)
    b_sum += memory.total.index(1).load(ROW) * gl.exp2((b_other - b_largest) * unit)
    b_exponent = b_largest * unit
    b_factor = gl.full_like(b_sum, 1.0)
    if OPTIONS.is_whole and OPTIONS.has_sinks:
        # The sink adds to the softmax's denominator but has no value.
        b_sink = gl.load(arrays.sinks + span.key_head * SHAPE.group_size + o_row % SHAPE.group_size) * LOG2_E
        b_exponent = gl.where(b_sum == 0, float("-inf"), b_exponent)
        b_larger = counted_from(gl.maximum(b_exponent, b_sink))
        b_factor = gl.exp2(b_exponent - b_larger)
        b_sum = b_sum * b_factor + gl.exp2(b_sink - b_larger)
        b_exponent = b_larger
    is_empty = b_sum == 0
    b_norm = gl.where(is_empty, 0.0, b_factor / b_sum)
    if OPTIONS.value_scale == "head":
        b_norm = b_norm * gl.load(arrays.value_scale + span.sequence * SHAPE.key_heads + span.key_head)
    m_row = o_row < span.rows
    m_written = o_row < span.written
    b_place = place_in(o_row, span, SHAPE, OPTIONS)
    b_log_sum = gl.where(is_empty | (o_row >= span.rows), float("-inf"), b_exponent + gl.log2(b_sum))
    if OPTIONS.is_whole:
        p_log_sum = arrays.log_sum
        b_log_sum = b_log_sum * LN_2
        target = arrays.output
        m_store = m_written
        b_norm = gl.where(m_row, b_norm, 0.0)
    else:
        p_log_sum = arrays.part_sum
        target = arrays.part
        # Parts of rows that saw no key are not stored, because the merge ignores them.
        m_store = m_row & (b_norm != 0)
    if GROUP == 0:
        gl.store(p_log_sum + b_place, b_log_sum, mask=m_written)
    b_norm = gl.expand_dims(b_norm, 1)
    o_column = GROUP * WIDTH + gl.expand_dims(gl.arange(0, WIDTH, gl.SliceLayout(0, b_output.type.layout)), 0)
    # A selection, not a product: a value that no query sees may be NaN.
    b_output = gl.where(b_norm == 0.0, 0.0, b_output * b_norm).to(target.dtype.element_ty)
    gl.store(target + gl.expand_dims(b_place, 1) * SHAPE.value_dim + o_column, b_output,
             mask=gl.expand_dims(m_store, 1) & (o_column >= 0))


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
def latent_splits(arrays: SplitArrays, keys, scalars: SplitScalars, SHAPE: gl.constexpr, TILE: gl.constexpr,
                  OPTIONS: gl.constexpr):
    """Compute the attention of a tile of rows to the keys of one split; see `attention.paged_splits`.

    `keys` is a descriptor of boxes of keys; None if threads copy them, from small pages.
    """
    IS_NARROW: gl.constexpr = OPTIONS.key_kind is not None
    LOADING: gl.constexpr = "widened" if IS_NARROW else "copies" if keys is None else "boxes"
    # Each thread arrives when its own copies have completed.
    ARRIVALS: gl.constexpr = COPYING if LOADING == "copies" else 1
    dtype: gl.constexpr = arrays.query.dtype.element_ty
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    TILES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    # Weights take the place of the second part of keys.
    gl.static_assert(TILE.rows == TILE.keys and TILE.keys == TILE.more_columns)
    memory = Memory(
        query=gl.allocate_shared_memory(dtype, [1, TILE.rows, TILE.columns], TILES),
        query_more=gl.allocate_shared_memory(dtype, [1, TILE.rows, TILE.more_columns], TILES),
        query_slot=gl.allocate_shared_memory(gl.int32, [1], PLAIN),
        key=gl.allocate_shared_memory(dtype, [SLOTS, TILE.keys, TILE.columns], TILES),
        key_more=gl.allocate_shared_memory(dtype, [SLOTS, TILE.keys, TILE.more_columns], TILES),
        base=gl.allocate_shared_memory(gl.float32, [SLOTS, TILE.rows], PLAIN),
        shrink=gl.allocate_shared_memory(gl.float32, [SLOTS, TILE.rows], PLAIN),
        grown=gl.allocate_shared_memory(gl.int32, [SLOTS, WARPS], PLAIN),
        total=gl.allocate_shared_memory(gl.float32, [2, TILE.rows], PLAIN),
        total_base=gl.allocate_shared_memory(gl.float32, [2, TILE.rows], PLAIN),
        key_scale=gl.allocate_shared_memory(gl.float32, [SLOTS, TILE.keys], PLAIN),
        row_numbers=gl.allocate_shared_memory(gl.int32, [TILE.keys], PLAIN),
        query_rows=gl.allocate_shared_memory(gl.int32, [2, TILE.rows // 2], PLAIN),
        query_full=make_barriers(1, 2 * COPYING),
        key_full=make_barriers(SLOTS * BLOCKS, ARRIVALS),
        key_empty=make_barriers(SLOTS * 2, 1),
        more_full=make_barriers(SLOTS, ARRIVALS),
        weights_full=make_barriers(SLOTS, 1),
        total_full=make_barriers(1, 2),
    )
    write_number(memory.query_slot, 0)
    fence_async_shared()
    thread_barrier()
    if LOADING == "widened":
        gl.warp_specialize(
            [
                (compute, (memory, arrays, scalars, 0, LOADING, SHAPE, TILE, OPTIONS)),
                (compute, (memory, arrays, scalars, 1, LOADING, SHAPE, TILE, OPTIONS)),
                (widen_keys, (memory, arrays, scalars, SHAPE, TILE, OPTIONS)),
            ],
            [4, 4],
            [200, 104],
        )
    elif LOADING == "copies":
        gl.warp_specialize(
            [
                (compute, (memory, arrays, scalars, 0, LOADING, SHAPE, TILE, OPTIONS)),
                (compute, (memory, arrays, scalars, 1, LOADING, SHAPE, TILE, OPTIONS)),
                (copy_keys, (memory, arrays, scalars, SHAPE, TILE, OPTIONS)),
            ],
            [4, 4],
            [224, 56],
        )
    else:
        gl.warp_specialize(
            [
                (compute, (memory, arrays, scalars, 0, LOADING, SHAPE, TILE, OPTIONS)),
                (compute, (memory, arrays, scalars, 1, LOADING, SHAPE, TILE, OPTIONS)),
                (load_keys, (memory, arrays, scalars, keys, SHAPE, TILE, OPTIONS)),
            ],
            [4, 1],
            [224, 56],
        )
