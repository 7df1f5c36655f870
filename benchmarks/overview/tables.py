"""Write the benchmark figures in README.md, benchmarks/README.md and pages of docs/ from the CSV files.

python -m benchmarks.overview.tables            # rewrites the sections of these pages between their markers
python -m benchmarks.overview.tables --check    # fails if a section differs from the CSV files
"""

import argparse
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.fuse.plots import case_name
from benchmarks.harness.records import (
    DenseTiming,
    FuseTiming,
    GalleryTiming,
    MoBATiming,
    PagedTiming,
    Timing,
    dates_of,
    read_rows,
)
from benchmarks.overview.speedup_table import behind_section, summary_section

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"

OURS = "triton"
# The same compiled kernels, launched from torch.
NATIVE = "triton-torch"
# The name of `benchmarks.paged.cases.MOBA`.
MOBA_CONTIGUOUS = "moba-contiguous"
# Column heading: the implementations; the column shows the fastest one that ran.
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
    """Return the text of benchmarks/README.md between the markers: a table, and where and how it was measured."""
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
        "Times are of calls through `jax.jit`; brackets give the ratio to a copy of the same bytes. The other columns "
        "are the speed-up of forward and backward together over other implementations; a dash marks one that does not "
        "support the case or did not run. All cases have 262,144 tokens; packed ones have 1152 sequences of 800 to "
        "2000 tokens. Other implementations apply rotary embedding before attention, in eager PyTorch or by XLA. "
        f"{row.device}, driver {row.driver}, jax {row.jax}, Triton {row.triton}, torch {row.torch}, {row.date}; "
        "medians, the implementations of a case interleaved in one process, by "
        "`python -m benchmarks block_diagonal`; [all figures](results/block_diagonal.csv)."
    )
    return _filled(text)


def _spread(times: Times, cases: Iterable[str]) -> str:
    """Return the spread of the samples, and the same kernels' times by CUDA events relative to a copy."""
    rows = [times[case, name, OURS] for case in cases for name in ("fwd", "bwd")]
    natives = [native for row in rows if (native := times.get((row.case, row.pass_name, NATIVE))) is not None]
    text = (
        "JAX calls are timed with the host's clock; the middle three fifths of their samples lie within "
        f"{_largest_spread(rows):.0%} of the median."
    )
    if natives:
        ratios = ", ".join(f"{native.case} {native.pass_name} {native.ratio_to_floor:.2f}x" for native in natives)
        text += (
            " For the same compiled kernels, launched from torch and timed by CUDA events (samples within "
            f"{_largest_spread(natives):.1%}), the ratios to a copy are: {ratios}."
        )
    return _filled(text)


def _largest_spread(rows: Iterable[Timing]) -> float:
    """Return the largest distance of a row's 20th or 80th percentile from its median, as a fraction of the median."""
    return max(max(row.p80_ms - row.median_ms, row.median_ms - row.p20_ms) / row.median_ms for row in rows)


def _time(row: Timing) -> str:
    ratio = "" if row.ratio_to_floor is None else f" ({row.ratio_to_floor:.2f}x)"
    return f"{row.median_ms:.3f} ms{ratio}"


def _speed_up(times: Times, case: str, names: Iterable[str]) -> str:
    """Return the speed-up over the fastest of `names`, forward and backward together; a dash where none ran."""
    ours = _both_passes(times, case, OURS)
    others = [milliseconds for name in names if (milliseconds := _both_passes(times, case, name)) is not None]
    return "-" if ours is None or not others else f"{min(others) / ours:.1f}x"


def _both_passes(times: Times, case: str, name: str) -> float | None:
    row = times.get((case, "fwd+bwd", name))
    return None if row is None else row.median_ms


# MoBA: all lengths have the shape of the first case; all but the longest have two sequences.
MOBA_CASES = ("n8k", "n16k", "n32k", "n64k", "n128k")
MOBA_LONGEST_CASE = "n512k_b1"
MOBA_PASSES = ("routing", "fwd", "bwd", "fwd+bwd")
FLASH_MOBA = "flashmoba-measured"
DENSE = "torch-cudnn"

type MoBATimes = Mapping[tuple[str, str, str], MoBATiming]


def moba_section(rows: Iterable[MoBATiming]) -> str:
    """Return the text between the markers of docs/moba.md: times by length, beside those of other implementations."""
    times = _moba_times(rows)
    cases = [case for case in MOBA_CASES if all((case, name, OURS) in times for name in MOBA_PASSES)]
    if not cases:
        raise ValueError(f"the results hold no case with all times of {OURS!r}; run python -m benchmarks moba")
    first = times[cases[0], "fwd", OURS]
    origin = (
        f"Causal attention, bfloat16, {_shape(first)}; medians in ms from `benchmarks/results/moba.csv`. The forward "
        f"time includes routing. {first.device}, driver {first.driver}, jax {first.jax}, Triton {first.triton}, "
        f"{first.date}; FlashMoBA was recorded on an H200, not in the same run:"
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
    """Return a sentence on the time of one very long sequence, and of its routing."""
    both, routing = (times.get((MOBA_LONGEST_CASE, name, OURS)) for name in ("fwd+bwd", "routing"))
    if both is None or routing is None:
        return None
    return (
        f"One sequence of {both.tokens:,} tokens takes {both.median_ms:.0f} ms, of which routing takes "
        f"{routing.median_ms:.0f} ms: its work grows with the square of the length."
    )


def _over_dense(times: MoBATimes, cases: Iterable[str]) -> str | None:
    """Return a sentence on the time of dense attention relative to MoBA, or None if none was measured."""
    ratios = []
    for case in cases:
        ours = times[case, "fwd+bwd", OURS]
        dense = _dense_time(ours, times)
        if dense is not None:
            ratios.append(f"{dense / ours.median_ms:.1f} times as long at {ours.tokens:,} tokens")
    if not ratios:
        return None
    return f"Dense attention by cuDNN, forward and backward together, takes {', '.join(ratios)}."


def _dense_time(ours: MoBATiming, times: MoBATimes) -> float | None:
    """Return the milliseconds of dense attention to the same arrays, forward and backward, or None if not measured.

    Dense times may be recorded with another case that has the same arrays.
    """
    names = ("tokens", "batch", "query_heads", "key_heads", "head_dim", "device")
    # Rows of the same case come last, so they take precedence.
    found = {
        row.pass_name: row.median_ms
        for row in sorted(times.values(), key=lambda row: row.case == ours.case)
        if row.implementation == DENSE and all(getattr(row, name) == getattr(ours, name) for name in names)
    }
    if "fwd+bwd" in found:
        return found["fwd+bwd"]
    return found["fwd"] + found["bwd"] if {"fwd", "bwd"} <= found.keys() else None


# Paged decode: dtypes of the cache, page sizes, and the other implementations.
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
    """Return the tables between the markers of docs/decode.md."""
    timed = [row for row in rows if row.median_us is not None]
    times: PagedTimes = {
        (row.implementation, row.workload, row.cache, row.page_size): row for row in timed if row.group == "decode"
    }
    workloads = list(dict.fromkeys(key[1] for key in times if key[0] == NATIVE))
    if not workloads:
        raise ValueError(f"the results hold no decode times of {NATIVE!r}; run python -m benchmarks paged")
    first = next(row for key, row in times.items() if key[0] == NATIVE)
    origin = (
        f"Each sequence has one bfloat16 query, {first.query_heads} heads and {first.key_heads} key heads of "
        f"{first.head_dim}; pages are in random order and not shared. Times are medians in us from "
        "`benchmarks/results/paged.csv`, of native launches replayed as CUDA graphs. "
        f"{first.device}, driver {first.driver}, torch {first.torch}, Triton {first.triton}, {first.date}. The floor "
        f"is the time to read the cache once at {first.read_tb_per_s:.2f} TB/s, the rate at which the same run read 4 "
        "GiB. FlashInfer 0.7.2 was recorded on an H200, not in the same run:"
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
    others = [_dense_caches(times, workloads), _short_caches(timed), _drafts(timed), _other_calls(timed)]
    others.append(_prompts(timed))
    for table in filter(None, others):
        lines += ["", *table]
    return "\n".join([*lines, *_splits_lines(timed)])


def _microseconds(row: PagedTiming | None) -> str:
    return "-" if row is None else f"{row.median_us:.1f}"


def _dense_caches(times: PagedTimes, workloads: Sequence[str]) -> list[str]:
    """The table of dense attention to a contiguous cache: a row per implementation, a column per workload."""
    rows = {
        title: [times.get((name, workload, "bfloat16", None)) for workload in workloads]
        for name, title in DENSE_CACHES.items()
    }
    rows = {title: row for title, row in rows.items() if any(row)}
    if not rows:
        return []
    shapes = {key[1]: f"{row.batch}, {row.kv_length:,}" for key, row in times.items()}
    return [
        "Dense attention to a contiguous bfloat16 cache, in the same process, in us:",
        "",
        *_table(
            ["sequences, keys of each", *(shapes[workload] for workload in workloads)],
            [[title, *map(_microseconds, row)] for title, row in rows.items()],
        ),
    ]


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(headings) + " |", "|---" * len(headings) + "|"]
    return lines + ["| " + " | ".join(cells) + " |" for cells in rows]


def _of_group(rows: Iterable[PagedTiming], group: str) -> list[PagedTiming]:
    return [row for row in rows if row.group == group and row.implementation == NATIVE]


def _short_caches(rows: Iterable[PagedTiming]) -> list[str]:
    """The table of one sequence with few keys: its cache in the L2, and in memory."""
    found = [row for row in _of_group(rows, "short") if (row.cache, row.page_size) == ("bfloat16", 64)]
    lengths = sorted({row.kv_length for row in found})
    cells = []
    for kind, where in (("in_l2", "cache in the L2"), ("in_memory", "cache in memory")):
        by_length = {row.kv_length: row for row in found if row.case.endswith(kind)}
        if by_length:
            cells.append([where, *(_microseconds(by_length.get(length)) for length in lengths)])
    if not cells:
        return []
    headings = ["keys", *(f"{length:,}" for length in lengths)]
    return ["One sequence with a bfloat16 cache, pages of 64, in us:", "", *_table(headings, cells)]


def _drafts(rows: Iterable[PagedTiming]) -> list[str]:
    """The table of several queries for each sequence, relative to one query."""
    found = _of_group(rows, "speculative")
    single = {(row.workload, row.cache): row for row in found if row.query_tokens == 1}
    counts = sorted({row.query_tokens for row in found if row.query_tokens > 1})
    cells = []
    for column, one in single.items():
        several = {row.query_tokens: row for row in found if (row.workload, row.cache) == column}
        ratios = [f"{several[count].median_us / one.median_us:.2f}x" if count in several else "-" for count in counts]
        cells.append([f"{one.batch}, {one.kv_length:,}", one.cache, *ratios])
    if not counts or not cells:
        return []
    headings = ["sequences, keys of each", "cache", *(f"T = {count}" for count in counts)]
    return ["Time with T queries for each sequence, relative to one query:", "", *_table(headings, cells)]


def _other_calls(rows: Iterable[PagedTiming]) -> list[str]:
    """The table of decoding and prompts with MoBA, and of appending to the cache."""
    rows = list(rows)
    cells = [
        [f"MoBA, blocks of 128, `top_k=8`, {row.kv_length:,} keys", row.cache, str(row.page_size), _microseconds(row)]
        for row in _of_group(rows, "moba")
    ]
    for row in rows:
        if row.group == "moba_prompts" and row.implementation in (NATIVE, MOBA_CONTIGUOUS):
            name = f"MoBA, blocks of 128, `top_k=8`, {row.query_tokens:,} new tokens of {row.kv_length:,}"
            page_size = "`moba_attention`, contiguous" if row.page_size is None else str(row.page_size)
            cells.append([name, row.cache, page_size, _microseconds(row)])
    scales = {"none": "", "head": ", scales given", "token": ", scales of each token"}
    cells += [
        [
            f"append one token to each of {row.batch} sequences",
            f"{row.cache}{scales[row.scales]}",
            str(row.page_size),
            _microseconds(row),
        ]
        for row in _of_group(rows, "append")
    ]
    return ["Other calls:", "", *_table(["call", "cache", "page size", "us"], cells)] if cells else []


def _prompts(rows: Iterable[PagedTiming]) -> list[str]:
    """The table of prompts: times by page size, the rate of products, and dense attention to a contiguous cache."""
    found = [row for row in rows if row.group == "prompts"]
    cells = []
    for key in dict.fromkeys((row.workload, row.query_tokens) for row in found if row.implementation == NATIVE):
        here = {(x.implementation, x.page_size): x for x in found if (x.workload, x.query_tokens) == key}
        one = here[NATIVE, PAGE_SIZES[-1]]
        pairs = one.query_tokens * (one.kv_length - one.query_tokens) + one.query_tokens * (one.query_tokens + 1) / 2
        flops = 4.0 * one.batch * one.query_heads * one.head_dim * pairs
        dense = [_microseconds(here.get((name, None))) for name in DENSE_CACHES]
        cells.append([
            f"{one.batch}, {one.query_tokens:,} of {one.kv_length:,}",
            *(_microseconds(here.get((NATIVE, size))) for size in PAGE_SIZES),
            f"{flops / (one.median_us or 1.0) / 1e6:.0f}",
            _microseconds(here.get((OURS, PAGE_SIZES[-1]))),
            "-" if one.floor_us is None else f"{one.floor_us:.1f}",
            *dense,
        ])  # fmt: skip
    if not cells:
        return []
    headings = ["sequences, new tokens of keys", *(f"pages of {size}" for size in PAGE_SIZES)]
    headings += ["TFLOP/s, pages of 64", "through `jax.jit`", "floor", *DENSE_CACHES.values()]
    first = next(row for row in found if row.implementation == NATIVE)
    origin = (
        f"Prompts with a bfloat16 cache, in us, measured on {first.date} with the same versions. The floor is the time "
        "of the products at the rate of 8,192 x 8,192 matrices in the same run. The last columns are dense causal "
        "attention to a contiguous cache:"
    )
    return [_filled(origin), "", *_table(headings, cells)]


def _splits_lines(rows: Iterable[PagedTiming]) -> list[str]:
    """Return the table of splits: a column for each workload and cache, the library's choice in brackets."""
    found = _of_group(rows, "splits")
    columns = list(dict.fromkeys((row.workload, row.cache) for row in found))
    if not columns:
        return []
    first = {column: next(row for row in found if (row.workload, row.cache) == column) for column in columns}
    headings = [f"{row.batch}, {row.kv_length:,}, {row.cache}" for row in first.values()]
    lines = ["", "Time by number of splits, in us, pages of 64; the library's choice is in brackets:", ""]
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


# Fused functions: the columns of the table.
FUSE_COLUMNS = {
    OURS: "`fuse`",
    "torch-flex": "FlexAttention",
    "jax-cudnn": "cuDNN (`jax.nn`)",
    "jax-jit": "XLA",
    "torch-compile": "torch.compile",
}
DENSE_COLUMNS = {
    OURS: "`fuse`",
    "jax-cudnn": "cuDNN (`jax.nn`)",
    "torch-cudnn": "cuDNN (torch)",
    "torch-fa2": "FlashAttention 2 (torch)",
    "torch-flex": "FlexAttention",
}


def fuse_section(rows: Iterable[FuseTiming]) -> str:
    """Return the text between the markers of docs/speed.md: forward, and both passes, of every case."""
    return _fused_table(rows, "fuse", FUSE_COLUMNS, "query heads/key heads of 64")


def dense_section(rows: Iterable[FuseTiming]) -> str:
    """Return the table of dense attention: forward, and both passes, of every case."""
    return _fused_table(rows, "dense", DENSE_COLUMNS, "query heads/key heads")


def _fused_table(rows: Iterable[FuseTiming], name: str, columns: Mapping[str, str], heads: str) -> str:
    """Return a table of the rows of `results/{name}.csv`; `columns` has the headings by implementation, ours first."""
    rows = list(rows)
    times = {(row.case, row.pass_name, row.implementation): row for row in rows if row.median_ms is not None}
    ours = {row.case: row for row in rows if (row.case, "fwd", OURS) in times and row.implementation == OURS}
    if not ours:
        raise ValueError(f"the results hold no times of {OURS!r}; run python -m benchmarks {name}")
    first = next(iter(ours.values()))
    dates, others = dates_of(ours.values()), dates_of(row for row in times.values() if row.case in ours)
    if others != dates:
        dates = f"{dates} (some other columns earlier, {others} in all)"
    origin = (
        f"Times are medians in milliseconds from `benchmarks/results/{name}.csv`: forward / forward and backward. "
        f"Cases are batch x tokens, {heads}. The floor is the longer of the times of the products and of "
        "the compulsory bytes, at the rates of the same run. A dash marks a case that did not fit into memory, is not "
        "supported, or was not run. "
        f"{first.device}, driver {first.driver}, jax {first.jax}, Triton {first.triton}, torch {first.torch}, "
        f"{dates}, bfloat16."
    )
    headings = [columns[OURS], "floor", *(title for one, title in columns.items() if one != OURS)]
    lines = [_filled(origin), "", "| | " + " | ".join(headings) + " |", "|---" * (len(headings) + 1) + "|"]
    for case, row in ours.items():
        cells = []
        for implementation in columns:
            found = [times.get((case, pass_name, implementation)) for pass_name in ("fwd", "fwd+bwd")]
            cells.append(_pair([one and one.median_ms for one in found]))
            if implementation == OURS:
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
    """A generated section of a page.

    Attributes:
        page: the file that has it, between `<!-- name:start -->` and `<!-- name:end -->`.
        sources: the CSV files and the types of their rows.
        write: returns the text for the rows of each file.
    """

    page: Path
    name: str
    sources: Mapping[Path, type]
    write: Callable[..., str]


BLOCKS = {RESULTS / "block_diagonal.csv": Timing}
MOBA = {RESULTS / "moba.csv": MoBATiming}
PAGED = {RESULTS / "paged.csv": PagedTiming}
FUSE = {RESULTS / "fuse.csv": FuseTiming}
DENSE_ROWS = {RESULTS / "dense.csv": DenseTiming}
GALLERY = {RESULTS / "gallery.csv": GalleryTiming}
SECTIONS = (
    Section(ROOT / "README.md", "figures", BLOCKS | MOBA | PAGED | FUSE | DENSE_ROWS, summary_section),
    Section(ROOT / "docs" / "speed.md", "behind", BLOCKS | MOBA | PAGED | FUSE | GALLERY | DENSE_ROWS, behind_section),
    Section(ROOT / "benchmarks" / "README.md", "block_diagonal", BLOCKS, section),
    Section(ROOT / "docs" / "moba.md", "moba", MOBA, moba_section),
    Section(ROOT / "docs" / "decode.md", "decode", PAGED, decode_section),
    Section(ROOT / "docs" / "speed.md", "dense", DENSE_ROWS, dense_section),
    Section(ROOT / "docs" / "speed.md", "fuse", FUSE, fuse_section),
)


def with_section(page: str, name: str, text: str) -> str:
    """Return `page` with `text` between the markers of section `name`."""
    start, end = f"<!-- {name}:start -->", f"<!-- {name}:end -->"
    if page.count(start) != 1 or page.count(end) != 1 or page.index(end) < page.index(start):
        raise ValueError(f"the page must have {start} and then {end} once each; put them back")
    before, rest = page.split(start)
    return f"{before}{start}\n{text}\n{end}{rest.split(end)[1]}"


def generate() -> dict[Path, str]:
    """Return every page with its sections written from the results."""
    pages: dict[Path, str] = {}
    for one in SECTIONS:
        page = pages.get(one.page) or one.page.read_text(encoding="utf-8")
        # Sections without results are empty.
        is_measured = all(path.exists() for path in one.sources)
        text = one.write(*(read_rows(path, kind) for path, kind in one.sources.items())) if is_measured else ""
        pages[one.page] = with_section(page, one.name, text)
    return pages


def main(arguments: list[str]) -> None:
    """Rewrite or check the pages."""
    parser = argparse.ArgumentParser(description="Write the figures of the documentation from the CSV files.")
    parser.add_argument("--check", action="store_true", help="fail if a page is not up to date; write nothing")
    options = parser.parse_args(arguments)
    for path, wanted in generate().items():
        if not options.check:
            path.write_text(wanted, encoding="utf-8")
        elif wanted != path.read_text(encoding="utf-8"):
            sys.exit(f"{path.name} differs from the results; run python -m benchmarks.overview.tables")


if __name__ == "__main__":
    main(sys.argv[1:])
