"""Torch functions as JAX functions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from blockdiag.interop import wrap_torch


def test_wrap_torch_matches_torch_under_jit():
    function = wrap_torch(lambda x, w, *, bias: {"y": torch.tanh(x @ w) + bias, "rows": x.shape[0] * torch.ones(1)})
    x, w = jnp.arange(6.0).reshape(2, 3) / 6, jnp.ones((3, 4)) / 3
    for call in (function, jax.jit(function, static_argnames="bias")):
        result = call(x, w, bias=1)
        np.testing.assert_allclose(result["y"], np.tanh(np.asarray(x @ w)) + 1, rtol=1e-6)
        assert result["rows"].tolist() == [2]


def test_wrap_torch_gradients_match_the_reference():
    function = wrap_torch(lambda x, index: (x.exp()[index.long()], index))
    index = jnp.array([0, 2], jnp.int32)

    def loss(x):
        picked, same = function(x, index)
        assert same.dtype == jnp.int32
        return picked.sum()

    x = jnp.arange(3.0)
    for gradient in (jax.grad(loss)(x), jax.jit(jax.grad(loss))(x)):
        np.testing.assert_allclose(gradient, [1, 0, np.exp(2)], rtol=1e-6)


def test_wrap_torch_complex_gradients_match_jax():
    z = jnp.array([1 + 2j, -0.5 + 1j], jnp.complex64)

    def in_jax(z):
        return jnp.abs(jnp.sum(z * z * jnp.conj(z)))

    function = wrap_torch(lambda z: torch.abs(torch.sum(z * z * z.conj())))
    np.testing.assert_allclose(jax.grad(function)(z), jax.grad(in_jax)(z), rtol=1e-5)


def test_wrap_torch_of_detached_results_has_zero_gradient():
    function = wrap_torch(lambda x, y: (x > 0, y.detach() * 2))
    x = jnp.arange(3.0)
    gradients = jax.grad(lambda x, y: function(x, y)[1].sum(), argnums=(0, 1))(x, x)
    assert [g.tolist() for g in gradients] == [[0, 0, 0]] * 2


def test_wrap_torch_under_vmap_matches_numpy():
    function = wrap_torch(lambda x: torch.cumsum(x, 0))
    x = jnp.arange(6.0).reshape(3, 2)
    np.testing.assert_allclose(jax.vmap(function)(x), np.cumsum(x, axis=1))


def test_wrap_torch_of_a_bfloat16_module_matches_torch():
    layer = torch.nn.Linear(4, 2).to(torch.bfloat16)
    x = jnp.ones((3, 4), jnp.bfloat16)
    result = wrap_torch(layer.forward)(x)
    assert result.dtype == jnp.bfloat16
    expected = layer(torch.ones(3, 4, dtype=torch.bfloat16)).float().detach().numpy()
    np.testing.assert_array_equal(np.asarray(result, np.float32), expected)


def test_wrap_torch_with_data_dependent_shapes_needs_a_result():
    def positives(x):
        return x[x > 0]

    x = jnp.array([1.0, -1.0, 2.0])
    with pytest.raises(ValueError, match=r"depend on data.*give result="):
        wrap_torch(positives)(x)
    assert wrap_torch(positives, result=jax.ShapeDtypeStruct((2,), jnp.float32))(x).tolist() == [1, 2]
    with pytest.raises(Exception, match="expected float32\\[3\\]"):
        jax.block_until_ready(wrap_torch(positives, result=jax.ShapeDtypeStruct((3,), jnp.float32))(x))


def test_wrap_torch_of_64_bit_results_requires_x64():
    with pytest.raises(ValueError, match="returns int64, which JAX would narrow"):
        wrap_torch(torch.argmax)(jnp.ones(3))
    with jax.enable_x64(True):
        assert wrap_torch(torch.argmax)(jnp.array([1.0, 3.0, 2.0])) == 1


def test_wrap_torch_of_non_tensor_results_raises_type_error():
    with pytest.raises(TypeError, match="must return tensors, got float"):
        wrap_torch(lambda x: (x, 1.5))(jnp.ones(2))


def test_wrap_torch_traces_the_function_once():
    runs = []
    function = wrap_torch(lambda x: runs.append(1) or x + 1)
    for _ in range(3):
        function(jnp.ones(2)).block_until_ready()
    # One run without data, then one per call.
    assert len(runs) == 4
