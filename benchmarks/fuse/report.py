"""Tables of fused functions for the terminal, and the limits that their figures are compared with."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.table import Table

from benchmarks.fuse.cases import FUSE_CASES, FUSE_PASSES, TOKEN_GROUPS
from benchmarks.harness.records import FuseTiming
from benchmarks.harness.report import Cell, Verdict, column_cell, number, pass_table, rate_cell, time_cell

OURS = "triton"
PEER = "torch-flex"

# Largest milliseconds by case and pass.
TIME_LIMITS = {
    "evoformer_d64": {"fwd": 0.45, "fwd+bwd": 1.6},
    "evoformer_d128": {"fwd": 0.80, "fwd+bwd": 2.8},
    "diff_d64": {"fwd": 6.5},
    "diff_d128": {"fwd": 7.0},
}
PEER_LIMIT = 1.0  # time over FlexAttention's
# Bytes beyond inputs and outputs for each row of scores: sixteen float32 numbers, of which two are the log-sum-exp and
# the product of output and cotangent.
MEMORY_LIMIT = 64.0
FIRST_COMPILE_LIMIT_S = 5.0
CACHED_KERNELS_LIMIT_MS = 50.0


def judge_fuse(rows: Sequence[FuseTiming], implementation: str = OURS) -> list[Verdict]:
    """Verdicts for the cases that `rows` hold."""
    mine = [row for row in rows if row.implementation == implementation]
    verdicts = [
        Verdict(f"{row.case} {row.pass_name}: ms", row.median_ms, TIME_LIMITS[row.case][row.pass_name])
        for row in mine
        if row.pass_name in TIME_LIMITS.get(row.case, {})
    ]
    verdicts += _judge_peer(rows, implementation)
    verdicts += _worst(mine, "bytes beyond inputs and outputs, for each row of scores", _bytes_by_row, MEMORY_LIMIT)
    verdicts += _worst(mine, "first compile, s", lambda row: row.first_compile_s, FIRST_COMPILE_LIMIT_S)
    verdicts += _worst(
        mine, "kernels of a compile from the disk, ms", lambda row: row.cached_kernels_ms, CACHED_KERNELS_LIMIT_MS
    )
    return verdicts


def backward_ms(forward: FuseTiming | None, both: FuseTiming | None) -> float | None:
    """Return the time of both passes minus that of the forward pass; None if one was not measured."""
    if forward is None or both is None or forward.median_ms is None or both.median_ms is None:
        return None
    return both.median_ms - forward.median_ms


def _judge_peer(rows: Sequence[FuseTiming], implementation: str) -> list[Verdict]:
    """Judge the time over FlexAttention's, forward and backward, of the cases that FlexAttention can express."""
    known = {(row.case, row.implementation, row.pass_name): row for row in rows}
    cases = dict.fromkeys(row.case for row in rows if row.group in TOKEN_GROUPS)
    verdicts = []
    for case in cases:

        def times(name: str, case: str = case) -> tuple[float | None, float | None]:
            forward, both = (known.get((case, name, pass_name)) for pass_name in ("fwd", "fwd+bwd"))
            return None if forward is None else forward.median_ms, backward_ms(forward, both)

        for pass_name, ours, peer in zip(("fwd", "bwd"), times(implementation), times(PEER), strict=True):
            ratio = None if ours is None or peer is None else ours / peer
            verdicts.append(Verdict(f"{case} {pass_name}: time over FlexAttention", ratio, PEER_LIMIT))
    return verdicts


def _bytes_by_row(row: FuseTiming) -> float | None:
    case = FUSE_CASES.get(row.case)
    return None if row.extra_bytes is None or case is None else row.extra_bytes / case.score_rows


def _worst(
    rows: Sequence[FuseTiming], name: str, read: Callable[[FuseTiming], float | None], limit: float
) -> list[Verdict]:
    """One verdict of each pass, for the row with the largest figure."""
    verdicts = []
    for pass_name in dict.fromkeys(row.pass_name for row in rows):
        found = [(value, row.case) for row in rows if row.pass_name == pass_name and (value := read(row)) is not None]
        value, case = max(found, default=(None, "no case"))
        verdicts.append(Verdict(f"{name}, {pass_name}, worst ({case})", value, limit))
    return verdicts


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
