"""The Triton implementation of block-diagonal attention, from JAX: the canonical call as kernel launches."""

from typing import Any

from jax import Array

from blockdiag.interop import jax_call
from blockdiag.interop.targets import planning_target
from blockdiag.problem import BlockDiagonalProblem
from blockdiag.triton_kernels.block_diagonal import BlockDiagonalLaunch, backward_kinds, supports

__all__ = ["available", "backward", "forward", "supports"]

type RotaryArrays = tuple[Array, Array, Array | None]


def available() -> str | None:
    """None where kernels can be compiled and launched from this process; otherwise the reason and the remedy."""
    return jax_call.available()


def forward(
    problem: BlockDiagonalProblem,
    query: Array,
    key: Array,
    value: Array,
    tiles: Array | None,
    rotary: RotaryArrays | None,
    *,
    interpret: bool = False,
) -> Array:
    """Output [tokens, N, H] of the canonical call.

    Args:
        problem: what is computed.
        query: [tokens, N, H].
        key, value: [tokens, K, H].
        tiles: tile table int32 [num_tiles, 3], or None for a uniform problem.
        rotary: (cos, sin, positions or None), or None.
        interpret: run in Triton's interpreter on the CPU, with the kernels that it knows.
    """
    launch = BlockDiagonalLaunch(problem, "forward", is_portable=interpret)
    (output,) = jax_call.launch(launch, query, key, value, *_tables(tiles, rotary), interpret=interpret)
    return output


def backward(
    problem: BlockDiagonalProblem,
    query: Array,
    key: Array,
    value: Array,
    tiles: Array | None,
    rotary: RotaryArrays | None,
    output_cotangent: Array,
    *,
    interpret: bool = False,
) -> tuple[Array, Array, Array]:
    """Gradients of query, key and value; arguments as for `forward`, and the output's cotangent [tokens, N, H]."""
    operands = (query, key, value, output_cotangent)
    tables = _tables(tiles, rotary)

    def launch(kind: Any, *arrays: Array) -> tuple[Array, ...]:
        spec = BlockDiagonalLaunch(problem, kind, is_portable=interpret)
        return jax_call.launch(spec, *arrays, *tables, interpret=interpret)

    if backward_kinds(problem, planning_target()) == ("backward",):
        d_query, d_key, d_value = launch("backward", *operands)
        return d_query, d_key, d_value
    d_query, log_sum, delta = launch("query_gradient", *operands)
    d_key, d_value = launch("key_gradient", *operands, log_sum, delta)
    return d_query, d_key, d_value


def _tables(tiles: Array | None, rotary: RotaryArrays | None) -> list[Array]:
    """The optional inputs there are, in the order the launches take them."""
    return [array for array in (tiles, *(rotary or ())) if array is not None]
