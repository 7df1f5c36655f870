"""Block-diagonal attention on torch tensors through DLPack and JAX, used on the CPU and where JAX is requested."""

import contextlib
import functools
from typing import Any

import jax
import torch

from blockdiag.common.dispatch import normalise_implementation, resolve
from blockdiag.common.rotary import Rotary
from blockdiag.interop._lifetimes import same_device
from blockdiag.interop.dlpack import to_jax, to_torch
from blockdiag.ops.block_diagonal.api import Call, attention_gradients, canonical_tables, differentiable_attention
from blockdiag.ops.block_diagonal.problem import BLOCK_DIAGONAL
from blockdiag.torch.ops.block_diagonal.call import Arguments, describe


def forward(arguments: Arguments) -> torch.Tensor:
    """Return the output, whose shape is `Arguments.output_shape`."""
    with same_device(), _precision(arguments):
        call, arrays = _prepare(arguments)
        return to_torch(_forward(call, arrays))


def backward(arguments: Arguments, output_cotangent: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the gradients of query, key and value, or one gradient for a packed query."""
    with same_device(), _precision(arguments):
        call, arrays = _prepare(arguments)
        gradients = _backward(call, arrays, _to_jax(output_cotangent))
        return tuple(to_torch(one) for one in gradients if one is not None)


def _prepare(arguments: Arguments) -> tuple[Call, tuple[Any, ...]]:
    """Return the call and its arrays: query, key, value, offsets, lengths, rotary."""
    # Checks see tensors, so they never wait for values on a GPU and messages name what the caller passed.
    problem = describe(arguments)
    names = normalise_implementation(
        tuple(arguments.implementation.split(",")) if arguments.implementation else None, BLOCK_DIAGONAL
    )
    resolve(problem, names)
    _refuse_capture(arguments.query.device)
    query = _to_jax(arguments.query)
    key, value, sequence_offsets, block_lengths = map(_to_jax_or_none, arguments[1:5])
    rotary, given = None, arguments.to_rotary()
    if given is not None:
        rotary = Rotary(
            _to_jax(given.cos),
            _to_jax(given.sin),
            positions=_to_jax_or_none(given.positions),
            per_token=given.per_token,
            interleaved=given.interleaved,
            apply_to=given.apply_to,
        )
    call = Call(problem, names)
    return call, (query, key, value, sequence_offsets, block_lengths, rotary)


@functools.partial(jax.jit, static_argnums=0)
def _forward(call: Call, arrays: tuple[Any, ...]) -> jax.Array:
    query, key, value, tables = _canonical(call, arrays)
    output = differentiable_attention(call, query, key, value, tables)
    # Reshaped here because autograd refuses in-place writes to views that an operator returns.
    return output.reshape(*arrays[0].shape[:-2], *output.shape[-2:])


@functools.partial(jax.jit, static_argnums=0)
def _backward(call: Call, arrays: tuple[Any, ...], output_cotangent: jax.Array) -> tuple[jax.Array | None, ...]:
    query, key, value, tables = _canonical(call, arrays)
    cotangent = output_cotangent.reshape(-1, *output_cotangent.shape[-2:])
    if call.is_reference:
        _, pull_back = jax.vjp(lambda q, k, v: differentiable_attention(call, q, k, v, tables), query, key, value)
        gradients = pull_back(cotangent)
    else:
        gradients = attention_gradients(call, query, key, value, tables, cotangent)
    return jax.tree.map(lambda operand, gradient: gradient.reshape(operand.shape), arrays[:3], tuple(gradients))


def _canonical(call: Call, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the operands with one token axis, and the call's tables."""
    *operands, sequence_offsets, block_lengths, rotary = arrays
    tables = canonical_tables(call, operands[0].shape[:-2], sequence_offsets, block_lengths, rotary)
    flat = (None if one is None else one.reshape(-1, *one.shape[-2:]) for one in operands)
    return *flat, tables


def _to_jax(tensor: torch.Tensor) -> jax.Array:
    """Return the tensor as an array, copied if JAX cannot import it through DLPack."""
    return to_jax(tensor.detach(), copy=True)


def _to_jax_or_none(tensor: torch.Tensor | None) -> jax.Array | None:
    return None if tensor is None else _to_jax(tensor)


def _precision(arguments: Arguments) -> Any:
    """Enable 64-bit types for float64 operands, which JAX would otherwise narrow to float32."""
    is_wide = torch.float64 in (arguments.query.dtype, None if arguments.cos is None else arguments.cos.dtype)
    return jax.enable_x64(True) if is_wide else contextlib.nullcontext()


def _refuse_capture(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a CUDA graph cannot capture the path through JAX, which runs on JAX's own stream; "
            "leave `via` and `implementation` at None for the native kernels, where they take the call (heads of 8 to "
            "256 in steps of 8, no float64), or call outside the capture"
        )
