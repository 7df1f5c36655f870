"""Key convolution for torch: the public function."""

import functools
from collections.abc import Sequence
from typing import Literal

import torch

from blockdiag.interop.private_torch import may_have_tangents
from blockdiag.ops.key_convolution.checks import describe_key_convolution
from blockdiag.ops.key_convolution.problem import KEY_CONVOLUTION, Activation
from blockdiag.torch import dtensor_registration, nested
from blockdiag.torch.arguments import (
    autocast,
    check_names,
    check_tensors,
    forward_mode_error,
    refuse_tangents,
    who_computes,
)
from blockdiag.torch.context.parallel import ContextParallel, check_plain
from blockdiag.torch.ops.key_convolution.operators import Arguments, describe
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
        implementation: which implementation runs. None means the native kernels on CUDA where they support the call,
            and "xla" through JAX otherwise. "triton" means the kernels, which run in a slow interpreter on a CPU.
            "reference" or "xla" means JAX's implementation of that name. A sequence means the first that supports the
            call.
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
        NotImplementedError: none of the requested implementations can compute this call; the message says why.

    References:
        Xiao et al., "Optimizing Mixture of Block Attention" (FlashMoBA, 2025).

    Example:
        >>> import torch
        >>> from blockdiag.torch import key_convolution
        >>> key_convolution(torch.randn(2, 100, 4, 32), torch.zeros(3, 4, 32)).shape
        torch.Size([2, 100, 4, 32])
    """
    check_tensors(key=key, weights=weights)
    if sequence_offsets is not None:
        check_tensors(sequence_offsets=sequence_offsets)
    names, is_native = who_computes(implementation, via)
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
    arguments = Arguments(key, weights, sequence_offsets, activation, residual, ",".join(names))
    if not torch.compiler.is_compiling():
        # Checked before the operator, whose schema would reject other types with a generic message.
        describe(arguments)
        arguments = arguments._replace(residual=bool(residual))
        check_names(implementation, names, KEY_CONVOLUTION)
    if may_have_tangents():
        refuse_tangents((key, weights), functools.partial(forward_mode_error, "key convolution", "key_convolution"))
    if type(key) is not torch.Tensor:
        dtensor_registration.prepare(key)
    if key.is_cuda:
        is_native = is_native and takes_key(str(key.dtype).removeprefix("torch.")) is None
    if is_native:
        return torch.ops.blockdiag.key_convolution_forward(*arguments)  # type: ignore[no-any-return]
    return torch.ops.blockdiag.key_convolution_forward_through_jax(*arguments)  # type: ignore[no-any-return]


def _autocast(key: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast the operands to autocast's dtype where autocast is on; keep float64, and weights in float32."""
    if weights.dtype == torch.float32:
        return autocast(key)[0], weights
    key, weights = autocast(key, weights)
    return key, weights
