"""The figure of fused functions: times of every implementation by case, forward and both passes side by side."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blockdiag.bench.fuse_cases import FUSE_CASES, FUSE_PASSES
from blockdiag.bench.fuse_targets import OURS
from blockdiag.bench.plots import new_figure
from blockdiag.bench.records import FuseTiming

# Okabe and Ito's palette; markers tell the implementations apart without it.
_STYLES: dict[str, dict[str, Any]] = {
    "jax-jit": {"label": "jax.jit (XLA)", "color": "#E69F00", "marker": "s"},
    "torch-compile": {"label": "torch.compile", "color": "#999999", "marker": "^"},
    "jax-cudnn": {"label": "jax.nn cuDNN", "color": "#009E73", "marker": "v"},
    "torch-flex": {"label": "FlexAttention", "color": "#CC79A7", "marker": "D"},
    OURS: {"label": "blockdiag.fuse (JAX)", "color": "#0072B2", "marker": "o"},
}
_FLOOR = "#D55E00"
_TITLES = {"fwd": "forward, ms", "fwd+bwd": "forward and backward, ms"}


def draw_times(rows: Sequence[FuseTiming], path: Path, *, caption: str) -> None:
    """Milliseconds, a line per case and a mark per implementation; further left is better.

    Raises:
        ValueError: when no row holds a time.
    """
    timed = [row for row in rows if row.median_ms is not None]
    if not timed:
        raise ValueError("`rows` hold no measured time; nothing can be drawn")
    measured = {row.case for row in timed}
    cases = [name for name in FUSE_CASES if name in measured] + sorted(measured - FUSE_CASES.keys())
    figure, axes = new_figure(2, 10.0, 1.6 + 0.2 * len(cases))
    for axis, pass_name in zip(axes, FUSE_PASSES, strict=True):
        shown = [row for row in timed if row.pass_name == pass_name]
        for place, case in enumerate(cases):
            times = [row.median_ms for row in shown if row.case == case and row.median_ms is not None]
            if times:
                axis.plot([min(times), max(times)], [place, place], color="#DDDDDD", linewidth=1, zorder=1)
        for name, style in _STYLES.items():
            points = [(row.median_ms, cases.index(row.case)) for row in shown if row.implementation == name]
            if points:
                axis.plot(*zip(*points, strict=True), linestyle="none", markersize=5, **style)
        floors = {cases.index(row.case): row.floor_ms for row in shown if row.floor_ms is not None}
        if floors:
            axis.plot(
                list(floors.values()), list(floors), "|", color=_FLOOR, markersize=9, label="floor: products and bytes"
            )
        axis.set_xscale("log")
        axis.set_title(_TITLES[pass_name], fontsize=9, loc="left")
        axis.grid(alpha=0.3, axis="x", which="both", linewidth=0.5)
        axis.set_yticks(range(len(cases)), cases)
        axis.set_ylim(len(cases) - 0.4, -0.6)
        axis.tick_params(labelsize=7)
    axes[1].tick_params(labelleft=False)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=6, fontsize=7, frameon=False)
    figure.supxlabel(caption, fontsize=7)
    figure.savefig(path, dpi=110)


def draw_fuse(rows: Sequence[FuseTiming], folder: Path) -> list[Path]:
    """Every figure that the rows allow; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    timed = [row for row in rows if row.implementation == OURS and row.median_ms is not None]
    if not timed:
        return []
    row = timed[0]
    caption = f"{row.device}, driver {row.driver}, jax {row.jax}, torch {row.torch}, triton {row.triton}, {row.date}"
    path = folder / "fuse_times.png"
    draw_times([one for one in rows if one.device == row.device], path, caption=f"{caption}; bfloat16, medians")
    return [path]
