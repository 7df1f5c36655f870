"""Compiles ahead, in several processes: the kernels of each pass, timed, and FlexAttention's, which takes the longest.

Triton and torch keep what they compile on disk, so that the benchmark itself then only loads it.
"""

import multiprocessing
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.fuse.cases import FUSE_PASSES, FuseCase, FusePass
from benchmarks.fuse.programs import launch_specs
from benchmarks.harness.records import recordable_failures
from blockdiag.cli.machine import reason_of

_MOST_PROCESSES = 14
# Each compiles the kernels of a pass side by side.
_CORES_OF_A_PASS = 8
_TINY = FuseCase(group="causal", batch=1, tokens=32, query_heads=1, key_heads=1, head_dim=16)


@dataclass(frozen=True)
class Ahead:
    """Kernels that were compiled before the cases.

    Attributes:
        specs: the launches of a pass, by the case's name and the pass.
        seconds: to compile the kernels of a pass together, nothing being on disk.
        lines: what happened, to be shown.
    """

    specs: dict[tuple[str, FusePass], list[Any]] = field(default_factory=dict)
    seconds: dict[tuple[str, FusePass], float] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)


def compile_ahead(
    cases: Sequence[FuseCase], target: Any, *, with_flex: bool, seed: int, limit_seconds: float = 120.0
) -> Ahead:
    """Compile the kernels of all cases for `target`, and then FlexAttention's where that is wanted.

    What is not ready after `limit_seconds` is left to the cases that need it.
    """
    began, ahead = time.monotonic(), Ahead()
    cores = os.cpu_count() or 2
    processes = max(1, min(_MOST_PROCESSES, cores - 1))
    context = multiprocessing.get_context("spawn")
    end = began + limit_seconds
    # What this process loads for its first kernel is no part of what it takes to read others.
    timed_compilation(launch_specs(_TINY, "fwd", target=target), target, kept_in(_TINY, "fwd"))
    # As many at once as have cores of their own, and a fresh process for each: what is timed is what a user waits for.
    with context.Pool(max(1, cores // _CORES_OF_A_PASS), maxtasksperchild=1) as pool:
        passes: dict[tuple[str, FusePass], Any] = {}
        for case in cases:
            for pass_name in FUSE_PASSES:
                try:
                    specs = ahead.specs[case.name, pass_name] = launch_specs(case, pass_name, target=target)
                except recordable_failures() as failure:
                    ahead.lines.append(f"{case.name}: no kernels for {pass_name}: {reason_of(failure)}")
                    continue
                passes[case.name, pass_name] = pool.apply_async(
                    timed_compilation, (specs, target, kept_in(case, pass_name))
                )
        for key, waiting in passes.items():
            found = _result(waiting, end)
            if isinstance(found, float):
                ahead.seconds[key] = found
            else:
                ahead.lines.append(f"{' '.join(key)}: {found}")
        ahead.lines.append(f"kernels of {len(ahead.seconds)} passes in {time.monotonic() - began:.0f} s")
    with context.Pool(processes) as pool:
        ready = time.monotonic()
        if with_flex:
            # Only now, so that what the kernels take is not measured beside it.
            flex = {case.name: pool.apply_async(flex_compilation, (case, seed)) for case in cases}
            answers = {name: _result(waiting, end) for name, waiting in flex.items()}
            ahead.lines.extend(f"FlexAttention, {name}: {found}" for name, found in answers.items() if found)
            ahead.lines.append(f"FlexAttention for {len(flex)} cases in {time.monotonic() - ready:.0f} s")
    return ahead


def _result(waiting: Any, end: float) -> Any:
    """What a process answered, or why there is no answer before `end`."""
    try:
        return waiting.get(max(0.0, end - time.monotonic()))
    except multiprocessing.TimeoutError:
        return "not compiled ahead: it took too long"


def kept_in(case: FuseCase, pass_name: FusePass) -> str:
    """The folder of the kernels of a pass: Triton's files name others by whole paths, and cannot be moved."""
    from triton import knobs

    return os.path.join(knobs.cache.dir, f"{case.name}-{pass_name}")


def timed_compilation(specs: Sequence[Any], target: Any, folder: str) -> float | str:
    """Seconds to plan the launches of a pass and to compile them together, or why that failed.

    They are compiled as if nothing were on disk, and lie in `folder` afterwards.
    """
    from triton import knobs

    from blockdiag.triton_kernels.launch.compile import compile_together, load_compiler

    load_compiler()  # what every process loads once
    shutil.rmtree(folder, ignore_errors=True)
    began = time.perf_counter()
    with knobs.cache.scope():
        knobs.cache.dir = folder
        try:
            compile_together([(spec.plan(target), target) for spec in specs])
        except recordable_failures() as failure:
            return reason_of(failure)
    seconds = time.perf_counter() - began
    return seconds


def flex_compilation(case: FuseCase, seed: int) -> str:
    """Run each pass of FlexAttention once, so that its kernels are on disk; an empty string, or why one did not run."""
    import torch

    from benchmarks.fuse.check import make_arrays
    from benchmarks.fuse.torch_baselines import flex_call
    from blockdiag.interop.private_torch import set_compiler_option

    # Each process is one of many; it needs no more for itself.
    set_compiler_option("inductor", "compile_threads", 1)
    reasons = []
    try:
        call = flex_call(case, make_arrays(case, seed=seed, device="cuda"))
        for pass_name in FUSE_PASSES:
            try:
                call.run_of(pass_name)()
                torch.cuda.synchronize()
            except recordable_failures() as failure:
                reasons.append(f"{pass_name}: {reason_of(failure)}")
    except recordable_failures() as failure:
        reasons.append(reason_of(failure))
    torch.compiler.reset()
    torch.cuda.empty_cache()
    return "; ".join(reasons)
