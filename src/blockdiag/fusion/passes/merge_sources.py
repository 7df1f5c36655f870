"""Split a softmax over the keys of several sources into one softmax for each, and merge them by their log-sum-exps.

Scores of a memory, an earlier segment or a summary are joined with those of the usual keys by `concatenate`. The
weights are then sliced, or multiply the values of all sources. Each source has its own kind of scores, and so gets its
own kernels. With L_i the log-sum-exp of source i and L that of all, the result is the sum of
exp(L_i - L) softmax_i V_i. The joined scores are never stored. The same identity merges the splits of FlashAttention
(Dao et al., 2022).
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend import core

from blockdiag.fusion.frontend.trace import aval_of, bind, rewritten
from blockdiag.fusion.ir.tree import ELEMENTWISE, Dim, Unpullable
from blockdiag.fusion.passes.sink_slices import Part, Plan, Stays, producer_of, slices_of
from blockdiag.fusion.regions.axis_labels import MOVES, broadcast_dims, labels_of, moved_dims, producers_of, users_of
from blockdiag.fusion.regions.guards import CASTS, PASSES
from blockdiag.fusion.regions.match import attention_count

type _Producers = Mapping[core.Var, core.JaxprEqn]
type _ValueOf = Callable[[Any], Any]


def with_sources(closed: core.ClosedJaxpr) -> core.ClosedJaxpr | None:
    """Return the flat program with a product for each source of keys, or None if these do not become attention."""
    producers, users = producers_of(closed.jaxpr), users_of(closed.jaxpr)
    replaced: dict[int, Callable[[_ValueOf], dict[core.Var, Any]]] = {}
    count = 0
    for equation in closed.jaxpr.eqns:
        joined = _joined(equation, producers)
        if joined is None:
            continue
        products = _products(equation.outvars[0], joined.axis, (0, joined.bounds[-1]), users)
        plan = Plan(producers)
        try:
            keys = {part: plan.add(joined.scores, part) for part in joined.parts}
        except Stays:
            continue
        if products is None or not all(x.is_whole(joined.bounds) for x in products):
            continue
        merged = _Merged(joined, plan, keys)
        for product in products:
            replaced[id(product.equation)] = functools.partial(merged.product, product)
            count += merged.count(product)
    if not replaced:
        return None
    better = rewritten(closed, closed.jaxpr.eqns, replaced)
    return better if attention_count(better.jaxpr) >= attention_count(closed.jaxpr) + count else None


@dataclass(frozen=True)
class _Joined:
    """A softmax over several sources.

    Attributes:
        scores: the concatenated scores of all sources.
        axis: the axis of keys.
        bounds: the first key of each source, and the end of the last source.
        dtype: the dtype of the weights.
    """

    scores: Any
    axis: int
    bounds: tuple[int, ...]
    dtype: Any

    @property
    def parts(self) -> list[Part]:
        """Return the keys of each source."""
        return [Part(self.axis, first, limit) for first, limit in itertools.pairwise(self.bounds)]


def _joined(quotient: core.JaxprEqn, producers: _Producers) -> _Joined | None:
    """Return the softmax over several sources that a quotient computes, or None."""
    if quotient.primitive.name != "div":
        return None
    power = producer_of(_skip(quotient.invars[0], producers), producers)
    total = _reduction(quotient, "reduce_sum", producers)
    if power is None or power.primitive.name != "exp" or total is None:
        return None
    shape = aval_of(quotient.outvars[0]).shape
    if _skip(total.invars[0], producers) is not power.outvars[0]:
        return None
    (axis,) = total.params["axes"]
    shifted = producer_of(_skip(power.invars[0], producers), producers)
    scores = power.invars[0]
    if shifted is not None and shifted.primitive.name == "sub":
        # A softmax does not change when the same value is subtracted from all scores of a row.
        largest = _reduction(shifted, "reduce_max", producers, (*PASSES, "max", "select_n"))
        if largest is not None and largest.params["axes"] == (axis,):
            scores = shifted.invars[0]
    bounds = _bounds(scores, axis, producers)
    if bounds is None or bounds[-1] != shape[axis]:
        return None
    return _Joined(scores, axis, bounds, aval_of(quotient.outvars[0]).dtype)


def _reduction(
    user: core.JaxprEqn, name: str, producers: _Producers, passes: Sequence[str] = CASTS
) -> core.JaxprEqn | None:
    """Return the reduction along one axis that an equation's second operand broadcasts along the same axis, or None.

    Args:
        passes: operations that are skipped, by their last operand. They must not see the reduced axis.
    """
    var, shape = user.invars[1], aval_of(user.outvars[0]).shape
    labels: tuple[Dim, ...] = tuple((f"a{axis}",) for axis in range(len(shape)))
    sizes = {f"a{axis}": size for axis, size in enumerate(shape)}
    dims, seen = broadcast_dims(var, shape, labels), set()
    while (equation := producer_of(var, producers)) is not None:
        step = equation.primitive.name
        if step in MOVES:
            try:
                dims = moved_dims(equation, dims, sizes)
            except Unpullable:
                return None
        elif step in passes:
            seen |= labels_of(dims)
        else:
            break
        var = equation.invars[-1]
    if equation is None or equation.primitive.name != name or len(equation.params["axes"]) != 1:
        return None
    (axis,) = equation.params["axes"]
    # Reshapes may drop labels of size 1.
    found = [label for dim in dims if isinstance(dim, tuple) for label in dim if sizes[label] > 1]
    is_along = found == [x for i, x in enumerate(sizes) if i != axis and sizes[x] > 1]
    return equation if is_along and f"a{axis}" not in seen else None


def _skip(var: Any, producers: _Producers) -> Any:
    """Return the value below casts."""
    while (equation := producer_of(var, producers)) is not None and equation.primitive.name in CASTS:
        var = equation.invars[0]
    return var


def _bounds(scores: Any, axis: int, producers: _Producers) -> tuple[int, ...] | None:
    """Return the bounds of sources, or None without at least two that come from products, one with several keys."""
    waiting, seen = [scores], set()
    size = aval_of(scores).shape[axis]
    has_product = Plan(producers).has_product
    while waiting:
        var = waiting.pop()
        equation = producer_of(var, producers)
        if equation is None or var in seen or aval_of(var).shape[axis : axis + 1] != (size,):
            continue
        seen.add(var)
        name = equation.primitive.name
        if name == "concatenate" and equation.params["dimension"] == axis:
            sizes = [aval_of(x).shape[axis] for x in equation.invars]
            several = [each for x, each in zip(equation.invars, sizes, strict=True) if has_product(x)]
            if len(several) > 1 and max(several) > 1:
                return (0, *itertools.accumulate(sizes))
        elif name in ELEMENTWISE or name in PASSES:
            waiting += equation.invars
    return None


@dataclass(frozen=True)
class _Product:
    """A product of weights, or of a slice of them, and values.

    Attributes:
        equation: the product.
        side: the operand that has the weights.
        axes: the axis of the weights for each axis of the operand.
        first, limit: the range of keys.
    """

    equation: core.JaxprEqn
    side: int
    axes: tuple[int, ...]
    first: int
    limit: int

    def is_whole(self, bounds: Sequence[int]) -> bool:
        """Return whether the range of keys consists of whole sources."""
        return self.first in bounds and self.limit in bounds


def _products(weights: core.Var, axis: int, keys: tuple[int, int], users: Mapping[core.Var, Any]) -> Any:
    """Return the products that contract weights along keys, or None if the weights have any other use."""
    found: list[_Product] = []
    waiting = [(weights, tuple(range(len(aval_of(weights).shape))), keys)]
    while waiting:
        var, axes, (first, limit) = waiting.pop()
        for user in users[var]:
            if user is None:
                return None
            name = user.primitive.name
            slices = slices_of(user)
            if name in CASTS:
                waiting.append((user.outvars[0], axes, (first, limit)))
            elif name == "transpose":
                moved = tuple(axes[i] for i in user.params["permutation"])
                waiting.append((user.outvars[0], moved, (first, limit)))
            elif slices is not None and all(axes[x.axis] == axis and x.step == 1 for x in slices):
                pairs = zip(user.outvars, slices, strict=True)
                waiting += [(out, axes, (first + x.first, first + x.limit)) for out, x in pairs if users[out]]
            elif name == "dot_general" and sum(x is var for x in user.invars) == 1:
                side = [x is var for x in user.invars].index(True)
                if [axes[i] for i in user.params["dimension_numbers"][0][side]] != [axis]:
                    return None
                found.append(_Product(user, side, axes, first, limit))
            else:
                return None
    return found or None


class _Merged:
    """One softmax for each source, computed once and used by all products.

    Args:
        plan, keys: the plan for the scores, and the key of each source's scores in it.
    """

    def __init__(self, joined: _Joined, plan: Plan, keys: Mapping[Part, Any]) -> None:
        self._joined, self._plan, self._keys = joined, plan, keys
        self._made: dict[Part, tuple[Any, Any]] = {}

    def count(self, product: _Product) -> int:
        """Return the number of products that an equation becomes and that should be attention."""
        return sum(part.count > 1 for part in self._parts(product))

    def product(self, product: _Product, value_of: _ValueOf) -> dict[core.Var, Any]:
        """Return the result of a product: the sum of the sources' results, each times its share."""
        if not self._made:
            self._make(value_of)
        equation, side, axis = product.equation, product.side, self._joined.axis
        operands = [value_of(x) for x in equation.invars]
        (contracted, shared), out = equation.params["dimension_numbers"], equation.outvars[0]
        # The result's axes that weights have: shared ones first, then those of the first operand alone.
        free = [[i for i in range(operands[x].ndim) if i not in (*contracted[x], *shared[x])] for x in range(2)]
        own = [*shared[side], *free[side]]
        begin = len(shared[0]) + (0 if side == 0 else len(free[0]))
        places = [*range(len(shared[0])), *range(begin, begin + len(free[side]))]
        (along,) = contracted[1 - side]
        total = None
        for part in self._parts(product):
            power, share = self._made[part]
            given = list(operands)
            given[side] = lax.transpose(power, product.axes).astype(operands[side].dtype)
            first = part.first - product.first
            given[1 - side] = lax.slice_in_dim(operands[1 - side], first, first + part.count, axis=along)
            result = bind(equation, given)[0]
            # The share has the weights' axes without keys. Bring them into the result's order.
            rest = [x for x in range(power.ndim) if x != axis]
            order = [rest.index(product.axes[i]) for i in own]
            share = lax.broadcast_in_dim(lax.transpose(share, order), result.shape, places)
            term = result.astype(jnp.float32) * share if result.dtype.itemsize < 4 else result * share
            total = term if total is None else total + term
        assert total is not None
        return {out: total.astype(aval_of(out).dtype)}

    def _parts(self, product: _Product) -> list[Part]:
        return [x for x in self._joined.parts if x.first >= product.first and x.limit <= product.limit]

    def _make(self, value_of: _ValueOf) -> None:
        """Compute the weights of each source, and its share exp(L_i - L) of the whole."""
        axis, parts = self._joined.axis, self._joined.parts
        known = self._plan.values(value_of)
        scores = [known[self._keys[part]] for part in parts]
        scores = [x.astype(jnp.float32) if x.dtype.itemsize < 4 else x for x in scores]
        sums = [lax.squeeze(x, [axis]) if x.shape[axis] == 1 else _log_sum(x, axis) for x in scores]
        whole = functools.reduce(jnp.logaddexp, sums)
        whole = jnp.where(whole == -jnp.inf, 0.0, whole)
        for part, x, log_sum in zip(parts, scores, sums, strict=True):
            weights = jnp.ones_like(x) if part.count == 1 else jnp.exp(x - jnp.expand_dims(log_sum, axis))
            self._made[part] = (weights.astype(self._joined.dtype), jnp.exp(log_sum - whole))


def _log_sum(scores: Any, axis: int) -> Any:
    largest = lax.stop_gradient(jnp.max(scores, axis))
    largest = jnp.where(jnp.isfinite(largest), largest, 0)
    return jnp.log(jnp.sum(jnp.exp(scores - jnp.expand_dims(largest, axis)), axis)) + largest
