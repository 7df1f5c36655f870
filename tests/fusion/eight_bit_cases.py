"""Attention with eight-bit queries, keys and values, and its results in float64."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from blockdiag.fusion.ir.tree import Region
from blockdiag.fusion.program import trace

type Function = Callable[..., jax.Array]


@dataclass(frozen=True)
class Dtypes:
    """The dtypes in which a function computes.

    Attributes:
        sums: the dtype of scores and results.
        weights: the dtype of the operands of the product with values.
    """

    sums: Any
    weights: Any


EXACT = Dtypes(np.float64, np.float64)


def scores_of(query, key, dtypes):
    """Return scaled scores of query [B, T, N, H] and key [B, S, N, H]."""
    scores = jnp.einsum("btnh,bsnh->bnts", query, key, preferred_element_type=dtypes.sums)
    return scores * query.shape[-1] ** -0.5


def attend(scores, value, dtypes):
    """Return attention with eight-bit values [B, S, N, V] widened, unless weights have eight bits too."""
    weights = jax.nn.softmax(scores, axis=-1).astype(dtypes.weights)
    return jnp.einsum("bnts,bsnv->btnv", weights, value.astype(dtypes.weights), preferred_element_type=dtypes.sums)


def full(dtypes, query, key, value):
    return attend(scores_of(query, key, dtypes), value, dtypes)


def seen_by(query, key):
    """Return a causal mask [T, S] in which the last query sees all keys."""
    offset = key.shape[1] - query.shape[1]
    return jnp.arange(key.shape[1])[None, :] <= jnp.arange(query.shape[1])[:, None] + offset


def causal(dtypes, query, key, value):
    scores = jnp.where(seen_by(query, key)[None, None], scores_of(query, key, dtypes), -jnp.inf)
    return attend(scores, value, dtypes)


def capped(dtypes, query, key, value):
    scores = 3 * jnp.tanh(scores_of(query, key, dtypes) / 3)
    return attend(jnp.where(seen_by(query, key)[None, None], scores, -1e9), value, dtypes)


def scaled_tokens(dtypes, query, key, value, query_scale, key_scale, value_scale):
    """Return attention with scales of query heads [N], and of key and value tokens [B, N, S]."""
    scores = scores_of(query, key, dtypes) * query_scale[None, :, None, None] * key_scale[:, :, None, :]
    wide = value.astype(dtypes.sums) * value_scale.swapaxes(1, 2)[..., None]
    weights = jax.nn.softmax(scores, axis=-1).astype(dtypes.weights)
    return jnp.einsum("bnts,bsnv->btnv", weights, wide.astype(dtypes.weights), preferred_element_type=dtypes.sums)


def scaled_heads(dtypes, query, key, value, query_scale):
    """Return causal attention with scales of heads [N]."""
    scores = scores_of(query, key, dtypes) * query_scale[None, :, None, None]
    return attend(jnp.where(seen_by(query, key)[None, None], scores, -jnp.inf), value, dtypes)


def scaled_weights(dtypes, query, key, value, value_scale):
    """Return attention with scales of value tokens [B, N, S] as factors of the weights."""
    weights = jax.nn.softmax(scores_of(query, key, dtypes), axis=-1) * value_scale[:, :, None, :]
    value = value.astype(dtypes.weights)
    return jnp.einsum("bnts,bsnv->btnv", weights.astype(dtypes.weights), value, preferred_element_type=dtypes.sums)


def gated(dtypes, query, key, value, gate):
    """Return attention with the weights of each query scaled by a gate [B, N, T]."""
    weights = jax.nn.softmax(scores_of(query, key, dtypes), axis=-1) * gate[..., None].astype(dtypes.sums)
    value = value.astype(dtypes.weights)
    return jnp.einsum("bnts,bsnv->btnv", weights.astype(dtypes.weights), value, preferred_element_type=dtypes.sums)


def sigmoid(dtypes, query, key, value):
    """Return attention without a softmax."""
    weights = jax.nn.sigmoid(scores_of(query, key, dtypes)).astype(dtypes.weights)
    return jnp.einsum("bnts,bsnv->btnv", weights, value.astype(dtypes.weights), preferred_element_type=dtypes.sums)


def two_dtypes(dtypes, query, key, value):
    """Multiply 16-bit weights and eight-bit values by `lax.dot_general`, which takes two dtypes."""
    weights = jax.nn.softmax(scores_of(query, key, dtypes), axis=-1).astype(dtypes.weights)
    numbers = (((3,), (1,)), ((0, 1), (0, 2)))
    return jax.lax.dot_general(weights, value, numbers, preferred_element_type=dtypes.sums)


def grouped(dtypes, query, key, value):
    """Return grouped-query attention: query [B, T, N, H], key and value [B, S, K, H]."""
    query = query.reshape(*query.shape[:2], key.shape[2], -1, query.shape[-1])
    scores = jnp.einsum("btkgh,bskh->bkgts", query, key, preferred_element_type=dtypes.sums) * query.shape[-1] ** -0.5
    weights = jax.nn.softmax(scores, axis=-1).astype(dtypes.weights)
    value = value.astype(dtypes.weights)
    return jnp.einsum("bkgts,bskh->btkgh", weights, value, preferred_element_type=dtypes.sums)


@dataclass(frozen=True)
class EightBit:
    """A call of attention.

    Attributes:
        function: a function of `Dtypes` and arrays.
        dtype: the dtype of queries, keys and values.
        dtypes: the dtypes in which the function computes.
        sizes: B, T, S, query heads, key heads, H and V.
        streams: whether the streamed schedule of Hopper applies.
    """

    function: Function
    dtype: str = "float8_e4m3fn"
    dtypes: Dtypes = Dtypes(np.float32, jnp.bfloat16)
    sizes: tuple[int, ...] = (2, 45, 77, 3, 3, 32, 32)
    streams: bool = False

    def inputs(self, seed: int = 0) -> dict[str, Any]:
        """Return the arguments, with queries that make weights uneven."""
        generator = np.random.default_rng(seed)
        batch, queries, keys, heads, key_heads, width, columns = self.sizes
        shapes = {
            "query": (batch, queries, heads, width),
            "key": (batch, keys, key_heads, width),
            "value": (batch, keys, key_heads, columns),
        }
        found = {name: jnp.asarray(generator.normal(size=x), self.dtype) for name, x in shapes.items()}
        others = {"query_scale": (heads,), "key_scale": (batch, heads, keys), "value_scale": (batch, heads, keys)}
        others |= {"gate": (batch, heads, queries)}
        names = self.function.__code__.co_varnames[: self.function.__code__.co_argcount]
        scales = {name: generator.uniform(0.5, 2, x) for name, x in others.items() if name in names}
        return found | {name: jnp.asarray(x, np.float32) for name, x in scales.items()}

    def __call__(self, *arrays: Any) -> jax.Array:
        """Call the function with the dtypes of the case."""
        return self.function(self.dtypes, *arrays)

    def region(self) -> Region:
        """Return the only region of the function."""
        given = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.inputs().values())
        ((region,),) = trace(self, given, {}).regions.values()
        return region

    def exact(self, inputs: dict[str, Any]) -> np.ndarray:
        """Return the result in float64."""
        wide = [np.asarray(x).astype(np.float64) for x in inputs.values()]
        with jax.enable_x64(True):
            return np.asarray(jax.jit(self.function, static_argnums=0)(EXACT, *wide))

    def allowed_error(self, inputs: dict[str, Any], exact: np.ndarray) -> float:
        """Return twice the error of the function itself, eager so that it rounds every value, plus 2 ulp of 16 bits."""
        naive = np.asarray(self(*inputs.values()), np.float64)
        unit = min(float(jnp.finfo(self.dtypes.weights).eps), 2.0**-7) / 2
        return 2 * np.abs(naive - exact).max() + 2 * unit * 2.0 ** np.ceil(np.log2(np.abs(exact).max()))


_E4M3, _E5M2 = (Dtypes(np.float32, jnp.dtype(x)) for x in ("float8_e4m3fn", "float8_e5m2"))
_SHORT_RESULT = Dtypes(jnp.bfloat16, _E4M3.weights)
_HALF, _HALF_RESULT = Dtypes(np.float32, np.float16), Dtypes(np.float16, np.float16)
_LONG = (1, 384, 640, 2, 2)
CASES = {
    "full": EightBit(full),
    "causal": EightBit(causal),
    "causal_e5m2": EightBit(causal, "float8_e5m2"),
    "causal_float16": EightBit(causal, "float8_e5m2", _HALF),
    "capped": EightBit(capped, sizes=(1, 70, 130, 2, 2, 64, 48)),
    "scaled_tokens": EightBit(scaled_tokens),
    "scaled_weights": EightBit(scaled_weights),
    "two_dtypes": EightBit(two_dtypes),
    "float32_values": EightBit(causal, dtypes=Dtypes(np.float32, np.float32)),
    "grouped": EightBit(grouped, sizes=(2, 33, 50, 6, 2, 16, 16)),
    "narrow": EightBit(full, dtypes=_E4M3, sizes=(1, 5, 3, 2, 2, 9, 7)),
    "one_query": EightBit(full, sizes=(3, 1, 200, 2, 2, 64, 64)),
    "eight_bit_values": EightBit(causal, dtypes=_E4M3),
    "eight_bit_values_e5m2": EightBit(causal, "float8_e5m2", _E5M2),
    "eight_bit_values_many_keys": EightBit(full, dtypes=_E4M3, sizes=(1, 17, 1500, 1, 1, 64, 64)),
    "eight_bit_scaled_weights": EightBit(scaled_weights, dtypes=_E4M3),
    "eight_bit_gated": EightBit(gated, dtypes=_E4M3),
    "eight_bit_sigmoid": EightBit(sigmoid, "float8_e5m2", _E5M2),
    "long": EightBit(full, sizes=(*_LONG, 128, 128), streams=True),
    "long_causal": EightBit(causal, sizes=(*_LONG, 128, 128), streams=True),
    "long_causal_e5m2": EightBit(causal, "float8_e5m2", _HALF, (*_LONG, 64, 64), streams=True),
    "long_parts": EightBit(causal, sizes=(*_LONG, 192, 128), streams=True),
    "long_ninety_six": EightBit(capped, sizes=(*_LONG, 96, 96), streams=True),
    "long_wide": EightBit(causal, sizes=(*_LONG, 256, 256), streams=True),
    "long_half": EightBit(full, dtypes=_HALF_RESULT, sizes=(*_LONG, 128, 128), streams=True),
    "long_scaled_heads": EightBit(scaled_heads, sizes=(*_LONG, 128, 128), streams=True),
    "long_values": EightBit(causal, dtypes=_E4M3, sizes=(*_LONG, 128, 128), streams=True),
    # Its columns are in two parts, which are not transposed.
    "long_values_ninety_six": EightBit(causal, dtypes=_E4M3, sizes=(*_LONG, 96, 96)),
    "long_values_e5m2": EightBit(full, "float8_e5m2", _E5M2, (*_LONG, 64, 64), streams=True),
    "long_values_one_chunk": EightBit(full, dtypes=_E4M3, sizes=(2, 256, 128, 2, 2, 64, 64), streams=True),
    "long_values_many_chunks": EightBit(full, dtypes=_E4M3, sizes=(1, 256, 2304, 1, 1, 64, 128), streams=True),
    "long_values_gated": EightBit(gated, dtypes=_SHORT_RESULT, sizes=(*_LONG, 64, 64), streams=True),
    "long_gated": EightBit(gated, sizes=(*_LONG, 128, 128), streams=True),
}
