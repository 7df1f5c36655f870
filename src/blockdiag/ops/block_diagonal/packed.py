"""Packed calls of block-diagonal attention, by implementations that take query, key and value apart."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from blockdiag.ops.block_diagonal.problem import BlockDiagonalProblem


def takes_packed(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Let a pass of an implementation take the one array of a packed problem, [tokens, N + 2K, H].

    Args:
        compute: `forward(problem, query, key, value, ...)` or `backward(...)`, whose gradients are packed again.

    Returns:
        The same function, for packed problems too: the query is then the one array; key and value are None, and so are
        the second and the third gradient.
    """

    @functools.wraps(compute)
    def packed_or_apart(
        problem: BlockDiagonalProblem, query: Any, key: Any, value: Any, *operands: Any, **options: Any
    ) -> Any:
        if not problem.is_packed:
            return compute(problem, query, key, value, *operands, **options)
        heads = (problem.query_heads, problem.query_heads + problem.key_heads)
        apart = dataclasses.replace(problem, is_packed=False)
        results = compute(apart, *jnp.split(query, heads, axis=1), *operands, **options)
        is_backward = compute.__name__ == "backward"
        return (jnp.concatenate(results, axis=1), None, None) if is_backward else results

    return packed_or_apart
