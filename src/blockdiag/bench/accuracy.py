"""Distance of outputs and gradients from the float64 oracle, ours beside FlashAttention 2 on the same inputs."""

from collections.abc import Sequence
from dataclasses import asdict

import torch

from blockdiag.bench.cases import CASES, Case
from blockdiag.bench.exact import TENSOR_NAMES, exact_attention
from blockdiag.bench.implementations import Implementation
from blockdiag.bench.measure import OP, relative_error
from blockdiag.bench.records import Environment, ErrorRow, reason_of, recordable_failures
from blockdiag.bench.workload import make_workload

_TOKENS = 8192
_JAGGED = (1, 64, 0, 127, 800, 1999, 63, 65, 1536, 2000, 1537)
# FlashAttention 2 computes packed blocks through varlen attention, folded ones through SDPA.
_FLASH = ("torch-fa2", "torch-varlen")


def accuracy_cases() -> list[Case]:
    """Every case over 8,192 tokens, the packed ones with tails of all sorts."""
    return [case.shrunk(_JAGGED if case.packed else (_TOKENS // 4,) * 4) for case in CASES.values()]


def measure_errors(
    cases: Sequence[Case],
    implementations: Sequence[Implementation],
    environment: Environment,
    *,
    seeds: int = 3,
    device: str = "cuda",
) -> list[ErrorRow]:
    """Worst and mean absolute error over `seeds` inputs, and the relative norm, of each tensor.

    Implementations that a case is not for get no rows here; ones that fail get one row with the reason.
    """
    rows: list[ErrorRow] = []
    for case in cases:
        for implementation in implementations:
            if implementation.unsupported(case) is None:
                rows += _errors_of(case, implementation, environment, seeds, device)
    return rows


def flash_baseline(case: Case, implementations: Sequence[Implementation]) -> Implementation | None:
    """FlashAttention 2 in the form that takes this case."""
    usable = [one for one in implementations if one.name in _FLASH and one.unsupported(case) is None]
    return min(usable, key=lambda one: _FLASH.index(one.name), default=None)


def _errors_of(
    case: Case, implementation: Implementation, environment: Environment, seeds: int, device: str
) -> list[ErrorRow]:
    """Rows of one case and implementation."""
    blank = ErrorRow(
        op=OP,
        case=case.name,
        implementation=implementation.name,
        tensor="",
        tokens=case.tokens,
        seeds=seeds,
        **asdict(environment),
    )
    try:
        measured = [_one_seed(case, implementation, seed, device) for seed in range(seeds)]
    except recordable_failures() as failure:
        return [ErrorRow(**{**asdict(blank), "tensor": "all", "note": f"failed: {reason_of(failure)}"})]
    rows = []
    for index, tensor in enumerate(TENSOR_NAMES):
        worst, mean, relative = zip(*(errors[index] for errors in measured), strict=True)
        numbers = {
            "tensor": tensor,
            "max_error": max(worst),
            "mean_error": sum(mean) / seeds,
            "relative_error": sum(relative) / seeds,
        }
        rows.append(ErrorRow(**{**asdict(blank), **numbers}))
    return rows


def _one_seed(case: Case, implementation: Implementation, seed: int, device: str) -> list[tuple[float, float, float]]:
    """Worst, mean and relative error of output, dQ, dK and dV."""
    workload = make_workload(case, seed=seed, device=device)
    exact = exact_attention(case, *workload.inputs, workload.cotangent, workload.tables, dtype=torch.float64)
    prepared = implementation.passes(workload)["fwd+bwd"]()
    errors = []
    for result, wanted in zip(prepared.tensors(prepared.run()), exact, strict=True):
        difference = (result.double() - wanted).abs()
        errors.append((float(difference.max()), float(difference.mean()), relative_error(result, wanted)))
    return errors
