"""Tests of kernels with eight-bit operands, compiled for architectures that need not be present."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

from blockdiag import fuse
from blockdiag.fusion.lowering.eight_bit import widened
from blockdiag.interop import compile_target
from blockdiag.triton_kernels.launch.plan import Target
from tests.fusion.codegen.test_plans import launches_of
from tests.fusion.eight_bit_cases import CASES
from tests.triton_kernels.plans_support import report_of

PRODUCTS = {89: r"mma\.sync\S*{0}\.{0}", 90: r"wgmma\.mma_async\S*{0}\.{0}", 100: "tcgen05.mma\\S*f8f6f4"}
PRODUCTS |= {120: PRODUCTS[89]}
PTX_NAMES = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}


WIDE_PRODUCTS = r"bf16\.bf16|kind::f16"
VALUES = ("eight_bit_values", "eight_bit_values_e5m2")
EIGHT_BIT_PRODUCTS = ("causal", "causal_e5m2", *VALUES)


def region_of(name, **sizes):
    return dataclasses.replace(CASES[name], **sizes).region()


def forward_ptx(region, arch):
    """Return the instructions of a region's forward kernel, which must fit the architecture."""
    report = report_of(launches_of(region)["fused_forward"].plan(Target.for_arch(arch)), arch)
    assert report.shared_bytes <= report.shared_limit and report.tensor_memory_columns <= 512
    assert not any(report.local_accesses.values()) and report.ptx["f64"] == 0
    return report.kernel.asm["ptx"]


@pytest.mark.covers(lambda name, width, arch: {(name in VALUES, width, arch)})
@pytest.mark.parametrize("arch", PRODUCTS)
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("name", EIGHT_BIT_PRODUCTS)
def test_kernels_multiply_eight_bits_where_the_architecture_does(name, width, arch):
    text = forward_ptx(region_of(name, sizes=(1, 256, 256, 2, 2, width, width)), arch)
    assert re.search(PRODUCTS[arch].format(PTX_NAMES[CASES[name].dtype]), text)
    # Values of 16 bits keep 16-bit products.
    assert bool(re.search(WIDE_PRODUCTS, text)) is (name not in VALUES)


@pytest.mark.covers(lambda name, width: {(name in VALUES, width)})
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("name", EIGHT_BIT_PRODUCTS)
def test_kernels_multiply_wide_operands_where_the_architecture_has_no_eight_bit_products(name, width):
    assert re.search(WIDE_PRODUCTS, forward_ptx(widened(region_of(name, sizes=(1, 256, 256, 2, 2, width, width))), 80))


@pytest.mark.parametrize("name", ["narrow", "grouped", "one_query", "scaled_tokens", "capped", "eight_bit_sigmoid"])
def test_kernels_of_awkward_sizes_compile(name):
    for arch in PRODUCTS:
        report_of(launches_of(region_of(name))["fused_forward"].plan(Target.for_arch(arch)), arch)


def test_sums_of_eight_bit_value_products_are_added_in_float32_on_hopper():
    launch = launches_of(region_of("eight_bit_values", sizes=(1, 256, 256, 2, 2, 128, 128)))["fused_forward"]

    def additions(text):
        source = dataclasses.replace(launch.source, text=text)
        report = report_of(dataclasses.replace(launch, source=source).plan(Target.for_arch(90)), 90)
        return len(re.findall(r"fma\.rn\.f32", report.kernel.asm["ptx"]))

    text = launch.source.text
    plain = re.sub(r", max_num_imprecise_acc=\d+", "", text)
    assert plain != text
    # A thread has 128 * 128 / 256 sums, which it scales and adds in one instruction.
    assert additions(text) >= additions(plain) + 64


@pytest.mark.parametrize(("arch", "dtype"), [(80, "bf16"), (89, "f8E4M3FN"), (90, "f8E4M3FN"), (100, "f8E4M3FN")])
def test_lowering_passes_eight_bit_arrays_to_kernels_where_the_architecture_multiplies_them(arch, dtype):
    case = CASES["eight_bit_values"]
    arrays = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in case.inputs().values()]

    def operands_of(function):
        with compile_target(arch):
            text = jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
        lines = [line for line in text.splitlines() if "triton_kernel_call" in line]
        return [set(re.findall(r"x(bf16|f8\w+)>", re.findall(r": \((.*)\) ->", line)[-1])) for line in lines]

    fused = fuse(case)
    assert operands_of(fused) == [{dtype}]
    forward, *backward = operands_of(jax.grad(lambda *x: fused(*x).astype(jnp.float32).sum(), (0, 1, 2)))
    assert forward == {dtype} and backward and all(x == {"bf16"} for x in backward)
