"""The part of `python -m benchmarks` that times several devices of one host."""

import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console

from benchmarks.harness.pipeline import Benchmark, Choices, keep_smoke
from benchmarks.harness.records import DeviceTiming, environment, merge_rows

FILE = "devices.csv"


def smoke_devices(console: Console, output: Path | None) -> None:
    """The CPU's part: every kind of mesh, checked, and host times, plainly labelled."""
    import jax

    from benchmarks.devices.measure import SMALL_CASES, SMALL_SEQUENCE_CASES, measure_devices, measure_sequences

    if jax.device_count() == 1:
        console.print("devices: this process has one device; JAX_NUM_CPU_DEVICES=4 makes the CPU pretend to be four.")
        return
    console.print(
        "This is a smoke run on the CPU: every kind of mesh at a tiny size. Its times say nothing about GPUs; run the "
        "same command on a machine with several NVIDIA GPUs for those."
    )
    where = environment("cpu")
    rows = [
        *measure_devices(where, SMALL_CASES, rounds=2),
        *measure_sequences(where, SMALL_SEQUENCE_CASES, rounds=2),
    ]
    for row in rows:
        console.print(line_of(row))
    keep_smoke(console, output, "devices", DeviceTiming, rows)


def bench_devices(console: Console, path: Path, *, cases: str | None, rounds: int, deadline: float) -> None:
    """The GPUs' part.

    Args:
        path: of the CSV file.
        cases: "shards", "sequences" or names of sequences, with commas between; None is the first two.
        deadline: `time.monotonic` seconds after which no case is begun.

    Raises:
        SystemExit: JAX sees one GPU only.
    """
    import jax

    from benchmarks.devices.measure import SEQUENCE_CASES, measure_devices, measure_sequences

    measures: dict[str, Callable[..., Iterator[DeviceTiming]]]
    measures = {"shards": measure_devices, "sequences": measure_sequences}
    names = list(measures) if cases is None else cases.split(",")
    measures |= {case.name: functools.partial(measure_sequences, cases=[case]) for case in SEQUENCE_CASES}
    if unknown := [name for name in names if name not in measures]:
        raise SystemExit(f"`--cases` must be some of {', '.join(measures)}, got {', '.join(unknown)}")
    if jax.device_count() == 1:
        raise SystemExit("devices needs several GPUs, and JAX sees one")
    where = environment(jax.devices()[0].device_kind)
    console.print(f"{jax.device_count()} x {where.device}, driver {where.driver}, jax {where.jax}")
    for name in names:
        for row in measures[name](where, rounds=rounds, seconds=deadline - time.monotonic()):
            console.print(line_of(row))
            merge_rows(path, DeviceTiming, [row])
    console.print(f"devices: {path}")


def line_of(row: DeviceTiming) -> str:
    """A row in words."""
    what = f"{row.op:<20} {row.division:<6} {row.tokens:>7} {row.mesh:<15} {row.devices} devices"
    if row.median_ms is None or row.perfect_ms is None:
        return f"{what}: {row.note or 'not timed'}"
    share = f"{100 * row.perfect_ms / row.median_ms:.1f}% of perfect"
    return (
        f"{what} {row.median_ms:8.3f} ms, {share}, {row.temporary_mib:.0f} MiB, {row.collectives or 'no collectives'}"
    )


def _measure(console: Console, folder: Path, choices: Choices) -> None:
    options = {"rounds": choices.rounds, "deadline": choices.deadline}
    bench_devices(console, folder / FILE, cases=choices.cases, **options)


BENCHMARK = Benchmark(
    measure=_measure,
    smoke=smoke_devices,
    names="shards, sequences, or one of these",
    needs_torch=False,
    least_devices=2,
)
