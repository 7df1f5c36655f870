"""Packed queries of paged attention as tiles, each of which is a sequence of its own.

The number of tiles follows from shapes, and tiles have queries of one sequence each. So work grows with the queries
that there are, not with the longest sequence. See `PagedProblem.tiled`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from blockdiag.common.packing import count_not_above
from blockdiag.common.shards import Part
from blockdiag.ops.paged.problem import PagedProblem


class Sequences(NamedTuple):
    """The operands that belong to sequences, or to tiles; queries of sequences may be packed.

    Attributes:
        query: [B, T, N, H] or [rows, N, H].
        page_table, kv_lengths, query_lengths: int32 [B, max_pages], [B] and [B]; the first and last may be None.
        score_scale, value_scale: float32 [B, K] or None.
    """

    query: Array
    page_table: Array | None
    kv_lengths: Array
    query_lengths: Array | None
    score_scale: Array | None
    value_scale: Array | None


def to_tiles(problem: PagedProblem, sequences: Sequences, offsets: Array, part: Part) -> Sequences:
    """Return the operands of `problem.tiled`.

    Args:
        problem: the call with packed queries.
        sequences: its operands; `query_lengths` is not read.
        offsets: int32 [B + 1], of the sequences on all devices.
        part: the part of the call that this device computes.
    """
    tiled, offsets = problem.tiled, _own(offsets, problem, part)
    starts, lengths = offsets[:-1], jnp.diff(offsets)
    tokens = jnp.arange(tiled.query_tokens, dtype=jnp.int32)
    if tiled.batch == problem.batch:
        query = sequences.query.at[starts[:, None] + tokens[None]].get(mode="clip")
        return sequences._replace(query=query, query_lengths=jnp.minimum(lengths, problem.query_tokens))
    sequence, first = _tiles(tiled, starts)
    remaining = jnp.where(first < 0, 0, jnp.maximum(lengths[sequence] - first, 0))
    count = jnp.minimum(remaining, tiled.query_tokens)
    keys = jnp.clip(sequences.kv_lengths, 0, problem.max_keys)[sequence]
    if problem.is_causal:
        # The keys after a tile's last query are left out, so that splits divide the others.
        keys, remaining = keys - remaining + count, count
    table = sequences.page_table
    # Without a table, sequence b is page b.
    table = sequence[:, None] if table is None else table[sequence]
    by_head = (None if x is None else x[sequence] for x in (sequences.score_scale, sequences.value_scale))
    query = sequences.query.at[(starts[sequence] + first)[:, None] + tokens[None]].get(mode="clip")
    return Sequences(query, table, jnp.where(count > 0, keys, 0), remaining, *by_head)


def from_tiles(problem: PagedProblem, results: tuple[Array, Array], offsets: Array, part: Part) -> tuple[Array, Array]:
    """Return output [rows, N, V] and log-sum-exp [rows, N] from those of tiles, with 0 for sequences of other devices.

    The results of all devices are then summed. For rows without a sequence, only the first device contributes the
    log-sum-exp -inf. If each sequence is one tile, those that are longer get NaN.
    """
    tiled, rows = problem.tiled, problem.packed_rows
    whole, own = _clipped(offsets, rows), _own(offsets, problem, part)
    row = jnp.arange(rows, dtype=jnp.int32)
    sequence = count_not_above(own, row) - 1
    is_outside = (sequence < 0) | (sequence >= problem.batch)
    sequence = jnp.clip(sequence, 0, problem.batch - 1)
    within = row - own[sequence]
    if tiled.batch == problem.batch:
        tile, place = sequence, jnp.minimum(within, tiled.query_tokens - 1)
        is_bad = jnp.diff(own)[sequence] > problem.query_tokens
    else:
        tile = own[sequence] // tiled.query_tokens + sequence + within // tiled.query_tokens
        place, is_bad = within % tiled.query_tokens, jnp.zeros_like(is_outside)
    blind = jnp.where((row < whole[0]) | (row >= whole[-1]), -jnp.inf, 0.0)
    blind = jnp.where(part.starts.get("rows", 0) == 0, blind, 0.0)

    def packed(x: Array, outside: Array) -> Array:
        bad, beyond, others = (array.reshape(-1, *[1] * (x.ndim - 2)) for array in (is_bad, is_outside, outside))
        values = jnp.where(bad, jnp.nan, x.at[tile, place].get(mode="clip"))
        return jnp.where(beyond, others.astype(x.dtype), values).astype(x.dtype)

    output, log_sum = results
    return packed(output, jnp.zeros_like(blind)), packed(log_sum, blind)


def _clipped(offsets: Array, rows: int | None) -> Array:
    """Clip offsets to the rows, and raise each to at least its predecessor."""
    return jax.lax.cummax(jnp.clip(offsets, 0, rows))


def _own(offsets: Array, problem: PagedProblem, part: Part) -> Array:
    """Return the clipped offsets of the sequences on this device."""
    offsets, first = _clipped(offsets, problem.packed_rows), part.starts.get("rows")
    return offsets if first is None else jax.lax.dynamic_slice_in_dim(offsets, first, part.sizes["rows"] + 1)


def _tiles(tiled: PagedProblem, starts: Array) -> tuple[Array, Array]:
    """Return the sequence of each tile, and the number of its queries before the tile; negative if there is none.

    Args:
        tiled: the call over tiles.
        starts: int32 [B], the first row of each sequence.
    """
    tile = jnp.arange(tiled.batch, dtype=jnp.int32)
    first_tiles = starts // tiled.query_tokens + jnp.arange(starts.shape[0], dtype=jnp.int32)
    sequence = jnp.maximum(count_not_above(first_tiles, tile) - 1, 0)
    return sequence, (tile - first_tiles[sequence]) * tiled.query_tokens
