"""Rewrite contractions that are written in other ways into the dot products that attention is recognised by.

- A sum over keys of weights times values, both broadcast along new axes, becomes a product. AlphaFold's invariant
  point attention is written so. A sum over features of queries times keys becomes a product, too.
- A sum of weights over heads, or over other axes, moves behind the product with values. The sum may have a factor for
  each head, and for each query. Mixtures of softmaxes and interpretable heads are written so.
- A product that sums over no axis becomes a multiplication.
- Scores that are padded with constants by `pad` become a `concatenate` with further logits.
- Batch axes of size 1, which `jnp.matmul` squeezes before its products, are batch axes of the product
  (`unit_axes.py`).

Only candidates for weights or scores are rewritten: values that reach exponentials, or are computed from them, by
elementwise operations. A rewritten product that turns out not to be attention is computed in full precision, as the sum
would be.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from blockdiag.fusion.frontend.trace import aval_of, rewritten
from blockdiag.fusion.ir.tree import ELEMENTWISE, NotFusible, nodes_of
from blockdiag.fusion.passes.query_axis import with_query_axes
from blockdiag.fusion.passes.unit_axes import with_batch
from blockdiag.fusion.regions.axis_labels import MOVES, producers_of, users_of
from blockdiag.fusion.regions.guards import PASSES, POWERS
from blockdiag.fusion.regions.match import QueryWithoutAxis, attention_count, find_regions

type _Make = Callable[[Callable[[Any], Any]], dict[core.Var, Any]]

_WIDENS = ("reshape", "squeeze", "broadcast_in_dim")


def respelled(closed: core.ClosedJaxpr) -> core.ClosedJaxpr | None:
    """Return the flat program with these contractions as dot products, or None if no rewrite helps."""
    plain = _replaced(closed, _Plain)
    better = _replaced(plain, _Products)
    if better is not plain and _merit(better) > _merit(plain):
        return better
    return None if plain is closed else plain


def as_products(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """Return the flat program with every candidate as a dot product, whether that helps or not."""
    return _replaced(_replaced(closed, _Plain), _Products)


def _merit(closed: core.ClosedJaxpr) -> tuple[bool, int, int, int, int]:
    """Return a key that orders equivalent programs; the larger one is better.

    It consists of: whether there is attention, the negated number of arrays of queries by keys that regions read, the
    number of products, the negated number of sums over features, and the negated number of leaves.

    A query without an axis gets one, unless other queries have axes. A product of queries and keys that is written as a
    sum becomes a sum over features; one over few features may become two leaves for each feature.
    """
    count = attention_count(closed.jaxpr)
    try:
        found = find_regions(closed.jaxpr)
    except QueryWithoutAxis as refusal:
        with_axes = with_query_axes(closed, refusal.products)
        return (count > 0, 0, count, 0, 0) if with_axes is None else _merit(with_axes)
    except NotFusible:
        return count > 0, 0, count, 0, 0
    regions = [region for own in found.values() for region in own]
    leaves = [leaf for region in regions for leaf in region.leaves]
    sums = sum(node.kind == "sum" for x in regions for node in nodes_of(x.score, x.weight, *x.extras))
    return count > 0, -sum(leaf.role == "score" for leaf in leaves), count, -sums, -len(leaves)


def _replaced(closed: core.ClosedJaxpr, kind: "type[_Plain] | type[_Products]") -> core.ClosedJaxpr:
    finder = kind(closed.jaxpr)
    replaced = {}
    for equation in closed.jaxpr.eqns:
        if (make := finder.replacement(equation)) is not None:
            replaced[id(equation)] = make
    return rewritten(closed, closed.jaxpr.eqns, replaced) if replaced else closed


class _Finder:
    def __init__(self, jaxpr: core.Jaxpr) -> None:
        self.producers, self.users = producers_of(jaxpr), users_of(jaxpr)

    def producer(self, var: Any) -> core.JaxprEqn | None:
        """Return the equation that computes a value, or None for arguments and literals."""
        return self.producers.get(var) if isinstance(var, core.Var) else None

    def reaches(self, var: Any, names: Sequence[str]) -> bool:
        """Return whether a value comes from these primitives through moves, slices and elementwise operations."""
        seen: set[Any] = set()
        waiting = [var]
        while waiting:
            one = waiting.pop()
            equation = self.producer(one)
            if equation is None or one in seen:
                continue
            seen.add(one)
            name = equation.primitive.name
            if name in names:
                return True
            if name in ELEMENTWISE or name in MOVES or name in PASSES or name == "slice":
                waiting += equation.invars
        return False


class _Plain(_Finder):
    """Finder of rewrites that are valid anywhere in a program."""

    def replacement(self, equation: core.JaxprEqn) -> _Make | None:
        """Return a function that computes the equation's result in another way, or None to keep the equation."""
        match equation.primitive.name:
            case "dot_general":
                return self._scaling(equation)
            case "pad":
                return self._beside_zeros(equation)
            case "broadcast_in_dim":
                compute = with_batch(equation, self.producer)
                return compute and (lambda value_of: {equation.outvars[0]: compute(value_of)})
        return None

    def _scaling(self, equation: core.JaxprEqn) -> _Make | None:
        """Rewrite a product without contracted axes as a multiplication.

        One operand is weights or scores. The other one has only axes that both share.
        """
        (contracted, _), shared = equation.params["dimension_numbers"]
        sides = [side for side in (0, 1) if len(aval_of(equation.invars[side]).shape) == len(shared[side])]
        if contracted or not shared[0] or not sides:
            return None
        small = sides[0]
        if not any(self.reaches(x, (*POWERS, "dot_general")) for x in equation.invars):
            return None
        result = equation.outvars[0]
        shape, dtype = aval_of(result).shape, aval_of(result).dtype
        whole = len(aval_of(equation.invars[1 - small]).shape)
        free = [axis for axis in range(whole) if axis not in shared[1 - small]]

        def make(value_of: Callable[[Any], Any]) -> dict[core.Var, Any]:
            scale = lax.transpose(value_of(equation.invars[small]), shared[small])
            other = lax.transpose(value_of(equation.invars[1 - small]), [*shared[1 - small], *free])
            scale, other = (lax.convert_element_type(x, dtype) for x in (scale, other))
            return {result: lax.mul(lax.broadcast_in_dim(scale, shape, range(scale.ndim)), other)}

        return make

    def _beside_zeros(self, equation: core.JaxprEqn) -> _Make | None:
        """Rewrite a `pad` of scores along one axis as a `concatenate`."""
        scores, number = equation.invars
        widened = [axis for axis, sizes in enumerate(equation.params["padding_config"]) if any(sizes)]
        if len(widened) != 1 or not self.reaches(scores, ("dot_general",)):
            return None
        (axis,) = widened
        low, high, inner = equation.params["padding_config"][axis]
        if min(low, high) < 0 or inner:
            return None

        def make(value_of: Callable[[Any], Any]) -> dict[core.Var, Any]:
            whole = value_of(scores)
            shapes = [[*whole.shape[:axis], count, *whole.shape[axis + 1 :]] for count in (low, high)]
            before, after = (lax.broadcast_in_dim(value_of(number), shape, ()) for shape in shapes)
            parts = [x for x in (before, whole, after) if x.shape[axis]]
            return {equation.outvars[0]: lax.concatenate(parts, axis)}

        return make


@dataclass(frozen=True)
class _Operand:
    """An array that is broadcast along new axes.

    Attributes:
        var: the array.
        axes: from each axis of the array with more than one index to the axis of the broadcast array.
    """

    var: Any
    axes: dict[int, int]


class _Products(_Finder):
    """Finder of sums that may be attention once they are written as dot products."""

    def replacement(self, equation: core.JaxprEqn) -> _Make | None:
        """Return a function that computes the equation's result in another way, or None to keep the equation."""
        if any(axes is not None for x in equation.invars for axes in _sharding_of(x)):
            return None
        match equation.primitive.name:
            case "reduce_sum":
                return self._of_sum(equation)
            case "dot_general":
                return self._summed_before(equation, 0) or self._summed_before(equation, 1)
        return None

    def _of_sum(self, equation: core.JaxprEqn) -> _Make | None:
        """Rewrite a sum over elementwise products as a dot product."""
        product = self._skip_casts(equation.invars[0])
        if product is None or product.primitive.name != "mul" or len(equation.params["axes"]) != 1:
            return None
        shape, dtype = aval_of(product.outvars[0]).shape, aval_of(product.outvars[0]).dtype
        first, second = (self._operand(x) for x in product.invars)
        sides = [set(x.axes.values()) for x in (first, second)]
        (summed,) = equation.params["axes"]
        # A single query has no axis, and neither do values with a single column. If the sum is a divisor instead, it is
        # the normaliser of weights that are masked or gated.
        is_product = summed in sides[0] & sides[1] and sides[0] != sides[1]
        if is_product and (sides[0] < sides[1] or sides[1] < sides[0]) and self._divides(equation.outvars[0]):
            return None
        is_whole = sides[0] | sides[1] == {axis for axis, size in enumerate(shape) if size > 1}
        if not is_product or not is_whole:
            return None
        if not self._feeds(equation.outvars[0]) and not any(self.reaches(x.var, POWERS) for x in (first, second)):
            return None
        result = equation.outvars[0]
        kept = [axis for axis in range(len(shape)) if axis != summed]

        def make(value_of: Callable[[Any], Any]) -> dict[core.Var, Any]:
            arrays = [lax.reshape(value_of(x.var), [x.var.aval.shape[i] for i in x.axes]) for x in (first, second)]
            arrays = [lax.convert_element_type(x, dtype) for x in arrays]
            wanted = [axis for axis in kept if shape[axis] > 1]
            labels = [list(x.axes.values()) for x in (first, second)]
            found = _product(arrays, labels, wanted, aval_of(result).dtype)
            found = lax.broadcast_in_dim(found, aval_of(result).shape, [kept.index(axis) for axis in wanted])
            return {result: found}

        return make

    def _feeds(self, var: Any) -> bool:
        """Return whether a value reaches an exponential through moves and elementwise operations."""
        return any(user.primitive.name in POWERS for user, _ in self._used(var))

    def _divides(self, var: Any) -> bool:
        """Return whether a value, after moves and elementwise operations, is a divisor."""
        users = self._used(var)
        return any(
            (user.primitive.name == "div" and user.invars[1] is one) or user.params.get("y", 0) == -1
            for user, one in users
        )

    def _used(self, var: Any) -> Iterator[tuple[core.JaxprEqn, Any]]:
        """Yield users of a value through moves, concatenations and elementwise operations, each with its operand."""
        seen: set[int] = set()
        waiting = [var]
        while waiting:
            one = waiting.pop()
            for user in self.users.get(one, ()):
                if user is None or id(user) in seen:
                    continue
                seen.add(id(user))
                yield user, one
                name = user.primitive.name
                # Scores may be joined with sinks, or with those of another source.
                if name in ELEMENTWISE or name in MOVES or name in PASSES or name == "concatenate":
                    waiting += user.outvars

    def _operand(self, var: Any) -> _Operand:
        """Return the array that a factor broadcasts, with the map of its axes."""
        shape = aval_of(var).shape
        axes = {axis: axis for axis, size in enumerate(shape) if size > 1}
        while (equation := self.producer(var)) is not None and equation.primitive.name in _WIDENS:
            given, made = aval_of(equation.invars[0]).shape, aval_of(var).shape
            if equation.primitive.name == "broadcast_in_dim":
                before = {i: axis for i, axis in enumerate(equation.params["broadcast_dimensions"]) if given[i] > 1}
            else:
                pairs = [[i for i, size in enumerate(x) if size > 1] for x in (given, made)]
                if [given[i] for i in pairs[0]] != [made[i] for i in pairs[1]]:
                    break
                before = dict(zip(*pairs, strict=True))
            axes = {i: axes[axis] for i, axis in before.items()}
            var = equation.invars[0]
        return _Operand(var, axes)

    def _skip_casts(self, var: Any) -> core.JaxprEqn | None:
        equation = self.producer(var)
        while equation is not None and _is_cast(equation):
            equation = self.producer(equation.invars[0])
        return equation

    def _summed_before(self, equation: core.JaxprEqn, side: int) -> _Make | None:
        """Rewrite (sum of weights over a non-key axis) times values as the sum of (weights times values)."""
        contracted, shared = equation.params["dimension_numbers"]
        total, factors = self._unscaled(equation.invars[side])
        if total is None or len(contracted[0]) != 1 or total.primitive.name not in ("reduce_sum", "dot_general"):
            return None
        summed = self._sum(total)
        if summed is None:
            return None
        weights, of_weights, scale, of_scale, of_total = summed
        key = of_total[contracted[side][0]]
        if key not in of_weights or (of_scale is not None and key in of_scale) or not self._differ(weights, key):
            return None
        values = equation.invars[1 - side]
        of_values: list[Any] = [("value", axis) for axis in range(len(aval_of(values).shape))]
        of_values[contracted[1 - side][0]] = key
        for axes in zip(*shared, strict=True):
            of_values[axes[1 - side]] = of_total[axes[side]]
        batch = [of_total[axis] for axis in shared[side]]
        sides = [[x for x in of_total if x not in (*batch, key)], [x for x in of_values if x not in (*batch, key)]]
        result = equation.outvars[0]
        wanted = [*batch, *sides[side], *sides[1 - side]]
        whole = [*(x for x in of_weights if x != key), *sides[1]]
        dtype = np.promote_types(aval_of(result).dtype, np.float32)

        def make(value_of: Callable[[Any], Any]) -> dict[core.Var, Any]:
            given = [value_of(weights), value_of(values)]
            found = _product(given, [of_weights, of_values], whole, dtype)
            if of_scale is None:
                found = lax.reduce_sum(found, [i for i, x in enumerate(whole) if x not in wanted])
                order = [[x for x in whole if x in wanted].index(x) for x in wanted]
                found = lax.transpose(found, order)
            else:
                wide = lax.convert_element_type(value_of(scale), dtype)
                found = _product([found, wide], [whole, of_scale], wanted, dtype)
            for scaled, number in reversed(factors):
                one = lax.convert_element_type(value_of(number), dtype)
                found = scaled(found, lax.broadcast_in_dim(one, found.shape, ()))
            return {result: lax.convert_element_type(found, aval_of(result).dtype)}

        return make

    def _differ(self, weights: Any, axis: int) -> bool:
        """Return whether the weights themselves vary along an axis, and not only their factors.

        If only the factors vary, the sum runs over keys, and the product is a projection of the attention's result.
        """
        product = self._skip_casts(weights)
        if product is None or product.primitive.name != "mul":
            return True
        of_powers = [x for x in product.invars if self.reaches(x, POWERS)]
        return any(axis in self._operand(x).axes.values() for x in of_powers)

    def _unscaled(self, var: Any) -> tuple[core.JaxprEqn | None, list[tuple[Callable[..., Any], Any]]]:
        """Return the equation below a value's casts and scalar factors, and these factors, outermost first."""
        factors: list[tuple[Callable[..., Any], Any]] = []
        while (equation := self.producer(var)) is not None:
            name, operands = equation.primitive.name, equation.invars
            if _is_cast(equation):
                var = operands[0]
            elif name in ("mul", "div") and not aval_of(operands[1]).shape:
                factors.append((lax.mul if name == "mul" else lax.div, operands[1]))
                var = operands[0]
            elif name == "mul" and not aval_of(operands[0]).shape:
                factors.append((lax.mul, operands[0]))
                var = operands[1]
            else:
                break
        return equation, factors

    def _sum(self, total: core.JaxprEqn) -> tuple[Any, list[Any], Any, list[Any] | None, list[Any]] | None:
        """Return the weights, their axis labels, their factor, its labels, and the labels of the sum.

        Returns:
            None if the equation does not sum weights. The factor and its labels are None for a plain sum.
        """
        if total.primitive.name == "reduce_sum":
            weights = total.invars[0]
            labels: list[Any] = list(range(len(aval_of(weights).shape)))
            if not self.reaches(weights, POWERS):
                return None
            return weights, labels, None, None, [x for x in labels if x not in total.params["axes"]]
        contracted, shared = total.params["dimension_numbers"]
        for side in (0, 1):
            weights, scale = total.invars[side], total.invars[1 - side]
            shape = aval_of(scale).shape
            is_small = len(contracted[0]) > 0 and len(shape) == len(contracted[0]) + len(shared[0])
            if not is_small or not self.reaches(weights, POWERS):
                continue
            labels = list(range(len(aval_of(weights).shape)))
            of_scale: list[Any] = [None] * len(shape)
            for ours, theirs in zip(
                (*contracted[side], *shared[side]), (*contracted[1 - side], *shared[1 - side]), strict=True
            ):
                of_scale[theirs] = ours
            free = [x for x in labels if x not in (*contracted[side], *shared[side])]
            return weights, labels, scale, of_scale, [*shared[side], *free]
        return None


def _is_cast(equation: core.JaxprEqn) -> bool:
    """Return whether an equation converts from one floating dtype to another."""
    if equation.primitive.name != "convert_element_type":
        return False
    return all(jnp.issubdtype(aval_of(x).dtype, jnp.floating) for x in (*equation.invars, *equation.outvars))


def _sharding_of(operand: Any) -> Sequence[Any]:
    aval = operand.aval
    return aval.sharding.spec if hasattr(aval, "sharding") else ()


def _product(arrays: Sequence[Any], labels: Sequence[Sequence[Any]], wanted: Sequence[Any], dtype: Any) -> Any:
    """Return the dot product of two arrays, contracted over all shared labels that are not wanted.

    Args:
        labels: the axis labels of each array.
        wanted: the labels of the result's axes, in order.
    """
    first, second = (list(x) for x in labels)
    both = [x for x in first if x in second]
    batch, summed = [x for x in both if x in wanted], [x for x in both if x not in wanted]
    contracted = ([first.index(x) for x in summed], [second.index(x) for x in summed])
    shared = ([first.index(x) for x in batch], [second.index(x) for x in batch])
    left, right = arrays
    found = lax.dot_general(
        left, right, (contracted, shared), precision=lax.Precision.HIGHEST, preferred_element_type=np.dtype(dtype)
    )
    made = [*batch, *(x for x in (*first, *second) if x not in both)]
    return lax.transpose(found, [made.index(x) for x in wanted])
