"""Matplotlib's backend in the notebooks of the site: every figure is shown for light pages and for dark ones.

It is IPython's inline backend. Figures also have an HTML form with two pictures, of which the theme shows the one that
fits. Outside of the site, as in Jupyter, notebooks use the inline backend itself, and so one picture.
"""

import base64
import io
from typing import Any

import matplotlib
import numpy as np
from IPython import get_ipython
from matplotlib import colors
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure, FigureBase
from matplotlib_inline.backend_inline import *  # noqa: F403
from matplotlib_inline.backend_inline import configure_inline_support

# Colours of the theme's dark pages.
BACKGROUND, INK = colors.to_rgb("#131416"), colors.to_rgb("#cfd0d0")

# Colours whose channels differ by less are shades of grey.
_GREY = 0.06
# More entries make a colormap a scale, which is read by its colour bar and stays as it is.
_MOST_COLOURS = 16
_PROPERTIES = ("color", "facecolor", "edgecolor", "markerfacecolor", "markeredgecolor")


def darkened(rgba: Any) -> Any:
    """Return colours [..., 3 or 4] for a dark page: white becomes the background, black the ink, and hues stay."""
    rgba = np.array(rgba, float)
    rgb = rgba[..., :3]
    lightness = rgb.mean(axis=-1, keepdims=True)
    is_grey = np.ptp(rgb, axis=-1, keepdims=True) < _GREY
    rgba[..., :3] = np.where(is_grey, np.array(INK) + lightness * (np.array(BACKGROUND) - np.array(INK)), rgb)
    return rgba


def darken(figure: Figure) -> None:
    """Change the colours of a figure, which has been drawn, to those for a dark page."""
    for artist in dict.fromkeys(figure.findobj()):
        # The background of a figure or axes is a patch of its own.
        if not isinstance(artist, Axes | FigureBase):
            _darken_properties(artist)
        if isinstance(artist, ScalarMappable):
            _darken_data(artist)


def _darken_properties(artist: Any) -> None:
    """Change all colours of an artist. They are read before any is set, because some follow others."""
    found = {}
    for name in _PROPERTIES:
        getter, setter = (getattr(artist, f"{verb}_{name}", None) for verb in ("get", "set"))
        if getter is None or setter is None:
            continue
        value = getter()
        if (isinstance(value, str) and value == "none") or np.size(value) == 0:
            continue
        changed = darkened(colors.to_rgba_array(value))
        found[setter] = changed if np.ndim(value) == 2 else tuple(changed[0])
    for setter, value in found.items():
        setter(value)


def _darken_data(artist: Any) -> None:
    """Change pixels that are colours, and colormaps of a few colours."""
    data, cmap = artist.get_array(), artist.get_cmap()
    if data is not None and np.ndim(data) == 3:
        scale = 255 if data.dtype.kind in "iu" else 1
        artist.set_data(darkened(np.asarray(data) / scale))
    elif isinstance(cmap, colors.ListedColormap) and cmap.N <= _MOST_COLOURS:
        artist.set_cmap(colors.ListedColormap(darkened(colors.to_rgba_array(cmap.colors))))


def pictures_as_html(figure: Figure) -> str:
    """Return HTML with a picture for light pages and one for dark pages, whose colours the figure then has."""
    light = _png(figure)
    darken(figure)
    pairs = (("only-light", light), ("only-dark", _png(figure)))
    return "".join(f'<img class="{name}" alt="" src="data:image/png;base64,{text}">' for name, text in pairs)


def _png(figure: Figure) -> str:
    file = io.BytesIO()
    figure.savefig(file, format="png", bbox_inches="tight", facecolor=figure.get_facecolor())
    return base64.b64encode(file.getvalue()).decode()


def _enable() -> None:
    """Show figures at the end of their cells, as the inline backend does, and give them their HTML form."""
    shell = get_ipython()
    if shell is None:
        return
    matplotlib.interactive(True)
    configure_inline_support(shell, "module://matplotlib_inline.backend_inline")
    shell.display_formatter.formatters["text/html"].for_type(Figure, pictures_as_html)


_enable()
