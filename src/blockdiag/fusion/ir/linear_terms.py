"""Split nodes into sums of terms."""

from collections.abc import Callable, Sequence, Set

import jax.numpy as jnp
import numpy as np
from jax import lax

from blockdiag.fusion.ir.tree import Leaf, Node, bottom_up, leaves_of, number, operation

_OF_TRUTHS = frozenset(("eq", "ne", "lt", "le", "gt", "ge", "is_finite"))
"""Operations on numbers whose results are booleans."""

_LARGE = 2.0**6
"""Larger constants, added to scores as separate terms, would round away digits that softmaxes need."""


def terms_of(
    node: Node, factor: float = 1.0, apart: Callable[[Node], bool] = lambda _: False
) -> list[tuple[float, Node]]:
    """Return a sum as its terms, each with a factor.

    A sum that is scaled, or contains a large number, stays whole unless it contains a product of queries and keys.
    For example, -1e9 (1 - mask) is exactly 0 where the mask is 1. As two terms, the score minus 1e9 would be rounded,
    and adding 1e9 again would not restore its digits.

    Args:
        node, factor: the sum, and the factor of all of it.
        apart: which other nodes must become terms of their own, even within a scaled sum.
    """
    # Ids of nodes that contain a product, or a node that must be a term of its own.
    split: set[int] = set()
    for one in bottom_up(node):
        if one.kind == "product" or apart(one) or any(id(x) in split for x in one.inputs):
            split.add(id(one))
    found, waiting = [], [(factor, node)]
    while waiting:
        one = waiting.pop()
        parts = _parts(*one)
        if parts is None or (id(one[1]) not in split and _is_whole(parts, one[1])):
            found.append(one)
        else:
            waiting += reversed(parts)
    return found


def factor_in(score: Node, leaf: Leaf) -> float | None:
    """Return the factor of a leaf in a sum, which is the derivative; None if the leaf occurs other than as a term."""
    # All sums are split. Rounding does not matter, because the terms are not added up again.
    own = [(factor, node) for factor, node in terms_of(score, apart=lambda _: True) if leaf in leaves_of(node)]
    return None if any(node.leaf is not leaf for _, node in own) else sum(factor for factor, _ in own)


def _parts(factor: float, node: Node) -> list[tuple[float, Node]] | None:
    """Return the summands of a node times a factor, or None if it is a term."""
    if node.kind == "operation":
        match getattr(node.primitive, "name", ""), node.inputs:
            case "add" | "add_any", (left, right):
                return [(factor, left), (factor, right)]
            case "sub", (left, right):
                return [(factor, left), (-factor, right)]
            case "neg", (only,):
                return [(-factor, only)]
            case "convert_element_type", (only,) if (
                only.kind in ("operation", "product") and _is_floating(node) and _is_floating(only)
            ):
                # Tiles are float32 whatever the program says. Casts from integers and booleans stay: they convert here.
                return [(factor, only)]
            case "mul", (left, right):
                for one, other in ((left, right), (right, left)):
                    if (by := _finite(other)) is not None:
                        return [(factor * by, one)]
            case "div", (left, right) if by := _finite(right):
                return [(factor / by, left)]
    return None


def _is_whole(parts: Sequence[tuple[float, Node]], node: Node) -> bool:
    """Return whether a node without products is one term: a scaled sum, or a sum with a large number.

    Args:
        parts: the summands of the node, see `_parts`.
        node: the node.
    """
    if len(parts) == 1:
        return _is_of_sum(node)
    return any(abs(factor * (_finite(part) or 0.0)) > _LARGE for factor, part in parts)


def _is_of_sum(node: Node) -> bool:
    """Return whether a node is a sum times a number."""
    while (parts := _parts(1.0, node)) is not None:
        if len(parts) > 1:
            return True
        ((_, node),) = parts
    return False


def _is_floating(node: Node) -> bool:
    """Return whether a value is computed in floats."""
    while node.kind == "operation" and "new_dtype" not in node.params:
        name = getattr(node.primitive, "name", "")
        if name in _OF_TRUTHS:
            return False
        # The operands of other operations have the result's dtype, except for the predicate of a select.
        node = node.inputs[1 if name == "select_n" else 0]
    match node.kind:
        case "operation":
            return bool(jnp.issubdtype(node.params["new_dtype"], jnp.floating))
        case "leaf":
            assert node.leaf is not None
            return bool(jnp.issubdtype(node.leaf.source.dtype, jnp.floating))
        case "number":
            return bool(jnp.issubdtype(node.number.dtype, jnp.floating))
    return True


def _finite(node: Node) -> float | None:
    if node.kind != "number" or np.size(node.number) != 1 or not jnp.issubdtype(node.number.dtype, jnp.floating):
        return None
    found = float(np.asarray(node.number, np.float64).item())
    return found if np.isfinite(found) else None


def sum_of(terms: Sequence[tuple[float, Node]], unit: float = 1.0) -> Node | None:
    """Return the sum of terms times their factors, divided by `unit`; None if there are no terms."""
    total = None
    for factor, term in terms:
        scaled = term if factor == unit else operation(lax.mul_p, term, number(np.float32(factor / unit)))
        total = scaled if total is None else operation(lax.add_p, total, scaled)
    return total


def is_linear_in_products(node: Node) -> bool:
    """Return whether a node is a sum of products, each times a factor that does not depend on both queries and keys."""
    # For each node: whether it is linear, whether it contains a product, and the roles of its leaves.
    linear: dict[int, bool] = {}
    has_product: dict[int, bool] = {}
    roles: dict[int, frozenset[str]] = {}
    for one in bottom_up(node):
        inputs, key = [id(x) for x in one.inputs], id(one)
        has_product[key] = one.kind == "product" or any(has_product[x] for x in inputs)
        roles[key] = frozenset([] if one.leaf is None else [one.leaf.role]).union(*(roles[x] for x in inputs))
        match getattr(one.primitive, "name", ""):
            case _ if one.kind == "product" or not has_product[key]:
                linear[key] = True
            case "add" | "add_any" | "sub" | "neg" | "convert_element_type":
                linear[key] = all(linear[x] for x in inputs)
            case "mul":
                linear[key] = any(linear[x] and not _is_of_both(roles[y]) for x, y in (inputs, inputs[::-1]))
            case "div":
                linear[key] = linear[inputs[0]] and not _is_of_both(roles[inputs[1]])
            case _:
                linear[key] = False
    return linear[id(node)]


def _is_of_both(roles: Set[str]) -> bool:
    """Return whether a value with leaves of these roles depends on both queries and keys."""
    return bool(roles & {"score", "distance"}) or bool(roles & {"row", "query"} and roles & {"column", "key"})


def is_finite(node: Node) -> bool:
    """Return whether a value is finite whatever its leaves hold.

    This is known for numbers, selects between them, and their products.
    """
    return _largest(node) <= float(np.finfo(np.float32).max)


def _largest(node: Node) -> float:
    """Return a bound of the magnitude of a value computed from numbers; infinity for any other value."""
    found: dict[int, float] = {}
    for one in bottom_up(node):
        inputs = [found[id(x)] for x in one.inputs]
        match getattr(one.primitive, "name", ""), inputs:
            case _ if one.kind == "number":
                found[id(one)] = float(np.abs(np.asarray(one.number, np.float64)).max())
            case "select_n", (_, *cases):
                found[id(one)] = max(cases)
            case "convert_element_type", (only,):
                found[id(one)] = only
            case "mul", (left, right):
                found[id(one)] = left * right
            case "div", (left, _) if by := _finite(one.inputs[1]):
                found[id(one)] = left / abs(by)
            case _:
                found[id(one)] = np.inf
    return found[id(node)]
