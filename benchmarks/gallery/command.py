"""The part of `python -m benchmarks` that times the gallery's variants."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.gallery.cases import select_variants
from benchmarks.harness.pipeline import Benchmark, Choices, introduce_smoke, keep_smoke
from benchmarks.harness.records import GalleryTiming, environment, is_timed, merge_rows

FILE = "gallery.csv"


def smoke_gallery(console: Console, output: Path | None) -> None:
    """The CPU's part: a few variants, every check, and host times, plainly labelled."""
    from benchmarks.gallery.measure import smoke_variants

    introduce_smoke(console, "a few variants by the XLA implementation against float32")
    rows = [row for found in smoke_variants(environment("cpu")) for row in found]
    for row in rows:
        console.print(line_of(row))
    keep_smoke(console, output, "gallery", GalleryTiming, rows)


def measure_gallery(
    console: Console, path: Path, *, variants: str | None, rounds: int, seed: int, deadline: float
) -> None:
    """The GPU's part: all programs compiled, then each variant timed and kept as soon as it is known.

    Args:
        path: of the CSV file.
        deadline: `time.monotonic` seconds after which no variant is begun.
    """
    import jax

    from benchmarks.gallery.measure import GallerySettings, measure_variants

    try:
        names = select_variants(variants)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    where = environment(jax.devices()[0].device_kind)
    console.print(f"{where.device}, driver {where.driver}, jax {where.jax}, triton {where.triton}")
    settings = GallerySettings(deadline=deadline, rounds=rounds, seed=seed, say=console.print)
    kept = keep_all(console, path, measure_variants(names, where, settings))
    timed = [row for row in kept if row.speed_up is not None]
    console.print(f"gallery: {len(timed)} of {len(kept)} passes timed beside XLA's; {path}")


def keep_all(console: Console, path: Path, measured: Iterable[Sequence[GalleryTiming]]) -> list[GalleryTiming]:
    """Print and write each variant's rows as they come; rows without any time replace none with times."""
    all_rows = []
    for rows in measured:
        merge_rows(path, GalleryTiming, rows, is_measured=is_timed)
        all_rows += rows
        for row in rows:
            console.print(line_of(row))
    return all_rows


def line_of(row: GalleryTiming) -> str:
    """A row for the terminal."""
    ours, xla = ("-" if x is None else f"{x:.3f}" for x in (row.ours_ms, row.xla_ms))
    parts = [f"{row.variant} {row.pass_name}: {ours} ms, XLA {xla} ms"]
    parts += [] if row.speed_up is None else [f"{row.speed_up:.1f}x"]
    parts += [] if row.ours_error is None else [f"error {row.ours_error:.1e}"]
    parts += [] if row.xla_error is None else [f"XLA's {row.xla_error:.1e}"]
    both_bytes = (row.ours_bytes, row.xla_bytes)
    parts += ["extra " + " / ".join("-" if x is None else f"{x / 2**20:.1f}" for x in both_bytes) + " MiB"]
    parts += [row.note] if row.note else []
    return ", ".join(parts)


def _measure(console: Console, folder: Path, choices: Choices) -> None:
    options = {"rounds": choices.rounds, "seed": choices.seed, "deadline": choices.deadline}
    measure_gallery(console, folder / FILE, variants=choices.cases, **options)


BENCHMARK = Benchmark(
    measure=_measure, smoke=smoke_gallery, budget_seconds=360.0, names="its variants", needs_torch=False
)
