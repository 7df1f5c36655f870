"""`python -m benchmarks`: time an op and its baselines on this machine's GPU, beside the GPU's own limits."""

import importlib.util
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from benchmarks.block_diagonal.cases import CASES, Case, select_cases
from benchmarks.devices.command import FILE as DEVICES_FILE
from benchmarks.devices.command import bench_devices, smoke_devices
from benchmarks.fuse.command import FUSE_NAMES, measure_fuse, smoke_fuse
from benchmarks.gallery.command import FILE as GALLERY_FILE
from benchmarks.gallery.command import measure_gallery, smoke_gallery
from benchmarks.harness.records import (
    Environment,
    ErrorRow,
    HostRow,
    Timing,
    environment,
    merge_rows,
    recordable_failures,
    write_rows,
)
from benchmarks.harness.report import (
    error_table,
    host_table,
    launches,
    make_console,
    reasons,
    timing_table,
    verdict_table,
)
from benchmarks.harness.targets import OURS, judge_errors, judge_host, judge_times, judge_torch_host
from benchmarks.moba.command import CASE_NAMES, measure_moba, smoke_moba
from benchmarks.paged.command import GROUP_NAMES, measure_paged, smoke_paged
from blockdiag.cli.machine import reason_of

if TYPE_CHECKING:
    from benchmarks.block_diagonal.implementations import Implementation
    from benchmarks.block_diagonal.measure import Settings

DEFAULT_OUTPUT = Path("benchmarks/results")


class Op(StrEnum):
    """What can be measured."""

    ALL = "all"
    BLOCK_DIAGONAL = "block_diagonal"
    MOBA = "moba"
    PAGED = "paged"
    TORCH = "torch"
    GALLERY = "gallery"
    FUSE = "fuse"
    DEVICES = "devices"


CHECKS = {
    Op.MOBA: smoke_moba,
    Op.PAGED: smoke_paged,
    Op.GALLERY: smoke_gallery,
    Op.FUSE: smoke_fuse,
    Op.DEVICES: smoke_devices,
}
"""Small checks for a CPU, of ops that have their own."""
MEASURES = {Op.MOBA: measure_moba, Op.PAGED: measure_paged, Op.FUSE: measure_fuse}
BUDGETS = {Op.PAGED: 130.0, Op.GALLERY: 360.0, Op.FUSE: 510.0}
"""Seconds, of ops that do not need what the others do."""


def bench(
    op: Annotated[Op, typer.Argument(help="The op to measure.")],
    output: Annotated[
        Path | None, typer.Option(help=f"Folder of the CSV files; {DEFAULT_OUTPUT} unless given.")
    ] = None,
    pictures: Annotated[
        Path | None, typer.Option(help="Folder of the pictures; that of the CSV files unless given.")
    ] = None,
    cases: Annotated[
        str | None,
        typer.Option(
            help=f"Comma-separated, of: {', '.join(CASES)}; for moba of: {CASE_NAMES}; for paged of: {GROUP_NAMES}; "
            f"for gallery of its variants; for fuse of: {FUSE_NAMES}, or cases of these."
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
            show_default="270, paged: 130, gallery: 360, fuse: 510",
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

    if op is Op.ALL and (cases or baselines):
        raise SystemExit("bench all takes neither --cases nor --baselines; name one op with them")
    # One device has nothing to share.
    every = [one for one in Op if one is not Op.ALL and (one is not Op.DEVICES or jax.device_count() > 1)]
    ops = every if op is Op.ALL else [op]
    folder = output or DEFAULT_OUTPUT
    if smoke or jax.default_backend() != "gpu":
        if smoke or not plot:
            with jax.default_device(jax.devices("cpu")[0]):
                # Host times of torch operators have no small check of their own; that of block_diagonal stands for it.
                for check in dict.fromkeys(CHECKS.get(one, _smoke) for one in ops):
                    check(console, output)
    else:
        for one in ops:
            seconds = budget_seconds or BUDGETS.get(one, 270.0)
            _measure_op(one, console, folder, Choices(cases, baselines, rounds, seed, time.monotonic() + seconds))
    if plot:
        _draw(console, op, folder, pictures or folder)


@dataclass(frozen=True)
class Choices:
    """Options of what is measured.

    Attributes:
        cases, baselines: comma-separated names; None is all of the op.
        deadline: `time.monotonic` seconds after which nothing new is begun.
    """

    cases: str | None
    baselines: str | None
    rounds: int
    seed: int
    deadline: float


def _measure_op(op: Op, console: Console, folder: Path, choices: Choices) -> None:
    """Measures one op on this machine's GPU and keeps its rows."""
    options = {"rounds": choices.rounds, "seed": choices.seed, "deadline": choices.deadline}
    if op is Op.GALLERY:
        measure_gallery(console, folder / GALLERY_FILE, variants=choices.cases, **options)
        return
    if op is Op.DEVICES:
        bench_devices(
            console, folder / DEVICES_FILE, cases=choices.cases, rounds=choices.rounds, deadline=choices.deadline
        )
        return
    if importlib.util.find_spec("torch") is None:
        raise SystemExit(
            "bench compares with PyTorch, which is not installed; try: pip install 'blockdiag-attn[torch]'"
        )
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("JAX sees a GPU but torch does not; install torch with CUDA: pip install 'torch>=2.11'")
    if op is Op.TORCH:
        _torch_host(console, folder)
        return
    if op in MEASURES:
        MEASURES[op](console, folder, cases=choices.cases, baselines=choices.baselines, **options)
        return
    from benchmarks.block_diagonal.measure import Settings, find_implementations

    try:
        selected = select_cases(choices.cases)
        ours, others = find_implementations(choices.baselines)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    settings = Settings(deadline=choices.deadline, rounds=choices.rounds, seed=choices.seed, say=console.print)
    _measure(console, folder, selected, [*ours, *others], settings)
    console.print(f"{op.value}: CSV files are in {folder}")


def _smoke(console: Console, output: Path | None) -> None:
    """The CPU's part: a correctness check and host times, plainly labelled."""
    from benchmarks.block_diagonal.smoke import run_smoke

    console.print(
        "This is a smoke run on the CPU: XLA against a reference einsum at a tiny size. "
        "Its times say nothing about a GPU; run the same command on a machine with an NVIDIA GPU for those."
    )
    rows = run_smoke(environment("cpu"))
    console.print(timing_table(rows[0].case, rows))
    for line in reasons(rows):
        console.print(line)
    if output is not None:
        write_rows(output / "block_diagonal_smoke.csv", Timing, rows)
        console.print(f"written to {output / 'block_diagonal_smoke.csv'}")


def _measure(
    console: Console,
    folder: Path,
    cases: Sequence[Case],
    implementations: Sequence["Implementation"],
    settings: "Settings",
) -> None:
    """The GPU's part: roofs, host time, errors, then the cases, each kept as soon as it is known."""
    from benchmarks.block_diagonal.measure import device_name, measure_case
    from benchmarks.harness.roofs import measure_roofs

    where = environment(device_name())
    roofs = measure_roofs()
    console.print(
        f"{where.device}, driver {where.driver}, jax {where.jax}, torch {where.torch}, triton {where.triton}\n"
        f"copy {roofs.copy_gb_per_s:,.0f} GB/s, three reads to one write {roofs.stream_gb_per_s:,.0f} GB/s, "
        f"bf16 product {roofs.matmul_tflops:,.0f} TFLOP/s"
    )
    host_rows = _host(console, folder, where)
    error_rows = _errors(console, folder, where, cases)
    timings: list[Timing] = []
    for index, case in enumerate(cases):
        try:
            rows = measure_case(
                case,
                implementations,
                where,
                settings,
                cases_after=len(cases) - index - 1,
                matmul_tflops=roofs.matmul_tflops,
            )
        except recordable_failures() as failure:
            console.print(f"  {case.name} could not be measured: {reason_of(failure)}")
            continue
        timings += rows
        merge_rows(folder / "block_diagonal.csv", Timing, rows)
        console.print(timing_table(case.name, rows))
        for line in (*launches(rows), *reasons(rows)):
            console.print(f"  {line}")
    verdicts = [*judge_times(timings), *judge_errors(error_rows), *judge_host(host_rows)]
    console.print(verdict_table(verdicts))


def _torch_host(console: Console, folder: Path) -> None:
    """Host time of the torch operators."""
    from benchmarks.block_diagonal.measure import device_name
    from benchmarks.block_diagonal.torch_host import measure_torch_host

    rows = measure_torch_host(environment(device_name()))
    merge_rows(folder / "torch_host.csv", HostRow, rows)
    console.print(host_table(rows))
    console.print(verdict_table(judge_torch_host(rows)))
    console.print(f"torch: {folder / 'torch_host.csv'}")


def _host(console: Console, folder: Path, where: Environment) -> list[HostRow]:
    """Host time of a jitted call."""
    from benchmarks.block_diagonal.host import measure_host

    began = time.monotonic()
    rows = measure_host((OURS,), where)
    merge_rows(folder / "block_diagonal_host.csv", HostRow, rows)
    console.print(host_table(rows))
    console.print(f"  host times took {time.monotonic() - began:.1f} s")
    return rows


def _errors(console: Console, folder: Path, where: Environment, cases: Sequence[Case]) -> list[ErrorRow]:
    """Errors against float64 of this library and of FlashAttention 2."""
    from benchmarks.block_diagonal.accuracy import accuracy_cases, flash_baseline, measure_errors
    from benchmarks.block_diagonal.measure import find_implementations, release_memory

    began = time.monotonic()
    ours, others = find_implementations(None)
    judged = [one for one in ours if one.name == OURS]
    names = {case.name for case in cases}
    rows: list[ErrorRow] = []
    for case in accuracy_cases():
        if case.name in names:
            flash = flash_baseline(case, others)
            rows += measure_errors([case], [*judged, *([flash] if flash else [])], where)
    release_memory()
    merge_rows(folder / "block_diagonal_errors.csv", ErrorRow, rows)
    console.print(error_table(rows))
    for row in rows:
        if row.tensor == "all":
            console.print(f"  {row.case}, {row.implementation}: {row.note}")
    console.print(f"  errors took {time.monotonic() - began:.1f} s")
    return rows


def _draw(console: Console, op: Op, results: Path, folder: Path) -> None:
    """Pictures of an op, or all, from the CSV files."""
    from benchmarks.harness.plots import draw_pictures, pictures_of

    drawn = draw_pictures(pictures_of(op.value), results, folder)
    for path in drawn.paths:
        console.print(f"{path}  {path.stat().st_size / 1024:.0f} KiB")
    for sentence in drawn.left_out:
        console.print(f"left out: {sentence}")
    console.print(f"{len(drawn.paths)} pictures in {folder}")
