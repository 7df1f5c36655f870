"""The run of any family: cases -> programs -> check -> clock -> records -> report, and its small copy on a CPU."""

import dataclasses
import importlib
import importlib.util
import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from benchmarks.harness.clock import Subject, calibrate, summarise, take_rounds
from benchmarks.harness.family import SPENT, Context, Entry, Family, Implementation, Settings
from benchmarks.harness.machine import device_name, release_memory
from benchmarks.harness.records import (
    Environment,
    environment,
    is_complete,
    is_timed,
    merge_rows,
    recordable_failures,
    write_rows,
)
from benchmarks.harness.report import reasons, verdict_table
from blockdiag.cli.machine import reason_of


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
    """One command.

    Attributes:
        measure: what runs on a GPU.
        smoke: what runs on a CPU.
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


def of_family(
    module: str, *, names: str, budget_seconds: float = 270.0, needs_torch: bool = True, least_devices: int = 1
) -> Benchmark:
    """Return the command of the `FAMILY` in a module, which is imported when the command runs."""

    def family() -> Family:
        if needs_torch and importlib.util.find_spec("torch") is None:
            raise SystemExit("benchmarks compare with PyTorch, which is not installed; try: ./do setup")
        return importlib.import_module(module).FAMILY

    return Benchmark(
        measure=lambda console, folder, choices: run(family(), console, folder, choices),
        smoke=lambda console, output: smoke(family(), console, output),
        budget_seconds=budget_seconds,
        names=names,
        needs_torch=needs_torch,
        least_devices=least_devices,
    )


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
    versions = f"driver {where.driver}, jax {where.jax}, torch {where.torch}, triton {where.triton}"
    console.print("\n".join(filter(None, (f"{where.device}, {versions}", rates))))


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


def run(family: Family, console: Console, folder: Path, choices: Choices, *, file: str | None = None) -> None:
    """Measure the cases of a family on the GPU; rows are written as soon as they are known.

    Args:
        family: what is measured.
        console: where tables and progress are printed.
        folder: of the CSV file.
        choices: options of the run.
        file: name of the CSV file; None for that of the family.

    Raises:
        SystemExit: an option is wrong, or the process lacks what the family needs.
    """
    began = time.monotonic()
    try:
        cases, baselines = family.select(choices.cases), select_names(choices.baselines, family.baselines)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    if lacking := family.unavailable():
        raise SystemExit(lacking)
    options = {"deadline": choices.deadline, "rounds": choices.rounds, "seed": choices.seed, "say": console.print}
    settings = family.settings(baselines=baselines, **options)
    path, where = folder / (file or f"{family.name}.csv"), environment(device_name())
    with family.compiled_ahead(console, cases, settings) as ahead:
        rates, text = family.measure_rates()
        introduce(console, where, text)
        recorded = family.recorded()
        if recorded:
            merge_rows(path, family.kind, recorded)
        verdicts = family.measure_aside(console, folder, where, cases)
        measured: list[Any] = []
        batches = family.batches(cases)
        for _, places in itertools.groupby(range(len(batches)), lambda place: family.section(batches[place][0])):
            rows: list[Any] = []
            for place in places:
                later = [case for batch in batches[place + 1 :] for case in batch]
                try:
                    found = measure(
                        family, batches[place], where, rates, settings, later=later, measured=measured, ahead=ahead
                    )
                except recordable_failures() as failure:
                    reason = f"failed: {reason_of(failure)}"
                    console.print(f"{family.title(batches[place])}: {reason}")
                    found = rows_without_times(family, batches[place], where, settings, reason)
                merge_rows(path, family.kind, found, is_measured=family.is_measured)
                rows += found
            if any(map(is_timed, rows)):
                for table in family.tables(rows, [*recorded, *measured]):
                    console.print(table)
            for line in reasons(rows):
                console.print(f"  {line}")
            measured += rows
    for table in family.summary(measured):
        console.print(table)
    if verdicts := [*family.judge(measured), *verdicts]:
        console.print(verdict_table(verdicts))
    console.print(f"{family.name}: {path}, {time.monotonic() - began:.0f} s")


def smoke(family: Family, console: Console, output: Path | None) -> None:
    """Run the steps of `run` on a CPU at a tiny size by the XLA implementation.

    Times are those of the host and say nothing about a GPU; no floor stands beside them.

    Raises:
        ValueError: a case could not be computed, or a result is wrong.
    """
    if lacking := family.unavailable():
        console.print(lacking)
        return
    introduce_smoke(console, family.smoke_text)
    settings = family.settings(
        deadline=time.monotonic() + 600.0,
        rounds=3,
        least_rounds=1,
        batch_ms=1.0,
        baselines=family.smoke_baselines,
        implementation="xla",
        device="cpu",
        say=lambda line: None,
    )
    rows: list[Any] = []
    for batch in family.batches(family.smoke_cases):
        rows += measure(family, batch, environment("cpu"), {}, settings)
    missing = [row for row in rows if not is_complete(row)]
    if missing:
        raise ValueError(f"smoke run of {family.name}: {'; '.join(reasons(missing))}")
    rows = [dataclasses.replace(row, note="CPU smoke, host time") for row in rows]
    for _, group in itertools.groupby(rows, lambda row: row.case):
        for table in family.tables(list(group), []):
            console.print(table)
    keep_smoke(console, output, family.name, family.kind, rows)


def measure(
    family: Family,
    cases: Sequence[Any],
    where: Environment,
    rates: Mapping[str, float],
    settings: Settings,
    *,
    later: Sequence[Any] = (),
    measured: Sequence[Any] = (),
    ahead: Any = None,
) -> list[Any]:
    """Prepare, check and time cases that share inputs; passes that did not run are rows with the reason.

    Args:
        family: of the cases.
        cases: what is measured together.
        where: what the rows say about the machine.
        rates: of the GPU, for the floors; empty where there are none.
        settings: of the run.
        later: cases that come after these.
        measured: rows of the cases before these.
        ahead: what `Family.compiled_ahead` yielded.
    """
    title = family.title(cases)
    context = Context(settings, time.monotonic(), later, measured, ahead)
    if settings.is_spent and not family.starts_late:
        settings.say(f"{title}: {SPENT}")
        return rows_without_times(family, cases, where, settings, SPENT)
    context.inputs = family.make_inputs(cases, context)
    settings.say(f"{title}: inputs in {time.monotonic() - context.began:.1f} s")
    entries: list[Entry] = []
    for case, implementation in [*family.own(cases, settings), *family.others(cases, context)]:
        entries += _prepared(family, context, case, implementation)
    context.inputs = None
    release_memory()
    ready = time.monotonic()
    beside = family.beside(settings)
    rounds = _time(entries, settings, family.clock_deadline(context, ready, cases), beside)
    if beside is not None:
        rates = {**rates, **family.rates_beside(beside)}
    rows = family.compared([_row(family, entry, where, rates) for entry in entries])
    settings.say(f"  timed in {time.monotonic() - ready:.1f} s, {rounds} rounds")
    for finish in {entry.implementation.finish for entry in entries if entry.program is not None}:
        finish()
    family.finish()
    del entries, beside
    release_memory()
    return rows


def rows_without_times(
    family: Family, cases: Sequence[Any], where: Environment, settings: Settings, note: str
) -> list[Any]:
    """Return the rows of this library for cases that are not measured, with the reason."""
    return family.compared(
        [
            _row(family, Entry(case, implementation, pass_name, note=note), where, {})
            for case, implementation in family.own(cases, settings)
            for pass_name in implementation.passes or case.passes
        ]
    )


def _prepared(family: Family, context: Context, case: Any, implementation: Implementation) -> list[Entry]:
    """Make and check every pass of an implementation; a pass that cannot run keeps the reason."""
    began, failures = time.monotonic(), recordable_failures()
    entries = [Entry(case, implementation, pass_name) for pass_name in implementation.passes or case.passes]
    reason, make = family.unsupported(context, case, implementation), None
    for entry in entries:
        entry.note = reason or family.refusal(context, entry)
        if entry.note:
            continue
        try:
            make = make or implementation.begin(context, case)
            entry.program = make(entry.pass_name)
            entry.note = entry.program.note
        except failures as failure:
            entry.note = f"failed: {reason_of(failure)}"
            reason = "" if make else entry.note
            release_memory()
    ready = ", ".join(entry.pass_name for entry in entries if entry.program is not None) or "not run"
    if len(entries) > 1 or ready == "not run":
        context.settings.say(f"  {case.name}, {implementation.name}: {ready} ({time.monotonic() - began:.1f} s)")
    return entries


def _time(entries: Sequence[Entry], settings: Settings, deadline: float, beside: Subject | None) -> int:
    """Time all programs, interleaved, and return the number of rounds."""
    failures = recordable_failures()
    subjects = [] if beside is None else [beside]
    calibrated = [*subjects]
    for entry in entries:
        if entry.program is not None:
            program, clock = entry.program, settings.clock(entry.implementation.framework)
            entry.subject = Subject(entry, program.run, clock, program.held_bytes, program.calls, front=program.front)
            subjects.append(entry.subject)
            calibrated += [] if program.is_long else [entry.subject]
    for subject in calibrated:
        try:
            calibrate(subject, settings.batch_ms)
        except failures as failure:
            subject.failure = reason_of(failure)
    take_rounds(subjects, rounds=settings.rounds, deadline=deadline, least_rounds=settings.least_rounds)
    return max((len(subject.samples) for subject in subjects), default=0)


def _row(family: Family, entry: Entry, where: Environment, rates: Mapping[str, float]) -> Any:
    """Return what is known of one pass."""
    kind = family.pass_kind or family.kind
    names = {"implementation": entry.implementation.name, "pass_name": entry.pass_name}
    known = {field.name for field in dataclasses.fields(kind)}
    columns = {name: text for name, text in names.items() if name in known}
    columns |= {"note": entry.note, **entry.case.columns()}
    found = entry.program.columns if entry.program else {}
    row = kind(**columns | {**family.columns(entry, rates), **found}, **asdict(where))
    subject = entry.subject
    if subject is None:
        return row
    if subject.failure or not subject.samples:
        return dataclasses.replace(row, note=f"failed while timed: {subject.failure or 'no sample was taken'}")
    row = with_times(row, subject)
    return dataclasses.replace(row, **family.timed_columns(entry, row))


def with_times(row: Any, subject: Subject) -> Any:
    """Return the row with median, spread and ratio to its floor."""
    times = summarise(subject.samples)
    unit, scale = ("us", 1e3) if hasattr(row, "median_us") else ("ms", 1.0)
    found = {f"{name}_{unit}": scale * getattr(times, name) for name in ("median", "p20", "p80")}
    if hasattr(row, "ratio_to_floor") and getattr(row, f"floor_{unit}") is not None:
        found["ratio_to_floor"] = found[f"median_{unit}"] / getattr(row, f"floor_{unit}")
    return dataclasses.replace(row, **found)
