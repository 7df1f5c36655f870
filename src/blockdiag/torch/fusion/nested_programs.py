"""Equations with regions inside, as torch runs them: loops, branches, and checkpointed parts.

Their programs are split and prepared once (`program.py`), however often they run.
"""

from collections.abc import Sequence
from typing import Protocol

import jax
import torch
from jax.extend import core
from torch.utils.checkpoint import checkpoint

from blockdiag.fusion.frontend.trace import aval_of, has_primitive
from blockdiag.fusion.regions.nested_programs import CHECKPOINTS, OPENED, bodies_of, carried
from blockdiag.interop.dlpack import TENSOR_DTYPES
from blockdiag.torch.fusion.random_keys import data_type
from blockdiag.torch.fusion.region import region_p


class Body(Protocol):
    """A program within an equation.

    Attributes:
        shared: for each result, whether it may share memory with an operand, a constant or an earlier result.
    """

    shared: list[bool]

    def __call__(self, *operands: torch.Tensor) -> list[torch.Tensor]: ...


def is_launched(equation: core.JaxprEqn) -> bool:
    """Return whether torch runs an equation itself, because it is a region or contains one."""
    if equation.primitive.name not in OPENED:
        return equation.primitive is region_p
    bodies, *_ = bodies_of(equation)
    return any(has_primitive(body.jaxpr, region_p.name) for body in bodies)


def inner_of(equation: core.JaxprEqn, bodies: Sequence[Body], device: torch.device) -> Body:
    """Return the function that computes an equation with regions inside.

    Args:
        bodies: the programs of the equation.
    """
    name = equation.primitive.name
    if name == "scan":
        return _Loop(equation, bodies[0], device)
    return _Branches(bodies) if name == "cond" else _Recomputed(equation, bodies[0])


class _Loop:
    """`scan`: a loop over the steps, with autograd through all of them."""

    def __init__(self, scan: core.JaxprEqn, body: Body, device: torch.device) -> None:
        _, fixed, _ = bodies_of(scan)
        self._body = body
        self._device = device
        self._fixed, self._count = len(fixed), carried(scan)
        self._length, self._is_reverse = scan.params["length"], scan.params["reverse"]
        self._stacked = [data_type(aval_of(var)) for var in scan.outvars[self._count :]]
        # Stacked results are always new tensors.
        own = [flag or not self._length for flag in body.shared[: self._count]]
        self.shared = [*own, *(False for _ in self._stacked)]

    def __call__(self, *operands: torch.Tensor) -> list[torch.Tensor]:
        fixed, rest = operands[: self._fixed], operands[self._fixed :]
        carry, each = list(rest[: self._count]), [x.unbind() for x in rest[self._count :]]
        made: list[list[torch.Tensor]] = [[] for _ in self._stacked]
        steps = range(self._length)
        for step in reversed(steps) if self._is_reverse else steps:
            results = self._body(*fixed, *carry, *(parts[step] for parts in each))
            carry = results[: self._count]
            for parts, part in zip(made, results[self._count :], strict=True):
                parts.append(part)
        return [*carry, *map(self._joined, made, self._stacked)]

    def _joined(self, parts: list[torch.Tensor], aval: jax.ShapeDtypeStruct) -> torch.Tensor:
        if not parts:
            return torch.empty(aval.shape, dtype=TENSOR_DTYPES[aval.dtype], device=self._device)
        return torch.stack(parts[::-1] if self._is_reverse else parts)


class _Branches:
    """`cond`: the host reads the predicate and runs only that branch."""

    def __init__(self, branches: Sequence[Body]) -> None:
        self._branches = branches
        self.shared = [any(flags) for flags in zip(*(x.shared for x in branches), strict=True)]

    def __call__(self, *operands: torch.Tensor) -> list[torch.Tensor]:
        index, *given = operands
        if index.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "`cond` and `switch` with attention inside choose on the host, which cannot read a value while a CUDA "
                "graph is being captured; compute both and choose with jnp.where, or capture each branch by itself"
            )
        return self._branches[int(index)](*given)


class _Recomputed:
    """`jax.checkpoint`: intermediate results are not kept, and are recomputed for gradients."""

    def __init__(self, equation: core.JaxprEqn, body: Body) -> None:
        assert equation.primitive.name in CHECKPOINTS
        self._body = body
        self._is_kept = equation.params["policy"] is jax.checkpoint_policies.everything_saveable
        self.shared = body.shared

    def __call__(self, *operands: torch.Tensor) -> list[torch.Tensor]:
        if self._is_kept or not (torch.is_grad_enabled() and any(x.requires_grad for x in operands)):
            return self._body(*operands)
        has_wide_types = jax.config.jax_enable_x64

        def compute(*tensors: torch.Tensor) -> list[torch.Tensor]:
            # Recomputation runs on a thread of autograd, where the caller's `jax.enable_x64` is not in force.
            with jax.enable_x64(has_wide_types):
                return self._body(*tensors)

        # The body draws no random numbers from torch.
        results = checkpoint(compute, *operands, use_reentrant=False, preserve_rng_state=False)
        assert results is not None
        return results
