"""`python -m benchmarks`: time an op and its baselines on this machine's GPU, beside the GPU's own limits."""

import importlib
import importlib.util
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.block_diagonal.cases import CASES
from benchmarks.dense.cases import DENSE_GROUPS
from benchmarks.fuse.cases import GROUPS as FUSE_GROUPS
from benchmarks.harness.pipeline import Benchmark, Choices, of_family
from benchmarks.harness.report import make_console
from benchmarks.moba.cases import MOBA_CASES
from benchmarks.paged.cases import GROUPS as PAGED_GROUPS

DEFAULT_OUTPUT = Path("benchmarks/results")


def _measure_torch(console: Console, folder: Path, choices: Choices) -> None:
    importlib.import_module("benchmarks.block_diagonal.torch_host").measure_torch(console, folder, choices)


BLOCK_DIAGONAL = of_family("benchmarks.block_diagonal.family", names=", ".join(CASES))
BENCHMARKS: Mapping[str, Benchmark] = {
    "block_diagonal": BLOCK_DIAGONAL,
    "moba": of_family("benchmarks.moba.family", names=", ".join(MOBA_CASES)),
    "paged": of_family("benchmarks.paged.family", names=", ".join(PAGED_GROUPS), budget_seconds=130.0),
    # Host times have no small check of their own; that of block-diagonal attention stands for it.
    "torch": replace(BLOCK_DIAGONAL, measure=_measure_torch, names=""),
    "gallery": of_family("benchmarks.gallery.family", names="its variants", budget_seconds=360.0, needs_torch=False),
    "fuse": of_family(
        "benchmarks.fuse.family", names=f"{', '.join(FUSE_GROUPS)}, or cases of these", budget_seconds=510.0
    ),
    "dense": of_family(
        "benchmarks.dense.family", names=f"{', '.join(DENSE_GROUPS)}, or cases of these", budget_seconds=510.0
    ),
    "devices": of_family(
        "benchmarks.devices.family",
        names="shards, sequences, or one of these",
        needs_torch=False,
        least_devices=2,
    ),
}


def bench(
    op: Annotated[str, typer.Argument(help="The op to measure.")],
    output: Annotated[
        Path | None, typer.Option(help=f"Folder of the CSV files; {DEFAULT_OUTPUT} unless given.")
    ] = None,
    pictures: Annotated[
        Path | None, typer.Option(help="Folder of the pictures; that of the CSV files unless given.")
    ] = None,
    cases: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated. " + " ".join(f"{op}: {one.names}." for op, one in BENCHMARKS.items() if one.names)
        ),
    ] = None,
    baselines: Annotated[str | None, typer.Option(help="Comma-separated names of baselines, or none.")] = None,
    plot: Annotated[
        bool,
        typer.Option("--plot", help="Draw the pictures of the op from the CSV files; alone where there is no GPU."),
    ] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Samples per implementation and pass.")] = 25,
    seed: Annotated[int, typer.Option(help="Seed of the random inputs.")] = 0,
    budget_seconds: Annotated[
        float | None,
        typer.Option(
            min=10.0,
            help="Time after which no baseline is begun.",
            show_default="270, paged: 130, gallery: 360, fuse and dense: 510",
        ),
    ] = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="Only the small check on the CPU.")] = False,
) -> None:
    """Time block-diagonal, MoBA, paged or fused attention beside baselines, or torch operators on the host.

    Every timing is gated by a check against float64, interleaved with the others of its case, and shown beside the
    copy bandwidth of the same run. `all` measures one op after the other, with their own cases and baselines.

    On a machine without a GPU, or with --smoke, a small check of the XLA path runs instead; and with --plot nothing is
    measured there: pictures are drawn from the CSV files.
    """
    # This process shares its GPU between JAX and torch, so JAX must not take most of its memory up front. The setting
    # is read when JAX starts its backend, which nothing has done yet.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    console = make_console()
    import jax

    if op == "all" and (cases or baselines):
        raise SystemExit("all takes neither --cases nor --baselines; name one op with them")
    every = [name for name, one in BENCHMARKS.items() if jax.device_count() >= one.least_devices]
    names = every if op == "all" else [op]
    folder = output or DEFAULT_OUTPUT
    if smoke or jax.default_backend() != "gpu":
        if smoke or not plot:
            with jax.default_device(jax.devices("cpu")[0]):
                for check in dict.fromkeys(BENCHMARKS[name].smoke for name in names):
                    check(console, output)
    else:
        for name in names:
            benchmark = BENCHMARKS[name]
            if benchmark.needs_torch:
                _demand_torch()
            deadline = time.monotonic() + (budget_seconds or benchmark.budget_seconds)
            benchmark.measure(console, folder, Choices(cases, baselines, rounds, seed, deadline))
    if plot:
        _draw(console, op, folder, pictures or folder)


def _demand_torch() -> None:
    """Exit with a reason where PyTorch, whose attention the baselines are, cannot use the GPU."""
    if importlib.util.find_spec("torch") is None:
        raise SystemExit("benchmarks compare with PyTorch, which is not installed; try: ./do setup")
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("JAX sees a GPU but torch does not; install torch with CUDA: pip install 'torch>=2.11'")


def _draw(console: Console, op: str, results: Path, folder: Path) -> None:
    """Pictures of an op, or all, from the CSV files."""
    from benchmarks.harness.plots import draw_pictures, pictures_of

    drawn = draw_pictures(pictures_of(op), results, folder)
    for path in drawn.paths:
        console.print(f"{path}  {path.stat().st_size / 1024:.0f} KiB")
    for sentence in drawn.left_out:
        console.print(f"left out: {sentence}")
    console.print(f"{len(drawn.paths)} pictures in {folder}")
