"""Key convolution on CUDA tensors: the Triton launch plans, on the current stream. Imports no JAX."""

from collections.abc import Callable
from typing import Any

import torch

from blockdiag.interop.torch_launch import bound_launch
from blockdiag.torch.launches import Remembered, dense, reshaped
from blockdiag.torch.operator import Unsupported
from blockdiag.torch.ops.key_convolution.operators import Arguments, describe
from blockdiag.triton_kernels.key_convolution.plans import KeyConvolutionLaunch, supports
from blockdiag.triton_kernels.parts.tile_table import TileTableLaunch

type Tensors = tuple[torch.Tensor, ...]


class _Prepared:
    """The launches of one kind of call, bound to a device."""

    def __init__(self, arguments: Arguments) -> None:
        self._problem = describe(arguments)
        reason = supports(self._problem)
        if reason is not None:
            raise Unsupported(reason)
        self._device_index = arguments.key.device.index
        self._tile_table = self._bind_tile_table(arguments)
        self._forward = self._bind("forward")
        self._backward: tuple[Callable[[Tensors], Tensors], ...] = ()

    def _bind(self, kind: Any) -> Callable[[Tensors], Tensors]:
        return bound_launch(KeyConvolutionLaunch(self._problem, kind), self._device_index)

    def _bind_tile_table(self, arguments: Arguments) -> Callable[[Tensors], Tensors] | None:
        if arguments.sequence_offsets is None:
            return None
        launch = TileTableLaunch(
            kind="offsets",
            num_values=arguments.sequence_offsets.shape[0],
            num_tiles=self._problem.num_tiles,
            tokens=self._problem.tokens,
            block_size=self._problem.tile_rows,
        )
        return bound_launch(launch, self._device_index)

    def forward(self, arguments: Arguments) -> torch.Tensor:
        """Return the output in the shape of the key."""
        inputs = (dense(arguments.key), dense(arguments.weights), *self._tables(arguments))
        (output,) = self._forward(inputs)
        return reshaped(output, arguments.key.shape)

    def backward(self, arguments: Arguments, output_cotangent: torch.Tensor) -> Tensors:
        """Return the gradients of key and weights."""
        if not self._backward:
            self._backward = (self._bind("backward"), self._bind("weights_gradient"))
        inputs = (dense(arguments.key), dense(arguments.weights), dense(output_cotangent), *self._tables(arguments))
        d_key, parts = self._backward[0](inputs)
        (d_weights,) = self._backward[1]((parts,))
        return reshaped(d_key, arguments.key.shape), reshaped(d_weights, arguments.weights.shape)

    def _tables(self, arguments: Arguments) -> Tensors:
        if self._tile_table is None or arguments.sequence_offsets is None:
            return ()
        return self._tile_table((dense(arguments.sequence_offsets),))


_prepared: Remembered[Arguments, _Prepared] = Remembered(_Prepared)


def forward(arguments: Arguments) -> torch.Tensor:
    """Return the output in the shape of the key, on the current stream."""
    if arguments.key.numel() == 0:
        describe(arguments)
        return arguments.key.new_empty(arguments.key.shape)
    # Kernels are loaded into the context of the current device and run there.
    with torch.cuda.device(arguments.key.device):
        return _prepared(arguments).forward(arguments)


def backward(arguments: Arguments, output_cotangent: torch.Tensor) -> Tensors:
    """Return the gradients of key and weights, on the current stream."""
    if arguments.key.numel() == 0:
        return torch.zeros_like(arguments.key), torch.zeros_like(arguments.weights)
    with torch.cuda.device(arguments.key.device):
        return _prepared(arguments).backward(arguments, output_cotangent)
