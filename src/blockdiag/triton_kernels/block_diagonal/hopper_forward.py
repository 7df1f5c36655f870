"""Forward pass of block-diagonal attention for Hopper, for calls with rotary embedding or shared key heads.

Without either, one plain program per tile already runs at the speed of a copy (0.97 of its time). Rotation adds tables
to read and time between load and product. Query heads that share a key head should load it once. So a program of this
kernel handles several heads of a tile, and TMA loads the next head while one is computed.
"""

# Device code is laid out by hand: one argument per line would hide what a kernel does.
# fmt: off

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from blockdiag.triton_kernels.block_diagonal.arguments import ForwardScalars, Tables
from blockdiag.triton_kernels.launch.gluon_names import thread_barrier
from blockdiag.triton_kernels.parts.hopper_tiles import (
    load_table_lines,
    load_tile,
    make_barrier,
    put_tile,
    rotate,
    rotate_memory,
    softmax_rows,
    spread_tables,
    tile_rows_at,
    zero_rows,
)


@gluon.jit
def head_scores(q_smem, k_smem, query, start, next_column, next_ready, b_cos, b_sin, ROTARY: gl.constexpr,
                ROTATE_KEY: gl.constexpr, LOAD_NEXT: gl.constexpr, LAYOUT: gl.constexpr):
    """Return q k^T of one head in f32. When it returns, no warp reads q or k any more.

    With LOAD_NEXT another query tile is loaded over q as soon as q is no longer read.
    """
    ROWS: gl.constexpr = q_smem.shape[0]
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    b_none = gl.zeros([ROWS, ROWS], gl.float32, S)
    if ROTATE_KEY:
        rotate_memory(k_smem, b_cos, b_sin, ROTARY.is_interleaved, LAYOUT)
    if ROTARY.rotates_query:
        b_q = rotate(q_smem.load(LAYOUT), b_cos, b_sin, 1.0, ROTARY.is_interleaved).to(q_smem.dtype)
    if ROTATE_KEY or (ROTARY.rotates_query and LOAD_NEXT):
        fence_async_shared()
        thread_barrier()
    if ROTARY.rotates_query:
        if LOAD_NEXT:
            load_tile(query, q_smem, start, next_column, next_ready)
        # The product reads the rotated query from registers, so it need not go back to shared memory.
        b_q = gl.convert_layout(b_q, gl.DotOperandLayout(0, S, 2), assert_trivial=True)
        b_scores = warpgroup_mma(b_q, k_smem.permute((1, 0)), b_none, use_acc=False, is_async=True)
    else:
        b_scores = warpgroup_mma(q_smem, k_smem.permute((1, 0)), b_none, use_acc=False, is_async=True)
    b_scores = warpgroup_mma_wait(0, deps=[b_scores])
    thread_barrier()
    if LOAD_NEXT and not ROTARY.rotates_query:
        load_tile(query, q_smem, start, next_column, next_ready)
    return b_scores


@gluon.jit
def head_output(b_scores, v_smem, rows, scale_log2, FULL: gl.constexpr, CAUSAL: gl.constexpr, LAYOUT: gl.constexpr):
    """Return softmax(scores) v of one head in the operands' dtype."""
    ROWS: gl.constexpr = v_smem.shape[0]
    HEAD_DIM: gl.constexpr = v_smem.shape[1]
    b_weights, b_norm = softmax_rows(b_scores * scale_log2, rows, ROWS, FULL, CAUSAL)
    if not FULL:
        # Rows beyond the tile and their norms may be NaN. They must be 0, because tiles of padding are written, too.
        o_rows = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, b_weights.type.layout)), 1)
        b_weights = gl.where(o_rows < rows, b_weights, 0.0)
        b_norm = gl.where(o_rows < rows, b_norm, 0.0)
    b_weights = gl.convert_layout(b_weights.to(v_smem.dtype), gl.DotOperandLayout(0, LAYOUT, 2))
    b_none = gl.zeros([ROWS, HEAD_DIM], gl.float32, LAYOUT)
    b_output = warpgroup_mma(b_weights, v_smem, b_none, use_acc=False, is_async=True)
    b_output = warpgroup_mma_wait(0, deps=[b_output])
    # Normalised after the product; block_diagonal_forward says why.
    b_norm = gl.convert_layout(b_norm, LAYOUT)
    return (b_output * b_norm).to(v_smem.dtype)


@gluon.jit
def zero_value_rows(v_smem, rows, FULL: gl.constexpr, LAYOUT: gl.constexpr):
    """Zero v's rows beyond the tile and make the zeros visible to the tensor cores."""
    if not FULL:
        if rows < v_smem.shape[0]:
            zero_rows(v_smem, rows, LAYOUT)
            fence_async_shared()
            thread_barrier()


@gluon.jit
def block_diagonal_hopper_forward(query, key, value, tables: Tables, output, p_output, scalars: ForwardScalars,
                                  SHAPE: gl.constexpr, ROTARY: gl.constexpr, TILE: gl.constexpr):
    """Compute `heads` query heads of one tile per program. The grid is tiles * (query_heads // heads).

    `heads` divides the number of query heads that share a key head. If every query head has its own key head, it is 1
    or 2. `query`, `key`, `value` and `output` are descriptors with blocks of [rows, head_dim]. `p_output` points to the
    memory of `output`.

    SHAPE is a Shape, ROTARY a Rotary, TILE a HopperTile.
    """
    ROWS: gl.constexpr = TILE.rows
    HEADS: gl.constexpr = TILE.heads
    HEAD_DIM: gl.constexpr = SHAPE.head_dim
    GROUP: gl.constexpr = SHAPE.group_size
    ROTATES: gl.constexpr = ROTARY.rotates_query or ROTARY.rotates_key
    PAIR: gl.constexpr = GROUP == 1 and HEADS == 2
    gl.static_assert(PAIR or GROUP % HEADS == 0)
    dtype: gl.constexpr = query.dtype
    MEMORY: gl.constexpr = query.layout
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    STRIDE: gl.constexpr = SHAPE.query_heads * HEAD_DIM
    if SHAPE.is_packed:
        key = query
        value = query
    q_smem = gl.allocate_shared_memory(dtype, [ROWS, HEAD_DIM], MEMORY)
    k_smem = gl.allocate_shared_memory(dtype, [ROWS, HEAD_DIM], MEMORY)
    v_smem = gl.allocate_shared_memory(dtype, [ROWS, HEAD_DIM], MEMORY)
    q_ready = make_barrier()
    k_ready = make_barrier()
    v_ready = make_barrier()
    next_q_ready = q_ready
    if HEADS > 1:
        next_q_ready = make_barrier()
    if PAIR:
        next_k_ready = make_barrier()
        next_v_ready = make_barrier()
    fence_async_shared()
    thread_barrier()

    tile = gl.program_id(0) // (SHAPE.query_heads // HEADS)
    head = gl.program_id(0) % (SHAPE.query_heads // HEADS) * HEADS
    key_head = head // GROUP
    start, rows, written, position = tile_rows_at(tables.tiles, tile, scalars.sequence_length, ROWS, SHAPE.has_tiles,
                                                  TILE.is_full)
    if ROTATES:
        # The tables are loaded first, because one thread takes a while to start the loads of all tiles.
        b_cos, b_sin = load_table_lines(tables.cos, tables.sin, tables.positions, start, rows, position,
                                        scalars.table_rows, ROWS, HEAD_DIM, ROTARY.positions)
    load_tile(query, q_smem, start, head * HEAD_DIM, q_ready)
    load_tile(key, k_smem, start, (SHAPE.first_key + key_head) * HEAD_DIM, k_ready)
    load_tile(value, v_smem, start, (SHAPE.first_value + key_head) * HEAD_DIM, v_ready)
    if ROTATES:
        b_cos, b_sin = spread_tables(b_cos, b_sin, ROTARY.is_interleaved, L)
        fence_async_shared()
        thread_barrier()
    else:
        b_cos = 0
        b_sin = 0
    if HEADS > 1:
        # Allocated here so that it can reuse the scratch memory of `spread_tables`.
        next_smem = gl.allocate_shared_memory(dtype, [ROWS, HEAD_DIM], MEMORY)
        if PAIR:
            load_tile(key, next_smem, start, (SHAPE.first_key + key_head + 1) * HEAD_DIM, next_k_ready)
        else:
            load_tile(query, next_smem, start, (head + 1) * HEAD_DIM, next_q_ready)

    mbarrier.wait(k_ready, 0)
    mbarrier.wait(q_ready, 0)
    b_scores = head_scores(q_smem, k_smem, query, start, (head + 1) * HEAD_DIM, next_q_ready, b_cos, b_sin, ROTARY,
                           ROTARY.rotates_key, PAIR, L)
    if PAIR:
        load_tile(value, k_smem, start, (SHAPE.first_value + key_head + 1) * HEAD_DIM, next_v_ready)
    mbarrier.wait(v_ready, 0)
    zero_value_rows(v_smem, rows, TILE.is_full, L)
    b_output = head_output(b_scores, v_smem, rows, scalars.scale_log2, TILE.is_full, SHAPE.is_causal, L)
    if PAIR:
        thread_barrier()
        put_tile(output, p_output, v_smem, b_output, start, written, head * HEAD_DIM, STRIDE, TILE.is_full)
        mbarrier.wait(next_k_ready, 0)
        mbarrier.wait(next_q_ready, 0)
        b_scores = head_scores(q_smem, next_smem, query, start, 0, next_q_ready, b_cos, b_sin, ROTARY,
                               ROTARY.rotates_key, False, L)
        mbarrier.wait(next_v_ready, 0)
        zero_value_rows(k_smem, rows, TILE.is_full, L)
        b_output = head_output(b_scores, k_smem, rows, scalars.scale_log2, TILE.is_full, SHAPE.is_causal, L)
        put_tile(output, p_output, q_smem, b_output, start, written, (head + 1) * HEAD_DIM, STRIDE, TILE.is_full)
    else:
        put_tile(output, p_output, q_smem, b_output, start, written, head * HEAD_DIM, STRIDE, TILE.is_full)
        for i in gl.static_range(1, HEADS):
            # Query tiles alternate between two buffers, and results are stored from the same buffers.
            here_smem = next_smem if i % 2 == 1 else q_smem
            here_ready = next_q_ready if i % 2 == 1 else q_ready
            other_smem = q_smem if i % 2 == 1 else next_smem
            other_ready = q_ready if i % 2 == 1 else next_q_ready
            mbarrier.wait(here_ready, (i // 2) % 2)
            b_scores = head_scores(here_smem, k_smem, query, start, 0, here_ready, b_cos, b_sin, ROTARY, False, False,
                                   L)
            if i + 1 < HEADS:
                tma.store_wait(0)
                thread_barrier()
                load_tile(query, other_smem, start, (head + i + 1) * HEAD_DIM, other_ready)
            b_output = head_output(b_scores, v_smem, rows, scalars.scale_log2, TILE.is_full, SHAPE.is_causal, L)
            put_tile(output, p_output, here_smem, b_output, start, written, (head + i) * HEAD_DIM, STRIDE, TILE.is_full)
    # Shared memory must be neither freed nor reused while TMA still reads it.
    tma.store_wait(0)
    q_smem._keep_alive()
    k_smem._keep_alive()
    v_smem._keep_alive()
    if HEADS > 1:
        next_smem._keep_alive()
