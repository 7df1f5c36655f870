"""A hand-scheduled Hopper version of `routing.moba_choose`, for few slots.

Sorting is most of the work. Each thread sorts its own scores of a tile with a sorting network and merges the best ones
into its list of the best so far, all in registers. The lists of a row's four threads are merged once, at the end.

The sorted values are keys: scores whose lowest bits are replaced by the block's place in its tile. Keys that differ
only in the place do not tell which score is larger. If that could change a query's selection, the program starts again
with whole scores. It does the same for scores that are not finite.
"""

# Tuples of tensors are extended by addition, because Gluon has no unpacking.
# ruff: noqa: RUF005
# Device code is laid out by hand: one argument per line would hide what a kernel does.
# fmt: off

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from blockdiag.triton_kernels.launch.gluon_names import load_async, thread_barrier
from blockdiag.triton_kernels.moba.arguments import ChooseArrays, ChooseScalars

# Score of blocks that cannot be selected; blocks with lower scores cannot be selected either. The sum of some thousands
# of these scores is finite, which the check for non-finite scores needs.
NO_SCORE = gl.constexpr(-1e34)
# Sorting network for eight keys. Neighbouring exchanges are independent of each other.
EIGHT = gl.constexpr((
    (0, 2), (1, 3), (4, 6), (5, 7), (0, 4), (1, 5), (2, 6), (3, 7), (0, 1), (2, 3), (4, 5), (6, 7),
    (2, 4), (3, 5), (1, 4), (3, 6), (1, 2), (3, 4), (5, 6),
))


class CentroidMemory(NamedTuple):
    """Shared memory of a tile of centroids.

    Attributes:
        parts: the parts, [part, block, feature].
        scales: the factors of scores, [block], where parts are halves.
    """

    parts: Any
    scales: Any


class Centroids(NamedTuple):
    """The centroids of a key head in global memory.

    Attributes:
        parts: pointer to the parts of all key heads, [block, head, part, feature].
        scale: pointer to the factors of the head's scores, [block], where parts are halves; otherwise None.
        head: the key head.
        lowest: the first block that is copied; blocks before it are zero.
    """

    parts: Any
    scale: Any
    head: Any
    lowest: Any


@gluon.jit
def load_centroids(memory, centroids, first, SHAPE: gl.constexpr, LINES: gl.constexpr):
    """Start copying all parts of the centroids of blocks [first, first + rows).

    `memory` is a CentroidMemory, `centroids` a Centroids, SHAPE a HopperChoiceShape.
    """
    HEAD_DIM: gl.constexpr = SHAPE.head_dim
    PARTS: gl.constexpr = SHAPE.parts
    lowest = centroids.lowest
    BLOCKS: gl.constexpr = memory.parts.shape[1]
    o_block = first + gl.expand_dims(gl.arange(0, BLOCKS, gl.SliceLayout(1, LINES)), 1)
    o_column = gl.expand_dims(gl.arange(0, HEAD_DIM, gl.SliceLayout(0, LINES)), 0)
    o_head = (o_block * SHAPE.key_heads + centroids.head).to(gl.int64)
    p_part = centroids.parts + o_head * (PARTS * HEAD_DIM) + o_column
    for part in gl.static_range(PARTS):
        load_async(memory.parts.index(part), p_part + part * HEAD_DIM, mask=(o_block >= lowest) & (o_column >= 0))
    if centroids.scale is not None:
        LINE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        o_scale = first + gl.arange(0, BLOCKS, LINE)
        load_async(memory.scales, centroids.scale + o_scale, mask=o_scale >= lowest)
    async_copy.commit_group()


@gluon.jit
def score_blocks(b_query, memory, centroids, b_zero, PARTS: gl.constexpr):
    """Return the scores of a tile, and wait until all threads have read it.

    The least significant parts come first. The order determines the rounding of the result.
    """
    b_scores = warpgroup_mma(b_query, memory.parts.index(PARTS - 1).permute((1, 0)), b_zero, use_acc=False,
                             is_async=True)
    for part in gl.static_range(PARTS - 2, -1, -1):
        b_scores = warpgroup_mma(b_query, memory.parts.index(part).permute((1, 0)), b_scores, is_async=True)
    if centroids.scale is not None:
        b_scale = memory.scales.load(gl.SliceLayout(0, b_zero.type.layout))
        b_scores = warpgroup_mma_wait(0, deps=[b_scores]) * gl.expand_dims(b_scale, 0)
    else:
        b_scores = warpgroup_mma_wait(0, deps=[b_scores])
    thread_barrier()
    return b_scores


@gluon.jit
def one_each(b_scores):
    """Split the scores of a tile into a tuple of [rows, 4] blocks, with one element per thread that holds a row.

    An accumulator keeps column 8 a + 2 t + b of a row in thread t of four, so no data moves. The index into the tuple
    has b as its highest bit and then the bits of a, lowest first.
    """
    ROWS: gl.constexpr = b_scores.shape[0]
    BLOCKS: gl.constexpr = b_scores.shape[1]
    b_apart = b_scores.reshape([ROWS, BLOCKS // 8, 4, 2]).permute((0, 2, 1, 3)).reshape([ROWS, 4, BLOCKS // 4])
    parts = (b_apart,)
    for level in gl.static_range((BLOCKS // 4).bit_length() - 1):
        halves = ()
        for i in gl.static_range(len(parts)):
            halves = halves + parts[i].reshape([ROWS, 4, (BLOCKS // 8) >> level, 2]).split()
        parts = halves
    result = ()
    for i in gl.static_range(len(parts)):
        result = result + (parts[i].reshape([ROWS, 4]),)
    return result


@gluon.jit
def exchange(keys, UPPER: gl.constexpr, LOWER: gl.constexpr):
    """Compare two entries and put the larger one at UPPER and the smaller one at LOWER."""
    b_larger = gl.maximum(keys[UPPER], keys[LOWER])
    b_smaller = gl.minimum(keys[UPPER], keys[LOWER])
    result = ()
    for i in gl.static_range(len(keys)):
        if i == UPPER:
            result = result + (b_larger,)
        elif i == LOWER:
            result = result + (b_smaller,)
        else:
            result = result + (keys[i],)
    return result


@gluon.jit
def order_eight(keys):
    """Sort eight keys in descending order with a network of 19 exchanges."""
    for i in gl.static_range(len(EIGHT)):
        keys = exchange(keys, EIGHT[i][0], EIGHT[i][1])
    return keys


@gluon.jit
def order_bitonic(keys):
    """Sort a bitonic sequence of keys in descending order."""
    SIZE: gl.constexpr = len(keys)
    for level in gl.static_range(SIZE.bit_length() - 1):
        for i in gl.static_range(SIZE):
            if i & (SIZE >> (level + 1)) == 0:
                keys = exchange(keys, i, i + (SIZE >> (level + 1)))
    return keys


@gluon.jit
def best_of_two(first, second, KEEP: gl.constexpr):
    """Return the KEEP largest keys of two descending lists of eight, in descending order."""
    result = ()
    if KEEP > 8:
        for i in gl.static_range(16):
            if i < 8:
                result = result + (first[i],)
            else:
                result = result + (second[15 - i],)
    else:
        for i in gl.static_range(KEEP):
            result = result + (gl.maximum(first[i], second[KEEP - 1 - i]),)
    return order_bitonic(result)


@gluon.jit
def order_level(keys, ids, STEP: gl.constexpr):
    """Apply one level of a bitonic sorter to keys with ids, larger keys first."""
    new_keys = ()
    new_ids = ()
    for i in gl.static_range(len(keys)):
        if i & STEP == 0:
            m_swap = keys[i + STEP] > keys[i]
            new_keys = new_keys + (gl.maximum(keys[i], keys[i + STEP]),)
            new_ids = new_ids + (gl.where(m_swap, ids[i + STEP], ids[i]),)
        else:
            m_swap = keys[i] > keys[i - STEP]
            new_keys = new_keys + (gl.minimum(keys[i], keys[i - STEP]),)
            new_ids = new_ids + (gl.where(m_swap, ids[i - STEP], ids[i]),)
    return new_keys, new_ids


@gluon.jit
def merge_lists(keys, ids, other_keys, other_ids, KEEP: gl.constexpr):
    """Return the KEEP largest keys of two descending lists, with their ids. Ties go to the first list."""
    new_keys = ()
    new_ids = ()
    for i in gl.static_range(KEEP):
        # One list against the reverse of the other leaves a bitonic sequence of the largest keys.
        m_new = other_keys[KEEP - 1 - i] > keys[i]
        new_keys = new_keys + (gl.maximum(keys[i], other_keys[KEEP - 1 - i]),)
        new_ids = new_ids + (gl.where(m_new, other_ids[KEEP - 1 - i], ids[i]),)
    for level in gl.static_range(KEEP.bit_length() - 1):
        new_keys, new_ids = order_level(new_keys, new_ids, KEEP >> (level + 1))
    return new_keys, new_ids


@gluon.jit
def merge_tile(keys, ids, b_check, b_scores, tile, KEEP: gl.constexpr, MASK: gl.constexpr):
    """Merge the scores of a tile into each thread's list of the best keys of a row.

    Ids are the places of blocks in their tiles plus an offset for the tile. `b_check` is the sum of all scores, so it
    is infinite or NaN if any score is.
    """
    parts = one_each(b_scores)
    PLACES: gl.constexpr = len(parts) - 1
    new = ()
    for i in gl.static_range(len(parts)):
        # Adding 0 turns -0 into 0, so that both give the same key.
        b_part = parts[i] + 0.0
        if MASK:
            # With a key mask, blocks without keys have NaN scores, which become NO_SCORE. Without one, NaN is left to
            # `b_check`.
            b_part = gl.maximum(b_part, NO_SCORE)
        b_check += b_part
        new = new + (((b_part.to(gl.int32, bitcast=True) & ~PLACES) | i).to(gl.float32, bitcast=True),)
    first = ()
    second = ()
    for i in gl.static_range(8):
        first = first + (new[i],)
        second = second + (new[8 + i],)
    new = best_of_two(order_eight(first), order_eight(second), KEEP)
    new_ids = ()
    for i in gl.static_range(KEEP):
        new_ids = new_ids + ((new[i].to(gl.int32, bitcast=True) & PLACES) | (tile * (PLACES + 1)),)
    keys, ids = merge_lists(keys, ids, new, new_ids, KEEP)
    return keys, ids, b_check


@gluon.jit
def block_of(b_place, o_thread, highest, BLOCKS: gl.constexpr):
    """Return the block numbers for ids made of tiles and places. See `one_each` for the order of places."""
    PLACES: gl.constexpr = BLOCKS // 4
    b_place_in_tile = b_place % PLACES
    b_column = 2 * o_thread + b_place_in_tile // (PLACES // 2)
    for level in gl.static_range(PLACES.bit_length() - 2):
        b_column += ((b_place_in_tile >> (PLACES.bit_length() - 3 - level)) & 1) << (3 + level)
    return highest - (b_place // PLACES + 1) * BLOCKS + b_column


@gluon.jit
def of_threads(b_values, LAYOUT: gl.constexpr):
    """Split the values of a row's four threads, [rows, 4], into four [rows] blocks."""
    halves = gl.convert_layout(b_values, LAYOUT).reshape([b_values.shape[0], 2, 2]).split()
    return halves[0].split() + halves[1].split()


@gluon.jit
def merge_threads(keys, ids, KEEP: gl.constexpr, LAYOUT: gl.constexpr):
    """Merge the lists of a row's four threads, [rows, 4], into one list per row."""
    many_keys = ()
    many_ids = ()
    for i in gl.static_range(KEEP):
        many_keys = many_keys + of_threads(keys[i], LAYOUT)
        many_ids = many_ids + of_threads(ids[i], LAYOUT)
    for thread in gl.static_range(4):
        some_keys = ()
        some_ids = ()
        for i in gl.static_range(KEEP):
            some_keys = some_keys + (many_keys[4 * i + thread],)
            some_ids = some_ids + (many_ids[4 * i + thread],)
        if thread == 0:
            keys = some_keys
            ids = some_ids
        else:
            keys, ids = merge_lists(keys, ids, some_keys, some_ids, KEEP)
    return keys, ids


@gluon.jit
def insert_best(best, ids, b_top, b_id, SLOTS: gl.constexpr):
    """Insert one score and block into each row's sorted list. Among equal scores, earlier insertions stay ahead."""
    new_best = ()
    new_ids = ()
    for slot in gl.static_range(SLOTS):
        m_ahead = b_top > best[slot]
        new_best = new_best + (gl.where(m_ahead, b_top, best[slot]),)
        new_ids = new_ids + (gl.where(m_ahead, b_id, ids[slot]),)
        b_top = gl.where(m_ahead, best[slot], b_top)
        b_id = gl.where(m_ahead, ids[slot], b_id)
    return new_best, new_ids


@gluon.jit
def choose_exactly(b_query, memory, centroids, b_first, b_end, highest, tiles, b_zero, SHAPE: gl.constexpr,
                   LINES: gl.constexpr):
    """Select the best blocks one by one, by whole scores. Ties go to the later block.

    Queries choose among blocks [b_first, b_end), the last of which is before `highest`, in `tiles` tiles.
    """
    SLOTS: gl.constexpr = SHAPE.slots
    S: gl.constexpr = b_zero.type.layout
    BLOCKS: gl.constexpr = b_zero.shape[1]
    best = ()
    ids = ()
    for _slot in gl.static_range(SLOTS):
        best = best + (gl.full([b_zero.shape[0]], float("-inf"), gl.float32, gl.SliceLayout(1, S)),)
        ids = ids + (gl.full([b_zero.shape[0]], -1, gl.int32, gl.SliceLayout(1, S)),)
    for tile in range(tiles):
        first = highest - (tile + 1) * BLOCKS
        load_centroids(memory, centroids, first, SHAPE, LINES)
        async_copy.wait_group(0)
        fence_async_shared()
        thread_barrier()
        b_scores = score_blocks(b_query, memory, centroids, b_zero, SHAPE.parts)
        o_block = first + gl.expand_dims(gl.arange(0, BLOCKS, gl.SliceLayout(0, S)), 0)
        m_better = (o_block >= gl.expand_dims(b_first, 1)) & (o_block < gl.expand_dims(b_end, 1))
        # The comparison is false for NaN.
        m_better = m_better & (b_scores > gl.expand_dims(best[SLOTS - 1], 1))
        b_scores = gl.where(m_better, b_scores, float("-inf"))
        rounds = gl.minimum(gl.max(gl.sum(m_better.to(gl.int32), 1), 0), SLOTS)
        for _round in range(rounds):
            b_top = gl.max(b_scores, 1)
            b_id = gl.max(gl.where(b_scores == gl.expand_dims(b_top, 1), o_block, -1), 1)
            b_scores = gl.where(o_block == gl.expand_dims(b_id, 1), float("-inf"), b_scores)
            best, ids = insert_best(best, ids, b_top, b_id, SLOTS)
    return ids


@gluon.jit
def scale_queries(b_query):
    """Return float16 queries, times a power of two for each row, as in `routing.moba_choose`."""
    b_query = b_query.to(gl.float32)
    b_exponent = gl.maximum(gl.max(gl.abs(b_query), 1).to(gl.int32, bitcast=True) & 0x7F800000, 14 << 23)
    b_factor = ((127 << 23) - (b_exponent - (141 << 23))).to(gl.float32, bitcast=True)
    return (b_query * gl.expand_dims(b_factor, 1)).to(gl.float16)


@gluon.jit
def bounds_of_both(lowest, highest, all_from, all_until, other_lowest, other_highest, other_all_from, other_all_until):
    """Combine two sets of bounds for a reduction: minimum, maximum, maximum and minimum."""
    return (gl.minimum(lowest, other_lowest), gl.maximum(highest, other_highest),
            gl.maximum(all_from, other_all_from), gl.minimum(all_until, other_all_until))


@gluon.jit
def moba_hopper_choose(arrays: ChooseArrays, scalars: ChooseScalars, SHAPE: gl.constexpr, TILE: gl.constexpr):
    """Select the SLOTS best blocks of each query by descending score, int32 [head, query, slot], -1 after the last.

    Each thread keeps the best of the blocks whose scores it holds. The threads' lists are merged at the end. Selected
    blocks whose scores have equal keys may come in any order.

    SHAPE is a HopperChoiceShape, TILE a HopperChoiceTile.
    """
    QUERY_HEADS: gl.constexpr = SHAPE.query_heads
    HEAD_DIM: gl.constexpr = SHAPE.head_dim
    SLOTS: gl.constexpr = SHAPE.slots
    KEEP: gl.constexpr = TILE.keep
    ROWS: gl.constexpr = TILE.rows
    BLOCKS: gl.constexpr = TILE.blocks
    head = gl.program_id(1)
    key_head = head // (QUERY_HEADS // SHAPE.key_heads)
    WARPS: gl.constexpr = gl.num_warps()
    gl.static_assert(ROWS == 64 and WARPS == 4)
    if arrays.halves is None:
        p_parts = arrays.centroids
    else:
        p_parts = arrays.halves
    dtype: gl.constexpr = p_parts.dtype.element_ty
    MEMORY: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [WARPS, 1], [1, 0])
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCKS, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    parts = gl.allocate_shared_memory(dtype, [SHAPE.parts, BLOCKS, HEAD_DIM], MEMORY)
    scales = parts
    p_scale = arrays.scales
    if arrays.scales is not None:
        scales = gl.allocate_shared_memory(gl.float32, [BLOCKS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        p_scale = arrays.scales + key_head * scalars.num_blocks
    memory = CentroidMemory(parts, scales)
    # Late queries choose among more blocks. Their programs start first, so that none of them runs alone at the end.
    first_row = (gl.num_programs(0) - 1 - gl.program_id(0)) * ROWS
    o_line = gl.expand_dims(first_row + gl.arange(0, ROWS, gl.SliceLayout(1, LINES)), 1)
    o_column = gl.expand_dims(gl.arange(0, HEAD_DIM, gl.SliceLayout(0, LINES)), 0)
    p_query = arrays.query + o_line.to(gl.int64) * (QUERY_HEADS * HEAD_DIM) + head * HEAD_DIM + o_column
    b_query = gl.load(p_query, mask=(o_line < scalars.query_tokens) & (o_column >= 0), other=0.0)
    if arrays.halves is not None:
        b_query = scale_queries(b_query)
    o_row = first_row + gl.arange(0, ROWS, ROW)
    m_row = o_row < scalars.query_tokens
    b_first = gl.load(arrays.queries + o_row * 4, mask=m_row, other=0)
    b_end = gl.load(arrays.queries + o_row * 4 + 1, mask=m_row, other=0)
    # Some query of the tile may choose blocks [lowest, highest); every query may choose blocks [all_from, all_until).
    lowest, highest, all_from, all_until = gl.reduce(
        (gl.where(b_first < b_end, b_first, 2147483647), b_end, b_first, b_end), 0, bounds_of_both)
    tiles = gl.maximum(highest - lowest + BLOCKS - 1, 0) // BLOCKS
    if lowest >= highest:
        tiles = 0
    centroids = Centroids(p_parts, p_scale, key_head, lowest)
    load_centroids(memory, centroids, highest - BLOCKS, SHAPE, LINES)
    # With the queries in registers the tensor cores read only one operand from shared memory, whose bandwidth would
    # limit them otherwise.
    b_query = gl.convert_layout(b_query, gl.DotOperandLayout(0, S, 2))

    b_zero = gl.zeros([ROWS, BLOCKS], gl.float32, S)
    THREADS: gl.constexpr = one_each(b_zero)[0].type.layout
    PLACES: gl.constexpr = BLOCKS // 4 - 1
    keys = ()
    ids = ()
    for _slot in gl.static_range(KEEP):
        keys = keys + (gl.full([ROWS, 4], float("-inf"), gl.float32, THREADS),)
        ids = ids + (gl.full([ROWS, 4], 0, gl.int32, THREADS),)
    b_check = gl.zeros([ROWS, 4], gl.float32, THREADS)
    for tile in range(tiles):
        async_copy.wait_group(0)
        fence_async_shared()
        thread_barrier()
        b_scores = score_blocks(b_query, memory, centroids, b_zero, SHAPE.parts)
        first = highest - (tile + 1) * BLOCKS
        load_centroids(memory, centroids, first - BLOCKS, SHAPE, LINES)
        if first < all_from or first + BLOCKS > all_until:
            b_first = gl.load(arrays.queries + o_row * 4, mask=m_row, other=0)
            b_end = gl.load(arrays.queries + o_row * 4 + 1, mask=m_row, other=0)
            o_block = first + gl.expand_dims(gl.arange(0, BLOCKS, gl.SliceLayout(0, S)), 0)
            m_block = (o_block >= gl.expand_dims(b_first, 1)) & (o_block < gl.expand_dims(b_end, 1))
            b_scores = gl.where(m_block, b_scores, NO_SCORE)
        keys, ids, b_check = merge_tile(keys, ids, b_check, b_scores, tile, KEEP, SHAPE.has_mask)
    async_copy.wait_group(0)
    o_thread = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, THREADS)), 0)
    blocks = ()
    for i in gl.static_range(KEEP):
        blocks = blocks + (block_of(ids[i], o_thread, highest, BLOCKS),)
    # Each warp keeps its rows, so lists move between threads without shared memory.
    ROWWISE: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2]], lane_bases=[[1, 0], [2, 0], [4, 0], [8, 0], [0, 0]],
        warp_bases=[[16, 0], [32, 0]], block_bases=[], shape=[ROWS, 4])
    keys, blocks = merge_threads(keys, blocks, KEEP, ROWWISE)
    ONE: gl.constexpr = keys[0].type.layout
    # Keys of the last selected and of the first rejected block, without their places.
    b_last = keys[SLOTS - 1].to(gl.int32, bitcast=True) & ~PLACES
    b_left = keys[SLOTS].to(gl.int32, bitcast=True) & ~PLACES
    m_open = (b_last == b_left) & (keys[SLOTS] > NO_SCORE)
    check = of_threads(b_check, ROWWISE)
    m_finite = gl.abs((check[0] + check[1]) + (check[2] + check[3])) < float("inf")
    m_open = m_open | (m_finite == False)  # noqa: E712
    chosen = ()
    for slot in gl.static_range(SLOTS):
        chosen = chosen + (gl.where(keys[slot] > NO_SCORE, blocks[slot], -1),)
    if gl.max(m_open.to(gl.int32), 0) > 0:
        b_first = gl.load(arrays.queries + o_row * 4, mask=m_row, other=0)
        b_end = gl.load(arrays.queries + o_row * 4 + 1, mask=m_row, other=0)
        exact = choose_exactly(b_query, memory, centroids, b_first, b_end, highest, tiles, b_zero, SHAPE, LINES)
        chosen = ()
        for slot in gl.static_range(SLOTS):
            chosen = chosen + (gl.convert_layout(exact[slot], ONE),)
    o_store = first_row + gl.arange(0, ROWS, ONE)
    p_row = arrays.chosen + (head.to(gl.int64) * scalars.query_tokens + o_store) * SLOTS
    for slot in gl.static_range(SLOTS):
        gl.store(p_row + slot, chosen[slot], mask=o_store < scalars.query_tokens)
    parts._keep_alive()
    scales._keep_alive()
