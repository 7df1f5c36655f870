"""Functions of scores that treat NaN specially, and comparison of results with NaN."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

TOKENS, HEADS, WIDTH = 64, 2, 32

ROWS = (3, 17, 40)
"""Queries that have a NaN among their scores."""

FUNCTIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "as they are": lambda x: x,
    "maximum": lambda x: jnp.maximum(x, 0.25),
    "maximum, second": lambda x: jnp.maximum(0.25, x),
    "maximum of two": lambda x: jnp.maximum(x, -x),
    "minimum": lambda x: jnp.minimum(x, 0.25),
    "minimum, second": lambda x: jnp.minimum(0.25, x),
    "clip": lambda x: jnp.clip(x, -1, 1),
    "clip from below": lambda x: jnp.clip(x, min=-1),
    "clip from above": lambda x: jnp.clip(x, max=1),
    "clamp": lambda x: lax.clamp(jnp.asarray(-1, x.dtype), x, jnp.asarray(1, x.dtype)),
    "clamp by a lower bound": lambda x: lax.clamp(x, jnp.zeros_like(x), jnp.full_like(x, 5)),
    "clamp by an upper bound": lambda x: lax.clamp(jnp.full_like(x, -5), jnp.zeros_like(x), x),
    "relu": jax.nn.relu,
    "squared relu": lambda x: jax.nn.relu(x) ** 2,
    "relu6": jax.nn.relu6,
    "hard_tanh": jax.nn.hard_tanh,
    "hard_sigmoid": jax.nn.hard_sigmoid,
    "hard_swish": jax.nn.hard_swish,
    "leaky_relu": jax.nn.leaky_relu,
    "elu": jax.nn.elu,
    "softplus": jax.nn.softplus,
    "log_sigmoid": jax.nn.log_sigmoid,
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "abs": jnp.abs,
    "sign": lambda x: jnp.sign(x) + 0.125 * x,
    "sign alone": jnp.sign,
    "tanh": lambda x: 2 * jnp.tanh(x),
    "round": jnp.round,
    "floor": jnp.floor,
    "arctan2": lambda x: jnp.arctan2(x, 1 - x),
    "arctan2 of 0": lambda x: jnp.arctan2(jnp.zeros_like(x), x),
    "cbrt": lambda x: jnp.cbrt(jnp.abs(x) + 1),
    "power": lambda x: jnp.power(jnp.abs(x) + 1, 1.5),
    "power of 1": lambda x: jnp.power(jnp.ones_like(x), x),
    "power 0": lambda x: jnp.power(x, jnp.zeros_like(x)),
    "logaddexp": lambda x: jnp.logaddexp(x, 0.5 * x),
    "fmax": lambda x: jnp.fmax(x, 0.25),
    "nan_to_num": jnp.nan_to_num,
    "where positive": lambda x: jnp.where(x > 0, x, 0.0),
    "where not negative": lambda x: jnp.where(x < 0, 0.0, x),
    "where NaN": lambda x: jnp.where(jnp.isnan(x), 0.0, x),
    "where it is no NaN": lambda x: jnp.where(x == x, x, -1.0),
}


def attention(function: Callable[[jax.Array], jax.Array], mask: Any = None) -> Callable[..., jax.Array]:
    """Return attention by a function of scores, applied after a bias is added."""

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array) -> jax.Array:
        scores = jnp.einsum("tnh,snh->nts", query, key) / WIDTH**0.5 + bias
        scores = function(scores)
        if mask is not None:
            scores = jnp.where(mask, scores, -jnp.inf)
        return jnp.einsum("nts,snh->tnh", jax.nn.softmax(scores, axis=-1), value)

    return attend


def operands(dtype: Any = jnp.float32) -> list[jax.Array]:
    """Return query, key, value and a bias with NaN: one element of a row, two of another, and all of a third."""
    draw = np.random.default_rng(0)
    shapes = 3 * [(TOKENS, HEADS, WIDTH)] + [(HEADS, TOKENS, TOKENS)]
    *rest, bias = (draw.normal(size=shape).astype(np.float32) for shape in shapes)
    first, second, third = ROWS
    bias[:, first, 2] = np.nan
    bias[:, second, [0, 60]] = np.nan
    bias[:, third] = np.nan
    return [jnp.asarray(x, dtype) for x in (*rest, bias)]


def assert_same_nan(found: Sequence[Any], expected: Sequence[Any], tolerance: float) -> None:
    """Assert that NaN is in the same places of both, and that other elements are close."""
    for one, other in zip(found, expected, strict=True):
        one, other = (np.asarray(x, np.float32) for x in (one, other))
        np.testing.assert_array_equal(np.isnan(one), np.isnan(other))
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)
