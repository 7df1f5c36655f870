"""Block-diagonal attention on CUDA tensors: the Triton launch plans, on the current stream. Imports no JAX."""

from collections.abc import Callable
from typing import Any

import torch

from blockdiag.interop.torch_launch import bound_launch, device_target
from blockdiag.ops.block_diagonal.problem import BlockDiagonalProblem
from blockdiag.torch.arguments import is_plain
from blockdiag.torch.launches import Remembered, dense, reshaped
from blockdiag.torch.operator import Unsupported
from blockdiag.torch.ops.block_diagonal.operators import TENSORS, Arguments, describe
from blockdiag.triton_kernels.block_diagonal.plans import BlockDiagonalLaunch, backward_kinds, supports
from blockdiag.triton_kernels.parts.tile_table import TileTableLaunch

type Tensors = tuple[torch.Tensor, ...]


class _Prepared:
    """The launches of one kind of call, bound to a device."""

    def __init__(self, arguments: Arguments) -> None:
        self.problem: BlockDiagonalProblem = describe(arguments)
        reason = supports(self.problem)
        if reason is not None:
            raise Unsupported(reason)
        self._device = arguments.query.device
        self._target = device_target(self._device.index)
        # Without tokens nothing is launched, and descriptors of empty arrays cannot be made.
        self._tile_table = self._bind_tile_table(arguments) if self.problem.tokens else None
        self._forward: Any = self._bind("forward") if self.problem.tokens else None
        self._backward: list[Any] = []

    def _bind(self, kind: Any) -> Any:
        return bound_launch(BlockDiagonalLaunch(self.problem, kind), self._device.index)

    def _bind_tile_table(self, arguments: Arguments) -> Callable[[Tensors], Tensors] | None:
        values = arguments.block_lengths if arguments.sequence_offsets is None else arguments.sequence_offsets
        if values is None:
            return None
        launch = TileTableLaunch(
            kind="lengths" if arguments.sequence_offsets is None else "offsets",
            num_values=values.shape[0],
            num_tiles=self.problem.num_tiles,
            tokens=self.problem.tokens,
            block_size=self.problem.block_size,
        )
        return bound_launch(launch, self._device.index)

    def forward(self, arguments: Arguments) -> torch.Tensor:
        """Return the output, whose shape is `Arguments.output_shape`."""
        operands = _operands(arguments)
        query = operands[0]
        output = query.new_empty(arguments.output_shape()) if self.problem.is_packed else torch.empty_like(query)
        self._forward.into(operands + self._tables(arguments), (output,))
        return output

    def backward(self, arguments: Arguments, output_cotangent: torch.Tensor) -> Tensors:
        """Return dQ, dK and dV, or one gradient for a packed query."""
        if not self._backward:
            self._backward = [self._bind(kind) for kind in backward_kinds(self.problem, self._target)]
        operands = _operands(arguments)
        inputs = (*operands, dense(output_cotangent))
        tables = self._tables(arguments)
        if len(self._backward) == 1:
            gradients = tuple([torch.empty_like(operand) for operand in operands])
            self._backward[0].into(inputs + tables, gradients)
            return gradients
        query_gradient, key_gradient = self._backward
        d_query, log_sum, delta = query_gradient((*inputs, *tables))
        if self.problem.is_packed:
            gradients = key_gradient((*inputs, log_sum, delta, d_query, *tables))
        else:
            gradients = (d_query, *key_gradient((*inputs, log_sum, delta, *tables)))
        return tuple(reshaped(gradient, one.shape) for gradient, one in zip(gradients, operands, strict=True))

    def _tables(self, arguments: Arguments) -> Tensors:
        """Return the optional inputs that the call has, in the order that the launches take them."""
        if self.problem.rotary is None and self._tile_table is None:
            return ()
        tables: list[torch.Tensor] = []
        if self._tile_table is not None:
            values = arguments.block_lengths if arguments.sequence_offsets is None else arguments.sequence_offsets
            assert values is not None
            tables += self._tile_table((dense(values),))
        if arguments.cos is not None and arguments.sin is not None:
            tables += (dense(arguments.cos), dense(arguments.sin))
        if arguments.positions is not None:
            positions = arguments.positions
            if positions.numel() != self.problem.tokens:
                positions = positions.expand(arguments.query.shape[:-2])
            tables.append(dense(positions))
        return tuple(tables)


def _operands(arguments: Arguments) -> Tensors:
    if arguments.key is None or arguments.value is None:
        return (dense(arguments.query),)
    return dense(arguments.query), dense(arguments.key), dense(arguments.value)


def _prepare(arguments: Arguments) -> _Prepared:
    # Kernels are loaded into the context of the current device.
    with torch.cuda.device(arguments.query.device):
        return _Prepared(arguments)


prepare: Remembered[Arguments, _Prepared] = Remembered(_prepare)


def forward(arguments: Arguments, prepared: _Prepared | None = None) -> torch.Tensor:
    """Compute the output on the current stream; its shape is `Arguments.output_shape`."""
    prepared = prepared or prepare(arguments)
    if arguments.query.numel() == 0:
        return arguments.query.new_empty(arguments.output_shape())
    if arguments.query.get_device() == torch.cuda.current_device():
        return prepared.forward(arguments)
    with torch.cuda.device(arguments.query.device):
        return prepared.forward(arguments)


def backward(arguments: Arguments, output_cotangent: torch.Tensor, prepared: _Prepared | None = None) -> Tensors:
    """Return the gradients of query, key and value, or one gradient for a packed query."""
    prepared = prepared or prepare(arguments)
    if arguments.query.numel() == 0:
        operands = (one for one in (arguments.query, arguments.key, arguments.value) if one is not None)
        return tuple(one.new_zeros(one.shape) for one in operands)
    if arguments.query.get_device() == torch.cuda.current_device():
        return prepared.backward(arguments, output_cotangent)
    with torch.cuda.device(arguments.query.device):
        return prepared.backward(arguments, output_cotangent)


def packed_backward(arguments: Arguments, output_cotangent: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a packed query."""
    return backward(arguments, output_cotangent)[0]


class NativeAttention(torch.autograd.Function):
    """Autograd rule of native calls that bypass the dispatcher.

    It computes the same gradients as the registered operator with less host time (see `attend`).
    """

    @staticmethod
    def forward(ctx: Any, call: tuple[Arguments, _Prepared], *tensors: torch.Tensor) -> torch.Tensor:
        """Compute the output; `tensors` repeats those in `call`, because autograd only sees direct arguments."""
        arguments, prepared = call
        ctx.save_for_backward(*tensors)
        # Only places and options are kept, because tensors held in `ctx` are invisible to autograd.
        ctx.places = [index for index in range(TENSORS) if arguments[index] is not None]
        ctx.options = arguments[TENSORS:]
        ctx.prepared = prepared
        return forward(arguments, prepared)

    @staticmethod
    def backward(ctx: Any, output_cotangent: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        """Compute the gradients, through the registered operator if a second derivative may follow.

        That operator refuses second derivatives. It is also used where the backward pass itself is observed or mapped.
        """
        tensors: list[torch.Tensor | None] = [None] * TENSORS
        saved = ctx.saved_tensors
        for index, tensor in zip(ctx.places, saved, strict=True):
            tensors[index] = tensor
        arguments = Arguments(*tensors, *ctx.options)  # type: ignore[arg-type]
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or not is_plain(output_cotangent, *saved):
            operators = torch.ops.blockdiag
            if arguments.key is None:
                gradients: Any = (operators.block_diagonal_packed_backward(output_cotangent, *arguments),)
            else:
                gradients = operators.block_diagonal_backward(output_cotangent, *arguments)
        else:
            gradients = backward(arguments, output_cotangent, ctx.prepared)
        return (None, *gradients, *(None,) * (len(ctx.places) - len(gradients)))


def attend(arguments: Arguments) -> torch.Tensor:
    """Run the call without the dispatcher, on plain CUDA tensors in eager mode.

    On the host of an H200 the dispatcher adds 10 us to a forward pass of 37 us. With the autograd rule that torch makes
    for an operator it adds 164 us to a forward and backward pass of 292 us (benchmarks/results/torch_host.csv).
    """
    prepared = prepare(arguments)
    query, key, value = arguments[:3]
    if torch.is_grad_enabled() and (
        query.requires_grad or (key is not None and (key.requires_grad or value.requires_grad))  # type: ignore[union-attr]
    ):
        tensors = [tensor for tensor in arguments[:TENSORS] if tensor is not None]
        return NativeAttention.apply((arguments, prepared), *tensors)  # type: ignore[no-any-return]
    return forward(arguments, prepared)
