"""Context parallelism of fused attention: data movement before and after a region whose tokens are sharded.

| strategy | before a region | after it |
|---|---|---|
| "ulysses" | tokens are exchanged for a batch axis, such as heads, which divides the region as usual | reversed |
| "gather" | rows are put in zigzag order if the mask needs it; the region's own code gathers keys | reversed |
| "ring" | rows and keys are put in zigzag order if the mask needs it; the region's own code rotates keys | reversed |

No movement changes a value, and all derivatives are JAX's own.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from blockdiag.common.context_parallel import ContextParallel, Strategy
from blockdiag.common.meshes import explicit_mesh
from blockdiag.common.shards import division_of
from blockdiag.common.zigzag import from_zigzag, to_zigzag, zigzag_order
from blockdiag.fusion.ir.tree import COLUMNS, DISTANCE, ROWS, Dim, Region, Source
from blockdiag.fusion.runtime.block_sparsity import needed_shifts, needs_balance
from blockdiag.fusion.runtime.region_op import Call, attend
from blockdiag.fusion.runtime.rows import Tokens, axis_of
from blockdiag.fusion.runtime.sharding import forward_rule, is_known


@dataclass(frozen=True)
class Sharing:
    """The devices that share the tokens of a call.

    Attributes:
        context: the user's options.
        mesh: the mesh that has the axis.
        is_explicit: True if the axis is explicit, so that shardings along it are part of array types.
        is_manual: True if the call is inside a `jax.shard_map` over the axis.
    """

    context: ContextParallel
    mesh: Any
    is_explicit: bool
    is_manual: bool = False

    @property
    def axis(self) -> str:
        """The name of the mesh axis."""
        return self.context.axis

    @property
    def devices(self) -> int:
        """The number of devices along the axis."""
        return self.mesh.shape[self.axis]


@dataclass(frozen=True)
class Chosen:
    """The strategy chosen for one region, with its parameters.

    Attributes:
        strategy: name of the strategy.
        label: for "ulysses", the batch label that devices divide instead of tokens.
        is_zigzag: for "gather" and "ring", True if rows are in zigzag order.
        shifts: for "ring", see `Tokens`.
    """

    strategy: Strategy
    label: str | None = None
    is_zigzag: bool = False
    shifts: tuple[int, ...] = ()

    def described(self, sharing: Sharing) -> str:
        """Return a description in words, for reports."""
        if sharing.devices == 1:
            return f"one device along {sharing.axis!r} has all tokens"
        shared = f"{sharing.devices} devices share tokens along {sharing.axis!r}"
        if self.label is not None:
            return f"{shared}; 'ulysses': they exchange tokens for {self.label}"
        order = "rows in zigzag order" if self.is_zigzag else "consecutive rows"
        if self.strategy == "ring":
            return f"{shared}; 'ring': arrays with keys travel around them in {len(self.shifts)} steps, {order}"
        return f"{shared}; 'gather': they gather arrays with keys, and compute {order}"

    def tokens(self, devices: int) -> Tokens | None:
        """Return how devices share tokens, or None if they divide a batch axis instead."""
        return None if self.strategy == "ulysses" else Tokens(self.strategy, self.is_zigzag, devices, self.shifts)


def sharing_of(context: ContextParallel, arrays: Sequence[Any]) -> Sharing:
    """Return the devices that share the tokens of a call.

    Args:
        context: the call's `context_parallel`.
        arrays: the call's arguments.

    Raises:
        ValueError: the mesh lacks the axis or mixes kinds of axes, or the call is inside a `jax.shard_map` that leaves
            axes of the mesh.
    """
    current = jax.sharding.get_abstract_mesh()
    if AxisType.Manual in current.axis_types:
        return _manual_sharing(context, current)
    mesh = explicit_mesh([x for x in arrays if not isinstance(x, np.ndarray | jax.ShapeDtypeStruct)])
    if mesh is None or context.axis not in mesh.shape:
        mesh = context.mesh or current
    if context.axis not in mesh.shape:
        raise ValueError(
            f"`context_parallel` names the axis {context.axis!r}, but the mesh has {sorted(mesh.shape) or 'none'}; "
            "call inside `jax.set_mesh(mesh)` or pass ContextParallel(axis, mesh=mesh)"
        )
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if kinds[context.axis] == AxisType.Auto and AxisType.Explicit in kinds.values():
        raise ValueError(
            f"`context_parallel` of `fuse` needs a mesh whose axes are of one kind: {context.axis!r} is automatic, and "
            "others are explicit; make it explicit too"
        )
    return Sharing(context, mesh, kinds[context.axis] == AxisType.Explicit)


def _manual_sharing(context: ContextParallel, mesh: Any) -> Sharing:
    """Return the devices that share tokens inside of a `jax.shard_map`.

    Raises:
        ValueError: it is not manual over the axis of the context, or leaves other axes automatic or explicit.
    """
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if kinds.get(context.axis) != AxisType.Manual:
        raise ValueError(
            f"`fuse` with `context_parallel` was called inside of a `jax.shard_map` that is not manual over the axis "
            f"{context.axis!r}; make it manual too (axis_names), or call `fuse` outside"
        )
    left = [name for name, kind in kinds.items() if kind != AxisType.Manual and mesh.shape[name] > 1]
    if left:
        raise ValueError(
            f"`fuse` with `context_parallel` was called inside of a `jax.shard_map` that leaves the axes {left} of its "
            "mesh; make them manual too (axis_names)"
        )
    # Other axes have divided all arrays already.
    own = dataclasses.replace(context, batch_axes=(), head_axes=())
    return Sharing(own, mesh, is_explicit=False, is_manual=True)


def whole_type(sharing: Sharing, x: Any) -> Any:
    """Return an argument's type without sharding along tokens; the function is traced with this type.

    The function as written multiplies sharded queries by sharded keys, which explicit sharding types reject.
    """
    if not sharing.is_explicit or not isinstance(x, jax.Array):
        return x
    aval = jax.typeof(x)
    if aval.sharding.mesh.empty:
        return x
    spec = P(*(_without(entry, sharing.axis) or None for entry in aval.sharding.spec))
    whole = NamedSharding(aval.sharding.mesh, spec)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole, weak_type=aval.weak_type)


def attend_to_shared_tokens(sharing: Sharing, call: Call, leaves: Sequence[Any], value: Any) -> tuple[Any, Any]:
    """Compute the result of a region and its log-sum-exp; see `attend`.

    Raises:
        ValueError: the strategy does not support the region, or the devices do not divide its tokens.
    """
    region, arrays = call.region, [*leaves, value]
    chosen = choose(sharing, region, [jax.typeof(x) for x in arrays])
    move = _Moves(sharing, region, chosen)
    labels: list[tuple[Dim, ...]] = [*(leaf.dims for leaf in region.leaves), region.value_dims]
    call = dataclasses.replace(call, tokens=chosen.tokens(sharing.devices))
    *leaves, value = (move.there(*each) for each in zip(arrays, region.sources, labels, strict=True))
    output, log_sum = attend(call, leaves, value)
    output = move.back(output, region.out_dims)
    if log_sum is not None:
        log_sum = move.back(log_sum, tuple((label,) for label in (*region.batch, ROWS)))
    return output, log_sum


def choose(
    sharing: Sharing, region: Region, types: Sequence[Any], others: Sequence[Strategy] = ("gather", "ring")
) -> Chosen:
    """Choose the strategy for a region.

    Args:
        types: types of the leaves and values: shapes, dtypes and shardings.
        others: strategies besides "ulysses" that error messages offer.

    Raises:
        ValueError: see `attend_to_shared_tokens`.
    """
    context, devices = sharing.context, sharing.devices
    if devices == 1:
        return Chosen("gather")
    if region.sizes[ROWS] % devices:
        raise ValueError(
            f"queries must be a multiple of the {devices} devices along {context.axis!r}, got {region.sizes[ROWS]}; "
            "pad them, and drop the results of the padding"
        )
    left = _left(sharing, region, types)
    able = [label for label in reversed(left) if left[label] % devices == 0]
    obstacle = _obstacle(region)
    if able and context.strategy in (None, "ulysses"):
        return Chosen("ulysses", able[0])
    if context.strategy == "ulysses":
        remedy = f"use strategy={' or '.join(map(repr, others))}"
        other = remedy if obstacle is None else f"no other strategy works, because {obstacle}"
        raise ValueError(
            f"strategy 'ulysses' needs an axis that queries, keys and values share, such as key heads, and that the "
            f"{devices} devices along {context.axis!r} divide, got {left or 'none'}; {other}"
        )
    strategy, able_ones = context.strategy or "gather", ["ulysses"] if able else []
    if strategy == "ring" and obstacle is None and region.sizes[ROWS] != region.sizes[COLUMNS]:
        obstacle = (
            f"there are {region.sizes[ROWS]} queries and {region.sizes[COLUMNS]} keys, and the numbers must be equal"
        )
        able_ones.append("gather")
    if obstacle is not None:
        other = "nor does 'ulysses', because the devices divide no axis of key heads"
        other = f"use strategy={' or '.join(map(repr, able_ones))}" if able_ones else other
        raise ValueError(f"strategy {strategy!r} does not support this attention, because {obstacle}; {other}")
    is_zigzag = region.once(needs_balance, devices)
    if is_zigzag and region.sizes[ROWS] % (2 * devices):
        raise ValueError(
            f"strategy {strategy!r} of a causal mask needs tokens that are a multiple of twice the {devices} devices "
            f"along {context.axis!r}, got {region.sizes[ROWS]}; pad them"
        )
    shifts = region.once(needed_shifts, devices, is_zigzag) if strategy == "ring" else ()
    return Chosen(strategy, is_zigzag=is_zigzag, shifts=shifts)


def _left(sharing: Sharing, region: Region, types: Sequence[Any]) -> dict[str, int]:
    """Return the batch labels that may be divided instead of tokens, and their sizes after division by other axes."""
    shared = _shared_labels(region)
    if sharing.is_explicit:
        specs = [(x.shape, P(*(_without(e, sharing.axis) or None for e in x.sharding.spec))) for x in types]
        division = division_of(forward_rule(region, None), dict(sharing.mesh.shape), specs)
        parts = {label: math.prod(x.count for x in pieces) for label, pieces in division.items()}
    else:
        parts = {x: math.prod(sharing.mesh.shape[name] for name in _names(sharing, region, x)) for x in shared}
    return {x: region.sizes[x] // parts.get(x, 1) for x in shared if region.sizes[x] % parts.get(x, 1) == 0}


def _shared_labels(region: Region) -> list[str]:
    """Return the batch labels that queries, keys and values share, each as the slowest label of its axis."""
    products = [leaf.dims for leaf in region.leaves if leaf.role in ("query", "key")]
    arrays = [*products, region.value_dims, region.out_dims]
    return [
        label
        for label in region.batch
        if region.sizes[label] > 1
        if all(axis_of(dims, label) is not None and _is_first(region, dims, label) for dims in arrays)
    ]


def _is_first(region: Region, dims: Sequence[Dim], label: str) -> bool:
    """Return True if a label is the slowest one of an array's axis, so that sharding the axis divides it."""
    for dim in dims:
        if not isinstance(dim, int) and label in dim:
            return all(region.sizes[other] == 1 for other in dim[: dim.index(label)])
    return True


def _obstacle(region: Region) -> str | None:
    """Return why a region supports neither "gather" nor "ring", or None if it supports them."""
    if any(leaf.role == "distance" and (DISTANCE,) not in leaf.dims for leaf in region.leaves):
        return "a bias of distances has no axis of these alone"
    for dims in (*(leaf.dims for leaf in region.leaves), region.value_dims, region.out_dims):
        label = COLUMNS if axis_of(dims, ROWS) is None else ROWS
        if not _is_first(region, dims, label):
            return "tokens have no axis of their own"
    return None


def _names(sharing: Sharing, region: Region, label: str) -> tuple[str, ...]:
    """Return the automatic mesh axes that shard a label according to the user's options."""
    if label == region.batch[0] and len(region.batch) > 1:
        return sharing.context.batch_axes
    return sharing.context.head_axes if label == _heads(region) else ()


def _heads(region: Region) -> str | None:
    """Return the label of heads: the last one after batch rows that queries, keys and values share, else the last."""
    own = region.batch[1:] or region.batch
    shared = [label for label in own if label in _shared_labels(region)]
    return next(iter(reversed(shared or own)), None)


@dataclass(frozen=True)
class _Moves:
    """Data movement before and after a region."""

    sharing: Sharing
    region: Region
    chosen: Chosen

    def there(self, x: Any, source: Source, dims: Sequence[Dim]) -> Any:
        """Return an array as an operand of the region, moved to the layout that the strategy needs."""
        rows, columns = axis_of(dims, ROWS), axis_of(dims, COLUMNS)
        if is_known(source) and (rows is None or self.chosen.strategy == "ulysses"):
            return x
        region, devices = self.region, self.sharing.devices
        if self.chosen.label is not None:
            tokens, heads = columns if rows is None else rows, axis_of(dims, self.chosen.label)
            is_divided = tokens is not None and x.shape[tokens] % devices == 0
            if is_divided and heads is not None and _is_first(region, dims, self.chosen.label):
                return self._exchanged(x, dims, tokens, heads)
            # Replicated over the shared axis; the region's own division selects the heads, if the array has any.
            return self._placed(x, self._spec(x, dims))
        if rows is None:
            # Keys are sharded only if there are as many as queries.
            shared = columns if region.sizes[ROWS] == region.sizes[COLUMNS] else None
            if shared is not None and self.chosen.strategy == "ring" and self.chosen.is_zigzag:
                return self._reordered(to_zigzag, x, dims, shared)
            return self._placed(x, self._spec(x, dims, shared))
        if not self.chosen.is_zigzag:
            return self._placed(x, self._spec(x, dims, rows))
        if source.key is None:
            order = zigzag_order(source.shape[0], devices)
            return self._placed(jnp.asarray(order.astype(source.dtype)), self._spec(x, dims, rows))
        return self._reordered(to_zigzag, x, dims, rows)

    def back(self, x: Any, dims: Sequence[Dim]) -> Any:
        """Return a result of the region with its rows sharded in natural order."""
        rows = axis_of(dims, ROWS)
        assert rows is not None, "results have rows"
        if self.chosen.label is not None:
            heads = axis_of(dims, self.chosen.label)
            assert heads is not None, "results have all batch labels"
            return self._exchanged(x, dims, heads, rows)
        if self.chosen.is_zigzag:
            return self._reordered(from_zigzag, x, dims, rows)
        return self._placed(x, self._spec(x, dims, rows))

    def _exchanged(self, x: Any, dims: Sequence[Dim], before: int, after: int) -> Any:
        """Move the sharding of an array from axis `before` to axis `after`."""
        if before == after:
            # Heads and tokens form one axis with heads slower, so sharding this axis divides heads.
            return self._placed(x, self._spec(x, dims, after))
        exchange = functools.partial(
            jax.lax.all_to_all, axis_name=self.sharing.axis, split_axis=after, concat_axis=before, tiled=True
        )
        return self._mapped(exchange, x, self._spec(x, dims, before), self._spec(x, dims, after))

    def _reordered(self, order: Callable[..., Any], x: Any, dims: Sequence[Dim], rows: int) -> Any:
        """Reorder the sharded rows of an array."""
        spec = self._spec(x, dims, rows)
        return self._mapped(functools.partial(order, axis=self.sharing.axis, tokens=rows), x, spec, spec)

    def _mapped(self, compute: Callable[..., Any], x: Any, before: P, after: P) -> Any:
        """Apply a function to each device's part of an array."""
        mesh = self.sharing.mesh
        if self.sharing.is_explicit:
            x = self._placed(x, before)
        kind = AxisType.Explicit if self.sharing.is_explicit else AxisType.Auto
        manual = {name for name, own in zip(mesh.axis_names, mesh.axis_types, strict=True) if own == kind}
        # Under `jax.vmap`, mesh axes that shard the mapped axis must not be named; an empty set means all axes.
        names = manual if len(manual) < len(mesh.axis_names) else set()
        return jax.shard_map(compute, mesh=mesh, in_specs=before, out_specs=after, axis_names=names)(x)

    def _placed(self, x: Any, spec: P) -> Any:
        """Return the array with the given sharding."""
        sharding = NamedSharding(self.sharing.mesh, spec)
        if self.sharing.is_explicit:
            return jax.sharding.reshard(x, sharding)
        return jax.lax.with_sharding_constraint(x, sharding)

    def _spec(self, x: Any, dims: Sequence[Dim], place: int | None = None) -> P:
        """Return an array's spec: axis `place`, if any, over the devices that share tokens, other axes unchanged."""
        others = [()] * x.ndim
        if self.sharing.is_explicit:
            given = tuple(jax.typeof(x).sharding.spec)
            others = [_without(entry, self.sharing.axis) for entry in (*given, *[None] * (x.ndim - len(given)))]
        else:
            for axis, dim in enumerate(dims):
                labels = () if isinstance(dim, int) else dim
                label = next((own for own in labels if self.region.sizes[own] > 1), None)
                others[axis] = () if label is None else _names(self.sharing, self.region, label)
        own = self.sharing.axis
        return P(*((*names, own) if axis == place else names or None for axis, names in enumerate(others)))


def _without(entry: Any, axis: str) -> tuple[str, ...]:
    """Return the mesh axes of a spec's entry, except one."""
    names = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
    return tuple(name for name in names if name != axis)
