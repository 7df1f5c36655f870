"""Intervals of the values of tiles, and the dtypes in which their ends are kept."""

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
    """Bounds of every element that a value has in a tile.

    Attributes:
        low, high: [*batch, nq or 1, nk or 1], broadcastable against each other, both from NumPy or both from JAX.
            For booleans: whether all elements are certainly true, and whether any is possibly true. For integers: in
            int64, or int32 in JAX without x64. For floats: in float64 or float32; (-inf, inf) is unknown, maybe NaN.
    """

    low: Any
    high: Any


def unknown(dtype: DTypeLike, rank: int = 2) -> Interval:
    """The interval of a value about which only its dtype is known, NumPy arrays of `rank` axes of length 1."""
    low, high = ends_of(dtype) if is_carried(np, dtype) else (-math.inf, math.inf)
    return Interval(np.full((1,) * rank, low), np.full((1,) * rank, high))


def is_bool(dtype: DTypeLike) -> bool:
    return np.dtype(bool) == dtype


def limits_of(dtype: DTypeLike) -> tuple[int, int]:
    info = jnp.iinfo(dtype)
    return int(info.min), int(info.max)


def ends_of(dtype: DTypeLike) -> tuple[float, float]:
    """Between what every element of a dtype lies."""
    if is_bool(dtype):
        return False, True
    return (-math.inf, math.inf) if jnp.issubdtype(dtype, jnp.floating) else limits_of(dtype)


def carrier_of(xp: Any, dtype: DTypeLike) -> np.dtype:
    """The dtype in which bounds of values of `dtype` are kept."""
    if is_bool(dtype):
        return np.dtype(bool)
    wide = np.dtype(np.float64 if jnp.issubdtype(dtype, jnp.floating) else np.int64)
    return wide if xp is np else jax.dtypes.canonicalize_dtype(wide)


def is_carried(xp: Any, dtype: DTypeLike) -> bool:
    """Whether the values of a dtype are kept exactly."""
    if is_bool(dtype) or dtype in FLOATS:
        return carrier_of(xp, dtype).itemsize >= np.dtype(dtype).itemsize
    if not jnp.issubdtype(dtype, jnp.integer):
        return False
    (low, high), (least, greatest) = limits_of(dtype), limits_of(carrier_of(xp, dtype))
    return least <= low and high <= greatest


def module_of(intervals: Iterable[Interval]) -> Any:
    """NumPy if all intervals are of NumPy arrays, else jax.numpy."""
    ends = [end for interval in intervals for end in (interval.low, interval.high)]
    return np if all(isinstance(end, np.ndarray | np.generic | bool | int | float) for end in ends) else jnp


def lifted(interval: Interval) -> Interval:
    """The same interval in arrays of JAX."""
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
