"""Random layers of the forms that `FORMS` lists, such as dropout and weights over heads."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from tests.fusion.fusion_random_layer import Arrays, Function, Layer
from tests.fusion.fusion_random_parts import hidden, placed, with_sink
from tests.fusion.fusion_random_places import among, moved, of_pixels

KEPT = "kept"
"""The argument with the mask of weights that dropout keeps; a function that receives it draws no mask."""
RATE = 0.4


class Form:
    """A layer of one form: a function of arrays by name that returns a tuple of arrays.

    Attributes:
        layer: the shared parts of the layer.
        name: the name of the form.
        is_returned: whether the dropout mask is an additional result.
    """

    def __init__(self, seed: int, name: str = "", simplest: Iterable[str] = (), is_tiny: bool = False) -> None:
        self.layer = Layer(seed, simplest, is_tiny)
        self.name = name or self.layer.draws("form", tuple(FORMS))
        self.is_returned = True
        self.function = FORMS[self.name](self.layer)

    def __call__(self, given: Arrays) -> tuple[Any, ...]:
        """Compute the results."""
        results = self.function(given)
        return results if self.is_returned else tuple(x for x in results if x.dtype != bool)

    def guarded(self, given: Arrays) -> tuple[Any, ...]:
        """Compute the results with 0 in rows that see no key."""
        with self._as(is_guarded=True):
            return self(given)

    def exact(self, given: Arrays) -> tuple[Any, ...]:
        """Compute the results of `guarded` without casts."""
        with self._as(is_guarded=True, is_exact=True):
            return self(given)

    @contextlib.contextmanager
    def _as(self, **changes: bool) -> Iterator[None]:
        vars(self.layer).update(changes)
        try:
            yield
        finally:
            vars(self.layer).update(dict.fromkeys(changes, False))


def plain(layer: Layer) -> Function:
    """Return attention with masks, biases and a softmax."""
    weights, product = layer.weights(), layer.product()
    return lambda given: (product(weights(given), given),)


def dropped(layer: Layer) -> Function:
    """Return attention with dropout of weights, scores or exponentials; the mask is an additional result."""
    draw = layer.draws
    scores, masked, product = layer.scores(), layer.masked(sees="nothing"), layer.product()
    layer.argument("seed", "", 0, 1000)
    where = draw("dropped", ("weights", "weights", "scores", "exponentials", "late"))
    way = draw("dropped by", ("bernoulli", "uniform", "narrow", "multiplied", "keys of batch", "folded"))
    shared = draw.some("dropped together", "bnqk")

    def drawn(given: Arrays) -> Any:
        if KEPT in given:
            return given[KEPT]
        shape = [1 if x in shared else layer.sizes[x] for x in "bnqk"]
        key = jax.random.key(given["seed"])
        if way == "keys of batch":
            keys = jax.random.split(key, shape[0])
            return jax.vmap(lambda key: jax.random.bernoulli(key, 1 - RATE, shape[1:]))(keys)
        if way in ("uniform", "narrow"):
            return jax.random.uniform(key, shape, jnp.bfloat16 if way == "narrow" else jnp.float32) >= RATE
        return jax.random.bernoulli(jax.random.fold_in(key, 3) if way == "folded" else key, 1 - RATE, shape)

    def kept(weights: Any, mask: Any) -> Any:
        if way == "multiplied":
            return weights * (mask.astype(weights.dtype) / (1 - RATE))
        return jnp.where(mask, weights / (1 - RATE), 0)

    def function(given: Arrays) -> tuple[Any, ...]:
        mask, found = drawn(given), masked(scores(given), given)
        if where == "scores":
            # Each query keeps its first key.
            sees = mask | (jnp.arange(layer.sizes["k"]) == 0)
            return product(layer.softmax(jnp.where(sees, found, -1e9)), given), mask
        if where == "weights":
            return product(kept(layer.softmax(found), mask), given), mask
        powers, total = by_hand(layer, found)
        if where == "exponentials":
            return product(kept(powers, mask) / total, given), mask
        late = placed(total[..., 0], "bnq", layer.draws.made.get("value result", "bnqv"))
        return product(kept(powers, mask), given) / late, mask

    return function


def by_hand(layer: Layer, scores: Any) -> tuple[Any, Any]:
    """Return exp(scores - maximum) and its sum; in guarded layers the sum is 1 in rows without keys."""
    largest = jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True))
    if not layer.is_guarded:
        powers = jnp.exp(scores - largest)
        return powers, powers.sum(axis=-1, keepdims=True)
    empty = largest <= -5e8
    powers = jnp.where(empty, 0, jnp.exp(jnp.where(empty, 0, scores) - jnp.where(empty, 0, largest)))
    return powers, jnp.where(empty, 1, powers.sum(axis=-1, keepdims=True))


def over_heads(layer: Layer) -> Function:
    """Return attention whose weights are summed over heads, or heads of a group, before the product with values."""
    draw = layer.draws
    weights = layer.weights(sees=draw("sees", ("a key", "nothing")))
    groups = draw("groups", (1, 1, 2)) if layer.sizes["n"] % 2 == 0 else 1
    layer.sizes["g"] = groups
    product = layer.product(lead="b" if groups == 1 else "bg")
    way = draw("heads", ("sum", "mean", "numbers", "numbers of queries", "mixture", "einsum"))
    if way in ("numbers", "einsum"):
        by = layer.argument("numbers", "n")("bnqk")
    elif way in ("numbers of queries", "mixture"):
        by = layer.argument("numbers", "bnq")("bnqk")

    def function(given: Arrays) -> tuple[Any, ...]:
        found = weights(given)
        if way == "einsum" and groups == 1:
            return (product(jnp.einsum("bnqk,n->bqk", found, by(given)[0, :, 0, 0]), given),)
        if way == "mixture":
            found = found * jax.nn.softmax(by(given), axis=1)
        elif way not in ("sum", "mean"):
            found = found * by(given)
        if groups == 2:
            found = found.reshape(found.shape[0], 2, -1, *found.shape[2:])
        axis = 1 if groups == 1 else 2
        return (product(found.mean(axis) if way == "mean" else found.sum(axis), given),)

    return function


def mixed(layer: Layer) -> Function:
    """Return attention whose weights are a sum of softmaxes, each scaled globally, per head or per query."""
    draw = layer.draws
    parts = [layer.weights(f"{i} ") for i in range(draw("softmaxes", (2, 2, 3)))]
    by = [
        layer.argument(f"{i} numbers", draw(f"{i} numbers of", ("", "n", "bq", "bnq")))("bnqk")
        for i, _ in enumerate(parts)
    ]
    product, way = layer.product(), draw("numbers", ("as they are", "sigmoid", "softmax"))

    def function(given: Arrays) -> tuple[Any, ...]:
        numbers = [x(given) for x in by]
        if way == "sigmoid":
            numbers = [jax.nn.sigmoid(x) for x in numbers]
        elif way == "softmax":
            largest = sum(jnp.exp(x) for x in numbers)
            numbers = [jnp.exp(x) / largest for x in numbers]
        return (product(sum(part(given) * number for part, number in zip(parts, numbers, strict=True)), given),)

    return function


def log_sums(layer: Layer) -> Function:
    """Return attention whose log-sum-exps are results, gates or penalties, or compute the weights."""
    draw = layer.draws
    scores, masked, product = layer.scores(), layer.masked(), layer.product()
    use = draw("log-sum-exps", ("returned", "gate", "penalty", "exponential", "both", "twice"))
    spelled = draw("spelled", ("logsumexp", "kept axis", "by hand", "scipy"))
    sink = layer.argument("sink", draw("sink of", ("", "n", "q")))("bnqk")
    result = draw.made.get("value result", "bnqv")

    def log_sum(found: Any) -> Any:
        if spelled == "by hand":
            largest = jax.lax.stop_gradient(found.max(axis=-1, keepdims=True))
            return (largest + jnp.log(jnp.exp(found - largest).sum(axis=-1, keepdims=True)))[..., 0]
        if spelled == "kept axis":
            return jax.nn.logsumexp(found, axis=-1, keepdims=True)[..., 0]
        return (jax.nn if spelled == "logsumexp" else jax.scipy.special).logsumexp(found, axis=-1)

    def function(given: Arrays) -> tuple[Any, ...]:
        found = masked(scores(given), given)
        sums = log_sum(found)
        weights = jnp.exp(found - sums[..., None]) if use == "exponential" else layer.softmax(found)
        output = product(weights, given)
        gate = placed(jax.nn.sigmoid(sums - sink(given)[..., 0]), "bnq", result)
        if use == "gate":
            return (output * gate,)
        if use == "penalty":
            return output, jnp.mean(sums**2) * 1e-1 + jnp.zeros((1,), sums.dtype)
        if use == "twice":
            return output * gate + placed(jnp.tanh(sums), "bnq", result), 2 * sums + 1
        return (output * gate if use == "both" else output), sums

    return function


def merged(layer: Layer) -> Function:
    """Return attention to parts of the keys, merged by their log-sum-exps."""
    draw = layer.draws
    labels = "kji"[: draw("parts", (2, 2, 3))]
    query = layer.operand("query", "bnqh")
    shared = query if draw("query", ("shared", "shared", "own")) == "shared" else None
    scores = [layer.scores(f"{x} ", x, shared) for x in labels]
    # All keys together include one that each query sees.
    sees = ["a key", *(draw(f"{x} sees", ("a key", "nothing")) for x in labels[1:])]
    masks = [layer.masked(f"{x} mask", x, least) for x, least in zip(labels, sees, strict=True)]
    products = [layer.product(f"{x} value", x) for x in labels]
    draw.made |= {f"{x} value result": draw.made.get(f"{x} value result", "bnqv") for x in labels}
    way, is_returned = (
        draw("merged by", ("logaddexp", "softmax", "largest", "stacked")),
        draw("sum returned", (False, True)),
    )

    def function(given: Arrays) -> tuple[Any, ...]:
        found = [mask(score(given), given) for mask, score in zip(masks, scores, strict=True)]
        sums = [layer.log_sum(x) for x in found]
        outputs = [product(layer.softmax(x), given) for product, x in zip(products, found, strict=True)]
        outputs = [
            placed(x, draw.made[f"{label} value result"], "bnqv") for x, label in zip(outputs, labels, strict=True)
        ]
        whole = sums[0]
        for other in sums[1:]:
            whole = jnp.logaddexp(whole, other)
        if way == "largest":
            largest = jax.lax.stop_gradient(jnp.stack(sums).max(axis=0))
            powers = [jnp.exp(x - largest) for x in sums]
            shares = [x / sum(powers) for x in powers]
        elif way in ("softmax", "stacked"):
            shares = list(jax.nn.softmax(jnp.stack(sums), axis=0))
        else:
            shares = [jnp.exp(x - whole) for x in sums]
        if way == "stacked":
            output = (jnp.stack(outputs) * jnp.stack(shares)[..., None]).sum(axis=0)
        else:
            output = sum(x * share[..., None] for x, share in zip(outputs, shares, strict=True))
        return (output, whole) if is_returned else (output,)

    return function


def joined(layer: Layer) -> Function:
    """Return one softmax over keys of several sources, with masks, biases and sinks."""
    draw = layer.draws
    labels = "kji"[: draw("sources", (2, 2, 3))]
    query = layer.operand("query", "bnqh")
    scores = [
        layer.scores(f"{x} ", x, query if draw(f"{x} query", ("shared", "own")) == "shared" else None) for x in labels
    ]
    masks = [layer.masked(f"{x} mask", x, draw(f"{x} sees", ("a key", "nothing"))) for x in labels]
    layer.sizes["s"] = sum(layer.sizes[x] for x in labels)
    after = layer.masked("mask", "s", "nothing") if draw("masked together", (False, False, True)) else None
    sink = draw("sink", ("none", "none", "none", "first", "last", "joined last", "by hand"))
    if sink != "none":
        logits = layer.argument("sink", draw("sink of", ("", "n", "bn")))("bnqk")
    are_joined = draw("values", ("joined", "apart", "joined"))
    products = (
        [layer.product(f"{x} value", x) for x in labels] if are_joined == "apart" else [layer.product("value", "s")]
    )
    draw.made |= {f"{x} value result": draw.made.get(f"{x} value result", "bnqv") for x in labels}
    turned = draw("order", (1, -1))

    def function(given: Arrays) -> tuple[Any, ...]:
        found = [mask(score(given), given) for mask, score in zip(masks, scores, strict=True)][::turned]
        wide = jnp.broadcast_to(logits(given), (*found[0].shape[:-1], 1)) if sink != "none" else None
        if sink == "first" and after is None:
            weights = layer.softmax(jnp.concatenate([wide, *found], axis=-1))[..., 1:]
        elif sink == "last" and after is None:
            weights = layer.softmax(jnp.concatenate([*found, wide], axis=-1))[..., :-1]
        else:
            whole = jnp.concatenate(found, axis=-1)
            whole = whole if after is None else after(whole, given)
            weights = layer.softmax(whole) if wide is None else sunk(layer, whole, logits(given), sink != "by hand")
        if are_joined == "joined":
            return (products[0](weights, given),)
        output, start = 0, 0
        for label, product in list(zip(labels, products, strict=True))[::turned]:
            part = product(weights[..., start : start + layer.sizes[label]], given)
            output = output + placed(part, draw.made[f"{label} value result"], "bnqv")
            start += layer.sizes[label]
        return (output,)

    return function


def sunk(layer: Layer, scores: Any, sink: Any, is_joined: bool) -> Any:
    """Return the weights of a softmax with a sink logit; rows without keys are 0."""
    if layer.is_guarded:
        scores = jnp.where(scores <= -5e8, -1e30, scores)
    return with_sink(scores, sink, 3, is_joined)


def normalised(layer: Layer) -> Function:
    """Return attention with non-softmax weights and a normaliser, or with softmaxes that are normalised again."""
    draw = layer.draws
    layer.sizes["k"] = layer.sizes["q"]
    kind = draw("weights", ("retention", "mlstm", "linear", "softmax", "mixed", "sigmoid"))
    mask, seen = layer.mask("mask"), layer.mask("again")
    scores, masked, product = layer.scores(), layer.masked("scores"), layer.product()
    gate = layer.argument("gate", "bn" + draw("gate of", ("k", "")))("bnqk")
    norm = draw("normaliser", ("sum", "abs", "abs at least 1", "little", "none"))
    is_late = draw("divided late", (False, False, True))
    result = draw.made.get("value result", "bnqv")

    def weighed(given: Arrays) -> Any:
        found = scores(given)
        decay = jax.nn.log_sigmoid(gate(given) + 2)
        away = layer.places("q", "bnqk") - layer.places("k", "bnqk")
        if kind in ("retention", "mlstm"):
            if gate(given).shape[-1] > 1 and kind == "mlstm":
                sums = jnp.cumsum(decay, axis=-1)
                logs = jnp.swapaxes(sums, -1, -2) - sums + gate(given)
            else:
                logs = decay.mean(axis=-1, keepdims=True) * jnp.maximum(away, 0)
            return jnp.where(away >= 0, found * jnp.exp(jnp.where(away >= 0, logs, 0)), 0)
        if kind == "linear":
            return jnp.where(mask(given), jax.nn.elu(found) + 1, 0)
        if kind == "sigmoid":
            return jnp.where(mask(given), jax.nn.sigmoid(found), 0)
        weights = layer.softmax(masked(found, given))
        if kind == "mixed":
            share = jax.nn.sigmoid(gate(given).mean(axis=-1, keepdims=True))
            return (1 - share) * weights + share * layer.softmax(-0.3 * jnp.abs(away).astype(weights.dtype))
        return weights * seen(given)

    def function(given: Arrays) -> tuple[Any, ...]:
        weights = weighed(given)
        total = weights.sum(axis=-1, keepdims=True)
        total = {
            "sum": lambda: total + 1e-6 if kind not in ("retention", "mlstm") else jnp.sqrt(1 + total**2),
            "abs": lambda: jnp.abs(total) + 0.5,
            "abs at least 1": lambda: jnp.maximum(jnp.abs(total), 1),
            "little": lambda: jnp.maximum(total, 1e-2),
            "none": lambda: jnp.ones_like(total),
        }[norm]()
        if is_late:
            return (product(weights, given) / placed(total[..., 0], "bnq", result),)
        return (product(weights / total, given),)

    return function


def branches(layer: Layer) -> Function:
    """Return attention whose mask is selected by a branch or a select."""
    draw = layer.draws
    weights = layer.scores(), layer.masked("biases")
    product, count = layer.product(), draw("branches", (2, 2, 3))
    masks = [layer.mask(f"mask {i}") for i in range(count)]
    layer.argument("branch", "", 0, count)
    way, spelled = draw("hidden", ("-inf", "-1e9", "add")), draw("spelled", ("cond", "switch", "select", "whole"))

    def function(given: Arrays) -> tuple[Any, ...]:
        scores = weights[1](weights[0](given), given)
        whole = (1, layer.sizes["n"], layer.sizes["q"], layer.sizes["k"])
        shape = jnp.broadcast_shapes(whole, *(mask(given).shape for mask in masks))
        # All branches must return one shape.
        each = [lambda mask=mask: jnp.broadcast_to(mask(given), shape) for mask in masks]
        if spelled == "cond" and count == 2:
            seen = jax.lax.cond(given["branch"] > 0, *each)
        elif spelled == "select":
            seen = jnp.where(given["branch"] > 0, each[0](), each[1]())
        elif spelled == "whole":
            steps = [lambda x=x: product(layer.softmax(hidden(scores, x(), way)), given) for x in each]
            return (jax.lax.switch(given["branch"], steps),)
        else:
            seen = jax.lax.switch(given["branch"], each)
        return (product(layer.softmax(hidden(scores, seen, way)), given),)

    return function


FORMS: dict[str, Callable[[Layer], Function]] = {
    "plain": plain,
    "dropped": dropped,
    "over heads": over_heads,
    "mixed": mixed,
    "log-sums": log_sums,
    "merged": merged,
    "joined": joined,
    "normalised": normalised,
    "branches": branches,
    "pixels": of_pixels,
    "moved": moved,
    "among": among,
}
