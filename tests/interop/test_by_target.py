"""`by_target`: functions with another implementation on some GPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.harness.programs import collect_specs
from blockdiag.fusion.runtime import triton as triton_fused
from blockdiag.interop import compile_target
from blockdiag.interop.by_target import by_target
from blockdiag.triton_kernels.launch.plan import Target
from tests.fusion.resident_cases import CASES

X = jnp.arange(3.0)


def is_hopper(target):
    return target.arch == 90


def sine(x):
    return [jnp.sin(x)]


def cosine(x):
    return [jnp.cos(x)]


def chosen(x):
    return by_target(is_hopper, sine, cosine, x)[0]


@pytest.mark.parametrize(("arch", "name"), [(80, "cosine"), (90, "sine"), (100, "cosine")])
def test_by_target_lowers_the_function_of_the_target(arch, name):
    with compile_target(arch):
        text = jax.jit(chosen).trace(X).lower(lowering_platforms=("cuda",)).as_text()
    assert [x for x in ("sine", "cosine") if f"stablehlo.{x}" in text] == [name]


def test_by_target_on_a_cpu_runs_the_default_function():
    np.testing.assert_array_equal(chosen(X), jnp.cos(X))
    np.testing.assert_array_equal(jax.jit(chosen)(X), jnp.cos(X))


def test_by_target_with_different_shapes_raises_type_error():
    with pytest.raises(TypeError, match="the same shapes and dtypes"):
        by_target(is_hopper, sine, lambda x: [x[:2]], X)


def test_by_target_under_jvp_or_vmap_raises_not_implemented_error():
    with pytest.raises(NotImplementedError, match="custom_vjp"):
        jax.jvp(chosen, (X,), (X,))
    with pytest.raises(NotImplementedError, match="custom_vmap"):
        jax.vmap(chosen)(X)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (Target.for_arch(90), ["fused_rows_and_pairs_resident", "fused_columns"]),
        (Target.for_arch(80), ["fused_rows", "fused_columns", "fused_pairs"]),
        (None, ["fused_rows", "fused_columns", "fused_pairs"]),
    ],
)
def test_collect_specs_returns_the_launches_of_the_target(target, expected):
    case = CASES["evoformer"]
    region = case.region()
    rows = jax.ShapeDtypeStruct(tuple(region.sizes[x] for x in (*region.batch, "q")), "float32")
    leaves = [jax.ShapeDtypeStruct(x.source.shape, x.source.dtype) for x in region.leaves]
    value = jax.ShapeDtypeStruct(region.value.shape, region.value.dtype)
    traced = jax.make_jaxpr(lambda *given: triton_fused.backward(region, *given))(leaves, value, value, rows, value)
    found = {}
    collect_specs(traced.jaxpr, found, target)
    assert [spec.name for spec in found] == expected
