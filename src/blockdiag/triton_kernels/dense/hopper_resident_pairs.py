"""Template in Gluon of the Hopper backward kernel by rows that also computes the gradient of its resident bias.

It is used if tiles of results and one round's keys and values fit into shared memory; otherwise
`hopper_resident_pairs_wide.py` is. `parts/hopper_pair_gradients.py` describes programs, rounds, and the
functions that the caller generates.

| warps | function | work |
|---|---|---|
| 4 + 4 | `compute` | all products, each group with half of the keys, and the gradient of the bias |
| 1 | `load` | load the bias, and fill slots of query tiles and of chunks of keys and values |
| 2 | `gather` | compute delta from results and cotangents, sum key terms, and store gradients of queries |

A slot of query tiles holds three tiles: queries, cotangents and results. Keys and values come in chunks of 64, and the
chunks of the two groups alternate. Group 1 hands its half of the query gradient to group 0, which adds both halves and
stages the sum in the same memory. With three slots for query tiles, the first scores of a round start before the
previous round ends.
"""

# Tuples of tensors are extended by addition, because Gluon has no unpacking.
# ruff: noqa: RUF005
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
from blockdiag.triton_kernels.parts.resident_tiles import forgotten, free_slot, rounded_product, share_of, widened

# Keys per product.
CHUNK = gl.constexpr(64)
# Columns of results and cotangents that `gather` reads at once, because its warps have few registers.
PIECE = gl.constexpr(8)
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))


@dataclass(frozen=True)
class PairsShape:
    """Static properties of a launch.

    Attributes:
        tiles: tiles of queries per cell.
        rounds: the rounds of each tile, over all programs that share them.
        chunks: chunks of keys per group and round.
        width: the head dimension.
        own_slots: slots of query tiles, 2 or 3.
        slots: slots of chunks. Their number is even, so that each slot belongs to one group. A group that waited only
            for every second filling of a slot could not tell it from the filling before, because barriers only have a
            phase bit.
        has_key_terms: whether scores have terms without queries.
        factor: the factor of scores that `start` and the products leave out.
        unit: `factor` times log2(e), which converts scores to exponents of 2.
        bias_factor: the factor of the bias in the scores.
    """

    tiles: int
    rounds: int
    chunks: int
    width: int
    own_slots: int
    slots: int
    has_key_terms: bool
    factor: float
    unit: float
    bias_factor: float

    @property
    def keys(self) -> int:
        """The number of keys."""
        return 2 * self.chunks * 64

    @property
    def is_ahead(self) -> bool:
        """Whether a round starts its first scores before the previous round ends."""
        return self.own_slots > 2


class PairsMatrices(NamedTuple):
    """Descriptors of the arrays that the copy engine moves; `gradient` is that of the queries."""

    query: Any
    cotangent: Any
    output: Any
    key: Any
    value: Any
    bias: Any
    gradient: Any


class PairsMemory(NamedTuple):
    """Shared memory and barriers of a program.

    Attributes:
        own_tiles: queries and cotangents, in turn, of each slot of query tiles, [2 slots, 64, width].
        outputs: results, [slots, 64, width].
        key_chunks, value_chunks: chunks of keys and values, [slots, 64, width].
        lines: log_sum times log2(e) and delta, in turn, of each slot of query tiles.
        key_terms: sums of key terms, for each slot of query tiles.
        half: one group's half of a query gradient in float32, then the staged gradient.
        bias: the tile of the bias, in pieces of 64 columns.
    """

    own_tiles: Any
    outputs: Any
    key_chunks: Any
    value_chunks: Any
    lines: Any
    key_terms: Any
    half: Any
    bias: Any
    own_full: Any
    own_empty: Any
    lines_full: Any
    chunk_full: Any
    chunk_empty: Any
    half_full: Any
    half_empty: Any
    gradient_full: Any
    bias_full: Any


@gluon.jit
def find_chunk(memory, round, part, GROUP: gl.constexpr, SHAPE: gl.constexpr):
    """Return the position of a group's chunk in the sequence of chunks, in which the groups alternate, and its keys."""
    number = forgotten(round) * (2 * SHAPE.chunks) + 2 * part + GROUP
    return number, memory.key_chunks.index(number % SHAPE.slots)


@gluon.jit
def begin_scores(memory, numbers, round, own_slot, part, GROUP: gl.constexpr, FUNCTIONS: gl.constexpr,
                 SHAPE: gl.constexpr):
    """Start the product that gives the scores of a chunk. Return the chunk's position, its keys and the scores."""
    SLOTS: gl.constexpr = SHAPE.slots
    FIRST: gl.constexpr = (GROUP * SHAPE.chunks + part) * CHUNK
    r_k = FIRST + gl.arange(0, CHUNK, gl.SliceLayout(0, SCORES))
    b_bias = widened(memory.bias.index(forgotten(FIRST // CHUNK)).load(SCORES))
    b_start = FUNCTIONS.start(numbers, r_k, b_bias)
    if SHAPE.has_key_terms:
        terms = memory.key_terms.index(own_slot).slice(FIRST, CHUNK)
        b_start = b_start + gl.expand_dims(terms.load(gl.SliceLayout(0, SCORES)), 0)
    number, keys = find_chunk(memory, round, part, GROUP, SHAPE)
    mbarrier.wait(memory.chunk_full.index(number % SLOTS), number // SLOTS % 2)
    queries = memory.own_tiles.index(forgotten(own_slot) * 2)
    return number, keys, warpgroup_mma(queries, keys.permute((1, 0)), b_start, is_async=True)


@gluon.jit
def begin_slopes(memory, number, own_slot, b_delta, SHAPE: gl.constexpr):
    """Start the product that gives the slopes of a chunk, the gradients of the weights minus delta."""
    values = memory.value_chunks.index(number % SHAPE.slots)
    b_start = gl.zeros([OWN, CHUNK], gl.float32, SCORES) - b_delta
    cotangents = memory.own_tiles.index(forgotten(own_slot) * 2 + 1)
    return warpgroup_mma(cotangents, values.permute((1, 0)), b_start, is_async=True)


@gluon.jit
def begin_round(memory, arrays, place, r_q, round, GROUP: gl.constexpr, FUNCTIONS: gl.constexpr, SHAPE: gl.constexpr):
    """Wait for the tiles and vectors of a round, and start its first scores."""
    numbers = FUNCTIONS.per_query(arrays, place, r_q)
    own_slot = round % SHAPE.own_slots
    mbarrier.wait(memory.own_full.index(own_slot), round // SHAPE.own_slots % 2)
    mbarrier.wait(memory.lines_full.index(own_slot), round // SHAPE.own_slots % 2)
    _number, _keys, b_scores = begin_scores(memory, numbers, round, own_slot, 0, GROUP, FUNCTIONS, SHAPE)
    return b_scores


@gluon.jit
def add_chunks(memory, arrays, place, r_q, round, b_scores, b_bias_sums, GROUP: gl.constexpr, FUNCTIONS: gl.constexpr,
               SHAPE: gl.constexpr):
    """Compute the probabilities and slopes of a round's chunks, and start the products that give its query gradient.

    Args:
        b_scores: the first scores. They are complete if `is_ahead`.
        b_bias_sums: the group's sums for the gradient of the bias, one for each chunk.

    Returns:
        The query gradient, whose last product is in flight, and `b_bias_sums` with this round's slopes.
    """
    CHUNKS: gl.constexpr = SHAPE.chunks
    WIDTH: gl.constexpr = SHAPE.width
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    dtype: gl.constexpr = memory.own_tiles.dtype
    numbers = FUNCTIONS.per_query(arrays, place, r_q)
    own_slot = round % SHAPE.own_slots
    b_base = gl.expand_dims(memory.lines.index(own_slot * 2).load(gl.SliceLayout(1, SCORES)), 1)
    b_delta = gl.expand_dims(memory.lines.index(own_slot * 2 + 1).load(gl.SliceLayout(1, SCORES)), 1)
    b_sum = gl.zeros([OWN, WIDTH], gl.float32, WIDE)
    number, keys = find_chunk(memory, round, 0, GROUP, SHAPE)
    last_number = number
    b_added = ()
    for part in gl.static_range(CHUNKS):
        b_slopes = begin_slopes(memory, number, own_slot, b_delta, SHAPE)
        if part + 1 < CHUNKS:
            following = begin_scores(memory, numbers, round, own_slot, part + 1, GROUP, FUNCTIONS, SHAPE)
        if part > 0 or not SHAPE.is_ahead:
            # The chunk's slopes and the next chunk's scores stay in flight.
            b_scores = warpgroup_mma_wait(2 if part + 1 < CHUNKS else 1, deps=[b_scores])
        if part > 0:
            # The last chunk's products are done, too.
            thread_barrier()
            free_slot(memory.chunk_empty, last_number, SHAPE.slots)
        b_power = gl.exp2(b_scores * SHAPE.unit - b_base)
        b_slopes = warpgroup_mma_wait(1 if part + 1 < CHUNKS else 0, deps=[b_slopes])
        if part == CHUNKS - 1:
            thread_barrier()
            free_slot(memory.own_empty, round, SHAPE.own_slots)
        b_slopes = rounded_product(b_slopes, b_power)
        b_added = b_added + (b_bias_sums[part] + b_slopes,)
        b_factor = gl.convert_layout(b_slopes.to(dtype), gl.DotOperandLayout(0, WIDE, 2))
        b_sum = warpgroup_mma(b_factor, keys, b_sum, use_acc=part > 0, is_async=True)
        last_number = number
        if part + 1 < CHUNKS:
            number, keys, b_scores = following
    return b_sum, b_added


@gluon.jit
def add_halves(memory, matrices, round, b_sum, GROUP: gl.constexpr, SHAPE: gl.constexpr):
    """Add both groups' halves of a round's query gradient, and stage it for its store."""
    CHUNKS: gl.constexpr = SHAPE.chunks
    dtype: gl.constexpr = memory.own_tiles.dtype
    thread_barrier()
    free_slot(memory.chunk_empty, round * (2 * CHUNKS) + 2 * (CHUNKS - 1) + GROUP, SHAPE.slots)
    half = memory.half.index(0)
    if GROUP == 1:
        mbarrier.wait(memory.half_empty.index(0), round % 2 ^ 1)
        half.store(b_sum)
        thread_barrier()
        mbarrier.arrive(memory.half_full.index(0), count=1)
    else:
        mbarrier.wait(memory.half_full.index(0), round % 2)
        b_sum = b_sum + half.load(b_sum.type.layout)
        thread_barrier()
        staged_gradient(memory, matrices, SHAPE).store((b_sum * SHAPE.factor).to(dtype))
        fence_async_shared()
        thread_barrier()
        mbarrier.arrive(memory.gradient_full.index(0), count=1)


@gluon.jit
def staged_gradient(memory, matrices, SHAPE: gl.constexpr):
    """Return the memory in which a query gradient is staged, that of a half."""
    WIDTH: gl.constexpr = SHAPE.width
    return reinterpret(memory.half.index(0), memory.own_tiles.dtype, [2, OWN, WIDTH], matrices.gradient.layout).index(0)


@gluon.jit
def compute(memory, matrices, arrays, p_bias_gradient, ROUNDS: gl.constexpr, GROUP: gl.constexpr,
            FUNCTIONS: gl.constexpr, SHAPE: gl.constexpr):
    """Compute the gradients of half of the keys of each round."""
    CHUNKS: gl.constexpr = SHAPE.chunks
    tile, first, count, own_place = share_of(ROUNDS, FUNCTIONS, SHAPE)
    r_q = tile * OWN + gl.arange(0, OWN, gl.SliceLayout(1, SCORES))
    b_bias_sums = ()
    for _part in gl.static_range(CHUNKS):
        b_bias_sums = b_bias_sums + (gl.zeros([OWN, CHUNK], gl.float32, SCORES),)
    mbarrier.wait(memory.bias_full.index(0), 0)
    if SHAPE.is_ahead:
        b_scores = begin_round(memory, arrays, FUNCTIONS.place(own_place, first), r_q, 0, GROUP, FUNCTIONS, SHAPE)
        b_scores = warpgroup_mma_wait(0, deps=[b_scores])
    for round in range(count):
        place = FUNCTIONS.place(own_place, first + round)
        if not SHAPE.is_ahead:
            b_scores = begin_round(memory, arrays, place, r_q, round, GROUP, FUNCTIONS, SHAPE)
        b_sum, b_bias_sums = add_chunks(memory, arrays, place, r_q, round, b_scores, b_bias_sums, GROUP, FUNCTIONS,
                                        SHAPE)
        if SHAPE.is_ahead:
            later = FUNCTIONS.place(own_place, first + gl.minimum(round + 1, count - 1))
            b_scores = begin_round(memory, arrays, later, r_q, round + 1, GROUP, FUNCTIONS, SHAPE)
            b_sum = warpgroup_mma_wait(1, deps=[b_sum])
        else:
            b_sum = warpgroup_mma_wait(0, deps=[b_sum])
        add_halves(memory, matrices, round, b_sum, GROUP, SHAPE)
        if SHAPE.is_ahead:
            # The compiler does not support a product in flight across loop iterations.
            b_scores = warpgroup_mma_wait(0, deps=[b_scores])
    store_bias_sums(p_bias_gradient, b_bias_sums, GROUP, SHAPE)


@gluon.jit
def load_own(memory, matrices, place, tile, round, FUNCTIONS: gl.constexpr, SHAPE: gl.constexpr):
    """Load the query tiles of a round once their slot is free."""
    slot = round % SHAPE.own_slots
    mbarrier.wait(memory.own_empty.index(slot), round // SHAPE.own_slots % 2 ^ 1)
    full = memory.own_full.index(slot)
    mbarrier.expect(full, 3 * OWN * SHAPE.width * 2)
    row, column = FUNCTIONS.query_at(place, tile)
    tma_load(matrices.query, [row, column], full, memory.own_tiles.index(slot * 2))
    row, column = FUNCTIONS.output_at(place, tile)
    tma_load(matrices.cotangent, [row, column], full, memory.own_tiles.index(slot * 2 + 1))
    tma_load(matrices.output, [row, column], full, memory.outputs.index(slot))


@gluon.jit
def load_chunk(memory, matrices, place, step, FUNCTIONS: gl.constexpr, SHAPE: gl.constexpr):
    """Load chunk `step` of the program once its slot is free."""
    PARTS: gl.constexpr = 2 * SHAPE.chunks
    slot = step % SHAPE.slots
    mbarrier.wait(memory.chunk_empty.index(slot), step // SHAPE.slots % 2 ^ 1)
    first_key = step % PARTS // 2 * CHUNK + step % 2 * (SHAPE.keys // 2)
    full = memory.chunk_full.index(slot)
    mbarrier.expect(full, 2 * CHUNK * SHAPE.width * 2)
    row, column = FUNCTIONS.key_at(place)
    tma_load(matrices.key, [row + first_key, column], full, memory.key_chunks.index(slot))
    row, column = FUNCTIONS.value_at(place)
    tma_load(matrices.value, [row + first_key, column], full, memory.value_chunks.index(slot))


@gluon.jit
def load(memory, matrices, ROUNDS: gl.constexpr, FUNCTIONS: gl.constexpr, SHAPE: gl.constexpr):
    """Load the bias, and fill the slots of query tiles and of chunks for all rounds."""
    CHUNKS: gl.constexpr = SHAPE.chunks
    PARTS: gl.constexpr = 2 * SHAPE.chunks
    SLOTS: gl.constexpr = SHAPE.slots
    tile, first, count, own_place = share_of(ROUNDS, FUNCTIONS, SHAPE)
    place = FUNCTIONS.place(own_place, first)
    load_bias(matrices, memory, place, tile, FUNCTIONS)
    if SHAPE.is_ahead:
        load_own(memory, matrices, place, tile, 0, FUNCTIONS, SHAPE)
    for step in range(count * PARTS):
        round = step // PARTS
        if SHAPE.is_ahead:
            # Query tiles are loaded half a round earlier. The tiles that they replace are done by then.
            if (step % PARTS == CHUNKS) & (round + 1 < count):
                later = FUNCTIONS.place(own_place, first + round + 1)
                load_own(memory, matrices, later, tile, round + 1, FUNCTIONS, SHAPE)
        place = FUNCTIONS.place(own_place, first + round)
        if not SHAPE.is_ahead:
            if step % PARTS == 0:
                load_own(memory, matrices, place, tile, round, FUNCTIONS, SHAPE)
        load_chunk(memory, matrices, place, step, FUNCTIONS, SHAPE)
    if SHAPE.is_ahead:
        # The scores of one more round start on arbitrary data, and are not used.
        own_slot = count % SHAPE.own_slots
        mbarrier.wait(memory.own_empty.index(own_slot), count // SHAPE.own_slots % 2 ^ 1)
        mbarrier.arrive(memory.own_full.index(own_slot), count=1)
        for group in gl.static_range(2):
            number = count * PARTS + group
            mbarrier.wait(memory.chunk_empty.index(number % SLOTS), number // SLOTS % 2 ^ 1)
            mbarrier.arrive(memory.chunk_full.index(number % SLOTS), count=1)


@gluon.jit
def cotangent_of(memory, slot, SHAPE: gl.constexpr):
    """Return the tile of cotangents in a slot.

    Wide tiles have many pieces, whose addresses must be recomputed because there are no registers to hold them.
    """
    if SHAPE.width > 64:
        return memory.own_tiles.index(forgotten(slot) * 2 + 1)
    else:
        return memory.own_tiles.index(slot * 2 + 1)


@gluon.jit
def store_delta(memory, p_delta, place, tile, slot, FUNCTIONS: gl.constexpr, SHAPE: gl.constexpr):
    """Compute delta of each query of a round, the sum of results times cotangents, and store it."""
    ROWS: gl.constexpr = gl.BlockedLayout([1, PIECE], [32, 1], [gl.num_warps(), 1], [1, 0])
    PIECES: gl.constexpr = SHAPE.width // PIECE
    b_delta = gl.zeros([OWN], gl.float32, gl.SliceLayout(1, ROWS))
    for piece in gl.static_range(PIECES):
        b_cotangent = widened(cotangent_of(memory, slot, SHAPE).slice(piece * PIECE, PIECE, dim=1).load(ROWS))
        b_output = widened(memory.outputs.index(slot).slice(piece * PIECE, PIECE, dim=1).load(ROWS))
        b_delta = b_delta + gl.sum(b_cotangent * b_output, 1)
    memory.lines.index(slot * 2 + 1).store(b_delta)
    o_query = tile * OWN + gl.arange(0, OWN, gl.SliceLayout(1, ROWS))
    gl.store(FUNCTIONS.line_at(p_delta, place) + o_query, b_delta)


@gluon.jit
def store_gradient(memory, matrices, own_place, tile, first, round, BACK: gl.constexpr, FUNCTIONS: gl.constexpr,
                   SHAPE: gl.constexpr):
    """Store the query gradient of the round BACK rounds before `round` once it is staged, and free its memory."""
    mbarrier.wait(memory.gradient_full.index(0), (round - BACK) % 2)
    row, column = FUNCTIONS.gradient_at(FUNCTIONS.place(own_place, first + round - BACK), tile)
    tma_store(matrices.gradient, [row, column], staged_gradient(memory, matrices, SHAPE))
    tma.store_wait(0)
    thread_barrier()
    mbarrier.arrive(memory.half_empty.index(0), count=1)


@gluon.jit
def gather(memory, matrices, arrays, p_log_sum, p_delta, ROUNDS: gl.constexpr, FUNCTIONS: gl.constexpr,
           SHAPE: gl.constexpr):
    """Fill the slots of lines and key terms for all rounds, and store gradients of queries."""
    OWN_SLOTS: gl.constexpr = SHAPE.own_slots
    tile, first, count, own_place = share_of(ROUNDS, FUNCTIONS, SHAPE)
    r_k = key_positions(SHAPE)
    loaded, b_log_sum = request_vectors(arrays, p_log_sum, FUNCTIONS.place(own_place, first), tile, r_k, FUNCTIONS)
    for round in range(count):
        place = FUNCTIONS.place(own_place, first + round)
        slot = round % OWN_SLOTS
        mbarrier.wait(memory.own_full.index(slot), round // OWN_SLOTS % 2)
        store_delta(memory, p_delta, place, tile, slot, FUNCTIONS, SHAPE)
        store_vectors(memory, slot * 2, slot, loaded, b_log_sum, r_k, FUNCTIONS, SHAPE)
        thread_barrier()
        mbarrier.arrive(memory.lines_full.index(slot), count=1)
        mbarrier.arrive(memory.own_empty.index(slot), count=1)
        later = FUNCTIONS.place(own_place, first + gl.minimum(round + 1, count - 1))
        loaded, b_log_sum = request_vectors(arrays, p_log_sum, later, tile, r_k, FUNCTIONS)
        # The gradients of two rounds before, so that the next round's vectors do not wait for the end of this one.
        if round > 1:
            store_gradient(memory, matrices, own_place, tile, first, round, 2, FUNCTIONS, SHAPE)
    if SHAPE.is_ahead:
        mbarrier.arrive(memory.lines_full.index(count % OWN_SLOTS), count=1)
    if count > 1:
        store_gradient(memory, matrices, own_place, tile, first, count, 2, FUNCTIONS, SHAPE)
    store_gradient(memory, matrices, own_place, tile, first, count, 1, FUNCTIONS, SHAPE)


@gluon.jit
def resident_pairs(matrices, arrays, p_log_sum, p_delta, p_bias_gradient, ROUNDS: gl.constexpr,
                   FUNCTIONS: gl.constexpr, SHAPE: gl.constexpr):
    """Compute the gradients of one tile of queries in ROUNDS of its rounds, and their part of the bias's gradient.

    `arrays` are pointers to the arrays that the generated functions read. Deltas are results, too.
    """
    WIDTH: gl.constexpr = SHAPE.width
    KEYS: gl.constexpr = SHAPE.keys
    OWN_SLOTS: gl.constexpr = SHAPE.own_slots
    SLOTS: gl.constexpr = SHAPE.slots
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    dtype: gl.constexpr = matrices.query.dtype
    own_tiles = gl.allocate_shared_memory(dtype, [2 * OWN_SLOTS, OWN, WIDTH], matrices.query.layout)
    outputs = gl.allocate_shared_memory(dtype, [OWN_SLOTS, OWN, WIDTH], matrices.output.layout)
    key_chunks = gl.allocate_shared_memory(dtype, [SLOTS, CHUNK, WIDTH], matrices.key.layout)
    value_chunks = gl.allocate_shared_memory(dtype, [SLOTS, CHUNK, WIDTH], matrices.value.layout)
    half = gl.allocate_shared_memory(gl.float32, [1, OWN, WIDTH], gl.SwizzledSharedLayout(8, 1, WIDTH // 8, [1, 0]))
    lines = gl.allocate_shared_memory(gl.float32, [2 * OWN_SLOTS, OWN], PLAIN)
    key_terms = lines
    if SHAPE.has_key_terms:
        key_terms = gl.allocate_shared_memory(gl.float32, [OWN_SLOTS, KEYS], PLAIN)
    bias = gl.allocate_shared_memory(matrices.bias.dtype, [KEYS // CHUNK, OWN, CHUNK], matrices.bias.layout)
    own_full = make_barriers(OWN_SLOTS, 1)
    # Both groups and `gather` read the query tiles.
    own_empty = make_barriers(OWN_SLOTS, 3)
    lines_full = make_barriers(OWN_SLOTS, 1)
    chunk_full = make_barriers(SLOTS, 1)
    chunk_empty = make_barriers(SLOTS, 1)
    half_full = make_barriers(1, 1)
    half_empty = make_barriers(1, 1)
    gradient_full = make_barriers(1, 1)
    bias_full = make_barriers(1, 1)
    memory = PairsMemory(
        own_tiles, outputs, key_chunks, value_chunks, lines, key_terms, half, bias, own_full, own_empty, lines_full,
        chunk_full, chunk_empty, half_full, half_empty, gradient_full, bias_full,
    )
    fence_async_shared()
    thread_barrier()
    gl.warp_specialize(
        [
            (compute, (memory, matrices, arrays, p_bias_gradient, ROUNDS, 0, FUNCTIONS, SHAPE)),
            (compute, (memory, matrices, arrays, p_bias_gradient, ROUNDS, 1, FUNCTIONS, SHAPE)),
            (load, (memory, matrices, ROUNDS, FUNCTIONS, SHAPE)),
            (gather, (memory, matrices, arrays, p_log_sum, p_delta, ROUNDS, FUNCTIONS, SHAPE)),
        ],
        # With fewer warps in `gather`, the groups would wait for delta.
        [4, 1, 2],
        # Computing delta takes registers, which the compute groups can spare because gradients are narrow.
        [232, 40, 40],
    )
