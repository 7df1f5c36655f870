"""Random attention functions in plain jax.numpy, each made by a seed."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.fusion.fusion_random_parts import Draws, hidden, multiplied, placed, with_sink

TOKENS = (5, 1, 2, 3, 7, 13, 16, 17, 31, 32, 48)
FEATURES = (4, 1, 2, 3, 8, 16, 17, 32, 64, 80)
NO_KEYS = -5e8
"""A row whose scores are all at most this sees no key."""

type Arrays = dict[str, Any]
type Change = Callable[[Any, Arrays], Any]


class Attention:
    """A random attention function, called as `function(arrays)` with arrays by name.

    Labels: b, n, r are batch axes, of which n is heads; q queries, k keys, h features, v columns of values.

    Attributes:
        draws: the random choices.
        arrays: the arguments; floats are float64.
    """

    def __init__(self, seed: int, simplest: Iterable[str] = ()) -> None:
        self.draws = draw = Draws(seed, simplest)
        self.arrays: dict[str, np.ndarray] = {}
        self.batch: str = draw("batch", ("n", "", "b", "bn", "bn", "nb", "bnr", "rbn"))
        sizes = {"b": (2, 1, 3), "n": (2, 1, 4, 6), "r": (2, 1, 3)}
        self.sizes: dict[str, int] = {x: draw(f"size {x}", options) for x, options in sizes.items()}
        self.sizes |= {x: draw(f"size {x}", TOKENS) for x in "qk"}
        if draw("as many keys", (True, False)):
            self.sizes["k"] = self.sizes["q"]
        self.sizes |= {x: draw(f"size {x}", FEATURES) for x in "hgv"}
        self.labels = self.batch + "qk"
        if draw("scores are transposed", (False, False, True)):
            self.labels = draw.mixed("scores", self.labels)
        self.is_guarded = self.is_exact = False
        self.late: list[Callable[[Arrays], Any]] = []
        self.scores = self._scores("")
        self.changes = [self._change(f"change {i}") for i in range(draw("changes", (0, 1, 1, 2, 3, 4)))]
        self.masked = self._masks("mask")
        count = draw("changes after masks", (0, 0, 0, 1))
        self.after = [draw(f"after {i}", (self._bias, self._alibi, self._table))(f"after {i}") for i in range(count)]
        self.weights = self._weights()
        self.maps = [self._map(f"map {i}") for i in range(draw("maps", (0, 0, 0, 1, 2)))]
        self.product = self._product()
        self.ends = [self._end(f"end {i}") for i in range(draw("ends", (0, 0, 1, 2)))]

    def __call__(self, given: Arrays) -> Any:
        """Compute the result."""
        scores = self.scores(given)
        for change in self.changes:
            scores = change(scores, given)
        scores = self.masked(scores, given)
        for change in self.after:
            scores = change(scores, given)
        weights, total = self.weights(scores, given)
        for change in self.maps:
            weights = change(weights, given)
        result = self.product(weights, total, given)
        for change in self.ends:
            result = change(result, given)
        return result

    def guarded(self, given: Arrays, is_exact: bool = False) -> Any:
        """Compute the result with 0 in rows that see no key; if exact, without casts between products and softmax."""
        self.is_guarded, self.is_exact = True, is_exact
        try:
            return self(given)
        finally:
            self.is_guarded = self.is_exact = False

    def _array(self, name: str, labels: str, low: int | None = None, high: int = 0) -> str:
        """Add an argument of floats, or of integers from `low` to `high`, and return its name."""
        shape = [self.sizes[x] for x in labels]
        numbers = self.draws.numbers(f"{name} numbers")
        self.arrays[name] = (
            numbers.normal(size=shape) if low is None else numbers.integers(low, high, size=shape).astype(np.int32)
        )
        return name

    def _floats(self, name: str, labels: str) -> Callable[[Arrays], Any]:
        """Add a float argument with these axes, and return its reader, which aligns it with the axes of scores."""
        own = self.draws.mixed(f"{name} axes", labels)
        self._array(name, own)
        return lambda given: placed(given[name], own, self.labels)

    def _integers(self, name: str, labels: str, low: int, high: int) -> Callable[[Arrays], Any]:
        own = self.draws.mixed(f"{name} axes", labels)
        self._array(name, own, low, high)
        return lambda given: placed(given[name], own, self.labels)

    def _rounded(self, array: Any, dtype: Any) -> Any:
        return array if self.is_exact else array.astype(dtype)

    def _axis(self, label: str) -> int:
        return self.labels.index(label)

    def _places(self, label: str) -> Any:
        return placed(jnp.arange(self.sizes[label]), label, self.labels)

    # Products.

    def _keys(self, name: str, last: str) -> Callable[[Arrays], tuple[Any, str]]:
        """Return keys or values with all batch axes, without some of them, or with fewer heads that are repeated."""
        draw = self.draws
        left = draw(f"{name} without", ("", "", "", *self.batch))
        labels = draw.mixed(f"{name} layout", "".join(x for x in self.batch if x != left) + "k" + last)
        self._array(name, labels)
        groups = draw(f"{name} groups", ("all", "all", "repeat", "broadcast", "tile"))
        heads = self.sizes["n"]
        if "n" not in labels or heads % 2 or groups == "all":
            return lambda given: (given[name], labels)
        axis = labels.index("n")
        self.arrays[name] = np.take(self.arrays[name], range(heads // 2), axis)

        def repeated(given: Arrays) -> tuple[Any, str]:
            array = given[name]
            if groups == "repeat":
                return jnp.repeat(array, 2, axis=axis), labels
            if groups == "tile":
                return jnp.concatenate([array, array], axis=axis), labels
            wide = jnp.expand_dims(array, axis + 1)
            shape = (*array.shape[: axis + 1], 2, *array.shape[axis + 1 :])
            return jnp.broadcast_to(wide, shape).reshape([self.sizes[x] for x in labels]), labels

        return repeated

    def _scores(self, name: str) -> Callable[[Arrays], Any]:
        draw = self.draws
        count = draw(f"{name}products", (1, 1, 1, 2))
        parts = [self._one_product(f"{name}{i} ", "hg"[i]) for i in range(count)]
        way = draw(f"{name}sum of products", ("+", "-"))

        def summed(given: Arrays) -> Any:
            first, *rest = (part(given) for part in parts)
            for other in rest:
                first = first + other if way == "+" else first - other
            return first

        return summed

    def _one_product(self, name: str, last: str) -> Callable[[Arrays], Any]:
        draw = self.draws
        batch = self.batch
        left = draw(f"{name}query without", ("", "", "", "", *batch))
        keys = self._keys(f"{name}key", last)
        key_left = draw.made[f"{name}key without"]
        if left == key_left:
            left = ""
        own = draw.mixed(f"{name}query layout", "".join(x for x in batch if x != left) + "q" + last)
        query = self._array(f"{name}query", own)
        scale = draw(
            f"{name}scale", ("none", "after", "before", "divided", "learned", "of heads", "of queries", "of keys")
        )
        factor = draw(f"{name}spelled", ("einsum", "einsum", "matmul", "matmul", "dot_general", "dot_general", "sum"))
        number = self.sizes[last] ** -0.5
        learned = {
            "learned": lambda: self._floats(f"{name}factor", ""),
            "of heads": lambda: self._floats(f"{name}factor", "n" if "n" in batch else ""),
            "of queries": lambda: self._floats(f"{name}factor", "q"),
            "of keys": lambda: self._floats(f"{name}factor", "k"),
        }
        by = learned[scale]() if scale in learned else None

        def product(given: Arrays) -> Any:
            one, (other, labels) = given[query], keys(given)
            if scale == "before":
                one = one * number
            result = multiplied(one, own, other, labels, self.labels, batch, last, factor)
            if by is not None:
                return result * by(given) * number
            return {"after": lambda: result * number, "divided": lambda: result / self.sizes[last] ** 0.5}.get(
                scale, lambda: result
            )()

        return product

    # Changes of scores.

    def _change(self, name: str) -> Change:
        draw = self.draws
        kinds = {
            "cap": self._cap,
            "alibi": self._alibi,
            "bias": self._bias,
            "table": self._table,
            "factor": self._factor,
            "gate": self._gate,
            "penalty": self._penalty,
            "shape": self._shape,
            "cast": self._cast,
        }
        return kinds[draw(name, tuple(kinds))](name)

    def _cap(self, name: str) -> Change:
        cap = self.draws(f"{name} cap", (5.0, 30.0, 1.5))
        return lambda scores, given: cap * jnp.tanh(scores / cap)

    def _distances(self, name: str) -> Callable[[], Any]:
        way = self.draws(f"{name} distance", ("q - k", "|q - k|", "k - q", "offset", "max"))
        sizes = self.sizes

        def distances() -> Any:
            queries, keys = self._places("q"), self._places("k")
            return {
                "q - k": lambda: queries - keys,
                "|q - k|": lambda: jnp.abs(queries - keys),
                "k - q": lambda: keys - queries,
                "offset": lambda: queries + (sizes["k"] - sizes["q"]) - keys,
                "max": lambda: jnp.maximum(queries - keys, 0),
            }[way]()

        return distances

    def _alibi(self, name: str) -> Change:
        distances = self._distances(name)
        over = self.draws(f"{name} slopes of", ("", *self.batch))
        if self.draws(f"{name} slopes", ("constant", "learned")) == "learned":
            slopes = self._floats(name, over)
            return lambda scores, given: scores - 0.1 * slopes(given) * distances()
        shape = [self.sizes[x] for x in over]
        constant = 2.0 ** -np.arange(1, 1 + int(np.prod(shape))).reshape(shape)
        return lambda scores, given: (
            scores - placed(jnp.asarray(constant, scores.dtype), over, self.labels) * distances()
        )

    def _bias(self, name: str) -> Change:
        draw = self.draws
        labels = draw(f"{name} of", ("qk", "k", "q", "")) + draw.some(f"{name} batch", self.batch)
        bias = self._floats(name, labels)
        way = draw(f"{name} way", ("+", "-", "reversed", "tanh", "log", "cast"))

        def biased(scores: Any, given: Arrays) -> Any:
            add = bias(given)
            return {
                "+": lambda: scores + add,
                "-": lambda: scores - add,
                "reversed": lambda: add + scores,
                "tanh": lambda: scores + 2 * jnp.tanh(add),
                "log": lambda: scores + jnp.log(jax.nn.sigmoid(add)),
                "cast": lambda: scores + self._rounded(add, jnp.float32),
            }[way]()

        return biased

    def _table(self, name: str) -> Change:
        draw = self.draws
        distances = self._distances(name)
        over = draw(f"{name} of", ("", *self.batch))
        last = draw(f"{name} heads last", (False, True))
        rows = draw(f"{name} rows", (8, 3, 32))
        buckets = draw(f"{name} buckets", ("clip", "mod", "log"))
        self.sizes["t"] = rows
        labels = "t" + over if last else over + "t"
        self._array(name, labels)

        def added(scores: Any, given: Arrays) -> Any:
            away = jnp.squeeze(distances(), [self._axis(x) for x in self.batch])
            if buckets == "clip":
                places = jnp.clip(away + rows // 2, 0, rows - 1)
            elif buckets == "mod":
                places = jnp.abs(away) % rows
            else:
                near = jnp.log1p(jnp.abs(away).astype(jnp.float32)) * 1.7
                places = jnp.minimum(near.astype(jnp.int32), rows - 1)
            found = jnp.take(given[name], places, axis=0 if last else -1)
            pair = "qk" if self._axis("q") < self._axis("k") else "kq"
            return scores + placed(found, pair + over if last else over + pair, self.labels)

        return added

    def _factor(self, name: str) -> Change:
        draw = self.draws
        labels = draw(f"{name} of", ("q", "", "k")) + draw.some(f"{name} batch", self.batch)
        factor = self._floats(name, labels)
        way = draw(f"{name} way", ("*", "/ softplus", "* exp", "sigmoid *"))

        def scaled(scores: Any, given: Arrays) -> Any:
            by = factor(given)
            return {
                "*": lambda: scores * by,
                "/ softplus": lambda: scores / (jax.nn.softplus(by) + 0.5),
                "* exp": lambda: scores * jnp.exp(by),
                "sigmoid *": lambda: jax.nn.sigmoid(by) * scores,
            }[way]()

        return scaled

    def _gate(self, name: str) -> Change:
        way = self.draws(f"{name} gate", ("silu", "relu", "softplus", "sigmoid", "gelu", "leaky"))
        return {
            "silu": lambda scores, given: scores * jax.nn.sigmoid(scores),
            "relu": lambda scores, given: jax.nn.relu(scores),
            "softplus": lambda scores, given: jax.nn.softplus(scores),
            "sigmoid": lambda scores, given: 3 * jax.nn.sigmoid(scores),
            "gelu": lambda scores, given: jax.nn.gelu(scores),
            "leaky": lambda scores, given: jnp.where(scores > 0, scores, 0.1 * scores),
        }[way]

    def _penalty(self, name: str) -> Change:
        distances = self._distances(name)
        way = self.draws(f"{name} way", ("log", "decay", "gauss", "scaled"))

        def less(scores: Any, given: Arrays) -> Any:
            away = jnp.abs(distances()).astype(scores.dtype)
            return {
                "log": lambda: scores - 0.3 * jnp.log1p(away),
                "decay": lambda: scores * jnp.exp(-0.1 * away),
                "gauss": lambda: scores - 0.02 * away**2,
                "scaled": lambda: scores / (1 + away),
            }[way]()

        return less

    def _shape(self, name: str) -> Change:
        way = self.draws(f"{name} shape", ("abs", "square", "clip", "negative", "cube", "minus constant"))
        return {
            "abs": lambda scores, given: jnp.abs(scores),
            "square": lambda scores, given: 0.1 * jnp.square(scores),
            "clip": lambda scores, given: jnp.clip(scores, -3, 3),
            "negative": lambda scores, given: -scores,
            "cube": lambda scores, given: 0.1 * scores**3,
            "minus constant": lambda scores, given: scores - 2.5,
        }[way]

    def _cast(self, name: str) -> Change:
        dtype = self.draws(f"{name} dtype", (jnp.float32, jnp.bfloat16))
        return lambda scores, given: self._rounded(scores, dtype)

    # Masks.

    def _mask(self, name: str) -> Callable[[Arrays], Any]:
        """Return a mask whose axes are placed among those of scores."""
        draw = self.draws
        sizes = self.sizes
        over = draw(f"{name} of", ("", *self.batch))
        kinds = (
            "causal", "causal", "window", "prefix", "segments", "lengths", "keys", "queries", "blocks", "constant",
            "strided", "global", "dense", "offset",
        )  # fmt: skip
        kind = draw(f"{name} kind", kinds)
        number = draw(f"{name} number", (2, 1, 3, 4, 7))
        if kind in ("lengths", "prefix", "offset"):
            ends = self._integers(name, over, 1 - (kind == "offset") * 5, sizes["k"] + 1)
        elif kind == "segments":
            ones = self._integers(f"{name} of queries", over + "q", 0, number)
            others = self._integers(f"{name} of keys", over + "k", 0, number)
        elif kind in ("keys", "queries", "dense"):
            labels = {"keys": "k", "queries": "q", "dense": "qk"}[kind]
            seen = self._integers(name, over + labels, 0, 4)
        shape = [sizes[x] for x in self.labels if x in "qk"]
        constant = draw.numbers(name).random(shape) < 0.7
        if draw(f"{name} constant", ("any", "tril")) == "tril":
            constant = np.tril(np.ones(shape, bool), number - 2)

        def mask(given: Arrays) -> Any:
            queries, keys = self._places("q"), self._places("k")
            pair = "".join(x for x in self.labels if x in "qk")
            return {
                "causal": lambda: queries + max(0, sizes["k"] - sizes["q"]) >= keys,
                "window": lambda: jnp.abs(queries - keys) < number,
                "prefix": lambda: keys < ends(given),
                "segments": lambda: ones(given) == others(given),
                "lengths": lambda: keys < ends(given),
                "keys": lambda: seen(given) > 0,
                "queries": lambda: seen(given) > 0,
                "dense": lambda: seen(given) > 0,
                "blocks": lambda: queries // number == keys // number,
                "constant": lambda: placed(constant, pair, self.labels),
                "strided": lambda: (queries - keys) % number == 0,
                "global": lambda: (keys < number) | (queries < number),
                "offset": lambda: queries + ends(given) >= keys,
            }[kind]()

        return mask

    def _masks(self, name: str) -> Change:
        draw = self.draws
        count = draw(f"{name}s", (0, 1, 1, 2, 2, 3))
        masks = [self._mask(f"{name} {i}") for i in range(count)]
        joins = [draw(f"{name} {i} joined", ("&", "|", "& ~", "apart")) for i in range(count)]
        ways = [
            draw(f"{name} {i} way", ("-inf", "min", "-1e9", "flipped", "add", "add -inf", "times", "after"))
            for i in range(count)
        ]
        groups: list[tuple[str, list[tuple[str, Callable[[Arrays], Any]]]]] = []
        for mask, join, way in zip(masks, joins, ways, strict=True):
            if groups and join != "apart":
                groups[-1][1].append((join, mask))
            else:
                groups.append((way, [("&", mask)]))

        def of(group: list[tuple[str, Callable[[Arrays], Any]]]) -> Callable[[Arrays], Any]:
            def joined(given: Arrays) -> Any:
                found = group[0][1](given)
                for join, mask in group[1:]:
                    other = mask(given)
                    found = found & other if join == "&" else found | other if join == "|" else found & ~other
                return found

            return joined

        early = []
        for way, group in groups:
            (self.late if way == "after" else early).append(of(group) if way == "after" else (way, of(group)))

        def masked(scores: Any, given: Arrays) -> Any:
            for way, mask in early:
                scores = hidden(scores, mask(given), way)
            return scores

        return masked

    # Weights.

    def _weights(self) -> Callable[[Any, Arrays], tuple[Any, Any]]:
        """Return the function from scores to weights and the divisor of the result."""
        draw = self.draws
        kind = draw(
            "weights",
            (
                "softmax", "softmax", "softmax", "by hand", "no gradient", "late", "sigmoid", "sink", "sink by hand",
                "two", "relu squared", "logsumexp", "plain exp", "where", "log_softmax", "exp2",
            ),
        )  # fmt: skip
        axis = self._axis("k")
        if kind in ("sink", "sink by hand"):
            sink = self._floats("sink", draw("sink of", ("", *self.batch)))
        if kind == "two":
            second = self._scores("second ")
            second_masked = self._masks("second mask")
            less = self._floats("less", draw("less of", ("", *self.batch, "q")))
        if kind == "where":
            where = self._mask("where")
        numbers = draw("sigmoid bias", (0.0, -1.0))

        def weights(scores: Any, given: Arrays) -> tuple[Any, Any]:
            if kind == "sigmoid":
                return jax.nn.sigmoid(scores + numbers), None
            if kind == "relu squared":
                powers = jnp.square(jax.nn.relu(scores))
                return powers / (powers.sum(axis=axis, keepdims=True) + 1e-3), None
            if kind == "two":
                other = second_masked(second(given), given)
                return self._softmax(scores) - less(given) * self._softmax(other), None
            if kind in ("sink", "sink by hand"):
                return with_sink(scores, sink(given), axis, kind == "sink"), None
            if kind == "where":
                mask = where(given)
                if self.is_guarded:
                    return self._softmax(jnp.where(mask, scores, -jnp.inf)), None
                return jax.nn.softmax(scores, axis=axis, where=mask), None
            if self.is_guarded or kind == "softmax":
                return self._softmax(scores), None
            if kind == "logsumexp":
                return jnp.exp(scores - jax.nn.logsumexp(scores, axis=axis, keepdims=True)), None
            if kind == "log_softmax":
                return jnp.exp(jax.nn.log_softmax(scores, axis=axis)), None
            largest = scores.max(axis=axis, keepdims=True)
            if kind == "no gradient":
                largest = jax.lax.stop_gradient(largest)
            if kind == "exp2":
                powers = jnp.exp2((scores - largest) * 1.4426950408889634)
            else:
                powers = jnp.exp(scores if kind == "plain exp" else scores - largest)
            total = powers.sum(axis=axis, keepdims=True)
            return (powers, total) if kind == "late" else (powers / total, None)

        return weights

    def _softmax(self, scores: Any) -> Any:
        axis = self._axis("k")
        if not self.is_guarded:
            return jax.nn.softmax(scores, axis=axis)
        empty = scores.max(axis=axis, keepdims=True) <= NO_KEYS
        return jnp.where(empty, 0, jax.nn.softmax(jnp.where(empty, 0, scores), axis=axis))

    def _map(self, name: str) -> Change:
        """Return a linear function of weights."""
        draw = self.draws
        kind = draw(name, ("constant", "factor", "cast", "distance", "float32", "nan_to_num"))
        if kind == "factor":
            labels = draw(f"{name} of", ("q", "k", "qk", "")) + draw.some(f"{name} batch", self.batch)
            factor = self._floats(name, labels)
            return lambda weights, given: weights * factor(given)
        if kind == "distance":
            distances = self._distances(name)
            return lambda weights, given: weights * jnp.exp(-0.1 * jnp.abs(distances()).astype(weights.dtype))
        if kind == "cast":
            return lambda weights, given: self._rounded(weights, given["value"].dtype)
        if kind == "float32":
            return lambda weights, given: self._rounded(weights, jnp.float32)
        if kind == "nan_to_num":
            return lambda weights, given: weights if self.is_guarded else jnp.nan_to_num(weights)
        return lambda weights, given: weights / 0.9

    def _product(self) -> Callable[[Any, Any, Arrays], Any]:
        draw = self.draws
        values = self._keys("value", "v")
        self.result = into = draw.mixed("result", self.batch + "qv")
        spelled = draw("product spelled", ("einsum", "einsum", "matmul", "matmul", "dot_general", "dot_general", "sum"))

        def product(weights: Any, total: Any, given: Arrays) -> Any:
            for late in self.late:
                weights = weights * late(given) if draw.seed % 2 else jnp.where(late(given), weights, 0)
            value, labels = values(given)
            result = multiplied(weights, self.labels, value, labels, into, self.batch, "k", spelled)
            if total is None:
                return result
            return result / placed(jnp.squeeze(total, self._axis("k")), self.labels.replace("k", ""), into)

        return product

    def _end(self, name: str) -> Change:
        """Return an operation on the result."""
        draw = self.draws
        kind = draw(name, ("scale", "gate", "residual", "cast", "projection", "transpose", "tanh", "sum"))
        labels = self.result
        if kind == "transpose":
            self.result = after = draw.mixed(f"{name} axes", labels)
            return lambda result, given: jnp.transpose(result, [labels.index(x) for x in after])
        if kind in ("gate", "residual"):
            own = draw.mixed(f"{name} axes", labels)
            self._array(name, own)
            if kind == "gate":
                return lambda result, given: result * jax.nn.sigmoid(placed(given[name], own, labels))
            return lambda result, given: result + placed(given[name], own, labels)
        if kind == "projection":
            self._array(name, "vv")
            into = labels.replace("v", "w")
            return lambda result, given: jnp.einsum(f"{labels},vw->{into}", result, given[name])
        return {
            "scale": lambda result, given: 0.5 * result,
            "cast": lambda result, given: self._rounded(result, jnp.float32),
            "tanh": lambda result, given: jnp.tanh(result),
            "sum": lambda result, given: result + result.sum(axis=labels.index("v"), keepdims=True),
        }[kind]
