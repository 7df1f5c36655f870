"""Name the equation that keeps an attention from being fused: the first one that breaks a rule, in program order.

The compiler matches attention from the product with values upwards, so the first obstacle it meets is the last one
in the function. To find the first one in program order, the function is cut after each value between the scores and the
product with values. The rest is replaced by a softmax, by a division by the sum, or by nothing, and then a product with
values. The compiler decides whether the shorter function can be fused. A value breaks a rule if neither it nor any
value computed from it can be completed in this way.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend import core

from blockdiag.fusion.frontend.trace import aval_of, body_of
from blockdiag.fusion.ir.tree import COLUMNS, ELEMENTWISE, ROWS
from blockdiag.fusion.regions.axis_labels import equations_by_name, labels_of, place_of, producers_of
from blockdiag.fusion.regions.candidates import ALIKE, alike, query_axes, reduced_axes
from blockdiag.fusion.regions.grids import has_parts
from blockdiag.fusion.regions.guards import POWERS
from blockdiag.fusion.regions.trials import AS_POWERS, AS_WEIGHTS, CanFuse, Trials

_USERS_WORDS: Mapping[str, str] = {
    "dot_general": "einsum, matmul",
    "conv_general_dilated": "convolution",
    "gather": "indexing, take_along_axis",
    "concatenate": "concatenate, roll, pad",
    "rev": "flip, [::-1]",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_sum": "sum, mean",
    "slice": "indexing, roll",
    "scan": "scan, fori_loop",
}
"""The users' names of primitives that are called otherwise in functions."""

_SUMS = ("add", "add_any", "sub")

_MOST_CANDIDATES = 4
"""Limit of candidates that are examined, because the layers of a model are mostly alike."""


@dataclass(frozen=True)
class Diagnosis:
    """The findings for a program whose attention is not fused.

    Attributes:
        reason: the first equation that breaks a rule, and the rule, in words; None if it was not found.
        has_attention: whether anything in the program looks like attention.
    """

    reason: str | None
    has_attention: bool


def diagnosis(closed: core.ClosedJaxpr, can_fuse: CanFuse) -> Diagnosis:
    """Return why no attention of a flat program is fused."""
    if any(_is_placed(x) for x in closed.in_avals):
        # A part of such a program cannot be traced without its mesh.
        return Diagnosis(None, has_attention=True)
    found = [
        x
        for product in equations_by_name(closed.jaxpr).get("dot_general", ())
        for x in _of_product(closed, product, can_fuse)
    ]
    likely = [x for x in found if x.is_attention]
    # If queries and keys are exchanged, a softmax along the keys looks like one along the queries.
    others = [x for x in found if x.has_sum and not x.is_attention]
    count = 0
    for candidate in (*likely, *others):
        if count < _MOST_CANDIDATES and not candidate.is_fine:
            count += 1
            reason = candidate.reason()
            if reason is not None:
                return Diagnosis(reason, has_attention=True)
    return Diagnosis(None, bool(likely) or any(x.is_unclear for x in found))


def _of_product(closed: core.ClosedJaxpr, product: core.JaxprEqn, can_fuse: CanFuse) -> "Iterator[_Reasons]":
    """Yield the candidates of a product; for each side up to the first axis of queries that makes it attention."""
    for side in (0, 1):
        for axis in query_axes(product, side):
            candidate = _Reasons(closed, product, side, axis, can_fuse)
            yield candidate
            if candidate.is_attention:
                break


def _is_placed(aval: Any) -> bool:
    """Return whether an array varies over axes of a mesh, or has a sharding in its type."""
    sharding = getattr(aval, "sharding", None)
    return bool(getattr(aval, "vma", ())) or any(x is not None for x in getattr(sharding, "spec", ()))


def softmax_in(jaxpr: core.Jaxpr) -> core.JaxprEqn | None:
    """Return the first equation that divides exponentials by their sum, or None if there is none."""
    producers = producers_of(jaxpr)
    for equation in jaxpr.eqns:
        if equation.primitive.name != "div":
            continue
        power, total = (producers.get(alike(producers, x)) for x in equation.invars)
        if power is None or power.primitive.name not in POWERS or total is None:
            continue
        if total.primitive.name == "reduce_sum" and alike(producers, total.invars[0]) is power.outvars[0]:
            return equation
    return None


class _Reasons(Trials):
    """A candidate that words the reason why it is not fused."""

    def reason(self) -> str | None:
        """Return the first equation that breaks a rule, in words; None if there is none, or it is not known."""
        if self.is_fine:
            return None
        nodes = [
            var
            for equation in self._closed.jaxpr.eqns
            if id(equation) in self._slice and self._may_break(equation)
            for var in equation.outvars
            if self._is_pair.get(var) and var not in self._simple
        ]
        broken = self._first_broken(nodes)
        if not self._is_known_to_be_attention(nodes):
            return None
        if broken is None and self._can_complete(self._weights, AS_POWERS):
            return self._why_not_divided()
        # Every value may be scores, but the last one is not valid weights.
        var = self._skip(self._weights) if broken is None else broken
        return None if var in self._simple or not self._is_pair.get(var) else self._why(var)

    def _why(self, var: core.Var) -> str | None:
        """Return why a value breaks a rule although its operands break none."""
        equation = self._producers[var]
        name = equation.primitive.name
        pairs, of_rows = self._given(equation, True), self._given(equation, False)
        if name == "dot_general" and pairs:
            return self._mixed(equation, pairs[0])
        if id(equation) in self._scores:
            return None
        if reduced_axes(equation):
            return self._whole(equation, self._user(equation))
        if name not in ELEMENTWISE:
            return self._moved(equation, pairs)
        if of_rows:
            return self._of_rows(equation, var, of_rows)
        if any(map(self._is_weights, pairs)):
            others = [x for x in pairs if name in _SUMS and not self._can_complete(x, AS_WEIGHTS)]
            made = [
                x
                for x in map(self._skip, others)
                if x not in self._simple and id(self._producers[x]) not in self._scores
            ]
            return self._why(made[0]) if made else _not_linear(equation)
        # The operands passed although row statistics entered them, because a softmax ignores such terms.
        of_rows = [x for one in self._pair_path(var) for x in self._given(one, False)]
        return self._of_rows(equation, var, of_rows) if of_rows else None

    def _user(self, reduction: core.JaxprEqn) -> core.JaxprEqn:
        """Return the equation that subtracts a reduction from scores or divides by it, or else the reduction itself."""
        made = set(reduction.outvars)
        for equation in self._closed.jaxpr.eqns:
            given = self._given(equation)
            if made.isdisjoint(given):
                continue
            if equation.primitive.name in ("sub", "div") and equation.invars[1] in made:
                return equation
            if equation.primitive.name in ALIKE or (equation.primitive.name in ELEMENTWISE and len(given) == 1):
                made.update(equation.outvars)
        return reduction

    def _noun(self, pairs: Sequence[core.Var]) -> str:
        return "weights" if any(map(self._is_weights, pairs)) else "scores"

    def _between(self, var: core.Var) -> str:
        """Return, in words, between which stages of attention a value stands."""
        after = [x for x in self._ancestors if self._is_made_of(x, var)]
        is_before = any(self._producers[x].primitive.name in POWERS for x in after)
        return "it is between the scores and their " + ("softmax" if is_before else "product with values")

    def _moved(self, equation: core.JaxprEqn, pairs: Sequence[core.Var]) -> str:
        """Return the message for an equation that needs scores outside of a tile."""
        noun = self._noun(pairs)
        name = equation.primitive.name
        said = f"{_named(equation)} of {noun} cannot be computed tile by tile"
        if name == "slice" and noun == "weights" and self._is_along(equation, COLUMNS):
            return f"`slice` of weights: some of a softmax's keys have no value, {place_of(equation)}"
        if body_of(equation) is not None:
            said = f"`{name}` has a derivative of its own that cannot be computed tile by tile"
        rest = "" if noun == "weights" else f"; {self._between(equation.outvars[0])}"
        return f"{said}{rest}, {place_of(equation)}"

    def _is_along(self, equation: core.JaxprEqn, label: str) -> bool:
        """Return whether an equation with one operand changes the size of an axis."""
        given, made = aval_of(equation.invars[0]).shape, aval_of(equation.outvars[0]).shape
        dims = self._dims[equation.outvars[0]]
        return any(label in labels_of((dim,)) and x != y for dim, x, y in zip(dims, given, made, strict=True))

    def _mixed(self, product: core.JaxprEqn, scores: core.Var) -> str:
        """Return the message for a product of scores, or weights, and anything else."""
        (contracted, _) = product.params["dimension_numbers"]
        side = product.invars.index(scores)
        sizes = [aval_of(scores).shape[axis] for axis in contracted[side]]
        noun = self._noun([scores])
        said = f"{_named(product)}: a product of {noun} with another array sums over "
        if {ROWS, COLUMNS} & self._labels(scores, contracted[side]):
            said += f"{_along(self._labels(scores, contracted[side]))}: a tile holds only some of them"
        else:
            said += (
                f"an axis of {' x '.join(map(str, sizes))} that is neither the queries' nor the keys', such as heads"
            )
        if noun == "weights":
            rest = "multiply the weights by the values first, and mix these products instead"
        else:
            rest = f"a tile holds the scores of only one of them; {self._between(product.outvars[0])}"
        return f"{said}: {rest}, {place_of(product)}"

    def _of_rows(self, equation: core.JaxprEqn, var: core.Var, of_rows: Sequence[core.Var]) -> str | None:
        """Return the message for an operation that combines scores with numbers reduced from many scores."""
        reductions, chain = self._reductions(of_rows)
        if not reductions:
            return None
        completions = self._likely(var, are_all=True)
        changed = self._first_changed(chain, lambda skipped: self._is_completed(var, completions, skipped))
        total = next((x for x in reductions if self._is_of_softmax(x, equation)), None)
        if changed is not None and total is not None:
            powers = [x for x in self._pair_path(total.invars[0]) if x.primitive.name in POWERS]
            if powers:
                return self._matcher.beside_sum(changed, powers[0])
        return self._masked(reductions, equation) or self._whole(reductions[0], equation)

    def _masked(self, reductions: Sequence[core.JaxprEqn], quotient: core.JaxprEqn) -> str | None:
        """Return the message for exponentials divided by a masked sum, or None in other cases."""
        for total in reductions:
            mask = self._producer(self._skip(total.invars[0]))
            if quotient.primitive.name != "div" or total.primitive.name != "reduce_sum" or mask is None:
                continue
            power = self._skip(quotient.invars[0])
            if mask.primitive.name == "select_n" and power in map(self._skip, mask.invars[1:]):
                rule = "weights and their sum must have the same mask"
                return f"`select_n` (where) of a softmax whose sum has a different mask: {rule}, {place_of(mask)}"
        return None

    def _reductions(self, of_rows: Sequence[Any]) -> tuple[list[core.JaxprEqn], list[core.JaxprEqn]]:
        """Return the equations that reduce pairs to row statistics, and those that change these, both in order."""
        reductions: dict[int, core.JaxprEqn] = {}
        chain: dict[int, core.JaxprEqn] = {}
        waiting = list(of_rows)
        while waiting:
            one = waiting.pop()
            equation = self._producer(one)
            if equation is None or self._is_pair.get(one) is not False:
                continue
            place = self._places[one]
            if place in reductions or place in chain:
                continue
            given = self._given(equation)
            if any(self._is_pair[x] for x in given):
                reductions[place] = equation
            else:
                waiting += given
                if equation.primitive.name not in ALIKE or equation.primitive.name == "stop_gradient":
                    chain[place] = equation
        return [x for _, x in sorted(reductions.items())], [x for _, x in sorted(chain.items())]

    def _first_changed(
        self, chain: Sequence[core.JaxprEqn], is_fine: Callable[[Mapping[core.Var, Any]], bool]
    ) -> core.JaxprEqn | None:
        """Return the first equation of a chain that prevents fusion: without it and those after it, fusion succeeds.

        Args:
            chain: the equations that change a row statistic, in order.
            is_fine: whether fusion succeeds with some values replaced by others.

        Returns:
            None if no equation of the chain decides.
        """
        instead: list[dict[core.Var, Any]] = []
        for equation in chain:
            result = equation.outvars[0]
            same = [x for x in self._given(equation, False) if aval_of(x) == aval_of(result)]
            if not same:
                return None
            instead.append({result: same[0]})
        for place in range(len(chain) + 1):
            skipped = {x: _end(y, instead[place:]) for each in instead[place:] for x, y in each.items()}
            if not is_fine(skipped):
                return chain[place - 1] if place else None
        return None

    def _whole(self, reduction: core.JaxprEqn, user: core.JaxprEqn) -> str:
        """Return the message for a reduction of scores whose result is combined with single scores."""
        scores = self._given(reduction, True)[0]
        noun = self._noun([scores])
        axes = reduced_axes(reduction)
        labels = self._labels(scores, axes)
        dims = [self._best_ways(scores)[0][axis] for axis in axes]
        along = _along(labels) if not has_parts(dims) else "a part of the keys" if labels == {COLUMNS} else "a part"
        if not axes:
            said = f"{_named(reduction)}: a value computed from all {noun} of a row outside a softmax"
            return f"{said}, {place_of(reduction)}"
        if self._is_of_softmax(reduction, user):
            if labels != {COLUMNS} or has_parts(dims):
                rule = "softmaxes must be along the keys, which the product with values sums over"
                return f"a softmax along {along}: {rule}, {place_of(reduction)}"
            if noun == "weights":
                rule = "the input of a softmax must be scores, each computed from one query and one key"
                return f"a softmax of the weights of another softmax: {rule}, {place_of(reduction)}"
        of = {frozenset({COLUMNS}): " of a row", frozenset({ROWS}): " of a column"}.get(frozenset(labels), "")
        return (
            f"{_named(reduction)} along {along}: a value computed from all {noun}{of} outside a softmax, "
            f"{place_of(reduction)}"
        )

    def _is_of_softmax(self, reduction: core.JaxprEqn, user: core.JaxprEqn) -> bool:
        """Return whether a reduction is a softmax's: a maximum subtracted from its scores, or a sum that divides."""
        name = reduction.primitive.name
        if (name, user.primitive.name) not in (("reduce_max", "sub"), ("reduce_sum", "div")):
            return False
        if self._skip(reduction.invars[0]) is not self._skip(user.invars[0]):
            return False
        if name == "reduce_sum":
            return self._has_powers(user.invars[0])
        after = [x for x in self._ancestors if self._is_pair[x] and self._is_made_of(x, user.outvars[0])]
        return any(self._producers[x].primitive.name in POWERS for x in after)

    def _is_weights(self, var: core.Var) -> bool:
        """Return whether a value is computed from exponentials that are normalised by their sum."""
        for equation in self._pair_path(var):
            name = equation.primitive.name
            if name in POWERS:
                shifted = self._producer(self._skip(equation.invars[0]))
                of_rows = [] if shifted is None or shifted.primitive.name != "sub" else shifted.invars[1:]
            else:
                of_rows = equation.invars if name in ("div", "mul") else []
            reductions, _ = self._reductions([x for x in of_rows if isinstance(x, core.Var)])
            for one in reductions:
                if one.primitive.name == "reduce_sum" and self._has_powers(one.invars[0]):
                    return True
        return False

    def _why_not_divided(self) -> str | None:
        """Return the message for exponentials as weights, and for the divisor of their product with values."""
        powers = [x for x in self._pair_path(self._weights) if x.primitive.name in POWERS]
        if not powers:
            return None
        for equation in self._closed.jaxpr.eqns:
            if equation.primitive.name != "div" or self._skip(equation.invars[0]) is not self._product.outvars[0]:
                continue
            reductions, chain = self._reductions(equation.invars[1:])
            if reductions:
                changed = self._first_changed(chain, functools.partial(self._can_divide, equation.outvars[0]))
                if changed is not None:
                    return self._matcher.beside_sum(changed, powers[0])
                return self._whole(reductions[0], equation)
        shifted = self._producer(self._skip(powers[0].invars[0]))
        if shifted is None or self._matcher.is_less_largest(powers[0]):
            return self._matcher.undivided(powers[0])
        reductions, _ = self._reductions(self._given(shifted, False))
        return self._whole(reductions[-1], shifted) if reductions else None

    def _can_divide(self, quotient: core.Var, skipped: Mapping[core.Var, Any]) -> bool:
        """Return whether a product with values that is divided afterwards can be fused."""
        values = self._product.invars[1 - self._side]
        if not isinstance(values, core.Var):
            return False
        shape = aval_of(values).shape
        return self._can_fuse(self._cut(quotient, lambda value, _: value, shape, {**skipped, values: None}))


def _end(var: Any, instead: Sequence[Mapping[core.Var, Any]]) -> Any:
    """Return the value that replaces another one after all replacements."""
    for each in reversed(instead):
        var = each.get(var, var)
    return var


def _named(equation: core.JaxprEqn) -> str:
    """Return a primitive's name, with the users' name for it."""
    name = equation.primitive.name
    return f"`{name}` ({_USERS_WORDS[name]})" if name in _USERS_WORDS else f"`{name}`"


def _along(labels: set[str]) -> str:
    """Return axes in words."""
    named = [word for label, word in ((ROWS, "the queries"), (COLUMNS, "the keys")) if label in labels]
    if labels - {ROWS, COLUMNS} or not named:
        named.append("an axis that is neither the queries' nor the keys', such as heads")
    return " and ".join(named)


def _not_linear(equation: core.JaxprEqn) -> str:
    allowed = "weights may only be added to each other, scaled, masked by 0 and cast"
    return f"`{equation.primitive.name}` of a softmax: {allowed}, {place_of(equation)}"
