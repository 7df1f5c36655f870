"""Calls of the operators on DTensors: each process computes its own part, according to the rule of the operator.

A call takes four steps:

1. The rule and the placements of the operands determine how labels are divided (`division_of`, as on JAX's meshes).
2. Operands that are placed differently are redistributed.
3. Each process cuts out parts that placements cannot express: the key heads that it needs, if there are fewer key
   heads than processes.
4. The operator runs on plain tensors, and its results become DTensors. Results without a divided label are `Partial`.

Importing this module registers these calls.
"""

import dataclasses
import functools
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from blockdiag.common.rule import Dim, Rule
from blockdiag.common.shards import Division, division_of, spec_of
from blockdiag.torch.dtensor.rules import RULES, Operand, OperatorRule, RuleOf
from blockdiag.torch.operator import LIBRARY, OPERATORS, THROUGH_JAX

type Placements = tuple[Placement, ...]


class Mesh(NamedTuple):
    """Facts about a mesh that a division depends on.

    Attributes:
        shape: the sizes of its axes.
        coordinate: the position of this process.
    """

    shape: tuple[int, ...]
    coordinate: tuple[int, ...]


@dataclass(frozen=True)
class Cut:
    """The part of one axis that a process needs, if placements cannot express it.

    Attributes:
        axis: the axis of the tensor.
        sizes: the sizes of the labels of the axis.
        parts: start and length along each label.
    """

    axis: int
    sizes: tuple[int, ...]
    parts: tuple[tuple[int, int], ...]

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Return the part of a tensor."""
        x = x.unflatten(self.axis, self.sizes)
        for place, (start, length) in enumerate(self.parts):
            x = x.narrow(self.axis + place, start, length)
        return x.flatten(self.axis, self.axis + len(self.sizes) - 1)

    def fill(self, x: torch.Tensor) -> torch.Tensor:
        """Return the whole axis from the part, with 0 elsewhere."""
        x = x.unflatten(self.axis, [length for _, length in self.parts])
        padding = [0, 0] * (x.ndim - self.axis - len(self.parts))
        for size, (start, length) in zip(reversed(self.sizes), reversed(self.parts), strict=True):
            padding += [start, size - start - length]
        x = torch.nn.functional.pad(x, padding)
        return x.flatten(self.axis, self.axis + len(self.sizes) - 1)


@dataclass(frozen=True)
class Result:
    """Placements and sizes with which a result becomes a DTensor.

    Attributes:
        placements: the placements of the DTensor.
        fills: axes of which a process has a part that no placement can express.
        sizes: pairs (axis, size) of the sharded axes; other axes have the local size.
    """

    placements: Placements
    fills: tuple[Cut, ...]
    sizes: tuple[tuple[int, Any], ...]


@dataclass(frozen=True)
class Plan:
    """The division of a call.

    Attributes:
        placements: the placements that the operands must have.
        cuts: the cuts of each operand after redistribution.
        results: how each result becomes a DTensor.
    """

    placements: tuple[Placements, ...]
    cuts: tuple[tuple[Cut, ...], ...]
    results: tuple[Result, ...]


def call(rule_of: RuleOf, operator: Any, arguments: Sequence[Any]) -> Any:
    """Call an operator with DTensors among its arguments.

    Args:
        rule_of: maps the arguments to the operator's rule.
        operator: an overload, such as `torch.ops.blockdiag.moba_lists.default`.
        arguments: all arguments, in the order of the schema.

    Returns:
        The results as DTensors.

    Raises:
        ValueError: operands are on different meshes, a plain tensor might be a part in each process, or a cache is not
            placed as the call needs it.
    """
    described = tuple(Operand(tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else x for x in arguments)
    tensors = {argument.name: x for argument, x in zip(operator._schema.arguments, arguments, strict=True)}
    tensors = {name: x for name, x in tensors.items() if isinstance(x, torch.Tensor)}
    first, mesh = next((name, x.device_mesh) for name, x in tensors.items() if isinstance(x, DTensor))
    for name, x in tensors.items():
        if isinstance(x, DTensor) and x.device_mesh != mesh:
            raise ValueError(
                f"`{name}` must be on the mesh of `{first}`, {mesh}, got {x.device_mesh}; redistribute one of them"
            )
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(f"this process is not in the mesh of `{first}`, {mesh}; call on its processes only")
    place = Mesh(tuple(mesh.shape), tuple(coordinate))
    given = tuple(tuple(x.placements) if isinstance(x, DTensor) else None for x in tensors.values())
    sizes = [size for x in described if isinstance(x, Operand) for size in x.shape]
    # The symbols of a trace must not be cached.
    plan_of = _plan if all(type(size) is int for size in sizes) else _plan.__wrapped__
    plan = plan_of(rule_of, place, tuple(tensors), described, given)
    with torch.no_grad():
        own = _own(plan, mesh, list(tensors.values()))
        local = iter(own)
        results = operator(*(next(local) if isinstance(x, torch.Tensor) else x for x in arguments))
        if results is None:
            return None
        one = isinstance(results, torch.Tensor)
        placed = [_placed(x, how, mesh) for x, how in zip((results,) if one else results, plan.results, strict=True)]
    return placed[0] if one else tuple(placed)


def _own(plan: Plan, mesh: Any, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the local operands of this process."""
    found = []
    for x, placements, cuts in zip(tensors, plan.placements, plan.cuts, strict=True):
        if not isinstance(x, DTensor):
            if all(one.is_replicate() for one in placements):
                found.append(x)
                continue
            x = DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)
        if x.placements != placements:
            # Detached, because the operators run below autograd and `redistribute` is differentiable.
            detached: Any = x.detach()
            x = detached.redistribute(placements=placements)
        own = x.to_local()
        for cut in cuts:
            own = cut.of(own)
        found.append(own)
    return found


def _placed(x: torch.Tensor, how: Result, mesh: Any) -> torch.Tensor:
    """Return a local result as a DTensor."""
    for cut in how.fills:
        x = cut.fill(x)
    shape = list(x.shape)
    for axis, size in how.sizes:
        shape[axis] = size
    # Results are contiguous.
    stride = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return DTensor.from_local(x, mesh, how.placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride))


@functools.lru_cache(maxsize=1024)
def _plan(
    rule_of: RuleOf,
    mesh: Mesh,
    names: tuple[str, ...],
    arguments: tuple[Any, ...],
    given: tuple[Placements | None, ...],
) -> Plan:
    """Return the plan of a call.

    Args:
        rule_of: maps the arguments to the operator's rule.
        mesh: the mesh.
        names: the names of the operands.
        arguments: the arguments, with descriptions in place of tensors.
        given: the placements of the operands; None for plain tensors.
    """
    found = rule_of(*arguments)
    shapes = [x.shape for x in arguments if isinstance(x, Operand)]
    for number, (name, placements) in enumerate(zip(names, given, strict=True)):
        if placements is None and number not in found.shared:
            raise ValueError(
                f"`{name}` must be a DTensor, as other operands are, got a plain tensor, of which each process might "
                "have the whole or a part; use distribute_tensor or DTensor.from_local"
            )
    replicated = (Replicate(),) * len(mesh.shape)
    division = _Division(found, mesh, shapes, [replicated if one is None else one for one in given])
    wanted = []
    for number, (name, dims) in enumerate(zip(names, found.rule.operands, strict=True)):
        placements, cuts = division.of_operand(number, dims)
        if number in found.rule.anchors and (placements != division.given[number] or cuts):
            raise ValueError(
                f"`{name}` must be placed as {list(placements)}, got {list(division.given[number])} for shape "
                f"{tuple(shapes[number])}; {found.remedy}"
            )
        division.warn(number, dims, placements)
        wanted.append((placements, cuts))
    return Plan(
        tuple(placements for placements, _ in wanted),
        tuple(cuts for _, cuts in wanted),
        tuple(division.of_result(dims, is_sum=i not in found.alike) for i, dims in enumerate(found.rule.results)),
    )


class _Division:
    """The division of a call's labels.

    Args:
        found: the rule.
        mesh: the mesh.
        shapes: the shapes of the operands.
        given: the placements of the operands.
    """

    def __init__(
        self, found: OperatorRule, mesh: Mesh, shapes: Sequence[tuple[Any, ...]], given: Sequence[Placements]
    ) -> None:
        self._mesh, self.given = mesh, given
        self._rule = found.rule
        # Axes with a single process divide nothing.
        self._axes = [axis for axis, size in enumerate(mesh.shape) if size > 1]
        self._sizes = {str(axis): mesh.shape[axis] for axis in self._axes}
        # Placements may divide batch rows unevenly, so their label counts as divisible by any mesh.
        even = {found.rows: math.prod(mesh.shape)} if found.rows is not None else {}
        sizes = tuple((label, even.get(label, size)) for label, size in found.rule.sizes)
        self._even: Rule = dataclasses.replace(found.rule, sizes=sizes)
        arrays: Any = [(shape, self._spec(one, len(shape))) for shape, one in zip(shapes, given, strict=True)]
        self._division: Division = division_of(self._even, self._sizes, arrays)
        self._alone = self._find_alone(shapes)

    def of_operand(self, number: int, dims: Sequence[Dim]) -> tuple[Placements, tuple[Cut, ...]]:
        """Return the placements that an operand must have, and the parts that are then cut out of it."""
        placements, cuts = self._placements(dims)
        for axis in range(len(placements)):
            if axis not in self._axes:
                placements[axis] = self.given[number][axis]
        return tuple(placements), tuple(cuts)

    def of_result(self, dims: Sequence[Dim], *, is_sum: bool) -> Result:
        """Return the placements of a result; `is_sum` if it is a sum over labels that it lacks."""
        placements, cuts = self._placements(dims)
        own = {label for dim in dims for label in dim}
        cut_labels = {label for cut in cuts for label in dims[cut.axis]}
        for label, pieces in self._division.items():
            for piece in pieces if (is_sum and label not in own) or label in cut_labels else ():
                placements[int(piece.axis)] = Partial()
        for axis, label in self._alone.items():
            places = [place for place, dim in enumerate(dims) if label in dim]
            placements[axis] = Shard(places[0]) if places else Partial() if is_sum else Replicate()
        sharded = {one.dim for one in placements if isinstance(one, Shard)}
        sizes = dict(self._rule.sizes)
        return Result(
            tuple(placements),
            tuple(cuts),
            tuple((axis, math.prod(sizes[label] for label in dims[axis])) for axis in sorted(sharded)),
        )

    def warn(self, number: int, dims: Sequence[Dim], wanted: Placements) -> None:
        """Warn if an operand is gathered."""
        for axis in self._axes:
            one = self.given[number][axis]
            if isinstance(one, Shard) and wanted[axis] != one:
                labels = f" (`{' '.join(dims[one.dim])}`)" if dims[one.dim] else ""
                warnings.warn(
                    f"`{self._rule.operation}`: axis {one.dim}{labels} of an operand is sharded over axis {axis} of "
                    "the mesh, and is gathered; shard all operands over the same batch rows or heads instead, by "
                    "numbers of devices that divide the heads",
                    stacklevel=2,
                )

    def _spec(self, placements: Placements, ndim: int) -> list[tuple[str, ...] | None]:
        """Return the axes of the mesh that shard each axis of a tensor, as `division_of` takes them."""
        names: list[list[str]] = [[] for _ in range(ndim)]
        for axis in self._axes:
            one = placements[axis]
            # Subclasses of Shard order elements differently.
            if type(one) is Shard:
                names[one.dim].append(str(axis))
        return [tuple(each) or None for each in names]

    def _placements(self, dims: Sequence[Dim]) -> tuple[list[Placement], list[Cut]]:
        """Return placements for a tensor with these labels, and cuts for parts that placements cannot express."""
        placements: list[Placement] = [Replicate()] * len(self._mesh.shape)
        cuts = []
        for place, entry in enumerate(tuple(spec_of(self._even, self._division, self._sizes, dims))):
            names = [int(name) for name in ((entry,) if isinstance(entry, str) else entry or ())]
            if names and names == sorted(names):
                for axis in names:
                    placements[axis] = Shard(place)
            elif any(label in self._division for label in dims[place]):
                cuts.append(self._cut(place, dims[place]))
        return placements, cuts

    def _cut(self, axis: int, dim: Dim) -> Cut:
        sizes = dict(self._rule.sizes)
        parts = []
        for label in dim:
            index, count = 0, 1
            for piece in self._division.get(label, ()):
                own = self._mesh.coordinate[int(piece.axis)] // piece.below % piece.count
                index, count = index * piece.count + own, count * piece.count
            length = sizes[label] // count
            parts.append((index * length, length))
        return Cut(axis, tuple(sizes[label] for label in dim), tuple(parts))

    def _find_alone(self, shapes: Sequence[tuple[Any, ...]]) -> Mapping[int, str]:
        """Return labels that mesh axes of one process divide in name only, so that results are placed like operands."""
        rule, found = self._rule, {}
        order = sorted(range(len(shapes)), key=lambda i: (i not in rule.anchors, -math.prod(shapes[i])))
        for axis in set(range(len(self._mesh.shape))) - set(self._axes):
            for number in order:
                one = self.given[number][axis]
                label = rule.operands[number][one.dim][:1] if type(one) is Shard else ()
                if label and label[0] in rule.independent:
                    found[axis] = label[0]
                    break
        return found


def _dispatched(rule_of: RuleOf, _: Any, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Call the rule's operator; torch calls this function instead if an argument is a DTensor."""
    del types
    names = [argument.name for argument in operator._schema.arguments[len(args) :]]
    return call(rule_of, operator, (*args, *((kwargs or {})[name] for name in names)))


for _operator in OPERATORS:
    for _suffix in ("", THROUGH_JAX):
        torch.library.register_torch_dispatch(
            f"blockdiag::{_operator.name}{_suffix}",
            DTensor,
            functools.partial(_dispatched, RULES[_operator.name]),
            lib=LIBRARY,
        )
