"""Appending to a paged cache for torch: the public function."""

import functools
from collections.abc import Sequence
from typing import Any, Literal

import torch

from blockdiag.common import validation
from blockdiag.interop.private_torch import may_have_tangents
from blockdiag.ops.append.problem import APPEND
from blockdiag.torch import dtensor_registration, nested
from blockdiag.torch.arguments import (
    check_names,
    inference_error,
    is_plain,
    refuse_tangents,
    wants_gradient,
    who_computes,
)
from blockdiag.torch.operator import Unsupported
from blockdiag.torch.ops.append.operators import TENSORS, AppendArguments, describe
from blockdiag.torch.ops.paged.operators import as_tensor_scale
from blockdiag.torch.rotary import Rotary, rotary_of
from blockdiag.triton_kernels.append.plans import takes_rows

# Types of options that are safe in a cache key before they are checked.
_PLAIN_OPTIONS = {int, str, type(None)}


def append_to_pages(
    key: torch.Tensor,
    value: torch.Tensor | None,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor | None,
    page_table: torch.Tensor | None,
    kv_lengths: torch.Tensor,
    *,
    query_lengths: torch.Tensor | None = None,
    query_offsets: torch.Tensor | None = None,
    rotary: Rotary | None = None,
    key_scale: torch.Tensor | float | None = None,
    value_scale: torch.Tensor | float | None = None,
    key_centroids: torch.Tensor | None = None,
    block_size: int | None = None,
    implementation: str | Sequence[str] | None = None,
    via: Literal["jax"] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Write the keys and values of new tokens into the pages that `paged_attention` reads, in place.

    This is the PyTorch version of `blockdiag.append_to_pages`, with the same arguments and meaning. On CUDA it launches
    the same Triton kernel on the current stream, without JAX, and never waits for the device. The JAX function returns
    new arrays, while this one changes the tensors and returns them.

    It is a registered operator that declares its mutations, so `torch.compile` with full graphs and dynamic shapes and
    CUDA graphs work. Through JAX, and therefore on the CPU, new arrays are computed and copied into the tensors, which
    takes time proportional to the pool.

    Token t of the q new ones of sequence b goes to position ``kv_lengths[b] - q + t``, which is row
    ``position % page_size`` of page ``page_table[b, position // page_size]``. Nothing else changes. Two tokens must not
    go to the same place.

    This function is for inference: a tensor that autograd tracks raises a TypeError at once. DTensors may be sharded
    over heads, and over the batch rows of a contiguous cache. Each process writes to its own shard, and new tokens that
    are placed differently are gathered.

    Args:
        key, value: [B, T, K, H] and [B, T, K, V], T new tokens of each sequence; or packed [rows, K, H] and
            [rows, K, V] with `query_offsets`. Both of one dtype: float16, bfloat16, float32, float64, float8_e4m3fn or
            float8_e5m2. Copied where they are not contiguous or not aligned to 16 bytes. `value` and `value_pages` are
            None for a latent cache, whose values are columns of its keys.
        key_pages, value_pages: the pool, [P, page_size, K, H] and [P, page_size, K, V], contiguous, each in the dtype
            of `key` or in an 8-bit dtype, also int8, which needs a scale; see the JAX function.
        page_table: int32 [B, max_pages], page numbers. Checked on the CPU; on a GPU nothing is written for page numbers
            outside [0, P). None for a contiguous cache, [B, S, K, H].
        kv_lengths: int32 [B], number of keys of each sequence, including the new ones. Checked on the CPU; on a GPU
            tokens before position 0 or after the last page are not written.
        query_lengths: int32 [B], how many of the T tokens each sequence has, counted from the first; all when None.
        query_offsets: int32 [B + 1], for packed tokens: sequence b has rows [offsets[b], offsets[b + 1]).
        rotary: rotary embedding of the key; its `positions` are those of the tokens in their sequences unless given.
        key_scale, value_scale: divisors of keys and values: a number, or float32 of shape [] or [B, K]. Or contiguous
            pages of scales, float32 [P, page_size, K], beside 8-bit pages: then the scale of each new token and head is
            computed and written to its place.
        key_centroids: float32 [B, max_blocks, K, H], contiguous, the mean key of each block of a sequence. The mean
            keys of blocks whose last key is new are written.
        block_size: keys of a block; with `key_centroids`.
        implementation, via: which implementation runs, see `paged_attention`.

    Returns:
        Every tensor that was written, in the order of the arguments: key_pages, value_pages if given, then key_scale
        and value_scale if they are pages, then key_centroids if given.

    Raises:
        ValueError: an argument is wrong; the message names it, its value and the remedy.
        NotImplementedError: none of the requested implementations can compute this call; the message says why.
        TypeError: autograd tracks one of the tensors.

    References:
        Pages: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention" (2023).
        8-bit caches: Micikevicius et al., "FP8 Formats for Deep Learning" (2022).

    Example:
        >>> import torch
        >>> from blockdiag.torch import append_to_pages
        >>> key_pages, value_pages = torch.zeros(2, 10, 16, 2, 64).unbind()
        >>> page_table = torch.tensor([[7, 1, 4], [0, 9, 9]], dtype=torch.int32)
        >>> key = value = torch.ones(2, 1, 2, 64)
        >>> lengths = torch.tensor([17, 1], dtype=torch.int32)
        >>> pages = append_to_pages(key, value, key_pages, value_pages, page_table, lengths)
        >>> torch.argwhere(key_pages[:, :, 0, 0] == 1).tolist()
        [[0, 0], [1, 0]]
    """
    names, is_native = who_computes(implementation, via)
    tables, letters = rotary_of(rotary)
    key_scale, key_scale_pages = _apart(key_scale)
    value_scale, value_scale_pages = _apart(value_scale)
    arguments = AppendArguments(
        key, value, key_pages, value_pages, page_table, kv_lengths, query_lengths, query_offsets, *tables,
        key_scale, value_scale, key_scale_pages, value_scale_pages, key_centroids, letters, block_size,
        ",".join(names),
    )  # fmt: skip
    if may_have_tangents():
        refuse_tangents(arguments.tensors, functools.partial(inference_error, "append_to_pages"))
    if wants_gradient(arguments.tensors):
        raise inference_error("append_to_pages")
    if not torch.compiler.is_compiling():
        if is_native and isinstance(key, torch.Tensor) and key.is_cuda and _append_natively(arguments):
            return arguments.written
        check_names(implementation, names, APPEND)
        # Checked before the operator, whose schema would reject other types with a generic message.
        describe(arguments)
        arguments = arguments._replace(block_size=validation.as_index(arguments.block_size))
    if type(key) is not torch.Tensor:
        dtensor_registration.prepare(key)
    if is_native and key.is_cuda:
        is_native = _takes(arguments)
    scales = {name: as_tensor_scale(getattr(arguments, name), key) for name in ("key_scale", "value_scale")}
    operators = torch.ops.blockdiag
    operator = operators.append_to_pages if is_native else operators.append_to_pages_through_jax
    operator(*arguments._replace(**scales))
    return arguments.written


def _apart(scale: Any) -> tuple[Any, Any]:
    """Split a scale into a given scale and pages of scales to be computed, one of which is None."""
    return (None, scale) if isinstance(scale, torch.Tensor) and scale.ndim == 3 else (scale, None)


def _append_natively(arguments: AppendArguments) -> bool:
    """Run the call on plain eager CUDA tensors without the dispatcher; False if this path does not apply."""
    from blockdiag.torch.ops.append import native

    tensors = [one for one in arguments.tensors if type(one) not in (int, float)]
    if not is_plain(*tensors) or not _PLAIN_OPTIONS.issuperset(map(type, arguments[TENSORS:])):
        return False
    try:
        native.append(arguments)
    except Unsupported:
        return False
    except RuntimeError:
        # Reading the shape of a nested tensor without the jagged layout raises a RuntimeError.
        nested.refuse(key=arguments.key, value=arguments.value)
        raise
    return True


def _takes(arguments: AppendArguments) -> bool:
    """Return whether the kernel supports these dtypes and head dimensions."""
    tensors = {name: getattr(arguments, name) for name in ("key", "key_pages", "value_pages")}
    dtypes = {name: _dtype_name(tensor) for name, tensor in tensors.items() if tensor is not None}
    value_dim = 0 if arguments.value is None else arguments.value.shape[-1]
    table = None if arguments.cos is None else _dtype_name(arguments.cos)
    return takes_rows(dtypes, table, arguments.key.shape[-1], value_dim) is None


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
