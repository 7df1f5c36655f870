"""Gallery variants of other forms: weights normalised by their own sums, manual softmaxes, and pixel grids.

Shapes: B batch, T queries, S keys, N heads, H features of a query or key, V of a value, Y rows and X columns of a grid
of Y X = T pixels. Every function is self-contained.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array


def linear_attention(query: Array, key: Array, value: Array) -> Array:
    """query, key [B, T, N, H], value [B, T, N, V] -> [B, T, N, V]."""
    weights = jnp.einsum("btnh,bsnh->bnts", jax.nn.elu(query) + 1, jax.nn.elu(key) + 1)
    weights = jnp.tril(weights)
    weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-6)
    return jnp.einsum("bnts,bsnv->btnv", weights, value)


def normalised_again(query: Array, key: Array, value: Array, kept: Array) -> Array:
    """query [B, T, N, H], key [B, S, N, H], value [B, S, N, V], kept bool [B, S] -> [B, T, N, V]."""
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    weights = jax.nn.softmax(scores, axis=-1) * kept[:, None, None].astype(scores.dtype)
    weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-6)
    return jnp.einsum("bnts,bsnv->btnv", weights, value)


def guarded(query: Array, key: Array, value: Array, mask: Array) -> Array:
    """query [B, T, N, H], key [B, S, N, H], value [B, S, N, V], mask bool [B, S] -> [B, T, N, V]."""
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    largest = scores.max(axis=-1, keepdims=True)
    weights = jnp.where(mask[:, None, None], jnp.exp(scores - largest), 0)
    total = weights.sum(axis=-1, keepdims=True)
    return jnp.einsum("bnts,bsnv->btnv", weights / jnp.where(total == 0, 1, total), value)


def decomposed_positions(query: Array, key: Array, value: Array, rows: Array, columns: Array) -> Array:
    """query, key [B, N, T, H], value [B, N, T, V], tables [Y, Y, H] and [X, X, H] -> [B, N, T, V]."""
    high, wide = rows.shape[0], columns.shape[0]
    grid = query.reshape(*query.shape[:2], high, wide, -1)
    of_rows = jnp.einsum("bnyxh,yjh->bnyxj", grid, rows)
    of_columns = jnp.einsum("bnyxh,xih->bnyxi", grid, columns)
    scores = (query @ key.mT * query.shape[-1] ** -0.5).reshape(*query.shape[:2], high, wide, high, wide)
    scores = scores + of_rows[..., :, None] + of_columns[..., None, :]
    weights = jax.nn.softmax(scores.reshape(*query.shape[:3], high * wide), axis=-1)
    return weights @ value


def pixels(query: Array, key: Array, value: Array) -> Array:
    """query, key [B, Y, X, N, H], value [B, Y, X, N, V] -> [B, Y, X, N, V]: one softmax over both axes of keys."""
    scores = jnp.einsum("byxnh,bjinh->bnyxji", query, key) * query.shape[-1] ** -0.5
    return jnp.einsum("bnyxji,bjinv->byxnv", jax.nn.softmax(scores, axis=(-2, -1)), value)
