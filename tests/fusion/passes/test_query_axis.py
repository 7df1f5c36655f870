"""Tests of one query without an axis, as decoding and attention pooling are often written."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag import NotFusible, explain, fuse
from blockdiag.fusion.program import trace
from blockdiag.triton_kernels.launch.plan import Target
from tests.fusion.codegen.test_plans import launches_of
from tests.fusion.fusion_support import (
    alternated,
    assert_alike,
    compiled_gradients,
    expected_results,
)
from tests.triton_kernels.plans_support import report_of

BATCH, TOKENS, HEADS, WIDTH = 2, 37, 3, 16


def decode(query, key, value):
    scores = jnp.einsum("bnh,bsnh->bns", query, key) * WIDTH**-0.5
    return jnp.einsum("bns,bsnh->bnh", jax.nn.softmax(scores, axis=-1), value)


def decode_of_a_cache(query, key, value):
    lengths = jnp.array([5, TOKENS])[:, None, None]
    scores = jnp.einsum("bnh,bsnh->bns", query, key) / 4
    scores = jnp.where(jnp.arange(TOKENS)[None, None] < lengths, scores, -1e9)
    return jnp.einsum("bns,bsnh->bnh", jax.nn.softmax(scores, axis=-1), value)


def pool(tokens, weight):
    """Pool tokens [B, S, H] by their products with weight [H]."""
    return jnp.einsum("bs,bsh->bh", jax.nn.softmax(tokens @ weight, axis=-1), tokens)


def pool_masked(tokens, weight):
    scores = jnp.where(tokens[..., 0] > -1, jnp.tanh(tokens) @ weight, -jnp.inf)
    return jnp.einsum("bs,bsh->bh", jax.nn.softmax(scores, axis=-1), tokens)


def pool_one_sequence(tokens, weight):
    return jax.nn.softmax(tokens[0] @ weight, axis=0) @ tokens[0]


def pool_twice(tokens, weight):
    """Pool the words of sentences, then the sentences."""
    words = tokens.reshape(BATCH, TOKENS, 4, WIDTH // 4)
    sentences = jnp.einsum("bsw,bswh->bsh", jax.nn.softmax(words @ weight[:4], axis=-1), words)
    return jnp.einsum("bs,bsh->bh", jax.nn.softmax(sentences @ weight[4:8], axis=-1), sentences)


def align(hidden, tokens, weight):
    """Attend from hidden [B, H] with weight [H, H], as in translation before transformers."""
    scores = jnp.einsum("bh,bsh->bs", hidden @ weight, tokens)
    return jnp.concatenate([jnp.einsum("bs,bsh->bh", jax.nn.softmax(scores), tokens), hidden], axis=-1)


def with_weights(query, key, value):
    """Use the weights outside their product with values, too."""
    weights = jax.nn.softmax(jnp.einsum("bnh,bsnh->bns", query, key) / 4, axis=-1)
    return jnp.einsum("bns,bsnh->bnh", weights, value) + weights.max(axis=-1, keepdims=True)


_HEADS = [(BATCH, HEADS, WIDTH), *[(BATCH, TOKENS, HEADS, WIDTH)] * 2]
_TOKENS = [(BATCH, TOKENS, WIDTH), (WIDTH,)]
CASES = {
    decode: _HEADS, decode_of_a_cache: _HEADS, with_weights: _HEADS, pool: _TOKENS, pool_masked: _TOKENS,
    pool_one_sequence: _TOKENS, pool_twice: _TOKENS, align: [(BATCH, WIDTH), _TOKENS[0], (WIDTH, WIDTH)],
}  # fmt: skip


def arrays(function):
    generator = np.random.default_rng(0)
    return [jnp.asarray(generator.normal(size=shape), jnp.float32) for shape in CASES[function]]


@pytest.mark.parametrize(("function", "implementation"), alternated(CASES))
def test_query_without_an_axis_matches_the_reference_with_gradients(function, implementation):
    given = arrays(function)
    found = compiled_gradients(fuse(function, implementation=implementation), given)
    assert_alike(found, expected_results(function, given))


@pytest.mark.parametrize("function", CASES)
def test_query_without_an_axis_is_fused_as_one_query(function):
    found = explain(function)(*arrays(function))
    assert len(found.regions) == (2 if function is pool_twice else 1)
    assert all(region.has_softmax and region.sizes["q"] == 1 for region in found.regions)
    products = {align: 1, with_weights: 1}.get(function, 0)
    assert found.outside.get("dot_general", 0) == products, found.outside


@pytest.mark.parametrize("function", [decode, pool])
def test_query_without_an_axis_under_jit_and_vmap_matches_the_reference(function):
    given = [jnp.stack([x, 2 * x, -x]) for x in arrays(function)]
    found = jax.jit(jax.vmap(fuse(function)))(*given)
    np.testing.assert_allclose(found, jax.vmap(function)(*given), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_query_without_an_axis_kernels_compile_without_spills(arch):
    given = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in CASES[decode]]
    ((region,),) = trace(decode, given, {}).regions.values()
    for launch in launches_of(region).values():
        assert report_of(launch.plan(Target.for_arch(arch)), arch).spill_bytes == 0


def test_pooling_after_attention_stays_outside_the_region():
    def attend_and_pool(tokens, weight):
        scores = jnp.einsum("bth,bsh->bts", tokens, tokens) / 4
        return pool(jnp.einsum("bts,bsh->bth", jax.nn.softmax(scores, axis=-1), tokens), weight)

    (region,) = explain(attend_and_pool)(*arrays(pool)).regions
    assert region.sizes["q"] == TOKENS


def test_softmax_over_parameters_without_queries_raises_not_fusible():
    def mix(layers, weight):
        return jnp.einsum("s,sh->h", jax.nn.softmax(weight), layers)

    with pytest.raises(NotFusible, match="queries have no token axis: add one of size 1"):
        fuse(mix)(jnp.ones((4, 8)), jnp.ones(4))


def test_decode_after_unfusible_attention_raises_not_fusible():
    def two(query, key, value):
        scores = jnp.sort(jnp.einsum("bsnh,btnh->bnst", key, key), axis=-1)
        other = jnp.einsum("bnst,btnh->bsnh", jax.nn.softmax(scores, axis=-1), value)
        return decode(query, key, other)

    with pytest.raises(NotFusible, match="sort"):
        fuse(two)(*arrays(decode))
