"""`moba_attention_fn` inside Flax's own modules, against `jax.nn.dot_product_attention` under an equal mask."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from blockdiag import moba_routing
from blockdiag.common.rotary import Rotary, apply_rotary, rotary_tables
from blockdiag.interop.flax import moba_attention_fn

WIDTH, HEADS, BLOCK, LENGTH = 32, 4, 16, 40


@pytest.fixture(autouse=True, scope="module")
def usual_promotion():
    """Use JAX's standard promotion, which Flax needs and tests/conftest.py disables."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def baseline_fn(is_causal=True, top_k=2, keys=None, rotate=lambda array: array):
    """Return attention in plain JAX to the blocks of `moba_routing`, with an optional mask of keys."""

    def attend(query, key, value, **_):
        batch_shape = query.shape[:-3]
        query, key, value = (x.reshape(-1, *x.shape[-3:]) for x in (rotate(query), rotate(key), value))
        key_mask = None if keys is None else jnp.broadcast_to(keys, key.shape[:2])
        routing = moba_routing(query, key, block_size=BLOCK, top_k=top_k, is_causal=is_causal, key_mask=key_mask)
        mask = jnp.repeat(routing.to_pattern(), BLOCK, axis=-1)[..., : key.shape[1]].swapaxes(1, 2)
        if is_causal:
            mask = mask & jnp.tri(key.shape[1], dtype=bool)
        if key_mask is not None:
            mask = mask & key_mask[:, None, None, :]
        return jax.nn.dot_product_attention(query, key, value, mask=mask).reshape(*batch_shape, *query.shape[-3:])

    return attend


def moba(**options):
    return moba_attention_fn(**({"block_size": BLOCK, "top_k": 2} | options))


def random_inputs(shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


def nnx_module(function, **options):
    defaults = {"num_heads": HEADS, "in_features": WIDTH, "decode": False, "rngs": nnx.Rngs(0)}
    return nnx.MultiHeadAttention(**(defaults | options), attention_fn=function)


def linen_module(function, **options):
    return nn.MultiHeadDotProductAttention(num_heads=HEADS, attention_fn=function, **options)


def assert_trees_close(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=5e-5, atol=5e-5)


@pytest.mark.parametrize(("shape", "is_causal"), [((LENGTH, WIDTH), False), ((2, LENGTH, WIDTH), True)], ids=str)
def test_linen_attention_matches_the_baseline_with_gradients(shape, is_causal):
    inputs, weights = random_inputs(shape), random_inputs(shape, seed=1)
    ours, baseline = map(linen_module, (moba(is_causal=is_causal), baseline_fn(is_causal)))
    variables = baseline.init(jax.random.key(2), inputs)

    def results(module):
        def weighted(variables, inputs):
            output = module.apply(variables, inputs)
            return jnp.sum(output * weights), output

        return jax.jit(jax.grad(weighted, argnums=(0, 1), has_aux=True))(variables, inputs)

    assert_trees_close(results(ours), results(baseline))


@pytest.mark.parametrize(
    ("shape", "is_causal", "key_heads"), [((2, LENGTH, WIDTH), True, 2), ((2, 2, LENGTH, WIDTH), False, HEADS)], ids=str
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

    assert_trees_close(results(moba(is_causal=is_causal)), results(baseline_fn(is_causal)))


def test_nnx_is_causal_argument_asks_for_causal_attention():
    inputs = random_inputs((2, LENGTH, WIDTH))
    asked = nnx_module(moba(is_causal=False))(inputs, is_causal=True)
    np.testing.assert_array_equal(asked, nnx_module(moba())(inputs))


@pytest.mark.parametrize("is_causal", [True, False])
def test_key_masks_match_the_baseline(is_causal):
    inputs = random_inputs((2, LENGTH, WIDTH))
    keys = np.random.default_rng(0).uniform(size=(2, LENGTH)) < 0.6
    # Queries that see nothing have no defined result in the baseline.
    keys[:, 0] = True
    ours, baseline = (nnx_module(f) for f in (moba(is_causal=is_causal), baseline_fn(is_causal, keys=keys)))
    expected = baseline(inputs)
    mask = jnp.asarray(keys)[:, None, None, :]
    # A query's own block may have no unmasked key up to the query.
    np.testing.assert_allclose(ours(inputs, mask=mask), expected, rtol=5e-5, atol=5e-5)
    traced = nnx.jit(lambda module, inputs, mask: module(inputs, mask=mask))(ours, inputs, mask)
    np.testing.assert_allclose(traced, expected, rtol=5e-5, atol=5e-5)
    for row in (keys[0], keys[0][None], keys[0][None, None, None]):
        same = np.broadcast_to(keys[:1], keys.shape)[:, None, None, :]
        array = row.reshape(*[1] * (2 - row.ndim), *row.shape)
        np.testing.assert_allclose(ours(inputs, mask=array), ours(inputs, mask=same), rtol=1e-6, atol=1e-6)


def test_masks_that_remove_nothing_are_accepted():
    inputs = random_inputs((2, LENGTH, WIDTH))
    causal = np.asarray(nn.make_causal_mask(jnp.ones((2, LENGTH))))
    everything = np.ones((1, HEADS, LENGTH, LENGTH), bool)
    module = nnx_module(moba())
    for mask in (causal, everything, np.ones((1, 1), bool)):
        np.testing.assert_allclose(module(inputs, mask=mask), module(inputs), rtol=1e-6, atol=1e-6)
    whole = nnx_module(moba(is_causal=False))
    np.testing.assert_array_equal(whole(inputs, mask=everything), whole(inputs))
    with pytest.raises(NotImplementedError, match=r"`mask` of shape \(2, 1, 40, 40\) removes keys.*is_causal=False"):
        whole(inputs, mask=causal)


def test_unsupported_masks_raise_with_a_remedy():
    inputs = random_inputs((2, LENGTH, WIDTH))
    module = nnx_module(moba())
    window = np.tri(LENGTH, dtype=bool) & ~np.tri(LENGTH, k=-20, dtype=bool)
    with pytest.raises(NotImplementedError, match=r"removes keys for some queries.*\[\*batch, 1, 1, 40\]"):
        module(inputs, mask=window[None, None])
    with pytest.raises(NotImplementedError, match="traced"):
        nnx.jit(lambda module, inputs, mask: module(inputs, mask=mask))(module, inputs, window[None, None])
    with pytest.raises(ValueError, match=r"`mask` must be broadcastable to \[\*batch, heads, 40, 40\]"):
        module(inputs, mask=np.ones((1, 1, 1, 39), bool))


@pytest.mark.parametrize("kind", ["positions of the sequence", "given positions", "per token"])
def test_rotary_matches_the_baseline(kind):
    inputs = random_inputs((2, LENGTH, WIDTH))
    cos, sin = rotary_tables(64, WIDTH // HEADS)
    positions = np.random.default_rng(0).integers(0, 64, size=(2, LENGTH)).astype(np.int32)
    rows = np.broadcast_to(np.arange(LENGTH), (2, LENGTH)) if kind.startswith("positions") else positions
    tables = cos[rows], sin[rows]
    rotary = Rotary(*tables, per_token=True) if kind == "per token" else Rotary(cos, sin)
    more = {"input_positions": positions} if kind == "given positions" else {}
    ours = nnx_module(moba(rotary=rotary))(inputs, **more)
    expected = nnx_module(baseline_fn(rotate=lambda x: apply_rotary(x, *tables)))(inputs)
    np.testing.assert_allclose(ours, expected, rtol=5e-5, atol=5e-5)


def test_cross_attention_is_supported_only_without_causality_and_rotary():
    query, other = random_inputs((2, 9, WIDTH)), random_inputs((2, LENGTH, WIDTH), seed=1)
    ours, baseline = (nnx_module(f) for f in (moba(is_causal=False), baseline_fn(False)))
    np.testing.assert_allclose(ours(query, other), baseline(query, other), rtol=5e-5, atol=5e-5)
    with pytest.raises(NotImplementedError, match=r"must have one length in causal attention .* got 9 and 40"):
        nnx_module(moba())(query, other)
    rotary = Rotary(*rotary_tables(64, WIDTH // HEADS))
    with pytest.raises(NotImplementedError, match="with a rotary embedding, got 9 and 40"):
        nnx_module(moba(is_causal=False, rotary=rotary))(query, other)


def test_decoding_raises_not_implemented_error():
    module = nnx_module(moba(), decode=True)
    module.init_cache((2, LENGTH, WIDTH))
    with pytest.raises(NotImplementedError, match="decode=True"):
        module(random_inputs((2, 1, WIDTH)))


def test_dropout_sowing_and_replaced_einsum_raise_not_implemented_error():
    inputs = random_inputs((2, LENGTH, WIDTH))
    with pytest.raises(NotImplementedError, match=r"dropout_rate=0\.1.*dropout_rate=0\.0"):
        nnx_module(moba(), dropout_rate=0.1)(inputs, deterministic=False)
    with pytest.raises(NotImplementedError, match="sow_weights=False"):
        linen_module(moba()).init(jax.random.key(0), inputs, sow_weights=True)
    with pytest.raises(NotImplementedError, match="qk_attn_weights_einsum_cls"):
        linen_module(moba(), qk_attn_weights_einsum_cls=lambda: jnp.einsum).init(jax.random.key(0), inputs)


def test_moba_attention_fn_returns_the_module_dtype():
    inputs = random_inputs((2, LENGTH, WIDTH))
    output = nnx_module(moba(top_k=3), dtype=jnp.bfloat16)(inputs)
    assert output.dtype == jnp.bfloat16
    expected = nnx_module(baseline_fn(top_k=3))(inputs)
    np.testing.assert_allclose(output.astype(jnp.float32), expected, atol=3e-2)


def test_options_are_passed_on():
    query, key, value = (random_inputs((2, 20, HEADS, 8), seed) for seed in range(3))
    scaled = moba(scale=0.7, top_k=2)(query, key, value)
    expected = jax.nn.dot_product_attention(query, key, value, is_causal=True, scale=0.7)
    np.testing.assert_allclose(scaled, expected, rtol=5e-5, atol=5e-5)
    with pytest.raises(ValueError, match="no_such_implementation"):
        moba(implementation="no_such_implementation")(query, key, value)
    with pytest.raises(ValueError, match="`block_size` must be a multiple of 16"):
        moba(block_size=8)(query, key, value)
    with pytest.raises(ValueError, match="same batch axes"):
        moba()(query, key[:1], value[:1])
