"""The benchmark's machinery on a CPU: the same einsum and the library's XLA path at a size that takes seconds."""

import time
from dataclasses import asdict, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.block_diagonal.cases import CASES, PASSES, Case
from benchmarks.block_diagonal.jax_implementations import Attend, einsum_attention, our_attention
from benchmarks.harness.clock import Subject, interleave, summarise
from benchmarks.harness.records import Environment, Timing

_LENGTHS = (256,) * 4
_TOLERANCE = 1e-2


def smoke_case() -> Case:
    """A small case of the usual kind."""
    return replace(CASES["h8_d128"], name="smoke_h2_d64", query_heads=2, key_heads=2, head_dim=64).shrunk(_LENGTHS)


def run_smoke(environment: Environment, *, rounds: int = 5) -> list[Timing]:
    """Check and time forward, backward and both of XLA against the reference einsum.

    The times are host times of a CPU and say nothing about a GPU; there is no floor, and no rate beside them.

    Raises:
        ValueError: when the two disagree.
    """
    case = smoke_case()
    operands = _operands(case)
    attentions = {"xla": our_attention(case, "xla"), "jax-einsum": einsum_attention(case)}
    functions = {
        (name, pass_name): _pass(attend, pass_name) for name, attend in attentions.items() for pass_name in PASSES
    }
    for pass_name in PASSES:
        _compare(functions["xla", pass_name](*operands), functions["jax-einsum", pass_name](*operands), pass_name)
    subjects = [
        Subject((name, pass_name), lambda function=function: function(*operands), "host")
        for (name, pass_name), function in functions.items()
    ]
    interleave(subjects, rounds=rounds, batch_ms=20.0, deadline=time.monotonic() + 30.0)
    rows = []
    for subject in subjects:
        name, pass_name = subject.key
        row = Timing(
            op="block_diagonal", pass_name=pass_name, case=case.name, implementation=name, **asdict(environment)
        )
        if subject.failure:
            rows.append(replace(row, note=f"failed: {subject.failure}"))
            continue
        times = summarise(subject.samples)
        rows.append(
            replace(row, median_ms=times.median, p20_ms=times.p20, p80_ms=times.p80, note="CPU smoke, host time")
        )
    return rows


def _operands(case: Case) -> tuple[jax.Array, ...]:
    """Random query, key, value and cotangent."""
    generator = np.random.default_rng(0)
    batch = len(case.sequence_lengths), case.sequence_lengths[0]
    return tuple(
        jnp.asarray(generator.standard_normal((*batch, heads, case.head_dim)), jnp.bfloat16)
        for heads in (case.query_heads, case.key_heads, case.key_heads, case.query_heads)
    )


def _pass(attend: Attend, pass_name: str) -> Any:
    """One jitted pass as a function of query, key, value and cotangent that returns a tuple."""

    def both(query: jax.Array, key: jax.Array, value: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, ...]:
        output, pull_back = jax.vjp(lambda query, key, value: attend(query, key, value, {}), query, key, value)
        return (output, *pull_back(cotangent))

    wanted = {"fwd": slice(0, 1), "bwd": slice(1, None), "fwd+bwd": slice(None)}[pass_name]
    return jax.jit(lambda *operands: both(*operands)[wanted])


def _compare(ours: tuple[jax.Array, ...], theirs: tuple[jax.Array, ...], pass_name: str) -> None:
    """Raise unless the results agree to the rounding of bfloat16."""
    for mine, other in zip(ours, theirs, strict=True):
        wide, reference = np.asarray(mine, np.float64), np.asarray(other, np.float64)
        error = np.linalg.norm(wide - reference) / np.linalg.norm(reference)
        if not error <= _TOLERANCE:
            raise ValueError(f"xla and the reference einsum differ by {error:.2e} in {pass_name}, allowed {_TOLERANCE}")
