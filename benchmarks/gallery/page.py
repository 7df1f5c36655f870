"""The documentation page of the gallery: each variant's code, visited tiles, kernels and times."""

import inspect
import re
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
from matplotlib.colors import to_rgb

from benchmarks.gallery.cases import PASSES, SHOWN
from benchmarks.harness.plot_style import DARK, THEMES, new_figure
from benchmarks.harness.records import GalleryTiming, dates_of, read_rows
from blockdiag.fusion.explain import Explanation, RegionReport, explain
from blockdiag.fusion.gallery import GROUPS, VARIANTS, Variant
from blockdiag.interop.targets import compile_target

PAGE, PICTURES = "gallery.md", "gallery"
NOT_MEASURED = "-"

# Launch plans may depend on the GPU.
_ARCHITECTURE = 90

_INTRODUCTION = """\
# Gallery of variants

<!-- Written by `python -m benchmarks gallery-page`: change it there. -->

Each function is plain `jax.numpy`. [`fuse`](fusion.md) compiles it unchanged, with the gradients of all floating-point
arguments. `blockdiag.fusion.gallery` has these functions, and samples inputs for them.

- **Pictures** show the tiles of scores that are visited (blue) for the first sequence and head: queries downwards, keys
  to the right. A variant that visits all tiles has no picture. Pictures and kernels are for {tokens:,} tokens in
  bfloat16 and a head dimension of {head_dim}.
- **Kernels** are counted in lines of generated Triton, forward / backward. A kernel for Hopper follows the kernel that
  it replaces there. `explain(function)(*args).source` prints all of them.
- **Times** are of `jax.jit` of the fused function; "backward" is the function with all its gradients. The factor is
  XLA's time for the same function without `fuse`, in the same process, over the fused function's time.

{where}
"""


def explanation_of(variant: Variant) -> Explanation:
    """Return the explanation of a variant at the page's sizes, planned for Hopper."""
    with jax.default_device(jax.devices("cpu")[0]), compile_target(_ARCHITECTURE):
        return explain(variant.scaled)(**variant.make_inputs(jax.random.key(0), SHOWN))


def heading_of(variant: Variant) -> str:
    """Return the parts that do not depend on the compiler: name, note and code.

    The fence is `py`, because tests run the examples in `python` fences.
    """
    code = textwrap.dedent(inspect.getsource(variant.function)).strip()
    options = ", ".join(f"`{name}={value}`" for name, value in variant.options.items())
    note = f"{variant.note} Shown and timed with {options}." if options else variant.note
    return f"### {variant.name}\n\n{note}\n\n```py\n{code}\n```\n"


def times_of(rows: Sequence[GalleryTiming], name: str) -> str:
    """Return the cells of a variant's times: inputs, forward, forward and backward."""
    found = {row.pass_name: row for row in rows if row.variant == name}
    shape = next((row.shape for row in found.values() if row.ours_ms is not None), NOT_MEASURED)
    return " | ".join([shape, *(_time(found.get(pass_name)) for pass_name in PASSES)])


def _time(row: GalleryTiming | None) -> str:
    if row is None or row.ours_ms is None:
        return NOT_MEASURED
    return f"{row.ours_ms:.3f} ms" + ("" if row.speed_up is None else f", {row.speed_up:.1f}x")


def section_of(variant: Variant, explanation: Explanation, rows: Sequence[GalleryTiming]) -> str:
    """Return a variant's section of the page."""
    lines = [heading_of(variant)]
    lines += ["| tiles skipped | kernels, lines | timed with | forward | backward |", "|---|---|---|---|---|"]
    lines += [f"| {_skipped(explanation)} | {_kernels(explanation)} | {times_of(rows, variant.name)} |", ""]
    if picture_of(explanation) is not None:
        lines += [f"![Tiles of {variant.name}]({PICTURES}/{variant.name}.png)", ""]
    reasons = dict.fromkeys(row.note for row in rows if row.variant == variant.name and row.note)
    # File names are shown without their folders.
    refused = [f"Not fused: {re.sub(r'/[^ :]*/', '', explanation.reason)}."] if explanation.reason else []
    lines += [f"{reason}\n" for reason in (*refused, *(f"Times: {reason}." for reason in reasons))]
    return "\n".join(lines)


def _skipped(explanation: Explanation) -> str:
    if explanation.reason is not None:
        return NOT_MEASURED
    skipped = statistics.fmean(region.skipped for region in explanation.regions)
    return f"{skipped:.0%}" if skipped else "none, all visited"


def _kernels(explanation: Explanation) -> str:
    """Return the lines of each kernel, such as "39 / 45 + 40"; "+" also joins forward kernels of several regions."""
    if explanation.reason is not None:
        return NOT_MEASURED
    declined = [region.declined for region in explanation.regions if region.declined]
    if declined:
        return declined[0]
    kernels = [(name, text.count("\n")) for region in explanation.regions for name, text in region.kernels.items()]
    forward = " + ".join(str(lines) for name, lines in kernels if "forward" in name)
    return f"{forward} / {' + '.join(str(lines) for name, lines in kernels if 'forward' not in name)}"


def picture_of(explanation: Explanation) -> RegionReport | None:
    """Return the region whose tiles are drawn: the first one that skips any."""
    return next((region for region in explanation.regions if region.skipped), None)


def draw_tiles(region: RegionReport, folder: Path, name: str) -> list[Path]:
    """Write the tiles of the first batch index as small PNG files for light and dark pages; returns their paths.

    Files have the same bytes each time.
    """
    import matplotlib

    paths = [folder / f"{name}{theme.suffix}.png" for theme in THEMES]
    for theme, path in zip(THEMES, paths, strict=True):
        with matplotlib.rc_context(theme.colours if theme is DARK else {}):
            figure, (axis,) = new_figure(1, 2.0, 2.0)
        region.plot(axis)
        if theme is DARK:
            (image,) = axis.images
            image.set_data(np.where(region.visited[..., None], to_rgb(theme.ours), to_rgb(theme.faint)))
        axis.set_xticks([0, region.sizes["k"]])
        axis.set_yticks([0, region.sizes["q"]])
        axis.tick_params(labelsize=6)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=100, facecolor=figure.get_facecolor(), metadata={"Software": None})
    return paths


def page_of(explanations: Mapping[str, Explanation], rows: Sequence[GalleryTiming]) -> str:
    """Return the page of the explained variants, by group."""
    parts = [_INTRODUCTION.format(tokens=SHOWN.query_tokens, head_dim=SHOWN.head_dim, where=_where(rows))]
    for group, variants in GROUPS.items():
        shown = [variant for variant in variants if variant.name in explanations]
        if shown:
            parts += [f"## {group}\n", *(section_of(variant, explanations[variant.name], rows) for variant in shown)]
    return "\n".join(parts).rstrip() + "\n"


def _where(rows: Sequence[GalleryTiming]) -> str:
    """Return where times were measured, and the median of the factors."""
    if not rows:
        return "No times have been measured yet."
    row = rows[-1]
    text = f"Times were measured on an {row.device} in {row.dtype}, with jax {row.jax} and triton {row.triton}, "
    text += f"{dates_of(rows)}."
    for pass_name, name in zip(PASSES, ("forward", "backward"), strict=True):
        factors = [one.speed_up for one in rows if one.pass_name == pass_name and one.speed_up is not None]
        if factors:
            text += f" Median of {len(factors)} factors, {name}: {statistics.median(factors):.1f}."
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def recorded_times(path: Path) -> list[GalleryTiming]:
    """Return the rows of the device that was measured last; none if there is no file."""
    rows: list[GalleryTiming] = read_rows(path, GalleryTiming) if path.exists() else []
    return [row for row in rows if row.device == rows[-1].device]


def write_gallery(
    folder: Path, rows: Sequence[GalleryTiming], names: Sequence[str], *, say: Callable[[str], None] = print
) -> Path:
    """Write the page of some variants and their pictures, and delete pictures that the page does not show.

    Returns:
        The page's path.
    """
    explanations, drawn = {}, set()
    for name in names:
        explanations[name] = explanation = explanation_of(VARIANTS[name])
        region = picture_of(explanation)
        if region is not None:
            drawn.update(draw_tiles(region, folder / PICTURES, name))
        say(f"{name}: {_skipped(explanation)}, {_kernels(explanation)}")
    for path in (folder / PICTURES).glob("*.png"):
        if path not in drawn:
            path.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / PAGE
    page.write_text(page_of(explanations, rows), encoding="utf-8")
    return page
