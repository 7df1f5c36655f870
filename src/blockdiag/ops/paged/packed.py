"""Packed queries of paged attention, and tables of their tiles.

A tile has queries of one sequence, and the number of tiles follows from shapes. So work grows with the queries that
there are, not with the longest sequence. See `PagedProblem.tiled`.

The table of tiles is int32 [num_tiles + B, 4]. Each of the first rows is a tile: its first row in the packed queries,
the number of its queries, the position of its first query, and its sequence, -1 for rows that belong to no sequence.
Every packed row is in one tile. Each of the last B rows describes all queries of a sequence in the same form.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from blockdiag.common.packing import count_not_above
from blockdiag.common.shards import Part
from blockdiag.ops.paged.problem import PagedProblem


class Queries(NamedTuple):
    """The queries of a call in the form that implementations take.

    Attributes:
        query: [B, T, N, H], or packed [rows, N, H].
        query_lengths: int32 [B] or None.
        tiles: the table of tiles, or None.
    """

    query: Array
    query_lengths: Array | None
    tiles: Array | None


def canonical_queries(
    problem: PagedProblem,
    query: Array,
    kv_lengths: Array,
    query_lengths: Array | None,
    offsets: Array | None,
    part: Part,
) -> Queries:
    """Return the queries of `problem.tiled`.

    Args:
        problem: the call.
        query, kv_lengths, query_lengths: its operands.
        offsets: int32 [B + 1], of the packed sequences on all devices; None for a batch.
        part: the part of the call that this device computes.
    """
    tiled = problem.tiled
    if offsets is None:
        if tiled.num_tiles is None:
            return Queries(query, query_lengths, None)
        rows = query.reshape(-1, *query.shape[2:])
        return Queries(rows, None, _table_of_batch(problem, kv_lengths, query_lengths))
    return Queries(query, None, _table_of_packed(problem, kv_lengths, _own(offsets, problem, part)))


def callers_results(
    problem: PagedProblem, results: tuple[Array, Array], offsets: Array | None, part: Part
) -> tuple[Array, Array]:
    """Return output and log-sum-exp in the form of the call's queries, from those of `problem.tiled`.

    The results of packed queries on several devices are summed, so sequences of other devices get 0. For rows without a
    sequence, only the first device contributes the log-sum-exp -inf.
    """
    if offsets is None:
        if problem.tiled.num_tiles is None:
            return results
        output, log_sum = (x.reshape(problem.batch, problem.query_tokens, *x.shape[1:]) for x in results)
        return output, log_sum
    if "rows" not in part.starts:
        return results
    whole, own = _clipped(offsets, problem.packed_rows), _own(offsets, problem, part)
    row = jnp.arange(problem.packed_rows, dtype=jnp.int32)
    blind = jnp.where((row < whole[0]) | (row >= whole[-1]), -jnp.inf, 0.0)
    blind = jnp.where(part.starts["rows"] == 0, blind, 0.0)
    is_outside = (row < own[0]) | (row >= own[-1])
    output, log_sum = results
    return output, jnp.where(is_outside[:, None], blind[:, None].astype(log_sum.dtype), log_sum)


def _clipped(offsets: Array, rows: int | None) -> Array:
    """Clip offsets to the rows, and raise each to at least its predecessor."""
    return jax.lax.cummax(jnp.clip(offsets, 0, rows))


def _own(offsets: Array, problem: PagedProblem, part: Part) -> Array:
    """Return the clipped offsets of the sequences on this device."""
    offsets, first = _clipped(offsets, problem.packed_rows), part.starts.get("rows")
    return offsets if first is None else jax.lax.dynamic_slice_in_dim(offsets, first, part.sizes["rows"] + 1)


# Tables of tiles


def _table_of_packed(problem: PagedProblem, kv_lengths: Array, own: Array) -> Array:
    """Return the table of packed sequences. The rows before and after all of them are segments of their own."""
    sequence = jnp.arange(problem.batch, dtype=jnp.int32)
    outside = jnp.full(1, -1, jnp.int32)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), own])
    lengths = jnp.diff(jnp.concatenate([starts, jnp.full(1, problem.packed_rows or 0, jnp.int32)]))
    segments = jnp.concatenate([outside, sequence, outside])
    return _table(problem, kv_lengths, starts, lengths, segments, slice(1, -1))


def _table_of_batch(problem: PagedProblem, kv_lengths: Array, query_lengths: Array | None) -> Array:
    """Return the table of a batch. The rows beyond a sequence's queries are a segment of their own."""
    tokens = problem.query_tokens
    sequence = jnp.arange(problem.batch, dtype=jnp.int32)
    starts, lengths = sequence * tokens, jnp.full_like(kv_lengths, tokens)
    if query_lengths is None:
        return _table(problem, kv_lengths, starts, lengths, sequence, slice(None))
    own = jnp.clip(query_lengths, 0, tokens)
    starts = jnp.stack([starts, starts + own], 1).reshape(-1)
    lengths = jnp.stack([own, tokens - own], 1).reshape(-1)
    segments = jnp.stack([sequence, jnp.full_like(sequence, -1)], 1).reshape(-1)
    return _table(problem, kv_lengths, starts, lengths, segments, slice(0, None, 2))


def _table(
    problem: PagedProblem, kv_lengths: Array, starts: Array, lengths: Array, sequences: Array, inside: slice
) -> Array:
    """Return the table of consecutive segments of rows.

    Args:
        problem: the call.
        kv_lengths: int32 [B].
        starts, lengths, sequences: int32 [segments]; the rows of each, and its sequence or -1.
        inside: which of the segments are sequences.
    """
    tiled = problem.tiled
    keys = jnp.clip(kv_lengths, 0, problem.max_keys if problem.num_pages else 0)
    positions = jnp.where(sequences < 0, 0, keys.at[sequences].get(mode="clip") - lengths)
    # Segment s begins tile starts[s] // tokens + s, so each has as many tiles as it needs, and at most one more.
    first_tiles = starts // tiled.query_tokens + jnp.arange(starts.shape[0], dtype=jnp.int32)
    tile = jnp.arange(tiled.num_tiles, dtype=jnp.int32)
    segment = jnp.maximum(count_not_above(first_tiles, tile) - 1, 0)
    before = (tile - first_tiles[segment]) * tiled.query_tokens
    count = jnp.clip(lengths[segment] - before, 0, tiled.query_tokens)
    tiles = jnp.stack([starts[segment] + before, count, positions[segment] + before, sequences[segment]], 1)
    wholes = jnp.stack([x[inside] for x in (starts, lengths, positions, sequences)], 1)
    return jnp.concatenate([tiles, wholes]).astype(jnp.int32)


def by_tiles(forward: Callable[..., tuple[Array, Array]]) -> Callable[..., tuple[Array, Array]]:
    """Let an implementation for batches compute calls with a table of tiles, too: each tile is a sequence of a batch.

    Args:
        forward: computes a call without a table, from all operands but the table.
    """

    def compute(problem: PagedProblem, *operands: Array | None, interpret: bool = False) -> tuple[Array, Array]:
        tiles = operands[-1]
        if problem.num_tiles is None:
            return forward(problem, *operands[:-1], interpret=interpret)
        query, key, value, page_table, kv_lengths, _, sinks, score_scale, key_scales, value_scales, _ = operands
        assert query is not None and kv_lengths is not None and tiles is not None and problem.packed_rows is not None
        # Where no sequence has more queries than a tile, there are fewer sequences than tiles.
        are_whole = problem.few_queries is not None and (problem.most_queries or 0) <= problem.query_tokens
        entries = slice(problem.num_tiles, None) if are_whole else slice(problem.num_tiles)
        row, count, position, sequence = tiles[entries].T
        is_inside, sequence = sequence >= 0, jnp.maximum(sequence, 0)
        keys = jnp.clip(kv_lengths, 0, problem.max_keys if problem.num_pages else 0)[sequence]
        # Queries before position 0 see nothing, and the others of their tile see all keys up to their position.
        lengths = jnp.where(is_inside, keys - position, 0)
        if problem.is_causal:
            # The keys after a tile's last query are left out, so that splits divide the others.
            keys, lengths = jnp.minimum(keys, position + count), jnp.where(is_inside, count, 0)
        keys = jnp.where(is_inside & (count > 0), keys, 0)
        if problem.value_scale == "head" and value_scales is not None:
            value_scales = value_scales[sequence]
        own = jnp.arange(problem.query_tokens, dtype=jnp.int32)[None]
        place = row[:, None] + own
        batch = dataclasses.replace(
            problem, batch=row.shape[0], num_tiles=None, packed_rows=None, has_page_table=True,
            has_query_lengths=True, has_more_queries=True,
        )  # fmt: skip
        results = forward(
            batch,
            query.at[place].get(mode="clip"),
            key,
            value,
            # Without a table, sequence b is page b.
            sequence[:, None] if page_table is None else page_table[sequence],
            keys,
            jnp.where(count > 0, lengths, 0),
            sinks,
            None if score_scale is None else score_scale[sequence],
            key_scales,
            value_scales,
            interpret=interpret,
        )
        place = jnp.where(own < count[:, None], place, problem.packed_rows)

        tile_row, tile_count, _, tile_sequence = (x[:, None] for x in tiles[: problem.num_tiles].T)
        tile_place = jnp.where((tile_sequence < 0) & (own < tile_count), tile_row + own, problem.packed_rows)
        is_outside = jnp.zeros(problem.packed_rows, bool).at[tile_place].set(True, mode="drop")

        def packed(x: Array, outside: float) -> Array:
            rows = jnp.full((problem.packed_rows, *x.shape[2:]), outside, x.dtype)
            if are_whole:
                # Rows that are not written belong to no sequence, or to one that is longer than the call says.
                rows = jnp.where(is_outside.reshape(-1, *[1] * (x.ndim - 2)), rows, jnp.nan).astype(x.dtype)
            return rows.at[place].set(x, mode="drop")

        output, log_sum = results
        return packed(output, 0.0), packed(log_sum, -jnp.inf)

    return compute
