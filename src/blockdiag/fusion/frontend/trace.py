"""Trace functions to flat programs: calls are inlined if they may contain attention."""

import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core, source_info_util
from jax.interpreters import partial_eval

# Calls that are equivalent to their body.
_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
}
# Calls with a custom derivative. They are inlined, and lose it, only if they may be a softmax.
_CUSTOM = {"custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}


def flat_jaxpr(
    function: Callable[..., Any], *arguments: Any, keep: Container[str] = ()
) -> tuple[core.ClosedJaxpr, Any]:
    """Return the flat program of a function of pytrees of arrays, and the tree structure of its results.

    Args:
        function, arguments: the function, and its arguments or their avals.
        keep: the names of calls that are not inlined.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    structure = jax.tree.structure(shapes)
    flat = jax.make_jaxpr(lambda *given: evaluate(closed.jaxpr, closed.consts, given, keep=keep))(*closed.in_avals)
    return flat, structure


def tile_jaxpr(function: Callable[..., Any], *shapes: Any) -> core.ClosedJaxpr:
    """Return the program of a function of tiles, traced outside of any mesh of devices."""
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        closed = jax.make_jaxpr(function)(*shapes)
    if any(equation.primitive.name == "scan" for equation in closed.jaxpr.eqns):
        # Loops may carry unused gradients, which are removed here.
        jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
        closed = core.ClosedJaxpr(jaxpr, closed.consts)
    return closed


def body_of(equation: core.JaxprEqn) -> core.ClosedJaxpr | None:
    """Return the body of a call, or None for other equations."""
    name = equation.primitive.name
    inner = equation.params.get(_CALLS.get(name) or _CUSTOM.get(name) or "")
    if inner is None:
        return None
    return inner if isinstance(inner, core.ClosedJaxpr) else core.ClosedJaxpr(inner, ())


def evaluate(
    jaxpr: core.Jaxpr,
    consts: Sequence[Any],
    arguments: Sequence[Any],
    replaced: Mapping[core.Var, Callable[..., list[Any]]] = MappingProxyType({}),
    keep: Container[str] = (),
) -> list[Any]:
    """Return the results of a program, with its calls inlined.

    Args:
        jaxpr, consts, arguments: the program, its constants and its arguments.
        replaced: functions that compute the results of some equations from the same operands, by the first result.
        keep: the names of calls that are not inlined.
    """
    known: dict[core.Var, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    known |= dict(zip(jaxpr.invars, arguments, strict=True))
    for equation in jaxpr.eqns:
        given = [read(known, operand) for operand in equation.invars]
        inner, replacement = body_of(equation), replaced.get(equation.outvars[0]) if equation.outvars else None
        if replacement is not None:
            with placed(equation):
                results = replacement(*given)
        elif inner is None or equation.primitive.name in keep:
            results = bind(equation, given)
        elif equation.primitive.name in _CALLS or _is_softmax(equation):
            with placed(equation):
                results = evaluate(inner.jaxpr, inner.consts, given, keep=keep)
        else:
            results = bind(equation, given)
        known |= dict(zip(equation.outvars, results, strict=True))
    return [read(known, result) for result in jaxpr.outvars]


def rewritten(
    closed: core.ClosedJaxpr,
    equations: Sequence[core.JaxprEqn],
    replaced: Mapping[int, Callable[[Callable[[Any], Any]], dict[core.Var, Any]]],
) -> core.ClosedJaxpr:
    """Return a flat program with the same arguments and results, in which some equations are replaced.

    Args:
        closed: the program.
        equations: its equations, in topological order.
        replaced: the replacement of each equation, by the equation's `id`. It takes a function that returns the value
            of an operand, and returns results by their variables.
    """
    jaxpr = closed.jaxpr

    def whole(*arguments: Any) -> list[Any]:
        known: dict[core.Var, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        known |= dict(zip(jaxpr.invars, arguments, strict=True))
        for equation in equations:
            replacement = replaced.get(id(equation))
            if replacement is None:
                results = bind(equation, [read(known, x) for x in equation.invars])
                known |= dict(zip(equation.outvars, results, strict=True))
            else:
                with placed(equation):
                    known |= replacement(functools.partial(read, known))
        return [read(known, x) for x in jaxpr.outvars]

    return without_unused(jax.make_jaxpr(whole)(*closed.in_avals))


def without_unused(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """Return a program without dead code. Equations with effects are kept."""
    needed = {x for x in closed.jaxpr.outvars if isinstance(x, core.Var)}
    kept = []
    for equation in reversed(closed.jaxpr.eqns):
        if has_effects(equation) or any(x in needed for x in equation.outvars):
            kept.append(equation)
            needed |= {x for x in equation.invars if isinstance(x, core.Var)}
    return core.ClosedJaxpr(closed.jaxpr.replace(eqns=kept[::-1]), closed.consts)


def read(known: dict[core.Var, Any], operand: Any) -> Any:
    """Return the value of an operand."""
    return operand.val if isinstance(operand, core.Literal) else known[operand]


def placed(equation: core.JaxprEqn) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which new equations get the user's source line of an equation.

    Equations of a library have the line from which it was called.
    """
    if not source_info_util.summarize(equation.source_info):
        return contextlib.nullcontext()
    return source_info_util.user_context(equation.source_info.traceback)


def kept[T](derive: Callable[[core.Jaxpr], T]) -> Callable[[core.Jaxpr], T]:
    """Memoise a function of programs for as long as the program lives. Callers must not change its results."""
    known: weakref.WeakKeyDictionary[core.Jaxpr, T] = weakref.WeakKeyDictionary()

    @functools.wraps(derive)
    def found(jaxpr: core.Jaxpr) -> T:
        if jaxpr not in known:
            known[jaxpr] = derive(jaxpr)
        return known[jaxpr]

    return found


def constants(jaxpr: core.Jaxpr, most: int) -> Callable[[Any], np.ndarray | None]:
    """Return a function that gives the value of a variable that depends on no argument, and None for other variables.

    Args:
        jaxpr: the program.
        most: the limit of elements of arrays that are evaluated. Larger ones count as unknown.
    """
    found = _known_constants(jaxpr)
    if most not in found:
        found[most] = constants_with(jaxpr, most, {})
    return found[most]


@kept
def _known_constants(jaxpr: core.Jaxpr) -> dict[int, Callable[[Any], np.ndarray | None]]:
    """Return the cache of `constants` for a program, by the limit of elements."""
    del jaxpr
    return {}


def constants_with(
    jaxpr: core.Jaxpr, most: int, given: Mapping[core.Var, np.ndarray | None]
) -> Callable[[Any], np.ndarray | None]:
    """Return `constants` with some variables given: their value, or None if they count as unknown."""
    known = {var: value for var, value in given.items() if value is not None}
    producers: dict[core.Var, core.JaxprEqn] = {}
    for equation in jaxpr.eqns:
        are_constant = all(isinstance(x, core.Literal) or x in known or x in producers for x in equation.invars)
        if are_constant and _is_known(equation, most):
            producers |= dict.fromkeys(equation.outvars, equation)

    def value_of(var: Any) -> np.ndarray | None:
        if isinstance(var, core.Literal):
            return np.asarray(var.val)
        # Long programs would overflow Python's stack, so this uses an explicit one.
        waiting = [var] if var in producers else []
        while waiting:
            equation = producers[waiting[-1]]
            missing = [x for x in equation.invars if isinstance(x, core.Var) and x not in known]
            waiting += missing
            if not missing:
                known.update(zip(equation.outvars, _computed(equation, known), strict=True))
                waiting.pop()
        return known.get(var)

    return value_of


def _computed(equation: core.JaxprEqn, known: Mapping[core.Var, np.ndarray]) -> list[np.ndarray]:
    """Return the results of an equation with known operands."""
    given = [np.asarray(x.val) if isinstance(x, core.Literal) else known[x] for x in equation.invars]
    with jax.ensure_compile_time_eval():
        # Under `jax.shard_map`, `pvary` marks a constant as varying over mesh axes. Its value does not change.
        results = given if equation.primitive.name == "pvary" else bind(equation, given)
    return list(map(np.asarray, results))


def has_effects(equation: core.JaxprEqn) -> bool:
    """Return whether an equation has side effects: it prints, calls back, or writes to a reference."""
    # The effect of a collective only names its axis.
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in equation.effects)


def _is_known(equation: core.JaxprEqn, most: int) -> bool:
    """Return whether an equation can be evaluated at trace time: it is deterministic, and its results are small.

    Random keys are excluded, because they are not NumPy arrays.
    """
    if equation.effects or "callback" in equation.primitive.name:
        return False
    avals = [aval_of(x) for x in equation.outvars]
    return not any(jnp.issubdtype(x.dtype, jax.dtypes.extended) or math.prod(x.shape) > most for x in avals)


def aval_of(operand: Any) -> jax.core.ShapedArray:
    """Return the shape and dtype of a variable or a literal."""
    # A reference has the aval of its contents.
    aval = getattr(operand.aval, "inner_aval", operand.aval)
    assert isinstance(aval, jax.core.ShapedArray)
    return aval


def bind(equation: core.JaxprEqn, given: Sequence[Any]) -> list[Any]:
    """Bind an equation to new operands, and return its results. It keeps the user's source line."""
    parameters = equation.primitive.get_bind_params(equation.params)
    # Literals may overflow to infinity as they do in the function. NumPy would warn of that.
    with placed(equation), equation.ctx.manager, np.errstate(over="ignore"):
        results = equation.primitive.bind(*given, **parameters)
    return list(results) if equation.primitive.multiple_results else [results]


def _is_softmax(equation: core.JaxprEqn) -> bool:
    """Return whether a function with a custom tangent may be a softmax, whose tangent is known."""
    inner = body_of(equation)
    names = set() if inner is None or equation.primitive.name != "custom_jvp_call" else set(primitives(inner.jaxpr))
    return {"reduce_max", "exp"} <= names and "dot_general" not in names


def hidden_attention(jaxpr: core.Jaxpr) -> core.JaxprEqn | None:
    """Return an equation with a softmax or a product inside: a call with a custom derivative, a loop or a branch."""

    def may_hide(names: set[str]) -> bool:
        return "dot_general" in names or ("exp" in names and bool({"reduce_sum", "reduce_max"} & names))

    return next((equation for equation in jaxpr.eqns if may_hide(_inside(equation))), None)


def loop_with_attention(equations: Sequence[core.JaxprEqn]) -> core.JaxprEqn | None:
    """Return a loop or a branch with exponentials and products inside, or None."""
    found = (x for x in equations if body_of(x) is None and {"dot_general", "exp"} <= _inside(x))
    return next(found, None)


def _inside(equation: core.JaxprEqn) -> set[str]:
    """Return the names of all primitives in an equation's programs, including nested ones."""
    inner = [x for param in equation.params.values() for x in (param if isinstance(param, tuple) else (param,))]
    programs = [x.jaxpr if isinstance(x, core.ClosedJaxpr) else x for x in inner]
    found: set[str] = set()
    for program in programs:
        if isinstance(program, core.Jaxpr):
            found |= {x.primitive.name for x in program.eqns}.union(*map(_inside, program.eqns))
    return found


def primitives(jaxpr: core.Jaxpr) -> Iterator[str]:
    """Yield the names of all primitives of a program, including those in calls."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        inner = body_of(equation)
        if inner is not None:
            yield from primitives(inner.jaxpr)


def has_primitive(jaxpr: core.Jaxpr, name: str) -> bool:
    """Return whether a primitive occurs anywhere in a program, including loops and branches."""
    return any(name == x.primitive.name or name in _inside(x) for x in jaxpr.eqns)
