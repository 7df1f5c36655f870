"""Writes the README's table of speed-ups from the benchmark's CSV file.

python benchmarks/readme_table.py            # rewrites the section of README.md between its two markers
python benchmarks/readme_table.py --check    # fails if the section is not what the CSV file says
"""

import argparse
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from blockdiag.bench.records import Timing, read_rows

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results" / "block_diagonal.csv"
START, END = "<!-- figures:start -->", "<!-- figures:end -->"

OURS = "triton"
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
    return "\n".join(lines)


def _origin(row: Timing) -> str:
    return (
        "Time of a call through `jax.jit`, in brackets over the time that reading and writing every byte once takes; "
        f"then how many times faster forward and backward together are than what else computes the same. {row.device}, "
        f"driver {row.driver}, jax {row.jax}, Triton {row.triton}, torch {row.torch}, {row.date}: medians, interleaved "
        "in one process, `python -m blockdiag bench block_diagonal`."
    )


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
