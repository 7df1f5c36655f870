"""Ring attention for fused functions: keys travel around the processes that share tokens, one part at a time.

The passes are those of JAX (`blockdiag/fusion/runtime/ring.py`), traced for one process. Transfers between processes
and merges of results are torch steps in the traced programs.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.autograd.function import once_differentiable

from blockdiag.common.shards import Part
from blockdiag.fusion.ir.tree import ROWS, Leaf, Region, with_leaves
from blockdiag.fusion.runtime.ring import Ring
from blockdiag.fusion.runtime.rows import Pass, Tokens, with_gradient
from blockdiag.interop.dlpack import DTYPES
from blockdiag.interop.torch_launch import on_device
from blockdiag.torch.context.collectives import Transfer
from blockdiag.torch.context.parallel import ContextParallel
from blockdiag.torch.fusion.region import TorchStep, region_p
from blockdiag.triton_kernels.launch.plan import TensorSpec

type Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Passes:
    """The functions that compute the passes over one part of keys.

    Attributes:
        results: maps a region to its forward pass.
        gradients: maps a region to its backward pass, which returns gradients of the leaves that have one and of the
            values.
    """

    results: Callable[[Region], Pass]
    gradients: Callable[[Region], Pass]


@dataclass(frozen=True)
class _TorchRing(Ring):
    """A ring whose parts travel by torch.distributed.

    Attributes:
        context: the processes.
    """

    context: ContextParallel

    def _moved(self, arrays: dict[int, Any], distance: int) -> dict[int, Any]:
        if distance % self.context.size == 0:
            return arrays
        return {i: self._travelled(x, distance) for i, x in arrays.items()}

    def _travelled(self, x: Any, distance: int) -> Any:
        """Receive an array from the process `distance` ranks before this one, in two steps: start and finish."""
        size, rank, count = self.context.size, self.context.rank, math.prod(x.shape)
        send, receive = [0] * size, [0] * size
        send[(rank + distance) % size] = receive[(rank - distance) % size] = count
        transfer = Transfer(self.context.group, send, receive)

        def start(x: torch.Tensor) -> Tensors:
            # Not all backends send booleans.
            numbers = x.contiguous().view(torch.uint8) if x.dtype == torch.bool else x
            return [transfer.issue(numbers.reshape(-1)).view(x.dtype).reshape(x.shape)]

        def finish(x: torch.Tensor) -> Tensors:
            transfer.finish()
            return [x]

        specs = [_spec(x)]
        return _step(finish, specs, *_step(start, specs, x))[0]

    def _in_step(self, *arrays: Any) -> Any:
        # A step forces its inputs to be computed before the next step, which limits peak memory to one step.
        leaves, structure = jax.tree.flatten(arrays)
        return jax.tree.unflatten(structure, _step(lambda *x: x, list(map(_spec, leaves)), *leaves))

    def _sent_again(self, operands: Any) -> Any:
        # Each pass is its own program here and keeps no parts of the other one, so operands are unchanged.
        return operands

    def _merged(self, merged: tuple[Any, Any] | None, output: Any, log_sum: Any) -> tuple[Any, Any]:
        if merged is None or self.region.score is None:
            return super()._merged(merged, output, log_sum)
        merge = functools.partial(_merge, self.region, {**self.region.sizes, **self.part.sizes})
        output, log_sum = _step(merge, [_spec(output), _spec(log_sum)], *merged, output, log_sum)
        return output, log_sum


def _step(compute: Callable[..., Tensors], results: Sequence[TensorSpec], *arrays: Any) -> list[Any]:
    """Trace a step that calls a function of tensors, and return its results."""
    return region_p.bind(*arrays, steps=TorchStep(compute, tuple(results)))


def _spec(x: Any) -> TensorSpec:
    return TensorSpec(tuple(x.shape), jnp.dtype(x.dtype).name)


def _merge(
    region: Region,
    sizes: Mapping[str, int],
    earlier: torch.Tensor,
    earlier_sum: torch.Tensor,
    output: torch.Tensor,
    log_sum: torch.Tensor,
) -> Tensors:
    """Merge results and log-sum-exps of two parts of the keys into those of all keys."""
    both = torch.logaddexp(earlier_sum, log_sum)
    # Rows that have seen no key give 0.
    base = both.masked_fill(both.isneginf(), 0)
    labels = [label for dim in region.out_dims if isinstance(dim, tuple) for label in dim]
    rows = (*region.batch, ROWS)
    order = [rows.index(label) for label in labels if label in rows]
    shape = [sizes[label] if label in rows else 1 for label in labels]
    whole = [sizes[label] for label in labels]
    shares = [(x - base).exp().permute(order).reshape(shape) for x in (earlier_sum, log_sum)]
    merged = earlier.reshape(whole) * shares[0] + output.reshape(whole) * shares[1]
    return merged.reshape(output.shape), both


@dataclass(frozen=True, eq=False)
class RingRegion:
    """A region whose keys travel around the ring; its operands hold one process's rows and keys.

    Attributes:
        context: the processes.
        region: the region of all processes.
        tokens: how the processes share tokens.
        has_log_sum: whether the log-sum-exp is also a result.
        constants: leaves and values that depend on no argument, by index.
        types: the shapes and dtypes of the other leaves and values.
    """

    context: ContextParallel
    region: Region
    tokens: Tokens
    has_log_sum: bool
    constants: Mapping[int, np.ndarray]
    types: Sequence[jax.ShapeDtypeStruct]

    def ring(self, constant: Sequence[bool] | None = None) -> _TorchRing:
        """Return the ring of this process.

        Args:
            constant: for each leaf, whether it needs no gradient; None for the flags of the region.
        """
        region, own = self.region, self.region.sizes[ROWS] // self.context.size
        if constant is not None:
            pairs = zip(region.leaves, constant, strict=True)
            marked: dict[Leaf, Leaf] = {leaf: dataclasses.replace(leaf, is_constant=flag) for leaf, flag in pairs}
            region = with_leaves(region, marked)
        starts: Any = {ROWS: self.context.rank * own}
        # The name of the axis is not read, because the passes contain no JAX collective.
        part = Part(region.sizes | {ROWS: own}, starts, {ROWS: ("group",)})
        return _TorchRing(region, part, self.tokens, self.context)

    @property
    def piece(self) -> Region:
        """The region of one pass."""
        return self.ring().piece_region(0)

    def operands(self, arrays: Sequence[Any]) -> list[Any]:
        """Return all leaves and the values, from the arrays that are not constant."""
        given = iter(arrays)
        return [
            jnp.asarray(self.constants[place]) if place in self.constants else next(given)
            for place in range(len(self.region.leaves) + 1)
        ]

    @property
    def given(self) -> list[int]:
        """The indices of leaves and values that are arguments."""
        return [place for place in range(len(self.region.leaves) + 1) if place not in self.constants]

    def bound(
        self, passes: Passes, make: Callable[[Any], Callable[[Tensors], list[torch.Tensor]]]
    ) -> Callable[[Tensors], Tensors]:
        """Return a differentiable function that computes the region.

        Args:
            passes: the functions that compute each pass.
            make: makes a traced program callable; see `TorchProgram`.
        """
        call = _RingCall(self, passes, make)

        def compute(tensors: Tensors) -> Tensors:
            if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
                return _RingFunction.apply(call, *tensors)
            return call.forward(tensors)[: 2 if self.has_log_sum else 1]

        return compute


@dataclass(frozen=True, eq=False)
class _Traced:
    """A program of arrays; see `TorchProgram`."""

    arguments: Sequence[Any]
    structure: Any
    function: Callable[..., Sequence[Any]]

    def evaluate(self, arrays: Sequence[Any], compute: Any) -> list[Any]:
        """Return the results; `compute` is unused, because the passes are already bound."""
        del compute
        return list(self.function(*arrays))


class _RingCall:
    """The programs of a region: one forward, and one backward for each set of operands that need gradients.

    Attributes:
        has_log_sum: whether the log-sum-exp is also a result of the call.
    """

    def __init__(self, region: RingRegion, passes: Passes, make: Callable[[Any], Any]) -> None:
        self._region, self._passes, self._make = region, passes, make
        self.has_log_sum = region.has_log_sum
        compute = region.ring().results(passes.results)
        program = _Traced(region.types, jax.tree.structure([0, 0]), lambda *x: compute(*region.operands(x)))
        self._forward = make(program)
        self._backward: dict[Any, tuple[Any, list[int]]] = {}

    def forward(self, tensors: Tensors) -> list[torch.Tensor]:
        """Return the result and the log-sum-exp."""
        return self._forward(tensors)

    def backward(
        self, tensors: Tensors, results: Tensors, cotangents: Sequence[torch.Tensor | None], needed: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        """Return the gradients of the tensors that need one, None for others; a missing or None cotangent is 0."""
        cotangent, log_sum_cotangent = (*cotangents, None)[:2]
        cotangent = torch.zeros_like(results[0]) if cotangent is None else cotangent
        more = [] if log_sum_cotangent is None else [log_sum_cotangent]
        key = (tuple(needed), len(more))
        if key not in self._backward:
            with on_device(cotangent.device):
                self._backward[key] = self._new_backward([*results, cotangent, *more], needed)
        program, places = self._backward[key]
        with on_device(cotangent.device):
            grads = dict(zip(places, program([*tensors, *results, cotangent, *more]), strict=True))
        pairs = zip(self._region.given, tensors, needed, strict=True)
        return [grads[place].to(x.dtype) if flag else None for place, x, flag in pairs]

    def _new_backward(self, rest: Tensors, needed: Sequence[bool]) -> tuple[Any, list[int]]:
        """Return a backward program, and the indices of the leaves and values whose gradients it returns."""
        region, count = self._region, len(self._region.types)
        flags = dict(zip(region.given, needed, strict=True))
        ring = region.ring([not flags.get(place, False) for place in range(len(region.region.leaves))])
        compute = ring.gradients(self._passes.gradients)
        types = [_type_of(x) for x in rest]
        places = with_gradient(ring.region, range(len(ring.region.leaves) + 1))
        program = _Traced(
            [*region.types, *types],
            jax.tree.structure([0] * len(places)),
            lambda *x: compute(*region.operands(x[:count]), *x[count:]),
        )
        return self._make(program), list(places)


def _type_of(x: torch.Tensor) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(x.shape), DTYPES[x.dtype])


class _RingFunction(torch.autograd.Function):
    """A region whose keys travel around the ring, in the forward and again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, call: _RingCall, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        output, log_sum = call.forward(tensors)
        ctx.call = call
        ctx.save_for_backward(*tensors, output, log_sum)
        ctx.set_materialize_grads(False)
        return (output, log_sum) if call.has_log_sum else (output,)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:  # pyrefly: ignore[bad-override]
        *tensors, output, log_sum = ctx.saved_tensors
        return None, *ctx.call.backward(tensors, (output, log_sum), gradients, ctx.needs_input_grad[1:])
