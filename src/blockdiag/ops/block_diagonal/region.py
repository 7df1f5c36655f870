"""Block-diagonal attention as a fused region, for blocks that are too long for one tile of scores.

Tiles of a layout are batch axes of the region, so keys of other blocks are never read. Where a layout's tile has rows
of no block or of several blocks, a mask says which keys a query sees. Tile lists skip fully masked tiles of scores.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from blockdiag.common.rotary import rotate, rotate_back
from blockdiag.fusion.ir.tree import Dim, Leaf, Node, Region, Source, number, operation
from blockdiag.ops.block_diagonal.layouts import (
    EqualSequences,
    Layout,
    RotaryArrays,
    Windows,
    operand_tiles,
    split_heads,
    turn_operands,
)
from blockdiag.ops.block_diagonal.problem import BlockDiagonalProblem

type Forward = Callable[[Region, Sequence[Any], Any], tuple[Any, Any]]
type Backward = Callable[[Region, Sequence[Any], Any, Any, Any, Any], tuple[list[Any], Any]]


def forward(
    compute: Forward, layout: Layout, query: Array, key: Array, value: Array, rotary: RotaryArrays | None
) -> tuple[Array, Array]:
    """Return output [tokens, N, H] in the dtype of `query`, and log-sum-exp [tokens, N]; both 0 in rows of padding.

    Args:
        compute: forward pass of a region.
        layout: layout of the tokens.
        query: [tokens, N, H].
        key, value: [tokens, K, H].
        rotary: (cos, sin, positions or None), or None.
    """
    problem = layout.problem
    query, key, value = operand_tiles(layout, query, key, value)
    query, key, value = turn_operands(rotate, layout, rotary, query, key, value)
    output, log_sum = compute(_region(layout), _leaves(layout, query, key), value)
    log_sum = jnp.moveaxis(log_sum, -1, len(layout.lead))
    shape = (problem.tokens, problem.query_heads)
    return layout.to_tokens(output).reshape(*shape, -1), layout.to_tokens(log_sum).reshape(shape)


def backward(
    compute: Backward,
    layout: Layout,
    query: Array,
    key: Array,
    value: Array,
    rotary: RotaryArrays | None,
    output_cotangent: Array,
    output: Array,
    log_sum: Array,
) -> tuple[Array, Array, Array]:
    """Return the gradients of query, key and value in their dtype.

    Args:
        compute: backward pass of a region.
        layout, query, key, value, rotary: as for `forward`.
        output_cotangent: [tokens, N, H].
        output, log_sum: the results of `forward`.
    """
    problem = layout.problem
    query, key, value = operand_tiles(layout, query, key, value)
    query, key, value = turn_operands(rotate, layout, rotary, query, key, value)
    output_cotangent, output, log_sum = (
        layout.to_tiles(split_heads(problem, x)) for x in (output_cotangent, output, log_sum)
    )
    log_sum = jnp.moveaxis(log_sum, len(layout.lead), -1)
    leaves = _leaves(layout, query, key)
    gradients, value_gradient = compute(_region(layout), leaves, value, output, log_sum, output_cotangent)
    results = turn_operands(rotate_back, layout, rotary, gradients[0], gradients[1], value_gradient)
    d_query, d_key, d_value = (layout.to_tokens(x).reshape(problem.tokens, -1, x.shape[-1]) for x in results)
    return d_query, d_key, d_value


@functools.lru_cache(maxsize=1024)
def region_of(problem: BlockDiagonalProblem, kind: type[Layout], lead: tuple[int, ...], rows: int) -> Region:
    """Return the region of a layout's tiles: query [lead.., rows, K, G, H], key and value [lead.., rows, K, H].

    Equal arguments give the same object, so that nothing is traced or generated twice.
    """
    labels = tuple(f"b{axis}" for axis in range(len(lead) + 1))
    *outer, heads = labels
    sizes = dict(zip(labels, (*lead, problem.key_heads), strict=True))
    sizes |= {"g0": problem.group_size, "q": rows, "k": rows, "f00": problem.head_dim, "d0": problem.head_dim}
    dtype = np.dtype(jnp.dtype(problem.dtype))
    first: tuple[Dim, ...] = tuple((label,) for label in outer)
    query_shape = (*lead, rows, problem.key_heads, problem.group_size, problem.head_dim)
    key_shape = (*lead, rows, problem.key_heads, problem.head_dim)
    batch = (*labels, "g0")
    query = Leaf(Source("query", query_shape, dtype), (*first, ("q",), (heads,), ("g0",), ("f00",)), "query", batch)
    key = Leaf(Source("key", key_shape, dtype), (*first, ("k",), (heads,), ("f00",)), "key", labels)
    masks, predicates = _masks(problem, kind, lead, rows)
    nodes = {leaf: Node("leaf", leaf=leaf) for leaf in (query, key, *masks)}
    score = operation(lax.mul_p, Node("product", (nodes[query], nodes[key])), number(problem.scale))
    for primitive, left, right in predicates:
        score = operation(lax.select_n_p, operation(primitive, nodes[left], nodes[right]), number(-np.inf), score)
    return Region(
        sizes=sizes,
        batch=batch,
        score=score,
        extras=(),
        weight=None,
        leaves=(query, key, *masks),
        value=Source("value", key_shape, dtype),
        value_dims=(*first, ("k",), (heads,), ("d0",)),
        out_dims=(*first, ("q",), (heads,), ("g0",), ("d0",)),
        dtype=dtype,
    )


def _masks(
    problem: BlockDiagonalProblem, kind: type[Layout], lead: tuple[int, ...], rows: int
) -> tuple[tuple[Leaf, ...], list[tuple[Any, Leaf, Leaf]]]:
    """Return the leaves of the masks, and the predicates that all hold for an unmasked score."""
    integer = np.dtype(np.int32)
    places = Source(None, (rows,), integer)
    row, column = Leaf(places, (("q",),), "row", ()), Leaf(places, (("k",),), "column", ())
    leaves: list[Leaf] = []
    predicates: list[tuple[Any, Leaf, Leaf]] = []
    if kind is Windows:
        shape = (*lead, rows)
        own = Leaf(Source("query segments", shape, integer), (("b0",), ("q",)), "row", ("b0",))
        other = Leaf(Source("key segments", shape, integer), (("b0",), ("k",)), "column", ("b0",))
        leaves = [own, other]
        predicates = [(lax.eq_p, own, other)]
    elif not _is_full(problem, kind):
        # The lengths are those of one sequence's tiles, which all sequences share, or of the tiles of a table.
        label = f"b{len(lead) - 1}"
        known = _equal(problem).known_lengths if kind is EqualSequences else None
        lengths = Leaf(Source("lengths", lead[-1:], integer, known), ((label,),), "scalar", (label,))
        leaves = [column, lengths]
        predicates = [(lax.lt_p, column, lengths)]
    if problem.is_causal:
        leaves += [leaf for leaf in (row, column) if leaf not in leaves]
        predicates.append((lax.ge_p, row, column))
    return tuple(leaves), predicates


def _region(layout: Layout) -> Region:
    return region_of(layout.problem, type(layout), layout.lead, layout.rows)


def _leaves(layout: Layout, query: Array, key: Array) -> list[Array]:
    """Return the arrays for the leaves of a layout's region."""
    named = {"query": query, "key": key, None: jnp.arange(layout.rows, dtype=jnp.int32)}
    if isinstance(layout, Windows):
        named["query segments"], named["key segments"] = layout.segments
    else:
        named["lengths"] = layout.lengths
    return [named[leaf.source.key] for leaf in _region(layout).leaves]


def _is_full(problem: BlockDiagonalProblem, kind: type[Layout]) -> bool:
    """Return whether every row of every tile of the layout belongs to a block."""
    return kind is EqualSequences and _equal(problem).is_full


def _equal(problem: BlockDiagonalProblem) -> EqualSequences:
    assert problem.sequence_length is not None
    return EqualSequences(problem, problem.sequence_length)
