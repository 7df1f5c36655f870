"""Model of `decode.py`: a compiled step over a paged cache, and the same model without a cache."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from blockdiag import Rotary, append_to_pages, apply_rotary, paged_attention
from blockdiag.demo import language_model
from blockdiag.demo.language_model import AttentionFunction, LanguageModel, Settings

PAGE_SIZE = 16


def has_eight_bits(dtype: Any) -> bool:
    """Return whether this is an eight-bit dtype, whose tokens and heads have scales."""
    return jnp.dtype(dtype).itemsize == 1


class LayerCache(NamedTuple):
    """Cached arrays of one layer.

    Attributes:
        key_pages, value_pages: [P, page_size, N, H].
        key_scale, value_scale: scales of every token and head of an eight-bit cache, [P, page_size, N]; None without.
        inputs: inputs of the layer's convolution, [P, page_size, width]. They are in pages like keys, so a request that
            shares a page, drops drafts or starts again finds the inputs of the tokens before its new ones.
    """

    key_pages: Array
    value_pages: Array
    key_scale: Array | None
    value_scale: Array | None
    inputs: Array

    @property
    def attention_dtype(self) -> Any:
        """The dtype of queries, and of keys and values before they are rounded to the cache."""
        return self.inputs.dtype if has_eight_bits(self.key_pages.dtype) else self.key_pages.dtype

    def pages(self) -> dict[str, Any]:
        """The pages and scales, as keyword arguments of `append_to_pages` and `paged_attention`."""
        return {name: array for name, array in self._asdict().items() if name != "inputs"}

    def with_appended(self, key: Array, value: Array, **where: Any) -> "LayerCache":
        """Return the cache with new tokens [rows, N, H] appended."""
        written = append_to_pages(key, value, **self.pages(), **where)
        names = (name for name, array in self.pages().items() if array is not None)
        return self._replace(**dict(zip(names, written, strict=True)))

    def attend(self, query: Array, **where: Any) -> Array:
        """Return the attention of queries [rows, N, H]."""
        return paged_attention(query, **self.pages(), **where)


def make_cache(settings: Settings, *, num_pages: int, dtype: str) -> list[LayerCache]:
    """Return an empty cache for each layer. Pages are never cleared, so they may start as NaN."""
    pool = (num_pages, PAGE_SIZE, settings.heads, settings.head_dim)

    # Each array has its own memory, because all of them are donated.
    def layer() -> LayerCache:
        key_pages, value_pages = (jnp.full(pool, jnp.nan, dtype) for _ in range(2))
        key_scale, value_scale = (
            jnp.full(pool[:-1], jnp.nan, jnp.float32) if has_eight_bits(dtype) else None for _ in range(2)
        )
        inputs = jnp.full((*pool[:2], settings.width), jnp.nan, settings.dtype)
        return LayerCache(key_pages, value_pages, key_scale, value_scale, inputs)

    return [layer() for _ in range(settings.layers)]


class Step(NamedTuple):
    """The results of one step.

    Attributes:
        logits: float32 [rows, 256].
        predictions: the most likely token after each row, int32 [rows].
    """

    logits: Float[Array, "rows 256"]
    predictions: Int[Array, " rows"]


type StepFunction = Callable[..., tuple[Step, list[LayerCache]]]


def make_step(model: LanguageModel, settings: Settings) -> StepFunction:
    """Return a compiled step, which appends new tokens of each sequence to the cache and predicts the token after each.

    Its arguments are the cache and then the arrays of a `Batch`. It is compiled once for each number of rows and bound
    on the tokens of a sequence. Drafts are tokens like all others: rejected ones stay in the pages, beyond the length
    of their sequence, until later tokens overwrite them.
    """
    definition, weights = nnx.split(model)
    tables = language_model.position_tables(settings)
    reach = jnp.arange(-settings.taps, 1, dtype=jnp.int32)

    @functools.partial(jax.jit, donate_argnums=1, static_argnums=6)
    def step(
        weights: Any,
        cache: list[LayerCache],
        tokens: Int[Array, " rows"],
        offsets: Int[Array, " slots+1"],
        lengths: Int[Array, " slots"],
        page_table: Int[Array, "slots max_pages"],
        most_tokens: int,
    ) -> tuple[Step, list[LayerCache]]:
        model = nnx.merge(definition, weights)
        row = jnp.arange(tokens.shape[0], dtype=jnp.int32)
        is_token = row < offsets[-1]
        sequence = jnp.searchsorted(offsets[1:-1], row, side="right")
        position = jnp.where(is_token, lengths[sequence] - offsets[sequence + 1] + row, 0)
        cos, sin = (table[position] for table in tables)
        # The convolution reads each token and the `taps` tokens before it, [rows, taps + 1].
        reached = position[:, None] + reach
        page, offset = page_table[sequence[:, None], jnp.maximum(reached, 0) // PAGE_SIZE], reached % PAGE_SIZE
        is_reached = is_token[:, None] & (reached >= 0)
        where = {"page_table": page_table, "kv_lengths": lengths, "query_offsets": offsets}
        hidden, written = model.embedding(tokens), []
        for layer, kept in zip(model.layers, cache, strict=True):
            own_page = jnp.where(is_token, page[:, -1], kept.inputs.shape[0])  # other rows are dropped
            inputs = kept.inputs.at[own_page, offset[:, -1]].set(layer.attention_norm(hidden), mode="drop")
            window = jnp.where(is_reached[..., None], inputs[page, offset], 0)
            mixed = layer.convolution(window)[:, -1]
            projections = layer.attention.query, layer.attention.key, layer.attention.value
            query, key, value = (project(mixed).astype(kept.attention_dtype) for project in projections)
            kept = kept._replace(inputs=inputs).with_appended(key, value, rotary=Rotary(*tables), **where)
            query = apply_rotary(query, cos, sin)
            hidden = hidden + layer.attention.out(kept.attend(query, max_query_length=most_tokens, **where))
            hidden = hidden + layer.contract(nnx.gelu(layer.expand(layer.feed_forward_norm(hidden))))
            written.append(kept)
        logits = model.head(model.norm(hidden)).astype(jnp.float32)
        return Step(logits, jnp.argmax(logits, axis=-1).astype(jnp.int32)), written

    return functools.partial(step, weights)


def causal_attention(settings: Settings, cache_dtype: str | None = None) -> AttentionFunction:
    """Return JAX's causal attention with rotary embedding, which training and the check use.

    Args:
        settings: settings of the model.
        cache_dtype: keys and values are rounded as in a cache of this dtype; by default that of the model.
    """
    tables = language_model.position_tables(settings)
    cache_dtype = cache_dtype or settings.dtype
    dtype = settings.dtype if has_eight_bits(cache_dtype) else cache_dtype

    def rounded(array: Float[Array, "B T N H"]) -> Float[Array, "B T N H"]:
        """Return float32 numbers as the cache holds them."""
        if not has_eight_bits(cache_dtype):
            return array.astype(cache_dtype).astype(jnp.float32)
        # The scale maps the largest element of each token and head to the largest number of the dtype.
        largest = jnp.max(jnp.abs(array), axis=-1, keepdims=True)
        scale = jnp.maximum(largest / float(jnp.finfo(cache_dtype).max), jnp.finfo(jnp.float32).tiny)
        return (array / scale).astype(cache_dtype).astype(jnp.float32) * scale

    def attend(query: Array, key: Array, value: Array, **flax_arguments: Any) -> Array:
        del flax_arguments  # This model has no dropout, no mask of its own and no sowing.
        cos, sin = (table[: query.shape[1]] for table in tables)
        query = apply_rotary(query.astype(dtype), cos, sin).astype(jnp.float32)
        # `append_to_pages` rotates in float32 and rounds once, and scores and weights are float32.
        key, value = (array.astype(dtype).astype(jnp.float32) for array in (key, value))
        key = apply_rotary(key, cos, sin)
        return jax.nn.dot_product_attention(query, rounded(key), rounded(value), is_causal=True).astype(dtype)

    return attend
