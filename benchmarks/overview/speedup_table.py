"""README's tables of speed-ups, and of cases where other implementations are faster, from the recorded rows."""

import textwrap
from collections.abc import Iterable, Sequence

from benchmarks.harness.plot_style import LOOKS
from benchmarks.harness.records import DenseTiming, FuseTiming, GalleryTiming, MoBATiming, PagedTiming, Timing, dates_of
from benchmarks.overview.speedups import (
    SpeedUp,
    behind,
    block_diagonal_speedups,
    contiguous_factors,
    fuse_speedups,
    moba_speedups,
    paged_speedups,
    slower_variants,
)

# The workloads of each operation that the table shows.
SHOWN = {
    "block diagonal": (
        "8 heads of 128",
        "16 heads of 64",
        "8 heads of 128, 2 key heads",
        "8 heads of 128, rotary",
        "packed, 4 heads of 128",
        "packed, rotary",
    ),
    "MoBA": tuple(f"{shape}, 16 heads of 128, blocks of 128, top_k 8" for shape in
                  ("2 x 8,192", "2 x 65,536", "2 x 131,072", "1 x 1,048,576")),
    "paged decode": tuple(f"{shape} keys, {cache}, pages of 64" for shape in ("1 x 131,072", "16 x 32,768")
                          for cache in ("bf16", "e4m3")),
    "fuse": (
        "row attention 8 x 256 x 256, heads of 64",
        "row attention 8 x 256 x 256, heads of 128",
        "differential 1 x 16K, heads of 64",
        "causal 4 x 4K, 16/16",
        "window 4 x 4K, 16/16",
        "documents 4 x 4K, 16/16",
        "soft cap 4 x 4K, 16/16",
        "ALiBi 1 x 16K, 16/16",
    ),
    "dense": (
        "causal 4 x 8K, 48 heads of 128",
        "causal 1 x 16K, 16 heads of 128",
        "causal 1 x 16K, 16/2 heads of 128",
        "full 1 x 16K, 16 heads of 128",
        "causal 1 x 16K, 16 heads of 64",
        "causal 1 x 16K, 8 heads of 256",
    ),
}  # fmt: skip
TITLES = {
    "block diagonal": "Block-diagonal attention, blocks of 64, 262,144 tokens (packed: 1152 sequences of 800 to 2000)",
    "MoBA": "Mixture of block attention, sequences x tokens",
    "paged decode": "Paged decode, one query of each sequence, 32 heads and 8 key heads of 128",
    "fuse": "`fuse`, batch x tokens, heads/key heads of 64",
    "dense": "`fuse`, plain attention",
}


def summary_section(
    blocks: Sequence[Timing],
    moba: Sequence[MoBATiming],
    paged: Sequence[PagedTiming],
    fused: Sequence[FuseTiming],
    dense: Sequence[DenseTiming],
) -> str:
    """Return a table of all four operations, and where it was measured.

    Raises:
        ValueError: if an operation was not measured.
    """
    found = {
        "block diagonal": block_diagonal_speedups(blocks),
        "MoBA": moba_speedups(moba),
        "paged decode": paged_speedups(paged),
        "fuse": fuse_speedups(fused),
        "dense": fuse_speedups(dense),
    }
    lines = [
        "| bfloat16 | time (over the floor) | fastest other implementation | speed-up |",
        "|---|---|---|---|",
    ]
    for operation, workloads in SHOWN.items():
        by_workload = {one.workload: one for one in found[operation]}
        shown = [by_workload[workload] for workload in workloads if workload in by_workload]
        if not shown:
            raise ValueError(f"the results hold no workload of {operation} that the table shows; run the benchmark")
        passes = "" if shown[0].passes == "one query" else f"; {shown[0].passes}"
        lines.append(f"| **{TITLES[operation]}{passes}** | | | |")
        lines += [_line(one) for one in shown]
    return "\n".join([*lines, "", _origin([blocks, moba, paged, fused, dense])])


def _line(one: SpeedUp) -> str:
    factor = "-" if one.factor is None else _factor(one.factor)
    over = "" if one.floor is None else f" ({one.ours / one.floor:.2f}x)"
    return f"| {one.workload} | {_time(one.ours)}{over} | {one.other_name} | {factor} |"


def _time(milliseconds: float) -> str:
    if milliseconds < 0.9995:
        return f"{1e3 * milliseconds:.0f} us"
    return f"{milliseconds:#.3g}".rstrip(".") + " ms"


def _factor(factor: float) -> str:
    """Format a factor, with two decimals near 1."""
    return f"{factor:.1f}x" if factor >= 1.2 else f"{factor:.2f}x"


def _origin(results: Iterable[Sequence[Timing | MoBATiming | PagedTiming | FuseTiming]]) -> str:
    measured = [
        next(row for row in rows if row.implementation in LOOKS and LOOKS[row.implementation].line == "-")
        for rows in results
    ]
    first = measured[0]
    return _filled(
        f"{first.device}, driver {first.driver}, jax {first.jax}, Triton {first.triton}, torch {first.torch}, "
        f"{dates_of(measured)}; "
        "medians through `jax.jit` (paged decode: native launches in a CUDA graph), each result checked against "
        "float64. The floor is the time of the compulsory bytes and products at the rates of the same run. The fastest "
        "other implementation measured on the same arrays is shown; * was recorded on an H200, not in the same run."
    )


def behind_section(
    blocks: Sequence[Timing],
    moba: Sequence[MoBATiming],
    paged: Sequence[PagedTiming],
    fused: Sequence[FuseTiming],
    gallery: Sequence[GalleryTiming],
    dense_rows: Sequence[DenseTiming] = (),
) -> str:
    """Return a table of every measured figure that is slower than another implementation's, and their count."""
    every = [
        *(one for name in ("fwd", "bwd", "fwd+bwd") for one in block_diagonal_speedups(blocks, name)),
        *(one for name in ("fwd", "bwd", "fwd+bwd") for one in moba_speedups(moba, name)),
        *paged_speedups(paged),
        *fuse_speedups(fused, ("fwd", "fwd+bwd")),
        *fuse_speedups(dense_rows, ("fwd", "fwd+bwd")),
    ]
    slower = behind(every)
    count = sum(one.factor is not None for one in every)
    rows = [
        f"| {one.operation}, {one.workload}, {one.passes} | {one.other_name} | {one.factor:.2f} |" for one in slower
    ]
    dense = {workload: factor for workload, factor in contiguous_factors(paged).items() if factor < 0.99}
    rows += [
        f"| paged decode, {workload} keys in bfloat16 | the fastest dense attention, without pages | {factor:.2f} |"
        for workload, factor in dense.items()
    ]
    rows += [
        f"| gallery, `{name}`, {passes} | XLA | {factor:.2f} |"
        for name, factors in slower_variants(gallery).items()
        for passes, factor in factors.items()
    ]
    if not rows:
        return "No measured pass is slower than another implementation."
    variants = len({row.variant for row in gallery})
    summary = (
        f"{len(slower)} of {count} measured passes are slower than the fastest other implementation of the same call, "
        f"and {len(slower_variants(gallery))} of {variants} gallery variants are slower than XLA. Decoding from pages "
        "is also compared with attention to contiguous keys."
    )
    lines = [_filled(summary), "", "| case | faster implementation | its time over ours |", "|---|---|---|"]
    return "\n".join([*lines, *rows])


def _filled(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)
