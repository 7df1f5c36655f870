"""`python -m benchmarks recall`: needles in real text, and whether MoBA's routing finds the blocks that hold them."""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import jax
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.experiments import recall_routing as recall_experiment
from benchmarks.experiments.recall_records import Recall, RecallRow
from benchmarks.experiments.recall_routing import RecallSettings, by_keys
from benchmarks.experiments.training_plots import draw_recall
from benchmarks.harness.plot_style import LIGHT, save_one
from benchmarks.harness.records import write_rows
from blockdiag.demo.records import where_of

SETTINGS = RecallSettings()


def recall(
    trials: Annotated[int, typer.Option(min=2, help="Contexts that accuracy is measured on.")] = SETTINGS.trials,
    context: Annotated[int, typer.Option(min=32, help="Tokens of a context.")] = SETTINGS.context,
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each kind of keys.")] = SETTINGS.steps,
    seed: Annotated[int, typer.Option(help="Seed of needles, vectors and training.")] = SETTINGS.seed,
    output: Annotated[Path, typer.Option(help="Where the plot is saved.")] = Path("blockdiag-recall.png"),
    csv: Annotated[Path | None, typer.Option(help="Folder to which the rows are written as recall.csv.")] = None,
) -> None:
    """Hide needles in real text, and see whether MoBA's routing finds the blocks that hold them.

    The blocks get smaller and more at a constant number of attended tokens. Keys are random vectors of words, for which
    a formula says how well routing must do; and learned embeddings of bytes, without and with a key convolution. What
    is measured is the routing alone: whether the block of the needle is among those that the query chooses.
    """
    console = Console()
    settings = dataclasses.replace(SETTINGS, trials=trials, context=context, steps=steps, seed=seed)
    largest = max(settings.block_sizes)
    if context < 2 * largest:
        raise typer.BadParameter(f"a context must have at least two blocks of {largest}", param_hint="--context")
    console.print(
        f"Routing on {jax.devices()[0].device_kind}: {settings.trials} contexts of {settings.context} tokens of "
        f"English, keys of {settings.head_dim} numbers, {settings.attended_tokens} attended tokens.",
        highlight=False,
    )
    rows = recall_experiment.run_recall(settings, say=lambda line: console.print(line, highlight=False))
    console.print(recall_table(rows))
    where = where_of(jax.devices()[0])
    recorded = [RecallRow(**dataclasses.asdict(row), **where) for row in rows]
    save_one(functools.partial(draw_recall, recorded), LIGHT, output)
    if csv is not None:
        write_rows(csv / "recall.csv", RecallRow, recorded)
    largest_error = max(row.error for row in rows)
    console.print(
        "SNR: the score of the needle's block less that of another one, mean over standard deviation. Predicted for "
        "words: sqrt(H / 2B); for bytes: the same from the products of single tokens. Both take the tokens of a block "
        "to be independent and all needles to be equally clear, which a text's are not.\n"
        f"Found: the share of needles whose block is chosen, with a standard error of at most {largest_error:.3f}. "
        f"Both are drawn in {output}.",
        highlight=False,
    )


def recall_table(rows: Sequence[Recall]) -> Table:
    """A line per kind of keys and block size."""
    table = Table(title="Is the needle's block chosen?", title_justify="left")
    table.add_column("keys", no_wrap=True)
    for heading in ("block", "top_k", "SNR", "predicted", "found", "predicted", "chance"):
        table.add_column(heading, justify="right")
    for kind, found in by_keys(rows).items():
        for index, row in enumerate(found):
            table.add_row(
                kind if index == 0 else "",
                str(row.block_size),
                str(row.top_k),
                f"{row.snr:.2f}",
                f"{row.predicted_snr:.2f}",
                f"{row.accuracy:.3f}",
                f"{row.predicted_accuracy:.3f}",
                f"{row.chance:.3f}",
                end_section=index == len(found) - 1,
            )
    return table
