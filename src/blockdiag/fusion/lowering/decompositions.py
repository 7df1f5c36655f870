"""Decompositions of operations that Triton lacks into operations that it has, at float32 accuracy.
`atan` is the polynomial of Cephes (Moshier, 1992), by its minimax coefficients for float32.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

_HALF_PI = math.pi / 2


def _full(like: Any, value: float) -> Any:
    return lax.full_like(like, value)


def _pow(base: Any, exponent: Any) -> Any:
    exponent = lax.convert_element_type(exponent, base.dtype)
    size = lax.exp2(exponent * lax.log(lax.abs(base)) * (1 / math.log(2)))
    is_odd = lax.ne(lax.floor(exponent * 0.5) * 2.0, exponent)
    of_negative = lax.select(is_odd, -size, size)
    of_negative = lax.select(lax.eq(lax.floor(exponent), exponent), of_negative, _full(size, np.nan))
    found = lax.select(lax.lt(base, _full(base, 0)), of_negative, size)
    # NaN ** 0 and 1 ** NaN are 1.
    is_one = lax.eq(exponent, _full(exponent, 0)) | lax.eq(base, _full(base, 1))
    return lax.select(is_one, _full(found, 1), found)


def _round(x: Any, *, rounding_method: lax.RoundingMethod) -> Any:
    below = lax.floor(lax.abs(x))
    rest = lax.abs(x) - below
    goes_up = lax.gt(rest, _full(x, 0.5))
    is_half = lax.eq(rest, _full(x, 0.5))
    if rounding_method == lax.RoundingMethod.TO_NEAREST_EVEN:
        is_half = is_half & lax.ne(lax.floor(below * 0.5) * 2.0, below)
    return lax.sign(x) * (below + lax.convert_element_type(goes_up | is_half, x.dtype))


def _cbrt(x: Any, **_: Any) -> Any:
    return lax.sign(x) * lax.exp2(lax.log(lax.abs(x)) * (1 / (3 * math.log(2))))


def _atan(x: Any, **_: Any) -> Any:
    size = lax.abs(x)
    is_large, is_middle = lax.gt(size, _full(x, 2.414213562373095)), lax.gt(size, _full(x, 0.4142135623730950))
    small = lax.select(is_middle, (size - 1.0) / (size + 1.0), size)
    small = lax.select(is_large, -1.0 / size, small)
    first = lax.select(is_middle, _full(x, math.pi / 4), _full(x, 0))
    first = lax.select(is_large, _full(x, _HALF_PI), first)
    square = small * small
    series = ((8.05374449538e-2 * square - 1.38776856032e-1) * square + 1.99777106478e-1) * square - 3.33329491539e-1
    return lax.sign(x) * (first + (series * square * small + small))


def _atan2(y: Any, x: Any) -> Any:
    found = _atan(y / x)
    half = lax.select(lax.lt(y, _full(y, 0)), _full(y, -math.pi), _full(y, math.pi))
    found = lax.select(lax.lt(x, _full(x, 0)), found + half, found)
    # atan2(0, 0) is defined, but 0 / 0 is NaN.
    on_axis = lax.select(lax.lt(x, _full(x, 0)), half, _full(x, 0))
    on_axis = lax.select(lax.eq(x, x), on_axis, x)
    return lax.select(lax.eq(y, _full(y, 0)), on_axis, found)


def _asin(x: Any, **_: Any) -> Any:
    return _atan2(x, lax.sqrt((1.0 - x) * (1.0 + x)))


def _acos(x: Any, **_: Any) -> Any:
    return 2.0 * _atan2(lax.sqrt(1.0 - x), lax.sqrt(1.0 + x))


def _log1p(x: Any, **_: Any) -> Any:
    # Series of log((1 + s) / (1 - s)), s = x / (2 + x), because 1 + x loses digits of a small x.
    part = x / (2.0 + x)
    square = part * part
    series = 2.0 * part * (1.0 + square * (1 / 3 + square * (1 / 5 + square * (1 / 7 + square * (1 / 9)))))
    return lax.select(lax.lt(lax.abs(x), _full(x, 0.5)), series, lax.log(1.0 + x))


def _expm1(x: Any, **_: Any) -> Any:
    series = _full(x, 1.0)
    for i in range(8, 1, -1):
        series = 1.0 + series * x * (1 / i)
    return lax.select(lax.lt(lax.abs(x), _full(x, 0.5)), series * x, lax.exp(x) - 1.0)


def _sinh(x: Any, **_: Any) -> Any:
    # For a small x, the difference of the exponentials cancels.
    series = x * (1.0 + x * x * (1 / 6 + x * x * (1 / 120)))
    return lax.select(lax.lt(lax.abs(x), _full(x, 0.25)), series, 0.5 * (lax.exp(x) - lax.exp(-x)))


def _asinh(x: Any, **_: Any) -> Any:
    size = lax.abs(x)
    series = x * (1.0 - x * x * (1 / 6 - x * x * (3 / 40 - x * x * (15 / 336))))
    large = lax.sign(x) * lax.log(size + lax.sqrt(size * size + 1.0))
    return lax.select(lax.lt(size, _full(x, 0.25)), series, large)


def _atanh(x: Any, **_: Any) -> Any:
    square = x * x
    series = x * (1.0 + square * (1 / 3 + square * (1 / 5 + square * (1 / 7 + square * (1 / 9)))))
    large = 0.5 * lax.log((1.0 + x) / (1.0 - x))
    return lax.select(lax.lt(lax.abs(x), _full(x, 0.25)), series, large)


SPELLED: Mapping[str, Callable[..., Any]] = {
    "acos": _acos,
    "acosh": lambda x, **_: lax.log(x + lax.sqrt((x - 1.0) * (x + 1.0))),
    "asin": _asin,
    "asinh": _asinh,
    "atan": _atan,
    "atan2": _atan2,
    "atanh": _atanh,
    "cbrt": _cbrt,
    "cosh": lambda x, **_: 0.5 * (lax.exp(x) + lax.exp(-x)),
    "expm1": _expm1,
    "log1p": _log1p,
    "erfc": lambda x: 1.0 - lax.erf(x),
    "is_finite": lambda x: lax.lt(lax.abs(x), _full(x, np.inf)),
    "pow": _pow,
    "round": _round,
    "sinh": _sinh,
    "tan": lambda x, **_: lax.sin(x) / lax.cos(x),
}
"""Decompositions by primitive name; each takes floating tiles and the parameters of the primitive."""


def is_spelled(name: str, dtype: Any) -> bool:
    """Return whether an operation whose first operand has this dtype is decomposed."""
    return name in SPELLED and bool(jnp.issubdtype(dtype, jnp.floating))
