"""The part of `python -m benchmarks` that measures paged attention."""

import importlib.util
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.harness.records import (
    PagedTiming,
    environment,
    merge_rows,
    read_rows,
    recordable_failures,
    write_rows,
)
from benchmarks.harness.report import verdict_table
from benchmarks.paged.cases import GROUPS, PagedCase, by_pool, make_cases, select_groups
from benchmarks.paged.recorded import recorded_rows
from benchmarks.paged.report import others_table, paged_reasons, paged_tables
from benchmarks.paged.targets import judge_paged
from blockdiag.cli.machine import reason_of

FILE = "paged.csv"
GROUP_NAMES = ", ".join(GROUPS)


def smoke_paged(console: Console, output: Path | None) -> None:
    """The CPU's part: every check, and host times, plainly labelled."""
    if importlib.util.find_spec("torch") is None:
        raise SystemExit(
            "bench paged checks with PyTorch, which is not installed; try: pip install 'blockdiag-attn[torch]'"
        )
    from benchmarks.paged.smoke import run_paged_smoke

    console.print(
        "This is a smoke run on the CPU: the XLA implementation against float64 at a tiny size. "
        "Its times say nothing about a GPU; run the same command on a machine with an NVIDIA GPU for those."
    )
    rows = run_paged_smoke(environment("cpu"))
    console.print(others_table("smoke", rows))
    if output is not None:
        write_rows(output / "paged_smoke.csv", PagedTiming, rows)
        console.print(f"written to {output / 'paged_smoke.csv'}")


def measure_paged(
    console: Console,
    folder: Path,
    *,
    cases: str | None,
    baselines: str | None,
    rounds: int,
    seed: int,
    deadline: float,
) -> None:
    """The GPU's part: rate of reading, kernels compiled ahead, then group by group, each kept once it is known."""
    from benchmarks.block_diagonal.measure import device_name
    from benchmarks.paged.measure import PagedSettings, measure_pool, measure_read_rate, select_paged_baselines

    began = time.monotonic()
    try:
        groups, others = select_groups(cases), select_paged_baselines(baselines)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    settings = PagedSettings(deadline=deadline, rounds=rounds, seed=seed, baselines=others, say=console.print)
    where = environment(device_name())
    read_rate = measure_read_rate()
    console.print(
        f"{where.device}, driver {where.driver}, jax {where.jax}, torch {where.torch}, triton {where.triton}\n"
        f"reading 4 GiB: {read_rate:.3f} TB/s"
    )
    selected = [case for case in make_cases() if case.group in groups]
    _compile_ahead(console, selected)
    recorded = recorded_rows()
    merge_rows(folder / FILE, PagedTiming, recorded)
    measured: list[PagedTiming] = []
    for group in groups:
        rows: list[PagedTiming] = []
        for pool in by_pool([case for case in selected if case.group == group]):
            try:
                rows += measure_pool(pool, where, read_rate, settings)
            except recordable_failures() as failure:
                console.print(f"{group}, {pool[0].shape.name}, {pool[0].cache}: failed: {reason_of(failure)}")
            _keep(folder / FILE, rows)
        measured += rows
        if rows:
            beside = recorded if group == "decode" else []
            for table in paged_tables([*rows, *beside]):
                console.print(table)
        for line in paged_reasons(rows):
            console.print(f"  {line}")
    console.print(verdict_table(judge_paged(measured)))
    console.print(f"paged: {folder / FILE}, {time.monotonic() - began:.0f} s")


def _compile_ahead(console: Console, cases: Sequence[PagedCase]) -> None:
    """Every kernel of every case, by many processes at once."""
    from benchmarks.harness.kernels import compile_ahead
    from benchmarks.paged.programs import launch_steps
    from blockdiag.interop.targets import session_target

    try:
        specs = {step: None for case in cases for step in launch_steps(case)}
    except recordable_failures() as failure:
        console.print(f"kernels could not be listed ahead: {reason_of(failure)}")
        return
    # Native launches come first, and those through JAX take the same kernels.
    for line in compile_ahead(specs, session_target(), limit_seconds=60.0, binary=True):
        console.print(f"compiled ahead: {line}")


def _keep(path: Path, rows: Sequence[PagedTiming]) -> None:
    """Write rows; those without times only where the file has no older ones with times."""
    known = {(row.group, row.case, row.implementation, row.device) for row in read_rows(path, PagedTiming)}
    new = [
        row
        for row in rows
        if row.median_us is not None or (row.group, row.case, row.implementation, row.device) not in known
    ]
    merge_rows(path, PagedTiming, new)
