"""Pictures of MoBA: time and memory by length, both axes logarithmic, with the floor drawn in; and time by pass."""

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.harness.plot_style import (
    LOOKS,
    NothingToDraw,
    Theme,
    caption_of,
    frame,
    legend_above,
    log_axis,
    marks,
    new_figure,
    size_axis,
    size_name,
)
from benchmarks.harness.records import MoBATiming

OURS = "triton"
SHOWN = (
    "triton",
    "torch-fa2",
    "torch-cudnn",
    "flashmoba-measured",
    "flashmoba-published",
    "moonshot-moba-published",
    "fa2-published",
)
USUAL = "16 heads of 128, blocks of 128, top_k 8, causal, bfloat16"


def usual_rows(rows: Iterable[MoBATiming]) -> list[MoBATiming]:
    """Rows of the lengths with the usual heads and blocks: 16 heads of 128, block 128, top_k 8."""
    usual = (16, 16, 128, 128, 8)
    return [row for row in rows if (row.query_heads, row.key_heads, row.head_dim, row.block_size, row.top_k) == usual]


def draw_lengths(rows: Sequence[MoBATiming], theme: Theme) -> Any:
    """Time and memory of forward and backward together by length, for one sequence, a line per implementation.

    Raises:
        NothingToDraw: when no row of the usual cases has a time of this library.
    """
    totals = [row for row in usual_rows(rows) if row.pass_name == "fwd+bwd" and row.implementation in SHOWN]
    ours = [row for row in totals if row.implementation == OURS and row.median_ms is not None]
    if not ours:
        raise NothingToDraw(f"`rows` hold no time of {OURS!r} in the usual cases; nothing can be drawn")
    figure, axes = new_figure(2, 9.0, 5.0)
    frame(
        figure,
        "MoBA by length",
        below=f"Forward and backward of one sequence; {USUAL}. Up to 128K tokens two sequences were measured and "
        "halved, above one. Other GPUs and dtypes where it says published.",
        note=caption_of(ours[0]),
    )
    times = {(row.implementation, row.tokens): row.median_ms / row.batch for row in totals if row.median_ms is not None}
    gib = {
        (row.implementation, row.tokens): row.peak_bytes / row.batch / 2**30
        for row in totals
        if row.peak_bytes is not None
    }
    floors = {row.tokens: row.floor_ms / row.batch for row in ours if row.floor_ms is not None}
    arrays = {
        row.tokens: (row.peak_bytes - row.extra_bytes) / row.batch / 2**30
        for row in ours
        if row.peak_bytes is not None and row.extra_bytes is not None
    }
    panels = ((axes[0], times, floors, "time, ms"), (axes[1], gib, arrays, "device memory, GiB"))
    for axis, values, floor, title in panels:
        for name in SHOWN:
            points = sorted((tokens, value) for (one, tokens), value in values.items() if one == name)
            if points:
                look = LOOKS[name]
                axis.plot(*zip(*points, strict=True), linestyle=look.line, linewidth=look.width, **marks(name, theme))
        if floor:
            label = "floor: useful products and bytes; inputs and outputs"
            axis.plot(*zip(*sorted(floor.items()), strict=True), color=theme.floor, linestyle="--", label=label)
        size_axis(axis, sorted({row.tokens for row in totals}))
        log_axis(axis, "y")
        axis.set_title(title)
        axis.set_xlabel("tokens of a sequence")
        axis.grid(which="major")
    legend_above(figure, axes, columns=3)
    return figure


def draw_passes(rows: Sequence[MoBATiming], theme: Theme) -> Any:
    """Routing, rest of the forward, and backward of every case of this library, stacked, with the floor marked.

    Raises:
        NothingToDraw: when no case has all three.
    """
    mine = {(row.case, row.pass_name): row for row in rows if row.implementation == OURS and row.median_ms is not None}
    parts = ("routing", "fwd", "bwd")
    cases = [case for case in dict.fromkeys(case for case, _ in mine) if all((case, one) in mine for one in parts)]
    if not cases:
        raise NothingToDraw(f"`rows` hold no case of {OURS!r} with all passes; nothing can be drawn")
    times = {case: [(mine[case, one].median_ms or 0.0) / mine[case, one].batch for one in parts] for case in cases}
    totals = {case: times[case][1] + times[case][2] for case in cases}
    cases.sort(key=lambda case: -totals[case])
    figure, (axis,) = new_figure(1, 9.0, 1.5 + 0.24 * len(cases))
    frame(
        figure,
        "MoBA: where the time goes",
        below="Shares of forward and backward; then the time of both for one sequence, and how many times the floor.",
        note=f"causal, bfloat16, medians. {caption_of(mine[cases[0], 'fwd'])}",
    )
    widths = (
        ("routing", theme.series[1], [times[case][0] / totals[case] for case in cases]),
        ("attention, forward", theme.ours, [(times[case][1] - times[case][0]) / totals[case] for case in cases]),
        ("attention, backward", theme.ours_too, [times[case][2] / totals[case] for case in cases]),
    )
    names = [_case_name(mine[case, "fwd"]) for case in cases]
    left = [0.0] * len(cases)
    for label, colour, width in widths:
        axis.barh(names, width, left=left, color=colour, label=label, height=0.68)
        left = [begin + more for begin, more in zip(left, width, strict=True)]
    for height, case in enumerate(cases):
        floors = [mine[case, one].floor_ms for one in ("fwd", "bwd")]
        known = [floor / mine[case, "fwd"].batch for floor in floors if floor is not None]
        text = f"{totals[case]:.1f} ms" + (f", {totals[case] / sum(known):.1f}x" if len(known) == 2 else "")
        axis.annotate(text, (1.015, height), va="center", fontsize=7.5, color=theme.ours, annotation_clip=False)
    axis.set_xlim(0, 1)
    axis.xaxis.set_major_formatter(lambda value, place: f"{value:.0%}")
    axis.margins(y=0.02)
    axis.tick_params(axis="y", length=0)
    legend_above(figure, [axis], columns=3)
    return figure


def _case_name(row: MoBATiming) -> str:
    heads = f"{row.query_heads} heads of {row.head_dim}"
    if row.key_heads != row.query_heads:
        heads += f" ({row.key_heads} of keys)"
    return f"{size_name(row.tokens)}, {heads}, block {row.block_size}, top_k {row.top_k}"
