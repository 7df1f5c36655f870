"""Arrays with explicit shardings: calls over an explicit mesh become `jax.shard_map` over its axes.

Where a mesh's axes are explicit, shardings are part of types, and a kernel call has no sharding rule of its own. But
batch rows and heads are independent, so each device computes its own.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from blockdiag.rotary import Rotary


def explicit_axes(x: jax.Array) -> frozenset[str]:
    """Explicit axes of the mesh that `x` lives on."""
    mesh = jax.typeof(x).sharding.mesh
    return frozenset(
        name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit
    )


def operand_spec(query: jax.Array, key_heads: int, name: str = "query") -> P:
    """How `query` [B, T, N, H] or [T, N, H] is sharded, over batch rows and heads only; keys and values follow it.

    `name` is the caller's name of `query`.

    Raises:
        ValueError: tokens or elements of heads are sharded, or key heads do not divide among the devices.
    """
    spec = _full_spec(query)
    if spec[-1] is not None or spec[-3] is not None:
        raise ValueError(
            f"`{name}` must be sharded over batch rows and heads only, got {spec} for shape {query.shape}; "
            "use jax.sharding.reshard, or call inside jax.shard_map with shards that hold whole sequences"
        )
    names = () if spec[-2] is None else spec[-2] if isinstance(spec[-2], tuple) else (spec[-2],)
    parts = math.prod(jax.typeof(query).sharding.mesh.shape[name] for name in names)
    if key_heads % parts:
        raise ValueError(
            f"`key` must have a multiple of {parts} heads to be sharded as `query` is, {spec}, got {key_heads}; "
            "use jax.sharding.reshard on `query` so that its heads are not sharded"
        )
    return spec


def input_spec(x: jax.Array) -> P:
    """How `x` [B, T, D] or [T, D] is sharded, over batch rows only.

    Raises:
        ValueError: another axis is sharded.
    """
    spec = _full_spec(x)
    if spec[-1] is not None or spec[-2] is not None:
        raise ValueError(
            f"`x` must be sharded over batch rows only, got {spec} for shape {x.shape}; "
            "use jax.sharding.reshard, or call inside jax.shard_map with shards that hold whole sequences"
        )
    return spec


def rotary_specs(rotary: Rotary | None, batch: P) -> Any:
    """Specs of the arrays of `rotary`: `batch` for those with batch rows of their own, replicated otherwise."""
    if rotary is None:
        return None
    tables = batch if rotary.cos.ndim == 3 else P()
    positions = None if rotary.positions is None else batch if rotary.positions.ndim == 2 else P()
    # A pytree of specs in the shape of a Rotary of arrays.
    return dataclasses.replace(rotary, cos=tables, sin=tables, positions=positions)  # pyrefly: ignore[bad-argument-type]


def replicated(x: jax.Array | None) -> P | None:
    """The spec of an optional array that every device holds."""
    return None if x is None else P()


def call_on_shards(function: Callable[..., Any], arrays: tuple, specs: tuple, result: Any) -> Any:
    """Call `function` on each device's shards of `arrays`, a pytree with one PartitionSpec in `specs` for each leaf.

    The first array says which mesh; its explicit axes become manual. `result` holds the specs of what is returned.
    """
    first = arrays[0]
    # The mesh of devices where the array is concrete, otherwise the abstract one of its type.
    mesh = jax.typeof(first).sharding.mesh if isinstance(first, Tracer) else first.sharding.mesh
    arrays = jax.tree.map(lambda x, spec: jax.sharding.reshard(x, NamedSharding(mesh, spec)), arrays, specs)
    axes = set(explicit_axes(first))
    return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=result, axis_names=axes)(*arrays)


def _full_spec(x: jax.Array) -> P:
    """The spec of `x` with one entry for each axis."""
    spec = tuple(jax.typeof(x).sharding.spec)
    return P(*spec, *[None] * (x.ndim - len(spec)))
