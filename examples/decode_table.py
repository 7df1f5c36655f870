"""Report of `decode.py`: what the server does, as a live table in a terminal and as lines elsewhere."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

import numpy as np
from decode_scheduler import Scheduler
from rich.console import Console
from rich.live import Live
from rich.table import Table

# Seconds between two tables, and between two lines.
TABLE_SECONDS = 0.25
LINE_SECONDS = 5.0


def figures(scheduler: Scheduler, seconds: float) -> dict[str, str]:
    """Return the figures of a scheduler that has run for some seconds, by name."""
    counters, pool = scheduler.counters, scheduler.pool
    found = {
        "requests": f"{len(scheduler.waiting)} waiting, {len(scheduler.running)} running, {counters.finished} finished"
        f", {counters.cancelled} cancelled",
        "tokens per second": f"{counters.generated / seconds:,.0f} generated",
    }
    if counters.first_byte_seconds:
        median, high = np.percentile(counters.first_byte_seconds, (50, 99)) * 1e3
        found["time to first token"] = f"{median:,.1f} ms median, {high:,.1f} ms p99"
    found |= {
        "pages in use": f"{pool.in_use} of {len(pool.owners)}, {counters.most_pages} at most; {pool.idle} idle",
        "known tokens": f"{counters.processed_tokens:,} processed, {counters.shared_tokens:,} found in shared pages",
        "preemptions": f"{counters.preempted}",
    }
    if scheduler.drafts:
        found["drafts"] = f"{counters.accepted:,} of {counters.drafted:,} accepted"
    return found


class Report:
    """A context that shows the figures of a scheduler while it runs, and once more at its end."""

    def __init__(
        self, scheduler: Scheduler, console: Console, title: str, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._scheduler, self._console, self._title, self._clock = scheduler, console, title, clock
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._began = self._shown = clock()

    def __enter__(self) -> Self:
        self._began = self._shown = self._clock()
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._show()
        if self._live is not None:
            self._live.stop()

    def update(self) -> None:
        """Show the figures again if enough time has passed."""
        if self._clock() - self._shown >= (LINE_SECONDS if self._live is None else TABLE_SECONDS):
            self._show()

    def _show(self) -> None:
        self._shown = self._clock()
        found = figures(self._scheduler, max(self._shown - self._began, 1e-9))
        if self._live is None:
            line = "; ".join(f"{name}: {text}" for name, text in found.items())
            self._console.print(f"{self._title}: {line}", highlight=False, markup=False, soft_wrap=True)
            return
        table = Table(title=self._title, show_header=False)
        for name, text in found.items():
            table.add_row(name, text)
        self._live.update(table, refresh=True)
