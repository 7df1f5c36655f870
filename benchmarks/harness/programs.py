"""Functions through `jax.jit` as compiled programs that can be timed, and the kernel launches in a jaxpr."""

import collections
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
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


@dataclass(frozen=True)
class Chain:
    """How a program makes several calls, each of which depends on the one before, and what the compiler may share.

    Fewer fusions are welcome, because work that does not depend on the call may be shared. Kernels may not be shared.

    Attributes:
        link: makes a function of several calls from a function and their number.
        is_exact: the program has no kernel that a single call has not.
        needs_kernels: a call without kernels is refused, because nothing would tell whether calls were merged.
        spare_copies: whole-array copies beyond those of the single calls; None for any number.
        shared: part of the names of kernels that calls may share.
    """

    link: Callable[[Callable[..., Any], int], Callable[..., Any]]
    is_exact: bool = False
    needs_kernels: bool = False
    spare_copies: int | None = None
    shared: str | None = None

    def demand(self, single: collections.Counter[str], found: collections.Counter[str], count: int) -> None:
        """Compare the kernels and copies of a program of `count` calls with those of a single call.

        Raises:
            ChainBroken: the program has fewer kernels or more copies.
        """
        names = {name for name in (found | single if self.is_exact else single) if name != "copy"}
        kernels = {name for name in names if self.shared is None or self.shared not in name}
        if any(found[name] != count * single[name] for name in kernels) or (self.needs_kernels and not kernels):
            raise ChainBroken(f"{count} calls in one program make {calls_as_text(found)}")
        if self.spare_copies is not None and found["copy"] > count * single["copy"] + self.spare_copies:
            raise ChainBroken(f"{count} calls in one program make {found['copy']} copies")


def compile_program(
    function: Callable[..., Any], *arguments: Any, chain: Chain | None = None, note: str = "", tensors: Any = tuple
) -> Program:
    """Return a jitted function with its arguments as a program.

    Args:
        function: of the arguments.
        *arguments: on the device.
        chain: how several calls are made; None makes each call set one number of an argument of the next call.
        note: stands before the custom calls in the program's note.
        tensors: of the program.
    """
    chain = chain or Chain(_chained, spare_copies=1)
    compiled = jax.jit(function).lower(*arguments).compile()
    memory, text = compiled.memory_analysis(), compiled.as_text() or ""
    calls = custom_calls(text)

    def chained(count: int) -> Program:
        program = jax.jit(chain.link(function, count)).lower(*arguments).compile()
        chain.demand(work_of(text), work_of(program.as_text() or ""), count)
        run, note = (lambda: program(*arguments)), f"{single.note}; timed as programs of {count} calls"
        return replace(single, run=run, calls=count, note=note, chain=None)

    single = Program(
        lambda: compiled(*arguments),
        extra_bytes=None if memory is None else max(0, int(memory.temp_size_in_bytes) - address_table_bytes(text)),
        note="; ".join(filter(None, (note, f"custom calls: {calls_as_text(calls)}" if calls else "no custom call"))),
        chain=chained,
        tensors=tensors,
    )
    return single


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


def work_of(text: str) -> collections.Counter[str]:
    """Return custom calls by target, except those that only annotate, and "copy", of a compiled program's text."""
    calls = custom_calls(text).items()
    work = collections.Counter({name: count for name, count in calls if not re.search("annotate|Sharding", name)})
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
