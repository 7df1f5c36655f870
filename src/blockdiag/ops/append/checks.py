"""Checks of the arguments of appending to a paged cache, and the static description that implementations read.

Each wrong argument raises a ValueError that names it, its value and the remedy. Arrays may be JAX's or torch's. Only
their shapes and dtypes are read, and the values of lengths and page numbers where they are known.
"""

import math
from typing import Any

import numpy as np

from blockdiag.common import validation
from blockdiag.common.arrays import dtype_name, is_traced, known_values
from blockdiag.common.dtype_table import EIGHT_BIT_DTYPES, EIGHT_BIT_FLOATS, FLOATS
from blockdiag.common.rotary_problem import RotaryProblem
from blockdiag.common.sizes import is_symbolic
from blockdiag.ops.append.problem import AppendProblem
from blockdiag.ops.paged.checks import check_cache, check_cache_scale, check_integers_have_a_scale
from blockdiag.ops.paged.problem import CacheScale


def describe_append_call(
    key: Any,
    value: Any,
    key_pages: Any,
    value_pages: Any,
    page_table: Any,
    kv_lengths: Any,
    *,
    query_lengths: Any,
    query_offsets: Any,
    rotary: Any,
    key_scale: Any,
    value_scale: Any,
    key_centroids: Any,
    block_size: Any,
) -> AppendProblem:
    """Check every argument and return the static description of the call.

    Raises:
        ValueError: an argument is wrong; the message names it, its value and the remedy.
    """
    has_values = value is not None or value_pages is not None
    _check_operands(key, value, key_pages, value_pages, value_scale)
    validation.check_int32("kv_lengths", kv_lengths, "1")
    batch = kv_lengths.shape[0]
    _check_sequences(key, batch, query_lengths, query_offsets)
    check_cache(key_pages, page_table, kv_lengths, batch)
    _check_positions(key, kv_lengths, query_lengths, query_offsets)
    num_pages, page_size, key_heads = (size if is_symbolic(size) else int(size) for size in key_pages.shape[:3])
    block_size = _check_centroids(key_centroids, block_size, (batch, key_heads, key.shape[-1]))
    return AppendProblem(
        tokens=math.prod(key.shape[:-2]),
        batch=batch,
        query_tokens=key.shape[1] if query_offsets is None else None,
        key_heads=key_heads,
        head_dim=key.shape[-1],
        value_dim=value.shape[-1] if has_values else 0,
        dtype=dtype_name(key.dtype),
        key_dtype=dtype_name(key_pages.dtype),
        value_dtype=dtype_name((value_pages if has_values else key_pages).dtype),
        num_pages=num_pages,
        page_size=page_size,
        max_pages=1 if page_table is None else page_table.shape[1],
        has_values=has_values,
        has_page_table=page_table is not None,
        has_query_lengths=query_lengths is not None or query_offsets is not None,
        rotary=_describe_rotary(rotary, key, kv_lengths),
        key_scale=_check_scale("key_scale", key_scale, batch, key_pages),
        value_scale=_check_scale("value_scale", value_scale, batch, value_pages) if has_values else "none",
        block_size=block_size,
        max_blocks=0 if block_size is None else key_centroids.shape[1],
    )


def _check_operands(key: Any, value: Any, key_pages: Any, value_pages: Any, value_scale: Any) -> None:
    """Check shapes and dtypes of new keys and values, and of the pages that they are written to."""
    if key.ndim not in (3, 4) or 0 in key.shape[-2:]:
        raise ValueError(
            f"`key` must have shape [B, T, K, H], or [rows, K, H] with `query_offsets`, got {tuple(key.shape)}; "
            "reshape more batch axes into one, or map over them with jax.vmap"
        )
    has_values = value is not None
    if has_values != (value_pages is not None):
        raise ValueError(
            "`value` and `value_pages` belong together, got only one of them; a latent cache, whose values are columns "
            "of its keys, has neither"
        )
    if not has_values and value_scale is not None:
        raise ValueError(
            f"`value_scale` must be None without values, got {value_scale!r}; `key_scale` is a factor of the whole "
            "rows of a latent cache"
        )
    if has_values and (value.ndim != key.ndim or value.shape[:-1] != key.shape[:-1] or value.shape[-1] == 0):
        expected = ", ".join(map(str, key.shape[:-1]))
        raise ValueError(
            f"`value` must have shape ({expected}, V) to match `key` of shape {tuple(key.shape)}, got "
            f"{tuple(value.shape)}; each new token has a key and a value of every head"
        )
    dtype = dtype_name(key.dtype)
    if dtype not in (*FLOATS, *EIGHT_BIT_FLOATS):
        raise ValueError(
            f"`key` must have one of the dtypes {[*FLOATS, *EIGHT_BIT_FLOATS]}, got {key.dtype}; cast it first"
        )
    if has_values and value.dtype != key.dtype:
        raise ValueError(f"`value` must have the dtype of `key`, {key.dtype}, got {value.dtype}; cast one of them")
    allowed = tuple(EIGHT_BIT_FLOATS) if dtype in EIGHT_BIT_FLOATS else (dtype, *EIGHT_BIT_DTYPES)
    given = {"key_pages": (key_pages, key)} | ({"value_pages": (value_pages, value)} if has_values else {})
    for name, (pages, array) in given.items():
        operand = name.removesuffix("_pages")
        if pages.ndim != 4 or tuple(pages.shape[2:]) != tuple(array.shape[-2:]):
            expected = ", ".join(map(str, array.shape[-2:]))
            raise ValueError(
                f"`{name}` must have shape [P, page_size, {expected}] to match `{operand}` of shape "
                f"{tuple(array.shape)}, got {tuple(pages.shape)}; a contiguous cache is [B, S, {expected}]"
            )
        if dtype_name(pages.dtype) not in allowed:
            raise ValueError(
                f"`{name}` must have one of the dtypes {list(allowed)} beside a key of {key.dtype}, got "
                f"{pages.dtype}; cast `key` and `value`, which are smaller"
            )
    if has_values and tuple(value_pages.shape[:2]) != tuple(key_pages.shape[:2]):
        raise ValueError(
            f"`value_pages` must have the pages of `key_pages`, {tuple(key_pages.shape[:2])}, got "
            f"{tuple(value_pages.shape[:2])} in shape {tuple(value_pages.shape)}; one page number leads to both"
        )


def _check_sequences(key: Any, batch: int, query_lengths: Any, query_offsets: Any) -> None:
    """Check how the rows of `key` are divided among `batch` sequences."""
    if query_offsets is None:
        if key.ndim == 3:
            raise ValueError(
                f"`key` of shape {tuple(key.shape)} needs `query_offsets`, which say where each sequence begins; "
                "one token for each sequence is key[:, None], of shape [B, 1, K, H]"
            )
        rows = key.shape[0]
    else:
        if key.ndim != 3:
            raise ValueError(
                f"`query_offsets` describes packed keys [rows, K, H], got a key of shape {tuple(key.shape)}; pass "
                "`query_lengths`, or reshape the batch into the rows"
            )
        if query_lengths is not None:
            raise ValueError(
                "`query_lengths` and `query_offsets` exclude each other, got both; the offsets say how many tokens "
                "sequences have"
            )
        validation.check_sequence_offsets(key.shape[0], query_offsets, "query_offsets", "key")
        rows = query_offsets.shape[0] - 1
    if rows != batch:
        raise ValueError(f"`kv_lengths` must have shape ({rows},), one length for each sequence, got ({batch},)")
    if query_lengths is None:
        return
    validation.check_int32("query_lengths", query_lengths, "1")
    if query_lengths.shape[0] != batch:
        raise ValueError(
            f"`query_lengths` must have shape ({batch},), one for each sequence, got {tuple(query_lengths.shape)}"
        )
    lengths = known_values(query_lengths)
    if lengths is not None and lengths.size and not (lengths.min() >= 0 and lengths.max() <= key.shape[1]):
        bad = lengths.min() if lengths.min() < 0 else lengths.max()
        raise ValueError(
            f"`query_lengths` must lie in [0, {key.shape[1]}], the tokens that `key` has of each sequence, got {bad}"
        )


def _check_positions(key: Any, kv_lengths: Any, query_lengths: Any, query_offsets: Any) -> None:
    """Check that no new token is before the first position of its sequence, where lengths are known."""
    lengths = known_values(kv_lengths)
    given = query_lengths if query_offsets is None else query_offsets
    new = None if given is None else known_values(given)
    if given is None:
        new = np.full_like(lengths, key.shape[1]) if lengths is not None else None
    elif query_offsets is not None and new is not None:
        new = np.diff(new)
    if lengths is None or new is None or not (lengths < new).any():
        return
    first = int(np.argmax(lengths < new))
    raise ValueError(
        f"`kv_lengths` counts the new tokens too, got {lengths[first]} for sequence {first} with {new[first]} new "
        "ones; add them to the length, or pass `query_lengths` with 0 for sequences that get none"
    )


def _describe_rotary(rotary: Any, key: Any, kv_lengths: Any) -> RotaryProblem | None:
    if rotary is None:
        return None
    lengths = known_values(kv_lengths)
    longest = None if lengths is None else int(lengths.max(initial=0))
    validation.check_rotary(rotary, key.shape[:-2], key.shape[-1], longest)
    if "value" in rotary.apply_to:
        raise ValueError(
            f"`rotary` must not be applied to values here, got apply_to={rotary.apply_to!r}; rotate `value` before, "
            "with blockdiag.apply_rotary"
        )
    if "key" not in rotary.apply_to:
        return None
    return RotaryProblem(
        interleaved=rotary.interleaved,
        query=False,
        key=True,
        value=False,
        table_rows=math.prod(rotary.cos.shape[:-1]),
        table_dtype=dtype_name(rotary.cos.dtype),
        positions="explicit" if rotary.per_token or rotary.positions is not None else "sequence",
    )


def _check_scale(name: str, scale: Any, batch: int, pages: Any) -> CacheScale:
    """Return the form of a scale; scales in pages are computed, and only 8-bit pages may have them."""
    kind = check_cache_scale(name, scale, batch, pages.shape[2], tuple(pages.shape[:3]))
    check_integers_have_a_scale(name, scale, pages)
    if kind == "token" and dtype_name(pages.dtype) not in EIGHT_BIT_DTYPES:
        cache = name.replace("scale", "pages")
        raise ValueError(
            f"`{name}` as pages of scales needs `{cache}` of {list(EIGHT_BIT_DTYPES)}, got {pages.dtype}; wider pages "
            "need no scale"
        )
    return kind


def _check_centroids(key_centroids: Any, block_size: Any, sizes: tuple[int, int, int]) -> int | None:
    """Check `key_centroids` [B, max_blocks, K, H], and return their block size; None without them."""
    if key_centroids is None and block_size is None:
        return None
    if key_centroids is None or block_size is None:
        raise ValueError(
            f"`key_centroids` and `block_size` belong together, got block_size={block_size!r} "
            f"{'without' if key_centroids is None else 'with'} centroids; pass both or none"
        )
    batch, key_heads, head_dim = sizes
    shape = tuple(key_centroids.shape)
    if len(shape) != 4 or (shape[0], *shape[2:]) != sizes or dtype_name(key_centroids.dtype) != "float32":
        raise ValueError(
            f"`key_centroids` must be float32 of shape ({batch}, max_blocks, {key_heads}, {head_dim}), got "
            f"{key_centroids.dtype}{list(shape)}; there is one mean key for each sequence, block and head"
        )
    size = None if isinstance(block_size, bool) or is_traced(block_size) else validation.as_index(block_size)
    if size is None or size < 1:
        raise ValueError(f"`block_size` must be a positive integer, known when tracing, got {block_size!r}")
    return size
