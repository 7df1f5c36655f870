"""Writes the figures that README.md, benchmarks/README.md and pages of docs/ give, from the benchmark's CSV files.

python -m benchmarks.overview.tables            # rewrites the sections of these pages between their markers
python -m benchmarks.overview.tables --check    # fails if a section is not what the CSV files say
"""

import argparse
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.fuse.plots import case_name
from benchmarks.harness.records import FuseTiming, GalleryTiming, MoBATiming, PagedTiming, Timing, dates_of, read_rows
from benchmarks.overview.speedup_table import behind_section, summary_section

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"

OURS = "triton"
# The same compiled kernels, launched from torch.
NATIVE = "triton-torch"
# Column heading: the implementations of which the fastest that ran is compared with.
BASELINES = {
    "FlashAttention 2": ("torch-fa2",),
    "cuDNN (torch)": ("torch-cudnn",),
    "torch varlen": ("torch-varlen",),
    "FlexAttention": ("torch-flex-64", "torch-flex-128"),
    "best in JAX today": ("jax-einsum", "jax-cudnn"),
}
CASES = {
    "h8_d128": "8 heads of 128",
    "h16_d64": "16 heads of 64",
    "gqa8_2_d128": "8 heads of 128, 2 key heads",
    "h8_d128_rotary": "8 heads of 128, rotary",
    "h8_d128_rotary_bf16": "8 heads of 128, rotary, bfloat16 tables",
    "h16_d64_rotary": "16 heads of 64, rotary",
    "packed_h4_d128": "packed, 4 heads of 128",
    "packed_h4_d128_rotary": "packed, 4 heads of 128, rotary",
}

type Times = Mapping[tuple[str, str, str], Timing]


def section(rows: Iterable[Timing]) -> str:
    """The text between the markers: a table, and where and how it was measured."""
    times: Times = {(row.case, row.pass_name, row.implementation): row for row in rows if row.median_ms is not None}
    cases = [case for case in CASES if (case, "fwd", OURS) in times and (case, "bwd", OURS) in times]
    if not cases:
        raise ValueError(f"the results hold no times of implementation {OURS!r}; run python -m benchmarks")
    headings = ["forward", "backward", *BASELINES]
    lines = [
        _origin(times[cases[0], "fwd", OURS]),
        "",
        "| bfloat16, blocks of 64 | " + " | ".join(headings) + " |",
        "|---" * (len(headings) + 1) + "|",
    ]
    for case in cases:
        cells = [_time(times[case, name, OURS]) for name in ("fwd", "bwd")]
        cells += [_speed_up(times, case, names) for names in BASELINES.values()]
        lines.append(f"| {CASES[case]} | " + " | ".join(cells) + " |")
    lines += ["", _spread(times, cases)]
    return "\n".join(lines)


def _origin(row: Timing) -> str:
    text = (
        "Time of a call through `jax.jit`, in brackets over the time that a copy of the same bytes takes; then how "
        "many times faster forward and backward together are than what else computes the same (a dash: it cannot, or "
        "did not run). 262,144 tokens; packed: 1152 sequences of 800 to 2000 tokens. Where there is rotary embedding, "
        "the others rotate before they attend, in eager PyTorch or by XLA. "
        f"{row.device}, driver {row.driver}, jax {row.jax}, Triton {row.triton}, torch {row.torch}, {row.date}; "
        "medians, the implementations of a case interleaved in one process, by "
        "`python -m benchmarks block_diagonal`; [all figures](results/block_diagonal.csv)."
    )
    return _filled(text)


def _spread(times: Times, cases: Iterable[str]) -> str:
    """How far the samples lie apart, and what the same kernels take where the GPU's own clock times them."""
    rows = [times[case, name, OURS] for case in cases for name in ("fwd", "bwd")]
    natives = [native for row in rows if (native := times.get((row.case, row.pass_name, NATIVE))) is not None]
    text = (
        "Calls of JAX are timed by the host's clock, and the middle three fifths of their samples lie within "
        f"{_largest_spread(rows):.0%} of the median."
    )
    if natives:
        ratios = ", ".join(f"{native.case} {native.pass_name} {native.ratio_to_floor:.2f}x" for native in natives)
        text += (
            " The same compiled kernels, launched from torch and timed by CUDA events (within "
            f"{_largest_spread(natives):.1%}): {ratios}."
        )
    return _filled(text)


def _largest_spread(rows: Iterable[Timing]) -> float:
    """Largest distance of a row's 20th or 80th percentile from its median, as a fraction of the median."""
    return max(max(row.p80_ms - row.median_ms, row.median_ms - row.p20_ms) / row.median_ms for row in rows)


def _time(row: Timing) -> str:
    ratio = "" if row.ratio_to_floor is None else f" ({row.ratio_to_floor:.2f}x)"
    return f"{row.median_ms:.3f} ms{ratio}"


def _speed_up(times: Times, case: str, names: Iterable[str]) -> str:
    """How many times faster than the fastest of `names`, forward and backward together; a dash where none ran."""
    ours = _both_passes(times, case, OURS)
    others = [milliseconds for name in names if (milliseconds := _both_passes(times, case, name)) is not None]
    return "-" if ours is None or not others else f"{min(others) / ours:.1f}x"


def _both_passes(times: Times, case: str, name: str) -> float | None:
    row = times.get((case, "fwd+bwd", name))
    return None if row is None else row.median_ms


# MoBA: all lengths have the shape of the first case, two sequences but for the longest.
MOBA_CASES = ("n8k", "n16k", "n32k", "n64k", "n128k")
MOBA_LONGEST_CASE = "n512k_b1"
MOBA_PASSES = ("routing", "fwd", "bwd", "fwd+bwd")
FLASH_MOBA = "flashmoba-measured"
DENSE = "torch-cudnn"

type MoBATimes = Mapping[tuple[str, str, str], MoBATiming]


def moba_section(rows: Iterable[MoBATiming]) -> str:
    """The text between the markers of docs/moba.md: time by length, and what it is compared with."""
    times = _moba_times(rows)
    cases = [case for case in MOBA_CASES if all((case, name, OURS) in times for name in MOBA_PASSES)]
    if not cases:
        raise ValueError(f"the results hold no case with all times of {OURS!r}; run python -m benchmarks moba")
    first = times[cases[0], "fwd", OURS]
    origin = (
        f"Causal attention, bfloat16, {_shape(first)}; medians in ms of `benchmarks/results/moba.csv`, forward with "
        f"routing. {first.device}, driver {first.driver}, jax {first.jax}, Triton {first.triton}, {first.date}; "
        "FlashMoBA as recorded on an H200:"
    )
    lines = [
        _filled(origin),
        "",
        "| tokens | routing | forward | backward | both | floor of both | FlashMoBA | extra memory, forward |",
        "|---" * 8 + "|",
    ]
    for case in cases:
        found = [times[case, name, OURS] for name in MOBA_PASSES]
        flash = times.get((case, "fwd+bwd", FLASH_MOBA))
        cells = [f"{found[0].tokens:,}"]
        cells += [f"{row.median_ms:.2f}" for row in found]
        cells.append("-" if found[-1].floor_ms is None else f"{found[-1].floor_ms:.2f}")
        cells.append("-" if flash is None else f"{flash.median_ms:.1f}")
        cells.append("-" if found[1].extra_bytes is None else f"{found[1].extra_bytes / 2**30:.2f} GiB")
        lines.append("| " + " | ".join(cells) + " |")
    remarks = " ".join(remark for remark in (_longest(times), _over_dense(times, cases)) if remark)
    return "\n".join([*lines, "", _filled(remarks)] if remarks else lines)


def _moba_times(rows: Iterable[MoBATiming]) -> MoBATimes:
    return {(row.case, row.pass_name, row.implementation): row for row in rows if row.median_ms is not None}


def _shape(row: MoBATiming) -> str:
    heads = f"{row.query_heads} heads of {row.head_dim}"
    if row.key_heads != row.query_heads:
        heads += f", {row.key_heads} key heads"
    return f"{row.batch} sequences, {heads}, blocks of {row.block_size} and `top_k={row.top_k}`"


def _longest(times: MoBATimes) -> str | None:
    """What one very long sequence takes, and how much of it is routing."""
    both, routing = (times.get((MOBA_LONGEST_CASE, name, OURS)) for name in ("fwd+bwd", "routing"))
    if both is None or routing is None:
        return None
    return (
        f"{both.tokens:,} tokens of one sequence take {both.median_ms:.0f} ms, {routing.median_ms:.0f} of them for "
        "routing, whose work grows with the square of the length."
    )


def _over_dense(times: MoBATimes, cases: Iterable[str]) -> str | None:
    """How many times as long dense attention takes, where it was measured: it may stand with another case."""
    ratios = []
    for case in cases:
        ours = times[case, "fwd+bwd", OURS]
        dense = _dense_time(ours, times)
        if dense is not None:
            ratios.append(f"{dense / ours.median_ms:.1f} times at {ours.tokens:,} tokens")
    if not ratios:
        return None
    return f"Dense attention by cuDNN takes longer, forward and backward together: {', '.join(ratios)}."


def _dense_time(ours: MoBATiming, times: MoBATimes) -> float | None:
    """Milliseconds of dense attention over the same arrays, forward and backward; None where it was not measured."""
    names = ("tokens", "batch", "query_heads", "key_heads", "head_dim", "device")
    # Rows of the same case come last, and so before others.
    found = {
        row.pass_name: row.median_ms
        for row in sorted(times.values(), key=lambda row: row.case == ours.case)
        if row.implementation == DENSE and all(getattr(row, name) == getattr(ours, name) for name in names)
    }
    if "fwd+bwd" in found:
        return found["fwd+bwd"]
    return found["fwd"] + found["bwd"] if {"fwd", "bwd"} <= found.keys() else None


# Paged decode: dtypes of the cache, sizes of pages, and what is compared with.
CACHES = ("bfloat16", "float8_e4m3fn", "float8_e5m2")
PAGE_SIZES = (1, 16, 64)
FLASHINFER = "flashinfer-recorded"
DENSE_CACHES = {
    "torch-fa2": "FlashAttention 2 (SDPA)",
    "torch-cudnn": "cuDNN (SDPA)",
    "jax-cudnn": "cuDNN (`jax.nn`)",
}

type PagedTimes = Mapping[tuple[str, str, str, int | None], PagedTiming]


def decode_section(rows: Iterable[PagedTiming]) -> str:
    """The text between the markers of docs/decode.md: tables of decode and of splits, and the other groups in words."""
    timed = [row for row in rows if row.median_us is not None]
    times: PagedTimes = {
        (row.implementation, row.workload, row.cache, row.page_size): row for row in timed if row.group == "decode"
    }
    workloads = list(dict.fromkeys(key[1] for key in times if key[0] == NATIVE))
    if not workloads:
        raise ValueError(f"the results hold no decode times of {NATIVE!r}; run python -m benchmarks paged")
    first = next(row for key, row in times.items() if key[0] == NATIVE)
    origin = (
        f"One bfloat16 query of each sequence, {first.query_heads} heads and {first.key_heads} key heads of "
        f"{first.head_dim}, pages in random order, none shared; medians in us of `benchmarks/results/paged.csv`, "
        f"native launches replayed as CUDA graphs. {first.device}, driver {first.driver}, torch {first.torch}, "
        f"Triton {first.triton}, {first.date}. The same run read 4 GiB at {first.read_tb_per_s:.2f} TB/s; the floor is "
        "the cache read once at that rate. FlashInfer 0.7.2 as recorded on an H200:"
    )
    headings = [f"pages of {size}" for size in PAGE_SIZES]
    headings += ["TB/s, pages of 64", "floor", "through `jax.jit`", "FlashInfer, pages of 1 / 16 / 64"]
    lines = [
        _filled(origin),
        "",
        "| sequences, keys of each | cache | " + " | ".join(headings) + " |",
        "|---" * 9 + "|",
    ]
    for workload in workloads:
        for cache in CACHES:
            ours = [times.get((NATIVE, workload, cache, size)) for size in PAGE_SIZES]
            known = next((row for row in ours if row is not None), None)
            if known is not None:
                cells = [f"{known.batch}, {known.kv_length:,}", cache, *map(_microseconds, ours)]
                cells.append("-" if ours[-1] is None else f"{ours[-1].tb_per_s:.2f}")
                cells += [f"{known.floor_us:.1f}", _microseconds(times.get((OURS, workload, cache, PAGE_SIZES[-1])))]
                flash = [times.get((FLASHINFER, workload, cache, size)) for size in PAGE_SIZES]
                cells.append(" / ".join(map(_microseconds, flash)) if any(flash) else "-")
                lines.append("| " + " | ".join(cells) + " |")
    others = [
        _dense_caches(times, workloads),
        _short_caches(timed),
        _drafts(timed),
        _moba_decode(timed),
        _appends(timed),
    ]
    for text in filter(None, others):
        lines += ["", _filled(text)]
    return "\n".join([*lines, *_splits_lines(timed)])


def _microseconds(row: PagedTiming | None) -> str:
    return "-" if row is None else f"{row.median_us:.1f}"


def _dense_caches(times: PagedTimes, workloads: Iterable[str]) -> str | None:
    """What attention without pages takes."""
    found = []
    for name, title in DENSE_CACHES.items():
        rows = [
            times[name, workload, "bfloat16", None]
            for workload in workloads
            if (name, workload, "bfloat16", None) in times
        ]
        if rows:
            each = ", ".join(f"{row.median_us:.0f} us ({row.batch}, {row.kv_length:,})" for row in rows)
            found.append(f"{title} {each}")
    return f"On a contiguous cache of bfloat16, in the same process: {'; '.join(found)}." if found else None


def _of_group(rows: Iterable[PagedTiming], group: str) -> list[PagedTiming]:
    return [row for row in rows if row.group == group and row.implementation == NATIVE]


def _short_caches(rows: Iterable[PagedTiming]) -> str | None:
    """One sequence with few keys, cache in the L2 and in memory."""
    parts = []
    for kind, where in (("in_l2", "where the cache is in the L2"), ("in_memory", "where it is not")):
        found = [row for row in _of_group(rows, "short") if (row.cache, row.page_size) == ("bfloat16", 64)]
        found = sorted((row for row in found if row.case.endswith(kind)), key=lambda row: row.kv_length)
        if found:
            times = ", ".join(f"{row.median_us:.1f} us for {row.kv_length:,} keys" for row in found)
            parts.append(f"{times} {where}")
    return f"One sequence, bfloat16, pages of 64: {'; '.join(parts)}." if parts else None


def _drafts(rows: Iterable[PagedTiming]) -> str | None:
    """Several queries of each sequence over one."""
    found = _of_group(rows, "speculative")
    single = {(row.workload, row.cache): row.median_us for row in found if row.query_tokens == 1}
    parts = [
        f"{row.median_us / single[row.workload, row.cache]:.2f} times for T = {row.query_tokens} ({row.batch}, "
        f"{row.kv_length:,}, {row.cache})"
        for row in found
        if row.query_tokens > 1 and (row.workload, row.cache) in single
    ]
    return f"Several queries of each sequence take, over one: {', '.join(parts)}." if parts else None


def _moba_decode(rows: Iterable[PagedTiming]) -> str | None:
    found = _of_group(rows, "moba")
    parts = [f"{row.median_us:.1f} us ({row.cache}, pages of {row.page_size})" for row in found]
    if not parts:
        return None
    return f"MoBA with blocks of 128 and `top_k=8` over {found[0].kv_length:,} keys: {', '.join(parts)}."


def _appends(rows: Iterable[PagedTiming]) -> str | None:
    found = _of_group(rows, "append")
    scales = {"none": "", "head": ", given scales", "token": ", scales of each token"}
    parts = [f"{row.median_us:.1f} us ({row.cache}{scales[row.scales]}, pages of {row.page_size})" for row in found]
    return f"Appending one token to each of {found[0].batch} sequences: {', '.join(parts)}." if parts else None


def _splits_lines(rows: Iterable[PagedTiming]) -> list[str]:
    """The table of splits: a column for each workload and cache, what the library chooses in brackets."""
    found = _of_group(rows, "splits")
    columns = list(dict.fromkeys((row.workload, row.cache) for row in found))
    if not columns:
        return []
    first = {column: next(row for row in found if (row.workload, row.cache) == column) for column in columns}
    headings = [f"{row.batch}, {row.kv_length:,}, {row.cache}" for row in first.values()]
    lines = ["", "By splits, in us, pages of 64; in brackets what the library chooses:", ""]
    lines += ["| splits | " + " | ".join(headings) + " |", "|---" * (len(headings) + 1) + "|"]
    for splits in sorted({row.splits for row in found}):
        here = {(row.workload, row.cache): row for row in found if row.splits == splits and not row.is_chosen}
        chosen = {(row.workload, row.cache): row for row in found if row.splits == splits and row.is_chosen}
        cells = [
            f"[{_microseconds(chosen[column])}]" if column in chosen else _microseconds(here.get(column))
            for column in columns
        ]
        lines.append(f"| {splits} | " + " | ".join(cells) + " |")
    return lines


# Fused functions: what stands beside them.
FUSE_COLUMNS = {
    OURS: "`fuse`",
    "torch-flex": "FlexAttention",
    "jax-cudnn": "cuDNN (`jax.nn`)",
    "jax-jit": "XLA",
    "torch-compile": "torch.compile",
}


def fuse_section(rows: Iterable[FuseTiming]) -> str:
    """The text between the markers of docs/speed.md: forward, and both passes, of every case."""
    rows = list(rows)
    times = {(row.case, row.pass_name, row.implementation): row for row in rows if row.median_ms is not None}
    ours = {row.case: row for row in rows if (row.case, "fwd", OURS) in times and row.implementation == OURS}
    if not ours:
        raise ValueError(f"the results hold no times of {OURS!r}; run python -m benchmarks fuse")
    first = next(iter(ours.values()))
    dates, others = dates_of(ours.values()), dates_of(row for row in times.values() if row.case in ours)
    if others != dates:
        dates = f"{dates} (some other columns earlier, {others} in all)"
    origin = (
        "Milliseconds, forward / forward and backward, medians of `benchmarks/results/fuse.csv`; batch x tokens, query "
        "heads/key heads of 64. The floor is the longer of what the products and the compulsory bytes take at the "
        "rates of the same run. A dash: it did not fit, cannot, or was not run. "
        f"{first.device}, driver {first.driver}, jax {first.jax}, Triton {first.triton}, torch {first.torch}, "
        f"{dates}, bfloat16."
    )
    headings = [FUSE_COLUMNS[OURS], "floor", *(title for name, title in FUSE_COLUMNS.items() if name != OURS)]
    lines = [_filled(origin), "", "| | " + " | ".join(headings) + " |", "|---" * (len(headings) + 1) + "|"]
    for case, row in ours.items():
        cells = []
        for name in FUSE_COLUMNS:
            found = [times.get((case, pass_name, name)) for pass_name in ("fwd", "fwd+bwd")]
            cells.append(_pair([one and one.median_ms for one in found]))
            if name == OURS:
                cells.append(_pair([one and one.floor_ms for one in found]))
        lines.append(f"| {case_name(row)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _pair(milliseconds: Iterable[float | None]) -> str:
    found = ["-" if one is None else f"{one:#.3g}".rstrip(".") for one in milliseconds]
    return "-" if set(found) == {"-"} else " / ".join(found)


def _filled(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


@dataclass(frozen=True)
class Section:
    """A part of a page that is generated.

    Attributes:
        page: the file that holds it, between `<!-- name:start -->` and `<!-- name:end -->`.
        sources: the CSV files and the types of their rows.
        write: makes the text of the rows of each.
    """

    page: Path
    name: str
    sources: Mapping[Path, type]
    write: Callable[..., str]


BLOCKS = {RESULTS / "block_diagonal.csv": Timing}
MOBA = {RESULTS / "moba.csv": MoBATiming}
PAGED = {RESULTS / "paged.csv": PagedTiming}
FUSE = {RESULTS / "fuse.csv": FuseTiming}
GALLERY = {RESULTS / "gallery.csv": GalleryTiming}
SECTIONS = (
    Section(ROOT / "README.md", "figures", BLOCKS | MOBA | PAGED | FUSE, summary_section),
    Section(ROOT / "README.md", "behind", BLOCKS | MOBA | PAGED | FUSE | GALLERY, behind_section),
    Section(ROOT / "benchmarks" / "README.md", "block_diagonal", BLOCKS, section),
    Section(ROOT / "docs" / "moba.md", "moba", MOBA, moba_section),
    Section(ROOT / "docs" / "decode.md", "decode", PAGED, decode_section),
    Section(ROOT / "docs" / "speed.md", "fuse", FUSE, fuse_section),
)


def with_section(page: str, name: str, text: str) -> str:
    """`page` with `text` between the markers of section `name`."""
    start, end = f"<!-- {name}:start -->", f"<!-- {name}:end -->"
    if page.count(start) != 1 or page.count(end) != 1 or page.index(end) < page.index(start):
        raise ValueError(f"the page must hold {start} and then {end} once each; put them back")
    before, rest = page.split(start)
    return f"{before}{start}\n{text}\n{end}{rest.split(end)[1]}"


def generate() -> dict[Path, str]:
    """Every page with its sections as the results have them."""
    pages: dict[Path, str] = {}
    for one in SECTIONS:
        page = pages.get(one.page) or one.page.read_text(encoding="utf-8")
        # What was not measured yet has an empty section.
        is_measured = all(path.exists() for path in one.sources)
        text = one.write(*(read_rows(path, kind) for path, kind in one.sources.items())) if is_measured else ""
        pages[one.page] = with_section(page, one.name, text)
    return pages


def main(arguments: list[str]) -> None:
    """Rewrites or checks the pages."""
    parser = argparse.ArgumentParser(description="Write the figures of the documentation from the CSV files.")
    parser.add_argument("--check", action="store_true", help="fail if a page is not up to date; write nothing")
    options = parser.parse_args(arguments)
    for path, wanted in generate().items():
        if not options.check:
            path.write_text(wanted, encoding="utf-8")
        elif wanted != path.read_text(encoding="utf-8"):
            sys.exit(f"{path.name} is not what the results say; run python -m benchmarks.overview.tables")


if __name__ == "__main__":
    main(sys.argv[1:])
