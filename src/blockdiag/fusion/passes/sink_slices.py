"""Move slices of softmax weights to the operands: a slice of weights becomes the weights of slices.

Differential attention is written so if one softmax has the heads of both terms. The weights are then separated by
`split`, by strides, or by a reshape that divides the axis of heads. Everything from the product of queries and keys to
the weights is independent along batch axes. A slice of the weights is therefore the same computation on slices of
queries and keys.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax import lax
from jax.extend import core

from blockdiag.fusion.frontend.trace import aval_of, bind, rewritten
from blockdiag.fusion.ir.recursion import Steps, finished
from blockdiag.fusion.ir.tree import ELEMENTWISE
from blockdiag.fusion.regions.axis_labels import MOVES, producers_of
from blockdiag.fusion.regions.guards import CASTS, PASSES, POWERS

type _Make = Callable[[Callable[[Any], Any], Mapping[Any, Any]], Any]

_REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_min")


class Stays(Exception):
    """Raised where a value is not known to be independent along the sliced axis."""


@dataclass(frozen=True)
class Part:
    """Indices of an axis: range(first, limit, step)."""

    axis: int
    first: int
    limit: int
    step: int = 1

    @property
    def count(self) -> int:
        """Return the number of indices."""
        return -(-(self.limit - self.first) // self.step)

    def along(self, axis: int) -> "Part":
        """Return the same indices along another axis."""
        return Part(axis, self.first, self.limit, self.step)


def taken_apart(closed: core.ClosedJaxpr) -> core.ClosedJaxpr | None:
    """Return the flat program with sliced weights computed slice by slice, or None if there are none."""
    producers = producers_of(closed.jaxpr)
    replaced = {}
    for equation in closed.jaxpr.eqns:
        parts = slices_of(equation)
        if parts is None or not _divides_weights(equation, parts, producers):
            continue
        plan = Plan(producers)
        try:
            keys = [plan.add(equation.invars[0], part) for part in parts]
        except Stays:
            continue
        replaced[id(equation)] = functools.partial(plan.results, dict(zip(equation.outvars, keys, strict=True)))
    return rewritten(closed, closed.jaxpr.eqns, replaced) if replaced else None


def slices_of(equation: core.JaxprEqn) -> list[Part] | None:
    """Return the part of the operand in each result, or None unless the equation slices one axis."""
    match equation.primitive.name:
        case "split":
            axis, first, found = equation.params["axis"], 0, []
            for size in equation.params["sizes"]:
                found.append(Part(axis, first, first + size))
                first += size
            return found
        case "slice":
            shape = aval_of(equation.invars[0]).shape
            given = aval_of(equation.outvars[0]).shape
            axes = [axis for axis, size in enumerate(given) if size != shape[axis]]
            if len(axes) != 1:
                return None
            (axis,) = axes
            starts, limits, steps = (equation.params[x] for x in ("start_indices", "limit_indices", "strides"))
            return [Part(axis, starts[axis], limits[axis], 1 if steps is None else steps[axis])]
    return None


def _divides_weights(
    equation: core.JaxprEqn, parts: Sequence[Part], producers: Mapping[core.Var, core.JaxprEqn]
) -> bool:
    """Return whether the equation slices softmax weights into several parts, or into parts of several indices."""
    is_divided = len(parts) > 1 or parts[0].count > 1
    source = producer_of(equation.invars[0], producers)
    while source is not None and source.primitive.name in (*MOVES, *CASTS):
        if source.primitive.name == "reshape":
            before, after = ([x for x in aval_of(y).shape if x > 1] for y in (source.invars[0], source.outvars[0]))
            is_divided |= before != after
        source = producer_of(source.invars[0], producers)
    if source is None or source.primitive.name != "div" or not is_divided:
        return False
    power = producer_of(source.invars[0], producers)
    while power is not None and power.primitive.name in CASTS:
        power = producer_of(power.invars[0], producers)
    return power is not None and power.primitive.name in POWERS


def producer_of(var: Any, producers: Mapping[core.Var, core.JaxprEqn]) -> core.JaxprEqn | None:
    """Return the equation that computes a value, or None for arguments and literals."""
    return producers.get(var) if isinstance(var, core.Var) else None


class Plan:
    """A plan that computes parts of values, each once."""

    def __init__(self, producers: Mapping[core.Var, core.JaxprEqn]) -> None:
        self.producers = producers
        self.steps: dict[Any, _Make] = {}
        self.known_products: dict[core.Var, bool] = {}

    def results(self, wanted: Mapping[core.Var, Any], value_of: Callable[[Any], Any]) -> dict[core.Var, Any]:
        """Compute the plan, and return each variable's part by its key."""
        known = self.values(value_of)
        return {var: known[key] for var, key in wanted.items()}

    def values(self, value_of: Callable[[Any], Any]) -> dict[Any, Any]:
        """Compute the planned parts, and return them by their keys."""
        known: dict[Any, Any] = {}
        for key, make in self.steps.items():
            known[key] = make(value_of, known)
        return known

    def add(self, var: Any, part: Part) -> Any:
        """Plan a part of a value, and return its key.

        Raises:
            Stays: the part cannot be computed from parts of operands.
        """
        key = (var, part)
        if key not in self.steps:
            self.steps[key] = self._make(var, part)
        return key

    def has_product(self, var: Any) -> bool:
        """Return whether a value depends on a dot product, which may be scores, or on the sum of a softmax."""
        return finished(self._has_product(var))

    def _has_product(self, var: Any) -> Steps[bool]:
        equation = producer_of(var, self.producers)
        if equation is None:
            return False
        if var not in self.known_products:
            found = equation.primitive.name == "dot_general" or self._is_softmax_sum(equation)
            for operand in equation.invars:
                found = found or (yield self._has_product(operand))
            self.known_products[var] = found
        return self.known_products[var]

    def _is_softmax_sum(self, equation: core.JaxprEqn) -> bool:
        power = producer_of(equation.invars[0], self.producers) if equation.primitive.name == "reduce_sum" else None
        while power is not None and power.primitive.name in CASTS:
            power = producer_of(power.invars[0], self.producers)
        return power is not None and power.primitive.name in POWERS

    def _make(self, var: Any, part: Part) -> _Make:
        if not self.has_product(var):
            return self._of_others(var, part)
        equation = self.producers[var]
        name, operands, params = equation.primitive.name, equation.invars, equation.params
        if name in ELEMENTWISE or name in PASSES:
            return self._bound(equation, [self._part_of(x, part) for x in operands])
        match name:
            case "transpose":
                return self._bound(equation, [part.along(params["permutation"][part.axis])])
            case _ if name in _REDUCTIONS:
                axes = [x for x in range(len(aval_of(operands[0]).shape)) if x not in params["axes"]]
                return self._bound(equation, [part.along(axes[part.axis])])
            case "concatenate" if params["dimension"] != part.axis:
                return self._bound(equation, [part] * len(operands))
            case "concatenate":
                return self._one_of(equation, part)
            case "squeeze":
                axes = [x for x in range(len(aval_of(operands[0]).shape)) if x not in params["dimensions"]]
                return self._bound(equation, [part.along(axes[part.axis])])
            case "broadcast_in_dim":
                return self._broadcast(equation, part)
            case "reshape":
                return self._reshaped(equation, part)
            case "dot_general":
                return _product_of(equation, part)
        raise Stays

    def _of_others(self, var: Any, part: Part) -> _Make:
        """Plan a part of a mask, a bias or the like.

        Elementwise operations are computed from parts of their operands. Values that are constant along the axis then
        stay scalars or functions of positions.
        """
        equation = producer_of(var, self.producers)
        if equation is not None and equation.primitive.name == "broadcast_in_dim":
            return self._broadcast(equation, part)
        if equation is not None and equation.primitive.name in ELEMENTWISE:
            return self._bound(equation, [self._part_of(x, part) for x in equation.invars])
        return lambda value_of, _: _cut(value_of(var), part)

    def _part_of(self, operand: Any, part: Part) -> Part | None:
        """Return the part of an operand that an elementwise operation needs; None for scalars and broadcast operands.

        Raises:
            Stays: the broadcast operand depends on scores.
        """
        shape = aval_of(operand).shape
        if shape and shape[part.axis] > 1:
            return part
        if self.has_product(operand):
            # The sum of a softmax needs all keys, even if only some are sliced.
            raise Stays
        return None

    def _bound(self, equation: core.JaxprEqn, parts: Sequence[Part | None]) -> _Make:
        """Plan an equation from parts of its operands; None stands for the whole operand."""
        keys = [None if part is None else self.add(x, part) for x, part in zip(equation.invars, parts, strict=True)]

        def make(value_of: Callable[[Any], Any], known: Mapping[Any, Any]) -> Any:
            pairs = zip(equation.invars, keys, strict=True)
            return bind(equation, [value_of(x) if key is None else known[key] for x, key in pairs])[0]

        return make

    def _one_of(self, equation: core.JaxprEqn, part: Part) -> _Make:
        """Plan a part of a concatenation that lies within one of its operands."""
        first = 0
        for operand in equation.invars:
            size = aval_of(operand).shape[part.axis]
            inner = Part(part.axis, part.first - first, part.limit - first, part.step)
            if inner == Part(part.axis, 0, size):
                return lambda value_of, _: value_of(operand)
            if inner.first >= 0 and inner.limit <= size:
                key = self.add(operand, inner)
                return lambda _, known: known[key]
            first += size
        raise Stays

    def _broadcast(self, equation: core.JaxprEqn, part: Part) -> _Make:
        axes, shape = equation.params["broadcast_dimensions"], list(equation.params["shape"])
        operand, key = equation.invars[0], None
        if part.axis in axes and aval_of(operand).shape[axes.index(part.axis)] > 1:
            key = self.add(operand, part.along(axes.index(part.axis)))
        elif self.has_product(operand):
            raise Stays
        shape[part.axis] = part.count

        def make(value_of: Callable[[Any], Any], known: Mapping[Any, Any]) -> Any:
            return lax.broadcast_in_dim(value_of(operand) if key is None else known[key], shape, axes)

        return make

    def _reshaped(self, equation: core.JaxprEqn, part: Part) -> _Make:
        before, after = aval_of(equation.invars[0]).shape, list(aval_of(equation.outvars[0]).shape)
        if equation.params["dimensions"] is not None:
            raise Stays
        key = self.add(equation.invars[0], _before_reshape(before, after, part))
        after[part.axis] = part.count
        return lambda _, known: lax.reshape(known[key], after)


def _before_reshape(before: Sequence[int], after: Sequence[int], part: Part) -> Part:
    """Return the part of a reshape's operand that these indices of its result come from.

    Raises:
        Stays: the indices are not a part of one axis of the operand.
    """
    # An empty axis counts as one of size 1, so strides are nonzero.
    before, after = ([max(1, x) for x in shape] for shape in (before, after))
    outer, size = math.prod(after[: part.axis]), after[part.axis]
    inner = math.prod(after[part.axis + 1 :])
    passed = 1
    for axis, whole in enumerate(before):
        rest = math.prod(before[axis + 1 :])
        # The operand's axis is split into `ahead` indices before the part's axis, and `behind` indices after it.
        ahead, behind = outer // passed, inner // rest
        if whole > 1 and passed * ahead == outer and rest * behind == inner and ahead * size * behind == whole:
            if ahead == 1 and (part.step == 1 or behind == 1):
                return Part(axis, part.first * behind, part.limit * behind, part.step)
            if behind == 1 and part.count == 1:
                return Part(axis, part.first, whole, size)
        if whole > 1 and passed == outer and rest > inner and size % whole == 0 and rest == inner * (size // whole):
            # The operand's axis is the first of two that the reshape merged.
            second = size // whole
            if part.step == 1 and part.first % second == 0 and part.limit % second == 0:
                return Part(axis, part.first // second, part.limit // second)
        passed *= whole
    raise Stays


def _product_of(equation: core.JaxprEqn, part: Part) -> _Make:
    """Plan a dot product from parts of its operands."""
    contracted, shared = equation.params["dimension_numbers"]
    sides: list[Part | None] = [None, None]
    if part.axis < len(shared[0]):
        sides = [part.along(axes[part.axis]) for axes in shared]
    else:
        free = [
            (side, axis)
            for side in range(2)
            for axis in range(len(aval_of(equation.invars[side]).shape))
            if axis not in (*contracted[side], *shared[side])
        ]
        side, axis = free[part.axis - len(shared[0])]
        sides[side] = part.along(axis)

    def make(value_of: Callable[[Any], Any], _: Mapping[Any, Any]) -> Any:
        pairs = zip(equation.invars, sides, strict=True)
        return bind(equation, [value_of(x) if side is None else _cut(value_of(x), side) for x, side in pairs])[0]

    return make


def _cut(value: Any, part: Part) -> Any:
    """Return these indices of a value."""
    return lax.slice_in_dim(value, part.first, part.limit, part.step, part.axis)
