"""Block-diagonal attention for torch: the public functions."""

import functools
from collections.abc import Sequence
from typing import Any, Literal

import torch

from blockdiag.common import validation
from blockdiag.interop.private_torch import may_have_tangents
from blockdiag.ops.block_diagonal.problem import BLOCK_DIAGONAL
from blockdiag.torch import dtensor_registration, nested
from blockdiag.torch.arguments import (
    autocast,
    check_names,
    check_tensors,
    forward_mode_error,
    is_plain,
    refuse_tangents,
    who_computes,
)
from blockdiag.torch.context.parallel import ContextParallel, check_plain
from blockdiag.torch.operator import Unsupported
from blockdiag.torch.ops.block_diagonal.operators import TENSORS, Arguments
from blockdiag.torch.rotary import Rotary, rotary_of
from blockdiag.triton_kernels.block_diagonal.plans import takes_operands


def block_diagonal_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    block_size: int = 64,
    sequence_offsets: torch.Tensor | None = None,
    block_lengths: torch.Tensor | None = None,
    rotary: Rotary | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    implementation: str | Sequence[str] | None = None,
    via: Literal["jax"] | None = None,
    context_parallel: ContextParallel | None = None,
) -> torch.Tensor:
    """Attend from every token to its own fixed-size block of its own sequence.

    This is the PyTorch version of `blockdiag.block_diagonal_attention`, with the same arguments and meaning. On CUDA it
    launches the same Triton kernels on the current stream, without JAX. Blocks of more than 256 rows are an exception:
    here the kernels of smaller blocks walk them in chunks, while JAX and `via="jax"` use the kernels of fused
    attention.

    It is a registered operator. Autograd, `torch.compile` with full graphs and dynamic shapes, CUDA graphs, autocast,
    activation checkpointing, and DTensors sharded over batch or heads all work. Only query, key and value are kept for
    the backward pass. Results are bitwise repeatable. Second derivatives raise a NotImplementedError.

    Args:
        query: [B, T, N, H], B sequences of T tokens; or packed [T, N, H], one sequence or those that `sequence_offsets`
            or `block_lengths` describe; or a jagged nested tensor, as key and value are then. float16, bfloat16,
            float32 or float64, on a CPU or a CUDA device. Tensors that are not contiguous or not aligned to 16 bytes
            are copied, in the forward and again in the backward pass.
        key, value: [B, T, K, H] or [T, K, H] in the dtype of `query`, N a multiple of K.
        block_size: rows of a block, any positive number; with `block_lengths` the maximum number of rows of a block.
        sequence_offsets: int32 [num_sequences + 1], only for packed tensors; see the JAX function. Values are checked
            on the CPU. On a GPU a check would wait for the device, so they are handled as JAX handles traced ones.
        block_lengths: int32 [num_blocks], only for packed tensors and instead of `sequence_offsets`.
        rotary: rotary embedding of query and key (or as `Rotary.apply_to` says), fused into the forward and backward
            pass.
        scale: positive factor on the scores; 1 / sqrt(H) when None.
        is_causal: whether a token attends only to itself and earlier tokens of its block.
        implementation: which implementation runs. None means the native kernels on CUDA where they support the call,
            and "xla" through JAX otherwise. "triton" means the kernels, which run in a slow interpreter on a CPU.
            "reference", "xla" or "pallas" means JAX's implementation of that name. A sequence means the first that
            supports the call.
        via: "jax" to go through DLPack and JAX on CUDA as well.
        context_parallel: the processes that share the tokens of each sequence; see `ContextParallel`. Operands, and the
            per-token tables and positions of `rotary`, are then plain tensors of the process's tokens. Offsets, lengths
            and tables indexed by position are those of all tokens. Nothing is communicated where cuts lie between
            blocks. `torch.compile` runs such a call eagerly between graphs, and refuses it with `fullgraph=True`.

    Under autocast, query, key and value are cast to its dtype first.

    Returns:
        The attention output, contiguous, in the shape and dtype of `query`.

    Raises:
        ValueError: an argument is wrong; the message names it, its value and the remedy.
        NotImplementedError: none of the requested implementations can compute this call; the message says why.

    References:
        Attention within blocks of tokens: the local attention of Liu et al., "Generating Wikipedia by Summarizing Long
        Sequences" (2018). Fixed blocks of packed sequences, with the rotary embedding fused: the block attention of
        Meta's ads_model_kernel_library (2026). Blocks of more than 256 rows: FlashAttention of Dao et al. (2022).
        Grouped key heads: Ainslie et al., "GQA" (2023).

    Example:
        >>> import torch
        >>> from blockdiag.torch import block_diagonal_attention
        >>> query, key, value = torch.randn(3, 2, 100, 4, 32)
        >>> block_diagonal_attention(query, key, value, block_size=32).shape
        torch.Size([2, 100, 4, 32])
    """
    query, key, value = autocast_operands(query, key, value)
    options = _options(block_size, scale, is_causal)
    if context_parallel is not None:
        check_plain(context_parallel, query=query, key=key, value=value)
        validation.check_operands(query, key, value)
        rotary_of(rotary)
        # Imported lazily: the module is kept out of graphs by `torch.compiler.disable`, which imports torch's compiler.
        from blockdiag.torch.ops.block_diagonal.context import attend_to_shared_tokens

        attend = functools.partial(
            block_diagonal_attention, block_size=block_size, scale=scale, is_causal=is_causal,
            implementation=implementation, via=via,
        )  # fmt: skip
        return attend_to_shared_tokens(
            context_parallel, attend, query, key, value, sequence_offsets, block_lengths, rotary,
            block_size=options[0], is_causal=options[2],
        )  # fmt: skip
    return _call((query, key, value), 0, sequence_offsets, block_lengths, rotary, options, implementation, via)


def block_diagonal_attention_bhsd(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    block_size: int = 64,
    rotary: Rotary | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    implementation: str | Sequence[str] | None = None,
    via: Literal["jax"] | None = None,
) -> torch.Tensor:
    """Compute `block_diagonal_attention` in the layout of `torch.nn.functional.scaled_dot_product_attention`.

    Nothing is copied if the tensors are transposed views of [B, T, N, H]. If key has as many heads as query, nothing is
    copied for contiguous tensors either: each head is then a sequence of its own. Other tensors are copied once.

    Args:
        query: [B, N, T, H]. float16, bfloat16, float32 or float64, on a CPU or a CUDA device.
        key, value: [B, K, T, H] in the dtype of `query`, N a multiple of K.
        block_size, rotary, scale, is_causal, implementation, via: as for `block_diagonal_attention`.

    Returns:
        [B, N, T, H] in the dtype of `query`: contiguous if the operands are, else a transposed view of a contiguous
        [B, T, N, H].

    Raises:
        ValueError: an argument is wrong; the message names it, its value and the remedy.
        NotImplementedError: none of the requested implementations can compute this call; the message says why.

    References:
        See `block_diagonal_attention`: Liu et al. (2018) and Meta's ads_model_kernel_library (2026).

    Example:
        >>> import torch
        >>> from blockdiag.torch import block_diagonal_attention_bhsd
        >>> query, key, value = torch.randn(3, 1, 4, 40, 16)
        >>> output = block_diagonal_attention_bhsd(query, key, value, block_size=40)
        >>> torch.allclose(output, torch.nn.functional.scaled_dot_product_attention(query, key, value), atol=1e-5)
        True
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.ndim != 4:
            raise ValueError(f"`{name}` must have shape [B, heads, T, H], got {tuple(tensor.shape)}")
    options: dict[str, Any] = {
        "block_size": block_size,
        "scale": scale,
        "is_causal": is_causal,
        "implementation": implementation,
        "via": via,
    }
    by_token = rotary is not None and (rotary.per_token or rotary.positions is not None)
    is_folded = query.is_contiguous() and key.is_contiguous() and value.is_contiguous()
    is_plain = all(type(tensor) in (torch.Tensor, torch.nn.Parameter) for tensor in (query, key, value))
    if is_plain and is_folded and query.shape == key.shape == value.shape and not by_token:
        folded = (tensor.flatten(0, 1).unsqueeze(2) for tensor in (query, key, value))
        return block_diagonal_attention(*folded, rotary=rotary, **options).view(query.shape)
    transposed = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return block_diagonal_attention(*transposed, rotary=rotary, **options).transpose(1, 2)


def fused_qkv_block_attention(
    x: torch.Tensor,
    w_qkv: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    query_heads: int,
    key_heads: int,
    head_dim: int,
    block_size: int = 64,
    sequence_offsets: torch.Tensor | None = None,
    block_lengths: torch.Tensor | None = None,
    rotary: Rotary | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    implementation: str | Sequence[str] | None = None,
    via: Literal["jax"] | None = None,
) -> torch.Tensor:
    """Project tokens to query, key and value by one matrix product, then attend within blocks.

    Equal to `block_diagonal_attention` on the three parts of `x @ w_qkv + bias`. The kernels read the projected buffer
    in place and write the three gradients into one buffer of its shape, so nothing is copied between the matrix
    products and the attention.

    Args:
        x: [B, T, D], or packed [T, D]. float16, bfloat16, float32 or float64, on a CPU or a CUDA device.
        w_qkv: [D, (N + 2 K) H] in the dtype of `x`; columns are query | key | value, each grouped by head.
        bias: [(N + 2 K) H] in the dtype of `x`, or None.
        query_heads: N, a multiple of `key_heads`.
        key_heads: K.
        head_dim: H.
        block_size, sequence_offsets, block_lengths, rotary, scale, is_causal, implementation, via: as for
            `block_diagonal_attention`.

    Returns:
        The attention output [B, T, N, H] or [T, N, H] in the dtype of `x` (autocast's dtype under autocast).

    Raises:
        ValueError: an argument is wrong; the message names it, its value and the remedy.
        NotImplementedError: none of the requested implementations can compute this call; the message says why.

    References:
        Multi-head projections as one matrix: Vaswani et al., "Attention Is All You Need" (2017), in the layout of
        `in_proj_weight` of `torch.nn.MultiheadAttention` (transposed). For the attention see
        `block_diagonal_attention`.

    Example:
        >>> import torch
        >>> from blockdiag.torch import fused_qkv_block_attention
        >>> x, w_qkv = torch.randn(1, 40, 8), torch.randn(8, (4 + 2 * 2) * 16)
        >>> fused_qkv_block_attention(x, w_qkv, query_heads=4, key_heads=2, head_dim=16, block_size=16).shape
        torch.Size([1, 40, 4, 16])
    """
    x, w_qkv = autocast_operands(x, w_qkv)
    if x.is_nested:
        (values,), (offsets,) = nested.unpack(block_lengths if sequence_offsets is None else sequence_offsets, x=x)
        output = fused_qkv_block_attention(
            values, w_qkv, bias, query_heads=query_heads, key_heads=key_heads, head_dim=head_dim, block_size=block_size,
            sequence_offsets=offsets, rotary=rotary, scale=scale, is_causal=is_causal, implementation=implementation,
            via=via,
        )  # fmt: skip
        return nested.repack(output, x)
    bias = None if bias is None else autocast_operands(bias)[0]
    validation.check_projection(x, w_qkv, bias, query_heads, key_heads, head_dim)
    buffer = torch.matmul(x, w_qkv) if bias is None else torch.nn.functional.linear(x, w_qkv.t(), bias)
    buffer = buffer.unflatten(-1, (query_heads + 2 * key_heads, head_dim))
    options = _options(block_size, scale, is_causal)
    operands = (buffer, None, None)
    return _call(operands, key_heads, sequence_offsets, block_lengths, rotary, options, implementation, via)


def _options(block_size: int, scale: float | None, is_causal: bool) -> tuple[int, float | None, bool]:
    """Check the options and convert them to the types of the operators' schema."""
    if torch.compiler.is_compiling():
        return block_size, scale, is_causal
    if scale is not None:
        scale = validation.check_scale(scale, 1)
    return validation.check_block_size(block_size), scale, validation.check_is_causal(is_causal)


def _call(
    operands: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    key_heads: int,
    sequence_offsets: torch.Tensor | None,
    block_lengths: torch.Tensor | None,
    rotary: Rotary | None,
    options: tuple[int, float | None, bool],
    implementation: str | Sequence[str] | None,
    via: Literal["jax"] | None,
) -> torch.Tensor:
    names, is_native = who_computes(implementation, via)
    if implementation is not None and not torch.compiler.is_compiling():
        check_names(implementation, names, BLOCK_DIAGONAL)
    if not operands[0].is_cuda:
        is_native = is_native and len(names) < 2
    elif is_native and torch.compiler.is_compiling():
        # Eager calls find out while they are prepared, but a compiled call must choose the operator's tags beforehand.
        is_native = takes_operands(str(operands[0].dtype).removeprefix("torch."), operands[0].shape[-1]) is None
    if may_have_tangents():
        error = functools.partial(forward_mode_error, "block-diagonal attention", "block_diagonal_attention")
        refuse_tangents(operands, error)
    (cos, sin, positions), letters = rotary_of(rotary)
    if type(operands[0]) is not torch.Tensor:
        dtensor_registration.prepare(operands[0])
    arguments = Arguments(
        *operands, sequence_offsets, block_lengths, cos, sin, positions, key_heads, *options, letters, ",".join(names)
    )
    if is_native and operands[0].is_cuda and not torch.compiler.is_compiling():
        from blockdiag.torch.ops.block_diagonal import native

        given: Any = arguments[:TENSORS]
        if is_plain(*given):
            try:
                return native.attend(arguments)
            except Unsupported:
                return torch.ops.blockdiag.block_diagonal_forward_through_jax(*arguments)
            except RuntimeError:
                # Reading the shape of a nested tensor without the jagged layout raises a RuntimeError.
                nested.refuse(query=arguments.query, key=arguments.key, value=arguments.value)
                raise
    if any(tensor is not None and tensor.is_nested for tensor in operands):
        tensors: Any = dict(zip(("query", "key", "value"), operands, strict=True))
        values, (offsets, *_) = nested.unpack(
            block_lengths if sequence_offsets is None else sequence_offsets, **tensors
        )
        nested.check_same_sequences(**tensors)
        packed: Any = tuple(values)
        output = _call(packed, key_heads, offsets, None, rotary, options, implementation, via)
        return nested.repack(output, operands[0])
    for name, tensor in (("sequence_offsets", sequence_offsets), ("block_lengths", block_lengths)):
        if tensor is not None:
            # The schema would reject it with a generic message.
            check_tensors(**{name: tensor})
    if is_native:
        return torch.ops.blockdiag.block_diagonal_forward(*arguments)
    return torch.ops.blockdiag.block_diagonal_forward_through_jax(*arguments)


def autocast_operands(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cast the operands to autocast's dtype where autocast is on, after checking that they are tensors."""
    if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        found = [type(tensor).__name__ for tensor in tensors]
        raise ValueError(f"operands must be torch tensors, got {found}; convert them with torch.as_tensor")
    return autocast(*tensors)
