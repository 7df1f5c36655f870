"""Pictures of paged attention: bandwidth by workload and cache and by splits, latency by length, with the floors."""

from collections.abc import Sequence
from typing import Any

from benchmarks.harness.plot_style import (
    NothingToDraw,
    Theme,
    caption_of,
    colour_of,
    frame,
    legend_above,
    log_axis,
    new_figure,
    size_axis,
)
from benchmarks.harness.records import PagedTiming
from benchmarks.paged.cases import CACHE_LABELS, PAGE_SIZES
from benchmarks.paged.recorded import FLASHINFER
from benchmarks.paged.report import NATIVE

_SHADES = (0.5, 0.75, 1.0)
_HEADS = "32 heads and 8 key heads of 128"


def _measured(rows: Sequence[PagedTiming], group: str) -> list[PagedTiming]:
    """Native rows of a group that hold a time.

    Raises:
        NothingToDraw: when there is none.
    """
    found = [row for row in rows if row.group == group and row.implementation == NATIVE and row.median_us is not None]
    if not found:
        raise NothingToDraw(f"`rows` hold no time of {NATIVE!r} in group {group!r}; nothing can be drawn")
    return found


def draw_decode(rows: Sequence[PagedTiming], theme: Theme) -> Any:
    """TB/s of group "decode": a group of bars per workload and cache, a bar per page size and implementation."""
    ours = _measured(rows, "decode")
    shown = [row for row in rows if row.group == "decode" and row.tb_per_s is not None and row.page_size is not None]
    labels = list(dict.fromkeys((row.workload, row.cache) for row in ours))
    first = {label: next(row for row in ours if (row.workload, row.cache) == label) for label in labels}
    rates = {(row.implementation, row.workload, row.cache, row.page_size): row.tb_per_s for row in shown}
    figure, (axis,) = new_figure(1, 9.0, 4.4)
    frame(
        figure,
        "Decoding from a paged cache: keys and values read, TB/s",
        below=f"One bfloat16 query of each sequence, {_HEADS}; pages in random order, none shared; each byte once.",
        note=f"medians; FlashInfer 0.7.2 as recorded on an H200, not run here. {caption_of(ours[0])}",
    )
    series = [(name, size) for name in (NATIVE, FLASHINFER) for size in PAGE_SIZES]
    width = 0.84 / len(series)
    for index, (name, size) in enumerate(series):
        points = [
            (place + (index - len(series) / 2 + 0.5) * width, rates.get((name, *label, size)))
            for place, label in enumerate(labels)
        ]
        points = [(x, y) for x, y in points if y is not None]
        if points:
            color, title = (theme.ours, "blockdiag") if name == NATIVE else (colour_of(FLASHINFER, theme), "FlashInfer")
            alpha = _SHADES[PAGE_SIZES.index(size)]
            label = f"{title}, pages of {size}"
            axis.bar(*zip(*points, strict=True), 0.92 * width, color=color, alpha=alpha, label=label)
    _draw_read_rate(axis, ours, theme)
    names = [f"{row.batch} x {row.kv_length // 1024}K\n{CACHE_LABELS[row.cache]}" for row in first.values()]
    axis.set_xticks(range(len(labels)), names)
    axis.tick_params(axis="x", length=0)
    axis.margins(x=0.01)
    axis.grid(axis="y")
    legend_above(figure, [axis], columns=4)
    return figure


def draw_splits(rows: Sequence[PagedTiming], theme: Theme) -> Any:
    """TB/s by number of splits, a line per workload and cache; what the library chooses is circled."""
    shown = [row for row in _measured(rows, "splits") if row.tb_per_s is not None]
    figure, (axis,) = new_figure(1, 9.0, 4.4)
    frame(
        figure,
        "Splits of the keys are chosen from shapes alone",
        below="Keys and values read, TB/s, by the number of parts that the keys of each sequence are divided into; a "
        "circle is what the library chooses.",
        note=f"one query of each sequence, {_HEADS}, pages of 64, medians. {caption_of(shown[0])}",
    )
    for index, label in enumerate(dict.fromkeys((row.workload, row.cache) for row in shown)):
        mine = [row for row in shown if (row.workload, row.cache) == label]
        points = sorted((row.splits or 1, row.tb_per_s or 0.0) for row in mine)
        color, marker = theme.series[index % len(theme.series)], "osDv^P"[index % 6]
        name = f"{mine[0].batch} x {mine[0].kv_length // 1024}K, {CACHE_LABELS[label[1]]}"
        axis.plot(*zip(*points, strict=True), color=color, marker=marker, linewidth=1.6, label=name)
        chosen = [(row.splits, row.tb_per_s) for row in mine if row.is_chosen]
        if chosen:
            axis.plot(*chosen[0], marker="o", markersize=13, markeredgewidth=1.6, color=color, fillstyle="none")
    _draw_read_rate(axis, shown, theme)
    axis.set_xscale("log", base=2)
    ticks = sorted({row.splits for row in shown if row.splits is not None and not row.is_chosen})
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.minorticks_off()
    axis.set_xlabel("splits")
    axis.set_ylim(bottom=0)
    axis.grid()
    legend_above(figure, [axis], columns=4)
    return figure


def draw_short(rows: Sequence[PagedTiming], theme: Theme) -> Any:
    """Microseconds of one query by length of its cache, both axes logarithmic, with the floor."""
    shown = [row for row in _measured(rows, "short") if row.page_size == max(PAGE_SIZES)]
    long = [
        row
        for row in rows
        if row.group == "decode"
        and row.implementation == NATIVE
        and row.batch == 1
        and row.page_size == max(PAGE_SIZES)
    ]
    figure, axes = new_figure(2, 9.0, 4.2)
    frame(
        figure,
        "One sequence: latency by length of its cache",
        below=f"Microseconds of one query, {_HEADS}, pages of 64; the floor is the cache read once at the rate of the "
        "same run.",
        note=f"native launches replayed as a CUDA graph, medians. {caption_of(shown[0])}",
    )
    for axis, cache in zip(axes, ("bfloat16", "float8_e4m3fn"), strict=True):
        beyond = [row for row in long if row.cache == cache]
        for kind, label, marker in (("in_l2", "cache in the L2", "s"), ("in_memory", "cache in memory", "o")):
            mine = [row for row in shown if row.cache == cache and row.case.endswith(kind)]
            mine += beyond if kind == "in_memory" else []
            points = sorted((row.kv_length, row.median_us) for row in mine)
            color = theme.ours if kind == "in_memory" else theme.ours_too
            if points:
                axis.plot(*zip(*points, strict=True), color=color, marker=marker, linewidth=2, label=label)
        every = [*beyond, *(row for row in shown if row.cache == cache)]
        floors = {row.kv_length: row.floor_us for row in every if row.floor_us is not None}
        if floors:
            axis.plot(*zip(*sorted(floors.items()), strict=True), color=theme.floor, linestyle="--", label="floor")
        size_axis(axis, sorted(floors))
        log_axis(axis, "y")
        axis.set_title(cache)
        axis.set_xlabel("keys of the sequence")
        axis.grid()
    legend_above(figure, axes, columns=3)
    return figure


def _draw_read_rate(axis: Any, rows: Sequence[PagedTiming], theme: Theme) -> None:
    rate = next((row.read_tb_per_s for row in rows if row.read_tb_per_s is not None), None)
    if rate is not None:
        axis.axhline(rate, color=theme.floor, linestyle="--", linewidth=1.2, label="reading 4 GiB")
