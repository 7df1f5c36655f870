"""Programs within a program: bodies of `scan`, branches, and parts that `jax.checkpoint` recomputes for gradients.

Each is fused by itself and keeps its form: a scan over layers stays a scan, and a checkpoint still stores no residuals.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax import lax
from jax.extend import core

from blockdiag.fusion.frontend.trace import aval_of, bind, evaluate, flat_jaxpr, has_primitive, read
from blockdiag.fusion.ir.tree import ELEMENTWISE
from blockdiag.fusion.regions.axis_labels import MOVES, producers_of
from blockdiag.fusion.regions.guards import PASSES

CHECKPOINTS = frozenset({"checkpoint", "remat2"})
"""Primitives whose body is recomputed in the backward pass."""

OPENED = CHECKPOINTS | {"scan", "cond"}
"""Primitives whose inner programs are fused."""

# An array this many times larger than its inputs is computed within the loop.
_LARGER = 8
_MADE = ELEMENTWISE | {*MOVES, *PASSES, "gather", "iota"}

type _Compute = Callable[..., list[Any]]


@dataclass(frozen=True)
class Inner:
    """The programs within an equation of another one.

    Attributes:
        equation: the equation of the outer program.
        jaxprs: the flat inner programs, one for each branch. They compute values that depend on no argument, such as
            masks of positions, themselves.
        shared: the operands that are passed as they are; for a loop, those that are the same in every step.
        rest: the other operands of a loop: the carry, and the arrays that are scanned over.
        hoisted: the same programs with large arrays, such as masks, computed within from small ones; None if there are
            no such arrays.
    """

    equation: core.JaxprEqn
    jaxprs: tuple[core.ClosedJaxpr, ...]
    shared: tuple[Any, ...]
    rest: tuple[Any, ...] = ()
    hoisted: "Inner | None" = None

    def results(self, computes: Sequence[_Compute], value_of: Callable[[Any], Any]) -> list[Any]:
        """Return the results of the equation.

        Args:
            computes: for each inner program, a function from its arguments to its results.
            value_of: returns the value of an operand.
        """
        params, shared = self.equation.params, list(map(value_of, self.shared))
        if self.equation.primitive.name == "cond":
            return lax.switch(value_of(self.equation.invars[0]), computes, *shared)
        (compute,) = computes
        if self.equation.primitive.name in CHECKPOINTS:
            return jax.checkpoint(compute, policy=params["policy"], prevent_cse=params["prevent_cse"])(*shared)
        count = carried(self.equation)

        def step(carry: Any, each: Any) -> tuple[Any, Any]:
            found = compute(*shared, *carry, *each)
            return found[:count], found[count:]

        given = list(map(value_of, self.rest))
        carry, each = lax.scan(
            step,
            given[:count],
            given[count:],
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        return [*carry, *each]


def has_checkpoints(jaxpr: core.Jaxpr) -> bool:
    """Return whether parts of a program are recomputed for gradients."""
    return any(equation.primitive.name in CHECKPOINTS for equation in jaxpr.eqns)


def inner_of(closed: core.ClosedJaxpr) -> list[Inner]:
    """Return the inner programs of a flat program that may contain attention."""
    found = []
    jaxpr, producers = closed.jaxpr, producers_of(closed.jaxpr)
    of_arguments = set(jaxpr.invars)
    for equation in jaxpr.eqns:
        if equation.effects or of_arguments.intersection(x for x in equation.invars if isinstance(x, core.Var)):
            of_arguments |= set(equation.outvars)
        bodies, first, _ = bodies_of(equation)
        # References are read at their own position in the program, so bodies with references stay as they are.
        has_references = any(hasattr(x.aval, "inner_aval") for x in equation.invars)
        if has_references or not any(has_primitive(body.jaxpr, "dot_general") for body in bodies):
            continue
        shared = [x for x in first if isinstance(x, core.Var) and x in of_arguments]
        small = dict.fromkeys(y for x in shared for y in _made_of(x, producers) if y in of_arguments)
        whole = _opened(closed, producers, equation, tuple(shared))
        if list(small) != shared:
            whole = replace(whole, hoisted=_opened(closed, producers, equation, tuple(small)))
        found.append(whole)
    return found


def _opened(
    closed: core.ClosedJaxpr,
    producers: Mapping[core.Var, core.JaxprEqn],
    equation: core.JaxprEqn,
    shared: tuple[Any, ...],
) -> Inner:
    """Return the inner programs of an equation as functions of `shared`, from which other operands are computed."""
    bodies, first, rest = bodies_of(equation)

    def flat(body: core.ClosedJaxpr) -> core.ClosedJaxpr:
        def compute(*given: Any) -> list[Any]:
            known = dict(zip(shared, given, strict=False))
            known |= dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
            whole = [*(_made(x, known, producers) for x in first), *given[len(shared) :]]
            return evaluate(body.jaxpr, body.consts, whole, keep=CHECKPOINTS)

        avals = [*map(aval_of, shared), *body.in_avals[len(first) :]]
        return flat_jaxpr(compute, *avals, keep=CHECKPOINTS)[0]

    return Inner(equation, tuple(map(flat, bodies)), shared, rest)


def _made_of(var: core.Var, producers: Mapping[core.Var, core.JaxprEqn]) -> list[core.Var]:
    """Return the small arrays that a large one is computed from, by moves and elementwise operations.

    If it depends on large arrays, or on other operations, it is returned itself.
    """
    most = math.prod(aval_of(var).shape) // _LARGER
    found: dict[core.Var, None] = {}
    waiting, seen = [var], set()
    while waiting:
        one = waiting.pop()
        if one in seen:
            continue
        seen.add(one)
        if math.prod(aval_of(one).shape) <= most:
            found[one] = None
            continue
        equation = producers.get(one)
        if equation is None or equation.effects or equation.primitive.name not in _MADE:
            return [var]
        waiting += [x for x in equation.invars if isinstance(x, core.Var)]
    return list(found) or [var]


def bodies_of(equation: core.JaxprEqn) -> tuple[list[core.ClosedJaxpr], tuple[Any, ...], tuple[Any, ...]]:
    """Return the inner programs of an equation, the operands passed as they are, and the other operands of a loop.

    All are empty for other equations.
    """
    name, params = equation.primitive.name, equation.params
    if name in CHECKPOINTS and not params["differentiated"]:
        return [core.ClosedJaxpr(params["jaxpr"], ())], tuple(equation.invars), ()
    if name == "cond":
        return list(params["branches"]), tuple(equation.invars[1:]), ()
    if name != "scan":
        return [], (), ()
    body = params["jaxpr"]
    each = zip(equation.invars, body.in_avals, strict=True)
    count = len(equation.invars) - carried(equation) - sum(_rank(x.aval) > _rank(within) for x, within in each)
    return [body], tuple(equation.invars[:count]), tuple(equation.invars[count:])


def carried(scan: core.JaxprEqn) -> int:
    """Return the number of carried arrays: results without an axis of steps."""
    within = scan.params["jaxpr"].out_avals
    return sum(_rank(x.aval) == _rank(one) for x, one in zip(scan.outvars, within, strict=True))


def _rank(aval: Any) -> int:
    return len(aval.shape)


def _made(operand: Any, known: dict[core.Var, Any], producers: Mapping[core.Var, core.JaxprEqn]) -> Any:
    """Compute a value from known ones by the equations between, and add these to the known values."""
    waiting: Sequence[Any] = [operand]
    while waiting:
        var, *left = waiting
        if not isinstance(var, core.Var) or var in known:
            waiting = left
            continue
        equation = producers[var]
        missing = [x for x in equation.invars if isinstance(x, core.Var) and x not in known]
        waiting = [*missing, *waiting]
        if not missing:
            results = bind(equation, [read(known, x) for x in equation.invars])
            known |= dict(zip(equation.outvars, results, strict=True))
    return read(known, operand)
