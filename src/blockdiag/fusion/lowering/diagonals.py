"""Conversion of arrays indexed by distance to score tiles, and of sums along diagonals to their gradients.

Both only move elements, and so do their derivatives.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from blockdiag.fusion.ir.tree import Leaf, Region
from blockdiag.fusion.lowering.tile_program import leaf_array


def distance_tile(line: Any, first: Any, rows: int, keys: int, columns: int) -> Any:
    """Return the tile [rows, columns] of some keys, from an array [rows + keys - 1] indexed by distance.

    Each row is a window of the array, shifted by one from the row before. Reshapes of different length shift the
    windows. With a gather, the gradient would be a scatter, which XLA adds up in an unspecified order.

    Args:
        first: the first key, a multiple of `columns`. Columns beyond the last key hold elements of other keys.
        columns: the number of keys.
    """
    blocks, tiles = -(-rows // columns), -(-keys // columns)
    most, wide = tiles * columns, blocks * columns
    line = jnp.pad(line, (most - keys, wide - rows + 1))
    window = lax.dynamic_slice(line, (most - columns - first,), (wide + columns,)).reshape(blocks + 1, columns)
    pairs = jnp.concatenate([window[:-1], window[1:]], axis=1)
    # Padding each row by one element shifts row r of a block by r.
    folded = jnp.broadcast_to(pairs[:, None, :], (blocks, columns, 2 * columns)).reshape(blocks, -1)
    folded = jnp.pad(folded, ((0, 0), (0, columns))).reshape(blocks, columns, 2 * columns + 1)
    return folded[:, :, columns - 1 :: -1].reshape(wide, columns)[:rows]


def distance_gradient(region: Region, leaf: Leaf, array: Any, parts: Any) -> Any:
    """Return the gradient of a leaf that is indexed by distance.

    Args:
        array: the array of the leaf.
        parts: float32 [labels.., parts, diagonals of tiles, 2 * size], see `codegen.diagonals`.
    """
    parts = parts.sum(-3)
    rows, keys, size = region.sizes["q"], region.sizes["k"], parts.shape[-1] // 2
    lead = [(0, 0)] * (parts.ndim - 2)
    low, high = parts[..., :size], parts[..., size:]
    sums = jnp.pad(low, [*lead, (0, 1), (0, 0)]) + jnp.pad(high, [*lead, (1, 0), (0, 0)])
    sums = sums.reshape(*sums.shape[:-2], -1)
    first = -(-keys // size) * size - (keys - 1)
    sums = lax.slice_in_dim(sums, first, first + rows + keys - 1, axis=sums.ndim - 1)
    array = array.astype(leaf.gradient_dtype)
    shape, pull = jax.vjp(lambda x: leaf_array(leaf, x, region.batch, region.sizes), array)
    return pull(sums.reshape(shape.shape).astype(array.dtype))[0]
