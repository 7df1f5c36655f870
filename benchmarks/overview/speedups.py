"""Speed-ups of this library over the fastest other implementation, from the recorded rows."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.block_diagonal.plots import CASE_NAMES
from benchmarks.fuse.plots import case_name
from benchmarks.harness.plot_style import LOOKS
from benchmarks.harness.records import FuseTiming, GalleryTiming, MoBATiming, PagedTiming, Timing
from benchmarks.paged.cases import CACHE_LABELS

OURS = "triton"
NATIVE = "triton-torch"
PASS_NAMES = {"fwd": "forward", "bwd": "backward", "fwd+bwd": "forward and backward"}
# Implementations of this library: other launches, parts, and those for CPUs.
_OWN = (OURS, NATIVE, "triton-rope-apart", "xla", "pallas", "reference")
SAME = 0.99
"""Factors of at least this count as no slower, because runs differ by a percent."""


@dataclass(frozen=True)
class SpeedUp:
    """Times of one workload.

    Attributes:
        operation, workload, passes: the measured call.
        ours, floor: milliseconds; the floor is the least time at the rates of the same run.
        other: the fastest implementation of other projects, a key of `LOOKS`, or None if none ran.
        other_ms: its milliseconds.
        group: the function, if the operation is `fuse`.
    """

    operation: str
    workload: str
    passes: str
    ours: float
    floor: float | None
    other: str | None
    other_ms: float | None
    group: str = ""

    @property
    def factor(self) -> float | None:
        """The other implementation's time over this library's."""
        return None if self.other_ms is None else self.other_ms / self.ours

    @property
    def other_name(self) -> str:
        """The other implementation's name, with a star if it was not measured in the same run."""
        if self.other is None:
            return "-"
        look = LOOKS[self.other]
        return look.label if look.line == "-" else f"{look.label.partition(',')[0]} *"


def _is_comparable(name: str) -> bool:
    """Return whether a row's implementation is another project's, on the same GPU."""
    return name not in _OWN and name in LOOKS and not name.endswith("-published")


def _fastest(rows: Iterable[Timing | MoBATiming | FuseTiming]) -> tuple[str | None, float | None]:
    times = {row.implementation: row.median_ms for row in rows if _is_comparable(row.implementation) and row.median_ms}
    if not times:
        return None, None
    name = min(times, key=lambda name: times[name])
    return name, times[name]


def block_diagonal_speedups(rows: Sequence[Timing], pass_name: str = "fwd+bwd") -> list[SpeedUp]:
    """Return the speed-up of each case."""
    found = []
    for case, workload in CASE_NAMES.items():
        here = [row for row in rows if row.case == case and row.pass_name == pass_name]
        ours = next((row for row in here if row.implementation == OURS and row.median_ms), None)
        if ours is not None and ours.median_ms:
            other, time = _fastest(here)
            found.append(
                SpeedUp("block diagonal", workload, PASS_NAMES[pass_name], ours.median_ms, ours.floor_ms, other, time)
            )
    return found


def moba_speedups(rows: Sequence[MoBATiming], pass_name: str = "fwd+bwd") -> list[SpeedUp]:
    """Return the speed-up of each case over other MoBA implementations, or dense attention, on the same arrays."""

    def shape(row: MoBATiming) -> tuple[int, ...]:
        return row.tokens, row.batch, row.query_heads, row.key_heads, row.head_dim

    found = []
    for ours in rows:
        if ours.implementation == OURS and ours.pass_name == pass_name and ours.median_ms:
            # Dense attention is recorded with the first case of its shape; other MoBA depends on the case's blocks.
            beside = [
                row
                for row in rows
                if row.pass_name == pass_name
                and (row.case == ours.case or (row.implementation.startswith("torch-") and shape(row) == shape(ours)))
            ]
            other, time = _fastest(beside)
            workload = (
                f"{ours.batch} x {ours.tokens:,}, {_heads(ours)}, blocks of {ours.block_size}, top_k {ours.top_k}"
            )
            found.append(SpeedUp("MoBA", workload, PASS_NAMES[pass_name], ours.median_ms, ours.floor_ms, other, time))
    return sorted(found, key=lambda one: one.ours)


def _heads(row: MoBATiming) -> str:
    heads = f"{row.query_heads} heads of {row.head_dim}"
    return heads if row.key_heads == row.query_heads else f"{heads}, {row.key_heads} key heads"


def paged_speedups(rows: Sequence[PagedTiming]) -> list[SpeedUp]:
    """Return the speed-ups of group "decode" over other paged attention, by workload, cache dtype and page size."""
    decode = [row for row in rows if row.group == "decode" and row.median_us and row.page_size is not None]
    found = []
    for ours in decode:
        if ours.implementation == NATIVE and ours.median_us:
            key = ours.workload, ours.cache, ours.page_size
            others = {
                row.implementation: (row.median_us or 0.0) / 1e3
                for row in decode
                if (row.workload, row.cache, row.page_size) == key and _is_comparable(row.implementation)
            }
            other = min(others, key=lambda name: others[name]) if others else None
            time = others[other] if other else None
            workload = f"{ours.batch} x {ours.kv_length:,} keys, {CACHE_LABELS[ours.cache]}, pages of {ours.page_size}"
            floor = None if ours.floor_us is None else ours.floor_us / 1e3
            found.append(SpeedUp("paged decode", workload, "one query", ours.median_us / 1e3, floor, other, time))
    return found


def contiguous_factors(rows: Sequence[PagedTiming]) -> dict[str, float]:
    """Return the time of dense attention to a contiguous bfloat16 cache over ours with pages of 64, by workload.

    The fastest dense implementation of each workload counts.
    """
    decode = [row for row in rows if row.group == "decode" and row.median_us and row.cache == "bfloat16"]
    factors = {}
    for ours in decode:
        beside = [row for row in decode if row.workload == ours.workload and row.page_size is None]
        dense = [row.median_us for row in beside if row.median_us]
        if ours.implementation == NATIVE and ours.page_size == 64 and ours.median_us and dense:
            factors[f"{ours.batch} x {ours.kv_length:,}"] = min(dense) / ours.median_us
    return factors


def fuse_speedups(rows: Sequence[FuseTiming], pass_names: Sequence[str] = ("fwd+bwd",)) -> list[SpeedUp]:
    """Return the speed-up of each case and pass."""
    found = []
    for ours in rows:
        if ours.implementation == OURS and ours.pass_name in pass_names and ours.median_ms:
            other, time = _fastest([row for row in rows if (row.case, row.pass_name) == (ours.case, ours.pass_name)])
            passes = PASS_NAMES[ours.pass_name]
            found.append(
                SpeedUp("fuse", case_name(ours), passes, ours.median_ms, ours.floor_ms, other, time, group=ours.group)
            )
    return found


def behind(found: Iterable[SpeedUp]) -> list[SpeedUp]:
    """Return the workloads in which another implementation is faster, the worst first."""
    slower = [one for one in found if one.factor is not None and one.factor < SAME]
    return sorted(slower, key=lambda one: one.factor or 0.0)


def slower_variants(rows: Sequence[GalleryTiming]) -> Mapping[str, dict[str, float]]:
    """Return the gallery variants that are faster without `fuse`: XLA's time over the fused time, by pass."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        if row.speed_up is not None and row.speed_up < SAME:
            found.setdefault(row.variant, {})[PASS_NAMES[row.pass_name]] = row.speed_up
    return found
