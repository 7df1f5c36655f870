"""Gallery variants of plain attention and of masks. Every function is self-contained and written as a user would.
Shapes: B batch, T queries, S keys, N heads, H features of a query or key, V of a value.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array


def vanilla(query: Array, key: Array, value: Array) -> Array:
    """query [B, T, N, H], key [B, S, N, H], value [B, S, N, V] -> [B, T, N, V]."""
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) / jnp.sqrt(query.shape[-1])
    return jnp.einsum("bnts,bsnv->btnv", jax.nn.softmax(scores, axis=-1), value)


def softmax_by_hand(query: Array, key: Array, value: Array) -> Array:
    """query [B, N, T, H], key [B, N, S, H], value [B, N, S, V] -> [B, N, T, V]."""
    scores = query @ key.swapaxes(-1, -2) * query.shape[-1] ** -0.5
    weights = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    weights = weights / weights.sum(axis=-1, keepdims=True)
    return weights @ value


def divided_last(query: Array, key: Array, value: Array) -> Array:
    """query [B, N, T, H], key [B, N, S, H], value [B, N, S, V] -> [B, N, T, V]."""
    scores = query @ key.mT * query.shape[-1] ** -0.5
    weights = jnp.exp(scores - jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
    return (weights @ value) / jnp.sum(weights, axis=-1, keepdims=True)


def log_sum_exp(query: Array, key: Array, value: Array) -> Array:
    """query [B, T, N, H], key [B, S, N, H], value [B, S, N, V] -> [B, T, N, V]."""
    scores = jnp.einsum("btnh,bsnh->bnts", query * query.shape[-1] ** -0.5, key)
    weights = jnp.exp(scores - jax.nn.logsumexp(scores, axis=-1, keepdims=True))
    return jnp.einsum("bnts,bsnv->btnv", weights, value)


def wide_scores(query: Array, key: Array, value: Array) -> Array:
    """query [B, T, N, H], key [B, S, N, H], value [B, S, N, V] -> [B, T, N, V]."""
    scores = jnp.einsum("...tnh,...snh->...nts", query, key, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(scores / math.sqrt(query.shape[-1])).astype(value.dtype)
    return jnp.einsum("...nts,...snv->...tnv", weights, value)


def keys_first(query: Array, key: Array, value: Array) -> Array:
    """query [B, T, N, H], key [B, S, N, H], value [B, S, N, V] -> [B, T, N, V]."""
    scores = jnp.einsum("bsnh,btnh->bnst", key, query) / math.sqrt(query.shape[-1])
    weights = jax.nn.softmax(scores, axis=-2)
    return jnp.einsum("bsnv,bnst->btnv", value, weights)


def library(query: Array, key: Array, value: Array) -> Array:
    """query [B, T, N, H], key, value [B, S, N, H] -> [B, T, N, H]."""
    return jax.nn.dot_product_attention(query, key, value, implementation="xla")


def library_causal_grouped(query: Array, key: Array, value: Array) -> Array:
    """query [B, T, N, H], key, value [B, S, K, H] -> [B, T, N, H]."""
    return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="xla")


def library_window_lengths(query: Array, key: Array, value: Array, lengths: Array, *, ahead: int = 5) -> Array:
    """query [B, T, N, H], key, value [B, S, N, H], lengths int [B] from 1 to S -> [B, T, N, H]."""
    window, lengths = (query.shape[1], ahead), lengths.astype(jnp.int32)
    return jax.nn.dot_product_attention(
        query, key, value, key_value_seq_lengths=lengths, local_window_size=window, implementation="xla"
    )


def causal(query: Array, key: Array, value: Array) -> Array:
    """query, key [B, T, N, H], value [B, T, N, V] -> [B, T, N, V]."""
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    positions = jnp.arange(query.shape[1])
    mask = positions[:, None] >= positions[None, :]
    scores = jnp.where(mask[None, None], scores, -jnp.inf)
    return jnp.einsum("bnts,bsnv->btnv", jax.nn.softmax(scores, axis=-1), value)


def causal_tril(query: Array, key: Array, value: Array) -> Array:
    """query [B, N, T, H], key [B, N, S, H], value [B, N, S, V] -> [B, N, T, V]; the queries are the last T tokens."""
    scores = jnp.matmul(query, jnp.swapaxes(key, 2, 3)) / math.sqrt(query.shape[-1])
    tokens, keys = scores.shape[-2:]
    mask = jnp.tril(jnp.ones((tokens, keys), dtype=bool), k=keys - tokens)
    scores = jnp.where(mask[None, None], scores, jnp.finfo(scores.dtype).min)
    return jnp.matmul(jax.nn.softmax(scores), value)


def causal_constant(query: Array, key: Array, value: Array) -> Array:
    """query, key [B, T, N, H], value [B, T, N, V] -> [B, T, N, V]."""
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) / math.sqrt(query.shape[-1])
    mask = np.tril(np.ones(scores.shape[-2:], dtype=bool))  # numpy: a constant of the traced program
    scores = jnp.where(mask[None, None], scores, -1e9)
    return jnp.einsum("bnts,bsnv->btnv", jax.nn.softmax(scores, axis=-1), value)


def causal_one_head(query: Array, key: Array, value: Array) -> Array:
    """query, key [B, N, T, H], value [B, N, T, V] -> [B, N, T, V]."""

    def attend(q, k, v):
        scores = q @ k.T / math.sqrt(q.shape[-1])
        positions = jnp.arange(q.shape[0])
        scores = jnp.where(positions[:, None] < positions[None, :], -jnp.inf, scores)
        return jax.nn.softmax(scores, axis=-1) @ v

    return jax.vmap(jax.vmap(attend))(query, key, value)


def causal_positions(query: Array, key: Array, value: Array, query_positions: Array, key_positions: Array) -> Array:
    """query [B, T, N, H], key [B, S, N, H], value [B, S, N, V], positions int [B, T] and [B, S] -> [B, T, N, V]."""
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    hidden = key_positions[:, None, None, :] > query_positions[:, None, :, None]
    scores = scores + jnp.where(hidden, -1e30, 0.0).astype(scores.dtype)
    return jnp.einsum("bnts,bsnv->btnv", jax.nn.softmax(scores, axis=-1), value)


def sliding_window(query: Array, key: Array, value: Array, *, window: int = 9) -> Array:
    """query, key [B, T, N, H], value [B, T, N, V] -> [B, T, N, V]."""
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    positions = jnp.arange(query.shape[1])
    distance = positions[:, None] - positions[None, :]
    mask = (distance >= 0) & (distance < window)
    scores = jnp.where(mask[None, None, :, :], scores, -jnp.inf)
    return jnp.einsum("bnts,bsnv->btnv", jax.nn.softmax(scores, axis=-1), value)


def symmetric_window(query: Array, key: Array, value: Array, *, radius: int = 5) -> Array:
    """query, key [B, N, T, H], value [B, N, T, V] -> [B, N, T, V]."""
    positions = jnp.arange(query.shape[2])
    is_near = jnp.abs(positions[:, None] - positions[None, :]) <= radius
    bias = (1 - is_near.astype(query.dtype)) * -1e9
    scores = jnp.einsum("bnth,bnsh->bnts", query, key) / math.sqrt(query.shape[-1]) + bias[None, None]
    weights = jnp.exp(scores - jnp.max(scores, axis=-1)[..., None])
    return jnp.einsum("bnts,bnsv->bntv", weights / jnp.sum(weights, axis=-1)[..., None], value)


def dilated_window(query: Array, key: Array, value: Array, *, window: int = 24, step: int = 4) -> Array:
    """query, key [B, T, N, H], value [B, T, N, V] -> [B, T, N, V]; every query sees itself."""
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    rows = jnp.arange(query.shape[1])[:, None]
    distance = rows - rows.T
    mask = (distance >= 0) & (distance < window) & (distance % step == 0)
    weights = jax.nn.softmax(scores, axis=-1, where=mask[None, None])
    return jnp.einsum("bnts,bsnv->btnv", weights, value)


def strided_and_local(query: Array, key: Array, value: Array, *, stride: int = 8) -> Array:
    """query, key [B, T, N, H], value [B, T, N, V] -> [B, T, N, V]."""
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    queries, keys = jnp.meshgrid(*2 * [jnp.arange(query.shape[1])], indexing="ij")
    is_local = queries - keys < stride
    is_summary = jnp.mod(keys, stride) == stride - 1
    mask = jnp.logical_and(keys <= queries, jnp.logical_or(is_local, is_summary))
    scores = jnp.where(mask[None, None], scores, jnp.finfo(scores.dtype).min)
    return jnp.einsum("bnts,bsnv->btnv", jax.nn.softmax(scores, axis=-1), value)


def prefix_lm(query: Array, key: Array, value: Array, *, prefix: int = 12) -> Array:
    """query, key [B, T, N, H], value [B, T, N, V] -> [B, T, N, V]; `prefix` is constant."""
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    positions = jnp.arange(query.shape[1])
    mask = (positions[None, :] < prefix) | (positions[None, :] <= positions[:, None])
    scores = jnp.where(mask[None, None], scores, -jnp.inf)
    return jnp.einsum("bnts,bsnv->btnv", jax.nn.softmax(scores, axis=-1), value)


def prefix_lm_lengths(query: Array, key: Array, value: Array, prefixes: Array) -> Array:
    """query, key [B, T, N, H], value [B, T, N, V], prefixes int [B] -> [B, T, N, V]."""
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    positions = jnp.arange(query.shape[1])
    last = jnp.maximum(positions[None, :], prefixes[:, None] - 1)  # last key that a query sees, [B, T]
    mask = positions[None, None, :] <= last[:, :, None]
    scores = jnp.where(mask[:, None], scores, -jnp.inf)
    return jnp.einsum("bnts,bsnv->btnv", jax.nn.softmax(scores, axis=-1), value)


def document(query: Array, key: Array, value: Array, segments: Array) -> Array:
    """query, key [B, T, N, H], value [B, T, N, V], segments int [B, T] -> [B, T, N, V]."""
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    mask = segments[:, :, None] == segments[:, None, :]
    scores = jnp.where(mask[:, None], scores, -1e9)
    return jnp.einsum("bnts,bsnv->btnv", jax.nn.softmax(scores, axis=-1), value)


def causal_document(query: Array, key: Array, value: Array, segments: Array) -> Array:
    """query, key [B, T, N, H], value [B, T, N, V], segments int [B, T] -> [B, T, N, V]."""
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    tokens = query.shape[1]
    is_past = jnp.arange(tokens)[:, None] >= jnp.arange(tokens)[None, :]
    is_same = segments[:, None, :, None] == segments[:, None, None, :]
    scores = jnp.where(is_same & is_past[None, None], scores, jnp.finfo(scores.dtype).min)
    return jnp.einsum("bnts,bsnv->btnv", jax.nn.softmax(scores, axis=-1), value)


def block_diagonal(query: Array, key: Array, value: Array, *, block_size: int = 13) -> Array:
    """query, key [B, T, N, H], value [B, T, N, V] -> [B, T, N, V]."""
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    blocks = jnp.arange(query.shape[1]) // block_size
    scores = jnp.where((blocks[:, None] == blocks[None, :])[None, None], scores, -jnp.inf)
    return jnp.einsum("bnts,bsnv->btnv", jax.nn.softmax(scores, axis=-1), value)


def packed_documents(query: Array, key: Array, value: Array, offsets: Array) -> Array:
    """query, key [T, N, H], value [T, N, V], offsets int [documents + 1], from 0 to T -> [T, N, V]."""
    scores = jnp.einsum("tnh,snh->nts", query, key) * query.shape[-1] ** -0.5
    positions = jnp.arange(query.shape[0])
    segments = jnp.searchsorted(offsets, positions, side="right")
    mask = (segments[:, None] == segments[None, :]) & (positions[:, None] >= positions[None, :])
    scores = jnp.where(mask[None], scores, -jnp.inf)
    return jnp.einsum("nts,snv->tnv", jax.nn.softmax(scores, axis=-1), value)


def cross_attention(query: Array, key: Array, value: Array, lengths: Array) -> Array:
    """query [B, T, N, H], key [B, S, N, H], value [B, S, N, V], lengths int [B] from 1 to S -> [B, T, N, V]."""
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    is_token = jnp.arange(key.shape[1])[None, :] < lengths[:, None]
    scores = jnp.where(is_token[:, None, None, :], scores, -jnp.inf)
    return jnp.einsum("bnts,bsnv->btnv", jax.nn.softmax(scores, axis=-1), value)


def dense_mask(query: Array, key: Array, value: Array, mask: Array) -> Array:
    """query [B, T, N, H], key [B, S, N, H], value [B, S, N, V], mask bool [B, 1, T, S] -> [B, T, N, V]."""
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    scores = jnp.where(mask, scores, jnp.asarray(-1e9, scores.dtype))
    return jnp.einsum("bnts,bsnv->btnv", jax.nn.softmax(scores, axis=-1), value)
