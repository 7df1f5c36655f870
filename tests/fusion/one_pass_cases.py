"""Attention that the one-pass schedule of Hopper supports, and attention that it rejects."""

import jax.numpy as jnp

from tests.fusion import streamed_cases
from tests.fusion.streamed_cases import Streamed, attend, where


def causal_soft_cap(query, key, value):
    """Return causal attention with a soft cap."""
    seen = jnp.arange(query.shape[1])[:, None] >= jnp.arange(key.shape[1])[None, :]
    return attend(query, key, value, lambda scores: where(3 * jnp.tanh(scores / 3), seen[None, None]))


def numbered(query, key, value):
    """Return causal attention with the distance between positions as a bias."""
    away = jnp.arange(query.shape[1])[:, None] - jnp.arange(key.shape[1])[None, :]
    biased = (away >= 0)[None, None], (-0.01 * away.astype(query.dtype))[None, None]
    return attend(query, key, value, lambda scores: where(scores + biased[1], biased[0]))


def _shapes(batch, queries, keys, heads, width):
    return {"query": (batch, queries, heads, width)} | dict.fromkeys(("key", "value"), (batch, keys, heads, width))


_GROUPED = {"query": (1, 256, 2, 3, 64), "key": (1, 256, 2, 64), "value": (1, 256, 2, 64)}
CASES = {
    "full": Streamed(attend, _shapes(1, 256, 384, 2, 128)),
    "narrow": Streamed(attend, _shapes(2, 256, 128, 2, 64)),
    "causal": Streamed(streamed_cases.causal, _shapes(1, 384, 384, 2, 128)),
    "narrow_causal": Streamed(streamed_cases.causal, _shapes(1, 512, 512, 2, 64)),
    "cross": Streamed(streamed_cases.causal, _shapes(1, 256, 512, 1, 64)),
    "window": Streamed(streamed_cases.window, _shapes(1, 1280, 1280, 1, 64)),
    "global_and_local": Streamed(streamed_cases.global_and_local, _shapes(1, 1024, 1024, 1, 64)),
    "strided": Streamed(streamed_cases.strided, _shapes(1, 1024, 1024, 1, 64)),
    "far_away": Streamed(streamed_cases.far_away, _shapes(1, 896, 896, 1, 128)),
    "documents": Streamed(streamed_cases.documents, _shapes(2, 384, 384, 1, 64) | {"segment": (2, 384)}),
    "padded": Streamed(streamed_cases.padded, _shapes(3, 128, 384, 1, 128) | {"length": (3,)}),
    "soft_cap": Streamed(streamed_cases.soft_cap, _shapes(1, 128, 256, 1, 64)),
    "causal_soft_cap": Streamed(causal_soft_cap, _shapes(1, 256, 256, 1, 128)),
    "clipped": Streamed(streamed_cases.clipped, _shapes(1, 128, 256, 1, 128)),
    "numbered": Streamed(numbered, _shapes(1, 256, 256, 2, 64)),
    "grouped": Streamed(streamed_cases.grouped, _GROUPED),
    "heads_first": Streamed(streamed_cases.heads_first, dict.fromkeys(("query", "key", "value"), (1, 2, 256, 64))),
    "float16": Streamed(streamed_cases.causal, _shapes(1, 256, 256, 1, 64), "float16"),
    "wide_result": Streamed(streamed_cases.wide_result, _shapes(1, 256, 256, 1, 128)),
    "wide": Streamed(attend, _shapes(1, 192, 128, 1, 256)),
    "wide_causal": Streamed(streamed_cases.causal, _shapes(1, 256, 256, 1, 256)),
    "parts": Streamed(attend, _shapes(1, 192, 256, 2, 96)),
    "parts_causal": Streamed(streamed_cases.causal, _shapes(1, 256, 256, 1, 96)),
    "parts_soft_cap": Streamed(causal_soft_cap, _shapes(1, 256, 256, 1, 96)),
    "wide_parts": Streamed(attend, _shapes(1, 256, 192, 1, 192)),
    "wide_parts_causal": Streamed(streamed_cases.causal, _shapes(2, 256, 256, 1, 192), "float16"),
    "sunk": Streamed(streamed_cases.sunk, _shapes(2, 256, 256, 2, 128) | {"sink": (2,)}),
    "sunk_twice": Streamed(
        streamed_cases.sunk_twice, _shapes(1, 256, 256, 2, 64) | {"sink": (2,), "logit": (1, 2, 256)}
    ),
    "odd_queries": Streamed(attend, _shapes(1, 200, 256, 1, 64), streams=False),
    "odd_keys": Streamed(attend, _shapes(1, 256, 200, 1, 64), streams=False),
    "float32": Streamed(attend, _shapes(1, 128, 128, 1, 64), "float32", streams=False),
    "wider_values": Streamed(attend, _shapes(1, 128, 128, 1, 64) | {"value": (1, 128, 1, 128)}, streams=False),
    "null_key": Streamed(streamed_cases.null_key, _shapes(1, 256, 256, 2, 128) | {"null": (2, 128)}),
    "narrower_values": Streamed(
        streamed_cases.causal, _shapes(1, 256, 256, 2, 192) | {"value": (1, 256, 2, 128)}, streams=False
    ),
    "biased": Streamed(streamed_cases.biased, _shapes(1, 128, 128, 2, 64) | {"pair": (1, 2, 128, 128)}, streams=False),
    # The gradient of an array other than queries, keys and values.
    "sloped": Streamed(streamed_cases.sloped, _shapes(1, 128, 256, 3, 64) | {"slope": (3,)}, streams=False),
    "gated": Streamed(streamed_cases.gated, _shapes(1, 128, 256, 3, 64) | {"gate": (1, 3, 128)}, streams=False),
}
