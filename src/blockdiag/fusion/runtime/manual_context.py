"""Fused attention inside of `jax.shard_map`, where the devices along a manual axis share the tokens of each sequence.

The function is traced with the shapes of whole arrays. Around attention each device computes its own tokens
(`token_parts.py`). Strategies are those of `context_parallel.py`; here collectives move the data.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from blockdiag.common.derivatives import on_common_axes
from blockdiag.common.zigzag import from_zigzag, to_zigzag
from blockdiag.fusion.ir.tree import COLUMNS, ROWS, Dim, Region
from blockdiag.fusion.runtime.context_parallel import Chosen, Sharing, choose
from blockdiag.fusion.runtime.region_op import Call, attend
from blockdiag.fusion.runtime.rows import axis_of
from blockdiag.fusion.runtime.sharding import gathered_axes, is_known, local_region
from blockdiag.fusion.runtime.token_parts import Parts, check_token_axes, token_axis


def whole_type(x: Any, axis: int | None, devices: int) -> Any:
    """Return the type of a whole array, from one device's part of it.

    Args:
        x: the part, or the whole.
        axis: the axis of tokens of a part; None for a whole array.
        devices: the number of devices that share the tokens.
    """
    if axis is None:
        return x
    shape = tuple(size * devices if place == axis else size for place, size in enumerate(x.shape))
    if not isinstance(x, jax.Array):
        return jax.ShapeDtypeStruct(shape, x.dtype)
    aval = jax.typeof(x)
    types = {"weak_type": aval.weak_type, "manual_axis_type": aval.manual_axis_type}
    return jax.ShapeDtypeStruct(shape, x.dtype, sharding=aval.sharding, **types)


class OwnParts:
    """Evaluator of equations around attention for this device's tokens; call `bind` within the `jax.shard_map`."""

    def __init__(self, sharing: Sharing) -> None:
        self._parts = Parts(jax.lax.axis_index(sharing.axis), sharing.devices)

    def bind(self, equation: core.JaxprEqn, given: Sequence[Any]) -> list[Any]:
        """Return the results of an equation; see `Parts.bind`."""
        if equation.primitive.name in ("pvary", "pcast"):
            # Operands of all equations are cast where they are used.
            return list(given)
        return self._parts.bind(equation, on_common_axes(*given))


def attend_to_own_tokens(sharing: Sharing, call: Call, leaves: Sequence[Any], value: Any) -> tuple[Any, Any]:
    """Return the result of a region and its log-sum-exp for the device's tokens; see `attend`.

    Args:
        sharing: the devices that share tokens.
        call: the call, with the region of all tokens.
        leaves, value: the operands, each whole or this device's part.

    Raises:
        ValueError: tokens are not the rows or keys of the attention, or the strategy does not support the region.
    """
    region, arrays = call.region, [*leaves, value]
    labels: list[tuple[Dim, ...]] = [*(leaf.dims for leaf in region.leaves), region.value_dims]
    axes = [token_axis(source.shape, x) for source, x in zip(region.sources, arrays, strict=True)]
    check_token_axes(region, axes)
    chosen = choose(sharing, region, ())
    if sharing.devices == 1:
        return attend(call, leaves, value)
    move = _OwnMoves(sharing.axis, sharing.devices, region, chosen)
    keys = gathered_axes(region)
    *leaves, value = (
        move.there(x, is_known(source), dims, own, shared)
        for x, source, dims, own, shared in zip(arrays, region.sources, labels, axes, keys, strict=True)
    )
    tokens = chosen.tokens(sharing.devices)
    if chosen.label is None:
        assert tokens is not None, "tokens are divided unless heads are"
        call = dataclasses.replace(call, tokens=dataclasses.replace(tokens, axis=sharing.axis))
    else:
        sizes = region.sizes | {chosen.label: region.sizes[chosen.label] // sharing.devices}
        call = dataclasses.replace(call, region=local_region(region, sizes, (chosen.label,)))
    output, log_sum = attend(call, leaves, value)
    output = move.back(output, region.out_dims)
    if log_sum is not None:
        log_sum = move.back(log_sum, tuple((label,) for label in (*region.batch, ROWS)))
    return output, log_sum


@dataclass(frozen=True)
class _OwnMoves:
    """Moves of a device's parts before a region and after it."""

    axis: str
    devices: int
    region: Region
    chosen: Chosen

    def there(self, x: Any, is_constant: bool, dims: Sequence[Dim], own: int | None, keys: int | None) -> Any:
        """Return an operand of the region as the device computes with it.

        Args:
            x: the device's part, or the whole.
            is_constant: whether its elements are known while tracing.
            dims: the labels of its axes.
            own: the axis of which it is a part; None for a whole array.
            keys: the axis of keys that devices share.
        """
        label = self.chosen.label
        if label is not None:
            heads = axis_of(dims, label)
            if own is not None and own == heads:
                # Heads are one axis with tokens, and slower: parts of this axis are heads.
                return x
            if own is not None and heads is not None and self._is_slowest(dims[heads], label):
                return self._exchanged(x, heads, own)
            x = x if own is None else self._gathered(x, own)
            return x if heads is None else self._cut(x, heads, dims[heads], label)
        rows, is_zigzag = axis_of(dims, ROWS), self.chosen.is_zigzag
        place, tokens = rows, ROWS
        if rows is None:
            if keys is None or is_constant:
                return x if own is None else self._gathered(x, own)
            place, tokens, is_zigzag = keys, COLUMNS, is_zigzag and self.chosen.strategy == "ring"
        assert place is not None, "tokens have an axis"
        if own is None:
            return self._cut(x, place, dims[place], tokens, is_zigzag=is_zigzag)
        return to_zigzag(x, axis=self.axis, tokens=place) if is_zigzag else x

    def back(self, x: Any, dims: Sequence[Dim]) -> Any:
        """Return a result of the region for the device's tokens, in their order."""
        rows = axis_of(dims, ROWS)
        assert rows is not None, "results have rows"
        if self.chosen.label is None:
            return from_zigzag(x, axis=self.axis, tokens=rows) if self.chosen.is_zigzag else x
        heads = axis_of(dims, self.chosen.label)
        assert heads is not None, "results have all batch labels"
        return x if heads == rows else self._exchanged(x, rows, heads)

    def _exchanged(self, x: Any, split: int, joined: int) -> Any:
        return jax.lax.all_to_all(x, self.axis, split, joined, tiled=True)

    def _gathered(self, x: Any, axis: int) -> Any:
        return jax.lax.all_gather(x, self.axis, axis=axis, tiled=True)

    def _is_slowest(self, dim: Dim, label: str) -> bool:
        """Return whether parts of an axis are parts of a label."""
        return not isinstance(dim, int) and self._outer(dim, label) == 1

    def _outer(self, dim: tuple[str, ...], label: str) -> int:
        """Return how many indices the labels before one have."""
        return math.prod(self.region.sizes[x] for x in dim[: dim.index(label)])

    def _cut(self, x: Any, axis: int, dim: Dim, label: str, *, is_zigzag: bool = False) -> Any:
        """Return the device's indices of a label of an axis of a whole array."""
        assert not isinstance(dim, int), "an axis with a label has no index"
        outer, size = self._outer(dim, label), self.region.sizes[label]
        apart, device = on_common_axes(
            x.reshape(*x.shape[:axis], outer, size, -1, *x.shape[axis + 1 :]), jax.lax.axis_index(self.axis)
        )
        places = [device, 2 * self.devices - 1 - device] if is_zigzag else [device]
        own = size // self.devices // len(places)
        parts = [jax.lax.dynamic_slice_in_dim(apart, place * own, own, axis=axis + 1) for place in places]
        return jnp.concatenate(parts, axis + 1).reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])
