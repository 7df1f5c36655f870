"""`python -m blockdiag demo --attention moba`: a small language model with MoBA against one with dense attention."""

import dataclasses
import functools
import math
from pathlib import Path

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from blockdiag.cli.training_report import save_plot, train_with_progress, write_losses
from blockdiag.demo import language_model, moba_model
from blockdiag.demo.language_model import Training
from blockdiag.demo.moba_model import LayerStatistics, MoBALanguageModel, MoBASettings
from blockdiag.demo.records import RoutingRow, where_of, write_table

MOBA = "moba_attention"
DENSE = "dense causal attention"

CPU_SETTINGS = MoBASettings()
GPU_SETTINGS = MoBASettings(
    steps=300,
    batch_size=8,
    sequence_length=2048,
    block_size=64,
    top_k=4,
    width=256,
    heads=4,
    layers=4,
    dtype="bfloat16",
)

# If every query attends to all blocks, MoBA is dense attention. These tolerances for rounding are in nats per byte.
TOLERANCES = {"float32": 1e-5, "bfloat16": 5e-3}


def run_moba_demo(
    console: Console,
    device: jax.Device,
    *,
    steps: int | None,
    output: Path,
    csv: Path | None,
    implementation: tuple[str, ...] | None,
) -> bool:
    """Train both models, report losses and routing, and check MoBA with all blocks against dense attention.

    The losses are drawn in `output`. Losses and routing are also written as CSV files if a folder `csv` is given.

    Returns:
        True if MoBA with all blocks agrees with dense attention.
    """
    settings = CPU_SETTINGS if device.platform == "cpu" else GPU_SETTINGS
    if steps is not None:
        settings = dataclasses.replace(settings, steps=steps)
    console.print(
        f"Byte-level language model on {device.device_kind}: {settings.layers} layers of width {settings.width}, "
        f"{settings.top_k} blocks of {settings.block_size} keys in sequences of {settings.sequence_length} bytes, key "
        f"convolution of {settings.key_taps}, {settings.dtype}, {settings.steps} steps of {settings.tokens_per_step} "
        "bytes.",
        highlight=False,
    )
    make = {
        MOBA: functools.partial(MoBALanguageModel, settings, moba_model.routed_attention(settings, implementation)),
        DENSE: functools.partial(MoBALanguageModel, settings, moba_model.dense_attention),
    }
    with jax.default_device(device):
        trainings = train_with_progress(console, settings, make)
        statistics = routing_of(trainings[MOBA], settings, implementation)
        if csv is not None:
            write_losses(trainings, "moba", device, csv / "losses.csv")
            write_routing(trainings[MOBA], settings, implementation, device, csv / "routing.csv")
        difference = difference_with_all_blocks(trainings[MOBA], settings, implementation)
    console.print(losses_table(settings, trainings))
    console.print(statistics_table(statistics))
    save_plot(trainings, output)
    console.print(f"Losses of both are drawn in {output}.", highlight=False)
    tolerance = TOLERANCES[settings.dtype]
    # Written so that NaN does not pass.
    is_same = difference <= tolerance
    console.print(
        f"The weights trained with MoBA, seeing all {settings.num_blocks} blocks: held-out loss "
        f"{'[green]agrees[/green]' if is_same else '[bold red]DISAGREES[/bold red]'} with dense attention, difference "
        f"{difference:.1e} nats per byte (tolerance {tolerance:.0e}).",
        highlight=False,
    )
    return is_same


def routing_of(
    training: Training, settings: MoBASettings, implementation: tuple[str, ...] | None
) -> list[LayerStatistics]:
    """Return statistics of each layer's routing on held-out text."""
    _, text = language_model.split_text(language_model.english_text())
    (batch,) = language_model.batches(text, settings, count=1, seed=settings.seed + 1)
    return moba_model.routing_statistics(training.model, jnp.asarray(batch[:, :-1]), settings, implementation)


def write_routing(
    training: Training, settings: MoBASettings, implementation: tuple[str, ...] | None, device: jax.Device, path: Path
) -> None:
    """Write how the queries of each block of one held-out sequence are routed, in every layer and head."""
    _, text = language_model.split_text(language_model.english_text())
    (batch,) = language_model.batches(text, settings, count=1, seed=settings.seed + 1)
    shares = moba_model.routing_shares(training.model, jnp.asarray(batch[:1, :-1]), settings, implementation)
    where = where_of(device)
    rows = [
        RoutingRow(
            layer=layer,
            head=head,
            query_block=query_block,
            key_block=key_block,
            block_size=settings.block_size,
            top_k=settings.top_k,
            share=float(share[head, query_block, key_block]),
            **where,
        )
        for layer, share in enumerate(shares)
        for head in range(share.shape[0])
        for query_block in range(share.shape[1])
        for key_block in range(query_block + 1)
    ]
    columns = [field.name for field in dataclasses.fields(RoutingRow)]
    write_table(path, columns, map(dataclasses.asdict, rows))


def difference_with_all_blocks(
    training: Training, settings: MoBASettings, implementation: tuple[str, ...] | None
) -> float:
    """Return the difference of one model's held-out losses under dense attention and under MoBA with all blocks."""
    _, text = language_model.split_text(language_model.english_text())
    every = moba_model.routed_attention(settings, implementation, top_k=settings.num_blocks)
    losses = []
    for attend in (every, moba_model.dense_attention):
        model = language_model.with_weights(training.model, functools.partial(MoBALanguageModel, settings, attend))
        losses.append(language_model.evaluate(model, text, settings))
    return abs(losses[0] - losses[1])


def losses_table(settings: MoBASettings, trainings: dict[str, Training]) -> Table:
    """Return a table with the held-out losses of both models."""
    table = Table(title="Held-out text after training")
    table.add_column("attention", no_wrap=True)
    for heading in ("loss", "bits/byte", "parameters", "keys seen", "tokens/s"):
        table.add_column(heading, justify="right")
    seen = {MOBA: settings.top_k * settings.block_size, DENSE: settings.sequence_length}
    for name, training in trainings.items():
        table.add_row(
            name,
            f"{training.held_out_loss:.4f}",
            f"{training.held_out_loss / math.log(2.0):.4f}",
            f"{moba_model.count_parameters(training.model):,}",
            f"<= {seen[name]}",
            f"{training.tokens_per_second:,.0f}",
        )
    return table


def statistics_table(statistics: list[LayerStatistics]) -> Table:
    """Return a table of each layer's routing; brackets hold the values of equal weights or random choices."""
    table = Table(title="Routing on held-out text, of queries that have a choice (in brackets: without preferences)")
    table.add_column("layer", justify="right")
    for heading in ("weight on own block", "distance of chosen blocks", "different blocks of a head"):
        table.add_column(heading, justify="right")
    for index, layer in enumerate(statistics):
        table.add_row(
            str(index),
            f"{layer.own_weight:.1%} ({layer.own_keys:.1%})",
            f"{layer.distance:.2f} ({layer.blind_distance:.2f})",
            f"{layer.distinct:.1f} of {layer.available}",
        )
    return table
