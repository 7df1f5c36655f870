"""Block-diagonal attention on torch tensors through DLPack and JAX, used on the CPU and where JAX is requested."""

import functools
from typing import Any

import jax
import torch

from blockdiag.interop._lifetimes import same_device
from blockdiag.interop.dlpack import to_torch
from blockdiag.ops.block_diagonal.api import Call, attention_gradients, canonical_tables, differentiable_attention
from blockdiag.torch.bridge import check_call, precision, to_array, to_array_or_none, to_jax_rotary
from blockdiag.torch.ops.block_diagonal.operators import Arguments, describe


def forward(arguments: Arguments) -> torch.Tensor:
    """Return the output, whose shape is `Arguments.output_shape`."""
    with same_device(), precision(arguments.query, arguments.cos):
        call, arrays = _prepare(arguments)
        return to_torch(_forward(call, arrays))


def backward(arguments: Arguments, output_cotangent: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the gradients of query, key and value, or one gradient for a packed query."""
    with same_device(), precision(arguments.query, arguments.cos):
        call, arrays = _prepare(arguments)
        gradients = _backward(call, arrays, to_array(output_cotangent))
        return tuple(to_torch(one) for one in gradients if one is not None)


def packed_backward(arguments: Arguments, output_cotangent: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a packed query."""
    return backward(arguments, output_cotangent)[0]


def _prepare(arguments: Arguments) -> tuple[Call, tuple[Any, ...]]:
    """Return the call and its arrays: query, key, value, offsets, lengths, rotary."""
    # Checks see tensors, so they never wait for values on a GPU and messages name what the caller passed.
    problem = describe(arguments)
    call = Call(problem, check_call(problem, arguments.implementation, arguments.query.device))
    tensors = map(to_array_or_none, arguments[:5])
    return call, (*tensors, to_jax_rotary(arguments.to_rotary()))


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
