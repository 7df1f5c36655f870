"""Shared parts of random layers (arguments, scores, masks, softmaxes and products), chosen by a seed."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tests.fusion.fusion_random_parts import Draws, hidden, multiplied, placed

TOKENS = (5, 1, 2, 3, 17, 33, 65)
FEATURES = (4, 1, 3, 8, 16, 17)
NO_KEYS = -5e8
"""A row whose scores are all at most this sees no key."""
DTYPES = ("float32", "float32", "float32", "bfloat16", "bfloat16 operands", "float16", "float16 operands")

type Arrays = dict[str, Any]
type Function = Callable[[Arrays], tuple[Any, ...]]
type Reader = Callable[[Arrays], Any]


class Argument(NamedTuple):
    """The description of an argument: floats, or integers from `low` to `high`."""

    labels: str
    low: int | None
    high: int
    is_operand: bool


class Layer:
    """A random layer, the base of the forms in `tests.fusion.fusion_random_forms`.

    Labels: b batch, n heads, q queries, k (and j, i) keys, h features, v columns of values. Scores are [b, n, q, k].

    Attributes:
        draws: the random choices.
        arguments: the arguments by name.
        is_guarded: whether rows that see no key are 0, as in fused functions.
        is_exact: whether casts inside are left out.
    """

    def __init__(self, seed: int, simplest: Iterable[str] = (), is_tiny: bool = False) -> None:
        self.draws = draw = Draws(seed, simplest)
        self.arguments: dict[str, Argument] = {}
        self.is_guarded = self.is_exact = False
        tokens = (5, 1, 3) if is_tiny else TOKENS
        self.sizes = {x: draw(f"size {x}", tokens) for x in "qkji"}
        if draw("as many keys", (True, False, False)):
            self.sizes["k"] = self.sizes["q"]
        self.sizes |= {x: draw(f"size {x}", (4,) if is_tiny else FEATURES) for x in "hv"}
        self.sizes |= {"b": draw("size b", (2, 1, 3)), "n": draw("size n", (2, 1, 4))}
        self.dtypes = draw("dtypes", DTYPES)
        self.casts = draw("casts", (False, False, True))

    def dtype(self, name: str) -> str:
        """Return the dtype of a floating argument; in mixed layers only queries, keys and values have 16 bits."""
        narrow, *rest = self.dtypes.split()
        return narrow if self.arguments[name].is_operand or not rest else "float32"

    def argument(
        self, name: str, labels: str, low: int | None = None, high: int = 0, is_operand: bool = False
    ) -> Callable[[str], Reader]:
        """Add an argument with axes in random order, and return its reader, which arranges it by labels."""
        own = self.draws.mixed(f"{name} axes", labels)
        self.arguments[name] = Argument(own, low, high, is_operand)
        return lambda into: lambda given: placed(given[name], own, into)

    def made(self, name: str, shape: Sequence[int]) -> np.ndarray:
        """Draw the elements of an argument."""
        _, low, high, _ = self.arguments[name]
        numbers = self.draws.numbers(f"{name} numbers")
        return numbers.normal(size=shape) if low is None else numbers.integers(low, high, size=shape).astype(np.int32)

    # Products.

    def operand(self, name: str, labels: str) -> Callable[[Arrays], tuple[Any, str]]:
        """Add an operand with all heads, half of them (repeated) or none; return its reader of array and labels."""
        own, axes = labels, self.draws(f"{name} heads", ("all", "all", "half", "none"))
        heads = self.sizes["n"]
        if axes == "none" and "query" not in name:
            own = labels.replace("n", "")
        is_half = axes == "half" and "n" in labels and heads % 2 == 0
        if is_half:
            own = own.replace("n", "m")
            self.sizes["m"] = heads // 2
        own = self.draws.mixed(f"{name} axes", own)
        self.arguments[name] = Argument(own, None, 0, True)

        def read(given: Arrays) -> tuple[Any, str]:
            if is_half:
                return jnp.repeat(given[name], 2, axis=own.index("m")), own.replace("m", "n")
            return given[name], own

        return read

    def scores(self, name: str = "", keys: str = "k", query: Any = None) -> Reader:
        """Return scaled products of queries and keys [b, n, q, keys]."""
        query = query or self.operand(f"{name}query", "bnqh")
        key = self.operand(f"{name}key", f"bn{keys}h")
        spelled = self.draws(f"{name}scores spelled", ("einsum", "matmul", "einsum", "matmul", "sum"))
        is_divided = self.draws(f"{name}scale", (False, True))

        def product(given: Arrays) -> Any:
            found = multiplied(*query(given), *key(given), f"bnq{keys}", "bn", "h", spelled)
            scale = math.sqrt(self.sizes["h"])
            found = found / scale if is_divided else found * (1 / scale)
            return self.cast(found, jnp.float32) if self.casts else found

        return product

    def cast(self, array: Any, dtype: Any) -> Any:
        """Cast an array as the function does, but without rounding if the layer is exact."""
        return array if self.is_exact else array.astype(dtype)

    def product(self, name: str = "value", keys: str = "k", lead: str = "bn") -> Callable[[Any, Arrays], Any]:
        """Return a product of weights [*lead, q, keys] with new values."""
        value = self.operand(name, f"{lead}{keys}v")
        into = self.draws.mixed(f"{name} result", f"{lead}qv")
        spelled = self.draws(f"{name} spelled", ("einsum", "matmul", "einsum", "matmul", "sum"))

        def product(weights: Any, given: Arrays) -> Any:
            array, labels = value(given)
            weights = self.cast(weights, array.dtype) if self.casts else weights
            return multiplied(weights, f"{lead}q{keys}", array, labels, into, lead, keys, spelled)

        return product

    # Masks and biases.

    def mask(self, name: str, keys: str = "k", sees: str = "a key") -> Reader:
        """Return a mask that can be broadcast to [b, n, q, keys].

        Args:
            sees: the keys that each query sees at least: "a key" (the first one) or "nothing".
        """
        draw = self.draws
        kinds = ("causal", "window", "segments", "lengths", "keys", "pairs", "offset", "constant", "blocks")
        kind = draw(f"{name} kind", kinds)
        over = draw.some(f"{name} batch", "b") + draw.some(f"{name} heads", "n")
        number = draw(f"{name} number", (2, 1, 3, 7))
        into = f"bnq{keys}"
        size = self.sizes[keys]
        if kind in ("lengths", "offset"):
            ends = self.argument(name, over, -3 if kind == "offset" else 0, size + 1)(into)
        elif kind == "segments":
            ones = self.argument(f"{name} of queries", over + "q", 0, number)(into)
            others = self.argument(f"{name} of keys", over + keys, 0, number)(into)
        elif kind in ("keys", "pairs"):
            seen = self.argument(name, over + (keys if kind == "keys" else f"q{keys}"), 0, 3)(into)
        constant = draw.numbers(name).random((self.sizes["q"], size)) < 0.6

        def mask(given: Arrays) -> Any:
            queries, places = self.places("q", into), self.places(keys, into)
            found = {
                "causal": lambda: queries + max(0, size - self.sizes["q"]) >= places,
                "window": lambda: jnp.abs(queries - places) < number,
                "segments": lambda: ones(given) == others(given),
                "lengths": lambda: places < ends(given),
                "keys": lambda: seen(given) > 0,
                "pairs": lambda: seen(given) > 0,
                "offset": lambda: queries + ends(given) >= places,
                "constant": lambda: constant[None, None],
                "blocks": lambda: queries // number == places // number,
            }[kind]()
            return found | (places == 0) if sees == "a key" else found

        return mask

    def places(self, label: str, into: str) -> Any:
        """Return positions along one axis."""
        return placed(jnp.arange(self.sizes[label]), label, into)

    def masked(self, name: str = "mask", keys: str = "k", sees: str = "a key") -> Callable[[Any, Arrays], Any]:
        """Return a function that adds masks and biases to scores, or returns them unchanged."""
        draw = self.draws
        kinds = [draw(f"{name} {i}", ("mask", "bias", "slopes", "cap")) for i in range(draw(f"{name}s", (0, 1, 1, 2)))]
        masks = [
            self.mask(f"{name} {i}", keys, sees) if kind == "mask" else self.bias(f"{name} {i}", keys)
            for i, kind in enumerate(kinds)
        ]
        # In 16 bits -1e9 is -inf, and 0 times -inf is NaN.
        ways = ("-inf", "-1e9", "flipped", "add", "add -inf", *(() if "16" in self.dtypes else ("min", "times")))
        chosen = [draw(f"{name} {i} way", ways) for i in range(len(kinds))]

        def masked(scores: Any, given: Arrays) -> Any:
            for kind, mask, way in zip(kinds, masks, chosen, strict=True):
                if kind == "mask":
                    scores = hidden(scores, mask(given), way)
                elif kind == "slopes":
                    away = jnp.abs(self.places("q", f"bnq{keys}") - self.places(keys, f"bnq{keys}"))
                    scores = scores - 0.1 * away
                else:
                    scores = scores + mask(given) if kind == "bias" else 3 * jnp.tanh(scores / 3)
            return scores

        return masked

    def bias(self, name: str, keys: str = "k") -> Reader:
        """Add a bias argument with some of the axes of scores, and return its reader."""
        draw = self.draws
        labels = draw(f"{name} of", (f"q{keys}", keys, "q")) + draw.some(f"{name} over", "bn")
        return self.argument(f"{name} bias", labels)(f"bnq{keys}")

    # Weights.

    def softmax(self, scores: Any, axis: Any = -1) -> Any:
        """Return the function's own softmax, or one whose rows without keys are 0."""
        if not self.is_guarded:
            return jax.nn.softmax(scores, axis=axis)
        empty = scores.max(axis=axis, keepdims=True) <= NO_KEYS
        return jnp.where(empty, 0, jax.nn.softmax(jnp.where(empty, 0, scores), axis=axis))

    def log_sum(self, scores: Any) -> Any:
        """Return the function's own log-sum-exp along keys, or one that is -1e9 in rows that see no key."""
        if not self.is_guarded:
            return jax.nn.logsumexp(scores, axis=-1)
        empty = scores.max(axis=-1) <= NO_KEYS
        return jnp.where(empty, -1e9, jax.nn.logsumexp(jnp.where(empty[..., None], 0, scores), axis=-1))

    def weights(self, name: str = "", keys: str = "k", sees: str = "nothing") -> Reader:
        """Return softmaxes of masked scores."""
        scores, masked = self.scores(name, keys), self.masked(f"{name}mask", keys, sees)
        return lambda given: self.softmax(masked(scores(given), given))
