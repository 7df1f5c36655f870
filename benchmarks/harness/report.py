"""Tables for the terminal."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.harness.verdicts import Verdict


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


def make_console() -> Console:
    """A console that does not cut tables where output is not a terminal."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=150, highlight=False)
