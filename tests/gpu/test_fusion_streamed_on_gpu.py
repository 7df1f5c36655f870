"""Keys and values that stream through shared memory on a GPU: results and gradients, checked against float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag import fuse
from blockdiag.fusion.lowering import streamed_schedule
from blockdiag.fusion.runtime import kernel_choice
from tests.fusion.streamed_cases import CASES, attend
from tests.fusion.thresholds import lifted
from tests.gpu.test_block_diagonal_on_gpu import poison_free_memory
from tests.gpu.test_fusion_resident_on_gpu import allowed, compiled, exact_results, results

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def small_calls():
    with lifted(streamed_schedule):
        yield


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.streams])
def test_streamed_kernels_are_as_accurate_as_the_function(name):
    case = CASES[name]
    assert "fused_forward_streamed" in {kernel.source.name for kernel in kernel_choice.kernels(case.region())}
    fused = fuse(case.function, implementation="triton")
    inputs = case.inputs()
    whole = {x: array for x, array in inputs.items() if array.dtype.kind == "i"}
    inputs = {x: array for x, array in inputs.items() if x not in whole}

    def of(function):
        return lambda **given: function(**given, **whole)

    cotangent = jnp.asarray(np.random.default_rng(1).normal(size=jax.eval_shape(of(case.function), **inputs).shape))
    run = compiled(of(fused))
    found, again = (run(inputs, cotangent) for _ in range(2))
    rough = results(of(case.function), inputs, cotangent)
    wide = exact_results(of(case.function), inputs, cotangent)
    for key, exact in wide.items():
        np.testing.assert_array_equal(found[key], again[key])
        actual, other = found[key], rough[key]
        assert np.abs(actual - exact).max() <= allowed(other, exact, case.dtype), key


def test_fully_masked_rows_with_nan_keys_and_values_are_zero():
    def attention(query, key, value):
        row = jnp.arange(query.shape[1])
        unseen = (row[:, None] - row[None, :] < 640)[None, None]
        return attend(query, key, value, lambda scores: scores + jnp.where(unseen, -1e9, 0.0))

    inputs = CASES["far_away"].inputs()
    for name in ("key", "value"):
        inputs[name] = inputs[name].at[:, :64].set(jnp.nan)
    poison_free_memory()
    found = np.asarray(jax.jit(fuse(attention, implementation="triton"))(**inputs), np.float32)
    assert not found[:, :640].any() and np.isnan(found[:, 640:]).all()
