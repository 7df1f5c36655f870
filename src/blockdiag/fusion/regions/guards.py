"""Values of a program without moves, casts, and what guards softmaxes against rows that see no key.

A softmax by hand takes the largest score away, so that the sum of its exponentials is at least 1 for rows that see a
key. Rows that see none are 0 here, so that it does not matter what else is chosen for these, is added or is a bound.
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
# What softmaxes may go through before they meet values.
_LINEAR = frozenset({
    *MOVES, *PASSES, "add", "div", "mul", "neg", "optimization_barrier", "select_n", "slice", "sub",
})  # fmt: skip
_COMPARISONS = {x: getattr(operator, x) for x in ("eq", "ne", "gt", "lt", "ge", "le")}
# What the sum of exponentials, of which the largest is 1, may lose.
_LOST = 1e-6


@dataclass(frozen=True)
class Powers:
    """What may be the numerator of a softmax.

    Attributes:
        var, dims: the value, and what its axes stand for.
        equation: the exponentials in it.
        mask: booleans where it is 0 otherwise, what their axes stand for, and whether they are true where it is not;
            None: the exponentials are the value.
    """

    var: object
    dims: tuple[Dim, ...]
    equation: core.JaxprEqn
    mask: tuple[object, tuple[Dim, ...], bool] | None


class NoMatch(Exception):
    """A value is not linear in softmaxes; the message, if there is one, says why."""


@kept
def linear_in_powers(jaxpr: core.Jaxpr) -> frozenset[object]:
    """The values that may be linear in softmaxes: what exponentials reach by what softmaxes may go through.

    It is found once for all products of a program: a model's residual stream goes through all of its layers, and what
    looks for softmaxes in each of these would look through all that are below.
    """
    found: set[object] = set()
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in POWERS or (name in _LINEAR and any(isinstance(x, core.Var) and x in found for x in equation.invars)):
            found.update(equation.outvars)
    return frozenset(found)


class Guards:
    """Values of one program, seen without moves, casts, and what guards against rows that see no key."""

    def __init__(self, jaxpr: core.Jaxpr, sizes: dict[str, int], batch: Sequence[str]) -> None:
        self.producers = producers_of(jaxpr)
        self._linear_in_powers = linear_in_powers(jaxpr)
        self._by_name = equations_by_name(jaxpr)
        self.sizes = sizes
        self.puller = Puller(jaxpr, sizes, batch)
        # The first of the weights that a slice has kept.
        self.first = 0

    def may_be_linear(self, var: object) -> bool:
        """Return whether a value may be linear in softmaxes."""
        return isinstance(var, core.Var) and var in self._linear_in_powers

    def named(self, name: str) -> Sequence[core.JaxprEqn]:
        """The program's equations of one primitive."""
        return self._by_name.get(name, ())

    def powers(self, var: object, dims: tuple[Dim, ...]) -> Powers | None:
        """Exponentials, perhaps with a mask; None where a value is none."""
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
                # Others are no masks, and their axes may not be these any more.
                if isinstance(found, core.Var) and aval_of(found).dtype == bool:
                    inner, mask = operands[one], (*self.through_moves(operands[other], given[other]), True)
        if mask is not None:
            equation = self.producer(self.skip(inner))
        if equation is None or equation.primitive.name not in POWERS:
            return None
        return Powers(var, dims, equation, mask)

    def unguarded(self, var: object, dims: tuple[Dim, ...], powers: Powers) -> tuple[object, tuple[Dim, ...]]:
        """A sum of exponentials without what guards quotients against sums of 0: others change nothing for rows that
        see a key."""
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
        """What a choice is of wherever a sum of exponentials is not 0; None where something else decides."""
        tested = self.tested_sum(choice.invars[0], powers)
        if tested is None:
            return None
        total, is_true = tested
        kept, other = choice.invars[2 if is_true else 1], choice.invars[1 if is_true else 2]
        is_number = isinstance(self.skip_moves(other), core.Literal)
        return kept if is_number and self.is_same(self.skip_moves(kept), total) else None

    def tested_sum(self, var: object, powers: Powers) -> tuple[object, bool] | None:
        """The value that is compared with 0, or with what sums exceed, and what the comparison says of sums."""
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
        """Return whether the sum of a row that sees a key is larger than a number."""
        return bound == 0 or (0 < bound < 1 and self._has_largest(powers))

    def is_same(self, left: object, right: object, depth: int = 4) -> bool:
        """Return whether two values are computed in the same way from the same, as far as that is looked at."""
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
        """Return whether two values are the same, along the same axes."""
        return other is not None and one[1] == other[1] and self.is_same(one[0], other[0])

    def is_negligible(self, var: object, powers: Powers) -> bool:
        """Return whether a number is lost beside a sum of exponentials of which the largest is 1."""
        term = self.skip_moves(var)
        if not isinstance(term, core.Literal) or not self._has_largest(powers):
            return False
        # In the dtype that the sum has in the function; kernels' exponentials in float32 are no better than this.
        dtype = aval_of(powers.equation.outvars[0]).dtype
        lost = float(jnp.finfo(dtype).eps) / 2
        return 0 <= float(term.val) <= (lost if dtype == jnp.float64 else max(lost, _LOST))

    def _has_largest(self, powers: Powers) -> bool:
        """Return whether the largest exponential of a row that sees a key is 1: the largest score has been taken away."""
        scores, dims = powers.equation.invars[0], powers.dims
        shift = self.shift(scores, dims)
        if shift is None:
            return False
        var, given = shift
        largest = self.producer(var)
        while largest is not None and largest.primitive.name in ("select_n", "max", "stop_gradient"):
            # Where nothing is seen, another number may be taken away.
            kept = self._unless_infinite(largest)
            if kept is None:
                return False
            var, given = self.through_moves(kept, broadcast_dims(kept, aval_of(largest.outvars[0]).shape, given))
            largest = self.producer(var)
        if largest is None or largest.primitive.name != "reduce_max":
            return False
        scores, compared = self.skip(self.unshifted(scores, dims)), self.skip(largest.invars[0])
        if powers.mask is not None:
            # The largest score must be one that the mask leaves.
            seen = self._seen(compared, dims, powers.mask)
            if seen is None:
                return False
            compared = compared if self.is_same(compared, scores) else seen
        return self.is_same(compared, scores) and is_along_keys(largest, given, dims)

    def _seen(self, var: object, dims: tuple[Dim, ...], mask: tuple[object, tuple[Dim, ...], bool]) -> object:
        """What a value is where a mask of exponentials leaves them, if it hides keys elsewhere; None of others."""
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
        """What a value is wherever that is finite and larger than what masks; None where something else decides."""
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
        """What was subtracted from scores, and its dims, where it is the same for all keys; None where nothing was.

        A softmax is the same whatever it is, so that it may have a derivative or not.
        """
        shifted = self.producer(self.skip(var))
        if shifted is None or shifted.primitive.name != "sub":
            return None
        below = broadcast_dims(shifted.invars[1], aval_of(shifted.outvars[0]).shape, dims)
        found = self.through_moves(shifted.invars[1], below, passes)
        return None if COLUMNS in labels_of(found[1]) else found

    def unshifted(self, var: object, dims: tuple[Dim, ...], passes: Sequence[str] = PASSES) -> object:
        """What `shift` was subtracted from, or the value itself."""
        shifted = self.producer(self.skip(var))
        return var if shifted is None or self.shift(var, dims, passes) is None else shifted.invars[0]

    @staticmethod
    def has_mask(equation: core.JaxprEqn) -> bool:
        """Return whether an equation chooses between two values."""
        return equation.primitive.name == "select_n" and len(equation.invars) == 3

    def is_zero(self, var: object) -> bool:
        inner = self.skip_moves(var)
        return isinstance(inner, core.Literal) and bool(np.all(np.asarray(inner.val) == 0))

    @staticmethod
    def is_cast(equation: core.JaxprEqn, passes: Sequence[str] = CASTS) -> bool:
        """Return whether an equation gives the same numbers, but for rounding of floating ones."""
        name = equation.primitive.name
        if name != "convert_element_type" or name not in passes:
            return name in passes
        given, wanted = aval_of(equation.invars[0]).dtype, equation.params["new_dtype"]
        return not jnp.issubdtype(given, jnp.floating) or bool(jnp.issubdtype(wanted, jnp.floating))

    def skip_moves(self, var: object, passes: Sequence[str] = CASTS) -> object:
        """What a value is made of but for its shape and dtype."""
        while (equation := self.producer(var)) is not None and (
            equation.primitive.name in MOVES or self.is_cast(equation, passes)
        ):
            var = equation.invars[0]
        return var

    def through_moves(
        self, var: object, dims: tuple[Dim, ...], passes: Sequence[str] = CASTS
    ) -> tuple[object, tuple[Dim, ...]]:
        """What a value is made of but for its shape and dtype, and its dims."""
        while (equation := self.producer(var)) is not None:
            name = equation.primitive.name
            if name in MOVES:
                dims = self.moved(equation, dims)
            elif not self.is_cast(equation, passes):
                break
            var = equation.invars[0]
        return var, dims

    def skip(self, var: object) -> object:
        """What a value is made of but for its dtype; a `stop_gradient` would be lost."""
        while (equation := self.producer(var)) is not None and self.is_cast(equation):
            var = equation.invars[0]
        return var

    def moved(self, equation: core.JaxprEqn, dims: tuple[Dim, ...]) -> tuple[Dim, ...]:
        try:
            return self.puller.moved(equation, dims)
        except Unpullable:
            raise NoMatch from None

    def producer(self, var: object) -> core.JaxprEqn | None:
        return self.producers.get(var) if isinstance(var, core.Var) else None


def key_axes(dims: tuple[Dim, ...]) -> list[int]:
    """The axes along which keys lie."""
    return [axis for axis, dim in enumerate(dims) if COLUMNS in labels_of((dim,))]


def is_along_keys(reduction: core.JaxprEqn, given: tuple[Dim, ...], dims: tuple[Dim, ...]) -> bool:
    """Return whether a reduction is of all keys and of nothing else.

    Args:
        given, dims: of its result, and of what it reduces.
    """
    axes = key_axes(dims)
    if any(labels_of((dims[axis],)) != {COLUMNS} for axis in axes):
        return False
    rest = tuple(dim for axis, dim in enumerate(dims) if axis not in axes)
    return sorted(reduction.params["axes"]) == axes and given == rest
