"""Divide unnormalised weights after the value product instead of before it.

    (w / f(sum w)) v = (w v) / f(w 1)

These variants divide weights by their sum without being a softmax: masked softmaxes that are normalised again, linear
attention under a mask, retention, the mLSTM, and attention with squared relu. The sum along keys becomes a product with
ones, beside the product with values. Both are then found as products of weights that are functions of single scores.
"""

import collections
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from blockdiag.fusion.frontend.trace import aval_of, bind, body_of, kept, rewritten
from blockdiag.fusion.ir.tree import COLUMNS, ELEMENTWISE, ROWS, Dim
from blockdiag.fusion.passes.merge_contractions import WeightsMatcher, with_merged_keys
from blockdiag.fusion.regions.axis_labels import MOVES, broadcast_dims, labels_of
from blockdiag.fusion.regions.guards import PASSES, POWERS, Guards, NoMatch
from blockdiag.fusion.regions.match import attention_count, is_attention, lacks_attention

type _Kind = Literal["divides", "times", "where", "unless"]
type _Replacement = Callable[[Callable[[Any], Any]], dict[core.Var, Any]]


def with_sums(closed: core.ClosedJaxpr) -> core.ClosedJaxpr | None:
    """Return the flat program with results divided in place of weights, or None if that helps no product."""
    # A product of undivided weights must be attention already. A product of divided weights must not be.
    found = [x for x in _quotients(closed.jaxpr) if is_attention(closed.jaxpr, x.product) != bool(x.weights.factors)]
    if not found:
        return None
    before = _count(closed)
    # Usually the rewrite helps all layers of a model, so they are tried together first. A trial of each layer
    # analyses the whole program once more.
    if _is_help(closed, found, before):
        return _replaced(closed, found)
    helped = [one for one in found if len(found) > 1 and _is_help(closed, [one], before)]
    return _replaced(closed, helped) if helped and _is_help(closed, helped, before) else None


@dataclass(frozen=True)
class _Factor:
    """A value for each row that weights are divided by, multiplied by or selected by.

    Attributes:
        var, dims: the array or literal, and the label of each of its axes.
        kind: "divides" and "times" are arithmetic. "where" keeps the weights where the value is true, "unless" where it
            is false; they are 0 elsewhere.
        stops: whether no derivative flows into it.
    """

    var: Any
    dims: tuple[Dim, ...]
    kind: _Kind
    stops: bool


@dataclass(frozen=True)
class _Weights:
    """Weights, split into a numerator and factors of rows.

    Attributes:
        dims: a label, or nothing, for each axis.
        numerator, inner: the weights before they are divided, and their labels.
        path: the linear steps from the numerator to the weights, last first. Each is an equation and the position of
            the operand that it is linear in.
        factors: the factors of rows.
    """

    dims: tuple[Dim, ...]
    numerator: Any
    inner: tuple[Dim, ...]
    path: tuple[tuple[core.JaxprEqn, int], ...]
    factors: tuple[_Factor, ...]

    def value(self, value_of: Callable[[Any], Any]) -> Any:
        """Return the weights without the factors."""
        weights = value_of(self.numerator)
        for equation, place in reversed(self.path):
            given = [weights if i == place else value_of(x) for i, x in enumerate(equation.invars)]
            (weights,) = bind(equation, given)
        return weights

    def with_factors(self, array: Any, dims: Sequence[Dim], value_of: Callable[[Any], Any]) -> Any:
        """Return an array that was computed from the weights without the factors, with the factors applied.

        Args:
            dims: the labels of the array's axes.
        """
        for factor in self.factors:
            is_choice = factor.kind in ("where", "unless")
            each = jnp.asarray(value_of(factor.var), None if is_choice else array.dtype)
            each = _aligned(lax.stop_gradient(each) if factor.stops else each, factor.dims, dims)
            match factor.kind:
                case "divides":
                    array = array / each
                case "times":
                    array = array * each
                case "where":
                    array = jnp.where(each, array, jnp.zeros((), array.dtype))
                case "unless":
                    array = jnp.where(each, jnp.zeros((), array.dtype), array)
        return array


@dataclass(frozen=True)
class _Sum:
    """A sum of weights along keys.

    Attributes:
        equation: the sum.
        weights: the summed weights.
    """

    equation: core.JaxprEqn
    weights: _Weights


@dataclass(frozen=True)
class _Quotient:
    """A product of values and weights, with the sums that divide the weights or that may divide the result.

    Attributes:
        product, side: the product, and which of its operands has the weights.
        weights: the weights, split into a numerator and factors.
        sums: the sums of weights that the factors are computed from, or that stand beside the product.
    """

    product: core.JaxprEqn
    side: int
    weights: _Weights
    sums: tuple[_Sum, ...]

    @property
    def shared(self) -> list[tuple[Dim, int]]:
        """Return the batch labels that weights and values share, and the values' axis for each."""
        _, shared = self.product.params["dimension_numbers"]
        return [(self.weights.dims[x], y) for x, y in zip(shared[self.side], shared[1 - self.side], strict=True)]

    @property
    def out_dims(self) -> list[Dim]:
        """Return the labels of the product's axes; the values' columns have none."""
        (contracted, shared) = self.product.params["dimension_numbers"]
        shape, taken = aval_of(self.product.outvars[0]).shape, (*contracted[self.side], *shared[self.side])
        rows = [dim for axis, dim in enumerate(self.weights.dims) if axis not in taken]
        columns: list[Dim] = [()] * (len(shape) - len(shared[0]) - len(rows))
        return [*(dim for dim, _ in self.shared), *(rows + columns if self.side == 0 else columns + rows)]

    def result(self, value_of: Callable[[Any], Any]) -> dict[core.Var, Any]:
        """Return the product of the unscaled weights with values, with the factors applied."""
        weights, value = self.weights.value(value_of), _roomy(value_of(self.product.invars[1 - self.side]))
        weights = weights.astype(jnp.promote_types(weights.dtype, value.dtype))
        left, right = (weights, value) if self.side == 0 else (value, weights)
        numbers, precision = self.product.params["dimension_numbers"], self.product.params["precision"]
        var = self.product.outvars[0]
        dtype = aval_of(var).dtype
        out = lax.dot_general(left, right, numbers, precision=precision, preferred_element_type=_wide(dtype))
        return {var: self.weights.with_factors(out, self.out_dims, value_of).astype(dtype)}

    def total(self, one: _Sum, value_of: Callable[[Any], Any]) -> dict[core.Var, Any]:
        """Return a sum along keys as a product with ones, which have the batch axes and keys of the values."""
        (var,), dims = one.equation.outvars, one.weights.dims
        value = self.product.invars[1 - self.side]
        weights = _roomy(one.weights.value(value_of).astype(aval_of(value).dtype))
        both = [(dims.index(dim), axis) for dim, axis in self.shared if dim in dims]
        batch = [axis for axis, _ in both]
        keys = [axis for axis, dim in enumerate(dims) if COLUMNS in labels_of((dim,))]
        ones = jnp.ones([*(weights.shape[axis] for axis in (*batch, *keys)), 1], weights.dtype)
        first = list(range(len(batch)))
        numbers = ((keys, [len(batch) + i for i in range(len(keys))]), (batch, first))
        dtype, precision = aval_of(var).dtype, self.product.params["precision"]
        out = lax.dot_general(weights, ones, numbers, precision=precision, preferred_element_type=_wide(dtype))
        rest = [axis for axis in range(weights.ndim) if axis not in keys]
        order = [*batch, *(axis for axis in rest if axis not in batch)]
        out = lax.transpose(lax.squeeze(out, [len(order)]), [order.index(axis) for axis in rest])
        return {var: one.weights.with_factors(out, [dims[axis] for axis in rest], value_of).astype(dtype)}


def _roomy(array: Any) -> Any:
    """Return an array in a dtype that holds weights before they are divided: float16 would overflow."""
    return array.astype(jnp.float32) if array.dtype == jnp.float16 else array


def _wide(dtype: Any) -> Any:
    return np.promote_types(dtype, np.float32)


def _aligned(array: Any, dims: Sequence[Dim], wanted: Sequence[Dim]) -> Any:
    """Return an array with its axes in the wanted order, and axes of size 1 for labels that it lacks."""
    order = sorted((axis for axis, dim in enumerate(dims) if dim), key=lambda axis: wanted.index(dims[axis]))
    array = lax.transpose(array, [*order, *(axis for axis, dim in enumerate(dims) if not dim)])
    sizes = {dims[axis]: array.shape[i] for i, axis in enumerate(order)}
    return lax.reshape(array, [sizes.get(dim, 1) if dim else 1 for dim in wanted])


def _replaced(closed: core.ClosedJaxpr, quotients: Sequence[_Quotient]) -> core.ClosedJaxpr:
    replaced: dict[int, _Replacement] = {}
    for one in quotients:
        replaced |= {id(x.equation): functools.partial(one.total, x) for x in one.sums}
        if one.weights.factors:
            replaced[id(one.product)] = one.result
    return rewritten(closed, closed.jaxpr.eqns, replaced)


def _is_help(closed: core.ClosedJaxpr, quotients: Sequence[_Quotient], before: int) -> bool:
    """Return whether the rewrite makes attention of every rewritten product and sum."""
    sums = {id(x.equation) for one in quotients for x in one.sums}
    divided = sum(bool(one.weights.factors) for one in quotients)
    return _count(_replaced(closed, quotients)) >= before + divided + len(sums)


def _count(closed: core.ClosedJaxpr) -> int:
    """Return the number of products that are attention once their keys are merged into one axis."""
    return attention_count((with_merged_keys(closed) or closed).jaxpr)


def _quotients(jaxpr: core.Jaxpr) -> list[_Quotient]:
    """Return the products whose weights are divided by a function of sums of weights."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            each = (_Finder(jaxpr, equation, side).quotient() for side in (0, 1))
            found += [one for one in each if one is not None][:1]
    return found


@kept
def _sums_by_summed(jaxpr: core.Jaxpr) -> Mapping[object, Sequence[core.JaxprEqn]]:
    """Map each value, before casts, to the sums over it. Every product of a model looks up its own."""
    guards = Guards(jaxpr, {}, ())
    found: collections.defaultdict[object, list[core.JaxprEqn]] = collections.defaultdict(list)
    for total in guards.named("reduce_sum"):
        found[guards.skip(total.invars[0])].append(total)
    return MappingProxyType(found)


class _Finder(WeightsMatcher):
    """Finder of divisors of weights, from their product with values upwards."""

    def quotient(self) -> _Quotient | None:
        """Return the product as a quotient, or None if no sum of weights divides it or its weights."""
        var = self.product.invars[self.side]
        value = self.product.invars[1 - self.side]
        if not self.keys or (ROWS,) not in self.dims or isinstance(var, core.Literal):
            return None
        if not jnp.issubdtype(aval_of(value).dtype, jnp.floating):
            return None
        sums: dict[int, _Sum] = {}
        try:
            weights = self._weights(var, self.dims, sums)
        except NoMatch:
            return None
        if not sums:
            weights = _Weights(self.dims, var, self.dims, (), ())
            sums = {id(x): _Sum(x, replace(weights, numerator=x.invars[0])) for x in self._sums_beside(var)}
        # Most quotients by sums are layer norms. This check rejects them early.
        if not sums or not (self.may_be_weights(weights.numerator, weights.inner) or self._may_be_alone(weights)):
            return None
        return _Quotient(self.product, self.side, weights, tuple(sums.values()))

    def _may_be_alone(self, weights: _Weights) -> bool:
        self.is_alone = lacks_attention(self.jaxpr)
        return self.is_alone and self.may_be_weights(weights.numerator, weights.inner)

    def _sums_beside(self, var: core.Var) -> list[core.JaxprEqn]:
        """Return the sums along keys of these weights, by which the result may be divided later."""
        root = self.skip(var)
        power = self.producer(root)
        if power is None or power.primitive.name in POWERS:
            return []
        sums = [x for x in _sums_by_summed(self.jaxpr).get(root, ()) if self._is_sum_of_weights(x)]
        return [x for x in sums if sorted(x.params["axes"]) == sorted(self.keys)]

    def _weights(self, var: Any, dims: tuple[Dim, ...], sums: dict[int, _Sum]) -> _Weights:
        """Split weights into a numerator, factors of rows and the linear steps between.

        Args:
            sums: found sums, by the `id` of the equation. Those that the factors are computed from are added.
        """
        numerator, whole, length, inner, stops = var, dims, 0, dims, False
        path: list[tuple[core.JaxprEqn, int]] = []
        factors: list[_Factor] = []
        while (equation := self.producer(var)) is not None:
            try:
                found = self._factor(equation, inner, sums, stops=stops)
                if found is None:
                    place, inner = self._linear(equation, inner)
                    stops |= equation.primitive.name == "stop_gradient"
                    path.append((equation, place))
                else:
                    place, inner, factor = found
                    factors.append(factor)
                    numerator, whole, length = equation.invars[place], inner, len(path)
            except NoMatch:
                break
            var = equation.invars[place]
        return _Weights(dims, numerator, whole, tuple(path[:length]), tuple(factors))

    def _factor(
        self, equation: core.JaxprEqn, dims: tuple[Dim, ...], sums: dict[int, _Sum], *, stops: bool
    ) -> tuple[int, tuple[Dim, ...], _Factor] | None:
        """Match an equation that multiplies, divides or selects weights by a value for each row.

        Args:
            sums: found sums, by the `id` of the equation. Those that the row's value is computed from are added.
            stops: whether a `stop_gradient` follows, so no derivative flows through the equation.

        Returns:
            The position of the operand with the weights, its dims, and the factor; None for other equations.

        Raises:
            NoMatch: the quotient is a softmax.
        """
        name, operands = equation.primitive.name, equation.invars
        kinds: list[tuple[int, int, _Kind]] = []
        if name == "select_n" and len(operands) == 3 and self.is_zero(operands[1]):
            kinds = [(2, 0, "where")]
        elif name == "select_n" and len(operands) == 3 and self.is_zero(operands[2]):
            kinds = [(1, 0, "unless")]
        elif name in ("mul", "div"):
            kinds = [(0, 1, "divides")] if name == "div" else [(0, 1, "times"), (1, 0, "times")]
        if not kinds:
            return None
        shape = aval_of(equation.outvars[0]).shape
        given = [broadcast_dims(x, shape, dims) for x in operands]
        for one, other, kind in kinds:
            inner, inner_dims = self.through_moves(operands[other], given[other])
            if COLUMNS in labels_of(inner_dims) or COLUMNS not in labels_of(given[one]):
                continue
            if any(isinstance(dim, int) or len(dim) > 1 for dim in inner_dims):
                raise NoMatch
            found = self._sums(inner, inner_dims)
            power = self.producer(self.skip(operands[one]))
            if found and power is not None and power.primitive.name in POWERS:
                raise NoMatch
            for equation, whole in found:
                if id(equation) not in sums:
                    weights = self._weights(equation.invars[0], whole, sums)
                    sums[id(equation)] = _Sum(equation, weights)
            return one, given[one], _Factor(inner, inner_dims, kind, stops)
        return None

    def _sums(self, var: Any, dims: tuple[Dim, ...]) -> list[tuple[core.JaxprEqn, tuple[Dim, ...]]]:
        """Return the sums along keys that a row's value is computed from, and the dims of their operands.

        Raises:
            NoMatch: the value depends on scores in another way.
        """
        found = []
        seen: set[Any] = set()
        waiting = [(var, dims)]
        while waiting:
            one = waiting.pop()
            equation = self.producer(one[0])
            if equation is None or one in seen:
                continue
            seen.add(one)
            if self._is_sum_of_weights(equation):
                whole = self._summed_dims(equation, one[1])
                if whole is not None:
                    found.append((equation, whole))
            else:
                waiting += reversed(self._made_of(equation, one[1]))
        return found

    def _summed_dims(self, total: core.JaxprEqn, dims: tuple[Dim, ...]) -> tuple[Dim, ...] | None:
        """Return the dims of a sum's operand, or None if the operand is not computed from scores along the keys.

        Raises:
            NoMatch: an axis stands for several labels, or for a fixed index.
        """
        operand, keys = total.invars[0], dict(zip(sorted(total.params["axes"]), self.key_labels, strict=True))
        left, shape = iter(dims), aval_of(operand).shape
        whole = tuple((keys[axis],) if axis in keys else next(left) for axis in range(len(shape)))
        are_keys = all(shape[axis] == self.puller.grids.sizes[label] for axis, label in keys.items())
        if not are_keys or not isinstance(operand, core.Var) or not self.puller.has_product(operand, whole):
            return None
        if any(isinstance(dim, int) or len(dim) > 1 for dim in whole):
            raise NoMatch
        return whole

    def _made_of(self, equation: core.JaxprEqn, dims: tuple[Dim, ...]) -> list[tuple[Any, tuple[Dim, ...]]]:
        """Return the operands, with dims, in which sums of weights may be.

        Args:
            equation: an equation whose result has one value for each row.
            dims: the labels of its result.

        Raises:
            NoMatch: the equation computes the maximum of scores.
        """
        name, operands = equation.primitive.name, equation.invars
        if name in PASSES:
            return [(operands[0], dims)]
        if name in MOVES:
            return [(operands[0], self.moved(equation, dims))]
        if name in ELEMENTWISE or body_of(equation) is not None:
            shape = aval_of(equation.outvars[0]).shape
            of_elements = [x for x in operands if len(aval_of(x).shape) in (0, len(shape))]
            return [(x, broadcast_dims(x, shape, dims)) for x in of_elements]
        if name == "reduce_max":
            axes, left = equation.params["axes"], iter(dims)
            rank = len(aval_of(operands[0]).shape)
            whole = tuple((COLUMNS,) if axis in axes else next(left) for axis in range(rank))
            if isinstance(operands[0], core.Var) and self.puller.has_product(operands[0], whole):
                raise NoMatch
        return []

    def _is_sum_of_weights(self, equation: core.JaxprEqn) -> bool:
        is_sum = equation.primitive.name == "reduce_sum" and len(equation.params["axes"]) == len(self.keys)
        return is_sum and bool(jnp.issubdtype(aval_of(equation.outvars[0]).dtype, jnp.floating))

    def _linear(self, equation: core.JaxprEqn, dims: tuple[Dim, ...]) -> tuple[int, tuple[Dim, ...]]:
        """Return the position and dims of the operand that an equation is linear in.

        Raises:
            NoMatch: there is no such operand.
        """
        name, operands = equation.primitive.name, equation.invars
        shape = aval_of(equation.outvars[0]).shape
        if self.is_cast(equation, PASSES) or name == "neg":
            return 0, dims
        if name in MOVES:
            return 0, self.moved(equation, dims)
        if name in ("mul", "div"):
            given = [broadcast_dims(x, shape, dims) for x in operands]
            places = [i for i, x in enumerate(operands) if isinstance(x, core.Var) and self._has_sum(x, given[i])]
            if len(places) == 1 and places[0] <= (name == "mul"):
                return places[0], given[places[0]]
        if name == "select_n" and len(operands) == 3:
            places = [i for i in (1, 2) if not self.is_zero(operands[i])]
            if len(places) == 1:
                return places[0], broadcast_dims(operands[places[0]], shape, dims)
        raise NoMatch

    def _has_sum(self, var: core.Var, dims: tuple[Dim, ...]) -> bool:
        return COLUMNS in labels_of(dims) and self.puller.has_product(var, dims)
