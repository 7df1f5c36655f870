"""One device's part of a region whose tokens several devices share, each of which computes rows of its own."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from blockdiag.common.shards import Part
from blockdiag.fusion.mapping import map_region
from blockdiag.fusion.sharding import gathered_axes, local_region
from blockdiag.fusion.tree import COLUMNS, DISTANCE, ROWS, Dim, Region

type Order = Literal["consecutive", "zigzag"]
"""The order of the rows of all devices, see `zigzag_order`."""

type Pass = Callable[..., Sequence[Any]]


@dataclass(frozen=True)
class Rows:
    """The rows of one device.

    What has keys is gathered before a pass, and its gradients are added up in float32 after it, each device's part on
    that device. An array of distances between queries and keys is read from another place for each run of rows: runs
    are then a batch axis of the pass.

    Attributes:
        region: of all devices.
        part: of one device, whose label of rows tells which axes of the mesh share tokens.
        order: of rows.
    """

    region: Region
    part: Part
    order: Order

    def results(self, results_of: Callable[[Region], Pass]) -> Pass:
        """The forward pass; `results_of` a region is that of a device that has all keys."""

        def compute(*operands: Any) -> Sequence[Any]:
            own = self._whole(operands)
            if not self._has_distances:
                return results_of(self._local())(*own)
            flags = self._in_runs
            output, log_sum = results_of(map_region(self._local(), self._runs, flags))(*self._cut(own))
            rows = len(self.region.batch)
            return _joined(output, axis_of(self.region.out_dims, ROWS)), _joined(log_sum, rows)

        return compute

    def gradients(self, gradients_of: Callable[[Region], Pass]) -> Pass:
        """The backward pass: of leaves, values, result, log-sum-exp and cotangents, to the gradients."""
        count = len(self._dims)

        def compute(*operands: Any) -> Sequence[Any]:
            own, (output, log_sum, *cotangents) = self._whole(operands[:count]), operands[count:]
            if not self._has_distances:
                grads = gradients_of(self._local())(*own, output, log_sum, *cotangents)
                return self._scattered(grads)
            of_output, of_log_sum = axis_of(self.region.out_dims, ROWS), len(self.region.batch)
            assert of_output is not None, "results have rows"
            places = [of_output, of_log_sum, of_output, of_log_sum]
            rest = [self._split(x, place) for x, place in zip((output, log_sum, *cotangents), places, strict=False)]
            grads = gradients_of(map_region(self._local(), self._runs, self._in_runs))(*self._cut(own), *rest)
            joined = [
                self._spread(x, distances) if distances is not None else x if rows is None else _joined(x, rows)
                for x, (rows, distances) in zip(grads, self._with_gradient(self._row_axes), strict=True)
            ]
            return self._scattered(joined)

        return compute

    @property
    def _names(self) -> tuple[str, ...]:
        """The axes of the mesh that share tokens."""
        return self.part.axes.get(ROWS, ())

    @property
    def _has_distances(self) -> bool:
        return bool(self._names) and any(leaf.role == "distance" for leaf in self.region.leaves)

    @property
    def _runs(self) -> int:
        """Into how many runs of rows the device's rows fall."""
        return 2 if self.order == "zigzag" else 1

    @property
    def _dims(self) -> list[tuple[Dim, ...]]:
        return [*(leaf.dims for leaf in self.region.leaves), self.region.value_dims]

    @property
    def _row_axes(self) -> list[tuple[int | None, int | None]]:
        """The axes of rows and of distances of each leaf, and of the values."""
        return [(axis_of(dims, ROWS), axis_of(dims, DISTANCE)) for dims in self._dims]

    @property
    def _in_runs(self) -> tuple[bool, ...]:
        """Which leaves, and whether the values, differ between runs of rows."""
        return tuple(axes != (None, None) for axes in self._row_axes)

    def _with_gradient[T](self, of_leaves: Sequence[T]) -> list[T]:
        """What is known of leaves, and of the values, for those that have a gradient."""
        *leaves, value = of_leaves
        return [*(x for x, leaf in zip(leaves, self.region.leaves, strict=True) if leaf.has_gradient), value]

    def _local(self) -> Region:
        """The region of the device; where distances are read, that of one run of rows."""
        sizes = dict(self.part.sizes)
        if self._has_distances:
            sizes[ROWS] //= self._runs
            sizes[DISTANCE] = sizes[ROWS] + sizes[COLUMNS] - 1
        return local_region(self.region, sizes, self.part.axes)

    def _whole(self, operands: Sequence[Any]) -> list[Any]:
        """Leaves and values of all keys."""
        if not self._names:
            return list(operands)
        gather = functools.partial(jax.lax.all_gather, axis_name=self._names, tiled=True)
        places = gathered_axes(self.region)
        return [x if place is None else gather(x, axis=place) for x, place in zip(operands, places, strict=True)]

    def _scattered(self, grads: Sequence[Any]) -> list[Any]:
        """Gradients of all keys, of one device's rows, as those of one device's keys, of all rows."""

        def scattered(x: Any, place: int | None) -> Any:
            if place is None or not self._names:
                return x
            return jax.lax.psum_scatter(x, self._names, scatter_dimension=place, tiled=True)

        places = self._with_gradient(gathered_axes(self.region))
        return [scattered(x, place) for x, place in zip(grads, places, strict=True)]

    def _starts(self) -> list[jax.Array]:
        """The first row of each run."""
        own, count = self.part.sizes[ROWS], self.region.sizes[ROWS]
        first = self.part.starts[ROWS]
        if self.order == "consecutive":
            return [first]
        return [first // 2, count - own // 2 - first // 2]

    def _cut(self, operands: Sequence[Any]) -> list[Any]:
        """Leaves and values, with a leading axis of runs where they differ between these."""
        size = self._local().sizes.get(DISTANCE, 0)
        found = []
        for x, (rows, distances) in zip(operands, self._row_axes, strict=True):
            if distances is not None:
                parts = [jax.lax.dynamic_slice_in_dim(x, start, size, distances) for start in self._starts()]
                found.append(jnp.stack(parts))
            else:
                found.append(x if rows is None else self._split(x, rows))
        return found

    def _split(self, x: Any, rows: int) -> Any:
        """An array of the device's rows [.., rows, ..] as [runs, .., rows of a run, ..]."""
        shape = (*x.shape[:rows], self._runs, x.shape[rows] // self._runs, *x.shape[rows + 1 :])
        return jnp.moveaxis(x.reshape(shape), rows, 0)

    def _spread(self, x: Any, distances: int) -> Any:
        """The gradient of all distances, from those of each run [runs, .., distances of a run, ..]."""
        shape = list(x.shape[1:])
        shape[distances] = self.region.sizes[DISTANCE]
        total = jnp.zeros(shape, x.dtype)
        for part, start in zip(x, self._starts(), strict=True):
            total += jax.lax.dynamic_update_slice_in_dim(jnp.zeros_like(total), part, start, distances)
        return total


def _joined(x: Any, rows: int | None) -> Any:
    """An array [runs, .., rows of a run, ..] as [.., rows, ..]."""
    assert rows is not None
    x = jnp.moveaxis(x, 0, rows)
    return x.reshape(*x.shape[:rows], -1, *x.shape[rows + 2 :])


def axis_of(dims: Sequence[Dim], label: str) -> int | None:
    """The axis of an array that has a label."""
    return next((axis for axis, dim in enumerate(dims) if not isinstance(dim, int) and label in dim), None)
