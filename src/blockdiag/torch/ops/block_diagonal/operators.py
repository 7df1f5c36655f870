"""The registered operators of block-diagonal attention: their arguments, the problem of these, and derivatives."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from blockdiag.common import validation
from blockdiag.ops.block_diagonal.checks import describe_call
from blockdiag.ops.block_diagonal.problem import BlockDiagonalProblem
from blockdiag.torch.arguments import check_devices, second_derivative_error
from blockdiag.torch.operator import Gradients, Operator, Size, count_tensors, register
from blockdiag.torch.rotary import Rotary


class Arguments(NamedTuple):
    """The arguments of the operators, by name.

    Attributes:
        query: [B, T, N, H] or [T, N, H]; if key and value are None, one packed tensor of N + 2K heads that holds all
            three.
        key, value: [B, T, K, H] or [T, K, H], or None.
        sequence_offsets, block_lengths: int32 [num_sequences + 1] and int32 [num_blocks]; at most one is given.
        cos, sin, positions: the tensors of a rotary embedding; see `Rotary`.
        key_heads: K for a packed query, 0 if there is a key.
        rotary: the options of a rotary embedding as letters (see `Rotary.letters`); empty without one.
        implementation: comma-separated names as for JAX, empty for None.
    """

    query: torch.Tensor
    key: torch.Tensor | None
    value: torch.Tensor | None
    sequence_offsets: torch.Tensor | None
    block_lengths: torch.Tensor | None
    cos: torch.Tensor | None
    sin: torch.Tensor | None
    positions: torch.Tensor | None
    key_heads: Size
    block_size: int
    scale: float | None
    is_causal: bool
    rotary: str
    implementation: str

    def key_of_call(self) -> tuple[Any, ...]:
        """Return a cache key with everything that checks and launches depend on: all but the tensors' elements."""
        tensors: tuple[Any, ...] = self[:TENSORS]
        described = [None if one is None else (one.shape, one.dtype, one.device.index) for one in tensors]
        return (*described, *self[TENSORS:])

    def output_shape(self) -> tuple[int, ...]:
        """Return the shape of the output: that of query, without the heads of key and value of a packed one."""
        *lead, heads, head_dim = self.query.shape
        return (*lead, heads - 2 * self.key_heads, head_dim)

    def to_rotary(self) -> Rotary | None:
        """Return the rotary embedding that the arguments encode."""
        return Rotary.from_letters(self.rotary, self.cos, self.sin, self.positions)


TENSORS = count_tensors(Arguments)
"""Number of leading tensor arguments."""


class _Shape(NamedTuple):
    """Shape and dtype of an operand that is part of a packed tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def operand_shapes(arguments: Arguments) -> tuple[Any, Any]:
    """Return query and key of a call, or their shapes and dtypes if they are packed."""
    query = arguments.query
    if arguments.key is not None:
        return query, arguments.key
    return (
        _Shape(arguments.output_shape(), query.dtype),
        _Shape((*query.shape[:-2], arguments.key_heads, query.shape[-1]), query.dtype),
    )


def describe(arguments: Arguments) -> BlockDiagonalProblem:
    """Check the arguments and describe the call.

    Raises:
        ValueError: an argument is wrong; the same as the JAX function raises.
    """
    query, key, value = arguments[:3]
    if (key is None) != (value is None):
        raise ValueError("`key` and `value` must both be tensors, or both None where `query` holds all three")
    if key is not None and value is not None:
        validation.check_operands(query, key, value)
    elif not 0 < 2 * arguments.key_heads < query.shape[-2]:
        raise ValueError(
            f"`key_heads` must leave heads to the query, got {arguments.key_heads} of the {query.shape[-2]} heads of a "
            "packed `query`, which has N + 2 K of them"
        )
    check_devices(**dict(zip(Arguments._fields, arguments[:TENSORS], strict=False)))
    query_shape, key_shape = operand_shapes(arguments)
    return describe_call(
        query_shape,
        key_shape,
        block_size=arguments.block_size,
        sequence_offsets=arguments.sequence_offsets,
        block_lengths=arguments.block_lengths,
        rotary=arguments.to_rotary(),
        scale=arguments.scale,
        is_causal=arguments.is_causal,
        is_packed=arguments.key is None,
    )


def _fake_forward(arguments: Arguments) -> torch.Tensor:
    return arguments.query.new_empty(arguments.output_shape())


def _fake_backward(arguments: Arguments, output_cotangent: torch.Tensor) -> tuple[torch.Tensor, ...]:
    del output_cotangent
    return tuple(operand.new_empty(operand.shape) for operand in arguments[:3] if operand is not None)


def _fake_packed_backward(arguments: Arguments, output_cotangent: torch.Tensor) -> torch.Tensor:
    return _fake_backward(arguments, output_cotangent)[0]


def _backward_of(tensors: Sequence[torch.Tensor | None]) -> Operator:
    is_packed = tensors[1] is None
    return PACKED_BACKWARD if is_packed else BACKWARD


_refusal = functools.partial(second_derivative_error, "block-diagonal attention", "block_diagonal_attention")

FORWARD = Operator(
    name="block_diagonal_forward",
    method="forward",
    arguments=Arguments,
    num_results=1,
    fake=_fake_forward,
    gradients=Gradients(_backward_of),
)
BACKWARD = Operator(
    name="block_diagonal_backward",
    method="backward",
    leading=("output_cotangent",),
    arguments=Arguments,
    num_results=3,
    fake=_fake_backward,
    refusal=_refusal,
)
PACKED_BACKWARD = Operator(
    name="block_diagonal_packed_backward",
    method="packed_backward",
    leading=("output_cotangent",),
    arguments=Arguments,
    num_results=1,
    fake=_fake_packed_backward,
    refusal=_refusal,
)
register(FORWARD, BACKWARD, PACKED_BACKWARD)
