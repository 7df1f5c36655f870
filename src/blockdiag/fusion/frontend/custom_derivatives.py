"""Functions with custom derivatives (`jax.custom_jvp`, `jax.custom_vjp`) as flat programs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.extend import core

from blockdiag.fusion.frontend.trace import aval_of, bind, body_of, evaluate, flat_jaxpr


@dataclass(frozen=True)
class Calls:
    """The programs of a call with a custom derivative.

    Attributes:
        value: the value, as a function of the operands.
        places: the positions of the differentiable operands.
        slope: in mode "jvp" the tangent of the value, from the operands and the tangents of `places`. In mode "vjp" the
            cotangents of `places`, from the operands and the cotangent of the value. None without a derivative.
        mode: the kind of derivative.
    """

    value: core.ClosedJaxpr
    places: tuple[int, ...]
    slope: core.ClosedJaxpr | None
    mode: Literal["jvp", "vjp"]


def calls_of(equation: core.JaxprEqn, *, has_slope: bool = True) -> Calls:
    """Return the programs of a call with one result.

    Args:
        equation: the call.
        has_slope: whether the derivative is needed.
    """
    body = body_of(equation)
    assert body is not None
    value, _ = flat_jaxpr(lambda *given: evaluate(body.jaxpr, body.consts, given), *body.in_avals)
    avals = [aval_of(x) for x in equation.invars]
    places = tuple(i for i, x in enumerate(avals) if jnp.issubdtype(x.dtype, jnp.floating))
    mode = "vjp" if equation.primitive.name.startswith("custom_vjp") else "jvp"
    result = aval_of(equation.outvars[0])
    if not has_slope or not places or not jnp.issubdtype(result.dtype, jnp.floating):
        return Calls(value, (), None, mode)

    def with_floats(given: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Return the call as a function of the differentiable operands, and these operands."""

        def compute(*floats: Any) -> Any:
            whole = list(given)
            for place, x in zip(places, floats, strict=True):
                whole[place] = x
            return bind(equation, whole)[0]

        return compute, [given[place] for place in places]

    def tangent(given: Sequence[Any], tangents: Sequence[Any]) -> Any:
        compute, floats = with_floats(given)
        return jax.jvp(compute, floats, list(tangents))[1]

    def cotangents(given: Sequence[Any], cotangent: Any) -> Any:
        compute, floats = with_floats(given)
        return jax.vjp(compute, *floats)[1](cotangent)

    if mode == "jvp":
        slope, _ = flat_jaxpr(tangent, avals, [avals[place] for place in places])
    else:
        slope, _ = flat_jaxpr(cotangents, avals, result)
    return Calls(value, places, slope, mode)


def with_derivative(
    value: Callable[..., Any], slope: Callable[..., Sequence[Any]] | None, places: Sequence[int], mode: str
) -> Callable[..., Any]:
    """Return a function with a custom derivative; see `Calls`.

    Args:
        value: the function, with one result.
        slope: the function of its derivative, which returns a sequence: the tangent, or the cotangents of `places`.
        places: the positions of the differentiable arguments.
        mode: the kind of derivative.
    """
    if slope is None:
        return value
    if mode == "jvp":
        with_tangent = jax.custom_jvp(value)

        @with_tangent.defjvp
        def tangent(given: Any, tangents: Any) -> tuple[Any, Any]:
            return with_tangent(*given), slope(*given, *(tangents[i] for i in places))[0]

        return with_tangent
    with_cotangents = jax.custom_vjp(value)

    def cotangents(given: Any, cotangent: Any) -> tuple[Any, ...]:
        found = iter(slope(*given, cotangent))
        return tuple(next(found) if i in places else None for i in range(len(given)))

    with_cotangents.defvjp(lambda *given: (value(*given), given), cotangents)
    return with_cotangents
