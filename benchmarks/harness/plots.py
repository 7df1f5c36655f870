"""Every picture of the project: what it is called, which rows it is drawn from, who draws it.

The rows come from CSV files that were recorded before, so that drawing needs no GPU.
"""

import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.experiments.recall_records import RecallRow
from benchmarks.harness.plot_style import LOOKS, NothingToDraw, Theme, save_picture
from benchmarks.harness.records import (
    ErrorRow,
    FuseTiming,
    GalleryTiming,
    MoBATiming,
    PagedTiming,
    Timing,
    read_rows,
)
from blockdiag.demo.records import LossRow, RoutingRow


@dataclass(frozen=True)
class Source:
    """A CSV file.

    Attributes:
        file: its name in the folder of results.
        kind: of its rows.
        command: module and arguments that write it.
    """

    file: str
    kind: type
    command: str


BLOCKS = Source("block_diagonal.csv", Timing, "benchmarks block_diagonal")
ERRORS = Source("block_diagonal_errors.csv", ErrorRow, "benchmarks block_diagonal")
MOBA = Source("moba.csv", MoBATiming, "benchmarks moba")
PAGED = Source("paged.csv", PagedTiming, "benchmarks paged")
FUSE = Source("fuse.csv", FuseTiming, "benchmarks fuse")
GALLERY = Source("gallery.csv", GalleryTiming, "benchmarks gallery")
LOSSES = Source("losses.csv", LossRow, "blockdiag demo --csv")
ROUTING = Source("routing.csv", RoutingRow, "blockdiag demo --attention moba --csv")
RECALL = Source("recall.csv", RecallRow, "benchmarks recall --csv")


@dataclass(frozen=True)
class Picture:
    """A picture.

    Attributes:
        name: of its files, without the theme's suffix.
        op: the benchmark that draws it, "" for those that `benchmarks all` alone draws.
        sources: whose rows `draw` takes, in this order, before the theme.
        draw: "module:function" within `benchmarks`; raises NothingToDraw where the rows hold nothing of it.
    """

    name: str
    op: str
    sources: tuple[Source, ...]
    draw: str

    @property
    def function(self) -> Callable[..., Any]:
        """What makes the figure."""
        module, _, name = self.draw.partition(":")
        return getattr(importlib.import_module(f"benchmarks.{module}"), name)


PICTURES = (
    Picture("overview", "", (BLOCKS, MOBA, PAGED, FUSE), "overview.overview_plots:draw_overview"),
    Picture("masks", "", (), "overview.mask_plots:draw_masks"),
    Picture("zigzag", "", (), "devices.plots:draw_zigzag"),
    Picture("roofline", "", (BLOCKS, MOBA, PAGED, FUSE), "overview.roofline_plots:draw_roofline"),
    Picture("block_diagonal_times", "block_diagonal", (BLOCKS,), "block_diagonal.plots:draw_times"),
    Picture("block_diagonal_errors", "block_diagonal", (ERRORS,), "block_diagonal.plots:draw_errors"),
    Picture("moba_lengths", "moba", (MOBA,), "moba.plots:draw_lengths"),
    Picture("moba_passes", "moba", (MOBA,), "moba.plots:draw_passes"),
    Picture("moba_routing", "", (ROUTING,), "experiments.training_plots:draw_routing"),
    Picture("moba_recall", "", (RECALL,), "experiments.training_plots:draw_recall"),
    Picture("paged_decode", "paged", (PAGED,), "paged.plots:draw_decode"),
    Picture("paged_splits", "paged", (PAGED,), "paged.plots:draw_splits"),
    Picture("paged_short", "paged", (PAGED,), "paged.plots:draw_short"),
    Picture("fuse_times", "fuse", (FUSE,), "fuse.plots:draw_times"),
    Picture("gallery", "gallery", (GALLERY,), "fuse.plots:draw_gallery"),
    Picture("losses", "", (LOSSES,), "experiments.training_plots:draw_losses"),
)


@dataclass(frozen=True)
class Drawn:
    """What `draw_pictures` did.

    Attributes:
        paths: the files, a light and a dark one for each picture.
        left_out: sentences about pictures that could not be drawn.
    """

    paths: tuple[Path, ...]
    left_out: tuple[str, ...]


def pictures_of(op: str) -> list[Picture]:
    """The pictures of a benchmark; of "all" every one."""
    return [picture for picture in PICTURES if op in ("all", picture.op)]


def of_one_device(rows: Sequence[Any]) -> list[Any]:
    """Rows of the device that was measured last, and figures of others that no run measures."""
    measured = [row for row in rows if not _is_recorded(row)]
    return [row for row in rows if _is_recorded(row) or row.device == measured[-1].device]


def _is_recorded(row: Any) -> bool:
    return LOOKS[row.implementation].line != "-" if getattr(row, "implementation", None) in LOOKS else False


def draw_pictures(pictures: Iterable[Picture], results: Path, folder: Path) -> Drawn:
    """Draw pictures from the CSV files of `results` into `folder`.

    A picture whose file is missing, or holds nothing to draw, is left out and named.
    """
    rows: dict[Source, list[Any]] = {}
    paths: list[Path] = []
    left_out: list[str] = []
    for picture in pictures:
        missing = [source for source in picture.sources if not (results / source.file).exists()]
        if missing:
            commands = " and ".join(dict.fromkeys(f"python -m {source.command}" for source in missing))
            names = ", ".join(source.file for source in missing)
            left_out.append(f"{picture.name}: {results} has no {names}; {commands} writes it")
            continue
        for source in picture.sources:
            if source not in rows:
                rows[source] = of_one_device(read_rows(results / source.file, source.kind))
        found = [rows[source] for source in picture.sources]

        def draw(theme: Theme, picture: Picture = picture, found: list[list[Any]] = found) -> Any:
            return picture.function(*found, theme)

        try:
            paths += save_picture(draw, folder, picture.name)
        except NothingToDraw as nothing:
            left_out.append(f"{picture.name}: {nothing}")
    return Drawn(tuple(paths), tuple(left_out))
