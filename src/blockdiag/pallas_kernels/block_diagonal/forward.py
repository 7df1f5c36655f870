"""Forward pass of block-diagonal attention for Hopper: device code and its schedule.

One task is one block of one key head with all the query heads that share it. For each query head a consumer computes
S = Q K^T, the softmax P of the tile, and O = P V. There is one key tile per query tile, so no softmax statistics are
carried between tiles. O is staged in Q's tile.
"""

import functools
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
    call_kernel,
    interpreter,
    persistent_programs,
    produce,
    registers_per_thread,
    store_tile,
    tile_memory,
    tile_softmax,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardSchedule:
    """The pipeline that overlaps the tasks of one program.

    Attributes:
        consumers: number of computing warpgroups, 1..3, each with its own task.
        key_stages: slots of the ring of K and V tiles.
        query_stages: slots of the ring of Q tiles; a multiple of `consumers` when query heads are grouped.
        automatic_barriers: whether Mosaic inserts its own barriers around shared-memory accesses.
    """

    consumers: int
    key_stages: int
    query_stages: int
    automatic_barriers: bool = True

    def shared_bytes(self, problem: BlockDiagonalProblem) -> int:
        """Return the shared memory of all tiles, without barriers."""
        tile = 2 * problem.block_size * problem.head_dim
        return tile * (2 * self.key_stages + self.query_stages) + 2 * self.consumers * problem.block_size**2


def default_schedule(problem: BlockDiagonalProblem) -> ForwardSchedule:
    """Return the deepest pipeline that fits in shared memory, with two consumers if each can have a stage."""
    for consumers in (2, 1):
        for stages in range(8, consumers - 1, -1):
            if problem.group_size > 1:
                if stages % consumers:
                    continue
                key_stages = consumers * max(1, stages // (2 * consumers))
            else:
                key_stages = stages
            schedule = ForwardSchedule(consumers=consumers, key_stages=key_stages, query_stages=stages)
            if schedule.shared_bytes(problem) <= SHARED_BUDGET_BYTES:
                return schedule
    raise NotImplementedError(
        f"no pipeline for head_dim {problem.head_dim} fits in {SHARED_BUDGET_BYTES} bytes of shared memory; use "
        "implementation='triton' or 'xla'"
    )


def _forward_body(problem: BlockDiagonalProblem, schedule: ForwardSchedule, programs: int, *refs: Any) -> None:
    """Run the kernel. `refs` are inputs, output and scratch in the order of `forward_call`."""
    query, key, value, output, b_query, b_key, b_value, b_p, full, free = refs
    query_full, key_full, value_full = full
    query_free, key_free = free
    consumers, group, dtype = schedule.consumers, problem.group_size, query.dtype
    work = Work(
        problem=problem,
        consumers=consumers,
        programs=programs,
        program=lax.axis_index("program"),
        query_ring=Ring(stages=schedule.query_stages, consumers=consumers),
        key_ring=Ring(stages=schedule.key_stages, consumers=consumers),
    )
    warpgroup = lax.axis_index("warpgroup")
    consumer_registers, producer_registers = registers_per_thread(consumers)

    def consume(index: jax.Array, _: None) -> None:
        turn = index * consumers + warpgroup
        rows, key_head = work.place(turn)
        key_slot, key_barrier = work.key_ring.slot(turn), work.key_ring.barrier(turn)

        def consume_member(member: jax.Array | int, _: None) -> None:
            item = work.query_item(turn, member)
            barrier = work.query_ring.barrier(item)
            t_query, t_p = b_query.at[work.query_ring.slot(item)], b_p.at[warpgroup]

            def await_keys(barriers: Any) -> None:
                if group == 1:
                    plgpu.barrier_wait(barriers.at[key_barrier])
                else:
                    pl.when(member == 0)(lambda: plgpu.barrier_wait(barriers.at[key_barrier]))

            def with_scores(accumulator: Any) -> jax.Array:
                await_keys(key_full)
                plgpu.barrier_wait(query_full.at[barrier])
                plgpu.wgmma(accumulator, t_query, b_key.at[key_slot].transpose((1, 0)))
                return accumulator[...]

            def with_output(accumulator: Any) -> jax.Array:
                await_keys(value_full)
                plgpu.wgmma(accumulator, t_p, b_value.at[key_slot])
                return accumulator[...]

            # scores: [block_size queries, block_size keys] float32
            scores = pl.run_scoped(with_scores, plgpu.ACC((problem.block_size, problem.block_size)))
            t_p[...] = tile_softmax(scores, problem.scale, problem.is_causal).astype(dtype)
            plgpu.commit_smem()
            values = pl.run_scoped(with_output, plgpu.ACC((problem.block_size, problem.head_dim)))
            store_tile(t_query, values, output.at[rows, key_head * group + member])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(query_free.at[barrier])

        if group == 1:
            consume_member(0, None)
        else:
            lax.fori_loop(0, group, consume_member, None)
        plgpu.barrier_arrive(key_free.at[key_barrier])

    @pl.when(warpgroup == consumers)
    def _():
        plgpu.set_max_registers(producer_registers, action="decrease")
        query_streams = [Stream(source=query, slots=b_query, full=query_full)]
        key_streams = [
            Stream(source=key, slots=b_key, full=key_full),
            Stream(source=value, slots=b_value, full=value_full),
        ]
        produce(work, query_streams, key_streams, query_free, key_free)

    @pl.when(warpgroup < consumers)
    def _():
        plgpu.set_max_registers(consumer_registers, action="increase")
        lax.fori_loop(0, work.turns_of(warpgroup), consume, None)
        plgpu.wait_smem_to_gmem(0)


def forward_call(
    problem: BlockDiagonalProblem,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    interpret: bool,
    schedule: ForwardSchedule | None = None,
    programs: int | None = None,
) -> jax.Array:
    """Return the attention output [tokens, N, H] in the dtype of query.

    `schedule` and `programs` change only the speed, never the results.
    """
    schedule = schedule or default_schedule(problem)
    programs = programs or persistent_programs(problem.num_tiles * problem.key_heads)
    block_size, head_dim, dtype = problem.block_size, problem.head_dim, query.dtype
    key_tiles = tile_memory(schedule.key_stages, block_size, head_dim, dtype)
    query_barriers, key_barriers = (
        plgpu.Barrier(num_barriers=Ring(stages=stages, consumers=schedule.consumers).barriers)
        for stages in (schedule.query_stages, schedule.key_stages)
    )
    call = plgpu.kernel(
        functools.partial(_forward_body, problem, schedule, programs),
        out_type=jax.ShapeDtypeStruct(query.shape, dtype),
        scratch_types=[
            tile_memory(schedule.query_stages, block_size, head_dim, dtype),
            key_tiles,
            key_tiles,
            tile_memory(schedule.consumers, block_size, block_size, dtype),
            (query_barriers, key_barriers, key_barriers),
            (query_barriers, key_barriers),
        ],
        grid=(programs,),
        grid_names=("program",),
        num_threads=schedule.consumers + 1,
        thread_name="warpgroup",
        kernel_name="block_diagonal_forward",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=not schedule.automatic_barriers),
        interpret=interpreter(interpret),
    )
    [output] = call_kernel(call, (query, key, value), interpret=interpret)
    return output
