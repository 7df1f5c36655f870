"""Match attention in a program: products of values and weights that are linear in softmaxes of scores."""

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jax.extend import core

from blockdiag.fusion.frontend.trace import aval_of, kept
from blockdiag.fusion.ir.tree import COLUMNS, ROWS, Dim, NotFusible, Region, leaves_of, nodes_of, source_of
from blockdiag.fusion.regions.axis_labels import MOVES, equations_by_name, parts_of, place_of, producers_of, users_of
from blockdiag.fusion.regions.epilogue import followed, read_by
from blockdiag.fusion.regions.guards import CASTS, NoMatch, linear_in_powers
from blockdiag.fusion.regions.operand_indexing import MadeOfScores
from blockdiag.fusion.regions.softmaxes import LINEAR
from blockdiag.fusion.regions.weight_terms import Matcher, lie_in_order

# Most products of a function that is a single attention with projections, gates and derivatives.
_MOST_PRODUCTS = 16


@dataclass(frozen=True)
class _Unmatched:
    """A product with an operand that did not match as weights.

    Attributes:
        matcher: the matcher of the product.
        equation: the product.
        weights: the operand.
        reason: returns why the operand is not linear in softmaxes, or an empty string if that is not known.
        refused: returns why it is not a function of scores on tiles, or an empty string if that is not known.
        lacks_queries: whether the only obstacle is that no axis is one of queries.
        dims: the labels of the operand's axes; None if they are not known.
    """

    matcher: Matcher
    equation: core.JaxprEqn
    weights: object
    reason: Callable[[], str] = str
    refused: Callable[[], str] = str
    lacks_queries: bool = False
    dims: tuple[Dim, ...] | None = None


class NoAttention(NotFusible):
    """No product is attention; the message names the obstacle of a product that may have been meant as attention."""


class QueryWithoutAxis(NoAttention):
    """Softmaxes precede products with values, and the only known obstacle is that their single query has no axis.

    Attributes:
        products: the products with values.
    """

    def __init__(self, message: str, products: Sequence[core.JaxprEqn]) -> None:
        super().__init__(message)
        self.products = products


def _refusal(unmatched: Sequence[_Unmatched]) -> str | None:
    """Return why attention cannot be fused, or None if there seems to be no attention."""
    for one in unmatched:
        if one.matcher.puller.is_attention(one.weights, one.dims):
            whole = "`dot_general` of weights that are not linear in softmaxes of scores along the summed axis"
            said = one.reason() or one.matcher.along_queries(one.weights, one.dims)
            return said or f"{whole}, {place_of(one.equation)}"
    refused = next(filter(None, (one.refused() for one in unmatched)), None)
    return refused and f"there is no product with a softmax of scores, nor with another function of them: {refused}"


def find_regions(jaxpr: core.Jaxpr) -> dict[core.Var, tuple[Region, ...]]:
    """Return the attention of a flat program: from each result of a product to the regions whose sum it is.

    Raises:
        NotFusible: there is a softmax of scores before a product, but it breaks a rule.
    """
    return regions_and_sides(jaxpr)[0]


def regions_and_sides(jaxpr: core.Jaxpr) -> tuple[dict[core.Var, tuple[Region, ...]], dict[int, int]]:
    """Return `find_regions`, and the side of the weights by the `id` of each product that is itself the result.

    A product that is divided afterwards is not in the second mapping.
    """
    unmatched: list[_Unmatched] = []
    users, matches = users_of(jaxpr), _matches(jaxpr, unmatched)
    if not matches and _may_be_alone(jaxpr) and (alone := _matches(jaxpr, [], is_alone=True)):
        seen = {id(one.equation) for one in alone}
        if _refusal([one for one in unmatched if id(one.equation) not in seen]) is None:
            matches = alone
    if not matches and (refusal := _refusal(unmatched)) is not None:
        lone = [one.equation for one in unmatched if one.lacks_queries]
        if lone and _refusal([one for one in unmatched if not one.lacks_queries]) is None:
            raise QueryWithoutAxis(refusal, lone)
        raise NoAttention(refusal)
    if any(region.score is not None for one in matches for region in one.regions):
        # If there is a softmax, a match without one may be a layer with matrices for each head or expert.
        producers = producers_of(jaxpr)
        matches = [one for one in matches if not _is_layer(one, producers)]
    sides = {id(one.equation): one.side for one in matches if one.result is one.equation.outvars[0]}
    read = {var for one in matches for region in one.regions for var in read_by(region)}
    return dict(followed(one.result, one.regions, users, read) for one in matches), sides


@dataclass(frozen=True)
class _Match:
    """A product that becomes regions.

    Attributes:
        equation: the product.
        side: the operand that has the weights.
        result: the variable that is the sum of the regions: the product's result, or a quotient's.
        regions: the regions.
    """

    equation: core.JaxprEqn
    side: int
    result: core.Var
    regions: tuple[Region, ...]


def _is_layer(match: _Match, producers: Mapping[core.Var, core.JaxprEqn]) -> bool:
    """Return whether a match without a softmax has arguments as keys and values, and computed queries.

    Matrices of a layer are arguments of the function, and their input is computed.
    """

    def is_argument(var: object) -> bool:
        while isinstance(var, core.Var) and (equation := producers.get(var)) is not None:
            if equation.primitive.name not in (*MOVES, *CASTS, "slice"):
                return False
            var = equation.invars[0]
        return True

    if any(region.score is not None for region in match.regions):
        return False
    products = [x for region in match.regions for x in nodes_of(region.weight) if x.kind == "product"]
    pairs = [[None if x.leaf is None else x.leaf.source.key for x in product.inputs] for product in products]
    values = [region.value.key for region in match.regions]
    return all(is_argument(key) and not is_argument(query) for query, key in pairs) and all(map(is_argument, values))


def _matches(jaxpr: core.Jaxpr, unmatched: list[_Unmatched], is_alone: bool = False) -> list[_Match]:
    """Return the products with weights; all others are appended to `unmatched`.

    Args:
        is_alone: see `Matcher`.
    """
    found: list[_Match] = []
    results: frozenset[core.Var] = frozenset()
    for equation in equations_by_name(jaxpr).get("dot_general", ()):
        sides = []
        for side in (0, 1):
            result, regions = _regions_of(_Sought(jaxpr, equation, side, results, is_alone), unmatched)
            if regions:
                sides.append(_Match(equation, side, result, regions))
            if any(region.score is not None for region in regions):
                break
        # A side with a softmax takes precedence: other functions of scores may be its values.
        chosen = sides[-1:] if sides and sides[-1].regions[0].score is not None else sides[:1]
        found += chosen
        # The result of another attention is in memory, so its scores do not count.
        results |= {match.result for match in chosen}
    return found


def is_attention(jaxpr: core.Jaxpr, product: core.JaxprEqn) -> bool:
    """Return whether a product is one of values and weights that are computed tile by tile."""
    return _has_weights(jaxpr, product) or (lacks_attention(jaxpr) and _has_weights(jaxpr, product, is_alone=True))


def attention_count(jaxpr: core.Jaxpr) -> int:
    """Return the number of products of values and weights that are computed tile by tile."""
    return _attention_count(jaxpr) or (_attention_count(jaxpr, is_alone=True) if _may_be_alone(jaxpr) else 0)


@kept
def lacks_attention(jaxpr: core.Jaxpr) -> bool:
    """Return whether a small program has no product of values and weights without `Matcher.is_alone`."""
    return _may_be_alone(jaxpr) and not _attention_count(jaxpr)


def _may_be_alone(jaxpr: core.Jaxpr) -> bool:
    """Return whether a program is small enough to be a single attention.

    In a model, every layer depends on all layers below, so the search would be expensive.
    """
    return len(equations_by_name(jaxpr).get("dot_general", ())) <= _MOST_PRODUCTS


def _attention_count(jaxpr: core.Jaxpr, is_alone: bool = False) -> int:
    return sum(_has_weights(jaxpr, x, is_alone) for x in equations_by_name(jaxpr).get("dot_general", ()))


def _has_weights(jaxpr: core.Jaxpr, product: core.JaxprEqn, is_alone: bool = False) -> bool:
    for side in (0, 1):
        try:
            _, regions = _regions_of(_Sought(jaxpr, product, side, is_alone=is_alone), [])
        except NotFusible:
            continue
        if regions:
            return True
    return False


@dataclass(frozen=True)
class _Sought:
    """A product one operand of which may be weights.

    Attributes:
        jaxpr: the program.
        equation: the product.
        side: the operand that may be weights.
        results: the results of other attention.
        is_alone: see `Matcher`.
    """

    jaxpr: core.Jaxpr
    equation: core.JaxprEqn
    side: int
    results: frozenset[core.Var] = frozenset()
    is_alone: bool = False


def _regions_of(sought: _Sought, unmatched: list[_Unmatched]) -> tuple[core.Var, tuple[Region, ...]]:
    """Return the variable that is the sum of a product's regions, and the regions.

    There are no regions if the operand is not weights, which is then appended to `unmatched`.
    """
    equation, side = sought.equation, sought.side
    weights = equation.invars[side]
    if isinstance(weights, core.Literal):
        return equation.outvars[0], ()
    rest: list[_Unmatched] = []
    refusal, found = None, None
    try:
        found = _regions_beside(sought, {}, rest)
    except NotFusible as failure:
        refusal = failure
    contracted, shared = equation.params["dimension_numbers"]
    parts: dict[int, tuple[int, ...]] = {}
    pairs = None if found is None or not found[1] else _pairs_of(found[1])
    if pairs != 0 and (shared[side] or weights in linear_in_powers(sought.jaxpr)):
        # Separate batch axes of scores may be merged into one axis of their weights.
        parts = parts_of(producers_of(sought.jaxpr), weights)
    parts = {axis: each for axis, each in parts.items() if axis not in contracted[side]}
    if parts:
        with contextlib.suppress(NotFusible):
            divided = _regions_beside(sought, parts, [])
            if divided[1] and (pairs is None or _pairs_of(divided[1]) < pairs):
                return divided
    if found is None:
        assert refusal is not None
        raise refusal
    unmatched += rest
    return found


def _pairs_of(regions: Sequence[Region]) -> int:
    """Return the number of elements of queries by keys that regions read; with short sequences these may be scores."""
    shapes = [leaf.source.shape for region in regions for leaf in region.leaves if leaf.role == "score"]
    return sum(map(math.prod, shapes))


def _regions_beside(
    sought: _Sought, parts: dict[int, tuple[int, ...]], unmatched: list[_Unmatched]
) -> tuple[core.Var, tuple[Region, ...]]:
    """Return `_regions_with`, with products stored in memory if a region depends on whole rows of them.

    Other products then remain as scores.
    """
    stored: frozenset[core.Var] = frozenset()
    refusal: MadeOfScores | None = None
    while True:
        rest: list[_Unmatched] = []
        try:
            found = _regions_with(sought, stored, parts, rest)
        except MadeOfScores as failure:
            if failure.products <= stored or not failure.others - stored:
                raise refusal or failure from None
            refusal = refusal or failure
            stored |= failure.products
            continue
        except NotFusible:
            if refusal is not None:
                raise refusal from None
            raise
        if refusal is not None and not found[1]:
            raise refusal
        unmatched += rest
        return found


def _regions_with(
    sought: _Sought, stored: frozenset[core.Var], parts: dict[int, tuple[int, ...]], unmatched: list[_Unmatched]
) -> tuple[core.Var, tuple[Region, ...]]:
    """Return `_regions_of`, with more than one label for some axes of weights.

    Args:
        stored: the products that are arrays in memory.
        parts: from each such axis, which is not contracted, to the sizes of its labels.
    """
    jaxpr, equation, side = sought.jaxpr, sought.equation, sought.side
    replaced = equation.outvars[0]
    contracted, shared = equation.params["dimension_numbers"]
    weights, value = equation.invars[side], equation.invars[1 - side]
    if isinstance(value, core.Literal):
        return replaced, ()
    sizes: dict[str, int] = {}
    dims: dict[int, list[Dim]] = {side: [()] * len(aval_of(weights).shape), 1 - side: [()] * len(aval_of(value).shape)}

    def assign(label: str, **axes: int) -> tuple[str, ...]:
        places = [(side if name == "weights" else 1 - side, axis) for name, axis in axes.items()]
        at, axis = places[0]
        each = parts.get(axis, ()) if at == side else ()
        labels = tuple(f"{label}_{i}" for i in range(len(each))) or (label,)
        sizes.update(zip(labels, each or (aval_of(equation.invars[at]).shape[axis],), strict=True))
        for at, axis in places:
            dims[at][axis] = labels
        return labels

    if len(contracted[0]) != 1:
        reason = f"`dot_general` that sums over {len(contracted[0])} axes of weights: reshape keys to one axis"
        matcher = Matcher(jaxpr, sizes, [])
        message = f"{reason}, {place_of(equation)}"
        unmatched.append(_Unmatched(matcher, equation, weights, lambda: message))
        return replaced, ()
    batch = []
    for i, axes in enumerate(zip(*shared, strict=True)):
        batch += assign(f"b{i}", weights=axes[side], value=axes[1 - side])
    assign(COLUMNS, weights=contracted[side][0], value=contracted[1 - side][0])
    free = [axis for axis, dim in enumerate(dims[side]) if dim == ()]
    if not free:
        matcher = Matcher(jaxpr, sizes, batch)
        if matcher.has_softmax(weights, tuple(dims[side])):
            refused = f"queries have no token axis: add one of size 1, {place_of(equation)}"
            unmatched.append(_Unmatched(matcher, equation, weights, refused=lambda: refused, lacks_queries=True))
        return replaced, ()
    # Keys are read once for each tile of rows. Rows are therefore the longest axis that values lack.
    rows = max(reversed(free), key=lambda axis: aval_of(weights).shape[axis])
    parts = {axis: each for axis, each in parts.items() if axis != rows}
    for i, axis in enumerate(axis for axis in free if axis != rows):
        batch += assign(f"g{i}", weights=axis)
    assign(ROWS, weights=rows)
    columns = [axis for axis, dim in enumerate(dims[1 - side]) if dim == ()]
    for i, axis in enumerate(columns):
        assign(f"d{i}", value=axis)
    weight_axes = [dims[side][axis] for axis in free]
    value_axes = [dims[1 - side][axis] for axis in columns]
    out_dims = tuple(
        [dims[side][axis] for axis in shared[side]]
        + (weight_axes + value_axes if side == 0 else value_axes + weight_axes)
    )
    # Weights without a softmax need values that lie in order, as keys do; see `Matcher.is_alone`.
    matcher = Matcher(jaxpr, sizes, batch)
    if sought.is_alone:
        with contextlib.suppress(NoMatch):
            _, value_dims = matcher.through_moves(value, tuple(dims[1 - side]))
            matcher.is_alone = lie_in_order(value_dims, ((COLUMNS,), *value_axes))
    matcher.puller.results, matcher.puller.stored = sought.results, stored
    given = tuple(dims[side])
    missed = _Unmatched(matcher, equation, weights, functools.partial(matcher.why_not, weights, given), dims=given)
    refusal = ""
    try:
        if not matcher.may_be_linear(weights):
            raise NoMatch
        terms = matcher.terms(weights, given)
        if any(term.softmax is not None and term.softmax.mask is not None for term in terms):
            raise NoMatch
    except NoMatch:
        divided = matcher.divided_terms(equation, out_dims, weights, given)
        if divided is not None:
            terms, replaced, out_dims = divided
        elif matcher.may_be_plain:
            terms, refusal = matcher.plain(weights, given)
        else:
            # A model has many layers, each of which depends on all below it. The search is done only for a message.
            unmatched.append(replace(missed, refused=lambda: matcher.plain(weights, given)[1]))
            return replaced, ()
    if not terms:
        unmatched.append(replace(missed, refused=lambda: refusal))
        return replaced, ()
    regions = []
    for term in terms:
        score = None if term.softmax is None else term.softmax.score
        extras = () if term.softmax is None else term.softmax.extras
        leaves = leaves_of(score, *extras, term.weight)
        if score is not None:
            matcher.puller.check_scores(score)
            matcher.puller.check_leaves(leaves_of(score, *extras))
        try:
            matcher.puller.check_leaves(leaves_of(term.weight))
        except MadeOfScores as failure:
            if score is not None:
                # The factor of the weights may be another function of the weights themselves.
                why = matcher.misused(weights, but=LINEAR) or str(failure)
                raise MadeOfScores(why, failure.products, failure.others) from None
            # The leaf may be the row maximum or the sum of a softmax that was changed in another way. Or the product
            # belongs to another layer, below attention.
            reason = functools.partial(matcher.why_made, weights, given, str(failure))
            unmatched.append(replace(missed, reason=reason))
            return replaced, ()
        regions.append(
            Region(
                sizes=dict(sizes),
                batch=tuple(batch),
                score=score,
                extras=extras,
                weight=term.weight,
                leaves=leaves,
                value=source_of(value),
                value_dims=tuple(dims[1 - side]),
                out_dims=out_dims,
                dtype=np.dtype(aval_of(replaced).dtype),
                log_sums=() if term.softmax is None else term.softmax.log_sums,
            )
        )
    return replaced, tuple(regions)
