"""Gluon source of the kernel of resident_pairs.py for wide heads, whose tiles leave no room for result tiles.

The scores of a group's keys are one product, and so are their slopes. The slopes start after half of the exponentials,
because values arrive late. The groups exchange sums over all keys. These are delta of each row, and half of the columns
of the query gradient, which the other group finishes.

Keys are needed until the end of a round, and values half as long; a group has one slot for each. The next round's keys
therefore go into the slot that values leave. The next round's values are needed only after its scores, and go into the
slot of the keys. Gradients are staged in their query tiles, and the warp that gathers vectors waits for their store.
"""

from blockdiag.fusion.codegen.expressions import Value
from blockdiag.fusion.codegen.gluon import print_function
from blockdiag.fusion.codegen.kernels import LOG2_E
from blockdiag.fusion.codegen.resident_pairs_writer import NAME, OWN, SLOTS, PairsWriter
from blockdiag.fusion.codegen.resident_writer import print_share
from blockdiag.fusion.ir.tree import Region
from blockdiag.fusion.lowering.hopper import Place
from blockdiag.fusion.lowering.resident_schedule import Resident

_MEMORY = (
    "own_tiles, ring, lines, of_keys, half, held, own_full, own_empty, lines_full, ring_full, ring_empty, sums_full, "
    "half_full, half_empty, grads_full, held_full"
)


class WidePairs(PairsWriter):
    """Writer of the kernel's functions, see `PairsWriter`."""

    HELPERS = "forgotten, halves, rounded_product, side_by_side, widened"
    PARTS = 2

    def __init__(self, region: Region, plan: Resident, place: Place, factor: float) -> None:
        # The number of keys per group.
        self.part = region.sizes["k"] // 2
        super().__init__(region, plan, self.part, place, factor)


def print_wide(own: WidePairs) -> None:
    """Print all functions of the kernel."""
    _compute(own)
    _load(own)
    _gather(own)
    _entry(own)


def _compute(own: WidePairs) -> None:
    """Print the function of a compute warp group."""
    emit, plan, part = own.emit, own.plan, own.part
    gradients = f"p_delta, p_{own.array('held', 'grad')}"
    print_function(own, f"def compute({_MEMORY}, d_query{own.parameters()}, {gradients}, ROUNDS: gl.constexpr, "
              "GROUP: gl.constexpr):")  # fmt: skip
    emit(f'"""{part} keys of each round."""')
    emit(f"W: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, {part}, 16])")
    emit(f"S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, {part // 2}, 16])")
    emit(f"D: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, {plan.width}, 16])")
    emit("P: gl.constexpr = gl.DotOperandLayout(0, D, 2)")
    emit("dtype: gl.constexpr = own_tiles.dtype")
    print_share(own, own.tiles_of)
    own.indices("cell", None)
    for name, layout in (("o_q", "W"), ("r_q", "S")):
        emit(f"{name} = own * {OWN} + gl.arange(0, {OWN}, gl.SliceLayout(1, {layout}))")
    emit(f"nothing = gl.zeros([{OWN}, {part}], gl.float32, W)")
    emit(f"sum_bias = gl.zeros([{OWN}, {part}], gl.float32, W)")
    emit("mbarrier.wait(held_full.index(0), 0)")
    own.writer.loop("for round in range(count):", lambda: _round(own))
    own.store_bias({0: "sum_bias"}, "W")
    emit()
    emit()


def _round(own: WidePairs) -> None:
    emit, plan = own.emit, own.plan
    own.indices(None, "(first + round)")
    known = own.read(("row", "scalar"))
    emit(f"own_slot = round % {SLOTS}")
    emit("keys = GROUP * 2 + own_slot")
    emit("values = GROUP * 2 + 1 - own_slot")
    emit(f"mbarrier.wait(own_full.index(own_slot), round // {SLOTS} % 2)")
    _begin_product(own, "scores", "own_slot * 2", "keys")
    emit(f"mbarrier.wait(lines_full.index(own_slot), round // {SLOTS} % 2)")
    emit("base = lines.index(own_slot).load(gl.SliceLayout(1, S))[:, None]")
    emit("scores = warpgroup_mma_wait(0, deps=[scores])")
    emit("power0, power1 = halves(scores)")
    for half in range(2):
        if half:
            _begin_product(own, "slopes", "forgotten(own_slot) * 2 + 1", "values")
        emit(f"power{half} = gl.convert_layout(power{half}, S, assert_trivial=True)")
        # The terms are loaded only now, because scores and slopes leave few registers.
        terms = _terms(own, known, half)
        emit(f"power{half} = gl.exp2((power{half} + {terms}) * {plan.unit * LOG2_E} - base)")
    emit("power = side_by_side(power0, power1, W)")
    # This barrier is passed already. Without a wait here, the compiler would delay exponentials until slopes are done.
    emit(f"mbarrier.wait(own_full.index(own_slot), round // {SLOTS} % 2)")
    emit("slopes = warpgroup_mma_wait(0, deps=[slopes])")
    emit("thread_barrier()")
    emit("mbarrier.arrive(ring_empty.index(values), count=1)")
    emit("mbarrier.arrive(half_empty.index(0), count=1)")
    _compare(own)
    emit("slopes = rounded_product(slopes - delta[:, None], power)")
    emit("sum_bias += slopes")
    emit("factor = gl.convert_layout(slopes.to(dtype), P)")
    emit(f"sum_query = gl.zeros([{OWN}, {plan.width}], gl.float32, D)")
    emit("sum_query = warpgroup_mma(factor, ring.index(keys), sum_query, use_acc=False, is_async=True)")
    emit("sum_query = warpgroup_mma_wait(0, deps=[sum_query])")
    emit("thread_barrier()")
    emit("mbarrier.arrive(ring_empty.index(keys), count=1)")
    _finish(own)


def _begin_product(own: WidePairs, name: str, tile: str, slot: str) -> None:
    """Print the wait for a slot of the ring, and the start of its product with a tile of queries or cotangents."""
    own.emit(f"mbarrier.wait(ring_full.index({slot}), round % 2)")
    own.emit(f"tile = own_tiles.index({tile})")
    other = f"ring.index({slot}).permute((1, 0))"
    own.emit(f"{name} = warpgroup_mma(tile, {other}, nothing, use_acc=False, is_async=True)")


def _terms(own: WidePairs, known: dict[int, Value], half: int) -> str:
    """Print the terms that are added to half of the scores, and return their name."""
    emit, plan, part = own.emit, own.plan, own.part // 2
    first = f"GROUP * {own.part} + {half * part}"
    held = own.region.leaves.index(plan.held)
    columns = {}
    if own.counts_keys:
        emit(f"r_k = {first} + gl.arange(0, {part}, gl.SliceLayout(0, S))")
        columns = own.read(("column",), counted=True)
    emit(f"leaf{held} = widened(held.index(GROUP).slice({half * part}, {part}, dim=1).load(S))")
    tiles = own.tiles({**known, **columns, held: Value(f"leaf{held}", (OWN, part))})
    emit(f"terms = {own.evaluate(plan.others, tiles, f'x{half}_').name}")
    if plan.of_keys is not None:
        emit(f"terms += of_keys.index(0).slice({first}, {part}).load(gl.SliceLayout(0, S))[None, :]")
    return "terms"


def _compare(own: WidePairs) -> None:
    """Print delta of each row, the sum of probability times slope over both groups' keys."""
    emit = own.emit
    emit("delta = gl.sum(power * slopes, 1)")
    emit(f"lines.index({SLOTS} + GROUP).store(delta)")
    emit("thread_barrier()")
    emit("mbarrier.arrive(sums_full.index(0), count=1)")
    emit("mbarrier.wait(sums_full.index(0), round % 2)")
    emit(f"delta += lines.index({SLOTS + 1} - GROUP).load(gl.SliceLayout(1, W))")
    emit("if GROUP == 0:")
    emit(f"    gl.store(p_delta + {own.writer.row_place()}, delta)")


def _finish(own: WidePairs) -> None:
    """Print the end of a round: each group sums half of the columns, exchanged in the round's query-side tiles."""
    emit, width = own.emit, own.plan.width
    emit("if GROUP == 0:")
    emit("    kept, given = halves(sum_query)")
    emit("else:")
    emit("    given, kept = halves(sum_query)")
    emit("# Both groups have finished with the tiles.")
    emit("mbarrier.wait(half_empty.index(0), round % 2)")
    emit("half.index(own_slot * 2 + GROUP).store(given)")
    emit("thread_barrier()")
    emit("mbarrier.arrive(half_full.index(GROUP), count=1)")
    emit("mbarrier.wait(half_full.index(1 - GROUP), round % 2)")
    emit("other = half.index(own_slot * 2 + 1 - GROUP)")
    emit("kept += other.load(kept.type.layout)")
    emit("thread_barrier()")
    emit(f"gradient = reinterpret(other, dtype, [2, {OWN}, {width // 2}], d_query.layout).index(0)")
    emit(f"gradient.store((kept * {own.plan.unit}).to(dtype))")
    emit("fence_async_shared()")
    emit("thread_barrier()")
    emit("mbarrier.arrive(grads_full.index(own_slot), count=1)")


def _load(own: WidePairs) -> None:
    """Print the function of the warp that loads tiles."""
    emit = own.emit
    print_function(own, f"def load({_MEMORY}, query, cotangent, key, value, bias, ROUNDS: gl.constexpr):")
    emit('"""Fills the slots of tiles, for all rounds."""')
    print_share(own, own.tiles_of)
    own.indices("cell", None)
    emit(f"mbarrier.expect(held_full.index(0), {OWN * own.keys * 2})")
    for group in range(2):
        at = own.at(own.places["held"], f"own * {OWN}", group * own.part)
        emit(f"tma_load(bias, [{at}], held_full.index(0), held.index({group}))")

    def body() -> None:
        own.indices(None, "(first + round)")
        emit(f"own_slot = round % {SLOTS}")
        emit(f"mbarrier.wait(own_empty.index(own_slot), round // {SLOTS} % 2 ^ 1)")
        places = {"query": "own_tiles.index(own_slot * 2)", "cotangent": "own_tiles.index(own_slot * 2 + 1)"}
        own.load_tiles("own_full.index(own_slot)", places, f"own * {OWN}", OWN)
        for name, slot in (("key", "own_slot"), ("value", "1 - own_slot")):
            for group in range(2):
                emit(f"slot = {2 * group} + {slot}")
                emit("mbarrier.wait(ring_empty.index(slot), round % 2 ^ 1)")
                own.load_tiles("ring_full.index(slot)", {name: "ring.index(slot)"}, str(group * own.part), own.part)

    own.writer.loop("for round in range(count):", body)
    emit()
    emit()


def _gather(own: WidePairs) -> None:
    """Print the function of the warp that prepares per-query and per-key vectors, and writes gradients."""
    emit = own.emit
    print_function(own, f"def gather({_MEMORY}, d_query{own.parameters()}, p_log_sum, ROUNDS: gl.constexpr):")
    emit('"""Fills the slots of lines, for all rounds, and empties those of gradients."""')
    print_share(own, own.tiles_of)
    own.indices("cell", None)

    def before() -> None:
        emit("mbarrier.wait(half_empty.index(0), round % 2 ^ 1)")

    def last() -> None:
        emit("if round > 0:")
        own.writer.depth += 1
        _leave(own, "round - 1")
        own.writer.depth -= 1

    own.gather_lines("slot", "0", before, lambda: None, last)
    _leave(own, "count - 1")
    emit()
    emit()


def _leave(own: WidePairs, number: str) -> None:
    """Print the store of a round's gradients, and the wait until their memory is free."""
    emit, half = own.emit, own.plan.width // 2
    emit(f"left_slot = ({number}) % {SLOTS}")
    emit(f"mbarrier.wait(grads_full.index(left_slot), ({number}) // {SLOTS} % 2)")
    own.indices(None, f"(first + {number})")
    for group in range(2):
        place = f"half.index(left_slot * 2 + {1 - group})"
        emit(f"gradient = reinterpret({place}, own_tiles.dtype, [2, {OWN}, {half}], d_query.layout).index(0)")
        at = own.at(own.place, f"own * {OWN}", group * half)
        emit(f"tma_store(d_query, [{at}], gradient)")
    emit("tma.store_wait(0)")
    emit("mbarrier.arrive(own_empty.index(left_slot), count=1)")


def _entry(own: WidePairs) -> None:
    """Print the kernel function."""
    emit = own.emit
    width, part = own.plan.width, own.part
    gradients = f"p_delta, p_{own.array('held', 'grad')}"
    arrays = "query, cotangent, key, value, bias"
    print_function(own, f"def {NAME}({arrays}, d_query{own.parameters()}, p_log_sum, {gradients}, "
              "ROUNDS: gl.constexpr):")  # fmt: skip
    emit('"""One program: a tile of queries, and ROUNDS of the indices along which the bias is the same."""')
    emit(f"own_tiles = gl.allocate_shared_memory(query.dtype, [{2 * SLOTS}, {OWN}, {width}], query.layout)")
    emit(f"ring = gl.allocate_shared_memory(query.dtype, [4, {part}, {width}], key.layout)")
    emit(f"HALF: gl.constexpr = gl.SwizzledSharedLayout(8, 1, {width // 16}, [1, 0])")
    emit(f"half = reinterpret(own_tiles, gl.float32, [{2 * SLOTS}, {OWN}, {width // 2}], HALF)")
    line = "gl.SwizzledSharedLayout(1, 1, 1, [0])"
    emit(f"lines = gl.allocate_shared_memory(gl.float32, [{SLOTS + 2}, {OWN}], {line})")
    if own.plan.of_keys is None:
        emit("of_keys = lines")
    else:
        emit(f"of_keys = gl.allocate_shared_memory(gl.float32, [1, {own.wide_keys}], {line})")
    emit(f"held = gl.allocate_shared_memory(bias.dtype, [2, {OWN}, {part}], bias.layout)")
    for name, count, arrivals in (
        ("own_full", SLOTS, 1), ("own_empty", SLOTS, 1), ("lines_full", SLOTS, 1), ("ring_full", 4, 1),
        ("ring_empty", 4, 1), ("sums_full", 1, 2), ("half_full", 2, 1), ("half_empty", 1, 2), ("grads_full", SLOTS, 2),
        ("held_full", 1, 1),
    ):  # fmt: skip
        emit(f"{name} = make_barriers({count}, {arrivals})")
    emit("fence_async_shared()")
    emit("thread_barrier()")
    emit("gl.warp_specialize([")
    for group in range(2):
        emit(f"    (compute, ({_MEMORY}, d_query{own.parameters()}, {gradients}, ROUNDS, {group})),")
    emit(f"    (load, ({_MEMORY}, {arrays}, ROUNDS)),")
    emit(f"    (gather, ({_MEMORY}, d_query{own.parameters()}, p_log_sum, ROUNDS)),")
    emit("], [4, 1, 1], [240, 24, 24])")
