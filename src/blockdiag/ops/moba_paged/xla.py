"""MoBA over a paged cache in plain `jax.numpy`: only the keys of chosen blocks are gathered.

Each step of a loop gathers a tile of one chosen block for each query of each head, and merges attention to it into an
online softmax. Many queries are computed in chunks, so that memory does not grow with their number.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from blockdiag.common.derivatives import on_common_axes
from blockdiag.common.dtypes import accumulation_dtype
from blockdiag.common.sizes import is_symbolic
from blockdiag.ops.moba_paged.problem import MoBAPagedProblem

# Maximum number of key elements, and of value elements, that one step gathers. Tiles have at least 16 keys, and chunks
# at least one query, even so.
_GATHERED = 1 << 23
_FEWEST_KEYS = 16


def available() -> str | None:
    """Return None: plain `jax.numpy` always runs."""
    return None


def supports(problem: MoBAPagedProblem) -> str | None:
    """Return None: this implementation computes every problem."""
    del problem
    return None


class _Cache(NamedTuple):
    """Arrays that sequences share: pages of keys and values, and their scales where each token has one."""

    key: Array
    value: Array
    key_scales: Array | None
    value_scales: Array | None


class _Sequence(NamedTuple):
    """One sequence: query [T, N, H], pages [max_pages], lengths [], mean keys [max_blocks, K, H], scales [K]."""

    query: Array
    pages: Array
    kv_length: Array
    query_length: Array
    centroids: Array
    score_scale: Array | None
    value_scale: Array | None


class _Sums(NamedTuple):
    """Online softmax state: sums of weighted values [T, N, V] and of weights [T, N], divided by exp(largest)."""

    output: Array
    total: Array
    largest: Array


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
    """Return output [B, T, N, V] in the output's dtype, and log-sum-exp [B, T, N] in float32 or float64."""
    del interpret
    call = problem.paged
    if page_table is None:
        page_table = jnp.arange(call.batch, dtype=jnp.int32)[:, None]
    if query_lengths is None:
        query_lengths = jnp.full_like(kv_lengths, call.query_tokens)
    is_by_token = call.value_scale == "token"
    cache = _Cache(key_pages, value_pages, key_scales, value_scales if is_by_token else None)
    sequences = _Sequence(
        query,
        jnp.clip(page_table, 0, max(call.num_pages, 1) - 1),
        jnp.clip(kv_lengths, 0, call.max_keys if call.num_pages else 0),
        jnp.clip(query_lengths, 0, call.query_tokens),
        centroids,
        score_scale,
        None if is_by_token else value_scales,
    )
    cache, sequences = on_common_axes(cache, sequences)
    return jax.vmap(lambda sequence: _attend(problem, cache, sequence))(sequences)


def _chunk_queries(problem: MoBAPagedProblem) -> int:
    """Return the number of queries of a sequence that are computed together."""
    call = problem.paged
    sizes = (call.batch, call.query_heads, max(call.head_dim, call.value_dim))
    if any(map(is_symbolic, (*sizes, call.query_tokens))):
        return call.query_tokens
    return min(call.query_tokens, max(1, _GATHERED // max(math.prod(sizes) * _FEWEST_KEYS, 1)))


def _choose(problem: MoBAPagedProblem, sequence: _Sequence, position: Array) -> Array:
    """Return the blocks of each query, int32 [T, N, 1 + slots]: its own, then others by descending score, then -1.

    Ties go to the later block. A block whose score is NaN is not chosen.
    """
    call, wide = problem.paged, accumulation_dtype(sequence.query.dtype)
    own = jnp.where(position < 0, -1, position // problem.block_size)
    own_column = jnp.broadcast_to(own[:, None, None], (call.query_tokens, call.query_heads, 1))
    if problem.slots == 0:
        return own_column
    by_head = (call.query_tokens, call.key_heads, call.group_size, call.head_dim)
    # Blocks are in reverse order, because `top_k` takes the first of equal scores.
    centroids = sequence.centroids[: problem.num_candidates][::-1].astype(wide)
    query = sequence.query.astype(wide).reshape(by_head)
    scores = jnp.einsum("tkgh,ckh->tkgc", query, centroids, precision="highest")
    scores = scores.reshape(call.query_tokens, call.query_heads, problem.num_candidates)
    block = jnp.arange(problem.num_candidates - 1, -1, -1, dtype=jnp.int32)
    is_candidate = (block[None, :] < own[:, None])[:, None, :] & ~jnp.isnan(scores)
    # Candidates must rank before all other blocks, even with score -inf, and -0 must equal 0.
    lowest = float(jnp.finfo(wide).min)
    scores = jnp.where(is_candidate, jnp.where(scores == 0, 0, jnp.maximum(scores, lowest)), -jnp.inf)
    _, order = jax.lax.top_k(scores, problem.slots)
    slot = jnp.arange(problem.slots, dtype=jnp.int32)[None, None, :]
    is_chosen = slot < jnp.sum(is_candidate, axis=-1, keepdims=True, dtype=jnp.int32)
    return jnp.concatenate([own_column, jnp.where(is_chosen, block[order], -1)], axis=-1)


def _tile_keys(problem: MoBAPagedProblem) -> int:
    """Return the number of keys of a block that one step gathers for each query."""
    call = problem.paged
    sizes = (call.batch, call.query_tokens, call.query_heads, max(call.head_dim, call.value_dim))
    if any(map(is_symbolic, sizes)):
        return min(problem.block_size, _FEWEST_KEYS)
    of_a_key = math.prod(sizes)
    return min(problem.block_size, max(_FEWEST_KEYS, _GATHERED // max(of_a_key, 1) // 16 * 16))


def _attend(problem: MoBAPagedProblem, cache: _Cache, sequence: _Sequence) -> tuple[Array, Array]:
    """Return output [T, N, V] and log-sum-exp [T, N] of one sequence."""
    call = problem.paged
    row = jnp.arange(call.query_tokens, dtype=jnp.int32)
    is_row = row < sequence.query_length
    position = jnp.where(is_row, jnp.maximum(sequence.kv_length - sequence.query_length + row, -1), -1)
    size = _chunk_queries(problem)
    if size == call.query_tokens:
        return _attend_chunk(problem, cache, sequence, position)
    count = -(-call.query_tokens // size)
    padding = count * size - call.query_tokens
    query = jnp.pad(sequence.query, ((0, padding), (0, 0), (0, 0))).reshape(count, size, *sequence.query.shape[1:])
    position = jnp.pad(position, (0, padding), constant_values=-1).reshape(count, size)
    part = dataclasses.replace(problem, paged=dataclasses.replace(call, query_tokens=size))

    def attend(chunk: tuple[Array, Array]) -> tuple[Array, Array]:
        query, position = chunk
        return _attend_chunk(part, cache, sequence._replace(query=query), position)

    results = jax.lax.map(attend, (query, position))
    output, log_sum = (x.reshape(count * size, *x.shape[2:])[: call.query_tokens] for x in results)
    return output, log_sum


def _attend_chunk(
    problem: MoBAPagedProblem, cache: _Cache, sequence: _Sequence, position: Array
) -> tuple[Array, Array]:
    """Return output and log-sum-exp of queries of one sequence, given their positions; -1 sees nothing."""
    call, wide = problem.paged, accumulation_dtype(sequence.query.dtype)
    rows = (call.query_tokens, call.query_heads)
    chosen = _choose(problem, sequence, position)
    start = _Sums(jnp.zeros((*rows, call.value_dim), wide), jnp.zeros(rows, wide), jnp.full(rows, -jnp.inf, wide))
    _, start = on_common_axes((cache, sequence), start)
    tiles = -(-problem.block_size // _tile_keys(problem))

    def step(part: Array, sums: _Sums) -> _Sums:
        return _merge_tile(problem, cache, sequence, position, chosen[:, :, part // tiles], part % tiles, sums)

    sums = jax.lax.fori_loop(0, (1 + problem.slots) * tiles, step, start)
    is_blind = sums.total == 0
    total = jnp.where(is_blind, 1, sums.total)
    output = sums.output / total[..., None]
    if sequence.value_scale is not None:
        scale = jnp.repeat(sequence.value_scale.astype(wide), call.group_size)
        # A NaN among the scales must not reach rows that see nothing.
        output = jnp.where(is_blind[..., None], 0, output * scale[None, :, None])
    return output.astype(call.output_dtype), jnp.where(is_blind, -jnp.inf, jnp.log(total) + sums.largest)


def _merge_tile(
    problem: MoBAPagedProblem,
    cache: _Cache,
    sequence: _Sequence,
    position: Array,
    block: Array,
    tile: Array,
    sums: _Sums,
) -> _Sums:
    """Add a tile of block `block[t, n]` to the running sums of each query of each head."""
    call, wide = problem.paged, sums.output.dtype
    offset = tile * _tile_keys(problem) + jnp.arange(_tile_keys(problem), dtype=jnp.int32)
    key_number = block[:, :, None] * problem.block_size + offset[None, None, :]  # [T, N, keys]
    is_seen = (block[:, :, None] >= 0) & (offset < problem.block_size)[None, None, :]
    is_seen = is_seen & (key_number <= position[:, None, None])
    key_number = jnp.where(is_seen, key_number, 0)
    page, place = sequence.pages[key_number // call.page_size], key_number % call.page_size
    head = (jnp.arange(call.query_heads, dtype=jnp.int32) // call.group_size)[None, :, None]

    def gather(pool: Array) -> Array:
        """Return the pages' rows for each key, [T, N, keys, ...]; 0 where it is not seen, because 0 * NaN is NaN."""
        rows = pool[page, place, head].astype(wide)
        return jnp.where(is_seen.reshape(*is_seen.shape, *[1] * (rows.ndim - 3)), rows, 0)

    scores = jnp.einsum("tnh,tnjh->tnj", sequence.query.astype(wide), gather(cache.key), precision="highest")
    scores = scores * call.scale
    if sequence.score_scale is not None:
        scores = scores * jnp.repeat(sequence.score_scale.astype(wide), call.group_size)[None, :, None]
    if cache.key_scales is not None:
        scores = scores * gather(cache.key_scales)
    scores = jnp.where(is_seen, scores, -jnp.inf)

    largest = jnp.maximum(sums.largest, jnp.max(scores, axis=-1))
    shift = jnp.where(largest == -jnp.inf, 0, largest)
    weights, kept = jnp.exp(scores - shift[..., None]), jnp.exp(sums.largest - shift)
    total = sums.total * kept + jnp.sum(weights, axis=-1)
    if cache.value_scales is not None:
        weights = weights * gather(cache.value_scales)
    added = jnp.einsum("tnj,tnjv->tnv", weights, gather(cache.value), precision="highest")
    return _Sums(sums.output * kept[..., None] + added, total, largest)
