"""Arrays by distance as tiles of scores, and sums along diagonals: moves of elements, as are their derivatives."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from blockdiag.fusion.ir.tree import Leaf, Region
from blockdiag.fusion.lowering.tile_program import leaf_array


def distance_tile(line: Any, first: Any, rows: int, keys: int, columns: int) -> Any:
    """The numbers of some keys [rows, columns] from those of distances [rows + keys - 1].

    Windows of the line are shifted against each other by folding them at another length: no gather, so that the
    gradient is no scatter, which XLA would add up in any order.

    Args:
        first: of the keys, a multiple of `columns`; those beyond the last one get other keys' numbers.
        columns: how many keys.
    """
    blocks, tiles = -(-rows // columns), -(-keys // columns)
    most, wide = tiles * columns, blocks * columns
    line = jnp.pad(line, (most - keys, wide - rows + 1))
    window = lax.dynamic_slice(line, (most - columns - first,), (wide + columns,)).reshape(blocks + 1, columns)
    pairs = jnp.concatenate([window[:-1], window[1:]], axis=1)
    # Row r of a block begins r elements later.
    folded = jnp.broadcast_to(pairs[:, None, :], (blocks, columns, 2 * columns)).reshape(blocks, -1)
    folded = jnp.pad(folded, ((0, 0), (0, columns))).reshape(blocks, columns, 2 * columns + 1)
    return folded[:, :, columns - 1 :: -1].reshape(wide, columns)[:rows]


def distance_gradient(region: Region, leaf: Leaf, array: Any, parts: Any) -> Any:
    """The gradient of a leaf of distances.

    Args:
        array: the leaf.
        parts: float32 [labels.., parts, tiles' diagonals, 2 * size], see `codegen.diagonals`.
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
