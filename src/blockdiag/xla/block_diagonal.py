"""Block-diagonal attention in plain `jax.numpy`, blocked: scores exist only within blocks, as [tiles, K, G, b, b].

The token axis is laid out in tiles of b rows: by a reshape where every sequence has the same whole number of blocks, by
padding and a reshape where sequences are equal, and by a gather (and a scatter back) where a tile table says so.
Query heads that share a key head are an axis of the einsums, so that keys and values are never repeated.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from blockdiag._dtypes import accumulation_dtype
from blockdiag.problem import BlockDiagonalProblem
from blockdiag.rotary import rotate, rotate_back

type RotaryTables = tuple[Array, Array, Array | None] | None


def available() -> str | None:
    """None: plain `jax.numpy` always runs."""
    return None


def supports(problem: BlockDiagonalProblem) -> str | None:
    """None: this implementation computes every problem."""
    del problem
    return None


def forward(
    problem: BlockDiagonalProblem,
    query: Array,
    key: Array,
    value: Array,
    tiles: Array | None,
    rotary: RotaryTables,
    *,
    interpret: bool = False,
) -> Array:
    """Attention output [tokens, N, H] in the dtype of `query`; padding rows are 0."""
    del interpret
    if problem.tokens == 0:
        return jnp.zeros_like(query)
    layout = _TileLayout(problem, tiles)
    query, key, value = _rotated_tiles(layout, rotary, query, key, value)
    weights = _weights(layout, query, key)
    output = _product("...kgij,...jkh->...ikgh", weights.astype(value.dtype), value)
    return layout.from_tiles(output)


def backward(
    problem: BlockDiagonalProblem,
    query: Array,
    key: Array,
    value: Array,
    tiles: Array | None,
    rotary: RotaryTables,
    output_cotangent: Array,
    *,
    interpret: bool = False,
) -> tuple[Array, Array, Array]:
    """Gradients of `forward` with respect to query, key and value, in their dtype."""
    del interpret
    if problem.tokens == 0:
        return jnp.zeros_like(query), jnp.zeros_like(key), jnp.zeros_like(value)
    # Without the barrier XLA would find the forward's softmax weights again and keep them, b / H times an operand.
    query, key, value, output_cotangent = jax.lax.optimization_barrier((query, key, value, output_cotangent))
    layout = _TileLayout(problem, tiles)
    query, key, value = _rotated_tiles(layout, rotary, query, key, value)
    cotangent = layout.to_tiles(output_cotangent, problem.group_size)
    dtype = value.dtype

    weights = _weights(layout, query, key)
    value_gradient = _product("...kgij,...ikgh->...jkh", weights.astype(dtype), cotangent)
    weights_gradient = _product("...ikgh,...jkh->...kgij", cotangent, value)
    # Di = sum(P * dP) stays in float32, unrounded: neither the output nor a log-sum-exp is needed here.
    mean = jnp.sum(weights * weights_gradient, axis=-1, keepdims=True)
    scores_gradient = (weights * (weights_gradient - mean) * problem.scale).astype(dtype)
    query_gradient = _product("...kgij,...jkh->...ikgh", scores_gradient, key)
    key_gradient = _product("...kgij,...ikgh->...jkh", scores_gradient, query)
    return _rotated_back(layout, rotary, query_gradient, key_gradient, value_gradient)


@dataclasses.dataclass(frozen=True)
class _TileLayout:
    """How rows of the token axis lie in tiles: leading axes are [sequences, tiles per sequence], or [tiles]."""

    problem: BlockDiagonalProblem
    tiles: Array | None

    @property
    def rows(self) -> int:
        """Rows of a tile, b."""
        return min(self.problem.block_size, self.problem.sequence_length or self.problem.tokens)

    @property
    def is_full(self) -> bool:
        """Whether every row of every tile is known to belong to a block."""
        return self.tiles is None and self.problem.sequence_length % self.rows == 0

    @property
    def lengths(self) -> Array | np.ndarray:
        """Rows of each tile that belong to its block, for the last of the leading axes."""
        if self.tiles is not None:
            return self.tiles[:, 1]
        length = self.problem.sequence_length
        return np.minimum(length - np.arange(0, length, self.rows, dtype=np.int32), self.rows)

    def offsets(self) -> np.ndarray:
        """0 .. b - 1."""
        return np.arange(self.rows, dtype=np.int32)

    def rows_of_tiles(self) -> tuple[Array, Array]:
        """Row of the token axis of each row of each tile, and whether it belongs to the tile's block."""
        row = self.tiles[:, :1] + self.offsets()[None, :]
        return jnp.minimum(row, self.problem.tokens - 1), self.offsets()[None, :] < self.lengths[:, None]

    def to_tiles(self, x: Array, group_size: int | None = None) -> Array:
        """[tokens, ...] as [tiles, b, ...], with 0 in rows outside a block; N is split in K, G for `group_size`."""
        if group_size is not None:
            x = x.reshape(x.shape[0], -1, group_size, x.shape[-1])
        if self.tiles is None:
            length = self.problem.sequence_length
            x = x.reshape(-1, length, *x.shape[1:])
            x = jnp.pad(x, [(0, 0), (0, -length % self.rows)] + [(0, 0)] * (x.ndim - 2))
            return x.reshape(x.shape[0], -1, self.rows, *x.shape[2:])
        row, is_inside = self.rows_of_tiles()
        # A select, not a product with a mask: 0 * NaN would carry a neighbouring sequence's NaN into this block.
        return jnp.where(is_inside.reshape(*row.shape, *[1] * (x.ndim - 1)), x[row], 0)

    def from_tiles(self, x: Array) -> Array:
        """The inverse: [tiles, b, K, (G,) H] as [tokens, heads, H] in the problem's dtype, 0 outside every block."""
        x = x.astype(self.problem.dtype)
        if self.tiles is None:
            length = self.problem.sequence_length
            x = x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]
            return x.reshape(self.problem.tokens, -1, x.shape[-1])
        row, is_inside = self.rows_of_tiles()
        row = jnp.where(is_inside, row, self.problem.tokens)
        x = x.reshape(*row.shape, -1, x.shape[-1])
        output = jnp.zeros((self.problem.tokens, *x.shape[2:]), x.dtype)
        return output.at[row].set(x, mode="drop")

    def table_rows(self, table: Array, positions: Array | None) -> Array:
        """Rows of a rotary table [P, H/2] for the rows of the tiles, [..., b, 1, H/2]; 0 outside every block."""
        source = self.problem.rotary.positions
        if source == "explicit" or (source == "token" and self.tiles is None):
            index = positions if source == "explicit" else np.arange(self.problem.tokens, dtype=np.int32)
            return self.to_tiles(_take_rows(table, index)[:, None, :])
        if self.tiles is None:
            table = _take_rows(table, np.arange(self.problem.sequence_length, dtype=np.int32))
            # One sequence's rows serve all sequences, which are the first axis of the layout.
            return dataclasses.replace(self, problem=_one_sequence(self.problem)).to_tiles(table[:, None, :])
        row, is_inside = self.rows_of_tiles()
        index = row if source == "token" else self.tiles[:, 2:] + self.offsets()[None, :]
        return jnp.where(is_inside[:, :, None, None], _take_rows(table, index)[:, :, None, :], 0)


def _one_sequence(problem: BlockDiagonalProblem) -> BlockDiagonalProblem:
    return dataclasses.replace(problem, tokens=problem.sequence_length)


def _take_rows(table: Array, index: Array | np.ndarray) -> Array:
    """Rows of a table by index, clamped to the table; a slice where the index is known to be a leading range."""
    if isinstance(index, np.ndarray) and index.size <= table.shape[0]:
        return table[: index.size]
    return table[jnp.clip(index, 0, table.shape[0] - 1)]


def _product(subscripts: str, left: Array, right: Array) -> Array:
    """An einsum accumulated in float32 (float64 for float64), with full-precision products for float32 operands."""
    wide = accumulation_dtype(left.dtype)
    precision = jax.lax.Precision.HIGHEST if left.dtype == wide else None
    return jnp.einsum(subscripts, left, right, preferred_element_type=wide, precision=precision)


def _weights(layout: _TileLayout, query: Array, key: Array) -> Array:
    """Softmax weights [..., K, G, b, b] in float32 of rotated query [..., b, K, G, H] and key [..., b, K, H]."""
    scores = _product("...ikgh,...jkh->...kgij", query, key) * layout.problem.scale
    if not layout.is_full or layout.problem.is_causal:
        scores = jnp.where(_seen_keys(layout, scores.ndim), scores, -jnp.inf)
    # The maximum cancels in the quotient, so that no gradient flows through it.
    exponentials = jnp.exp(scores - jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
    return exponentials / jnp.sum(exponentials, axis=-1, keepdims=True)


def _seen_keys(layout: _TileLayout, ndim: int) -> Array:
    """Which keys each query of each tile sees, [..., tiles, 1, 1, 1 or b, b] with `ndim` axes."""
    offset = layout.offsets().reshape((1,) * (ndim - 1) + (-1,))
    # A tile without rows looks at its first, all-zero row: a softmax over nothing would be NaN.
    is_seen = offset < jnp.maximum(layout.lengths, 1).reshape((1,) * (ndim - 5) + (-1, 1, 1, 1, 1))
    return is_seen & (offset <= jnp.swapaxes(offset, -1, -2)) if layout.problem.is_causal else is_seen


def _rotated_tiles(
    layout: _TileLayout, rotary: RotaryTables, query: Array, key: Array, value: Array
) -> tuple[Array, Array, Array]:
    """Query [..., b, K, G, H], key and value [..., b, K, H] in tiles, rotated and rounded back to their dtype."""
    query = layout.to_tiles(query, layout.problem.group_size)
    key, value = layout.to_tiles(key), layout.to_tiles(value)
    if layout.problem.rotary is None:
        return query, key, value
    return _turn(rotate, layout, rotary, query, key, value)


def _rotated_back(
    layout: _TileLayout, rotary: RotaryTables, query: Array, key: Array, value: Array
) -> tuple[Array, Array, Array]:
    """Gradients of the rotated tiles as gradients of the rows of the token axis, rounded once."""
    if layout.problem.rotary is not None:
        query, key, value = _turn(rotate_back, layout, rotary, query, key, value)
    return layout.from_tiles(query), layout.from_tiles(key), layout.from_tiles(value)


def _turn(turn, layout: _TileLayout, rotary: RotaryTables, query: Array, key: Array, value: Array):
    """Apply `rotate` or `rotate_back` to the operands that the problem rotates, each in its own dtype."""
    cos, sin, positions = rotary
    cos, sin = layout.table_rows(cos, positions), layout.table_rows(sin, positions)
    options = layout.problem.rotary
    turned = []
    for x, is_rotated in ((query, options.query), (key, options.key), (value, options.value)):
        if is_rotated:
            extra = tuple(range(-2, -2 - (x.ndim - cos.ndim), -1))  # the group axis of a query
            x = turn(x, jnp.expand_dims(cos, extra), jnp.expand_dims(sin, extra), options.interleaved).astype(x.dtype)
        turned.append(x)
    return tuple(turned)
