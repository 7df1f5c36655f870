"""Equal regions are one: what is derived of a region is derived once for all layers of a model that have it.

Regions are equal where kernels, results and gradients of one are those of the other, given the same arrays: their
trees, node for node, with primitives, parameters, numbers and known arrays by content, and what their leaves are, but
for the names of variables. Functions among parameters are equal where they are the same object.
"""

import hashlib
import weakref
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from blockdiag.fusion.ir.tree import Function, Leaf, Node, Region, Source, Trees, nodes_of

# What tile programs depend on beside a region.
_SETTINGS = (
    "jax_default_matmul_precision", "jax_enable_x64", "jax_numpy_dtype_promotion", "jax_numpy_rank_promotion",
)  # fmt: skip

# Regions live as long as the programs that they are part of, and nothing lives longer for being here: a key goes with
# its region.
_REGIONS: weakref.WeakValueDictionary[Hashable, Region] = weakref.WeakValueDictionary()


def shared(region: Region) -> Region:
    """The first one of all equal regions that are in use; `log_sums` may differ, which no kernel knows of."""
    key = key_of(region)
    return region if key is None else _REGIONS.setdefault(key, region)


def key_of(region: Region) -> Hashable | None:
    """What equal regions have in common and no others; None where a region has something that cannot be compared."""
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
    """Parts of a region as tuples, in which variables are numbers in the order in which they are met."""

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
        """Trees, whose nodes refer to each other by number: a node that is used twice is one value."""
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
    """A parameter, number or array such that equal ones are the same to the last bit, and of one type."""
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.hasobject:
            # Unhashable, as nothing is known of what is in it.
            return value  # pyrefly: ignore[bad-return]
        return np.ndarray, value.dtype, value.shape, hashlib.sha256(value.tobytes()).digest()
    if isinstance(value, float | complex):
        # 0.0 == -0.0, and NaN is not itself.
        return type(value), repr(value)
    if isinstance(value, tuple | list):
        return type(value), tuple(map(_content, value))
    if isinstance(value, Mapping):
        return dict, tuple((name, _content(x)) for name, x in value.items())
    return type(value), value
