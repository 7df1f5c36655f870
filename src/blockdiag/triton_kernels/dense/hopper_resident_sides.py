"""Template in Gluon of the Hopper backward kernels that keep a pair bias in shared memory.

There are two such kernels, which differ in their own axis. The kernel of rows computes gradients of queries, that of
columns those of keys and values. In each round, a program has 128 queries or keys, its own tiles, and visits the other
axis in chunks of 64. Rounds are the batch indices along which the bias is the same, so the bias is loaded once.

Own tiles and chunks have two arrays each. The product of the first arrays gives scores. The product of the second ones
gives slopes, the gradients of the weights.

| kernel | own tiles | chunks | score tiles | log-sum-exp and delta belong to |
|---|---|---|---|---|
| rows | queries, cotangents | keys, values | [queries, keys] | own tiles |
| columns | keys, values | queries, cotangents | [keys, queries] | chunks |

Probabilities and their gradients are thus left operands of products in the layout that they have in registers.

| warps | function | work |
|---|---|---|
| 4 + 4 | `compute_ahead` or `compute_chunks` | 64 rows of own tiles each: all products, and the stores of gradients |
| 1 | `load` | load chunks, and own tiles if these have two slots |
| 1 | `load_own` | load own tiles if these have one slot, each group's rows when the group has finished its last ones |

The code depends on the slots of own tiles:

- With two, `compute_ahead` starts the first scores of the next round before it writes the results of this one, and the
  loop over chunks is unrolled. The results are staged in the slot of the own tiles.
- With one, `compute_chunks` loops over the chunks, because unrolling takes long to compile. The results are staged in a
  buffer of their own.

The caller passes `FUNCTIONS`, generated for a region. `r_own` and `r_other` are the positions of rows of own tiles and
of chunks; "own" terms are the same for all chunks.

| function | returns |
|---|---|
| own_place(cell) | the batch indices of the bias, from a flat index |
| place(own, other) | all batch indices; `other` is a flat index of the rounds |
| own_scores_at, ... (place, first, offset) | the row and the column of a tile that starts at `first + offset` |
| bias_at(place) | the row and the column of the bias's first element |
| line_at(pointer, place) | a pointer to the first element of a line in an array [batch.., queries] |
| own_numbers(arrays, place, r_own) | the numbers of own terms, in the dtypes of their arrays |
| own_terms(numbers, r_own) | own terms, float32 [64, 1] or scalars, from what `own_numbers` returns |
| chunk_numbers(arrays, place, r_other) | the numbers of a chunk's terms, in the dtypes of their arrays |
| chunk_terms(numbers, r_other) | a chunk's terms, float32 [1, 64], from what `chunk_numbers` returns |
| start(own_terms, chunk_terms, bias) | what the products of scores are added to, float32 [64, 64]; so is `bias` |
| store_sums(gradients, place, r_own, sums) | nothing; stores gradients of own terms, multiples of the sums of slopes |

Without terms, the tuples hold a 0, because a tuple must not be empty.
"""

# Tuples of tensors are extended by addition, because Gluon has no unpacking.
# ruff: noqa: RUF005
# Device code is laid out by hand: one argument per line would hide what a kernel does.
# fmt: off

from dataclasses import dataclass
from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from blockdiag.triton_kernels.launch.gluon_names import load_async, reinterpret, thread_barrier, tma_load, tma_store
from blockdiag.triton_kernels.parts.hopper_tiles import finished, make_barriers
from blockdiag.triton_kernels.parts.resident_tiles import forgotten, free_slot, make_ones, share_of, widened

# Queries or keys per program, those of a warp group, and those of a chunk.
OWN = gl.constexpr(128)
HALF = gl.constexpr(64)
CHUNK = gl.constexpr(64)
LOG2_E = gl.constexpr(1.4426950408889634)
# The fewest registers per thread that hardware allows, so that each computing thread gets 240.
FEW_REGISTERS = gl.constexpr(24)
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16]))
# The layout of vectors that a loading warp handles.
LINE = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))


@dataclass(frozen=True)
class SidesFunctions:
    """Generated device functions; the module's docstring describes them."""

    own_place: Any
    place: Any
    own_scores_at: Any
    own_slopes_at: Any
    chunk_scores_at: Any
    chunk_slopes_at: Any
    first_gradient_at: Any
    second_gradient_at: Any
    bias_at: Any
    line_at: Any
    own_numbers: Any
    own_terms: Any
    chunk_numbers: Any
    chunk_terms: Any
    start: Any
    store_sums: Any


@dataclass(frozen=True)
class SidesShape:
    """Static properties of a launch.

    Attributes:
        is_columns: whether own tiles are of keys and values.
        tiles: own tiles per line.
        rounds: the rounds of each own tile, over all programs that share them.
        chunks: chunks per line.
        width: the head dimension.
        own_slots: slots of own tiles, 1 or 2.
        slots: slots of chunks.
        lead: how many chunks ahead log-sum-exps and deltas of columns are loaded.
        has_terms: whether own terms have gradients.
        factor: the factor of scores that `start` and the products leave out.
        unit: `factor` times log2(e), which converts scores to exponents of 2.
    """

    is_columns: bool
    tiles: int
    rounds: int
    chunks: int
    width: int
    own_slots: int
    slots: int
    lead: int
    has_terms: bool
    factor: float
    unit: float

    @property
    def is_ahead(self) -> bool:
        """Whether a round starts its first scores before the round before has written its results."""
        return self.own_slots > 1


class SidesMatrices(NamedTuple):
    """Descriptors of the arrays that the copy engine moves; `gradients` is a tuple of one or two."""

    own_scores: Any
    own_slopes: Any
    chunk_scores: Any
    chunk_slopes: Any
    bias: Any
    gradients: Any


class SidesMemory(NamedTuple):
    """Shared memory and barriers of a program.

    Attributes:
        own_scores, own_slopes: own tiles, [slots, 128, width].
        chunk_scores, chunk_slopes: chunks, [slots, 64, width].
        lines: log_sum times log2(e) and -delta, in turn, of each slot of own tiles, or of chunks.
        incoming: log-sum-exps and deltas of columns as they arrive, with `lead` slots.
        ones: a matrix of ones, [8, 64], if terms have gradients.
        bias: the bias of the own tiles, in pieces of 64 columns.
        staging: a tile of gradients for each group, [2, 64, width], if own tiles have one slot.
        own_full, own_empty: one barrier for each slot of own tiles. With one slot, each group has its own barrier, so
            that one group's tiles load while the other group computes.
    """

    own_scores: Any
    own_slopes: Any
    chunk_scores: Any
    chunk_slopes: Any
    lines: Any
    incoming: Any
    ones: Any
    bias: Any
    staging: Any
    own_full: Any
    own_empty: Any
    chunk_full: Any
    chunk_empty: Any
    bias_full: Any


@gluon.jit
def own_barrier(slot, GROUP: gl.constexpr, SHAPE: gl.constexpr):
    """Return the index of a group's barrier for its own tiles."""
    if SHAPE.is_ahead:
        return slot
    else:
        return slot * 2 + GROUP


@gluon.jit
def tile_of(ring, slot, SHAPE: gl.constexpr):
    """Return the tile in a slot.

    Wide gradients leave no registers for loop invariants. `forgotten` then makes the compiler recompute addresses.
    """
    if SHAPE.is_ahead:
        return ring.index(slot)
    else:
        return ring.index(forgotten(slot))


@gluon.jit
def own_tile(ring, slot, GROUP: gl.constexpr, SHAPE: gl.constexpr):
    """Return a group's rows of an own tile."""
    return tile_of(ring, slot, SHAPE).slice(GROUP * HALF, HALF)


@gluon.jit
def wait_own(memory, round, GROUP: gl.constexpr, SHAPE: gl.constexpr):
    """Wait for the own tiles of a round, and return their slot."""
    slot = round % SHAPE.own_slots
    mbarrier.wait(memory.own_full.index(own_barrier(slot, GROUP, SHAPE)), round // SHAPE.own_slots % 2)
    return slot


@gluon.jit
def own_lines(memory, slot, GROUP: gl.constexpr):
    """Return log_sum times log2(e) and -delta of a group's queries, [64, 1], in the kernel of rows."""
    ALONG: gl.constexpr = gl.SliceLayout(1, SCORES)
    b_base = gl.expand_dims(memory.lines.index(slot * 2).slice(GROUP * HALF, HALF).load(ALONG), 1)
    b_delta = gl.expand_dims(memory.lines.index(slot * 2 + 1).slice(GROUP * HALF, HALF).load(ALONG), 1)
    return b_base, b_delta


@gluon.jit
def chunk_lines(memory, slot):
    """Return log_sum times log2(e) and -delta of a chunk's queries, [1, 64], in the kernel of columns."""
    ALONG: gl.constexpr = gl.SliceLayout(0, SCORES)
    b_base = gl.expand_dims(memory.lines.index(slot * 2).load(ALONG), 0)
    b_delta = gl.expand_dims(memory.lines.index(slot * 2 + 1).load(ALONG), 0)
    return b_base, b_delta


@gluon.jit
def positions(part):
    """Return the positions of a chunk's rows."""
    return part * CHUNK + gl.arange(0, CHUNK, gl.SliceLayout(0, SCORES))


@gluon.jit
def read_chunk_terms(arrays, place, part, FUNCTIONS: gl.constexpr):
    """Load the terms of a chunk."""
    r_other = positions(part)
    return FUNCTIONS.chunk_terms(FUNCTIONS.chunk_numbers(arrays, place, r_other), r_other)


@gluon.jit
def bias_piece(memory, part, GROUP: gl.constexpr, SHAPE: gl.constexpr):
    """Return the bias of a group's rows and a chunk, as a score tile."""
    if not SHAPE.is_columns:
        return memory.bias.index(part).slice(GROUP * HALF, HALF)
    elif SHAPE.is_ahead:
        return memory.bias.index(GROUP).slice(part * CHUNK, CHUNK).permute((1, 0))
    else:
        # The chunk is not known when this is compiled, as `slice` requires.
        pieces = reinterpret(memory.bias, memory.bias.dtype, [2 * SHAPE.chunks, CHUNK, HALF], memory.bias.layout)
        return pieces.index(GROUP * SHAPE.chunks + part).permute((1, 0))


@gluon.jit
def start_of_scores(memory, part, own_terms, chunk_terms, GROUP: gl.constexpr, FUNCTIONS: gl.constexpr,
                    SHAPE: gl.constexpr):
    """Return the sums of bias and terms, which the products of scores are added to."""
    b_bias = widened(bias_piece(memory, part, GROUP, SHAPE).load(SCORES))
    return FUNCTIONS.start(own_terms, chunk_terms, b_bias)


@gluon.jit
def tiles_of(memory, number, SHAPE: gl.constexpr):
    """Return the slot of chunk `number` of the program, and its two tiles."""
    slot = number % SHAPE.slots
    return slot, tile_of(memory.chunk_scores, slot, SHAPE), tile_of(memory.chunk_slopes, slot, SHAPE)


@gluon.jit
def wait_chunk(memory, number, SHAPE: gl.constexpr):
    """Wait for chunk `number` of the program; return its slot and its two tiles."""
    slot, scores_chunk, slopes_chunk = tiles_of(memory, number, SHAPE)
    mbarrier.wait(memory.chunk_full.index(slot), number // SHAPE.slots % 2)
    return slot, scores_chunk, slopes_chunk


@gluon.jit
def start_of_slopes(b_delta):
    """Return -delta as a score tile, which the products of slopes are added to."""
    b_start, _b_zero = gl.broadcast(b_delta, gl.zeros([HALF, CHUNK], gl.float32, SCORES))
    return b_start


@gluon.jit
def begin_product(own, chunk, b_start):
    """Start the product of an own tile and a chunk, which gives scores or slopes."""
    return warpgroup_mma(own, chunk.permute((1, 0)), b_start, is_async=True)


@gluon.jit
def zero_sums(SHAPE: gl.constexpr):
    """Return the sums of a round: gradients of both own tiles, only of the first one for rows, and sums of slopes."""
    WIDTH: gl.constexpr = SHAPE.width
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    b_sums = (gl.zeros([HALF, WIDTH], gl.float32, WIDE),)
    if SHAPE.is_columns:
        b_sums = b_sums + (gl.zeros([HALF, WIDTH], gl.float32, WIDE),)
    if SHAPE.has_terms:
        b_sums = b_sums + (gl.zeros([HALF, 8], gl.float32, SUMS),)
    return b_sums


@gluon.jit
def add_products(memory, scores_chunk, slopes_chunk, b_scores, b_slopes, b_base, b_sums, part,
                 USE_SUMS: gl.constexpr, GROUP: gl.constexpr, SHAPE: gl.constexpr):
    """Compute the probabilities and slopes of a chunk, and start the products that give its part of the gradients.

    Args:
        b_scores: the finished scores.
        b_slopes: the product of the slopes, which is in flight.
        part: the number of the chunk in its round.
        USE_SUMS: whether to add to `b_sums`.
    """
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SHAPE.width, 16])
    FACTOR: gl.constexpr = gl.DotOperandLayout(0, WIDE, 2)
    # For columns, the product of the values' gradients has started after that of the slopes.
    PENDING: gl.constexpr = 1 if SHAPE.is_columns else 0
    dtype: gl.constexpr = memory.own_scores.dtype
    b_power = gl.exp2(b_scores * SHAPE.unit - b_base)
    if SHAPE.is_columns:
        b_factor = gl.convert_layout(b_power.to(dtype), FACTOR)
        b_second = warpgroup_mma(b_factor, slopes_chunk, b_sums[1], use_acc=USE_SUMS, is_async=True)
    b_slopes = warpgroup_mma_wait(PENDING, deps=[b_slopes])
    if not SHAPE.is_ahead:
        # No more products read the own tiles.
        thread_barrier()
        mbarrier.arrive(memory.own_empty.index(GROUP), count=1, pred=part == SHAPE.chunks - 1)
    b_slopes = (b_slopes * b_power).to(dtype)
    b_first = warpgroup_mma(gl.convert_layout(b_slopes, FACTOR), scores_chunk, b_sums[0], use_acc=USE_SUMS,
                            is_async=True)
    b_added = (b_first,)
    if SHAPE.is_columns:
        b_added = b_added + (b_second,)
    if SHAPE.has_terms:
        b_factor = gl.convert_layout(b_slopes, gl.DotOperandLayout(0, SUMS, 2))
        b_added = b_added + (warpgroup_mma(b_factor, memory.ones.permute((1, 0)), b_sums[len(b_sums) - 1],
                                           use_acc=USE_SUMS, is_async=True),)
    return b_added


@gluon.jit
def store_gradient(matrices, memory, place, own, WHICH: gl.constexpr, GROUP: gl.constexpr, FUNCTIONS: gl.constexpr):
    """Start copying a group's staged gradient of own tile WHICH to its array."""
    if WHICH == 0:
        row, column = FUNCTIONS.first_gradient_at(place, own * OWN, GROUP * HALF)
    else:
        row, column = FUNCTIONS.second_gradient_at(place, own * OWN, GROUP * HALF)
    tma_store(matrices.gradients[WHICH], [row, column], memory)


@gluon.jit
def store_term_sums(gradients, place, r_own, b_sums, FUNCTIONS: gl.constexpr, SHAPE: gl.constexpr):
    """Store the gradients of own terms, if there are any."""
    if SHAPE.has_terms:
        # The columns of a product with ones are equal, so the maximum selects any of them.
        b_sum = gl.convert_layout(gl.max(b_sums[len(b_sums) - 1], 1), gl.SliceLayout(1, SCORES))
        FUNCTIONS.store_sums(gradients, place, r_own, b_sum)


@gluon.jit
def compute_ahead(memory, matrices, arrays, gradients, ROUNDS: gl.constexpr, GROUP: gl.constexpr,
                  FUNCTIONS: gl.constexpr, SHAPE: gl.constexpr):
    """Compute the gradients of 64 rows of each round's own tiles, which have two slots."""
    own, first, count, own_place = share_of(ROUNDS, FUNCTIONS, SHAPE)
    r_own = own * OWN + GROUP * HALF + gl.arange(0, HALF, gl.SliceLayout(1, SCORES))
    mbarrier.wait(memory.bias_full.index(0), 0)
    scores_own = own_tile(memory.own_scores, wait_own(memory, 0, GROUP, SHAPE), GROUP, SHAPE)
    place = FUNCTIONS.place(own_place, first)
    own_numbers = FUNCTIONS.own_numbers(arrays, place, r_own)
    r_other = positions(0)
    chunk_numbers = FUNCTIONS.chunk_numbers(arrays, place, r_other)
    chunk_terms = FUNCTIONS.chunk_terms(chunk_numbers, r_other)
    own_terms = FUNCTIONS.own_terms(own_numbers, r_own)
    b_start = start_of_scores(memory, 0, own_terms, chunk_terms, GROUP, FUNCTIONS, SHAPE)
    _slot, scores_chunk, _slopes_chunk = wait_chunk(memory, 0, SHAPE)
    b_scores = begin_product(scores_own, scores_chunk, b_start)
    b_scores = warpgroup_mma_wait(0, deps=[b_scores])
    for round in range(count):
        b_scores, own_terms = round_ahead(memory, matrices, arrays, gradients, own, first, count, own_place, r_own,
                                          round, b_scores, own_terms, GROUP, FUNCTIONS, SHAPE)
    tma.store_wait(0)


@gluon.jit
def round_ahead(memory, matrices, arrays, gradients, own, first, count, own_place, r_own, round, b_scores, own_terms,
                GROUP: gl.constexpr, FUNCTIONS: gl.constexpr, SHAPE: gl.constexpr):
    """Compute one round, whose first scores are given; return the first scores and the own terms of the next one."""
    CHUNKS: gl.constexpr = SHAPE.chunks
    SLOTS: gl.constexpr = SHAPE.slots
    dtype: gl.constexpr = memory.own_scores.dtype
    later = FUNCTIONS.place(own_place, first + gl.minimum(round + 1, count - 1))
    own_numbers = FUNCTIONS.own_numbers(arrays, later, r_own)
    r_other = positions(0)
    chunk_numbers = FUNCTIONS.chunk_numbers(arrays, later, r_other)
    place = FUNCTIONS.place(own_place, first + round)
    # Loaded long before they are needed, because there are registers.
    chunk_terms = ()
    for part in gl.static_range(1, CHUNKS):
        chunk_terms = chunk_terms + (read_chunk_terms(arrays, place, part, FUNCTIONS),)
    own_slot = wait_own(memory, round, GROUP, SHAPE)
    scores_own = own_tile(memory.own_scores, own_slot, GROUP, SHAPE)
    slopes_own = own_tile(memory.own_slopes, own_slot, GROUP, SHAPE)
    if not SHAPE.is_columns:
        b_base, b_delta = own_lines(memory, own_slot, GROUP)
    b_sums = zero_sums(SHAPE)
    for part in gl.static_range(CHUNKS):
        if part == 0:
            slot, scores_chunk, slopes_chunk = tiles_of(memory, round * CHUNKS, SHAPE)
        else:
            b_start = start_of_scores(memory, part, own_terms, chunk_terms[part - 1], GROUP, FUNCTIONS, SHAPE)
            slot, scores_chunk, slopes_chunk = wait_chunk(memory, round * CHUNKS + part, SHAPE)
            b_scores = begin_product(scores_own, scores_chunk, b_start)
        if SHAPE.is_columns:
            b_base, b_delta = chunk_lines(memory, slot)
        b_slopes = begin_product(slopes_own, slopes_chunk, start_of_slopes(b_delta))
        if part == 0:
            # The last round's gradients have been stored by now.
            tma.store_wait(0)
            thread_barrier()
            free_slot(memory.own_empty, round + (SHAPE.own_slots - 1), SHAPE.own_slots, round > 0)
        else:
            b_scores = warpgroup_mma_wait(1, deps=[b_scores])
            # The last chunk's products are done, too.
            thread_barrier()
            free_slot(memory.chunk_empty, round * CHUNKS + part + (SLOTS - 1), SLOTS)
        b_sums = add_products(memory, scores_chunk, slopes_chunk, b_scores, b_slopes, b_base, b_sums, part, part > 0,
                              GROUP, SHAPE)
    scores_next = own_tile(memory.own_scores, wait_own(memory, round + 1, GROUP, SHAPE), GROUP, SHAPE)
    first_terms = FUNCTIONS.chunk_terms(chunk_numbers, r_other)
    own_terms = FUNCTIONS.own_terms(own_numbers, r_own)
    b_start = start_of_scores(memory, 0, own_terms, first_terms, GROUP, FUNCTIONS, SHAPE)
    _slot, scores_chunk, _slopes_chunk = wait_chunk(memory, (round + 1) * CHUNKS, SHAPE)
    b_scores = begin_product(scores_next, scores_chunk, b_start)
    b_sums = finished(1, b_sums)
    thread_barrier()
    free_slot(memory.chunk_empty, round * CHUNKS + (CHUNKS - 1), SLOTS)
    # Gradients are staged in this group's own rows, which are no longer read.
    scores_own.store((b_sums[0] * SHAPE.factor).to(dtype))
    if SHAPE.is_columns:
        slopes_own.store(b_sums[1].to(dtype))
    fence_async_shared()
    thread_barrier()
    store_gradient(matrices, scores_own, place, own, 0, GROUP, FUNCTIONS)
    if SHAPE.is_columns:
        store_gradient(matrices, slopes_own, place, own, 1, GROUP, FUNCTIONS)
    store_term_sums(gradients, place, r_own, b_sums, FUNCTIONS, SHAPE)
    # The compiler does not support a product in flight across loop iterations.
    b_scores = warpgroup_mma_wait(0, deps=[b_scores])
    return b_scores, own_terms


@gluon.jit
def compute_chunks(memory, matrices, arrays, gradients, ROUNDS: gl.constexpr, GROUP: gl.constexpr,
                   FUNCTIONS: gl.constexpr, SHAPE: gl.constexpr):
    """Compute the gradients of 64 rows of each round's own tiles, which have one slot."""
    dtype: gl.constexpr = memory.own_scores.dtype
    own, first, count, own_place = share_of(ROUNDS, FUNCTIONS, SHAPE)
    r_own = own * OWN + GROUP * HALF + gl.arange(0, HALF, gl.SliceLayout(1, SCORES))
    mbarrier.wait(memory.bias_full.index(0), 0)
    numbers = FUNCTIONS.own_numbers(arrays, FUNCTIONS.place(own_place, first), r_own)
    for round in range(count):
        own_terms = FUNCTIONS.own_terms(numbers, r_own)
        place = FUNCTIONS.place(own_place, first + round)
        own_slot = wait_own(memory, round, GROUP, SHAPE)
        if not SHAPE.is_columns:
            b_base, b_delta = own_lines(memory, own_slot, GROUP)
        b_sums = zero_sums(SHAPE)
        for part in range(SHAPE.chunks):
            chunk_terms = read_chunk_terms(arrays, place, part, FUNCTIONS)
            b_start = start_of_scores(memory, part, own_terms, chunk_terms, GROUP, FUNCTIONS, SHAPE)
            number = round * SHAPE.chunks + part
            slot, scores_chunk, slopes_chunk = wait_chunk(memory, number, SHAPE)
            b_scores = begin_product(own_tile(memory.own_scores, own_slot, GROUP, SHAPE), scores_chunk, b_start)
            if SHAPE.is_columns:
                b_base, b_delta = chunk_lines(memory, slot)
            b_start = start_of_slopes(b_delta)
            b_slopes = begin_product(own_tile(memory.own_slopes, own_slot, GROUP, SHAPE), slopes_chunk, b_start)
            b_scores = warpgroup_mma_wait(1, deps=[b_scores])
            b_sums = add_products(memory, scores_chunk, slopes_chunk, b_scores, b_slopes, b_base, b_sums, part,
                                  True, GROUP, SHAPE)
            b_sums = finished(0, b_sums)
            thread_barrier()
            free_slot(memory.chunk_empty, number, SHAPE.slots)
        # Only now are there registers for these loads. Writing the gradients takes long enough to hide them.
        later = FUNCTIONS.place(own_place, first + gl.minimum(round + 1, count - 1))
        numbers = FUNCTIONS.own_numbers(arrays, later, r_own)
        # Computed again, so that the indices need not be kept in registers during the loop.
        place = FUNCTIONS.place(own_place, first + round)
        for which in gl.static_range(2 if SHAPE.is_columns else 1):
            # The buffer is free once its last store is done.
            tma.store_wait(0)
            thread_barrier()
            staging = memory.staging.index(GROUP)
            b_sum = b_sums[which]
            if which == 0:
                b_sum = b_sum * SHAPE.factor
            staging.store(b_sum.to(dtype))
            fence_async_shared()
            thread_barrier()
            store_gradient(matrices, staging, place, own, which, GROUP, FUNCTIONS)
        store_term_sums(gradients, place, r_own, b_sums, FUNCTIONS, SHAPE)
    tma.store_wait(0)


@gluon.jit
def load_bias(memory, matrices, own, own_place, first, FUNCTIONS: gl.constexpr, SHAPE: gl.constexpr):
    """Load the bias of the own tiles, which stays in shared memory."""
    place = FUNCTIONS.place(own_place, first)
    PIECES: gl.constexpr = memory.bias.shape[0]
    mbarrier.expect(memory.bias_full.index(0), OWN * CHUNK * SHAPE.chunks * 2)
    row, column = FUNCTIONS.bias_at(place)
    for piece in gl.static_range(PIECES):
        if SHAPE.is_columns:
            at = [row, column + (own * OWN + piece * HALF)]
        else:
            at = [row + own * OWN, column + piece * CHUNK]
        tma_load(matrices.bias, at, memory.bias_full.index(0), memory.bias.index(piece))


@gluon.jit
def load_lines(p_log_sum, p_delta, place, own, FUNCTIONS: gl.constexpr):
    """Load the log-sum-exps and deltas of the own queries, in the kernel of rows."""
    o_query = own * OWN + gl.arange(0, OWN, LINE)
    b_log_sum = gl.load(FUNCTIONS.line_at(p_log_sum, place) + o_query)
    b_delta = gl.load(FUNCTIONS.line_at(p_delta, place) + o_query)
    return b_log_sum, b_delta


@gluon.jit
def copy_lines(memory, p_log_sum, p_delta, own_place, first, step, slot, FUNCTIONS: gl.constexpr, SHAPE: gl.constexpr):
    """Start copying the log-sum-exps and deltas of chunk `step` of the program, in the kernel of columns."""
    place = FUNCTIONS.place(own_place, first + step // SHAPE.chunks)
    o_query = step % SHAPE.chunks * CHUNK + gl.arange(0, CHUNK, LINE)
    load_async(memory.incoming.index(slot * 2), FUNCTIONS.line_at(p_log_sum, place) + o_query)
    load_async(memory.incoming.index(slot * 2 + 1), FUNCTIONS.line_at(p_delta, place) + o_query)
    async_copy.commit_group()


@gluon.jit
def store_lines(memory, slot, b_log_sum, b_delta):
    """Write log-sum-exps and deltas to a slot of `memory.lines`."""
    memory.lines.index(slot * 2).store(gl.where(b_log_sum == float("-inf"), 0.0, b_log_sum * LOG2_E))
    # The slopes start from -delta.
    memory.lines.index(slot * 2 + 1).store(0.0 - b_delta)
    thread_barrier()


@gluon.jit
def load_own_rows(memory, matrices, place, own, round, GROUP: gl.constexpr, ROWS: gl.constexpr,
                  FUNCTIONS: gl.constexpr, SHAPE: gl.constexpr):
    """Load the own tiles of a round, or one group's rows of them, once the slot is free. Return the slot."""
    slot = round % SHAPE.own_slots
    at = own_barrier(slot, GROUP, SHAPE)
    mbarrier.wait(memory.own_empty.index(at), round // SHAPE.own_slots % 2 ^ 1)
    full = memory.own_full.index(at)
    mbarrier.expect(full, 2 * ROWS * SHAPE.width * 2)
    FIRST: gl.constexpr = GROUP * ROWS
    row, column = FUNCTIONS.own_scores_at(place, own * OWN, FIRST)
    tma_load(matrices.own_scores, [row, column], full, memory.own_scores.index(slot).slice(FIRST, ROWS))
    row, column = FUNCTIONS.own_slopes_at(place, own * OWN, FIRST)
    tma_load(matrices.own_slopes, [row, column], full, memory.own_slopes.index(slot).slice(FIRST, ROWS))
    return slot


@gluon.jit
def load(memory, matrices, p_log_sum, p_delta, ROUNDS: gl.constexpr, FUNCTIONS: gl.constexpr, SHAPE: gl.constexpr):
    """Fill the slots of chunks for all rounds, and those of own tiles if there are two."""
    CHUNKS: gl.constexpr = SHAPE.chunks
    SLOTS: gl.constexpr = SHAPE.slots
    LEAD: gl.constexpr = SHAPE.lead
    own, first, count, own_place = share_of(ROUNDS, FUNCTIONS, SHAPE)
    if SHAPE.is_ahead:
        load_bias(memory, matrices, own, own_place, first, FUNCTIONS, SHAPE)
        if not SHAPE.is_columns:
            b_log_sum, b_delta = load_lines(p_log_sum, p_delta, FUNCTIONS.place(own_place, first), own, FUNCTIONS)
    if SHAPE.is_columns:
        for step in gl.static_range(LEAD):
            copy_lines(memory, p_log_sum, p_delta, own_place, first, gl.minimum(step, count * CHUNKS - 1), step,
                       FUNCTIONS, SHAPE)
    for step in range(count * CHUNKS):
        round = step // CHUNKS
        place = FUNCTIONS.place(own_place, first + round)
        if SHAPE.is_ahead:
            if step % CHUNKS == 0:
                own_slot = load_own_rows(memory, matrices, place, own, round, 0, OWN, FUNCTIONS, SHAPE)
                if not SHAPE.is_columns:
                    store_lines(memory, own_slot, b_log_sum, b_delta)
                    mbarrier.arrive(memory.own_full.index(own_slot), count=1)
                    later = FUNCTIONS.place(own_place, first + gl.minimum(round + 1, count - 1))
                    b_log_sum, b_delta = load_lines(p_log_sum, p_delta, later, own, FUNCTIONS)
        slot = step % SLOTS
        mbarrier.wait(memory.chunk_empty.index(slot), step // SLOTS % 2 ^ 1)
        full = memory.chunk_full.index(slot)
        mbarrier.expect(full, 2 * CHUNK * SHAPE.width * 2)
        row, column = FUNCTIONS.chunk_scores_at(place, step % CHUNKS * CHUNK, 0)
        tma_load(matrices.chunk_scores, [row, column], full, memory.chunk_scores.index(slot))
        row, column = FUNCTIONS.chunk_slopes_at(place, step % CHUNKS * CHUNK, 0)
        tma_load(matrices.chunk_slopes, [row, column], full, memory.chunk_slopes.index(slot))
        if SHAPE.is_columns:
            async_copy.wait_group(LEAD - 1)
            thread_barrier()
            b_chunk_log_sum = memory.incoming.index(step % LEAD * 2).load(LINE)
            b_chunk_delta = memory.incoming.index(step % LEAD * 2 + 1).load(LINE)
            store_lines(memory, slot, b_chunk_log_sum, b_chunk_delta)
            mbarrier.arrive(full, count=1)
            copy_lines(memory, p_log_sum, p_delta, own_place, first, gl.minimum(step + LEAD, count * CHUNKS - 1),
                       step % LEAD, FUNCTIONS, SHAPE)
    if SHAPE.is_ahead:
        # The scores of one more round start on arbitrary data, and are not used.
        own_slot = count % SHAPE.own_slots
        mbarrier.wait(memory.own_empty.index(own_slot), count // SHAPE.own_slots % 2 ^ 1)
        mbarrier.arrive(memory.own_full.index(own_slot), count=1 if SHAPE.is_columns else 2)
        slot = count * CHUNKS % SLOTS
        mbarrier.wait(memory.chunk_empty.index(slot), count * CHUNKS // SLOTS % 2 ^ 1)
        mbarrier.arrive(memory.chunk_full.index(slot), count=2 if SHAPE.is_columns else 1)


@gluon.jit
def load_own(memory, matrices, p_log_sum, p_delta, ROUNDS: gl.constexpr, FUNCTIONS: gl.constexpr,
             SHAPE: gl.constexpr):
    """Fill the slot of own tiles for all rounds, each group's rows when the group has finished its last ones."""
    own, first, count, own_place = share_of(ROUNDS, FUNCTIONS, SHAPE)
    load_bias(memory, matrices, own, own_place, first, FUNCTIONS, SHAPE)
    if not SHAPE.is_columns:
        b_log_sum, b_delta = load_lines(p_log_sum, p_delta, FUNCTIONS.place(own_place, first), own, FUNCTIONS)
    for round in range(count):
        place = FUNCTIONS.place(own_place, first + round)
        slot = load_own_rows(memory, matrices, place, own, round, 0, HALF, FUNCTIONS, SHAPE)
        load_own_rows(memory, matrices, place, own, round, 1, HALF, FUNCTIONS, SHAPE)
        if not SHAPE.is_columns:
            store_lines(memory, slot, b_log_sum, b_delta)
            mbarrier.arrive(memory.own_full.index(own_barrier(slot, 0, SHAPE)), count=1)
            mbarrier.arrive(memory.own_full.index(own_barrier(slot, 1, SHAPE)), count=1)
            later = FUNCTIONS.place(own_place, first + gl.minimum(round + 1, count - 1))
            b_log_sum, b_delta = load_lines(p_log_sum, p_delta, later, own, FUNCTIONS)


@gluon.jit
def resident_sides(matrices, arrays, p_log_sum, p_delta, gradients, ROUNDS: gl.constexpr, FUNCTIONS: gl.constexpr,
                   SHAPE: gl.constexpr):
    """Compute the gradients of one own tile in ROUNDS of its rounds.

    `arrays` and `gradients` are pointers to the arrays that the generated functions read, and to those that they write.
    """
    WIDTH: gl.constexpr = SHAPE.width
    OWN_SLOTS: gl.constexpr = SHAPE.own_slots
    SLOTS: gl.constexpr = SHAPE.slots
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    dtype: gl.constexpr = matrices.own_scores.dtype
    own_scores = gl.allocate_shared_memory(dtype, [OWN_SLOTS, OWN, WIDTH], matrices.own_scores.layout)
    own_slopes = gl.allocate_shared_memory(dtype, [OWN_SLOTS, OWN, WIDTH], matrices.own_slopes.layout)
    chunk_scores = gl.allocate_shared_memory(dtype, [SLOTS, CHUNK, WIDTH], matrices.chunk_scores.layout)
    chunk_slopes = gl.allocate_shared_memory(dtype, [SLOTS, CHUNK, WIDTH], matrices.chunk_slopes.layout)
    if SHAPE.is_columns:
        lines = gl.allocate_shared_memory(gl.float32, [2 * SLOTS, CHUNK], PLAIN)
        incoming = gl.allocate_shared_memory(gl.float32, [2 * SHAPE.lead, CHUNK], PLAIN)
        bias = gl.allocate_shared_memory(matrices.bias.dtype, [2, SHAPE.chunks * CHUNK, HALF], matrices.bias.layout)
    else:
        lines = gl.allocate_shared_memory(gl.float32, [2 * OWN_SLOTS, OWN], PLAIN)
        incoming = lines
        bias = gl.allocate_shared_memory(matrices.bias.dtype, [SHAPE.chunks, OWN, CHUNK], matrices.bias.layout)
    ones = lines
    if SHAPE.has_terms:
        ones = make_ones(dtype, CHUNK)
    # A second arrival stands for the vectors that come with the bytes of the copy engine.
    own_full = make_barriers(2, 1 if SHAPE.is_columns else 2)
    own_empty = make_barriers(2, 2 if SHAPE.is_ahead else 1)
    chunk_full = make_barriers(SLOTS, 2 if SHAPE.is_columns else 1)
    chunk_empty = make_barriers(SLOTS, 2)
    bias_full = make_barriers(1, 1)
    staging = own_scores
    if not SHAPE.is_ahead:
        staging = gl.allocate_shared_memory(dtype, [2, HALF, WIDTH], matrices.gradients[0].layout)
    memory = SidesMemory(
        own_scores, own_slopes, chunk_scores, chunk_slopes, lines, incoming, ones, bias, staging, own_full, own_empty,
        chunk_full, chunk_empty, bias_full,
    )
    fence_async_shared()
    thread_barrier()
    if SHAPE.is_ahead:
        gl.warp_specialize(
            [
                (compute_ahead, (memory, matrices, arrays, gradients, ROUNDS, 0, FUNCTIONS, SHAPE)),
                (compute_ahead, (memory, matrices, arrays, gradients, ROUNDS, 1, FUNCTIONS, SHAPE)),
                (load, (memory, matrices, p_log_sum, p_delta, ROUNDS, FUNCTIONS, SHAPE)),
            ],
            [4, 1],
            [240, FEW_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (compute_chunks, (memory, matrices, arrays, gradients, ROUNDS, 0, FUNCTIONS, SHAPE)),
                (compute_chunks, (memory, matrices, arrays, gradients, ROUNDS, 1, FUNCTIONS, SHAPE)),
                (load, (memory, matrices, p_log_sum, p_delta, ROUNDS, FUNCTIONS, SHAPE)),
                (load_own, (memory, matrices, p_log_sum, p_delta, ROUNDS, FUNCTIONS, SHAPE)),
            ],
            [4, 1, 1],
            [240, FEW_REGISTERS, FEW_REGISTERS],
        )
