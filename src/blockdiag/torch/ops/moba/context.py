"""Context-parallel MoBA: the tokens of each sequence are divided over processes."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch

from blockdiag.common.context_sizes import next_multiple
from blockdiag.ops.moba.checks import (
    check_moba_block_size,
    count_packed_blocks,
    count_sequence_blocks,
    describe_moba_call,
)
from blockdiag.ops.moba.problem import MoBAProblem
from blockdiag.torch.context.collectives import Gather, gather_tokens, gather_whole, with_neighbours
from blockdiag.torch.context.exchange import exchange, from_zigzag, to_zigzag
from blockdiag.torch.context.parallel import ContextParallel, check_parts, choose_strategy
from blockdiag.torch.ops.moba import passes
from blockdiag.torch.ops.moba.operators import ListArguments
from blockdiag.torch.ops.moba.tables import clip_offsets, moba_tables


# Handles of transfers and process groups cannot be traced.
@torch.compiler.disable
def attend_to_shared_tokens(
    context: ContextParallel,
    attend: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    who: passes.Who,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sequence_offsets: torch.Tensor | None,
    key_mask: torch.Tensor | None,
    options: dict[str, Any],
    *,
    return_residual: bool,
) -> tuple[torch.Tensor, ...]:
    """Return MoBA's output for the tokens of this process, and with `return_residual` its log-sum-exp.

    Strategy "gather": every process computes the mean keys of the blocks that begin with its tokens. Mean keys are
    gathered first, so queries choose their blocks while keys and values are still in flight. Blocks and their mean keys
    are the same as in one process. In packed sequences a cut may divide a block: the process in which it begins then
    receives the rest of it, at most `block_size - 1` keys.

    Args:
        context: the processes that share the tokens, and their strategy.
        attend: `moba_attention` with all other arguments bound, and with its residual.
        who: the implementations of MoBA's passes.
        query, key, value, sequence_offsets, key_mask, return_residual: as for the call; offsets count through the
            tokens of all processes.
        options: the other arguments of the call, `block_size`, `top_k`, `scale` and `is_causal`.

    Raises:
        ValueError: the strategy does not support the call.
    """
    block_size = check_moba_block_size(options["block_size"])
    check_parts(context, {"query": query, "key": key, "value": value}, sequence_offsets)
    if query.shape[:-2] != key.shape[:-2]:
        raise ValueError(
            f"`context_parallel` needs as many queries as keys, got {tuple(query.shape[:-2])} and "
            f"{tuple(key.shape[:-2])}; gather the keys instead, and call without it"
        )
    whole_mask = None if key_mask is None else gather_whole(context, key_mask, query.ndim - 3)
    if choose_strategy(context, (query.shape[-2], key.shape[-2])) == "ulysses":

        def of_heads(*operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
            results = attend(*operands, sequence_offsets=sequence_offsets, key_mask=whole_mask)
            return results if return_residual else results[:1]

        return exchange(context, of_heads, query, (key, value), (2, 1) if return_residual else (2,))
    own = query.shape[-3]
    if own % block_size:
        raise ValueError(
            f"strategy 'gather' cuts between blocks: the {own} tokens of a process must be a multiple of "
            f"`block_size`={block_size}; pad the {own * context.size} tokens to "
            f"{next_multiple(own, block_size) * context.size}, or use strategy='ulysses'"
        )
    results = _attend_to_gathered(context, who, query, key, value, sequence_offsets, whole_mask, options)
    return results if return_residual else results[:1]


def _attend_to_gathered(
    context: ContextParallel,
    who: passes.Who,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sequence_offsets: torch.Tensor | None,
    whole_mask: torch.Tensor | None,
    options: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and log-sum-exp of this process's queries over the keys of all processes."""
    tokens, own, batch = query.ndim - 3, query.shape[-3], query.shape[:-3]
    rows, total, is_causal = math.prod(batch), own * context.size, options["is_causal"]
    edges = sequence_offsets
    if edges is None:
        edges = torch.arange(2, dtype=torch.int32, device=query.device) * total
    mask = None if whole_mask is None else whole_mask.reshape(-1)
    # A placeholder for keys in flight, of which only the shape is read.
    coming = key.new_empty(1).expand(rows * total, *key.shape[-2:])
    _, all_offsets = _packed_offsets(edges, 0, total, total, rows, is_causal=False)
    sequence_blocks = count_sequence_blocks(total, options["block_size"])
    problem = describe_moba_call(
        query.new_empty(1).expand(rows * total, *query.shape[-2:]), coming,
        sequence_offsets=all_offsets, key_sequence_offsets=None, key_mask=mask, **options,
    )  # fmt: skip
    problem = dataclasses.replace(problem, sequence_blocks=sequence_blocks)
    centroids = _gather_centroids(context, who, problem, key, sequence_offsets, whole_mask)

    def arguments_of(query: torch.Tensor, first: int) -> ListArguments:
        """Return the arguments of a call for consecutive queries, where `first` is the position of the first one."""
        offsets, key_offsets = _packed_offsets(edges, first, query.shape[tokens], total, rows, is_causal=is_causal)
        return ListArguments(
            query.detach().flatten(0, tokens), coming, mask, offsets, key_offsets, None, 0, 0,
            problem.block_size, options["top_k"], is_causal, who.names,
        )  # fmt: skip

    def choose(query: torch.Tensor, first: int, centroids: torch.Tensor) -> torch.Tensor:
        """Return the blocks that queries choose, [queries, batch rows, N, slots]."""
        chosen = passes.choose(who, arguments_of(query, first), centroids, sequence_blocks)
        return chosen.unflatten(1, (rows, -1)).movedim((2, 1), (0, 1))

    is_balanced = centroids is not None and is_causal and own % (2 * problem.block_size) == 0
    choosing = to_zigzag(context, query.detach().movedim(tokens, 0)).movedim(0, tokens) if is_balanced else query
    # These transfers are in flight while queries choose.
    gathers = [Gather(context, x, tokens) for x in (key, value)]
    chosen = None
    if centroids is not None:
        if is_balanced:
            part = own // 2
            starts = (context.rank * part, (2 * context.size - 1 - context.rank) * part)
            halves = zip(choosing.split(part, tokens), starts, strict=True)
            chosen = from_zigzag(context, torch.cat([choose(*half, centroids) for half in halves]))
        else:
            chosen = choose(choosing, context.rank * own, centroids)
        chosen = chosen.movedim((0, 1), (2, 1)).flatten(1, 2).contiguous()
    lists = passes.make_lists(who, arguments_of(query, context.rank * own), chosen)
    key, value = (gather_tokens(context, x, tokens, gather) for x, gather in zip((key, value), gathers, strict=True))
    query, key, value = (x.flatten(0, tokens) for x in (query, key, value))
    results = passes.attend(who, query, key, value, mask, lists, problem)
    output, log_sum = (x.unflatten(0, (*batch, own)) for x in results)
    return output, log_sum


@torch.no_grad()
def _gather_centroids(
    context: ContextParallel,
    who: passes.Who,
    problem: MoBAProblem,
    key: torch.Tensor,
    sequence_offsets: torch.Tensor | None,
    whole_mask: torch.Tensor | None,
) -> torch.Tensor | None:
    """Return the mean keys of all blocks, [num_blocks, K, parts, H]; None where no query chooses.

    Args:
        context, who, key, sequence_offsets: as for the call.
        problem: the call over all keys, with batch rows back to back.
        whole_mask: [.., T], the mask of the keys of all processes.
    """
    if problem.slots == 0:
        return None
    tokens, own, block_size = key.ndim - 3, key.shape[-3], problem.block_size
    total, first = own * context.size, context.rank * own
    if sequence_offsets is None:
        rows = math.prod(key.shape[:tokens])
        count = rows * (own // block_size)
        local = dataclasses.replace(problem, query_tokens=rows * own, key_tokens=rows * own, num_blocks=count)
        blocks, _ = moba_tables(local, rows, None, None, key.device)
        mask = None if whole_mask is None else whole_mask.narrow(tokens, first, own).reshape(-1)
        found = passes.find_centroids(who, local, key.flatten(0, tokens), mask, blocks)
        whole = gather_whole(context, found.unflatten(0, (rows, -1)), 1).flatten(0, 1)
        # Tables of packed batch rows have more rows than there are blocks.
        return torch.cat([whole, whole.new_zeros(problem.num_blocks - whole.shape[0], *whole.shape[1:])])
    halo = block_size - 1
    (longer,) = with_neighbours(context, [key], tokens, 0, halo)
    mask = None
    if whole_mask is not None:
        mask = torch.nn.functional.pad(whole_mask, (0, halo)).narrow(tokens, first, own + halo)
    all_blocks, _ = moba_tables(problem, 1, clip_offsets(sequence_offsets, total), None, key.device)
    blocks, order = _own_blocks(context, all_blocks, own, sequence_offsets.shape[0] - 1, block_size)
    count = blocks.shape[0]
    local = dataclasses.replace(problem, query_tokens=own, key_tokens=own + halo, num_blocks=count)
    found = passes.find_centroids(who, local, longer, mask, blocks)
    return gather_whole(context, found, 0)[order]


def _own_blocks(
    context: ContextParallel, blocks: torch.Tensor, own: int, num_sequences: int, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the table of the blocks that begin in this process, and the row of every block in the gathered tables.

    Args:
        context: the processes.
        blocks: the block table of all tokens.
        own: tokens of a process.
        num_sequences, block_size: as for the call.
    """
    size, device = context.size, blocks.device
    most = count_packed_blocks(own, num_sequences, block_size)
    # Unused rows of the table, which come last, begin in no process.
    starts = torch.where(blocks[:, 1] > 0, blocks[:, 0], own * size)
    firsts = torch.searchsorted(starts, torch.arange(size + 1, dtype=starts.dtype, device=device) * own)
    number = firsts[context.rank] + torch.arange(most, device=device)
    table = blocks[number.clamp(max=blocks.shape[0] - 1)]
    # The query columns stay 0: only mean keys are computed from this table.
    start, length, nothing = table[:, 0] - context.rank * own, table[:, 1], torch.zeros_like(table[:, 0])
    table = torch.stack([start, length, nothing, nothing], 1)
    table = torch.where((number < firsts[context.rank + 1])[:, None], table, 0)
    process = (starts // own).clamp(max=size - 1).long()
    return table, process * most + torch.arange(blocks.shape[0], device=device) - firsts[process]


def _packed_offsets(
    edges: torch.Tensor, first: int, count: int, total: int, batch: int, *, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return offsets of queries and of keys for batch rows that lie back to back.

    Args:
        edges: int32 offsets of the sequences of one batch row.
        first, count: the position of the first query, and the number of queries.
        total: the number of keys of a batch row.
        batch: the number of batch rows.
        is_causal: whether keys end at the last query, so that the last queries and keys of a sequence align.
    """
    queries = (edges - first).clamp(0, count)
    keys = edges.clamp(max=first + count) if is_causal else edges
    rows = torch.arange(batch, dtype=edges.dtype, device=edges.device)[:, None]
    # Keys after the last one that a batch row sees form a sequence without queries.
    return (queries + rows * count).flatten(), (keys + rows * total).flatten()
