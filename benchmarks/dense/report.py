"""The table of dense attention for the terminal, and the limit that its times are compared with."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from benchmarks.fuse.cases import FUSE_PASSES
from benchmarks.fuse.programs import CUDNN
from benchmarks.fuse.report import OURS, backward_ms
from benchmarks.harness.records import DenseTiming
from benchmarks.harness.report import Verdict, number, quotient

CUDNN_LIMIT = 1.0  # time over that of cuDNN through jax.nn
_PASSES = ("fwd", "bwd", "fwd+bwd")


def judge_dense(rows: Sequence[Any], implementation: str = OURS) -> list[Verdict]:
    """Verdicts for the passes that cuDNN was timed with in the same rounds."""
    return [
        Verdict(f"{row.case} {row.pass_name}: time over cuDNN", row.over_cudnn, CUDNN_LIMIT)
        for row in rows
        if row.implementation == implementation and row.over_cudnn is not None
    ]


def rate_table(rows: Sequence[DenseTiming]) -> Table:
    """Useful TFLOP/s of every implementation, and our time over cuDNN's: forward / backward / both, a line a case."""
    names = list(dict.fromkeys(row.implementation for row in rows if row.median_ms is not None))
    table = Table(title="useful TFLOP/s, and time over cuDNN   (forward / backward / both)", title_justify="left")
    table.add_column("case")
    for name in (*names, "time over cuDNN"):
        table.add_column(name, justify="right")
    for case in dict.fromkeys(row.case for row in rows):
        found = {
            name: {row.pass_name: row for row in rows if (row.case, row.implementation) == (case, name)}
            for name in names
        }
        cells = [_line([_rate(found[name], one) for one in _PASSES], ".0f") for name in names]
        ours, cudnn = ([pass_ms(found.get(name, {}), one) for one in _PASSES] for name in (OURS, CUDNN))
        table.add_row(case, *cells, _line(list(map(quotient, ours, cudnn)), ".2f"))
    return table


def pass_ms(found: Mapping[str, Any], pass_name: str) -> float | None:
    """Return the time of a pass; that of the backward pass is the difference of both passes and the forward pass."""
    if pass_name == "bwd":
        return backward_ms(*(found.get(one) for one in FUSE_PASSES))
    row = found.get(pass_name)
    return None if row is None else row.median_ms


def _rate(found: Mapping[str, Any], pass_name: str) -> float | None:
    """Return the useful TFLOP/s of a pass."""
    work = {one: row.useful_tflop for one, row in found.items()}
    time = pass_ms(found, pass_name)
    if time is None:
        return None
    tflop = work["fwd+bwd"] - work["fwd"] if pass_name == "bwd" else work[pass_name]
    return quotient(tflop * 1e3, time)


def _line(values: Sequence[float | None], form: str) -> str:
    return " / ".join(number(value, form) for value in values)
