"""Plots of `long_context.py`, for light and dark pages: losses, and times by the number of devices."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import matplotlib
import numpy as np
from long_context_model import Settings
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True)
class Theme:
    """The colours of one kind of page.

    Attributes:
        suffix: the end of a file's name.
        page, ink, grid: colours of the background, of text, and of grid lines.
        series: colours of the curves, in order.
    """

    suffix: str
    page: str
    ink: str
    grid: str
    series: tuple[str, ...]

    @property
    def settings(self) -> dict[str, Any]:
        """The settings for Matplotlib."""
        texts = ("axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "text.color", "xtick.color", "ytick.color")
        pages = ("axes.facecolor", "figure.facecolor", "savefig.facecolor")
        return {
            **dict.fromkeys(texts, self.ink),
            **dict.fromkeys(pages, self.page),
            "axes.grid": True,
            "axes.spines.right": False,
            "axes.spines.top": False,
            "axes.titlelocation": "left",
            "font.size": 8.5,
            "grid.color": self.grid,
            "legend.frameon": False,
        }


# Colours that colour-blind readers can tell apart.
LIGHT = Theme("", "#ffffff", "#1f2328", "#dfe3e8", ("#0072B2", "#E69F00", "#009E73"))
DARK = Theme("-dark", "#0d1117", "#e6edf3", "#2a313a", ("#56B4E9", "#E69F00", "#009E73"))


def new_figure(title: str, below: str) -> tuple[Figure, Any]:
    """Return a figure that needs no window system, and its axes under a title and a sentence."""
    figure = Figure(figsize=(6.4, 3.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.add_subplot()
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    axis.set_title(below, fontsize=7.5)
    return figure, axis


def draw_losses(trainings: Sequence[Any], settings: Settings, device: str, theme: Theme) -> Figure:
    """Draw the losses of the trainings, each as a moving average over steps."""
    figure, axis = new_figure(
        "Sparse and dense attention, equal parameters",
        f"Training loss in bits per byte, contexts of {settings.context:,} bytes; MoBA sees {settings.top_k} blocks of "
        f"{settings.block_size} keys.\n{device}, jax {jax.__version__}",
    )
    styles = {
        "moba": {"linewidth": 2.4, "color": theme.series[0]},
        "dense": {"linewidth": 1.4, "color": theme.ink, "linestyle": "--"},
    }
    width = max(1, settings.steps // 40)
    for training in trainings:
        bits = np.asarray(training.losses) / math.log(2.0)
        smooth = np.convolve(bits, np.ones(width) / width, mode="valid")
        steps = np.arange(len(smooth)) + (width + 1) / 2
        axis.plot(steps, smooth, label=training.attention, **styles[training.attention])
    axis.set_xlabel("training step")
    axis.legend()
    return figure


def draw_scaling(trainings: Sequence[Any], settings: Settings, kind: str, theme: Theme) -> Figure:
    """Draw the time of a step by the number of devices, and the time under perfect scaling."""
    figure, axis = new_figure(
        "A training step over several devices",
        f"Milliseconds, {settings.batch_size} x {settings.context:,} tokens. Dashed: the first number of devices, "
        f"scaled perfectly.\n{kind}, jax {jax.__version__}",
    )
    labels = {"moba": "with MoBA", "dense": "with dense attention", "none": "without attention"}
    for color, attention in zip(theme.series, dict.fromkeys(x.attention for x in trainings), strict=False):
        found = [x for x in trainings if x.attention == attention and x.step_ms is not None]
        counts, times = np.asarray([x.devices for x in found]), np.asarray([x.step_ms for x in found])
        axis.plot(counts, times, "o-", color=color, linewidth=2.0, label=labels[attention])
        axis.plot(counts, times[:1] * counts[:1] / counts, "--", color=color, linewidth=1.0)
        axis.set_xticks(counts, [str(count) for count in counts])
    axis.set_xlabel("devices that share the sequence")
    axis.set_ylim(bottom=0)
    axis.legend()
    return figure


def save_picture(draw: Callable[[Theme], Figure], path: Path) -> list[Path]:
    """Draw a picture in both themes, the dark one as `NAME-dark.png`; create missing folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    paths = [path.with_stem(path.stem + theme.suffix) for theme in (LIGHT, DARK)]
    for theme, file in zip((LIGHT, DARK), paths, strict=True):
        with matplotlib.rc_context(theme.settings):
            draw(theme).savefig(file)
    return paths
