"""Paged attention, in which queries attend to a paged cache: the public functions and the batching rule."""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, Real

from blockdiag.common.derivatives import not_differentiable, on_common_axes
from blockdiag.common.dispatch import call_implementation, normalise_implementation, resolve
from blockdiag.common.division import divisible
from blockdiag.common.dtype_table import EIGHT_BIT_FLOATS
from blockdiag.common.dtypes import accumulation_dtype
from blockdiag.common.meshes import explicit_mesh
from blockdiag.common.rule import Rule
from blockdiag.common.shards import Local, Part
from blockdiag.ops.paged import sharding
from blockdiag.ops.paged.batching import fold_paged
from blockdiag.ops.paged.checks import check_query_dtype, describe_paged_call, splits_chosen_again, with_chosen_splits
from blockdiag.ops.paged.options import PagedOptions, Window
from blockdiag.ops.paged.packed import callers_results, canonical_queries
from blockdiag.ops.paged.problem import PAGED, PagedProblem
from blockdiag.ops.paged.scales import canonical_scales


@overload
def paged_attention(
    query: Float[Array, "*tokens N H"],
    key_pages: Real[Array, "P page_size K H"],
    value_pages: Real[Array, "P page_size K V"] | None,
    page_table: Int[Array, "B max_pages"] | None,
    kv_lengths: Int[Array, " B"],
    *,
    return_residual: Literal[False] = False,
    **options: Unpack[PagedOptions[Array]],
) -> Float[Array, "*tokens N V"]: ...


@overload
def paged_attention(
    query: Float[Array, "*tokens N H"],
    key_pages: Real[Array, "P page_size K H"],
    value_pages: Real[Array, "P page_size K V"] | None,
    page_table: Int[Array, "B max_pages"] | None,
    kv_lengths: Int[Array, " B"],
    *,
    return_residual: Literal[True],
    **options: Unpack[PagedOptions[Array]],
) -> tuple[Float[Array, "*tokens N V"], Float[Array, "*tokens N"]]: ...


def paged_attention(
    query: Float[Array, "*tokens N H"],
    key_pages: Real[Array, "P page_size K H"],
    value_pages: Real[Array, "P page_size K V"] | None,
    page_table: Int[Array, "B max_pages"] | None,
    kv_lengths: Int[Array, " B"],
    *,
    value_dim: int | None = None,
    query_lengths: Int[Array, " B"] | None = None,
    query_offsets: Int[Array, " offsets"] | None = None,
    max_query_length: int | None = None,
    scale: float | None = None,
    is_causal: bool = True,
    local_window_size: Window | None = None,
    logits_soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    key_scale: Float[Array, "..."] | float | None = None,
    value_scale: Float[Array, "..."] | float | None = None,
    query_scale: Float[Array, "..."] | float | None = None,
    query_dtype: jax.typing.DTypeLike | None = None,
    num_splits: int | None = None,
    split_size: int | None = None,
    implementation: str | Sequence[str] | None = None,
    return_residual: bool = False,
) -> Any:
    """Compute attention of the last queries of each sequence to its keys and values in a paged cache.

    The queries are new tokens, drafts or prompts. Key j of sequence b is row ``j % page_size`` of page
    ``page_table[b, j // page_size]``, for j below ``kv_lengths[b]``. The lengths include the new tokens, so the last
    query has the position of the last key. Query head n attends to key head n // (N // K). Softmax and sums are float32
    (float64 for float64 queries). The output is rounded once. Results are bitwise repeatable.

    Keys and values beyond the lengths, pages that no sequence uses and unused entries of the table may hold anything,
    even NaN. They never reach a result. A sequence without keys gives the output 0 and the log-sum-exp -inf.

    The keys of sequences with few queries are divided into splits, which are computed in parallel and merged. The
    number of splits changes the result only by rounding. The schedule of a call depends on shapes and options, never on
    lengths, so calls work under `jax.jit` and in CUDA graphs.

    For inference: differentiation raises a TypeError. Works under `jax.jit`, `jax.vmap` over any axes, `jax.shard_map`
    and `jax.export`. On a mesh, `query` may be sharded over batch rows and heads, the pages over heads, and a
    contiguous cache over both. Each device then computes its own part without communication. Query heads may be
    sharded over more devices than there are key heads. Packed queries with a contiguous cache that is sharded over
    batch rows cost one all-reduce.

    Args:
        query: [B, T, N, H], T queries of each sequence; or packed [rows, N, H] with `query_offsets`, any number of
            queries of each, such as prompts beside decoding sequences. float16, bfloat16, float32, float64,
            float8_e4m3fn or float8_e5m2.
        key_pages, value_pages: the pool, [P, page_size, K, H] and [P, page_size, K, V], N a multiple of K. Page size
            and V may be any number. Each has the dtype of `query` or an 8-bit dtype: float8_e4m3fn, float8_e5m2 or
            int8. int8 needs a scale. With an 8-bit query both must be 8-bit floats. With ``value_pages=None`` the
            values are the first `value_dim` columns of the keys, and `key_scale` is a factor on both. An example is
            the latent cache of MLA in its absorbed form, with K = 1: rows of 512 latent and 64 rotary columns, read
            once. Then pass the model's `scale`, such as 1 / sqrt(128 + 64), since H is 576.
        value_dim: V without `value_pages`, 1 to H, known when tracing; otherwise None.
        page_table: int32 [B, max_pages], page numbers. Known entries that keys use are checked; outside `jax.jit` the
            check waits until they are computed. Traced entries are clipped to [0, P). None means a contiguous cache,
            whose pages [B, S, K, H] are one per sequence.
        kv_lengths: int32 [B], number of keys of each sequence including the new tokens, 0 to max_pages * page_size.
            Known values are checked; traced values are clipped.
        query_lengths: int32 [B], number of valid queries of each sequence, counted from the first of the T; all when
            None. Rows beyond give the output 0 and the log-sum-exp -inf. Known values are checked; traced values are
            clipped to [0, T].
        query_offsets: int32 [B + 1], for packed queries: sequence b has rows [offsets[b], offsets[b + 1]). Offsets
            start with 0 and do not decrease. Rows beyond the last offset give 0 and -inf.
        max_query_length: upper bound on the queries of a packed sequence, known when tracing; None for no bound. A
            bound of at most 64 / (N / K) makes calls faster. A longer sequence raises a ValueError where offsets are
            known; where they are traced, its results are right or NaN, or 0 if the bound is 0.
        scale: positive factor on the scores; 1 / sqrt(H) when None. Known when tracing.
        is_causal: whether the keys after a query's own position are masked.
        local_window_size: maximum number of keys that a query sees before and after its own position, as in
            `jax.nn.dot_product_attention`: one integer or (left, right), with None for no bound.
        logits_soft_cap: positive cap; scores s become ``cap * tanh(s / cap)``.
        sinks: [N], floating, one logit per query head that takes part in the softmax without a value. It is computed
            in float32 and counted in the log-sum-exp, which is the sink's logit for a query that sees no key.
        key_scale, value_scale: factors on keys and values: a number, or float32 of shape [], [B, K] or
            [P, page_size, K]. The last shape has one factor per token and head, in pages like those of the cache. The
            kernels multiply scores, weights or outputs; scaled keys and values are never written to memory.
        query_scale: the same for queries: a number, or float32 of shape [] or [B, K], by key head.
        query_dtype: float8_e4m3fn or float8_e5m2, to which queries are rounded, for caches of 8-bit floats. Numbers
            beyond the largest finite one, also infinity, saturate; `query_scale` is a factor of the rounded queries.
            None: queries keep their dtype. If queries, keys and values have one 8-bit dtype, prompts on Hopper use
            8-bit products for H = V = 64 or 128, and weights are rounded to float8_e4m3fn, too. This takes a third of
            the time of widened operands, and is less accurate.
        num_splits: number of equal parts that the keys of each sequence are divided into, 1..256; chosen from the
            shapes when None.
        split_size: keys per split, a multiple of 64, instead of `num_splits`. Every bit of a sequence's result is then
            independent of the other sequences and of their number ("xla" and "triton"; "reference" does not split).
        implementation: which implementation runs. None chooses by platform when the program is lowered: "triton" on
            CUDA where it supports the call, "xla" otherwise. A name ("reference", "xla" or "triton") selects that one;
            on a CPU "triton" runs in a slow interpreter. A sequence selects the first that supports the call.
        return_residual: whether to return the log-sum-exp too, which `merge_attention_states` needs.

    Returns:
        The output [B, T, N, V] or [rows, N, V] in the dtype of `query`, or bfloat16 if `query` is 8-bit. With
        `return_residual`, also the log-sum-exp (natural logarithm) of the scores seen, including scale, soft cap and
        sink: float32 [B, T, N] or [rows, N], float64 for float64 queries.

    Raises:
        ValueError: an argument is wrong; the message names it, its value and the remedy.
        NotImplementedError: none of the requested implementations supports this call; the message says why.
        TypeError: the call is differentiated.

    References:
        Pages: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention" (2023).
        Splits: Flash-Decoding of Dao et al. (2023). Soft cap: Gemma 2 (2024). Sinks: gpt-oss (2025). Page layout: NHD
        of FlashInfer, Ye et al. (2025). Latent caches: multi-head latent attention of DeepSeek-V2 (2024).

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from blockdiag import paged_attention
        >>> query = jax.random.normal(jax.random.key(0), (2, 1, 8, 64))
        >>> key_pages, value_pages = jax.random.normal(jax.random.key(1), (2, 10, 16, 2, 64))
        >>> page_table = jnp.asarray([[7, 1, 4], [0, 9, 9]], jnp.int32)
        >>> paged_attention(query, key_pages, value_pages, page_table, jnp.asarray([40, 3], jnp.int32)).shape
        (2, 1, 8, 64)
    """
    query, key_pages = jnp.asarray(query), jnp.asarray(key_pages)
    value_pages = None if value_pages is None else jnp.asarray(value_pages)
    wanted = None
    if query_dtype is not None:
        name = check_query_dtype(query_dtype, query, key_pages, value_pages)
        if query.dtype != name:
            # Before the rounding, which would hide that the call is differentiated.
            query, wanted = not_differentiable(query, "paged_attention"), query.dtype
            largest = EIGHT_BIT_FLOATS[name].largest
            query = jnp.clip(query, -largest, largest).astype(name)
    options = dict(
        value_dim=value_dim,
        scale=scale,
        is_causal=is_causal,
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
        max_query_length=max_query_length,
        num_splits=num_splits,
        split_size=split_size,
    )
    arrays = dict(
        query=query,
        key_pages=key_pages,
        value_pages=value_pages,
        page_table=page_table,
        kv_lengths=kv_lengths,
        query_lengths=query_lengths,
        query_offsets=query_offsets,
        sinks=sinks,
        key_scale=key_scale,
        value_scale=value_scale,
        query_scale=query_scale,
    )
    problem = describe_paged_call(**arrays, **options)
    names = normalise_implementation(implementation, PAGED)
    resolve(problem.tiled, names)
    call = Call(problem, names, chooses_splits=num_splits is None and split_size is None)
    arrays = {name: None if x is None else jnp.asarray(x, _dtype(name, x)) for name, x in arrays.items()}
    output, log_sum = _attention(call, arrays)
    output = output if wanted is None else output.astype(wanted)
    return (output, log_sum) if return_residual else output


def merge_attention_states(
    outputs: Float[Array, "parts *rows V"] | Sequence[Float[Array, "*rows V"]],
    lses: Float[Array, "parts ..."] | Sequence[Float[Array, "*rows"]],
) -> tuple[Float[Array, "*rows V"], Float[Array, "*rows"]]:
    """Merge attention over several sets of keys into attention over all of them, by their log-sum-exps.

    Together with `paged_attention` this joins a prefix that sequences share with each sequence's own keys, or the
    results of several devices that each hold a part of one long cache. No key may occur in two sets, and sinks may be
    passed to only one of the calls.

    Computed in float32 (float64 for float64 outputs) and plain `jax.numpy`, so every transformation applies. Devices
    of a mesh divide every axis except the parts without communication. Parts on several devices are summed over them.

    Args:
        outputs: normalised output of each part: a sequence of arrays [..., V] of one shape and one floating dtype, or
            these arrays stacked along a leading axis.
        lses: their log-sum-exps [...] (natural logarithm), floating, as a sequence or stacked. -inf means that the
            part saw no key; its output is then ignored, even if it is NaN.

    Returns:
        The merged output [..., V] in the dtype of `outputs`, and its log-sum-exp [...] in float32 (float64 for float64
        outputs). Where no part saw a key they are 0 and -inf.

    Raises:
        ValueError: there are no parts, or their shapes or dtypes do not match.

    References:
        Merging by log-sum-exps: the cascade of FlashInfer, Ye et al. (2025), from the online softmax of Milakov and
        Gimelshein (2018).

    Example:
        >>> import jax.numpy as jnp
        >>> from blockdiag import merge_attention_states
        >>> outputs, lses = jnp.asarray([[1.0], [4.0]]), jnp.log(jnp.asarray([2.0, 1.0]))
        >>> output, lse = merge_attention_states(outputs, lses)
        >>> print(round(float(output[0]), 4), round(float(jnp.exp(lse)), 4))
        2.0 3.0
    """
    output, log_sum = _stacked("outputs", outputs), _stacked("lses", lses)
    if log_sum.shape != output.shape[:-1] or output.ndim < 2 or output.shape[0] == 0:
        raise ValueError(
            f"`lses` must have the shape of `outputs` without its last axis, of at least one part, got "
            f"{log_sum.shape} and {output.shape}, parts first; [parts, B, T, N] belongs to [parts, B, T, N, V]"
        )
    for name, array in (("outputs", output), ("lses", log_sum)):
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"`{name}` must have a floating dtype, got {array.dtype}; convert it")
    wide = accumulation_dtype(output.dtype)
    log_sum = _sharded_beside(log_sum, output).astype(wide)
    is_empty = log_sum == -jnp.inf
    is_all_empty = jnp.all(is_empty, axis=0)
    largest = jnp.where(is_all_empty, 0, jax.lax.stop_gradient(jnp.max(log_sum, axis=0)))
    weights = jnp.where(is_empty, 0, jnp.exp(jnp.where(is_empty, 0, log_sum - largest[None])))
    total = jnp.where(is_all_empty, 1, jnp.sum(weights, axis=0))
    parts = jnp.where(is_empty[..., None], 0, output.astype(wide))
    merged = jnp.sum(parts * (weights / total[None])[..., None], axis=0)
    return merged.astype(output.dtype), jnp.where(is_all_empty, -jnp.inf, jnp.log(total) + largest)


def _sharded_beside(log_sum: Array, output: Array) -> Array:
    """Reshard log-sum-exps like the outputs where explicit mesh axes shard different axes of the two."""
    spec, wanted = (tuple(jax.typeof(x).sharding.spec) for x in (log_sum, output))
    wanted = (*wanted, *[None] * (output.ndim - len(wanted)))
    used = {name for entry in wanted for name in (entry if isinstance(entry, tuple) else (entry,))} - {None}
    agrees = all(
        entry == other or used.isdisjoint(entry if isinstance(entry, tuple) else (entry,))
        for entry, other in zip(spec, wanted, strict=False)
    )
    mesh = explicit_mesh([output])
    return log_sum if agrees or mesh is None else jax.sharding.reshard(log_sum, NamedSharding(mesh, P(*wanted[:-1])))


def _stacked(name: str, parts: Any) -> Array:
    if hasattr(parts, "ndim"):
        return jnp.asarray(parts)
    arrays = [jnp.asarray(part) for part in parts]
    if len({(array.shape, array.dtype) for array in arrays}) != 1:
        raise ValueError(
            f"`{name}` must be one or more arrays of one shape and dtype, got "
            f"{[f'{array.dtype}{list(array.shape)}' for array in arrays]}; broadcast or cast them first"
        )
    return jnp.stack(arrays)


@dataclass(frozen=True, slots=True)
class Call:
    """The static part of a call: the problem and the implementations to try (see `dispatch.resolve`).

    Attributes:
        problem: the canonical call.
        implementations: names to try, or None.
        chooses_splits: whether the number of splits was chosen from the shapes. It is then chosen again when sharding
            or batching changes the shapes.
    """

    problem: PagedProblem
    implementations: tuple[str, ...] | None
    chooses_splits: bool


def _dtype(name: str, x: Any) -> Any:
    """Return the dtype to convert an argument to: float32 for numbers and sinks, else None for its own dtype."""
    is_number = isinstance(x, (int, float))
    return jnp.float32 if is_number or name == "sinks" else None


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _attention(call: Call, arrays: dict[str, Any]) -> tuple[Array, Array]:
    """Compute the array part of the public function, as one compiled program even outside `jax.jit`."""
    arrays = jax.tree.map(lambda x: not_differentiable(x, "paged_attention"), arrays)
    problem, query = call.problem, arrays["query"]
    if 0 in (problem.batch, problem.query_tokens, query.shape[0]):
        rows, wide = query.shape[:-1], accumulation_dtype(query.dtype)
        return jnp.zeros((*rows, problem.value_dim), problem.output_dtype), jnp.full(rows, -jnp.inf, wide)
    operands = {name: arrays.get(name) for name in sharding.OPERANDS}
    method = f"chooses_splits={call.chooses_splits}"
    rule = sharding.rule(problem, call.implementations, method, operands)
    sharding.check(rule, operands)
    return divisible(_plan, call, rule)(*on_common_axes(*operands.values()))


def _plan(call: Call, rule: Rule, operands: tuple[Any, ...]) -> tuple[Rule, Local[Any]]:
    """Return the sharding rule of a call, and the function that computes a part of it."""
    del operands
    return rule, functools.partial(_on_device, call)


def _on_device(call: Call, part: Part) -> Any:
    """Return the function that computes the call on the arrays of one device."""
    problem = sharding.local_problem(call.problem, part)
    if part.starts and call.chooses_splits:
        problem = with_chosen_splits(problem)
    call = dataclasses.replace(call, problem=problem)

    def attend(*operands: Any) -> tuple[Array, Array]:
        arrays = dict(zip(sharding.OPERANDS, operands, strict=True))
        score_scale, key_scales, value_scales = canonical_scales(
            problem, *(arrays[name] for name in ("key_scale", "value_scale", "query_scale"))
        )
        offsets = arrays["query_offsets"]
        queries = canonical_queries(
            problem, arrays["query"], arrays["kv_lengths"], arrays["query_lengths"], offsets, part
        )
        results = _mappable(dataclasses.replace(call, problem=problem.tiled))(
            queries.query,
            arrays["key_pages"],
            arrays["value_pages"],
            arrays["page_table"],
            arrays["kv_lengths"],
            queries.query_lengths,
            arrays["sinks"],
            score_scale,
            key_scales,
            value_scales,
            queries.tiles,
        )
        return callers_results(problem, results, offsets, part)

    return attend


@functools.lru_cache(maxsize=1024)
def _mappable(call: Call) -> Any:
    """Return the canonical call with its batching rule; one function object per call."""

    @jax.custom_batching.custom_vmap
    def compute(*operands: Any) -> Any:
        return call_implementation("forward", call.problem, call.implementations, *operands)

    @compute.def_vmap
    def compute_mapped(axis_size: int, is_mapped: Sequence[Any], *operands: Any) -> tuple[Any, Any]:
        sinks = 6
        if is_mapped[sinks]:
            # All sequences of a call share the sinks, so mapped sinks cannot be folded into the batch.
            return _loop(compute, is_mapped, operands), (True, True)
        problem, folded = fold_paged(call.problem, axis_size, is_mapped, operands)
        problem = splits_chosen_again(problem) if call.chooses_splits else problem
        results = _mappable(Call(problem, call.implementations, call.chooses_splits))(*folded)
        rows = call.problem.batch if call.problem.packed_rows is None else call.problem.packed_rows
        results = jax.tree.map(lambda x: x.reshape(axis_size, rows, *x.shape[1:]), results)
        return results, (True, True)

    return compute


def _loop(function: Any, is_mapped: Sequence[Any], operands: tuple) -> Any:
    """Apply a function to one element of the mapped axis after the other; `is_mapped` says which operands have it."""
    mapped = [x for x, has_axis in zip(operands, is_mapped, strict=True) if has_axis]

    def compute(elements: list[Array]) -> Any:
        remaining = iter(elements)
        return function(*(next(remaining) if has_axis else x for x, has_axis in zip(operands, is_mapped, strict=True)))

    return jax.lax.map(compute, mapped)
