"""The Triton implementation of paged attention in JAX: the canonical call as kernel launches."""

import jax.numpy as jnp
from jax import Array

from blockdiag.interop import jax_call
from blockdiag.ops.paged.problem import PagedProblem
from blockdiag.triton_kernels.paged.plans import launches, supports

__all__ = ["available", "forward", "supports"]


def available() -> str | None:
    """Return None if this process can compile and launch kernels, otherwise the reason and the remedy."""
    return jax_call.available()


def forward(
    problem: PagedProblem,
    query: Array,
    key_pages: Array,
    value_pages: Array | None,
    page_table: Array | None,
    kv_lengths: Array,
    query_lengths: Array | None,
    sinks: Array | None,
    score_scale: Array | None,
    key_scales: Array | None,
    value_scales: Array | None,
    tiles: Array | None,
    *,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """Return output [B, T, N, V] and natural log-sum-exp float32 [B, T, N], or both of packed rows."""
    arrays: dict[str, Array | None] = {
        "query": query,
        "key": key_pages,
        "value": value_pages,
        "page_table": page_table,
        "kv_lengths": kv_lengths,
        "query_lengths": query_lengths,
        "sinks": sinks,
        "score_scale": score_scale,
        "key_scale": key_scales,
        "value_scale": value_scales,
        "tiles": tiles,
        "zeros": jnp.zeros(1, jnp.int32),
    }
    for launch in launches(problem, is_portable=interpret):
        given = (arrays[name] for name in launch.input_names)
        results = jax_call.launch(launch, *(array for array in given if array is not None), interpret=interpret)
        arrays |= dict(zip(launch.output_names, results, strict=True))
    output, log_sum = arrays["output"], arrays["log_sum"]
    assert output is not None and log_sum is not None
    return output, log_sum
