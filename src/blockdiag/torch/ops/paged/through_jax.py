"""Paged attention on torch tensors through DLPack and JAX: on the CPU, and where JAX is asked for."""

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
    """Output and log-sum-exp."""
    with same_device(), precision(arguments.query):
        # Checked as tensors: values are then never waited for on a GPU, and messages name what the caller passed.
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
    """Tensors as arrays, copied where DLPack cannot describe them to JAX; None stays None."""
    return {name: None if x is None else to_jax(x.detach(), copy=True) for name, x in tensors.items()}


def given_names(implementation: str) -> tuple[str, ...] | None:
    """Names as JAX has them, of those with commas between them."""
    return tuple(implementation.split(",")) if implementation else None


def precision(*operands: torch.Tensor | None) -> Any:
    """JAX narrows float64 unless told not to."""
    is_wide = any(operand is not None and operand.dtype == torch.float64 for operand in operands)
    return jax.enable_x64(True) if is_wide else contextlib.nullcontext()


def refuse_capture(device: torch.device) -> None:
    """What JAX runs would not be part of a CUDA graph.

    Raises:
        RuntimeError: while one is captured.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a CUDA graph cannot capture the path through JAX, which runs on JAX's own stream; leave `via` and "
            "`implementation` at None for the native kernels, where they take the call (heads of 8 to 256 in steps of "
            "8, no float64), or call outside the capture"
        )
