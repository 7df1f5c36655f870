"""Calls of JAX implementations with torch tensors: conversions and checks that all operations share. Imports JAX."""

import contextlib
from typing import Any

import jax
import torch

import blockdiag.common.rotary
from blockdiag.common.dispatch import normalise_implementation, resolve
from blockdiag.common.operation import Problem
from blockdiag.interop.dlpack import to_jax
from blockdiag.torch.rotary import Rotary


def check_call(
    problem: Problem,
    implementation: str,
    device: torch.device,
    reach: str = "where they take the call (heads of 8 to 256 in steps of 8, no float64)",
) -> tuple[str, ...] | None:
    """Return the implementations of a call, after checking that one supports it and that it may run now.

    Args:
        problem: the call.
        implementation: comma-separated names, empty for None.
        device: the device of the tensors.
        reach: the calls that the native kernels take, for the message.

    Raises:
        ValueError: a name is unknown.
        NotImplementedError: none of the implementations can compute the call.
        RuntimeError: a CUDA graph is being captured, which would not contain what JAX runs.
    """
    names = normalise_implementation(tuple(implementation.split(",")) if implementation else None, problem.operation)
    resolve(problem, names)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a CUDA graph cannot capture the path through JAX, which runs on JAX's own stream; leave `via` and "
            f"`implementation` at None for the native kernels, {reach}, or call outside the capture"
        )
    return names


def to_array(tensor: torch.Tensor) -> jax.Array:
    """Return the tensor as an array, copied if JAX cannot import it through DLPack."""
    return to_jax(tensor.detach(), copy=True)


def to_array_or_none(tensor: torch.Tensor | None) -> jax.Array | None:
    """Convert a tensor to an array; None stays None."""
    return None if tensor is None else to_array(tensor)


def to_arrays(tensors: dict[str, Any]) -> dict[str, Any]:
    """Convert tensors to arrays; None stays None."""
    return {name: to_array_or_none(x) for name, x in tensors.items()}


def to_jax_rotary(rotary: Rotary | None) -> blockdiag.common.rotary.Rotary | None:
    """Convert a rotary embedding of tensors to one of arrays."""
    if rotary is None:
        return None
    return blockdiag.common.rotary.Rotary(
        to_array(rotary.cos),
        to_array(rotary.sin),
        positions=to_array_or_none(rotary.positions),
        per_token=rotary.per_token,
        interleaved=rotary.interleaved,
        apply_to=rotary.apply_to,
    )


def precision(*operands: torch.Tensor | None) -> Any:
    """Enable 64-bit types for float64 operands, which JAX would otherwise narrow to float32."""
    is_wide = any(operand is not None and operand.dtype == torch.float64 for operand in operands)
    return jax.enable_x64(True) if is_wide else contextlib.nullcontext()
