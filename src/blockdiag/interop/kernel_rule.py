"""Parser of `triton_call`'s `sharding_rule`, the notation for how a mesh divides a user's kernel."""

import inspect
import math
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from blockdiag.common.rule import Dim, Rule

type Shape = tuple[int, ...]

_AXIS = re.compile(r"\(([^()]*)\)|([A-Za-z]\w*|_)(?=\s|\(|$)|(\S)")
_REMEDY = "write labels as einsum does, with spaces between them: 'b t h, b s h -> b t h'"


def parse_rule(
    text: str, independent: str, operands: Mapping[str, Shape], results: Sequence[Shape], *, name: str, problem: str
) -> Rule:
    """Parse `sharding_rule` into the `Rule` of a call.

    Args:
        text: axis labels of each operand, then "->", then axis labels of each result; see `triton_call`.
        independent: the labels that devices may divide.
        operands: the shape of each array, by parameter name.
        results: the shape of each output.
        name: name of the kernel.
        problem: see `Rule`.

    Raises:
        ValueError: the notation is wrong or does not fit the arrays.
    """
    sides = text.split("->")
    if len(sides) != 2:
        raise ValueError(f"`sharding_rule` must have one '->' between operands and results, got {text!r}; {_REMEDY}")
    given, made = (_arrays(side, text) for side in sides)
    names = [*operands, *(f"output {place}" for place in range(len(results)))]
    if len(given) != len(operands) or len(made) != len(results):
        raise ValueError(
            f"`sharding_rule` describes {len(given)} operands and {len(made)} results, got {text!r}; kernel {name!r} "
            f"has the arrays {list(operands)} and {len(results)} outputs, which it must describe in this order"
        )
    shapes = [*operands.values(), *results]
    for array, dims, shape in zip(names, (*given, *made), shapes, strict=True):
        if len(dims) != len(shape):
            raise ValueError(
                f"`sharding_rule` {text!r} gives {len(dims)} axes to {array!r}, which has shape {shape}; "
                "an axis that is never divided is '_'"
            )
    sizes = _sizes(text, names, (*given, *made), shapes)
    divided = independent.split()
    unknown = sorted(set(divided) - sizes.keys())
    if unknown or not divided:
        raise ValueError(
            f"`divided_labels` must name labels of `sharding_rule` {text!r}, with spaces between them, got "
            f"{independent!r}; its labels are {list(sizes)}"
        )
    return Rule(name, problem, given, made, tuple(sizes.items()), frozenset(divided))


def local_shape(dims: Sequence[Dim], shape: Shape, sizes: Mapping[str, int]) -> Shape:
    """Return the shape of one shard, given the size of each label on a device."""
    return tuple(
        math.prod(sizes[label] for label in dim) if dim else size for dim, size in zip(dims, shape, strict=True)
    )


def function_text(function: Any) -> str:
    """Return a text that identifies a function of sizes by its code, its defaults and the variables it refers to."""
    if not isinstance(function, types.FunctionType):
        return repr(function)
    code, found = function.__code__, inspect.getclosurevars(function)
    return repr((code.co_code, code.co_consts, code.co_names, function.__defaults__, found.nonlocals, found.globals))


def _arrays(side: str, text: str) -> tuple[tuple[Dim, ...], ...]:
    """Return the axis labels of the arrays on one side of the arrow."""
    return tuple(_dims(array, text) for array in side.split(",")) if side.strip() else ()


def _dims(array: str, text: str) -> tuple[Dim, ...]:
    dims: list[Dim] = []
    for group, label, wrong in _AXIS.findall(array):
        labels = tuple(group.split()) if not label else () if label == "_" else (label,)
        if wrong or (not label and not labels) or not all(x.isidentifier() and x != "_" for x in labels):
            raise ValueError(
                f"`sharding_rule` {text!r} cannot be read at {wrong or group!r} in {array.strip()!r}; {_REMEDY}"
            )
        dims.append(labels)
    every = [label for dim in dims for label in dim]
    if len(set(every)) != len(every):
        raise ValueError(
            f"`sharding_rule` {text!r} has a label twice in {array.strip()!r}; name each axis of an array once"
        )
    return tuple(dims)


def _sizes(text: str, names: Sequence[str], arrays: Sequence[Sequence[Dim]], shapes: Sequence[Shape]) -> dict[str, int]:
    """Return the size of every label, in order of first appearance."""
    axes = [
        (name, axis, dim, size)
        for name, dims, shape in zip(names, arrays, shapes, strict=True)
        for axis, (dim, size) in enumerate(zip(dims, shape, strict=True))
        if dim
    ]
    sizes: dict[str, int] = {}
    waiting = axes
    while waiting:
        # An axis of several labels determines a label's size once the sizes of its other labels are known.
        known = [(dim, size) for _, _, dim, size in waiting if sum(label not in sizes for label in dim) <= 1]
        if not known:
            unknown = sorted({label for _, _, dim, _ in waiting for label in dim} - sizes.keys())
            raise ValueError(
                f"`sharding_rule` {text!r} does not determine the sizes of {unknown}; reshape an array so that one of "
                "them is an axis of its own"
            )
        for dim, size in known:
            for label in [label for label in dim if label not in sizes]:
                others = math.prod(sizes[x] for x in dim if x != label)
                sizes[label] = size // max(others, 1)
        waiting = [axis for axis in waiting if any(label not in sizes for label in axis[2])]
    for name, axis, dim, size in axes:
        expected = math.prod(sizes[label] for label in dim)
        if size != expected:
            raise ValueError(
                f"`sharding_rule` {text!r}: axis {axis} of {name!r} has {size} elements, and its labels "
                f"{' '.join(dim)!r} have {expected} elsewhere; give axes of different sizes different labels"
            )
    order = dict.fromkeys(label for _, _, dim, _ in axes for label in dim)
    return {label: sizes[label] for label in order}


type OfSizes = Callable[[Mapping[str, int]], Any]
