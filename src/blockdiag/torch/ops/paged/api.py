"""Paged attention for torch, in which queries attend to a paged cache: the public functions."""

import functools
from collections.abc import Sequence
from typing import Any, Literal, Unpack, overload

import torch

from blockdiag.common import validation
from blockdiag.interop.private_torch import may_have_tangents
from blockdiag.ops.paged.checks import check_query_dtype, check_soft_cap, check_window
from blockdiag.ops.paged.options import PagedOptions, Window
from blockdiag.ops.paged.problem import PAGED
from blockdiag.torch import dtensor_registration, nested
from blockdiag.torch.arguments import (
    check_names,
    check_plain_tensors,
    inference_error,
    is_plain,
    refuse_tangents,
    wants_gradient,
    who_computes,
)
from blockdiag.torch.operator import Unsupported
from blockdiag.torch.ops.paged.operators import PagedArguments, as_tensor_scale, describe
from blockdiag.triton_kernels.paged.plans import MOST_COLUMNS, takes_cache

type Scale = torch.Tensor | float

# Types of options that are safe in a cache key before they are checked.
_PLAIN_OPTIONS = {int, float, bool, str, type(None)}


@overload
def paged_attention(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor | None,
    page_table: torch.Tensor | None,
    kv_lengths: torch.Tensor,
    *,
    via: Literal["jax"] | None = None,
    return_residual: Literal[False] = False,
    **options: Unpack[PagedOptions[torch.Tensor]],
) -> torch.Tensor: ...


@overload
def paged_attention(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor | None,
    page_table: torch.Tensor | None,
    kv_lengths: torch.Tensor,
    *,
    via: Literal["jax"] | None = None,
    return_residual: Literal[True],
    **options: Unpack[PagedOptions[torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]: ...


def paged_attention(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor | None,
    page_table: torch.Tensor | None,
    kv_lengths: torch.Tensor,
    *,
    value_dim: int | None = None,
    query_lengths: torch.Tensor | None = None,
    query_offsets: torch.Tensor | None = None,
    max_query_length: int | None = None,
    scale: float | None = None,
    is_causal: bool = True,
    local_window_size: Window | None = None,
    logits_soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    key_scale: Scale | None = None,
    value_scale: Scale | None = None,
    query_scale: Scale | None = None,
    query_dtype: torch.dtype | str | None = None,
    num_splits: int | None = None,
    split_size: int | None = None,
    implementation: str | Sequence[str] | None = None,
    via: Literal["jax"] | None = None,
    return_residual: bool = False,
) -> Any:
    """Compute attention of the last queries of each sequence to its keys and values in a paged cache.

    This is the PyTorch version of `blockdiag.paged_attention`, with the same arguments and meaning. On CUDA it launches
    the same Triton kernels on the current stream, without JAX. It never waits for the device, because shapes and
    options alone determine how a call is computed. A CUDA graph that holds a call therefore reads new lengths, tables
    and pages with every replay.

    It is a registered operator, so `torch.compile` with full graphs and dynamic shapes works. Results are bitwise
    repeatable. Autocast has no effect, because caches have dtypes of their own.

    This function is for inference: a derivative raises a TypeError. DTensors may be sharded over batch rows and heads,
    with the cache sharded like `query`. A cache is never moved: a ValueError says how it has to be placed.

    Args:
        query: [B, T, N, H], T queries of each sequence; or packed [rows, N, H] with `query_offsets`, any number of
            queries of each, such as prompts beside decoding sequences. float16, bfloat16, float32, float64,
            float8_e4m3fn or float8_e5m2, on a CPU or a CUDA device. A query that is not contiguous or not aligned to
            16 bytes is copied.
        key_pages, value_pages: the pool, [P, page_size, K, H] and [P, page_size, K, V], contiguous (a cache is never
            copied). Each has the dtype of `query` or an 8-bit dtype: float8_e4m3fn, float8_e5m2 or int8. int8 needs a
            scale. With an 8-bit query both must be 8-bit floats. With ``value_pages=None`` the values are the first
            `value_dim` columns of the keys, as in MLA's latent caches, and `key_scale` is a factor on both.
        value_dim: V without `value_pages`, 1 to H; otherwise None.
        page_table: int32 [B, max_pages], page numbers. On the CPU entries that hold keys are checked. On a GPU a check
            would wait for the device, so entries are clipped to [0, P). None for a contiguous cache, [B, S, K, H].
        kv_lengths: int32 [B], number of keys of each sequence, including the new tokens. Checked on the CPU, clipped
            on a GPU.
        query_lengths: int32 [B], how many of the T queries each sequence has, counted from the first; all when None.
            Rows beyond give 0 and -inf.
        query_offsets: int32 [B + 1], for packed queries: sequence b has rows [offsets[b], offsets[b + 1]). Rows beyond
            the last offset give 0 and -inf.
        max_query_length: upper bound on the queries of a packed sequence; no bound when None. A bound of at most
            64 / (N / K) makes calls faster. A longer sequence is a ValueError on the CPU; on a GPU its results are
            right or NaN, or 0 if the bound is 0.
        scale: positive factor on the scores; 1 / sqrt(H) when None.
        is_causal: whether a query sees no keys after its own position.
        local_window_size: maximum number of keys that a query sees before and after its own position: one integer, or
            (left, right), None for no bound.
        logits_soft_cap: scores s become ``cap * tanh(s / cap)``; positive.
        sinks: [N], floating, an additional logit of each query head in the softmax, without a value.
        key_scale, value_scale: factors of keys and values: a number, or float32 of shape [], [B, K] or
            [P, page_size, K], one factor for each token and head. A scalar tensor is expanded in every call by one
            additional small kernel; a number and [B, K] are not.
        query_scale: factor of queries: a number, or float32 of shape [] or [B, K], by key head.
        query_dtype: float8_e4m3fn or float8_e5m2, to which queries are rounded, for caches of 8-bit floats; see the
            JAX function. Two small kernels round them.
        num_splits, split_size: how the keys of each sequence are divided; see the JAX function.
        implementation: which implementation runs. None means the native kernels on CUDA where they support the call,
            and "xla" through JAX otherwise. "triton" means the kernels, which run in a slow interpreter on a CPU.
            "reference" or "xla" means JAX's implementation of that name. A sequence means the first that supports the
            call.
        via: "jax" to go through DLPack and JAX on CUDA as well.
        return_residual: whether to return the log-sum-exp too, which `merge_attention_states` needs to merge results.

    Returns:
        The output [B, T, N, V] or [rows, N, V] in the dtype of `query`, or bfloat16 if `query` is 8-bit. With
        `return_residual` also the natural logarithm of the sum of the exponentials of the scores seen, float32 [B, T,
        N] or [rows, N] (float64 for float64 queries).

    Raises:
        ValueError: an argument is wrong; the message names it, its value and the remedy.
        NotImplementedError: none of the requested implementations can compute this call; the message says why.
        TypeError: the call is differentiated.

    References:
        Pages: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention" (2023).
        Splits: Flash-Decoding of Dao et al. (2023). Soft cap: Gemma 2 (2024). Sinks: gpt-oss (2025). Page layout: NHD
        of FlashInfer, Ye et al. (2025). Latent caches: multi-head latent attention of DeepSeek-V2 (2024).

    Example:
        >>> import torch
        >>> from blockdiag.torch import paged_attention
        >>> query, (key_pages, value_pages) = torch.randn(2, 1, 8, 64), torch.randn(2, 10, 16, 2, 64)
        >>> page_table = torch.tensor([[7, 1, 4], [0, 9, 9]], dtype=torch.int32)
        >>> kv_lengths = torch.tensor([40, 3], dtype=torch.int32)
        >>> paged_attention(query, key_pages, value_pages, page_table, kv_lengths).shape
        torch.Size([2, 1, 8, 64])
    """
    names, is_native = who_computes(implementation, via)
    is_compiling = torch.compiler.is_compiling()
    if not is_compiling:
        scale = scale if scale is None or type(scale) is float else validation.check_scale(scale, 1)
        if local_window_size is not None:
            check_window(local_window_size, True, 1, 1)
    wanted = None
    if query_dtype is not None:
        wanted, query = _rounded_query(query, query_dtype, key_pages, value_pages)
    sizes: Any = local_window_size
    left, right = sizes if isinstance(sizes, (tuple, list)) else (sizes, sizes)
    arguments = PagedArguments(
        query, key_pages, value_pages, page_table, kv_lengths, query_lengths, query_offsets, sinks,
        key_scale, value_scale, query_scale, value_dim, max_query_length, scale, is_causal, left, right,
        logits_soft_cap, num_splits, split_size, ",".join(names),
    )  # fmt: skip
    if may_have_tangents():
        refuse_tangents(arguments.tensors, functools.partial(inference_error, "paged_attention"))
    if not is_compiling:
        if is_native and isinstance(query, torch.Tensor) and query.is_cuda:
            results = _attend_natively(arguments)
            if results is not None:
                return _returned(results, wanted, return_residual)
        check_names(implementation, names, PAGED)
        arguments = _checked(arguments)
    if type(query) is not torch.Tensor:
        dtensor_registration.prepare(query)
    if is_native and query.is_cuda:
        is_native = takes(query, key_pages, value_pages, value_dim)
    scales = {name: as_tensor_scale(getattr(arguments, name), query) for name in _SCALES}
    operators = torch.ops.blockdiag
    operator = operators.paged_attention if is_native else operators.paged_attention_through_jax
    return _returned(operator(*arguments._replace(**scales)), wanted, return_residual)


def _rounded_query(query: Any, query_dtype: Any, key_pages: Any, value_pages: Any) -> tuple[torch.dtype | None, Any]:
    """Return the dtype of the output if rounding changes it, and the query, rounded to `query_dtype`."""
    if not all(isinstance(x, torch.Tensor) for x in (query, key_pages, value_pages) if x is not None):
        return None, query  # the checks of the call name what is no tensor
    dtype = getattr(torch, check_query_dtype(query_dtype, query, key_pages, value_pages))
    if query.dtype == dtype:
        return None, query
    largest = torch.finfo(dtype).max
    return query.dtype, query.clamp(-largest, largest).to(dtype)


def _returned(results: Any, dtype: torch.dtype | None, return_residual: bool) -> Any:
    """Return what the caller asked for; the output is converted to `dtype` unless it is None."""
    output, log_sum = results
    output = output if dtype is None else output.to(dtype)
    return (output, log_sum) if return_residual else output


_SCALES = ("key_scale", "value_scale", "query_scale")


def takes(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor | None,
    value_dim: int | None = None,
    *,
    most: tuple[int, int] = MOST_COLUMNS,
) -> bool:
    """Return whether kernels that take up to `most` columns support these dtypes and head dimensions."""
    values = key_pages if value_pages is None else value_pages
    dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in (query, key_pages, values)]
    size = values.shape[-1] if value_dim is None else value_dim
    return takes_cache(dtypes[0], dtypes[1], dtypes[2], query.shape[-1], size, most=most) is None


def _attend_natively(arguments: PagedArguments) -> tuple[torch.Tensor, ...] | None:
    """Run the call on plain eager CUDA tensors without the dispatcher; None if this path does not apply."""
    from blockdiag.torch.ops.paged import native

    tensors = [one for one in arguments.tensors if type(one) not in (int, float)]
    options = arguments[len(arguments.tensors) :]
    if not is_plain(*tensors) or not _PLAIN_OPTIONS.issuperset(map(type, options)) or wants_gradient(tensors):
        return None
    try:
        return native.attend(arguments)
    except Unsupported:
        return None
    except RuntimeError:
        # Reading the shape of a nested tensor without the jagged layout raises a RuntimeError.
        nested.refuse(query=arguments.query)
        raise


def _checked(arguments: PagedArguments) -> PagedArguments:
    """Check the arguments and convert the options to the types of the operator's schema.

    Checked before the operator, whose schema would reject other types with a generic message. In a compiled call the
    operator checks when it runs.
    """
    problem = describe(arguments)
    return arguments._replace(
        value_dim=validation.as_index(arguments.value_dim),
        max_query_length=validation.as_index(arguments.max_query_length),
        is_causal=bool(arguments.is_causal),
        window_left=validation.as_index(arguments.window_left),
        window_right=validation.as_index(arguments.window_right),
        logits_soft_cap=check_soft_cap(arguments.logits_soft_cap),
        num_splits=None if arguments.num_splits is None else problem.num_splits,
        split_size=problem.split_size,
    )


def merge_attention_states(
    outputs: torch.Tensor | Sequence[torch.Tensor], lses: torch.Tensor | Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention to several sets of keys into attention to all of them, weighted by their log-sum-exps.

    This is the PyTorch version of `blockdiag.merge_attention_states`. With `paged_attention` it merges, for example, a
    prefix that sequences share with the rest of each sequence, or the results of several devices for one long cache.
    Each key must belong to one set only, and sinks to one of the calls only.

    It is computed in float32 (float64 for float64 outputs) by torch's own operations, so derivatives and
    `torch.compile` work.

    Args:
        outputs: the normalised output of each part: a sequence of tensors [..., V] of one shape and one floating
            dtype, or these stacked along a leading axis.
        lses: their natural log-sum-exps [...], floating, in the same form. A part whose log-sum-exp is -inf saw
            nothing, and its output is ignored, even if NaN.

    Returns:
        The merged output [..., V] in the dtype of `outputs`, and its log-sum-exp [...] in float32 (float64). They are 0
        and -inf where no part saw anything.

    Raises:
        ValueError: there are no parts, or their shapes or dtypes do not match.

    References:
        Merging by log-sum-exps: the cascade of FlashInfer, Ye et al. (2025), after the online softmax of Milakov and
        Gimelshein (2018).

    Example:
        >>> import torch
        >>> from blockdiag.torch import merge_attention_states
        >>> outputs, lses = torch.tensor([[1.0], [4.0]]), torch.tensor([2.0, 1.0]).log()
        >>> output, lse = merge_attention_states(outputs, lses)
        >>> print(round(output.item(), 4), round(lse.exp().item(), 4))
        2.0 3.0
    """
    output, log_sum = _stacked("outputs", outputs), _stacked("lses", lses)
    if log_sum.shape != output.shape[:-1] or output.ndim < 2 or output.shape[0] == 0:
        raise ValueError(
            f"`lses` must have the shape of `outputs` without its last axis, of at least one part, got "
            f"{tuple(log_sum.shape)} and {tuple(output.shape)}, parts first; [parts, B, T, N] belongs to "
            "[parts, B, T, N, V]"
        )
    for name, tensor in (("outputs", output), ("lses", log_sum)):
        if not tensor.is_floating_point():
            raise ValueError(f"`{name}` must have a floating dtype, got {tensor.dtype}; convert it")
    wide = torch.float64 if output.dtype == torch.float64 else torch.float32
    log_sum = log_sum.to(wide)
    is_empty = log_sum == -torch.inf
    is_all_empty = is_empty.all(dim=0)
    largest = torch.where(is_all_empty, 0, log_sum.detach().amax(dim=0))
    weights = torch.where(is_empty, 0, torch.where(is_empty, 0, log_sum - largest).exp())
    total = torch.where(is_all_empty, 1, weights.sum(dim=0))
    parts = torch.where(is_empty[..., None], 0, output.to(wide))
    merged = (parts * (weights / total)[..., None]).sum(dim=0)
    return merged.to(output.dtype), torch.where(is_all_empty, -torch.inf, total.log() + largest)


def _stacked(name: str, parts: Any) -> torch.Tensor:
    if isinstance(parts, torch.Tensor):
        return parts
    tensors = list(parts)
    check_plain_tensors(**{f"{name}[{index}]": part for index, part in enumerate(tensors)})
    # Compared one by one, because a set would specialise the sizes of a compiled function.
    if not tensors or any(one.shape != tensors[0].shape or one.dtype != tensors[0].dtype for one in tensors):
        found = [f"{tensor.dtype}{list(tensor.shape)}".removeprefix("torch.") for tensor in tensors]
        raise ValueError(
            f"`{name}` must be one or more arrays of one shape and dtype, got {found}; broadcast or cast them first"
        )
    return torch.stack(tensors)
