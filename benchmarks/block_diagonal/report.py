"""Tables of block-diagonal attention for the terminal, and the limits that its figures are compared with."""

from collections.abc import Callable, Iterable, Sequence

from rich.table import Table

from benchmarks.block_diagonal.cases import PASSES
from benchmarks.harness.records import ErrorRow, HostRow, Timing
from benchmarks.harness.report import Cell, Verdict, column_cell, pass_table, quotient

OURS = "triton"

# Largest time over floor, forward and backward.
FLOOR_LIMITS = {
    "h8_d128": {"fwd": 0.97, "bwd": 1.03},
    "h16_d64": {"fwd": 0.98, "bwd": 1.03},
    "gqa8_2_d128": {"fwd": 1.05, "bwd": 1.10},
    "packed_h4_d128": {"fwd": 1.05, "bwd": 1.10},
}
# Largest time with rotary over the time without.
ROTARY_LIMIT = 1.05
ROTARY_PAIRS = {
    "h8_d128_rotary": "h8_d128",
    "h8_d128_rotary_bf16": "h8_d128",
    "h16_d64_rotary": "h16_d64",
    "packed_h4_d128_rotary": "packed_h4_d128",
}
# Least speed-up of forward and backward together.
FLASH_LIMITS = {"h8_d128": 2.5, "h16_d64": 5.0}
JAX_LIMIT = 3.0
JAX_TODAY = ("jax-einsum", "jax-cudnn")
HOST_LIMIT_US = 5.0


class _Times:
    """Medians by case, pass and implementation."""

    def __init__(self, rows: Iterable[Timing]) -> None:
        self.rows = {(row.case, row.pass_name, row.implementation): row for row in rows}

    def value(
        self, case: str, pass_name: str, implementation: str, read: Callable[[Timing], float | None]
    ) -> float | None:
        row = self.rows.get((case, pass_name, implementation))
        return None if row is None else read(row)

    def median(self, case: str, pass_name: str, implementation: str) -> float | None:
        return self.value(case, pass_name, implementation, lambda row: row.median_ms)

    def ratio(self, case: str, pass_name: str, above: str, below: str) -> float | None:
        """Median of `above` over median of `below`."""
        return quotient(self.median(case, pass_name, above), self.median(case, pass_name, below))


def judge_times(rows: Sequence[Timing], implementation: str = OURS) -> list[Verdict]:
    """Verdicts on time and memory for the cases that `rows` hold."""
    times = _Times(rows)
    cases = {row.case for row in rows}
    verdicts = []
    for case, limits in FLOOR_LIMITS.items():
        for pass_name, limit in limits.items() if case in cases else ():
            ratio = times.value(case, pass_name, implementation, lambda row: row.ratio_to_floor)
            verdicts.append(Verdict(f"{case} {pass_name}: time over floor", ratio, limit))
    for case, plain in ROTARY_PAIRS.items():
        for pass_name in ("fwd", "bwd") if {case, plain} <= cases else ():
            ratio = quotient(
                times.median(case, pass_name, implementation), times.median(plain, pass_name, implementation)
            )
            verdicts.append(Verdict(f"{case} {pass_name}: time over the same without rotary", ratio, ROTARY_LIMIT))
    for case, limit in FLASH_LIMITS.items():
        if case in cases:
            ratio = times.ratio(case, "fwd+bwd", "torch-fa2", implementation)
            verdicts.append(Verdict(f"{case} fwd+bwd: speed-up over FlashAttention 2", ratio, limit, at_least=True))
            today = [times.ratio(case, "fwd+bwd", name, implementation) for name in JAX_TODAY]
            best = min((ratio for ratio in today if ratio is not None), default=None)
            name = f"{case} fwd+bwd: speed-up over the best of XLA and cuDNN in JAX"
            verdicts.append(Verdict(name, best, JAX_LIMIT, at_least=True))
    for case in sorted(cases & set(FLOOR_LIMITS)):
        for pass_name in ("fwd", "bwd"):
            peak = times.value(case, pass_name, implementation, lambda row: row.peak_bytes)
            # A tile table of a packed call is the one thing that lives beside inputs and outputs: 12 bytes a block.
            allowed = 2**20 if case.startswith("packed") else 0
            verdicts.append(Verdict(f"{case} {pass_name}: bytes beyond inputs and outputs", peak, allowed))
    return verdicts


def judge_errors(rows: Sequence[ErrorRow], implementation: str = OURS) -> list[Verdict]:
    """Mean and largest error of each tensor over FlashAttention 2's on the same inputs; neither may exceed 1.

    Both are means over some seeds. Where the errors of both round alike, such a mean lies as often above 1 as below,
    so that two standard errors are granted.
    """
    verdicts = []
    for row in rows:
        if row.implementation != implementation:
            continue
        for kind, ratio, error in (
            ("mean", row.mean_over_flash, row.mean_over_flash_se),
            ("largest", row.max_over_flash, row.max_over_flash_se),
        ):
            name = f"{row.case} {row.tensor}: {kind} error over FlashAttention 2's"
            verdicts.append(Verdict(name, ratio, 1.0, uncertainty=2 * (error or 0.0)))
    return verdicts


def judge_host(rows: Sequence[HostRow], implementation: str = OURS) -> list[Verdict]:
    """Host time of a jitted call beyond that of a trivial one."""
    return [
        Verdict(f"{row.pass_name}: host time over a trivial jitted operation, us", row.over_trivial_us, HOST_LIMIT_US)
        for row in rows
        if row.implementation == implementation
    ]


def judge_torch_host(rows: Sequence[HostRow]) -> list[Verdict]:
    """Host time of the torch operators over their baselines, and of the bridges.

    Autograd's engine hands a backward pass to a thread of its own and waits, whatever is differentiated; what the
    operator adds to that is judged beside the whole.
    """
    from benchmarks.block_diagonal.torch_host import AUTOGRAD, LIMITS

    found = {(row.pass_name, row.implementation): row for row in rows}

    def over(key: tuple[str, str]) -> float | None:
        return found[key].over_trivial_us if key in found else None

    verdicts = [
        Verdict(f"{pass_name}, {name}: host time, us", over((pass_name, name)), limit)
        for (pass_name, name), limit in LIMITS.items()
    ]
    whole, engine = over(("fwd+bwd", "operator")), found.get(AUTOGRAD)
    added = None if whole is None or engine is None or engine.median_us is None else whole - engine.median_us
    name = "fwd+bwd, operator: host time beyond that of one torch operation, us"
    return [*verdicts, Verdict(name, added, LIMITS["fwd+bwd", "operator"])]


def _cell(row: Timing | None) -> str:
    """Time, ratio to floor and rate of one pass."""
    if row is None or row.median_ms is None:
        return "-"
    ratio = "" if row.ratio_to_floor is None else f"  {row.ratio_to_floor:.3f}x"
    rate = "" if row.gb_per_s is None else f"  {row.gb_per_s:,.0f}"
    return f"{row.median_ms:.4f}{ratio}{rate}"


def timing_table(case: str, rows: Sequence[Timing]) -> Table:
    """Return a table of one case with a line for each implementation that has a time."""
    copy = next((row.copy_gb_per_s for row in rows if row.copy_gb_per_s), None)
    title = case if copy is None else f"{case}   (copy {copy:,.0f} GB/s; cells: ms, time over floor, GB/s)"
    cells: dict[str, Cell] = {name: lambda found, name=name: _cell(found.get(name)) for name in PASSES}
    cells["extra MiB"] = lambda found: " / ".join(
        column_cell(found.get(name), "peak_bytes", ".1f", 2**20) for name in PASSES
    )
    return pass_table(title, rows, cells)


def _error_cell(row: ErrorRow | None) -> str:
    return "-" if row is None else f"{row.max_error:.3g} / {row.mean_error:.3g}"


def error_table(rows: Sequence[ErrorRow]) -> Table:
    """Errors against the float64 oracle; a line per case and tensor, a column per implementation."""
    names = list(dict.fromkeys(row.implementation for row in rows if row.tensor != "all"))
    table = Table(title="error against float64: worst / mean", title_justify="left")
    table.add_column("case")
    table.add_column("tensor")
    for name in names:
        table.add_column(name, justify="right")
    keys = dict.fromkeys((row.case, row.tensor) for row in rows if row.tensor != "all")
    for case, tensor in keys:
        found = {row.implementation: row for row in rows if (row.case, row.tensor) == (case, tensor)}
        table.add_row(case, tensor, *(_error_cell(found.get(name)) for name in names))
    return table


def host_table(rows: Sequence[HostRow]) -> Table:
    """Host time per call."""
    table = Table(title="host time of a jitted call, us: median (p20 to p80)", title_justify="left")
    for name in ("pass", "implementation", "us", "over a trivial call"):
        table.add_column(name, justify="right")
    for row in rows:
        if row.median_us is None:
            table.add_row(row.pass_name, row.implementation, "-", row.note[:80])
        else:
            spread = f"{row.median_us:.2f} ({row.p20_us:.2f} to {row.p80_us:.2f})"
            table.add_row(row.pass_name, row.implementation, spread, f"{row.over_trivial_us:+.2f}")
    return table
