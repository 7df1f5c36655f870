"""Writer of the resident "rows" and "columns" backward kernels, and their load warps.

See resident_backward.py for the compute warp groups.
"""

from collections.abc import Sequence
from typing import Literal

from blockdiag.fusion.codegen.gluon import print_function
from blockdiag.fusion.codegen.kernels import LOG2_E, Source, Writer
from blockdiag.fusion.codegen.resident_writer import ResidentWriter, print_share
from blockdiag.fusion.ir.layout import layout_of
from blockdiag.fusion.ir.tile import Tile
from blockdiag.fusion.ir.tree import Region
from blockdiag.fusion.lowering.hopper import SHARED_BYTES, Place, place_of
from blockdiag.fusion.lowering.resident_schedule import CHUNK, Resident
from blockdiag.fusion.lowering.tile_program import value_columns

Side = Literal["rows", "columns"]

OWN = 128
"""Queries or keys per program: two warp groups with 64 each."""
MOST_OTHERS = 256
_MOST_SLOTS = 6
# Chunks of narrow tiles whose vectors are loaded ahead, because the memory latency exceeds the time of a chunk.
_LEAD = 4
FEWEST_SLOTS = 2
# The accumulators of the gradients of the program's own operands: that of scores, and that of slopes.
SUMS = ("sum_first", "sum_second")


class SideWriter(ResidentWriter):
    """Writer of the kernel's functions.

    Args:
        plain: the plain kernel that this one replaces.
        terms: the factor of each further leaf with a gradient, an additive term, by the index of the leaf.
    """

    def __init__(self, region: Region, plan: Resident, side: Side, plain: Source, terms: dict[int, float]) -> None:
        is_columns = side == "columns"
        super().__init__(region, plan, Writer(region, side, Tile(CHUNK, CHUNK), flipped=is_columns))
        self.side: Side = side
        # The roles of leaves that threads read themselves and that are the same for all chunks.
        self.roles = ("column" if side == "columns" else "row", "scalar")
        self.line_role = "row" if side == "columns" else "column"
        self.is_columns = is_columns
        self.name = f"fused_{side}_resident"
        self.label, self.other = ("k", "q") if is_columns else ("q", "k")
        # The operands of the score product and of the slope product: those of the program, and those of a chunk.
        self.own_arrays = ("key", "value") if is_columns else ("query", "cotangent")
        self.chunk_arrays = ("query", "cotangent") if is_columns else ("key", "value")
        self.terms, self.outputs = terms, {x.name: x for x in plain.outputs}
        self.others = region.sizes[self.other]
        self.own_slots, self.slots, self.lead = slots_of(plan.width, self.others)
        # With room for two rounds, the next round's first products start before this round's results are written.
        self.is_ahead = self.own_slots > 1
        self.chunks = self.others // CHUNK
        self.tiles_of = region.sizes[self.label] // OWN
        leaf = plan.key if is_columns else plan.query
        self.written = {f"grad{region.leaves.index(leaf)}": leaf.features}
        if is_columns:
            self.written["grad_value"] = tuple(value_columns(region))
        self.out_places = {name: self._out_place(name, lines) for name, lines in self.written.items()}
        self.places = {**plan.places, "cotangent": plan.places["output"]}

    def _out_place(self, name: str, lines: tuple[str, ...]) -> Place | None:
        written = self.outputs[name]
        layout = layout_of(written.shape, written.dims, self.region.sizes)
        return place_of(layout, written.shape, self.label, lines, self.region.sizes)

    def pointer_parameters(self) -> str:
        grads = "".join(f", p_grad{i}" for i in self.terms)
        return f"{self.parameters()}, p_log_sum, p_delta{grads}"

    def memory(self) -> str:
        """Return the parameters in shared memory."""
        own = "own_scores, own_slopes, chunk_scores, chunk_slopes, lines, staged, ones, held"
        barriers = "own_full, own_empty, chunk_full, chunk_empty, held_full"
        return f"{own}, {barriers}" if self.is_ahead else f"{own}, passage, {barriers}"

    def forgotten(self, slot: str) -> str:
        """Return the expression of a slot.

        Wide gradients leave no registers for loop invariants. `forgotten` then makes the compiler recompute addresses.
        """
        return slot if self.is_ahead else f"forgotten({slot})"

    def own_barrier(self, slot: str, group: str = "GROUP") -> str:
        """Return the index of a group's barrier for the program's own tiles.

        With one round in memory, each group has its own barrier, so that one group's tiles load while the other group
        computes.
        """
        return slot if self.is_ahead else f"{slot} * 2 + {group}"

    def number(self, chunk: int) -> str:
        """Return the number of a chunk; chunks of wide tiles are a loop, because unrolling takes long to compile."""
        return str(chunk) if self.is_ahead else "part"

    def sums(self) -> list[str]:
        """Return the names of a round's accumulators."""
        return [*SUMS[: len(self.written)], *(["sums"] if self.terms else [])]

    def array_name(self, name: str) -> str:
        """Return the name of an operand among the arrays of the launch."""
        leaves = self.region.leaves
        return {"query": f"leaf{leaves.index(self.plan.query)}", "key": f"leaf{leaves.index(self.plan.key)}"}.get(
            name, name
        )


def slots_of(width: int, others: int) -> tuple[int, int, int]:
    """Return the numbers of slots for own tile pairs and for chunk pairs, and how many chunks ahead vectors load."""
    pair, part = 2 * OWN * width * 2, 2 * CHUNK * width * 2 + 2 * CHUNK * 4
    lines = 2 * CHUNK * 4
    room = SHARED_BYTES - OWN * others * 2 - 8 * CHUNK * 2
    left = room - 4 * OWN * 4 - _LEAD * lines - 2 * pair
    if left >= 4 * part:
        return 2, min(_MOST_SLOTS, left // part), _LEAD
    # With one pair, gradients need a staging buffer of their own. A chunk then takes as long as the memory latency.
    left = room - lines - pair - pair // 2
    return 1, min(_MOST_SLOTS, left // part), 1


def print_load(own: SideWriter) -> None:
    """Print the function of the load warp, and that of a second one for own tiles if these have one slot."""
    emit = own.emit
    chunks = own.chunks
    lines = "p_log_sum, p_delta, ROUNDS: gl.constexpr"
    arrays = [*(own.own_arrays if own.is_ahead else ()), *own.chunk_arrays, *(["bias"] if own.is_ahead else [])]
    print_function(own, f"def load({own.memory()}, {', '.join(arrays)}, {lines}):")
    emit('"""Fills the slots, for all rounds."""')
    _begin(own)
    if own.is_ahead:
        _begin_own(own)
    last = f"count * {chunks} - 1"
    if own.is_columns:
        for step in range(own.lead):
            _copy_lines(own, f"gl.minimum({step}, {last})", str(step))

    def chunk() -> None:
        emit(f"round = step // {chunks}")
        own.indices(None, "(first + round)")
        if own.is_ahead:
            emit(f"if step % {chunks} == 0:")
            own.writer.depth += 1
            _load_own(own, 0)
            own.writer.depth -= 1
        emit(f"slot = step % {own.slots}")
        emit(f"mbarrier.wait(chunk_empty.index(slot), step // {own.slots} % 2 ^ 1)")
        places = [f"chunk_{name}.index(slot)" for name in ("scores", "slopes")]
        _copy_pair(own, own.chunk_arrays, f"step % {chunks} * {CHUNK}", CHUNK, "chunk_full.index(slot)", places)
        if own.is_columns:
            emit(f"async_copy.wait_group({own.lead - 1})")
            emit("thread_barrier()")
            for i, name in enumerate(("sum", "delta")):
                emit(f"loaded_{name} = staged.index(step % {own.lead} * 2 + {i}).load(C)")
            _hand_over(own, ("chunk_full.index(slot)",))
            _copy_lines(own, f"gl.minimum(step + {own.lead}, {last})", f"step % {own.lead}")

    own.writer.loop(f"for step in range(count * {chunks}):", chunk)
    if own.is_ahead:
        emit("# The scores of one more round start on arbitrary data, and are not used.")
        emit(f"slot = count % {own.own_slots}")
        emit(f"mbarrier.wait(own_empty.index(slot), count // {own.own_slots} % 2 ^ 1)")
        emit(f"mbarrier.arrive(own_full.index(slot), count={1 if own.is_columns else 2})")
        emit(f"slot = count * {chunks} % {own.slots}")
        emit(f"mbarrier.wait(chunk_empty.index(slot), count * {chunks} // {own.slots} % 2 ^ 1)")
        emit(f"mbarrier.arrive(chunk_full.index(slot), count={2 if own.is_columns else 1})")
    emit()
    emit()
    if not own.is_ahead:
        print_function(own, f"def load_own({own.memory()}, {', '.join(own.own_arrays)}, bias, {lines}):")
        emit('"""Fills the slots of the program\'s own tiles, for all rounds."""')
        _begin(own)
        _begin_own(own)
        own.writer.loop("for round in range(count):", lambda: _load_groups(own))
        emit()
        emit()


def _begin(own: SideWriter) -> None:
    print_share(own, own.tiles_of)
    own.indices("cell", None)
    own.emit("C: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])")


def _begin_own(own: SideWriter) -> None:
    _load_held(own)
    if not own.is_columns:
        own.indices(None, "first")
        _request_lines(own)


def _load_groups(own: SideWriter) -> None:
    """Print the loads of the program's own tiles, for each group when it has finished its last ones."""
    for group in range(2):
        own.indices(None, "(first + round)")
        _load_own(own, group)


def _load_held(own: SideWriter) -> None:
    """Print the load of the program's part of the bias, which stays in shared memory."""
    own.emit(f"mbarrier.expect(held_full.index(0), {OWN * own.others * 2})")
    for piece in range(2 if own.is_columns else own.others // 64):
        first = ("0", f"own * {OWN} + {piece * 64}") if own.is_columns else (f"own * {OWN}", piece * 64)
        at = own.at(own.places["held"], *first)
        own.emit(f"tma_load(bias, [{at}], held_full.index(0), held.index({piece}))")


def _load_own(own: SideWriter, group: int) -> None:
    """Print the load of the program's own tiles of a round, or of one group's rows of them."""
    emit = own.emit
    rows, last = (OWN, 0) if own.is_ahead else (OWN // 2, 1)
    emit(f"slot = round % {own.own_slots}")
    emit(f"at = {own.own_barrier('slot', str(group))}")
    emit(f"mbarrier.wait(own_empty.index(at), round // {own.own_slots} % 2 ^ 1)")
    places = [f"own_{name}.index(slot).slice({group * rows}, {rows})" for name in ("scores", "slopes")]
    _copy_pair(own, own.own_arrays, f"own * {OWN} + {group * rows}", rows, "own_full.index(at)", places)
    if not own.is_columns and group == last:
        _hand_over(own, [f"own_full.index({own.own_barrier('slot', str(x))})" for x in range(last + 1)])
        own.indices(None, "(first + gl.minimum(round + 1, count - 1))")
        _request_lines(own)
        own.indices(None, "(first + round)")


def _copy_pair(
    own: SideWriter, arrays: tuple[str, str], offset: str, rows: int, full: str, places: Sequence[str]
) -> None:
    """Print the start of copies of `rows` rows of two arrays, from row `offset` on."""
    own.emit(f"mbarrier.expect({full}, {2 * rows * own.plan.width * 2})")
    for array, place in zip(arrays, places, strict=True):
        at = own.at(own.places[array], offset)
        own.emit(f"tma_load({array}, [{at}], {full}, {place})")


def _request_lines(own: SideWriter) -> None:
    """Print the loads of log-sum-exp and delta of the program's queries."""
    own.emit(f"o_q = own * {OWN} + gl.arange(0, {OWN}, C)")
    own.emit(f"loaded_sum = tl.load(p_log_sum + {own.writer.row_place()})")
    own.emit(f"loaded_delta = tl.load(p_delta + {own.writer.row_place()})")


def _copy_lines(own: SideWriter, step: str, slot: str) -> None:
    """Print the start of the copies of log-sum-exp and delta of a chunk of queries."""
    emit = own.emit
    emit(f"later = {step}")
    own.indices(None, f"(first + later // {own.chunks})")
    emit(f"o_q = later % {own.chunks} * {CHUNK} + gl.arange(0, {CHUNK}, C)")
    for i, name in enumerate(("log_sum", "delta")):
        place = f"p_{name} + {own.writer.row_place()}"
        emit(f"load_async(staged.index({slot} * 2 + {i}), {place})")
    emit("async_copy.commit_group()")


def _hand_over(own: SideWriter, full: Sequence[str]) -> None:
    """Print the store of the loaded vectors to shared memory, and the signal to the compute groups."""
    emit = own.emit
    emit(f'lines.index(slot * 2).store(gl.where(loaded_sum == float("-inf"), 0.0, loaded_sum * {LOG2_E}))')
    emit("# The slopes start from -delta.")
    emit("lines.index(slot * 2 + 1).store(0.0 - loaded_delta)")
    emit("thread_barrier()")
    for barrier in full:
        emit(f"mbarrier.arrive({barrier}, count=1)")
