"""Block-diagonal attention, written to be read: the executable specification of the operation.

One function attends within one block, and `jax.vmap` runs it over the tile table. Everything is computed in float32, or
in float64 for float64 arrays, without intermediate rounding. Every JAX transformation applies, including forward mode.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array

from blockdiag.common.dtypes import accumulation_dtype
from blockdiag.common.rotary import rotate
from blockdiag.common.rotary_problem import RotaryProblem
from blockdiag.ops.block_diagonal.packed import takes_packed
from blockdiag.ops.block_diagonal.problem import BlockDiagonalProblem
from blockdiag.ops.block_diagonal.tiles import uniform_tiles

type RotaryArrays = tuple[Array, Array, Array | None]


def available() -> str | None:
    """Return None: plain `jax.numpy` always runs."""
    return None


def supports(problem: BlockDiagonalProblem) -> str | None:
    """Return None: the reference computes every problem."""
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
    if tiles is None:
        tiles = uniform_tiles(problem)
    wide = accumulation_dtype(query.dtype)
    wide_query = query.astype(wide)
    key, value = (jnp.repeat(x.astype(wide), problem.group_size, axis=1) for x in (key, value))

    attend = functools.partial(_attend_tile, problem, wide_query, key, value, rotary)
    output = jax.vmap(attend)(tiles)  # [num_tiles, block_size, N, H]

    row, is_inside = jax.vmap(functools.partial(_rows_of_tile, problem))(tiles)
    row = jnp.where(is_inside, row, problem.tokens)  # rows past the end are dropped
    return jnp.zeros(query.shape, query.dtype).at[row].set(output.astype(query.dtype), mode="drop")


@takes_packed
def backward(
    problem: BlockDiagonalProblem,
    query: Array,
    key: Array,
    value: Array,
    tiles: Array | None,
    rotary: RotaryArrays | None,
    output_cotangent: Array,
    *,
    interpret: bool = False,
) -> tuple[Array, Array, Array]:
    """Return the gradients of `forward` with respect to query, key and value, in their dtype."""
    del interpret
    wide = accumulation_dtype(query.dtype)

    def wide_forward(query: Array, key: Array, value: Array) -> Array:
        return forward(problem, query, key, value, tiles, rotary)

    # Differentiating the float32 function rounds each gradient once, at the end.
    _, pull_back = jax.vjp(wide_forward, query.astype(wide), key.astype(wide), value.astype(wide))
    d_query, d_key, d_value = pull_back(output_cotangent.astype(wide))
    return d_query.astype(query.dtype), d_key.astype(query.dtype), d_value.astype(query.dtype)


def _rows_of_tile(problem: BlockDiagonalProblem, tile: Array) -> tuple[Array, Array]:
    """Return the token row of each of a tile's `block_size` rows, and whether it lies in the tile's block."""
    start, length, _ = tile
    offset = jnp.arange(problem.block_size, dtype=jnp.int32)
    return jnp.minimum(start + offset, problem.tokens - 1), offset < length


def _attend_tile(
    problem: BlockDiagonalProblem, query: Array, key: Array, value: Array, rotary: RotaryArrays | None, tile: Array
) -> Array:
    """Return output [block_size, N, H] of one tile; query, key and value are [tokens, N, H]."""
    row, is_inside = _rows_of_tile(problem, tile)
    # Rows outside the block become 0 before any product, because 0 * NaN would carry a neighbour's NaN in here.
    query, key, value = (jnp.where(is_inside[:, None, None], x[row], 0) for x in (query, key, value))
    if problem.rotary is not None and rotary is not None:
        cos, sin = _table_rows(problem, problem.rotary, rotary, tile)
        if problem.rotary.query:
            query = rotate(query, cos, sin, problem.rotary.interleaved)
        if problem.rotary.key:
            key = rotate(key, cos, sin, problem.rotary.interleaved)
        if problem.rotary.value:
            value = rotate(value, cos, sin, problem.rotary.interleaved)

    scores = problem.scale * jnp.einsum("inh,jnh->nij", query, key, precision="highest")
    offset = jnp.arange(problem.block_size, dtype=jnp.int32)
    # A tile without rows sees its first row, which is 0, because a softmax over nothing would be NaN.
    is_seen = (offset < jnp.maximum(tile[1], 1))[None, :]
    if problem.is_causal:
        is_seen = is_seen & (offset[None, :] <= offset[:, None])
    weights = jax.nn.softmax(jnp.where(is_seen[None], scores, -jnp.inf), axis=-1)
    # A NaN among a row's scores also makes its weights of unseen keys NaN.
    weights = jnp.where(is_seen[None], weights, 0)
    return jnp.einsum("nij,jnh->inh", weights, value, precision="highest")


def _table_rows(
    problem: BlockDiagonalProblem, options: RotaryProblem, rotary: RotaryArrays, tile: Array
) -> tuple[Array, Array]:
    """Return the rows of the cos and sin tables for a tile's rows, [block_size, 1, H/2]; 0 outside the block."""
    cos, sin, positions = rotary
    row, is_inside = _rows_of_tile(problem, tile)
    if positions is not None:
        index = positions[row]
    elif options.positions == "sequence":
        index = tile[2] + jnp.arange(problem.block_size, dtype=jnp.int32)
    else:
        index = row
    index = jnp.clip(index, 0, options.table_rows - 1)
    cos, sin = (jnp.where(is_inside[:, None, None], table[index][:, None, :], 0) for table in (cos, sin))
    return cos, sin
