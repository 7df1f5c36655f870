"""Sums over features that are not matrix products: additive attention, absolute differences, and the like.

    sum over f of g(q[i, f], k[j, f], w[f], ..)

Here g is an elementwise function. On tiles the sum is a loop over features. The forward loop adds one tile a step. The
backward loop recomputes each tile and its derivative. Code size and registers do not depend on the number of features.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from blockdiag.common.derivatives import on_common_axes
from blockdiag.fusion.ir.tree import (
    Function,
    Leaf,
    Node,
    Role,
    Source,
    Trees,
    Unpullable,
    bottom_up,
    number,
    operation,
)

_LINES: Mapping[Role, Role] = {"query": "row", "key": "column", "feature": "scalar"}
"""The role of a single feature of a leaf."""


def sum_of_features(body: Node, sizes: Mapping[str, int]) -> Node:
    """Return the node that sums a tree over features of its leaves.

    Args:
        body: the tree of the summand.
        sizes: the sizes of the summed labels.

    Raises:
        Unpullable: the summand contains a matrix product, or another such sum, for each feature.
    """
    varying: dict[int, Node] = {}
    for node in bottom_up(body):
        has_features = node.leaf is not None and not sizes.keys().isdisjoint(node.leaf.features)
        if has_features or any(id(x) in varying for x in node.inputs):
            varying[id(node)] = node
            if node.kind in ("product", "sum"):
                raise Unpullable("a sum over features of sums over features")
    if not varying:
        return operation(lax.mul_p, body, number(float(math.prod(sizes.values()))))
    needed = {*varying, *(id(x) for node in varying.values() for x in node.inputs)}
    inputs: list[Node] = []
    known: dict[int, Node] = {}
    for node in bottom_up(body):
        if id(node) not in needed or node.kind == "number":
            known[id(node)] = node
        elif id(node) in varying and node.kind != "leaf":
            known[id(node)] = replace(node, inputs=tuple(known[id(x)] for x in node.inputs))
        else:
            # Inputs that do not depend on the feature are computed once, outside of the loop.
            role = "score" if node.leaf is None or id(node) not in varying else _LINES[node.leaf.role]
            own = Leaf(Source(("input", len(inputs)), (), np.dtype(np.float32)), (), role, ())
            known[id(node)] = Node("leaf", leaf=own)
            inputs.append(node)
    leaves = tuple(known[id(node)].leaf for node in inputs)
    function = Function(Trees((known[id(body)],), leaves), (), None, "vjp")
    return Node("sum", tuple(inputs), function=function, params={"sizes": tuple(sorted(sizes.items()))})


def summed(node: Node, tiles: Sequence[Any], compute: Callable[..., Any], dtype: Any, *, flipped: bool) -> Any:
    """Return a sum over features on tiles, with its gradient.

    Args:
        node: the sum.
        tiles: its inputs: [rows, features], [columns, features], [1, features], or [rows or 1, columns or 1].
        compute: the summand of one feature, as a function of lines [rows, 1], [1, columns], [1, 1] and of tiles.
        dtype: the dtype of the accumulators.
        flipped: whether scores are [columns, rows].
    """
    sizes = dict(node.params["sizes"])
    count = math.prod(sizes.values())
    leaves = [None if x.leaf is None or sizes.keys().isdisjoint(x.leaf.features) else x.leaf for x in node.inputs]
    axes = {"query": int(flipped), "key": int(not flipped), "feature": 0}

    def places(step: Any) -> list[Any]:
        """Return the feature of each input at a step, or None for inputs without features."""
        return [None if leaf is None else _place(step, leaf.features, sizes) for leaf in leaves]

    def lines(at: Sequence[Any], given: Sequence[Any]) -> list[Any]:
        return [
            x if leaf is None else _line(x, place, axes[leaf.role])
            for leaf, place, x in zip(leaves, at, given, strict=True)
        ]

    def zeros(shape: Sequence[int]) -> Any:
        return jnp.zeros(shape, dtype)

    def total(*given: Any) -> Any:
        shape = jax.eval_shape(lambda *some: compute(*lines(places(np.int32(0)), some)), *given).shape

        def add(step: Any, found: Any) -> Any:
            return found + compute(*lines(places(step), given))

        start, _ = on_common_axes(zeros(shape), given)
        return lax.fori_loop(0, count, add, start)

    def backward(given: Sequence[Any], cotangent: Any) -> tuple[Any, ...]:
        wanted = [place for place, x in enumerate(given) if jnp.issubdtype(x.dtype, jnp.floating)]

        def add(step: Any, found: Sequence[Any]) -> list[Any]:
            at = places(step)
            whole = lines(at, given)

            def some(*chosen: Any) -> Any:
                every = list(whole)
                for place, x in zip(wanted, chosen, strict=True):
                    every[place] = x
                return compute(*every)

            _, pull = jax.vjp(some, *(whole[place] for place in wanted))
            grads = [grad.astype(dtype) for grad in pull(cotangent)]
            added = [
                grad if at[place] is None else _spread(grad, at[place], old.shape)
                for place, old, grad in zip(wanted, found, grads, strict=True)
            ]
            return [old + new for old, new in zip(found, added, strict=True)]

        start, _ = on_common_axes([zeros(given[place].shape) for place in wanted], (*given, cotangent))
        # Unused gradients are removed later.
        found = iter(lax.fori_loop(0, count, add, start))
        return tuple(next(found).astype(x.dtype) if place in wanted else None for place, x in enumerate(given))

    with_gradients = jax.custom_vjp(total)
    with_gradients.defvjp(lambda *given: (total(*given), given), backward)
    return with_gradients(*tiles)


def _place(step: Any, own: Sequence[str], sizes: Mapping[str, int]) -> Any:
    """Return the index of a step among the array's own features; the last label varies fastest in both."""
    if tuple(own) == tuple(sizes):
        return step
    place, stride = 0, 1
    for label in reversed(own):
        faster = math.prod(size for other, size in sizes.items() if other > label)
        # Steps are never negative, so the sign handling of `//` and `%` is not needed.
        digit = lax.rem(lax.div(step, jnp.full_like(step, faster)), jnp.full_like(step, sizes[label]))
        place = place + digit * stride
        stride *= sizes[label]
    return place


def _line(tile: Any, place: Any, axis: int) -> Any:
    """Return one feature of [rows, features] as [rows, 1] or [1, rows].

    Args:
        axis: the axis of scores along which these rows lie.
    """
    size = tile.shape[0]
    column = lax.dynamic_slice(tile, (0, place), (size, 1), allow_negative_indices=False)
    return lax.broadcast_in_dim(lax.squeeze(column, (1,)), (size, 1) if axis == 0 else (1, size), (axis,))


def _spread(line: Any, place: Any, shape: tuple[int, ...]) -> Any:
    """Return one feature's gradient as [rows, features], with 0 in all other features."""
    here = lax.broadcasted_iota(np.int32, (1, shape[1]), 1) == place
    column = line if line.shape == (shape[0], 1) else line.T
    return jnp.where(jnp.broadcast_to(here, shape), jnp.broadcast_to(column, shape), jnp.zeros(shape, line.dtype))
