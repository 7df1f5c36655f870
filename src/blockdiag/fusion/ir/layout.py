"""Where the elements of an array lie, by label."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from blockdiag.fusion.ir.tree import COLUMNS, ROWS, Dim, Leaf


@dataclass(frozen=True)
class Layout:
    """Offsets of an array's elements, in elements.

    Attributes:
        offset: of the first one.
        strides: of each label.
    """

    offset: int
    strides: Mapping[str, int]

    def base(self, labels: Sequence[str]) -> str:
        """The offset of a batch index, as an expression of `i_<label>`."""
        terms = [f"i_{label} * {self.strides[label]}" for label in labels if label in self.strides]
        return " + ".join([*terms, *([str(self.offset)] if self.offset or not terms else [])])

    def stride(self, label: str) -> int:
        """Of a label, 0 without it."""
        return self.strides.get(label, 0)


def layout_of(shape: Sequence[int], dims: Sequence[Dim], sizes: Mapping[str, int]) -> Layout:
    """The layout of a row-major array whose axes stand for `dims`."""
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
    """The stride of several labels as one axis, the first one slowest; None where they are not one."""
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
    """The shape of an array whose axes stand for `dims`."""
    return tuple(math.prod(sizes[label] for label in dim) if isinstance(dim, tuple) else 1 for dim in dims)


def arranged_dims(leaf: Leaf, sizes: Mapping[str, int]) -> tuple[Dim, ...] | None:
    """What the axes of a leaf should stand for where kernels cannot read it well as it lies; None where they can.

    Features must be one axis. Of queries by keys neither lie side by side where heads are the last axis: each element
    then is a load of its own, which moves 32 bytes and cannot be begun early, and a store of its own in the gradient.
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
