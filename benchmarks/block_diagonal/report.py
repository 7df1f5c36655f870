"""Tables of block-diagonal attention for the terminal."""

from collections.abc import Iterable, Sequence

from rich.table import Table

from benchmarks.block_diagonal.cases import PASSES
from benchmarks.harness.records import ErrorRow, HostRow, Timing


def _cell(row: Timing | None) -> str:
    """Time, ratio to floor and rate of one pass."""
    if row is None or row.median_ms is None:
        return "-"
    ratio = "" if row.ratio_to_floor is None else f"  {row.ratio_to_floor:.3f}x"
    rate = "" if row.gb_per_s is None else f"  {row.gb_per_s:,.0f}"
    return f"{row.median_ms:.4f}{ratio}{rate}"


def _mebibytes(rows: Iterable[Timing | None]) -> str:
    """Extra memory of the passes, in MiB."""
    return " / ".join("-" if row is None or row.peak_bytes is None else f"{row.peak_bytes / 2**20:.1f}" for row in rows)


def timing_table(case: str, rows: Sequence[Timing]) -> Table:
    """One case: a line per implementation, then the reasons of those that did not run."""
    copy = next((row.copy_gb_per_s for row in rows if row.copy_gb_per_s), None)
    title = case if copy is None else f"{case}   (copy {copy:,.0f} GB/s; cells: ms, time over floor, GB/s)"
    table = Table(title=title, title_justify="left")
    table.add_column("implementation")
    for pass_name in PASSES:
        table.add_column(pass_name, justify="right")
    table.add_column("extra MiB", justify="right")
    names = list(dict.fromkeys(row.implementation for row in rows))
    for name in names:
        by_pass = {row.pass_name: row for row in rows if row.implementation == name}
        passes = [by_pass.get(pass_name) for pass_name in PASSES]
        if any(row is not None and row.median_ms is not None for row in passes):
            table.add_row(name, *(_cell(row) for row in passes), _mebibytes(passes))
    return table


def reasons(rows: Sequence[Timing]) -> list[str]:
    """A line per implementation and reason for what was not measured."""
    missing: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.median_ms is None:
            missing.setdefault((row.implementation, row.note), []).append(row.pass_name)
    return [f"{name} ({', '.join(passes)}): {note}" for (name, note), passes in missing.items()]


def _error_cell(row: ErrorRow | None) -> str:
    return "-" if row is None else f"{row.max_error:.3g} / {row.mean_error:.3g}"


def launches(rows: Sequence[Timing]) -> list[str]:
    """What each pass of this library launches through JAX, as its compiled program says."""
    shown = [row for row in rows if row.implementation in ("triton", "pallas") and row.median_ms is not None]
    return [f"{row.implementation} {row.pass_name}: {row.note}" for row in shown]


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
