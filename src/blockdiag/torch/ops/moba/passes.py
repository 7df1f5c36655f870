"""Passes of MoBA on externally computed mean keys, outside of the registered operators."""

from typing import Any, NamedTuple

import torch

from blockdiag.ops.moba.problem import MoBAProblem
from blockdiag.torch.operator import Unsupported
from blockdiag.torch.ops.moba.operators import ListArguments, ListResults


class Who(NamedTuple):
    """The implementations that compute a call.

    Attributes:
        names: comma-separated names of implementations, as operators take them.
        is_native: whether the native kernels take the call on CUDA.
    """

    names: str
    is_native: bool


def find_centroids(
    who: Who, problem: MoBAProblem, key: torch.Tensor, key_mask: torch.Tensor | None, blocks: torch.Tensor
) -> torch.Tensor:
    """Return the mean keys of the blocks of a table, [num_blocks, K, parts, H], without a gradient.

    Args:
        who: the implementations.
        problem: the call that keys and table belong to.
        key, key_mask, blocks: [key_tokens, K, H], bool [key_tokens] or None, int32 [num_blocks, 4].
    """
    return _call("find_centroids", who.is_native and key.is_cuda, problem, who.names, key, key_mask, blocks)


def choose(who: Who, arguments: ListArguments, centroids: torch.Tensor, sequence_blocks: int) -> torch.Tensor:
    """Return the blocks that queries choose by mean keys, int32 [N, query_tokens, slots].

    Args:
        who: the implementations.
        arguments: the arguments of the call; keys are not read.
        centroids: mean keys of all blocks.
        sequence_blocks: number of blocks of one batch row's key axis, as in `MoBAProblem`. The arguments do not tell
            it, because their batch rows lie back to back.
    """
    return _call("choose", who.is_native and arguments.query.is_cuda, arguments, centroids, sequence_blocks)


def make_lists(who: Who, arguments: ListArguments, chosen: torch.Tensor | None) -> ListResults:
    """Return the inputs of attention for the blocks that queries choose.

    Args:
        who: the implementations.
        arguments: the arguments of the call; keys are not read.
        chosen: the result of `choose`; None where no query chooses.
    """
    return _call("make_lists", who.is_native and arguments.query.is_cuda, arguments, chosen)


def attend(
    who: Who,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor | None,
    lists: ListResults,
    problem: MoBAProblem,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and log-sum-exp of packed operands, computed by the operators behind `moba_attention`."""
    operators = torch.ops.blockdiag
    operator = operators.moba_forward if who.is_native else operators.moba_forward_through_jax
    *tables_and_lists, _ = lists
    return operator(
        query, key, value, key_mask, *tables_and_lists, None, problem.block_size, problem.scale, problem.is_causal,
        True, who.names,
    )  # fmt: skip


def _call(method: str, is_native: bool, *arguments: Any) -> Any:
    """Call a method of the module `native`, or of `through_jax` where the kernels cannot compute the call."""
    if is_native:
        from blockdiag.torch.ops.moba import native

        try:
            return getattr(native, method)(*arguments)
        except Unsupported:
            pass
    from blockdiag.torch.ops.moba import through_jax

    return getattr(through_jax, method)(*arguments)
