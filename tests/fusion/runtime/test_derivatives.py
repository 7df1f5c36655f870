"""Tests of derivatives of fused functions: custom derivatives of score functions, and higher derivatives."""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag import NotFusible, explain, fuse

HAS_TRITON = importlib.util.find_spec("triton") is not None
NEEDS_TRITON = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
NAMES = ("xla", pytest.param("triton", marks=NEEDS_TRITON))
BOTH = pytest.mark.parametrize("implementation", NAMES)


def operands() -> list[jax.Array]:
    """Return queries, keys and values [1, 24, 2, 16] of small integers, whose scores are often exactly 0."""
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
    """Clip to [-2, 2], with a custom gradient that is nowhere 0."""
    return jnp.clip(x, -2.0, 2.0)


clipped.defvjp(lambda x: (jnp.clip(x, -2.0, 2.0), x), lambda x, cotangent: (cotangent * jnp.where(x > 0, 1.0, 0.5),))


@jax.custom_jvp
def stepped(x, slope):
    """Round to whole numbers, with the tangent of the value before rounding."""
    return jnp.floor(x * slope + 0.5)


@stepped.defjvp
def _(given, tangents):
    return stepped(*given), given[0] * tangents[1] + given[1] * tangents[0]


def stepped_by_row(scores):
    return stepped(scores, (jnp.arange(24, dtype=scores.dtype)[:, None] / 32)[None, None])


def squared_relu(x):
    return jax.nn.relu(x) ** 2


def smooth(x):
    """Combine smooth functions, of which `softplus` has a custom derivative that calls the function itself."""
    return jax.nn.silu(x) - jax.nn.gelu(x) + jax.nn.softplus(x)


FUNCTIONS = pytest.mark.parametrize(
    "function",
    (jax.nn.relu, jax.nn.relu6, squared_relu, clipped, stepped_by_row, smooth),
    ids=lambda function: function.__name__,
)


@BOTH
@FUNCTIONS
def test_functions_of_scores_keep_their_derivatives(function, implementation):
    assert np.any(scores_of(*operands()[:2]) == 0)
    assert_same_gradients(functools.partial(attention, function), implementation)


@BOTH
@pytest.mark.parametrize("function", (jax.nn.relu, squared_relu, clipped), ids=lambda function: function.__name__)
def test_weight_functions_keep_their_custom_derivatives(function, implementation):
    assert_same_gradients(functools.partial(linear_attention, function), implementation)


def test_relu_without_its_custom_derivative_has_another_gradient():
    """Without the custom derivative of `relu`, the derivative at 0 is 1/2."""
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
    """Subtract the mean along the last axis, with a custom gradient that does not match."""
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
def test_custom_derivatives_of_whole_rows_raise_not_fusible(function):
    with pytest.raises(NotFusible, match=r"`custom_vjp_call` has a derivative of its own .*test_deriv.*:\d+"):
        fuse(functools.partial(attention, function))(*operands())


def test_custom_derivatives_of_biases_are_kept():
    """A value that does not depend on scores is computed as written, whatever its derivative is."""
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


@pytest.mark.parametrize(
    ("function", "reason"),
    ((with_own_softmax, "a derivative of its own"), (lambda *x: own_attention(*x), "a custom derivative")),
    ids=("softmax", "attention"),
)
def test_custom_derivatives_of_whole_softmaxes_raise_not_fusible(function, reason):
    with pytest.raises(NotFusible, match=rf"`custom_vjp_call`.* has {reason}") as failure:
        fuse(function)(*operands())
    assert "test_derivatives.py:" in str(failure.value)
    assert reason in explain(function)(*operands()).reason
    fused = fuse(function, fallback=True)
    for one, other in zip(gradients(fused)(*operands()), gradients(function)(*operands()), strict=True):
        np.testing.assert_array_equal(one, other)


# --- second derivatives -------------------------------------------------------------------------------------------


def with_sink(query, key, value, bias, sink):
    """Return causal attention with a bias and a logit without a value."""
    scores = scores_of(query, key) * query.shape[-1] ** -0.5 + jnp.tanh(bias)[None]
    scores = jnp.where(jnp.tri(scores.shape[-1], dtype=bool)[None, None], scores, -jnp.inf)
    logits = jnp.broadcast_to(sink[None, :, None, None], (*scores.shape[:3], 1))
    return weighted(jax.nn.softmax(jnp.concatenate([scores, logits], axis=-1), axis=-1)[..., :-1], value)


def inputs_with_sink() -> list[jax.Array]:
    generator = np.random.default_rng(3)
    shapes = [(1, 24, 2, 16)] * 3 + [(2, 24, 24), (2,)]
    return [jnp.asarray(generator.normal(size=shape), jnp.float32) for shape in shapes]


def penalty(function, places, *inputs):
    """Return the sum of squares of the gradients of the inputs at `places`."""
    grads = jax.grad(lambda *x: jnp.sum(jnp.sin(function(*x))), places)(*inputs)
    return sum(jnp.sum(grad**2) for grad in grads)


@pytest.mark.parametrize(
    ("implementation", "places"),
    [(None, (0, 1, 2, 3, 4)), ("xla", (0,)), pytest.param("triton", (0, 1, 2, 3, 4), marks=NEEDS_TRITON)],
)
def test_second_derivatives_match_the_reference(implementation, places):
    """Second derivatives cover every input, including those for which no first gradient is taken."""
    inputs = inputs_with_sink()
    fused = fuse(with_sink, implementation=implementation)
    found, expected = (
        jax.jit(jax.grad(functools.partial(penalty, function, places), (0, 1, 2, 3, 4)))(*inputs)
        for function in (fused, with_sink)
    )
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * np.abs(other).max())


def test_third_derivatives_under_vmap_match_the_reference():
    query, key, value, bias, sink = inputs_with_sink()

    def third(function):
        def along(x, query):
            return jnp.sum(jnp.sin(function(query[None] * x, key, value, bias, sink)))

        nested = jax.grad(jax.grad(jax.grad(along)))
        return jax.jit(jax.vmap(nested, (None, 0)))(jnp.ones(()), jnp.concatenate([query, key]))

    expected = third(with_sink)
    np.testing.assert_allclose(third(fuse(with_sink)), expected, atol=1e-4 * np.abs(expected).max())


def test_second_derivatives_with_masked_rows_and_dropout_match_the_reference():
    """Second derivatives are finite and use the dropout mask of the forward pass.

    Outputs are linear in values, so identity values reveal the dropped weights.
    """
    query, key, value, *_ = inputs_with_sink()

    def function(query, value, rng):
        scores = scores_of(query, key)
        scores = jnp.where((jnp.arange(24) % 3 == 0)[None, None, :, None], -jnp.inf, scores)
        weights = jax.nn.softmax(scores, axis=-1)
        return weighted(jnp.where(jax.random.bernoulli(rng, 0.7, weights.shape), weights, 0.0), value)

    fused, rng = jax.jit(fuse(function)), jax.random.key(0)
    weights = fused(query, jnp.broadcast_to(jnp.eye(24)[None, :, None], (1, 24, 2, 24)), rng).transpose(0, 2, 1, 3)

    def gradient_size(value):
        return jnp.sum(jax.grad(lambda value: jnp.sum(jnp.sin(fused(query, value, rng))))(value) ** 2)

    def expected_size(value):
        return jnp.sum(jnp.einsum("bnqk,bqnh->bknh", weights, jnp.cos(weighted(weights, value))) ** 2)

    found, expected = jax.jit(jax.grad(gradient_size))(value), jax.jit(jax.grad(expected_size))(value)
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())
    of_query = jax.grad(lambda x: jnp.sum(jax.grad(lambda y: jnp.sum(fused(y, value, rng)))(x) ** 2))(query)
    assert np.isfinite(of_query).all() and np.any(of_query != 0)


@pytest.mark.parametrize("implementation", (None, *NAMES))
def test_forward_mode_raises_type_error(implementation):
    inputs = inputs_with_sink()
    fused = fuse(with_sink, implementation=implementation)
    with pytest.raises(TypeError, match="does not support forward-mode differentiation"):
        jax.jvp(lambda query: fused(query, *inputs[1:]), inputs[:1], inputs[:1])
    with pytest.raises(TypeError, match="does not support forward-mode differentiation"):
        jax.hessian(lambda x: jnp.sum(fused(inputs[0] * x, *inputs[1:])))(jnp.ones(()))
