"""Packed calls for implementations that take separate query, key and value."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from blockdiag.ops.block_diagonal.problem import BlockDiagonalProblem


def takes_packed(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Extend a forward or backward pass to packed problems, whose one array is [tokens, N + 2K, H].

    Args:
        compute: `forward(problem, query, key, value, ...)` or `backward(...)`, whose gradients are packed again.

    Returns:
        The extended function. In packed problems, the query is the one array, and key and value are None. The first
        gradient is then packed too, and the second and third are None.
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
