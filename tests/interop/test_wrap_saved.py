"""Residuals of `wrap_jax` functions, and torch features that handle saved tensors."""

import gc

import jax
import jax.numpy as jnp
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from blockdiag.interop import wrap_jax


@pytest.fixture(autouse=True, scope="module")
def seed():
    torch.manual_seed(0)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def test_write_to_a_saved_input_raises_runtime_error():
    x = randn(3)
    h = x * 1
    y = wrap_jax(lambda x: x * x)(h)
    h.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_write_to_a_saved_output_raises_runtime_error():
    x = randn(3)
    y = wrap_jax(jnp.exp)(x)
    z = y * 2
    y.detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


def test_write_to_an_unneeded_input_keeps_the_gradient():
    x = randn(3)
    h = x * 1
    y = wrap_jax(jnp.sin)(h)
    expected = h.detach().cos()
    h.detach().zero_()
    y.sum().backward()
    torch.testing.assert_close(x.grad, expected)


def test_residuals_are_freed_with_the_graph():
    x = randn(1000)
    wrapped = wrap_jax(lambda x: jnp.sin(jnp.sin(x)))
    wrapped(x).sum().backward()
    gc.collect()
    before = len(jax.live_arrays())
    y = wrapped(x)
    assert len(jax.live_arrays()) > before
    loss = y.sum()
    loss.backward()
    gc.collect()
    # The output is alive, but its residuals are freed.
    assert len(jax.live_arrays()) <= before + 1
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_retained_graph_accumulates_gradients():
    x = randn(3)
    loss = wrap_jax(jnp.sin)(x).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    torch.testing.assert_close(x.grad, 2 * x.detach().cos())


# --- Second derivatives, checkpointing and hooks


def test_second_derivative_raises_not_implemented_error():
    for function in (jnp.sin, jnp.exp, lambda x: x * x, lambda x: x * 2):
        x = randn(3)
        (gradient,) = torch.autograd.grad(wrap_jax(function)(x).sum(), x, create_graph=True)
        assert gradient.requires_grad
        with pytest.raises(NotImplementedError, match=r"first derivatives only.*wrap_jax\(jax\.grad\(fn\)\)"):
            gradient.sum().backward(retain_graph=True)
        with pytest.raises(NotImplementedError, match="first derivatives only"):
            torch.autograd.grad(gradient.sum(), x)
    h = x * 3
    (gradient,) = torch.autograd.grad(wrap_jax(lambda x: x * x)(h).sum(), h, create_graph=True)
    with pytest.raises(NotImplementedError, match="first derivatives only"):
        torch.autograd.grad(gradient.sum(), h)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_keeps_gradients(reentrant):
    wrapped = wrap_jax(lambda x: jnp.sin(x) * x)
    x = randn(3)
    y = checkpoint(lambda x: wrapped(x) * 2, x, use_reentrant=reentrant)
    y.sum().backward()
    plain = x.detach()
    torch.testing.assert_close(x.grad, 2 * (plain.cos() * plain + plain.sin()))


def test_checkpointing_frees_residuals():
    wrapped = wrap_jax(lambda x: jnp.sin(x))
    x = randn(1000)
    wrapped(x).sum().backward()
    gc.collect()
    before = len(jax.live_arrays())
    y = checkpoint(lambda x: wrapped(x).sum(), x, use_reentrant=False)
    gc.collect()
    assert len(jax.live_arrays()) <= before
    y.backward()


def test_saved_tensors_on_the_host_keep_gradients():
    x = randn(3)
    with torch.autograd.graph.save_on_cpu():
        y = wrap_jax(lambda x: jnp.sin(x) * x)(x)
    y.sum().backward()
    plain = x.detach()
    torch.testing.assert_close(x.grad, plain.cos() * plain + plain.sin())


def test_hooks_that_copy_residuals_raise_runtime_error():
    x = randn(3)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.numpy(), lambda a: torch.tensor(a)):
        y = wrap_jax(jnp.sin)(x.detach().requires_grad_())
    with pytest.raises(RuntimeError, match=r"hook for saved tensors copied.*jax\.checkpoint"):
        y.sum().backward()
