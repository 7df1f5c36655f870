"""A hand-scheduled Hopper version of `forward.moba_blocks_forward`.

A block's keys and values stay in shared memory while the queries of its list stream through. The scores of a tile are
computed during the softmax of the previous tile, and queries are gathered two tiles ahead.
"""

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

from blockdiag.triton_kernels.launch.gluon_names import load_async, thread_barrier
from blockdiag.triton_kernels.moba.arguments import BlocksForwardArrays, BlocksForwardScalars
from blockdiag.triton_kernels.moba.hopper_backward import load_key_tile

CODES = gl.constexpr(4)


@gluon.jit
def listed_pairs(p_list, at, last, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """Load the pairs of one tile of a block's list, -1 beyond its end."""
    o_entry = at + gl.arange(0, ROWS, LAYOUT)
    return gl.load(p_list + o_entry, mask=o_entry < last, other=-1)


@gluon.jit
def gather_queries(q_smem, pairs, query, head, QUERY_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, SLOTS: gl.constexpr,
                   LINES: gl.constexpr):
    """Start copying the queries of a tile into shared memory. Absent queries are zero."""
    b_pair = pairs.load(gl.SliceLayout(1, LINES))
    o_row = gl.expand_dims(gl.maximum(b_pair, 0) // SLOTS, 1)
    o_column = gl.expand_dims(gl.arange(0, HEAD_DIM, gl.SliceLayout(0, LINES)), 0)
    o_block = o_row.to(gl.int64) * (QUERY_HEADS * HEAD_DIM) + head * HEAD_DIM + o_column
    load_async(q_smem, query + o_block, mask=(gl.expand_dims(b_pair, 1) >= 0) & (o_column >= 0))
    async_copy.commit_group()


@gluon.jit
def load_page_rows(memory, source, scale, b_row, m_row, head, HAS_SCALE: gl.constexpr, SHAPE: gl.constexpr,
                   LINES: gl.constexpr):
    """Load rows of a cache into shared memory, zero where masked.

    Rows of 16 bits are copied asynchronously. Others, and those with factors of their tokens, get the memory's dtype in
    registers.
    """
    WIDTH: gl.constexpr = SHAPE.head_dim
    o_column = gl.expand_dims(gl.arange(0, WIDTH, gl.SliceLayout(0, LINES)), 0)
    p_rows = source + (gl.expand_dims(b_row, 1) * (SHAPE.key_heads * WIDTH) + head * WIDTH + o_column)
    m_rows = gl.expand_dims(m_row, 1) & (o_column >= 0)
    if source.dtype.element_ty.primitive_bitwidth == 16 and not HAS_SCALE:
        load_async(memory, p_rows, mask=m_rows)
    else:
        b_rows = gl.load(p_rows, mask=m_rows, other=0.0)
        if HAS_SCALE:
            b_scale = gl.load(scale + (b_row * SHAPE.key_heads + head), mask=m_row, other=0.0)
            b_rows = b_rows.to(gl.float32) * gl.expand_dims(b_scale, 1)
        memory.store(b_rows.to(memory.dtype))


@gluon.jit
def key_rows(arrays, scalars, o_key, m_key, SHAPE: gl.constexpr):
    """Return the rows of keys in the arrays of keys and values, int64. See `forward.key_rows`."""
    if SHAPE.page_size == 0:
        return o_key.to(gl.int64)
    else:
        b_page = gl.load(arrays.page_table + o_key // SHAPE.page_size, mask=m_key, other=0)
        b_page = gl.minimum(gl.maximum(b_page, 0), scalars.num_pages - 1)
        return b_page.to(gl.int64) * SHAPE.page_size + o_key % SHAPE.page_size


@gluon.jit
def load_block(k_smem, v_smem, arrays, scalars, start, length, head, SHAPE: gl.constexpr, LINES: gl.constexpr):
    """Start loading the keys and values of a block. Rows of the memory from `length` on are zero."""
    if not SHAPE.has_cache:
        load_key_tile(k_smem, arrays.key, start, length, head, SHAPE.key_heads, SHAPE.head_dim, LINES)
        load_key_tile(v_smem, arrays.value, start, length, head, SHAPE.key_heads, SHAPE.head_dim, LINES)
    else:
        o_row = gl.arange(0, k_smem.shape[0], gl.SliceLayout(1, LINES))
        m_row = o_row < length
        b_row = key_rows(arrays, scalars, start + o_row, m_row, SHAPE)
        IS_BY_TOKEN: gl.constexpr = SHAPE.value_scale == "token"
        load_page_rows(k_smem, arrays.key, None, b_row, m_row, head, False, SHAPE, LINES)
        load_page_rows(v_smem, arrays.value, arrays.value_scale, b_row, m_row, head, IS_BY_TOKEN, SHAPE, LINES)


@gluon.jit
def moba_hopper_forward(arrays: BlocksForwardArrays, scalars: BlocksForwardScalars, SHAPE: gl.constexpr,
                        TILE: gl.constexpr):
    """Compute the partial outputs [query, head, slot, head_dim] of some of the heads.

    Each program handles one chunk of one block's list.

    SHAPE is a ListShape, TILE a BlockTile.
    """
    HEAD_DIM: gl.constexpr = SHAPE.head_dim
    SLOTS: gl.constexpr = SHAPE.slots
    ROWS: gl.constexpr = TILE.rows
    KEYS: gl.constexpr = TILE.keys
    head = scalars.first_head + gl.program_id(1)
    p_item = arrays.items + (head.to(gl.int64) * scalars.num_items + gl.program_id(0)) * 2
    block = gl.load(p_item)
    if block < 0:
        return
    first = gl.load(p_item + 1) * TILE.chunk
    start = gl.load(arrays.blocks + block * 4)
    length = gl.load(arrays.blocks + block * 4 + 1)
    o_list = head.to(gl.int64) * scalars.num_blocks + block
    p_list = arrays.entries + head.to(gl.int64) * (scalars.query_tokens * SLOTS) + gl.load(arrays.offsets + o_list)
    last = gl.minimum(gl.load(arrays.counts + o_list), first + TILE.chunk)
    key_head = head // SHAPE.group_size
    WARPS: gl.constexpr = gl.num_warps()
    dtype: gl.constexpr = arrays.query.dtype.element_ty
    MEMORY: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [WARPS, 1], [1, 0])
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, KEYS, 16])
    R: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, HEAD_DIM, 16])
    k_smem = gl.allocate_shared_memory(dtype, [KEYS, HEAD_DIM], MEMORY)
    v_smem = gl.allocate_shared_memory(dtype, [KEYS, HEAD_DIM], MEMORY)
    q_smem = gl.allocate_shared_memory(dtype, [2, ROWS, HEAD_DIM], MEMORY)
    pairs = gl.allocate_shared_memory(gl.int32, [CODES, ROWS], PLAIN)
    load_block(k_smem, v_smem, arrays, scalars, start, length, key_head, SHAPE, LINES)
    if SHAPE.has_key_scale:
        scales = gl.allocate_shared_memory(gl.float32, [KEYS], PLAIN)
        o_row = gl.arange(0, KEYS, ONE)
        b_row = key_rows(arrays, scalars, start + o_row, o_row < length, SHAPE)
        scales.store(gl.load(arrays.key_scale + (b_row * SHAPE.key_heads + key_head), mask=o_row < length, other=0.0))
    for j in gl.static_range(3):
        pairs.index(j).store(listed_pairs(p_list, first + j * ROWS, last, ROWS, ONE))
    thread_barrier()
    for j in gl.static_range(2):
        gather_queries(q_smem.index(j), pairs.index(j), arrays.query, head, SHAPE.query_heads, HEAD_DIM, SLOTS, LINES)
    o_key = gl.arange(0, KEYS, gl.SliceLayout(0, S))
    m_key = o_key < length
    if SHAPE.has_mask:
        m_key = m_key & (gl.load(arrays.mask + start + o_key, mask=m_key, other=0) != 0)
    if SHAPE.has_score_scale:
        sequence = start // scalars.max_keys
        factor = gl.load(arrays.score_scale + sequence.to(gl.int64) * SHAPE.key_heads + key_head)
    b_zero = gl.zeros([ROWS, KEYS], gl.float32, S)
    b_none = gl.zeros([ROWS, HEAD_DIM], gl.float32, R)
    async_copy.wait_group(1)
    fence_async_shared()
    thread_barrier()
    b_next = warpgroup_mma(q_smem.index(0), k_smem.permute((1, 0)), b_zero, use_acc=False, is_async=True)
    b_scores = warpgroup_mma_wait(0, deps=[b_next])
    thread_barrier()
    for at in range((last - first + ROWS - 1) // ROWS):
        # The scores of this tile are ready, so the queries after the next tile's can overwrite its queries.
        gather_queries(q_smem.index(at % 2), pairs.index((at + 2) % CODES), arrays.query, head, SHAPE.query_heads,
                       HEAD_DIM, SLOTS,
                       LINES)
        b_pair = listed_pairs(p_list, first + (at + 3) * ROWS, last, ROWS, ONE)
        async_copy.wait_group(1)
        fence_async_shared()
        thread_barrier()
        b_next = warpgroup_mma(q_smem.index((at + 1) % 2), k_smem.permute((1, 0)), b_zero, use_acc=False, is_async=True)
        if SHAPE.has_score_scale:
            b_scores *= factor
        if SHAPE.has_key_scale:
            b_scores *= gl.expand_dims(scales.load(gl.SliceLayout(0, S)), 0)
        if SHAPE.has_mask or length < KEYS:
            b_scores = gl.where(gl.expand_dims(m_key, 0), b_scores, float("-inf"))
        b_max = gl.max(b_scores, 1) * scalars.scale_log2
        b_base = gl.where(b_max == float("-inf"), 0.0, b_max)
        b_p = gl.exp2(b_scores * scalars.scale_log2 - gl.expand_dims(b_base, 1))
        b_sum = gl.sum(b_p, 1)
        b_output = warpgroup_mma(gl.convert_layout(b_p.to(dtype), gl.DotOperandLayout(0, R, 2)), v_smem, b_none,
                                 use_acc=False, is_async=True)
        # `!= 0` instead of `> 0`, so that a row with a NaN score gets NaN as its log-sum-exp.
        m_seen = b_sum != 0
        b_norm = gl.convert_layout(gl.where(m_seen, 1.0 / b_sum, 0.0), gl.SliceLayout(1, R))
        b_here = pairs.index(at % CODES).load(gl.SliceLayout(1, S))
        o_part = (b_here // SLOTS * (SHAPE.part_heads - 1) + gl.program_id(1)).to(gl.int64) * SLOTS + b_here
        gl.store(arrays.part_sum + o_part, gl.where(m_seen, b_max + gl.log2(b_sum), float("-inf")), mask=b_here >= 0)
        pairs.index((at + 3) % CODES).store(b_pair)
        b_scores, b_output = warpgroup_mma_wait(0, deps=[b_next, b_output])
        thread_barrier()
        b_part = gl.convert_layout((b_output * gl.expand_dims(b_norm, 1)).to(dtype), LINES)
        b_here = gl.expand_dims(pairs.index(at % CODES).load(gl.SliceLayout(1, LINES)), 1)
        o_part = (b_here // SLOTS * (SHAPE.part_heads - 1) + gl.program_id(1)).to(gl.int64) * SLOTS + b_here
        o_column = gl.expand_dims(gl.arange(0, HEAD_DIM, gl.SliceLayout(0, LINES)), 0)
        gl.store(arrays.part + o_part * HEAD_DIM + o_column, b_part, mask=(b_here >= 0) & (o_column >= 0))
    async_copy.wait_group(0)
    if SHAPE.has_key_scale:
        scales._keep_alive()
    k_smem._keep_alive()
    v_smem._keep_alive()
    q_smem._keep_alive()
