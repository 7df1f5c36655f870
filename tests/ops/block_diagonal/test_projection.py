"""Projection, rotary embedding and attention as one function."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from blockdiag import (
    BLOCK_DIAGONAL_OUTPUT,
    BLOCK_DIAGONAL_QKV,
    Rotary,
    block_diagonal_attention,
    fused_qkv_block_attention,
    rotary_tables,
)
from blockdiag.interop import compile_target
from tests.support import compiled_quickly, value_and_gradients

HEADS, KEY_HEADS, HEAD_DIM, MODEL = 4, 2, 8, 16
COLUMNS = (HEADS + 2 * KEY_HEADS) * HEAD_DIM
fused = functools.partial(
    fused_qkv_block_attention, query_heads=HEADS, key_heads=KEY_HEADS, head_dim=HEAD_DIM, block_size=8
)


def operands(*tokens_shape: int, dtype=jnp.float32) -> tuple[jax.Array, ...]:
    """Return x, w_qkv, bias and a cotangent of the output."""
    generator = np.random.default_rng(0)
    shapes = (*tokens_shape, MODEL), (MODEL, COLUMNS), (COLUMNS,), (*tokens_shape, HEADS, HEAD_DIM)
    x, w_qkv, bias, cotangent = (generator.normal(size=shape).astype(np.float32) for shape in shapes)
    return tuple(jnp.asarray(a, dtype) for a in (x, w_qkv / math.sqrt(MODEL), bias, cotangent))


def separate(x, w_qkv, bias=None, **options):
    """Compute the fused function from three separate parts, which JAX differentiates."""
    projected = jnp.matmul(x, w_qkv, precision="highest")
    if bias is not None:
        projected = projected + jnp.broadcast_to(bias, projected.shape)
    parts = jnp.split(projected, [HEADS * HEAD_DIM, (HEADS + KEY_HEADS) * HEAD_DIM], axis=-1)
    heads = (part.reshape(*x.shape[:-1], -1, HEAD_DIM) for part in parts)
    return block_diagonal_attention(*heads, block_size=8, **options)


def options_of(kind: str, tokens: int) -> dict:
    rotary = Rotary(*rotary_tables(tokens, HEAD_DIM), apply_to=("query", "key", "value"))
    return {
        "plain": {},
        "causal": dict(is_causal=True, scale=0.3),
        "rotary": dict(rotary=rotary),
        "packed": dict(sequence_offsets=jnp.asarray([0, 5, 5, tokens - 3], jnp.int32), rotary=rotary),
        "lengths": dict(block_lengths=jnp.asarray([5, 8, 0, 2], jnp.int32)),
    }[kind]


def compiled_gradients(function, **options):
    """Return a compiled function that computes the output and the gradients."""
    return compiled_quickly(functools.partial(value_and_gradients, functools.partial(function, **options)))


@functools.cache
def three_parts(kind: str, with_bias: bool) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Return operands and the results of `separate` for them."""
    x, w_qkv, bias, cotangent = operands(*((20,) if kind in ("packed", "lengths") else (2, 20)))
    arrays = (x, w_qkv, bias, cotangent) if with_bias else (x, w_qkv, cotangent)
    return arrays, compiled_gradients(separate, **options_of(kind, 20))(*arrays)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("kind", ["plain", "causal", "rotary", "packed", "lengths"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_fused_projection_matches_separate_projections(implementation, kind, with_bias):
    arrays, expected = three_parts(kind, with_bias)
    actual = compiled_gradients(fused, implementation=implementation, **options_of(kind, 20))(*arrays)
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_fused_projection_in_half_precision_is_as_accurate_as_separate_projections(dtype):
    exact_inputs = operands(2, 40)
    rounded = operands(2, 40, dtype=dtype)
    exact = compiled_gradients(fused)(*(x.astype(jnp.float32) for x in rounded))
    actual = compiled_gradients(fused)(*rounded)
    rough = compiled_gradients(separate)(*rounded)
    assert len(exact_inputs) == len(rounded)
    for a, r, e in zip(actual, rough, exact, strict=True):
        assert a.dtype == dtype
        error, allowed = (float(jnp.abs(x.astype(jnp.float32) - e).max()) for x in (a, r))
        assert error <= 2 * allowed + 2 * float(jnp.finfo(dtype).eps) * float(np.abs(e).max())


def test_fused_projection_residuals_are_input_weight_and_projected_buffer():
    x, w_qkv, bias, _ = operands(2, 40)
    _, pull_back = jax.vjp(fused, x, w_qkv, bias)
    sizes = sorted(leaf.size for leaf in jax.tree.leaves(pull_back))
    assert sizes == sorted([x.size, w_qkv.size, bias.size, 2 * 40 * COLUMNS])


def test_checkpoint_policies_skip_the_named_forward_passes():
    x, w_qkv, bias, _ = operands(2, 16)

    def count(*names):
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        layer = jax.checkpoint(lambda w: jnp.sin(fused(jnp.tanh(x), w, bias)), policy=policy)
        text = jax.jit(jax.value_and_grad(lambda w: jnp.sum(layer(w)))).lower(w_qkv).compile().as_text()
        return text.count(" exponential(")

    assert count() == 3
    assert count(BLOCK_DIAGONAL_OUTPUT) == count(BLOCK_DIAGONAL_OUTPUT, BLOCK_DIAGONAL_QKV) == 2


def test_second_derivative_under_vmap_matches_the_reference():
    x, w_qkv, bias, _ = operands(3, 11)

    def penalty(function, x, w_qkv):
        gradients = jax.grad(lambda x, w: jnp.sum(jnp.sin(function(x, w, bias))), (0, 1))(x, w_qkv)
        return sum(jnp.sum(gradient**2) for gradient in gradients)

    actual, expected = (
        jax.jit(jax.vmap(jax.grad(functools.partial(penalty, function), (0, 1)), (0, None)))(x, w_qkv)
        for function in (fused, functools.partial(fused, implementation="reference"))
    )
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-3, atol=1e-4 * float(np.abs(e).max()))


def test_forward_mode_raises_type_error_with_the_supported_implementation():
    x, w_qkv, bias, _ = operands(5)
    with pytest.raises(TypeError, match='implementation="reference"'):
        jax.jvp(lambda w: fused(x, w, bias), (w_qkv,), (w_qkv,))
    _, tangent = jax.jvp(lambda w: fused(x, w, bias, implementation="reference"), (w_qkv,), (w_qkv,))
    assert tangent.shape == (5, HEADS, HEAD_DIM)


def test_explicit_shardings_match_one_device():
    """Each device computes its batch rows. Weights are gathered, and their gradients are summed."""
    x, w_qkv, bias, cotangent = operands(4, 12)
    expected = compiled_gradients(fused)(x, w_qkv, bias, cotangent)
    kinds = (jax.sharding.AxisType.Explicit,)
    with jax.set_mesh(jax.make_mesh((4,), ("x",), axis_types=kinds, devices=jax.devices("cpu"))):
        x, cotangent, w_qkv = (jax.device_put(array, P("x")) for array in (x, cotangent, w_qkv))
        actual = jax.jit(functools.partial(value_and_gradients, fused))(x, w_qkv, bias, cotangent)
        assert jax.typeof(actual[0]).sharding.spec == P("x", None, None, None)
        with pytest.warns(UserWarning, match="`fused_qkv_block_attention`: axis 1 of an operand is sharded over x"):
            gathered = fused(jax.device_put(x, P(None, "x")), w_qkv, bias)
        np.testing.assert_allclose(np.asarray(gathered), np.asarray(expected[0]), rtol=1e-4, atol=1e-4)
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(e), rtol=1e-4, atol=1e-4)


def test_empty_input_gives_empty_output_and_zero_gradients():
    x, w_qkv, bias, cotangent = operands(0)
    output, dx, dw, dbias = value_and_gradients(fused, x, w_qkv, bias, cotangent)
    assert output.shape == (0, HEADS, HEAD_DIM) and dx.shape == x.shape
    assert not dw.any() and not dbias.any()


def test_nan_stays_in_its_sequence():
    """NaN in one sequence reaches the weight gradient, but not another sequence's output or gradient."""
    x, w_qkv, bias, cotangent = operands(2, 20)
    run = compiled_gradients(fused)
    clean = run(x, w_qkv, bias, cotangent)
    dirty = run(x.at[1].set(jnp.nan), w_qkv, bias, cotangent)
    for before, after in zip(clean[:2], dirty[:2], strict=True):
        np.testing.assert_array_equal(before[0], after[0])


@pytest.mark.parametrize("block_size", [8, 80])
def test_kernels_read_and_write_the_projected_buffer(block_size):
    """Kernels use one tile, or chunks with two backward launches that share the buffer.

    No part of the buffer is copied out or concatenated.
    """
    tensors = operands(20)
    results = {
        implementation: compiled_gradients(fused, block_size=block_size, implementation=implementation)(*tensors)
        for implementation in ("triton", "xla")
    }
    for actual, expected in zip(results["triton"], results["xla"], strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)

    function = functools.partial(fused, block_size=block_size, implementation="triton")
    with compile_target(90):
        traced = jax.jit(functools.partial(value_and_gradients, function)).trace(*tensors)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("triton_kernel_call_ffi") >= 2
    assert "stablehlo.concatenate" not in text and "stablehlo.slice" not in text
