"""The passes of MoBA through `jax.jit`, as compiled programs that can be timed, and what they leave to be checked."""

import collections
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.harness.compiled import address_table_bytes, calls_as_text, custom_calls
from benchmarks.moba.cases import MOBA_PASSES, MoBACase, MoBAPass
from blockdiag.dispatch import call_implementation
from blockdiag.interop.by_target import by_target_p, chosen_jaxpr
from blockdiag.moba import moba_attention, prepare_moba_call
from blockdiag.moba_tables import moba_tables
from blockdiag.triton_kernels.plan import Target

type Operands = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


class ChainBroken(RuntimeError):
    """XLA removed, merged or added work in a chained program: its time is not that of so many calls."""


@dataclass(frozen=True)
class Program:
    """One pass, compiled.

    Attributes:
        run: queues the work once.
        calls: how often one `run` does the work.
        extra_bytes: device memory of one call beyond its inputs and outputs.
        note: what the CSV should say beside the numbers.
        chain: makes the same pass with `run` doing the work that many times in a row; may raise.
    """

    run: Callable[[], Any]
    calls: int
    extra_bytes: int | None
    note: str
    chain: "Callable[[int], Program] | None" = None


def attention_of(case: MoBACase, implementation: str) -> Callable[..., Any]:
    """`moba_attention` of a case: output and log-sum-exp of query, key and value."""

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
        return moba_attention(
            query,
            key,
            value,
            block_size=case.block_size,
            top_k=case.top_k,
            implementation=implementation,
            return_residual=True,
        )

    return attend


def routing_of(case: MoBACase, implementation: str) -> Callable[..., Any]:
    """All that `moba_attention` does before it attends: tables, mean keys, scores, choice and block-major lists."""

    def route(query: jax.Array, key: jax.Array) -> Any:
        call = prepare_moba_call(
            query,
            key,
            block_size=case.block_size,
            top_k=case.top_k,
            scale=None,
            is_causal=True,
            sequence_offsets=None,
            key_sequence_offsets=None,
            key_mask=None,
            routing=None,
            implementation=implementation,
        )
        tables = moba_tables(call.problem, query.shape[0])
        query, key = (array.reshape(-1, *array.shape[2:]) for array in (query, key))
        chosen = call_implementation("route", call.problem, call.implementations, query, key, None, *tables)
        return call_implementation("make_lists", call.problem, call.implementations, chosen)

    return route


@dataclass(frozen=True)
class Passes:
    """The programs of a case, each made when it is asked for.

    Attributes:
        case, implementation: what is computed, and by whom.
        operands: query, key, value and the output's cotangent, [B, T, heads, H].
    """

    case: MoBACase
    implementation: str
    operands: Operands

    def make(self, pass_name: MoBAPass) -> Program:
        """Compile one pass; "fwd+bwd" returns output, log-sum-exp and the gradients of query, key and value."""
        query, key, value, cotangent = self.operands
        attend = attention_of(self.case, self.implementation)

        def both(query: jax.Array, key: jax.Array, value: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, ...]:
            (output, log_sum), pull_back = jax.vjp(attend, query, key, value)
            return (output, log_sum, *pull_back((cotangent, jnp.zeros_like(log_sum))))

        match pass_name:
            case "routing":
                return compile_program(routing_of(self.case, self.implementation), query, key)
            case "fwd":
                return compile_program(lambda *operands: attend(*operands)[0], query, key, value)
            case "bwd":
                record = jax.jit(lambda *operands: jax.vjp(lambda *o: attend(*o)[0], *operands)[1])
                pull_back = record(query, key, value)
                return compile_program(lambda pull_back, cotangent: pull_back(cotangent), pull_back, cotangent)
            case "fwd+bwd":
                return compile_program(both, query, key, value, cotangent)
        raise ValueError(f"`pass_name` must be one of {', '.join(MOBA_PASSES)}; got {pass_name!r}")


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


def launch_specs(case: MoBACase, implementation: str = "triton") -> list[Any]:
    """The kernel launches of a case's passes, found by tracing, without compiling any."""
    shapes: Sequence[Any] = [
        jax.ShapeDtypeStruct((case.batch, case.tokens, heads, case.head_dim), jnp.bfloat16)
        for heads in (case.query_heads, case.key_heads, case.key_heads)
    ]
    attend = attention_of(case, implementation)

    def both(*operands: jax.Array) -> Any:
        output, pull_back = jax.vjp(lambda *o: attend(*o)[0], *operands)
        return pull_back(output)

    found: dict[Any, None] = {}
    collect_specs(jax.make_jaxpr(both)(*shapes).jaxpr, found)
    return list(found)


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
