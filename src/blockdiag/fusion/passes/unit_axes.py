"""Batch axes of one index, which `jnp.matmul` leaves out of its products and gives its results again."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import lax
from jax.extend import core

from blockdiag.fusion.frontend.trace import aval_of

type _Producer = Callable[[Any], core.JaxprEqn | None]


@dataclass(frozen=True)
class _Operand:
    """A factor without some of its axes of one index.

    Attributes:
        whole: with all of them.
        removed: which are not there.
    """

    whole: Any
    removed: frozenset[int]

    def with_axes(self, axes: Sequence[int]) -> tuple[list[int], list[int]]:
        """Where some of the removed axes are if only these are there, and where the axes of the factor are."""
        kept = [axis for axis in range(len(aval_of(self.whole).shape)) if axis not in self.removed]
        left = sorted([*kept, *axes])
        return [left.index(axis) for axis in axes], [left.index(axis) for axis in kept]


def with_batch(equation: core.JaxprEqn, producer: _Producer) -> Callable[[Callable[[Any], Any]], Any] | None:
    """What computes the result of a `broadcast_in_dim` by a product that has the axes which both factors had.

    None where it gives no product such axes.

    Args:
        producer: the equation that computes a value.
    """
    params, given = equation.params, aval_of(equation.invars[0]).shape
    old = params["broadcast_dimensions"]
    new = [axis for axis in range(len(params["shape"])) if axis not in old]
    product, order = producer(equation.invars[0]), tuple(range(len(given)))
    if product is not None and product.primitive.name == "transpose":
        product, order = producer(product.invars[0]), tuple(product.params["permutation"])
    if product is None or product.primitive.name != "dot_general" or product.params["out_sharding"] is not None:
        return None
    sides = [_squeezed(x, producer) for x in product.invars]
    if None in sides or [params["shape"][axis] for axis in old] != list(given):
        return None
    operands = [x for x in sides if x is not None]
    both = sorted(operands[0].removed & operands[1].removed)
    if not both or len(new) != len(both) or any(params["shape"][axis] != 1 for axis in new):
        return None
    (ones, places), (other_ones, other_places) = (x.with_axes(both) for x in operands)
    contracted, shared = product.params["dimension_numbers"]
    numbers = (
        ([places[i] for i in contracted[0]], [other_places[i] for i in contracted[1]]),
        ([*ones, *(places[i] for i in shared[0])], [*other_ones, *(other_places[i] for i in shared[1])]),
    )
    # The product has the axes of both first, and then its own.
    positions = [*new, *(old[order.index(i)] for i in range(len(order)))]

    def compute(value_of: Callable[[Any], Any]) -> Any:
        left, right = (lax.squeeze(value_of(x.whole), sorted(x.removed - set(both))) for x in operands)
        precision, dtype = product.params["precision"], product.params["preferred_element_type"]
        found = lax.dot_general(left, right, numbers, precision=precision, preferred_element_type=dtype)
        return lax.transpose(found, np.argsort(positions))

    return compute


def _squeezed(var: Any, producer: _Producer) -> _Operand | None:
    equation = producer(var)
    if equation is None or equation.primitive.name != "squeeze":
        return None
    return _Operand(equation.invars[0], frozenset(equation.params["dimensions"]))
