"""Biases in shared memory on a GPU: 16-bit results and gradients, compared with float32 and repeated."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag import fuse
from blockdiag.fusion.runtime import kernel_choice
from tests.fusion.resident_cases import CASES
from tests.gpu.test_block_diagonal_on_gpu import poison_free_memory

pytestmark = pytest.mark.gpu


def compiled(function):
    """Return a function of inputs and a cotangent that returns the result and the gradients of all inputs, by name."""

    @jax.jit
    def compute(inputs, cotangent):
        output, pull_back = jax.vjp(lambda given: function(**given), inputs)
        return {"output": output} | pull_back(cotangent.astype(output.dtype))[0]

    def run(inputs, cotangent):
        poison_free_memory()
        return {name: np.asarray(x, np.float32) for name, x in compute(inputs, cotangent).items()}

    return run


def results(function, inputs, cotangent):
    """Return the result and the gradients of all inputs, by name."""
    return compiled(function)(inputs, cotangent)


def exact_results(function, inputs, cotangent):
    """Return the result and the gradients of all inputs in float32, by name."""
    with jax.default_matmul_precision("highest"):
        return results(function, {x: array.astype(jnp.float32) for x, array in inputs.items()}, cotangent)


def allowed(rough, exact, dtype):
    """Return the allowed error: twice the plain 16-bit error plus two units in the last place of the maximum."""
    unit = 2.0 ** (np.ceil(np.log2(np.abs(exact).max())) - (8 if dtype == "bfloat16" else 11))
    return 2 * np.abs(rough - exact).max() + 2 * unit


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.stays])
def test_resident_kernels_are_as_accurate_as_the_function(name):
    case = CASES[name]
    kernel = kernel_choice.kernels(case.region())[0]
    assert kernel.on_hopper is not None
    fused = fuse(case.function, implementation="triton")
    inputs = case.inputs()
    cotangent = jnp.asarray(np.random.default_rng(1).normal(size=jax.eval_shape(case.function, **inputs).shape))
    run = compiled(fused)
    found, again = (run(inputs, cotangent) for _ in range(2))
    rough = results(case.function, inputs, cotangent)
    wide = exact_results(case.function, inputs, cotangent)
    for key, exact in wide.items():
        np.testing.assert_array_equal(found[key], again[key])
        actual, other = found[key], rough[key]
        if name.endswith("masked"):
            # The first row sees no key. Fused functions return 0 there, and plain functions do not.
            if key in ("mask", "pair"):
                continue
            exact, actual, other = (x[:, 1:] for x in (exact, actual, other))
        assert np.abs(actual - exact).max() <= allowed(other, exact, case.dtype), key
    if name.endswith("masked"):
        assert not found["output"][:, 0].any() and np.isfinite(found["output"]).all()


@pytest.mark.parametrize("name", ["many_rows", "many_wide_rows"])
def test_resident_gradients_without_a_bias_gradient_are_accurate(name):
    """A separate kernel computes these gradients row by row."""
    case = CASES[name]
    inputs = case.inputs()
    pair = inputs.pop("pair")
    cotangent = jnp.asarray(np.random.default_rng(1).normal(size=inputs["query"].shape))

    def attention(**given):
        return case.function(**given, pair=pair.astype(given["query"].dtype))

    fused = fuse(attention, implementation="triton")
    run = compiled(fused)
    found, again = (run(inputs, cotangent) for _ in range(2))
    rough, wide = results(attention, inputs, cotangent), exact_results(attention, inputs, cotangent)
    assert found.keys() == {"output", "query", "key", "value", "mask"}
    for key, exact in wide.items():
        np.testing.assert_array_equal(found[key], again[key])
        assert np.abs(found[key] - exact).max() <= allowed(rough[key], exact, case.dtype), key
