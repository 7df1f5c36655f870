"""Derivatives of fused functions: functions of scores that have their own, and second ones."""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag import NotFusible, explain, fuse

HAS_TRITON = importlib.util.find_spec("triton") is not None
NAMES = ("xla", pytest.param("triton", marks=pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")))
BOTH = pytest.mark.parametrize("implementation", NAMES)


def operands() -> list[jax.Array]:
    """Queries, keys and values [1, 24, 2, 16] of small integers, whose scores are often exactly 0."""
    generator = np.random.default_rng(0)
    return [jnp.asarray(generator.integers(-1, 2, (1, 24, 2, 16)), jnp.float32) for _ in range(3)]


def scores_of(query, key):
    return jnp.einsum("bqnh,bknh->bnqk", query, key)


def weighted(weights, value):
    return jnp.einsum("bnqk,bknh->bqnh", weights, value)


def attention(function, query, key, value):
    return weighted(jax.nn.softmax(function(scores_of(query, key)), axis=-1), value)


def linear_attention(function, query, key, value):
    return weighted(function(scores_of(query, key)) / key.shape[1], value)


def gradients(function):
    return jax.jit(jax.grad(lambda *inputs: jnp.sum(jnp.sin(function(*inputs))), (0, 1, 2)))


def assert_same_gradients(function, implementation, inputs=None, tolerance=5e-6):
    inputs = operands() if inputs is None else inputs
    found = gradients(fuse(function, implementation=implementation))(*inputs)
    for one, other in zip(found, gradients(function)(*inputs), strict=True):
        np.testing.assert_allclose(one, other, atol=tolerance * np.abs(other).max())


@jax.custom_vjp
def clipped(x):
    """Between -2 and 2, with gradients that pass."""
    return jnp.clip(x, -2.0, 2.0)


clipped.defvjp(lambda x: (jnp.clip(x, -2.0, 2.0), x), lambda x, cotangent: (cotangent * jnp.where(x > 0, 1.0, 0.5),))


@jax.custom_jvp
def stepped(x, slope):
    """Whole numbers, with the tangent of what is rounded."""
    return jnp.floor(x * slope + 0.5)


@stepped.defjvp
def _(given, tangents):
    return stepped(*given), given[0] * tangents[1] + given[1] * tangents[0]


def stepped_by_row(scores):
    return stepped(scores, (jnp.arange(24, dtype=scores.dtype)[:, None] / 32)[None, None])


def squared_relu(x):
    return jax.nn.relu(x) ** 2


SMOOTH = (jax.nn.silu, jax.nn.gelu, jax.nn.softplus)
KINKED = (jax.nn.relu, jax.nn.relu6, squared_relu, clipped, stepped_by_row)
FUNCTIONS = pytest.mark.parametrize("function", (*KINKED, *SMOOTH), ids=lambda function: function.__name__)


@BOTH
@FUNCTIONS
def test_functions_of_scores_keep_their_derivatives(function, implementation):
    assert np.any(scores_of(*operands()[:2]) == 0)
    assert_same_gradients(functools.partial(attention, function), implementation)


@BOTH
@pytest.mark.parametrize("function", (jax.nn.relu, squared_relu, clipped), ids=lambda function: function.__name__)
def test_weights_that_are_functions_of_scores(function, implementation):
    assert_same_gradients(functools.partial(linear_attention, function), implementation)


def test_half_a_derivative_would_be_seen():
    """Where JAX opens `relu`, the derivative at 0 is 1/2."""
    opened = gradients(functools.partial(attention, lambda x: jnp.maximum(x, 0.0)))(*operands())
    kept = gradients(functools.partial(attention, jax.nn.relu))(*operands())
    assert np.abs(opened[0] - kept[0]).max() > 0.01


@BOTH
def test_vmap_keeps_derivatives(implementation):
    query, key, value = operands()
    mapped = (jnp.stack([query, -key]), jnp.stack([key, query]), jnp.stack([value, value]))

    def function(call, *inputs):
        return jax.vmap(call)(*inputs)

    call = functools.partial(attention, clipped)
    found = gradients(functools.partial(function, fuse(call, implementation=implementation)))(*mapped)
    for one, other in zip(found, gradients(functools.partial(function, call))(*mapped), strict=True):
        np.testing.assert_allclose(one, other, atol=5e-6 * np.abs(other).max())


@jax.custom_vjp
def centred(x):
    """Without the mean along the last axis, as far as values go."""
    return x - x.mean(axis=-1, keepdims=True)


centred.defvjp(lambda x: (centred(x), None), lambda _, cotangent: (cotangent * 2,))


@jax.custom_vjp
def scaled(x, factor):
    return x * factor


scaled.defvjp(
    lambda x, factor: (x * factor, (x, factor)),
    lambda saved, cotangent: (cotangent * saved[1], (cotangent * saved[0]).sum()),
)


@pytest.mark.parametrize("function", (centred, lambda x: scaled(x, jnp.ones(()))), ids=("centred", "scaled"))
def test_derivatives_of_whole_rows_are_refused(function):
    with pytest.raises(NotFusible, match=r"`custom_vjp_call` has a derivative of its own .*test_fusion_deriv.*:\d+"):
        fuse(functools.partial(attention, function))(*operands())


def test_derivatives_of_biases_need_no_tile():
    """What has no scores is computed as it stands, whatever its derivative is."""
    bias = jnp.asarray(np.random.default_rng(1).normal(size=(1, 2, 24, 24)), jnp.float32)
    query, key, _ = operands()

    def biased(bias, key, value):
        return weighted(jax.nn.softmax(scores_of(query, key) + centred(bias), axis=-1), value)

    assert_same_gradients(biased, "xla", (bias, key, key))


@jax.custom_vjp
def own_softmax(x):
    return jax.nn.softmax(x, axis=-1)


own_softmax.defvjp(lambda x: (own_softmax(x), x), lambda x, cotangent: (cotangent + 0 * x,))


@jax.custom_vjp
def own_attention(query, key, value):
    return attention(jnp.tanh, query, key, value)


own_attention.defvjp(lambda *given: (own_attention(*given), given), lambda given, cotangent: (cotangent,) * 3)


def with_own_softmax(query, key, value):
    return weighted(own_softmax(scores_of(query, key)), value)


@pytest.mark.parametrize("function", (with_own_softmax, lambda *x: own_attention(*x)), ids=("softmax", "attention"))
def test_derivatives_of_whole_softmaxes_are_refused(function):
    with pytest.raises(NotFusible, match=r"`custom_vjp_call`.* has a derivative of its own") as failure:
        fuse(function)(*operands())
    assert "test_fusion_derivatives.py:" in str(failure.value)
    assert "derivative of its own" in explain(function)(*operands()).reason
    fused = fuse(function, fallback=True)
    for one, other in zip(gradients(fused)(*operands()), gradients(function)(*operands()), strict=True):
        np.testing.assert_array_equal(one, other)
