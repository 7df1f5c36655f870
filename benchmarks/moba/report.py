"""Tables of MoBA for the terminal, and the limits that its figures are compared with."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.table import Table

from benchmarks.harness.records import MoBATiming
from benchmarks.harness.report import Cell, Verdict, column_cell, number, pass_table, quotient, rate_cell, time_cell
from benchmarks.moba.cases import MOBA_PASSES
from benchmarks.moba.recorded import FLASH_MOBA_ERRORS

OURS = "triton"
DENSE = "torch-cudnn"

# Largest milliseconds by case and pass; the forward has the routing in it.
TIME_LIMITS = {
    "n8k": {"fwd+bwd": 1.9},
    "n32k": {"fwd+bwd": 7.5},
    "n64k": {"fwd+bwd": 15.0, "fwd": 7.0, "bwd": 8.0, "routing": 2.0},
    "n128k": {"fwd+bwd": 33.0},
}
# Of the forward, in every case.
ROUTING_SHARE = 0.30
# Largest extra memory of the forward in GiB: FlashMoBA's at the same shape.
MEMORY_LIMITS_GIB = {"n64k": 3.08, "n128k": 6.16}
# From this many tokens on no case may be slower than dense attention.
_DENSE_FROM = 8192 + 1
# What must run, whatever it takes.
_MUST_RUN = ("n512k_b1",)


def judge_moba(rows: Sequence[MoBATiming], implementation: str = OURS) -> list[Verdict]:
    """Verdicts for the cases that `rows` hold."""
    mine = {(row.case, row.pass_name): row for row in rows if row.implementation == implementation}
    cases = list(dict.fromkeys(case for case, _ in mine))

    def value(case: str, pass_name: str, read: Callable[[MoBATiming], float | None]) -> float | None:
        row = mine.get((case, pass_name))
        return None if row is None else read(row)

    def median(case: str, pass_name: str) -> float | None:
        return value(case, pass_name, lambda row: row.median_ms)

    verdicts = []
    for case in cases:
        for pass_name, limit in TIME_LIMITS.get(case, {}).items():
            verdicts.append(Verdict(f"{case} {pass_name}: ms", median(case, pass_name), limit))
        share = quotient(median(case, "routing"), median(case, "fwd"))
        verdicts.append(Verdict(f"{case}: routing over forward", share, ROUTING_SHARE))
        if case in MEMORY_LIMITS_GIB:
            extra = value(case, "fwd", lambda row: None if row.extra_bytes is None else row.extra_bytes / 2**30)
            verdicts.append(Verdict(f"{case} fwd: GiB beyond inputs and outputs", extra, MEMORY_LIMITS_GIB[case]))
        for pass_name, limit in FLASH_MOBA_ERRORS.items():
            error = value(case, pass_name, lambda row: row.relative_error)
            # Errors of both come from rounding to bfloat16; theirs is known to two digits.
            name = f"{case} {pass_name}: relative error against float32"
            verdicts.append(Verdict(name, error, limit, uncertainty=0.3e-3))
        if case in _MUST_RUN:
            verdicts.append(Verdict(f"{case} fwd+bwd: runs (ms)", median(case, "fwd+bwd"), float("inf")))
    return [*verdicts, *_judge_dense(rows, implementation)]


def _judge_dense(rows: Sequence[MoBATiming], implementation: str) -> list[Verdict]:
    """Time over that of dense attention on the same arrays, where that was measured."""
    dense = {
        dense_shape(row): row.median_ms for row in rows if row.implementation == DENSE and row.pass_name == "fwd+bwd"
    }
    verdicts = []
    for row in rows:
        is_judged = row.implementation == implementation and row.pass_name == "fwd+bwd" and row.tokens >= _DENSE_FROM
        if is_judged and dense.get(dense_shape(row)) is not None:
            ratio = quotient(row.median_ms, dense[dense_shape(row)])
            verdicts.append(Verdict(f"{row.case} fwd+bwd: time over dense cuDNN", ratio, 1.0))
    return verdicts


def dense_shape(row: MoBATiming) -> tuple[int, ...]:
    """Return the shape that dense attention sees of a row's workload; see `MoBACase.dense_shape`."""
    return row.batch, row.tokens, row.query_heads, row.key_heads, row.head_dim


def moba_table(case: str, rows: Sequence[MoBATiming]) -> Table:
    """Return a table with a line for each implementation that has a time, recorded ones below, and the floor."""
    first = rows[0]
    shape = (
        f"B{first.batch} N{first.query_heads}/{first.key_heads} H{first.head_dim}, block {first.block_size}, "
        f"top_k {first.top_k}"
    )
    title = f"{case}: {first.tokens:,} tokens, {shape}   (ms; of this library also time over floor)"
    cells: dict[str, Cell] = {name: lambda found, name=name: _time(found.get(name)) for name in MOBA_PASSES}
    cells["TFLOP/s"] = lambda found: _rate(found.get("fwd+bwd"))
    cells["extra GiB fwd / bwd / both"] = _extra
    cells["peak GiB"] = lambda found: column_cell(found.get("fwd+bwd"), "peak_bytes", ".2f", 2**30)
    cells["error"] = lambda found: column_cell(found.get("fwd+bwd"), "relative_error", ".1e")
    table = pass_table(title, rows, cells)
    floors = {row.pass_name: row.floor_ms for row in rows if row.floor_ms is not None}
    if floors:
        table.add_row("floor", *(number(floors.get(name)) for name in MOBA_PASSES), *[""] * 4)
    return table


def _is_dense(row: MoBATiming | None) -> bool:
    return row is not None and row.implementation.startswith("torch-")


def _time(row: MoBATiming | None) -> str:
    return column_cell(row, "median_ms", ".3f") if _is_dense(row) else time_cell(row)


def _rate(row: MoBATiming | None) -> str:
    """Return useful arithmetic per time; dense attention computes more than that."""
    return "-" if _is_dense(row) else rate_cell(row)


def _extra(found: Mapping[str, Any]) -> str:
    return " / ".join(column_cell(found.get(one), "extra_bytes", ".2f", 2**30) for one in ("fwd", "bwd", "fwd+bwd"))
