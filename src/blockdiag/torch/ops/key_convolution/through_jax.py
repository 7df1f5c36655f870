"""Key convolution on torch tensors through DLPack and JAX, used on the CPU and where JAX is requested."""

import functools

import jax
import torch

from blockdiag.interop._lifetimes import same_device
from blockdiag.interop.dlpack import to_torch
from blockdiag.ops.key_convolution.api import (
    Call,
    canonical_arrays,
    convolution_gradients,
    differentiable_convolution,
)
from blockdiag.torch.bridge import check_call, precision, to_array, to_array_or_none
from blockdiag.torch.ops.key_convolution.operators import Arguments, describe


def forward(arguments: Arguments) -> torch.Tensor:
    """Return the output in the shape of the key."""
    with same_device(), precision(arguments.key):
        call, arrays = _prepare(arguments)
        return to_torch(_forward(call, *arrays))


def backward(arguments: Arguments, output_cotangent: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the gradients of key and weights."""
    with same_device(), precision(arguments.key):
        call, arrays = _prepare(arguments)
        return tuple(map(to_torch, _backward(call, *arrays, to_array(output_cotangent))))


def _prepare(arguments: Arguments) -> tuple[Call, tuple[jax.Array, jax.Array, jax.Array | None]]:
    """Return the call and its arrays: key, weights, offsets."""
    # Checks see tensors, so they never wait for values on a GPU and messages name what the caller passed.
    problem = describe(arguments)
    reach = "which take every dtype but float64"
    call = Call(problem, check_call(problem, arguments.implementation, arguments.key.device, reach))
    return call, (to_array(arguments.key), to_array(arguments.weights), to_array_or_none(arguments.sequence_offsets))


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
