"""Masks of branches: a `cond` or `switch` that only chooses between masks, or numbers without derivatives, chooses
between their elements.

As scanned layers pick the mask of a window or of all keys by a flag. A branch gives an array; a choice between elements
is a function of places, like the masks themselves.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend import core

from blockdiag.fusion.frontend.trace import aval_of, evaluate, flat_jaxpr, rewritten
from blockdiag.fusion.ir.tree import ELEMENTWISE
from blockdiag.fusion.regions.axis_labels import MOVES
from blockdiag.fusion.regions.guards import PASSES

# What costs little where its branch is not taken.
_CHEAP = ELEMENTWISE | {*MOVES, *PASSES, "iota"}


def with_chosen(closed: core.ClosedJaxpr) -> core.ClosedJaxpr | None:
    """The same flat program without branches that only make masks; None where there are none."""
    replaced = {}
    for equation in closed.jaxpr.eqns:
        if equation.primitive.name != "cond" or equation.effects or not _are_pairs(equation):
            continue
        branches = [flat_jaxpr(core.jaxpr_as_fun(x), *x.in_avals)[0] for x in equation.params["branches"]]
        if all(x.primitive.name in _CHEAP for branch in branches for x in branch.jaxpr.eqns):
            replaced[id(equation)] = functools.partial(_chosen, equation, branches)
    return rewritten(closed, closed.jaxpr.eqns, replaced) if replaced else None


def _are_pairs(equation: core.JaxprEqn) -> bool:
    """Whether results may be of queries by keys, and no derivative goes through the equation."""
    has_derivative = any(jnp.issubdtype(aval_of(x).dtype, jnp.floating) for x in equation.invars)
    return not has_derivative and all(len(aval_of(x).shape) >= 2 for x in equation.outvars)


def _chosen(
    equation: core.JaxprEqn, branches: list[core.ClosedJaxpr], value_of: Callable[[Any], Any]
) -> dict[core.Var, Any]:
    """The results of an equation, as choices between those of all branches."""
    index, *given = map(value_of, equation.invars)
    which = index != 0 if len(branches) == 2 else index
    cases = [evaluate(branch.jaxpr, branch.consts, given) for branch in branches]
    pairs = zip(equation.outvars, zip(*cases, strict=True), strict=True)
    return {var: lax.select_n(jnp.broadcast_to(which, aval_of(var).shape), *each) for var, each in pairs}
