"""Pictures of block-diagonal attention: times of every case over its floor, and distances from float64."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.plot_style import (
    LOOKS,
    Dot,
    NothingToDraw,
    Theme,
    caption_of,
    colour_of,
    draw_over_floor,
    frame,
    legend_above,
    new_figure,
)
from benchmarks.harness.records import ErrorRow, Timing

OURS = "triton"
CASE_NAMES: Mapping[str, str] = {
    "h8_d128": "8 heads of 128",
    "h16_d64": "16 heads of 64",
    "gqa8_2_d128": "8 heads of 128, 2 key heads",
    "h8_d128_rotary": "8 heads of 128, rotary",
    "h8_d128_rotary_bf16": "the same, bfloat16 tables",
    "h16_d64_rotary": "16 heads of 64, rotary",
    "packed_h4_d128": "packed, 4 heads of 128",
    "packed_h4_d128_rotary": "packed, rotary",
}
# Launched from torch, the same kernels take the same time; the XLA implementation is there for a CPU.
SHOWN = tuple(name for name in LOOKS if name not in ("triton-torch", "xla"))
PASSES = {"fwd": "forward", "bwd": "backward"}


def draw_times(rows: Sequence[Timing], theme: Theme) -> Any:
    """Time over floor of every implementation in every case, forward and backward side by side.

    Raises:
        NothingToDraw: when this library was measured in no case.
    """
    timed = [row for row in rows if row.ratio_to_floor is not None and row.implementation in SHOWN]
    ours = [row for row in timed if row.implementation == OURS]
    if not ours:
        raise NothingToDraw(f"`rows` hold no time of {OURS!r} over its floor; nothing can be drawn")
    measured = {row.case for row in ours}
    cases = [case for case in CASE_NAMES if case in measured] + sorted(measured - CASE_NAMES.keys())
    names = [CASE_NAMES.get(case, case) for case in cases]
    figure, axes = new_figure(2, 9.0, 2.0 + 0.34 * len(cases))
    frame(
        figure,
        "Block-diagonal attention runs at the speed of a copy",
        below="Time over that of copying the same bytes (dashed); 262,144 tokens in blocks of 64, packed: 1152 "
        "sequences of 800 to 2000 tokens. Implementations without fused rotary embedding rotate first.",
        note=f"bfloat16, medians. {caption_of(ours[0])}",
    )
    for axis, (pass_name, title) in zip(axes, PASSES.items(), strict=True):
        dots = [
            Dot(
                CASE_NAMES.get(row.case, row.case),
                row.implementation,
                row.ratio_to_floor or 0.0,
                f"{row.median_ms:.2f} ms" if row.implementation == OURS else "",
            )
            for row in timed
            if row.pass_name == pass_name and row.case in measured
        ]
        draw_over_floor(axis, names, dots, theme)
        axis.set_title(title)
    axes[1].tick_params(labelleft=False)
    legend_above(figure, axes, columns=4)
    return figure


def draw_errors(rows: Sequence[ErrorRow], theme: Theme) -> Any:
    """Mean error of each tensor against float64, one group of bars per tensor, one panel per case.

    Raises:
        NothingToDraw: when no row holds an error.
    """
    measured = [row for row in rows if row.mean_error is not None and row.implementation in LOOKS]
    if not measured:
        raise NothingToDraw("`rows` hold no measured error; nothing can be drawn")
    cases = list(dict.fromkeys(row.case for row in measured))[:4]
    figure, axes = new_figure(len(cases), 9.0, 3.3)
    first = measured[0]
    frame(
        figure,
        "Block-diagonal attention: distance from float64",
        below="Mean absolute error of the output and of the gradients, units of 1e-4.",
        note=f"bfloat16, {first.tokens:,} tokens, mean of {first.seeds} inputs. {caption_of(first)}",
    )
    names = [name for name in LOOKS if any(row.implementation == name for row in measured)]
    for axis, case in zip(axes, cases, strict=True):
        mine = [row for row in measured if row.case == case]
        tensors = list(dict.fromkeys(row.tensor for row in mine if row.tensor != "all"))
        here = [name for name in names if any(row.implementation == name for row in mine)]
        for index, name in enumerate(here):
            errors = {row.tensor: row.mean_error for row in mine if row.implementation == name}
            values = [1e4 * (errors.get(tensor) or 0.0) for tensor in tensors]
            offsets = [place + (index - (len(here) - 1) / 2) * 0.8 / len(here) for place in range(len(tensors))]
            axis.bar(offsets, values, width=0.74 / len(here), color=colour_of(name, theme), label=LOOKS[name].label)
        axis.set_xticks(range(len(tensors)), tensors)
        axis.set_title(CASE_NAMES.get(case, case))
        axis.grid(axis="y")
    legend_above(figure, axes, columns=4)
    return figure
