"""The demo's model: a small byte-level language model in Flax, trained on text that is part of every CPython.

The attention function is an argument. So one model, with the same initial weights and batches, can be trained both with
block-diagonal attention and with `jax.nn.dot_product_attention` under an equivalent mask.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from blockdiag.common.rotary import Rotary, rotary_tables
from blockdiag.interop.flax import attention_fn

type AttentionFunction = Callable[..., Float[Array, "B T N H"]]
type Batch = Int[np.ndarray, "B T+1"]

VOCABULARY = 256  # bytes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Sizes of the model and of its training.

    Attributes:
        batch_size: sequences in a batch.
        sequence_length: bytes of a sequence that are predicted.
        block_size: tokens in a block of attention.
        taps: number of earlier tokens that each layer's causal convolution reads; only it crosses block boundaries.
        dtype: dtype name of the computation; weights, their updates and the loss are float32.
        evaluation_batches: batches of held-out text that the final loss is averaged over.
    """

    steps: int = 120
    batch_size: int = 8
    sequence_length: int = 384
    block_size: int = 64
    width: int = 96
    heads: int = 3
    layers: int = 3
    taps: int = 3
    learning_rate: float = 3e-3
    warmup_steps: int = 20
    seed: int = 0
    dtype: str = "float32"
    evaluation_batches: int = 8

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.sequence_length


def english_text() -> Int[np.ndarray, " bytes"]:
    """Return a few hundred kilobytes of English as bytes: the language reference shown by Python's `help("topics")`."""
    from pydoc_data import topics

    # Topics repeat each other's paragraphs with other indentation. Each paragraph is kept once, so that the model has
    # not seen held-out text in training.
    paragraphs: dict[str, str] = {}
    for topic in topics.topics.values():
        for paragraph in topic.split("\n\n"):
            paragraphs.setdefault(" ".join(paragraph.split()), paragraph)
    return np.frombuffer("\n\n".join(paragraphs.values()).encode("utf-8"), dtype=np.uint8)


def split_text(text: Int[np.ndarray, " bytes"]) -> tuple[Int[np.ndarray, " train"], Int[np.ndarray, " held_out"]]:
    """Split the text: the first nine tenths are for training, the rest for evaluation."""
    border = len(text) * 9 // 10
    return text[:border], text[border:]


def batches(text: Int[np.ndarray, " bytes"], settings: Settings, *, count: int, seed: int) -> Iterator[Batch]:
    """Yield `count` batches int32 [B, T + 1] cut from `text` at random positions, which depend only on the seed."""
    generator = np.random.default_rng(seed)
    window = np.arange(settings.sequence_length + 1)
    for _ in range(count):
        starts = generator.integers(0, len(text) - settings.sequence_length, size=settings.batch_size)
        yield text[starts[:, None] + window].astype(np.int32)


def position_tables(settings: Settings) -> tuple[Float[Array, "T half"], Float[Array, "T half"]]:
    """Return cosine and sine by position within the sequence; attention depends on position differences only."""
    return rotary_tables(settings.sequence_length, settings.head_dim, theta=1000.0)


def block_attention(settings: Settings, implementation: str | tuple[str, ...] | None) -> AttentionFunction:
    """Return causal block-diagonal attention with fused rotary embedding for Flax's attention module."""
    return attention_fn(
        block_size=settings.block_size,
        rotary=Rotary(*position_tables(settings)),
        is_causal=True,
        implementation=implementation,
    )


def masked_attention(settings: Settings) -> AttentionFunction:
    """Return the attention of `block_attention` in plain JAX: rotation, then masked `jax.nn.dot_product_attention`."""
    cos, sin = (table[:, None, :] for table in position_tables(settings))
    block = np.arange(settings.sequence_length) // settings.block_size
    mask = (block[:, None] == block[None, :]) & np.tri(settings.sequence_length, dtype=bool)

    def rotate(array: Float[Array, "B T N H"]) -> Float[Array, "B T N H"]:
        first, second = jnp.split(array.astype(jnp.float32), 2, axis=-1)
        rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
        return rotated.astype(array.dtype)

    def attend(query: Array, key: Array, value: Array, **flax_arguments: Any) -> Array:
        del flax_arguments  # this model uses no dropout, no mask and no sowing
        return jax.nn.dot_product_attention(rotate(query), rotate(key), value, mask=mask[None, None])

    return attend


class CausalConvolution(nnx.Module):
    """Adds a per-channel weighted sum of the few preceding tokens to each token: [B, T, width] in and out."""

    def __init__(self, settings: Settings, *, rngs: nnx.Rngs) -> None:
        weights = 0.1 * jax.random.normal(rngs.params(), (settings.taps, settings.width), jnp.float32)
        self.weights = nnx.Param(weights)

    def __call__(self, inputs: Float[Array, "B T width"]) -> Float[Array, "B T width"]:
        weights = self.weights[...].astype(inputs.dtype)
        taps, length = weights.shape[0], inputs.shape[1]
        # `padded[:, taps - distance + t]` is the token `distance` before t, or zeros before the sequence begins.
        padded = jnp.pad(inputs, ((0, 0), (taps, 0), (0, 0)))
        shifted = (padded[:, taps - distance : taps - distance + length] for distance in range(1, taps + 1))
        return sum((weight * tokens for weight, tokens in zip(weights, shifted, strict=True)), start=inputs)


class Layer(nnx.Module):
    """Residual layer: convolution across block boundaries, attention within blocks, and feed-forward."""

    def __init__(self, settings: Settings, attention_function: AttentionFunction, *, rngs: nnx.Rngs) -> None:
        width, dtype = settings.width, jnp.dtype(settings.dtype)
        self.attention_norm = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)
        self.convolution = CausalConvolution(settings, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=settings.heads,
            in_features=width,
            use_bias=False,
            decode=False,
            dtype=dtype,
            attention_fn=attention_function,
            rngs=rngs,
        )
        self.feed_forward_norm = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)
        self.expand = nnx.Linear(width, 4 * width, use_bias=False, dtype=dtype, rngs=rngs)
        self.contract = nnx.Linear(4 * width, width, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, inputs: Float[Array, "B T width"]) -> Float[Array, "B T width"]:
        # Only the convolution carries information from one block to the next.
        tokens = inputs + self.attention(self.convolution(self.attention_norm(inputs)))
        return tokens + self.contract(nnx.gelu(self.expand(self.feed_forward_norm(tokens))))


class LanguageModel(nnx.Module):
    """Predicts every next byte: int32 [B, T] -> float32 logits [B, T, 256]."""

    def __init__(self, settings: Settings, attention_function: AttentionFunction) -> None:
        rngs, dtype = nnx.Rngs(settings.seed), jnp.dtype(settings.dtype)
        self.embedding = nnx.Embed(VOCABULARY, settings.width, dtype=dtype, rngs=rngs)
        self.layers = nnx.List([Layer(settings, attention_function, rngs=rngs) for _ in range(settings.layers)])
        self.norm = nnx.RMSNorm(settings.width, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(settings.width, VOCABULARY, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T 256"]:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden)).astype(jnp.float32)


def loss_of(model: LanguageModel, batch: Int[Array, "B T+1"]) -> Float[Array, ""]:
    """Return the mean cross entropy, in nats, of all bytes of `batch` after the first."""
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch[:, :-1]), batch[:, 1:])
    return losses.mean()


@nnx.jit
def training_step(model: LanguageModel, optimizer: nnx.Optimizer, batch: Int[Array, "B T+1"]) -> Float[Array, ""]:
    """Update the model in place and return the loss before the update."""
    loss, gradients = nnx.value_and_grad(loss_of)(model, batch)
    optimizer.update(model, gradients)
    return loss


evaluation_step = nnx.jit(loss_of)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """The result of training one model.

    Attributes:
        model: the trained model.
        losses: mean loss in nats per byte of each step's batch, before its update.
        held_out_loss: mean loss in nats per byte on held-out text, after the last step.
        tokens_per_second: from the median time of a step; the first step, which compiles, is excluded.
    """

    model: Any
    losses: list[float]
    held_out_loss: float
    tokens_per_second: float

    @property
    def bits_per_byte(self) -> float:
        return self.held_out_loss / math.log(2.0)


def train(
    settings: Settings,
    attention_function: AttentionFunction,
    *,
    on_step: Callable[[float], None] = lambda loss: None,
) -> Training:
    """Train a new model on the English text and evaluate it on the held-out tenth.

    Args:
        settings: sizes and seed; equal settings give equal initial weights and batches.
        attention_function: the function that the attention layers call.
        on_step: called with the loss after every step.
    """
    return train_model(LanguageModel(settings, attention_function), settings, on_step=on_step)


def train_model(model: Any, settings: Settings, *, on_step: Callable[[float], None] = lambda loss: None) -> Training:
    """Train a given model, from bytes [B, T] to logits [B, T, 256], in place, and evaluate it like `train`."""
    training_text, held_out_text = split_text(english_text())
    optimizer = nnx.Optimizer(model, _optimizer(settings), wrt=nnx.Param)
    losses, times = [], []
    for batch in batches(training_text, settings, count=settings.steps, seed=settings.seed):
        begin = time.perf_counter()
        losses.append(float(training_step(model, optimizer, jnp.asarray(batch))))
        times.append(time.perf_counter() - begin)
        on_step(losses[-1])
    return Training(
        model=model,
        losses=losses,
        held_out_loss=evaluate(model, held_out_text, settings),
        tokens_per_second=settings.tokens_per_step / float(np.median(times[1:] or times)),
    )


def _optimizer(settings: Settings) -> optax.GradientTransformation:
    """Return AdamW with gradient clipping, a short warm-up and a cosine decay."""
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=settings.learning_rate,
        warmup_steps=min(settings.warmup_steps, settings.steps // 2),
        decay_steps=settings.steps,
        end_value=0.1 * settings.learning_rate,
    )
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.01))


def evaluate(model: LanguageModel, text: Int[np.ndarray, " bytes"], settings: Settings) -> float:
    """Return the mean loss in nats per byte over a few batches of `text`, which are the same in every call."""
    chosen = batches(text, settings, count=settings.evaluation_batches, seed=settings.seed + 1)
    return float(np.mean([float(evaluation_step(model, jnp.asarray(batch))) for batch in chosen]))


def with_attention(model: LanguageModel, settings: Settings, attention_function: AttentionFunction) -> LanguageModel:
    """Return a model with the weights of `model` and another attention function."""
    return with_weights(model, functools.partial(LanguageModel, settings, attention_function))


def with_weights(model: Any, make_model: Callable[[], Any]) -> Any:
    """Return the model that `make_model` makes, with the weights of `model`."""
    weights = nnx.state(model)
    other = nnx.eval_shape(make_model)
    nnx.update(other, weights)
    return other
