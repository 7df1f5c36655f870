"""Finds attention in a program: products with values of what is linear in a softmax of scores."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jax import lax
from jax.extend import core

from blockdiag.fusion.factors import stopped
from blockdiag.fusion.follow import followed, read_by
from blockdiag.fusion.pull import (
    ELEMENTWISE,
    Puller,
    Unpullable,
    broadcast_dims,
    labels_of,
    moved_dims,
    place_of,
    producers_of,
    users_of,
)
from blockdiag.fusion.trace import aval_of
from blockdiag.fusion.tree import (
    COLUMNS,
    ROWS,
    Dim,
    Node,
    NotFusible,
    Region,
    leaves_of,
    nodes_of,
    number,
    operation,
    source_of,
)

_MOVES = ("broadcast_in_dim", "reshape", "squeeze", "transpose")
_CASTS = ("convert_element_type", "copy", "pvary", "reduce_precision")
_PASSES = (*_CASTS, "stop_gradient")


@dataclass(frozen=True)
class _Softmax:
    """exp(score) / (sum of exp(score) + sum of exp(extras)).

    Attributes:
        mask: what the sum alone was masked by: the numerator must be, too.
    """

    score: Node
    extras: tuple[Node, ...] = ()
    mask: object = None


@dataclass(frozen=True)
class _Term:
    """A softmax, or None for 1, times a weight."""

    softmax: _Softmax | None
    weight: Node | None


class _NoMatch(Exception):
    """A value is not linear in softmaxes; the message, if there is one, says why."""


@dataclass(frozen=True)
class _Unmatched:
    """A product neither side of which was found to have probabilities.

    Attributes:
        weights: the side that was looked at.
        reason: why it is not linear in softmaxes; empty where that is not known.
        refused: why it is no function of scores on tiles; empty where that is not known.
    """

    matcher: "_Matcher"
    equation: core.JaxprEqn
    weights: object
    reason: str
    refused: str


def _refusal(unmatched: Sequence[_Unmatched]) -> str | None:
    """Why attention cannot be fused; None where there seems to be none."""
    for one in unmatched:
        if one.matcher.puller.is_attention(one.weights):
            whole = "`dot_general` of what is not linear in softmaxes of scores along the axis that it sums"
            return one.reason or f"{whole}, {place_of(one.equation)}"
    refused = next((one.refused for one in unmatched if one.refused), None)
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
        raise NotFusible(refusal)
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


def _matches(jaxpr: core.Jaxpr, unmatched: list[_Unmatched]) -> list[_Match]:
    """The products with weights; others are added to `unmatched`."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name != "dot_general":
            continue
        for side in (0, 1):
            result, regions = _regions_of(jaxpr, equation, side, unmatched)
            if regions:
                found.append(_Match(equation, side, result, regions))
                break
    return found


def _regions_of(
    jaxpr: core.Jaxpr, equation: core.JaxprEqn, side: int, unmatched: list[_Unmatched]
) -> tuple[core.Var, tuple[Region, ...]]:
    """The regions of a product one side of which has probabilities, and the variable whose value they are; none where
    it has not, which is added to `unmatched`."""
    replaced = equation.outvars[0]
    contracted, shared = equation.params["dimension_numbers"]
    weights, value = equation.invars[side], equation.invars[1 - side]
    if len(contracted[0]) != 1 or isinstance(weights, core.Literal) or isinstance(value, core.Literal):
        return replaced, ()
    sizes: dict[str, int] = {}
    dims: dict[int, list[Dim]] = {side: [()] * len(aval_of(weights).shape), 1 - side: [()] * len(aval_of(value).shape)}

    def assign(label: str, **axes: int) -> None:
        for name, axis in axes.items():
            at = side if name == "weights" else 1 - side
            dims[at][axis] = (label,)
            sizes[label] = aval_of(equation.invars[at]).shape[axis]

    batch = []
    for i, axes in enumerate(zip(*shared, strict=True)):
        assign(f"b{i}", weights=axes[side], value=axes[1 - side])
        batch.append(f"b{i}")
    assign(COLUMNS, weights=contracted[side][0], value=contracted[1 - side][0])
    free = [axis for axis, dim in enumerate(dims[side]) if dim == ()]
    if not free:
        return replaced, ()
    # Keys are read once for each tile of rows, so that these lie along the longest axis that values lack.
    rows = max(reversed(free), key=lambda axis: aval_of(weights).shape[axis])
    for i, axis in enumerate(axis for axis in free if axis != rows):
        assign(f"g{i}", weights=axis)
        batch.append(f"g{i}")
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
    matcher = _Matcher(jaxpr, sizes, batch)
    reason, refused = "", ""
    try:
        terms = matcher.terms(weights, tuple(dims[side]))
        if any(term.softmax is not None and term.softmax.mask is not None for term in terms):
            raise _NoMatch
    except _NoMatch as failure:
        reason = str(failure)
        divided = matcher.divided(equation, out_dims, weights, tuple(dims[side]))
        if divided is None:
            terms, refused = matcher.plain(weights, tuple(dims[side]))
        else:
            softmax, replaced, out_dims = divided
            terms = [_Term(softmax, None)]
    if not terms:
        unmatched.append(_Unmatched(matcher, equation, weights, reason, refused))
        return replaced, ()
    regions = []
    for term in terms:
        score = None if term.softmax is None else term.softmax.score
        extras = () if term.softmax is None else term.softmax.extras
        leaves = leaves_of(score, *extras, term.weight)
        matcher.puller.check_leaves(leaves)
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
            )
        )
    return replaced, tuple(regions)


class _Matcher:
    def __init__(self, jaxpr: core.Jaxpr, sizes: dict[str, int], batch: Sequence[str]) -> None:
        self.producers = producers_of(jaxpr)
        self.sizes = sizes
        self.puller = Puller(jaxpr, sizes, batch)
        # The first of the weights that a slice has kept.
        self._first = 0

    def terms(self, var: object, dims: tuple[Dim, ...]) -> list[_Term]:
        """Softmaxes and weights whose products add up to a value.

        Raises:
            _NoMatch: it is something else.
        """
        equation = self._producer(var)
        if equation is None or COLUMNS not in labels_of(dims):
            raise _NoMatch
        softmax = self._softmax(equation, dims)
        if softmax is not None:
            return [_Term(softmax, None)]
        name, operands = equation.primitive.name, equation.invars
        if name in _CASTS:
            return self.terms(operands[0], dims)
        if name == "stop_gradient":
            return [self._stopped(term, equation.primitive) for term in self.terms(operands[0], dims)]
        if name in _MOVES:
            return self.terms(operands[0], self._moved(equation, dims))
        if name == "slice":
            before, self._first = self._first, self._first_column(equation, dims)
            try:
                return self.terms(operands[0], self._sliced(equation, dims))
            finally:
                self._first = before
        if name not in ELEMENTWISE:
            raise _NoMatch(f"`{name}` of weights cannot be computed a tile at a time, {place_of(equation)}")
        given = [broadcast_dims(x, aval_of(equation.outvars[0]).shape, dims) for x in operands]
        match name:
            case "neg":
                return [self._scaled(term, number(-1.0), lax.mul_p) for term in self.terms(operands[0], given[0])]
            case "exp" | "exp2":
                return [_Term(self._normalised(equation, dims), None)]
            case "add" | "sub":
                left = self.terms(operands[0], given[0])
                right = self.terms(operands[1], given[1])
                if name == "sub":
                    right = [self._scaled(term, number(-1.0), lax.mul_p) for term in right]
                return left + right
            case "mul":
                for one, other in ((0, 1), (1, 0)):
                    try:
                        terms = self.terms(operands[one], given[one])
                    except _NoMatch:
                        continue
                    factor = self.puller.node(operands[other], given[other])
                    return [self._scaled(term, factor, lax.mul_p) for term in terms]
            case "div":
                terms = self.terms(operands[0], given[0])
                factor = self.puller.node(operands[1], given[1])
                return [self._scaled(term, factor, lax.div_p) for term in terms]
            case "select_n":
                return self._selected(equation, given)
        raise _NoMatch

    def _selected(self, equation: core.JaxprEqn, given: Sequence[tuple[Dim, ...]]) -> list[_Term]:
        """Where a mask holds 0 else what is linear, or the other way round."""
        predicate = self.puller.node(equation.invars[0], given[0])
        mask, _ = self._through_moves(equation.invars[0], given[0])
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
        raise _NoMatch

    @staticmethod
    def _masked(term: _Term, predicate: Node, mask: object) -> _Term:
        softmax = term.softmax
        if softmax is None or softmax.mask is None or softmax.mask is not mask:
            return term
        score = operation(lax.select_n_p, predicate, number(-np.inf), softmax.score)
        return _Term(_Softmax(score, softmax.extras), term.weight)

    def divided(
        self, product: core.JaxprEqn, out_dims: tuple[Dim, ...], var: object, dims: tuple[Dim, ...]
    ) -> tuple[_Softmax, core.Var, tuple[Dim, ...]] | None:
        """The softmax whose sum a product of exponentials is divided by, the quotient, and the quotient's dims."""
        try:
            power_var, dims = self._through_moves(var, dims)
        except _NoMatch:
            return None
        power = self._producer(power_var)
        if power is None or power.primitive.name != "exp":
            return None
        for quotient in self.producers.values():
            if quotient.primitive.name != "div" or isinstance(quotient.invars[1], core.Literal):
                continue
            whole = self._with_ones(quotient.invars[0], product.outvars[0], out_dims)
            total = self._producer(self._skip_moves(quotient.invars[1]))
            if whole is None or total is None or total.primitive.name != "reduce_sum":
                continue
            axes = total.params["axes"]
            if self._skip(total.invars[0]) is not power_var or len(axes) != 1 or dims[axes[0]] != (COLUMNS,):
                continue
            given = broadcast_dims(quotient.invars[1], aval_of(quotient.outvars[0]).shape, whole)
            _, inner = self._through_moves(quotient.invars[1], given)
            if inner == dims[: axes[0]] + dims[axes[0] + 1 :]:
                return self._score(power, dims, (), None), quotient.outvars[0], whole
        return None

    def _with_ones(self, var: object, product: core.Var, dims: tuple[Dim, ...]) -> tuple[Dim, ...] | None:
        """The dims of a product's result to which axes of size 1 may have been added; None of anything else."""
        if self._skip(var) is product:
            return dims
        added = self._producer(self._skip(var))
        if added is None or added.primitive.name not in _MOVES or self._skip(added.invars[0]) is not product:
            return None
        given, shape = aval_of(product).shape, aval_of(added.outvars[0]).shape
        rest = list(zip(given, dims, strict=True))
        found: list[Dim] = []
        for size in shape:
            if rest and rest[0][0] == size:
                found.append(rest.pop(0)[1])
            elif size == 1:
                found.append(())
            else:
                return None
        try:
            moved = self._moved(added, tuple(found))
        except _NoMatch:
            return None
        return tuple(found) if not rest and moved == dims else None

    def plain(self, var: object, dims: tuple[Dim, ...]) -> tuple[list[_Term], str]:
        """A weight without a softmax, where it is a function of scores, not these; else nothing, and why."""
        equation = self._producer(self._skip_moves(var))
        if equation is None or not self.puller.batch or equation.primitive.name == "dot_general":
            return [], ""
        try:
            node = self.puller.node(var, dims)
        except (NotFusible, Unpullable) as failure:
            return [], str(failure)
        return ([_Term(None, node)] if any(x.kind == "product" for x in nodes_of(node)) else []), ""

    @staticmethod
    def _stopped(term: _Term, primitive: core.Primitive) -> _Term:
        """The same without derivatives."""
        softmax, weight = term.softmax, term.weight
        if softmax is not None:
            extras = tuple(stopped(x, primitive) for x in softmax.extras)
            softmax = _Softmax(stopped(softmax.score, primitive), extras, softmax.mask)
        return _Term(softmax, None if weight is None else stopped(weight, primitive))

    @staticmethod
    def _scaled(term: _Term, factor: Node, primitive: core.Primitive) -> _Term:
        weight = term.weight or number(1.0)
        return _Term(term.softmax, operation(primitive, weight, factor))

    def _softmax(self, equation: core.JaxprEqn, dims: tuple[Dim, ...]) -> _Softmax | None:
        """exp(x - m) over its sum along the keys, where m is the same for all keys."""
        if equation.primitive.name != "div":
            return None
        numerator = self._skip(equation.invars[0])
        power = self._producer(numerator)
        if power is None or power.primitive.name not in ("exp", "exp2"):
            return None
        below = broadcast_dims(equation.invars[1], aval_of(equation.outvars[0]).shape, dims)
        total, total_dims = self._through_moves(equation.invars[1], below)
        shift = self._shift(power, dims)
        extras: list[Node] = []
        while (source := self._producer(total)) is not None and source.primitive.name == "add":
            # The sum over keys, and a term of each row.
            given = [broadcast_dims(x, aval_of(source.outvars[0]).shape, total_dims) for x in source.invars]
            for one, other in ((0, 1), (1, 0)):
                extra = self._extra(source.invars[other], given[other], shift)
                inner, inner_dims = self._through_moves(source.invars[one], given[one])
                if extra is not None and self._is_sum(inner):
                    extras.append(extra)
                    total, total_dims = inner, inner_dims
                    break
            else:
                return None
        if COLUMNS in labels_of(total_dims) or not self._is_sum(total):
            return None
        source = self._producer(total)
        assert source is not None
        summed, mask = self._skip(source.invars[0]), None
        masked = self._producer(summed)
        if masked is not None and masked.primitive.name == "select_n" and self._is_zero(masked.invars[1]):
            summed = self._skip(masked.invars[2])
            mask, _ = self._through_moves(masked.invars[0], dims)
        (axes, inner) = source.params["axes"], list(total_dims)
        if summed is not numerator or len(axes) != 1:
            return None
        inner.insert(axes[0], (COLUMNS,))
        if tuple(inner) != dims:
            return None
        return self._score(power, dims, extras, mask)

    def _score(self, power: core.JaxprEqn, dims: tuple[Dim, ...], extras: Sequence[Node], mask: object) -> _Softmax:
        """The softmax of what an exponential is of."""
        score = power.invars[0]
        shifted = self._producer(self._skip(score))
        if shifted is not None and shifted.primitive.name == "sub" and self._shift(power, dims) is not None:
            score = shifted.invars[0]
        joined = self._producer(self._skip(score))
        if (
            joined is not None
            and joined.primitive.name == "concatenate"
            and dims[joined.params["dimension"]] == (COLUMNS,)
        ):
            score, more = self._parted(joined, dims)
            extras = [*extras, *more]
        elif aval_of(power.outvars[0]).shape[dims.index((COLUMNS,))] != self.sizes[COLUMNS]:
            raise NotFusible(f"`slice` of weights: some of a softmax's keys have no value, {place_of(power)}")
        try:
            node = self.puller.node(score, dims)
        except Unpullable as failure:
            raise NotFusible(f"{failure}, {place_of(power)}") from None
        if power.primitive.name == "exp2":
            node = operation(lax.mul_p, node, number(math.log(2)))
        return _Softmax(node, tuple(extras), mask)

    def _parted(self, joined: core.JaxprEqn, dims: tuple[Dim, ...]) -> tuple[object, list[Node]]:
        """Scores that further logits were joined to, and these."""
        axis, keys = joined.params["dimension"], self.sizes[COLUMNS]
        scores, extras, first = None, [], 0
        for operand in joined.invars:
            size = aval_of(operand).shape[axis]
            if size == keys and first == self._first:
                scores = operand
            elif size == 1:
                extras.append(self.puller.node(operand, (*dims[:axis], (), *dims[axis + 1 :])))
            else:
                scores = None
                break
            first += size
        if scores is None:
            raise NotFusible(
                "`concatenate` of scores: beside those of the keys that have values there may be single logits only, "
                f"{place_of(joined)}"
            )
        return scores, extras

    def _normalised(self, power: core.JaxprEqn, dims: tuple[Dim, ...]) -> _Softmax:
        """exp(x - m), where m is the logarithm of the sum of exp(x)."""
        shift = self._shift(power, dims)
        joined = None if shift is None else self._producer(shift)
        if power.primitive.name != "exp" or joined is None or joined.primitive.name != "add":
            raise _NoMatch
        for one in joined.invars:
            logarithm = self._producer(self._skip_moves(one))
            if logarithm is None or logarithm.primitive.name != "log":
                continue
            total = self._producer(self._skip_moves(logarithm.invars[0]))
            if total is not None and total.primitive.name == "abs":
                total = self._producer(self._skip_moves(total.invars[0]))
            if total is None or total.primitive.name != "reduce_sum":
                continue
            inner = self._producer(self._skip(total.invars[0]))
            scores = self._producer(self._skip(power.invars[0]))
            below = None if inner is None else self._producer(self._skip(inner.invars[0]))
            if inner is None or inner.primitive.name != "exp" or scores is None or below is None:
                continue
            if below.primitive.name == "sub" and self._skip(below.invars[0]) is self._skip(scores.invars[0]):
                axes = total.params["axes"]
                if len(axes) == 1 and dims[axes[0]] == (COLUMNS,):
                    return self._score(power, dims, (), None)
        raise _NoMatch

    def _shift(self, power: core.JaxprEqn, dims: tuple[Dim, ...]) -> object:
        """What is subtracted from scores, where it is the same for all keys; None where nothing is."""
        shifted = self._producer(self._skip(power.invars[0]))
        if shifted is None or shifted.primitive.name != "sub":
            return None
        below = broadcast_dims(shifted.invars[1], aval_of(shifted.outvars[0]).shape, dims)
        shift, shift_dims = self._through_moves(shifted.invars[1], below)
        return None if COLUMNS in labels_of(shift_dims) else shift

    def _extra(self, var: object, dims: tuple[Dim, ...], shift: object) -> Node | None:
        """The logit whose exponential, less the shift, a term is."""
        inner, inner_dims = self._through_moves(var, dims)
        power = self._producer(inner)
        if COLUMNS in labels_of(inner_dims):
            return None
        if power is None or power.primitive.name != "exp":
            if shift is not None or not isinstance(inner, core.Literal):
                return None
            return number(float(np.log(np.asarray(inner.val))))
        logit = self._producer(self._skip(power.invars[0]))
        if shift is None:
            return self.puller.node(power.invars[0], inner_dims)
        if logit is None or logit.primitive.name not in ("sub", "neg"):
            return None
        taken = logit.invars[-1]
        if self._skip_moves(taken) is not shift:
            return None
        if logit.primitive.name == "neg":
            return number(0.0)
        return self.puller.node(
            logit.invars[0], broadcast_dims(logit.invars[0], aval_of(logit.outvars[0]).shape, inner_dims)
        )

    def _is_sum(self, var: object) -> bool:
        equation = self._producer(var)
        return equation is not None and equation.primitive.name == "reduce_sum"

    def _is_zero(self, var: object) -> bool:
        inner = self._skip_moves(var)
        return isinstance(inner, core.Literal) and bool(np.all(np.asarray(inner.val) == 0))

    def _skip_moves(self, var: object) -> object:
        """What a value is made of but for its shape and dtype."""
        while (equation := self._producer(var)) is not None and equation.primitive.name in (*_MOVES, *_PASSES):
            var = equation.invars[0]
        return var

    @staticmethod
    def _first_column(equation: core.JaxprEqn, dims: tuple[Dim, ...]) -> int:
        """Where a slice of weights begins."""
        if COLUMNS not in labels_of(dims):
            return 0
        if (COLUMNS,) not in dims:
            raise _NoMatch
        return int(equation.params["start_indices"][dims.index((COLUMNS,))])

    def _sliced(self, equation: core.JaxprEqn, dims: tuple[Dim, ...]) -> tuple[Dim, ...]:
        """The dims of the operand of a slice: of one index, or of the keys from those and further logits."""
        found = list(dims)
        given, shape = aval_of(equation.invars[0]).shape, aval_of(equation.outvars[0]).shape
        for axis, (whole, size) in enumerate(zip(given, shape, strict=True)):
            if whole == size or dims[axis] == (COLUMNS,):
                continue
            if size != 1:
                raise _NoMatch
            found[axis] = int(equation.params["start_indices"][axis])
        return tuple(found)

    def _through_moves(self, var: object, dims: tuple[Dim, ...]) -> tuple[object, tuple[Dim, ...]]:
        """What a value is made of but for its shape and dtype."""
        while (equation := self._producer(var)) is not None:
            name = equation.primitive.name
            if name in _MOVES:
                dims = self._moved(equation, dims)
            elif name not in _PASSES:
                break
            var = equation.invars[0]
        return var, dims

    def _skip(self, var: object) -> object:
        while (equation := self._producer(var)) is not None and equation.primitive.name in _PASSES:
            var = equation.invars[0]
        return var

    def _moved(self, equation: core.JaxprEqn, dims: tuple[Dim, ...]) -> tuple[Dim, ...]:
        try:
            return moved_dims(equation, dims, self.sizes)
        except Unpullable:
            raise _NoMatch from None

    def _producer(self, var: object) -> core.JaxprEqn | None:
        return self.producers.get(var) if isinstance(var, core.Var) else None
