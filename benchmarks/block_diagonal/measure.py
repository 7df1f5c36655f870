"""Runs the cases: prepares every implementation, checks it, times all of a case interleaved, makes the rows."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from benchmarks.block_diagonal.cases import PASSES, Case, PassName
from benchmarks.block_diagonal.exact import Exact, exact_attention
from benchmarks.block_diagonal.implementations import Implementation, PassMakers
from benchmarks.block_diagonal.workload import Workload, make_workload
from benchmarks.harness.clock import Subject, interleave, summarise
from benchmarks.harness.device import Prepared, poison, relative_error, release_memory
from benchmarks.harness.failures import GATE, WrongResult
from benchmarks.harness.pipeline import select_names
from benchmarks.harness.records import Environment, Timing, recordable_failures
from benchmarks.harness.roofs import COPY_BYTES, copy_subject
from blockdiag.cli.machine import reason_of

OP = "block_diagonal"
_COPY_KEY = ("copy", "copy")
# What a case after this one needs at the least, in seconds, for its own part to be measured at all.
_CASE_RESERVE = 14.0


@dataclass(frozen=True)
class Settings:
    """How much to measure.

    Attributes:
        rounds: samples per subject.
        batch_ms: device time of one sample, about.
        deadline: `time.monotonic` seconds after which only what is under way is finished.
        seed: of the random inputs.
        say: called with a line of progress.
    """

    deadline: float
    rounds: int = 25
    batch_ms: float = 5.0
    seed: int = 0
    say: Callable[[str], None] = print


@dataclass
class _Entry:
    """One pass of one implementation on its way to a row."""

    implementation: Implementation
    pass_name: PassName
    prepared: Prepared | None = None
    failure: str = ""


def expected_results(exact: Exact, pass_name: PassName) -> tuple[torch.Tensor, ...]:
    """The part of the oracle that a pass returns."""
    return {"fwd": exact[:1], "bwd": exact[1:], "fwd+bwd": tuple(exact)}[pass_name]


def check(prepared: Prepared, exact: Exact, pass_name: PassName) -> None:
    """Run once and compare with the oracle.

    Raises:
        WrongResult: a result is further from the oracle than rounding explains.
    """
    results = prepared.tensors(prepared.run())
    errors = [
        relative_error(result, wanted)
        for result, wanted in zip(results, expected_results(exact, pass_name), strict=True)
    ]
    if max(errors) > GATE:
        raise WrongResult(f"relative errors {', '.join(f'{error:.2e}' for error in errors)} exceed {GATE}")


def prepare_case(
    workload: Workload, exact: Exact, implementations: Sequence[Implementation], settings: Settings, cases_after: int
) -> list[_Entry]:
    """Make and check every pass of every implementation; what cannot run keeps its reason."""
    failures = recordable_failures()
    entries: list[_Entry] = []
    for implementation in implementations:
        began = time.monotonic()
        mine = [_Entry(implementation, pass_name) for pass_name in PASSES]
        entries += mine
        refusal = _refusal(workload.case, implementation, settings, cases_after)
        makers: PassMakers = {}
        if not refusal:
            try:
                makers = implementation.passes(workload)
            except failures as failure:
                refusal = f"failed: {reason_of(failure)}"
        for entry in mine:
            if refusal or entry.pass_name not in makers:
                entry.failure = refusal or "not run: this pass is not offered"
                continue
            try:
                poison((workload.query, workload.key, workload.value))
                prepared = makers[entry.pass_name]()
                check(prepared, exact, entry.pass_name)
                entry.prepared = prepared.chain() if prepared.chain else prepared
            except failures as failure:
                entry.failure = f"failed: {reason_of(failure)}"
        ready = [entry.pass_name for entry in mine if entry.prepared is not None]
        settings.say(f"  {implementation.name}: {', '.join(ready) or 'not run'} ({time.monotonic() - began:.1f} s)")
    return entries


def _refusal(case: Case, implementation: Implementation, settings: Settings, cases_after: int) -> str:
    """Why an implementation is not even tried on a case, or an empty string."""
    reason = implementation.unsupported(case)
    if reason is not None:
        return f"not run: {reason}"
    reserve = 0.0 if implementation.is_required else implementation.preparation_seconds + cases_after * _CASE_RESERVE
    if time.monotonic() + reserve > settings.deadline:
        return "not run: the time budget was spent; raise --budget-seconds"
    return ""


def time_entries(
    entries: Sequence[_Entry], workload: Workload, settings: Settings, case_deadline: float
) -> list[Subject]:
    """Time all checked passes, and a copy, interleaved."""
    subjects = [Subject(_COPY_KEY, copy_subject(), "torch")]
    subjects += [
        Subject(
            (entry.implementation.name, entry.pass_name),
            entry.prepared.run,
            entry.implementation.framework,
            workload.output_bytes(entry.pass_name),
            entry.prepared.calls,
        )
        for entry in entries
        if entry.prepared is not None
    ]
    interleave(subjects, rounds=settings.rounds, batch_ms=settings.batch_ms, deadline=case_deadline, least_rounds=7)
    return subjects


def rows_of(
    case: Case,
    entries: Sequence[_Entry],
    subjects: Sequence[Subject],
    environment: Environment,
    matmul_tflops: float | None,
) -> list[Timing]:
    """One row per pass and implementation, those that did not run included."""
    by_key = {subject.key: subject for subject in subjects}
    copy_samples = by_key[_COPY_KEY].samples
    copy_rate = COPY_BYTES / summarise(copy_samples).median / 1e6 if copy_samples else None
    rows = []
    for entry in entries:
        floor_bytes = case.floor_bytes(entry.pass_name)
        floor_ms = None if copy_rate is None else floor_bytes / copy_rate / 1e6
        row = Timing(
            op=OP,
            pass_name=entry.pass_name,
            case=case.name,
            implementation=entry.implementation.name,
            floor_ms=floor_ms,
            copy_gb_per_s=copy_rate,
            matmul_tflops=matmul_tflops,
            note=entry.failure,
            **asdict(environment),
        )
        subject = by_key.get((entry.implementation.name, entry.pass_name))
        if entry.prepared is not None and subject is not None:
            row = with_times(row, subject, entry.prepared, floor_bytes)
        rows.append(row)
    return rows


def with_times(row: Timing, subject: Subject, prepared: Prepared, floor_bytes: int) -> Timing:
    """The row with what the clock said."""
    if subject.failure or not subject.samples:
        return replace(row, note=f"failed while timed: {subject.failure or 'no sample was taken'}")
    times = summarise(subject.samples)
    return replace(
        row,
        median_ms=times.median,
        p20_ms=times.p20,
        p80_ms=times.p80,
        ratio_to_floor=None if row.floor_ms is None else times.median / row.floor_ms,
        gb_per_s=floor_bytes / times.median / 1e6,
        peak_bytes=prepared.peak_bytes,
        note=prepared.note,
    )


def measure_case(
    case: Case,
    implementations: Sequence[Implementation],
    environment: Environment,
    settings: Settings,
    *,
    cases_after: int = 0,
    matmul_tflops: float | None = None,
) -> list[Timing]:
    """Measure one case on the GPU and return its rows."""
    settings.say(f"{case.name}: {case.tokens:,} tokens")
    workload = make_workload(case, seed=settings.seed, device="cuda")
    exact = exact_attention(case, workload.query, workload.key, workload.value, workload.cotangent, workload.tables)
    entries = prepare_case(workload, exact, implementations, settings, cases_after)
    del exact
    release_memory()
    now = time.monotonic()
    case_deadline = now + max(0.0, settings.deadline - now) / (cases_after + 1)
    subjects = time_entries(entries, workload, settings, case_deadline)
    rows = rows_of(case, entries, subjects, environment, matmul_tflops)
    for finish in {entry.implementation.finish for entry in entries if entry.prepared is not None}:
        finish()
    settings.say(f"  timed in {time.monotonic() - now:.1f} s, {len(subjects[0].samples)} rounds")
    return rows


def find_implementations(names: str | None) -> tuple[list[Implementation], list[Implementation]]:
    """This library's implementations, and the baselines of a comma-separated list (None: all, "none": none).

    Raises:
        ValueError: for a name that is no baseline.
    """
    from benchmarks.block_diagonal.jax_implementations import JAX_BASELINES, OURS
    from benchmarks.block_diagonal.native import NATIVE
    from benchmarks.block_diagonal.torch_baselines import FLEX_BASELINES, TORCH_BASELINES

    known = {baseline.name: baseline for baseline in (*TORCH_BASELINES, *JAX_BASELINES, *FLEX_BASELINES)}
    ours: list[Any] = [*OURS, NATIVE]
    return ours, [known[name] for name in select_names(names, known)]
