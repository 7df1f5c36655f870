"""Candidate products of weights and values, and how their weights are computed from scores."""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.extend import core

from blockdiag.fusion.frontend.trace import aval_of
from blockdiag.fusion.ir.tree import COLUMNS, ELEMENTWISE, ROWS, Dim
from blockdiag.fusion.regions.axis_labels import MOVES, SAME, labels_of, places_in, producers_of
from blockdiag.fusion.regions.guards import PASSES, POWERS
from blockdiag.fusion.regions.weight_terms import Matcher

ALIKE = frozenset({*MOVES, *PASSES, *SAME, "convert_element_type"})
"""Primitives that keep the values of elements and may move them."""

UNKNOWN = "r"
"""Prefix of the labels of reduced axes whose meaning is not known."""


def alike(producers: Mapping[core.Var, core.JaxprEqn], var: Any) -> Any:
    """Return the value below moves and casts, or None for a literal."""
    while isinstance(var, core.Var) and (equation := producers.get(var)) and equation.primitive.name in ALIKE:
        var = equation.invars[0]
    return None if isinstance(var, core.Literal) else var


def reduced_axes(equation: core.JaxprEqn) -> Sequence[int]:
    """Return the axes of a reduction, or none for other equations."""
    return equation.params.get("axes", ()) if equation.primitive.name.startswith(("reduce_", "arg")) else ()


def query_axes(product: core.JaxprEqn, side: int) -> Sequence[int | None]:
    """Return the axes of weights that may be the axis of queries, the likeliest first.

    Args:
        side: the operand that may be the weights.
    """
    contracted, shared = product.params["dimension_numbers"]
    weights = product.invars[side]
    if isinstance(weights, core.Literal) or not contracted[side]:
        return ()
    shape = aval_of(weights).shape
    free = [axis for axis in range(len(shape)) if axis not in (*contracted[side], *shared[side])]
    # A single query may have no axis. If values have an axis of queries, too, it is next to that of keys.
    return sorted(reversed(free), key=lambda axis: -shape[axis]) or [None, *sorted(shared[side])[-1:]]


class Candidate:
    """A product whose operands may be weights and values.

    A value computed from scores is either a pair, with one number for each query and key, or a row statistic, which
    lacks at least one of these axes.

    Attributes:
        is_attention: whether there are products of queries and keys, and either exponentials are summed along the keys,
            or queries, keys and values share a batch axis.
        has_sum: whether there are such products, and exponentials are summed along queries or keys.
        is_unclear: whether there are exponentials, and a product the labels of whose axes are not known.
    """

    def __init__(self, closed: core.ClosedJaxpr, product: core.JaxprEqn, side: int, queries: int | None) -> None:
        contracted, shared = product.params["dimension_numbers"]
        self._closed, self._product, self._side = closed, product, side
        self._producers, self._places = producers_of(closed.jaxpr), places_in(closed.jaxpr)
        weights = product.invars[side]
        assert isinstance(weights, core.Var)
        self._weights, shape = weights, aval_of(weights).shape
        names = {axis: f"{'b' if axis in shared[side] else 'g'}{axis}" for axis in range(len(shape))}
        # The labels of products of queries and keys.
        self._pair = {COLUMNS} if queries is None else {ROWS, COLUMNS}
        if queries is not None:
            names[queries] = ROWS
        keys = [shape[axis] for axis in contracted[side]]
        sizes = {names[axis]: size for axis, size in enumerate(shape) if axis not in contracted[side]}
        batch = [x for x in sizes if x != ROWS]
        self._matcher = Matcher(closed.jaxpr, sizes | {COLUMNS: math.prod(keys)}, batch)
        parts = self._matcher.puller.grids.divided(COLUMNS, keys) if len(keys) > 1 else (COLUMNS,)
        names |= dict(zip(contracted[side], parts, strict=True))
        # The labels of axes, the equations that compute the weights from scores, and the products that give the scores.
        self._dims: dict[core.Var, tuple[Dim, ...]] = {}
        self._ways: dict[core.Var, list[tuple[Dim, ...]]] = {}
        self._slice: set[int] = set()
        self._scores: set[int] = set()
        self._label(tuple((names[axis],) for axis in range(len(shape))))
        # For each value computed from scores: whether it is a pair.
        self._is_pair: dict[core.Var, bool] = {}
        self._spread()
        is_bare = all(id(x) in self._scores or x.primitive.name in ALIKE for x in self._pair_path(self._weights))
        summed = set() if is_bare else self._summed_labels()
        self.has_sum = bool(summed)
        self.is_attention = not is_bare and (COLUMNS in summed or self._shares_batch())

    def _label(self, dims: tuple[Dim, ...]) -> None:
        """Label the axes of all values that the weights are computed from, down to the scores."""
        seen: set[tuple[core.Var, tuple[Dim, ...] | None]] = set()
        waiting: list[tuple[Any, tuple[Dim, ...] | None]] = [(self._weights, dims)]
        has_powers, has_unknown = False, False
        while waiting:
            var, own = waiting.pop()
            if not isinstance(var, core.Var) or (var, own) in seen:
                continue
            seen.add((var, own))
            if own is not None and self._pair <= labels_of(own):
                self._dims.setdefault(var, own)
                self._ways.setdefault(var, []).append(own)
            equation = self._producers.get(var)
            if equation is None:
                continue
            self._slice.add(id(equation))
            has_powers |= equation.primitive.name in (*POWERS, "logistic")
            has_unknown |= own is None and equation.primitive.name == "dot_general"
            operands = self._operand_dims(equation, var, own)
            if equation.primitive.name == "dot_general":
                sides = [labels_of(x or ()) & {ROWS, COLUMNS} for x in operands]
                queries = self._pair - {COLUMNS}
                if own is not None and sides in ([queries, {COLUMNS}], [{COLUMNS}, queries]):
                    self._scores.add(id(equation))
                    continue
            waiting += zip(equation.invars, operands, strict=True)
        self.is_unclear = has_powers and has_unknown

    def _operand_dims(
        self, equation: core.JaxprEqn, var: core.Var, dims: tuple[Dim, ...] | None
    ) -> list[tuple[Dim, ...] | None]:
        """Return the dims of an equation's operands, also for equations that may move elements along these axes."""
        if dims is None:
            return [None] * len(equation.invars)
        name, shape = equation.primitive.name, aval_of(var).shape
        found = self._matcher.puller.operand_dims(equation, dims)
        if name == "dot_general":
            sides = zip(found, equation.params["dimension_numbers"][0], map(aval_of, equation.invars), strict=True)
            return [
                tuple(self._unknown(aval.shape[axis]) if axis in summed else dim for axis, dim in enumerate(own or ()))
                for own, summed, aval in sides
            ]
        if name in MOVES:
            return found
        axes = reduced_axes(equation)
        for place, operand in enumerate(equation.invars):
            given = aval_of(operand).shape
            if found[place] is not None or not given or (place and name.startswith("scatter")):
                continue
            if axes and len(given) == len(shape) + len(axes):
                rest = iter(dims)
                summed = {axis: self._summed(given[axis], dims, len(axes)) for axis in axes}
                found[place] = tuple(summed[axis] if axis in axes else next(rest) for axis in range(len(given)))
            elif len(given) == len(shape):
                pairs = zip(dims, given, shape, strict=True)
                is_table = name == "gather"
                found[place] = tuple(() if size != own and (size == 1 or is_table) else x for x, size, own in pairs)
            elif given == (*shape, 1):
                found[place] = (*dims, ())
        return found

    def _summed(self, size: int, dims: tuple[Dim, ...], count: int) -> Dim:
        """Return the label of a reduced axis: queries or keys if the result lacks only that one, else a new label.

        Args:
            size: the size of the axis.
            dims: the labels of the result.
            count: the number of reduced axes.
        """
        sizes = self._matcher.puller.grids.sizes
        missing = self._pair - labels_of(dims)
        if count == len(missing) == 1 and size == sizes[next(iter(missing))]:
            return tuple(missing)
        return self._unknown(size)

    def _unknown(self, size: int) -> Dim:
        """Return a label for a reduced axis whose meaning is not known."""
        label = f"{UNKNOWN}{size}"
        self._matcher.puller.grids.sizes[label] = size
        return (label,)

    def _spread(self) -> None:
        """Find all values computed from scores, in the whole program."""
        for equation in self._closed.jaxpr.eqns:
            of_scores = self._given(equation)
            is_score = id(equation) in self._scores
            if not of_scores and not is_score:
                continue
            pairs = [x for x in of_scores if self._is_pair[x]]
            is_plain = equation.primitive.name in ELEMENTWISE or equation.primitive.name in ALIKE
            for var in equation.outvars:
                same = [x for x in pairs if aval_of(x).shape == aval_of(var).shape and x in self._dims]
                if is_plain and equation.primitive.name not in MOVES and same:
                    self._dims.setdefault(var, self._dims[same[0]])
                is_made_of_pairs = is_score or not is_plain or bool(pairs) or self._meets_keys(equation)
                self._is_pair[var] = var in self._dims and is_made_of_pairs

    def _meets_keys(self, equation: core.JaxprEqn) -> bool:
        """Return whether an equation combines row statistics with values that vary along keys, such as positions."""
        dims = self._dims.get(equation.outvars[0])
        if dims is None or equation.primitive.name in ALIKE:
            return False
        operands = zip(equation.invars, self._operand_dims(equation, equation.outvars[0], dims), strict=True)
        apart = (own for x, own in operands if not isinstance(x, core.Literal) and x not in self._is_pair)
        return any(COLUMNS in labels_of(own or ()) for own in apart)

    def _summed_labels(self) -> set[str]:
        """Return which of the labels of queries and keys exponentials of scores are summed along."""
        found: set[str] = set()
        for equation in self._closed.jaxpr.eqns:
            summed = self._given(equation, True) if equation.primitive.name == "reduce_sum" else []
            if summed and self._has_powers(summed[0]):
                found |= self._labels(summed[0], equation.params["axes"])
        return found & {ROWS, COLUMNS}

    def _has_powers(self, var: Any) -> bool:
        """Return whether a value is computed from exponentials of scores, not counting those of row statistics."""
        return any(equation.primitive.name in POWERS for equation in self._pair_path(var))

    def _shares_batch(self) -> bool:
        """Return whether queries, keys and values have a batch axis in common."""
        for equation in self._closed.jaxpr.eqns:
            if id(equation) in self._scores:
                dims = self._dims[equation.outvars[0]]
                _, shared = equation.params["dimension_numbers"]
                # The first axes of a product are its batch axes.
                if any(x.startswith("b") for x in labels_of(dims[: len(shared[0])])):
                    return True
        return False

    def _labels(self, var: core.Var, axes: Sequence[int]) -> set[str]:
        return labels_of([self._best_ways(var)[0][axis] for axis in axes]) if var in self._dims else set()

    def _best_ways(self, var: core.Var) -> list[tuple[Dim, ...]]:
        """Return the possible dims of a value with the fewest unknown labels."""
        ways = self._ways.get(var) or [self._dims[var]]
        unknown = [sum(x[0] == UNKNOWN for x in labels_of(dims)) for dims in ways]
        return [dims for dims, count in zip(ways, unknown, strict=True) if count == min(unknown)]

    def _given(self, equation: core.JaxprEqn, is_pair: bool | None = None) -> list[core.Var]:
        """Return the operands computed from scores: only pairs, only row statistics, or both for None."""
        given = [x for x in equation.invars if isinstance(x, core.Var) and x in self._is_pair]
        return [x for x in given if is_pair is None or self._is_pair[x] == is_pair]

    def _producer(self, var: Any) -> core.JaxprEqn | None:
        return self._producers.get(var) if isinstance(var, core.Var) else None

    def _skip(self, var: Any) -> Any:
        """Return the value below moves and casts, or None for a literal."""
        return alike(self._producers, var)

    def _pair_path(self, var: Any) -> Iterator[core.JaxprEqn]:
        """Yield the equations that compute a value from scores through pairs only."""
        seen: set[int] = set()
        waiting = [var]
        while waiting:
            one = waiting.pop()
            equation = self._producer(one)
            if equation is None or not self._is_pair.get(one) or id(equation) in seen:
                continue
            seen.add(id(equation))
            yield equation
            waiting += [] if id(equation) in self._scores else equation.invars

    @functools.cached_property
    def _path(self) -> set[int]:
        """Return the `id` of the equations that compute the weights from scores through pairs only."""
        return set(map(id, self._pair_path(self._weights)))

    @functools.cached_property
    def _ancestors(self) -> dict[core.Var, frozenset[core.Var]]:
        """Map each value computed from scores to all such values that it depends on."""
        found: dict[core.Var, frozenset[core.Var]] = {}
        for equation in self._closed.jaxpr.eqns:
            given = self._given(equation)
            for var in equation.outvars:
                if var in self._is_pair:
                    found[var] = frozenset(given).union(*(found[x] for x in given))
        return found

    def _is_made_of(self, var: core.Var, other: core.Var) -> bool:
        return other in self._ancestors[var]
