"""Nodes as sums of terms."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax

from blockdiag.fusion.tree import Node, leaves_of, nodes_of, number, operation


def terms_of(node: Node, factor: float = 1.0) -> list[tuple[float, Node]]:
    """A sum as its terms, each with a factor."""
    name = getattr(node.primitive, "name", "")
    if node.kind == "operation":
        match name, node.inputs:
            case "add" | "add_any", (left, right):
                return [*terms_of(left, factor), *terms_of(right, factor)]
            case "sub", (left, right):
                return [*terms_of(left, factor), *terms_of(right, -factor)]
            case "neg", (only,):
                return terms_of(only, -factor)
            case "convert_element_type", (only,) if _is_floating(node) and only.kind in ("operation", "product"):
                # Tiles are float32 whatever the program says.
                return terms_of(only, factor)
            case "mul", (left, right):
                for one, other in ((left, right), (right, left)):
                    if (by := _finite(other)) is not None:
                        return terms_of(one, factor * by)
            case "div", (left, right) if by := _finite(right):
                return terms_of(left, factor / by)
    return [(factor, node)]


def _is_floating(node: Node) -> bool:
    return bool(jnp.issubdtype(node.params["new_dtype"], jnp.floating))


def _finite(node: Node) -> float | None:
    if node.kind != "number" or np.size(node.number) != 1 or not jnp.issubdtype(node.number.dtype, jnp.floating):
        return None
    found = float(np.asarray(node.number, np.float64).item())
    return found if np.isfinite(found) else None


def sum_of(terms: Sequence[tuple[float, Node]], unit: float = 1.0) -> Node | None:
    """The sum of terms, each times its factor, over `unit`; None where there are none."""
    total = None
    for factor, term in terms:
        scaled = term if factor == unit else operation(lax.mul_p, term, number(np.float32(factor / unit)))
        total = scaled if total is None else operation(lax.add_p, total, scaled)
    return total


def is_linear_in_products(node: Node) -> bool:
    """Whether a node is a sum of products, each times what is no function of queries and keys at once."""
    if node.kind == "product" or not any(x.kind == "product" for x in nodes_of(node)):
        return True
    name = getattr(node.primitive, "name", "")
    if name in ("add", "add_any", "sub", "neg", "convert_element_type"):
        return all(map(is_linear_in_products, node.inputs))
    if name == "mul":
        first, second = node.inputs
        pairs = ((first, second), (second, first))
        return any(is_linear_in_products(x) and not _has_both(y) for x, y in pairs)
    return name == "div" and is_linear_in_products(node.inputs[0]) and not _has_both(node.inputs[1])


def _has_both(node: Node) -> bool:
    """Whether a node is a function of queries and keys."""
    roles = {leaf.role for leaf in leaves_of(node)}
    return bool(roles & {"score", "distance"}) or bool(roles & {"row", "query"} and roles & {"column", "key"})
