"""Key convolution, written to be read: the executable specification of the operation.

Everything is computed in float32, or in float64 for float64 keys, without intermediate rounding. Every JAX
transformation applies, including forward mode.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from blockdiag.common.dtypes import accumulation_dtype
from blockdiag.ops.key_convolution.problem import KeyConvolutionProblem


def available() -> str | None:
    """Return None: plain `jax.numpy` always runs."""
    return None


def supports(problem: KeyConvolutionProblem) -> str | None:
    """Return None: the reference computes every problem."""
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
    # Operands are widened only once, so that JAX's gradients of this function are rounded only once.
    wide = accumulation_dtype(key.dtype)
    wide_key, wide_weights = key.astype(wide), weights.astype(wide)
    token = jnp.arange(problem.tokens, dtype=jnp.int32)
    position = _positions(problem, tiles)
    is_token = (position >= 0)[:, None, None]
    # Selection instead of multiplication by 0, because 0 * NaN would carry a neighbour's NaN in here.
    total = jnp.zeros(key.shape, wide)
    for lag in range(problem.size):
        reaches = (position >= lag)[:, None, None]
        past_key = jnp.where(reaches, wide_key[jnp.maximum(token - lag, 0)], 0)
        total += _weights_of_tokens(problem, wide_weights[:, problem.size - 1 - lag]) * past_key
    if problem.activation == "silu":
        total = jax.nn.silu(total)
    if problem.has_residual:
        total += wide_key
    # The last selection also keeps cotangents of rows outside every sequence from being multiplied by 0.
    return jnp.where(is_token, total, 0).astype(key.dtype)


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
    wide = accumulation_dtype(key.dtype)

    def wide_forward(key: Array, weights: Array) -> Array:
        return forward(problem, key, weights, tiles)

    # Differentiating the float32 function rounds each gradient once, at the end.
    _, pull_back = jax.vjp(wide_forward, key.astype(wide), weights.astype(wide))
    d_key, d_weights = pull_back(output_cotangent.astype(wide))
    return d_key.astype(key.dtype), d_weights.astype(weights.dtype)


def _weights_of_tokens(problem: KeyConvolutionProblem, row: Array) -> Array:
    """Repeat one row of each group's weights [groups, K, H] for every token, [tokens, K, H]."""
    return jnp.repeat(row, problem.tokens // problem.groups, axis=0)


def _positions(problem: KeyConvolutionProblem, tiles: Array | None) -> Array:
    """Return each token's position within its sequence, int32 [tokens]; -1 outside every sequence."""
    if tiles is None:
        return jnp.arange(problem.tokens, dtype=jnp.int32) % max(problem.sequence_length or 1, 1)
    offset = jnp.arange(problem.tile_rows, dtype=jnp.int32)[None, :]
    start, length, position = (column[:, None] for column in tiles.T)
    row = jnp.where(offset < length, start + offset, problem.tokens)  # rows past the end are dropped
    return jnp.full(problem.tokens, -1, jnp.int32).at[row].set(position + offset, mode="drop")
