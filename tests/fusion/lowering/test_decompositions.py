"""Tests of operations that kernels decompose into other operations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from jax import lax

from blockdiag import fuse
from blockdiag.fusion.ir.tree import ELEMENTWISE
from blockdiag.fusion.lowering.decompositions import SPELLED

TOKENS, WIDTH = 35, 16
GENERATOR = np.random.default_rng(0)
LINE = np.concatenate([GENERATOR.normal(size=2000) * 3, GENERATOR.normal(size=500) / 100, [0, 1, -1, 0.5, 1.5, -2.5]])
WITHIN = np.concatenate([GENERATOR.uniform(-1, 1, 2000), GENERATOR.normal(size=500) / 100, [0, 0.999]])
# The inputs of each operation and the NumPy or SciPy function that it must match.
ONE = {
    "acos": (WITHIN, np.arccos), "acosh": (np.abs(LINE) + 1, np.arccosh), "asin": (WITHIN, np.arcsin),
    "asinh": (LINE, np.arcsinh), "atan": (LINE, np.arctan), "atanh": (WITHIN, np.arctanh), "cbrt": (LINE, np.cbrt),
    "expm1": (LINE, np.expm1), "log1p": (np.abs(LINE) - 0.9, np.log1p), "cosh": (LINE, np.cosh),
    "erfc": (LINE, scipy.special.erfc),
    "sinh": (LINE, np.sinh), "tan": (LINE, np.tan),
}  # fmt: skip


@pytest.mark.parametrize("name", ONE)
def test_unary_decompositions_match_float64(name):
    given, exact = ONE[name]
    given = np.asarray(given, np.float32)
    expected = exact(given.astype(np.float64))
    np.testing.assert_allclose(SPELLED[name](jnp.asarray(given)), expected, rtol=3e-6, atol=3e-7)


def test_binary_decompositions_match_float64():
    x = np.asarray(LINE, np.float32)
    y = np.asarray(GENERATOR.permutation(LINE), np.float32)
    found = SPELLED["atan2"](jnp.asarray(y), jnp.asarray(x))
    np.testing.assert_allclose(found, np.arctan2(y, x, dtype=np.float64), rtol=3e-6, atol=3e-7)
    exponents = np.where(np.arange(x.size) % 2, np.round(y), y)
    with np.errstate(divide="ignore", invalid="ignore"):
        expected = np.power(x.astype(np.float64), exponents)
    found = SPELLED["pow"](jnp.asarray(x), jnp.asarray(exponents))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    whole = np.asarray([3, 2, -1, 0, 5], np.int32)
    base = np.asarray([-2, -2, 4, 0, 0], np.float32)
    np.testing.assert_allclose(SPELLED["pow"](jnp.asarray(base), jnp.asarray(whole)), [-8, 4, 0.25, 1, 0], rtol=1e-6)


@pytest.mark.parametrize("method", lax.RoundingMethod)
def test_round_decomposition_matches_lax(method):
    given = jnp.asarray(np.concatenate([LINE, np.arange(-9, 9) / 2]), jnp.float32)
    np.testing.assert_array_equal(SPELLED["round"](given, rounding_method=method), lax.round(given, method))


def test_is_finite_decomposition_matches_numpy():
    given = jnp.asarray([0.0, np.inf, -np.inf, np.nan, 3e38])
    np.testing.assert_array_equal(SPELLED["is_finite"](given), np.isfinite(given))


def test_decompositions_are_elementwise():
    assert set(SPELLED) <= ELEMENTWISE


def size(x):
    return jnp.abs(x) + 0.1


BIASES = {
    "acos": lambda x: jnp.arccos(jnp.tanh(x)), "acosh": lambda x: jnp.arccosh(size(x) + 1),
    "asin": lambda x: jnp.arcsin(jnp.tanh(x)), "asinh": jnp.arcsinh, "atan": jnp.arctan,
    "expm1": jax.nn.elu, "log1p": jax.nn.softplus, "atan2": lambda x: jnp.arctan2(x, 1 - x),
    "atanh": lambda x: jnp.arctanh(0.5 * jnp.tanh(x)),
    "cbrt": lambda x: jnp.cbrt(size(x)), "cosh": jnp.cosh, "erfc": jax.scipy.special.erfc,
    "is_finite": lambda x: jnp.where(jnp.isfinite(1 / jnp.maximum(x, 0)), x, 0), "pow": lambda x: size(x) ** jnp.sin(x),
    "round": jnp.round, "sinh": jnp.sinh, "tan": lambda x: jnp.tan(jnp.tanh(x)),
    "power of 11": lambda x: (1.5 * jnp.tanh(x)) ** 11, "power of -9": lambda x: (size(x) + 1) ** -9,
}  # fmt: skip


@pytest.mark.parametrize("name", BIASES)
def test_decompositions_in_kernels_match_the_reference(name):
    def attention(query, key, value, slope):
        scores = jnp.einsum("bntd,bnsd->bnts", query, key) * WIDTH**-0.5
        scores += BIASES[name](slope[None, :, None, None] * scores + 0.05)
        return jnp.einsum("bnts,bnsd->bntd", jax.nn.softmax(scores, axis=-1), value)

    generator = np.random.default_rng(1)
    given = [jnp.asarray(generator.normal(size=(1, 2, TOKENS, WIDTH)), jnp.float32) for _ in range(3)]
    given.append(jnp.asarray([0.7, 1.1], jnp.float32))

    def gradients(function):
        output, pull = jax.vjp(function, *given)
        return [output, *pull(jnp.cos(jnp.arange(output.size, dtype=jnp.float32)).reshape(output.shape))]

    found = gradients(fuse(attention, implementation="triton"))
    for actual, expected in zip(found, gradients(attention), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=3e-5, atol=3e-5 * float(np.abs(expected).max()))
