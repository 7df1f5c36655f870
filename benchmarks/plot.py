"""Draw the benchmark's figures from its CSV files: `PYTHONPATH=src python benchmarks/plot.py [folder]`."""

import argparse
from pathlib import Path

from blockdiag.bench.fuse_plots import draw_fuse
from blockdiag.bench.moba_plots import draw_moba
from blockdiag.bench.paged_plots import draw_paged
from blockdiag.bench.plots import draw_all
from blockdiag.bench.records import ErrorRow, FuseTiming, MoBATiming, PagedTiming, Timing, read_rows


def main() -> None:
    """Read the CSV files of a folder, block_diagonal.csv and those that there are, and write PNG files beside them."""
    parser = argparse.ArgumentParser(description="Draw figures from the CSV files of `python -m blockdiag bench`.")
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parent / "results")
    folder = parser.parse_args().folder
    timings = folder / "block_diagonal.csv"
    if not timings.exists():
        parser.error(f"{timings} does not exist; run `python -m blockdiag bench block_diagonal` first")
    errors = folder / "block_diagonal_errors.csv"
    for path in draw_all(read_rows(timings, Timing), read_rows(errors, ErrorRow) if errors.exists() else [], folder):
        print(path)
    moba = folder / "moba.csv"
    for path in draw_moba(read_rows(moba, MoBATiming), folder) if moba.exists() else []:
        print(path)
    paged = folder / "paged.csv"
    for path in draw_paged(read_rows(paged, PagedTiming), folder) if paged.exists() else []:
        print(path)
    fuse = folder / "fuse.csv"
    for path in draw_fuse(read_rows(fuse, FuseTiming), folder) if fuse.exists() else []:
        print(path)


if __name__ == "__main__":
    main()
