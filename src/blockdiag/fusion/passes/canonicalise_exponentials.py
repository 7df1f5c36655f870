"""Rewrite exp((x - max x) * c) as exp(x * c - max(x * c)), the form in which softmaxes are recognised.

The first form comes from kernels that fold a scale or log2(e) into the exponent after subtracting the row maximum.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from blockdiag.fusion.frontend.trace import aval_of, bind, rewritten
from blockdiag.fusion.passes.sink_slices import producer_of
from blockdiag.fusion.regions.axis_labels import MOVES, equations_by_name, producers_of
from blockdiag.fusion.regions.guards import POWERS
from blockdiag.fusion.regions.match import attention_count

_SHIFTS = (*MOVES, "stop_gradient")


def with_factors_inside(closed: core.ClosedJaxpr) -> core.ClosedJaxpr | None:
    """Return the flat program with row maxima subtracted after scaling, or None if nothing changes."""
    producers = producers_of(closed.jaxpr)
    scaled = [found for equation in _exponents(closed.jaxpr, producers) if (found := _scaled(equation, producers))]
    if not scaled:
        return None
    # Each row maximum is scaled once, so all of its users subtract the same variable.
    known: dict[tuple[Any, float], Any] = {}
    replaced = {
        id(equation): functools.partial(_replacement, equation, difference, factor, producers, known)
        for equation, difference, factor in scaled
    }
    found = rewritten(closed, closed.jaxpr.eqns, replaced)
    # Outside of regions, results are rounded to 16 bits. Scaling the difference is then the more accurate order.
    is_narrow = any(aval_of(equation.outvars[0]).dtype.itemsize == 2 for equation, *_ in scaled)
    return None if is_narrow and attention_count(found.jaxpr) <= attention_count(closed.jaxpr) else found


def _exponents(jaxpr: core.Jaxpr, producers: Mapping[core.Var, core.JaxprEqn]) -> Iterator[core.JaxprEqn]:
    """Yield the equations that compute arguments of exponentials, each once."""
    seen: set[int] = set()
    for name in POWERS:
        for power in equations_by_name(jaxpr).get(name, ()):
            equation = producer_of(power.invars[0], producers)
            if equation is not None and id(equation) not in seen:
                seen.add(id(equation))
                yield equation


def _scaled(
    equation: core.JaxprEqn, producers: Mapping[core.Var, core.JaxprEqn]
) -> tuple[core.JaxprEqn, core.JaxprEqn, float] | None:
    """Return the equation, the difference from a row maximum that it scales, and the factor.

    Returns:
        None if the equation scales no such difference.
    """
    name, operands = equation.primitive.name, equation.invars
    for one, other in {"mul": ((0, 1), (1, 0)), "div": ((0, 1),)}.get(name, ()):
        difference, factor = producer_of(operands[one], producers), _number(operands[other], producers)
        if difference is None or factor is None:
            continue
        factor = 1 / factor if name == "div" else factor
        # max(x * c) = max(x) * c holds for positive finite factors only.
        is_difference = 0 < factor < np.inf and difference.primitive.name in ("sub", "neg")
        if is_difference and _is_largest(difference.invars[-1], producers):
            return equation, difference, factor
    return None


def _number(operand: Any, producers: Mapping[core.Var, core.JaxprEqn]) -> float | None:
    """Return the nonzero float that fills an operand, or None if there is no such literal."""
    while (equation := producer_of(operand, producers)) is not None and equation.primitive.name == "broadcast_in_dim":
        operand = equation.invars[0]
    if not isinstance(operand, core.Literal) or not jnp.issubdtype(aval_of(operand).dtype, jnp.floating):
        return None
    value = np.asarray(operand.val, np.float64)
    return float(value) if value.size == 1 and value != 0 else None


def _is_largest(operand: Any, producers: Mapping[core.Var, core.JaxprEqn]) -> bool:
    """Return whether an operand is a row maximum, possibly clamped from below by another value."""
    equation = producer_of(operand, producers)
    while equation is not None and equation.primitive.name in _SHIFTS:
        equation = producer_of(equation.invars[0], producers)
    if equation is not None and equation.primitive.name == "max":
        return any(_is_largest(x, producers) for x in equation.invars)
    return equation is not None and equation.primitive.name == "reduce_max"


def _replacement(
    equation: core.JaxprEqn,
    difference: core.JaxprEqn,
    factor: float,
    producers: Mapping[core.Var, core.JaxprEqn],
    known: dict[tuple[Any, float], Any],
    value_of: Callable[[Any], Any],
) -> dict[core.Var, Any]:
    """Return the difference of the scaled operands, in place of the scaled difference."""
    given = [_times(x, factor, producers, known, value_of) for x in difference.invars]
    (result,) = bind(difference, given)
    shape = aval_of(equation.outvars[0]).shape
    if result.shape != shape:
        result = lax.broadcast_in_dim(result, shape, range(len(shape)))
    return {equation.outvars[0]: result}


def _times(
    operand: Any,
    factor: float,
    producers: Mapping[core.Var, core.JaxprEqn],
    known: dict[tuple[Any, float], Any],
    value_of: Callable[[Any], Any],
) -> Any:
    """Return an operand times the factor; a row maximum becomes the maximum of the scaled values."""
    if factor == 1:
        return value_of(operand)
    if isinstance(operand, core.Literal):
        return _product(value_of(operand), factor)
    key = (operand, factor)
    if key not in known:
        equation = producer_of(operand, producers)
        if equation is not None and equation.primitive.name in ("reduce_max", "max", *_SHIFTS):
            given = [_times(x, factor, producers, known, value_of) for x in equation.invars]
            (known[key],) = bind(equation, given)
        else:
            known[key] = _product(value_of(operand), factor)
    return known[key]


def _product(value: Any, factor: float) -> Any:
    return lax.mul(value, lax.full_like(value, factor))
