"""Shared code of tests of launch plans: reports of kernels compiled for other architectures."""

import triton
import triton.language as tl

from blockdiag.triton_kernels.launch.compile import check_plan, compile_key
from blockdiag.triton_kernels.launch.offline import Report, inspect_plan
from blockdiag.triton_kernels.launch.plan import LaunchPlan, Pointer, TensorSpec

_reports: dict[tuple[object, ...], Report] = {}


def report_of(plan: LaunchPlan, arch: int) -> Report:
    """Return a kernel's report; equal kernels share one, because many launches differ only in sizes."""
    check_plan(plan)
    key = compile_key(plan, arch)
    if key not in _reports:
        _reports[key] = inspect_plan(plan, arch)
    return _reports[key]


@triton.jit
def round_kernel(p_x, p_out):
    """Round 128 numbers."""
    o_x = tl.arange(0, 128)
    tl.store(p_out + o_x, tl.load(p_x + o_x).to(tl.float8e5))


def compile_rounding_to_e5m2(arch: int) -> Report:
    """Compile a kernel that rounds to e5m2, whether it is on disk or not."""
    plan = LaunchPlan(
        name="round",
        kernel=round_kernel,
        grid=(1, 1, 1),
        inputs=(TensorSpec((128,), "bfloat16"),),
        outputs=(TensorSpec((128,), "float8_e5m2"),),
        arguments={"p_x": Pointer("input", 0), "p_out": Pointer("output", 0)},
    )
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.always_compile = True
        return report_of(plan, arch)
