"""Context-parallel fused functions: the tokens of each sequence are divided over processes.

A function is traced with the shapes of whole arrays. Around attention each process computes its own tokens
(`blockdiag/fusion/runtime/token_parts.py`). A region becomes transfers between the processes, and a smaller region
between these transfers:

| strategy | before the region | after it |
|---|---|---|
| "ulysses" | processes exchange tokens for a batch axis, such as key heads | the reverse exchange |
| "gather" | rows move to zigzag order if the mask favours it; arrays with keys are gathered | rows move back |
| "ring" | rows and keys move to zigzag order if the mask favours it; the region sends keys around | rows move back |
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import AbstractMesh

from blockdiag.common.context_parallel import ContextParallel as Axis
from blockdiag.fusion.ir.batching import map_region
from blockdiag.fusion.ir.layout import shape_of
from blockdiag.fusion.ir.tree import COLUMNS, DISTANCE, ROWS, Dim, Region
from blockdiag.fusion.program import Program
from blockdiag.fusion.regions.nested_programs import CHECKPOINTS
from blockdiag.fusion.runtime.context_parallel import Chosen, Sharing, choose
from blockdiag.fusion.runtime.rows import axis_of
from blockdiag.fusion.runtime.sharding import gathered_axes, is_known, local_region
from blockdiag.fusion.runtime.token_parts import Parts, check_program, check_results, check_token_axes, token_axis
from blockdiag.torch.context.collectives import Gather, Transfer, gather_tokens, gather_with_carrier
from blockdiag.torch.context.exchange import from_zigzag, to_zigzag
from blockdiag.torch.context.parallel import ContextParallel
from blockdiag.torch.fusion.region import region_p
from blockdiag.torch.fusion.ring import RingRegion
from blockdiag.triton_kernels.launch.plan import TensorSpec

type Tensors = Sequence[torch.Tensor]
type Launch = Callable[["LocalRegion | RingRegion"], Callable[[Tensors], Tensors]]
"""Makes a region callable in one process."""

# The name of the axis in error messages of JAX's strategies.
_AXIS = "group"


def as_axis(context: ContextParallel) -> Axis:
    """Return the processes as devices along an axis of a mesh, for JAX's choice of a strategy."""
    mesh: Any = AbstractMesh((context.size,), (_AXIS,))
    return Axis(_AXIS, context.strategy, mesh)


class SharedProgram:
    """A traced call as one process evaluates it, with the interface that `TorchProgram` reads.

    Args:
        program: a program traced with the shapes of whole arrays.
        context: the processes.
        arguments: the shapes and dtypes of the process's own arrays.
        launch: makes regions callable.

    Attributes:
        arguments: the shapes and dtypes of the process's own arrays.
        structure: the structure of the results.

    Raises:
        ValueError: the processes cannot share the tokens of the call.
    """

    def __init__(self, program: Program, context: ContextParallel, arguments: Sequence[Any], launch: Launch) -> None:
        names = [inner.equation.primitive.name for inner, _ in program.inner.values()]
        name = next(iter(names), None)
        inside = "jax.checkpoint" if name in CHECKPOINTS else name
        check_program(program.jaxpr.jaxpr, inside, "in a Python loop, or under torch.utils.checkpoint")
        self._program, self._context, self._launch = program, context, launch
        self.arguments, self.structure = arguments, program.structure

    def evaluate(self, arrays: Sequence[Any], compute: Any) -> list[Any]:
        """Return the process's part of the results as a flat list; `compute` is unused, as regions are shared."""
        del compute
        parts = Parts(self._context.rank, self._context.size)
        results = self._program.evaluate(arrays, self._attend, parts.bind)
        check_results(self._program.jaxpr.jaxpr, results, "processes")
        return results

    def _attend(self, region: Region, has_log_sum: bool, leaves: Sequence[Any], value: Any) -> tuple[Any, Any]:
        """Return the process's rows of the result of a region, and of its log-sum-exp."""
        arrays = [*leaves, value]
        axes = tuple(token_axis(source.shape, x) for source, x in zip(region.sources, arrays, strict=True))
        shared = SharedRegion(self._context, region, axes, has_log_sum, self._launch)
        operands = [x for x, source in zip(arrays, region.sources, strict=True) if not is_known(source)]
        output, *rest = region_p.bind(*operands, steps=shared)
        return output, rest[0] if rest else None


def _dims_of(region: Region) -> list[tuple[Dim, ...]]:
    """Return the labels of the axes of each leaf, and of the values."""
    return [*(leaf.dims for leaf in region.leaves), region.value_dims]


@dataclass(frozen=True, eq=False)
class LocalRegion:
    """A region between transfers, as a program whose arguments are the arrays that move; see `TorchProgram`.

    Attributes:
        region: the region of one process.
        has_log_sum: whether the log-sum-exp is also a result.
        constants: leaves and values that depend on no argument, by index.
        carried: indices of leaves and values whose gradients have carriers, see `gather_with_carrier`.
    """

    region: Region
    has_log_sum: bool
    constants: Mapping[int, np.ndarray]
    carried: Sequence[int]

    @property
    def arguments(self) -> list[jax.ShapeDtypeStruct]:
        """The shapes and dtypes of the other leaves and values, followed by those of the carriers."""
        sources = self.region.sources
        given = [
            jax.ShapeDtypeStruct(x.shape, x.dtype) for place, x in enumerate(sources) if place not in self.constants
        ]
        return [*given, *(jax.ShapeDtypeStruct(sources[place].shape, np.float32) for place in self.carried)]

    @property
    def structure(self) -> Any:
        """The structure of the results."""
        return jax.tree.structure([0, 0] if self.has_log_sum else [0])

    def evaluate(self, arrays: Sequence[Any], compute: Callable[..., tuple[Any, Any]]) -> list[Any]:
        """Return the result, and the log-sum-exp if that is a result, as computed by `compute`."""
        given = iter(arrays)
        *leaves, value = (
            jnp.asarray(self.constants[place]) if place in self.constants else next(given)
            for place in range(len(self.region.leaves) + 1)
        )
        carriers = dict(zip(self.carried, given, strict=True))
        output, log_sum = compute(self.region, self.has_log_sum, leaves, value, carriers)
        return [output, log_sum] if self.has_log_sum else [output]


class SharedRegion:
    """A region whose tokens are divided over processes.

    Args:
        context: the processes.
        region: the region of all tokens.
        axes: for each leaf, and for the values, the axis of which the process has a part; None for whole arrays.
        has_log_sum: whether the log-sum-exp is also a result.
        launch: makes the process's region callable.

    Attributes:
        results: shapes and dtypes of the results, for the rows of the process.
        chosen: the strategy.

    Raises:
        ValueError: tokens are not the rows or the keys of the attention, or the strategy does not support the region.
    """

    def __init__(
        self,
        context: ContextParallel,
        region: Region,
        axes: tuple[int | None, ...],
        has_log_sum: bool,
        launch: Launch,
    ) -> None:
        self._context, self._region, self._axes, self._launch = context, region, axes, launch
        self._has_log_sum = has_log_sum
        check_token_axes(region, axes)
        axis = as_axis(context)
        self.chosen: Chosen = choose(Sharing(axis, axis.mesh, is_explicit=False), region, ())
        is_ring = self.chosen.strategy == "ring"
        # The key axis of each array that travels around the ring.
        self._travelling = gathered_axes(region) if is_ring else [None] * (len(region.leaves) + 1)
        sizes = region.sizes | {ROWS: region.sizes[ROWS] // context.size}
        output = TensorSpec(shape_of(region.out_dims, sizes), region.dtype.name)
        log_sum = TensorSpec(tuple(sizes[label] for label in (*region.batch, ROWS)), "float32")
        self.results = (output, log_sum) if has_log_sum else (output,)

    def bound(self, *_: Any) -> Callable[..., Tensors]:
        """Return a function from leaves and values that are not constant to the results; see `BoundRegion`."""
        constants: dict[int, np.ndarray] = {}
        for place, (source, dims) in enumerate(zip(self._region.sources, _dims_of(self._region), strict=True)):
            if is_known(source):
                whole = np.arange(source.shape[0], dtype=source.dtype) if source.key is None else source.constant
                assert whole is not None
                numbers = torch.arange(whole.size).reshape(whole.shape)
                constants[place] = whole.reshape(-1)[self._whole_moved(numbers, dims).numpy()]
        moved = [
            (place, dims, axis)
            for place, (dims, axis) in enumerate(zip(_dims_of(self._region), self._axes, strict=True))
            if place not in constants
        ]
        carried = [place for place, dims, axis in moved if self._has_carrier(place, dims, axis)]
        compute = self._launch(self._between(constants, carried))

        def attend(*tensors: torch.Tensor) -> list[torch.Tensor]:
            # All transfers start before the first one is awaited.
            coming = [
                self._moving(x, place, dims, axis, has_carrier=place in carried)
                for x, (place, dims, axis) in zip(tensors, moved, strict=True)
            ]
            arrived = [finish() for finish in coming]
            here = [x for x, *_ in arrived] + [carrier for _, *carriers in arrived for carrier in carriers]
            own = (self._region.out_dims, tuple((label,) for label in (*self._region.batch, ROWS)))
            return [self._returned(x, dims) for x, dims in zip(compute(here), own, strict=False)]

        return attend

    @property
    def _runs(self) -> int:
        """Number of runs of consecutive rows that make up the process's rows."""
        return 2 if self.chosen.is_zigzag else 1

    @property
    def _has_runs(self) -> bool:
        """Whether runs are a batch axis, because an array by distance is read at a different offset for each run."""
        if self.chosen.strategy == "ring":
            return False
        return self.chosen.label is None and any(leaf.role == "distance" for leaf in self._region.leaves)

    def _between(self, constants: Mapping[int, np.ndarray], carried: Sequence[int]) -> "LocalRegion | RingRegion":
        """Return the region between transfers; see `LocalRegion` for the arguments."""
        region = self._region
        tokens = self.chosen.tokens(self._context.size)
        if tokens is None or tokens.strategy == "gather":
            return LocalRegion(self._local(), self._has_log_sum, constants, carried)
        types = []
        for place, (source, dims) in enumerate(zip(region.sources, _dims_of(region), strict=True)):
            own = axis_of(dims, ROWS) if self._travelling[place] is None else self._travelling[place]
            sizes = enumerate(source.shape)
            shape = tuple(size // self._context.size if axis == own else size for axis, size in sizes)
            types += [] if place in constants else [jax.ShapeDtypeStruct(shape, source.dtype)]
        return RingRegion(self._context, region, tokens, self._has_log_sum, constants, types)

    def _local(self) -> Region:
        """Return the smaller region that one process computes between transfers."""
        region, size, sizes = self._region, self._context.size, dict(self._region.sizes)
        label = self.chosen.label
        if label is not None:
            return local_region(region, sizes | {label: sizes[label] // size}, (label,))
        sizes[ROWS] //= size
        if not self._has_runs:
            return local_region(region, sizes, (ROWS,))
        sizes[ROWS] //= self._runs
        sizes[DISTANCE] = sizes[ROWS] + sizes[COLUMNS] - 1
        in_runs = [axis_of(x, ROWS) is not None or axis_of(x, DISTANCE) is not None for x in _dims_of(region)]
        return map_region(local_region(region, sizes, (ROWS,)), self._runs, in_runs)

    def _moving(
        self, x: torch.Tensor, place: int, dims: tuple[Dim, ...], axis: int | None, *, has_carrier: bool
    ) -> Callable[[], tuple[torch.Tensor, ...]]:
        """Start sending a leaf, or the values; return a function that waits and returns them as the local region needs.

        Args:
            x: the process's part, or the whole array.
            place: the index among the leaves and values.
            dims: the labels of its axes.
            axis: the axis of which `x` is a part; None for a whole array.
            has_carrier: whether to also return a carrier of its gradient.
        """
        context, rows, keys = self._context, axis_of(dims, ROWS), self._travelling[place]
        heads = self._exchanged_axis(dims, axis)
        if keys is not None:
            found = self._own_parts(x, keys) if axis is None else self._in_order(x, keys)
            return lambda: (found,)
        if axis is None:
            return lambda: (self._whole_moved(x, dims),)
        if heads is not None:
            exchanged = start_exchange(context, x, axis, heads)
            return lambda: (exchanged(),)
        if self._is_gathered(dims, axis):
            gather = Gather(context, x, axis)
            if has_carrier:
                return lambda: tuple(self._whole_moved(each, dims) for each in gather_with_carrier(x, gather))
            return lambda: (self._whole_moved(gather_tokens(context, x, axis, gather), dims),)
        assert rows is not None, "arrays without rows are gathered"
        found = self._in_runs(self._in_order(x, rows), rows)
        return lambda: (found,)

    def _in_order(self, x: torch.Tensor, tokens: int) -> torch.Tensor:
        """Return the process's part of an array in the order in which the process computes."""
        return _reordered(to_zigzag, self._context, x, tokens) if self.chosen.is_zigzag else x

    def _own_parts(self, x: torch.Tensor, tokens: int) -> torch.Tensor:
        """Return the process's part of a whole array in the order in which the process computes."""
        size, rank, runs = self._context.size, self._context.rank, 2 if self.chosen.is_zigzag else 1
        parts = x.unflatten(tokens, (size * runs, -1)).unbind(tokens)
        return torch.cat([parts[number] for number in (rank, 2 * size - 1 - rank)[:runs]], tokens)

    def _exchanged_axis(self, dims: tuple[Dim, ...], axis: int | None) -> int | None:
        """Return the axis that processes share after an exchange; None for arrays that are not exchanged."""
        label = self.chosen.label
        heads = None if label is None or axis is None else axis_of(dims, label)
        return heads if label is not None and heads is not None and self._is_slowest(dims[heads], label) else None

    def _is_gathered(self, dims: tuple[Dim, ...], axis: int | None) -> bool:
        """Return whether all parts of an array are gathered."""
        if axis is None or self._exchanged_axis(dims, axis) is not None:
            return False
        if self.chosen.strategy == "ring":
            return False
        return self.chosen.label is not None or axis_of(dims, ROWS) is None

    def _has_carrier(self, place: int, dims: tuple[Dim, ...], axis: int | None) -> bool:
        """Return whether a gradient summed over processes needs a float32 carrier, because its dtype is narrower."""
        dtype = self._region.sources[place].dtype
        is_narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
        return is_narrow and self._is_gathered(dims, axis)

    def _whole_moved(self, x: torch.Tensor, dims: tuple[Dim, ...]) -> torch.Tensor:
        """Return a whole leaf, or whole values, as the region between transfers reads it."""
        label, rows = self.chosen.label, axis_of(dims, ROWS)
        if label is not None:
            heads = axis_of(dims, label)
            return x if heads is None else self._cut(x, dims[heads], heads, label)
        if rows is None:
            return self._by_runs(x, dims)
        return self._in_runs(self._own_parts(x, rows), rows)

    def _in_runs(self, x: torch.Tensor, rows: int) -> torch.Tensor:
        """Return the process's rows, with a leading axis of runs if runs are a batch axis."""
        return x.unflatten(rows, (self._runs, -1)).movedim(rows, 0) if self._has_runs else x

    def _by_runs(self, x: torch.Tensor, dims: tuple[Dim, ...]) -> torch.Tensor:
        """Return an array without rows; an array by distance gets a leading axis of runs."""
        place = axis_of(dims, DISTANCE)
        if place is None or self.chosen.strategy == "ring":
            return x
        own, total = self._region.sizes[ROWS] // self._context.size, self._region.sizes[ROWS]
        count, first = own // self._runs, self._context.rank * (own // self._runs)
        starts = (first, total - count - first)[: self._runs]
        # The distance of row q and key k has index q - k + keys - 1.
        size = count + self._region.sizes[COLUMNS] - 1
        return torch.stack([x.narrow(place, start, size) for start in starts])

    def _returned(self, x: torch.Tensor, dims: tuple[Dim, ...]) -> torch.Tensor:
        """Return the process's rows of a result of the region between transfers."""
        rows = axis_of(dims, ROWS)
        assert rows is not None, "results have rows"
        if self.chosen.label is not None:
            heads = axis_of(dims, self.chosen.label)
            assert heads is not None, "results have all batch labels"
            return start_exchange(self._context, x, heads, rows)()
        if self._has_runs:
            x = x.movedim(0, rows).flatten(rows, rows + 1)
        return _reordered(from_zigzag, self._context, x, rows) if self.chosen.is_zigzag else x

    def _is_slowest(self, dim: Dim, label: str) -> bool:
        """Return whether consecutive parts of an axis are parts of a label."""
        assert isinstance(dim, tuple)
        return all(self._region.sizes[other] == 1 for other in dim[: dim.index(label)])

    def _cut(self, x: torch.Tensor, dim: Dim, axis: int, label: str) -> torch.Tensor:
        """Return the process's part of one label of an axis."""
        assert isinstance(dim, tuple)
        sizes = [self._region.sizes[other] for other in dim]
        own = self._region.sizes[label] // self._context.size
        place = axis + dim.index(label)
        x = x.unflatten(axis, sizes).narrow(place, self._context.rank * own, own)
        return x.flatten(axis, axis + len(sizes) - 1)


def start_exchange(context: ContextParallel, x: torch.Tensor, before: int, after: int) -> Callable[[], torch.Tensor]:
    """Exchange parts of a tensor whose axis `before` processes share, so that they share the axis `after` instead.

    Returns:
        A function that waits for the exchange and returns the process's part.
    """
    transfer = Transfer(context.group)
    parts = x.unflatten(after, (context.size, -1)).movedim(after, 0)
    coming = transfer.start(_as_numbers(parts))

    def finish() -> torch.Tensor:
        found = _as_before(transfer.wait(coming), x)
        return found.movedim(0, before).flatten(before, before + 1)

    return finish


def _reordered(
    order: Callable[..., torch.Tensor], context: ContextParallel, x: torch.Tensor, rows: int
) -> torch.Tensor:
    """Return a tensor with its rows in another order."""
    return _as_before(order(context, _as_numbers(x.movedim(rows, 0))), x).movedim(0, rows)


def _as_numbers(x: torch.Tensor) -> torch.Tensor:
    """View booleans as bytes, because not all backends send booleans."""
    return x.contiguous().view(torch.uint8) if x.dtype == torch.bool else x


def _as_before(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Invert `_as_numbers` after a transfer."""
    return x.view(torch.bool) if like.dtype == torch.bool else x
