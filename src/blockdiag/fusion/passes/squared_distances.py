"""Rewrite sums of squared differences between points of queries and keys as products, where precision allows it.

    sum (q - k)^2 = sum q^2 + sum k^2 - 2 sum q k

The last sum is a matrix product, so tensor cores compute it and its gradients. As written, each difference costs
some ten operations for each score, forward and backward, and its gradients are sums along rows and columns. The squares
are summed in float32.

The rewrite loses as many digits as the squares are larger than the squared differences. Distances do not depend on the
origin, so all points are moved to the mean of the second ones. The remaining digits are then more than a 16-bit
dtype has. Only 16-bit points are rewritten for that reason, and only if the sum is a term of an exponential's argument:
a root or a logarithm of a small distance would expose the error.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from blockdiag.fusion.frontend.trace import aval_of, rewritten
from blockdiag.fusion.regions.axis_labels import producers_of, users_of

_CASTS = ("convert_element_type", "copy", "pvary", "reduce_precision")
# Operations that keep a small absolute error small.
_LINEAR = frozenset({"add", "sub", "neg", "broadcast_in_dim", "reshape", "squeeze", "transpose", *_CASTS})
_ENDS = frozenset({"exp", "exp2", "reduce_max"})


@dataclass(frozen=True)
class _Points:
    """An operand of a difference.

    Attributes:
        var: the array, of a 16-bit dtype.
        axes: the axis of the difference for each axis of the array.
    """

    var: core.Var
    axes: tuple[int, ...]

    @property
    def own(self) -> dict[int, int]:
        """Map each axis of the difference along which the points vary to their own axis."""
        return {axis: i for i, axis in enumerate(self.axes) if aval_of(self.var).shape[i] != 1}


@dataclass(frozen=True)
class _Array:
    """Points without axes of size 1.

    Attributes:
        array: the elements.
        axes: the axis of the difference for each axis of the array.
    """

    array: Any
    axes: tuple[int, ...]

    @classmethod
    def of(cls, points: _Points, array: Any) -> "_Array":
        """Return the points with these elements."""
        return cls(lax.reshape(array, [array.shape[i] for i in points.own.values()]), tuple(points.own))

    def places(self, axes: Sequence[int]) -> list[int]:
        """Return the array's axes for these axes of the difference."""
        return [self.axes.index(axis) for axis in axes]

    def rest(self, axes: Sequence[int]) -> list[int]:
        """Return the axes of the difference that the array has, without these."""
        return [axis for axis in self.axes if axis not in axes]

    def mean(self, axes: Sequence[int]) -> "_Array":
        """Return the mean along axes, in float32 and without a gradient."""
        wide = lax.convert_element_type(lax.stop_gradient(self.array), np.float32)
        count = math.prod(self.array.shape[i] for i in self.places(axes))
        total = lax.reduce_sum(wide, self.places(axes))
        return _Array(lax.div(total, lax.full_like(total, count)), tuple(self.rest(axes)))

    def less(self, other: "_Array") -> "_Array":
        """Return the difference from an array with some of the axes, rounded once."""
        wide = lax.convert_element_type(self.array, np.float32)
        order = sorted(range(len(other.axes)), key=lambda i: self.axes.index(other.axes[i]))
        places = [self.axes.index(other.axes[i]) for i in order]
        moved = lax.broadcast_in_dim(lax.transpose(other.array, order), wide.shape, places)
        return _Array(lax.convert_element_type(lax.sub(wide, moved), self.array.dtype), self.axes)

    def squares(self, axes: Sequence[int]) -> Any:
        """Return sums of squares along axes, in float32."""
        return lax.reduce_sum(lax.square(lax.convert_element_type(self.array, np.float32)), self.places(axes))


def with_products(closed: core.ClosedJaxpr) -> core.ClosedJaxpr | None:
    """Return the flat program with squared distances as products, or None if there are none."""
    producers, users = producers_of(closed.jaxpr), users_of(closed.jaxpr)
    replaced = {}
    for equation in closed.jaxpr.eqns:
        if equation.primitive.name == "reduce_sum":
            points = _points_of(equation, producers)
            if points is not None and _is_term(equation.outvars[0], users):
                replaced[id(equation)] = _expanded(equation, *points)
    return rewritten(closed, closed.jaxpr.eqns, replaced) if replaced else None


def _points_of(equation: core.JaxprEqn, producers: Mapping[core.Var, core.JaxprEqn]) -> tuple[_Points, _Points] | None:
    """Return the two operands of a sum of squared differences, or None for any other sum."""
    square = _producer(equation.invars[0], producers)
    if square is None:
        return None
    match square.primitive.name:
        case "integer_pow" if square.params["y"] == 2:
            pass
        case "square":
            pass
        case "mul" if square.invars[0] is square.invars[1]:
            pass
        case _:
            return None
    difference = _producer(square.invars[0], producers)
    if difference is None or difference.primitive.name != "sub":
        return None
    found = [_narrow(x, producers) for x in difference.invars]
    if found[0] is None or found[1] is None or aval_of(found[0].var).dtype != aval_of(found[1].var).dtype:
        return None
    left, right = found[0].own, found[1].own
    summed = {axis for axis in equation.params["axes"] if aval_of(difference.outvars[0]).shape[axis] != 1}
    is_product = bool(summed) and summed <= left.keys() & right.keys()
    return (found[0], found[1]) if is_product and left.keys() - right.keys() and right.keys() - left.keys() else None


def _producer(operand: Any, producers: Mapping[core.Var, core.JaxprEqn]) -> core.JaxprEqn | None:
    """Return the equation that computes a value, below casts."""
    while isinstance(operand, core.Var):
        equation = producers.get(operand)
        if equation is None or equation.primitive.name not in _CASTS:
            return equation
        operand = equation.invars[0]
    return None


def _narrow(operand: Any, producers: Mapping[core.Var, core.JaxprEqn]) -> _Points | None:
    """Return the 16-bit array below a value's broadcasts and casts, or None if there is none."""
    axes = tuple(range(len(aval_of(operand).shape)))
    while isinstance(operand, core.Var):
        equation = producers.get(operand)
        name = None if equation is None else equation.primitive.name
        if equation is not None and name == "broadcast_in_dim":
            axes = tuple(axes[int(axis)] for axis in equation.params["broadcast_dimensions"])
        elif equation is None or name not in _CASTS:
            break
        operand = equation.invars[0]
    dtype = aval_of(operand).dtype
    is_short = isinstance(operand, core.Var) and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 2
    # Arrays sharded over explicit mesh axes cannot be reshaped freely.
    is_whole = all(axes is None for axes in aval_of(operand).sharding.spec)
    return _Points(operand, axes) if is_short and is_whole else None


def _is_term(var: core.Var, users: Mapping[core.Var, Sequence[core.JaxprEqn | None]]) -> bool:
    """Return whether every use of a value is as a term of an exponential's argument."""
    seen, waiting = {var}, [var]
    while waiting:
        for user in users[waiting.pop()]:
            if user is None:
                return False
            name, tainted = user.primitive.name, [x in seen for x in user.invars if isinstance(x, core.Var)]
            if name in _ENDS:
                continue
            is_kept = name in _LINEAR
            is_kept |= name == "mul" and sum(tainted) == 1
            is_kept |= name == "div" and user.invars[1] not in seen
            is_kept |= name == "select_n" and user.invars[0] not in seen
            if not is_kept:
                return False
            new = [x for x in user.outvars if x not in seen]
            seen |= set(new)
            waiting += new
    return True


def _expanded(equation: core.JaxprEqn, left: _Points, right: _Points) -> Callable[..., dict[core.Var, Any]]:
    """Return a function that computes the sum from the points' arrays."""
    result = equation.outvars[0]
    kept = [axis for axis in range(len(aval_of(equation.invars[0]).shape)) if axis not in equation.params["axes"]]
    summed = [axis for axis in sorted(left.own) if axis not in kept]
    shape = aval_of(result).shape

    def placed(array: Any, axes: Sequence[int]) -> Any:
        """Broadcast an array with these axes of the difference to the shape of the sum."""
        order = sorted(range(len(axes)), key=lambda i: axes[i])
        return lax.broadcast_in_dim(lax.transpose(array, order), shape, [kept.index(axes[i]) for i in order])

    def compute(value_of: Callable[[Any], Any]) -> dict[core.Var, Any]:
        first, second = (_Array.of(points, value_of(points.var)) for points in (left, right))
        middle = second.mean([axis for axis in second.axes if axis not in first.axes])
        first, second = first.less(middle), second.less(middle)
        total = lax.add(*(placed(x.squares(summed), x.rest(summed)) for x in (first, second)))
        shared = [axis for axis in first.axes if axis in second.axes and axis not in summed]
        contracted, batch = ((first.places(axes), second.places(axes)) for axes in (summed, shared))
        product = lax.dot_general(
            first.array, second.array, (contracted, batch), preferred_element_type=np.dtype(np.float32)
        )
        product = placed(product, [*shared, *first.rest(summed + shared), *second.rest(summed + shared)])
        found = lax.sub(total, lax.mul(product, lax.full_like(product, 2)))
        return {result: lax.convert_element_type(found, aval_of(result).dtype)}

    return compute
