"""Structural hashing of regions, so equal layers of a model share one region and all that is derived from it.

Regions are equal if they have the same kernels, results and gradients, given the same arrays. Their trees are compared
node by node, with primitives, parameters, numbers and constant arrays by content. Leaves are compared up to the names
of variables. Functions among parameters are equal only if they are the same object.
"""

import hashlib
import weakref
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from blockdiag.fusion.ir.tree import Function, Leaf, Node, Region, Source, Trees, nodes_of

# JAX settings that tile programs depend on, in addition to the region.
_SETTINGS = (
    "jax_default_matmul_precision", "jax_enable_x64", "jax_numpy_dtype_promotion", "jax_numpy_rank_promotion",
)  # fmt: skip

# Regions live as long as the programs that they are part of. This table does not keep them alive, and drops the key
# with its region.
_REGIONS: weakref.WeakValueDictionary[Hashable, Region] = weakref.WeakValueDictionary()


def shared(region: Region) -> Region:
    """Return the first of all equal live regions. Their `log_sums` may differ, which kernels do not depend on."""
    key = key_of(region)
    return region if key is None else _REGIONS.setdefault(key, region)


def key_of(region: Region) -> Hashable | None:
    """Return a key that is the same for equal regions only; None if a part of the region cannot be hashed."""
    names = _Names()
    key = (
        tuple(getattr(jax.config, name) for name in _SETTINGS),
        tuple(region.sizes.items()),
        region.batch,
        region.dtype,
        region.out_dims,
        region.value_dims,
        region.is_value_share,
        names.source(region.value),
        tuple(map(names.leaf, region.leaves)),
        len(region.extras),
        names.roots((region.score, region.weight, *region.extras)),
    )
    try:
        hash(key)
    except TypeError:
        return None
    return key


class _Names:
    """Converter of parts of a region to tuples, with variables numbered in order of first use."""

    def __init__(self) -> None:
        self._variables: dict[Any, int] = {}

    def source(self, source: Source) -> Hashable:
        variable = None if source.key is None else self._variables.setdefault(source.key, len(self._variables))
        return variable, source.shape, source.dtype, _content(source.constant)

    def leaf(self, leaf: Leaf | None) -> Hashable:
        if leaf is None:
            return None
        return self.source(leaf.source), leaf.dims, leaf.role, leaf.labels, leaf.is_constant, leaf.is_share

    def roots(self, roots: Sequence[Node | None]) -> Hashable:
        """Return trees as tuples. Nodes refer to each other by number, so sharing is part of the key."""
        nodes = list(nodes_of(*roots))
        places = {id(node): place for place, node in enumerate(nodes)}
        first = tuple(None if root is None else places[id(root)] for root in roots)
        return first, tuple(self._node(node, places) for node in nodes)

    def _node(self, node: Node, places: Mapping[int, int]) -> Hashable:
        inputs = tuple(places[id(x)] for x in node.inputs)
        function = None if node.function is None else self._function(node.function)
        own = (self.leaf(node.leaf), _content(node.number), node.primitive, _content(node.params), function)
        return node.kind, inputs, own

    def _function(self, function: Function) -> Hashable:
        slope = None if function.slope is None else self._trees(function.slope)
        return self._trees(function.value), function.places, slope, function.mode

    def _trees(self, trees: Trees) -> Hashable:
        return tuple(map(self.leaf, trees.leaves)), self.roots(trees.roots)


def _content(value: Any) -> Hashable:
    """Return a key of a parameter, number or array; equal keys mean the same type and the same bits."""
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.hasobject:
            # Unhashable, because the contained objects are unknown.
            return value  # pyrefly: ignore[bad-return]
        return np.ndarray, value.dtype, value.shape, hashlib.sha256(value.tobytes()).digest()
    if isinstance(value, float | complex):
        # 0.0 == -0.0, and NaN != NaN.
        return type(value), repr(value)
    if isinstance(value, tuple | list):
        return type(value), tuple(map(_content, value))
    if isinstance(value, Mapping):
        return dict, tuple((name, _content(x)) for name, x in value.items())
    return type(value), value
