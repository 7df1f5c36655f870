"""Mixture of block attention, written to be read: the executable specification of the operation.

A dense mask [N, query_tokens, key_tokens] says which keys each query of each head sees. One function attends from one
query, and a loop runs it over the queries. Everything is computed in float32, or in float64 for float64 arrays, without
intermediate rounding. Gradients are JAX's own.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from blockdiag.common.dtypes import accumulation_dtype
from blockdiag.ops.moba.centroids import Centroids, centroids_of_sums, whole_centroids
from blockdiag.ops.moba.lists import Lists
from blockdiag.ops.moba.problem import MoBAProblem


def available() -> str | None:
    """Return None: plain `jax.numpy` always runs."""
    return None


def supports(problem: MoBAProblem) -> str | None:
    """Return None: the reference computes every problem."""
    del problem
    return None


def route(
    problem: MoBAProblem,
    query: Array,
    key: Array,
    key_mask: Array | None,
    blocks: Array,
    queries: Array,
    *,
    interpret: bool = False,
) -> Array:
    """Return the blocks that each query chooses, int32 [N, query_tokens, slots]: by descending score, then -1.

    The score of a block is the dot product of the query with the mean of the block's unmasked keys. Among equal scores,
    the later block comes first. A block whose score is NaN is not chosen.
    """
    del interpret
    return choose(problem, query, centroids(problem, key, key_mask, blocks), queries)


def centroids(
    problem: MoBAProblem, key: Array, key_mask: Array | None, blocks: Array, *, interpret: bool = False
) -> Centroids:
    """Return the mean of each block's unmasked keys, NaN where there is none."""
    del interpret
    is_member = _members(problem, key_mask, blocks)  # [num_blocks, key_tokens]
    # Other keys become 0 before the sum, because 0 * NaN would carry a masked key's NaN into the mean.
    members = jnp.where(is_member[:, :, None, None], key.astype(accumulation_dtype(key.dtype))[None], 0)
    return centroids_of_sums(problem, jnp.sum(members, axis=1), jnp.sum(is_member, axis=1, dtype=jnp.int32))


def choose(
    problem: MoBAProblem, query: Array, centroids: Centroids, queries: Array, *, interpret: bool = False
) -> Array:
    """Return the blocks that each query chooses, given mean keys; see `route`."""
    del interpret
    wide = accumulation_dtype(query.dtype)
    means = jnp.repeat(whole_centroids(problem, centroids), problem.group_size, axis=1)  # [num_blocks, N, H]
    scores = jnp.einsum("tnh,cnh->ntc", query.astype(wide), means, precision="highest")

    block = jnp.arange(problem.num_blocks, dtype=jnp.int32)[None, :]
    is_allowed = (block >= queries[:, :1]) & (block < queries[:, 1:2])
    is_candidate = is_allowed[None] & ~jnp.isnan(scores)  # [N, query_tokens, blocks]
    # A stable sort of the blocks in reverse order: candidates before others, and larger scores before smaller ones.
    is_other, falling = ~is_candidate, jnp.where(scores == 0, 0, -scores)
    backwards = jnp.broadcast_to(block[None, :, ::-1], falling.shape)
    *_, order = jax.lax.sort((is_other[..., ::-1], falling[..., ::-1], backwards), num_keys=2, is_stable=True)

    order = order[..., : problem.slots]
    is_chosen = jnp.take_along_axis(is_candidate, order, axis=-1)
    chosen = jnp.where(is_chosen, order, -1)
    return jnp.pad(chosen, ((0, 0), (0, 0), (0, problem.slots - chosen.shape[-1])), constant_values=-1)


def make_lists(problem: MoBAProblem, chosen: Array, *, interpret: bool = False) -> Lists:
    """Return the block-major lists of `chosen`, int32 [N, query_tokens, slots]; its rows hold blocks, then -1."""
    del interpret
    by_pair = chosen.reshape(problem.query_heads, -1)
    block = jnp.arange(problem.num_blocks, dtype=jnp.int32)
    is_chosen = by_pair[:, None, :] == block[None, :, None]  # [N, num_blocks, pairs]
    counts = jnp.sum(is_chosen, axis=-1, dtype=jnp.int32)
    offsets = jnp.cumsum(counts, axis=-1, dtype=jnp.int32) - counts
    # A stable sort by block keeps the pairs of each block in order. Pairs without a block come last.
    block_or_last = jnp.where(by_pair < 0, problem.num_blocks, by_pair)
    pair = jnp.broadcast_to(jnp.arange(by_pair.shape[1], dtype=jnp.int32), by_pair.shape)
    _, entries = jax.lax.sort((block_or_last, pair), num_keys=1, is_stable=True)
    return Lists(offsets, counts, entries, jnp.sum(chosen >= 0, axis=-1, dtype=jnp.int32))


def forward(
    problem: MoBAProblem,
    query: Array,
    key: Array,
    value: Array,
    key_mask: Array | None,
    blocks: Array,
    queries: Array,
    lists: Lists,
    own: Array | None,
    *,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """Return the attention output [query_tokens, N, H] in the dtype of `query`, and log-sum-exp of the scaled scores.

    The log-sum-exp is [query_tokens, N] in float32, or in float64 for float64 arrays. Queries that see nothing have
    output 0 and log-sum-exp -inf.
    """
    del interpret
    wide = accumulation_dtype(query.dtype)
    is_seen = _seen_keys(problem, key_mask, blocks, queries, lists, own)
    output, log_sum = _attend(problem, query.astype(wide), key.astype(wide), value.astype(wide), is_seen)
    return output.astype(query.dtype), log_sum


def backward(
    problem: MoBAProblem,
    query: Array,
    key: Array,
    value: Array,
    key_mask: Array | None,
    blocks: Array,
    queries: Array,
    lists: Lists,
    own: Array | None,
    output: Array,
    log_sum: Array,
    output_cotangent: Array,
    log_sum_cotangent: Array,
    *,
    interpret: bool = False,
) -> tuple[Array, Array, Array]:
    """Return the gradients of `forward` for query, key and value, in their dtype; the routing is held constant."""
    del output, log_sum, interpret
    wide = accumulation_dtype(query.dtype)
    is_seen = _seen_keys(problem, key_mask, blocks, queries, lists, own)

    def wide_attend(query: Array, key: Array, value: Array) -> tuple[Array, Array]:
        return _attend(problem, query, key, value, is_seen)

    # Differentiating the float32 function rounds each gradient once, at the end.
    _, pull_back = jax.vjp(wide_attend, query.astype(wide), key.astype(wide), value.astype(wide))
    d_query, d_key, d_value = pull_back((output_cotangent.astype(wide), log_sum_cotangent.astype(wide)))
    return d_query.astype(query.dtype), d_key.astype(key.dtype), d_value.astype(value.dtype)


def _members(problem: MoBAProblem, key_mask: Array | None, blocks: Array) -> Array:
    """Return whether each key is unmasked and lies in each block, bool [num_blocks, key_tokens]."""
    key_row = jnp.arange(problem.key_tokens, dtype=jnp.int32)[None, :]
    first, length = blocks[:, 0, None], blocks[:, 1, None]
    is_member = (key_row >= first) & (key_row < first + length)
    return is_member if key_mask is None else is_member & key_mask[None, :]


def _seen_keys(
    problem: MoBAProblem, key_mask: Array | None, blocks: Array, queries: Array, lists: Lists, own: Array | None
) -> Array:
    """Return the mask of the keys that each query of each head sees, bool [N, query_tokens, key_tokens]."""
    # Keys of chosen blocks: query t chose block c if the list of c has one of t's pairs.
    position = jnp.arange(lists.entries.shape[1], dtype=jnp.int32)[None, None, :]
    begin = lists.offsets[:, :, None]
    is_in_list = (position >= begin) & (position < begin + lists.counts[:, :, None])  # [N, num_blocks, positions]
    query_at = jnp.where(is_in_list, lists.entries[:, None, :] // max(problem.slots, 1), problem.query_tokens)
    head = jnp.arange(problem.query_heads, dtype=jnp.int32)[:, None, None]
    block = jnp.arange(problem.num_blocks, dtype=jnp.int32)[None, :, None]
    is_chosen = jnp.zeros((problem.query_heads, problem.query_tokens, problem.num_blocks), bool)
    is_chosen = is_chosen.at[head, query_at, block].set(True, mode="drop")
    is_seen = jnp.einsum("ntc,cj->ntj", is_chosen.astype(jnp.int32), _members(problem, None, blocks).astype(jnp.int32))
    is_seen = is_seen > 0

    # Keys of the query's own block.
    key_row = jnp.arange(problem.key_tokens, dtype=jnp.int32)[None, :]
    is_own = ((key_row >= queries[:, 2:3]) & (key_row < queries[:, 3:4]))[None]
    is_seen = is_seen | (is_own if own is None else is_own & own[:, :, None])
    return is_seen if key_mask is None else is_seen & key_mask[None, None, :]


def _attend(problem: MoBAProblem, query: Array, key: Array, value: Array, is_seen: Array) -> tuple[Array, Array]:
    """Return output [query_tokens, N, H] and log-sum-exp [query_tokens, N] of softmax attention to the keys seen."""
    key, value = (jnp.repeat(x, problem.group_size, axis=1) for x in (key, value))

    # Without this checkpoint, the residuals would hold all keys for each query.
    @jax.checkpoint
    def attend_from_one(operands: tuple[Array, Array]) -> tuple[Array, Array]:
        query, is_seen = operands  # [N, H], [N, key_tokens]
        # Unseen keys become 0 before any product, because 0 * NaN would carry their NaN in here.
        seen_key, seen_value = (jnp.where(is_seen.T[:, :, None], x, 0) for x in (key, value))
        scores = problem.scale * jnp.einsum("nh,jnh->nj", query, seen_key, precision="highest")
        is_any_seen = jnp.any(is_seen, axis=-1, keepdims=True)
        # All scores of a query that sees nothing are 0, because a softmax over nothing would be NaN.
        scores = jnp.where(is_seen, scores, jnp.where(is_any_seen, -jnp.inf, 0))
        largest = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
        exponentials = jnp.exp(scores - largest)
        total = jnp.sum(exponentials, axis=-1, keepdims=True)
        output = jnp.einsum("nj,jnh->nh", exponentials / total, seen_value, precision="highest")
        log_sum = jnp.where(is_any_seen, jnp.log(total) + largest, -jnp.inf)
        return jnp.where(is_any_seen, output, 0), log_sum[:, 0]

    if problem.key_tokens == 0:
        return jnp.zeros_like(query), jnp.full(query.shape[:2], -jnp.inf, query.dtype)
    return jax.lax.map(attend_from_one, (query, jnp.swapaxes(is_seen, 0, 1)))
