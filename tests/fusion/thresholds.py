"""Limits of Hopper's schedules, lifted in tests so that small calls use their kernels."""

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from blockdiag.fusion.lowering import one_pass_schedule, streamed_schedule

_LIFTED: dict[ModuleType, dict[str, Any]] = {
    streamed_schedule: {"_FEWEST": dict.fromkeys(streamed_schedule._FEWEST, (0, 0)), "_FEWEST_MASKED": 0},
    one_pass_schedule: {
        name: dict.fromkeys(one_pass_schedule._TILES, 0)
        for name in ("_FEWEST_SEEN", "_FEWEST_WITHOUT_MASKS", "_FEWEST_UNKNOWN")
    },
}


@contextlib.contextmanager
def lifted(*schedules: ModuleType) -> Iterator[None]:
    """Let the given schedules apply to calls of any size."""
    limits = [(schedule, name, limit) for schedule in schedules for name, limit in _LIFTED[schedule].items()]
    before = [getattr(schedule, name) for schedule, name, _ in limits]
    for schedule, name, limit in limits:
        setattr(schedule, name, limit)
    try:
        yield
    finally:
        for (schedule, name, _), limit in zip(limits, before, strict=True):
            setattr(schedule, name, limit)
