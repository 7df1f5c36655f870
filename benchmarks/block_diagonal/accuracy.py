"""Distance of outputs and gradients from the float64 oracle, ours beside FlashAttention 2 on the same inputs."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace

import torch

from benchmarks.block_diagonal.cases import CASES, OP, Case
from benchmarks.block_diagonal.exact import TENSOR_NAMES, exact_attention
from benchmarks.block_diagonal.implementations import unchecked
from benchmarks.block_diagonal.workload import make_workload
from benchmarks.harness.device import relative_error
from benchmarks.harness.family import Implementation
from benchmarks.harness.records import Environment, ErrorRow, recordable_failures
from blockdiag.cli.machine import reason_of

_TOKENS = 8192
_JAGGED = (1, 64, 0, 127, 800, 1999, 63, 65, 1536, 2000, 1537)
# FlashAttention 2 computes packed blocks through varlen attention, folded ones through SDPA.
_FLASH = ("torch-fa2", "torch-varlen")

# Per seed and tensor: worst, mean and relative error.
type _Errors = list[list[tuple[float, float, float]]]


def accuracy_cases() -> list[Case]:
    """Every case over 8,192 tokens, the packed ones with tails of all sorts."""
    return [case.shrunk(_JAGGED if case.packed else (_TOKENS // 4,) * 4) for case in CASES.values()]


def measure_errors(
    cases: Sequence[Case],
    implementations: Sequence[Implementation],
    environment: Environment,
    *,
    seeds: int = 12,
    device: str = "cuda",
) -> list[ErrorRow]:
    """Worst and mean absolute error over `seeds` inputs, and the relative norm, of each tensor.

    Beside FlashAttention 2, when it is among the implementations, also the ratio to its errors, seed by seed.
    Implementations that a case is not for get no rows here; ones that fail get one row with the reason.
    """
    rows: list[ErrorRow] = []
    for case in cases:
        flash = flash_baseline(case, implementations)
        flash_errors: _Errors | None = None
        for implementation in sorted(implementations, key=lambda one: one is not flash):
            if implementation.unsupported(case) is not None:
                continue
            try:
                errors = [_one_seed(case, implementation, seed, device) for seed in range(seeds)]
            except recordable_failures() as failure:
                blank = _blank_row(case, implementation, environment, seeds)
                rows.append(replace(blank, tensor="all", note=f"failed: {reason_of(failure)}"))
                continue
            if implementation is flash:
                flash_errors = errors
            rows += _rows_of(_blank_row(case, implementation, environment, seeds), errors, flash_errors)
    return rows


def flash_baseline(case: Case, implementations: Sequence[Implementation]) -> Implementation | None:
    """FlashAttention 2 in the form that takes this case."""
    usable = [one for one in implementations if one.name in _FLASH and one.unsupported(case) is None]
    return min(usable, key=lambda one: _FLASH.index(one.name), default=None)


def _blank_row(case: Case, implementation: Implementation, environment: Environment, seeds: int) -> ErrorRow:
    """What all rows of one case and implementation share."""
    return ErrorRow(
        op=OP,
        case=case.name,
        implementation=implementation.name,
        tensor="",
        tokens=case.tokens,
        seeds=seeds,
        **asdict(environment),
    )


def _rows_of(blank: ErrorRow, errors: _Errors, flash: _Errors | None) -> list[ErrorRow]:
    """Rows of one case and implementation, one per tensor."""
    rows = []
    for index, tensor in enumerate(TENSOR_NAMES):
        worst, mean, relative = zip(*(seed[index] for seed in errors), strict=True)
        row = replace(
            blank,
            tensor=tensor,
            max_error=max(worst),
            mean_error=statistics.fmean(mean),
            relative_error=statistics.fmean(relative),
        )
        if flash is not None and flash is not errors:
            flash_worst, flash_mean, _ = zip(*(seed[index] for seed in flash), strict=True)
            max_over_flash, max_se = _mean_ratio(worst, flash_worst)
            mean_over_flash, mean_se = _mean_ratio(mean, flash_mean)
            row = replace(
                row,
                mean_over_flash=mean_over_flash,
                mean_over_flash_se=mean_se,
                max_over_flash=max_over_flash,
                max_over_flash_se=max_se,
            )
        rows.append(row)
    return rows


def _mean_ratio(above: Sequence[float], below: Sequence[float]) -> tuple[float, float | None]:
    """Mean of the quotients and its standard error (None for a single one)."""
    ratios = [one / other for one, other in zip(above, below, strict=True)]
    spread = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else None
    return statistics.fmean(ratios), spread


def _one_seed(case: Case, implementation: Implementation, seed: int, device: str) -> list[tuple[float, float, float]]:
    """Worst, mean and relative error of output, dQ, dK and dV."""
    workload = make_workload(case, seed=seed, device=device)
    exact = exact_attention(case, *workload.inputs, workload.cotangent, workload.tables, dtype=torch.float64)
    program = unchecked(implementation, workload)("fwd+bwd")
    errors = []
    for result, wanted in zip(program.tensors(program.run()), exact, strict=True):
        difference = (result.double() - wanted).abs()
        errors.append((float(difference.max()), float(difference.mean()), relative_error(result, wanted)))
    return errors
