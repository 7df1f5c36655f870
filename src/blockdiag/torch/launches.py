"""Launches on CUDA tensors: caches of prepared calls, and tensors as kernels read them. Imports no JAX."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from blockdiag.interop.torch_launch import bound_launch

# A model repeats a few shapes, entries are small, and compiled kernels are shared by entries.
_REMEMBERED_CALLS = 1024


class Remembered[Key, Prepared]:
    """Cache of the prepared launches of the most recent kinds of calls."""

    def __init__(self, prepare: Callable[[Key], Prepared]) -> None:
        self._prepare = prepare
        self._calls: OrderedDict[tuple[Any, ...], Prepared] = OrderedDict()

    def __call__(self, arguments: Any) -> Prepared:
        """Return the launches of a call, cached by its `key_of_call`; errors of preparing them propagate."""
        key = arguments.key_of_call()
        prepared = self._calls.get(key)
        if prepared is None:
            prepared = self._calls[key] = self._prepare(arguments)
            if len(self._calls) > _REMEMBERED_CALLS:
                self._calls.popitem(last=False)
        return prepared

    def clear(self) -> None:
        """Drop all entries."""
        self._calls.clear()


class Launches:
    """Consecutive launches, each of which reads arrays by name and adds the arrays that it writes.

    Scratch memory returns to torch's allocator once the last launch that reads it is enqueued. The allocator reuses it
    only for later work on the same stream.

    Args:
        specs: the launches in order.
        device_index: the device.
        results: names of the arrays that the caller needs; None for all arrays.
    """

    def __init__(self, specs: Sequence[Any], device_index: int, results: Sequence[str] | None = None) -> None:
        self._launches = [
            (bound_launch(spec, device_index), spec.input_names, spec.output_names, unneeded)
            for spec, unneeded in zip(specs, unneeded_arrays(specs, results), strict=True)
        ]

    def __call__(self, arrays: dict[str, Any]) -> None:
        for launch, input_names, output_names, unneeded in self._launches:
            arrays.update(zip(output_names, launch(tuple([arrays[name] for name in input_names])), strict=True))
            for name in unneeded:
                del arrays[name]


def unneeded_arrays(specs: Sequence[Any], results: Sequence[str] | None) -> list[tuple[str, ...]]:
    """Return the arrays, written by launches, that neither a later launch nor the caller needs after each launch."""
    if results is None:
        return [() for _ in specs]
    found, written = [], set[str]()
    for index, spec in enumerate(specs):
        written.update(spec.output_names)
        unneeded = tuple(sorted(written - needed_arrays(specs[index + 1 :], set(results))))
        written.difference_update(unneeded)
        found.append(unneeded)
    return found


def needed_arrays(later: Sequence[Any], results: set[str]) -> set[str]:
    """Return the arrays whose current value a later launch reads, before a launch overwrites that name."""
    needed: set[str] = set()
    replaced: set[str] = set()
    for spec in later:
        needed.update(set(spec.input_names) - replaced)
        replaced.update(spec.output_names)
    return needed | (results - replaced)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor if a kernel can read it (row-major and 16-byte aligned), else a copy that it can read."""
    if tensor.is_contiguous() and tensor.data_ptr() % 16 == 0 and not tensor.is_neg():
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def reshaped(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Change the shape of a launch's result in place, to one with as many elements.

    The result is not a view, because autograd refuses in-place writes to views that an operator returns.
    """
    return tensor.resize_(shape)
