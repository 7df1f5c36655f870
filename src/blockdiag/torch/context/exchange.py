"""Exchanges of tokens for heads (Ulysses), and of consecutive tokens for tokens in zigzag order."""

from collections.abc import Callable, Sequence

import torch

from blockdiag.common.context_sizes import choose_groups, zigzag_owner
from blockdiag.torch.context.collectives import Transfer, for_each_use, send_rows, sorted_sizes
from blockdiag.torch.context.parallel import ContextParallel


def exchange(
    context: ContextParallel,
    compute: Callable[..., tuple[torch.Tensor, ...]],
    query: torch.Tensor,
    keys: Sequence[torch.Tensor],
    head_axes: Sequence[int] = (2,),
) -> tuple[torch.Tensor, ...]:
    """Compute attention over whole sequences of each process's heads, between exchanges of tokens for heads.

    Heads move in groups. While one group is computed, the next one and the results of the previous one are in flight.
    In the backward pass gradients overlap with kernels in the same way.

    A group has key heads and their query heads. If a process has a single key head, groups have only query heads, and
    the key head moves with the first group. If there are fewer key heads than processes, several processes have the
    same key head.

    Args:
        context: the processes.
        compute: maps query [.., T, n, H] and keys [.., T, k, H], the heads of the process, to a tuple of results.
        query: [.., t, N, H], the process's tokens.
        keys: [.., t, K, H] each; K is a multiple or a divisor of the number of processes, and N is a multiple.
        head_axes: for each result, the axis of its heads, counted from the last axis as 1; tokens come before them.

    Returns:
        The results for the process's tokens and all heads.
    """
    size, tokens = context.size, query.ndim - 3
    keys = [_repeat_heads(x, max(size // x.shape[-2], 1)) for x in keys]
    has_one_key_head = keys[0].shape[-2] == size
    groups = choose_groups((query if has_one_key_head else keys[0]).shape[-2], size)
    moving = (query,) if has_one_key_head else (query, *keys)

    def packed(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Split heads by process and group: [devices, .., t, n, H] of each group."""
        # A single autograd function cuts all groups, so it adds all gradients at once.
        return x.unflatten(-2, (size, groups, -1)).movedim(tokens + 1, 0).unbind(tokens + 2)

    def whole_sequences(x: torch.Tensor) -> torch.Tensor:
        """Concatenate tokens: [devices, .., t, n, H] to [.., T, n, H]."""
        return x.movedim(0, tokens).flatten(tokens, tokens + 1)

    def parts(x: torch.Tensor) -> torch.Tensor:
        """Split tokens by process: [.., T, n, ..] to [devices, .., t, n, ..]."""
        return x.unflatten(tokens, (size, -1)).movedim(tokens, 0)

    def start(tensors: Sequence[torch.Tensor]) -> list[tuple[Transfer, torch.Tensor]]:
        transfers = [Transfer(context.group) for _ in tensors]
        return [(transfer, transfer.start(x)) for transfer, x in zip(transfers, tensors, strict=True)]

    waiting = list(zip(*(packed(x) for x in moving), strict=True))
    coming = start(waiting[0])
    staying = start([x.unsqueeze(-2).movedim(tokens + 1, 0) for x in keys] if has_one_key_head else [])
    uses = None
    returning = []
    for group in range(groups):
        here = [transfer.wait(x) for transfer, x in coming]
        if group + 1 < groups:
            coming = start(waiting[group + 1])
        if uses is None:
            uses = [for_each_use(whole_sequences(transfer.wait(x)), groups) for transfer, x in staying]
        found = compute(*map(whole_sequences, here), *(x[group] for x in uses))
        returning.append(start([parts(x) for x in found]))
    results = []
    for number, place in enumerate(head_axes):
        own = [group[number][0].wait(group[number][1]) for group in returning]
        heads = own[0].ndim - 1 - place
        # [devices, .., t, n, ..] of each group, to [.., t, devices, groups, n, ..]
        results.append(torch.stack([x.movedim(0, heads) for x in own], heads + 1).flatten(heads, heads + 2))
    return tuple(results)


def _repeat_heads(x: torch.Tensor, count: int) -> torch.Tensor:
    """Repeat each head `count` times: [.., K, H] to [.., K * count, H]."""
    return x if count == 1 else torch.stack(for_each_use(x, count), -2).flatten(-3, -2)


def to_zigzag(context: ContextParallel, x: torch.Tensor) -> torch.Tensor:
    """Exchange a process's consecutive part [rows, ..] for its part in zigzag order, by one exchange of halves."""
    half, (send, receive) = x.shape[0] // 2, _zigzag_sizes(context, x.shape[0] // 2)
    return send_rows(context, x.roll(half, 0) if _is_late(context) else x, send, receive)


def from_zigzag(context: ContextParallel, x: torch.Tensor) -> torch.Tensor:
    """Exchange a process's part in zigzag order for its consecutive part; see `to_zigzag`."""
    half, (send, receive) = x.shape[0] // 2, _zigzag_sizes(context, x.shape[0] // 2)
    found = send_rows(context, x, receive, send)
    return found.roll(half, 0) if _is_late(context) else found


def _zigzag_sizes(context: ContextParallel, half: int) -> tuple[list[int], list[int]]:
    """Return the numbers of rows for and from each process, on the way to zigzag order.

    Process d has the consecutive parts 2 d and 2 d + 1, and in zigzag order parts d and 2 size - 1 - d.
    """
    rank, size = context.rank, context.size
    owners = [zigzag_owner(part, size) for part in (2 * rank, 2 * rank + 1)]
    sources = [part // 2 for part in (rank, 2 * size - 1 - rank)]
    return sorted_sizes(size, half, owners), sorted_sizes(size, half, sources)


def _is_late(context: ContextParallel) -> bool:
    """Return whether this process's parts are in the second half, whose later parts go to lower ranks."""
    return 2 * context.rank >= context.size
