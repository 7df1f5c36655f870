"""Gradients under `jax.vmap`: each index has its own, of operands that are mapped and of operands that are not."""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag import fuse
from tests.support import compiled_quickly

HAS_TRITON = importlib.util.find_spec("triton") is not None
NEEDS_TRITON = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
BOTH = pytest.mark.parametrize("implementation", ["xla", pytest.param("triton", marks=NEEDS_TRITON)])
INDICES, ROWS, QUERIES, KEYS, HEADS, WIDTH = 3, 2, 19, 37, 2, 16


def biased(query, key, value, bias, row, column, slope):
    """query [B, T, N, H], key, value [B, S, N, H], bias [N, T, S], row [B, T], column [N, S], slope []."""
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * slope + bias[None]
    scores = scores - 0.5 * row[:, None, :, None] * scores + column[None, :, None, :]
    seen = jnp.arange(QUERIES)[:, None] + 5 >= jnp.arange(KEYS)[None, :]
    weights = jax.nn.softmax(jnp.where(seen[None, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bnts,bsnh->btnh", weights, value)


def of_distances(query, key, value, table):
    """table [rows, N], read by the distance between query and key."""
    apart = jnp.arange(QUERIES)[:, None] - jnp.arange(KEYS)[None, :]
    bias = table[jnp.clip(apart + 5, 0, len(table) - 1)].transpose(2, 0, 1)
    weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", query, key) + bias[None], axis=-1)
    return jnp.einsum("bnts,bsnh->btnh", weights, value)


def of_places(query, key, value, table):
    """table [rows, N], read by what is no distance; without a softmax."""
    places = jnp.arange(QUERIES)[:, None] * jnp.arange(KEYS)[None, :] % len(table)
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) + table[places].transpose(2, 0, 1)[None]
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.sigmoid(scores), value)


def of_two_regions(query, key, value, factor, sink):
    """A region of another region's result, and one of two softmaxes with a sink; factor [N], sink [N]."""

    def weights_of(scores):
        extra = jnp.broadcast_to(sink[None, :, None, None], (*scores.shape[:-1], 1))
        return jax.nn.softmax(jnp.concatenate([scores, extra], axis=-1), axis=-1)[..., :-1]

    scores = jnp.einsum("btnh,bsnh->bnts", query, key)
    weights = weights_of(scores) - factor[None, :, None, None] * weights_of(scores.swapaxes(0, 0) * 0.5)
    first = jnp.einsum("bnts,bsnh->btnh", weights, value)
    scores = jnp.einsum("btnh,bsnh->bnts", first, key)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, axis=-1), value)


QUERY, KEY, VALUE = (ROWS, QUERIES, HEADS, WIDTH), (ROWS, KEYS, HEADS, WIDTH), (ROWS, KEYS, HEADS, WIDTH)
SHAPES = {
    biased: (QUERY, KEY, VALUE, (HEADS, QUERIES, KEYS), (ROWS, QUERIES), (HEADS, KEYS), ()),
    of_distances: (QUERY, KEY, VALUE, (9, HEADS)),
    of_places: (QUERY, KEY, VALUE, (7, HEADS)),
    of_two_regions: (QUERY, KEY, VALUE, (HEADS,), (HEADS,)),
}


def arrays(function, lead: tuple[int, ...] = (INDICES,)) -> list[jax.Array]:
    """Operands of each index of the mapped axes."""
    generator = np.random.default_rng(0)
    return [jax.device_put(0.5 * generator.normal(size=(*lead, *x)).astype(np.float32)) for x in SHAPES[function]]


def gradients(function, *inputs):
    """The gradient of a number by every input."""
    return jax.grad(lambda *given: jnp.sum(jnp.sin(function(*given))), tuple(range(len(inputs))))(*inputs)


def assert_close(found, expected, tolerance=1e-5):
    least = 1e-2 * max(float(np.abs(x).max()) for x in jax.tree.leaves(expected))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance * max(least, np.abs(other).max()))


def in_a_loop(function, is_mapped, inputs):
    """What `jax.vmap` computes, an index at a time."""
    each = [function(*(x[i] if flag else x for x, flag in zip(inputs, is_mapped, strict=True))) for i in range(INDICES)]
    return jax.tree.map(lambda *x: jnp.stack(x), *each)


def of_one_unmapped():
    return [
        pytest.param(function, place, id=f"{function.__name__}-{place}")
        for function, shapes in SHAPES.items()
        for place in range(len(shapes))
    ]


@BOTH
@pytest.mark.parametrize(("function", "place"), of_one_unmapped())
def test_an_operand_that_is_not_mapped(function, place, implementation):
    is_mapped = [i != place for i in range(len(SHAPES[function]))]
    inputs = [x if flag else x[0] for x, flag in zip(arrays(function), is_mapped, strict=True)]
    fused = functools.partial(gradients, fuse(function, implementation=implementation))
    axes = tuple(0 if flag else None for flag in is_mapped)
    found = compiled_quickly(jax.vmap(fused, axes))(*inputs)
    plain = compiled_quickly(functools.partial(gradients, function))
    assert_close(found, in_a_loop(plain, is_mapped, inputs))
