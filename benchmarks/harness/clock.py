"""Device time of launches from two frameworks, interleaved in one process.

torch: CUDA events around a batch of launches, recorded behind one unmeasured launch, so that the host is ahead of the
GPU when the first event is reached.

JAX offers no events on its stream, and a profiler (CUPTI) sums kernels without the gaps between them and slows the
host. So the same idea is used with the host's clock: some unmeasured calls (the fence) are queued, then the measured
ones; the clock starts when the fence's result is ready and stops when the last result is. Both ends wait in the same
way, so what waiting costs cancels, and host time to queue calls is hidden behind the fence. A sample whose fence was
already finished when the last call had been queued does not have that property: it is thrown away and taken again with
a longer fence, and with fewer calls once the fence is as long as the queue allows, so that how fast the host is changes
how many calls a sample has only where it must. Work that is shorter than queueing it has a fence of something else, its
`front`.

Every round runs every subject once, so that drifting clocks touch all alike. At the limit of power, what ran just
before decides at which clock a subject begins; so the order changes from round to round until each subject has come
after each other one equally often (Williams, 1949, Experimental designs balanced for the estimation of residual
effects).
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from benchmarks.harness.records import recordable_failures
from blockdiag.cli.machine import reason_of

Framework = Literal["torch", "jax", "host"]

# XLA lets 32 computations wait on a device's queue; the host blocks on the next one, and then a sample means nothing.
_QUEUE_LIMIT = 24
# Reading the host's clock is uncertain by some 20 us at both ends: below 0.1% of such a sample.
_LEAST_JAX_SAMPLE_MS = 60.0
_LONGEST_FENCE = 12


class FenceTooShort(RuntimeError):
    """A fence finished before the measured calls were queued, however it was chosen."""


@dataclass
class Subject:
    """One thing to time.

    Attributes:
        key: what the caller calls it.
        run: queues the work once and returns its arrays.
        framework: which clock; "host" waits for every call and is for machines without a GPU.
        output_bytes: what one run returns, so that queued runs do not fill the memory.
        calls: how often one run does the work.
        launches, fence: runs per sample and unmeasured runs in front; set by `calibrate`.
        most_queued: how many of both there may be, for the queue and for memory; set by `calibrate`.
        front: for JAX: queues something long once and returns its arrays; these are the runs in front, if given.
        samples: milliseconds per call.
        failure: why timing ended early, empty otherwise.
    """

    key: Any
    run: Callable[[], Any]
    framework: Framework
    output_bytes: int = 0
    calls: int = 1
    launches: int = 1
    fence: int = 1
    most_queued: int = _QUEUE_LIMIT
    front: Callable[[], Any] | None = None
    samples: list[float] = field(default_factory=list)
    failure: str = ""


@dataclass(frozen=True)
class Summary:
    """Median and spread of a subject's samples, in milliseconds."""

    median: float
    p20: float
    p80: float


def summarise(samples: Sequence[float]) -> Summary:
    """Median, 20th and 80th percentile."""
    if not samples:
        raise ValueError("`samples` is empty; take at least one before summarising")
    if len(samples) == 1:
        return Summary(samples[0], samples[0], samples[0])
    p20, _, _, p80 = statistics.quantiles(samples, n=5, method="inclusive")
    return Summary(statistics.median(samples), p20, p80)


def sample_torch(run: Callable[[], Any], launches: int) -> float:
    """Milliseconds per launch from CUDA events on the current stream."""
    import torch

    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    run()
    start.record()
    for _ in range(launches):
        run()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / launches


def sample_jax(
    run: Callable[[], Any], launches: int, fence: int, front: Callable[[], Any] | None = None
) -> float | None:
    """Milliseconds per call from the host's clock between two results, or None when the fence was too short."""
    import jax

    before = front or run
    fenced = before()
    for _ in range(fence - 1):
        fenced = before()
    last = run()
    for _ in range(launches - 1):
        last = run()
    if any(leaf.is_ready() for leaf in jax.tree.leaves(fenced)):
        jax.block_until_ready(last)
        return None
    jax.block_until_ready(fenced)
    begin = time.perf_counter()
    jax.block_until_ready(last)
    return (time.perf_counter() - begin) * 1e3 / launches


def sample_host(run: Callable[[], Any], launches: int) -> float:
    """Milliseconds per call, waiting for each: for a CPU, whose calls are synchronous anyway."""
    import jax

    begin = time.perf_counter()
    for _ in range(launches):
        jax.block_until_ready(run())
    return (time.perf_counter() - begin) * 1e3 / launches


def calibrate(subject: Subject, batch_ms: float, memory_bytes: int = 40 * 2**30) -> None:
    """Warm the subject up and choose how many calls one sample has, for `batch_ms` of device time."""
    if subject.framework == "torch":
        one = min(sample_torch(subject.run, 1) for _ in range(3))
        subject.launches = max(1, round(batch_ms / max(one, 1e-3)))
        return
    one = min(sample_host(subject.run, 1) for _ in range(3))
    if subject.framework == "jax" and subject.front is None:
        batch_ms = max(batch_ms, _LEAST_JAX_SAMPLE_MS)
    subject.fence = 2 if subject.front is None else 1
    most_queued = _QUEUE_LIMIT - (_LONGEST_FENCE if subject.front is None else subject.fence)
    subject.launches = max(1, min(most_queued, round(batch_ms / max(one, 1e-3))))
    if subject.output_bytes:
        most = max(3, memory_bytes // subject.output_bytes)
        subject.launches = max(1, min(subject.launches, most - subject.fence))
        subject.most_queued = min(_QUEUE_LIMIT, most)


def sample(subject: Subject) -> float:
    """One sample in milliseconds per call.

    Raises:
        FenceTooShort: when even the longest fence ends before one call is queued: the work is too short to time so.
    """
    if subject.framework == "torch":
        return sample_torch(subject.run, subject.launches) / subject.calls
    if subject.framework == "host":
        return sample_host(subject.run, subject.launches) / subject.calls
    while True:
        value = sample_jax(subject.run, subject.launches, subject.fence, subject.front)
        if value is not None:
            return value / subject.calls
        longest = min(_LONGEST_FENCE, subject.most_queued - subject.launches)
        if subject.fence < longest:
            subject.fence = min(longest, subject.fence + 2)
        elif subject.launches > 1:
            subject.launches = subject.launches * 2 // 3
        else:
            break
    raise FenceTooShort(
        f"{subject.fence} calls end before {subject.launches} more are queued: host time hides the device time; "
        "use a larger workload"
    )


def interleave(
    subjects: Sequence[Subject], *, rounds: int, batch_ms: float, deadline: float, least_rounds: int = 5
) -> None:
    """Fill the subjects' samples: `rounds` of them, or at least `least_rounds` once `deadline` has passed.

    `deadline` is in `time.monotonic` seconds. A subject that fails keeps the reason and leaves the rounds.
    """
    failures = recordable_failures()
    for subject in subjects:
        try:
            calibrate(subject, batch_ms)
        except failures as failure:
            subject.failure = reason_of(failure)
    take_rounds(subjects, rounds=rounds, deadline=deadline, least_rounds=least_rounds)


def take_rounds(subjects: Sequence[Subject], *, rounds: int, deadline: float, least_rounds: int) -> None:
    """The rounds of `interleave`, for subjects that are calibrated."""
    failures = recordable_failures()
    for index in range(rounds):
        if index >= least_rounds and time.monotonic() > deadline:
            return
        alive = [subject for subject in subjects if not subject.failure]
        if not alive:
            return
        for subject in (alive[position] for position in order_of_round(len(alive), index)):
            try:
                subject.samples.append(sample(subject))
            except failures as failure:
                subject.failure = reason_of(failure)


def order_of_round(count: int, index: int) -> list[int]:
    """The order of `count` subjects in round `index`: the rows of a Williams square, again and again.

    In as many rounds as there are subjects (twice as many of an odd number) each has every place equally often, and
    comes directly after each other one equally often.
    """
    turn, shift = divmod(index, count)
    steps = [(place + 1) // 2 if place % 2 else -(place // 2) for place in range(count)]
    order = [(step + shift) % count for step in steps]
    return order[::-1] if count % 2 and turn % 2 else order
