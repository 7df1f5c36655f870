"""Shared memory of Hopper, and arrays as matrices, of which its copy engine takes tiles."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from blockdiag.fusion.ir.layout import Layout, flat_stride, layout_of, shape_of
from blockdiag.fusion.ir.tree import Leaf, Region
from blockdiag.fusion.lowering.tile_program import value_columns

ROWS = 128
"""Queries of a program: two groups of warps with 64 each."""
# Of 227 KiB, less barriers.
SHARED_BYTES = 232448 - 512


@dataclass(frozen=True)
class Place:
    """An array as a matrix, of which the copy engine takes tiles.

    Attributes:
        shape: of the matrix.
        rows, columns: by batch label, how many of either one step is.
        first: row and column of the first element.
    """

    shape: tuple[int, int]
    rows: dict[str, int]
    columns: dict[str, int]
    first: tuple[int, int]


def places_of(region: Region, query: Leaf, key: Leaf, **others: tuple[Any, ...]) -> dict[str, Place] | None:
    """Of "query", "key", "value" and "output", and of other arrays; None where the copy engine cannot move one of them.

    Args:
        others: shape, dims, label and lines of each, as `place_of` takes them.
    """
    sizes, columns = region.sizes, tuple(value_columns(region))
    arrays: dict[str, tuple[Any, ...]] = {
        "query": (query.source.shape, query.dims, "q", query.features),
        "key": (key.source.shape, key.dims, "k", key.features),
        "value": (region.value.shape, region.value_dims, "k", columns),
        "output": (shape_of(region.out_dims, sizes), region.out_dims, "q", columns),
    }
    found = {}
    for name, (shape, dims, label, lines) in (arrays | others).items():
        place = place_of(layout_of(shape, dims, sizes), shape, label, lines, sizes)
        if place is None:
            return None
        found[name] = place
    return found


def place_of(
    layout: Layout, shape: tuple[int, ...], label: str, lines: tuple[str, ...], sizes: dict[str, int]
) -> Place | None:
    """An array as a matrix with a row for each query or key, None where it is none, or one that cannot be copied.

    Args:
        label: of queries or keys.
        lines: of what lies side by side in a row.
    """
    step = layout.stride(label)
    whole, width = math.prod(shape), math.prod(sizes[x] for x in lines)
    if flat_stride(layout, lines, sizes) != 1 or step % 8 or not step or whole % step or whole // step >= 2**31:
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
    """Whether values, results and leaves are 16-bit numbers of one dtype."""
    dtypes = {np.dtype(region.dtype), region.value.dtype, *(leaf.source.dtype for leaf in leaves)}
    return len(dtypes) == 1 and region.dtype.itemsize == 2 and bool(jnp.issubdtype(region.dtype, jnp.floating))


def count_of(region: Region, labels: Sequence[str]) -> int:
    """Indices of some labels."""
    return math.prod(region.sizes[x] for x in labels)
