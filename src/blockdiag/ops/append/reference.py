"""Appending to a paged cache, written to be read: the executable specification of the operation.

A loop writes one token after the other. A second loop goes over all blocks and computes the mean keys of those that
became complete.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from blockdiag.common.dtypes import accumulation_dtype
from blockdiag.common.rotary import rotate
from blockdiag.ops.append.cache_rounding import put_in_places, round_to_cache, scale_of, widen_from_cache
from blockdiag.ops.append.problem import AppendArrays, AppendProblem


def available() -> str | None:
    """Return None: plain `jax.numpy` always runs."""
    return None


def supports(problem: AppendProblem) -> str | None:
    """Return None: the reference computes every problem."""
    del problem
    return None


def append(problem: AppendProblem, arrays: AppendArrays, *, interpret: bool = False) -> tuple[Array, ...]:
    """Return the arrays that the call changes, `problem.written`."""
    del interpret
    if 0 not in (problem.tokens, problem.batch, problem.max_keys, problem.num_pages):

        def write(row: Array, written: tuple[Array, ...]) -> tuple[Array, ...]:
            return _with_token(problem, arrays._replace(**dict(zip(problem.written, written, strict=True))), row)

        def complete(number: Array, written: tuple[Array, ...]) -> tuple[Array, ...]:
            return _with_block(problem, arrays._replace(**dict(zip(problem.written, written, strict=True))), number)

        written = tuple(getattr(arrays, name) for name in problem.written)
        written = jax.lax.fori_loop(0, problem.tokens, write, written)
        if problem.block_size is not None:
            written = jax.lax.fori_loop(0, problem.batch * problem.max_blocks, complete, written)
        arrays = arrays._replace(**dict(zip(problem.written, written, strict=True)))
    return tuple(getattr(arrays, name) for name in problem.written)


def _lengths(problem: AppendProblem, arrays: AppendArrays, sequence: Array) -> tuple[Array, Array]:
    """Return the number of keys of a sequence, and how many of them are new."""
    most = problem.tokens if problem.query_tokens is None else problem.query_tokens
    num_new = jnp.asarray(most, jnp.int32)
    if arrays.query_lengths is not None:
        num_new = jnp.clip(arrays.query_lengths[sequence], 0, most)
    return jnp.maximum(arrays.kv_lengths[sequence], 0), num_new


def _place(
    problem: AppendProblem, arrays: AppendArrays, sequence: Array, position: Array
) -> tuple[Array, Array, Array]:
    """Return whether a position lies in a page, its page and its offset in the page.

    Page and offset are valid indices even if the position lies in no page.
    """
    is_inside = (position >= 0) & (position < problem.max_keys)
    inside = jnp.clip(position, 0, problem.max_keys - 1)
    page = sequence if arrays.page_table is None else arrays.page_table[sequence, inside // problem.page_size]
    is_inside = is_inside & (page >= 0) & (page < problem.num_pages)
    return is_inside, jnp.clip(page, 0, problem.num_pages - 1), inside % problem.page_size


def _with_token(problem: AppendProblem, arrays: AppendArrays, row: Array) -> tuple[Array, ...]:
    """Return the changed arrays after writing one token."""
    row = jnp.asarray(row, jnp.int32)
    if problem.query_tokens is None:
        sequence = jnp.maximum(arrays.sequences[row], 0)
        token, is_token = row - arrays.first_rows[sequence], arrays.sequences[row] >= 0
    else:
        sequence, token, is_token = row // problem.query_tokens, row % problem.query_tokens, True
    num_keys, num_new = _lengths(problem, arrays, sequence)
    position = num_keys - num_new + token
    is_inside, page, offset = _place(problem, arrays, sequence, position)
    is_written = is_inside & is_token & (token < num_new)

    wide = accumulation_dtype(arrays.key.dtype)
    key = arrays.key[row].astype(wide)
    if problem.rotary is not None:
        table_row = jnp.clip(
            position if arrays.positions is None else arrays.positions[row], 0, problem.rotary.table_rows - 1
        )
        key = rotate(key, arrays.cos[table_row][None], arrays.sin[table_row][None], problem.rotary.interleaved)

    def put(pages: Array, new: Array) -> Array:
        return put_in_places(pages, jnp.where(is_written, page, problem.num_pages), offset, new)

    new = {"key": key} | ({"value": arrays.value[row].astype(wide)} if problem.has_values else {})
    for name, x in new.items():
        pages, scale = getattr(arrays, f"{name}_pages"), getattr(arrays, f"{name}_scale")
        factor = None if scale is None else scale[sequence]
        if getattr(problem, f"{name}_scale") == "token":
            factor = scale_of(x, pages.dtype.name)
            arrays = arrays._replace(**{f"{name}_scale": put(scale, factor)})
        arrays = arrays._replace(**{f"{name}_pages": put(pages, round_to_cache(x, factor, pages.dtype.name))})
    return tuple(getattr(arrays, name) for name in problem.written)


def _with_block(problem: AppendProblem, arrays: AppendArrays, number: Array) -> tuple[Array, ...]:
    """Return the changed arrays after writing the mean key of one block of a sequence, if the block became complete."""
    assert problem.block_size is not None
    sequence, block = jnp.divmod(jnp.asarray(number, jnp.int32), jnp.asarray(problem.max_blocks, jnp.int32))
    num_keys, num_new = _lengths(problem, arrays, sequence)
    position = block * problem.block_size + jnp.arange(problem.block_size, dtype=jnp.int32)
    is_inside, page, offset = _place(problem, arrays, sequence, position)
    last = position[-1]
    is_new = (last < num_keys) & (last >= num_keys - num_new) & jnp.all(is_inside)

    scale = arrays.key_scale
    if scale is not None:
        scale = scale[page, offset] if problem.key_scale == "token" else scale[sequence][None]
    mean = jnp.mean(widen_from_cache(arrays.key_pages[page, offset], scale), axis=0)
    old = arrays.key_centroids[sequence, block]
    centroids = arrays.key_centroids.at[sequence, block].set(jnp.where(is_new, mean.astype(old.dtype), old))
    return tuple(getattr(arrays._replace(key_centroids=centroids), name) for name in problem.written)
