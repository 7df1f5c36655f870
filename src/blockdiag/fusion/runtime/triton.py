"""Triton implementation of fused regions in JAX: forward and backward passes."""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from blockdiag.common.dtype_table import EIGHT_BIT_FLOATS, KERNEL_FLOATS
from blockdiag.fusion.codegen.expressions import NotPrintable
from blockdiag.fusion.ir.tree import Region, nodes_of
from blockdiag.fusion.lowering.eight_bit import has_eight_bits, multiplies_eight_bits, widened, widened_arrays
from blockdiag.fusion.lowering.tile_configs import widest
from blockdiag.fusion.lowering.tile_program import (
    canonical_result,
    result_array,
)
from blockdiag.fusion.runtime.arrange import arranged, arrays_by_name
from blockdiag.fusion.runtime.kernel_choice import (
    backward_kernels,
    forward_kernel,
    has_leading_kernel,
    hopper_kernels,
    kernels,
    may_have_own_forward,
    own_forward_kernel,
)
from blockdiag.fusion.runtime.launches import Kernel
from blockdiag.interop import jax_call
from blockdiag.interop.by_target import by_target
from blockdiag.triton_kernels.launch.plan import (
    Target,
    TensorSpec,
)
from blockdiag.triton_kernels.launch.private_triton import has_hopper_kernels

_MOST_COLUMNS = 256


def available() -> str | None:
    """Return None if this process can compile and launch kernels, otherwise the reason and the remedy."""
    return jax_call.available()


def supports(region: Region) -> str | None:
    """Return None if the kernels can compute a region, otherwise a sentence with the reason and the remedy."""
    for source in (*(leaf.source for leaf in region.leaves), region.value):
        if source.dtype.itemsize == 8:
            return f"the Triton kernels take no {source.dtype} arrays; use implementation='xla'"
    if (declined := _declined_dtype(region)) is not None:
        return f"{declined}; cast them, or use implementation='xla'"
    columns = widest(region)
    if columns > _MOST_COLUMNS:
        return f"the Triton kernels take head sizes up to {_MOST_COLUMNS}, got {columns}; use implementation='xla'"
    if 0 in region.sizes.values():
        return "the Triton kernels take no empty arrays; use implementation='xla'"
    try:
        kernels(region)
    except NotPrintable as reason:
        return f"{reason}; use implementation='xla'"
    return None


def _declined_dtype(region: Region) -> str | None:
    """Return which operands of a product have unsupported dtypes, in words; None if all are supported."""
    allowed = (*KERNEL_FLOATS, *EIGHT_BIT_FLOATS)
    if region.value.dtype.name not in allowed:
        return f"the Triton kernels take values of {', '.join(allowed)}, got {region.value.dtype}"
    for node in nodes_of(region.score, region.weight, *region.extras):
        if node.kind == "product":
            names = sorted({x.leaf.source.dtype.name for x in node.inputs if x.leaf is not None})
            if len(names) > 1 or names[0] not in (*allowed, "int8"):
                given = " and ".join(names)
                listed = f"{', '.join(allowed)} or int8"
                return f"the Triton kernels multiply two arrays of the same dtype, {listed}, got {given}"
    return None


def forward(region: Region, leaves: Sequence[Any], value: Any, *, interpret: bool = False) -> tuple[Any, Any]:
    """Return the result, with the axes of the product that it replaces, and the log-sum-exp [batch.., q]."""
    operands = (*leaves, value)
    if interpret:
        output, log_sum = _results(region, None, *operands, interpret=True)
    elif has_eight_bits(region):
        chosen = (functools.partial(f, region) for f in (_eight_bit_results, _widened_results))
        output, log_sum = by_target(multiplies_eight_bits, *chosen, *operands)
    elif may_have_own_forward(arranged(region)[0]):
        chosen = (functools.partial(_results, region, where) for where in (_is_hopper, _is_not_hopper))
        output, log_sum = by_target(_is_hopper, *chosen, *operands)
    else:
        output, log_sum = _results(region, None, *operands)
    return output, log_sum


def _eight_bit_results(region: Region, *operands: Any) -> list[Any]:
    """Return the results on GPUs with eight-bit products."""
    if not may_have_own_forward(arranged(region)[0]):
        return _results(region, multiplies_eight_bits, *operands)
    chosen = (functools.partial(_results, region, where) for where in (_is_hopper, _is_eight_bit_but_not_hopper))
    return by_target(_is_hopper, *chosen, *operands)


def _widened_results(region: Region, *operands: Any) -> list[Any]:
    """Return the results on GPUs without eight-bit products."""
    output, log_sum = _results(widened(region), _lacks_eight_bits, *widened_arrays(region, operands))
    return [output.astype(region.dtype), log_sum]


def _results(
    region: Region, where: Callable[[Target], bool] | None, *operands: Any, interpret: bool = False
) -> list[Any]:
    """Return the result and the log-sum-exp.

    Args:
        where: selects the targets that this computation is for; None: all targets.
        operands: the arrays of leaves and values.
    """
    *leaves, value = operands
    inner, change = arranged(region)
    arrays = arrays_by_name(change, leaves, value)
    kernel = own_forward_kernel(inner, arrays) if where is _is_hopper else None
    kernel = forward_kernel(inner, arrays) if kernel is None else kernel
    (results,) = _launch([kernel], arrays, interpret=interpret, group=_group(region), where=where)
    output = results["output"]
    return [result_array(region, output) if change.changes_result else output, results["log_sum"]]


def backward(
    region: Region,
    leaves: Sequence[Any],
    value: Any,
    output: Any,
    log_sum: Any,
    cotangent: Any,
    log_sum_cotangent: Any = None,
    *,
    interpret: bool = False,
) -> tuple[list[Any], Any]:
    """Return the gradients of the leaves, None for a leaf without one, and the gradient of the values."""
    if has_eight_bits(region):
        *wide_leaves, wide_value = widened_arrays(region, (*leaves, value))
        saved = (output, log_sum, cotangent, log_sum_cotangent)
        grads, value_grad = backward(widened(region), wide_leaves, wide_value, *saved, interpret=interpret)
        dtypes = [leaf.gradient_dtype for leaf in region.leaves]
        grads = [None if x is None else x.astype(dtype) for x, dtype in zip(grads, dtypes, strict=True)]
        return grads, value_grad.astype(region.value_gradient_dtype)
    has_sum = log_sum_cotangent is not None
    operands = (*leaves, value, output, log_sum, cotangent, *([log_sum_cotangent] if has_sum else []))
    inner, _ = arranged(region)
    if interpret or not has_leading_kernel(inner, has_sum=has_sum):
        found = _gradients(region, None, has_sum, *operands, interpret=interpret)
    else:
        on_hopper = functools.partial(_gradients, region, _is_hopper, has_sum)
        elsewhere = functools.partial(_gradients, region, _is_not_hopper, has_sum)
        found = by_target(_is_hopper, on_hopper, elsewhere, *operands)
    *found, value_grad = found
    rest = iter(found)
    return [next(rest) if leaf.has_gradient else None for leaf in region.leaves], value_grad


def _is_hopper(target: Target) -> bool:
    return has_hopper_kernels(target.arch)


def _is_not_hopper(target: Target) -> bool:
    return not _is_hopper(target)


def _lacks_eight_bits(target: Target) -> bool:
    return not multiplies_eight_bits(target)


def _is_eight_bit_but_not_hopper(target: Target) -> bool:
    return multiplies_eight_bits(target) and not _is_hopper(target)


def _gradients(
    region: Region,
    where: Callable[[Target], bool] | None,
    has_sum: bool,
    *operands: Any,
    interpret: bool = False,
) -> list[Any]:
    """Return the gradients of the leaves that have one, and the gradient of the values.

    Args:
        where: selects the targets that this computation is for; None: all targets.
        has_sum: whether the log-sum-exp has a cotangent, which then is the last operand.
        operands: the arrays of leaves, values, result, log-sum-exp and cotangent.
    """
    count = len(region.leaves)
    leaves, (value, output, log_sum, cotangent) = operands[:count], operands[count : count + 4]
    log_sum_cotangent = operands[-1] if has_sum else None
    inner, change = arranged(region)
    arrays = arrays_by_name(change, leaves, value)
    wanted = None if where is not _is_hopper else hopper_kernels(inner, arrays, has_sum=has_sum)
    wanted = backward_kernels(inner, arrays) if wanted is None else wanted
    arrays |= {"log_sum": log_sum}
    for name, x in (("output", output), ("cotangent", cotangent.astype(value.dtype))):
        arrays[name] = canonical_result(region, x) if change.changes_result else x
    # The joint kernel, which is launched first, may compute delta for the other kernels.
    made = {x.name for x in wanted[0].source.outputs if x.name == "delta"}
    if not made:
        wide = jnp.float32
        products = canonical_result(region, output).astype(wide) * canonical_result(region, cotangent).astype(wide)
        delta = products.sum(-1)
        arrays["delta"] = delta if log_sum_cotangent is None else delta - log_sum_cotangent.astype(wide)
    launch = functools.partial(_launch, interpret=interpret, group=_group(region), where=where)
    written = {}
    for some in (wanted[:1], wanted[1:]) if made else (wanted,):
        for kernel, results in zip(some, launch(some, arrays), strict=True):
            written |= {x.name: (_scaled(results[x.name], x.factor), x.dims) for x in kernel.source.outputs}
            arrays |= {name: results[name] for name in made & results.keys()}
    grads = [
        change.leaf_gradient(i, leaves[i], *written[f"grad{i}"])
        for i, leaf in enumerate(region.leaves)
        if leaf.has_gradient
    ]
    return [*grads, change.value_gradient(value, *written["grad_value"])]


def _scaled(x: Any, factor: float) -> Any:
    return x if factor == 1.0 else x * jnp.asarray(factor, x.dtype)


def _group(region: Region) -> Hashable:
    """Return a key that is the same for a region and its derivative, whose leaves have other flags."""
    return (region.value, tuple(leaf.source for leaf in region.leaves), region.out_dims)


def _launch(
    wanted: Sequence[Kernel],
    arrays: Mapping[str, Any],
    *,
    interpret: bool,
    group: Hashable,
    where: Callable[[Target], bool] | None = None,
) -> list[dict[str, Any]]:
    """Launch kernels that do not depend on each other, and return the outputs of each by name.

    Args:
        group, where: see `jax_call.launch_together`, which compiles the kernels of a group together.
    """
    launches = []
    for kernel in wanted:
        given = kernel.given(arrays)
        specs = [TensorSpec(tuple(x.shape), jnp.dtype(x.dtype).name) for x in given]
        # The interpreter does not support the layouts of Gluon kernels.
        kernel = dataclasses.replace(kernel, on_hopper=None) if interpret else kernel
        launches.append((kernel.launch(specs), given))
    found = jax_call.launch_together(launches, interpret=interpret, group=group, where=where)
    names = [[x.name for x in kernel.source.outputs] for kernel in wanted]
    return [dict(zip(own, results, strict=True)) for own, results in zip(names, found, strict=True)]
