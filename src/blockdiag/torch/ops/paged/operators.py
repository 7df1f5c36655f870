"""The registered operator of paged attention: its arguments with their checks, and the problem that they describe."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from blockdiag.ops.paged.checks import describe_paged_call
from blockdiag.ops.paged.problem import PagedProblem
from blockdiag.torch.arguments import check_devices, check_plain_tensors, inference_error
from blockdiag.torch.operator import Operator, Size, count_tensors, register

_EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)


class PagedArguments(NamedTuple):
    """The arguments of the operator, by name; see `paged_attention`.

    Attributes:
        key_scale, value_scale, query_scale: tensors; also numbers on the native path and in checks.
        window_left, window_right: the two sides of `local_window_size`, None for no bound.
        implementation: comma-separated names as for JAX, empty for None.
    """

    query: torch.Tensor
    key_pages: torch.Tensor
    value_pages: torch.Tensor | None
    page_table: torch.Tensor | None
    kv_lengths: torch.Tensor
    query_lengths: torch.Tensor | None
    query_offsets: torch.Tensor | None
    sinks: torch.Tensor | None
    key_scale: torch.Tensor | float | None
    value_scale: torch.Tensor | float | None
    query_scale: torch.Tensor | float | None
    value_dim: Size | None
    max_query_length: Size | None
    scale: float | None
    is_causal: bool
    window_left: Size | None
    window_right: Size | None
    logits_soft_cap: float | None
    num_splits: int | None
    split_size: int | None
    implementation: str

    def key_of_call(self) -> tuple[Any, ...]:
        """Return a cache key with everything that checks and launches depend on: all but the tensors' elements."""
        options = self[_TENSORS:]
        # Types are part of the key, because True, 1 and 1.0 are equal keys of a dictionary.
        return (*describe_tensors(self[:_TENSORS]), *options, *map(type, options))

    @property
    def tensors(self) -> tuple[Any, ...]:
        """The tensor arguments; None if absent, and a number for a scale that is given as one."""
        return self[:_TENSORS]


_TENSORS = count_tensors(PagedArguments)
"""Number of leading tensor arguments; the last three of these are scales, which may also be numbers before the call."""


def describe_tensors(tensors: Sequence[Any]) -> list[Any]:
    """Return the part of a cache key that describes tensors; numbers are their own description."""
    return [
        None
        if one is None
        else (one.shape, one.dtype, one.get_device())
        if isinstance(one, torch.Tensor)
        else (type(one), one)
        for one in tensors
    ]


def describe(arguments: PagedArguments) -> PagedProblem:
    """Check the arguments and describe the call.

    Raises:
        ValueError: an argument is wrong; the same as the JAX function raises.
    """
    names = PagedArguments._fields[:_TENSORS]
    tensors = dict(zip(names, arguments.tensors, strict=True))
    check_plain_tensors(
        **{name: tensors[name] for name in names[:3] if name != "value_pages" or tensors[name] is not None}
    )
    check_devices(**tensors)
    window = arguments.window_left, arguments.window_right
    problem = describe_paged_call(
        **tensors,
        value_dim=arguments.value_dim,
        max_query_length=arguments.max_query_length,
        scale=arguments.scale,
        is_causal=arguments.is_causal,
        local_window_size=window,
        logits_soft_cap=arguments.logits_soft_cap,
        num_splits=arguments.num_splits,
        split_size=arguments.split_size,
    )
    check_plain_tensors(**{name: x for name, x in tensors.items() if not is_absent(x)})
    check_layout(**page_tensors(arguments))
    return problem


def page_tensors(arguments: Any) -> dict[str, torch.Tensor]:
    """Return the arguments of the size of the cache, which are never copied."""
    pages = {"key_pages": arguments.key_pages}
    if arguments.value_pages is not None:
        pages["value_pages"] = arguments.value_pages
    for name, scale in (("key_scale", arguments.key_scale), ("value_scale", arguments.value_scale)):
        if isinstance(scale, torch.Tensor) and scale.ndim == 3:
            pages[name] = scale
    return pages


def is_absent(value: Any) -> bool:
    """Return whether an argument is legitimately no tensor: None, or a scale given as a number."""
    return value is None or type(value) in (int, float)


def check_layout(**pages: torch.Tensor) -> None:
    """Check that pages are contiguous, because copying a whole cache for every call is never wanted.

    Raises:
        ValueError: pages are not contiguous; the message names them.
    """
    for name, tensor in pages.items():
        if not tensor.is_contiguous():
            raise ValueError(
                f"`{name}` must be contiguous, got strides {tuple(tensor.stride())} for shape {tuple(tensor.shape)}; "
                "keep keys and values in tensors of their own, each page's rows one after the other"
            )


def as_tensor_scale(scale: Any, like: torch.Tensor) -> Any:
    """Convert a number to the float32 scalar tensor that operators take; return anything else unchanged."""
    if type(scale) not in (int, float):
        return scale
    return torch.full((), scale, dtype=torch.float32, device=like.device)


def fake_results(arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an uninitialised output and log-sum-exp of the right shapes and dtypes."""
    query, value_pages = arguments.query, arguments.value_pages
    value_dim = arguments.value_dim if value_pages is None else value_pages.shape[-1]
    dtype = torch.bfloat16 if query.dtype in _EIGHT_BITS else query.dtype
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    output = query.new_empty((*query.shape[:-1], value_dim), dtype=dtype)
    return output, query.new_empty(query.shape[:-1], dtype=wide)


PAGED_ATTENTION = Operator(
    name="paged_attention",
    method="attend",
    arguments=PagedArguments,
    num_results=2,
    fake=fake_results,
    refusal=functools.partial(inference_error, "paged_attention"),
)
register(PAGED_ATTENTION)
