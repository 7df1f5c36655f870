"""Printer of the device functions that compute the terms of scores, for templates that add them to a resident bias."""

from collections.abc import Mapping

from blockdiag.fusion.codegen.device_functions import FunctionWriter
from blockdiag.fusion.codegen.expressions import Value
from blockdiag.fusion.codegen.gluon import GluonPrinter
from blockdiag.fusion.codegen.kernels import Writer, widening
from blockdiag.fusion.ir.tile import Tile
from blockdiag.fusion.ir.tree import Node, leaves_of
from blockdiag.fusion.lowering.resident_schedule import CHUNK, Scores
from blockdiag.triton_kernels.parts.shapes import next_power_of_2


def print_terms(own: FunctionWriter, scores: Scores) -> None:
    """Print `per_query` and `start`, and `request_terms` and `key_terms`; the templates describe them."""
    _query_terms(own, scores)
    _key_terms(own, scores)


def _loaded(own: FunctionWriter, *roles: str) -> list[int]:
    """Return the indices of leaves of some roles that threads load."""
    return [i for i in own.pointers if own.region.leaves[i].role in roles]


def _elements(name: str, elements: Mapping[str, int]) -> dict[str, str]:
    """Return names of values, each with the element of the tuple `name` that holds it."""
    return {one: f"{name}[{i}]" for one, i in elements.items()}


def _query_terms(own: FunctionWriter, scores: Scores) -> None:
    """Print the functions that load per-query numbers, and compute the terms of scores that have queries."""
    region, tile = own.region, own.writer.tile
    loaded = _loaded(own, "row", "scalar")

    def per_query() -> None:
        for i in loaded:
            own.read_leaf(i)
        own.emit(f"return ({', '.join(['r_q', *(f'leaf{i}' for i in loaded)])},)")

    def start() -> None:
        held = region.leaves.index(scores.held)
        used = leaves_of(scores.others)
        found = own.known(("row", "scalar")) | {held: Value("bias", (tile.rows, tile.columns))}
        for i, leaf in enumerate(region.leaves):
            if leaf in used and leaf.source.key is None:
                found[i] = own.read_leaf(i)
        own.emit(f"return {own.evaluate(scores.others, own.tiles(found), 'x').name}")

    own.function("per_query", "arrays, place, r_q", per_query, own.batch_indices | own.arrays)
    numbers = {"r_q": 0} | {f"leaf{x}": i + 1 for i, x in enumerate(loaded)}
    own.function("start", "numbers, r_k, bias", start, _elements("numbers", numbers))


def _key_terms(own: FunctionWriter, scores: Scores) -> None:
    """Print the functions that load the numbers of the terms without queries, and sum these terms."""
    leaves = own.region.leaves
    loaded = [] if scores.of_keys is None else _loaded(own, "column", "scalar")

    def request() -> None:
        # In their own dtypes, because widening them would wait for the loads.
        for i in loaded:
            leaf, layout = leaves[i], own.writer.layouts[i]
            line = f" + {own.writer.times('r_k', 'k', layout)}" if leaf.role == "column" else ""
            own.emit(f"loaded{i} = tl.load(p_leaf{i} + {layout.base(leaf.labels)}{line})")
        own.emit(f"return ({', '.join(f'loaded{i}' for i in loaded) or 'r_k'},)")

    def key_terms() -> None:
        own.emit(f"return {'0.0' if scores.of_keys is None else _sum_of(own, scores.of_keys)}")

    own.function("request_terms", "arrays, place, r_k", request, own.batch_indices | own.arrays)
    known = _elements("loaded", {f"loaded{x}": i for i, x in enumerate(loaded)})
    own.function("key_terms", "loaded, r_k", key_terms, known)


def _sum_of(own: FunctionWriter, terms: Node) -> str:
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
