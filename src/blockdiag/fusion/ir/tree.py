"""What a fused region is made of: leaves in memory, and trees of operations on tiles of them."""

import functools
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import jax
import numpy as np
from jax.extend import core

from blockdiag.common.operation import Operation

# Regions judge sizes of `jax.export` while they are traced.
FUSE = Operation("fuse", "blockdiag.fusion.runtime", ("xla", "triton"), takes_symbolic_sizes=True)

Role = Literal["query", "key", "feature", "row", "column", "score", "distance", "scalar"]
"""What a leaf's tile is: [q, f], [k, f] and [f] operands of sums over features, products above all; [q], [k], [q, k],
[q, k] of which every element is a function of q - k, or one number of each batch."""

WITH_FEATURES: frozenset[Role] = frozenset(("query", "key", "feature"))
WITHOUT_KEYS: frozenset[Role] = frozenset(("query", "feature", "row", "scalar"))

Dim = tuple[str, ...] | int
"""What an axis of an array stands for: labels, the first one slowest (none: size 1), or one index of it."""

ROWS, COLUMNS, FEATURES = "q", "k", "f"
DISTANCE = "distance"
"""The label of an axis that has q - k, from 1 - keys to queries - 1."""


# What works element by element.
ELEMENTWISE = frozenset({
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil", "clamp",
    "cos", "cosh", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "integer_pow",
    "is_finite", "le", "log", "log1p", "log2", "logistic", "lt", "max", "min", "mul", "ne", "neg", "nextafter", "not",
    "one_minus_square", "or", "pow", "rem", "round", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic",
    "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor",
})  # fmt: skip


class Unpullable(Exception):
    """The labels of a value say nothing about what it is computed from."""


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
    """Sizes of arrays are expressions, as `jax.export` has them."""


@dataclass(frozen=True)
class Source:
    """An array outside of the region.

    Attributes:
        key: the variable of the program that it is; None for 0, 1, 2, ...
        constant: its elements, where they are known while tracing.
        made: equations that make it of variables of the program; empty where the program has them.
    """

    key: Any
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    constant: np.ndarray | None = field(default=None, compare=False)
    made: tuple[core.JaxprEqn, ...] = field(default=(), compare=False)


def source_of(var: core.Var, constant: np.ndarray | None = None) -> Source:
    """The array that a variable is."""
    aval = var.aval
    assert isinstance(aval, jax.core.ShapedArray)
    return Source(var, tuple(aval.shape), np.dtype(aval.dtype), constant)


@dataclass(frozen=True)
class Leaf:
    """An array outside of the region, of which the region reads tiles.

    Attributes:
        source: the array.
        dims: of each axis of the source.
        role: what tiles of it are.
        labels: batch labels that it has, in the region's order; it is the same for all others.
        is_constant: whether nobody asks for its gradient.
        is_share: whether its gradient is a share of a sum that is rounded later, when all shares are added up.
    """

    source: Source
    dims: tuple[Dim, ...]
    role: Role
    labels: tuple[str, ...]
    is_constant: bool = False
    is_share: bool = False

    @property
    def has_gradient(self) -> bool:
        """Return whether it is made of floating numbers whose gradient is asked for."""
        return not self.is_constant and bool(jax.dtypes.issubdtype(self.source.dtype, np.floating))

    @property
    def gradient_dtype(self) -> np.dtype[Any]:
        """The dtype of its gradient."""
        return _gradient_dtype(self.source, self.is_share)

    @property
    def features(self) -> tuple[str, ...]:
        """The labels that a product sums over, in the order in which both of its operands have them."""
        return tuple(sorted(x for dim in self.dims if isinstance(dim, tuple) for x in dim if x.startswith(FEATURES)))


def _gradient_dtype(source: Source, is_share: bool) -> np.dtype[Any]:
    return np.dtype(np.float32) if is_share and source.dtype.itemsize < 4 else source.dtype


@dataclass(frozen=True, eq=False)
class Trees:
    """A function of tiles, element by element.

    Attributes:
        roots: its results.
        leaves: what stands for each of its arguments in them; None for one that is not used.
    """

    roots: "tuple[Node, ...]"
    leaves: tuple[Leaf | None, ...]


@dataclass(frozen=True, eq=False)
class Function:
    """A function of tiles with a derivative of its own.

    Attributes:
        value: of its arguments.
        places: which arguments have a derivative.
        slope: the tangent of the value, of the arguments and tangents of `places` (jvp); or the cotangents of `places`,
            of the arguments and the cotangent of the value (vjp). None where there is no derivative.
        mode: which of both.
    """

    value: Trees
    places: tuple[int, ...]
    slope: Trees | None
    mode: Literal["jvp", "vjp"]


@dataclass(frozen=True, eq=False)
class Node:
    """A value of the region, for all queries and keys; the same node is one value.

    Attributes:
        kind: a leaf, a number, a product of a query leaf and a key leaf, an operation, a call of a function, or a sum
            over features of a function of one feature each.
        inputs: nodes that it is computed from.
        leaf, number, function: of a leaf, of a number, of a call or a sum.
        primitive, params: of an operation on tiles, element by element; a sum has the "sizes" of its labels.
    """

    kind: Literal["leaf", "number", "product", "operation", "call", "sum"]
    inputs: "tuple[Node, ...]" = ()
    leaf: Leaf | None = None
    number: Any = None
    primitive: core.Primitive | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    function: Function | None = None


def number(value: Any) -> Node:
    """A node that is a number."""
    return Node("number", number=np.asarray(value))


def operation(primitive: core.Primitive, *inputs: Node, **params: Any) -> Node:
    """A node that is an operation, element by element."""
    return Node("operation", inputs, primitive=primitive, params=params)


@dataclass(frozen=True)
class LogSum:
    """A variable of the program that is the log-sum-exp of a region's scores.

    Attributes:
        var: the variable.
        dims: what its axes stand for.
    """

    var: core.Var
    dims: tuple[Dim, ...]


@dataclass(frozen=True, eq=False)
class Region:
    """out[batch.., q, d] = sum over k of p[q, k] * weight[q, k] * value[k, d].

    Attributes:
        sizes: of every label, "q" and "k" included.
        batch: the batch labels, in the order of the result's axes.
        score: its softmax over k is p; None: p is 1.
        extras: further logits of each row, which take part in the softmax and have no value.
        weight: None is 1.
        leaves: of score, extras and weight, in the order in which they are passed.
        value, value_dims: the array, and what its axes stand for: labels, "k", and "d0", "d1", ...
        out_dims: what the axes of the result stand for.
        dtype: of the result.
        log_sums: what else of the program it may compute.
        is_value_share: of the values what `Leaf.is_share` is of a leaf.
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

    @property
    def is_empty(self) -> bool:
        """Return False: a region without elements is computed like any other."""
        return False

    @property
    def value_gradient_dtype(self) -> np.dtype[Any]:
        """The dtype of the values' gradient."""
        return _gradient_dtype(self.value, self.is_value_share)

    @property
    def sources(self) -> list[Source]:
        """The arrays of the leaves, and of the values."""
        return [*(leaf.source for leaf in self.leaves), self.value]

    @functools.cached_property
    def _derived(self) -> dict[Any, Any]:
        return {}

    def once[T](self, derive: Callable[..., T], *given: Hashable) -> T:
        """`derive(region, *given)`, made once: each of the ways in which a pass is traced asks for its kernels."""
        key = (derive, given)
        if key not in self._derived:
            self._derived[key] = derive(self, *given)
        return self._derived[key]


def nodes_of(*roots: Node | None) -> Iterator[Node]:
    """The nodes of trees, each once, in the order in which they are met."""
    seen: set[int] = set()
    waiting = [root for root in reversed(roots) if root is not None]
    while waiting:
        node = waiting.pop()
        if id(node) not in seen:
            seen.add(id(node))
            yield node
            waiting += reversed(node.inputs)


def bottom_up(*roots: Node | None) -> Iterator[Node]:
    """The nodes of trees, each once, after all that it is computed from."""
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
    """The leaves of trees, each once, in the order in which they are met."""
    return tuple(dict.fromkeys(node.leaf for node in nodes_of(*roots) if node.leaf is not None))


def with_leaves(region: Region, replaced: Mapping[Leaf, Leaf], **changes: Any) -> Region:
    """The same region of other leaves.

    Args:
        replaced: of every leaf the one in its place.
        changes: other attributes of the region.
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
