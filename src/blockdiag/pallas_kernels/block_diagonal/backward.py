"""Backward pass of block-diagonal attention for Hopper: device code and its schedule.

One task is one block of one key head with all the query heads that share it. For each query head a consumer recomputes
P = softmax(scale Q K^T) and dP = dO V^T, both in float32, and forms dS = P * (dP - rowsum(P * dP)) * scale. Three more
products follow: dV += P^T dO, dQ = dS K, dK += dS^T Q. P and dS pass through shared memory once, in the input dtype,
because the transposed products need them as shared-memory operands.

Gradients have no staging buffers of their own: dQ is staged in dO's tile, dK in K's and dV in V's. That leaves room for
three full stages at head_dim 128. This memory-bound kernel needs them to keep loads in flight.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from blockdiag.ops.block_diagonal.problem import BlockDiagonalProblem
from blockdiag.pallas_kernels.pipeline import (
    SHARED_BUDGET_BYTES,
    Ring,
    Stream,
    Work,
    along_columns,
    call_kernel,
    interpreter,
    persistent_programs,
    produce,
    registers_per_thread,
    store_tile,
    tile_memory,
    tile_softmax,
)

type Gradients = tuple[jax.Array, jax.Array, jax.Array]


@dataclass(frozen=True, kw_only=True, slots=True)
class BackwardSchedule:
    """The pipeline that overlaps the tasks of one program.

    Attributes:
        consumers: number of computing warpgroups, 1..3, each with its own task.
        key_stages: slots of the ring of K and V tiles.
        query_stages: slots of the ring of Q and dO tiles; a multiple of `consumers` when query heads are grouped.
        separate_scores: whether dS has its own shared-memory tile; otherwise it waits for dV and reuses P's tile.
        automatic_barriers: whether Mosaic inserts its own barriers around shared-memory accesses.
    """

    consumers: int
    key_stages: int
    query_stages: int
    separate_scores: bool = True
    automatic_barriers: bool = True

    def shared_bytes(self, problem: BlockDiagonalProblem) -> int:
        """Return the shared memory of all tiles, without barriers."""
        tile = 2 * problem.block_size * problem.head_dim
        score_tiles = self.consumers * (2 if self.separate_scores else 1)
        return 2 * tile * (self.key_stages + self.query_stages) + 2 * score_tiles * problem.block_size**2


def default_schedule(problem: BlockDiagonalProblem) -> BackwardSchedule:
    """Return the deepest pipeline that fits in shared memory, with two consumers if each can have a stage."""
    for consumers in (2, 1):
        for stages in range(8, consumers - 1, -1):
            if problem.group_size > 1:
                if stages % consumers:
                    continue
                key_stages = consumers * max(1, stages // (2 * consumers))
            else:
                key_stages = stages
            schedule = BackwardSchedule(consumers=consumers, key_stages=key_stages, query_stages=stages)
            if schedule.shared_bytes(problem) <= SHARED_BUDGET_BYTES:
                return schedule
    raise NotImplementedError(
        f"no pipeline for head_dim {problem.head_dim} fits in {SHARED_BUDGET_BYTES} bytes of shared memory; use "
        "implementation='triton' or 'xla'"
    )


def _backward_body(problem: BlockDiagonalProblem, schedule: BackwardSchedule, programs: int, *refs: Any) -> None:
    """Run the kernel. `refs` are inputs, outputs and scratch in the order of `backward_call`."""
    query, key, value, cotangent, d_query, d_key, d_value, *scratch = refs
    b_query, b_cotangent, b_key, b_value, b_p, *b_ds, full, free = scratch
    query_full, cotangent_full, key_full, value_full = full
    query_free, key_free = free

    consumers, group, dtype = schedule.consumers, problem.group_size, query.dtype
    query_ring = Ring(stages=schedule.query_stages, consumers=consumers)
    key_ring = Ring(stages=schedule.key_stages, consumers=consumers)
    work = Work(
        problem=problem,
        consumers=consumers,
        programs=programs,
        program=lax.axis_index("program"),
        query_ring=query_ring,
        key_ring=key_ring,
    )
    warpgroup = lax.axis_index("warpgroup")
    consumer_registers, producer_registers = registers_per_thread(consumers)
    score_accumulator = plgpu.ACC((problem.block_size, problem.block_size))
    wide_accumulator = plgpu.ACC((problem.block_size, problem.head_dim))

    def score_gradients(query_item: jax.Array, turn: jax.Array, await_keys: Callable, dv_accumulator: Any) -> Any:
        """Start dV += P^T dO and return the shared-memory tile of dS, ready for wgmma; dV may still be in flight."""
        slot, barrier = query_ring.slot(query_item), query_ring.barrier(query_item)
        t_query, t_cotangent = b_query.at[slot], b_cotangent.at[slot]
        t_key, t_value = b_key.at[key_ring.slot(turn)], b_value.at[key_ring.slot(turn)]
        t_p = b_p.at[warpgroup]
        t_ds = b_ds[0].at[warpgroup] if schedule.separate_scores else t_p

        def weigh(s_accumulator: Any, dp_accumulator: Any) -> tuple[jax.Array, jax.Array]:
            await_keys(key_full)
            plgpu.barrier_wait(query_full.at[barrier])
            plgpu.wgmma(s_accumulator, t_query, t_key.transpose((1, 0)))
            await_keys(value_full)
            plgpu.barrier_wait(cotangent_full.at[barrier])
            plgpu.wgmma(dp_accumulator, t_cotangent, t_value.transpose((1, 0)))
            scores = plgpu.wgmma_accumulator_load(s_accumulator, wait_n=1)
            weights = tile_softmax(scores, problem.scale, problem.is_causal)
            t_p[...] = weights.astype(dtype)
            plgpu.commit_smem()
            return weights, plgpu.wgmma_accumulator_load(dp_accumulator, wait_n=0)

        # weights, d_weights: [block_size queries, block_size keys] float32
        weights, d_weights = pl.run_scoped(weigh, score_accumulator, score_accumulator)
        plgpu.wgmma(dv_accumulator, t_p.transpose((1, 0)), t_cotangent)
        mean = (weights * d_weights).sum(axis=1)
        d_scores = weights * (d_weights - along_columns(mean, weights.shape)) * problem.scale
        if not schedule.separate_scores:
            plgpu.wgmma_wait(0)
        t_ds[...] = d_scores.astype(dtype)
        plgpu.commit_smem()
        return t_ds

    def consume_single(index: jax.Array, _: None) -> None:
        """Compute one task with a single query head. Every gradient is stored as soon as it is complete."""
        turn = index * consumers + warpgroup
        rows, head = work.place(turn)
        slot, barrier = query_ring.slot(turn), query_ring.barrier(turn)
        t_query, t_cotangent, t_key, t_value = (b.at[slot] for b in (b_query, b_cotangent, b_key, b_value))

        def with_dv(dv_accumulator: Any) -> jax.Array:
            score_gradients(turn, turn, lambda barriers: plgpu.barrier_wait(barriers.at[barrier]), dv_accumulator)
            return dv_accumulator[...]

        t_ds = (b_ds[0] if schedule.separate_scores else b_p).at[warpgroup]
        store_tile(t_value, pl.run_scoped(with_dv, wide_accumulator), d_value.at[rows, head])

        def with_dq_and_dk(dq_accumulator: Any, dk_accumulator: Any) -> jax.Array:
            plgpu.wgmma(dq_accumulator, t_ds, t_key)
            plgpu.wgmma(dk_accumulator, t_ds.transpose((1, 0)), t_query)
            store_tile(t_cotangent, plgpu.wgmma_accumulator_load(dq_accumulator, wait_n=1), d_query.at[rows, head])
            return dk_accumulator[...]

        def with_dq(dq_accumulator: Any) -> None:
            plgpu.wgmma(dq_accumulator, t_ds, t_key)
            store_tile(t_cotangent, dq_accumulator[...], d_query.at[rows, head])

        def with_dk(dk_accumulator: Any) -> jax.Array:
            plgpu.wgmma(dk_accumulator, t_ds.transpose((1, 0)), t_query)
            return dk_accumulator[...]

        if problem.head_dim <= 128:
            d_key_values = pl.run_scoped(with_dq_and_dk, wide_accumulator, wide_accumulator)
        else:  # Both accumulators at once would not fit in registers.
            pl.run_scoped(with_dq, wide_accumulator)
            d_key_values = pl.run_scoped(with_dk, wide_accumulator)
        store_tile(t_key, d_key_values, d_key.at[rows, head])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(query_free.at[barrier])
        plgpu.barrier_arrive(key_free.at[barrier])

    def consume_grouped(index: jax.Array, _: None) -> None:
        """Compute one task with several query heads. dK and dV stay in registers over the group."""
        turn = index * consumers + warpgroup
        rows, key_head = work.place(turn)
        key_barrier = key_ring.barrier(turn)
        t_key, t_value = b_key.at[key_ring.slot(turn)], b_value.at[key_ring.slot(turn)]

        def over_group(dv_accumulator: Any, dk_accumulator: Any) -> tuple[jax.Array, jax.Array]:
            def consume_member(member: jax.Array, _: None) -> None:
                item = work.query_item(turn, member)
                slot, barrier = query_ring.slot(item), query_ring.barrier(item)

                def await_keys(barriers: Any) -> None:
                    @pl.when(member == 0)
                    def _():
                        plgpu.barrier_wait(barriers.at[key_barrier])

                t_ds = score_gradients(item, turn, await_keys, dv_accumulator)

                def with_dq(dq_accumulator: Any) -> None:
                    plgpu.wgmma(dq_accumulator, t_ds, t_key)
                    plgpu.wgmma(dk_accumulator, t_ds.transpose((1, 0)), b_query.at[slot])
                    head = key_head * group + member
                    d_query_values = plgpu.wgmma_accumulator_load(dq_accumulator, wait_n=1)
                    store_tile(b_cotangent.at[slot], d_query_values, d_query.at[rows, head])

                pl.run_scoped(with_dq, wide_accumulator)
                plgpu.wgmma_wait(0)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(query_free.at[barrier])

            lax.fori_loop(0, group, consume_member, None)
            return dv_accumulator[...], dk_accumulator[...]

        d_value_values, d_key_values = pl.run_scoped(over_group, wide_accumulator, wide_accumulator)
        store_tile(t_value, d_value_values, d_value.at[rows, key_head])
        store_tile(t_key, d_key_values, d_key.at[rows, key_head])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(key_free.at[key_barrier])

    @pl.when(warpgroup == consumers)
    def _():
        plgpu.set_max_registers(producer_registers, action="decrease")
        query_streams = [
            Stream(source=query, slots=b_query, full=query_full),
            Stream(source=cotangent, slots=b_cotangent, full=cotangent_full),
        ]
        key_streams = [
            Stream(source=key, slots=b_key, full=key_full),
            Stream(source=value, slots=b_value, full=value_full),
        ]
        produce(work, query_streams, key_streams, query_free, key_free)

    @pl.when(warpgroup < consumers)
    def _():
        plgpu.set_max_registers(consumer_registers, action="increase")
        consume = consume_single if group == 1 else consume_grouped
        lax.fori_loop(0, work.turns_of(warpgroup), consume, None)
        plgpu.wait_smem_to_gmem(0)


def backward_call(
    problem: BlockDiagonalProblem,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    output_cotangent: jax.Array,
    *,
    interpret: bool,
    schedule: BackwardSchedule | None = None,
    programs: int | None = None,
) -> Gradients:
    """Return the gradients of query [tokens, N, H] and of key and value [tokens, K, H], in their dtype.

    `schedule` and `programs` change only the speed, never the results.
    """
    schedule = schedule or default_schedule(problem)
    programs = programs or persistent_programs(problem.num_tiles * problem.key_heads)
    block_size, head_dim, dtype = problem.block_size, problem.head_dim, query.dtype
    query_barriers, key_barriers = (
        plgpu.Barrier(num_barriers=Ring(stages=stages, consumers=schedule.consumers).barriers)
        for stages in (schedule.query_stages, schedule.key_stages)
    )
    query_tiles = tile_memory(schedule.query_stages, block_size, head_dim, dtype)
    key_tiles = tile_memory(schedule.key_stages, block_size, head_dim, dtype)
    score_tiles = tile_memory(schedule.consumers, block_size, block_size, dtype)

    call = plgpu.kernel(
        functools.partial(_backward_body, problem, schedule, programs),
        out_type=[jax.ShapeDtypeStruct(array.shape, dtype) for array in (query, key, value)],
        scratch_types=[
            *(query_tiles, query_tiles, key_tiles, key_tiles),
            *([score_tiles] * (2 if schedule.separate_scores else 1)),
            (query_barriers, query_barriers, key_barriers, key_barriers),
            (query_barriers, key_barriers),
        ],
        grid=(programs,),
        grid_names=("program",),
        num_threads=schedule.consumers + 1,
        thread_name="warpgroup",
        kernel_name="block_diagonal_backward",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=not schedule.automatic_barriers),
        interpret=interpreter(interpret),
    )
    operands = (query, key, value, output_cotangent)
    d_query, d_key, d_value = call_kernel(call, operands, interpret=interpret)
    return d_query, d_key, d_value
