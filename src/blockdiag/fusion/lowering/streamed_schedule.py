"""Streamed schedule for Hopper: keys and values stream through shared memory while queries stay there.

It applies to a softmax of a function of one product and of per-query numbers. The softmax may be scaled by other
per-query numbers. Biases of queries by keys are excluded, because the copy engine must move all operands of a tile.
With lists of live tiles, masks may also read per-key numbers.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from blockdiag.fusion.analysis.tile_lists import Lists
from blockdiag.fusion.ir.factors import factored, has_keys, scores_of
from blockdiag.fusion.ir.tile import Tile
from blockdiag.fusion.ir.tree import Region, leaves_of
from blockdiag.fusion.lowering.hopper import (
    ROWS,
    SHARED_BYTES,
    OfProduct,
    Place,
    count_of,
    is_narrow,
    of_product,
    places_of,
)
from blockdiag.fusion.lowering.tile_program import value_columns

# The fewest keys, by features of a query and columns of a value. With fewer keys or other widths, plain kernels are as
# fast on an H200: several of them share a multiprocessor, so that one starts while another ends.
_FEWEST_KEYS = {(64, 128): 2048, (64, 256): 512, (128, 128): 512, (128, 256): 256, (256, 256): 512}
_MOST_SLOTS = 4


@dataclass(frozen=True, eq=False)
class Streamed(OfProduct):
    """Streamed schedule of a region.

    Attributes:
        places: the matrix views of "query", "key", "value" and "output".
        features, columns: the head dimensions of queries and of values.
        chunk: the keys per slot.
        slots: the number of slots for keys; values have as many.
        lists: the lists of live tiles, whose columns are chunks; None: all tiles are visited.
    """

    places: dict[str, Place]
    features: int
    columns: int
    chunk: int
    slots: int
    lists: Lists | None

    @property
    def is_wide(self) -> bool:
        """Whether results are float32. Threads store these directly, without the copy engine."""
        return _is_wide(self.region)

    @property
    def has_exit(self) -> bool:
        """Whether results are staged in a shared-memory buffer of their own.

        Otherwise they reuse the buffer of the queries, or threads store them directly.
        """
        return self.features != self.columns and not self.is_wide


def streamed(region: Region, tile: Tile, lists: Lists | None) -> Streamed | None:
    """Return the streamed schedule of a region, None if it does not apply or a plain kernel is as fast.

    Args:
        region: an arranged region.
        tile: the tile size of `lists`.
    """
    found = None if region.extras or (region.weight is not None and has_keys(region.weight)) else of_product(region)
    if found is None or found.region.score is None:
        return None
    query, key = found.query, found.key
    features, columns = count_of(region, query.features), count_of(region, value_columns(region))
    # Registers hold the scores of a chunk beside the accumulated results.
    chunk = tile.columns if lists is not None else 128 if columns <= 128 else 64
    keys = region.sizes["k"]
    is_tiled = region.sizes["q"] % ROWS == 0 and keys % chunk == 0 and (lists is None or tile.rows == ROWS)
    # The most live keys of a query tile.
    seen = keys if lists is None else lists.forms[0].most * tile.columns
    is_long = seen >= _FEWEST_KEYS.get((features, columns), math.inf)
    has_narrow_operands = is_narrow(replace(region, dtype=region.value.dtype), query, key)
    is_stored = _is_wide(region) or region.dtype == region.value.dtype
    if not is_tiled or not is_long or not has_narrow_operands or not is_stored:
        return None
    # Products over few features hide only the exponentials: with ALiBi or a soft cap, plain kernels are as fast.
    is_bare = lists is None and factored(found.region.score)[0].leaf is found.product
    places = places_of(region, query, key)
    if places is None or not _is_at_hand(region, lists) or (features < 128 and not is_bare):
        return None
    slots = _slots(features, columns, chunk, has_exit=features != columns and not _is_wide(region))
    return Streamed(
        **vars(found), places=places, features=features, columns=columns, chunk=chunk, slots=slots, lists=lists
    )


def own_tile(region: Region, tile: Tile) -> Tile | None:
    """Return the tile of a masked region for which Hopper needs other lists than plain kernels; None if it does not.

    With 256 features, plain kernels have fewer rows, because all architectures must have room for the tile.

    Args:
        region: an arranged region.
        tile: the tile of the plain kernel.
    """
    features = max((count_of(region, leaf.features) for leaf in region.leaves), default=0)
    is_wide = features == count_of(region, value_columns(region)) == 256
    return Tile(ROWS, 64) if is_wide and tile.rows < ROWS and region.sizes["q"] % ROWS == 0 else None


def _is_at_hand(region: Region, lists: Lists | None) -> bool:
    """Return whether no unmasked tile reads a bias or per-key numbers from memory; no tile may read a bias."""
    if any(leaf.role in ("score", "distance") for leaf in region.leaves):
        return False
    plain = scores_of(region)[0][1]
    needed = leaves_of(plain) if lists is not None and lists.has_full and plain is not None else region.leaves
    return not any(leaf.role == "column" and leaf.source.key is not None for leaf in needed)


def _is_wide(region: Region) -> bool:
    return region.dtype == np.float32


def _slots(features: int, columns: int, chunk: int, *, has_exit: bool) -> int:
    """Return how many chunks of keys, each with its chunk of values, fit into shared memory."""
    once = ROWS * features * 2 + (ROWS * columns * 2 if has_exit else 0)
    return min(_MOST_SLOTS, (SHARED_BYTES - once) // (chunk * (features + columns) * 2))
