"""The benchmark of fused functions on a CPU: every function by the XLA implementation, checks included."""

import dataclasses
import time
from dataclasses import asdict

from benchmarks.fuse.cases import FUSE_PASSES, GROUPS, TOKEN_GROUPS, FuseCase
from benchmarks.fuse.check import check_results, exact_results, expected_names, make_arrays
from benchmarks.fuse.measure import columns_of
from benchmarks.fuse.programs import FusePasses, fused_function
from benchmarks.harness.clock import Subject, interleave, summarise
from benchmarks.harness.device import to_jax, to_torch
from benchmarks.harness.records import Environment, FuseTiming


def small_case(group: str, **sizes: int) -> FuseCase:
    """A case of a group at a size that takes no time; tokens are no multiple of a tile."""
    known = next(name for name in GROUPS if name == group)
    defaults = {"batch": 2, "tokens": 72, "query_heads": 4, "key_heads": 4, "head_dim": 16, "window": 7, "prefix": 9}
    rows = 3 if group == "evoformer" else 1
    return FuseCase(group=known, **{**defaults, "rows": rows, **sizes})


SMOKE_CASES = tuple(small_case(group, key_heads=2 if group in TOKEN_GROUPS else 4) for group in GROUPS)


def run_fuse_smoke(environment: Environment, *, rounds: int = 3) -> list[FuseTiming]:
    """Check and time every pass of every function.

    The times are host times of a CPU and say nothing about a GPU; there is no floor beside them.

    Raises:
        ValueError: when a result is wrong.
    """
    subjects, rows = [], []
    for case in SMOKE_CASES:
        arrays = make_arrays(case, seed=0, device="cpu")
        exact = exact_results(case, arrays)
        views = {name: to_jax(array) for name, array in arrays.items()}
        passes = FusePasses(case, fused_function(case, "xla"), views)
        for pass_name in FUSE_PASSES:
            program = passes.make(pass_name)
            results = dict(zip(expected_names(case, pass_name), map(to_torch, program.run()), strict=True))
            row = FuseTiming(
                pass_name=pass_name,
                implementation="xla",
                relative_error=check_results(case, results, exact),
                note="CPU smoke, host time",
                **columns_of(case),
                **asdict(environment),
            )
            rows.append(row)
            subjects.append(Subject((case.name, pass_name), program.run, "host"))
    interleave(subjects, rounds=rounds, batch_ms=1.0, deadline=time.monotonic() + 30.0, least_rounds=1)
    return [_with_times(row, subject) for row, subject in zip(rows, subjects, strict=True)]


def _with_times(row: FuseTiming, subject: Subject) -> FuseTiming:
    if subject.failure:
        return dataclasses.replace(row, note=f"failed: {subject.failure}")
    times = summarise(subject.samples)
    return dataclasses.replace(row, median_ms=times.median, p20_ms=times.p20, p80_ms=times.p80)
