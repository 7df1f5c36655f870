"""Key convolution on torch tensors through DLPack and JAX, used on the CPU and where JAX is requested."""

import contextlib
import functools
from typing import Any

import jax
import torch

from blockdiag.interop._lifetimes import same_device
from blockdiag.interop.dlpack import to_jax, to_torch
from blockdiag.ops.key_convolution.api import (
    Call,
    canonical_arrays,
    convolution_gradients,
    differentiable_convolution,
    prepare_call,
)
from blockdiag.torch.ops.key_convolution.call import Arguments, describe


def forward(arguments: Arguments) -> torch.Tensor:
    """Return the output in the shape of the key."""
    with same_device(), _precision(arguments):
        call, arrays = _prepare(arguments)
        return to_torch(_forward(call, *arrays))


def backward(arguments: Arguments, output_cotangent: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the gradients of key and weights."""
    with same_device(), _precision(arguments):
        call, arrays = _prepare(arguments)
        return tuple(map(to_torch, _backward(call, *arrays, _to_jax(output_cotangent))))


def _prepare(arguments: Arguments) -> tuple[Call, tuple[jax.Array, jax.Array, jax.Array | None]]:
    """Return the call and its arrays: key, weights, offsets."""
    # Checks see tensors, so they never wait for values on a GPU and messages name what the caller passed.
    problem = describe(arguments)
    call = prepare_call(problem, tuple(arguments.implementation.split(",")) if arguments.implementation else None)
    if arguments.key.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a CUDA graph cannot capture the path through JAX, which runs on JAX's own stream; leave `via` and "
            "`implementation` at None for the native kernels, which take every dtype but float64, or call outside the "
            "capture"
        )
    offsets = arguments.sequence_offsets
    arrays = (_to_jax(arguments.key), _to_jax(arguments.weights), None if offsets is None else _to_jax(offsets))
    return call, arrays


@functools.partial(jax.jit, static_argnums=0)
def _forward(call: Call, key: jax.Array, weights: jax.Array, sequence_offsets: jax.Array | None) -> jax.Array:
    arrays = canonical_arrays(call, key, weights, sequence_offsets)
    return differentiable_convolution(call, *arrays).reshape(key.shape)


@functools.partial(jax.jit, static_argnums=0)
def _backward(
    call: Call, key: jax.Array, weights: jax.Array, sequence_offsets: jax.Array | None, output_cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    flat_key, flat_weights, tiles = canonical_arrays(call, key, weights, sequence_offsets)
    cotangent = output_cotangent.reshape(flat_key.shape)
    if call.is_reference:
        _, pull_back = jax.vjp(lambda k, w: differentiable_convolution(call, k, w, tiles), flat_key, flat_weights)
        d_key, d_weights = pull_back(cotangent)
    else:
        d_key, d_weights = convolution_gradients(call, flat_key, flat_weights, tiles, cotangent)
    return d_key.reshape(key.shape), d_weights.reshape(weights.shape)


def _to_jax(tensor: torch.Tensor) -> jax.Array:
    """Return the tensor as an array, copied if JAX cannot import it through DLPack."""
    return to_jax(tensor.detach(), copy=True)


def _precision(arguments: Arguments) -> Any:
    """Enable 64-bit types for float64 operands, which JAX would otherwise narrow to float32."""
    return jax.enable_x64(True) if arguments.key.dtype == torch.float64 else contextlib.nullcontext()
