"""The Triton implementation of appending to a paged cache in JAX: the canonical call as one kernel launch."""

from jax import Array

from blockdiag.interop import jax_call
from blockdiag.ops.append.problem import AppendArrays, AppendProblem
from blockdiag.triton_kernels.append.plans import AppendLaunch, supports

__all__ = ["append", "available", "supports"]


def available() -> str | None:
    """Return None if this process can compile and launch kernels, otherwise the reason and the remedy."""
    return jax_call.available()


def append(problem: AppendProblem, arrays: AppendArrays, *, interpret: bool = False) -> tuple[Array, ...]:
    """Return the arrays that the call changes, `problem.written`."""
    launch = AppendLaunch(problem)
    return jax_call.launch(launch, *(getattr(arrays, name) for name in launch.input_names), interpret=interpret)
