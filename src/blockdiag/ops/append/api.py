"""Appending to a paged cache of keys and values: the public function and its batching rule."""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Real

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
    value: Float[Array, "*tokens K V"] | None,
    key_pages: Real[Array, "P page_size K H"],
    value_pages: Real[Array, "P page_size K V"] | None,
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

    The arguments are those of `paged_attention`, with the same meaning. `kv_lengths` includes the new tokens: new token
    t of q in sequence b goes to position ``kv_lengths[b] - q + t``. That position is row ``position % page_size`` of
    page ``page_table[b, position // page_size]``. No other element of the pages changes. Pages may hold anything.

    The pages are updated in place under `jax.jit` with `donate_argnums` for the returned arrays; otherwise JAX copies
    them first. (With 8-bit pages, XLA on a CPU passes over the whole pool even then.) Two tokens must not be written to
    the same row. Sequences may share pages that are not written to.

    An 8-bit cache holds values divided by a scale and rounded to nearest even. Values out of range saturate at the
    largest finite number; int8 has numbers from -127 to 127. NaN stays NaN among 8-bit floats, and becomes 0 among
    integers. `key_scale` and `value_scale` mean the same as in `paged_attention`: a scale is either given, or computed
    for each token and head.

    For inference: differentiation raises a TypeError. Works under `jax.jit`, `jax.vmap` over any axes (each element
    then has its own pages), `jax.shard_map` and `jax.export`. On a mesh, the pages may be sharded over heads, and a
    contiguous cache also over batch rows. Each device writes its own part, in place where the pages are donated. Pages
    are never gathered. New tokens that are sharded differently are gathered on automatic axes, and raise a ValueError
    on explicit axes.

    Args:
        key, value: [B, T, K, H] and [B, T, K, V], T new tokens of each sequence; or packed [rows, K, H] and
            [rows, K, V] with `query_offsets`. Both have the same dtype: float16, bfloat16, float32, float64,
            float8_e4m3fn or float8_e5m2. `value` and `value_pages` are None for a latent cache, whose values are
            columns of its keys.
        key_pages, value_pages: the pool, [P, page_size, K, H] and [P, page_size, K, V]. Each has the dtype of `key` or
            an 8-bit dtype, float8_e4m3fn, float8_e5m2 or int8. int8 needs a scale, and keys of at least 16 bits.
        page_table: int32 [B, max_pages], page numbers. Known entries are checked; outside `jax.jit` the check waits
            until they are computed. Tokens whose traced entry lies outside [0, P) are not written. None means a
            contiguous cache, whose pages [B, S, K, H] are one per sequence.
        kv_lengths: int32 [B], number of keys of each sequence after the append. Known values are checked. With traced
            values, tokens before position 0 or after the last page are not written.
        query_lengths: int32 [B], number of new tokens of each sequence, counted from the first of the T; all when None.
            Known values are checked; traced values are clipped to [0, T].
        query_offsets: int32 [B + 1], for packed tokens: sequence b has rows [offsets[b], offsets[b + 1]). Offsets
            start with 0 and do not decrease. Rows beyond the last offset are not written.
        rotary: rotary embedding of the key. Its `positions` default to the positions of the tokens in their sequences.
            The rotation is computed in float32 (float64) and rounded once, to the dtype of the pages. Keys are not
            rotated if `apply_to` excludes them; values never are.
        key_scale, value_scale: a number, or float32 of shape [] or [B, K], that each key or value is divided by. For
            8-bit pages, also pages of scales, float32 [P, page_size, K]. The scale of each new token and head, its
            largest magnitude divided by the largest finite number, is then computed and written there. It is NaN if an
            element is. In both cases pass the same array, as it is after the append, to `paged_attention`.
        key_centroids: float32 [B, max_blocks, K, H], the mean keys by which `moba_paged_attention` chooses blocks. The
            means of blocks whose last key is new are written, in float32, from the cached keys with their scale.
            Earlier keys of such a block are read from the pages. Blocks that lie partly outside the pages are skipped.
        block_size: keys of a block, known when tracing; with `key_centroids`.
        implementation: which implementation runs. None chooses by platform when the program is lowered: "triton" on
            CUDA where it supports the call, "xla" otherwise. A name ("reference", "xla" or "triton") selects that one;
            on a CPU "triton" runs in a slow interpreter. A sequence selects the first that supports the call.

    Returns:
        Every array that is written, in the order of the arguments: key_pages, value_pages if given, then key_scale and
        value_scale where they are pages, then key_centroids where they were given.

    Raises:
        ValueError: an argument is wrong; the message names it, its value and the remedy.
        NotImplementedError: none of the requested implementations supports this call; the message says why.
        TypeError: the call is differentiated.

    References:
        Pages: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention" (2023).
        8-bit caches: Micikevicius et al., "FP8 Formats for Deep Learning" (2022).

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
    arrays: dict[str, Any] = dict(
        key=jnp.asarray(key),
        value=None if value is None else jnp.asarray(value),
        key_pages=jnp.asarray(key_pages),
        value_pages=None if value_pages is None else jnp.asarray(value_pages),
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
    """The static part of a call: the problem and the implementations to try (see `dispatch.resolve`)."""

    problem: AppendProblem
    implementations: tuple[str, ...] | None


def _as_array(x: Any) -> Array:
    return jnp.asarray(x, jnp.float32 if isinstance(x, (int, float)) else None)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _append(call: Call, arrays: dict[str, Any]) -> tuple[Array, ...]:
    """Compute the array part of the public function, as one compiled program even outside `jax.jit`."""
    arrays = jax.tree.map(functools.partial(not_differentiable, name="append_to_pages"), arrays)
    rotary = arrays["rotary"] if call.problem.rotary is not None else None
    tables = {} if rotary is None else {name: getattr(rotary, name) for name in ("cos", "sin", "positions")}
    operands = {name: (arrays | tables).get(name) for name in sharding.OPERANDS}
    rule = sharding.rule(call.problem, call.implementations, operands)
    sharding.check(rule, operands)
    return divisible(_plan, call, rule)(*on_common_axes(*operands.values()))


def _plan(call: Call, rule: Rule, operands: tuple[Any, ...]) -> tuple[Rule, Local[Any]]:
    """Return the sharding rule of a call, and the function that computes a part of it."""
    del operands
    return rule, functools.partial(_on_device, call)


def _on_device(call: Call, part: Part) -> Any:
    """Return the function that computes the call on the arrays of one device."""

    def append(*operands: Any) -> tuple[Array, ...]:
        arrays = dict(zip(sharding.OPERANDS, operands, strict=True))
        problem = sharding.local_problem(call.problem, part, arrays)
        return _mappable(dataclasses.replace(call, problem=problem))(_canonical(problem, part, arrays))

    return append


def _canonical(problem: AppendProblem, part: Part, arrays: dict[str, Any]) -> AppendArrays:
    """Return the arrays of the canonical call."""
    key, value = (
        None if arrays[name] is None else arrays[name].reshape(problem.tokens, *arrays[name].shape[-2:])
        for name in ("key", "value")
    )
    query_lengths, offsets, sequences, first_rows = arrays["query_lengths"], arrays["query_offsets"], None, None
    if offsets is not None:
        offsets = jax.lax.cummax(jnp.clip(offsets, 0, problem.tokens))
        first = part.starts.get("rows")
        if first is not None:
            # Rows of sequences on other devices belong to no sequence here.
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
    """Return the tables [rows, H / 2], and the table row of each token; None where that is its position."""
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
    """Broadcast a scale [] to [B, K]; return any other scale unchanged."""
    return scale if scale is None or scale.ndim else jnp.broadcast_to(scale[None, None], shape)


@functools.lru_cache(maxsize=1024)
def _mappable(call: Call) -> Any:
    """Return the canonical call with its batching rule; one function object per call."""

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
