"""Launch plans of key convolution, compiled for architectures without their GPUs."""

import dataclasses
import re

import pytest

pytest.importorskip("triton")

from blockdiag.ops.key_convolution.problem import KeyConvolutionProblem, count_tiles
from blockdiag.triton_kernels.key_convolution.plans import KeyConvolutionLaunch, supports
from blockdiag.triton_kernels.launch.compile import compile_key
from blockdiag.triton_kernels.launch.plan import Target
from tests.triton_kernels.plans_support import configurations, report_of

KINDS = ("forward", "backward", "weights_gradient")


def problem_of(tokens=131072, length=65536, num_sequences=None, groups=1, **changes):
    tile_rows, num_tiles = count_tiles(tokens, length, num_sequences)
    base = KeyConvolutionProblem(
        tokens=tokens,
        key_heads=16,
        head_dim=128,
        size=3,
        groups=groups,
        dtype="bfloat16",
        weights_dtype="bfloat16",
        activation="silu",
        has_residual=True,
        sequence_length=length if num_sequences is None else None,
        tile_rows=tile_rows,
        num_tiles=num_tiles,
    )
    return dataclasses.replace(base, **changes)


PROBLEMS = {
    "size 3": problem_of(),
    "size 5, packed, weights float32": problem_of(num_sequences=4, size=5, weights_dtype="float32"),
    "size 8, float32, packed": problem_of(num_sequences=4, size=8, dtype="float32", weights_dtype="float32"),
    "one head of 64, fp16, short sequences": problem_of(length=20, key_heads=1, head_dim=64, dtype="float16"),
}


@pytest.mark.covers(
    lambda name, arch: configurations((KeyConvolutionLaunch(PROBLEMS[name], kind) for kind in KINDS), arch)
)
@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.versions] if name == "size 3" else []) for name in PROBLEMS]
)
def test_plan_fits_its_architecture(name, arch):
    problem = PROBLEMS[name]
    assert supports(problem) is None
    for kind in KINDS:
        report = report_of(KeyConvolutionLaunch(problem, kind).plan(Target.for_arch(arch)), arch)
        assert report.shared_bytes <= report.shared_limit
        assert report.local_accesses == {} and report.spill_bytes == 0, str(report)
        assert report.ptx["f64"] == 0 and report.ptx["atom"] == 0 and report.ptx["trap"] == 0


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_keys_are_loaded_and_stored_in_vectors(kind):
    """Each thread moves at least 4 bytes at a time (8 in the forward pass), never a single 16-bit element."""
    plan = KeyConvolutionLaunch(PROBLEMS["size 3"], kind).plan(Target.for_arch(90))
    ptx = report_of(plan, 90).kernel.asm["ptx"]
    accesses = re.findall(r"\b(?:ld|st)\.global\S*", ptx)
    assert accesses and not [access for access in accesses if access.endswith(("b16", "b8", "u16"))]
    if kind == "forward":
        assert sum("v2.b32" in access for access in accesses) >= 2 * 16


def test_kernel_is_shared_between_sizes_of_the_same_shape():
    target = Target.for_arch(90)
    for options in ({}, {"num_sequences": 7}):
        one = problem_of(**options)
        other = problem_of(tokens=262144, length=32768, **({"num_sequences": 9} if options else {}))
        mapped = dataclasses.replace(one, tokens=3 * one.tokens, groups=3, num_tiles=3 * one.num_tiles)
        for kind in KINDS:
            plans = [KeyConvolutionLaunch(problem, kind).plan(target) for problem in (one, other, mapped)]
            assert len({compile_key(plan, 90) for plan in plans}) == 1


def test_count_tiles_follows_the_mean_length():
    assert count_tiles(1000, 1000, None) == (128, 8)
    assert count_tiles(1000, 20, None) == (32, 50)
    assert count_tiles(30, 3, None) == (16, 10)
    rows, num_tiles = count_tiles(1000, 1000, 100)
    # The number of tiles suffices for any 100 sequences and is not much larger.
    assert rows == 16 and 100 + 900 // 16 <= num_tiles <= 160


def test_supports_names_what_the_kernels_decline():
    assert "float64" in supports(problem_of(dtype="float64"))
    assert "taps" in supports(problem_of(size=9))
    assert "split" in supports(problem_of(num_tiles=2**30))
