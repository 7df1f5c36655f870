"""One-pass schedule for Hopper: the gradients of queries, keys and values in one pass over score tiles.

It applies to a softmax whose scores are a function of one product, per-query numbers and per-key numbers. Only queries,
keys and values may have gradients, and arrays on which only logits without values depend, such as sinks: another kernel
computes those gradients from the log-sum-exps. Bias arrays of queries by keys, or of q - k, are excluded: the kernel
loads tiles of queries, keys, values and cotangents alone.
"""

import math
from dataclasses import dataclass, replace

from blockdiag.fusion.ir.factors import has_masks, only_in_extras, scores_of
from blockdiag.fusion.ir.tile import Tile
from blockdiag.fusion.ir.tree import Leaf, Region, leaves_of
from blockdiag.fusion.lowering.hopper import OfProduct, Place, count_of, is_narrow, of_product, places_of
from blockdiag.fusion.lowering.tile_program import value_columns, value_labels

# Tiles by features: the first if scores without masks are products, the second for other functions of products, which
# need more registers. With 64 features, tiles of more queries need less shared memory bandwidth.
_TILES = {
    64: (Tile(128, 128), Tile(64, 128)),
    96: (Tile(64, 128), Tile(64, 128)),
    128: (Tile(64, 128), Tile(64, 128)),
    192: (Tile(64, 64), Tile(64, 64)),
    256: (Tile(64, 64), Tile(64, 64)),
}


# Query heads that share keys share programs if there are at least this many: 8 for each of 132 multiprocessors. With
# fewer, the programs of the first keys, which are the longest under a causal mask, would end long after the others.
# Each query head then has programs of its own, which write partial gradients of keys and values in 16 bits.
_FEWEST_PROGRAMS = 8 * 132


@dataclass(frozen=True, eq=False)
class OnePass(OfProduct):
    """One-pass schedule of a region.

    Attributes:
        places: the matrix views of "query", "key", "value" and "output"; gradients have the same.
        width: the features of queries, keys and values.
        tile: the tile of queries and keys.
        own, others: the batch labels that select a program, and those that each program loops over.
        is_shared: whether several programs have the same keys; their partial gradients are summed later.
        is_bare: whether scores without masks are the product, up to a factor.
        has_masks: whether anything masks scores.
    """

    places: dict[str, Place]
    width: int
    tile: Tile
    own: tuple[str, ...]
    others: tuple[str, ...]
    is_shared: bool
    is_bare: bool
    has_masks: bool

    @property
    def adds_in_bulk(self) -> bool:
        """Whether the copy engine adds the queries' gradients; the template's docstring gives the reason."""
        return self.width > 128


def one_pass(region: Region) -> OnePass | None:
    """Return the one-pass schedule of a region, None if it does not apply.

    Args:
        region: an arranged region.
    """
    found = None if region.weight is not None else of_product(region)
    if found is None or any(leaf.role in ("score", "distance") for leaf in region.leaves):
        return None
    query, key = found.query, found.key
    width = count_of(region, query.features)
    if (
        width not in _TILES
        or count_of(region, value_columns(region)) != width
        or not _has_gradients(region, query, key)
    ):
        return None
    # The score without masks, if these can be separated.
    score, plain = scores_of(found.region)[0]
    root = score if plain is None else plain
    is_bare = root is not None and root.leaf is found.product
    tile = _TILES[width][not is_bare]
    is_tiled = region.sizes["q"] % tile.rows == 0 and region.sizes["k"] % tile.columns == 0
    places = places_of(region, query, key)
    if not is_tiled or places is None or not is_narrow(replace(region, dtype=region.value.dtype), query, key):
        return None
    own = tuple(label for label in region.batch if label in key.labels)
    others = tuple(label for label in region.batch if label not in own)
    programs = region.sizes["k"] // tile.columns * count_of(region, own)
    is_shared = bool(others) and programs < _FEWEST_PROGRAMS
    own, others = (region.batch, ()) if is_shared else (own, others)
    return OnePass(
        **vars(found),
        places=places,
        width=width,
        tile=tile,
        own=own,
        others=others,
        is_shared=is_shared,
        is_bare=is_bare,
        has_masks=region.once(has_masks),
    )


def _has_gradients(region: Region, query: Leaf, key: Leaf) -> bool:
    """Return whether the kernel can write all gradients that the region has, apart from those of `only_in_extras`.

    Queries must have all batch axes, and keys must have the same batch axes as values. The gradients of keys and values
    must have the dtypes of the arrays.
    """
    apart = only_in_extras(region)
    with_gradient = [leaf for i, leaf in enumerate(region.leaves) if leaf.has_gradient and i not in apart]
    labels, of_values = set(key.labels), set(value_labels(region))
    is_whole = not any(isinstance(dim, int) for dim in (*key.dims, *region.value_dims))
    has_dtypes = key.gradient_dtype == key.source.dtype and region.value_gradient_dtype == region.value.dtype
    return (
        len(with_gradient) == 2
        # These gradients would have a second part.
        and not set(with_gradient) & set(leaves_of(*region.extras))
        and query in with_gradient
        and key in with_gradient
        and set(query.labels) == set(region.batch)
        and labels == of_values
        and is_whole
        and has_dtypes
    )


# One pass is used if some key tile is seen by at least this many queries, by features. With fewer, plain kernels are as
# fast or faster, and need no float32 array. benchmarks/results/runs has timings on an H200: of 64 and 128 features in
# 2026-11-29-fuse-short-ranges, of 96 and 192 in 2026-11-28-one-pass.
_FEWEST_SEEN = {64: 2048, 96: 256, 128: 384, 192: 256, 256: 256}
# The thresholds if no tile is known to be dead: all programs reach a query tile at the same time, and wait for their
# turns. With 192 features, fewer than 1,024 queries were not timed.
_FEWEST_WITHOUT_MASKS = {64: 8192, 96: 1024, 128: 2048, 192: 256, 256: 256}
# The thresholds, in queries of the call, for masks that depend on arrays. They may hide most keys: for documents of 340
# tokens, one pass is 5% slower with 64 features, and 17% faster with 128. Those of 96 and 192 features were not timed;
# they are those of the next larger head dimension.
_FEWEST_UNKNOWN = {64: 8192, 96: 4096, 128: 4096, 192: 1024, 256: 1024}


def is_fast(plan: OnePass, most: int | None, *, is_listed: bool) -> bool:
    """Return whether one pass is faster than plain kernels.

    Args:
        most: the largest number of query tiles that see a key tile; None if it depends on arrays.
        is_listed: whether some tiles are known to be dead.
    """
    if most is None:
        return plan.region.sizes["q"] >= _FEWEST_UNKNOWN[plan.width]
    fewest = _FEWEST_SEEN if is_listed else _FEWEST_WITHOUT_MASKS
    return most * plan.tile.rows >= fewest[plan.width]


def slots_of(plan: OnePass) -> tuple[int, int]:
    """Return the numbers of slots in each ring (queries, cotangents) and of buffers for gradients of queries."""
    return {192: (1, 2), 256: (1, 1)}.get(plan.width, (2, 2))


def tiles_of(plan: OnePass) -> tuple[int, int]:
    """Return the numbers of query tiles and of key tiles in a line."""
    return plan.region.sizes["q"] // plan.tile.rows, plan.region.sizes["k"] // plan.tile.columns


def programs_of(plan: OnePass) -> int:
    """Return the number of programs."""
    return tiles_of(plan)[1] * math.prod(plan.region.sizes[label] for label in plan.own)
