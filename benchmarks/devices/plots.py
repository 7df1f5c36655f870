"""Picture of how devices share the queries of one sequence."""

from typing import Any

import numpy as np

from benchmarks.harness.plot_style import Theme, frame, new_figure
from blockdiag.common.zigzag import zigzag_order

_DEVICES = 4


def draw_zigzag(theme: Theme) -> Any:
    """Causal attention of four devices, in consecutive order and in zigzag order."""
    from matplotlib.colors import ListedColormap

    parts = 2 * _DEVICES
    orders = {"consecutive parts": np.arange(parts), "zigzag order": zigzag_order(parts, _DEVICES)}
    figure, axes = new_figure(2, 9.0, 5.0)
    frame(
        figure,
        "Which device computes which queries",
        below="Queries downwards, keys to the right, under a causal mask: colours are four devices. In consecutive "
        "parts the last device has seven times the work of the first one; in zigzag order all have the same.",
        note="blockdiag.zigzag_order",
    )
    place = np.arange(64 * parts) // 64
    seen = np.arange(64 * parts)[:, None] >= np.arange(64 * parts)[None]
    for axis, (title, order) in zip(axes, orders.items(), strict=True):
        owner = np.argsort(order) // 2
        shares = [seen[owner[place] == device].sum() / seen.sum() for device in range(_DEVICES)]
        colours = [theme.faint, *theme.series[:_DEVICES]]
        axis.imshow(
            np.where(seen, owner[place][:, None], -1),
            cmap=ListedColormap(colours),
            vmin=-1.5,
            vmax=_DEVICES - 0.5,
            interpolation="nearest",
            extent=(0, parts, parts, 0),
        )
        for part in range(parts):
            axis.text(-0.25, part + 0.5, f"GPU {owner[part]}", ha="right", va="center", fontsize=7.5)
        axis.set_title(f"{title}: {' / '.join(f'{100 * share:.0f}' for share in shares)}%")
        axis.set_xticks([])
        axis.set_yticks([])
        axis.spines[:].set_visible(False)
    return figure
