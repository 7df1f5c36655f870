"""The "gather" strategy of a region, as computed by one device, and helpers shared with the ring.

Each device computes its own rows and gathers keys, values and other arrays by key. For keys that travel instead, see
`ring.py`.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from blockdiag.common.shards import Part
from blockdiag.common.zigzag import zigzag_order
from blockdiag.fusion.ir.batching import map_region
from blockdiag.fusion.ir.tree import COLUMNS, DISTANCE, ROWS, Dim, Region
from blockdiag.fusion.runtime.sharding import gathered_axes, local_region

type Pass = Callable[..., Sequence[Any]]


@dataclass(frozen=True)
class Tokens:
    """How devices share the tokens of a region.

    Attributes:
        strategy: "gather" if each device gathers the arrays that have keys, "ring" if shards of them travel.
        is_zigzag: True if rows are in zigzag order (see `zigzag_order`); travelling keys then are, too.
        devices: number of devices that share tokens.
        shifts: for the ring, the distance of a shard from its own device at each step, ascending from 0.
        axis: the manual axis of a surrounding `jax.shard_map` over which arrays are already sharded; None if they are
            divided here.
    """

    strategy: Literal["gather", "ring"]
    is_zigzag: bool
    devices: int
    shifts: tuple[int, ...] = ()
    axis: str | None = None

    @property
    def runs(self) -> int:
        """The number of runs of consecutive tokens on a device."""
        return 2 if self.is_zigzag else 1

    def run_starts(self, first: Any, own: int) -> list[Any]:
        """Return the first token of each run of a device.

        Args:
            first: number of tokens on the devices before it.
            own: number of tokens on a device.
        """
        if not self.is_zigzag:
            return [first]
        return [first // 2, self.devices * own - own // 2 - first // 2]


@dataclass(frozen=True)
class Rows:
    """The passes of one device over its own rows and gathered keys.

    Arrays with keys are gathered before a pass. Their gradients are summed in float32 afterwards and scattered, so that
    each device gets those of its own keys. An array of distances between queries and keys is read at another offset for
    each run of rows; runs are then a batch axis of the pass.

    Attributes:
        region: the region of all devices.
        part: the part of one device; its label of rows names the mesh axes that share tokens.
        tokens: how tokens are shared.
    """

    region: Region
    part: Part
    tokens: Tokens

    def results(self, results_of: Callable[[Region], Pass]) -> Pass:
        """Return the forward pass. `results_of` maps a region of own rows by all keys to its forward pass."""

        def compute(*operands: Any) -> Sequence[Any]:
            own = self._whole(operands)
            if not has_distances(self.region):
                return results_of(self._local())(*own)
            return joined_results(self.region, results_of(self._run())(*self._cut(own)))

        return compute

    def gradients(self, gradients_of: Callable[[Region], Pass]) -> Pass:
        """Return the backward pass, from leaves, values, result, log-sum-exp and cotangents to the gradients."""
        count = len(self.region.leaves) + 1

        def compute(*operands: Any) -> Sequence[Any]:
            own, rest = self._whole(operands[:count]), operands[count:]
            if not has_distances(self.region):
                return self._scattered(gradients_of(self._local())(*own, *rest))
            grads = gradients_of(self._run())(*self._cut(own), *split_results(self.region, rest, self.tokens.runs))
            joined = [
                self._spread(x, distances) if distances is not None else x if rows is None else joined_runs(x, rows)
                for x, (rows, distances) in zip(grads, with_gradient(self.region, run_axes(self.region)), strict=True)
            ]
            return self._scattered(joined)

        return compute

    @property
    def _names(self) -> tuple[str, ...]:
        """The mesh axes that share tokens."""
        return self.part.axes[ROWS]

    def _local(self) -> Region:
        """Return the region of the device or, if it reads distances, of one run of rows."""
        sizes = dict(self.part.sizes)
        if has_distances(self.region):
            sizes[ROWS] //= self.tokens.runs
            sizes[DISTANCE] = sizes[ROWS] + sizes[COLUMNS] - 1
        return local_region(self.region, sizes, self.part.axes)

    def _run(self) -> Region:
        """Return the region of all runs of the device, with the runs as a batch axis."""
        return mapped_to_runs(self.region, self._local(), self.tokens.runs)

    def _whole(self, operands: Sequence[Any]) -> list[Any]:
        """Return leaves and values with all keys gathered."""
        gather = functools.partial(jax.lax.all_gather, axis_name=self._names, tiled=True)
        places = gathered_axes(self.region)
        return [x if place is None else gather(x, axis=place) for x, place in zip(operands, places, strict=True)]

    def _scattered(self, grads: Sequence[Any]) -> list[Any]:
        """Reduce-scatter gradients: from all keys and one device's rows to one device's keys and all rows."""
        scatter = functools.partial(jax.lax.psum_scatter, axis_name=self._names, tiled=True)
        places = with_gradient(self.region, gathered_axes(self.region))
        return [
            x if place is None else scatter(x, scatter_dimension=place) for x, place in zip(grads, places, strict=True)
        ]

    def _starts(self) -> list[jax.Array]:
        """Return the first row of each run."""
        return self.tokens.run_starts(self.part.starts[ROWS], self.part.sizes[ROWS])

    def _cut(self, operands: Sequence[Any]) -> list[Any]:
        """Return leaves and values, with a leading axis of runs for arrays that differ between runs."""
        size = self._local().sizes.get(DISTANCE, 0)
        found = []
        for x, (rows, distances) in zip(operands, run_axes(self.region), strict=True):
            if distances is not None:
                parts = [jax.lax.dynamic_slice_in_dim(x, start, size, distances) for start in self._starts()]
                found.append(jnp.stack(parts))
            else:
                found.append(x if rows is None else split_runs(x, rows, self.tokens.runs))
        return found

    def _spread(self, x: Any, distances: int) -> Any:
        """Return the gradient of all distances from those of each run, [runs, .., distances of a run, ..]."""
        return spread_runs(x, self._starts(), distances, self.region.sizes[DISTANCE])


def dims_of(region: Region) -> list[tuple[Dim, ...]]:
    """Return the labels of each axis of the leaves, and then of the values."""
    return [*(leaf.dims for leaf in region.leaves), region.value_dims]


def has_distances(region: Region) -> bool:
    """Return True if the region reads arrays by distance; each run of rows is then computed separately."""
    return any(leaf.role == "distance" for leaf in region.leaves)


def run_axes(region: Region) -> list[tuple[int | None, int | None]]:
    """Return the row axis and the distance axis of each leaf, and then of the values."""
    return [(axis_of(dims, ROWS), axis_of(dims, DISTANCE)) for dims in dims_of(region)]


def mapped_to_runs(region: Region, local: Region, runs: int) -> Region:
    """Return the region of several runs of rows, with the runs as a batch axis.

    Args:
        region: the region of all devices.
        local: the region of one run.
    """
    return local.once(map_region, runs, tuple(axes != (None, None) for axes in run_axes(region)))


def joined_results(region: Region, results: Sequence[Any]) -> list[Any]:
    """Join the runs of the result and the log-sum-exp into rows."""
    return [joined_runs(x, rows) for x, rows in zip(results, row_axes_of_results(region), strict=True)]


def split_results(region: Region, given: Sequence[Any], runs: int) -> list[Any]:
    """Split the result, the log-sum-exp and their cotangents into runs of rows."""
    return [split_runs(x, rows, runs) for x, rows in zip(given, 2 * row_axes_of_results(region), strict=False)]


def split_runs(x: Any, rows: int, runs: int) -> Any:
    """Reshape [.., rows, ..] to [runs, .., rows of a run, ..]."""
    shape = (*x.shape[:rows], runs, x.shape[rows] // runs, *x.shape[rows + 1 :])
    return jnp.moveaxis(x.reshape(shape), rows, 0)


def joined_runs(x: Any, rows: int | None) -> Any:
    """Reshape [runs, .., rows of a run, ..] to [.., rows, ..]."""
    assert rows is not None
    x = jnp.moveaxis(x, 0, rows)
    return x.reshape(*x.shape[:rows], -1, *x.shape[rows + 2 :])


def spread_runs(x: Any, starts: Sequence[Any], axis: int, size: int) -> Any:
    """Add runs [runs, .., elements of a run, ..], each at its own start, into an array with `size` elements."""
    total = jnp.zeros((*x.shape[1 : axis + 1], size, *x.shape[axis + 2 :]), x.dtype)
    for part, start in zip(x, starts, strict=True):
        total += jax.lax.dynamic_update_slice_in_dim(jnp.zeros_like(total), part, start, axis)
    return total


def axis_of(dims: Sequence[Dim], label: str) -> int | None:
    """Return the axis of an array that has a label, or None."""
    return next((axis for axis, dim in enumerate(dims) if not isinstance(dim, int) and label in dim), None)


def row_axes_of_results(region: Region) -> list[int]:
    """Return the row axes of the result and of its log-sum-exp."""
    of_output = axis_of(region.out_dims, ROWS)
    assert of_output is not None, "results have rows"
    return [of_output, len(region.batch)]


def with_gradient[T](region: Region, of_leaves: Sequence[T]) -> list[T]:
    """Return the entries of a list by leaf, with the values last, without those of leaves that have no gradient."""
    *leaves, value = of_leaves
    return [*(x for x, leaf in zip(leaves, region.leaves, strict=True) if leaf.has_gradient), value]


def results_in_order(region: Region, tokens: Tokens, compute: Pass) -> Pass:
    """Turn a forward pass in natural token order into one in device order (zigzag, if `tokens.is_zigzag`)."""

    def results(*operands: Any) -> list[Any]:
        axes = _token_axes(region, tokens)
        given = [_in_natural_order(x, tokens, axis) for x, axis in zip(operands, axes, strict=True)]
        pairs = zip(compute(*given), row_axes_of_results(region), strict=True)
        return [_in_order_of_devices(x, tokens, axis) for x, axis in pairs]

    return results


def gradients_in_order(region: Region, tokens: Tokens, compute: Pass) -> Pass:
    """Turn a backward pass in natural token order into one in device order, see `results_in_order`."""

    def gradients(*operands: Any) -> list[Any]:
        axes = _token_axes(region, tokens)
        every = [*axes, *2 * row_axes_of_results(region)]
        given = [_in_natural_order(x, tokens, axis) for x, axis in zip(operands, every, strict=False)]
        pairs = zip(compute(*given), with_gradient(region, axes), strict=True)
        return [_in_order_of_devices(x, tokens, axis) for x, axis in pairs]

    return gradients


def _token_axes(region: Region, tokens: Tokens) -> list[int | None]:
    """Return the axis of each leaf and of the values that follows the token order: rows, or travelling keys."""
    dims = dims_of(region)
    travelling = gathered_axes(region) if tokens.strategy == "ring" else [None] * len(dims)
    rows = (axis_of(each, ROWS) for each in dims)
    return [keys if place is None else place for place, keys in zip(rows, travelling, strict=True)]


def _in_natural_order(x: Any, tokens: Tokens, axis: int | None) -> Any:
    return x if axis is None or not tokens.is_zigzag else _reordered(x, axis, np.argsort(_zigzag_parts(tokens)))


def _in_order_of_devices(x: Any, tokens: Tokens, axis: int | None) -> Any:
    return x if axis is None or not tokens.is_zigzag else _reordered(x, axis, _zigzag_parts(tokens))


def _zigzag_parts(tokens: Tokens) -> np.ndarray:
    return zigzag_order(2 * tokens.devices, tokens.devices)


def _reordered(x: Any, axis: int, order: np.ndarray) -> Any:
    parts = jnp.split(x, len(order), axis)
    return jnp.concatenate([parts[place] for place in order], axis)
