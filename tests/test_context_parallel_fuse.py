"""Fused attention of sequences whose tokens four devices share, or two of them, beside one device."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from blockdiag import ContextParallel, fuse
from tests.division_support import KINDS, count_collectives, make_mesh, shard

TOKENS, HEADS, KEY_HEADS, WIDTH = 64, 8, 4, 8
TOKENS_SHARED = P(None, "model")


def random_arrays(*shapes):
    draw = np.random.default_rng(0)
    return [jnp.asarray(draw.normal(size=shape), jnp.float32) for shape in shapes]


def operands(batch=1, key_heads=KEY_HEADS, tokens=TOKENS):
    keys = (batch, tokens, key_heads, WIDTH)
    return random_arrays((batch, tokens, HEADS, WIDTH), keys, keys)


def attend(query, key, value, mask_of, bias=None):
    """Query heads as groups of key heads; `mask_of` rows and columns, and a bias [key heads, group, T, S] or less."""
    batch, tokens, heads, width = query.shape
    query = (query * width**-0.5).reshape(batch, tokens, key.shape[2], -1, width)
    scores = jnp.einsum("btkgh,bskh->bkgts", query, key)
    if bias is not None:
        scores = scores + bias[None]
    row, column = jnp.arange(tokens)[:, None], jnp.arange(key.shape[1])[None, :]
    scores = jnp.where(mask_of(row, column), scores, -jnp.inf)
    return jnp.einsum("bkgts,bskh->btkgh", jax.nn.softmax(scores), value).reshape(batch, tokens, heads, width)


def causal(query, key, value):
    return attend(query, key, value, lambda row, column: row >= column)


def window(query, key, value):
    return attend(query, key, value, lambda row, column: (row >= column) & (row - column < 20))


def documents(query, key, value, number):
    """`number` says of each token which document it is of."""
    return attend(query, key, value, lambda row, column: (row >= column) & (number[:, None] == number[None, :]))


def prefix(query, key, value, length):
    return attend(query, key, value, lambda row, column: (row >= column) | (column < length))


def biased(query, key, value, bias):
    return attend(query, key, value, lambda row, column: row >= column, bias)


def gradients_of(function, count):
    """The result and the gradients by the first arrays, of a cotangent that depends on the place."""

    def compute(*arrays):
        output, pull_back = jax.vjp(lambda *some: function(*some, *arrays[count:]), *arrays[:count])
        return output, pull_back(jnp.cos(3 * output))

    return compute


def assert_shared(function, arrays, specs, kind, context, *, shape=(1, 4), collectives=None, count=3):
    """Assert that devices that share tokens compute what one device does, gradients too, and the same twice.

    Args:
        function: of arrays; what is fused.
        arrays: of one device.
        specs: of the arrays on the mesh; those that are missing are on all devices.
        kind, shape: of the mesh.
        context: which devices share tokens.
        collectives: how many of each the program has.
        count: arrays that have gradients.
    """
    mesh = make_mesh(kind, shape)
    expected = jax.jit(gradients_of(fuse(function), count))(*arrays)
    context = dataclasses.replace(context, mesh=mesh) if kind == "automatic" else context
    compute = gradients_of(fuse(function, context_parallel=context), count)
    specs = [*specs, *[P()] * (len(arrays) - len(specs))]
    with jax.set_mesh(mesh) if kind == "explicit" else contextlib.nullcontext():
        placed = [shard(mesh, x, spec) for x, spec in zip(arrays, specs, strict=True)]
        compiled = jax.jit(compute).lower(*placed).compile()
        found, again = compiled(*placed), compiled(*placed)
    for one, other, second in zip(*map(jax.tree.leaves, (found, expected, again)), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5 * np.abs(other).max())
        np.testing.assert_array_equal(one, second)
    sharded = NamedShardings(mesh, specs[0])
    assert all(sharded.are_of(x) for x in (found[0], *found[1][:3]))
    counts = count_collectives(compiled.as_text())
    assert collectives is None or counts == collectives, counts


@dataclasses.dataclass
class NamedShardings:
    """How the first array and the results are sharded."""

    mesh: jax.sharding.Mesh
    spec: P

    def are_of(self, x):
        return x.sharding.is_equivalent_to(jax.sharding.NamedSharding(self.mesh, self.spec), x.ndim)


EXCHANGES = {"all-to-all": 8}
NUMBERS = jnp.asarray(np.sort(np.random.default_rng(1).integers(0, 4, TOKENS)), jnp.int32)
MASKS = {
    "causal": (causal, ()),
    "window": (window, ()),
    "documents": (documents, (NUMBERS,)),
    "prefix": (prefix, (jnp.int32(10),)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mask", MASKS)
def test_tokens_are_exchanged_for_heads(mask, kind):
    function, more = MASKS[mask]
    specs = [TOKENS_SHARED] * 3 + [P("model") if mask == "documents" else P()] * len(more)
    moves = EXCHANGES | ({"all-gather": 1} if mask == "documents" else {})
    assert_shared(function, [*operands(), *more], specs, kind, ContextParallel("model"), collectives=moves)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mask", MASKS)
def test_keys_are_gathered(mask, kind):
    function, more = MASKS[mask]
    specs = [TOKENS_SHARED] * 3 + [P("model") if mask == "documents" else P()] * len(more)
    assert_shared(function, [*operands(key_heads=2), *more], specs, kind, ContextParallel("model"))
