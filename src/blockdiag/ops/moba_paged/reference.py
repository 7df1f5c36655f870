"""MoBA over a paged cache, written to be read: the executable specification of the operation.

One function chooses blocks for the queries of one sequence, masks the keys that a query does not see, and attends to
the keys, which are gathered from their pages. A loop runs it over the sequences. Everything is computed in float32, or
in float64 for float64 queries, without intermediate rounding.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array

from blockdiag.common.dtypes import accumulation_dtype
from blockdiag.ops.moba_paged.problem import MoBAPagedProblem


def available() -> str | None:
    """Return None: plain `jax.numpy` always runs."""
    return None


def supports(problem: MoBAPagedProblem) -> str | None:
    """Return None: the reference computes every problem."""
    del problem
    return None


def forward(
    problem: MoBAPagedProblem,
    query: Array,
    key_pages: Array,
    value_pages: Array,
    page_table: Array | None,
    kv_lengths: Array,
    query_lengths: Array | None,
    score_scale: Array | None,
    key_scales: Array | None,
    value_scales: Array | None,
    centroids: Array,
    *,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """Return output [B, T, N, V] in the output's dtype, and log-sum-exp [B, T, N] in float32 or float64.

    Queries that see nothing, and rows beyond the queries of their sequence, have output 0 and log-sum-exp -inf.
    """
    del interpret
    call, wide = problem.paged, accumulation_dtype(query.dtype)
    if call.max_keys == 0 or call.num_pages == 0:
        rows = (call.batch, call.query_tokens, call.query_heads)
        return jnp.zeros((*rows, call.value_dim), call.output_dtype), jnp.full(rows, -jnp.inf, wide)
    if page_table is None:
        page_table = jnp.arange(call.batch, dtype=jnp.int32)[:, None]
    if query_lengths is None:
        query_lengths = jnp.full_like(kv_lengths, call.query_tokens)
    if score_scale is None:
        score_scale = jnp.ones((call.batch, call.key_heads), wide)
    by_sequence = None if call.value_scale == "token" else value_scales

    attend = functools.partial(_attend, problem, key_pages, value_pages, key_scales, value_scales)
    operands = (query, page_table, kv_lengths, query_lengths, centroids, score_scale, by_sequence)
    output, log_sum = jax.lax.map(lambda operands: attend(*operands), operands)
    return output.astype(call.output_dtype), log_sum


def _choose(problem: MoBAPagedProblem, query: Array, centroids: Array, own: Array) -> Array:
    """Return whether queries [T, N, H] choose each block before their own, `own` [T]: bool [T, N, candidates].

    Ties go to the later block. A block whose score is NaN is not chosen.
    """
    call, wide = problem.paged, accumulation_dtype(query.dtype)
    block = jnp.arange(problem.num_candidates, dtype=jnp.int32)
    centroids = jnp.repeat(centroids[: problem.num_candidates].astype(wide), call.group_size, axis=1)
    scores = jnp.einsum("tnh,cnh->tnc", query.astype(wide), centroids, precision="highest")
    is_candidate = (block[None, :] < own[:, None])[:, None, :] & ~jnp.isnan(scores)
    # A block is chosen if fewer than `slots` candidates rank before it.
    this, other = scores[..., :, None], scores[..., None, :]
    is_before = (other > this) | ((other == this) & (block[None, :] > block[:, None])[None, None])
    ahead = jnp.sum(is_before & is_candidate[..., None, :], axis=-1, dtype=jnp.int32)
    return is_candidate & (ahead < problem.slots)


def _attend(
    problem: MoBAPagedProblem,
    key_pages: Array,
    value_pages: Array,
    key_scales: Array | None,
    value_scales: Array | None,
    query: Array,
    pages: Array,
    kv_length: Array,
    query_length: Array,
    centroids: Array,
    score_scale: Array,
    value_scale: Array | None,
) -> tuple[Array, Array]:
    """Attend from query [T, N, H] of one sequence with pages [max_pages] and scales [K].

    Returns:
        Output [T, N, V] and log-sum-exp [T, N].
    """
    call, wide = problem.paged, accumulation_dtype(query.dtype)
    pages = jnp.clip(pages, 0, call.num_pages - 1)
    kv_length = jnp.clip(kv_length, 0, call.max_keys)
    query_length = jnp.clip(query_length, 0, call.query_tokens)
    key_number = jnp.arange(call.max_keys, dtype=jnp.int32)

    def gather(pool: Array) -> Array:
        """Return the pages' rows for each key, [keys, K, ...]; 0 beyond the keys, because 0 * NaN would be NaN."""
        rows = pool[pages].reshape(call.max_keys, *pool.shape[2:]).astype(wide)
        return jnp.where((key_number < kv_length).reshape(-1, *[1] * (rows.ndim - 1)), rows, 0)

    row = jnp.arange(call.query_tokens, dtype=jnp.int32)
    position = jnp.where(row < query_length, kv_length - query_length + row, -1)
    own = jnp.maximum(position, 0) // problem.block_size
    is_chosen = _choose(problem, query, centroids, own)
    # Blocks beyond the candidates read an extra column that is False. Own blocks are added below.
    is_chosen = jnp.pad(is_chosen, ((0, 0), (0, 0), (0, 1)))
    block = key_number // problem.block_size
    is_seen = is_chosen[:, :, jnp.minimum(block, problem.num_candidates)]
    is_own = (block[None, :] == own[:, None]) & (key_number[None, :] <= position[:, None])
    is_seen = is_seen | is_own[:, None, :]  # [T, N, keys]

    key, value = gather(key_pages), gather(value_pages)
    factors = call.scale * score_scale.astype(wide)[None, :]  # [1 or keys, K]
    if key_scales is not None:
        factors = factors * gather(key_scales)
    if call.value_scale == "token" and value_scales is not None:
        value = value * gather(value_scales)[:, :, None]
    elif value_scale is not None:
        value = value * value_scale.astype(wide)[None, :, None]
    key, value, factors = (jnp.repeat(x, call.group_size, axis=1) for x in (key, value, factors))

    scores = jnp.einsum("tnh,jnh->tnj", query.astype(wide), key, precision="highest") * factors.T[None]
    scores = jnp.where(is_seen, scores, -jnp.inf)
    largest = jnp.max(scores, axis=-1)
    is_blind = largest == -jnp.inf
    shift = jnp.where(is_blind, 0, largest)
    weights = jnp.exp(scores - shift[:, :, None])
    total = jnp.where(is_blind, 1, jnp.sum(weights, axis=-1))
    # A NaN among the values must reach only the queries that see it.
    seen_value = jnp.where(is_seen[..., None], jnp.swapaxes(value, 0, 1)[None], 0)  # [T, N, keys, V]
    output = jnp.einsum("tnj,tnjv->tnv", weights / total[:, :, None], seen_value, precision="highest")
    return output, jnp.where(is_blind, -jnp.inf, jnp.log(total) + shift)
