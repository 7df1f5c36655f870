"""The passes of MoBA through `jax.jit`, as compiled programs that can be timed, and what they leave to be checked."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.harness.programs import Program, collect_specs, compile_program
from benchmarks.moba.cases import MOBA_PASSES, MoBACase, MoBAPass
from blockdiag.common.dispatch import call_implementation
from blockdiag.ops.moba.api import moba_attention, prepare_moba_call
from blockdiag.ops.moba.tables import moba_tables

type Operands = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


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
