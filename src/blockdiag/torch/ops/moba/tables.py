"""Block and query tables of MoBA in torch, equal to those of `blockdiag.ops.moba.tables`.

They take a few small torch operations on the tensors' device, none of which waits for the device.
"""

import torch

from blockdiag.ops.moba.problem import MoBAProblem


def moba_tables(
    problem: MoBAProblem,
    num_sequences: int,
    sequence_offsets: torch.Tensor | None,
    key_sequence_offsets: torch.Tensor | None,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the block table int32 [num_blocks, 4] and the query table int32 [query_tokens, 4] of a call.

    Args:
        problem: the call, with at least one block.
        num_sequences: number of batch rows, which have equal lengths and lie back to back; ignored with offsets.
        sequence_offsets, key_sequence_offsets: int32 [num_sequences + 1]; the latter defaults to the former. Any values
            are memory safe: they are clipped to the axis, and one below its predecessor counts as equal to it.
        device: the device of the tables.
    """
    if sequence_offsets is None:
        return _uniform_tables(problem, num_sequences, device)
    if key_sequence_offsets is None:
        key_sequence_offsets = sequence_offsets
    query_edges = clip_offsets(sequence_offsets, problem.query_tokens)
    key_edges = clip_offsets(key_sequence_offsets, problem.key_tokens)
    counts = (key_edges.diff() + (problem.block_size - 1)) // problem.block_size
    first_blocks = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    return (
        _block_table(problem, query_edges, key_edges, first_blocks),
        _query_table(problem, query_edges, key_edges, first_blocks),
    )


def clip_offsets(offsets: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return `offsets` clipped to [0, tokens] and made non-decreasing, whatever values it holds."""
    return offsets.clamp(0, tokens).cummax(0).values


def rows_to_sequences(edges: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sequence of each row of a token axis, always a valid index, and whether the row belongs to one."""
    segment = _count_not_above(edges, _arange(tokens, edges.device)) - 1
    num_sequences = edges.shape[0] - 1
    return segment.clamp(0, num_sequences - 1), (segment >= 0) & (segment < num_sequences)


def count_unmasked(key_mask: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Return how many keys of each block the mask bool [key_tokens] keeps, int32 [num_blocks]."""
    before = torch.nn.functional.pad(key_mask.cumsum(0, dtype=torch.int32), (1, 0))
    return before[blocks[:, 0] + blocks[:, 1]] - before[blocks[:, 0]]


def _uniform_tables(
    problem: MoBAProblem, num_sequences: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both tables for sequences of equal length, by broadcasting the tables of one sequence."""
    length, key_length = problem.query_tokens // num_sequences, problem.key_tokens // num_sequences
    num_blocks, block_size = problem.num_blocks // num_sequences, problem.block_size
    sequence = _arange(num_sequences, device)[:, None]
    first_block, query_start, key_start = sequence * num_blocks, sequence * length, sequence * key_length
    start = _arange(num_blocks, device) * block_size
    end = (start + block_size).clamp(max=key_length)
    row = _arange(length, device)
    if not problem.is_causal:
        nothing = torch.zeros((), dtype=torch.int32, device=device)
        blocks = _table(key_start + start, end - start, nothing, nothing)
        return blocks, _table(first_block + torch.zeros_like(row), first_block + num_blocks, nothing, nothing)
    # Query i has position i + shift, so positions below `shift` belong to no query.
    shift = key_length - length
    begin = (start - shift).clamp(min=0)
    blocks = _table(key_start + start, end - start, query_start + begin, (end - shift).clamp(min=0) - begin)
    position = row + shift
    own = position // block_size
    queries = _table(
        first_block + torch.zeros_like(own), first_block + own, key_start + own * block_size, key_start + position + 1
    )
    if shift < 0:
        queries = queries.masked_fill((position < 0).repeat(num_sequences)[:, None], 0)
    return blocks, queries


def _block_table(
    problem: MoBAProblem, query_edges: torch.Tensor, key_edges: torch.Tensor, first_blocks: torch.Tensor
) -> torch.Tensor:
    block = _arange(problem.num_blocks, key_edges.device)
    num_sequences = key_edges.shape[0] - 1
    sequence = _count_not_above(first_blocks[1:], block)
    is_used = sequence < num_sequences
    sequence = sequence.clamp(max=num_sequences - 1)
    query_start, key_start = query_edges[sequence], key_edges[sequence]
    num_queries, num_keys = query_edges[sequence + 1] - query_start, key_edges[sequence + 1] - key_start
    start = (block - first_blocks[sequence]) * problem.block_size
    end = torch.minimum(start + problem.block_size, num_keys)
    if problem.is_causal:
        shift = num_keys - num_queries
        begin = (start - shift).clamp(min=0)
        columns = query_start + begin, (end - shift).clamp(min=0) - begin
    else:
        columns = torch.zeros_like(block), torch.zeros_like(block)
    return _table(key_start + start, end - start, *columns).masked_fill(~is_used[:, None], 0)


def _query_table(
    problem: MoBAProblem, query_edges: torch.Tensor, key_edges: torch.Tensor, first_blocks: torch.Tensor
) -> torch.Tensor:
    row = _arange(problem.query_tokens, key_edges.device)
    sequence, is_used = rows_to_sequences(query_edges, problem.query_tokens)
    first, key_start, key_end = first_blocks[sequence], key_edges[sequence], key_edges[sequence + 1]
    if problem.is_causal:
        position = row - query_edges[sequence + 1] + (key_end - key_start)
        is_used = is_used & (position >= 0)
        own = position // problem.block_size
        columns = first + own, key_start + own * problem.block_size, key_start + position + 1
    else:
        is_used = is_used & (key_end > key_start)
        columns = first_blocks[sequence + 1], torch.zeros_like(row), torch.zeros_like(row)
    return _table(first, *columns).masked_fill(~is_used[:, None], 0)


def _table(*columns: torch.Tensor) -> torch.Tensor:
    """Stack columns, broadcast against each other, into a table of rows."""
    return torch.stack(torch.broadcast_tensors(*columns), dim=-1).view(-1, len(columns))


def _count_not_above(sorted_values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return, for each element of `x`, the number of `sorted_values` that are at most it."""
    return torch.searchsorted(sorted_values, x, right=True, out_int32=True)


def _arange(size: int, device: torch.device) -> torch.Tensor:
    return torch.arange(size, dtype=torch.int32, device=device)
