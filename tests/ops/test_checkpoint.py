"""`jax.checkpoint` around every operation, by every implementation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag import block_diagonal_attention
from blockdiag.interop import compile_target
from tests.ops.op_calls import CALLS, expected_results, mark_covered, pairs

DIFFERENTIATED = [(name, x) for name, x in pairs() if CALLS[name].differentiated]
# The interpreter runs only a few cases. All cases are traced for a GPU below.
RUN = [x for x in DIFFERENTIATED if x[1] != "triton" or x[0] in ("block_diagonal", "moba", "fuse")]


@pytest.mark.parametrize(("name", "implementation"), mark_covered(RUN))
def test_checkpoint_of_an_operation_changes_no_gradient(name, implementation):
    call = CALLS[name]
    arrays = call.arrays(1)
    found = jax.jit(call.gradients(implementation, is_checkpointed=True))(**arrays)
    for key, x in expected_results(name, 1, is_gradient=True).items():
        np.testing.assert_allclose(found[key], x, rtol=1e-5, atol=1e-5 * float(np.abs(x).max()))


@pytest.mark.parametrize("name", [name for name, implementation in DIFFERENTIATED if implementation == "triton"])
def test_checkpoint_of_kernels_has_no_effects(name):
    call = CALLS[name]
    with compile_target(90):
        traced = jax.jit(call.gradients("triton", is_checkpointed=True)).trace(**call.types(2))
    assert not traced.jaxpr.effects


@pytest.mark.parametrize(("name", "implementation"), mark_covered(x for x in pairs() if not CALLS[x[0]].differentiated))
def test_checkpoint_of_an_operation_without_derivative_changes_no_result(name, implementation):
    call = CALLS[name]
    if implementation == "triton":
        with compile_target(90):
            assert not jax.jit(jax.checkpoint(call.bound("triton"))).trace(**call.types(2)).jaxpr.effects
        return
    arrays, function = call.arrays(1), call.bound(implementation)
    found = jax.jit(jax.checkpoint(function))(**arrays)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected_results(name, 1)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def pallas_loss(query, key, value):
    output = block_diagonal_attention(query, key, value, implementation="pallas", is_causal=True)
    return jnp.sum(output.astype(jnp.float32) ** 2)


PALLAS = [jax.ShapeDtypeStruct((128, heads, 64), jnp.bfloat16) for heads in (2, 1, 1)]


def test_checkpoint_of_pallas_lowers_for_cuda():
    with compile_target(90):
        gradients = jax.jit(jax.grad(jax.checkpoint(pallas_loss), argnums=(0, 1, 2)))
        text = gradients.trace(*PALLAS).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu") >= 2


def test_checkpoint_of_interpreted_pallas_changes_no_gradient():
    draw = np.random.default_rng(0)
    operands = [jnp.asarray(draw.normal(size=x.shape), x.dtype) for x in PALLAS]
    argnums = (0, 1, 2)
    found = jax.jit(jax.grad(jax.checkpoint(pallas_loss), argnums))(*operands)
    for one, other in zip(found, jax.jit(jax.grad(pallas_loss, argnums))(*operands), strict=True):
        np.testing.assert_array_equal(one, other)
