"""Division of an operation over the devices of a mesh, from one rule for every kind of mesh.

A rule names the axes of each operand and result by labels, as einsum does, and says which labels devices may divide
among themselves. It serves

| axes of the mesh | mechanism |
|---|---|
| automatic | `custom_partitioning`, whose Shardy rule is the rule's text |
| explicit | `jax.shard_map` over these axes |
| manual | none: the operation already sees the arrays of one device |

A label that an axis of the mesh divides is divided in all arrays that have it. A device reads the part of an operand
that it needs, also where the operand is not sharded so: key heads, for example, where there are fewer of them than
devices. A result without the label is a sum over it, which one all-reduce completes.
"""

import dataclasses
import functools
import hashlib
import math
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from blockdiag._sizes import is_symbolic
from blockdiag.versions import installed_version

_ADDRESS = " at 0x"

type Dim = tuple[str, ...]
"""The labels of one axis of an array, slowest first; an axis without labels is never divided."""


@dataclass(frozen=True)
class Rule:
    """How devices may divide an operation.

    Attributes:
        operation: its public name, for messages.
        problem: text that differs where the computation does, beyond the shapes and dtypes of arrays.
        operands, results: the labels of every axis of every array.
        sizes: the size of each label, as pairs.
        independent: the labels that devices may divide: no element of a result needs two indices of such a label, but
            for results without the label, which are sums over it.
        anchors: numbers of the operands that must not move, such as a pool of pages: how they are sharded counts before
            all else.
        is_anchored: whether labels that anchors have are divided as the anchors are, or not at all.
    """

    operation: str
    problem: str
    operands: tuple[tuple[Dim, ...], ...]
    results: tuple[tuple[Dim, ...], ...]
    sizes: tuple[tuple[str, int], ...]
    independent: frozenset[str]
    anchors: tuple[int, ...] = ()
    is_anchored: bool = False


@dataclass(frozen=True)
class Piece:
    """Part of the devices along one axis of a mesh: their index, divided by `below`, modulo `count`."""

    axis: str
    count: int
    below: int

    @property
    def index(self) -> jax.Array:
        """Which part this device has."""
        return jax.lax.axis_index(self.axis) // self.below % self.count


type Division = Mapping[str, tuple[Piece, ...]]
"""The pieces of mesh axes that divide each label, the slowest first."""


@dataclass(frozen=True)
class Part:
    """The part of an operation that one device computes.

    Attributes:
        sizes: how many indices of each label the device has.
        starts: the first index of each divided label, int32.
        axes: the axes of the mesh that divide a label, the slowest first.
    """

    sizes: Mapping[str, int]
    starts: Mapping[str, jax.Array]
    axes: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)


type Local[R] = Callable[[Part], Callable[..., R]]
"""From the part of one device to the operation on its arrays."""


def divide(rule: Rule, local: Local[Sequence[jax.Array]], arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Compute an operation whose arrays any devices may share.

    Args:
        rule: how the operation divides.
        local: the operation itself, for a part of it.
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
            # XLA's partitioner aborts on custom partitioning inside of a region that is manual over some axes.
            warnings.warn(
                f"inside a jax.shard_map that leaves axes {remaining} automatic, operands are gathered over these; "
                "make them manual, too (axis_names)",
                stacklevel=2,
            )
        return list(local(_everything(rule))(*arrays))
    if any(is_symbolic(size) for _, size in rule.sizes):
        # Exported for any size, which no mesh is known to divide.
        return list(local(_everything(rule))(*arrays))
    return _on_automatic_axes(rule, local, arrays)


@dataclass(frozen=True)
class Lead:
    """An axis that `jax.vmap` maps, in front of the arrays that have it.

    Attributes:
        size: elements along it.
        is_mapped: whether each operand has it; those that are None not counted.
    """

    size: int
    is_mapped: tuple[bool, ...]


def divide_mapped(rule: Rule, local: Local[Any], operands: Any, leads: Sequence[Lead] = ()) -> Any:
    """Compute an operation on pytrees of arrays, mapped over leading axes, which devices may divide as well.

    Args:
        rule: how one element divides; `operands` and `results` are those that are not None, in order.
        local: one element, for a part of it; it must take `jax.vmap`.
        operands: the operands, with the leading axes that they have.
        leads: the leading axes, first to last.

    Returns:
        What `local` returns, with all leading axes in front of each array.
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


def keep_mapped_axes(
    compute: Callable[..., Any], leads: tuple[Lead, ...], with_leads: Callable[[tuple[Lead, ...]], Callable[..., Any]]
) -> Callable[..., Any]:
    """A function whose mapped axes stay apart, in front, until each device has its own part of the arrays.

    Args:
        compute: the function, of operands that have the leading axes `leads`.
        leads: those axes.
        with_leads: from leading axes to the same function, of operands that have these.
    """
    function = jax.custom_batching.custom_vmap(compute)

    @function.def_vmap
    def compute_mapped(axis_size: int, is_mapped: Sequence[Any], *operands: Any) -> tuple[Any, Any]:
        lead = Lead(axis_size, tuple(jax.tree.leaves(is_mapped)))
        results = with_leads((lead, *leads))(*operands)
        return results, jax.tree.map(lambda _: True, results)

    return function


def divide_array_code(rule: Rule, local: Local[Any], operands: Any) -> Any:
    """Compute an operation that is array code, which XLA divides and JAX transforms by itself.

    Only over explicit axes, which are parts of types that not all array code can follow, it is divided here.
    """
    if explicit_mesh(jax.tree.leaves(operands)) is None:
        return local(_everything(rule))(*operands)
    return divide_mapped(rule, local, operands)


def _everything(rule: Rule) -> Part:
    """The part of a device that computes all of an operation."""
    return Part(dict(rule.sizes), {})


def _on_automatic_axes(rule: Rule, local: Local[Sequence[jax.Array]], arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """The operation as one that XLA's partitioner divides, wherever a program with it has several devices."""
    whole = jax.make_jaxpr(local(_everything(rule)))(*arrays)
    # `custom_partitioning` takes no constants but as operands; on several devices they are made anew.
    constants = [*(jnp.asarray(x) for x in whole.consts), jnp.asarray(digest_of(rule))]
    # Functions that live as long as a program must not hold arrays of its trace.
    jaxpr, count = whole.jaxpr, len(constants)
    rule = dataclasses.replace(rule, operands=(*rule.operands, *(((),) * x.ndim for x in constants)))

    @custom_partitioning
    def compute(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        given, known = arrays[:-count], arrays[-count:-1]
        return tuple(jax.core.eval_jaxpr(jaxpr, known, *given))

    def partition(mesh: Any, operands: Sequence[Any], results: Sequence[Any]) -> tuple[Any, ...]:
        given = [(x.shape, x.sharding.spec) for x in (*operands, *results)]
        division = division_of(rule, mesh.shape, given)
        for x, dims in zip(operands, rule.operands, strict=True):
            _warn_of_gathers(rule, x.sharding.spec, dims)
        found = [
            _wanted_spec(rule, division, mesh.shape, dims, x.sharding.spec)
            for x, dims in zip(results, rule.results, strict=True)
        ]
        specs = (found, [spec_of(rule, division, mesh.shape, dims) for dims in rule.operands])
        shardings = (tuple(NamedSharding(mesh, spec) for spec in each) for each in specs)
        return mesh, _on_one_device(rule, local, division, mesh.shape, found, count), *shardings

    text, options = shardy_rule(rule)
    compute.def_partition(partition=partition, sharding_rule=text, **options)
    return list(compute(*arrays, *constants))


def digest_of(rule: Rule) -> np.ndarray:
    """A number, uint32[8], that programs have for each division, so that it tells apart what they compute.

    JAX's compilation cache can be told to ignore which Python function divides a call
    (`jax_remove_custom_partitioning_ptr_from_cache_key`). The program itself must then say all that this function
    depends on, and say the same in every process: also which edition of this library's kernels it has.
    """
    # The edition takes tens of milliseconds to find, once, and tells nothing apart where the function itself does.
    edition = _library() if jax.config.jax_remove_custom_partitioning_ptr_from_cache_key else None
    # Addresses, in the text of objects that equal themselves alone, may be those of other objects in other processes.
    unique = uuid.uuid4().hex if _ADDRESS in rule.problem else ""
    settings = [getattr(jax.config, name) for name in ("jax_default_matmul_precision", "jax_enable_x64")]
    dims = (rule.operands, rule.results, rule.sizes, sorted(rule.independent), rule.anchors, rule.is_anchored)
    text = repr((edition, settings, rule.operation, rule.problem, dims, unique))
    return np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint32)


@functools.cache
def _library() -> tuple[str, str | None]:
    """Return a hash of this library's sources and Triton's version, on which compiled kernels depend."""
    folder = Path(__file__).parent.parent
    content = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        content.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return content.hexdigest(), installed_version("triton")


def _on_explicit_axes(
    rule: Rule, local: Local[Sequence[jax.Array]], arrays: Sequence[jax.Array], mesh: Any
) -> list[jax.Array]:
    """The operation as `jax.shard_map` over the explicit axes of a mesh."""
    axes = {name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit}
    shape = {name: mesh.shape[name] for name in axes}
    given = [(x.shape, jax.typeof(x).sharding.spec) for x in arrays]
    division = division_of(rule, shape, given)
    for (_, spec), dims in zip(given, rule.operands, strict=True):
        _warn_of_gathers(rule, spec, dims)
    specs = tuple(spec_of(rule, division, shape, dims) for dims in rule.operands)
    results = [spec_of(rule, division, shape, dims) for dims in rule.results]
    placed = [jax.sharding.reshard(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]
    compute = _on_one_device(rule, local, division, shape, results)
    # Within `jax.vmap` the axes that a mapped axis is sharded over are not to be named: none given means all others.
    names = axes if len(axes) < len(mesh.axis_names) else set()
    mapped = jax.shard_map(
        compute, mesh=mesh, in_specs=specs, out_specs=tuple(results), axis_names=names, check_vma=False
    )
    return list(mapped(*placed))


def _warn_of_gathers(rule: Rule, spec: P, dims: Sequence[Dim]) -> None:
    """Warn where an axis is sharded of which every device needs all."""
    for entry, dim in zip(tuple(spec), dims, strict=False):
        # Axes without labels are those of small tables.
        if entry not in (None, ()) and dim and rule.independent.isdisjoint(dim):
            warn_of_gather(rule.operation, f"axis `{' '.join(dim)}`", entry)


def warn_of_gather(operation: str, axis: str, names: Any) -> None:
    """Warn that an operand is gathered over axes of a mesh."""
    warnings.warn(
        f"`{operation}`: {axis} of an operand is sharded over {names}, and every device needs all of it: it is "
        "gathered. Shard batch rows or heads instead; for tokens some operations take `context_parallel` "
        "(docs/several_gpus.md)",
        stacklevel=2,
    )


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


def shardy_rule(rule: Rule) -> tuple[str, dict[str, Any]]:
    """The text of a rule for Shardy, and what `def_partition` takes besides it.

    Axes that have no label, or no divisible one, get factors of their own that need replication.
    """
    sizes = dict(rule.sizes)
    order: list[str] = []
    whole: set[str] = set()
    compound: set[str] = set()
    size_of: dict[str, int] = {}

    # Shardy would pass parts of an axis of a mesh from heads of queries to key heads, of which there may be fewer than
    # devices, and JAX cannot express parts: arrays that have a label alone do not hear from those that have it in a
    # compound axis. Of anchors all others hear; they are arguments of a program, as a rule, and not made in it.
    dims = {dim for array in (*rule.operands, *rule.results) for dim in array}
    in_compound = {label for dim in dims for label in dim if sum(sizes[x] > 1 for x in dim) > 1}
    # What does not decide how a label is divided must not say so to the others.
    anchored = {label for i in rule.anchors for dim in rule.operands[i] for label in dim} if rule.is_anchored else set()

    def words(arrays: Sequence[Sequence[Dim]], prefix: str) -> str:
        texts = []
        for number, dims in enumerate(arrays):
            is_apart = prefix == "o" and number not in rule.anchors
            axes = []

            def factor(label: str, is_alone: bool, suffix: str = f"_o{number}" if is_apart else "") -> str:
                name = f"l_{label}{suffix if label in anchored else ''}"
                if is_alone and label in in_compound and not rule.anchors:
                    name += "_alone"
                if name not in order:
                    order.append(name)
                size_of[name] = sizes[label]
                return name

            for axis, dim in enumerate(dims):
                # Shardy has no factors of one element beside others.
                names = [factor(label, len(dim) == 1) for label in dim if len(dim) == 1 or sizes[label] > 1]
                if not names:
                    names = [f"x_{prefix}{number}_{axis}"]
                    order.append(names[0])
                (whole if len(names) == 1 else compound).update(names)
                axes.append(names[0] if len(names) == 1 else f"({' '.join(names)})")
            texts.append(" ".join(axes))
        return ", ".join(texts)

    text = f"{words(rule.operands, 'o')} -> {words(rule.results, 'r')}"
    shared = {f"l_{label}" for label in sizes.keys() - rule.independent}
    options: dict[str, Any] = {
        # Shardy wants these in the order in which they appear.
        "need_replication_factors": tuple(name for name in order if name.startswith("x_") or name in shared),
    }
    options |= {name: size for name, size in size_of.items() if name in compound - whole}
    return text, options


def division_of(rule: Rule, mesh: Mapping[str, int], arrays: Sequence[tuple[Sequence[int], P]]) -> Division:
    """How labels are divided, from how arrays are sharded: of two that disagree, the larger one counts.

    Args:
        rule: the rule.
        mesh: the size of each axis of the mesh.
        arrays: shape and spec of each operand, or of each operand and result.
    """
    sizes = dict(rule.sizes)
    found: dict[str, tuple[Piece, ...]] = {}
    labels = (*rule.operands, *rule.results)[: len(arrays)]
    anchored = {label for i in rule.anchors for dim in labels[i] for label in dim} if rule.is_anchored else set()
    order = sorted(range(len(arrays)), key=lambda i: (i not in rule.anchors, -math.prod(arrays[i][0])))
    for i in order:
        for entry, dim in zip(tuple(arrays[i][1]), labels[i], strict=False):
            names = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
            if i in rule.anchors or anchored.isdisjoint(dim):
                pieces = _pieces(names, mesh, [(x, sizes[x]) for x in dim], rule.independent)
                found |= _agreed(pieces, dim, found)
    return found


def _agreed(
    pieces: dict[str, tuple[Piece, ...]], dim: Dim, found: dict[str, tuple[Piece, ...]]
) -> dict[str, tuple[Piece, ...]]:
    """The pieces of one axis of an array if they continue what is found, else none.

    An axis of key heads and their query heads, for example, may be divided further than key heads alone.
    """
    if any(pieces.get(label) != found[label] for label in dim if label in found):
        return {}
    used = {piece.axis for label, each in found.items() if label not in dim for piece in each}
    is_free = used.isdisjoint(piece.axis for each in pieces.values() for piece in each)
    return pieces if is_free else {}


def _pieces(
    names: Sequence[str], mesh: Mapping[str, int], labels: Sequence[tuple[str, int]], independent: frozenset[str]
) -> dict[str, tuple[Piece, ...]]:
    """Return how axes of a mesh, slowest first, divide an array's axis that has these labels of these sizes.

    Axes count up to the first one that cannot be used as a whole, since it does not divide the sizes.
    """
    found: dict[str, list[Piece]] = {}
    waiting = list(labels)
    left = waiting[0][1] if waiting else 1
    for axis in names:
        parts: list[tuple[str, Piece]] = []
        size, place, rest = mesh[axis], list(waiting), left
        while size > 1 and place and place[0][0] in independent:
            count = math.gcd(size, rest)
            # A label is cut by a whole axis, or is cut up by a part of one: nothing between.
            if count not in (size, rest):
                break
            if count > 1:
                parts.append((place[0][0], Piece(axis, count, size // count)))
            size, rest = size // count, rest // count
            if rest == 1:
                place = place[1:]
                rest = place[0][1] if place else 1
        if size > 1:
            break
        waiting, left = place, rest
        for label, piece in parts:
            found.setdefault(label, []).append(piece)
    return {label: tuple(pieces) for label, pieces in found.items()}


def spec_of(rule: Rule, division: Division, mesh: Mapping[str, int], dims: Sequence[Dim]) -> P:
    """How an array is sharded where labels are divided so; axes that no spec can describe are whole."""
    return P(*(_names(rule, division, mesh, dim) or None for dim in dims))


def _wanted_spec(rule: Rule, division: Division, mesh: Mapping[str, int], dims: Sequence[Dim], wanted: P) -> P:
    """How a result is sharded; of a sum, which an all-reduce completes, what is wanted whole is made whole by it."""
    spec = spec_of(rule, division, mesh, dims)
    own = {label for dim in dims for label in dim}
    if all(label in own for label in division if _parts(division, label) > 1):
        return spec
    entries = (*wanted, *[None] * (len(dims) - len(wanted)))
    return P(*(entry if other not in (None, ()) else None for entry, other in zip(spec, entries, strict=True)))


def _names(rule: Rule, division: Division, mesh: Mapping[str, int], dim: Dim) -> tuple[str, ...]:
    """The axes of a mesh that shard an array's axis exactly as its labels are divided; empty where none do."""
    sizes = dict(rule.sizes)
    pieces = [(label, piece) for label in dim for piece in division.get(label, ())]
    is_whole = True
    for label in dim:
        parts = _parts(division, label)
        if parts > 1 and not is_whole:
            return ()  # parts of a fast label, for all of a slow one, lie apart
        is_whole = is_whole and parts == sizes[label]
    names = tuple(dict.fromkeys(piece.axis for _, piece in pieces))
    # Each axis as a whole, in one run, its slow part first.
    expected = []
    for name in names:
        own = [piece for _, piece in pieces if piece.axis == name]
        if math.prod(piece.count for piece in own) != mesh[name] or own != sorted(own, key=lambda x: -x.below):
            return ()
        expected += own
    return names if expected == [piece for _, piece in pieces] else ()


def _parts(division: Division, label: str) -> int:
    return math.prod(piece.count for piece in division.get(label, ()))


def _on_one_device(
    rule: Rule,
    local: Local[Sequence[jax.Array]],
    division: Division,
    mesh: Mapping[str, int],
    results: Sequence[P],
    unused: int = 0,
) -> Callable[..., tuple[jax.Array, ...]]:
    """The operation on the shards of one device, inside of the mesh; `results` are the specs of its results."""
    sizes = {label: size // _parts(division, label) for label, size in rule.sizes}

    def cut_labels(dims: Sequence[Dim], spec: P) -> list[list[str]]:
        """For every axis the labels that are divided, though the array is not sharded so."""
        return [
            [] if entry is not None else [label for label in dim if _parts(division, label) > 1]
            for dim, entry in zip(dims, spec, strict=True)
        ]

    def compute(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        own = [
            _cut(x, dims, cut_labels(dims, spec_of(rule, division, mesh, dims)), rule, division, sizes)
            for x, dims in zip(arrays, rule.operands, strict=True)
        ]
        starts = {label: _index(division, label) * sizes[label] for label in division}
        axes = {label: tuple(dict.fromkeys(x.axis for x in pieces)) for label, pieces in division.items()}
        found = local(Part(sizes, starts, axes))(*own[: len(own) - unused])
        return tuple(
            _completed(x, dims, cut_labels(dims, spec), rule, division, sizes)
            for x, dims, spec in zip(found, rule.results, results, strict=True)
        )

    return compute


def _cut(
    x: jax.Array, dims: Sequence[Dim], cut: Sequence[Sequence[str]], rule: Rule, division: Division,
    sizes: Mapping[str, int],
) -> jax.Array:  # fmt: skip
    """The part of an operand that this device needs."""
    for axis, (dim, labels) in enumerate(zip(dims, cut, strict=True)):
        if labels:
            whole = dict(rule.sizes)
            parts = x.reshape(*x.shape[:axis], *(whole[label] for label in dim), *x.shape[axis + 1 :])
            for label in labels:
                place = axis + dim.index(label)
                start = _index(division, label) * sizes[label]
                parts = jax.lax.dynamic_slice_in_dim(parts, start, sizes[label], place)
            x = parts.reshape(*x.shape[:axis], math.prod(sizes[label] for label in dim), *x.shape[axis + 1 :])
    return x


def _completed(
    x: jax.Array, dims: Sequence[Dim], cut: Sequence[Sequence[str]], rule: Rule, division: Division,
    sizes: Mapping[str, int],
) -> jax.Array:  # fmt: skip
    """A result, its sums over divided labels that it lacks completed, and whole along axes that no spec describes."""
    own = {label for dim in dims for label in dim}
    axes = {piece.axis for label, pieces in division.items() if label not in own for piece in pieces}
    for axis, (dim, labels) in enumerate(zip(dims, cut, strict=True)):
        if labels:
            whole = dict(rule.sizes)
            parts = x.reshape(*x.shape[:axis], *(sizes[label] for label in dim), *x.shape[axis + 1 :])
            for label in labels:
                place = axis + dim.index(label)
                shape = (*parts.shape[:place], whole[label], *parts.shape[place + 1 :])
                start = _index(division, label) * sizes[label]
                parts = jax.lax.dynamic_update_slice_in_dim(jnp.zeros(shape, x.dtype), parts, start, place)
                axes |= {piece.axis for piece in division[label]}
            x = parts.reshape(*x.shape[:axis], math.prod(whole[label] for label in dim), *x.shape[axis + 1 :])
    return jax.lax.psum(x, tuple(sorted(axes))) if axes else x


def _index(division: Division, label: str) -> jax.Array:
    """Which part of a label this device has."""
    index = jnp.zeros((), jnp.int32)
    for piece in division[label]:
        index = index * piece.count + piece.index
    return index
