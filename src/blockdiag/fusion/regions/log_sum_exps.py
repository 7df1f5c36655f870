"""Return log-sum-exps that a function uses from the kernel that multiplies the same softmax by values.

Kernels store the log-sum-exp for their backward pass anyway. A function can therefore merge parts of an attention by
log-sum-exps, or gate results, without scores in memory. The log-sum-exp adds to the gradient of scores: the weights
times its cotangent.
"""

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from blockdiag.fusion.frontend.trace import aval_of, has_effects
from blockdiag.fusion.ir.layout import shape_of
from blockdiag.fusion.ir.tree import ROWS, Dim, LogSum, Region, nodes_of
from blockdiag.fusion.regions.axis_labels import broadcast_dims, labels_of
from blockdiag.fusion.regions.guards import CASTS, Guards, NoMatch, is_along_keys, key_axes

_HIDDEN = -1e9
"""Least log-sum-exp of a row whose keys are all masked by finite numbers."""


def log_sums(
    guards: Guards, scores: object, dims: tuple[Dim, ...], with_ones: Callable[..., tuple[Dim, ...] | None]
) -> tuple[LogSum, ...]:
    """Return the variables of a program that are the log-sum-exp of scores along keys.

    Args:
        dims: the labels of the scores.
        with_ones: returns the dims of a value that is a moved copy of another one; see `Softmaxes`.
    """
    found = []
    for logarithm in guards.named("log"):
        for var, own in _log_sums(guards, logarithm, scores, dims, with_ones):
            if all(isinstance(dim, tuple) and labels_of((dim,)) == set(dim) for dim in own):
                found.append(LogSum(var, own))
    return tuple(found)


def _log_sums(
    guards: Guards,
    logarithm: core.JaxprEqn,
    scores: object,
    dims: tuple[Dim, ...],
    with_ones: Callable[..., tuple[Dim, ...] | None],
) -> list[tuple[core.Var, tuple[Dim, ...]]]:
    """Return the log-sum-exps that a logarithm gives, by itself or after the shift is added back, with their dims."""
    inner = logarithm.invars[0]
    # `jax.nn.logsumexp` computes the sign of the sum separately, and takes its absolute value.
    sign = guards.producer(guards.skip(inner))
    inner = sign.invars[0] if sign is not None and sign.primitive.name == "abs" else inner
    total = guards.producer(guards.skip_moves(inner))
    power = None if total is None else guards.producer(guards.skip(total.invars[0]))
    if total is None or total.primitive.name != "reduce_sum" or power is None or power.primitive.name != "exp":
        return []
    power_shape, whole = aval_of(power.outvars[0]).shape, aval_of(scores).shape
    axes = key_axes(dims)
    kept = tuple(dim for axis, dim in enumerate(dims) if axis not in axes)
    if power_shape != whole or not is_along_keys(total, kept, dims):
        return []
    try:
        # A shift behind `stop_gradient` is a different value, because it has no derivative.
        shift = guards.shift(power.invars[0], dims, CASTS)
        if not guards.is_same(guards.skip(guards.unshifted(power.invars[0], dims, CASTS)), guards.skip(scores)):
            return []
        own = with_ones(inner, total.outvars[0], kept)
        if own is None:
            return []
        if shift is None:
            return [(logarithm.outvars[0], own)]
        return _with_shift(guards, logarithm.outvars[0], own, shift, with_ones)
    except NoMatch:
        return []


def _with_shift(
    guards: Guards,
    logarithm: core.Var,
    dims: tuple[Dim, ...],
    shift: tuple[object, tuple[Dim, ...]],
    with_ones: Callable[..., tuple[Dim, ...] | None],
) -> list[tuple[core.Var, tuple[Dim, ...]]]:
    """Return the sums of a logarithm and the shift that was subtracted from scores, with their dims."""
    found = []
    for joined in guards.named("add"):
        shape = aval_of(joined.outvars[0]).shape
        for one, other in ((0, 1), (1, 0)):
            if guards.skip_moves(joined.invars[one]) is not logarithm or aval_of(joined.invars[one]).shape != shape:
                continue
            own = with_ones(joined.invars[one], logarithm, dims)
            if own is None:
                continue
            given = broadcast_dims(joined.invars[other], shape, own)
            if guards.is_same_at(guards.through_moves(joined.invars[other], given), shift):
                found.append((joined.outvars[0], own))
                break
    return found


@dataclass(frozen=True)
class Wanted:
    """A variable that a region computes beside its result.

    Attributes:
        result: the variable that the region's result is a part of.
        region: the region whose log-sum-exp the variable is.
        dims: the labels of the variable's axes.
    """

    result: core.Var
    region: Region
    dims: tuple[Dim, ...]

    def placed(self, log_sum: Any, var: core.Var) -> Any:
        """Return the variable's value from the region's log-sum-exp.

        Args:
            log_sum: [batch.., q].
        """
        labels = [label for dim in self.dims if isinstance(dim, tuple) for label in dim]
        own = (*self.region.batch, ROWS)
        if not any(x.kind == "number" and np.any(np.isneginf(x.number)) for x in nodes_of(self.region.score)):
            # All known masks are finite, so the function's own log-sum-exp would be finite, too.
            log_sum = jnp.maximum(log_sum, _HIDDEN)
        # The log-sum-exp is constant along batch axes that the variable lacks.
        kept = log_sum[tuple(slice(None) if label in labels else 0 for label in own)]
        rest = [label for label in own if label in labels]
        # A shard has only some of the rows, so sizes come from the log-sum-exp and not from the variable.
        shape = shape_of(self.dims, dict(zip(own, log_sum.shape, strict=True)))
        kept = jnp.transpose(kept, [rest.index(label) for label in labels])
        return kept.reshape(shape).astype(aval_of(var).dtype)


def in_order(
    jaxpr: core.Jaxpr, regions: Mapping[core.Var, Sequence[Region]], needed: Callable[[Mapping[core.Var, Wanted]], set]
) -> tuple[core.Jaxpr, dict[core.Var, Wanted]]:
    """Return the program with equations behind the regions whose log-sum-exps they use, and these variables.

    Args:
        needed: returns the live variables, given the variables that regions compute beside their results.
    """
    found: dict[core.Var, Wanted] = {}
    used = needed({})
    for result, own in regions.items():
        for region in own:
            found |= {x.var: Wanted(result, region, x.dims) for x in region.log_sums if x.var in used - found.keys()}
    while found:
        order, stuck = _order(jaxpr, regions, found, needed(found))
        if order is not None:
            return jaxpr.replace(eqns=order), found
        # An operand of the region depends on the log-sum-exp that the region would compute.
        found = {var: wanted for var, wanted in found.items() if var not in stuck}
    return jaxpr, found


def _order(
    jaxpr: core.Jaxpr,
    regions: Mapping[core.Var, Sequence[Region]],
    found: Mapping[core.Var, Wanted],
    needed: set[core.Var],
) -> tuple[list[core.JaxprEqn] | None, set[core.Var]]:
    """Return the equations in topological order, as close to the program's order as possible.

    Returns:
        The order and an empty set; or None, and the variables of a dependency cycle with all that depend on them.
    """
    equations = jaxpr.eqns
    place_of = {var: place for place, equation in enumerate(equations) for var in equation.outvars}
    users: list[list[int]] = [[] for _ in equations]
    missing = [0] * len(equations)
    last_effect: int | None = None
    for place, equation in enumerate(equations):
        if has_effects(equation):
            needs = {place_of[x] for x in equation.invars if isinstance(x, core.Var) and x in place_of}
            # Side effects keep their order.
            needs |= set() if last_effect is None else {last_effect}
            last_effect = place
        else:
            inputs = map(_inputs_of(equation, regions, found), (var for var in equation.outvars if var in needed))
            needs = {place_of[x] for each in inputs for x in each if x in place_of}
        missing[place] = len(needs)
        for other in needs:
            users[other].append(place)
    ready = [place for place, count in enumerate(missing) if not count]
    order: list[core.JaxprEqn] = []
    while ready:
        place = heapq.heappop(ready)
        order.append(equations[place])
        for user in users[place]:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, user)
    if len(order) < len(equations):
        return None, {var for x, count in zip(equations, missing, strict=True) if count for var in x.outvars}
    return order, set()


def _inputs_of(
    equation: core.JaxprEqn, regions: Mapping[core.Var, Sequence[Region]], found: Mapping[core.Var, Wanted]
) -> Callable[[core.Var], set[core.Var]]:
    def inputs(var: core.Var) -> set[core.Var]:
        given: Sequence[Any] = equation.invars
        if var in found:
            given = [found[var].result]
        elif var in regions:
            given = [source.key for region in regions[var] for source in region.sources]
        return {x for x in given if isinstance(x, core.Var)}

    return inputs
