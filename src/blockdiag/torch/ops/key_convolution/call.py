"""Calls of the registered operators of key convolution: their arguments, and the description they stand for."""

from typing import Any, NamedTuple

import torch

from blockdiag.ops.key_convolution.checks import describe_key_convolution
from blockdiag.ops.key_convolution.problem import Activation, KeyConvolutionProblem


class Arguments(NamedTuple):
    """What the operators take, by name; see `key_convolution`.

    Attributes:
        implementation: names as for JAX with commas between them, empty for None.
    """

    key: torch.Tensor
    weights: torch.Tensor
    sequence_offsets: torch.Tensor | None
    activation: Activation | None
    residual: bool
    implementation: str

    def key_of_call(self) -> tuple[Any, ...]:
        """What decides about checks and launches: everything but the tensors' elements."""
        tensors = [None if one is None else (one.shape, one.dtype, one.device.index) for one in self[:3]]
        return (*tensors, *self[3:])


def check_devices(key: torch.Tensor, **others: torch.Tensor | None) -> None:
    """All tensors must be on the device of `key`.

    Raises:
        ValueError: naming the one that is not.
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
