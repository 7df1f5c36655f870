"""A small laboratory for kernels: check candidates, time them interleaved on one GPU, compare them with a copy.

    from kernel_lab import Candidate, race
    race([Candidate("mine", lambda: mine(q, k, v), bytes_moved), ...], expected=reference_outputs)

or, from a shell, with a file that defines `candidates()` and, if outputs should be checked, `expected()`:

    PYTHONPATH=src python -m benchmarks.experiments.kernel_lab my_variants.py --rounds 30

Times are CUDA events around batches of launches. The GPU is kept busy by one unmeasured launch in front of each batch,
so that host time stays out of the figures, and every round runs every candidate once, in rotating order, so that a
drifting clock touches all of them alike. Device-to-device copy of a buffer far larger than L2 is one more candidate.
"""

import argparse
import importlib
import importlib.util
import runpy
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from subprocess import SubprocessError
from typing import Any

import torch

COPY_NAME = "copy (read + write)"


@dataclass(frozen=True)
class Candidate:
    """One callable to time.

    Attributes:
        name: what the table shows.
        run: launches the work on the current stream and returns a tensor, a tuple of tensors, or None.
        bytes_moved: fewest bytes one call must read and write.
        tolerance: largest ||out - expected|| / ||expected|| that passes the check.
        expected: outputs of this candidate when they differ from the ones given to `race`.
    """

    name: str
    run: Callable[[], Any]
    bytes_moved: int
    tolerance: float = 1e-2
    expected: Sequence[torch.Tensor] | None = None


@dataclass(frozen=True)
class Result:
    """Medians of one candidate; `failure` is why there are none."""

    name: str
    median_ms: float = float("nan")
    p20_ms: float = float("nan")
    p80_ms: float = float("nan")
    gigabytes_per_second: float = float("nan")
    ratio_to_copy_time: float = float("nan")
    error: float = float("nan")
    failure: str = ""


def recordable_failures() -> tuple[type[Exception], ...]:
    """What a broken variant raises: it becomes a row of the table. An interrupt or an exit still ends the race."""
    usual = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError, OSError)
    torch_errors = (RuntimeError, TypeError, ValueError, SubprocessError)
    if importlib.util.find_spec("triton") is None:
        return usual + torch_errors
    return (*usual, *torch_errors, importlib.import_module("triton.errors").TritonError)


def outputs_of(value: Any) -> tuple[torch.Tensor, ...]:
    """The tensors a candidate returned, as a tuple."""
    if value is None:
        return ()
    return (value,) if isinstance(value, torch.Tensor) else tuple(value)


def relative_error(output: torch.Tensor, expected: torch.Tensor) -> float:
    """||output - expected|| / ||expected|| in float64, infinite when the output holds NaN or Inf."""
    if output.shape != expected.shape:
        raise ValueError(f"output has shape {tuple(output.shape)}, expected {tuple(expected.shape)}")
    if not bool(torch.isfinite(output).all()):
        return float("inf")
    difference = (output.float() - expected.float()).double().norm()
    return float(difference / expected.double().norm().clamp_min(1e-300))


def check(candidate: Candidate, expected: Sequence[torch.Tensor] | None) -> float:
    """Run once and return the worst relative error over all outputs; raise when it is above the tolerance."""
    wanted = expected if candidate.expected is None else candidate.expected
    outputs = outputs_of(candidate.run())
    torch.cuda.synchronize()
    if not wanted:
        return float("nan")
    if len(outputs) < len(wanted):
        raise ValueError(f"returned {len(outputs)} tensors, expected {len(wanted)}")
    errors = [relative_error(output, reference) for output, reference in zip(outputs, wanted, strict=False)]
    if max(errors) > candidate.tolerance:
        raise ValueError(f"wrong result: relative errors {[f'{error:.2e}' for error in errors]}")
    return max(errors)


def time_batch(run: Callable[[], Any], launches: int) -> float:
    """Device milliseconds of one launch, from events around `launches` of them behind one unmeasured launch."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    run()
    start.record()
    for _ in range(launches):
        run()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / launches


def copy_candidate(gibibytes: float) -> Candidate:
    """Device-to-device copy of a random buffer; counts bytes read plus bytes written."""
    elements = int(gibibytes * 2**30) // 4
    source = torch.randint(-(2**31), 2**31 - 1, (elements,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    return Candidate(COPY_NAME, lambda: target.copy_(source), 2 * 4 * elements, expected=[source], tolerance=0.0)


def race(
    candidates: Sequence[Candidate],
    *,
    expected: Sequence[torch.Tensor] | None = None,
    rounds: int = 30,
    batch_ms: float = 3.0,
    copy_gibibytes: float = 2.0,
    quiet: bool = False,
) -> list[Result]:
    """Check every candidate, then time all that passed, interleaved; print a table and return its rows.

    A candidate that raises or computes a wrong result keeps its row, with the reason, and the others go on.
    `batch_ms` is how long one timed batch lasts at least; `rounds` batches are timed per candidate.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("kernel_lab times CUDA kernels and torch sees no GPU; run it on a machine with one")
    results: dict[str, Result] = {}
    errors: dict[str, float] = {}
    ready: list[tuple[Candidate, int]] = []
    failures = recordable_failures()
    for candidate in [copy_candidate(copy_gibibytes), *candidates]:
        try:
            errors[candidate.name] = check(candidate, expected)
            one = min(time_batch(candidate.run, 1) for _ in range(3))
            ready.append((candidate, max(1, round(batch_ms / max(one, 1e-4)))))
        except failures as failure:  # a row of the table, not the end of the race
            results[candidate.name] = Result(candidate.name, failure=f"{type(failure).__name__}: {failure}")
    samples: dict[str, list[float]] = {candidate.name: [] for candidate, _ in ready}
    for round_index in range(rounds):
        shift = round_index % max(1, len(ready))
        for candidate, launches in ready[shift:] + ready[:shift]:
            samples[candidate.name].append(time_batch(candidate.run, launches))
    copy_rate = float("nan")
    for candidate, _ in ready:
        times = samples[candidate.name]
        median = statistics.median(times)
        rate = candidate.bytes_moved / median / 1e6
        copy_rate = rate if candidate.name == COPY_NAME else copy_rate
        p20, _, _, p80 = statistics.quantiles(times, n=5) if len(times) > 1 else (median,) * 4
        results[candidate.name] = Result(
            candidate.name, median, p20, p80, rate, copy_rate / rate, errors[candidate.name]
        )
    ordered = [results[name] for name in [COPY_NAME, *(candidate.name for candidate in candidates)]]
    if not quiet:
        print(render(ordered))
    return ordered


def render(results: Sequence[Result]) -> str:
    """The table of a race as text; `x floor` is time over the time a copy of the same bytes takes."""
    width = max(len(result.name) for result in results)
    lines = [f"{'candidate':<{width}}  {'ms':>8} {'p20':>8} {'p80':>8} {'GB/s':>7} {'x floor':>7} {'error':>8}"]
    for result in results:
        if result.failure:
            lines.append(f"{result.name:<{width}}  failed: {result.failure.strip()[:1500]}")
            continue
        lines.append(
            f"{result.name:<{width}}  {result.median_ms:8.4f} {result.p20_ms:8.4f} {result.p80_ms:8.4f} "
            f"{result.gigabytes_per_second:7.0f} {result.ratio_to_copy_time:7.3f} {result.error:8.1e}"
        )
    return "\n".join(lines)


def main() -> None:
    """Race the candidates that a file defines."""
    parser = argparse.ArgumentParser(description="Check and time the candidates() of a Python file, interleaved.")
    parser.add_argument("file", help="defines candidates() -> list of Candidate, and optionally expected() -> tensors")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--batch-ms", type=float, default=3.0)
    parser.add_argument("--copy-gibibytes", type=float, default=2.0)
    arguments = parser.parse_args()
    namespace = runpy.run_path(arguments.file)
    expected = namespace["expected"]() if "expected" in namespace else None
    race(
        namespace["candidates"](),
        expected=expected,
        rounds=arguments.rounds,
        batch_ms=arguments.batch_ms,
        copy_gibibytes=arguments.copy_gibibytes,
    )


if __name__ == "__main__":
    main()
