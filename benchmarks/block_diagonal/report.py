"""Tables of block-diagonal attention for the terminal."""

from collections.abc import Sequence

from rich.table import Table

from benchmarks.block_diagonal.cases import PASSES
from benchmarks.harness.records import ErrorRow, HostRow, Timing
from benchmarks.harness.report import Cell, column_cell, pass_table


def _cell(row: Timing | None) -> str:
    """Time, ratio to floor and rate of one pass."""
    if row is None or row.median_ms is None:
        return "-"
    ratio = "" if row.ratio_to_floor is None else f"  {row.ratio_to_floor:.3f}x"
    rate = "" if row.gb_per_s is None else f"  {row.gb_per_s:,.0f}"
    return f"{row.median_ms:.4f}{ratio}{rate}"


def timing_table(case: str, rows: Sequence[Timing]) -> Table:
    """Return a table of one case with a line for each implementation that has a time."""
    copy = next((row.copy_gb_per_s for row in rows if row.copy_gb_per_s), None)
    title = case if copy is None else f"{case}   (copy {copy:,.0f} GB/s; cells: ms, time over floor, GB/s)"
    cells: dict[str, Cell] = {name: lambda found, name=name: _cell(found.get(name)) for name in PASSES}
    cells["extra MiB"] = lambda found: " / ".join(
        column_cell(found.get(name), "peak_bytes", ".1f", 2**20) for name in PASSES
    )
    return pass_table(title, rows, cells)


def _error_cell(row: ErrorRow | None) -> str:
    return "-" if row is None else f"{row.max_error:.3g} / {row.mean_error:.3g}"


def error_table(rows: Sequence[ErrorRow]) -> Table:
    """Errors against the float64 oracle; a line per case and tensor, a column per implementation."""
    names = list(dict.fromkeys(row.implementation for row in rows if row.tensor != "all"))
    table = Table(title="error against float64: worst / mean", title_justify="left")
    table.add_column("case")
    table.add_column("tensor")
    for name in names:
        table.add_column(name, justify="right")
    keys = dict.fromkeys((row.case, row.tensor) for row in rows if row.tensor != "all")
    for case, tensor in keys:
        found = {row.implementation: row for row in rows if (row.case, row.tensor) == (case, tensor)}
        table.add_row(case, tensor, *(_error_cell(found.get(name)) for name in names))
    return table


def host_table(rows: Sequence[HostRow]) -> Table:
    """Host time per call."""
    table = Table(title="host time of a jitted call, us: median (p20 to p80)", title_justify="left")
    for name in ("pass", "implementation", "us", "over a trivial call"):
        table.add_column(name, justify="right")
    for row in rows:
        if row.median_us is None:
            table.add_row(row.pass_name, row.implementation, "-", row.note[:80])
        else:
            spread = f"{row.median_us:.2f} ({row.p20_us:.2f} to {row.p80_us:.2f})"
            table.add_row(row.pass_name, row.implementation, spread, f"{row.over_trivial_us:+.2f}")
    return table
