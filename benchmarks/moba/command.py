"""The part of `python -m benchmarks` that measures MoBA."""

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from benchmarks.harness.family import SPENT
from benchmarks.harness.pipeline import (
    Benchmark,
    compile_launches,
    introduce,
    introduce_smoke,
    keep_smoke,
    select_names,
)
from benchmarks.harness.records import (
    MoBATiming,
    environment,
    is_timed,
    merge_rows,
    recordable_failures,
)
from benchmarks.harness.report import verdict_table
from benchmarks.moba.cases import MOBA_CASES, MoBACase, select_moba_cases
from benchmarks.moba.recorded import recorded_rows
from benchmarks.moba.report import moba_reasons, moba_table
from benchmarks.moba.targets import judge_moba
from blockdiag.cli.machine import reason_of

FILE = "moba.csv"


def smoke_moba(console: Console, output: Path | None) -> None:
    """The CPU's part: every check, and host times, plainly labelled."""
    from benchmarks.moba.smoke import run_moba_smoke

    introduce_smoke(console, "the XLA implementation against float64 and float32")
    rows = run_moba_smoke(environment("cpu"))
    console.print(moba_table(rows[0].case, rows))
    for line in moba_reasons(rows):
        console.print(f"  {line}")
    keep_smoke(console, output, "moba", MoBATiming, rows)


def measure_moba(
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
    from benchmarks.harness.device import device_name
    from benchmarks.harness.roofs import measure_roofs
    from benchmarks.moba.dense import DENSE_BACKENDS
    from benchmarks.moba.measure import MoBASettings, measure_moba_case, rows_without_times
    from benchmarks.moba.programs import launch_specs

    try:
        selected, dense = select_moba_cases(cases), select_names(baselines, DENSE_BACKENDS)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    settings = MoBASettings(deadline=deadline, rounds=rounds, seed=seed, baselines=dense, say=console.print)
    where = environment(device_name())
    roofs = measure_roofs()
    introduce(
        console,
        where,
        f"copy {roofs.copy_gb_per_s:,.0f} GB/s, bf16 product {roofs.matmul_tflops:,.0f} TFLOP/s",
    )
    compile_launches(console, selected, launch_specs)
    recorded = recorded_rows()
    merge_rows(folder / FILE, MoBATiming, recorded)
    measured: list[MoBATiming] = []
    for index, case in enumerate(selected):
        known, rows, reason = _dense_timed(measured, case), [], ""
        if time.monotonic() > deadline:
            reason = SPENT
        else:
            try:
                rows = measure_moba_case(
                    case, where, roofs, settings, cases_after=len(selected) - index - 1, dense_timed=known
                )
            except recordable_failures() as failure:
                reason = f"failed: {reason_of(failure)}"
        if reason:
            console.print(f"{case.name}: {reason}")
            rows = rows_without_times(case, where, settings.implementation, reason)
            merge_rows(folder / FILE, MoBATiming, rows, is_measured=is_timed)
            measured += rows
            continue
        measured += rows
        merge_rows(folder / FILE, MoBATiming, rows)
        beside = [row for row in measured if row.implementation in known and _dense_shape(row) == case.dense_shape]
        console.print(moba_table(case.name, [*rows, *beside, *(row for row in recorded if row.case == case.name)]))
        for line in moba_reasons(rows):
            console.print(f"  {line}")
    console.print(verdict_table(judge_moba(measured)))
    console.print(f"moba: {folder / FILE}, finished {time.monotonic() - deadline:+.0f} s from the end of the budget")


def _dense_shape(row: MoBATiming) -> tuple[int, ...]:
    return row.batch, row.tokens, row.query_heads, row.key_heads, row.head_dim


def _dense_timed(measured: Sequence[MoBATiming], case: MoBACase) -> list[str]:
    """Dense baselines whose times over arrays like the case's are known."""
    return [
        row.implementation
        for row in measured
        if row.implementation.startswith("torch-")
        and row.pass_name == "fwd+bwd"
        and row.median_ms is not None
        and _dense_shape(row) == case.dense_shape
    ]


BENCHMARK = Benchmark(
    measure=lambda console, folder, choices: measure_moba(console, folder, **asdict(choices)),
    smoke=smoke_moba,
    names=", ".join(MOBA_CASES),
)
