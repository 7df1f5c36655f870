"""Tensors of PyTorch as arrays of JAX and back, without a copy.

Both directions share memory: `to_jax` and `to_torch` return another view of the same bytes. On a GPU the two frameworks
work on streams of their own. Each crossing orders them by an event: JAX's readers start after what was queued on the
current stream of torch, and that stream waits for the computation that makes the JAX array. The host never waits for a
GPU. On the CPU torch's operations are finished when they return, and `to_torch` waits for JAX's.

Lifetimes on a GPU. Neither framework waits, before it reuses memory, for readers on streams it does not know:

- `to_torch`: the array is kept after its last tensor is gone, until the stream it was imported on and the one current
  at that moment have passed that point. A tensor also read on further streams follows torch's usual rule for memory of
  another stream: the import stream has to wait for them before the tensor is dropped.
- `to_jax`: the storage is kept after JAX has released its array, until JAX's computations up to then have run.

What is kept is released by later crossings, or by `release_finished`. On the CPU nothing is kept.

Writes. JAX takes its arrays to be immutable. A torch write into shared memory is seen by the JAX array, also through
`to_torch`, and is not ordered after JAX computations that still read: import one of their results first (or wait with
`jax.block_until_ready`), and do not read the JAX array again.

JAX does not survive a fork: a child forked after a first crossing is refused here, where JAX would wait forever.
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

# Same bits, same meaning, and DLPack has a name for it in both frameworks.
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

# What XLA requires of the start of a buffer: its CPU client checks this, its GPU code generator relies on it unchecked.
_ALIGNMENT = {"cpu": 64, "cuda": 16}

_CPU, _CUDA = 1, 2  # DLDeviceType

PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


def to_jax(tensor: torch.Tensor, *, copy: bool = False) -> jax.Array:
    """The JAX array on the same memory as `tensor`: same shape, dtype and device, no copy.

    Any dense tensor crosses, transposed ones included: `x.transpose(1, 2)` of a [B, N, T, H] tensor arrives as
    [B, T, N, H] with that layout. A 64-bit dtype crosses where JAX has 64-bit types on (`jax.enable_x64`).

    Args:
        tensor: of any shape, on the CPU or a CUDA device, of a dtype that both frameworks have (bool, integers of 8 to
            64 bits, bfloat16, float16, float32, float64, complex, float8). Must not require grad.
        copy: allow one copy, row-major and owned by JAX alone, of what cannot be shared: strided slices, broadcast
            dimensions, conjugate and negative views, and memory that is not aligned. A tensor that can be shared is
            shared all the same.

    Returns:
        The array, on the CPU or on JAX's device for the same GPU. Later writes to the tensor are seen by the array, see
        the top of this module.

    Raises:
        TypeError: when `tensor` is no plain tensor: another type, a FakeTensor or a DTensor, or a tensor inside of a
            transform of torch.func.
        ValueError: when it requires grad, is sparse or nested, lies on a device or has a dtype that JAX does not share,
            has 64 bits while JAX has not, or, without `copy`, cannot be shared. The message says what to do.
        RuntimeError: while the current CUDA stream is being captured into a graph, and in a forked process.

    References:
        DLPack, the open structure of tensors in memory (2017).

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
    # JAX alone holds this alias, so the end of the alias tells when JAX has let go.
    alias = tensor.detach()
    with _lifetimes.same_device():
        array = share([alias])[0]
        _lifetimes.borrow(alias, alias.device.index)
    return array


def to_torch(array: jax.Array) -> torch.Tensor:
    """The torch tensor on the same memory as `array`: same shape, dtype, device and layout, no copy.

    Args:
        array: a concrete array of any shape on one device, the CPU or a CUDA GPU, of a dtype that torch has.

    Returns:
        The tensor. It does not require grad. JAX takes the memory to be immutable: writing to the tensor changes
        `array` under JAX's feet, so clone it before.

    Raises:
        TypeError: when `array` is no JAX array, is traced (inside of `jax.jit` and other transformations), or has a
            dtype without a torch counterpart.
        ValueError: when it is spread over several devices, deleted, or on a device that torch does not share.
        RuntimeError: while the current CUDA stream is being captured into a graph, and in a forked process.

    References:
        DLPack, the open structure of tensors in memory (2017).

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
    """Releases shared GPU memory that is kept for the other framework and that no device is reading any more.

    Every crossing does this too, in passing. Call it where a large tensor was the last to cross. It never waits: what a
    device has not passed yet stays, until the next call.

    Example:
        >>> from blockdiag.interop.dlpack import release_finished
        >>> release_finished() is None
        True
    """
    # Events cannot be asked during a capture.
    if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        _lifetimes.settle(force=True)


def check_tensor(tensor: torch.Tensor) -> None:
    """Raises what `to_jax` documents, except for what a copy or `detach` would put right."""
    if isinstance(tensor, torch.Tensor) and tensor.is_nested:
        is_jagged = tensor.layout is torch.jagged
        values = "tensor.values()" if is_jagged else "torch.cat(tensor.unbind())"
        offsets = "tensor.offsets()" if is_jagged else "torch.tensor([0, *map(len, tensor.unbind())]).cumsum(0)"
        raise ValueError(
            "`tensor` is nested, and JAX shares dense memory only; pass a padded tensor, tensor.to_padded_tensor(0.0), "
            f"or packed tokens and where each sequence begins, two arguments of the function:\n    packed = {values}\n"
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
            f"`tensor` has dtype {tensor.dtype}, which JAX has not; cast it, or view it as an integer dtype"
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
    """Raise what gradients with `is_grads_batched=True` raise: one tensor without memory stands for several."""
    if not all(x is None or has_storage(x) for x in cotangents):
        raise NotImplementedError(
            "gradients for several cotangents at once (is_grads_batched=True) are not available; ask for one after "
            "the other, or in JAX, with jax.vmap of what jax.vjp returns"
        )


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether a tensor has memory, rather than being traced by a transform."""
    try:
        tensor.data_ptr()
    except RuntimeError:  # what torch raises for tensors without storage, and there is no other way to ask
        return False
    return True


def why_not_shared(tensor: torch.Tensor) -> str | None:
    """None when JAX can share the memory of this checked tensor, otherwise the reason and a remedy."""
    if tensor.is_conj() or tensor.is_neg():
        return "is a lazy conjugate or negative view; pass tensor.resolve_conj().resolve_neg()"
    if not tensor.is_contiguous() and not _is_dense(tensor.shape, tensor.stride()):
        return (
            f"has shape {list(tensor.shape)} and strides {tensor.stride()}, which is no permutation of dense memory; "
            "pass tensor.contiguous()"
        )
    alignment = _ALIGNMENT[tensor.device.type]
    if tensor.data_ptr() % alignment and tensor.numel():
        return (
            f"starts at {tensor.data_ptr():#x}, no multiple of {alignment} bytes as XLA wants it; pass tensor.clone()"
        )
    return None


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements fill a stretch of memory, each byte once, in whatever order of the dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def dense_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A row-major copy; resolves conjugate and negative views in the same pass."""
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
        raise TypeError(f"`array` has dtype {array.dtype}, which torch has not; pass jax.random.key_data of a key")
    if array.dtype not in TENSOR_DTYPES:
        raise TypeError(f"`array` has dtype {array.dtype}, which torch has not; cast it with array.astype")
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


# --- The crossing itself. wrap_jax calls these for all operands at once; they check nothing.


def share(tensors: Iterable[torch.Tensor], *, for_one_program: bool = False) -> list[jax.Array]:
    """JAX arrays on the memory of checked tensors that can be shared.

    One event orders JAX behind torch's current stream, however many tensors there are. The caller has to keep memory of
    a GPU alive until JAX has read it, or until torch's current stream waits for that: then torch's allocator does not
    give the memory to anyone else before, whichever stream it belongs to.

    Args:
        tensors: what to share.
        for_one_program: the arrays go to one program, which takes all of them: then only the first of each device
            carries that event, since the program waits for all its operands. Each further event costs host time.
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
    """Tensors on the memory of concrete arrays on one device each; the memory is kept until torch has read it."""
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
        # The standard calls CUDA's legacy default stream 1, since 0 would be ambiguous.
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
            "this process was forked from one that uses JAX, whose threads did not come along: JAX would wait forever; "
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
    """torch's current stream of a device."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "the current CUDA stream is being captured into a graph, and JAX's work would not be part of it; cross "
            "between torch and JAX outside of the capture, or use blockdiag.torch, which launches natively"
        )
    return _lifetimes.current_stream(device_index)


class _Ordering(threading.local):
    """Events and streams that one thread uses again and again; recording an event anew leaves earlier waits alone."""

    def __init__(self) -> None:
        self.events: dict[int, torch.cuda.Event] = {}
        # JAX has a few streams per device that only carry such waits. Keeping to one of them for each of torch's
        # streams keeps JAX from waiting on a stream that has nothing to do with the tensor at hand.
        self.streams: dict[tuple[int, int], torch.cuda.ExternalStream] = {}


_ordering = _Ordering()


def _order_jax_behind(current: torch.cuda.Stream) -> int:
    """Has one of JAX's streams for outside events wait for torch's stream; returns the handle of JAX's."""
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
    """A tensor in the form that `jax.dlpack.from_dlpack` takes.

    torch's own `__dlpack__` refuses tensors of a GPU other than the current one, and sends pinned host memory to JAX's
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
    """Return jaxlib's own functions for arrays of a platform; None where the public ones of JAX serve."""
    found = jaxlib_launcher.dlpack_shortcut(platform)
    return None if isinstance(found, str) else found


def _import(tensor: torch.Tensor, stream: int | None) -> jax.Array:
    """Return the array on a tensor's memory. Its readers wait for `stream`, one of JAX's, where there is one."""
    device = _jax_device(tensor.device)
    shortcut = _shortcut(device.platform)
    if shortcut is not None:
        return shortcut.import_capsule(capsule_of_tensor(tensor), device, stream)
    # JAX asks for the ordering itself, and would narrow what has 64 bits while it has no such types: the backward pass
    # of a program with 64-bit types runs on threads of torch, where they are not on.
    with jax.enable_x64(True):
        return jax.dlpack.from_dlpack(_Exported(tensor), copy=False)


def _export(array: Any, platform: str, stream: int | None) -> Any:
    """Return the capsule of an array on a platform, whose next readers are on `stream`."""
    shortcut = _shortcut(platform)
    return array.__dlpack__(stream=stream) if shortcut is None else shortcut.export_array(array, stream)
