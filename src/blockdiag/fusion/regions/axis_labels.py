"""Labels of axes, and how they propagate from a value to the operands that it is computed from."""

import collections
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jax.extend import core, source_info_util

from blockdiag.fusion.frontend.trace import aval_of, kept
from blockdiag.fusion.ir.tree import ELEMENTWISE, Dim, Unpullable
from blockdiag.fusion.regions.grids import Divide, base_of, joined_parts

# Primitives whose result has the values and the shape of the operand.
SAME = frozenset({"copy", "copy_p", "reduce_precision", "name", "pvary", "reshard", "sharding_constraint"})

MOVES = ("broadcast_in_dim", "reshape", "squeeze", "transpose")


@kept
def producers_of(jaxpr: core.Jaxpr) -> Mapping[core.Var, core.JaxprEqn]:
    """Map each variable to the equation that computes it."""
    return MappingProxyType({var: equation for equation in jaxpr.eqns for var in equation.outvars})


@kept
def places_in(jaxpr: core.Jaxpr) -> Mapping[core.Var, int]:
    """Map each variable to the position of the equation that computes it."""
    return MappingProxyType({var: place for place, equation in enumerate(jaxpr.eqns) for var in equation.outvars})


@kept
def equations_by_name(jaxpr: core.Jaxpr) -> Mapping[str, Sequence[core.JaxprEqn]]:
    """Map the name of each primitive to its equations, in order."""
    found: collections.defaultdict[str, list[core.JaxprEqn]] = collections.defaultdict(list)
    for equation in jaxpr.eqns:
        found[equation.primitive.name].append(equation)
    return MappingProxyType(found)


def parts_of(producers: Mapping[core.Var, core.JaxprEqn], var: core.Var) -> dict[int, tuple[int, ...]]:
    """Map each axis of a value that a reshape merged from several to the sizes of these.

    The reshape may lie below elementwise operations and moves.
    """
    found: dict[int, tuple[int, ...]] = {}
    seen: set[tuple[core.Var, int]] = set()
    waiting = [(var, axis, axis) for axis, size in enumerate(aval_of(var).shape) if size > 1]
    while waiting:
        one, at, axis = waiting.pop()
        equation = producers.get(one)
        if equation is None or axis in found or (one, at) in seen or len(equation.outvars) != 1:
            continue
        seen.add((one, at))
        name, shape = equation.primitive.name, aval_of(one).shape
        marked: tuple[Dim, ...] = tuple(("here",) if i == at else () for i in range(len(shape)))
        for operand in equation.invars:
            if not isinstance(operand, core.Var) or not aval_of(operand).shape:
                continue
            given = aval_of(operand).shape
            if name == "reshape":
                first, size = math.prod(shape[:at]), shape[at]
                ends = [math.prod(given[: i + 1]) for i in range(len(given))]
                axes = [i for i, end in enumerate(ends) if first < end <= first * size and given[i] > 1]
                if math.prod(given[i] for i in axes) != size or first not in (1, *ends):
                    continue
                if len(axes) > 1:
                    found[axis] = tuple(given[i] for i in axes)
                else:
                    waiting.append((operand, axes[0], axis))
            elif name in ELEMENTWISE or name in SAME or name == "convert_element_type":
                waiting += [(operand, at, axis)] if given[at] == shape[at] else []
            elif name in MOVES:
                inner = moved_dims(equation, marked, {})
                waiting += [(operand, i, axis) for i, dim in enumerate(inner) if dim == ("here",)]
    return found


def users_of(jaxpr: core.Jaxpr) -> dict[core.Var, list[core.JaxprEqn | None]]:
    """Map each variable to the equations that use it, with a None for each time that it is a result."""
    found: dict[core.Var, list[core.JaxprEqn | None]] = {var: [] for eqn in jaxpr.eqns for var in eqn.outvars}
    for equation in jaxpr.eqns:
        for operand in equation.invars:
            if isinstance(operand, core.Var) and operand in found:
                found[operand].append(equation)
    for result in jaxpr.outvars:
        if isinstance(result, core.Var) and result in found:
            found[result].append(None)
    return found


def place_of(equation: core.JaxprEqn) -> str:
    """Return the user's source line of an equation, for messages."""
    return f"at {source_info_util.summarize(equation.source_info)}"


def labels_of(dims: Sequence[Dim]) -> set[str]:
    """Return all labels of an array's axes; a part counts as the label that it divides."""
    return {base_of(label) for dim in dims if isinstance(dim, tuple) for label in dim}


def factor_dims(equation: core.JaxprEqn, dims: tuple[Dim, ...]) -> list[list[Dim]]:
    """Return the dims of both operands of a `dot_general`; contracted axes have none."""
    (contracted, shared) = equation.params["dimension_numbers"]
    sides: list[list[Dim]] = [[()] * len(aval_of(x).shape) for x in equation.invars]
    left = iter(dims)
    for axes in zip(*shared, strict=True):
        label = next(left)
        for side, axis in zip(sides, axes, strict=True):
            side[axis] = label
    for side, summed, common in zip(sides, contracted, shared, strict=True):
        for axis in range(len(side)):
            if axis not in summed and axis not in common:
                side[axis] = next(left)
    return sides


def broadcast_dims(operand: Any, shape: tuple[int, ...], dims: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """Return the dims of an operand of an elementwise operation."""
    if isinstance(operand, core.Literal) or not aval_of(operand).shape:
        return ()
    pairs = zip(aval_of(operand).shape, shape, dims, strict=True)
    return tuple(() if size == 1 and size != whole else dim for size, whole, dim in pairs)


def moved_dims(
    equation: core.JaxprEqn, dims: tuple[Dim, ...], sizes: Mapping[str, int], divide: Divide | None = None
) -> tuple[Dim, ...]:
    """Return the dims of the operand of an equation that moves elements.

    Args:
        sizes: the size of each label.
        divide: splits a label into parts of given sizes; None if labels stay whole.

    Raises:
        Unpullable: an axis of the operand is a part of a label.
    """
    name, params = equation.primitive.name, equation.params
    given, shape = aval_of(equation.invars[0]).shape, aval_of(equation.outvars[0]).shape
    match name:
        case "broadcast_in_dim":
            axes = params["broadcast_dimensions"]
            return tuple(() if given[i] == 1 and shape[axis] != 1 else dims[axis] for i, axis in enumerate(axes))
        case "transpose":
            inverse = {axis: i for i, axis in enumerate(params["permutation"])}
            return tuple(dims[inverse[axis]] for axis in range(len(given)))
        case "squeeze":
            removed = {axis % len(given) for axis in params["dimensions"]}
            rest = iter(dims)
            return tuple(() if axis in removed else next(rest) for axis in range(len(given)))
        case "reshape":
            return regrouped(given, shape, dims, sizes, divide)
    raise Unpullable(f"`{name}`")


def regrouped(
    given: Sequence[int],
    shape: Sequence[int],
    dims: tuple[Dim, ...],
    sizes: Mapping[str, int],
    divide: Divide | None = None,
) -> tuple[Dim, ...]:
    """Return the dims of the operand of a reshape: labels in order, as many as fill each axis.

    Raises:
        Unpullable: an axis of the operand is a part of a label.
    """
    if any(isinstance(dim, int) for dim in dims):
        if tuple(x for x in given if x != 1) != tuple(x for x in shape if x != 1):
            raise Unpullable("`reshape` of features")
        rest = iter(dim for dim, size in zip(dims, shape, strict=True) if size != 1)
        return tuple(() if size == 1 else next(rest) for size in given)
    labels = [label for dim in dims for label in dim]  # pyrefly: ignore[not-iterable]
    found: list[Dim] = []
    for size in given:
        taken: list[str] = []
        while math.prod(sizes[label] for label in taken) < size:
            if not labels:
                raise Unpullable("`reshape` that divides an axis")
            label, missing = labels.pop(0), size // math.prod(sizes[label] for label in taken)
            if divide is not None and sizes[label] > missing > 1:
                label, *rest = divide(label, _sizes_of_parts(sizes[label], missing, given[len(found) + 1 :]))
                labels[:0] = rest
            taken.append(label)
        if math.prod(sizes[label] for label in taken) != size:
            raise Unpullable("`reshape` that divides an axis")
        found.append(joined_parts(taken))
    # Labels of size 1 that no axis of the operand needed.
    return tuple(found)


def _sizes_of_parts(whole: int, first: int, following: Sequence[int]) -> list[int]:
    """Return the sizes of the operand's axes that a reshape merges: the first, and as many others as fill the whole.

    Raises:
        Unpullable: the axes do not fill the whole exactly.
    """
    found = [first]
    for size in following:
        if math.prod(found) < whole and size > 1:
            found.append(size)
    if math.prod(found) != whole:
        raise Unpullable("`reshape` that divides an axis")
    return found
