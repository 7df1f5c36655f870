"""Gallery variants of structure: shared heads, proteins, several softmaxes or none, and work after attention.

Shapes: B batch, R rows, T queries, S keys, N heads, K heads of keys, H features of a query or key, V of a value,
P points. Every function is self-contained.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array


def grouped_query(query: Array, key: Array, value: Array) -> Array:
    """query [B, T, N, H], key [B, S, K, H], value [B, S, K, V] -> [B, T, N, V]."""
    batch, tokens, heads, head_dim = query.shape
    grouped = query.reshape(batch, tokens, key.shape[2], -1, head_dim)
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, key) * head_dim**-0.5
    outputs = jnp.einsum("bkgts,bskv->btkgv", jax.nn.softmax(scores, axis=-1), value)
    return outputs.reshape(batch, tokens, heads, -1)


def grouped_query_repeated(query: Array, key: Array, value: Array) -> Array:
    """query [B, T, N, H], key [B, S, K, H], value [B, S, K, V] -> [B, T, N, V]."""
    key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    return jnp.einsum("bnts,bsnv->btnv", jax.nn.softmax(scores, axis=-1), value)


def multi_query(query: Array, key: Array, value: Array) -> Array:
    """query [B, T, N, H], key [B, S, H], value [B, S, V] -> [B, T, N, V]."""
    scores = jnp.einsum("btnh,bsh->bnts", query, key) * query.shape[-1] ** -0.5
    return jnp.einsum("bnts,bsv->btnv", jax.nn.softmax(scores, axis=-1), value)


def latent(query: Array, query_turned: Array, latents: Array, key_turned: Array) -> Array:
    """query [B, T, N, C], query_turned [B, T, N, E], latents [B, T, C], key_turned [B, T, E] -> [B, T, N, C]."""
    scores = jnp.einsum("btnc,bsc->bnts", query, latents) + jnp.einsum("btne,bse->bnts", query_turned, key_turned)
    scores = scores * (query.shape[-1] + query_turned.shape[-1]) ** -0.5
    scores = jnp.where(jnp.tri(query.shape[1], dtype=bool)[None, None], scores, -jnp.inf)
    return jnp.einsum("bnts,bsc->btnc", jax.nn.softmax(scores, axis=-1), latents)


def latent_slice(query: Array, shared: Array) -> Array:
    """query [B, T, N, H], shared [B, S, H] -> [B, T, N, 3 H / 4]: the value is the first part of the key."""
    value = shared[:, :, : 3 * shared.shape[-1] // 4]
    scores = jnp.einsum("btnh,bsh->btns", query, shared) / math.sqrt(query.shape[-1])
    return jnp.einsum("btns,bsv->btnv", jax.nn.softmax(scores, axis=-1), value)


def wide_values(query: Array, key: Array, value: Array) -> Array:
    """query [B, N, T, H], key [B, N, S, H], value [B, N, S, 2 V] -> [B, N, T, 2 V]."""
    scores = jax.lax.dot_general(query, key, (((3,), (3,)), ((0, 1), (0, 1)))) * query.shape[-1] ** -0.5
    return jax.lax.batch_matmul(jax.nn.softmax(scores, axis=-1), value)


def similarity(tokens: Array) -> Array:
    """tokens [B, T, H] -> [B, T, H]: query, key and value are one array."""
    return jax.nn.softmax(tokens @ tokens.mT / math.sqrt(tokens.shape[-1]), axis=-1) @ tokens


def one_query(query: Array, key: Array, value: Array, lengths: Array) -> Array:
    """query [B, 1, N, H], key [B, S, N, H], value [B, S, N, V], lengths int [B] from 1 to S -> [B, 1, N, V]."""
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    is_filled = jnp.arange(key.shape[1])[None, :] < lengths[:, None]
    scores = jnp.where(is_filled[:, None, None], scores, jnp.finfo(scores.dtype).min)
    return jnp.einsum("bnts,bsnv->btnv", jax.nn.softmax(scores, axis=-1), value)


def one_query_grouped(query: Array, key: Array, value: Array) -> Array:
    """query [B, N, H], key [B, S, K, H], value [B, S, K, V] -> [B, N, V]: the heads of a group are the rows."""
    batch, heads, head_dim = query.shape
    grouped = query.reshape(batch, key.shape[2], heads // key.shape[2], head_dim)
    scores = jnp.einsum("bkgh,bskh->bkgs", grouped, key) * head_dim**-0.5
    return jnp.einsum("bkgs,bskv->bkgv", jax.nn.softmax(scores), value).reshape(batch, heads, -1)


def evoformer_row(query: Array, key: Array, value: Array, mask_bias: Array, pair_bias: Array, gate: Array) -> Array:
    """query, key [B, R, T, N, H], value, gate [B, R, T, N, V], biases [B, R, 1, 1, T], [B, 1, N, T, T] -> as gate."""
    scores = jnp.einsum("brtnh,brsnh->brnts", query, key) * query.shape[-1] ** -0.5
    weights = jax.nn.softmax(scores + mask_bias + pair_bias, axis=-1)
    outputs = jnp.einsum("brnts,brsnv->brtnv", weights, value)
    return jax.nn.sigmoid(gate) * outputs


def triangle(query: Array, key: Array, value: Array, mask: Array, bias: Array, gate: Array, projection: Array) -> Array:
    """query, key [B, R, N, T, H], value [B, R, N, T, V], mask bool [B, R, T], bias [B, N, T, T], gate [B, R, T, N * V],
    projection [N * V, H] -> [B, R, T, H].
    """
    scores = query @ key.swapaxes(-1, -2) / math.sqrt(query.shape[-1])
    scores = scores + bias[:, None] + jnp.where(mask, 0.0, -1e9).astype(bias.dtype)[:, :, None, None, :]
    outputs = jax.nn.softmax(scores, axis=-1) @ value
    outputs = outputs.swapaxes(2, 3).reshape(gate.shape)
    return (outputs * jax.nn.sigmoid(gate)) @ projection


def differential(query: Array, key: Array, value: Array) -> Array:
    """query, key [B, T, 2 N, H], value [B, T, N, 2 V] -> [B, T, N, 2 V]."""
    first_query, second_query = jnp.split(query, 2, axis=2)
    first_key, second_key = jnp.split(key, 2, axis=2)
    scale = query.shape[-1] ** -0.5
    first = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", first_query, first_key) * scale, axis=-1)
    second = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", second_query, second_key) * scale, axis=-1)
    return jnp.einsum("bnts,bsnv->btnv", first - 0.2 * second, value)


def differential_learned(
    query: Array, key: Array, value: Array, lambda_query: Array, lambda_key: Array, *, start: float = 0.8
) -> Array:
    """query, key [B, T, N, 2, H], value [B, T, N, 2 V], lambda_query, lambda_key [2, H] -> [B, T, N, 2 V]; causal."""
    scores = jnp.einsum("btnmh,bsnmh->bmnts", query, key) * query.shape[-1] ** -0.5
    scores = jnp.where(jnp.tri(query.shape[1], dtype=bool)[None, None, None], scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1)
    factors = jnp.exp(jnp.sum(lambda_query * lambda_key, axis=-1))
    factor = factors[0] - factors[1] + start
    outputs = jnp.einsum("bnts,bsnv->btnv", weights[:, 0] - factor * weights[:, 1], value)
    outputs = outputs * jax.lax.rsqrt(jnp.mean(outputs**2, axis=-1, keepdims=True) + 1e-5)
    return outputs * (1 - start)


def invariant_points(
    query: Array,
    key: Array,
    value: Array,
    query_points: Array,
    key_points: Array,
    value_points: Array,
    pair_bias: Array,
    head_weights: Array,
) -> tuple[Array, Array]:
    """query [B, T, N, H], key [B, S, N, H], value [B, S, N, V], points of one frame [B, T or S, N, P, 3], pair_bias
    [B, T, S, N], head_weights [N] -> [B, T, N, V] and [B, T, N, P, 3].
    """
    between = jnp.sum((query_points[:, :, None] - key_points[:, None]) ** 2, axis=(-2, -1))  # [B, T, S, N]
    weight = math.sqrt(2 / (9 * query_points.shape[-2])) / 2 * jax.nn.softplus(head_weights)
    scores = jnp.einsum("btnh,bsnh->btsn", query, key) * query.shape[-1] ** -0.5
    scores = math.sqrt(1 / 3) * (scores + pair_bias - weight[None, None, None, :] * between)
    weights = jax.nn.softmax(scores, axis=2)
    outputs = jnp.einsum("btsn,bsnv->btnv", weights, value)
    return outputs, jnp.einsum("btsn,bsnpx->btnpx", weights, value_points)


def invariant_points_frames(
    query: Array, key: Array, value: Array, points: Array, pair_bias: Array, rotations: Array, places: Array
) -> tuple[Array, Array]:
    """query, key [B, T, N, H], value [B, T, N, V], points of own frames [3, B, T, N, P, 3], pair_bias [B, N, T, T],
    frames [B, T, 3, 3] and [B, T, 3] -> [B, T, N, V] and [B, T, N, P, 3].
    """
    points = jnp.einsum("btxy,cbtnpy->cbtnpx", rotations, points) + places[None, :, :, None, None]
    queries, keys, values = points.reshape(*points.shape[:4], -1)  # [B, T, N, 3 P] each
    between = jnp.sum(queries**2, axis=-1).mT[..., None] + jnp.sum(keys**2, axis=-1).mT[:, :, None]
    between = between - 2 * jnp.einsum("btnx,bsnx->bnts", queries, keys)
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5 + pair_bias
    weights = jax.nn.softmax(scores - 0.1 * between, axis=-1)
    moved = jnp.einsum("bnts,bsnx->btnx", weights, values).reshape(points.shape[1:])
    moved = jnp.einsum("btyx,btnpy->btnpx", rotations, moved - places[:, :, None, None])
    return jnp.einsum("bnts,bsnv->btnv", weights, value), moved


def sigmoid(query: Array, key: Array, value: Array) -> Array:
    """query [B, T, N, H], key [B, S, N, H], value [B, S, N, V] -> [B, T, N, V]."""
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    weights = jax.nn.sigmoid(scores - math.log(key.shape[1]))
    return jnp.einsum("bnts,bsnv->btnv", weights, value)


def sigmoid_causal(query: Array, key: Array, value: Array, bias: Array) -> Array:
    """query, key [B, T, N, H], value [B, T, N, V], bias [N] -> [B, T, N, V]."""
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5 + bias[None, :, None, None]
    positions = jnp.arange(query.shape[1])
    mask = positions[:, None] >= positions[None, :]
    weights = jnp.where(mask[None, None], 1 / (1 + jnp.exp(-scores)), 0)
    return jnp.einsum("bnts,bsnv->btnv", weights, value)


def squared_relu(query: Array, key: Array, value: Array) -> Array:
    """query [B, N, T, H], key [B, N, S, H], value [B, N, S, V] -> [B, N, T, V]."""
    weights = jnp.square(jax.nn.relu(query @ key.mT * query.shape[-1] ** -0.5)) / key.shape[2]
    return weights @ value


def retention(query: Array, key: Array, value: Array, log_decay: Array) -> Array:
    """query, key [B, T, N, H], value [B, T, N, V], log_decay [N] -> [B, T, N, V]."""
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    positions = jnp.arange(query.shape[1])
    distance = jnp.maximum(positions[:, None] - positions[None, :], 0).astype(scores.dtype)
    decay = jnp.exp(-jnp.exp(log_decay)[:, None, None] * distance[None])
    weights = scores * jnp.tril(decay)[None]
    return jnp.einsum("bnts,bsnv->btnv", weights, value)


def gated_output(query: Array, key: Array, value: Array, gate: Array) -> Array:
    """query [B, T, N, H], key [B, S, N, H], value [B, S, N, V], gate [B, T, N * V] -> [B, T, N * V]."""
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    outputs = jnp.einsum("bnts,bsnv->btnv", jax.nn.softmax(scores, axis=-1), value)
    return outputs.reshape(gate.shape) * jax.nn.silu(gate)


def normalised_heads(query: Array, key: Array, value: Array, gain: Array) -> Array:
    """query [B, N, T, H], key [B, N, S, H], value [B, N, S, V], gain [N, V] -> [B, T, N, V]."""
    scores = jnp.einsum("bnth,bnsh->bnts", query, key) * query.shape[-1] ** -0.5
    outputs = jnp.einsum("bnts,bnsv->btnv", jax.nn.softmax(scores, axis=-1), value)
    size = jnp.sqrt(jnp.mean(jnp.square(outputs), axis=-1, keepdims=True) + 1e-6)
    return outputs / size * gain[None, None]


def projected(tokens: Array, inputs: Array, outputs: Array) -> Array:
    """tokens [B, T, C], inputs [3, C, N, H], outputs [N, H, C] -> [B, T, C]: a whole causal layer."""
    query, key, value = jnp.einsum("btc,icnh->ibnth", tokens, inputs)
    scores = jnp.einsum("bnth,bnsh->bnts", query, key) / math.sqrt(query.shape[-1])
    mask = jnp.triu(jnp.full(scores.shape[-2:], -jnp.inf, scores.dtype), k=1)
    weights = jax.nn.softmax(scores + mask[None, None], axis=-1)
    return jnp.einsum("bnts,bnsh,nhc->btc", weights, value, outputs)
