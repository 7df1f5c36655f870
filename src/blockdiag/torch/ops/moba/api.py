"""MoBA, mixture of block attention, for torch: the public functions."""

import functools
from collections.abc import Sequence
from typing import Any, Literal, Unpack, overload

import torch

from blockdiag.interop.private_torch import may_have_tangents
from blockdiag.ops.moba.checks import check_moba_operands, count_sequence_blocks
from blockdiag.ops.moba.options import MoBAOptions
from blockdiag.ops.moba.problem import MOBA
from blockdiag.torch import dtensor_registration, nested
from blockdiag.torch.arguments import (
    autocast,
    check_names,
    check_tensors,
    forward_mode_error,
    refuse_tangents,
    who_computes,
)
from blockdiag.torch.context.parallel import ContextParallel, check_plain
from blockdiag.torch.ops.moba.operators import ListArguments, describe_lists
from blockdiag.torch.ops.moba.routing import Routing
from blockdiag.triton_kernels.block_diagonal.plans import takes_operands


@overload
def moba_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    block_size: int,
    top_k: int,
    via: Literal["jax"] | None = None,
    return_residual: Literal[False] = False,
    **options: Unpack[MoBAOptions[torch.Tensor, Routing, ContextParallel]],
) -> torch.Tensor: ...


@overload
def moba_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    block_size: int,
    top_k: int,
    via: Literal["jax"] | None = None,
    return_residual: Literal[True],
    **options: Unpack[MoBAOptions[torch.Tensor, Routing, ContextParallel]],
) -> tuple[torch.Tensor, torch.Tensor]: ...


def moba_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    block_size: int,
    top_k: int,
    scale: float | None = None,
    is_causal: bool = True,
    sequence_offsets: torch.Tensor | None = None,
    key_sequence_offsets: torch.Tensor | None = None,
    routing: Routing | None = None,
    key_mask: torch.Tensor | None = None,
    implementation: str | Sequence[str] | None = None,
    via: Literal["jax"] | None = None,
    context_parallel: ContextParallel | None = None,
    return_residual: bool = False,
) -> Any:
    """Compute mixture of block attention: each query attends to its own block and to the best-scoring other blocks.

    This is the PyTorch version of `blockdiag.moba_attention`, with the same arguments and meaning. On CUDA it launches
    the same Triton kernels on the current stream, without JAX, and never waits for the device. It consists of
    registered operators. Autograd, `torch.compile` with full graphs and dynamic shapes, CUDA graphs, autocast,
    activation checkpointing, and DTensors sharded over batch or heads work.

    Gradients treat the routing as constant. The backward pass keeps the arguments, the output, its log-sum-exp, and the
    routing as lists. Results are bitwise repeatable. Second derivatives raise a NotImplementedError.

    Args:
        query: [B, T, N, H], B sequences of T tokens; or packed [T, N, H], one sequence or those that
            `sequence_offsets` describes; or a jagged nested tensor, as key and value are then. float16, bfloat16,
            float32 or float64, on a CPU or a CUDA device. Tensors that are not contiguous or not aligned to 16 bytes
            are copied.
        key, value: [B, S, K, H] or [S, K, H] in the dtype of `query`, N a multiple of K. Where S differs from T, the
            last query has the position of the last key. In causal calls, a query before the first key sees nothing
            and gives 0.
        block_size: keys of a block, a multiple of 16 from 16 to 4096.
        top_k: blocks that a query sees, its own included, 1..64.
        scale: positive factor on the scores of the softmax; 1 / sqrt(H) when None.
        is_causal: whether a token attends only to itself and earlier tokens.
        sequence_offsets: int32 [num_sequences + 1], only for packed tensors; see the JAX function. Values are checked
            on the CPU. On a GPU a check would wait for the device, so they are handled as JAX handles traced ones.
        key_sequence_offsets: int32 [num_sequences + 1], the same for rows of `key` and `value`; `sequence_offsets` when
            None.
        routing: the blocks that each query sees, instead of the best-scoring ones; from `moba_routing`, or made or
            edited by hand. Its indices are [B, T, N, top_k] or [T, N, top_k]. See `Routing`.
        key_mask: bool [B, S] or [S], True for keys that take part. Other keys are not seen and do not count in the mean
            key of their block. Blocks without keys are not chosen.
        implementation: which implementation runs. None means the native kernels on CUDA where they support the call,
            and "xla" through JAX otherwise. "triton" means the kernels, which run in a slow interpreter on a CPU.
            "reference" or "xla" means JAX's implementation of that name. A sequence means the first that supports the
            call.
        via: "jax" to go through DLPack and JAX on CUDA as well.
        context_parallel: the processes that share the tokens of each sequence, and their strategy; see
            `ContextParallel`. Operands and `key_mask` are then plain tensors of the process's tokens, and
            `sequence_offsets` those of all tokens. `torch.compile` runs such a call eagerly between graphs, and refuses
            it with `fullgraph=True`.
        return_residual: whether to return the log-sum-exp too.

    Under autocast, query, key and value are cast to its dtype first.

    Returns:
        The attention output, contiguous, in the shape and dtype of `query`. With `return_residual` also the natural
        logarithm of the sum of the exponentials of the scaled scores seen, float32 [B, T, N] or [T, N] (float64 for
        float64 tensors; -inf where a query sees nothing). Both are differentiable.

    Raises:
        ValueError: an argument is wrong; the message names it, its value and the remedy.
        NotImplementedError: none of the requested implementations can compute this call; the message says why.

    References:
        Lu et al., "MoBA: Mixture of Block Attention for Long-Context LLMs" (2025). Small blocks, and lists of queries
        by block: Xiao et al., "Optimizing Mixture of Block Attention" (FlashMoBA, 2025).

    Example:
        >>> import torch
        >>> from blockdiag.torch import moba_attention
        >>> query, key, value = torch.randn(3, 2, 100, 4, 32)
        >>> moba_attention(query, key, value, block_size=16, top_k=3).shape
        torch.Size([2, 100, 4, 32])
    """
    check_tensors(query=query, key=key, value=value)
    query, key, value = autocast(query, key, value)
    if context_parallel is not None:
        if routing is not None or key_sequence_offsets is not None:
            raise ValueError("`context_parallel` does not support `routing` or `key_sequence_offsets`; leave them out")
        check_plain(context_parallel, query=query, key=key, value=value)
        check_moba_operands(query, key, value)
        # Imported lazily: the module is kept out of graphs by `torch.compiler.disable`, which imports torch's compiler.
        from blockdiag.torch.ops.moba.context import attend_to_shared_tokens
        from blockdiag.torch.ops.moba.passes import Who

        options: Any = {"block_size": block_size, "top_k": top_k, "scale": scale, "is_causal": is_causal}
        attend = functools.partial(
            moba_attention, implementation=implementation, via=via, return_residual=True, **options
        )
        results = attend_to_shared_tokens(
            context_parallel, attend, Who(*_who_computes(query, implementation, via)), query, key, value,
            sequence_offsets, key_mask, options, return_residual=return_residual,
        )  # fmt: skip
        return results if return_residual else results[0]
    if query.is_nested or key.is_nested or value.is_nested:
        options = {
            "block_size": block_size, "top_k": top_k, "scale": scale, "is_causal": is_causal, "routing": routing,
            "key_mask": key_mask, "implementation": implementation, "via": via,
        }  # fmt: skip
        return _attend_jagged(query, key, value, sequence_offsets, key_sequence_offsets, return_residual, options)
    if may_have_tangents():
        refuse_tangents((query, key, value), functools.partial(forward_mode_error, "MoBA", "moba_attention"))
    names, is_native = _who_computes(query, implementation, via)
    given: tuple[Any, int, int] = (None, 0, 0)
    if routing is not None:
        if not isinstance(routing, Routing):
            raise ValueError(
                f"`routing` must be a blockdiag.torch.Routing or None, got {type(routing)}; make one with "
                "moba_routing, Routing.from_pattern or Routing.from_block_lists"
            )
        check_tensors(**{"routing.indices": routing.indices})
        given = (routing.indices, routing.block_size, routing.num_blocks)
    # The operands are detached because the routing is constant under differentiation.
    arguments = ListArguments(
        query.detach(), key.detach(), key_mask, sequence_offsets, key_sequence_offsets, *given,
        block_size, top_k, is_causal, names,
    )  # fmt: skip
    arguments, scale = _checked(arguments, value, scale)
    if type(query) is not torch.Tensor:
        dtensor_registration.prepare(query)
    operators = torch.ops.blockdiag
    *lists, own = (operators.moba_lists if is_native else operators.moba_lists_through_jax)(*arguments)
    has_own = is_causal and routing is not None
    output, log_sum = (operators.moba_forward if is_native else operators.moba_forward_through_jax)(
        query, key, value, arguments.key_mask, *lists, own if has_own else None, arguments.block_size, scale,
        arguments.is_causal, sequence_offsets is not None, names,
    )  # fmt: skip
    return (output, log_sum) if return_residual else output


def _attend_jagged(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sequence_offsets: torch.Tensor | None,
    key_sequence_offsets: torch.Tensor | None,
    return_residual: bool,
    options: dict[str, Any],
) -> Any:
    """Compute `moba_attention` of jagged tensors from their packed tokens."""
    given = key_sequence_offsets if sequence_offsets is None else sequence_offsets
    values, (offsets, key_offsets, _) = nested.unpack(given, query=query, key=key, value=value)
    nested.check_same_sequences(key=key, value=value)
    output, log_sum = moba_attention(
        *values, sequence_offsets=offsets, key_sequence_offsets=key_offsets, return_residual=True, **options
    )
    output, log_sum = nested.repack(output, query), nested.repack(log_sum, query)
    return (output, log_sum) if return_residual else output


def moba_routing(
    query: torch.Tensor,
    key: torch.Tensor,
    *,
    block_size: int,
    top_k: int,
    is_causal: bool = True,
    sequence_offsets: torch.Tensor | None = None,
    key_sequence_offsets: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
    implementation: str | Sequence[str] | None = None,
    via: Literal["jax"] | None = None,
) -> Routing:
    """Return the blocks that each query of each head sees in `moba_attention` with the same arguments.

    The result can be inspected, converted, edited, and passed to `moba_attention`, also in several layers. It is
    constant under differentiation.

    Args:
        query, key, block_size, top_k, is_causal, sequence_offsets, key_sequence_offsets, key_mask, implementation, via:
            see `moba_attention`.

    Returns:
        A `Routing` with indices int32 [B, T, N, top_k] or [T, N, top_k], which number blocks within the sequence. In
        causal calls the query's own block comes first. The other blocks follow by descending score; of equal scores,
        the later block comes first. The remaining entries are -1.

    Raises:
        ValueError: an argument is wrong; the message names it, its value and the remedy.
        NotImplementedError: none of the requested implementations can compute this call; the message says why.

    References:
        Lu et al., "MoBA: Mixture of Block Attention for Long-Context LLMs" (2025).

    Example:
        >>> import torch
        >>> from blockdiag.torch import moba_routing
        >>> moba_routing(*torch.randn(2, 100, 4, 32), block_size=16, top_k=3).indices.shape
        torch.Size([100, 4, 3])
    """
    check_tensors(query=query, key=key)
    query, key = autocast(query, key)
    # Jagged tensors are refused: the routing would index packed tokens, and the caller has to know that.
    nested.refuse(query=query, key=key)
    names, is_native = _who_computes(query, implementation, via)
    arguments = ListArguments(
        query.detach(), key.detach(), key_mask, sequence_offsets, key_sequence_offsets, None, 0, 0,
        block_size, top_k, is_causal, names,
    )  # fmt: skip
    arguments, _ = _checked(arguments)
    if type(query) is not torch.Tensor:
        dtensor_registration.prepare(query)
    operator = torch.ops.blockdiag.moba_routing if is_native else torch.ops.blockdiag.moba_routing_through_jax
    indices = operator(*arguments[:5], *arguments[8:])
    return Routing(indices, arguments.block_size, count_sequence_blocks(key.shape[-3], arguments.block_size))


def _checked(
    arguments: ListArguments, value: torch.Tensor | None = None, scale: float | None = None
) -> tuple[ListArguments, float | None]:
    """Check the arguments and convert options and scale to the types of the operators' schemas.

    Checked before the operators, whose schemas would reject other types with a generic message. In a compiled call the
    operators check when they run.
    """
    names = ("key_mask", "sequence_offsets", "key_sequence_offsets")
    check_tensors(**{name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None})
    if torch.compiler.is_compiling():
        return arguments, scale
    problem = describe_lists(arguments, value, scale)
    arguments = arguments._replace(
        block_size=problem.block_size, top_k=int(arguments.top_k), is_causal=problem.is_causal
    )
    return arguments, problem.scale


def _who_computes(
    query: torch.Tensor, implementation: str | Sequence[str] | None, via: Literal["jax"] | None
) -> tuple[str, bool]:
    """Return comma-separated names of implementations, and whether the native operators take the call."""
    names, is_native = who_computes(implementation, via)
    if implementation is not None and not torch.compiler.is_compiling():
        check_names(implementation, names, MOBA)
    if query.is_cuda and query.ndim > 0:
        is_native = is_native and takes_operands(str(query.dtype).removeprefix("torch."), query.shape[-1]) is None
    return ",".join(names), is_native
