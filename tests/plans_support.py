"""What tests of launch plans share: reports of kernels compiled for architectures that are not here."""

from blockdiag.triton_kernels.compile import check_plan, compile_key
from blockdiag.triton_kernels.offline import Report, inspect_plan
from blockdiag.triton_kernels.plan import LaunchPlan

_reports: dict[tuple[object, ...], Report] = {}


def report_of(plan: LaunchPlan, arch: int) -> Report:
    """Of equal kernels one report: many launches differ in sizes alone, which no kernel contains."""
    check_plan(plan)
    key = compile_key(plan, arch)
    if key not in _reports:
        _reports[key] = inspect_plan(plan, arch)
    return _reports[key]
