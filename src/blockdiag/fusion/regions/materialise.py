"""Arrays that regions read and the program lacks: a few equations compute them from its variables."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from blockdiag.fusion.frontend.trace import aval_of, without_unused
from blockdiag.fusion.ir.tree import Region, Source, Unpullable


def source_made_by(compute: Callable[..., Any], read: Sequence[core.Var]) -> Source:
    """Return the array that a function computes from variables of a program.

    Raises:
        Unpullable: the function holds constant arrays, or computes nothing.
    """
    closed = without_unused(jax.make_jaxpr(compute)(*(var.aval for var in read)))
    if closed.consts or not closed.jaxpr.eqns:
        raise Unpullable("arrays of numbers")
    found = dict(zip(closed.jaxpr.invars, read, strict=True))
    equations = tuple(
        equation.replace(invars=[x if isinstance(x, core.Literal) else found.get(x, x) for x in equation.invars])
        for equation in closed.jaxpr.eqns
    )
    (result,) = closed.jaxpr.outvars
    aval = aval_of(result)
    return Source(result, tuple(aval.shape), np.dtype(aval.dtype), made=equations)


def with_made(jaxpr: core.ClosedJaxpr, regions: Iterable[Region]) -> core.ClosedJaxpr:
    """Return the flat program with the equations that compute leaves, each placed behind its operands."""
    made = {leaf.source.key: leaf.source.made for region in regions for leaf in region.leaves if leaf.source.made}
    if not made:
        return jaxpr
    place_of = {var: place for place, equation in enumerate(jaxpr.jaxpr.eqns, 1) for var in equation.outvars}
    added: dict[int, list[core.JaxprEqn]] = {}
    for equations in made.values():
        needed = [x for equation in equations for x in equation.invars if isinstance(x, core.Var)]
        added.setdefault(max((place_of.get(x, 0) for x in needed), default=0), []).extend(equations)
    whole = [*added.get(0, [])]
    for place, equation in enumerate(jaxpr.jaxpr.eqns, 1):
        whole += [equation, *added.get(place, [])]
    return core.ClosedJaxpr(jaxpr.jaxpr.replace(eqns=whole), jaxpr.consts)
