"""The part of `python -m benchmarks` that measures paged attention."""

import importlib.util
import time
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from benchmarks.harness.pipeline import (
    Benchmark,
    compile_launches,
    introduce,
    introduce_smoke,
    keep_rows,
    keep_smoke,
    select_names,
)
from benchmarks.harness.records import (
    PagedTiming,
    environment,
    is_timed,
    merge_rows,
    recordable_failures,
)
from benchmarks.harness.report import verdict_table
from benchmarks.paged.cases import GROUPS, by_pool, make_cases, select_groups
from benchmarks.paged.recorded import recorded_rows
from benchmarks.paged.report import others_table, paged_reasons, paged_tables
from benchmarks.paged.targets import judge_paged
from blockdiag.cli.machine import reason_of

FILE = "paged.csv"


def smoke_paged(console: Console, output: Path | None) -> None:
    """The CPU's part: every check, and host times, plainly labelled."""
    if importlib.util.find_spec("torch") is None:
        raise SystemExit("paged checks with PyTorch, which is not installed; try: pip install 'blockdiag-attn[torch]'")
    from benchmarks.paged.smoke import run_paged_smoke

    introduce_smoke(console, "the XLA implementation against float64")
    rows = run_paged_smoke(environment("cpu"))
    console.print(others_table("smoke", rows))
    keep_smoke(console, output, "paged", PagedTiming, rows)


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
    from benchmarks.harness.device import device_name
    from benchmarks.paged.measure import PagedSettings, measure_pool, measure_read_rate
    from benchmarks.paged.programs import BASELINES, launch_steps

    began = time.monotonic()
    try:
        groups, others = select_groups(cases), select_names(baselines, BASELINES)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    settings = PagedSettings(deadline=deadline, rounds=rounds, seed=seed, baselines=others, say=console.print)
    where = environment(device_name())
    read_rate = measure_read_rate()
    introduce(console, where, f"reading 4 GiB: {read_rate:.3f} TB/s")
    selected = [case for case in make_cases() if case.group in groups]
    # Native launches come first, and those through JAX take the same kernels.
    compile_launches(console, selected, launch_steps, limit_seconds=60.0, binary=True)
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
            keep_rows(folder / FILE, PagedTiming, rows, is_timed=is_timed)
        measured += rows
        if rows:
            beside = recorded if group == "decode" else []
            for table in paged_tables([*rows, *beside]):
                console.print(table)
        for line in paged_reasons(rows):
            console.print(f"  {line}")
    console.print(verdict_table(judge_paged(measured)))
    console.print(f"paged: {folder / FILE}, {time.monotonic() - began:.0f} s")


BENCHMARK = Benchmark(
    measure=lambda console, folder, choices: measure_paged(console, folder, **asdict(choices)),
    smoke=smoke_paged,
    budget_seconds=130.0,
    names=", ".join(GROUPS),
)
