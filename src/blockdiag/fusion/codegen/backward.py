"""Triton source of a region's backward kernels, see `kernels.py`."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from blockdiag.fusion.analysis.tile_lists import Lists
from blockdiag.fusion.codegen.expressions import Printer, Value
from blockdiag.fusion.codegen.kernels import LOG2_E, Output, Source, Writer, cells_of, store_mask
from blockdiag.fusion.frontend.trace import tile_jaxpr
from blockdiag.fusion.ir.layout import flat_stride, layout_of, shape_of
from blockdiag.fusion.ir.tile import Tile
from blockdiag.fusion.ir.tree import WITHOUT_KEYS, Dim, Leaf, Region, leaves_of
from blockdiag.fusion.lowering.tile_program import tile_function, value_columns, value_labels


def rows_source(region: Region, tile: Tile, leaf_grads: Sequence[int], lists: Lists | None = None) -> Source:
    """Return the kernel for gradients of leaves without keys; a program loops over the keys of a query tile."""
    writer = Writer(region, "rows", tile, leaf_grads)
    emit = writer.emit
    writer.place_program(writer.row_tiles, region.batch, last_first=lists is not None, through=None if lists else "k")
    writer.tile_of("q", "own")
    read_rows(writer)
    before = {i: writer.read(i) for i, leaf in enumerate(region.leaves) if leaf.role in WITHOUT_KEYS}
    for i in leaf_grads:
        shape = writer.tile_shape(region.leaves[i])
        emit(f"sum{i} = 0.0" if shape == (1, 1) else f"sum{i} = tl.zeros({list(shape)}, tl.float32)")

    def body(has_masks: bool) -> None:
        writer.tile_of("k", "tile")
        tiles = [before[i] if i in before else writer.read(i) for i in range(len(region.leaves))]
        add_gradients(writer, print_gradients(writer, tiles, wants_power=False, has_masks=has_masks))

    writer.through(lists, body)
    times_factor(writer)
    if region.extras:
        _add_extra_gradients(writer, before)
    for i in leaf_grads:
        _store_gradient(writer, i, region.batch)
    return writer.source(writer.row_tiles * cells_of(region, region.batch))


def extras_source(region: Region, tile: Tile, leaf_grads: Sequence[int]) -> Source:
    """Return the kernel for gradients of leaves on which only logits without values depend.

    They follow from the log-sum-exps and from delta, so a program reads no keys.
    """
    writer = Writer(region, "extras", tile, leaf_grads)
    writer.place_program(writer.row_tiles, region.batch)
    writer.tile_of("q", "own")
    _read_sums(writer)
    own = leaves_of(*region.extras)
    before = {i: writer.read(i) for i, leaf in enumerate(region.leaves) if leaf in own}
    for i in leaf_grads:
        writer.emit(f"sum{i} = 0.0")
    _add_extra_gradients(writer, before)
    for i in leaf_grads:
        _store_gradient(writer, i, region.batch)
    return writer.source(writer.row_tiles * cells_of(region, region.batch))


def columns_source(region: Region, tile: Tile, leaf_grads: Sequence[int], lists: Lists | None = None) -> Source:
    """Return the kernel for gradients of the values and of leaves with keys only.

    A program has a key tile. It loops over the queries, and over the batch axes that none of these arrays has.
    """
    own = {label for i in leaf_grads for label in region.leaves[i].labels} | set(value_labels(region))
    labels = [label for label in region.batch if label in own]
    others = [label for label in region.batch if label not in own]
    # With keys first, probabilities are the left operand of the gradient products without a transpose.
    writer = Writer(region, "columns", tile, leaf_grads, flipped=True)
    emit = writer.emit
    writer.place_program(writer.key_tiles, labels, through=None if lists else "q")
    writer.tile_of("k", "own")
    writer.read_value()
    fixed = {
        i: writer.read(i)
        for i, leaf in enumerate(region.leaves)
        if leaf.role in ("key", "feature", "column", "scalar") and not set(leaf.labels) & set(others)
    }
    for i in leaf_grads:
        emit(f"sum{i} = tl.zeros({list(writer.tile_shape(region.leaves[i]))}, tl.float32)")
    emit(f"sum_value = tl.zeros([{tile.columns}, {writer.wide}], tl.float32)")

    def body(has_masks: bool) -> None:
        writer.tile_of("q", "tile")
        read_rows(writer)
        tiles = [fixed[i] if i in fixed else writer.read(i) for i in range(len(region.leaves))]
        *grads, power = print_gradients(writer, tiles, wants_power=True, has_masks=has_masks)
        add_gradients(writer, grads)
        emit(
            f"sum_value = tl.dot({writer.whole(power)}.to(cotangent.dtype), cotangent, sum_value, "
            f'input_precision="{writer.precision}")'
        )

    def cells() -> None:
        writer.decode("other", others)
        writer.through(lists, body, rows=True)

    if others:
        writer.loop(f"for other in range({cells_of(region, others)}):", cells)
    else:
        writer.through(lists, body, rows=True)
    times_factor(writer)
    for i in leaf_grads:
        _store_gradient(writer, i, labels)
    _store_value(writer, labels)
    return writer.source(writer.key_tiles * cells_of(region, labels))


def pairs_source(region: Region, tile: Tile, place: int) -> Source:
    """Return the kernel for the gradient of a leaf with queries and keys.

    A program has a tile of the leaf and loops over the batch axes that the leaf lacks.
    """
    leaf = region.leaves[place]
    others = [label for label in region.batch if label not in leaf.labels]
    writer = Writer(region, "pairs", tile, (place,))
    emit = writer.emit
    writer.place_program(writer.row_tiles * writer.key_tiles, leaf.labels)
    writer.tile_of("q", f"(own // {writer.key_tiles})")
    writer.tile_of("k", f"(own % {writer.key_tiles})")
    fixed = {i: writer.read(i) for i, x in enumerate(region.leaves) if not set(x.labels) & set(others)}
    emit(f"sum{place} = tl.zeros({list(writer.tile_shape(leaf))}, tl.float32)")

    def body() -> None:
        if others:
            writer.decode("other", others)
        read_rows(writer)
        tiles = [fixed[i] if i in fixed else writer.read(i) for i in range(len(region.leaves))]
        add_gradients(writer, print_gradients(writer, tiles, wants_power=False, has_masks=True))

    writer.loop(f"for other in range({cells_of(region, others)}):", body)
    times_factor(writer)
    _store_gradient(writer, place, leaf.labels)
    return writer.source(writer.row_tiles * writer.key_tiles * cells_of(region, leaf.labels))


def read_rows(writer: Writer) -> None:
    """Print the loads of a row tile: the cotangent of the result, the log-sum-exp and delta."""
    place, masks = writer.result_place()
    writer.emit(f"cotangent = tl.load(p_cotangent + {place}{writer.masked(masks)})")
    if writer.region.score is not None:
        _read_sums(writer)


def _read_sums(writer: Writer) -> None:
    """Print the loads of a row tile's log-sum-exp and delta."""
    mask = writer.mask(True, False, 1)
    # A log-sum-exp of inf makes probabilities 0 in rows beyond the last query.
    beyond = f', mask={mask[0]}, other=float("inf")' if mask else ""
    writer.emit(f"base = tl.load(p_log_sum + {writer.row_place()}{beyond})")
    writer.emit(f'base = tl.where(base == float("-inf"), 0.0, base * {LOG2_E}){writer.row}')
    writer.emit(f"delta = tl.load(p_delta + {writer.row_place()}{writer.masked(mask)}){writer.row}")


def print_gradients(writer: Writer, tiles: Sequence[Value], *, wants_power: bool, has_masks: bool) -> list[Value]:
    """Print a tile's contribution to the gradients of `leaf_grads`, without the factor of the scores.

    Args:
        wants_power: also return the weighted probabilities, from which the gradient of the values is computed.
        has_masks: whether masks and the end of the keys apply to the tile.
    """
    region, tile = writer.region, writer.tile
    if writer.kind != "columns":
        # The "columns" kernel has loaded its value tile before the loop.
        writer.read_value()
    shape = writer.turned(tile.rows, tile.columns)
    factors = ("value", "tl.trans(cotangent)") if writer.flipped else ("cotangent", "tl.trans(value)")
    writer.emit(f'product = tl.dot({factors[0]}, {factors[1]}, input_precision="{writer.precision}")')
    roots = (writer.scores[0 if has_masks else 1], region.weight)
    function = tile_function(roots, region.leaves, np.dtype(np.float32), flipped=writer.flipped)
    places = writer.leaf_grads
    has_tail = has_masks and writer.keys % tile.columns > 0

    def gradients(given: Sequence[Any], product: Any, base: Any, delta: Any, is_key: Any) -> list[Any]:
        def compute(*some: Any) -> list[Any]:
            whole = list(given)
            for place, x in zip(places, some, strict=True):
                whole[place] = x
            return [x for x in function(*whole) if x is not None]

        found, pull = jax.vjp(compute, *(given[place] for place in places))
        rest = list(found)
        score = rest.pop(0) if region.score is not None else None
        weight = jnp.broadcast_to(rest.pop(0), shape) if region.weight is not None else None
        power = jnp.ones(shape, jnp.float32)
        if score is not None:
            power = jax.lax.exp2(jnp.broadcast_to(score, shape) * np.float32(writer.factor * LOG2_E) - base)
        if has_tail:
            power = jnp.where(is_key, power, np.float32(0))
        slopes = []
        if score is not None:
            slope = power * ((product if weight is None else product * weight) - delta)
            slopes.append(_summed_to(slope, score.shape))
        if weight is not None:
            # Divided here, because the sums are multiplied by the factor of the scores at the end.
            slopes.append(_summed_to(power * product * np.float32(1 / writer.factor), found[-1].shape))
        grads = list(pull(slopes))
        if wants_power:
            grads.append(power if weight is None else power * weight)
        return grads

    row = jax.ShapeDtypeStruct(writer.turned(tile.rows, 1), np.float32)
    column = jax.ShapeDtypeStruct(writer.turned(1, tile.columns), np.bool_)
    score = jax.ShapeDtypeStruct(shape, np.float32)
    jaxpr = tile_jaxpr(gradients, writer.tile_avals(), score, row, row, column)
    arguments = [
        *tiles,
        Value("product", shape),
        Value("base", row.shape),
        Value("delta", row.shape),
        Value(f"m_k{writer.column}", column.shape),
    ]
    return Printer(writer.emit, "x", writer.precision).run(jaxpr, arguments)


def times_factor(writer: Writer) -> None:
    """Print the multiplication of gradients by the factor of the scores, once for all tiles."""
    if writer.factor != 1:
        for i in writer.leaf_grads:
            writer.emit(f"sum{i} *= {writer.factor}")


def _add_extra_gradients(writer: Writer, before: Mapping[int, Value]) -> None:
    """Print the addition of the gradients that pass through logits without values; these have no keys.

    Args:
        before: the values of the leaves that they read.
    """
    region = writer.region
    tiles = [before.get(i, Value("0", writer.tile_shape(leaf))) for i, leaf in enumerate(region.leaves)]
    add_gradients(writer, _extra_gradients(writer, tiles))


def _extra_gradients(writer: Writer, tiles: Sequence[Value]) -> list[Value]:
    region = writer.region
    function = tile_function(region.extras, region.leaves, np.dtype(np.float32))
    places, rows = writer.leaf_grads, writer.tile.rows

    def gradients(given: Sequence[Any], base: Any, delta: Any) -> Any:
        def compute(*some: Any) -> list[Any]:
            whole = list(given)
            for place, x in zip(places, some, strict=True):
                whole[place] = x
            return list(function(*whole))

        found, pull = jax.vjp(compute, *(given[place] for place in places))
        powers = [jax.lax.exp2(jnp.broadcast_to(x, (rows, 1)) * np.float32(LOG2_E) - base) for x in found]
        return pull([_summed_to(-power * delta, x.shape) for power, x in zip(powers, found, strict=True)])

    column = jax.ShapeDtypeStruct((rows, 1), np.float32)
    jaxpr = tile_jaxpr(gradients, writer.tile_avals(), column, column)
    return Printer(writer.emit, "y", writer.precision).run(
        jaxpr, [*tiles, Value("base", column.shape), Value("delta", column.shape)]
    )


def _summed_to(x: Any, shape: tuple[int, ...]) -> Any:
    axes = tuple(axis for axis in (0, 1) if shape[axis] == 1 and x.shape[axis] != 1)
    return x.sum(axes, keepdims=True) if axes else x


def add_gradients(writer: Writer, grads: Sequence[Value]) -> None:
    for place, grad in zip(writer.leaf_grads, grads, strict=True):
        writer.emit(f"sum{place} += {grad.name}")


def gradient_dims(leaf: Leaf, labels: Sequence[str]) -> tuple[Dim, ...] | None:
    """Return the axis labels of a leaf's gradient if it can be written in the layout of the leaf, else None."""
    is_whole = (
        set(leaf.labels) == set(labels)
        and leaf.role not in ("scalar", "feature")
        and not any(isinstance(dim, int) for dim in leaf.dims)
    )
    return leaf.dims if is_whole else None


def partial_dims(leaf: Leaf, labels: Sequence[str]) -> tuple[Dim, ...]:
    """Return the axis labels of partial sums of a leaf's gradient."""
    last: dict[str, tuple[Dim, ...]] = {
        "query": (("q",), leaf.features), "key": (("k",), leaf.features), "row": (("q",),), "column": (("k",),),
        "score": (("q",), ("k",)), "scalar": (("tq",),), "feature": (("tq",), leaf.features),
    }  # fmt: skip
    return (*((label,) for label in labels), *last[leaf.role])


def _store_gradient(writer: Writer, place: int, labels: Sequence[str]) -> None:
    leaf, sizes = writer.region.leaves[place], writer.tile_sizes
    dims = gradient_dims(leaf, labels)
    dtype = "float32" if dims is None else jnp.dtype(leaf.gradient_dtype).name
    dims = partial_dims(leaf, labels) if dims is None else dims
    shape = shape_of(dims, sizes)
    layout = layout_of(shape, dims, sizes)
    name, base = f"grad{place}", layout.base(labels)
    writer.outputs.append(Output(name, dims, shape, dtype))
    value = f"sum{place}"
    match leaf.role:
        case "query" | "key":
            count, _ = writer.features(leaf)
            stride, wide = flat_stride(layout, leaf.features, sizes), writer.tile_shape(leaf)[1]
            line, label = ("o_q", "q") if leaf.role == "query" else ("o_k", "k")
            at = f"{writer.times(line + '[:, None]', label, layout)} + tl.arange(0, {wide})[None, :] * {stride}"
            size, total = (writer.tile.rows, writer.rows) if label == "q" else (writer.tile.columns, writer.keys)
            masks = [f"m_{label}[:, None]"] if total % size else []
            masks += [f"(tl.arange(0, {wide}) < {count})[None, :]"] if wide != count else []
        case "feature":
            count, _ = writer.features(leaf)
            wide = writer.tile_shape(leaf)[1]
            at, masks = f"own * {layout.stride('tq')} + tl.arange(0, {wide})[None, :]", []
            masks += [f"(tl.arange(0, {wide}) < {count})[None, :]"] if wide != count else []
        case "row":
            at, masks = writer.times("o_q" + writer.row, "q", layout), writer.mask(True, False)
        case "column":
            at, masks = writer.times("o_k" + writer.column, "k", layout), writer.mask(False, True)
        case "score":
            lines = writer.times("o_q" + writer.row, "q", layout)
            at = f"{lines} + {writer.times('o_k' + writer.column, 'k', layout)}"
            masks = writer.mask(True, True)
        case _:
            at, masks = f"own * {layout.stride('tq')}", []
            writer.emit(f"tl.store(p_{name} + {base} + {at}, {value})")
            return
    writer.emit(f"tl.store(p_{name} + {base} + {at}, {value}.to(p_{name}.dtype.element_ty){store_mask(masks)})")


def _store_value(writer: Writer, labels: Sequence[str]) -> None:
    region = writer.region
    own = value_labels(region)
    is_whole = set(own) == set(labels) and not any(isinstance(dim, int) for dim in region.value_dims)
    columns = value_columns(region)
    dims = region.value_dims if is_whole else (*((label,) for label in labels), ("k",), tuple(columns))
    shape = shape_of(dims, writer.sizes)
    layout = layout_of(shape, dims, writer.sizes)
    stride = flat_stride(layout, columns, writer.sizes)
    writer.outputs.append(
        Output("grad_value", dims, shape, jnp.dtype(region.value_gradient_dtype).name if is_whole else "float32")
    )
    at = f"{writer.times('o_k[:, None]', 'k', layout)} + tl.arange(0, {writer.wide})[None, :] * {stride}"
    masks = ["m_k[:, None]"] if writer.keys % writer.tile.columns else []
    masks += [f"(tl.arange(0, {writer.wide}) < {writer.columns})[None, :]"] if writer.wide != writer.columns else []
    writer.emit(
        f"tl.store(p_grad_value + {layout.base(labels)} + {at}, sum_value.to(p_grad_value.dtype.element_ty)"
        f"{store_mask(masks)})"
    )
