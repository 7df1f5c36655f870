"""The figures that MoBA has to reach, and whether measured rows reach them."""

from collections.abc import Callable, Sequence

from benchmarks.harness.records import MoBATiming
from benchmarks.harness.verdicts import Verdict
from benchmarks.moba.recorded import FLASH_MOBA_ERRORS

OURS = "triton"
DENSE = "torch-cudnn"

# Largest milliseconds by case and pass; the forward has the routing in it.
TIME_LIMITS = {
    "n8k": {"fwd+bwd": 1.9},
    "n32k": {"fwd+bwd": 7.5},
    "n64k": {"fwd+bwd": 15.0, "fwd": 7.0, "bwd": 8.0, "routing": 2.0},
    "n128k": {"fwd+bwd": 33.0},
}
# Of the forward, in every case.
ROUTING_SHARE = 0.30
# Largest extra memory of the forward in GiB: FlashMoBA's at the same shape.
MEMORY_LIMITS_GIB = {"n64k": 3.08, "n128k": 6.16}
# From this many tokens on no case may be slower than dense attention.
_DENSE_FROM = 8192 + 1
# What must run, whatever it takes.
_MUST_RUN = ("n512k_b1",)


def judge_moba(rows: Sequence[MoBATiming], implementation: str = OURS) -> list[Verdict]:
    """Verdicts for the cases that `rows` hold."""
    mine = {(row.case, row.pass_name): row for row in rows if row.implementation == implementation}
    cases = list(dict.fromkeys(case for case, _ in mine))

    def value(case: str, pass_name: str, read: Callable[[MoBATiming], float | None]) -> float | None:
        row = mine.get((case, pass_name))
        return None if row is None else read(row)

    def median(case: str, pass_name: str) -> float | None:
        return value(case, pass_name, lambda row: row.median_ms)

    verdicts = []
    for case in cases:
        for pass_name, limit in TIME_LIMITS.get(case, {}).items():
            verdicts.append(Verdict(f"{case} {pass_name}: ms", median(case, pass_name), limit))
        share = _quotient(median(case, "routing"), median(case, "fwd"))
        verdicts.append(Verdict(f"{case}: routing over forward", share, ROUTING_SHARE))
        if case in MEMORY_LIMITS_GIB:
            extra = value(case, "fwd", lambda row: None if row.extra_bytes is None else row.extra_bytes / 2**30)
            verdicts.append(Verdict(f"{case} fwd: GiB beyond inputs and outputs", extra, MEMORY_LIMITS_GIB[case]))
        for pass_name, limit in FLASH_MOBA_ERRORS.items():
            error = value(case, pass_name, lambda row: row.relative_error)
            # Errors of both come from rounding to bfloat16; theirs is known to two digits.
            name = f"{case} {pass_name}: relative error against float32"
            verdicts.append(Verdict(name, error, limit, uncertainty=0.3e-3))
        if case in _MUST_RUN:
            verdicts.append(Verdict(f"{case} fwd+bwd: runs (ms)", median(case, "fwd+bwd"), float("inf")))
    return [*verdicts, *_judge_dense(rows, implementation)]


def _judge_dense(rows: Sequence[MoBATiming], implementation: str) -> list[Verdict]:
    """Time over that of dense attention on the same arrays, where that was measured."""
    dense = {_shape(row): row.median_ms for row in rows if row.implementation == DENSE and row.pass_name == "fwd+bwd"}
    verdicts = []
    for row in rows:
        is_judged = row.implementation == implementation and row.pass_name == "fwd+bwd" and row.tokens >= _DENSE_FROM
        if is_judged and dense.get(_shape(row)) is not None:
            ratio = _quotient(row.median_ms, dense[_shape(row)])
            verdicts.append(Verdict(f"{row.case} fwd+bwd: time over dense cuDNN", ratio, 1.0))
    return verdicts


def _shape(row: MoBATiming) -> tuple[int, ...]:
    return row.batch, row.tokens, row.query_heads, row.key_heads, row.head_dim


def _quotient(above: float | None, below: float | None) -> float | None:
    return None if above is None or below is None else above / below
