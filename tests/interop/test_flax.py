"""`attention_fn` inside Flax's own modules, against `jax.nn.dot_product_attention` under an equal mask."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from blockdiag.common.rotary import Rotary
from blockdiag.interop.flax import attention_fn

WIDTH, HEADS, BLOCK = 32, 4, 16


@pytest.fixture(autouse=True, scope="module")
def usual_promotion():
    """Use JAX's standard promotion, which Flax needs and tests/conftest.py disables."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def block_mask(length: int, is_causal: bool, block_size: int = BLOCK) -> np.ndarray:
    block = np.arange(length) // block_size
    mask = block[:, None] == block[None, :]
    return np.tril(mask) if is_causal else mask


def baseline_fn(is_causal: bool, rotate=lambda array: array):
    """Return block-diagonal attention in plain JAX, for any number of leading batch axes."""

    def attend(query, key, value, **_):
        batch_shape = query.shape[:-3]
        arrays = (array.reshape(-1, *array.shape[-3:]) for array in (rotate(query), rotate(key), value))
        mask = block_mask(query.shape[-3], is_causal)[None, None]
        return jax.nn.dot_product_attention(*arrays, mask=mask).reshape(*batch_shape, *query.shape[-3:])

    return attend


def random_inputs(shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


def nnx_module(function, **options):
    defaults = {"num_heads": HEADS, "in_features": WIDTH, "decode": False, "rngs": nnx.Rngs(0)}
    return nnx.MultiHeadAttention(**(defaults | options), attention_fn=function)


def assert_trees_close(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


@pytest.mark.versions
@pytest.mark.parametrize(
    ("shape", "is_causal"), [((40, WIDTH), False), ((2, 40, WIDTH), True), ((2, 3, 20, WIDTH), False)], ids=str
)
def test_linen_attention_matches_the_baseline_with_gradients(shape, is_causal):
    inputs, weights = random_inputs(shape), random_inputs(shape, seed=1)
    ours, baseline = (
        nn.MultiHeadDotProductAttention(num_heads=HEADS, attention_fn=function)
        for function in (attention_fn(block_size=BLOCK, is_causal=is_causal), baseline_fn(is_causal))
    )
    variables = baseline.init(jax.random.key(2), inputs)

    def results(module):
        def weighted(variables, inputs):
            output = module.apply(variables, inputs)
            return jnp.sum(output * weights), output

        return jax.jit(jax.grad(weighted, argnums=(0, 1), has_aux=True))(variables, inputs)

    assert_trees_close(results(ours), results(baseline))


@pytest.mark.versions
@pytest.mark.parametrize(
    ("shape", "is_causal", "key_heads"),
    [((40, WIDTH), True, HEADS), ((2, 40, WIDTH), False, 2), ((2, 3, 20, WIDTH), True, 1)],
    ids=str,
)
def test_nnx_attention_matches_the_baseline_with_gradients(shape, is_causal, key_heads):
    inputs, weights = random_inputs(shape), random_inputs(shape, seed=1)

    def weighted(module, inputs):
        output = module(inputs)
        return jnp.sum(output * weights), output

    def results(function):
        module = nnx_module(function, num_kv_heads=key_heads)
        gradient = nnx.grad(weighted, argnums=(nnx.DiffState(0, nnx.Param), 1), has_aux=True)
        return jax.tree.leaves(nnx.jit(gradient)(module, inputs))

    assert_trees_close(results(attention_fn(block_size=BLOCK, is_causal=is_causal)), results(baseline_fn(is_causal)))


def test_nnx_is_causal_argument_asks_for_causal_blocks():
    inputs = random_inputs((2, 40, WIDTH))
    asked = nnx_module(attention_fn(block_size=BLOCK))(inputs, is_causal=True)
    np.testing.assert_array_equal(asked, nnx_module(attention_fn(block_size=BLOCK, is_causal=True))(inputs))


def test_linen_with_dropout_in_evaluation_is_finite():
    inputs = random_inputs((2, 40, WIDTH))
    module = nn.MultiHeadDotProductAttention(
        num_heads=HEADS, dropout_rate=0.5, attention_fn=attention_fn(block_size=BLOCK)
    )
    variables = module.init(jax.random.key(0), inputs, deterministic=True)
    assert np.isfinite(module.apply(variables, inputs, deterministic=True)).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_attention_fn_returns_the_module_dtype(dtype):
    inputs = random_inputs((2, 40, WIDTH))
    output = nnx_module(attention_fn(block_size=BLOCK), dtype=dtype)(inputs)
    assert output.dtype == dtype
    expected = nnx_module(baseline_fn(False))(inputs)
    np.testing.assert_allclose(output.astype(jnp.float32), expected, atol=2e-2)


def test_mixed_dtypes_are_promoted():
    query, key, value = (random_inputs((2, 20, HEADS, 8), seed) for seed in range(3))
    output = attention_fn(block_size=BLOCK)(query.astype(jnp.bfloat16), key.astype(jnp.bfloat16), value)
    assert output.dtype == jnp.float32


def test_scale_matches_the_baseline():
    query, key, value = (random_inputs((2, 20, HEADS, 8), seed) for seed in range(3))
    output = attention_fn(block_size=BLOCK, scale=0.7)(query, key, value)
    expected = jax.nn.dot_product_attention(query, key, value, mask=block_mask(20, False)[None, None], scale=0.7)
    np.testing.assert_allclose(output, expected, rtol=2e-5, atol=2e-5)


def rotary_tables(rows, half):
    angles = np.arange(rows)[:, None] / 10.0 ** np.arange(half)
    return jnp.cos(angles).astype(jnp.float32), jnp.sin(angles).astype(jnp.float32)


def rotate_with(cos, sin):
    def rotate(array):
        first, second = jnp.split(array, 2, axis=-1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    return rotate


def test_rotary_matches_the_baseline():
    cos, sin = rotary_tables(40, WIDTH // HEADS // 2)
    inputs = random_inputs((2, 3, 40, WIDTH))
    ours = nnx_module(attention_fn(block_size=BLOCK, rotary=Rotary(cos, sin)))
    baseline = nnx_module(baseline_fn(False, rotate_with(cos[:, None], sin[:, None])))
    assert_trees_close(ours(inputs), baseline(inputs))


def test_nnx_input_positions_are_rotary_positions():
    cos, sin = rotary_tables(64, WIDTH // HEADS // 2)
    inputs = random_inputs((2, 40, WIDTH))
    positions = np.random.default_rng(0).integers(0, 64, size=(2, 40))
    ours = nnx_module(attention_fn(block_size=BLOCK, rotary=Rotary(cos, sin)))
    baseline = nnx_module(baseline_fn(False, rotate_with(cos[positions][:, :, None], sin[positions][:, :, None])))
    assert_trees_close(ours(inputs, input_positions=positions), baseline(inputs))


def test_input_positions_need_a_rotary_embedding_without_positions():
    inputs, positions = random_inputs((2, 40, WIDTH)), np.zeros((2, 40), np.int32)
    with pytest.raises(ValueError, match=r"input_positions.*rotary=Rotary"):
        nnx_module(attention_fn(block_size=BLOCK))(inputs, input_positions=positions)
    rotary = Rotary(*rotary_tables(40, WIDTH // HEADS // 2), positions=jnp.asarray(positions))
    with pytest.raises(ValueError, match="only one of the two"):
        nnx_module(attention_fn(block_size=BLOCK, rotary=rotary))(inputs, input_positions=positions)


@pytest.mark.parametrize("is_causal", [False, True])
def test_mask_that_removes_nothing_within_blocks_is_accepted(is_causal):
    inputs = random_inputs((2, 40, WIDTH))
    module = nnx_module(attention_fn(block_size=BLOCK, is_causal=is_causal))
    expected = module(inputs)
    everything = np.ones((1, 1, 1, 1), bool)
    equal = block_mask(40, is_causal)[None, None]
    masks = [everything, equal, equal.astype(np.float32), jnp.asarray(equal)]
    if is_causal:
        masks.append(nn.make_causal_mask(jnp.ones((2, 40))))
    for mask in masks:
        np.testing.assert_array_equal(module(inputs, mask=mask), expected)


def test_unsupported_mask_raises_with_a_remedy():
    inputs = random_inputs((2, 40, WIDTH))
    module = nnx_module(attention_fn(block_size=BLOCK))
    with pytest.raises(NotImplementedError, match="is_causal=True"):
        module(inputs, mask=block_mask(40, True)[None, None])
    padding = nn.make_attention_mask(np.arange(40)[None] < 37, np.arange(40)[None] < 37)
    with pytest.raises(NotImplementedError, match=r"starts at token 32.*Flax's own dot_product_attention"):
        module(inputs, mask=padding)
    with pytest.raises(NotImplementedError, match="starts at token 16"):
        module(inputs, mask=block_mask(40, False, block_size=20)[None, None])
    with pytest.raises(ValueError, match="broadcastable"):
        module(inputs, mask=np.ones((1, 1, 39, 39), bool))


def test_traced_mask_raises_not_implemented_error():
    module = nnx_module(attention_fn(block_size=BLOCK))
    with pytest.raises(NotImplementedError, match="mask=None"):
        nnx.jit(lambda module, inputs, mask: module(inputs, mask=mask))(
            module, random_inputs((2, 40, WIDTH)), jnp.ones((1, 1, 40, 40), bool)
        )


def test_dropout_in_training_raises_not_implemented_error():
    inputs = random_inputs((2, 40, WIDTH))
    module = nnx_module(attention_fn(block_size=BLOCK), dropout_rate=0.1)
    with pytest.raises(NotImplementedError, match=r"dropout_rate=0\.1.*dropout_rate=0\.0"):
        module(inputs, deterministic=False)
    linen = nn.MultiHeadDotProductAttention(
        num_heads=HEADS, dropout_rate=0.1, attention_fn=attention_fn(block_size=BLOCK)
    )
    with pytest.raises(NotImplementedError, match="dropped out"):
        linen.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, inputs, deterministic=False)


def test_sow_weights_raises_not_implemented_error():
    inputs = random_inputs((2, 40, WIDTH))
    with pytest.raises(NotImplementedError, match="sow_weights=False"):
        nnx_module(attention_fn(block_size=BLOCK))(inputs, sow_weights=True)
    linen = nn.MultiHeadDotProductAttention(num_heads=HEADS, attention_fn=attention_fn(block_size=BLOCK))
    with pytest.raises(NotImplementedError, match="sow_weights=False"):
        linen.init(jax.random.key(0), inputs, sow_weights=True)


def test_replaced_einsum_raises_not_implemented_error():
    linen = nn.MultiHeadDotProductAttention(
        num_heads=HEADS,
        attention_fn=attention_fn(block_size=BLOCK),
        qk_attn_weights_einsum_cls=lambda: jnp.einsum,
    )
    with pytest.raises(NotImplementedError, match="qk_attn_weights_einsum_cls"):
        linen.init(jax.random.key(0), random_inputs((2, 40, WIDTH)))


def test_cross_attention_raises_not_implemented_error():
    module = nnx_module(attention_fn(block_size=BLOCK))
    with pytest.raises(NotImplementedError, match=r"lengths 40 of `query`, 24 of `key`"):
        module(random_inputs((2, 40, WIDTH)), random_inputs((2, 24, WIDTH)))


def test_decoding_raises_not_implemented_error():
    module = nnx_module(attention_fn(block_size=BLOCK), decode=True)
    module.init_cache((2, 40, WIDTH))
    with pytest.raises(NotImplementedError, match="decode=True"):
        module(random_inputs((2, 1, WIDTH)))


def test_bad_shapes_raise_value_error():
    attend = attention_fn(block_size=BLOCK)
    array = random_inputs((2, 20, HEADS, 8))
    with pytest.raises(ValueError, match=r"\[\*batch, length, heads, head_dim\]"):
        attend(array[0, 0], array[0, 0], array[0, 0])
    with pytest.raises(ValueError, match="same batch axes"):
        attend(array, array[:1], array[:1])


def test_implementation_is_passed_on():
    array = random_inputs((2, 20, HEADS, 8))
    with pytest.raises(ValueError, match="no_such_implementation"):
        attention_fn(block_size=BLOCK, implementation="no_such_implementation")(array, array, array)
