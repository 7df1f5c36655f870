"""Simplify a program: common subexpressions, moves that cancel, and algebraic identities such as x + 0 and x * 1.

Softmaxes are recognised by the identity of variables. This pass therefore runs before softmaxes are matched.
"""

import math
from collections.abc import Hashable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from blockdiag.fusion.frontend.trace import aval_of, has_effects, without_unused

# These keep the order of elements, unless they repeat some.
_IN_ORDER = ("broadcast_in_dim", "reshape", "squeeze")
# A barrier keeps values apart on purpose. Programs of loops and branches are simplified by themselves.
_APART = frozenset({"optimization_barrier", "cond", "scan", "while"})


def plain(closed: core.ClosedJaxpr) -> core.ClosedJaxpr | None:
    """Return the simplified flat program, or None if nothing changes."""
    return _Plain(closed.jaxpr).program(closed)


class _Plain:
    """The remaining equations of a program, simplified in one forward pass.

    Attributes:
        same: from each removed variable to the operand that replaces it.
        equations: the remaining equations, in order.
        producers: from each variable to the remaining equation that computes it.
        known: the remaining equations by `_key`, for common subexpressions.
    """

    def __init__(self, jaxpr: core.Jaxpr) -> None:
        self.same: dict[core.Var, Any] = {}
        self.equations: list[core.JaxprEqn] = []
        self.producers: dict[core.Var, core.JaxprEqn] = {}
        self.known: dict[Hashable, core.JaxprEqn] = {}
        for equation in jaxpr.eqns:
            self._take(equation)

    def program(self, closed: core.ClosedJaxpr) -> core.ClosedJaxpr | None:
        """Return the program of the remaining equations, or None if nothing changed."""
        jaxpr = closed.jaxpr
        if list(map(id, self.equations)) == list(map(id, jaxpr.eqns)):
            return None
        outvars = [self._of(x) for x in jaxpr.outvars]
        return without_unused(core.ClosedJaxpr(jaxpr.replace(eqns=self.equations, outvars=outvars), closed.consts))

    def _take(self, equation: core.JaxprEqn) -> None:
        given = [self._of(x) for x in equation.invars]
        if any(x is not y for x, y in zip(given, equation.invars, strict=True)):
            equation = equation.replace(invars=given)
        if len(equation.outvars) == 1 and not has_effects(equation) and equation.primitive.name not in _APART:
            equation = self._shortened(equation)
            (result,) = equation.outvars
            same = self._operand(equation)
            if same is None:
                key = _key(equation)
                first = self.known.setdefault(key, equation) if key is not None else equation
                same = None if first is equation else first.outvars[0]
            if same is not None and aval_of(same) == aval_of(result):
                self.same[result] = same
                return
        self.equations.append(equation)
        self.producers |= dict.fromkeys(equation.outvars, equation)

    def _of(self, operand: Any) -> Any:
        return self.same.get(operand, operand) if isinstance(operand, core.Var) else operand

    def _producer(self, operand: Any) -> core.JaxprEqn | None:
        return self.producers.get(operand) if isinstance(operand, core.Var) else None

    def _made_by(self, operand: Any, name: str) -> core.JaxprEqn | None:
        """Return the equation that computes an operand, or None unless its primitive has this name."""
        equation = self._producer(operand)
        return equation if equation is not None and equation.primitive.name == name else None

    def _shortened(self, equation: core.JaxprEqn) -> core.JaxprEqn:
        """Return an equivalent equation that skips one of its producers, or the equation itself."""
        match equation.primitive.name:
            case "transpose" if (inner := self._made_by(equation.invars[0], "transpose")) is not None:
                order = tuple(inner.params["permutation"][axis] for axis in equation.params["permutation"])
                return equation.replace(invars=inner.invars, params={**equation.params, "permutation": order})
            case "exp2" if (scaled := self._made_by(equation.invars[0], "mul")) is not None:
                exponent = self._beside(scaled, math.log2(math.e))
                if exponent is not None and aval_of(exponent) == aval_of(scaled.outvars[0]):
                    return equation.replace(primitive=lax.exp_p, invars=[exponent])
            case "pow" if self._is_number(equation.invars[0], 2):
                exponent = equation.invars[1]
                if aval_of(exponent) == aval_of(equation.outvars[0]):
                    return equation.replace(primitive=lax.exp2_p, invars=[exponent], params={"accuracy": None})
            case "add" | "sub":
                return self._unnegated(equation)
            case "concatenate":
                return self._flat(equation)
        return equation

    def _flat(self, joined: core.JaxprEqn) -> core.JaxprEqn:
        """Flatten nested concatenations along the same axis."""
        parts = []
        for operand in joined.invars:
            inner = self._made_by(operand, "concatenate")
            is_along = inner is not None and inner.params["dimension"] == joined.params["dimension"]
            parts += inner.invars if inner is not None and is_along else [operand]
        return joined.replace(invars=parts) if len(parts) > len(joined.invars) else joined

    def _unnegated(self, equation: core.JaxprEqn) -> core.JaxprEqn:
        """Fold a negated operand into a sum or a difference."""
        is_sum, operands = equation.primitive.name == "add", equation.invars
        for one, other in ((1, 0), (0, 1)) if is_sum else ((1, 0),):
            negated = self._made_by(operands[one], "neg")
            if negated is not None:
                primitive = lax.sub_p if is_sum else lax.add_p
                return equation.replace(primitive=primitive, invars=[operands[other], *negated.invars])
        return equation

    def _operand(self, equation: core.JaxprEqn) -> Any:
        """Return an existing value that equals the result of an equation, or None.

        The caller compares shape and dtype.
        """
        name, operands, params = equation.primitive.name, equation.invars, equation.params
        match name:
            case "add" | "add_any" | "sub" | "mul" | "div":
                return self._beside(equation, 1 if name in ("mul", "div") else 0)
            case "and" | "or" if aval_of(operands[0]).dtype == bool:
                return self._beside(equation, name == "and")
            case "select_n" if [self._is_number(x, i) for i, x in enumerate(operands[1:])] == [True, True]:
                return operands[0]
            case "neg":
                inner = self._made_by(operands[0], "neg")
                return None if inner is None else inner.invars[0]
            case "convert_element_type":
                return operands[0]
            case "transpose":
                order = params["permutation"]
                return operands[0] if tuple(order) == tuple(range(len(order))) else None
            case "slice":
                return self._joined(equation)
            case "squeeze" if (sliced := self._made_by(operands[0], "slice")) is not None:
                return self._stacked(sliced, params["dimensions"])
        return self._in_order(equation)

    def _beside(self, equation: core.JaxprEqn, number: float) -> Any:
        """Return the operand whose other operand is this number everywhere, or None.

        The number must be the second operand of a difference or a quotient.
        """
        sides = ((0, 1),) if equation.primitive.name in ("sub", "div") else ((0, 1), (1, 0))
        operands = equation.invars
        return next((operands[one] for one, other in sides if self._is_number(operands[other], number)), None)

    def _in_order(self, equation: core.JaxprEqn) -> Any:
        """Return the earlier value of the same shape that a chain of order-preserving moves restores, or None."""
        shape, inner = aval_of(equation.outvars[0]).shape, equation
        while inner is not None and _keeps_order(inner):
            operand = inner.invars[0]
            if isinstance(operand, core.Var) and aval_of(operand).shape == shape:
                return operand
            inner = self._producer(operand)
        return None

    def _joined(self, sliced: core.JaxprEqn) -> Any:
        """Return the operand of a concatenation that a slice is, or None."""
        joined, starts = self._made_by(sliced.invars[0], "concatenate"), sliced.params["start_indices"]
        if joined is None or sliced.params["strides"] is not None:
            return None
        axis, first = joined.params["dimension"], 0
        for operand in joined.invars:
            if first == starts[axis] and aval_of(operand).shape == aval_of(sliced.outvars[0]).shape:
                return operand
            first += aval_of(operand).shape[axis]
        return None

    def _stacked(self, sliced: core.JaxprEqn, removed: tuple[int, ...]) -> Any:
        """Return the operand of a stack that a squeezed slice is, or None."""
        stacked, params = self._made_by(sliced.invars[0], "stack"), sliced.params
        if stacked is None or params["strides"] is not None:
            return None
        axis = stacked.params["axis"] % len(params["start_indices"])
        operand = stacked.invars[params["start_indices"][axis]]
        is_whole = math.prod(aval_of(operand).shape) == math.prod(aval_of(sliced.outvars[0]).shape)
        return operand if is_whole and tuple(removed) == (axis,) else None

    def _is_number(self, operand: Any, number: float) -> bool:
        """Return whether all elements of a value are this number, rounded to its dtype."""
        while (inner := self._made_by(operand, "broadcast_in_dim")) is not None:
            operand = inner.invars[0]
        if not isinstance(operand, core.Literal):
            return False
        return bool(np.all(np.asarray(operand.val) == np.asarray(number, aval_of(operand).dtype)))


def _keeps_order(equation: core.JaxprEqn) -> bool:
    """Return whether an equation keeps all elements in their order."""
    name, params = equation.primitive.name, equation.params
    if name not in _IN_ORDER or not isinstance(equation.invars[0], core.Var):
        return False
    given, shape = (aval_of(x).shape for x in (equation.invars[0], equation.outvars[0]))
    return math.prod(given) == math.prod(shape) and params.get("dimensions" if name == "reshape" else "") is None


def _key(equation: core.JaxprEqn) -> Hashable | None:
    """Return a hashable key that is equal for equations that compute the same, or None if the equation has none."""
    operands: list[Hashable] = []
    for x in equation.invars:
        if not isinstance(x, core.Literal):
            operands.append(x)
        elif jnp.issubdtype(aval_of(x).dtype, np.number) or aval_of(x).dtype == bool:
            value = np.asarray(x.val)
            operands.append((value.tobytes(), value.shape, aval_of(x).dtype))
        else:
            return None
    key = (equation.primitive, tuple(sorted(equation.params.items())), tuple(operands), equation.ctx)
    try:
        hash(key)
    except TypeError:
        # Some parameters are arrays or programs, which cannot be hashed.
        return None
    return key
