"""Attention that the streamed schedule of Hopper supports, and attention that it rejects."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from blockdiag.fusion.frontend.trace import flat_jaxpr
from blockdiag.fusion.ir.tree import Region
from blockdiag.fusion.regions.match import find_regions

type Shapes = dict[str, tuple[int, ...]]


def attend(query, key, value, change=lambda scores: scores):
    """Return attention of query [B, T, N, H], key [B, S, N, H] and value [B, S, N, V], with changed scores."""
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    return jnp.einsum("bnts,bsnv->btnv", jax.nn.softmax(change(scores), axis=-1), value)


def wide_result(query, key, value):
    """Return causal attention with a float32 result."""
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    seen = jnp.arange(key.shape[1])[None, :] <= jnp.arange(query.shape[1])[:, None]
    weights = jax.nn.softmax(where(scores, seen[None, None]), axis=-1)
    return jnp.einsum("bnts,bsnv->btnv", weights, value, preferred_element_type=jnp.float32)


def heads_first(query, key, value):
    """Return unscaled attention of query [B, N, T, H]."""
    return jax.nn.softmax(query @ key.mT, axis=-1) @ value


def grouped(query, key, value):
    """Return grouped-query attention of query [B, T, K, G, H] with key and value [B, S, K, H]."""
    scores = jnp.einsum("btkgh,bskh->bkgts", query, key) * query.shape[-1] ** -0.5
    return jnp.einsum("bkgts,bskh->btkgh", jax.nn.softmax(scores, axis=-1), value)


def differential(query, key, value):
    """Return differential attention of query and key [B, T, 2, N, H] with value [B, T, N, V]."""
    scores = jnp.einsum("btmnh,bsmnh->bmnts", query, key) * query.shape[-1] ** -0.5
    weights = jax.nn.softmax(scores, axis=-1)
    return jnp.einsum("bnts,bsnv->btnv", weights[:, 0] - 0.3 * weights[:, 1], value)


def soft_cap(query, key, value):
    return attend(query, key, value, lambda scores: 3 * jnp.tanh(scores / 3))


def clipped(query, key, value):
    return attend(query, key, value, lambda scores: jnp.clip(scores, -1, 1))


def sloped(query, key, value, slope):
    """Return attention with ALiBi slopes [N]."""
    away = (jnp.arange(key.shape[1])[None, :] - jnp.arange(query.shape[1])[:, None]).astype(slope.dtype)
    bias = 0.01 * jnp.abs(slope)[None, :, None, None] * away[None, None]
    return attend(query, key, value, lambda scores: scores + bias)


def tempered(query, key, value, temperature):
    """Return attention with scores scaled by exp(temperature [B, N, T])."""
    return attend(query, key, value, lambda scores: scores * jnp.exp(temperature)[..., None])


def gated(query, key, value, gate):
    """Return attention with weights scaled by tanh(gate [B, N, T])."""
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    weights = jax.nn.softmax(scores, axis=-1) * jnp.tanh(gate)[..., None]
    return jnp.einsum("bnts,bsnv->btnv", weights, value)


def with_sinks(query, key, value, *sinks):
    """Return causal attention whose softmax has further logits, each of which broadcasts to [B, N, T]."""
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    seen = jnp.arange(query.shape[1])[:, None] >= jnp.arange(key.shape[1])[None, :]
    logits = [jnp.broadcast_to(sink, scores.shape[:3])[..., None] for sink in sinks]
    weights = jax.nn.softmax(jnp.concatenate([where(scores, seen[None, None]), *logits], axis=-1), axis=-1)
    return jnp.einsum("bnts,bsnv->btnv", weights[..., : key.shape[1]], value)


def sunk(query, key, value, sink):
    """Return causal attention with a sink of each head, [N]."""
    return with_sinks(query, key, value, sink[None, :, None])


def sunk_twice(query, key, value, sink, logit):
    """Return causal attention with a sink of each head, [N], and a logit of each query, [B, N, T]."""
    return with_sinks(query, key, value, sink[None, :, None], 2 * logit)


def sunk_without_keys(query, key, value, sink):
    """Return attention with a sink [N], of which the first half of the queries sees no key."""
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    seen = jnp.arange(query.shape[1])[:, None] - jnp.arange(key.shape[1])[None, :] >= query.shape[1] // 2
    logits = jnp.broadcast_to(2 * sink[None, :, None, None], (*scores.shape[:3], 1))
    weights = jax.nn.softmax(jnp.concatenate([where(scores, seen[None, None]), logits], axis=-1), axis=-1)
    return jnp.einsum("bnts,bsnv->btnv", weights[..., : key.shape[1]], value)


def null_key(query, key, value, null):
    """Return causal attention with a further key [N, H] whose value is 0."""
    logit = jnp.einsum("btnh,nh->bnt", query, null) * query.shape[-1] ** -0.5
    return with_sinks(query, key, value, logit)


def where(scores, seen):
    return jnp.where(seen, scores, -jnp.inf)


def causal(query, key, value):
    """Return causal attention in which the last query sees all keys."""
    offset = key.shape[1] - query.shape[1]
    seen = jnp.arange(key.shape[1])[None, :] <= jnp.arange(query.shape[1])[:, None] + offset
    return attend(query, key, value, lambda scores: where(scores, seen[None, None]))


def causal_soft_cap(query, key, value):
    seen = jnp.arange(key.shape[1])[None, :] <= jnp.arange(query.shape[1])[:, None]
    return attend(query, key, value, lambda scores: where(3 * jnp.tanh(scores / 3), seen[None, None]))


def window(query, key, value):
    away = jnp.arange(query.shape[1])[:, None] - jnp.arange(key.shape[1])[None, :]
    return attend(query, key, value, lambda scores: where(scores, ((away >= 0) & (away < 600))[None, None]))


def global_and_local(query, key, value):
    """Return attention with a window, global keys and global queries, which give five ranges of tiles."""
    row, column = jnp.arange(query.shape[1])[:, None], jnp.arange(key.shape[1])[None, :]
    away = row - column
    seen = ((away < 400) & (away > -400)) | (column < 100) | (row < 100)
    return attend(query, key, value, lambda scores: where(scores, seen[None, None]))


def strided(query, key, value):
    """Return attention to keys at multiples of 256 and their neighbours; all query tiles share one list of tiles."""
    away = jnp.arange(query.shape[1])[:, None] - jnp.arange(key.shape[1])[None, :]
    return attend(query, key, value, lambda scores: where(scores, ((away >= 0) & (away % 256 < 8))[None, None]))


def far_away(query, key, value):
    """The first 640 queries see no key, and their results are 0."""
    row = jnp.arange(query.shape[1])
    seen = row[:, None] - jnp.arange(key.shape[1])[None, :] >= 640
    found = attend(query, key, value, lambda scores: jnp.where(seen[None, None], scores, -1e9))
    return jnp.where(row[None, :, None, None] >= 640, found, 0)


def added_mask(query, key, value):
    """Return causal attention with a mask that adds -1e9."""
    row = jnp.arange(query.shape[1])
    unseen = (row[:, None] < row[None, :])[None, None]
    return attend(query, key, value, lambda scores: scores + jnp.where(unseen, -1e9, 0.0))


def documents(query, key, value, segment):
    """Return causal attention within documents, given by integers `segment` [B, T]."""
    seen = jnp.arange(query.shape[1])[:, None] >= jnp.arange(key.shape[1])[None, :]
    same = segment[:, :, None] == segment[:, None, :]
    return attend(query, key, value, lambda scores: where(scores, (seen[None] & same)[:, None]))


def padded(query, key, value, length):
    """Return attention to the first `length` [B] keys; other scores are replaced by -1e9."""
    seen = jnp.arange(key.shape[1])[None, :] < length[:, None]
    return attend(query, key, value, lambda scores: jnp.where(seen[:, None, None, :], scores, -1e9))


def biased(query, key, value, pair):
    return attend(query, key, value, lambda scores: scores + pair)


def biased_keys(query, key, value, mask):
    return attend(query, key, value, lambda scores: scores + mask)


@dataclass(frozen=True)
class Streamed:
    """A call of attention.

    Attributes:
        streams: whether the streamed schedule applies.
    """

    function: Callable[..., jax.Array]
    shapes: Shapes
    dtype: str = "bfloat16"
    streams: bool = True

    def dtype_of(self, name: str) -> str:
        """Return the dtype of an argument."""
        return "int32" if name in ("segment", "length") else self.dtype

    def inputs(self, seed: int = 0) -> dict[str, jax.Array]:
        """Return the arguments, scaled so that weights are not uniform."""
        generator = np.random.default_rng(seed)
        found = {}
        for name, shape in self.shapes.items():
            match name:
                case "segment":
                    found[name] = np.sort(generator.integers(0, 3, shape), -1)
                case "length":
                    found[name] = generator.integers(1, self.shapes["key"][1], shape)
                case _:
                    found[name] = generator.normal(size=shape)
        return {name: jnp.asarray(x, self.dtype_of(name)) for name, x in found.items()}

    def region(self) -> Region:
        """Return the first region of the function."""
        given = {name: jax.ShapeDtypeStruct(x, self.dtype_of(name)) for name, x in self.shapes.items()}
        flat, _ = flat_jaxpr(lambda given: self.function(**given), given)
        return next(iter(find_regions(flat.jaxpr).values()))[0]


def _shapes(batch: int, queries: int, keys: int, heads: int, width: int, columns: int | None = None) -> Shapes:
    return {
        "query": (batch, queries, heads, width),
        "key": (batch, keys, heads, width),
        "value": (batch, keys, heads, columns or width),
    }


_HEADS_FIRST = dict.fromkeys(("query", "key", "value"), (2, 3, 512, 128))
_GROUPED = {"query": (2, 256, 2, 3, 128), "key": (2, 512, 2, 128), "value": (2, 512, 2, 128)}
_DIFFERENTIAL = dict.fromkeys(("query", "key"), (1, 512, 2, 1, 64)) | {"value": (1, 512, 1, 128)}
CASES = {
    "cross": Streamed(attend, _shapes(2, 128, 640, 3, 128)),
    "one_chunk": Streamed(attend, _shapes(2, 256, 128, 2, 128)),
    "clipped": Streamed(clipped, _shapes(2, 128, 640, 3, 128)),
    "wide_values": Streamed(attend, _shapes(1, 256, 256, 2, 128, 256)),
    "wide": Streamed(attend, _shapes(1, 256, 512, 1, 256)),
    "much_wider_values": Streamed(attend, _shapes(1, 128, 512, 2, 64, 256)),
    "differential": Streamed(differential, _DIFFERENTIAL),
    "float16": Streamed(attend, _shapes(1, 128, 512, 2, 128), "float16"),
    "heads_first": Streamed(heads_first, _HEADS_FIRST),
    "grouped": Streamed(grouped, _GROUPED),
    "soft_cap": Streamed(soft_cap, _shapes(1, 128, 512, 2, 128)),
    "sloped": Streamed(sloped, _shapes(2, 128, 512, 3, 128) | {"slope": (3,)}),
    "tempered": Streamed(tempered, _shapes(2, 128, 512, 3, 128) | {"temperature": (2, 3, 128)}),
    "gated": Streamed(gated, _shapes(2, 128, 512, 3, 128) | {"gate": (2, 3, 128)}),
    "sunk": Streamed(sunk, _shapes(2, 384, 384, 2, 128) | {"sink": (2,)}),
    "sunk_twice": Streamed(sunk_twice, _shapes(2, 384, 384, 2, 64) | {"sink": (2,), "logit": (2, 2, 384)}),
    "sunk_without_keys": Streamed(sunk_without_keys, _shapes(1, 1280, 1280, 2, 128) | {"sink": (2,)}),
    "causal": Streamed(causal, _shapes(1, 640, 640, 2, 128)),
    "wide_result": Streamed(wide_result, _shapes(2, 640, 640, 2, 128)),
    "causal_wide_values": Streamed(causal, _shapes(1, 256, 512, 2, 128, 256)),
    "window": Streamed(window, _shapes(1, 1280, 1280, 2, 128)),
    "global_and_local": Streamed(global_and_local, _shapes(1, 1280, 1280, 1, 128)),
    "strided": Streamed(strided, _shapes(1, 2560, 2560, 1, 128)),
    "far_away": Streamed(far_away, _shapes(1, 1280, 1280, 1, 128)),
    "added_mask": Streamed(added_mask, _shapes(1, 512, 512, 2, 128)),
    "documents": Streamed(documents, _shapes(3, 640, 640, 2, 128) | {"segment": (3, 640)}),
    "padded": Streamed(padded, _shapes(4, 128, 640, 2, 128) | {"length": (4,)}),
    "narrow": Streamed(attend, _shapes(1, 128, 512, 2, 64)),
    "ninety_six": Streamed(causal, _shapes(1, 384, 384, 3, 96)),
    "latent": Streamed(causal, _shapes(1, 384, 384, 2, 192, 128)),
    "three_halves": Streamed(attend, _shapes(1, 256, 384, 2, 192)),
    "three_halves_wide_result": Streamed(wide_result, _shapes(1, 256, 256, 1, 192)),
    "narrow_causal": Streamed(causal, _shapes(2, 384, 384, 3, 64)),
    "causal_soft_cap": Streamed(causal_soft_cap, _shapes(1, 384, 384, 1, 128)),
    "causal_wide": Streamed(causal, _shapes(1, 384, 384, 2, 256)),
    "narrower_values": Streamed(attend, _shapes(1, 128, 2048, 2, 128, 64), streams=False),
    "odd_queries": Streamed(attend, _shapes(1, 100, 512, 2, 128), streams=False),
    "odd_keys": Streamed(attend, _shapes(1, 128, 600, 2, 128), streams=False),
    "float32": Streamed(attend, _shapes(1, 128, 512, 2, 128), "float32", streams=False),
    "biased": Streamed(biased, _shapes(1, 128, 512, 2, 128) | {"pair": (1, 2, 128, 512)}, streams=False),
    "biased_keys": Streamed(biased_keys, _shapes(1, 128, 512, 2, 128) | {"mask": (1, 1, 1, 512)}, streams=False),
    "narrow_sloped": Streamed(sloped, _shapes(1, 128, 512, 3, 64) | {"slope": (3,)}, streams=False),
    "narrow_causal_wide_values": Streamed(causal, _shapes(1, 384, 384, 2, 64, 128), streams=False),
    "null_key": Streamed(null_key, _shapes(1, 384, 384, 2, 128) | {"null": (2, 128)}),
    "narrow_soft_cap": Streamed(soft_cap, _shapes(1, 128, 512, 2, 64), streams=False),
}
