"""Gluon source of the Hopper forward kernel that streams keys and values through shared memory.

The kernel is the template `triton_kernels.dense.hopper_forward`. This module prints the device functions that the
template calls. They locate tiles, read lists of chunks, and compute scores. See lowering/streamed_schedule.py.
"""

import functools
import itertools
import math
from collections.abc import Mapping

from blockdiag.fusion.analysis.tile_lists import Lists
from blockdiag.fusion.codegen.device_functions import FunctionWriter, packed, template_source
from blockdiag.fusion.codegen.expressions import Value
from blockdiag.fusion.codegen.gluon import HopperKernel, print_function
from blockdiag.fusion.codegen.kernels import LIVE, LOG2_E, Output, Source, Writer, cells_of, forward_outputs
from blockdiag.fusion.ir.factors import NO_KEY, unmasked
from blockdiag.fusion.ir.layout import shape_of
from blockdiag.fusion.ir.tile import Tile
from blockdiag.fusion.ir.tree import Region
from blockdiag.fusion.lowering.eight_bit import weight_unit
from blockdiag.fusion.lowering.hopper import ROWS
from blockdiag.fusion.lowering.streamed_schedule import Streamed, parts_of, streamed

NAME = "fused_forward_streamed"
_GROUP_ROWS = ROWS // 2
_LISTS = LIVE[:2]
_FUNCTIONS = (
    "place", "query_at", "key_at", "value_at", "output_at", "row_at", "line_at", "walk", "tile_at", "per_query",
    "score", "plain_score", "extras", "weight", "offsets",
)  # fmt: skip


class _Writer(FunctionWriter):
    """Writer of the device functions of a streamed kernel."""

    def __init__(self, plan: Streamed) -> None:
        writer = Writer(plan.region, "forward", Tile(_GROUP_ROWS, plan.chunk))
        super().__init__(plan.region, writer, (plan.query, plan.key, plan.product))
        self.plan = plan
        self.is_long |= plan.is_wide and math.prod(shape_of(plan.region.out_dims, plan.region.sizes)) >= 2**31
        # The leaves whose values `per_query` returns, after the positions of queries.
        self.loaded = [i for i in self.pointers if plan.region.leaves[i].role in ("row", "scalar")]

    @property
    def numbers(self) -> Mapping[int, Value]:
        """The values that `per_query` returns, by leaf."""
        return {i: Value(f"leaf{i}", self.writer.tile_shape(self.region.leaves[i])) for i in self.loaded}


def _places(own: _Writer) -> None:
    """Print the functions that locate tiles, and those that read lists."""
    plan, region = own.plan, own.region

    def place() -> None:
        own.decode("cell", region.batch)
        own.emit(f"return {packed(region.batch, 'cell')}")

    own.function("place", "cell", place, {})
    own.print_places({name: plan.places[name] for name in ("query", "key", "value", "output")})
    own.returning("row_at", "place", own.base(region.batch, region.sizes["q"]))
    own.returning("line_at", "place", own.base(() if plan.lists is None else plan.lists.labels, 1))
    setup = [] if plan.lists is None else plan.lists.forms[0].setup("", "gl")
    names = [line.split(" = ")[0] for line in setup]

    def walk() -> None:
        for line in setup:
            own.emit(line)
        own.emit(f"return ({', '.join(names) or 'line'},)")

    own.function("walk", "p_live_counts, p_live_tiles, line", walk, {})
    tile = "at" if plan.lists is None else plan.lists.forms[0].tile("", "gl", "at", "all")
    own.returning("tile_at", "p_live_tiles, line, walk, at", tile, {x: f"walk[{i}]" for i, x in enumerate(names)})


def _scores(own: _Writer) -> None:
    """Print the functions that load per-query numbers, and compute scores, further logits, and weights of results."""
    region = own.region
    score, plain = own.writer.scores
    assert score is not None
    known = own.batch_indices | own.arrays

    def per_query() -> None:
        for i in own.loaded:
            own.read_leaf(i)
        own.emit(f"return ({', '.join(['r_q', *(f'leaf{i}' for i in own.loaded)])},)")

    own.function("per_query", "arrays, place, r_q", per_query, known)
    given = {"r_q": "numbers[0]"} | {f"leaf{x}": f"numbers[{i + 1}]" for i, x in enumerate(own.loaded)}
    for name, root in (("score", score), ("plain_score", score if plain is None else plain)):
        body = functools.partial(own.print_program, own.writer.tile_program([root]), own.numbers)
        own.function(name, "numbers, arrays, place, r_k, products", body, known | given)

    def extras() -> None:
        tiles = own.tiles({**own.numbers, **own.read(("row",), counted=True)})
        found = [own.evaluate(x, tiles, f"e{i}") for i, x in enumerate(region.extras)]
        own.emit(f"return ({''.join(f'{per_row(x)} * {LOG2_E}, ' for x in found) or '0,'})")

    def per_row(found: Value) -> str:
        """Return the expression of a value of each row as a vector."""
        number = f"gl.full([{_GROUP_ROWS}], {found.name}, gl.float32, r_q.type.layout)"
        return number if found.is_number else f"gl.sum({found.name}, 1)"

    def weight() -> None:
        if region.weight is None:
            own.emit("return 0")
            return
        tiles = own.tiles({**own.numbers, **own.read(("row",), counted=True)})
        own.emit(f"return {per_row(own.evaluate(region.weight, tiles, 'w'))}")

    own.function("extras", "numbers, arrays, place", extras, known | given)
    own.function("weight", "numbers, arrays, place", weight, known | given)
    layout, _ = own.writer.result_layout()
    rows_at = own.writer.times("r_q[:, None]", "q", layout).replace("tl.", "gl.")
    own.returning("offsets", "place, r_q, r_c", f"{layout.base(region.batch)} + {rows_at} + r_c[None, :]")


def _entry_of(plan: Streamed) -> str:
    """Return the name of the template's entry function."""
    return "streamed_eight_bit_forward" if plan.has_eight_bit_values else "streamed_forward"


def _entry(own: _Writer) -> None:
    """Print the static properties and the kernel function."""
    plan, region, emit = own.plan, own.region, own.emit
    is_listed = plan.lists is not None
    has_masks = region.score is not None and bool(unmasked(region.score)[1])
    is_apart = plan.lists is not None and plan.lists.has_full
    masks = "some" if is_apart else "all" if has_masks else "none"
    own.writer.depth = 0
    emit(f"FUNCTIONS = gl.constexpr(ForwardFunctions({', '.join(_FUNCTIONS)}))")
    (features, *features_more), (columns, *columns_more) = parts_of(plan.features), parts_of(plan.columns)
    shape = {
        "rows": ROWS, "chunk": plan.chunk, "features": features, "columns": columns,
        "features_more": sum(features_more), "columns_more": sum(columns_more), "slots": plan.slots,
        "query_slots": plan.query_slots, "query_tiles": region.sizes["q"] // ROWS,
        "chunks": region.sizes["k"] // plan.chunk, "lines": cells_of(region, region.batch), "together": plan.together,
        "masks": masks, "is_listed": is_listed, "staging": plan.staging, "unit": own.writer.factor * LOG2_E,
        "no_key": NO_KEY / own.writer.factor, "has_extras": bool(region.extras),
        "has_weight": region.weight is not None,
        "takes_turns": plan.takes_turns,
    }  # fmt: skip
    kind = "ForwardShape"
    if plan.has_eight_bit_values:
        kind, shape["offset"] = "EightBitShape", math.log2(weight_unit(region))
    emit(f"SHAPE = gl.constexpr({kind}({', '.join(f'{name}={x!r}' for name, x in shape.items())}))")
    emit()
    emit()
    # The names of the descriptors. Tiles with one part have no second one.
    names = {
        name: f"{name}_more" if more else name
        for name, more in zip(
            ("query", "key", "value", "output"), (features_more, features_more, columns_more, columns_more), strict=True
        )
    }
    if plan.is_wide:
        del names["output"]
    # The second use of the output comes last, see `_hopper_plan` in runtime/launches.py.
    given = dict.fromkeys(itertools.chain(*names.items()))
    last = ", output_more" if given.pop("output_more", True) is None else ""
    output = ", p_output" if plan.is_wide else ""
    listed = "".join(f", p_{x}" for x in _LISTS) if is_listed else ""
    print_function(
        own, f"def {NAME}({', '.join(given)}{output}{own.parameters()}{listed}, p_log_sum, p_counter{last}):"
    )
    # Threads store float32 results, so the descriptor of queries fills the places of theirs.
    matrices = ", ".join([*itertools.chain(*names.items()), *(["query", "query"] if plan.is_wide else [])])
    arrays = ", ".join(f"p_leaf{i}" for i in own.pointers) or "p_log_sum"
    lists = ", ".join(f"p_{x}" for x in _LISTS) if is_listed else "p_counter, p_counter"
    emit(
        f"{_entry_of(plan)}(Matrices({matrices}), {'p_output' if plan.is_wide else 'p_log_sum'}, ({arrays},), {lists}, "
        "p_log_sum, p_counter, FUNCTIONS, SHAPE)"
    )


def streamed_kernel(region: Region, tile: Tile, lists: Lists | None) -> HopperKernel | None:
    """Return the streamed kernel of a region, None if the schedule does not apply.

    Args:
        region: an arranged region.
        tile, lists: the tile size of the lists, and the lists.
    """
    plan = streamed(region, tile, lists)
    if plan is None:
        return None
    own = _Writer(plan)
    own.writer.lines = []
    _places(own)
    _scores(own)
    _entry(own)
    leaves, places = region.leaves, plan.places
    listed = _LISTS if lists is not None else ()
    counter = Output("counter", ((),), (1,), "int32", starts_at_zero=True)
    read = [i for i, leaf in enumerate(leaves) if leaf in (plan.query, plan.key) or i in own.pointers]
    inputs = (*(f"leaf{i}" for i in read), "value", *listed, "zeros_counter")
    arrays = {"query": f"leaf{leaves.index(plan.query)}", "key": f"leaf{leaves.index(plan.key)}", "value": "value"}
    tiles = {"query": (ROWS, plan.features), "key": (plan.chunk, plan.features), "value": (plan.chunk, plan.columns)}
    if not plan.is_wide:
        arrays["output"], tiles["output"] = "output", (_GROUP_ROWS, plan.columns)
    moved = tuple(
        (name if i == 0 else f"{name}_more", array, places[name].shape, (tiles[name][0], part))
        for name, array in arrays.items()
        for i, part in enumerate(parts_of(tiles[name][1]))
    )
    pointers = (*(f"leaf{i}" for i in own.pointers), *listed, "log_sum", "counter")
    if plan.is_wide:
        pointers = ("output", *pointers)
    names = {"dense.hopper_forward": f"ForwardFunctions, ForwardShape, Matrices, {_entry_of(plan)}"}
    if plan.has_eight_bit_values:
        names = {
            "dense.hopper_forward": "ForwardFunctions, Matrices",
            "dense.hopper_eight_bit_forward": f"EightBitShape, {_entry_of(plan)}",
        }
    text = template_source(names, own.writer.lines)
    items = region.sizes["q"] // ROWS * cells_of(region, region.batch)
    source = Source(text, NAME, inputs, (*forward_outputs(region), counter), (items, 1, 1))
    return HopperKernel(source, moved, pointers, None, items, is_persistent=True)
