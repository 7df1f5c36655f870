"""One-pass schedule for Hopper: the gradients of queries, keys and values in one pass over score tiles.

It applies to a softmax of a function of one product, of per-query and of per-key numbers, where only queries, keys and
values have gradients. Biases of queries by keys are excluded, because the copy engine must move all operands of a tile.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from blockdiag.fusion.ir.factors import factored, unmasked
from blockdiag.fusion.ir.tile import Tile
from blockdiag.fusion.ir.tree import Leaf, Region, Source, nodes_of, with_node
from blockdiag.fusion.lowering.hopper import Place, count_of, is_narrow, places_of
from blockdiag.fusion.lowering.tile_program import value_columns, value_labels

# Tiles by features: for scores that are products, and for other functions of these, which need more registers. With 64
# features, products of more queries need less shared memory bandwidth.
_TILES = {
    64: (Tile(128, 128), Tile(64, 128)),
    128: (Tile(64, 128), Tile(64, 128)),
    256: (Tile(64, 64), Tile(64, 64)),
}


# With fewer programs, those of the first keys, which are the longest under a causal mask, would end long after the
# others. Queries that share keys then have programs of their own. Each of these writes 16-bit gradients.
_FEWEST_PROGRAMS = 8 * 132


@dataclass(frozen=True, eq=False)
class OnePass:
    """One-pass schedule of a region.

    Attributes:
        region: the region, with a leaf in place of the product.
        product: this leaf.
        query, key: the factors of the product.
        places: the matrix views of "query", "key", "value" and "output"; gradients have the same.
        width: the features of queries, keys and values.
        tile: the tile of queries and keys.
        own, others: the batch labels of programs, and those that each program goes through.
        is_shared: whether programs with the same keys write gradients of their own, which are summed later.
        has_masks: whether anything masks scores.
    """

    region: Region
    product: Leaf
    query: Leaf
    key: Leaf
    places: dict[str, Place]
    width: int
    tile: Tile
    own: tuple[str, ...]
    others: tuple[str, ...]
    is_shared: bool
    has_masks: bool


def one_pass(region: Region) -> OnePass | None:
    """Return the one-pass schedule of a region, None if it does not apply.

    Args:
        region: an arranged region.
    """
    if region.score is None or region.weight is not None:
        return None
    products = [node for node in nodes_of(region.score) if node.kind in ("product", "sum")]
    if len(products) != 1 or products[0].kind == "sum":
        return None
    query, key = (x.leaf for x in products[0].inputs)
    if query is None or key is None or any(leaf.role in ("score", "distance") for leaf in region.leaves):
        return None
    width = count_of(region, query.features)
    if (
        width not in _TILES
        or count_of(region, value_columns(region)) != width
        or not _has_gradients(region, query, key)
    ):
        return None
    is_bare = factored(unmasked(region.score)[0])[0] is products[0]
    tile = _TILES[width][not is_bare]
    is_tiled = region.sizes["q"] % tile.rows == 0 and region.sizes["k"] % tile.columns == 0
    places = places_of(region, query, key)
    if not is_tiled or places is None or not is_narrow(replace(region, dtype=region.value.dtype), query, key):
        return None
    shape = (region.sizes["q"], region.sizes["k"])
    product = Leaf(Source("product", shape, np.dtype(np.float32)), (("q",), ("k",)), "score", (), is_constant=True)
    score = with_node(region.score, products[0], product)
    inner = replace(region, score=score, leaves=(*region.leaves, product))
    own = tuple(label for label in region.batch if label in key.labels)
    others = tuple(label for label in region.batch if label not in own)
    programs = region.sizes["k"] // tile.columns * count_of(region, own)
    is_shared = bool(others) and programs < _FEWEST_PROGRAMS
    own, others = (region.batch, ()) if is_shared else (own, others)
    has_masks = bool(unmasked(region.score)[1])
    return OnePass(inner, product, query, key, places, width, tile, own, others, is_shared, has_masks)


def _has_gradients(region: Region, query: Leaf, key: Leaf) -> bool:
    """Return whether the kernel can write all gradients that the region has.

    Queries must have all batch axes, keys and values the same ones, and the gradients of these the dtype of the arrays.
    """
    with_gradient = [leaf for leaf in region.leaves if leaf.has_gradient]
    labels, of_values = set(key.labels), set(value_labels(region))
    is_whole = not any(isinstance(dim, int) for dim in (*key.dims, *region.value_dims))
    has_dtypes = key.gradient_dtype == key.source.dtype and region.value_gradient_dtype == region.value.dtype
    return (
        len(with_gradient) == 2
        and query in with_gradient
        and key in with_gradient
        and set(query.labels) == set(region.batch)
        and labels == of_values
        and is_whole
        and has_dtypes
    )


# The fewest queries that must see a key, at most, by features. With fewer, plain kernels are as fast, and need
# no float32 array: with a window of 256 they take 20% to 30% less time on an H200.
_FEWEST_SEEN = {64: 1024, 128: 1024, 256: 256}
# The same without masks: all programs then reach a query tile at the same time, and wait for their turns.
_FEWEST_WITHOUT_MASKS = {64: 8192, 128: 4096, 256: 256}
# The same for masks that depend on arrays, which may hide most keys: documents of 340 tokens are 20% slower.
_FEWEST_UNKNOWN = {64: 8192, 128: 8192, 256: 1024}


def is_fast(plan: OnePass, most: int | None, *, is_listed: bool) -> bool:
    """Return whether one pass is faster than plain kernels.

    Args:
        most: the most query tiles that see a tile of keys; None if that depends on arrays.
        is_listed: whether some tiles are known to be dead.
    """
    if most is None:
        return plan.region.sizes["q"] >= _FEWEST_UNKNOWN[plan.width]
    return most * plan.tile.rows >= (_FEWEST_SEEN if is_listed else _FEWEST_WITHOUT_MASKS)[plan.width]


def slots_of(plan: OnePass) -> tuple[int, int]:
    """Return the slots for queries, as many as for cotangents, and the buffers for gradients of queries."""
    return (1, 1) if plan.width == 256 else (2, 2)


def tiles_of(plan: OnePass) -> tuple[int, int]:
    """Return the numbers of query tiles and of key tiles in a line."""
    return plan.region.sizes["q"] // plan.tile.rows, plan.region.sizes["k"] // plan.tile.columns


def programs_of(plan: OnePass) -> int:
    """Return the number of programs."""
    return tiles_of(plan)[1] * math.prod(plan.region.sizes[label] for label in plan.own)
