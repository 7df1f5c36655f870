"""A traced function as steps on tensors: regions as launches, and JAX where there is more to compute around them."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.extend import core

from blockdiag.fusion.api import Program
from blockdiag.fusion.trace import aval_of, flat_jaxpr
from blockdiag.fusion.tree import Region
from blockdiag.interop.dlpack import to_torch
from blockdiag.interop.torch_launch import device_target
from blockdiag.interop.wrap import wrap_jax
from blockdiag.torch._fuse_equations import computation_of
from blockdiag.torch._fuse_region import Bind, BoundRegion, mark, region_p
from blockdiag.torch._fuse_split import Segment, Split, variables_of

type Compute = Callable[..., Sequence[torch.Tensor]]


def marked(program: Program, *, has_gradient: bool) -> core.ClosedJaxpr:
    """The program with `region_p` in place of regions; flat.

    Args:
        has_gradient: whether backward kernels are wanted.
    """

    def with_marks(*arrays: Any) -> list[Any]:
        def compute(region: Region, has_log_sum: bool, leaves: Sequence[Any], value: Any) -> tuple[Any, Any]:
            return mark(region, leaves, value, has_gradient=has_gradient, has_log_sum=has_log_sum)

        return program.evaluate(arrays, compute)

    return flat_jaxpr(with_marks, *program.arguments)[0]


class TorchProgram:
    """The steps of a program on one device.

    Args:
        program: a traced call.
        device: of all tensors.
        bind: makes a launch ready.
        has_gradient: whether gradients will be asked for.
    """

    def __init__(self, program: Program, device: torch.device, bind: Bind, *, has_gradient: bool) -> None:
        self._structure = program.structure
        self._bind = bind
        self._target = device_target(device.index) if device.type == "cuda" and device.index is not None else None
        jaxpr = marked(program, has_gradient=has_gradient)
        split = Split(jaxpr)
        results = jaxpr.jaxpr.outvars
        # A call's values lie in a list: arguments, constants, and what the steps make, in order.
        self._slots: dict[Any, int] = {}
        self._make_slots(jaxpr.jaxpr.invars)
        constants = dict(split.constants)
        for operands in (results, *split.region_operands()):
            constants |= {id(x): jnp.asarray(x.val, aval_of(x).dtype) for x in operands if isinstance(x, core.Literal)}
        self._make_slots(constants)
        self._constants = [to_torch(jnp.asarray(x)).to(device, copy=True) for x in constants.values()]
        self._steps: list[tuple[Compute, tuple[int, ...]]] = []
        for part in split.parts:
            self._add(part)
        self._results: list[tuple[int, bool]] = []
        owners = set()
        for x in results:
            owner = x if isinstance(x, core.Literal) else split.owner_of(x)
            is_shared = isinstance(owner, core.Literal) or owner in owners or not split.is_new(owner)
            owners |= set() if is_shared else {owner}
            self._results.append((self._slot_of(x), is_shared))

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The results, as the function returns them: tensors of their own.

        Args:
            tensors: the arguments that are arrays.
        """
        values = [*tensors, *self._constants]
        for compute, given in self._steps:
            values += compute(*[values[slot] for slot in given])
        results = [values[slot].clone() if is_shared else values[slot] for slot, is_shared in self._results]
        return jax.tree.unflatten(self._structure, results)

    def _make_slots(self, values: Iterable[Any]) -> None:
        for x in values:
            self._slots[x] = len(self._slots)

    def _slot_of(self, x: Any) -> int:
        return self._slots[id(x) if isinstance(x, core.Literal) else x]

    def _add(self, part: Segment | core.JaxprEqn) -> None:
        inputs: Sequence[Any]
        compute: Compute | None
        if isinstance(part, Segment):
            inputs, outputs, compute = part.inputs, part.outputs, _InJax(part)
        elif part.primitive is region_p:
            compute = BoundRegion(part.params["steps"], self._bind, self._target)
            inputs, outputs = part.invars, part.outvars
        else:
            # Numbers are a part of what is computed.
            inputs, outputs, compute = variables_of(part.invars), part.outvars, computation_of(part)
        assert compute is not None
        self._steps.append((compute, tuple(self._slot_of(x) for x in inputs)))
        self._make_slots(outputs)


class _InJax:
    """A segment as a function of tensors, with autograd."""

    def __init__(self, segment: Segment) -> None:
        has_gradient = any(jnp.issubdtype(aval_of(var).dtype, jnp.inexact) for var in segment.outputs)
        self._wrapped = wrap_jax(segment.function, differentiable=None if has_gradient else False)

    def __call__(self, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        return self._wrapped(*tensors)
