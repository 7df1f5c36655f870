"""Tables of MoBA for the terminal."""

from collections.abc import Sequence

from rich.table import Table

from benchmarks.harness.records import MoBATiming
from benchmarks.moba.cases import MOBA_PASSES


def moba_table(case: str, rows: Sequence[MoBATiming]) -> Table:
    """One case: a line per implementation that has a time, recorded ones below."""
    first = rows[0]
    shape = (
        f"B{first.batch} N{first.query_heads}/{first.key_heads} H{first.head_dim}, block {first.block_size}, "
        f"top_k {first.top_k}"
    )
    title = f"{case}: {first.tokens:,} tokens, {shape}   (ms; of this library also time over floor)"
    table = Table(title=title, title_justify="left")
    table.add_column("implementation")
    for pass_name in MOBA_PASSES:
        table.add_column(pass_name, justify="right")
    for name in ("TFLOP/s", "extra GiB fwd / bwd / both", "peak GiB", "error"):
        table.add_column(name, justify="right")
    for name in dict.fromkeys(row.implementation for row in rows):
        found = {row.pass_name: row for row in rows if row.implementation == name}
        if any(row.median_ms is not None for row in found.values()):
            both = found.get("fwd+bwd")
            table.add_row(
                name,
                *(_time(found.get(pass_name)) for pass_name in MOBA_PASSES),
                _rate(both),
                " / ".join(_gibibytes(found.get(one), "extra_bytes") for one in ("fwd", "bwd", "fwd+bwd")),
                _gibibytes(both, "peak_bytes"),
                "-" if both is None or both.relative_error is None else f"{both.relative_error:.1e}",
            )
    floors = {row.pass_name: row.floor_ms for row in rows if row.floor_ms is not None}
    if floors:
        blanks = [""] * 4
        table.add_row("floor", *(_number(floors.get(pass_name)) for pass_name in MOBA_PASSES), *blanks)
    return table


def _number(milliseconds: float | None) -> str:
    return "-" if milliseconds is None else f"{milliseconds:.3f}"


def _time(row: MoBATiming | None) -> str:
    if row is None or row.median_ms is None:
        return "-"
    is_dense = row.implementation.startswith("torch-")
    ratio = "" if row.ratio_to_floor is None or is_dense else f"  {row.ratio_to_floor:.2f}x"
    return f"{row.median_ms:.3f}{ratio}"


def _rate(row: MoBATiming | None) -> str:
    """Useful arithmetic per time, which of dense attention is not what it computes."""
    if row is None or row.median_ms is None or row.useful_tflop is None or row.implementation.startswith("torch-"):
        return "-"
    return f"{row.useful_tflop / row.median_ms * 1e3:,.0f}"


def _gibibytes(row: MoBATiming | None, field: str) -> str:
    value = None if row is None else getattr(row, field)
    return "-" if value is None else f"{value / 2**30:.2f}"


def moba_reasons(rows: Sequence[MoBATiming]) -> list[str]:
    """A line per implementation and reason for what was not measured, and one per note on what was."""
    said: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.note:
            said.setdefault((row.implementation, row.note), []).append(row.pass_name)
    return [f"{name} ({', '.join(passes)}): {note}" for (name, note), passes in said.items()]
