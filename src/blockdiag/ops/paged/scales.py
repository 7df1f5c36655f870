"""Scales of queries and paged caches in canonical form, as implementations take them."""

import jax.numpy as jnp
from jaxtyping import Array

from blockdiag.ops.paged.problem import PagedProblem


def canonical_scales(
    problem: PagedProblem, key_scale: Array | None, value_scale: Array | None, query_scale: Array | None
) -> tuple[Array | None, Array | None, Array | None]:
    """Return the factor on scores [B, K], the key scales by token, and the value scales by head [B, K] or by token.

    Without pages of values, the value scales are the key scales.

    Args:
        problem: the call, which determines which of these exist; the others are None.
        key_scale, value_scale: [], [B, K] or [P, page_size, K], float32.
        query_scale: [] or [B, K], float32.
    """
    shape = (problem.batch, problem.key_heads)
    score_scale = None
    if problem.has_score_scale:
        by_head = key_scale if problem.key_scale == "none" else None
        score_scale = _by_head(by_head, shape) * _by_head(query_scale, shape)
    if not problem.has_value_pages:
        # The values are columns of the keys, scaled as they are.
        value_scale = key_scale
    return (
        score_scale,
        key_scale if problem.key_scale == "token" else None,
        _by_head(value_scale, shape) if problem.value_scale == "head" else value_scale,
    )


def _by_head(scale: Array | None, shape: tuple[int, int]) -> Array:
    """Broadcast a scale [] or [B, K] to [B, K]; None becomes 1."""
    scale = jnp.ones((), jnp.float32) if scale is None else scale
    return jnp.broadcast_to(scale if scale.ndim else scale[None, None], shape)
