"""Conversion between PyTorch tensors and JAX arrays without a copy.

Both directions share memory: `to_jax` and `to_torch` return another view of the same bytes. On a GPU the two frameworks
use separate streams, and each crossing orders them with an event. JAX's readers start after the work queued on torch's
current stream. That stream in turn waits for the computation that produces a JAX array. The host never waits for a GPU.
On the CPU torch's operations are finished when they return, and `to_torch` waits for JAX's.

Lifetimes on a GPU. Before reusing memory, neither framework waits for readers on streams that it does not know:

- `to_torch`: when the last tensor is gone, the array is kept until the import stream and the stream current at that
  moment have passed that point. A tensor that is also read on other streams follows torch's usual rule: the import
  stream has to wait for them before the tensor is dropped.
- `to_jax`: when JAX has released its array, the storage is kept until all JAX computations started by then have run.

Kept memory is released by later crossings or by `release_finished`. On the CPU nothing is kept.

Writes. JAX assumes that its arrays are immutable. A torch write into shared memory, also through `to_torch`, changes
the JAX array. It is not ordered after JAX computations that still read the memory: import one of their results first,
or wait with `jax.block_until_ready`, and do not read the JAX array again.

JAX does not survive a fork: a child forked after the first crossing gets an error here, where JAX would wait forever.
"""

import functools
import os
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.autograd import forward_ad
from torch.utils.dlpack import from_dlpack as tensor_from_capsule
from torch.utils.dlpack import to_dlpack as capsule_of_tensor

from blockdiag.interop import _lifetimes, jaxlib_launcher, private_torch

__all__ = ["release_finished", "to_jax", "to_torch"]

_SHARED_DTYPES = """
    bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 bfloat16 float16 float32 float64 complex64 complex128
    float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu
"""

# Dtypes with the same bits and meaning in both frameworks, and a DLPack name in both.
DTYPES: dict[torch.dtype, np.dtype] = {
    getattr(torch, name): np.dtype(getattr(jnp, "bool_" if name == "bool" else name)) for name in _SHARED_DTYPES.split()
}
TENSOR_DTYPES = {array_dtype: tensor_dtype for tensor_dtype, array_dtype in DTYPES.items()}
_NARROWED = {
    torch.float64: "float32",
    torch.complex128: "complex64",
    torch.int64: "int32",
    torch.uint64: "uint32",
}

# Alignment in bytes that XLA requires of a buffer. Its CPU client checks it; its GPU code generator relies on it
# without a check.
_ALIGNMENT = {"cpu": 64, "cuda": 16}

_CPU, _CUDA = 1, 2  # DLDeviceType

PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


def to_jax(tensor: torch.Tensor, *, copy: bool = False) -> jax.Array:
    """Return a JAX array on the same memory as `tensor`, with the same shape, dtype and device and without a copy.

    Any dense tensor crosses, transposed ones included: `x.transpose(1, 2)` of a [B, N, T, H] tensor arrives as
    [B, T, N, H] with that layout. A 64-bit dtype crosses only if JAX has 64-bit types enabled (`jax.enable_x64`).

    Args:
        tensor: tensor of any shape, on the CPU or a CUDA device. Its dtype must exist in both frameworks: bool,
            integers of 8 to 64 bits, bfloat16, float16, float32, float64, complex, float8. Must not require grad.
        copy: allow one row-major copy, owned by JAX alone, of a tensor that cannot be shared: strided slices, broadcast
            dimensions, conjugate and negative views, and unaligned memory. A tensor that can be shared is still shared.

    Returns:
        The array, on the CPU or on JAX's device for the same GPU. Later writes to the tensor change the array, see the
        top of this module.

    Raises:
        TypeError: when `tensor` is not a plain tensor: another type, a FakeTensor or a DTensor, or a tensor inside a
            torch.func transform.
        ValueError: when it requires grad, is sparse or nested, has a device or dtype that JAX does not share, has a
            64-bit dtype that JAX has disabled, or, without `copy`, cannot be shared. The message names the remedy.
        RuntimeError: while the current CUDA stream is being captured into a graph, and in a forked process.

    References:
        DLPack, the open in-memory tensor structure (2017).

    Example:
        >>> import torch
        >>> from blockdiag.interop import to_jax
        >>> to_jax(torch.arange(3, dtype=torch.int32)) + 1
        Array([1, 2, 3], dtype=int32)
    """
    check_tensor(tensor)
    if tensor.requires_grad:
        raise ValueError(
            "`tensor` requires grad, and autograd cannot follow it into JAX; pass tensor.detach(), or wrap the JAX "
            "function with blockdiag.interop.wrap_jax, which brings its gradient"
        )
    reason = why_not_shared(tensor)
    if reason is not None:
        if not copy:
            raise ValueError(f"`tensor` {reason}, or copy=True for one copy")
        tensor = dense_copy(tensor)
    if tensor.device.type == "cpu":
        return share([tensor])[0]
    # JAX holds the only reference to this alias, so the alias dies when JAX releases the array.
    alias = tensor.detach()
    with _lifetimes.same_device():
        array = share([alias])[0]
        _lifetimes.borrow(alias, alias.device.index)
    return array


def to_torch(array: jax.Array) -> torch.Tensor:
    """Return a torch tensor on the same memory as `array`, with the same shape, dtype, device and layout.

    Args:
        array: concrete array of any shape on one device, the CPU or a CUDA GPU, with a dtype that torch has.

    Returns:
        The tensor. It does not require grad. JAX assumes that the memory is immutable, and a write to the tensor would
        change `array` without JAX's knowledge: clone the tensor before writing to it.

    Raises:
        TypeError: when `array` is not a JAX array, is traced (inside `jax.jit` and other transformations), or has a
            dtype without a torch counterpart.
        ValueError: when it is spread over several devices, deleted, or on a device that torch does not share.
        RuntimeError: while the current CUDA stream is being captured into a graph, and in a forked process.

    References:
        DLPack, the open in-memory tensor structure (2017).

    Example:
        >>> import jax.numpy as jnp
        >>> from blockdiag.interop import to_torch
        >>> to_torch(jnp.arange(3, dtype=jnp.int32))
        tensor([0, 1, 2], dtype=torch.int32)
    """
    _check_array(array)
    with _lifetimes.same_device():
        tensor = receive([array])[0]
        if tensor.device.type == "cuda":
            _lifetimes.settle()
    return tensor


def release_finished() -> None:
    """Release shared GPU memory that was kept for the other framework and that no device reads any more.

    Every crossing also does this. Call it when a large tensor was the last one to cross. It never waits: memory that a
    device may still be reading stays until the next call.

    Example:
        >>> from blockdiag.interop.dlpack import release_finished
        >>> release_finished() is None
        True
    """
    # Events cannot be queried during a capture.
    if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        with _lifetimes.same_device():
            _lifetimes.settle(force=True)


def check_tensor(tensor: torch.Tensor) -> None:
    """Raise the errors that `to_jax` documents, except those that a copy or `detach` would avoid."""
    if isinstance(tensor, torch.Tensor) and tensor.is_nested:
        is_jagged = tensor.layout is torch.jagged
        values = "tensor.values()" if is_jagged else "torch.cat(tensor.unbind())"
        offsets = "tensor.offsets()" if is_jagged else "torch.tensor([0, *map(len, tensor.unbind())]).cumsum(0)"
        raise ValueError(
            "`tensor` is nested, and JAX shares dense memory only; pass a padded tensor, tensor.to_padded_tensor(0.0), "
            "or packed tokens and the offsets of the sequences, as two arguments of the function:\n"
            f"    packed = {values}\n"
            f"    offsets = {offsets}.int()"
        )
    if type(tensor) not in PLAIN_TYPES:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"`tensor` must be a torch.Tensor, got {type(tensor).__name__}")
        if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            raise TypeError(
                f"`tensor` is a {type(tensor).__name__}, which has no memory of its own to share; pass a plain tensor, "
                "such as to_local() of a DTensor, and keep the call out of FakeTensorMode and torch.compile"
            )
    if tensor.layout is not torch.strided:
        raise ValueError(f"`tensor` has layout {tensor.layout}, JAX shares dense memory only; pass tensor.to_dense()")
    if tensor.device.type not in _ALIGNMENT or torch.version.hip is not None:
        raise ValueError(f"`tensor` is on {tensor.device}; only cpu and NVIDIA cuda tensors cross, move it there first")
    if tensor.dtype not in DTYPES:
        raise ValueError(
            f"`tensor` has dtype {tensor.dtype}, which JAX does not support; cast it, or view it as an integer dtype"
        )
    if tensor.dtype in _NARROWED and not jax.config.jax_enable_x64:
        raise ValueError(
            f"`tensor` has dtype {tensor.dtype}, which JAX would narrow; cast it with "
            f"tensor.to(torch.{_NARROWED[tensor.dtype]}), or turn on 64-bit types with jax.enable_x64"
        )
    if forward_ad.unpack_dual(tensor).tangent is not None:
        raise TypeError(
            "`tensor` has a tangent, which JAX would not see; take forward-mode derivatives of JAX functions in JAX, "
            "with jax.jvp"
        )
    if not has_storage(tensor) or private_torch.is_functional(tensor):
        raise TypeError(
            "`tensor` is traced by a transform of torch.func, so it has no memory to share; call this outside of the "
            "transform, and use jax.vmap or jax.grad within the JAX function"
        )


def refuse_several(cotangents: Iterable[torch.Tensor | None]) -> None:
    """Raise NotImplementedError for cotangents of `is_grads_batched=True`, which are batched tensors without memory."""
    if not all(x is None or has_storage(x) for x in cotangents):
        raise NotImplementedError(
            "gradients for several cotangents at once (is_grads_batched=True) are not available; compute one after "
            "the other, or all in JAX, with jax.vmap of the function that jax.vjp returns"
        )


def has_storage(tensor: torch.Tensor) -> bool:
    """Return True if a tensor has memory, False if it is traced by a transform."""
    try:
        tensor.data_ptr()
    except RuntimeError:  # torch raises this for tensors without storage, and there is no other way to ask
        return False
    return True


def why_not_shared(tensor: torch.Tensor) -> str | None:
    """Return None if JAX can share the memory of this checked tensor, otherwise the reason and a remedy."""
    if tensor.is_conj() or tensor.is_neg():
        return "is a lazy conjugate or negative view; pass tensor.resolve_conj().resolve_neg()"
    if not tensor.is_contiguous() and not _is_dense(tensor.shape, tensor.stride()):
        return (
            f"has shape {list(tensor.shape)} and strides {tensor.stride()}, which is not a permutation of dense "
            "memory; pass tensor.contiguous()"
        )
    alignment = _ALIGNMENT[tensor.device.type]
    if tensor.data_ptr() % alignment and tensor.numel():
        return (
            f"starts at {tensor.data_ptr():#x}, not a multiple of the {alignment} bytes that XLA requires; "
            "pass tensor.clone()"
        )
    return None


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return True if the elements fill a contiguous range of memory exactly once, in any order of the dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def dense_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a row-major copy; conjugate and negative views are resolved in the same pass."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor.detach())


def _check_array(array: jax.Array) -> None:
    if isinstance(array, jax.core.Tracer):
        raise TypeError(
            "`array` is traced, so it has no memory yet; call to_torch outside of jax.jit and other transformations, "
            "or call a torch function from inside with blockdiag.interop.wrap_torch"
        )
    if not isinstance(array, jax.Array):
        raise TypeError(f"`array` must be a jax.Array, got {type(array).__name__}")
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended):
        raise TypeError(
            f"`array` has dtype {array.dtype}, which torch does not support; pass jax.random.key_data of a key"
        )
    if array.dtype not in TENSOR_DTYPES:
        raise TypeError(f"`array` has dtype {array.dtype}, which torch does not support; cast it with array.astype")
    if len(array.sharding.device_set) != 1:
        raise ValueError(
            f"`array` is spread over {len(array.sharding.device_set)} devices; pass one of array.addressable_shards' "
            "data, or bring it to one device with jax.device_put"
        )
    if array.is_deleted():
        raise ValueError("`array` is deleted, perhaps donated to a jitted function; pass an array that is still alive")
    (device,) = array.sharding.device_set
    kind = array.sharding.memory_kind
    if device.platform not in ("cpu", "gpu") or kind not in (None, "device", "unpinned_host"):
        raise ValueError(f"`array` is in {kind} memory of {device}; bring it to a CPU or GPU with jax.device_put")


# --- The crossing itself. wrap_jax calls these functions for all operands at once; they check nothing.


def share(tensors: Iterable[torch.Tensor], *, for_one_program: bool = False) -> list[jax.Array]:
    """Return JAX arrays on the memory of tensors that have passed the checks and can be shared.

    One event orders JAX behind torch's current stream, for any number of tensors. The caller has to keep GPU memory
    alive until JAX has read it, or until torch's current stream waits for that read. From then on torch's allocator
    does not reuse the memory before the read, whichever stream the memory belongs to.

    Args:
        tensors: tensors to share.
        for_one_program: the arrays are all operands of one program. Then only the first array of each device carries
            the event, since the program waits for all its operands. Each further event costs host time.
    """
    _refuse_fork()
    streams: dict[torch.device, tuple[torch.cuda.Stream, int | None]] = {}
    arrays = []
    for tensor in tensors:
        device = tensor.device
        if device.type == "cpu":
            arrays.append(_import(tensor, None))
            continue
        found = streams.get(device)
        if found is None:
            current = _current_stream(device.index)
            _lifetimes.settle()
            external = None if _shortcut("gpu") is None else _order_jax_behind(current)
            found = streams[device] = current, external
        elif for_one_program:
            external = None
        else:
            external = found[1]
        tensor.record_stream(found[0])
        arrays.append(_import(tensor, external))
    return arrays


def receive(arrays: Iterable[jax.Array]) -> list[torch.Tensor]:
    """Return tensors on the memory of concrete single-device arrays; the memory is kept until torch has read it."""
    _refuse_fork()
    streams: dict[jax.Device, torch.cuda.Stream] = {}
    tensors = []
    for array in arrays:
        (device,) = array.sharding.device_set
        if device.platform == "cpu":
            tensors.append(tensor_from_capsule(_export(array, "cpu", None)))
            continue
        if device not in streams:
            streams[device] = _current_stream(device.local_hardware_id)
        stream = streams[device]
        # The DLPack standard numbers CUDA's legacy default stream 1, since 0 would be ambiguous.
        tensor = tensor_from_capsule(_export(array, "gpu", stream.cuda_stream or 1))
        _lifetimes.lend(tensor, array, stream)
        tensors.append(tensor)
    return tensors


@functools.cache
def _first_process() -> int:
    return os.getpid()


def _refuse_fork() -> None:
    if os.getpid() != _first_process():
        raise RuntimeError(
            "this process was forked from one that uses JAX, whose threads it does not have: JAX would wait forever; "
            'start processes with multiprocessing.get_context("spawn"), or DataLoader(multiprocessing_context="spawn")'
        )


@functools.cache
def _jax_device(device: torch.device) -> jax.Device:
    if device.type == "cuda":
        return _lifetimes.cuda_device(device.index)
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise ValueError(f"JAX has no CPU backend ({error}); name it in JAX_PLATFORMS, as in cuda,cpu") from error


def _current_stream(device_index: int) -> torch.cuda.Stream:
    """Return torch's current stream of a device, or raise RuntimeError during a graph capture."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "the current CUDA stream is being captured into a graph, and JAX's work would not be part of it; cross "
            "between torch and JAX outside of the capture, or use blockdiag.torch, which launches natively"
        )
    return _lifetimes.current_stream(device_index)


class _Ordering(threading.local):
    """Events and streams that one thread reuses; recording an event again does not affect earlier waits."""

    def __init__(self) -> None:
        self.events: dict[int, torch.cuda.Event] = {}
        # JAX has a few streams per device that only carry such waits. Each torch stream always uses the same one of
        # them, so that JAX does not wait for a torch stream unrelated to the tensor.
        self.streams: dict[tuple[int, int], torch.cuda.ExternalStream] = {}


_ordering = _Ordering()


def _order_jax_behind(current: torch.cuda.Stream) -> int:
    """Make one of JAX's streams for external events wait for torch's stream, and return the JAX stream's handle."""
    key = current.device.index, current.cuda_stream
    external = _ordering.streams.get(key)
    if external is None:
        handle = _jax_device(current.device).get_stream_for_external_ready_events()
        external = _ordering.streams[key] = torch.cuda.ExternalStream(handle, device=current.device)
    _wait_for_current(external, current)
    return external.cuda_stream


def _wait_for_current(external: torch.cuda.Stream, current: torch.cuda.Stream) -> None:
    event = _ordering.events.get(current.device.index)
    if event is None:
        event = _ordering.events[current.device.index] = torch.cuda.Event()
    event.record(current)
    event.wait(external)


class _Exported:
    """Wrapper that gives a tensor the DLPack methods which `jax.dlpack.from_dlpack` calls.

    torch's own `__dlpack__` refuses tensors on a GPU other than the current one, and sends pinned host memory to JAX's
    GPU backend.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        device = self._tensor.device
        return (_CPU, 0) if device.type == "cpu" else (_CUDA, device.index)

    def __dlpack__(self, *, stream: int | None = None, **_: Any) -> Any:
        if stream is not None:
            external = torch.cuda.ExternalStream(stream, device=self._tensor.device)
            _wait_for_current(external, torch.cuda.current_stream(self._tensor.device))
        return capsule_of_tensor(self._tensor)


def _shortcut(platform: str) -> jaxlib_launcher.Shortcut | None:
    """Return jaxlib's own functions for arrays of a platform, or None if JAX's public ones have to be used."""
    found = jaxlib_launcher.dlpack_shortcut(platform)
    return None if isinstance(found, str) else found


def _import(tensor: torch.Tensor, stream: int | None) -> jax.Array:
    """Return a JAX array on a tensor's memory. If `stream`, a JAX stream, is given, the array's readers wait for it."""
    device = _jax_device(tensor.device)
    shortcut = _shortcut(device.platform)
    if shortcut is not None:
        return shortcut.import_capsule(capsule_of_tensor(tensor), device, stream)
    # from_dlpack asks `_Exported` for the ordering. It would narrow 64-bit dtypes while they are disabled: the backward
    # pass of a program with 64-bit types runs on torch's threads, where they are not enabled.
    with jax.enable_x64(True):
        return jax.dlpack.from_dlpack(_Exported(tensor), copy=False)


def _export(array: Any, platform: str, stream: int | None) -> Any:
    """Return the DLPack capsule of an array on a platform, to be read next on `stream`."""
    shortcut = _shortcut(platform)
    return array.__dlpack__(stream=stream) if shortcut is None else shortcut.export_array(array, stream)
