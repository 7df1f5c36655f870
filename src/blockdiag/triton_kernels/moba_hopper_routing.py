"""Routing of MoBA for Hopper: what `moba_routing.moba_choose` computes, ordered by hand, for bfloat16 and few slots.

The scores of the next blocks are computed while the best of these are taken out, and each thread keeps the best so far
of its rows sorted in registers. Taking out the best is most of the work. It is done on keys: the score as an integer of
the same order whose six lowest bits give way to the block's place in its tile. Equal keys but for the place leave open
which score is larger; where that could change what a query chooses, the program starts again with whole scores.
"""

# Tuples of tensors grow by addition: unpacking is not part of the language.
# ruff: noqa: RUF005
# Device code is laid out by hand: one argument per line would hide what a kernel does.
# fmt: off

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Keys: below those of all scores, and that of -inf, which is no candidate's either.
LOWEST = gl.constexpr(-(2**30))
NO_SCORE = gl.constexpr((-8388608 ^ 0x7FFFFFFF) >> 1)


@gluon.jit
def load_centroids(memory, place, p_centroids, first, lowest, key_head, KEY_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr,
                   PARTS: gl.constexpr, LINES: gl.constexpr):
    """Start copying all parts of the centroids of blocks [first, first + rows); zeros before `lowest`."""
    o_block = first + gl.expand_dims(gl.arange(0, memory.shape[1], gl.SliceLayout(1, LINES)), 1)
    o_column = gl.expand_dims(gl.arange(0, HEAD_DIM, gl.SliceLayout(0, LINES)), 0)
    p_part = p_centroids + (o_block * KEY_HEADS + key_head).to(gl.int64) * (PARTS * HEAD_DIM) + o_column
    for part in gl.static_range(PARTS):
        async_copy.async_copy_global_to_shared(memory.index(place + part), p_part + part * HEAD_DIM,
                                               mask=(o_block >= lowest) & (o_column >= 0))
    async_copy.commit_group()


@gluon.jit
def score_blocks(b_query, memory, place, b_zero, PARTS: gl.constexpr):
    """Start computing scores, the least parts first; the order is part of the result's bits."""
    b_scores = warpgroup_mma(b_query, memory.index(place + PARTS - 1).permute((1, 0)), b_zero, use_acc=False,
                             is_async=True)
    for part in gl.static_range(PARTS - 2, -1, -1):
        b_scores = warpgroup_mma(b_query, memory.index(place + part).permute((1, 0)), b_scores, is_async=True)
    return b_scores


@gluon.jit
def order_level(keys, ids, STEP: gl.constexpr, KEEP: gl.constexpr):
    """One level of a bitonic sorter, larger keys first."""
    new_keys = ()
    new_ids = ()
    for i in gl.static_range(KEEP):
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
def merge_best(keys, ids, b_keys, first, PLACES: gl.constexpr, KEEP: gl.constexpr):
    """The KEEP best of `keys`, which are sorted, and of a tile's keys [rows, blocks]; LOWEST stands for none."""
    # Keys are told apart by their places, so that the next best is the largest below the last one: at the smallest
    # distance as an unsigned number, in which those that are not below come out huge. (Keys span less than 2^31.)
    b_top = gl.max(b_keys, 1)
    merged_keys = ()
    merged_ids = ()
    for i in gl.static_range(KEEP):
        # The tile's best in falling order meet the list from its end.
        b_prefix = b_top & ~PLACES
        m_new = b_prefix > keys[KEEP - 1 - i]
        merged_keys = merged_keys + (gl.where(m_new, b_prefix, keys[KEEP - 1 - i]),)
        merged_ids = merged_ids + (gl.where(m_new, first + (b_top & PLACES), ids[KEEP - 1 - i]),)
        if i < KEEP - 1:
            b_below = (gl.expand_dims(b_top - 1, 1) - b_keys).to(gl.uint32, bitcast=True)
            b_top = b_top - 1 - gl.min(b_below, 1).to(gl.int32, bitcast=True)
    STEP: gl.constexpr = KEEP // 2
    keys, ids = order_level(merged_keys, merged_ids, STEP, KEEP)
    if KEEP > 2:
        keys, ids = order_level(keys, ids, STEP // 2, KEEP)
    if KEEP > 4:
        keys, ids = order_level(keys, ids, STEP // 4, KEEP)
    if KEEP > 8:
        keys, ids = order_level(keys, ids, STEP // 8, KEEP)
    return keys, ids


@gluon.jit
def score_keys(b_scores, PLACES: gl.constexpr):
    """Scores as integers of the same order, their last bits the column; NaN counts as -inf, and -0 as 0."""
    b_bits = (gl.maximum(b_scores, float("-inf")) + 0.0).to(gl.int32, bitcast=True)
    b_bits = b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF)
    o_place = gl.arange(0, b_scores.shape[1], gl.SliceLayout(0, b_scores.type.layout))
    return ((b_bits >> 1) & ~PLACES) | gl.expand_dims(o_place, 0)


@gluon.jit
def insert_best(best, ids, b_top, b_id, SLOTS: gl.constexpr):
    """One more score and block for each row's sorted list; of equal scores those that came before stay ahead."""
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
def choose_exactly(b_query, c_smem, p_centroids, b_first, b_end, lowest, highest, tiles, key_head, b_zero,
                   KEY_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, PARTS: gl.constexpr, SLOTS: gl.constexpr,
                   LINES: gl.constexpr):
    """The best blocks by whole scores, one by one; of equal scores the later block."""
    S: gl.constexpr = b_zero.type.layout
    BLOCKS: gl.constexpr = b_zero.shape[1]
    best = ()
    ids = ()
    for _slot in gl.static_range(SLOTS):
        best = best + (gl.full([b_zero.shape[0]], float("-inf"), gl.float32, gl.SliceLayout(1, S)),)
        ids = ids + (gl.full([b_zero.shape[0]], -1, gl.int32, gl.SliceLayout(1, S)),)
    for tile in range(tiles):
        first = highest - (tile + 1) * BLOCKS
        gl.thread_barrier()
        load_centroids(c_smem, 0, p_centroids, first, lowest, key_head, KEY_HEADS, HEAD_DIM, PARTS, LINES)
        async_copy.wait_group(0)
        fence_async_shared()
        gl.thread_barrier()
        b_scores = warpgroup_mma_wait(0, deps=[score_blocks(b_query, c_smem, 0, b_zero, PARTS)])
        o_block = first + gl.expand_dims(gl.arange(0, BLOCKS, gl.SliceLayout(0, S)), 0)
        m_better = (o_block >= gl.expand_dims(b_first, 1)) & (o_block < gl.expand_dims(b_end, 1))
        # False for NaN too.
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
def moba_hopper_choose(query, p_centroids, p_queries, p_chosen, query_tokens,
                       QUERY_HEADS: gl.constexpr, KEY_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, PARTS: gl.constexpr,
                       SLOTS: gl.constexpr, KEEP: gl.constexpr, ROWS: gl.constexpr, BLOCKS: gl.constexpr):
    """The SLOTS best blocks of each query by falling score, int32 [head, query, slot], -1 after the last.

    Blocks are visited from late to early. Scores that agree in all bits of a key may stand in any order.
    """
    head = gl.program_id(1)
    key_head = head // (QUERY_HEADS // KEY_HEADS)
    WARPS: gl.constexpr = gl.num_warps()
    PLACES: gl.constexpr = BLOCKS - 1
    dtype: gl.constexpr = query.dtype.element_ty
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [WARPS, 1], [1, 0])
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCKS, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    c_smem = gl.allocate_shared_memory(dtype, [2 * PARTS, BLOCKS, HEAD_DIM], TILE)
    o_row = gl.program_id(0) * ROWS + gl.arange(0, ROWS, ROW)
    m_row = o_row < query_tokens
    b_first = gl.load(p_queries + o_row * 4, mask=m_row, other=0)
    b_end = gl.load(p_queries + o_row * 4 + 1, mask=m_row, other=0)
    lowest = gl.min(gl.where(b_first < b_end, b_first, 2147483647), 0)
    highest = gl.max(b_end, 0)
    # Blocks that all queries of the tile may choose need no mask.
    all_from = gl.max(b_first, 0)
    all_until = gl.min(b_end, 0)
    tiles = gl.maximum(highest - lowest + BLOCKS - 1, 0) // BLOCKS
    if lowest >= highest:
        tiles = 0
    for j in gl.static_range(2):
        load_centroids(c_smem, j * PARTS, p_centroids, highest - (j + 1) * BLOCKS, lowest, key_head, KEY_HEADS,
                       HEAD_DIM, PARTS, LINES)
    o_line = gl.expand_dims(gl.program_id(0) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LINES)), 1)
    o_column = gl.expand_dims(gl.arange(0, HEAD_DIM, gl.SliceLayout(0, LINES)), 0)
    p_query = query + o_line.to(gl.int64) * (QUERY_HEADS * HEAD_DIM) + head * HEAD_DIM + o_column
    b_query = gl.load(p_query, mask=(o_line < query_tokens) & (o_column >= 0), other=0.0)
    # Out of registers the tensor cores read one operand only from shared memory, which else would bound them.
    b_query = gl.convert_layout(b_query, gl.DotOperandLayout(0, S, 2))

    keys = ()
    ids = ()
    for _slot in gl.static_range(KEEP):
        keys = keys + (gl.full([ROWS], LOWEST, gl.int32, ROW),)
        ids = ids + (gl.full([ROWS], -1, gl.int32, ROW),)
    b_zero = gl.zeros([ROWS, BLOCKS], gl.float32, S)
    async_copy.wait_group(1)
    fence_async_shared()
    gl.thread_barrier()
    # No product is under way where the loop closes: its registers would have to stay where they are.
    b_scores = warpgroup_mma_wait(0, deps=[score_blocks(b_query, c_smem, 0, b_zero, PARTS)])
    for tile in range(tiles):
        gl.thread_barrier()
        first = highest - (tile + 1) * BLOCKS
        load_centroids(c_smem, tile % 2 * PARTS, p_centroids, first - 2 * BLOCKS, lowest, key_head, KEY_HEADS,
                       HEAD_DIM, PARTS, LINES)
        async_copy.wait_group(1)
        fence_async_shared()
        gl.thread_barrier()
        b_next = score_blocks(b_query, c_smem, (tile + 1) % 2 * PARTS, b_zero, PARTS)
        b_keys = score_keys(b_scores, PLACES)
        if first < all_from or first + BLOCKS > all_until:
            o_block = first + gl.expand_dims(gl.arange(0, BLOCKS, gl.SliceLayout(0, S)), 0)
            m_block = (o_block >= gl.expand_dims(b_first, 1)) & (o_block < gl.expand_dims(b_end, 1))
            b_keys = gl.where(m_block, b_keys, LOWEST | (o_block - first))
        keys, ids = merge_best(keys, ids, b_keys, first, PLACES, KEEP)
        b_scores = warpgroup_mma_wait(0, deps=[b_next])
    async_copy.wait_group(0)
    m_open = (keys[SLOTS - 1] == keys[SLOTS]) & (keys[SLOTS] > NO_SCORE)
    chosen = ()
    for slot in gl.static_range(SLOTS):
        chosen = chosen + (gl.where(keys[slot] > NO_SCORE, ids[slot], -1),)
    if gl.max(m_open.to(gl.int32), 0) > 0:
        chosen = choose_exactly(b_query, c_smem, p_centroids, b_first, b_end, lowest, highest, tiles, key_head, b_zero,
                                KEY_HEADS, HEAD_DIM, PARTS, SLOTS, LINES)
    for slot in gl.static_range(SLOTS):
        gl.store(p_chosen + (head.to(gl.int64) * query_tokens + o_row) * SLOTS + slot, chosen[slot], mask=m_row)
    c_smem._keep_alive()
