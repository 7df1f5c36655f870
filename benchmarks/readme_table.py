"""Writes the README's table of speed-ups from the benchmark's CSV file.

python benchmarks/readme_table.py            # rewrites the section of README.md between its two markers
python benchmarks/readme_table.py --check    # fails if the section is not what the CSV file says
"""

import argparse
import sys
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path

from blockdiag.bench.records import Timing, read_rows

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results" / "block_diagonal.csv"
START, END = "<!-- figures:start -->", "<!-- figures:end -->"

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
        raise ValueError(f"the results hold no times of implementation {OURS!r}; run python -m blockdiag bench")
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
        "`python -m blockdiag bench block_diagonal`; [all figures](benchmarks/results/block_diagonal.csv)."
    )
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


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
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


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


def with_section(readme: str, text: str) -> str:
    """`readme` with `text` between its markers."""
    if readme.count(START) != 1 or readme.count(END) != 1 or readme.index(END) < readme.index(START):
        raise ValueError(f"the README must hold {START} and then {END} once each; put them back")
    before, rest = readme.split(START)
    return f"{before}{START}\n{text}\n{END}{rest.split(END)[1]}"


def main(arguments: list[str]) -> None:
    """Rewrites or checks the README."""
    parser = argparse.ArgumentParser(description="Write the README's table of speed-ups from the benchmark's CSV file.")
    parser.add_argument("--check", action="store_true", help="fail if the README is not up to date; write nothing")
    options = parser.parse_args(arguments)
    readme = README.read_text(encoding="utf-8")
    wanted = with_section(readme, section(read_rows(RESULTS, Timing)))
    if not options.check:
        README.write_text(wanted, encoding="utf-8")
    elif wanted != readme:
        sys.exit("README.md is not what the results say; run python benchmarks/readme_table.py")


if __name__ == "__main__":
    main(sys.argv[1:])
