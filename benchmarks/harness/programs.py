"""Functions through `jax.jit` as compiled programs that can be timed, and the kernel launches in a jaxpr."""

import collections
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.harness.compiled import address_table_bytes, calls_as_text, custom_calls
from benchmarks.harness.failures import ChainBroken
from benchmarks.harness.family import Program
from benchmarks.harness.records import recordable_failures
from blockdiag.cli.machine import reason_of
from blockdiag.interop.by_target import by_target_p, chosen_jaxpr
from blockdiag.triton_kernels.launch.plan import Target


def compile_program(function: Callable[..., Any], *arguments: Any) -> Program:
    """A jitted function with its arguments."""
    compiled = jax.jit(function).lower(*arguments).compile()
    memory, text = compiled.memory_analysis(), compiled.as_text() or ""
    calls = custom_calls(text)

    def chain(count: int) -> Program:
        program = jax.jit(_chained(function, count)).lower(*arguments).compile()
        found, single = _work(program.as_text() or ""), _work(text)
        expected = collections.Counter({name: count * number for name, number in single.items()})
        # Fewer fusions are welcome: what does not depend on the call may be shared. Fewer kernels or more copies not.
        if any(found[name] != expected[name] for name in calls) or found["copy"] > expected["copy"] + 1:
            raise ChainBroken(f"{count} calls in one program make {calls_as_text(found)}")
        note = f"{single_note}; timed as programs of {count} calls"
        return Program(lambda: program(*arguments), count, extra_bytes, note)

    extra_bytes = None if memory is None else max(0, int(memory.temp_size_in_bytes) - address_table_bytes(text))
    single_note = f"custom calls: {calls_as_text(calls)}" if calls else "no custom call"
    return Program(lambda: compiled(*arguments), 1, extra_bytes, single_note, chain)


# Programs shorter than this are timed as several calls in one program.
SHORT_MS = 2.0
CHAINED_CALLS = 10


def chained_if_short(program: Program, milliseconds: float, *, is_on_gpu: bool) -> Program:
    """Return several calls in one program where one is short, or the program with the reason why that is impossible."""
    if milliseconds > SHORT_MS or program.chain is None or not is_on_gpu:
        return program
    try:
        return program.chain(CHAINED_CALLS)
    except recordable_failures() as failure:
        return replace(program, note=f"{program.note}; timed call by call, {reason_of(failure)}")


def _chained(function: Callable[..., Any], calls: int) -> Callable[..., Any]:
    """`function` again and again in one program: one number of an argument depends on all results of the call before.

    Whole results are not fed back, as they are elsewhere: queries or keys that are outputs of attention would be routed
    in another way than random ones. The number is in the first argument that is an array, of which one copy is made.
    """

    def program(*arguments: Any) -> Any:
        given = list(arguments)
        carrier = next(index for index, argument in enumerate(given) if isinstance(argument, jax.Array))
        results = function(*given)
        for _ in range(calls - 1):
            given[carrier] = given[carrier].at[(0,) * given[carrier].ndim].set(_small_number(results, given[carrier]))
            results = function(*given)
        return results

    return program


def _small_number(results: Any, like: jax.Array) -> jax.Array:
    """One of two numbers, depending on one element of each result."""
    total = sum(leaf[(0,) * leaf.ndim].astype(jnp.float32) for leaf in jax.tree.leaves(results))
    return jnp.where(jnp.asarray(total) > 0, 0.5, 0.25).astype(like.dtype)


def _work(text: str) -> collections.Counter[str]:
    """Custom calls by target, and whole-array copies, of a compiled program's text."""
    work = custom_calls(text)
    work["copy"] = len(re.findall(r"\bcopy(?:-start)?\(", text))
    return work


def collect_specs(jaxpr: Any, found: dict[Any, None], target: Target | None = None) -> None:
    """Every launch in a jaxpr and in those within it that is not the interpreter's.

    Args:
        target: the GPU; None: one that nothing is computed otherwise for.
    """
    for equation in jaxpr.eqns:
        if "spec" in equation.params and not equation.params.get("interpret"):
            found[equation.params["spec"]] = None
        if equation.primitive is by_target_p:
            collect_specs(chosen_jaxpr(target, **equation.params).jaxpr, found, target)
            continue
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(inner):
                collect_specs(getattr(inner, "jaxpr", inner), found, target)


def _is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns")
