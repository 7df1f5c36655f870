"""Mixture of block attention in plain `jax.numpy`: work and memory follow the routing, without any [T, T] array.

The queries that chose a block, and those that own it, are cut into tiles of equal height. One step of a scan gathers a
tile's queries, computes their attention to the block with dense products, and merges it into an online softmax. The
backward pass adds to running gradients instead. The rows of a tile are distinct queries, so every scatter has distinct
rows and results are bitwise repeatable. Query heads that share a key head are computed one after the other, so keys and
values are never repeated.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from blockdiag.common.dtypes import accumulation_dtype
from blockdiag.common.packing import count_below, count_not_above
from blockdiag.common.sizes import is_symbolic, smaller_bound
from blockdiag.ops.moba.centroids import Centroids, centroids_of_sums, whole_centroids
from blockdiag.ops.moba.lists import Lists
from blockdiag.ops.moba.problem import MoBAProblem

# Number of routing scores in memory at once, over queries, heads and blocks.
_ROUTING_SCORES = 1 << 22
# Number of blocks that is assumed where it is symbolic.
_SYMBOLIC_BLOCKS = 1 << 10


def available() -> str | None:
    """Return None: plain `jax.numpy` always runs."""
    return None


def supports(problem: MoBAProblem) -> str | None:
    """Return None: this implementation computes every problem."""
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
    if 0 in (problem.num_blocks, problem.slots, problem.query_tokens, problem.key_tokens):
        return jnp.full((problem.query_heads, problem.query_tokens, problem.slots), -1, jnp.int32)
    return choose(problem, query, centroids(problem, key, key_mask, blocks), queries)


def centroids(
    problem: MoBAProblem, key: Array, key_mask: Array | None, blocks: Array, *, interpret: bool = False
) -> Centroids:
    """Return the mean of each block's unmasked keys, NaN where there is none."""
    del interpret
    wide = accumulation_dtype(key.dtype)

    def total(block: Array) -> tuple[Array, Array]:
        rows = _key_rows(problem, key_mask, block)
        count = jnp.sum(rows < problem.key_tokens, dtype=jnp.int32)
        return jnp.sum(_rows(key, rows).astype(wide), axis=0), count

    return centroids_of_sums(problem, *_map_in_batches(total, blocks, 4096 // problem.block_size))


def choose(
    problem: MoBAProblem, query: Array, centroids: Centroids, queries: Array, *, interpret: bool = False
) -> Array:
    """Return the blocks that each query chooses, given mean keys; see `route`."""
    del interpret
    num_chosen = smaller_bound(problem.num_blocks, problem.slots)
    wide = accumulation_dtype(query.dtype)
    # Blocks are in reverse order, because `top_k` takes the first of equal scores.
    means = whole_centroids(problem, centroids)[::-1]  # [num_blocks, K, H]
    block = jnp.arange(problem.num_blocks - 1, -1, -1, dtype=jnp.int32)
    lowest = float(jnp.finfo(wide).min)

    def choose_for_one(operands: tuple[Array, Array]) -> Array:
        query, bounds = operands  # of one query: [N, H], [4]
        query = query.astype(wide).reshape(problem.key_heads, problem.group_size, problem.head_dim)
        scores = _product("kgh,bkh->kgb", query, means).reshape(problem.query_heads, problem.num_blocks)
        is_allowed = (block >= bounds[0]) & (block < bounds[1])
        is_candidate = is_allowed[None, :] & ~jnp.isnan(scores)  # [N, num_blocks]
        # Candidates must rank before all other blocks, even with score -inf, and -0 must equal 0.
        scores = jnp.where(scores == 0, 0, jnp.maximum(scores, lowest))
        scores = jnp.where(is_candidate, scores, -jnp.inf)
        if is_symbolic(problem.num_blocks):
            # A symbolic number of blocks may be less than the number to choose.
            scores = jnp.pad(scores, ((0, 0), (0, num_chosen)), constant_values=-jnp.inf)
        _, order = jax.lax.top_k(scores, num_chosen)
        count = jnp.sum(is_candidate, axis=-1, keepdims=True, dtype=jnp.int32)
        is_chosen = jnp.arange(num_chosen, dtype=jnp.int32)[None, :] < count
        return jnp.where(is_chosen, problem.num_blocks - 1 - order.astype(jnp.int32), -1)

    num_scores = problem.query_heads * (_SYMBOLIC_BLOCKS if is_symbolic(problem.num_blocks) else problem.num_blocks)
    chosen = _map_in_batches(
        choose_for_one, (query, queries), _ROUTING_SCORES // num_scores
    )  # [query_tokens, N, num_chosen]
    padding = ((0, 0), (0, 0), (0, problem.slots - num_chosen))
    return jnp.pad(jnp.swapaxes(chosen, 0, 1), padding, constant_values=-1)


def make_lists(problem: MoBAProblem, chosen: Array, *, interpret: bool = False) -> Lists:
    """Return the block-major lists of `chosen`, int32 [N, query_tokens, slots]; its rows hold blocks, then -1."""
    del interpret
    by_pair = chosen.reshape(problem.query_heads, -1)
    # Pairs without a block come last. The sort is stable: the pairs of each block stay in order.
    block_or_last = jnp.where(by_pair < 0, problem.num_blocks, by_pair)
    pair = jnp.broadcast_to(jnp.arange(by_pair.shape[1], dtype=jnp.int32), by_pair.shape)
    ordered, entries = jax.lax.sort((block_or_last, pair), num_keys=1, is_stable=True)
    edges = jnp.arange(problem.num_blocks + 1, dtype=jnp.int32)
    edges = jax.vmap(lambda row: count_below(row, edges))(ordered)
    return Lists(edges[:, :-1], jnp.diff(edges, axis=1), entries, jnp.sum(chosen >= 0, axis=-1, dtype=jnp.int32))


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
    if _is_empty(problem):
        return jnp.zeros_like(query), jnp.full(query.shape[:2], -jnp.inf, accumulation_dtype(query.dtype))
    tables = _Tables(blocks, queries, key_mask)
    heads = _key_heads_apart(key), _key_heads_apart(value)

    def attend_group(operands: tuple[Array, _Work]) -> tuple[Array, Array]:
        query, work = operands
        return jax.vmap(partial(_attend_head, problem, tables))(query, *heads, work)

    output, log_sum = jax.lax.map(attend_group, (_groups_apart(problem, query), _work(problem, blocks, lists, own)))
    return _groups_together(output), _groups_together(log_sum)


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
    del interpret
    if _is_empty(problem):
        return jnp.zeros_like(query), jnp.zeros_like(key), jnp.zeros_like(value)
    wide = accumulation_dtype(query.dtype)
    mean = jnp.sum(output.astype(wide) * output_cotangent.astype(wide), axis=-1)
    mean = mean - log_sum_cotangent.astype(wide)
    tables = _Tables(blocks, queries, key_mask)
    heads = _key_heads_apart(key), _key_heads_apart(value)

    def add_group(
        sums: tuple[Array, Array], operands: tuple[Array, Array, Array, Array, _Work]
    ) -> tuple[tuple[Array, Array], Array]:
        differentiate = jax.vmap(partial(_differentiate_head, problem, tables))
        query_gradient, key_gradient, value_gradient = differentiate(*sums, *heads, *operands)
        return (key_gradient, value_gradient), query_gradient

    query_groups, cotangent, log_sums, means = (
        _groups_apart(problem, x) for x in (query, output_cotangent, log_sum, mean)
    )
    groups = query_groups, cotangent, log_sums, means, _work(problem, blocks, lists, own)
    zeros = _vary_like((tables, heads, groups), jnp.zeros(heads[0].shape, wide))
    sums, query_gradient = jax.lax.scan(add_group, (zeros, zeros), groups)
    key_gradient, value_gradient = (jnp.swapaxes(x, 0, 1).astype(key.dtype) for x in sums)
    return _groups_together(query_gradient), key_gradient, value_gradient


class _Tables(NamedTuple):
    """Arrays that all heads share: the tables of blocks and queries, and the key mask."""

    blocks: Array
    queries: Array
    key_mask: Array | None


class _Work(NamedTuple):
    """Lists of the queries that attend to each block.

    List c holds the queries that chose block c, and list num_blocks + c the queries that own it.

    Attributes:
        entries: int32 [pairs + 1]; each of the first num_blocks lists is a slice of it.
        offsets: int32 [num_blocks], the starts of these slices.
        counts: int32 [2 * num_blocks], the length of each list.
        ends: int32 [2 * num_blocks], the number of tiles of this list and all lists before it.
        own: whether each query sees its own block, bool [query_tokens]; None if all do.
    """

    entries: Array
    offsets: Array
    counts: Array
    ends: Array
    own: Array | None


@dataclass(frozen=True)
class _Tile:
    """Some queries of one head and the keys of one block.

    Attributes:
        row: int32 [tile height], distinct rows of the query axis; out of range where the tile has no query.
        key_row: int32 [block_size], distinct rows of the key axis; out of range where the block has no visible key.
        is_seen: bool [tile height, block_size].
    """

    row: Array
    key_row: Array
    is_seen: Array


def _is_empty(problem: MoBAProblem) -> bool:
    return problem.query_tokens == 0 or problem.key_tokens == 0 or problem.num_blocks == 0


def _map_in_batches(function: Callable[[Any], Any], operands: Any, at_once: int) -> Any:
    """Apply `jax.lax.map` to `at_once` elements at a time, also for a symbolic number of elements."""
    count = jax.tree.leaves(operands)[0].shape[0]
    if not is_symbolic(count):
        return jax.lax.map(function, operands, batch_size=max(1, min(count, at_once)))
    # The elements are padded to whole batches, because `lax.map` needs to know the size of the remainder.
    at_once = max(1, at_once)
    batches = (count + (at_once - 1)) // at_once

    def in_batches(x: Array) -> Array:
        padded = jnp.pad(x, ((0, batches * at_once - count), *[(0, 0)] * (x.ndim - 1)))
        return padded.reshape(batches, at_once, *x.shape[1:])

    results = jax.lax.map(jax.vmap(function), jax.tree.map(in_batches, operands))
    return jax.tree.map(lambda x: x.reshape(batches * at_once, *x.shape[2:])[:count], results)


def _key_rows(problem: MoBAProblem, key_mask: Array | None, block: Array) -> Array:
    """Return the rows of a block's keys, int32 [block_size]; out of range where there is no key or a masked one."""
    offset = jnp.arange(problem.block_size, dtype=jnp.int32)
    row = jnp.where(offset < block[1], block[0] + offset, problem.key_tokens + offset)
    if key_mask is None:
        return row
    return jnp.where(key_mask.at[row].get(mode="fill", fill_value=False), row, problem.key_tokens + offset)


def _tile_height(problem: MoBAProblem) -> int:
    """Return the queries per tile: about a quarter of a block's average number, so that few rows stay unused."""
    if is_symbolic(problem.query_tokens) or is_symbolic(problem.num_blocks):
        # Assume as many queries as keys.
        average = problem.block_size * (problem.slots + 1)
        return min(max(1 << (average // 4).bit_length(), 16), 512)
    average = problem.query_tokens * (problem.slots + 1) // problem.num_blocks
    return min(max(1 << (average // 4).bit_length(), 16), 512, -(-problem.query_tokens // 16) * 16)


def _count_tiles(problem: MoBAProblem) -> int:
    """Return a number of tiles that is enough for any routing."""
    height = _tile_height(problem)

    def most(rows: int) -> int:
        return (rows + smaller_bound(rows, problem.num_blocks) * (height - 1)) // height

    own_rows = problem.query_tokens if problem.is_causal else 0
    return most(problem.query_tokens * smaller_bound(problem.num_blocks, problem.slots)) + most(own_rows)


def _work(problem: MoBAProblem, blocks: Array, lists: Lists, own: Array | None) -> _Work:
    """Return the work of every query head; each array has the leading axes [G, K]."""
    owners = jnp.broadcast_to(blocks[None, :, 3], lists.counts.shape)
    counts = jnp.concatenate([lists.counts, owners], axis=1)
    ends = jnp.cumsum((counts + (_tile_height(problem) - 1)) // _tile_height(problem), axis=1, dtype=jnp.int32)
    entries = jnp.pad(lists.entries, ((0, 0), (0, 1)))  # keeps the array from being empty
    work = _Work(entries, lists.offsets, counts, ends, own)

    def groups_apart(x: Array) -> Array:
        return jnp.swapaxes(x.reshape(problem.key_heads, problem.group_size, *x.shape[1:]), 0, 1)

    return jax.tree.map(groups_apart, work)


def _tile(problem: MoBAProblem, tables: _Tables, work: _Work, index: Array) -> _Tile:
    """Return tile `index` of one head."""
    height, num_lists = _tile_height(problem), 2 * problem.num_blocks
    number = count_not_above(work.ends, index[None])[0]
    is_used = number < num_lists
    number = jnp.minimum(number, num_lists - 1)
    num_before = jnp.where(number > 0, work.ends[number - 1], 0)
    row_of_tile = jnp.arange(height, dtype=jnp.int32)
    position = (index - num_before) * height + row_of_tile

    is_own = number >= problem.num_blocks
    block_number = jnp.where(is_own, number - problem.num_blocks, number)
    block = tables.blocks[block_number]
    pair = work.entries.at[work.offsets[block_number] + position].get(mode="clip")
    row = jnp.where(is_own, block[2] + position, pair // max(problem.slots, 1))
    row = jnp.where(is_used & (position < work.counts[number]), row, problem.query_tokens + row_of_tile)

    key_row = _key_rows(problem, tables.key_mask, block)
    end = jnp.where(is_own, _rows(tables.queries[:, 3], row), block[0] + block[1])
    if work.own is not None:
        end = jnp.where(is_own & ~_rows(work.own, row), 0, end)
    end = jnp.where(row < problem.query_tokens, end, 0)
    # Own keys start where the block starts, so only ends are compared. Out-of-range key rows lie beyond every end.
    is_seen = key_row[None, :] < jnp.minimum(end, problem.key_tokens)[:, None]
    return _Tile(row, key_row, is_seen)


def _attend_head(
    problem: MoBAProblem, tables: _Tables, query: Array, key: Array, value: Array, work: _Work
) -> tuple[Array, Array]:
    """Attend from one query head to key and value [key_tokens, H].

    Returns:
        Output [query_tokens, H] and log-sum-exp [query_tokens].
    """
    wide = accumulation_dtype(query.dtype)

    def step(carry: tuple[Array, ...], index: Array) -> tuple[tuple[Array, ...], None]:
        tile = _tile(problem, tables, work, index)
        merged = _merge_tile(
            problem, tile.is_seen, _rows(query, tile.row), _rows(key, tile.key_row), _rows(value, tile.key_row),
            *(_rows(x, tile.row) for x in carry),
        )  # fmt: skip
        written = (
            old.at[tile.row].set(new, mode="drop", unique_indices=True) for old, new in zip(carry, merged, strict=True)
        )
        return tuple(written), None

    shapes = query.shape, query.shape[:1], query.shape[:1]
    start = (jnp.full(shape, fill, wide) for shape, fill in zip(shapes, (0, -jnp.inf, 0), strict=True))
    start = tuple(_vary_like((tables, query, key, value, work), x) for x in start)
    (output, largest, total), _ = jax.lax.scan(step, start, jnp.arange(_count_tiles(problem), dtype=jnp.int32))
    is_blind = total == 0
    total = jnp.where(is_blind, 1, total)
    log_sum = jnp.where(is_blind, -jnp.inf, jnp.log(total) + largest)
    return (output / total[:, None]).astype(query.dtype), log_sum


@partial(jax.checkpoint, static_argnums=0, prevent_cse=False)
def _merge_tile(
    problem: MoBAProblem, is_seen: Array, query: Array, key: Array, value: Array, output: Array, largest: Array,
    total: Array,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Add a tile to the online softmax: sums of weighted values and of weights, divided by exp(running maximum)."""
    scores = _product("ih,jh->ij", query, key) * problem.scale
    scores = jnp.where(is_seen, scores, -jnp.inf)
    # The maximum cancels in the normalised result, so no gradient needs to flow through it.
    new_largest = jax.lax.stop_gradient(jnp.maximum(largest, jnp.max(scores, axis=-1)))
    shift = jnp.where(new_largest == -jnp.inf, 0, new_largest)
    weights = jnp.exp(scores - shift[:, None])
    kept = jnp.exp(largest - shift)
    output = output * kept[:, None] + _product("ij,jh->ih", weights.astype(value.dtype), value)
    return output, new_largest, total * kept + jnp.sum(weights, axis=-1)


def _differentiate_head(
    problem: MoBAProblem, tables: _Tables, key_gradient: Array, value_gradient: Array, key: Array, value: Array,
    query: Array, cotangent: Array, log_sum: Array, mean: Array, work: _Work,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Return the query gradient of one query head, and add the head to the sums of key and value gradients."""

    def step(carry: tuple[Array, ...], index: Array) -> tuple[tuple[Array, ...], None]:
        tile = _tile(problem, tables, work, index)
        terms = _tile_gradients(
            problem, tile.is_seen, *(_rows(x, tile.row) for x in (query, cotangent, log_sum, mean)),
            *(_rows(x, tile.key_row) for x in (key, value)),
        )  # fmt: skip
        rows = (tile.row, tile.key_row, tile.key_row)
        added = (
            total.at[row].add(term, mode="drop", unique_indices=True)
            for total, row, term in zip(carry, rows, terms, strict=True)
        )
        return tuple(added), None

    # The key gradient is a carry already, so it varies over all mesh axes that any operand varies over.
    start = _vary_like(key_gradient, jnp.zeros(query.shape, key_gradient.dtype)), key_gradient, value_gradient
    (query_gradient, key_sum, value_sum), _ = jax.lax.scan(
        step, start, jnp.arange(_count_tiles(problem), dtype=jnp.int32)
    )
    return query_gradient.astype(query.dtype), key_sum, value_sum


@partial(jax.checkpoint, static_argnums=0, prevent_cse=False)
def _tile_gradients(
    problem: MoBAProblem, is_seen: Array, query: Array, cotangent: Array, log_sum: Array, mean: Array, key: Array,
    value: Array,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Return one tile's terms of the gradients of its queries [height, H], and its keys and values [block_size, H]."""
    scores = _product("ih,jh->ij", query, key) * problem.scale
    weights = jnp.exp(jnp.where(is_seen, scores - log_sum[:, None], -jnp.inf))
    weights_gradient = _product("ih,jh->ij", cotangent, value)
    scores_gradient = jnp.where(is_seen, weights * (weights_gradient - mean[:, None]) * problem.scale, 0)
    scores_gradient = scores_gradient.astype(query.dtype)
    return (
        _product("ij,jh->ih", scores_gradient, key),
        _product("ij,ih->jh", scores_gradient, query),
        _product("ij,ih->jh", weights.astype(query.dtype), cotangent),
    )


def _vary_like(operands: Any, x: Array) -> Array:
    """Mark a scan's initial carry `x` as varying over each manual mesh axis that any operand varies over."""
    varying = (jax.typeof(operand).manual_axis_type.varying for operand in jax.tree.leaves(operands))
    axes = frozenset().union(*varying)
    return jax.lax.pcast(x, tuple(sorted(axes, key=str)), to="varying") if axes else x


def _rows(x: Array, row: Array) -> Array:
    """Return rows of `x`, 0 (or False) where `row` is out of range."""
    return x.at[row].get(mode="fill", fill_value=0, unique_indices=True)


def _product(subscripts: str, left: Array, right: Array) -> Array:
    """Return an einsum accumulated in float32 (float64 for float64), with full precision for float32 operands."""
    wide = accumulation_dtype(left.dtype)
    precision = jax.lax.Precision.HIGHEST if left.dtype == wide else None
    return jnp.einsum(subscripts, left, right, preferred_element_type=wide, precision=precision)


def _key_heads_apart(x: Array) -> Array:
    """Transpose [key_tokens, K, H] to [K, key_tokens, H]."""
    return jnp.swapaxes(x, 0, 1)


def _groups_apart(problem: MoBAProblem, x: Array) -> Array:
    """Transpose [query_tokens, N, ...] to [G, K, query_tokens, ...]."""
    x = x.reshape(x.shape[0], problem.key_heads, problem.group_size, *x.shape[2:])
    return jnp.moveaxis(x, 0, 2).swapaxes(0, 1)


def _groups_together(x: Array) -> Array:
    """Transpose [G, K, query_tokens, ...] to [query_tokens, N, ...]; the inverse of `_groups_apart`."""
    x = jnp.moveaxis(x.swapaxes(0, 1), 2, 0)
    return x.reshape(x.shape[0], -1, *x.shape[3:])
