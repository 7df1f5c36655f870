"""Conversion to cache dtypes: division by a scale, saturation at the largest number, rounding to nearest even."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from blockdiag.common.dtype_table import EIGHT_BIT_DTYPES, EIGHT_BIT_FLOATS, EIGHT_BIT_INTEGERS
from blockdiag.common.dtypes import accumulation_dtype

# Lower bound on scales: a scale of 0 for all-zero rows would divide zero by zero.
SMALLEST_SCALE = float(np.finfo(np.float32).tiny)


def largest_of(dtype: str) -> float | None:
    """Return the largest number of an 8-bit dtype, at which rounding saturates; None for a wider dtype."""
    return EIGHT_BIT_DTYPES[dtype].largest if dtype in EIGHT_BIT_DTYPES else None


def scale_of(x: Array, dtype: str) -> Array:
    """Return the scale that maps the largest magnitude of each row [..., D] to the largest number of an 8-bit dtype.

    The result is float32 [...].
    """
    largest = jnp.max(jnp.abs(x), axis=-1, initial=0).astype(jnp.float32)
    return jnp.maximum(largest / EIGHT_BIT_DTYPES[dtype].largest, SMALLEST_SCALE)


def round_to_cache(x: Array, scale: Array | None, dtype: str) -> Array:
    """Divide float32 or float64 [..., D] by a scale [...], and convert it to the dtype of a cache.

    NaN stays NaN, or becomes 0 in a cache of integers.
    """
    if scale is not None:
        x = x / scale[..., None].astype(x.dtype)
    largest = largest_of(dtype)
    x = x if largest is None else jnp.clip(x, -largest, largest)
    if dtype in EIGHT_BIT_INTEGERS:
        x = jnp.where(jnp.isnan(x), 0, jnp.round(x))
    return x.astype(dtype)


def put_in_places(pages: Array, page: Array, offset: Array, rows: Array) -> Array:
    """Write rows into pages [P, page_size, ...] at page numbers and offsets; rows beyond the last page are dropped.

    Pages of 8-bit floats are written as bytes. Otherwise XLA may convert all of them to a wider dtype and back.
    """
    if pages.dtype.name not in EIGHT_BIT_FLOATS:
        return pages.at[page, offset].set(rows, mode="drop")
    pages_bytes, rows_bytes = (jax.lax.bitcast_convert_type(x, jnp.uint8) for x in (pages, rows))
    written = pages_bytes.at[page, offset].set(rows_bytes, mode="drop")
    return jax.lax.bitcast_convert_type(written, pages.dtype)


def widen_from_cache(x: Array, scale: Array | None) -> Array:
    """Return elements [..., D] of a cache times their scale [...], in float32 or float64."""
    x = x.astype(accumulation_dtype(x.dtype))
    return x if scale is None else x * scale[..., None].astype(x.dtype)
