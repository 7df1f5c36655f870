"""Translate values of a program into trees of tile operations, by propagating axis labels to operands."""

import contextlib
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from blockdiag.fusion.frontend.custom_derivatives import calls_of
from blockdiag.fusion.frontend.trace import aval_of, body_of, constants
from blockdiag.fusion.ir.recursion import Steps, finished
from blockdiag.fusion.ir.tree import (
    COLUMNS,
    ELEMENTWISE,
    FEATURES,
    ROWS,
    Dim,
    Function,
    Leaf,
    Node,
    NotFusible,
    Source,
    Trees,
    Unpullable,
    leaves_of,
    nodes_of,
    number,
    operation,
    source_of,
)
from blockdiag.fusion.regions.axis_labels import (
    MOVES,
    SAME,
    broadcast_dims,
    factor_dims,
    labels_of,
    moved_dims,
    place_of,
    places_in,
    producers_of,
)
from blockdiag.fusion.regions.feature_sums import sum_of_features
from blockdiag.fusion.regions.grids import Grids, has_parts
from blockdiag.fusion.regions.materialise import source_made_by
from blockdiag.fusion.regions.relative_positions import Distances

# Most elements of a constant that is inspected at trace time.
_MOST_CONSTANTS = 2**22

# Sums over features that are not products: unrolled up to the first limit, and a loop up to the second one.
_FEW_FEATURES, _MOST_FEATURES = 8, 256
# Limit of unrolled terms for sums that cannot be loops, such as sums of matrix products.
_MOST_TERMS = 64


class MadeOfScores(NotFusible):
    """An array that a region reads is computed from whole rows of its scores.

    Attributes:
        products: the products that give these scores.
        others: the products that the array does not depend on.
    """

    def __init__(self, message: str, products: frozenset[core.Var], others: frozenset[core.Var]) -> None:
        super().__init__(message)
        self.products, self.others = products, others


class Puller:
    """Lazily built nodes of a program's values.

    Args:
        jaxpr: the flat program.
        sizes: the size of each label. Labels of features are added.
        batch: the batch labels.
        is_function: whether the program is the body of a function on tiles. Then only its arguments may be leaves, and
            values without queries or keys are computed as well.
    """

    def __init__(
        self, jaxpr: core.Jaxpr, sizes: dict[str, int], batch: Sequence[str], *, is_function: bool = False
    ) -> None:
        self._is_function = is_function
        self.producers, self._places = producers_of(jaxpr), places_in(jaxpr)
        self._distances = Distances(self.producers, sizes)
        self._constant_of = constants(jaxpr, _MOST_CONSTANTS)
        self.sizes = sizes
        self.grids = Grids(sizes)
        self.batch = batch
        self._nodes: dict[Any, Node] = {}
        self._features = itertools.count()
        self._moved: dict[tuple[Source, tuple[int, ...]], Source] = {}
        self.leaves: dict[Leaf, Node] = {}
        self.products: set[core.Var] = set()
        # Products and results of attention that are arrays in memory.
        self.stored: frozenset[core.Var] = frozenset()
        self.results: frozenset[core.Var] = frozenset()
        # Products that are not scores, but arrays that are constant along some parts of an axis (`Grids.as_product`).
        self._repeated: list[Node] = []
        # Leaves that may be scores themselves, and why they could not become trees.
        self.doubts: dict[Leaf, str] = {}

    def node(self, operand: Any, dims: tuple[Dim, ...]) -> Node:
        """Return the tree of a value whose axes stand for `dims`.

        Raises:
            NotFusible: the value is computed from scores and needs more than a tile of them.
        """
        return finished(self._node(operand, dims), Unpullable)

    def _node(self, operand: Any, dims: tuple[Dim, ...]) -> Steps[Node]:
        if isinstance(operand, core.Literal):
            return number(operand.val)
        if (operand, dims) not in self._nodes:
            self._nodes[operand, dims] = yield self._new_node(operand, dims)
        return self._nodes[operand, dims]

    def _new_node(self, var: core.Var, dims: tuple[Dim, ...]) -> Steps[Node]:
        constant = self._number(var)
        if constant is not None:
            return number(constant)
        labels = labels_of(dims)
        equation = self.producers.get(var)
        if equation is None or not (self._is_function or {ROWS, COLUMNS} <= labels):
            return self._leaf(var, dims)
        try:
            if equation.primitive.name == "optimization_barrier":
                return (yield self._node(equation.invars[equation.outvars.index(var)], dims))
            return (yield self._computed(equation, dims))
        except Unpullable as failure:
            if self._is_function:
                raise
            found = self._by_distance(var, dims)
            if found is not None:
                return found
            # The program computes the array, and the kernel reads tiles of it.
            made = self._leaf(var, dims)
            if made.leaf is not None and self.has_product(var, dims):
                reason = f"{failure}; it is between the scores and their softmax, {place_of(equation)}"
                self.doubts.setdefault(made.leaf, reason)
            return made

    def _by_distance(self, var: core.Var, dims: tuple[Dim, ...]) -> Node | None:
        """Return the leaf of a value that depends on q - k alone, or None for other values."""
        if any(label.startswith(FEATURES) for label in labels_of(dims)):
            return None
        try:
            source, dims = self._distances.source(var, dims)
        except Unpullable:
            return None
        self._add_made(source)
        labels = labels_of(dims)
        leaf = Leaf(source, dims, "distance", tuple(label for label in self.batch if label in labels))
        return self.leaves.setdefault(leaf, Node("leaf", leaf=leaf))

    def _each(self, operands: Iterable[tuple[Any, tuple[Dim, ...]]]) -> Steps[list[Node]]:
        """Return the trees of several values."""
        nodes = []
        for operand, dims in operands:
            nodes.append((yield self._node(operand, dims)))
        return nodes

    def _computed(self, equation: core.JaxprEqn, dims: tuple[Dim, ...]) -> Steps[Node]:
        name, params = equation.primitive.name, equation.params
        operands, shape = equation.invars, aval_of(equation.outvars[0]).shape
        if name in ELEMENTWISE:
            nodes = yield self._each((x, broadcast_dims(x, shape, dims)) for x in operands)
            return operation(equation.primitive, *nodes, **params)
        if name == "bitcast_convert_type" and _is_number(operands[0], shape):
            return operation(equation.primitive, (yield self._node(operands[0], dims)), **params)
        if name in SAME:
            return (yield self._node(operands[0], dims))
        if name == "convert_element_type":
            inner = yield self._node(operands[0], dims)
            is_float = [
                np.issubdtype(np.dtype(x), np.floating) or np.dtype(x).kind == "V"
                for x in (aval_of(operands[0]).dtype, params["new_dtype"])
            ]
            return inner if all(is_float) else operation(equation.primitive, inner, **params)
        if name in MOVES:
            return (yield self._node(operands[0], self._moved_scores(equation, dims)))
        if name == "slice":
            return (yield self._node(operands[0], self._at_one_index(equation, dims)))
        if name == "iota":
            if _wraps(equation):
                raise Unpullable("`iota` whose numbers wrap around")
            return self._leaf(*self._positions(equation, dims))
        if name == "dot_general":
            return (yield self._product(equation, dims))
        if name == "reduce_sum":
            return (yield self._sum(equation, dims))
        if body_of(equation) is not None and len(equation.outvars) == 1:
            return (yield self._call(equation, dims))
        raise Unpullable(f"`{name}` of scores cannot be computed tile by tile")

    def moved(self, equation: core.JaxprEqn, dims: tuple[Dim, ...]) -> tuple[Dim, ...]:
        """Return `moved_dims`, with axes of queries and keys divided into parts where necessary."""
        return moved_dims(equation, dims, self.grids.sizes, self.grids.divided)

    def _moved_scores(self, equation: core.JaxprEqn, dims: tuple[Dim, ...]) -> tuple[Dim, ...]:
        """Return `moved`, but divide axes of scores only.

        Raises:
            Unpullable: the reshape divides an axis of any other array, which is then read in its reshaped form.
        """
        inner, operand = self.moved(equation, dims), equation.invars[0]
        is_divided = has_parts(inner) and not has_parts(dims)
        if is_divided and not (isinstance(operand, core.Var) and self.has_product(operand, inner)):
            raise Unpullable("`reshape` that divides an axis")
        return inner

    @staticmethod
    def _at_one_index(equation: core.JaxprEqn, dims: tuple[Dim, ...]) -> tuple[Dim, ...]:
        """Return the dims of the operand of a slice that takes one index of an axis, such as one coordinate of points.

        Raises:
            Unpullable: the slice takes several indices, or slices a labelled axis.
        """
        pairs = zip(aval_of(equation.invars[0]).shape, aval_of(equation.outvars[0]).shape, dims, strict=True)
        found: list[Dim] = []
        for axis, (whole, size, dim) in enumerate(pairs):
            if whole != size and (size != 1 or dim != ()):
                raise Unpullable("`slice` of scores cannot be computed tile by tile")
            found.append(dim if whole == size else int(equation.params["start_indices"][axis]))
        return tuple(found)

    def _call(self, equation: core.JaxprEqn, dims: tuple[Dim, ...]) -> Steps[Node]:
        """Return the node of a call of a function with a custom derivative, which is kept on tiles."""
        try:
            function, arguments = self._function(equation, dims)
        except Unpullable as failure:
            name = equation.primitive.name
            raise Unpullable(
                f"`{name}` has a derivative of its own that cannot be computed tile by tile: {failure}"
            ) from None
        pairs = list(zip(equation.invars, arguments, strict=True))
        nodes = iter((yield self._each((x, inner) for x, inner in pairs if inner is not None)))
        operands = tuple(number(0) if inner is None else next(nodes) for _, inner in pairs)
        return Node("call", operands, function=function)

    def _function(
        self, equation: core.JaxprEqn, dims: tuple[Dim, ...]
    ) -> tuple[Function, list[tuple[Dim, ...] | None]]:
        """Return the function that a call applies to tiles, and the dims of its operands; None for unused operands."""
        # Calls within a function with a custom derivative need none of their own.
        calls = calls_of(equation, has_slope=not self._is_function)
        value = self._trees(calls.value, [dims])
        arguments = [None if leaf is None else leaf.dims for leaf in value.leaves]
        if calls.slope is None:
            return Function(value, (), None, calls.mode), arguments
        slope = self._trees(calls.slope, [dims] if calls.mode == "jvp" else [arguments[x] for x in calls.places])
        given = [None if leaf is None else leaf.dims for leaf in slope.leaves]
        # An argument may occur in the value, in the slope, or in both. Its tangent has the same dims.
        seen = list(enumerate(given[: len(arguments)]))
        if calls.mode == "jvp":
            seen += zip(calls.places, given[len(arguments) :], strict=True)
        elif given[-1] not in (None, dims):
            raise Unpullable("it moves elements")
        for place, found in seen:
            arguments[place] = found if arguments[place] is None else arguments[place]
            if found not in (None, arguments[place]):
                raise Unpullable("it moves elements")
        return Function(value, calls.places, slope, calls.mode), arguments

    def _trees(self, jaxpr: core.ClosedJaxpr, dims: Sequence[tuple[Dim, ...] | None]) -> Trees:
        """Return the trees of a function's results, whose axes stand for `dims`, in terms of its arguments."""
        puller = Puller(jaxpr.jaxpr, self.sizes, self.batch, is_function=True)
        puller.grids = self.grids
        roots = []
        for result, wanted in zip(jaxpr.jaxpr.outvars, dims, strict=True):
            if wanted is None:
                raise Unpullable("an argument is not used")
            roots.append(puller.node(result, wanted))
        found: dict[Any, Leaf] = {}
        for leaf in puller.leaves:
            if leaf.source.key not in jaxpr.jaxpr.invars or leaf.features or leaf.source.key in found:
                raise Unpullable("it is not elementwise")
            found[leaf.source.key] = leaf
        return Trees(tuple(roots), tuple(found.get(x) for x in jaxpr.jaxpr.invars))

    def _product(self, equation: core.JaxprEqn, dims: tuple[Dim, ...]) -> Steps[Node]:
        if equation.outvars[0] in self.stored:
            raise Unpullable("`dot_general`: a product whose whole rows are needed")
        sides = factor_dims(equation, dims)
        if any(label.startswith(FEATURES) for label in labels_of(dims)):
            raise Unpullable("`dot_general`: a product for each feature")
        (contracted, _) = equation.params["dimension_numbers"]
        features = []
        for axes in zip(*contracted, strict=True):
            label = self._new_feature(aval_of(equation.invars[0]).shape[axes[0]])
            features.append(label)
            for side, axis in zip(sides, axes, strict=True):
                side[axis] = (label,)
        if not contracted[0]:
            # Without contracted axes the product is an outer one.
            factors = yield self._each((x, tuple(side)) for x, side in zip(equation.invars, sides, strict=True))
            return operation(lax.mul_p, *factors)
        dtype = aval_of(equation.outvars[0]).dtype
        is_whole = not jnp.issubdtype(dtype, jnp.floating)
        if is_whole and any(np.dtype(aval_of(x).dtype).name not in ("int8", "uint8") for x in equation.invars):
            raise Unpullable(f"`dot_general`: a product in {dtype}, but tiles are float32")
        labels = [labels_of(tuple(side)) for side in sides]
        if any({ROWS, COLUMNS} <= x for x in labels):
            try:
                # A function of distances has fewer elements as a leaf by distance.
                if (found := self._by_distance(equation.outvars[0], dims)) is not None:
                    return found
                factors = yield self._each((x, tuple(side)) for x, side in zip(equation.invars, sides, strict=True))
                return self._looped(operation(lax.mul_p, *factors), features)
            except Unpullable:
                raise Unpullable(
                    "`dot_general`: a product of scores with another array cannot be computed tile by tile"
                ) from None
        is_swapped = COLUMNS in labels[0]
        # Contracted operands have axes, so they are not literals.
        operands = [(x, tuple(y)) for x, y in zip(equation.invars, sides, strict=True) if isinstance(x, core.Var)]
        query, key = (self._leaf(x, side) for x, side in (operands[::-1] if is_swapped else operands))
        if query.leaf is None or query.leaf.role != "query" or key.leaf is None or key.leaf.role != "key":
            raise Unpullable("`dot_general`: a product that is not one of queries and keys")
        self.products.add(equation.outvars[0])
        product = Node("product", (query, key))
        if not is_whole:
            return product
        return operation(lax.convert_element_type_p, product, new_dtype=dtype, weak_type=False, sharding=None)

    def _sum(self, equation: core.JaxprEqn, dims: tuple[Dim, ...]) -> Steps[Node]:
        """Return the node of a sum over features of tiles: a loop over many features, or unrolled terms of few."""
        axes, shape = equation.params["axes"], aval_of(equation.invars[0]).shape
        count = math.prod(shape[axis] for axis in axes)
        if count > _FEW_FEATURES and not self._is_function:
            left = iter(dims)
            features = {axis: self._new_feature(shape[axis]) for axis in axes}
            whole = tuple((features[axis],) if axis in features else next(left) for axis in range(len(shape)))
            if (found := self._by_distance(equation.outvars[0], dims)) is not None:
                return found
            with contextlib.suppress(Unpullable):
                return self._looped((yield self._node(equation.invars[0], whole)), features.values())
        if count > _MOST_TERMS:
            raise Unpullable(f"`reduce_sum` over more than {_MOST_TERMS} features that is not a product")
        total = None
        for indices in itertools.product(*(range(shape[axis]) for axis in axes)):
            rest, at = iter(dims), dict(zip(axes, indices, strict=True))
            inner = tuple(at[axis] if axis in at else next(rest) for axis in range(len(shape)))
            node = yield self._node(equation.invars[0], inner)
            total = node if total is None else operation(lax.add_p, total, node)
        return number(0.0) if total is None else total

    def _new_feature(self, size: int) -> str:
        """Return a new label of a summed axis."""
        label = f"{FEATURES}{next(self._features):02}"
        self.sizes[label] = size
        return label

    def _looped(self, body: Node, labels: Iterable[str]) -> Node:
        """Return the sum of a tree over features, as a loop.

        Raises:
            Unpullable: there are too many features, or the summand contains matrix products.
        """
        sizes = {label: self.sizes[label] for label in labels}
        if math.prod(sizes.values()) > _MOST_FEATURES:
            raise Unpullable(f"a sum over more than {_MOST_FEATURES} features")
        return sum_of_features(body, sizes)

    def _leaf(self, source: core.Var | Source, dims: tuple[Dim, ...]) -> Node:
        while isinstance(source, core.Var):
            # A leaf is the array in memory, below moves: its axes may lie in any order.
            equation = self.producers.get(source)
            name = None if equation is None else equation.primitive.name
            if equation is not None and name == "iota" and not _wraps(equation):
                source, dims = self._positions(equation, dims)
                break
            if name == "pvary" and equation is not None and isinstance(equation.invars[0], core.Var):
                source = equation.invars[0]
                continue
            if equation is None or name not in MOVES or isinstance(equation.invars[0], core.Literal):
                is_small = math.prod(aval_of(source).shape) <= _MOST_CONSTANTS
                source = source_of(source, self._constant_of(source) if is_small else None)
                break
            try:
                # Arrays with whole labels are read as they lie.
                inner = self.moved(equation, dims)
                if has_parts(inner) and not has_parts(dims):
                    raise Unpullable("`reshape` that divides an axis")
                dims = inner
            except Unpullable:
                source = source_of(source)
                break
            source = equation.invars[0]
        assert isinstance(source, Source)
        if has_parts(dims) and not self._is_function:
            return self._on_grid(source, dims)
        return self._leaf_of(source, dims)

    def _on_grid(self, source: Source, dims: tuple[Dim, ...]) -> Node:
        """Return the leaf of an array whose axes stand for parts of labels, or the product that represents it."""
        labels = labels_of(dims)
        is_score = {ROWS, COLUMNS} <= labels and not any(label.startswith(FEATURES) for label in labels)
        feature, factors = f"{FEATURES}{next(self._features):02}", None
        if is_score and jnp.issubdtype(source.dtype, jnp.floating):
            factors = self.grids.as_product(source, dims, feature)
        made = [self.grids.whole(source, dims)] if factors is None else factors
        for each, _ in made:
            self._add_made(each)
        leaves = tuple(self._leaf_of(*each) for each in made)
        if factors is None:
            return leaves[0]
        self.sizes[feature] = self.grids.sizes[feature]
        node = Node("product", leaves)
        self._repeated.append(node)
        return node

    def _leaf_of(self, source: Source, dims: tuple[Dim, ...]) -> Node:
        """Return a leaf with whole labels."""
        labels = labels_of(dims)
        has_features = any(label.startswith(FEATURES) for label in labels)
        match (ROWS in labels, COLUMNS in labels, has_features):
            case (True, True, False):
                role = "score"
            case (True, False, False):
                role = "row"
            case (False, True, False):
                role = "column"
            case (False, False, False):
                role = "scalar"
            case (True, False, True):
                role = "query"
            case (False, False, True) if self.sizes.get(ROWS) == 1:
                # The operand of a single query may lack the axis, which another array has.
                role = "query"
            case (False, True, True):
                role = "key"
            case (False, False, True) if not self._is_function:
                role = "feature"
            case _:
                raise Unpullable("features of pairs of queries and keys")
        if role == "score" and source.constant is None and jnp.issubdtype(source.dtype, jnp.floating):
            source, dims = self._in_rows(source, dims)
        leaf = Leaf(source, dims, role, tuple(label for label in self.batch if label in labels))
        return self.leaves.setdefault(leaf, Node("leaf", leaf=leaf))

    def _add_made(self, source: Source) -> None:
        """Register the equations that compute a generated array."""
        if source.made:
            # `producers_of` is shared by all users of the program, so it is copied and not changed.
            made = {out: equation for equation in source.made for out in equation.outvars}
            self.producers = self._distances.producers = {**self.producers, **made}

    def _positions(self, equation: core.JaxprEqn, dims: tuple[Dim, ...]) -> tuple[Source, tuple[Dim, ...]]:
        """Return the source 0, 1, 2, ... along an axis, which is never read from memory, and its dims.

        Labels of size 1 that a reshape merged into the axis are dropped.
        """
        at = equation.params["dimension"]
        dim = dims[at]
        if isinstance(dim, tuple):
            dim = tuple(x for x in dim if self.grids.sizes[x] > 1 or x in (ROWS, COLUMNS))
        return Source(None, (equation.params["shape"][at],), np.dtype(equation.params["dtype"])), (dim,)

    def _in_rows(self, source: Source, dims: tuple[Dim, ...]) -> tuple[Source, tuple[Dim, ...]]:
        """Return a computed array with queries and keys as its last axes.

        XLA can write that order just as well. Kernels that read tiles of [T, S, N] would read all heads each time.
        """
        axes = [axis for axis, size in enumerate(source.shape) if size > 1]
        is_made = source.key in self.producers and (ROWS,) in dims and (COLUMNS,) in dims
        if not is_made or not axes or dims[axes[-1]] in ((ROWS,), (COLUMNS,)) or isinstance(dims[axes[-1]], int):
            return source, dims
        pair = [dims.index((ROWS,)), dims.index((COLUMNS,))]
        order = (*(axis for axis in range(len(dims)) if axis not in pair), *pair)
        if order == tuple(range(len(dims))):
            # The axes of queries and keys are last already, but have size 1.
            return source, dims
        if (source, order) not in self._moved:
            made = source_made_by(lambda x: lax.transpose(x, order), [source.key])
            self._add_made(made)
            self._moved[source, order] = made
        return self._moved[source, order], tuple(dims[axis] for axis in order)

    def _number(self, var: Any) -> Any:
        """Return the number that all elements of a value equal, or None if that is not known."""
        while not isinstance(var, core.Literal):
            equation = self.producers.get(var)
            if equation is None:
                return None
            if equation.primitive.name not in ("broadcast_in_dim", "reshape", "convert_element_type", "pvary"):
                constant = self._constant_of(var) if math.prod(aval_of(var).shape) == 1 else None
                return None if constant is None else constant.reshape(())
            if equation.primitive.name == "convert_element_type":
                inner = self._number(equation.invars[0])
                return None if inner is None else np.asarray(inner).astype(equation.params["new_dtype"])
            var = equation.invars[0]
        return var.val

    def check_scores(self, score: Node) -> None:
        """Refuse scores that the program itself would compute.

        Raises:
            NotFusible: the scores contain no product, but a leaf that is computed from one.
        """
        repeated = {id(node) for node in self._repeated}
        if not any(node.kind == "product" and id(node) not in repeated for node in nodes_of(score)):
            for leaf in leaves_of(score):
                if leaf in self.doubts:
                    raise NotFusible(self.doubts[leaf])

    def check_leaves(self, leaves: Sequence[Leaf]) -> None:
        """Refuse leaves that are computed from whole rows of scores, which exist only tile by tile.

        Raises:
            MadeOfScores: there is such a leaf.
        """
        # Equations before the first product, such as the layers below, do not depend on any product.
        first = min((self._places.get(x, 0) for x in self.products), default=0)
        for leaf in leaves:
            made: dict[core.Var, core.JaxprEqn] = {}
            seen: set[int] = set()
            waiting: list[tuple[Any, core.JaxprEqn | None]] = [(leaf.source.key, None)]
            while waiting:
                var, below = waiting.pop()
                if not isinstance(var, core.Var) or var in self.results or self._places.get(var, first) < first:
                    continue
                equation = self.producers.get(var)
                if var in self.products:
                    made.setdefault(var, self.producers[leaf.source.key] if below is None else below)
                if equation is not None and id(equation) not in seen:
                    seen.add(id(equation))
                    size = math.prod(aval_of(equation.outvars[0]).shape)
                    shrinks = any(math.prod(aval_of(x).shape) > size for x in equation.invars)
                    below = equation if below is None and shrinks else below
                    waiting += [(x, below) for x in equation.invars]
            if made:
                culprit = next(iter(made.values()))
                what = "a value computed from all scores of a row or a column outside a softmax"
                message = f"`{culprit.primitive.name}`: {what}, {place_of(culprit)}"
                raise MadeOfScores(message, frozenset(made), frozenset(self.products - made.keys()))

    def is_attention(self, var: object, dims: tuple[Dim, ...] | None = None) -> bool:
        """Return whether a value is computed from exponentials and from something like scores.

        Args:
            var: the value.
            dims: the labels of its axes; None if they are not known.
        """
        seen, waiting, names = set(), [var], set()
        while waiting:
            equation = self.producers.get(waiting.pop())  # pyrefly: ignore[bad-argument-type]
            if equation is not None and id(equation) not in seen:
                seen.add(id(equation))
                names.add(equation.primitive.name)
                waiting += [x for x in equation.invars if isinstance(x, core.Var)]
        return isinstance(var, core.Var) and bool({"exp", "exp2", "logistic"} & names) and self.has_product(var, dims)

    def has_product(self, var: core.Var, dims: tuple[Dim, ...] | None = None) -> bool:
        """Return whether a value is computed from scores.

        Scores are a floating product of one operand with queries and one with keys. If labels are not known, any
        product that is larger than its operands counts.
        """
        seen, waiting = set(), [(var, dims)]
        while waiting:
            var, dims = waiting.pop()
            equation = self.producers.get(var)
            if equation is None or (id(equation), dims) in seen:
                continue
            seen.add((id(equation), dims))
            operands = self.operand_dims(equation, dims)
            if equation.primitive.name == "dot_general" and jnp.issubdtype(aval_of(var).dtype, jnp.floating):
                labels = [None if x is None else labels_of(x) & {ROWS, COLUMNS} for x in operands]
                size = max(math.prod(aval_of(x).shape) for x in equation.invars)
                is_large = None in labels and math.prod(aval_of(var).shape) > size
                if is_large or sorted(map(sorted, filter(None, labels))) == [[COLUMNS], [ROWS]]:
                    return True
            pairs = zip(equation.invars, operands, strict=True)
            waiting += [(x, inner) for x, inner in pairs if isinstance(x, core.Var)]
        return False

    def operand_dims(self, equation: core.JaxprEqn, dims: tuple[Dim, ...] | None) -> list[tuple[Dim, ...] | None]:
        """Return the dims of an equation's operands, each None if it is not known; contracted axes have no labels."""
        name = equation.primitive.name
        found: list[tuple[Dim, ...] | None] = [None] * len(equation.invars)
        if dims is None or len(equation.outvars) != 1:
            return found
        shape = aval_of(equation.outvars[0]).shape
        if name in ELEMENTWISE or name == "convert_element_type" or name in SAME:
            found = [broadcast_dims(x, shape, dims) for x in equation.invars]
        elif name == "dot_general":
            found = [tuple(side) for side in factor_dims(equation, dims)]
        elif body_of(equation) is not None:
            # A function with a custom derivative is assumed to be elementwise.
            found = [dims if aval_of(x).shape == shape else None for x in equation.invars]
        elif name in MOVES:
            with contextlib.suppress(Unpullable):
                found = [self.moved(equation, dims)]
        return found


def _wraps(iota: core.JaxprEqn) -> bool:
    """Return whether an iota has more positions than its dtype can count."""
    dtype, size = iota.params["dtype"], iota.params["shape"][iota.params["dimension"]]
    return bool(jnp.issubdtype(dtype, jnp.integer)) and size - 1 > jnp.iinfo(dtype).max


def _is_number(operand: Any, shape: tuple[int, ...]) -> bool:
    """Return whether an operand holds one integer for each element.

    A bitcast of floats is not possible on tiles, because they are float32 whatever the function's dtype.
    """
    aval = aval_of(operand)
    return aval.shape == shape and bool(jnp.issubdtype(aval.dtype, jnp.integer))
