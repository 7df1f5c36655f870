"""Attention functions for Flax's multi-head attention modules, linen and nnx.

Flax itself is not imported: the arguments that the two modules pass to an `attention_fn` are listed here once.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from blockdiag.common import validation
from blockdiag.common.arrays import known_values
from blockdiag.common.rotary import Rotary, apply_rotary
from blockdiag.ops.block_diagonal.api import block_diagonal_attention
from blockdiag.ops.moba.api import moba_attention

__all__ = ["attention_fn", "moba_attention_fn"]


def attention_fn(
    *,
    block_size: int = 64,
    rotary: Rotary | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    implementation: str | tuple[str, ...] | None = None,
) -> Callable[..., Float[Array, "*batch T N H"]]:
    """Return a block-diagonal attention function for Flax's attention modules.

    The result fits `attention_fn=` of `flax.linen.MultiHeadDotProductAttention` and of `flax.nnx.MultiHeadAttention`.
    It maps query [*batch, T, N, H], key and value [*batch, T, K, H], with any number of leading batch axes, to
    [*batch, T, N, H]. Every sequence is cut into blocks of `block_size` tokens, and a token attends within its own
    block only. The arrays are first cast to the module's `dtype`, or to their common dtype.

    Args:
        block_size: tokens in a block; the last block of a sequence may be shorter.
        rotary: rotary embedding fused into the attention. If a nnx module is called with `input_positions`, they become
            its positions.
        scale: factor on the scores; 1 / sqrt(H) when None.
        is_causal: True if a token attends only to itself and earlier tokens of its block. Calling a nnx module with
            `is_causal=True` has the same effect.
        implementation: as for `block_diagonal_attention`.

    Returns:
        The attention function, whose result has the dtype that the arrays are cast to. A mask that keeps all pairs of
        tokens within a block changes nothing and is accepted. This can be checked for concrete masks only.

    Raises:
        NotImplementedError: (when called) the module requests something that is not supported; the message says what to
            do instead. This covers dropout of attention weights in training, sowing of attention weights, replaced
            einsums, key and value of another length than query (cross attention, decoding with a cache), a mask that
            removes pairs of tokens within a block, and a mask traced by `jax.jit`.
        ValueError: (when called) an argument is wrong; the message names it, its value and the remedy.

    References:
        Those of `block_diagonal_attention`: Liu et al. (2018) and Meta's ads_model_kernel_library (2026).

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from blockdiag.interop.flax import attention_fn
        >>> attention = nnx.MultiHeadAttention(
        ...     num_heads=4, in_features=32, decode=False, attention_fn=attention_fn(block_size=16), rngs=nnx.Rngs(0)
        ... )
        >>> attention(jnp.ones((2, 40, 32))).shape
        (2, 40, 32)
    """
    return _BlockDiagonalAttention(block_size, rotary, scale, is_causal, _hashable(implementation))


def moba_attention_fn(
    *,
    block_size: int,
    top_k: int,
    rotary: Rotary | None = None,
    scale: float | None = None,
    is_causal: bool = True,
    implementation: str | tuple[str, ...] | None = None,
) -> Callable[..., Float[Array, "*batch T N H"]]:
    """Return a MoBA (mixture of block attention) function for Flax's attention modules.

    It is used like the result of `attention_fn`, but each query of each head attends to its own block of keys and to
    the blocks with the highest routing scores; see `blockdiag.moba_attention`.

    Args:
        block_size: keys of a block, a multiple of 16 from 16 to 4096.
        top_k: blocks that a query attends to, its own included, 1..64.
        rotary: rotary embedding of the operands that it names, applied before blocks are chosen. If a nnx module is
            called with `input_positions`, they become its positions.
        scale: factor on the scores of the softmax; 1 / sqrt(H) when None.
        is_causal: True if a token attends only to itself and earlier tokens. If False, calling a nnx module with
            `is_causal=True` makes that call causal.
        implementation: as for `moba_attention`.

    Returns:
        The attention function. A mask that depends on keys only, of shape [*batch, 1, 1, S], removes keys: they receive
        no attention and do not count in block selection. Such a mask may be traced. Any other mask must be concrete and
        remove nothing beyond what `is_causal` removes; it then changes nothing.

    Raises:
        NotImplementedError: (when called) the module requests something that is not supported; the message says what to
            do instead. This covers other masks, dropout of attention weights in training, sowing of attention weights,
            replaced einsums, and, with causal attention, keys of another length than queries (decoding with a cache).
        ValueError: (when called) an argument is wrong; the message names it, its value and the remedy.

    References:
        Lu et al., "MoBA: Mixture of Block Attention for Long-Context LLMs" (2025).

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from blockdiag.interop.flax import moba_attention_fn
        >>> attend = moba_attention_fn(block_size=16, top_k=2)
        >>> attention = nnx.MultiHeadAttention(
        ...     num_heads=4, in_features=32, decode=False, attention_fn=attend, rngs=nnx.Rngs(0)
        ... )
        >>> attention(jnp.ones((2, 40, 32))).shape
        (2, 40, 32)
    """
    return _MoBAAttention(block_size, rotary, scale, is_causal, _hashable(implementation), top_k)


@dataclasses.dataclass(frozen=True, eq=False)
class _AttentionFunction:
    """Options of an attention function; instances can be pickled and copied, and are static values under `jax.jit`."""

    block_size: int
    rotary: Rotary | None
    scale: float | None
    is_causal: bool
    implementation: str | tuple[str, ...] | None

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        assert isinstance(other, _AttentionFunction)
        return self._options() == other._options() and _is_same_rotary(self.rotary, other.rotary)

    def __hash__(self) -> int:
        return hash((type(self), self._options()))

    def _options(self) -> tuple[Any, ...]:
        """Return all fields except `rotary`, whose tables have no hash."""
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "rotary")


@dataclasses.dataclass(frozen=True, eq=False)
class _BlockDiagonalAttention(_AttentionFunction):
    """The attention function returned by `attention_fn`."""

    # linen passes only the keywords that it finds in this signature, and nnx passes all of its own, so the signature
    # lists every keyword of both. The keywords deleted at once cannot change the result: dropout options, which matter
    # only with dropout, and precision options, which the op already meets (float32 softmax, full-precision products of
    # float32 arrays).
    def __call__(
        self,
        query: Float[Array, "*batch T N H"],
        key: Float[Array, "*batch T K H"],
        value: Float[Array, "*batch T K H"],
        mask: ArrayLike | None = None,
        dropout_rng: Any = None,
        dropout_rate: float = 0.0,
        broadcast_dropout: bool = True,
        deterministic: bool = True,
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        is_causal: bool = False,
        input_positions: ArrayLike | None = None,
        force_fp32_for_softmax: bool = False,
        qk_attn_weights_einsum: Callable[..., Any] | None = None,
        attn_weights_value_einsum: Callable[..., Any] | None = None,
    ) -> Float[Array, "*batch T N H"]:
        del dropout_rng, broadcast_dropout, precision, force_fp32_for_softmax
        _refuse_what_needs_weights(
            dropout_rate, deterministic, module, qk_attn_weights_einsum, attn_weights_value_einsum
        )
        _check_self_attention(query, key, value)
        causal = self.is_causal or is_causal
        if mask is not None:
            _check_mask(mask, length=query.shape[-3], block_size=self.block_size, is_causal=causal)
        query, key, value = _promote(query, key, value, dtype)
        batch_shape = query.shape[:-3]
        output = block_diagonal_attention(
            *(_with_one_batch_axis(array) for array in (query, key, value)),
            block_size=self.block_size,
            rotary=_at_positions(self.rotary, input_positions, batch_shape),
            scale=self.scale,
            is_causal=causal,
            implementation=self.implementation,
        )
        return output.reshape(*batch_shape, *output.shape[-3:])


@dataclasses.dataclass(frozen=True, eq=False)
class _MoBAAttention(_AttentionFunction):
    """The attention function returned by `moba_attention_fn`."""

    top_k: int

    # See `_BlockDiagonalAttention` for the reasons behind this signature.
    def __call__(
        self,
        query: Float[Array, "*batch T N H"],
        key: Float[Array, "*batch S K H"],
        value: Float[Array, "*batch S K H"],
        mask: ArrayLike | None = None,
        dropout_rng: Any = None,
        dropout_rate: float = 0.0,
        broadcast_dropout: bool = True,
        deterministic: bool = True,
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        is_causal: bool = False,
        input_positions: ArrayLike | None = None,
        force_fp32_for_softmax: bool = False,
        qk_attn_weights_einsum: Callable[..., Any] | None = None,
        attn_weights_value_einsum: Callable[..., Any] | None = None,
    ) -> Float[Array, "*batch T N H"]:
        del dropout_rng, broadcast_dropout, precision, force_fp32_for_softmax
        _refuse_what_needs_weights(
            dropout_rate, deterministic, module, qk_attn_weights_einsum, attn_weights_value_einsum
        )
        causal = self.is_causal or is_causal
        _check_batch_shape(query, key, value)
        _check_moba_lengths(query, key, causal, has_rotary=self.rotary is not None)
        batch_shape, key_length = query.shape[:-3], key.shape[-3]
        key_mask = _as_key_mask(mask, query.shape[-3], key_length, batch_shape, is_causal=causal)
        query, key, value = map(_with_one_batch_axis, _promote(query, key, value, dtype))
        query, key, value = _rotate(_at_positions(self.rotary, input_positions, batch_shape), query, key, value)
        output = moba_attention(
            query,
            key,
            value,
            block_size=self.block_size,
            top_k=self.top_k,
            scale=self.scale,
            is_causal=causal,
            key_mask=None if key_mask is None else key_mask.reshape(-1, key_length),
            implementation=self.implementation,
        )
        return output.reshape(*batch_shape, *output.shape[-3:])


def _hashable(implementation: str | Sequence[str] | None) -> str | tuple[str, ...] | None:
    return implementation if implementation is None or isinstance(implementation, str) else tuple(implementation)


def _is_same_rotary(one: Rotary | None, other: Rotary | None) -> bool:
    """Return True if two rotary embeddings have equal options and equal tables."""
    if one is None or other is None or one is other:
        return one is other
    arrays = ("cos", "sin", "positions")
    if any(
        getattr(one, field.name) != getattr(other, field.name)
        for field in dataclasses.fields(Rotary)
        if field.name not in arrays
    ):
        return False
    return all(_is_same_array(getattr(one, name), getattr(other, name)) for name in arrays)


def _is_same_array(one: Any, other: Any) -> bool:
    if one is None or other is None or one is other:
        return one is other
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    first, second = known_values(one), known_values(other)
    return first is not None and second is not None and np.array_equal(first, second)


def _refuse_what_needs_weights(
    dropout_rate: float,
    deterministic: bool,
    module: Any,
    qk_attn_weights_einsum: Callable[..., Any] | None,
    attn_weights_value_einsum: Callable[..., Any] | None,
) -> None:
    """Raise if a module asks for an operation on the attention weights, which are never materialised."""
    if dropout_rate > 0.0 and not deterministic:
        raise NotImplementedError(
            f"attention weights cannot be dropped out, got dropout_rate={dropout_rate} and deterministic=False; "
            "set dropout_rate=0.0 and apply dropout to the module's output"
        )
    if module is not None:
        raise NotImplementedError(
            "attention weights cannot be sown, got sow_weights=True; "
            "call the module with sow_weights=False, or give it Flax's own dot_product_attention with a block mask"
        )
    if qk_attn_weights_einsum is not None or attn_weights_value_einsum is not None:
        raise NotImplementedError(
            "the products of attention cannot be replaced, got qk_attn_weights_einsum_cls or "
            "attn_weights_value_einsum_cls; leave both None"
        )


def _check_batch_shape(query: Array, key: Array, value: Array) -> None:
    """Raise unless the three arrays have the same batch shape."""
    if min(query.ndim, key.ndim, value.ndim) < 3:
        raise ValueError(
            "`query`, `key` and `value` must have shape [*batch, length, heads, head_dim], "
            f"got {query.shape}, {key.shape} and {value.shape}"
        )
    if not query.shape[:-3] == key.shape[:-3] == value.shape[:-3]:
        raise ValueError(
            "`query`, `key` and `value` must have the same batch axes, "
            f"got {query.shape[:-3]}, {key.shape[:-3]} and {value.shape[:-3]}"
        )


def _check_self_attention(query: Array, key: Array, value: Array) -> None:
    """Raise unless the three arrays have the same batch shape and the same length."""
    _check_batch_shape(query, key, value)
    if not query.shape[-3] == key.shape[-3] == value.shape[-3]:
        raise NotImplementedError(
            "block-diagonal attention is self-attention over whole sequences, got lengths "
            f"{query.shape[-3]} of `query`, {key.shape[-3]} of `key` and {value.shape[-3]} of `value`; for cross "
            "attention and for decoding with a cache (decode=True) use Flax's own dot_product_attention with a mask"
        )


def _check_mask(mask: ArrayLike, *, length: int, block_size: int, is_causal: bool) -> None:
    """Raise unless `mask`, broadcastable to [*batch, N, T, T], is True wherever the blocks let a token attend."""
    if isinstance(mask, jax.core.Tracer):
        raise NotImplementedError(
            "`mask` is traced by a transformation such as jax.jit, so it cannot be checked against the blocks; pass "
            "mask=None and describe it with attention_fn(block_size=..., is_causal=...)"
        )
    allowed = np.asarray(mask).astype(bool)
    if allowed.ndim < 2 or not {allowed.shape[-2], allowed.shape[-1]} <= {1, length}:
        raise ValueError(
            f"`mask` must be broadcastable to [*batch, heads, {length}, {length}], got shape {allowed.shape}"
        )
    start = _first_block_cut(allowed, length, block_size, is_causal)
    if start is None:
        return
    if not is_causal and _first_block_cut(allowed, length, block_size, is_causal=True) is None:
        remedy = "pass mask=None and attention_fn(is_causal=True)"
    else:
        remedy = "use Flax's own dot_product_attention for this mask"
    raise NotImplementedError(
        f"`mask` removes pairs of tokens within the block that starts at token {start} (block_size={block_size}, "
        f"is_causal={is_causal}); {remedy}"
    )


def _first_block_cut(allowed: np.ndarray, length: int, block_size: int, is_causal: bool) -> int | None:
    """Return the first token of the first block where `allowed` removes a pair of block-diagonal attention, or None."""
    allowed = np.broadcast_to(allowed, (*allowed.shape[:-2], length, length))
    # Only the diagonal blocks are materialised: the whole square can be too large to hold.
    for start in range(0, length, block_size):
        block = allowed[..., start : start + block_size, start : start + block_size]
        needed = np.ones(block.shape[-2:], dtype=bool)
        if not (block | ~(np.tril(needed) if is_causal else needed)).all():
            return start
    return None


def _check_moba_lengths(query: Array, key: Array, is_causal: bool, *, has_rotary: bool) -> None:
    """Raise if queries and keys have different lengths although causality or rotary needs equal ones."""
    if query.shape[-3] != key.shape[-3] and (is_causal or has_rotary):
        raise NotImplementedError(
            f"`query` and `key` must have one length in causal attention and with a rotary embedding, got "
            f"{query.shape[-3]} and {key.shape[-3]}; for decoding with a cache (decode=True) use Flax's own "
            "dot_product_attention, or blockdiag.moba_attention with the keys so far"
        )


def _as_key_mask(
    mask: ArrayLike | None, length: int, key_length: int, batch_shape: tuple[int, ...], *, is_causal: bool
) -> Array | None:
    """Return the keys that `mask`, broadcastable to [*batch, N, T, S], keeps: bool [*batch, S], or None for all."""
    if mask is None:
        return None
    shape = np.shape(mask)
    if len(shape) < 2 or shape[-1] not in (1, key_length) or shape[-2] not in (1, length):
        raise ValueError(f"`mask` must be broadcastable to [*batch, heads, {length}, {key_length}], got shape {shape}")
    if shape[-2] == 1 and (len(shape) < 3 or shape[-3] == 1):
        keys = jnp.asarray(mask).astype(bool).reshape(*shape[:-3], shape[-1])
        return jnp.broadcast_to(keys, (*batch_shape, key_length))
    remedy = (
        "for a causal mask or none pass mask=None and moba_attention_fn(is_causal=...), for a mask of keys pass shape "
        f"[*batch, 1, 1, {key_length}]"
    )
    if isinstance(mask, jax.core.Tracer):
        raise NotImplementedError(
            f"`mask` of shape {shape} is traced by a transformation such as jax.jit, so its values are unknown; "
            f"{remedy}"
        )
    allowed = np.broadcast_to(np.asarray(mask).astype(bool), (*shape[:-2], length, key_length))
    # A few rows at a time: the whole square of a second mask can be too large to hold.
    for start in range(0, length, 256):
        rows = allowed[..., start : start + 256, :]
        needed = np.tri(rows.shape[-2], key_length, start, dtype=bool) if is_causal else np.True_
        if not (rows | ~needed).all():
            raise NotImplementedError(
                f"`mask` of shape {shape} removes keys for some queries (is_causal={is_causal}); {remedy}, or use "
                "Flax's own dot_product_attention for this mask"
            )
    return None


def _rotate(rotary: Rotary | None, query: Array, key: Array, value: Array) -> tuple[Array, Array, Array]:
    """Return the operands [B, T, heads, H], after rotating those named in `rotary.apply_to`."""
    if rotary is None:
        return query, key, value
    tokens_shape = query.shape[:-2]
    validation.check_rotary(rotary, tokens_shape, query.shape[-1], tokens_shape[-1])
    cos, sin = jnp.asarray(rotary.cos), jnp.asarray(rotary.sin)
    if not rotary.per_token and rotary.positions is None:
        cos, sin = cos[: tokens_shape[-1]], sin[: tokens_shape[-1]]
    elif not rotary.per_token:
        positions = jnp.clip(jnp.asarray(rotary.positions), 0, cos.shape[0] - 1)
        cos, sin = cos[positions], sin[positions]
    operands = {"query": query, "key": key, "value": value}
    for name in rotary.apply_to:
        operands[name] = apply_rotary(operands[name], cos, sin, interleaved=rotary.interleaved)
    return operands["query"], operands["key"], operands["value"]


def _promote(query: Array, key: Array, value: Array, dtype: Any) -> tuple[Array, Array, Array]:
    """Cast the three arrays to `dtype`, or to their common dtype when it is None."""
    if dtype is None:
        dtype = jnp.promote_types(jnp.promote_types(query.dtype, key.dtype), value.dtype)
    return query.astype(dtype), key.astype(dtype), value.astype(dtype)


def _with_one_batch_axis(array: Array) -> Array:
    """Reshape [*batch, length, heads, head_dim] to [B, length, heads, head_dim]."""
    return array.reshape(math.prod(array.shape[:-3]), *array.shape[-3:])


def _at_positions(
    rotary: Rotary | None, input_positions: ArrayLike | None, batch_shape: tuple[int, ...]
) -> Rotary | None:
    """Return `rotary` with the positions [*batch, T] that a module was called with, if any."""
    if input_positions is None:
        return rotary
    if rotary is None:
        raise ValueError(
            "`input_positions` are for rotary embedding, but there is none; pass attention_fn(rotary=Rotary(...))"
        )
    if rotary.positions is not None or rotary.per_token:
        raise ValueError("`input_positions` were given and `rotary` has positions of its own; give only one of the two")
    positions = jnp.asarray(input_positions, dtype=jnp.int32)
    if positions.shape[:-1] != batch_shape:
        raise ValueError(
            f"`input_positions` must have shape [*batch, length] with batch axes {batch_shape}, got {positions.shape}"
        )
    return dataclasses.replace(rotary, positions=positions.reshape(-1, positions.shape[-1]))
