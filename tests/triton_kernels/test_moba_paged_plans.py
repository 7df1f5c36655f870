"""Every launch plan of MoBA over a paged cache, compiled for architectures without their GPUs."""

import dataclasses
import math

import pytest

from blockdiag.ops.moba_paged.problem import MoBAPagedProblem
from blockdiag.ops.paged.problem import PagedProblem
from blockdiag.triton_kernels.launch.plan import Target
from blockdiag.triton_kernels.moba_paged.plans import steps, supports, tile_keys
from blockdiag.triton_kernels.moba_paged.prompts import is_prompt
from tests.triton_kernels.plans_support import configurations, launch_cases, report_of

CALL = PagedProblem(
    batch=1,
    query_tokens=1,
    query_heads=32,
    key_heads=8,
    head_dim=128,
    value_dim=128,
    query_dtype="bfloat16",
    key_dtype="bfloat16",
    value_dtype="bfloat16",
    output_dtype="bfloat16",
    num_pages=8192,
    page_size=16,
    max_pages=8192,
    scale=0.088,
)
BASE = MoBAPagedProblem(paged=CALL, block_size=128, max_blocks=1024, slots=7)
CACHES = {
    f"float8_{kind}": {f"{name}_dtype": f"float8_{kind}" for name in ("key", "value")} for kind in ("e4m3fn", "e5m2")
}
WIDE = {f"{name}_dtype": "float32" for name in ("query", "key", "value", "output")}


def changed(**changes) -> MoBAPagedProblem:
    return dataclasses.replace(BASE, paged=dataclasses.replace(CALL, **changes))


PROBLEMS = {
    "bfloat16": BASE,
    "e5m2, pages of 1, fewer queries": changed(
        **CACHES["float8_e5m2"], num_pages=2**25, page_size=1, max_pages=131072, has_query_lengths=True, query_tokens=4,
        has_score_scale=True, value_scale="head",
    ),
    "e4m3, scales of tokens": changed(
        **CACHES["float8_e4m3fn"], query_dtype="float8_e4m3fn", key_scale="token", value_scale="token"
    ),
    "int8, scales of tokens": changed(key_dtype="int8", value_dtype="int8", key_scale="token", value_scale="token"),
    "many blocks": dataclasses.replace(changed(num_pages=65536, max_pages=65536), max_blocks=8192),
    "float32, large blocks, heads of 256": dataclasses.replace(
        changed(**WIDE, head_dim=256, value_dim=256), block_size=4096, max_blocks=32, slots=1
    ),
}  # fmt: skip
LONG = PROBLEMS["many blocks"]


def prompt(block_size: int = 128, slots: int = 7, **changes) -> MoBAPagedProblem:
    """Return a call with as many queries as keys."""
    call = changed(**dict(query_tokens=65536, num_pages=4096, max_pages=4096) | changes)
    max_blocks = max(call.paged.max_keys - 1, 0) // block_size
    return dataclasses.replace(call, block_size=block_size, max_blocks=max_blocks, slots=slots)


CONTIGUOUS = dict(has_page_table=False, num_pages=1, page_size=65536, max_pages=1)
PROMPTS = {
    "bfloat16": prompt(),
    "float16, pages of 64, heads of 64": prompt(
        64, num_pages=1024, page_size=64, max_pages=1024, head_dim=64, value_dim=64,
        **{f"{name}_dtype": "float16" for name in ("query", "key", "value", "output")},
    ),
    "e5m2, fewer queries, scales of heads": prompt(
        **CACHES["float8_e5m2"], has_query_lengths=True, has_score_scale=True, value_scale="head"
    ),
    "e4m3, queries too, scales of tokens, contiguous": prompt(
        **CACHES["float8_e4m3fn"], query_dtype="float8_e4m3fn", key_scale="token", value_scale="token", **CONTIGUOUS
    ),
    "large blocks": prompt(512, 1),
    "float32": prompt(**WIDE),
    "own block only": prompt(slots=0),
}  # fmt: skip
# Accesses of local memory within loops.
PROMPT_SPILLS = {("large blocks", "moba_blocks_forward", 80): 6}
WITH_E4M3 = [name for name in PROBLEMS | PROMPTS if "e4m3" in name]


@pytest.mark.covers(lambda name, place, arch: configurations([steps(PROBLEMS[name])[place]], arch))
@pytest.mark.parametrize(
    ("name", "place", "arch"),
    launch_cases(PROBLEMS, steps, (80, 90, 100), marks={"bfloat16": pytest.mark.versions}, since_89=WITH_E4M3),
)
def test_plan_fits_its_architecture(name, place, arch):
    problem = PROBLEMS[name]
    assert supports(problem) is None
    launch = steps(problem)[place]
    report = report_of(launch.plan(Target.for_arch(arch)), arch)
    assert report.shared_bytes <= 16384
    assert report.ptx["f64"] == 0 and report.ptx["trap"] == 0
    # Only the kernel in which parts arrive has an atomic instruction, and it has one.
    assert report.ptx["atom"] == (launch.kind == "blocks")
    assert not any(report.local_accesses.values()), str(report)


@pytest.mark.parametrize("name", WITH_E4M3)
def test_e4m3_is_refused_where_gpus_have_no_conversion(name):
    with pytest.raises(NotImplementedError, match=r"float8_e4m3fn needs compute capability 8\.9 or higher"):
        for launch in steps((PROBLEMS | PROMPTS)[name]):
            launch.plan(Target.for_arch(80))


@pytest.mark.covers(lambda name, place, arch: configurations([steps(PROMPTS[name])[place]], arch))
@pytest.mark.parametrize(
    ("name", "place", "arch"), launch_cases(PROMPTS, steps, (80, 90, 100, 120), since_89=WITH_E4M3)
)
def test_plan_of_prompts_fits_its_architecture(name, place, arch):
    problem = PROMPTS[name]
    assert supports(problem) is None and is_prompt(problem)
    launch = steps(problem)[place]
    report = report_of(launch.plan(Target.for_arch(arch)), arch)
    assert report.shared_bytes <= report.shared_limit and report.tensor_memory_columns <= 512
    assert report.ptx["f64"] == 0 and report.ptx["trap"] == 0 and report.ptx["atom"] == 0
    in_loops = sum(count for depth, count in report.local_accesses.items() if depth > 0)
    assert in_loops <= PROMPT_SPILLS.get((name, launch.name, arch), 0), str(report)
    if launch.name == "moba_blocks_forward" and name != "float32":
        instruction = {80: "mma.sync", 90: "wgmma", 100: "tcgen05.mma", 120: "mma.sync"}[arch]
        assert report.ptx[instruction] > 0, str(report)


def test_prompts_use_the_kernels_of_moba_for_hopper():
    kernels = {launch.name: launch.plan(Target(90, 132)).kernel.__name__ for launch in steps(PROMPTS["bfloat16"])}
    assert kernels["moba_choose"] == "moba_hopper_choose"
    assert kernels["moba_blocks_forward"] == "moba_hopper_forward"
    names = [launch.name for launch in steps(PROMPTS["e4m3, queries too, scales of tokens, contiguous"])]
    assert names[:3] == ["moba_paged_tables", "moba_paged_widen", "moba_halves"]
    assert "moba_halves" not in [launch.name for launch in steps(PROMPTS["float32"])]


def test_counters_of_large_caches_are_bounded():
    """A cache with room for 8,192 blocks of each of 64 sequences, and 64 queries of each."""
    problem = prompt(batch=64, query_tokens=64, num_pages=4096, max_pages=16384, page_size=64)
    (count,) = [launch for launch in steps(problem) if launch.name == "moba_count"]
    counters, _ = count.outputs
    assert math.prod(counters.shape) <= 2**28 and counters.shape[1] < PROMPTS["bfloat16"].paged.query_tokens // 256


def test_reset_of_many_counters_is_a_loop():
    """Values of another width are not computed as a prompt."""
    problem = prompt(value_dim=64)
    assert not is_prompt(problem)
    assert [launch.name for launch in steps(problem)] == ["moba_paged_scores", "moba_paged_blocks"]
    assert report_of(steps(problem)[0].plan(Target.for_arch(90)), 90).registers <= 255


def test_attend_steps_follow_from_the_problem():
    attend = ["moba_paged_scores", "moba_paged_blocks"]
    assert [launch.name for launch in steps(BASE)] == attend
    # Parts still arrive if no blocks are chosen.
    assert [launch.name for launch in steps(dataclasses.replace(BASE, slots=0))] == attend
    assert [launch.name for launch in steps(LONG)] == [attend[0], "moba_paged_choose", attend[1]]


def test_tile_keys_grow_with_the_block_size():
    assert tile_keys(BASE) == 32
    assert tile_keys(dataclasses.replace(BASE, block_size=16)) == 16
    assert tile_keys(dataclasses.replace(BASE, block_size=4096)) == 256
    assert tile_keys(PROBLEMS["float32, large blocks, heads of 256"]) == 64


def test_supports_names_what_the_kernels_decline():
    assert "float64" in supports(changed(query_dtype="float64", key_dtype="float64", value_dtype="float64"))
    assert "multiples of 8" in supports(changed(head_dim=20))
    assert "page_table" in supports(changed(page_size=64, max_pages=2**25 - 1))
