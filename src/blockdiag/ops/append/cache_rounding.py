"""How numbers become elements of a cache: divided by a scale, rounded to nearest even, within the finite range."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from blockdiag.common.dtype_table import EIGHT_BIT_FLOATS
from blockdiag.common.dtypes import accumulation_dtype

# A scale of zeros would divide zero by zero.
SMALLEST_SCALE = float(np.finfo(np.float32).tiny)


def largest_of(dtype: str) -> float | None:
    """The largest finite number of a dtype of eight bits, which rounding saturates at; None of a wider one."""
    return EIGHT_BIT_FLOATS[dtype].largest if dtype in EIGHT_BIT_FLOATS else None


def scale_of(x: Array, dtype: str) -> Array:
    """What makes the largest of [..., D] the largest of a dtype of eight bits: float32 [...]."""
    largest = jnp.max(jnp.abs(x), axis=-1, initial=0).astype(jnp.float32)
    return jnp.maximum(largest / EIGHT_BIT_FLOATS[dtype].largest, SMALLEST_SCALE)


def round_to_cache(x: Array, scale: Array | None, dtype: str) -> Array:
    """Wide [..., D], divided by a scale [...], in the dtype of a cache. NaN stays NaN."""
    if scale is not None:
        x = x / scale[..., None].astype(x.dtype)
    largest = largest_of(dtype)
    return (x if largest is None else jnp.clip(x, -largest, largest)).astype(dtype)


def put_in_places(pages: Array, page: Array, offset: Array, rows: Array) -> Array:
    """Pages [P, page_size, ...] with new rows at pages and offsets; those beyond the last page are dropped.

    Pages of eight bits are written as bytes: as numbers, XLA may convert all of them to wider ones and back.
    """
    if pages.dtype.name not in EIGHT_BIT_FLOATS:
        return pages.at[page, offset].set(rows, mode="drop")
    pages_bytes, rows_bytes = (jax.lax.bitcast_convert_type(x, jnp.uint8) for x in (pages, rows))
    written = pages_bytes.at[page, offset].set(rows_bytes, mode="drop")
    return jax.lax.bitcast_convert_type(written, pages.dtype)


def widen_from_cache(x: Array, scale: Array | None) -> Array:
    """What elements [..., D] of a cache with a scale [...] stand for, in float32 or float64."""
    x = x.astype(accumulation_dtype(x.dtype))
    return x if scale is None else x * scale[..., None].astype(x.dtype)
