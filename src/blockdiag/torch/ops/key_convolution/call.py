"""Arguments of the registered operators of key convolution, and the problem that they describe."""

from typing import Any, NamedTuple

import torch

from blockdiag.ops.key_convolution.checks import describe_key_convolution
from blockdiag.ops.key_convolution.problem import Activation, KeyConvolutionProblem


class Arguments(NamedTuple):
    """The arguments of the operators, by name; see `key_convolution`.

    Attributes:
        implementation: comma-separated names as for JAX, empty for None.
    """

    key: torch.Tensor
    weights: torch.Tensor
    sequence_offsets: torch.Tensor | None
    activation: Activation | None
    residual: bool
    implementation: str

    def key_of_call(self) -> tuple[Any, ...]:
        """Return a cache key with everything that checks and launches depend on: all but the tensors' elements."""
        tensors = [None if one is None else (one.shape, one.dtype, one.device.index) for one in self[:3]]
        return (*tensors, *self[3:])


def check_devices(key: torch.Tensor, **others: torch.Tensor | None) -> None:
    """Check that all tensors are on the device of `key`.

    Raises:
        ValueError: a tensor is on another device; the message names it.
    """
    for name, tensor in others.items():
        if tensor is not None and tensor.device != key.device:
            raise ValueError(
                f"`{name}` must be on the device of `key`, {key.device}, got {tensor.device}; move one of them"
            )


def describe(arguments: Arguments) -> KeyConvolutionProblem:
    """Check the arguments and describe the call.

    Raises:
        ValueError: an argument is wrong; the same as the JAX function raises.
    """
    key, weights, sequence_offsets, activation, residual, _ = arguments
    check_devices(key, weights=weights, sequence_offsets=sequence_offsets)
    return describe_key_convolution(
        key, weights, sequence_offsets=sequence_offsets, activation=activation, residual=residual
    )
