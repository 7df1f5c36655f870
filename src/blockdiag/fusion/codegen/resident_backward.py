"""Gluon source of the Hopper backward kernels that keep a pair bias in shared memory.

The kernels are the template `triton_kernels.dense.hopper_resident_sides`, once for each side, "rows" and "columns".
This module prints the device functions that the template calls. They locate tiles, load terms of scores, add them to
the bias, and store their gradients. See lowering/resident_schedule.py.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

import jax.numpy as jnp

from blockdiag.fusion.codegen.device_functions import FunctionWriter, template_source
from blockdiag.fusion.codegen.expressions import Value
from blockdiag.fusion.codegen.gluon import HopperKernel, print_function
from blockdiag.fusion.codegen.kernels import LOG2_E, Source, Writer, cells_of, widening
from blockdiag.fusion.ir.layout import layout_of
from blockdiag.fusion.ir.linear_terms import factor_in
from blockdiag.fusion.ir.tile import Tile
from blockdiag.fusion.ir.tree import Region
from blockdiag.fusion.lowering.hopper import SHARED_BYTES, Place, place_of
from blockdiag.fusion.lowering.resident_schedule import CHUNK, Resident, resident
from blockdiag.fusion.lowering.tile_program import value_columns, value_labels

Side = Literal["rows", "columns"]

_OWN = 128
"""Queries or keys per program: two warp groups with 64 each."""
_MOST_OTHERS = 256
_MOST_SLOTS = 6
# Chunks of narrow tiles whose vectors are loaded ahead, because the memory latency exceeds the time of a chunk.
_LEAD = 4
_FEWEST_SLOTS = 2
_FUNCTIONS = (
    "own_place", "place", "own_scores_at", "own_slopes_at", "chunk_scores_at", "chunk_slopes_at", "first_gradient_at",
    "second_gradient_at", "bias_at", "line_at", "own_numbers", "own_terms", "chunk_numbers", "chunk_terms", "start",
    "store_sums",
)  # fmt: skip


class _Writer(FunctionWriter):
    """Writer of the device functions of one side's kernel.

    Args:
        plain: the plain kernel that this one replaces.
        terms: the factor of each further leaf with a gradient, an additive term, by the index of the leaf.
    """

    def __init__(self, region: Region, plan: Resident, side: Side, plain: Source, terms: dict[int, float]) -> None:
        is_columns = side == "columns"
        writer = Writer(region, side, Tile(CHUNK, CHUNK), flipped=is_columns)
        super().__init__(region, writer, (plan.held, plan.query, plan.key))
        self.plan, self.is_columns = plan, is_columns
        self.name = f"fused_{side}_resident"
        self.label, self.other = ("k", "q") if is_columns else ("q", "k")
        # The roles of leaves that threads read themselves: those that are the same for all chunks, and the others.
        self.own_roles = ("column" if is_columns else "row", "scalar")
        self.chunk_roles = ("row" if is_columns else "column",)
        # The operands of the score product and of the slope product: those of the program, and those of a chunk.
        self.own_arrays = ("key", "value") if is_columns else ("query", "cotangent")
        self.chunk_arrays = ("query", "cotangent") if is_columns else ("key", "value")
        self.terms, self.outputs = terms, {x.name: x for x in plain.outputs}
        self.others = region.sizes[self.other]
        self.own_slots, self.slots, self.lead = _slots_of(plan.width, self.others)
        self.tile_count = region.sizes[self.label] // _OWN
        leaf = plan.key if is_columns else plan.query
        written = {f"grad{region.leaves.index(leaf)}": leaf.features}
        if is_columns:
            written["grad_value"] = tuple(value_columns(region))
        # The gradients of the program's own tiles.
        self.gradients = {name: self._gradient_place(name, lines) for name, lines in written.items()}
        self.places = {**plan.places, "cotangent": plan.places["output"]}

    def _gradient_place(self, name: str, lines: tuple[str, ...]) -> Place | None:
        written = self.outputs[name]
        layout = layout_of(written.shape, written.dims, self.region.sizes)
        return place_of(layout, written.shape, self.label, lines, self.region.sizes)

    @property
    def loaded(self) -> dict[str, list[int]]:
        """The leaves that the functions `own_numbers` and `chunk_numbers` load."""
        roles = {"own": self.own_roles, "chunk": self.chunk_roles}
        return {name: [i for i in self.pointers if self.region.leaves[i].role in x] for name, x in roles.items()}

    def array_name(self, name: str) -> str:
        """Return the name of an operand among the arrays of the launch."""
        leaves, plan = self.region.leaves, self.plan
        found = {"query": plan.query, "key": plan.key, "bias": plan.held}
        return f"leaf{leaves.index(found[name])}" if name in found else name


def _slots_of(width: int, others: int) -> tuple[int, int, int]:
    """Return the numbers of slots for own tile pairs and for chunk pairs, and how many chunks ahead vectors load."""
    pair, part = 2 * _OWN * width * 2, 2 * CHUNK * width * 2 + 2 * CHUNK * 4
    lines = 2 * CHUNK * 4
    room = SHARED_BYTES - _OWN * others * 2 - 8 * CHUNK * 2
    left = room - 4 * _OWN * 4 - _LEAD * lines - 2 * pair
    if left >= 4 * part:
        return 2, min(_MOST_SLOTS, left // part), _LEAD
    # With one pair, gradients need a staging buffer of their own. A chunk then takes as long as the memory latency.
    left = room - lines - pair - pair // 2
    return 1, min(_MOST_SLOTS, left // part), 1


def resident_backward(region: Region, side: Side, places: Sequence[int], plain: Source) -> HopperKernel | None:
    """Return the Hopper kernel that replaces a plain backward kernel, None if it does not apply.

    Args:
        region: an arranged region without lists of live tiles.
        places: the indices of the leaves whose gradients are requested.
        plain: the plain kernel.
    """
    plan = resident(region)
    sizes = region.sizes
    if plan is None or (side == "columns" and sizes["k"] % _OWN) or max(sizes["q"], sizes["k"]) > _MOST_OTHERS:
        return None
    leaf = plan.key if side == "columns" else plan.query
    terms = _terms(region, side, places)
    if terms is None or region.leaves.index(leaf) not in places:
        return None
    labels = set(region.batch)
    if set(leaf.labels) != labels or set(value_labels(region)) != labels:
        return None
    own = _Writer(region, plan, side, plain, terms)
    dtype = jnp.dtype(region.dtype).name
    is_written = all(place is not None for place in own.gradients.values())
    if not is_written or {own.outputs[x].dtype for x in own.gradients} != {dtype} or own.slots < _FEWEST_SLOTS:
        return None
    pointers = (*(f"leaf{i}" for i in own.pointers), "log_sum", "delta", *(f"grad{i}" for i in terms))
    rounds = cells_of(region, plan.through)
    return HopperKernel(_source(own), _moved(own), pointers, rounds, own.tile_count * cells_of(region, plan.cell))


def _terms(region: Region, side: Side, places: Sequence[int]) -> dict[int, float] | None:
    """Return the factor of each row or column leaf with a gradient, None if one is not an additive term."""
    found: dict[int, float] = {}
    assert region.score is not None
    for i in places:
        leaf = region.leaves[i]
        if leaf.role in ("query", "key"):
            continue
        factor = factor_in(region.score, leaf) if leaf.role == side.removesuffix("s") else None
        if factor is None:
            return None
        found[i] = factor
    return found


def _moved(own: _Writer) -> tuple[tuple[str, str, tuple[int, int], tuple[int, int]], ...]:
    """Return the arrays that the copy engine moves, see `HopperKernel.moved`."""
    width = own.plan.width
    # The template loads own tiles as a whole if they have two slots, and the rows of each group by themselves if not.
    tiles = dict.fromkeys(own.own_arrays, (_OWN if own.own_slots > 1 else _OWN // 2, width))
    tiles |= dict.fromkeys(own.chunk_arrays, (CHUNK, width))
    found = [(x, own.array_name(x), own.places[x].shape, tile) for x, tile in tiles.items()]
    rows = own.others if own.is_columns else _OWN
    found.append(("bias", own.array_name("bias"), own.places["held"].shape, (rows, CHUNK)))
    for name, place in own.gradients.items():
        assert place is not None
        found.append((f"d_{name}", name, place.shape, (_OWN // 2, width)))
    return tuple(found)


def _source(own: _Writer) -> Source:
    own.writer.lines = []
    _places(own)
    _terms_of(own, "own", own.own_roles, own.label)
    _terms_of(own, "chunk", own.chunk_roles, own.other)
    _start(own)
    _store_sums(own)
    _entry(own)
    region = own.region
    names = [f"leaf{i}" for i, leaf in enumerate(region.leaves) if leaf.source.key is not None]
    imported = {"dense.hopper_resident_sides": "SidesFunctions, SidesMatrices, SidesShape, resident_sides"}
    return Source(
        template_source(imported, own.writer.lines),
        own.name,
        (*names, "value", "log_sum", "cotangent", "delta"),
        tuple(own.outputs.values()),
        (own.tile_count * cells_of(region, own.plan.cell), 1, 1),
    )


def _places(own: _Writer) -> None:
    """Print the functions that locate tiles and lines."""
    plan, region = own.plan, own.region
    own.print_batch_places(plan.cell, plan.through)
    places = {}
    for which, arrays in (("own", own.own_arrays), ("chunk", own.chunk_arrays)):
        for kind, array in zip(("scores", "slopes"), arrays, strict=True):
            places[f"{which}_{kind}"] = own.places[array]
    # The kernel of rows has one gradient, and does not call the second function.
    gradients = list(own.gradients.values())
    for name, one in (("first_gradient", gradients[0]), ("second_gradient", gradients[-1])):
        assert one is not None
        places[name] = one
    for name, one in places.items():
        own.returning(f"{name}_at", "place, first, offset", own.at(one, "first + offset"))
    own.returning("bias_at", "place", own.at(own.places["held"], "0"))
    own.returning("line_at", "pointer, place", f"pointer + {own.base(region.batch, region.sizes['q'])}")


def _terms_of(own: _Writer, name: str, roles: Sequence[str], label: str) -> None:
    """Print the functions that load terms, and convert what they have loaded.

    Args:
        name: "own" or "chunk".
        roles, label: the roles of the terms' leaves, and the label of the positions along which they vary.
    """
    region, line, loaded = own.region, f"r_{label}", own.loaded[name]

    def numbers() -> None:
        for i in loaded:
            leaf, layout = region.leaves[i], own.writer.layouts[i]
            more = "" if leaf.role == "scalar" else f" + {own.writer.times(line, label, layout)}"
            own.emit(f"loaded{i} = tl.load(p_leaf{i} + {layout.base(leaf.labels)}{more})")
        own.emit(f"return {_tuple((f'loaded{i}' for i in loaded), '0')}")

    def terms() -> None:
        axes = {"row": own.writer.row, "column": own.writer.column}
        for i in loaded:
            leaf = region.leaves[i]
            own.emit(f"leaf{i} = (loaded{i}{widening(leaf)}){axes.get(leaf.role, '')}")
        own.read(roles, counted=True)
        own.emit(f"return {_tuple((f'leaf{i}' for i in own.known(roles)), '0')}")

    own.function(f"{name}_numbers", f"arrays, place, {line}", numbers, own.batch_indices | own.arrays)
    own.function(f"{name}_terms", f"numbers, {line}", terms, _elements("loaded", loaded, "numbers"))


def _start(own: _Writer) -> None:
    """Print the function that adds terms to the bias."""
    plan = own.plan
    held = own.region.leaves.index(plan.held)
    own_terms, chunk_terms = own.known(own.own_roles), own.known(own.chunk_roles)

    def start() -> None:
        tiles = own.tiles({**own_terms, **chunk_terms, held: Value(f"leaf{held}", (CHUNK, CHUNK))})
        found = own.evaluate(plan.others, tiles, "x").name
        if plan.of_keys is not None:
            found += f" + {own.evaluate(plan.of_keys, tiles, 'y').name}"
        own.emit(f"return {found}")

    known = _elements("leaf", own_terms, "own_terms") | _elements("leaf", chunk_terms, "chunk_terms")
    own.function("start", "own_terms, chunk_terms, bias", start, {f"leaf{held}": "bias"} | known)


def _store_sums(own: _Writer) -> None:
    """Print the function that stores the gradients of own terms."""
    region, line = own.region, f"r_{own.label}"

    def store() -> None:
        for i, factor in own.terms.items():
            written = own.outputs[f"grad{i}"]
            layout = layout_of(written.shape, written.dims, region.sizes)
            at = f"p_grad{i} + {layout.base(region.batch)} + {own.writer.times(line, own.label, layout)}"
            own.emit(f"tl.store({at}, (sums * {factor}).to(p_grad{i}.dtype.element_ty))")
        if not own.terms:
            own.emit("pass")

    known = own.batch_indices | _elements("p_grad", own.terms, "gradients")
    own.function("store_sums", f"gradients, place, {line}, sums", store, known)


def _tuple(names: Iterable[str], otherwise: str) -> str:
    """Return a tuple as source text. Without names it holds `otherwise`, as it must not be empty."""
    return f"({', '.join(names) or otherwise},)"


def _elements(prefix: str, places: Iterable[int], name: str) -> dict[str, str]:
    """Return the names of leaves, each with the element of the tuple `name` that holds it."""
    return {f"{prefix}{x}": f"{name}[{i}]" for i, x in enumerate(places)}


def _entry(own: _Writer) -> None:
    """Print the static properties and the kernel function."""
    plan, emit = own.plan, own.emit
    own.writer.depth = 0
    emit(f"FUNCTIONS = gl.constexpr(SidesFunctions({', '.join(_FUNCTIONS)}))")
    shape = {
        "is_columns": own.is_columns, "tiles": own.tile_count, "rounds": cells_of(own.region, plan.through),
        "chunks": own.others // CHUNK, "width": plan.width, "own_slots": own.own_slots, "slots": own.slots,
        "lead": own.lead, "has_terms": bool(own.terms), "factor": plan.unit, "unit": plan.unit * LOG2_E,
    }  # fmt: skip
    emit(f"SHAPE = gl.constexpr(SidesShape({', '.join(f'{name}={x!r}' for name, x in shape.items())}))")
    emit()
    emit()
    moved = ", ".join((*own.own_arrays, *own.chunk_arrays, "bias"))
    gradients = [f"d_{name}" for name in own.gradients]
    sums = [f"p_grad{i}" for i in own.terms]
    pointers = f"{own.parameters()}, p_log_sum, p_delta{''.join(f', {x}' for x in sums)}"
    print_function(own, f"def {own.name}({moved}, {', '.join(gradients)}{pointers}, ROUNDS: gl.constexpr):")
    arrays = _tuple((f"p_leaf{i}" for i in own.pointers), "p_log_sum")
    emit(
        f"resident_sides(SidesMatrices({moved}, {_tuple(gradients, '')}), {arrays}, p_log_sum, p_delta, "
        f"{_tuple(sums, 'p_log_sum')}, ROUNDS, FUNCTIONS, SHAPE)"
    )
