"""Log-sum-exps of scores that a function uses itself: results of the kernel that multiplies the same softmax by values.

Kernels keep them for their backward pass anyway. So parts of an attention are merged by them, or results gated, without
scores in memory. Their gradient is one of scores: weights times the log-sum-exp's cotangent.
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
"""Of rows that finite numbers hide."""


def log_sums(
    guards: Guards, scores: object, dims: tuple[Dim, ...], with_ones: Callable[..., tuple[Dim, ...] | None]
) -> tuple[LogSum, ...]:
    """The variables of a program that are the logarithm of the sum along keys of the exponentials of scores.

    Args:
        dims: of the scores.
        with_ones: the dims of a value that is another one moved, see `Softmaxes`.
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
    """What a logarithm is, or becomes with what was taken away from scores before; with dims."""
    inner = logarithm.invars[0]
    # `jax.nn.logsumexp` has the sign of a sum apart.
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
        # One that stands still is another one.
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
    """Sums of a logarithm and of what was taken away from scores before."""
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
        region: whose log-sum-exp it is.
        dims: what its axes stand for.
    """

    result: core.Var
    region: Region
    dims: tuple[Dim, ...]

    def placed(self, log_sum: Any, var: core.Var) -> Any:
        """The variable's value.

        Args:
            log_sum: [batch.., q].
        """
        labels = [label for dim in self.dims if isinstance(dim, tuple) for label in dim]
        own = (*self.region.batch, ROWS)
        if not any(x.kind == "number" and np.any(np.isneginf(x.number)) for x in nodes_of(self.region.score)):
            # Masks are finite, as far as is known.
            log_sum = jnp.maximum(log_sum, _HIDDEN)
        # It is the same along axes that values alone have.
        kept = log_sum[tuple(slice(None) if label in labels else 0 for label in own)]
        rest = [label for label in own if label in labels]
        # Of a process that has some of the rows, the sizes are not those of the variable.
        shape = shape_of(self.dims, dict(zip(own, log_sum.shape, strict=True)))
        kept = jnp.transpose(kept, [rest.index(label) for label in labels])
        return kept.reshape(shape).astype(aval_of(var).dtype)


def in_order(
    jaxpr: core.Jaxpr, regions: Mapping[core.Var, Sequence[Region]], needed: Callable[[Mapping[core.Var, Wanted]], set]
) -> tuple[core.Jaxpr, dict[core.Var, Wanted]]:
    """A program whose equations come after regions that compute log-sum-exps which they need, and these variables.

    Args:
        needed: what must be computed, given what regions compute beside their results.
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
        # What a region reads depends on a log-sum-exp that it would compute.
        found = {var: wanted for var, wanted in found.items() if var not in stuck}
    return jaxpr, found


def _order(
    jaxpr: core.Jaxpr,
    regions: Mapping[core.Var, Sequence[Region]],
    found: Mapping[core.Var, Wanted],
    needed: set[core.Var],
) -> tuple[list[core.JaxprEqn] | None, set[core.Var]]:
    """The equations in an order in which each has what it needs, as near to the program's as can be; or None, and
    variables that wait for each other."""
    equations = jaxpr.eqns
    place_of = {var: place for place, equation in enumerate(equations) for var in equation.outvars}
    users: list[list[int]] = [[] for _ in equations]
    missing = [0] * len(equations)
    last_effect: int | None = None
    for place, equation in enumerate(equations):
        if has_effects(equation):
            needs = {place_of[x] for x in equation.invars if isinstance(x, core.Var) and x in place_of}
            # What is printed, or written, is so in its order.
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
