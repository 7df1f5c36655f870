"""Rewrite masks and biases that are sliced, joined, padded, tiled or reversed as functions of positions.

A mask that is computed from positions and then sliced would be an array of queries by keys. The corner of a causal mask
for the longest sequence is an example. Its elements are the same function at other positions. This pass follows each
equation that moves elements backwards, to the source index of every element. It ends at positions, and at arrays that
have an axis of queries or of keys but not both. Later passes see functions of positions only.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from blockdiag.fusion.frontend.trace import aval_of, bind, constants, rewritten
from blockdiag.fusion.ir.recursion import Steps, finished
from blockdiag.fusion.ir.tree import COLUMNS, ELEMENTWISE, ROWS, Leaf, Region
from blockdiag.fusion.regions.axis_labels import labels_of, producers_of
from blockdiag.fusion.regions.guards import PASSES

type _ValueOf = Callable[[Any], Any]

_MOVES_ELEMENTS = frozenset({
    "concatenate", "dynamic_slice", "dynamic_update_slice", "gather", "pad", "reshape", "rev", "scatter", "slice",
    "split", "stack", "tile", "unstack",
})  # fmt: skip


class _Stays(Exception):
    """Raised where the source index of an element is not known, so the array stays as it is."""


def with_places(closed: core.ClosedJaxpr, regions: Sequence[Region]) -> core.ClosedJaxpr | None:
    """Return the flat program with arrays of queries by keys that regions read as functions of positions.

    Returns:
        None if no such array can be rewritten.
    """
    producers = producers_of(closed.jaxpr)
    known = constants(closed.jaxpr, 16)
    replaced: dict[int, Callable[[_ValueOf], dict[core.Var, Any]]] = {}
    for leaf in dict.fromkeys(leaf for region in regions for leaf in region.leaves if leaf.role == "score"):
        equation = producers.get(leaf.source.key)
        if equation is None or id(equation) in replaced or not _moves_elements(equation, producers):
            continue
        places = _Places(producers, known, leaf)
        try:
            jax.eval_shape(lambda places=places: places.value(_zeros))
        except _Stays:
            continue
        replaced[id(equation)] = places.results
    return rewritten(closed, closed.jaxpr.eqns, replaced) if replaced else None


def _zeros(var: Any) -> Any:
    """Return zeros with a variable's shape and dtype, or a literal's value, for tracing of shapes."""
    return var.val if isinstance(var, core.Literal) else jnp.zeros(aval_of(var).shape, aval_of(var).dtype)


def _moves_elements(equation: core.JaxprEqn, producers: Mapping[core.Var, core.JaxprEqn]) -> bool:
    """Return whether a value is computed by equations that move elements, and not from a product."""
    waiting, seen, found = [equation], set(), False
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if one.primitive.name == "dot_general":
            return False
        found |= one.primitive.name in _MOVES_ELEMENTS
        waiting += [producers[x] for x in one.invars if isinstance(x, core.Var) and x in producers]
    return found


@dataclass(frozen=True)
class _Place:
    """The index map of one axis: the source index along it for each element of the result.

    Attributes:
        index: int32, with the rank of the result, and size 1 along axes that it does not depend on.
        axis: the axis of the result along which the index is the identity; None for any other function.
    """

    index: Any
    axis: int | None = None


class _Places:
    """One array as a function of positions.

    Args:
        known: returns the value of a small variable that depends on no argument, else None.
        leaf: the array, and the labels of its axes.
    """

    def __init__(
        self, producers: Mapping[core.Var, core.JaxprEqn], known: Callable[[Any], np.ndarray | None], leaf: Leaf
    ) -> None:
        self.var = leaf.source.key
        self._producers, self._known = producers, known
        self._shape = leaf.source.shape
        self._rows, self._columns = (
            {axis for axis, dim in enumerate(leaf.dims) if label in labels_of((dim,))} for label in (ROWS, COLUMNS)
        )

    def value(self, value_of: _ValueOf) -> Any:
        """Return the array.

        Raises:
            _Stays: it is not a function of positions.
        """
        places = [self._along(axis) for axis in range(len(self._shape))]
        return jnp.broadcast_to(finished(self._at(self.var, places, value_of)), self._shape)

    def results(self, value_of: _ValueOf) -> dict[core.Var, Any]:
        """Return the array, and the other results of the equation that computes it."""
        equation = self._producers[self.var]
        found: dict[core.Var, Any] = {}
        if len(equation.outvars) > 1:
            found = dict(zip(equation.outvars, bind(equation, [value_of(x) for x in equation.invars]), strict=True))
        return found | {self.var: self.value(value_of)}

    def _along(self, axis: int) -> _Place:
        shape = [size if i == axis else 1 for i, size in enumerate(self._shape)]
        return _Place(lax.broadcasted_iota(jnp.int32, shape, axis), axis)

    def _first(self) -> _Place:
        """Return the index map of an axis with one element."""
        return _Place(jnp.zeros((1,) * len(self._shape), jnp.int32))

    def _at(self, var: Any, places: Sequence[_Place], value_of: _ValueOf) -> Steps[Any]:
        """Return the elements of a value at these places.

        The array has the rank of the result. It may have size 1 along axes that it does not depend on.
        """
        if isinstance(var, core.Literal) or not aval_of(var).shape:
            return lax.broadcast_in_dim(jnp.asarray(value_of(var)), (1,) * len(self._shape), ())
        equation = self._producers.get(var)
        if equation is None:
            return self._read(var, places, value_of)
        name, params, operands = equation.primitive.name, equation.params, equation.invars
        if name in ELEMENTWISE or name in PASSES:
            given = []
            for x in operands:
                given.append((yield self._at(x, self._widened(x, var, places), value_of)))
            shape = np.broadcast_shapes(*(x.shape for x in given))
            return bind(equation, [jnp.broadcast_to(x, shape) for x in given])[0]
        given_shape = aval_of(operands[0]).shape if operands else ()
        match name:
            case "iota":
                return lax.convert_element_type(places[params["dimension"]].index, params["dtype"])
            case "broadcast_in_dim":
                axes = params["broadcast_dimensions"]
                inner = [self._first() if given_shape[i] == 1 else places[axis] for i, axis in enumerate(axes)]
                return (yield self._at(operands[0], inner, value_of))
            case "transpose":
                inner = [places[params["permutation"].index(axis)] for axis in range(len(places))]
                return (yield self._at(operands[0], inner, value_of))
            case "squeeze":
                rest = iter(places)
                removed = params["dimensions"]
                inner = [self._first() if axis in removed else next(rest) for axis in range(len(given_shape))]
                return (yield self._at(operands[0], inner, value_of))
            case "reshape":
                if params["dimensions"] is not None:
                    raise _Stays
                return (yield self._at(operands[0], self._reshaped(given_shape, aval_of(var).shape, places), value_of))
            case "rev":
                inner = [
                    _Place(given_shape[axis] - 1 - x.index) if axis in params["dimensions"] else x
                    for axis, x in enumerate(places)
                ]
                return (yield self._at(operands[0], inner, value_of))
            case "tile":
                pairs = zip(places, given_shape, params["reps"], strict=True)
                inner = [x if reps == 1 else _Place(_remainder(x.index, size)) for x, size, reps in pairs]
                return (yield self._at(operands[0], inner, value_of))
            case "gather":
                return (yield self._gathered(equation, places, value_of))
            case "slice":
                steps = params["strides"] or (1,) * len(places)
                inner = self._moved(places, params["start_indices"], steps, given_shape)
                return (yield self._at(operands[0], inner, value_of))
            case "split":
                first = sum(params["sizes"][: equation.outvars.index(var)])
                starts = [first if axis == params["axis"] else 0 for axis in range(len(places))]
                return (yield self._at(operands[0], self._moved(places, starts, None, given_shape), value_of))
            case "dynamic_slice":
                return (yield self._at(operands[0], self._cut(equation, places, value_of), value_of))
            case "concatenate" | "stack":
                return (yield self._joined(equation, places, value_of))
            case "unstack":
                number = jnp.full((1,) * len(self._shape), equation.outvars.index(var), jnp.int32)
                inner = [*places]
                inner.insert(params["axis"] % len(given_shape), _Place(number))
                return (yield self._at(operands[0], inner, value_of))
            case "pad":
                return (yield self._padded(equation, places, value_of))
            case "dynamic_update_slice":
                starts = [self._known(x) for x in operands[2:]]
                return (yield self._updated(operands[0], operands[1], starts, places, value_of))
            case "scatter":
                return (yield self._updated(operands[0], operands[2], self._scattered(equation), places, value_of))
        return self._read(var, places, value_of)

    def _widened(self, operand: Any, var: Any, places: Sequence[_Place]) -> list[_Place]:
        """Return the places in an operand that an elementwise operation broadcasts along axes of size 1."""
        pairs = zip(aval_of(operand).shape, aval_of(var).shape, places, strict=False)
        return [self._first() if size == 1 and whole != 1 else place for size, whole, place in pairs]

    def _read(self, var: Any, places: Sequence[_Place], value_of: _ValueOf) -> Any:
        """Return elements of an array that stays in memory.

        It may have an axis of queries or of keys, but not both. A table that is read once for each pair is allowed.

        Raises:
            _Stays: the array depends on queries and keys in another way.
        """
        shape = aval_of(var).shape
        wide = [i for i, size in enumerate(shape) if size > 1]
        touched = {axis for i in wide for axis, size in enumerate(places[i].index.shape) if size > 1}
        moved = [i for i in wide if places[i].axis is None]
        along = [axis for i in wide if (axis := places[i].axis) is not None]
        if len(moved) > 1 or len(set(along)) < len(along):
            raise _Stays
        array, own = lax.reshape(value_of(var), [shape[i] for i in wide]), []
        if moved:
            index = places[moved[0]].index
            own = [axis for axis, size in enumerate(index.shape) if size > 1]
            if set(own) & set(along):
                raise _Stays
            at = wide.index(moved[0])
            array = jnp.take(array, lax.reshape(index, [index.shape[axis] for axis in own]), axis=at, mode="clip")
            along[at:at] = own
        # A table read for each pair may be a function of the distance. Other arrays with both axes are stored anyway.
        if touched & self._rows and touched & self._columns and not {*self._rows, *self._columns} <= {*own}:
            raise _Stays
        array = lax.transpose(array, sorted(range(len(along)), key=along.__getitem__))
        shape = [self._shape[axis] if axis in along else 1 for axis in range(len(self._shape))]
        return lax.broadcast_in_dim(array, shape, sorted(along))

    @staticmethod
    def _moved(
        places: Sequence[_Place], starts: Sequence[int], steps: Sequence[int] | None, shape: Sequence[int]
    ) -> list[_Place]:
        """Return the places in the operand of a slice."""
        found = []
        for axis, (place, first) in enumerate(zip(places, starts, strict=True)):
            step = 1 if steps is None else steps[axis]
            is_whole = first == 0 and step == 1 and place.axis is not None and place.index.size == shape[axis]
            found.append(place if is_whole else _Place(place.index * step + first))
        return found

    def _cut(self, equation: core.JaxprEqn, places: Sequence[_Place], value_of: _ValueOf) -> list[_Place]:
        """Return the places in the operand of a dynamic slice, whose start may be traced."""
        shape, sizes = aval_of(equation.invars[0]).shape, equation.params["slice_sizes"]
        found = []
        for axis, (place, start) in enumerate(zip(places, equation.invars[1:], strict=True)):
            if sizes[axis] == shape[axis]:
                found.append(place)
                continue
            first = lax.convert_element_type(jnp.asarray(value_of(start)), jnp.int32)
            first = lax.clamp(jnp.int32(0), first, jnp.int32(shape[axis] - sizes[axis]))
            found.append(_Place(place.index + lax.broadcast_in_dim(first, place.index.shape, ())))
        return found

    def _reshaped(self, before: Sequence[int], after: Sequence[int], places: Sequence[_Place]) -> list[_Place]:
        """Return the places in the operand of a reshape.

        Axes are grouped so that both shapes have as many elements in each group. Within a group, places are computed
        from the flat index.
        """
        inner = [self._first()] * len(before)
        old = [axis for axis, size in enumerate(before) if size > 1]
        new = [axis for axis, size in enumerate(after) if size > 1]
        while old:
            left, right = [old.pop(0)], [new.pop(0)]
            while (wanted := math.prod(before[i] for i in left)) != (given := math.prod(after[i] for i in right)):
                (left if wanted < given else right).append((old if wanted < given else new).pop(0))
            if len(left) == len(right) == 1:
                inner[left[0]] = places[right[0]]
                continue
            number: Any = 0
            for axis in right:
                number = number * after[axis] + places[axis].index
            for axis in reversed(left):
                inner[axis] = _Place(_remainder(number, before[axis]) if axis != left[0] else number)
                number = lax.div(number, jnp.full(number.shape, before[axis], jnp.int32))
        return inner

    def _gathered(self, equation: core.JaxprEqn, places: Sequence[_Place], value_of: _ValueOf) -> Steps[Any]:
        """Return the elements of a gather's windows, which begin at given indices.

        Raises:
            _Stays: elements out of bounds are filled with NaN, or the operand has batch axes of its own.
        """
        operand, indices = equation.invars
        numbers, mode = equation.params["dimension_numbers"], equation.params["mode"]
        shape, sizes = aval_of(operand).shape, equation.params["slice_sizes"]
        fill = equation.params["fill_value"]
        fills = mode == lax.GatherScatterMode.FILL_OR_DROP
        if numbers.operand_batching_dims or (fills and fill is None):
            raise _Stays
        given = [place for axis, place in enumerate(places) if axis not in numbers.offset_dims]
        windows = iter(places[axis] for axis in numbers.offset_dims)
        inner, is_inside = [], None
        for axis, (whole, size) in enumerate(zip(shape, sizes, strict=True)):
            window = self._first() if axis in numbers.collapsed_slice_dims else next(windows)
            if axis not in numbers.start_index_map:
                if size != whole:
                    raise _Stays
                inner.append(window)
                continue
            number = jnp.full((1,) * len(self._shape), numbers.start_index_map.index(axis), jnp.int32)
            start = yield self._at(indices, [*given, _Place(number)], value_of)
            start = lax.convert_element_type(start, jnp.int32)
            if fills:
                test = (start >= 0) & (start <= whole - size)
                is_inside = test if is_inside is None else _both(is_inside, test)
            inner.append(_Place(_within(start, whole - size + 1) + window.index))
        value = yield self._at(operand, inner, value_of)
        if is_inside is None:
            return value
        return _chosen(is_inside, value, jnp.full((1,) * len(self._shape), fill, aval_of(operand).dtype))

    def _joined(self, equation: core.JaxprEqn, places: Sequence[_Place], value_of: _ValueOf) -> Steps[Any]:
        """Return the elements of a `concatenate` or `stack`; the latter joins along a new axis."""
        is_new = equation.primitive.name == "stack"
        along = equation.params["axis"] % len(places) if is_new else equation.params["dimension"]
        sizes = [1 if is_new else aval_of(x).shape[along] for x in equation.invars]
        ends = list(itertools.accumulate(sizes))
        index = places[along].index
        found = None
        for operand, end, size in reversed(list(zip(equation.invars, ends, sizes, strict=True))):
            inner = [*places]
            inner[along] = _Place(_within(index - (end - size), size)) if size > 1 else self._first()
            if is_new:
                del inner[along]
            value = yield self._at(operand, inner, value_of)
            found = value if found is None else _chosen(index < end, value, found)
        return found

    def _padded(self, equation: core.JaxprEqn, places: Sequence[_Place], value_of: _ValueOf) -> Steps[Any]:
        """Return the elements of a padded array, without negative or interior padding."""
        operand, number = equation.invars
        if any(low < 0 or high < 0 or between for low, high, between in equation.params["padding_config"]):
            raise _Stays
        starts = [low for low, _, _ in equation.params["padding_config"]]
        around = lax.broadcast_in_dim(jnp.asarray(value_of(number)), (1,) * len(self._shape), ())
        return (yield self._within(operand, starts, places, around, value_of))

    def _updated(
        self, operand: Any, update: Any, starts: Sequence[Any], places: Sequence[_Place], value_of: _ValueOf
    ) -> Steps[Any]:
        """Return the elements of an array with a window overwritten by another array."""
        if any(x is None for x in starts):
            raise _Stays
        whole, sizes = aval_of(operand).shape, aval_of(update).shape
        pairs = zip(starts, whole, sizes, strict=True)
        first = [min(max(0, int(x)), full - size) for x, full, size in pairs]
        around = yield self._at(operand, places, value_of)
        return (yield self._within(update, first, places, around, value_of))

    def _within(
        self, inside: Any, starts: Sequence[int], places: Sequence[_Place], around: Any, value_of: _ValueOf
    ) -> Steps[Any]:
        """Return the elements of `inside`, which begins at `starts`, and `around` outside of it."""
        inner, shape, is_inside = [], aval_of(inside).shape, None
        for axis, (place, first) in enumerate(zip(places, starts, strict=True)):
            size = place.index.size if place.axis is not None else None
            if first == 0 and size == shape[axis]:
                inner.append(place)
                continue
            test = (place.index >= first) & (place.index < first + shape[axis])
            is_inside = test if is_inside is None else _both(is_inside, test)
            inner.append(_Place(_within(place.index - first, shape[axis])) if shape[axis] > 1 else self._first())
        value = yield self._at(inside, inner, value_of)
        return value if is_inside is None else _chosen(is_inside, value, around)

    def _scattered(self, equation: core.JaxprEqn) -> list[Any]:
        """Return the start of the single window that a scatter overwrites.

        Raises:
            _Stays: the scatter does anything else, or its start is not known.
        """
        operand, indices, update = equation.invars
        numbers, rank = equation.params["dimension_numbers"], len(aval_of(operand).shape)
        known = self._known(indices)
        is_window = tuple(numbers.update_window_dims) == tuple(range(rank)) and len(aval_of(update).shape) == rank
        if known is None or known.ndim != 1 or not is_window or equation.params["update_jaxpr"] is not None:
            raise _Stays
        starts = [0] * rank
        for axis, first in zip(numbers.scatter_dims_to_operand_dims, known, strict=True):
            starts[axis] = int(first)
        return starts


def _within(index: Any, size: int) -> Any:
    """Clamp an index to its axis. Elements out of bounds are not selected, but their derivatives must be finite."""
    return lax.clamp(jnp.int32(0), index, jnp.int32(size - 1))


def _remainder(number: Any, size: int) -> Any:
    return lax.rem(number, jnp.full(number.shape, size, jnp.int32))


def _both(one: Any, other: Any) -> Any:
    shape = np.broadcast_shapes(one.shape, other.shape)
    return lax.bitwise_and(jnp.broadcast_to(one, shape), jnp.broadcast_to(other, shape))


def _chosen(test: Any, one: Any, other: Any) -> Any:
    """Return `one` where the test holds, else `other`."""
    shape = np.broadcast_shapes(test.shape, one.shape, other.shape)
    test, one, other = (jnp.broadcast_to(x, shape) for x in (test, one, other))
    return lax.select(test, one, other)
