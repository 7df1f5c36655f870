"""Tables of MoBA: where the blocks of all sequences lie, and which of them each query may see.

Both tables are int32. Their sizes depend only on shapes, so new offsets never cause a recompilation.

- blocks [num_blocks, 4]: first key row, number of keys, first query row and number of queries of each block. Its
  queries are those that own the block; calls that are not causal have none. Blocks are cut from the start of each
  sequence and numbered across all sequences in order. Unused rows, which are all 0, come last.
- queries [query_tokens, 4]: the half-open range of blocks that the query may choose, then the half-open range of key
  rows that it sees in its own block. In causal calls a query may choose the blocks before its own, so the end of the
  first range is the number of its own block. The rows of queries that see nothing are all 0.

Queries align with the end of their sequence's keys: with Sq queries and Sk keys, query i has position i + Sk - Sq.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from blockdiag.common.packing import count_not_above, running_maximum, running_sum
from blockdiag.ops.moba.problem import MoBAProblem

BlockTable = Int[Array, "num_blocks 4"]
QueryTable = Int[Array, "query_tokens 4"]


def moba_tables(
    problem: MoBAProblem,
    num_sequences: int,
    sequence_offsets: Int[Array, " offsets"] | None = None,
    key_sequence_offsets: Int[Array, " offsets"] | None = None,
) -> tuple[BlockTable, QueryTable]:
    """Return the block table and the query table of a call.

    Args:
        problem: the call, with at least one block.
        num_sequences: number of batch rows, equally long and back to back; unused if offsets are given.
        sequence_offsets, key_sequence_offsets: int32 [num_sequences + 1], offsets of packed sequences in the query axis
            and the key axis. The key offsets default to the query offsets. Any values are memory safe: offsets are
            clipped to the axis, and one below its predecessor counts as equal to it.
    """
    if sequence_offsets is None:
        query_edges = jnp.arange(num_sequences + 1, dtype=jnp.int32) * (problem.query_tokens // num_sequences)
        key_edges = jnp.arange(num_sequences + 1, dtype=jnp.int32) * (problem.key_tokens // num_sequences)
    else:
        if key_sequence_offsets is None:
            key_sequence_offsets = sequence_offsets
        query_edges = clip_offsets(sequence_offsets, problem.query_tokens)
        key_edges = clip_offsets(key_sequence_offsets, problem.key_tokens)
    is_uniform = sequence_offsets is None
    return (
        _block_table(problem, query_edges, key_edges, is_uniform),
        _query_table(problem, query_edges, key_edges, is_uniform),
    )


def clip_offsets(offsets: Int[Array, " offsets"], tokens: int) -> Int[Array, " offsets"]:
    """Clip arbitrary offsets to [0, tokens], and raise each to at least its predecessor."""
    return running_maximum(jnp.clip(offsets, 0, tokens))


def rows_to_sequences(edges: Int[Array, " offsets"], tokens: int) -> tuple[Array, Array]:
    """Return each row's sequence, and whether it belongs to one; the sequence is a valid index in any case."""
    segment = count_not_above(edges, jnp.arange(tokens, dtype=jnp.int32)) - 1
    num_sequences = edges.shape[0] - 1
    return jnp.clip(segment, 0, num_sequences - 1), (segment >= 0) & (segment < num_sequences)


def count_unmasked(key_mask: Bool[Array, " key_tokens"], blocks: BlockTable) -> Int[Array, " num_blocks"]:
    """Return the number of unmasked keys of each block."""
    before = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(key_mask, dtype=jnp.int32)])
    return before[blocks[:, 0] + blocks[:, 1]] - before[blocks[:, 0]]


def _first_blocks(problem: MoBAProblem, key_edges: Array) -> Array:
    """Return the number of each sequence's first block, then the total number of blocks, int32 [num_sequences + 1]."""
    counts = (key_edges[1:] - key_edges[:-1] + (problem.block_size - 1)) // problem.block_size
    return jnp.concatenate([jnp.zeros(1, jnp.int32), running_sum(counts)])


def _block_table(problem: MoBAProblem, query_edges: Array, key_edges: Array, is_uniform: bool) -> BlockTable:
    block = jnp.arange(problem.num_blocks, dtype=jnp.int32)
    num_sequences = key_edges.shape[0] - 1
    first_blocks = _first_blocks(problem, key_edges)
    if is_uniform:
        sequence, is_used = block // (problem.num_blocks // num_sequences), jnp.ones_like(block, bool)
    else:
        sequence = count_not_above(first_blocks[1:], block)
        is_used = sequence < num_sequences
        sequence = jnp.minimum(sequence, num_sequences - 1)
    query_start, key_start = query_edges[sequence], key_edges[sequence]
    num_queries, num_keys = query_edges[sequence + 1] - query_start, key_edges[sequence + 1] - key_start
    position = (block - first_blocks[sequence]) * problem.block_size
    end = jnp.minimum(position + problem.block_size, num_keys)
    columns = [key_start + position, end - position]
    if problem.is_causal:
        # Query i has position i + shift, so positions below `shift` belong to no query.
        shift = num_keys - num_queries
        begin = jnp.maximum(position - shift, 0)
        columns += [query_start + begin, jnp.maximum(end - shift, 0) - begin]
    else:
        columns += [jnp.zeros_like(block)] * 2
    return jnp.where(is_used[:, None], jnp.stack(columns, axis=1), 0)


def _query_table(problem: MoBAProblem, query_edges: Array, key_edges: Array, is_uniform: bool) -> QueryTable:
    row = jnp.arange(problem.query_tokens, dtype=jnp.int32)
    num_sequences = query_edges.shape[0] - 1
    if is_uniform:
        sequence, is_used = row // (problem.query_tokens // num_sequences), jnp.ones_like(row, bool)
    else:
        sequence, is_used = rows_to_sequences(query_edges, problem.query_tokens)
    first_blocks = _first_blocks(problem, key_edges)
    first, key_start, key_end = first_blocks[sequence], key_edges[sequence], key_edges[sequence + 1]
    if problem.is_causal:
        position = row - query_edges[sequence + 1] + (key_end - key_start)
        is_used = is_used & (position >= 0)
        own = position // problem.block_size
        own_start = key_start + own * problem.block_size
        columns = [first, first + own, own_start, key_start + position + 1]
    else:
        is_used = is_used & (key_end > key_start)
        columns = [first, first_blocks[sequence + 1], jnp.zeros_like(row), jnp.zeros_like(row)]
    return jnp.where(is_used[:, None], jnp.stack(columns, axis=1), 0)
