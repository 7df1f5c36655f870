"""Tables of fused functions for the terminal."""

from collections.abc import Sequence

from rich.table import Table

from benchmarks.fuse.cases import FUSE_PASSES
from benchmarks.fuse.targets import backward_ms
from benchmarks.harness.records import FuseTiming


def fuse_table(rows: Sequence[FuseTiming]) -> Table:
    """One case: a line per implementation that has a time."""
    first = rows[0]
    lead = f"{first.batch} x {first.rows}" if first.rows > 1 else f"{first.batch}"
    shape = f"{lead} x {first.tokens:,} tokens, heads {first.query_heads}/{first.key_heads}, H{first.head_dim}"
    title = f"{first.case}: {shape}   (ms, time over floor; backward is the difference)"
    table = Table(title=title, title_justify="left")
    table.add_column("implementation")
    for name in ("fwd", "bwd", "fwd+bwd", "p20 to p80 of both", "TFLOP/s", "extra MiB fwd / both", "error fwd / both"):
        table.add_column(name, justify="right")
    for name in dict.fromkeys(row.implementation for row in rows):
        found = {row.pass_name: row for row in rows if row.implementation == name}
        forward, both = (found.get(pass_name) for pass_name in FUSE_PASSES)
        if any(row.median_ms is not None for row in found.values()):
            table.add_row(
                name,
                _time(forward),
                _backward(forward, both),
                _time(both),
                "-" if both is None or both.median_ms is None else f"{both.p20_ms:.3f} to {both.p80_ms:.3f}",
                _rate(both),
                " / ".join(_mebibytes(row) for row in (forward, both)),
                " / ".join(_error(row) for row in (forward, both)),
            )
    floors = {row.pass_name: row.floor_ms for row in rows}
    forward, both = (floors.get(pass_name) for pass_name in FUSE_PASSES)
    if forward is not None and both is not None:
        table.add_row("floor", f"{forward:.3f}", f"{both - forward:.3f}", f"{both:.3f}", *[""] * 4)
    return table


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
            *(" / ".join(_number(None if row is None else row.median_ms) for row in passes) for passes in cells),
            " / ".join(_number(floors.get(pass_name)) for pass_name in FUSE_PASSES),
            max((_error(row) for row in found.values() if row.relative_error is not None), key=float, default="-"),
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


def fuse_reasons(rows: Sequence[FuseTiming]) -> list[str]:
    """A line per implementation and note."""
    said: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.note:
            said.setdefault((row.implementation, row.note), []).append(row.pass_name)
    return [f"{name} ({', '.join(passes)}): {note}" for (name, note), passes in said.items()]


def _number(milliseconds: float | None) -> str:
    return "-" if milliseconds is None else f"{milliseconds:.3f}"


def _time(row: FuseTiming | None) -> str:
    if row is None or row.median_ms is None:
        return "-"
    return f"{row.median_ms:.3f}" + ("" if row.ratio_to_floor is None else f"  {row.ratio_to_floor:.2f}x")


def _backward(forward: FuseTiming | None, both: FuseTiming | None) -> str:
    return _number(backward_ms(forward, both))


def _rate(row: FuseTiming | None) -> str:
    """Useful arithmetic per time."""
    if row is None or row.median_ms is None or row.useful_tflop is None:
        return "-"
    return f"{row.useful_tflop / row.median_ms * 1e3:,.0f}"


def _mebibytes(row: FuseTiming | None) -> str:
    return "-" if row is None or row.extra_bytes is None else f"{row.extra_bytes / 2**20:,.1f}"


def _error(row: FuseTiming | None) -> str:
    return "-" if row is None or row.relative_error is None else f"{row.relative_error:.1e}"
