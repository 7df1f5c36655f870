"""Gluon source of the Hopper backward kernel by rows that also computes the gradient of its resident bias.

The kernel is the template `triton_kernels.dense.hopper_resident_pairs`, or `hopper_resident_pairs_wide` if few tiles
fit. This module prints the device functions that the templates call. They locate tiles, and compute the terms of
scores. See lowering/resident_schedule.py, and resident_backward.py for the separate kernels of rows and columns.
"""

from dataclasses import dataclass

import jax.numpy as jnp

from blockdiag.fusion.codegen.backward import gradient_dims
from blockdiag.fusion.codegen.device_functions import FunctionWriter, template_source
from blockdiag.fusion.codegen.gluon import HopperKernel, print_function
from blockdiag.fusion.codegen.kernels import LOG2_E, Output, Source, Writer, cells_of
from blockdiag.fusion.codegen.resident_terms import print_terms
from blockdiag.fusion.ir.layout import layout_of, shape_of
from blockdiag.fusion.ir.linear_terms import factor_in
from blockdiag.fusion.ir.tile import Tile
from blockdiag.fusion.ir.tree import Region
from blockdiag.fusion.lowering.hopper import SHARED_BYTES, Place, place_of
from blockdiag.fusion.lowering.resident_schedule import CHUNK, Resident, resident, rounds_each
from blockdiag.fusion.lowering.tile_program import value_labels

NAME = "fused_rows_and_pairs_resident"
OWN = 64
"""The number of queries per program."""
_MOST_SLOTS = 8
# The number of multiprocessors of an H100 or H200 SXM.
_USUAL_MULTIPROCESSORS = 132
# Each program writes a partial gradient of the bias in float32, of at most 64 KiB.
_MOST_PROGRAMS = 4 * _USUAL_MULTIPROCESSORS
_FUNCTIONS = (
    "own_place", "place", "query_at", "output_at", "key_at", "value_at", "bias_at", "gradient_at", "line_at",
    "per_query", "start", "request_terms", "key_terms",
)  # fmt: skip


@dataclass(frozen=True)
class _Template:
    """A template, and the tiles that it takes.

    Attributes:
        module, kernel: its module, and its function.
        prefix: the beginning of the names of its types `<prefix>Shape` and `<prefix>Matrices`.
        inputs: further arrays with queries that it loads.
        columns: the keys of a tile of keys, of values, or of the bias.
        terms: the keys whose terms it asks for at once.
        parts: the parts in which it stores a tile of the query gradient.
        shape: its own static properties.
    """

    module: str
    kernel: str
    prefix: str
    inputs: tuple[str, ...]
    columns: int
    terms: int
    parts: int
    shape: dict[str, int]


def _template(width: int, keys: int) -> _Template:
    """Return the template for a head dimension and a number of keys."""
    chunks = keys // CHUNK
    # With three slots for query tiles, two chunks of the next round must have room.
    own_slots = next((x for x in (3, 2) if _slots(width, keys, x) >= (chunks + 2 if x > 2 else chunks)), None)
    if own_slots is None:
        part = keys // 2
        return _Template(
            "hopper_resident_pairs_wide", "resident_pairs_wide", "WidePairs", (), part, part // 2, 2, {"keys": keys}
        )
    shape = {"chunks": chunks // 2, "own_slots": own_slots, "slots": _slots(width, keys, own_slots)}
    return _Template("hopper_resident_pairs", "resident_pairs", "Pairs", ("output",), CHUNK, CHUNK, 1, shape)


def _slots(width: int, keys: int, own_slots: int) -> int:
    """Return how many chunks of keys and values fit, an even number so that each slot belongs to one group."""
    tile, part = OWN * width * 2, 2 * CHUNK * width * 2
    once = OWN * keys * 2 + OWN * width * 4 + own_slots * (3 * tile + 2 * OWN * 4 + keys * 4)
    return min(2 * keys // CHUNK, (SHARED_BYTES - once) // part // 2 * 2, _MOST_SLOTS)


class _Writer(FunctionWriter):
    """Writer of the device functions of one kernel.

    Args:
        gradient: the matrix view of the query gradient.
        factor: the factor of the bias in the scores.
    """

    def __init__(self, region: Region, plan: Resident, gradient: Place, factor: float) -> None:
        self.template = _template(plan.width, region.sizes["k"])
        writer = Writer(region, "rows", Tile(OWN, self.template.terms))
        super().__init__(region, writer, (plan.held, plan.query, plan.key))
        self.plan, self.factor = plan, factor
        self.tile_count = region.sizes["q"] // OWN
        self.places = {**plan.places, "bias": plan.places["held"], "gradient": gradient}
        leaves = region.leaves
        self.query, self.key, self.held = (leaves.index(x) for x in (plan.query, plan.key, plan.held))


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
    own = _Writer(region, plan, place, factor)
    return _kernel(own, Output(f"grad{own.query}", dims, shape, jnp.dtype(plan.query.source.dtype).name))


def _factor(region: Region, plan: Resident) -> float | None:
    """Return the factor of the bias in the scores, None if the bias is not an additive term."""
    assert region.score is not None
    return factor_in(region.score, plan.held)


def _bias_gradient(own: _Writer, parts: int) -> Output:
    """Return the output for the gradient of the bias.

    It has the layout of the bias if there is one part and the axes are in program order, else one axis for parts.
    """
    plan, sizes, name = own.plan, own.region.sizes, f"grad{own.held}"
    dims = gradient_dims(plan.held, plan.cell)
    order = [label for dim in dims or () if not isinstance(dim, int) for label in dim]
    if parts == 1 and dims is not None and order == [*plan.cell, "q", "k"]:
        return Output(name, dims, shape_of(dims, sizes), jnp.dtype(plan.held.gradient_dtype).name)
    labels = (*plan.cell, "part", "q", "k")
    sizes = sizes | {"part": parts}
    return Output(name, tuple((x,) for x in labels), tuple(sizes[x] for x in labels), "float32")


def _kernel(own: _Writer, d_query: Output) -> HopperKernel:
    region, plan, template = own.region, own.plan, own.template
    rounds, tiles = cells_of(region, plan.through), own.tile_count * cells_of(region, plan.cell)
    # The number of parts of the bias gradient must be chosen before the GPU is known.
    each = rounds_each(rounds, tiles, _USUAL_MULTIPROCESSORS, _MOST_PROGRAMS)
    d_bias = _bias_gradient(own, -(-rounds // each))
    rows = (*region.batch, "q")
    delta = Output("delta", tuple((x,) for x in rows), tuple(region.sizes[x] for x in rows), "float32")
    inputs = [f"leaf{i}" for i, leaf in enumerate(region.leaves) if leaf.source.key is not None]
    moved = _moved(own, d_query.name)
    own.writer.lines = []
    _places(own)
    print_terms(own, plan)
    _entry(own, [name for name, *_ in moved], d_bias.name)
    names = {
        f"dense.{template.module}": f"{template.prefix}Matrices, {template.prefix}Shape, {template.kernel}",
        "parts.hopper_pair_gradients": "PairsFunctions",
    }
    source = Source(
        template_source(names, own.writer.lines),
        NAME,
        (*inputs, "value", "log_sum", "cotangent", *template.inputs),
        (d_query, d_bias, delta),
        (tiles, 1, 1),
    )
    pointers = (*(f"leaf{i}" for i in own.pointers), "log_sum", "delta", d_bias.name)
    return HopperKernel(source, moved, pointers, rounds, tiles, each)


def _moved(own: _Writer, gradient: str) -> tuple[tuple[str, str, tuple[int, int], tuple[int, int]], ...]:
    """Return the arrays that the copy engine moves, see `HopperKernel.moved`."""
    width, template, places = own.plan.width, own.template, own.places
    return (
        ("query", f"leaf{own.query}", places["query"].shape, (OWN, width)),
        *((name, name, places["output"].shape, (OWN, width)) for name in ("cotangent", *template.inputs)),
        ("key", f"leaf{own.key}", places["key"].shape, (template.columns, width)),
        ("value", "value", places["value"].shape, (template.columns, width)),
        ("bias", f"leaf{own.held}", places["bias"].shape, (OWN, template.columns)),
        ("d_query", gradient, places["gradient"].shape, (OWN, width // template.parts)),
    )


def _places(own: _Writer) -> None:
    """Print the functions that locate tiles and lines."""
    region = own.region
    own.print_batch_places(own.plan.cell, own.plan.through)
    for name in ("query", "output", "gradient", "bias"):
        own.returning(f"{name}_at", "place, tile", own.at(own.places[name], f"tile * {OWN}"))
    for name in ("key", "value"):
        own.returning(f"{name}_at", "place", own.at(own.places[name], "0"))
    own.returning("line_at", "pointer, place", f"pointer + {own.base(region.batch, region.sizes['q'])}")


def _entry(own: _Writer, moved: list[str], d_bias: str) -> None:
    """Print the static properties and the kernel function."""
    plan, template, emit = own.plan, own.template, own.emit
    own.writer.depth = 0
    emit(f"FUNCTIONS = gl.constexpr(PairsFunctions({', '.join(_FUNCTIONS)}))")
    unit = float(plan.unit)
    shape = {
        "tiles": own.tile_count, "rounds": cells_of(own.region, plan.through), "width": plan.width, **template.shape,
        "has_key_terms": plan.of_keys is not None, "factor": unit, "unit": unit * LOG2_E,
        "bias_factor": float(own.factor),
    }  # fmt: skip
    emit(f"SHAPE = gl.constexpr({template.prefix}Shape({', '.join(f'{name}={x!r}' for name, x in shape.items())}))")
    emit()
    emit()
    matrices = ", ".join(moved)
    pointers = f"{own.parameters()}, p_log_sum, p_delta, p_{d_bias}"
    print_function(own, f"def {NAME}({matrices}{pointers}, ROUNDS: gl.constexpr):")
    arrays = ", ".join(f"p_leaf{i}" for i in own.pointers) or "p_log_sum"
    emit(
        f"{template.kernel}({template.prefix}Matrices({matrices}), ({arrays},), p_log_sum, p_delta, p_{d_bias}, "
        "ROUNDS, FUNCTIONS, SHAPE)"
    )
