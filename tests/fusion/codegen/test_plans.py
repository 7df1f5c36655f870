"""Tests of generated kernels, compiled for architectures that need not be present."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from blockdiag.fusion.frontend.trace import flat_jaxpr
from blockdiag.fusion.gallery import VARIANTS, Sizes
from blockdiag.fusion.ir.layout import shape_of
from blockdiag.fusion.ir.tree import Region
from blockdiag.fusion.regions.match import find_regions
from blockdiag.fusion.runtime import arrange, kernel_choice
from blockdiag.fusion.runtime.launches import FusedLaunch
from blockdiag.triton_kernels.launch.plan import Target, TensorSpec
from tests.triton_kernels.plans_support import report_of

SIZES = Sizes(batch=2, rows=8, query_tokens=256, key_tokens=256, head_dim=64, value_dim=64, dtype="bfloat16")
MATRIX_UNITS = {80: "mma.sync", 90: "wgmma", 100: "tcgen05.mma"}


@functools.cache
def launches(name: str, size: int = 64) -> dict[str, FusedLaunch]:
    """Return the forward and backward kernels of a variant with a head dimension, by name."""
    variant = VARIANTS[name]
    inputs = variant.make_inputs(jax.random.key(0), replace(SIZES, head_dim=size, value_dim=size))
    flat, _ = flat_jaxpr(lambda given: variant.function(**given), inputs)
    ((region,),) = find_regions(flat.jaxpr).values()
    return launches_of(region)


def launches_of(region: Region) -> dict[str, FusedLaunch]:
    """Return the forward and backward kernels of a region, by name."""
    inner, change = arrange.arranged(region)
    leaves = [jax.ShapeDtypeStruct(x.source.shape, x.source.dtype) for x in inner.leaves]
    found: dict[str, FusedLaunch] = {}

    def trace(leaves, value):
        arrays = arrange.arrays_by_name(change, leaves, value)
        sizes = inner.sizes
        rows_shape = tuple(sizes[label] for label in (*inner.batch, "q"))
        arrays |= {name: jnp.zeros(rows_shape) for name in ("log_sum", "delta")}
        arrays |= {"cotangent": jnp.zeros(shape_of(inner.out_dims, sizes), value.dtype)}
        for kernel in (kernel_choice.forward_kernel(inner, arrays), *kernel_choice.backward_kernels(inner, arrays)):
            specs = [TensorSpec(x.shape, x.dtype.name) for x in kernel.given(arrays)]
            found[kernel.source.name] = kernel.launch(specs)

    # Lists of tiles are made while tracing.
    jax.eval_shape(trace, leaves, jax.ShapeDtypeStruct(inner.value.shape, inner.value.dtype))
    return found


KERNELS = {
    "document": ("forward", "rows", "columns"),
    "evoformer_row": ("forward", "rows", "columns", "pairs"),
    "t5_relative_bias": ("forward", "rows", "columns", "diagonals"),
}


@pytest.mark.parametrize("name", KERNELS)
def test_variant_has_the_kernels_that_its_gradients_need(name):
    assert list(launches(name)) == [f"fused_{kind}" for kind in KERNELS[name]]


@pytest.mark.covers(lambda name, kind, size, arch: {(name, size, arch), (kind, size, arch)})
@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize(
    ("name", "kind", "size"),
    [
        pytest.param(name, kind, size, marks=[pytest.mark.versions] if (name, size) == ("document", 64) else [])
        for size, names in ((64, KERNELS), (128, ["document"]), (256, ["document"]))
        for name in names
        for kind in KERNELS[name]
    ],
)
def test_kernel_fits_its_architecture(name, kind, size, arch):
    launch = launches(name, size)[f"fused_{kind}"]
    report = report_of(launch.plan(Target.for_arch(arch)), arch)
    assert report.shared_bytes <= report.shared_limit and report.tensor_memory_columns <= 512
    if arch > 80 or size <= 128:
        # Ampere also keeps the operands of products in registers, so heads of 256 may spill.
        assert not any(depth > 0 and count for depth, count in report.local_accesses.items()), str(report)
    assert report.ptx["f64"] == 0 and report.ptx["trap"] == 0 and report.ptx["atom"] == 0
    assert report.ptx[MATRIX_UNITS[arch]] > 0, str(report)


def test_launches_of_equal_sources_are_equal():
    one, other = launches.__wrapped__("document"), launches.__wrapped__("document")
    assert one == other and hash(one["fused_forward"]) == hash(other["fused_forward"])
