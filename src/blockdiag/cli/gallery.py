"""`python -m blockdiag gallery`: the documentation's page of attention variants, from code and recorded times."""

from pathlib import Path
from typing import Annotated

import typer

from blockdiag.bench.gallery_cases import select_variants
from blockdiag.bench.gallery_page import PICTURES, recorded_times, write_gallery
from blockdiag.bench.report import make_console


def gallery(
    output: Annotated[Path, typer.Option(help="Folder of the page and its pictures.")] = Path("docs"),
    results: Annotated[Path, typer.Option(help="Times, as `bench gallery` writes them.")] = Path(
        "benchmarks/results/gallery.csv"
    ),
    variants: Annotated[
        str | None, typer.Option(help="Comma-separated: a page of these alone.", show_default="all")
    ] = None,
) -> None:
    """Write the page of all variants: code, picture of visited tiles, size of the kernels, recorded speed-up.

    Needs no GPU. Times are those of `python -m blockdiag bench gallery`, which does.
    """
    console = make_console()
    try:
        names = select_variants(variants)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    rows = recorded_times(results)
    if not rows:
        console.print(
            f"{results} has no times; the page is written without. Measure: python -m blockdiag bench gallery"
        )
    page = write_gallery(output, rows, names, say=console.print)
    console.print(f"{len(names)} variants: {page}, pictures in {page.parent / PICTURES}")
