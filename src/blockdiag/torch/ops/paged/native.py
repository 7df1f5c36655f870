"""Paged attention on CUDA tensors: the Triton launch plans, on the current stream. Imports no JAX."""

import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from blockdiag.interop.torch_launch import bound_launch
from blockdiag.ops.paged.problem import PagedProblem
from blockdiag.torch.ops.block_diagonal.native import Unsupported, dense, is_plain
from blockdiag.torch.ops.moba.tables import clip_offsets, rows_to_sequences
from blockdiag.torch.ops.paged.call import PagedArguments, check_layout, describe, page_tensors
from blockdiag.triton_kernels.paged.plans import PagedLaunch, supports

__all__ = ["Unsupported", "attend", "is_plain"]

# Calls of a model repeat a few shapes; what is kept for each is small, and kernels are shared beyond this.
_REMEMBERED_CALLS = 1024

type Results = tuple[torch.Tensor, torch.Tensor]


class Remembered[Key, Prepared]:
    """What was prepared for the latest kinds of calls."""

    def __init__(self, prepare: Callable[[Key], Prepared]) -> None:
        self._prepare = prepare
        self._calls: OrderedDict[tuple[Any, ...], Prepared] = OrderedDict()

    def __call__(self, arguments: Any) -> Prepared:
        """Prepared for a call, whose device must be the current one; errors are those of preparing it."""
        key = arguments.key_of_call()
        prepared = self._calls.get(key)
        if prepared is None:
            prepared = self._calls[key] = self._prepare(arguments)
            if len(self._calls) > _REMEMBERED_CALLS:
                self._calls.popitem(last=False)
        return prepared

    def clear(self) -> None:
        """Forget all of them."""
        self._calls.clear()


class Launches:
    """Launches one after the other, each of which reads arrays by name and adds those that it writes."""

    def __init__(self, specs: Sequence[Any], device_index: int) -> None:
        self._launches = [(bound_launch(spec, device_index), spec.input_names, spec.output_names) for spec in specs]

    def __call__(self, arrays: dict[str, Any]) -> None:
        for launch, input_names, output_names in self._launches:
            arrays.update(zip(output_names, launch(tuple([arrays[name] for name in input_names])), strict=True))


class _Prepared:
    """The launches of one kind of call, bound to a device."""

    def __init__(self, arguments: PagedArguments) -> None:
        self._problem = problem = describe(arguments)
        self._is_empty = has_no_keys(problem)
        if self._is_empty:
            return
        reason = supports(problem)
        if reason is not None:
            raise Unsupported(reason)
        kinds: tuple[Any, ...] = ("splits",) if problem.num_splits == 1 else ("splits", "merge")
        self._launches = Launches([PagedLaunch(problem, kind) for kind in kinds], arguments.query.device.index)

    def attend(self, arguments: PagedArguments) -> Results:
        """Output and log-sum-exp."""
        problem, query, offsets = self._problem, arguments.query, arguments.query_offsets
        rows, query_lengths = query.shape[0], arguments.query_lengths
        if 0 in (problem.batch, problem.query_tokens, rows):
            return no_results(problem, query.shape[:-1], query.device)
        if offsets is not None:
            offsets = clip_offsets(offsets, rows)
            query, query_lengths = _unpack(problem, query, offsets), offsets.diff()
        sinks = None if arguments.sinks is None else arguments.sinks.float()
        if self._is_empty:
            results = no_keys(problem, query, query_lengths, sinks)
        else:
            arrays = cache_arrays(problem, arguments)
            arrays["query"] = dense(query)
            arrays["query_lengths"] = None if query_lengths is None else dense(query_lengths)
            arrays["sinks"] = None if sinks is None else dense(sinks)
            self._launches(arrays)
            results = arrays["output"], arrays["log_sum"]
        return results if offsets is None else _pack(problem, results, rows, offsets)


_prepared: Remembered[PagedArguments, _Prepared] = Remembered(_Prepared)


def attend(arguments: PagedArguments) -> Results:
    """Output and log-sum-exp, on the current stream.

    Raises:
        ValueError: an argument is wrong.
        Unsupported: the kernels cannot compute this call.
    """
    if arguments.query.get_device() == torch.cuda.current_device():
        return _prepared(arguments).attend(arguments)
    # Kernels are loaded into the context of the device that is current, and run there.
    with torch.cuda.device(arguments.query.device):
        return _prepared(arguments).attend(arguments)


def cache_arrays(problem: PagedProblem, arguments: Any) -> dict[str, Any]:
    """The cache, its lengths and scales by the names that launches know them by.

    Raises:
        ValueError: pages cannot be read where they are.
    """
    check_pages(page_tensors(arguments))
    page_table = arguments.page_table
    arrays = {
        "key": arguments.key_pages,
        "value": arguments.value_pages,
        "page_table": None if page_table is None else dense(page_table),
        "kv_lengths": dense(arguments.kv_lengths),
    }
    by_head = (problem.batch, problem.key_heads)
    if problem.has_score_scale:
        key_scale = arguments.key_scale if problem.key_scale == "none" else None
        arrays["score_scale"] = product_by_head(key_scale, arguments.query_scale, by_head, arguments.query.device)
    if problem.key_scale == "token":
        arrays["key_scale"] = arguments.key_scale
    if problem.value_scale == "token":
        arrays["value_scale"] = arguments.value_scale
    elif problem.value_scale == "head":
        arrays["value_scale"] = scale_by_head(arguments.value_scale, by_head, arguments.query.device)
    return arrays


def check_pages(pages: dict[str, torch.Tensor]) -> None:
    """Pages must lie as kernels read and write them.

    Raises:
        ValueError: naming those that do not.
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
    """The product of two scales, either of which may be None, float32 [B, K]."""
    if first is None or second is None:
        return scale_by_head(second if first is None else first, shape, device)
    if not isinstance(first, torch.Tensor) and not isinstance(second, torch.Tensor):
        return scale_by_head(float(np.float32(first) * np.float32(second)), shape, device)
    return (scale_by_head(first, shape, device) * scale_by_head(second, shape, device)).contiguous()


def scale_by_head(scale: Any, shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    """A scale as a kernel reads it, float32 [B, K]: from a number, a tensor [] or one [B, K]."""
    if isinstance(scale, torch.Tensor):
        return dense(scale if scale.ndim else scale.expand(shape))
    if torch.cuda.is_current_stream_capturing():
        # Memory of a graph is written anew by each replay, and may not be remembered beyond it.
        return torch.full(shape, scale, dtype=torch.float32, device=device)
    return _constant(float(scale), shape, device, torch.cuda.current_stream(device).cuda_stream)


@functools.lru_cache(maxsize=_REMEMBERED_CALLS)
def _constant(number: float, shape: tuple[int, int], device: torch.device, stream: int) -> torch.Tensor:
    """A number for every sequence and head; remembered by stream, as nothing else orders others behind the writing."""
    del stream
    return torch.full(shape, number, dtype=torch.float32, device=device)


# What no kernel is launched for


def has_no_keys(problem: PagedProblem) -> bool:
    """Whether no query can see a key, or there is no query."""
    return 0 in (problem.batch, problem.query_tokens, problem.num_pages, problem.max_keys)


def no_results(problem: PagedProblem, rows: Sequence[int], device: torch.device) -> Results:
    """Of rows that belong to no sequence: 0 and -inf."""
    dtype = getattr(torch, problem.output_dtype)
    return (
        torch.zeros((*rows, problem.value_dim), dtype=dtype, device=device),
        torch.full(tuple(rows), -torch.inf, dtype=torch.float32, device=device),
    )


def no_keys(
    problem: PagedProblem, query: torch.Tensor, query_lengths: torch.Tensor | None, sinks: torch.Tensor | None
) -> Results:
    """Of queries that see nothing: 0, and -inf or their sink."""
    output, log_sum = no_results(problem, query.shape[:-1], query.device)
    if sinks is None:
        return output, log_sum
    log_sum = sinks.expand(log_sum.shape).contiguous()
    if query_lengths is not None:
        row = torch.arange(problem.query_tokens, dtype=torch.int32, device=query.device)
        is_row = row[None, :] < query_lengths[:, None]
        log_sum = torch.where(is_row[:, :, None], log_sum, -torch.inf)
    return output, log_sum


# Packed queries


def _unpack(problem: PagedProblem, packed: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Packed queries [rows, N, H] as [B, T, N, H]."""
    row = torch.arange(problem.query_tokens, dtype=torch.int32, device=packed.device)
    row = (offsets[:-1, None] + row).clamp(max=packed.shape[0] - 1).view(-1)
    # Not every operation knows floats of eight bits.
    bits = packed.view(torch.uint8) if packed.dtype.itemsize == 1 else packed
    bits = bits.index_select(0, row).view(problem.batch, problem.query_tokens, *packed.shape[1:])
    return bits.view(packed.dtype)


def _pack(problem: PagedProblem, results: Results, rows: int, offsets: torch.Tensor) -> Results:
    """Results [B, T, ...] as [rows, ...]; NaN for sequences too long to be computed."""
    sequence, is_inside = rows_to_sequences(offsets, rows)
    place = torch.arange(rows, dtype=torch.int32, device=offsets.device) - offsets[sequence]
    index = sequence * problem.query_tokens + place.clamp(0, problem.query_tokens - 1)
    is_too_long = offsets.diff()[sequence] > problem.query_tokens

    def packed(x: torch.Tensor, outside: float) -> torch.Tensor:
        is_bad, is_given = (mask.view(-1, *[1] * (x.ndim - 2)) for mask in (is_too_long, is_inside))
        values = x.flatten(0, 1).index_select(0, index).masked_fill(is_bad, torch.nan)
        return values.masked_fill(~is_given, outside)

    output, log_sum = results
    return packed(output, 0.0), packed(log_sum, -torch.inf)
