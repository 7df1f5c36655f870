"""MoBA over a paged cache, where queries read only the blocks they choose: the public function and its batching."""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Real

from blockdiag.common.derivatives import not_differentiable, on_common_axes
from blockdiag.common.dispatch import (
    call_implementation,
    normalise_implementation,
    resolve,
)
from blockdiag.common.division import divisible
from blockdiag.common.dtypes import accumulation_dtype
from blockdiag.common.rule import Rule
from blockdiag.common.shards import Local, Part
from blockdiag.ops.block_diagonal.batching import fold_rows
from blockdiag.ops.moba_paged.checks import describe_moba_paged_call
from blockdiag.ops.moba_paged.options import MoBAPagedOptions
from blockdiag.ops.moba_paged.problem import MOBA_PAGED, MoBAPagedProblem
from blockdiag.ops.paged import sharding
from blockdiag.ops.paged.batching import fold_paged
from blockdiag.ops.paged.scales import canonical_scales


@overload
def moba_paged_attention(
    query: Float[Array, "B T N H"],
    key_pages: Real[Array, "P page_size K H"],
    value_pages: Real[Array, "P page_size K V"],
    page_table: Int[Array, "B max_pages"] | None,
    kv_lengths: Int[Array, " B"],
    key_centroids: Float[Array, "B max_blocks K H"],
    *,
    block_size: int,
    top_k: int,
    return_residual: Literal[False] = False,
    **options: Unpack[MoBAPagedOptions[Array]],
) -> Float[Array, "B T N V"]: ...


@overload
def moba_paged_attention(
    query: Float[Array, "B T N H"],
    key_pages: Real[Array, "P page_size K H"],
    value_pages: Real[Array, "P page_size K V"],
    page_table: Int[Array, "B max_pages"] | None,
    kv_lengths: Int[Array, " B"],
    key_centroids: Float[Array, "B max_blocks K H"],
    *,
    block_size: int,
    top_k: int,
    return_residual: Literal[True],
    **options: Unpack[MoBAPagedOptions[Array]],
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]: ...


def moba_paged_attention(
    query: Float[Array, "B T N H"],
    key_pages: Real[Array, "P page_size K H"],
    value_pages: Real[Array, "P page_size K V"],
    page_table: Int[Array, "B max_pages"] | None,
    kv_lengths: Int[Array, " B"],
    key_centroids: Float[Array, "B max_blocks K H"],
    *,
    block_size: int,
    top_k: int,
    query_lengths: Int[Array, " B"] | None = None,
    scale: float | None = None,
    key_scale: Float[Array, "..."] | float | None = None,
    value_scale: Float[Array, "..."] | float | None = None,
    query_scale: Float[Array, "..."] | float | None = None,
    implementation: str | Sequence[str] | None = None,
    return_residual: bool = False,
) -> Any:
    """Compute mixture of block attention of the last queries of each sequence to a paged cache.

    The queries are one new token of each sequence, a draft, a whole prompt or a chunk of one. The result is that of
    `moba_attention` for the last rows of each sequence. The keys and values come from a cache as in `paged_attention`,
    and the mean keys of complete blocks are stored beside it. A query at position p sees the keys up to p of its own
    block, p // block_size. It also sees all of `top_k - 1` earlier blocks: those whose mean keys have the largest dot
    products with the query. Ties go to the later block. Only the chosen blocks are read.

    Query head n attends to key head n // (N // K), and each query head chooses its own blocks. Dot products with mean
    keys, softmax and sums are float32 (float64 for float64 queries). The output is rounded once; with 64 queries or
    more of 16 or 8 bits, the Triton kernels also round weights and each block's result, as those of `moba_attention`
    do. Results are bitwise repeatable. Scale arguments do not affect the choice: mean keys already include the key
    scale, and a positive query scale does not change the order. A block whose dot product is NaN is never chosen. With
    64 queries or more, the Triton kernels may pass over a block whose mean key is infinite, too.

    Keys and values beyond the lengths, pages that no sequence uses, unused entries of the table and mean keys of
    incomplete blocks may hold anything, even NaN. They never reach a result. A sequence without keys gives the output 0
    and the log-sum-exp -inf.

    The schedule of a call does not depend on lengths, so calls work under `jax.jit` and in CUDA graphs. For inference:
    differentiation raises a TypeError. Works under `jax.jit`, `jax.vmap` over any axes, `jax.shard_map` and
    `jax.export`. On a mesh, `query` and mean keys may be sharded over batch rows and heads, the pages over heads, and a
    contiguous cache over both. Each device then computes its own part without communication.

    Args:
        query: [B, T, N, H], T queries per sequence. float16, bfloat16, float32, float64, float8_e4m3fn or float8_e5m2.
            Where T is 64 or more and H is V, the Triton kernels read each block once for all queries that chose it.
        key_pages, value_pages, page_table, kv_lengths, query_lengths: the cache and its lengths, see `paged_attention`.
        key_centroids: float32 [B, max_blocks, K, H], the mean key of each complete block of each sequence. For up to S
            keys per sequence, `max_blocks` is at least (S - 1) // block_size, since the last block needs no mean key.
            `append_to_pages` maintains them.
        block_size: keys of a block, a multiple of 16 from 16 to 4096; independent of the page size.
        top_k: number of blocks that a query sees, including its own, 1..64.
        scale: positive factor on the scores of the softmax; 1 / sqrt(H) when None. Known when tracing.
        key_scale, value_scale, query_scale: factors on keys, values and queries, see `paged_attention`.
        implementation: which implementation runs. None chooses by platform when the program is lowered: "triton" on
            CUDA where it supports the call, "xla" otherwise. A name ("reference", "xla" or "triton") selects that one;
            on a CPU "triton" runs in a slow interpreter. A sequence selects the first that supports the call.
        return_residual: whether to return the log-sum-exp too.

    Returns:
        The output [B, T, N, V] in the dtype of `query`, or bfloat16 for 8-bit queries. With `return_residual`, also the
        log-sum-exp (natural logarithm) of the scaled scores seen, float32 [B, T, N] (float64 for float64 queries).

    Raises:
        ValueError: an argument is wrong; the message names it, its value and the remedy.
        NotImplementedError: none of the requested implementations supports this call; the message says why.
        TypeError: the call is differentiated.

    References:
        Lu et al., "MoBA: Mixture of Block Attention for Long-Context LLMs" (2025), over the pages of Kwon et al.,
        "Efficient Memory Management for Large Language Model Serving with PagedAttention" (2023).

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from blockdiag import moba_paged_attention
        >>> query = jax.random.normal(jax.random.key(0), (1, 1, 4, 32))
        >>> key, value = jax.random.normal(jax.random.key(1), (2, 1, 100, 2, 32))
        >>> key_centroids = key[:, :96].reshape(1, 6, 16, 2, 32).mean(2)
        >>> kv_lengths = jnp.asarray([90], jnp.int32)
        >>> moba_paged_attention(query, key, value, None, kv_lengths, key_centroids, block_size=16, top_k=3).shape
        (1, 1, 4, 32)
    """
    if value_pages is None:
        raise ValueError(
            "`value_pages` must be an array, got None: latent caches are taken by `paged_attention` only; pass the "
            "latent columns of the keys as pages of their own"
        )
    query, key_pages, value_pages = jnp.asarray(query), jnp.asarray(key_pages), jnp.asarray(value_pages)
    options = dict(block_size=block_size, top_k=top_k, scale=scale)
    arrays = dict(
        query=query,
        key_pages=key_pages,
        value_pages=value_pages,
        page_table=page_table,
        kv_lengths=kv_lengths,
        key_centroids=key_centroids,
        query_lengths=query_lengths,
        key_scale=key_scale,
        value_scale=value_scale,
        query_scale=query_scale,
    )
    problem = describe_moba_paged_call(**arrays, **options)
    names = normalise_implementation(implementation, MOBA_PAGED)
    resolve(problem, names)
    call = Call(problem, names)
    # Scales given as Python numbers become float32 arrays.
    arrays = {
        name: None if x is None else jnp.asarray(x, jnp.float32 if isinstance(x, (int, float)) else None)
        for name, x in arrays.items()
    }
    output, log_sum = _attention(call, arrays)
    return (output, log_sum) if return_residual else output


@dataclass(frozen=True, slots=True)
class Call:
    """The static part of a call: the problem and the implementations to try (see `dispatch.resolve`)."""

    problem: MoBAPagedProblem
    implementations: tuple[str, ...] | None


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _attention(call: Call, arrays: dict[str, Any]) -> tuple[Array, Array]:
    """Compute the array part of the public function, as one compiled program even outside `jax.jit`."""
    arrays = jax.tree.map(lambda x: not_differentiable(x, "moba_paged_attention"), arrays)
    problem, query = call.problem.paged, arrays["query"]
    if problem.batch == 0 or problem.query_tokens == 0:
        rows, wide = query.shape[:-1], accumulation_dtype(query.dtype)
        return jnp.zeros((*rows, problem.value_dim), problem.output_dtype), jnp.full(rows, -jnp.inf, wide)
    operands = {name: arrays.get(name) for name in sharding.OPERANDS}
    rule = sharding.rule(
        problem, call.implementations, "forward", operands, whole=call.problem, blocks=call.problem.max_blocks
    )
    sharding.check(rule, operands)
    return divisible(_plan, call, rule)(*on_common_axes(*operands.values()))


def _plan(call: Call, rule: Rule, operands: tuple[Any, ...]) -> tuple[Rule, Local[Any]]:
    """Return the sharding rule of a call, and the function that computes a part of it."""
    del operands
    return rule, functools.partial(_on_device, call)


def _on_device(call: Call, part: Part) -> Any:
    """Return the function that computes the call on the arrays of one device."""
    paged = sharding.local_problem(call.problem.paged, part)
    call = dataclasses.replace(call, problem=dataclasses.replace(call.problem, paged=paged))

    def attend(*operands: Any) -> tuple[Array, Array]:
        arrays = dict(zip(sharding.OPERANDS, operands, strict=True))
        scales = canonical_scales(paged, *(arrays[name] for name in ("key_scale", "value_scale", "query_scale")))
        return _mappable(call)(
            arrays["query"],
            arrays["key_pages"],
            arrays["value_pages"],
            arrays["page_table"],
            arrays["kv_lengths"],
            arrays["query_lengths"],
            *scales,
            arrays["key_centroids"],
        )

    return attend


@functools.lru_cache(maxsize=1024)
def _mappable(call: Call) -> Any:
    """Return the canonical call with its batching rule; one function object per call."""

    @jax.custom_batching.custom_vmap
    def compute(*operands: Any) -> Any:
        return call_implementation("forward", call.problem, call.implementations, *operands)

    @compute.def_vmap
    def compute_mapped(axis_size: int, is_mapped: Sequence[Any], *operands: Any) -> tuple[Any, Any]:
        # `fold_paged` takes the operands of paged attention: with sinks before the scales, and without mean keys, in
        # whose place it has tiles.
        *paged, centroids = operands
        *paged_mapped, centroids_mapped = is_mapped
        paged.insert(6, None)
        paged_mapped.insert(6, False)
        paged.append(None)
        paged_mapped.append(False)
        paged_problem, folded = fold_paged(call.problem.paged, axis_size, paged_mapped, tuple(paged))
        problem = dataclasses.replace(call.problem, paged=paged_problem)
        centroids = fold_rows(centroids, axis_size, centroids_mapped)
        results = _mappable(Call(problem, call.implementations))(*folded[:6], *folded[7:-1], centroids)
        results = jax.tree.map(lambda x: x.reshape(axis_size, call.problem.paged.batch, *x.shape[1:]), results)
        return results, (True, True)

    return compute
