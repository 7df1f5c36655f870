"""Paged attention on CUDA tensors: the Triton launch plans, on the current stream. Imports no JAX."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from blockdiag.ops.paged.problem import PagedProblem
from blockdiag.torch.launches import Launches, Remembered, dense, reshaped
from blockdiag.torch.operator import Unsupported
from blockdiag.torch.ops.moba.tables import clip_offsets, rows_to_sequences
from blockdiag.torch.ops.paged.operators import PagedArguments, check_layout, describe, page_tensors
from blockdiag.triton_kernels.paged.plans import launches, supports
from blockdiag.triton_kernels.paged.tables import TilesLaunch

_REMEMBERED_CONSTANTS = 1024

type Results = tuple[torch.Tensor, torch.Tensor]


class _Prepared:
    """The launches of one kind of call, bound to a device."""

    def __init__(self, arguments: PagedArguments) -> None:
        self._problem = problem = describe(arguments)
        self._is_empty = problem.is_empty
        if self._is_empty:
            return
        reason = supports(problem.tiled)
        if reason is not None:
            raise Unsupported(reason)
        steps: list[Any] = [] if problem.tiled.num_tiles is None else [TilesLaunch(problem)]
        self._launches = Launches([*steps, *launches(problem.tiled)], arguments.query.device.index)

    def attend(self, arguments: PagedArguments) -> Results:
        """Return the output and the log-sum-exp."""
        problem, query, offsets = self._problem, arguments.query, arguments.query_offsets
        rows, query_lengths = query.shape[0], arguments.query_lengths
        if 0 in (problem.batch, problem.query_tokens, rows):
            return no_results(problem, query.shape[:-1], query.device)
        sinks = None if arguments.sinks is None else arguments.sinks.float()
        if self._is_empty:
            return self._without_keys(arguments, None if offsets is None else clip_offsets(offsets, rows), sinks)
        arrays = cache_arrays(problem, arguments)
        arrays["query"], arrays["query_lengths"] = query, query_lengths
        has_tiles = problem.tiled.num_tiles is not None
        if has_tiles:
            arrays["query"] = query.reshape(-1, *query.shape[-2:])
            arrays["query_offsets"] = None if offsets is None else dense(offsets)
        for name in ("query", "query_lengths"):
            arrays[name] = None if arrays[name] is None else dense(arrays[name])
        arrays["sinks"] = None if sinks is None else dense(sinks)
        self._launches(arrays)
        output, log_sum = arrays["output"], arrays["log_sum"]
        if has_tiles and offsets is None:
            shape = problem.batch, problem.query_tokens, problem.query_heads
            return reshaped(output, (*shape, problem.value_dim)), reshaped(log_sum, shape)
        return output, log_sum

    def _without_keys(
        self, arguments: PagedArguments, offsets: torch.Tensor | None, sinks: torch.Tensor | None
    ) -> Results:
        """Return the results of queries that see nothing."""
        problem, query = self._problem, arguments.query
        if offsets is None:
            return no_keys(problem, query, arguments.query_lengths, sinks)
        output, log_sum = no_keys(problem, query, None, sinks)
        _, is_inside = rows_to_sequences(offsets, query.shape[0])
        return output, torch.where(is_inside[:, None], log_sum, -torch.inf)


_prepared: Remembered[PagedArguments, _Prepared] = Remembered(_Prepared)


def attend(arguments: PagedArguments) -> Results:
    """Compute the output and the log-sum-exp on the current stream.

    Raises:
        ValueError: an argument is wrong.
        Unsupported: the kernels cannot compute this call.
    """
    if arguments.query.get_device() == torch.cuda.current_device():
        return _prepared(arguments).attend(arguments)
    # Kernels are loaded into the context of the current device and run there.
    with torch.cuda.device(arguments.query.device):
        return _prepared(arguments).attend(arguments)


def cache_arrays(problem: PagedProblem, arguments: Any) -> dict[str, Any]:
    """Return the cache, its lengths and scales by their names in the launches.

    Raises:
        ValueError: kernels cannot read pages in place.
    """
    check_pages(page_tensors(arguments))
    page_table = arguments.page_table
    arrays = {
        "key": arguments.key_pages,
        "page_table": None if page_table is None else dense(page_table),
        "kv_lengths": dense(arguments.kv_lengths),
    }
    by_head = (problem.batch, problem.key_heads)
    # Without pages of values, the values are columns of the keys, scaled as they are.
    value_scale = arguments.value_scale if problem.has_value_pages else arguments.key_scale
    if problem.has_value_pages:
        arrays["value"] = arguments.value_pages
    if problem.has_score_scale:
        key_scale = arguments.key_scale if problem.key_scale == "none" else None
        arrays["score_scale"] = product_by_head(key_scale, arguments.query_scale, by_head, arguments.query.device)
    if problem.key_scale == "token":
        arrays["key_scale"] = arguments.key_scale
    if problem.value_scale == "token":
        arrays["value_scale"] = value_scale
    elif problem.value_scale == "head":
        arrays["value_scale"] = scale_by_head(value_scale, by_head, arguments.query.device)
    return arrays


def check_pages(pages: dict[str, torch.Tensor]) -> None:
    """Check that kernels can read and write pages in place.

    Raises:
        ValueError: pages are not contiguous or not aligned; the message names them.
    """
    for name, tensor in pages.items():
        if not tensor.is_contiguous():
            check_layout(**{name: tensor})
        if tensor.data_ptr() % 16:
            raise ValueError(
                f"`{name}` must start at a multiple of 16 bytes, got address {tensor.data_ptr():#x}; allocate it by "
                "itself, or begin a slice where the alignment holds"
            )


def product_by_head(first: Any, second: Any, shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    """Return the product of two scales as float32 [B, K]; one of them may be None."""
    if first is None or second is None:
        return scale_by_head(second if first is None else first, shape, device)
    if not isinstance(first, torch.Tensor) and not isinstance(second, torch.Tensor):
        return scale_by_head(float(np.float32(first) * np.float32(second)), shape, device)
    return (scale_by_head(first, shape, device) * scale_by_head(second, shape, device)).contiguous()


def scale_by_head(scale: Any, shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    """Return a scale in the kernels' form, float32 [B, K], from a number, a scalar tensor or a tensor [B, K]."""
    if isinstance(scale, torch.Tensor):
        return dense(scale if scale.ndim else scale.expand(shape))
    if torch.cuda.is_current_stream_capturing():
        # Each replay of a graph rewrites its memory, so a tensor of the graph must not be cached beyond it.
        return torch.full(shape, scale, dtype=torch.float32, device=device)
    return _constant(float(scale), shape, device, torch.cuda.current_stream(device).cuda_stream)


@functools.lru_cache(maxsize=_REMEMBERED_CONSTANTS)
def _constant(number: float, shape: tuple[int, int], device: torch.device, stream: int) -> torch.Tensor:
    """Return a cached constant tensor; cached per stream, because only the stream orders readers after the fill."""
    del stream
    return torch.full(shape, number, dtype=torch.float32, device=device)


# Calls that launch no kernel


def no_results(problem: PagedProblem, rows: Sequence[int], device: torch.device) -> Results:
    """Return the results of rows that belong to no sequence: 0 and -inf."""
    dtype = getattr(torch, problem.output_dtype)
    return (
        torch.zeros((*rows, problem.value_dim), dtype=dtype, device=device),
        torch.full(tuple(rows), -torch.inf, dtype=torch.float32, device=device),
    )


def no_keys(
    problem: PagedProblem, query: torch.Tensor, query_lengths: torch.Tensor | None, sinks: torch.Tensor | None
) -> Results:
    """Return the results of queries that see nothing: 0, and -inf or the sink of their head."""
    output, log_sum = no_results(problem, query.shape[:-1], query.device)
    if sinks is None:
        return output, log_sum
    log_sum = sinks.expand(log_sum.shape).contiguous()
    if query_lengths is not None:
        row = torch.arange(problem.query_tokens, dtype=torch.int32, device=query.device)
        is_row = row[None, :] < query_lengths[:, None]
        log_sum = torch.where(is_row[:, :, None], log_sum, -torch.inf)
    return output, log_sum
