"""The registered operators of paged attention: `torch.ops.blockdiag.paged_attention`, and `..._through_jax`.

Each operator exists twice, native and through JAX, because tags are fixed when an operator is defined and a CUDA graph
may only capture the native one. On the CPU both go through JAX.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from blockdiag.torch.ops.block_diagonal import operators  # noqa: F401 - it defines the library that this one adds to
from blockdiag.torch.ops.paged.call import PagedArguments, check_devices, inference_error
from blockdiag.torch.transforms import register_derivative

_SCHEMA = (
    "(Tensor query, Tensor key_pages, Tensor value_pages, Tensor? page_table, Tensor kv_lengths, "
    "Tensor? query_lengths, Tensor? query_offsets, Tensor? sinks, Tensor? key_scale, Tensor? value_scale, "
    "Tensor? query_scale, SymInt? max_query_length, float? scale, bool is_causal, SymInt? window_left, "
    "SymInt? window_right, float? logits_soft_cap, int? num_splits, int? split_size, str implementation) "
    "-> (Tensor, Tensor)"
)

_EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)

# Module-level, because deleting a library removes its operators.
_library = torch.library.Library("blockdiag", "FRAGMENT")


def _native(*values: Any) -> tuple[torch.Tensor, torch.Tensor]:
    from blockdiag.torch.ops.paged import native as _paged_native

    try:
        return _paged_native.attend(PagedArguments(*values))
    except _paged_native.Unsupported:
        return _through_jax(*values)


def _through_jax(*values: Any) -> tuple[torch.Tensor, torch.Tensor]:
    from blockdiag.torch.ops.paged import through_jax as _paged_through_jax

    return _paged_through_jax.attend(PagedArguments(*values))


def _fake(*values: Any) -> tuple[torch.Tensor, torch.Tensor]:
    arguments = PagedArguments(*values)
    # One meta argument among others selects this kernel, which would return uninitialised memory: check the devices.
    # Other mistakes are found when the operator runs, so that no tracer wraps the messages.
    check_devices(**dict(zip(PagedArguments._fields, arguments.tensors, strict=False)))
    return fake_results(arguments.query, arguments.value_pages)


def fake_results(query: torch.Tensor, value_pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an uninitialised output and log-sum-exp of the right shapes and dtypes."""
    dtype = torch.bfloat16 if query.dtype in _EIGHT_BITS else query.dtype
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    output = query.new_empty((*query.shape[:-1], value_pages.shape[-1]), dtype=dtype)
    return output, query.new_empty(query.shape[:-1], dtype=wide)


def define_attention(
    library: torch.library.Library,
    name: str,
    schema: str,
    fake: Callable[..., Any],
    native: Callable[..., Any],
    through_jax: Callable[..., Any],
) -> None:
    """Define both variants of an inference operator, whose results raise when differentiated."""

    def refuse(ctx: Any, *cotangents: Any) -> None:
        raise inference_error(name)

    definitions: Sequence[tuple[str, tuple[torch.Tag, ...], Callable[..., Any]]] = (
        ("", (), native),
        ("_through_jax", (torch.Tag.cudagraph_unsafe,), through_jax),
    )
    for suffix, tags, cuda in definitions:
        operator = name + suffix
        library.define(operator + schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
        library.impl(operator, through_jax, "CPU")
        library.impl(operator, cuda, "CUDA")
        torch.library.register_fake(f"blockdiag::{operator}", fake, lib=library)
        register_derivative(library, operator, refuse)


define_attention(_library, "paged_attention", _SCHEMA, _fake, _native, _through_jax)
