"""Paged attention, written to be read: the executable specification of the operation.

One function attends from the queries of one sequence to its keys, which are gathered from their pages. A loop runs it
over the sequences. Everything is computed in float32, or in float64 for float64 queries, without intermediate rounding.
Splits are ignored.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array

from blockdiag.common.dtypes import accumulation_dtype
from blockdiag.ops.paged.packed import by_tiles
from blockdiag.ops.paged.problem import PagedProblem


def available() -> str | None:
    """Return None: plain `jax.numpy` always runs."""
    return None


def supports(problem: PagedProblem) -> str | None:
    """Return None: the reference computes every problem."""
    del problem
    return None


@by_tiles
def forward(
    problem: PagedProblem,
    query: Array,
    key_pages: Array,
    value_pages: Array | None,
    page_table: Array | None,
    kv_lengths: Array,
    query_lengths: Array | None,
    sinks: Array | None,
    score_scale: Array | None,
    key_scales: Array | None,
    value_scales: Array | None,
    *,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """Return output [B, T, N, V] in the output's dtype, and log-sum-exp [B, T, N] in float32 or float64.

    Queries that see nothing have output 0, and their sink's logit or -inf as log-sum-exp. Rows beyond the queries of
    their sequence have 0 and -inf.
    """
    del interpret
    wide = accumulation_dtype(query.dtype)
    if problem.max_keys == 0 or problem.num_pages == 0:
        # With no keys at all, every sequence gets one page with one masked key.
        ones = (1, 1, problem.key_heads)
        key_pages = jnp.zeros((*ones, problem.head_dim), key_pages.dtype)
        if value_pages is not None:
            value_pages = jnp.zeros((*ones, problem.value_dim), value_pages.dtype)
        key_scales = None if key_scales is None else jnp.ones(ones, key_scales.dtype)
        is_by_token = problem.value_scale == "token"
        value_scales = jnp.ones(ones, jnp.float32) if is_by_token else value_scales
        page_table, kv_lengths = jnp.zeros((problem.batch, 1), jnp.int32), jnp.zeros_like(kv_lengths)
    elif page_table is None:
        page_table = jnp.arange(problem.batch, dtype=jnp.int32)[:, None]
    if query_lengths is None:
        query_lengths = jnp.full_like(kv_lengths, problem.query_tokens)
    if score_scale is None:
        score_scale = jnp.ones((problem.batch, problem.key_heads), wide)
    by_sequence = None if problem.value_scale == "token" else value_scales

    attend = functools.partial(_attend, problem, key_pages, value_pages, key_scales, value_scales, sinks)
    operands = (query, page_table, kv_lengths, query_lengths, score_scale, by_sequence)
    output, log_sum = jax.lax.map(lambda operands: attend(*operands), operands)
    return output.astype(problem.output_dtype), log_sum


def _attend(
    problem: PagedProblem,
    key_pages: Array,
    value_pages: Array | None,
    key_scales: Array | None,
    value_scales: Array | None,
    sinks: Array | None,
    query: Array,
    pages: Array,
    kv_length: Array,
    query_length: Array,
    score_scale: Array,
    value_scale: Array | None,
) -> tuple[Array, Array]:
    """Attend from query [T, N, H] of one sequence with pages [max_pages] and scales [K].

    Returns:
        Output [T, N, V] and log-sum-exp [T, N].
    """
    wide = accumulation_dtype(query.dtype)
    pages = jnp.clip(pages, 0, key_pages.shape[0] - 1)
    num_keys = pages.shape[0] * key_pages.shape[1]
    kv_length = jnp.clip(kv_length, 0, num_keys)
    query_length = jnp.clip(query_length, 0, None if problem.has_more_queries else problem.query_tokens)

    def gather(pool: Array) -> Array:
        """Return the pages' rows for each key, [keys, K, ...]; 0 beyond the keys, because 0 * NaN would be NaN."""
        rows = pool[pages].reshape(num_keys, *pool.shape[2:]).astype(wide)
        is_key = jnp.arange(num_keys, dtype=jnp.int32) < kv_length
        return jnp.where(is_key.reshape(-1, *[1] * (rows.ndim - 1)), rows, 0)

    key = gather(key_pages)
    value = key[..., : problem.value_dim] if value_pages is None else gather(value_pages)
    factors = problem.scale * score_scale.astype(wide)[None, :]  # [1 or keys, K]
    if key_scales is not None:
        factors = factors * gather(key_scales)
    if problem.value_scale == "token" and value_scales is not None:
        value = value * gather(value_scales)[:, :, None]
    elif value_scale is not None:
        value = value * value_scale.astype(wide)[None, :, None]
    key, value, factors = (jnp.repeat(x, problem.group_size, axis=1) for x in (key, value, factors))

    scores = jnp.einsum("tnh,jnh->ntj", query.astype(wide), key, precision="highest") * factors.T[:, None, :]
    if problem.soft_cap is not None:
        scores = problem.soft_cap * jnp.tanh(scores / problem.soft_cap)
    row = jnp.arange(problem.query_tokens, dtype=jnp.int32)
    is_seen = _is_seen(problem, kv_length - query_length + row, jnp.arange(num_keys, dtype=jnp.int32), kv_length)
    is_row = row < query_length
    scores = jnp.where((is_seen & is_row[:, None])[None], scores, -jnp.inf)

    # The sink is one more score, without a value.
    sink = jnp.full(problem.query_heads, -jnp.inf, wide) if sinks is None else sinks.astype(wide)
    sink = jnp.where(is_row[None, :], sink[:, None], -jnp.inf)  # [N, T]
    largest = jnp.maximum(jnp.max(scores, axis=-1), sink)
    is_blind = largest == -jnp.inf
    shift = jnp.where(is_blind, 0, largest)
    weights = jnp.exp(scores - shift[:, :, None])
    total = jnp.sum(weights, axis=-1) + jnp.exp(sink - shift)
    weights = weights / jnp.where(is_blind, 1, total)[:, :, None]
    output = jnp.einsum("ntj,jnv->tnv", weights, value, precision="highest")
    log_sum = jnp.where(is_blind, -jnp.inf, jnp.log(jnp.where(is_blind, 1, total)) + shift)
    # A NaN among the values must not reach rows beyond the queries.
    return jnp.where(is_row[:, None, None], output, 0), log_sum.T


def _is_seen(problem: PagedProblem, position: Array, key: Array, kv_length: Array) -> Array:
    """Return whether the query at each position sees each key, bool [T, keys]."""
    position, key = position[:, None], key[None, :]
    left, right = problem.window
    is_seen = jnp.broadcast_to(key < kv_length, (position.shape[0], key.shape[1]))
    if problem.is_causal:
        is_seen = is_seen & (key <= position)
    if left is not None:
        is_seen = is_seen & (key >= position - left)
    if right is not None:
        is_seen = is_seen & (key <= position + right)
    return is_seen
