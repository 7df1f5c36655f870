"""Measure the figures that the library has to reach, and exit with 1 where one is missed.

    PYTHONPATH=src python -m benchmarks.block_diagonal.figures

The limits are those of an NVIDIA H200 that no other process uses. `--output DIR` keeps the CSV files, and `--judge DIR`
compares the files of an earlier run instead of measuring. The figures are device times and errors of block-diagonal
attention, host times of a jitted call, of the torch operators and of the bridges, and the time of the import.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.block_diagonal.report import judge_errors, judge_host, judge_times
from benchmarks.block_diagonal.torch_host import AUTOGRAD, LIMITS
from benchmarks.harness.records import ErrorRow, HostRow, Timing, read_rows
from benchmarks.harness.report import Verdict, make_console, verdict_table

DEVICE = "NVIDIA H200"
IMPORT_LIMIT_SECONDS = 0.3
COMMANDS = (
    ("block_diagonal", "--baselines", "torch-fa2,torch-varlen,jax-einsum,jax-cudnn", "--rounds", "15"),
    ("torch",),
)
TIME_IMPORT = """
import time
import jax
begin = time.perf_counter()
import blockdiag
print(time.perf_counter() - begin)
"""


def measure(folder: Path) -> None:
    """Run the benchmarks and write their rows to `folder`."""
    for arguments in COMMANDS:
        command = [sys.executable, "-m", "benchmarks", *arguments, "--output", str(folder)]
        subprocess.run(command, check=True)


def time_import() -> Verdict:
    """Compare the time that `import blockdiag` adds to `import jax` with its limit."""
    command = [sys.executable, "-c", TIME_IMPORT]
    seconds = [float(subprocess.run(command, check=True, capture_output=True, text=True).stdout) for _ in range(3)]
    return Verdict("import beyond that of jax, seconds", statistics.median(seconds), IMPORT_LIMIT_SECONDS)


def judge_torch(rows: list[HostRow]) -> list[Verdict]:
    """Compare the host times of the torch operators and the bridges with their limits.

    Hosts differ by more than a factor of two. Autograd's own time is therefore subtracted, and the bridge may take a
    quarter more than the same round trip by the public functions of both frameworks where that exceeds its limit.
    """
    medians = {(row.pass_name, row.implementation): row.median_us for row in rows}

    def time(pass_name: str, name: str, *subtracted: str) -> float | None:
        parts = [medians.get((pass_name, one)) for one in (name, *subtracted)]
        known = [one for one in parts if one is not None]
        return known[0] - sum(known[1:]) if len(known) == len(parts) else None

    one, three = (time("round trip", f"wrap_jax, {count}") for count in ("one input", "three inputs"))
    public = time("round trip", "jax.dlpack and torch.from_dlpack")
    launch, compiled = "kernel[grid](...)", ("with the operator", "without the operator")
    return [
        Verdict("fwd, operator beyond its launch, us", time("fwd", "operator", launch), LIMITS["fwd", "operator"]),
        Verdict(
            "fwd+bwd, operator beyond its launches and one torch operation, us",
            time("fwd+bwd", "operator", launch, AUTOGRAD[1]),
            LIMITS[AUTOGRAD[0], "operator"],
        ),
        Verdict("compiled, operator, us", time("compiled", *compiled), LIMITS["compiled", compiled[0]]),
        Verdict("wrap_jax, one input, us", one, max(LIMITS["round trip", "wrap_jax, one input"], 1.25 * (public or 0))),
        Verdict("wrap_jax, three inputs, us", three, 3 * (one or 0)),
    ]


def judge(folder: Path) -> list[Verdict]:
    """Compare the rows of an H200 in `folder` with their limits."""

    def rows(name: str, kind: type) -> list:
        found = [row for row in read_rows(folder / name, kind) if row.device == DEVICE]
        if not found:
            raise SystemExit(f"{folder / name} has no rows of an {DEVICE}, which the limits are for")
        return found

    return [
        *judge_times(rows("block_diagonal.csv", Timing)),
        *judge_errors(rows("block_diagonal_errors.csv", ErrorRow)),
        *judge_host(rows("block_diagonal_host.csv", HostRow)),
        *judge_torch(rows("torch_host.csv", HostRow)),
    ]


def main(arguments: list[str] | None = None) -> int:
    """Return 0 when every figure is reached, else 1."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, help="folder in which the CSV files are kept")
    parser.add_argument("--judge", type=Path, help="folder of the CSV files of an earlier run; nothing is measured")
    options = parser.parse_args(arguments)
    if options.judge:
        verdicts = judge(options.judge)
    else:
        with tempfile.TemporaryDirectory() as temporary:
            folder = options.output or Path(temporary)
            measure(folder)
            verdicts = [*judge(folder), time_import()]
    make_console().print(verdict_table(verdicts))
    missed = [verdict for verdict in verdicts if not verdict.is_met]
    for verdict in missed:
        value = "not measured" if verdict.value is None else f"{verdict.value:.6g}"
        print(f"missed: {verdict.name}: {value}, limit {verdict.limit}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
