"""Give a single query that has no axis one of size 1.

Decoding and attention pooling are often written so that weights have batch axes and the axis of keys only. The
equations from the product that gives the scores to the product with values are mapped over a new axis of the query by
`jax.vmap`.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend import core

from blockdiag.fusion.frontend.trace import aval_of, bind, placed, rewritten
from blockdiag.fusion.ir.tree import NotFusible, nodes_of
from blockdiag.fusion.regions.axis_labels import producers_of
from blockdiag.fusion.regions.match import regions_and_sides

type _Replacement = Callable[[Callable[[Any], Any]], dict[core.Var, Any]]


def with_query_axes(closed: core.ClosedJaxpr, products: Sequence[core.JaxprEqn]) -> core.ClosedJaxpr | None:
    """Return the flat program with an axis for the query of these products with values.

    Returns:
        None if none of them has scores that are a product of a query and keys.
    """
    replaced: dict[int, _Replacement] = {}
    for product in products:
        for replacement in _replacements(closed.jaxpr, product):
            if _is_attention(rewritten(closed, closed.jaxpr.eqns, {id(product): replacement})):
                replaced[id(product)] = replacement
                break
    return rewritten(closed, closed.jaxpr.eqns, replaced) if replaced else None


def _is_attention(closed: core.ClosedJaxpr) -> bool:
    """Return whether regions are found, and the scores of each contain a product of queries and keys."""
    try:
        found, _ = regions_and_sides(closed.jaxpr)
    except NotFusible:
        return False
    scores = [region.score for regions in found.values() for region in regions]
    # If the wrong factor got the new axis, the scores would be read as an array.
    are_products = [score is not None and any(x.kind == "product" for x in nodes_of(score)) for score in scores]
    return bool(scores) and all(are_products)


def _replacements(jaxpr: core.Jaxpr, product: core.JaxprEqn) -> Iterator[_Replacement]:
    """Yield ways to compute a product with values. Each takes another factor of its scores as the query.

    The smaller factor is tried first.
    """
    producers = producers_of(jaxpr)
    for scores in _products_before(product, producers):
        for side in sorted((0, 1), key=lambda side: aval_of(scores.invars[side]).size):
            yield functools.partial(_mapped, _between(jaxpr, scores, product), side)


def _products_before(product: core.JaxprEqn, producers: Mapping[core.Var, core.JaxprEqn]) -> list[core.JaxprEqn]:
    """Return the nearest products that the operands of a product are computed from."""
    found, seen, left = [], set(), list(product.invars)
    while left:
        equation = producers.get(var) if isinstance(var := left.pop(), core.Var) else None
        if equation is None or id(equation) in seen:
            continue
        seen.add(id(equation))
        if equation.primitive.name == "dot_general":
            found.append(equation)
        else:
            left += equation.invars
    return found


def _between(jaxpr: core.Jaxpr, first: core.JaxprEqn, last: core.JaxprEqn) -> list[core.JaxprEqn]:
    """Return the first equation and all up to the last one that depend on its result."""
    found, depends = [], set()
    for equation in jaxpr.eqns:
        if equation is first or any(x in depends for x in equation.invars if isinstance(x, core.Var)):
            found.append(equation)
            depends.update(equation.outvars)
        if equation is last:
            return found
    return found


def _mapped(equations: Sequence[core.JaxprEqn], side: int, value_of: Callable[[Any], Any]) -> dict[core.Var, Any]:
    """Return the result of the last equation, mapped over a new axis of one operand of the first equation."""
    first, last = equations[0], equations[-1]

    def compute(query: Any) -> Any:
        known: dict[core.Var, Any] = {}
        for equation in equations:
            given = [known[x] if isinstance(x, core.Var) and x in known else value_of(x) for x in equation.invars]
            if equation is first:
                given[side] = query
            with placed(equation):
                known |= dict(zip(equation.outvars, bind(equation, given), strict=True))
        return known[last.outvars[0]]

    return {last.outvars[0]: jax.vmap(compute)(value_of(first.invars[side])[None])[0]}
