"""Trains the models of the demos under progress bars, draws their losses, and keeps them as CSV files."""

import dataclasses
import datetime
import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from blockdiag.bench.plot_style import LIGHT, save_one
from blockdiag.bench.records import read_rows, write_rows
from blockdiag.bench.training_plots import draw_losses
from blockdiag.bench.training_records import LossRow
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


def save_plot(trainings: Mapping[str, Training], demo: str, device: jax.Device, path: Path) -> None:
    """Draws the training losses of all models over their steps."""
    rows = [
        dataclasses.replace(row, attention=f"{name}, {training.tokens_per_second:,.0f} tokens/s")
        for name, training in trainings.items()
        for row in loss_rows({name: training}, demo, device)
    ]
    save_one(functools.partial(draw_losses, rows), LIGHT, path)


def where_of(device: jax.Device) -> dict[str, str]:
    """What a row says about where it was made: device, version of JAX, date."""
    return {"device": device.device_kind, "jax": jax.__version__, "date": datetime.date.today().isoformat()}


def write_losses(trainings: Mapping[str, Training], demo: str, device: jax.Device, path: Path) -> None:
    """Writes the losses of a demo over those of the same demo that the file holds."""
    older: list[LossRow] = read_rows(path, LossRow) if path.exists() else []
    kept = [row for row in older if row.demo != demo]
    write_rows(path, LossRow, [*kept, *loss_rows(trainings, demo, device)])


def loss_rows(trainings: Mapping[str, Training], demo: str, device: jax.Device) -> list[LossRow]:
    """A row per step of every model."""
    where = where_of(device)
    return [
        LossRow(demo=demo, attention=name, step=step, loss=loss, **where)
        for name, training in trainings.items()
        for step, loss in enumerate(training.losses, start=1)
    ]
