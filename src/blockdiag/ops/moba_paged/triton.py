"""The Triton implementation of MoBA over a paged cache in JAX: the canonical call as kernel launches."""

from jax import Array

from blockdiag.interop import jax_call
from blockdiag.ops.moba_paged.problem import MoBAPagedProblem
from blockdiag.triton_kernels.moba_paged.plans import steps, supports

__all__ = ["available", "forward", "supports"]


def available() -> str | None:
    """Return None if this process can compile and launch kernels, otherwise the reason and the remedy."""
    return jax_call.available()


def forward(
    problem: MoBAPagedProblem,
    query: Array,
    key_pages: Array,
    value_pages: Array,
    page_table: Array | None,
    kv_lengths: Array,
    query_lengths: Array | None,
    score_scale: Array | None,
    key_scales: Array | None,
    value_scales: Array | None,
    centroids: Array,
    *,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """Return output [B, T, N, V] and natural log-sum-exp float32 [B, T, N]."""
    arrays: dict[str, Array | None] = {
        "query": query,
        "key": key_pages,
        "value": value_pages,
        "page_table": page_table,
        "kv_lengths": kv_lengths,
        "query_lengths": query_lengths,
        "score_scale": score_scale,
        "key_scale": key_scales,
        "value_scale": value_scales,
        "centroids": centroids,
    }
    for launch in steps(problem, is_portable=interpret):
        given = (arrays[name] for name in launch.input_names)
        results = jax_call.launch(launch, *(array for array in given if array is not None), interpret=interpret)
        arrays |= dict(zip(launch.output_names, results, strict=True))
    output, log_sum = arrays["output"], arrays["log_sum"]
    assert output is not None and log_sum is not None
    return output, log_sum
