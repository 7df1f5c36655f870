"""Checks of shardings over explicit mesh axes, for calls that read or write a pool of pages."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from blockdiag.common.meshes import explicit_mesh
from blockdiag.common.rule import Rule
from blockdiag.common.shards import division_of, spec_of


def check_tokens(name: str, x: jax.Array) -> None:
    """Refuse tokens [..., T, N, H] that are sharded so that no device has whole sequences and heads.

    Raises:
        ValueError: tokens or features are sharded over explicit axes of a mesh.
    """
    spec = full_spec(x)
    if spec[-1] is not None or spec[-3] is not None:
        raise ValueError(
            f"`{name}` must be sharded over batch rows and heads only, got {spec} for shape {x.shape}; "
            "use jax.sharding.reshard, or call inside jax.shard_map with shards that hold whole sequences"
        )


def full_spec(x: jax.Array) -> P:
    """Return the spec of an array over explicit axes, with an entry for each array axis."""
    spec = tuple(jax.typeof(x).sharding.spec)
    return P(*spec, *[None] * (x.ndim - len(spec)))


def unfit_pools(
    rule: Rule, operands: Mapping[str, Any], names: Sequence[str], *, is_exact: bool
) -> dict[str, tuple[P, P]]:
    """Find the pools that a call on a mesh with explicit axes would move between its devices.

    Args:
        rule: the rule of the call.
        operands: arrays or None, by name, in the rule's order.
        names: names of the pools.
        is_exact: whether a whole pool may not be divided either, because it is written.

    Returns:
        For each such pool, its spec and the spec by which the call divides it.
    """
    given = {name: x for name, x in operands.items() if x is not None}
    mesh = explicit_mesh(list(given.values()))
    if mesh is None:
        return {}
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    shape = {name: mesh.shape[name] for name, kind in kinds if kind == AxisType.Explicit}
    division = division_of(rule, shape, [(x.shape, full_spec(x)) for x in given.values()])
    found = {}
    for name, dims in zip(given, rule.operands, strict=True):
        spec, wanted = full_spec(given[name]), spec_of(rule, division, shape, dims)
        pairs = [(_axes(one), _axes(other)) for one, other in zip(spec, wanted, strict=True)]
        if name in names and any(one != other and (one or is_exact) for one, other in pairs):
            found[name] = (spec, wanted)
    return found


def _axes(entry: Any) -> tuple[str, ...]:
    """Return the mesh axes in an entry of a spec."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)
