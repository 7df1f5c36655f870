"""Launch plans from PyTorch: the same compiled kernel, launched natively on the current stream.

This module only launches. Autograd and torch.compile support come with the registered operators.
"""

import contextvars
import copy
import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from blockdiag.triton_kernels.launch import private_triton
from blockdiag.triton_kernels.launch.compile import buffer_spec, compile_key, compile_plan, parameter_places
from blockdiag.triton_kernels.launch.generated import function_of
from blockdiag.triton_kernels.launch.plan import (
    Argument,
    Constexpr,
    Descriptor,
    KernelSpec,
    LaunchPlan,
    Pointer,
    Scalar,
    Target,
)

# Number of plans cached for repeated calls. Kernels are cached separately, by compile key: calls that differ only in
# sizes and scalars may evict each other's plans but still share their kernel.
_REMEMBERED_PLANS = 512


def launch(spec: KernelSpec, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Launch the kernel of `spec` on the tensors' device and its current stream, and return the outputs.

    A launch is safe under CUDA graph capture if the same spec has been launched before; compiling and loading are not.

    Args:
        spec: a hashable KernelSpec.
        *tensors: one contiguous, 16-byte aligned CUDA tensor for each of `spec.inputs`, with exactly its shape and
            dtype, all on one device.

    Returns:
        One tensor for each of `spec.outputs`. An output that the plan aliases to an input is that input tensor, written
        in place.

    Raises:
        ValueError: when a tensor does not match its spec, naming the remedy.
    """
    device = _common_device(spec, tensors)
    with on_device(device):
        return bound_launch(spec, device.index)(tensors)


class on_device:
    """Context manager that makes a GPU the current device, and then restores the one before; does nothing for a CPU.

    JAX leaves a thread on the GPU that it used last, so the device is also restored where both are the same: JAX may
    run inside of the block. Autograd's threads need this, too, as a kernel belongs to the GPU on which it was loaded.
    """

    __slots__ = ("_before", "_index")

    def __init__(self, device: torch.device) -> None:
        self._index = device.index if device.type == "cuda" else None

    def __enter__(self) -> None:
        if self._index is not None:
            self._before = torch.cuda.current_device()
            if self._before != self._index:
                torch.cuda.set_device(self._index)

    def __exit__(self, *_: object) -> None:
        if self._index is not None and torch.cuda.current_device() != self._before:
            torch.cuda.set_device(self._before)


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
def bound_launch(spec: KernelSpec, device_index: int) -> "_BoundLaunch":
    """Return the launch of `spec` on a device, ready to be called with tensors that the caller has checked.

    The device must be torch's current one at each call.
    """
    return _BoundLaunch(spec.plan(device_target(device_index)), device_index)


@functools.cache
def device_target(device_index: int) -> Target:
    """Return the properties of a CUDA device that plans may depend on."""
    properties = torch.cuda.get_device_properties(device_index)
    return Target(properties.major * 10 + properties.minor, properties.multi_processor_count)


_kernels: dict[tuple[Any, ...], Any] = {}
_kernels_lock = threading.Lock()


def _loaded_kernel(plan: LaunchPlan, device_index: int) -> Any:
    """Return Triton's kernel object for the current device.

    Devices of one architecture share the compiled kernel, but the object's handles belong to one device.
    """
    target = device_target(device_index)
    key = (device_index, *compile_key(plan, target.arch))
    with _kernels_lock:
        if key not in _kernels:
            _kernels[key] = copy.copy(compile_plan(plan, target, binary=True).kernel)
        return _kernels[key]


class _BoundLaunch:
    """A plan bound to a loaded kernel; a call only allocates the outputs and fills in the arguments.

    To keep host time low, everything that does not change between calls is prepared at construction.
    """

    def __init__(self, plan: LaunchPlan, device_index: int) -> None:
        self._plan = plan
        self._device = torch.device("cuda", device_index)
        self._num_inputs = len(plan.inputs)
        sources = {output: source for source, output in plan.aliases}
        self._outputs = [
            (sources.get(index), spec.shape, _torch_dtype(spec.dtype)) for index, spec in enumerate(plan.outputs)
        ]
        # The plan's leaves: constant ones, and the sources of the others: (index, buffer index[, descriptor maker]).
        self._template: list[Any] = []
        self._pointers: list[tuple[int, int]] = []
        self._descriptors: list[tuple[int, int, Callable[[torch.Tensor], Any]]] = []
        for index, (_, _, argument) in enumerate(plan.leaves()):
            self._template.append(_constant_value(argument))
            if isinstance(argument, Pointer):
                self._pointers.append((index, self._position(argument)))
            elif isinstance(argument, Descriptor):
                self._descriptors.append((index, self._position(argument), _descriptor_maker(plan, argument)))
        self._parameters = parameter_places(plan)
        kernel = _loaded_kernel(plan, device_index)
        with on_device(self._device):
            self._run = _with_scratch(kernel, self._device, kernel[plan.grid])

    def __call__(self, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        outputs = self._allocate(tensors)
        self._run(*self._arguments(tensors + outputs))
        return outputs

    def into(self, tensors: tuple[torch.Tensor, ...], outputs: tuple[torch.Tensor, ...]) -> None:
        """Launch into outputs that the caller has allocated: contiguous, aligned, of the plan's sizes."""
        self._run(*self._arguments(tensors + outputs))

    def prepared(self, tensors: tuple[torch.Tensor, ...]) -> Callable[[], None]:
        """Return the bare launch on these tensors and preallocated outputs, to measure the cost of a launch alone."""
        buffers = tensors + self._allocate(tensors)
        arguments = self._arguments(buffers)
        # Arguments are bare addresses, so the closure keeps the buffers alive.
        return lambda: (self._run(*arguments), buffers)[0]

    def prepared_jit(self, tensors: tuple[torch.Tensor, ...]) -> Callable[[], None]:
        """Return this launch through Triton's own `kernel[grid](...)`, which looks up the compiled kernel each time."""
        buffers = tensors + self._allocate(tensors)
        leaves = self._leaves(buffers)
        for index, position in self._pointers:
            leaves[index] = buffers[position]
        arguments = self._grouped(leaves)
        options = {name: value for name, value in dataclasses.asdict(self._plan.options).items() if value is not None}
        launch = function_of(self._plan.kernel)[self._plan.grid]
        return lambda: launch(*arguments, **options)

    def _arguments(self, buffers: tuple[torch.Tensor, ...]) -> list[Any]:
        return self._grouped(self._leaves(buffers))

    def _leaves(self, buffers: tuple[torch.Tensor, ...]) -> list[Any]:
        if self._descriptors:
            _make_context_current(self._device.index)
        leaves = self._template.copy()
        for index, position in self._pointers:
            leaves[index] = buffers[position].data_ptr()
        for index, position, make_descriptor in self._descriptors:
            leaves[index] = make_descriptor(buffers[position])
        return leaves

    def _grouped(self, leaves: list[Any]) -> list[Any]:
        """Return one argument per kernel parameter; Triton's launcher takes groups as tuples."""
        if self._parameters is None:
            return leaves
        return [leaves[first] if make is None else make(leaves[first:end]) for first, end, make in self._parameters]

    def _allocate(self, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(
            torch.empty(shape, dtype=dtype, device=self._device) if source is None else tensors[source]
            for source, shape, dtype in self._outputs
        )

    def _position(self, argument: Pointer | Descriptor) -> int:
        return argument.index if argument.role == "input" else self._num_inputs + argument.index


def _constant_value(argument: Argument) -> Any:
    match argument:
        case Scalar():
            return argument.value
        case Constexpr():
            return private_triton.compile_time_value(argument.value)
    return None


class _Thread(threading.local):
    """Per-thread set of the devices whose CUDA context has been made current."""

    def __init__(self) -> None:
        self.devices: set[int] = set()


_thread = _Thread()


def _make_context_current(device_index: int) -> None:
    """Make the device's CUDA context current in this thread, which creating a tensor descriptor needs.

    A thread gets the context with its first call of the CUDA runtime. Autograd's threads may reach a launch without any
    such call: torch's allocator returns memory from its cache, and Triton sets the context only when it launches.
    """
    if device_index not in _thread.devices:
        torch.cuda.mem_get_info(device_index)
        _thread.devices.add(device_index)


def _descriptor_maker(plan: LaunchPlan, descriptor: Descriptor) -> Callable[[torch.Tensor], Any]:
    """Return a function that makes a host descriptor over a tensor."""
    example = torch.empty(0, dtype=_torch_dtype(buffer_spec(plan, descriptor).dtype))
    return private_triton.descriptor_maker(
        example, descriptor.shape, descriptor.strides, descriptor.block_shape, descriptor.layout
    )


def _with_scratch(kernel: Any, device: torch.device, run: Callable[..., None]) -> Callable[..., None]:
    """Provide a kernel that makes descriptors on the device with global scratch memory from torch's allocator."""
    if not kernel.metadata.global_scratch_size:
        return run
    import triton

    def allocate(size: int, alignment: int, stream: int | None) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int8, device=device)

    def run_with_allocator(*arguments: Any) -> None:
        triton.set_allocator(allocate)
        run(*arguments)

    # Triton's allocator is a context variable. It is set in a copied context, so the user's own stays unchanged.
    return lambda *arguments: contextvars.copy_context().run(run_with_allocator, *arguments)


@functools.cache
def _torch_dtype(name: str) -> torch.dtype:
    return getattr(torch, name)
