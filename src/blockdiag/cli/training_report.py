"""Trains the models of the demos under progress bars, and draws their losses."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from blockdiag.cli import language_model
from blockdiag.cli.language_model import Settings, Training


def train_with_progress(
    console: Console, settings: Settings, make_models: Mapping[str, Callable[[], Any]]
) -> dict[str, Training]:
    """Trains what each function makes, under a progress bar for each."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(),
    )
    trainings = {}
    with Progress(*columns, console=console) as progress:
        for name, make_model in make_models.items():
            task = progress.add_task(name, total=settings.steps, loss=math.nan)

            def advance(loss: float, task=task) -> None:
                progress.update(task, advance=1, loss=loss)

            trainings[name] = language_model.train_model(make_model(), settings, on_step=advance)
    return trainings


def save_plot(trainings: dict[str, Training], path: Path) -> None:
    """Draws the training losses of all models over their steps."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    # The first curve is wide and the second one dashed, because curves that agree lie on each other.
    styles: tuple[dict[str, Any], ...] = (
        {"linewidth": 4, "color": "#9ecae1"},
        {"linewidth": 1.2, "color": "#08306b", "linestyle": "--"},
    )
    for (name, training), style in zip(trainings.items(), styles, strict=True):
        bits = [loss / math.log(2.0) for loss in training.losses]
        axes.plot(range(1, len(bits) + 1), bits, label=f"{name}, {training.tokens_per_second:,.0f} tokens/s", **style)
    axes.set_xlabel("training step")
    axes.set_ylabel("training loss [bits per byte]")
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
