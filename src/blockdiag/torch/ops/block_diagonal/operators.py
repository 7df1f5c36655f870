"""The registered operators: `torch.ops.blockdiag.*`, with fake kernels and derivatives.

Each operator exists twice, native and through JAX, because tags are fixed when an operator is defined and a CUDA graph
may only capture the native one. On the CPU both go through JAX.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from blockdiag.torch.ops.block_diagonal.call import Arguments, check_devices
from blockdiag.torch.transforms import register_derivative

_ARGUMENTS = (
    "Tensor query, Tensor? key, Tensor? value, Tensor? sequence_offsets, Tensor? block_lengths, Tensor? cos, "
    "Tensor? sin, Tensor? positions, SymInt key_heads, int block_size, float? scale, bool is_causal, str rotary, "
    "str implementation"
)
_SCHEMAS = {
    "forward": f"({_ARGUMENTS}) -> Tensor",
    "backward": f"(Tensor output_cotangent, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
    "packed_backward": f"(Tensor output_cotangent, {_ARGUMENTS}) -> Tensor",
}
_NO_GRADIENTS = (None,) * (len(Arguments._fields) - 3)

# Module-level, because deleting a library removes its operators.
_library = torch.library.Library("blockdiag", "DEF")


def _native_forward(*values: Any) -> torch.Tensor:
    from blockdiag.torch.ops.block_diagonal import native

    arguments = Arguments(*values)
    try:
        return native.forward(arguments)
    except native.Unsupported:
        return _jax_forward(*values)


def _native_backward(output_cotangent: torch.Tensor, *values: Any) -> tuple[torch.Tensor, ...]:
    from blockdiag.torch.ops.block_diagonal import native

    arguments = Arguments(*values)
    try:
        return native.backward(arguments, output_cotangent)
    except native.Unsupported:
        return _jax_backward(output_cotangent, *values)


def _jax_forward(*values: Any) -> torch.Tensor:
    from blockdiag.torch.ops.block_diagonal import through_jax

    return through_jax.forward(Arguments(*values))


def _jax_backward(output_cotangent: torch.Tensor, *values: Any) -> tuple[torch.Tensor, ...]:
    from blockdiag.torch.ops.block_diagonal import through_jax

    return through_jax.backward(Arguments(*values), output_cotangent)


def _fake_forward(*values: Any) -> torch.Tensor:
    arguments = Arguments(*values)
    # One meta argument among others selects this kernel, which would return uninitialised memory: check the devices.
    check_devices(arguments)
    return arguments.query.new_empty(arguments.output_shape())


def _fake_backward(output_cotangent: torch.Tensor, *values: Any) -> tuple[torch.Tensor, ...]:
    check_devices(Arguments(*values))
    if output_cotangent.device != values[0].device:
        raise ValueError(
            f"the cotangent must be on the device of `query`, {values[0].device}, got {output_cotangent.device}"
        )
    operands = (operand for operand in values[:3] if operand is not None)
    return tuple(operand.new_empty(operand.shape) for operand in operands)


def _one(function: Callable[..., Sequence[torch.Tensor]]) -> Callable[..., torch.Tensor]:
    """Wrap a function with a single result so that it returns that result itself."""
    return lambda *values: function(*values)[0]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    """Save the arguments for the backward pass, which needs neither the output nor softmax statistics."""
    del output
    ctx.save_for_backward(*inputs[:8])
    ctx.options = inputs[8:]


def _differentiate(suffix: str) -> Callable[..., tuple[Any, ...]]:
    def backward(ctx: Any, output_cotangent: torch.Tensor) -> tuple[Any, ...]:
        tensors = ctx.saved_tensors
        operators = torch.ops.blockdiag
        if tensors[1] is None:
            operator = getattr(operators, f"block_diagonal_packed_backward{suffix}")
            return (operator(output_cotangent, *tensors, *ctx.options), None, None, *_NO_GRADIENTS)
        operator = getattr(operators, f"block_diagonal_backward{suffix}")
        return (*operator(output_cotangent, *tensors, *ctx.options), *_NO_GRADIENTS)

    return backward


def _refuse_second_derivative(ctx: Any, *cotangents: torch.Tensor) -> None:
    raise NotImplementedError(
        "second derivatives of block-diagonal attention are not available in torch; differentiate "
        "blockdiag.block_diagonal_attention in JAX, where they are"
    )


def _define(suffix: str, tags: Sequence[torch.Tag], cuda: dict[str, Callable[..., Any]]) -> None:
    """Define the forward and both backward operators for CUDA and, through JAX, for the CPU."""
    cpu = {"forward": _jax_forward, "backward": _jax_backward, "packed_backward": _one(_jax_backward)}
    fake = {"forward": _fake_forward, "backward": _fake_backward, "packed_backward": _one(_fake_backward)}
    for method, schema in _SCHEMAS.items():
        name = f"block_diagonal_{method}{suffix}"
        _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
        _library.impl(name, cpu[method], "CPU")
        _library.impl(name, cuda[method], "CUDA")
        torch.library.register_fake(f"blockdiag::{name}", fake[method], lib=_library)
        derivative = _differentiate(suffix) if method == "forward" else _refuse_second_derivative
        setup = _remember if method == "forward" else None
        register_derivative(_library, name, derivative, setup)


_define(
    "",
    (),
    {"forward": _native_forward, "backward": _native_backward, "packed_backward": _one(_native_backward)},
)
_define(
    "_through_jax",
    (torch.Tag.cudagraph_unsafe,),
    {"forward": _jax_forward, "backward": _jax_backward, "packed_backward": _one(_jax_backward)},
)
