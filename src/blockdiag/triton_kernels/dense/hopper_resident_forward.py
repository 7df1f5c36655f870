"""Template in Gluon of the forward kernel for Hopper that keeps a pair bias in shared memory.

The bias is the same along some batch axes. A cell is one combination of the batch indices that the bias has, and a
round is one combination of the others. A program has a tile of 128 queries of a cell and of its bias, which it loads
once, and processes that tile in several rounds.

| warps | function | work |
|---|---|---|
| 4 + 4 | `compute` | 64 queries each: products, softmax, results |
| 1 | `load` | load the bias, fill rings of slots with queries and with parts of keys and values, and sum key terms |

Scores are accumulated onto the bias. There are at most 256 keys, so all scores of a query stay in registers, and their
maximum is known before the first exponential: the softmax is not online. Products of the next round start while the
results of the last one are written.

The caller passes `FUNCTIONS`, generated for a region:

| function | returns |
|---|---|
| own_place(cell) | the batch indices that the bias has, from the index of a cell |
| place(own, other) | all batch indices; `own` is what `own_place` returns, `other` the number of a round |
| bias_at(own, tile) | the row and the column of the bias of a tile of queries, at key 0 |
| query_at(place, tile) | the row and the column of a tile of queries |
| output_at(place, tile, first) | the row and the column of results, from query `first` of a tile on |
| key_at, value_at (place) | the row and the column of the array at key 0 |
| rows_at(p_rows, place, r_q) | pointers to the numbers of queries in an array [batch.., queries] |
| per_query(arrays, place, r_q) | the positions of queries, and the per-query numbers that scores need |
| start(numbers, r_k, bias) | the sum of all terms of scores that are not in `key_terms`, from a tile of the bias |
| request_terms(arrays, place, r_k) | the numbers that `key_terms` needs, as loads that it awaits |
| key_terms(loaded, r_k) | the sum of the terms of scores without queries, [1, keys] or a number |

`numbers` is what `per_query` returns, and `loaded` what `request_terms` returns. Scores are `factor` times the sum of
a product, `start` and `key_terms`. Both functions therefore divide their terms by the factor.
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

from blockdiag.triton_kernels.launch.gluon_names import thread_barrier, tma_load, tma_store
from blockdiag.triton_kernels.parts.hopper_tiles import make_barriers
from blockdiag.triton_kernels.parts.resident_tiles import (
    free_slot,
    load_slot,
    make_ones,
    partial_sums,
    share_of,
    wait_slot,
    widened,
)

# The warps of a compute group.
WARPS = gl.constexpr(4)
# The fewest registers per thread that hardware allows, so that each computing thread gets 240.
FEW_REGISTERS = gl.constexpr(24)
# The fewest columns of a product.
FEW_COLUMNS = gl.constexpr(8)
LN_2 = gl.constexpr(0.6931471805599453)


@dataclass(frozen=True)
class ResidentFunctions:
    """Generated device functions; the module's docstring describes them."""

    own_place: Any
    place: Any
    bias_at: Any
    query_at: Any
    key_at: Any
    value_at: Any
    output_at: Any
    rows_at: Any
    per_query: Any
    start: Any
    request_terms: Any
    key_terms: Any


@dataclass(frozen=True)
class ResidentShape:
    """Static properties of a launch.

    Attributes:
        rows, keys: queries per program, and all keys.
        width: the head dimension of queries, keys and values.
        chunk: keys per product.
        part: keys, or values, per slot of the ring.
        slots: slots of the ring, which parts of keys and of values share.
        query_slots: slots for tiles of queries, and for key terms.
        wide_keys: `keys`, rounded up to a power of 2.
        tiles: tiles of queries per cell.
        rounds: rounds per cell.
        unit: the factor of scores times log2(e), which converts accumulated scores to exponents of 2.
        no_key: an accumulated score is at most this number where a mask hides the key.
        has_key_terms: whether scores have terms without queries.
        has_ones: whether tensor cores compute the sums of rows, as products with a matrix of ones.
        takes_turns: whether the groups compute exponentials in turns.
    """

    rows: int
    keys: int
    width: int
    chunk: int
    part: int
    slots: int
    query_slots: int
    wide_keys: int
    tiles: int
    rounds: int
    unit: float
    no_key: float
    has_key_terms: bool
    has_ones: bool
    takes_turns: bool

    @property
    def chunks(self) -> int:
        """The number of chunks of keys."""
        return self.keys // self.chunk

    @property
    def parts(self) -> int:
        """The number of parts of keys, and of parts of values."""
        return self.keys // self.part

    @property
    def chunks_per_part(self) -> int:
        """The number of chunks in a part."""
        return self.part // self.chunk


class ResidentMatrices(NamedTuple):
    """Descriptors of the arrays that the copy engine moves."""

    query: Any
    key: Any
    value: Any
    bias: Any
    output: Any


class ResidentMemory(NamedTuple):
    """Shared memory and barriers of a program.

    Attributes:
        query: slots of queries, in which results are staged, too.
        ring: slots of parts of keys and of values.
        bias: the tile of the bias, in chunks of keys.
        key_terms: slots of the sums of key terms, in float32.
        ones: a matrix of ones, with which products compute the sums of rows.
        terms_full: filled by threads; there is no barrier for empty slots, because a round's keys have one.
    """

    query: Any
    ring: Any
    bias: Any
    key_terms: Any
    ones: Any
    query_full: Any
    query_empty: Any
    part_full: Any
    part_empty: Any
    terms_full: Any
    bias_full: Any
    turns: Any


@gluon.jit
def start_scores(memory, query, numbers, number, part, GROUP: gl.constexpr, FUNCTIONS: gl.constexpr,
                 SHAPE: gl.constexpr):
    """Start the products of a round's queries with all keys, each chunk added to its bias and terms.

    `part` is the number of the round's first part of keys. Returns a tuple of the scores of each chunk.
    """
    HALF: gl.constexpr = SHAPE.rows // 2
    CHUNK: gl.constexpr = SHAPE.chunk
    CHUNKS: gl.constexpr = SHAPE.chunks
    PER_PART: gl.constexpr = SHAPE.chunks_per_part
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, CHUNK, 16])
    if SHAPE.has_key_terms:
        terms = wait_slot(memory.key_terms, memory.terms_full, number)
    b_scores = ()
    for chunk in gl.static_range(CHUNKS):
        r_k = chunk * CHUNK + gl.arange(0, CHUNK, gl.SliceLayout(0, S))
        b_bias = widened(memory.bias.index(chunk).slice(GROUP * HALF, HALF).load(S))
        b_start = FUNCTIONS.start(numbers, r_k, b_bias)
        if SHAPE.has_key_terms:
            b_start = b_start + gl.expand_dims(terms.slice(chunk * CHUNK, CHUNK).load(gl.SliceLayout(0, S)), 0)
        if chunk == 0:
            mbarrier.wait(memory.query_full.index(number % SHAPE.query_slots), number // SHAPE.query_slots % 2)
        if chunk % PER_PART == 0:
            keys = wait_slot(memory.ring, memory.part_full, part + chunk // PER_PART)
        b_scores = b_scores + (warpgroup_mma(query, keys.slice(chunk % PER_PART * CHUNK, CHUNK).permute((1, 0)),
                                             b_start, is_async=True),)
    return b_scores


@gluon.jit
def finish_scores(memory, b_started, part, SHAPE: gl.constexpr):
    """Return the scores of each chunk once they are complete, and the largest of each row. Free the slots of keys."""
    CHUNKS: gl.constexpr = SHAPE.chunks
    PARTS: gl.constexpr = SHAPE.parts
    b_scores = ()
    b_maxima = ()
    for chunk in gl.static_range(CHUNKS):
        b_score = warpgroup_mma_wait(CHUNKS - 1 - chunk, deps=[b_started[chunk]])
        b_scores = b_scores + (b_score,)
        b_maxima = b_maxima + (gl.max(b_score, 1),)
    thread_barrier()
    for i in gl.static_range(PARTS):
        free_slot(memory.part_empty, part + i, SHAPE.slots)
    b_largest = b_maxima[0]
    for chunk in gl.static_range(1, CHUNKS):
        b_largest = gl.maximum(b_largest, b_maxima[chunk])
    return b_scores, b_largest


@gluon.jit
def weigh_values(memory, b_scores, b_largest, number, part, GROUP: gl.constexpr, SHAPE: gl.constexpr):
    """Return the sums of weights times values, and the sum of weights of each row.

    Weights are relative to the largest score. Slots of values are freed.
    """
    HALF: gl.constexpr = SHAPE.rows // 2
    CHUNK: gl.constexpr = SHAPE.chunk
    CHUNKS: gl.constexpr = SHAPE.chunks
    PARTS: gl.constexpr = SHAPE.parts
    PER_PART: gl.constexpr = SHAPE.chunks_per_part
    WIDTH: gl.constexpr = SHAPE.width
    R: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, WIDTH, 16])
    T: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, FEW_COLUMNS, 16])
    # Rows that see no key count from 0.
    b_base = gl.expand_dims(gl.where(b_largest <= SHAPE.no_key, 0.0, b_largest), 1) * SHAPE.unit
    if SHAPE.takes_turns:
        # One group computes exponentials while the other one's products are in flight.
        mbarrier.wait(memory.turns.index(GROUP), number % 2 ^ (1 - GROUP))
    b_output = gl.zeros([HALF, WIDTH], gl.float32, R)
    b_sums = gl.zeros([HALF, FEW_COLUMNS], gl.float32, T)
    for chunk in gl.static_range(CHUNKS):
        b_power = gl.exp2(b_scores[chunk] * SHAPE.unit - b_base)
        if not SHAPE.has_ones:
            if chunk == 0:
                b_sums = partial_sums(b_power)
            else:
                b_sums = b_sums + partial_sums(b_power)
        b_weights = b_power.to(memory.ring.dtype)
        if chunk % PER_PART == 0:
            values = wait_slot(memory.ring, memory.part_full, part + (PARTS + chunk // PER_PART))
        b_output = warpgroup_mma(gl.convert_layout(b_weights, gl.DotOperandLayout(0, R, 2)),
                                 values.slice(chunk % PER_PART * CHUNK, CHUNK), b_output, use_acc=chunk > 0,
                                 is_async=True)
        if SHAPE.has_ones:
            b_sums = warpgroup_mma(gl.convert_layout(b_weights, gl.DotOperandLayout(0, T, 2)),
                                   memory.ones.permute((1, 0)), b_sums, use_acc=chunk > 0, is_async=True)
    if SHAPE.takes_turns:
        thread_barrier()
        mbarrier.arrive(memory.turns.index(1 - GROUP), count=1)
    if SHAPE.has_ones:
        b_output, b_sums = warpgroup_mma_wait(0, deps=[b_output, b_sums])
        # The columns of a product with ones are equal, so the maximum selects any of them.
        b_total = gl.max(b_sums, 1)
    else:
        b_output = warpgroup_mma_wait(0, deps=[b_output])
        b_total = gl.sum(b_sums, 1)
    b_total = gl.convert_layout(b_total, b_largest.type.layout)
    thread_barrier()
    for i in gl.static_range(PARTS):
        free_slot(memory.part_empty, part + (PARTS + i), SHAPE.slots)
    return b_output, b_total


@gluon.jit
def finish_round(matrices, p_log_sum, query, place, tile, r_q, b_output, b_largest, b_total, GROUP: gl.constexpr,
                 FUNCTIONS: gl.constexpr, SHAPE: gl.constexpr):
    """Start to store a group's results of a round, and store its log-sum-exps."""
    HALF: gl.constexpr = SHAPE.rows // 2
    R: gl.constexpr = gl.SliceLayout(1, b_output.type.layout)
    # Rows that see no key are 0.
    is_empty = b_total == 0
    b_norm = gl.where(is_empty, 0.0, 1.0 / b_total)
    b_output = b_output * gl.expand_dims(gl.convert_layout(b_norm, R), 1)
    # Results are staged in the slot of the queries, which are no longer read.
    query.store(b_output.to(query.dtype))
    fence_async_shared()
    thread_barrier()
    row, column = FUNCTIONS.output_at(place, tile, GROUP * HALF)
    tma_store(matrices.output, [row, column], query)
    b_log_sum = gl.where(is_empty, float("-inf"), (b_largest * SHAPE.unit + gl.log2(b_total)) * LN_2)
    gl.store(FUNCTIONS.rows_at(p_log_sum, place, r_q), b_log_sum)


@gluon.jit
def free_last_query(memory, number, SHAPE: gl.constexpr):
    """Free the slot of the last round's queries once the group's results have left it."""
    tma.store_wait(0)
    thread_barrier()
    free_slot(memory.query_empty, number + (SHAPE.query_slots - 1), SHAPE.query_slots, number > 0)


@gluon.jit
def compute(memory, matrices, arrays, p_log_sum, GROUP: gl.constexpr, ROUNDS: gl.constexpr, FUNCTIONS: gl.constexpr,
            SHAPE: gl.constexpr):
    """Compute the results of 64 queries of each round."""
    HALF: gl.constexpr = SHAPE.rows // 2
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, SHAPE.chunk, 16])
    tile, first_round, count, own = share_of(ROUNDS, FUNCTIONS, SHAPE)
    r_q = tile * SHAPE.rows + GROUP * HALF + gl.arange(0, HALF, gl.SliceLayout(1, S))
    mbarrier.wait(memory.bias_full.index(0), 0)
    for number in range(count):
        place = FUNCTIONS.place(own, first_round + number)
        part = number * (2 * SHAPE.parts)
        query = memory.query.index(number % SHAPE.query_slots).slice(GROUP * HALF, HALF)
        numbers = FUNCTIONS.per_query(arrays, place, r_q)
        b_started = start_scores(memory, query, numbers, number, part, GROUP, FUNCTIONS, SHAPE)
        free_last_query(memory, number, SHAPE)
        b_scores, b_largest = finish_scores(memory, b_started, part, SHAPE)
        b_output, b_total = weigh_values(memory, b_scores, b_largest, number, part, GROUP, SHAPE)
        finish_round(matrices, p_log_sum, query, place, tile, r_q, b_output, b_largest, b_total, GROUP, FUNCTIONS,
                     SHAPE)
    tma.store_wait(0)


@gluon.jit
def load(memory, matrices, arrays, ROUNDS: gl.constexpr, FUNCTIONS: gl.constexpr, SHAPE: gl.constexpr):
    """Load the tile of the bias, and fill the slots of queries, keys, values and key terms for all rounds."""
    PARTS: gl.constexpr = SHAPE.parts
    CHUNKS: gl.constexpr = SHAPE.chunks
    WIDE: gl.constexpr = SHAPE.wide_keys
    C: gl.constexpr = gl.BlockedLayout([1, WIDE // 32], [1, 32], [1, 1], [1, 0])
    tile, first_round, count, own = share_of(ROUNDS, FUNCTIONS, SHAPE)
    mbarrier.expect(memory.bias_full.index(0), SHAPE.rows * SHAPE.keys * 2)
    row, column = FUNCTIONS.bias_at(own, tile)
    for chunk in gl.static_range(CHUNKS):
        tma_load(matrices.bias, [row, column + chunk * SHAPE.chunk], memory.bias_full.index(0),
                 memory.bias.index(chunk))
    r_k = gl.arange(0, WIDE, gl.SliceLayout(0, C))
    if SHAPE.keys < WIDE:
        r_k = gl.minimum(r_k, SHAPE.keys - 1)
    if SHAPE.has_key_terms:
        loaded = FUNCTIONS.request_terms(arrays, FUNCTIONS.place(own, first_round), r_k)
    for number in range(count):
        place = FUNCTIONS.place(own, first_round + number)
        part = number * (2 * PARTS)
        row, column = FUNCTIONS.key_at(place)
        load_slot(matrices.key, memory.ring, memory.part_full, memory.part_empty, part, row, column)
        if SHAPE.has_key_terms:
            # The keys have got a slot, so the round before last is over, and its slot of key terms is free.
            b_terms = FUNCTIONS.key_terms(loaded, r_k)
            b_terms = gl.sum(gl.zeros([1, WIDE], gl.float32, C) + b_terms, 0)
            memory.key_terms.index(number % SHAPE.query_slots).store(b_terms)
            thread_barrier()
            mbarrier.arrive(memory.terms_full.index(number % SHAPE.query_slots), count=1)
        query_row, query_column = FUNCTIONS.query_at(place, tile)
        load_slot(matrices.query, memory.query, memory.query_full, memory.query_empty, number,
                  query_row, query_column)
        for i in gl.static_range(1, PARTS):
            load_slot(matrices.key, memory.ring, memory.part_full, memory.part_empty, part + i, row + i * SHAPE.part,
                      column)
        row, column = FUNCTIONS.value_at(place)
        for i in gl.static_range(PARTS):
            load_slot(matrices.value, memory.ring, memory.part_full, memory.part_empty, part + (PARTS + i),
                      row + i * SHAPE.part, column)
        if SHAPE.has_key_terms:
            # The loads for the next round complete while this waits for slots.
            following = FUNCTIONS.place(own, first_round + gl.minimum(number + 1, count - 1))
            loaded = FUNCTIONS.request_terms(arrays, following, r_k)


@gluon.jit
def resident_forward(matrices, arrays, p_log_sum, ROUNDS: gl.constexpr, FUNCTIONS: gl.constexpr, SHAPE: gl.constexpr):
    """Compute results and log-sum-exps of one tile of queries, in up to ROUNDS rounds.

    `arrays` are pointers to the arrays that the generated functions read.
    """
    QUERY_SLOTS: gl.constexpr = SHAPE.query_slots
    CHUNK: gl.constexpr = SHAPE.chunk
    CHUNKS: gl.constexpr = SHAPE.chunks
    dtype: gl.constexpr = matrices.query.dtype
    query = gl.allocate_shared_memory(dtype, [QUERY_SLOTS, SHAPE.rows, SHAPE.width], matrices.query.layout)
    ring = gl.allocate_shared_memory(dtype, [SHAPE.slots, SHAPE.part, SHAPE.width], matrices.key.layout)
    bias = gl.allocate_shared_memory(dtype, [CHUNKS, SHAPE.rows, CHUNK], matrices.bias.layout)
    key_terms = gl.allocate_shared_memory(gl.float32, [QUERY_SLOTS, SHAPE.wide_keys],
                                          gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ones = key_terms
    if SHAPE.has_ones:
        ones = make_ones(dtype, CHUNK)
    query_full = make_barriers(QUERY_SLOTS, 1)
    query_empty = make_barriers(QUERY_SLOTS, 2)
    part_full = make_barriers(SHAPE.slots, 1)
    part_empty = make_barriers(SHAPE.slots, 2)
    terms_full = query_full
    if SHAPE.has_key_terms:
        terms_full = make_barriers(QUERY_SLOTS, 1)
    bias_full = make_barriers(1, 1)
    turns = bias_full
    if SHAPE.takes_turns:
        turns = make_barriers(2, 1)
    memory = ResidentMemory(query, ring, bias, key_terms, ones, query_full, query_empty, part_full, part_empty,
                            terms_full, bias_full, turns)
    fence_async_shared()
    thread_barrier()
    gl.warp_specialize(
        [
            (compute, (memory, matrices, arrays, p_log_sum, 0, ROUNDS, FUNCTIONS, SHAPE)),
            (compute, (memory, matrices, arrays, p_log_sum, 1, ROUNDS, FUNCTIONS, SHAPE)),
            (load, (memory, matrices, arrays, ROUNDS, FUNCTIONS, SHAPE)),
        ],
        [WARPS, 1],
        [240, FEW_REGISTERS],
    )
