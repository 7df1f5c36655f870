"""Block sparsity: lists of the live tiles of a region, derived from its masks and leaves."""

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from blockdiag.common.zigzag import zigzag_order
from blockdiag.fusion.analysis.interval import unknown
from blockdiag.fusion.analysis.leaf_ranges import Extent, Tiling, constant_extent, distance_extent
from blockdiag.fusion.analysis.mask_states import DEAD, MASKED_TILE, MaskStates
from blockdiag.fusion.analysis.range_analysis import tile_extent
from blockdiag.fusion.analysis.refinement import decided_blocks, offset_states
from blockdiag.fusion.analysis.tile_lists import Lists
from blockdiag.fusion.analysis.tile_tables import Table, dynamic_tables, expanded, tables_of_blocks, tables_of_offsets
from blockdiag.fusion.codegen.kernels import Writer
from blockdiag.fusion.frontend.trace import primitives
from blockdiag.fusion.ir.factors import unmasked
from blockdiag.fusion.ir.tile import Tile
from blockdiag.fusion.ir.tree import Leaf, Node, Region, leaves_of, nodes_of
from blockdiag.fusion.lowering.tile_program import leaf_array

# Primitives that can mask a score whatever queries and keys are. A bias that is only added is assumed not to mask.
_COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
_KILLERS = _COMPARISONS | {"select_n", "min", "clamp"}
# Functions through which a bias may pass. Other functions may decide by its value.
_SMOOTH = frozenset((
    "add", "add_any", "convert_element_type", "div", "erf", "exp", "exp2", "integer_pow", "logistic", "mul", "neg",
    "square", "stop_gradient", "sub", "tanh",
))  # fmt: skip
# The assumed bound of query-key products, so that adding -1e9 masks a score. Larger products are useless in a softmax:
# neighbouring float32 numbers are 4 apart there.
_LARGEST_PRODUCT = 2.0**25
# The assumed upper bound of biases, so that -1e9 still masks the sum of a product and several biases.
_LARGEST_BIAS = 2.0**23


@dataclass(frozen=True)
class Live:
    """Lists of the tiles that are not dead.

    Attributes:
        lists: the static description of the lists.
        arrays: int32 arrays by name, see below.

    | name | content |
    |---|---|
    | live_counts | [labels.., tq, 2], per query tile the number of full key tiles and of all live key tiles |
    | live_tiles | these key tiles, in a form of `analysis.tile_lists` |
    | live_counts_t, live_tiles_t | the same with queries and keys exchanged |
    | live_counts_d, live_tiles_d | the query tiles of each diagonal of tiles |

    The last pair exists only if a leaf is indexed by distance and tiles are square.
    """

    lists: Lists
    arrays: Mapping[str, Any]

    def share(self, key_tiles: int) -> float:
        """Return the fraction of tiles that are not dead; the arrays must be known."""
        return float(np.asarray(self.arrays["live_counts"])[..., 1].mean(dtype=np.float64)) / key_tiles

    def states(self, key_tiles: int) -> np.ndarray:
        """Return the states of all tiles, int8 [labels.., tq, tk], see `analysis.mask_states`; arrays must be known."""
        counts = np.asarray(self.arrays["live_counts"])
        found = expanded(self.lists.forms[0], counts, self.arrays["live_tiles"], key_tiles)
        return found.reshape(*counts.shape[:-1], key_tiles)


def live_tiles(region: Region, tile: Tile, arrays: Mapping[str, Any]) -> Live | None:
    """Return the live tiles of a region, None if no tile is known to be dead.

    With a softmax, a tile is dead if all its scores are at most -9e8 for any queries and keys. Query-key products are
    assumed to be at most 2^25 in magnitude, and biases at most 2^23. Without a softmax, a tile is dead if all its
    weights are 0 for any floating arrays, with biases of up to 2^23. Masks that depend on constants alone are evaluated
    while tracing.

    Args:
        arrays: the leaves by name, "leaf0", ..., with the axes that the region states.
    """
    masks = region.once(_masks, tile)
    if masks is None:
        return None
    found = region.once(_known_tables, tile) if masks.is_known else _tables(region, tile, masks, arrays)
    if found is None:
        return None
    tables, has_full = found
    shape = tuple(region.sizes[label] for label in masks.labels)
    made: dict[str, Any] = {}
    for way, table in tables.items():
        for what, x in (("counts", table.counts), ("tiles", table.numbers)):
            x = jnp.asarray(x)
            made[f"live_{what}{way}"] = x if x.ndim == 1 else x.reshape(*shape, -1, x.shape[-1])
    return Live(Lists(masks.labels, has_full, tuple(table.form for table in tables.values())), made)


def needs_arrays(region: Region, tile: Tile) -> bool:
    """Return whether it depends on arrays, other than constants, which tiles are live."""
    masks = region.once(_masks, tile)
    return masks is not None and not masks.is_known


# The most tiles that are listed for one-pass kernels. Codes and ranks are int32, so each array takes at most 64 MB.
_MOST_WALKED = 1 << 24
# Up to this many tiles, the tables of known masks are constants of the program. For more tiles, the program computes
# them from states.
_MOST_CONSTANT = 1 << 18


@dataclass(frozen=True)
class Walks:
    """Lists of the live query tiles of each key tile, in ascending order, for one-pass kernels.

    Attributes:
        labels: the batch labels along which the lists differ.
        arrays: int32 arrays by name, see below.
        share: the fraction of tiles that are not dead; 1 if it depends on arrays.

    | name | shape | content |
    |---|---|---|
    | walk_codes | [labels.., tk, tq + 1] | a code for each query tile, then the number of live tiles |
    | walk_ranks | [labels.., tk, tq] | for each live query tile, the number of later key tiles that are live for it |

    A code is twice the next live tile at or after the query tile, plus 1 if masks touch that tile. After the last live
    tile it is twice the number of query tiles. Programs start with the last key tile, so a rank is the number of
    programs that add to a query tile earlier.
    """

    labels: tuple[str, ...]
    arrays: Mapping[str, Any]
    share: float


def walk_labels(region: Region, tile: Tile) -> tuple[str, ...] | None:
    """Return the batch labels along which the lists of `walk_tables` differ, None if it returns None.

    Raises:
        OverflowError: the tables would have too many elements.
    """
    masks = region.once(_masks, tile)
    if masks is None or (masks.is_known and region.once(_known_tables, tile) is None):
        return None
    tiling = Tiling(tile, region.sizes["q"], region.sizes["k"])
    count = math.prod((*tiling.counts, *(region.sizes[x] for x in masks.labels)))
    if count > _MOST_WALKED:
        raise OverflowError(f"{count} tiles are too many to list")
    return masks.labels


def most_visits(region: Region, tile: Tile) -> int | None:
    """Return the largest number of query tiles that see a key tile, None if masks depend on arrays."""
    masks = region.once(_masks, tile)
    found = None if masks is None or not masks.is_known else region.once(_known_tables, tile)
    if masks is not None and not masks.is_known:
        return None
    return -(-region.sizes["q"] // tile.rows) if found is None else found[0]["_t"].form.most


def walk_tables(region: Region, tile: Tile, arrays: Mapping[str, Any]) -> Walks | None:
    """Return lists of live tiles for one-pass kernels, None if no tile is known to be dead; see `live_tiles`.

    Raises:
        OverflowError: the tables would have too many elements.
    """
    labels = walk_labels(region, tile)
    if labels is None:
        return None
    masks = region.once(_masks, tile)
    assert masks is not None
    tiling = Tiling(tile, region.sizes["q"], region.sizes["k"])
    shape = (*(region.sizes[label] for label in labels), *tiling.counts)
    share = 1.0
    if masks.is_known:
        found = region.once(_known_states, tile).reshape(shape)
        share = float((found != DEAD).mean())
        if found.size > _MOST_CONSTANT:
            # Otherwise XLA would compute the tables at compile time.
            found = jax.lax.optimization_barrier(jnp.asarray(found))
    else:
        states = mask_states(region, tile, arrays)
        batch = tuple(region.sizes[label] if label in labels else 1 for label in region.batch)
        row, column = np.arange(tiling.counts[0])[:, None], np.arange(tiling.counts[1])[None, :]
        found = jnp.broadcast_to(states.at(row, column), (*batch, *tiling.counts)).reshape(shape)
    codes, ranks = walk_of(found)
    return Walks(labels, {"walk_codes": jnp.asarray(codes), "walk_ranks": jnp.asarray(ranks)}, share)


def _known_states(region: Region, tile: Tile) -> np.ndarray:
    """Return the states of all tiles of known masks, int8 [cells, tq, tk]."""
    found = region.once(_known_tables, tile)
    assert found is not None
    table = found[0][""]
    key_tiles = Tiling(tile, region.sizes["q"], region.sizes["k"]).counts[1]
    return expanded(table.form, table.counts, table.numbers, key_tiles)


def walk_of(states: Any) -> tuple[Any, Any]:
    """Return the codes and ranks of `Walks` for states [.., query tiles, key tiles]; NumPy in, NumPy out."""
    xp = np if isinstance(states, np.ndarray) else jnp
    states = xp.swapaxes(states, -1, -2)
    is_live, tiles = states != DEAD, states.shape[-1]
    places = np.arange(tiles, dtype=np.int32)
    places = places.reshape((1,) * (states.ndim - 1) + (tiles,))
    own = xp.where(is_live, 2 * places + (states == MASKED_TILE).astype(np.int32), np.int32(2 * tiles))
    if xp is np:
        following = np.minimum.accumulate(own[..., ::-1], axis=-1)[..., ::-1]
    else:
        following = jax.lax.cummin(jnp.asarray(own), axis=own.ndim - 1, reverse=True)
    count = is_live.sum(-1, dtype=np.int32)
    lives = is_live.astype(np.int32)
    later = xp.flip(xp.cumsum(xp.flip(lives, -2), axis=-2, dtype=np.int32), -2) - lives
    return xp.concatenate([following, count[..., None]], -1), later


def needs_balance(region: Region, devices: int) -> bool:
    """Return whether zigzag order balances work better over devices than consecutive rows do.

    Masks that depend on arrays, such as prefixes, are assumed to be unbalanced.
    """
    masks = region.once(_masks, _coarse_tile(region))
    if masks is None or not masks.is_known:
        return masks is not None
    is_alive = region.once(_coarse_states)
    row_tiles = is_alive.shape[-2]
    work = np.cumsum(is_alive.sum((0, 2)))
    edges = np.linspace(0, row_tiles, 2 * devices + 1)
    parts = np.diff(np.interp(edges, np.arange(row_tiles + 1), [0, *work]))
    zigzag = parts[:devices] + parts[devices:][::-1]
    return bool(parts.reshape(devices, 2).sum(-1).max() > 1.02 * zigzag.max())


def needed_shifts(region: Region, devices: int, is_zigzag: bool) -> tuple[int, ...]:
    """Return the shifts of keys around a ring of devices that the masks require; 0 is always included.

    Each device has an equal part of the rows and of the keys. At a given shift, device d sees the keys of device
    d - shift. A shift that no device needs is left out. If masks depend on arrays, all shifts are returned.

    Args:
        devices: the number of devices.
        is_zigzag: whether rows and keys are in zigzag order, see `zigzag_order`.
    """
    masks = region.once(_masks, _coarse_tile(region))
    if masks is None or not masks.is_known:
        return tuple(range(devices))
    is_alive = region.once(_coarse_states).any(0)
    size = _coarse_tile(region).rows
    # The tiles of each half of a device's part, along queries and along keys.
    rows, columns = (
        [slice(int(first / size), math.ceil(end / size)) for first, end in itertools.pairwise(edges)]
        for edges in (np.linspace(0, region.sizes[label], 2 * devices + 1) for label in ("q", "k"))
    )
    seen = np.asarray([[is_alive[row, column].any() for column in columns] for row in rows])
    own = zigzag_order(2 * devices, devices) if is_zigzag else np.arange(2 * devices)
    of_devices = seen[np.ix_(own, own)].reshape(devices, 2, devices, 2).any((1, 3))
    places = np.arange(devices)
    return tuple(
        shift for shift in range(devices) if shift == 0 or of_devices[places, (places - shift) % devices].any()
    )


def _coarse_tile(region: Region) -> Tile:
    """Return a tile size with a few hundred tiles along each axis, enough to estimate work."""
    size = max(16, 1 << (max(region.sizes["q"], region.sizes["k"]) // 256).bit_length())
    return Tile(size, size)


def _coarse_states(region: Region) -> np.ndarray:
    """Return which coarse tiles are not dead, bool [cells, tq, tk]; masks must not depend on arrays."""
    states = mask_states(region, _coarse_tile(region), {})
    row_tiles, key_tiles = states.tiling.counts
    found = states.at(np.arange(row_tiles)[:, None], np.arange(key_tiles)[None, :])
    is_alive = np.broadcast_to(np.asarray(found) != DEAD, (*np.shape(found)[:-2], row_tiles, key_tiles))
    return is_alive.reshape(-1, row_tiles, key_tiles)


@dataclass(frozen=True)
class _Masks:
    """Static properties of a region's masks.

    Attributes:
        labels: the batch labels along which the states of tiles differ.
        is_known: whether the states depend on constants alone.
    """

    labels: tuple[str, ...]
    is_known: bool


def _masks(region: Region, tile: Tile) -> _Masks | None:
    """Return the static properties of a region's masks, None if nothing masks scores."""
    root = region.weight if region.score is None else region.score
    if root is None or _KILLERS.isdisjoint(primitives(Writer(region, "forward", tile).tile_program([root]).jaxpr)):
        return None
    shapes = []

    def one_tile(*leaves: Any) -> None:
        arrays = {f"leaf{i}": x for i, x in enumerate(leaves)}
        first = np.zeros((1, 1), np.int64)
        states = mask_states(region, tile, arrays).at(first, first)
        shapes.append((isinstance(states, np.ndarray), states.shape[:-2]))

    jax.eval_shape(one_tile, *(jax.ShapeDtypeStruct(x.source.shape, x.source.dtype) for x in region.leaves))
    ((is_known, lead),) = shapes
    lead = (1,) * (len(region.batch) - len(lead)) + lead
    labels = tuple(label for label, size in zip(region.batch, lead, strict=True) if size > 1)
    return _Masks(labels, is_known)


def _known_tables(region: Region, tile: Tile) -> tuple[dict[str, Table], bool] | None:
    """Return the tables of masks that depend on constants alone, see `_tables`."""
    masks = region.once(_masks, tile)
    assert masks is not None
    return _tables(region, tile, masks, {})


def _tables(
    region: Region, tile: Tile, masks: _Masks, arrays: Mapping[str, Any]
) -> tuple[dict[str, Table], bool] | None:
    """Return the tables of a region and whether they distinguish full tiles, None if no tile is known to be dead."""
    states = mask_states(region, tile, arrays)
    ways = ("", "_t")
    if tile.rows == tile.columns and any(leaf.role == "distance" for leaf in region.leaves):
        ways = (*ways, "_d")
    batch = tuple(region.sizes[label] if label in masks.labels else 1 for label in region.batch)
    if not masks.is_known and not all(x.is_known for x in states.extents):
        return dynamic_tables(states, batch, ways), states.predicates is not None
    cells = math.prod(batch)
    if states.is_by_distance:
        tables, has_full = tables_of_offsets(offset_states(states, batch), ways)
    else:
        blocks = decided_blocks(states, batch)
        tables, has_full = tables_of_blocks(blocks, states.tiling, cells, ways), True
    if int(tables[""].counts[:, 1].astype(np.int64).sum()) == cells * math.prod(states.tiling.counts):
        return None
    return tables, has_full and states.predicates is not None


def mask_states(region: Region, tile: Tile, arrays: Mapping[str, Any]) -> MaskStates:
    """Return the masks of a region on score tiles.

    Args:
        arrays: the leaves by name. Nothing is known about a leaf that is missing.
    """
    tiling = Tiling(tile, region.sizes["q"], region.sizes["k"])
    root = region.weight if region.score is None else region.score
    assert root is not None
    biases = _biases(root, _terms if region.score is not None else _factors)
    # Without a softmax, masks are factors, and 0 times infinity is not 0. Biases are therefore assumed to be finite.
    least = -math.inf if region.score is not None else -_LARGEST_BIAS
    extents, fixed = [], set()
    for i, leaf in enumerate(region.leaves):
        array = arrays.get(f"leaf{i}")
        if leaf in biases:
            assumed = constant_extent(tiling, least, _LARGEST_BIAS)
        elif array is None and leaf.source.key is not None and leaf.source.constant is None:
            assumed = _assumed(region, leaf, tiling) or Extent(unknown(leaf.source.dtype), tiling)
        else:
            assumed = _assumed(region, leaf, tiling)
        if assumed is not None:
            fixed.add(i)
        extents.append(assumed or _extent(region, leaf, array, tiling))
    writer = Writer(region, "forward", tile)
    predicates, masks = None, ()
    if region.score is not None and writer.scores[1] is not None:
        _, masks = unmasked(region.score)
        predicates = writer.tile_program([x.predicate for x in masks])
    return MaskStates(
        writer.tile_program([root]),
        region.score is not None,
        predicates,
        masks,
        tuple(extents),
        frozenset(fixed),
        tiling,
    )


def _biases(root: Node, terms_of: Callable[[Node], tuple[Node, ...]]) -> frozenset[Leaf]:
    """Return the floating arrays of queries by keys that enter a value only through harmless operations.

    Args:
        terms_of: returns the inputs of a node through which such arrays may enter.
    """
    added: set[Leaf] = set()
    waiting, seen, factors = [root], set[int](), list[Node]()
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if node.leaf is not None and _is_bias(node.leaf):
            added.add(node.leaf)
            continue
        terms = terms_of(node)
        waiting += [x for x in node.inputs if any(x is term for term in terms)]
        factors += [x for x in node.inputs if not any(x is term for term in terms)]
    return frozenset(added.difference(leaves_of(*factors)))


def _terms(node: Node) -> tuple[Node, ...]:
    """Return the terms of a sum, the cases of a select, or the scaled operand of a multiple."""
    match _name(node):
        case "add" | "add_any" | "convert_element_type" | "stop_gradient":
            return node.inputs
        case "sub":
            return node.inputs[:1]
        case "mul" | "div":
            # The operand that is scaled by a number, whose effect interval arithmetic accounts for.
            return tuple(x for x in node.inputs if x.kind != "number") if _is_scaled(node) else ()
        case "select_n":
            return node.inputs[1:]
    return ()


def _factors(node: Node) -> tuple[Node, ...]:
    """Return the inputs of a smooth node of a weight, or the cases of a select."""
    name = _name(node)
    return node.inputs[1:] if name == "select_n" else node.inputs if name in _SMOOTH else ()


def _name(node: Node) -> str:
    return getattr(node.primitive, "name", "")


def _is_scaled(node: Node) -> bool:
    """Return whether a product or quotient is a value times a number."""
    first, second = (x.kind == "number" for x in node.inputs)
    return (second and not first) or (first and not second and _name(node) == "mul")


def _is_bias(leaf: Leaf) -> bool:
    return leaf.role in ("score", "distance") and leaf.source.dtype.kind in "fV"


def _compared(region: Region) -> frozenset[Leaf]:
    """Return the leaves of products and feature sums whose magnitude may decide a mask.

    No magnitude may be assumed for these, because it would decide which elements they mask.
    """
    nodes = list(nodes_of(region.score, region.weight, *region.extras))
    deciding = [node for node in nodes if node.kind == "sum" and _decides(node)]
    tests = [node for node in nodes if _name(node) in _COMPARISONS and not _is_of_sign(node)]
    deciding += [node for node in nodes_of(*(x for test in tests for x in test.inputs)) if node.kind == "product"]
    return frozenset(leaf for node in deciding for leaf in leaves_of(*node.inputs))


def _is_of_sign(test: Node) -> bool:
    """Return whether a test compares a multiple of a product with 0, so that its magnitude does not matter."""
    for one, other in (test.inputs, test.inputs[::-1]):
        if other.kind != "number" or other.number != 0:
            continue
        while _name(one) in ("convert_element_type", "stop_gradient", "neg") or (
            _name(one) in ("mul", "div") and _is_scaled(one)
        ):
            one = next((x for x in one.inputs if x.kind != "number"), one.inputs[0])
        return one.kind == "product"
    return False


def _decides(node: Node) -> bool:
    """Return whether the function of a sum, or of a call in it, selects or compares."""
    assert node.function is not None
    for one in nodes_of(*node.function.value.roots):
        if _name(one) in _KILLERS or (one.function is not None and _decides(one)):
            return True
    return False


def _assumed(region: Region, leaf: Leaf, tiling: Tiling) -> Extent | None:
    """Return the extent that is assumed for a leaf in all tiles, None if the array itself is to be read."""
    if leaf.role in ("query", "key", "feature"):
        if leaf in region.once(_compared):
            return constant_extent(tiling, -math.inf, math.inf)
        # Reading a whole query or key array costs more than its bounds are worth.
        features = math.prod(region.sizes[label] for label in leaf.features)
        most = math.sqrt(_LARGEST_PRODUCT / max(1, features))
        return constant_extent(tiling, -most, most)
    is_floating = leaf.source.dtype.kind in "fV" and leaf.source.key is not None
    is_known = leaf.source.constant is not None
    # A weight that happens to be 0 still has a derivative.
    is_unknown = is_floating and (_is_bias(leaf) or (region.score is None and not is_known))
    if leaf.source.key is None and leaf.role != "scalar":
        size = region.sizes["q" if leaf.role == "row" else "k"]
        is_unknown |= leaf.source.shape != (size,) or leaf.role in ("score", "distance")
    return constant_extent(tiling, -math.inf, math.inf) if is_unknown else None


def _extent(region: Region, leaf: Leaf, array: Any, tiling: Tiling) -> Extent:
    """Return the extent of a leaf, computed from its array."""
    tile = tiling.tile
    assert leaf.role != "feature", "features have no extents"
    if leaf.source.key is None:
        array = np.arange(leaf.source.shape[0], dtype=leaf.source.dtype)
    elif leaf.source.constant is not None:
        array = leaf.source.constant
    elif leaf.source.dtype.kind == "b":
        array = array.astype(bool)
    if leaf.role == "score" and isinstance(array, jax.Array):
        # If the mask is a constant of the program, XLA would fold its reduction at compile time, for many seconds.
        array = jax.lax.optimization_barrier(array)
    whole = leaf_array(leaf, array, region.batch, region.sizes)
    sizes = [region.sizes[label] if label in leaf.labels else 1 for label in region.batch]
    if leaf.role == "distance":
        return distance_extent(tiling, whole.reshape([*sizes, whole.shape[-1]]))
    last = {"row": [region.sizes["q"]], "column": [region.sizes["k"]], "scalar": []}.get(
        leaf.role, list(whole.shape[-2:])
    )
    whole = whole.reshape(sizes + last)
    interval = tile_extent(whole, leaf.role, tile.rows, tile.columns)
    start = _line_start(whole) if leaf.role in ("row", "column") else None
    if start is None:
        return Extent(interval, tiling)
    return Extent(interval, tiling, line="q" if leaf.role == "row" else "k", start=start)


def _line_start(line: Any) -> int | None:
    """Return the first element of a known array that grows by one and is the same for the whole batch, else None."""
    if not isinstance(line, np.ndarray) or line.size != line.shape[-1] or line.dtype.kind == "b":
        return None
    numbers = line.reshape(-1).astype(np.float64)
    start = float(numbers[0])
    is_line = start.is_integer() and np.array_equal(numbers, start + np.arange(line.size))
    return int(start) if is_line else None
