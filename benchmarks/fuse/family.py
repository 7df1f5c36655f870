"""Fused functions as a benchmark family: programs and checks of each case, and the columns of its rows."""

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import torch

from benchmarks.fuse.ahead import Ahead, compile_ahead, kept_in
from benchmarks.fuse.cases import SMOKE_CASES, FuseCase, FusePass, select_fuse_cases
from benchmarks.fuse.check import BASELINE_GATE, check_results, exact_results, expected_names, make_arrays
from benchmarks.fuse.programs import (
    CUDNN,
    XLA,
    FusePasses,
    cudnn_function,
    cudnn_unsupported,
    function_of,
    fused_function,
)
from benchmarks.fuse.report import PEER, compile_table, fuse_table, judge_fuse, summary_table
from benchmarks.fuse.torch_baselines import (
    COMPILE,
    FLEX,
    SDPA_BACKENDS,
    TORCH_CALLS,
    Compile,
    Tensors,
    TorchCall,
    compiled,
    sdpa_unsupported,
)
from benchmarks.harness.clock import sample_host, sample_torch
from benchmarks.harness.device import captured, poison, to_jax, to_torch, torch_peak_bytes
from benchmarks.harness.failures import GATE
from benchmarks.harness.family import (
    SPENT,
    Context,
    Entry,
    Family,
    Implementation,
    Make,
    Program,
    Settings,
    counted_columns,
)
from benchmarks.harness.machine import release_memory
from benchmarks.harness.programs import CHAINED_CALLS, SHORT_MS, chained_if_short
from benchmarks.harness.records import FuseTiming, recordable_failures
from benchmarks.harness.roofs import counted_rates
from blockdiag.cli.machine import reason_of

# In the order in which a short budget should be spent.
BASELINES = (FLEX, CUDNN, XLA, COMPILE)

# Arrays like the scores that are in memory at once where they are not fused, and what may be: JAX and torch keep the
# memory that they had, so both have to fit.
_SCORE_ARRAYS: Mapping[str, int] = {"fwd": 3, "fwd+bwd": 6}
_MOST_SCORE_BYTES = 60e9
# Seconds of a case that are left for the clock, whatever baselines would like to compile.
_TIMING_SECONDS = 3.0
# What preparing one pass of a baseline takes at first sight, in seconds; then what it took last.
_PREPARATION_SECONDS = {FLEX: 4.0, CUDNN: 3.0, XLA: 3.0, COMPILE: 6.0, **dict.fromkeys(SDPA_BACKENDS, 1.0)}


@dataclass(frozen=True)
class FuseSettings(Settings):
    """Settings of fused functions.

    Attributes:
        compile_function: torch's compiler.
        preparation: seconds that one pass of each baseline took when it was last prepared.
    """

    baselines: tuple[str, ...] = BASELINES
    compile_function: Compile = compiled
    preparation: dict[str, float] = field(default_factory=_PREPARATION_SECONDS.copy)


@dataclass(frozen=True)
class Inputs:
    """Arguments of a function.

    Attributes:
        arrays: the arguments and the cotangent as tensors.
        views: the same memory as JAX arrays.
        exact: results in float64.
    """

    arrays: Tensors
    views: Mapping[str, jax.Array]
    exact: Tensors


def _fused(context: Context, case: FuseCase) -> Make:
    """Return the maker of this library's passes: it loads the kernels, and compiles and checks the pass."""
    inputs, settings, loads = context.inputs, context.settings, {}

    def make(pass_name: Any) -> Program:
        # A function of its own for each pass, so that nothing that JAX knows of the one helps the other.
        passes = FusePasses(case, fused_function(case, settings.implementation), inputs.views)
        loaded = _load_kernels(context, case, pass_name, loads)
        begin = time.perf_counter()
        program = passes.make(pass_name)
        compiling = time.perf_counter() - begin
        poison([inputs.arrays["query"]])
        program = _checked(context, case, pass_name, program, GATE)
        first = context.ahead.seconds.get((case.name, pass_name)) if context.ahead else None
        return replace(program, columns={**program.columns, **_compile_columns(first, compiling, loaded)})

    return make


def _load_kernels(context: Context, case: FuseCase, pass_name: FusePass, loads: dict[Any, float]) -> float | None:
    """Return the seconds in which the kernels of a pass are read from the disk; `loads` has those of other passes."""
    ahead: Ahead | None = context.ahead
    specs = ahead.specs.get((case.name, pass_name)) if ahead else None
    if specs is None:
        return None
    from triton import knobs

    from blockdiag.interop.targets import session_target
    from blockdiag.triton_kernels.launch.compile import compile_plan

    target = session_target()
    with knobs.cache.scope():
        knobs.cache.dir = kept_in(case, pass_name)
        for spec in specs:
            if spec not in loads:
                begin = time.perf_counter()
                compile_plan(spec.plan(target), target)
                loads[spec] = time.perf_counter() - begin
    return sum(loads[spec] for spec in specs)


def _compile_columns(first: float | None, compiling: float, loaded: float | None) -> dict[str, float | None]:
    """Return what compiling took: kernels apart from the rest, which takes as long with kernels on disk as without."""
    return {
        "first_kernels_s": first,
        "first_compile_s": None if first is None else first + compiling,
        "cached_kernels_ms": None if loaded is None else 1e3 * loaded,
        "cached_compile_ms": None if loaded is None else 1e3 * (loaded + compiling),
    }


def _checked(context: Context, case: FuseCase, pass_name: FusePass, program: Program, gate: float) -> Program:
    """Check a compiled pass, and make it long enough for the clock."""
    found = [to_torch(result) for result in program.run()]
    results = dict(zip(expected_names(case, pass_name), found, strict=True))
    error = check_results(case, results, context.inputs.exact, gate)
    # The shortest: a run that has to ask the driver for memory takes milliseconds more.
    milliseconds = min(sample_host(program.run, 1) for _ in range(3))
    program = chained_if_short(program, milliseconds, is_on_gpu=context.settings.device == "cuda")
    # Gradients of every call of a program are there when it ends.
    held_bytes = program.calls * case.operand_bytes(pass_name)[1] + (program.extra_bytes or 0)
    return replace(
        program,
        held_bytes=held_bytes,
        columns={"relative_error": error, **_memory(case, pass_name, program.extra_bytes)},
    )


def _memory(case: FuseCase, pass_name: FusePass, extra_bytes: int | None) -> dict[str, int]:
    """Return the memory beyond inputs and outputs, and with them."""
    if extra_bytes is None:
        return {}
    return {"extra_bytes": extra_bytes, "peak_bytes": extra_bytes + sum(case.operand_bytes(pass_name))}


def _jax_baseline(name: str) -> Implementation:
    """Return the function as XLA compiles it, or by cuDNN."""

    def begin(context: Context, case: FuseCase) -> Make:
        def make(pass_name: Any) -> Program:
            attend = cudnn_function(case) if name == CUDNN else function_of(case)
            program = FusePasses(case, attend, context.inputs.views).make(pass_name)
            return _checked(context, case, pass_name, program, BASELINE_GATE)

        return _with_duration(context, name, make)

    return Implementation(name, "jax", begin, unsupported=cudnn_unsupported if name == CUDNN else lambda case: None)


def _torch_baseline(name: str) -> Implementation:
    def begin(context: Context, case: FuseCase) -> Make:
        calls: list[TorchCall] = []

        def make(pass_name: Any) -> Program:
            if not calls:
                calls.append(TORCH_CALLS[name](case, context.inputs.arrays, context.settings.compile_function))
            return _checked_torch(context, case, pass_name, calls[0])

        return _with_duration(context, name, make)

    def unsupported(case: FuseCase) -> str | None:
        return sdpa_unsupported(name, case) if name in SDPA_BACKENDS else None

    return Implementation(name, "torch", begin, unsupported=unsupported)


def _checked_torch(context: Context, case: FuseCase, pass_name: FusePass, call: TorchCall) -> Program:
    """Check a pass, and capture it where it is so short that the host would be timed."""
    run = call.run_of(pass_name)
    error = check_results(case, call.results(run()), context.inputs.exact, BASELINE_GATE)
    columns = {"relative_error": error, **_memory(case, pass_name, torch_peak_bytes(run))}
    if context.settings.device != "cuda" or min(sample_torch(run, 1) for _ in range(2)) >= SHORT_MS:
        return Program(run, note=call.note, columns=columns)
    timed, calls = run, 1
    try:
        replay = captured([run] * CHAINED_CALLS)
        # A graph does not keep what it reads: `run` does.
        timed, calls = (lambda kept=run: (replay(), kept)[0]), CHAINED_CALLS
        notes = (call.note, f"timed as a CUDA graph of {CHAINED_CALLS} calls")
    except recordable_failures() as failure:
        notes = (call.note, f"timed call by call, not as a CUDA graph: {reason_of(failure)}")
    return Program(timed, calls, note="; ".join(filter(None, notes)), columns=columns)


def _with_duration(context: Context, name: str, make: Make) -> Make:
    """Return `make`, which then also remembers how long it took."""

    def timed(pass_name: str) -> Program:
        begin = time.monotonic()
        try:
            return make(pass_name)
        finally:
            context.settings.preparation[name] = time.monotonic() - begin

    return timed


class Fuse(Family):
    """Functions in plain jax.numpy that `blockdiag.fuse` compiles."""

    name = "fuse"
    kind = FuseTiming
    settings = FuseSettings
    baselines = BASELINES
    smoke_cases = SMOKE_CASES

    select = staticmethod(select_fuse_cases)
    measure_rates = staticmethod(counted_rates)
    columns = staticmethod(counted_columns)
    judge = staticmethod(judge_fuse)

    @contextlib.contextmanager
    def compiled_ahead(self, console: Any, cases: Sequence[FuseCase], settings: Settings) -> Iterator[Ahead]:
        """Compile every kernel, and FlexAttention's, with nothing on disk, so that a first compile is timed."""
        from blockdiag.interop.targets import session_target

        limit = max(10.0, 0.4 * (settings.deadline - time.monotonic()))
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as kernels:
            os.environ["TRITON_CACHE_DIR"] = kernels
            options = {"with_flex": PEER in settings.baselines, "seed": settings.seed, "limit_seconds": limit}
            ahead = compile_ahead(cases, session_target(), **options)
            for line in ahead.lines:
                console.print(f"compiled ahead: {line}")
            yield ahead

    def make_inputs(self, cases: Sequence[FuseCase], context: Context) -> Inputs:
        """Return the arguments and float64 results."""
        settings = context.settings
        (case,) = cases
        arrays = make_arrays(case, seed=settings.seed, device=settings.device)
        exact = exact_results(case, arrays)
        if settings.device == "cuda":
            torch.cuda.synchronize()
        views = {name: to_jax(array) for name, array in arrays.items()}
        release_memory()
        return Inputs(arrays, views, exact)

    def own(self, cases: Sequence[FuseCase], settings: Settings) -> list[tuple[FuseCase, Implementation]]:
        """Return this library."""
        return [(case, Implementation(settings.implementation, "jax", _fused)) for case in cases]

    def others(self, cases: Sequence[FuseCase], context: Context) -> list[tuple[FuseCase, Implementation]]:
        """Return the baselines."""
        (case,) = cases
        names = context.settings.baselines
        return [(case, _torch_baseline(name) if name in TORCH_CALLS else _jax_baseline(name)) for name in names]

    def refusal(self, context: Context, entry: Entry) -> str:
        """Refuse a baseline whose scores do not fit, or for which no time is left."""
        settings, name = context.settings, entry.implementation.name
        if name not in self.baselines:
            return ""
        count = _SCORE_ARRAYS[entry.pass_name]
        scores = 2 * entry.case.score_elements * count
        if name in (XLA, COMPILE) and scores > _MOST_SCORE_BYTES:
            return (
                f"not run: about {count} arrays of scores, {scores / 1e9:.0f} GB, would be in memory, and "
                f"{_MOST_SCORE_BYTES / 1e9:.0f} GB may be"
            )
        # FlexAttention, which every case is compared with, may take from the shares of later cases.
        end = settings.deadline if name == FLEX else _deadline(context, entry.case) - _TIMING_SECONDS
        return SPENT if time.monotonic() + settings.preparation[name] > end else ""

    def clock_deadline(self, context: Context, ready: float, cases: Sequence[FuseCase]) -> float:
        """Return when the case's share of the time ends."""
        del ready
        return _deadline(context, cases[0])

    def finish(self) -> None:
        """Reset torch's compiler, which keeps eight programs of a function at the most."""
        torch.compiler.reset()

    def tables(self, rows: Sequence[FuseTiming], others: Sequence[FuseTiming]) -> list[Any]:
        """Return the table of a case."""
        del others
        return [fuse_table(rows)]

    def summary(self, rows: Sequence[FuseTiming]) -> list[Any]:
        """Return the tables of all cases and of compile times."""
        return [summary_table(rows), compile_table(rows)]


def _deadline(context: Context, case: FuseCase) -> float:
    """Return when the share of a case, which begins before its inputs are made, ends."""
    share = case.share / (case.share + sum(other.share for other in context.later))
    return context.began + share * max(0.0, context.settings.deadline - context.began)


FAMILY = Fuse()
