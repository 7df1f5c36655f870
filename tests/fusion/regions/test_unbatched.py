"""Tests of attention without softmax and batch axis, whose operands look like the matrices of a dense layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag import NotFusible, explain, fuse
from tests.fusion.fusion_support import assert_fused

QUERIES, KEYS, HEADS, WIDTH, COLUMNS = 21, 37, 3, 8, 5


def sigmoid(query, key, value):
    """Return sigmoid attention of query [T, H], key [S, H] and value [S, D]."""
    return jax.nn.sigmoid(query @ key.T / 3 - 1) @ value


def squared(query, key, value):
    scores = jnp.einsum("th,sh->ts", query, key)
    is_seen = jnp.arange(QUERIES)[:, None] + KEYS - QUERIES >= jnp.arange(KEYS)[None]
    weights = jnp.square(jax.nn.relu(jnp.where(is_seen, scores, 0.0)))
    return jnp.einsum("ts,sd->td", weights, value)


def divided(query, key, value):
    weights = jnp.square(jax.nn.relu(query @ key.T))
    return weights / (weights.sum(-1, keepdims=True) + 1e-3) @ value


def divided_late(query, key, value):
    weights = jnp.square(jax.nn.relu(query @ key.T))
    return weights @ value / (weights.sum(-1, keepdims=True) + 1e-3)


def of_heads(query, key, value):
    """Return attention of three query heads that share all keys and values."""
    scores = jnp.einsum("nth,sh->nts", jnp.stack([query, 2 * query, -query]), key) - 2
    return jnp.einsum("nts,sd->ntd", jax.nn.silu(scores), value)


def arrays(*shapes):
    draw = np.random.default_rng(3)
    return [jnp.asarray(draw.normal(size=shape), jnp.float32) for shape in shapes]


def operands():
    return arrays((QUERIES, WIDTH), (KEYS, WIDTH), (KEYS, COLUMNS))


@pytest.mark.parametrize("function", [sigmoid, squared, divided, divided_late, of_heads])
@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_unbatched_attention_matches_the_reference_with_gradients(function, implementation):
    assert_fused(function, operands(), implementation)


def test_unbatched_attention_under_vmap_matches_the_reference():
    given = [jnp.stack([x, 0.5 * x]) for x in operands()]
    assert_fused(jax.vmap(sigmoid), given)
    mapped = jax.vmap(fuse(sigmoid))(*given)
    np.testing.assert_allclose(mapped, jax.vmap(sigmoid)(*given), rtol=0, atol=1e-5)


LAYERS = {
    "matrices": (lambda x, up, down: jax.nn.relu(x @ up) @ down, (WIDTH, KEYS), (KEYS, COLUMNS)),
    "gated": (lambda x, up, down: (jax.nn.silu(x @ up) * (x @ up)) @ down, (WIDTH, KEYS), (KEYS, COLUMNS)),
    "matrices that lie the other way round": (
        lambda x, up, down: jax.nn.sigmoid(x @ up.T) @ down.T, (KEYS, WIDTH), (COLUMNS, KEYS)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_unbatched_dense_layers_raise_not_fusible(name):
    layer, up, down = LAYERS[name]
    with pytest.raises(NotFusible):
        fuse(layer)(*arrays((QUERIES, WIDTH), up, down))


def test_unbatched_sigmoid_attention_beside_a_softmax_is_not_fused():
    """If there is attention with a softmax, XLA computes products that may be a dense layer."""

    def model(query, key, value):
        weights = jax.nn.softmax(query @ key.T)
        return weights @ value + sigmoid(query, key, value)

    (region,) = explain(model)(*operands()).regions
    assert region.has_softmax
    assert_fused(model, operands())


def test_unfusible_softmax_beside_unbatched_attention_raises_not_fusible():
    def model(query, key, value):
        return jnp.sort(jax.nn.softmax(query @ key.T)) @ value + sigmoid(query, key, value)

    with pytest.raises(NotFusible, match="`sort`"):
        fuse(model)(*operands())
