"""Gluon source of the Hopper forward kernel that keeps a pair bias in shared memory.

The kernel is the template `triton_kernels.dense.hopper_resident_forward`. This module prints the device functions that
the template calls. They locate tiles, and compute the terms of scores. See lowering/resident_schedule.py.
"""

from blockdiag.fusion.codegen.device_functions import FunctionWriter, indices, template_source
from blockdiag.fusion.codegen.gluon import HopperKernel, print_function
from blockdiag.fusion.codegen.kernels import LOG2_E, Source, Writer, cells_of, forward_outputs
from blockdiag.fusion.codegen.resident_terms import print_terms
from blockdiag.fusion.ir.factors import NO_KEY
from blockdiag.fusion.ir.tile import Tile
from blockdiag.fusion.ir.tree import Region
from blockdiag.fusion.lowering.hopper import ROWS
from blockdiag.fusion.lowering.resident_schedule import CHUNK, QUERY_SLOTS, Resident, resident
from blockdiag.triton_kernels.parts.shapes import next_power_of_2

NAME = "fused_forward_resident"
_GROUP_ROWS = ROWS // 2
_FUNCTIONS = (
    "own_place", "place", "bias_at", "query_at", "key_at", "value_at", "output_at", "rows_at", "per_query", "start",
    "request_terms", "key_terms",
)  # fmt: skip


class _Writer(FunctionWriter):
    """Writer of the device functions of a resident forward kernel."""

    def __init__(self, region: Region, plan: Resident) -> None:
        # Keys per score product: the more keys, the less often its left operand is read.
        self.chunk = 2 * CHUNK if plan.width == 128 and plan.part % (2 * CHUNK) == 0 else CHUNK
        writer = Writer(region, "forward", Tile(_GROUP_ROWS, self.chunk))
        super().__init__(region, writer, (plan.held, plan.query, plan.key))
        self.plan = plan


def _places(own: _Writer) -> None:
    """Print the functions that locate tiles."""
    plan = own.plan
    own.print_batch_places(plan.cell, plan.through)
    first = f"tile * {ROWS}"
    own.returning("bias_at", "own, tile", own.at(plan.places["held"], first), indices(plan.cell, "own"))
    own.returning("query_at", "place, tile", own.at(plan.places["query"], first))
    own.returning("output_at", "place, tile, first", own.at(plan.places["output"], f"{first} + first"))
    for name in ("key", "value"):
        own.returning(f"{name}_at", "place", own.at(plan.places[name], "0"))
    own.returning("rows_at", "p_rows, place, r_q", f"p_rows + {own.writer.row_place().replace('o_q', 'r_q')}")


def _entry(own: _Writer) -> None:
    """Print the static properties and the kernel function."""
    plan, region, emit = own.plan, own.region, own.emit
    own.writer.depth = 0
    emit(f"FUNCTIONS = gl.constexpr(ResidentFunctions({', '.join(_FUNCTIONS)}))")
    keys, unit = region.sizes["k"], float(plan.unit)
    shape = {
        "rows": ROWS, "keys": keys, "width": plan.width, "chunk": own.chunk, "part": plan.part, "slots": plan.slots,
        "query_slots": QUERY_SLOTS, "wide_keys": next_power_of_2(keys), "tiles": region.sizes["q"] // ROWS,
        "rounds": cells_of(region, plan.through), "unit": unit * LOG2_E, "no_key": NO_KEY / unit,
        "has_key_terms": plan.of_keys is not None, "has_ones": plan.has_ones,
        # With 128 columns, products take as long as exponentials. A round takes 9% longer if groups then take turns.
        "takes_turns": plan.width <= 64,
    }  # fmt: skip
    emit(f"SHAPE = gl.constexpr(ResidentShape({', '.join(f'{name}={x!r}' for name, x in shape.items())}))")
    emit()
    emit()
    moved = "query, key, value, bias, output"
    print_function(own, f"def {NAME}({moved}{own.parameters()}, p_log_sum, ROUNDS: gl.constexpr):")
    arrays = ", ".join(f"p_leaf{i}" for i in own.pointers) or "p_log_sum"
    emit(f"resident_forward(ResidentMatrices({moved}), ({arrays},), p_log_sum, ROUNDS, FUNCTIONS, SHAPE)")


def resident_kernel(region: Region) -> HopperKernel | None:
    """Return the resident forward kernel of a region, None if the schedule does not apply.

    Args:
        region: an arranged region without lists of live tiles.
    """
    plan = resident(region)
    if plan is None:
        return None
    own = _Writer(region, plan)
    own.writer.lines = []
    _places(own)
    print_terms(own, plan)
    _entry(own)
    leaves, width, places = region.leaves, plan.width, plan.places
    moved = (
        ("query", f"leaf{leaves.index(plan.query)}", places["query"].shape, (ROWS, width)),
        ("key", f"leaf{leaves.index(plan.key)}", places["key"].shape, (plan.part, width)),
        ("value", "value", places["value"].shape, (plan.part, width)),
        ("bias", f"leaf{leaves.index(plan.held)}", places["held"].shape, (ROWS, own.chunk)),
        ("output", "output", places["output"].shape, (_GROUP_ROWS, width)),
    )
    names = "ResidentFunctions, ResidentMatrices, ResidentShape, resident_forward"
    tiles = region.sizes["q"] // ROWS * cells_of(region, plan.cell)
    source = Source(
        template_source({"dense.hopper_resident_forward": names}, own.writer.lines),
        NAME,
        (*(f"leaf{i}" for i, leaf in enumerate(leaves) if leaf.source.key is not None), "value"),
        forward_outputs(region),
        (tiles, 1, 1),
    )
    pointers = (*(f"leaf{i}" for i in own.pointers), "log_sum")
    return HopperKernel(source, moved, pointers, cells_of(region, plan.through), tiles)
