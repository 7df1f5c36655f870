"""MoBA over a paged cache for torch: the public function."""

import functools
from collections.abc import Sequence
from typing import Any, Literal, Unpack, overload

import torch

from blockdiag.common import validation
from blockdiag.interop.private_torch import may_have_tangents
from blockdiag.ops.moba.checks import check_moba_block_size
from blockdiag.ops.moba_paged.options import MoBAPagedOptions
from blockdiag.ops.moba_paged.problem import MOBA_PAGED
from blockdiag.torch import dtensor_registration, nested
from blockdiag.torch.arguments import (
    check_names,
    inference_error,
    is_plain,
    refuse_tangents,
    wants_gradient,
    who_computes,
)
from blockdiag.torch.operator import Unsupported
from blockdiag.torch.ops.moba_paged.operators import TENSORS, MoBAPagedArguments, describe
from blockdiag.torch.ops.paged.api import Scale, takes
from blockdiag.torch.ops.paged.operators import as_tensor_scale
from blockdiag.triton_kernels.moba_paged.plans import MOST_COLUMNS

_SCALES = ("key_scale", "value_scale", "query_scale")

# Types of options that are safe in a cache key before they are checked.
_PLAIN_OPTIONS = {int, float, str, type(None)}


@overload
def moba_paged_attention(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    page_table: torch.Tensor | None,
    kv_lengths: torch.Tensor,
    key_centroids: torch.Tensor,
    *,
    block_size: int,
    top_k: int,
    via: Literal["jax"] | None = None,
    return_residual: Literal[False] = False,
    **options: Unpack[MoBAPagedOptions[torch.Tensor]],
) -> torch.Tensor: ...


@overload
def moba_paged_attention(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    page_table: torch.Tensor | None,
    kv_lengths: torch.Tensor,
    key_centroids: torch.Tensor,
    *,
    block_size: int,
    top_k: int,
    via: Literal["jax"] | None = None,
    return_residual: Literal[True],
    **options: Unpack[MoBAPagedOptions[torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]: ...


def moba_paged_attention(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    page_table: torch.Tensor | None,
    kv_lengths: torch.Tensor,
    key_centroids: torch.Tensor,
    *,
    block_size: int,
    top_k: int,
    query_lengths: torch.Tensor | None = None,
    scale: float | None = None,
    key_scale: Scale | None = None,
    value_scale: Scale | None = None,
    query_scale: Scale | None = None,
    implementation: str | Sequence[str] | None = None,
    via: Literal["jax"] | None = None,
    return_residual: bool = False,
) -> Any:
    """Compute mixture of block attention of the last queries of each sequence to a paged cache.

    This is the PyTorch version of `blockdiag.moba_paged_attention`, with the same arguments and meaning. On CUDA it
    launches the same Triton kernels on the current stream, without JAX, and never waits for the device. A CUDA graph
    that holds a call reads new lengths, tables, pages and mean keys with every replay. It is a registered operator, so
    `torch.compile` with full graphs and dynamic shapes works. Results are bitwise repeatable. Autocast has no effect.

    This function is for inference: a derivative raises a TypeError. DTensors work as in `paged_attention`.

    Args:
        query: [B, T, N, H], T queries of each sequence, from one to whole prompts; see `paged_attention` for dtypes and
            devices.
        key_pages, value_pages, page_table, kv_lengths, query_lengths: the cache and its lengths, see `paged_attention`.
        key_centroids: float32 [B, max_blocks, K, H], contiguous, the mean key of each complete block of each sequence.
            max_blocks is at least (S - 1) // block_size, for S keys that a sequence may have. `append_to_pages` updates
            these means.
        block_size: keys of a block, a multiple of 16 from 16 to 4096; independent of the size of pages.
        top_k: blocks that a query sees, its own included, 1..64.
        scale: positive factor on the scores of the softmax; 1 / sqrt(H) when None.
        key_scale, value_scale, query_scale: factors of keys, values and queries, see `paged_attention`.
        implementation, via: which implementation runs, see `paged_attention`.
        return_residual: whether to return the log-sum-exp too.

    Returns:
        The output [B, T, N, V] in the dtype of `query`, or bfloat16 for 8-bit queries. With `return_residual` also the
        natural logarithm of the sum of the exponentials of the scaled scores seen, float32 [B, T, N] (float64 for
        float64 queries).

    Raises:
        ValueError: an argument is wrong; the message names it, its value and the remedy.
        NotImplementedError: none of the requested implementations can compute this call; the message says why.
        TypeError: the call is differentiated.

    References:
        Lu et al., "MoBA: Mixture of Block Attention for Long-Context LLMs" (2025), over the pages of Kwon et al.,
        "Efficient Memory Management for Large Language Model Serving with PagedAttention" (2023).

    Example:
        >>> import torch
        >>> from blockdiag.torch import moba_paged_attention
        >>> query, (key, value) = torch.randn(1, 1, 4, 32), torch.randn(2, 1, 100, 2, 32)
        >>> key_centroids = key[:, :96].reshape(1, 6, 16, 2, 32).mean(2)
        >>> kv_lengths = torch.tensor([90], dtype=torch.int32)
        >>> moba_paged_attention(query, key, value, None, kv_lengths, key_centroids, block_size=16, top_k=3).shape
        torch.Size([1, 1, 4, 32])
    """
    names, is_native = who_computes(implementation, via)
    is_compiling = torch.compiler.is_compiling()
    if not is_compiling:
        scale = scale if scale is None or type(scale) is float else validation.check_scale(scale, 1)
    arguments = MoBAPagedArguments(
        query, key_pages, value_pages, page_table, kv_lengths, key_centroids, query_lengths,
        key_scale, value_scale, query_scale, block_size, top_k, scale, ",".join(names),
    )  # fmt: skip
    if may_have_tangents():
        refuse_tangents(arguments.tensors, functools.partial(inference_error, "moba_paged_attention"))
    if not is_compiling:
        if is_native and isinstance(query, torch.Tensor) and query.is_cuda:
            results = _attend_natively(arguments)
            if results is not None:
                return results if return_residual else results[0]
        check_names(implementation, names, MOBA_PAGED)
        # Checked before the operator, whose schema would reject other types with a generic message.
        describe(arguments)
        arguments = arguments._replace(block_size=check_moba_block_size(block_size), top_k=int(top_k))
    if type(query) is not torch.Tensor:
        dtensor_registration.prepare(query)
    if is_native and query.is_cuda:
        is_native = takes(query, key_pages, value_pages, most=MOST_COLUMNS)
    scales = {name: as_tensor_scale(getattr(arguments, name), query) for name in _SCALES}
    operators = torch.ops.blockdiag
    operator = operators.moba_paged_attention if is_native else operators.moba_paged_attention_through_jax
    output, log_sum = operator(*arguments._replace(**scales))
    return (output, log_sum) if return_residual else output


def _attend_natively(arguments: MoBAPagedArguments) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Run the call on plain eager CUDA tensors without the dispatcher; None if this path does not apply."""
    from blockdiag.torch.ops.moba_paged import native

    tensors = [one for one in arguments.tensors if type(one) not in (int, float)]
    if (
        not is_plain(*tensors)
        or not _PLAIN_OPTIONS.issuperset(map(type, arguments[TENSORS:]))
        or wants_gradient(tensors)
    ):
        return None
    try:
        return native.attend(arguments)
    except Unsupported:
        return None
    except RuntimeError:
        # Reading the shape of a nested tensor without the jagged layout raises a RuntimeError.
        nested.refuse(query=arguments.query)
        raise
