"""The registered operators of key convolution: their arguments, the problem that these describe, and derivatives."""

import functools
from typing import Any, NamedTuple

import torch

from blockdiag.ops.key_convolution.checks import describe_key_convolution
from blockdiag.ops.key_convolution.problem import Activation, KeyConvolutionProblem
from blockdiag.torch.arguments import check_devices, second_derivative_error
from blockdiag.torch.operator import Gradients, Operator, register


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


def describe(arguments: Arguments) -> KeyConvolutionProblem:
    """Check the arguments and describe the call.

    Raises:
        ValueError: an argument is wrong; the same as the JAX function raises.
    """
    key, weights, sequence_offsets, activation, residual, _ = arguments
    check_devices(key=key, weights=weights, sequence_offsets=sequence_offsets)
    return describe_key_convolution(
        key, weights, sequence_offsets=sequence_offsets, activation=activation, residual=residual
    )


def _fake_forward(arguments: Arguments) -> torch.Tensor:
    return arguments.key.new_empty(arguments.key.shape)


def _fake_backward(arguments: Arguments, output_cotangent: torch.Tensor) -> tuple[torch.Tensor, ...]:
    del output_cotangent
    key, weights, *_ = arguments
    return key.new_empty(key.shape), weights.new_empty(weights.shape)


BACKWARD = Operator(
    name="key_convolution_backward",
    method="backward",
    leading=("output_cotangent",),
    arguments=Arguments,
    num_results=2,
    fake=_fake_backward,
    refusal=functools.partial(second_derivative_error, "key convolution", "key_convolution"),
)
FORWARD = Operator(
    name="key_convolution_forward",
    method="forward",
    arguments=Arguments,
    num_results=1,
    fake=_fake_forward,
    gradients=Gradients(BACKWARD),
)
register(FORWARD, BACKWARD)
