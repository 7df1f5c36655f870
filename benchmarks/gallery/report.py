"""Tables of the gallery's rows for the terminal."""

import statistics
from collections.abc import Sequence

from rich.table import Table

from benchmarks.gallery.cases import PASSES
from benchmarks.harness.records import GalleryTiming
from benchmarks.harness.report import number


def gallery_table(rows: Sequence[GalleryTiming]) -> Table:
    """Return the passes of a variant: times, errors against float32 and memory beyond inputs and outputs."""
    shape = next((row.shape for row in rows if row.shape), "")
    table = Table(title=", ".join(filter(None, (rows[0].variant, shape))), title_justify="left")
    table.add_column("pass")
    for name in ("ms", "XLA, ms", "factor", "error", "XLA's error", "extra MiB", "XLA's MiB"):
        table.add_column(name, justify="right")
    for row in rows:
        factor = "-" if row.speed_up is None else f"{row.speed_up:.1f}x"
        errors = (number(row.ours_error, ".1e"), number(row.xla_error, ".1e"))
        memory = (None if x is None else x / 2**20 for x in (row.ours_bytes, row.xla_bytes))
        times = (number(row.ours_ms), number(row.xla_ms))
        table.add_row(row.pass_name, *times, factor, *errors, *(number(x, ".1f") for x in memory))
    return table


def speed_up_table(rows: Sequence[GalleryTiming]) -> Table:
    """Return how many passes were timed beside XLA's, and the median of the factors."""
    table = Table(title="XLA's time over the fused function's", title_justify="left")
    for name in ("pass", "timed", "median"):
        table.add_column(name, justify="left" if name == "pass" else "right")
    for pass_name in PASSES:
        found = [row.speed_up for row in rows if row.pass_name == pass_name]
        factors = [factor for factor in found if factor is not None]
        median = f"{statistics.median(factors):.1f}x" if factors else "-"
        table.add_row(pass_name, f"{len(factors)} of {len(found)}", median)
    return table
