"""Template in Gluon of the forward kernel for Hopper that streams keys and values through shared memory.

A line is the sequence at one combination of batch indices. An item is a tile of 128 queries of a line, and the chunks
of keys that they see. Programs are persistent: each takes items from a shared counter until none is left, so that loads
of the next item overlap the products of the last one. There is no room for a second tile of queries with 256 features,
so the next item is then loaded once the results of the last one have left.

| warps | function | work |
|---|---|---|
| 4 + 4 | `compute` | 64 queries each: products, softmax, results |
| 1 | `load` | take items, read lists, load queries, keys and values into rings of slots |

A compute group starts the scores of a chunk before the value product of the previous chunk. That value product then
runs while the exponentials of the chunk are computed, as in FlashAttention-3 (Shah et al., 2024). All chunks of an item
are live. Masked chunks, which a mask may hide in part, come first.

Tiles have powers of two as sizes, so a head dimension of 96 or 192 is moved and multiplied in two parts: 64 + 32, or
128 + 64. The names of second parts end in "_more".

Queries and keys may have eight bits. The tensor cores keep about 14 bits of the sums of such products, which is enough
for 256 features. Values have 16 bits; `hopper_eight_bit_forward` has the template for values of eight.

The caller passes `FUNCTIONS`, generated for a region:

| function | returns |
|---|---|
| place(line) | all batch indices, from the index of a line |
| query_at, key_at, ... (place, first) | the row and the column of an array's tile that starts at `first` |
| row_at(place) | the offset of the line's first element in arrays [batch.., queries] |
| line_at(place) | the index of the line among those whose lists differ |
| walk(p_counts, p_tiles, list) | the numbers of a list that `tile_at` reads; the list is given by its index |
| tile_at(p_tiles, list, walk, at) | entry `at` of a list: a chunk |
| per_query(arrays, place, r_q) | the positions of queries, and the per-query numbers that scores need |
| score, plain_score (numbers, arrays, place, r_k, products) | scores, with and without masks, over a positive factor |
| extras(numbers, arrays, place) | a tuple of per-query logits without values, as exponents of 2 |
| weight(numbers, arrays, place) | a per-query factor of results |
| offsets(place, r_q, r_c) | the offsets of results in memory |

`products` are those of queries and keys, and `numbers` what `per_query` returns.
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

from blockdiag.triton_kernels.launch.gluon_names import thread_barrier, tma_load, tma_store
from blockdiag.triton_kernels.parts.hopper_tiles import make_barriers
from blockdiag.triton_kernels.parts.resident_tiles import partial_sums

# Items that `load` announces ahead of `compute`, and the warps of a compute group.
AHEAD = gl.constexpr(2)
WARPS = gl.constexpr(4)
# The fewest registers per thread that hardware allows, so that each computing thread gets 240.
FEW_REGISTERS = gl.constexpr(24)
LN_2 = gl.constexpr(0.6931471805599453)


@dataclass(frozen=True)
class ForwardFunctions:
    """Generated device functions; the module's docstring describes them."""

    place: Any
    query_at: Any
    key_at: Any
    value_at: Any
    output_at: Any
    row_at: Any
    line_at: Any
    walk: Any
    tile_at: Any
    per_query: Any
    score: Any
    plain_score: Any
    extras: Any
    weight: Any
    offsets: Any


@dataclass(frozen=True)
class ForwardShape:
    """Static properties of a launch.

    Attributes:
        rows, chunk: queries per item, and keys per chunk.
        features, columns: the head dimensions of queries and of values, or their first parts.
        features_more, columns_more: the second parts, or 0.
        slots: slots of the ring of keys, and of the ring of values.
        query_slots: slots for tiles of queries.
        query_tiles, chunks: tiles of queries, and chunks of keys, per line.
        lines: the number of lines.
        together: the number of lines whose items are interleaved.
        masks: which of the chunks may be masked: "none", "all" or "some".
        is_listed: whether lists say which chunks the queries see; otherwise they see all.
        staging: where results are staged for the copy engine: "query" (the slot of the item's queries) or "own"; or
            "none": threads store them directly.
        unit: `factor` times log2(e), which converts results of `score` to exponents of 2.
        no_key: `score` is at most this number where a mask hides the key.
        has_extras: whether `extras` take part in the softmax.
        has_weight: whether results are multiplied by `weight`.
        takes_turns: whether the groups compute exponentials in turns.
        is_copied: whether threads copy queries, keys and values, not the copy engine. Products then need a fence.
    """

    rows: int
    chunk: int
    features: int
    columns: int
    features_more: int
    columns_more: int
    slots: int
    query_slots: int
    query_tiles: int
    chunks: int
    lines: int
    together: int
    masks: str
    is_listed: bool
    staging: str
    unit: float
    no_key: float
    has_extras: bool
    has_weight: bool
    takes_turns: bool
    is_copied: bool = False


class Matrices(NamedTuple):
    """Descriptors of the arrays that the copy engine moves, one for each part of a tile."""

    query: Any
    query_more: Any
    key: Any
    key_more: Any
    value: Any
    value_more: Any
    output: Any
    output_more: Any


class ForwardMemory(NamedTuple):
    """Shared memory and barriers of a program.

    Attributes:
        tiles: the number of the chunk in each slot of keys.
        items, masked, live: announced items, and the numbers of their masked chunks and of their live chunks.
    """

    query: Any
    query_more: Any
    key: Any
    key_more: Any
    value: Any
    value_more: Any
    staging: Any
    staging_more: Any
    tiles: Any
    items: Any
    masked: Any
    live: Any
    query_full: Any
    query_empty: Any
    key_full: Any
    key_empty: Any
    value_full: Any
    value_empty: Any
    item_full: Any
    item_empty: Any
    turns: Any


@gluon.jit
def read_number(memory):
    """Return the only element of a buffer."""
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    return gl.max(memory.load(LINE), 0)


@gluon.jit
def write_number(memory, number):
    """Write the only element of a buffer."""
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    memory.store(gl.full([1], number, gl.int32, LINE))


@gluon.jit
def announce(memory, count, item, masked, live):
    """Tell the compute groups which item comes next."""
    slot = count % AHEAD
    mbarrier.wait(memory.item_empty.index(slot), count // AHEAD % 2 ^ 1)
    write_number(memory.items.index(slot), item)
    write_number(memory.masked.index(slot), masked)
    write_number(memory.live.index(slot), live)
    thread_barrier()
    mbarrier.arrive(memory.item_full.index(slot), count=1)


@gluon.jit
def next_item(memory, count):
    """Return item number `count` of the program, and its numbers of masked chunks and of live chunks."""
    slot = count % AHEAD
    mbarrier.wait(memory.item_full.index(slot), count // AHEAD % 2)
    item = read_number(memory.items.index(slot))
    masked = read_number(memory.masked.index(slot))
    live = read_number(memory.live.index(slot))
    thread_barrier()
    mbarrier.arrive(memory.item_empty.index(slot), count=1)
    return item, masked, live


@gluon.jit
def place_of(item, SHAPE: gl.constexpr):
    """Return the line and the query tile of an item.

    If there are lists, the last tiles of a few lines come first, because under a causal mask they take longest. Keys
    and values of these lines must fit into L2.
    """
    if SHAPE.is_listed:
        EACH: gl.constexpr = SHAPE.together * SHAPE.query_tiles
        first = item // EACH * SHAPE.together
        lines = gl.minimum(SHAPE.together, SHAPE.lines - first)
        line = first + item % EACH % lines
        tile = SHAPE.query_tiles - 1 - item % EACH // lines
    else:
        line = item // SHAPE.query_tiles
        tile = item % SHAPE.query_tiles
    return line, tile


@gluon.jit
def load_parts(matrix, matrix_more, full, row, column, ring, ring_more, slot, HAS_MORE: gl.constexpr):
    """Start copying both parts of a tile into their slots."""
    WIDTH: gl.constexpr = ring.shape[2]
    WHOLE: gl.constexpr = WIDTH + ring_more.shape[2] if HAS_MORE else WIDTH
    BYTES: gl.constexpr = ring.shape[1] * WHOLE * ring.dtype.primitive_bitwidth // 8
    mbarrier.expect(full.index(slot), BYTES)
    tma_load(matrix, [row, column], full.index(slot), ring.index(slot))
    if HAS_MORE:
        tma_load(matrix_more, [row, column + WIDTH], full.index(slot), ring_more.index(slot))


@gluon.jit
def begin_item(memory, matrices, p_counts, item, count, FUNCTIONS: gl.constexpr, SHAPE: gl.constexpr):
    """Announce item number `count` of the program and load its queries.

    Returns its place, the index of its list, the number of full chunks in it, and the number of chunks.
    """
    QUERY_SLOTS: gl.constexpr = SHAPE.query_slots
    line, tile = place_of(item, SHAPE)
    place = FUNCTIONS.place(line)
    list_index = 0
    full = 0
    live = SHAPE.chunks
    if SHAPE.is_listed:
        list_index = FUNCTIONS.line_at(place) * SHAPE.query_tiles + tile
        full = gl.load(p_counts + list_index * 2)
        live = gl.load(p_counts + list_index * 2 + 1)
    announce(memory, count, item, live - full, live)
    slot = count % QUERY_SLOTS
    mbarrier.wait(memory.query_empty.index(slot), count // QUERY_SLOTS % 2 ^ 1)
    row, column = FUNCTIONS.query_at(place, tile * SHAPE.rows)
    load_parts(matrices.query, matrices.query_more, memory.query_full, row, column, memory.query, memory.query_more,
               slot, SHAPE.features_more > 0)
    return place, list_index, full, live


@gluon.jit
def chunk_at(p_tiles, list_index, walk, at, full, live, FUNCTIONS: gl.constexpr, SHAPE: gl.constexpr):
    """Return the chunk that is number `at` of an item."""
    chunk = at
    if SHAPE.is_listed:
        # Lists have full tiles first.
        listed = gl.where(at < live - full, at + full, at + full - live)
        chunk = FUNCTIONS.tile_at(p_tiles, list_index, walk, listed)
    return chunk


@gluon.jit
def load_chunk_keys(memory, matrices, place, chunk, number, FUNCTIONS: gl.constexpr, SHAPE: gl.constexpr):
    """Load the keys of a chunk, which is number `number` of the program, once their slot is free."""
    slot = number % SHAPE.slots
    mbarrier.wait(memory.key_empty.index(slot), number // SHAPE.slots % 2 ^ 1)
    if SHAPE.is_listed:
        write_number(memory.tiles.index(slot), chunk)
        thread_barrier()
    row, column = FUNCTIONS.key_at(place, chunk * SHAPE.chunk)
    load_parts(matrices.key, matrices.key_more, memory.key_full, row, column, memory.key, memory.key_more, slot,
               SHAPE.features_more > 0)


@gluon.jit
def load(memory, matrices, p_counts, p_tiles, p_counter, FUNCTIONS: gl.constexpr, SHAPE: gl.constexpr):
    """Take items, announce them, and load their queries, keys and values."""
    SLOTS: gl.constexpr = SHAPE.slots
    number = 0
    count = 0
    item = gl.program_id(0)
    while item < SHAPE.lines * SHAPE.query_tiles:
        place, list_index, full, live = begin_item(memory, matrices, p_counts, item, count, FUNCTIONS, SHAPE)
        walk = FUNCTIONS.walk(p_counts, p_tiles, list_index)
        following = item
        for at in range(gl.maximum(live, 1)):
            chunk = chunk_at(p_tiles, list_index, walk, at, full, live, FUNCTIONS, SHAPE)
            load_chunk_keys(memory, matrices, place, chunk, number, FUNCTIONS, SHAPE)
            slot = number % SLOTS
            mbarrier.wait(memory.value_empty.index(slot), number // SLOTS % 2 ^ 1)
            row, column = FUNCTIONS.value_at(place, chunk * SHAPE.chunk)
            load_parts(matrices.value, matrices.value_more, memory.value_full, row, column, memory.value,
                       memory.value_more, slot, SHAPE.columns_more > 0)
            number += 1
            if at == 0:
                # The first loads are under way while this waits for memory.
                following = gl.atomic_add(p_counter, 1, sem="relaxed") + gl.num_programs(0)
        count += 1
        item = following
    announce(memory, count, item, 0, 0)


@gluon.jit
def start_scores(memory, query, query_more, number, b_none, SHAPE: gl.constexpr):
    """Start the products of queries with chunk `number`."""
    slot = number % SHAPE.slots
    mbarrier.wait(memory.key_full.index(slot), number // SHAPE.slots % 2)
    if SHAPE.is_copied:
        fence_async_shared()
    b_products = warpgroup_mma(query, memory.key.index(slot).permute((1, 0)), b_none, use_acc=False, is_async=True)
    if SHAPE.features_more > 0:
        b_products = warpgroup_mma(query_more, memory.key_more.index(slot).permute((1, 0)), b_products, is_async=True)
    return b_products


@gluon.jit
def finish_scores(memory, arrays, place, numbers, b_products, number, at, masked, UNDER_WAY: gl.constexpr,
                  FUNCTIONS: gl.constexpr, SHAPE: gl.constexpr):
    """Return the scores of chunk `number`, which is number `at` of its item, and free its slot.

    It waits until all but UNDER_WAY products have completed. The first `masked` chunks of the item are masked.
    """
    CHUNK: gl.constexpr = SHAPE.chunk
    slot = number % SHAPE.slots
    chunk = at
    if SHAPE.is_listed:
        chunk = read_number(memory.tiles.index(slot))
    b_products = warpgroup_mma_wait(UNDER_WAY, deps=[b_products])
    r_k = chunk * CHUNK + gl.arange(0, CHUNK, gl.SliceLayout(0, b_products.type.layout))
    thread_barrier()
    mbarrier.arrive(memory.key_empty.index(slot), count=1)
    if SHAPE.masks == "some":
        # A branch, not two loops: in two loops the compiler would pack and unpack weights in each step.
        if at < masked:
            b_score = FUNCTIONS.score(numbers, arrays, place, r_k, b_products)
        else:
            b_score = FUNCTIONS.plain_score(numbers, arrays, place, r_k, b_products)
    elif SHAPE.masks == "all":
        b_score = FUNCTIONS.score(numbers, arrays, place, r_k, b_products)
    else:
        b_score = FUNCTIONS.plain_score(numbers, arrays, place, r_k, b_products)
    return b_score


@gluon.jit
def weigh(memory, b_score, b_largest, number, GROUP: gl.constexpr, SHAPE: gl.constexpr):
    """Return the weights of a chunk relative to the largest score, and that score as an exponent of 2."""
    # Rows that have seen no key yet count from 0.
    b_base = gl.where(b_largest <= SHAPE.no_key, 0.0, b_largest) * SHAPE.unit
    if SHAPE.takes_turns:
        # One group computes exponentials while the other one's products are in flight.
        mbarrier.wait(memory.turns.index(GROUP), number % 2 ^ (1 - GROUP))
    b_power = gl.exp2(b_score * SHAPE.unit - gl.expand_dims(b_base, 1))
    if SHAPE.takes_turns:
        # The compiler puts a barrier between the wait and this arrival, because both use one allocation. Without it, a
        # slow warp might wait for a phase that has passed.
        mbarrier.arrive(memory.turns.index(1 - GROUP), count=1)
    return b_power, b_base


@gluon.jit
def start_values(memory, b_weights, b_output, b_more, number, SHAPE: gl.constexpr):
    """Start the products of weights with the values of chunk `number`."""
    slot = number % SHAPE.slots
    mbarrier.wait(memory.value_full.index(slot), number // SHAPE.slots % 2)
    if SHAPE.is_copied:
        fence_async_shared()
    b_output = warpgroup_mma(b_weights, memory.value.index(slot), b_output, is_async=True)
    if SHAPE.columns_more > 0:
        M: gl.constexpr = gl.DotOperandLayout(0, b_more.type.layout, 2)
        # The fragments of weights do not depend on the number of columns, so no data moves.
        b_more = warpgroup_mma(gl.convert_layout(b_weights, M), memory.value_more.index(slot), b_more, is_async=True)
    return b_output, b_more


@gluon.jit
def finish_values(memory, b_output, b_more, number, SHAPE: gl.constexpr):
    """Return the sums of value products once all have completed, and free the slot of chunk `number`."""
    if SHAPE.columns_more > 0:
        b_output, b_more = warpgroup_mma_wait(0, deps=[b_output, b_more])
    else:
        b_output = warpgroup_mma_wait(0, deps=[b_output])
    thread_barrier()
    mbarrier.arrive(memory.value_empty.index(number % SHAPE.slots), count=1)
    return b_output, b_more


@gluon.jit
def scaled(b_tile, b_factor):
    """Return a tile times a factor of each row."""
    R: gl.constexpr = gl.SliceLayout(1, b_tile.type.layout)
    return b_tile * gl.expand_dims(gl.convert_layout(b_factor, R), 1)


@gluon.jit
def step(memory, arrays, place, numbers, query, query_more, number, at, masked, b_output, b_more, b_weights,
         b_largest, b_total, b_none, GROUP: gl.constexpr, FUNCTIONS: gl.constexpr, SHAPE: gl.constexpr):
    """Compute scores and weights of chunk `number`, and add the value product of the chunk before."""
    R: gl.constexpr = b_output.type.layout
    P: gl.constexpr = gl.SliceLayout(1, b_total.type.layout)
    b_products = start_scores(memory, query, query_more, number, b_none, SHAPE)
    b_output, b_more = start_values(memory, b_weights, b_output, b_more, number - 1, SHAPE)
    VALUE_PARTS: gl.constexpr = 2 if SHAPE.columns_more > 0 else 1
    b_score = finish_scores(memory, arrays, place, numbers, b_products, number, at, masked, VALUE_PARTS, FUNCTIONS,
                            SHAPE)
    b_last = b_largest
    b_largest = gl.maximum(b_last, gl.max(b_score, 1))
    b_power, b_base = weigh(memory, b_score, b_largest, number, GROUP, SHAPE)
    b_shrink = gl.exp2(b_last * SHAPE.unit - b_base)
    b_total = b_total * gl.expand_dims(gl.convert_layout(b_shrink, P), 1) + partial_sums(b_power)
    b_weights = gl.convert_layout(b_power.to(memory.value.dtype), gl.DotOperandLayout(0, R, 2))
    b_output, b_more = finish_values(memory, b_output, b_more, number - 1, SHAPE)
    b_output = scaled(b_output, b_shrink)
    if SHAPE.columns_more > 0:
        b_more = scaled(b_more, b_shrink)
    return b_output, b_more, b_weights, b_largest, b_total


@gluon.jit
def free_query(memory, count, SHAPE: gl.constexpr):
    """Wait until the group's results have left shared memory, and free the queries' slot of item `count`."""
    tma.store_wait(0)
    thread_barrier()
    mbarrier.arrive(memory.query_empty.index(count % SHAPE.query_slots), count=1)


@gluon.jit
def attend(memory, arrays, place, numbers, query, query_more, number, count, masked, live, b_none,
           GROUP: gl.constexpr, FUNCTIONS: gl.constexpr, SHAPE: gl.constexpr):
    """Attend to the chunks of item `count`, of which `number` is the first.

    Returns the sums of weights times values in both parts and, for each row, the largest score and the sum of weights.
    """
    HALF: gl.constexpr = SHAPE.rows // 2
    COLUMNS: gl.constexpr = SHAPE.columns
    COLUMNS_MORE: gl.constexpr = SHAPE.columns_more
    S: gl.constexpr = b_none.type.layout
    R: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, COLUMNS, 16])
    b_products = start_scores(memory, query, query_more, number, b_none, SHAPE)
    if SHAPE.staging == "query" and SHAPE.query_slots > 1:
        if count > 0:
            free_query(memory, count - 1, SHAPE)
    # The first chunk is computed with masks, so that there is no branch before the loop.
    masked = gl.maximum(masked, 1)
    b_score = finish_scores(memory, arrays, place, numbers, b_products, number, 0, masked, 0, FUNCTIONS, SHAPE)
    b_largest = gl.max(b_score, 1)
    b_power, _b_base = weigh(memory, b_score, b_largest, number, GROUP, SHAPE)
    b_total = partial_sums(b_power)
    b_weights = gl.convert_layout(b_power.to(memory.value.dtype), gl.DotOperandLayout(0, R, 2))
    b_output = gl.zeros([HALF, COLUMNS], gl.float32, R)
    b_more = 0
    if COLUMNS_MORE > 0:
        M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, COLUMNS_MORE, 16])
        b_more = gl.zeros([HALF, COLUMNS_MORE], gl.float32, M)
    visits = gl.maximum(live, 1)
    for at in range(1, visits):
        b_output, b_more, b_weights, b_largest, b_total = step(
            memory, arrays, place, numbers, query, query_more, number + at, at, masked, b_output, b_more, b_weights,
            b_largest, b_total, b_none, GROUP, FUNCTIONS, SHAPE)
    number += visits
    b_output, b_more = start_values(memory, b_weights, b_output, b_more, number - 1, SHAPE)
    b_output, b_more = finish_values(memory, b_output, b_more, number - 1, SHAPE)
    return b_output, b_more, b_largest, gl.convert_layout(gl.sum(b_total, 1), gl.SliceLayout(1, S))


@gluon.jit
def with_extras(extras, b_largest, b_sum, is_empty, SHAPE: gl.constexpr):
    """Return the factor of each row's sum of values, and its log-sum-exp, with logits without values.

    `is_empty` says which rows have seen no key. Their factors are 0, unless a logit is NaN.
    """
    b_last = gl.where(is_empty, float("-inf"), b_largest * SHAPE.unit)
    b_top = b_last
    for i in gl.static_range(len(extras)):
        b_top = gl.maximum(b_top, extras[i])
    b_top = gl.where(b_top == float("-inf"), 0.0, b_top)
    b_shrink = gl.exp2(b_last - b_top)
    b_total = gl.where(is_empty, 0.0, b_sum * b_shrink)
    for i in gl.static_range(len(extras)):
        b_total += gl.exp2(extras[i] - b_top)
    b_factor = gl.where(is_empty & (b_total == b_total), 0.0, b_shrink / b_total)
    return b_factor, gl.where(b_total == 0, float("-inf"), (b_top + gl.log2(b_total)) * LN_2)


@gluon.jit
def finish_item(memory, matrices, p_output, p_log_sum, arrays, place, numbers, r_q, first, count, live, b_output,
                b_more, b_largest, b_sum, GROUP: gl.constexpr, FUNCTIONS: gl.constexpr, SHAPE: gl.constexpr):
    """Store the group's results and log-sum-exps of an item whose first query is `first`, and free its queries.

    `b_output` and `b_more` are the sums of weights times values, see `attend`.
    """
    COLUMNS: gl.constexpr = SHAPE.columns
    COLUMNS_MORE: gl.constexpr = SHAPE.columns_more
    # Rows without keys are 0.
    is_empty = (b_sum == 0) | (live == 0)
    if SHAPE.has_extras:
        b_factor, b_log_sum = with_extras(FUNCTIONS.extras(numbers, arrays, place), b_largest, b_sum, is_empty, SHAPE)
    else:
        b_factor = gl.where(is_empty, 0.0, 1.0 / b_sum)
    if SHAPE.has_weight:
        b_weight = FUNCTIONS.weight(numbers, arrays, place)
    else:
        b_weight = gl.full_like(b_factor, 1.0)
    # Results are staged in the slot of the item's queries, or in a buffer that the last item's results have left.
    if SHAPE.staging == "own":
        free_query(memory, count, SHAPE)
    elif SHAPE.staging == "none":
        thread_barrier()
        mbarrier.arrive(memory.query_empty.index(count % SHAPE.query_slots), count=1)
    stage(memory, p_output, b_output, b_factor, b_weight, place, first, count, 0, memory.staging, GROUP, FUNCTIONS,
          SHAPE)
    if COLUMNS_MORE > 0:
        stage(memory, p_output, b_more, b_factor, b_weight, place, first, count, COLUMNS, memory.staging_more,
              GROUP, FUNCTIONS, SHAPE)
    if SHAPE.staging != "none":
        fence_async_shared()
        thread_barrier()
        row, column = FUNCTIONS.output_at(place, first)
        tma_store(matrices.output, [row, column], staging_of(memory.staging, count, GROUP, SHAPE))
        if COLUMNS_MORE > 0:
            tma_store(matrices.output_more, [row, column + COLUMNS],
                      staging_of(memory.staging_more, count, GROUP, SHAPE))
    if SHAPE.staging == "query" and SHAPE.query_slots == 1:
        free_query(memory, count, SHAPE)
    if not SHAPE.has_extras:
        b_log_sum = gl.where(is_empty, float("-inf"), (b_largest * SHAPE.unit + gl.log2(b_sum)) * LN_2)
    gl.store(p_log_sum + (FUNCTIONS.row_at(place) + r_q), b_log_sum)


@gluon.jit
def compute(memory, matrices, p_output, p_log_sum, arrays, GROUP: gl.constexpr, FUNCTIONS: gl.constexpr,
            SHAPE: gl.constexpr):
    """Compute the results of 64 queries of each item."""
    HALF: gl.constexpr = SHAPE.rows // 2
    CHUNK: gl.constexpr = SHAPE.chunk
    # A product instruction sums 32 bytes of each operand.
    DEPTH: gl.constexpr = 256 // memory.query.dtype.primitive_bitwidth
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, CHUNK, DEPTH])
    b_none = gl.zeros([HALF, CHUNK], gl.float32, S)
    number = 0
    count = 0
    item, masked, live = next_item(memory, count)
    while item < SHAPE.lines * SHAPE.query_tiles:
        line, tile = place_of(item, SHAPE)
        place = FUNCTIONS.place(line)
        first = tile * SHAPE.rows + GROUP * HALF
        r_q = first + gl.arange(0, HALF, gl.SliceLayout(1, S))
        numbers = FUNCTIONS.per_query(arrays, place, r_q)
        slot = count % SHAPE.query_slots
        mbarrier.wait(memory.query_full.index(slot), count // SHAPE.query_slots % 2)
        query = memory.query.index(slot).slice(GROUP * HALF, HALF)
        query_more = memory.query_more.index(slot).slice(GROUP * HALF, HALF)
        b_output, b_more, b_largest, b_sum = attend(memory, arrays, place, numbers, query, query_more, number, count,
                                                    masked, live, b_none, GROUP, FUNCTIONS, SHAPE)
        number += gl.maximum(live, 1)
        finish_item(memory, matrices, p_output, p_log_sum, arrays, place, numbers, r_q, first, count, live, b_output,
                    b_more, b_largest, b_sum, GROUP, FUNCTIONS, SHAPE)
        count += 1
        item, masked, live = next_item(memory, count)
    if SHAPE.staging != "none":
        tma.store_wait(0)


@gluon.jit
def staging_of(staging, count, GROUP: gl.constexpr, SHAPE: gl.constexpr):
    """Return the buffer in which a group's results of an item are staged."""
    HALF: gl.constexpr = SHAPE.rows // 2
    slot = 0
    if SHAPE.staging == "query":
        slot = count % SHAPE.query_slots
    return staging.index(slot).slice(GROUP * HALF, HALF)


@gluon.jit
def stage(memory, p_output, b_output, b_factor, b_weight, place, first, count, COLUMN: gl.constexpr, staging,
          GROUP: gl.constexpr, FUNCTIONS: gl.constexpr, SHAPE: gl.constexpr):
    """Scale one part of an item's results, and stage or store it. COLUMN is the part's first column."""
    HALF: gl.constexpr = SHAPE.rows // 2
    WIDTH: gl.constexpr = b_output.shape[1]
    R: gl.constexpr = b_output.type.layout
    b_norm = gl.expand_dims(gl.convert_layout(b_factor, gl.SliceLayout(1, R)), 1)
    # A selection, not a product: an unseen value may be NaN.
    b_output = gl.where(b_norm == 0.0, 0.0, b_output * b_norm)
    if SHAPE.has_weight:
        b_output = scaled(b_output, b_weight)
    if SHAPE.staging == "none":
        # Four threads have 32 contiguous bytes.
        r_q = first + gl.arange(0, HALF, gl.SliceLayout(1, R))
        r_c = COLUMN + gl.arange(0, WIDTH, gl.SliceLayout(0, R))
        gl.store(p_output + FUNCTIONS.offsets(place, r_q, r_c), b_output)
    else:
        staging_of(staging, count, GROUP, SHAPE).store(b_output.to(staging.dtype))


@gluon.jit
def streamed_forward(matrices, p_output, arrays, p_counts, p_tiles, p_log_sum, p_counter, FUNCTIONS: gl.constexpr,
                     SHAPE: gl.constexpr):
    """Compute results and log-sum-exps of the program's items.

    `arrays` are pointers to the arrays that the generated functions read. `p_counter` counts the items that programs
    have taken, apart from the first item of each.
    """
    SLOTS: gl.constexpr = SHAPE.slots
    QUERY_SLOTS: gl.constexpr = SHAPE.query_slots
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    query_ring, query_more = make_ring(matrices.query, matrices.query_more, QUERY_SLOTS, SHAPE.rows,
                                       SHAPE.features_more > 0)
    key_ring, key_more = make_ring(matrices.key, matrices.key_more, SLOTS, SHAPE.chunk, SHAPE.features_more > 0)
    value_ring, value_more = make_ring(matrices.value, matrices.value_more, SLOTS, SHAPE.chunk, SHAPE.columns_more > 0)
    staging = query_ring
    staging_more = query_more
    if SHAPE.staging == "own":
        staging, staging_more = make_ring(matrices.output, matrices.output_more, 1, SHAPE.rows, SHAPE.columns_more > 0)
    items = gl.allocate_shared_memory(gl.int32, [AHEAD, 1], PLAIN)
    masked = gl.allocate_shared_memory(gl.int32, [AHEAD, 1], PLAIN)
    live = gl.allocate_shared_memory(gl.int32, [AHEAD, 1], PLAIN)
    tiles = items
    if SHAPE.is_listed:
        tiles = gl.allocate_shared_memory(gl.int32, [SLOTS, 1], PLAIN)
    item_full = make_barriers(AHEAD, 1)
    turns = item_full
    if SHAPE.takes_turns:
        turns = make_barriers(2, 1)
    memory = ForwardMemory(
        query_ring, query_more, key_ring, key_more, value_ring, value_more, staging, staging_more, tiles, items,
        masked, live, make_barriers(QUERY_SLOTS, 1), make_barriers(QUERY_SLOTS, 2), make_barriers(SLOTS, 1),
        make_barriers(SLOTS, 2), make_barriers(SLOTS, 1), make_barriers(SLOTS, 2), item_full, make_barriers(AHEAD, 2),
        turns,
    )
    fence_async_shared()
    thread_barrier()
    gl.warp_specialize(
        [
            (compute, (memory, matrices, p_output, p_log_sum, arrays, 0, FUNCTIONS, SHAPE)),
            (compute, (memory, matrices, p_output, p_log_sum, arrays, 1, FUNCTIONS, SHAPE)),
            (load, (memory, matrices, p_counts, p_tiles, p_counter, FUNCTIONS, SHAPE)),
        ],
        [4, 1],
        [240, FEW_REGISTERS],
    )


@gluon.jit
def make_ring(matrix, matrix_more, SLOTS: gl.constexpr, ROWS: gl.constexpr, HAS_MORE: gl.constexpr):
    """Return the slots of both parts of tiles."""
    ring = gl.allocate_shared_memory(matrix.dtype, [SLOTS, ROWS, matrix.block_shape[1]], matrix.layout)
    ring_more = ring
    if HAS_MORE:
        ring_more = gl.allocate_shared_memory(matrix.dtype, [SLOTS, ROWS, matrix_more.block_shape[1]],
                                              matrix_more.layout)
    return ring, ring_more
