"""Gallery of attention variants in plain `jax.numpy`, with inputs, for the compiler's tests and documentation.

The functions are in the modules `masks`, `scores`, `structures` and `forms`. None of them depends on the compiler.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike

from blockdiag.fusion.gallery import forms, masks, scores, structures

__all__ = ["GROUPS", "VARIANTS", "Sizes", "Variant"]


@dataclass(frozen=True)
class Sizes:
    """Sizes of a variant's inputs.

    Attributes:
        batch: B, sequences.
        rows: R, of variants with five axes.
        query_tokens: T, queries of a sequence; in self-attention keys too.
        key_tokens: S, keys of a sequence.
        query_heads: N, a multiple of `key_heads`.
        key_heads: K, which grouped variants use.
        head_dim: H, a multiple of 4.
        value_dim: V.
        dtype: of the floating inputs.

    Example:
        >>> from blockdiag.fusion.gallery import Sizes
        >>> Sizes(batch=1, query_tokens=64).shape("BTNH")
        (1, 64, 4, 16)
    """

    batch: int = 2
    rows: int = 3
    query_tokens: int = 40
    key_tokens: int = 40
    query_heads: int = 4
    key_heads: int = 2
    head_dim: int = 16
    value_dim: int = 16
    dtype: DTypeLike = jnp.float32

    def shape(self, axes: str) -> tuple[int, ...]:
        """Return the shape of an array from its axis letters.

        Args:
            axes: one character per axis: a letter as above, or a digit, which is the size itself. M is 2 N, E is H / 2,
                W is 2 V, J is N V, P is 4 and U is 32. Y and X are the rows and columns of a grid of T pixels.

        Returns:
            The shape.

        Raises:
            KeyError: an unknown letter.
        """
        named = self._axis_sizes
        return tuple(int(axis) if axis.isdigit() else named[axis] for axis in axes)

    @property
    def _axis_sizes(self) -> dict[str, int]:
        grid_rows = next(n for n in range(math.isqrt(self.query_tokens), 0, -1) if self.query_tokens % n == 0)
        return {
            "B": self.batch,
            "R": self.rows,
            "T": self.query_tokens,
            "S": self.key_tokens,
            "N": self.query_heads,
            "M": 2 * self.query_heads,
            "K": self.key_heads,
            "H": self.head_dim,
            "E": self.head_dim // 2,
            "V": self.value_dim,
            "W": 2 * self.value_dim,
            "J": self.query_heads * self.value_dim,  # joined heads
            "P": 4,  # points of a head
            "U": 32,  # buckets of a table
            "Y": grid_rows,
            "X": self.query_tokens // grid_rows,
        }


@dataclass(frozen=True)
class Variant:
    """Attention variant of the gallery.

    Attributes:
        name: its key in `VARIANTS`.
        function: takes arrays by keyword and returns an array or a tuple of arrays.
        make_inputs: takes a random key and sizes, and returns the arrays. Floating arrays have the dtype of the sizes.
            Arrays are drawn on the host, so this cannot be traced.
        differentiable: the names of the floating inputs.
        note: one sentence for the documentation.
        options: keyword arguments for thousands of tokens; the function's defaults are for dozens.

    References:
        The variants include the examples of FlexAttention, Dong et al. (2024), and Flashlight, You et al. (2025).

    Example:
        >>> import jax
        >>> from blockdiag.fusion.gallery import VARIANTS, Sizes
        >>> variant = VARIANTS["causal"]
        >>> inputs = variant.make_inputs(jax.random.key(0), Sizes(query_tokens=24))
        >>> variant.differentiable, variant.function(**inputs).shape
        (('query', 'key', 'value'), (2, 24, 4, 16))
    """

    name: str
    function: Callable[..., Any]
    make_inputs: Callable[[Array, Sizes], dict[str, Array]]
    differentiable: tuple[str, ...]
    note: str
    options: Mapping[str, int] = field(default_factory=dict, hash=False)

    @property
    def scaled(self) -> Callable[..., Any]:
        """The function with `options` applied."""
        return functools.partial(self.function, **self.options)


@dataclass(frozen=True)
class _Draw:
    """Sampler of one input. It uses NumPy, because JAX would compile a program for every shape."""

    sample: Callable[[np.random.Generator, Sizes], np.ndarray]
    is_floating: bool = True

    def __call__(self, generator: np.random.Generator, sizes: Sizes) -> Array:
        drawn = self.sample(generator, sizes)
        return jnp.asarray(drawn.astype(jnp.dtype(sizes.dtype)) if self.is_floating else drawn)


def _normal(axes: str, scale: float = 1.0, mean: float = 0.0) -> _Draw:
    return _Draw(lambda generator, sizes: generator.normal(mean, scale, sizes.shape(axes)))


def _uniform(axes: str, low: float, high: float) -> _Draw:
    return _Draw(lambda generator, sizes: generator.uniform(low, high, sizes.shape(axes)))


def _padding_bias(axes: str) -> _Draw:
    """Draw a normal bias in which about a third of the elements are -1e9, but never the first of the last axis."""

    def sample(generator: np.random.Generator, sizes: Sizes) -> np.ndarray:
        is_kept = _mask(axes).sample(generator, sizes)
        return np.where(is_kept, generator.normal(size=is_kept.shape), -1e9)

    return _Draw(sample)


def _rotations(axes: str) -> _Draw:
    """Draw orthogonal matrices [.., 3, 3]."""
    return _Draw(lambda generator, sizes: np.linalg.qr(generator.normal(size=sizes.shape(axes)))[0])


def _integers(axes: str, low: int, highest: str) -> _Draw:
    """Draw integers from `low` to the size of the axis `highest`, inclusive."""

    def sample(generator: np.random.Generator, sizes: Sizes) -> np.ndarray:
        (high,) = sizes.shape(highest)
        return generator.integers(low, high, sizes.shape(axes), endpoint=True)

    return _Draw(sample, is_floating=False)


def _rolled_positions(axes: str) -> _Draw:
    """Draw positions of a ring buffer: 0, 1, .. along the last axis, rotated by a random offset in each row."""

    def sample(generator: np.random.Generator, sizes: Sizes) -> np.ndarray:
        *rows, count = sizes.shape(axes)
        return (np.arange(count) + generator.integers(count, size=(*rows, 1))) % count

    return _Draw(sample, is_floating=False)


def _segments(axes: str) -> _Draw:
    """Draw about seven segments of random lengths along the last axis: 0, 0, 0, 1, 1, 2, .."""

    def sample(generator: np.random.Generator, sizes: Sizes) -> np.ndarray:
        shape = sizes.shape(axes)
        return np.cumsum(generator.random(shape) < 6 / shape[-1], axis=-1)

    return _Draw(sample, is_floating=False)


def _offsets(tokens: str, documents: int = 4) -> _Draw:
    """Draw the start offsets of documents of random lengths, perhaps 0, followed by the number of tokens."""

    def sample(generator: np.random.Generator, sizes: Sizes) -> np.ndarray:
        (count,) = sizes.shape(tokens)
        return np.array([0, *sorted(generator.integers(count + 1, size=documents - 1)), count])

    return _Draw(sample, is_floating=False)


def _mask(axes: str) -> _Draw:
    """Draw a mask that keeps about two thirds of the elements, and always the first of the last axis."""

    def sample(generator: np.random.Generator, sizes: Sizes) -> np.ndarray:
        mask = generator.random(sizes.shape(axes)) < 0.67
        mask[..., 0] = True
        return mask

    return _Draw(sample, is_floating=False)


def _variant(
    function: Callable[..., Any],
    note: str,
    *,
    name: str | None = None,
    options: Mapping[str, int] | None = None,
    **inputs: str | _Draw,
) -> Variant:
    """Return a variant; an input given only by its axes is drawn from a normal distribution."""
    draws = {name: _normal(draw) if isinstance(draw, str) else draw for name, draw in inputs.items()}

    def make_inputs(key: Array, sizes: Sizes) -> dict[str, Array]:
        generator = np.random.default_rng(np.asarray(jax.random.key_data(key)))
        return {name: draw(generator, sizes) for name, draw in draws.items()}

    differentiable = tuple(name for name, draw in draws.items() if draw.is_floating)
    return Variant(name or function.__name__, function, make_inputs, differentiable, note, options or {})


# Query, key and value by layout: heads after tokens or before them; cross-attention (S keys) or self-attention.
_CROSS = {"query": "BTNH", "key": "BSNH", "value": "BSNV"}
_SELF = {"query": "BTNH", "key": "BTNH", "value": "BTNV"}
_HEADS_FIRST = {"query": "BNTH", "key": "BNSH", "value": "BNSV"}
_HEADS_FIRST_SELF = {"query": "BNTH", "key": "BNTH", "value": "BNTV"}
_LIBRARY = {"query": "BTNH", "key": "BSNH", "value": "BSNH"}
_GROUPED = {"query": "BTNH", "key": "BSKH", "value": "BSKV"}
# A differentiable scalar per head that stays positive, and a small one.
_POSITIVE = _uniform("N", 0.1, 0.9)
_SMALL = _normal("N", 0.3)

_MASKS = (
    _variant(masks.vanilla, "Two einsums and a softmax.", **_CROSS),
    _variant(masks.softmax_by_hand, "The softmax written out, with its maximum subtracted.", **_HEADS_FIRST),
    _variant(masks.divided_last, "The product with the values is divided by the sum of the weights.", **_HEADS_FIRST),
    _variant(masks.log_sum_exp, "The softmax as the exponential of scores minus their log-sum-exp.", **_CROSS),
    _variant(masks.wide_scores, "Scores and softmax in float32, whatever the inputs are.", **_CROSS),
    _variant(masks.keys_first, "Scores with the keys before the queries.", **_CROSS),
    _variant(masks.library, "`jax.nn.dot_product_attention`, unchanged.", **_LIBRARY),
    _variant(
        masks.library_causal_grouped,
        "`jax.nn.dot_product_attention`, causal, with fewer heads of keys than of queries.",
        query="BTNH",
        key="BSKH",
        value="BSKH",
    ),
    _variant(
        masks.library_window_lengths,
        "`jax.nn.dot_product_attention` with lengths and a window that ends a little after the query.",
        **_LIBRARY,
        lengths=_integers("B", 1, "S"),
    ),
    _variant(masks.causal, "Causal: one range of positions on both axes.", **_SELF),
    _variant(masks.causal_tril, "Causal by a lower triangle; the queries are the last tokens.", **_HEADS_FIRST),
    _variant(masks.causal_constant, "Causal by a constant NumPy mask.", **_SELF),
    _variant(masks.causal_one_head, "Causal attention of one head, mapped over heads and batch.", **_HEADS_FIRST_SELF),
    _variant(
        masks.causal_positions,
        "Causal by positions that are arguments, as in a ring buffer.",
        **_CROSS,
        query_positions=_integers("BT", 0, "S"),
        key_positions=_rolled_positions("BS"),
    ),
    _variant(masks.sliding_window, "Causal, and only the last few keys.", options={"window": 256}, **_SELF),
    _variant(
        masks.symmetric_window,
        "Keys near the query on both sides, by an additive mask.",
        options={"radius": 128},
        **_HEADS_FIRST_SELF,
    ),
    _variant(masks.dilated_window, "Every fourth key of a causal window.", options={"window": 512}, **_SELF),
    _variant(
        masks.strided_and_local,
        "Causal: near keys, and the last key of every stride.",
        options={"stride": 128},
        **_SELF,
    ),
    _variant(
        masks.prefix_lm,
        "Causal after a prefix of constant length that all queries see.",
        options={"prefix": 512},
        **_SELF,
    ),
    _variant(
        masks.prefix_lm_lengths,
        "Causal after a prefix that all queries see; its length is an argument.",
        **_SELF,
        prefixes=_integers("B", 0, "T"),
    ),
    _variant(masks.document, "Tokens see their own document.", **_SELF, segments=_segments("BT")),
    _variant(
        masks.causal_document, "Tokens see earlier tokens of their own document.", **_SELF, segments=_segments("BT")
    ),
    _variant(masks.block_diagonal, "Tokens see their own block, of any length.", options={"block_size": 320}, **_SELF),
    _variant(
        masks.packed_documents,
        "Causal documents of any length, packed without a batch axis, by offsets.",
        query="TNH",
        key="TNH",
        value="TNV",
        offsets=_offsets("T"),
    ),
    _variant(masks.cross_attention, "Padded keys are masked by length.", **_CROSS, lengths=_integers("B", 1, "S")),
    _variant(masks.dense_mask, "A boolean mask in memory, shared by the heads.", **_CROSS, mask=_mask("B1TS")),
)

_SCORES = (
    _variant(scores.alibi, "Causal with a linear bias by distance; the slopes are constants.", **_SELF),
    _variant(scores.alibi_learned, "A linear bias by distance; the slopes are learned.", **_SELF, slopes=_POSITIVE),
    _variant(
        scores.clipped_distance,
        "A learned slope times a clipped distance.",
        options={"furthest": 128},
        **_CROSS,
        slopes=_SMALL,
    ),
    _variant(scores.soft_cap, "Scores bounded by a tanh, and a softmax that needs no maximum.", **_CROSS),
    _variant(scores.t5_relative_bias, "A learned bias by logarithmic bucket of the distance.", **_CROSS, table="UN"),
    _variant(
        scores.query_temperature,
        "Every query of every head has its own temperature.",
        **_CROSS,
        temperature=_uniform("BTN", 0.5, 2.0),
    ),
    _variant(
        scores.head_temperature,
        "A learned temperature for each head.",
        **_HEADS_FIRST,
        log_temperature=_normal("N", 0.3, mean=1.4),
    ),
    _variant(
        scores.log_length_scaling,
        "Causal; scores grow with the logarithm of the number of keys that a query sees.",
        **_SELF,
        scale=_POSITIVE,
    ),
    *(
        _variant(scores.dense_bias, f"A learned bias of shape {text}.", name=f"dense_bias_{axes}", **_CROSS, bias=axes)
        for axes, text in {
            "BNTS": "[B, N, T, S]",
            "1NTS": "[1, N, T, S]",
            "B1TS": "[B, 1, T, S]",
            "B11S": "[B, 1, 1, S]",
            "1N1S": "[1, N, 1, S]",
        }.items()
    ),
    _variant(scores.token_bias, "A learned bias of shape [T, S].", name="dense_bias_TS", **_CROSS, bias="TS"),
    _variant(
        scores.two_biases,
        "A bias for each key of the batch and one for each pair of tokens.",
        **_CROSS,
        key_bias=_padding_bias("BS"),
        pair_bias="NTS",
    ),
    _variant(
        scores.sinks_concatenated, "A learned logit is part of the softmax; its weight is dropped.", **_CROSS, sinks="N"
    ),
    _variant(scores.sinks_in_denominator, "A learned logit as a term of the denominator.", **_CROSS, sinks="N"),
    _variant(scores.softmax_one, "The denominator has an extra 1: a query may attend to nothing.", **_HEADS_FIRST),
    _variant(
        scores.capped_window_with_sinks,
        "Soft cap, causal window and sinks together.",
        options={"window": 256},
        **_SELF,
        sinks="N",
    ),
    _variant(
        scores.normalised_query_and_key,
        "Queries and keys normalised by their root mean square.",
        **_CROSS,
        query_gain=_normal("H", 0.2, mean=1.0),
        key_gain=_normal("H", 0.2, mean=1.0),
    ),
    _variant(scores.rotary, "Causal with rotary embedding of halves, computed in the function.", **_SELF),
    _variant(
        scores.rotary_interleaved, "Rotary embedding of interleaved pairs, from tables.", **_SELF, cos="TE", sin="TE"
    ),
)

_STRUCTURES = (
    _variant(structures.grouped_query, "Groups of query heads share a head of keys.", **_GROUPED),
    _variant(structures.grouped_query_repeated, "Grouped heads by repeating the keys.", **_GROUPED),
    _variant(structures.multi_query, "All heads share one head of keys.", query="BTNH", key="BSH", value="BSV"),
    _variant(
        structures.latent,
        "Causal attention to latents that are keys and values of all heads, with a second product for positions.",
        query="BTNH",
        query_turned="BTNE",
        latents="BTH",
        key_turned="BTE",
    ),
    _variant(structures.latent_slice, "The value is a part of the shared key.", query="BTNH", shared="BSH"),
    _variant(structures.wide_values, "Values wider than keys.", query="BNTH", key="BNSH", value="BNSW"),
    _variant(structures.similarity, "One array is query, key and value.", tokens="BTH"),
    _variant(
        structures.one_query,
        "One query attends to a partly filled cache.",
        query="B1NH",
        key="BSNH",
        value="BSNV",
        lengths=_integers("B", 1, "S"),
    ),
    _variant(
        structures.one_query_grouped,
        "One query without a token axis; the heads of a group are the rows.",
        query="BNH",
        key="BSKH",
        value="BSKV",
    ),
    _variant(
        structures.evoformer_row,
        "Evoformer's row attention: a mask bias, a pair bias and a sigmoid gate.",
        query="BRTNH",
        key="BRTNH",
        value="BRTNV",
        mask_bias=_padding_bias("BR11T"),
        pair_bias="B1NTT",
        gate="BRTNV",
    ),
    _variant(
        structures.triangle,
        "Triangle attention: a mask, a bias shared by the rows, a gate and a projection.",
        query="BRNTH",
        key="BRNTH",
        value="BRNTV",
        mask=_mask("BRT"),
        bias="BNTT",
        gate="BRTJ",
        projection=_normal("JH", 0.2),
    ),
    _variant(
        structures.differential,
        "The difference of two softmaxes, with a constant factor.",
        query="BTMH",
        key="BSMH",
        value="BSNW",
    ),
    _variant(
        structures.differential_learned,
        "Causal; the difference of two softmaxes with a learned factor, then a norm of each head.",
        query="BTN2H",
        key="BTN2H",
        value="BTNW",
        lambda_query=_normal("2H", 0.1),
        lambda_key=_normal("2H", 0.1),
    ),
    _variant(
        structures.invariant_points,
        "Invariant point attention: squared distances of points in the scores, and two outputs.",
        **_CROSS,
        query_points="BTNP3",
        key_points="BSNP3",
        value_points="BSNP3",
        pair_bias="BTSN",
        head_weights="N",
    ),
    _variant(
        structures.invariant_points_frames,
        "Invariant point attention with frames, and squared distances by a product.",
        **_SELF,
        points="3BTNP3",
        pair_bias="BNTT",
        rotations=_rotations("BT33"),
        places="BT3",
    ),
    _variant(structures.sigmoid, "Sigmoids in place of a softmax.", **_CROSS),
    _variant(structures.sigmoid_causal, "Causal sigmoids with a learned bias for each head.", **_SELF, bias=_SMALL),
    _variant(structures.squared_relu, "Squared ReLUs in place of a softmax.", **_HEADS_FIRST),
    _variant(
        structures.retention, "Causal products that decay, without a softmax.", **_SELF, log_decay=_normal("N", 0.5, -2)
    ),
    _variant(structures.gated_output, "A gate on the joined heads.", **_CROSS, gate="BTJ"),
    _variant(structures.normalised_heads, "A norm of each head after attention.", **_HEADS_FIRST, gain="NV"),
    _variant(
        structures.projected,
        "A whole causal layer, with its projections.",
        tokens="BTH",
        inputs=_normal("3HNH", 0.25),
        outputs=_normal("NHH", 0.15),
    ),
)

_FORMS = (
    _variant(
        forms.linear_attention,
        "Causal linear attention: products of features, divided by their sum; Katharopoulos et al. (2020).",
        **_SELF,
    ),
    _variant(
        forms.normalised_again,
        "The weights of some keys are set to 0, and the rest are normalised again.",
        **_CROSS,
        kept=_mask("BS"),
    ),
    _variant(forms.guarded, "A softmax by hand that is 0 in rows without keys.", **_CROSS, mask=_mask("BS")),
    _variant(
        forms.decomposed_positions,
        "Relative positions of pixels, by rows and by columns, as in the image encoder of Kirillov et al. (2023).",
        query="BNTH",
        key="BNTH",
        value="BNTV",
        rows=_normal("YYH", 0.2),
        columns=_normal("XXH", 0.2),
    ),
    _variant(forms.pixels, "A softmax over rows and columns of pixels.", query="BYXNH", key="BYXNH", value="BYXNV"),
)

GROUPS: dict[str, tuple[Variant, ...]] = {
    "Masks": _MASKS,
    "Scores and biases": _SCORES,
    "Structures": _STRUCTURES,
    "Sums and grids": _FORMS,
}
"""The variants in the groups of the documentation.
Example:
    >>> from blockdiag.fusion.gallery import GROUPS
    >>> list(GROUPS)
    ['Masks', 'Scores and biases', 'Structures', 'Sums and grids']
"""

VARIANTS: dict[str, Variant] = {variant.name: variant for group in GROUPS.values() for variant in group}
"""All variants by name.

Example:
    >>> from blockdiag import explain
    >>> from blockdiag.fusion.gallery import VARIANTS, Sizes
    >>> import jax
    >>> variant = VARIANTS["alibi"]
    >>> explanation = explain(variant.function)(**variant.make_inputs(jax.random.key(0), Sizes()))
    >>> len(explanation.regions), explanation.reason
    (1, None)
"""
