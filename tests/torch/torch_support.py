"""The cases of `tests.support` for torch: the same operands and options as tensors."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch

import blockdiag
from blockdiag.torch import Rotary, block_diagonal_attention
from tests.support import Case

# Dtypes of both libraries that NumPy alone lacks.
_EXTENDED = [np.dtype(x) for x in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)]


def to_tensor(array: Any, device: str = "cpu") -> torch.Tensor:
    """Return a tensor with the values of a JAX or NumPy array, without sharing memory."""
    array = np.array(array)
    if array.dtype in _EXTENDED:
        bits = torch.from_numpy(array.view(f"i{array.itemsize}"))
        return bits.view(getattr(torch, array.dtype.name)).to(device)
    return torch.from_numpy(array).to(device)


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Return a NumPy array with the values of a tensor; bfloat16 and 8-bit floats become ml_dtypes types."""
    tensor = tensor.detach().cpu().contiguous()
    for dtype in _EXTENDED:
        if tensor.dtype == getattr(torch, dtype.name):
            return tensor.view(getattr(torch, f"int{8 * dtype.itemsize}")).numpy().view(dtype)
    return tensor.numpy()


def to_torch_rotary(rotary: blockdiag.Rotary | None, device: str = "cpu") -> Rotary | None:
    """Return a rotary embedding with tensors instead of arrays."""
    if rotary is None:
        return None
    return Rotary(
        to_tensor(rotary.cos, device),
        to_tensor(rotary.sin, device),
        positions=None if rotary.positions is None else to_tensor(rotary.positions, device),
        per_token=rotary.per_token,
        interleaved=rotary.interleaved,
        apply_to=rotary.apply_to,
    )


def tensors_of(case: Case, device: str = "cpu", seed: int = 0) -> list[torch.Tensor]:
    """Return query, key, value and a cotangent of the output."""
    return [to_tensor(x, device) for x in case.operands(seed)]


def options_of(case: Case, device: str = "cpu") -> dict[str, Any]:
    """Return all options of a call except the implementation."""
    return {
        "block_size": case.block_size,
        "rotary": to_torch_rotary(case.rotary_arguments(), device),
        "scale": case.scale,
        "is_causal": case.is_causal,
        **{name: to_tensor(values, device) for name, values in case.packing.items()},
    }


def attend(case: Case, device: str = "cpu", **more: Any) -> Callable[..., torch.Tensor]:
    """Return the operation as a function of query, key and value."""
    return functools.partial(block_diagonal_attention, **options_of(case, device), **more)


def value_and_gradients(function: Callable[..., torch.Tensor], *operands: torch.Tensor) -> list[torch.Tensor]:
    """Return the output of `function` and the gradients of its operands; the last operand is the output's cotangent."""
    *inputs, cotangent = operands
    leaves = [x.detach().requires_grad_() for x in inputs]
    output = function(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, cotangent)]


def results_of(case: Case, device: str = "cpu", **more: Any) -> list[torch.Tensor]:
    """Return the output and the gradients of query, key and value."""
    return value_and_gradients(attend(case, device, **more), *tensors_of(case, device))


def assert_same_bits(actual: Sequence[Any], expected: Sequence[Any]) -> None:
    """Assert equal shapes, dtypes and bits, except for signs of zero; for tensors or arrays."""
    for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
        one, other = (to_numpy(x) if isinstance(x, torch.Tensor) else np.asarray(x) for x in (one, other))
        assert one.dtype == other.dtype, f"result {index}"
        np.testing.assert_array_equal(one, other, err_msg=f"result {index}", strict=True)


def masked_attention(case: Case, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return torch's own attention with a block mask, for cases without padding and rotary embedding."""
    mask = torch.zeros(case.tokens, case.tokens, dtype=torch.bool)
    for block in case.blocks:
        rows = slice(block.start, block.start + block.length)
        square = torch.ones(block.length, block.length, dtype=torch.bool)
        mask[rows, rows] = square.tril() if case.is_causal else square
    tokens = (x.reshape(1, case.tokens, *x.shape[-2:]).transpose(1, 2) for x in (query, key, value))
    output = torch.nn.functional.scaled_dot_product_attention(
        *tokens, attn_mask=mask.to(query.device), scale=case.scale, enable_gqa=True
    )
    return output.transpose(1, 2).reshape(query.shape)


def assert_as_accurate(
    actual: Sequence[torch.Tensor], rough: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]
) -> None:
    """Assert that results err at most twice as much as another computation in its dtype, plus 2 ulp."""
    for index, (one, other, true) in enumerate(zip(actual, rough, exact, strict=True)):
        error, allowed = ((x.double() - true).abs().max().item() for x in (one, other))
        allowed = 2 * allowed + 2 * torch.finfo(one.dtype).eps * true.abs().max().item()
        assert error <= allowed, f"result {index} errs by {error}, allowed {allowed}"


def operator_arguments(case: Case, device: str = "cpu", implementation: str = "") -> tuple[Any, ...]:
    """Return the arguments of `torch.ops.blockdiag.block_diagonal_forward` for a call."""
    query, key, value, _ = tensors_of(case, device)
    options = options_of(case, device)
    rotary = options["rotary"]
    tables = (None, None, None) if rotary is None else (rotary.cos, rotary.sin, rotary.positions)
    return (
        query,
        key,
        value,
        options.get("sequence_offsets"),
        options.get("block_lengths"),
        *tables,
        0,
        case.block_size,
        case.scale,
        case.is_causal,
        "" if rotary is None else rotary.letters,
        implementation,
    )


def packed_operator_arguments(case: Case, device: str = "cpu") -> tuple[Any, ...]:
    """Return the arguments of `operator_arguments` with query, key and value in one tensor."""
    query, key, value, *tables, _, block_size, scale, is_causal, letters, implementation = operator_arguments(
        case, device
    )
    buffer = torch.cat((query, key, value), dim=-2)
    return (buffer, None, None, *tables, case.key_heads, block_size, scale, is_causal, letters, implementation)
