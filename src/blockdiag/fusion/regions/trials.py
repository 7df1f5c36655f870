"""Trials of whether a prefix of an attention can be fused if a known-good remainder completes it."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from blockdiag.fusion.frontend.trace import aval_of, bind, flat_jaxpr, read
from blockdiag.fusion.ir.tree import COLUMNS, ELEMENTWISE, Dim
from blockdiag.fusion.regions.axis_labels import labels_of
from blockdiag.fusion.regions.candidates import ALIKE, UNKNOWN, Candidate
from blockdiag.fusion.regions.guards import POWERS

type CanFuse = Callable[[core.ClosedJaxpr], bool]
"""A predicate: whether a flat program has attention that is fused, with values computed from its last argument."""

type _Complete = Callable[[Any, Any], Any]
"""A function from an intermediate value, and the values of keys, to a result."""

type Completion = Callable[[Any, tuple[Dim, ...], int], list[tuple[_Complete, tuple[int, ...]]]]
"""A function that returns the ways to complete a value, each with the shape of the values of keys.

Its arguments are the value's aval, the labels of its axes, and the number of keys.
"""

_COLUMNS_OF_VALUES, _MOST_SINKS = 16, 8

_MOST_AFTER = 12
"""Limit of later values that are tried after one that cannot be completed: a softmax by hand takes five."""

_APART = frozenset({"dot_general", "conv_general_dilated", "scan", "while", "cond"})
"""Primitives whose results become arguments of the cut program, unless they are computed from scores."""


def _completion(normalise: Callable[[Any, int], Any]) -> Completion:
    def completed(aval: Any, dims: tuple[Dim, ...], count: int) -> list[tuple[_Complete, tuple[int, ...]]]:
        keys = [axis for axis, dim in enumerate(dims) if COLUMNS in labels_of((dim,))]
        are_apart = all(x == COLUMNS or x[0] == UNKNOWN for axis in keys for x in labels_of((dims[axis],)))
        is_real = not jnp.issubdtype(aval.dtype, jnp.complexfloating)
        if not keys or not are_apart or not is_real or keys != list(range(keys[0], keys[-1] + 1)):
            return []
        axis, last = keys[0], keys[-1] + 1
        merged = (*aval.shape[:axis], math.prod(aval.shape[axis:last]), *aval.shape[last:])
        rest = [*dims[:axis], (), *dims[last:]]
        batch = [i for i, dim in enumerate(rest) if labels_of((dim,)) and all(x[0] == "b" for x in labels_of((dim,)))]

        def complete(first: int, value: Any, values: Any) -> Any:
            value = lax.convert_element_type(value, values.dtype)
            weights = normalise(value if len(keys) == 1 else lax.reshape(value, merged), axis)
            size = values.shape[len(batch)]
            if size < weights.shape[axis]:
                weights = lax.slice_in_dim(weights, first, first + size, axis=axis)
            return lax.dot_general(weights, values, (((axis,), (len(batch),)), (batch, range(len(batch)))))

        def shape(size: int) -> tuple[int, ...]:
            return (*(merged[i] for i in batch), size, _COLUMNS_OF_VALUES)

        ways = [(functools.partial(complete, 0), shape(merged[axis]))]
        if 0 < merged[axis] - count <= _MOST_SINKS:
            # Sinks have no values. They stand before the keys, or after them.
            ways += [(functools.partial(complete, first), shape(count)) for first in (0, merged[axis] - count)]
        return ways

    return completed


AS_SCORES = _completion(lambda value, axis: jax.nn.softmax(value, axis=axis))
# Unlike a softmax, this completion changes if row statistics are added to scores.
_AS_BOUNDED = _completion(lambda value, axis: jax.nn.softmax(jnp.tanh(value), axis=axis))
AS_WEIGHTS = _completion(lambda value, axis: value)
AS_POWERS = _completion(lambda value, axis: value / value.sum(axis, keepdims=True))
COMPLETIONS = (AS_SCORES, AS_WEIGHTS, AS_POWERS)


class Trials(Candidate):
    """A candidate that can be cut after each of its values.

    Args:
        can_fuse: decides whether a cut program is fused.
    """

    def __init__(
        self, closed: core.ClosedJaxpr, product: core.JaxprEqn, side: int, queries: int | None, can_fuse: CanFuse
    ) -> None:
        super().__init__(closed, product, side, queries)
        self._can_fuse = can_fuse
        self._known: dict[Any, bool] = {}

    @property
    def is_fine(self) -> bool:
        """Return whether the weights can be multiplied by values."""
        return self._can_complete(self._weights, AS_WEIGHTS)

    def _first_broken(self, nodes: Sequence[core.Var]) -> core.Var | None:
        """Return the first value that cannot be completed, and from which no value that can be is computed."""
        fine: set[core.Var] = set()
        for place, var in enumerate(nodes):
            if var in fine:
                continue
            later = [x for x in nodes[place:] if x is var or self._is_made_of(x, var)][: _MOST_AFTER + 1]
            for one in later:
                if self._is_completed(one, self._likely(one, one is var)):
                    fine |= {one, *self._kept(one)}
                if var in fine:
                    break
            else:
                return var
        return None

    def _kept(self, var: core.Var) -> Set[core.Var]:
        """Return the values that a completed value proves valid.

        A softmax ignores row statistics that are added to its scores, so it does not prove these valid.
        """
        pairs = self._pair_ancestors(var)
        if self._ancestors[var] <= pairs or not self._known.get((var, AS_SCORES)):
            return self._ancestors[var]
        whole = [_AS_BOUNDED if x is AS_SCORES else x for x in self._likely(var, are_all=True)]
        return self._ancestors[var] if self._is_completed(var, whole) else pairs

    def _pair_ancestors(self, var: core.Var) -> set[core.Var]:
        """Return the values that a value is computed from through pairs only, without row statistics."""
        return {x for equation in self._pair_path(var) for x in equation.outvars}

    @functools.cached_property
    def _simple(self) -> set[core.Var]:
        """Return the values that are elementwise functions of scores, without other values computed from scores."""
        found: set[core.Var] = set()
        for equation in self._closed.jaxpr.eqns:
            if id(equation) in self._scores:
                continue
            given = self._given(equation)
            is_plain = equation.primitive.name in ELEMENTWISE or equation.primitive.name in ALIKE
            are_simple = all(x in found or id(self._producers[x]) in self._scores for x in given)
            if given and is_plain and are_simple:
                found.update(equation.outvars)
        return found

    def _likely(self, var: core.Var, are_all: bool) -> Sequence[Completion]:
        """Return the completions of a value, the likeliest first.

        Args:
            var: the value.
            are_all: whether to include the unlikely ones.
        """
        if self._has_powers(var):
            rest = (AS_WEIGHTS, AS_POWERS, AS_SCORES)
        elif self._feeds_powers(var):
            # The argument of a softmax may look like weights by chance, such as scores divided by their norm.
            rest = (AS_SCORES,)
        else:
            rest = (AS_SCORES, AS_WEIGHTS, AS_POWERS)
        return rest if are_all else rest[:2]

    def _feeds_powers(self, var: core.Var) -> bool:
        """Return whether the weights are computed from exponentials of a value."""
        powers = [x for x in self._pair_path(self._weights) if x.primitive.name in POWERS]
        return any(var in self._pair_ancestors(x.outvars[0]) for x in powers)

    def _is_completed(
        self,
        var: core.Var,
        completions: Sequence[Completion],
        skipped: Mapping[core.Var, Any] = MappingProxyType({}),
    ) -> bool:
        return any(self._can_complete(var, complete, skipped) for complete in completions)

    def _can_complete(
        self, var: core.Var, complete: Completion, skipped: Mapping[core.Var, Any] = MappingProxyType({})
    ) -> bool:
        """Return whether the program is fused if it is cut after a value and completed.

        Args:
            var: the value.
            complete: the completion.
            skipped: from values to those that replace them.
        """
        key = (var, complete, *skipped.items())
        if key not in self._known:
            count = self._matcher.sizes[COLUMNS]
            ways = [x for dims in self._best_ways(var) for x in complete(aval_of(var), dims, count)]
            self._known[key] = any(self._can_fuse(self._cut(var, *each, skipped)) for each in ways)
        return self._known[key]

    def _cut(
        self, var: core.Var, complete: _Complete, shape: tuple[int, ...], skipped: Mapping[core.Var, Any]
    ) -> core.ClosedJaxpr:
        """Return the program that computes a value and completes it by a product with values of this shape.

        Args:
            var: the value.
            complete: the completion.
            shape: the shape of the values of keys.
            skipped: from values to those that replace them; None stands for the values of keys.
        """
        jaxpr = self._closed.jaxpr
        consts = dict(zip(jaxpr.constvars, self._closed.consts, strict=True))
        needed: set[int] = set()
        inputs: dict[core.Var, None] = {}
        seen: set[core.Var] = set()
        waiting: list[tuple[Any, bool]] = [(var, False)]
        while waiting:
            one, is_factor = waiting.pop()
            one = skipped.get(one, one) if isinstance(one, core.Var) else one
            if not isinstance(one, core.Var) or one in seen or one in consts:
                continue
            equation = self._producer(one)
            is_apart = equation is None or bool(equation.effects)
            is_apart |= one not in self._is_pair and equation is not None and equation.primitive.name in _APART
            if is_apart or (is_factor and one not in self._is_pair):
                inputs[one] = None
                continue
            seen.add(one)
            assert equation is not None
            needed.add(id(equation))
            waiting += [(x, id(equation) in self._scores) for x in equation.invars]

        def operand(known: dict[core.Var, Any], values: Any, x: Any) -> Any:
            inner = skipped.get(x, x) if isinstance(x, core.Var) else x
            return values if inner is None else read(known, inner)

        def compute(*given: Any) -> Any:
            known = consts | dict(zip(inputs, given, strict=False))
            for equation in jaxpr.eqns:
                # The factors of scores are arguments, even if other equations need the values they are computed from.
                if id(equation) in needed and equation.outvars[0] not in inputs:
                    results = bind(equation, [operand(known, given[-1], x) for x in equation.invars])
                    known |= dict(zip(equation.outvars, results, strict=True))
            return complete(known[var], given[-1])

        dtype = aval_of(self._product.outvars[0]).dtype
        values = jax.ShapeDtypeStruct(shape, dtype)
        return flat_jaxpr(compute, *(aval_of(x) for x in inputs), values)[0]

    def _may_break(self, equation: core.JaxprEqn) -> bool:
        """Return whether an equation may be the first to break a rule.

        Elementwise operations that only lead to a row statistic are no cause by themselves; the statistic is.
        """
        name = equation.primitive.name
        if name in ALIKE:
            return name == "transpose"
        return name not in ELEMENTWISE or id(equation) in self._path

    def _is_known_to_be_attention(self, nodes: Sequence[core.Var]) -> bool:
        """Return whether any value could be completed. Otherwise this is no attention, or axes are labelled wrongly."""
        return any(self._known.get((var, x)) for var in nodes for x in COMPLETIONS)
