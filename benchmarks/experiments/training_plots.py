"""Pictures of what is learned: losses of the demos, recall of needles, and the routing of a trained model."""

import math
from collections.abc import Sequence
from typing import Any

from benchmarks.experiments.recall_records import RecallRow
from benchmarks.harness.plot_style import NothingToDraw, Theme, frame, legend_above, log_axis, new_figure
from blockdiag.demo.records import LossRow, RoutingRow

DEMO_TITLES = {"block_diagonal": "demo", "moba": "demo --attention moba"}


def draw_losses(rows: Sequence[LossRow], theme: Theme) -> Any:
    """Training losses in bits per byte, a panel per demo.

    Raises:
        NothingToDraw: when there are no rows.
    """
    if not rows:
        raise NothingToDraw("`rows` are empty; nothing can be drawn")
    demos = list(dict.fromkeys(row.demo for row in rows))
    figure, axes = new_figure(len(demos), 9.0, 3.6)
    devices = ", ".join(dict.fromkeys(f"{row.device}, jax {row.jax}, {row.date}" for row in rows))
    frame(
        figure,
        "Language models of the demos while they train",
        below="Training loss in bits per byte of English text, beside the same model under attention that JAX has. "
        "Curves that agree lie on each other.",
        note=f"python -m blockdiag demo. {devices}",
    )
    # The first curve is wide and the second one thin, for curves that agree.
    styles = ({"linewidth": 5, "color": theme.ours, "alpha": 0.55}, {"linewidth": 1.2, "color": theme.ink})
    for axis, demo in zip(axes, demos, strict=True):
        mine = [row for row in rows if row.demo == demo]
        for name, style in zip(dict.fromkeys(row.attention for row in mine), styles, strict=True):
            points = sorted((row.step, row.loss / math.log(2.0)) for row in mine if row.attention == name)
            axis.plot(*zip(*points, strict=True), label=name, **style)
        axis.set_title(DEMO_TITLES.get(demo, demo))
        axis.set_xlabel("training step")
        axis.grid()
        axis.legend()
    return figure


def draw_recall(rows: Sequence[RecallRow], theme: Theme) -> Any:
    """Signal-to-noise ratios and accuracies by block size: measured with marks, predicted dashed.

    Raises:
        NothingToDraw: when there are no rows.
    """
    if not rows:
        raise NothingToDraw("`rows` are empty; nothing can be drawn")
    figure, axes = new_figure(2, 9.0, 4.6)
    frame(
        figure,
        "Does routing find the block of a needle?",
        below="By keys of a block, at a constant number of attended tokens. Solid: measured by moba_routing on text. "
        "Dashed: predicted from independent tokens, sqrt(H / 2B) for random words.",
        note=f"python -m benchmarks recall. {rows[0].device}, jax {rows[0].jax}, {rows[0].date}",
    )
    ratios, accuracies = axes
    for index, kind in enumerate(dict.fromkeys(row.keys for row in rows)):
        found = [row for row in rows if row.keys == kind]
        sizes = [row.block_size for row in found]
        color = theme.series[index % len(theme.series)]
        measured = {"color": color, "marker": "osDv^P"[index % 6], "linewidth": 1.8, "label": kind}
        ratios.plot(sizes, [row.snr for row in found], **measured)
        ratios.plot(sizes, [row.predicted_snr for row in found], color=color, linestyle="--", linewidth=1.2)
        accuracies.errorbar(sizes, [row.accuracy for row in found], yerr=[row.error for row in found], **measured)
        accuracies.plot(sizes, [row.predicted_accuracy for row in found], color=color, linestyle="--", linewidth=1.2)
    first = [row for row in rows if row.keys == rows[0].keys]
    chance = [row.block_size for row in first], [row.chance for row in first]
    accuracies.plot(*chance, color=theme.muted, linestyle=":", linewidth=1.4, label="chance")
    for axis, title in ((ratios, "signal-to-noise ratio of block scores"), (accuracies, "needle's block is chosen")):
        axis.set_xscale("log", base=2)
        axis.set_xticks(chance[0], [str(size) for size in chance[0]])
        axis.minorticks_off()
        axis.set_xlabel("keys of a block")
        axis.set_title(title)
        axis.grid()
    log_axis(ratios, "y", subs=(1.0, 2.0, 5.0))
    accuracies.set_ylim(0, 1.04)
    legend_above(figure, axes, columns=5)
    return figure


def draw_routing(rows: Sequence[RoutingRow], theme: Theme) -> Any:
    """How often the queries of each block see each block, a panel per layer and head.

    Raises:
        NothingToDraw: when there are no rows.
    """
    import numpy as np

    if not rows:
        raise NothingToDraw("`rows` are empty; nothing can be drawn")
    layers, heads, blocks = (1 + max(getattr(row, name) for row in rows) for name in ("layer", "head", "query_block"))
    shares = np.full((layers, heads, blocks, blocks), np.nan)
    for row in rows:
        shares[row.layer, row.head, row.query_block, row.key_block] = row.share
    figure, axes = new_figure(heads, 9.0, 1.4 + 2.75 * layers, rows=layers)
    first = rows[0]
    frame(
        figure,
        "Which blocks do queries pick in real text?",
        below=f"One held-out sequence in the model of demo --attention moba, blocks of {first.block_size}, top_k "
        f"{first.top_k}: the share of a block's queries (downwards) that see a block of keys (to the right).",
        note=f"{first.device}, jax {first.jax}, {first.date}",
    )
    image = None
    for axis, share, (layer, head) in zip(
        axes, shares.reshape(-1, blocks, blocks), np.ndindex(layers, heads), strict=True
    ):
        image = axis.imshow(share, cmap=shade_map(theme), vmin=0, vmax=1, interpolation="nearest")
        axis.set_title(f"layer {layer}, head {head}")
        axis.set_xticks(range(0, blocks, 4))
        axis.set_yticks(range(0, blocks, 4))
        axis.spines[["left", "bottom"]].set_visible(False)
        axis.tick_params(length=0)
    figure.colorbar(image, ax=axes, shrink=0.6, aspect=30, label="share of queries")
    return figure


def shade_map(theme: Theme) -> Any:
    """From an empty tile's colour to this library's; what is not there is the page."""
    from matplotlib.colors import LinearSegmentedColormap

    shades = LinearSegmentedColormap.from_list("shares", [theme.faint, theme.ours])
    return shades.with_extremes(bad=theme.background)
