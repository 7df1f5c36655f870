"""Fused training function: query, key and value projection, rotary embedding and block-diagonal attention."""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from blockdiag.common import validation
from blockdiag.common.derivatives import on_common_axes, reverse_only
from blockdiag.common.dtypes import accumulation_dtype
from blockdiag.common.meshes import explicit_mesh, placed_like, whole_but
from blockdiag.common.rotary import Rotary
from blockdiag.common.sharded_axes import batch
from blockdiag.ops.block_diagonal.api import (
    BLOCK_DIAGONAL_OUTPUT,
    Call,
    Statistics,
    attention_and_statistics,
    attention_gradients,
    canonical_tables,
    prepare_call,
)

BLOCK_DIAGONAL_QKV = "blockdiag_block_diagonal_qkv"
"""Name of the projected query | key | value buffer for rematerialisation policies, beside `BLOCK_DIAGONAL_OUTPUT`.

Example:
    >>> import functools
    >>> import jax
    >>> import blockdiag
    >>> policy = jax.checkpoint_policies.save_only_these_names(blockdiag.BLOCK_DIAGONAL_QKV)
    >>> @functools.partial(jax.checkpoint, policy=policy)
    ... def total(x, w_qkv):
    ...     sizes = {"query_heads": 2, "key_heads": 1, "head_dim": 16}
    ...     return blockdiag.fused_qkv_block_attention(x, w_qkv, block_size=16, **sizes).sum()
    >>> x, w_qkv = (jax.ShapeDtypeStruct(shape, jax.numpy.bfloat16) for shape in ((40, 8), (8, 64)))
    >>> jax.eval_shape(jax.grad(total), x, w_qkv).shape
    (40, 8)
"""


def fused_qkv_block_attention(
    x: Float[Array, "*batch T D"],
    w_qkv: Float[Array, "D columns"],
    bias: Float[Array, " columns"] | None = None,
    *,
    query_heads: int,
    key_heads: int,
    head_dim: int,
    block_size: int = 64,
    sequence_offsets: Int[Array, " offsets"] | None = None,
    block_lengths: Int[Array, " blocks"] | None = None,
    rotary: Rotary | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    implementation: str | Sequence[str] | None = None,
) -> Float[Array, "*batch T N H"]:
    """Project tokens to query, key and value by one matrix product, then attend within blocks.

    Equal to `block_diagonal_attention` on the three parts of `x @ w_qkv + bias`. The residuals are `x`, `w_qkv` and the
    projected buffer instead of query, key and value. The buffer has the name `BLOCK_DIAGONAL_QKV`, by which a
    rematerialisation policy may drop or keep it. The backward pass writes the gradients of query, key and value side by
    side into one buffer of the same shape. One product or sum each turns it into the gradients of `x`, `w_qkv` and
    `bias`, accumulated in float32 and rounded once.

    Works under the transformations that `block_diagonal_attention` lists. Devices of a mesh divide the batch rows of
    `x`; the gradients of `w_qkv` and `bias` are summed over them in float32. Heads are not divided, because no
    contiguous part of the columns has heads of all three kinds. If the weights are sharded over columns, an explicit
    mesh gathers the weights, and an automatic one gathers the projected buffer.

    For tensor parallelism, use three products and `block_diagonal_attention`. Or sort the columns by device, and call
    inside `jax.shard_map` with one device's heads.

    Args:
        x: [B, T, D], or packed [T, D]. float16, bfloat16, float32 or float64.
        w_qkv: [D, (N + 2 K) H] in the dtype of `x`, with columns query | key | value, each of them head by head.
        bias: [(N + 2 K) H] in the dtype of `x`, or None.
        query_heads: N, a multiple of `key_heads`.
        key_heads: K.
        head_dim: H.
        block_size, sequence_offsets, block_lengths, rotary, scale, is_causal, implementation: as for
            `block_diagonal_attention`, with `x` instead of `query`.

    Returns:
        The attention output [B, T, N, H] or [T, N, H] in the dtype of `x`.

    Raises:
        ValueError: an argument is wrong; the message names it, its value and the remedy.
        NotImplementedError: none of the requested implementations supports this call; the message says why.

    References:
        Projections of multi-head attention: Vaswani et al., "Attention Is All You Need" (2017). One matrix in the
        layout of `in_proj_weight` of `torch.nn.MultiheadAttention` (transposed). Attention: see
        `block_diagonal_attention`.

    Example:
        >>> import jax
        >>> from blockdiag import fused_qkv_block_attention
        >>> x = jax.random.normal(jax.random.key(0), (1, 40, 8))
        >>> w_qkv = jax.random.normal(jax.random.key(1), (8, (4 + 2 * 2) * 16))
        >>> fused_qkv_block_attention(x, w_qkv, query_heads=4, key_heads=2, head_dim=16, block_size=16).shape
        (1, 40, 4, 16)
    """
    x, w_qkv = jnp.asarray(x), jnp.asarray(w_qkv)
    bias = None if bias is None else jnp.asarray(bias)
    validation.check_projection(x, w_qkv, bias, query_heads, key_heads, head_dim)
    call = prepare_call(
        jax.ShapeDtypeStruct((*x.shape[:-1], query_heads, head_dim), x.dtype),
        jax.ShapeDtypeStruct((*x.shape[:-1], key_heads, head_dim), x.dtype),
        block_size=block_size,
        sequence_offsets=sequence_offsets,
        block_lengths=block_lengths,
        rotary=rotary,
        scale=scale,
        is_causal=is_causal,
        implementation=implementation,
        is_packed=True,
    )
    x = whole_but("fused_qkv_block_attention", x, batch)
    arrays = (x, *_gathered((w_qkv, bias)), sequence_offsets, block_lengths, rotary)
    return _fused(call, *arrays)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _fused(
    call: Call,
    x: Array,
    w_qkv: Array,
    bias: Array | None,
    sequence_offsets: Array | None,
    block_lengths: Array | None,
    rotary: Rotary | None,
) -> Array:
    """Compute the array part of the public function, as one compiled program even outside `jax.jit`."""
    tokens_shape = x.shape[:-1]
    problem = call.problem
    tables = canonical_tables(call, tokens_shape, sequence_offsets, block_lengths, rotary)
    rows = x.reshape(math.prod(tokens_shape), x.shape[-1])
    if call.is_reference:
        output, _, _ = _compute(call, rows, w_qkv, bias, tables)
    else:
        rows, w_qkv, bias, tables = on_common_axes(rows, w_qkv, bias, tables)
        bias = None if bias is None else reverse_only(bias)
        output = _project_and_attend(call, reverse_only(rows), reverse_only(w_qkv), bias, tables)
    return output.reshape(*tokens_shape, problem.query_heads, problem.head_dim)


def _compute(call: Call, x: Array, w_qkv: Array, bias: Array | None, tables: tuple) -> tuple[Array, Array, Statistics]:
    """Return the attention output [tokens, N, H], the projected buffer [tokens, (N + 2 K) H] and the statistics."""
    projected = _product("td,dc->tc", x, w_qkv)
    if bias is not None:
        projected = projected + bias.astype(projected.dtype)[None, :]
    projected = checkpoint_name(projected.astype(x.dtype), BLOCK_DIAGONAL_QKV)
    output, statistics = attention_and_statistics(call, _by_heads(call, projected), None, None, tables)
    return output, projected, statistics


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _project_and_attend(call: Call, x: Array, w_qkv: Array, bias: Array | None, tables: tuple) -> Array:
    output, _, _ = _compute(call, x, w_qkv, bias, tables)
    return output


def _project_and_attend_forward(
    call: Call, x: Array, w_qkv: Array, bias: Array | None, tables: tuple
) -> tuple[Array, tuple]:
    output, projected, statistics = _compute(call, x, w_qkv, bias, tables)
    output = checkpoint_name(output, BLOCK_DIAGONAL_OUTPUT)
    if statistics:
        statistics = (output, checkpoint_name(statistics[1], BLOCK_DIAGONAL_OUTPUT))
    return output, (x, w_qkv, bias, projected, tables, statistics)


def _project_and_attend_backward(call: Call, residuals: tuple, cotangent: Array) -> tuple:
    x, w_qkv, bias, projected, tables, statistics = residuals
    packed = _by_heads(call, projected)
    gradient, _, _ = attention_gradients(call, packed, None, None, tables, cotangent, statistics)
    gradient = placed_like(gradient, packed).reshape(projected.shape)
    x_gradient = _product("tc,dc->td", gradient, w_qkv, like=x).astype(x.dtype)
    w_gradient = _product("td,tc->dc", x, gradient, like=w_qkv).astype(x.dtype)
    bias_gradient = None
    if bias is not None:
        bias_gradient = jnp.sum(gradient, axis=0, dtype=accumulation_dtype(x.dtype)).astype(x.dtype)
    return x_gradient, w_gradient, bias_gradient, None


_project_and_attend.defvjp(_project_and_attend_forward, _project_and_attend_backward)


def _by_heads(call: Call, projected: Array) -> Array:
    """Reshape the projected buffer to [tokens, N + 2K, H]."""
    problem = call.problem
    return projected.reshape(problem.tokens, problem.packed_heads, problem.head_dim)


def _product(subscripts: str, left: Array, right: Array, like: Array | None = None) -> Array:
    """Return a matrix product accumulated in float32 (float64 for float64), in full precision for float32 operands.

    Args:
        subscripts, left, right: as for `jnp.einsum`.
        like: an array of the product's shape; the product is sharded like it over explicit mesh axes.
    """
    wide = accumulation_dtype(left.dtype)
    precision = jax.lax.Precision.HIGHEST if left.dtype == wide else None
    sharding = None if like is None else jax.typeof(like).sharding
    if sharding is not None and AxisType.Explicit not in sharding.mesh.axis_types:
        sharding = None
    return jnp.einsum(subscripts, left, right, preferred_element_type=wide, precision=precision, out_sharding=sharding)


def _gathered(arrays: tuple[Array | None, ...]) -> tuple[Array | None, ...]:
    """Gather weights over explicit mesh axes; their gradients are sharded like the given weights."""

    def gather(x: Array) -> Array:
        mesh = explicit_mesh([x])
        is_sharded = any(entry is not None for entry in jax.typeof(x).sharding.spec)
        return jax.sharding.reshard(x, NamedSharding(mesh, P())) if mesh is not None and is_sharded else x

    return jax.tree.map(gather, arrays)
