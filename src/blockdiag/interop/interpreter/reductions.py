"""Reductions and scans over interpreted tensors.

Reductions with a known combine function use numpy's own; all others are folds along the axis.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl

from blockdiag.interop.interpreter.builder import TensorHandle, handle_of, values


def reduce(session: Any, input: Any, axis: Any, combine_fn: Any, keep_dims: bool = False, **_: Any) -> Any:
    """Implement `tl.reduce`."""
    if not isinstance(input, tuple):
        return reduce(session, (input,), axis, combine_fn, keep_dims)[0]
    keep_dims = bool(_plain(keep_dims))
    axis = _plain(axis)
    rank = len(input[0].shape)
    arrays = [_Elements(tensor) if axis is not None else _Elements(tensor).flattened() for tensor in input]
    known = _known_reductions().get(combine_fn)
    if known is not None and len(arrays) == 1:
        results = [_tensor(known(arrays[0].numbers, axis or 0), arrays[0].dtype)]
    else:
        results = _fold(session, arrays, axis or 0, combine_fn)
    if not keep_dims:
        return tuple(results)
    kept = tuple(range(rank)) if axis is None else (axis,)
    return tuple(_reshaped(tensor, np.expand_dims(_block(tensor), kept).shape) for tensor in results)


def reduce_with_indices(session: Any, input: Any, axis: Any, combine_fn: Any, keep_dims: bool = False, **_: Any) -> Any:
    """Implement `tl.max` and `tl.min` with `return_indices=True`."""
    axis = _plain(axis)
    shape = [_plain(size) for size in input.shape]
    along = [1] * len(shape)
    along[axis] = shape[axis]
    index = np.broadcast_to(np.arange(shape[axis], dtype=np.int32).reshape(along), shape)
    return reduce(session, (input, _tensor(index, tl.int32)), axis, combine_fn, keep_dims)


def associative_scan(session: Any, input: Any, axis: Any, combine_fn: Any, reverse: bool = False, **_: Any) -> Any:
    """Implement `tl.associative_scan`."""
    if not isinstance(input, tuple):
        return associative_scan(session, (input,), axis, combine_fn, reverse)[0]
    axis = _plain(axis)
    arrays = [_Elements(tensor) for tensor in input]
    step = -1 if _plain(reverse) else 1
    partial: tuple[Any, ...] | None = None
    columns: list[tuple[Any, ...]] = []
    for position in range(arrays[0].numbers.shape[axis])[::step]:
        element = tuple(array.take(position, axis) for array in arrays)
        partial = element if partial is None else _combined(session, combine_fn, partial, element)
        columns.append(partial)
    return tuple(
        _tensor(np.stack([_block(column[which]) for column in columns[::step]], axis), array.dtype)
        for which, array in enumerate(arrays)
    )


class _Elements:
    """Elements and dtype of an interpreted tensor."""

    def __init__(self, tensor: Any) -> None:
        self.numbers = values(tensor.handle)
        self.dtype = tensor.dtype

    def flattened(self) -> "_Elements":
        self.numbers = self.numbers.reshape(-1)
        return self

    def take(self, position: int, axis: int) -> Any:
        return _tensor(np.take(self.numbers, position, axis), self.dtype)


def _fold(session: Any, arrays: list[_Elements], axis: int, combine_fn: Any) -> list[Any]:
    elements = (
        tuple(array.take(position, axis) for array in arrays) for position in range(arrays[0].numbers.shape[axis])
    )
    return list(functools.reduce(functools.partial(_combined, session, combine_fn), elements))


def _combined(session: Any, combine_fn: Any, left: tuple[Any, ...], right: tuple[Any, ...]) -> tuple[Any, ...]:
    result = session.interpreted(combine_fn)(*left, *right)
    return result if isinstance(result, tuple) else (result,)


@functools.cache
def _known_reductions() -> dict[Any, Callable[[np.ndarray, int], np.ndarray]]:
    standard = tl.standard
    return {
        standard._sum_combine: _sum,
        # tl.max and tl.min ignore a NaN beside a number, as fmax and fmin do.
        standard._elementwise_max: lambda numbers, axis: np.fmax.reduce(_at_least_float32(numbers), axis),
        standard._elementwise_min: lambda numbers, axis: np.fmin.reduce(_at_least_float32(numbers), axis),
        standard._xor_combine: lambda numbers, axis: np.bitwise_xor.reduce(numbers, axis),
        standard._or_combine: lambda numbers, axis: np.bitwise_or.reduce(numbers, axis),
    }


def _sum(numbers: np.ndarray, axis: int) -> np.ndarray:
    wide = _at_least_float32(numbers)
    if wide.dtype.kind in "iub":
        return np.add.reduce(wide, axis, dtype=wide.dtype)
    # Adds the two halves repeatedly, as the lanes of a warp do. Zeros at the end of a longer axis then change no bit,
    # and results that must not depend on the length of a table rely on this. numpy's summation order depends on the
    # length.
    wide = np.moveaxis(wide, axis, 0)
    while (half := len(wide) // 2) > 0:
        wide = wide[:half] + wide[half:]
    return wide[0]


def _at_least_float32(numbers: np.ndarray) -> np.ndarray:
    # ml_dtypes types have numpy's kind "V" or "f". All of them are narrower than four bytes, as is float16.
    is_integer = numbers.dtype.kind in "iub"
    return numbers if is_integer or numbers.dtype.itemsize >= 4 else numbers.astype(np.float32)


def _tensor(numbers: Any, dtype: Any) -> Any:
    numbers = np.asarray(numbers)
    if numbers.ndim:
        return tl.tensor(handle_of(numbers, dtype.scalar), tl.block_type(dtype.scalar, list(numbers.shape)))
    return tl.tensor(handle_of(numbers.reshape(1), dtype.scalar), dtype.scalar)


def _block(tensor: Any) -> np.ndarray:
    """Return the elements of a result; for a scalar, as a 0-d array instead of shape (1,)."""
    numbers = values(tensor.handle)
    return numbers if tensor.type.is_block() else numbers.reshape(())


def _reshaped(tensor: Any, shape: tuple[int, ...]) -> Any:
    handle = TensorHandle(tensor.handle.data.reshape(shape), tensor.handle.dtype)
    return tl.tensor(handle, tl.block_type(tensor.dtype, list(shape)))


def _plain(value: Any) -> Any:
    if isinstance(value, tl.constexpr):
        return value.value
    return int(value.handle.data.item()) if isinstance(value, tl.tensor) else value
