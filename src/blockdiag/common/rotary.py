"""Rotary position embedding: tables for fusion into an attention call, and the same rotation in `jax.numpy`."""

import functools
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike, Float, Int

from blockdiag.common.dtypes import accumulation_dtype
from blockdiag.common.rotary_angles import check_rotation, rotary_angles
from blockdiag.common.validation import check_apply_to

Operand = Literal["query", "key", "value"]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["cos", "sin", "positions"],
    meta_fields=["per_token", "interleaved", "apply_to"],
)
@dataclass(frozen=True, eq=False)
class Rotary:
    """Rotary embedding to fuse into an attention call; a pytree whose options are static.

    A pair (x0, x1) of a row becomes (x0 cos - x1 sin, x1 cos + x0 sin), computed in float32 and rounded once to the
    dtype of the rotated array. Gradients use the exact transpose of this map, even for tables where cos² + sin² is not
    1. The tables themselves are constants: their gradient is zero.

    Attributes:
        cos, sin: floating tables of one shape and dtype. Without `per_token`, [P, H/2] with one row per position.
            With `per_token`, [T, H/2] with one row per token (shared by all batch rows of a [B, T, N, H] query) or
            [B, T, H/2].
        positions: int32 [T] or, for a batched query, [T] or [B, T]: the table row of each token, in [0, P). None means
            a token's position within its sequence, or within its block with `block_lengths`. Positions outside the
            table raise an error where they are known while tracing, and are clamped otherwise.
        per_token: whether the tables hold one row per token rather than one per position.
        interleaved: whether pairs are (2i, 2i + 1); otherwise they are (i, i + H/2).
        apply_to: which of "query", "key" and "value" are rotated. A rotated value is not rotated back in the output.

    Raises:
        ValueError: `apply_to` is empty or has an unknown name. The call that uses the tables checks them.

    References:
        Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021), whose pairs are
        `interleaved`; pairs of the two halves as in GPT-NeoX (2022).

    Example:
        >>> import jax
        >>> from blockdiag import Rotary, block_diagonal_attention, rotary_tables
        >>> rotary = Rotary(*rotary_tables(max_position=64, head_dim=16), apply_to=["query", "key"])
        >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 40, 2, 16))
        >>> block_diagonal_attention(query, key, value, block_size=16, rotary=rotary).shape
        (1, 40, 2, 16)
    """

    cos: Float[Array, "*rows half"]
    sin: Float[Array, "*rows half"]
    _: KW_ONLY
    positions: Int[Array, "*tokens"] | None = None
    per_token: bool = False
    interleaved: bool = False
    apply_to: Sequence[Operand] = ("query", "key")

    def __post_init__(self) -> None:
        # jit hashes static fields, so a list must become a tuple.
        object.__setattr__(self, "apply_to", check_apply_to(self.apply_to))


def rotary_tables(
    max_position: int, head_dim: int, theta: float = 10000.0, dtype: DTypeLike = jnp.float32
) -> tuple[Float[Array, "P half"], Float[Array, "P half"]]:
    """Return the standard cosine and sine tables, with angle position * theta ** (-2i / H) for pair i.

    The angles are computed in float64 on the host, because float32 loses the fraction of a large angle. Call this
    outside `jax.jit`; inside it, the tables become constants of the compiled program.

    Args:
        max_position: rows P of the tables, at least 1.
        head_dim: H, even.
        theta: base of the frequencies, positive; angles are in radians.
        dtype: dtype of the tables.

    Returns:
        cos and sin, each [P, H/2] in `dtype`.

    Raises:
        ValueError: an argument is out of range.

    References:
        Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021).

    Example:
        >>> from blockdiag import rotary_tables
        >>> cos, sin = rotary_tables(max_position=64, head_dim=16)
        >>> cos.shape, sin.dtype
        ((64, 8), dtype('float32'))
    """
    angles = rotary_angles(max_position, head_dim, theta)
    return jnp.asarray(np.cos(angles), dtype), jnp.asarray(np.sin(angles), dtype)


def apply_rotary(
    x: Float[Array, "*batch T heads H"],
    cos: Float[Array, "*rows half"],
    sin: Float[Array, "*rows half"],
    *,
    interleaved: bool = False,
) -> Float[Array, "*batch T heads H"]:
    """Rotate every head of every token by the token's row of the tables, without attention.

    This is what an attention call with a `Rotary` does to its operands before the scores.

    Args:
        x: floating [*batch, T, heads, H] with H even.
        cos, sin: floating [T, H/2], or [*batch, T, H/2].
        interleaved: whether pairs are (2i, 2i + 1); otherwise they are (i, i + H/2).

    Returns:
        The rotated array, of the shape and dtype of `x`.

    Raises:
        ValueError: the shapes do not fit together.

    References:
        Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021), whose pairs are
        `interleaved`; pairs of the two halves as in GPT-NeoX (2022).

    Example:
        >>> import jax
        >>> from blockdiag import apply_rotary, rotary_tables
        >>> x = jax.random.normal(jax.random.key(0), (1, 40, 2, 16))
        >>> rotated = apply_rotary(x, *rotary_tables(max_position=40, head_dim=16))
        >>> rotated.shape, bool((rotated[:, 0] == x[:, 0]).all())
        ((1, 40, 2, 16), True)
    """
    half = check_rotation(x, cos, sin)
    cos, sin = (jnp.broadcast_to(table[..., None, :], (*x.shape[:-2], 1, half)) for table in (cos, sin))
    return rotate(x, cos, sin, interleaved).astype(x.dtype)


def rotate(x: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    """Rotate the pairs of [..., H] by tables that broadcast to [..., H/2], in float32 (float64 for float64 arrays)."""
    wide = accumulation_dtype(x.dtype)
    first, second = _split_pairs(x.astype(wide), interleaved)
    cos, sin = cos.astype(wide), sin.astype(wide)
    return _join_pairs(first * cos - second * sin, second * cos + first * sin, interleaved)


def rotate_back(x: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    """Apply the transpose of `rotate`, which maps the gradient of a rotated array to the gradient of the array."""
    return rotate(x, cos, -sin, interleaved)


def _split_pairs(x: Array, interleaved: bool) -> tuple[Array, Array]:
    half = x.shape[-1] // 2
    if interleaved:
        pairs = x.reshape(*x.shape[:-1], half, 2)
        return pairs[..., 0], pairs[..., 1]
    return x[..., :half], x[..., half:]


def _join_pairs(first: Array, second: Array, interleaved: bool) -> Array:
    if interleaved:
        return jnp.stack([first, second], axis=-1).reshape(*first.shape[:-1], 2 * first.shape[-1])
    return jnp.concatenate([first, second], axis=-1)
