"""README's picture: the masks of the four operations, and their times beside those of other implementations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.plot_style import NothingToDraw, Theme, caption_of, colour_of, frame, new_figure
from benchmarks.harness.records import FuseTiming, MoBATiming, PagedTiming, Timing
from benchmarks.overview.mask_plots import draw_mask, draw_pool, example_pool, fused_mask, moba_mask, packed_mask
from benchmarks.paged.recorded import FLASHINFER
from benchmarks.paged.report import NATIVE

OURS = "triton"
NAMES = {
    "triton": "blockdiag",
    "triton-torch": "blockdiag",
    "torch-flex": "FlexAttention",
    "torch-flex-64": "FlexAttention",
    "torch-cudnn": "cuDNN",
    "jax-cudnn": "cuDNN",
    "torch-fa2": "FlashAttention 2",
    "flashmoba-measured": "FlashMoBA *",
    FLASHINFER: "FlashInfer *",
    "jax-jit": "jax.jit (XLA)",
}


_NOTE = (
    "bfloat16, medians. Block diagonal: 262,144 tokens, 8 heads of 128, blocks of 64. MoBA: 2 x 65,536 tokens, 16 "
    "heads of 128, blocks of 128, top_k 8; FlashAttention 2 and cuDNN are dense. Paged: 16 x 32,768 keys, 32/8 heads "
    "of 128, pages of 64. fuse: plain jax.numpy, protein row attention with two biases. * as recorded on an H200."
)


@dataclass(frozen=True)
class Race:
    """Times of one workload of one operation.

    Attributes:
        title: the call.
        unit: of the times.
        times: by implementation, None if it does not fit into memory.
        floor: the least time at the hardware's rates, measured in the same run.
    """

    title: str
    unit: str
    times: Mapping[str, float | None]
    floor: float | None


def races(
    blocks: Sequence[Timing], moba: Sequence[MoBATiming], paged: Sequence[PagedTiming], fused: Sequence[FuseTiming]
) -> list[Race]:
    """Return a typical workload of each operation, forward and backward where it has both.

    Raises:
        NothingToDraw: if a time of this library is missing.
    """

    def both(rows: Sequence[Timing] | Sequence[MoBATiming] | Sequence[FuseTiming], case: str, *names: str) -> Race:
        found = {row.implementation: row for row in rows if row.case == case and row.pass_name == "fwd+bwd"}
        times = {name: found[name].median_ms for name in names if name in found}
        return Race("forward + backward", "ms", times, found[OURS].floor_ms if OURS in found else None)

    decode = {
        row.implementation: row
        for row in paged
        if (row.group, row.workload, row.cache, row.page_size) == ("decode", "b16_32k", "float8_e4m3fn", 64)
    }
    found = [
        both(blocks, "h8_d128", OURS, "torch-flex-64", "torch-cudnn", "torch-fa2"),
        both(moba, "n64k", OURS, "flashmoba-measured", "torch-cudnn", "torch-fa2"),
        Race(
            "one query, FP8 cache",
            "us",
            {name: decode[name].median_us for name in (NATIVE, FLASHINFER) if name in decode},
            decode[NATIVE].floor_us if NATIVE in decode else None,
        ),
        both(fused, "evoformer_d64", OURS, "torch-flex", "jax-cudnn"),
    ]
    for race, own in zip(found, (OURS, OURS, NATIVE, OURS), strict=True):
        if race.times.get(own) is None:
            raise NothingToDraw(f"`rows` hold no time of {own!r} for {race.title}; nothing can be drawn")
    return found


def draw_race(axis: Any, race: Race, theme: Theme) -> None:
    """Draw a bar per implementation, and the floor as a line."""
    names = list(race.times)
    longest = max(time for time in race.times.values() if time is not None)
    for place, (name, time) in enumerate(race.times.items()):
        is_ours = NAMES[name] == "blockdiag"
        color = theme.ours if is_ours else colour_of(name, theme)
        axis.barh(place, time or 0.0, color=color, height=0.62)
        text = "does not fit" if time is None else f"{time:.0f}" if time >= 100 else f"{time:.1f}"
        weight = "bold" if is_ours else "normal"
        begin = (time if time is not None else race.floor or 0.0) + 0.025 * longest
        axis.text(begin, place, text, va="center", fontsize=8, fontweight=weight, color=theme.ink)
    if race.floor is not None:
        axis.axvline(race.floor, color=theme.floor, linestyle="--", linewidth=1.2)
    axis.set_yticks(range(len(names)), [NAMES[name] for name in names])
    axis.get_yticklabels()[0].set_fontweight("bold")
    axis.set_ylim(3.6, -0.6)
    axis.set_xlim(0, 1.25 * longest)
    axis.set_xticks([])
    axis.tick_params(axis="y", length=0, labelsize=7.5)
    axis.spines["bottom"].set_visible(False)
    axis.set_title(f"{race.title}, {race.unit}", fontsize=8, color=theme.muted)


def draw_overview(
    blocks: Sequence[Timing],
    moba: Sequence[MoBATiming],
    paged: Sequence[PagedTiming],
    fused: Sequence[FuseTiming],
    theme: Theme,
) -> Any:
    """Draw the masks above and the times below, a column per operation."""
    found = races(blocks, moba, paged, fused)
    first = next(row for row in blocks if row.median_ms is not None)
    figure, axes = new_figure(4, 9.6, 4.9, rows=2)
    frame(
        figure,
        "Four operations, one library",
        below="Above: who sees whom, and where pages lie. Below: times on one GPU; dashed: the least that its measured "
        "bandwidth and rate of products allow.",
        note=f"{_NOTE} {caption_of(first)}",
    )
    masks = packed_mask(is_causal=True), moba_mask(), None, fused_mask("sliding_window")
    titles = "block diagonal", "MoBA", "paged decode", "fuse"
    for axis, mask, title in zip(axes[:4], masks, titles, strict=True):
        if mask is None:
            draw_pool(axis, example_pool(), theme)
        else:
            draw_mask(axis, mask, theme)
            axis.set_xticks([])
            axis.set_yticks([])
        axis.set_title(title, fontsize=10, fontweight="bold")
    for axis, race in zip(axes[4:], found, strict=True):
        draw_race(axis, race, theme)
    return figure
