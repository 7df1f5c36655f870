"""Every launch plan of MoBA over a paged cache, compiled for architectures without their GPUs."""

import dataclasses

import pytest

from blockdiag.ops.moba_paged.problem import MoBAPagedProblem
from blockdiag.ops.paged.problem import PagedProblem
from blockdiag.triton_kernels.launch.plan import Target
from blockdiag.triton_kernels.moba_paged.plans import steps, supports, tile_keys
from tests.triton_kernels.plans_support import report_of

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
# Conversions to e4m3 need sm_89.
PAIRS = [(name, arch) for name in PROBLEMS for arch in (80, 90, 100) if "e4m3" not in name or arch > 80]


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("name", "arch"),
    [pytest.param(name, arch, marks=[pytest.mark.versions] if name == "bfloat16" else []) for name, arch in PAIRS],
)
def test_plan_fits_its_architecture(name, arch):
    problem = PROBLEMS[name]
    assert supports(problem) is None
    for launch in steps(problem):
        report = report_of(launch.plan(Target.for_arch(arch)), arch)
        assert report.shared_bytes <= 16384
        assert report.ptx["f64"] == 0 and report.ptx["trap"] == 0
        # Only the kernel in which parts arrive has an atomic instruction, and it has one.
        assert report.ptx["atom"] == (launch.kind == "blocks")
        assert not any(report.local_accesses.values()), str(report)


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
