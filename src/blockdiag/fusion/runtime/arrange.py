"""Layouts of arrays that kernels can address, and the way back to the layouts of a call."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from blockdiag.fusion.ir.layout import arranged_dims, flat_stride, layout_of, shape_of
from blockdiag.fusion.ir.tree import Leaf, Region, with_leaves
from blockdiag.fusion.ir.tree import Source as ArraySource
from blockdiag.fusion.lowering.diagonals import distance_gradient
from blockdiag.fusion.lowering.tile_program import (
    leaf_array,
    value_array,
    value_columns,
    value_labels,
)


@dataclasses.dataclass(frozen=True)
class Change:
    """Change of array layouts made by `arranged`.

    Attributes:
        region, inner: the region before and after.
        leaves: for each leaf, whether its layout changes.
        value, changes_result: whether the layout of the values, and that of the result, changes.
    """

    region: Region
    inner: Region
    leaves: tuple[bool, ...]
    value: bool
    changes_result: bool

    def leaf_gradient(self, place: int, array: Any, grad: Any, dims: Any) -> Any:
        """Return the gradient of a leaf from a kernel's output.

        Args:
            place: the index of the leaf.
            array: the array of the leaf.
            grad: the output of the kernel, perhaps partial sums.
            dims: the labels of the axes of `grad`.
        """
        region = self.region
        leaf = region.leaves[place]
        if dims == leaf.dims and not self.leaves[place]:
            return grad.astype(leaf.gradient_dtype)
        if leaf.role == "distance":
            return distance_gradient(region, leaf, array, grad)
        inner = self.inner.leaves[place]
        if dims == inner.dims:
            canonical = grad
        else:
            # The sizes of the axes of partial sums are only known from the array.
            sizes = self.inner.sizes | {
                dim[0]: size for dim, size in zip(dims, grad.shape, strict=True) if len(dim) == 1
            }
            order = [label for dim in dims for label in dim]
            parts = grad.reshape([sizes[label] for label in order])
            kept = {*leaf.labels, "q", "k"} | {label for label in order if label.startswith("f")}
            canonical = parts.sum(tuple(axis for axis, label in enumerate(order) if label not in kept))
        array = array.astype(leaf.gradient_dtype)
        shape, pull = jax.vjp(lambda x: leaf_array(leaf, x, region.batch, region.sizes), array)
        return pull(canonical.reshape(shape.shape).astype(array.dtype))[0]

    def value_gradient(self, array: Any, grad: Any, dims: Any) -> Any:
        """Return the gradient of the values from a kernel's output, see `leaf_gradient`."""
        region = self.region
        if dims == region.value_dims and not self.value:
            return grad
        if dims != self.inner.value_dims:
            order = [label for dim in dims for label in dim]
            parts = grad.reshape([self.inner.sizes[label] for label in order])
            own = {*value_labels(region), "k", *value_columns(self.inner)}
            grad = parts.sum(tuple(axis for axis, label in enumerate(order) if label not in own))
        array = array.astype(region.value_gradient_dtype)
        shape, pull = jax.vjp(lambda x: value_array(region, x), array)
        return pull(grad.reshape(shape.shape).astype(array.dtype))[0]


def arranged(region: Region) -> tuple[Region, Change]:
    """Return the region with array layouts that the kernels can address, and the change of layouts.

    Features, and columns of values, become one axis each.
    """
    return region.once(_arranged)


def _arranged(region: Region) -> tuple[Region, Change]:
    replaced: dict[Leaf, Leaf] = {}
    flags = []
    for leaf in region.leaves:
        dims = arranged_dims(leaf, region.sizes)
        flags.append(dims is not None)
        replaced[leaf] = leaf
        if dims is not None:
            # Leaves of the same array may label its axes differently.
            key = ("arranged", leaf.source.key, leaf.dims)
            source = ArraySource(key, shape_of(dims, region.sizes), leaf.source.dtype)
            replaced[leaf] = dataclasses.replace(leaf, source=source, dims=dims)
    columns = value_columns(region)
    changes_value = (
        flat_stride(layout_of(region.value.shape, region.value_dims, region.sizes), columns, region.sizes) is None
    )
    value, value_dims = region.value, region.value_dims
    if changes_value:
        value_dims = (*((label,) for label in value_labels(region)), ("k",), tuple(columns))
        value = ArraySource(("arranged", value.key), shape_of(value_dims, region.sizes), value.dtype)
    out_layout = layout_of(shape_of(region.out_dims, region.sizes), region.out_dims, region.sizes)
    changes_result = flat_stride(out_layout, columns, region.sizes) is None
    out_dims = (*((label,) for label in region.batch), ("q",), tuple(columns)) if changes_result else region.out_dims
    inner = region
    if any(flags) or changes_value or changes_result:
        inner = with_leaves(region, replaced, value=value, value_dims=value_dims, out_dims=out_dims)
    return inner, Change(region, inner, tuple(flags), changes_value, changes_result)


def arrays_by_name(change: Change, leaves: Sequence[Any], value: Any) -> dict[str, Any]:
    """Return the arrays of a call by the names that the kernels use: "leaf0", "leaf1", ... and "value"."""
    region = change.region
    found = {}
    for i, (leaf, x) in enumerate(zip(region.leaves, leaves, strict=True)):
        x = leaf_array(leaf, x, region.batch, region.sizes) if change.leaves[i] else x
        found[f"leaf{i}"] = x.astype(jnp.int8) if x.dtype == jnp.bool_ else x
    found["value"] = value_array(region, value) if change.value else value
    return found
