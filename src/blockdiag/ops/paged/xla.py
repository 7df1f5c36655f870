"""Paged attention in plain `jax.numpy`: tiles of keys are gathered from the pages and merged by an online softmax.

Sequences are computed in parallel, with as many tiles as the longest has. With a fixed `split_size` they are computed
one after the other, in tiles whose size depends only on the split size. No bit of a result then depends on the rest of
the batch. Query heads that share a key head are rows of one product, so keys and values are never repeated.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from blockdiag.common.derivatives import on_common_axes
from blockdiag.common.dtypes import accumulation_dtype
from blockdiag.ops.paged.packed import by_tiles
from blockdiag.ops.paged.problem import PagedProblem

# Maximum keys of a tile.
_TILE_KEYS = 512


def available() -> str | None:
    """Return None: plain `jax.numpy` always runs."""
    return None


def supports(problem: PagedProblem) -> str | None:
    """Return None: this implementation computes every problem."""
    del problem
    return None


class _Cache(NamedTuple):
    """Arrays that sequences share: pages of keys and values, and their scales where each token has one.

    Values without pages are the first columns of the keys.
    """

    key: Array
    value: Array | None
    key_scales: Array | None
    value_scales: Array | None


class _Sequence(NamedTuple):
    """One sequence: query [T, N, H], pages [max_pages], lengths [], scales [K]."""

    query: Array
    pages: Array
    kv_length: Array
    query_length: Array
    score_scale: Array | None
    value_scale: Array | None


class _Sums(NamedTuple):
    """Online softmax state: sums of weighted values [K, G, T, V] and of weights [K, G, T], divided by exp(largest)."""

    output: Array
    total: Array
    largest: Array


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
    """Return output [B, T, N, V] in the output's dtype, and log-sum-exp [B, T, N] in float32 or float64."""
    del interpret
    if page_table is None:
        page_table = jnp.arange(problem.batch, dtype=jnp.int32)[:, None]
    if query_lengths is None:
        query_lengths = jnp.full_like(kv_lengths, problem.query_tokens)
    is_by_token = problem.value_scale == "token"
    cache = _Cache(key_pages, value_pages, key_scales, value_scales if is_by_token else None)
    sequences = _Sequence(
        query,
        jnp.clip(page_table, 0, max(problem.num_pages, 1) - 1),
        jnp.clip(kv_lengths, 0, problem.max_keys if problem.num_pages else 0),
        jnp.clip(query_lengths, 0, None if problem.has_more_queries else problem.query_tokens),
        score_scale,
        None if is_by_token else value_scales,
    )
    cache, sequences, sinks = on_common_axes(cache, sequences, sinks)

    def attend(sequence: _Sequence) -> tuple[Array, Array]:
        return _attend(problem, cache, sinks, sequence)

    if problem.split_size is None:
        return jax.vmap(attend)(sequences)
    return jax.lax.map(attend, sequences)


def _tile_keys(problem: PagedProblem) -> int:
    if problem.split_size is None:
        return max(1, min(_TILE_KEYS, problem.max_keys))
    # The largest divisor of the split size that fits in a tile.
    return next(size for size in range(min(_TILE_KEYS, problem.split_size), 0, -1) if problem.split_size % size == 0)


def _attend(problem: PagedProblem, cache: _Cache, sinks: Array | None, sequence: _Sequence) -> tuple[Array, Array]:
    """Return output [T, N, V] and log-sum-exp [T, N] of one sequence."""
    wide, num_keys = accumulation_dtype(sequence.query.dtype), _tile_keys(problem)
    by_head = (problem.key_heads, problem.group_size)
    query = sequence.query.astype(wide).reshape(problem.query_tokens, *by_head, problem.head_dim)
    query = jnp.transpose(query, (1, 2, 0, 3))  # [K, G, T, H]
    row = jnp.arange(problem.query_tokens, dtype=jnp.int32)
    is_row = row < sequence.query_length
    sink = jnp.full(by_head, -jnp.inf, wide) if sinks is None else sinks.astype(wide).reshape(by_head)
    sink = jnp.where(is_row[None, None, :], sink[:, :, None], -jnp.inf)
    # The sink initialises the softmax, as a score without a value before the first key.
    rows = (*by_head, problem.query_tokens)
    total = jnp.exp(sink - jnp.where(sink == -jnp.inf, 0, sink))
    start = _Sums(jnp.zeros((*rows, problem.value_dim), wide), total, sink)
    _, start = on_common_axes((cache, sinks, sequence), start)

    def step(tile: Array, sums: _Sums) -> _Sums:
        return _merge_tile(problem, cache, sequence, query, tile * num_keys, sums)

    num_tiles = (sequence.kv_length + (num_keys - 1)) // num_keys
    sums = jax.lax.fori_loop(0, num_tiles, step, start)
    is_blind = sums.total == 0
    total = jnp.where(is_blind, 1, sums.total)
    output = sums.output / total[..., None]
    if sequence.value_scale is not None:
        output = output * sequence.value_scale.astype(wide)[:, None, None, None]
    # A NaN among the values must not reach rows beyond the queries.
    output = jnp.where(is_row[None, None, :, None], output, 0)
    log_sum = jnp.where(is_blind, -jnp.inf, jnp.log(total) + sums.largest)
    output = jnp.transpose(output, (2, 0, 1, 3)).reshape(problem.query_tokens, problem.query_heads, problem.value_dim)
    log_sum = jnp.transpose(log_sum, (2, 0, 1)).reshape(problem.query_tokens, problem.query_heads)
    return output.astype(problem.output_dtype), log_sum


def _merge_tile(
    problem: PagedProblem, cache: _Cache, sequence: _Sequence, query: Array, first: Array, sums: _Sums
) -> _Sums:
    """Add the tile of keys that begins with key `first` to the running sums."""
    wide = query.dtype
    key_number = first + jnp.arange(_tile_keys(problem), dtype=jnp.int32)
    is_key = key_number < sequence.kv_length
    page, offset = sequence.pages[key_number // problem.page_size], key_number % problem.page_size

    def gather(pool: Array) -> Array:
        """Return the pages' rows for each key, [keys, K, ...]; 0 beyond the keys, because 0 * NaN would be NaN."""
        rows = pool[page, offset].astype(wide)
        return jnp.where(is_key.reshape(-1, *[1] * (rows.ndim - 1)), rows, 0)

    key = gather(cache.key)
    value = key[..., : problem.value_dim] if cache.value is None else gather(cache.value)
    scores = jnp.einsum("kgth,jkh->kgtj", query, key, precision="highest") * problem.scale
    if sequence.score_scale is not None:
        scores = scores * sequence.score_scale.astype(wide)[:, None, None, None]
    if cache.key_scales is not None:
        scores = scores * gather(cache.key_scales).T[:, None, None, :]
    if problem.soft_cap is not None:
        scores = problem.soft_cap * jnp.tanh(scores / problem.soft_cap)
    scores = jnp.where(_is_seen(problem, sequence, key_number)[None, None], scores, -jnp.inf)

    largest = jnp.maximum(sums.largest, jnp.max(scores, axis=-1))
    shift = jnp.where(largest == -jnp.inf, 0, largest)
    weights, kept = jnp.exp(scores - shift[..., None]), jnp.exp(sums.largest - shift)
    total = sums.total * kept + jnp.sum(weights, axis=-1)
    if cache.value_scales is not None:
        weights = weights * gather(cache.value_scales).T[:, None, None, :]
    added = jnp.einsum("kgtj,jkv->kgtv", weights, value, precision="highest")
    return _Sums(sums.output * kept[..., None] + added, total, largest)


def _is_seen(problem: PagedProblem, sequence: _Sequence, key_number: Array) -> Array:
    """Return whether each query sees each of these keys, bool [T, keys]."""
    row = jnp.arange(problem.query_tokens, dtype=jnp.int32)[:, None]
    position, key_number = sequence.kv_length - sequence.query_length + row, key_number[None, :]
    left, right = problem.window
    is_seen = (key_number < sequence.kv_length) & (row < sequence.query_length)
    if problem.is_causal:
        is_seen = is_seen & (key_number <= position)
    if left is not None:
        is_seen = is_seen & (key_number >= position - left)
    if right is not None:
        is_seen = is_seen & (key_number <= position + right)
    return is_seen
