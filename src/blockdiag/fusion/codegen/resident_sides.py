"""What the backward kernels by rows and by columns are made of that keep a bias of pairs, and the warp that loads.

See resident_backward.py for the groups of warps that compute.
"""

from collections.abc import Sequence
from typing import Literal

from blockdiag.fusion.codegen.gluon import print_function
from blockdiag.fusion.codegen.kernels import LOG2_E, Source, Writer
from blockdiag.fusion.codegen.resident_forward import ResidentWriter, print_share
from blockdiag.fusion.ir.layout import layout_of
from blockdiag.fusion.ir.tile import Tile
from blockdiag.fusion.ir.tree import Region
from blockdiag.fusion.lowering.hopper import SHARED_BYTES, Place, place_of
from blockdiag.fusion.lowering.resident_schedule import CHUNK, Resident
from blockdiag.fusion.lowering.tile_program import value_columns

Side = Literal["rows", "columns"]

OWN = 128
"""Queries or keys of a program: two groups of warps with 64 each."""
MOST_OTHERS = 256
_MOST_SLOTS = 6
# Chunks of narrow tiles whose lines are on their way: memory takes longer than such a chunk does.
_LEAD = 4
FEWEST_SLOTS = 2
# Gradients of the first factors of scores, and of slopes.
SUMS = ("sum_first", "sum_second")


class SideWriter(ResidentWriter):
    """Lines of the functions of the kernel.

    Args:
        plain: the kernel whose place this one takes.
        terms: of each leaf with a gradient beside the product's one: its place, and the factor of its term.
    """

    def __init__(self, region: Region, plan: Resident, side: Side, plain: Source, terms: dict[int, float]) -> None:
        is_columns = side == "columns"
        super().__init__(region, plan, Writer(region, side, Tile(CHUNK, CHUNK), flipped=is_columns))
        self.side: Side = side
        # Of what threads read themselves: the same for all chunks.
        self.roles = ("column" if side == "columns" else "row", "scalar")
        self.line_role = "row" if side == "columns" else "column"
        self.is_columns = is_columns
        self.name = f"fused_{side}_resident"
        self.label, self.other = ("k", "q") if is_columns else ("q", "k")
        # What scores and slopes are products of: the program's, and the chunks'.
        self.own_arrays = ("key", "value") if is_columns else ("query", "cotangent")
        self.chunk_arrays = ("query", "cotangent") if is_columns else ("key", "value")
        self.terms, self.outputs = terms, {x.name: x for x in plain.outputs}
        self.others = region.sizes[self.other]
        self.own_slots, self.slots, self.lead = slots_of(plan.width, self.others)
        # With room for two rounds the first products of the next one begin before this one's results are written.
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
        """Parameters that are shared memory."""
        own = "own_scores, own_slopes, chunk_scores, chunk_slopes, lines, staged, ones, held"
        barriers = "own_full, own_empty, chunk_full, chunk_empty, held_full"
        return f"{own}, {barriers}" if self.is_ahead else f"{own}, passage, {barriers}"

    def forgotten(self, slot: str) -> str:
        """A slot; wide gradients leave no registers for what is the same in each round, so that is computed again."""
        return slot if self.is_ahead else f"forgotten({slot})"

    def own_barrier(self, slot: str, group: str = "GROUP") -> str:
        """Which barrier of the program's own tiles is a group's: with one round in memory each has its own.

        Then one group loads while the other one computes.
        """
        return slot if self.is_ahead else f"{slot} * 2 + {group}"

    def number(self, chunk: int) -> str:
        """Of a chunk: wide ones are a loop, or compilation takes long."""
        return str(chunk) if self.is_ahead else "part"

    def sums(self) -> list[str]:
        """Accumulators of a round."""
        return [*SUMS[: len(self.written)], *(["sums"] if self.terms else [])]

    def array_name(self, name: str) -> str:
        """What an operand is called among the arrays of the launch."""
        leaves = self.region.leaves
        return {"query": f"leaf{leaves.index(self.plan.query)}", "key": f"leaf{leaves.index(self.plan.key)}"}.get(
            name, name
        )


def slots_of(width: int, others: int) -> tuple[int, int, int]:
    """Pairs of tiles of the program's own, and of chunks, that there is room for; and how far ahead lines travel."""
    pair, part = 2 * OWN * width * 2, 2 * CHUNK * width * 2 + 2 * CHUNK * 4
    lines = 2 * CHUNK * 4
    room = SHARED_BYTES - OWN * others * 2 - 8 * CHUNK * 2
    left = room - 4 * OWN * 4 - _LEAD * lines - 2 * pair
    if left >= 4 * part:
        return 2, min(_MOST_SLOTS, left // part), _LEAD
    # With one pair, gradients need a place of their own to leave by; and a chunk takes as long as memory does.
    left = room - lines - pair - pair // 2
    return 1, min(_MOST_SLOTS, left // part), 1


def print_load(own: SideWriter) -> None:
    """What the warp does that loads; where the program's own tiles have one slot, another one waits for that."""
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
        emit("# Scores of one more round begin, with whatever is there, and are not used.")
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
    """The program's own tiles of a round, each group's when it has done with the last one's."""
    for group in range(2):
        own.indices(None, "(first + round)")
        _load_own(own, group)


def _load_held(own: SideWriter) -> None:
    """Begin to copy the program's part of the bias, which stays."""
    own.emit(f"mbarrier.expect(held_full.index(0), {OWN * own.others * 2})")
    for piece in range(2 if own.is_columns else own.others // 64):
        first = ("0", f"own * {OWN} + {piece * 64}") if own.is_columns else (f"own * {OWN}", piece * 64)
        at = own.at(own.places["held"], *first)
        own.emit(f"tma_load(bias, [{at}], held_full.index(0), held.index({piece}))")


def _load_own(own: SideWriter, group: int) -> None:
    """The program's own tiles of a round, or a group's."""
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
    """Begin to copy so many rows of two arrays, from this row on, to these places."""
    own.emit(f"mbarrier.expect({full}, {2 * rows * own.plan.width * 2})")
    for array, place in zip(arrays, places, strict=True):
        at = own.at(own.places[array], offset)
        own.emit(f"tma_load({array}, [{at}], {full}, {place})")


def _request_lines(own: SideWriter) -> None:
    """Load what the softmax left of the program's queries, and what their slopes are compared with."""
    own.emit(f"o_q = own * {OWN} + gl.arange(0, {OWN}, C)")
    own.emit(f"loaded_sum = tl.load(p_log_sum + {own.writer.row_place()})")
    own.emit(f"loaded_delta = tl.load(p_delta + {own.writer.row_place()})")


def _copy_lines(own: SideWriter, step: str, slot: str) -> None:
    """Begin to copy the lines of a chunk of queries."""
    emit = own.emit
    emit(f"later = {step}")
    own.indices(None, f"(first + later // {own.chunks})")
    emit(f"o_q = later % {own.chunks} * {CHUNK} + gl.arange(0, {CHUNK}, C)")
    for i, name in enumerate(("log_sum", "delta")):
        place = f"p_{name} + {own.writer.row_place()}"
        emit(f"load_async(staged.index({slot} * 2 + {i}), {place})")
    emit("async_copy.commit_group()")


def _hand_over(own: SideWriter, full: Sequence[str]) -> None:
    """What was loaded, to those who compute."""
    emit = own.emit
    emit(f'lines.index(slot * 2).store(gl.where(loaded_sum == float("-inf"), 0.0, loaded_sum * {LOG2_E}))')
    emit("# Slopes begin from it.")
    emit("lines.index(slot * 2 + 1).store(0.0 - loaded_delta)")
    emit("thread_barrier()")
    for barrier in full:
        emit(f"mbarrier.arrive({barrier}, count=1)")
