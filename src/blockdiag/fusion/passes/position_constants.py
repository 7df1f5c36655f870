"""Replace constants that are functions of positions, such as NumPy masks, distances and relative indices.

A constant array [T, S] hides its structure. If its elements are a progression along each axis, or depend on the
distance between two axes alone, it becomes the few equations that compute it. Regions gain from that: tiles that such a
mask rules out are known at trace time, and a table gathered by such indices is a function of q - k
(`regions/relative_positions.py`). Floats that hide keys by one value become a mask. Constants that numbers are written
into count as constants, too (`scatter_to_select.py`).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend import core

from blockdiag.fusion.frontend.trace import evaluate
from blockdiag.fusion.ir.factors import NO_KEY
from blockdiag.fusion.passes.scatter_to_select import with_written

_MOST_ELEMENTS = 2**26
# Larger arrays on a device are not copied to the host for inspection.
_MOST_COPIED = 2**22
# Shorter axes are not worth the analysis.
_LEAST = 8

type _Make = Callable[[], Any]


def with_positions(jaxpr: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """Return the flat program with equations in place of constants that are functions of positions."""
    jaxpr = with_written(jaxpr, _known, _formula)
    # Each constant is fetched once, because it may be on a device.
    arrays = map(_known, jaxpr.consts)
    made = [None if array is None else _formula(array) or _hiding(array) for array in arrays]
    if not any(made):
        return jaxpr

    def compute(*given: Any) -> list[Any]:
        consts = [const if make is None else make() for const, make in zip(jaxpr.consts, made, strict=True)]
        return evaluate(jaxpr.jaxpr, consts, given)

    return jax.make_jaxpr(compute)(*jaxpr.in_avals)


def _formula(array: np.ndarray) -> _Make | None:
    """Return a function that computes a constant from positions, or None if it is not such a function."""
    if array.size < 2:
        return None
    axes = [axis for axis, size in enumerate(array.shape) if size > 1]
    if not axes or array.shape[axes[-1]] < _LEAST:
        return None
    if array.dtype.kind in "bi" and (array == array.flat[0]).all():
        # An example is the test whether an index is negative.
        return lambda: lax.full(array.shape, array.flat[0])
    if array.dtype in (np.int32, np.int64) and (make := _progression(array, axes)) is not None:
        return make
    if len(axes) < 2 or array.shape[axes[-2]] < _LEAST:
        return None
    lead = [array.shape[axis] for axis in axes[:-2]]
    rows, columns = (array.shape[axis] for axis in axes[-2:])
    whole = array.reshape(*lead, rows, columns)
    if not np.array_equal(whole[..., 1:, 1:], whole[..., :-1, :-1]):
        return None
    # By distance q - k, from 1 - columns to rows - 1.
    line = np.concatenate([whole[..., 0, ::-1], whole[..., 1:, 0]], axis=-1)
    if array.dtype == bool:
        return None if lead else _band(line, array.shape, axes)
    if jax.dtypes.issubdtype(array.dtype, np.floating) and (make := _masked(line, array, axes)) is not None:
        return make
    return lambda: lax.reshape(_read(line, rows, columns), array.shape)


def _known(const: Any) -> np.ndarray | None:
    """Return a constant's elements, or None if they cannot be inspected or are too many."""
    if isinstance(const, jax.core.Tracer):
        return None
    most = _MOST_ELEMENTS
    if isinstance(const, jax.Array):
        if not const.is_fully_addressable or jax.dtypes.issubdtype(const.dtype, jax.dtypes.extended):
            return None
        # A function may hold a model's weights, which are neither positions nor masks.
        is_number = jax.dtypes.issubdtype(const.dtype, np.floating)
        most = 0 if is_number and not _may_be_mask(const) else _MOST_COPIED
    return np.asarray(const) if 1 < np.size(const) <= most else None


def _may_be_mask(const: jax.Array) -> bool:
    """Return whether the first and the last row of an array have at most two distinct values each."""
    if const.ndim < 2 or 0 in const.shape:
        return False
    with jax.ensure_compile_time_eval():
        rows = [np.asarray(const[(at,) * (const.ndim - 1)]) for at in (0, -1)]
    return all(np.unique(row).size <= 2 for row in rows)


def _progression(array: np.ndarray, axes: Sequence[int]) -> _Make | None:
    """Return a function for a number plus a multiple of each index, or None if the elements are anything else."""
    origin = (0,) * array.ndim
    first = int(array[origin])
    steps = {axis: int(array[tuple(int(i == axis) for i in range(array.ndim))]) - first for axis in axes}
    steps = {axis: step for axis, step in steps.items() if step}
    expected = np.full((1,) * array.ndim, first, np.int64)
    for axis, step in steps.items():
        size = array.shape[axis]
        line = step * np.arange(size, dtype=np.int64)
        expected = expected + line.reshape([size if i == axis else 1 for i in range(array.ndim)])
    if not steps or not np.array_equal(np.broadcast_to(expected, array.shape), array):
        return None
    dtype = array.dtype.type

    def make() -> Any:
        lines = [lax.full(array.shape, dtype(first))] if first else []
        for axis, step in steps.items():
            line = lax.broadcasted_iota(array.dtype, array.shape, axis)
            lines.append(line if step == 1 else lax.mul(line, lax.full_like(line, dtype(step))))
        return functools.reduce(lax.add, lines)

    return make


def _band(line: np.ndarray, shape: tuple[int, ...], axes: Sequence[int]) -> _Make | None:
    """Return a function for a mask that is true, or false, on one interval of distances; None for other masks."""
    columns = shape[axes[-1]]
    for inside in (True, False):
        (places,) = np.nonzero(line == inside)
        if places.size and places.size != line.size and places[-1] - places[0] + 1 == places.size:
            least, most = (int(x) - (columns - 1) for x in (places[0], places[-1]))
            break
    else:
        return None
    has_least, has_most = places[0] > 0, places[-1] < line.size - 1

    def make() -> Any:
        rows = lax.broadcasted_iota(np.int32, shape, axes[-2])
        apart = lax.sub(rows, lax.broadcasted_iota(np.int32, shape, axes[-1]))
        sides = [lax.ge(apart, lax.full_like(apart, np.int32(least)))] if has_least else []
        sides += [lax.le(apart, lax.full_like(apart, np.int32(most)))] if has_most else []
        found = functools.reduce(lax.bitwise_and, sides)
        return found if inside else lax.bitwise_not(found)

    return make


def _masked(line: np.ndarray, array: np.ndarray, axes: Sequence[int]) -> _Make | None:
    """Return a function for numbers that are one constant on an interval of distances, or None for other numbers.

    Args:
        line: the numbers by distance, [.., rows + columns - 1].
        array: the numbers.
    """
    single = line.reshape(-1, line.shape[-1])
    values = np.unique(single)
    hidden = values[0]
    if values.size > 2 and not hidden <= NO_KEY:
        return None
    is_hidden = single == hidden
    if values.size == 1 or (is_hidden != is_hidden[:1]).any():
        return None
    band = _band(is_hidden[0], array.shape, axes)
    rows, columns = (array.shape[axis] for axis in axes[-2:])
    if band is None:
        return None

    def make() -> Any:
        if values.size == 2:
            rest = lax.full(array.shape, values[1], array.dtype)
        else:
            rest = lax.reshape(_read(np.where(line == hidden, 0, line).astype(line.dtype), rows, columns), array.shape)
        return lax.select(band(), lax.full(array.shape, hidden, array.dtype), rest)

    return make


def _hiding(array: np.ndarray) -> _Make | None:
    """Return a function for an array of two values, the lower of which hides keys, as a select by a mask.

    Tiles can be skipped from the mask.

    Returns:
        None for other arrays.
    """
    if array.ndim < 2 or not jax.dtypes.issubdtype(array.dtype, np.floating):
        return None
    hidden, seen = array.min(), array.max()
    if not hidden <= NO_KEY < seen:
        return None
    is_hidden = array == hidden
    if not (is_hidden | (array == seen)).all():
        return None
    full = functools.partial(lax.full, array.shape, dtype=array.dtype)
    return lambda: lax.select(is_hidden, full(hidden), full(seen))


def _read(line: np.ndarray, rows: int, columns: int) -> Any:
    """Return an array [.., rows, columns] from its numbers by distance."""
    lead = line.shape[:-1]
    of_rows, of_columns = (lax.broadcasted_iota(np.int32, (rows, columns), axis) for axis in (0, 1))
    apart = lax.sub(of_rows, of_columns)
    index = lax.add(apart, lax.full_like(apart, np.int32(columns - 1)))
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(len(lead))), collapsed_slice_dims=(len(lead),), start_index_map=(len(lead),)
    )
    return lax.gather(line, lax.expand_dims(index, (2,)), numbers, (*lead, 1), mode=lax.GatherScatterMode.CLIP)
