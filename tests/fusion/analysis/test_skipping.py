"""Tests of tiles that other masks than `where(mask, score, -inf)` rule out, such as added and multiplied masks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag import explain, fuse
from tests.fusion.streamed_cases import CASES as STREAMED

TOKENS, HEADS, SIZE = 200, 1, 16


def products(query, key):
    return jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5


def distance(query):
    positions = jnp.arange(query.shape[1])
    return positions[:, None] - positions[None, :]


def added(query, key, value):
    scores = products(query, key) + jnp.where(distance(query) >= 0, 0.0, -1e9)[None, None]
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, axis=-1), value)


def lowest_added(query, key, value):
    lowest = float(jnp.finfo(query.dtype).min)
    scores = products(query, key) + jnp.where(distance(query) >= 0, 0.0, lowest)[None, None]
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, axis=-1), value)


def window_by_factor(query, key, value):
    bias = (1 - (jnp.abs(distance(query)) <= 20).astype(query.dtype)) * -1e9
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(products(query, key) + bias[None, None], axis=-1), value)


def sigmoid(query, key, value):
    weights = jnp.where((distance(query) >= 0)[None, None], jax.nn.sigmoid(products(query, key)), 0)
    return jnp.einsum("bnts,bsnh->btnh", weights, value)


def decay(query, key, value, rate):
    """Return attention whose weights decay with distance at `rate` [N], without a softmax."""
    away = jnp.maximum(distance(query), 0).astype(query.dtype)
    weights = products(query, key) * jnp.tril(jnp.exp(-jnp.exp(rate)[:, None, None] * away[None]))[None]
    return jnp.einsum("bnts,bsnh->btnh", weights, value)


def written(query, key, value):
    """Return attention with a mask made by a scatter, as other libraries make it."""
    tokens = query.shape[1]
    bias = jnp.zeros((tokens, tokens)).at[jnp.triu_indices(tokens, 1)].set(-jnp.inf)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(products(query, key) + bias[None, None], axis=-1), value)


def written_at_numbers(query, key, value):
    tokens = query.shape[1]
    seen = jnp.zeros((tokens, tokens), bool).at[np.tril_indices(tokens)].set(True)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(products(query, key), axis=-1, where=seen[None, None]), value)


DOCUMENT = np.arange(TOKENS) // 70
WITHIN = np.where(DOCUMENT[:, None] == DOCUMENT, np.float32(0.5), np.float32(-1e9))


def documents_of_floats(query, key, value):
    """Return attention with an added mask that is not a function of distances."""
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(products(query, key) + WITHIN[None, None], axis=-1), value)


def biased_and_added(query, key, value, bias):
    """Return attention with a bias [N, T, T] and a mask that is added too."""
    mask = jnp.where(distance(query) >= 0, 0.0, -1e9)
    weights = jax.nn.softmax(products(query, key) + bias[None] + mask[None, None], axis=-1)
    return jnp.einsum("bnts,bsnh->btnh", weights, value)


def table_and_added(query, key, value, table):
    """Return attention with a table [41, N] of clipped distances, merged with the mask before it is added, as in T5."""
    away = distance(query)
    bias = table[jnp.clip(away, -20, 20) + 20].transpose(2, 0, 1) + jnp.where(away >= 0, 0.0, -jnp.inf)[None]
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(products(query, key) + bias[None], axis=-1), value)


def biased_before_the_scale(query, key, value, bias):
    """Return attention that scales scores and bias together, as Transformer-XL does."""
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) + bias[None]
    mask = jnp.where(distance(query) >= 0, 0.0, -1e9)
    weights = jax.nn.softmax(scores / SIZE**0.5 + mask[None, None], axis=-1)
    return jnp.einsum("bnts,bsnh->btnh", weights, value)


def biased_without_gradient(query, key, value, bias):
    return biased_and_added(query, key, value, jax.lax.stop_gradient(bias))


def biases_decide(query, key, value, bias):
    """Return attention in which bias [N, T, T] is also in the mask's predicate, so that it may be anything."""
    scores = jnp.where(bias[None] < 1e8, products(query, key) + bias[None] - 2e9, products(query, key))
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, axis=-1), value)


def learned_mask(query, key, value, keep):
    """Return attention with a factor `keep` [S], which is 0 in some tiles and has a derivative there."""
    weights = jax.nn.sigmoid(products(query, key)) * jnp.clip(keep, -1.0, 1.0)[None, None, None]
    return jnp.einsum("bnts,bsnh->btnh", weights, value)


def transducer(query, key, value, bias):
    """Return attention without a softmax, as in sequential transducers, with bias [N, T, S] and a mask as a factor."""
    weights = jax.nn.silu(products(query, key) + bias[None]) / TOKENS * jnp.tri(TOKENS)[None, None]
    return jnp.einsum("bnts,bsnh->btnh", weights, value)


def bias_of_no_softmax_decides(query, key, value, bias):
    weights = jnp.where((bias < -1e8)[None], jax.nn.silu(products(query, key)), 0)
    return jnp.einsum("bnts,bsnh->btnh", weights, value)


WRITTEN = (written, written_at_numbers)
OF_PAIRS = (biased_and_added, biased_before_the_scale, biased_without_gradient, transducer)
BIASED = (*OF_PAIRS, table_and_added)
SKIPPED = dict.fromkeys(
    (added, lowest_added, window_by_factor, sigmoid, decay, *WRITTEN, documents_of_floats, *BIASED), 0.2
)


def operands(function):
    query, key, value = jax.random.normal(jax.random.key(0), (3, 1, TOKENS, HEADS, SIZE))
    if function is decay:
        return query, key, value, jnp.array([-2.0])
    if function in (*OF_PAIRS, biases_decide, bias_of_no_softmax_decides):
        return query, key, value, jax.random.normal(jax.random.key(2), (HEADS, TOKENS, TOKENS))
    if function is table_and_added:
        return query, key, value, jax.random.normal(jax.random.key(2), (41, HEADS))
    if function is learned_mask:
        return query, key, value, jnp.where(jnp.arange(TOKENS) < 128, 0.0, 0.5)
    return query, key, value


@pytest.mark.parametrize("function", SKIPPED, ids=lambda function: function.__name__)
def test_fuse_skips_tiles_that_masks_rule_out(function):
    (region,) = explain(function)(*operands(function)).regions
    assert region.skipped >= SKIPPED[function]
    rows, columns = region.tile
    weights = np.asarray(distance(jnp.ones((1, TOKENS))))
    others = {window_by_factor: np.abs(weights) <= 20, documents_of_floats: WITHIN > 0}
    needed = others.get(function, weights >= 0)
    for row, line in enumerate(region.live.reshape(-1, *region.live.shape[-2:])[0]):
        for column, is_visited in enumerate(line):
            tile = needed[row * rows : (row + 1) * rows, column * columns : (column + 1) * columns]
            assert is_visited or not tile.any()


@pytest.mark.parametrize("function", WRITTEN, ids=lambda function: function.__name__)
def test_scatter_masks_are_computed_from_positions(function):
    (region,) = explain(function)(*operands(function)).regions
    assert {leaf.role for leaf in region.leaves} == {"query", "key", "row", "column"}


def test_mask_with_a_traced_value_at_known_positions_is_not_an_array():
    """The indices of the scatter are known, but the written value is not."""

    def function(query, key, value, most):
        bias = jnp.zeros((TOKENS, TOKENS)).at[jnp.triu_indices(TOKENS, 1)].set(most)
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(products(query, key) + bias[None, None], axis=-1), value)

    given = (*operands(function), jnp.float32(-1))
    (region,) = explain(function)(*given).regions
    assert "score" not in [leaf.role for leaf in region.leaves] and region.skipped == 0
    np.testing.assert_allclose(fuse(function, implementation="xla")(*given), function(*given), atol=1e-5)


@pytest.mark.parametrize(
    "function",
    [lowest_added, window_by_factor, decay, learned_mask, *WRITTEN, documents_of_floats, *BIASED],
    ids=lambda function: function.__name__,
)
def test_masked_functions_match_the_reference_with_gradients(function):
    given = operands(function)
    cotangent = jax.random.normal(jax.random.key(1), given[0].shape)

    def both(function, *given):
        output, pull = jax.vjp(function, *given)
        return output, pull(cotangent)

    found = jax.jit(functools.partial(both, fuse(function, implementation="triton")))(*given)
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(functools.partial(both, function))(*given)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-5 * max(1.0, float(np.abs(other).max())))


def test_learned_mask_tiles_are_not_skipped():
    (region,) = explain(learned_mask)(*operands(learned_mask)).regions
    assert region.live is None


@pytest.mark.parametrize("function", [biases_decide, bias_of_no_softmax_decides])
def test_biases_used_elsewhere_prevent_skipping(function):
    (region,) = explain(function)(*operands(function)).regions
    assert region.skipped == 0


POINTS = jax.random.uniform(jax.random.key(4), (TOKENS, 8), maxval=1e4)


def within_radius(points):
    squares = jnp.square(points).sum(-1)
    return squares[:, None] + squares[None] - 2 * points @ points.T < 1e8


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "seen_of",
    [within_radius, lambda x: x @ x.T > 1.5e8, lambda x: (x @ x.T < 1.5e8) & (x @ x.T - 1e8 >= 0)],
    ids=["radius", "alike", "between"],
)
@pytest.mark.parametrize("has_softmax", [True, False])
def test_mask_predicates_on_products_above_the_score_bound_stay_exact(seen_of, is_causal, has_softmax):
    """The predicates compare products of up to 8e8, so neither dead nor unmasked tiles may be assumed."""

    def function(query, key, value, points):
        seen = seen_of(points)
        seen = seen & (distance(query) >= 0) if is_causal else seen
        scores = products(query, key)
        if has_softmax:
            weights = jax.nn.softmax(jnp.where(seen[None, None], scores, -jnp.inf), axis=-1)
        else:
            weights = jnp.where(seen[None, None], jax.nn.sigmoid(scores), 0)
        return jnp.einsum("bnts,bsnh->btnh", weights, value)

    query, key, value = operands(function)
    found = fuse(function, implementation="triton")(query, key, value, POINTS)
    expected = function(query, key, value, POINTS)
    sees = np.asarray(jnp.isfinite(expected).all((0, 2, 3)))
    assert sees.sum() > TOKENS // 2
    np.testing.assert_allclose(np.asarray(found)[:, sees], np.asarray(expected)[:, sees], rtol=1e-4, atol=1e-4)


def test_masked_tiles_beside_leaky_scores_are_skipped():
    """The predicate of `leaky_relu` on the sign of scores does not prevent skipping."""

    def function(query, key, value):
        scores = jax.nn.leaky_relu(products(query, key)) + jnp.where(distance(query) >= 0, 0.0, -1e9)[None, None]
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, axis=-1), value)

    (region,) = explain(function)(*operands(function)).regions
    assert region.skipped > 0.2


def test_float_bias_arrays_are_not_inspected_for_skipping():
    def biased(query, key, value, bias):
        """Return attention with a bias [T, S]."""
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(products(query, key) + bias[None, None], axis=-1), value)

    bias = jnp.where(jnp.tri(TOKENS, dtype=bool), 0.0, -1e9)
    (region,) = explain(biased)(*operands(biased), bias).regions
    assert region.skipped == 0


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("lead", [(), (1,), (1, 1)], ids=str)
def test_mask_positions_are_never_array_leaves(batch, lead):
    """An axis of size 1 before a mask is not a batch axis, for which positions would be stored as an array."""

    def windowed(query, key, value):
        scores = jnp.einsum("btnh,bsnh->bnts", query, key)
        far = distance(query)
        seen = ((far >= 0) & (far <= 20)).reshape(*lead, *far.shape)
        seen = jax.lax.expand_dims(seen, range(2 - len(lead)))
        scores = jnp.where(seen, scores, -jnp.inf)
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, axis=-1), value)

    shape = jax.ShapeDtypeStruct((batch, 256, 2, 16), "bfloat16")
    (region,) = explain(windowed)(shape, shape, shape).regions
    positions = [leaf for leaf in region.leaves if leaf.role in ("row", "column")]
    assert len(positions) == 2 and all(not leaf.labels and leaf.shape == (256,) for leaf in positions)
    (text,) = [text for name, text in region.kernels.items() if name == "fused_forward"]
    assert "p_leaf0" not in text and "p_leaf1" not in text


def test_explain_counts_tiles_of_known_masks_beside_unknown_arrays():
    case = STREAMED["sunk"]
    given = {name: jax.ShapeDtypeStruct(shape, "bfloat16") for name, shape in case.shapes.items()}
    (region,) = explain(lambda given: case.function(**given))(given).regions
    # Tiles of 128 queries by 64 keys: 12 of 18 are visited.
    assert region.tile == (128, 64) and region.skipped == pytest.approx(1 / 3)
