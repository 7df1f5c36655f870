"""Every launch plan of MoBA, compiled for architectures without their GPUs."""

import dataclasses

import pytest

from blockdiag.ops.moba.problem import MoBAProblem
from blockdiag.triton_kernels.launch.plan import Target
from blockdiag.triton_kernels.launch.private_triton import version
from blockdiag.triton_kernels.moba.plans import MoBALaunch, supports
from blockdiag.triton_kernels.moba.steps import backward_steps, forward_steps, list_steps, routing_steps
from tests.triton_kernels.plans_support import configurations, launch_cases, report_of

BASE = MoBAProblem(
    query_tokens=131072,
    key_tokens=131072,
    query_heads=16,
    key_heads=16,
    head_dim=128,
    dtype="bfloat16",
    block_size=128,
    num_blocks=1024,
    sequence_blocks=1024,
    slots=7,
    is_causal=True,
    has_key_mask=False,
    scale=0.088,
)
PROBLEMS = {
    "h128": BASE,
    "h64, blocks of 64, many slots": dataclasses.replace(BASE, head_dim=64, block_size=64, num_blocks=2048, slots=15),
    "grouped, fp16, masked, padded": dataclasses.replace(
        BASE, key_heads=4, dtype="float16", has_key_mask=True, has_padding=True
    ),
    "h64, fp16": dataclasses.replace(BASE, head_dim=64, block_size=64, num_blocks=2048, dtype="float16"),
    "large blocks": dataclasses.replace(BASE, block_size=512, num_blocks=256, sequence_blocks=256, slots=1),
    "h256, not causal": dataclasses.replace(BASE, head_dim=256, is_causal=False),
    "fp32": dataclasses.replace(BASE, dtype="float32", head_dim=64),
    "own block only": dataclasses.replace(BASE, slots=0),
    "one head, short sequences": dataclasses.replace(
        BASE, query_tokens=262144, key_tokens=262144, num_blocks=2048, sequence_blocks=256, query_heads=1, key_heads=1
    ),
}
# These launches have matrix products. The others count, add and move.
WITH_PRODUCTS = {"choose", "blocks_forward", "blocks_backward", "query_parts"}
# Accesses of local memory within loops. Registers do not suffice for the gradients of 128 keys at head dimension 128.
# The Hopper kernel takes 6.4 ms at 65,536 tokens. It takes 7.0 ms if registers are divided so that these warps spill
# less. On sm_80 the tile is the smallest of those tried.
KNOWN_SPILLS = {
    ("h128", "blocks_backward", 90): 6,
    ("grouped, fp16, masked, padded", "blocks_backward", 90): 67,
    ("h128", "blocks_backward", 80): 8,
    ("grouped, fp16, masked, padded", "blocks_backward", 80): 64,
    ("own block only", "blocks_backward", 80): 16,
    ("one head, short sequences", "blocks_backward", 90): 6,
    ("one head, short sequences", "blocks_backward", 80): 8,
}
# A newer Triton compiles the same warps of the Hopper kernel with more accesses.
if version() >= (3, 8):
    KNOWN_SPILLS |= {
        ("h128", "blocks_backward", 90): 30,
        ("one head, short sequences", "blocks_backward", 90): 30,
        ("grouped, fp16, masked, padded", "blocks_backward", 90): 69,
    }


def launches(problem):
    routing = (*routing_steps(problem), *list_steps()) if problem.slots else ()
    steps = dict.fromkeys((*routing, *forward_steps(problem), *backward_steps(problem)))
    return [MoBALaunch(problem, kind, heads=heads) for kind, heads in steps]


@pytest.mark.covers(lambda name, place, arch: configurations([launches(PROBLEMS[name])[place]], arch))
@pytest.mark.parametrize(
    ("name", "place", "arch"),
    [
        *launch_cases(PROBLEMS, launches, (80, 90, 100), marks={"h128": pytest.mark.versions}),
        # The widest heads. sm_120 has the instructions of sm_80 and less shared memory.
        *launch_cases({"h256, not causal": PROBLEMS["h256, not causal"]}, launches, (120,)),
    ],
)
def test_plan_fits_its_architecture(name, place, arch):
    problem = PROBLEMS[name]
    assert supports(problem) is None
    launch = launches(problem)[place]
    report = report_of(launch.plan(Target.for_arch(arch)), arch)
    assert report.shared_bytes <= report.shared_limit and report.tensor_memory_columns <= 512
    assert report.ptx["f64"] == 0 and report.ptx["trap"] == 0
    assert report.ptx["atom"] == 0
    in_loops = sum(count for depth, count in report.local_accesses.items() if depth > 0)
    assert in_loops <= KNOWN_SPILLS.get((name, launch.kind, arch), 0), str(report)
    if launch.kind in WITH_PRODUCTS and problem.dtype != "float32":
        instructions = {80: ["mma.sync"], 90: ["wgmma"], 100: ["tcgen05.mma"], 120: ["mma.sync"]}[arch]
        if problem.head_dim > 128:
            # Tiles of fewer than 64 rows are too small for the newer instructions.
            instructions = [*instructions, "mma.sync"]
        assert sum(report.ptx[name] for name in instructions) > 0, str(report)


def test_hopper_kernels_are_chosen_where_they_fit():
    def kernels(problem):
        return {launch.plan(Target(90, 132)).kernel.fn.__name__ for launch in launches(problem)}

    hopper = {"moba_hopper_choose", "moba_hopper_forward", "moba_hopper_backward"}
    assert hopper | {"moba_halves"} <= kernels(BASE)
    assert hopper <= kernels(dataclasses.replace(BASE, dtype="float16"))
    assert "moba_halves" not in kernels(dataclasses.replace(BASE, sequence_blocks=511))
    short = dataclasses.replace(BASE, dtype="float16", sequence_blocks=511)
    assert kernels(short) & hopper == hopper - {"moba_hopper_choose"}
    assert not kernels(dataclasses.replace(BASE, dtype="float32", head_dim=64)) & hopper
    assert not kernels(dataclasses.replace(BASE, block_size=512, num_blocks=256)) & (hopper - {"moba_hopper_choose"})


@pytest.mark.parametrize("name", ["h128", "grouped, fp16, masked, padded", "h64, fp16"])
def test_two_programs_of_the_hopper_forward_kernel_share_a_multiprocessor(name):
    launch = next(x for x in launches(PROBLEMS[name]) if x.kind == "blocks_forward")
    report = report_of(launch.plan(Target.for_arch(90)), 90)
    # A multiprocessor has 228 KiB of shared memory, of which each program takes 1 KiB for itself, and 65,536 registers.
    assert 2 * (report.shared_bytes + 1024) <= 228 * 1024
    assert 2 * report.num_warps * 32 * report.registers <= 65536


def test_supports_names_what_the_kernels_decline():
    assert "head dimensions" in supports(dataclasses.replace(BASE, head_dim=20))
    assert "float64" in supports(dataclasses.replace(BASE, dtype="float64"))
    assert "2^31" in supports(dataclasses.replace(BASE, query_tokens=2**28))
