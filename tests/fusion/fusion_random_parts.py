"""Choices, products, masks and sinks of random attention functions."""

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


class Draws:
    """Random choices by name, each of which depends only on the seed and its name.

    Attributes:
        seed: the seed of all choices.
        simplest: names whose choice is always the first option, to reduce a failure.
        made: the chosen options by name.
    """

    def __init__(self, seed: int, simplest: Iterable[str] = ()) -> None:
        self.seed = seed
        self.simplest = set(simplest)
        self.made: dict[str, Any] = {}

    def numbers(self, name: str) -> np.random.Generator:
        """Return a random generator for a name."""
        return np.random.default_rng([self.seed, zlib.crc32(name.encode())])

    def __call__[T](self, name: str, options: Sequence[T]) -> T:
        place = 0 if name in self.simplest else int(self.numbers(name).integers(len(options)))
        self.made[name] = options[place]
        return options[place]

    def mixed(self, name: str, labels: str) -> str:
        """Return the labels in random order."""
        if name in self.simplest or len(labels) < 2:
            return labels
        self.made[name] = "".join(self.numbers(name).permutation(list(labels)))
        return self.made[name]

    def some(self, name: str, labels: str) -> str:
        """Return a random subset of the labels."""
        return "".join(x for x in labels if self(f"{name} {x}", (False, True)))


def placed(array: Any, labels: str, into: str) -> Any:
    """Return an array with its axes arranged by labels, with axes of size 1 for labels that it lacks."""
    ordered = jnp.transpose(array, [labels.index(x) for x in into if x in labels])
    return ordered[tuple(slice(None) if x in labels else None for x in into)]


def multiplied(one: Any, own: str, other: Any, labels: str, into: str, batch: str, summed: str, spelled: str) -> Any:
    """Return a product of two arrays with batch axes, summed over one label."""
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
    """Return scores hidden by a mask, in one of many ways."""
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
    """Return a softmax with one more logit, whose weight is dropped."""
    if is_joined:
        shape = [1 if i == axis else size for i, size in enumerate(scores.shape)]
        wide = jnp.concatenate([scores, jnp.broadcast_to(sink, shape).astype(scores.dtype)], axis=axis)
        return jax.lax.slice_in_dim(jax.nn.softmax(wide, axis=axis), 0, scores.shape[axis], axis=axis)
    largest = jax.lax.stop_gradient(jnp.maximum(scores.max(axis=axis, keepdims=True), sink))
    powers = jnp.exp(scores - largest)
    return powers / (powers.sum(axis=axis, keepdims=True) + jnp.exp(sink - largest))
