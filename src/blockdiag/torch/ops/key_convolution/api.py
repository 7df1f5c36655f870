"""Key convolution for torch: the public function and the registered operators that it calls.

Each operator exists twice, native and through JAX, because tags are fixed when an operator is defined and a CUDA graph
may only capture the native one. On the CPU both go through JAX.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch.autograd import forward_ad

from blockdiag.interop.private_torch import may_have_tangents
from blockdiag.ops.key_convolution.checks import describe_key_convolution
from blockdiag.ops.key_convolution.problem import Activation
from blockdiag.torch import dtensor_registration, nested
from blockdiag.torch.context.parallel import ContextParallel, check_plain
from blockdiag.torch.ops.block_diagonal import operators  # noqa: F401 - operators defines the library that this one adds to
from blockdiag.torch.ops.key_convolution.call import Arguments, check_devices, describe
from blockdiag.torch.transforms import register_derivative
from blockdiag.triton_kernels.key_convolution.plans import takes_key


def key_convolution(
    key: torch.Tensor,
    weights: torch.Tensor,
    *,
    sequence_offsets: torch.Tensor | None = None,
    activation: Activation | None = "silu",
    residual: bool = True,
    implementation: str | Sequence[str] | None = None,
    via: Literal["jax"] | None = None,
    context_parallel: ContextParallel | None = None,
) -> torch.Tensor:
    """Mix each key with the few keys before it, by a short causal convolution for every channel of every head.

    This is the PyTorch version of `blockdiag.key_convolution`, with the same arguments and meaning. On CUDA it launches
    the same Triton kernels on the current stream, without JAX. It is a registered operator. Autograd, `torch.compile`
    with full graphs and dynamic shapes, CUDA graphs, autocast, activation checkpointing, and DTensors sharded over
    batch or heads work. Only `key` and `weights` are kept for the backward pass. Results are bitwise repeatable.
    Second derivatives raise a NotImplementedError.

    Args:
        key: [B, T, K, H], B sequences of T tokens; or packed [T, K, H], one sequence or those that `sequence_offsets`
            describes. float16, bfloat16, float32 or float64, on a CPU or a CUDA device. A tensor that is not contiguous
            or not aligned to 16 bytes is copied.
        weights: [size, K, H] with size 1..8, in the dtype of `key` or in float32; the last row multiplies the current
            token.
        sequence_offsets: int32 [num_sequences + 1], only for packed keys; see the JAX function. Values are checked on
            the CPU. On a GPU a check would wait for the device, so they are handled as JAX handles traced ones.
        activation: "silu" or None, applied to the weighted sum.
        residual: whether the key itself is added, after the activation.
        implementation: who computes it. None means the native kernels on CUDA where they support the call, and "xla"
            through JAX otherwise. "triton" means the kernels, which run in a slow interpreter on a CPU. "reference" or
            "xla" means JAX's implementation of that name. A sequence means the first that supports the call.
        via: "jax" to go through DLPack and JAX on CUDA as well.
        context_parallel: the processes that share the tokens of each sequence; see `ContextParallel`. Each process
            receives the last size - 1 keys of the one before it, whatever the strategy. `key` is then a plain tensor of
            the process's tokens, and `sequence_offsets` those of all tokens. The gradient of `weights` covers the
            process's tokens only, as for every other parameter: sum it over the group. DDP and FSDP do so, and divide
            by the number of processes. `torch.compile` runs such a call eagerly between graphs, and refuses it with
            `fullgraph=True`.

    Under autocast `key` is cast to its dtype first, and so are weights that are not float32.

    Returns:
        The convolved keys, contiguous, in the shape and dtype of `key`.

    Raises:
        ValueError: an argument is wrong; the message names it, its value and the remedy.
        NotImplementedError: none of the implementations asked for can compute this call; the message says why.

    References:
        Xiao et al., "Optimizing Mixture of Block Attention" (FlashMoBA, 2025).

    Example:
        >>> import torch
        >>> from blockdiag.torch import key_convolution
        >>> key_convolution(torch.randn(2, 100, 4, 32), torch.zeros(3, 4, 32)).shape
        torch.Size([2, 100, 4, 32])
    """
    for name, value in (("key", key), ("weights", weights), ("sequence_offsets", sequence_offsets)):
        if not isinstance(value, torch.Tensor) and not (value is None and name == "sequence_offsets"):
            raise ValueError(f"`{name}` must be a tensor, got {type(value)}; convert it with torch.as_tensor")
    if via not in (None, "jax"):
        raise ValueError(f"`via` must be None or 'jax', got {via!r}; None launches the kernels natively on CUDA")
    key, weights = _autocast(key, weights)
    if context_parallel is not None:
        check_plain(context_parallel, key=key, weights=weights)
        describe_key_convolution(key, weights, sequence_offsets=None, activation=activation, residual=residual)
        # Imported lazily: the module is kept out of graphs by `torch.compiler.disable`, which imports torch's compiler.
        from blockdiag.torch.ops.key_convolution.context import convolve_shared_tokens

        convolve = functools.partial(
            key_convolution, activation=activation, residual=residual, implementation=implementation, via=via
        )
        return convolve_shared_tokens(context_parallel, convolve, key, weights, sequence_offsets)
    if key.is_nested:
        (values,), (offsets,) = nested.unpack(sequence_offsets, key=key)
        output = key_convolution(
            values, weights, sequence_offsets=offsets, activation=activation, residual=residual,
            implementation=implementation, via=via,
        )  # fmt: skip
        return nested.repack(output, key)
    names = (implementation,) if isinstance(implementation, str) else tuple(implementation or ())
    arguments = Arguments(key, weights, sequence_offsets, activation, residual, ",".join(names))
    if not torch.compiler.is_compiling():
        # Checked before the operator, whose schema would reject other types with a generic message.
        describe(arguments)
        arguments = arguments._replace(residual=bool(residual))
        if implementation is not None and names != ("triton",):
            from blockdiag.common.dispatch import normalise_implementation
            from blockdiag.ops.key_convolution.problem import KEY_CONVOLUTION

            normalise_implementation(implementation, KEY_CONVOLUTION)
    if may_have_tangents():
        _refuse_tangents(key, weights)
    if type(key) is not torch.Tensor:
        dtensor_registration.prepare(key)
    # The first supported name of a sequence wins, so the native operators apply only if "triton" comes first.
    is_native = via is None and (not names or names[0] == "triton")
    if key.is_cuda:
        is_native = is_native and takes_key(str(key.dtype).removeprefix("torch.")) is None
    if is_native:
        return torch.ops.blockdiag.key_convolution_forward(*arguments)  # type: ignore[no-any-return]
    return torch.ops.blockdiag.key_convolution_forward_through_jax(*arguments)  # type: ignore[no-any-return]


def _refuse_tangents(*operands: torch.Tensor) -> None:
    """Refuse forward-mode tangents: a Python operator would silently drop them and give a derivative of 0."""
    if any(forward_ad.unpack_dual(operand).tangent is not None for operand in operands):
        raise NotImplementedError(
            "forward-mode derivatives of key convolution are not available in torch; use reverse mode, or "
            'blockdiag.key_convolution with implementation="reference" in JAX'
        )


def _autocast(key: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast the operands to autocast's dtype where autocast is on; keep float64, and weights in float32."""
    device_type = key.device.type
    # There is no autocast on the meta device, and asking for it is an error.
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return key, weights
    dtype = torch.get_autocast_dtype(device_type)
    if key.is_floating_point() and key.dtype != torch.float64:
        key = key.to(dtype)
    if weights.is_floating_point() and weights.dtype not in (torch.float32, torch.float64):
        weights = weights.to(dtype)
    return key, weights


# The operators

_ARGUMENTS = "Tensor key, Tensor weights, Tensor? sequence_offsets, str? activation, bool residual, str implementation"
_SCHEMAS = {
    "forward": f"({_ARGUMENTS}) -> Tensor",
    "backward": f"(Tensor output_cotangent, {_ARGUMENTS}) -> (Tensor, Tensor)",
}

# Module-level, because deleting a library removes its operators.
_library = torch.library.Library("blockdiag", "FRAGMENT")


def _native_forward(*values: Any) -> torch.Tensor:
    from blockdiag.torch.ops.key_convolution import native

    arguments = Arguments(*values)
    try:
        return native.forward(arguments)
    except native.Unsupported:
        return _jax_forward(*values)


def _native_backward(output_cotangent: torch.Tensor, *values: Any) -> tuple[torch.Tensor, ...]:
    from blockdiag.torch.ops.key_convolution import native

    arguments = Arguments(*values)
    try:
        return native.backward(arguments, output_cotangent)
    except native.Unsupported:
        return _jax_backward(output_cotangent, *values)


def _jax_forward(*values: Any) -> torch.Tensor:
    from blockdiag.torch.ops.key_convolution import through_jax

    return through_jax.forward(Arguments(*values))


def _jax_backward(output_cotangent: torch.Tensor, *values: Any) -> tuple[torch.Tensor, ...]:
    from blockdiag.torch.ops.key_convolution import through_jax

    return through_jax.backward(Arguments(*values), output_cotangent)


def _fake_forward(*values: Any) -> torch.Tensor:
    arguments = Arguments(*values)
    # One meta argument among others selects this kernel, which would return uninitialised memory: check the devices.
    check_devices(arguments.key, weights=arguments.weights, sequence_offsets=arguments.sequence_offsets)
    return arguments.key.new_empty(arguments.key.shape)


def _fake_backward(output_cotangent: torch.Tensor, *values: Any) -> tuple[torch.Tensor, ...]:
    key, weights, sequence_offsets, *_ = values
    check_devices(key, weights=weights, sequence_offsets=sequence_offsets, output_cotangent=output_cotangent)
    return key.new_empty(key.shape), weights.new_empty(weights.shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    """Save the arguments for the backward pass, which needs neither the output nor intermediate sums."""
    del output
    ctx.save_for_backward(*inputs[:3])
    ctx.options = inputs[3:]


def _differentiate(suffix: str) -> Callable[..., tuple[Any, ...]]:
    def backward(ctx: Any, output_cotangent: torch.Tensor) -> tuple[Any, ...]:
        operator = getattr(torch.ops.blockdiag, f"key_convolution_backward{suffix}")
        gradients = operator(output_cotangent, *ctx.saved_tensors, *ctx.options)
        return (*gradients, *(None,) * (len(Arguments._fields) - 2))

    return backward


def _refuse_second_derivative(ctx: Any, *cotangents: torch.Tensor) -> None:
    raise NotImplementedError(
        "second derivatives of key convolution are not available in torch; differentiate blockdiag.key_convolution in "
        "JAX, where they are"
    )


def _define(suffix: str, tags: Sequence[torch.Tag], cuda: dict[str, Callable[..., Any]]) -> None:
    """Define forward and backward with implementations for CUDA and, through JAX, for the CPU."""
    cpu = {"forward": _jax_forward, "backward": _jax_backward}
    fake = {"forward": _fake_forward, "backward": _fake_backward}
    for method, schema in _SCHEMAS.items():
        name = f"key_convolution_{method}{suffix}"
        _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
        _library.impl(name, cpu[method], "CPU")
        _library.impl(name, cuda[method], "CUDA")
        torch.library.register_fake(f"blockdiag::{name}", fake[method], lib=_library)
        derivative = _differentiate(suffix) if method == "forward" else _refuse_second_derivative
        setup = _remember if method == "forward" else None
        register_derivative(_library, name, derivative, setup)


_define("", (), {"forward": _native_forward, "backward": _native_backward})
_define("_through_jax", (torch.Tag.cudagraph_unsafe,), {"forward": _jax_forward, "backward": _jax_backward})
