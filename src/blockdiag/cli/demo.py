"""`python -m blockdiag demo`: train a small language model with block-diagonal attention and compare it with JAX."""

import dataclasses
import enum
import functools
from pathlib import Path
from typing import Annotated

import jax
import typer
from rich.console import Console
from rich.table import Table

from blockdiag.cli.demo_moba import run_moba_demo
from blockdiag.cli.training_report import save_plot, train_with_progress, write_losses
from blockdiag.demo import language_model
from blockdiag.demo.language_model import AttentionFunction, LanguageModel, Settings, Training

OURS = "block_diagonal_attention"
BASELINE = "jax.nn.dot_product_attention"

CPU_SETTINGS = Settings()
GPU_SETTINGS = Settings(steps=300, batch_size=16, sequence_length=1024, width=256, heads=4, layers=4, dtype="bfloat16")


class DeviceKind(enum.StrEnum):
    """The device that the demo runs on."""

    AUTO = "auto"
    CPU = "cpu"
    GPU = "gpu"


class AttentionKind(enum.StrEnum):
    """The attention of the model."""

    BLOCK_DIAGONAL = "block_diagonal"
    MOBA = "moba"


@dataclasses.dataclass(frozen=True, slots=True)
class Tolerance:
    """The largest allowed difference between the held-out losses of the two attentions, in nats per byte.

    Attributes:
        same_weights: for one set of trained weights, where only the rounding of one forward pass differs.
        trained_apart: for weights from separate trainings, where differences in rounding grow with every step.
    """

    same_weights: float
    trained_apart: float


TOLERANCES = {"float32": Tolerance(1e-5, 1e-3), "bfloat16": Tolerance(5e-3, 3e-2)}


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """A difference in nats per byte, and the largest one that rounding may explain."""

    name: str
    difference: float
    tolerance: float

    @property
    def passed(self) -> bool:
        # Written so that NaN does not pass.
        return self.difference <= self.tolerance


def demo(
    attention: Annotated[
        AttentionKind, typer.Option(help="Attention of the model, compared with one that JAX has.")
    ] = AttentionKind.BLOCK_DIAGONAL,
    steps: Annotated[
        int | None, typer.Option(min=2, help="Training steps of each model.", show_default="120, GPU: 300")
    ] = None,
    device: Annotated[DeviceKind, typer.Option(help="Where to run; auto is what JAX prefers.")] = DeviceKind.AUTO,
    output: Annotated[Path, typer.Option(help="Where the plot of both losses is saved.")] = Path("blockdiag-demo.png"),
    csv: Annotated[
        Path | None, typer.Option(help="Folder to which losses (of moba routing, too) are written as CSV files.")
    ] = None,
    implementation: Annotated[
        list[str] | None,
        typer.Option(
            help="Implementation of the attention; repeat it to try several in turn.", show_default="by platform"
        ),
    ] = None,
) -> None:
    """Train a small language model with block-diagonal attention, and again with JAX's own attention under a mask.

    Both start from the same weights and see the same batches of English text, so their losses must agree up to
    rounding; the command fails if they do not. It prints both losses and the throughput, and saves a plot.

    With --attention moba the model uses MoBA with a key convolution. It is compared with the same model under dense
    causal attention, with equal parameters, steps and batches. Their losses differ, since MoBA sees only part of the
    keys. The command also prints how the trained layers route. It fails if MoBA with all blocks differs from dense
    attention.
    """
    console = Console()
    chosen = _device(device)
    if attention is AttentionKind.MOBA:
        names = tuple(implementation) if implementation else None
        if not run_moba_demo(console, chosen, steps=steps, output=output, csv=csv, implementation=names):
            raise typer.Exit(code=1)
        return
    settings = CPU_SETTINGS if chosen.platform == "cpu" else GPU_SETTINGS
    if steps is not None:
        settings = dataclasses.replace(settings, steps=steps)
    attentions = {
        OURS: language_model.block_attention(settings, tuple(implementation) if implementation else None),
        BASELINE: language_model.masked_attention(settings),
    }
    console.print(
        f"Byte-level language model on {chosen.device_kind}: {settings.layers} layers of width {settings.width}, "
        f"blocks of {settings.block_size} in sequences of {settings.sequence_length} bytes, {settings.dtype}, "
        f"{settings.steps} steps of {settings.tokens_per_step} bytes.",
        highlight=False,
    )
    with jax.default_device(chosen):
        trainings = _train_all(console, settings, attentions)
        checks = compare(settings, trainings, attentions)
    console.print(_results_table(trainings))
    save_plot(trainings, output)
    if csv is not None:
        write_losses(trainings, attention.value, chosen, csv / "losses.csv")
    console.print(f"Losses of both are drawn in {output}.", highlight=False)
    for check in checks:
        verdict = "[green]agree[/green]" if check.passed else "[bold red]DISAGREE[/bold red]"
        console.print(
            f"{check.name}: held-out losses {verdict}, difference {check.difference:.1e} nats per byte "
            f"(tolerance {check.tolerance:.0e}).",
            highlight=False,
        )
    if not all(check.passed for check in checks):
        raise typer.Exit(code=1)


def _device(kind: DeviceKind) -> jax.Device:
    """Return the first device of a kind, or JAX's default device."""
    if kind is DeviceKind.AUTO:
        return jax.devices()[0]
    try:
        return jax.devices(kind.value)[0]
    except RuntimeError as error:
        raise typer.BadParameter(
            f"JAX finds no {kind.value} here ({error}); try --device auto, or `python -m blockdiag doctor`",
            param_hint="--device",
        ) from error


def _train_all(console: Console, settings: Settings, attentions: dict[str, AttentionFunction]) -> dict[str, Training]:
    """Train one model per attention function, with a progress bar for each."""
    make = {name: functools.partial(LanguageModel, settings, attention) for name, attention in attentions.items()}
    return train_with_progress(console, settings, make)


def compare(
    settings: Settings, trainings: dict[str, Training], attentions: dict[str, AttentionFunction]
) -> list[Check]:
    """Compare the held-out losses of the two attentions: with one set of weights, and each with its own weights."""
    ours, baseline = trainings[OURS], trainings[BASELINE]
    tolerance = TOLERANCES[settings.dtype]
    swapped = language_model.with_attention(ours.model, settings, attentions[BASELINE])
    _, held_out_text = language_model.split_text(language_model.english_text())
    swapped_loss = language_model.evaluate(swapped, held_out_text, settings)
    return [
        Check("With the same weights", abs(ours.held_out_loss - swapped_loss), tolerance.same_weights),
        Check("Trained apart", abs(ours.held_out_loss - baseline.held_out_loss), tolerance.trained_apart),
    ]


def _results_table(trainings: dict[str, Training]) -> Table:
    table = Table(title="Held-out text after training")
    table.add_column("attention", no_wrap=True)
    for heading in ("loss", "bits per byte", "tokens/s"):
        table.add_column(heading, justify="right")
    for name, training in trainings.items():
        table.add_row(
            name,
            f"{training.held_out_loss:.5f}",
            f"{training.bits_per_byte:.5f}",
            f"{training.tokens_per_second:,.0f}",
        )
    return table
