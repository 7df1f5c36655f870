"""Opaque autograd functions, which let `torch.func` transform calls that it cannot trace.

Transforms of torch.func pass wrapper tensors that have no memory of their own, so JAX and kernels cannot read them.
Here the call is one autograd function. Torch removes one transform after another and finally calls the function
with plain tensors. The gradient recomputes the function under autograd, and a mapped call is a loop.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch

from blockdiag.interop import dlpack
from blockdiag.interop.private_torch import is_functional

type Function = Callable[..., Sequence[torch.Tensor]]


def call_under_transforms(
    call: Callable[[tuple[Any, ...], dict[str, Any]], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return `call(args, kwargs)` while transforms of torch.func are active.

    Args:
        call: maps pytrees of arguments, some of them tensors, to a pytree of tensors; differentiable by autograd.
    """
    leaves, structure = jax.tree.flatten((args, kwargs))
    places = [place for place, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
    tensors = [leaves[place] for place in places]
    for x in tensors:
        if is_functional(x):
            # Torch has no rule for autograd functions under functionalization.
            dlpack.check_tensor(x)
    found: list[Any] = []

    def function(*given: torch.Tensor) -> Sequence[torch.Tensor]:
        filled = list(leaves)
        for place, x in zip(places, given, strict=True):
            filled[place] = x
        results, result_structure = jax.tree.flatten(call(*jax.tree.unflatten(structure, filled)))
        found.append(result_structure)
        return results

    results = _Opaque.apply(function, *tensors)
    return jax.tree.unflatten(found[0], results)


class _Opaque(torch.autograd.Function):
    """An opaque function of tensors, whose gradient recomputes it."""

    @staticmethod
    def forward(function: Function, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(function(*tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.function, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(*(x for x in output if not _carries_gradient(x)))

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[Any, ...]:
        tensors, needed = ctx.saved_tensors, ctx.needs_input_grad[1:]
        gradients = iter(_OpaqueGradient.apply(ctx.function, needed, *tensors, *cotangents))
        return None, *(next(gradients) if is_needed else None for is_needed in needed)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
        return _looped(_Opaque.apply, info, in_dims, arguments)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(
            "forward-mode derivatives of JAX functions are not available in torch; use reverse mode, or jax.jvp of the "
            "function in JAX"
        )


class _OpaqueGradient(torch.autograd.Function):
    """The required gradients of an opaque function; differentiating them again is an error."""

    @staticmethod
    def forward(function: Function, needed: Sequence[bool], *arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tensors, cotangents = arguments[: len(needed)], arguments[len(needed) :]
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_(is_needed) for x, is_needed in zip(tensors, needed, strict=True)]
            pairs = [
                (x, cotangent)
                for x, cotangent in zip(function(*leaves), cotangents, strict=True)
                if x.requires_grad and _carries_gradient(x)
            ]
        wanted = [x for x, is_needed in zip(leaves, needed, strict=True) if is_needed]
        if not pairs:
            return tuple(map(torch.zeros_like, wanted))
        outputs, given = zip(*pairs, strict=True)
        return torch.autograd.grad(outputs, wanted, given, allow_unused=True, materialize_grads=True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        del ctx, inputs, output

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> Any:
        raise NotImplementedError(
            "second derivatives of JAX functions are not available in torch; take them in JAX, of the function itself"
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
        return _looped(_OpaqueGradient.apply, info, in_dims, arguments)


def _looped(
    function: Callable[..., Sequence[torch.Tensor]], info: Any, in_dims: Sequence[Any], arguments: Sequence[Any]
) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
    """Run a mapped call as a loop over the mapped axis and stack the results along axis 0."""
    if info.batch_size == 0:
        raise NotImplementedError("a JAX function cannot be mapped over an axis of size 0; leave the call out")
    results = [
        function(
            *(
                x.select(dim, index) if isinstance(x, torch.Tensor) and dim is not None else x
                for x, dim in zip(arguments, in_dims, strict=True)
            )
        )
        for index in range(info.batch_size)
    ]
    stacked = tuple(map(torch.stack, zip(*results, strict=True)))
    return stacked, (0,) * len(stacked)


def _carries_gradient(x: torch.Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()
