"""The Triton implementation of key convolution in JAX: the canonical call as kernel launches."""

from jax import Array

from blockdiag.interop import jax_call
from blockdiag.ops.key_convolution.problem import KeyConvolutionProblem
from blockdiag.triton_kernels.key_convolution.plans import KeyConvolutionLaunch, supports

__all__ = ["available", "backward", "forward", "supports"]


def available() -> str | None:
    """Return None if this process can compile and launch kernels, otherwise the reason and the remedy."""
    return jax_call.available()


def forward(
    problem: KeyConvolutionProblem, key: Array, weights: Array, tiles: Array | None, *, interpret: bool = False
) -> Array:
    """Return output [tokens, K, H] of the canonical call.

    Args:
        problem: the call.
        key: [tokens, K, H].
        weights: [groups, size, K, H].
        tiles: tile table int32 [num_tiles, 3], or None for a uniform problem.
        interpret: run in Triton's interpreter on the CPU.
    """
    launch = KeyConvolutionLaunch(problem, "forward")
    (output,) = jax_call.launch(launch, key, weights, *_table(tiles), interpret=interpret)
    return output


def backward(
    problem: KeyConvolutionProblem,
    key: Array,
    weights: Array,
    tiles: Array | None,
    output_cotangent: Array,
    *,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """Return the gradients of key and weights, given the arguments of `forward` and the output's cotangent."""
    launch = KeyConvolutionLaunch(problem, "backward")
    d_key, parts = jax_call.launch(launch, key, weights, output_cotangent, *_table(tiles), interpret=interpret)
    launch = KeyConvolutionLaunch(problem, "weights_gradient")
    (d_weights,) = jax_call.launch(launch, parts, interpret=interpret)
    return d_key, d_weights


def _table(tiles: Array | None) -> tuple[Array, ...]:
    return () if tiles is None else (tiles,)
