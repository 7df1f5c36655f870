"""Data structures of a fused region: leaves in memory, and trees of operations on tiles of them."""

import functools
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import jax
import numpy as np
from jax.extend import core

from blockdiag.common.operation import Operation

# Regions check the symbolic sizes of `jax.export` while they are traced.
FUSE = Operation("fuse", "blockdiag.fusion.runtime", ("xla", "triton"), takes_symbolic_sizes=True)

Role = Literal["query", "key", "feature", "row", "column", "score", "distance", "scalar"]
"""The shape and meaning of a leaf's tile.

The operands of sums over features, mostly products, are query [q, f], key [k, f] and feature [f]. The others are row
[q], column [k], score [q, k], distance ([q, k], a function of q - k), and scalar (one number for each batch index).
"""

WITH_FEATURES: frozenset[Role] = frozenset(("query", "key", "feature"))
WITHOUT_KEYS: frozenset[Role] = frozenset(("query", "feature", "row", "scalar"))

Dim = tuple[str, ...] | int
"""The meaning of an array's axis: labels, the first one slowest (no label means size 1), or one fixed index."""

ROWS, COLUMNS, FEATURES = "q", "k", "f"
DISTANCE = "distance"
"""The label of an axis of distances q - k, from 1 - keys to queries - 1."""


# Elementwise primitives.
ELEMENTWISE = frozenset({
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil", "clamp",
    "cos", "cosh", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "integer_pow",
    "is_finite", "le", "log", "log1p", "log2", "logistic", "lt", "max", "min", "mul", "ne", "neg", "nextafter", "not",
    "one_minus_square", "or", "pow", "rem", "round", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic",
    "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor",
})  # fmt: skip


class Unpullable(Exception):
    """The labels of a value cannot be propagated to the operands that it is computed from."""


class NotFusible(NotImplementedError):
    """A function has no attention that can become one kernel; the message says which rule it breaks, and where.

    Example:
        >>> import jax.numpy as jnp
        >>> from blockdiag import NotFusible, fuse
        >>> try:
        ...     fuse(jnp.sin)(jnp.zeros(3))
        ... except NotFusible as failure:
        ...     print(failure)
        there is no product with a softmax of scores; `fuse` is for attention
    """


class SymbolicSizes(NotFusible):
    """Sizes of arrays are symbolic, as in `jax.export`."""


@dataclass(frozen=True)
class Source:
    """An array outside of the region.

    Attributes:
        key: the variable of the program that holds the array; None for 0, 1, 2, ...
        shape, dtype: the array's.
        constant: the elements, if they are known at trace time.
        made: the equations that compute the array from variables of the program; empty if the program computes it.
    """

    key: Any
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    constant: np.ndarray | None = field(default=None, compare=False)
    made: tuple[core.JaxprEqn, ...] = field(default=(), compare=False)


def source_of(var: core.Var, constant: np.ndarray | None = None) -> Source:
    """Return a variable's array as a source."""
    aval = var.aval
    assert isinstance(aval, jax.core.ShapedArray)
    return Source(var, tuple(aval.shape), np.dtype(aval.dtype), constant)


@dataclass(frozen=True)
class Leaf:
    """An array outside of the region, of which the region reads tiles.

    Attributes:
        source: the array.
        dims: the labels of each axis of the source.
        role: the shape and meaning of its tiles.
        labels: the batch labels of the array, in the region's order. It is constant along all others.
        is_constant: whether its gradient is unused.
        is_share: whether its gradient is one share of a sum, which is rounded only after all shares are added.
    """

    source: Source
    dims: tuple[Dim, ...]
    role: Role
    labels: tuple[str, ...]
    is_constant: bool = False
    is_share: bool = False

    @property
    def has_gradient(self) -> bool:
        """Return whether the array is floating and its gradient is used."""
        return not self.is_constant and bool(jax.dtypes.issubdtype(self.source.dtype, np.floating))

    @property
    def gradient_dtype(self) -> np.dtype[Any]:
        """Return the dtype of the gradient."""
        return _gradient_dtype(self.source, self.is_share)

    @property
    def features(self) -> tuple[str, ...]:
        """Return the labels that a product contracts, in the same order for both of its operands."""
        return tuple(sorted(x for dim in self.dims if isinstance(dim, tuple) for x in dim if x.startswith(FEATURES)))


def _gradient_dtype(source: Source, is_share: bool) -> np.dtype[Any]:
    return np.dtype(np.float32) if is_share and source.dtype.itemsize < 4 else source.dtype


@dataclass(frozen=True, eq=False)
class Trees:
    """An elementwise function of tiles.

    Attributes:
        roots: the results.
        leaves: the leaf of each argument; None for an unused argument.
    """

    roots: "tuple[Node, ...]"
    leaves: tuple[Leaf | None, ...]


@dataclass(frozen=True, eq=False)
class Function:
    """A function of tiles with a custom derivative.

    Attributes:
        value: the value, as a function of the arguments.
        places: the positions of the differentiable arguments.
        slope: in mode "jvp" the tangent of the value, from the arguments and the tangents of `places`. In mode "vjp"
            the cotangents of `places`, from the arguments and the cotangent of the value. None without a derivative.
        mode: the kind of derivative.
    """

    value: Trees
    places: tuple[int, ...]
    slope: Trees | None
    mode: Literal["jvp", "vjp"]


@dataclass(frozen=True, eq=False)
class Node:
    """A value of the region, for all queries and keys. A node that is used several times is computed once.

    Attributes:
        kind: a leaf, a number, a product of a query leaf and a key leaf, an operation, a call of a function, or a sum
            of a function over features.
        inputs: the nodes that it is computed from.
        leaf: the leaf, for kind "leaf".
        number: the number, for kind "number".
        primitive: the primitive of an elementwise operation on tiles.
        params: the parameters of the operation; for a sum, the "sizes" of its labels.
        function: the function of a call, or the summand of a sum.
    """

    kind: Literal["leaf", "number", "product", "operation", "call", "sum"]
    inputs: "tuple[Node, ...]" = ()
    leaf: Leaf | None = None
    number: Any = None
    primitive: core.Primitive | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    function: Function | None = None


def number(value: Any) -> Node:
    """Return the node of a number."""
    return Node("number", number=np.asarray(value))


def operation(primitive: core.Primitive, *inputs: Node, **params: Any) -> Node:
    """Return the node of an elementwise operation."""
    return Node("operation", inputs, primitive=primitive, params=params)


@dataclass(frozen=True)
class LogSum:
    """A variable of the program that is the log-sum-exp of a region's scores.

    Attributes:
        var: the variable.
        dims: the labels of its axes.
    """

    var: core.Var
    dims: tuple[Dim, ...]


@dataclass(frozen=True, eq=False)
class Region:
    """out[batch.., q, d] = sum over k of p[q, k] * weight[q, k] * value[k, d].

    Attributes:
        sizes: the size of every label, including "q" and "k".
        batch: the batch labels, in the order of the result's axes.
        score: the scores, whose softmax over k is p; None means that p is 1.
        extras: further logits of each row, which take part in the softmax and have no value.
        weight: the factor of p; None means 1.
        leaves: the leaves of score, extras and weight, in the order in which they are passed.
        value, value_dims: the array of values, and the labels of its axes: batch labels, "k", and "d0", "d1", ...
        out_dims: the labels of the result's axes.
        dtype: the dtype of the result.
        log_sums: variables of the program that the region may compute in addition.
        is_value_share: `Leaf.is_share` for the values.
        is_ordered: whether gradients are summed in a fixed order, so that they are repeatable.
    """

    operation: ClassVar[Operation] = FUSE

    sizes: dict[str, int]
    batch: tuple[str, ...]
    score: Node | None
    extras: tuple[Node, ...]
    weight: Node | None
    leaves: tuple[Leaf, ...]
    value: Source
    value_dims: tuple[Dim, ...]
    out_dims: tuple[Dim, ...]
    dtype: np.dtype[Any]
    log_sums: tuple[LogSum, ...] = ()
    is_value_share: bool = False
    is_ordered: bool = True

    @property
    def is_empty(self) -> bool:
        """Return False: a region without elements is computed like any other."""
        return False

    @property
    def value_gradient_dtype(self) -> np.dtype[Any]:
        """Return the dtype of the values' gradient."""
        return _gradient_dtype(self.value, self.is_value_share)

    @property
    def sources(self) -> list[Source]:
        """Return the arrays of the leaves and of the values."""
        return [*(leaf.source for leaf in self.leaves), self.value]

    @functools.cached_property
    def _derived(self) -> dict[Any, Any]:
        return {}

    def once[T](self, derive: Callable[..., T], *given: Hashable) -> T:
        """Return `derive(region, *given)`, memoised, because each way of tracing a pass asks for its kernels."""
        key = (derive, given)
        if key not in self._derived:
            self._derived[key] = derive(self, *given)
        return self._derived[key]


def nodes_of(*roots: Node | None) -> Iterator[Node]:
    """Yield the nodes of trees, each once, in pre-order."""
    seen: set[int] = set()
    waiting = [root for root in reversed(roots) if root is not None]
    while waiting:
        node = waiting.pop()
        if id(node) not in seen:
            seen.add(id(node))
            yield node
            waiting += reversed(node.inputs)


def bottom_up(*roots: Node | None) -> Iterator[Node]:
    """Yield the nodes of trees, each once and after its inputs."""
    seen: set[int] = set()
    waiting = [(root, False) for root in reversed(roots) if root is not None]
    while waiting:
        node, has_inputs = waiting.pop()
        if has_inputs:
            yield node
        elif id(node) not in seen:
            seen.add(id(node))
            waiting.append((node, True))
            waiting += ((x, False) for x in reversed(node.inputs))


def leaves_of(*roots: Node | None) -> tuple[Leaf, ...]:
    """Return the leaves of trees, each once, in pre-order."""
    return tuple(dict.fromkeys(node.leaf for node in nodes_of(*roots) if node.leaf is not None))


def with_leaves(region: Region, replaced: Mapping[Leaf, Leaf], **changes: Any) -> Region:
    """Return a region with other leaves.

    Args:
        region: the region.
        replaced: the new leaf for every leaf.
        changes: other attributes to change.
    """
    known: dict[int, Node] = {}
    for node in bottom_up(region.score, *region.extras, region.weight):
        leaf = None if node.leaf is None else replaced[node.leaf]
        known[id(node)] = replace(node, inputs=tuple(known[id(x)] for x in node.inputs), leaf=leaf)
    return replace(
        region,
        score=None if region.score is None else known[id(region.score)],
        extras=tuple(known[id(x)] for x in region.extras),
        weight=None if region.weight is None else known[id(region.weight)],
        leaves=tuple(replaced[leaf] for leaf in region.leaves),
        **changes,
    )


def unordered(region: Region) -> Region:
    """Return the region with gradients that may be summed in any order."""
    return replace(region, is_ordered=False)


def with_node(root: Node, old: Node, leaf: Leaf) -> Node:
    """Return a tree with a leaf in place of one of its nodes."""
    known = {id(old): Node("leaf", leaf=leaf)}
    for node in bottom_up(root):
        if node is not old:
            known[id(node)] = replace(node, inputs=tuple(known[id(x)] for x in node.inputs))
    return known[id(root)]
