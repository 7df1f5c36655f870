"""Template in Gluon of the one-pass backward kernel for Hopper: gradients of queries, keys and values.

A program has a tile of 128 keys, or of 64 with more than 128 features, and visits the query tiles that see it. Each
visit takes five products: scores and gradients of weights, both [keys, queries], and a part of each of the three
gradients. Two separate passes, one for queries and one for keys, would take seven. A line is the sequence at one
combination of batch indices. Tiles whose head dimension is not a power of 2 are split into two that are, by features;
so everything that holds such tiles is a tuple.

| warps | function | work |
|---|---|---|
| 8 | `compute` | compute all products, and keep the gradients of keys and values in registers |
| 1 | `load` | load queries, cotangents of outputs, log-sum-exps and deltas into a ring of slots; split the numbers |
| 3 | `reduce` | add the parts of the queries' gradients to a float32 array; each warp adds every third tile |

The tensor cores are never left without products for long: exponentials of a visit are computed while the gradients of
weights are, slopes while a part of the values' gradients is, and the part of the queries' gradients is sent while that
of the keys' gradients is computed. Shared memory limits the kernel: with 128 features it moves data in more than 80% of
all cycles. So products add the log-sum-exps and deltas, see `parts.hopper_split_numbers`.

With more than 128 features, key tiles are smaller, so more parts are added. The copy engine then adds them, which costs
about a third of the time but completes later; otherwise the threads of `reduce` do.

Tiles of the queries' gradients are summed in a fixed order, so results are repeatable: a program adds its part once all
programs before it have added theirs. It waits only for programs with lower indices. GPUs start programs in the order of
their indices, although CUDA does not promise it. In another order, a program could wait for one that never starts.
If query tiles are listed, the last key tiles come first: under a causal mask they are the first to reach a query tile.
If the order of additions is free, the first key tiles, which most queries see, come first instead: programs then end
at about the same time, and causal calls take 6% less.

The method is that of FlashAttention-3 (Shah et al., 2024). The caller passes `FUNCTIONS`, generated for a region:

| function | returns |
|---|---|
| own_place(cell) | the batch indices of a program, from a flat index |
| place(own, other) | all batch indices; `other` is a flat index of the lines that a program loops over |
| query_at, key_at, ... (place, first) | the row and the column of an array's tile that starts at `first` |
| row_at(place) | the offset of the line's first element in arrays [batch.., queries] |
| line_at(place) | the index of the line's lists of query tiles |
| score, plain_score (arrays, place, r_q, r_k, products) | scores, with masks and without, divided by the factor |
| slope(arrays, place, r_q, r_k, products, power, weighed) | gradients of the products, divided by the factor |

`products` are those of queries and keys, `power` the softmax weights, and `weighed` the gradients of weights
minus delta. `slope` leaves out the same masks as `plain_score`.
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

from blockdiag.triton_kernels.launch.gluon_names import (
    reinterpret,
    thread_barrier,
    tma_add,
    tma_load,
    tma_store,
)
from blockdiag.triton_kernels.parts.hopper_split_numbers import (
    make_split_numbers,
    split_rows,
    start_from_split,
    store_split,
)
from blockdiag.triton_kernels.parts.hopper_tiles import finished, make_barriers
from blockdiag.triton_kernels.parts.reductions import add_rows, finish_bulk_additions, order_bulk_additions

REDUCERS = gl.constexpr(3)
WARPS = gl.constexpr(8)
# The numbers that a reducing warp adds at once.
PART_NUMBERS = gl.constexpr(1024)
# The fewest registers per thread that hardware allows, so that each computing thread gets 240. With 232, the compiler
# would serialise products.
FEW_REGISTERS = gl.constexpr(24)
LOG2_E = gl.constexpr(1.4426950408889634)
# A loop counter shifted right by this many bits is 0.
_FAR = gl.constexpr(28)


@dataclass(frozen=True)
class BackwardFunctions:
    """Generated device functions; the module's docstring describes them."""

    own_place: Any
    place: Any
    query_at: Any
    key_at: Any
    value_at: Any
    cotangent_at: Any
    key_gradient_at: Any
    value_gradient_at: Any
    row_at: Any
    line_at: Any
    score: Any
    plain_score: Any
    slope: Any


@dataclass(frozen=True)
class BackwardShape:
    """Static properties of a launch.

    Attributes:
        rows, keys: queries and keys per tile.
        features: the head dimension, in parts.
        stages: slots of the ring of queries, and of the ring of cotangents.
        buffers: buffers for parts of the queries' gradients.
        query_tiles, key_tiles: tiles per line.
        others: the number of lines of queries that a program loops over.
        masks: which of the visited tiles masks touch: "none", "all" or "some".
        is_listed: whether programs read from lists which query tiles see their keys; otherwise all do.
        unit: `factor` times log2(e), which converts results of `score` to exponents of 2.
        factor: the positive factor of scores that `score` and `plain_score` leave out.
        is_bare: whether `plain_score` returns the products unchanged.
        is_ordered: whether the queries' gradients are summed in a fixed order.
        adds_in_bulk: whether the copy engine adds the parts of the queries' gradients.
    """

    rows: int
    keys: int
    features: tuple[int, ...]
    stages: int
    buffers: int
    query_tiles: int
    key_tiles: int
    others: int
    masks: str
    is_listed: bool
    unit: float
    factor: float
    is_bare: bool
    is_ordered: bool
    adds_in_bulk: bool

    @property
    def width(self) -> int:
        """The head dimension."""
        return sum(self.features)

    @property
    def splits_features(self) -> bool:
        """Whether each of the two warp groups has half of the features; its registers cannot hold all."""
        return self.width > 128


class Matrices(NamedTuple):
    """Descriptors of the arrays that the copy engine moves: a tuple for each array, with one of each part.

    `query_gradient` is empty if threads add the gradients.
    """

    query: Any
    key: Any
    value: Any
    cotangent: Any
    key_gradient: Any
    value_gradient: Any
    query_gradient: Any


class BackwardMemory(NamedTuple):
    """Shared memory and barriers of a program.

    Attributes:
        key, value, query, cotangent, part: tuples of the parts of tiles; `part` is for the queries' gradients.
        base_parts: -log_sum / factor of each query, split into parts, if `SHAPE.is_bare`.
        base: log_sum times log2(e), if not.
        delta_parts: -delta of each query, split into parts.
        slope, weights: tiles of slopes and of weights, [keys, queries].
        query_read, cotangent_read: a visit has read its queries, or its cotangents.
        visited: a visit has ended: all operands are read, and its part of the queries' gradients is written. With
            several stages the two barriers before are the same as this one.
    """

    key: Any
    value: Any
    query: Any
    cotangent: Any
    base_parts: Any
    delta_parts: Any
    base: Any
    slope: Any
    part: Any
    weights: Any
    key_full: Any
    query_full: Any
    query_read: Any
    cotangent_full: Any
    cotangent_read: Any
    numbers_full: Any
    visited: Any
    part_empty: Any


class Walk(NamedTuple):
    """The query tiles that a program visits.

    Attributes:
        codes: for each query tile, twice the next live tile at or after it, plus 1 if masks touch that tile.
        ranks: for each query tile, the number of programs that add to it before this one.
        count: the number of tiles to visit.
        key_tile: the program's key tile.
    """

    codes: Any
    ranks: Any
    count: Any
    key_tile: Any


@gluon.jit
def layouts(SHAPE: gl.constexpr):
    """Return zero tiles of scores, of gradients of keys or values, and of gradients of queries.

    The last two are tuples of parts.

    The table shows which half of a tile each of the two warp groups has.

    | features | scores | gradients of keys and values | gradients of queries |
    |---|---|---|---|
    | at most 128 | keys | keys | queries if there are 128, else features |
    | more | queries | features | features |
    """
    M: gl.constexpr = SHAPE.rows
    KEYS: gl.constexpr = SHAPE.keys
    if SHAPE.splits_features:
        S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS // 2, 2], [16, M // 2, 16])
    else:
        S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, M, 16])
    b_scores = gl.zeros([KEYS, M], gl.float32, S)
    b_keys = ()
    b_queries = ()
    for i in gl.static_range(len(SHAPE.features)):
        b_keys = b_keys + (zero_part(KEYS, SHAPE.features[i], SHAPE.splits_features),)
        b_queries = b_queries + (zero_part(M, SHAPE.features[i], M < 128),)
    return b_scores, b_keys, b_queries


@gluon.jit
def zero_part(ROWS: gl.constexpr, WIDTH: gl.constexpr, SPLITS_FEATURES: gl.constexpr):
    """Return zeros for one part of a tile, of which each warp group has half of the features or half of the rows."""
    if SPLITS_FEATURES:
        LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS // 2, 2], [16, WIDTH // 2, 16])
    else:
        LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, WIDTH, 16])
    return gl.zeros([ROWS, WIDTH], gl.float32, LAYOUT)


@gluon.jit
def start_products(lefts, rights, zero, stage, b_sum, USE_SUM: gl.constexpr):
    """Start the products of keys or values with a tile of queries or cotangents; add them to `b_sum` if USE_SUM."""
    for i in gl.static_range(len(lefts)):
        b_sum = warpgroup_mma(lefts[i].index(zero), rights[i].index(stage).permute((1, 0)), b_sum,
                              use_acc=USE_SUM or i > 0, is_async=True)
    return b_sum


@gluon.jit
def start_sums(left, rights, slot, b_sums, IN_REGISTERS: gl.constexpr, USE_SUMS: gl.constexpr):
    """Start the products of a tile with all parts of another one. They are added to `b_sums` if USE_SUMS."""
    result = ()
    for i in gl.static_range(len(rights)):
        if IN_REGISTERS:
            # The fragments of the tile do not depend on the number of features, so no data moves.
            operand = gl.convert_layout(left, gl.DotOperandLayout(0, b_sums[i].type.layout, 2))
        else:
            operand = left
        result = result + (warpgroup_mma(operand, rights[i].index(slot), b_sums[i], use_acc=USE_SUMS, is_async=True),)
    return result


@gluon.jit
def both_finished(PENDING: gl.constexpr, first, second):
    """Return two tuples of sums once all but the last PENDING products have completed."""
    tiles = finished(PENDING, first + second)
    return tiles[:len(first)], tiles[len(first):]


@gluon.jit
def visit(memory, arrays, place, r_q, r_k, number, is_masked, b_dk, b_dv, FUNCTIONS: gl.constexpr,
          SHAPE: gl.constexpr):
    """Process one query tile: send its part of the queries' gradients, return the sums of those of keys and values."""
    STAGES: gl.constexpr = SHAPE.stages
    BUFFERS: gl.constexpr = SHAPE.buffers
    SPLITS_FEATURES: gl.constexpr = SHAPE.splits_features
    PENDING: gl.constexpr = 1 + len(memory.value)
    b_zero, _b_keys, b_none = layouts(SHAPE)
    S: gl.constexpr = b_zero.type.layout
    dtype: gl.constexpr = memory.key[0].dtype
    stage = number % STAGES
    # The index of the barriers at which this visit arrives.
    mark = number % (REDUCERS * STAGES)
    # This is 0, but the compiler does not know it. With a constant it would compute all addresses of operands before
    # the loop and keep them in registers.
    zero = number >> _FAR
    slope = memory.slope.index(zero)
    mbarrier.wait(memory.numbers_full.index(stage), number // STAGES % 2)
    mbarrier.wait(memory.query_full.index(stage), number // STAGES % 2)
    if SHAPE.is_bare:
        b_products = start_from_split(memory.base_parts.index(stage), b_zero)
        b_products = start_products(memory.key, memory.query, zero, stage, b_products, True)
    else:
        # The load precedes the products, because it would wait for theirs.
        b_base = memory.base.index(stage).load(gl.SliceLayout(0, S))
        b_products = start_products(memory.key, memory.query, zero, stage, b_zero, False)
    mbarrier.wait(memory.cotangent_full.index(stage), number // STAGES % 2)
    b_weighed = start_from_split(memory.delta_parts.index(stage), b_zero)
    b_weighed = start_products(memory.value, memory.cotangent, zero, stage, b_weighed, True)
    b_products = warpgroup_mma_wait(PENDING, deps=[b_products])
    if SHAPE.masks == "some":
        if is_masked != 0:
            b_score = FUNCTIONS.score(arrays, place, r_q, r_k, b_products)
        else:
            b_score = FUNCTIONS.plain_score(arrays, place, r_q, r_k, b_products)
    elif SHAPE.masks == "all":
        b_score = FUNCTIONS.score(arrays, place, r_q, r_k, b_products)
    else:
        b_score = FUNCTIONS.plain_score(arrays, place, r_q, r_k, b_products)
    if SHAPE.is_bare:
        b_power = gl.exp2(b_score * SHAPE.unit)
    else:
        b_power = gl.exp2(b_score * SHAPE.unit - gl.expand_dims(b_base, 0))
    if SPLITS_FEATURES:
        # Each warp group computed the weights of half of the queries, and needs those of all.
        weights = memory.weights.index(zero)
        weights.store(b_power.to(dtype))
        fence_async_shared()
        thread_barrier()
        b_dv = start_sums(weights, memory.cotangent, stage, b_dv, False, True)
    else:
        b_dv = start_sums(b_power.to(dtype), memory.cotangent, stage, b_dv, True, True)
    b_weighed = warpgroup_mma_wait(len(b_dv), deps=[b_weighed])
    b_slope = FUNCTIONS.slope(arrays, place, r_q, r_k, b_products, b_power, b_weighed)
    if SHAPE.masks != "none":
        # The values of keys that a mask hides may be NaN, which must not reach the gradients.
        b_slope = gl.where(b_power == 0.0, 0.0, b_slope)
    b_slope = b_slope.to(dtype)
    slope.store(b_slope)
    fence_async_shared()
    if STAGES == 1:
        # Queries and cotangents have one slot each, which is freed as soon as possible.
        b_dv = finished(0, b_dv)
        thread_barrier()
        mbarrier.arrive(memory.cotangent_read.index(mark), count=1)
        b_dk = start_sums(slope, memory.query, stage, b_dk, False, True)
        b_dq = start_sums(slope.permute((1, 0)), memory.key, zero, b_none, False, False)
        b_dk = finished(len(b_dq), b_dk)
        thread_barrier()
        mbarrier.arrive(memory.query_read.index(mark), count=1)
        b_dq = finished(0, b_dq)
        send_part(memory, b_dq, number, BUFFERS, SHAPE.adds_in_bulk)
        thread_barrier()
    else:
        # Otherwise, the slopes of a warp group would be those of half of the queries.
        gl.static_assert(not SPLITS_FEATURES)
        thread_barrier()
        # The gradient of queries is computed first: it is sent while that of keys is computed.
        b_dq = start_sums(slope.permute((1, 0)), memory.key, zero, b_none, False, False)
        b_dk = start_sums(b_slope, memory.query, stage, b_dk, True, True)
        b_dq = finished(len(b_dk), b_dq)
        send_part(memory, b_dq, number, BUFFERS, SHAPE.adds_in_bulk)
        b_dk, b_dv = both_finished(0, b_dk, b_dv)
        thread_barrier()
    mbarrier.arrive(memory.visited.index(mark), count=1)
    return b_dk, b_dv


@gluon.jit
def await_visit(barriers, number, SHAPE: gl.constexpr):
    """Wait until visit `number` has arrived at a barrier; there is none if it is negative."""
    COUNT: gl.constexpr = REDUCERS * SHAPE.stages
    later = number + COUNT
    mbarrier.wait(barriers.index(later % COUNT), later // COUNT % 2 ^ 1)


@gluon.jit
def send_part(memory, b_dq, number, BUFFERS: gl.constexpr, ADDS_IN_BULK: gl.constexpr):
    """Write a tile of the queries' gradients to its buffer, once the buffer's previous tile has been added."""
    before = number - BUFFERS
    if before >= 0:
        mbarrier.wait(memory.part_empty.index(before % REDUCERS), before // REDUCERS % 2)
    for i in gl.static_range(len(b_dq)):
        memory.part[i].index(number % BUFFERS).store(b_dq[i])
    if ADDS_IN_BULK:
        fence_async_shared()


@gluon.jit
def compute(memory, arrays, matrices, own, walk, FUNCTIONS: gl.constexpr, SHAPE: gl.constexpr):
    """Compute the gradients of the program's keys and values, and the parts of the queries' gradients."""
    M: gl.constexpr = SHAPE.rows
    KEYS: gl.constexpr = SHAPE.keys
    b_scores, b_dk, _b_queries = layouts(SHAPE)
    b_dv = b_dk
    S: gl.constexpr = b_scores.type.layout
    r_k = walk.key_tile * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, S))
    mbarrier.wait(memory.key_full.index(0), 0)
    number = 0
    for other in range(SHAPE.others):
        place = FUNCTIONS.place(own, other)
        code = first_code(walk, SHAPE)
        for at in range(walk.count):
            tile, is_masked, code = next_tile(walk, at, code, SHAPE)
            r_q = tile * M + gl.arange(0, M, gl.SliceLayout(0, S))
            b_dk, b_dv = visit(memory, arrays, place, r_q, r_k, number, is_masked, b_dk, b_dv, FUNCTIONS, SHAPE)
            number += 1
    place = FUNCTIONS.place(own, 0)
    stage_parts(memory.value, b_dv, 1.0)
    stage_parts(memory.key, b_dk, SHAPE.factor)
    fence_async_shared()
    thread_barrier()
    row, column = FUNCTIONS.value_gradient_at(place, walk.key_tile * KEYS)
    store_parts(matrices.value_gradient, row, column, memory.value)
    row, column = FUNCTIONS.key_gradient_at(place, walk.key_tile * KEYS)
    store_parts(matrices.key_gradient, row, column, memory.key)
    tma.store_wait(0)


@gluon.jit
def stage_parts(parts, b_parts, FACTOR: gl.constexpr):
    """Write the parts of a tile, times a factor, to shared memory."""
    for i in gl.static_range(len(parts)):
        parts[i].index(0).store((b_parts[i] * FACTOR).to(parts[i].dtype))


@gluon.jit
def store_parts(matrices, row, column, parts):
    """Start copying the parts of a tile from shared memory to an array."""
    first = column
    for i in gl.static_range(len(parts)):
        tma_store(matrices[i], [row, first], parts[i].index(0))
        first += parts[i].shape[2]


@gluon.jit
def load_parts(matrices, row, column, full, parts, slot):
    """Start copying the parts of a tile from an array to shared memory."""
    first = column
    for i in gl.static_range(len(parts)):
        tma_load(matrices[i], [row, first], full, parts[i].index(slot))
        first += parts[i].shape[2]


@gluon.jit
def first_code(walk, SHAPE: gl.constexpr):
    """Return the code of query tile 0, from which `next_tile` derives the first tile of the walk."""
    if SHAPE.is_listed:
        return gl.load(walk.codes)
    else:
        return 0


@gluon.jit
def next_tile(walk, at, code, SHAPE: gl.constexpr):
    """Return tile number `at` of the walk, whether masks touch it, and the next code, which is loaded early."""
    if SHAPE.is_listed:
        tile = code >> 1
        is_masked = code & 1
        code = gl.load(walk.codes + tile + 1)
    else:
        tile = at
        is_masked = 0
    return tile, is_masked, code


@gluon.jit
def load(memory, matrices, p_log_sum, p_delta, own, walk, FUNCTIONS: gl.constexpr, SHAPE: gl.constexpr):
    """Load the program's keys and values, and fill the rings with tiles of queries and cotangents."""
    M: gl.constexpr = SHAPE.rows
    KEYS: gl.constexpr = SHAPE.keys
    STAGES: gl.constexpr = SHAPE.stages
    BYTES: gl.constexpr = 2 * SHAPE.width
    o_row = split_rows(M)
    place = FUNCTIONS.place(own, 0)
    mbarrier.expect(memory.key_full.index(0), 2 * KEYS * BYTES)
    row, column = FUNCTIONS.key_at(place, walk.key_tile * KEYS)
    load_parts(matrices.key, row, column, memory.key_full.index(0), memory.key, 0)
    row, column = FUNCTIONS.value_at(place, walk.key_tile * KEYS)
    load_parts(matrices.value, row, column, memory.key_full.index(0), memory.value, 0)
    number = 0
    for other in range(SHAPE.others):
        place = FUNCTIONS.place(own, other)
        first = FUNCTIONS.row_at(place)
        code = first_code(walk, SHAPE)
        for at in range(walk.count):
            tile, _is_masked, code = next_tile(walk, at, code, SHAPE)
            stage = number % STAGES
            # These loads complete while the program waits for the slot.
            b_log_sum = gl.load(p_log_sum + (first + tile * M) + o_row)
            b_delta = gl.load(p_delta + (first + tile * M) + o_row)
            await_visit(memory.query_read, number - STAGES, SHAPE)
            mbarrier.expect(memory.query_full.index(stage), M * BYTES)
            row, column = FUNCTIONS.query_at(place, tile * M)
            load_parts(matrices.query, row, column, memory.query_full.index(stage), memory.query, stage)
            await_visit(memory.cotangent_read, number - STAGES, SHAPE)
            mbarrier.expect(memory.cotangent_full.index(stage), M * BYTES)
            row, column = FUNCTIONS.cotangent_at(place, tile * M)
            load_parts(matrices.cotangent, row, column, memory.cotangent_full.index(stage), memory.cotangent, stage)
            b_base = gl.where(b_log_sum == float("-inf"), 0.0, b_log_sum)
            if SHAPE.is_bare:
                store_split(memory.base_parts.index(stage), b_base * (-1.0 / SHAPE.factor))
            else:
                memory.base.index(stage).store(b_base * LOG2_E)
            store_split(memory.delta_parts.index(stage), -b_delta)
            fence_async_shared()
            thread_barrier()
            mbarrier.arrive(memory.numbers_full.index(stage), count=1)
            number += 1


@gluon.jit
def reduce(memory, matrices, p_query_gradient, p_turns, own, walk, OWN: gl.constexpr, FUNCTIONS: gl.constexpr,
           SHAPE: gl.constexpr):
    """Add every third tile of the queries' gradients, starting with tile OWN, to the float32 sums."""
    M: gl.constexpr = SHAPE.rows
    number = 0
    for other in range(SHAPE.others):
        first = FUNCTIONS.row_at(FUNCTIONS.place(own, other))
        code = first_code(walk, SHAPE)
        for at in range(walk.count):
            tile, _is_masked, code = next_tile(walk, at, code, SHAPE)
            if number % REDUCERS == OWN:
                p_turn = p_turns + first // M + tile
                if SHAPE.is_ordered:
                    rank = walk.key_tile
                    if SHAPE.is_listed:
                        rank = gl.load(walk.ranks + tile)
                    turn = gl.atomic_add(p_turn, 0, sem="acquire")
                    while turn < rank:
                        turn = gl.atomic_add(p_turn, 0, sem="acquire")
                await_visit(memory.visited, number, SHAPE)
                column = 0
                if SHAPE.adds_in_bulk:
                    order_bulk_additions()
                for i in gl.static_range(len(memory.part)):
                    part = memory.part[i].index(number % SHAPE.buffers)
                    if SHAPE.adds_in_bulk:
                        tma_add(matrices.query_gradient[i], [first + tile * M, column], part)
                    else:
                        add_part(p_query_gradient + (first + tile * M).to(gl.int64) * SHAPE.width + column, part,
                                 SHAPE.width)
                    column += part.shape[1]
                if SHAPE.adds_in_bulk:
                    tma.store_wait(0)
                thread_barrier()
                mbarrier.arrive(memory.part_empty.index(OWN), count=1)
                if SHAPE.is_ordered:
                    if SHAPE.adds_in_bulk:
                        finish_bulk_additions()
                        thread_barrier()
                    # This releases the additions of all threads: the barrier orders them before it.
                    gl.atomic_add(p_turn, 1, sem="release")
            number += 1


@gluon.jit
def add_part(p_part, part, STRIDE: gl.constexpr):
    """Add one part of a tile to an array whose rows are STRIDE numbers apart."""
    M: gl.constexpr = part.shape[0]
    WIDTH: gl.constexpr = part.shape[1]
    # The lanes of a warp hold up to 128 consecutive numbers of a row.
    LANES: gl.constexpr = 32 if WIDTH >= 128 else WIDTH // 4
    ROWS: gl.constexpr = PART_NUMBERS // WIDTH
    LINES: gl.constexpr = gl.BlockedLayout([1, 4], [32 // LANES, LANES], [1, 1], [1, 0])
    o_row = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, LINES)), 1)
    o_column = gl.expand_dims(gl.arange(0, WIDTH, gl.SliceLayout(0, LINES)), 0)
    lines = reinterpret(part, gl.float32, [M // ROWS, ROWS, WIDTH], part.layout)
    # If this loop were unrolled, the compiler would compute all addresses before the loop over tiles.
    for i in range(M // ROWS):
        add_rows(p_part, o_row * STRIDE + o_column + i * (ROWS * STRIDE), lines.index(i).load(LINES))


@gluon.jit
def make_buffers(matrices, SHAPE: gl.constexpr):
    """Return the buffers for the parts of the queries' gradients."""
    if SHAPE.adds_in_bulk:
        return make_rings(matrices, gl.float32, SHAPE.buffers, SHAPE.rows)
    else:
        # Groups of eight numbers are swizzled, so that the fragments of four rows are in different banks.
        PARTS: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 4, [1, 0])
        buffers = ()
        for i in gl.static_range(len(SHAPE.features)):
            buffers = buffers + (gl.allocate_shared_memory(
                gl.float32, [SHAPE.buffers, SHAPE.rows, SHAPE.features[i]], PARTS),)
        return buffers


@gluon.jit
def make_rings(matrices, dtype: gl.constexpr, SLOTS: gl.constexpr, ROWS: gl.constexpr):
    """Return the slots of the parts of tiles, in the layouts of their descriptors."""
    rings = ()
    for i in gl.static_range(len(matrices)):
        rings = rings + (gl.allocate_shared_memory(dtype, [SLOTS, ROWS, matrices[i].block_shape[1]],
                                                   matrices[i].layout),)
    return rings


@gluon.jit
def one_pass_backward(matrices, arrays, p_codes, p_ranks, p_log_sum, p_delta, p_query_gradient, p_turns,
                      FUNCTIONS: gl.constexpr, SHAPE: gl.constexpr):
    """Compute the gradients of one tile of keys and values, and add to those of the queries that see it.

    `arrays` are pointers to the arrays that the generated functions read. `p_turns` counts the programs that have added
    to each query tile. `p_query_gradient` is not read if the copy engine adds.
    """
    M: gl.constexpr = SHAPE.rows
    KEYS: gl.constexpr = SHAPE.keys
    STAGES: gl.constexpr = SHAPE.stages
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    SLOPES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    dtype: gl.constexpr = matrices.key[0].dtype
    base = gl.allocate_shared_memory(gl.float32, [STAGES, M], PLAIN)
    slope_smem = gl.allocate_shared_memory(dtype, [1, KEYS, M], SLOPES)
    weights_smem = slope_smem
    if SHAPE.splits_features:
        weights_smem = gl.allocate_shared_memory(dtype, [1, KEYS, M], SLOPES)
    visited = make_barriers(REDUCERS * STAGES, 1)
    query_read = visited
    cotangent_read = visited
    if STAGES == 1:
        query_read = make_barriers(REDUCERS * STAGES, 1)
        cotangent_read = make_barriers(REDUCERS * STAGES, 1)
    memory = BackwardMemory(
        key=make_rings(matrices.key, dtype, 1, KEYS),
        value=make_rings(matrices.value, dtype, 1, KEYS),
        query=make_rings(matrices.query, dtype, STAGES, M),
        cotangent=make_rings(matrices.cotangent, dtype, STAGES, M),
        base_parts=make_split_numbers(STAGES, M),
        delta_parts=make_split_numbers(STAGES, M),
        base=base,
        slope=slope_smem,
        part=make_buffers(matrices.query_gradient, SHAPE),
        weights=weights_smem,
        key_full=make_barriers(1, 1),
        query_full=make_barriers(STAGES, 1),
        query_read=query_read,
        cotangent_full=make_barriers(STAGES, 1),
        cotangent_read=cotangent_read,
        numbers_full=make_barriers(STAGES, 1),
        visited=visited,
        part_empty=make_barriers(REDUCERS, 1),
    )
    program = gl.program_id(0)
    cell = program // SHAPE.key_tiles
    key_tile = program % SHAPE.key_tiles
    if SHAPE.is_listed and SHAPE.is_ordered:
        key_tile = SHAPE.key_tiles - 1 - key_tile
    own = FUNCTIONS.own_place(cell)
    if SHAPE.is_listed:
        line = (FUNCTIONS.line_at(FUNCTIONS.place(own, 0)) * SHAPE.key_tiles + key_tile).to(gl.int64)
        codes = p_codes + line * (SHAPE.query_tiles + 1)
        walk = Walk(codes, p_ranks + line * SHAPE.query_tiles, gl.load(codes + SHAPE.query_tiles), key_tile)
    else:
        walk = Walk(p_codes, p_ranks, SHAPE.query_tiles, key_tile)
    fence_async_shared()
    thread_barrier()
    gl.warp_specialize(
        [
            (compute, (memory, arrays, matrices, own, walk, FUNCTIONS, SHAPE)),
            (load, (memory, matrices, p_log_sum, p_delta, own, walk, FUNCTIONS, SHAPE)),
            (reduce, (memory, matrices, p_query_gradient, p_turns, own, walk, 0, FUNCTIONS, SHAPE)),
            (reduce, (memory, matrices, p_query_gradient, p_turns, own, walk, 1, FUNCTIONS, SHAPE)),
            (reduce, (memory, matrices, p_query_gradient, p_turns, own, walk, 2, FUNCTIONS, SHAPE)),
        ],
        [1, 1, 1, 1],
        [FEW_REGISTERS, FEW_REGISTERS, FEW_REGISTERS, FEW_REGISTERS],
    )
