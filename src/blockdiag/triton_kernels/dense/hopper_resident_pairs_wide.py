"""Template in Gluon of the kernel of `hopper_resident_pairs.py` for wide heads, whose tiles leave no room for results.

`parts/hopper_pair_gradients.py` describes programs, rounds, and the functions that the caller generates.

| warps | function | work |
|---|---|---|
| 4 + 4 | `compute` | all products, each group with half of the keys, delta, and the gradient of the bias |
| 1 | `load` | load the bias, and fill slots of query tiles, keys and values |
| 1 | `gather` | load log-sum-exps, sum key terms, and store gradients of queries |

The scores of a group's keys are one product, and so are their slopes, here the gradients of the weights before delta is
subtracted. The slopes start after half of the exponentials, because values arrive late. The groups exchange sums over
all keys: delta of each query, and the query gradient, of which each group finishes one half of the columns.

Keys are needed until the end of a round, and values half as long; a group has one slot for each. The next round's keys
therefore go into the slot that values leave. The next round's values are needed only after its scores, and go into the
slot of the keys. Gradients are staged in their query tiles, and `gather` waits for their store.
"""

# Device code is laid out by hand: one argument per line would hide what a kernel does.
# fmt: off

from dataclasses import dataclass
from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from blockdiag.triton_kernels.launch.gluon_names import reinterpret, thread_barrier, tma_load, tma_store
from blockdiag.triton_kernels.parts.hopper_pair_gradients import (
    OWN,
    key_positions,
    load_bias,
    request_vectors,
    store_bias_sums,
    store_vectors,
)
from blockdiag.triton_kernels.parts.hopper_tiles import make_barriers
from blockdiag.triton_kernels.parts.resident_tiles import (
    forgotten,
    halves,
    rounded_product,
    share_of,
    side_by_side,
    widened,
)

# Slots of query tiles, so that the next round's tiles arrive before a round ends.
OWN_SLOTS = gl.constexpr(2)
# The fewest registers per thread that hardware allows, so that each computing thread gets 240.
FEW_REGISTERS = gl.constexpr(24)


@dataclass(frozen=True)
class WidePairsShape:
    """Static properties of a launch.

    Attributes:
        tiles: tiles of queries per cell.
        rounds: the rounds of each tile, over all programs that share them.
        keys: the number of keys.
        width: the head dimension.
        has_key_terms: whether scores have terms without queries.
        factor: the factor of scores that `start` and the products leave out.
        unit: `factor` times log2(e), which converts scores to exponents of 2.
        bias_factor: the factor of the bias in the scores.
    """

    tiles: int
    rounds: int
    keys: int
    width: int
    has_key_terms: bool
    factor: float
    unit: float
    bias_factor: float

    @property
    def part(self) -> int:
        """The number of keys per group."""
        return self.keys // 2


class WidePairsMatrices(NamedTuple):
    """Descriptors of the arrays that the copy engine moves; `gradient` is that of the queries, in half tiles."""

    query: Any
    cotangent: Any
    key: Any
    value: Any
    bias: Any
    gradient: Any


class WidePairsMemory(NamedTuple):
    """Shared memory and barriers of a program.

    Attributes:
        own_tiles: queries and cotangents, in turn, of each slot of query tiles, [4, 64, width].
        half: the same memory as float32 halves of query gradients, [4, 64, width / 2].
        ring: two slots for each group's keys and values, [4, keys / 2, width].
        lines: log_sum times log2(e) of each slot of query tiles, then each group's part of delta.
        key_terms: sums of key terms.
        bias: the tile of the bias, in a piece for each group.
        tiles_read: completes when both groups have read a round's cotangents, log-sum-exps and key terms.
        half_full: one for the half that each group hands over.
    """

    own_tiles: Any
    half: Any
    ring: Any
    lines: Any
    key_terms: Any
    bias: Any
    own_full: Any
    own_empty: Any
    lines_full: Any
    ring_full: Any
    ring_empty: Any
    delta_full: Any
    half_full: Any
    tiles_read: Any
    gradient_full: Any
    bias_full: Any


@gluon.jit
def begin_product(tile, others, SHAPE: gl.constexpr):
    """Start the product of a query tile and a group's keys or values, which gives scores or slopes."""
    PART: gl.constexpr = SHAPE.part
    b_start = gl.zeros([OWN, PART], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16]))
    return warpgroup_mma(tile, others.permute((1, 0)), b_start, use_acc=False, is_async=True)


@gluon.jit
def exponentials(memory, numbers, b_scores, b_base, SIDE: gl.constexpr, GROUP: gl.constexpr, FUNCTIONS: gl.constexpr,
                 SHAPE: gl.constexpr):
    """Return the probabilities of one half of a group's keys."""
    PART: gl.constexpr = SHAPE.part
    COUNT: gl.constexpr = PART // 2
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COUNT, 16])
    b_scores = gl.convert_layout(b_scores, LAYOUT, assert_trivial=True)
    # The terms are loaded only now, because scores and slopes leave few registers.
    r_k = GROUP * PART + SIDE * COUNT + gl.arange(0, COUNT, gl.SliceLayout(0, LAYOUT))
    b_bias = widened(memory.bias.index(GROUP).slice(SIDE * COUNT, COUNT, dim=1).load(LAYOUT))
    b_terms = FUNCTIONS.start(numbers, r_k, b_bias)
    if SHAPE.has_key_terms:
        terms = memory.key_terms.index(0).slice(GROUP * PART + SIDE * COUNT, COUNT)
        b_terms = b_terms + gl.expand_dims(terms.load(gl.SliceLayout(0, LAYOUT)), 0)
    return gl.exp2((b_scores + b_terms) * SHAPE.unit - b_base)


@gluon.jit
def weigh(memory, numbers, round, keys, values, GROUP: gl.constexpr, FUNCTIONS: gl.constexpr, SHAPE: gl.constexpr):
    """Return the probabilities and slopes of a group's keys, and free the slot of its values."""
    PART: gl.constexpr = SHAPE.part
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    LINE: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART // 2, 16]))
    own_slot = round % OWN_SLOTS
    mbarrier.wait(memory.own_full.index(own_slot), round // OWN_SLOTS % 2)
    mbarrier.wait(memory.ring_full.index(keys), round % 2)
    b_scores = begin_product(memory.own_tiles.index(own_slot * 2), memory.ring.index(keys), SHAPE)
    mbarrier.wait(memory.lines_full.index(own_slot), round // OWN_SLOTS % 2)
    b_base = gl.expand_dims(memory.lines.index(own_slot).load(LINE), 1)
    b_scores = warpgroup_mma_wait(0, deps=[b_scores])
    b_left, b_right = halves(b_scores)
    b_left = exponentials(memory, numbers, b_left, b_base, 0, GROUP, FUNCTIONS, SHAPE)
    mbarrier.wait(memory.ring_full.index(values), round % 2)
    cotangents = memory.own_tiles.index(forgotten(own_slot) * 2 + 1)
    b_slopes = begin_product(cotangents, memory.ring.index(values), SHAPE)
    b_right = exponentials(memory, numbers, b_right, b_base, 1, GROUP, FUNCTIONS, SHAPE)
    b_power = side_by_side(b_left, b_right, SCORES)
    # This barrier is passed already. Without a wait here, the compiler would delay exponentials until slopes are done.
    mbarrier.wait(memory.own_full.index(own_slot), round // OWN_SLOTS % 2)
    b_slopes = warpgroup_mma_wait(0, deps=[b_slopes])
    thread_barrier()
    mbarrier.arrive(memory.ring_empty.index(values), count=1)
    mbarrier.arrive(memory.tiles_read.index(0), count=1)
    return b_power, b_slopes


@gluon.jit
def add_deltas(memory, p_delta, place, b_power, b_slopes, o_query, round, GROUP: gl.constexpr, FUNCTIONS: gl.constexpr):
    """Return delta of each query, the sum of probability times slope over both groups' keys. Group 0 stores it."""
    b_delta = gl.sum(b_power * b_slopes, 1)
    memory.lines.index(OWN_SLOTS + GROUP).store(b_delta)
    thread_barrier()
    mbarrier.arrive(memory.delta_full.index(0), count=1)
    mbarrier.wait(memory.delta_full.index(0), round % 2)
    b_delta = b_delta + memory.lines.index(OWN_SLOTS + 1 - GROUP).load(b_delta.type.layout)
    if GROUP == 0:
        gl.store(FUNCTIONS.line_at(p_delta, place) + o_query, b_delta)
    return b_delta


@gluon.jit
def query_gradient(memory, b_slopes, keys, SHAPE: gl.constexpr):
    """Return a group's part of the query gradient, and free the slot of its keys."""
    WIDTH: gl.constexpr = SHAPE.width
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    b_factor = gl.convert_layout(b_slopes.to(memory.ring.dtype), gl.DotOperandLayout(0, WIDE, 2))
    b_sum = gl.zeros([OWN, WIDTH], gl.float32, WIDE)
    b_sum = warpgroup_mma(b_factor, memory.ring.index(keys), b_sum, use_acc=False, is_async=True)
    b_sum = warpgroup_mma_wait(0, deps=[b_sum])
    thread_barrier()
    mbarrier.arrive(memory.ring_empty.index(keys), count=1)
    return b_sum


@gluon.jit
def staged_gradient(memory, matrices, number, SHAPE: gl.constexpr):
    """Return the memory in which half of a query gradient is staged, that of half `number`."""
    HALF: gl.constexpr = SHAPE.width // 2
    half = memory.half.index(number)
    return reinterpret(half, memory.own_tiles.dtype, [2, OWN, HALF], matrices.gradient.layout).index(0)


@gluon.jit
def exchange_halves(memory, matrices, b_sum, round, GROUP: gl.constexpr, SHAPE: gl.constexpr):
    """Sum half of the columns of a query gradient over the groups, and stage it; the other group does the other half.

    The halves are exchanged and staged in the round's query tiles.
    """
    own_slot = round % OWN_SLOTS
    if GROUP == 0:
        b_kept, b_given = halves(b_sum)
    else:
        b_given, b_kept = halves(b_sum)
    # Both groups have finished with the tiles.
    mbarrier.wait(memory.tiles_read.index(0), round % 2)
    memory.half.index(own_slot * 2 + GROUP).store(b_given)
    thread_barrier()
    mbarrier.arrive(memory.half_full.index(GROUP), count=1)
    mbarrier.wait(memory.half_full.index(1 - GROUP), round % 2)
    b_kept = b_kept + memory.half.index(own_slot * 2 + 1 - GROUP).load(b_kept.type.layout)
    thread_barrier()
    gradient = staged_gradient(memory, matrices, own_slot * 2 + 1 - GROUP, SHAPE)
    gradient.store((b_kept * SHAPE.factor).to(memory.own_tiles.dtype))
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(memory.gradient_full.index(own_slot), count=1)


@gluon.jit
def compute(memory, matrices, arrays, p_delta, p_bias_gradient, ROUNDS: gl.constexpr, GROUP: gl.constexpr,
            FUNCTIONS: gl.constexpr, SHAPE: gl.constexpr):
    """Compute the gradients of half of the keys of each round."""
    PART: gl.constexpr = SHAPE.part
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    HALF_SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART // 2, 16])
    tile, first, count, own_place = share_of(ROUNDS, FUNCTIONS, SHAPE)
    o_query = tile * OWN + gl.arange(0, OWN, gl.SliceLayout(1, SCORES))
    r_q = tile * OWN + gl.arange(0, OWN, gl.SliceLayout(1, HALF_SCORES))
    b_bias_sum = gl.zeros([OWN, PART], gl.float32, SCORES)
    mbarrier.wait(memory.bias_full.index(0), 0)
    for round in range(count):
        place = FUNCTIONS.place(own_place, first + round)
        numbers = FUNCTIONS.per_query(arrays, place, r_q)
        keys = GROUP * 2 + round % OWN_SLOTS
        values = GROUP * 2 + 1 - round % OWN_SLOTS
        b_power, b_slopes = weigh(memory, numbers, round, keys, values, GROUP, FUNCTIONS, SHAPE)
        b_delta = add_deltas(memory, p_delta, place, b_power, b_slopes, o_query, round, GROUP, FUNCTIONS)
        b_slopes = rounded_product(b_slopes - gl.expand_dims(b_delta, 1), b_power)
        b_bias_sum = b_bias_sum + b_slopes
        b_sum = query_gradient(memory, b_slopes, keys, SHAPE)
        exchange_halves(memory, matrices, b_sum, round, GROUP, SHAPE)
    store_bias_sums(p_bias_gradient, (b_bias_sum,), GROUP, SHAPE)


@gluon.jit
def next_part(memory, slot, round, SHAPE: gl.constexpr):
    """Wait until a slot of the ring is free, and announce its next keys or values. Return its barrier and memory."""
    mbarrier.wait(memory.ring_empty.index(slot), round % 2 ^ 1)
    mbarrier.expect(memory.ring_full.index(slot), SHAPE.part * SHAPE.width * 2)
    return memory.ring_full.index(slot), memory.ring.index(slot)


@gluon.jit
def load(memory, matrices, ROUNDS: gl.constexpr, FUNCTIONS: gl.constexpr, SHAPE: gl.constexpr):
    """Load the bias, and fill the slots of query tiles, keys and values for all rounds."""
    PART: gl.constexpr = SHAPE.part
    tile, first, count, own_place = share_of(ROUNDS, FUNCTIONS, SHAPE)
    load_bias(matrices, memory, FUNCTIONS.place(own_place, first), tile, FUNCTIONS)
    for round in range(count):
        place = FUNCTIONS.place(own_place, first + round)
        own_slot = round % OWN_SLOTS
        mbarrier.wait(memory.own_empty.index(own_slot), round // OWN_SLOTS % 2 ^ 1)
        full = memory.own_full.index(own_slot)
        mbarrier.expect(full, 2 * OWN * SHAPE.width * 2)
        row, column = FUNCTIONS.query_at(place, tile)
        tma_load(matrices.query, [row, column], full, memory.own_tiles.index(own_slot * 2))
        row, column = FUNCTIONS.output_at(place, tile)
        tma_load(matrices.cotangent, [row, column], full, memory.own_tiles.index(own_slot * 2 + 1))
        for group in gl.static_range(2):
            full, part = next_part(memory, group * 2 + own_slot, round, SHAPE)
            row, column = FUNCTIONS.key_at(place)
            tma_load(matrices.key, [row + group * PART, column], full, part)
        for group in gl.static_range(2):
            full, part = next_part(memory, group * 2 + 1 - own_slot, round, SHAPE)
            row, column = FUNCTIONS.value_at(place)
            tma_load(matrices.value, [row + group * PART, column], full, part)


@gluon.jit
def store_last_gradient(memory, matrices, own_place, tile, first, round, FUNCTIONS: gl.constexpr, SHAPE: gl.constexpr):
    """Store the query gradient of the round before `round` once it is staged, and free its slot of query tiles."""
    slot = (round - 1) % OWN_SLOTS
    mbarrier.wait(memory.gradient_full.index(slot), (round - 1) // OWN_SLOTS % 2)
    row, column = FUNCTIONS.gradient_at(FUNCTIONS.place(own_place, first + round - 1), tile)
    for group in gl.static_range(2):
        gradient = staged_gradient(memory, matrices, slot * 2 + 1 - group, SHAPE)
        tma_store(matrices.gradient, [row, column + group * (SHAPE.width // 2)], gradient)
    tma.store_wait(0)
    thread_barrier()
    mbarrier.arrive(memory.own_empty.index(slot), count=1)


@gluon.jit
def gather(memory, matrices, arrays, p_log_sum, ROUNDS: gl.constexpr, FUNCTIONS: gl.constexpr, SHAPE: gl.constexpr):
    """Fill the slots of lines and key terms for all rounds, and store gradients of queries."""
    tile, first, count, own_place = share_of(ROUNDS, FUNCTIONS, SHAPE)
    r_k = key_positions(SHAPE)
    loaded, b_log_sum = request_vectors(arrays, p_log_sum, FUNCTIONS.place(own_place, first), tile, r_k, FUNCTIONS)
    for round in range(count):
        slot = round % OWN_SLOTS
        mbarrier.wait(memory.tiles_read.index(0), round % 2 ^ 1)
        store_vectors(memory, slot, 0, loaded, b_log_sum, r_k, FUNCTIONS, SHAPE)
        thread_barrier()
        mbarrier.arrive(memory.lines_full.index(slot), count=1)
        later = FUNCTIONS.place(own_place, first + gl.minimum(round + 1, count - 1))
        loaded, b_log_sum = request_vectors(arrays, p_log_sum, later, tile, r_k, FUNCTIONS)
        if round > 0:
            store_last_gradient(memory, matrices, own_place, tile, first, round, FUNCTIONS, SHAPE)
    store_last_gradient(memory, matrices, own_place, tile, first, count, FUNCTIONS, SHAPE)


@gluon.jit
def resident_pairs_wide(matrices, arrays, p_log_sum, p_delta, p_bias_gradient, ROUNDS: gl.constexpr,
                        FUNCTIONS: gl.constexpr, SHAPE: gl.constexpr):
    """Compute the gradients of one tile of queries in ROUNDS of its rounds, and their part of the bias's gradient.

    `arrays` are pointers to the arrays that the generated functions read. Deltas are results, too.
    """
    WIDTH: gl.constexpr = SHAPE.width
    KEYS: gl.constexpr = SHAPE.keys
    PART: gl.constexpr = SHAPE.part
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    dtype: gl.constexpr = matrices.query.dtype
    own_tiles = gl.allocate_shared_memory(dtype, [2 * OWN_SLOTS, OWN, WIDTH], matrices.query.layout)
    ring = gl.allocate_shared_memory(dtype, [4, PART, WIDTH], matrices.key.layout)
    half = reinterpret(own_tiles, gl.float32, [2 * OWN_SLOTS, OWN, WIDTH // 2],
                       gl.SwizzledSharedLayout(8, 1, WIDTH // 16, [1, 0]))
    lines = gl.allocate_shared_memory(gl.float32, [OWN_SLOTS + 2, OWN], PLAIN)
    key_terms = lines
    if SHAPE.has_key_terms:
        key_terms = gl.allocate_shared_memory(gl.float32, [1, KEYS], PLAIN)
    bias = gl.allocate_shared_memory(matrices.bias.dtype, [2, OWN, PART], matrices.bias.layout)
    own_full = make_barriers(OWN_SLOTS, 1)
    own_empty = make_barriers(OWN_SLOTS, 1)
    lines_full = make_barriers(OWN_SLOTS, 1)
    ring_full = make_barriers(4, 1)
    ring_empty = make_barriers(4, 1)
    delta_full = make_barriers(1, 2)
    half_full = make_barriers(2, 1)
    tiles_read = make_barriers(1, 2)
    gradient_full = make_barriers(OWN_SLOTS, 2)
    bias_full = make_barriers(1, 1)
    memory = WidePairsMemory(
        own_tiles, half, ring, lines, key_terms, bias, own_full, own_empty, lines_full, ring_full, ring_empty,
        delta_full, half_full, tiles_read, gradient_full, bias_full,
    )
    fence_async_shared()
    thread_barrier()
    gl.warp_specialize(
        [
            (compute, (memory, matrices, arrays, p_delta, p_bias_gradient, ROUNDS, 0, FUNCTIONS, SHAPE)),
            (compute, (memory, matrices, arrays, p_delta, p_bias_gradient, ROUNDS, 1, FUNCTIONS, SHAPE)),
            (load, (memory, matrices, ROUNDS, FUNCTIONS, SHAPE)),
            (gather, (memory, matrices, arrays, p_log_sum, ROUNDS, FUNCTIONS, SHAPE)),
        ],
        [4, 1, 1],
        [240, FEW_REGISTERS, FEW_REGISTERS],
    )
