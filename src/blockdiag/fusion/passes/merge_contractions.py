"""Rewrite products that contract several axes of weights, such as pixels, with one axis of keys and one of queries."""

import functools
import math
from collections.abc import Callable
from typing import Any

from jax import lax
from jax.extend import core

from blockdiag.fusion.frontend.trace import aval_of, rewritten
from blockdiag.fusion.ir.tree import COLUMNS, ROWS, Dim
from blockdiag.fusion.regions.match import attention_count, is_attention
from blockdiag.fusion.regions.weight_terms import Matcher


def with_merged_keys(closed: core.ClosedJaxpr) -> core.ClosedJaxpr | None:
    """Return the flat program with one axis of keys in products with values, or None if that helps no product."""
    found = [x for x in closed.jaxpr.eqns if x.primitive.name == "dot_general" and _sums_axes(x)]
    found = [x for x in found if not is_attention(closed.jaxpr, x)]
    # Most products that contract several axes are linear layers. This check rejects them early.
    sides = {id(x): [side for side in (0, 1) if _may_be_weights(closed.jaxpr, x, side)] for x in found}
    found = [x for x in found if sides[id(x)]]
    replaced: dict[int, Callable[[Callable[[Any], Any]], dict[core.Var, Any]]] = {}
    count = attention_count(closed.jaxpr) if found else 0
    for equation in found:
        for side in sides[id(equation)]:
            trial = {**replaced, id(equation): functools.partial(_merged, equation, side)}
            after = attention_count(rewritten(closed, closed.jaxpr.eqns, trial).jaxpr)
            if after > count:
                replaced, count = trial, after
                break
    return rewritten(closed, closed.jaxpr.eqns, replaced) if replaced else None


class WeightsMatcher(Matcher):
    """A matcher of one product, one operand of which may be weights.

    Attributes:
        keys: the contracted axes.
        key_labels: the labels of the contracted axes.
        dims: a label for each axis. The axis of queries is the longest one that is neither contracted nor batched.
    """

    def __init__(self, jaxpr: core.Jaxpr, product: core.JaxprEqn, side: int) -> None:
        contracted, shared = product.params["dimension_numbers"]
        self.jaxpr, self.product, self.side = jaxpr, product, side
        shape = aval_of(product.invars[side]).shape
        free = [axis for axis in range(len(shape)) if axis not in (*contracted[side], *shared[side])]
        self.keys = contracted[side]
        labels = {axis: f"{'b' if axis in shared[side] else 'g'}{axis}" for axis in range(len(shape))}
        labels |= {axis: ROWS for axis in sorted(free, key=lambda axis: shape[axis])[-1:]}
        key_sizes = [shape[axis] for axis in self.keys]
        sizes = {labels[axis]: size for axis, size in enumerate(shape) if axis not in self.keys}
        batch = [x for x in sizes if x != ROWS]
        super().__init__(jaxpr, sizes | {COLUMNS: math.prod(key_sizes)}, batch)
        # A single axis needs no split of the key label into parts.
        parts = self.puller.grids.divided(COLUMNS, key_sizes) if len(self.keys) > 1 else (COLUMNS,)
        self.key_labels = parts[: len(self.keys)]
        labels |= dict(zip(self.keys, self.key_labels, strict=True))
        self.dims: tuple[Dim, ...] = tuple((labels[axis],) for axis in range(len(shape)))


def _may_be_weights(jaxpr: core.Jaxpr, product: core.JaxprEqn, side: int) -> bool:
    matcher, weights = WeightsMatcher(jaxpr, product, side), product.invars[side]
    return matcher.may_be_weights(weights, matcher.dims)


def _sums_axes(product: core.JaxprEqn) -> bool:
    (contracted, _) = product.params["dimension_numbers"]
    return len(contracted[0]) > 1


def _merged(product: core.JaxprEqn, side: int, value_of: Callable[[Any], Any]) -> dict[core.Var, Any]:
    """Return the product with its axes of keys merged into one, and as many axes of queries merged into one.

    Args:
        side: the operand that has the weights.
    """
    contracted, shared = product.params["dimension_numbers"]
    weights, value = (value_of(product.invars[x]) for x in (side, 1 - side))
    keys, batch = ((axes[side], axes[1 - side]) for axes in (contracted, shared))
    rows = [axis for axis in range(weights.ndim) if axis not in (*keys[0], *batch[0])]
    columns = [axis for axis in range(value.ndim) if axis not in (*keys[1], *batch[1])]
    sizes = [weights.shape[axis] for axis in (*batch[0], *rows)]
    # Queries are taken to have as many axes as keys. Axes before them are groups.
    count = len(sizes) - (len(keys[0]) if len(rows) >= len(keys[0]) else 0)
    whole = [*sizes[:count], *([math.prod(sizes[count:])] if count < len(sizes) else [])]
    keys_whole = math.prod(weights.shape[axis] for axis in keys[0])
    weights = lax.reshape(lax.transpose(weights, [*batch[0], *rows, *keys[0]]), [*whole, keys_whole])
    value = lax.transpose(value, [*batch[1], *keys[1], *columns])
    value = lax.reshape(value, [*value.shape[: len(batch[1])], keys_whole, *value.shape[value.ndim - len(columns) :]])
    first = list(range(len(batch[0])))
    numbers = (([len(whole)], [len(first)]), (first, first))
    kept = {x: product.params[x] for x in ("precision", "preferred_element_type")}
    out = lax.dot_general(weights, value, numbers, **kept)
    out = lax.reshape(out, [*sizes, *out.shape[len(whole) :]])
    if side == 1:
        middle = list(range(len(first), len(sizes)))
        out = lax.transpose(out, [*first, *range(len(sizes), out.ndim), *middle])
    return {product.outvars[0]: out}
