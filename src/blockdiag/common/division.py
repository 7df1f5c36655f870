"""Division of an operation over the devices of a mesh, by one sharding rule for every kind of mesh.

| axes of the mesh | mechanism |
|---|---|
| automatic | `custom_partitioning`, with the sharding rule as Shardy's text |
| explicit | `jax.shard_map` over these axes |
| manual | none: the operation already sees the arrays of one device |
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from blockdiag.common.meshes import explicit_mesh, spec_on, warn_of_gather
from blockdiag.common.rule import Dim, Rule, digest_of, shardy_rule
from blockdiag.common.shards import (
    Local,
    Part,
    axes_of,
    division_of,
    join_axes,
    on_one_device,
    spec_of,
    split_axes,
    wanted_spec,
)
from blockdiag.common.sizes import is_symbolic

type Plan = Callable[..., tuple[Rule, Local[Any]]]
"""A function of a call's static arguments and operands. It returns the sharding rule, and what computes a part."""


def divide(rule: Rule, local: Local[Sequence[jax.Array]], arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Compute an operation on arrays that may be sharded over any mesh.

    Args:
        rule: the operation's sharding rule.
        local: function from a part of the operation to the code that computes it.
        arrays: the operands.

    Returns:
        The results.
    """
    mesh = jax.sharding.get_abstract_mesh()
    explicit = explicit_mesh(arrays)
    if explicit is not None:
        return _on_explicit_axes(rule, local, arrays, explicit)
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if AxisType.Manual in kinds.values():
        remaining = [name for name, kind in kinds.items() if kind == AxisType.Auto and mesh.shape[name] > 1]
        if remaining:
            # XLA's partitioner aborts on custom partitioning in a region that is manual over only some axes.
            warnings.warn(
                f"inside a jax.shard_map that leaves axes {remaining} automatic, operands are gathered over these; "
                "make them manual, too (axis_names)",
                stacklevel=2,
            )
        return list(local(_everything(rule))(*arrays))
    if any(is_symbolic(size) for _, size in rule.sizes):
        # The call is exported for symbolic sizes, and it is unknown whether a mesh divides them.
        return list(local(_everything(rule))(*arrays))
    return _on_automatic_axes(rule, local, arrays)


@dataclass(frozen=True)
class Lead:
    """An axis mapped by `jax.vmap`, in front of the operands that have it.

    Attributes:
        size: number of elements along it.
        is_mapped: for each operand that is not None, whether it has the axis.
    """

    size: int
    is_mapped: tuple[bool, ...]


def divide_mapped(rule: Rule, local: Local[Any], operands: Any, leads: Sequence[Lead] = ()) -> Any:
    """Compute an operation on pytrees of arrays, mapped over leading axes that devices may divide too.

    Args:
        rule: the sharding rule of one element. Its `operands` and `results` are those that are not None, in order.
        local: function from a part of one element to the code that computes it, which must support `jax.vmap`.
        operands: the operands, with their leading axes.
        leads: the leading axes, outermost first.

    Returns:
        The results of `local`, with all leading axes in front of each array.
    """
    labels = [f"mapped{place}" for place in range(len(leads))]
    flat, structure = jax.tree.flatten(operands)
    found: list[Any] = []

    def in_front(flags: Sequence[bool]) -> tuple[Dim, ...]:
        return tuple((label,) for label, flag in zip(labels, flags, strict=True) if flag)

    whole = dataclasses.replace(
        rule,
        operands=tuple(
            (*in_front([lead.is_mapped[i] for lead in leads]), *dims) for i, dims in enumerate(rule.operands)
        ),
        results=tuple((*in_front([True] * len(leads)), *dims) for dims in rule.results),
        sizes=(*((label, lead.size) for label, lead in zip(labels, leads, strict=True)), *rule.sizes),
        independent=rule.independent | set(labels),
    )

    def on_device(part: Part) -> Callable[..., Sequence[jax.Array]]:
        element = local(part)

        def compute(*arrays: jax.Array) -> Sequence[jax.Array]:
            function = element
            for label, lead in zip(reversed(labels), reversed(leads), strict=True):
                axes = jax.tree.unflatten(structure, [0 if flag else None for flag in lead.is_mapped])
                function = jax.vmap(function, axes, axis_size=part.sizes[label])
            results, shape = jax.tree.flatten(function(*jax.tree.unflatten(structure, arrays)))
            found[:] = [shape]
            return results

        return compute

    results = divide(whole, on_device, flat)
    return jax.tree.unflatten(found[0], results)


@functools.lru_cache(maxsize=4096)
def divisible(plan: Plan, *static: Any, leads: tuple[Lead, ...] = ()) -> Callable[..., Any]:
    """Return a function of pytrees of arrays that can be divided over devices and mapped by `jax.vmap`.

    Mapped axes stay separate leading axes until each device has its own part of the arrays. Equal arguments give the
    same function object, so that JAX reuses its traces.

    Args:
        plan: function of the static arguments and the operands of one element. It returns the sharding rule, and the
            function that computes a part.
        static: the static arguments, hashable.
        leads: the leading axes of the operands.
    """

    @jax.custom_batching.custom_vmap
    def compute(*operands: Any) -> Any:
        return divide_mapped(*plan(*static, operands), operands, leads)

    @compute.def_vmap
    def compute_mapped(axis_size: int, is_mapped: Sequence[Any], *operands: Any) -> tuple[Any, Any]:
        lead = Lead(axis_size, tuple(jax.tree.leaves(is_mapped)))
        results = divisible(plan, *static, leads=(lead, *leads))(*operands)
        return results, jax.tree.map(lambda _: True, results)

    return compute


def divide_array_code(rule: Rule, local: Local[Any], operands: Any) -> Any:
    """Compute an operation that is array code, which XLA partitions and JAX transforms without rules of ours.

    It is divided here only over explicit axes: these are part of types, and not all array code has rules for them.
    """
    if explicit_mesh(jax.tree.leaves(operands)) is None:
        return local(_everything(rule))(*operands)
    return divide_mapped(rule, local, operands)


def _everything(rule: Rule) -> Part:
    """Return the part that is the whole operation, for a single device."""
    return Part(dict(rule.sizes), {}, {})


def _on_automatic_axes(rule: Rule, local: Local[Sequence[jax.Array]], arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Compute the operation by `custom_partitioning`: XLA's partitioner divides it if there are several devices."""
    joined = rule
    rule, local = _apart(rule, local)
    arrays = [split_axes(x, dims, joined, dict(joined.sizes)) for x, dims in zip(arrays, joined.operands, strict=True)]
    whole = jax.make_jaxpr(local(_everything(rule)))(*arrays)
    # `custom_partitioning` takes constants only as operands. The code of a single device creates its own.
    constants = [*(jnp.asarray(x) for x in whole.consts), jnp.asarray(digest_of(rule))]
    # `compute` lives as long as the program, so it must not hold arrays of the trace.
    jaxpr, count = whole.jaxpr, len(constants)
    rule = dataclasses.replace(rule, operands=(*rule.operands, *(((),) * x.ndim for x in constants)))

    @custom_partitioning
    def compute(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        given, known = arrays[:-count], arrays[-count:-1]
        return tuple(jax.core.eval_jaxpr(jaxpr, known, *given))

    def partition(mesh: Any, operands: Sequence[Any], results: Sequence[Any]) -> tuple[Any, ...]:
        given = [(x.shape, spec_on(mesh, x.sharding, len(x.shape))) for x in (*operands, *results)]
        specs = [spec for _, spec in given]
        division = division_of(rule, mesh.shape, given)
        for spec, dims in zip(specs, rule.operands, strict=False):
            _warn_of_gathers(rule, spec, dims)
        found = [
            wanted_spec(rule, division, mesh.shape, dims, spec)
            for spec, dims in zip(specs[len(operands) :], rule.results, strict=True)
        ]
        wanted = (found, [spec_of(rule, division, mesh.shape, dims) for dims in rule.operands])
        shardings = (tuple(NamedSharding(mesh, spec) for spec in each) for each in wanted)
        return mesh, on_one_device(rule, local, division, mesh.shape, found, count), *shardings

    # `spec_on` decodes the shardings, because JAX raises an error for shardings of XLA that it cannot express.
    compute.def_partition(
        partition=partition,
        sharding_rule=lambda mesh, *_: shardy_rule(rule, mesh.shape),
        decode_shardings=False,
    )
    results = compute(*arrays, *constants)
    return [join_axes(x, dims, joined) for x, dims in zip(results, joined.results, strict=True)]


def _apart(rule: Rule, local: Local[Sequence[jax.Array]]) -> tuple[Rule, Local[Sequence[jax.Array]]]:
    """Give each label its own axis wherever devices may divide only some labels of an axis.

    The main case is an axis of sequences and tokens. XLA reports how tokens are sharded only if they have their own
    axis. The reshapes that split axes here cancel in XLA against the earlier ones that joined them.
    """

    def on_device(part: Part) -> Callable[..., Sequence[jax.Array]]:
        compute = local(part)

        def compute_apart(*arrays: jax.Array) -> Sequence[jax.Array]:
            results = compute(*(join_axes(x, dims, rule) for x, dims in zip(arrays, rule.operands, strict=True)))
            return [
                jax.tree.map(lambda x, dims=dims: split_axes(x, dims, rule, part.sizes), result)
                for result, dims in zip(results, rule.results, strict=True)
            ]

        return compute_apart

    operands, results = (
        tuple(tuple(one for dim in dims for one in axes_of(dim, rule)) for dims in arrays)
        for arrays in (rule.operands, rule.results)
    )
    return dataclasses.replace(rule, operands=operands, results=results), on_device


def _on_explicit_axes(
    rule: Rule, local: Local[Sequence[jax.Array]], arrays: Sequence[jax.Array], mesh: Any
) -> list[jax.Array]:
    """Compute the operation by `jax.shard_map` over the explicit axes of a mesh."""
    axes = {name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit}
    shape = {name: mesh.shape[name] for name in axes}
    given = [(x.shape, jax.typeof(x).sharding.spec) for x in arrays]
    division = division_of(rule, shape, given)
    for (_, spec), dims in zip(given, rule.operands, strict=True):
        _warn_of_gathers(rule, spec, dims)
    specs = tuple(spec_of(rule, division, shape, dims) for dims in rule.operands)
    # A sum is usually the gradient of the operand with the same axes, and should be sharded like that operand.
    wanted = {
        dims: P(*spec, *[None] * (len(dims) - len(spec))) for dims, (_, spec) in zip(rule.operands, given, strict=True)
    }
    results = [
        wanted_spec(rule, division, shape, dims, wanted.get(dims, spec_of(rule, division, shape, dims)))
        for dims in rule.results
    ]
    placed = [jax.sharding.reshard(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]
    compute = on_one_device(rule, local, division, shape, results)
    # Under `jax.vmap`, the mesh axes that shard a mapped axis must not be named. The empty set means all other axes.
    names = axes if len(axes) < len(mesh.axis_names) else set()
    mapped = jax.shard_map(
        compute, mesh=mesh, in_specs=specs, out_specs=tuple(results), axis_names=names, check_vma=False
    )
    return list(mapped(*placed))


def _warn_of_gathers(rule: Rule, spec: P, dims: Sequence[Dim]) -> None:
    """Warn about each sharded axis of an operand that every device needs whole."""
    sizes = dict(rule.sizes)
    for entry, dim in zip(tuple(spec), dims, strict=False):
        # Axes without labels belong to small tables, whose gathers need no warning.
        labels = [label for label in dim if sizes[label] > 1]
        if entry not in (None, ()) and labels and rule.independent.isdisjoint(labels):
            warn_of_gather(rule.operation, f"axis `{' '.join(labels)}`", entry)
