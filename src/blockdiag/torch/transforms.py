"""Derivatives of the registered operators, for autograd and for the transforms of `torch.func`.

`torch.library.register_autograd` only supports autograd: its autograd function has no `setup_context`, without which
grad, vjp, jacrev and vmap(grad) raise. Here each operator also gets an autograd function that `torch.func` can
transform. The dispatcher calls it only while a transform is active, so ordinary calls and `torch.compile` are
unaffected.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from blockdiag.interop.private_torch import is_functional

# The dispatch key that comes first for all operators while a transform of torch.func is active.
_WHILE_TRANSFORMED = "FuncTorchDynamicLayerFrontMode"


def register_derivative(
    library: torch.library.Library,
    name: str,
    derivative: Callable[..., Any],
    remember: Callable[[Any, tuple[Any, ...], Any], None] | None = None,
) -> None:
    """Register the reverse-mode derivative of an operator, for autograd and for transforms of `torch.func`.

    Args:
        library: the library that defines the operator.
        name: the name of the operator, without its namespace.
        derivative: maps a context and the cotangents of all results to the gradients of all arguments.
        remember: saves what `derivative` needs, from the context, all arguments and the result.
    """
    torch.library.register_autograd(f"blockdiag::{name}", derivative, setup_context=remember, lib=library)
    _register_transforms(library, name, derivative, remember or _remember_nothing)


def register_constant(library: torch.library.Library, name: str) -> None:
    """Register an operator whose results are constant under differentiation, for transforms of `torch.func`."""
    _register_transforms(library, name, _no_derivative, _mark_constant)


def _register_transforms(
    library: torch.library.Library, name: str, derivative: Callable[..., Any], remember: Callable[..., None]
) -> None:
    operator = getattr(torch.ops.blockdiag, name).default

    class Transformed(torch.autograd.Function):
        """The operator in a form from which `torch.func` removes transforms one by one before it calls the operator."""

        @staticmethod
        def forward(*arguments: Any) -> Any:
            return operator(*arguments)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            remember(ctx, inputs, output)

        @staticmethod
        def backward(ctx: Any, *cotangents: Any) -> Any:
            return derivative(ctx, *cotangents)

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:
            raise NotImplementedError(
                f"forward-mode derivatives of blockdiag::{name} are not available in torch; use reverse mode, or the "
                'function of the same name in JAX with implementation="reference"'
            )

        @staticmethod
        def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
            if info.batch_size == 0:
                raise NotImplementedError(
                    f"blockdiag::{name} cannot be mapped over an axis of size 0; leave the call out"
                )
            results = [operator(*_row(arguments, in_dims, index)) for index in range(info.batch_size)]
            if isinstance(results[0], torch.Tensor):
                return torch.stack(results), 0
            stacked = tuple(map(torch.stack, zip(*results, strict=True)))
            return stacked, (0,) * len(stacked)

    def transformed(*arguments: Any) -> Any:
        if any(isinstance(x, torch.Tensor) and is_functional(x) for x in arguments):
            raise NotImplementedError(
                f"torch.func.functionalize does not support blockdiag::{name}, because torch has no functionalisation "
                "rule for autograd functions; leave it out: the operator changes nothing in place, and torch.compile "
                "and torch.export do not need it"
            )
        return Transformed.apply(*arguments)

    library.impl(name, transformed, _WHILE_TRANSFORMED)


def _row(arguments: Sequence[Any], in_dims: Sequence[int | None], index: int) -> list[Any]:
    """Return the arguments of one of the calls that a mapped call stands for."""
    return [x if dim is None else x.select(dim, index) for x, dim in zip(arguments, in_dims, strict=True)]


def _remember_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    del ctx, inputs, output


def _mark_constant(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    del inputs
    ctx.mark_non_differentiable(*([output] if isinstance(output, torch.Tensor) else output))


def _no_derivative(ctx: Any, *cotangents: Any) -> Any:
    raise AssertionError("results that are constant to differentiation have no cotangents")
