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
    """Consecutive launches, each of which reads arrays by name and adds the arrays that it writes."""

    def __init__(self, specs: Sequence[Any], device_index: int) -> None:
        self._launches = [(bound_launch(spec, device_index), spec.input_names, spec.output_names) for spec in specs]

    def __call__(self, arrays: dict[str, Any]) -> None:
        for launch, input_names, output_names in self._launches:
            arrays.update(zip(output_names, launch(tuple([arrays[name] for name in input_names])), strict=True))


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
