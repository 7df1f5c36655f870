"""Arrays on meshes with explicit axes, whose shardings are parts of their types."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P


def explicit_mesh(arrays: Sequence[jax.Array]) -> Any:
    """The mesh with explicit axes on which arrays are, one that is sharded first; None where none is on any."""
    found = None
    for x in arrays:
        sharding = jax.typeof(x).sharding
        if AxisType.Explicit in sharding.mesh.axis_types:
            # The mesh of devices where the array is concrete, otherwise the abstract one of its type.
            placed = None if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
            mesh = placed.mesh if isinstance(placed, NamedSharding) else sharding.mesh
            if any(entry is not None for entry in sharding.spec):
                return mesh
            found = found or mesh
    return found


def placed_like[T](arrays: T, like: Any) -> T:
    """Arrays, sharded as others of their shapes are where axes of the mesh are explicit, and so parts of types.

    Args:
        arrays: pytree; gradients, for example.
        like: pytree of the same structure; what they are gradients of.
    """

    def place(x: jax.Array, other: jax.Array) -> jax.Array:
        wanted = jax.typeof(other).sharding
        is_explicit = AxisType.Explicit in wanted.mesh.axis_types
        return jax.sharding.reshard(x, wanted) if is_explicit and jax.typeof(x).sharding != wanted else x

    return jax.tree.map(place, arrays, like)


def whole_but(operation: str, arrays: Any, kept: Callable[[int], Sequence[int]]) -> Any:
    """Arrays whose axes are whole on every device of a mesh with explicit axes, but for some.

    Args:
        operation: for the warning.
        arrays: pytree.
        kept: from an array's number of axes to those that may stay sharded.
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


def warn_of_gather(operation: str, axis: str, names: Any) -> None:
    """Warn that an operand is gathered over axes of a mesh."""
    warnings.warn(
        f"`{operation}`: {axis} of an operand is sharded over {names}, and every device needs all of it: it is "
        "gathered. Shard batch rows or heads instead; for tokens some operations take `context_parallel` "
        "(docs/several_gpus.md)",
        stacklevel=2,
    )
