"""A warp-specialised Hopper version of `backward.moba_blocks_backward`.

Four warps move data: they gather queries and cotangents into a ring in shared memory and scatter the partial gradients
of queries from there. Eight warps compute. They hold almost no addresses, because the gradients of keys and values take
half their registers. They start the scores of the next tile before they finish a tile.
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
from blockdiag.triton_kernels.moba.arguments import BlocksBackwardArrays, BlocksBackwardScalars
from blockdiag.triton_kernels.parts.hopper_tiles import make_barriers

# A counter of tiles shifted right by this many bits is 0.
FAR = gl.constexpr(28)
STAGES = gl.constexpr(3)
PLACES = gl.constexpr(4)
CARRY_WARPS = gl.constexpr(4)
# This leaves the computing warps just enough registers to have their products in flight at the same time.
CARRY_REGISTERS = gl.constexpr(40)


class CarryMemory(NamedTuple):
    """Shared memory of the warps that move data: the ring, the places of its rows, and barriers."""

    query: Any
    cotangent: Any
    score_start: Any
    weight_start: Any
    query_gradient: Any
    places: Any
    parts: Any
    full: Any
    empty: Any
    part_full: Any
    part_empty: Any


class CarryArrays(NamedTuple):
    """The arrays that the warps that move data read and write."""

    query: Any
    output_cotangent: Any
    score_start: Any
    weight_start: Any
    part: Any
    offsets: Any
    counts: Any
    entries: Any


class ComputeMemory(NamedTuple):
    """Shared memory of the warps that compute: the block's keys and values, the ring, and barriers."""

    key: Any
    value: Any
    query: Any
    cotangent: Any
    score_gradients: Any
    score_start: Any
    weight_start: Any
    query_gradient: Any
    full: Any
    empty: Any
    part_full: Any
    part_empty: Any


class ComputeArrays(NamedTuple):
    """The arrays that the warps that compute read."""

    mask: Any
    own: Any
    counts: Any


class BlockPlace(NamedTuple):
    """A block and its own queries.

    Attributes:
        block: the number of the block.
        key_head: the key head of the program.
        start, length: the first row of the block's keys, and their number.
        own_first, own_rows: the first row of the block's own queries, and their number.
        own_limit: keys of the block that the first own query sees.
    """

    block: Any
    key_head: Any
    start: Any
    length: Any
    own_first: Any
    own_rows: Any
    own_limit: Any


class ComputeScalars(NamedTuple):
    """The run-time scalars that the warps that compute read."""

    num_blocks: Any
    query_tokens: Any
    scale: Any
    scale_log2: Any


@gluon.jit
def load_key_tile(memory, source, start, length, head, HEADS: gl.constexpr, HEAD_DIM: gl.constexpr,
                  LINES: gl.constexpr):
    """Start copying the first `length` rows of a tile into shared memory. The rows below are zero."""
    o_row = gl.expand_dims(gl.arange(0, memory.shape[0], gl.SliceLayout(1, LINES)), 1)
    o_column = gl.expand_dims(gl.arange(0, HEAD_DIM, gl.SliceLayout(0, LINES)), 0)
    o_block = (start + o_row).to(gl.int64) * (HEADS * HEAD_DIM) + head * HEAD_DIM + o_column
    load_async(memory, source + o_block, mask=(o_row < length) & (o_column >= 0))


@gluon.jit
def store_key_tile(target, b_tile, p_mask, start, length, head, SHAPE: gl.constexpr, LINES: gl.constexpr):
    """Store the first `length` rows of a tile in whole cache lines, with zeros for masked keys."""
    HEAD_DIM: gl.constexpr = SHAPE.head_dim
    b_tile = gl.convert_layout(b_tile, LINES)
    o_row = gl.expand_dims(gl.arange(0, b_tile.shape[0], gl.SliceLayout(1, LINES)), 1)
    o_column = gl.expand_dims(gl.arange(0, HEAD_DIM, gl.SliceLayout(0, LINES)), 0)
    o_block = (start + o_row).to(gl.int64) * (SHAPE.key_heads * HEAD_DIM) + head * HEAD_DIM + o_column
    if SHAPE.has_mask:
        m_key = gl.load(p_mask + start + o_row, mask=o_row < length, other=0) != 0
        b_tile = gl.where(m_key & (o_column >= 0), b_tile, gl.full_like(b_tile, 0.0))
    gl.store(target + o_block, b_tile, mask=(o_row < length) & (o_column >= 0))


@gluon.jit
def listed_pairs(p_list, at, listed, own_tiles, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """Start loading the pairs of a tile of listed queries; 0 where there are none, as in tiles of own queries."""
    o_list = (at - own_tiles) * ROWS + gl.arange(0, ROWS, LAYOUT)
    return gl.load(p_list + o_list, mask=(o_list >= 0) & (o_list < listed), other=0)


@gluon.jit
def tile_places(b_pair, at, listed, own_first, own_rows, own_tiles, head, part_head, SHAPE: gl.constexpr,
                ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the places of a tile's queries and of their partial gradients, both counted in vectors of HEAD_DIM.

    A query's place is row * query heads + head, or -1 if absent. The block's own queries come first, and their partial
    gradients have the last slot. SHAPE is an OwnShape.
    """
    SLOTS: gl.constexpr = SHAPE.slots
    o_own = at * ROWS + gl.arange(0, ROWS, LAYOUT)
    is_own = at < own_tiles
    b_row = gl.where(is_own, own_first + o_own, b_pair // SLOTS)
    b_slot = gl.where(is_own, SLOTS, b_pair - b_row * SLOTS)
    m_row = gl.where(is_own, o_own < own_rows, o_own - own_tiles * ROWS < listed)
    # 32 bits can count all the vectors that fit into memory.
    b_part = (b_row * SHAPE.part_heads + part_head) * (SLOTS + 1) + b_slot
    return gl.where(m_row, b_row * SHAPE.query_heads + head, -1), b_part


@gluon.jit
def list_of(p_offsets, p_counts, p_entries, head, block, num_blocks, query_tokens, SLOTS: gl.constexpr):
    """Return a pointer to a block's list, and the list's length."""
    o_list = head.to(gl.int64) * num_blocks + block
    p_list = p_entries + head.to(gl.int64) * (query_tokens * SLOTS) + gl.load(p_offsets + o_list)
    return p_list, gl.load(p_counts + o_list)


@gluon.jit
def gather_rows(q_tile, do_tile, places, query, output_cotangent, LINES: gl.constexpr):
    """Start copying queries and cotangents into shared memory. Absent ones are zero."""
    HEAD_DIM: gl.constexpr = q_tile.shape[1]
    b_place = gl.expand_dims(places.load(gl.SliceLayout(1, LINES)), 1)
    o_column = gl.expand_dims(gl.arange(0, HEAD_DIM, gl.SliceLayout(0, LINES)), 0)
    o_block = b_place.to(gl.int64) * HEAD_DIM + o_column
    m_block = (b_place >= 0) & (o_column >= 0)
    load_async(q_tile, query + o_block, mask=m_block)
    load_async(do_tile, output_cotangent + o_block, mask=m_block)


@gluon.jit
def scatter_rows(dq_tile, places, parts, p_part, LINES: gl.constexpr):
    """Scatter the partial gradients of queries from shared memory to global memory."""
    HEAD_DIM: gl.constexpr = dq_tile.shape[1]
    b_place = gl.expand_dims(places.load(gl.SliceLayout(1, LINES)), 1)
    b_part = gl.expand_dims(parts.load(gl.SliceLayout(1, LINES)), 1)
    o_column = gl.expand_dims(gl.arange(0, HEAD_DIM, gl.SliceLayout(0, LINES)), 0)
    gl.store(p_part + b_part.to(gl.int64) * HEAD_DIM + o_column, dq_tile.load(LINES),
             mask=(b_place >= 0) & (o_column >= 0))


@gluon.jit
def carry(memory, arrays, block, key_head, own_first, own_rows, num_blocks, query_tokens, SHAPE: gl.constexpr):
    """Fill the ring and scatter the partial gradients, which follow two tiles later.

    Each head gets one tile more than it has, because `compute` starts the scores of the next tile in advance.

    `memory` is a CarryMemory, `arrays` a CarryArrays, SHAPE an OwnShape.
    """
    q_smem = memory.query
    do_smem = memory.cotangent
    places = memory.places
    parts = memory.parts
    GROUP: gl.constexpr = SHAPE.group_size
    SLOTS: gl.constexpr = SHAPE.slots
    ROWS: gl.constexpr = q_smem.shape[1]
    HEAD_DIM: gl.constexpr = q_smem.shape[2]
    WARPS: gl.constexpr = gl.num_warps()
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [WARPS, 1], [1, 0])
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    # Tiles are moved in halves, because these warps have few registers.
    PARTS: gl.constexpr = 2
    PART: gl.constexpr = ROWS // PARTS
    own_tiles = (own_rows + ROWS - 1) // ROWS
    filled = 0
    emptied = 0
    for i in range(GROUP):
        head = key_head * GROUP + i
        p_list, listed = list_of(arrays.offsets, arrays.counts, arrays.entries, head, block, num_blocks, query_tokens,
                                 SLOTS)
        tiles = own_tiles + (listed + ROWS - 1) // ROWS
        part_head = gl.program_id(1) * GROUP + i
        b_pair = listed_pairs(p_list, 0, listed, own_tiles, ROWS, ONE)
        for at in range(tiles + 2):
            b_place, b_part = tile_places(b_pair, at, listed, own_first, own_rows, own_tiles, head, part_head, SHAPE,
                                          ROWS, ONE)
            # The pairs of the next tile arrive while this tile is moved.
            b_pair = listed_pairs(p_list, at + 1, listed, own_tiles, ROWS, ONE)
            places.index(at % PLACES).store(b_place)
            parts.index(at % PLACES).store(b_part)
            thread_barrier()
            if at <= tiles:
                stage = filled % STAGES
                mbarrier.wait(memory.empty.index(stage), filled // STAGES % 2 ^ 1)
                load_async(memory.score_start.index(stage), arrays.score_start + b_place, mask=b_place >= 0)
                load_async(memory.weight_start.index(stage), arrays.weight_start + b_place, mask=b_place >= 0)
                for part in gl.static_range(PARTS):
                    gather_rows(q_smem.index(stage).slice(part * PART, PART),
                                do_smem.index(stage).slice(part * PART, PART),
                                places.index(at % PLACES).slice(part * PART, PART), arrays.query,
                                arrays.output_cotangent, LINES)
                # The copies arrive at the barrier when they complete. These warps do not wait for them.
                async_copy.mbarrier_arrive(memory.full.index(stage), increment_count=False)
                filled += 1
            if at > 1:
                mbarrier.wait(memory.part_full.index(0), emptied % 2)
                for part in gl.static_range(PARTS):
                    scatter_rows(memory.query_gradient.slice(part * PART, PART),
                                 places.index((at - 2) % PLACES).slice(part * PART, PART),
                                 parts.index((at - 2) % PLACES).slice(part * PART, PART), arrays.part, LINES)
                thread_barrier()
                mbarrier.arrive(memory.part_empty.index(0), count=1)
                emptied += 1


@gluon.jit
def start_product(a_smem, b_smem, start_smem, stage, b_zero):
    """Start the products of keys or values with a tile's queries or cotangents.

    The accumulator is initialised with the values from `moba_starts`, because there are no registers to keep them until
    the product is complete.
    """
    LAYOUT: gl.constexpr = b_zero.type.layout
    b_start = gl.expand_dims(start_smem.index(stage).load(gl.SliceLayout(0, LAYOUT)), 0)
    b_start, _b_zero = gl.broadcast(b_start, b_zero)
    return warpgroup_mma(a_smem, b_smem.index(stage).permute((1, 0)), b_start, is_async=True)


@gluon.jit
def compute(memory, arrays, place, scalars, SHAPE: gl.constexpr):
    """Compute the gradients of the block's keys (without the scale) and values in f32.

    Scores and weights are [keys, queries]; only the partial gradients are [queries, head_dim].

    `memory` is a ComputeMemory, `arrays` a ComputeArrays, `place` a BlockPlace, `scalars` a ComputeScalars, SHAPE an
    OwnShape.
    """
    k_smem = memory.key
    v_smem = memory.value
    q_smem = memory.query
    do_smem = memory.cotangent
    ss_smem = memory.score_start
    GROUP: gl.constexpr = SHAPE.group_size
    ROWS: gl.constexpr = q_smem.shape[1]
    KEYS: gl.constexpr = k_smem.shape[1]
    HEAD_DIM: gl.constexpr = k_smem.shape[2]
    WARPS: gl.constexpr = gl.num_warps()
    dtype: gl.constexpr = k_smem.dtype
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, 16])
    D: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, HEAD_DIM, 16])
    P: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WARPS // 4], [16, HEAD_DIM // (WARPS // 4), 16])
    own_tiles = (place.own_rows + ROWS - 1) // ROWS
    b_zero = gl.zeros([KEYS, ROWS], gl.float32, S)
    b_none = gl.zeros([ROWS, HEAD_DIM], gl.float32, P)
    b_dk = gl.zeros([KEYS, HEAD_DIM], gl.float32, D)
    b_dv = gl.zeros([KEYS, HEAD_DIM], gl.float32, D)
    used = 0
    sent = 0
    # Meanwhile the other warps start to gather queries.
    async_copy.wait_group(0)
    fence_async_shared()
    thread_barrier()
    for i in range(GROUP):
        head = place.key_head * GROUP + i
        listed = gl.load(arrays.counts + head.to(gl.int64) * scalars.num_blocks + place.block)
        tiles = own_tiles + (listed + ROWS - 1) // ROWS
        mbarrier.wait(memory.full.index(used % STAGES), used // STAGES % 2)
        fence_async_shared()
        # No product is in flight at the loop's back edge, because its registers could not be moved there.
        b_scores = start_product(k_smem.index(0), q_smem, ss_smem, used % STAGES, b_zero)
        b_scores = warpgroup_mma_wait(0, deps=[b_scores])
        for at in range(tiles):
            stage = used % STAGES
            # This is 0, but the compiler does not know it. With a constant it would compute all addresses of operands
            # before the loop and keep them in registers.
            zero = used >> FAR
            key = k_smem.index(zero)
            used += 1
            q_tile = q_smem.index(stage)
            do_tile = do_smem.index(stage)
            ds_tile = memory.score_gradients.index(at % 2)
            b_dp = start_product(v_smem.index(zero), do_smem, memory.weight_start, stage, b_zero)
            b_p = gl.exp2(b_scores * scalars.scale_log2)
            if SHAPE.has_mask or (at < own_tiles or place.length < KEYS):
                # Mask absent keys and, in tiles of own queries, keys after the query. Own queries are consecutive, so
                # their limits are too.
                o_key = gl.arange(0, KEYS, gl.SliceLayout(1, S))
                m_key = o_key < place.length
                if SHAPE.has_mask:
                    m_key = m_key & (gl.load(arrays.mask + place.start + o_key, mask=m_key, other=0) != 0)
                o_own = at * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, S))
                b_limit = gl.where(at < own_tiles, place.own_limit + o_own, KEYS)
                if SHAPE.has_own:
                    m_own = (at < own_tiles) & (o_own < place.own_rows)
                    p_own = arrays.own + head.to(gl.int64) * scalars.query_tokens + place.own_first
                    b_own = gl.load(p_own + o_own, mask=m_own, other=1)
                    b_limit = gl.where(b_own != 0, b_limit, 0)
                m_weights = gl.expand_dims(m_key, 1) & (gl.expand_dims(o_key, 1) < gl.expand_dims(b_limit, 0))
                b_p = gl.where(m_weights, b_p, 0.0)
            b_dv = warpgroup_mma(gl.convert_layout(b_p.to(dtype), gl.DotOperandLayout(0, D, 2)), do_tile, b_dv,
                                 is_async=True)
            b_dp = warpgroup_mma_wait(1, deps=[b_dp])
            b_ds = (b_p * b_dp).to(dtype)
            ds_tile.store(b_ds)
            fence_async_shared()
            thread_barrier()
            b_dv = warpgroup_mma_wait(0, deps=[b_dv])
            b_dk = warpgroup_mma(gl.convert_layout(b_ds, gl.DotOperandLayout(0, D, 2)), q_tile, b_dk, is_async=True)
            b_dq = warpgroup_mma(ds_tile.permute((1, 0)), key, b_none, use_acc=False, is_async=True)
            mbarrier.wait(memory.full.index(used % STAGES), used // STAGES % 2)
            # Make the other threads' copies visible to the tensor cores.
            fence_async_shared()
            b_dk, b_dq = warpgroup_mma_wait(0, deps=[b_dk, b_dq])
            mbarrier.wait(memory.part_empty.index(0), sent % 2 ^ 1)
            sent += 1
            memory.query_gradient.store((b_dq * scalars.scale).to(dtype))
            b_next = start_product(key, q_smem, ss_smem, used % STAGES, b_zero)
            thread_barrier()
            mbarrier.arrive(memory.part_full.index(0), count=1)
            mbarrier.arrive(memory.empty.index(stage), count=1)
            b_scores = warpgroup_mma_wait(0, deps=[b_next])
        # The scores of the extra tile after the last one are not used.
        thread_barrier()
        mbarrier.arrive(memory.empty.index(used % STAGES), count=1)
        used += 1
    return b_dk, b_dv


@gluon.jit
def moba_hopper_backward(arrays: BlocksBackwardArrays, scalars: BlocksBackwardScalars, SHAPE: gl.constexpr,
                         TILE: gl.constexpr):
    """Compute the gradients of one block and key head per program, and the partial gradients of its queries.

    SHAPE is an OwnShape, TILE a BlockTile.
    """
    HEAD_DIM: gl.constexpr = SHAPE.head_dim
    ROWS: gl.constexpr = TILE.rows
    KEYS: gl.constexpr = TILE.keys
    block = gl.program_id(0)
    GROUP: gl.constexpr = SHAPE.group_size
    key_head = scalars.first_head // GROUP + gl.program_id(1)
    start = gl.load(arrays.blocks + block * 4)
    length = gl.load(arrays.blocks + block * 4 + 1)
    if length <= 0:
        return
    own_first = gl.load(arrays.blocks + block * 4 + 2)
    own_rows = gl.load(arrays.blocks + block * 4 + 3)
    # The number of the block's keys that its first own query sees.
    own_limit = gl.load(arrays.queries + own_first * 4 + 3, mask=own_rows > 0, other=0) - start
    dtype: gl.constexpr = arrays.query.dtype.element_ty
    MEMORY: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [gl.num_warps(), 1], [1, 0])
    k_smem = gl.allocate_shared_memory(dtype, [1, KEYS, HEAD_DIM], MEMORY)
    v_smem = gl.allocate_shared_memory(dtype, [1, KEYS, HEAD_DIM], MEMORY)
    q_smem = gl.allocate_shared_memory(dtype, [STAGES, ROWS, HEAD_DIM], MEMORY)
    do_smem = gl.allocate_shared_memory(dtype, [STAGES, ROWS, HEAD_DIM], MEMORY)
    ds_smem = gl.allocate_shared_memory(dtype, [2, KEYS, ROWS], MEMORY)
    dq_smem = gl.allocate_shared_memory(dtype, [ROWS, HEAD_DIM], MEMORY)
    ss_smem = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], PLAIN)
    ws_smem = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], PLAIN)
    places = gl.allocate_shared_memory(gl.int32, [PLACES, ROWS], PLAIN)
    parts = gl.allocate_shared_memory(gl.int32, [PLACES, ROWS], PLAIN)
    full = make_barriers(STAGES, 32 * CARRY_WARPS)
    empty = make_barriers(STAGES, 1)
    part_full = make_barriers(1, 1)
    part_empty = make_barriers(1, 1)
    load_key_tile(k_smem.index(0), arrays.key, start, length, key_head, SHAPE.key_heads, HEAD_DIM, LINES)
    load_key_tile(v_smem.index(0), arrays.value, start, length, key_head, SHAPE.key_heads, HEAD_DIM, LINES)
    async_copy.commit_group()
    compute_memory = ComputeMemory(k_smem, v_smem, q_smem, do_smem, ds_smem, ss_smem, ws_smem, dq_smem, full, empty,
                                   part_full, part_empty)
    carry_memory = CarryMemory(q_smem, do_smem, ss_smem, ws_smem, dq_smem, places, parts, full, empty, part_full,
                               part_empty)
    # Only what a partition reads is passed, because the values are passed through shared memory.
    carry_arrays = CarryArrays(arrays.query, arrays.output_cotangent, arrays.score_start, arrays.weight_start,
                               arrays.part, arrays.offsets, arrays.counts, arrays.entries)
    compute_arrays = ComputeArrays(arrays.mask, arrays.own, arrays.counts)
    compute_scalars = ComputeScalars(scalars.num_blocks, scalars.query_tokens, scalars.scale, scalars.scale_log2)
    place = BlockPlace(block, key_head, start, length, own_first, own_rows, own_limit)
    b_dk, b_dv = gl.warp_specialize(
        [
            (compute, (compute_memory, compute_arrays, place, compute_scalars, SHAPE)),
            (carry, (carry_memory, carry_arrays, block, key_head, own_first, own_rows, scalars.num_blocks,
                     scalars.query_tokens, SHAPE)),
        ],
        [CARRY_WARPS],
        [CARRY_REGISTERS],
    )
    store_key_tile(arrays.d_key, (b_dk * scalars.scale).to(dtype), arrays.mask, start, length, key_head, SHAPE, LINES)
    store_key_tile(arrays.d_value, b_dv.to(dtype), arrays.mask, start, length, key_head, SHAPE, LINES)
