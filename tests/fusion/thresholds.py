"""Thresholds of Hopper's schedules, lifted in tests so that small calls use their kernels, too."""

import contextlib
from collections.abc import Iterator
from types import ModuleType

from blockdiag.fusion.lowering import one_pass_schedule, streamed_schedule

_TABLES = {
    streamed_schedule: ("_FEWEST_KEYS", "_FEWEST_SCORES"),
    one_pass_schedule: ("_FEWEST_SEEN", "_FEWEST_WITHOUT_MASKS", "_FEWEST_UNKNOWN"),
}


@contextlib.contextmanager
def lifted(*schedules: ModuleType) -> Iterator[None]:
    """Let the given schedules apply to calls of any size."""
    tables = [getattr(schedule, name) for schedule in schedules for name in _TABLES[schedule]]
    before = [dict(table) for table in tables]
    for table in tables:
        table.update(dict.fromkeys(table, 0))
    try:
        yield
    finally:
        for table, numbers in zip(tables, before, strict=True):
            table.update(numbers)
