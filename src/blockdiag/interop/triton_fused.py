"""The Triton implementation of fused regions, from JAX: generated kernels as launches."""

import collections
import dataclasses
import functools
import hashlib
import linecache
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from blockdiag.fusion.emit import NotPrintable
from blockdiag.fusion.kernels import Source, Tile, forward_source
from blockdiag.fusion.kernels_backward import columns_source, pairs_source, rows_source
from blockdiag.fusion.layout import flat_stride, layout_of, shape_of
from blockdiag.fusion.live import live_tiles
from blockdiag.fusion.tiles import (
    canonical_result,
    leaf_array,
    result_array,
    value_array,
    value_columns,
    value_labels,
)
from blockdiag.fusion.tree import Leaf, Region, with_leaves
from blockdiag.fusion.tree import Source as ArraySource
from blockdiag.interop import jax_call
from blockdiag.triton_kernels.block_diagonal_configs import next_power_of_2
from blockdiag.triton_kernels.plan import CompileOptions, LaunchPlan, Pointer, Target, TensorSpec

__all__ = ["arranged", "arrays_by_name", "available", "backward", "config", "forward", "sources", "supports"]

_MOST_COLUMNS = 256


def available() -> str | None:
    """None where kernels can be compiled and launched from this process; otherwise the reason and the remedy."""
    return jax_call.available()


def supports(region: Region) -> str | None:
    """None where the kernels can compute a region; otherwise a sentence with the reason and the remedy."""
    for source in (*(leaf.source for leaf in region.leaves), region.value):
        if source.dtype.itemsize == 8:
            return f"the Triton kernels take no {source.dtype} arrays; use implementation='xla'"
    widest = _widest(region)
    if widest > _MOST_COLUMNS:
        return f"the Triton kernels take head sizes up to {_MOST_COLUMNS}, got {widest}; use implementation='xla'"
    if 0 in region.sizes.values():
        return "the Triton kernels take no empty arrays; use implementation='xla'"
    try:
        sources(region)
    except NotPrintable as reason:
        return f"{reason}; use implementation='xla'"
    return None


@dataclasses.dataclass(frozen=True)
class FusedLaunch:
    """One launch of a generated kernel; a KernelSpec, equal to another one of the same source."""

    source: Source
    inputs: tuple[TensorSpec, ...]
    num_warps: int
    num_stages: int

    @property
    def name(self) -> str:
        """What profilers show."""
        return self.source.name

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Of each array that the launch writes."""
        return tuple(TensorSpec(x.shape, x.dtype) for x in self.source.outputs)

    def plan(self, target: Target) -> LaunchPlan:
        """The launch on `target`."""
        del target
        names = [f"p_{x}" for x in self.source.inputs]
        arguments = {name: Pointer("input", i) for i, name in enumerate(names)}
        arguments |= {f"p_{x.name}": Pointer("output", i) for i, x in enumerate(self.source.outputs)}
        return LaunchPlan(
            name=self.name,
            kernel=kernel_of(self.source.text, self.name),
            grid=self.source.grid,
            inputs=self.inputs,
            outputs=self.outputs,
            arguments=arguments,
            options=CompileOptions(num_warps=self.num_warps, num_stages=self.num_stages),
        )


@functools.lru_cache(maxsize=1024)
def kernel_of(text: str, name: str) -> Any:
    """The Triton function that a source defines."""
    file = f"<blockdiag.fuse {name} {hashlib.sha256(text.encode()).hexdigest()[:16]}>"
    # Triton asks for the source of functions, which is in no file.
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    scope: dict[str, Any] = {"__name__": "blockdiag.generated"}
    exec(compile(text, file, "exec"), scope)
    return scope[name]


def forward(region: Region, leaves: Sequence[Any], value: Any, *, interpret: bool = False) -> tuple[Any, Any]:
    """The result, as the product that it replaces, and the log-sum-exp [batch.., q]."""
    inner, change = arranged(region)
    arrays = arrays_by_name(change, leaves, value)
    tile, warps, stages = config(inner, is_forward=True)
    live = live_tiles(inner, tile, arrays)
    arrays |= {} if live is None else live.arrays
    source = forward_source(inner, tile, None if live is None else live.labels)
    output, log_sum = _launch(source, arrays, warps, stages, interpret=interpret)
    return (result_array(region, output) if change.changes_result else output), log_sum


def backward(
    region: Region,
    leaves: Sequence[Any],
    value: Any,
    output: Any,
    log_sum: Any,
    cotangent: Any,
    *,
    interpret: bool = False,
) -> tuple[list[Any], Any]:
    """The gradients of the leaves, None of those that are no floating numbers, and of the values."""
    inner, change = arranged(region)
    arrays = arrays_by_name(change, leaves, value)
    wide = jnp.float32
    delta = (canonical_result(region, output).astype(wide) * canonical_result(region, cotangent).astype(wide)).sum(-1)
    cotangent = canonical_result(region, cotangent) if change.changes_result else cotangent
    arrays |= {"log_sum": log_sum, "delta": delta, "cotangent": cotangent.astype(value.dtype)}
    tile, warps, stages = config(inner, is_forward=False)
    grads: list[Any] = [None] * len(leaves)

    def run(source: Source) -> dict[str, Any]:
        results = _launch(source, arrays, warps, stages, interpret=interpret)
        return dict(zip([x.name for x in source.outputs], results, strict=True))

    found: dict[int, tuple[Any, Any]] = {}
    live = live_tiles(inner, tile, arrays)
    arrays |= {} if live is None else live.arrays
    value_grad = None
    for source in backward_sources(inner, tile, None if live is None else live.labels):
        results = run(source)
        for written in source.outputs:
            if written.name == "grad_value":
                value_grad = (results[written.name], written.dims)
            else:
                found[int(written.name.removeprefix("grad"))] = (results[written.name], written.dims)
    for i, (grad, dims) in found.items():
        grads[i] = change.leaf_gradient(i, leaves[i], grad, dims)
    assert value_grad is not None
    return grads, change.value_gradient(value, *value_grad)


def backward_sources(region: Region, tile: Tile, live: Sequence[str] | None) -> list[Source]:
    """The kernels of a backward pass: gradients of all floating leaves and of the values."""
    places: dict[str, list[int]] = collections.defaultdict(list)
    for i, leaf in enumerate(region.leaves):
        if jnp.issubdtype(leaf.source.dtype, jnp.floating):
            places[leaf.role].append(i)
    rows = sorted(places["query"] + places["row"] + places["scalar"])
    found = [rows_source(region, tile, rows, live)] if rows else []
    found.append(columns_source(region, tile, sorted(places["key"] + places["column"]), live))
    return found + [pairs_source(region, tile, i) for i in places["score"]]


def sources(region: Region) -> tuple[Tile, tuple[Source, ...]]:
    """The forward tile, and all kernels of a region, without lists of tiles."""
    inner, _ = arranged(region)
    tile, _, _ = config(inner, is_forward=True)
    backward_tile, _, _ = config(inner, is_forward=False)
    return tile, (forward_source(inner, tile), *backward_sources(inner, backward_tile, None))


@dataclasses.dataclass(frozen=True)
class _Change:
    """What is arranged anew for the kernels, which want features and columns in one axis.

    Attributes:
        region, inner: before and after.
        leaves: whether each leaf is.
        value, changes_result: whether the values and the result are.
    """

    region: Region
    inner: Region
    leaves: tuple[bool, ...]
    value: bool
    changes_result: bool

    def leaf_gradient(self, place: int, array: Any, grad: Any, dims: Any) -> Any:
        """The gradient of a leaf from what a kernel wrote."""
        region = self.region
        leaf = region.leaves[place]
        if dims == leaf.dims and not self.leaves[place]:
            return grad
        inner = self.inner.leaves[place]
        if dims == inner.dims:
            canonical = grad
        else:
            sizes = {**self.inner.sizes, "tq": grad.shape[-1] if inner.role == "scalar" else 1}
            order = [label for dim in dims for label in dim]
            parts = grad.reshape([sizes[label] for label in order])
            kept = {*leaf.labels, "q", "k"} | {label for label in order if label.startswith("f")}
            canonical = parts.sum(tuple(axis for axis, label in enumerate(order) if label not in kept))
        shape, pull = jax.vjp(lambda x: leaf_array(leaf, x, region.batch, region.sizes), array)
        return pull(canonical.reshape(shape.shape).astype(array.dtype))[0]

    def value_gradient(self, array: Any, grad: Any, dims: Any) -> Any:
        """The gradient of the values from what a kernel wrote."""
        region = self.region
        if dims == region.value_dims and not self.value:
            return grad
        if dims != self.inner.value_dims:
            order = [label for dim in dims for label in dim]
            parts = grad.reshape([self.inner.sizes[label] for label in order])
            own = {*value_labels(region), "k", *value_columns(self.inner)}
            grad = parts.sum(tuple(axis for axis, label in enumerate(order) if label not in own))
        shape, pull = jax.vjp(lambda x: value_array(region, x), array)
        return pull(grad.reshape(shape.shape).astype(array.dtype))[0]


def arranged(region: Region) -> tuple[Region, _Change]:
    """The region with features, and columns of values, in one axis each."""
    replaced: dict[Leaf, Leaf] = {}
    flags = []
    for leaf in region.leaves:
        features = leaf.features
        layout = layout_of(leaf.source.shape, leaf.dims, region.sizes)
        is_odd = leaf.role in ("query", "key") and flat_stride(layout, features, region.sizes) is None
        flags.append(is_odd)
        replaced[leaf] = leaf
        if is_odd:
            axis = "q" if leaf.role == "query" else "k"
            dims = (*((label,) for label in leaf.labels), (axis,), features)
            source = ArraySource(("arranged", leaf.source.key), shape_of(dims, region.sizes), leaf.source.dtype)
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
    return inner, _Change(region, inner, tuple(flags), changes_value, changes_result)


def _widest(region: Region) -> int:
    """The most columns of values, or features of a query or a key."""
    lines = [value_columns(region), *(leaf.features for leaf in region.leaves)]
    return max(math.prod(region.sizes[label] for label in line) for line in lines)


def arrays_by_name(change: _Change, leaves: Sequence[Any], value: Any) -> dict[str, Any]:
    """The arrays of a call as the kernels take them: "leaf0", "leaf1", ... and "value"."""
    region = change.region
    found = {}
    for i, (leaf, x) in enumerate(zip(region.leaves, leaves, strict=True)):
        x = leaf_array(leaf, x, region.batch, region.sizes) if change.leaves[i] else x
        found[f"leaf{i}"] = x.astype(jnp.int8) if x.dtype == jnp.bool_ else x
    found["value"] = value_array(region, value) if change.value else value
    return found


def _launch(source: Source, arrays: dict[str, Any], warps: int, stages: int, *, interpret: bool) -> tuple[Any, ...]:
    given = [arrays[name] for name in source.inputs]
    specs = tuple(TensorSpec(tuple(x.shape), jnp.dtype(x.dtype).name) for x in given)
    return jax_call.launch(FusedLaunch(source, specs, warps, stages), *given, interpret=interpret)


def config(region: Region, *, is_forward: bool) -> tuple[Tile, int, int]:
    """Tile, warps and stages: what two products of tiles and their operands leave room for."""
    wide = _widest(region)
    is_single = any(leaf.source.dtype.itemsize == 4 and leaf.role in ("query", "key") for leaf in region.leaves)
    rows = min(
        32 if is_single else 128 if is_forward and wide <= 128 else 64, max(16, next_power_of_2(region.sizes["q"]))
    )
    columns = min(32 if is_single else 64 if wide <= 128 else 32, max(16, next_power_of_2(region.sizes["k"])))
    if rows == columns:
        # Axes of tiles are told apart by their sizes.
        columns = columns * 2 if columns < 64 else columns // 2
    return Tile(rows, columns), 8 if rows == 128 and wide > 64 else 4, 3 if is_forward else 2
