"""Every launch plan of block-diagonal attention, compiled for architectures that are not here.

A plan is asked of each architecture as its configuration table gives it. It must fit shared and tensor memory, keep
every value in a register, and use the matrix instructions of its architecture.
"""

import dataclasses

import pytest

from blockdiag.problem import BlockDiagonalProblem, RotaryProblem
from blockdiag.triton_kernels.block_diagonal import BlockDiagonalLaunch, backward_kinds, supports
from blockdiag.triton_kernels.offline import inspect_plan
from blockdiag.triton_kernels.plan import Target

pytest.importorskip("triton", reason="the offline compiler is Triton's")

HALF_SPLIT = RotaryProblem(
    interleaved=False, query=True, key=True, value=False, table_rows=4096, table_dtype="float32", positions="sequence"
)
INTERLEAVED = dataclasses.replace(HALF_SPLIT, interleaved=True)
ALL_ROTATED = dataclasses.replace(INTERLEAVED, value=True, positions="explicit")

BASE = BlockDiagonalProblem(
    tokens=262144,
    query_heads=8,
    key_heads=8,
    head_dim=128,
    dtype="bfloat16",
    block_size=64,
    sequence_length=4096,
    num_tiles=4096,
    is_causal=False,
    scale=0.125,
)

PROBLEMS = {
    "h128": BASE,
    "h64": dataclasses.replace(BASE, head_dim=64),
    "h128-causal-fp16": dataclasses.replace(BASE, is_causal=True, dtype="float16"),
    "h128-grouped": dataclasses.replace(BASE, key_heads=2),
    "h128-packed": dataclasses.replace(BASE, sequence_length=None),
    "h128-half": dataclasses.replace(BASE, rotary=HALF_SPLIT),
    "h128-interleaved": dataclasses.replace(BASE, rotary=INTERLEAVED),
    "h64-half": dataclasses.replace(BASE, head_dim=64, rotary=HALF_SPLIT),
    "h128-packed-half": dataclasses.replace(BASE, sequence_length=None, rotary=HALF_SPLIT),
    "h80-half": dataclasses.replace(BASE, head_dim=80, rotary=HALF_SPLIT),
    "h64-all-rotated": dataclasses.replace(BASE, head_dim=64, rotary=ALL_ROTATED),
    "b16-h32": dataclasses.replace(BASE, block_size=16, head_dim=32),
    "b128-h128": dataclasses.replace(BASE, block_size=128),
    "b256-h96-half": dataclasses.replace(BASE, block_size=256, head_dim=96, rotary=HALF_SPLIT),
    "b64-h256": dataclasses.replace(BASE, head_dim=256),
    "b64-h256-half": dataclasses.replace(BASE, head_dim=256, rotary=HALF_SPLIT),
    "fp32-h128": dataclasses.replace(BASE, dtype="float32"),
    "fp32-h64-half": dataclasses.replace(BASE, dtype="float32", head_dim=64, rotary=HALF_SPLIT),
}

MATRIX_INSTRUCTION = {80: "mma.sync", 90: "wgmma", 100: "tcgen05.mma", 120: "mma.sync"}


def launches(problem, arch):
    """The launches of one forward and one backward pass."""
    return [
        BlockDiagonalLaunch(problem, kind) for kind in ("forward", *backward_kinds(problem, Target.for_arch(arch)))
    ]


@pytest.mark.parametrize("arch", [80, 90, 100, 120])
@pytest.mark.parametrize("name", PROBLEMS)
def test_plan_fits_its_architecture(name, arch):
    problem = PROBLEMS[name]
    assert supports(problem) is None
    for launch in launches(problem, arch):
        report = inspect_plan(launch.plan(Target.for_arch(arch)), arch)
        assert report.shared_bytes <= report.shared_limit
        assert report.tensor_memory_columns <= 512
        assert report.ptx["f64"] == 0 and report.ptx["atom"] == 0 and report.ptx["trap"] == 0
        assert report.spill_bytes <= KNOWN_SPILLS.get((name, launch.kind, arch), 0), str(report)
        if problem.dtype == "float32":
            assert report.ptx["wgmma"] + report.ptx["tcgen05.mma"] + report.ptx["mma.sync"] == 0
        elif problem.block_size >= 64 and (name, arch) not in SMALL_CHUNKS:
            assert report.ptx[MATRIX_INSTRUCTION[arch]] > 0, str(report)
        else:
            assert report.ptx[MATRIX_INSTRUCTION[arch]] + report.ptx["mma.sync"] > 0, str(report)
