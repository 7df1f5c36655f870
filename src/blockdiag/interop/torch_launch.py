"""Launch plans from PyTorch: the same compiled kernel, launched natively on the current stream.

This is the mechanism only: it knows nothing of autograd or torch.compile, which the registered operators bring.
"""

import contextvars
import copy
import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from blockdiag.triton_kernels.compile import compile_key, compile_plan
from blockdiag.triton_kernels.plan import (
    Constexpr,
    Descriptor,
    KernelSpec,
    LaunchPlan,
    Pointer,
    Scalar,
    Target,
    TensorSpec,
)

# Plans remembered for repeated calls. Kernels are kept apart from them, by compile key, so calls that differ in sizes
# and scalars only push each other out of this cache and still share their kernel.
_REMEMBERED_PLANS = 512


def launch(spec: KernelSpec, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Launches the kernel of `spec` on the tensors' device and its current stream, and returns the outputs.

    Safe under CUDA graph capture once the same spec has been launched outside it (compiling and loading are not).

    Args:
        spec: a hashable KernelSpec.
        *tensors: one contiguous, 16-byte aligned CUDA tensor for each of `spec.inputs`, of exactly its shape and dtype,
            all on one device.

    Returns:
        One tensor for each of `spec.outputs`. An output that the plan aliases to an input is that input tensor, written
        in place.

    Raises:
        ValueError: when a tensor does not match its spec, naming the remedy.
    """
    device = _common_device(spec, tensors)
    if device.index == torch.cuda.current_device():
        return _bound_launch(spec, device.index)(tensors)
    with torch.cuda.device(device):
        return _bound_launch(spec, device.index)(tensors)


def _common_device(spec: KernelSpec, tensors: tuple[torch.Tensor, ...]) -> torch.device:
    if len(tensors) != len(spec.inputs):
        raise ValueError(f"kernel {spec.name!r} takes {len(spec.inputs)} tensors, got {len(tensors)}")
    device = tensors[0].device if tensors else torch.device("cuda", torch.cuda.current_device())
    for position, (tensor, expected) in enumerate(zip(tensors, spec.inputs, strict=True)):
        if tensor.shape != expected.shape or tensor.dtype != _torch_dtype(expected.dtype) or tensor.device != device:
            raise ValueError(
                f"kernel {spec.name!r}: tensor {position} must be {expected.dtype}{list(expected.shape)} on {device}, "
                f"got {tensor.dtype}{list(tensor.shape)} on {tensor.device}"
            )
        if not tensor.is_contiguous() or tensor.data_ptr() % 16:
            raise ValueError(
                f"kernel {spec.name!r}: tensor {position} must be contiguous and start at a multiple of 16 bytes, got "
                f"strides {tensor.stride()} and address {tensor.data_ptr():#x}; pass tensor.contiguous(), or "
                "tensor.clone() of a slice"
            )
    if device.type != "cuda":
        raise ValueError(f"kernel {spec.name!r}: tensors must be on a CUDA device, got {device}; use tensor.cuda()")
    return device


@functools.lru_cache(maxsize=_REMEMBERED_PLANS)
def _bound_launch(spec: KernelSpec, device_index: int) -> "_BoundLaunch":
    return _BoundLaunch(spec.plan(_device_target(device_index)), device_index)


@functools.cache
def _device_target(device_index: int) -> Target:
    properties = torch.cuda.get_device_properties(device_index)
    return Target(properties.major * 10 + properties.minor, properties.multi_processor_count)


_kernels: dict[tuple[Any, ...], Any] = {}
_kernels_lock = threading.Lock()


def _loaded_kernel(plan: LaunchPlan, device_index: int) -> Any:
    """Triton's kernel object for the current device: the compiled kernel is shared, its handles belong to one
    device."""
    target = _device_target(device_index)
    key = (device_index, *compile_key(plan, target.arch))
    with _kernels_lock:
        if key not in _kernels:
            _kernels[key] = copy.copy(compile_plan(plan, target).kernel)
        return _kernels[key]


class _BoundLaunch:
    """A plan bound to a loaded kernel: what is left to do for a call is to allocate outputs and list the arguments."""

    def __init__(self, plan: LaunchPlan, device_index: int) -> None:
        self._device = torch.device("cuda", device_index)
        self._num_inputs = len(plan.inputs)
        sources = {output: source for source, output in plan.aliases}
        self._outputs: list[tuple[int | None, TensorSpec]] = [
            (sources.get(index), spec) for index, spec in enumerate(plan.outputs)
        ]
        self._arguments = [self._bind(argument) for argument in plan.arguments.values()]
        kernel = _loaded_kernel(plan, device_index)
        self._run = _with_scratch(kernel, self._device, kernel[plan.grid])

    def __call__(self, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        outputs = tuple(
            torch.empty(spec.shape, dtype=_torch_dtype(spec.dtype), device=self._device)
            if source is None
            else tensors[source]
            for source, spec in self._outputs
        )
        buffers = tensors + outputs
        self._run(*[argument(buffers) for argument in self._arguments])
        return outputs

    def _bind(self, argument: Any) -> Callable[[tuple[torch.Tensor, ...]], Any]:
        match argument:
            case Pointer():
                position = self._position(argument)
                return lambda buffers: buffers[position].data_ptr()
            case Descriptor():
                return self._bind_descriptor(argument)
            case Scalar() | Constexpr():
                value = argument.value
                return lambda buffers: value
        raise ValueError(f"{argument!r} is no plan argument")

    def _bind_descriptor(self, descriptor: Descriptor) -> Callable[[tuple[torch.Tensor, ...]], Any]:
        position = self._position(descriptor)
        shape, strides, block_shape = map(list, (descriptor.shape, descriptor.strides, descriptor.block_shape))
        if descriptor.layout is None:
            from triton.tools.tensor_descriptor import TensorDescriptor

            return lambda buffers: TensorDescriptor(buffers[position], shape, strides, block_shape)
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonTensorDescriptor

        layout = descriptor.layout
        return lambda buffers: GluonTensorDescriptor(buffers[position], shape, strides, block_shape, layout)

    def _position(self, argument: Pointer | Descriptor) -> int:
        return argument.index if argument.role == "input" else self._num_inputs + argument.index


def _with_scratch(kernel: Any, device: torch.device, run: Callable[..., None]) -> Callable[..., None]:
    """Gives a kernel that makes descriptors on the device the global scratch it needs, from torch's allocator."""
    if not kernel.metadata.global_scratch_size:
        return run
    import triton

    def allocate(size: int, alignment: int, stream: int | None) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int8, device=device)

    def run_with_allocator(*arguments: Any) -> None:
        triton.set_allocator(allocate)
        run(*arguments)

    # Triton's allocator is a context variable: set in a copy, the user's own stays as it is.
    return lambda *arguments: contextvars.copy_context().run(run_with_allocator, *arguments)


@functools.cache
def _torch_dtype(name: str) -> torch.dtype:
    return getattr(torch, name)
