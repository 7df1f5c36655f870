"""The part of `python -m benchmarks` that measures block-diagonal attention, and host times of torch operators."""

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.block_diagonal.cases import CASES, Case, select_cases
from benchmarks.block_diagonal.report import error_table, host_table, launches, reasons, timing_table
from benchmarks.block_diagonal.targets import OURS, judge_errors, judge_host, judge_times, judge_torch_host
from benchmarks.harness.pipeline import Benchmark, Choices, introduce, introduce_smoke, keep_smoke
from benchmarks.harness.records import (
    Environment,
    ErrorRow,
    HostRow,
    Timing,
    environment,
    merge_rows,
    recordable_failures,
)
from benchmarks.harness.report import verdict_table
from blockdiag.cli.machine import reason_of


def smoke_block_diagonal(console: Console, output: Path | None) -> None:
    """The CPU's part: a correctness check and host times, plainly labelled."""
    from benchmarks.block_diagonal.smoke import run_smoke

    introduce_smoke(console, "XLA against a reference einsum")
    rows = run_smoke(environment("cpu"))
    console.print(timing_table(rows[0].case, rows))
    for line in reasons(rows):
        console.print(line)
    keep_smoke(console, output, "block_diagonal", Timing, rows)


def measure_block_diagonal(console: Console, folder: Path, choices: Choices) -> None:
    """The GPU's part: roofs, host time, errors, then the cases, each kept as soon as it is known."""
    from benchmarks.block_diagonal.measure import Settings, find_implementations, measure_case
    from benchmarks.harness.device import device_name
    from benchmarks.harness.roofs import measure_roofs

    try:
        cases = select_cases(choices.cases)
        ours, others = find_implementations(choices.baselines)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    settings = Settings(deadline=choices.deadline, rounds=choices.rounds, seed=choices.seed, say=console.print)
    implementations = [*ours, *others]
    where = environment(device_name())
    roofs = measure_roofs()
    introduce(
        console,
        where,
        f"copy {roofs.copy_gb_per_s:,.0f} GB/s, three reads to one write {roofs.stream_gb_per_s:,.0f} GB/s, "
        f"bf16 product {roofs.matmul_tflops:,.0f} TFLOP/s",
    )
    host_rows = _host(console, folder, where)
    error_rows = _errors(console, folder, where, cases)
    timings: list[Timing] = []
    for index, case in enumerate(cases):
        try:
            rows = measure_case(
                case,
                implementations,
                where,
                settings,
                cases_after=len(cases) - index - 1,
                matmul_tflops=roofs.matmul_tflops,
            )
        except recordable_failures() as failure:
            console.print(f"  {case.name} could not be measured: {reason_of(failure)}")
            continue
        timings += rows
        merge_rows(folder / "block_diagonal.csv", Timing, rows)
        console.print(timing_table(case.name, rows))
        for line in (*launches(rows), *reasons(rows)):
            console.print(f"  {line}")
    verdicts = [*judge_times(timings), *judge_errors(error_rows), *judge_host(host_rows)]
    console.print(verdict_table(verdicts))
    console.print(f"block_diagonal: CSV files are in {folder}")


def measure_torch(console: Console, folder: Path, choices: Choices) -> None:
    """Measure host times of the torch operators, which take no options."""
    del choices
    from benchmarks.block_diagonal.torch_host import measure_torch_host
    from benchmarks.harness.device import device_name

    rows = measure_torch_host(environment(device_name()))
    merge_rows(folder / "torch_host.csv", HostRow, rows)
    console.print(host_table(rows))
    console.print(verdict_table(judge_torch_host(rows)))
    console.print(f"torch: {folder / 'torch_host.csv'}")


def _host(console: Console, folder: Path, where: Environment) -> list[HostRow]:
    """Host time of a jitted call."""
    from benchmarks.block_diagonal.host import measure_host

    began = time.monotonic()
    rows = measure_host((OURS,), where)
    merge_rows(folder / "block_diagonal_host.csv", HostRow, rows)
    console.print(host_table(rows))
    console.print(f"  host times took {time.monotonic() - began:.1f} s")
    return rows


def _errors(console: Console, folder: Path, where: Environment, cases: Sequence[Case]) -> list[ErrorRow]:
    """Errors against float64 of this library and of FlashAttention 2."""
    from benchmarks.block_diagonal.accuracy import accuracy_cases, flash_baseline, measure_errors
    from benchmarks.block_diagonal.measure import find_implementations
    from benchmarks.harness.device import release_memory

    began = time.monotonic()
    ours, others = find_implementations(None)
    judged = [one for one in ours if one.name == OURS]
    names = {case.name for case in cases}
    rows: list[ErrorRow] = []
    for case in accuracy_cases():
        if case.name in names:
            flash = flash_baseline(case, others)
            rows += measure_errors([case], [*judged, *([flash] if flash else [])], where)
    release_memory()
    merge_rows(folder / "block_diagonal_errors.csv", ErrorRow, rows)
    console.print(error_table(rows))
    for row in rows:
        if row.tensor == "all":
            console.print(f"  {row.case}, {row.implementation}: {row.note}")
    console.print(f"  errors took {time.monotonic() - began:.1f} s")
    return rows


BENCHMARK = Benchmark(measure=measure_block_diagonal, smoke=smoke_block_diagonal, names=", ".join(CASES))
# Host times have no small check of their own; that of block-diagonal attention stands for it.
TORCH_BENCHMARK = Benchmark(measure=measure_torch, smoke=smoke_block_diagonal)
