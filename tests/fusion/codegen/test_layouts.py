"""Tests of arrays whose memory layout differs from the order in which kernels read them."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag import explain, fuse
from tests.fusion.fusion_support import arrays, assert_as_good_as_written, assert_fused
from tests.support import compiled_quickly

BATCH, QUERIES, KEYS, HEADS, FEATURES = 2, 19, 37, 3, 8


def heads_last(query, key, value, pairs):
    """Return attention with `pairs` [B, T, S, N, 2], which holds a bias and a factor of each head."""
    scores = jnp.einsum("btnh,bsnh->btsn", query, key) * FEATURES**-0.5 + pairs[..., 0]
    weights = jax.nn.softmax(scores, axis=2) * pairs[..., 1]
    return jnp.einsum("btsn,bsnh->btnh", weights, value)


def queries_last(query, key, value, pairs):
    """Return attention with a bias `pairs` [N, S, T], which is contiguous along the queries."""
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * FEATURES**-0.5 + pairs.mT[None]
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, axis=-1), value)


SHAPES = {heads_last: (BATCH, QUERIES, KEYS, HEADS, 2), queries_last: (HEADS, KEYS, QUERIES)}
FUNCTIONS = pytest.mark.parametrize("function", SHAPES, ids=lambda x: x.__name__)


def operands(function, dtype):
    generator = np.random.default_rng(0)
    shapes = [(BATCH, QUERIES, HEADS, FEATURES), *[(BATCH, KEYS, HEADS, FEATURES)] * 2, SHAPES[function]]
    return [np.asarray(generator.normal(size=shape), np.float32).astype(dtype) for shape in shapes]


def results(function, arguments):
    def total(*arguments):
        output = function(*arguments)
        return jnp.sum(jnp.sin(output)), output

    (_, output), gradients = compiled_quickly(jax.value_and_grad(total, (0, 1, 2, 3), has_aux=True))(*arguments)
    return output, *gradients


@FUNCTIONS
@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_fuse_of_transposed_layouts_matches_float64(function, implementation):
    with jax.enable_x64(True):
        expected = jax.tree.map(np.asarray, results(function, operands(function, np.float64)))
    found = results(fuse(function, implementation=implementation), operands(function, np.float32))
    for one, true in zip(found, expected, strict=True):
        assert one.dtype == jnp.float32
        np.testing.assert_allclose(one, true, rtol=0, atol=2e-5 * max(1.0, np.abs(true).max()))


@FUNCTIONS
def test_kernels_of_transposed_layouts_have_unit_stride(function):
    """Every load of a score array, and every store of its gradient, has a stride of 1."""
    source = explain(function)(*operands(function, np.float32)).source
    places = re.findall(r"p_(?:leaf|grad)\d+ \+ .*?[ro]_q\[:, None\] \* (\d+) \+ [ro]_k\[None, :\] \* (\d+)", source)
    assert len(places) >= 4
    smallest = functools.reduce(max, (min(map(int, strides)) for strides in places))
    assert smallest == 1


def matrices(query, key, value):
    """Return attention of query [H, T], key [H, S] and value [S, H]."""
    return jax.nn.softmax(query.T @ key * FEATURES**-0.5, axis=-1) @ value


def shared_queries(query, key, value):
    """Return attention of query [H, T] with key and value [B, S, H]."""
    scores = jnp.einsum("ht,bsh->bts", query, key) * FEATURES**-0.5
    return jnp.einsum("bts,bsh->bth", jax.nn.softmax(scores, axis=-1), value)


@pytest.mark.parametrize("keys", [KEYS, 300])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("function", [matrices, shared_queries])
def test_half_precision_queries_with_leading_features_are_accurate(function, dtype, keys):
    batch = [] if function is matrices else [BATCH]
    key = (FEATURES, keys) if function is matrices else (BATCH, keys, FEATURES)
    given = [x.astype(dtype) for x in arrays((FEATURES, QUERIES), key, (*batch, keys, FEATURES))]
    assert_as_good_as_written(function, jax.jit(fuse(function, implementation="xla")), given)


@pytest.mark.parametrize("layout", ["ntsh", "tsnh"])
def test_single_query_and_key_with_scores_in_memory_match_the_reference(layout):
    def function(query, key, value, pairs):
        scores = jnp.einsum("tnh,snh->nts", query, key)
        bias = jnp.einsum(f"{layout},h->nts", pairs, query[0, 0])
        return jnp.einsum("nts,snh->tnh", jax.nn.sigmoid(scores) * bias, value)

    shape = (1, HEADS, FEATURES)
    sizes = {"n": HEADS, "h": FEATURES}
    assert_fused(function, arrays(shape, shape, shape, tuple(sizes.get(x, 1) for x in layout)))


def heads_in_the_batch(query, key, value, hidden):
    """Return attention of query [T, B, N H] with heads merged into the batch, except for the mask `hidden` [B, S]."""
    query, key, value = (x.reshape(len(x), -1, FEATURES).swapaxes(0, 1) for x in (query, key, value))
    scores = (query @ key.mT).reshape(len(hidden), -1, query.shape[1], key.shape[1])
    scores = jnp.where(hidden[:, None, None] > 0, -jnp.inf, scores)
    return jax.nn.softmax(scores.reshape(-1, *scores.shape[2:]), axis=-1) @ value


def windows_in_the_batch(query, key, value, mask):
    """Return attention of operands [B W, N, T, H] within windows of images, with mask [W, T, T]."""
    scores = query @ key.mT
    scores = scores.reshape(-1, len(mask), *scores.shape[1:]) + mask[None, :, None]
    return jax.nn.softmax(scores.reshape(-1, *scores.shape[2:]), axis=-1) @ value


MERGED = {
    heads_in_the_batch: lambda t: ((t, BATCH, HEADS * FEATURES), *[(9, BATCH, HEADS * FEATURES)] * 2, (BATCH, 9)),
    windows_in_the_batch: lambda t: (*[(4, HEADS, t, FEATURES)] * 3, (2, t, t)),
}


@pytest.mark.parametrize("tokens", [2, FEATURES, FEATURES + 1])
@pytest.mark.parametrize("function", MERGED, ids=lambda x: x.__name__)
def test_few_tokens_of_merged_axes_read_queries_and_keys(function, tokens):
    """Kernels read queries and keys even if the scores are no larger."""
    given = arrays(*MERGED[function](tokens))
    (region,) = explain(function)(*given).regions
    assert {"query", "key"} <= {leaf.role for leaf in region.leaves}
    assert_fused(function, given)
