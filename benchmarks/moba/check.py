"""Checks of MoBA's results in float64 at full size, on a sample, and distances from float32 attention at a small one.

Nothing here calls the code that it judges, except for the routing, which is given: attention is judged under the
routing that was used, and the routing by itself.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness.failures import GATE, WrongResult
from benchmarks.moba.cases import MoBACase

_LOG_SUM_GATE = 1e-2
_ROWS = 24


def check_sample(
    case: MoBACase, indices: jax.Array, operands: tuple[Any, ...], results: tuple[Any, ...], *, seed: int = 0
) -> None:
    """Check some queries of one head, and one block of its keys, in float64.

    Args:
        case: the workload.
        indices: int32 [B, T, N, top_k], the routing.
        operands: query, key, value and the output's cotangent, [B, T, heads, H].
        results: output, log-sum-exp [B, T, N], and the gradients of query, key and value.

    Raises:
        WrongResult: a choice is not among the best, or a result is too far off.
    """
    generator = np.random.default_rng(seed)
    batch, group = int(generator.integers(case.batch)), case.query_heads // case.key_heads
    key_head = int(generator.integers(case.key_heads))
    heads = range(key_head * group, key_head * group + group)
    query, key, value, cotangent = operands
    keys, values = (_head(array, batch, key_head) for array in (key, value))
    sampled = generator.integers(0, case.tokens, _ROWS - 2)
    rows = np.unique(np.concatenate([[0, case.tokens - 1], sampled]))
    block = int(generator.integers(case.num_blocks))
    start, end = block * case.block_size, min((block + 1) * case.block_size, case.tokens)
    d_key, d_value = np.zeros((2, end - start, case.head_dim))
    for number, head in enumerate(heads):
        chosen = _head(indices, batch, head).astype(np.int64)
        given = [_head(array, batch, head) for array in (query, cotangent, *results[:3])]
        if number == 0:
            check_choice(case, given[0], keys, chosen, rows)
            _check_rows(case, rows, chosen, keys, values, given)
        added = _block_gradients(case, block, chosen, keys[start:end], values[start:end], given)
        d_key, d_value = d_key + added[0], d_value + added[1]
    for name, found, wanted in (("dK", results[3], d_key), ("dV", results[4], d_value)):
        _demand(name, relative_error(_head(found, batch, key_head)[start:end], wanted), GATE)


def _head(array: Any, batch: int, head: int) -> np.ndarray:
    """One head of one sequence in float32; what is computed with is made float64 where it is small."""
    return np.asarray(_slice_head(array, batch, head))


@jax.jit
def _slice_head(array: jax.Array, batch: int, head: int) -> jax.Array:
    # One program for every head: numbers that Python knows would make one each.
    return array[batch, :, head].astype(jnp.float32)


def _demand(name: str, error: float, limit: float) -> None:
    if not error <= limit:
        raise WrongResult(f"{name}: relative error {error:.2e} in a float64 check of some rows, allowed {limit}")


def relative_error(found: np.ndarray, wanted: np.ndarray) -> float:
    """||found - wanted|| / ||wanted||; the norm of `found` where `wanted` is 0."""
    norm = float(np.linalg.norm(wanted))
    return float(np.linalg.norm(found - wanted)) / (norm or 1.0)


def check_choice(case: MoBACase, query: np.ndarray, keys: np.ndarray, chosen: np.ndarray, rows: np.ndarray) -> None:
    """Each of `rows` has its own block first, and as many of the best earlier ones as it may have.

    Args:
        query, keys: [T, H] of one head.
        chosen: int [T, top_k].

    Raises:
        WrongResult: otherwise, beyond what float32 scores may confuse.
    """
    starts = np.arange(0, case.tokens, case.block_size)
    sizes = np.minimum(case.block_size, case.tokens - starts)
    centroids = np.add.reduceat(keys, starts, axis=0, dtype=np.float64) / sizes[:, None]
    for row in rows:
        own = row // case.block_size
        past = chosen[row][1:]
        past = past[past >= 0]
        wanted = min(case.top_k - 1, own)
        is_sound = chosen[row][0] == own and len(set(past.tolist())) == wanted == len(past) and (past < own).all()
        if is_sound and wanted:
            scores = centroids[:own] @ query[row]
            least = np.sort(scores)[-wanted]
            is_sound = scores[past].min() >= least - 1e-4 * np.abs(scores).max()
        if not is_sound:
            raise WrongResult(f"query {row} chose blocks {chosen[row].tolist()}, which are not its best")


def _check_rows(
    case: MoBACase,
    rows: np.ndarray,
    chosen: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    given: list[np.ndarray],
) -> None:
    """Output, log-sum-exp and dQ of some queries of one head."""
    query, cotangent, output, log_sum, d_query = given
    scale = case.head_dim**-0.5
    exact = []
    for row in rows:
        blocks = chosen[row][chosen[row] >= 0]
        seen = np.concatenate([np.arange(b * case.block_size, (b + 1) * case.block_size) for b in blocks])
        seen = seen[seen <= row]
        seen_keys, seen_values = keys[seen].astype(np.float64), values[seen].astype(np.float64)
        scores = seen_keys @ query[row] * scale
        total = scores.max() + np.log(np.exp(scores - scores.max()).sum())
        weights = np.exp(scores - total)
        attended = weights @ seen_values
        d_weights = seen_values @ cotangent[row]
        d_scores = weights * (d_weights - weights @ d_weights) * scale
        exact.append((attended, total, d_scores @ seen_keys))
    attended, total, gradient = (np.stack(column) for column in zip(*exact, strict=True))
    _demand("output", relative_error(output[rows], attended), GATE)
    _demand("log-sum-exp", float(np.abs(log_sum[rows] - total).max()), _LOG_SUM_GATE)
    _demand("dQ", relative_error(d_query[rows], gradient), GATE)


def _block_gradients(
    case: MoBACase, block: int, chosen: np.ndarray, keys: np.ndarray, values: np.ndarray, given: list[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """What one query head adds to dK and dV of a block, by the log-sum-exp and the output that were found."""
    rows = np.flatnonzero((chosen == block).any(axis=1))
    query, cotangent, output, log_sum = (array[rows].astype(np.float64) for array in given[:4])
    scale = case.head_dim**-0.5
    weights = np.exp(query @ keys.T * scale - log_sum[:, None])
    position = block * case.block_size + np.arange(len(keys))
    weights = np.where(position[None, :] <= rows[:, None], weights, 0.0)
    delta = (output * cotangent).sum(axis=1, keepdims=True)
    d_scores = weights * (cotangent @ values.T - delta) * scale
    return d_scores.T @ query, weights.T @ cotangent


def float32_attention(case: MoBACase, pattern: jax.Array) -> Callable[..., jax.Array]:
    """Dense attention under a routing, in float32, of query, key and value [T, heads, H].

    Args:
        pattern: bool [T, N, num_blocks], which blocks each query sees.
    """
    group = case.query_heads // case.key_heads
    position = jnp.arange(case.tokens)

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        def one_head(operands: tuple[jax.Array, ...]) -> jax.Array:
            query, key, value, pattern = operands
            mask = pattern[:, position // case.block_size] & (position[None, :] <= position[:, None])
            scores = jnp.matmul(query, key.T, precision="highest") * case.head_dim**-0.5
            weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
            return jnp.matmul(weights, value, precision="highest")

        heads_first = [jnp.moveaxis(array, 1, 0) for array in (query, key, value)]
        heads_first[1:] = (jnp.repeat(array, group, axis=0) for array in heads_first[1:])
        return jnp.moveaxis(jax.lax.map(one_head, (*heads_first, jnp.moveaxis(pattern, 1, 0))), 0, 1)

    return attend


def errors_at(case: MoBACase, implementation: str, tokens: int, *, seed: int = 0) -> dict[str, float]:
    """`errors_of` an implementation, of one sequence of `tokens` tokens."""
    from benchmarks.moba.programs import Passes
    from blockdiag.ops.moba.api import moba_routing

    small = case.shrunk(tokens)
    operands: Any = random_operands(small, seed)
    options = {"block_size": small.block_size, "top_k": small.top_k, "implementation": implementation}
    routing = moba_routing(*operands[:2], **options)
    return errors_of(
        small, routing.to_pattern(), operands, Passes(small, implementation, operands).make("fwd+bwd").run()
    )


def errors_of(
    case: MoBACase, pattern: jax.Array, operands: tuple[jax.Array, ...], results: tuple[jax.Array, ...]
) -> dict[str, float]:
    """Relative L2 errors of "output", "dQ", "dK" and "dV" against float32 attention.

    Args:
        pattern: bool [B, T, N, num_blocks], the routing.
        operands, results: as for `check_sample`.
    """

    @jax.jit
    @jax.vmap
    def exact(pattern: jax.Array, *operands: jax.Array) -> tuple[jax.Array, ...]:
        *wide, cotangent = (array.astype(jnp.float32) for array in operands)
        output, pull_back = jax.vjp(float32_attention(case, pattern), *wide)
        return (output, *pull_back(cotangent))

    output, _, *gradients = results
    found = (np.asarray(array.astype(jnp.float32), np.float64) for array in (output, *gradients))
    wanted = (np.asarray(array, np.float64) for array in exact(pattern, *operands))
    names = ("output", "dQ", "dK", "dV")
    return {name: relative_error(mine, other) for name, mine, other in zip(names, found, wanted, strict=True)}


def random_operands(case: MoBACase, seed: int) -> tuple[jax.Array, ...]:
    """Standard normal query, key, value and cotangent in bfloat16, [B, T, heads, H]."""
    heads = (case.query_heads, case.key_heads, case.key_heads, case.query_heads)
    seeds = jax.random.split(jax.random.key(seed), len(heads))
    return tuple(
        jax.random.normal(one, (case.batch, case.tokens, count, case.head_dim), jnp.bfloat16)
        for one, count in zip(seeds, heads, strict=True)
    )
