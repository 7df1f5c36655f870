"""Whether routing finds the block that holds a needle: real text, predicted against measured.

Two experiments on the text of the demo, both about the choice of blocks alone; no value is attended to.

Words: every distinct word of the text is a random unit vector of H numbers, which serves as its key. One word of a
context is replaced by a needle that occurs nowhere else, and the query is the needle's vector. Nothing is learned. The
mean of B keys dilutes the needle to 1 / B, and other words add noise of variance 1 / (H B), so that the score of the
needle's block exceeds that of another one by sqrt(H / 2B) standard deviations, if words were independent.

Phrases: tokens are bytes, keys are learned embeddings of them, convolved or not, and a query is learned from the bytes
of a phrase that stands somewhere in the context. Training sees attention over all tokens, never blocks or routing: it
maximises the attention weight on the phrase. Then blocks are chosen in text that training has not seen. The prediction
needs two numbers that are measured token by token: the excess of the phrase's products with the query over other
tokens', and the spread of the latter.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from benchmarks.experiments.recall_records import Recall
from blockdiag import key_convolution, moba_routing
from blockdiag.demo.language_model import VOCABULARY, english_text, split_text


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RecallSettings:
    """Sizes of both experiments.

    Attributes:
        block_sizes: B, each with `attended_tokens` // B blocks for a query, its own included.
        attended_tokens: tokens that a query sees at the most, the same for every block size.
        context: tokens of a context.
        trials: contexts that accuracy is measured on.
        head_dim: H.
        phrase: bytes of a phrase.
        convolutions: sizes of the key convolution; 0 is none.
        steps, batch_size, training_context, learning_rate: of the training.
    """

    block_sizes: tuple[int, ...] = (256, 128, 64, 32, 16)
    attended_tokens: int = 512
    context: int = 4096
    trials: int = 512
    head_dim: int = 64
    phrase: int = 8
    convolutions: tuple[int, ...] = (0, 3, 5)
    steps: int = 200
    batch_size: int = 16
    training_context: int = 512
    learning_rate: float = 1e-2
    seed: int = 0

    def top_k(self, block_size: int) -> int:
        """Blocks of a query, its own included."""
        return self.attended_tokens // block_size


class Retrieval(NamedTuple):
    """Contexts with one query each, behind the context's last token.

    Attributes:
        query: [trials, H].
        key: [trials, context, H].
        position: where the needle begins, int [trials].
        length: tokens of a needle.
    """

    query: Float[Array, "trials H"]
    key: Float[Array, "trials context H"]
    position: Int[np.ndarray, " trials"]
    length: int


def run_recall(settings: RecallSettings, *, say: Callable[[str], None] = lambda line: None) -> list[Recall]:
    """Both experiments; `say` is called with a line of progress."""
    rows = measure_recall("words", words_retrieval(settings), settings, predicted=math.sqrt(settings.head_dim / 2))
    training_text, held_out_text = split_text(english_text())
    for size in settings.convolutions:
        name = f"bytes, convolved {size}" if size else "bytes"
        weights, loss = train(training_text, size, settings)
        say(f"{name}: trained, {loss:.2f} nats on the phrase at the end")
        rows += measure_recall(name, phrase_retrieval(weights, held_out_text, settings), settings)
    return rows


def words_retrieval(settings: RecallSettings) -> Retrieval:
    """Words of the text as random unit vectors, with a needle that is none of them."""
    _, words = np.unique(np.array(english_text().tobytes().split()), return_inverse=True)
    vocabulary = int(words.max()) + 1
    generator = np.random.default_rng(settings.seed)
    vectors = generator.standard_normal((vocabulary + settings.trials, settings.head_dim)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    contexts = _crops(words, settings.context, settings.trials, generator)
    position = _positions(settings, generator, 1)
    needles = vocabulary + np.arange(settings.trials)
    contexts[np.arange(settings.trials), position] = needles
    return Retrieval(jnp.asarray(vectors[needles]), jnp.asarray(vectors)[contexts], position, 1)


def _crops(tokens: np.ndarray, length: int, count: int, generator: np.random.Generator) -> np.ndarray:
    """`count` pieces of a text, [count, length]."""
    starts = generator.integers(0, len(tokens) - length + 1, size=count)
    return tokens[starts[:, None] + np.arange(length)]


def _positions(settings: RecallSettings, generator: np.random.Generator, length: int) -> np.ndarray:
    """Where needles begin: anywhere before the last block of any size, which a query sees in any case.

    A needle lies within one block of the smallest size, so that every size has one block to find.
    """
    smallest = min(settings.block_sizes)
    block = generator.integers(0, (settings.context - max(settings.block_sizes)) // smallest, size=settings.trials)
    return block * smallest + generator.integers(0, smallest - length + 1, size=settings.trials)


def measure_recall(
    keys: str, retrieval: Retrieval, settings: RecallSettings, *, predicted: float | None = None
) -> list[Recall]:
    """Accuracy of the routing, and the signal-to-noise ratio of scores, at every block size.

    Args:
        keys: what the rows are called.
        retrieval: queries and keys.
        predicted: the predicted ratio times sqrt(B); None takes it from the products of single tokens.
    """
    if predicted is None:
        predicted = token_ratio(retrieval)
    return [_recall(keys, retrieval, settings, block_size, predicted) for block_size in settings.block_sizes]


def token_ratio(retrieval: Retrieval) -> float:
    """Excess of the needle's products over sqrt(2) standard deviations of other tokens' products with the query.

    Divided by sqrt(B) this is the signal-to-noise ratio of blocks of B tokens, if tokens were independent.
    """
    products = np.asarray(jnp.einsum("th,tch->tc", retrieval.query, retrieval.key, precision="highest"), np.float64)
    offset = np.arange(products.shape[1])[None, :] - retrieval.position[:, None]
    is_needle = (offset >= 0) & (offset < retrieval.length)
    others = np.where(is_needle, np.nan, products)
    centre = np.nanmean(others, axis=1, keepdims=True)
    excess = np.where(is_needle, products - centre, 0.0).sum(axis=1).mean()
    return float(excess / math.sqrt(2.0 * np.nanvar(others, axis=1).mean()))


def _recall(keys: str, retrieval: Retrieval, settings: RecallSettings, block_size: int, predicted: float) -> Recall:
    """One block size."""
    top_k, trials = settings.top_k(block_size), len(retrieval.position)
    candidates = settings.context // block_size - 1
    needle = retrieval.position // block_size
    # One query behind each context: it has the position of the last key, and sees earlier blocks if it chooses them.
    routing = moba_routing(
        retrieval.query[:, None, None, :], retrieval.key[:, :, None, :], block_size=block_size, top_k=top_k
    )
    chosen = np.asarray(routing.indices)[:, 0, 0]
    accuracy = float((chosen == needle[:, None]).any(axis=1).mean())
    snr = predicted / math.sqrt(block_size)
    return Recall(
        keys=keys,
        block_size=block_size,
        top_k=top_k,
        accuracy=accuracy,
        predicted_accuracy=chosen_probability(snr, candidates, top_k - 1),
        snr=_block_ratio(retrieval, block_size, candidates),
        predicted_snr=snr,
        chance=min(1.0, (top_k - 1) / candidates),
        error=math.sqrt(accuracy * (1.0 - accuracy) / trials),
    )


def _block_ratio(retrieval: Retrieval, block_size: int, candidates: int) -> float:
    """Mean excess of the score of the needle's block, over sqrt(2) standard deviations of scores of other blocks.

    As for tokens, the deviations are those among the blocks of one context; with fewer than two others there are none.
    """
    blocks = retrieval.key[:, : candidates * block_size]
    centroids = blocks.reshape(len(blocks), candidates, block_size, -1).mean(axis=2)
    scores = np.asarray(jnp.einsum("th,tch->tc", retrieval.query, centroids, precision="highest"), np.float64)
    is_needle = np.arange(candidates)[None, :] == (retrieval.position // block_size)[:, None]
    others = np.where(is_needle, np.nan, scores)
    excess = scores[is_needle] - np.nanmean(others, axis=1)
    return float(excess.mean() / math.sqrt(2.0 * np.nanvar(others, axis=1, ddof=1).mean()))


def chosen_probability(snr: float, candidates: int, places: int) -> float:
    """Probability that the needle's block is among the best `places` of `candidates`, for normal independent scores.

    Scores have variance 1, and the needle's block's mean is snr * sqrt(2): their difference then has ratio `snr`.
    """
    if places <= 0:
        return 0.0
    if places >= candidates:
        return 1.0
    points = np.linspace(-8.0, 8.0, 4001)
    density = np.exp(-0.5 * points**2) / math.sqrt(2.0 * math.pi)
    above = np.array([0.5 * math.erfc((point / math.sqrt(2.0)) + snr) for point in points])
    with np.errstate(divide="ignore"):
        logs = np.log(above), np.log1p(-above)
    others = candidates - 1
    total = np.zeros_like(points)
    for count in range(min(places, others + 1)):
        choose = math.lgamma(others + 1) - math.lgamma(count + 1) - math.lgamma(others - count + 1)
        failures = others - count
        with np.errstate(invalid="ignore"):
            exponent = choose + (count * logs[0] if count else 0.0) + (failures * logs[1] if failures else 0.0)
        total += np.exp(np.nan_to_num(exponent, nan=-np.inf))
    return float(np.sum(total * density) * (points[1] - points[0]))


class Weights(NamedTuple):
    """What is learned.

    Attributes:
        phrase: [phrase, 256, H], what each byte of a phrase adds to the query, by its place.
        embedding: [256, H], keys of bytes.
        convolution: [size, 1, H], or None.
    """

    phrase: Float[Array, "phrase 256 H"]
    embedding: Float[Array, "256 H"]
    convolution: Float[Array, "size 1 H"] | None


def initial_weights(size: int, settings: RecallSettings) -> Weights:
    """Small random numbers; the convolution begins as one."""
    phrase, embedding, convolution = jax.random.split(jax.random.key(settings.seed), 3)
    scale = settings.head_dim**-0.5
    shape = (settings.phrase, VOCABULARY, settings.head_dim)
    return Weights(
        scale * jax.random.normal(phrase, shape),
        scale * jax.random.normal(embedding, (VOCABULARY, settings.head_dim)),
        0.3 * jax.random.normal(convolution, (size, 1, settings.head_dim)) if size else None,
    )


def keys_of(weights: Weights, contexts: Int[Array, "C T"]) -> Float[Array, "C T H"]:
    """Keys of bytes, convolved where there is a convolution, of unit length in any case."""
    # A product with one-hot rows instead of a gather, whose derivative scatters, slowly on a CPU.
    key = jax.nn.one_hot(contexts, VOCABULARY, dtype=weights.embedding.dtype) @ weights.embedding
    if weights.convolution is not None:
        key = key_convolution(key[:, :, None, :], weights.convolution)[:, :, 0]
    return key / jnp.sqrt(jnp.sum(key * key, axis=-1, keepdims=True) + 1e-6)


def query_of(weights: Weights, phrases: Int[Array, "C phrase"]) -> Float[Array, "C H"]:
    """Queries for phrases."""
    place = jnp.arange(phrases.shape[1])
    return jnp.sum(weights.phrase[place[None, :], phrases], axis=1)


def attention_loss(
    weights: Weights, contexts: Int[Array, "C T"], position: Int[Array, " C"], phrase: int
) -> Float[Array, ""]:
    """Minus the logarithm of the attention weight on the phrase, over all tokens of the context, averaged."""
    place = position[:, None] + jnp.arange(phrase)[None, :]
    query = query_of(weights, jnp.take_along_axis(contexts, place, axis=1))
    scores = jnp.einsum("ch,cth->ct", query, keys_of(weights, contexts))
    on_phrase = jax.nn.logsumexp(jnp.take_along_axis(scores, place, axis=1), axis=1)
    return jnp.mean(jax.nn.logsumexp(scores, axis=1) - on_phrase)


def train(text: np.ndarray, size: int, settings: RecallSettings) -> tuple[Weights, float]:
    """Weights after training on random pieces of `text`, and the mean loss of the last tenth of the steps."""
    weights: Any = initial_weights(size, settings)
    optimizer = optax.adam(optax.cosine_decay_schedule(settings.learning_rate, settings.steps))
    state = optimizer.init(weights)

    @jax.jit
    def step(weights: Any, state: optax.OptState, contexts: Array, position: Array) -> tuple:
        loss, gradients = jax.value_and_grad(attention_loss)(weights, contexts, position, settings.phrase)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(weights, updates), state, loss

    generator = np.random.default_rng(settings.seed)
    losses = []
    for _ in range(settings.steps):
        contexts = _crops(text, settings.training_context, settings.batch_size, generator).astype(np.int32)
        position = generator.integers(0, settings.training_context - settings.phrase, size=settings.batch_size)
        weights, state, loss = step(weights, state, jnp.asarray(contexts), jnp.asarray(position, jnp.int32))
        losses.append(loss)
    last = losses[-max(1, settings.steps // 10) :]
    return weights, float(np.mean([float(loss) for loss in last]))


def phrase_retrieval(weights: Weights, text: np.ndarray, settings: RecallSettings) -> Retrieval:
    """Phrases of text that training has not seen."""
    generator = np.random.default_rng(settings.seed + 1)
    contexts = _crops(text, settings.context, settings.trials, generator).astype(np.int32)
    position = _positions(settings, generator, settings.phrase)
    phrases = np.take_along_axis(contexts, position[:, None] + np.arange(settings.phrase), axis=1)
    key = jax.lax.map(functools.partial(keys_of, weights), jnp.asarray(contexts).reshape(-1, 1, settings.context))
    return Retrieval(query_of(weights, jnp.asarray(phrases)), key[:, 0], position, settings.phrase)


def by_keys(rows: Sequence[Recall]) -> dict[str, list[Recall]]:
    """Rows of each kind of keys, blocks from small to large."""
    kinds = dict.fromkeys(row.keys for row in rows)
    return {kind: sorted((r for r in rows if r.keys == kind), key=lambda r: r.block_size) for kind in kinds}
