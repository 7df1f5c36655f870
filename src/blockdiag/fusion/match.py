"""Finds attention in a program: products with values of what is linear in a softmax of scores."""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax import lax
from jax.extend import core

from blockdiag.fusion.dims import (
    MOVES,
    broadcast_dims,
    equations_by_name,
    labels_of,
    parts_of,
    place_of,
    producers_of,
    users_of,
)
from blockdiag.fusion.factors import stopped
from blockdiag.fusion.follow import followed, read_by
from blockdiag.fusion.guards import CASTS, NoMatch, linear_in_powers
from blockdiag.fusion.linear import is_linear_in_products
from blockdiag.fusion.pull import MadeOfScores
from blockdiag.fusion.softmaxes import LINEAR, Softmax, Softmaxes
from blockdiag.fusion.trace import aval_of
from blockdiag.fusion.tree import (
    COLUMNS,
    ELEMENTWISE,
    ROWS,
    Dim,
    Node,
    NotFusible,
    Region,
    Unpullable,
    leaves_of,
    nodes_of,
    number,
    operation,
    source_of,
)


@dataclass(frozen=True)
class _Term:
    """A softmax, or None for 1, times a weight."""

    softmax: Softmax | None
    weight: Node | None


@dataclass(frozen=True)
class _Unmatched:
    """A product neither side of which was found to have probabilities.

    Attributes:
        weights: the side that was looked at.
        reason: says why it is not linear in softmaxes; nothing where that is not known.
        refused: says why it is no function of scores on tiles; nothing where that is not known.
        lacks_queries: whether that is because nothing has an axis of queries.
        dims: what the axes of the weights stand for; None where that is not known.
    """

    matcher: "Matcher"
    equation: core.JaxprEqn
    weights: object
    reason: Callable[[], str] = str
    refused: Callable[[], str] = str
    lacks_queries: bool = False
    dims: tuple[Dim, ...] | None = None


class QueryWithoutAxis(NotFusible):
    """There are softmaxes before products, and nothing but that their one query has no axis is known against them.

    Attributes:
        products: with values.
    """

    def __init__(self, message: str, products: Sequence[core.JaxprEqn]) -> None:
        super().__init__(message)
        self.products = products


def _refusal(unmatched: Sequence[_Unmatched]) -> str | None:
    """Why attention cannot be fused; None where there seems to be none."""
    for one in unmatched:
        if one.matcher.puller.is_attention(one.weights, one.dims):
            whole = "`dot_general` of what is not linear in softmaxes of scores along the axis that it sums"
            return one.reason() or f"{whole}, {place_of(one.equation)}"
    refused = next(filter(None, (one.refused() for one in unmatched)), None)
    return refused and f"there is no product with a softmax of scores, nor with another function of them: {refused}"


def find_regions(jaxpr: core.Jaxpr) -> dict[core.Var, tuple[Region, ...]]:
    """The attention of a flat program: results of products, each of which is a sum of regions.

    Raises:
        NotFusible: there is a softmax of scores before a product, but it breaks a rule.
    """
    return regions_and_sides(jaxpr)[0]


def regions_and_sides(jaxpr: core.Jaxpr) -> tuple[dict[core.Var, tuple[Region, ...]], dict[int, int]]:
    """`find_regions`, and of the products that are regions as they stand the side of the weights, by `id`."""
    unmatched: list[_Unmatched] = []
    users, matches = users_of(jaxpr), _matches(jaxpr, unmatched)
    if not matches and (refusal := _refusal(unmatched)) is not None:
        lone = [one.equation for one in unmatched if one.lacks_queries]
        if lone and _refusal([one for one in unmatched if not one.lacks_queries]) is None:
            raise QueryWithoutAxis(refusal, lone)
        raise NotFusible(refusal)
    if any(region.score is not None for one in matches for region in one.regions):
        # Beside attention, what looks like it without a softmax may be a layer with matrices for each head or expert.
        producers = producers_of(jaxpr)
        matches = [one for one in matches if not _is_layer(one, producers)]
    sides = {id(one.equation): one.side for one in matches if one.result is one.equation.outvars[0]}
    read = {var for one in matches for region in one.regions for var in read_by(region)}
    return dict(followed(one.result, one.regions, users, read) for one in matches), sides


@dataclass(frozen=True)
class _Match:
    """A product that becomes regions.

    Attributes:
        side: which operand has the weights.
        result: whose value the sum of the regions is: the product's, or a quotient's.
    """

    equation: core.JaxprEqn
    side: int
    result: core.Var
    regions: tuple[Region, ...]


def _is_layer(match: _Match, producers: Mapping[core.Var, core.JaxprEqn]) -> bool:
    """Whether keys and values are arguments of the function, and queries are computed, without a softmax."""

    def is_argument(var: object) -> bool:
        while isinstance(var, core.Var) and (equation := producers.get(var)) is not None:
            if equation.primitive.name not in (*MOVES, *CASTS, "slice"):
                return False
            var = equation.invars[0]
        return True

    if any(region.score is not None for region in match.regions):
        return False
    products = [x for region in match.regions for x in nodes_of(region.weight) if x.kind == "product"]
    pairs = [[None if x.leaf is None else x.leaf.source.key for x in product.inputs] for product in products]
    values = [region.value.key for region in match.regions]
    return all(is_argument(key) and not is_argument(query) for query, key in pairs) and all(map(is_argument, values))


def _matches(jaxpr: core.Jaxpr, unmatched: list[_Unmatched]) -> list[_Match]:
    """The products with weights; others are added to `unmatched`."""
    found: list[_Match] = []
    results: frozenset[core.Var] = frozenset()
    for equation in equations_by_name(jaxpr).get("dot_general", ()):
        sides = []
        for side in (0, 1):
            result, regions = _regions_of(_Sought(jaxpr, equation, side, results), unmatched)
            if regions:
                sides.append(_Match(equation, side, result, regions))
            if any(region.score is not None for region in regions):
                break
        # Softmaxes before other functions of scores, which may be values of theirs.
        chosen = sides[-1:] if sides and sides[-1].regions[0].score is not None else sides[:1]
        found += chosen
        # What another attention gives is in memory, whatever it is made of.
        results |= {match.result for match in chosen}
    return found


def is_attention(jaxpr: core.Jaxpr, product: core.JaxprEqn) -> bool:
    """Whether a product is of values and of weights that are made tile by tile."""
    for side in (0, 1):
        try:
            _, regions = _regions_of(_Sought(jaxpr, product, side), [])
        except NotFusible:
            continue
        if regions:
            return True
    return False


def attention_count(jaxpr: core.Jaxpr) -> int:
    """How many products are of values and of weights that are made tile by tile."""
    return sum(x.primitive.name == "dot_general" and is_attention(jaxpr, x) for x in jaxpr.eqns)


@dataclass(frozen=True)
class _Sought:
    """A product one side of which may have probabilities.

    Attributes:
        results: of other attention.
    """

    jaxpr: core.Jaxpr
    equation: core.JaxprEqn
    side: int
    results: frozenset[core.Var] = frozenset()


def _regions_of(sought: _Sought, unmatched: list[_Unmatched]) -> tuple[core.Var, tuple[Region, ...]]:
    """The regions of a product, and the variable whose value they are.

    None where no side has probabilities, which is added to `unmatched`.
    """
    equation, side = sought.equation, sought.side
    weights = equation.invars[side]
    if isinstance(weights, core.Literal):
        return equation.outvars[0], ()
    rest: list[_Unmatched] = []
    refusal, found = None, None
    try:
        found = _regions_beside(sought, {}, rest)
    except NotFusible as failure:
        refusal = failure
    contracted, shared = equation.params["dimension_numbers"]
    parts: dict[int, tuple[int, ...]] = {}
    if (found is None or not found[1]) and (shared[side] or weights in linear_in_powers(sought.jaxpr)):
        # Batch axes that scores had apart may be one axis of their weights.
        parts = parts_of(producers_of(sought.jaxpr), weights)
    parts = {axis: each for axis, each in parts.items() if axis not in contracted[side]}
    if parts:
        with contextlib.suppress(NotFusible):
            divided = _regions_beside(sought, parts, [])
            if divided[1]:
                return divided
    if found is None:
        assert refusal is not None
        raise refusal
    unmatched += rest
    return found


def _regions_beside(
    sought: _Sought, parts: dict[int, tuple[int, ...]], unmatched: list[_Unmatched]
) -> tuple[core.Var, tuple[Region, ...]]:
    """`_regions_with`; products of which something is known of whole rows are arrays beside the scores of others."""
    stored: frozenset[core.Var] = frozenset()
    refusal: MadeOfScores | None = None
    while True:
        rest: list[_Unmatched] = []
        try:
            found = _regions_with(sought, stored, parts, rest)
        except MadeOfScores as failure:
            if failure.products <= stored or not failure.others - stored:
                raise refusal or failure from None
            refusal = refusal or failure
            stored |= failure.products
            continue
        except NotFusible:
            if refusal is not None:
                raise refusal from None
            raise
        if refusal is not None and not found[1]:
            raise refusal
        unmatched += rest
        return found


def _regions_with(
    sought: _Sought, stored: frozenset[core.Var], parts: dict[int, tuple[int, ...]], unmatched: list[_Unmatched]
) -> tuple[core.Var, tuple[Region, ...]]:
    """`_regions_of`, with more than one label for some axes of weights.

    Args:
        stored: products that are arrays in memory.
        parts: of these axes, which are not summed over: the sizes of their labels.
    """
    jaxpr, equation, side = sought.jaxpr, sought.equation, sought.side
    replaced = equation.outvars[0]
    contracted, shared = equation.params["dimension_numbers"]
    weights, value = equation.invars[side], equation.invars[1 - side]
    if isinstance(value, core.Literal):
        return replaced, ()
    sizes: dict[str, int] = {}
    dims: dict[int, list[Dim]] = {side: [()] * len(aval_of(weights).shape), 1 - side: [()] * len(aval_of(value).shape)}

    def assign(label: str, **axes: int) -> tuple[str, ...]:
        places = [(side if name == "weights" else 1 - side, axis) for name, axis in axes.items()]
        at, axis = places[0]
        each = parts.get(axis, ()) if at == side else ()
        labels = tuple(f"{label}_{i}" for i in range(len(each))) or (label,)
        sizes.update(zip(labels, each or (aval_of(equation.invars[at]).shape[axis],), strict=True))
        for at, axis in places:
            dims[at][axis] = labels
        return labels

    if len(contracted[0]) != 1:
        reason = f"`dot_general` that sums over {len(contracted[0])} axes of weights: make keys one axis"
        matcher = Matcher(jaxpr, sizes, [])
        message = f"{reason}, {place_of(equation)}"
        unmatched.append(_Unmatched(matcher, equation, weights, lambda: message))
        return replaced, ()
    batch = []
    for i, axes in enumerate(zip(*shared, strict=True)):
        batch += assign(f"b{i}", weights=axes[side], value=axes[1 - side])
    assign(COLUMNS, weights=contracted[side][0], value=contracted[1 - side][0])
    free = [axis for axis, dim in enumerate(dims[side]) if dim == ()]
    if not free:
        matcher = Matcher(jaxpr, sizes, batch)
        if matcher.has_softmax(weights, tuple(dims[side])):
            refused = f"queries have no axis: give them one, of size 1, {place_of(equation)}"
            unmatched.append(_Unmatched(matcher, equation, weights, refused=lambda: refused, lacks_queries=True))
        return replaced, ()
    # Keys are read once for each tile of rows, so that these lie along the longest axis that values lack.
    rows = max(reversed(free), key=lambda axis: aval_of(weights).shape[axis])
    parts = {axis: each for axis, each in parts.items() if axis != rows}
    for i, axis in enumerate(axis for axis in free if axis != rows):
        batch += assign(f"g{i}", weights=axis)
    assign(ROWS, weights=rows)
    columns = [axis for axis, dim in enumerate(dims[1 - side]) if dim == ()]
    for i, axis in enumerate(columns):
        assign(f"d{i}", value=axis)
    weight_axes = [dims[side][axis] for axis in free]
    value_axes = [dims[1 - side][axis] for axis in columns]
    out_dims = tuple(
        [dims[side][axis] for axis in shared[side]]
        + (weight_axes + value_axes if side == 0 else value_axes + weight_axes)
    )
    matcher = Matcher(jaxpr, sizes, batch)
    matcher.puller.results, matcher.puller.stored = sought.results, stored
    given = tuple(dims[side])
    missed = _Unmatched(matcher, equation, weights, functools.partial(matcher.why_not, weights, given), dims=given)
    refusal = ""
    try:
        if not matcher.may_be_linear(weights):
            raise NoMatch
        terms = matcher.terms(weights, given)
        if any(term.softmax is not None and term.softmax.mask is not None for term in terms):
            raise NoMatch
    except NoMatch:
        divided = matcher.divided(equation, out_dims, weights, given)
        if divided is not None:
            softmax, replaced, out_dims = divided
            terms = [_Term(softmax, None)]
        elif matcher.may_be_plain:
            terms, refusal = matcher.plain(weights, given)
        else:
            # A model has many layers, and what a layer is made of reaches down through all that it is added to.
            unmatched.append(replace(missed, refused=lambda: matcher.plain(weights, given)[1]))
            return replaced, ()
    if not terms:
        unmatched.append(replace(missed, refused=lambda: refusal))
        return replaced, ()
    regions = []
    for term in terms:
        score = None if term.softmax is None else term.softmax.score
        extras = () if term.softmax is None else term.softmax.extras
        leaves = leaves_of(score, *extras, term.weight)
        if score is not None:
            matcher.puller.check_scores(score)
            matcher.puller.check_leaves(leaves_of(score, *extras))
        try:
            matcher.puller.check_leaves(leaves_of(term.weight))
        except MadeOfScores as failure:
            if score is not None:
                # Of what weights are scaled by, which may be another function of themselves.
                why = matcher.misused(weights, but=LINEAR) or str(failure)
                raise MadeOfScores(why, failure.products, failure.others) from None
            # The leaf may be the largest score, or the sum, of a softmax that something else is done to; or this is
            # another layer, below attention.
            reason = matcher.misused(weights) or str(failure)
            unmatched.append(replace(missed, reason=functools.partial(str, reason)))
            return replaced, ()
        regions.append(
            Region(
                sizes=dict(sizes),
                batch=tuple(batch),
                score=score,
                extras=extras,
                weight=term.weight,
                leaves=leaves,
                value=source_of(value),
                value_dims=tuple(dims[1 - side]),
                out_dims=out_dims,
                dtype=np.dtype(aval_of(replaced).dtype),
                log_sums=() if term.softmax is None else term.softmax.log_sums,
            )
        )
    return replaced, tuple(regions)


def _shared_labels(product: Node) -> set[str]:
    """The batch labels that values have, too, of both factors."""
    first, second = (set(filter(_is_shared, node.leaf.labels if node.leaf else ())) for node in product.inputs)
    return first & second


def _is_shared(label: str) -> bool:
    """Whether a batch label is one that values have, too."""
    return label.startswith("b")


class Matcher(Softmaxes):
    """Softmaxes and what is linear in them."""

    def has_softmax(self, var: object, dims: tuple[Dim, ...]) -> bool:
        """Whether a value is linear in softmaxes."""
        if not self.may_be_linear(var):
            return False
        try:
            return any(term.softmax is not None for term in self.terms(var, dims))
        except (NoMatch, NotFusible, Unpullable):
            return False

    def may_be_weights(self, var: object, dims: tuple[Dim, ...]) -> bool:
        """Whether a value is linear in softmaxes, or made of single scores, be it linear in these or not."""
        with contextlib.suppress(NoMatch, NotFusible, Unpullable):
            if self.may_be_linear(var):
                return bool(self.terms(var, dims))
        if not self.may_be_plain:
            return False
        try:
            node = self.puller.node(var, dims)
        except (NoMatch, NotFusible, Unpullable):
            return False
        products = [x for x in nodes_of(node) if x.kind == "product"]
        return bool(products) and all(map(_shared_labels, products))

    @property
    def may_be_plain(self) -> bool:
        """Whether what is no softmax may be weights: scores of these, and values, share a batch axis."""
        return any(_is_shared(label) for label in self.puller.batch)

    def why_not(self, var: object, dims: tuple[Dim, ...]) -> str:
        """Why a value is not linear in softmaxes; empty where that is not known."""
        try:
            self.terms(var, dims)
        except NoMatch as failure:
            return str(failure)
        return ""

    def terms(self, var: object, dims: tuple[Dim, ...]) -> list[_Term]:
        """Softmaxes and weights whose products add up to a value.

        Raises:
            NoMatch: it is something else.
        """
        equation = self.producer(var)
        if not isinstance(var, core.Var) or equation is None or COLUMNS not in labels_of(dims):
            raise NoMatch
        softmax = self.softmax(equation, dims)
        if softmax is not None:
            return [_Term(softmax, None)]
        name, operands = equation.primitive.name, equation.invars
        if self.is_cast(equation):
            return self.terms(operands[0], dims)
        if name == "optimization_barrier":
            return self.terms(operands[equation.outvars.index(var)], dims)
        if name == "stop_gradient":
            return [self._stopped(term, equation.primitive) for term in self.terms(operands[0], dims)]
        if name in MOVES:
            return self.terms(operands[0], self.moved(equation, dims))
        if name == "slice":
            before, self.first = self.first, self._first_column(equation, dims)
            try:
                return self.terms(operands[0], self._sliced(equation, dims))
            finally:
                self.first = before
        if name not in ELEMENTWISE:
            raise NoMatch(f"`{name}` of weights cannot be computed a tile at a time, {place_of(equation)}")
        given = [broadcast_dims(x, aval_of(equation.outvars[0]).shape, dims) for x in operands]
        match name:
            case "neg":
                return [self._scaled(term, number(-1.0), lax.mul_p) for term in self.terms(operands[0], given[0])]
            case "exp" | "exp2":
                return [_Term(self.normalised(equation, dims), None)]
            case "add" | "sub":
                left, right = self._both_terms(operands, given)
                if name == "sub":
                    right = [self._scaled(term, number(-1.0), lax.mul_p) for term in right]
                return left + right
            case "mul":
                for one, other in ((0, 1), (1, 0)):
                    try:
                        terms = self.terms(operands[one], given[one])
                    except NoMatch:
                        continue
                    factor = self.puller.node(operands[other], given[other])
                    return [self._scaled(term, factor, lax.mul_p) for term in terms]
            case "div":
                terms = self.terms(operands[0], given[0])
                factor = self.puller.node(operands[1], given[1])
                return [self._scaled(term, factor, lax.div_p) for term in terms]
            case "select_n":
                return self._selected(equation, given)
        raise NoMatch

    def _both_terms(self, operands: Sequence[Any], given: Sequence[tuple[Dim, ...]]) -> list[list[_Term]]:
        """Of both operands of a sum; beside softmaxes what is none is a weight, as it is."""
        found: list[list[_Term] | None] = []
        failures = []
        for operand, dims in zip(operands, given, strict=True):
            try:
                found.append(self.terms(operand, dims))
            except NoMatch as failure:
                found.append(None)
                failures.append(failure)
        if failures and not any(term.softmax is not None for terms in found for term in terms or ()):
            raise failures[0]
        pairs = zip(found, operands, given, strict=True)
        return [self._weight(x, dims) if terms is None else terms for terms, x, dims in pairs]

    def _weight(self, var: object, dims: tuple[Dim, ...]) -> list[_Term]:
        """A value as it is, nothing where it is 0.

        Raises:
            NoMatch: all its scores would be made in memory.
        """
        node = self.puller.node(var, dims)
        for leaf in leaves_of(node):
            if leaf in self.puller.doubts:
                raise NoMatch(self.puller.doubts[leaf])
        return [] if node.kind == "number" and not np.any(node.number) else [_Term(None, node)]

    def _selected(self, equation: core.JaxprEqn, given: Sequence[tuple[Dim, ...]]) -> list[_Term]:
        """Where a mask holds 0 else what is linear, or the other way round."""
        if len(equation.invars) != 3:
            raise NoMatch
        kept = self._unless_nan(equation) or self.guarded(equation, given)
        if kept is not None:
            terms = self.terms(kept, given[[x is kept for x in equation.invars].index(True)])
            # Softmaxes are finite: rows that see no key, where they may be NaN, are 0 here.
            if all(term.softmax is not None and term.weight is None for term in terms):
                return terms
        predicate = self.puller.node(equation.invars[0], given[0])
        mask = self.through_moves(equation.invars[0], given[0])
        for kept, dropped in ((1, 2), (2, 1)):
            other = self.puller.node(equation.invars[dropped], given[dropped])
            if other.kind != "number" or other.number != 0:
                continue
            cases = (number(1.0), number(0.0)) if kept == 1 else (number(0.0), number(1.0))
            factor = operation(lax.select_n_p, predicate, *cases)
            terms = self.terms(equation.invars[kept], given[kept])
            if kept == 2:
                # Softmaxes whose sum has the same mask are masked by it as a whole.
                terms = [self._masked(term, predicate, mask) for term in terms]
            return [self._scaled(term, factor, lax.mul_p) for term in terms]
        raise NoMatch

    def _unless_nan(self, equation: core.JaxprEqn) -> core.Var | None:
        """The value that is chosen wherever it is finite; None where something else decides."""
        test = self.producer(equation.invars[0])
        if test is None or test.primitive.name not in ("ne", "eq", "is_finite"):
            return None
        kept = equation.invars[2 if test.primitive.name == "is_finite" else 1]
        first, last = test.invars[0], test.invars[-1]
        is_infinity = isinstance(last, core.Literal) and bool(np.isinf(last.val).all())
        is_test = first is last if test.primitive.name != "eq" else is_infinity
        return kept if is_test and isinstance(kept, core.Var) and first is kept else None

    @staticmethod
    def _masked(term: _Term, predicate: Node, mask: object) -> _Term:
        softmax = term.softmax
        if softmax is None or softmax.mask is None or softmax.mask != mask:
            return term
        score = operation(lax.select_n_p, predicate, number(-np.inf), softmax.score)
        return _Term(Softmax(score, softmax.extras), term.weight)

    def plain(self, var: object, dims: tuple[Dim, ...]) -> tuple[list[_Term], str]:
        """A weight without a softmax, where it is a function of scores, not these; else nothing, and why."""
        equation = self.producer(self.skip_moves(var))
        if equation is None or equation.primitive.name == "dot_general":
            return [], ""
        try:
            node = self.puller.node(var, dims)
        except (NotFusible, Unpullable) as failure:
            return [], str(failure)
        for leaf in leaves_of(node):
            if leaf in self.puller.doubts:
                return [], self.puller.doubts[leaf]
        products = [x for x in nodes_of(node) if x.kind == "product"]
        # Without an axis that queries, keys and values share it is as likely a layer between matrices of weights, and
        # what is linear in its products is one.
        are_shared = all(map(_shared_labels, products))
        return ([_Term(None, node)] if products and are_shared and not is_linear_in_products(node) else []), ""

    @staticmethod
    def _stopped(term: _Term, primitive: core.Primitive) -> _Term:
        """The same without derivatives."""
        softmax, weight = term.softmax, term.weight
        if softmax is not None:
            extras = tuple(stopped(x, primitive) for x in softmax.extras)
            softmax = Softmax(stopped(softmax.score, primitive), extras, softmax.mask)
        return _Term(softmax, None if weight is None else stopped(weight, primitive))

    @staticmethod
    def _scaled(term: _Term, factor: Node, primitive: core.Primitive) -> _Term:
        weight = term.weight or number(1.0)
        return _Term(term.softmax, operation(primitive, weight, factor))

    @staticmethod
    def _first_column(equation: core.JaxprEqn, dims: tuple[Dim, ...]) -> int:
        """Where a slice of weights begins."""
        if COLUMNS not in labels_of(dims):
            return 0
        if (COLUMNS,) not in dims:
            raise NoMatch
        return int(equation.params["start_indices"][dims.index((COLUMNS,))])

    def _sliced(self, equation: core.JaxprEqn, dims: tuple[Dim, ...]) -> tuple[Dim, ...]:
        """The dims of the operand of a slice: of one index, or of the keys from those and further logits."""
        found = list(dims)
        given, shape = aval_of(equation.invars[0]).shape, aval_of(equation.outvars[0]).shape
        for axis, (whole, size) in enumerate(zip(given, shape, strict=True)):
            if whole == size or dims[axis] == (COLUMNS,):
                continue
            if size != 1:
                raise NoMatch
            found[axis] = int(equation.params["start_indices"][axis])
        return tuple(found)
