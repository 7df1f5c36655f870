"""The Triton implementation of MoBA in JAX: the canonical call as kernel launches."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from blockdiag.interop import jax_call
from blockdiag.ops.moba.centroids import Centroids
from blockdiag.ops.moba.lists import Lists
from blockdiag.ops.moba.problem import MoBAProblem
from blockdiag.triton_kernels.moba.plans import MoBALaunch, supports
from blockdiag.triton_kernels.moba.steps import (
    Step,
    backward_steps,
    centroid_steps,
    choice_steps,
    forward_steps,
    list_steps,
)

__all__ = ["available", "backward", "centroids", "choose", "forward", "make_lists", "route", "supports"]


def available() -> str | None:
    """Return None if this process can compile and launch kernels, otherwise the reason and the remedy."""
    return jax_call.available()


def route(
    problem: MoBAProblem,
    query: Array,
    key: Array,
    key_mask: Array | None,
    blocks: Array,
    queries: Array,
    *,
    interpret: bool = False,
) -> Array:
    """Return the blocks that each query chooses, int32 [N, query_tokens, slots]: by descending score, then -1."""
    if problem.slots == 0:
        return jnp.zeros((problem.query_heads, problem.query_tokens, 0), jnp.int32)
    means = centroids(problem, key, key_mask, blocks, interpret=interpret)
    return choose(problem, query, means, queries, interpret=interpret)


def centroids(
    problem: MoBAProblem, key: Array, key_mask: Array | None, blocks: Array, *, interpret: bool = False
) -> Centroids:
    """Return the mean of each block's unmasked keys, NaN where there is none."""
    arrays = {"key": key, "blocks": blocks} | _optional(key_mask, None)
    return _run(centroid_steps(), problem, arrays, interpret)["centroids"]


def choose(
    problem: MoBAProblem, query: Array, centroids: Centroids, queries: Array, *, interpret: bool = False
) -> Array:
    """Return the blocks that each query chooses, given mean keys; see `route`."""
    arrays = {"query": query, "centroids": centroids, "queries": queries}
    return _run(choice_steps(problem), problem, arrays, interpret)["chosen"]


def make_lists(problem: MoBAProblem, chosen: Array, *, interpret: bool = False) -> Lists:
    """Return the block-major lists of the queries that chose each block."""
    if problem.slots == 0:
        heads, tokens, blocks = problem.query_heads, problem.query_tokens, problem.num_blocks
        nothing = jnp.zeros((heads, blocks), jnp.int32)
        return Lists(nothing, nothing, jnp.zeros((heads, 0), jnp.int32), jnp.zeros((heads, tokens), jnp.int32))
    arrays = _run(list_steps(), problem, {"chosen": chosen}, interpret)
    return Lists(**{name: arrays[name] for name in Lists._fields})


def forward(
    problem: MoBAProblem,
    query: Array,
    key: Array,
    value: Array,
    key_mask: Array | None,
    blocks: Array,
    queries: Array,
    lists: Lists,
    own: Array | None,
    *,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """Return output [query_tokens, N, H] and natural log-sum-exp float32 [query_tokens, N]."""
    arrays = {"query": query, "key": key, "value": value, "blocks": blocks, "queries": queries}
    arrays |= lists._asdict() | _optional(key_mask, own)
    results = _run(forward_steps(problem), problem, arrays, interpret)
    return results["output"], results["log_sum"]


def backward(
    problem: MoBAProblem,
    query: Array,
    key: Array,
    value: Array,
    key_mask: Array | None,
    blocks: Array,
    queries: Array,
    lists: Lists,
    own: Array | None,
    output: Array,
    log_sum: Array,
    output_cotangent: Array,
    log_sum_cotangent: Array,
    *,
    interpret: bool = False,
) -> tuple[Array, Array, Array]:
    """Return the gradients of query, key and value."""
    arrays = {"query": query, "key": key, "value": value, "blocks": blocks, "queries": queries, "output": output}
    arrays |= {"log_sum": log_sum, "output_cotangent": output_cotangent, "log_sum_cotangent": log_sum_cotangent}
    arrays |= lists._asdict() | _optional(key_mask, own)
    if problem.has_padding:
        # The launch writes into these two buffers. They start as 0 and -0, because XLA (jaxlib 0.11.2) gave both the
        # same memory where they held the same value.
        arrays |= {"d_key": jnp.zeros_like(key), "d_value": jnp.full_like(value, -0.0)}
    results = _run(backward_steps(problem), problem, arrays, interpret)
    return results["d_query"], results["d_key"], results["d_value"]


def _optional(key_mask: Array | None, own: Array | None) -> dict[str, Array]:
    given = {"mask": key_mask, "own": own}
    return {name: array.astype(jnp.int8) for name, array in given.items() if array is not None}


def _run(steps: tuple[Step, ...], problem: MoBAProblem, arrays: dict[str, Any], interpret: bool) -> dict[str, Array]:
    """Run the launches, each of which reads arrays by name and adds its outputs, and return all arrays."""
    arrays = dict(arrays)
    for kind, heads in steps:
        spec = MoBALaunch(problem, kind, has_own="own" in arrays, heads=heads, is_portable=interpret)
        results = jax_call.launch(spec, *(arrays[name] for name in spec.input_names), interpret=interpret)
        arrays |= dict(zip(spec.output_names, results, strict=True))
    return arrays
