"""The gallery's variants as a benchmark family: fused functions beside the same functions as XLA compiles them."""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.gallery.ahead import Ahead, make_front, prepare_all, prepared
from benchmarks.gallery.cases import SMOKE_CASES, GalleryCase, select_gallery_cases
from benchmarks.gallery.programs import Whose, Work
from benchmarks.gallery.report import gallery_table, speed_up_table
from benchmarks.harness.family import SPENT, Context, Entry, Family, Implementation, Make, Program, Settings
from benchmarks.harness.records import GalleryTiming, Measured, is_timed
from benchmarks.harness.report import Verdict

# The share of the time limit that may pass before the first variant is timed.
_COMPILING_SHARE = 0.6


@dataclass(frozen=True)
class GallerySettings(Settings):
    """Settings of the gallery: samples are short, because there are many variants."""

    rounds: int = 15
    batch_ms: float = 15.0


@dataclass(frozen=True, kw_only=True)
class PassTiming(Measured):
    """One pass of a variant, either fused or as XLA compiles it; see `GalleryTiming`."""

    variant: str
    pass_name: str
    implementation: str
    dtype: str
    shape: str = ""
    median_ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    extra_bytes: int | None = None
    relative_error: float | None = None


def _implementation(whose: Whose) -> Implementation:
    """Return the fused passes, or those of XLA."""

    def begin(context: Context, case: GalleryCase) -> Make:
        del case
        work: Work = context.inputs
        if whose == "ours":
            work.demand_right()

        def make(pass_name: Any) -> Program:
            failure = work.failures.get((whose, pass_name))
            if failure is not None:
                raise failure
            program = work.programs[whose, pass_name]
            columns = {**program.columns, "relative_error": work.error(whose, pass_name)}
            return replace(program, columns=columns, front=context.ahead.front if context.ahead else None)

        return make

    return Implementation(whose, "jax", begin)


class Gallery(Family):
    """Every variant of the gallery, with XLA's time for the same function in the same row."""

    name = "gallery"
    kind = GalleryTiming
    pass_kind = PassTiming
    settings = GallerySettings
    baselines = ("xla",)
    smoke_cases = SMOKE_CASES
    smoke_baselines = ("xla",)
    smoke_text = "a few variants by the XLA implementation against float32"

    select = staticmethod(select_gallery_cases)
    is_measured = staticmethod(is_timed)

    @contextlib.contextmanager
    def compiled_ahead(self, console: Any, cases: Sequence[GalleryCase], settings: Settings) -> Iterator[Ahead]:
        """Compile all programs side by side; what is not compiled in time has no times, with the reason."""
        began = time.monotonic()
        works = prepare_all(cases, settings, began + _COMPILING_SHARE * (settings.deadline - began))
        console.print(f"prepared in {time.monotonic() - began:.0f} s")
        yield Ahead(works, make_front())

    def measure_rates(self) -> tuple[dict[str, float], str]:
        """Return nothing, because variants are compared with XLA."""
        return {}, ""

    def make_inputs(self, cases: Sequence[GalleryCase], context: Context) -> Work:
        """Return the programs of a variant with their inputs."""
        (case,) = cases
        if context.ahead is None:
            return prepared(case, context.settings)
        work = context.ahead.works.pop(case.name)
        if isinstance(work, Exception):
            raise work
        return work

    def own(self, cases: Sequence[GalleryCase], settings: Settings) -> list[tuple[GalleryCase, Implementation]]:
        """Return the fused function."""
        del settings
        return [(case, _implementation("ours")) for case in cases]

    def others(self, cases: Sequence[GalleryCase], context: Context) -> list[tuple[GalleryCase, Implementation]]:
        """Return the function as XLA compiles it."""
        return [(case, _implementation("xla")) for case in cases if "xla" in context.settings.baselines]

    def refusal(self, context: Context, entry: Entry) -> str:
        """Refuse what was not compiled in time, and fused results that are not compared with float32."""
        work: Work = context.inputs
        whose: Any = entry.implementation.name
        key: Any = (whose, entry.pass_name)
        if key in work.failures:
            return ""
        if key not in work.programs:
            return SPENT
        if whose == "xla" or work.distances["ours"]:
            return ""
        return f"not compared with float32: {work.uncompared('ours')}"

    def columns(self, entry: Entry, rates: Mapping[str, float]) -> dict[str, Any]:
        """Return nothing: no floor stands beside the times."""
        del entry, rates
        return {}

    def compared(self, rows: Sequence[PassTiming]) -> list[GalleryTiming]:
        """Return a row for each pass, which has both times."""
        passes: dict[tuple[str, str], list[PassTiming]] = {}
        for row in rows:
            passes.setdefault((row.variant, row.pass_name), []).append(row)
        return [_joined(found) for found in passes.values()]

    def tables(self, rows: Sequence[GalleryTiming], others: Sequence[GalleryTiming]) -> list[Any]:
        """Return the table of a variant."""
        del others
        return [gallery_table(rows)]

    def summary(self, rows: Sequence[GalleryTiming]) -> list[Any]:
        """Return the median factors."""
        return [speed_up_table(rows)]

    def judge(self, rows: Sequence[GalleryTiming]) -> list[Verdict]:
        """Return nothing: factors have no limit."""
        del rows
        return []


def _joined(rows: Sequence[PassTiming]) -> GalleryTiming:
    """Return the row of one pass of a variant. A reason that all have is said once."""
    first, different = rows[0], {row.note for row in rows}
    notes = [f"{row.implementation} {row.note}" for row in rows if row.note]
    numbers: dict[str, Any] = {}
    for row in rows:
        whose = row.implementation
        numbers |= {f"{whose}_ms": row.median_ms, f"{whose}_p20_ms": row.p20_ms, f"{whose}_p80_ms": row.p80_ms}
        numbers |= {f"{whose}_bytes": row.extra_bytes, f"{whose}_error": row.relative_error}
    return GalleryTiming(
        variant=first.variant,
        pass_name=first.pass_name,
        shape=next((row.shape for row in rows if row.shape), ""),
        dtype=first.dtype,
        note=first.note if len(different) == 1 else "; ".join(notes),
        **numbers,
        **{name: getattr(first, name) for name in ("device", "driver", "jax", "jaxlib", "torch", "triton", "date")},
    )


FAMILY = Gallery()
