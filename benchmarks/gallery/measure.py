"""Times the gallery's variants on the GPU, fused and as XLA compiles them, each checked against float32."""

import concurrent.futures
import gc
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gallery.cases import SMOKE, SMOKE_VARIANTS, timed_sizes
from benchmarks.gallery.programs import (
    PASSES,
    WHOSE,
    GalleryPass,
    Whose,
    Work,
    begin,
    compile_judge,
    compile_pass,
    trace,
)
from benchmarks.harness.clock import Framework, Subject, Summary, interleave, summarise
from benchmarks.harness.family import SPENT
from benchmarks.harness.kernels import compile_ahead
from benchmarks.harness.records import Environment, GalleryTiming, recordable_failures
from blockdiag.cli.machine import reason_of
from blockdiag.fusion.gallery import VARIANTS, Sizes

# Of a result in bfloat16, or twice what XLA's result errs by.
_ALLOWED_ERROR = 0.02
# Of the whole time, what may pass before the first variant is timed.
_COMPILING_SHARE = 0.6
_MOST_THREADS = 12
_FRONT_SIZE, _FRONT_PRODUCTS = 4096, 32


class WrongResult(ValueError):
    """A fused result is further from float32 than rounding explains: its time would mean nothing."""


@dataclass(frozen=True)
class GallerySettings:
    """How much to measure.

    Attributes:
        deadline: `time.monotonic` seconds after which no variant is begun.
        rounds: samples per program.
        batch_ms: device time of one sample, about.
        seed: of the random inputs.
        implementation: of `fuse`.
        framework: the clock; "host" is for machines without a GPU.
        say: called with a line of progress.
    """

    deadline: float
    rounds: int = 15
    batch_ms: float = 15.0
    seed: int = 0
    implementation: str = "triton"
    framework: Framework = "jax"
    say: Callable[[str], None] = print


def measure_variants(
    names: Sequence[str], environment: Environment, settings: GallerySettings
) -> Iterator[list[GalleryTiming]]:
    """Both rows of each variant, as soon as they are known.

    All programs are compiled first, side by side: kernels in processes, the rest in threads, as XLA's choice among
    kernels would disturb what is timed meanwhile. What is not compiled in time has no times, with the reason.
    """
    began = time.monotonic()
    sizes = {name: timed_sizes(name) for name in names}
    works = prepare(sizes, settings, began + _COMPILING_SHARE * (settings.deadline - began))
    settings.say(f"prepared in {time.monotonic() - began:.0f} s")
    front = _front()
    for place, name in enumerate(names):
        now = time.monotonic()
        work = works.pop(name)
        if isinstance(work, str) or now > settings.deadline:
            reason = work if isinstance(work, str) else SPENT
            yield rows_without_times(name, sizes[name], environment, reason)
            continue
        share = (settings.deadline - now) / (len(names) - place)
        yield time_work(work, sizes[name], environment, settings, front=front, deadline=now + share)
        del work
        gc.collect()


def prepare(sizes: dict[str, Sizes], settings: GallerySettings, deadline: float) -> dict[str, Work | str]:
    """Draw, trace and compile all programs of all variants; a reason in place of what cannot even begin."""
    from blockdiag.interop.targets import session_target

    failures = recordable_failures()
    threads = max(1, min(_MOST_THREADS, os.cpu_count() or 1))
    pool = concurrent.futures.ThreadPoolExecutor(threads)
    works: dict[str, Work | str] = {}
    begun = {name: pool.submit(begin, VARIANTS[name], one, settings.seed) for name, one in sizes.items()}
    waiting: list[concurrent.futures.Future[None]] = []
    specs: dict[Any, None] = {}
    for name, future in begun.items():
        try:
            work = works[name] = future.result()
        except failures as failure:
            works[name] = f"failed: {reason_of(failure)}"
            continue
        specs |= dict.fromkeys(_traced(work, settings.implementation))
        waiting += [pool.submit(_compile, work, "xla", pass_name) for pass_name in PASSES]
    settings.say(f"traced, {len(specs)} kernels")
    if specs:
        limit = max(1.0, deadline - time.monotonic())
        for line in compile_ahead(specs, session_target(), limit_seconds=limit):
            settings.say(f"compiled ahead: {line}")
    ready = [work for work in works.values() if isinstance(work, Work)]
    waiting += [pool.submit(_compile, work, "ours", pass_name) for work in ready for pass_name in PASSES]
    waiting += [pool.submit(_compile_judge, work) for work in ready]
    concurrent.futures.wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
    # What runs cannot be stopped, and is waited for: it would disturb what is timed.
    pool.shutdown(wait=True, cancel_futures=True)
    return works


def _traced(work: Work, implementation: str) -> list[Any]:
    """Trace the passes; returns the kernels. A variant that cannot be traced keeps the reason."""
    from blockdiag.interop.targets import session_target

    target = session_target() if jax.default_backend() == "gpu" else None
    specs = []
    for whose in WHOSE:
        try:
            specs += trace(work, whose, implementation, target)
        except recordable_failures() as failure:
            _refuse(work, whose, f"failed: {reason_of(failure)}")
    return specs


def _refuse(work: Work, whose: Whose, reason: str) -> None:
    """Give the reason why neither pass is timed, unless there is one already."""
    for pass_name in PASSES:
        work.reasons.setdefault((whose, pass_name), reason)


def _compile(work: Work, whose: Whose, pass_name: GalleryPass) -> None:
    if (whose, pass_name) not in work.traced:
        return
    try:
        compile_pass(work, whose, pass_name)
    except recordable_failures() as failure:
        work.reasons[whose, pass_name] = f"failed: {reason_of(failure)}"


def _compile_judge(work: Work) -> None:
    try:
        compile_judge(work)
    except recordable_failures() as failure:
        _refuse(work, "ours", f"not compared with float32: {reason_of(failure)}")


def _front() -> Callable[[], Any]:
    """Some milliseconds of work, behind which shorter work is queued."""
    x = jnp.zeros((_FRONT_SIZE, _FRONT_SIZE), jnp.bfloat16)

    def products(x: jax.Array) -> jax.Array:
        for _ in range(_FRONT_PRODUCTS):
            x = x @ x
        return x

    compiled = jax.jit(products).lower(x).compile()
    return lambda: compiled(x)


def time_work(
    work: Work,
    sizes: Sizes,
    environment: Environment,
    settings: GallerySettings,
    *,
    front: Callable[[], Any] | None,
    deadline: float,
) -> list[GalleryTiming]:
    """Check a variant's programs, time those that passed, and make the rows."""
    errors = {whose: _judged(work, whose) for whose in WHOSE}
    _refuse_wrong(work, errors)
    subjects = [
        Subject(
            key,
            _run_of(work, key),
            settings.framework,
            output_bytes=program.output_bytes + (program.extra_bytes or 0),
            front=front,
        )
        for key, program in work.programs.items()
        if key not in work.reasons
    ]
    interleave(
        subjects,
        rounds=settings.rounds,
        batch_ms=settings.batch_ms,
        deadline=deadline,
        least_rounds=min(5, settings.rounds),
    )
    times: dict[Any, Summary] = {}
    for subject in subjects:
        if subject.failure or not subject.samples:
            work.reasons[subject.key] = f"failed while timed: {subject.failure or 'no sample was taken'}"
        else:
            times[subject.key] = summarise(subject.samples)
    return [_row(work, sizes, pass_name, times, errors, environment) for pass_name in PASSES]


def _run_of(work: Work, key: tuple[Whose, GalleryPass]) -> Callable[[], Any]:
    call, arguments = work.programs[key].call, work.arguments(key[1])
    return lambda: call(*arguments)


def _judged(work: Work, whose: Whose) -> dict[str, float]:
    """The distance of each result from float32; empty where it cannot be had.

    Of fused results it must be had: else no pass is timed, with the reason.
    """
    key: tuple[Whose, GalleryPass] = (whose, "fwd+bwd")
    reason = SPENT
    if work.judge is not None and key in work.programs:
        arguments = work.arguments("fwd+bwd")
        try:
            results = jax.block_until_ready(work.programs[key].call(*arguments))
        except recordable_failures() as failure:
            work.reasons[key] = f"failed: {reason_of(failure)}"
            reason = "there are no results"
        else:
            try:
                return {name: float(x) for name, x in work.judge(arguments, results).items()}
            except recordable_failures() as failure:
                reason = reason_of(failure)
    if whose == "ours":
        _refuse(work, whose, f"not compared with float32: {reason}")
    return {}


def _refuse_wrong(work: Work, errors: dict[Whose, dict[str, float]]) -> None:
    """Keep times of fused results from being taken that are further from float32 than rounding explains."""
    for name, error in errors["ours"].items():
        of_xla = errors["xla"].get(name, 0.0)
        allowed = max(_ALLOWED_ERROR, 2 * of_xla if math.isfinite(of_xla) else 0.0)
        if not error <= allowed:
            wrong = WrongResult(f"{name} errs by {error:.2e}, allowed {allowed:.2e}")
            _refuse(work, "ours", f"failed: {reason_of(wrong)}")
            return


def _row(
    work: Work,
    sizes: Sizes,
    pass_name: GalleryPass,
    times: dict[Any, Summary],
    errors: dict[Whose, dict[str, float]],
    environment: Environment,
) -> GalleryTiming:
    """What is known of one pass."""
    numbers: dict[str, Any] = {}
    notes = []
    for whose in WHOSE:
        key: tuple[Whose, GalleryPass] = (whose, pass_name)
        found = [x for name, x in errors[whose].items() if pass_name == "fwd+bwd" or name.startswith("output")]
        numbers[f"{whose}_error"] = max(found, default=None)
        program = work.programs.get(key)
        if program is not None:
            numbers[f"{whose}_bytes"] = program.extra_bytes
        if key in times:
            one = times[key]
            numbers |= {f"{whose}_ms": one.median, f"{whose}_p20_ms": one.p20, f"{whose}_p80_ms": one.p80}
        else:
            notes.append(f"{whose} {work.reasons.get(key, SPENT)}")
    return GalleryTiming(
        variant=work.variant.name,
        pass_name=pass_name,
        shape=work.shape,
        dtype=jnp.dtype(sizes.dtype).name,
        note="; ".join(notes),
        **numbers,
        **asdict(environment),
    )


def rows_without_times(name: str, sizes: Sizes, environment: Environment, reason: str) -> list[GalleryTiming]:
    """Rows of a variant that was not begun."""
    dtype = jnp.dtype(sizes.dtype).name
    return [
        GalleryTiming(variant=name, pass_name=pass_name, shape="", dtype=dtype, note=reason, **asdict(environment))
        for pass_name in PASSES
    ]


def smoke_variants(environment: Environment) -> Iterator[list[GalleryTiming]]:
    """Rows of a few variants by the XLA implementation at a tiny size, with host times of a CPU.

    Raises:
        WrongResult: a result is wrong, or one of the programs cannot be made.
    """
    settings = GallerySettings(
        deadline=time.monotonic() + 60.0, rounds=3, batch_ms=2.0, implementation="xla", framework="host"
    )
    for name in SMOKE_VARIANTS:
        work = begin(VARIANTS[name], SMOKE, settings.seed)
        _traced(work, settings.implementation)
        for whose in WHOSE:
            for pass_name in PASSES:
                _compile(work, whose, pass_name)
        _compile_judge(work)
        rows = time_work(work, SMOKE, environment, settings, front=None, deadline=settings.deadline)
        if work.reasons:
            raise WrongResult(f"{name}: {work.reasons}")
        yield [replace(row, note="CPU smoke, host time") for row in rows]
