"""Return whether the beginning of an attention can be fused, with the rest of another one after it."""

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
"""Return whether a flat program has attention that is fused, whose values are made of its last argument."""

type _Complete = Callable[[Any, Any], Any]
"""A result from a value and from values of keys."""

type Completion = Callable[[Any, tuple[Dim, ...], int], list[tuple[_Complete, tuple[int, ...]]]]
"""What may follow a value, with the shape of the values of keys.

It is made from the value's type, what its axes stand for, and the number of keys.
"""

_COLUMNS_OF_VALUES, _MOST_SINKS = 16, 8

_MOST_AFTER = 12
"""How many values after one that cannot be completed are tried: a softmax by hand takes five."""

_APART = frozenset({"dot_general", "conv_general_dilated", "scan", "while", "cond"})
"""What makes arrays that scores may be combined with, which are arguments of a program that is cut off."""


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
            # Sinks have no values: they are before the keys, or after them.
            ways += [(functools.partial(complete, first), shape(count)) for first in (0, merged[axis] - count)]
        return ways

    return completed


AS_SCORES = _completion(lambda value, axis: jax.nn.softmax(value, axis=axis))
# Unlike a softmax, this is another one where numbers of rows are added to scores.
_AS_BOUNDED = _completion(lambda value, axis: jax.nn.softmax(jnp.tanh(value), axis=axis))
AS_WEIGHTS = _completion(lambda value, axis: value)
AS_POWERS = _completion(lambda value, axis: value / value.sum(axis, keepdims=True))
COMPLETIONS = (AS_SCORES, AS_WEIGHTS, AS_POWERS)


class Trials(Candidate):
    """A candidate that is cut after its values.

    Args:
        can_fuse: decides about programs that are cut.
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
        """The first value that cannot be completed, nor anything that is made of it."""
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
        """What a value that can be completed is made of.

        A softmax is the same whatever numbers of rows are added to its scores, so that these may be wrong.
        """
        pairs = self._pair_ancestors(var)
        if self._ancestors[var] <= pairs or not self._known.get((var, AS_SCORES)):
            return self._ancestors[var]
        whole = [_AS_BOUNDED if x is AS_SCORES else x for x in self._likely(var, are_all=True)]
        return self._ancestors[var] if self._is_completed(var, whole) else pairs

    def _pair_ancestors(self, var: core.Var) -> set[core.Var]:
        """What a value is made of, but for numbers of rows: a softmax is the same without them."""
        return {x for equation in self._pair_path(var) for x in equation.outvars}

    @functools.cached_property
    def _simple(self) -> set[core.Var]:
        """What is made of products element by element, and of nothing else that is made of scores."""
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
        """What may follow a value, the likeliest first.

        Args:
            are_all: even what is unlikely.
        """
        if self._has_powers(var):
            rest = (AS_WEIGHTS, AS_POWERS, AS_SCORES)
        elif self._feeds_powers(var):
            # What goes into a softmax may be weights by chance, such as scores over the root of their squares' sum.
            rest = (AS_SCORES,)
        else:
            rest = (AS_SCORES, AS_WEIGHTS, AS_POWERS)
        return rest if are_all else rest[:2]

    def _feeds_powers(self, var: core.Var) -> bool:
        """Return whether the weights are made of exponentials of a value."""
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
        """Return whether a value is fused with the rest of an attention after it.

        Args:
            skipped: values in the place of which others are taken.
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
        """The program that computes a value, completed by a product with values of a shape.

        Args:
            skipped: values in the place of which others are taken; None stands for the values of keys.
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
                # Factors of scores are arguments, whatever else is made of what they are made of.
                if id(equation) in needed and equation.outvars[0] not in inputs:
                    results = bind(equation, [operand(known, given[-1], x) for x in equation.invars])
                    known |= dict(zip(equation.outvars, results, strict=True))
            return complete(known[var], given[-1])

        dtype = aval_of(self._product.outvars[0]).dtype
        values = jax.ShapeDtypeStruct(shape, dtype)
        return flat_jaxpr(compute, *(aval_of(x) for x in inputs), values)[0]

    def _may_break(self, equation: core.JaxprEqn) -> bool:
        """Return whether an equation may be the first to break a rule.

        What works element by element before a number of a row is made is no reason by itself: that number is.
        """
        name = equation.primitive.name
        if name in ALIKE:
            return name == "transpose"
        return name not in ELEMENTWISE or id(equation) in self._path

    def _is_known_to_be_attention(self, nodes: Sequence[core.Var]) -> bool:
        """Return whether anything can be completed: else this is no attention, or axes stand for something else."""
        return any(self._known.get((var, x)) for var in nodes for x in COMPLETIONS)
