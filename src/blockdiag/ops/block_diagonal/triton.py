"""The Triton implementation of block-diagonal attention in JAX: the canonical call as kernel launches.

Long blocks (`BlockDiagonalProblem.is_long`) go to the generated kernels of fused attention.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array

from blockdiag.interop import jax_call
from blockdiag.interop.targets import planning_target
from blockdiag.ops.block_diagonal import triton_long as fused
from blockdiag.ops.block_diagonal.problem import BlockDiagonalProblem
from blockdiag.triton_kernels.block_diagonal import plans as kernels
from blockdiag.triton_kernels.block_diagonal.plans import BlockDiagonalLaunch, backward_kinds

type RotaryArrays = tuple[Array, Array, Array | None]


def available() -> str | None:
    """Return None if this process can compile and launch kernels, otherwise the reason and the remedy."""
    return jax_call.available()


def supports(problem: BlockDiagonalProblem) -> str | None:
    """Return None if the kernels can compute `problem`, otherwise a sentence with the reason and the remedy."""
    return fused.supports(problem) if problem.is_long else kernels.supports(problem)


def forward(
    problem: BlockDiagonalProblem,
    query: Array,
    key: Array | None,
    value: Array | None,
    tiles: Array | None,
    rotary: RotaryArrays | None,
    *,
    interpret: bool = False,
) -> Array:
    """Return output [tokens, N, H] of the canonical call.

    Args:
        problem: the call.
        query: [tokens, N, H]; [tokens, N + 2K, H] in a packed problem, whose key and value are None.
        key, value: [tokens, K, H].
        tiles: tile table int32 [num_tiles, 3], or None for a uniform problem.
        rotary: (cos, sin, positions or None), or None.
        interpret: run in Triton's interpreter on the CPU, with kernels that it supports.
    """
    if problem.is_long:
        return forward_with_log_sum(problem, query, key, value, tiles, rotary, interpret=interpret)[0]
    launch = BlockDiagonalLaunch(problem, "forward", is_portable=interpret)
    (output,) = jax_call.launch(launch, *_present(query, key, value), *_tables(tiles, rotary), interpret=interpret)
    return output


def forward_with_log_sum(
    problem: BlockDiagonalProblem,
    query: Array,
    key: Array | None,
    value: Array | None,
    tiles: Array | None,
    rotary: RotaryArrays | None,
    *,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """Return output and log-sum-exp, float32 [tokens, N]; for long blocks only."""
    operands = _apart(problem, query, key, value)
    return fused.forward(problem, *operands, tiles, rotary, interpret=interpret)


def backward(
    problem: BlockDiagonalProblem,
    query: Array,
    key: Array | None,
    value: Array | None,
    tiles: Array | None,
    rotary: RotaryArrays | None,
    output_cotangent: Array,
    output: Array | None = None,
    log_sum: Array | None = None,
    *,
    interpret: bool = False,
) -> tuple[Array, Array | None, Array | None]:
    """Return the gradients of query, key and value, given the arguments of `forward` and the output's cotangent.

    For long blocks, `output` and `log_sum` are the results of `forward_with_log_sum`, or None to compute them again. In
    a packed problem, the first gradient is one array [tokens, N + 2K, H] and the others are None.
    """
    if problem.is_long:
        parts = _apart(problem, query, key, value)
        found = fused.backward(problem, *parts, tiles, rotary, output_cotangent, output, log_sum, interpret=interpret)
        return (jnp.concatenate(found, axis=1), None, None) if problem.is_packed else found
    operands = _present(query, key, value, output_cotangent)
    tables = _tables(tiles, rotary)

    def launch(kind: Any, *arrays: Array) -> tuple[Array, ...]:
        spec = BlockDiagonalLaunch(problem, kind, is_portable=interpret)
        return jax_call.launch(spec, *arrays, *tables, interpret=interpret)

    if backward_kinds(problem, planning_target()) == ("backward",):
        gradients = launch("backward", *operands)
    else:
        d_query, log_sum, delta = launch("query_gradient", *operands)
        if problem.is_packed:
            gradients = launch("key_gradient", *operands, log_sum, delta, d_query)
        else:
            gradients = (d_query, *launch("key_gradient", *operands, log_sum, delta))
    if problem.is_packed:
        return gradients[0], None, None
    d_query, d_key, d_value = gradients
    return d_query, d_key, d_value


def _present(*arrays: Array | None) -> list[Array]:
    return [array for array in arrays if array is not None]


def _tables(tiles: Array | None, rotary: RotaryArrays | None) -> list[Array]:
    """Return the optional inputs that are given, in the order in which launches take them."""
    return _present(tiles, *(rotary or ()))


def _apart(
    problem: BlockDiagonalProblem, query: Array, key: Array | None, value: Array | None
) -> tuple[Array, Array, Array]:
    """Return query, key and value, split from one array in a packed problem."""
    if key is None or value is None:
        query, key, value = jnp.split(query, (problem.query_heads, problem.query_heads + problem.key_heads), axis=1)
    return query, key, value
