"""The cases of `tests.ops.paged_support` for torch: the same calls with tensors."""

from typing import Any

import jax
import pytest
import torch

from blockdiag.torch import paged_attention
from blockdiag.torch.ops.paged.operators import PagedArguments
from tests.ops.paged_support import PagedCase, assert_accurate
from tests.torch.torch_support import to_numpy, to_tensor

CASES = {
    "paged": PagedCase(kv_lengths=(0, 1, 40), page_size=3, query_tokens=2, query_heads=4, key_heads=2),
    "contiguous": PagedCase(kv_lengths=(0, 1, 40), page_size=None, value_dim=24),
    "everything": PagedCase(
        kv_lengths=(2, 0, 40), query_lengths=(3, 1, 2), query_tokens=3, query_heads=4, key_heads=2, window=(9, None),
        soft_cap=5.0, sinks=True, score_scale=True, key_scale="token", value_scale="token", dtype="bfloat16",
        cache_dtype="float8_e4m3fn", scale=0.3,
    ),
    "not causal": PagedCase(kv_lengths=(2, 40), query_tokens=3, is_causal=False, window=(20, 1), dtype="float16"),
    "int8": PagedCase(
        kv_lengths=(2, 0, 40), query_lengths=(3, 1, 2), query_tokens=3, query_heads=4, key_heads=2, sinks=True,
        score_scale=True, key_scale="token", value_scale="token", dtype="bfloat16", cache_dtype="int8", num_splits=2,
    ),
    "int8, scales of heads, contiguous": PagedCase(
        kv_lengths=(2, 40), dtype="float16", cache_dtype="int8", score_scale=True, value_scale="head", page_size=None
    ),
    "latent, int8": PagedCase(
        kv_lengths=(2, 40), query_heads=4, is_latent=True, head_dim=24, value_dim=16, key_scale="token",
        dtype="bfloat16", cache_dtype="int8",
    ),
    "e5m2 queries": PagedCase(kv_lengths=(1, 40), dtype="float8_e5m2", score_scale=True, value_scale="head"),
    "latent": PagedCase(
        kv_lengths=(2, 40), query_tokens=3, query_heads=4, is_latent=True, head_dim=24, value_dim=16,
        key_scale="token", score_scale=True, dtype="bfloat16", cache_dtype="float8_e5m2",
    ),
    "latent of 576 columns": PagedCase(
        kv_lengths=(1, 70), query_heads=64, is_latent=True, head_dim=576, value_dim=512, dtype="bfloat16", scale=0.07
    ),
    "pages of one token, split": PagedCase(
        kv_lengths=(130, 1), page_size=1, query_heads=4, key_heads=2, num_splits=2, dtype="float16",
        cache_dtype="float8_e5m2",
    ),
}  # fmt: skip


def to_tensors(arguments: dict[str, Any], device: str = "cpu") -> dict[str, Any]:
    """Return the arguments of a JAX function with tensors instead of arrays."""
    return {name: to_tensor(x, device) if isinstance(x, jax.Array) else x for name, x in arguments.items()}


def messages_of_mistakes(functions: Any, converted: Any) -> list[str]:
    """Return the messages of JAX and torch functions for the same wrong arguments, with equal dtype names."""
    messages = []
    for function, arguments in zip(functions, converted, strict=True):
        with pytest.raises(ValueError) as caught:
            function(**arguments)
        messages.append(str(caught.value).replace("torch.", ""))
    return messages


def arguments_of(case: PagedCase, device: str = "cpu") -> dict[str, Any]:
    """Return the arguments of the public function."""
    splits = {"split_size": case.split_size, "num_splits": None if case.split_size else case.num_splits}
    return to_tensors(case.arguments(), device) | splits


def packed_arguments_of(case: PagedCase, device: str = "cpu") -> tuple[dict[str, Any], Any]:
    """Return the same call with packed queries and two more rows of NaN, and the rows of the padded query."""
    arguments = arguments_of(case, device)
    lengths = arguments.pop("query_lengths")
    is_row = torch.arange(case.query_tokens, device=device)[None, :] < lengths[:, None]
    # Not every operation supports 8-bit floats, so rows are joined as integers. All bits set are NaN.
    bits = arguments["query"].view(torch.int16)[is_row]
    arguments["query"] = torch.cat([bits, torch.full_like(bits[:1], -1).repeat(2, 1, 1)]).view(arguments["query"].dtype)
    arguments["query_offsets"] = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    return arguments, is_row


def assert_packed_accurate(case: PagedCase, results: Any, is_row: torch.Tensor) -> None:
    """Assert that the results of `packed_arguments_of(case)` are accurate, and those of its two more rows empty."""
    padded = []
    for x, outside in zip(results, (0.0, -torch.inf), strict=True):
        assert (x[-2:].float() == outside).all()
        found = torch.full((*is_row.shape, *x.shape[1:]), outside, dtype=x.dtype, device=x.device)
        found[is_row] = x[:-2]
        padded.append(found)
    assert_accurate(case, as_arrays(padded))


def results_of(case: PagedCase, device: str = "cpu", **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and log-sum-exp."""
    return paged_attention(**arguments_of(case, device), **more, return_residual=True)


def as_arrays(results: Any) -> tuple[Any, ...]:
    return tuple(map(to_numpy, results))


def operator_arguments(arguments: dict[str, Any], implementation: str = "") -> PagedArguments:
    """Return the arguments of `torch.ops.blockdiag.paged_attention` for a call."""
    arguments = dict(arguments)
    left, right = arguments.pop("local_window_size", None) or (None, None)
    defaults = dict.fromkeys(PagedArguments._fields) | {"is_causal": True, "implementation": implementation}
    return PagedArguments(**(defaults | arguments | {"window_left": left, "window_right": right}))
