"""Checks of the arguments of MoBA, and the static description that every implementation reads.

Each wrong argument raises a ValueError that names it, its value and the remedy. Arrays may be JAX's or torch's. Only
their shapes and dtypes are read, and the values of index arrays where they are known.
"""

import math
from collections.abc import Sequence
from typing import Any

from blockdiag.common import validation
from blockdiag.common.arrays import dtype_name, is_traced
from blockdiag.common.sizes import smaller_bound
from blockdiag.ops.moba.problem import MoBAProblem

MIN_BLOCK_SIZE, MAX_BLOCK_SIZE = 16, 4096
MAX_TOP_K = 64


def describe_moba_call(
    query: Any,
    key: Any,
    *,
    block_size: int,
    top_k: int,
    scale: float | None,
    is_causal: bool,
    sequence_offsets: Any,
    key_sequence_offsets: Any,
    key_mask: Any,
    routing: Any = None,
) -> MoBAProblem:
    """Check all arguments except the operands, and describe the call; reads only shape and dtype of query and key.

    Args:
        routing: None, or an object with the attributes of a `blockdiag.Routing`. A query may then choose `top_k` blocks
            besides its own, so the call has `top_k` slots.

    Raises:
        ValueError: an argument is wrong; the message names it, its value and the remedy.
    """
    *batch, length, query_heads, head_dim = query.shape
    key_length, key_heads = key.shape[-3:-1]
    block_size = check_moba_block_size(block_size)
    top_k = check_top_k(top_k)
    is_causal = validation.check_is_causal(is_causal)
    check_moba_packing(query.shape[:-2], key.shape[:-2], sequence_offsets, key_sequence_offsets)
    check_key_mask(key_mask, key.shape[:-2])
    longest = count_sequence_blocks(key_length, block_size)
    if routing is not None:
        check_routing(routing, (*query.shape[:-1], top_k), block_size, longest)
    if sequence_offsets is not None:
        num_blocks = count_packed_blocks(key_length, sequence_offsets.shape[0] - 1, block_size)
    else:
        num_blocks = math.prod(batch) * longest
    return MoBAProblem(
        query_tokens=math.prod(batch) * length,
        key_tokens=math.prod(batch) * key_length,
        query_heads=query_heads,
        key_heads=key_heads,
        head_dim=head_dim,
        dtype=dtype_name(query.dtype),
        block_size=block_size,
        num_blocks=num_blocks,
        slots=top_k if routing is not None else count_slots(top_k, longest, is_causal),
        is_causal=is_causal,
        has_key_mask=key_mask is not None,
        scale=validation.check_scale(scale, head_dim),
        has_padding=sequence_offsets is not None,
        sequence_blocks=longest,
    )


def count_sequence_blocks(length: int, block_size: int) -> int:
    """Return the number of blocks of a sequence."""
    return -(-length // block_size)


def count_packed_blocks(tokens: int, num_sequences: int, block_size: int) -> int:
    """Return the maximum number of blocks of `num_sequences` sequences with at most `tokens` rows in total."""
    if num_sequences == 0:
        return 0
    return smaller_bound(tokens, (tokens + num_sequences * (block_size - 1)) // block_size)


def count_slots(top_k: int, sequence_blocks: int, is_causal: bool) -> int:
    """Return the maximum number of blocks besides its own that a query can choose, of `sequence_blocks` blocks."""
    # Torch's symbols cannot subtract a bool.
    return max(smaller_bound(sequence_blocks, top_k) - int(is_causal), 0)


def check_moba_operands(query: Any, key: Any, value: Any = None) -> None:
    """Check shapes and dtypes of query [B, T, N, H] or [T, N, H], key and value [B, S, K, H] or [S, K, H]."""
    if query.ndim not in (3, 4):
        raise ValueError(
            f"`query` must have shape [B, T, N, H] or [T, N, H], got {tuple(query.shape)}; "
            "reshape more batch axes into one, or map over them with jax.vmap"
        )
    *batch, _, num_heads, head_dim = query.shape
    if num_heads == 0 or head_dim == 0:
        raise ValueError(f"`query` must have at least one head of at least one element, got shape {tuple(query.shape)}")
    if key.ndim != query.ndim or (*key.shape[:-3], key.shape[-1]) != (*batch, head_dim):
        expected = ", ".join([*map(str, batch), "S", "K", str(head_dim)])
        raise ValueError(
            f"`key` must have shape ({expected}) to match `query` of shape {tuple(query.shape)}, got "
            f"{tuple(key.shape)}; keys have the batch rows and the head dimension of the queries"
        )
    if value is not None and tuple(value.shape) != tuple(key.shape):
        raise ValueError(
            f"`value` must have the shape of `key`, {tuple(key.shape)}, got {tuple(value.shape)}; "
            "pass one value for each key"
        )
    for name, array in (("key", key), ("value", value)):
        if array is not None and array.dtype != query.dtype:
            raise ValueError(
                f"`{name}` must have the dtype of `query`, {query.dtype}, got {array.dtype}; cast one of them"
            )
    validation.check_heads(num_heads, key.shape[-2])
    validation.check_dtype("query", query.dtype)


def check_moba_block_size(block_size: Any) -> int:
    """Return `block_size`, which must be a multiple of 16 from 16 to 4096."""
    size = _known_integer(block_size)
    if size is None or not MIN_BLOCK_SIZE <= size <= MAX_BLOCK_SIZE or size % MIN_BLOCK_SIZE:
        raise ValueError(
            f"`block_size` must be a multiple of {MIN_BLOCK_SIZE} from {MIN_BLOCK_SIZE} to {MAX_BLOCK_SIZE}, known "
            f"when tracing, got {block_size!r}; usual sizes are 64, 128 and 512"
        )
    return size


def check_top_k(top_k: Any) -> int:
    """Return `top_k`, which must be an integer in 1..64."""
    count = _known_integer(top_k)
    if count is None or not 1 <= count <= MAX_TOP_K:
        raise ValueError(
            f"`top_k` must be an integer of 1..{MAX_TOP_K}, known when tracing, got {top_k!r}; it counts the blocks "
            "that a query sees, its own included, and larger blocks let a query see more keys"
        )
    return count


def check_moba_packing(
    tokens_shape: Sequence[int], key_tokens_shape: Sequence[int], sequence_offsets: Any, key_sequence_offsets: Any
) -> None:
    """Check both kinds of offsets against tokens of shape [T] and [S]; batch rows allow neither."""
    if sequence_offsets is None:
        if key_sequence_offsets is not None:
            raise ValueError(
                "`key_sequence_offsets` needs `sequence_offsets`, got None for the latter; pass the offsets of the "
                "queries too"
            )
        return
    if len(tokens_shape) != 1:
        raise ValueError(
            f"`sequence_offsets` describes one packed token axis, query [T, N, H], got tokens of shape "
            f"{tuple(tokens_shape)}; reshape the batch into the token axis, or map over it with jax.vmap"
        )
    validation.check_sequence_offsets(tokens_shape[0], sequence_offsets)
    if key_sequence_offsets is None:
        if tokens_shape[0] != key_tokens_shape[0]:
            raise ValueError(
                f"`key_sequence_offsets` must be given where `query` and `key` have unequally many tokens, got None "
                f"for {tokens_shape[0]} and {key_tokens_shape[0]} tokens; pass the offsets of the keys"
            )
        return
    validation.check_sequence_offsets(key_tokens_shape[0], key_sequence_offsets, "key_sequence_offsets", "key")
    if tuple(key_sequence_offsets.shape) != tuple(sequence_offsets.shape):
        raise ValueError(
            f"`key_sequence_offsets` must have the shape of `sequence_offsets`, {tuple(sequence_offsets.shape)}, got "
            f"{tuple(key_sequence_offsets.shape)}; sequence s of the queries attends to sequence s of the keys"
        )


def check_key_mask(key_mask: Any, key_tokens_shape: Sequence[int]) -> None:
    """Check for a bool array over the key tokens, or None."""
    if key_mask is None:
        return
    dtype = getattr(key_mask, "dtype", None)
    if dtype is None or dtype_name(dtype) != "bool":
        raise ValueError(
            f"`key_mask` must be a bool array, got {type(key_mask) if dtype is None else dtype}; "
            "True marks the keys that take part"
        )
    if tuple(key_mask.shape) != tuple(key_tokens_shape):
        raise ValueError(
            f"`key_mask` must have shape {tuple(key_tokens_shape)}, one element for each key token, got "
            f"{tuple(key_mask.shape)}; broadcast it first"
        )


def check_routing(routing: Any, shape: Sequence[int], block_size: int, num_blocks: int) -> None:
    """Check for a `blockdiag.Routing`, or its torch twin, with indices of `shape` and the call's blocks."""
    if not all(hasattr(routing, name) for name in ("indices", "block_size", "num_blocks")):
        raise ValueError(
            f"`routing` must be a blockdiag.Routing or None, got {type(routing)}; make one with moba_routing, "
            "Routing.from_pattern or Routing.from_block_lists"
        )
    dtype = getattr(routing.indices, "dtype", None)
    if dtype is None or dtype_name(dtype) != "int32":
        raise ValueError(
            f"`routing.indices` must be an int32 array, got {type(routing.indices) if dtype is None else dtype}; "
            "convert it to int32"
        )
    if tuple(routing.indices.shape) != tuple(shape):
        raise ValueError(
            f"`routing.indices` must have shape {tuple(shape)}, the tokens and heads of `query` and `top_k`, got "
            f"{tuple(routing.indices.shape)}; pad the last axis with -1, or pass its size as `top_k`"
        )
    for name, expected, remedy in (
        ("block_size", block_size, "block numbers mean nothing for blocks of another size; make a routing for it"),
        ("num_blocks", num_blocks, "it is the number of blocks of all tokens of `key`; make a routing for these keys"),
    ):
        if getattr(routing, name) != expected:
            raise ValueError(f"`routing.{name}` must be {expected} here, got {getattr(routing, name)}; {remedy}")


def _known_integer(value: Any) -> int | None:
    return None if isinstance(value, bool) or is_traced(value) else validation.as_index(value)
