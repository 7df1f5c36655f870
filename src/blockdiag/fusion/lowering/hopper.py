"""Shared memory limits of Hopper, and arrays as matrices whose tiles its copy engine (TMA) moves."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from blockdiag.fusion.ir.layout import Layout, flat_stride, layout_of, shape_of
from blockdiag.fusion.ir.tree import Leaf, Region, Source, nodes_of, with_node
from blockdiag.fusion.lowering.tile_program import value_columns

ROWS = 128
"""Queries per program: two warp groups with 64 each."""
# 227 KiB, less 512 bytes for barriers.
SHARED_BYTES = 232448 - 512


@dataclass(frozen=True)
class Place:
    """Matrix view of an array, whose tiles the copy engine moves.

    Attributes:
        shape: the shape of the matrix.
        rows, columns: the row stride or the column stride of each batch label.
        first: the row and the column of the first element.
    """

    shape: tuple[int, int]
    rows: dict[str, int]
    columns: dict[str, int]
    first: tuple[int, int]


@dataclass(frozen=True, eq=False)
class OfProduct:
    """A region whose scores are a function of one product of queries and keys.

    Attributes:
        region: the region, with a leaf in place of the product.
        product: this leaf.
        query, key: the factors of the product.
    """

    region: Region
    product: Leaf
    query: Leaf
    key: Leaf


def of_product(region: Region) -> OfProduct | None:
    """Return a region with a leaf in place of its only product; None if scores have none, several or other sums."""
    products = [node for node in nodes_of(region.score) if node.kind in ("product", "sum")]
    if len(products) != 1 or products[0].kind == "sum":
        return None
    query, key = (x.leaf for x in products[0].inputs)
    if query is None or key is None:
        return None
    assert region.score is not None
    shape = (region.sizes["q"], region.sizes["k"])
    product = Leaf(Source("product", shape, np.dtype(np.float32)), (("q",), ("k",)), "score", (), is_constant=True)
    score = with_node(region.score, products[0], product)
    return OfProduct(replace(region, score=score, leaves=(*region.leaves, product)), product, query, key)


def places_of(region: Region, query: Leaf, key: Leaf, **others: tuple[Any, ...]) -> dict[str, Place] | None:
    """Return the matrix views of "query", "key", "value", "output" and other arrays.

    The result is None if the copy engine cannot move one of them.

    Args:
        others: the shape, dims, label and lines of each other array; for label and lines see `place_of`.
    """
    sizes, columns = region.sizes, tuple(value_columns(region))
    arrays: dict[str, tuple[Any, ...]] = {
        "query": (query.source.shape, query.dims, "q", query.features, query.source.dtype.itemsize),
        "key": (key.source.shape, key.dims, "k", key.features, key.source.dtype.itemsize),
        "value": (region.value.shape, region.value_dims, "k", columns, region.value.dtype.itemsize),
        "output": (shape_of(region.out_dims, sizes), region.out_dims, "q", columns),
    }
    found = {}
    for name, (shape, dims, label, lines, *itemsize) in (arrays | others).items():
        place = place_of(layout_of(shape, dims, sizes), shape, label, lines, sizes, *itemsize)
        if place is None:
            return None
        found[name] = place
    return found


def place_of(
    layout: Layout, shape: tuple[int, ...], label: str, lines: tuple[str, ...], sizes: dict[str, int], itemsize: int = 2
) -> Place | None:
    """Return the view of an array as a matrix with one row per query or key, None if the copy engine cannot move it.

    Args:
        label: the label of queries or of keys.
        lines: the labels that are contiguous within a row.
        itemsize: the bytes of an element. Rows must be multiples of 16 bytes and of eight elements.
    """
    step = layout.stride(label)
    whole, width = math.prod(shape), math.prod(sizes[x] for x in lines)
    is_aligned = step > 0 and step % max(8, 16 // itemsize) == 0
    if flat_stride(layout, lines, sizes) != 1 or not is_aligned or whole % step or whole // step >= 2**31:
        return None
    rows, columns = {}, {}
    for other, stride in layout.strides.items():
        if other == label or other in lines or sizes[other] == 1:
            continue
        if stride % step == 0:
            rows[other] = stride // step
        elif stride < step and stride % width == 0:
            columns[other] = stride
        else:
            return None
    first = (layout.offset // step, layout.offset % step)
    end = first[1] + width + sum((sizes[x] - 1) * stride for x, stride in columns.items())
    return Place((whole // step, step), rows, columns, first) if end <= step else None


def is_narrow(region: Region, *leaves: Leaf) -> bool:
    """Return whether values, results and the given leaves share one 16-bit floating dtype."""
    dtypes = {np.dtype(region.dtype), region.value.dtype, *(leaf.source.dtype for leaf in leaves)}
    return len(dtypes) == 1 and region.dtype.itemsize == 2 and bool(jnp.issubdtype(region.dtype, jnp.floating))


def count_of(region: Region, labels: Sequence[str]) -> int:
    """Return the product of the sizes of some labels."""
    return math.prod(region.sizes[x] for x in labels)
