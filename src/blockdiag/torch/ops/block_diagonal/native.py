"""Block-diagonal attention on CUDA tensors: the Triton launch plans, on the current stream. Imports no JAX."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from blockdiag.interop import private_torch
from blockdiag.interop.torch_launch import bound_launch, device_target
from blockdiag.ops.block_diagonal.problem import BlockDiagonalProblem
from blockdiag.torch.ops.block_diagonal.call import Arguments, describe
from blockdiag.triton_kernels.block_diagonal.plans import BlockDiagonalLaunch, backward_kinds, supports
from blockdiag.triton_kernels.parts.tile_table import TileTableLaunch

# Calls of a model repeat a few shapes; what is kept for each is small, and kernels are shared beyond this.
_REMEMBERED_CALLS = 1024

type Tensors = tuple[torch.Tensor, ...]


class Unsupported(NotImplementedError):
    """The kernels cannot compute this call."""


class _Prepared:
    """The launches of one kind of call, bound to a device."""

    def __init__(self, arguments: Arguments) -> None:
        self.problem: BlockDiagonalProblem = describe(arguments)
        reason = supports(self.problem)
        if reason is not None:
            raise Unsupported(reason)
        self._device = arguments.query.device
        self._target = device_target(self._device.index)
        # Nothing is launched for no tokens, and there are no descriptors of empty arrays.
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
        """Output of the shape that `Arguments.output_shape` says."""
        operands = _operands(arguments)
        query = operands[0]
        output = query.new_empty(arguments.output_shape()) if self.problem.is_packed else torch.empty_like(query)
        self._forward.into(operands + self._tables(arguments), (output,))
        return output

    def backward(self, arguments: Arguments, output_cotangent: torch.Tensor) -> Tensors:
        """dQ, dK and dV; of a packed query one gradient."""
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
        """The optional inputs there are, in the order the launches take them."""
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


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself where a kernel can read it, row-major and 16-byte aligned; else a copy that it can."""
    if tensor.is_contiguous() and tensor.data_ptr() % 16 == 0 and not tensor.is_neg():
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def reshaped(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A tensor that a launch made, itself in another shape of as many elements.

    Not a view of it: autograd refuses to write to views that an operator returns.
    """
    return tensor.resize_(shape)


def _operands(arguments: Arguments) -> Tensors:
    if arguments.key is None or arguments.value is None:
        return (dense(arguments.query),)
    return dense(arguments.query), dense(arguments.key), dense(arguments.value)


_prepared: OrderedDict[tuple[Any, ...], _Prepared] = OrderedDict()


def prepare(arguments: Arguments) -> _Prepared:
    """The launches of a call, from memory where one like it came before.

    Raises:
        ValueError: an argument is wrong.
        Unsupported: the kernels cannot compute this call.
    """
    key = arguments.key_of_call()
    prepared = _prepared.get(key)
    if prepared is None:
        # Kernels are loaded into the context of the device that is current.
        with torch.cuda.device(arguments.query.device):
            prepared = _Prepared(arguments)
        _prepared[key] = prepared
        if len(_prepared) > _REMEMBERED_CALLS:
            _prepared.popitem(last=False)
    return prepared


def forward(arguments: Arguments, prepared: _Prepared | None = None) -> torch.Tensor:
    """Output of the shape that `Arguments.output_shape` says, on the current stream."""
    prepared = prepared or prepare(arguments)
    if arguments.query.numel() == 0:
        return arguments.query.new_empty(arguments.output_shape())
    if arguments.query.get_device() == torch.cuda.current_device():
        return prepared.forward(arguments)
    with torch.cuda.device(arguments.query.device):
        return prepared.forward(arguments)


def backward(arguments: Arguments, output_cotangent: torch.Tensor, prepared: _Prepared | None = None) -> Tensors:
    """Gradients of query, key and value; of a packed query one."""
    prepared = prepared or prepare(arguments)
    if arguments.query.numel() == 0:
        operands = (one for one in (arguments.query, arguments.key, arguments.value) if one is not None)
        return tuple(one.new_zeros(one.shape) for one in operands)
    if arguments.query.get_device() == torch.cuda.current_device():
        return prepared.backward(arguments, output_cotangent)
    with torch.cuda.device(arguments.query.device):
        return prepared.backward(arguments, output_cotangent)


class NativeAttention(torch.autograd.Function):
    """The derivative of native calls that need no dispatcher: the same as the registered operator's, with less host
    time (see `attend`)."""

    @staticmethod
    def forward(ctx: Any, call: tuple[Arguments, _Prepared], *tensors: torch.Tensor) -> torch.Tensor:
        """`tensors` are those that `call` has, once more: autograd sees only what is passed as such."""
        arguments, prepared = call
        ctx.save_for_backward(*tensors)
        # Without its tensors, which autograd would not know of.
        ctx.places = [index for index in range(8) if arguments[index] is not None]
        ctx.options = arguments[8:]
        ctx.prepared = prepared
        return forward(arguments, prepared)

    @staticmethod
    def backward(ctx: Any, output_cotangent: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        """Through the registered operator where a second derivative may follow, which that one refuses, and where
        somebody watches or maps the backward pass alone."""
        tensors: list[torch.Tensor | None] = [None] * 8
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
    """The call without the dispatcher, for plain CUDA tensors in eager mode.

    On the host of an H200 the dispatcher adds 10 us to a forward of 37, and 164 us to a forward and backward of 292
    with the autograd rule that torch makes for an operator (benchmarks/results/torch_host.csv).
    """
    prepared = prepare(arguments)
    query, key, value = arguments[:3]
    if torch.is_grad_enabled() and (
        query.requires_grad or (key is not None and (key.requires_grad or value.requires_grad))  # type: ignore[union-attr]
    ):
        tensors = [tensor for tensor in arguments[:8] if tensor is not None]
        return NativeAttention.apply((arguments, prepared), *tensors)  # type: ignore[no-any-return]
    return forward(arguments, prepared)


def is_plain(*tensors: torch.Tensor | None) -> bool:
    """Whether these are ordinary CUDA tensors, and nobody watches or transforms what is done with them.

    Not to be asked while compiling.
    """
    return (
        all([tensor is None or (type(tensor) in _PLAIN and tensor.is_cuda) for tensor in tensors])
        and not private_torch.may_be_observed()
    )


_PLAIN = (torch.Tensor, torch.nn.Parameter)
