"""Match softmaxes along keys in a program, in the various ways in which they are written."""

import contextlib
import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jax import lax
from jax.extend import core

from blockdiag.fusion.frontend.trace import aval_of
from blockdiag.fusion.ir.linear_terms import sum_of, terms_of
from blockdiag.fusion.ir.tree import (
    COLUMNS,
    ROWS,
    Dim,
    LogSum,
    Node,
    NotFusible,
    Unpullable,
    leaves_of,
    nodes_of,
    number,
    operation,
)
from blockdiag.fusion.regions.axis_labels import MOVES, broadcast_dims, labels_of, place_of, regrouped
from blockdiag.fusion.regions.guards import CASTS, PASSES, POWERS, Guards, NoMatch, Powers, is_along_keys, key_axes
from blockdiag.fusion.regions.log_sum_exps import log_sums

# Operations on softmaxes that are allowed before the product with values.
LINEAR = ("add", "add_any", "div", "mul", "neg", "select_n", "sub")


@dataclass(frozen=True)
class Softmax:
    """exp(score) / (sum of exp(score) + sum of exp(extras)).

    Attributes:
        score: the scores.
        extras: further logits of each row, which have no values.
        mask: the mask of the sum, with the labels of its axes, if the numerator lacks it. The weights must be masked in
            the same way later.
        log_sums: the variables that are the logarithm of the denominator.
    """

    score: Node
    extras: tuple[Node, ...] = ()
    mask: object = None
    log_sums: tuple[LogSum, ...] = ()


def is_of_rows(node: Node) -> bool:
    """Return whether a value is constant along the keys of a row."""
    return all(leaf.role in ("row", "scalar") for leaf in leaves_of(node)) and not any(
        x.kind == "product" for x in nodes_of(node)
    )


def _natural(power: core.JaxprEqn, logit: Node) -> Node:
    """Return a logit in base e; exponentials of the program may have base 2."""
    return operation(lax.mul_p, logit, number(math.log(2))) if power.primitive.name == "exp2" else logit


def _summed(total: core.JaxprEqn, quotient: core.JaxprEqn, dims: tuple[Dim, ...]) -> set[str]:
    """Return the labels of the axes that a divisor sums over; none if the summed array has another shape.

    Args:
        total: the sum.
        quotient: the quotient.
        dims: the labels of the quotient's axes.
    """
    is_alike = aval_of(total.invars[0]).shape == aval_of(quotient.outvars[0]).shape
    return labels_of([dims[axis] for axis in total.params["axes"]]) if is_alike else set()


class Softmaxes(Guards):
    """The softmaxes of one program."""

    def softmax(self, equation: core.JaxprEqn, dims: tuple[Dim, ...]) -> Softmax | None:
        """Return the softmax exp(x - m) / sum(exp(x - m)) that an equation computes, or None.

        The shift m must be constant along keys.
        """
        quotient = self._quotient(equation, dims)
        return None if quotient is None else self._over_sum(*quotient, dims)

    def _over_sum(
        self, powers: Powers, below: object, below_dims: tuple[Dim, ...], dims: tuple[Dim, ...]
    ) -> Softmax | None:
        """Return the softmax of exponentials that are divided by a value, or None if that is not their sum.

        Args:
            powers: the exponentials.
            below, below_dims: the divisor, and the labels of its axes.
            dims: the labels of the exponentials' axes.
        """
        power = powers.equation
        total, total_dims = self.unguarded(below, below_dims, powers)
        shift = self.shift(power.invars[0], dims)
        extras: list[Node] = []
        while (source := self.producer(total)) is not None and source.primitive.name == "add":
            # The divisor is the sum over keys plus a term for each row, such as a sink.
            given = [broadcast_dims(x, aval_of(source.outvars[0]).shape, total_dims) for x in source.invars]
            for one, other in ((0, 1), (1, 0)):
                is_nothing = self.is_negligible(source.invars[other], powers)
                extra = None if is_nothing else self._extra(source.invars[other], given[other], shift, power)
                inner, inner_dims = self.unguarded(source.invars[one], given[one], powers)
                if (is_nothing or extra is not None) and self._is_sum(inner):
                    extras += [] if extra is None else [extra]
                    total, total_dims = inner, inner_dims
                    break
            else:
                return None
        if COLUMNS in labels_of(total_dims) or not self._is_sum(total):
            return None
        source = self.producer(total)
        assert source is not None
        summed, mask = self._of_size(source.invars[0]), None
        masked = self.producer(summed)
        is_masked = masked is not None and self.has_mask(masked) and self.is_zero(masked.invars[1])
        if not self.is_same(summed, powers.var) and masked is not None and is_masked:
            summed = self.skip(masked.invars[2])
            shape = aval_of(masked.outvars[0]).shape
            mask = self.through_moves(masked.invars[0], broadcast_dims(masked.invars[0], shape, dims))
            mask = None if self._hides_no_more(mask, powers, dims) else mask
        if not self.is_same(summed, powers.var) or not is_along_keys(source, total_dims, dims):
            return None
        softmax = self._score(power, dims, extras, mask)
        if powers.mask is None:
            return softmax
        var, given, is_true = powers.mask
        try:
            predicate = self.puller.node(var, given)
        except Unpullable:
            raise NoMatch from None
        cases = (number(-np.inf), softmax.score) if is_true else (softmax.score, number(-np.inf))
        return replace(softmax, score=operation(lax.select_n_p, predicate, *cases), log_sums=())

    def _hides_no_more(self, mask: tuple[object, tuple[Dim, ...]], powers: Powers, dims: tuple[Dim, ...]) -> bool:
        """Return whether a mask of the sum is redundant: the exponentials or their scores have the same mask."""
        if powers.mask is not None and powers.mask[2] and self.is_same_at(mask, self.through_moves(*powers.mask[:2])):
            return True
        scores = self.skip(self.unshifted(powers.equation.invars[0], dims))
        return self._seen(scores, dims, (*mask, True)) is not None

    def _of_size(self, var: object) -> object:
        """Return the operand of an absolute value, as norms compute it; exponentials do not change by it."""
        var = self.skip(var)
        size = self.producer(var)
        return self.skip(size.invars[0]) if size is not None and size.primitive.name == "abs" else var

    def guarded(self, choice: core.JaxprEqn, given: Sequence[tuple[Dim, ...]]) -> object:
        """Return the softmax that a select replaces by 0 where its sum is 0, or None for other selects."""
        for place in (1, 2):
            quotient = self.producer(self.skip(choice.invars[place]))
            found = None if quotient is None else self._quotient(quotient, given[place])
            if found is None or not self.is_zero(choice.invars[3 - place]):
                continue
            total, _ = self.unguarded(found[1], found[2], found[0])
            tested = self.tested_sum(choice.invars[0], found[0])
            if tested is not None and tested[1] == (place == 2) and self.is_same(tested[0], total):
                return choice.invars[place]
        return None

    def _quotient(
        self, equation: core.JaxprEqn, dims: tuple[Dim, ...]
    ) -> tuple[Powers, object, tuple[Dim, ...]] | None:
        """Return exponentials, their divisor and its dims, or None for other equations.

        The equation may also multiply by the divisor's reciprocal.
        """
        if equation.primitive.name not in ("div", "mul"):
            return None
        for one, other in ((0, 1), (1, 0)) if equation.primitive.name == "mul" else ((0, 1),):
            below = equation.invars[other]
            numerator = self.powers(equation.invars[one], dims)
            if numerator is None:
                continue
            below_dims = broadcast_dims(below, aval_of(equation.outvars[0]).shape, dims)
            if equation.primitive.name == "div":
                return numerator, below, below_dims
            inverse = self._inverse(below, below_dims)
            if inverse is not None:
                return numerator, *inverse
        return None

    def _inverse(self, var: object, dims: tuple[Dim, ...]) -> tuple[object, tuple[Dim, ...]] | None:
        """Return the operand and dims of a reciprocal, or None for other values."""
        inner, dims = self.through_moves(var, dims)
        reciprocal = self.producer(inner)
        if reciprocal is None:
            return None
        if reciprocal.primitive.name == "integer_pow" and reciprocal.params["y"] == -1:
            return reciprocal.invars[0], dims
        if reciprocal.primitive.name == "div" and self._is_one(reciprocal.invars[0]):
            shape = aval_of(reciprocal.outvars[0]).shape
            return reciprocal.invars[1], broadcast_dims(reciprocal.invars[1], shape, dims)
        return None

    def _score(self, power: core.JaxprEqn, dims: tuple[Dim, ...], extras: Sequence[Node], mask: object) -> Softmax:
        """Return the softmax of an exponential's argument."""
        whole = score = self.unshifted(power.invars[0], dims)
        has_more = bool(extras)
        while not extras and self._is_maximum(self.shift(score, dims)):
            # With further logits only the last shift may be dropped, because these have no other one.
            score = self.unshifted(score, dims)
        joined = self.producer(self.skip(score))
        if (
            joined is not None
            and joined.primitive.name == "concatenate"
            and dims[joined.params["dimension"]] == (COLUMNS,)
        ):
            score, more = self._parted(joined, dims)
            extras = [*extras, *(_natural(power, x) for x in more)]
        elif math.prod(aval_of(power.outvars[0]).shape[i] for i in key_axes(dims)) != self.sizes[COLUMNS]:
            raise NotFusible(f"`slice` of weights: some of a softmax's keys have no value, {place_of(power)}")
        try:
            node = _natural(power, self.puller.node(score, dims))
        except Unpullable as failure:
            raise NotFusible(f"{failure}, {place_of(power)}") from None
        kept = node if extras else self._without_statistics(node)
        is_whole = power.primitive.name == "exp" and kept is node and mask is None and not has_more
        is_whole = is_whole and (bool(extras) or score is whole)
        own = log_sums(self, whole, dims, self._with_ones) if is_whole and isinstance(whole, core.Var) else ()
        return Softmax(kept, tuple(extras), mask, own)

    def _without_statistics(self, score: Node) -> Node:
        """Drop terms of scores that are row statistics, which do not change a softmax."""
        return self._less_statistics(score) or score

    def _less_statistics(self, score: Node) -> Node | None:
        """Drop row statistics, and products of them with values constant along keys; None if nothing remains."""
        terms = terms_of(score, apart=self._is_statistic)
        left = [(factor, self._term_less_statistics(node)) for factor, node in terms]
        kept = [(factor, node) for factor, node in left if node is not None]
        is_same = len(kept) == len(terms) and all(x is y for (_, x), (_, y) in zip(kept, terms, strict=True))
        return score if is_same else sum_of(kept)

    def _term_less_statistics(self, node: Node) -> Node | None:
        if self._is_statistic(node):
            return None
        for place in {"mul": (1, 0), "div": (1,)}.get(getattr(node.primitive, "name", ""), ()):
            inner, other = node.inputs[1 - place], node.inputs[place]
            if is_of_rows(other) and not is_of_rows(inner):
                left = self._less_statistics(inner)
                if left is None or left is inner:
                    return left and node
                return replace(node, inputs=(left, other) if place else (other, left))
        return node

    def _is_statistic(self, node: Node) -> bool:
        if node.leaf is None or node.leaf.role not in ("row", "scalar"):
            return False
        try:
            self.puller.check_leaves([node.leaf])
        except NotFusible:
            return True
        return self._is_largest(node.leaf.source.key)

    def _is_largest(self, var: object) -> bool:
        """Return whether a value is the maximum of an array that it is subtracted from.

        In a row without keys both are -inf.
        """
        var = self.skip_moves(var, PASSES)
        largest = self.producer(var)
        if largest is None or largest.primitive.name != "reduce_max":
            return False
        whole = self.skip_moves(largest.invars[0], PASSES)
        differences = (x.invars for x in self.named("sub"))
        return any(self.skip_moves(x, PASSES) is whole and self.skip_moves(y, PASSES) is var for x, y in differences)

    def _parted(self, joined: core.JaxprEqn, dims: tuple[Dim, ...]) -> tuple[object, list[Node]]:
        """Split a concatenation into the scores and the further logits."""
        axis, keys = joined.params["dimension"], self.sizes[COLUMNS]
        scores, extras, first = None, [], 0
        for operand in joined.invars:
            size = aval_of(operand).shape[axis]
            if size == keys and first == self.first:
                scores = operand
            elif size == 1:
                extras.append(self.puller.node(operand, (*dims[:axis], (), *dims[axis + 1 :])))
            else:
                scores = None
                break
            first += size
        if scores is None:
            raise NotFusible(
                "`concatenate` of scores: only single logits can be joined to the scores of keys with values, "
                f"{place_of(joined)}"
            )
        return scores, extras

    def normalised(self, power: core.JaxprEqn, dims: tuple[Dim, ...]) -> Softmax:
        """Return the softmax exp(x - m), where m is the log-sum-exp of x.

        The log-sum-exp may be log(sum(exp(x))) or log(sum(exp(x - n))) + n.

        Raises:
            NoMatch: the exponential is anything else.
        """
        shifted = self.producer(self.skip(power.invars[0]))
        shift = self.shift(power.invars[0], dims, CASTS)
        joined = None if shift is None else self.producer(shift[0])
        if power.primitive.name != "exp" or shifted is None or shift is None or joined is None:
            raise NoMatch
        scores = self.skip(shifted.invars[0])
        if joined.primitive.name == "log":
            inner = self._summed_power(*shift, dims)
            if inner is not None and self.is_same(self.skip(inner.invars[0]), scores):
                return self._score(inner, dims, (), None)
        if joined.primitive.name != "add":
            raise NoMatch
        given = [broadcast_dims(x, aval_of(joined.outvars[0]).shape, shift[1]) for x in joined.invars]
        for one, other in ((0, 1), (1, 0)):
            inner = self._summed_power(joined.invars[one], given[one], dims)
            below = None if inner is None else self.producer(self.skip(inner.invars[0]))
            if inner is None or below is None or below.primitive.name != "sub":
                continue
            # A `stop_gradient` on only one of the two shifts changes the derivative.
            taken = self.through_moves(joined.invars[other], given[other])
            is_taken = self.is_same_at(taken, self.shift(inner.invars[0], dims, CASTS))
            if is_taken and self.is_same(self.skip(below.invars[0]), scores):
                return self._score(inner, dims, (), None)
        raise NoMatch

    def _summed_power(self, var: object, given: tuple[Dim, ...], dims: tuple[Dim, ...]) -> core.JaxprEqn | None:
        """Return the exponentials of a value log(sum(exp)), summed along keys, or None for other values.

        Args:
            var: the value.
            given, dims: the dims of the value, and those of the exponentials.
        """
        inner, given = self.through_moves(var, given)
        logarithm = self.producer(inner)
        if logarithm is None or logarithm.primitive.name != "log":
            return None
        inner, given = self.through_moves(logarithm.invars[0], given)
        total = self.producer(inner)
        if total is not None and total.primitive.name == "abs":
            inner, given = self.through_moves(total.invars[0], given)
            total = self.producer(inner)
        if total is None or total.primitive.name != "reduce_sum":
            return None
        power = self.producer(self.skip(total.invars[0]))
        is_power = power is not None and power.primitive.name == "exp"
        return power if is_power and is_along_keys(total, given, dims) else None

    def _is_maximum(self, shift: tuple[object, tuple[Dim, ...]] | None) -> bool:
        """Return whether a shift is a row maximum. Another shift may be so large that scores lose their digits."""
        equation = None if shift is None else self.producer(shift[0])
        return equation is not None and equation.primitive.name == "reduce_max"

    def is_less_largest(self, power: core.JaxprEqn) -> bool:
        """Return whether the argument of an exponential is a difference from a maximum."""
        shifted = self.producer(self.skip(power.invars[0]))
        if shifted is None or shifted.primitive.name != "sub":
            return False
        largest = self.producer(self.skip_moves(shifted.invars[1], PASSES))
        return largest is not None and largest.primitive.name in ("reduce_max", "max")

    def _extra(self, var: object, dims: tuple[Dim, ...], shift: object, of: core.JaxprEqn) -> Node | None:
        """Return the logit of a term exp(logit - shift) of the denominator, or None if it has another form.

        Args:
            var, dims: the term, and the labels of its axes.
            shift: the shift of the scores.
            of: the scores' exponentials.
        """
        inner, inner_dims = self.through_moves(var, dims)
        power = self.producer(inner)
        if COLUMNS in labels_of(inner_dims):
            return None
        if power is None or power.primitive.name not in POWERS:
            if shift is not None or not isinstance(inner, core.Literal):
                return None
            value = float(np.asarray(inner.val))
            return None if value < 0 else number(math.log(value) if value else -math.inf)
        logit = self.producer(self.skip(power.invars[0]))
        if shift is None:
            return _natural(power, self.puller.node(power.invars[0], inner_dims))
        # With another base, the shift would not be the same factor of all exponentials.
        if logit is None or logit.primitive.name not in ("sub", "neg") or power.primitive is not of.primitive:
            return None
        below = broadcast_dims(logit.invars[-1], aval_of(logit.outvars[0]).shape, inner_dims)
        if self.through_moves(logit.invars[-1], below, PASSES) != shift:
            return None
        if logit.primitive.name == "neg":
            return number(0.0)
        given = broadcast_dims(logit.invars[0], aval_of(logit.outvars[0]).shape, inner_dims)
        return _natural(power, self.puller.node(logit.invars[0], given))

    def along_queries(self, var: object, dims: tuple[Dim, ...] | None) -> str | None:
        """Return the message for a softmax along the queries that a value is computed from, or None."""
        for equation, own in self._until_products(var, dims):
            if equation.primitive.name != "div":
                continue
            total = self.producer(self.skip_moves(equation.invars[1]))
            power = self.producer(self.skip(equation.invars[0]))
            if power is None or power.primitive.name not in POWERS or total is None:
                continue
            is_along = total.primitive.name == "reduce_sum" and _summed(total, equation, own) == {ROWS}
            if is_along and self._has_scores(power.invars[0], own):
                rule = "softmaxes must be along the keys, which the product with values sums over"
                return f"`reduce_sum` along the queries, of a softmax: {rule}, {place_of(total)}"
        return None

    def _has_scores(self, var: object, dims: tuple[Dim, ...]) -> bool:
        """Return whether the nearest products that a value is computed from include one of queries and keys."""
        products = [(x, own) for x, own in self._until_products(var, dims) if x.primitive.name == "dot_general"]
        sides = [[labels_of(side or ()) & {ROWS, COLUMNS} for side in self.puller.operand_dims(*x)] for x in products]
        return any(side in ([{ROWS}, {COLUMNS}], [{COLUMNS}, {ROWS}]) for side in sides)

    def _until_products(
        self, var: object, dims: tuple[Dim, ...] | None
    ) -> Iterator[tuple[core.JaxprEqn, tuple[Dim, ...]]]:
        """Yield the equations of a value down to the nearest products, as far as labels are known, with their dims."""
        seen: set[tuple[int, tuple[Dim, ...]]] = set()
        waiting = [(var, dims)]
        while waiting:
            one, own = waiting.pop()
            equation = self.producer(one)
            if equation is None or own is None or (id(equation), own) in seen:
                continue
            seen.add((id(equation), own))
            yield equation, own
            if equation.primitive.name != "dot_general":
                waiting += zip(equation.invars, self.puller.operand_dims(equation, own), strict=True)

    def why_made(self, var: object, dims: tuple[Dim, ...], otherwise: str) -> str:
        """Return the message for a value that depends on a reduction of whole rows or columns of scores.

        Args:
            var, dims: the value, and the labels of its axes.
            otherwise: the message if no cause is found.
        """
        return self.along_queries(var, dims) or self.misused(var) or otherwise

    def misused(self, var: object, but: Container[str] = ()) -> str | None:
        """Return the message for a forbidden operation on a softmax or its sum, or None if there is none.

        Args:
            var: the value whose computation is searched.
            but: the primitives that are allowed on softmaxes.
        """
        power = self.producer(self.skip_moves(var, PASSES))
        if power is not None and power.primitive.name in POWERS and self.is_less_largest(power):
            return self.undivided(power)
        seen: set[int] = set()
        waiting: list[tuple[object, core.JaxprEqn | None]] = [(var, None)]
        while waiting:
            one, user = waiting.pop()
            equation = self.producer(self.skip_moves(one, PASSES))
            if equation is None or id(equation) in seen:
                continue
            seen.add(id(equation))
            power = None
            if equation.primitive.name == "div":
                power = self.producer(self.skip(equation.invars[0]))
            if power is None or power.primitive.name not in POWERS:
                waiting += [(x, equation) for x in equation.invars]
                continue
            total = self.producer(self.skip_moves(equation.invars[1]))
            if total is not None and total.primitive.name == "reduce_sum" and user is not None:
                if user.primitive.name in but:
                    seen.remove(id(equation))
                    continue
                summed = self.producer(self.skip(total.invars[0]))
                if user.primitive.name == "select_n" and summed is not None and summed.primitive.name == "select_n":
                    return f"`select_n` of a softmax whose sum has a different mask, {place_of(user)}"
                if user.primitive.name in ("add", "add_any", "sub"):
                    # The other operand of the sum is the cause.
                    return None
                allowed = "weights may only be added to each other, scaled, masked by 0 and cast"
                return f"`{user.primitive.name}` of a softmax: {allowed}, {place_of(user)}"
            if total is not None and any(self._is_sum(self.skip_moves(x)) for x in total.invars):
                return self.beside_sum(total, power)
        return None

    def beside_sum(self, changed: core.JaxprEqn, power: core.JaxprEqn) -> str:
        """Return the message for an equation that changes the sum of a softmax.

        Args:
            changed: the equation.
            power: the summed exponentials.
        """
        said = self._beside_powers(changed, power)
        if said is not None:
            return said
        hint = "weights form a softmax only if they are divided by the sum itself"
        if changed.primitive.name in ("add", "max"):
            hint = "remove it if it only guards rows that see no key; they give 0 without it"
        if changed.primitive.name == "stop_gradient":
            hint = "a softmax includes the gradient of its sum; remove the `stop_gradient`"
        return f"`{changed.primitive.name}` of the sum of a softmax: {hint}, {place_of(changed)}"

    def _beside_powers(self, joined: core.JaxprEqn, power: core.JaxprEqn) -> str | None:
        """Return the message for other exponentials that are added to a sum of exponentials, or None."""
        added = [self.producer(self.skip_moves(x, PASSES)) for x in joined.invars]
        others = [x.primitive.name for x in added if x is not None and x.primitive.name in (*POWERS, "pow")]
        if joined.primitive.name != "add" or not others:
            return None
        rule = "additional exponentials, such as a sink's, must have the same base and the same number subtracted"
        return (
            f"`add` of `{others[0]}` to the sum of the `{power.primitive.name}` of scores: {rule}, {place_of(joined)}"
        )

    def undivided(self, power: core.JaxprEqn) -> str:
        """Return the message for exponentials as weights whose product is not divided by their sum either."""
        for joined in self.named("add"):
            totals = [self.producer(self.skip_moves(x)) for x in joined.invars]
            summed = [self.producer(self.skip(x.invars[0])) for x in totals if x is not None and x.invars]
            if any(x is power for x in summed) and (said := self._beside_powers(joined, power)) is not None:
                return said
        what = f"`{power.primitive.name}` of scores minus their maximum that is not divided by its sum along the keys"
        return f"{what}: to merge parts of the keys, use softmaxes and their `logsumexp`, {place_of(power)}"

    def _is_sum(self, var: object) -> bool:
        equation = self.producer(var)
        return equation is not None and equation.primitive.name == "reduce_sum"

    def _is_one(self, var: object) -> bool:
        inner = self.skip_moves(var)
        return isinstance(inner, core.Literal) and bool(np.all(np.asarray(inner.val) == 1))

    def divided(
        self, product: core.JaxprEqn, out_dims: tuple[Dim, ...], var: object, dims: tuple[Dim, ...]
    ) -> tuple[Softmax, core.Var, tuple[Dim, ...]] | None:
        """Return the softmax of a product of exponentials that is divided by their sum afterwards.

        Args:
            product: the product of exponentials with values.
            out_dims: the labels of its result.
            var, dims: the exponentials, and the labels of their axes.

        Returns:
            The softmax, the quotient, and the quotient's dims; None if there is no such division.
        """
        try:
            power_var, dims = self.through_moves(var, dims)
            powers = self.powers(power_var, dims)
        except NoMatch:
            return None
        if powers is None:
            return None
        places = {"div": (0,), "mul": (0, 1)}
        for quotient, one in ((x, one) for name, each in places.items() for x in self.named(name) for one in each):
            below = quotient.invars[1 - one]
            if isinstance(below, core.Literal):
                continue
            whole = self._with_ones(quotient.invars[one], product.outvars[0], out_dims)
            if whole is None:
                continue
            given = broadcast_dims(below, aval_of(quotient.outvars[0]).shape, whole)
            inverse = (below, given) if quotient.primitive.name == "div" else self._inverse(below, given)
            softmax = None if inverse is None else self._over_sum(powers, *inverse, dims)
            if softmax is not None:
                return softmax, quotient.outvars[0], whole
        return None

    def _with_ones(self, var: object, product: core.Var, dims: tuple[Dim, ...]) -> tuple[Dim, ...] | None:
        """Return the dims of a value that is a product's result after moves, or None for other values.

        The moves may permute or merge axes, and add or remove axes of size 1.
        """
        var = self.skip(var)
        if var is product:
            return dims
        equation = self.producer(var)
        if equation is None or equation.primitive.name not in MOVES:
            return None
        inner = self._with_ones(equation.invars[0], product, dims)
        if inner is None:
            return None
        if equation.primitive.name == "transpose":
            return tuple(inner[axis] for axis in equation.params["permutation"])
        if equation.primitive.name == "reshape":
            with contextlib.suppress(Unpullable):
                given, shape = (aval_of(x).shape for x in (equation.invars[0], equation.outvars[0]))
                merged = regrouped(shape, given, inner, self.sizes)
                return merged if labels_of(merged) == labels_of(inner) else None
        if equation.primitive.name == "squeeze":
            removed = equation.params["dimensions"]
            kept = tuple(dim for axis, dim in enumerate(inner) if axis not in removed)
            return kept if all(inner[axis] == () for axis in removed) else None
        rest = list(zip(aval_of(equation.invars[0]).shape, inner, strict=True))
        found: list[Dim] = []
        for size in aval_of(equation.outvars[0]).shape:
            if rest and rest[0][0] == size:
                found.append(rest.pop(0)[1])
            elif size == 1:
                found.append(())
            else:
                return None
        try:
            moved = self.moved(equation, tuple(found))
        except NoMatch:
            return None
        return tuple(found) if not rest and moved == inner else None
