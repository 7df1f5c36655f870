"""Checks of public arguments. Each raises a ValueError that names the argument, its value and the remedy.

Shapes, dtypes and options are always checked. Values of index arrays are checked only where they are known. In a trace
they are not, and every implementation stays memory safe instead. Arrays may be JAX's or torch's.
"""

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from blockdiag.common.arrays import dtype_name, is_traced, known_values
from blockdiag.common.dtype_table import FLOATS


def check_operands(query: Any, key: Any, value: Any) -> None:
    """Check shapes and dtypes of query [B, T, N, H] or [T, N, H] against key and value with K heads."""
    if query.ndim not in (3, 4):
        raise ValueError(
            f"`query` must have shape [B, T, N, H] or [T, N, H], got {tuple(query.shape)}; "
            "reshape more batch axes into one, or map over them with jax.vmap"
        )
    *lead, num_heads, head_dim = query.shape
    if num_heads == 0 or head_dim == 0:
        raise ValueError(f"`query` must have at least one head of at least one element, got shape {tuple(query.shape)}")
    for name, array in (("key", key), ("value", value)):
        if array.ndim != query.ndim or (*array.shape[:-2], array.shape[-1]) != (*lead, head_dim):
            expected = ", ".join([*map(str, lead), "K", str(head_dim)])
            raise ValueError(
                f"`{name}` must have shape ({expected}) to match `query` of shape {tuple(query.shape)}, got "
                f"{tuple(array.shape)}; "
                "block-diagonal attention is self-attention, with equally many query and key tokens"
            )
        if array.dtype != query.dtype:
            raise ValueError(
                f"`{name}` must have the dtype of `query`, {query.dtype}, got {array.dtype}; cast one of them"
            )
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(
            f"`value` must have the {key.shape[-2]} heads of `key`, got {value.shape[-2]} in shape "
            f"{tuple(value.shape)}; pass both with equally many heads"
        )
    check_heads(num_heads, key.shape[-2])
    check_dtype("query", query.dtype)


def check_heads(query_heads: int, key_heads: int) -> None:
    """Check that query heads divide into equal groups, one for each key head."""
    if key_heads == 0 or query_heads % key_heads:
        raise ValueError(
            f"the number of query heads must be a multiple of the number of key heads, got {query_heads} and "
            f"{key_heads} (in `query` and `key`); query head n attends to key head n // (N // K)"
        )


def check_projection(x: Any, w_qkv: Any, bias: Any, query_heads: Any, key_heads: Any, head_dim: Any) -> None:
    """Check a fused projection: x [B, T, D] or [T, D], w_qkv [D, (N + 2 K) H], bias [(N + 2 K) H]."""
    for name, value in (("query_heads", query_heads), ("key_heads", key_heads), ("head_dim", head_dim)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"`{name}` must be a positive integer, got {value!r}; it describes the columns of `w_qkv`")
    check_heads(query_heads, key_heads)
    if x.ndim not in (2, 3):
        raise ValueError(
            f"`x` must have shape [B, T, D] or [T, D], got {tuple(x.shape)}; "
            "reshape more batch axes into one, or map over them with jax.vmap"
        )
    check_dtype("x", x.dtype)
    columns = (query_heads + 2 * key_heads) * head_dim
    if tuple(w_qkv.shape) != (x.shape[-1], columns):
        raise ValueError(
            f"`w_qkv` must have shape ({x.shape[-1]}, {columns}), D rows and (query_heads + 2 * key_heads) * head_dim "
            f"columns, got {tuple(w_qkv.shape)}; concatenate the query, key and value matrices along axis 1"
        )
    if bias is not None and tuple(bias.shape) != (columns,):
        raise ValueError(
            f"`bias` must have shape ({columns},), one element for each column of `w_qkv`, got {tuple(bias.shape)}"
        )
    for name, array in (("w_qkv", w_qkv), ("bias", bias)):
        if array is not None and array.dtype != x.dtype:
            raise ValueError(f"`{name}` must have the dtype of `x`, {x.dtype}, got {array.dtype}; cast one of them")


def check_dtype(name: str, dtype: Any) -> None:
    """Check that a dtype is one of `FLOATS`."""
    if dtype_name(dtype) not in FLOATS:
        raise ValueError(f"`{name}` must have one of the dtypes {list(FLOATS)}, got {dtype}; cast it first")


def check_block_size(block_size: Any) -> int:
    """Return `block_size` as a positive integer."""
    size = None if isinstance(block_size, bool) or is_traced(block_size) else as_index(block_size)
    if size is None or size < 1:
        raise ValueError(
            f"`block_size` must be a positive integer, known when tracing, got {block_size!r}; "
            "pass the rows of a block, with `block_lengths` those of the longest one"
        )
    return size


def check_scale(scale: Any, head_dim: int) -> float:
    """Return `scale` as a positive finite number; 1 / sqrt(H) for None."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    number = as_number(scale)
    if number is None or not 0 < number < math.inf:
        raise ValueError(
            f"`scale` must be a positive number, known when tracing, got {scale!r}; "
            "multiply `query` by a factor that is traced, learned or negative"
        )
    return number


def check_is_causal(is_causal: Any) -> bool:
    """Return `is_causal` as a bool, which must be known when tracing."""
    if not isinstance(is_causal, (bool, np.bool_)):
        raise ValueError(f"`is_causal` must be True or False, known when tracing, got {is_causal!r}; pass a bool")
    return bool(is_causal)


def check_packing(
    tokens_shape: Sequence[int],
    block_size: int,
    sequence_offsets: Any,
    block_lengths: Any,
    operand: str = "query",
) -> int | None:
    """Check `sequence_offsets` or `block_lengths` against an operand's tokens of shape [T]; [B, T] allows neither.

    Returns:
        The length of the longest sequence, or None where it is unknown.
    """
    if sequence_offsets is None and block_lengths is None:
        return tokens_shape[-1]
    if sequence_offsets is not None and block_lengths is not None:
        raise ValueError(
            "`sequence_offsets` and `block_lengths` exclude each other, got both; "
            "`block_lengths` alone describes blocks of any length, `sequence_offsets` blocks of equal length"
        )
    name = "block_lengths" if sequence_offsets is None else "sequence_offsets"
    array = block_lengths if sequence_offsets is None else sequence_offsets
    if len(tokens_shape) != 1:
        raise ValueError(
            f"`{name}` describes one packed token axis, {operand} [T, {'N' if operand == 'query' else 'K'}, H], got "
            f"tokens of shape {tuple(tokens_shape)}; reshape the batch into the token axis, or map over it with "
            "jax.vmap"
        )
    if sequence_offsets is not None:
        return check_sequence_offsets(tokens_shape[0], array, operand=operand)
    check_int32(name, array, "1")
    return _check_block_lengths(tokens_shape[0], block_size, array)


def check_sequence_offsets(
    tokens: int, sequence_offsets: Any, name: str = "sequence_offsets", operand: str = "query"
) -> int | None:
    """Check offsets into the rows of an operand, and return the length of the longest sequence, or None if unknown."""
    check_int32(name, sequence_offsets, "1")
    if sequence_offsets.shape[0] == 0:
        raise ValueError(f"`{name}` must have shape [num_sequences + 1], got an empty array; pass [0] for no sequences")
    offsets = known_values(sequence_offsets)
    if offsets is None:
        return None
    lengths = np.diff(offsets)
    if offsets[0] != 0:
        raise ValueError(
            f"`{name}` must start with 0, got {offsets[0]}; "
            "slice the tokens so that the first sequence starts with row 0"
        )
    if (lengths < 0).any():
        first = int(np.argmax(lengths < 0))
        raise ValueError(
            f"`{name}` must not decrease, got {offsets[first]} then {offsets[first + 1]} at index "
            f"{first + 1}; pass the running sum of the sequence lengths"
        )
    if offsets[-1] > tokens:
        raise ValueError(
            f"`{name}` must end within the {tokens} tokens of `{operand}`, got {offsets[-1]}; "
            "pad the tokens or drop sequences"
        )
    return int(lengths.max(initial=0))


def _check_block_lengths(tokens: int, block_size: int, block_lengths: Any) -> int:
    lengths = known_values(block_lengths)
    if lengths is None:
        return min(block_size, tokens)
    if (lengths < 0).any():
        raise ValueError(f"`block_lengths` must not be negative, got {lengths.min()}; an empty block has length 0")
    if (lengths > block_size).any():
        raise ValueError(
            f"`block_lengths` must not exceed block_size={block_size}, got {lengths.max()}; "
            f"pass block_size={lengths.max()}"
        )
    if lengths.sum(dtype=np.int64) > tokens:
        raise ValueError(
            f"`block_lengths` must sum to at most the {tokens} tokens of `query`, got "
            f"{lengths.sum(dtype=np.int64)}; pad the tokens or drop blocks"
        )
    return int(lengths.max(initial=0))


def check_apply_to(apply_to: Any) -> tuple[str, ...]:
    """Return the operands that a rotary embedding rotates, as a tuple."""
    operands = (apply_to,) if isinstance(apply_to, str) else tuple(apply_to)
    if not operands or not set(operands) <= {"query", "key", "value"}:
        raise ValueError(
            f'`apply_to` must name one or more of "query", "key" and "value", got {apply_to!r}; '
            "pass rotary=None to rotate nothing"
        )
    return operands


def check_rotary(rotary: Any, tokens_shape: Sequence[int], head_dim: int, longest_sequence: int | None) -> None:
    """Check the tables and positions of `rotary` against tokens of shape [B, T] or [T]."""
    if not all(hasattr(rotary, name) for name in ("cos", "sin", "apply_to", "per_token")):
        raise ValueError(f"`rotary` must be a blockdiag.Rotary or None, got {type(rotary)}; wrap cos and sin tables")
    if head_dim % 2:
        raise ValueError(f"`rotary` needs an even head dimension, got H={head_dim}; rotary embedding rotates pairs")
    _check_tables(rotary, tuple(tokens_shape), head_dim)
    table_rows = rotary.cos.shape[-2]
    if rotary.per_token:
        return
    if rotary.positions is None:
        if longest_sequence is not None and longest_sequence > table_rows:
            raise ValueError(
                f"`rotary` tables must have a row for every position, got {table_rows} rows for a sequence of "
                f"{longest_sequence} tokens; make longer tables or pass `positions`"
            )
        return
    check_int32("rotary.positions", rotary.positions, "1 or 2")
    if tuple(rotary.positions.shape) not in (tuple(tokens_shape), tuple(tokens_shape[-1:])):
        raise ValueError(
            f"`rotary.positions` must have shape {tuple(tokens_shape)}, one for each token, got "
            f"{tuple(rotary.positions.shape)}"
        )
    positions = known_values(rotary.positions)
    if positions is not None and positions.size and not (positions.min() >= 0 and positions.max() < table_rows):
        raise ValueError(
            f"`rotary.positions` must lie in [0, {table_rows}), the rows of the tables, got values in "
            f"[{positions.min()}, {positions.max()}]; make longer tables or shift the positions"
        )


def _check_tables(rotary: Any, tokens_shape: tuple[int, ...], head_dim: int) -> None:
    cos, sin = rotary.cos, rotary.sin
    for name, table in (("rotary.cos", cos), ("rotary.sin", sin)):
        if not hasattr(table, "dtype") or not hasattr(table, "shape"):
            raise ValueError(f"`{name}` must be an array, got {type(table)}; convert it with jnp.asarray")
        check_dtype(name, table.dtype)
    if cos.shape != sin.shape or cos.dtype != sin.dtype:
        raise ValueError(
            f"`rotary.cos` and `rotary.sin` must have one shape and dtype, got {tuple(cos.shape)} {cos.dtype} and "
            f"{tuple(sin.shape)} {sin.dtype}"
        )
    half = head_dim // 2
    if rotary.per_token:
        allowed = dict.fromkeys(((*tokens_shape, half), (tokens_shape[-1], half)))
        if tuple(cos.shape) not in allowed:
            raise ValueError(
                f"`rotary.cos` and `rotary.sin` with per_token=True must have shape "
                f"{' or '.join(map(str, allowed))}, one row for each token, got {tuple(cos.shape)}"
            )
        if rotary.positions is not None:
            raise ValueError(
                "`rotary.positions` must be None with per_token=True, got an array; tables per token need no positions"
            )
        return
    if cos.ndim != 2 or cos.shape[1] != half or cos.shape[0] == 0:
        raise ValueError(
            f"`rotary.cos` and `rotary.sin` must have shape [P, {half}] for H={head_dim}, got {tuple(cos.shape)}; "
            "pass per_token=True for tables with one row for each token"
        )


def check_int32(name: str, array: Any, rank: str) -> None:
    """Check for an int32 array of a rank, which is given as "1" or "1 or 2"."""
    dtype = getattr(array, "dtype", None)
    if dtype is None or dtype_name(dtype) != "int32":
        raise ValueError(
            f"`{name}` must be an int32 array, got {type(array) if dtype is None else dtype}; convert it to int32"
        )
    if str(array.ndim) not in rank.split(" or "):
        raise ValueError(f"`{name}` must have rank {rank}, got shape {tuple(array.shape)}")


def as_index(value: Any) -> int | None:
    """Return a value with `__index__` as a Python integer, and None for anything else."""
    try:
        return operator.index(value)
    except TypeError:
        return None


def as_number(value: Any) -> float | None:
    """Return a number, or an array of rank 0 with a known value, as a Python float; None for anything else."""
    if isinstance(value, bool) or is_traced(value):
        return None
    if isinstance(value, (int, float)):
        return float(value)
    is_scalar = hasattr(value, "dtype") and getattr(value, "ndim", None) == 0
    return float(value) if is_scalar and np.issubdtype(type(value.item()), np.number) else None
