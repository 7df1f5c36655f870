"""Tables of the rows of several devices for the terminal."""

from collections.abc import Sequence

from rich.table import Table

from benchmarks.harness.records import DeviceTiming
from benchmarks.harness.report import number, quotient


def device_table(rows: Sequence[DeviceTiming]) -> Table:
    """Return the programs of a case: time, share of the perfect time, temporary memory and collectives."""
    table = Table(title=f"{rows[0].case}, transfers by {rows[0].transfers}", title_justify="left")
    for name in ("mesh", "devices", "ms", "of perfect", "temporary MiB", "collectives"):
        table.add_column(name, justify="left" if name in ("mesh", "collectives") else "right")
    for row in rows:
        share = number(quotient(row.perfect_ms, row.median_ms), ".1%")
        memory = number(row.temporary_mib, ".0f")
        table.add_row(row.mesh, str(row.devices), number(row.median_ms), share, memory, row.collectives or "none")
    return table
