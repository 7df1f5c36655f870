"""Which tiles of scores masks leave alive: lists of them, from the leaves alone."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from blockdiag.fusion.carriers import Interval
from blockdiag.fusion.factors import MASKED, unmasked
from blockdiag.fusion.intervals import bounds, tile_extent, tile_states
from blockdiag.fusion.kernels import Lists, Tile, Writer
from blockdiag.fusion.tiles import leaf_array
from blockdiag.fusion.trace import primitives
from blockdiag.fusion.tree import Leaf, Node, Region, leaves_of, nodes_of

# What can rule a score out whatever queries and keys are; a bias that is only added to it is taken not to.
_COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
_KILLERS = _COMPARISONS | {"select_n", "min", "clamp"}
# Functions that follow a bias wherever it goes; others may decide by it.
_SMOOTH = frozenset((
    "add", "add_any", "convert_element_type", "div", "erf", "exp", "exp2", "integer_pow", "logistic", "mul", "neg",
    "square", "stop_gradient", "sub", "tanh",
))  # fmt: skip
_NOTHING_KNOWN = Interval(-math.inf, math.inf)
# Products of queries and keys are taken to be within this, so that adding -1e9 rules a score out. A softmax has no use
# for larger ones: neighbouring float32 numbers are 4 apart there.
_LARGEST_PRODUCT = 2.0**25
# Biases are taken to be at most this, so that some of them and a product still leave what -1e9 rules out ruled out.
_LARGEST_BIAS = 2.0**23


@dataclass(frozen=True)
class Live:
    """Tiles that are not dead.

    Attributes:
        labels: batch labels that they differ along.
        has_full: whether tiles that no mask touches come first in the lists.
        arrays: by name: "live_counts" [labels.., tq, 2] and "live_tiles" [labels.., tq, most], for each tile of
            queries how many tiles of keys there are that no mask touches, and how many in all, and which, in order;
            "live_counts_t" and "live_tiles_t" the other way round. Where leaves are distances and tiles are squares,
            "live_counts_d" and "live_tiles_d" have for each diagonal of tiles the tiles of queries. int32.
    """

    labels: tuple[str, ...]
    has_full: bool
    arrays: Mapping[str, Any]

    @property
    def lists(self) -> Lists:
        """What kernels are told."""
        widths = [x.shape[-1] for name, x in self.arrays.items() if name.startswith("live_tiles")]
        return Lists(self.labels, self.has_full, tuple(widths))


def live_tiles(region: Region, tile: Tile, arrays: Mapping[str, Any]) -> Live | None:
    """The tiles that a region needs; None where it needs all.

    A tile is dead where every score in it is at most -9e8 whatever queries and keys are, products of up to 2^25 in
    magnitude and biases of up to 2^23; without a softmax, where every weight is 0 whatever floating arrays hold, biases
    of up to 2^23. What numbers alone decide is decided while tracing.

    Args:
        arrays: by name, "leaf0", ... as the region has them.
    """
    root = region.weight if region.score is None else region.score
    if root is None:
        return None
    writer = Writer(region, "forward", tile)
    program = writer.tile_program([root])
    if _KILLERS.isdisjoint(primitives(program.jaxpr)):
        return None
    biases = _biases(root, _terms if region.score is not None else _factors)
    # Without a softmax masks are factors, which make nothing 0 that is infinite.
    extent = Interval(-math.inf if region.score is not None else -_LARGEST_BIAS, _LARGEST_BIAS)
    extents = [
        extent if leaf in biases else _extent(region, leaf, arrays.get(f"leaf{i}"), tile)
        for i, leaf in enumerate(region.leaves)
    ]
    found = bounds(program, extents)[0]
    states = _nonzero(found) if region.score is None else tile_states(found, dead_below=MASKED)
    if isinstance(states, np.ndarray) and states.all():
        return None
    full = _untouched(writer, extents)
    xp: Any = jnp if isinstance(states, jax.Array) or isinstance(full, jax.Array) else np
    shape = (*np.broadcast_shapes(states.shape, () if full is None else full.shape)[:-2], *writer.tile_counts)
    if full is not None:
        states = xp.where(xp.logical_and(full, states > 0), 2, states)
    states = xp.broadcast_to(states, shape)
    lead = (1,) * (len(region.batch) + 2 - len(shape)) + shape[:-2]
    labels = tuple(label for label, size in zip(region.batch, lead, strict=True) if size > 1)
    states = states.reshape([region.sizes[label] for label in labels] + list(shape[-2:]))
    found = {}
    ways = {"": states, "_t": xp.swapaxes(states, -1, -2)}
    if tile.rows == tile.columns and any(leaf.role == "distance" for leaf in region.leaves):
        ways["_d"] = _by_diagonals(xp, states)
    for suffix, each in ways.items():
        counts = xp.stack([(each == 2).sum(-1), (each > 0).sum(-1)], -1)
        order = xp.argsort(-each, axis=-1, stable=True) if xp is jnp else np.argsort(-each, -1, kind="stable")
        if xp is np:
            # Known while tracing: no longer than the longest.
            order = order[..., : max(1, counts.max())]
        found |= {f"live_counts{suffix}": counts.astype(np.int32), f"live_tiles{suffix}": order.astype(np.int32)}
    return Live(labels, full is not None, {name: jnp.asarray(x) for name, x in found.items()})


def _biases(root: Node, terms_of: Callable[[Node], tuple[Node, ...]]) -> frozenset[Leaf]:
    """Floating arrays of queries by keys that a value is made of in harmless ways alone.

    Args:
        terms_of: the inputs of a node that may be such arrays, or be made of them.
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
    """What a node is a sum of, a choice between, or a multiple of."""
    match _name(node):
        case "add" | "add_any" | "convert_element_type" | "stop_gradient":
            return node.inputs
        case "sub":
            return node.inputs[:1]
        case "mul" | "div":
            # What is scaled by a number; intervals know by which.
            return tuple(x for x in node.inputs if x.kind != "number") if _is_scaled(node) else ()
        case "select_n":
            return node.inputs[1:]
    return ()


def _factors(node: Node) -> tuple[Node, ...]:
    """What a weight's node is made of, where it compares nothing, and what it chooses between."""
    name = _name(node)
    return node.inputs[1:] if name == "select_n" else node.inputs if name in _SMOOTH else ()


def _name(node: Node) -> str:
    return getattr(node.primitive, "name", "")


def _is_scaled(node: Node) -> bool:
    """Whether a product or quotient is a value times a number."""
    first, second = (x.kind == "number" for x in node.inputs)
    return (second and not first) or (first and not second and _name(node) == "mul")


def _is_bias(leaf: Leaf) -> bool:
    return leaf.role in ("score", "distance") and leaf.source.dtype.kind in "fV"


def _by_diagonals(xp: Any, states: Any) -> Any:
    """[.., tiles of queries, tiles of keys] as [.., diagonals, tiles of queries], the last key's first."""
    rows, columns = states.shape[-2:]
    row = np.arange(rows)[None, :]
    column = row - np.arange(rows + columns - 1)[:, None] + columns - 1
    is_tile = (column >= 0) & (column < columns)
    return xp.where(is_tile, states[..., row, column.clip(0, columns - 1)], 0)


def _nonzero(weight: Interval) -> Any:
    """Which tiles may have weights other than 0: int8, as `tile_states` has them."""
    is_zero = (weight.low == 0) & (weight.high == 0)
    return (~is_zero).astype(np.int8)


def _untouched(writer: Writer, extents: list[Interval]) -> Any:
    """Tiles where every mask keeps all scores; None where there is no such score."""
    region = writer.region
    if region.score is None or writer.scores[1] is None:
        return None
    _, masks = unmasked(region.score)
    kept: Any = True
    for mask, found in zip(masks, bounds(writer.tile_program([x.predicate for x in masks]), extents), strict=True):
        kept = kept & (found.low >= 1 if mask.keeps else found.high <= 0)
    _, columns = writer.tile_counts
    if writer.keys % writer.tile.columns:
        # The end of the keys is a mask too.
        is_inner = np.arange(columns) < columns - 1
        kept = kept & is_inner.reshape([1] * (kept.ndim - 1) + [columns])
    return kept


def _compared(region: Region) -> frozenset[Leaf]:
    """The leaves of products, and of sums over features, by whose size something is decided: what they mask is not to
    be guessed."""
    nodes = list(nodes_of(region.score, region.weight, *region.extras))
    deciding = [node for node in nodes if node.kind == "sum" and _decides(node)]
    tests = [node for node in nodes if _name(node) in _COMPARISONS and not _is_of_sign(node)]
    deciding += [node for node in nodes_of(*(x for test in tests for x in test.inputs)) if node.kind == "product"]
    return frozenset(leaf for node in deciding for leaf in leaves_of(*node.inputs))


def _is_of_sign(test: Node) -> bool:
    """Whether a comparison is of a multiple of a product with 0: how large the product may be decides nothing."""
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
    """Whether the function of a sum, or of a call in it, chooses or compares."""
    assert node.function is not None
    for one in nodes_of(*node.function.value.roots):
        if _name(one) in _KILLERS or (one.function is not None and _decides(one)):
            return True
    return False


def _extent(region: Region, leaf: Leaf, array: Any, tile: Tile) -> Interval:
    """The interval of a leaf on each tile."""
    if leaf.role in ("query", "key", "feature"):
        if leaf in region.once(_compared):
            return _NOTHING_KNOWN
        # Reading all of it costs more than it tells.
        features = math.prod(region.sizes[label] for label in leaf.features)
        most = math.sqrt(_LARGEST_PRODUCT / max(1, features))
        return Interval(-most, most)
    is_floating = leaf.source.dtype.kind in "fV" and leaf.source.key is not None
    is_known = leaf.source.constant is not None
    if is_floating and (_is_bias(leaf) or (region.score is None and not is_known)):
        # A weight that happens to be 0 still has a derivative.
        return _NOTHING_KNOWN
    if leaf.source.key is None and leaf.role != "scalar":
        # Positions are known while tracing.
        size = region.sizes["q" if leaf.role == "row" else "k"]
        if leaf.source.shape != (size,) or leaf.role in ("score", "distance"):
            return _NOTHING_KNOWN
        line: Any = np.arange(size, dtype=leaf.source.dtype)
        return tile_extent(line, leaf.role, tile.rows, tile.columns)
    if leaf.source.key is None:
        array = np.arange(leaf.source.shape[0], dtype=leaf.source.dtype)
    elif leaf.source.constant is not None:
        array = leaf.source.constant
    elif leaf.source.dtype.kind == "b":
        array = array != 0
    if leaf.role == "score" and isinstance(array, jax.Array):
        # A mask that a program holds as a constant: XLA would reduce it while compiling, for many seconds.
        array = jax.lax.optimization_barrier(array)
    whole = leaf_array(leaf, array, region.batch, region.sizes)
    if leaf.role == "distance":
        return _distance_extent(region, whole, tile)
    sizes = [region.sizes[label] if label in leaf.labels else 1 for label in region.batch]
    last = {"row": [region.sizes["q"]], "column": [region.sizes["k"]], "scalar": []}.get(
        leaf.role, list(whole.shape[-2:])
    )
    return tile_extent(whole.reshape(sizes + last), leaf.role, tile.rows, tile.columns)


def _distance_extent(region: Region, whole: Any, tile: Tile) -> Interval:
    """The interval of whole numbers or booleans by distance [labels.., distances]."""
    xp: Any = np if isinstance(whole, np.ndarray) else jnp
    rows, keys = region.sizes["q"], region.sizes["k"]
    first_row = np.arange(0, rows, tile.rows)[:, None, None]
    last_key = np.arange(tile.columns - 1, keys + tile.columns - 1, tile.columns)[None, :, None]
    seen = first_row - last_key + np.arange(tile.rows + tile.columns - 1) + keys - 1
    found = whole[..., seen.clip(0, rows + keys - 2)]
    ends = (xp.all, xp.any) if whole.dtype == bool else (xp.min, xp.max)
    low, high = (end(found, axis=-1) for end in ends)
    return Interval(low, high)
