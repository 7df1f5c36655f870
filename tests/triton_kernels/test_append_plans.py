"""The launch plan of appending to a paged cache, compiled for architectures without their GPUs."""

import dataclasses
import re

import numpy as np
import pytest

pytest.importorskip("triton")

from blockdiag.common.rotary_problem import RotaryProblem
from blockdiag.interop.interpreter.launch import interpret
from blockdiag.ops.append.problem import AppendProblem
from blockdiag.triton_kernels.append.plans import AppendLaunch, supports
from blockdiag.triton_kernels.launch.compile import compile_key
from blockdiag.triton_kernels.launch.plan import Target
from tests.ops.append_support import bits, numpy_dtype
from tests.triton_kernels.plans_support import report_of

ROTARY = RotaryProblem(
    interleaved=False, query=False, key=True, value=False, table_rows=4096, table_dtype="float32", positions="sequence"
)


def problem_of(**changes):
    base = AppendProblem(
        tokens=32,
        batch=32,
        query_tokens=1,
        key_heads=8,
        head_dim=128,
        value_dim=128,
        dtype="bfloat16",
        key_dtype="bfloat16",
        value_dtype="bfloat16",
        num_pages=8192,
        page_size=16,
        max_pages=512,
    )
    return dataclasses.replace(base, **changes)


PROBLEMS = {
    "decode": problem_of(),
    "decode, rotary, centroids, e5m2": problem_of(
        rotary=ROTARY, block_size=128, max_blocks=64, key_dtype="float8_e5m2", value_dtype="float8_e5m2",
        key_scale="head", value_scale="head",
    ),
    "prefill, packed, rotary, centroids, e4m3": problem_of(
        tokens=8192, query_tokens=None, has_query_lengths=True, rotary=dataclasses.replace(ROTARY, interleaved=True),
        block_size=96, max_blocks=64, key_dtype="float8_e4m3fn", value_dtype="float8_e4m3fn", key_scale="token",
        value_scale="token",
    ),
    "prefill, rotary, centroids, int8": problem_of(
        tokens=8192, query_tokens=256, rotary=ROTARY, block_size=96, max_blocks=64, key_dtype="int8",
        value_dtype="int8", key_scale="token", value_scale="token",
    ),
    "latent, e4m3, computed scales": problem_of(
        key_heads=1, head_dim=576, has_values=False, value_dim=0, key_dtype="float8_e4m3fn",
        value_dtype="float8_e4m3fn", key_scale="token",
    ),
    "odd sizes, float16, contiguous": problem_of(
        tokens=4096, query_tokens=128, dtype="float16", key_dtype="float16", value_dtype="float8_e4m3fn", head_dim=71,
        value_dim=576, page_size=1000, max_pages=1, num_pages=32, has_page_table=False,
    ),
}  # fmt: skip


@pytest.mark.every_case
@pytest.mark.parametrize(
    "name, arch",
    [
        pytest.param("decode", 80, marks=pytest.mark.versions),
        pytest.param("decode", 90, marks=pytest.mark.versions),
        pytest.param("decode", 100, marks=pytest.mark.versions),
        ("decode, rotary, centroids, e5m2", 80),
        ("decode, rotary, centroids, e5m2", 100),
        ("prefill, packed, rotary, centroids, e4m3", 90),
        ("prefill, rotary, centroids, int8", 80),
        ("prefill, rotary, centroids, int8", 90),
        ("prefill, rotary, centroids, int8", 100),
        ("latent, e4m3, computed scales", 90),
        ("latent, e4m3, computed scales", 100),
        ("odd sizes, float16, contiguous", 100),
    ],
)
def test_plan_fits_its_architecture(name, arch):
    problem = PROBLEMS[name]
    assert supports(problem) is None
    report = report_of(AppendLaunch(problem).plan(Target.for_arch(arch)), arch)
    assert report.spill_bytes == 0 and report.local_accesses == {}, str(report)
    assert report.ptx["f64"] == 0 and report.ptx["atom"] == 0 and report.ptx["trap"] == 0


@pytest.mark.parametrize("name", ["prefill, packed, rotary, centroids, e4m3", "odd sizes, float16, contiguous"])
def test_plan_without_the_dtype_on_the_architecture_raises_not_implemented_error(name):
    with pytest.raises(NotImplementedError, match=r"needs compute capability 8\.9 or later, got 8\.0; use a cache of"):
        AppendLaunch(PROBLEMS[name]).plan(Target.for_arch(80))


def test_rows_are_moved_in_vectors():
    ptx = report_of(AppendLaunch(problem_of(tokens=8192, query_tokens=256)).plan(Target.for_arch(90)), 90).kernel.asm[
        "ptx"
    ]
    accesses = re.findall(r"\b(?:ld|st)\.global\S*", ptx)
    assert sum("v4.b32" in access for access in accesses) >= 8
    assert not [access for access in accesses if access.endswith(("b16", "b8", "u16"))]


def test_kernel_is_shared_between_sizes_of_the_same_heads():
    target = Target.for_arch(90)
    for one in (PROBLEMS["decode"], PROBLEMS["decode, rotary, centroids, e5m2"]):
        other = dataclasses.replace(
            one, tokens=48, batch=16, query_tokens=3, num_pages=100, max_pages=7, max_blocks=one.max_blocks // 2
        )
        assert compile_key(AppendLaunch(one).plan(target), 90) == compile_key(AppendLaunch(other).plan(target), 90)


def test_supports_names_what_the_kernel_declines():
    assert "float64" in supports(problem_of(dtype="float64", key_dtype="float64", value_dtype="float64"))
    assert "1024" in supports(problem_of(value_dim=1025))
    assert "tables" in supports(problem_of(rotary=dataclasses.replace(ROTARY, table_dtype="float64")))
    assert "split the batch" in supports(problem_of(max_pages=2**28))


@pytest.mark.parametrize("dtype, arch", [("float8_e4m3fn", 89), ("float8_e5m2", 80), ("float8_e5m2", 89)])
def test_older_architectures_round_float8_to_nearest_even(dtype, arch):
    """Plans of older architectures round by arithmetic. Newer architectures have an instruction for it."""
    generator = np.random.default_rng(0)
    problem = problem_of(
        tokens=1, batch=1, key_heads=4, head_dim=1024, value_dim=1, dtype="float32", key_dtype=dtype,
        value_dtype="float32", num_pages=1, page_size=1, max_pages=1, has_page_table=False,
    )  # fmt: skip
    largest = float(np.finfo(np.float32).max)
    numbers = np.arange(256, dtype=np.uint8).view(numpy_dtype(dtype)).astype(np.float32)
    numbers = np.sort(numbers[np.isfinite(numbers)])
    between = (numbers[1:] + numbers[:-1]) / 2
    key = [numbers, between, *(np.nextafter(between, np.float32(to)) for to in (-np.inf, np.inf))]
    key = np.concatenate([*key, [largest, -largest, 1e-30, -0.0, np.inf]]).astype(np.float32)
    random = generator.normal(size=4096 - key.size) * np.exp(generator.uniform(-14, 12, 4096 - key.size))
    key = np.concatenate([key, random.astype(np.float32)])
    plan = AppendLaunch(problem).plan(Target.for_arch(arch))
    assert plan.arguments["KEY"].value.grid is not None
    pages, _ = interpret(
        AppendLaunch(problem), key.reshape(1, 4, 1024), np.zeros((1, 4, 1), np.float32), np.ones(1, np.int32),
        np.zeros((1, 1, 4, 1024), numpy_dtype(dtype)), np.zeros((1, 1, 4, 1), np.float32),
        target=Target.for_arch(arch),
    )  # fmt: skip
    exact = np.clip(key, numbers[0], numbers[-1]).astype(numpy_dtype(dtype))
    np.testing.assert_array_equal(bits(pages.reshape(-1)), bits(exact))
