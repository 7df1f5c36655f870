"""Checks and conversions of arguments that all operations share."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from blockdiag.common.operation import Operation
from blockdiag.interop import private_torch
from blockdiag.torch import nested

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def check_tensors(**given: Any) -> None:
    """Check that arguments are torch tensors rather than arrays of another library.

    Raises:
        ValueError: an argument is not; the message names it.
    """
    for name, value in given.items():
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"`{name}` must be a tensor, got {type(value)}; convert it with torch.as_tensor")


def check_plain_tensors(**given: Any) -> None:
    """Check that arguments are torch tensors, and not nested.

    Raises:
        ValueError: an argument is not; the message names it.
    """
    check_tensors(**given)
    nested.refuse(**given)


def check_devices(**given: Any) -> None:
    """Check that all tensors are on the device of the first.

    Raises:
        ValueError: a tensor is on another device; the message names it.
    """
    (first, reference), *others = given.items()
    for name, tensor in others:
        if isinstance(tensor, torch.Tensor) and tensor.device != reference.device:
            raise ValueError(
                f"`{name}` must be on the device of `{first}`, {reference.device}, got {tensor.device}; move one of "
                "them"
            )


def check_via(via: Any) -> None:
    """Check the value of `via`.

    Raises:
        ValueError: it is neither None nor "jax".
    """
    if via not in (None, "jax"):
        raise ValueError(f"`via` must be None or 'jax', got {via!r}; None launches the kernels natively on CUDA")


def who_computes(implementation: str | Sequence[str] | None, via: Any) -> tuple[tuple[str, ...], bool]:
    """Return the names of `implementation`, empty for None, and whether the native kernels are asked for.

    Raises:
        ValueError: `via` is neither None nor "jax".
    """
    if via is not None:
        check_via(via)
    names = (implementation,) if isinstance(implementation, str) else tuple(implementation or ())
    # The first supported name of a sequence wins, so the native operators apply only if "triton" comes first.
    return names, via is None and (not names or names[0] == "triton")


def check_names(implementation: str | Sequence[str] | None, names: tuple[str, ...], operation: Operation) -> None:
    """Check `implementation`, whose names are `names`.

    Raises:
        ValueError: a name is unknown, or the sequence is empty.
    """
    # Dispatch imports JAX, which the native kernels do not need.
    if implementation is not None and names != ("triton",):
        from blockdiag.common.dispatch import normalise_implementation

        normalise_implementation(implementation, operation)


def autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cast tensors to autocast's dtype where autocast is on; float64 is kept, as elsewhere in torch."""
    device_type = tensors[0].device.type
    # There is no autocast on the meta device, and asking for it is an error.
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(
        tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor
        for tensor in tensors
    )


def is_plain(*tensors: torch.Tensor | None) -> bool:
    """Return whether these are ordinary CUDA tensors that no mode or transform observes.

    Must not be called while compiling.
    """
    return (
        all([tensor is None or (type(tensor) in _PLAIN and tensor.is_cuda) for tensor in tensors])
        and not private_torch.may_be_observed()
    )


def wants_gradient(tensors: Sequence[Any]) -> bool:
    """Return whether autograd tracks any of these."""
    return torch.is_grad_enabled() and any([isinstance(one, torch.Tensor) and one.requires_grad for one in tensors])


def refuse_tangents(tensors: Sequence[Any], error: Callable[[], Exception]) -> None:
    """Refuse forward-mode tangents: a Python operator would silently drop them and give a derivative of 0.

    To be called where `may_have_tangents` is True.
    """
    for one in tensors:
        if isinstance(one, torch.Tensor) and forward_ad.unpack_dual(one).tangent is not None:
            raise error()


# Errors of derivatives that are not available in torch


def inference_error(name: str) -> TypeError:
    """Return the error that differentiating the public function `name` raises, as in JAX."""
    return TypeError(
        f"{name} is for inference and cannot be differentiated; call it under torch.no_grad() or with detached "
        "tensors, or train with another attention function, such as moba_attention or "
        "torch.nn.functional.scaled_dot_product_attention"
    )


def forward_mode_error(title: str, name: str) -> NotImplementedError:
    """Return the error that forward-mode derivatives of the public function `name` raise."""
    return NotImplementedError(
        f"forward-mode derivatives of {title} are not available in torch; use reverse mode, or "
        f'blockdiag.{name} with implementation="reference" in JAX'
    )


def second_derivative_error(title: str, name: str) -> NotImplementedError:
    """Return the error that second derivatives of the public function `name` raise."""
    return NotImplementedError(
        f"second derivatives of {title} are not available in torch; differentiate blockdiag.{name} in JAX, where they "
        "are"
    )
