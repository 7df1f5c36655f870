"""Appending to a paged cache of keys and values: the public function and its batching rule."""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from blockdiag.common.derivatives import not_differentiable, on_common_axes
from blockdiag.common.dispatch import call_implementation, normalise_implementation, resolve
from blockdiag.common.division import divisible
from blockdiag.common.packing import count_not_above
from blockdiag.common.rotary import Rotary
from blockdiag.common.rule import Rule
from blockdiag.common.shards import Local, Part
from blockdiag.ops.append import sharding
from blockdiag.ops.append.batching import fold_append
from blockdiag.ops.append.checks import describe_append_call
from blockdiag.ops.append.problem import APPEND, AppendArrays, AppendProblem


def append_to_pages(
    key: Float[Array, "*tokens K H"],
    value: Float[Array, "*tokens K V"],
    key_pages: Float[Array, "P page_size K H"],
    value_pages: Float[Array, "P page_size K V"],
    page_table: Int[Array, "B max_pages"] | None,
    kv_lengths: Int[Array, " B"],
    *,
    query_lengths: Int[Array, " B"] | None = None,
    query_offsets: Int[Array, " offsets"] | None = None,
    rotary: Rotary | None = None,
    key_scale: Float[Array, "..."] | float | None = None,
    value_scale: Float[Array, "..."] | float | None = None,
    key_centroids: Float[Array, "B max_blocks K H"] | None = None,
    block_size: int | None = None,
    implementation: str | Sequence[str] | None = None,
) -> tuple[Array, ...]:
    """Write the keys and values of new tokens into the pages that `paged_attention` reads.

    Takes the arrays that `paged_attention` takes, with their meaning: `kv_lengths` counts the new tokens too, and token
    t of the q new ones of sequence b goes to position ``kv_lengths[b] - q + t``, which is row ``position % page_size``
    of page ``page_table[b, position // page_size]``. Nothing else of the pages changes, and pages may hold anything.

    Under `jax.jit` with `donate_argnums` for the arrays that are returned, they are changed in place; otherwise JAX
    copies them first. (Of pages of eight bits, XLA on a CPU passes over the whole pool even so.) Two tokens must not
    have one place: sequences may share pages that nothing is written to.

    A cache of eight bits holds numbers divided by a scale, rounded to nearest even; what would be too large becomes the
    largest finite number. NaN stays NaN. Which scale, `key_scale` and `value_scale` say as they do in
    `paged_attention`: one that is given, or one that is computed for each token and head.

    For inference: differentiation raises a TypeError. Works under `jax.jit`, `jax.vmap` with any axes (each element
    then has pages of its own), `jax.shard_map` and `jax.export`. On a mesh, the pages may be sharded over heads, and a
    contiguous cache over batch rows too; each device writes its own part, in place where the pages are donated. New
    tokens that are sharded otherwise are gathered, which explicit axes make a ValueError; pages never are.

    Args:
        key, value: [B, T, K, H] and [B, T, K, V], T new tokens of each sequence; or packed [rows, K, H] and
            [rows, K, V] with `query_offsets`. Of one dtype: float16, bfloat16, float32, float64, float8_e4m3fn or
            float8_e5m2.
        key_pages, value_pages: the pool, [P, page_size, K, H] and [P, page_size, K, V], each of the dtype of `key`, or
            of eight bits, float8_e4m3fn or float8_e5m2.
        page_table: int32 [B, max_pages], numbers of pages. Known ones are checked, which outside `jax.jit` waits until
            they are computed; where traced ones lie outside [0, P), nothing is written. None for a contiguous cache:
            the pages are then [B, S, K, H], one for each sequence.
        kv_lengths: int32 [B], keys of each sequence once the new ones are there. Known ones are checked; with traced
            ones, tokens before position 0 or after the last page are not written.
        query_lengths: int32 [B], how many of the T tokens each sequence has, the first ones; all when None. Known ones
            are checked; traced ones are clipped to [0, T].
        query_offsets: int32 [B + 1], for packed tokens: sequence b has rows [offsets[b], offsets[b + 1]). Starts with 0
            and does not decrease. Rows beyond the last offset are not written.
        rotary: rotary embedding of the key; its `positions` are those of the tokens in their sequences unless given.
            Computed in float32 (float64) and rounded once, to the dtype of the pages. `apply_to` may say that keys are
            not rotated; values never are.
        key_scale, value_scale: a number, or float32 of shape [] or [B, K]: what each key or value is divided by. Or
            pages of scales, float32 [P, page_size, K], beside pages of eight bits: then the scale of each new token and
            head is computed, the largest magnitude over the largest finite number, and written to its place. Either way
            the same array, after the append, is what `paged_attention` takes.
        key_centroids: float32 [B, max_blocks, K, H], the mean key of each block of a sequence, which
            `moba_paged_attention` chooses blocks by: those of blocks whose last key is new are written, the mean in
            float32 of what the cache then holds, scale included. Earlier keys of such a block are read from the pages.
            A block that lies partly outside of the pages is left out.
        block_size: keys of a block, known when tracing; with `key_centroids`.
        implementation: who computes it. None chooses by platform when the program is lowered: "triton" on CUDA where
            it supports the call, "xla" otherwise. A name, "reference", "xla" or "triton", means that one; "triton" on a
            CPU runs in a slow interpreter. A sequence means the first that supports the call.

    Returns:
        Every array that is written, in the order of the arguments: key_pages, value_pages, then key_scale and
        value_scale where they are pages, then key_centroids where they were given.

    Raises:
        ValueError: an argument is wrong; the message names it, its value and the remedy.
        NotImplementedError: none of the implementations asked for can compute this call; the message says why.
        TypeError: the call is differentiated.

    References:
        Pages: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention" (2023).
        Caches of eight bits: Micikevicius et al., "FP8 Formats for Deep Learning" (2022).

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from blockdiag import append_to_pages
        >>> key_pages, value_pages = jnp.zeros((10, 16, 2, 64)), jnp.zeros((10, 16, 2, 64))
        >>> page_table = jnp.asarray([[7, 1, 4], [0, 9, 9]], jnp.int32)
        >>> key = value = jnp.ones((2, 1, 2, 64))
        >>> append = jax.jit(append_to_pages, donate_argnums=(2, 3))
        >>> lengths = jnp.asarray([17, 1], jnp.int32)
        >>> key_pages, value_pages = append(key, value, key_pages, value_pages, page_table, lengths)
        >>> [tuple(map(int, place)) for place in jnp.argwhere(key_pages[:, :, 0, 0] == 1)]
        [(0, 0), (1, 0)]
    """
    key, value = jnp.asarray(key), jnp.asarray(value)
    arrays: dict[str, Any] = dict(
        key=key,
        value=value,
        key_pages=jnp.asarray(key_pages),
        value_pages=jnp.asarray(value_pages),
        page_table=page_table,
        kv_lengths=kv_lengths,
        query_lengths=query_lengths,
        query_offsets=query_offsets,
        rotary=rotary,
        key_scale=key_scale,
        value_scale=value_scale,
        key_centroids=key_centroids,
    )
    problem = describe_append_call(**arrays, block_size=block_size)
    names = normalise_implementation(implementation, APPEND)
    resolve(problem, names)
    call = Call(problem, names)
    arrays = {name: x if x is None or name == "rotary" else _as_array(x) for name, x in arrays.items()}
    return _append(call, arrays)


@dataclass(frozen=True, slots=True)
class Call:
    """The static part of a call: what is computed, and who may compute it (see `dispatch.resolve`)."""

    problem: AppendProblem
    implementations: tuple[str, ...] | None


def _as_array(x: Any) -> Array:
    return jnp.asarray(x, jnp.float32 if isinstance(x, (int, float)) else None)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _append(call: Call, arrays: dict[str, Any]) -> tuple[Array, ...]:
    """The array part of the public function, compiled as one program where the caller does not compile it."""
    arrays = jax.tree.map(functools.partial(not_differentiable, name="append_to_pages"), arrays)
    rotary = arrays["rotary"] if call.problem.rotary is not None else None
    tables = {} if rotary is None else {name: getattr(rotary, name) for name in ("cos", "sin", "positions")}
    operands = {name: (arrays | tables).get(name) for name in sharding.OPERANDS}
    rule = sharding.rule(call.problem, call.implementations, operands)
    sharding.check(rule, operands)
    return divisible(_plan, call, rule)(*on_common_axes(*operands.values()))


def _plan(call: Call, rule: Rule, operands: tuple[Any, ...]) -> tuple[Rule, Local[Any]]:
    """The rule of a call, and what computes a part of it."""
    del operands
    return rule, functools.partial(_on_device, call)


def _on_device(call: Call, part: Part) -> Any:
    """The call on the arrays of one device."""

    def append(*operands: Any) -> tuple[Array, ...]:
        arrays = dict(zip(sharding.OPERANDS, operands, strict=True))
        problem = sharding.local_problem(call.problem, part, arrays)
        return _mappable(dataclasses.replace(call, problem=problem))(_canonical(problem, part, arrays))

    return append


def _canonical(problem: AppendProblem, part: Part, arrays: dict[str, Any]) -> AppendArrays:
    """The arrays of the canonical call."""
    key, value = (arrays[name].reshape(problem.tokens, *arrays[name].shape[-2:]) for name in ("key", "value"))
    query_lengths, offsets, sequences, first_rows = arrays["query_lengths"], arrays["query_offsets"], None, None
    if offsets is not None:
        offsets = jax.lax.cummax(jnp.clip(offsets, 0, problem.tokens))
        first = part.starts.get("rows")
        if first is not None:
            # Rows of sequences that other devices have are rows of none.
            offsets = jax.lax.dynamic_slice_in_dim(offsets, first, problem.batch + 1)
        query_lengths, first_rows = jnp.diff(offsets), offsets[:-1]
        row = jnp.arange(problem.tokens, dtype=jnp.int32)
        sequences = count_not_above(offsets, row) - 1
        sequences = jnp.where(sequences < problem.batch, sequences, -1)
    cos, sin, positions = _canonical_rotary(problem, arrays, arrays["key"].shape[:-2])
    by_head = (problem.batch, problem.key_heads)
    return AppendArrays(
        key=key,
        value=value,
        key_pages=arrays["key_pages"],
        value_pages=arrays["value_pages"],
        page_table=arrays["page_table"],
        kv_lengths=arrays["kv_lengths"],
        query_lengths=query_lengths,
        sequences=sequences,
        first_rows=first_rows,
        cos=cos,
        sin=sin,
        positions=positions,
        key_scale=_by_head(arrays["key_scale"], by_head),
        value_scale=_by_head(arrays["value_scale"], by_head),
        key_centroids=arrays["key_centroids"],
    )


def _canonical_rotary(
    problem: AppendProblem, arrays: dict[str, Any], tokens_shape: tuple[int, ...]
) -> tuple[Array | None, Array | None, Array | None]:
    """Tables [rows, H / 2], and the row of each token where it is not its position."""
    if problem.rotary is None:
        return None, None, None
    cos, sin = (arrays[name].reshape(-1, arrays[name].shape[-1]) for name in ("cos", "sin"))
    if problem.rotary.positions == "sequence":
        return cos, sin, None
    positions = arrays["positions"]
    if positions is None:
        positions = jnp.arange(cos.shape[0], dtype=jnp.int32).reshape(arrays["cos"].shape[:-1])
    positions = positions.reshape((1,) * (len(tokens_shape) - positions.ndim) + positions.shape)
    return cos, sin, jnp.broadcast_to(positions, tokens_shape).reshape(-1)


def _by_head(scale: Array | None, shape: tuple[int, int]) -> Array | None:
    """A scale [] as [B, K]; others as they are."""
    return scale if scale is None or scale.ndim else jnp.broadcast_to(scale[None, None], shape)


@functools.lru_cache(maxsize=1024)
def _mappable(call: Call) -> Any:
    """The canonical call with its batching rule; one function object for each call."""

    @jax.custom_batching.custom_vmap
    def compute(arrays: AppendArrays) -> tuple[Array, ...]:
        return tuple(call_implementation("append", call.problem, call.implementations, arrays))

    @compute.def_vmap
    def compute_mapped(axis_size: int, is_mapped: Sequence[Any], arrays: AppendArrays) -> tuple[Any, Any]:
        (mapped,) = is_mapped
        problem, folded = fold_append(call.problem, axis_size, mapped, arrays)
        results = _mappable(Call(problem, call.implementations))(folded)
        results = tuple(x.reshape(axis_size, x.shape[0] // axis_size, *x.shape[1:]) for x in results)
        return results, (True,) * len(results)

    return compute
