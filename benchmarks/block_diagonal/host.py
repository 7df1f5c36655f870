"""Host time of a jitted call: how long Python is held before the call returns, the device being left to itself."""

import gc
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.block_diagonal.cases import OP, Case
from benchmarks.block_diagonal.jax_implementations import our_attention
from benchmarks.harness.clock import summarise
from benchmarks.harness.records import Environment, HostRow, recordable_failures
from blockdiag.cli.machine import reason_of

_TINY = Case(name="tiny", query_heads=1, key_heads=1, head_dim=64, sequence_lengths=(64,))
_WAIT_EVERY = 8


def time_calls(calls: dict[str, Callable[[], Any]], repetitions: int) -> dict[str, list[float]]:
    """Microseconds of each call until it returns, call by call in turn.

    The device is waited for, untimed, every few calls, so that no call waits for room in its queue. The garbage
    collector rests meanwhile.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        jax.block_until_ready(call())
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for index in range(repetitions):
            for name, call in calls.items():
                begin = time.perf_counter_ns()
                result = call()
                end = time.perf_counter_ns()
                times[name].append((end - begin) / 1e3)
                if index % _WAIT_EVERY == 0:
                    jax.block_until_ready(result)
    finally:
        if was_enabled:
            gc.enable()
    return times


def _trivial_calls(query: jax.Array) -> dict[str, Callable[[], Any]]:
    """Jitted single operations with as many operands and results as the op's passes."""
    forward = jax.jit(lambda query, key, value: query * key + value)
    backward = jax.jit(lambda query, key, value, cotangent: (query + cotangent, key + cotangent, value + cotangent))
    return {"fwd": lambda: forward(query, query, query), "bwd": lambda: backward(query, query, query, query)}


def _our_calls(query: jax.Array, implementation: str) -> dict[str, Callable[[], Any]]:
    """The op's passes on one tile."""
    attend = our_attention(_TINY, implementation)
    forward = jax.jit(lambda query, key, value: attend(query, key, value, {}))

    def gradients(query: jax.Array, key: jax.Array, value: jax.Array, cotangent: jax.Array) -> Any:
        return jax.vjp(lambda query, key, value: attend(query, key, value, {}), query, key, value)[1](cotangent)

    backward = jax.jit(gradients)
    return {"fwd": lambda: forward(query, query, query), "bwd": lambda: backward(query, query, query, query)}


def measure_host(
    implementations: tuple[str, ...], environment: Environment, *, repetitions: int = 3000
) -> list[HostRow]:
    """Rows for a trivial jitted operation and for each implementation, forward and backward."""
    query = jnp.ones((1, 64, _TINY.query_heads, _TINY.head_dim), jnp.bfloat16)
    rows = []
    for pass_name, trivial in _trivial_calls(query).items():
        calls, notes = {"trivial": trivial}, {}
        for implementation in implementations:
            try:
                call = _our_calls(query, implementation)[pass_name]
                jax.block_until_ready(call())
                calls[implementation] = call
            except recordable_failures() as failure:
                notes[implementation] = f"failed: {reason_of(failure)}"
        summaries = {name: summarise(times) for name, times in time_calls(calls, repetitions).items()}
        for name in ("trivial", *implementations):
            times = summaries.get(name)
            rows.append(
                HostRow(
                    op=OP,
                    pass_name=pass_name,
                    implementation=name,
                    median_us=times.median if times else None,
                    p20_us=times.p20 if times else None,
                    p80_us=times.p80 if times else None,
                    over_trivial_us=times.median - summaries["trivial"].median if times else None,
                    note=notes.get(name, ""),
                    **asdict(environment),
                )
            )
    return rows
