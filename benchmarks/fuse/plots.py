"""Pictures of fused functions: times over the floor by case, and the gallery's factors over XLA."""

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.fuse.cases import FUSE_CASES, FUSE_PASSES
from benchmarks.fuse.report import OURS
from benchmarks.harness.plot_style import (
    LOOKS,
    Dot,
    NothingToDraw,
    Theme,
    caption_of,
    draw_over_floor,
    frame,
    legend_above,
    log_axis,
    new_figure,
    size_name,
)
from benchmarks.harness.records import FuseTiming, GalleryTiming

_TITLES = {"fwd": "forward", "fwd+bwd": "forward and backward"}
_GROUP_NAMES = {"evoformer": "row attention", "diff": "differential", "softcap": "soft cap", "alibi": "ALiBi"}


def draw_times(rows: Sequence[FuseTiming], theme: Theme) -> Any:
    """Time over floor of every implementation in every case, forward and both passes side by side.

    Raises:
        NothingToDraw: when no row of this library holds a time and a floor.
    """
    ours = [row for row in rows if row.implementation == OURS and row.median_ms and row.floor_ms]
    if not ours:
        raise NothingToDraw(f"`rows` hold no time of {OURS!r} with its floor; nothing can be drawn")
    floors = {(row.case, row.pass_name): row.floor_ms or 1.0 for row in ours}
    names = {row.case: case_name(row) for row in ours}
    cases = [name for name in FUSE_CASES if name in names] + [name for name in names if name not in FUSE_CASES]
    # Cases of one function stand together.
    groups = list(dict.fromkeys(row.group for row in ours))
    by_case = {row.case: row.group for row in ours}
    cases.sort(key=lambda case: groups.index(by_case[case]))
    figure, axes = new_figure(2, 9.0, 1.7 + 0.215 * len(cases))
    frame(
        figure,
        "blockdiag.fuse: dense attention" if ours[0].op == "dense" else "blockdiag.fuse: kernels of plain jax.numpy",
        below="Time over the floor (dashed): the longer of what the products and the compulsory bytes take at the "
        "rates of the same run. Missing: did not fit or was not run.",
        note=f"bfloat16, medians, batch x tokens, query heads/key heads. {caption_of(ours[0])}",
    )
    for axis, pass_name in zip(axes, FUSE_PASSES, strict=True):
        dots = [
            Dot(
                names[row.case],
                row.implementation,
                row.median_ms / floors[row.case, pass_name],
                f"{row.median_ms:.2f} ms" if row.implementation == OURS else "",
            )
            for row in rows
            if row.pass_name == pass_name
            and row.median_ms is not None
            and row.implementation in LOOKS
            and (row.case, pass_name) in floors
        ]
        draw_over_floor(axis, [names[case] for case in cases], dots, theme)
        axis.set_title(_TITLES[pass_name])
    axes[1].tick_params(labelleft=False)
    legend_above(figure, axes, columns=5)
    return figure


def case_name(row: FuseTiming) -> str:
    """What a case is called in pictures and tables."""
    name = _GROUP_NAMES.get(row.group, row.group)
    if row.op == "dense":
        # The size of a window is only in the name of the case.
        window = row.case.partition("_")[0].removeprefix("window")
        name += f" of {window}" if row.group == "window" else ""
        keys = "" if row.key_heads == row.query_heads else f"/{row.key_heads}"
        return f"{name} {row.batch} x {size_name(row.tokens)}, {row.query_heads}{keys} heads of {row.head_dim}"
    if row.group == "evoformer":
        return f"{name} {row.batch} x {row.rows} x {row.tokens}, heads of {row.head_dim}"
    heads = f"heads of {row.head_dim}" if row.group == "diff" else f"{row.query_heads}/{row.key_heads}"
    return f"{name} {row.batch} x {size_name(row.tokens)}, {heads}"


def draw_gallery(rows: Sequence[GalleryTiming], theme: Theme) -> Any:
    """How many times as long XLA takes for each variant of the gallery, forward and both passes side by side.

    Raises:
        NothingToDraw: when no row has both times.
    """
    factors = {(row.variant, row.pass_name): row.speed_up for row in rows if row.speed_up is not None}
    if not factors:
        raise NothingToDraw("`rows` hold no variant with times of both; nothing can be drawn")
    best = {variant: max(x for (one, _), x in factors.items() if one == variant) for variant, _ in factors}
    variants = sorted(best, key=lambda variant: factors.get((variant, "fwd"), best[variant]))
    figure, (axis,) = new_figure(1, 9.0, 1.6 + 0.135 * len(variants))
    medians = [
        f"{title} {statistics.median([x for (_, one), x in factors.items() if one == name]):.1f}x"
        for name, title in _TITLES.items()
        if any(one == name for _, one in factors)
    ]
    frame(
        figure,
        f"Gallery of {len(variants)} attention variants: times faster than jax.jit",
        below=f"XLA's time for the function as it stands over that of the fused one. Medians: {', '.join(medians)}.",
        note=f"{rows[0].dtype}, medians of both in one process. {caption_of(rows[0])}",
    )
    styles = (("fwd", theme.ours, "o"), ("fwd+bwd", theme.series[1], "D"))
    for place, variant in enumerate(variants):
        ends = [factors[variant, name] for name, *_ in styles if (variant, name) in factors]
        axis.plot([min(1.0, *ends), max(1.0, *ends)], [place, place], color=theme.faint, linewidth=1, zorder=1)
    for name, colour, marker in styles:
        points = [
            (factors[variant, name], place) for place, variant in enumerate(variants) if (variant, name) in factors
        ]
        if points:
            arguments = {"color": colour, "marker": marker, "markersize": 4.5, "linestyle": "none"}
            axis.plot(*zip(*points, strict=True), label=_TITLES[name], **arguments)
    axis.axvline(1.0, color=theme.floor, linestyle="--", linewidth=1.2, label="as fast as XLA")
    log_axis(axis, "x", subs=(1.0, 2.0, 5.0), unit="x")
    axis.set_yticks(range(len(variants)), variants)
    axis.tick_params(axis="y", labelsize=6.5, length=0)
    axis.set_ylim(-0.8, len(variants) - 0.2)
    axis.grid(axis="x")
    legend_above(figure, [axis], columns=3)
    return figure
