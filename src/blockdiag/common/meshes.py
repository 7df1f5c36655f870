"""Shardings of arrays over meshes, mainly over explicit axes, where shardings are part of types."""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P


def explicit_mesh(arrays: Sequence[jax.Array]) -> Any:
    """Return the mesh with explicit axes that the arrays are on, or None.

    The mesh of an array that is sharded takes precedence over the mesh of a replicated one.
    """
    found = None
    for x in arrays:
        sharding = jax.typeof(x).sharding
        if AxisType.Explicit in sharding.mesh.axis_types:
            # A concrete array has a mesh of devices; a traced one has only the abstract mesh of its type.
            placed = None if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
            mesh = placed.mesh if isinstance(placed, NamedSharding) else sharding.mesh
            if any(entry is not None for entry in sharding.spec):
                return mesh
            found = found or mesh
    return found


def placed_like[T](arrays: T, like: Any) -> T:
    """Reshard arrays like others of the same shapes, where mesh axes are explicit and shardings are part of types.

    Args:
        arrays: pytree, for example of gradients.
        like: pytree of the same structure, for example of the operands that they are gradients of.
    """

    def place(x: jax.Array, other: jax.Array) -> jax.Array:
        wanted = jax.typeof(other).sharding
        is_explicit = AxisType.Explicit in wanted.mesh.axis_types
        return jax.sharding.reshard(x, wanted) if is_explicit and jax.typeof(x).sharding != wanted else x

    return jax.tree.map(place, arrays, like)


def whole_but(operation: str, arrays: Any, kept: Callable[[int], Sequence[int]]) -> Any:
    """Gather arrays over the explicit axes of a mesh, except along array axes that may stay sharded.

    Args:
        operation: name of the operation, for the warning.
        arrays: pytree.
        kept: function from an array's number of axes to the axes that may stay sharded.
    """

    def gather(x: jax.Array) -> jax.Array:
        x = jnp.asarray(x)
        spec = tuple(jax.typeof(x).sharding.spec)
        spec = (*spec, *[None] * (x.ndim - len(spec)))
        allowed = [axis % x.ndim for axis in kept(x.ndim)]
        wanted = P(*(entry if axis in allowed else None for axis, entry in enumerate(spec)))
        lost = {axis: entry for axis, entry in enumerate(spec) if entry is not None and axis not in allowed}
        for axis, entry in lost.items():
            warn_of_gather(operation, f"axis {axis}", entry)
        return jax.sharding.reshard(x, NamedSharding(explicit_mesh([x]), wanted)) if lost else x

    return jax.tree.map(gather, arrays) if explicit_mesh(jax.tree.leaves(arrays)) is not None else arrays


def spec_on(mesh: Mesh, sharding: Sharding, rank: int) -> P:
    """Return the spec of an array on a mesh for any sharding that XLA chose for it.

    XLA may divide an array axis by a part of a mesh axis: two heads among four devices, where each head is on two
    devices. A `PartitionSpec` cannot express this. Such an axis counts as whole, and XLA gathers it.

    Args:
        mesh: the mesh.
        sharding: a sharding over the devices of the mesh.
        rank: number of axes of the array.
    """
    # The shape is a stand-in: the number of devices is a multiple of any number of parts.
    places = sharding.devices_indices_map((mesh.size,) * rank)
    starts = [[index.start or 0 for index in places[device]] for device in mesh.devices.flat]
    axes = np.asarray(starts, np.int64).reshape(*mesh.devices.shape, rank)
    return P(*(_names(mesh, axes[..., axis]) for axis in range(rank)))


def _names(mesh: Mesh, starts: np.ndarray) -> str | tuple[str, ...] | None:
    """Return the mesh axes that divide an array axis, slowest first, given the start of each device's part."""
    sizes = starts.shape
    # Index of the second device along each mesh axis, if there is one.
    second = np.minimum(np.eye(len(sizes), dtype=int), np.asarray(sizes) - 1)
    steps = [int(starts[tuple(place)]) for place in second]
    order = sorted((axis for axis, step in enumerate(steps) if step), key=lambda axis: -steps[axis])
    parts = math.prod(sizes[axis] for axis in order)
    number = np.zeros_like(starts)
    for axis in order:
        place = np.arange(sizes[axis]).reshape(-1, *[1] * (starts.ndim - axis - 1))
        number = number * sizes[axis] + place
    if not order or not np.array_equal(number * (mesh.size // parts), starts):
        return None
    names = tuple(mesh.axis_names[axis] for axis in order)
    return names[0] if len(names) == 1 else names


def warn_of_gather(operation: str, axis: str, names: Any) -> None:
    """Warn that an operand is gathered over axes of a mesh."""
    warnings.warn(
        f"`{operation}`: {axis} of an operand is sharded over {names}, and every device needs all of it: it is "
        "gathered. Shard batch rows or heads instead; for tokens some operations take `context_parallel` "
        "(docs/several_gpus.md)",
        stacklevel=2,
    )
