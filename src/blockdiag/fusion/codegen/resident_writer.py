"""Shared writer of the Hopper kernels that keep a pair bias in shared memory, and are printed as a whole.

These are the backward kernels by rows that also have the gradient of the bias. The template of the forward kernel
shares the printers of key terms.
"""

from collections.abc import Sequence

from blockdiag.fusion.codegen.expressions import Value
from blockdiag.fusion.codegen.gluon import GluonPrinter, GluonWriter
from blockdiag.fusion.codegen.kernels import Writer, cells_of, widening
from blockdiag.fusion.ir.tile import Tile
from blockdiag.fusion.ir.tree import Node, Region, leaves_of
from blockdiag.fusion.lowering.resident_schedule import CHUNK, Resident
from blockdiag.triton_kernels.parts.shapes import next_power_of_2


class ResidentWriter(GluonWriter):
    """Writer of the functions of one resident backward kernel."""

    def __init__(self, region: Region, plan: Resident, writer: Writer) -> None:
        super().__init__(region, writer, (plan.held, plan.query, plan.key))
        self.plan = plan
        self.wide_keys = next_power_of_2(region.sizes["k"])
        self.counts_keys = any(leaf.role == "column" and leaf.source.key is None for leaf in leaves_of(plan.others))

    def indices(self, cell: str | None, through: str | None) -> None:
        """Print `i_<label>` of batch labels, from a flat index of the bias's labels and one of the others."""
        for name, labels in ((cell, self.plan.cell), (through, self.plan.through)):
            if name is not None:
                self.decode(name, labels)


def print_share(own: ResidentWriter, tiles: int) -> None:
    """Print the tile and the rounds of the program, which each warp group computes for itself."""
    emit, rounds = own.emit, cells_of(own.region, own.plan.through)
    emit("# Tiles that read the same arrays run side by side.")
    emit(f"own = gl.program_id(0) % {tiles}")
    emit(f"SHARES: gl.constexpr = ({rounds} + ROUNDS - 1) // ROUNDS")
    emit(f"first = gl.program_id(0) // {tiles} % SHARES * ROUNDS")
    emit(f"cell = gl.program_id(0) // ({tiles} * SHARES)")
    emit(f"count = gl.minimum(ROUNDS, {rounds} - first)")


def begin_terms(own: ResidentWriter, warps: int) -> None:
    """Print the layout of a vector over all keys, spread over `warps`, and the first round's loads."""
    keys, wide = own.region.sizes["k"], own.wide_keys
    own.emit(f"C: gl.constexpr = gl.BlockedLayout([1, {wide // 32 // warps}], [1, 32], [1, {warps}], [1, 0])")
    lines = f"gl.arange(0, {wide}, gl.SliceLayout(0, C))"
    own.emit(f"r_k = {lines if wide == keys else f'gl.minimum({lines}, {keys - 1})'}")
    own.indices(None, "first")
    request_terms(own)


def request_terms(own: GluonWriter, roles: Sequence[str] = ("column", "scalar")) -> None:
    """Print loads of the leaves of key or query terms in their own dtype; widening them would wait for the loads."""
    for i in own.pointers:
        leaf, layout = own.region.leaves[i], own.writer.layouts[i]
        if leaf.role in roles:
            label = {"row": "q", "column": "k"}.get(leaf.role)
            line = "" if label is None else f" + {own.writer.times(f'r_{label}', label, layout)}"
            own.emit(f"loaded{i} = tl.load(p_leaf{i} + {layout.base(leaf.labels)}{line})")


def store_terms(own: ResidentWriter, terms: Node, slot: str) -> None:
    """Print the sum of the key terms, and its store to a slot."""
    found = print_terms(own, terms)
    own.emit(f"terms = gl.zeros([1, {own.wide_keys}], gl.float32, C) + {found}")
    own.emit(f"of_keys.index({slot}).store(gl.sum(terms, 0))")


def print_terms(own: GluonWriter, terms: Node) -> str:
    """Print the sum of the key terms, and return its name: a tile [1, keys] or a number."""
    emit, region = own.emit, own.region
    whole = Writer(region, "forward", Tile(CHUNK, next_power_of_2(region.sizes["k"])))
    known = {}
    for i, leaf in enumerate(region.leaves):
        if leaf.role not in ("column", "scalar"):
            continue
        known[i] = Value(f"leaf{i}", whole.tile_shape(leaf))
        column = "[None, :]" if leaf.role == "column" else ""
        if leaf.source.key is None:
            emit(f"leaf{i} = r_k[None, :]{widening(leaf)}")
        else:
            emit(f"leaf{i} = (loaded{i}{widening(leaf)}){column}")
    tiles = [known.get(i, Value("0", whole.tile_shape(leaf))) for i, leaf in enumerate(region.leaves)]
    return GluonPrinter(emit, "y", whole.precision).run(whole.tile_program([terms]), tiles)[0].name
