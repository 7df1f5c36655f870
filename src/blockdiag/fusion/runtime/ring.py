"""Ring attention of a region, as computed by one device: shards of the keys travel around the devices.

A device holds at most two shards of keys, values and other arrays by key: the one in use and the next one in flight.
The results of the shards are merged by their log-sum-exps. In the backward pass the shards travel again, together with
their gradients.

References:
    Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context" (2023).
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from blockdiag.common.shards import Part
from blockdiag.fusion.ir.tree import COLUMNS, DISTANCE, ROWS, Dim, Leaf, Region, leaves_of, with_leaves
from blockdiag.fusion.lowering.tile_program import result_array, value_columns
from blockdiag.fusion.runtime.rows import (
    Pass,
    Tokens,
    axis_of,
    dims_of,
    has_distances,
    joined_results,
    joined_runs,
    mapped_to_runs,
    split_results,
    split_runs,
    spread_runs,
    with_gradient,
)
from blockdiag.fusion.runtime.sharding import gathered_axes, local_region


@dataclass(frozen=True)
class Ring:
    """The passes of one device, with its own rows and the shards of keys that visit it.

    | array | where it is |
    |---|---|
    | keys without rows | travels: a device holds one shard at a time |
    | constants, and arrays of rows by keys | stays: a device has all keys of its rows and slices those of the shard |
    | distances | stays: each run of rows and each run of keys reads it at another offset |

    If the region reads distances, runs of rows become a batch axis of the pass, and runs of keys are computed one after
    the other.

    Attributes:
        region: the region of all devices.
        part: the part of one device; its label of rows names the mesh axes that share tokens.
        tokens: how tokens are shared.
    """

    region: Region
    part: Part
    tokens: Tokens

    def __post_init__(self) -> None:
        assert self._own * self.tokens.devices == self.region.sizes[ROWS], "each device has an equal part of tokens"

    def results(self, results_of: Callable[[Region], Pass]) -> Pass:
        """Return the forward pass. `results_of` maps a region of own rows by one shard's keys to its forward pass."""

        def compute(*operands: Any) -> Sequence[Any]:
            merged: tuple[Any, Any] | None = None
            here = self._travelling(operands)
            for step, shift in enumerate(self.tokens.shifts):
                following = self._sent(here, step)
                region = self.piece_region(shift).once(_with_wide_result)
                found = [results_of(region)(*self._cut(operands, piece)) for piece in self._pieces(here, shift)]
                for results in found:
                    output, log_sum = joined_results(self.region, results) if has_distances(self.region) else results
                    merged = self._merged(merged, output, log_sum)
                merged, here = self._in_step(merged, following)
            assert merged is not None, "a device computes with its own part"
            output, log_sum = merged
            return output.astype(self.region.dtype), log_sum

        return compute

    def gradients(self, gradients_of: Callable[[Region], Pass]) -> Pass:
        """Return the backward pass, from leaves, values, result, log-sum-exp and cotangents to the gradients."""
        count = len(self.region.leaves) + 1

        def compute(*operands: Any) -> Sequence[Any]:
            operands = self._sent_again(operands)
            rest = operands[count:]
            if has_distances(self.region):
                rest = split_results(self.region, rest, self.tokens.runs)
            here = self._travelling(operands)
            sums: dict[int, Any] = {}
            for step, shift in enumerate(self.tokens.shifts):
                following = self._sent(here, step)
                pieces = self._pieces(here, shift)
                region = self.piece_region(shift)
                wanted = with_gradient(region, range(count))
                found = [gradients_of(region)(*self._cut(operands, piece), *rest) for piece in pieces]
                of_leaves = [dict(zip(wanted, grads, strict=True)) for grads in found]
                for i in wanted:
                    sums[i] = self._added(i, sums.get(i), operands[i].shape, pieces, [grads[i] for grads in of_leaves])
                sums, here = self._in_step(sums, following)
                # Gradients of a shard travel with it. After the last step they return to the shard's own device.
                sums |= self._moved({i: sums[i] for i in wanted if i in self._places}, self._distance_after(step))
            return [sums[i] for i in with_gradient(self.region, range(count))]

        return compute

    # The order of steps

    def _in_step(self, *arrays: Any) -> Any:
        """Return the arrays behind a barrier: none is used before all are ready."""
        # Without the barrier XLA would send all shards before computing any, and merge all results at the end.
        return jax.lax.optimization_barrier(arrays)

    def _sent_again(self, operands: Any) -> Any:
        """Return the operands of the backward pass, which must not reuse shards received in the forward pass."""
        # Without the barrier XLA may keep such a shard in memory instead of sending it again.
        return jax.lax.optimization_barrier(operands)

    # The region of one device, for one piece of keys

    @property
    def _places(self) -> dict[int, int]:
        """The key axis of each travelling array by index; the values have the index after the last leaf."""
        return {i: place for i, place in enumerate(gathered_axes(self.region)) if place is not None}

    @property
    def _own(self) -> int:
        """The number of tokens of a device."""
        return self.part.sizes[ROWS]

    def _sizes(self) -> dict[str, int]:
        """Return the sizes of a pass's labels."""
        sizes = {**self.part.sizes, COLUMNS: self._own}
        if has_distances(self.region):
            sizes[ROWS] = sizes[COLUMNS] = self._own // self.tokens.runs
            sizes[DISTANCE] = sizes[ROWS] + sizes[COLUMNS] - 1
        return sizes

    def piece_region(self, shift: int) -> Region:
        """Return the region of a pass. Logits without values are included in the first step only."""
        local = local_region(self.region, self._sizes(), (*self.part.axes, COLUMNS))
        if has_distances(self.region):
            local = mapped_to_runs(self.region, local, self.tokens.runs)
        return local.once(_without_extras) if shift and local.extras else local

    def _pieces(self, here: Mapping[int, Any], shift: int) -> list["_Piece"]:
        """Return the pieces of the shard from `shift` devices back; each piece is computed by one pass."""
        devices, own = self.tokens.devices, self._own
        number = self.part.starts[ROWS] // own
        starts = self.tokens.run_starts((number + devices - shift) % devices * own, own)
        length = own // self.tokens.runs
        if not has_distances(self.region) or self.tokens.runs == 1:
            return [_Piece(starts, length, here)]
        halves = {i: jnp.split(here[i], 2, place) for i, place in self._places.items()}
        return [
            _Piece([start], length, {i: half[run] for i, half in halves.items()}) for run, start in enumerate(starts)
        ]

    def _cut(self, operands: Sequence[Any], piece: "_Piece") -> list[Any]:
        """Return the leaves and values of the pass over one piece."""
        found = []
        for i, (dims, x) in enumerate(zip(dims_of(self.region), operands, strict=False)):
            rows, distances = axis_of(dims, ROWS), axis_of(dims, DISTANCE)
            if distances is not None:
                size = self._sizes()[DISTANCE]
                parts = [_slice(x, at, size, distances) for at in self._distance_starts(piece)]
                found.append(jnp.stack(parts))
                continue
            if i in self._places:
                x = piece.travelling[i]
            elif axis_of(dims, COLUMNS) is not None:
                x = self._columns(x, dims, piece)
            if has_distances(self.region) and rows is not None:
                x = split_runs(x, rows, self.tokens.runs)
            found.append(x)
        return found

    def _distance_starts(self, piece: "_Piece") -> list[Any]:
        """Return the first index into the distances for each run of rows and the piece's run of keys."""
        (first,) = piece.starts
        starts = self.tokens.run_starts(self.part.starts[ROWS], self._own)
        return [start - first + self.region.sizes[COLUMNS] - piece.length for start in starts]

    def _columns(self, x: Any, dims: Sequence[Dim], piece: "_Piece") -> Any:
        """Return a piece's keys of an array that has all keys."""
        place, shape, axis = _keys_apart(x.shape, dims, self.part.sizes)
        apart = x.reshape(shape)
        parts = [_slice(apart, start, piece.length, axis) for start in piece.starts]
        return jnp.concatenate(parts, axis).reshape(*x.shape[:place], -1, *x.shape[place + 1 :])

    def _with_columns(self, total: Any, x: Any, dims: Sequence[Dim], piece: "_Piece") -> Any:
        """Return an array that has all keys, with the elements of a piece's keys replaced by `x`."""
        _, shape, axis = _keys_apart(total.shape, dims, self.part.sizes)
        whole = total.reshape(shape)
        parts = jnp.split(x.reshape(*shape[:axis], -1, *shape[axis + 1 :]), len(piece.starts), axis)
        for start, part in zip(piece.starts, parts, strict=True):
            whole = jax.lax.dynamic_update_slice_in_dim(whole, part, start, axis)
        return whole.reshape(total.shape)

    # Travel

    def _travelling(self, operands: Sequence[Any]) -> dict[int, Any]:
        return {i: operands[i] for i in self._places}

    def _distance_after(self, step: int) -> int:
        """Return how many devices shards travel after a step; after the last step they return to their own device."""
        shifts = self.tokens.shifts
        return (shifts[step + 1] if step + 1 < len(shifts) else self.tokens.devices) - shifts[step]

    def _sent(self, here: dict[int, Any], step: int) -> dict[int, Any]:
        """Send the shards of the next step; after the last step, return an empty dict."""
        return self._moved(here, self._distance_after(step)) if step + 1 < len(self.tokens.shifts) else {}

    def _moved(self, arrays: dict[int, Any], distance: int) -> dict[int, Any]:
        """Receive the arrays of the device that is `distance` devices before this one."""
        devices = self.tokens.devices
        if distance % devices == 0:
            return arrays
        pairs = [(device, (device + distance) % devices) for device in range(devices)]
        return {i: jax.lax.ppermute(x, self.part.axes[ROWS], pairs) for i, x in arrays.items()}

    # Merging the results and gradients of passes

    def _merged(self, merged: tuple[Any, Any] | None, output: Any, log_sum: Any) -> tuple[Any, Any]:
        """Merge the result and log-sum-exp so far, if any, with those of further keys."""
        if merged is None:
            return output, log_sum
        if self.region.score is None:
            return merged[0] + output, log_sum
        both = jnp.logaddexp(merged[1], log_sum)
        # The base must be finite, so that rows that have seen no key yet give 0 and not NaN.
        base = jnp.where(jnp.isneginf(both), 0, both)
        shares = [self._of_rows(jnp.exp(x - base)).astype(output.dtype) for x in (merged[1], log_sum)]
        return merged[0] * shares[0] + output * shares[1], both

    def _of_rows(self, x: Any) -> Any:
        """Return per-row numbers [batch.., q], broadcast to the layout of results."""
        local = local_region(self.region, self.part.sizes, self.part.axes)
        columns = int(np.prod([local.sizes[label] for label in value_columns(local)], dtype=np.int64))
        return result_array(local, jnp.broadcast_to(x[..., None], (*x.shape, columns)))

    def _added(self, i: int, total: Any, shape: Sequence[int], pieces: Sequence["_Piece"], grads: Sequence[Any]) -> Any:
        """Return the gradient of a leaf, or of the values, accumulated up to this step.

        Args:
            i: index of the leaf; the values come last.
            total: gradient of the steps before; None in the first step.
            shape: shape of the device's array.
            pieces, grads: pieces of this step and their gradients.
        """
        dims = dims_of(self.region)[i]
        rows, distances = axis_of(dims, ROWS), axis_of(dims, DISTANCE)
        if has_distances(self.region) and rows is not None:
            grads = [joined_runs(x, rows) for x in grads]
        if distances is not None:
            pairs = zip(pieces, grads, strict=True)
            grads = [spread_runs(x, self._distance_starts(piece), distances, shape[distances]) for piece, x in pairs]
        elif i in self._places:
            grads = [jnp.concatenate(grads, self._places[i])]
        elif axis_of(dims, COLUMNS) is not None:
            # Each step writes its own keys, so nothing is added.
            total = jnp.zeros(shape, grads[0].dtype) if total is None else total
            for piece, x in zip(pieces, grads, strict=True):
                total = self._with_columns(total, x, dims, piece)
            return total
        for x in grads:
            total = x if total is None else total + x
        return total


@dataclass(frozen=True)
class _Piece:
    """The keys of one pass.

    Attributes:
        starts: the first key of each run.
        length: number of keys of a run.
        travelling: travelling arrays that have these keys, by index of the leaf.
    """

    starts: Sequence[Any]
    length: int
    travelling: Mapping[int, Any]


def _slice(x: Any, start: Any, size: int, axis: int) -> Any:
    """Return a slice of an array at a static or traced start."""
    if isinstance(start, int):
        return jax.lax.slice_in_dim(x, start, start + size, axis=axis)
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis)


def _keys_apart(
    shape: Sequence[int], dims: Sequence[Dim], sizes: Mapping[str, int]
) -> tuple[int, tuple[int, ...], int]:
    """Return an array's key axis, its shape with that axis split by label, and the key axis in that shape.

    Args:
        sizes: sizes of the labels.
    """
    place = axis_of(dims, COLUMNS)
    assert place is not None
    labels = dims[place]
    assert isinstance(labels, tuple)
    apart = (*shape[:place], *(sizes[label] for label in labels), *shape[place + 1 :])
    return place, apart, place + labels.index(COLUMNS)


def _without_extras(region: Region) -> Region:
    """Return the region without the logits that have no value."""
    used = leaves_of(region.score, region.weight)
    leaves: dict[Leaf, Leaf] = {
        leaf: leaf if leaf in used else dataclasses.replace(leaf, is_constant=True) for leaf in region.leaves
    }
    return dataclasses.replace(with_leaves(region, leaves), extras=())


def _with_wide_result(region: Region) -> Region:
    """Return the region with a float32 result, so that results are not rounded before they are merged."""
    return dataclasses.replace(region, dtype=np.dtype(np.float32)) if region.dtype.itemsize < 4 else region
