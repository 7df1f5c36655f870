"""Tables of fused functions for the terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from benchmarks.fuse.cases import FUSE_PASSES
from benchmarks.fuse.targets import backward_ms
from benchmarks.harness.records import FuseTiming
from benchmarks.harness.report import Cell, column_cell, number, pass_table, rate_cell, time_cell


def fuse_table(rows: Sequence[FuseTiming]) -> Table:
    """Return a table of one case with a line for each implementation that has a time, and the floor."""
    first = rows[0]
    lead = f"{first.batch} x {first.rows}" if first.rows > 1 else f"{first.batch}"
    shape = f"{lead} x {first.tokens:,} tokens, heads {first.query_heads}/{first.key_heads}, H{first.head_dim}"
    cells: dict[str, Cell] = {
        "fwd": lambda found: time_cell(found.get("fwd")),
        "bwd": lambda found: number(backward_ms(found.get("fwd"), found.get("fwd+bwd"))),
        "fwd+bwd": lambda found: time_cell(found.get("fwd+bwd")),
        "p20 to p80 of both": lambda found: " to ".join(_both(found, one, ".3f") for one in ("p20_ms", "p80_ms")),
        "TFLOP/s": lambda found: rate_cell(found.get("fwd+bwd")),
        "extra MiB fwd / both": lambda found: _passes(found, "extra_bytes", ",.1f", 2**20),
        "error fwd / both": lambda found: _passes(found, "relative_error", ".1e"),
    }
    title = f"{first.case}: {shape}   (ms, time over floor; backward is the difference)"
    table = pass_table(title, rows, cells)
    floors = {row.pass_name: row.floor_ms for row in rows}
    forward, both = (floors.get(pass_name) for pass_name in FUSE_PASSES)
    if forward is not None and both is not None:
        table.add_row("floor", f"{forward:.3f}", f"{both - forward:.3f}", f"{both:.3f}", *[""] * 4)
    return table


def _both(found: Mapping[str, Any], column: str, form: str) -> str:
    return column_cell(found.get("fwd+bwd"), column, form)


def _passes(found: Mapping[str, Any], column: str, form: str, unit: float = 1.0) -> str:
    return " / ".join(column_cell(found.get(pass_name), column, form, unit) for pass_name in FUSE_PASSES)


def summary_table(rows: Sequence[FuseTiming]) -> Table:
    """All cases: a line each, milliseconds forward and of both passes by implementation, and the worst error of all."""
    table = Table(title="all cases   (ms, forward / forward and backward)", title_justify="left")
    table.add_column("case")
    names = list(dict.fromkeys(row.implementation for row in rows if row.median_ms is not None))
    for name in (*names, "floor", "error"):
        table.add_column(name, justify="right")
    for case in dict.fromkeys(row.case for row in rows):
        found = {(row.implementation, row.pass_name): row for row in rows if row.case == case}
        cells = [[found.get((name, pass_name)) for pass_name in FUSE_PASSES] for name in names]
        floors = {row.pass_name: row.floor_ms for row in found.values()}
        table.add_row(
            case,
            *(" / ".join(number(None if row is None else row.median_ms) for row in passes) for passes in cells),
            " / ".join(number(floors.get(pass_name)) for pass_name in FUSE_PASSES),
            number(max((row.relative_error for row in found.values() if row.relative_error), default=None), ".1e"),
        )
    return table


def compile_table(rows: Sequence[FuseTiming]) -> Table:
    """What compiling took, of rows that say it."""
    table = Table(title="compiling   (s with nothing on disk, ms with kernels on disk)", title_justify="left")
    for name in ("case", "pass"):
        table.add_column(name)
    for name in ("first", "kernels of it", "cached", "kernels of it"):
        table.add_column(name, justify="right")
    for row in rows:
        if row.first_compile_s is not None or row.cached_compile_ms is not None:
            seconds = (row.first_compile_s, row.first_kernels_s)
            milliseconds = (row.cached_compile_ms, row.cached_kernels_ms)
            table.add_row(
                row.case,
                row.pass_name,
                *("-" if value is None else f"{value:.2f}" for value in seconds),
                *("-" if value is None else f"{value:.0f}" for value in milliseconds),
            )
    return table
