"""Measures paged attention on the GPU: checks every call of a pool, then times them interleaved."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from benchmarks.harness.clock import Framework, Subject, calibrate, sample_torch, summarise, take_rounds
from benchmarks.harness.device import captured, release_memory, to_jax, to_torch
from benchmarks.harness.pipeline import SPENT
from benchmarks.harness.records import Environment, PagedTiming, recordable_failures
from benchmarks.paged.arrays import Pool, Tensors, case_arrays, make_pool
from benchmarks.paged.cases import PagedCase
from benchmarks.paged.check import check_append, check_attention, chosen_bytes
from benchmarks.paged.programs import (
    BASELINES,
    JAX_CUDNN,
    SDPA_BACKENDS,
    Launch,
    jax_attention,
    jax_cudnn_attention,
    jax_program,
    launch_steps,
    run_steps,
    sdpa_call,
)
from benchmarks.paged.recorded import columns_of
from benchmarks.paged.targets import NATIVE, THROUGH_JAX
from blockdiag.cli.machine import reason_of

_READ_BYTES = 2**32
# Calls of one JAX program: together they last longer than the host needs to queue one. Those of MoBA are shorter.
_JAX_CALLS = 20
_JAX_MOBA_CALLS = 50


@dataclass(frozen=True)
class PagedSettings:
    """How much to measure.

    Attributes:
        deadline: `time.monotonic` seconds after which nothing is begun and rounds are few.
        rounds: samples of each row.
        batch_ms: device time of one sample, about.
        seed: of the random arrays.
        baselines: of `BASELINES`.
        implementation: of this library, for the rows through JAX.
        device: where everything runs; another than "cuda" is for tests.
        launch: how kernels are launched; None for torch's current stream.
        say: called with a line of progress.
    """

    deadline: float
    rounds: int = 15
    batch_ms: float = 2.0
    seed: int = 0
    baselines: tuple[str, ...] = BASELINES
    implementation: str = "triton"
    device: str = "cuda"
    launch: Launch | None = None
    say: Callable[[str], None] = print

    @property
    def clock(self) -> Framework:
        """Of what torch launches."""
        return "torch" if self.device == "cuda" else "host"

    @property
    def is_spent(self) -> bool:
        """Whether nothing more should be begun."""
        return time.monotonic() > self.deadline


@dataclass
class _Entry:
    """One row on its way."""

    row: PagedTiming
    framework: Framework
    run: Callable[[], Any] | None = None
    calls: int = 1
    keep: list[Any] = field(default_factory=list)


def measure_read_rate(samples: int = 10) -> float:
    """Bytes per second, in TB/s, of the largest of 4 GiB of random integers, which reads them and writes nothing."""
    values = torch.randint(-(2**31), 2**31 - 1, (_READ_BYTES // 4,), dtype=torch.int32, device="cuda")
    times = [sample_torch(lambda: torch.amax(values), 5) for _ in range(samples)]
    return _READ_BYTES / summarise(times).median / 1e9


def measure_pool(
    cases: Sequence[PagedCase], environment: Environment, read_tb_per_s: float, settings: PagedSettings
) -> list[PagedTiming]:
    """Measure cases that read one pool, and what is compared with them; rows that did not run have the reason."""
    first, began = cases[0], time.monotonic()
    entries = [_entry(case, NATIVE, environment) for case in cases]
    if settings.is_spent:
        return [dataclasses.replace(entry.row, note=SPENT) for entry in entries]
    pool = make_pool(first, seed=settings.seed, device=settings.device)
    for case, entry in zip(cases, entries, strict=True):
        _attempt(entry, settings, _prepare_native, case, pool)
    for case in cases:
        for name, prepare in _compared(case, settings):
            entries.append(_entry(case, name, environment))
            _attempt(entries[-1], settings, prepare, case, pool)
    prepared = time.monotonic()
    rows = _timed(entries, read_tb_per_s, settings)
    settings.say(
        f"{first.group}, {first.shape.name}, {first.cache}: {sum(entry.run is not None for entry in entries)} of "
        f"{len(entries)} checked in {prepared - began:.1f} s, timed in {time.monotonic() - prepared:.1f} s"
    )
    del entries, pool
    if settings.device == "cuda":
        release_memory()
    return rows


def _compared(case: PagedCase, settings: PagedSettings) -> list[tuple[str, Callable[..., None]]]:
    """What is measured beside the native launches of a case: the same through JAX, and attention without pages."""
    found: list[tuple[str, Callable[..., None]]] = []
    if case.page_size == 64 and case.group in ("decode", "moba"):
        found.append((THROUGH_JAX, _prepare_jax))
        if case.group == "decode" and case.cache == "bfloat16":
            found += [(name, _prepare_contiguous) for name in settings.baselines]
    return found


def _entry(case: PagedCase, name: str, environment: Environment) -> _Entry:
    columns = columns_of(case)
    if name in BASELINES:
        columns |= {"page_size": None, "case": f"{case.shape.name}_contiguous"}
    elif case.group != "append" and case.block_size is None:
        columns |= {"splits": case.num_splits, "is_chosen": int(case.splits is None)}
    row = PagedTiming(implementation=name, **columns, read_gb=case.read_bytes / 1e9, **asdict(environment))
    return _Entry(row, "host")


def _attempt(entry: _Entry, settings: PagedSettings, prepare: Callable[..., None], *arguments: Any) -> None:
    """Prepare an entry, or keep the reason why it is not."""
    if settings.is_spent:
        entry.row = dataclasses.replace(entry.row, note=SPENT)
        return
    try:
        prepare(entry, settings, *arguments)
    except recordable_failures() as failure:
        entry.run = None
        entry.row = dataclasses.replace(entry.row, note=f"failed: {reason_of(failure)}")
        settings.say(f"  {entry.row.implementation}, {entry.row.case}: {entry.row.note}")


def _prepare_native(entry: _Entry, settings: PagedSettings, case: PagedCase, pool: Pool) -> None:
    """Launch once, check, and capture the calls of a round."""
    if settings.launch is None:
        from blockdiag.interop.torch_launch import launch
    else:
        launch = settings.launch
    steps, given = launch_steps(case), case_arrays(case, pool, seed=settings.seed)
    found = _checked_launches(entry, case, steps, given, launch)
    calls = [_call(steps, given[index % len(given)], launch) for index in range(case.calls)]
    if settings.device == "cuda":
        entry.run, entry.calls = captured(calls), len(calls)
    else:
        entry.run = calls[0]
    entry.framework = settings.clock
    entry.keep = [given, found]


def _checked_launches(
    entry: _Entry, case: PagedCase, steps: Sequence[Any], given: Sequence[Tensors], launch: Launch
) -> Tensors:
    """The results of a first call, checked; fills in what only the numbers tell."""
    before = given[0]
    if case.group == "append":
        changed = steps[0].output_names
        before = {name: array.clone() if name in changed else array for name, array in given[0].items()}
        found = run_steps(steps, given[0], launch)
        error = check_append(case, before, found)
    else:
        found = run_steps(steps, given[0], launch)
        error = check_attention(case, given[0], found["output"], found["log_sum"])
    entry.row = dataclasses.replace(entry.row, relative_error=error)
    _count_moba_bytes(entry, case, before)
    return found


def _count_moba_bytes(entry: _Entry, case: PagedCase, arrays: Tensors) -> None:
    if case.block_size is not None:
        entry.row = dataclasses.replace(entry.row, read_gb=chosen_bytes(case, arrays) / 1e9)


def _call(steps: Sequence[Any], arrays: Tensors, launch: Launch) -> Callable[[], Any]:
    return lambda: run_steps(steps, arrays, launch)


def _prepare_jax(entry: _Entry, settings: PagedSettings, case: PagedCase, pool: Pool) -> None:
    """This library through `jax.jit`: one call checked, and a program of several."""
    arrays = case_arrays(case, pool, seed=settings.seed)[0]
    _use_jax(entry, settings, case, arrays, jax_attention(case, settings.implementation))
    _count_moba_bytes(entry, case, arrays)


def _prepare_contiguous(entry: _Entry, settings: PagedSettings, case: PagedCase, pool: Pool) -> None:
    """Dense attention to the pool's keys as they lie, without pages."""
    arrays = dict(case_arrays(case, pool, seed=settings.seed)[0])
    del arrays["page_table"]
    arrays["key"], arrays["value"] = pool.contiguous(case.shape)
    if entry.row.implementation == JAX_CUDNN:
        _use_jax(entry, settings, case, arrays, jax_cudnn_attention)
        return
    operands = (SDPA_BACKENDS[entry.row.implementation], arrays["query"], arrays["key"], arrays["value"])
    error = check_attention(case, arrays, sdpa_call(*operands))
    entry.row = dataclasses.replace(entry.row, relative_error=error)
    entry.run, entry.framework = (lambda: sdpa_call(*operands)), settings.clock


def _use_jax(
    entry: _Entry, settings: PagedSettings, case: PagedCase, arrays: Tensors, attend: Callable[..., Any]
) -> None:
    if settings.device == "cuda":
        torch.cuda.synchronize()
    views = {name: to_jax(array) for name, array in arrays.items()}
    calls = _JAX_CALLS if case.block_size is None else _JAX_MOBA_CALLS
    results, entry.run = jax_program(attend, views, calls)
    output, log_sum = (None if result is None else to_torch(result) for result in results)
    assert output is not None
    error = check_attention(case, arrays, output, log_sum)
    entry.row = dataclasses.replace(entry.row, relative_error=error, note=f"through jax.jit, programs of {calls} calls")
    entry.calls, entry.framework = calls, "jax" if settings.device == "cuda" else "host"
    entry.keep = [arrays, views]


def _timed(entries: Sequence[_Entry], read_tb_per_s: float, settings: PagedSettings) -> list[PagedTiming]:
    """Time all that was prepared, interleaved, and fill in the rows."""
    subjects: dict[int, Subject] = {}
    for entry in entries:
        if entry.run is None:
            continue
        subject = subjects[id(entry)] = Subject(entry.row.case, entry.run, entry.framework, calls=entry.calls)
        try:
            calibrate(subject, settings.batch_ms)
        except recordable_failures() as failure:
            subject.failure = reason_of(failure)
    least = min(5, settings.rounds)
    take_rounds(list(subjects.values()), rounds=settings.rounds, deadline=settings.deadline, least_rounds=least)
    return [_with_times(entry.row, subjects.get(id(entry)), read_tb_per_s) for entry in entries]


def _with_times(row: PagedTiming, subject: Subject | None, read_tb_per_s: float) -> PagedTiming:
    """The row with what the clock said."""
    read_bytes = (row.read_gb or 0.0) * 1e9
    floor = read_bytes / read_tb_per_s / 1e6
    row = dataclasses.replace(row, read_tb_per_s=read_tb_per_s, floor_us=floor)
    if subject is None:
        return row
    if subject.failure or not subject.samples:
        return dataclasses.replace(row, note=f"failed while timed: {subject.failure or 'no sample was taken'}")
    times = summarise(subject.samples)
    median = 1e3 * times.median
    return dataclasses.replace(
        row,
        median_us=median,
        p20_us=1e3 * times.p20,
        p80_us=1e3 * times.p80,
        tb_per_s=read_bytes / median / 1e6,
        ratio_to_floor=median / floor,
    )
