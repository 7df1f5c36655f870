"""Gluon source of the backward kernel by rows that also sums the gradient of the bias it keeps, for Hopper.

A program has a tile of queries of every round, so the gradient of its tile of the bias is a sum over the rounds: it
stays in registers. Two groups of four warps share each tile, each with half of the keys; sums over keys of one half are
handed to the group that writes queries' gradients. See resident.py, and kernels_resident_backward.py for the kernels
of rows and columns alone.
"""

import math
from collections.abc import Mapping
from typing import Literal

import jax.numpy as jnp

from blockdiag.fusion.emit import Value
from blockdiag.fusion.hopper import SHARED_BYTES, Place, place_of
from blockdiag.fusion.kernels import LOG2_E, Output, Source, Tile, Writer, cells_of
from blockdiag.fusion.kernels_backward import gradient_dims
from blockdiag.fusion.kernels_gluon import HopperKernel, gluon_source, print_function
from blockdiag.fusion.kernels_resident import (
    HELD_COLUMNS,
    ResidentWriter,
    begin_terms,
    print_share,
    request_terms,
    store_terms,
)
from blockdiag.fusion.layout import layout_of, shape_of
from blockdiag.fusion.resident import CHUNK, Resident, resident, rounds_each, terms_of
from blockdiag.fusion.tiles import value_labels
from blockdiag.fusion.tree import Region, leaves_of

NAME = "fused_rows_and_pairs_resident"
OWN = 64
"""Queries of a program."""
_MOST_SLOTS = 8
# Rounds whose tiles of queries have room: the next one's are there before one ends.
_SLOTS = 2
_PIECE = 8
# Of an H100 or H200 with the usual socket.
_USUAL_MULTIPROCESSORS = 132
# Each writes a part of the bias's gradient in float32, of at most 64 KiB.
_MOST_PROGRAMS = 4 * _USUAL_MULTIPROCESSORS
_MEMORY = (
    "own_tiles, own_output, chunk_scores, chunk_slopes, lines, of_keys, half, held, own_full, own_empty, lines_full, "
    "keys_empty, chunk_full, chunk_empty, half_full, half_empty, held_full, delta_full"
)


class _Pairs(ResidentWriter):
    """Lines of the functions of the kernel.

    Args:
        place: of the queries' gradient.
        factor: of the bias in the scores.
    """

    def __init__(self, region: Region, plan: Resident, place: Place, factor: float) -> None:
        super().__init__(region, plan, Writer(region, "rows", Tile(OWN, CHUNK)))
        self.place, self.factor = place, factor
        self.keys = region.sizes["k"]
        self.chunks_each = self.keys // CHUNK // 2
        self.slots, has_results = _slots(plan.width, self.keys, self.wide_keys)
        # Where results have no room, groups read them themselves; and sums and gradients leave by way of the round's
        # tiles, which those of the next round but one wait for.
        self.is_shared = not has_results
        self.results = layout_of(shape_of(region.out_dims, region.sizes), region.out_dims, region.sizes)
        self.is_long = self.is_long or math.prod(shape_of(region.out_dims, region.sizes)) >= 2**31
        self.tiles_of = region.sizes["q"] // OWN
        self.places = {**plan.places, "cotangent": plan.places["output"]}

    def keys_slot(self, slot: str) -> str:
        """Where lines of keys of the round in a slot are."""
        return "0" if self.is_shared else slot

    def array(self, name: Literal["query", "key", "held"], kind: str = "leaf") -> str:
        """What an operand, or its gradient, is called among the arrays of the launch."""
        return f"{kind}{self.region.leaves.index(getattr(self.plan, name))}"


def _slots(width: int, keys: int, wide_keys: int) -> tuple[int, bool]:
    """Parts of keys and values that there is room for, and whether there is room for tiles of results, too.

    Each part's slot is one group's: who waits for every second filling cannot tell the one before from it.
    """
    tile, part = OWN * width * 2, 2 * CHUNK * width * 2
    room = SHARED_BYTES - OWN * keys * 2 - _SLOTS * (2 * tile + 2 * OWN * 4)
    most = keys // CHUNK
    # Beside results, what groups hand to each other has a place of its own, and lines of keys of two rounds have.
    slots = (room - _SLOTS * (tile + wide_keys * 4) - OWN * width * 4) // part // 2 * 2
    if slots >= most:
        return min(2 * most, slots, _MOST_SLOTS), True
    return min(2 * most, (room - wide_keys * 4) // part // 2 * 2, _MOST_SLOTS), False


def _compute(own: _Pairs) -> None:
    """What a group of warps does."""
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
    if own.is_shared:
        lanes = plan.width // 8
        emit(f"R: gl.constexpr = gl.BlockedLayout([{lanes // 4}, 8], [{32 // lanes}, {lanes}], [4, 1], [1, 0])")
        emit(f"o_q = own * {OWN} + GROUP * {OWN // 2} + gl.arange(0, {OWN // 2}, gl.SliceLayout(1, R))")
        emit(f"columns = gl.arange(0, {plan.width}, gl.SliceLayout(0, R))")
        emit(f"nothing = gl.zeros([{OWN}, {CHUNK}], gl.float32, S)")
        _request_results(own, "first")
    emit("mbarrier.wait(held_full.index(0), 0)")
    own.writer.loop("for round in range(count):", lambda: _round(own))
    emit("tma.store_wait(0)")
    factor = "" if own.factor == 1 else f" * {own.factor}"
    target = f"p_{own.array('held', 'grad')} + gl.program_id(0).to(gl.int64) * {OWN * own.keys}"
    emit(f"p_tile = {target} + GROUP * {own.keys // 2}")
    emit(f"o_q = gl.arange(0, {OWN}, gl.SliceLayout(1, S))[:, None] * {own.keys}")
    emit(f"o_k = gl.arange(0, {CHUNK}, gl.SliceLayout(0, S))[None, :]")
    for chunk in range(own.chunks_each):
        emit(f"gl.store(p_tile + o_q + o_k + {chunk * CHUNK}, bias_sum{chunk}{factor})")
    emit()
    emit()


def _pointers(own: _Pairs) -> str:
    """Of arrays that groups read and write themselves."""
    results = ", p_output, p_delta" if own.is_shared else ""
    return f"{own.parameters()}{results}, p_{own.array('held', 'grad')}"


def _request_results(own: _Pairs, through: str) -> None:
    """Load a group's half of the results of a round's queries."""
    own.indices(None, through)
    place = f"{own.results.base(own.region.batch)} + o_q[:, None] * {own.results.stride('q')} + columns[None, :]"
    own.emit(f"results = gl.load(p_output + {place})")


def _sum_results(own: _Pairs) -> None:
    """What slopes are compared with: sums of cotangents times results, half of them by each group, for both."""
    emit, half = own.emit, OWN // 2
    emit(f"cotangents = own_tiles.index(own_slot * 2 + 1).slice(GROUP * {half}, {half})")
    emit("products = gl.sum(widened(cotangents.load(R)) * widened(results), 1)")
    emit(f"lines.index(own_slot * 2 + 1).slice(GROUP * {half}, {half}).store(products)")
    emit(f"gl.store(p_delta + {own.writer.row_place()}, products)")
    emit("gl.thread_barrier()")
    emit("mbarrier.arrive(delta_full.index(0), count=1)")
    emit("mbarrier.wait(delta_full.index(0), round % 2)")
    emit("delta = lines.index(own_slot * 2 + 1).load(gl.SliceLayout(1, S))[:, None]")


def _round(own: _Pairs) -> None:
    emit, plan = own.emit, own.plan
    count = own.chunks_each
    own.indices(None, "(first + round)")
    known = own.read(("row", "scalar"))
    emit(f"own_slot = round % {_SLOTS}")
    for full in ("own_full", "lines_full"):
        emit(f"mbarrier.wait({full}.index(own_slot), round // {_SLOTS} % 2)")
    for i, name in enumerate(("base",) if own.is_shared else ("base", "delta")):
        emit(f"{name} = lines.index(own_slot * 2 + {i}).load(gl.SliceLayout(1, S))[:, None]")
    emit(f"sum_query = gl.zeros([{OWN}, {plan.width}], gl.float32, D)")
    is_early = plan.width <= 64
    for chunk in range(count):
        if chunk == 0 or not is_early:
            _begin_scores(own, chunk, known)
        _begin_slopes(own, chunk)
        if is_early and chunk + 1 < count:
            _begin_scores(own, chunk + 1, known)
        if chunk == 0:
            emit("if GROUP == 0:")
            own.writer.depth += 1
            emit("# The last round's gradient has left.")
            emit("tma.store_wait(0)")
            emit("gl.thread_barrier()")
            if own.is_shared:
                emit(f"free_slot(own_empty, round + {_SLOTS - 1}, {_SLOTS}, round > 0)")
            else:
                emit("mbarrier.arrive(half_empty.index(0), count=1, pred=round > 0)")
            own.writer.depth -= 1
            if own.is_shared:
                _sum_results(own)
        _chunk(own, chunk, 2 if is_early and chunk + 1 < count else 1)
    _finish(own)


def _begin_scores(own: _Pairs, chunk: int, known: dict[int, Value]) -> None:
    emit, plan = own.emit, own.plan
    held = own.region.leaves.index(plan.held)
    first_key = f"GROUP * {own.keys // 2} + {chunk * CHUNK}"
    columns = {}
    if own.counts_keys:
        emit(f"r_k = {first_key} + gl.arange(0, {CHUNK}, gl.SliceLayout(0, S))")
        columns = own.read(("column",), counted=True)
    piece = f"held.index(forgotten(({first_key}) // {HELD_COLUMNS}))"
    emit(f"leaf{held} = widened({piece}.load(S))")
    tiles = own.tiles({**known, **columns, held: Value(f"leaf{held}", (OWN, CHUNK))})
    start = own.evaluate(plan.others, tiles, f"x{chunk}_").name
    if plan.of_keys is not None:
        lines = f"of_keys.index({own.keys_slot('own_slot')}).slice({first_key}, {CHUNK})"
        start += f" + {lines}.load(gl.SliceLayout(0, S))[None, :]"
    emit(f"start = {start}")
    # Groups take turns.
    emit(f"at{chunk} = forgotten(round) * {2 * own.chunks_each} + {2 * chunk} + GROUP")
    emit(f"mbarrier.wait(chunk_full.index(at{chunk} % {own.slots}), at{chunk} // {own.slots} % 2)")
    emit(f"keys{chunk} = chunk_scores.index(at{chunk} % {own.slots})")
    emit("queries = own_tiles.index(forgotten(own_slot) * 2)")
    emit(f"scores{chunk} = warpgroup_mma(queries, keys{chunk}.permute((1, 0)), start, is_async=True)")


def _begin_slopes(own: _Pairs, chunk: int) -> None:
    emit = own.emit
    emit(f"values = chunk_slopes.index(at{chunk} % {own.slots})")
    start = "nothing, use_acc=False"
    if not own.is_shared:
        start = "start"
        emit(f"start = gl.zeros([{OWN}, {CHUNK}], gl.float32, S) - delta")
    emit("cotangents = own_tiles.index(forgotten(own_slot) * 2 + 1)")
    emit(f"slopes{chunk} = warpgroup_mma(cotangents, values.permute((1, 0)), {start}, is_async=True)")


def _chunk(own: _Pairs, chunk: int, later: int) -> None:
    """Probabilities and slopes of a chunk, and what they add to the gradients.

    Args:
        later: products begun after its scores.
    """
    emit, plan = own.emit, own.plan
    emit(f"scores{chunk} = warpgroup_mma_wait({later}, deps=[scores{chunk}])")
    if chunk > 0:
        emit("# The last chunk's products are done, too.")
        emit("gl.thread_barrier()")
        emit(f"free_slot(chunk_empty, at{chunk - 1}, {own.slots})")
    emit(f"power = gl.exp2(scores{chunk} * {plan.unit * LOG2_E} - base)")
    emit(f"slopes{chunk} = warpgroup_mma_wait({later - 1}, deps=[slopes{chunk}])")
    if chunk == own.chunks_each - 1:
        emit("gl.thread_barrier()")
        if own.is_shared:
            emit("mbarrier.arrive(keys_empty.index(0), count=1)")
            emit("if GROUP == 0:")
            emit("    mbarrier.arrive(half_empty.index(0), count=1)")
        else:
            emit(f"free_slot(own_empty, round, {_SLOTS})")
    emit(f"slopes = rounded_product(slopes{chunk}{' - delta' if own.is_shared else ''}, power)")
    emit(f"bias_sum{chunk} += slopes")
    first = "use_acc=False, " if chunk == 0 else ""
    emit("factor = gl.convert_layout(slopes.to(dtype), P)")
    emit(f"sum_query = warpgroup_mma(factor, keys{chunk}, sum_query, {first}is_async=True)")


def _finish(own: _Pairs) -> None:
    """One group hands its sums to the other, whose result leaves by way of the same memory."""
    emit = own.emit
    last = own.chunks_each - 1
    half = f"half.index({'own_slot' if own.is_shared else 0})"
    emit("sum_query = warpgroup_mma_wait(0, deps=[sum_query])")
    emit("gl.thread_barrier()")
    emit(f"free_slot(chunk_empty, at{last}, {own.slots})")
    if own.is_shared:
        _request_results(own, "(first + gl.minimum(round + 1, count - 1))")
        own.indices(None, "(first + round)")
    emit("if GROUP == 1:")
    own.writer.depth += 1
    emit(f"mbarrier.wait(half_empty.index(0), round % 2{'' if own.is_shared else ' ^ 1'})")
    emit(f"{half}.store(sum_query)")
    emit("gl.thread_barrier()")
    emit("mbarrier.arrive(half_full.index(0), count=1)")
    own.writer.depth -= 1
    emit("else:")
    own.writer.depth += 1
    emit("mbarrier.wait(half_full.index(0), round % 2)")
    emit(f"sum_query += {half}.load(D)")
    emit("gl.thread_barrier()")
    emit(f"gradient = {half}._reinterpret(dtype, [{OWN}, {own.plan.width}], d_query.layout)")
    emit(f"gradient.store((sum_query * {own.plan.unit}).to(dtype))")
    emit("fence_async_shared()")
    emit("gl.thread_barrier()")
    emit(f"tma.async_copy_shared_to_global(d_query, [{own.at(own.place, f'own * {OWN}')}], gradient)")
    own.writer.depth -= 1


def _load(own: _Pairs) -> None:
    """What the warp does that loads tiles."""
    emit = own.emit
    names = _tiles(own)
    print_function(own, f"def load({_MEMORY}, {', '.join(names)}, key, value, bias, ROUNDS: gl.constexpr):")
    emit('"""Fills the slots of tiles, for all rounds."""')
    print_share(own, own.tiles_of)
    own.indices("cell", None)
    emit(f"mbarrier.expect(held_full.index(0), {OWN * own.keys * 2})")
    for piece in range(own.keys // HELD_COLUMNS):
        at = own.at(own.places["held"], f"own * {OWN}", piece * HELD_COLUMNS)
        emit(f"tma.async_copy_global_to_shared(bias, [{at}], held_full.index(0), held.index({piece}))")
    parts = 2 * own.chunks_each

    def body() -> None:
        emit(f"round = step // {parts}")
        own.indices(None, "(first + round)")
        emit(f"if step % {parts} == 0:")
        own.writer.depth += 1
        emit(f"slot = round % {_SLOTS}")
        emit(f"mbarrier.wait(own_empty.index(slot), round // {_SLOTS} % 2 ^ 1)")
        places = ("own_tiles.index(slot * 2)", "own_tiles.index(slot * 2 + 1)", "own_output.index(slot)")
        _load_tiles(own, "own", dict(zip(names, places, strict=False)), f"own * {OWN}", OWN)
        own.writer.depth -= 1
        emit(f"slot = step % {own.slots}")
        emit(f"mbarrier.wait(chunk_empty.index(slot), step // {own.slots} % 2 ^ 1)")
        emit(f"first_key = step % {parts} // 2 * {CHUNK} + step % 2 * {own.keys // 2}")
        places = {"key": "chunk_scores.index(slot)", "value": "chunk_slopes.index(slot)"}
        _load_tiles(own, "chunk", places, "first_key", CHUNK)

    own.writer.loop(f"for step in range(count * {parts}):", body)
    emit()
    emit()


def _tiles(own: _Pairs) -> tuple[str, ...]:
    """The arrays of queries whose tiles the copy engine brings."""
    return ("query", "cotangent") if own.is_shared else ("query", "cotangent", "output")


def _load_tiles(own: _Pairs, which: str, places: Mapping[str, str], offset: str, rows: int) -> None:
    """Tiles of these arrays, to their places in `slot`."""
    own.emit(f"mbarrier.expect({which}_full.index(slot), {len(places) * rows * own.plan.width * 2})")
    for array, place in places.items():
        at = own.at(own.places[array], offset)
        own.emit(f"tma.async_copy_global_to_shared({array}, [{at}], {which}_full.index(slot), {place})")


def _gather(own: _Pairs) -> None:
    """What the warp does that makes lines of queries and of keys."""
    emit, plan = own.emit, own.plan
    print_function(own, f"def gather({_MEMORY}{own.parameters()}, p_log_sum, p_delta, ROUNDS: gl.constexpr):")
    emit('"""Fills the slots of lines, for all rounds."""')
    print_share(own, own.tiles_of)
    own.indices("cell", None)
    emit("B: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])")
    if plan.of_keys is not None:
        begin_terms(own)
    own.indices(None, "first")
    _request_lines(own)

    def body() -> None:
        own.indices(None, "(first + round)")
        emit(f"slot = round % {_SLOTS}")
        if own.is_shared:
            emit(f"mbarrier.wait(own_empty.index(slot), round // {_SLOTS} % 2 ^ 1)")
        else:
            emit(f"mbarrier.wait(own_full.index(slot), round // {_SLOTS} % 2)")
            _make_delta(own)
        emit(f'lines.index(slot * 2).store(gl.where(loaded_sum == float("-inf"), 0.0, loaded_sum * {LOG2_E}))')
        if plan.of_keys is not None:
            if own.is_shared:
                emit("mbarrier.wait(keys_empty.index(0), round % 2 ^ 1)")
            store_terms(own, plan.of_keys, own.keys_slot("slot"))
        emit("gl.thread_barrier()")
        emit("mbarrier.arrive(lines_full.index(slot), count=1)")
        if not own.is_shared:
            emit("mbarrier.arrive(own_empty.index(slot), count=1)")
        own.indices(None, "(first + gl.minimum(round + 1, count - 1))")
        if plan.of_keys is not None:
            request_terms(own)
        _request_lines(own)

    own.writer.loop("for round in range(count):", body)
    emit()
    emit()


def _make_delta(own: _Pairs) -> None:
    """Sums of cotangents times results, a few columns at a time: this warp has few registers."""
    emit = own.emit
    emit(f"R: gl.constexpr = gl.BlockedLayout([1, {_PIECE}], [32, 1], [1, 1], [1, 0])")
    # The many pieces of wide tiles leave no register for where these are.
    cotangent = f"own_tiles.index({'slot' if own.plan.width <= 64 else 'forgotten(slot)'} * 2 + 1)"
    for row in range(0, OWN, 32):
        emit("delta = gl.zeros([32], gl.float32, gl.SliceLayout(1, R))")
        for column in range(0, own.plan.width, _PIECE):
            piece = f"slice({row}, 32).slice({column}, {_PIECE}, dim=1).load(R)"
            emit(f"delta += gl.sum(widened({cotangent}.{piece}) * widened(own_output.index(slot).{piece}), 1)")
        emit(f"lines.index(slot * 2 + 1).slice({row}, 32).store(delta)")
        emit(f"o_q = own * {OWN} + {row} + gl.arange(0, 32, gl.SliceLayout(1, R))")
        emit(f"gl.store(p_delta + {own.writer.row_place()}, delta)")


def _request_lines(own: _Pairs) -> None:
    """Load what the softmax left of a round's queries."""
    own.emit(f"o_q = own * {OWN} + gl.arange(0, {OWN}, B)")
    own.emit(f"loaded_sum = tl.load(p_log_sum + {own.writer.row_place()})")


def _entry(own: _Pairs) -> None:
    """The kernel itself."""
    emit = own.emit
    width = own.plan.width
    results = ", p_output" if own.is_shared else ""
    pointers = f"{own.parameters()}, p_log_sum, p_delta{results}, p_{own.array('held', 'grad')}"
    arrays = f"{', '.join(_tiles(own))}, key, value, bias"
    print_function(own, f"def {NAME}({arrays}, d_query{pointers}, ROUNDS: gl.constexpr):")
    emit('"""One program: a tile of queries, and ROUNDS of the indices along which the bias is the same."""')
    memory = [("own_tiles", "query", 2 * _SLOTS, OWN)]
    memory += [] if own.is_shared else [("own_output", "output", _SLOTS, OWN)]
    memory += [(f"chunk_{kind}", name, own.slots, CHUNK) for kind, name in (("scores", "key"), ("slopes", "value"))]
    for name, array, slots, rows in memory:
        emit(f"{name} = gl.allocate_shared_memory(query.dtype, [{slots}, {rows}, {width}], {array}.layout)")
    if own.is_shared:
        emit("own_output = own_tiles")
    emit(f"HALF: gl.constexpr = gl.SwizzledSharedLayout(8, 1, {width // 8}, [1, 0])")
    if own.is_shared:
        emit(f"half = own_tiles._reinterpret(gl.float32, [{_SLOTS}, {OWN}, {width}], HALF)")
    else:
        emit(f"half = gl.allocate_shared_memory(gl.float32, [1, {OWN}, {width}], HALF)")
    line = "gl.SwizzledSharedLayout(1, 1, 1, [0])"
    emit(f"lines = gl.allocate_shared_memory(gl.float32, [{2 * _SLOTS}, {OWN}], {line})")
    if own.plan.of_keys is None:
        emit("of_keys = lines")
    else:
        slots = 1 if own.is_shared else _SLOTS
        emit(f"of_keys = gl.allocate_shared_memory(gl.float32, [{slots}, {own.wide_keys}], {line})")
    held = f"[{own.keys // HELD_COLUMNS}, {OWN}, {HELD_COLUMNS}]"
    emit(f"held = gl.allocate_shared_memory(bias.dtype, {held}, bias.layout)")
    for name, count, arrivals in (
        ("own_full", _SLOTS, 1), ("own_empty", _SLOTS, 1 if own.is_shared else 3), ("lines_full", _SLOTS, 1),
        ("keys_empty", 1, 2), ("chunk_full", own.slots, 1), ("chunk_empty", own.slots, 1), ("half_full", 1, 1),
        ("half_empty", 1, 1), ("held_full", 1, 1), ("delta_full", 1, 2),
    ):  # fmt: skip
        emit(f"{name} = make_barriers({count}, {arrivals})")
    emit("fence_async_shared()")
    emit("gl.thread_barrier()")
    emit("gl.warp_specialize([")
    for group in range(2):
        emit(f"    (compute, ({_MEMORY}, d_query{_pointers(own)}, ROUNDS, {group})),")
    emit(f"    (load, ({_MEMORY}, {arrays}, ROUNDS)),")
    emit(f"    (gather, ({_MEMORY}{own.parameters()}, p_log_sum, p_delta, ROUNDS)),")
    # To make sums of products takes registers, which the groups can spare where gradients are narrow.
    registers = [240, 24, 24] if own.is_shared else [232, 40, 40]
    emit(f"], [4, 1, 1], {registers})")


def resident_pairs(region: Region) -> HopperKernel | None:
    """The kernel in the place of those by rows and by pairs, None where the bias cannot stay or has no gradient.

    Args:
        region: arranged.
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
    if place is None:
        return None
    own = _Pairs(region, plan, place, factor)
    _compute(own)
    _load(own)
    _gather(own)
    _entry(own)
    return _kernel(own, Output(own.array("query", "grad"), dims, shape, jnp.dtype(plan.query.source.dtype).name))


def _factor(region: Region, plan: Resident) -> float | None:
    """Of the bias in the scores, None where it is not simply a term."""
    assert region.score is not None
    own = [(factor, node) for factor, node in terms_of(region.score) if plan.held in leaves_of(node)]
    return None if any(node.leaf is not plan.held for _, node in own) else sum(factor for factor, _ in own)


def _kernel(own: _Pairs, d_query: Output) -> HopperKernel:
    region, plan, width = own.region, own.plan, own.plan.width
    rounds, tiles = cells_of(region, plan.through), own.tiles_of * cells_of(region, plan.cell)
    # How many parts of its gradient there are is known before the GPU is.
    each = rounds_each(rounds, tiles, _USUAL_MULTIPROCESSORS, _MOST_PROGRAMS)
    labels = (*plan.cell, "part", "q", "k")
    sizes = region.sizes | {"part": -(-rounds // each)}
    d_bias = Output(own.array("held", "grad"), tuple((x,) for x in labels), tuple(sizes[x] for x in labels), "float32")
    rows = (*region.batch, "q")
    delta = Output("delta", tuple((x,) for x in rows), tuple(region.sizes[x] for x in rows), "float32")
    names = [f"leaf{i}" for i, leaf in enumerate(region.leaves) if leaf.source.key is not None]
    source = Source(
        gluon_source("forgotten, free_slot, rounded_product, widened", own.writer.lines),
        NAME,
        (*names, "value", "log_sum", "cotangent", "output"),
        (d_query, d_bias, delta),
        (tiles, 1, 1),
    )
    moved = (
        ("query", own.array("query"), own.places["query"].shape, (OWN, width)),
        ("cotangent", "cotangent", own.places["cotangent"].shape, (OWN, width)),
        *([] if own.is_shared else [("output", "output", own.places["output"].shape, (OWN, width))]),
        ("key", own.array("key"), own.places["key"].shape, (CHUNK, width)),
        ("value", "value", own.places["value"].shape, (CHUNK, width)),
        ("bias", own.array("held"), own.places["held"].shape, (OWN, HELD_COLUMNS)),
        ("d_query", d_query.name, own.place.shape, (OWN, width)),
    )
    results = ["output"] if own.is_shared else []
    pointers = (*(f"leaf{i}" for i in own.pointers), "log_sum", "delta", *results, d_bias.name)
    return HopperKernel(source, moved, jnp.dtype(region.dtype).name, pointers, rounds, tiles, each)
