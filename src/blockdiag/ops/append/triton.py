"""The Triton implementation of appending to a paged cache, from JAX: the canonical call as one kernel launch."""

from jax import Array

from blockdiag.interop import jax_call
from blockdiag.ops.append.problem import AppendArrays, AppendProblem
from blockdiag.triton_kernels.append.plans import AppendLaunch, supports

__all__ = ["append", "available", "supports"]


def available() -> str | None:
    """None where kernels can be compiled and launched from this process; otherwise the reason and the remedy."""
    return jax_call.available()


def append(problem: AppendProblem, arrays: AppendArrays, *, interpret: bool = False) -> tuple[Array, ...]:
    """The arrays that the call changes, `problem.written`."""
    launch = AppendLaunch(problem)
    return jax_call.launch(launch, *(getattr(arrays, name) for name in launch.input_names), interpret=interpret)
