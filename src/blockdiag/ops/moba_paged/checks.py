"""Checks of the arguments of MoBA over a paged cache, and the static description that implementations read.

Each wrong argument raises a ValueError that names it, its value and the remedy. Arrays may be JAX's or torch's. Only
their shapes and dtypes are read, and the values of lengths and page numbers where they are known.
"""

from typing import Any

from blockdiag.common.arrays import dtype_name
from blockdiag.ops.moba.checks import check_moba_block_size, check_top_k, count_sequence_blocks, count_slots
from blockdiag.ops.moba_paged.problem import MoBAPagedProblem
from blockdiag.ops.paged.checks import describe_paged_call


def describe_moba_paged_call(
    query: Any,
    key_pages: Any,
    value_pages: Any,
    page_table: Any,
    kv_lengths: Any,
    key_centroids: Any,
    *,
    block_size: Any,
    top_k: Any,
    query_lengths: Any,
    scale: Any,
    key_scale: Any,
    value_scale: Any,
    query_scale: Any,
) -> MoBAPagedProblem:
    """Check every argument and return the static description of the call.

    Raises:
        ValueError: an argument is wrong; the message names it, its value and the remedy.
    """
    if query.ndim != 4:
        raise ValueError(
            f"`query` must have shape [B, T, N, H], got {tuple(query.shape)}; one query for each sequence is "
            "query[:, None]"
        )
    paged = describe_paged_call(
        query,
        key_pages,
        value_pages,
        page_table,
        kv_lengths,
        query_lengths=query_lengths,
        query_offsets=None,
        max_query_length=None,
        scale=scale,
        is_causal=True,
        local_window_size=None,
        logits_soft_cap=None,
        sinks=None,
        key_scale=key_scale,
        value_scale=value_scale,
        query_scale=query_scale,
        num_splits=1,
        split_size=None,
    )
    block_size, top_k = check_moba_block_size(block_size), check_top_k(top_k)
    problem = MoBAPagedProblem(
        paged=paged,
        block_size=block_size,
        max_blocks=_check_centroids(key_centroids, (paged.batch, paged.key_heads, paged.head_dim)),
        slots=count_slots(top_k, count_sequence_blocks(paged.max_keys, block_size), is_causal=True),
    )
    if problem.max_blocks < problem.num_candidates:
        raise ValueError(
            f"`key_centroids` must have rows for the {problem.num_candidates} blocks of {block_size} keys that may "
            f"precede another one of the {paged.max_keys} keys that the cache has room for, got "
            f"{problem.max_blocks} in shape {tuple(key_centroids.shape)}; rows of blocks that are not complete may "
            "hold anything"
        )
    return problem


def _check_centroids(key_centroids: Any, sizes: tuple[int, int, int]) -> int:
    """Check `key_centroids`, and return the number of blocks per sequence that they have."""
    batch, key_heads, head_dim = sizes
    if not hasattr(key_centroids, "dtype") or dtype_name(key_centroids.dtype) != "float32":
        got = key_centroids.dtype if hasattr(key_centroids, "dtype") else type(key_centroids)
        raise ValueError(f"`key_centroids` must be a float32 array, got {got}; means of 16 bits choose other blocks")
    shape = tuple(key_centroids.shape)
    if len(shape) != 4 or (shape[0], *shape[2:]) != sizes:
        raise ValueError(
            f"`key_centroids` must have shape ({batch}, max_blocks, {key_heads}, {head_dim}), the mean keys of each "
            f"sequence's complete blocks, got {shape}"
        )
    return shape[1]
