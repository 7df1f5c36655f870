"""Arguments of the registered operators of block-diagonal attention, and the problem that they describe."""

from typing import Any, NamedTuple

import torch

from blockdiag.common import validation
from blockdiag.ops.block_diagonal.checks import describe_call
from blockdiag.ops.block_diagonal.problem import BlockDiagonalProblem
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
    key_heads: int
    block_size: int
    scale: float | None
    is_causal: bool
    rotary: str
    implementation: str

    def key_of_call(self) -> tuple[Any, ...]:
        """Return a cache key with everything that checks and launches depend on: all but the tensors' elements."""
        tensors = [None if one is None else (one.shape, one.dtype, one.device.index) for one in self[:8]]
        return (*tensors, *self[8:])

    def output_shape(self) -> tuple[int, ...]:
        """Return the shape of the output: that of query, without the heads of key and value of a packed one."""
        *lead, heads, head_dim = self.query.shape
        return (*lead, heads - 2 * self.key_heads, head_dim)

    def to_rotary(self) -> Rotary | None:
        """Return the rotary embedding that the arguments encode."""
        return Rotary.from_letters(self.rotary, self.cos, self.sin, self.positions)


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


def check_devices(arguments: Arguments) -> None:
    """Check that all tensors are on one device.

    Raises:
        ValueError: a tensor is on another device; the message names it.
    """
    query = arguments.query
    for name, tensor in zip(Arguments._fields[1:8], arguments[1:8], strict=True):
        if tensor is not None and tensor.device != query.device:
            raise ValueError(
                f"`{name}` must be on the device of `query`, {query.device}, got {tensor.device}; move one of them"
            )


def check_tensors(arguments: Arguments) -> None:
    """Check shapes and dtypes of the operands, and that all tensors are on one device.

    Raises:
        ValueError: an argument is wrong; the message names it and the remedy.
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
    check_devices(arguments)


def describe(arguments: Arguments) -> BlockDiagonalProblem:
    """Check the arguments and describe the call.

    Raises:
        ValueError: an argument is wrong; the same as the JAX function raises.
    """
    check_tensors(arguments)
    query, key = operand_shapes(arguments)
    return describe_call(
        query,
        key,
        block_size=arguments.block_size,
        sequence_offsets=arguments.sequence_offsets,
        block_lengths=arguments.block_lengths,
        rotary=arguments.to_rotary(),
        scale=arguments.scale,
        is_causal=arguments.is_causal,
        is_packed=arguments.key is None,
    )
