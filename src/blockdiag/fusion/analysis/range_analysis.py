"""Range analysis of a tile program: interval arithmetic over its equations.

The interval of a value bounds its elements in every tile of the score matrix. The bounds show which tiles are dead
before any score is computed.

Intervals may be too wide but never too narrow. They hold under any rounding: fused multiply-adds, float32
intermediates, subnormals flushed to zero and GPU approximations. No interval contains NaN. A value that could be NaN,
such as the difference of two infinities, is unknown, and so is every value computed from it. A tile that is called dead
is therefore dead whatever its unknown leaves contain.

NumPy intervals stay NumPy, in float64 and int64, even while JAX traces, so constant masks are resolved at trace time.
If any operand is a JAX array, the arithmetic runs in JAX, in the widest dtypes that `jax_enable_x64` allows. Where XLA
flushes subnormals to zero, so do the bounds.
"""

import functools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jaxtyping import DTypeLike

from blockdiag.fusion.analysis.interval import (
    FLOATS,
    Interval,
    carrier_of,
    ends_of,
    is_bool,
    is_carried,
    lifted,
    limits_of,
    module_of,
    unknown,
)
from blockdiag.fusion.frontend.trace import body_of

type Array = jax.Array | np.ndarray
type Role = Literal["query", "key", "row", "column", "score", "scalar"]
# Takes an equation and the intervals of its operands. Returning None means that nothing is known about the result.
type Rule = Callable[..., Any]

# A sum or product beyond this fraction of an integer dtype's limits, estimated in float32, may have overflowed.
_BELOW_OVERFLOW = 1 - 2.0**-20
# Relative and absolute error of the fastest GPU approximations of transcendental functions (tanh.approx: 2^-11).
_APPROXIMATION = 2.0**-10
_APPROXIMATION_AT_ZERO = 2.0**-20


def bounds(
    jaxpr: core.ClosedJaxpr, leaves: Sequence[Interval], *, unknown_is_one: bool = False
) -> tuple[Interval, ...]:
    """Return the interval of each output of a tile program.

    Arguments:
        jaxpr: elementwise equations on two-dimensional tiles. Results of other primitives are unknown.
        leaves: one interval per input, [*batch, nq or 1, nk or 1]. The interval of a query or key matrix bounds all
            features. The product of two such matrices is bounded if both are.
        unknown_is_one: treat products and unknown results as 1. The result then lies within the usual interval. It
            shows that the usual interval is not confined to numbers which this one excludes.
    """
    known, rank = _intervals(jaxpr, leaves, unknown_is_one=unknown_is_one)
    return tuple(_read(known, result, rank) for result in jaxpr.jaxpr.outvars)


def predicates(jaxpr: core.ClosedJaxpr, leaves: Sequence[Interval]) -> dict[int, Interval]:
    """Return the interval of each boolean predicate of a `select_n`, keyed by the index of that equation.

    Only equations of the program itself count, not those of the functions it calls. The arguments are those of
    `bounds`.
    """
    known, rank = _intervals(jaxpr, leaves)
    return {
        index: _read(known, equation.invars[0], rank)
        for index, equation in enumerate(jaxpr.jaxpr.eqns)
        if equation.primitive.name == "select_n" and is_bool(_dtype(equation.invars[0]))
    }


def tile_states(score: Interval, *, dead_below: float = -1e9) -> Array:
    """Return which tiles must be computed: 0 where no score exceeds `dead_below`, else 1.

    The result is int8 [*batch, nq or 1, nk or 1]. An axis that the interval does not depend on has length 1.
    """
    xp = module_of((score,))
    shape = np.broadcast_shapes(score.low.shape, score.high.shape)
    return xp.broadcast_to(score.high > dead_below, shape).astype(np.int8)


def tile_extent(array: Array, role: Role, tile_rows: int, tile_columns: int) -> Interval:
    """Return the least and the greatest element of a leaf in each tile, [*batch, nq or 1, nk or 1].

    Arguments:
        array: bool, integer or floating; "row" [*batch, T], "column" [*batch, S], "score" [*batch, T, S],
            "scalar" [*batch], "query" [*batch, T, F], "key" [*batch, S, F]. NaN makes its tile unknown.
        tile_rows, tile_columns: the size of a tile. T and S need not be multiples; the last tile may be smaller.
    """
    xp = np if isinstance(array, np.ndarray | np.generic) else jnp
    dtype, array = array.dtype, xp.asarray(array)
    if not is_carried(xp, dtype):
        return unknown(dtype)
    if xp is np and dtype not in (np.bool_, np.float32) and dtype in FLOATS:
        array = array.astype(np.float64)
    ends = []
    for reduce in (xp.all, xp.any) if is_bool(dtype) else (xp.min, xp.max):
        end = (reduce(array, axis=-1) if role in ("query", "key") else array)[_PLACES[role]]
        for axis, tile in ((-2, tile_rows), (-1, tile_columns)):
            end = _reduce_tiles(xp, end, axis, tile, reduce)
        ends.append(end)
    return _enter(Interval(*ends), dtype, ends[0].ndim)


# Index expressions that place the axes of a leaf in [*batch, T, S].
_PLACES = {
    "score": (...,),
    **dict.fromkeys(("query", "row"), (..., None)),
    **dict.fromkeys(("key", "column"), (..., None, slice(None))),
    "scalar": (..., None, None),
}


def _reduce_tiles(xp: Any, values: Any, axis: int, tile: int, reduce: Callable[..., Any]) -> Any:
    """Reduce runs of `tile` elements of an axis."""
    values = xp.swapaxes(values, axis, -1)
    length = values.shape[-1]
    tile = max(1, min(tile, length))
    count = -(-length // tile)
    # Padding repeats the last element, which changes neither minimum nor maximum.
    values = xp.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, count * tile - length)], mode="edge")
    return xp.swapaxes(reduce(values.reshape(*values.shape[:-1], count, tile), axis=-1), axis, -1)


def _enter(interval: Interval, dtype: DTypeLike, rank: int) -> Interval:
    """Convert a given interval to the carrier dtype and the rank that the rules expect."""
    xp = module_of((interval,))
    ends = [xp.asarray(end) for end in (interval.low, interval.high)]
    integers = not is_bool(dtype) and jnp.issubdtype(dtype, jnp.integer)
    if not is_carried(xp, dtype) or (integers and any(jnp.issubdtype(end.dtype, jnp.floating) for end in ends)):
        return unknown(dtype, rank)
    ends = [end.astype(carrier_of(xp, dtype)).reshape((1,) * (rank - end.ndim) + end.shape) for end in ends]
    return _settled(xp, np.dtype(dtype), Interval(*ends), ())


def _constant(value: Any, dtype: DTypeLike, rank: int) -> Interval:
    """Return the interval of a constant of the program."""
    traced = isinstance(value, jax.core.Tracer) or (isinstance(value, jax.Array) and not value.is_fully_addressable)
    xp = jnp if traced else np
    if math.prod(np.shape(value)) == 0 or not is_carried(xp, dtype):
        return unknown(dtype, rank)
    value = xp.asarray(value).astype(carrier_of(xp, dtype))
    ends = (value.all(), value.any()) if is_bool(dtype) else (value.min(), value.max())
    return _enter(Interval(*ends), dtype, rank)


def _dtype(operand: Any) -> Any:
    """Return the dtype of a variable or a literal."""
    return getattr(operand.aval, "dtype", np.dtype(np.float32))


def _read(known: dict[core.Var, Interval], operand: Any, rank: int) -> Interval:
    is_constant = isinstance(operand, core.Literal)
    return _constant(operand.val, _dtype(operand), rank) if is_constant else known[operand]


def _intervals(
    jaxpr: core.ClosedJaxpr, leaves: Sequence[Interval], *, unknown_is_one: bool = False
) -> tuple[dict[core.Var, Interval], int]:
    """Return the interval of every variable of a program, and the common rank of these intervals."""
    variables = jaxpr.jaxpr.invars
    if len(leaves) != len(variables):
        raise ValueError(f"expected an interval for each of {len(variables)} inputs of the program, got {len(leaves)}")
    rank = max((2, *(max(np.ndim(leaf.low), np.ndim(leaf.high)) for leaf in leaves)))
    given = [_enter(leaf, _dtype(variable), rank) for leaf, variable in zip(leaves, variables, strict=True)]
    return _walk(jaxpr, given, rank, unknown_is_one), rank


def _walk(
    jaxpr: core.ClosedJaxpr, operands: Sequence[Interval], rank: int, unknown_is_one: bool = False
) -> dict[core.Var, Interval]:
    """Return the interval of every variable of a program, given those of its inputs."""
    known = {
        var: _constant(value, _dtype(var), rank) for var, value in zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True)
    }
    known |= dict(zip(jaxpr.jaxpr.invars, operands, strict=True))
    for equation in jaxpr.jaxpr.eqns:
        given = [_read(known, operand, rank) for operand in equation.invars]
        body = body_of(equation)
        if body is not None:
            inner = _walk(body, given, rank, unknown_is_one)
            results = [_read(inner, result, rank) for result in body.jaxpr.outvars]
        elif equation.primitive.name == "scan":
            results = _loop(equation, given, rank, unknown_is_one)
        else:
            with np.errstate(all="ignore"):
                results = _results(equation, given, rank, unknown_is_one)
        known |= dict(zip(equation.outvars, results, strict=True))
    return known


def _loop(
    equation: core.JaxprEqn, operands: Sequence[Interval], rank: int, unknown_is_one: bool = False
) -> list[Interval]:
    """Return the intervals of the results of a scan, whose carry comes last among its operands.

    Floating-point accumulators are bounded if the body only adds to each of them; otherwise nothing is known about any
    result. Carried integers, such as loop counters, are always unknown.
    """
    program: core.ClosedJaxpr = equation.params["jaxpr"]
    results, length = equation.outvars, equation.params["length"]
    starts, carried = operands[-len(results) :], program.jaxpr.invars[-len(results) :]
    nothing = _nothing(equation, rank, unknown_is_one)
    is_sum = [jnp.issubdtype(_dtype(var), jnp.floating) for var in results]
    if not all(_is_added(program.jaxpr, var, place) for place, var in enumerate(carried) if is_sum[place]):
        return nothing
    zero = Interval(*[np.zeros((1,) * rank)] * 2)
    steps = [zero if is_one else other for is_one, other in zip(is_sum, nothing, strict=True)]
    each = _walk(program, [*operands[: -len(results)], *steps], rank, unknown_is_one)
    found = []
    for place, var in enumerate(results):
        ends = [starts[place], _read(each, program.jaxpr.outvars[place], rank)]
        xp, dtype = module_of(ends), np.dtype(_dtype(var))
        if not is_sum[place] or not is_carried(xp, dtype):
            found.append(nothing[place])
            continue
        first, step = ends if xp is np else map(lifted, ends)
        # Each addition rounds the partial sum.
        error = xp.maximum(abs(step.low), abs(step.high)) * (length**2 * float(jnp.finfo(dtype).eps))
        total = Interval(first.low + step.low * length - error, first.high + step.high * length + error)
        found.append(_settled(xp, dtype, total, ends))
    return found


def _is_added(body: core.Jaxpr, var: core.Var, place: int) -> bool:
    """Return whether a loop body uses a carried variable only to add something to it."""
    result = body.outvars[place]
    made = next((x for x in body.eqns if result in x.outvars), None) if isinstance(result, core.Var) else None
    uses = [x for x in (*(y for equation in body.eqns for y in equation.invars), *body.outvars) if x is var]
    return made is not None and made.primitive.name == "add" and var in made.invars and len(uses) == 1


@dataclass(frozen=True)
class _Equation:
    """Context of a rule: the array module, the result dtype and the equation itself."""

    xp: Any
    dtype: np.dtype
    source: core.JaxprEqn

    @property
    def floating(self) -> bool:
        return self.dtype in FLOATS

    @property
    def epsilon(self) -> float:
        return float(jnp.finfo(self.dtype).eps)


def _results(
    equation: core.JaxprEqn, operands: Sequence[Interval], rank: int, unknown_is_one: bool = False
) -> list[Interval]:
    """Return the intervals of the results of an equation that has no body."""
    name = equation.primitive.name
    if name in _MOVES:
        return [operands[0]]
    dtypes = [_dtype(var) for var in (*equation.invars, *equation.outvars)]
    xp = module_of(operands)
    rule = None if unknown_is_one and name == "dot_general" else _RULES.get(name)
    if rule is not None and all(is_carried(xp, dtype) for dtype in dtypes):
        given = operands if xp is np else [lifted(operand) for operand in operands]
        result = rule(_Equation(xp, np.dtype(dtypes[-1]), equation), *given)
        if result is not None:
            # An unknown case of a select that is never chosen must not make the result unknown.
            return [_settled(xp, dtypes[-1], result, () if name == "select_n" else given)]
    return _nothing(equation, rank, unknown_is_one)


def _nothing(equation: core.JaxprEqn, rank: int, unknown_is_one: bool) -> list[Interval]:
    """Return intervals for results about which nothing is known; exactly 1 if `unknown_is_one`."""
    dtypes = [_dtype(var) for var in equation.outvars]
    if not unknown_is_one:
        return [unknown(dtype, rank) for dtype in dtypes]
    ones = [np.ones((1,) * rank, carrier_of(np, dtype)) for dtype in dtypes]
    return [Interval(one, one) for one in ones]


def _settled(xp: Any, dtype: DTypeLike, result: Interval, operands: Sequence[Interval]) -> Interval:
    """Make a result unknown wherever a floating operand is unknown or the result may be NaN or wrap around.

    Floating-point endpoints are also widened for overflow to infinity and for subnormals flushed to zero.
    """
    low, high = result.low, result.high
    vague = xp.zeros((1,) * low.ndim, bool)
    for operand in operands:
        if jnp.issubdtype(operand.low.dtype, jnp.floating):
            vague = vague | ((operand.low == -math.inf) & (operand.high == math.inf))
    if jnp.issubdtype(dtype, jnp.floating):
        info = jnp.finfo(dtype)
        tiny, greatest = float(info.tiny), float(info.max)
        low = xp.where((low > 0) & (low < tiny), 0.0, xp.where(low < -greatest, -math.inf, low))
        high = xp.where((high < 0) & (high > -tiny), 0.0, xp.where(high > greatest, math.inf, high))
        return _forgotten(xp, dtype, vague | xp.isnan(low) | xp.isnan(high), low, high)
    if not is_bool(dtype):
        # Integers wrap around, so one that may have overflowed can be anything.
        least, greatest = limits_of(dtype)
        vague = vague | (low < least) | (high > greatest)
    return _forgotten(xp, dtype, vague, low, high)


def _forgotten(xp: Any, dtype: DTypeLike, where: Any, low: Any, high: Any) -> Interval:
    """Make an interval unknown where a condition holds."""
    least, greatest = ends_of(dtype)
    return Interval(xp.where(where, least, low), xp.where(where, greatest, high))


def _exact(equation: _Equation, value: Any, *operands: Any) -> Any:
    """Return where a sum, difference or product is exact; missing an exact result only widens its interval."""
    xp, info = equation.xp, jnp.finfo(equation.dtype)
    if jnp.finfo(carrier_of(xp, equation.dtype)).nmant > info.nmant:
        if xp is np:
            return value == value.astype(equation.dtype).astype(value.dtype)
        # XLA may remove a pair of conversions, but never `reduce_precision`.
        return value == jax.lax.reduce_precision(value, info.nexp, info.nmant)
    exact = abs(value) < 2.0 ** (info.nmant + 1)
    return functools.reduce(operator.and_, [xp.floor(operand) == operand for operand in operands], exact)


def _rounded(
    equation: _Equation, value: Any, operands: Sequence[Any], exact: Any, relative: float, absolute: float = 0.0
) -> Interval:
    """Return the bounds of a result whose value is known up to rounding.

    Arguments:
        exact: where the value needs no rounding.
        relative, absolute: the greatest error elsewhere, apart from flushed subnormals.
    """
    xp, info = equation.xp, jnp.finfo(equation.dtype)
    exact = exact | xp.isinf(value)
    slack = xp.abs(value) * relative + (absolute + float(info.tiny))
    low, high = xp.where(exact, value, value - slack), xp.where(exact, value, value + slack)
    # An infinite result of finite operands overflowed the dtype of the bounds.
    finite = functools.reduce(operator.and_, [xp.isfinite(operand) for operand in operands])
    low = xp.where(finite & (value == math.inf), float(info.max), low)
    high = xp.where(finite & (value == -math.inf), -float(info.max), high)
    return Interval(low, high)


def _hull(xp: Any, intervals: Iterable[Interval]) -> Interval:
    lows, highs = zip(*[(interval.low, interval.high) for interval in intervals], strict=True)
    return Interval(functools.reduce(xp.minimum, lows), functools.reduce(xp.maximum, highs))


def _at_corners(
    equation: _Equation, function: Rule, corners: Sequence[tuple[Any, ...]], trivial: Any = None, correct: bool = True
) -> Interval:
    """Return the hull of a function at the corners of its operands, where its extremes lie.

    Arguments:
        trivial: takes a corner and returns where no implementation rounds.
        correct: whether implementations return exact results exactly.
    """
    xp, ends = equation.xp, []
    for corner in corners:
        value = function(*corner)
        if equation.floating:
            exact = correct and _exact(equation, value, *corner)
            if trivial is not None:
                exact = exact | trivial(*corner)
            ends.append(_rounded(equation, value, corner, exact, 2 * len(corner) * equation.epsilon))
        else:
            estimate = function(*[operand.astype(carrier_of(xp, np.float32)) for operand in corner])
            least, greatest = limits_of(carrier_of(xp, equation.dtype))
            wraps = (estimate < _BELOW_OVERFLOW * least) | (estimate > _BELOW_OVERFLOW * greatest)
            ends.append(_forgotten(xp, equation.dtype, wraps, value, value))
    return _hull(xp, ends)


def _is_zero(a: Any, b: Any) -> Any:
    return (a == 0) | (b == 0)


def _add(equation: _Equation, x: Interval, y: Interval) -> Interval:
    return _at_corners(equation, operator.add, [(x.low, y.low), (x.high, y.high)], _is_zero)


def _subtract(equation: _Equation, x: Interval, y: Interval) -> Interval:
    return _at_corners(equation, operator.sub, [(x.low, y.high), (x.high, y.low)], _is_zero)


def _negate(equation: _Equation, x: Interval) -> Interval:
    zero = equation.xp.zeros_like(x.low)
    return _subtract(equation, Interval(zero, zero), x)


def _corners(x: Interval, y: Interval) -> list[tuple[Any, Any]]:
    return [(a, b) for a in (x.low, x.high) for b in (y.low, y.high)]


def _multiply(equation: _Equation, x: Interval, y: Interval) -> Interval:
    return _at_corners(
        equation, operator.mul, _corners(x, y), lambda a, b: _is_zero(a, b) | (abs(a) == 1) | (abs(b) == 1)
    )


def _truncated(a: Any, b: Any) -> Any:
    """Return the quotient of floats, or that of integers truncated towards zero."""
    if jnp.issubdtype(a.dtype, jnp.floating):
        return a / b
    quotient = a // b
    return quotient + ((quotient < 0) & (quotient * b != a)).astype(quotient.dtype)


def _divide(equation: _Equation, x: Interval, y: Interval) -> Interval:
    xp = equation.xp
    unclear = (y.low <= 0) & (y.high >= 0)
    y = Interval(xp.where(unclear, 1, y.low), xp.where(unclear, 1, y.high))
    # Division on a GPU is not rounded correctly.
    result = _at_corners(equation, _truncated, _corners(x, y), lambda a, b: (a == 0) | (abs(b) == 1), correct=False)
    return _forgotten(xp, equation.dtype, unclear, result.low, result.high)


def _remainder(equation: _Equation, x: Interval, y: Interval) -> Interval | None:
    """Bound the remainder of integers, which has the sign of the dividend."""
    if equation.floating:
        return None
    xp = equation.xp
    unclear = ((y.low <= 0) & (y.high >= 0)) | (y.low == limits_of(equation.dtype)[0])
    divisor = Interval(xp.where(unclear, 1, y.low), xp.where(unclear, 1, y.high))
    most = xp.maximum(abs(divisor.low), abs(divisor.high)) - 1
    low = xp.where(x.low < 0, xp.maximum(-most, x.low), 0)
    high = xp.where(x.high > 0, xp.minimum(most, x.high), 0)
    # If no multiple of the divisor lies between the endpoints, the remainder is monotone.
    d = divisor.low
    whole = (d == divisor.high) & (d > 0) & (x.low >= 0) & (x.low // d == x.high // d)
    low, high = xp.where(whole, x.low % d, low), xp.where(whole, x.high % d, high)
    return _forgotten(xp, equation.dtype, unclear, low, high)


def _magnitude(equation: _Equation, x: Interval) -> Interval:
    xp, negated = equation.xp, _negate(equation, x)
    low, high = xp.maximum(xp.maximum(x.low, negated.low), 0), xp.maximum(x.high, negated.high)
    # The least integer has no negation and is its own absolute value.
    least, _ = ends_of(equation.dtype)
    return Interval(low if equation.floating else xp.where(negated.low == least, least, low), high)


def _power(equation: _Equation, x: Interval, exponent: int) -> Interval | None:
    if exponent <= 0:
        return None
    ends = _magnitude(equation, x) if exponent % 2 == 0 else x
    corners = [(ends.low,) * exponent, (ends.high,) * exponent]
    # The order of the multiplications is unspecified, and each one rounds.
    return _at_corners(equation, lambda *x: functools.reduce(operator.mul, x), corners, correct=exponent <= 2)


def _inverse(equation: _Equation, x: Interval) -> Interval:
    one = equation.xp.ones_like(x.low)
    return _divide(equation, Interval(one, one), _settled(equation.xp, equation.dtype, x, (x,)))


def _increasing(function: Callable[[Any, Any], Any], *, positive: bool = False) -> Rule:
    """Return the rule of an increasing, approximated function; `positive` functions are bounded below by 0.

    `function` must return NaN outside its domain.
    """

    def rule(equation: _Equation, x: Interval) -> Interval:
        xp, relative = equation.xp, _APPROXIMATION + 4 * equation.epsilon
        low, high = (
            _rounded(equation, function(xp, end), (end,), False, relative, _APPROXIMATION_AT_ZERO)
            for end in (x.low, x.high)
        )
        # Below this, exponentials underflow to 0 even in float64.
        vanishes = positive & (x.high < -2000.0)
        return Interval(xp.maximum(low.low, 0) if positive else low.low, xp.where(vanishes, 0, high.high))

    return rule


def _monotone(function: Callable[..., Any]) -> Rule:
    """Return the rule of a function that is non-decreasing in every argument and does not round."""
    return lambda equation, *operands: Interval(
        function(equation.xp, *(operand.low for operand in operands)),
        function(equation.xp, *(operand.high for operand in operands)),
    )


def _convert(equation: _Equation, x: Interval) -> Interval:
    xp, given, wanted = equation.xp, _dtype(equation.source.invars[0]), equation.dtype
    carrier = carrier_of(xp, wanted)
    if is_bool(wanted):
        return x if is_bool(given) else Interval((x.low > 0) | (x.high < 0), (x.low != 0) | (x.high != 0))
    if is_bool(given) or (given not in FLOATS and wanted not in FLOATS):
        return Interval(x.low.astype(carrier), x.high.astype(carrier))
    if wanted not in FLOATS:
        least, greatest = limits_of(carrier)
        fits = (x.low >= _BELOW_OVERFLOW * least) & (x.high <= _BELOW_OVERFLOW * greatest)
        low, high = (xp.where(fits, xp.trunc(end), 0.0).astype(carrier) for end in (x.low, x.high))
        return _forgotten(xp, wanted, ~fits, low, high)
    widens = False
    if given in FLOATS:
        narrow, wide = jnp.finfo(given), jnp.finfo(wanted)
        widens = narrow.nmant <= wide.nmant and narrow.nexp <= wide.nexp
    ends = []
    for end in (x.low, x.high):
        value = end.astype(carrier)
        exact = widens or _exact(equation, value, value)
        ends.append(_rounded(equation, value, (value,), exact, 2 * equation.epsilon))
    return _hull(xp, ends)


def _compare(function: Callable[[Interval, Interval], tuple[Any, Any]]) -> Rule:
    """Return the rule of a comparison; `function` says whether it certainly and whether it possibly holds."""
    return lambda equation, x, y: Interval(*function(x, y))


def _equal(x: Interval, y: Interval) -> tuple[Any, Any]:
    return (x.low == y.high) & (x.high == y.low), (x.low <= y.high) & (y.low <= x.high)


def _logical(function: Callable[..., Interval]) -> Rule:
    """Return the rule of a boolean operation; on integers it is bitwise, and its result is unknown."""
    return lambda equation, *operands: function(*operands) if is_bool(equation.dtype) else None


def _not(certain: Any, possible: Any) -> Interval:
    return Interval(~possible, ~certain)


def _exclusive(x: Interval, y: Interval) -> Interval:
    clear = (x.low == x.high) & (y.low == y.high)
    return Interval(clear & (x.low ^ y.low), ~clear | (x.low ^ y.low))


def _select(equation: _Equation, which: Interval, *cases: Interval) -> Interval:
    xp = equation.xp
    hull = _hull(xp, cases)
    if not is_bool(_dtype(equation.source.invars[0])) or len(cases) != 2:
        return hull
    no, yes = cases
    return Interval(
        xp.where(which.low, yes.low, xp.where(which.high, hull.low, no.low)),
        xp.where(which.low, yes.high, xp.where(which.high, hull.high, no.high)),
    )


def _product(equation: _Equation, x: Interval, y: Interval) -> Interval | None:
    """Bound the dot products of two matrices by the greatest magnitudes of their elements."""
    if not equation.floating or not all(_dtype(operand) in FLOATS for operand in equation.source.invars):
        return None
    xp, ((axes, _), _) = equation.xp, equation.source.params["dimension_numbers"]
    left: Any = equation.source.invars[0].aval
    terms = math.prod(left.shape[axis] for axis in axes)
    greatest = [xp.maximum(abs(end.low), abs(end.high)) for end in (x, y)]
    # Every partial sum may be rounded to the dtype of the result, and the operands to bfloat16.
    growth = terms * float(np.exp((terms + 2) * equation.epsilon)) * 1.02
    high = greatest[0] * greatest[1] * growth + terms * float(jnp.finfo(equation.dtype).tiny)
    return Interval(-high, high)


_ROOT = _increasing(lambda xp, x: xp.sqrt(x), positive=True)

# Primitives whose result only has elements of the operand, so the operand's bounds hold for it too.
_MOVES = frozenset(
    ("broadcast_in_dim", "reshape", "squeeze", "transpose", "copy", "copy_p", "name", "stop_gradient", "dynamic_slice")
)

_RULES: dict[str, Rule] = {
    "add": _add,
    "sub": _subtract,
    "mul": _multiply,
    "div": _divide,
    "rem": _remainder,
    "neg": _negate,
    "abs": _magnitude,
    "integer_pow": lambda equation, x: _power(equation, x, equation.source.params["y"]),
    "square": lambda equation, x: _power(equation, x, 2),
    "clamp": _monotone(lambda xp, least, x, greatest: xp.minimum(xp.maximum(x, least), greatest)),
    "max": _monotone(lambda xp, x, y: xp.maximum(x, y)),
    "min": _monotone(lambda xp, x, y: xp.minimum(x, y)),
    **{name: _monotone(lambda xp, x, name=name: getattr(xp, name)(x)) for name in ("sign", "floor", "ceil")},
    "round": lambda equation, x: Interval(equation.xp.floor(x.low), equation.xp.ceil(x.high)),  # of any kind
    "exp": _increasing(lambda xp, x: xp.exp(x), positive=True),
    "exp2": _increasing(lambda xp, x: xp.exp2(x), positive=True),
    **{name: _increasing(lambda xp, x, name=name: getattr(xp, name)(x)) for name in ("expm1", "log", "log1p", "tanh")},
    "sqrt": _ROOT,
    "rsqrt": lambda equation, x: _inverse(equation, _ROOT(equation, x)),
    "logistic": _increasing(lambda xp, x: 1 / (1 + xp.exp(-x)), positive=True),
    "erf": _increasing(lambda xp, x: np.vectorize(math.erf, otypes=[float])(x) if xp is np else jax.lax.erf(x)),
    "convert_element_type": _convert,
    "eq": _compare(_equal),
    "ne": lambda equation, x, y: _not(*_equal(x, y)),
    "lt": _compare(lambda x, y: (x.high < y.low, x.low < y.high)),
    "le": _compare(lambda x, y: (x.high <= y.low, x.low <= y.high)),
    "gt": _compare(lambda x, y: (x.low > y.high, x.high > y.low)),
    "ge": _compare(lambda x, y: (x.low >= y.high, x.high >= y.low)),
    "and": _logical(lambda x, y: Interval(x.low & y.low, x.high & y.high)),
    "or": _logical(lambda x, y: Interval(x.low | y.low, x.high | y.high)),
    "not": _logical(lambda x: _not(x.low, x.high)),
    "xor": _logical(_exclusive),
    "select_n": _select,
    "dot_general": _product,
}
