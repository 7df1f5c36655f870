"""Intervals that bound the elements of tiles, and the dtypes that store their endpoints."""

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import DTypeLike

FLOATS = tuple(np.dtype(dtype) for dtype in (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64))


@functools.partial(jax.tree_util.register_dataclass, data_fields=["low", "high"], meta_fields=[])
@dataclass(frozen=True, eq=False)
class Interval:
    """Lower and upper bounds of all elements of a value, one pair per tile.

    Attributes:
        low, high: [*batch, nq or 1, nk or 1], broadcastable against each other, both NumPy or both JAX arrays.
            Booleans: `low` says that all elements are certainly true, `high` that some element may be true.
            Integers: int64, or int32 in JAX without x64.
            Floats: float64 or float32. (-inf, inf) means unknown, which includes NaN.
    """

    low: Any
    high: Any


def unknown(dtype: DTypeLike, rank: int = 2) -> Interval:
    """Return the interval of a value of which only the dtype is known, as NumPy arrays with `rank` axes of length 1."""
    low, high = ends_of(dtype) if is_carried(np, dtype) else (-math.inf, math.inf)
    return Interval(np.full((1,) * rank, low), np.full((1,) * rank, high))


def is_bool(dtype: DTypeLike) -> bool:
    return np.dtype(bool) == dtype


def limits_of(dtype: DTypeLike) -> tuple[int, int]:
    info = jnp.iinfo(dtype)
    return int(info.min), int(info.max)


def ends_of(dtype: DTypeLike) -> tuple[float, float]:
    """Return the least and the greatest value of a dtype."""
    if is_bool(dtype):
        return False, True
    return (-math.inf, math.inf) if jnp.issubdtype(dtype, jnp.floating) else limits_of(dtype)


def carrier_of(xp: Any, dtype: DTypeLike) -> np.dtype:
    """Return the dtype that stores bounds of values of `dtype`."""
    if is_bool(dtype):
        return np.dtype(bool)
    wide = np.dtype(np.float64 if jnp.issubdtype(dtype, jnp.floating) else np.int64)
    return wide if xp is np else jax.dtypes.canonicalize_dtype(wide)


def is_carried(xp: Any, dtype: DTypeLike) -> bool:
    """Return whether the carrier represents every value of a dtype exactly."""
    if is_bool(dtype) or dtype in FLOATS:
        return carrier_of(xp, dtype).itemsize >= np.dtype(dtype).itemsize
    if not jnp.issubdtype(dtype, jnp.integer):
        return False
    (low, high), (least, greatest) = limits_of(dtype), limits_of(carrier_of(xp, dtype))
    return least <= low and high <= greatest


def module_of(intervals: Iterable[Interval]) -> Any:
    """Return NumPy if no interval has JAX arrays, else jax.numpy."""
    ends = [end for interval in intervals for end in (interval.low, interval.high)]
    return np if all(isinstance(end, np.ndarray | np.generic | bool | int | float) for end in ends) else jnp


def lifted(interval: Interval) -> Interval:
    """Return an interval as JAX arrays; floating endpoints that need rounding are rounded outwards."""
    ends = []
    for end, outwards in ((interval.low, -math.inf), (interval.high, math.inf)):
        if isinstance(end, np.ndarray):
            carrier = carrier_of(jnp, end.dtype)
            rounded = end.astype(carrier)
            if jnp.issubdtype(carrier, jnp.floating):
                further = np.nextafter(rounded, carrier.type(outwards))
                rounded = np.where(rounded > end if outwards < 0 else rounded < end, further, rounded)
            end = jnp.asarray(rounded)
        ends.append(end)
    return Interval(*ends)
