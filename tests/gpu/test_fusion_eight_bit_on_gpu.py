"""Fused attention with eight-bit queries, keys and values on a GPU, checked against float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag import fuse
from blockdiag.fusion.lowering import streamed_schedule
from blockdiag.fusion.runtime import kernel_choice
from tests.fusion.eight_bit_cases import CASES, EightBit, causal
from tests.fusion.thresholds import lifted
from tests.gpu.test_block_diagonal_on_gpu import poison_free_memory

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def small_calls():
    with lifted(streamed_schedule):
        yield


def assert_as_exact_as_written(case: EightBit) -> None:
    """Assert that two runs give the same bits, and results that are as exact as those of the function itself."""
    inputs = case.inputs()
    run = jax.jit(fuse(case, implementation="triton"))
    poison_free_memory()
    found, again = (np.asarray(run(*inputs.values())) for _ in range(2))
    np.testing.assert_array_equal(found, again)
    exact = case.exact(inputs)
    # XLA's CPU computes the function as written, because its GPU compiler lacks some eight-bit products.
    with jax.default_device(jax.devices("cpu")[0]):
        allowed = case.allowed_error(case.inputs(), exact)
    assert np.abs(found.astype(np.float64) - exact).max() <= allowed


@pytest.mark.parametrize("name", CASES)
def test_results_of_eight_bit_arrays_are_as_exact_as_written(name):
    assert_as_exact_as_written(CASES[name])


@pytest.mark.parametrize("name", ["causal", "causal_e5m2", "eight_bit_values"])
def test_xla_takes_eight_bit_arrays(name):
    case = CASES[name]
    inputs = case.inputs()
    found = jax.jit(fuse(case, implementation="xla"))(*inputs.values())
    np.testing.assert_allclose(np.asarray(found, np.float32), case.exact(inputs), atol=2e-2)


WIDTHS = {"long_causal": (64, 96, 128, 192, 256), "long_values": (64, 128)}


@pytest.mark.parametrize(("name", "width"), [(name, x) for name, widths in WIDTHS.items() for x in widths])
def test_streamed_kernel_of_many_keys_is_as_exact_as_written(name, width):
    columns = 128 if width == 192 else width
    case = EightBit(causal, dtypes=CASES[name].dtypes, sizes=(1, 2048, 4096, 4, 4, width, columns))
    assert "fused_forward_streamed" in {kernel.source.name for kernel in kernel_choice.kernels(case.region())}
    assert_as_exact_as_written(case)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_sums_of_many_eight_bit_values_are_exact(dtype):
    # All products have one sign, so the sums grow with the number of keys. An accumulator of 14 bits would lose most.
    name = "eight_bit_values_many_keys"
    case = dataclasses.replace(CASES[name], sizes=(1, 128, 16384, 2, 2, 128, 128), dtype=dtype)
    case = dataclasses.replace(case, dtypes=dataclasses.replace(case.dtypes, weights=jnp.dtype(dtype)))
    inputs = case.inputs()
    inputs["query"] = jnp.zeros_like(inputs["query"])
    inputs["value"] = jnp.abs(inputs["value"])
    found = jax.jit(fuse(case, implementation="triton"))(*inputs.values())
    np.testing.assert_allclose(found, case.exact(inputs), rtol=2e-3)


@pytest.mark.parametrize("name", ["causal", "long_causal", "eight_bit_values"])
def test_nan_of_a_masked_key_reaches_only_queries_that_see_it(name):
    case = CASES[name]
    inputs = case.inputs()
    run = jax.jit(fuse(case, implementation="triton"))
    expected = run(*inputs.values())
    inputs["key"] = inputs["key"].at[:, -1].set(jnp.nan)
    found = run(*inputs.values())
    np.testing.assert_array_equal(found[:, :-1], expected[:, :-1])
    assert np.isnan(np.asarray(found[:, -1], np.float32)).all()


@pytest.mark.parametrize("name", ["causal", "long_causal", "eight_bit_values", "scaled_tokens"])
def test_gradients_are_close_to_those_of_float32_arrays(name):
    case = CASES[name]
    inputs = case.inputs()
    places = tuple(range(len(inputs)))
    fused = fuse(case, implementation="triton")
    found = jax.jit(jax.grad(lambda *x: fused(*x).sum(), places))(*inputs.values())

    def exact(*arrays):
        return case.function(CASES["float32_values"].dtypes, *arrays).sum()

    wide = jax.grad(exact, places)(*(x.astype(jnp.float32) for x in inputs.values()))
    for given, one, other in zip(inputs.values(), found, wide, strict=True):
        assert one.dtype == given.dtype
        one, other = (np.asarray(x, np.float32) for x in (one, other))
        np.testing.assert_allclose(one, other, rtol=0.07, atol=0.07 * np.abs(other).max())
