"""Tests of the equations around attention in one of several processes that share tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag.fusion.frontend.trace import flat_jaxpr, read
from blockdiag.fusion.runtime.token_parts import Parts

COUNT, TOKENS = 4, 8
DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(2, TOKENS, 6)).astype(np.float32)
WEIGHTS = DRAW.normal(size=(6, 5)).astype(np.float32)
TABLE = DRAW.normal(size=(3 * TOKENS, 6)).astype(np.float32)


def results_of_part(function, rank, x, *whole):
    """Return the results of a flat program whose first argument is a process's shard along axis 1."""
    closed, _ = flat_jaxpr(function, x, *whole)
    parts = Parts(rank, COUNT)
    known = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    known |= dict(zip(closed.jaxpr.invars, (np.split(x, COUNT, 1)[rank], *whole), strict=True))
    for equation in closed.jaxpr.eqns:
        results = parts.bind(equation, [read(known, operand) for operand in equation.invars])
        known |= dict(zip(equation.outvars, results, strict=True))
    return [read(known, result) for result in closed.jaxpr.outvars]


def place(x):
    """Return the positions of tokens [1, T, 1]."""
    return jnp.arange(x.shape[1], dtype=jnp.float32)[None, :, None]


def mixed_with_positions(x, weights, table):
    """Combine positions, table rows read by position and table rows that tokens select."""
    named = jnp.abs(3 * x[..., 0]).astype(jnp.int32)
    return x * jnp.cos(place(x)) + table[jnp.arange(x.shape[1]) + 2][None] + table[named]


def shared_axes(x, weights, table):
    """Return a dot product of each token with another array, plus the index of the token's largest element."""
    return jnp.einsum("btd,btd->bt", x, x + place(x)) + jnp.argmax(x, -1).astype(jnp.float32)


@pytest.mark.parametrize(
    ("function", "axis"),
    [
        (lambda x, weights, table: jax.nn.gelu(x @ weights).swapaxes(0, 1), 0),
        (lambda x, weights, table: x.reshape(2, TOKENS, 3, 2).transpose(2, 0, 1, 3)[:, :, None], 3),
        (lambda x, weights, table: x.reshape(2, TOKENS // 2, 12).reshape(2, TOKENS, 6), 1),
        (lambda x, weights, table: jnp.concatenate([x[:, :, ::-1], place(x) * x[..., :1]], -1), 1),
        (lambda x, weights, table: (x - x.mean(-1, keepdims=True)) / jnp.sqrt((x**2).sum(-1, keepdims=True)), 1),
        (shared_axes, 1),
        (lambda x, weights, table: jnp.pad(jnp.sort(x[0]), ((0, 0), (1, 2))).cumsum(-1)[None, :, 1:], 1),
        (lambda x, weights, table: x[:, :, jnp.array([4, 0])] + jnp.split(x, 3, -1)[1], 1),
        (mixed_with_positions, 1),
    ],
    ids=["product", "transpose", "groups", "concatenate", "norm", "shared axis", "sort", "elements", "positions"],
)
def test_results_of_token_shards_are_shards_of_the_results(function, axis):
    whole = np.split(np.asarray(function(X, WEIGHTS, TABLE)), COUNT, axis)
    for rank in range(COUNT):
        (found,) = results_of_part(function, rank, X, WEIGHTS, TABLE)
        np.testing.assert_allclose(found, whole[rank], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("function", "name", "reason"),
    [
        (lambda x: x.sum(1), "reduce_sum", ": it runs along tokens"),
        (lambda x: x.cumsum(1), "cumsum", ": it runs along tokens"),
        (lambda x: x[:, ::-1], "rev", ": it runs along tokens"),
        (lambda x: x[:, 1:], "slice", ": it selects some of the tokens"),
        (lambda x: jnp.pad(x, ((0, 0), (1, 0), (0, 0))), "pad", ": it pads tokens"),
        (lambda x: jnp.concatenate([x, x], 1), "concatenate", ": it runs along tokens"),
        (lambda x: x @ x.mT, "dot_general", ": its operand is queries by keys"),
        (lambda x: x.mT @ x, "dot_general", ": it sums over tokens"),
        (lambda x: x[:, :, None] * x[:, None], "mul", ": its operand is queries by keys"),
        (lambda x: x.reshape(-1, 6), "reshape", ": tokens are not the slowest part of an axis"),
        (lambda x: x[:, jnp.array([1, 0])], "gather", ": it gathers tokens by index"),
        (lambda x: jax.nn.relu(x), "custom_jvp_call", ""),
    ],
    ids=lambda x: x if isinstance(x, str) and ":" not in x else "",
)
def test_equation_that_mixes_tokens_raises_value_error_with_its_line(function, name, reason):
    message = f"`{name}` at .*test_token_parts.*may{reason}.*; compute it before or after the fused function"
    with pytest.raises(ValueError, match=message):
        results_of_part(function, 0, X)
