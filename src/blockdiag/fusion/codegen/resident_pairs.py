"""Gluon source of the Hopper "rows" kernel that also accumulates the gradient of its resident bias.

This one is for narrow heads and for few keys. Two extra warps compute delta from tiles of results and of cotangents.
Warp groups process their keys in chunks. One group hands its half of the query gradient to the other, which adds both
halves, and the two extra warps write the sum. The first scores of a round may start before the previous round ends.

See resident_pairs_writer.py for the shared parts, and resident_backward.py for the separate kernels of rows and
columns.
"""

import jax.numpy as jnp

from blockdiag.fusion.codegen.backward import gradient_dims
from blockdiag.fusion.codegen.expressions import Value
from blockdiag.fusion.codegen.gluon import HopperKernel, gluon_source, print_function
from blockdiag.fusion.codegen.kernels import LOG2_E, Output, Source, cells_of
from blockdiag.fusion.codegen.resident_pairs_wide import WidePairs, print_wide
from blockdiag.fusion.codegen.resident_pairs_writer import NAME, OWN, SLOTS, PairsWriter
from blockdiag.fusion.codegen.resident_writer import print_share
from blockdiag.fusion.ir.layout import layout_of, shape_of
from blockdiag.fusion.ir.linear_terms import factor_in
from blockdiag.fusion.ir.tree import Region
from blockdiag.fusion.lowering.hopper import SHARED_BYTES, Place, place_of
from blockdiag.fusion.lowering.resident_schedule import CHUNK, Resident, resident, rounds_each
from blockdiag.fusion.lowering.tile_program import value_labels

_MOST_SLOTS = 8
_PIECE = 8
# The number of multiprocessors of an H100 or H200 SXM.
_USUAL_MULTIPROCESSORS = 132
# Each program writes a partial gradient of the bias in float32, of at most 64 KiB.
_MOST_PROGRAMS = 4 * _USUAL_MULTIPROCESSORS
_MEMORY = (
    "own_tiles, own_output, chunk_scores, chunk_slopes, lines, of_keys, half, held, own_full, own_empty, lines_full, "
    "chunk_full, chunk_empty, half_full, half_empty, grads_full, held_full"
)


class _Pairs(PairsWriter):
    """Writer of the kernel's functions, see `PairsWriter`.

    Attributes:
        chunks_each: the number of chunks per group and round.
        slots: the number of slots for chunks.
        is_ahead: whether the first scores of a round start before the previous round ends.
    """

    HELPERS = "forgotten, free_slot, rounded_product, widened"
    INPUTS = ("output",)
    # With fewer warps, the groups would wait for delta.
    GATHERING = 2

    def __init__(self, region: Region, plan: Resident, place: Place, factor: float) -> None:
        super().__init__(region, plan, CHUNK, place, factor)
        chunks = self.keys // CHUNK
        self.chunks_each = chunks // 2

        def slots(own_slots: int) -> int:
            return _slots(plan.width, self.keys, self.wide_keys, own_slots)

        # One more slot for query tiles, if chunks of the next round still have room.
        self.own_slots = SLOTS + 1 if slots(SLOTS + 1) >= min(slots(SLOTS), chunks + 2) else SLOTS
        self.slots = slots(self.own_slots)
        self.is_ahead = self.slots >= chunks + 2 or self.chunks_each > 1


def _slots(width: int, keys: int, wide_keys: int, own_slots: int) -> int:
    """Return how many chunks of keys and values fit; fewer than a round has mean that the wide kernel must be used.

    The number is even, so that each slot belongs to one group. A group that waited only for every second filling of a
    slot could not tell it from the filling before, because barriers only have a phase bit.
    """
    tile, part = OWN * width * 2, 2 * CHUNK * width * 2
    once = OWN * keys * 2 + OWN * width * 4 + own_slots * (3 * tile + 2 * OWN * 4 + wide_keys * 4)
    return min(2 * keys // CHUNK, (SHARED_BYTES - once) // part // 2 * 2, _MOST_SLOTS)


def _compute(own: _Pairs) -> None:
    """Print the function of a compute warp group."""
    emit, plan = own.emit, own.plan
    arrays = f"{_MEMORY}, d_query{_pointers(own)}"
    print_function(own, f"def compute({arrays}, ROUNDS: gl.constexpr, GROUP: gl.constexpr):")
    emit(f'"""{own.keys // 2} keys of each round."""')
    emit(f"S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, {CHUNK}, 16])")
    emit(f"D: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, {plan.width}, 16])")
    emit("P: gl.constexpr = gl.DotOperandLayout(0, D, 2)")
    emit("dtype: gl.constexpr = own_tiles.dtype")
    print_share(own, own.tiles_of)
    own.indices("cell", None)
    emit(f"r_q = own * {OWN} + gl.arange(0, {OWN}, gl.SliceLayout(1, S))")
    for chunk in range(own.chunks_each):
        emit(f"bias_sum{chunk} = gl.zeros([{OWN}, {CHUNK}], gl.float32, S)")
    emit("mbarrier.wait(held_full.index(0), 0)")
    if own.is_ahead:
        _begin_round(own, "0", "first")
        emit("scores0 = warpgroup_mma_wait(0, deps=[scores0])")
    own.writer.loop("for round in range(count):", lambda: _round(own))
    own.store_bias({chunk * CHUNK: f"bias_sum{chunk}" for chunk in range(own.chunks_each)})
    emit()
    emit()


def _pointers(own: _Pairs) -> str:
    """Return the pointer parameters of the arrays that compute groups access directly."""
    return f"{own.parameters()}, p_{own.array('held', 'grad')}"


def _round(own: _Pairs) -> None:
    emit, plan = own.emit, own.plan
    count = own.chunks_each
    if not own.is_ahead:
        _begin_round(own, "round", "(first + round)")
    own.indices(None, "(first + round)")
    known = own.read(("row", "scalar")) if count > 1 else {}
    emit(f"own_slot = round % {own.own_slots}")
    for i, name in enumerate(("base", "delta")):
        emit(f"{name} = lines.index(own_slot * 2 + {i}).load(gl.SliceLayout(1, S))[:, None]")
    emit(f"sum_query = gl.zeros([{OWN}, {plan.width}], gl.float32, D)")
    is_early = plan.width <= 64
    for chunk in range(count):
        if chunk == 0:
            _find_chunk(own, 0, "round")
        elif not is_early:
            _begin_scores(own, chunk, known, "round")
        _begin_slopes(own, chunk)
        if is_early and chunk + 1 < count:
            _begin_scores(own, chunk + 1, known, "round")
        _chunk(own, chunk, 2 if is_early and chunk + 1 < count else 1)
    if own.is_ahead:
        _begin_round(own, "(round + 1)", "(first + gl.minimum(round + 1, count - 1))")
        own.indices(None, "(first + round)")
    _finish(own)
    if own.is_ahead:
        # The compiler does not support a product in flight across loop iterations.
        emit("scores0 = warpgroup_mma_wait(0, deps=[scores0])")


def _begin_round(own: _Pairs, number: str, through: str) -> None:
    """Print the wait for a round's tiles, and the start of its first scores."""
    own.indices(None, through)
    known = own.read(("row", "scalar"))
    own.emit(f"own_slot = {number} % {own.own_slots}")
    for full in ("own_full", "lines_full"):
        own.emit(f"mbarrier.wait({full}.index(own_slot), {number} // {own.own_slots} % 2)")
    _begin_scores(own, 0, known, number)


def _begin_scores(own: _Pairs, chunk: int, known: dict[int, Value], number: str) -> None:
    """Print the start of the product that gives the scores of a chunk."""
    emit, plan = own.emit, own.plan
    held = own.region.leaves.index(plan.held)
    first_key = f"GROUP * {own.keys // 2} + {chunk * CHUNK}"
    columns = {}
    if own.counts_keys:
        emit(f"r_k = {first_key} + gl.arange(0, {CHUNK}, gl.SliceLayout(0, S))")
        columns = own.read(("column",), counted=True)
    piece = f"held.index(forgotten(({first_key}) // {CHUNK}))"
    emit(f"leaf{held} = widened({piece}.load(S))")
    tiles = own.tiles({**known, **columns, held: Value(f"leaf{held}", (OWN, CHUNK))})
    start = own.evaluate(plan.others, tiles, f"x{chunk}_").name
    if plan.of_keys is not None:
        lines = f"of_keys.index(own_slot).slice({first_key}, {CHUNK})"
        start += f" + {lines}.load(gl.SliceLayout(0, S))[None, :]"
    emit(f"start = {start}")
    _find_chunk(own, chunk, number)
    emit(f"mbarrier.wait(chunk_full.index(at{chunk} % {own.slots}), at{chunk} // {own.slots} % 2)")
    emit("queries = own_tiles.index(forgotten(own_slot) * 2)")
    emit(f"scores{chunk} = warpgroup_mma(queries, keys{chunk}.permute((1, 0)), start, is_async=True)")


def _find_chunk(own: _Pairs, chunk: int, number: str) -> None:
    """Print the position of a chunk in the sequence of chunks, in which the groups alternate."""
    own.emit(f"at{chunk} = forgotten({number}) * {2 * own.chunks_each} + {2 * chunk} + GROUP")
    own.emit(f"keys{chunk} = chunk_scores.index(at{chunk} % {own.slots})")


def _begin_slopes(own: _Pairs, chunk: int) -> None:
    emit = own.emit
    emit(f"values = chunk_slopes.index(at{chunk} % {own.slots})")
    emit(f"start = gl.zeros([{OWN}, {CHUNK}], gl.float32, S) - delta")
    emit("cotangents = own_tiles.index(forgotten(own_slot) * 2 + 1)")
    emit(f"slopes{chunk} = warpgroup_mma(cotangents, values.permute((1, 0)), start, is_async=True)")


def _chunk(own: _Pairs, chunk: int, later: int) -> None:
    """Print the probabilities and slopes of a chunk, and the start of its gradient product.

    Args:
        later: the number of products started after its scores.
    """
    emit, plan = own.emit, own.plan
    if chunk > 0 or not own.is_ahead:
        emit(f"scores{chunk} = warpgroup_mma_wait({later}, deps=[scores{chunk}])")
    if chunk > 0:
        emit("# The last chunk's products are done, too.")
        emit("thread_barrier()")
        emit(f"free_slot(chunk_empty, at{chunk - 1}, {own.slots})")
    emit(f"power = gl.exp2(scores{chunk} * {plan.unit * LOG2_E} - base)")
    emit(f"slopes{chunk} = warpgroup_mma_wait({later - 1}, deps=[slopes{chunk}])")
    if chunk == own.chunks_each - 1:
        emit("thread_barrier()")
        emit(f"free_slot(own_empty, round, {own.own_slots})")
    emit(f"slopes = rounded_product(slopes{chunk}, power)")
    emit(f"bias_sum{chunk} += slopes")
    first = "use_acc=False, " if chunk == 0 else ""
    emit("factor = gl.convert_layout(slopes.to(dtype), P)")
    emit(f"sum_query = warpgroup_mma(factor, keys{chunk}, sum_query, {first}is_async=True)")


def _finish(own: _Pairs) -> None:
    """Print the exchange of sums: one group hands its half to the other, which stages the result in the same memory."""
    emit = own.emit
    last = own.chunks_each - 1
    half = "half.index(0)"
    emit(f"sum_query = warpgroup_mma_wait({1 if own.is_ahead else 0}, deps=[sum_query])")
    emit("thread_barrier()")
    emit(f"free_slot(chunk_empty, round * {2 * own.chunks_each} + {2 * last} + GROUP, {own.slots})")
    emit("if GROUP == 1:")
    own.writer.depth += 1
    emit("mbarrier.wait(half_empty.index(0), round % 2 ^ 1)")
    emit(f"{half}.store(sum_query)")
    emit("thread_barrier()")
    emit("mbarrier.arrive(half_full.index(0), count=1)")
    own.writer.depth -= 1
    emit("else:")
    own.writer.depth += 1
    emit("mbarrier.wait(half_full.index(0), round % 2)")
    emit(f"sum_query += {half}.load(D)")
    emit("thread_barrier()")
    emit(f"gradient = reinterpret({half}, dtype, [2, {OWN}, {own.plan.width}], d_query.layout).index(0)")
    emit(f"gradient.store((sum_query * {own.plan.unit}).to(dtype))")
    emit("fence_async_shared()")
    emit("thread_barrier()")
    emit("mbarrier.arrive(grads_full.index(0), count=1)")
    own.writer.depth -= 1


def _load(own: _Pairs) -> None:
    """Print the function of the warp that loads tiles."""
    emit = own.emit
    print_function(own, f"def load({_MEMORY}, query, cotangent, output, key, value, bias, ROUNDS: gl.constexpr):")
    emit('"""Fills the slots of tiles, for all rounds."""')
    print_share(own, own.tiles_of)
    own.indices("cell", None)
    emit(f"mbarrier.expect(held_full.index(0), {OWN * own.keys * 2})")
    for piece in range(own.keys // CHUNK):
        at = own.at(own.places["held"], f"own * {OWN}", piece * CHUNK)
        emit(f"tma_load(bias, [{at}], held_full.index(0), held.index({piece}))")
    parts = 2 * own.chunks_each
    # With a spare slot, query tiles are loaded half a round earlier; the tiles that they replace are done by then.
    is_early = own.own_slots > SLOTS
    if is_early:
        own.indices(None, "first")
        _load_own(own, "0")

    def body() -> None:
        emit(f"round = step // {parts}")
        if is_early:
            emit(f"if (step % {parts} == {own.chunks_each}) & (round + 1 < count):")
            own.writer.depth += 1
            own.indices(None, "(first + round + 1)")
            _load_own(own, "(round + 1)")
            own.writer.depth -= 1
            own.indices(None, "(first + round)")
        else:
            own.indices(None, "(first + round)")
            emit(f"if step % {parts} == 0:")
            own.writer.depth += 1
            _load_own(own, "round")
            own.writer.depth -= 1
        emit(f"slot = step % {own.slots}")
        emit(f"mbarrier.wait(chunk_empty.index(slot), step // {own.slots} % 2 ^ 1)")
        emit(f"first_key = step % {parts} // 2 * {CHUNK} + step % 2 * {own.keys // 2}")
        places = {"key": "chunk_scores.index(slot)", "value": "chunk_slopes.index(slot)"}
        own.load_tiles("chunk_full.index(slot)", places, "first_key", CHUNK)

    own.writer.loop(f"for step in range(count * {parts}):", body)
    if own.is_ahead:
        emit("# The scores of one more round start on arbitrary data, and are not used.")
        emit(f"slot = count % {own.own_slots}")
        emit(f"mbarrier.wait(own_empty.index(slot), count // {own.own_slots} % 2 ^ 1)")
        emit("mbarrier.arrive(own_full.index(slot), count=1)")
        for group in range(2):
            at = f"(count * {parts} + {group})"
            emit(f"mbarrier.wait(chunk_empty.index({at} % {own.slots}), {at} // {own.slots} % 2 ^ 1)")
            emit(f"mbarrier.arrive(chunk_full.index({at} % {own.slots}), count=1)")
    emit()
    emit()


def _load_own(own: _Pairs, number: str) -> None:
    """Print the loads of a round's query tiles."""
    emit = own.emit
    emit(f"slot = {number} % {own.own_slots}")
    emit(f"mbarrier.wait(own_empty.index(slot), {number} // {own.own_slots} % 2 ^ 1)")
    places = {
        "query": "own_tiles.index(slot * 2)", "cotangent": "own_tiles.index(slot * 2 + 1)",
        "output": "own_output.index(slot)",
    }  # fmt: skip
    own.load_tiles("own_full.index(slot)", places, f"own * {OWN}", OWN)


def _gather(own: _Pairs) -> None:
    """Print the function of the warps that prepare per-query and per-key vectors, and write gradients."""
    emit = own.emit
    print_function(own, f"def gather({_MEMORY}, d_query{own.parameters()}, p_log_sum, p_delta, ROUNDS: gl.constexpr):")
    emit('"""Fills the slots of lines, for all rounds, and empties that of gradients."""')
    print_share(own, own.tiles_of)
    own.indices("cell", None)

    def before() -> None:
        emit(f"mbarrier.wait(own_full.index(slot), round // {own.own_slots} % 2)")
        _make_delta(own)

    def after() -> None:
        # `gather_lines` has printed a barrier of these warps since they read the tiles.
        emit("mbarrier.arrive(own_empty.index(slot), count=1)")

    def last() -> None:
        # The gradients of two rounds before, so that the next round's vectors do not wait for the end of this one.
        emit("if round > 1:")
        own.writer.depth += 1
        _leave(own, "round - 2")
        own.writer.depth -= 1

    own.gather_lines("slot * 2", "slot", before, after, last)
    if own.is_ahead:
        emit(f"mbarrier.arrive(lines_full.index(count % {own.own_slots}), count=1)")
    emit("if count > 1:")
    own.writer.depth += 1
    _leave(own, "count - 2")
    own.writer.depth -= 1
    _leave(own, "count - 1")
    emit()
    emit()


def _leave(own: _Pairs, number: str) -> None:
    """Print the store of a round's gradients, and the wait until their memory is free."""
    emit = own.emit
    emit(f"mbarrier.wait(grads_full.index(0), ({number}) % 2)")
    own.indices(None, f"(first + {number})")
    view = f"own_tiles.dtype, [2, {OWN}, {own.plan.width}], d_query.layout"
    emit(f"gradient = reinterpret(half.index(0), {view}).index(0)")
    emit(f"tma_store(d_query, [{own.at(own.place, f'own * {OWN}')}], gradient)")
    emit("tma.store_wait(0)")
    emit("thread_barrier()")
    emit("mbarrier.arrive(half_empty.index(0), count=1)")


def _make_delta(own: _Pairs) -> None:
    """Print the computation of delta, a few columns at a time, because these warps have few registers."""
    emit = own.emit
    rows = 32 * own.GATHERING
    emit(f"R: gl.constexpr = gl.BlockedLayout([1, {_PIECE}], [32, 1], [{own.GATHERING}, 1], [1, 0])")
    # Wide tiles have many pieces, whose addresses must be recomputed because there are no registers to hold them.
    cotangent = f"own_tiles.index({'slot' if own.plan.width <= 64 else 'forgotten(slot)'} * 2 + 1)"
    for row in range(0, OWN, rows):
        emit(f"delta = gl.zeros([{rows}], gl.float32, gl.SliceLayout(1, R))")
        for column in range(0, own.plan.width, _PIECE):
            piece = f"slice({row}, {rows}).slice({column}, {_PIECE}, dim=1).load(R)"
            emit(f"delta += gl.sum(widened({cotangent}.{piece}) * widened(own_output.index(slot).{piece}), 1)")
        emit(f"lines.index(slot * 2 + 1).slice({row}, {rows}).store(delta)")
        emit(f"o_q = own * {OWN} + {row} + gl.arange(0, {rows}, gl.SliceLayout(1, R))")
        emit(f"gl.store(p_delta + {own.writer.row_place()}, delta)")


def _entry(own: _Pairs) -> None:
    """Print the kernel function."""
    emit = own.emit
    width = own.plan.width
    pointers = f"{own.parameters()}, p_log_sum, p_delta, p_{own.array('held', 'grad')}"
    arrays = "query, cotangent, output, key, value, bias"
    print_function(own, f"def {NAME}({arrays}, d_query{pointers}, ROUNDS: gl.constexpr):")
    emit('"""One program: a tile of queries, and ROUNDS of the indices along which the bias is the same."""')
    memory = [("own_tiles", "query", 2 * own.own_slots, OWN), ("own_output", "output", own.own_slots, OWN)]
    memory += [(f"chunk_{kind}", name, own.slots, CHUNK) for kind, name in (("scores", "key"), ("slopes", "value"))]
    for name, array, slots, rows in memory:
        emit(f"{name} = gl.allocate_shared_memory(query.dtype, [{slots}, {rows}, {width}], {array}.layout)")
    emit(f"HALF: gl.constexpr = gl.SwizzledSharedLayout(8, 1, {width // 8}, [1, 0])")
    emit(f"half = gl.allocate_shared_memory(gl.float32, [1, {OWN}, {width}], HALF)")
    line = "gl.SwizzledSharedLayout(1, 1, 1, [0])"
    emit(f"lines = gl.allocate_shared_memory(gl.float32, [{2 * own.own_slots}, {OWN}], {line})")
    if own.plan.of_keys is None:
        emit("of_keys = lines")
    else:
        emit(f"of_keys = gl.allocate_shared_memory(gl.float32, [{own.own_slots}, {own.wide_keys}], {line})")
    held = f"[{own.keys // CHUNK}, {OWN}, {CHUNK}]"
    emit(f"held = gl.allocate_shared_memory(bias.dtype, {held}, bias.layout)")
    for name, count, arrivals in (
        ("own_full", own.own_slots, 1), ("own_empty", own.own_slots, 3), ("lines_full", own.own_slots, 1),
        ("chunk_full", own.slots, 1), ("chunk_empty", own.slots, 1), ("half_full", 1, 1), ("half_empty", 1, 1),
        ("grads_full", 1, 1), ("held_full", 1, 1),
    ):  # fmt: skip
        emit(f"{name} = make_barriers({count}, {arrivals})")
    emit("fence_async_shared()")
    emit("thread_barrier()")
    emit("gl.warp_specialize([")
    for group in range(2):
        emit(f"    (compute, ({_MEMORY}, d_query{_pointers(own)}, ROUNDS, {group})),")
    emit(f"    (load, ({_MEMORY}, {arrays}, ROUNDS)),")
    emit(f"    (gather, ({_MEMORY}, d_query{own.parameters()}, p_log_sum, p_delta, ROUNDS)),")
    # Computing delta takes registers, which the compute groups can spare because gradients are narrow.
    emit(f"], [4, 1, {own.GATHERING}], [232, 40, 40])")


def resident_pairs(region: Region) -> HopperKernel | None:
    """Return the kernel that replaces the "rows" and "pairs" kernels, None if it does not apply.

    It applies only if the resident schedule does, and the bias and the queries have gradients.

    Args:
        region: an arranged region.
    """
    plan = resident(region)
    if plan is None or region.sizes["k"] % (2 * CHUNK) or not (plan.held.has_gradient and plan.query.has_gradient):
        return None
    leaves, sizes, batch = region.leaves, region.sizes, set(region.batch)
    others = [x for x in leaves if x.has_gradient and x.role in ("row", "scalar")]
    factor = _factor(region, plan)
    if others or factor is None or set(plan.query.labels) != batch or set(value_labels(region)) != batch:
        return None
    dims = gradient_dims(plan.query, region.batch)
    if dims is None:
        return None
    shape = shape_of(dims, sizes)
    place = place_of(layout_of(shape, dims, sizes), shape, "q", plan.query.features, sizes)
    if place is None or plan.query.is_share:
        # The copy engine writes the gradient of the queries in their own dtype, so it must not be a float32 share.
        return None
    own = _Pairs(region, plan, place, factor)
    if own.slots < region.sizes["k"] // CHUNK:
        own = WidePairs(region, plan, place, factor)
        print_wide(own)
    else:
        _compute(own)
        _load(own)
        _gather(own)
        _entry(own)
    return _kernel(own, Output(own.array("query", "grad"), dims, shape, jnp.dtype(plan.query.source.dtype).name))


def _factor(region: Region, plan: Resident) -> float | None:
    """Return the factor of the bias in the scores, None if the bias is not an additive term."""
    assert region.score is not None
    return factor_in(region.score, plan.held)


def _bias_gradient(own: PairsWriter, parts: int) -> Output:
    """Return the output for the gradient of the bias.

    It has the layout of the bias if there is one part and the axes are in program order, else one axis for parts.
    """
    plan, sizes, name = own.plan, own.region.sizes, own.array("held", "grad")
    dims = gradient_dims(plan.held, plan.cell)
    order = [label for dim in dims or () if not isinstance(dim, int) for label in dim]
    if parts == 1 and dims is not None and order == [*plan.cell, "q", "k"]:
        return Output(name, dims, shape_of(dims, sizes), jnp.dtype(plan.held.gradient_dtype).name)
    labels = (*plan.cell, "part", "q", "k")
    sizes = sizes | {"part": parts}
    return Output(name, tuple((x,) for x in labels), tuple(sizes[x] for x in labels), "float32")


def _kernel(own: PairsWriter, d_query: Output) -> HopperKernel:
    region, plan = own.region, own.plan
    rounds, tiles = cells_of(region, plan.through), own.tiles_of * cells_of(region, plan.cell)
    # The number of parts of the bias gradient must be chosen before the GPU is known.
    each = rounds_each(rounds, tiles, _USUAL_MULTIPROCESSORS, _MOST_PROGRAMS)
    d_bias = _bias_gradient(own, -(-rounds // each))
    rows = (*region.batch, "q")
    delta = Output("delta", tuple((x,) for x in rows), tuple(region.sizes[x] for x in rows), "float32")
    names = [f"leaf{i}" for i, leaf in enumerate(region.leaves) if leaf.source.key is not None]
    source = Source(
        gluon_source(own.HELPERS, own.writer.lines),
        NAME,
        (*names, "value", "log_sum", "cotangent", *own.INPUTS),
        (d_query, d_bias, delta),
        (tiles, 1, 1),
    )
    pointers = (*(f"leaf{i}" for i in own.pointers), "log_sum", "delta", d_bias.name)
    moved = own.moved(d_query.name)
    return HopperKernel(source, moved, pointers, rounds, tiles, each)
