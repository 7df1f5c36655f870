"""Gallery variants of scores: biases, caps, temperatures, sinks, norms and rotations. Each one is self-contained.
Shapes: B batch, T queries, S keys, N heads, H features of a query or key, V of a value.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array


def alibi(query: Array, key: Array, value: Array) -> Array:
    """query, key [B, T, N, H], value [B, T, N, V] -> [B, T, N, V]; causal, with the usual slopes."""
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    heads, tokens = scores.shape[1:3]
    slopes = 2.0 ** (-8.0 * jnp.arange(1, heads + 1, dtype=scores.dtype) / heads)
    positions = jnp.arange(tokens)
    distance = positions[None, :] - positions[:, None]
    scores = scores + slopes[None, :, None, None] * distance.astype(scores.dtype)[None, None]
    scores = jnp.where((distance <= 0)[None, None], scores, -jnp.inf)
    return jnp.einsum("bnts,bsnv->btnv", jax.nn.softmax(scores, axis=-1), value)


def alibi_learned(query: Array, key: Array, value: Array, slopes: Array) -> Array:
    """query, key [B, T, N, H], value [B, T, N, V], slopes [N] -> [B, T, N, V]."""
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    positions = jnp.arange(query.shape[1], dtype=scores.dtype)
    distance = jnp.abs(positions[:, None] - positions[None, :])
    scores = scores - jnp.einsum("n,ts->nts", slopes, distance)[None]
    return jnp.einsum("bnts,bsnv->btnv", jax.nn.softmax(scores, axis=-1), value)


def clipped_distance(query: Array, key: Array, value: Array, slopes: Array, *, furthest: int = 6) -> Array:
    """query [B, T, N, H], key [B, S, N, H], value [B, S, N, V], slopes [N] -> [B, T, N, V]."""
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    queries, keys = jnp.arange(query.shape[1])[:, None], jnp.arange(key.shape[1])[None, :]
    distance = jnp.clip(queries - keys, -furthest, furthest).astype(scores.dtype)
    scores = scores + slopes[None, :, None, None] * distance[None, None]
    return jnp.einsum("bnts,bsnv->btnv", jax.nn.softmax(scores, axis=-1), value)


def soft_cap(query: Array, key: Array, value: Array, *, cap: float = 3.0) -> Array:
    """query [B, T, N, H], key [B, S, N, H], value [B, S, N, V] -> [B, T, N, V]."""
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    weights = jnp.exp(cap * jnp.tanh(scores / cap))  # bounded: no maximum needed
    weights /= weights.sum(axis=-1, keepdims=True)
    return jnp.einsum("bnts,bsnv->btnv", weights, value)


def t5_relative_bias(query: Array, key: Array, value: Array, table: Array, *, furthest: int = 100) -> Array:
    """query [B, T, N, H], key [B, S, N, H], value [B, S, N, V], table [buckets, N] -> [B, T, N, V]; no scale."""
    distance = jnp.arange(query.shape[1])[:, None] - jnp.arange(key.shape[1])[None, :]
    half = table.shape[0] // 2
    near = table.shape[0] // 4
    steps = jnp.log(jnp.maximum(jnp.abs(distance), 1) / near) / math.log(furthest / near) * (half - near)
    far = jnp.minimum(near + steps.astype(distance.dtype), half - 1)
    bucket = jnp.where(jnp.abs(distance) < near, jnp.abs(distance), far) + jnp.where(distance < 0, half, 0)
    bias = table[bucket].transpose(2, 0, 1)[None]
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) + bias
    return jnp.einsum("bnts,bsnv->btnv", jax.nn.softmax(scores, axis=-1), value)


def query_temperature(query: Array, key: Array, value: Array, temperature: Array) -> Array:
    """query [B, T, N, H], key [B, S, N, H], value [B, S, N, V], temperature [B, T, N] -> [B, T, N, V]."""
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    scores = scores / jnp.swapaxes(temperature, 1, 2)[..., None]
    return jnp.einsum("bnts,bsnv->btnv", jax.nn.softmax(scores, axis=-1), value)


def head_temperature(query: Array, key: Array, value: Array, log_temperature: Array) -> Array:
    """query [B, N, T, H], key [B, N, S, H], value [B, N, S, V], log_temperature [N] -> [B, N, T, V]."""
    temperature = jnp.exp(log_temperature).reshape(1, -1, 1, 1)
    scores = query @ key.transpose(0, 1, 3, 2) / temperature
    return jax.nn.softmax(scores, axis=-1) @ value


def log_length_scaling(query: Array, key: Array, value: Array, scale: Array) -> Array:
    """query, key [B, T, N, H], value [B, T, N, V], scale [N] -> [B, T, N, V]: sharper for queries that see more."""
    positions = jnp.arange(query.shape[1])
    seen = jnp.log((positions + 1).astype(query.dtype))
    query = query * scale[None, None, :, None] * seen[None, :, None, None]
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    scores = jnp.where((positions[:, None] >= positions[None, :])[None, None], scores, -jnp.inf)
    return jnp.einsum("bnts,bsnv->btnv", jax.nn.softmax(scores, axis=-1), value)


def dense_bias(query: Array, key: Array, value: Array, bias: Array) -> Array:
    """query [B, T, N, H], key [B, S, N, H], value [B, S, N, V], bias [B or 1, N or 1, T or 1, S] -> [B, T, N, V]."""
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    return jnp.einsum("bnts,bsnv->btnv", jax.nn.softmax(scores + bias, axis=-1), value)


def token_bias(query: Array, key: Array, value: Array, bias: Array) -> Array:
    """query [B, T, N, H], key [B, S, N, H], value [B, S, N, V], bias [T, S] -> [B, T, N, V]."""
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    scores = scores + jnp.broadcast_to(bias, scores.shape)
    return jnp.einsum("bnts,bsnv->btnv", jax.nn.softmax(scores, axis=-1), value)


def two_biases(query: Array, key: Array, value: Array, key_bias: Array, pair_bias: Array) -> Array:
    """query [B, T, N, H], key [B, S, N, H], value [B, S, N, V], biases [B, S] and [N, T, S] -> [B, T, N, V]."""
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    bias = jnp.expand_dims(key_bias, (1, 2)) + jnp.expand_dims(pair_bias, 0)
    return jnp.einsum("bnts,bsnv->btnv", jax.nn.softmax(scores + bias, axis=-1), value)


def sinks_concatenated(query: Array, key: Array, value: Array, sinks: Array) -> Array:
    """query [B, T, N, H], key [B, S, N, H], value [B, S, N, V], sinks [N] -> [B, T, N, V]."""
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    column = jnp.broadcast_to(sinks[None, :, None, None], (*scores.shape[:-1], 1))
    weights = jax.nn.softmax(jnp.concatenate([scores, column], axis=-1), axis=-1)[..., :-1]
    return jnp.einsum("bnts,bsnv->btnv", weights, value)


def sinks_in_denominator(query: Array, key: Array, value: Array, sinks: Array) -> Array:
    """query [B, T, N, H], key [B, S, N, H], value [B, S, N, V], sinks [N] -> [B, T, N, V]."""
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    sinks = sinks[None, :, None, None]
    largest = jnp.maximum(scores.max(axis=-1, keepdims=True), sinks)
    weights = jnp.exp(scores - largest)
    weights = weights / (weights.sum(axis=-1, keepdims=True) + jnp.exp(sinks - largest))
    return jnp.einsum("bnts,bsnv->btnv", weights, value)


def softmax_one(query: Array, key: Array, value: Array) -> Array:
    """query [B, N, T, H], key [B, N, S, H], value [B, N, S, V] -> [B, N, T, V]."""
    scores = query @ key.swapaxes(-2, -1) * query.shape[-1] ** -0.5
    largest = jax.lax.stop_gradient(jnp.maximum(scores.max(axis=-1, keepdims=True), 0))
    weights = jnp.exp(scores - largest)
    return weights / (jnp.exp(-largest) + weights.sum(axis=-1, keepdims=True)) @ value


def capped_window_with_sinks(query: Array, key: Array, value: Array, sinks: Array, *, window: int = 11) -> Array:
    """query, key [B, T, N, H], value [B, T, N, V], sinks [N] -> [B, T, N, V]."""
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    scores = 5.0 * jnp.tanh(scores / 5.0)
    positions = jnp.arange(query.shape[1])
    distance = positions[:, None] - positions[None, :]
    scores = jnp.where(((distance >= 0) & (distance < window))[None, None], scores, -jnp.inf)
    column = jnp.zeros_like(scores[..., :1]) + sinks[None, :, None, None]
    weights = jax.nn.softmax(jnp.concatenate([column, scores], axis=-1), axis=-1)[..., 1:]
    return jnp.einsum("bnts,bsnv->btnv", weights, value)


def normalised_query_and_key(query: Array, key: Array, value: Array, query_gain: Array, key_gain: Array) -> Array:
    """query [B, T, N, H], key [B, S, N, H], value [B, S, N, V], gains [H] -> [B, T, N, V]."""

    def normalise(x, gain):
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * gain[None, None, None]

    query, key = normalise(query, query_gain), normalise(key, key_gain)
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    return jnp.einsum("bnts,bsnv->btnv", jax.nn.softmax(scores, axis=-1), value)


def rotary(query: Array, key: Array, value: Array) -> Array:
    """query, key [B, T, N, H], value [B, T, N, V] -> [B, T, N, V]; causal, H even."""
    half = query.shape[-1] // 2
    frequencies = 10_000.0 ** -(jnp.arange(half) / half)
    angles = jnp.arange(query.shape[1])[:, None].astype(frequencies.dtype) * frequencies[None, :]
    cos, sin = (f(angles)[None, :, None].astype(query.dtype) for f in (jnp.cos, jnp.sin))

    def turn(x):
        first, second = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    scores = jnp.einsum("btnh,bsnh->bnts", turn(query), turn(key)) / math.sqrt(2 * half)
    scores = jnp.where(jnp.tri(query.shape[1], dtype=bool)[None, None], scores, -jnp.inf)
    return jnp.einsum("bnts,bsnv->btnv", jax.nn.softmax(scores, axis=-1), value)


def rotary_interleaved(query: Array, key: Array, value: Array, cos: Array, sin: Array) -> Array:
    """query, key [B, T, N, H], value [B, T, N, V], cos and sin [T, H / 2] -> [B, T, N, V]."""

    def turn(x):
        even, odd = x[..., 0::2], x[..., 1::2]
        return jnp.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1).reshape(x.shape)

    cos, sin = cos[None, :, None], sin[None, :, None]
    scores = jnp.einsum("btnh,bsnh->bnts", turn(query), turn(key)) / math.sqrt(query.shape[-1])
    return jnp.einsum("bnts,bsnv->btnv", jax.nn.softmax(scores, axis=-1), value)
