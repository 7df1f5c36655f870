"""MoBA over sequences whose tokens several processes share."""

import math
from collections.abc import Callable

import torch

from blockdiag._context_sizes import next_multiple
from blockdiag.torch._context_collectives import gather_tokens, gather_whole
from blockdiag.torch._context_exchange import exchange, from_zigzag, to_zigzag
from blockdiag.torch._context_parallel import ContextParallel, check_parts, choose_strategy


# Handles of transfers and process groups cannot be traced.
@torch.compiler.disable
def attend_to_shared_tokens(
    context: ContextParallel,
    attend: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sequence_offsets: torch.Tensor | None,
    key_mask: torch.Tensor | None,
    *,
    block_size: int,
    is_causal: bool,
    return_residual: bool,
) -> tuple[torch.Tensor, ...]:
    """Return MoBA's output for the tokens of this process, and its log-sum-exp if asked for.

    Args:
        context: which processes share the tokens, and how they work together.
        attend: `moba_attention` with everything but these tensors, and with its residual.
        query, key, value, sequence_offsets, key_mask, block_size, is_causal, return_residual: of the call; offsets
            count through the tokens of all processes.

    Raises:
        ValueError: the strategy cannot serve.
    """
    check_parts(context, {"query": query, "key": key, "value": value}, sequence_offsets)
    if query.shape[:-2] != key.shape[:-2]:
        raise ValueError(
            f"`context_parallel` needs as many queries as keys, got {tuple(query.shape[:-2])} and "
            f"{tuple(key.shape[:-2])}; gather the keys instead, and call without it"
        )
    whole_mask = None if key_mask is None else gather_whole(context, key_mask, query.ndim - 3)
    if choose_strategy(context, key.shape[-2]) == "ulysses":

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
    results = _attend_to_gathered(
        context, attend, query, key, value, sequence_offsets, whole_mask, block_size=block_size, is_causal=is_causal
    )
    return results if return_residual else results[:1]


def _attend_to_gathered(
    context: ContextParallel,
    attend: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sequence_offsets: torch.Tensor | None,
    whole_mask: torch.Tensor | None,
    *,
    block_size: int,
    is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp of this process's queries, and of the keys of all processes."""
    tokens, own, batch = query.ndim - 3, query.shape[-3], query.shape[:-3]
    total = own * context.size
    edges = sequence_offsets
    if edges is None:
        edges = torch.arange(2, dtype=torch.int32, device=query.device) * total
    mask = None if whole_mask is None else whole_mask.reshape(-1)

    def attended(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, first: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries that follow each other, the first of which has this place."""
        count = query.shape[tokens]
        offsets, key_offsets = _packed_offsets(edges, first, count, total, math.prod(batch), is_causal=is_causal)
        packed = [x.flatten(0, tokens) for x in (query, key, value)]
        results = attend(*packed, sequence_offsets=offsets, key_sequence_offsets=key_offsets, key_mask=mask)
        output, log_sum = (x.unflatten(0, (*batch, count)) for x in results)
        return output, log_sum

    if not is_causal or own % (2 * block_size):
        (key,), (value,) = (gather_tokens(context, x, tokens) for x in (key, value))
        return attended(query, key, value, context.rank * own)
    # Late queries look at more blocks to choose from than early ones: each process has some of both.
    part = own // 2
    keys, values = (gather_tokens(context, x, tokens, 2) for x in (key, value))
    queries = to_zigzag(context, query.movedim(tokens, 0)).movedim(0, tokens).split(part, tokens)
    starts = (context.rank * part, (2 * context.size - 1 - context.rank) * part)
    halves = [attended(*each) for each in zip(queries, keys, values, starts, strict=True)]
    output, log_sum = (
        from_zigzag(context, torch.cat([x.movedim(tokens, 0) for x in both])).movedim(0, tokens).contiguous()
        for both in zip(*halves, strict=True)
    )
    return output, log_sum


def _packed_offsets(
    edges: torch.Tensor, first: int, count: int, total: int, batch: int, *, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return offsets of queries and of keys, where batch rows lie one after the other.

    Args:
        edges: int32 offsets of the sequences of one batch row.
        first, count: the place of the first query, and the number of queries.
        total: the number of keys of a batch row.
        batch: the number of batch rows.
        is_causal: whether the last query of a sequence stands beside the last key that it may see.
    """
    queries = (edges - first).clamp(0, count)
    keys = edges.clamp(max=first + count) if is_causal else edges
    rows = torch.arange(batch, dtype=edges.dtype, device=edges.device)[:, None]
    # Keys behind the last one that a batch row sees are a sequence without queries.
    return (queries + rows * count).flatten(), (keys + rows * total).flatten()
