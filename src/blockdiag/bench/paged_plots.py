"""Figures of paged attention: bandwidth by workload and cache, and by splits, with the rate of reading drawn in."""

from collections.abc import Sequence
from pathlib import Path

from blockdiag.bench.paged_cases import CACHE_LABELS, PAGE_SIZES
from blockdiag.bench.paged_recorded import FLASHINFER
from blockdiag.bench.paged_targets import NATIVE
from blockdiag.bench.plots import new_figure
from blockdiag.bench.records import PagedTiming

# Okabe and Ito's palette.
_OURS, _FLASHINFER, _READ = "#0072B2", "#CC79A7", "#D55E00"
_LINES = ("#0072B2", "#56B4E9", "#009E73", "#E69F00", "#CC79A7")
_SHADES = (0.45, 0.7, 1.0)


def draw_decode(rows: Sequence[PagedTiming], path: Path, *, caption: str) -> None:
    """TB/s of group "decode": a group of bars per workload and cache, a bar per page size and implementation."""
    shown = [row for row in rows if row.group == "decode" and row.tb_per_s is not None and row.page_size is not None]
    ours = [row for row in shown if row.implementation == NATIVE]
    labels = list(dict.fromkeys((row.workload, row.cache) for row in ours))
    if not labels:
        raise ValueError(f"`rows` hold no time of {NATIVE!r} in group 'decode'; nothing can be drawn")
    times = {(row.implementation, row.workload, row.cache, row.page_size): row.tb_per_s for row in shown}
    figure, (axis,) = new_figure(1, 1.5 + 0.9 * len(labels), 3.6)
    series = [(name, size) for name in (NATIVE, FLASHINFER) for size in PAGE_SIZES]
    width = 0.8 / len(series)
    for index, (name, size) in enumerate(series):
        points = [
            (place + (index - len(series) / 2 + 0.5) * width, times.get((name, *label, size)))
            for place, label in enumerate(labels)
        ]
        points = [(x, y) for x, y in points if y is not None]
        if points:
            color, title = (_OURS, "blockdiag") if name == NATIVE else (_FLASHINFER, "FlashInfer, recorded")
            alpha = _SHADES[PAGE_SIZES.index(size)]
            axis.bar(*zip(*points, strict=True), width, color=color, alpha=alpha, label=f"{title}, pages of {size}")
    _draw_read_rate(axis, ours)
    names = [f"{workload}\n{CACHE_LABELS[cache]}" for workload, cache in labels]
    axis.set_xticks(range(len(labels)), names)
    axis.set_title("one query of each sequence: cache read once, TB/s", fontsize=9, loc="left")
    axis.margins(y=0.3)
    axis.legend(fontsize=7, frameon=False, ncols=3, loc="upper left")
    figure.supxlabel(caption, fontsize=7)
    figure.savefig(path, dpi=110)


def draw_splits(rows: Sequence[PagedTiming], path: Path, *, caption: str) -> None:
    """TB/s by number of splits, a line per workload and cache; what the library chooses is circled."""
    shown = [row for row in rows if row.group == "splits" and row.tb_per_s is not None and row.implementation == NATIVE]
    if not shown:
        raise ValueError(f"`rows` hold no time of {NATIVE!r} in group 'splits'; nothing can be drawn")
    figure, (axis,) = new_figure(1, 6.5, 3.6)
    for color, label in zip(_LINES, dict.fromkeys((row.workload, row.cache) for row in shown), strict=False):
        mine = [row for row in shown if (row.workload, row.cache) == label]
        points = sorted((row.splits or 1, row.tb_per_s or 0.0) for row in mine)
        name = f"{label[0]} {CACHE_LABELS[label[1]]}"
        axis.plot(*zip(*points, strict=True), color=color, marker="o", markersize=3, label=name)
        chosen = [(row.splits, row.tb_per_s) for row in mine if row.is_chosen]
        if chosen:
            axis.plot(*chosen[0], marker="o", markersize=10, color=color, fillstyle="none")
    _draw_read_rate(axis, shown)
    axis.set_xscale("log", base=2)
    ticks = sorted({row.splits for row in shown if row.splits is not None and not row.is_chosen})
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.set_xlabel("splits of the keys of each sequence (circle: chosen)", fontsize=8)
    axis.set_title("cache read once, TB/s", fontsize=9, loc="left")
    axis.grid(alpha=0.3, linewidth=0.5)
    axis.legend(fontsize=7, frameon=False)
    figure.supxlabel(caption, fontsize=7)
    figure.savefig(path, dpi=110)


def _draw_read_rate(axis, rows: Sequence[PagedTiming]) -> None:
    rate = next((row.read_tb_per_s for row in rows if row.read_tb_per_s is not None), None)
    if rate is not None:
        axis.axhline(rate, color=_READ, linestyle="--", linewidth=1, label="reading 4 GiB")


def draw_paged(rows: Sequence[PagedTiming], folder: Path) -> list[Path]:
    """Every figure that the rows allow; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    timed = [row for row in rows if row.implementation == NATIVE and row.median_us is not None]
    if not timed:
        return []
    row = timed[0]
    caption = f"{row.device}, driver {row.driver}, jax {row.jax}, torch {row.torch}, triton {row.triton}, {row.date}"
    paths = []
    for group, draw in (("decode", draw_decode), ("splits", draw_splits)):
        if any(row.group == group for row in timed):
            paths.append(folder / f"paged_{group}.png")
            draw(rows, paths[-1], caption=caption)
    return paths
