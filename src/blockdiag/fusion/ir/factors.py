"""Split scores into parts that kernels can skip: positive factors of the whole score, and masks that are not needed.

A tile in which no score is masked uses the score without its masks.
"""

from dataclasses import dataclass, replace

import jax
import numpy as np
from jax.extend import core

from blockdiag.fusion.ir.recursion import Steps, finished
from blockdiag.fusion.ir.tree import Node, Region, bottom_up, leaves_of, number, operation

# A score up to this is masked. This covers -1e9 in any dtype; bfloat16 rounds that to -998244352.
MASKED = -9e8
# A row whose scores are all up to this sees no key. The bound is looser, because masked scores may have terms added.
NO_KEY = -5e8
_LOWEST = float(np.finfo(np.float32).min)
# Above this, a score times log2(e) would be infinite, and the difference of two such exponents NaN.
_HIGHEST = 2e38


@dataclass(frozen=True)
class Mask:
    """A select between a score and a number that masks it.

    Attributes:
        predicate: a node of booleans.
        keeps: the value of the predicate that keeps the score.
    """

    predicate: Node
    keeps: bool


def factored(node: Node) -> tuple[Node, float]:
    """Return a node and a positive number whose product is `node`.

    Factors are moved out of masks, but never out of sums.
    """
    return finished(_factored(node))


def _factored(node: Node) -> Steps[tuple[Node, float]]:
    if node.kind == "operation":
        match getattr(node.primitive, "name", ""), node.inputs:
            case "mul", (left, right):
                for one, other in ((left, right), (right, left)):
                    if (by := _positive(other)) is not None:
                        inner, factor = yield _factored(one)
                        return inner, factor * by
            case "div", (left, right) if (by := _positive(right)) is not None:
                inner, factor = yield _factored(left)
                return inner, factor / by
            case "convert_element_type", (only,) if only.kind == "operation":
                inner, factor = yield _factored(only)
                if factor != 1.0:
                    return replace(node, inputs=(inner,)), factor
            case "select_n", (predicate, *cases):
                for place, case in enumerate(cases):
                    if (fill := _number(case)) is None or len(cases) != 2:
                        continue
                    inner, factor = yield _factored(cases[1 - place])
                    if factor != 1.0:
                        # A finite fill stays finite, because a row of nothing else is uniform.
                        scaled = fill / factor if np.isinf(fill) else float(np.clip(fill / factor, _LOWEST, -_LOWEST))
                        pair = (
                            [number(np.float32(scaled)), inner] if place == 0 else [inner, number(np.float32(scaled))]
                        )
                        return replace(node, inputs=(predicate, *pair)), factor
    return node, 1.0


def bounded(node: Node) -> Node:
    """Return a score whose largest finite fills, such as those of `nan_to_num`, are exponents that kernels can compute.

    Other scores are far below, so such a fill takes the whole row either way.
    """
    known: dict[int, Node] = {}

    def rebuilt(one: Node) -> Steps[Node]:
        if id(one) not in known:
            known[id(one)] = yield without_overflow(one)
        return known[id(one)]

    def without_overflow(one: Node) -> Steps[Node]:
        fill, name = _number(one), getattr(one.primitive, "name", "")
        if fill is not None and _HIGHEST < fill < np.inf:
            return number(np.asarray(_HIGHEST, np.asarray(one.number).dtype))
        if one.kind != "operation" or name not in ("select_n", "convert_element_type"):
            return one
        inputs = list(one.inputs)
        # The first operand of a select is its predicate.
        for i in range(name == "select_n", len(inputs)):
            inputs[i] = yield rebuilt(inputs[i])
        same = all(new is old for new, old in zip(inputs, one.inputs, strict=True))
        return one if same else replace(one, inputs=tuple(inputs))

    return finished(rebuilt(node))


def unmasked(node: Node) -> tuple[Node, tuple[Mask, ...]]:
    """Return a score without its masks, and these masks."""
    found: dict[int, Mask] = {}
    known: dict[int, Node] = {}

    def rebuilt(one: Node) -> Steps[Node]:
        if id(one) not in known:
            known[id(one)] = yield without(one)
        return known[id(one)]

    def without(one: Node) -> Steps[Node]:
        if one.kind != "operation":
            return one
        if getattr(one.primitive, "name", "") == "select_n" and len(one.inputs) == 3:
            predicate, *cases = one.inputs
            for place, case in enumerate(cases):
                fill = _number(case)
                if fill is not None and fill <= MASKED:
                    found[id(one)] = Mask(predicate, keeps=place == 0)
                    return (yield rebuilt(cases[1 - place]))
        inputs = []
        for x in one.inputs:
            inputs.append((yield rebuilt(x)))
        same = all(new is old for new, old in zip(inputs, one.inputs, strict=True))
        return one if same else replace(one, inputs=tuple(inputs))

    return finished(rebuilt(node)), tuple(found.values())


def has_masks(region: Region) -> bool:
    """Return whether a region's score has masks."""
    return region.score is not None and bool(unmasked(region.score)[1])


def only_in_extras(region: Region) -> tuple[int, ...]:
    """Return the indices of the leaves with gradients on which only logits without values depend, such as sinks."""
    others = leaves_of(region.score, region.weight)
    return tuple(
        i
        for i, leaf in enumerate(region.leaves)
        if leaf.has_gradient and leaf not in others and leaf in leaves_of(*region.extras)
    )


def stopped(node: Node, primitive: core.Primitive) -> Node:
    """Return a value without derivatives, by stopping them at leaves and products.

    Masks and factors above these remain visible to the other functions of this module.

    Args:
        node: the value.
        primitive: the primitive that stops derivatives.
    """
    known: dict[int, Node] = {}
    for one in bottom_up(node):
        if one.kind in ("product", "sum") or (one.leaf is not None and one.leaf.has_gradient):
            known[id(one)] = operation(primitive, one)
        else:
            known[id(one)] = replace(one, inputs=tuple(known[id(x)] for x in one.inputs)) if one.inputs else one
    return known[id(node)]


def has_keys(*nodes: Node) -> bool:
    """Return whether any node depends on keys."""
    return any(leaf.role in ("key", "column", "score", "distance") for leaf in leaves_of(*nodes))


def _number(node: Node) -> float | None:
    if node.kind != "number" or np.size(node.number) != 1 or node.number.dtype.kind == "b":
        return None
    return float(np.asarray(node.number, np.float64).item()) if not isinstance(node.number, jax.Array) else None


def _positive(node: Node) -> float | None:
    found = _number(node)
    return found if found is not None and np.isfinite(found) and found > 0 else None


def scores_of(region: Region) -> tuple[tuple[Node | None, Node | None], float]:
    """Return a region's score with and without its masks, and the positive factor that was split off both.

    The score without masks is None if there are no masks, or if it has another factor.
    """
    if region.score is None:
        return (None, None), 1.0
    whole = bounded(region.score)
    score, factor = factored(whole)
    plain, masks = unmasked(whole)
    plain, same = factored(plain)
    return (score, plain if masks and same == factor else None), factor
