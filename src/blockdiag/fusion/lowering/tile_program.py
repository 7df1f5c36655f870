"""Tile programs: the trees of a region's score, extras and weight as functions of tiles."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from blockdiag.common.derivatives import on_common_axes
from blockdiag.fusion.frontend.custom_derivatives import with_derivative
from blockdiag.fusion.ir.tree import DISTANCE, WITH_FEATURES, Function, Leaf, Node, Region, Trees, bottom_up
from blockdiag.fusion.regions.feature_sums import summed

# Primitives that the compiler itself inserts. Bound through their public functions.
_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    lax.add_p: lax.add,
    lax.mul_p: lax.mul,
    lax.div_p: lax.div,
    lax.select_n_p: lax.select_n,
}

type Tiles = Callable[..., tuple[Any, ...]]


def region_dtype(region: Region) -> np.dtype[Any]:
    """Return the dtype that a region computes in: float64 if any leaf or the values have it, else float32."""
    dtypes = [*(leaf.source.dtype for leaf in region.leaves), region.value.dtype]
    return np.dtype(np.float64 if np.dtype(np.float64) in dtypes else np.float32)


def tile_function(roots: Sequence[Node | None], leaves: Sequence[Leaf], dtype: Any, *, flipped: bool = False) -> Tiles:
    """Return a function from tiles of the leaves to tiles of the roots, [rows or 1, columns or 1].

    Args:
        roots: the nodes to compute. The result for None is None.
        leaves: the arguments of the function, in order.
        dtype: the dtype of every floating intermediate.
        flipped: whether tiles are transposed, [columns or 1, rows or 1].
    """
    places = {leaf: place for place, leaf in enumerate(leaves)}

    def compute(*tiles: Any) -> tuple[Any, ...]:
        known: dict[int, Any] = {}

        def value_of(root: Node) -> Any:
            for node in bottom_up(root):
                if id(node) not in known:
                    inputs = [known[id(x)] for x in node.inputs]
                    if flipped and node.kind == "product":
                        inputs.reverse()
                    is_sum = node.kind == "sum"
                    known[id(node)] = (
                        _summed(node, inputs, dtype, flipped=flipped)
                        if is_sum
                        else _compute(node, inputs, tiles, places, dtype)
                    )
            return known[id(root)]

        return tuple(None if root is None else as_tile(value_of(root), dtype) for root in roots)

    return compute


def _summed(node: Node, inputs: Sequence[Any], dtype: Any, *, flipped: bool) -> Any:
    """Compute a sum over features from tiles with two axes."""
    assert node.function is not None
    trees = node.function.value
    compute = tile_function(trees.roots, [leaf for leaf in trees.leaves if leaf is not None], dtype)
    tiles = [x.reshape((1,) * (2 - x.ndim) + x.shape) for x in inputs]
    return summed(node, on_common_axes(*tiles), lambda *given: compute(*given)[0], dtype, flipped=flipped)


def as_tile(array: Any, dtype: Any) -> Any:
    """Return a result as a two-dimensional tile of `dtype`."""
    array = jnp.asarray(array).astype(dtype)
    return array.reshape(1, 1) if array.ndim == 0 else array


def _compute(node: Node, inputs: Sequence[Any], tiles: Sequence[Any], places: dict[Leaf, int], dtype: Any) -> Any:
    match node.kind:
        case "leaf":
            assert node.leaf is not None
            tile = tiles[places[node.leaf]]
            is_wide = node.leaf.role not in WITH_FEATURES and jnp.issubdtype(tile.dtype, jnp.floating)
            return tile.astype(dtype) if is_wide else tile
        case "number":
            number = np.asarray(node.number)
            return jnp.asarray(number.astype(dtype) if jnp.issubdtype(number.dtype, jnp.floating) else number)
        case "product":
            rows, columns = inputs
            if rows.dtype.itemsize != columns.dtype.itemsize:
                # A factor is wider if its gradient is wanted in a wider dtype.
                common = max(rows.dtype, columns.dtype, key=lambda x: x.itemsize)
                rows, columns = rows.astype(common), columns.astype(common)
            precision = lax.Precision.HIGHEST if rows.dtype.itemsize >= 4 else None
            axes = (((1,), (1,)), ((), ()))
            return lax.dot_general(rows, columns, axes, precision=precision, preferred_element_type=dtype)
    shape = np.broadcast_shapes(*(x.shape for x in inputs))
    given = [jnp.broadcast_to(x.reshape((1,) * (len(shape) - x.ndim) + x.shape), shape) for x in inputs]
    given = on_common_axes(*given)
    if node.function is not None:
        return _called(node.function, given, shape, dtype)
    assert node.primitive is not None
    params = dict(node.params)
    if node.primitive is lax.convert_element_type_p and jnp.issubdtype(params["new_dtype"], jnp.floating):
        return given[0].astype(dtype)
    if node.primitive is lax.bitcast_convert_type_p:
        bits = node.primitive.bind(*given, **params)
        return bits.astype(dtype) if jnp.issubdtype(bits.dtype, jnp.floating) else bits
    if node.primitive in _FUNCTIONS:
        return _FUNCTIONS[node.primitive](*given)
    return node.primitive.bind(*given, **params)


def _called(function: Function, tiles: Sequence[Any], shape: tuple[int, ...], dtype: Any) -> Any:
    """Call a function with a custom derivative on tiles of one shape."""

    def results(trees: Trees, *given: Any) -> list[Any]:
        pairs = [(leaf, x) for leaf, x in zip(trees.leaves, given, strict=True) if leaf is not None]
        compute = tile_function(trees.roots, [leaf for leaf, _ in pairs], dtype)
        return [jnp.broadcast_to(x, shape) for x in compute(*(x for _, x in pairs))]

    def value(*given: Any) -> Any:
        return results(function.value, *given)[0]

    slope = None if function.slope is None else functools.partial(results, function.slope)
    return with_derivative(value, slope, function.places, function.mode)(*tiles)


def arrange(array: Any, dims: Sequence[Any], order: Sequence[str], sizes: dict[str, int]) -> Any:
    """Return an array with one axis per label, in the given order; labels that it lacks are skipped.

    Args:
        dims: for each axis of `array`, the labels that it combines, or a fixed index.
        order: labels, including all labels of `dims`.
    """
    index = tuple(dim if isinstance(dim, int) else slice(None) for dim in dims)
    labels = [label for dim in dims if not isinstance(dim, int) for label in dim]
    array = array if isinstance(array, np.ndarray) else jnp.asarray(array)
    array = array[index].reshape([sizes[label] for label in labels])
    return array.transpose([labels.index(label) for label in order if label in labels])


def leaf_order(leaf: Leaf, batch: Sequence[str]) -> list[str]:
    """Return the order of a leaf's labels: batch labels, then those of its tile."""
    return [*batch, "q", "k", DISTANCE, *leaf.features]


def leaf_array(leaf: Leaf, array: Any, batch: Sequence[str], sizes: dict[str, int]) -> Any:
    """Return a leaf in canonical form: batch labels first, then the axes of its role.

    | role | last axes |
    |---|---|
    | query | [q, features] |
    | key | [k, features] |
    | feature | [1, features] |
    | row, column, scalar | [q, 1], [1, k], [1, 1] |
    | score | [q, k] |
    | distance | [distances] |
    """
    array = arrange(array, leaf.dims, leaf_order(leaf, batch), sizes)
    lead = array.shape[: len(leaf.labels)]
    match leaf.role:
        case "query":
            return array.reshape(*lead, sizes["q"], math.prod(sizes[x] for x in leaf.features))
        case "key":
            return array.reshape(*lead, sizes["k"], math.prod(sizes[x] for x in leaf.features))
        case "feature":
            return array.reshape(*lead, 1, math.prod(sizes[x] for x in leaf.features))
        case "row":
            return array.reshape(*lead, sizes["q"], 1)
        case "column":
            return array.reshape(*lead, 1, sizes["k"])
        case "scalar":
            return array.reshape(*lead, 1, 1)
    return array


def value_array(region: Region, array: Any) -> Any:
    """Return the values as [labels.., keys, columns]."""
    columns = value_columns(region)
    array = arrange(array, region.value_dims, [*region.batch, "k", *columns], region.sizes)
    labels = [
        label for label in region.batch if any(label in dim for dim in region.value_dims if isinstance(dim, tuple))
    ]
    return array.reshape(*array.shape[: len(labels)], region.sizes["k"], -1)


def value_labels(region: Region) -> tuple[str, ...]:
    """Return the batch labels that the values have."""
    return tuple(x for x in region.batch if any(x in dim for dim in region.value_dims if isinstance(dim, tuple)))


def value_columns(region: Region) -> list[str]:
    """Return the labels of the values' columns."""
    return [x for dim in region.value_dims if isinstance(dim, tuple) for x in dim if x.startswith("d")]


def result_array(region: Region, array: Any) -> Any:
    """Return a result [batch.., q, columns] with the axes of the product that the region replaces."""
    columns = value_columns(region)
    labels = [*region.batch, "q", *columns]
    array = array.reshape([region.sizes[label] for label in labels])
    wanted = [label for dim in region.out_dims if isinstance(dim, tuple) for label in dim]
    array = array.transpose([labels.index(label) for label in wanted])
    return array.reshape([math.prod(region.sizes[label] for label in dim) for dim in region.out_dims])  # pyrefly: ignore[not-iterable]


def canonical_result(region: Region, array: Any) -> Any:
    """Return an array with the axes of that product as [batch.., q, columns], the inverse of `result_array`."""
    columns = value_columns(region)
    array = arrange(array, region.out_dims, [*region.batch, "q", *columns], region.sizes)
    return array.reshape(*[region.sizes[label] for label in region.batch], region.sizes["q"], -1)


def mapped(
    function: Callable[..., Any], labels: Sequence[Sequence[str]], batch: Sequence[str], sizes: dict[str, int]
) -> Callable[..., Any]:
    """Map a function of arrays without batch axes over all batch labels.

    Args:
        labels: the batch labels of each argument, in order.
        sizes: the sizes of labels. Results are broadcast along a label that no argument has.
    """
    for label in reversed(batch):
        if any(label in own for own in labels):
            function = jax.vmap(function, in_axes=tuple(0 if label in own else None for own in labels))
        else:
            function = _repeated(function, sizes[label])
    return function


def _repeated(function: Callable[..., Any], size: int) -> Callable[..., Any]:
    def several(*arrays: Any) -> Any:
        return jax.tree.map(lambda x: jnp.broadcast_to(x[None], (size, *x.shape)), function(*arrays))

    return several
