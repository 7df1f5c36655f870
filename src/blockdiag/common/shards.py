"""How the labels of a rule are divided over a mesh, and what one device computes of an operation.

A label that an axis of the mesh divides is divided in all arrays that have it. A device reads the part of an operand
that it needs, also where the operand is not sharded so: key heads, for example, where there are fewer of them than
devices. A result without the label is a sum over it, which one all-reduce completes.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from blockdiag.common.rule import Dim, Rule


@dataclass(frozen=True)
class Piece:
    """Part of the devices along one axis of a mesh: their index, divided by `below`, modulo `count`."""

    axis: str
    count: int
    below: int

    @property
    def index(self) -> jax.Array:
        """Which part this device has."""
        return jax.lax.axis_index(self.axis) // self.below % self.count


type Division = Mapping[str, tuple[Piece, ...]]
"""The pieces of mesh axes that divide each label, the slowest first."""


@dataclass(frozen=True)
class Part:
    """The part of an operation that one device computes.

    Attributes:
        sizes: how many indices of each label the device has.
        starts: the first index of each divided label, int32.
        axes: the axes of the mesh that divide a label, the slowest first.
    """

    sizes: Mapping[str, int]
    starts: Mapping[str, jax.Array]
    axes: Mapping[str, tuple[str, ...]]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["dtype"])
@dataclass(frozen=True)
class Share:
    """One device's share of a sum over devices, wider than the sum, which is rounded once all shares are added up.

    Attributes:
        array: the share.
        dtype: of the sum.
    """

    array: jax.Array
    dtype: np.dtype[Any]


type Local[R] = Callable[[Part], Callable[..., R]]
"""From the part of one device to the operation on its arrays; results that are sums over devices may be `Share`s."""


def division_of(rule: Rule, mesh: Mapping[str, int], arrays: Sequence[tuple[Sequence[int], P]]) -> Division:
    """The division of labels that follows from shardings of arrays: of two that disagree, the larger one counts.

    Args:
        rule: the rule.
        mesh: the size of each axis of the mesh.
        arrays: shape and spec of each operand, or of each operand and result.
    """
    sizes = dict(rule.sizes)
    found: dict[str, tuple[Piece, ...]] = {}
    labels = (*rule.operands, *rule.results)[: len(arrays)]
    anchored = {label for i in rule.anchors for dim in labels[i] for label in dim} if rule.is_anchored else set()
    order = sorted(range(len(arrays)), key=lambda i: (i not in rule.anchors, -math.prod(arrays[i][0])))
    for i in order:
        for entry, dim in zip(tuple(arrays[i][1]), labels[i], strict=False):
            names = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
            if i in rule.anchors or anchored.isdisjoint(dim):
                pieces = _pieces(names, mesh, [(x, sizes[x]) for x in dim], rule.independent)
                found |= _agreed(pieces, dim, found)
    return found


def _agreed(
    pieces: dict[str, tuple[Piece, ...]], dim: Dim, found: dict[str, tuple[Piece, ...]]
) -> dict[str, tuple[Piece, ...]]:
    """The pieces of one axis of an array if they continue what is found, else none.

    An axis of key heads and their query heads, for example, may be divided further than key heads alone.
    """
    if any(pieces.get(label) != found[label] for label in dim if label in found):
        return {}
    used = {piece.axis for label, each in found.items() if label not in dim for piece in each}
    is_free = used.isdisjoint(piece.axis for each in pieces.values() for piece in each)
    return pieces if is_free else {}


def _pieces(
    names: Sequence[str], mesh: Mapping[str, int], labels: Sequence[tuple[str, int]], independent: frozenset[str]
) -> dict[str, tuple[Piece, ...]]:
    """Return how axes of a mesh, slowest first, divide an array's axis that has these labels of these sizes.

    Axes count up to the first one that cannot be used as a whole, since it does not divide the sizes.
    """
    found: dict[str, list[Piece]] = {}
    waiting = list(labels)
    left = waiting[0][1] if waiting else 1
    for axis in names:
        parts: list[tuple[str, Piece]] = []
        size, place, rest = mesh[axis], list(waiting), left
        while size > 1 and place and place[0][0] in independent:
            count = math.gcd(size, rest)
            # A label is cut by a whole axis, or is cut up by a part of one: nothing between.
            if count not in (size, rest):
                break
            if count > 1:
                parts.append((place[0][0], Piece(axis, count, size // count)))
            size, rest = size // count, rest // count
            if rest == 1:
                place = place[1:]
                rest = place[0][1] if place else 1
        if size > 1:
            break
        waiting, left = place, rest
        for label, piece in parts:
            found.setdefault(label, []).append(piece)
    return {label: tuple(pieces) for label, pieces in found.items()}


def spec_of(rule: Rule, division: Division, mesh: Mapping[str, int], dims: Sequence[Dim]) -> P:
    """The spec of an array where labels are divided so; axes that no spec can describe are whole."""
    return P(*(_names(rule, division, mesh, dim) or None for dim in dims))


def wanted_spec(rule: Rule, division: Division, mesh: Mapping[str, int], dims: Sequence[Dim], wanted: P) -> P:
    """The spec of a result; of a sum, which an all-reduce completes, what is wanted whole is made whole by it."""
    spec = spec_of(rule, division, mesh, dims)
    own = {label for dim in dims for label in dim}
    if all(label in own for label in division if _parts(division, label) > 1):
        return spec
    entries = (*wanted, *[None] * (len(dims) - len(wanted)))
    return P(*(entry if other not in (None, ()) else None for entry, other in zip(spec, entries, strict=True)))


def _names(rule: Rule, division: Division, mesh: Mapping[str, int], dim: Dim) -> tuple[str, ...]:
    """The axes of a mesh that shard an array's axis exactly as its labels are divided; empty where none do."""
    sizes = dict(rule.sizes)
    pieces = [(label, piece) for label in dim for piece in division.get(label, ())]
    is_whole = True
    for label in dim:
        parts = _parts(division, label)
        if parts > 1 and not is_whole:
            return ()  # parts of a fast label, for all of a slow one, lie apart
        is_whole = is_whole and parts == sizes[label]
    names = tuple(dict.fromkeys(piece.axis for _, piece in pieces))
    # Each axis as a whole, in one run, its slow part first.
    expected = []
    for name in names:
        own = [piece for _, piece in pieces if piece.axis == name]
        if math.prod(piece.count for piece in own) != mesh[name] or own != sorted(own, key=lambda x: -x.below):
            return ()
        expected += own
    return names if expected == [piece for _, piece in pieces] else ()


def _parts(division: Division, label: str) -> int:
    return math.prod(piece.count for piece in division.get(label, ()))


def axes_of(dim: Dim, rule: Rule) -> tuple[Dim, ...]:
    """The axes that the labels of one axis get: one each, if devices may divide some of them and not others."""
    sizes = dict(rule.sizes)
    labels = {label for label in dim if sizes[label] > 1}
    return tuple((label,) for label in dim) if labels & rule.independent and labels - rule.independent else (dim,)


def split_axes(x: jax.Array, dims: Sequence[Dim], rule: Rule, sizes: Mapping[str, int]) -> jax.Array:
    """An array with the axes of `axes_of`, where labels have these sizes."""
    shape: list[int] = []
    for size, dim in zip(x.shape, dims, strict=True):
        shape += [size] if len(axes_of(dim, rule)) == 1 else [sizes[label] for label in dim]
    return x.reshape(shape) if len(shape) != x.ndim else x


def join_axes(x: jax.Array, dims: Sequence[Dim], rule: Rule) -> jax.Array:
    """The array from which `split_axes` made this one."""
    left, shape = list(x.shape), []
    for dim in dims:
        count = len(axes_of(dim, rule))
        shape.append(math.prod(left[:count]))
        del left[:count]
    return x.reshape(shape) if len(shape) != x.ndim else x


def on_one_device(
    rule: Rule,
    local: Local[Sequence[jax.Array]],
    division: Division,
    mesh: Mapping[str, int],
    results: Sequence[P],
    unused: int = 0,
) -> Callable[..., tuple[jax.Array, ...]]:
    """The operation on the shards of one device, inside of the mesh; `results` are the specs of its results."""
    sizes = {label: size // _parts(division, label) for label, size in rule.sizes}

    def cut_labels(dims: Sequence[Dim], spec: P) -> list[list[str]]:
        """For every axis the labels that are divided, though the array is not sharded so."""
        return [
            [] if entry is not None else [label for label in dim if _parts(division, label) > 1]
            for dim, entry in zip(dims, spec, strict=True)
        ]

    def compute(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        own = [
            _cut(x, dims, cut_labels(dims, spec_of(rule, division, mesh, dims)), rule, division, sizes)
            for x, dims in zip(arrays, rule.operands, strict=True)
        ]
        starts = {label: _index(division, label) * sizes[label] for label in division}
        axes = {label: tuple(dict.fromkeys(x.axis for x in pieces)) for label, pieces in division.items()}
        found = local(Part(sizes, starts, axes))(*own[: len(own) - unused])
        return tuple(
            _completed(x, dims, cut_labels(dims, spec), rule, division, sizes)
            for x, dims, spec in zip(found, rule.results, results, strict=True)
        )

    return compute


def _cut(
    x: jax.Array, dims: Sequence[Dim], cut: Sequence[Sequence[str]], rule: Rule, division: Division,
    sizes: Mapping[str, int],
) -> jax.Array:  # fmt: skip
    """The part of an operand that this device needs."""
    for axis, (dim, labels) in enumerate(zip(dims, cut, strict=True)):
        if labels:
            whole = dict(rule.sizes)
            parts = x.reshape(*x.shape[:axis], *(whole[label] for label in dim), *x.shape[axis + 1 :])
            for label in labels:
                place = axis + dim.index(label)
                start = _index(division, label) * sizes[label]
                parts = jax.lax.dynamic_slice_in_dim(parts, start, sizes[label], place)
            x = parts.reshape(*x.shape[:axis], math.prod(sizes[label] for label in dim), *x.shape[axis + 1 :])
    return x


def _completed(
    x: jax.Array | Share, dims: Sequence[Dim], cut: Sequence[Sequence[str]], rule: Rule, division: Division,
    sizes: Mapping[str, int],
) -> jax.Array:  # fmt: skip
    """A result, its sums over divided labels that it lacks completed, and whole along axes that no spec describes."""
    own = {label for dim in dims for label in dim}
    x, dtype = (x.array, x.dtype) if isinstance(x, Share) else (x, x.dtype)
    axes = {piece.axis for label, pieces in division.items() if label not in own for piece in pieces}
    for axis, (dim, labels) in enumerate(zip(dims, cut, strict=True)):
        if labels:
            whole = dict(rule.sizes)
            parts = x.reshape(*x.shape[:axis], *(sizes[label] for label in dim), *x.shape[axis + 1 :])
            for label in labels:
                place = axis + dim.index(label)
                shape = (*parts.shape[:place], whole[label], *parts.shape[place + 1 :])
                start = _index(division, label) * sizes[label]
                parts = jax.lax.dynamic_update_slice_in_dim(jnp.zeros(shape, x.dtype), parts, start, place)
                axes |= {piece.axis for piece in division[label]}
            x = parts.reshape(*x.shape[:axis], math.prod(whole[label] for label in dim), *x.shape[axis + 1 :])
    return (jax.lax.psum(x, tuple(sorted(axes))) if axes else x).astype(dtype)


def _index(division: Division, label: str) -> jax.Array:
    """The number of this device's part of a label."""
    index = jnp.zeros((), jnp.int32)
    for piece in division[label]:
        index = index * piece.count + piece.index
    return index
