"""Products with the same weights become one product: of the values side by side, whose result is taken apart.

Scores, their softmax and their gradients are then computed once, by one kernel forward and one set of kernels backward.
The program is written anew: what finds regions, maps and differentiates them sees one product like any other.
"""

import collections
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import lax
from jax.extend import core

from blockdiag.fusion.frontend.trace import aval_of, rewritten
from blockdiag.fusion.regions.axis_labels import producers_of

# What kernels have room for.
_MOST_COLUMNS = 256
# Bytes that start rows of values where kernels read them fastest.
_ALIGNMENT = 16
# Casts between floating dtypes are dropped in regions; `stop_gradient` is none of these.
_CASTS = ("convert_element_type", "copy", "pvary", "reduce_precision")


@dataclass(frozen=True)
class _Product:
    """A product of weights and values.

    Attributes:
        equation: the product.
        side: the operand that has the weights.
        axes: of the array that the weights are, but for casts and transpositions, in the order of the operand.
    """

    equation: core.JaxprEqn
    side: int
    axes: tuple[int, ...]

    @property
    def weights(self) -> Any:
        """The operand with the weights."""
        return self.equation.invars[self.side]

    @property
    def value(self) -> Any:
        """The other one."""
        return self.equation.invars[1 - self.side]

    @property
    def keys(self) -> tuple[int, int]:
        """The axis that is summed: of the weights' array, and of the values."""
        contracted, _ = self.equation.params["dimension_numbers"]
        return self.axes[contracted[self.side][0]], contracted[1 - self.side][0]

    @property
    def batch(self) -> list[tuple[int, int]]:
        """The axes that both have, in the order of the result: of the weights' array, and of the values."""
        _, shared = self.equation.params["dimension_numbers"]
        return [(self.axes[x], y) for x, y in zip(shared[self.side], shared[1 - self.side], strict=True)]

    @property
    def rows(self) -> list[int]:
        """The axes of the weights' array that the values have not, in the order of the result."""
        taken = {self.keys[0], *(x for x, _ in self.batch)}
        return [axis for axis in self.axes if axis not in taken]

    @property
    def columns(self) -> list[int]:
        """The axes of the values that the weights have not."""
        taken = {self.keys[1], *(y for _, y in self.batch)}
        return [axis for axis in range(len(aval_of(self.value).shape)) if axis not in taken]

    @property
    def column_sizes(self) -> list[int]:
        """Of these."""
        return [aval_of(self.value).shape[axis] for axis in self.columns]

    @property
    def width(self) -> int:
        """How many columns the values have."""
        return math.prod(self.column_sizes)

    @property
    def value_axes(self) -> dict[int, int]:
        """The axis of the values for each axis of the weights' array that they have too."""
        return {self.keys[0]: self.keys[1], **dict(self.batch)}


def joined(closed: core.ClosedJaxpr, sides: Mapping[int, int]) -> core.ClosedJaxpr | None:
    """The same flat program with products of the same weights made one; None where there are none.

    Products are left apart where the values have different dtypes or batch axes, where one's values are computed from
    another's result, and where the values would have more columns than kernels have room for.

    Args:
        sides: of the products that are regions as they stand, the side of the weights, by the `id` of the equation.
    """
    order, groups = _Order(closed.jaxpr.eqns), []
    for waiting in _same_weights(closed.jaxpr, sides):
        while len(waiting) > 1:
            group, waiting = _first_group(waiting, order, groups)
            if len(group) > 1:
                order.bring_together(group, groups)
                groups.append(group)
    replaced = {id(group[0].equation): _replacement(group) for group in groups}
    others = {id(x.equation) for group in groups for x in group[1:]}
    return rewritten(closed, [x for x in order.equations if id(x) not in others], replaced) if groups else None


def _same_weights(jaxpr: core.Jaxpr, sides: Mapping[int, int]) -> list[list[_Product]]:
    """Products that are needed and have the same weights, along the same axes, in the program's order."""
    if len(sides) < 2:
        return []
    producers, numbers = producers_of(jaxpr), _numbers(jaxpr)
    found: dict[Any, list[_Product]] = collections.defaultdict(list)
    for equation in _needed(jaxpr):
        side = sides.get(id(equation))
        if side is None or _is_sharded(*equation.invars):
            continue
        root, axes = _root(equation.invars[side], producers)
        product = _Product(equation, side, axes)
        batch = frozenset(x for x, _ in product.batch)
        found[numbers[root], product.keys[0], batch, aval_of(product.value).dtype].append(product)
    return list(found.values())


def _needed(jaxpr: core.Jaxpr) -> list[core.JaxprEqn]:
    """The equations that results are computed from."""
    wanted = {x for x in jaxpr.outvars if isinstance(x, core.Var)}
    found = []
    for equation in reversed(jaxpr.eqns):
        if any(var in wanted for var in equation.outvars):
            wanted |= {x for x in equation.invars if isinstance(x, core.Var)}
            found.append(equation)
    return found[::-1]


def _is_sharded(*operands: Any) -> bool:
    """Whether any is sharded over explicit axes of a mesh, for which axes cannot be made one."""
    return any(axes is not None for x in operands for axes in aval_of(x).sharding.spec)


def _root(var: Any, producers: Mapping[core.Var, core.JaxprEqn]) -> tuple[core.Var, tuple[int, ...]]:
    """What a value is but for casts and transpositions, and the axis of it that each of the value's axes is."""
    axes = tuple(range(len(aval_of(var).shape)))
    while (equation := producers.get(var)) is not None:
        if equation.primitive.name == "transpose":
            axes = tuple(int(equation.params["permutation"][axis]) for axis in axes)
        elif equation.primitive.name not in _CASTS:
            break
        if isinstance(equation.invars[0], core.Literal):
            break
        var = equation.invars[0]
    return var, axes


def _numbers(jaxpr: core.Jaxpr) -> dict[core.Var, int]:
    """A number for each variable, the same one for those that are computed in the same way from the same."""
    known: dict[Any, int] = {}
    numbers = {var: len(jaxpr.constvars) + i for i, var in enumerate(jaxpr.invars)}
    numbers |= {var: i for i, var in enumerate(jaxpr.constvars)}
    count = len(numbers)
    for equation in jaxpr.eqns:
        operands = tuple(_literal(x) if isinstance(x, core.Literal) else numbers[x] for x in equation.invars)
        key: Any = (equation.primitive, operands, tuple(sorted(equation.params.items())))
        try:
            first = known.setdefault(key, count)
        except TypeError:
            # Parameters that cannot be compared are like no others.
            first = count
        if equation.effects:
            first = count
        numbers |= {var: first + i for i, var in enumerate(equation.outvars)}
        count += len(equation.outvars)
    return numbers


def _literal(operand: core.Literal) -> tuple[Any, ...]:
    array = np.asarray(operand.val)
    return ("literal", aval_of(operand).dtype.name, aval_of(operand).weak_type, array.shape, array.tobytes())


def _first_group(
    products: Sequence[_Product], order: "_Order", groups: Sequence[Sequence[_Product]]
) -> tuple[list[_Product], list[_Product]]:
    """The first product with those that can join it, and the rest."""
    group, rest = [products[0]], []
    for product in products[1:]:
        together = [*group, product]
        after = _computed_from(together, order.equations[order.between(together)], groups)
        is_free = not any(id(x.equation) in after for x in together)
        if is_free and sum(x.width for x in together) <= _MOST_COLUMNS:
            group = together
        else:
            rest.append(product)
    return group, rest


def _computed_from(
    products: Sequence[_Product], equations: Sequence[core.JaxprEqn], groups: Sequence[Sequence[_Product]]
) -> set[int]:
    """By their `id`, the equations that are computed from the results of some products.

    Args:
        equations: from the first of the products to the last one.
        groups: of products that are one already, and stand side by side.
    """
    whole = {id(x.equation): [y.equation for y in group] for group in groups for x in group}
    tainted = {x.equation.outvars[0] for x in products}
    found: set[int] = set()
    for equation in equations:
        together = whole.get(id(equation), [equation])
        if any(isinstance(x, core.Var) and x in tainted for one in together for x in one.invars):
            found |= {id(one) for one in together}
            tainted |= {var for one in together for var in one.outvars}
    return found


class _Order:
    """The equations of a program, some of which are brought together.

    Attributes:
        equations: in an order in which each has what it needs.
    """

    def __init__(self, equations: Sequence[core.JaxprEqn]) -> None:
        self.equations = list(equations)
        self._places = {id(x): place for place, x in enumerate(equations)}

    def between(self, products: Sequence[_Product]) -> slice:
        """From the first of some products to the last one: a model has many layers, and these are in one of them."""
        places = [self._places[id(x.equation)] for x in products]
        return slice(min(places), max(places) + 1)

    def bring_together(self, group: Sequence[_Product], groups: Sequence[Sequence[_Product]]) -> None:
        """Put the equations of a group side by side: before them all between that is not computed from them."""
        where = self.between(group)
        between = self.equations[where]
        members = {id(x.equation) for x in group}
        after = _computed_from(group, between, groups)
        before = [x for x in between if id(x) not in after and id(x) not in members]
        ordered = [*before, *(x.equation for x in group), *(x for x in between if id(x) in after)]
        self.equations[where] = ordered
        self._places |= {id(x): where.start + i for i, x in enumerate(ordered)}


def _replacement(group: Sequence[_Product]) -> Callable[..., dict[core.Var, Any]]:
    """What computes the results of a group."""

    def compute(value_of: Callable[[Any], Any]) -> dict[core.Var, Any]:
        results = _one_product(group, value_of(group[0].weights), [value_of(x.value) for x in group])
        return {x.equation.outvars[0]: y for x, y in zip(group, results, strict=True)}

    return compute


def _one_product(group: Sequence[_Product], weights: Any, values: Sequence[Any]) -> list[Any]:
    """The result of each product, by one."""
    lead = group[0]
    # Values lie as the first ones do, and so does the result: with queries where these have keys.
    order = sorted(lead.value_axes, key=lambda axis: lead.value_axes[axis])
    wide = lax.concatenate(list(_side_by_side(group, values, order)), len(order))
    dtypes = {aval_of(x.equation.outvars[0]).dtype for x in group}
    wider = np.float64 if np.dtype(np.float64) in dtypes else np.float32
    dtype = wider if len(dtypes) > 1 else dtypes.pop()
    batch = [axis for axis in order if axis != lead.keys[0]]
    place = {axis: i for i, axis in enumerate(lead.axes)}
    numbers = (
        ([place[lead.keys[0]]], [order.index(lead.keys[0])]),
        ([place[axis] for axis in batch], [order.index(axis) for axis in batch]),
    )
    params = lead.equation.params
    output = lax.dot_general(weights, wide, numbers, precision=params["precision"], preferred_element_type=dtype)
    axes = [*batch, *lead.rows]
    wanted = [x for axis in order for x in (lead.rows if axis == lead.keys[0] else [axis])]
    output = lax.transpose(output, [*(axes.index(axis) for axis in wanted), len(axes)])
    results, start = [], 0
    for product in group:
        part = lax.slice_in_dim(output, start, start + product.width, axis=len(axes))
        results.append(_taken_apart(product, part, wanted))
        start += product.width
    return results


def _side_by_side(group: Sequence[_Product], values: Sequence[Any], order: Sequence[int]) -> Iterator[Any]:
    """The values of each product, with the axes in `order` and one of columns; and zeros up to a whole line."""
    shape: tuple[int, ...] = ()
    for product, value in zip(group, values, strict=True):
        value = lax.transpose(value, [*(product.value_axes[axis] for axis in order), *product.columns])
        shape = value.shape[: len(order)]
        yield lax.reshape(value, (*shape, product.width))
    step = max(1, _ALIGNMENT // values[0].dtype.itemsize)
    missing = -sum(x.width for x in group) % step
    if missing:
        yield lax.full((*shape, missing), 0, values[0].dtype)


def _taken_apart(product: _Product, part: Any, order: Sequence[int]) -> Any:
    """The result of one product from its columns of the whole one.

    Args:
        part: [`order`.., columns].
    """
    part = lax.reshape(part, (*part.shape[:-1], *product.column_sizes))
    batch = [order.index(axis) for axis, _ in product.batch]
    rows = [order.index(axis) for axis in product.rows]
    columns = [len(order) + i for i in range(len(product.columns))]
    part = lax.transpose(part, batch + (rows + columns if product.side == 0 else columns + rows))
    return lax.convert_element_type(part, aval_of(product.equation.outvars[0]).dtype)
