"""Tests of weights that are divided by a sum of weights but are not a softmax."""

import functools

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
    assert_as_good_as_written,
    compiled_gradients,
    expected_results,
)
from tests.triton_kernels.plans_support import report_of

BATCH, HEADS, TOKENS, WIDTH = 2, 2, 33, 16
DISTANCE = (np.arange(TOKENS)[:, None] - np.arange(TOKENS))[None, None]
CAUSAL = DISTANCE >= 0


def scores_of(query, key):
    return jnp.einsum("bntd,bnsd->bnts", query, key) * WIDTH**-0.5


def normalised_again(query, key, value, mask):
    """Mask a softmax afterwards, and normalise it again."""
    weights = jax.nn.softmax(scores_of(query, key), axis=-1) * mask
    weights = weights / (weights.sum(-1, keepdims=True) + 1e-6)
    return jnp.einsum("bnts,bnsd->bntd", weights, value)


def linear_attention(query, key, value):
    """Katharopoulos et al. (2020), with a causal mask."""
    weights = jnp.tril(jnp.einsum("bntd,bnsd->bnts", jax.nn.elu(query) + 1, jax.nn.elu(key) + 1))
    return jnp.einsum("bnts,bnsd->bntd", weights / (weights.sum(-1, keepdims=True) + 1e-6), value)


def cosine_weights(query, key, value):
    """Qin et al. (2022)."""
    weights = jnp.einsum("bntd,bnsd->bnts", jax.nn.relu(query), jax.nn.relu(key))
    weights = weights * np.cos(np.pi / 2 * DISTANCE / TOKENS).astype(np.float32)
    return jnp.einsum("bnts,bnsd->bntd", weights / jnp.clip(weights.sum(-1, keepdims=True), min=0.1), value)


def retention(query, key, value):
    """Sun et al. (2023): both the decay and the weights are normalised."""
    rates = jnp.asarray(1 - 2.0 ** (-3 - np.arange(HEADS)), query.dtype)
    decay = jnp.where(CAUSAL, rates[None, :, None, None] ** np.maximum(DISTANCE, 0).astype(np.float32), 0.0)
    decay = decay / jnp.sqrt(decay.sum(-1, keepdims=True))
    weights = scores_of(query, key) * decay
    weights = weights / jnp.maximum(jnp.abs(weights.sum(-1, keepdims=True)), 1)
    return jnp.einsum("bnts,bnsd->bntd", weights, value)


def mlstm(query, key, value, gates):
    """Beck et al. (2024): forget and input gates [2, B, N, T] are added as logarithms, less their maximum."""
    forgotten = jnp.cumsum(jax.nn.log_sigmoid(gates[0]), axis=-1)
    decay = jnp.where(CAUSAL, forgotten[..., :, None] - forgotten[..., None, :] + gates[1][..., None, :], -jnp.inf)
    largest = decay.max(axis=-1, keepdims=True)
    weights = scores_of(query, key) * jnp.exp(decay - largest)
    total = jnp.maximum(jnp.abs(weights.sum(axis=-1, keepdims=True)), jnp.exp(-largest))
    return jnp.einsum("bnts,bnsd->bntd", weights / (total + 1e-6), value)


def gated_positions(query, key, value, gate, positions):
    """d'Ascoli et al. (2021): two softmaxes [B, N, T, S] and [N, T, S], mixed for each head and normalised."""
    mixed = jax.nn.sigmoid(gate)[None, :, None, None]
    content = jax.nn.softmax(scores_of(query, key), axis=-1)
    weights = (1.0 - mixed) * content + mixed * jax.nn.softmax(positions, axis=-1)[None]
    weights /= weights.sum(axis=-1)[..., None]
    return (weights @ value).transpose(0, 2, 1, 3).reshape(BATCH, TOKENS, HEADS * WIDTH)


def squared_relu(query, key, value):
    """Multiply squared ReLU weights by the reciprocal of their mean, with tokens before heads."""
    query, key, value = (jnp.moveaxis(x, 1, 2) for x in (query, key, value))
    weights = jnp.square(jax.nn.relu(jnp.einsum("btnd,bsnd->bnts", query, key) / WIDTH))
    scale = 1 / (weights.mean(-1) + 0.01)
    weights = (weights * scale[..., None] / TOKENS).astype(value.dtype)
    return jnp.einsum("bnts,bsnd->btnd", weights, value)


def unit_length(query, key, value):
    """Divide sigmoids by the root of the sum of their squares, then mask them."""
    weights = jax.nn.sigmoid(scores_of(query, key))
    weights = jnp.where(CAUSAL, weights / jnp.sqrt(jnp.sum(weights**2, axis=-1, keepdims=True)), 0)
    return weights @ value


def divided_twice(query, key, value):
    weights = jnp.tril(jax.nn.softplus(scores_of(query, key)))
    weights = weights / weights.sum(-1, keepdims=True)
    weights = weights * np.abs(np.sin(DISTANCE)).astype(np.float32)
    return -(weights / (1 + weights.sum(-1, keepdims=True))) @ value


def grouped(query, key, value):
    """Share one key and value between all heads; the sum is also a result, without a gradient."""
    weights = jnp.where(CAUSAL, jnp.exp(jnp.tanh(jnp.einsum("bntd,bsd->bnts", query, key[:, 0]))) - 0.3, 0)
    total = jax.lax.stop_gradient(weights.sum(-1))
    output = jnp.einsum("bnts,bsd->bntd", weights / total[..., None], value[:, 0])
    return jnp.concatenate([output, total[..., None]], axis=-1)


def divided_afterwards(query, key, value):
    """Divide the output by the sum of the same weights."""
    weights = jnp.tril(jax.nn.softplus(scores_of(query, key) - 6))
    return weights @ value / jnp.maximum(weights.sum(-1), 1e-9)[..., None]


def chosen(query, key, value):
    """Guard a quotient with a guarded divisor, then divide by a function with a custom derivative."""
    before = jnp.where(CAUSAL & (DISTANCE > 0), jax.nn.relu(scores_of(query, key)), 0.0)
    total = before.sum(-1, keepdims=True)
    weights = jnp.where(total > 0, before / jnp.where(total > 0, total, 1.0), 0.0)
    others = before * jax.nn.sigmoid(scores_of(key, query))
    return (weights / jax.nn.softplus(others.sum(-1, keepdims=True))) @ value


def standing(query, key, value):
    """Stop the gradient of one quotient, and of one of two sums in another."""
    weights = jax.nn.sigmoid(scores_of(query, key))
    first = jax.lax.stop_gradient(weights / weights.sum(-1, keepdims=True)) @ value
    second = weights / (weights.sum(-1, keepdims=True) + jax.lax.stop_gradient(jnp.square(weights).sum(-1))[..., None])
    return first + second @ value


def turned(query, key, value):
    """Use angles of outer products, which contract no axis, before a quotient."""
    angles = jnp.einsum("t,d->td", jnp.arange(TOKENS, dtype=query.dtype), 2.0 ** -jnp.arange(WIDTH, dtype=query.dtype))
    query, key = (x * jnp.cos(angles)[None, None] for x in (query, key))
    return normalised_again(
        query, key, value, 1.5 + jnp.cos(jnp.einsum("t,s->ts", angles[:, 1], angles[:, 2]))[None, None]
    )


_HEADS = [(BATCH, HEADS, TOKENS, WIDTH)] * 3
CASES = {
    normalised_again: [*_HEADS, (BATCH, 1, TOKENS, TOKENS)],
    linear_attention: _HEADS,
    cosine_weights: _HEADS,
    retention: _HEADS,
    mlstm: [*_HEADS, (2, BATCH, HEADS, TOKENS)],
    gated_positions: [*_HEADS, (HEADS,), (HEADS, TOKENS, TOKENS)],
    squared_relu: _HEADS,
    unit_length: _HEADS,
    divided_twice: _HEADS,
    grouped: _HEADS,
    divided_afterwards: _HEADS,
    chosen: _HEADS,
    standing: _HEADS,
    turned: _HEADS,
}


def arrays(function, dtype="float32"):
    generator = np.random.default_rng(0)
    given = [jnp.asarray(generator.normal(size=shape), dtype) for shape in CASES[function]]
    if function is normalised_again:
        given[3] = (given[3] > -0.5).astype(dtype)
    return given


@pytest.mark.parametrize(("function", "implementation"), alternated(CASES))
def test_deferred_division_matches_the_reference_with_gradients(function, implementation):
    given = arrays(function)
    found = compiled_gradients(fuse(function, implementation=implementation), given)
    assert_alike(found, expected_results(function, given))


@pytest.mark.parametrize("implementation", ["xla", "triton"])
@pytest.mark.parametrize("function", [linear_attention, normalised_again, squared_relu])
def test_deferred_division_in_half_precision_is_accurate(function, implementation):
    given = arrays(function, "bfloat16")
    assert_as_good_as_written(function, fuse(function, implementation=implementation), given)


@pytest.mark.parametrize("function", CASES)
def test_unnormalised_scores_are_computed_in_tiles(function):
    found = explain(function)(*arrays(function))
    # A sum of other weights than those of the product is a region of its own.
    sums = {unit_length: 2, divided_twice: 3, gated_positions: 2, chosen: 2, standing: 3}
    assert len(found.regions) == sums.get(function, 1)
    assert found.outside.get("dot_general", 0) == (1 if function is turned else 0), found.outside


def test_linear_attention_skips_masked_tiles():
    shape = jax.ShapeDtypeStruct((1, 1, 1024, 16), jnp.float32)
    (region,) = explain(linear_attention)(shape, shape, shape).regions
    assert region.skipped > 0.2


@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_weights_beyond_the_float16_range_before_division_stay_accurate(implementation):
    def large(query, key, value):
        power = jnp.tril(jnp.exp(6 * query.astype(jnp.float32) @ key.astype(jnp.float32).mT / 4))
        return (power / power.sum(-1, keepdims=True)).astype(value.dtype) @ value

    given = arrays(linear_attention, "float16")
    found = fuse(large, implementation=implementation)(*given)
    np.testing.assert_allclose(found.astype("float32"), large(*given).astype("float32"), rtol=0, atol=5e-3)


def test_dropout_after_the_quotient_keeps_the_mean():
    def dropped(query, key, value, rng):
        weights = jnp.tril(jax.nn.softplus(scores_of(query, key)))
        weights = weights / weights.sum(-1, keepdims=True)
        keep = jax.random.bernoulli(rng, 0.75, weights.shape)
        return jnp.where(keep, weights / 0.75, 0) @ value

    query, key, value = arrays(linear_attention)
    given = (query, key, jnp.ones_like(value), jax.random.key(3))
    output = fuse(dropped)(*given)
    assert abs(float(output.mean()) - 1) < 0.05
    assert float(output.std()) > 0.05
    np.testing.assert_array_equal(output, fuse(dropped)(*given))


def test_deferred_division_under_jit_vmap_and_grad_matches_the_reference():
    given = [jnp.stack([x, 2 * x, -x]) for x in arrays(mlstm)]

    def gradient(function):
        return jax.grad(lambda *x: jnp.sum(jnp.sin(function(*x))), range(4))

    found = jax.jit(jax.vmap(gradient(fuse(mlstm))))(*given)
    assert_alike(found, jax.vmap(gradient(mlstm))(*given), 1e-4)


def test_layers_of_both_kinds_are_fused():
    def model(query, key, value):
        hidden = linear_attention(query, key, value)
        hidden = jax.nn.softmax(scores_of(hidden, key), axis=-1) @ value
        return retention(hidden, hidden, value)

    given = arrays(retention)
    assert len(explain(model)(*given).regions) == 3
    np.testing.assert_allclose(fuse(model)(*given), model(*given), rtol=2e-5, atol=2e-5)


def test_softmax_by_hand_stays_a_softmax():
    def softmax_by_hand(query, key, value):
        power = jnp.exp(scores_of(query, key))
        return power / (power.sum(-1, keepdims=True) + 1.0) @ value

    (region,) = explain(softmax_by_hand)(*arrays(retention)).regions
    assert region.has_softmax


def test_norms_and_projections_of_layers_are_not_rewritten(monkeypatch):
    """Each attempt takes about a second, and a model has many norms and projections."""

    def norm(x):
        return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)

    def layer(query, key, value, weight):
        query, key = norm(query), norm(key)
        hidden = jax.nn.softmax(scores_of(query, key), axis=-1) @ value
        hidden = norm(jnp.einsum("bntd,ndc->btc", hidden, weight))
        return norm(hidden @ weight.reshape(-1, WIDTH).T) @ weight.reshape(-1, WIDTH)

    def fail(*_):
        raise AssertionError("a program is written anew")

    monkeypatch.setattr("blockdiag.fusion.passes.defer_division.rewritten", fail)
    monkeypatch.setattr("blockdiag.fusion.passes.merge_contractions.rewritten", fail)
    shape = jax.ShapeDtypeStruct((HEADS, WIDTH, WIDTH), jnp.float32)
    program = trace(layer, [*(jax.ShapeDtypeStruct(x, jnp.float32) for x in _HEADS), shape], {})
    assert len(program.regions) == 1


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_deferred_division_kernels_compile_without_spills(arch):
    given = [jax.ShapeDtypeStruct((BATCH, HEADS, 256, 64), jnp.bfloat16)] * 3
    ((region,),) = trace(linear_attention, given, {}).regions.values()
    for launch in launches_of(region).values():
        assert report_of(launch.plan(Target.for_arch(arch)), arch).spill_bytes == 0


def by_largest(query, key, value):
    weights = jax.nn.relu(scores_of(query, key))
    return weights / weights.max(-1, keepdims=True) @ value


def by_rank(query, key, value):
    weights = jnp.sort(jax.nn.relu(scores_of(query, key)), axis=-1)
    return weights / weights.sum(-1, keepdims=True) @ value


def by_both(query, key, value):
    weights = jax.nn.relu(scores_of(query, key))
    return weights / (weights.sum(-1, keepdims=True) + weights.max(-1, keepdims=True)) @ value


def by_queries(query, key, value):
    weights = jax.nn.softmax(scores_of(query, key), axis=-2)
    return weights / weights.sum(-1, keepdims=True) @ value


def rounded(query, key, value):
    """Convert weights to integers, which is not linear."""
    weights = jax.nn.sigmoid(scores_of(query, key))
    weights = (255 * weights / weights.sum(-1, keepdims=True)).astype(jnp.int32)
    return weights.astype(value.dtype) @ value


def rounded_softmax(query, key, value):
    weights = (255 * jax.nn.softmax(scores_of(query, key), axis=-1)).astype(jnp.int32)
    return weights.astype(value.dtype) @ value


@pytest.mark.parametrize("function", [by_largest, by_rank, by_both, by_queries, rounded, rounded_softmax])
def test_unsupported_row_statistics_raise_not_fusible(function):
    with pytest.raises(NotFusible):
        fuse(function)(*arrays(linear_attention))


def test_unfusible_function_with_fallback_runs_as_written():
    function = functools.partial(by_both)
    fused = fuse(function, fallback=True)
    given = arrays(linear_attention)
    np.testing.assert_array_equal(fused(*given), function(*given))
    assert len(fused.fallbacks) == 1
