"""Division of a rule's labels over a mesh, and the computation of one device.

A label that a mesh axis divides is divided in all arrays that have it. Where no sharding can express this for an
operand, each device slices the part that it needs: for example key heads, where there are fewer of them than devices. A
result without the label is a sum over it, which one all-reduce completes.
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
    """A factor of a mesh axis: a device's index along the axis, divided by `below`, modulo `count`."""

    axis: str
    count: int
    below: int

    @property
    def index(self) -> jax.Array:
        """The index of this device's part."""
        return jax.lax.axis_index(self.axis) // self.below % self.count


type Division = Mapping[str, tuple[Piece, ...]]
"""The pieces of mesh axes that divide each label, slowest first."""


@dataclass(frozen=True)
class Part:
    """The part of an operation that one device computes.

    Attributes:
        sizes: number of indices of each label on the device.
        starts: the first index of each divided label, int32.
        axes: the mesh axes that divide each divided label, slowest first.
    """

    sizes: Mapping[str, int]
    starts: Mapping[str, jax.Array]
    axes: Mapping[str, tuple[str, ...]]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["dtype"])
@dataclass(frozen=True)
class Share:
    """One device's share of a sum over devices, in a wider dtype than the sum, which is rounded after the addition.

    Attributes:
        array: the share.
        dtype: dtype of the rounded sum.
    """

    array: jax.Array
    dtype: np.dtype[Any]


type Local[R] = Callable[[Part], Callable[..., R]]
"""A function from one device's part to the operation on its arrays. Results summed over devices may be `Share`s."""


def division_of(rule: Rule, mesh: Mapping[str, int], arrays: Sequence[tuple[Sequence[int], P]]) -> Division:
    """Return the division of labels that follows from shardings of arrays. Where two disagree, the larger array wins.

    Args:
        rule: the rule.
        mesh: the size of each axis of the mesh.
        arrays: shape and spec of each operand, optionally followed by those of each result.
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
    """Return the pieces of one array axis if they are consistent with those found so far, else none.

    The pieces may add to the division: an axis of key heads and their query heads may be divided further than key heads
    alone.
    """
    if any(pieces.get(label) != found[label] for label in dim if label in found):
        return {}
    used = {piece.axis for label, each in found.items() if label not in dim for piece in each}
    is_free = used.isdisjoint(piece.axis for each in pieces.values() for piece in each)
    return pieces if is_free else {}


def _pieces(
    names: Sequence[str], mesh: Mapping[str, int], labels: Sequence[tuple[str, int]], independent: frozenset[str]
) -> dict[str, tuple[Piece, ...]]:
    """Return how mesh axes, slowest first, divide an array axis with these labels of these sizes.

    The first mesh axis that does not divide the sizes, and all after it, are left out.
    """
    found: dict[str, list[Piece]] = {}
    waiting = list(labels)
    left = waiting[0][1] if waiting else 1
    for axis in names:
        parts: list[tuple[str, Piece]] = []
        size, place, rest = mesh[axis], list(waiting), left
        while size > 1 and place and place[0][0] in independent:
            count = math.gcd(size, rest)
            # Either the rest of the mesh axis divides the label, or a part of it divides the label down to 1.
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
    """Return the spec of an array under a division of labels; axes that no spec can describe are whole."""
    return P(*(_names(rule, division, mesh, dim) or None for dim in dims))


def wanted_spec(rule: Rule, division: Division, mesh: Mapping[str, int], dims: Sequence[Dim], wanted: P) -> P:
    """Return the spec of a result. Axes of a sum that are wanted whole become whole by the sum's all-reduce."""
    spec = spec_of(rule, division, mesh, dims)
    own = {label for dim in dims for label in dim}
    if all(label in own for label in division if _parts(division, label) > 1):
        return spec
    entries = (*wanted, *[None] * (len(dims) - len(wanted)))
    return P(*(entry if other not in (None, ()) else None for entry, other in zip(spec, entries, strict=True)))


def _names(rule: Rule, division: Division, mesh: Mapping[str, int], dim: Dim) -> tuple[str, ...]:
    """Return the mesh axes that shard an array axis exactly as its labels are divided; empty where none do."""
    sizes = dict(rule.sizes)
    pieces = [(label, piece) for label in dim for piece in division.get(label, ())]
    is_whole = True
    for label in dim:
        parts = _parts(division, label)
        if parts > 1 and not is_whole:
            return ()  # parts of a faster label are not contiguous unless all slower labels are fully divided
        is_whole = is_whole and parts == sizes[label]
    names = tuple(dict.fromkeys(piece.axis for _, piece in pieces))
    # Each mesh axis must be used whole and in one run, slowest piece first.
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
    """Return the axes to split one axis into: one per label if devices may divide only some of its labels."""
    sizes = dict(rule.sizes)
    labels = {label for label in dim if sizes[label] > 1}
    return tuple((label,) for label in dim) if labels & rule.independent and labels - rule.independent else (dim,)


def split_axes(x: jax.Array, dims: Sequence[Dim], rule: Rule, sizes: Mapping[str, int]) -> jax.Array:
    """Reshape an array to the axes of `axes_of`, for labels of these sizes."""
    shape: list[int] = []
    for size, dim in zip(x.shape, dims, strict=True):
        shape += [size] if len(axes_of(dim, rule)) == 1 else [sizes[label] for label in dim]
    return x.reshape(shape) if len(shape) != x.ndim else x


def join_axes(x: jax.Array, dims: Sequence[Dim], rule: Rule) -> jax.Array:
    """Undo `split_axes`."""
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
    """Return the function of one device's shards, for use inside the mesh.

    Args:
        rule: the operation's sharding rule.
        local: function from a part of the operation to the code that computes it.
        division: the division of labels.
        mesh: the size of each axis of the mesh.
        results: the specs of the results.
        unused: number of last operands that `local` does not take.
    """
    sizes = {label: size // _parts(division, label) for label, size in rule.sizes}

    def cut_labels(dims: Sequence[Dim], spec: P) -> list[list[str]]:
        """Return, for every axis, the labels that are divided although the spec does not shard the axis."""
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
    """Slice the part of an operand that this device needs."""
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
    """Complete a result by an all-reduce.

    It sums over divided labels that the result lacks, and makes axes whole that the spec does not shard.
    """
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
    """Return the index of this device's part of a label."""
    index = jnp.zeros((), jnp.int32)
    for piece in division[label]:
        index = index * piece.count + piece.index
    return index
