"""Attention variants that `fuse` refuses, as users write them.

A comment marks the first line that breaks a rule, which the refusal must name.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

BATCH, TOKENS, HEADS, WIDTH = 2, 24, 4, 16
QKV = ((BATCH, TOKENS, HEADS, WIDTH),) * 3
MIX = np.random.default_rng(1).normal(size=(HEADS, HEADS)).astype(np.float32)
CAUSAL = np.tril(np.ones((TOKENS, TOKENS), bool))


@dataclass(frozen=True)
class Refused:
    """A function that is refused, and the expected message.

    Attributes:
        function: the function; one of its lines is marked.
        says: a part of the message.
        shapes: the shapes of its arguments.
    """

    function: Callable[..., Any]
    says: str
    shapes: tuple[tuple[int, ...], ...]

    @property
    def operands(self) -> list[jax.Array]:
        draw = np.random.default_rng(0)
        return [jnp.asarray(draw.normal(size=shape), jnp.float32) for shape in self.shapes]

    @property
    def line(self) -> int:
        """Return the number of the marked line."""
        lines, first = inspect.getsourcelines(self.function)
        (marked,) = [place for place, text in enumerate(lines) if text.rstrip().endswith("# breaks here")]
        return first + marked


REFUSED: dict[str, Refused] = {}


def refused(says: str, *shapes: tuple[int, ...]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        REFUSED[function.__name__] = Refused(function, says, shapes or QKV)
        return function

    return add


def scores_of(query, key):
    return jnp.einsum("bqnh,bknh->bnqk", query, key) * query.shape[-1] ** -0.5


def softmax_of(query, key):
    return jax.nn.softmax(scores_of(query, key), axis=-1)


def weighted(weights, value):
    return jnp.einsum("bnqk,bknh->bqnh", weights, value)


BETWEEN = "cannot be computed tile by tile; it is between the scores and their softmax"
BEFORE_VALUES = "cannot be computed tile by tile; it is between the scores and their product with values"
HEADS_MIXED = "sums over an axis of 4 that is neither the queries' nor the keys', such as heads"
WEIGHTS_MIXED = f"`dot_general` (einsum, matmul): a product of weights with another array {HEADS_MIXED}"
SCORES_MIXED = f"`dot_general` (einsum, matmul): a product of scores with another array {HEADS_MIXED}"
ALONG_KEYS = "the keys, which the product with values sums over"
SOFTMAX_OF_QUERIES = f"a softmax along the queries: softmaxes must be along {ALONG_KEYS}"
LINEAR_ONLY = "of a softmax: weights may only be added to each other, scaled, masked by 0 and cast"


# Products that mix heads.


@refused(SCORES_MIXED)
def talking_heads(query, key, value):
    scores = jnp.einsum("bnqk,nm->bmqk", scores_of(query, key), MIX)  # breaks here
    weights = jax.nn.softmax(scores, axis=-1)
    return weighted(jnp.einsum("bnqk,nm->bmqk", weights, MIX), value)


@refused(SCORES_MIXED, *QKV, (64, 64))
def talking_heads_in_a_layer(query, key, value, out):
    scores = scores_of(query, key)
    scores = scores + jnp.einsum("bnqk,nm->bmqk", scores, MIX)  # breaks here
    mixed = jnp.einsum("bnqk,nm->bmqk", jax.nn.softmax(scores, axis=-1), MIX)
    attended = weighted(mixed, value).reshape(BATCH, TOKENS, -1) @ out
    return attended + jax.nn.silu(attended @ out) @ out


@refused(WEIGHTS_MIXED)
def heads_mixed_after_the_softmax(query, key, value):
    weights = jnp.einsum("bnqk,nm->bmqk", softmax_of(query, key), MIX)  # breaks here
    return weighted(weights, value)


@refused(WEIGHTS_MIXED)
def heads_mixed_beside_a_sink(query, key, value):
    logits = jnp.concatenate([scores_of(query, key), jnp.zeros((BATCH, HEADS, TOKENS, 1))], axis=-1)
    weights = jax.nn.softmax(logits, axis=-1)[..., :-1]
    return weighted(jnp.einsum("bnqk,nm->bmqk", weights, MIX), value)  # breaks here


@refused(
    "a product of weights with another array sums over an axis of 3 that is neither the queries' nor the keys'",
    *((2, 4, 4, 3, 16),) * 3,
)
def heads_of_pixels_mixed(query, key, value):
    scores = jnp.einsum("bxynh,buvnh->bnxyuv", query, key)
    weights = jax.nn.softmax(scores.reshape(2, 3, 4, 4, 16), axis=-1).reshape(scores.shape)
    weights = jnp.einsum("bnxyuv,nm->bmxyuv", weights, MIX[:3, :3])  # breaks here
    return jnp.einsum("bnxyuv,buvnh->bxynh", weights, value)


# Functions along an axis of scores or weights.


@refused(f"`rev` (flip, [::-1]) of scores {BETWEEN}")
def contextual_positions(query, key, value):
    """Positions count the keys whose gate is open; embeddings are interpolated between integer positions."""
    scores = scores_of(query, key)
    gates = jax.nn.sigmoid(scores)
    counts = jnp.cumsum(gates[..., ::-1], axis=-1)[..., ::-1]  # breaks here
    counts = jnp.minimum(counts, 7.0)
    table = jnp.einsum("bqnh,ph->bnqp", query, jnp.ones((8, WIDTH)))
    low, high = jnp.floor(counts), jnp.ceil(counts)
    below, above = (jnp.take_along_axis(table, x.astype(int), axis=-1) for x in (low, high))
    scores = scores + below + (counts - low) * (above - below)
    return weighted(jax.nn.softmax(scores, axis=-1), value)


@refused(f"`cumsum` of scores {BETWEEN}")
def stick_breaking(query, key, value):
    logits = scores_of(query, key)
    left = jnp.where(CAUSAL, jax.nn.log_sigmoid(-logits), 0.0)
    left = lax.cumsum(left, axis=3, reverse=True) - left  # breaks here
    return weighted(jnp.where(CAUSAL, jnp.exp(jax.nn.log_sigmoid(logits) + left), 0.0), value)


@refused(f"`cumprod` of scores {BEFORE_VALUES}")
def monotonic(query, key, value):
    stops = jax.nn.sigmoid(scores_of(query, key))
    goes_on = jnp.cumprod(1 - stops, axis=-1)  # breaks here
    goes_on = jnp.pad(goes_on, ((0, 0), (0, 0), (0, 0), (1, 0)), constant_values=1.0)[..., :-1]
    return weighted(stops * goes_on, value)


@refused(f"`sort` of scores {BEFORE_VALUES}")
def sparsemax(query, key, value):
    scores = scores_of(query, key)
    ordered = -jnp.sort(-scores, axis=-1)  # breaks here
    sums = jnp.cumsum(ordered, axis=-1)
    counts = (1 + jnp.arange(1.0, TOKENS + 1)[None, None, None] * ordered > sums).sum(axis=-1, keepdims=True)
    threshold = (jnp.take_along_axis(sums, counts - 1, axis=-1) - 1) / counts.astype(scores.dtype)
    return weighted(jnp.maximum(scores - threshold, 0.0), value)


@refused("`sort` of weights cannot be computed tile by tile")
def nucleus(query, key, value):
    weights = softmax_of(query, key)
    ordered = jnp.sort(weights, axis=-1)[..., ::-1]  # breaks here
    before = jnp.cumsum(ordered, axis=-1) - ordered
    least = jnp.where(before < 0.9, ordered, 1.0).min(axis=-1, keepdims=True)
    kept = jnp.where(weights >= least, weights, 0.0)
    return weighted(kept / kept.sum(axis=-1, keepdims=True), value)


@refused(f"`conv_general_dilated` (convolution) of scores {BETWEEN}")
def multi_token(query, key, value):
    kernel = jnp.ones((HEADS, 1, 3, 3)) / 9
    scores = scores_of(query, key)
    scores = lax.conv_general_dilated(scores, kernel, (1, 1), "SAME", feature_group_count=HEADS)  # breaks here
    return weighted(jax.nn.softmax(scores, axis=-1), value)


@refused(f"`reduce_window_max` of scores {BETWEEN}")
def dilated_scores(query, key, value):
    scores = lax.reduce_window(scores_of(query, key), -jnp.inf, lax.max, (1, 1, 1, 3), (1,) * 4, "SAME")  # breaks here
    return weighted(jax.nn.softmax(scores, axis=-1), value)


@refused(f"`scan` (scan, fori_loop) of scores {BEFORE_VALUES}")
def sinkhorn_by_a_loop(query, key, value):
    def normalised(_, scores):
        scores = scores - jax.nn.logsumexp(scores, axis=-1, keepdims=True)
        return scores - jax.nn.logsumexp(scores, axis=-2, keepdims=True)

    scores = lax.fori_loop(0, 3, normalised, scores_of(query, key))  # breaks here
    return weighted(jnp.exp(scores), value)


@refused(f"`while` of scores {BETWEEN}")
def halved_until_small(query, key, value):
    scores = scores_of(query, key)
    scores = lax.while_loop(lambda x: jnp.abs(x).max() > 1, lambda x: x / 2, scores)  # breaks here
    return weighted(jax.nn.softmax(scores, axis=-1), value)


@refused(f"`cond` of scores {BETWEEN}")
def tamed_where_large(query, key, value):
    scores = scores_of(query, key)
    scores = lax.cond(scores.max() > 10, lambda x: x / x.max(), lambda x: x, scores)  # breaks here
    return weighted(jax.nn.softmax(scores, axis=-1), value)


@refused(f"`triangular_solve` of scores {BEFORE_VALUES}")
def delta_rule(query, key, value):
    """Subtract from each value what the memory already holds for its key."""
    before = jnp.where(CAUSAL & ~np.eye(TOKENS, dtype=bool), scores_of(key, key), 0.0)
    identity = jnp.broadcast_to(jnp.eye(TOKENS), before.shape)
    inverse = jax.scipy.linalg.solve_triangular(identity + before, identity, lower=True)  # breaks here
    return weighted(inverse, value)


@refused(f"`fft` of scores {BETWEEN}")
def mixed_by_frequencies(query, key, value):
    scores = jnp.fft.fft(scores_of(query, key), axis=-1).real  # breaks here
    return weighted(jax.nn.softmax(scores, axis=-1), value)


@refused(f"`pure_callback` of scores {BETWEEN}")
def measured_by_numpy(query, key, value):
    scores = scores_of(query, key)
    scores = jax.pure_callback(np.sinc, jax.ShapeDtypeStruct(scores.shape, scores.dtype), scores)  # breaks here
    return weighted(jax.nn.softmax(scores, axis=-1), value)


@refused(f"`lgamma` of scores {BETWEEN}")
def log_factorial(query, key, value):
    scores = lax.lgamma(scores_of(query, key) ** 2 + 1)  # breaks here
    return weighted(jax.nn.softmax(scores, axis=-1), value)


@refused(f"`scatter` of scores {BETWEEN}")
def without_the_best(query, key, value):
    scores = scores_of(query, key)
    batch, heads, rows = (np.arange(x) for x in scores.shape[:3])
    places = (batch[:, None, None], heads[None, :, None], rows[None, None], scores.argmax(axis=-1))
    scores = scores.at[places].set(-jnp.inf)  # breaks here
    return weighted(jax.nn.softmax(scores, axis=-1), value)


@refused("`transpose` of weights cannot be computed tile by tile")
def symmetric(query, key, value):
    weights = softmax_of(query, key)
    return weighted((weights + weights.swapaxes(-1, -2)) / 2, value)  # breaks here


@refused(f"`top_k` of scores {BETWEEN}")
def values_of_the_best(query, key, value):
    best, index = lax.top_k(scores_of(query, key), 8)  # breaks here
    values = jnp.take_along_axis(jnp.moveaxis(value, 1, 2)[:, :, None], index[..., None], axis=3)
    return jnp.einsum("bnqk,bnqkh->bqnh", jax.nn.softmax(best, axis=-1), values)


@refused(f"`sort` of scores {BETWEEN}")
def beside_a_good_one(query, key, value):
    good = weighted(softmax_of(query, key), value)
    scores = jnp.sort(scores_of(key, query), axis=-1)  # breaks here
    return good + weighted(jax.nn.softmax(scores, axis=-1), value)


@refused(f"`sort` of scores {BETWEEN}")
def two_memories(query, key, value):
    near, far = scores_of(query, key), jnp.sort(scores_of(query, value), axis=-1)  # breaks here
    weights = jax.nn.softmax(jnp.concatenate([near, far], axis=-1), axis=-1)
    return weighted(weights[..., :TOKENS], value) + weighted(weights[..., TOKENS:], key)


@refused(f"`cumsum` of scores {BETWEEN}")
def rematerialised(query, key, value):
    @jax.checkpoint
    def layer(x):
        scores = jnp.cumsum(scores_of(x, key), axis=-1)  # breaks here
        return x + weighted(jax.nn.softmax(scores, axis=-1), value)

    return layer(layer(query))


@refused(f"`cumsum` of scores {BETWEEN}", (4, 24, 16), (4, 40, 16), (4, 40, 16))
def mapped_over_heads(query, key, value):
    def head(query, key, value):
        scores = query @ key.T
        scores = scores - jnp.cumsum(scores, axis=1)  # breaks here
        return jax.nn.softmax(scores) @ value

    return jax.vmap(head)(query, key, value)


# Reductions of whole rows, columns or heads.


@refused("`top_k`: a value computed from all scores of a row outside a softmax")
def best_keys(query, key, value):
    scores = scores_of(query, key)
    least = lax.top_k(scores, 8)[0][..., -1:]  # breaks here
    return weighted(jax.nn.softmax(jnp.where(scores < least, -jnp.inf, scores), axis=-1), value)


@refused("`sort`: a value computed from all scores of a row outside a softmax", (2, 16), (2, 24, 16), (2, 24, 16))
def best_keys_of_one_query(query, key, value):
    scores = jnp.einsum("bh,bsh->bs", query, key)
    scores = jnp.where(scores >= jnp.sort(scores, axis=-1)[:, -3:-2], scores, -jnp.inf)  # breaks here
    return jnp.einsum("bs,bsh->bh", jax.nn.softmax(scores, axis=-1), value)


@refused("`reduce_sum` (sum, mean) along the keys: a value computed from all scores of a row outside a softmax")
def standardised(query, key, value):
    scores = jnp.where(CAUSAL, scores_of(query, key), 0.0)
    scores = (scores - scores.mean(axis=-1, keepdims=True)) / scores.std(axis=-1, keepdims=True)  # breaks here
    return weighted(jax.nn.softmax(scores, axis=-1), value)


@refused(
    "`reduce_sum` (sum, mean) along the keys: a value computed from all scores of a row outside a softmax",
    *((2, 24, 64), (64, 192), (64, 64)),
)
def layer_with_scores_of_unit_length(x, into, out):
    """Without the softmax, weights with this quotient could be fused."""
    query, key, value = (each.reshape(2, 24, 4, 16) for each in jnp.split(x @ into, 3, axis=-1))
    scores = jnp.where(CAUSAL, scores_of(query, key), -1e9)
    scores = scores / jnp.linalg.norm(scores, axis=-1, keepdims=True)  # breaks here
    x = x + weighted(jax.nn.softmax(scores, axis=-1), value).reshape(x.shape) @ out
    return x + jax.nn.silu(x @ out) @ out


@refused("`reduce_max` (max) along the keys: a value computed from all scores of a row outside a softmax")
def temperature_of_the_largest(query, key, value):
    scores = scores_of(query, key)
    temperature = 1 + jnp.abs(scores).max(axis=-1, keepdims=True)  # breaks here
    return weighted(jax.nn.softmax(scores / temperature, axis=-1), value)


@refused("`reduce_max` (max) along the keys: a value computed from all scores of a row outside a softmax")
def retention_by_the_largest(query, key, value):
    decayed = jnp.where(CAUSAL, 0.9 * scores_of(query, key), 0.0)
    decayed = decayed / jnp.maximum(jnp.abs(decayed).max(axis=-1, keepdims=True), 1.0)  # breaks here
    return weighted(decayed, value)


@refused("`reduce_max` (max) along the keys: a value computed from all scores of a row outside a softmax")
def entmax_by_bisection(query, key, value):
    scores = scores_of(query, key) / 2
    high = scores.max(axis=-1, keepdims=True)  # breaks here
    low = high - 1
    for _ in range(3):
        middle = (low + high) / 2
        is_below = (jnp.maximum(scores - middle, 0) ** 2).sum(axis=-1, keepdims=True) >= 1
        low, high = jnp.where(is_below, middle, low), jnp.where(is_below, high, middle)
    return weighted(jnp.maximum(scores - low, 0) ** 2, value)


@refused("`reduce_sum` (sum, mean) along the keys: a value computed from all weights of a row outside a softmax")
def temperature_of_entropy(query, key, value):
    scores = scores_of(query, key)
    weights = jax.nn.softmax(scores, axis=-1)
    entropy = -(weights * jnp.log(weights + 1e-9)).sum(axis=-1, keepdims=True)  # breaks here
    return weighted(jax.nn.softmax(scores * jnp.where(entropy > 0.5, 1 + entropy, 1.0), axis=-1), value)


@refused("`reduce_max` (max) along the keys: a value computed from all weights of a row outside a softmax")
def eight_bits(query, key, value):
    weights = softmax_of(query, key)
    scale = weights.max(axis=-1, keepdims=True)  # breaks here
    return weighted(weights / scale * 448, value) * jnp.moveaxis(scale, 1, 2) / 448


@refused("`argmax` along the keys: a value computed from all weights of a row outside a softmax")
def hard_with_soft_derivative(query, key, value):
    weights = softmax_of(query, key)
    hard = jax.nn.one_hot(weights.argmax(axis=-1), TOKENS)  # breaks here
    return weighted(hard + weights - lax.stop_gradient(weights), value)


@refused("`argmax` along the keys: a value computed from all scores of a row outside a softmax")
def nearest_key(query, key, value):
    hard = jax.nn.one_hot(scores_of(query, key).argmax(axis=-1), TOKENS)  # breaks here
    return weighted(hard, value)


@refused("`reduce_sum` (sum, mean) along the queries: a value computed from all scores of a column outside a softmax")
def columns_centred(query, key, value):
    scores = scores_of(query, key)
    scores = scores - scores.mean(axis=-2, keepdims=True)  # breaks here
    return weighted(jax.nn.softmax(scores, axis=-1), value)


@refused("`reduce_sum` (sum, mean) along the queries: a value computed from all weights of a column outside a softmax")
def heavy_hitters(query, key, value):
    use = softmax_of(query, key).sum(axis=-2, keepdims=True)  # breaks here
    is_kept = use >= lax.top_k(use, 8)[0][..., -1:]
    return weighted(jax.nn.softmax(jnp.where(is_kept, scores_of(query, key), -1e9), axis=-1), value)


@refused("`reduce_sum` (sum, mean) along the queries and the keys: a value computed from all scores outside a softmax")
def unit_norm(query, key, value):
    scores = scores_of(query, key)
    scores = scores / jnp.linalg.norm(scores, axis=(-2, -1), keepdims=True)  # breaks here
    return weighted(jax.nn.softmax(scores, axis=-1), value)


@refused("`reduce_sum` (sum, mean) along the keys: a value computed from all scores of a row outside a softmax")
def unit_rows(query, key, value):
    scores = scores_of(query, key)
    powers = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    return weighted(powers / jnp.sqrt((powers**2).sum(axis=-1, keepdims=True)), value)  # breaks here


@refused("`reduce_sum` (sum, mean) along the keys: a value computed from all scores of a row outside a softmax")
def unit_rows_divided_late(query, key, value):
    scores = scores_of(query, key)
    powers = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    length = jnp.sqrt((powers**2).sum(axis=-1))  # breaks here
    return weighted(powers, value) / jnp.moveaxis(length, 1, 2)[..., None]


# Softmaxes along other axes, or of other inputs.


@refused(SOFTMAX_OF_QUERIES)
def slots(query, key, value):
    weights = jax.nn.softmax(scores_of(query, key), axis=-2) + 1e-8  # breaks here
    return weighted(weights / weights.sum(axis=-1, keepdims=True), value)


@refused(SOFTMAX_OF_QUERIES)
def mutual_nearest(query, key, value):
    scores = scores_of(query, key)
    rows = jax.nn.softmax(scores, axis=-1)
    return weighted(rows * jax.nn.softmax(scores, axis=-2), value)  # breaks here


@refused(SOFTMAX_OF_QUERIES)
def sinkhorn(query, key, value):
    scores = scores_of(query, key)
    for _ in range(2):
        scores = scores - jax.nn.logsumexp(scores, axis=-1, keepdims=True)
        scores = scores - jax.nn.logsumexp(scores, axis=-2, keepdims=True)  # breaks here
    return weighted(jnp.exp(scores), value)


@refused(SOFTMAX_OF_QUERIES, *((24, 16),) * 3)
def transposed_by_mistake(query, key, value):
    return jax.nn.softmax(query @ key.T / 4, axis=0) @ value  # breaks here


@refused("a softmax along an axis that is neither the queries' nor the keys', such as heads: softmaxes must be along")
def heads_compete(query, key, value):
    return weighted(jax.nn.softmax(scores_of(query, key), axis=1), value)  # breaks here


@refused(f"a softmax along the queries and the keys: softmaxes must be along {ALONG_KEYS}")
def one_distribution(query, key, value):
    scores = scores_of(query, key)
    weights = jax.nn.softmax(scores.reshape(BATCH, HEADS, -1), axis=-1)  # breaks here
    return weighted(weights.reshape(scores.shape), value)


@refused(f"a softmax along a part of the keys: softmaxes must be along {ALONG_KEYS}")
def blocks_weigh_alike(query, key, value):
    scores = scores_of(query, key).reshape(BATCH, HEADS, TOKENS, 4, 6)
    weights = jax.nn.softmax(scores, axis=-1) / 4  # breaks here
    return weighted(weights.reshape(BATCH, HEADS, TOKENS, TOKENS), value)


@refused("a softmax of the weights of another softmax: the input of a softmax must be scores")
def sharpened_by_a_second(query, key, value):
    weights = softmax_of(query, key)
    return weighted(jax.nn.softmax(8 * weights, axis=-1), value)  # breaks here


# Functions of weights.


@refused(f"`integer_pow` {LINEAR_ONLY}")
def sharpened(query, key, value):
    weights = softmax_of(query, key) ** 2  # breaks here
    return weighted(weights / weights.sum(axis=-1, keepdims=True), value)


@refused(f"`max` {LINEAR_ONLY}")
def better_of_two(query, key, value):
    weights = jnp.maximum(softmax_of(query, key), softmax_of(key, query))  # breaks here
    return weighted(weights, value)


@refused(f"`gt` {LINEAR_ONLY}")
def pruned(query, key, value):
    weights = softmax_of(query, key)
    return weighted(jnp.where(weights > 0.02, weights, 0.0), value)  # breaks here


@refused(f"`round` {LINEAR_ONLY}")
def rounded(query, key, value):
    weights = jnp.round(softmax_of(query, key) * 255) / 255  # breaks here
    return weighted(weights, value)


# Sums of softmaxes that are not their normalisers.


@refused("`add` of the sum of a softmax: remove it if it only guards rows that see no key; they give 0 without it")
def smoothed(query, key, value):
    scores = scores_of(query, key)
    powers = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    return weighted(powers / (powers.sum(axis=-1, keepdims=True) + 0.5), value)  # breaks here


@refused("`sub` of the sum of a softmax: weights form a softmax only if they are divided by the sum itself")
def others_alone(query, key, value):
    scores = scores_of(query, key)
    powers = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    others = powers.sum(axis=-1, keepdims=True) - 1  # breaks here
    return weighted(powers / jnp.maximum(others, 1e-3), value)


@refused(
    "`add` of `exp2` to the sum of the `exp` of scores: additional exponentials, such as a sink's, must have the same"
)
def sink_of_another_base(query, key, value):
    scores = scores_of(query, key)
    largest = scores.max(axis=-1, keepdims=True)
    powers = jnp.exp(scores - largest)
    total = powers.sum(axis=-1, keepdims=True) + jnp.exp2(1 - largest)  # breaks here
    return weighted(powers / total, value)


@refused("`exp` of scores minus their maximum that is not divided by its sum along the keys")
def online_by_hand(query, key, value):
    def step(carry, block):
        largest, total, result = carry
        keys, values = block
        scores = scores_of(query, keys)
        new = jnp.maximum(largest, scores.max(axis=-1))
        powers, factor = jnp.exp(scores - new[..., None]), jnp.exp(largest - new)  # breaks here
        result = result * factor[..., None] + jnp.einsum("bnqk,bknh->bnqh", powers, values)
        return (new, total * factor + powers.sum(axis=-1), result), None

    blocks = [jnp.moveaxis(x.reshape(BATCH, 3, 8, HEADS, WIDTH), 1, 0) for x in (key, value)]
    rows = jnp.zeros((BATCH, HEADS, TOKENS))
    (_, total, result), _ = lax.scan(step, (rows - jnp.inf, rows, jnp.zeros((*rows.shape, WIDTH))), blocks)
    return result / total[..., None]


@refused("`slice` of weights: some of a softmax's keys have no value")
def sink_dropped_at_the_wrong_end(query, key, value):
    logits = jnp.concatenate([jnp.zeros((BATCH, HEADS, TOKENS, 1)), scores_of(query, key)], axis=-1)
    weights = jax.nn.softmax(logits, axis=-1)
    return weighted(weights[..., :-1], value)  # breaks here


# Functions that hide attention, and functions without attention.


@refused("`custom_vjp_call` has a derivative of its own that cannot be computed tile by tile")
def softmax_with_its_own_derivative(query, key, value):
    @jax.custom_vjp
    def softmax(scores):
        return jax.nn.softmax(scores, axis=-1)

    def backward(weights, grad):
        return (weights * (grad - (weights * grad).sum(axis=-1, keepdims=True)),)

    softmax.defvjp(lambda scores: (softmax(scores), softmax(scores)), backward)
    return weighted(softmax(scores_of(query, key)), value)  # breaks here


@refused(f"nothing inside it can be fused: `sort` of scores {BETWEEN}")
def layers(query, key, value):
    def layer(x, _):
        scores = jnp.sort(scores_of(x, key), axis=-1)  # breaks here
        return x + weighted(jax.nn.softmax(scores, axis=-1), value), None

    return lax.scan(layer, query, length=2)[0]


@refused("loops without a known number of steps are not analysed: fuse the function that they run")
def until_it_settles(query, key, value):
    def step(x):
        return weighted(softmax_of(x, key), value)

    return lax.while_loop(lambda x: jnp.abs(x).max() > 1, step, query)  # breaks here


@refused("there is no product with a softmax of scores: the softmax at", (2, 24, 16), (10, 16))
def classifier(x, classes):
    return jax.nn.softmax(x @ classes.T, axis=-1)  # breaks here


@refused("there is no product with a softmax of scores: the softmax at", *((2, 24, 16),) * 3)
def points(query, key, value):
    """Values differ from query to query, and weights from feature to feature."""
    differences = query[:, :, None] - key[:, None]
    places = jnp.tanh(differences @ jnp.eye(16))
    weights = jax.nn.softmax(jax.nn.relu(differences + places) @ jnp.eye(16), axis=2)  # breaks here
    return (weights * (value[:, None] + places)).sum(axis=2)
