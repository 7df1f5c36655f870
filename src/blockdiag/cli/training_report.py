"""Training of the demos' models with progress bars, and plots and CSV files of their losses."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from blockdiag.demo import language_model
from blockdiag.demo.language_model import Settings, Training
from blockdiag.demo.records import LossRow, read_table, where_of, write_table


def train_with_progress(
    console: Console, settings: Settings, make_models: Mapping[str, Callable[[], Any]]
) -> dict[str, Training]:
    """Train the model that each function makes, with a progress bar for each."""
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


def draw_losses(trainings: Mapping[str, Training]) -> Any:
    """Draw the training losses of all models over their steps, in bits per byte."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 3.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.add_subplot()
    # The first curve is wide and the second one thin, so that both stay visible when they coincide.
    for (name, training), width in zip(trainings.items(), (5.0, 1.2), strict=True):
        bits = [loss / math.log(2.0) for loss in training.losses]
        label = f"{name}, {training.tokens_per_second:,.0f} tokens/s"
        axis.plot(range(1, len(bits) + 1), bits, linewidth=width, label=label)
    axis.set_xlabel("training step")
    axis.set_ylabel("bits per byte")
    axis.grid(alpha=0.4)
    axis.legend(frameon=False)
    return figure


def save_plot(trainings: Mapping[str, Training], path: Path) -> None:
    """Save the plot of `draw_losses`; missing folders are created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draw_losses(trainings).savefig(path)


def write_losses(trainings: Mapping[str, Training], demo: str, device: jax.Device, path: Path) -> None:
    """Write one row per step of every model; they replace rows of the same demo that the file already holds."""
    columns = [field.name for field in dataclasses.fields(LossRow)]
    kept = [row for row in (read_table(path, columns) if path.exists() else []) if row["demo"] != demo]
    where = where_of(device)
    rows = [
        dataclasses.asdict(LossRow(demo=demo, attention=name, step=step, loss=loss, **where))
        for name, training in trainings.items()
        for step, loss in enumerate(training.losses, start=1)
    ]
    write_table(path, columns, [*kept, *rows])
