"""Lifetimes of device memory that torch and JAX share.

Both frameworks free memory on the host as soon as the last reference is gone, while the device may still be using it.
Each allocator reuses freed memory only for work ordered behind its own streams. It knows nothing of the other
framework's streams, and DLPack has no event for "no longer used". So this module keeps the owner alive:

- JAX memory that torch reads (`lend`): when the last tensor on it is gone, an event is recorded on the stream that
  imported it and on the current stream. The JAX array is kept until these events have completed.
- Torch memory that JAX reads (`borrow`): when JAX has released its array, the storage is kept until a small JAX
  computation that was started afterwards is ready. XLA runs the computations of one GPU in order on one stream, so all
  earlier readers have finished by then. One such fence covers many tensors, and small amounts of memory start none.

Nothing here waits. Owners whose events have completed are released at the next crossing or by `settle(force=True)`.
Host memory needs none of this: torch's CPU operations are finished when they return, and XLA's CPU client keeps its
arguments until it has read them.
"""

import collections
import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any, ClassVar

import jax
import numpy as np
import torch

from blockdiag.interop import private_torch

# Limits per device below which dropped storages are held without starting a fence. A fence costs about as much host
# time as any other small JAX computation.
UNFENCED_BYTES = 1 << 20
UNFENCED_STORAGES = 32


class Limbo:
    """Queues of memory owners, each with a predicate that becomes true when the device no longer uses the memory.

    The predicates of one lane become true in insertion order, so only the first owner of each lane is tested.
    """

    def __init__(self) -> None:
        self._lanes: dict[Hashable, collections.deque[tuple[object, Callable[[], bool], Callable[[], None]]]] = {}
        self._releasing = threading.Lock()

    def __len__(self) -> int:
        return sum(len(lane) for lane in list(self._lanes.values()))

    def keep(
        self, lane: Hashable, owner: object, passed: Callable[[], bool], after: Callable[[], None] = lambda: None
    ) -> None:
        """Keep `owner` until `passed()` is true, then call `after()`. Finalizers call this, so it takes no lock."""
        self._lanes.setdefault(lane, collections.deque()).append((owner, passed, after))

    def release(self) -> None:
        """Drop the owners whose memory the device no longer uses."""
        # A thread that finds the lock taken leaves the work to its holder. A finalizer that runs in here only appends.
        if not self._releasing.acquire(blocking=False):
            return
        try:
            for lane in list(self._lanes.values()):
                while lane and lane[0][1]():
                    lane.popleft()[2]()
        finally:
            self._releasing.release()


class _Watch(weakref.ref):
    """Weak reference that calls `release(*payload)` when its target is gone."""

    __slots__ = ("payload", "process", "release")

    payload: tuple[Any, ...]
    process: int
    release: Callable[..., None]


_watches: dict[int, _Watch] = {}


def watch(target: object, release: Callable[..., None], *payload: Any) -> None:
    """Call `release(*payload)` once `target` is gone; the payload lives at least until then."""
    entry = _Watch(target, _gone)
    entry.release, entry.payload, entry.process = release, payload, os.getpid()
    _watches[id(entry)] = entry


def _gone(entry: _Watch) -> None:
    _watches.pop(id(entry), None)
    # CUDA may already be shut down while the interpreter exits, and it is never usable in a forked child.
    if not sys.is_finalizing() and entry.process == os.getpid():
        entry.release(*entry.payload)


limbo = Limbo()
_settling = threading.Lock()
_unmarked: collections.deque[tuple[jax.Array, torch.cuda.Stream]] = collections.deque()
_dropped: collections.defaultdict[int, collections.deque[torch.UntypedStorage]] = collections.defaultdict(
    collections.deque
)


def lend(tensor: torch.Tensor, array: jax.Array, stream: torch.cuda.Stream) -> None:
    """Keep the JAX `array` behind the CUDA `tensor`, imported on `stream`, until torch has read it.

    The tensor's storage is watched, so views may outlive the tensor.
    """
    watch(tensor.untyped_storage(), _returned, array, stream)


def _returned(array: jax.Array, stream: torch.cuda.Stream) -> None:
    if torch.cuda.is_current_stream_capturing():
        # An event recorded now would become part of the graph and could not be queried.
        _unmarked.append((array, stream))
        return
    current = current_stream(stream.device.index)
    streams = [stream] if current == stream else [stream, current]
    lane = (stream.device.index, *(each.cuda_stream for each in streams))
    mark = _Mark(streams)
    limbo.keep(lane, array, mark.is_passed, mark.free)


class _Mark:
    """A point in time on several streams of one device. Events are reused, since creating them dominates the cost."""

    _free: ClassVar[collections.defaultdict[int, list[torch.cuda.Event]]] = collections.defaultdict(list)

    def __init__(self, streams: list[torch.cuda.Stream]) -> None:
        self._pool = self._free[streams[0].device.index]
        self._events = []
        for stream in streams:
            try:
                event = self._pool.pop()
            except IndexError:  # testing for emptiness first would race with other threads
                event = torch.cuda.Event()
            event.record(stream)
            self._events.append(event)

    def is_passed(self) -> bool:
        return all(event.query() for event in self._events)

    def free(self) -> None:
        self._pool.extend(self._events)


_streams: dict[tuple[int, int], torch.cuda.Stream] = {}


def current_stream(device_index: int) -> torch.cuda.Stream:
    """Return torch's current stream of a device. Stream objects are cached by handle, as they are slow to create."""
    handle = private_torch.current_stream_handle(device_index)
    stream = _streams.get((device_index, handle))
    if stream is None:
        stream = _streams[device_index, handle] = torch.cuda.current_stream(device_index)
    return stream


class same_device:
    """Context manager that restores torch's current device, which JAX leaves at the GPU that it used last."""

    __slots__ = ("_device",)

    def __enter__(self) -> None:
        several = torch.cuda.is_initialized() and torch.cuda.device_count() > 1
        self._device = torch.cuda.current_device() if several else None

    def __exit__(self, *_: object) -> None:
        if self._device is not None:
            torch.cuda.set_device(self._device)


def borrow(alias: torch.Tensor, device_index: int) -> None:
    """Keep the torch storage behind `alias`, a tensor that only JAX will reference, until JAX has read it."""
    watch(alias, _dropped[device_index].append, alias.untyped_storage())


def settle(*, force: bool = False) -> None:
    """Release the owners that devices no longer use, and start fences where enough memory waits for one.

    Args:
        force: start a fence for any memory that waits for one.
    """
    # A thread that finds the lock taken leaves the work to its holder.
    if not _settling.acquire(blocking=False):
        return
    try:
        for _ in range(len(_unmarked)):
            _returned(*_unmarked.popleft())
        for device_index, storages in list(_dropped.items()):
            if storages and (force or _is_much(storages)):
                # The fence covers only storages that were dropped before it starts.
                batch = [storages.popleft() for _ in range(len(storages))]
                limbo.keep(("fence", device_index), batch, _start_fence(device_index).is_ready)
        limbo.release()
    finally:
        _settling.release()


def _is_much(storages: collections.deque[torch.UntypedStorage]) -> bool:
    return len(storages) >= UNFENCED_STORAGES or sum(each.nbytes() for each in list(storages)) >= UNFENCED_BYTES


def _start_fence(device_index: int) -> Any:
    compiled, token = _fence(device_index)
    return compiled(token)


@functools.cache
def _fence(device_index: int) -> tuple[Any, Any]:
    # Compiled ahead of time: under a trace, a plain jitted call would be staged into the caller's program.
    with jax.ensure_compile_time_eval():
        token = jax.device_put(np.zeros((), np.int32), cuda_device(device_index))
        return jax.jit(lambda x: x + 1).lower(token).compile(), token


@functools.cache
def cuda_device(device_index: int) -> jax.Device:
    """Return the JAX device that is torch's `cuda:device_index`.

    Raises:
        ValueError: when JAX has no such device.
    """
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError as error:
        raise ValueError(
            f"JAX has no CUDA device to share memory of cuda:{device_index} with ({error}); install jax[cuda13], or "
            "move the tensor with tensor.cpu()"
        ) from error
    for device in devices:
        if device.local_hardware_id == device_index:
            return device
    raise ValueError(
        f"JAX does not see cuda:{device_index}, only {[str(device) for device in devices]}; make the same devices "
        "visible to both frameworks, by CUDA_VISIBLE_DEVICES"
    )
