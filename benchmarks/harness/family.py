"""The description of a family of benchmarks, which `benchmarks.harness.pipeline` runs: cases, implementations, rows."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from rich.console import Console
from rich.table import Table

from benchmarks.harness.clock import Framework, Subject
from benchmarks.harness.kernels import compile_launches
from benchmarks.harness.records import Environment, is_attempted
from benchmarks.harness.report import Verdict

SPENT = "not run: the time budget was spent; raise --budget-seconds, or measure fewer cases at once"


@dataclass(frozen=True)
class Work:
    """Arithmetic and memory traffic that a computation cannot do without.

    Attributes:
        flops: multiplications and additions.
        bytes: operands read once and results written once.
    """

    flops: float
    bytes: float


class Case(Protocol):
    """One workload of a family."""

    @property
    def name(self) -> str:
        """Name in the CSV file."""
        ...

    @property
    def passes(self) -> tuple[str, ...]:
        """Passes of this library that are timed, each a row."""
        ...

    def columns(self) -> dict[str, Any]:
        """Return the columns that describe the workload."""
        ...

    def floor(self, pass_name: str) -> tuple[Work, ...]:
        """Return the least work of a pass, in stages that run one after the other."""
        ...


def names_of(names: str | None, known: Iterable[str], what: str = "some") -> list[str]:
    """Return the names of a comma-separated list, all of `known` for None.

    Raises:
        ValueError: a name is unknown, or there is none.
    """
    known = list(known)
    if names is None:
        return known
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if not wanted or any(name not in known for name in wanted):
        raise ValueError(f"`cases` must name {what} of {', '.join(known)}; got {names!r}")
    return wanted


def floor_ms(stages: Sequence[Work], *, matmul_tflops: float = float("inf"), copy_gb_per_s: float) -> float:
    """Return the least time at the given rates: of each stage the longer of arithmetic and traffic."""
    return sum(max(one.flops / matmul_tflops / 1e9, one.bytes / copy_gb_per_s / 1e6) for one in stages)


def counted_columns(entry: "Entry", rates: Mapping[str, float]) -> dict[str, Any]:
    """Return the useful work of a pass in TFLOP and GB, and its floor at the rates of the run."""
    stages = entry.case.floor(entry.pass_name)
    found = {
        "useful_tflop": sum(one.flops for one in stages) / 1e12,
        "useful_gb": sum(one.bytes for one in stages) / 1e9,
    }
    return found | ({**rates, "floor_ms": floor_ms(stages, **rates)} if rates else {})


@dataclass(frozen=True)
class Program:
    """One pass, compiled.

    Attributes:
        run: queues the work once and returns its results.
        calls: how often one `run` does the work.
        extra_bytes: device memory of one call beyond its inputs and outputs.
        note: what the CSV file says beside the numbers.
        chain: makes a program that does the work that many times in a row; may raise.
        tensors: turns the results into torch tensors for the check.
        held_bytes: memory that a queued run needs, which limits how many are queued.
        is_long: one run is a sample, and the clock does not calibrate.
        columns: what preparing the pass tells of its row, as "relative_error".
        keep: arrays that `run` needs and does not refer to.
        front: queues something long once and returns its arrays, behind which runs are queued that are shorter than
            the time to queue them; for JAX.
    """

    run: Callable[[], Any]
    calls: int = 1
    extra_bytes: int | None = None
    note: str = ""
    chain: "Callable[[int], Program] | None" = None
    tensors: Callable[[Any], tuple[Any, ...]] = tuple
    held_bytes: int = 0
    is_long: bool = False
    columns: Mapping[str, Any] = field(default_factory=dict)
    keep: Any = None
    front: Callable[[], Any] | None = None


@dataclass(frozen=True)
class Settings:
    """How much a run measures.

    Attributes:
        deadline: `time.monotonic` seconds after which no baseline begins and rounds are few.
        rounds: samples of each row.
        least_rounds: samples that are taken even after the deadline.
        batch_ms: approximate device time of one sample.
        seed: of the random inputs.
        baselines: names of the baselines that run.
        implementation: of this library.
        device: where everything runs; "cpu" is for tests and smoke runs.
        say: receives a line of progress.
    """

    deadline: float
    rounds: int = 25
    least_rounds: int = 5
    batch_ms: float = 10.0
    seed: int = 0
    baselines: tuple[str, ...] = ()
    implementation: str = "triton"
    device: str = "cuda"
    say: Callable[[str], None] = print

    @property
    def is_spent(self) -> bool:
        """True after the deadline."""
        return time.monotonic() > self.deadline

    def clock(self, framework: Framework) -> Framework:
        """Return the clock for work that a framework queues."""
        return framework if self.device == "cuda" else "host"


@dataclass
class Context:
    """State of the cases that are measured together.

    Attributes:
        settings: of the run, with what the family adds to `Settings`.
        began: `time.monotonic` seconds when they began.
        later: cases that come after them and need a share of the time.
        measured: rows of the cases before them.
        ahead: what `Family.compiled_ahead` yielded.
        inputs: what `Family.make_inputs` returned, until all programs are prepared.
        longest_ms: time of one call of the slowest pass so far, by implementation, where that was measured.
    """

    settings: Any
    began: float
    later: Sequence[Any] = ()
    measured: Sequence[Any] = ()
    ahead: Any = None
    inputs: Any = None
    longest_ms: dict[str, float] = field(default_factory=dict)


type Make = Callable[[str], Program]


@dataclass(frozen=True)
class Implementation:
    """One way to compute the cases of a family.

    Attributes:
        name: in the CSV file and, of a baseline, in `--baselines`.
        framework: whose clock times it.
        begin: prepares a case and returns the function that makes a checked `Program` of a pass. Both may raise; the
            rows then hold the reason.
        passes: its passes; None for those of the case.
        is_required: it is measured even when the time budget is spent.
        preparation_seconds: an upper limit for preparing all passes, for the time budget.
        unsupported: returns why a case is not computed, or None.
        finish: runs after the timing of a case whose passes were made.
    """

    name: str
    framework: Framework
    begin: Callable[[Context, Any], Make]
    passes: tuple[str, ...] | None = None
    is_required: bool = False
    preparation_seconds: float = 4.0
    unsupported: Callable[[Any], str | None] = lambda case: None
    finish: Callable[[], None] = lambda: None


@dataclass
class Entry:
    """One pass of one implementation on its way to a row.

    Attributes:
        program: the checked pass; None where it is not timed, and `note` says why.
        subject: of the clock.
    """

    case: Any
    implementation: Implementation
    pass_name: str
    program: Program | None = None
    note: str = ""
    subject: Subject | None = None


class Family:
    """A family of benchmarks: data, and the steps in which it differs from others.

    Attributes:
        name: of the command and of the CSV file.
        kind: of its rows.
        pass_kind: of the rows of single passes, where `compared` makes other rows of them; None for `kind`.
        settings: the type of its settings, with the family's defaults.
        baselines: names that `--baselines` takes, in the order in which a short budget is spent.
        smoke_cases, smoke_baselines, smoke_text: what runs on a CPU, and what that compares.
        starts_late: cases begin even when the time budget is spent, for the implementations that are required.
        compile_options: of `compile_launches`.
    """

    name: ClassVar[str]
    kind: ClassVar[type]
    pass_kind: ClassVar[type | None] = None
    settings: ClassVar[type[Settings]] = Settings
    baselines: ClassVar[tuple[str, ...]] = ()
    smoke_cases: ClassVar[Sequence[Any]]
    smoke_baselines: ClassVar[tuple[str, ...]] = ()
    smoke_text: ClassVar[str] = "the XLA implementation against float64"
    starts_late: ClassVar[bool] = False
    compile_options: ClassVar[Mapping[str, Any]] = {}

    def unavailable(self) -> str:
        """Return what this process lacks for the family, or an empty string."""
        return ""

    def select(self, names: str | None) -> list[Any]:
        """Return the cases of a comma-separated list; ValueError for an unknown name."""
        raise NotImplementedError

    def batches(self, cases: Sequence[Any]) -> list[list[Any]]:
        """Return the cases in groups that share inputs and are timed together."""
        return [[case] for case in cases]

    def section(self, case: Any) -> str:
        """Return what the tables of a case are printed with."""
        return case.name

    def title(self, cases: Sequence[Any]) -> str:
        """Return what a line of progress calls cases that are timed together."""
        return cases[0].name

    def recorded(self) -> list[Any]:
        """Return rows of implementations that this benchmark does not run."""
        return []

    def launches(self, case: Any) -> Sequence[Any]:
        """Return the kernel launches of a case, which are compiled before the run."""
        del case
        return ()

    @contextlib.contextmanager
    def compiled_ahead(self, console: Console, cases: Sequence[Any], settings: Settings) -> Iterator[Any]:
        """Compile the launches of all cases; the context lasts as long as the run."""
        del settings
        lines = compile_launches(cases, self.launches, **self.compile_options)
        for line in lines:
            console.print(f"compiled ahead: {line}")
        yield None

    def measure_rates(self) -> tuple[dict[str, float], str]:
        """Return the GPU's own rates, by column and as text."""
        raise NotImplementedError

    def measure_aside(self, console: Console, folder: Path, where: Environment, cases: Sequence[Any]) -> list[Verdict]:
        """Measure what is not a time of a case, into files of its own."""
        del console, folder, where, cases
        return []

    def make_inputs(self, cases: Sequence[Any], context: Context) -> Any:
        """Return the inputs of cases that are timed together, and exact results."""
        raise NotImplementedError

    def own(self, cases: Sequence[Any], settings: Settings) -> list[tuple[Any, Implementation]]:
        """Return the implementations of this library that compute each case."""
        raise NotImplementedError

    def others(self, cases: Sequence[Any], context: Context) -> list[tuple[Any, Implementation]]:
        """Return the baselines of each case."""
        raise NotImplementedError

    def unsupported(self, context: Context, case: Any, implementation: Implementation) -> str:
        """Return why an implementation does not try a case, or an empty string."""
        del context
        reason = implementation.unsupported(case)
        return f"not run: {reason}" if reason else ""

    def refusal(self, context: Context, entry: Entry) -> str:
        """Return why a pass is not tried, or an empty string."""
        del context, entry
        return ""

    def clock_deadline(self, context: Context, ready: float, cases: Sequence[Any]) -> float:
        """Return when the rounds of the cases end: after an equal share of the time left."""
        del cases
        return ready + max(0.0, context.settings.deadline - ready) / (len(context.later) + 1)

    def beside(self, settings: Settings) -> Subject | None:
        """Return a rate of the GPU that is sampled in the same rounds."""
        del settings

    def rates_beside(self, subject: Subject) -> dict[str, float]:
        """Return the rate that the samples of `beside` give."""
        del subject
        return {}

    def columns(self, entry: Entry, rates: Mapping[str, float]) -> dict[str, Any]:
        """Return what a row says whether it is timed or not: its floor, and the rates behind it."""
        raise NotImplementedError

    def timed_columns(self, entry: Entry, row: Any) -> dict[str, Any]:
        """Return what a timed row says beside its times."""
        del entry, row
        return {}

    def compared(self, rows: Sequence[Any]) -> list[Any]:
        """Return the rows of cases that were timed together, with the columns that compare them."""
        return list(rows)

    def is_measured(self, row: Any) -> bool:
        """Return whether a row may replace a measured one in the file."""
        return is_attempted(row)

    def finish(self) -> None:
        """Forget what the programs of a case leave behind."""

    def tables(self, rows: Sequence[Any], others: Sequence[Any]) -> list[Table]:
        """Return tables of the rows of one section; `others` are recorded rows and those of earlier sections."""
        raise NotImplementedError

    def summary(self, rows: Sequence[Any]) -> list[Table]:
        """Return tables of all rows."""
        del rows
        return []

    def judge(self, rows: Sequence[Any]) -> list[Verdict]:
        """Compare all rows with their limits."""
        raise NotImplementedError
