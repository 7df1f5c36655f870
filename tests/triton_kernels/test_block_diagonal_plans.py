"""Every launch plan of block-diagonal attention, compiled for architectures without their GPUs.

Each architecture gets the plan of its configuration table. The plan must fit shared and tensor memory, keep every value
in a register, and use the matrix instructions of its architecture.
"""

import dataclasses

import numpy as np
import pytest

from blockdiag.common.rotary_problem import RotaryProblem
from blockdiag.interop.interpreter.launch import interpret_plan, numpy_dtype
from blockdiag.ops.block_diagonal.problem import BlockDiagonalProblem
from blockdiag.triton_kernels.block_diagonal.plans import BlockDiagonalLaunch, backward_kinds, supports
from blockdiag.triton_kernels.launch.compile import check_plan, compile_key
from blockdiag.triton_kernels.launch.plan import Scalar, Target
from blockdiag.triton_kernels.launch.private_triton import version
from tests.triton_kernels.plans_support import configurations, report_of

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


def launches(problem, arch):
    """Return the launches of one forward and one backward pass."""
    return [BlockDiagonalLaunch(problem, kind) for kind in ("forward", *backward_kinds(problem, Target.for_arch(arch)))]


def matrix_instructions(report):
    return sum(report.ptx[name] for name in ("wgmma", "tcgen05.mma", "mma.sync"))


# Spilled bytes per thread: 24 warps leave each thread 80 registers. This Blackwell kernel is compiled but never run.
KNOWN_SPILLS = {("h128-causal-fp16", "backward", 100): 28} if version() >= (3, 8) else {}

# These problems differ most from sm_80's kernels. sm_120 has the instructions of sm_80 and less shared memory.
CONSUMER = ("h128", "h128-half", "h64-all-rotated", "b128-h128", "b64-h256-half", "fp32-h128")


@pytest.mark.covers(lambda name, arch: configurations(launches(PROBLEMS[name], arch), arch))
@pytest.mark.parametrize(
    ("name", "arch"),
    [
        pytest.param(name, arch, marks=[pytest.mark.versions] if name == "h128-half" else [])
        for name in PROBLEMS
        for arch in (80, 90, 100, 120)
        if arch < 120 or name in CONSUMER
    ],
)
def test_plan_fits_its_architecture(name, arch):
    problem = PROBLEMS[name]
    assert supports(problem) is None
    for launch in launches(problem, arch):
        report = report_of(launch.plan(Target.for_arch(arch)), arch)
        assert report.shared_bytes <= report.shared_limit
        assert report.tensor_memory_columns <= 512
        assert report.ptx["f64"] == 0 and report.ptx["atom"] == 0 and report.ptx["trap"] == 0
        # Spills are counted inside and outside of loops.
        assert report.spill_bytes <= KNOWN_SPILLS.get((name, launch.kind, arch), 0), str(report)
        assert report.spill_bytes or report.local_accesses == {}, str(report)
        # Full float32 products have no matrix instruction; everything else must use one.
        assert (matrix_instructions(report) > 0) == (problem.dtype != "float32"), str(report)


@pytest.mark.parametrize("name", ["h128", "h64", "h128-grouped", "h128-packed", "h128-half", "h64-half"])
@pytest.mark.parametrize(("arch", "instruction"), [(90, "wgmma"), (100, "tcgen05.mma")])
def test_large_tiles_use_the_matrix_unit_of_their_architecture(name, arch, instruction):
    for launch in launches(PROBLEMS[name], arch):
        report = report_of(launch.plan(Target.for_arch(arch)), arch)
        assert report.ptx[instruction] > 0 and report.ptx["mma.sync"] == 0, str(report)


BLACKWELL_SPECIALISED = {
    ("h128", "forward"),
    ("h64", "forward"),
    ("h128-grouped", "forward"),
    ("h128-packed", "forward"),
    ("h128-half", "forward"),
    ("h128-interleaved", "forward"),
    ("h64-half", "forward"),
    ("h128", "backward"),
    ("h64", "backward"),
    ("h128-causal-fp16", "backward"),
}


@pytest.mark.parametrize(("name", "kind"), sorted(BLACKWELL_SPECIALISED))
def test_blackwell_plans_are_persistent_and_warp_specialised(name, kind):
    """The plans use partitions, tcgen05 and bulk tensor copies. They are compiled for sm_100 and never run."""
    target = Target.for_arch(100)
    plan = BlockDiagonalLaunch(PROBLEMS[name], kind).plan(target)
    assert plan.grid == (target.num_sms, 1, 1)
    report = report_of(plan, 100)
    assert len(report.partitions) == 1 and len(report.partitions[0]) >= 2, str(report)
    assert report.num_warps > plan.options.num_warps
    assert report.ptx["tcgen05.mma"] > 0 and report.ptx["wgmma"] == 0
    assert report.ptx["cp.async.bulk.tensor"] > 0
    assert 0 < report.tensor_memory_columns <= 512
    assert report.shared_bytes <= report.shared_limit


@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_launch_items_group_the_heads_of_a_tile(kind, arch):
    """A launch cut short after one tile's worth of items has written every head of that tile and nothing else."""
    problem = dataclasses.replace(
        BASE, tokens=128, sequence_length=128, num_tiles=2, query_heads=2, key_heads=2, head_dim=64, rotary=HALF_SPLIT
    )
    plan = BlockDiagonalLaunch(problem, kind, is_portable=True).plan(Target(arch, 1))
    items = {name: Scalar(2, "i32") for name in ("num_items", "num_units") if name in plan.arguments}
    cut = dataclasses.replace(plan, arguments={**plan.arguments, **items})
    generator = np.random.default_rng(0)
    arrays = [generator.normal(size=spec.shape).astype(numpy_dtype(spec.dtype)) for spec in plan.inputs]
    for result in interpret_plan(cut, *arrays):
        result = result.astype(np.float32)
        assert np.isfinite(result[:64]).all() and np.isnan(result[64:]).all()


def test_kernel_is_shared_between_sizes_of_the_same_shape():
    """Batch, lengths, number of sequences and scale are run-time values: they must not compile another kernel."""
    for arch in (80, 90, 100):
        target = Target.for_arch(arch)
        for base in (BASE, dataclasses.replace(BASE, sequence_length=None), PROBLEMS["fp32-h64-half"]):
            longer = dataclasses.replace(
                base,
                tokens=2 * base.tokens,
                num_tiles=3 * base.num_tiles + 1,
                sequence_length=None if base.sequence_length is None else 2 * base.sequence_length,
                scale=0.3,
            )
            for kind in ("forward", *backward_kinds(base, target)):
                keys = {
                    compile_key(BlockDiagonalLaunch(problem, kind).plan(target), arch) for problem in (base, longer)
                }
                assert len(keys) == 1


def test_launches_traced_for_one_architecture_lower_for_another():
    """The number of backward launches is fixed while tracing, when the target may be unknown."""
    problem = PROBLEMS["h128-half"]
    assert backward_kinds(problem, Target.for_arch(90)) != backward_kinds(problem, Target.for_arch(80))
    for traced, lowered in ((90, 80), (80, 90)):
        for kind in backward_kinds(problem, Target.for_arch(traced)):
            plan = BlockDiagonalLaunch(problem, kind).plan(Target.for_arch(lowered))
            assert plan.outputs == BlockDiagonalLaunch(problem, kind).outputs
            check_plan(plan)


def test_supports_names_what_the_kernels_decline():
    for change, word in (
        ({"dtype": "float64"}, "float64"),
        ({"head_dim": 20}, "20"),
        ({"head_dim": 264}, "264"),
        ({"num_tiles": 2**30}, "split"),
    ):
        assert word in supports(dataclasses.replace(BASE, **change))
