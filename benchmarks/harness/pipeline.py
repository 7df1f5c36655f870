"""Common steps of all benchmarks, and the description of one for the command line.

An op's `command.py` goes cases -> programs -> check -> clock -> records -> report, and `harness/plots.py` draws the
records.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from benchmarks.harness.records import (
    Environment,
    key_of,
    merge_rows,
    read_rows,
    recordable_failures,
    write_rows,
)
from blockdiag.cli.machine import reason_of

SPENT = "not run: the time budget was spent; raise --budget-seconds"


@dataclass(frozen=True)
class Choices:
    """Options of a run.

    Attributes:
        cases, baselines: comma-separated names; None is all of the op.
        rounds: samples of each implementation and pass.
        seed: of the random inputs.
        deadline: `time.monotonic` seconds after which nothing new is begun.
    """

    cases: str | None
    baselines: str | None
    rounds: int
    seed: int
    deadline: float


class Smoke(Protocol):
    """The CPU's part: every check at a tiny size; rows are kept in `output`, where that is given."""

    def __call__(self, console: Console, output: Path | None, /) -> None: ...


class Measure(Protocol):
    """The GPU's part: rows are kept in a folder as soon as they are known."""

    def __call__(self, console: Console, folder: Path, choices: Choices, /) -> None: ...


@dataclass(frozen=True)
class Benchmark:
    """One op for the command line.

    Attributes:
        budget_seconds: time after which nothing new is begun, unless the user gives another.
        names: of the cases, for the help text.
        needs_torch: whether its baselines are PyTorch's.
        least_devices: GPUs that it needs where all ops are measured.
    """

    measure: Measure
    smoke: Smoke
    budget_seconds: float = 270.0
    names: str = ""
    needs_torch: bool = True
    least_devices: int = 1


def select_names(names: str | None, known: Iterable[str], argument: str = "baselines") -> tuple[str, ...]:
    """Parse a comma-separated list of some of `known` (None: all, "none": none), in the order of `known`.

    Raises:
        ValueError: a name is unknown, or there is none.
    """
    known = tuple(known)
    if names is None:
        return known
    wanted = tuple(name.strip() for name in names.split(",") if name.strip())
    if wanted == ("none",):
        return ()
    if not wanted or any(name not in known for name in wanted):
        raise ValueError(f"`{argument}` must be none or name some of {', '.join(known)}; got {names!r}")
    return tuple(name for name in known if name in wanted)


def introduce(console: Console, where: Environment, rates: str) -> None:
    """Print the device, the versions, and the rates that this run measured."""
    console.print(
        f"{where.device}, driver {where.driver}, jax {where.jax}, torch {where.torch}, triton {where.triton}\n{rates}"
    )


def introduce_smoke(console: Console, what: str) -> None:
    """Print what a run on the CPU computes, and what its times are worth."""
    console.print(
        f"This is a smoke run on the CPU: {what} at a tiny size. "
        "Its times say nothing about a GPU; run the same command on a machine with an NVIDIA GPU for those."
    )


def keep_smoke(console: Console, output: Path | None, op: str, kind: type, rows: Sequence[Any]) -> None:
    """Write the rows of a run on the CPU to `output`, where that is given."""
    if output is not None:
        path = output / f"{op}_smoke.csv"
        write_rows(path, kind, rows)
        console.print(f"written to {path}")


def compile_launches[CaseT](
    console: Console,
    cases: Sequence[CaseT],
    launches: Callable[[CaseT], Sequence[Any]],
    *,
    limit_seconds: float = 120.0,
    binary: bool = False,
) -> None:
    """Compile every kernel launch of every case ahead, by many processes at once."""
    from benchmarks.harness.kernels import compile_ahead
    from blockdiag.interop.targets import session_target

    try:
        specs = {spec: None for case in cases for spec in launches(case)}
    except recordable_failures() as failure:
        console.print(f"kernels could not be listed ahead: {reason_of(failure)}")
        return
    for line in compile_ahead(specs, session_target(), limit_seconds=limit_seconds, binary=binary):
        console.print(f"compiled ahead: {line}")


def keep_rows(path: Path, kind: type, rows: Sequence[Any], *, is_timed: Callable[[Any], bool]) -> None:
    """Write rows; those that are not timed replace none that are."""
    known = {key_of(row) for row in (read_rows(path, kind) if path.exists() else []) if is_timed(row)}
    merge_rows(path, kind, [row for row in rows if is_timed(row) or key_of(row) not in known])
