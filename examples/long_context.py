"""Train a language model with contexts of 65,536 bytes on any number of devices, and serve it from a paged cache.

    python examples/long_context.py
    JAX_NUM_CPU_DEVICES=4 python examples/long_context.py --steps 40
    python examples/long_context.py --sequence-devices 2 --batch-size 2 --checkpoints states --plot losses.png
    python examples/long_context.py --devices 1 2 4 --attention moba none --steps 16 --new-tokens 0

Devices share the tokens of each sequence (`ContextParallel`) and the parameters (FSDP). Each query sees its own block
of keys and a few earlier blocks with the best mean keys (MoBA); keys first pass through a short convolution. The text
is the documentation and the source of Python itself, as bytes. A model with the same initial parameters is trained with
dense causal attention for comparison. Then the first model generates text from a paged cache. The defaults are about
101 million parameters on GPUs, and a tiny model elsewhere.
"""

import argparse
import collections
import dataclasses
import datetime
import json
import math
import re
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import long_context_data as data
import numpy as np
from flax import nnx
from long_context_model import ATTENTIONS, ON_GPUS, Placement, Settings, count_parameters
from long_context_plots import draw_losses, draw_scaling, save_picture
from long_context_serve import Served, Server
from long_context_train import Checkpoints, Trainer, keep_programs, train
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

PROMPTS = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """Results of a training.

    Attributes:
        attention: one of `ATTENTIONS`.
        devices, sequence_devices: number of devices, and of those that shared each sequence.
        parameters: number of trained parameters.
        losses: of each step before its update, in nats per byte.
        held_out: loss of held-out text, in nats per byte; None if it was not requested.
        step_ms: median time of a step; None for fewer than five steps.
        tokens_per_second: throughput at the median time.
        program_bytes: memory that a step needs on a device.
        peak_bytes: peak memory of the process on a device so far; None if the device does not report it.
        collectives: number of collectives in the program of a step, by name. Those of a layer count once.
        compile_seconds: time to compile a step.
    """

    attention: str
    devices: int
    sequence_devices: int
    parameters: int
    losses: list[float]
    held_out: float | None
    step_ms: float | None
    tokens_per_second: float | None
    program_bytes: int
    peak_bytes: int | None
    collectives: dict[str, int]
    compile_seconds: float


def count_collectives(program: str) -> dict[str, int]:
    """Count the collectives in the text of a compiled program, by name."""
    names = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    return dict(collections.Counter(re.findall(rf"= .*\b({names})(?:-start)?\(", program)))


def run_training(
    trainer: Trainer, checkpoints: Checkpoints | None, chosen: argparse.Namespace, progress: Progress
) -> tuple[Training, nnx.State]:
    """Train with a progress bar; return the results and the parameters."""
    settings, mesh = trainer.settings, trainer.placement.mesh
    name = trainer.attention if mesh.size == 1 else f"{trainer.attention}, {mesh.size} devices"
    task = progress.add_task(name, total=settings.steps, said="compiling")
    began = time.perf_counter()
    program = trainer.program
    compile_seconds = time.perf_counter() - began

    def report(loss: float) -> None:
        progress.update(task, advance=1, said=f"{_bits(loss)} bits per byte")

    state, seconds = train(trainer, checkpoints, chosen.save_every, report=report)
    progress.update(task, completed=settings.steps)
    batches = chosen.evaluation_batches
    training = Training(
        attention=trainer.attention,
        devices=mesh.size,
        sequence_devices=mesh.shape["sequence"],
        parameters=count_parameters(state.parameters),
        losses=np.asarray(state.losses).tolist(),
        held_out=trainer.evaluate(state.parameters, batches) if batches else None,
        step_ms=None if seconds is None else 1e3 * seconds,
        tokens_per_second=None if seconds is None else settings.batch_size * settings.context / seconds,
        program_bytes=trainer.program_bytes,
        peak_bytes=(mesh.devices.flat[0].memory_stats() or {}).get("peak_bytes_in_use"),
        collectives=count_collectives(program.as_text()),
        compile_seconds=compile_seconds,
    )
    return training, state.parameters


def make_prompts(settings: Settings, new_tokens: int) -> list[bytes]:
    """Return pieces of held-out text of different lengths that leave room for the generated bytes."""
    _, held_out = data.load_text()
    rows, _ = data.crop(held_out, PROMPTS, settings.context, settings.seed + 2, 0)
    longest = settings.context - new_tokens
    return [bytes(row[: longest * (index + 1) // PROMPTS].astype(np.uint8)) for index, row in enumerate(rows)]


def _bits(nats: float | None) -> str:
    return "" if nats is None else f"{nats / math.log(2):.3f}"


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def of_perfect(training: Training, trainings: Sequence[Training]) -> float | None:
    """Return the time under perfect scaling from the first training with this attention, divided by the actual time."""
    first = next(other for other in trainings if other.attention == training.attention)
    if first.step_ms is None or training.step_ms is None:
        return None
    return first.step_ms * first.devices / (training.step_ms * training.devices)


def print_trainings(console: Console, trainings: Sequence[Training], settings: Settings, device: str) -> None:
    """Print losses and costs of the trainings, one column for each."""
    tokens = settings.batch_size * settings.context
    table = Table(title=f"{device}, {settings.batch_size} x {settings.context:,} tokens in a step")
    table.add_column("losses in bits per byte")
    for training in trainings:
        table.add_column(training.attention, justify="right")
    counts = [
        f"{x.devices}" if x.sequence_devices == x.devices else f"{x.devices}, {x.sequence_devices} a sequence"
        for x in trainings
    ]
    scaling = [of_perfect(x, trainings) for x in trainings]
    rows: dict[str, list[str]] = {
        "devices": counts,
        "parameters": [f"{x.parameters:,}" for x in trainings],
        "loss of the first step": [_bits(x.losses[0]) for x in trainings],
        "of the last five": [_bits(float(np.mean(x.losses[-5:]))) for x in trainings],
        "of held-out text": [_bits(x.held_out) for x in trainings],
        f"step of {tokens:,} tokens": ["" if x.step_ms is None else f"{x.step_ms:.1f} ms" for x in trainings],
        "tokens/s": ["" if x.tokens_per_second is None else f"{x.tokens_per_second:,.0f}" for x in trainings],
        "of perfect scaling": ["" if x is None else f"{100 * x:.0f}%" for x in scaling],
        "memory of a device": [_size(x.program_bytes) for x in trainings],
        "compilation": [f"{x.compile_seconds:.0f} s" for x in trainings],
    }
    for name, cells in rows.items():
        table.add_row(name, *cells)
    console.print(table)
    peak = trainings[-1].peak_bytes
    if peak is not None:
        console.print(f"Peak memory of the process on a device: {_size(peak)}.")
    rest = {x.devices: x.step_ms for x in trainings if x.attention == "none"}
    for x in trainings:
        without = rest.get(x.devices)
        if x.attention != "none" and without is not None and x.step_ms is not None:
            console.print(
                f"{x.attention}, {x.devices} device(s): of {x.step_ms:.1f} ms, {x.step_ms - without:.1f} ms are "
                "attention, its communication, key convolution and rotary embedding, compared with a step without them."
            )


def print_served(console: Console, served: Served) -> None:
    """Print the generated text and the speed."""
    console.print(
        f"Served from a cache of {served.cache_dtype}, {_size(served.cache_bytes)}: {len(served.texts)} prompts of "
        f"{' and '.join(f'{length:,}' for length in served.prompt_lengths)} bytes processed at "
        f"{served.read_per_second:,.0f} tokens/s, then {served.written_per_second:,.0f} tokens/s generated."
    )
    console.print(
        f"{100 * served.same_bytes:.1f}% of the generated bytes equal those without a cache; logits differ "
        f"by at most {served.logit_difference:.2g}."
    )
    for text, length in zip(served.texts, served.prompt_lengths, strict=True):
        before, after = text[max(0, length - 120) : length], text[length:]
        console.rule()
        console.print(before.decode(errors="replace"), markup=False, highlight=False, style="dim", end="")
        console.print(after.decode(errors="replace"), markup=False, highlight=False)
    console.rule()


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, Settings]:
    """Parse the options; those of the model are the fields of `Settings`."""
    parser = argparse.ArgumentParser(
        description="Train a language model with long contexts over several devices, and serve it from a paged cache."
    )
    add = parser.add_argument
    add("--devices", type=int, nargs="+", help="number of devices; several numbers show the scaling; default: all")
    add("--sequence-devices", type=int, help="devices that share each sequence; default: all")
    add("--attention", nargs="+", choices=ATTENTIONS, default=["moba", "dense"], help="attentions to train with")
    add("--checkpoints", type=Path, metavar="FOLDER", help="folder to save states in, and to resume from")
    add("--save-every", type=int, default=50, help="steps between states")
    add("--evaluation-batches", type=int, default=4, help="batches of held-out text; 0 skips the evaluation")
    add(
        "--plot",
        type=Path,
        metavar="FILE.png",
        help="file for the plot of losses, or of times by --devices; also writes FILE-dark.png",
    )
    add("--json", type=Path, metavar="FILE.json", help="file for figures and losses")
    add("--new-tokens", type=int, default=200, help="bytes to generate after each prompt; 0 skips serving")
    add("--cache-dtype", help="dtype of served keys and values, for example float8_e4m3fn")
    sizes = parser.add_argument_group("model and training")
    defaults = Settings() if jax.default_backend() == "cpu" else ON_GPUS
    for field in dataclasses.fields(Settings):
        value = getattr(defaults, field.name)
        option = "--" + field.name.replace("_", "-")
        sizes.add_argument(option, type=type(value), default=value, help=f"default: {value}")
    chosen = parser.parse_args(arguments)
    chosen.devices = chosen.devices or [jax.device_count()]
    if chosen.plot is not None and len(chosen.devices) == 1 and "none" in chosen.attention:
        parser.error("--plot compares the losses of moba and dense, or times on several numbers of --devices")
    if chosen.checkpoints is not None and len(chosen.devices) > 1:
        parser.error("--checkpoints are for one number of --devices; with several, each would resume the previous one")
    if not all(1 <= count <= jax.device_count() for count in chosen.devices):
        parser.error(f"--devices must be from 1 to {jax.device_count()}, got {chosen.devices}")
    try:
        settings = Settings(**{field.name: getattr(chosen, field.name) for field in dataclasses.fields(Settings)})
        for count in chosen.devices:
            Placement.over(jax.devices()[:count], chosen.sequence_devices).check(settings)
    except ValueError as error:
        parser.error(str(error))
    return chosen, settings


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, compare, serve."""
    chosen, settings = parse(arguments)
    console, kind = Console(), jax.devices()[0].device_kind
    if chosen.checkpoints is not None:
        keep_programs(chosen.checkpoints / "programs")
    trainings: list[Training] = []
    sparse: nnx.State | None = None
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, TextColumn("{task.fields[said]}"), console=console) as progress:
        for count in chosen.devices:
            placement = Placement.over(jax.devices()[:count], chosen.sequence_devices)
            for attention in dict.fromkeys(chosen.attention):
                trainer = Trainer(settings, placement, attention)
                folder = chosen.checkpoints
                checkpoints = None if folder is None else Checkpoints(folder / attention, settings)
                training, parameters = run_training(trainer, checkpoints, chosen, progress)
                trainings.append(training)
                sparse = parameters if attention == "moba" else sparse
                if checkpoints is not None:
                    checkpoints.close()
    print_trainings(console, trainings, settings, kind)
    served = None
    if sparse is not None and chosen.new_tokens > 0:
        server = Server(settings, sparse, jax.devices()[0])
        served = server.write(make_prompts(settings, chosen.new_tokens), chosen.new_tokens, chosen.cache_dtype)
        print_served(console, served)
    if chosen.json is not None:
        numbers = None if served is None else {k: x for k, x in dataclasses.asdict(served).items() if k != "texts"}
        found = {
            "environment": {"device": kind, "jax": jax.__version__, "date": datetime.date.today().isoformat()},
            "settings": dataclasses.asdict(settings),
            "trainings": [dataclasses.asdict(training) for training in trainings],
            "served": numbers,
        }
        chosen.json.write_text(json.dumps(found, indent=1) + "\n")
    if chosen.plot is not None:
        path, draw, where = chosen.plot, draw_losses, f"{chosen.devices[0]} x {kind}"
        if len(chosen.devices) > 1:
            draw, where = draw_scaling, kind
        save_picture(lambda theme: draw(trainings, settings, where, theme), path)


if __name__ == "__main__":
    main()
