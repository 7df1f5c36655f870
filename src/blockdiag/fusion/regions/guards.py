"""Look through moves, casts, and the guards of softmaxes for rows that see no key.

A softmax by hand subtracts the row maximum, so the sum of its exponentials is at least 1 for rows that see a key.
Rows that see no key are 0 in this library. Guards that affect only such rows can therefore be ignored: selects,
small added numbers, and lower bounds of the sum.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from blockdiag.fusion.frontend.trace import aval_of, kept
from blockdiag.fusion.ir.factors import NO_KEY
from blockdiag.fusion.ir.tree import COLUMNS, Dim, Unpullable
from blockdiag.fusion.regions.axis_labels import MOVES, broadcast_dims, equations_by_name, labels_of, producers_of
from blockdiag.fusion.regions.operand_indexing import Puller

CASTS = ("convert_element_type", "copy", "name", "pvary", "reduce_precision", "reshard", "sharding_constraint")
PASSES = (*CASTS, "stop_gradient")
POWERS = ("exp", "exp2")
# Operations that may stand between a softmax and its product with values.
_LINEAR = frozenset({
    *MOVES, *PASSES, "add", "div", "mul", "neg", "optimization_barrier", "select_n", "slice", "sub",
})  # fmt: skip
_COMPARISONS = {x: getattr(operator, x) for x in ("eq", "ne", "gt", "lt", "ge", "le")}
# Relative error that a sum of exponentials may have if the largest of them is 1.
_LOST = 1e-6


@dataclass(frozen=True)
class Powers:
    """A possible numerator of a softmax: exponentials, perhaps masked by 0.

    Attributes:
        var, dims: the value, and the labels of its axes.
        equation: the equation of the exponentials.
        mask: the predicate, the labels of its axes, and whether it is true where the exponentials are kept; None
            without a mask.
    """

    var: object
    dims: tuple[Dim, ...]
    equation: core.JaxprEqn
    mask: tuple[object, tuple[Dim, ...], bool] | None


class NoMatch(Exception):
    """A value is not linear in softmaxes; the message, if there is one, says why."""


@kept
def linear_in_powers(jaxpr: core.Jaxpr) -> frozenset[object]:
    """Return the values that may be linear in softmaxes: those that exponentials reach through linear operations.

    The set is computed once for all products of a program. A model's residual stream passes through all of its layers,
    so that a search from each product would visit all layers below it again.
    """
    found: set[object] = set()
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in POWERS or (name in _LINEAR and any(isinstance(x, core.Var) and x in found for x in equation.invars)):
            found.update(equation.outvars)
    return frozenset(found)


class Guards:
    """Queries about values of one program that look through moves, casts and guards for rows without keys."""

    def __init__(self, jaxpr: core.Jaxpr, sizes: dict[str, int], batch: Sequence[str]) -> None:
        self.producers = producers_of(jaxpr)
        self._linear_in_powers = linear_in_powers(jaxpr)
        self._by_name = equations_by_name(jaxpr)
        self.sizes = sizes
        self.puller = Puller(jaxpr, sizes, batch)
        # The first key that the current slice of weights keeps.
        self.first = 0

    def may_be_linear(self, var: object) -> bool:
        """Return whether a value may be linear in softmaxes."""
        return isinstance(var, core.Var) and var in self._linear_in_powers

    def named(self, name: str) -> Sequence[core.JaxprEqn]:
        """Return the program's equations of one primitive."""
        return self._by_name.get(name, ())

    def powers(self, var: object, dims: tuple[Dim, ...]) -> Powers | None:
        """Return a value as exponentials, perhaps masked, or None if it is anything else."""
        var = self.skip(var)
        equation, mask = self.producer(var), None
        if equation is None:
            return None
        operands, shape, inner = equation.invars, aval_of(equation.outvars[0]).shape, None
        is_product = equation.primitive.name == "mul"
        given = [broadcast_dims(x, shape, dims) for x in operands] if is_product or self.has_mask(equation) else []
        if self.has_mask(equation):
            zeros = [i for i in (1, 2) if self.is_zero(operands[i])]
            if len(zeros) == 1:
                inner, mask = operands[3 - zeros[0]], (operands[0], given[0], zeros[0] == 1)
        elif is_product:
            for one, other in ((0, 1), (1, 0)):
                found = self.skip_moves(operands[other])
                # Only boolean factors are masks. The axes of other factors need not match, so they are not followed.
                if isinstance(found, core.Var) and aval_of(found).dtype == bool:
                    inner, mask = operands[one], (*self.through_moves(operands[other], given[other]), True)
        if mask is not None:
            equation = self.producer(self.skip(inner))
        if equation is None or equation.primitive.name not in POWERS:
            return None
        return Powers(var, dims, equation, mask)

    def unguarded(self, var: object, dims: tuple[Dim, ...], powers: Powers) -> tuple[object, tuple[Dim, ...]]:
        """Return a sum of exponentials below guards against division by 0, and its dims.

        Such guards change nothing for rows that see a key.
        """
        while True:
            var, dims = self.through_moves(var, dims)
            equation = self.producer(var)
            if equation is None:
                return var, dims
            kept = None
            if equation.primitive.name == "max":
                for one, other in ((0, 1), (1, 0)):
                    least = self.skip_moves(equation.invars[other])
                    if isinstance(least, core.Literal) and self._is_below_sums(float(least.val), powers):
                        kept = equation.invars[one]
            elif self.has_mask(equation):
                kept = self._unless_zero(equation, powers)
            if kept is None:
                return var, dims
            var, dims = kept, broadcast_dims(kept, aval_of(equation.outvars[0]).shape, dims)

    def _unless_zero(self, choice: core.JaxprEqn, powers: Powers) -> object:
        """Return the operand that a select picks wherever a sum of exponentials is not 0, or None for other selects."""
        tested = self.tested_sum(choice.invars[0], powers)
        if tested is None:
            return None
        total, is_true = tested
        kept, other = choice.invars[2 if is_true else 1], choice.invars[1 if is_true else 2]
        is_number = isinstance(self.skip_moves(other), core.Literal)
        return kept if is_number and self.is_same(self.skip_moves(kept), total) else None

    def tested_sum(self, var: object, powers: Powers) -> tuple[object, bool] | None:
        """Return the value that a predicate compares with 0, or with another bound below all sums of exponentials.

        Returns:
            The value, and what the predicate gives for a sum of a row that sees a key; None for other predicates.
        """
        test = self.producer(self.skip_moves(var))
        if test is None or test.primitive.name not in _COMPARISONS:
            return None
        compare = _COMPARISONS[test.primitive.name]
        for one, other in ((0, 1), (1, 0)):
            bound = self.skip_moves(test.invars[other])
            if not isinstance(bound, core.Literal) or not self._is_below_sums(float(bound.val), powers):
                continue
            of_zero, of_sum = (compare(x, float(bound.val)) for x in (0.0, 1.0))
            if one == 1:
                of_zero, of_sum = (compare(float(bound.val), x) for x in (0.0, 1.0))
            return (self.skip_moves(test.invars[one]), of_sum) if of_zero != of_sum else None
        return None

    def _is_below_sums(self, bound: float, powers: Powers) -> bool:
        """Return whether the sum of every row that sees a key exceeds a bound."""
        return bound == 0 or (0 < bound < 1 and self._has_largest(powers))

    def is_same(self, left: object, right: object, depth: int = 4) -> bool:
        """Return whether two values are computed in the same way from the same operands.

        Args:
            depth: how many equations deep they are compared; below, they must be the same variable.
        """
        if isinstance(left, core.Literal) and isinstance(right, core.Literal):
            return bool(np.array_equal(left.val, right.val))
        one, other = self.producer(left), self.producer(right)
        if left is right or one is None or other is None or not depth:
            return left is right
        is_alike = one.primitive is other.primitive and one.params == other.params and not one.effects
        if not is_alike or len(one.outvars) != 1 or len(one.invars) != len(other.invars):
            return False
        return all(self.is_same(x, y, depth - 1) for x, y in zip(one.invars, other.invars, strict=True))

    def is_same_at(self, one: tuple[object, tuple[Dim, ...]], other: tuple[object, tuple[Dim, ...]] | None) -> bool:
        """Return whether two values are the same and have the same dims."""
        return other is not None and one[1] == other[1] and self.is_same(one[0], other[0])

    def is_negligible(self, var: object, powers: Powers) -> bool:
        """Return whether adding a number to a sum of exponentials changes nothing, because the largest of them is 1."""
        term = self.skip_moves(var)
        if not isinstance(term, core.Literal) or not self._has_largest(powers):
            return False
        # The bound is half an epsilon of the function's dtype, but at least the error of kernels' float32 exponentials.
        dtype = aval_of(powers.equation.outvars[0]).dtype
        lost = float(jnp.finfo(dtype).eps) / 2
        return 0 <= float(term.val) <= (lost if dtype == jnp.float64 else max(lost, _LOST))

    def _has_largest(self, powers: Powers) -> bool:
        """Return whether the row maximum is subtracted, so the largest exponential of a row with keys is 1."""
        scores, dims = powers.equation.invars[0], powers.dims
        shift = self.shift(scores, dims)
        if shift is None:
            return False
        var, given = shift
        largest = self.producer(var)
        while largest is not None and largest.primitive.name in ("select_n", "max", "stop_gradient"):
            # For rows without keys another number may be subtracted.
            kept = self._unless_infinite(largest)
            if kept is None:
                return False
            var, given = self.through_moves(kept, broadcast_dims(kept, aval_of(largest.outvars[0]).shape, given))
            largest = self.producer(var)
        if largest is None or largest.primitive.name != "reduce_max":
            return False
        scores, compared = self.skip(self.unshifted(scores, dims)), self.skip(largest.invars[0])
        if powers.mask is not None:
            # The maximum must be taken over scores that the mask keeps.
            seen = self._seen(compared, dims, powers.mask)
            if seen is None:
                return False
            compared = compared if self.is_same(compared, scores) else seen
        return self.is_same(compared, scores) and is_along_keys(largest, given, dims)

    def _seen(self, var: object, dims: tuple[Dim, ...], mask: tuple[object, tuple[Dim, ...], bool]) -> object:
        """Return the operand of a select that uses the exponentials' mask and hides all other keys, or None."""
        choice = self.producer(var)
        if choice is None or not self.has_mask(choice):
            return None
        kept = 2 if mask[2] else 1
        hidden = self.skip_moves(choice.invars[3 - kept])
        hides = isinstance(hidden, core.Literal) and float(hidden.val) <= NO_KEY
        predicate = choice.invars[0]
        test, of_test = self.through_moves(predicate, broadcast_dims(predicate, aval_of(choice.outvars[0]).shape, dims))
        other, of_other = self.through_moves(*mask[:2])
        is_mask = of_test == of_other and self.is_same(test, other)
        return self.skip(choice.invars[kept]) if hides and is_mask else None

    def _unless_infinite(self, equation: core.JaxprEqn) -> object:
        """Return the operand that a value equals wherever that operand is finite and not a mask value, or None."""
        operands = equation.invars
        match equation.primitive.name:
            case "stop_gradient":
                return operands[0]
            case "max":
                least = [self.skip_moves(x) for x in operands]
                pairs = zip(operands, least[::-1], strict=True)
                kept = [x for x, y in pairs if isinstance(y, core.Literal) and float(y.val) <= NO_KEY]
                return kept[0] if kept else None
            case "select_n" if len(operands) == 3:
                test = self.producer(self.skip_moves(operands[0]))
                if test is None or test.primitive.name not in ("is_finite", "eq", "ne", "gt", "lt"):
                    return None
                tested = [self.skip_moves(x, (*CASTS, "abs")) for x in test.invars]
                bounds = [x for x in tested if isinstance(x, core.Literal)]
                if test.primitive.name != "is_finite" and not (len(bounds) == 1 and np.isinf(bounds[0].val)):
                    return None
                kept = operands[1 if test.primitive.name == "eq" else 2]
                return kept if any(self.is_same(x, self.skip_moves(kept)) for x in tested) else None
        return None

    def shift(
        self, var: object, dims: tuple[Dim, ...], passes: Sequence[str] = PASSES
    ) -> tuple[object, tuple[Dim, ...]] | None:
        """Return the value subtracted from scores, which is the same for all keys, and its dims.

        A softmax does not depend on the shift, so the shift may have a derivative or not.

        Returns:
            None if nothing is subtracted, or the value varies along keys.
        """
        shifted = self.producer(self.skip(var))
        if shifted is None or shifted.primitive.name != "sub":
            return None
        below = broadcast_dims(shifted.invars[1], aval_of(shifted.outvars[0]).shape, dims)
        found = self.through_moves(shifted.invars[1], below, passes)
        return None if COLUMNS in labels_of(found[1]) else found

    def unshifted(self, var: object, dims: tuple[Dim, ...], passes: Sequence[str] = PASSES) -> object:
        """Return the operand that `shift` is subtracted from, or the value itself without a shift."""
        shifted = self.producer(self.skip(var))
        return var if shifted is None or self.shift(var, dims, passes) is None else shifted.invars[0]

    @staticmethod
    def has_mask(equation: core.JaxprEqn) -> bool:
        """Return whether an equation selects between two values."""
        return equation.primitive.name == "select_n" and len(equation.invars) == 3

    def is_zero(self, var: object) -> bool:
        """Return whether a value is the literal 0 everywhere."""
        inner = self.skip_moves(var)
        return isinstance(inner, core.Literal) and bool(np.all(np.asarray(inner.val) == 0))

    @staticmethod
    def is_cast(equation: core.JaxprEqn, passes: Sequence[str] = CASTS) -> bool:
        """Return whether an equation keeps the values of its operand, up to rounding of floats."""
        name = equation.primitive.name
        if name != "convert_element_type" or name not in passes:
            return name in passes
        given, wanted = aval_of(equation.invars[0]).dtype, equation.params["new_dtype"]
        return not jnp.issubdtype(given, jnp.floating) or bool(jnp.issubdtype(wanted, jnp.floating))

    def skip_moves(self, var: object, passes: Sequence[str] = CASTS) -> object:
        """Return the value below moves and casts."""
        while (equation := self.producer(var)) is not None and (
            equation.primitive.name in MOVES or self.is_cast(equation, passes)
        ):
            var = equation.invars[0]
        return var

    def through_moves(
        self, var: object, dims: tuple[Dim, ...], passes: Sequence[str] = CASTS
    ) -> tuple[object, tuple[Dim, ...]]:
        """Return the value below moves and casts, and its dims."""
        while (equation := self.producer(var)) is not None:
            name = equation.primitive.name
            if name in MOVES:
                dims = self.moved(equation, dims)
            elif not self.is_cast(equation, passes):
                break
            var = equation.invars[0]
        return var, dims

    def skip(self, var: object) -> object:
        """Return the value below casts. A `stop_gradient` is not skipped, because it changes the derivative."""
        while (equation := self.producer(var)) is not None and self.is_cast(equation):
            var = equation.invars[0]
        return var

    def moved(self, equation: core.JaxprEqn, dims: tuple[Dim, ...]) -> tuple[Dim, ...]:
        """Return the dims of the operand of an equation that moves elements.

        Raises:
            NoMatch: an axis of the operand is a part of a label.
        """
        try:
            return self.puller.moved(equation, dims)
        except Unpullable:
            raise NoMatch from None

    def producer(self, var: object) -> core.JaxprEqn | None:
        """Return the equation that computes a value, or None for arguments and literals."""
        return self.producers.get(var) if isinstance(var, core.Var) else None


def key_axes(dims: tuple[Dim, ...]) -> list[int]:
    """Return the axes along which keys lie."""
    return [axis for axis, dim in enumerate(dims) if COLUMNS in labels_of((dim,))]


def is_along_keys(reduction: core.JaxprEqn, given: tuple[Dim, ...], dims: tuple[Dim, ...]) -> bool:
    """Return whether a reduction is along all keys and no other axis.

    Args:
        given, dims: the dims of its result, and those of its operand.
    """
    axes = key_axes(dims)
    if any(labels_of((dims[axis],)) != {COLUMNS} for axis in axes):
        return False
    rest = tuple(dim for axis, dim in enumerate(dims) if axis not in axes)
    return sorted(reduction.params["axes"]) == axes and given == rest
