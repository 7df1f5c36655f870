"""Measures MoBA on the GPU: prepares the passes of a case and its dense baselines, checks, times interleaved."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import jax
import torch

from benchmarks.harness.clock import Framework, Subject, calibrate, summarise, take_rounds
from benchmarks.harness.device import Prepared, release_memory, to_jax
from benchmarks.harness.programs import Program
from benchmarks.harness.records import Environment, MoBATiming, recordable_failures
from benchmarks.harness.roofs import Roofs
from benchmarks.moba.cases import MOBA_PASSES, MoBACase, MoBAPass
from benchmarks.moba.check import check_sample, errors_at
from benchmarks.moba.dense import DENSE_BACKENDS, dense_passes
from benchmarks.moba.programs import Passes
from benchmarks.moba.recorded import shape_of
from benchmarks.moba.targets import DENSE, OURS
from blockdiag.cli.machine import reason_of

_DENSE_PASSES: tuple[MoBAPass, ...] = ("fwd", "bwd", "fwd+bwd")
_ERROR_TOKENS = 2048
# Programs shorter than this are timed as several calls in one program.
_SHORT_MS = 2.0
_CHAINED_CALLS = 10
# Runs longer than this are timed one at a time, without a calibration that would run them six times more.
_LONG_MS = 40.0
# What a case after this one needs at the least, in seconds, for its own part to be measured at all.
_CASE_RESERVE = 8.0
# Other heads and blocks are compared with one dense baseline beyond this length.
_OTHER_DENSE_TOKENS = 32768
# How many runs of a pass preparing and timing it take, besides the rounds.
_RUNS_BESIDE = 4


@dataclass(frozen=True)
class MoBASettings:
    """How much to measure.

    Attributes:
        deadline: `time.monotonic` seconds after which no baseline is begun and rounds are few.
        rounds: samples per pass.
        batch_ms: device time of one sample, about.
        seed: of the random inputs.
        baselines: of `DENSE_BACKENDS`.
        dense_tokens: sequences longer than this are not given to dense attention.
        implementation, device: of this library, and where everything runs; others than these are for tests.
        known_errors: filled by the cases, as errors do not depend on their length.
        say: called with a line of progress.
    """

    deadline: float
    rounds: int = 25
    batch_ms: float = 20.0
    seed: int = 0
    baselines: tuple[str, ...] = tuple(DENSE_BACKENDS)
    dense_tokens: int = 65536
    implementation: str = OURS
    device: str = "cuda"
    known_errors: dict[MoBACase, dict[str, float]] = field(default_factory=dict)
    say: Callable[[str], None] = print


@dataclass
class _Entry:
    """One pass of one implementation on its way to a row."""

    implementation: str
    pass_name: MoBAPass
    framework: Framework
    run: Callable[[], Any] | None = None
    calls: int = 1
    extra_bytes: int | None = None
    note: str = ""
    single_ms: float = 0.0


def measure_moba_case(
    case: MoBACase,
    environment: Environment,
    roofs: Roofs,
    settings: MoBASettings,
    *,
    cases_after: int = 0,
    dense_timed: Sequence[str] = (),
) -> list[MoBATiming]:
    """Measure one case on the GPU and return its rows, those that did not run included.

    Args:
        cases_after: how many cases come after this one; their share of the time is left to them.
        dense_timed: baselines whose times over the same arrays another case has; they get no rows here.
    """
    settings.say(f"{case.name}: {case.batch} x {case.tokens:,} tokens")
    began = time.monotonic()
    tensors = _tensors(case, settings)
    entries = _prepare_ours(case, tensors, settings)
    errors = _errors(case, settings)
    settings.say(f"  {settings.implementation}: {_ready(entries)} ({time.monotonic() - began:.1f} s)")
    for name in settings.baselines:
        if name not in dense_timed:
            began = time.monotonic()
            mine = _prepare_dense(case, name, tensors, settings, cases_after)
            settings.say(f"  {name}: {_ready(mine)} ({time.monotonic() - began:.1f} s)")
            entries += mine
    release_memory()
    began = time.monotonic()
    share = max(0.0, settings.deadline - began) / (cases_after + 1)
    subjects = _time(entries, case, settings, began + share)
    rows = [_row(case, entry, subjects.get(id(entry)), errors, environment, roofs) for entry in entries]
    settings.say(f"  timed in {time.monotonic() - began:.1f} s")
    del entries, subjects, tensors
    release_memory()
    return rows


def rows_without_times(case: MoBACase, environment: Environment, implementation: str, note: str) -> list[MoBATiming]:
    """Rows of a case that could not be measured at all, with the reason."""
    return [
        MoBATiming(
            op="moba",
            pass_name=pass_name,
            case=case.name,
            implementation=implementation,
            note=note,
            **shape_of(case),
            **asdict(environment),
        )
        for pass_name in MOBA_PASSES
    ]


def _ready(entries: Sequence[_Entry]) -> str:
    return ", ".join(entry.pass_name for entry in entries if entry.run is not None) or "not run"


def _tensors(case: MoBACase, settings: MoBASettings) -> tuple[torch.Tensor, ...]:
    """Standard normal query, key, value and cotangent, [B, T, heads, H]."""
    generator = torch.Generator(device=settings.device).manual_seed(settings.seed)
    heads = (case.query_heads, case.key_heads, case.key_heads, case.query_heads)
    shapes = [(case.batch, case.tokens, count, case.head_dim) for count in heads]
    options: Any = {"generator": generator, "device": settings.device, "dtype": torch.bfloat16}
    return tuple(torch.randn(one, **options) for one in shapes)


def _prepare_ours(case: MoBACase, tensors: tuple[torch.Tensor, ...], settings: MoBASettings) -> list[_Entry]:
    """Check this library's results, then make its passes; none of them without the check."""
    failures = recordable_failures()
    framework: Framework = "jax" if settings.device == "cuda" else "host"
    entries = [_Entry(settings.implementation, pass_name, framework) for pass_name in MOBA_PASSES]
    if settings.device == "cuda":
        torch.cuda.synchronize()
    operands: Any = tuple(to_jax(tensor) for tensor in tensors)
    passes = Passes(case, settings.implementation, operands)
    try:
        both = passes.make("fwd+bwd")
        _check(passes, both.run(), settings.seed)
    except failures as failure:
        for entry in entries:
            entry.note = f"failed: {reason_of(failure)}"
        return entries
    for entry in entries:
        try:
            program = both if entry.pass_name == "fwd+bwd" else passes.make(entry.pass_name)
            entry.single_ms = _once_jax(program.run)
            program = _perhaps_chained(program, entry.single_ms)
        except failures as failure:
            entry.note = f"failed: {reason_of(failure)}"
            continue
        entry.run, entry.calls = program.run, program.calls
        entry.extra_bytes, entry.note = program.extra_bytes, program.note
    return entries


def _check(passes: Passes, results: tuple[Any, ...], seed: int) -> None:
    """The routing and the results of a case, in float64."""
    from blockdiag.ops.moba.api import moba_routing

    case = passes.case
    query, key, _, _ = passes.operands
    indices = moba_routing(
        query, key, block_size=case.block_size, top_k=case.top_k, implementation=passes.implementation
    ).indices
    check_sample(case, indices, passes.operands, results, seed=seed)


def _once_jax(run: Callable[[], Any]) -> float:
    """Milliseconds of the second of two runs, waiting included."""
    jax.block_until_ready(run())
    began = time.perf_counter()
    jax.block_until_ready(run())
    return (time.perf_counter() - began) * 1e3


def _perhaps_chained(program: Program, milliseconds: float) -> Program:
    """Several calls in one program where one is short; the single one, with the reason, where that cannot be had."""
    if milliseconds > _SHORT_MS or program.chain is None:
        return program
    try:
        return program.chain(_CHAINED_CALLS)
    except recordable_failures() as failure:
        return replace(program, note=f"{program.note}; timed call by call, {reason_of(failure)}")


def _errors(case: MoBACase, settings: MoBASettings) -> dict[str, float] | str:
    """Distances from float32 attention, or why there are none; computed once for cases that differ in length only."""
    tokens = max(_ERROR_TOKENS, 4 * case.block_size)
    key = replace(case.shrunk(tokens), name="")
    if key not in settings.known_errors:
        try:
            settings.known_errors[key] = errors_at(case, settings.implementation, tokens, seed=settings.seed)
        except recordable_failures() as failure:
            return f"errors against float32: {reason_of(failure)}"
    return settings.known_errors[key]


def _prepare_dense(
    case: MoBACase, name: str, tensors: tuple[torch.Tensor, ...], settings: MoBASettings, cases_after: int
) -> list[_Entry]:
    """Make the passes of a dense baseline, while time and memory last."""
    failures = recordable_failures()
    framework: Framework = "torch" if settings.device == "cuda" else "host"
    entries = [_Entry(name, pass_name, framework) for pass_name in _DENSE_PASSES]
    refusal = ""
    if case.tokens > settings.dense_tokens:
        refusal = f"not run: dense attention is timed up to {settings.dense_tokens:,} tokens"
    elif name != DENSE and case.tokens > _OTHER_DENSE_TOKENS and not case.is_usual:
        refusal = f"not run: beyond {_OTHER_DENSE_TOKENS:,} tokens of other heads or blocks only {DENSE} is timed"
    if refusal:
        return [replace(entry, note=refusal) for entry in entries]
    makers = dense_passes(case, tensors, DENSE_BACKENDS[name])
    for entry in entries:
        # The longest pass so far tells what this one will cost.
        known = max(other.single_ms for other in entries) / 1e3
        needed = 4 * known * (settings.rounds * 2 + _RUNS_BESIDE) + cases_after * _CASE_RESERVE
        if time.monotonic() + needed > settings.deadline:
            entry.note = "not run: the time budget was spent; raise --budget-seconds"
            continue
        try:
            prepared: Prepared = makers[entry.pass_name]()
            entry.single_ms = _once_torch(prepared.run) if settings.device == "cuda" else 0.0
        except failures as failure:
            entry.note = f"failed: {reason_of(failure)}"
            release_memory()
            continue
        entry.run, entry.extra_bytes = prepared.run, prepared.peak_bytes
    return entries


def _once_torch(run: Callable[[], Any]) -> float:
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)


def _time(entries: Sequence[_Entry], case: MoBACase, settings: MoBASettings, deadline: float) -> dict[int, Subject]:
    """Time all that was prepared, interleaved; subjects by the identity of their entry."""
    subjects: dict[int, Subject] = {}
    for entry in entries:
        if entry.run is None:
            continue
        output_bytes = entry.calls * case.operand_bytes(entry.pass_name)[1] + (entry.extra_bytes or 0)
        subject = Subject(entry, entry.run, entry.framework, output_bytes, entry.calls)
        subjects[id(entry)] = subject
        if entry.framework == "torch" and entry.single_ms > _LONG_MS:
            continue
        try:
            calibrate(subject, settings.batch_ms)
        except recordable_failures() as failure:
            subject.failure = reason_of(failure)
    take_rounds(
        list(subjects.values()),
        rounds=settings.rounds,
        deadline=deadline,
        least_rounds=min(3, settings.rounds),
    )
    return subjects


def _row(
    case: MoBACase,
    entry: _Entry,
    subject: Subject | None,
    errors: dict[str, float] | str,
    environment: Environment,
    roofs: Roofs,
) -> MoBATiming:
    """What is known of one pass."""
    rates = {"matmul_tflops": roofs.matmul_tflops, "copy_gb_per_s": roofs.copy_gb_per_s}
    row = MoBATiming(
        op="moba",
        pass_name=entry.pass_name,
        case=case.name,
        implementation=entry.implementation,
        **shape_of(case),
        useful_tflop=case.useful_flops(entry.pass_name) / 1e12,
        useful_gb=case.useful_bytes(entry.pass_name) / 1e9,
        floor_ms=case.floor_ms(entry.pass_name, **rates),
        note=entry.note,
        **rates,
        **asdict(environment),
    )
    if entry.implementation not in DENSE_BACKENDS and entry.pass_name != "routing":
        if isinstance(errors, str):
            row = replace(row, note=f"{row.note}; {errors}")
        else:
            gradients = max(error for name, error in errors.items() if name != "output")
            by_pass = {"fwd": errors["output"], "bwd": gradients, "fwd+bwd": max(errors["output"], gradients)}
            row = replace(row, relative_error=by_pass[entry.pass_name])
    if subject is None:
        return row
    if subject.failure or not subject.samples:
        return replace(row, note=f"failed while timed: {subject.failure or 'no sample was taken'}")
    times = summarise(subject.samples)
    row = replace(row, median_ms=times.median, p20_ms=times.p20, p80_ms=times.p80)
    if entry.extra_bytes is not None:
        peak = entry.extra_bytes + sum(case.operand_bytes(entry.pass_name))
        row = replace(row, extra_bytes=entry.extra_bytes, peak_bytes=peak)
    return replace(row, ratio_to_floor=times.median / case.floor_ms(entry.pass_name, **rates))
