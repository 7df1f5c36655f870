"""Products of weights and values that are written as something else, in the form in which attention is looked for.

- A sum over keys of weights times values, both with new axes, is a product; as for the points of AlphaFold's invariant
  point attention. So is a sum over features of queries times keys.
- Weights summed over heads, or over other axes of theirs, before the product: the sum is as good after it. With numbers
  for each head, and perhaps each query, as mixtures of softmaxes and interpretable heads have them, too.
- A product that sums over nothing scales: it is a multiplication.
- Zeros beside scores, by `pad`, are further logits, as `concatenate` has them.
- Batch axes of one index, which `jnp.matmul` leaves out of its products, are batch axes of these (`unit_axes.py`).

Only what may be weights or scores is looked at: what exponentials are made into, or of, by operations on elements. A
product that turns out to be none of attention is computed in full precision, as the sum would be.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from blockdiag.fusion.frontend.trace import aval_of, rewritten
from blockdiag.fusion.ir.tree import ELEMENTWISE, NotFusible, nodes_of
from blockdiag.fusion.passes.query_axis import with_query_axes
from blockdiag.fusion.passes.unit_axes import with_batch
from blockdiag.fusion.regions.axis_labels import MOVES, producers_of, users_of
from blockdiag.fusion.regions.guards import PASSES, POWERS
from blockdiag.fusion.regions.match import QueryWithoutAxis, attention_count, find_regions

type _Make = Callable[[Callable[[Any], Any]], dict[core.Var, Any]]

_WIDENS = ("reshape", "squeeze", "broadcast_in_dim")


def respelled(closed: core.ClosedJaxpr) -> core.ClosedJaxpr | None:
    """The same flat program with such products as products; None where that helps none."""
    plain = _replaced(closed, _Plain)
    better = _replaced(plain, _Products)
    if better is not plain and _merit(better) > _merit(plain):
        return better
    return None if plain is closed else plain


def as_products(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """Return the same flat program with whatever may be such a product as a product, whether that helps or not."""
    return _replaced(_replaced(closed, _Plain), _Products)


def _merit(closed: core.ClosedJaxpr) -> tuple[bool, int, int, int, int]:
    """Whether there is attention, how few arrays of queries by keys it reads, of how many products, how few sums over
    features there are, and how few arrays.

    A query that has no axis gets one, unless others have. A product of queries and keys that is written as a sum is a
    sum over features, or a pair of arrays for each of a few.
    """
    count = attention_count(closed.jaxpr)
    try:
        found = find_regions(closed.jaxpr)
    except QueryWithoutAxis as refusal:
        with_axes = with_query_axes(closed, refusal.products)
        return (count > 0, 0, count, 0, 0) if with_axes is None else _merit(with_axes)
    except NotFusible:
        return count > 0, 0, count, 0, 0
    regions = [region for own in found.values() for region in own]
    leaves = [leaf for region in regions for leaf in region.leaves]
    sums = sum(node.kind == "sum" for x in regions for node in nodes_of(x.score, x.weight, *x.extras))
    return count > 0, -sum(leaf.role == "score" for leaf in leaves), count, -sums, -len(leaves)


def _replaced(closed: core.ClosedJaxpr, kind: "type[_Plain] | type[_Products]") -> core.ClosedJaxpr:
    finder = kind(closed.jaxpr)
    replaced = {}
    for equation in closed.jaxpr.eqns:
        if (make := finder.replacement(equation)) is not None:
            replaced[id(equation)] = make
    return rewritten(closed, closed.jaxpr.eqns, replaced) if replaced else closed


class _Finder:
    def __init__(self, jaxpr: core.Jaxpr) -> None:
        self.producers, self.users = producers_of(jaxpr), users_of(jaxpr)

    def producer(self, var: Any) -> core.JaxprEqn | None:
        """The equation that computes a value, None of arguments and numbers."""
        return self.producers.get(var) if isinstance(var, core.Var) else None

    def reaches(self, var: Any, names: Sequence[str]) -> bool:
        """Whether a value is made of what one of these primitives computes, by moves and operations on elements."""
        seen: set[Any] = set()
        waiting = [var]
        while waiting:
            one = waiting.pop()
            equation = self.producer(one)
            if equation is None or one in seen:
                continue
            seen.add(one)
            name = equation.primitive.name
            if name in names:
                return True
            if name in ELEMENTWISE or name in MOVES or name in PASSES or name == "slice":
                waiting += equation.invars
        return False


class _Plain(_Finder):
    """What means the same wherever it stands."""

    def replacement(self, equation: core.JaxprEqn) -> _Make | None:
        """What computes an equation's result otherwise; None where it stays."""
        match equation.primitive.name:
            case "dot_general":
                return self._scaling(equation)
            case "pad":
                return self._beside_zeros(equation)
            case "broadcast_in_dim":
                compute = with_batch(equation, self.producer)
                return compute and (lambda value_of: {equation.outvars[0]: compute(value_of)})
        return None

    def _scaling(self, equation: core.JaxprEqn) -> _Make | None:
        """A product that sums over nothing, of weights or scores and of what has no axes but those of both."""
        (contracted, _), shared = equation.params["dimension_numbers"]
        sides = [side for side in (0, 1) if len(aval_of(equation.invars[side]).shape) == len(shared[side])]
        if contracted or not shared[0] or not sides:
            return None
        small = sides[0]
        if not any(self.reaches(x, (*POWERS, "dot_general")) for x in equation.invars):
            return None
        result = equation.outvars[0]
        shape, dtype = aval_of(result).shape, aval_of(result).dtype
        whole = len(aval_of(equation.invars[1 - small]).shape)
        free = [axis for axis in range(whole) if axis not in shared[1 - small]]

        def make(value_of: Callable[[Any], Any]) -> dict[core.Var, Any]:
            scale = lax.transpose(value_of(equation.invars[small]), shared[small])
            other = lax.transpose(value_of(equation.invars[1 - small]), [*shared[1 - small], *free])
            scale, other = (lax.convert_element_type(x, dtype) for x in (scale, other))
            return {result: lax.mul(lax.broadcast_in_dim(scale, shape, range(scale.ndim)), other)}

        return make

    def _beside_zeros(self, equation: core.JaxprEqn) -> _Make | None:
        """Numbers in front of scores, or behind them."""
        scores, number = equation.invars
        widened = [axis for axis, sizes in enumerate(equation.params["padding_config"]) if any(sizes)]
        if len(widened) != 1 or not self.reaches(scores, ("dot_general",)):
            return None
        (axis,) = widened
        low, high, inner = equation.params["padding_config"][axis]
        if min(low, high) < 0 or inner:
            return None

        def make(value_of: Callable[[Any], Any]) -> dict[core.Var, Any]:
            whole = value_of(scores)
            shapes = [[*whole.shape[:axis], count, *whole.shape[axis + 1 :]] for count in (low, high)]
            before, after = (lax.broadcast_in_dim(value_of(number), shape, ()) for shape in shapes)
            parts = [x for x in (before, whole, after) if x.shape[axis]]
            return {equation.outvars[0]: lax.concatenate(parts, axis)}

        return make


@dataclass(frozen=True)
class _Operand:
    """An array that is repeated along new axes.

    Attributes:
        var: the array.
        axes: of each of its axes of more than one index, that of the whole.
    """

    var: Any
    axes: dict[int, int]


class _Products(_Finder):
    """What would be attention, if it were a product."""

    def replacement(self, equation: core.JaxprEqn) -> _Make | None:
        """What computes an equation's result otherwise; None where it stays."""
        if any(axes is not None for x in equation.invars for axes in _sharding_of(x)):
            return None
        match equation.primitive.name:
            case "reduce_sum":
                return self._of_sum(equation)
            case "dot_general":
                return self._summed_before(equation, 0) or self._summed_before(equation, 1)
        return None

    def _of_sum(self, equation: core.JaxprEqn) -> _Make | None:
        """A sum of weights times values, as their product."""
        product = self._skip_casts(equation.invars[0])
        if product is None or product.primitive.name != "mul" or len(equation.params["axes"]) != 1:
            return None
        shape, dtype = aval_of(product.outvars[0]).shape, aval_of(product.outvars[0]).dtype
        first, second = (self._operand(x) for x in product.invars)
        sides = [set(x.axes.values()) for x in (first, second)]
        (summed,) = equation.params["axes"]
        # One query has no axis, and values with one column none of columns; but the sum of weights that are masked, or
        # gated, divides these.
        is_product = summed in sides[0] & sides[1] and sides[0] != sides[1]
        if is_product and (sides[0] < sides[1] or sides[1] < sides[0]) and self._divides(equation.outvars[0]):
            return None
        is_whole = sides[0] | sides[1] == {axis for axis, size in enumerate(shape) if size > 1}
        if not is_product or not is_whole:
            return None
        if not self._feeds(equation.outvars[0]) and not any(self.reaches(x.var, POWERS) for x in (first, second)):
            return None
        result = equation.outvars[0]
        kept = [axis for axis in range(len(shape)) if axis != summed]

        def make(value_of: Callable[[Any], Any]) -> dict[core.Var, Any]:
            arrays = [lax.reshape(value_of(x.var), [x.var.aval.shape[i] for i in x.axes]) for x in (first, second)]
            arrays = [lax.convert_element_type(x, dtype) for x in arrays]
            wanted = [axis for axis in kept if shape[axis] > 1]
            labels = [list(x.axes.values()) for x in (first, second)]
            found = _product(arrays, labels, wanted, aval_of(result).dtype)
            found = lax.broadcast_in_dim(found, aval_of(result).shape, [kept.index(axis) for axis in wanted])
            return {result: found}

        return make

    def _feeds(self, var: Any) -> bool:
        """Whether exponentials are of a value, by moves and operations on elements."""
        return any(user.primitive.name in POWERS for user, _ in self._used(var))

    def _divides(self, var: Any) -> bool:
        """Whether something is divided by a value, or by what moves and operations on elements make of it."""
        users = self._used(var)
        return any(
            (user.primitive.name == "div" and user.invars[1] is one) or user.params.get("y", 0) == -1
            for user, one in users
        )

    def _used(self, var: Any) -> Iterator[tuple[core.JaxprEqn, Any]]:
        """What uses a value by moves, joins and operations on elements, and what it is of."""
        seen: set[int] = set()
        waiting = [var]
        while waiting:
            one = waiting.pop()
            for user in self.users.get(one, ()):
                if user is None or id(user) in seen:
                    continue
                seen.add(id(user))
                yield user, one
                name = user.primitive.name
                # Scores may be joined with sinks, or with those of another source.
                if name in ELEMENTWISE or name in MOVES or name in PASSES or name == "concatenate":
                    waiting += user.outvars

    def _operand(self, var: Any) -> _Operand:
        """What a factor is made of by new axes alone."""
        shape = aval_of(var).shape
        axes = {axis: axis for axis, size in enumerate(shape) if size > 1}
        while (equation := self.producer(var)) is not None and equation.primitive.name in _WIDENS:
            given, made = aval_of(equation.invars[0]).shape, aval_of(var).shape
            if equation.primitive.name == "broadcast_in_dim":
                before = {i: axis for i, axis in enumerate(equation.params["broadcast_dimensions"]) if given[i] > 1}
            else:
                pairs = [[i for i, size in enumerate(x) if size > 1] for x in (given, made)]
                if [given[i] for i in pairs[0]] != [made[i] for i in pairs[1]]:
                    break
                before = dict(zip(*pairs, strict=True))
            axes = {i: axes[axis] for i, axis in before.items()}
            var = equation.invars[0]
        return _Operand(var, axes)

    def _skip_casts(self, var: Any) -> core.JaxprEqn | None:
        equation = self.producer(var)
        while equation is not None and _is_cast(equation):
            equation = self.producer(equation.invars[0])
        return equation

    def _summed_before(self, equation: core.JaxprEqn, side: int) -> _Make | None:
        """A product of values and of a sum of weights over an axis that is not that of keys."""
        contracted, shared = equation.params["dimension_numbers"]
        total, factors = self._unscaled(equation.invars[side])
        if total is None or len(contracted[0]) != 1 or total.primitive.name not in ("reduce_sum", "dot_general"):
            return None
        summed = self._sum(total)
        if summed is None:
            return None
        weights, of_weights, scale, of_scale, of_total = summed
        key = of_total[contracted[side][0]]
        if key not in of_weights or (of_scale is not None and key in of_scale) or not self._differ(weights, key):
            return None
        values = equation.invars[1 - side]
        of_values: list[Any] = [("value", axis) for axis in range(len(aval_of(values).shape))]
        of_values[contracted[1 - side][0]] = key
        for axes in zip(*shared, strict=True):
            of_values[axes[1 - side]] = of_total[axes[side]]
        batch = [of_total[axis] for axis in shared[side]]
        sides = [[x for x in of_total if x not in (*batch, key)], [x for x in of_values if x not in (*batch, key)]]
        result = equation.outvars[0]
        wanted = [*batch, *sides[side], *sides[1 - side]]
        whole = [*(x for x in of_weights if x != key), *sides[1]]
        dtype = np.promote_types(aval_of(result).dtype, np.float32)

        def make(value_of: Callable[[Any], Any]) -> dict[core.Var, Any]:
            given = [value_of(weights), value_of(values)]
            found = _product(given, [of_weights, of_values], whole, dtype)
            if of_scale is None:
                found = lax.reduce_sum(found, [i for i, x in enumerate(whole) if x not in wanted])
                order = [[x for x in whole if x in wanted].index(x) for x in wanted]
                found = lax.transpose(found, order)
            else:
                wide = lax.convert_element_type(value_of(scale), dtype)
                found = _product([found, wide], [whole, of_scale], wanted, dtype)
            for scaled, number in reversed(factors):
                one = lax.convert_element_type(value_of(number), dtype)
                found = scaled(found, lax.broadcast_in_dim(one, found.shape, ()))
            return {result: lax.convert_element_type(found, aval_of(result).dtype)}

        return make

    def _differ(self, weights: Any, axis: int) -> bool:
        """Whether weights differ along an axis themselves, and not only what they are multiplied by.

        Where values alone do, the sum is that over keys, and a projection of the result follows.
        """
        product = self._skip_casts(weights)
        if product is None or product.primitive.name != "mul":
            return True
        of_powers = [x for x in product.invars if self.reaches(x, POWERS)]
        return any(axis in self._operand(x).axes.values() for x in of_powers)

    def _unscaled(self, var: Any) -> tuple[core.JaxprEqn | None, list[tuple[Callable[..., Any], Any]]]:
        """What computes a value but for casts and factors that are one number, and these, the last one first."""
        factors: list[tuple[Callable[..., Any], Any]] = []
        while (equation := self.producer(var)) is not None:
            name, operands = equation.primitive.name, equation.invars
            if _is_cast(equation):
                var = operands[0]
            elif name in ("mul", "div") and not aval_of(operands[1]).shape:
                factors.append((lax.mul if name == "mul" else lax.div, operands[1]))
                var = operands[0]
            elif name == "mul" and not aval_of(operands[0]).shape:
                factors.append((lax.mul, operands[0]))
                var = operands[1]
            else:
                break
        return equation, factors

    def _sum(self, total: core.JaxprEqn) -> tuple[Any, list[Any], Any, list[Any] | None, list[Any]] | None:
        """Weights, a label for each of their axes, what they are multiplied by, its labels, and those of the sum."""
        if total.primitive.name == "reduce_sum":
            weights = total.invars[0]
            labels: list[Any] = list(range(len(aval_of(weights).shape)))
            if not self.reaches(weights, POWERS):
                return None
            return weights, labels, None, None, [x for x in labels if x not in total.params["axes"]]
        contracted, shared = total.params["dimension_numbers"]
        for side in (0, 1):
            weights, scale = total.invars[side], total.invars[1 - side]
            shape = aval_of(scale).shape
            is_small = len(contracted[0]) > 0 and len(shape) == len(contracted[0]) + len(shared[0])
            if not is_small or not self.reaches(weights, POWERS):
                continue
            labels = list(range(len(aval_of(weights).shape)))
            of_scale: list[Any] = [None] * len(shape)
            for ours, theirs in zip(
                (*contracted[side], *shared[side]), (*contracted[1 - side], *shared[1 - side]), strict=True
            ):
                of_scale[theirs] = ours
            free = [x for x in labels if x not in (*contracted[side], *shared[side])]
            return weights, labels, scale, of_scale, [*shared[side], *free]
        return None


def _is_cast(equation: core.JaxprEqn) -> bool:
    """Whether an equation makes floating numbers of floating numbers."""
    if equation.primitive.name != "convert_element_type":
        return False
    return all(jnp.issubdtype(aval_of(x).dtype, jnp.floating) for x in (*equation.invars, *equation.outvars))


def _sharding_of(operand: Any) -> Sequence[Any]:
    aval = operand.aval
    return aval.sharding.spec if hasattr(aval, "sharding") else ()


def _product(arrays: Sequence[Any], labels: Sequence[Sequence[Any]], wanted: Sequence[Any], dtype: Any) -> Any:
    """The sum of products of two arrays over all labels that are not wanted, which both have; axes as they are wanted.

    Args:
        labels: of the axes of each.
    """
    first, second = (list(x) for x in labels)
    both = [x for x in first if x in second]
    batch, summed = [x for x in both if x in wanted], [x for x in both if x not in wanted]
    contracted = ([first.index(x) for x in summed], [second.index(x) for x in summed])
    shared = ([first.index(x) for x in batch], [second.index(x) for x in batch])
    left, right = arrays
    found = lax.dot_general(
        left, right, (contracted, shared), precision=lax.Precision.HIGHEST, preferred_element_type=np.dtype(dtype)
    )
    made = [*batch, *(x for x in (*first, *second) if x not in both)]
    return lax.transpose(found, [made.index(x) for x in wanted])
