"""Figures drawn from the benchmark's CSV rows: small PNG files in colours that colour-blind readers can tell apart."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blockdiag.bench.records import ErrorRow, Timing

# Okabe and Ito's palette. Position and labels carry the identity; colour only groups.
_OURS, _JAX, _TORCH, _FLOOR = "#0072B2", "#E69F00", "#999999", "#D55E00"
_OUR_NAMES = ("triton", "pallas", "xla", "triton-torch", "triton-rope-apart")
LABELS = {
    "triton": "blockdiag (JAX)",
    "pallas": "blockdiag Pallas (JAX)",
    "xla": "blockdiag XLA (JAX)",
    "triton-torch": "blockdiag (torch launch)",
    "triton-rope-apart": "blockdiag, rotary apart",
    "torch-fa2": "FlashAttention 2 (SDPA)",
    "torch-cudnn": "cuDNN (SDPA)",
    "torch-efficient": "mem-efficient (SDPA)",
    "torch-varlen": "varlen_attn (torch)",
    "torch-flex-64": "FlexAttention, 64",
    "torch-flex-128": "FlexAttention, 128",
    "jax-einsum": "einsum (XLA)",
    "jax-cudnn": "jax.nn cuDNN",
}


def new_figure(columns: int, width: float, height: float) -> tuple[Any, list[Any]]:
    """A figure drawn without any window system, and its axes side by side."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(1, columns, index + 1) for index in range(columns)]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    return figure, axes


def _colour(name: str) -> str:
    if name in _OUR_NAMES:
        return _OURS
    return _JAX if name.startswith("jax-") else _TORCH


def draw_case(rows: Sequence[Timing], path: Path) -> None:
    """Times of one case, forward and backward side by side, with the floor as a line; lower is better.

    Raises:
        ValueError: when no row of the case holds a time.
    """
    measured = [row for row in rows if row.median_ms is not None]
    if not measured:
        raise ValueError("`rows` hold no measured time; nothing can be drawn")
    figure, axes = new_figure(2, 8.0, 0.9 + 0.28 * len({row.implementation for row in measured}))
    order = sorted({row.implementation for row in measured}, key=lambda name: _total(measured, name), reverse=True)
    for axis, pass_name in zip(axes, ("fwd", "bwd"), strict=True):
        found = {row.implementation: row for row in measured if row.pass_name == pass_name}
        times = [found[name].median_ms if name in found else 0.0 for name in order]
        axis.barh([LABELS.get(name, name) for name in order], times, color=[_colour(name) for name in order])
        for height, name in enumerate(order):
            axis.annotate(
                f" {found[name].median_ms:.2f}" if name in found else " not run",
                (times[height], height),
                va="center",
                fontsize=7,
            )
        floor = next((row.floor_ms for row in found.values() if row.floor_ms), None)
        if floor is not None:
            axis.axvline(floor, color=_FLOOR, linestyle="--", linewidth=1, label="bytes at copy bandwidth")
        axis.margins(x=0.16)
        axis.set_title(f"{measured[0].case}: {pass_name}, ms", fontsize=9, loc="left")
    axes[1].tick_params(labelleft=False)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=7, frameon=False, loc="outside upper right")
    figure.supxlabel(_caption(measured[0]), fontsize=7)
    figure.savefig(path, dpi=110)


def _total(rows: Sequence[Timing], name: str) -> float:
    """What bars are ordered by: the whole time, or the forward's where that is all there is."""
    times = {row.pass_name: row.median_ms or 0.0 for row in rows if row.implementation == name}
    return times.get("fwd+bwd") or times.get("fwd", 0.0) + times.get("bwd", 0.0)


def _caption(row: Timing | ErrorRow) -> str:
    return f"{row.device}, driver {row.driver}, jax {row.jax}, torch {row.torch}, triton {row.triton}, {row.date}"


def draw_floor(rows: Sequence[Timing], path: Path, implementation: str = "triton") -> None:
    """Time over floor of one implementation in every case: 1 is a copy's bandwidth.

    Raises:
        ValueError: when it was measured nowhere.
    """
    mine = [row for row in rows if row.implementation == implementation and row.ratio_to_floor is not None]
    if not mine:
        raise ValueError(f"`rows` hold no measured time of {implementation!r}; nothing can be drawn")
    cases = list(dict.fromkeys(row.case for row in mine))
    figure, (axis,) = new_figure(1, 6.5, 0.9 + 0.42 * len(cases))
    for shift, pass_name, colour in ((0.2, "fwd", _OURS), (-0.2, "bwd", _JAX)):
        found = {row.case: row.ratio_to_floor for row in mine if row.pass_name == pass_name}
        heights = [index + shift for index, case in enumerate(reversed(cases)) if case in found]
        values = [found[case] for case in reversed(cases) if case in found]
        axis.barh(heights, values, height=0.38, color=colour, label=pass_name)
        for height, value in zip(heights, values, strict=True):
            axis.annotate(f" {value:.3f}", (value, height), va="center", fontsize=7)
    axis.set_yticks(range(len(cases)), list(reversed(cases)))
    axis.axvline(1.0, color=_FLOOR, linestyle="--", linewidth=1)
    axis.set_title(f"{LABELS.get(implementation, implementation)}: time over floor", fontsize=9, loc="left")
    axis.legend(fontsize=7, frameon=False, loc="lower left", bbox_to_anchor=(1.0, 0.0))
    axis.margins(x=0.08)
    figure.supxlabel(_caption(mine[0]), fontsize=7)
    figure.savefig(path, dpi=110)


def draw_errors(rows: Sequence[ErrorRow], path: Path) -> None:
    """Mean error of each tensor against float64, one group of bars per tensor, one panel per case.

    Raises:
        ValueError: when no row holds an error.
    """
    measured = [row for row in rows if row.mean_error is not None]
    if not measured:
        raise ValueError("`rows` hold no measured error; nothing can be drawn")
    cases = list(dict.fromkeys(row.case for row in measured))[:4]
    figure, axes = new_figure(len(cases), 2.6 * len(cases) + 1.0, 2.8)
    palette = (_OURS, _TORCH, _JAX, _FLOOR, "#009E73", "#CC79A7")
    names = list(dict.fromkeys(row.implementation for row in measured))
    for axis, case in zip(axes, cases, strict=True):
        mine = [row for row in measured if row.case == case]
        tensors = list(dict.fromkeys(row.tensor for row in mine))
        here = [name for name in names if any(row.implementation == name for row in mine)]
        for index, name in enumerate(here):
            errors = {row.tensor: row.mean_error for row in mine if row.implementation == name}
            values = [errors.get(tensor) or 0.0 for tensor in tensors]
            offsets = [place + (index - (len(here) - 1) / 2) * 0.8 / len(here) for place in range(len(tensors))]
            colour = palette[names.index(name) % len(palette)]
            axis.bar(offsets, values, width=0.8 / len(here), color=colour, label=LABELS.get(name, name))
        axis.set_xticks(range(len(tensors)), tensors)
        axis.set_title(case, fontsize=9, loc="left")
    axes[0].set_ylabel("mean error against float64", fontsize=8)
    handles = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), fontsize=7, frameon=False, loc="outside right upper")
    figure.supxlabel(_caption(measured[0]), fontsize=7)
    figure.savefig(path, dpi=110)


def draw_all(timings: Sequence[Timing], errors: Sequence[ErrorRow], folder: Path) -> list[Path]:
    """Every figure that the rows allow; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for case in dict.fromkeys(row.case for row in timings if row.median_ms is not None):
        paths.append(folder / f"block_diagonal_{case}.png")
        draw_case([row for row in timings if row.case == case], paths[-1])
    if any(row.implementation == "triton" and row.ratio_to_floor is not None for row in timings):
        paths.append(folder / "block_diagonal_floor.png")
        draw_floor(timings, paths[-1])
    if any(row.mean_error is not None for row in errors):
        paths.append(folder / "block_diagonal_errors.png")
        draw_errors(errors, paths[-1])
    return paths
