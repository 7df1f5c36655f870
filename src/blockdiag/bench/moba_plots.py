"""Figures of MoBA by length: time and memory, both axes logarithmic, with the floor drawn in."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blockdiag.bench.plots import new_figure
from blockdiag.bench.records import MoBATiming

# Okabe and Ito's palette; what is recorded is dashed.
_STYLES: dict[str, dict[str, Any]] = {
    "triton": {"label": "blockdiag (JAX)", "color": "#0072B2", "marker": "o", "linewidth": 2},
    "torch-fa2": {"label": "FlashAttention 2, dense (SDPA)", "color": "#999999", "marker": "s"},
    "torch-cudnn": {"label": "cuDNN, dense (SDPA)", "color": "#E69F00", "marker": "^"},
    "flashmoba-measured": {
        "label": "FlashMoBA, recorded, H200", "color": "#CC79A7", "marker": "D", "linestyle": "--",
    },
    "flashmoba-published": {"label": "FlashMoBA, published", "color": "#CC79A7", "marker": "x", "linestyle": ":"},
    "moonshot-moba-published": {"label": "MoBA, published", "color": "#009E73", "marker": "x", "linestyle": ":"},
    "fa2-published": {"label": "FA2, published", "color": "#999999", "marker": "x", "linestyle": ":"},
}  # fmt: skip
_FLOOR = "#D55E00"


def usual_rows(rows: Sequence[MoBATiming]) -> list[MoBATiming]:
    """Rows of the lengths with the usual heads and blocks: 2 sequences, 16 heads of 128, block 128, top_k 8."""
    usual = (2, 16, 16, 128, 128, 8)
    return [
        row
        for row in rows
        if (row.batch, row.query_heads, row.key_heads, row.head_dim, row.block_size, row.top_k) == usual
    ]


def draw_lengths(rows: Sequence[MoBATiming], path: Path, *, field: str, title: str, caption: str) -> None:
    """`field` ("median_ms" or "peak_bytes") of forward and backward together by length, a line per implementation.

    Raises:
        ValueError: when no row of the usual cases has it.
    """
    totals = [row for row in usual_rows(rows) if row.pass_name == "fwd+bwd"]
    if not any(getattr(row, field) is not None for row in totals):
        raise ValueError(f"`rows` hold no {field} of the usual cases; nothing can be drawn")
    figure, (axis,) = new_figure(1, 6.5, 4.2)
    unit = 1.0 if field == "median_ms" else 1 / 2**30
    for name, style in _STYLES.items():
        points = sorted(
            (row.tokens, getattr(row, field) * unit)
            for row in totals
            if row.implementation == name and getattr(row, field) is not None
        )
        if points:
            axis.plot(*zip(*points, strict=True), markersize=4, **style)
    _draw_floor(axis, totals, field)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    tokens = sorted({row.tokens for row in totals})
    axis.set_xticks(tokens, [f"{count // 1024}K" for count in tokens])
    axis.set_xlabel("tokens of a sequence", fontsize=8)
    axis.set_title(title, fontsize=9, loc="left")
    axis.grid(alpha=0.3, which="both", linewidth=0.5)
    axis.legend(fontsize=7, frameon=False)
    figure.supxlabel(caption, fontsize=7)
    figure.savefig(path, dpi=110)


def _draw_floor(axis: Any, totals: Sequence[MoBATiming], field: str) -> None:
    """The least time that arithmetic and traffic take, or the memory of inputs and outputs alone."""
    if field == "median_ms":
        points = {row.tokens: row.floor_ms for row in totals if row.floor_ms is not None}
        label = "floor: useful products and bytes"
    else:
        points = {
            row.tokens: (row.peak_bytes - row.extra_bytes) / 2**30
            for row in totals
            if row.peak_bytes is not None and row.extra_bytes is not None
        }
        label = "floor: inputs and outputs"
    if points:
        axis.plot(*zip(*sorted(points.items()), strict=True), color=_FLOOR, linestyle="--", linewidth=1, label=label)


def draw_passes(rows: Sequence[MoBATiming], path: Path, *, caption: str, implementation: str = "triton") -> None:
    """Routing, rest of the forward, and backward of every case of one implementation, stacked, beside its floor.

    Raises:
        ValueError: when no case has all three.
    """
    mine = {(row.case, row.pass_name): row for row in rows if row.implementation == implementation}
    cases = [
        case
        for case in dict.fromkeys(case for case, _ in mine)
        if all((case, one) in mine and mine[case, one].median_ms is not None for one in ("routing", "fwd", "bwd"))
    ]
    if not cases:
        raise ValueError(f"`rows` hold no case of {implementation!r} with all passes; nothing can be drawn")
    cases.sort(key=lambda case: -(mine[case, "fwd"].median_ms or 0.0))
    figure, (axis,) = new_figure(1, 6.5, 0.9 + 0.3 * len(cases))
    times = {case: {one: mine[case, one].median_ms or 0.0 for one in ("routing", "fwd", "bwd")} for case in cases}
    parts = (
        ("routing", "#E69F00", [times[case]["routing"] for case in cases]),
        ("attention forward", "#0072B2", [max(0.0, times[case]["fwd"] - times[case]["routing"]) for case in cases]),
        ("backward", "#56B4E9", [times[case]["bwd"] for case in cases]),
    )
    left = [0.0] * len(cases)
    for label, colour, widths in parts:
        axis.barh(cases, widths, left=left, color=colour, label=label, height=0.65)
        left = [begin + width for begin, width in zip(left, widths, strict=True)]
    for height, (case, width) in enumerate(zip(cases, left, strict=True)):
        floor = mine[case, "fwd"].floor_ms, mine[case, "bwd"].floor_ms
        text = f" {width:.1f}" if None in floor else f" {width:.1f}  (floor {sum(one or 0.0 for one in floor):.1f})"
        axis.annotate(text, (width, height), va="center", fontsize=7)
    axis.margins(x=0.3)
    axis.set_title("blockdiag, ms: forward and backward", fontsize=9, loc="left")
    axis.legend(fontsize=7, frameon=False, loc="upper right")
    figure.supxlabel(caption, fontsize=7)
    figure.savefig(path, dpi=110)


def draw_moba(rows: Sequence[MoBATiming], folder: Path) -> list[Path]:
    """Every figure that the rows allow; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    measured = [row for row in rows if row.implementation in ("triton", "torch-fa2", "torch-cudnn")]
    timed = [row for row in measured if row.median_ms is not None]
    if not timed:
        return []
    row = timed[0]
    caption = f"{row.device}, driver {row.driver}, jax {row.jax}, torch {row.torch}, triton {row.triton}, {row.date}"
    paths = []
    usual = "B2 N16 H128, block 128, top_k 8, causal, bfloat16"
    for field, name, what in (
        ("median_ms", "moba_latency.png", "forward and backward, ms"),
        ("peak_bytes", "moba_memory.png", "device memory, GiB"),
    ):
        if any(getattr(row, field) is not None and row.pass_name == "fwd+bwd" for row in usual_rows(timed)):
            paths.append(folder / name)
            draw_lengths(rows, paths[-1], field=field, title=f"{what}   ({usual})", caption=caption)
    complete = {row.case for row in timed if row.implementation == "triton"}
    if any({"routing", "fwd", "bwd"} <= {r.pass_name for r in timed if r.case == case} for case in complete):
        paths.append(folder / "moba_passes.png")
        draw_passes(timed, paths[-1], caption=caption)
    return paths
