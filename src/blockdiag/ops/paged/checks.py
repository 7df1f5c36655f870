"""Checks of the arguments of paged attention, and the static description that every implementation reads.

Each wrong argument raises a ValueError that names it, its value and the remedy. Arrays may be JAX's or torch's. Only
their shapes and dtypes are read, and the values of lengths and page numbers where they are known.
"""

import dataclasses
import math
from typing import Any

import numpy as np

from blockdiag.common import validation
from blockdiag.common.arrays import dtype_name, is_traced, known_values
from blockdiag.common.dtype_table import EIGHT_BIT_DTYPES, EIGHT_BIT_FLOATS, EIGHT_BIT_INTEGERS, FLOATS
from blockdiag.common.sizes import is_symbolic, smaller_bound
from blockdiag.ops.paged.problem import NO_BOUND, WIDE_HEAD, CacheScale, PagedProblem
from blockdiag.ops.paged.splits import choose_splits

SPLIT_TILE = 64
MAX_NUM_SPLITS = 256


def describe_paged_call(
    query: Any,
    key_pages: Any,
    value_pages: Any,
    page_table: Any,
    kv_lengths: Any,
    *,
    query_lengths: Any,
    query_offsets: Any,
    max_query_length: Any,
    scale: Any,
    is_causal: Any,
    local_window_size: Any,
    logits_soft_cap: Any,
    sinks: Any,
    key_scale: Any,
    value_scale: Any,
    query_scale: Any,
    num_splits: Any,
    split_size: Any,
    value_dim: Any = None,
) -> PagedProblem:
    """Check every argument and return the static description of the call.

    Raises:
        ValueError: an argument is wrong; the message names it, its value and the remedy.
    """
    check_paged_operands(query, key_pages, value_pages)
    value_dim = _check_value_dim(value_dim, value_pages, query.shape[-1])
    has_table = page_table is not None
    batch, query_tokens = check_sequences(query, kv_lengths, query_lengths, query_offsets, max_query_length)
    check_cache(key_pages, page_table, kv_lengths, batch)
    query_heads, head_dim = query.shape[-2:]
    num_pages, page_size, key_heads = key_pages.shape[:3]
    max_pages = page_table.shape[1] if has_table else 1
    max_keys = max_pages * page_size
    is_causal = validation.check_is_causal(is_causal)
    # Packed queries may have no bound, but no sequence has more of them than there are rows.
    most_queries = query_tokens if query_offsets is None else smaller_bound(query_tokens, query.shape[0])
    is_causal, window = check_window(local_window_size, is_causal, max_keys, most_queries)
    _check_sinks(sinks, query_heads)
    pool = (num_pages, page_size, key_heads)
    query_kind = check_cache_scale("query_scale", query_scale, batch, key_heads, None)
    key_kind = check_cache_scale("key_scale", key_scale, batch, key_heads, pool)
    if value_pages is None and value_scale is not None:
        raise ValueError(
            "`value_scale` must be None without `value_pages`, got a scale; the values are columns of the keys, so "
            "`key_scale` is a factor on both"
        )
    value_kind = check_cache_scale("value_scale", value_scale, batch, key_heads, pool)
    check_integers_have_a_scale("key_scale", key_scale, key_pages)
    check_integers_have_a_scale("value_scale", value_scale, value_pages)
    if value_pages is None:
        value_kind = key_kind
    split_size = _check_split_size(split_size)
    query_dtype = dtype_name(query.dtype)
    problem = PagedProblem(
        batch=batch,
        query_tokens=query_tokens,
        query_heads=query_heads,
        key_heads=key_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        query_dtype=query_dtype,
        key_dtype=dtype_name(key_pages.dtype),
        value_dtype=dtype_name((key_pages if value_pages is None else value_pages).dtype),
        output_dtype="bfloat16" if query_dtype in EIGHT_BIT_FLOATS else query_dtype,
        num_pages=num_pages,
        page_size=page_size,
        max_pages=max_pages,
        scale=validation.check_scale(scale, head_dim),
        has_page_table=has_table,
        has_value_pages=value_pages is not None,
        has_query_lengths=query_lengths is not None or query_offsets is not None,
        is_causal=is_causal,
        window=window,
        soft_cap=check_soft_cap(logits_soft_cap),
        has_sinks=sinks is not None,
        has_score_scale=query_kind == "head" or key_kind == "head",
        key_scale="token" if key_kind == "token" else "none",
        value_scale=value_kind,
        num_splits=_check_num_splits(num_splits, split_size, max_keys),
        split_size=split_size,
        packed_rows=None if query_offsets is None else query.shape[0],
    )
    return problem if num_splits is not None or split_size is not None else with_chosen_splits(problem)


def with_chosen_splits(problem: PagedProblem) -> PagedProblem:
    """Return the call with `num_splits` and `few_queries` chosen from its shapes."""
    return splits_chosen_again(dataclasses.replace(problem, few_queries=_few_queries(problem)))


def splits_chosen_again(problem: PagedProblem) -> PagedProblem:
    """Return a call, which may be tiled, with `num_splits` chosen from its shapes; a symbolic size counts as 1."""
    tiled, few = problem.tiled, problem.few_queries
    if few == 0:
        return dataclasses.replace(problem, num_splits=1)
    sizes = dict(
        batch=tiled.batch if tiled.num_tiles is None or few is not None else tiled.num_tiles,
        query_tokens=tiled.query_tokens if few is None else few,
        group_size=problem.group_size,
        key_heads=problem.key_heads,
        max_keys=problem.max_keys,
    )
    known = {name: 1 if is_symbolic(size) else size for name, size in sizes.items()}
    chosen = choose_splits(**known, is_wide=max(problem.head_dim, problem.value_dim) > WIDE_HEAD)
    return dataclasses.replace(problem, num_splits=chosen)


# Rows over all heads from which prompts occupy a GPU without splits: 64 tiles.
FEWEST_PROMPT_ROWS = 8192
# Queries from which the sequences of a batch are prompts.
FEWEST_PROMPT_QUERIES = 32


def _few_queries(problem: PagedProblem) -> int | None:
    """Return `few_queries` of a call whose splits are chosen.

    None if prompts are computed like other sequences: there are too few rows of them, a batch has no prompts or another
    dtype, or a size is symbolic.
    """
    is_batch = problem.packed_rows is None
    rows = problem.batch * problem.query_tokens if problem.packed_rows is None else problem.packed_rows
    sizes = (problem.batch, problem.query_tokens, rows, problem.max_pages, problem.query_heads, problem.key_heads)
    if any(is_symbolic(size) for size in sizes) or problem.is_empty:
        return None
    has_prompts = problem.may_have_prompts
    if has_prompts and rows * problem.query_heads < FEWEST_PROMPT_ROWS:
        return None
    if not is_batch:
        return problem.most_few_queries
    # All sequences of a batch are taken to be prompts. Float32, and eight-bit caches beside wider queries, have no
    # kernel for them.
    dtypes = {problem.query_dtype, problem.key_dtype, problem.value_dtype}
    has_kernel = dtypes <= {"bfloat16", "float16"} or (len(dtypes) == 1 and dtypes <= set(EIGHT_BIT_FLOATS))
    return 0 if has_prompts and has_kernel and problem.query_tokens >= FEWEST_PROMPT_QUERIES else None


def check_paged_operands(query: Any, key_pages: Any, value_pages: Any) -> None:
    """Check shapes and dtypes of query [B, T, N, H] or [rows, N, H] against pages [P, page_size, K, H] and [.., V]."""
    if query.ndim not in (3, 4):
        raise ValueError(
            f"`query` must have shape [B, T, N, H], or [rows, N, H] with `query_offsets`, got {tuple(query.shape)}; "
            "reshape more batch axes into one, or map over them with jax.vmap"
        )
    num_heads, head_dim = query.shape[-2:]
    if num_heads == 0 or head_dim == 0:
        raise ValueError(f"`query` must have at least one head of at least one element, got shape {tuple(query.shape)}")
    if key_pages.ndim != 4 or key_pages.shape[-1] != head_dim:
        raise ValueError(
            f"`key_pages` must have shape [P, page_size, K, {head_dim}] to match `query` of shape "
            f"{tuple(query.shape)}, got {tuple(key_pages.shape)}; a contiguous cache is [B, S, K, H]"
        )
    if value_pages is not None and (
        value_pages.ndim != 4 or tuple(value_pages.shape[:3]) != tuple(key_pages.shape[:3]) or not value_pages.shape[3]
    ):
        expected = ", ".join(map(str, key_pages.shape[:3]))
        raise ValueError(
            f"`value_pages` must have shape ({expected}, V) to match `key_pages` of shape {tuple(key_pages.shape)}, "
            f"got {tuple(value_pages.shape)}; one page number leads to keys and values"
        )
    validation.check_heads(num_heads, key_pages.shape[2])
    dtype = dtype_name(query.dtype)
    if dtype not in (*FLOATS, *EIGHT_BIT_FLOATS):
        raise ValueError(
            f"`query` must have one of the dtypes {[*FLOATS, *EIGHT_BIT_FLOATS]}, got {query.dtype}; cast it first"
        )
    allowed = tuple(EIGHT_BIT_FLOATS) if dtype in EIGHT_BIT_FLOATS else (dtype, *EIGHT_BIT_DTYPES)
    for name, pages in (("key_pages", key_pages), ("value_pages", value_pages)):
        if pages is not None and dtype_name(pages.dtype) not in allowed:
            raise ValueError(
                f"`{name}` must have one of the dtypes {list(allowed)} beside a query of {query.dtype}, got "
                f"{pages.dtype}; cast the query, which is the smaller array"
            )


def check_query_dtype(query_dtype: Any, query: Any, key_pages: Any, value_pages: Any) -> str:
    """Return the name of the eight-bit dtype that queries are rounded to."""
    try:
        name = query_dtype if isinstance(query_dtype, str) else dtype_name(query_dtype)
    except TypeError:  # not a dtype
        name = None
    if name not in EIGHT_BIT_FLOATS:
        raise ValueError(
            f"`query_dtype` must be one of {list(EIGHT_BIT_FLOATS)} or None, got {query_dtype!r}; cast wider queries "
            "yourself"
        )
    if dtype_name(query.dtype) not in (*FLOATS, name):
        raise ValueError(f"`query_dtype` is {name}, which a query of {query.dtype} cannot be rounded to; leave it out")
    for argument, pages in (("key_pages", key_pages), ("value_pages", value_pages)):
        if pages is not None and dtype_name(pages.dtype) not in EIGHT_BIT_FLOATS:
            raise ValueError(
                f"`query_dtype` needs `{argument}` of eight-bit floats, {list(EIGHT_BIT_FLOATS)}, got {pages.dtype}; "
                "leave `query_dtype` out"
            )
    return name


def _check_value_dim(value_dim: Any, value_pages: Any, head_dim: int) -> int:
    """Return V, from the pages of values or from `value_dim`."""
    if value_pages is not None:
        if value_dim is not None:
            raise ValueError(
                f"`value_dim` and `value_pages` exclude each other, got {value_dim!r} and values of shape "
                f"{tuple(value_pages.shape)}; pass value_pages=None if the values are the first columns of the keys"
            )
        return value_pages.shape[-1]
    size = None if isinstance(value_dim, bool) or is_traced(value_dim) else validation.as_index(value_dim)
    if size is None or not 1 <= size <= head_dim:
        raise ValueError(
            f"`value_dim` must be an integer of 1..{head_dim}, known when tracing, without `value_pages`, got "
            f"{value_dim!r}; it is the number of the keys' first columns that are the values"
        )
    return size


def check_sequences(
    query: Any, kv_lengths: Any, query_lengths: Any, query_offsets: Any, max_query_length: Any
) -> tuple[int, int]:
    """Check lengths and offsets, and return the number of sequences and the maximum number of queries of each."""
    validation.check_int32("kv_lengths", kv_lengths, "1")
    if query_offsets is None:
        if query.ndim == 3:
            raise ValueError(
                f"`query` of shape {tuple(query.shape)} needs `query_offsets`, which say where each sequence begins; "
                "one query for each sequence is query[:, None], of shape [B, 1, N, H]"
            )
        if max_query_length is not None:
            raise ValueError(
                f"`max_query_length` is for packed queries, with `query_offsets`, got {max_query_length!r}; "
                "a query [B, T, N, H] has T queries of each sequence at most"
            )
        batch, tokens = query.shape[:2]
    else:
        tokens = _check_packed(query, query_lengths, query_offsets, max_query_length)
        batch = query_offsets.shape[0] - 1
    if kv_lengths.shape[0] != batch:
        raise ValueError(
            f"`kv_lengths` must have shape ({batch},), one length for each sequence, got {tuple(kv_lengths.shape)}"
        )
    if query_lengths is not None:
        validation.check_int32("query_lengths", query_lengths, "1")
        if query_lengths.shape[0] != batch:
            raise ValueError(
                f"`query_lengths` must have shape ({batch},), one for each sequence, got {tuple(query_lengths.shape)}"
            )
        _check_range("query_lengths", query_lengths, tokens, f"the {tokens} queries that `query` has of each sequence")
    return batch, tokens


def _check_packed(query: Any, query_lengths: Any, query_offsets: Any, max_query_length: Any) -> int:
    """Check packed queries, and return the maximum number of queries of a sequence."""
    if query.ndim != 3:
        raise ValueError(
            f"`query_offsets` describes packed queries [rows, N, H], got a query of shape {tuple(query.shape)}; "
            "pass `query_lengths`, or reshape the batch into the rows"
        )
    if query_lengths is not None:
        raise ValueError(
            "`query_lengths` and `query_offsets` exclude each other, got both; the offsets say how long sequences are"
        )
    longest = validation.check_sequence_offsets(query.shape[0], query_offsets, "query_offsets")
    tokens = NO_BOUND
    if max_query_length is not None:
        tokens = None if isinstance(max_query_length, bool) or is_traced(max_query_length) else max_query_length
        tokens = validation.as_index(tokens)
        if tokens is None or tokens < 0:
            raise ValueError(
                f"`max_query_length` must be an integer from 0, known when tracing, got {max_query_length!r}; "
                "it is the number of queries that the longest sequence may have"
            )
    if longest is not None and longest > tokens:
        raise ValueError(
            f"`query_offsets` describes a sequence of {longest} queries, more than max_query_length={tokens}; "
            f"pass max_query_length={longest}"
        )
    return tokens


def check_cache(key_pages: Any, page_table: Any, kv_lengths: Any, batch: int) -> None:
    """Check the page table and lengths against the pages, and their values where they are known."""
    num_pages, page_size = key_pages.shape[:2]
    if page_table is None:
        if num_pages != batch:
            raise ValueError(
                f"`key_pages` without a `page_table` must have shape [B, S, K, H] with the {batch} sequences of "
                f"`kv_lengths`, got {tuple(key_pages.shape)}; pass the page table"
            )
        _check_range("kv_lengths", kv_lengths, page_size, f"the {page_size} keys that `key_pages` has room for")
        return
    validation.check_int32("page_table", page_table, "2")
    if page_table.shape[0] != batch:
        raise ValueError(
            f"`page_table` must have shape ({batch}, max_pages), one row for each sequence of `kv_lengths`, got "
            f"{tuple(page_table.shape)}"
        )
    if page_size == 0:
        raise ValueError(f"`key_pages` must have pages of at least one token, got shape {tuple(key_pages.shape)}")
    max_keys = page_table.shape[1] * page_size
    _check_range("kv_lengths", kv_lengths, max_keys, f"the {max_keys} keys that `page_table` has room for")
    lengths, table = known_values(kv_lengths), known_values(page_table)
    if lengths is None or table is None:
        return
    is_used = np.arange(page_table.shape[1])[None, :] < -(-lengths // page_size)[:, None]
    is_wrong = is_used & ((table < 0) | (table >= num_pages))
    if is_wrong.any():
        row, column = (int(x) for x in np.argwhere(is_wrong)[0])
        raise ValueError(
            f"`page_table` must hold page numbers in [0, {num_pages}) for the keys that `kv_lengths` counts, got "
            f"{table[row, column]} at [{row}, {column}]; entries beyond a sequence's pages may hold anything"
        )


def _check_range(name: str, lengths: Any, largest: int, meaning: str) -> None:
    values = known_values(lengths)
    if values is not None and values.size and not (values.min() >= 0 and values.max() <= largest):
        bad = values.min() if values.min() < 0 else values.max()
        raise ValueError(f"`{name}` must lie in [0, {largest}], {meaning}, got {bad}; a sequence without any has 0")


def check_window(
    local_window_size: Any, is_causal: bool, max_keys: int, query_tokens: int
) -> tuple[bool, tuple[int | None, int | None]]:
    """Return whether the call is causal, and the bounds on keys before and after a query; None where unbounded."""
    if local_window_size is None:
        return is_causal, (None, None)
    sizes = local_window_size if isinstance(local_window_size, (tuple, list)) else (local_window_size,) * 2
    numbers = [None if isinstance(size, bool) or is_traced(size) else validation.as_index(size) for size in sizes]
    is_valid = [
        size is None or (number is not None and number >= 0) for size, number in zip(sizes, numbers, strict=True)
    ]
    if len(sizes) != 2 or not all(is_valid):
        raise ValueError(
            f"`local_window_size` must be an integer from 0, or (left, right) of those or None for no bound, known "
            f"when tracing, got {local_window_size!r}"
        )
    left, right = numbers
    # A query's position may be before the first key, if there are more queries than keys.
    left = None if left is not None and left >= max_keys else left
    right = None if is_causal or (right is not None and right >= max_keys + query_tokens) else right
    return (True, (left, None)) if right == 0 else (is_causal, (left, right))


def check_soft_cap(logits_soft_cap: Any) -> float | None:
    """Return `logits_soft_cap` as a positive finite number, or None."""
    if logits_soft_cap is None:
        return None
    number = validation.as_number(logits_soft_cap)
    if number is None or not 0 < number < math.inf:
        raise ValueError(
            f"`logits_soft_cap` must be a positive number, known when tracing, got {logits_soft_cap!r}; "
            "pass None for none"
        )
    return number


def _check_sinks(sinks: Any, query_heads: int) -> None:
    if sinks is None:
        return
    if not hasattr(sinks, "dtype") or dtype_name(sinks.dtype) not in FLOATS:
        got = sinks.dtype if hasattr(sinks, "dtype") else type(sinks)
        raise ValueError(f"`sinks` must be an array of floats, got {got}; float32 is what it is computed in")
    if tuple(sinks.shape) != (query_heads,):
        raise ValueError(
            f"`sinks` must have shape ({query_heads},), one logit for each query head, got {tuple(sinks.shape)}"
        )


def check_cache_scale(
    name: str, scale: Any, batch: int, key_heads: int, pool: tuple[int, int, int] | None
) -> CacheScale:
    """Return the form of a scale: "head" for a number, [] or [B, K], "token" for pages; `pool` is None for a query."""
    if scale is None:
        return "none"
    if isinstance(scale, float) or type(scale) is int:
        return "head"
    if not hasattr(scale, "dtype") or dtype_name(scale.dtype) != "float32":
        got = scale.dtype if hasattr(scale, "dtype") else type(scale)
        raise ValueError(f"`{name}` must be a number or a float32 array, got {got}; convert it to float32")
    shape = tuple(scale.shape)
    if shape in ((), (batch, key_heads)):
        return "head"
    if pool is not None and shape == tuple(pool):
        return "token"
    by_token = "" if pool is None else f"or {tuple(pool)}, one for each token of the pages and key head; "
    raise ValueError(
        f"`{name}` must have shape (), ({batch}, {key_heads}), one for each sequence and key head, "
        f"{by_token}got {shape}"
    )


def check_integers_have_a_scale(name: str, scale: Any, pages: Any) -> None:
    """Check that a cache of integers has a scale, whose multiples they are; `pages` may be None."""
    if scale is None and pages is not None and dtype_name(pages.dtype) in EIGHT_BIT_INTEGERS:
        cache = name.replace("scale", "pages")
        raise ValueError(
            f"`{name}` must be given for `{cache}` of {pages.dtype}, which are multiples of it, got None; pass pages "
            "of scales, or 1.0 if the integers themselves are meant"
        )


def _check_num_splits(num_splits: Any, split_size: int | None, max_keys: int) -> int:
    if split_size is not None:
        if num_splits is not None:
            raise ValueError(
                f"`num_splits` and `split_size` exclude each other, got {num_splits!r} and {split_size}; "
                "a fixed size makes as many splits as the cache has room for"
            )
        return max(1, -(-max_keys // split_size))
    if num_splits is None:
        return 1
    count = None if isinstance(num_splits, bool) or is_traced(num_splits) else validation.as_index(num_splits)
    if count is None or not 1 <= count <= MAX_NUM_SPLITS:
        raise ValueError(
            f"`num_splits` must be an integer of 1..{MAX_NUM_SPLITS}, known when tracing, got {num_splits!r}; "
            "leave it out to have it chosen"
        )
    # Splits consist of whole tiles, so with more splits than tiles some would have no keys.
    return max(1, min(count, -(-max_keys // SPLIT_TILE)))


def _check_split_size(split_size: Any) -> int | None:
    if split_size is None:
        return None
    size = None if isinstance(split_size, bool) or is_traced(split_size) else validation.as_index(split_size)
    if size is None or size < SPLIT_TILE or size % SPLIT_TILE:
        raise ValueError(
            f"`split_size` must be a positive multiple of {SPLIT_TILE}, known when tracing, got {split_size!r}; "
            "2048 suits long caches"
        )
    return size
