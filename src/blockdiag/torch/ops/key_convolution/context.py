"""Context-parallel key convolution: the tokens of each sequence are divided over processes."""

from collections.abc import Callable

import torch

from blockdiag.torch.context.collectives import with_neighbours
from blockdiag.torch.context.parallel import ContextParallel, check_parts, refuse_ring


# Process groups cannot be traced.
@torch.compiler.disable
def convolve_shared_tokens(
    context: ContextParallel,
    convolve: Callable[..., torch.Tensor],
    key: torch.Tensor,
    weights: torch.Tensor,
    sequence_offsets: torch.Tensor | None,
) -> torch.Tensor:
    """Return the convolved keys of this process, which receives the few keys before its own.

    Args:
        context: which processes share the tokens.
        convolve: `key_convolution` with all other arguments bound.
        key, weights, sequence_offsets: as for the call; offsets count through the tokens of all processes.

    Raises:
        ValueError: a process has fewer tokens than it sends, or the strategy is "ring".
    """
    refuse_ring(context, "`key_convolution`", "leave it None, or use the strategy of the attention")
    check_parts(context, {"key": key}, sequence_offsets)
    tokens, before = key.ndim - 3, weights.shape[0] - 1
    own = key.shape[tokens]
    if before > own:
        raise ValueError(
            f"`weights` of {before + 1} rows need at least {before} tokens in each process, got {own}; pad them, to "
            f"{before * context.size} in all"
        )
    # The first process receives zeros, the value of keys before a sequence.
    longer = with_neighbours(context, [key], tokens, before, 0)[0] if before else key
    offsets = None
    if sequence_offsets is not None:
        first = context.rank * own - before
        # Offsets begin with 0: keys before the first sequence form one whose results are dropped.
        offsets = torch.nn.functional.pad((sequence_offsets - first).clamp(0, own + before), (1, 0))
    return convolve(longer, weights, sequence_offsets=offsets).narrow(tokens, before, own).contiguous()
