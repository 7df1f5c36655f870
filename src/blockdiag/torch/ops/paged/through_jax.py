"""Paged attention on torch tensors through DLPack and JAX, used on the CPU and where JAX is requested."""

import contextlib
from typing import Any

import jax
import torch

from blockdiag.common.dispatch import normalise_implementation, resolve
from blockdiag.interop._lifetimes import same_device
from blockdiag.interop.dlpack import to_jax, to_torch
from blockdiag.ops.paged.api import Call, _attention
from blockdiag.ops.paged.problem import PAGED
from blockdiag.torch.ops.paged.call import PagedArguments, describe


def attend(arguments: PagedArguments) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and the log-sum-exp."""
    with same_device(), precision(arguments.query):
        # Checks see tensors, so they never wait for values on a GPU and messages name what the caller passed.
        problem = describe(arguments)
        names = normalise_implementation(given_names(arguments.implementation), PAGED)
        resolve(problem, names)
        refuse_capture(arguments.query.device)
        chooses_splits = arguments.num_splits is None and arguments.split_size is None
        tensors = dict(zip(PagedArguments._fields, arguments.tensors, strict=False))
        if arguments.sinks is not None:
            tensors["sinks"] = arguments.sinks.float()
        output, log_sum = _attention(Call(problem, names, chooses_splits), to_arrays(tensors))
        return to_torch(output), to_torch(log_sum)


def to_arrays(tensors: dict[str, Any]) -> dict[str, Any]:
    """Convert tensors to arrays, copied if JAX cannot import them through DLPack; None stays None."""
    return {name: None if x is None else to_jax(x.detach(), copy=True) for name, x in tensors.items()}


def given_names(implementation: str) -> tuple[str, ...] | None:
    """Split comma-separated names into JAX's tuple of names; None if empty."""
    return tuple(implementation.split(",")) if implementation else None


def precision(*operands: torch.Tensor | None) -> Any:
    """Enable 64-bit types for float64 operands, which JAX would otherwise narrow to float32."""
    is_wide = any(operand is not None and operand.dtype == torch.float64 for operand in operands)
    return jax.enable_x64(True) if is_wide else contextlib.nullcontext()


def refuse_capture(device: torch.device) -> None:
    """Refuse to run while a CUDA graph is captured, which would not contain what JAX runs.

    Raises:
        RuntimeError: a CUDA graph is being captured.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a CUDA graph cannot capture the path through JAX, which runs on JAX's own stream; leave `via` and "
            "`implementation` at None for the native kernels, where they take the call (heads of 8 to 256 in steps of "
            "8, no float64), or call outside the capture"
        )
