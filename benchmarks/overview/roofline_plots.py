"""Roofline plot: the rate of every operation by its arithmetic intensity, under the roofs measured in the same runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.block_diagonal.cases import CASES
from benchmarks.harness.plot_style import NothingToDraw, Theme, caption_of, frame, legend_above, log_axis, new_figure
from benchmarks.harness.records import FuseTiming, MoBATiming, PagedTiming, Timing
from benchmarks.paged.report import NATIVE

OURS = "triton"
# TB/s and dense bfloat16 TFLOP/s from data sheets, by device name.
NOMINAL = {"NVIDIA H200": (4.8, 989.0)}


@dataclass(frozen=True)
class Point:
    """A measured pass.

    Attributes:
        series: the operation.
        intensity: useful FLOP per compulsory byte.
        tflops: useful TFLOP over the measured time.
        is_backward: whether the pass includes gradients.
    """

    series: str
    intensity: float
    tflops: float
    is_backward: bool


def block_diagonal_points(rows: Sequence[Timing]) -> list[Point]:
    """Count two products forward and five backward for each query and each key of its block."""
    points = []
    for row in rows:
        if row.implementation == OURS and row.pass_name in ("fwd", "bwd") and row.median_ms and row.case in CASES:
            case = CASES[row.case]
            pairs = int((case.tiles.lengths**2).sum()) * case.query_heads
            flop = 2.0 * {"fwd": 2, "bwd": 5}[row.pass_name] * case.head_dim * pairs
            moved = case.floor_bytes("fwd" if row.pass_name == "fwd" else "bwd")
            tflops = flop / row.median_ms / 1e9
            points.append(Point("block diagonal", flop / moved, tflops, row.pass_name == "bwd"))
    return points


def counted_points(rows: Sequence[MoBATiming] | Sequence[FuseTiming], series: str) -> list[Point]:
    """Return the points of rows that record their useful FLOP and compulsory bytes."""
    return [
        Point(
            series,
            1e3 * row.useful_tflop / row.useful_gb,
            1e3 * row.useful_tflop / row.median_ms,
            row.pass_name != "fwd",
        )
        for row in rows
        if row.implementation == OURS
        and row.pass_name in ("fwd", "bwd", "fwd+bwd")
        and row.median_ms
        and row.useful_tflop
        and row.useful_gb
        # Both passes together add nothing to forward and backward.
        and not (series == "MoBA" and row.pass_name == "fwd+bwd")
    ]


def paged_points(rows: Sequence[PagedTiming]) -> list[Point]:
    """Count two products for each query and each key of its sequence."""
    points = []
    for row in rows:
        if row.implementation == NATIVE and row.group in ("decode", "speculative") and row.median_us and row.read_gb:
            pairs = row.batch * row.kv_length * row.query_tokens * row.query_heads
            flop = 4.0 * row.head_dim * pairs
            points.append(Point("paged decode", flop / row.read_gb / 1e9, flop / row.median_us / 1e6, False))
    return points


def draw_roofline(
    blocks: Sequence[Timing],
    moba: Sequence[MoBATiming],
    paged: Sequence[PagedTiming],
    fused: Sequence[FuseTiming],
    theme: Theme,
) -> Any:
    """Draw TFLOP/s over FLOP per byte, both axes logarithmic; filled marks are forward, hollow ones backward.

    Raises:
        NothingToDraw: if the rows have no measured roofs.
    """
    copies = [row.copy_gb_per_s / 1e3 for row in (*blocks, *moba, *fused) if row.copy_gb_per_s]
    products = [row.matmul_tflops for row in (*blocks, *moba, *fused) if row.matmul_tflops]
    reads = [row.read_tb_per_s for row in paged if row.read_tb_per_s]
    if not copies or not products:
        raise NothingToDraw("`rows` hold no measured rates of copies and products; nothing can be drawn")
    copy, product = max(copies), max(products)
    points = [
        *block_diagonal_points(blocks),
        *counted_points(moba, "MoBA"),
        *paged_points(paged),
        *counted_points(fused, "fuse"),
    ]
    first = next(row for row in (*blocks, *moba, *fused) if row.copy_gb_per_s)
    figure, (axis,) = new_figure(1, 9.0, 5.2)
    frame(
        figure,
        "Roofline",
        below="Useful TFLOP/s by useful FLOP for each compulsory byte. The roofs are the highest that the "
        "benchmarks' own runs measured; the rate of reading alone is a little above that of a copy.",
        note=f"bfloat16 queries. {caption_of(first)}",
    )
    low, high = 2.0, 2e4
    _draw_roof(axis, copy, product, (low, high), color=theme.floor, linestyle="-", linewidth=1.8,
               label=f"measured: copy {copy:.2f} TB/s, products {product:.0f} TFLOP/s")  # fmt: skip
    if reads:
        rate = max(reads)
        _draw_roof(axis, rate, product, (low, product / rate), color=theme.floor, linestyle="--", linewidth=1.2,
                   label=f"measured: reading {rate:.2f} TB/s")  # fmt: skip
    if first.device in NOMINAL:
        rate, peak = NOMINAL[first.device]
        _draw_roof(axis, rate, peak, (low, high), color=theme.muted, linestyle=":", linewidth=1.2,
                   label=f"data sheet: {rate} TB/s, {peak:.0f} TFLOP/s")  # fmt: skip
    styles = {
        "block diagonal": (theme.ours, "o"),
        "paged decode": (theme.series[2], "v"),
        "MoBA": (theme.series[1], "D"),
        "fuse": (theme.series[3], "s"),
    }
    for series, (color, marker) in styles.items():
        for is_backward in (False, True):
            found = [one for one in points if one.series == series and one.is_backward == is_backward]
            if found:
                axis.plot(
                    [one.intensity for one in found],
                    [one.tflops for one in found],
                    color=color,
                    marker=marker,
                    fillstyle="none" if is_backward else "full",
                    linestyle="none",
                    label=f"{series}, {_pass_label(series, is_backward)}",
                )
    axis.set_xlim(low, high)
    axis.set_ylim(8, 1300)
    log_axis(axis, "x", subs=(1.0, 2.0, 5.0))
    log_axis(axis, "y", subs=(1.0, 2.0, 5.0))
    axis.set_xlabel("FLOP per byte")
    axis.set_ylabel("TFLOP/s")
    axis.grid()
    legend_above(figure, [axis], columns=3)
    return figure


def _pass_label(series: str, is_backward: bool) -> str:
    if not is_backward:
        return "forward"
    return "forward and backward" if series == "fuse" else "backward"


def _draw_roof(axis: Any, rate: float, peak: float, ends: tuple[float, float], **style: Any) -> None:
    """Draw the slope of a bandwidth in TB/s up to a peak in TFLOP/s, and the peak beyond."""
    corners = sorted({ends[0], min(peak / rate, ends[1]), ends[1]})
    axis.plot(corners, [min(rate * one, peak) for one in corners], **style)
