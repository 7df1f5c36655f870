"""The look of all pictures: two themes, one palette, one name and mark for each implementation, small PNG files.

Colours are Okabe and Ito's, which colour-blind readers can tell apart; marks, dashes and labels say the same without
them. Every picture is drawn once for light pages and once for dark ones: `name.png` and `name-dark.png`.
"""

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

BLUE, SKY, GREEN, YELLOW = "#0072B2", "#56B4E9", "#009E73", "#F0E442"
ORANGE, VERMILLION, PURPLE = "#E69F00", "#D55E00", "#CC79A7"

DPI = 150
COLOURS_OF_A_FILE = 160
"""What is lost of the smoothed edges of lines and letters no eye sees, and files are less than half as large."""


@dataclass(frozen=True)
class Theme:
    """Colours of one kind of page.

    Attributes:
        suffix: what follows the name of a picture in its file's.
        background, ink, muted, faint: of the page, of text, of what matters less, and of grids and empty tiles.
        ours, ours_too: this library, and its second shade.
        neutral: an implementation without a colour of its own.
        last: the sixth of `series`, of which the background decides.
    """

    suffix: str
    background: str
    ink: str
    muted: str
    faint: str
    ours: str
    ours_too: str
    neutral: str
    last: str
    floor: str = VERMILLION

    @property
    def series(self) -> tuple[str, ...]:
        """Colours of things that are equals, in the order in which they are taken."""
        return self.ours, ORANGE, GREEN, PURPLE, self.ours_too, self.last

    @property
    def settings(self) -> dict[str, Any]:
        """Matplotlib's settings: those of `plots.mplstyle`, and colours."""
        import matplotlib

        shared = matplotlib.rc_params_from_file(Path(__file__).with_name("plots.mplstyle"), use_default_template=False)
        return {**shared, **self.colours}

    @property
    def colours(self) -> dict[str, Any]:
        """Matplotlib's settings of colours."""
        colours = {
            self.background: ("axes.facecolor", "figure.facecolor", "savefig.facecolor"),
            self.ink: ("axes.labelcolor", "axes.titlecolor", "text.color", "xtick.labelcolor", "ytick.labelcolor"),
            self.muted: ("axes.edgecolor", "xtick.color", "ytick.color"),
            self.faint: ("grid.color",),
        }
        return {name: colour for colour, names in colours.items() for name in names}


LIGHT = Theme("", "#ffffff", "#1f2328", "#59636e", "#dfe3e8", BLUE, SKY, "#7b8490", "#000000")
DARK = Theme("-dark", "#0d1117", "#e6edf3", "#9198a1", "#2a313a", SKY, BLUE, "#9aa3ad", YELLOW)
THEMES = (LIGHT, DARK)


@dataclass(frozen=True)
class Look:
    """How an implementation appears.

    Attributes:
        label: its name.
        colour: None is the theme's neutral one, "ours" and "ours_too" the theme's.
        marker: of matplotlib.
        line: matplotlib's style of its lines; what was not measured by the run is dashed or dotted.
    """

    label: str
    colour: str | None = None
    marker: str = "o"
    line: str = "-"
    width: float = field(default=1.4, kw_only=True)


LOOKS: Mapping[str, Look] = {
    "triton": Look("blockdiag", "ours", width=2.4),
    "triton-torch": Look("blockdiag, from torch", "ours_too", "."),
    "triton-rope-apart": Look("blockdiag, rotary apart", "ours_too", "P"),
    "xla": Look("blockdiag, XLA", "ours_too", "X"),
    "torch-flex": Look("FlexAttention", PURPLE, "D"),
    "torch-flex-64": Look("FlexAttention, blocks of 64", PURPLE, "D"),
    "torch-flex-128": Look("FlexAttention, blocks of 128", PURPLE, "d"),
    "torch-fa2": Look("FlashAttention 2 (torch)", None, "s"),
    "torch-varlen": Look("torch varlen_attn", None, "p"),
    "torch-efficient": Look("memory-efficient (torch)", None, "^"),
    "torch-cudnn": Look("cuDNN (torch)", GREEN, "v"),
    "torch-compile": Look("torch.compile", None, "^"),
    "jax-cudnn": Look("cuDNN (jax.nn)", GREEN, "<"),
    "jax-einsum": Look("einsum (XLA)", ORANGE, "h"),
    "jax-jit": Look("jax.jit (XLA)", ORANGE, "h"),
    "flashmoba-measured": Look("FlashMoBA, recorded on an H200", PURPLE, "D", "--"),
    "flashmoba-published": Look("FlashMoBA, published (H100)", PURPLE, "x", ":"),
    "moonshot-moba-published": Look("MoBA, published (H100)", ORANGE, "x", ":"),
    "fa2-published": Look("FlashAttention 2, published (H100)", None, "x", ":"),
    "flashinfer-recorded": Look("FlashInfer, recorded on an H200", PURPLE, "D", "--"),
}


def colour_of(name: str, theme: Theme) -> str:
    """The colour of an implementation."""
    colour = LOOKS[name].colour
    named = {None: theme.neutral, "ours": theme.ours, "ours_too": theme.ours_too}
    return named.get(colour) or str(colour)


def marks(name: str, theme: Theme) -> dict[str, Any]:
    """matplotlib's arguments for a mark of an implementation; this library's is on top."""
    is_ours = name == "triton"
    return {
        "color": colour_of(name, theme),
        "marker": LOOKS[name].marker,
        "markersize": 7 if is_ours else 5,
        "zorder": 5 if is_ours else 3,
        "label": LOOKS[name].label,
    }


class NothingToDraw(ValueError):
    """The rows hold nothing of what a picture shows."""


class Sourced(Protocol):
    """A row that says where it was measured."""

    @property
    def device(self) -> str: ...
    @property
    def driver(self) -> str: ...
    @property
    def jax(self) -> str: ...
    @property
    def torch(self) -> str: ...
    @property
    def triton(self) -> str: ...
    @property
    def date(self) -> str: ...


def caption_of(row: Sourced) -> str:
    """Where and when a row was measured."""
    return f"{row.device}, driver {row.driver}, jax {row.jax}, torch {row.torch}, triton {row.triton}, {row.date}"


def new_figure(columns: int, width: float, height: float, *, rows: int = 1) -> tuple[Any, list[Any]]:
    """A figure drawn without any window system, and its axes, row by row."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(rows, columns, index + 1) for index in range(rows * columns)]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    return figure, axes


def frame(figure: Any, title: str, *, below: str = "", note: str) -> None:
    """What a picture says above everything, a sentence on what is shown below that, where it is from at the foot."""
    width, height = figure.get_size_inches()
    said = textwrap.wrap(below, int(width * 15.3))
    sources = textwrap.wrap(note, int(width * 20))
    top = (0.36 + 0.17 * len(said) + 0.04) / height
    bottom = (0.10 + 0.14 * len(sources)) / height
    figure.get_layout_engine().set(rect=(0, bottom, 1, 1 - top - bottom))
    left = 0.1 / width
    figure.text(left, 1 - 0.08 / height, title, va="top", fontsize=11.5, fontweight="bold")
    muted = _muted()
    figure.text(left, 1 - 0.34 / height, "\n".join(said), va="top", fontsize=8.5, color=muted)
    figure.text(left, 0.06 / height, "\n".join(sources), va="bottom", fontsize=6.8, color=muted)


def _muted() -> str:
    """The theme's colour for what matters less, as it is set while drawing."""
    import matplotlib

    return str(matplotlib.rcParams["xtick.color"])


def legend_above(figure: Any, axes: Sequence[Any], *, columns: int) -> None:
    """One legend of all axes below what `frame` says, each label once."""
    found: dict[str, Any] = {}
    for axis in axes:
        found |= {label: handle for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    # The layout makes no room for a legend at a place of our own choice.
    lines = -(-len(found) // columns)
    room = (0.18 * lines + 0.08) / figure.get_size_inches()[1]
    left, bottom, width, height = figure.get_layout_engine().get()["rect"]
    figure.get_layout_engine().set(rect=(left, bottom, width, height - room))
    drawn = figure.legend(
        found.values(),
        found.keys(),
        loc="upper left",
        bbox_to_anchor=(left, bottom + height),
        ncols=columns,
        handletextpad=0.5,
        borderaxespad=0.2,
        labelspacing=0.3,
    )
    drawn.set_in_layout(False)


@dataclass(frozen=True)
class Dot:
    """A mark of `draw_over_floor`.

    Attributes:
        case: its line.
        implementation: one of `LOOKS`.
        over_floor: where it lies.
        text: written at the end of its line; empty is nothing.
        far: `over_floor` as text, where it is beyond `FAR`.
    """

    case: str
    implementation: str
    over_floor: float
    text: str = ""
    far: str = ""


FAR = 24.0
"""Times over the floor that would leave no room for the others."""


def _far_at_the_end(dots: Sequence[Dot]) -> list[Dot]:
    """The dots of a case, those beyond `FAR` side by side behind it."""
    far = sorted((dot for dot in dots if dot.over_floor > FAR), key=lambda dot: dot.over_floor)
    moved = [
        replace(dot, over_floor=FAR * 1.55 ** (index + 0.5), far=f"{dot.over_floor:.0f}x")
        for index, dot in enumerate(far)
    ]
    return [dot for dot in dots if dot.over_floor <= FAR] + moved


def draw_over_floor(axis: Any, cases: Sequence[str], dots: Iterable[Dot], theme: Theme) -> None:
    """A line per case and a mark per implementation, at its time over the floor of the case: further left is better.

    Marks beyond `FAR` stand at the end of their line, with their number.
    """
    dots = [placed for case in cases for placed in _far_at_the_end([dot for dot in dots if dot.case == case])]
    for place, case in enumerate(cases):
        values = [dot.over_floor for dot in dots if dot.case == case]
        if values:
            axis.plot([1.0, max(values)], [place, place], color=theme.faint, linewidth=1.2, zorder=1)
    for name in LOOKS:
        found = [dot for dot in dots if dot.implementation == name]
        if found:
            places = [cases.index(dot.case) for dot in found]
            axis.plot([dot.over_floor for dot in found], places, linestyle="none", **marks(name, theme))
    for dot in dots:
        if dot.over_floor > FAR:
            where = {"xytext": (0, 4), "textcoords": "offset points", "ha": "center", "va": "bottom"}
            axis.annotate(dot.far, (dot.over_floor, cases.index(dot.case)), fontsize=6, color=theme.muted, **where)
        if dot.text:
            place = 1.015, cases.index(dot.case)
            where = {"xycoords": ("axes fraction", "data"), "va": "center", "annotation_clip": False}
            axis.annotate(dot.text, place, fontsize=7.5, color=theme.ours, **where)
    axis.axvline(1.0, color=theme.floor, linestyle="--", linewidth=1.2, zorder=2)
    axis.set_xlim(0.8, 1.15 * max([1.0, *(dot.over_floor for dot in dots)]))
    log_axis(axis, "x", subs=(1.0, 2.0, 5.0))
    ticks = axis.xaxis.get_major_formatter()
    # Behind the last mark that stands at its place there is no scale.
    axis.xaxis.set_major_formatter(lambda value, place: ticks(value, place) if value <= FAR else "")
    axis.grid(axis="x", which="major")
    axis.set_yticks(range(len(cases)), cases)
    axis.tick_params(axis="y", length=0)
    axis.set_ylim(len(cases) - 0.4, -0.7)


def log_axis(axis: Any, which: str, *, subs: Sequence[float] = (1.0,), unit: str = "") -> None:
    """A logarithmic axis with plain numbers: 0.5, 1, 2, 1,000."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    getattr(axis, f"set_{which}scale")("log")
    ticks = getattr(axis, f"{which}axis")
    ticks.set_major_locator(LogLocator(10, subs=subs))
    ticks.set_major_formatter(FuncFormatter(lambda value, place: f"{value:,.6g}{unit}"))
    ticks.set_minor_formatter(NullFormatter())
    ticks.set_tick_params(which="minor", length=0)


def size_axis(axis: Any, sizes: Sequence[int], *, vertical: bool = False) -> None:
    """A logarithmic axis of tokens, with their numbers at the ticks: 8K, 16K."""
    which = "y" if vertical else "x"
    getattr(axis, f"set_{which}scale")("log", base=2)
    getattr(axis, f"set_{which}ticks")(sizes, [size_name(size) for size in sizes])
    axis.minorticks_off()


def size_name(tokens: int) -> str:
    """8K, 512K, 1M."""
    return f"{tokens >> 20}M" if tokens >= 1 << 20 else f"{tokens >> 10}K" if tokens >= 1 << 10 else str(tokens)


def save_picture(draw: Callable[[Theme], Any], folder: Path, name: str) -> list[Path]:
    """Draw a picture in both themes and write its two files; returns them.

    Args:
        draw: makes the figure of a theme, whose settings are matplotlib's meanwhile.
    """
    paths = [folder / f"{name}{theme.suffix}.png" for theme in THEMES]
    for theme, path in zip(THEMES, paths, strict=True):
        save_one(draw, theme, path)
    return paths


def save_one(draw: Callable[[Theme], Any], theme: Theme, path: Path) -> None:
    """Draw a picture in one theme and write its file."""
    import matplotlib

    with matplotlib.rc_context(theme.settings):
        write_png(draw(theme), path)


def write_png(figure: Any, path: Path) -> None:
    """A figure as a file of its most frequent colours, which is the same each time."""
    import numpy as np
    from PIL import Image  # what matplotlib itself writes files with

    figure.set_dpi(DPI)
    figure.canvas.draw()
    pixels = np.asarray(figure.canvas.buffer_rgba())[..., :3].astype(np.int32)
    codes, places, counts = np.unique(pixels @ [65536, 256, 1], return_inverse=True, return_counts=True)
    colours = np.stack([codes >> 16, codes >> 8 & 255, codes & 255], axis=1)
    frequent = colours[np.argsort(-counts, kind="stable")[:COLOURS_OF_A_FILE]]
    distances = ((colours[:, None] - frequent) ** 2).sum(axis=2)
    nearest = distances.argmin(axis=1).astype(np.uint8)[places]
    few = Image.frombytes("P", (pixels.shape[1], pixels.shape[0]), nearest.tobytes())
    few.putpalette(frequent.astype(np.uint8).tobytes())
    path.parent.mkdir(parents=True, exist_ok=True)
    few.save(path, optimize=True)
