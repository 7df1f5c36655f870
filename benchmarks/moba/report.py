"""The table of a case of MoBA for the terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from benchmarks.harness.records import MoBATiming
from benchmarks.harness.report import Cell, column_cell, number, pass_table, rate_cell, time_cell
from benchmarks.moba.cases import MOBA_PASSES


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
