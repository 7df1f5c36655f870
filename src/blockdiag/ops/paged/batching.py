"""Batching rule of paged attention: fold an axis mapped by `jax.vmap` into the batch of a canonical call.

A mapped axis is one more batch axis. Pages that all elements share stay as they are. Where each element has its own
pages, they become one pool, and page numbers are shifted for each element.
"""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array

from blockdiag.ops.block_diagonal.batching import fold_rows
from blockdiag.ops.paged.problem import PagedProblem


def fold_paged(
    problem: PagedProblem, axis_size: int, is_mapped: Sequence[bool | None], operands: tuple[Array | None, ...]
) -> tuple[PagedProblem, tuple[Array | None, ...]]:
    """Return the canonical call over `axis_size` times as many sequences.

    Args:
        problem: the call of one mapped element.
        axis_size: length of the mapped axis.
        is_mapped: for each operand, whether it has the mapped axis as its leading axis.
        operands: query, key_pages, value_pages, page_table, kv_lengths, query_lengths, sinks, score_scale, key_scales,
            value_scales and tiles, as implementations take them. All sequences share the sinks, which must not be
            mapped.

    Returns:
        The problem and the operands of the folded call.
    """
    names = (
        "query", "key_pages", "value_pages", "page_table", "kv_lengths", "query_lengths", "sinks", "score_scale",
        "key_scales", "value_scales", "tiles",
    )  # fmt: skip
    arrays, mapped = dict(zip(names, operands, strict=True)), dict(zip(names, is_mapped, strict=True))
    pool = ["key_pages", "value_pages", "key_scales"]
    pool += ["value_scales"] if problem.value_scale == "token" else []
    has_pools = any(mapped[name] for name in pool)
    by_sequence = [name for name in names if name not in (*pool, "page_table", "sinks", "tiles")]
    for name in (*by_sequence, *(pool if has_pools else ())):
        arrays[name] = fold_rows(arrays[name], axis_size, mapped[name])
    folded = dataclasses.replace(problem, batch=axis_size * problem.batch)
    if problem.num_tiles is not None:
        arrays["tiles"] = _fold_tiles(problem, axis_size, arrays["tiles"], mapped["tiles"])
        folded = dataclasses.replace(
            folded, num_tiles=axis_size * problem.num_tiles, packed_rows=axis_size * (problem.packed_rows or 0)
        )
    if has_pools:
        folded = dataclasses.replace(folded, num_pages=axis_size * problem.num_pages)
    table = arrays["page_table"]
    if table is not None:
        # Page numbers are clipped before they are shifted, so that no element reads another element's pages.
        table = jnp.clip(table, 0, max(problem.num_pages, 1) - 1)
        table = fold_rows(table, axis_size, mapped["page_table"])
        if has_pools:
            element = jnp.arange(axis_size * problem.batch, dtype=jnp.int32) // max(problem.batch, 1)
            table = table + (element * problem.num_pages)[:, None]
    elif not has_pools:
        # All elements read the same contiguous cache, in which a page is a whole sequence.
        table = jnp.tile(jnp.arange(problem.batch, dtype=jnp.int32), axis_size)[:, None]
        folded = dataclasses.replace(folded, has_page_table=True)
    return folded, tuple({**arrays, "page_table": table}[name] for name in names)


def _fold_tiles(problem: PagedProblem, axis_size: int, tiles: Array | None, is_mapped: bool | None) -> Array:
    """Return the table of tiles of all elements: first the tiles of each, then the sequences of each."""
    assert tiles is not None and problem.num_tiles is not None and problem.packed_rows is not None
    if not is_mapped:
        tiles = jnp.broadcast_to(tiles, (axis_size, *tiles.shape))
    element = jnp.arange(axis_size, dtype=jnp.int32)[:, None]
    row, count, position, sequence = (tiles[:, :, i] for i in range(4))
    sequence = jnp.where(sequence < 0, -1, sequence + element * problem.batch)
    shifted = jnp.stack([row + element * problem.packed_rows, count, position, sequence], -1)
    parts = shifted[:, : problem.num_tiles], shifted[:, problem.num_tiles :]
    return jnp.concatenate([part.reshape(-1, 4) for part in parts])
