"""Limits of Hopper's schedules, lifted in tests so that small calls and further head dimensions use their kernels."""

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from blockdiag.fusion.lowering import one_pass_schedule, streamed_schedule

# Head dimensions that are written for, but not chosen yet.
_FURTHER = [(96, 96), (192, 128), (192, 192)]
_LIFTED: dict[ModuleType, dict[str, Any]] = {
    streamed_schedule: {"_FEWEST": dict.fromkeys([*streamed_schedule._FEWEST, *_FURTHER], (0, 0))},
    one_pass_schedule: {
        name: dict.fromkeys((64, 128, 256), 0) for name in ("_FEWEST_SEEN", "_FEWEST_WITHOUT_MASKS", "_FEWEST_UNKNOWN")
    },
}


@contextlib.contextmanager
def lifted(*schedules: ModuleType) -> Iterator[None]:
    """Let the given schedules apply to calls of any size, and the streamed schedule to further head dimensions."""
    limits = [(schedule, name, table) for schedule in schedules for name, table in _LIFTED[schedule].items()]
    before = [getattr(schedule, name) for schedule, name, _ in limits]
    for schedule, name, table in limits:
        setattr(schedule, name, table)
    try:
        yield
    finally:
        for (schedule, name, _), table in zip(limits, before, strict=True):
            setattr(schedule, name, table)
