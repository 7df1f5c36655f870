"""Weights as sums of terms: softmaxes, each times a factor."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import lax
from jax.extend import core

from blockdiag.fusion.frontend.trace import aval_of
from blockdiag.fusion.ir.factors import stopped
from blockdiag.fusion.ir.linear_terms import is_finite, is_linear_in_products
from blockdiag.fusion.ir.recursion import Steps, finished
from blockdiag.fusion.ir.tree import (
    COLUMNS,
    ELEMENTWISE,
    Dim,
    Node,
    NotFusible,
    Unpullable,
    leaves_of,
    nodes_of,
    number,
    operation,
)
from blockdiag.fusion.regions.axis_labels import MOVES, broadcast_dims, labels_of, place_of
from blockdiag.fusion.regions.guards import NoMatch
from blockdiag.fusion.regions.softmaxes import Softmax, Softmaxes


@dataclass(frozen=True)
class Term:
    """A softmax, or None for 1, times a weight."""

    softmax: Softmax | None
    weight: Node | None


def _shared_labels(product: Node) -> set[str]:
    """Return the batch labels that both factors of a product and the values share."""
    first, second = (set(filter(_is_shared, node.leaf.labels if node.leaf else ())) for node in product.inputs)
    return first & second


def lie_in_order(dims: Sequence[Dim], wanted: Sequence[Dim]) -> bool:
    """Return whether the wanted dims that an array has occur in this order."""
    places = [dims.index(dim) for dim in wanted if dim in dims]
    return places == sorted(places)


def _is_shared(label: str) -> bool:
    """Return whether a batch label is shared with the values."""
    return label.startswith("b")


class Matcher(Softmaxes):
    """Matcher of weights that are linear in softmaxes, or functions of single scores.

    Attributes:
        is_alone: whether weights without a softmax need no batch axis that queries, keys and values share. Keys must
            then come before features in memory order, which distinguishes them from the matrix of a layer.
    """

    def __init__(self, jaxpr: core.Jaxpr, sizes: dict[str, int], batch: Sequence[str]) -> None:
        super().__init__(jaxpr, sizes, batch)
        self.is_alone = False
        # The terms of a value, or why there are none. The key includes the first key that a slice of weights keeps.
        self._known: dict[tuple[core.Var, tuple[Dim, ...], int], list[Term] | str] = {}
        # Exponentials that count as this softmax, because their product with values is divided by their sum.
        self._divided: tuple[object, tuple[Dim, ...], Softmax] | None = None

    def has_softmax(self, var: object, dims: tuple[Dim, ...]) -> bool:
        """Return whether a value is linear in softmaxes."""
        if not self.may_be_linear(var):
            return False
        try:
            return any(term.softmax is not None for term in self.terms(var, dims))
        except (NoMatch, NotFusible, Unpullable):
            return False

    def may_be_weights(self, var: object, dims: tuple[Dim, ...]) -> bool:
        """Return whether a value is linear in softmaxes, or any function of single scores."""
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
        return bool(products) and all(map(self._is_of_keys, products))

    @property
    def may_be_plain(self) -> bool:
        """Return whether non-softmax weights are allowed: their scores and the values must share a batch axis."""
        return self.is_alone or any(_is_shared(label) for label in self.puller.batch)

    def _is_of_keys(self, product: Node) -> bool:
        """Return whether a product may be one of queries and keys, and not of a layer."""
        if _shared_labels(product):
            return True
        if not self.is_alone:
            return False
        keys = [x.leaf for x in product.inputs if x.leaf is not None and x.leaf.role == "key"]
        return any(lie_in_order(key.dims, ((COLUMNS,), *((x,) for x in key.features))) for key in keys)

    def why_not(self, var: object, dims: tuple[Dim, ...]) -> str:
        """Return why a value is not linear in softmaxes, or an empty string if that is not known."""
        try:
            self.terms(var, dims)
        except NoMatch as failure:
            return str(failure)
        return ""

    def terms(self, var: object, dims: tuple[Dim, ...]) -> list[Term]:
        """Return the terms that add up to a value.

        Raises:
            NoMatch: the value is not linear in softmaxes.
        """
        return finished(self._terms(var, dims), NoMatch, NotFusible, Unpullable)

    def _terms(self, var: object, dims: tuple[Dim, ...]) -> Steps[list[Term]]:
        """Compute `terms`, memoised for each value."""
        if not isinstance(var, core.Var):
            raise NoMatch
        key = (var, dims, self.first)
        if key not in self._known:
            try:
                self._known[key] = yield self._new_terms(var, dims)
            except NoMatch as failure:
                self._known[key] = str(failure)
                raise
        known = self._known[key]
        if isinstance(known, str):
            raise NoMatch(known)
        return known

    def _new_terms(self, var: core.Var, dims: tuple[Dim, ...]) -> Steps[list[Term]]:
        equation = self.producer(var)
        if equation is None or COLUMNS not in labels_of(dims):
            raise NoMatch
        if self._divided is not None and self._divided[:2] == (var, dims):
            return [Term(self._divided[2], None)]
        softmax = self.softmax(equation, dims)
        if softmax is not None:
            return [Term(softmax, None)]
        name, operands = equation.primitive.name, equation.invars
        if self.is_cast(equation):
            return (yield self._terms(operands[0], dims))
        if name == "optimization_barrier":
            return (yield self._terms(operands[equation.outvars.index(var)], dims))
        if name == "stop_gradient":
            return [self._stopped(term, equation.primitive) for term in (yield self._terms(operands[0], dims))]
        if name in MOVES:
            return (yield self._terms(operands[0], self.moved(equation, dims)))
        if name == "slice":
            before, self.first = self.first, self._first_column(equation, dims)
            try:
                return (yield self._terms(operands[0], self._sliced(equation, dims)))
            finally:
                self.first = before
        if name not in ELEMENTWISE:
            raise NoMatch(f"`{name}` of weights cannot be computed tile by tile, {place_of(equation)}")
        given = [broadcast_dims(x, aval_of(equation.outvars[0]).shape, dims) for x in operands]
        match name:
            case "neg":
                terms = yield self._terms(operands[0], given[0])
                return [self._scaled(term, number(-1.0), lax.mul_p) for term in terms]
            case "exp" | "exp2":
                return [Term(self.normalised(equation, dims), None)]
            case "add" | "sub":
                left, right = yield self._both_terms(operands, given)
                if name == "sub":
                    right = [self._scaled(term, number(-1.0), lax.mul_p) for term in right]
                return left + right
            case "mul":
                for one, other in ((0, 1), (1, 0)):
                    try:
                        terms = yield self._terms(operands[one], given[one])
                    except NoMatch:
                        continue
                    factor = self.puller.node(operands[other], given[other])
                    return [self._scaled(term, factor, lax.mul_p) for term in terms]
            case "div":
                try:
                    terms = yield self._terms(operands[0], given[0])
                except NoMatch:
                    over_sums = self._over_sums(operands, given)
                    if over_sums is None:
                        raise
                    return over_sums
                factor = self.puller.node(operands[1], given[1])
                return [self._scaled(term, factor, lax.div_p) for term in terms]
            case "select_n":
                return (yield self._selected(equation, given))
        raise NoMatch

    def divided_terms(
        self, product: core.JaxprEqn, out_dims: tuple[Dim, ...], var: object, dims: tuple[Dim, ...]
    ) -> tuple[list[Term], core.Var, tuple[Dim, ...]] | None:
        """Return the terms of weights linear in exponentials, if the product with values is divided by their sum.

        Returns:
            The terms, the quotient, and the quotient's dims; None if there is no such division.
        """
        for power, power_dims in self._below(var, dims):
            found = self.divided(product, out_dims, power, power_dims)
            # Unmasked weights do not match a masked sum.
            if found is None or found[0].mask is not None:
                continue
            softmax, quotient, quotient_dims = found
            terms = self._terms_over(var, dims, (power, power_dims, softmax))
            if terms is not None:
                return terms, quotient, quotient_dims
        return None

    def _over_sums(self, operands: Sequence[Any], given: Sequence[tuple[Dim, ...]]) -> list[Term] | None:
        """Return the terms of a value linear in exponentials over their sum, or None for other quotients."""
        for power, power_dims in self._below(operands[0], given[0]):
            powers = self.powers(power, power_dims)
            softmax = None if powers is None else self._over_sum(powers, operands[1], given[1], power_dims)
            if softmax is not None and softmax.mask is None:
                terms = self._terms_over(operands[0], given[0], (power, power_dims, softmax))
                if terms is not None:
                    return terms
        return None

    def _terms_over(
        self, var: object, dims: tuple[Dim, ...], divided: tuple[object, tuple[Dim, ...], Softmax]
    ) -> list[Term] | None:
        """Return the terms of a value with exponentials taken as a softmax, or None if it is not linear in them."""
        before = self._known, self._divided
        self._known, self._divided = {}, divided
        try:
            return self.terms(var, dims)
        except NoMatch:
            return None
        finally:
            self._known, self._divided = before

    def _below(self, var: object, dims: tuple[Dim, ...]) -> Iterator[tuple[object, tuple[Dim, ...]]]:
        """Yield a value and those that it is a multiple of, with their dims. Sums are not followed."""
        seen: set[object] = set()
        waiting = [(var, dims)]
        while waiting:
            var, dims = waiting.pop()
            equation = self.producer(var)
            if equation is None or var in seen or COLUMNS not in labels_of(dims):
                continue
            seen.add(var)
            yield var, dims
            name, operands = equation.primitive.name, equation.invars
            if self.is_cast(equation):
                waiting.append((operands[0], dims))
            elif name in MOVES:
                with contextlib.suppress(NoMatch):
                    waiting.append((operands[0], self.moved(equation, dims)))
            elif name in ("mul", "div", "select_n", "neg"):
                shape = aval_of(equation.outvars[0]).shape
                inner = operands[1:] if name == "select_n" else operands[:1] if name == "div" else operands
                waiting += [(x, broadcast_dims(x, shape, dims)) for x in inner]

    def _both_terms(self, operands: Sequence[Any], given: Sequence[tuple[Dim, ...]]) -> Steps[list[list[Term]]]:
        """Return the terms of both operands of a sum.

        An operand without softmaxes is a term itself if the other operand has softmaxes.

        Raises:
            NoMatch: neither operand has softmaxes, and one of them has no terms.
        """
        found: list[list[Term] | None] = []
        failures = []
        for operand, dims in zip(operands, given, strict=True):
            try:
                found.append((yield self._terms(operand, dims)))
            except NoMatch as failure:
                found.append(None)
                failures.append(failure)
        if failures and not any(term.softmax is not None for terms in found for term in terms or ()):
            raise failures[0]
        pairs = zip(found, operands, given, strict=True)
        return [self._weight(x, dims) if terms is None else terms for terms, x, dims in pairs]

    def _weight(self, var: object, dims: tuple[Dim, ...]) -> list[Term]:
        """Return a value as a term without a softmax, or no term if it is 0.

        Raises:
            NoMatch: the value reads an array of all its scores from memory.
        """
        node = self.puller.node(var, dims)
        for leaf in leaves_of(node):
            if leaf in self.puller.doubts:
                raise NoMatch(self.puller.doubts[leaf])
        return [] if node.kind == "number" and not np.any(node.number) else [Term(None, node)]

    def _selected(self, equation: core.JaxprEqn, given: Sequence[tuple[Dim, ...]]) -> Steps[list[Term]]:
        """Return the terms of a select between 0 and a value that is linear in softmaxes."""
        if len(equation.invars) != 3:
            raise NoMatch
        kept = self._unless_nan(equation) or self.guarded(equation, given)
        if kept is not None:
            terms = yield self._terms(kept, given[[x is kept for x in equation.invars].index(True)])
            # Softmaxes are finite, because rows without keys, where a program's own may be NaN, are 0 here.
            if all(term.softmax is not None and is_finite(term.weight or number(1.0)) for term in terms):
                return terms
        predicate = self.puller.node(equation.invars[0], given[0])
        mask = self.through_moves(equation.invars[0], given[0])
        for kept, dropped in ((1, 2), (2, 1)):
            other = self.puller.node(equation.invars[dropped], given[dropped])
            if other.kind != "number" or other.number != 0:
                continue
            cases = (number(1.0), number(0.0)) if kept == 1 else (number(0.0), number(1.0))
            factor = operation(lax.select_n_p, predicate, *cases)
            terms = yield self._terms(equation.invars[kept], given[kept])
            if kept == 2:
                # A softmax whose sum has the same mask becomes a softmax of masked scores.
                terms = [self._masked(term, predicate, mask) for term in terms]
            return [self._scaled(term, factor, lax.mul_p) for term in terms]
        raise NoMatch

    def _unless_nan(self, equation: core.JaxprEqn) -> core.Var | None:
        """Return the value that a select keeps wherever it is not NaN or infinite, or None for other selects."""
        test = self.producer(equation.invars[0])
        if test is None or test.primitive.name not in ("ne", "eq", "is_finite"):
            return None
        kept = equation.invars[2 if test.primitive.name == "is_finite" else 1]
        first, last = test.invars[0], test.invars[-1]
        is_infinity = isinstance(last, core.Literal) and bool(np.isinf(last.val).all())
        is_test = first is last if test.primitive.name != "eq" else is_infinity
        return kept if is_test and isinstance(kept, core.Var) and first is kept else None

    @staticmethod
    def _masked(term: Term, predicate: Node, mask: object) -> Term:
        softmax = term.softmax
        if softmax is None or softmax.mask is None or softmax.mask != mask:
            return term
        score = operation(lax.select_n_p, predicate, number(-np.inf), softmax.score)
        return Term(Softmax(score, softmax.extras), term.weight)

    def plain(self, var: object, dims: tuple[Dim, ...]) -> tuple[list[Term], str]:
        """Return weights without a softmax as one term, or no terms and the reason.

        The weights must be a function of scores that is not linear in them.
        """
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
        # Without a batch axis that queries, keys and values share, this may be a layer between two matrices. A value
        # that is linear in its products is one.
        are_shared = all(map(self._is_of_keys, products))
        return ([Term(None, node)] if products and are_shared and not is_linear_in_products(node) else []), ""

    @staticmethod
    def _stopped(term: Term, primitive: core.Primitive) -> Term:
        """Return a term without derivatives."""
        softmax, weight = term.softmax, term.weight
        if softmax is not None:
            extras = tuple(stopped(x, primitive) for x in softmax.extras)
            softmax = Softmax(stopped(softmax.score, primitive), extras, softmax.mask)
        return Term(softmax, None if weight is None else stopped(weight, primitive))

    @staticmethod
    def _scaled(term: Term, factor: Node, primitive: core.Primitive) -> Term:
        weight = term.weight or number(1.0)
        return Term(term.softmax, operation(primitive, weight, factor))

    @staticmethod
    def _first_column(equation: core.JaxprEqn, dims: tuple[Dim, ...]) -> int:
        """Return the first key of a slice of weights."""
        if COLUMNS not in labels_of(dims):
            return 0
        if (COLUMNS,) not in dims:
            raise NoMatch
        return int(equation.params["start_indices"][dims.index((COLUMNS,))])

    def _sliced(self, equation: core.JaxprEqn, dims: tuple[Dim, ...]) -> tuple[Dim, ...]:
        """Return the dims of the operand of a slice.

        The slice takes one index of an axis, or the keys without further logits.
        """
        found = list(dims)
        given, shape = aval_of(equation.invars[0]).shape, aval_of(equation.outvars[0]).shape
        for axis, (whole, size) in enumerate(zip(given, shape, strict=True)):
            if whole == size or dims[axis] == (COLUMNS,):
                continue
            if size != 1:
                raise NoMatch
            found[axis] = int(equation.params["start_indices"][axis])
        return tuple(found)
