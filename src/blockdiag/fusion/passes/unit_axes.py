"""Restore batch axes of size 1, which `jnp.matmul` squeezes before its products and restores afterwards."""

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
    """An operand with some of its axes of size 1 squeezed.

    Attributes:
        whole: the operand with all axes.
        removed: the squeezed axes.
    """

    whole: Any
    removed: frozenset[int]

    def with_axes(self, axes: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the positions of some squeezed axes after they are restored, and those of the operand's other axes."""
        kept = [axis for axis in range(len(aval_of(self.whole).shape)) if axis not in self.removed]
        left = sorted([*kept, *axes])
        return [left.index(axis) for axis in axes], [left.index(axis) for axis in kept]


def with_batch(equation: core.JaxprEqn, producer: _Producer) -> Callable[[Callable[[Any], Any]], Any] | None:
    """Return a function that computes a `broadcast_in_dim` of a product as a product with the squeezed batch axes.

    Args:
        producer: returns the equation that computes a value, or None.

    Returns:
        None if the equation does not restore the axes that both operands of a product had.
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
    # The new product has the restored batch axes first, then the axes of the old product.
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
