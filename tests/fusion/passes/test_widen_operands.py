"""Tests of the pass that widens eight-bit operands of products of two dtypes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from blockdiag.fusion.frontend.trace import flat_jaxpr
from blockdiag.fusion.passes.widen_operands import with_wide_operands

_NUMBERS = (((1,), (0,)), ((), ()))


def program(one, other, **options):
    """Return the flat program of a product [5, 3] of arrays of two dtypes."""
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in (((5, 4), one), ((4, 3), other))]
    return flat_jaxpr(functools.partial(jax.lax.dot_general, dimension_numbers=_NUMBERS, **options), *arrays)[0]


@pytest.mark.parametrize(
    ("one", "other", "wide"),
    [
        ("bfloat16", "float8_e4m3fn", "bfloat16"),
        ("float8_e5m2", "float16", "float16"),
        ("float32", "float8_e5m2", "float32"),
        ("float8_e4m3fn", "float8_e5m2", "bfloat16"),
    ],
)
def test_eight_bit_operand_gets_the_dtype_of_the_other_one(one, other, wide):
    given = program(one, other, preferred_element_type=jnp.float32)
    found = with_wide_operands(given)
    product = found.jaxpr.eqns[-1]
    assert {x.aval.dtype for x in product.invars} == {jnp.dtype(wide)}
    assert found.out_avals == given.out_avals
    generator = np.random.default_rng(0)
    arrays = [jnp.asarray(generator.normal(size=x.shape), x.dtype) for x in given.in_avals]
    expected = np.asarray(arrays[0], np.float32) @ np.asarray(arrays[1], np.float32)
    np.testing.assert_allclose(core.jaxpr_as_fun(found)(*arrays)[0], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("one", "other"),
    [("float8_e4m3fn", "float8_e4m3fn"), ("bfloat16", "float32"), ("bfloat16", "bfloat16"), ("int8", "float8_e5m2")],
)
def test_other_products_stay(one, other):
    assert with_wide_operands(program(one, other, preferred_element_type=jnp.float32)) is None
