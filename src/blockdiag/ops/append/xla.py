"""Appending to a paged cache in plain `jax.numpy`: one scatter, which XLA runs in place if the pages are donated."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from blockdiag.common.dtypes import accumulation_dtype
from blockdiag.common.rotary import rotate
from blockdiag.ops.append.cache_rounding import put_in_places, round_to_cache, scale_of, widen_from_cache
from blockdiag.ops.append.places import Places, find_pages, find_places
from blockdiag.ops.append.problem import AppendArrays, AppendProblem
from blockdiag.ops.paged.problem import CacheScale


def available() -> str | None:
    """Return None: plain `jax.numpy` always runs."""
    return None


def supports(problem: AppendProblem) -> str | None:
    """Return None: this implementation computes every problem."""
    del problem
    return None


def append(problem: AppendProblem, arrays: AppendArrays, *, interpret: bool = False) -> tuple[Array, ...]:
    """Return the arrays that the call changes, `problem.written`."""
    del interpret
    places = find_places(problem, arrays)
    key = _rotated_key(problem, arrays, places)
    key_pages, key_scale = _store(key, arrays.key_pages, arrays.key_scale, problem.key_scale, places)
    arrays = arrays._replace(key_pages=key_pages, key_scale=key_scale)
    if problem.has_values:
        value = arrays.value.astype(accumulation_dtype(arrays.value.dtype))
        value_pages, value_scale = _store(value, arrays.value_pages, arrays.value_scale, problem.value_scale, places)
        arrays = arrays._replace(value_pages=value_pages, value_scale=value_scale)
    if problem.block_size is not None:
        arrays = arrays._replace(key_centroids=_with_completed_blocks(problem, problem.block_size, arrays, places))
    return tuple(getattr(arrays, name) for name in problem.written)


def _rotated_key(problem: AppendProblem, arrays: AppendArrays, places: Places) -> Array:
    """Return the key [tokens, K, H] in float32 or float64, rotated if the call has a rotary embedding."""
    if problem.rotary is None:
        return arrays.key.astype(accumulation_dtype(arrays.key.dtype))
    row = places.position if arrays.positions is None else arrays.positions
    row = jnp.clip(row, 0, problem.rotary.table_rows - 1)
    cos, sin = (table[row][:, None, :] for table in (arrays.cos, arrays.sin))
    return rotate(arrays.key, cos, sin, problem.rotary.interleaved)


def _store(x: Array, pages: Array, scale: Array | None, kind: CacheScale, places: Places) -> tuple[Array, Array | None]:
    """Return pages and scale after writing `x`, float32 or float64 [tokens, K, D], to its places."""
    name = pages.dtype.name
    by_row = None
    if kind == "token":
        by_row = scale_of(x, name)
    elif scale is not None:
        by_row = scale[places.sequence]
    rows = round_to_cache(x, by_row, name)
    pages = put_in_places(pages, places.page, places.offset, rows)
    if kind == "token" and scale is not None and by_row is not None:
        scale = put_in_places(scale, places.page, places.offset, by_row)
    return pages, scale


def _with_completed_blocks(problem: AppendProblem, block_size: int, arrays: AppendArrays, places: Places) -> Array:
    """Return the centroids, updated from the keys in the pages for the blocks whose last key is new."""
    is_last = places.is_written & (places.position % block_size == block_size - 1)
    is_last = is_last & (places.position // block_size < problem.max_blocks)
    rows = jnp.nonzero(is_last, size=problem.tokens, fill_value=0)[0]

    def complete(step: Array, centroids: Array) -> Array:
        sequence, last = places.sequence[rows[step]], places.position[rows[step]]
        position = last - (block_size - 1) + jnp.arange(block_size, dtype=jnp.int32)
        page, offset = find_pages(problem, arrays, sequence, position), position % problem.page_size
        is_sound = jnp.all((page >= 0) & (page < problem.num_pages))
        page = jnp.clip(page, 0, problem.num_pages - 1)
        scale = arrays.key_scale
        if scale is not None:
            scale = scale[page, offset] if problem.key_scale == "token" else scale[sequence][None]
        mean = jnp.mean(widen_from_cache(arrays.key_pages[page, offset], scale), axis=0)
        # A block that lies partly outside the pages is skipped.
        number = jnp.where(is_sound, last // block_size, problem.max_blocks)
        return centroids.at[sequence, number].set(mean.astype(centroids.dtype), mode="drop")

    return jax.lax.fori_loop(0, jnp.sum(is_last, dtype=jnp.int32), complete, arrays.key_centroids)
