"""Serving for `long_context.py`: prompts and generated text in a paged cache of keys, values and mean keys."""

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int
from long_context_data import VOCABULARY
from long_context_model import LanguageModel, Placement, Settings, describe_model, make_tables, round_matrices

from blockdiag import append_to_pages, apply_rotary, key_convolution, moba_paged_attention

PAGE_SIZE = 16
# Tokens of each prompt that one step processes.
CHUNK = 64


class LayerCache(NamedTuple):
    """Cached arrays of one layer.

    Attributes:
        key_pages, value_pages: [P, page_size, N, H].
        key_scale, value_scale: scales of every token and head of an eight-bit cache, [P, page_size, N]; None without.
        key_centroids: mean keys of complete blocks, float32 [B, max_blocks, N, H].
        recent: the last keys before their convolution, [B, key_taps - 1, N, H].
    """

    key_pages: Array
    value_pages: Array
    key_scale: Array | None
    value_scale: Array | None
    key_centroids: Array
    recent: Array

    @property
    def scales(self) -> dict[str, Array | None]:
        """The scales, as keyword arguments of `append_to_pages` and `moba_paged_attention`."""
        return {"key_scale": self.key_scale, "value_scale": self.value_scale}


def make_cache(settings: Settings, *, sequences: int, length: int, dtype: str) -> list[LayerCache]:
    """Return a cache for each layer for sequences of up to `length` tokens; an empty cache may hold anything."""
    heads = settings.heads, settings.head_dim
    pages = (sequences * -(-length // PAGE_SIZE), PAGE_SIZE, settings.heads)
    is_scaled = jnp.dtype(dtype).itemsize == 1

    # Each array has its own memory, because all of them are donated.
    def layer() -> LayerCache:
        key, value = (jnp.full((*pages, settings.head_dim), jnp.nan, dtype) for _ in range(2))
        scales = [jnp.full(pages, jnp.nan, jnp.float32) if is_scaled else None for _ in range(2)]
        means = jnp.full((sequences, -(-length // settings.block_size), *heads), jnp.nan, jnp.float32)
        return LayerCache(
            key, value, *scales, means, jnp.zeros((sequences, settings.key_taps - 1, *heads), settings.dtype)
        )

    return [layer() for _ in range(settings.layers)]


def serve_step(
    graph: nnx.GraphDef[LanguageModel],
    parameters: nnx.State,
    caches: list[LayerCache],
    tokens: Int[Array, "B T"],
    counts: Int[Array, " B"],
    lengths: Int[Array, " B"],
    page_table: Int[Array, "B max_pages"],
    tables: tuple[Array, Array],
) -> tuple[Float[Array, "B 256"], list[LayerCache]]:
    """Append tokens to their sequences, and return the logits after the last one of each.

    Args:
        graph, parameters: graph and parameters of the model.
        caches: the cache of each layer.
        tokens: tokens of each sequence, of which the first `counts` are valid.
        lengths: number of tokens in the cache.
        page_table: numbers of the sequences' pages.
        tables: tables of rotary embedding.
    """
    model = nnx.merge(graph, parameters)
    settings, written = model.settings, []
    where = {"page_table": page_table, "kv_lengths": lengths + counts, "query_lengths": counts}
    place = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    cos, sin = (table.at[lengths[:, None] + place].get(mode="clip") for table in tables)
    hidden = model.embed(tokens)
    for layer, cache in zip(model.each_layer(), caches, strict=True):
        query, key, value = layer.project(hidden)
        # The convolution needs keys of earlier steps; its results for these are dropped.
        window = jnp.concatenate([cache.recent, key], axis=1)
        key = key_convolution(window, layer.key_taps[...])[:, cache.recent.shape[1] :]
        query, key = apply_rotary(query, cos, sin), apply_rotary(key, cos, sin)
        pages = append_to_pages(
            key,
            value,
            cache.key_pages,
            cache.value_pages,
            **where,
            **cache.scales,
            key_centroids=cache.key_centroids,
            block_size=settings.block_size,
        )
        names = ("key_pages", "value_pages", *(name for name, x in cache.scales.items() if x is not None))
        kept = counts[:, None] + jnp.arange(cache.recent.shape[1], dtype=jnp.int32)
        recent = jnp.take_along_axis(window, kept[..., None, None], axis=1)
        cache = cache._replace(**dict(zip((*names, "key_centroids"), pages, strict=True)), recent=recent)
        attended = moba_paged_attention(
            query,
            cache.key_pages,
            cache.value_pages,
            **where,
            **cache.scales,
            key_centroids=cache.key_centroids,
            block_size=settings.block_size,
            top_k=settings.top_k,
        )
        hidden = layer.finish(hidden, attended)
        written.append(cache)
    last = jnp.take_along_axis(hidden, jnp.maximum(counts - 1, 0)[:, None, None], axis=1)
    return model.logits(last)[:, 0], written


@dataclasses.dataclass(frozen=True)
class Served:
    """Generated text, and its comparison with the model without a cache.

    Attributes:
        texts: prompts, each followed by the generated bytes.
        prompt_lengths: length of each prompt in bytes.
        read_per_second, written_per_second: tokens of all sequences per second, without compilation.
        cache_dtype, cache_bytes: dtype of keys and values, and size of the caches.
        logit_difference: largest difference between the logits of generated bytes and those without a cache.
        same_bytes: share of generated bytes that the model also predicts without a cache, after the same text.
    """

    texts: list[bytes]
    prompt_lengths: list[int]
    read_per_second: float
    written_per_second: float
    cache_dtype: str
    cache_bytes: int
    logit_difference: float
    same_bytes: float


class Server:
    """A trained model on one device.

    Args:
        settings: settings of the model.
        parameters: parameters on any devices; matrices are rounded to the dtype of the computation, as in training.
        device: the device that serves.
    """

    def __init__(self, settings: Settings, parameters: nnx.State, device: jax.Device) -> None:
        self.settings = settings
        self.placement = Placement.over([device])
        self.graph, _ = describe_model(settings, self.placement)
        self.parameters = round_matrices(jax.device_put(parameters, self.placement.whole), settings.dtype)
        self.tables = make_tables(settings, self.placement)
        self._step = jax.jit(functools.partial(serve_step, self.graph), donate_argnums=1)
        self._whole = jax.jit(self._logits_without_cache)

    def _logits_without_cache(self, parameters: nnx.State, tokens: Array, tables: tuple[Array, Array]) -> Array:
        model = nnx.merge(self.graph, parameters)
        return model.logits(model.run_layers(tokens, tables, "moba"))

    def logits_without_cache(self, texts: Sequence[bytes]) -> np.ndarray:
        """Return the logits after each byte of each text by the forward pass of training, [B, context, 256]."""
        tokens = np.zeros((len(texts), self.settings.context), np.int32)
        for row, text in zip(tokens, texts, strict=True):
            row[: len(text)] = list(text)
        return np.asarray(self._whole(self.parameters, tokens, self.tables))

    def write(self, prompts: Sequence[bytes], new_tokens: int, cache_dtype: str | None = None) -> Served:
        """Continue each prompt by the most likely bytes.

        Args:
            prompts: prompts that are no longer than a context together with the new tokens.
            new_tokens: number of bytes to generate after each prompt, at least one.
            cache_dtype: dtype of keys and values; by default that of the computation.

        Raises:
            ValueError: a prompt is empty or too long.
        """
        lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        if new_tokens < 1 or lengths.min() < 1 or lengths.max() + new_tokens > self.settings.context:
            raise ValueError(
                f"prompts of {lengths.min()} to {lengths.max()} bytes and {new_tokens} new ones must be at least one "
                f"byte each, and together at most the context, {self.settings.context}"
            )
        cache_dtype = cache_dtype or self.settings.dtype
        count, longest = len(prompts), int(lengths.max()) + new_tokens
        per_sequence = -(-longest // PAGE_SIZE)
        # Pages may have any order; they need not be contiguous.
        pages = np.random.default_rng(0).permutation(count * per_sequence).reshape(count, per_sequence)
        table = jax.device_put(np.asarray(pages, np.int32), self.placement.whole)
        caches = make_cache(self.settings, sequences=count, length=longest, dtype=cache_dtype)
        caches = jax.device_put(caches, self.placement.whole)
        cache_bytes = sum(x.nbytes for x in jax.tree.leaves(caches))
        texts, done = [bytearray(prompt) for prompt in prompts], np.zeros(count, np.int32)
        last = np.zeros((count, VOCABULARY), np.float32)
        compiled = {size: self._compile(size, caches, table) for size in (CHUNK, 1)}

        def step(size: int) -> None:
            nonlocal caches
            tokens, counts = np.zeros((count, size), np.int32), np.zeros(count, np.int32)
            for row, text in enumerate(texts):
                part = text[done[row] : done[row] + size]
                tokens[row, : len(part)], counts[row] = list(part), len(part)
            logits, caches = compiled[size](self.parameters, caches, tokens, counts, done.copy(), table, self.tables)
            done[:] += counts
            # While prompts are processed, the next step need not wait for this one.
            ends = [row for row, text in enumerate(texts) if counts[row] and done[row] == len(text)]
            if ends:
                last[ends] = np.asarray(logits)[ends]

        began = time.perf_counter()
        while (done < lengths).any():
            step(CHUNK)
        read = time.perf_counter()
        written_by = np.zeros((count, new_tokens, VOCABULARY), np.float32)
        for place in range(new_tokens):
            written_by[:, place] = last
            for text, byte in zip(texts, last.argmax(axis=-1), strict=True):
                text.append(int(byte))
            if place + 1 < new_tokens:
                step(1)
        seconds = time.perf_counter() - read
        whole = self.logits_without_cache([bytes(text) for text in texts])
        expected = np.stack([row[size - 1 : size - 1 + new_tokens] for row, size in zip(whole, lengths, strict=True)])
        return Served(
            texts=[bytes(text) for text in texts],
            prompt_lengths=lengths.tolist(),
            read_per_second=float(lengths.sum() / (read - began)),
            written_per_second=count * (new_tokens - 1) / seconds if new_tokens > 1 else 0.0,
            cache_dtype=cache_dtype,
            cache_bytes=cache_bytes,
            logit_difference=float(np.abs(written_by - expected).max()),
            same_bytes=float((written_by.argmax(axis=-1) == expected.argmax(axis=-1)).mean()),
        )

    def _compile(self, size: int, caches: list[LayerCache], table: Array) -> Any:
        """Return the program of a step of `size` tokens of each sequence."""
        integers = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731
        count = len(table)
        arrays = integers(count, size), integers(count), integers(count)
        return self._step.lower(self.parameters, caches, *arrays, table, self.tables).compile()
