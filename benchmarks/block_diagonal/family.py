"""Block-diagonal attention as a benchmark family, with errors against float64 and host times of a call."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.block_diagonal.accuracy import accuracy_cases, flash_baseline, measure_errors
from benchmarks.block_diagonal.cases import SMOKE_CASE, Case, select_cases
from benchmarks.block_diagonal.exact import exact_attention
from benchmarks.block_diagonal.host import measure_host
from benchmarks.block_diagonal.implementations import Inputs
from benchmarks.block_diagonal.jax_implementations import JAX_BASELINES
from benchmarks.block_diagonal.jax_implementations import OURS as THROUGH_JAX
from benchmarks.block_diagonal.native import NATIVE
from benchmarks.block_diagonal.report import (
    OURS,
    error_table,
    host_table,
    judge_errors,
    judge_host,
    judge_times,
    timing_table,
)
from benchmarks.block_diagonal.torch_baselines import FLEX_BASELINES, TORCH_BASELINES
from benchmarks.block_diagonal.workload import make_workload
from benchmarks.harness.clock import Subject, summarise
from benchmarks.harness.family import SPENT, Context, Entry, Family, Implementation, Settings, floor_ms
from benchmarks.harness.machine import release_memory
from benchmarks.harness.records import Environment, ErrorRow, HostRow, Timing, merge_rows
from benchmarks.harness.report import Verdict
from benchmarks.harness.roofs import COPY_BYTES, copy_subject, measure_roofs

# What a case after this one needs at the least, in seconds, for its own part to be measured at all.
_CASE_RESERVE = 14.0
BASELINES = {one.name: one for one in (*TORCH_BASELINES, *JAX_BASELINES, *FLEX_BASELINES)}


@dataclass(frozen=True)
class BlockSettings(Settings):
    """Settings of block-diagonal attention."""

    batch_ms: float = 5.0
    least_rounds: int = 7


class BlockDiagonal(Family):
    """Block-diagonal attention; a copy of 2 GiB is timed in the rounds of every case."""

    name = "block_diagonal"
    kind = Timing
    settings = BlockSettings
    baselines = tuple(BASELINES)
    smoke_cases = (SMOKE_CASE,)
    smoke_baselines = ("jax-einsum",)
    smoke_text = "XLA and a reference einsum against float64"
    starts_late = True

    select = staticmethod(select_cases)
    judge = staticmethod(judge_times)

    def measure_rates(self) -> tuple[dict[str, float], str]:
        """Return the rate of a product; that of a copy is measured beside each case."""
        roofs = measure_roofs()
        text = (
            f"copy {roofs.copy_gb_per_s:,.0f} GB/s, three reads to one write {roofs.stream_gb_per_s:,.0f} GB/s, "
            f"bf16 product {roofs.matmul_tflops:,.0f} TFLOP/s"
        )
        return {"matmul_tflops": roofs.matmul_tflops}, text

    def measure_aside(self, console: Console, folder: Path, where: Environment, cases: Sequence[Any]) -> list[Verdict]:
        """Measure host times of a call and errors against float64."""
        began = time.monotonic()
        host_rows = measure_host((OURS,), where)
        merge_rows(folder / "block_diagonal_host.csv", HostRow, host_rows)
        console.print(host_table(host_rows))
        console.print(f"  host times took {time.monotonic() - began:.1f} s")
        error_rows = _measure_errors(console, where, cases)
        merge_rows(folder / "block_diagonal_errors.csv", ErrorRow, error_rows)
        return [*judge_errors(error_rows), *judge_host(host_rows)]

    def make_inputs(self, cases: Sequence[Case], context: Context) -> Inputs:
        """Return random inputs, and float64 results."""
        settings = context.settings
        (case,) = cases
        workload = make_workload(case, seed=settings.seed, device=settings.device)
        return Inputs(workload, exact_attention(case, *workload.inputs, workload.cotangent, workload.tables))

    def own(self, cases: Sequence[Case], settings: Settings) -> list[tuple[Case, Implementation]]:
        """Return this library through `jax.jit` and natively; where no kernel runs, the XLA implementation."""
        ours = [*THROUGH_JAX, NATIVE] if settings.implementation == OURS else [BASELINES[settings.implementation]]
        return [(case, one) for case in cases for one in ours]

    def others(self, cases: Sequence[Case], context: Context) -> list[tuple[Case, Implementation]]:
        """Return the baselines."""
        return [(case, BASELINES[name]) for case in cases for name in context.settings.baselines]

    def unsupported(self, context: Context, case: Any, implementation: Implementation) -> str:
        """Refuse what a case is not for, and baselines for which no time is left."""
        reason = super().unsupported(context, case, implementation)
        if reason or implementation.is_required:
            return reason
        reserve = implementation.preparation_seconds + len(context.later) * _CASE_RESERVE
        return SPENT if time.monotonic() + reserve > context.settings.deadline else ""

    def beside(self, settings: Settings) -> Subject | None:
        """Return a copy, whose rate the floors are made with."""
        return Subject("copy", copy_subject(), "torch") if settings.device == "cuda" else None

    def rates_beside(self, subject: Subject) -> dict[str, float]:
        """Return the rate of the copy."""
        return {"copy_gb_per_s": COPY_BYTES / summarise(subject.samples).median / 1e6} if subject.samples else {}

    def columns(self, entry: Entry, rates: Mapping[str, float]) -> dict[str, Any]:
        """Return the time of copying what the pass reads and writes."""
        if "copy_gb_per_s" not in rates:
            return dict(rates)
        floor = floor_ms(entry.case.floor(entry.pass_name), copy_gb_per_s=rates["copy_gb_per_s"])
        return {**rates, "floor_ms": floor}

    def timed_columns(self, entry: Entry, row: Timing) -> dict[str, Any]:
        """Return the bandwidth and the memory beyond inputs and outputs."""
        assert entry.program is not None and row.median_ms is not None
        count = entry.case.floor_bytes(entry.pass_name)
        rate = None if row.floor_ms is None else count / row.median_ms / 1e6
        return {"gb_per_s": rate, "peak_bytes": entry.program.extra_bytes}

    def tables(self, rows: Sequence[Timing], others: Sequence[Timing]) -> list[Any]:
        """Return the table of a case."""
        del others
        return [timing_table(rows[0].case, rows)]


def _measure_errors(console: Console, where: Environment, cases: Sequence[Case]) -> list[ErrorRow]:
    """Measure errors against float64 of this library and of FlashAttention 2."""
    began, names = time.monotonic(), {case.name for case in cases}
    judged = [one for one in THROUGH_JAX if one.name == OURS]
    rows: list[ErrorRow] = []
    for case in accuracy_cases():
        if case.name in names:
            flash = flash_baseline(case, list(BASELINES.values()))
            rows += measure_errors([case], [*judged, *([flash] if flash else [])], where)
    release_memory()
    console.print(error_table(rows))
    for row in rows:
        if row.tensor == "all":
            console.print(f"  {row.case}, {row.implementation}: {row.note}")
    console.print(f"  errors took {time.monotonic() - began:.1f} s")
    return rows


FAMILY = BlockDiagonal()
