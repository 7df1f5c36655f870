"""Queries and keys on a grid, such as pixels: the label of their axis is divided into parts, "k/0/2" and "k/1/2".

Some functions divide the axes of queries and keys by a reshape, add terms of rows and columns of the grid, and merge
the axes again. Such scores are traced through these reshapes with the parts as labels. Operands have whole labels:

- An array that has all parts, or has queries or keys only, is reshaped by XLA and repeated along parts that it lacks.
- An array [T, S] that is constant along some parts of the keys becomes a product. One factor is the array itself, with
  the parts that it has as features. The other is a one-hot matrix that selects the features of each key. Positions
  that are decomposed into rows and columns of pixels are such arrays (Li et al., 2021, "MViTv2"). Kernels then read
  [T, rows of pixels] instead of [T, S], and the gradient has that shape, too.
"""

import math
from collections import ChainMap
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from blockdiag.fusion.ir.tree import COLUMNS, ROWS, Dim, Source, Unpullable
from blockdiag.fusion.regions.materialise import source_made_by

# Lower bound of biases in a product; a dtype with a smaller range uses its least number.
_MASKED = -1e30
# Most features of a product that kernels take.
_MOST_FEATURES = 256


def base_of(label: str) -> str:
    """Return the label that a part divides, or the label itself."""
    return label.partition("/")[0]


def joined_parts(labels: Sequence[str]) -> tuple[str, ...]:
    """Return the labels of an axis, with complete sequences of parts replaced by their whole label."""
    found: list[str] = []
    waiting = list(labels)
    while waiting:
        base, _, rest = waiting[0].partition("/")
        count = int(rest.partition("/")[2]) if rest else 1
        parts = _parts(base, count)
        whole = count > 1 and tuple(waiting[:count]) == parts
        found.append(base if whole else waiting[0])
        waiting = waiting[count if whole else 1 :]
    return tuple(found)


def has_parts(dims: Sequence[Dim]) -> bool:
    """Return whether an axis stands for a part."""
    return any("/" in label for dim in dims if isinstance(dim, tuple) for label in dim)


def _parts(label: str, count: int) -> tuple[str, ...]:
    return tuple(f"{label}/{i}/{count}" for i in range(count))


type Divide = Callable[[str, Sequence[int]], tuple[str, ...]]
"""A function that returns the parts of a label, given their sizes."""


class Grids:
    """Converter of arrays whose axes stand for parts into arrays with whole labels.

    Attributes:
        sizes: the sizes of all labels, including parts. A region's own labels never include parts.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes: MutableMapping[str, int] = ChainMap({}, sizes)  # pyrefly: ignore[bad-argument-type]

    def divided(self, label: str, sizes: Sequence[int]) -> tuple[str, ...]:
        """Divide a label into parts of these sizes, and return the parts.

        Raises:
            Unpullable: the label is not that of queries or keys, or it is divided in another way already.
        """
        if label not in (ROWS, COLUMNS):
            raise Unpullable("`reshape` that divides an axis")
        parts = _parts(label, len(sizes))
        known = self._parts_of(label)
        if known != [label] and (known != [*parts] or [self.sizes[x] for x in known] != [*sizes]):
            raise Unpullable("`reshape` that divides an axis otherwise than another one")
        self.sizes.update(zip(parts, sizes, strict=True))
        return parts

    def whole(self, source: Source, dims: tuple[Dim, ...]) -> tuple[Source, tuple[Dim, ...]]:
        """Return an array with whole labels, repeated along parts that it lacks, and its dims."""
        groups = self._others(dims)
        groups += [((base,), self._parts_of(base)) for base in (ROWS, COLUMNS) if self._present(base, dims)]
        return self._gathered(source, dims, groups)

    def as_product(
        self, source: Source, dims: tuple[Dim, ...], feature: str
    ) -> list[tuple[Source, tuple[Dim, ...]]] | None:
        """Return an array of queries by keys as the two factors of a product, of queries and of keys, with their dims.

        Args:
            feature: the contracted label, whose size is set.

        Returns:
            None if the array has all parts, or too many features.
        """
        some = [x for x in (COLUMNS, ROWS) if self._present(x, dims) not in ([], self._parts_of(x))]
        few = [x for x in some if math.prod(self.sizes[part] for part in self._present(x, dims)) <= _MOST_FEATURES]
        if not few:
            return None
        base, other = few[0], ROWS if few[0] == COLUMNS else COLUMNS
        present = self._present(base, dims)
        groups = self._others(dims)
        if self._present(other, dims):
            groups.append(((other,), self._parts_of(other)))
        array = self._gathered(source, dims, [*groups, ((feature,), present)], is_finite=True)
        self.sizes[feature] = math.prod(self.sizes[x] for x in present)
        selection = self._selection(base, present, source.dtype), ((base,), (feature,))
        return [array, selection] if base == COLUMNS else [selection, array]

    def _selection(self, base: str, present: Sequence[str], dtype: Any) -> Source:
        """Return the one-hot matrix [label, features] that maps each index of a label to its index along some parts."""
        parts = self._parts_of(base)
        size, features = self.sizes[base], math.prod(self.sizes[x] for x in present)

        def compute() -> Any:
            index, found = lax.iota(jnp.int32, size), lax.full([size], 0, jnp.int32)
            for i, part in enumerate(parts):
                if part in present:
                    here = np.int32(self.sizes[part])
                    behind = np.int32(math.prod(self.sizes[x] for x in parts[i + 1 :]))
                    found = found * here + lax.rem(lax.div(index, behind), here)
            at = lax.broadcasted_iota(jnp.int32, (size, features), 1)
            return lax.convert_element_type(lax.eq(lax.broadcast_in_dim(found, at.shape, [0]), at), dtype)

        return source_made_by(compute, [])

    def _parts_of(self, base: str) -> list[str]:
        """Return all parts of a label, or the label itself if it is not divided."""
        parts = sorted((x for x in self.sizes if base_of(x) == base and x != base), key=_place)
        return parts or [base]

    def _present(self, base: str, dims: Sequence[Dim]) -> list[str]:
        """Return the parts of a label that occur in dims, in order; none if the whole label occurs."""
        labels = {label for dim in dims if isinstance(dim, tuple) for label in dim}
        return [x for x in self._parts_of(base) if x in labels and x != base]

    @staticmethod
    def _others(dims: Sequence[Dim]) -> list[tuple[Dim, list[Any]]]:
        """Return all entries of dims that are not parts, each as a group of its own."""
        entries = [(axis, entry) for axis, dim in enumerate(dims) for entry in _entries(axis, dim)]
        return [
            ((entry,) if isinstance(entry, str) else dims[axis], [entry])
            for axis, entry in entries
            if not (isinstance(entry, str) and "/" in entry)
        ]

    def _gathered(
        self,
        source: Source,
        dims: Sequence[Dim],
        groups: Sequence[tuple[Dim, list[Any]]],
        *,
        is_finite: bool = False,
    ) -> tuple[Source, tuple[Dim, ...]]:
        """Return an array with an axis for each group of labels, repeated along labels that it lacks, and its dims.

        Args:
            is_finite: whether to clamp infinite masks, whose product with 0 would be NaN.
        """
        has = [entry for axis, dim in enumerate(dims) for entry in _entries(axis, dim)]
        order = [entry for _, group in groups for entry in group]
        places = [i for i, entry in enumerate(order) if entry in has]
        axis_sizes = dict(zip([x for x in has if not isinstance(x, str)], _unlabelled(source.shape, dims), strict=True))
        sizes: dict[Any, int] = {entry: axis_sizes.get(entry) or self.sizes[entry] for entry in {*has, *order}}

        def compute(*given: Any) -> Any:
            (array,) = given or (lax.iota(source.dtype, source.shape[0]),)
            if is_finite:
                array = lax.max(array, jnp.asarray(max(_MASKED, float(jnp.finfo(array.dtype).min)), array.dtype))
            array = lax.transpose(lax.reshape(array, [sizes[x] for x in has]), [has.index(order[i]) for i in places])
            array = lax.broadcast_in_dim(array, [sizes[x] for x in order], places)
            return lax.reshape(array, [math.prod(sizes[x] for x in group) for _, group in groups])

        is_same = not is_finite and has == order and all(len(group) == 1 for _, group in groups)
        if is_same and source.key is not None:
            return source, tuple(dim for dim, _ in groups)
        made = source_made_by(compute, [] if source.key is None else [source.key])
        if source.key is None or source.constant is not None:
            with jax.ensure_compile_time_eval():
                constant = compute(*([] if source.constant is None else [source.constant]))
            made = replace(made, constant=np.asarray(constant))
        return made, tuple(dim for dim, _ in groups)


def _place(part: str) -> int:
    return int(part.split("/")[1])


def _entries(axis: int, dim: Dim) -> list[Any]:
    """Return the labels of an axis, or its index if it has none."""
    return list(dim) if isinstance(dim, tuple) and dim else [axis]


def _unlabelled(shape: Sequence[int], dims: Sequence[Dim]) -> list[int]:
    """Return the sizes of axes without labels."""
    return [size for size, dim in zip(shape, dims, strict=True) if isinstance(dim, int) or not dim]
