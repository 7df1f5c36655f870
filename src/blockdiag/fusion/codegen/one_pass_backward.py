"""Gluon source of the Hopper backward kernel that takes one pass over score tiles.

The kernel is the template `triton_kernels.dense.hopper_backward`. This module prints the device functions that the
template calls. They locate tiles, and compute scores and the gradients of products.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from blockdiag.fusion.codegen.backward import gradient_dims, partial_dims
from blockdiag.fusion.codegen.device_functions import FunctionWriter, template_source
from blockdiag.fusion.codegen.gluon import HopperKernel, print_function
from blockdiag.fusion.codegen.kernels import LOG2_E, Output, Source, Writer, cells_of
from blockdiag.fusion.frontend.trace import tile_jaxpr
from blockdiag.fusion.ir.layout import layout_of, shape_of
from blockdiag.fusion.ir.tree import Dim, Node, Region
from blockdiag.fusion.lowering.hopper import Place, place_of
from blockdiag.fusion.lowering.one_pass_schedule import OnePass, one_pass, programs_of, slots_of, tiles_of
from blockdiag.fusion.lowering.streamed_schedule import parts_of
from blockdiag.fusion.lowering.tile_program import tile_function, value_columns

NAME = "fused_backward_one_pass"
WALK = ("walk_codes", "walk_ranks")
"""Names of the lists of the query tiles that a program visits, see `runtime.block_sparsity.walk_tables`."""


class _Writer(FunctionWriter):
    """Writer of the device functions of a one-pass kernel."""

    def __init__(self, plan: OnePass) -> None:
        writer = Writer(plan.region, "columns", plan.tile, (len(plan.region.leaves) - 1,), flipped=True)
        super().__init__(plan.region, writer, (plan.query, plan.key, plan.product))
        self.plan = plan
        self.places = plan.places | {"cotangent": plan.places["output"]} | _gradient_places(plan)
        lines = cells_of(plan.region, plan.region.batch)
        self.places["query_gradient"] = Place((lines * plan.region.sizes["q"], plan.width), {}, {}, (0, 0))


def _gradient_dims(plan: OnePass) -> dict[str, tuple[Dim, ...]]:
    """Return the labels of the axes of the gradients of keys and values."""
    region = plan.region
    if plan.is_shared:
        columns = ("k",), tuple(value_columns(region))
        return {
            "key_gradient": partial_dims(plan.key, plan.own),
            "value_gradient": (*((label,) for label in plan.own), *columns),
        }
    key = gradient_dims(plan.key, plan.own)
    assert key is not None, "such regions have no one-pass schedule"
    return {"key_gradient": key, "value_gradient": region.value_dims}


def _gradient_places(plan: OnePass) -> dict[str, Place]:
    """Return the matrix views of the gradients of keys and values."""
    sizes = plan.region.sizes
    lines = {"key_gradient": plan.key.features, "value_gradient": tuple(value_columns(plan.region))}
    found = {}
    for name, dims in _gradient_dims(plan).items():
        shape = shape_of(dims, sizes)
        place = place_of(layout_of(shape, dims, sizes), shape, "k", lines[name], sizes)
        assert place is not None, "gradients are dense"
        found[name] = place
    return found


def _places(own: _Writer, labels: Sequence[str]) -> None:
    """Print the functions that locate tiles.

    Args:
        labels: the batch labels along which lists of tiles differ.
    """
    plan, region = own.plan, own.region
    own.print_batch_places(plan.own, plan.others)
    own.print_places({name: own.places[name] for name in _parts(plan) if name != "query_gradient"})
    own.returning("row_at", "place", own.base(region.batch, region.sizes["q"]))
    own.returning("line_at", "place", own.base(labels, 1))


def _scores(own: _Writer) -> None:
    """Print the functions of scores, with and without masks, and that of the gradients of products."""
    score, plain = own.writer.scores
    assert score is not None
    known = own.batch_indices | own.arrays
    plain = score if plain is None else plain
    tiles = "arrays, place, r_q, r_k, products"
    for name, root in (("score", score), ("plain_score", plain)):
        program = own.writer.tile_program([root])
        own.function(name, tiles, functools.partial(own.print_program, program, {}), known)
    more = ("power", "weighed")
    slope = functools.partial(own.print_program, _slope(own, plain), {}, more)
    own.function("slope", f"{tiles}, {', '.join(more)}", slope, known)


def _slope(own: _Writer, root: Node) -> Any:
    """Return the tile program of the gradients of products, without the factor of scores."""
    writer = own.writer
    function = tile_function([root], own.region.leaves, np.dtype(np.float32), flipped=True)
    shape = writer.turned(own.plan.tile.rows, own.plan.tile.columns)

    def gradient(given: Sequence[Any], power: Any, weighed: Any) -> Any:
        def compute(products: Any) -> Any:
            (found,) = function(*given[:-1], products)
            return jnp.broadcast_to(found, shape)

        _, pull = jax.vjp(compute, given[-1])
        return pull(power * weighed)

    tile = jax.ShapeDtypeStruct(shape, np.float32)
    return tile_jaxpr(gradient, writer.tile_avals(), tile, tile)


def one_pass_kernel(region: Region, labels: tuple[str, ...] | None) -> HopperKernel | None:
    """Return the one-pass backward kernel of a region, None if the schedule does not apply.

    Args:
        region: an arranged region.
        labels: the batch labels along which lists of tiles differ; None if there are no lists.
    """
    plan = region.once(one_pass)
    if plan is None or not set(labels or ()) <= set(plan.own):
        return None
    own = _Writer(plan)
    own.writer.lines = []
    _places(own, labels or ())
    _scores(own)
    _entry(own, is_listed=labels is not None)
    leaves, places = region.leaves, own.places
    query, key = leaves.index(plan.query), leaves.index(plan.key)
    rows, keys = plan.tile.rows, plan.tile.columns
    listed = WALK if labels is not None else ()
    outputs = _outputs(own, query, key)
    started = [x.name for x in outputs if x.starts_at_zero]
    pointers = (*(f"leaf{i}" for i in own.pointers), *listed, "log_sum", "delta", *_added(plan), "turns")
    read = [i for i in range(len(leaves)) if i in (query, key, *own.pointers)]
    inputs = (
        *(f"leaf{i}" for i in read), "value", *listed, "log_sum", "cotangent", "delta",
        *(f"zeros_{name}" for name in started),
    )  # fmt: skip
    arrays = {
        "query": (f"leaf{query}", rows), "key": (f"leaf{key}", keys), "value": ("value", keys),
        "cotangent": ("cotangent", rows), "key_gradient": (f"grad{key}", keys), "value_gradient": ("grad_value", keys),
        "query_gradient": (f"grad{query}", rows),
    }  # fmt: skip
    moved = tuple(
        (one, array, places[name].shape, (count, part))
        for name, (array, count) in arrays.items()
        for one, part in zip(_descriptors(plan)[name], _parts(plan)[name], strict=True)
    )
    programs = programs_of(plan)
    names = "BackwardFunctions, BackwardShape, Matrices, one_pass_backward"
    text = template_source({"dense.hopper_backward": names}, own.writer.lines)
    source = Source(text, NAME, inputs, outputs, (programs, 1, 1))
    return HopperKernel(source, moved, pointers, None, programs, num_warps=8)


def _parts(plan: OnePass) -> dict[str, tuple[int, ...]]:
    """Return the parts of the head dimension of each array that the copy engine moves."""
    parts = parts_of(plan.width)
    names = ("query", "key", "value", "cotangent", "key_gradient", "value_gradient")
    return dict.fromkeys(names, parts) | {"query_gradient": parts if plan.adds_in_bulk else ()}


def _added(plan: OnePass) -> tuple[str, ...]:
    """Return the pointer argument for the queries' gradient; none if the copy engine adds, through descriptors."""
    return () if plan.adds_in_bulk else (f"grad{plan.region.leaves.index(plan.query)}",)


def _descriptors(plan: OnePass) -> dict[str, list[str]]:
    """Return the names of the descriptors of each array, one for each part."""
    return {name: [name, f"{name}_more"][: len(parts)] for name, parts in _parts(plan).items()}


def _outputs(own: _Writer, query: int, key: int) -> tuple[Output, ...]:
    plan, region = own.plan, own.region
    sizes = region.sizes
    dims = partial_dims(plan.query, region.batch)
    key_dims, value_dims = _gradient_dims(plan).values()
    dtype = jnp.dtype(region.value.dtype).name
    turns = cells_of(region, region.batch) * tiles_of(plan)[0]
    return (
        Output(f"grad{query}", dims, shape_of(dims, sizes), "float32", factor=own.writer.factor, starts_at_zero=True),
        Output(f"grad{key}", key_dims, shape_of(key_dims, sizes), dtype),
        Output("grad_value", value_dims, shape_of(value_dims, sizes), dtype),
        Output("turns", ((),), (turns,), "int32", starts_at_zero=True),
    )


def _entry(own: _Writer, *, is_listed: bool) -> None:
    """Print the static properties and the kernel function."""
    plan, emit = own.plan, own.emit
    factor = own.writer.factor
    # Masks apply to all tiles if they cannot be separated from the score, or if there are no lists of tiles.
    is_apart = own.writer.scores[1] is not None and is_listed
    masks = "none" if not plan.has_masks else "some" if is_apart else "all"
    row_tiles, key_tiles = tiles_of(plan)
    stages, buffers = slots_of(plan)
    others = math.prod(plan.region.sizes[x] for x in plan.others)
    own.writer.depth = 0
    names = (
        "own_place", "place", "query_at", "key_at", "value_at", "cotangent_at", "key_gradient_at", "value_gradient_at",
        "row_at", "line_at", "score", "plain_score", "slope",
    )  # fmt: skip
    emit(f"FUNCTIONS = gl.constexpr(BackwardFunctions({', '.join(names)}))")
    shape = {
        "rows": plan.tile.rows, "keys": plan.tile.columns, "features": parts_of(plan.width), "stages": stages,
        "buffers": buffers, "query_tiles": row_tiles, "key_tiles": key_tiles, "others": others, "masks": masks,
        "is_listed": is_listed, "unit": factor * LOG2_E, "factor": factor, "is_bare": plan.is_bare,
        "is_ordered": own.region.is_ordered, "adds_in_bulk": plan.adds_in_bulk,
    }  # fmt: skip
    emit(f"SHAPE = gl.constexpr(BackwardShape({', '.join(f'{name}={x!r}' for name, x in shape.items())}))")
    emit()
    emit()
    codes = "p_walk_codes, p_walk_ranks" if is_listed else "p_turns, p_turns"
    listed = ", p_walk_codes, p_walk_ranks" if is_listed else ""
    matrices = _descriptors(plan)
    names = [*itertools.chain(*matrices.values())]
    # The second use of an output comes last, see `_hopper_plan` in runtime/launches.py.
    last = [x for x in names if x.endswith("_gradient_more")]
    parameters = (
        f"{', '.join(x for x in names if x not in last)}{own.parameters()}{listed}, p_log_sum, p_delta"
        f"{''.join(f', p_{x}' for x in _added(plan))}, p_turns{''.join(f', {x}' for x in last)}"
    )
    arrays = ", ".join(f"p_leaf{i}" for i in own.pointers) or "p_log_sum"
    print_function(own, f"def {NAME}({parameters}):")
    packs = ", ".join(f"({''.join(f'{one}, ' for one in x)})" for x in matrices.values())
    sums = ", ".join(f"p_{x}" for x in _added(plan)) or "p_log_sum"
    emit(
        f"one_pass_backward(Matrices({packs}), ({arrays},), {codes}, p_log_sum, p_delta, {sums}, p_turns, FUNCTIONS, "
        "SHAPE)"
    )
