"""Backward of block-diagonal attention for Hopper: a copy warp keeps memory busy while warpgroups compute.

A plain Triton kernel issues its loads and its arithmetic from the same warps; measured on an H200 at 8 heads of 128 it
stays at 1.07 times the time a copy of the same bytes takes. Here loads run ahead in warps of their own.
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
    rotate_panels,
    rotate_slot,
    score_mask_at,
    store_panels,
    tile_rows_at,
    zero_rows,
)


@gluon.jit
def backward_load(
    query, key, value, output_cotangent, p_tiles, q_panels, do_panels, k_panels, v_panels, q_ready, q_empty, k_ready,
    k_empty, num_units, sequence_length, GROUP: gl.constexpr, KEY_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr,
    ROWS: gl.constexpr, FULL: gl.constexpr, TABLE: gl.constexpr, CONSUMERS: gl.constexpr, Q_SLOTS: gl.constexpr,
    K_SLOTS: gl.constexpr, CONTIGUOUS: gl.constexpr,
):  # fmt: skip
    """The copy warp: units go to the consumers in turn, their query heads interleaved as the consumers will ask."""
    PANEL: gl.constexpr = HEAD_DIM // 2
    PAIR_BYTES: gl.constexpr = 2 * ROWS * HEAD_DIM * 2
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
                    mbarrier.expect(k_ready.index(slot), PAIR_BYTES)
                    load_panels(key, k_panels, slot, start, key_head * HEAD_DIM, k_ready.index(slot), PANEL)
                    load_panels(value, v_panels, slot, start, key_head * HEAD_DIM, k_ready.index(slot), PANEL)
                item = turn * GROUP + member * active + consumer
                slot = item % Q_SLOTS
                column = (key_head * GROUP + member) * HEAD_DIM
                mbarrier.wait(q_empty.index(slot), ((item // Q_SLOTS) & 1) ^ 1)
                mbarrier.expect(q_ready.index(slot), PAIR_BYTES)
                load_panels(query, q_panels, slot, start, column, q_ready.index(slot), PANEL)
                load_panels(output_cotangent, do_panels, slot, start, column, q_ready.index(slot), PANEL)


@gluon.jit
def backward_compute(
    p_d_query, p_d_key, p_d_value, p_tiles, p_cos, p_sin, p_positions, q_panels, do_panels,
    k_panels, v_panels, weights, d_scores, q_ready, q_empty, k_ready, k_empty, num_units, sequence_length, scale,
    scale_log2, table_rows, CONSUMER: gl.constexpr, GROUP: gl.constexpr, KEY_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr, ROWS: gl.constexpr, FULL: gl.constexpr, TABLE: gl.constexpr, CAUSAL: gl.constexpr,
    ROTATE_QUERY: gl.constexpr, ROTATE_KEY: gl.constexpr, INTERLEAVED: gl.constexpr, POSITIONS: gl.constexpr,
    CONSUMERS: gl.constexpr, Q_SLOTS: gl.constexpr, K_SLOTS: gl.constexpr, CONTIGUOUS: gl.constexpr,
):  # fmt: skip
    """One consumer warpgroup: every CONSUMERS-th unit of the program, all its query heads."""
    PANEL: gl.constexpr = HEAD_DIM // 2
    ROTARY: gl.constexpr = ROTATE_QUERY or ROTATE_KEY
    dtype: gl.constexpr = q_panels.dtype
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PANEL, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, L, 2)
    QUERY_STRIDE: gl.constexpr = KEY_HEADS * GROUP * HEAD_DIM
    KEY_STRIDE: gl.constexpr = KEY_HEADS * HEAD_DIM
    p_smem = weights.index(CONSUMER)
    ds_smem = d_scores.index(CONSUMER)
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
                zero_rows(k_panels, k_slot, rows, L, ROWS)
                zero_rows(v_panels, k_slot, rows, L, ROWS)
        if ROTATE_KEY:
            rotate_slot(k_panels, k_slot, b_cos0, b_cos1, b_sin0, b_sin1, ROWS, PANEL, INTERLEAVED, L)
        k0 = k_panels.index(k_slot * 2)
        k1 = k_panels.index(k_slot * 2 + 1)
        v0 = v_panels.index(k_slot * 2)
        v1 = v_panels.index(k_slot * 2 + 1)
        # Made anew for every unit, so that nothing but these four is live from one query head to the next.
        b_dk0 = gl.zeros([ROWS, PANEL], gl.float32, L)
        b_dk1 = gl.zeros([ROWS, PANEL], gl.float32, L)
        b_dv0 = gl.zeros([ROWS, PANEL], gl.float32, L)
        b_dv1 = gl.zeros([ROWS, PANEL], gl.float32, L)
        for member in range(GROUP):
            item = turn * GROUP + member * active + CONSUMER
            slot = item % Q_SLOTS
            head = key_head * GROUP + member
            mbarrier.wait(q_ready.index(slot), (item // Q_SLOTS) & 1)
            if not FULL:
                if rows < ROWS:
                    zero_rows(q_panels, slot, rows, L, ROWS)
                    zero_rows(do_panels, slot, rows, L, ROWS)
            if ROTATE_QUERY:
                rotate_slot(q_panels, slot, b_cos0, b_cos1, b_sin0, b_sin1, ROWS, PANEL, INTERLEAVED, L)
            if ROTARY or not FULL:
                fence_async_shared()
                gl.thread_barrier()
            q0 = q_panels.index(slot * 2)
            q1 = q_panels.index(slot * 2 + 1)
            do0 = do_panels.index(slot * 2)
            do1 = do_panels.index(slot * 2 + 1)

            b_zero = gl.zeros([ROWS, ROWS], gl.float32, S)
            b_s = warpgroup_mma(q0, k0.permute((1, 0)), b_zero, use_acc=False, is_async=True)
            b_s = warpgroup_mma(q1, k1.permute((1, 0)), b_s, is_async=True)
            b_dp = warpgroup_mma(do0, v0.permute((1, 0)), b_zero, use_acc=False, is_async=True)
            b_dp = warpgroup_mma(do1, v1.permute((1, 0)), b_dp, is_async=True)
            b_s = warpgroup_mma_wait(2, deps=[b_s]) * scale_log2
            if CAUSAL or not FULL:
                b_s = gl.where(score_mask_at(rows, S, ROWS, CAUSAL), b_s, float("-inf"))
            b_p = gl.exp2(b_s - gl.expand_dims(gl.max(b_s, 1), 1))
            b_p = b_p * gl.expand_dims(1.0 / gl.sum(b_p, 1), 1)
            p_smem.store(b_p.to(dtype))
            b_dp = warpgroup_mma_wait(0, deps=[b_dp])
            b_ds = b_p * (b_dp - gl.expand_dims(gl.sum(b_p * b_dp, 1), 1)) * scale
            b_ds = b_ds.to(dtype)
            ds_smem.store(b_ds)
            fence_async_shared()
            gl.thread_barrier()

            added: gl.constexpr = GROUP > 1
            b_dv0 = warpgroup_mma(p_smem.permute((1, 0)), do0, b_dv0, use_acc=added, is_async=True)
            b_dv1 = warpgroup_mma(p_smem.permute((1, 0)), do1, b_dv1, use_acc=added, is_async=True)
            b_da = gl.convert_layout(b_ds, A)
            b_none = gl.zeros([ROWS, PANEL], gl.float32, L)
            b_dq0 = warpgroup_mma(b_da, k0, b_none, use_acc=False, is_async=True)
            b_dq1 = warpgroup_mma(b_da, k1, b_none, use_acc=False, is_async=True)
            # One gradient at a time leaves the registers: all three at once would spill.
            b_dv0, b_dv1 = warpgroup_mma_wait(2, deps=[b_dv0, b_dv1])
            if GROUP == 1:
                store_panels(p_d_value, v_panels, k_slot, b_dv0, b_dv1, start, written, key_head * HEAD_DIM, KEY_STRIDE,
                             ROWS, PANEL, FULL)  # fmt: skip
            b_dk0 = warpgroup_mma(ds_smem.permute((1, 0)), q0, b_dk0, use_acc=added, is_async=True)
            b_dk1 = warpgroup_mma(ds_smem.permute((1, 0)), q1, b_dk1, use_acc=added, is_async=True)
            b_dq0, b_dq1 = warpgroup_mma_wait(2, deps=[b_dq0, b_dq1])
            if ROTATE_QUERY:
                b_dq0, b_dq1 = rotate_panels(b_dq0, b_dq1, b_cos0, b_cos1, b_sin0, b_sin1, -1.0, ROWS, PANEL,
                                             INTERLEAVED, L)  # fmt: skip
            # dV no longer reads dO: its slot carries dQ out.
            store_panels(p_d_query, do_panels, slot, b_dq0, b_dq1, start, written, head * HEAD_DIM, QUERY_STRIDE, ROWS,
                         PANEL, FULL)  # fmt: skip
            b_dk0, b_dk1 = warpgroup_mma_wait(0, deps=[b_dk0, b_dk1])
            gl.thread_barrier()
            mbarrier.arrive(q_empty.index(slot))
        if GROUP > 1:
            store_panels(p_d_value, v_panels, k_slot, b_dv0, b_dv1, start, written, key_head * HEAD_DIM, KEY_STRIDE,
                         ROWS, PANEL, FULL)  # fmt: skip
        if ROTATE_KEY:
            b_ek0, b_ek1 = rotate_panels(b_dk0, b_dk1, b_cos0, b_cos1, b_sin0, b_sin1, -1.0, ROWS, PANEL, INTERLEAVED,
                                         L)  # fmt: skip
        else:
            b_ek0 = b_dk0
            b_ek1 = b_dk1
        store_panels(p_d_key, k_panels, k_slot, b_ek0, b_ek1, start, written, key_head * HEAD_DIM, KEY_STRIDE, ROWS, PANEL,
                     FULL)  # fmt: skip
        gl.thread_barrier()
        mbarrier.arrive(k_empty.index(k_slot))


@gluon.jit
def block_diagonal_hopper_backward(
    query, key, value, output_cotangent, p_tiles, p_cos, p_sin, p_positions, p_d_query, p_d_key, p_d_value, num_units, sequence_length, scale, scale_log2, table_rows,
    QUERY_HEADS: gl.constexpr, KEY_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, ROWS: gl.constexpr,
    FULL: gl.constexpr, TABLE: gl.constexpr, CAUSAL: gl.constexpr, ROTATE_QUERY: gl.constexpr,
    ROTATE_KEY: gl.constexpr, INTERLEAVED: gl.constexpr, POSITIONS: gl.constexpr, CONSUMERS: gl.constexpr,
    Q_SLOTS: gl.constexpr, K_SLOTS: gl.constexpr, CONTIGUOUS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """One unit is one key head of one tile with all its query heads."""
    GROUP: gl.constexpr = QUERY_HEADS // KEY_HEADS
    PANEL: gl.constexpr = HEAD_DIM // 2
    dtype: gl.constexpr = query.dtype
    PANEL_LAYOUT: gl.constexpr = query.layout
    SCORES_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, ROWS], dtype)
    q_panels = gl.allocate_shared_memory(dtype, [2 * Q_SLOTS, ROWS, PANEL], PANEL_LAYOUT)
    do_panels = gl.allocate_shared_memory(dtype, [2 * Q_SLOTS, ROWS, PANEL], PANEL_LAYOUT)
    k_panels = gl.allocate_shared_memory(dtype, [2 * K_SLOTS, ROWS, PANEL], PANEL_LAYOUT)
    v_panels = gl.allocate_shared_memory(dtype, [2 * K_SLOTS, ROWS, PANEL], PANEL_LAYOUT)
    weights = gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS, ROWS], SCORES_LAYOUT)
    d_scores = gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS, ROWS], SCORES_LAYOUT)
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
    if CONSUMERS == 1:
        gl.warp_specialize([
            (backward_compute, (p_d_query, p_d_key, p_d_value, p_tiles, p_cos, p_sin, p_positions, q_panels,
             do_panels, k_panels, v_panels, weights, d_scores, q_ready, q_empty, k_ready, k_empty, num_units,
             sequence_length, scale, scale_log2, table_rows, 0, GROUP, KEY_HEADS, HEAD_DIM, ROWS, FULL, TABLE, CAUSAL,
             ROTATE_QUERY, ROTATE_KEY, INTERLEAVED, POSITIONS, CONSUMERS, Q_SLOTS, K_SLOTS, CONTIGUOUS)),
            (backward_load, (query, key, value, output_cotangent, p_tiles, q_panels, do_panels, k_panels, v_panels, q_ready, q_empty,
             k_ready, k_empty, num_units, sequence_length, GROUP, KEY_HEADS, HEAD_DIM, ROWS, FULL, TABLE, CONSUMERS,
             Q_SLOTS, K_SLOTS, CONTIGUOUS)),
        ], [1], [24])  # fmt: skip
    else:
        gl.warp_specialize([
            (backward_compute, (p_d_query, p_d_key, p_d_value, p_tiles, p_cos, p_sin, p_positions, q_panels,
             do_panels, k_panels, v_panels, weights, d_scores, q_ready, q_empty, k_ready, k_empty, num_units,
             sequence_length, scale, scale_log2, table_rows, 0, GROUP, KEY_HEADS, HEAD_DIM, ROWS, FULL, TABLE, CAUSAL,
             ROTATE_QUERY, ROTATE_KEY, INTERLEAVED, POSITIONS, CONSUMERS, Q_SLOTS, K_SLOTS, CONTIGUOUS)),
            (backward_compute, (p_d_query, p_d_key, p_d_value, p_tiles, p_cos, p_sin, p_positions, q_panels,
             do_panels, k_panels, v_panels, weights, d_scores, q_ready, q_empty, k_ready, k_empty, num_units,
             sequence_length, scale, scale_log2, table_rows, 1, GROUP, KEY_HEADS, HEAD_DIM, ROWS, FULL, TABLE, CAUSAL,
             ROTATE_QUERY, ROTATE_KEY, INTERLEAVED, POSITIONS, CONSUMERS, Q_SLOTS, K_SLOTS, CONTIGUOUS)),
            (backward_load, (query, key, value, output_cotangent, p_tiles, q_panels, do_panels, k_panels, v_panels, q_ready, q_empty,
             k_ready, k_empty, num_units, sequence_length, GROUP, KEY_HEADS, HEAD_DIM, ROWS, FULL, TABLE, CONSUMERS,
             Q_SLOTS, K_SLOTS, CONTIGUOUS)),
        ], [4, 1], [CONSUMER_REGISTERS, 24])  # fmt: skip
