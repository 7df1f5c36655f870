"""Tests of `fuse` with arrays of eight-bit floats, in the interpreter and with XLA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag import explain, fuse
from blockdiag.fusion.program import trace
from blockdiag.fusion.runtime import triton as triton_fused
from tests.fusion.eight_bit_cases import CASES, attend, causal
from tests.fusion.fusion_support import alternated

SHORT = [name for name, case in CASES.items() if not case.streams]


@pytest.mark.parametrize(("name", "implementation"), alternated(SHORT))
def test_results_of_eight_bit_arrays_are_as_exact_as_written(name, implementation):
    case = CASES[name]
    inputs = case.inputs()
    fused = jax.jit(fuse(case, implementation=implementation))
    found = np.asarray(fused(*inputs.values()))
    exact = case.exact(inputs)
    assert np.abs(found.astype(np.float64) - exact).max() <= case.allowed_error(inputs, exact)
    np.testing.assert_array_equal(found, np.asarray(fused(*inputs.values())))


@pytest.mark.parametrize("name", ["causal", "eight_bit_values"])
def test_vmap_of_eight_bit_arrays_adds_a_batch_axis(name):
    case = CASES[name]
    several = [jnp.stack([case.inputs(seed)[x] for seed in (0, 1)]) for x in ("query", "key", "value")]
    fused = fuse(case, implementation="triton")
    found = jax.jit(jax.vmap(fused))(*several)
    expected = jnp.stack([fused(*(x[i] for x in several)) for i in (0, 1)])
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", ["causal", "eight_bit_values"])
def test_nan_of_a_masked_key_reaches_only_queries_that_see_it(name):
    case = CASES[name]
    inputs = case.inputs()
    expected = fuse(case, implementation="triton")(*inputs.values())
    inputs["key"] = inputs["key"].at[:, -1].set(jnp.nan)
    found = fuse(case, implementation="triton")(*inputs.values())
    # Only the last query sees the last key.
    np.testing.assert_array_equal(found[:, :-1], expected[:, :-1])
    assert np.isnan(found[:, -1]).all()


def test_small_weights_of_eight_bits_are_not_lost():
    # Even weights of 1,500 keys are below the smallest number of e4m3, 2^-9, so the function itself rounds them to 0.
    case = CASES["eight_bit_values_many_keys"]
    inputs = case.inputs() | {"query": jnp.zeros((1, 17, 1, 64), case.dtype)}
    found = fuse(case, implementation="triton")(*inputs.values())
    np.testing.assert_allclose(found, case.exact(inputs), atol=1e-6)


@pytest.mark.parametrize("implementation", ["xla", "triton"])
@pytest.mark.parametrize("name", ["causal", "eight_bit_values", "scaled_tokens"])
def test_gradients_are_those_of_widened_arrays(name, implementation):
    case = CASES[name]
    inputs = case.inputs()

    def loss(*arrays):
        return fuse(case, implementation=implementation)(*arrays).sum()

    def wide_loss(*arrays):
        return fuse(lambda *x: case.function(CASES["causal"].dtypes, *x), implementation=implementation)(*arrays).sum()

    places = tuple(range(len(inputs)))
    found = jax.jit(jax.grad(loss, places))(*inputs.values())
    wide = [x.astype(jnp.bfloat16) if x.dtype.itemsize == 1 else x for x in inputs.values()]
    for given, one, other in zip(inputs.values(), found, jax.jit(jax.grad(wide_loss, places))(*wide), strict=True):
        assert one.dtype == given.dtype
        one, other = (np.asarray(x, np.float32) for x in (one, other))
        # Results of eight-bit weights enter the gradients. Gradients are rounded to the dtype of their array.
        bound = 0.07 if given.dtype.itemsize == 1 or name == "eight_bit_values" else 2e-2
        np.testing.assert_allclose(one, other, rtol=bound, atol=bound * np.abs(other).max())


def test_weights_keep_their_dtype_where_values_have_eight_bits():
    assert CASES["two_dtypes"].region().value.dtype == jnp.bfloat16
    assert CASES["eight_bit_values"].region().value.dtype == jnp.float8_e4m3fn


def test_other_eight_bit_dtypes_are_declined_with_a_remedy():
    case = CASES["causal"]
    query, key, value = (x.astype(jnp.float8_e4m3fnuz) for x in case.inputs().values())
    with pytest.raises(NotImplementedError, match="float8_e4m3fn, float8_e5m2 or int8, got float8_e4m3fnuz; cast them"):
        fuse(case, implementation="triton")(query, key, value)
    assert np.isfinite(np.asarray(fuse(case)(query, key, value))).all()


def test_operands_of_two_eight_bit_dtypes_are_widened():
    inputs = list(CASES["causal"].inputs().values())
    inputs[0] = inputs[0].astype(jnp.float8_e5m2)

    def mixed(query, key, value):
        numbers = (((3,), (3,)), ((0, 2), (0, 2)))
        scores = jax.lax.dot_general(query, key, numbers, preferred_element_type=jnp.float32)
        return attend(scores, value, CASES["causal"].dtypes)

    ((region,),) = trace(mixed, tuple(inputs), {}).regions.values()
    assert {leaf.source.dtype for leaf in region.leaves} == {jnp.dtype(jnp.bfloat16)}
    assert triton_fused.supports(region) is None
    found, expected = fuse(mixed, implementation="triton")(*inputs), mixed(*inputs)
    np.testing.assert_allclose(found, expected, atol=2e-2)


def test_eight_bit_scores_and_results_are_computed_in_float32():
    def attention(query, key, value):
        weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", query, key), axis=-1)
        return jnp.einsum("bnts,bsnh->btnh", weights, value)

    inputs = list(CASES["causal_e5m2"].inputs().values())
    found = fuse(attention, implementation="triton")(*inputs)
    wide = fuse(attention, implementation="triton")(*(x.astype(jnp.float32) for x in inputs))
    assert found.dtype == jnp.float8_e5m2
    np.testing.assert_allclose(np.asarray(found, np.float32), wide, rtol=0.13, atol=0.13)


def test_explain_says_which_products_have_eight_bits():
    case = CASES["causal"]
    found = explain(case)(*case.inputs().values())
    assert found.regions[0].eight_bit == ("query x key: float8_e4m3fn",)
    assert "eight-bit products: query x key: float8_e4m3fn" in str(found)
    case = CASES["eight_bit_values"]
    found = explain(case)(*case.inputs().values())
    assert found.regions[0].eight_bit == ("query x key: float8_e4m3fn", "weights x value: float8_e4m3fn")
    wide = [x.astype(jnp.bfloat16) for x in case.inputs().values()]
    assert "eight-bit" not in str(explain(lambda *x: causal(CASES["causal"].dtypes, *x))(*wide))
