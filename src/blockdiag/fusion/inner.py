"""Programs within a program: bodies of `scan`, branches, and parts that `jax.checkpoint` computes again for gradients.

Each is looked at by itself and stays what it is: layers are scanned over, and what is not to be kept is not.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.extend import core

from blockdiag.fusion.dims import producers_of
from blockdiag.fusion.trace import aval_of, bind, evaluate, flat_jaxpr, has_primitive, read

CHECKPOINTS = frozenset({"checkpoint", "remat2"})
"""What parts that are computed again are called in programs."""

type _Compute = Callable[..., list[Any]]


@dataclass(frozen=True)
class Inner:
    """A program within another one.

    Attributes:
        equation: of the other one.
        jaxprs: flat, one of each branch; what no argument has a part in, such as masks of positions, is made within.
        shared: operands that it takes as they are.
        rest: of a loop: what goes from step to step, and what has a part for each.
    """

    equation: core.JaxprEqn
    jaxprs: tuple[core.ClosedJaxpr, ...]
    shared: tuple[Any, ...]
    rest: tuple[Any, ...] = ()

    def results(self, computes: Sequence[_Compute], value_of: Callable[[Any], Any]) -> list[Any]:
        """What the equation gives.

        Args:
            computes: what each program within gives, from its arguments.
            value_of: gives the value of an operand.
        """
        params, shared = self.equation.params, list(map(value_of, self.shared))
        if self.equation.primitive.name == "cond":
            return lax.switch(value_of(self.equation.invars[0]), computes, *shared)
        (compute,) = computes
        if self.equation.primitive.name in CHECKPOINTS:
            return jax.checkpoint(compute, policy=params["policy"], prevent_cse=params["prevent_cse"])(*shared)
        count = _carried(self.equation)

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
    """Whether parts of a program are computed again for gradients."""
    return any(equation.primitive.name in CHECKPOINTS for equation in jaxpr.eqns)


def inner_of(closed: core.ClosedJaxpr) -> list[Inner]:
    """The programs within a flat one that may have attention."""
    found = []
    jaxpr, producers = closed.jaxpr, producers_of(closed.jaxpr)
    of_arguments = set(jaxpr.invars)
    for equation in jaxpr.eqns:
        if equation.effects or of_arguments.intersection(x for x in equation.invars if isinstance(x, core.Var)):
            of_arguments |= set(equation.outvars)
        bodies, first, rest = _bodies(equation)
        # What a reference holds is read where it is: such bodies stay as they are.
        has_references = any(hasattr(x.aval, "inner_aval") for x in equation.invars)
        if has_references or not any(has_primitive(body.jaxpr, "dot_general") for body in bodies):
            continue
        shared = tuple(x for x in first if isinstance(x, core.Var) and x in of_arguments)
        flat = []
        for body in bodies:

            def compute(*given: Any, first: Any = first, shared: Any = shared, body: Any = body) -> list[Any]:
                known = dict(zip(shared, given, strict=False)) | dict(zip(jaxpr.constvars, closed.consts, strict=True))
                whole = [*(_made(x, known, producers) for x in first), *given[len(shared) :]]
                return evaluate(body.jaxpr, body.consts, whole, keep=CHECKPOINTS)

            avals = [*map(aval_of, shared), *body.in_avals[len(first) :]]
            flat.append(flat_jaxpr(compute, *avals, keep=CHECKPOINTS)[0])
        found.append(Inner(equation, tuple(flat), shared, rest))
    return found


def _bodies(equation: core.JaxprEqn) -> tuple[list[core.ClosedJaxpr], tuple[Any, ...], tuple[Any, ...]]:
    """The programs within an equation, what they take as it is, and other operands; none of other equations."""
    name, params = equation.primitive.name, equation.params
    if name in CHECKPOINTS and not params["differentiated"]:
        return [core.ClosedJaxpr(params["jaxpr"], ())], tuple(equation.invars), ()
    if name == "cond":
        return list(params["branches"]), tuple(equation.invars[1:]), ()
    if name != "scan":
        return [], (), ()
    body = params["jaxpr"]
    each = zip(equation.invars, body.in_avals, strict=True)
    count = len(equation.invars) - _carried(equation) - sum(_rank(x.aval) > _rank(within) for x, within in each)
    return [body], tuple(equation.invars[:count]), tuple(equation.invars[count:])


def _carried(scan: core.JaxprEqn) -> int:
    """How many arrays go from step to step: results that have no axis of steps."""
    within = scan.params["jaxpr"].out_avals
    return sum(_rank(x.aval) == _rank(one) for x, one in zip(scan.outvars, within, strict=True))


def _rank(aval: Any) -> int:
    return len(aval.shape)


def _made(operand: Any, known: dict[core.Var, Any], producers: dict[core.Var, core.JaxprEqn]) -> Any:
    """A value of which only some others are known, by the equations that make it of these."""
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
