"""Streamed schedule for Hopper: keys and values stream through shared memory while queries stay there.

Programs are persistent: each takes one tile of queries after another. The schedule applies to a softmax of a function
of one product and of per-query numbers. The softmax may be scaled by other per-query numbers, and have further logits
without values that depend on such numbers, such as sinks. Biases of queries by keys
are excluded, because the copy engine must move all operands of a tile. With lists of live tiles, masks may also read
per-key numbers. Queries and keys have 16 bits or eight. Values have 16, or eight if queries and keys have eight.
"""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from blockdiag.common.dtype_table import KERNEL_FLOATS
from blockdiag.fusion.analysis.tile_lists import Lists
from blockdiag.fusion.ir.factors import has_keys, scores_of
from blockdiag.fusion.ir.tile import Tile
from blockdiag.fusion.ir.tree import Node, Region, leaves_of, nodes_of
from blockdiag.fusion.lowering.eight_bit import is_eight_bit
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

# Lower limits by head dimensions (queries, values): the keys that a query tile sees, and these keys times all queries
# of the call. Below them, plain kernels are as fast or faster on an H100 or H200: several of them share a
# multiprocessor, and with 64 features their tiles are smaller. Timings are in 2026-11-23-fuse-streamed and
# 2026-11-28-streamed-forward of benchmarks/results/runs; short calls with (192, 128) were not timed.
_FEWEST = {
    (64, 64): (256, 1 << 27),
    (64, 128): (2048, 0),
    (64, 256): (512, 0),
    (96, 96): (256, 3 << 25),
    (128, 128): (384, 1 << 24),
    (128, 256): (256, 0),
    (192, 128): (384, 1 << 24),
    (192, 192): (256, 0),
    (256, 256): (256, 0),
}
# The lower limit of keys with 64 features and masks. Plain kernels have tiles of 64 keys, which fit masks more closely.
# With windows of 512 they are 9% faster on an H200, see 2026-11-29-fuse-short-ranges.
_FEWEST_MASKED = 768
# Functions of scores that take as long as a product with 64 features.
_COSTLY = frozenset({"tanh", "logistic", "exp", "exp2", "log", "log1p", "expm1", "erf", "sin", "cos", "pow", "div"})
# Hopper has 50 MB of L2.
_STREAMED_BYTES = 32 << 20
_FEWEST_SLOTS, _MOST_SLOTS = 2, 4


@dataclass(frozen=True, eq=False)
class Streamed(OfProduct):
    """Streamed schedule of a region.

    Attributes:
        places: the matrix views of "query", "key", "value" and "output".
        features, columns: the head dimensions of queries and of values.
        chunk: the keys per slot.
        slots: the number of slots for keys; values have as many.
        query_slots: the number of slots for tiles of queries.
        lists: the lists of live tiles, whose columns are chunks; None: all tiles are visited.
        takes_turns: whether the compute groups take turns.
    """

    places: dict[str, Place]
    features: int
    columns: int
    chunk: int
    slots: int
    query_slots: int
    lists: Lists | None
    takes_turns: bool

    @property
    def has_eight_bit_values(self) -> bool:
        """True if values have eight bits, as queries and keys do."""
        return is_eight_bit(self.region.value.dtype)

    @property
    def is_wide(self) -> bool:
        """Whether threads store results directly, without the copy engine, because they are wider than values."""
        return _is_wide(self.region)

    @property
    def staging(self) -> Literal["none", "own", "query"]:
        """Where results are staged for the copy engine: nowhere, in an own buffer, or in that of the queries."""
        return _staging_of(self, self.features, self.columns)

    @property
    def together(self) -> int:
        """The number of lines whose tiles are interleaved. Their keys and values fit into L2."""
        each = self.region.sizes["k"] * (self.features * self.key.source.dtype.itemsize + self.columns * 2)
        return max(1, _STREAMED_BYTES // each)


def streamed(region: Region, tile: Tile, lists: Lists | None) -> Streamed | None:
    """Return the streamed schedule of a region, None if it does not apply or a plain kernel is as fast.

    Args:
        region: an arranged region.
        tile: the result of `streamed_tile`.
        lists: the lists of live tiles of that size; None: all tiles are visited.
    """
    found = of_product(region)
    if found is None:
        return None
    query, key = found.query, found.key
    features, columns = count_of(region, query.features), count_of(region, value_columns(region))
    # The most live keys of a query tile.
    seen = region.sizes["k"] if lists is None else lists.forms[0].most * tile.columns
    fewest_keys, fewest_scores = _FEWEST[features, columns]
    is_short = seen < fewest_keys or seen * region.sizes["q"] * count_of(region, region.batch) < fewest_scores
    is_costly = _is_costly(found)
    # Products with 64 features hide only the exponentials. With a soft cap, or with ALiBi over all keys, plain kernels
    # are up to 16% faster. Wider values were timed without masks and other functions of scores.
    is_plain = lists is None and _is_bare(found)
    is_slower = (
        features == 64 and not is_plain and (lists is None or is_costly or columns > 64 or seen < _FEWEST_MASKED)
    )
    if is_short or is_slower or not _reads_no_key_numbers(region, lists):
        return None
    places = places_of(region, query, key)
    if places is None:
        return None
    query_slots, slots = _slots(found, features, columns, tile.columns)
    return Streamed(
        **vars(found),
        places=places,
        features=features,
        columns=columns,
        chunk=tile.columns,
        slots=slots,
        query_slots=query_slots,
        lists=lists,
        # On an H100, turns gain 12% with 64 features, where products with keys are short. With 128 or 256, causal masks
        # gain 1% to 4%, full attention loses 1% to 9%, and soft caps lose 16%.
        takes_turns=not is_eight_bit(region.value.dtype) and (features <= 64 or (lists is not None and not is_costly)),
    )


def streamed_tile(region: Region) -> Tile | None:
    """Return the tile of lists for the streamed schedule, None if that does not apply.

    Args:
        region: an arranged region.
    """
    has_weights_of_pairs = region.weight is not None and has_keys(region.weight)
    found = None if has_weights_of_pairs or not _has_simple_extras(region) else of_product(region)
    if found is None or any(leaf.role in ("score", "distance") for leaf in region.leaves):
        return None
    columns = count_of(region, value_columns(region))
    features = count_of(region, found.query.features)
    is_known = (features, columns) in _FEWEST
    # Registers hold the scores of a chunk beside the accumulated results, and two chunks must fit into shared memory.
    tile = Tile(ROWS, 128 if features + columns <= 256 else 64)
    is_tiled = region.sizes["q"] % tile.rows == 0 and region.sizes["k"] % tile.columns == 0
    is_stored = _is_wide(region) or region.dtype == region.value.dtype
    return tile if is_known and is_tiled and _has_narrow_operands(found, tile) and is_stored else None


def parts_of(width: int) -> tuple[int, ...]:
    """Return a head dimension in parts that are powers of two, largest first; it has at most two."""
    first = 1 << (width.bit_length() - 1)
    return (first,) if width == first else (first, width - first)


def _has_narrow_operands(found: OfProduct, tile: Tile) -> bool:
    """Return whether the copy engine and the tensor cores take the operands: 16 bits, or eight but for the values."""
    query, key, value = found.query.source.dtype, found.key.source.dtype, found.region.value.dtype
    is_short = query == key and is_eight_bit(query)
    if is_eight_bit(value):
        # Threads transpose chunks of 128 keys, all columns at a time.
        is_whole = len(parts_of(count_of(found.region, value_columns(found.region)))) == 1
        return is_short and is_whole and tile.columns == 128 and found.region.dtype.name in KERNEL_FLOATS
    return is_narrow(replace(found.region, dtype=value), *(() if is_short else (found.query, found.key)))


def _score_without_masks(found: OfProduct) -> Node | None:
    score, plain = scores_of(found.region)[0]
    return score if plain is None else plain


def _is_bare(found: OfProduct) -> bool:
    """Return whether scores without masks are the products, up to a factor."""
    root = _score_without_masks(found)
    return root is not None and root.leaf is found.product


def _is_costly(found: OfProduct) -> bool:
    """Return whether scores without masks are a costly function of products."""
    root = _score_without_masks(found)
    return root is not None and any(
        node.kind == "call" or (node.primitive is not None and node.primitive.name in _COSTLY)
        for node in nodes_of(root)
        if node.kind in ("call", "operation") and found.product in leaves_of(node)
    )


def _has_simple_extras(region: Region) -> bool:
    """Return whether logits without values are functions of numbers of each query or of each batch index."""
    return not has_keys(*region.extras) and all(leaf.role in ("row", "scalar") for leaf in leaves_of(*region.extras))


def _reads_no_key_numbers(region: Region, lists: Lists | None) -> bool:
    """Return whether tiles computed without masks read no per-key numbers from memory."""
    plain = scores_of(region)[0][1]
    needed = leaves_of(plain) if lists is not None and lists.has_full and plain is not None else region.leaves
    return not any(leaf.role == "column" and leaf.source.key is not None for leaf in needed)


def _staging_of(found: OfProduct, features: int, columns: int) -> Literal["none", "own", "query"]:
    if _is_wide(found.region):
        return "none"
    return "query" if features == columns and found.query.source.dtype == found.region.dtype else "own"


def _is_wide(region: Region) -> bool:
    return region.dtype == np.float32 or is_eight_bit(region.value.dtype)


def _slots(found: OfProduct, features: int, columns: int, chunk: int) -> tuple[int, int]:
    """Return how many tiles of queries, and how many chunks of keys with their values, fit into shared memory.

    With two tiles of queries, those of the next item arrive while the last item is computed.
    """
    width = features * found.query.source.dtype.itemsize
    own = 2 if _staging_of(found, features, columns) == "own" else 0
    # Eight-bit values take as many bytes as 16-bit ones, because a transposed copy is stored, too.
    once, each = ROWS * columns * own, chunk * (width + columns * 2)
    query_slots = 2 if once + 2 * ROWS * width + _FEWEST_SLOTS * each <= SHARED_BYTES else 1
    slots = (SHARED_BYTES - once - query_slots * ROWS * width) // each
    return query_slots, min(_MOST_SLOTS, slots)
