"""Key convolution in plain `jax.numpy`: shifted copies of the token axis, which XLA fuses into their consumers."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from blockdiag.common.dtypes import accumulation_dtype
from blockdiag.common.sizes import is_symbolic
from blockdiag.ops.key_convolution.problem import KeyConvolutionProblem


def available() -> str | None:
    """Return None: plain `jax.numpy` always runs."""
    return None


def supports(problem: KeyConvolutionProblem) -> str | None:
    """Return None: this implementation computes every problem."""
    del problem
    return None


def forward(
    problem: KeyConvolutionProblem, key: Array, weights: Array, tiles: Array | None, *, interpret: bool = False
) -> Array:
    """Return output [tokens, K, H] in the dtype of `key`; rows outside every sequence are 0.

    Args:
        problem: the call.
        key: [tokens, K, H].
        weights: [groups, size, K, H]; the last row of a group belongs to the current token.
        tiles: tile table int32 [num_tiles, 3], or None for a uniform problem.
        interpret: ignored.
    """
    del interpret
    if problem.tokens == 0:
        return jnp.zeros_like(key)
    positions = _positions(problem, tiles)
    rows = _sequence_rows(problem, key)
    total = _weighted_sum(_lagged(problem, rows, positions), weights)
    if problem.activation == "silu":
        total = jax.nn.silu(total)
    if problem.has_residual:
        total += _select(positions, 0, rows)
    return total.reshape(key.shape).astype(key.dtype)


def backward(
    problem: KeyConvolutionProblem,
    key: Array,
    weights: Array,
    tiles: Array | None,
    output_cotangent: Array,
    *,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """Return the gradients of `forward` with respect to key and weights, each in its operand's dtype."""
    del interpret
    if problem.tokens == 0:
        return jnp.zeros_like(key), jnp.zeros_like(weights)
    positions = _positions(problem, tiles)
    lagged = _lagged(problem, _sequence_rows(problem, key), positions)
    d_output = _select(positions, 0, _sequence_rows(problem, output_cotangent))
    d_total = d_output
    if problem.activation == "silu":
        total = _weighted_sum(lagged, weights)
        sigmoid = jax.nn.sigmoid(total)
        d_total = d_output * sigmoid * (1 + total * (1 - sigmoid))

    d_key = d_output if problem.has_residual else jnp.zeros_like(d_output)
    for lag in range(problem.size):
        d_key += _shift(_select(positions, lag, d_total) * _row(weights, lag, d_total.dtype), -lag)
    # Lagged keys are 0 where a tap does not reach.
    products = [jnp.sum(d_total * past, axis=(1, 2)) for past in lagged]  # by lag, each [groups, K, H]
    d_weights = jnp.stack(products[::-1], axis=1)
    return d_key.reshape(key.shape).astype(key.dtype), d_weights.astype(weights.dtype)


def _sequence_rows(problem: KeyConvolutionProblem, x: Array) -> Array:
    """Reshape [tokens, K, H] to float32 or float64 [groups, sequences, rows, K, H]; packed sequences count as one."""
    length = problem.sequence_length
    rows = problem.tokens // problem.groups if length is None else length
    return x.reshape(problem.groups, -1, rows, *x.shape[1:]).astype(accumulation_dtype(x.dtype))


def _positions(problem: KeyConvolutionProblem, tiles: Array | None) -> Array:
    """Return each row's position in its sequence, int32 [groups or 1, 1, rows, 1, 1]; -1 outside every sequence."""
    if tiles is None:
        return jnp.arange(problem.sequence_length, dtype=jnp.int32).reshape(1, 1, -1, 1, 1)
    offset = jnp.arange(problem.tile_rows, dtype=jnp.int32)[None, :]
    start, length, position = (column[:, None] for column in tiles.T)
    row = jnp.where(offset < length, start + offset, problem.tokens)  # rows past the end are dropped
    positions = jnp.full(problem.tokens, -1, jnp.int32).at[row].set(position + offset, mode="drop")
    return positions.reshape(problem.groups, 1, -1, 1, 1)


def _lagged(problem: KeyConvolutionProblem, rows: Array, positions: Array) -> list[Array]:
    """Return, for each lag, the rows that many tokens earlier in the same sequence; 0 where there is none."""
    return [_select(positions, lag, _shift(rows, lag)) for lag in range(problem.size)]


def _select(positions: Array, lag: int, x: Array) -> Array:
    """Return `x` in rows with at least `lag` rows of their sequence before them, 0 elsewhere.

    This is a selection, not a product, because 0 * NaN would carry a neighbour's NaN in here.
    """
    return jnp.where(positions >= lag, x, 0)


def _shift(x: Array, lag: int) -> Array:
    """Shift the rows of `x` by `lag` rows, so that row t gets row t - lag; zeros move in."""
    if is_symbolic(x.shape[2]):
        # A symbolic size may be less than the lag, and negative padding cannot remove more rows than there are.
        edges = [(0, 0)] * x.ndim
        edges[2] = (max(lag, 0), max(-lag, 0))
        return jax.lax.slice_in_dim(jnp.pad(x, edges), edges[2][1], edges[2][1] + x.shape[2], axis=2)
    lag = max(-x.shape[2], min(x.shape[2], lag))
    edges = [(0, 0, 0)] * x.ndim
    edges[2] = (lag, -lag, 0)
    return jax.lax.pad(x, jnp.zeros((), x.dtype), edges)


def _weighted_sum(lagged: list[Array], weights: Array) -> Array:
    return sum(
        (_row(weights, lag, past.dtype) * past for lag, past in enumerate(lagged)), start=jnp.zeros_like(lagged[0])
    )


def _row(weights: Array, lag: int, dtype: jax.typing.DTypeLike) -> Array:
    """Return the weights of one lag, [groups, 1, 1, K, H]."""
    return weights[:, weights.shape[1] - 1 - lag, None, None].astype(dtype)
