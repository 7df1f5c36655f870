"""The part of `python -m benchmarks` that measures fused functions."""

import importlib.util
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from benchmarks.fuse.cases import GROUPS, FuseCase, select_fuse_cases
from benchmarks.fuse.report import compile_table, fuse_reasons, fuse_table, summary_table
from benchmarks.fuse.targets import PEER, judge_fuse
from benchmarks.harness.pipeline import Benchmark, introduce, introduce_smoke, keep_smoke, select_names
from benchmarks.harness.records import (
    FuseTiming,
    environment,
    merge_rows,
    recordable_failures,
)
from benchmarks.harness.report import verdict_table
from blockdiag.cli.machine import reason_of

if TYPE_CHECKING:
    from benchmarks.fuse.ahead import Ahead
    from benchmarks.fuse.measure import FuseSettings

FILE = "fuse.csv"


def smoke_fuse(console: Console, output: Path | None) -> None:
    """The CPU's part: every check, and host times, plainly labelled."""
    if importlib.util.find_spec("torch") is None:
        raise SystemExit("fuse checks with PyTorch, which is not installed; try: pip install 'blockdiag-attn[torch]'")
    from benchmarks.fuse.smoke import run_fuse_smoke

    introduce_smoke(console, "the XLA implementation against float64")
    rows = run_fuse_smoke(environment("cpu"))
    console.print(summary_table(rows))
    keep_smoke(console, output, "fuse", FuseTiming, rows)


def measure_fuse(
    console: Console,
    folder: Path,
    *,
    cases: str | None,
    baselines: str | None,
    rounds: int,
    seed: int,
    deadline: float,
) -> None:
    """The GPU's part: roofs, kernels compiled ahead, then the cases, each kept as soon as it is known."""
    from benchmarks.fuse.measure import (
        BASELINES,
        FuseSettings,
        measure_fuse_case,
        rows_without_times,
    )
    from benchmarks.harness.device import device_name
    from benchmarks.harness.roofs import measure_roofs

    began = time.monotonic()
    try:
        selected, others = select_fuse_cases(cases), select_names(baselines, BASELINES)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    settings = FuseSettings(deadline=deadline, rounds=rounds, seed=seed, baselines=others, say=console.print)
    where = environment(device_name())
    # With nothing of ours on disk, what compiling kernels takes the first time is known.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as kernels:
        os.environ["TRITON_CACHE_DIR"] = kernels
        ahead = _compile_ahead(console, selected, settings)
        roofs = measure_roofs()
        introduce(
            console,
            where,
            f"copy {roofs.copy_gb_per_s:,.0f} GB/s, bf16 product {roofs.matmul_tflops:,.0f} TFLOP/s",
        )
        measured: list[FuseTiming] = []
        for index, case in enumerate(selected):
            later = selected[index + 1 :]
            try:
                rows = measure_fuse_case(case, where, roofs, settings, later=later, ahead=ahead)
            except recordable_failures() as failure:
                reason = f"failed: {reason_of(failure)}"
                console.print(f"{case.name}: {reason}")
                rows = rows_without_times(case, where, settings.implementation, reason)
            _show(console, rows)
            merge_rows(folder / FILE, FuseTiming, rows, is_measured=lambda row: not row.note.startswith("not run"))
            measured += rows
    console.print(summary_table(measured))
    console.print(compile_table(measured))
    console.print(verdict_table(judge_fuse(measured)))
    console.print(f"fuse: {folder / FILE}, {time.monotonic() - began:.0f} s")


def _compile_ahead(console: Console, cases: Sequence[FuseCase], settings: "FuseSettings") -> "Ahead":
    """Every kernel of every case, and FlexAttention's, by many processes at once."""
    from benchmarks.fuse.ahead import compile_ahead
    from blockdiag.interop.targets import session_target

    limit = max(10.0, 0.4 * (settings.deadline - time.monotonic()))
    ahead = compile_ahead(
        cases,
        session_target(),
        with_flex=PEER in settings.baselines,
        seed=settings.seed,
        limit_seconds=limit,
    )
    for line in ahead.lines:
        console.print(f"compiled ahead: {line}")
    return ahead


def _show(console: Console, rows: Sequence[FuseTiming]) -> None:
    if any(row.median_ms is not None for row in rows):
        console.print(fuse_table(rows))
    for line in fuse_reasons(rows):
        console.print(f"  {line}")


BENCHMARK = Benchmark(
    measure=lambda console, folder, choices: measure_fuse(console, folder, **asdict(choices)),
    smoke=smoke_fuse,
    budget_seconds=510.0,
    names=f"{', '.join(GROUPS)}, or cases of these",
)
