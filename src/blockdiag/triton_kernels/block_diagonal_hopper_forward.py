"""Forward of block-diagonal attention for Hopper, where rotary embedding or shared key heads make the plain kernel slow.

Without either, one plain program per tile already runs at the speed of a copy. Rotation needs registers and time between
load and product; here it happens in shared memory, in warpgroups that wait for no load, and a key tile is rotated once
for all the query heads that share it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from blockdiag.triton_kernels.hopper_tiles import (
    init_barriers,
    load_panels,
    load_tables,
    pair_layout_of,
    program_units,
    rotate_slot,
    score_mask_at,
    store_panels,
    tile_rows_at,
    zero_rows,
)


@gluon.jit
def forward_load(
    query, key, value, p_tiles, q_panels, k_panels, v_panels, q_ready, q_empty, k_ready, k_empty, num_units,
    sequence_length, GROUP: gl.constexpr, KEY_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, ROWS: gl.constexpr,
    FULL: gl.constexpr, TABLE: gl.constexpr, CONSUMERS: gl.constexpr, Q_SLOTS: gl.constexpr, K_SLOTS: gl.constexpr,
    CONTIGUOUS: gl.constexpr,
):  # fmt: skip
    """The copy warp: units go to the consumers in turn, their query heads interleaved as the consumers will ask."""
    PANEL: gl.constexpr = HEAD_DIM // 2
    TILE_BYTES: gl.constexpr = ROWS * HEAD_DIM * 2
    first, step, count = program_units(num_units, CONTIGUOUS)
    for turn in range(0, count, CONSUMERS):
        active = gl.minimum(count - turn, CONSUMERS)
        for member in range(GROUP):
            for consumer in range(active):
                unit = first + (turn + consumer) * step
                tile = unit // KEY_HEADS
                key_head = unit % KEY_HEADS
                start, _rows, _written, _position = tile_rows_at(p_tiles, tile, sequence_length, ROWS, TABLE, FULL)
                if member == 0:
                    slot = (turn + consumer) % K_SLOTS
                    mbarrier.wait(k_empty.index(slot), (((turn + consumer) // K_SLOTS) & 1) ^ 1)
                    mbarrier.expect(k_ready.index(slot), 2 * TILE_BYTES)
                    load_panels(key, k_panels, slot, start, key_head * HEAD_DIM, k_ready.index(slot), PANEL)
                    load_panels(value, v_panels, slot, start, key_head * HEAD_DIM, k_ready.index(slot), PANEL)
                item = turn * GROUP + member * active + consumer
                slot = item % Q_SLOTS
                column = (key_head * GROUP + member) * HEAD_DIM
                mbarrier.wait(q_empty.index(slot), ((item // Q_SLOTS) & 1) ^ 1)
                mbarrier.expect(q_ready.index(slot), TILE_BYTES)
                load_panels(query, q_panels, slot, start, column, q_ready.index(slot), PANEL)


@gluon.jit
def forward_compute(
    p_output, p_tiles, p_cos, p_sin, p_positions, q_panels, k_panels, v_panels, q_ready, q_empty, k_ready,
    k_empty, num_units, sequence_length, scale_log2, table_rows, CONSUMER: gl.constexpr, GROUP: gl.constexpr,
    KEY_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, ROWS: gl.constexpr, FULL: gl.constexpr, TABLE: gl.constexpr,
    CAUSAL: gl.constexpr, ROTATE_QUERY: gl.constexpr, ROTATE_KEY: gl.constexpr, INTERLEAVED: gl.constexpr,
    POSITIONS: gl.constexpr, CONSUMERS: gl.constexpr, Q_SLOTS: gl.constexpr, K_SLOTS: gl.constexpr,
    CONTIGUOUS: gl.constexpr,
):  # fmt: skip
    """One consumer warpgroup: every CONSUMERS-th unit of the program, all its query heads."""
    PANEL: gl.constexpr = HEAD_DIM // 2
    dtype: gl.constexpr = q_panels.dtype
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PANEL, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, L, 2)
    ROW_STRIDE: gl.constexpr = KEY_HEADS * GROUP * HEAD_DIM
    ROTARY: gl.constexpr = ROTATE_QUERY or ROTATE_KEY
    first, step, count = program_units(num_units, CONTIGUOUS)
    if ROTARY:
        # A tile's heads follow each other, so most units find the rotary rows they need still in registers.
        table_tile = -1
        b_cos0 = pair_layout_of(ROWS, PANEL, INTERLEAVED, L)
        b_sin0 = b_cos0
        if INTERLEAVED:
            b_cos1 = b_cos0
            b_sin1 = b_cos0
    for index in range(CONSUMER, count, CONSUMERS):
        unit = first + index * step
        tile = unit // KEY_HEADS
        key_head = unit % KEY_HEADS
        start, rows, written, position = tile_rows_at(p_tiles, tile, sequence_length, ROWS, TABLE, FULL)
        turn = index - CONSUMER
        active = gl.minimum(count - turn, CONSUMERS)
        k_slot = index % K_SLOTS
        if ROTARY:
            if tile != table_tile:
                if INTERLEAVED:
                    b_cos0, b_cos1, b_sin0, b_sin1 = load_tables(p_cos, p_sin, p_positions, start, rows, position,
                                                                 table_rows, ROWS, PANEL, INTERLEAVED, POSITIONS, L)  # fmt: skip
                else:
                    b_cos0, _b_cos, b_sin0, _b_sin = load_tables(p_cos, p_sin, p_positions, start, rows, position,
                                                                 table_rows, ROWS, PANEL, INTERLEAVED, POSITIONS, L)  # fmt: skip
                table_tile = tile
            if not INTERLEAVED:
                b_cos1 = b_cos0
                b_sin1 = b_sin0
        mbarrier.wait(k_ready.index(k_slot), (index // K_SLOTS) & 1)
        if not FULL:
            if rows < ROWS:
                zero_rows(v_panels, k_slot, rows, L, ROWS)
        if ROTATE_KEY:
            rotate_slot(k_panels, k_slot, b_cos0, b_cos1, b_sin0, b_sin1, ROWS, PANEL, INTERLEAVED, L)
        for member in range(GROUP):
            item = turn * GROUP + member * active + CONSUMER
            slot = item % Q_SLOTS
            head = key_head * GROUP + member
            mbarrier.wait(q_ready.index(slot), (item // Q_SLOTS) & 1)
            if ROTATE_QUERY:
                rotate_slot(q_panels, slot, b_cos0, b_cos1, b_sin0, b_sin1, ROWS, PANEL, INTERLEAVED, L)
            if ROTARY or not FULL:
                fence_async_shared()
                gl.thread_barrier()
            b_s = gl.zeros([ROWS, ROWS], gl.float32, S)
            b_s = warpgroup_mma(q_panels.index(slot * 2), k_panels.index(k_slot * 2).permute((1, 0)), b_s,
                                use_acc=False, is_async=True)  # fmt: skip
            b_s = warpgroup_mma(q_panels.index(slot * 2 + 1), k_panels.index(k_slot * 2 + 1).permute((1, 0)), b_s,
                                is_async=True)  # fmt: skip
            b_s = warpgroup_mma_wait(0, deps=[b_s]) * scale_log2
            if CAUSAL or not FULL:
                b_s = gl.where(score_mask_at(rows, S, ROWS, CAUSAL), b_s, float("-inf"))
            b_p = gl.exp2(b_s - gl.expand_dims(gl.max(b_s, 1), 1))
            b_p = b_p * gl.expand_dims(1.0 / gl.sum(b_p, 1), 1)
            if not FULL:
                o_rows = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, S)), 1)
                b_p = gl.where(o_rows < rows, b_p, 0.0)
            b_a = gl.convert_layout(b_p.to(dtype), A)
            b_none = gl.zeros([ROWS, PANEL], gl.float32, L)
            b_o0 = warpgroup_mma(b_a, v_panels.index(k_slot * 2), b_none, use_acc=False, is_async=True)
            b_o1 = warpgroup_mma(b_a, v_panels.index(k_slot * 2 + 1), b_none, use_acc=False, is_async=True)
            b_o0, b_o1 = warpgroup_mma_wait(0, deps=[b_o0, b_o1])
            store_panels(p_output, q_panels, slot, b_o0, b_o1, start, written, head * HEAD_DIM, ROW_STRIDE, ROWS, PANEL,
                         FULL)  # fmt: skip
            gl.thread_barrier()
            mbarrier.arrive(q_empty.index(slot))
        gl.thread_barrier()
        mbarrier.arrive(k_empty.index(k_slot))


@gluon.jit
def block_diagonal_hopper_forward(
    query, key, value, p_tiles, p_cos, p_sin, p_positions, p_output, num_units, sequence_length, scale_log2,
    table_rows, QUERY_HEADS: gl.constexpr, KEY_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, ROWS: gl.constexpr,
    FULL: gl.constexpr, TABLE: gl.constexpr, CAUSAL: gl.constexpr, ROTATE_QUERY: gl.constexpr,
    ROTATE_KEY: gl.constexpr, INTERLEAVED: gl.constexpr, POSITIONS: gl.constexpr, CONSUMERS: gl.constexpr,
    Q_SLOTS: gl.constexpr, K_SLOTS: gl.constexpr, CONTIGUOUS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """One unit is one key head of one tile with all its query heads."""
    GROUP: gl.constexpr = QUERY_HEADS // KEY_HEADS
    PANEL: gl.constexpr = HEAD_DIM // 2
    dtype: gl.constexpr = query.dtype
    PANEL_LAYOUT: gl.constexpr = query.layout
    q_panels = gl.allocate_shared_memory(dtype, [2 * Q_SLOTS, ROWS, PANEL], PANEL_LAYOUT)
    k_panels = gl.allocate_shared_memory(dtype, [2 * K_SLOTS, ROWS, PANEL], PANEL_LAYOUT)
    v_panels = gl.allocate_shared_memory(dtype, [2 * K_SLOTS, ROWS, PANEL], PANEL_LAYOUT)
    q_ready = gl.allocate_shared_memory(gl.int64, [Q_SLOTS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_SLOTS, 1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [K_SLOTS, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [K_SLOTS, 1], mbarrier.MBarrierLayout())
    init_barriers(q_ready, Q_SLOTS)
    init_barriers(q_empty, Q_SLOTS)
    init_barriers(k_ready, K_SLOTS)
    init_barriers(k_empty, K_SLOTS)
    fence_async_shared()
    # Compile-time arguments stay so only in a tuple written in the call itself, hence the repetition.
    gl.static_assert(CONSUMERS == 2)
    gl.warp_specialize([
        (forward_compute, (p_output, p_tiles, p_cos, p_sin, p_positions, q_panels, k_panels, v_panels, q_ready,
             q_empty, k_ready, k_empty, num_units, sequence_length, scale_log2, table_rows, 0, GROUP, KEY_HEADS,
             HEAD_DIM, ROWS, FULL, TABLE, CAUSAL, ROTATE_QUERY, ROTATE_KEY, INTERLEAVED, POSITIONS, CONSUMERS, Q_SLOTS,
             K_SLOTS, CONTIGUOUS)),
        (forward_compute, (p_output, p_tiles, p_cos, p_sin, p_positions, q_panels, k_panels, v_panels, q_ready,
             q_empty, k_ready, k_empty, num_units, sequence_length, scale_log2, table_rows, 1, GROUP, KEY_HEADS,
             HEAD_DIM, ROWS, FULL, TABLE, CAUSAL, ROTATE_QUERY, ROTATE_KEY, INTERLEAVED, POSITIONS, CONSUMERS, Q_SLOTS,
             K_SLOTS, CONTIGUOUS)),
        (forward_load, (query, key, value, p_tiles, q_panels, k_panels, v_panels, q_ready, q_empty, k_ready, k_empty,
             num_units, sequence_length, GROUP, KEY_HEADS, HEAD_DIM, ROWS, FULL, TABLE, CONSUMERS, Q_SLOTS, K_SLOTS,
             CONTIGUOUS)),
    ], [4, 1], [CONSUMER_REGISTERS, 24])  # fmt: skip
