"""Merge products with the same weights into one product of the concatenated values, whose result is sliced.

Scores, their softmax and their gradients are then computed once, by one forward kernel and one set of backward kernels.
The merged product is an ordinary one to the stages that follow: region matching, batching and differentiation.
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

# Kernels hold at most this many columns of values.
_MOST_COLUMNS = 256
# Alignment, in bytes, at which kernels read rows of values fastest.
_ALIGNMENT = 16
# Regions ignore casts between floating dtypes. `stop_gradient` is not among these, as it changes the derivative.
_CASTS = ("convert_element_type", "copy", "pvary", "reduce_precision")


@dataclass(frozen=True)
class _Product:
    """A product of weights and values.

    Attributes:
        equation: the product.
        side: the operand that has the weights.
        axes: for each axis of that operand, the axis of the array below its casts and transpositions.
    """

    equation: core.JaxprEqn
    side: int
    axes: tuple[int, ...]

    @property
    def weights(self) -> Any:
        """Return the operand with the weights."""
        return self.equation.invars[self.side]

    @property
    def value(self) -> Any:
        """Return the operand with the values."""
        return self.equation.invars[1 - self.side]

    @property
    def keys(self) -> tuple[int, int]:
        """Return the contracted axis of the weights' array and that of the values."""
        contracted, _ = self.equation.params["dimension_numbers"]
        return self.axes[contracted[self.side][0]], contracted[1 - self.side][0]

    @property
    def batch(self) -> list[tuple[int, int]]:
        """Return the batch axes in the result's order, each as an axis of the weights' array and one of the values."""
        _, shared = self.equation.params["dimension_numbers"]
        return [(self.axes[x], y) for x, y in zip(shared[self.side], shared[1 - self.side], strict=True)]

    @property
    def rows(self) -> list[int]:
        """Return the axes of the weights' array that the values lack, in the result's order."""
        taken = {self.keys[0], *(x for x, _ in self.batch)}
        return [axis for axis in self.axes if axis not in taken]

    @property
    def columns(self) -> list[int]:
        """Return the axes of the values that the weights lack."""
        taken = {self.keys[1], *(y for _, y in self.batch)}
        return [axis for axis in range(len(aval_of(self.value).shape)) if axis not in taken]

    @property
    def column_sizes(self) -> list[int]:
        """Return the sizes of the columns' axes."""
        return [aval_of(self.value).shape[axis] for axis in self.columns]

    @property
    def width(self) -> int:
        """Return the number of columns of the values."""
        return math.prod(self.column_sizes)

    @property
    def value_axes(self) -> dict[int, int]:
        """Map the contracted and batch axes of the weights' array to axes of the values."""
        return {self.keys[0]: self.keys[1], **dict(self.batch)}


def joined(closed: core.ClosedJaxpr, sides: Mapping[int, int]) -> core.ClosedJaxpr | None:
    """Return the flat program with products of the same weights merged, or None if there are none.

    Products stay separate if their values have different dtypes or batch axes, if the values of one are computed from
    the result of another, or if the merged values would have more columns than kernels hold.

    Args:
        sides: for each product that is a region already, by the `id` of the equation, the side of its weights.
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
    """Group the live products by weights, axes and dtype of the values, in the program's order."""
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
    """Return the live equations: those that results are computed from."""
    wanted = {x for x in jaxpr.outvars if isinstance(x, core.Var)}
    found = []
    for equation in reversed(jaxpr.eqns):
        if any(var in wanted for var in equation.outvars):
            wanted |= {x for x in equation.invars if isinstance(x, core.Var)}
            found.append(equation)
    return found[::-1]


def _is_sharded(*operands: Any) -> bool:
    """Return whether any operand is sharded over explicit mesh axes, which rules out merging array axes."""
    return any(axes is not None for x in operands for axes in aval_of(x).sharding.spec)


def _root(var: Any, producers: Mapping[core.Var, core.JaxprEqn]) -> tuple[core.Var, tuple[int, ...]]:
    """Return the array below a value's casts and transpositions, and its axis for each axis of the value."""
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
    """Number the variables so that structurally equal computations have equal numbers (value numbering)."""
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
            # Parameters that cannot be hashed are equal to no others.
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
    """Return the first product with all that can be merged with it, and the rest."""
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
    """Return the `id` of every equation that depends on the results of some products.

    Args:
        equations: the equations from the first of the products to the last one.
        groups: the products that are merged already; each group is contiguous in the program.
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
    """The equations of a program, reordered so that merged products are contiguous.

    Attributes:
        equations: the equations in topological order.
    """

    def __init__(self, equations: Sequence[core.JaxprEqn]) -> None:
        self.equations = list(equations)
        self._places = {id(x): place for place, x in enumerate(equations)}

    def between(self, products: Sequence[_Product]) -> slice:
        """Return the slice from the first of some products to the last one, which lie within one layer of a model."""
        places = [self._places[id(x.equation)] for x in products]
        return slice(min(places), max(places) + 1)

    def bring_together(self, group: Sequence[_Product], groups: Sequence[Sequence[_Product]]) -> None:
        """Make a group's equations contiguous. Equations in between move behind the group only if they depend on it."""
        where = self.between(group)
        between = self.equations[where]
        members = {id(x.equation) for x in group}
        after = _computed_from(group, between, groups)
        before = [x for x in between if id(x) not in after and id(x) not in members]
        ordered = [*before, *(x.equation for x in group), *(x for x in between if id(x) in after)]
        self.equations[where] = ordered
        self._places |= {id(x): where.start + i for i, x in enumerate(ordered)}


def _replacement(group: Sequence[_Product]) -> Callable[..., dict[core.Var, Any]]:
    """Return a function that computes the results of a group."""

    def compute(value_of: Callable[[Any], Any]) -> dict[core.Var, Any]:
        results = _one_product(group, value_of(group[0].weights), [value_of(x.value) for x in group])
        return {x.equation.outvars[0]: y for x, y in zip(group, results, strict=True)}

    return compute


def _one_product(group: Sequence[_Product], weights: Any, values: Sequence[Any]) -> list[Any]:
    """Return the result of each product, computed by one merged product."""
    lead = group[0]
    # All values take the layout of the first ones. The result has it as well, with queries in place of keys.
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
    """Yield each product's values as [`order`.., columns], and zeros that pad the columns to the alignment."""
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
    """Return the result of one product from its columns of the merged one.

    Args:
        part: [`order`.., columns].
    """
    part = lax.reshape(part, (*part.shape[:-1], *product.column_sizes))
    batch = [order.index(axis) for axis, _ in product.batch]
    rows = [order.index(axis) for axis in product.rows]
    columns = [len(order) + i for i in range(len(product.columns))]
    part = lax.transpose(part, batch + (rows + columns if product.side == 0 else columns + rows))
    return lax.convert_element_type(part, aval_of(product.equation.outvars[0]).dtype)
