"""Rewrite a `cond` or `switch` that only chooses between masks as an elementwise select.

A choice between other arrays is rewritten, too, if no derivative flows through them. An example is a scan over layers
that picks a window mask or a full mask by a flag. The result of a branch is an array in memory, while a select between
elements is a function of positions, as the masks themselves are.
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

# Operations that are cheap enough to compute in branches that are not taken.
_CHEAP = ELEMENTWISE | {*MOVES, *PASSES, "iota"}


def with_chosen(closed: core.ClosedJaxpr) -> core.ClosedJaxpr | None:
    """Return the flat program with selects in place of branches that only make masks, or None if there are none."""
    replaced = {}
    for equation in closed.jaxpr.eqns:
        if equation.primitive.name != "cond" or equation.effects or not _are_pairs(equation):
            continue
        branches = [flat_jaxpr(core.jaxpr_as_fun(x), *x.in_avals)[0] for x in equation.params["branches"]]
        if all(x.primitive.name in _CHEAP for branch in branches for x in branch.jaxpr.eqns):
            replaced[id(equation)] = functools.partial(_chosen, equation, branches)
    return rewritten(closed, closed.jaxpr.eqns, replaced) if replaced else None


def _are_pairs(equation: core.JaxprEqn) -> bool:
    """Return whether all results may be arrays of queries by keys, and no derivative flows through the equation."""
    has_derivative = any(jnp.issubdtype(aval_of(x).dtype, jnp.floating) for x in equation.invars)
    return not has_derivative and all(len(aval_of(x).shape) >= 2 for x in equation.outvars)


def _chosen(
    equation: core.JaxprEqn, branches: list[core.ClosedJaxpr], value_of: Callable[[Any], Any]
) -> dict[core.Var, Any]:
    """Return the results of the equation as selects between the results of all branches."""
    index, *given = map(value_of, equation.invars)
    which = index != 0 if len(branches) == 2 else index
    cases = [evaluate(branch.jaxpr, branch.consts, given) for branch in branches]
    pairs = zip(equation.outvars, zip(*cases, strict=True), strict=True)
    return {var: lax.select_n(jnp.broadcast_to(which, aval_of(var).shape), *each) for var, each in pairs}
