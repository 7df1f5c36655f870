"""Measures fused functions on the GPU: prepares the passes of a case and its baselines, checks, times interleaved."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import jax
import torch

from benchmarks.fuse.ahead import Ahead, kept_in
from benchmarks.fuse.cases import FUSE_PASSES, FuseCase, FusePass
from benchmarks.fuse.check import BASELINE_GATE, check_results, exact_results, expected_names, make_arrays
from benchmarks.fuse.programs import (
    CUDNN,
    XLA,
    Attend,
    FusePasses,
    cudnn_function,
    cudnn_unsupported,
    function_of,
    fused_function,
)
from benchmarks.fuse.targets import OURS
from benchmarks.fuse.torch_baselines import COMPILE, FLEX, TORCH_CALLS, Compile, Tensors, TorchCall, compiled
from benchmarks.harness.clock import Framework, Subject, calibrate, sample_host, sample_torch, summarise, take_rounds
from benchmarks.harness.device import captured, poison, release_memory, to_jax, to_torch, torch_peak_bytes
from benchmarks.harness.failures import GATE
from benchmarks.harness.programs import Program
from benchmarks.harness.records import Environment, FuseTiming, recordable_failures
from benchmarks.harness.roofs import Roofs
from blockdiag.cli.machine import reason_of

# In the order in which a short budget should be spent.
BASELINES = (FLEX, CUDNN, XLA, COMPILE)
SPENT = "not run: the time budget was spent; raise --budget-seconds, or measure fewer cases at once"

# Passes shorter than this are timed as several calls in one program, or in one CUDA graph.
_SHORT_MS = 2.0
_CHAINED_CALLS = 10
# Arrays like the scores that are in memory at once where they are not fused, and what may be: JAX and torch keep the
# memory that they had, so both have to fit.
_SCORE_ARRAYS: Mapping[FusePass, int] = {"fwd": 3, "fwd+bwd": 6}
_MOST_SCORE_BYTES = 60e9
# Seconds of a case that are left for the clock, whatever baselines would like to compile.
_TIMING_SECONDS = 3.0
# What preparing one pass of a baseline takes at first sight, in seconds; then what it took last.
_PREPARATION_SECONDS = {FLEX: 4.0, CUDNN: 3.0, XLA: 3.0, COMPILE: 6.0}


@dataclass(frozen=True)
class FuseSettings:
    """How much to measure.

    Attributes:
        deadline: `time.monotonic` seconds after which nothing is begun.
        rounds: samples of each row, at the most.
        batch_ms: device time of one sample, about.
        seed: of the random arguments.
        baselines: of `BASELINES`.
        implementation: of this library.
        device: where everything runs; another than "cuda" is for tests.
        compile_function: torch's compiler.
        preparation: seconds that one pass of each baseline took when it was last prepared.
        say: called with a line of progress.
    """

    deadline: float
    rounds: int = 25
    batch_ms: float = 10.0
    seed: int = 0
    baselines: tuple[str, ...] = BASELINES
    implementation: str = OURS
    device: str = "cuda"
    compile_function: Compile = compiled
    preparation: dict[str, float] = field(default_factory=_PREPARATION_SECONDS.copy)
    say: Callable[[str], None] = print

    def framework(self, name: str) -> Framework:
        """Whose clock times an implementation."""
        if self.device != "cuda":
            return "host"
        return "torch" if name in TORCH_CALLS else "jax"


@dataclass
class _Entry:
    """One pass of one implementation on its way to a row.

    Attributes:
        held_bytes: memory that a queued run needs, for the clock.
        columns: those of the row that preparing it tells.
    """

    implementation: str
    pass_name: FusePass
    framework: Framework
    run: Callable[[], Any] | None = None
    calls: int = 1
    held_bytes: int = 0
    note: str = ""
    columns: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Context:
    """What the entries of a case are prepared from.

    Attributes:
        case, settings, ahead: as `measure_fuse_case` has them.
        arrays, views: the arguments and the cotangent as tensors, and the same memory as JAX arrays.
        exact: results in float64.
        deadline: of the case's share.
    """

    case: FuseCase
    settings: FuseSettings
    ahead: Ahead
    arrays: Tensors
    views: Mapping[str, jax.Array]
    exact: Tensors
    deadline: float


def measure_fuse_case(
    case: FuseCase,
    environment: Environment,
    roofs: Roofs,
    settings: FuseSettings,
    *,
    later: Sequence[FuseCase] = (),
    ahead: Ahead | None = None,
) -> list[FuseTiming]:
    """Measure one case on the GPU and return its rows, those that did not run included.

    Args:
        later: cases that come after this one; their shares of the time are left to them.
        ahead: kernels that were compiled before, and how long that took.
    """
    began = time.monotonic()
    if began > settings.deadline:
        settings.say(f"{case.name}: {SPENT}")
        return rows_without_times(case, environment, settings.implementation, SPENT)
    share = case.share / (case.share + sum(other.share for other in later))
    deadline = began + share * max(0.0, settings.deadline - began)
    arrays = make_arrays(case, seed=settings.seed, device=settings.device)
    exact = exact_results(case, arrays)
    _synchronise(settings)
    views = {name: to_jax(array) for name, array in arrays.items()}
    release_memory()
    context = _Context(case, settings, ahead or Ahead(), arrays, views, exact, deadline)
    settings.say(f"{case.name}: arguments and float64 results in {time.monotonic() - began:.1f} s")
    entries = _prepare_ours(context)
    for name in settings.baselines:
        entries += _prepare_torch(context, name) if name in TORCH_CALLS else _prepare_jax_baseline(context, name)
    del exact, context
    release_memory()
    timing = time.monotonic()
    subjects = _timed(entries, settings, deadline)
    rows = [_row(case, entry, subjects.get(id(entry)), environment, roofs) for entry in entries]
    rounds = max((len(subject.samples) for subject in subjects.values()), default=0)
    settings.say(f"  timed in {time.monotonic() - timing:.1f} s, {rounds} rounds")
    del entries, subjects, arrays, views
    # The compiler keeps eight programs of a function at the most.
    torch.compiler.reset()
    if settings.device == "cuda":
        release_memory()
    return rows


def rows_without_times(case: FuseCase, environment: Environment, implementation: str, note: str) -> list[FuseTiming]:
    """Rows of a case that could not be measured at all, with the reason."""
    columns: dict[str, Any] = {**columns_of(case), **asdict(environment)}
    return [
        FuseTiming(pass_name=pass_name, implementation=implementation, note=note, **columns)
        for pass_name in FUSE_PASSES
    ]


def columns_of(case: FuseCase) -> dict[str, Any]:
    """The columns that describe a workload."""
    return {
        "op": "fuse",
        "group": case.group,
        "case": case.name,
        "batch": case.batch,
        "rows": case.rows,
        "tokens": case.tokens,
        "query_heads": case.query_heads,
        "key_heads": case.key_heads,
        "head_dim": case.head_dim,
        "value_dim": case.value_dim,
    }


def _synchronise(settings: FuseSettings) -> None:
    if settings.device == "cuda":
        torch.cuda.synchronize()


def _entries(context: _Context, name: str) -> list[_Entry]:
    return [_Entry(name, pass_name, context.settings.framework(name)) for pass_name in FUSE_PASSES]


def _prepare_ours(context: _Context) -> list[_Entry]:
    """The passes of this library: loaded, compiled, checked."""
    began, settings = time.monotonic(), context.settings
    entries = _entries(context, settings.implementation)
    loads: dict[Any, float] = {}
    for entry in entries:
        try:
            # A function of its own for each pass, so that nothing that JAX knows of the one helps the other.
            passes = FusePasses(context.case, fused_function(context.case, settings.implementation), context.views)
            loaded = _load_kernels(context, entry.pass_name, loads)
            begin = time.perf_counter()
            program = passes.make(entry.pass_name)
            compiling = time.perf_counter() - begin
            poison([context.arrays["query"]])
            _use_program(context, entry, program, GATE)
            entry.columns |= _compile_columns(context, entry.pass_name, compiling, loaded)
        except recordable_failures() as failure:
            _refuse(entry, failure)
    _say(context, entries, began)
    return entries


def _load_kernels(context: _Context, pass_name: FusePass, loads: dict[Any, float]) -> float | None:
    """Seconds in which the kernels of a pass are read from the disk; `loads` has those of other passes."""
    specs = context.ahead.specs.get((context.case.name, pass_name))
    if specs is None:
        return None
    from triton import knobs

    from blockdiag.interop.targets import session_target
    from blockdiag.triton_kernels.launch.compile import compile_plan

    target = session_target()
    with knobs.cache.scope():
        knobs.cache.dir = kept_in(context.case, pass_name)
        for spec in specs:
            if spec not in loads:
                begin = time.perf_counter()
                compile_plan(spec.plan(target), target)
                loads[spec] = time.perf_counter() - begin
    return sum(loads[spec] for spec in specs)


def _compile_columns(
    context: _Context, pass_name: FusePass, compiling: float, loaded: float | None
) -> dict[str, float | None]:
    """What compiling took: kernels apart from the rest, which is the same with kernels on disk and without."""
    first = context.ahead.seconds.get((context.case.name, pass_name))
    return {
        "first_kernels_s": first,
        "first_compile_s": None if first is None else first + compiling,
        "cached_kernels_ms": None if loaded is None else 1e3 * loaded,
        "cached_compile_ms": None if loaded is None else 1e3 * (loaded + compiling),
    }


def _use_program(context: _Context, entry: _Entry, program: Program, gate: float) -> None:
    """Check a compiled pass, and make it long enough for the clock."""
    found = [to_torch(result) for result in program.run()]
    results = dict(zip(expected_names(context.case, entry.pass_name), found, strict=True))
    entry.columns["relative_error"] = check_results(context.case, results, context.exact, gate)
    entry.columns["extra_bytes"] = program.extra_bytes
    # The shortest: a run that has to ask the driver for memory takes milliseconds more.
    milliseconds = min(sample_host(program.run, 1) for _ in range(3))
    is_short = milliseconds < _SHORT_MS and context.settings.device == "cuda"
    if is_short and program.chain is not None:
        try:
            program = program.chain(_CHAINED_CALLS)
        except recordable_failures() as failure:
            program = replace(program, note=f"{program.note}; timed call by call, {reason_of(failure)}")
    entry.run, entry.calls, entry.note = program.run, program.calls, program.note
    # Gradients of every call of a program are there when it ends.
    entry.held_bytes = program.calls * context.case.operand_bytes(entry.pass_name)[1] + (program.extra_bytes or 0)


def _prepare_jax_baseline(context: _Context, name: str) -> list[_Entry]:
    """The passes of the function as XLA compiles it, or by cuDNN."""
    began, case = time.monotonic(), context.case
    entries = _entries(context, name)
    reason = cudnn_unsupported(case) if name == CUDNN else None
    for entry in entries:
        if reason is not None:
            entry.note = f"not run: {reason}"
        elif not _is_refused(context, entry):
            begin = time.monotonic()
            try:
                attend: Attend = cudnn_function(case) if name == CUDNN else function_of(case)
                program = FusePasses(case, attend, context.views).make(entry.pass_name)
                _use_program(context, entry, program, BASELINE_GATE)
            except recordable_failures() as failure:
                _refuse(entry, failure)
            context.settings.preparation[name] = time.monotonic() - begin
    _say(context, entries, began)
    return entries


def _prepare_torch(context: _Context, name: str) -> list[_Entry]:
    """The passes of a torch baseline."""
    began, settings = time.monotonic(), context.settings
    entries = _entries(context, name)
    call: TorchCall | None = None
    for entry in entries:
        if _is_refused(context, entry):
            continue
        begin = time.monotonic()
        try:
            call = call or TORCH_CALLS[name](context.case, context.arrays, settings.compile_function)
            _use_torch(context, entry, call)
        except recordable_failures() as failure:
            _refuse(entry, failure)
            release_memory()
        settings.preparation[name] = time.monotonic() - begin
    _say(context, entries, began)
    return entries


def _use_torch(context: _Context, entry: _Entry, call: TorchCall) -> None:
    """Check a pass, and capture it where it is so short that the host would be timed."""
    run = call.run_of(entry.pass_name)
    error = check_results(context.case, call.results(run()), context.exact, BASELINE_GATE)
    entry.columns |= {"relative_error": error, "extra_bytes": torch_peak_bytes(run)}
    entry.note, entry.run = call.note, run
    if context.settings.device != "cuda" or min(sample_torch(run, 1) for _ in range(2)) >= _SHORT_MS:
        return
    try:
        replay = captured([run] * _CHAINED_CALLS)
        # A graph does not keep what it reads: `run` does.
        entry.run, entry.calls = lambda kept=run: (replay(), kept)[0], _CHAINED_CALLS
        notes = (call.note, f"timed as a CUDA graph of {_CHAINED_CALLS} calls")
    except recordable_failures() as failure:
        notes = (call.note, f"timed call by call, not as a CUDA graph: {reason_of(failure)}")
    entry.note = "; ".join(filter(None, notes))


def _is_refused(context: _Context, entry: _Entry) -> bool:
    """Whether a baseline's pass is not even tried; its note then says why."""
    settings, name = context.settings, entry.implementation
    scores = 2 * context.case.score_elements * _SCORE_ARRAYS[entry.pass_name]
    if name in (XLA, COMPILE) and scores > _MOST_SCORE_BYTES:
        entry.note = (
            f"not run: about {_SCORE_ARRAYS[entry.pass_name]} arrays of scores, {scores / 1e9:.0f} GB, would be in "
            f"memory, and {_MOST_SCORE_BYTES / 1e9:.0f} GB may be"
        )
    else:
        # What is compared with in every case may take from the shares of later ones.
        end = settings.deadline if name == FLEX else context.deadline - _TIMING_SECONDS
        if time.monotonic() + settings.preparation[name] > end:
            entry.note = SPENT
    return bool(entry.note)


def _refuse(entry: _Entry, failure: BaseException) -> None:
    entry.run = None
    entry.note = f"failed: {reason_of(failure)}"


def _say(context: _Context, entries: Sequence[_Entry], began: float) -> None:
    ready = ", ".join(entry.pass_name for entry in entries if entry.run is not None) or "not run"
    context.settings.say(f"  {entries[0].implementation}: {ready} ({time.monotonic() - began:.1f} s)")


def _timed(entries: Sequence[_Entry], settings: FuseSettings, deadline: float) -> dict[int, Subject]:
    """Time all that was prepared, interleaved; subjects by the identity of their entry."""
    subjects: dict[int, Subject] = {}
    for entry in entries:
        if entry.run is None:
            continue
        subject = Subject(entry.implementation, entry.run, entry.framework, entry.held_bytes, entry.calls)
        subjects[id(entry)] = subject
        try:
            calibrate(subject, settings.batch_ms)
        except recordable_failures() as failure:
            subject.failure = reason_of(failure)
    least = min(5, settings.rounds)
    take_rounds(list(subjects.values()), rounds=settings.rounds, deadline=deadline, least_rounds=least)
    return subjects


def _row(case: FuseCase, entry: _Entry, subject: Subject | None, environment: Environment, roofs: Roofs) -> FuseTiming:
    """What is known of one pass."""
    rates = {"matmul_tflops": roofs.matmul_tflops, "copy_gb_per_s": roofs.copy_gb_per_s}
    row = FuseTiming(
        pass_name=entry.pass_name,
        implementation=entry.implementation,
        useful_tflop=case.useful_flops(entry.pass_name) / 1e12,
        useful_gb=case.useful_bytes(entry.pass_name) / 1e9,
        floor_ms=case.floor_ms(entry.pass_name, **rates),
        note=entry.note,
        **entry.columns,
        **columns_of(case),
        **rates,
        **asdict(environment),
    )
    if row.extra_bytes is not None:
        row = replace(row, peak_bytes=row.extra_bytes + sum(case.operand_bytes(entry.pass_name)))
    if subject is None:
        return row
    if subject.failure or not subject.samples:
        return replace(row, note=f"failed while timed: {subject.failure or 'no sample was taken'}")
    times = summarise(subject.samples)
    row = replace(row, median_ms=times.median, p20_ms=times.p20, p80_ms=times.p80)
    return replace(row, ratio_to_floor=times.median / case.floor_ms(entry.pass_name, **rates))
