"""The figures that fused functions have to reach, and whether measured rows reach them."""

from collections.abc import Callable, Sequence

from benchmarks.fuse.cases import FUSE_CASES, TOKEN_GROUPS
from benchmarks.harness.records import FuseTiming
from benchmarks.harness.verdicts import Verdict

OURS = "triton"
PEER = "torch-flex"

# Largest milliseconds by case and pass.
TIME_LIMITS = {
    "evoformer_d64": {"fwd": 0.45, "fwd+bwd": 1.6},
    "evoformer_d128": {"fwd": 0.80, "fwd+bwd": 2.8},
    "diff_d64": {"fwd": 6.5},
    "diff_d128": {"fwd": 7.0},
}
PEER_LIMIT = 1.0  # time over FlexAttention's
# Bytes beyond inputs and outputs for each row of scores: sixteen float32 numbers, of which two are the log-sum-exp and
# the product of output and cotangent.
MEMORY_LIMIT = 64.0
FIRST_COMPILE_LIMIT_S = 5.0
CACHED_KERNELS_LIMIT_MS = 50.0


def judge_fuse(rows: Sequence[FuseTiming], implementation: str = OURS) -> list[Verdict]:
    """Verdicts for the cases that `rows` hold."""
    mine = [row for row in rows if row.implementation == implementation]
    verdicts = [
        Verdict(f"{row.case} {row.pass_name}: ms", row.median_ms, TIME_LIMITS[row.case][row.pass_name])
        for row in mine
        if row.pass_name in TIME_LIMITS.get(row.case, {})
    ]
    verdicts += _judge_peer(rows, implementation)
    verdicts += _worst(mine, "bytes beyond inputs and outputs, for each row of scores", _bytes_by_row, MEMORY_LIMIT)
    verdicts += _worst(mine, "first compile, s", lambda row: row.first_compile_s, FIRST_COMPILE_LIMIT_S)
    verdicts += _worst(
        mine, "kernels of a compile from the disk, ms", lambda row: row.cached_kernels_ms, CACHED_KERNELS_LIMIT_MS
    )
    return verdicts


def backward_ms(forward: FuseTiming | None, both: FuseTiming | None) -> float | None:
    """What both passes take beyond the forward one."""
    if forward is None or both is None or forward.median_ms is None or both.median_ms is None:
        return None
    return both.median_ms - forward.median_ms


def _judge_peer(rows: Sequence[FuseTiming], implementation: str) -> list[Verdict]:
    """Forward, and backward as the difference, over FlexAttention's, of what FlexAttention has arguments for."""
    known = {(row.case, row.implementation, row.pass_name): row for row in rows}
    cases = dict.fromkeys(row.case for row in rows if row.group in TOKEN_GROUPS)
    verdicts = []
    for case in cases:

        def times(name: str, case: str = case) -> tuple[float | None, float | None]:
            forward, both = (known.get((case, name, pass_name)) for pass_name in ("fwd", "fwd+bwd"))
            return None if forward is None else forward.median_ms, backward_ms(forward, both)

        for pass_name, ours, peer in zip(("fwd", "bwd"), times(implementation), times(PEER), strict=True):
            ratio = None if ours is None or peer is None else ours / peer
            verdicts.append(Verdict(f"{case} {pass_name}: time over FlexAttention", ratio, PEER_LIMIT))
    return verdicts


def _bytes_by_row(row: FuseTiming) -> float | None:
    case = FUSE_CASES.get(row.case)
    return None if row.extra_bytes is None or case is None else row.extra_bytes / case.score_rows


def _worst(
    rows: Sequence[FuseTiming], name: str, read: Callable[[FuseTiming], float | None], limit: float
) -> list[Verdict]:
    """One verdict of each pass, for the row with the largest figure."""
    verdicts = []
    for pass_name in dict.fromkeys(row.pass_name for row in rows):
        found = [(value, row.case) for row in rows if row.pass_name == pass_name and (value := read(row)) is not None]
        value, case = max(found, default=(None, "no case"))
        verdicts.append(Verdict(f"{name}, {pass_name}, worst ({case})", value, limit))
    return verdicts
