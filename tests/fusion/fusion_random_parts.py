"""Choices, products, masks and sinks, which random attention functions are made of."""

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


class Draws:
    """Choices by name, each of which depends on the seed and its name alone.

    Attributes:
        seed: of all choices.
        simplest: names whose choice is the first option, whatever the seed; a failure is made smaller with them.
        made: options by name.
    """

    def __init__(self, seed: int, simplest: Iterable[str] = ()) -> None:
        self.seed = seed
        self.simplest = set(simplest)
        self.made: dict[str, Any] = {}

    def numbers(self, name: str) -> np.random.Generator:
        """A source of random numbers."""
        return np.random.default_rng([self.seed, zlib.crc32(name.encode())])

    def __call__[T](self, name: str, options: Sequence[T]) -> T:
        place = 0 if name in self.simplest else int(self.numbers(name).integers(len(options)))
        self.made[name] = options[place]
        return options[place]

    def mixed(self, name: str, labels: str) -> str:
        """Labels in any order."""
        if name in self.simplest or len(labels) < 2:
            return labels
        self.made[name] = "".join(self.numbers(name).permutation(list(labels)))
        return self.made[name]

    def some(self, name: str, labels: str) -> str:
        """Some of the labels."""
        return "".join(x for x in labels if self(f"{name} {x}", (False, True)))


def placed(array: Any, labels: str, into: str) -> Any:
    """An array whose axes are where labels have them, with axes of size 1 for those that it has not."""
    ordered = jnp.transpose(array, [labels.index(x) for x in into if x in labels])
    return ordered[tuple(slice(None) if x in labels else None for x in into)]


def multiplied(one: Any, own: str, other: Any, labels: str, into: str, batch: str, summed: str, spelled: str) -> Any:
    """A product of two arrays with batch axes, summed over one label."""
    if spelled == "einsum":
        missing = "".join(x for x in into if x not in own + labels)
        found = jnp.einsum(f"{own},{labels}->{''.join(x for x in into if x not in missing)}", one, other)
        return placed(found, "".join(x for x in into if x not in missing), into)
    rows, columns = (next(x for x in each if x not in batch + summed) for each in (own, labels))
    if spelled == "dot_general" and all(x in own and x in labels for x in batch):
        axes = [[each.index(x) for x in batch] for each in (own, labels)]
        sums = [[each.index(summed)] for each in (own, labels)]
        dtype = jnp.result_type(one, other)
        found = jax.lax.dot_general(one.astype(dtype), other.astype(dtype), (sums, axes))
        rest = [x for x in own if x not in batch + summed] + [x for x in labels if x not in batch + summed]
        return placed(found, batch + "".join(rest), into)
    if spelled == "sum":
        whole = into + summed
        return (placed(one, own, whole) * placed(other, labels, whole)).sum(axis=-1)
    found = placed(one, own, batch + rows + summed) @ placed(other, labels, batch + summed + columns)
    return placed(found, batch + rows + columns, into)


def hidden(scores: Any, mask: Any, way: str) -> Any:
    """Scores that a mask hides, in one of many ways."""
    return {
        "-inf": lambda: jnp.where(mask, scores, -jnp.inf),
        "min": lambda: jnp.where(mask, scores, jnp.finfo(scores.dtype).min),
        "-1e9": lambda: jnp.where(mask, scores, -1e9),
        "flipped": lambda: jnp.where(~mask, -jnp.inf, scores),
        "add": lambda: scores + jnp.where(mask, 0.0, -1e9),
        "add -inf": lambda: scores + jnp.where(mask, 0.0, -jnp.inf),
        "times": lambda: scores + (1 - mask.astype(scores.dtype)) * -1e9,
    }[way]()


def with_sink(scores: Any, sink: Any, axis: int, is_joined: bool) -> Any:
    """A softmax with one more logit, whose weight is dropped."""
    if is_joined:
        shape = [1 if i == axis else size for i, size in enumerate(scores.shape)]
        wide = jnp.concatenate([scores, jnp.broadcast_to(sink, shape).astype(scores.dtype)], axis=axis)
        return jax.lax.slice_in_dim(jax.nn.softmax(wide, axis=axis), 0, scores.shape[axis], axis=axis)
    largest = jax.lax.stop_gradient(jnp.maximum(scores.max(axis=axis, keepdims=True), sink))
    powers = jnp.exp(scores - largest)
    return powers / (powers.sum(axis=axis, keepdims=True) + jnp.exp(sink - largest))
