"""Block-diagonal attention in plain `jax.numpy`, blocked: scores exist only within blocks, as [tiles, K, G, b, b].

The token axis is laid out in tiles of b rows: by a reshape where every sequence has the same whole number of blocks, by
padding and a reshape where sequences are equal, and by a gather (and a scatter back) where a tile table says so.
Query heads that share a key head are an axis of the einsums, so that keys and values are never repeated.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from blockdiag._dtypes import accumulation_dtype
from blockdiag.problem import BlockDiagonalProblem
from blockdiag.rotary import rotate, rotate_back

type RotaryArrays = tuple[Array, Array, Array | None]


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
    rotary: RotaryArrays | None,
    *,
    interpret: bool = False,
) -> Array:
    """Attention output [tokens, N, H] in the dtype of `query`; padding rows are 0."""
    del interpret
    if problem.tokens == 0:
        return jnp.zeros_like(query)
    layout = _layout(problem, tiles)
    query, key, value = _operand_tiles(layout, query, key, value)
    query, key, value = _turn(rotate, layout, rotary, query, key, value)
    weights = _weights(layout, query, key)
    output = _product("...kgij,...jkh->...ikgh", weights.astype(value.dtype), value)
    return layout.from_tiles(output)


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
    """Gradients of `forward` with respect to query, key and value, in their dtype."""
    del interpret
    if problem.tokens == 0:
        return jnp.zeros_like(query), jnp.zeros_like(key), jnp.zeros_like(value)
    # Without the barrier XLA would find the forward's softmax weights again and keep them, b / H times an operand.
    query, key, value, output_cotangent = jax.lax.optimization_barrier((query, key, value, output_cotangent))
    layout = _layout(problem, tiles)
    query, key, value = _operand_tiles(layout, query, key, value)
    query, key, value = _turn(rotate, layout, rotary, query, key, value)
    cotangent = layout.to_tiles(_split_heads(problem, output_cotangent))
    dtype = value.dtype

    weights = _weights(layout, query, key)
    value_gradient = _product("...kgij,...ikgh->...jkh", weights.astype(dtype), cotangent)
    weights_gradient = _product("...ikgh,...jkh->...kgij", cotangent, value)
    # Di = sum(P * dP) stays in float32, unrounded: neither the output nor a log-sum-exp is needed here.
    mean = jnp.sum(weights * weights_gradient, axis=-1, keepdims=True)
    scores_gradient = (weights * (weights_gradient - mean) * problem.scale).astype(dtype)
    query_gradient = _product("...kgij,...jkh->...ikgh", scores_gradient, key)
    key_gradient = _product("...kgij,...ikgh->...jkh", scores_gradient, query)
    gradients = _turn(rotate_back, layout, rotary, query_gradient, key_gradient, value_gradient)
    query_gradient, key_gradient, value_gradient = map(layout.from_tiles, gradients)
    return query_gradient, key_gradient, value_gradient


@dataclass(frozen=True)
class _EqualSequences:
    """Tiles of equal sequences, back to back: [sequences, tiles per sequence, b, ...], without any gather."""

    problem: BlockDiagonalProblem
    length: int

    @property
    def rows(self) -> int:
        """Rows of a tile, b."""
        return min(self.problem.block_size, self.length)

    @property
    def is_full(self) -> bool:
        """Whether every row of every tile is known to belong to a block."""
        return self.length % self.rows == 0

    @property
    def lengths(self) -> Array:
        """Rows that belong to the block, for each tile of a sequence."""
        position = np.arange(0, self.length, self.rows, dtype=np.int32)
        return jnp.asarray(np.minimum(self.length - position, self.rows))

    def to_tiles(self, x: Array) -> Array:
        """[tokens, ...] in tiles, with 0 in rows outside a block; one sequence's rows, [length, ...], too."""
        x = x.reshape(-1, self.length, *x.shape[1:])
        x = jnp.pad(x, [(0, 0), (0, -self.length % self.rows)] + [(0, 0)] * (x.ndim - 2))
        return x.reshape(x.shape[0], -1, self.rows, *x.shape[2:])

    def from_tiles(self, x: Array) -> Array:
        """The inverse: [tiles, b, K, (G,) H] as [tokens, heads, H] in the problem's dtype."""
        x = x.astype(self.problem.dtype)
        x = x.reshape(x.shape[0], -1, *x.shape[3:])[:, : self.length]
        return x.reshape(self.problem.tokens, -1, x.shape[-1])

    def table_rows(self, source: str, table: Array, positions: Array | None) -> Array:
        """Rows of a rotary table [P, H/2] for the rows of the tiles, [tiles, b, 1, H/2]; 0 outside every block."""
        if positions is not None:
            rows = _clamped_rows(table, positions)
        else:
            # By position, the rows of one sequence serve all sequences, which are the first axis of the layout.
            count = self.length if source == "sequence" else self.problem.tokens
            rows = _clamped_rows(table, jnp.arange(count, dtype=jnp.int32)) if count > len(table) else table[:count]
        return self.to_tiles(rows[:, None, :])


@dataclass(frozen=True)
class _TileTable:
    """Tiles that lie where a tile table says: [tiles, b, ...], by a gather and a scatter of rows."""

    problem: BlockDiagonalProblem
    tiles: Array
    is_full = False

    @property
    def rows(self) -> int:
        """Rows of a tile, b."""
        return min(self.problem.block_size, self.problem.tokens)

    @property
    def lengths(self) -> Array:
        """Rows that belong to the block, for each tile; 0 or less where there is none."""
        return self.tiles[:, 1]

    def rows_of_tiles(self) -> tuple[Array, Array]:
        """Row of the token axis of each row of each tile, and whether it belongs to the tile's block."""
        offset = jnp.arange(self.rows, dtype=jnp.int32)[None, :]
        return jnp.minimum(self.tiles[:, :1] + offset, self.problem.tokens - 1), offset < self.lengths[:, None]

    def to_tiles(self, x: Array) -> Array:
        """[tokens, ...] in tiles, with 0 in rows outside a block."""
        return self._select(x[self.rows_of_tiles()[0]])

    def from_tiles(self, x: Array) -> Array:
        """The inverse: [tiles, b, K, (G,) H] as [tokens, heads, H] in the problem's dtype, 0 outside every block."""
        row, is_inside = self.rows_of_tiles()
        row = jnp.where(is_inside, row, self.problem.tokens)
        x = x.astype(self.problem.dtype).reshape(*row.shape, -1, x.shape[-1])
        output = jnp.zeros((self.problem.tokens, *x.shape[2:]), x.dtype)
        return output.at[row].set(x, mode="drop")

    def table_rows(self, source: str, table: Array, positions: Array | None) -> Array:
        """Rows of a rotary table [P, H/2] for the rows of the tiles, [tiles, b, 1, H/2]; 0 outside every block."""
        row, _ = self.rows_of_tiles()
        if positions is not None:
            row = positions[row]
        elif source == "sequence":
            row = self.tiles[:, 2:] + jnp.arange(self.rows, dtype=jnp.int32)[None, :]
        return self._select(_clamped_rows(table, row)[:, :, None, :])

    def _select(self, x: Array) -> Array:
        """Rows of tiles, 0 outside a block: not a product, because 0 * NaN would carry a neighbour's NaN in here."""
        _, is_inside = self.rows_of_tiles()
        return jnp.where(is_inside.reshape(*is_inside.shape, *[1] * (x.ndim - 2)), x, 0)


type _Layout = _EqualSequences | _TileTable


def _layout(problem: BlockDiagonalProblem, tiles: Array | None) -> _Layout:
    if tiles is not None:
        return _TileTable(problem, tiles)
    if problem.sequence_length is None:
        raise ValueError("`tiles` must be a tile table for a problem that is not uniform, got None")
    return _EqualSequences(problem, problem.sequence_length)


def _clamped_rows(table: Array, index: Array) -> Array:
    return table[jnp.clip(index, 0, table.shape[0] - 1)]


def _split_heads(problem: BlockDiagonalProblem, x: Array) -> Array:
    """[tokens, N, H] as [tokens, K, G, H]."""
    return x.reshape(x.shape[0], problem.key_heads, problem.group_size, x.shape[-1])


def _operand_tiles(layout: _Layout, query: Array, key: Array, value: Array) -> tuple[Array, Array, Array]:
    """Query [tiles, b, K, G, H], key and value [tiles, b, K, H]."""
    query = layout.to_tiles(_split_heads(layout.problem, query))
    return query, layout.to_tiles(key), layout.to_tiles(value)


def _product(subscripts: str, left: Array, right: Array) -> Array:
    """An einsum accumulated in float32 (float64 for float64), with full-precision products for float32 operands."""
    wide = accumulation_dtype(left.dtype)
    precision = jax.lax.Precision.HIGHEST if left.dtype == wide else None
    return jnp.einsum(subscripts, left, right, preferred_element_type=wide, precision=precision)


def _weights(layout: _Layout, query: Array, key: Array) -> Array:
    """Softmax weights [tiles, K, G, b, b] in float32 of rotated query [tiles, b, K, G, H] and key [tiles, b, K, H]."""
    scores = _product("...ikgh,...jkh->...kgij", query, key) * layout.problem.scale
    if not layout.is_full or layout.problem.is_causal:
        scores = jnp.where(_seen_keys(layout, scores.ndim), scores, -jnp.inf)
    # The maximum cancels in the quotient, so that no gradient flows through it.
    exponentials = jnp.exp(scores - jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
    return exponentials / jnp.sum(exponentials, axis=-1, keepdims=True)


def _seen_keys(layout: _Layout, ndim: int) -> Array:
    """Which keys each query of each tile sees, [tiles, 1, 1, 1 or b, b] with `ndim` axes."""
    offset = jnp.arange(layout.rows, dtype=jnp.int32).reshape((1,) * (ndim - 1) + (-1,))
    # A tile without rows looks at its first, all-zero row: a softmax over nothing would be NaN.
    is_seen = offset < jnp.maximum(layout.lengths, 1).reshape((1,) * (ndim - 5) + (-1, 1, 1, 1, 1))
    return is_seen & (offset <= jnp.swapaxes(offset, -1, -2)) if layout.problem.is_causal else is_seen


def _turn(
    turn: Callable[..., Array],
    layout: _Layout,
    rotary: RotaryArrays | None,
    query: Array,
    key: Array,
    value: Array,
) -> tuple[Array, Array, Array]:
    """Apply `rotate` or `rotate_back` to the tiles of the operands that the problem rotates, each in its own dtype."""
    options = layout.problem.rotary
    if options is None or rotary is None:
        return query, key, value
    *tables, positions = rotary
    cos, sin = (layout.table_rows(options.positions, table, positions) for table in tables)
    if options.query:
        # One more axis than the tables have: the group.
        query = turn(query, cos[..., None, :], sin[..., None, :], options.interleaved).astype(query.dtype)
    if options.key:
        key = turn(key, cos, sin, options.interleaved).astype(key.dtype)
    if options.value:
        value = turn(value, cos, sin, options.interleaved).astype(value.dtype)
    return query, key, value
