"""`python -m benchmarks gallery-page`: the documentation's page of attention variants, from code and recorded times."""

import time
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.gallery.cases import select_variants
from benchmarks.gallery.page import PICTURES, recorded_times, write_gallery
from benchmarks.harness.pipeline import Choices, run
from benchmarks.harness.report import make_console


def gallery_page(
    output: Annotated[Path, typer.Option(help="Folder of the page and its pictures.")] = Path("docs"),
    results: Annotated[Path, typer.Option(help="Times, as `python -m benchmarks gallery` writes them.")] = Path(
        "benchmarks/results/gallery.csv"
    ),
    variants: Annotated[
        str | None, typer.Option(help="Comma-separated: a page of these alone.", show_default="all")
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Time them first, on this machine's GPU.")] = False,
    deadline: Annotated[
        float, typer.Option(min=10.0, help="Seconds after which no variant is begun to be timed.")
    ] = 360.0,
    rounds: Annotated[int, typer.Option(min=1, help="Samples of each program.")] = 25,
) -> None:
    """Write the page of all variants: code, picture of visited tiles, size of the kernels, recorded speed-up.

    Needs no GPU, but for --measure, which is `python -m benchmarks gallery`.
    """
    console = make_console()
    try:
        names = select_variants(variants)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    if measure:
        import jax

        if jax.default_backend() != "gpu":
            raise SystemExit("--measure needs an NVIDIA GPU that JAX sees; without it recorded times are shown")
        from benchmarks.gallery.family import FAMILY

        choices = Choices(variants, None, rounds, 0, time.monotonic() + deadline)
        run(FAMILY, console, results.parent, choices, file=results.name)
    rows = recorded_times(results)
    if not rows:
        console.print(f"{results} has no times; the page is written without. Measure: python -m benchmarks gallery")
    page = write_gallery(output, rows, names, say=console.print)
    console.print(f"{len(names)} variants: {page}, pictures in {page.parent / PICTURES}")
