"""Block-diagonal attention: the public function, its derivative rule and its batching rule."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from blockdiag.common import validation
from blockdiag.common.context_parallel import ContextParallel
from blockdiag.common.derivatives import on_common_axes, reverse_only
from blockdiag.common.dispatch import call_implementation, normalise_implementation, resolve
from blockdiag.common.division import divide_array_code, divisible
from blockdiag.common.meshes import placed_like, whole_but
from blockdiag.common.packing import tiles_from_lengths, tiles_from_offsets
from blockdiag.common.rotary import Rotary
from blockdiag.common.rule import Rule
from blockdiag.common.sharded_axes import batch_and_heads
from blockdiag.common.shards import Local, Part
from blockdiag.ops.block_diagonal import sharding
from blockdiag.ops.block_diagonal.batching import fold_mapped_axis
from blockdiag.ops.block_diagonal.checks import describe_call
from blockdiag.ops.block_diagonal.context import attend_to_shared_tokens
from blockdiag.ops.block_diagonal.problem import BLOCK_DIAGONAL, BlockDiagonalProblem

BLOCK_DIAGONAL_OUTPUT = "blockdiag_block_diagonal_output"
"""Name of the attention output for rematerialisation policies.

`jax.checkpoint(f, policy=jax.checkpoint_policies.save_only_these_names(blockdiag.BLOCK_DIAGONAL_OUTPUT))` keeps the
output of each attention call, so that the backward pass does not run the forward kernel again. With blocks of at most
256 rows, the backward kernel needs only query, key and value. With longer blocks it also needs the output and the
log-sum-exp, which this name covers as well.

Example:
    >>> import functools
    >>> import jax
    >>> import blockdiag
    >>> policy = jax.checkpoint_policies.save_only_these_names(blockdiag.BLOCK_DIAGONAL_OUTPUT)
    >>> @functools.partial(jax.checkpoint, policy=policy)
    ... def total(x):
    ...     return blockdiag.block_diagonal_attention(x, x, x, block_size=16).sum()
    >>> jax.eval_shape(jax.grad(total), jax.ShapeDtypeStruct((40, 2, 16), jax.numpy.bfloat16)).shape
    (40, 2, 16)
"""


def block_diagonal_attention(
    query: Float[Array, "*batch T N H"],
    key: Float[Array, "*batch T K H"],
    value: Float[Array, "*batch T K H"],
    *,
    block_size: int = 64,
    sequence_offsets: Int[Array, " offsets"] | None = None,
    block_lengths: Int[Array, " blocks"] | None = None,
    rotary: Rotary | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    implementation: str | Sequence[str] | None = None,
    context_parallel: ContextParallel | None = None,
) -> Float[Array, "*batch T N H"]:
    """Compute self-attention in which every token attends within its own fixed-size block of its own sequence.

    Blocks start at the first token of each sequence and never span two sequences. The last block of a sequence may be
    shorter. Query head n attends to key head n // (N // K): K = N is multi-head attention, K = 1 is multi-query
    attention. Scores, softmax and sums are float32 (float64 for float64 arrays). The output and each gradient are
    rounded once. NaN and infinity stay within their block.

    Works under `jax.jit`, `jax.grad` (any number of times), `jax.vmap` over any axes, `jax.checkpoint` (see
    `BLOCK_DIAGONAL_OUTPUT`), `jax.shard_map` and `jax.export`. Forward-mode differentiation raises a TypeError except
    with `implementation="reference"`. The residuals of the backward pass are the arguments. Blocks of more than 256
    rows add the output and one float32 log-sum-exp per row and head. `rotary`, `sequence_offsets` and `block_lengths`
    are constants under differentiation: their gradient is zero.

    Operands may be sharded over batch rows and heads, packed sequences over heads, on meshes with automatic or explicit
    axes. Each device then computes its own part without communication. Sharded tokens are gathered, with a warning,
    unless `context_parallel` is given. See docs/several_gpus.md.

    Args:
        query: [B, T, N, H], B sequences of T tokens. Or packed [T, N, H]: one sequence, or the sequences that
            `sequence_offsets` or `block_lengths` describe. float16, bfloat16, float32 or float64. T may be any number.
        key, value: [B, T, K, H] or [T, K, H] in the dtype of `query`, N a multiple of K.
        block_size: rows of a block, any positive number; with `block_lengths` the maximum. The scores of a block of
            up to 256 rows are one tile. Longer blocks are computed as flash attention (docs/block_diagonal.md).
        sequence_offsets: int32 [num_sequences + 1], only for packed arrays: sequence s is rows [offsets[s],
            offsets[s + 1]). Offsets start with 0 and do not decrease; sequences may be empty. Rows after the last
            offset belong to no sequence: their output and gradients are 0. Known values are checked; outside `jax.jit`
            the check waits until they are computed. Traced values cannot be checked. They are clipped to [0, T], and
            an offset below its predecessor counts as equal to it. Rows before the first offset then belong to no
            sequence either.
        block_lengths: int32 [num_blocks], only for packed arrays and instead of `sequence_offsets`: the rows of each
            block, 0..block_size, back to back. Rows after the last block give 0. If a traced length exceeds
            `block_size`, the excess rows belong to no block.
        rotary: rotary embedding of query and key, or of the operands in its `apply_to`. Fused into the forward and
            the backward pass.
        scale: positive factor on the scores; 1 / sqrt(H) when None. Known when tracing.
        is_causal: whether a token attends only to itself and earlier tokens of its block.
        implementation: which implementation runs. None chooses by platform when the program is lowered: "triton" on
            CUDA where it supports the call, "xla" otherwise. A name ("reference", "xla", "triton" or "pallas") selects
            that one; on a CPU "triton" and "pallas" run in slow interpreters. A sequence selects the first that
            supports the call.
        context_parallel: the mesh axis along which devices share the tokens of each sequence; see `ContextParallel`.
            Sequences that are cut between blocks need no communication. Devices that share a block send each other
            at most `block_size - 1` rows. Where a device has fewer rows than that, devices exchange tokens for heads.
            Inside `jax.shard_map`, operands are the device's tokens; offsets and lengths describe all tokens.

    Returns:
        The attention output, in the shape and dtype of `query`.

    Raises:
        ValueError: an argument is wrong; the message names it, its value and the remedy.
        NotImplementedError: none of the requested implementations supports this call; the message says why.

    References:
        Attention within blocks of tokens: the local attention of Liu et al., "Generating Wikipedia by Summarizing Long
        Sequences" (2018). Fixed blocks of packed sequences with a fused rotary embedding: the block attention of
        Meta's ads_model_kernel_library (2026). Blocks of more than 256 rows: FlashAttention of Dao et al. (2022).
        Grouped key heads: Ainslie et al., "GQA" (2023).

    Example:
        >>> import jax
        >>> from blockdiag import block_diagonal_attention
        >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 100, 4, 32))
        >>> block_diagonal_attention(query, key, value, block_size=32).shape
        (2, 100, 4, 32)
    """
    query, key, value = jnp.asarray(query), jnp.asarray(key), jnp.asarray(value)
    validation.check_operands(query, key, value)
    if context_parallel is not None:
        attend = functools.partial(
            block_diagonal_attention,
            block_size=block_size,
            scale=scale,
            is_causal=is_causal,
            implementation=implementation,
        )
        return attend_to_shared_tokens(
            context_parallel,
            attend,
            query,
            key,
            value,
            sequence_offsets,
            block_lengths,
            rotary,
            block_size=block_size,
            is_causal=is_causal,
        )
    call = prepare_call(
        query,
        key,
        block_size=block_size,
        sequence_offsets=sequence_offsets,
        block_lengths=block_lengths,
        rotary=rotary,
        scale=scale,
        is_causal=is_causal,
        implementation=implementation,
    )
    query, key, value = whole_but("block_diagonal_attention", (query, key, value), batch_and_heads)
    return _attention(call, query, key, value, sequence_offsets, block_lengths, rotary)


type Gradients = tuple[Array, Array | None, Array | None]

type Statistics = tuple[()] | tuple[Array, Array]
"""For long blocks, the output [tokens, N, H] and log-sum-exp [tokens, N] of the forward pass; otherwise empty."""


@dataclass(frozen=True, slots=True)
class Call:
    """The static part of a call: the problem and the implementations to try (see `dispatch.resolve`)."""

    problem: BlockDiagonalProblem
    implementations: tuple[str, ...] | None

    @property
    def is_reference(self) -> bool:
        """True if the reference computes the call, so that JAX differentiates and maps it without rules of ours."""
        return resolve(self.problem, self.implementations).elsewhere.name == "reference"


def prepare_call(
    query: Any, key: Any, *, implementation: str | Sequence[str] | None, is_packed: bool = False, **options: Any
) -> Call:
    """Check every argument except the operands, and return the static call; see `checks.describe_call`."""
    problem = describe_call(query, key, is_packed=is_packed, **options)
    names = normalise_implementation(implementation, BLOCK_DIAGONAL)
    resolve(problem, names)
    return Call(problem, names)


def canonical_tables(
    call: Call,
    tokens_shape: Sequence[int],
    sequence_offsets: Array | None,
    block_lengths: Array | None,
    rotary: Rotary | None,
) -> tuple[Array | None, tuple[Array, Array, Array | None] | None]:
    """Return the tile table and the rotary arrays of the canonical call, for tokens of shape [B, T] or [T]."""
    problem = call.problem
    tiles = None
    if sequence_offsets is not None:
        tiles = tiles_from_offsets(jnp.asarray(sequence_offsets), problem.tokens, problem.block_size)
    elif block_lengths is not None:
        tiles = tiles_from_lengths(jnp.asarray(block_lengths), problem.tokens, problem.block_size)
    if rotary is None:
        return tiles, None
    # The derivative rule refuses tangents of the tables instead of ignoring them, so they are stopped here.
    cos, sin = (jax.lax.stop_gradient(jnp.asarray(x)).reshape(-1, x.shape[-1]) for x in (rotary.cos, rotary.sin))
    positions = None
    if rotary.positions is not None:
        positions = jnp.asarray(rotary.positions)
        positions = positions.reshape((1,) * (len(tokens_shape) - positions.ndim) + positions.shape)
        positions = jnp.broadcast_to(positions, tokens_shape).reshape(-1)
    return tiles, (cos, sin, positions)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _attention(
    call: Call,
    query: Array,
    key: Array,
    value: Array,
    sequence_offsets: Array | None,
    block_lengths: Array | None,
    rotary: Rotary | None,
) -> Array:
    """Compute the array part of the public function, as one compiled program even outside `jax.jit`."""
    tables = canonical_tables(call, query.shape[:-2], sequence_offsets, block_lengths, rotary)
    shape = query.shape
    query, key, value = (x.reshape(call.problem.tokens, *x.shape[-2:]) for x in (query, key, value))
    return differentiable_attention(call, query, key, value, tables).reshape(shape)


def differentiable_attention(call: Call, query: Array, key: Array | None, value: Array | None, tables: tuple) -> Array:
    """Compute the canonical call with its derivative, batching and sharding rules.

    Args:
        call: the static part.
        query: [tokens, N, H]; [tokens, N + 2K, H] in a packed problem, whose key and value are None.
        key, value: [tokens, K, H].
        tables: tile table or None, and rotary arrays or None.
    """
    output, _ = attention_and_statistics(call, query, key, value, tables)
    return output


def attention_and_statistics(
    call: Call, query: Array, key: Array | None, value: Array | None, tables: tuple
) -> tuple[Array, Statistics]:
    """Return the attention output and the statistics that `attention_gradients` can reuse."""
    if call.is_reference:
        output = _reference(call, query, key, value, *tables)
        return checkpoint_name(output, BLOCK_DIAGONAL_OUTPUT), ()
    query, key, value, tables = on_common_axes(query, key, value, tables)
    query, key, value = jax.tree.map(reverse_only, (query, key, value))
    output, log_sum = _attend(call, query, key, value, tables)
    return output, () if log_sum is None else jax.lax.stop_gradient((output, log_sum))


def _reference(call: Call, *operands: Any) -> Array:
    def local(part: Part) -> Any:
        problem = sharding.local_problem(call.problem, part)
        return functools.partial(call_implementation, "forward", problem, call.implementations)

    return divide_array_code(sharding.rule(call.problem, call.implementations, "forward", operands), local, operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    call: Call, query: Array, key: Array | None, value: Array | None, tables: tuple
) -> tuple[Array, Array | None]:
    """Return the output and, for long blocks, the log-sum-exp, which has no derivative."""
    if call.problem.is_long:
        return divisible(_plan, call, "forward_with_log_sum")(query, key, value, *tables)
    return divisible(_plan, call, "forward")(query, key, value, *tables), None


def _attend_forward(
    call: Call, query: Array, key: Array | None, value: Array | None, tables: tuple
) -> tuple[tuple[Array, Array | None], tuple]:
    # Calls `_attend` itself rather than its body, so that a second differentiation finds this rule again.
    output, log_sum = _attend(call, query, key, value, tables)
    # The name must be given inside this rule: a policy cannot see into it from outside.
    output, log_sum = checkpoint_name((output, log_sum), BLOCK_DIAGONAL_OUTPUT)
    statistics = () if log_sum is None else (output, log_sum)
    return (output, log_sum), (query, key, value, tables, statistics)


def _attend_backward(call: Call, residuals: tuple, cotangents: tuple[Array, Array | None]) -> tuple:
    query, key, value, tables, statistics = residuals
    cotangent, _ = cotangents
    gradients = attention_gradients(call, query, key, value, tables, cotangent, statistics)
    return *placed_like(gradients, (query, key, value)), None


_attend.defvjp(_attend_forward, _attend_backward)


def attention_gradients(
    call: Call,
    query: Array,
    key: Array | None,
    value: Array | None,
    tables: tuple,
    cotangent: Array,
    statistics: Statistics = (),
) -> Gradients:
    """Return the gradients of the canonical call with respect to query, key and value.

    The gradients are themselves differentiable in reverse mode. `statistics` are those of the same operands, or empty
    to compute them again.
    """
    query, key, value, cotangent = jax.tree.map(reverse_only, (query, key, value, cotangent))
    return _gradients(call, query, key, value, cotangent, tables, statistics)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gradients(
    call: Call,
    query: Array,
    key: Array | None,
    value: Array | None,
    cotangent: Array,
    tables: tuple,
    statistics: Statistics,
) -> Gradients:
    return divisible(_plan, call, "backward")(query, key, value, *tables, cotangent, *statistics)


def _gradients_forward(
    call: Call,
    query: Array,
    key: Array | None,
    value: Array | None,
    cotangent: Array,
    tables: tuple,
    statistics: Statistics,
) -> tuple[Gradients, tuple]:
    gradients = _gradients(call, query, key, value, cotangent, tables, statistics)
    return gradients, (query, key, value, cotangent, tables)


def _gradients_backward(call: Call, residuals: tuple, cotangents: Gradients) -> tuple:
    """Differentiate the gradients through the array code of the xla implementation.

    That code computes the statistics from the operands, so the statistics passed as arguments get no cotangent.
    """
    *operands, tables = residuals

    def gradients(query: Array, key: Array | None, value: Array | None, cotangent: Array) -> Gradients:
        return call_implementation("backward", call.problem, ("xla",), query, key, value, *tables, cotangent)

    _, pull_back = jax.vjp(gradients, *operands)
    return *pull_back(cotangents), None, None


_gradients.defvjp(_gradients_forward, _gradients_backward)


def _plan(call: Call, method: str, operands: tuple[Any, ...]) -> tuple[Rule, Local[Any]]:
    """Return the sharding rule of a method of the canonical call, and the function that computes a part of it."""

    def local(part: Part) -> Any:
        return _mappable(Call(sharding.local_problem(call.problem, part), call.implementations), method)

    return sharding.rule(call.problem, call.implementations, method, operands), local


@functools.lru_cache(maxsize=1024)
def _mappable(call: Call, method: str) -> Any:
    """Return a method of the canonical call with its batching rule; one function object per call."""

    @jax.custom_batching.custom_vmap
    def compute(*operands: Any) -> Any:
        return call_implementation(method, call.problem, call.implementations, *operands)

    @compute.def_vmap
    def compute_mapped(axis_size: int, is_mapped: Sequence[Any], *operands: Any) -> tuple[Any, Any]:
        problem, folded = fold_mapped_axis(call.problem, axis_size, is_mapped, operands)
        results = _mappable(Call(problem, call.implementations), method)(*folded)
        results = jax.tree.map(lambda x: x.reshape(axis_size, call.problem.tokens, *x.shape[1:]), results)
        return results, jax.tree.map(lambda _: True, results)

    return compute
