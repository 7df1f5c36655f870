"""A small server that generates text through a paged cache, and checks every byte against the model without a cache.

    python examples/decode.py
    python examples/decode.py --steps 400 --new-tokens 150

The program trains the demo's byte-level language model briefly, then serves more requests than fit at a time. Prompts
are processed in chunks, and the sequences share a pool of pages. Bytes are generated one by one, or several at a time
by speculative decoding: drafts are guessed from the text so far and verified in one call. The program fails if any byte
differs from the one that the same model generates without a cache. Finally it prints the cost of 8-bit caches, in bits
per byte of held-out text.
"""

import argparse
import dataclasses
import functools
import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Int

from blockdiag import Rotary, append_to_pages, apply_rotary, paged_attention
from blockdiag.demo import language_model
from blockdiag.demo.language_model import AttentionFunction, LanguageModel, Settings

# Tokens of a sequence per step: while prompts are processed, and while text is generated with guesses.
CHUNK = 32
GUESSED = 8
PAGE_SIZE = 16


def causal_attention(settings: Settings) -> AttentionFunction:
    """Return JAX's causal attention with rotary embedding, which training and the check use."""
    tables = language_model.position_tables(settings)

    def attend(query: Array, key: Array, value: Array, **flax_arguments: Any) -> Array:
        del flax_arguments  # This model has no dropout, no mask of its own and no sowing.
        cos, sin = (table[: query.shape[1]] for table in tables)
        query, key = apply_rotary(query, cos, sin), apply_rotary(key, cos, sin)
        return jax.nn.dot_product_attention(query, key, value, is_causal=True)

    return attend


class LayerCache(NamedTuple):
    """Cached arrays of one layer.

    Attributes:
        key_pages, value_pages: [P, page_size, N, H].
        key_scale, value_scale: scales of every token and head of an eight-bit cache, [P, page_size, N]; None without.
        inputs: the last inputs of the layer's convolution, [slots, taps, width].
    """

    key_pages: Array
    value_pages: Array
    key_scale: Array | None
    value_scale: Array | None
    inputs: Array

    def pages(self) -> dict[str, Array | None]:
        """The pages and scales, as keyword arguments of `append_to_pages` and `paged_attention`."""
        return {name: array for name, array in self._asdict().items() if name != "inputs"}

    def with_appended(self, key: Array, value: Array, **where: Any) -> "LayerCache":
        """Return the cache with new tokens appended."""
        written = append_to_pages(key, value, **self.pages(), **where)
        names = (name for name, array in self.pages().items() if array is not None)
        return self._replace(**dict(zip(names, written, strict=True)))

    def attend(self, query: Array, **where: Any) -> Array:
        """Return the attention of the last tokens."""
        return paged_attention(query, **self.pages(), **where)


def make_cache(settings: Settings, *, slots: int, num_pages: int, dtype: str) -> list[LayerCache]:
    """Return a cache for `slots` sequences for each layer. Pages are never cleared, so they may start as NaN."""
    pool = (num_pages, PAGE_SIZE, settings.heads, settings.head_dim)
    has_scales = jnp.dtype(dtype).itemsize == 1

    # Each array has its own memory, because all of them are donated.
    def layer() -> LayerCache:
        pages = [jnp.full(pool, jnp.nan, dtype) for _ in range(2)]
        scales = [jnp.full(pool[:-1], jnp.nan, jnp.float32) if has_scales else None for _ in range(2)]
        return LayerCache(*pages, *scales, jnp.zeros((slots, settings.taps, settings.width), settings.dtype))

    return [layer() for _ in range(settings.layers)]


class Step(NamedTuple):
    """The results of one step.

    Attributes:
        logits: [slots, T, 256].
        next_tokens: the most likely token after each given one, int32 [slots, T].
        kept: how many of the given tokens are kept, int32 [slots].
    """

    logits: Array
    next_tokens: Array
    kept: Array


type StepFunction = Callable[..., tuple[Step, list[LayerCache]]]


def make_step(model: LanguageModel, settings: Settings) -> StepFunction:
    """Compile a step of the model over a paged cache, which appends T tokens of each sequence and attends from them.

    Of a sequence's `counts` tokens the first `certain` ones are known, and the others are guesses. Guesses are kept up
    to the first one that differs from the model's prediction. Rejected guesses stay in the pages, beyond the new length
    of the sequence, until later tokens overwrite them.
    """
    definition, weights = nnx.split(model)
    tables = language_model.position_tables(settings)

    @functools.partial(jax.jit, donate_argnums=1)
    def step(
        weights: Any,
        cache: list[LayerCache],
        tokens: Int[Array, "slots T"],
        counts: Int[Array, " slots"],
        certain: Int[Array, " slots"],
        lengths: Int[Array, " slots"],
        page_table: Int[Array, "slots max_pages"],
    ) -> tuple[Step, list[LayerCache]]:
        model = nnx.merge(definition, weights)
        place = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        cos, sin = (table.at[lengths[:, None] + place[None]].get(mode="clip") for table in tables)
        hidden, windows, written = model.embedding(tokens), [], []
        for layer, kept in zip(model.layers, cache, strict=True):
            # The convolution reaches back to tokens of earlier steps.
            windows.append(jnp.concatenate([kept.inputs, layer.attention_norm(hidden)], axis=1))
            mixed = layer.convolution(windows[-1])[:, settings.taps :]
            query, key, value = layer.attention.query(mixed), layer.attention.key(mixed), layer.attention.value(mixed)
            where = {"page_table": page_table, "kv_lengths": lengths + counts, "query_lengths": counts}
            kept = kept.with_appended(key, value, rotary=Rotary(*tables), **where)
            hidden = hidden + layer.attention.out(kept.attend(apply_rotary(query, cos, sin), **where))
            hidden = hidden + layer.contract(nnx.gelu(layer.expand(layer.feed_forward_norm(hidden))))
            written.append(kept)
        logits = model.head(model.norm(hidden)).astype(jnp.float32)
        next_tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        is_right = (place[None, 1:] < certain[:, None]) | (tokens[:, 1:] == next_tokens[:, :-1])
        stays = jnp.minimum(1 + jnp.cumprod(is_right, axis=1, dtype=jnp.int32).sum(axis=1), counts)
        inputs = stays[:, None] + jnp.arange(settings.taps, dtype=jnp.int32)[None]
        written = [
            kept._replace(inputs=jnp.take_along_axis(window, inputs[..., None], axis=1))
            for kept, window in zip(written, windows, strict=True)
        ]
        return Step(logits, next_tokens, stays), written

    return functools.partial(step, weights)


class PageAllocator:
    """An allocator of page numbers."""

    def __init__(self, num_pages: int) -> None:
        self.free = list(range(num_pages))

    def take(self, tokens: int) -> list[int] | None:
        """Return pages for so many tokens, or None if there are not enough free ones."""
        count = -(-tokens // PAGE_SIZE)
        if count > len(self.free):
            return None
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def give_back(self, pages: Sequence[int]) -> None:
        self.free += pages


@dataclasses.dataclass
class ActiveSequence:
    """A request that is being served.

    Attributes:
        index: number of the request.
        text: the prompt and the bytes generated so far.
        goal: final length of `text` in bytes.
        pages: the pages of the sequence.
        cached: number of tokens of `text` that are in the cache.
    """

    index: int
    text: bytearray
    goal: int
    pages: list[int]
    cached: int = 0


def guess(text: bytes, count: int) -> bytes:
    """Return up to `count` bytes that followed an earlier occurrence of the last few bytes of `text`."""
    for size in range(8, 1, -1):
        place = text.rfind(text[-size:], 0, len(text) - 1)
        if len(text) > size and place >= 0:
            return text[place + size : place + size + count]
    return b""


@dataclasses.dataclass
class Server:
    """A server of requests in a fixed number of slots, which start as pages and slots become free.

    Attributes:
        step: a step from `make_step`.
        settings: settings of the model.
        slots: number of sequences in a step.
        num_pages: size of the pool that all sequences share.
        guessed: tokens per step while text is generated, including guesses; 1 for no guesses.
        dtype: dtype of the cache.
        num_steps, num_written: number of steps without a prompt, and of bytes that they generated.
    """

    step: StepFunction
    settings: Settings
    slots: int
    num_pages: int
    guessed: int = 1
    dtype: str = "float32"
    num_steps: int = 0
    num_written: int = 0

    def serve(self, prompts: Sequence[bytes], new_tokens: int) -> list[bytes]:
        """Return the prompts, each followed by `new_tokens` generated bytes."""
        cache = make_cache(self.settings, slots=self.slots, num_pages=self.num_pages, dtype=self.dtype)
        allocator = PageAllocator(self.num_pages)
        waiting, results = list(enumerate(prompts)), [b""] * len(prompts)
        running: list[ActiveSequence | None] = [None] * self.slots
        table = np.zeros((self.slots, -(-self.settings.sequence_length // PAGE_SIZE)), np.int32)
        while waiting or any(running):
            for slot, sequence in enumerate(running):
                if sequence is None and waiting:
                    index, prompt = waiting[0]
                    pages = allocator.take(len(prompt) + new_tokens)
                    if pages is not None:
                        waiting.pop(0)
                        running[slot] = ActiveSequence(index, bytearray(prompt), len(prompt) + new_tokens, pages)
                        table[slot, : len(pages)] = pages
                        # The convolution of a new sequence has no earlier inputs.
                        cache = [kept._replace(inputs=kept.inputs.at[slot].set(0)) for kept in cache]
            if not any(running):
                raise ValueError(f"`num_pages` is {self.num_pages}: too few for the longest request; take more")
            cache = self._advance(running, cache, table)
            for slot, sequence in enumerate(running):
                if sequence is not None and len(sequence.text) >= sequence.goal:
                    results[sequence.index] = bytes(sequence.text[: sequence.goal])
                    allocator.give_back(sequence.pages)
                    running[slot] = None
        return results

    def _advance(
        self, running: list[ActiveSequence | None], cache: list[LayerCache], table: np.ndarray
    ) -> list[LayerCache]:
        """Advance all sequences by one step: some may process their prompts while others generate."""
        is_reading = any(sequence and len(sequence.text) - sequence.cached > 1 for sequence in running)
        tokens = np.zeros((self.slots, CHUNK if is_reading else self.guessed), np.int32)
        counts, certain, lengths = (np.zeros(self.slots, np.int32) for _ in range(3))
        for slot, sequence in enumerate(running):
            if sequence is None:
                continue
            given = bytes(sequence.text[sequence.cached : sequence.cached + tokens.shape[1]])
            certain[slot], lengths[slot] = len(given), sequence.cached
            if sequence.cached + len(given) == len(sequence.text):
                room = min(tokens.shape[1] - len(given), self.guessed - 1, sequence.goal - len(sequence.text) - 1)
                given += guess(bytes(sequence.text), max(0, room))
            counts[slot] = len(given)
            tokens[slot, : len(given)] = list(given)
        # The table is copied, because it changes while the step may still be reading it.
        found, cache = self.step(cache, tokens, counts, certain, lengths, table.copy())
        next_tokens, kept = np.asarray(found.next_tokens), np.asarray(found.kept)
        self.num_steps += not is_reading
        for slot, sequence in enumerate(running):
            if sequence is None:
                continue
            sequence.cached += int(kept[slot])
            if sequence.cached >= len(sequence.text):
                # All known tokens are processed: append the accepted guesses and the model's next byte.
                new = [*tokens[slot, certain[slot] : kept[slot]], next_tokens[slot, kept[slot] - 1]]
                sequence.text += bytes(map(int, new))
                self.num_written += 0 if is_reading else len(new)
        return cache


def differing_byte(model: LanguageModel, settings: Settings, prompts: Sequence[bytes], texts: Sequence[bytes]) -> str:
    """Describe the first difference between a text and greedy decoding without a cache; empty if there is none.

    Byte t must be the most likely one after bytes 0 to t - 1. If this holds for every t after the prompt, the text is
    the result of greedy decoding without a cache. Because the model is causal, one call checks all t.
    """
    tokens = np.zeros((len(texts), settings.sequence_length), np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = list(text)
    wanted = np.asarray(jnp.argmax(nnx.jit(lambda model, tokens: model(tokens))(model, tokens), axis=-1))
    for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        for t in range(len(prompt), len(text)):
            if text[t] != wanted[row, t - 1]:
                return f"request {row}, byte {t}: {text[t]} with the cache, {wanted[row, t - 1]} without"
    return ""


def cached_bits_per_byte(step: StepFunction, settings: Settings, batch: Int[np.ndarray, "B T"], dtype: str) -> float:
    """Return the mean cross entropy of text, in bits, if every layer attends to a cache of a dtype."""
    slots, length = batch.shape[0], batch.shape[1] - 1
    per_sequence = -(-length // PAGE_SIZE)
    cache = make_cache(settings, slots=slots, num_pages=slots * per_sequence, dtype=dtype)
    table = np.random.default_rng(0).permutation(slots * per_sequence).reshape(slots, per_sequence).astype(np.int32)
    losses = []
    for begin in range(0, length, CHUNK):
        part = batch[:, begin : min(begin + CHUNK, length)]
        tokens = np.zeros((slots, CHUNK), np.int32)
        tokens[:, : part.shape[1]] = part
        counts, lengths = (np.full(slots, count, np.int32) for count in (part.shape[1], begin))
        found, cache = step(cache, tokens, counts, counts, lengths, table)
        labels = batch[:, begin + 1 : begin + 1 + part.shape[1]]
        logits = found.logits[:, : part.shape[1]]
        losses.append(np.asarray(optax.softmax_cross_entropy_with_integer_labels(logits, labels)))
    return float(np.concatenate(losses, axis=1).mean()) / math.log(2.0)


def make_prompts(settings: Settings, count: int, new_tokens: int) -> list[bytes]:
    """Return pieces of held-out text, of different lengths that leave room for the generated bytes."""
    _, text = language_model.split_text(language_model.english_text())
    generator = np.random.default_rng(settings.seed)
    lengths = generator.integers(1, settings.sequence_length - new_tokens, size=count)
    starts = generator.integers(0, len(text) - settings.sequence_length, size=count)
    return [text[start : start + length].tobytes() for start, length in zip(starts, lengths, strict=True)]


def run(
    settings: Settings, *, new_tokens: int, requests: int = 7, slots: int = 3, say: Callable[[str], None] = print
) -> str:
    """Train, serve and measure; return the difference from the model without a cache, empty if there is none."""
    training = language_model.train(settings, causal_attention(settings))
    model = training.model
    say(f"trained for {settings.steps} steps: {training.bits_per_byte:.3f} bits per byte of held-out text")
    step = make_step(model, settings)
    prompts = make_prompts(settings, requests, new_tokens)
    # Enough for two of the longest requests, so a third one may have to wait.
    num_pages = 2 * -(-settings.sequence_length // PAGE_SIZE)
    texts: list[bytes] = []
    for guessed in (1, GUESSED):
        name = "greedy" if guessed == 1 else f"with guesses of up to {guessed - 1} bytes"
        server = Server(step, settings, slots, num_pages, guessed)
        began = time.perf_counter()
        texts = server.serve(prompts, new_tokens)
        seconds = time.perf_counter() - began
        difference = differing_byte(model, settings, prompts, texts)
        if difference:
            return f"{name}: {difference}"
        say(
            f"{name}: {requests} requests in {slots} slots, {server.num_written} bytes in {server.num_steps} steps, "
            f"{seconds:.1f} s with compilation; every byte equals that of the model without a cache"
        )
    shortest = min(range(requests), key=lambda index: len(prompts[index]))
    say(f"the shortest prompt, {prompts[shortest]!r}, continues: {texts[shortest][len(prompts[shortest]) :]!r}")
    return _measure_eight_bits(model, step, settings, say)


def _measure_eight_bits(
    model: LanguageModel, step: StepFunction, settings: Settings, say: Callable[[str], None]
) -> str:
    """Print bits per byte by dtype of the cache; return the difference if a float32 cache changes the result."""
    _, text = language_model.split_text(language_model.english_text())
    (batch,) = language_model.batches(text, settings, count=1, seed=settings.seed + 2)
    plain = float(language_model.evaluation_step(model, jnp.asarray(batch))) / math.log(2.0)
    found = {
        dtype: cached_bits_per_byte(step, settings, batch, dtype)
        for dtype in ("float32", "float8_e4m3fn", "float8_e5m2")
    }
    say(f"held-out text without a cache: {plain:.5f} bits per byte")
    for dtype, bits in found.items():
        say(f"  cache of {dtype}: {bits:.5f}, {bits - plain:+.5f}")
    if not abs(found["float32"] - plain) < 1e-4:
        return f"held-out text: {found['float32']} bits per byte with a cache of float32, {plain} without"
    return ""


def main(arguments: Sequence[str]) -> None:
    """Parse the options and run."""
    parser = argparse.ArgumentParser(description="Generate text through a paged cache, and check every byte of it.")
    parser.add_argument("--steps", type=int, default=100, help="training steps")
    parser.add_argument("--new-tokens", type=int, default=96, help="bytes to generate after each prompt")
    options = parser.parse_args(arguments)
    settings = Settings(steps=options.steps, sequence_length=256)
    if options.steps < 2 or not 1 <= options.new_tokens < settings.sequence_length - 1:
        parser.error(f"--steps must be at least 2, --new-tokens 1 to {settings.sequence_length - 2}; got {options}")
    # By default, float32 products on a GPU use fewer bits, and round differently with and without a cache.
    with jax.default_matmul_precision("highest"):
        difference = run(settings, new_tokens=options.new_tokens)
    if difference:
        sys.exit(f"the text differs from that of the model without a cache: {difference}")


if __name__ == "__main__":
    main(sys.argv[1:])
