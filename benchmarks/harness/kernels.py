"""Compiles the kernels of many cases at once, each in a process of its own, before any of them is timed.

Triton keeps compiled kernels on disk, so that the benchmark itself then only loads them.
"""

import concurrent.futures
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.harness.records import recordable_failures
from blockdiag.cli.machine import reason_of

_MOST_PROCESSES = 14


def compile_ahead(
    specs: Iterable[Any], target: Any, *, limit_seconds: float = 120.0, binary: bool = False
) -> list[str]:
    """Compile every launch for `target`; a line for each that could not be, which the case's own compilation repeats.

    What is launched without jaxlib needs a `binary`, see `compile_plan`. Launches that are still being compiled after
    `limit_seconds` are left to the cases that need them.
    """
    began = time.monotonic()
    processes = max(1, min(_MOST_PROCESSES, (os.cpu_count() or 2) - 1))
    pool = concurrent.futures.ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"))
    different, lines = different_kernels(specs, target)
    waiting = [pool.submit(compile_one, spec, target, binary) for spec in different]
    try:
        for finished in concurrent.futures.as_completed(waiting, timeout=limit_seconds):
            reason = finished.result()
            if reason:
                lines.append(reason)
    except TimeoutError:
        lines.append(f"{sum(not one.done() for one in waiting)} kernels were not compiled in {limit_seconds:.0f} s")
    except concurrent.futures.BrokenExecutor as failure:
        lines.append(f"compiling ahead ended early: {reason_of(failure)}")
    pool.shutdown(wait=False, cancel_futures=True)
    lines.append(f"{len(waiting)} kernels in {time.monotonic() - began:.0f} s by {processes} processes")
    return lines


def compile_launches(
    cases: Sequence[Any],
    launches: Callable[[Any], Sequence[Any]],
    *,
    limit_seconds: float = 120.0,
    binary: bool = False,
) -> list[str]:
    """Compile every launch of every case ahead for this session's GPU; returns lines as `compile_ahead` does."""
    from blockdiag.interop.targets import session_target

    try:
        specs = {spec: None for case in cases for spec in launches(case)}
    except recordable_failures() as failure:
        return [f"kernels could not be listed: {reason_of(failure)}"]
    return compile_ahead(specs, session_target(), limit_seconds=limit_seconds, binary=binary) if specs else []


def different_kernels(specs: Iterable[Any], target: Any) -> tuple[list[Any], list[str]]:
    """One launch of each kernel, as lengths and scales share kernels; and a line for each that cannot be planned."""
    from blockdiag.triton_kernels.launch.compile import compile_key

    different: dict[Any, Any] = {}
    lines: list[str] = []
    for spec in specs:
        try:
            different.setdefault(compile_key(spec.plan(target), target.arch), spec)
        except recordable_failures() as failure:
            lines.append(f"{spec.name}: {reason_of(failure)}")
    return list(different.values()), lines


def compile_one(spec: Any, target: Any, binary: bool) -> str:
    """Compile one launch; an empty string, or why it could not be."""
    from blockdiag.triton_kernels.launch.compile import compile_plan

    try:
        compile_plan(spec.plan(target), target, binary=binary)
    except recordable_failures() as failure:
        return f"{spec.name}: {reason_of(failure)}"
    return ""
