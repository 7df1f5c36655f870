"""Passes of MoBA on externally computed mean keys, outside of the registered operators."""

from typing import NamedTuple

import torch

from blockdiag.ops.moba.problem import MoBAProblem
from blockdiag.torch.ops.moba import operators as _moba_ops  # noqa: F401 - it registers the operators
from blockdiag.torch.ops.moba.call import ListArguments, ListResults


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

    def through_jax() -> torch.Tensor:
        from blockdiag.torch.ops.moba import through_jax as _moba_through_jax

        return _moba_through_jax.find_centroids(problem, who.names, key, key_mask, blocks)

    if not who.is_native or not key.is_cuda:
        return through_jax()
    from blockdiag.torch.ops.moba import native

    try:
        return native.find_centroids(problem, key, key_mask, blocks)
    except native.Unsupported:
        return through_jax()


def choose(who: Who, arguments: ListArguments, centroids: torch.Tensor) -> torch.Tensor:
    """Return the blocks that queries choose by mean keys, int32 [N, query_tokens, slots].

    Args:
        who: the implementations.
        arguments: the arguments of the call; keys are not read.
        centroids: mean keys of all blocks.
    """

    def through_jax() -> torch.Tensor:
        from blockdiag.torch.ops.moba import through_jax as _moba_through_jax

        return _moba_through_jax.choose(arguments, centroids)

    if not who.is_native or not arguments.query.is_cuda:
        return through_jax()
    from blockdiag.torch.ops.moba import native

    try:
        return native.choose(arguments, centroids)
    except native.Unsupported:
        return through_jax()


def make_lists(who: Who, arguments: ListArguments, chosen: torch.Tensor | None) -> ListResults:
    """Return the inputs of attention for the blocks that queries choose.

    Args:
        who: the implementations.
        arguments: the arguments of the call; keys are not read.
        chosen: the result of `choose`; None where no query chooses.
    """

    def through_jax() -> ListResults:
        from blockdiag.torch.ops.moba import through_jax as _moba_through_jax

        return _moba_through_jax.make_lists(arguments, chosen)

    if not who.is_native or not arguments.query.is_cuda:
        return through_jax()
    from blockdiag.torch.ops.moba import native

    try:
        return native.make_lists(arguments, chosen)
    except native.Unsupported:
        return through_jax()


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
