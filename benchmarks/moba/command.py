"""The part of `python -m benchmarks` that measures MoBA."""

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.harness.records import (
    MoBATiming,
    environment,
    merge_rows,
    read_rows,
    recordable_failures,
    write_rows,
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

    console.print(
        "This is a smoke run on the CPU: the XLA implementation against float64 and float32 at a tiny size. "
        "Its times say nothing about a GPU; run the same command on a machine with an NVIDIA GPU for those."
    )
    rows = run_moba_smoke(environment("cpu"))
    console.print(moba_table(rows[0].case, rows))
    for line in moba_reasons(rows):
        console.print(f"  {line}")
    if output is not None:
        write_rows(output / "moba_smoke.csv", MoBATiming, rows)
        console.print(f"written to {output / 'moba_smoke.csv'}")


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
    from benchmarks.block_diagonal.measure import device_name
    from benchmarks.harness.roofs import measure_roofs
    from benchmarks.moba.measure import MoBASettings, measure_moba_case, rows_without_times, select_baselines

    try:
        selected, dense = select_moba_cases(cases), select_baselines(baselines)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    settings = MoBASettings(deadline=deadline, rounds=rounds, seed=seed, baselines=dense, say=console.print)
    where = environment(device_name())
    roofs = measure_roofs()
    console.print(
        f"{where.device}, driver {where.driver}, jax {where.jax}, torch {where.torch}, triton {where.triton}\n"
        f"copy {roofs.copy_gb_per_s:,.0f} GB/s, bf16 product {roofs.matmul_tflops:,.0f} TFLOP/s"
    )
    _compile_ahead(console, selected)
    recorded = recorded_rows()
    merge_rows(folder / FILE, MoBATiming, recorded)
    measured: list[MoBATiming] = []
    for index, case in enumerate(selected):
        known, rows, reason = _dense_timed(measured, case), [], ""
        if time.monotonic() > deadline:
            reason = "not run: the time budget was spent; raise --budget-seconds"
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
            _keep_unmeasured(folder / FILE, rows)
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


def _compile_ahead(console: Console, cases: Sequence[MoBACase]) -> None:
    """Every kernel of every case, by many processes at once."""
    from benchmarks.harness.kernels import compile_ahead
    from benchmarks.moba.programs import launch_specs
    from blockdiag.interop.targets import session_target

    try:
        specs = {spec: None for case in cases for spec in launch_specs(case)}
    except recordable_failures() as failure:
        console.print(f"kernels could not be listed ahead: {reason_of(failure)}")
        return
    for line in compile_ahead(specs, session_target()):
        console.print(f"compiled ahead: {line}")


def _keep_unmeasured(path: Path, rows: Sequence[MoBATiming]) -> None:
    """Write rows without times, unless the file has older ones with times."""
    known = {(row.case, row.pass_name, row.implementation, row.device) for row in read_rows(path, MoBATiming)}
    new = [row for row in rows if (row.case, row.pass_name, row.implementation, row.device) not in known]
    merge_rows(path, MoBATiming, new)


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


CASE_NAMES = ", ".join(MOBA_CASES)
