"""MoBA over a paged cache for torch: the public function and the registered operators that it calls."""

from collections.abc import Sequence
from typing import Any, Literal, Unpack, overload

import torch

from blockdiag.common import validation
from blockdiag.ops.moba.checks import check_moba_block_size
from blockdiag.ops.moba_paged.options import MoBAPagedOptions
from blockdiag.torch import dtensor_registration, nested
from blockdiag.torch.ops.moba_paged.call import TENSORS, MoBAPagedArguments, describe
from blockdiag.torch.ops.paged.api import Scale, takes
from blockdiag.torch.ops.paged.call import (
    as_tensor_scale,
    check_devices,
    check_via,
    names_of,
    refuse_tangents,
    wants_gradient,
)
from blockdiag.torch.ops.paged.operators import define_attention, fake_results

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
    """Attend from the last few queries of each sequence to a paged KV cache, by mixture of block attention.

    This is the PyTorch version of `blockdiag.moba_paged_attention`, with the same arguments and meaning. On CUDA it
    launches the same Triton kernels on the current stream, without JAX, and never waits for the device. A CUDA graph
    that holds a call reads new lengths, tables, pages and mean keys with every replay. It is a registered operator, so
    `torch.compile` with full graphs and dynamic shapes works. Results are bitwise repeatable. Autocast has no effect.

    This function is for inference: a derivative raises a TypeError. DTensors work as in `paged_attention`.

    Args:
        query: [B, T, N, H], T queries of each sequence, T small; see `paged_attention` for dtypes and devices.
        key_pages, value_pages, page_table, kv_lengths, query_lengths: the cache and its lengths, see `paged_attention`.
        key_centroids: float32 [B, max_blocks, K, H], contiguous, the mean key of each complete block of each sequence.
            max_blocks is at least (S - 1) // block_size, for S keys that a sequence may have. `append_to_pages` updates
            these means.
        block_size: keys of a block, a multiple of 16 from 16 to 4096; independent of the size of pages.
        top_k: blocks that a query sees, its own included, 1..64.
        scale: positive factor on the scores of the softmax; 1 / sqrt(H) when None.
        key_scale, value_scale, query_scale: factors of keys, values and queries, see `paged_attention`.
        implementation, via: who computes it, see `paged_attention`.
        return_residual: whether to return the log-sum-exp too.

    Returns:
        The output [B, T, N, V] in the dtype of `query`, or bfloat16 for 8-bit queries. With `return_residual` also the
        natural logarithm of the sum of the exponentials of the scaled scores seen, float32 [B, T, N] (float64 for
        float64 queries).

    Raises:
        ValueError: an argument is wrong; the message names it, its value and the remedy.
        NotImplementedError: none of the implementations asked for can compute this call; the message says why.
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
    check_via(via)
    names = names_of(implementation)
    is_compiling = torch.compiler.is_compiling()
    if not is_compiling:
        scale = scale if scale is None or type(scale) is float else validation.check_scale(scale, 1)
    arguments = MoBAPagedArguments(
        query, key_pages, value_pages, page_table, kv_lengths, key_centroids, query_lengths,
        key_scale, value_scale, query_scale, block_size, top_k, scale, ",".join(names),
    )  # fmt: skip
    refuse_tangents("moba_paged_attention", arguments.tensors)
    # The first supported name of a sequence wins, so the native operators apply only if "triton" comes first.
    is_native = via is None and (not names or names[0] == "triton")
    if not is_compiling:
        if is_native and isinstance(query, torch.Tensor) and query.is_cuda:
            results = _attend_natively(arguments)
            if results is not None:
                return results if return_residual else results[0]
        arguments = _checked(arguments, implementation)
    if type(query) is not torch.Tensor:
        dtensor_registration.prepare(query)
    if is_native and query.is_cuda:
        is_native = takes(query, key_pages, value_pages)
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
        not native.is_plain(*tensors)
        or not _PLAIN_OPTIONS.issuperset(map(type, arguments[TENSORS:]))
        or wants_gradient(tensors)
    ):
        return None
    try:
        return native.attend(arguments)
    except native.Unsupported:
        return None
    except RuntimeError:
        # Reading the shape of a nested tensor without the jagged layout raises a RuntimeError.
        nested.refuse(query=arguments.query)
        raise


def _checked(arguments: MoBAPagedArguments, implementation: str | Sequence[str] | None) -> MoBAPagedArguments:
    """Check the arguments and convert the options to the types of the operator's schema."""
    if implementation is not None and arguments.implementation != "triton":
        from blockdiag.common.dispatch import normalise_implementation
        from blockdiag.ops.moba_paged.problem import MOBA_PAGED

        normalise_implementation(implementation, MOBA_PAGED)
    describe(arguments)
    return arguments._replace(block_size=check_moba_block_size(arguments.block_size), top_k=int(arguments.top_k))


# The operators

_SCHEMA = (
    "(Tensor query, Tensor key_pages, Tensor value_pages, Tensor? page_table, Tensor kv_lengths, "
    "Tensor key_centroids, Tensor? query_lengths, Tensor? key_scale, Tensor? value_scale, Tensor? query_scale, "
    "int block_size, int top_k, float? scale, str implementation) -> (Tensor, Tensor)"
)

# Module-level, because deleting a library removes its operators.
_library = torch.library.Library("blockdiag", "FRAGMENT")


def _native(*values: Any) -> tuple[torch.Tensor, torch.Tensor]:
    from blockdiag.torch.ops.moba_paged import native

    try:
        return native.attend(MoBAPagedArguments(*values))
    except native.Unsupported:
        return _through_jax(*values)


def _through_jax(*values: Any) -> tuple[torch.Tensor, torch.Tensor]:
    from blockdiag.torch.ops.moba_paged import through_jax

    return through_jax.attend(MoBAPagedArguments(*values))


def _fake(*values: Any) -> tuple[torch.Tensor, torch.Tensor]:
    arguments = MoBAPagedArguments(*values)
    check_devices(**dict(zip(MoBAPagedArguments._fields, arguments.tensors, strict=False)))
    return fake_results(arguments.query, arguments.value_pages)


define_attention(_library, "moba_paged_attention", _SCHEMA, _fake, _native, _through_jax)
