"""Block-diagonal attention in plain `jax.numpy`, blocked: scores exist only within blocks, as [tiles, K, G, b, b].

The token axis is laid out in tiles of b rows:

| sequences | layout |
|---|---|
| equally long, whole blocks | reshape |
| equally long, with a partial block | padding and reshape |
| tile table | gather, and scatter back |

Query heads that share a key head are an axis of the einsums, so keys and values are never repeated. Long blocks are the
batch of a fused region, which computes the scores of some keys at a time.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from blockdiag.common.dtypes import accumulation_dtype
from blockdiag.common.rotary import rotate, rotate_back
from blockdiag.fusion.runtime import xla as fused
from blockdiag.ops.block_diagonal import region as blocks
from blockdiag.ops.block_diagonal.layouts import (
    EqualSequences,
    RotaryArrays,
    TileTable,
    layout_of,
    operand_tiles,
    split_heads,
    turn_operands,
)
from blockdiag.ops.block_diagonal.packed import takes_packed
from blockdiag.ops.block_diagonal.problem import BlockDiagonalProblem

type _Layout = EqualSequences | TileTable


def available() -> str | None:
    """Return None: plain `jax.numpy` always runs."""
    return None


def supports(problem: BlockDiagonalProblem) -> str | None:
    """Return None: this implementation computes every problem."""
    del problem
    return None


@takes_packed
def forward(
    problem: BlockDiagonalProblem,
    query: Array,
    key: Array,
    value: Array,
    tiles: Array | None,
    rotary: RotaryArrays | None,
    *,
    interpret: bool = False,
) -> Array:
    """Return the attention output [tokens, N, H] in the dtype of `query`; padding rows are 0."""
    del interpret
    if problem.tokens == 0:
        return jnp.zeros_like(query)
    if problem.is_long:
        output, _ = forward_with_log_sum(problem, query, key, value, tiles, rotary)
        return output
    layout = layout_of(problem, tiles)
    query, key, value = operand_tiles(layout, query, key, value)
    query, key, value = turn_operands(rotate, layout, rotary, query, key, value)
    weights = _weights(layout, query, key)
    output = _product("...kgij,...jkh->...ikgh", weights.astype(value.dtype), value)
    return _to_tokens(layout, output)


@takes_packed
def forward_with_log_sum(
    problem: BlockDiagonalProblem,
    query: Array,
    key: Array,
    value: Array,
    tiles: Array | None,
    rotary: RotaryArrays | None,
    *,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """Return output and log-sum-exp [tokens, N] in float32 or float64; for long blocks only."""
    del interpret
    return blocks.forward(fused.forward, layout_of(problem, tiles), query, key, value, rotary)


@takes_packed
def backward(
    problem: BlockDiagonalProblem,
    query: Array,
    key: Array,
    value: Array,
    tiles: Array | None,
    rotary: RotaryArrays | None,
    output_cotangent: Array,
    output: Array | None = None,
    log_sum: Array | None = None,
    *,
    interpret: bool = False,
) -> tuple[Array, Array, Array]:
    """Return the gradients of `forward` with respect to query, key and value, in their dtype.

    For long blocks, `output` and `log_sum` are the results of `forward_with_log_sum`, or None to compute them again.
    """
    del interpret
    if problem.tokens == 0:
        return jnp.zeros_like(query), jnp.zeros_like(key), jnp.zeros_like(value)
    if problem.is_long:
        if output is None or log_sum is None:
            output, log_sum = forward_with_log_sum(problem, query, key, value, tiles, rotary)
        layout = layout_of(problem, tiles)
        return blocks.backward(fused.backward, layout, query, key, value, rotary, output_cotangent, output, log_sum)
    # Without the barrier, XLA would reuse the forward pass's softmax weights and keep them, b / H times an operand's
    # size.
    query, key, value, output_cotangent = jax.lax.optimization_barrier((query, key, value, output_cotangent))
    layout = layout_of(problem, tiles)
    query, key, value = operand_tiles(layout, query, key, value)
    query, key, value = turn_operands(rotate, layout, rotary, query, key, value)
    cotangent = layout.to_tiles(split_heads(problem, output_cotangent))
    dtype = value.dtype

    weights = _weights(layout, query, key)
    value_gradient = _product("...kgij,...ikgh->...jkh", weights.astype(dtype), cotangent)
    weights_gradient = _product("...ikgh,...jkh->...kgij", cotangent, value)
    # Delta is computed as sum(P * dP) and stays in float32, so neither the output nor a log-sum-exp is needed.
    mean = jnp.sum(weights * weights_gradient, axis=-1, keepdims=True)
    scores_gradient = (weights * (weights_gradient - mean) * problem.scale).astype(dtype)
    query_gradient = _product("...kgij,...jkh->...ikgh", scores_gradient, key)
    key_gradient = _product("...kgij,...ikgh->...jkh", scores_gradient, query)
    gradients = turn_operands(rotate_back, layout, rotary, query_gradient, key_gradient, value_gradient)
    query_gradient, key_gradient, value_gradient = (_to_tokens(layout, x) for x in gradients)
    return query_gradient, key_gradient, value_gradient


def _to_tokens(layout: _Layout, x: Array) -> Array:
    """Convert tiles [lead.., b, K, (G,) H] to [tokens, heads, H] in the problem's dtype."""
    x = layout.to_tokens(x.astype(layout.problem.dtype))
    return x.reshape(x.shape[0], -1, x.shape[-1])


def _product(subscripts: str, left: Array, right: Array) -> Array:
    """Return an einsum accumulated in float32 (float64 for float64), with full precision for float32 operands."""
    wide = accumulation_dtype(left.dtype)
    precision = jax.lax.Precision.HIGHEST if left.dtype == wide else None
    return jnp.einsum(subscripts, left, right, preferred_element_type=wide, precision=precision)


def _weights(layout: _Layout, query: Array, key: Array) -> Array:
    """Return softmax weights [tiles, K, G, b, b] of rotated query [tiles, b, K, G, H] and key [tiles, b, K, H].

    They are float32, or float64 for float64 arrays.
    """
    scores = _product("...ikgh,...jkh->...kgij", query, key) * layout.problem.scale
    if not layout.is_full or layout.problem.is_causal:
        scores = jnp.where(_seen_keys(layout, scores.ndim), scores, -jnp.inf)
    # The maximum cancels in the quotient, so no gradient needs to flow through it.
    exponentials = jnp.exp(scores - jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
    return exponentials / jnp.sum(exponentials, axis=-1, keepdims=True)


def _seen_keys(layout: _Layout, ndim: int) -> Array:
    """Return the mask of the keys that each query of each tile sees, [tiles, 1, 1, 1 or b, b] with `ndim` axes."""
    offset = jnp.arange(layout.rows, dtype=jnp.int32).reshape((1,) * (ndim - 1) + (-1,))
    # A tile without rows sees its first row, which is 0, because a softmax over nothing would be NaN.
    is_seen = offset < jnp.maximum(layout.lengths, 1).reshape((1,) * (ndim - 5) + (-1, 1, 1, 1, 1))
    return is_seen & (offset <= jnp.swapaxes(offset, -1, -2)) if layout.problem.is_causal else is_seen
