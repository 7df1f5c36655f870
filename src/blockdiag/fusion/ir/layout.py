"""Memory layout of arrays: offsets and strides by label."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from blockdiag.fusion.ir.tree import COLUMNS, ROWS, Dim, Leaf


@dataclass(frozen=True)
class Layout:
    """Layout of an array, in elements.

    Attributes:
        offset: the offset of the first element.
        strides: the stride of each label.
    """

    offset: int
    strides: Mapping[str, int]

    def base(self, labels: Sequence[str]) -> str:
        """Return the offset of a batch index, as an expression in the variables `i_<label>`."""
        terms = [f"i_{label} * {self.strides[label]}" for label in labels if label in self.strides]
        return " + ".join([*terms, *([str(self.offset)] if self.offset or not terms else [])])

    def stride(self, label: str) -> int:
        """Return the stride of a label, or 0 if the array lacks it."""
        return self.strides.get(label, 0)


def layout_of(shape: Sequence[int], dims: Sequence[Dim], sizes: Mapping[str, int]) -> Layout:
    """Return the layout of a row-major array whose axes stand for `dims`."""
    offset, strides, step = 0, {}, 1
    for size, dim in zip(reversed(shape), reversed(dims), strict=True):
        if isinstance(dim, int):
            offset += dim * step
        else:
            inner = step
            for label in reversed(dim):
                strides[label] = inner
                inner *= sizes[label]
        step *= size
    return Layout(offset, strides)


def flat_stride(layout: Layout, labels: Sequence[str], sizes: Mapping[str, int]) -> int | None:
    """Return the stride of several labels as one axis, the first one slowest; None if they cannot be merged."""
    if not labels:
        return 0
    expected = layout.strides[labels[-1]]
    step = expected
    for label in reversed(labels):
        if layout.strides[label] != step and sizes[label] != 1:
            return None
        step = step * sizes[label] if sizes[label] != 1 else step
    return expected


def shape_of(dims: Sequence[Dim], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape of an array whose axes stand for `dims`."""
    return tuple(math.prod(sizes[label] for label in dim) if isinstance(dim, tuple) else 1 for dim in dims)


def arranged_dims(leaf: Leaf, sizes: Mapping[str, int]) -> tuple[Dim, ...] | None:
    """Return the dims that a leaf should be rearranged to, or None if kernels read its own layout well.

    Features must form one axis. An array of queries by keys with heads as its last axis has neither queries nor keys
    contiguous. Each element would then be a separate load, which moves 32 bytes and cannot be prefetched, and a
    separate store in the gradient.
    """
    layout = layout_of(leaf.source.shape, leaf.dims, sizes)
    labels = tuple((label,) for label in leaf.labels)
    match leaf.role:
        case "query" | "key" | "feature" if flat_stride(layout, leaf.features, sizes) is None:
            lines: dict[str, tuple[Dim, ...]] = {"query": ((ROWS,),), "key": ((COLUMNS,),)}
            return (*labels, *lines.get(leaf.role, ()), leaf.features)
        case "score" if min(layout.stride(ROWS), layout.stride(COLUMNS)) > 1:
            return (*labels, (ROWS,), (COLUMNS,))
    return None
