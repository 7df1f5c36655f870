"""A warp-specialised Hopper version of `forward.moba_blocks_forward`.

A block's keys and values stay in shared memory while the queries of its list stream through a ring of tiles. Four warps
compute. They overwrite the queries of a tile with its partial output, so that they need no addresses. Four other warps
gather queries and scatter partial outputs. Two programs share a multiprocessor: one computes a softmax during the
products of the other.
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

from blockdiag.triton_kernels.launch.gluon_names import load_async, thread_barrier
from blockdiag.triton_kernels.moba.arguments import BlocksForwardArrays, BlocksForwardScalars
from blockdiag.triton_kernels.moba.hopper_backward import load_key_tile
from blockdiag.triton_kernels.parts.hopper_tiles import make_barriers

# Tiles of the ring. Two programs of 128 keys at heads of 128 have just enough shared memory for them.
RING = gl.constexpr(3)
CARRY_WARPS = gl.constexpr(4)
CARRY_REGISTERS = gl.constexpr(80)


class ListPlace(NamedTuple):
    """The part of a block's list that a program handles.

    Attributes:
        pairs: pointer to the first pair, which is a query's token times SLOTS plus a slot.
        count: the number of pairs.
        head, part_head: the query head, and its number among the heads of the launch.
    """

    pairs: Any
    count: Any
    head: Any
    part_head: Any


class RingMemory(NamedTuple):
    """The ring in shared memory.

    Attributes:
        tiles: [RING, ROWS, HEAD_DIM]; queries, then their partial outputs.
        full, done: barriers of the tiles: queries have arrived; partial outputs are complete.
    """

    tiles: Any
    full: Any
    done: Any


class BlockMemory(NamedTuple):
    """Keys and values of the block in shared memory, and the factors of its keys' tokens if there are any."""

    key: Any
    value: Any
    scales: Any


class MovedArrays(NamedTuple):
    """The arrays that the warps that gather and scatter read and write."""

    query: Any
    part: Any


@gluon.jit
def listed_pairs(place, at, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """Load the pairs of tile `at` of a list, -1 beyond its end."""
    o_pair = at * ROWS + gl.arange(0, ROWS, LAYOUT)
    return gl.load(place.pairs + o_pair, mask=o_pair < place.count, other=-1)


@gluon.jit
def part_rows(b_pair, part_head, SHAPE: gl.constexpr):
    """Return the rows of pairs in [query, part head, slot], int64."""
    return (b_pair // SHAPE.slots * (SHAPE.part_heads - 1) + part_head).to(gl.int64) * SHAPE.slots + b_pair


@gluon.jit
def carry(ring, arrays, place, SHAPE: gl.constexpr):
    """Gather the queries of all tiles into the ring, and scatter the partial outputs, which follow two tiles later.

    `ring` is a RingMemory, `arrays` a MovedArrays, `place` a ListPlace, SHAPE a ListShape.
    """
    HEAD_DIM: gl.constexpr = SHAPE.head_dim
    ROWS: gl.constexpr = ring.tiles.shape[1]
    DELAY: gl.constexpr = RING - 1
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [gl.num_warps(), 1], [1, 0])
    # Each thread finds the rows that it moves on its own.
    LINE: gl.constexpr = gl.SliceLayout(1, LINES)
    o_column = gl.expand_dims(gl.arange(0, HEAD_DIM, gl.SliceLayout(0, LINES)), 0)
    tiles = (place.count + ROWS - 1) // ROWS
    b_pair = listed_pairs(place, 0, ROWS, LINE)
    for at in range(tiles + DELAY):
        if at < tiles:
            # The tile that was here has been scattered.
            b_row = (b_pair // SHAPE.slots * SHAPE.query_heads + place.head).to(gl.int64)
            m_row = (gl.expand_dims(b_pair, 1) >= 0) & (o_column >= 0)
            load_async(ring.tiles.index(at % RING), arrays.query + (gl.expand_dims(b_row, 1) * HEAD_DIM + o_column),
                       mask=m_row)
            # The copies arrive at the barrier when they complete.
            async_copy.mbarrier_arrive(ring.full.index(at % RING), increment_count=False)
            b_pair = listed_pairs(place, at + 1, ROWS, LINE)
        if at >= DELAY:
            done = at - DELAY
            b_done = listed_pairs(place, done, ROWS, LINE)
            m_done = (gl.expand_dims(b_done, 1) >= 0) & (o_column >= 0)
            b_row = gl.expand_dims(part_rows(b_done, place.part_head, SHAPE), 1)
            mbarrier.wait(ring.done.index(done % RING), done // RING % 2)
            b_part = ring.tiles.index(done % RING).load(LINES)
            gl.store(arrays.part + (b_row * HEAD_DIM + o_column), b_part, mask=m_done)
            # The tile's memory may be written again.
            thread_barrier()


@gluon.jit
def compute(ring, block, arrays, scalars, place, start, length, key_head, SHAPE: gl.constexpr):
    """Compute the partial outputs and the log-sum-exps of all tiles.

    `ring` is a RingMemory, `block` a BlockMemory, `place` a ListPlace, SHAPE a ListShape.
    """
    HEAD_DIM: gl.constexpr = SHAPE.head_dim
    ROWS: gl.constexpr = ring.tiles.shape[1]
    KEYS: gl.constexpr = block.key.shape[0]
    WARPS: gl.constexpr = gl.num_warps()
    dtype: gl.constexpr = block.key.dtype
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, KEYS, 16])
    R: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, HEAD_DIM, 16])
    o_key = gl.arange(0, KEYS, gl.SliceLayout(0, S))
    m_key = o_key < length
    if SHAPE.has_mask:
        m_key = m_key & (gl.load(arrays.mask + start + o_key, mask=m_key, other=0) != 0)
    if SHAPE.has_score_scale:
        sequence = start // scalars.max_keys
        factor = gl.load(arrays.score_scale + sequence.to(gl.int64) * SHAPE.key_heads + key_head)
    b_zero = gl.zeros([ROWS, KEYS], gl.float32, S)
    b_none = gl.zeros([ROWS, HEAD_DIM], gl.float32, R)
    # Meanwhile the other warps start to gather queries.
    async_copy.wait_group(0)
    fence_async_shared()
    thread_barrier()
    for at in range((place.count + ROWS - 1) // ROWS):
        tile = ring.tiles.index(at % RING)
        mbarrier.wait(ring.full.index(at % RING), at // RING % 2)
        # Make the other threads' copies visible to the tensor cores.
        fence_async_shared()
        b_scores = warpgroup_mma(tile, block.key.permute((1, 0)), b_zero, use_acc=False, is_async=True)
        b_here = listed_pairs(place, at, ROWS, gl.SliceLayout(1, S))
        b_scores = warpgroup_mma_wait(0, deps=[b_scores])
        # No warp reads the queries any more.
        thread_barrier()
        if SHAPE.has_score_scale:
            b_scores *= factor
        if SHAPE.has_key_scale:
            b_scores *= gl.expand_dims(block.scales.load(gl.SliceLayout(0, S)), 0)
        if SHAPE.has_mask or length < KEYS:
            b_scores = gl.where(gl.expand_dims(m_key, 0), b_scores, float("-inf"))
        b_max = gl.max(b_scores, 1) * scalars.scale_log2
        b_base = gl.where(b_max == float("-inf"), 0.0, b_max)
        b_p = gl.exp2(b_scores * scalars.scale_log2 - gl.expand_dims(b_base, 1))
        b_output = warpgroup_mma(gl.convert_layout(b_p.to(dtype), gl.DotOperandLayout(0, R, 2)), block.value, b_none,
                                 use_acc=False, is_async=True)
        b_sum = gl.sum(b_p, 1)
        # `!= 0` instead of `> 0`, so that a row with a NaN score gets NaN as its log-sum-exp.
        m_seen = b_sum != 0
        b_norm = gl.convert_layout(gl.where(m_seen, 1.0 / b_sum, 0.0), gl.SliceLayout(1, R))
        gl.store(arrays.part_sum + part_rows(b_here, place.part_head, SHAPE),
                 gl.where(m_seen, b_max + gl.log2(b_sum), float("-inf")), mask=b_here >= 0)
        b_output = warpgroup_mma_wait(0, deps=[b_output])
        tile.store((b_output * gl.expand_dims(b_norm, 1)).to(dtype))
        thread_barrier()
        mbarrier.arrive(ring.done.index(at % RING), count=1)


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

    Each program handles one item of `lists.moba_items`.

    SHAPE is a ListShape, TILE a BlockTile.
    """
    HEAD_DIM: gl.constexpr = SHAPE.head_dim
    KEYS: gl.constexpr = TILE.keys
    head = scalars.first_head + gl.program_id(1)
    p_item = arrays.items + (head.to(gl.int64) * scalars.num_items + gl.program_id(0)) * 4
    count = gl.load(p_item)
    if count <= 0:
        return
    first = gl.load(p_item + 1)
    start = gl.load(p_item + 2)
    length = gl.load(p_item + 3)
    p_list = arrays.entries + head.to(gl.int64) * (scalars.query_tokens * SHAPE.slots) + first
    place = ListPlace(p_list, count, head, gl.program_id(1))
    key_head = head // SHAPE.group_size
    dtype: gl.constexpr = arrays.query.dtype.element_ty
    MEMORY: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [gl.num_warps(), 1], [1, 0])
    k_smem = gl.allocate_shared_memory(dtype, [KEYS, HEAD_DIM], MEMORY)
    v_smem = gl.allocate_shared_memory(dtype, [KEYS, HEAD_DIM], MEMORY)
    tiles = gl.allocate_shared_memory(dtype, [RING, TILE.rows, HEAD_DIM], MEMORY)
    full = make_barriers(RING, 32 * CARRY_WARPS)
    done = make_barriers(RING, 1)
    load_block(k_smem, v_smem, arrays, scalars, start, length, key_head, SHAPE, LINES)
    async_copy.commit_group()
    scales = k_smem
    if SHAPE.has_key_scale:
        ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        scales = gl.allocate_shared_memory(gl.float32, [KEYS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        o_row = gl.arange(0, KEYS, ONE)
        b_row = key_rows(arrays, scalars, start + o_row, o_row < length, SHAPE)
        scales.store(gl.load(arrays.key_scale + (b_row * SHAPE.key_heads + key_head), mask=o_row < length, other=0.0))
    ring = RingMemory(tiles, full, done)
    block_memory = BlockMemory(k_smem, v_smem, scales)
    gl.warp_specialize(
        [
            (compute, (ring, block_memory, arrays, scalars, place, start, length, key_head, SHAPE)),
            (carry, (ring, MovedArrays(arrays.query, arrays.part), place, SHAPE)),
        ],
        [CARRY_WARPS],
        [CARRY_REGISTERS],
    )
