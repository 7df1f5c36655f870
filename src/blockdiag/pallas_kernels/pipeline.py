"""Common parts of the Mosaic GPU kernels: tasks, rings of shared-memory tiles, the producer, and the tile softmax.

Every kernel is persistent, with one program per multiprocessor. Its last warpgroup is the producer, which walks the
program's tasks and fills rings of shared-memory tiles by TMA. The other warpgroups are consumers and take the tasks in
turn. They compute with the tensor cores, stage results in the tiles of inputs that are no longer needed, and store them
by TMA. Producer and consumers synchronise only through barriers.

A task is one block of one key head, with the group of query heads that share it. K and V of a task are one item of
the key ring. The tiles of each query head are one item of the query ring.
"""

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from blockdiag.ops.block_diagonal.problem import BlockDiagonalProblem

# Shared memory of one program on Hopper, minus what Mosaic uses for barriers, reductions and alignment.
SHARED_BUDGET_BYTES = 232_448 - 3_072
# Multiprocessors of H100 SXM and H200, assumed if there is no GPU. Results do not depend on this number.
USUAL_MULTIPROCESSORS = 132

LOG2_E = math.log2(math.e)

_interpreter_lock = threading.Lock()


@dataclass(frozen=True, kw_only=True, slots=True)
class Ring:
    """The mapping from numbered items to slots of a ring and to barriers.

    Each warpgroup that waits on a barrier tracks the barrier's phase, so always the same consumer must wait on it.
    Slots and consumers rotate with different periods. Therefore the ring has lcm(stages, consumers) barriers.
    """

    stages: int
    consumers: int

    @property
    def barriers(self) -> int:
        """The number of barriers of the ring."""
        return math.lcm(self.stages, self.consumers)

    def slot(self, item: jax.Array) -> jax.Array:
        """Return the slot of item number `item`."""
        return lax.rem(item, self.stages)

    def barrier(self, item: jax.Array) -> jax.Array:
        """Return the index of the barrier of item number `item`."""
        return lax.rem(item, self.barriers)


@dataclass(frozen=True, kw_only=True)
class Work:
    """The tasks of one program, and the places of their tiles in device memory and in the rings."""

    problem: BlockDiagonalProblem
    consumers: int
    programs: int
    program: jax.Array
    query_ring: Ring
    key_ring: Ring

    @property
    def turns(self) -> jax.Array:
        """The number of this program's tasks, which are program, program + programs, ..."""
        tasks = self.problem.num_tiles * self.problem.key_heads
        return lax.div(tasks - self.program + self.programs - 1, self.programs)

    def turns_of(self, consumer: jax.Array | int) -> jax.Array:
        """Return the number of one consumer's tasks, which are its turns consumer, consumer + consumers, ..."""
        return lax.div(self.turns - consumer + self.consumers - 1, self.consumers)

    def place(self, turn: jax.Array) -> tuple[pl.Slice, jax.Array]:
        """Return the token rows and key head of task number `turn`.

        Heads vary fastest, so neighbouring tasks share pages of memory.
        """
        task = turn * self.programs + self.program
        block, head = lax.div(task, self.problem.key_heads), lax.rem(task, self.problem.key_heads)
        return pl.ds(block * self.problem.block_size, self.problem.block_size), head

    def query_item(self, turn: jax.Array, member: jax.Array | int) -> jax.Array:
        """Return the number of a query head's item in the query ring, where consumers alternate head by head."""
        if self.problem.group_size == 1:
            return turn
        consumer = lax.rem(turn, self.consumers)
        return (turn - consumer) * self.problem.group_size + member * self.consumers + consumer


@dataclass(frozen=True, kw_only=True)
class Stream:
    """One operand's path: its device memory, its shared-memory slots, and the barriers that signal full slots."""

    source: Any
    slots: Any
    full: Any


def produce(work: Work, query_streams: list[Stream], key_streams: list[Stream], query_free: Any, key_free: Any) -> None:
    """Fill the rings in task order, each slot as soon as its consumer has released it."""
    group, consumers = work.problem.group_size, work.consumers

    def load(ring: Ring, streams: list[Stream], free: Any, item: jax.Array, rows: pl.Slice, head: jax.Array) -> None:
        @pl.when(item >= ring.stages)
        def _():
            plgpu.barrier_wait(free.at[ring.barrier(item - ring.stages)])

        slot, barrier = ring.slot(item), ring.barrier(item)
        for stream in streams:
            plgpu.copy_gmem_to_smem(stream.source.at[rows, head], stream.slots.at[slot], stream.full.at[barrier])

    def load_keys(turn: jax.Array) -> None:
        load(work.key_ring, key_streams, key_free, turn, *work.place(turn))

    def load_queries(turn: jax.Array, member: jax.Array | int) -> None:
        rows, key_head = work.place(turn)
        item = work.query_item(turn, member)
        load(work.query_ring, query_streams, query_free, item, rows, key_head * group + member)

    def each_turn_of_round(number: jax.Array, action: Callable[[jax.Array], None]) -> None:
        for consumer in range(consumers):
            turn = number * consumers + consumer

            @pl.when(turn < work.turns)
            def _(turn=turn):
                action(turn)

    def produce_round(number: jax.Array, _: None) -> None:
        def first_member(turn: jax.Array) -> None:
            load_keys(turn)
            load_queries(turn, 0)

        each_turn_of_round(number, first_member)
        if group > 1:

            def other_member(member: jax.Array, _: None) -> None:
                each_turn_of_round(number, lambda turn: load_queries(turn, member))

            lax.fori_loop(1, group, other_member, None)

    lax.fori_loop(0, lax.div(work.turns + consumers - 1, consumers), produce_round, None)
    _drain(work, query_free, key_free)


def _drain(work: Work, query_free: Any, key_free: Any) -> None:
    """Wait for the last release of every slot, so that no barrier is left with an unobserved phase."""
    group, consumers = work.problem.group_size, work.consumers

    def see(ring: Ring, free: Any, count: jax.Array, depth: int, number: Callable[[jax.Array], jax.Array]) -> None:
        def wait(index: jax.Array, _: None) -> None:
            plgpu.barrier_wait(free.at[ring.barrier(number(index))])

        lax.fori_loop(lax.max(count - depth, 0), count, wait, None)

    see(work.key_ring, key_free, work.turns, work.key_ring.stages, lambda turn: turn)
    if group == 1:
        see(work.query_ring, query_free, work.turns, work.query_ring.stages, lambda turn: turn)
        return
    for consumer in range(consumers):
        count = work.turns_of(consumer) * group
        depth = work.query_ring.stages // consumers
        see(work.query_ring, query_free, count, depth, lambda index, c=consumer: index * consumers + c)


def tile_memory(stages: int, rows: int, columns: int, dtype: jnp.dtype) -> Any:
    """Return shared memory for `stages` tiles [rows, columns] in a layout that both TMA and wgmma support."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(columns * itemsize * 8)
    transforms = (plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM((stages, rows, columns), dtype, transforms=transforms)


def store_tile(tile: Any, values: jax.Array, destination: Any) -> None:
    """Round `values` into a shared-memory tile and start its copy to device memory."""
    tile[...] = values.astype(tile.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile, destination)


def registers_per_thread(consumers: int) -> tuple[int, int]:
    """Return the registers per thread of consumers and of the producer, which share the multiprocessor's 65,536."""
    return {1: (240, 40), 2: (232, 40), 3: (160, 32)}[consumers]


def persistent_programs(tasks: int) -> int:
    """Return the number of programs: at most one per multiprocessor of the default GPU.

    Without a GPU the multiprocessors of H100 SXM and H200 are assumed.
    """
    multiprocessors = jax.devices()[0].core_count if jax.default_backend() == "gpu" else USUAL_MULTIPROCESSORS
    return min(tasks, multiprocessors)


def varying_like(results: Sequence[jax.Array], *operands: jax.Array) -> list[jax.Array]:
    """Return `results` marked as varying over every manual mesh axis of the operands. Pallas drops these marks."""
    axes = frozenset().union(*(jax.typeof(operand).manual_axis_type.varying for operand in operands))

    def mark(result: jax.Array) -> jax.Array:
        missing = axes - jax.typeof(result).manual_axis_type.varying
        return lax.pcast(result, tuple(sorted(missing, key=str)), to="varying") if missing else result

    return [mark(result) for result in results]


def interpreter(interpret: bool) -> plgpu.InterpretGPUParams | None:
    """Return the argument that makes `plgpu.kernel` run on the CPU, or None for the GPU."""
    return plgpu.InterpretGPUParams() if interpret else None


def call_kernel(call: Callable[..., Any], operands: Sequence[jax.Array], *, interpret: bool) -> list[jax.Array]:
    """Call a kernel and return its results as a list.

    Pallas's interpreter orders its callbacks by an effect, which `jax.checkpoint` refuses to differentiate. So an
    interpreted kernel runs as one callback without effects. The interpreter also keeps the memory of its GPU in a
    global variable, so only one such kernel runs at a time.
    """
    if not interpret:
        return varying_like(jax.tree.leaves(call(*operands)), *operands)
    compiled = jax.jit(call)

    def run_on_host(*arrays: Any) -> list[np.ndarray]:
        with _interpreter_lock, jax.default_device(jax.local_devices(backend="cpu")[0]):
            return [np.asarray(x) for x in jax.tree.leaves(compiled(*map(np.asarray, arrays)))]

    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in jax.tree.leaves(jax.eval_shape(call, *operands))]
    return varying_like(jax.pure_callback(run_on_host, types, *operands), *operands)


def tile_softmax(scores: jax.Array, scale: float, is_causal: bool) -> jax.Array:
    """Return the normalised softmax over the columns of a full tile of raw scores [rows, columns], in float32.

    A row always sees at least its own column, so no row is empty.
    """
    if is_causal:
        row = plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=plgpu.Layout.WGMMA)
        column = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
        scores = jnp.where(column <= row, scores, -jnp.inf)
    # The argument of exp2 is one fused multiply-add. The scale is positive, so it can be applied after the maximum.
    factor = scale * LOG2_E
    maximum = scores.max(axis=1) * factor
    weights = jnp.exp2(scores * factor - along_columns(maximum, scores.shape))
    return weights * along_columns(1.0 / weights.sum(axis=1), scores.shape)


def along_columns(per_row: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Broadcast one value per row [rows] over the columns of `shape` [rows, columns]."""
    return lax.broadcast_in_dim(per_row, shape, [0])
