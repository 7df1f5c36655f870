"""Values of queries by keys that are functions of q - k alone, such as biases of relative positions.

An array [.., T, S] that is gathered from a table by distance, or computed by a small network from the distance, has
T + S - 1 distinct numbers in each head. This module applies the same equations to the distances instead of all pairs.
The axis of queries then has T + S - 1 elements, and that of keys has one. Regions read the number of q - k where they
need it, and sum the gradient along diagonals.

The alternative is to compute the function from indices in the kernel. The logarithms of T5's buckets are some twenty
operations for each element, and a table's gradient would need a comparison for each element and row of the table. Here
one load for each element and one sum for each diagonal are enough for every function of the distance. Its derivative is
JAX's own, on T + S - 1 numbers.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from blockdiag.common.derivatives import on_common_axes
from blockdiag.fusion.frontend.custom_derivatives import calls_of, with_derivative
from blockdiag.fusion.frontend.trace import aval_of, body_of
from blockdiag.fusion.ir.recursion import Steps, finished
from blockdiag.fusion.ir.tree import COLUMNS, DISTANCE, ELEMENTWISE, ROWS, Dim, Source, Unpullable
from blockdiag.fusion.regions.materialise import source_made_by

_SAME = frozenset({"copy", "copy_p", "stop_gradient", "pvary", "pcast", "reduce_precision"})
_REDUCTIONS = frozenset({"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"})
# Integers up to this are exact in float32.
_EXACT = 2**24

type _Arrays = dict[Any, Any]


@dataclass(frozen=True)
class _Axes:
    """The axes of queries and of keys of a value; None if it lacks the axis, or is constant along it."""

    rows: int | None
    columns: int | None

    @property
    def any(self) -> bool:
        """Return whether the value has either axis."""
        return self.rows is not None or self.columns is not None

    def through(self, find: Callable[[int], int | None]) -> "_Axes":
        """Return the axes of an operand, by a function from the result's axes to the operand's."""
        return _Axes(*(None if axis is None else find(axis) for axis in (self.rows, self.columns)))


@dataclass(frozen=True)
class _Made:
    """A value on distances.

    Attributes:
        compute: a function from arrays of the program to the value, with axes of queries and keys as in the module's
            docstring.
        is_still: whether the value is the same at all positions.
        number: the value as a constant, if it is a literal.
    """

    compute: Callable[[_Arrays], Any]
    is_still: bool
    number: Any = None


@dataclass(frozen=True)
class _Line:
    """An affine function of positions: rows * q + columns * k + offset + rest.

    Attributes:
        rest: a value that is the same at all positions; None is 0.
    """

    rows: int
    columns: int
    offset: int
    rest: _Made | None = None


class Distances:
    """Finder of functions of q - k in a program.

    Args:
        producers: the equation that computes each variable.
        sizes: the sizes of labels. The number of distances is added.
        inputs: the arguments, given on distances, if the program is the body of a called function. Calls within it drop
            their custom derivatives, because the function itself has one.
    """

    def __init__(
        self,
        producers: Mapping[core.Var, core.JaxprEqn],
        sizes: dict[str, int],
        inputs: Iterable[core.Var] | None = None,
    ) -> None:
        self.producers = producers
        self._sizes = sizes
        self._is_function = inputs is not None
        self._inputs: dict[core.Var, _Axes | None] = dict.fromkeys(inputs or ())
        self._known: dict[tuple[core.Var, _Axes], _Made | _Line] = {}
        self._read: dict[core.Var, None] = {}

    def source(self, var: core.Var, dims: tuple[Dim, ...]) -> tuple[Source, tuple[Dim, ...]]:
        """Return the numbers of a value by distance, and their dims.

        Args:
            var: the value.
            dims: the labels of its axes.

        Raises:
            Unpullable: the value depends on positions by more than the difference q - k.
        """
        if (ROWS,) not in dims or (COLUMNS,) not in dims or 1 in (self._rows, self._keys):
            raise Unpullable("no axes of queries and keys")
        self._sizes[DISTANCE] = self._rows + self._keys - 1
        rows_axis, columns_axis = dims.index((ROWS,)), dims.index((COLUMNS,))
        axes = _Axes(rows_axis, columns_axis)
        self._known, self._read = {}, {}
        made = finished(self._made(var, axes))
        steps = [x.compute for x in self._known.values() if isinstance(x, _Made)]

        def compute(*arrays: Any) -> Any:
            known: _Arrays = dict(zip(read, arrays, strict=True))
            for step in steps:
                # Steps are in topological order. Unused ones are removed as dead code later.
                step(known)
            array = made.compute(known)
            array = lax.broadcast_in_dim(array, shape, range(len(shape)))
            if array.dtype in (jnp.bfloat16, jnp.float16):
                # The numbers are few, and kernels load them one by one and use them in float32.
                array = lax.convert_element_type(array, np.float32)
            line = lax.squeeze(array, (columns_axis,))
            return jnp.moveaxis(line, rows_axis - (columns_axis < rows_axis), -1)

        shape = self._shape(var, axes)
        read = list(self._read)
        source = source_made_by(compute, read)
        rest = tuple(dim for axis, dim in enumerate(dims) if axis not in (rows_axis, columns_axis))
        return source, (*rest, (DISTANCE,))

    @property
    def _rows(self) -> int:
        return self._sizes[ROWS]

    @property
    def _keys(self) -> int:
        return self._sizes[COLUMNS]

    def _shape(self, operand: Any, axes: _Axes) -> tuple[int, ...]:
        """Return the shape of a value on distances."""
        sizes = {axes.columns: 1, axes.rows: self._rows + self._keys - 1}
        return tuple(sizes.get(axis, size) for axis, size in enumerate(aval_of(operand).shape))

    def _made(self, operand: Any, axes: _Axes) -> Steps[_Made]:
        """Return a value on distances. A line must have opposite slopes for queries and keys, and becomes an array."""
        value = yield self._value(operand, axes)
        return self._of_line(value, aval_of(operand), axes) if isinstance(value, _Line) else value

    def _of_line(self, line: _Line, aval: Any, axes: _Axes) -> _Made:
        if line.rows != -line.columns or axes.rows is None:
            raise Unpullable("positions that are not subtracted from each other")
        least, slope, offset = 1 - self._keys, line.rows, line.offset
        count, rank, axis, dtype, rest = self._rows + self._keys - 1, len(aval.shape), axes.rows, aval.dtype, line.rest

        def compute(arrays: _Arrays) -> Any:
            shape = [1] * rank
            shape[axis] = count
            numbers = lax.broadcasted_iota(np.int32, shape, axis) * np.int32(slope) + np.int32(slope * least + offset)
            numbers = lax.convert_element_type(numbers, dtype)
            return numbers if rest is None else _applied(lax.add_p, [numbers, rest.compute(arrays)], {})

        return _Made(compute, is_still=False)

    def _value(self, operand: Any, axes: _Axes) -> Steps[_Made | _Line]:
        if isinstance(operand, core.Literal):
            value = np.asarray(operand.val, aval_of(operand).dtype)
            return _Made(lambda arrays: value, is_still=True, number=value)
        if (operand, axes) not in self._known:
            value = yield self._computed(operand, axes)
            if isinstance(value, _Made):
                value = replace(value, compute=_once(value.compute))
            self._known[operand, axes] = value
        return self._known[operand, axes]

    def _computed(self, var: core.Var, axes: _Axes) -> Steps[_Made | _Line]:
        if var in self._inputs:
            if self._inputs[var] not in (None, axes):
                raise Unpullable("a function that moves positions")
            self._inputs[var] = axes
            return _Made(lambda arrays: arrays[var], is_still=False)
        if not axes.any and not self._is_function:
            self._read[var] = None
            return _Made(lambda arrays: arrays[var], is_still=True)
        equation = self.producers.get(var)
        if equation is None:
            raise Unpullable("positions that are arguments")
        if not axes.any and len(equation.outvars) == 1:
            return (yield self._bound(equation, [axes] * len(equation.invars)))
        name, operands, params = equation.primitive.name, equation.invars, equation.params
        shape = aval_of(var).shape
        if name in _SAME or (name == "optimization_barrier" and len(operands) == 1):
            return (yield self._value(operands[0], axes))
        if name in ELEMENTWISE or name == "convert_element_type":
            return (yield self._elementwise(equation, axes))
        match name:
            case "iota":
                return self._iota(equation, axes)
            case "broadcast_in_dim":
                places = {axis: i for i, axis in enumerate(params["broadcast_dimensions"])}
                given = aval_of(operands[0]).shape

                def found(axis: int) -> int | None:
                    place = places.get(axis)
                    return place if place is not None and given[place] == shape[axis] else None

                inner, order = axes.through(found), params["broadcast_dimensions"]
                return (yield self._moved(equation, inner, lambda x, wide: lax.broadcast_in_dim(x, wide, order), axes))
            case "transpose":
                inner, order = axes.through(lambda axis: params["permutation"][axis]), params["permutation"]
                return (yield self._moved(equation, inner, lambda x, wide: lax.transpose(x, order), axes))
            case "reshape" | "squeeze" | "expand_dims":
                inner = axes.through(lambda axis: _same_axis(aval_of(operands[0]).shape, shape, axis))
                return (yield self._moved(equation, inner, lambda x, wide: lax.reshape(x, wide), axes))
            case "gather":
                numbers = params["dimension_numbers"]
                if any(axis in numbers.offset_dims for axis in (axes.rows, axes.columns)):
                    raise Unpullable("`gather` from an array with positions")
                order = [axis for axis in range(len(shape)) if axis not in numbers.offset_dims]
                inner = axes.through(order.index)
                if {inner.rows, inner.columns} & set(numbers.start_indices_batching_dims):
                    raise Unpullable("`gather` from a table of each position")
                return (yield self._bound(equation, [_Axes(None, None), inner]))
            case "dot_general":
                return (yield self._bound(equation, _factors(equation, axes)))
            case "concatenate":
                if params["dimension"] in (axes.rows, axes.columns):
                    raise Unpullable("`concatenate` of positions")
                return (yield self._bound(equation, [axes] * len(operands)))
            case "slice":
                return (yield self._sliced(equation, axes))
            case "stack":
                at = params["axis"] % len(shape)
                if at in (axes.rows, axes.columns):
                    raise Unpullable("`stack` of positions")
                return (yield self._bound(equation, [axes.through(lambda axis: axis - (axis > at))] * len(operands)))
            case "tile":
                if any(params["reps"][axis] != 1 for axis in (axes.rows, axes.columns) if axis is not None):
                    raise Unpullable("`tile` of positions")
                return (yield self._bound(equation, [axes]))
        if name in _REDUCTIONS:
            kept = [axis for axis in range(len(aval_of(operands[0]).shape)) if axis not in params["axes"]]
            return (yield self._bound(equation, [axes.through(lambda axis: kept[axis])]))
        if body_of(equation) is not None and len(equation.outvars) == 1:
            return (yield self._call(equation, axes))
        raise Unpullable(f"`{name}` of positions")

    def _sliced(self, equation: core.JaxprEqn, axes: _Axes) -> Steps[_Made | _Line]:
        params, given, shape = equation.params, aval_of(equation.invars[0]).shape, aval_of(equation.outvars[0]).shape
        own = (axes.rows, axes.columns)
        if any(axis is not None and given[axis] != shape[axis] for axis in own):
            raise Unpullable("`slice` of positions")

        def move(x: Any, wide: tuple[int, ...]) -> Any:
            limits = [wide[axis] if axis in own else limit for axis, limit in enumerate(params["limit_indices"])]
            return lax.slice(x, params["start_indices"], limits, params["strides"])

        return (yield self._moved(equation, axes, move, axes))

    def _iota(self, equation: core.JaxprEqn, axes: _Axes) -> _Made | _Line:
        at, dtype = equation.params["dimension"], equation.params["dtype"]
        if at in (axes.rows, axes.columns):
            if not _is_exact(dtype, equation.params["shape"][at]):
                raise Unpullable(f"positions of {dtype}")
            return _Line(1, 0, 0) if at == axes.rows else _Line(0, 1, 0)
        shape = self._shape(equation.outvars[0], axes)
        return _Made(lambda arrays: lax.broadcasted_iota(dtype, shape, at), is_still=True)

    def _each(self, pairs: Iterable[tuple[Any, _Axes]]) -> Steps[list[_Made]]:
        """Return several values on distances."""
        made = []
        for operand, axes in pairs:
            made.append((yield self._made(operand, axes)))
        return made

    def _elementwise(self, equation: core.JaxprEqn, axes: _Axes) -> Steps[_Made | _Line]:
        shape, operands = aval_of(equation.outvars[0]).shape, equation.invars

        def own(operand: Any) -> _Axes:
            given = aval_of(operand).shape
            return axes.through(lambda axis: axis if given and given[axis] == shape[axis] else None)

        values: list[_Made | _Line] = []
        for operand in operands:
            values.append((yield self._value(operand, own(operand))))
        line = _line_of(equation, values)
        if line is not None and self._is_within(line):
            return line if line.rest is None else replace(line, rest=_of_rank(line.rest, len(shape)))
        made = yield self._each((x, own(x)) for x in operands)
        primitive, params = equation.primitive, equation.params
        return _Made(
            lambda arrays: _applied(primitive, [x.compute(arrays) for x in made], params),
            is_still=all(x.is_still for x in made),
        )

    def _is_within(self, line: _Line) -> bool:
        """Return whether all numbers of a line are exact in float32, so none overflows either."""
        most = abs(line.rows) * self._rows + abs(line.columns) * self._keys + abs(line.offset)
        return most < _EXACT

    def _moved(
        self, equation: core.JaxprEqn, inner: _Axes, move: Callable[[Any, tuple[int, ...]], Any], axes: _Axes
    ) -> Steps[_Made | _Line]:
        """Return the result of an equation that moves elements.

        Args:
            equation: the equation.
            inner: the axes of its operand.
            move: a function from the operand on distances and the wanted shape to the result.
            axes: the axes of its result.
        """
        operand, shape = equation.invars[0], self._shape(equation.outvars[0], axes)
        value = yield self._value(operand, inner)
        given = () if isinstance(operand, core.Literal) else self._shape(operand, inner)

        def moved(made: _Made) -> _Made:
            def compute(arrays: _Arrays) -> Any:
                array = jnp.asarray(made.compute(arrays))
                return move(lax.broadcast_in_dim(array, given, range(len(given))), shape)

            return replace(made, compute=compute)

        if isinstance(value, _Made):
            return moved(value)
        return value if value.rest is None else replace(value, rest=moved(value.rest))

    def _call(self, equation: core.JaxprEqn, axes: _Axes) -> Steps[_Made]:
        """Return the result of a function with a custom derivative, which is kept."""
        calls = calls_of(equation, has_slope=not self._is_function)
        value, found = self._function(calls.value, [axes])
        slope = None
        if calls.slope is not None:
            wanted = [axes] if calls.mode == "jvp" else [found[place] or axes for place in calls.places]
            slope, seen = self._function(calls.slope, wanted)
            places = [*range(len(found)), *(calls.places if calls.mode == "jvp" else ())]
            pairs = list(zip(places, seen, strict=False))
            found = [own or next((x for i, x in pairs if i == place and x), None) for place, own in enumerate(found)]
            last = [(axes, seen[-1])] if calls.mode == "vjp" else []
            if any(x not in (None, y) for y, x in [*((found[i], x) for i, x in pairs), *last]):
                raise Unpullable("a function that moves positions")
        operands = []
        for x, own in zip(equation.invars, found, strict=True):
            made = None if own is None else (yield self._made(x, own))
            operands.append((made, () if own is None else self._shape(x, own), aval_of(x).dtype))
        function = with_derivative(lambda *given: value(*given)[0], slope, calls.places, calls.mode)

        def compute(arrays: _Arrays) -> Any:
            given = [
                jnp.zeros(shape, dtype)
                if made is None
                else lax.broadcast_in_dim(jnp.asarray(made.compute(arrays)), shape, range(len(shape)))
                for made, shape, dtype in operands
            ]
            return function(*on_common_axes(*given))

        return _Made(compute, is_still=False)

    def _function(
        self, closed: core.ClosedJaxpr, axes: Sequence[_Axes]
    ) -> tuple[Callable[..., list[Any]], list[_Axes | None]]:
        """Return a function on distances, and the axes of its arguments; None for unused arguments.

        Args:
            closed: the program of the function.
            axes: the axes of its results.
        """
        if closed.consts:
            raise Unpullable("a function of arrays of numbers")
        producers = {var: equation for equation in closed.jaxpr.eqns for var in equation.outvars}
        inner = Distances(producers, self._sizes, closed.jaxpr.invars)
        pairs = list(zip(closed.jaxpr.outvars, axes, strict=True))
        made = [(finished(inner._made(x, own)), inner._shape(x, own)) for x, own in pairs]

        def compute(*given: Any) -> list[Any]:
            arrays = dict(zip(closed.jaxpr.invars, given, strict=True))
            found = [(jnp.asarray(x.compute(arrays)), shape) for x, shape in made]
            return [lax.broadcast_in_dim(x, shape, range(len(shape))) for x, shape in found]

        return compute, list(inner._inputs.values())

    def _bound(self, equation: core.JaxprEqn, inner: Iterable[_Axes]) -> Steps[_Made]:
        """Return the result of an equation that is applied unchanged, to operands broadcast to their full shapes."""
        pairs = list(zip(equation.invars, inner, strict=True))
        made = yield self._each(pairs)
        shapes = [self._shape(x, axes) for x, axes in pairs]

        def compute(arrays: _Arrays) -> Any:
            given = [jnp.asarray(x.compute(arrays)) for x in made]
            given = [lax.broadcast_in_dim(x, shape, range(len(shape))) for x, shape in zip(given, shapes, strict=True)]
            return equation.primitive.bind(
                *on_common_axes(*given), **equation.primitive.get_bind_params(equation.params)
            )

        return _Made(compute, is_still=all(x.is_still for x in made))


def _once(compute: Callable[[_Arrays], Any]) -> Callable[[_Arrays], Any]:
    """Memoise a function for each set of arrays."""

    def remembered(arrays: _Arrays) -> Any:
        if remembered not in arrays:
            arrays[remembered] = compute(arrays)
        return arrays[remembered]

    return remembered


def _applied(primitive: core.Primitive, given: Iterable[Any], params: Mapping[str, Any]) -> Any:
    """Apply an elementwise operation to arrays that are broadcast against each other."""
    arrays = [jnp.asarray(x) for x in given]
    shape = np.broadcast_shapes(*(x.shape for x in arrays))
    rank = len(shape)
    arrays = [lax.broadcast_in_dim(x, shape, range(rank - x.ndim, rank)) for x in arrays]
    if primitive is lax.add_p:
        return lax.add(*on_common_axes(*arrays))
    return primitive.bind(*on_common_axes(*arrays), **primitive.get_bind_params(dict(params)))


def _line_of(equation: core.JaxprEqn, values: list[_Made | _Line]) -> _Line | None:
    """Return the line that an operation gives, or None if its result is not a line."""
    dtype = aval_of(equation.outvars[0]).dtype
    if not any(isinstance(x, _Line) for x in values) or not _is_exact(dtype, 1):
        return None
    is_integer = bool(jnp.issubdtype(dtype, jnp.integer))
    match equation.primitive.name, values:
        case "convert_element_type", [_Line(rest=rest) as line] if rest is None or is_integer:
            if rest is None:
                return line
            return replace(line, rest=_unary(equation, rest))
        case "neg", [_Line() as line]:
            rest = None if line.rest is None else _unary(equation, line.rest)
            return _Line(-line.rows, -line.columns, -line.offset, rest)
        case ("add" | "sub") as name, [left, right]:
            sign = 1 if name == "add" else -1
            pair = [_as_line(x) for x in (left, right)]
            one, other = pair
            if one is None or other is None:
                return None
            rest = one.rest
            if other.rest is not None:
                if not is_integer:
                    return None
                rest = _joined(lax.add_p if sign == 1 else lax.sub_p, one.rest, other.rest)
            if rest is not None and not is_integer:
                return None
            return _Line(
                one.rows + sign * other.rows, one.columns + sign * other.columns, one.offset + sign * other.offset, rest
            )
        case "mul", [left, right]:
            for one, other in ((left, right), (right, left)):
                by = _whole(other)
                if isinstance(one, _Line) and by is not None and one.rest is None:
                    return _Line(one.rows * by, one.columns * by, one.offset * by)
    return None


def _of_rank(made: _Made, rank: int) -> _Made:
    """Give a scalar axes of size 1; other values have the rank already."""

    def compute(arrays: _Arrays) -> Any:
        array = jnp.asarray(made.compute(arrays))
        return array if array.ndim == rank else lax.broadcast_in_dim(array, (1,) * rank, ())

    return replace(made, compute=compute)


def _as_line(value: _Made | _Line) -> _Line | None:
    if isinstance(value, _Line):
        return value
    number = _whole(value)
    if number is not None:
        return _Line(0, 0, number)
    return _Line(0, 0, 0, value) if value.is_still else None


def _whole(value: _Made | _Line) -> int | None:
    """Return the integer that all elements of a value equal, or None."""
    if isinstance(value, _Line) or value.number is None or np.size(value.number) != 1:
        return None
    number = float(np.asarray(value.number).astype(np.float64).reshape(()))
    return int(number) if number.is_integer() and abs(number) < _EXACT else None


def _unary(equation: core.JaxprEqn, made: _Made) -> _Made:
    return _Made(
        lambda arrays: _applied(equation.primitive, [made.compute(arrays)], equation.params), is_still=made.is_still
    )


def _joined(primitive: core.Primitive, left: _Made | None, right: _Made) -> _Made:
    if left is None:
        if primitive is lax.add_p:
            return right
        return _Made(lambda arrays: lax.neg(right.compute(arrays)), is_still=True)
    return _Made(lambda arrays: _applied(primitive, [left.compute(arrays), right.compute(arrays)], {}), is_still=True)


def _is_exact(dtype: Any, count: int) -> bool:
    """Return whether a dtype represents this many positions, and their differences, exactly."""
    name = np.dtype(dtype).name
    return count < _EXACT and name in ("int32", "int64", "float32", "float64")


def _same_axis(given: tuple[int, ...], shape: tuple[int, ...], axis: int) -> int:
    """Return the axis of a reshape's operand that equals an axis of its result.

    Raises:
        Unpullable: there is no such axis.
    """
    before = int(np.prod(shape[:axis]))
    for place, size in enumerate(given):
        if size == shape[axis] and int(np.prod(given[:place])) == before:
            return place
    raise Unpullable("`reshape` of positions")


def _factors(equation: core.JaxprEqn, axes: _Axes) -> list[_Axes]:
    """Return the axes of queries and keys of a product's operands."""
    (contracted, shared) = equation.params["dimension_numbers"]
    places: list[dict[int, int]] = [{}, {}]
    for at, pair in enumerate(zip(*shared, strict=True)):
        for side in (0, 1):
            places[side][at] = pair[side]
    count = len(shared[0])
    for side in (0, 1):
        for axis in range(len(aval_of(equation.invars[side]).shape)):
            if axis not in contracted[side] and axis not in shared[side]:
                places[side][count] = axis
                count += 1
    return [axes.through(own.get) for own in places]
