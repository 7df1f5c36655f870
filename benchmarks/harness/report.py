"""Tables for the terminal, and verdicts: figures against their limits."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Verdict:
    """One figure against its limit.

    Attributes:
        name: what was measured.
        value: the figure; None when it was not measured.
        limit: what it may not exceed, or with `at_least` not fall short of.
        uncertainty: how far beyond the limit a value may lie and still not be told from it.
    """

    name: str
    value: float | None
    limit: float
    at_least: bool = False
    uncertainty: float = 0.0

    @property
    def is_met(self) -> bool:
        """Return whether the figure was measured and is within its limit."""
        if self.value is None:
            return False
        if self.at_least:
            return self.value >= self.limit - self.uncertainty
        return self.value <= self.limit + self.uncertainty


def quotient(above: float | None, below: float | None) -> float | None:
    """Return above / below; None where either was not measured."""
    return None if above is None or below is None else above / below


def verdict_table(verdicts: Sequence[Verdict]) -> Table:
    """Figures against their limits."""
    table = Table(title="figures to reach", title_justify="left")
    for name in ("figure", "measured", "limit", ""):
        table.add_column(name, justify="left" if name == "figure" else "right")
    for verdict in verdicts:
        value = "not measured" if verdict.value is None else f"{verdict.value:.4g}"
        if verdict.value is not None and verdict.uncertainty:
            value += f" +- {verdict.uncertainty:.2g}"
        limit = f"{'>=' if verdict.at_least else '<='} {verdict.limit:g}"
        table.add_row(verdict.name, value, limit, "met" if verdict.is_met else "MISSED")
    return table


def reasons(rows: Sequence[Any]) -> list[str]:
    """Return a line for each implementation and note, with the passes or cases that have it."""
    said: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.note:
            name = getattr(row, "implementation", row.case)
            said.setdefault((name, row.note), []).append(getattr(row, "pass_name", row.case))
    return [f"{name} ({', '.join(dict.fromkeys(what))}): {note}" for (name, note), what in said.items()]


type Cell = Callable[[Mapping[str, Any]], str]


def pass_table(title: str, rows: Sequence[Any], cells: Mapping[str, Cell]) -> Table:
    """Return a table with a line for each implementation that has a time.

    Args:
        title: of the table.
        rows: of one case.
        cells: by column, functions of an implementation's rows by pass.
    """
    table = Table(title=title, title_justify="left")
    table.add_column("implementation")
    for name in cells:
        table.add_column(name, justify="right")
    for name in dict.fromkeys(row.implementation for row in rows):
        found = {row.pass_name: row for row in rows if row.implementation == name}
        if any(row.median_ms is not None for row in found.values()):
            table.add_row(name, *(cell(found) for cell in cells.values()))
    return table


def number(value: float | None, form: str = ".3f") -> str:
    """Return a number as text, and a dash for None."""
    return "-" if value is None else format(value, form)


def time_cell(row: Any) -> str:
    """Return the time of a row in milliseconds and over its floor."""
    if row is None or row.median_ms is None:
        return "-"
    return f"{row.median_ms:.3f}" + ("" if row.ratio_to_floor is None else f"  {row.ratio_to_floor:.2f}x")


def rate_cell(row: Any) -> str:
    """Return useful arithmetic per time, TFLOP/s."""
    if row is None or row.median_ms is None or row.useful_tflop is None:
        return "-"
    return f"{row.useful_tflop / row.median_ms * 1e3:,.0f}"


def column_cell(row: Any, column: str, form: str = ".1f", unit: float = 1.0) -> str:
    """Return a column of a row over a unit."""
    value = None if row is None else getattr(row, column)
    return number(None if value is None else value / unit, form)


def make_console() -> Console:
    """A console that does not cut tables where output is not a terminal."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=150, highlight=False)
