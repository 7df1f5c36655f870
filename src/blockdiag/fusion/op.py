"""A fused region as a differentiable function of its leaves and values."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from blockdiag._differentiation import on_common_axes
from blockdiag.dispatch import call_implementation
from blockdiag.fusion.tree import Dim, Leaf, Region, Source, with_leaves


@dataclasses.dataclass(frozen=True)
class Call:
    """What is computed, and who may compute it."""

    region: Region
    implementations: tuple[str, ...] | None


def attend(call: Call, leaves: Sequence[Any], value: Any) -> Any:
    """The result of a region, with the axes of the product that it replaces.

    Args:
        leaves: an array for each of the region's leaves, as its source has it.
        value: the values, as their variable has them.
    """
    leaves, value = on_common_axes(tuple(leaves), value)
    return _attend(call, leaves, value)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call: Call, leaves: tuple[Any, ...], value: Any) -> Any:
    return _forward(call)(*leaves, value)[0]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Constant:
    """Which of a call's leaves nobody differentiates by."""

    leaves: tuple[bool, ...]


def _attend_forward(call: Call, leaves: tuple[Any, ...], value: Any) -> tuple[Any, Any]:
    constant = _Constant(tuple(not x.perturbed for x in leaves))
    arrays = tuple(x.value for x in leaves)
    output, log_sum = _forward(call)(*arrays, value.value)
    return output, (arrays, value.value, output, log_sum, constant)


def _attend_backward(call: Call, saved: Any, cotangent: Any) -> tuple[Any, Any]:
    leaves, value, output, log_sum, constant = saved
    if isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        return tuple(None for _ in leaves), None
    region = call.region
    marked = {
        leaf: dataclasses.replace(leaf, is_constant=flag)
        for leaf, flag in zip(region.leaves, constant.leaves, strict=True)
    }
    call = Call(with_leaves(region, marked), call.implementations)
    grads = iter(_backward(call)(*leaves, value, output, log_sum, cotangent))
    found = tuple(
        next(grads).astype(x.dtype) if leaf.has_gradient else None
        for leaf, x in zip(call.region.leaves, leaves, strict=True)
    )
    return found, next(grads).astype(value.dtype)


_attend.defvjp(_attend_forward, _attend_backward, symbolic_zeros=True)


def _forward(call: Call) -> Any:
    @jax.custom_batching.custom_vmap
    def compute(*operands: Any) -> Any:
        *leaves, value = operands
        return call_implementation("forward", call.region, call.implementations, leaves, value)

    @compute.def_vmap
    def compute_mapped(axis_size: int, is_mapped: Sequence[bool], *operands: Any) -> tuple[Any, Any]:
        mapped = map_region(call.region, axis_size, is_mapped)
        output, log_sum = _forward(Call(mapped, call.implementations))(*operands)
        return (output, log_sum), (True, True)

    return compute


def _backward(call: Call) -> Any:
    count = len(call.region.leaves) + 1

    @jax.custom_batching.custom_vmap
    def compute(*operands: Any) -> Any:
        *leaves, value, output, log_sum, cotangent = operands
        grads, value_grad = call_implementation(
            "backward", call.region, call.implementations, leaves, value, output, log_sum, cotangent
        )
        return (*[x for x, leaf in zip(grads, call.region.leaves, strict=True) if leaf.has_gradient], value_grad)

    @compute.def_vmap
    def compute_mapped(axis_size: int, is_mapped: Sequence[bool], *operands: Any) -> tuple[Any, Any]:
        mapped = map_region(call.region, axis_size, is_mapped[:count])
        results = [
            x if is_mapped_already else jnp.broadcast_to(x[None], (axis_size, *x.shape))
            for x, is_mapped_already in zip(operands[count:], is_mapped[count:], strict=True)
        ]
        grads = _backward(Call(mapped, call.implementations))(*operands[:count], *results)
        # Gradients of what is not mapped are already the sum.
        wanted = [*(leaf.has_gradient for leaf in call.region.leaves), True]
        flags = [flag for flag, is_wanted in zip(is_mapped[:count], wanted, strict=True) if is_wanted]
        return tuple(
            x if flag else jnp.concatenate([x[None], jnp.zeros((axis_size - 1, *x.shape), x.dtype)])
            for x, flag in zip(grads, flags, strict=True)
        ), (True,) * len(grads)

    return compute


def map_region(region: Region, axis_size: int, is_mapped: Sequence[bool]) -> Region:
    """The region of a mapped call: one more batch label, the first axis of what is mapped."""
    label = f"m{len(region.batch)}"
    leaves: dict[Leaf, Leaf] = {}
    *flags, is_value_mapped = is_mapped

    def mapped_source(source: Source) -> Source:
        return Source((label, source.key), (axis_size, *source.shape), source.dtype)

    for leaf, flag in zip(region.leaves, flags, strict=True):
        leaves[leaf] = leaf
        if flag:
            leaves[leaf] = dataclasses.replace(
                leaf,
                source=mapped_source(leaf.source),
                dims=((label,), *leaf.dims),
                labels=(label, *leaf.labels),
            )
    value_dims: tuple[Dim, ...] = ((label,), *region.value_dims) if is_value_mapped else region.value_dims
    value = mapped_source(region.value) if is_value_mapped else region.value
    return with_leaves(
        region,
        leaves,
        sizes=region.sizes | {label: axis_size},
        batch=(label, *region.batch),
        value=value,
        value_dims=value_dims,
        out_dims=((label,), *region.out_dims),
    )
