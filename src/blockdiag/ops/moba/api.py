"""MoBA (mixture of block attention): the public functions, their derivative rule and their batching rule."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from blockdiag.common.context_parallel import ContextParallel
from blockdiag.common.derivatives import on_common_axes, reverse_only
from blockdiag.common.dispatch import call_implementation, normalise_implementation, resolve
from blockdiag.common.division import divide_array_code, divisible
from blockdiag.common.dtypes import accumulation_dtype
from blockdiag.common.meshes import placed_like, whole_but
from blockdiag.common.rule import Rule
from blockdiag.common.sharded_axes import batch_and_heads
from blockdiag.common.shards import Local, Part
from blockdiag.ops.moba import sharding
from blockdiag.ops.moba.batching import fold_moba, unfold_moba
from blockdiag.ops.moba.centroids import Centroids
from blockdiag.ops.moba.checks import check_moba_operands, describe_moba_call
from blockdiag.ops.moba.context import Passes, attend_to_shared_tokens
from blockdiag.ops.moba.lists import Lists
from blockdiag.ops.moba.options import MoBAOptions
from blockdiag.ops.moba.problem import MOBA, MoBAProblem
from blockdiag.ops.moba.routing import Routing, given_choice, indices_of_choice
from blockdiag.ops.moba.tables import moba_tables

MOBA_OUTPUT = "blockdiag_moba_output"
"""Name of the attention output and its log-sum-exp for rematerialisation policies.

`jax.checkpoint(f, policy=jax.checkpoint_policies.save_only_these_names(blockdiag.MOBA_OUTPUT, blockdiag.MOBA_ROUTING))`
keeps everything that the backward pass of each attention call needs besides query, key and value. Neither the routing
nor the attention is then computed again.

Example:
    >>> import functools
    >>> import jax
    >>> import blockdiag
    >>> names = (blockdiag.MOBA_OUTPUT, blockdiag.MOBA_ROUTING)
    >>> @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(*names))
    ... def total(x):
    ...     return blockdiag.moba_attention(x, x, x, block_size=16, top_k=2).sum()
    >>> jax.eval_shape(jax.grad(total), jax.ShapeDtypeStruct((40, 2, 16), jax.numpy.bfloat16)).shape
    (40, 2, 16)
"""

MOBA_ROUTING = "blockdiag_moba_routing"
"""Name of the routing, as block-major lists, for rematerialisation policies; see `MOBA_OUTPUT`.

Example:
    >>> import functools
    >>> import jax
    >>> import blockdiag
    >>> policy = jax.checkpoint_policies.save_only_these_names(blockdiag.MOBA_ROUTING)
    >>> attend = functools.partial(blockdiag.moba_attention, block_size=16, top_k=2)
    >>> attend = jax.checkpoint(attend, policy=policy)
    >>> x = jax.ShapeDtypeStruct((40, 2, 16), jax.numpy.bfloat16)
    >>> jax.eval_shape(jax.grad(lambda x: attend(x, x, x).sum()), x).shape
    (40, 2, 16)
"""


@overload
def moba_attention(
    query: Float[Array, "*batch T N H"],
    key: Float[Array, "*batch S K H"],
    value: Float[Array, "*batch S K H"],
    *,
    block_size: int,
    top_k: int,
    return_residual: Literal[False] = False,
    **options: Unpack[MoBAOptions[Array, Routing, ContextParallel]],
) -> Float[Array, "*batch T N H"]: ...


@overload
def moba_attention(
    query: Float[Array, "*batch T N H"],
    key: Float[Array, "*batch S K H"],
    value: Float[Array, "*batch S K H"],
    *,
    block_size: int,
    top_k: int,
    return_residual: Literal[True],
    **options: Unpack[MoBAOptions[Array, Routing, ContextParallel]],
) -> tuple[Float[Array, "*batch T N H"], Float[Array, "*batch T N"]]: ...


def moba_attention(
    query: Float[Array, "*batch T N H"],
    key: Float[Array, "*batch S K H"],
    value: Float[Array, "*batch S K H"],
    *,
    block_size: int,
    top_k: int,
    scale: float | None = None,
    is_causal: bool = True,
    sequence_offsets: Int[Array, " offsets"] | None = None,
    key_sequence_offsets: Int[Array, " offsets"] | None = None,
    routing: Routing | None = None,
    key_mask: Bool[Array, "*batch S"] | None = None,
    implementation: str | Sequence[str] | None = None,
    context_parallel: ContextParallel | None = None,
    return_residual: bool = False,
) -> Any:
    """Compute mixture of block attention: each query attends to its own block and to the best-scoring other blocks.

    Keys are cut into blocks from the start of each sequence. A query sees its own block, up to its own position, and
    all of `top_k - 1` earlier blocks: those whose mean keys have the largest dot products with the query. Ties go to
    the later block. One softmax runs over all keys seen. `top_k=1` is attention within blocks; with `top_k` equal to
    the number of blocks it is full causal attention. Without `is_causal` a query's own block is not special, and the
    query sees the best `top_k` blocks of the whole sequence.

    Query head n attends to key head n // (N // K), and each query head chooses its own blocks. Mean keys, their dot
    products, scores, softmax and sums are float32 (float64 for float64 arrays). The output and each gradient are
    rounded once. NaN and infinity stay within their sequence. There is no dropout.

    Each implementation sums in a fixed order, so its results are bitwise repeatable. Matrix units round differently by
    GPU and tile shape. Two kernels may therefore choose different blocks where dot products differ only by rounding
    (see docs/moba.md, Numerics).

    Gradients treat the routing as constant, as is usual for MoBA. Works under `jax.jit`, `jax.grad` (any number of
    times), `jax.vmap` over any axes, `jax.checkpoint` (see `MOBA_OUTPUT`), `jax.shard_map` and `jax.export`.
    Forward-mode differentiation raises a TypeError except with `implementation="reference"`. The residuals of the
    backward pass are the arguments, the output, its log-sum-exp and the routing as block-major lists.

    Operands may be sharded over batch rows and heads, on meshes with automatic or explicit axes. Each device then
    computes its own part, even with fewer key heads than devices. Sharded tokens are gathered, with a warning, unless
    `context_parallel` is given. See docs/several_gpus.md.

    Args:
        query: [B, T, N, H], B sequences of T tokens. Or packed [T, N, H]: one sequence, or the sequences that
            `sequence_offsets` describes. float16, bfloat16, float32 or float64. T may be any number.
        key, value: [B, S, K, H] or [S, K, H] in the dtype of `query`, N a multiple of K. Where S differs from T, the
            last query has the position of the last key. In causal calls, a query before the first key sees nothing
            and gives 0.
        block_size: keys of a block, a multiple of 16 from 16 to 4096.
        top_k: number of blocks that a query sees, including its own, 1..64.
        scale: positive factor on the scores of the softmax; 1 / sqrt(H) when None. Known when tracing.
        is_causal: whether a token attends only to itself and earlier tokens.
        sequence_offsets: int32 [num_sequences + 1], only for packed arrays: sequence s is rows [offsets[s],
            offsets[s + 1]) of `query`. Offsets start with 0 and do not decrease; sequences may be empty. Rows after
            the last offset belong to no sequence: their output and gradients are 0. Known values are checked; outside
            `jax.jit` the check waits until they are computed. Traced values cannot be checked. They are clipped to
            [0, T], and an offset below its predecessor counts as equal to it.
        key_sequence_offsets: int32 [num_sequences + 1], the same for rows of `key` and `value`; `sequence_offsets` when
            None.
        routing: the blocks that each query sees, instead of the best-scoring ones. Comes from `moba_routing`, or is
            made or edited by hand; indices have shape [B, T, N, top_k] or [T, N, top_k]. See `Routing`.
        key_mask: bool [B, S] or [S], True for keys that take part. Masked keys are not seen and do not count in the
            mean key of their block. Blocks without any unmasked key are not chosen.
        implementation: which implementation runs. None chooses by platform when the program is lowered: "triton" on
            CUDA where it supports the call, "xla" otherwise. A name ("reference", "xla" or "triton") selects that one;
            on a CPU "triton" runs in a slow interpreter. A sequence selects the first that supports the call.
        context_parallel: the mesh axis along which devices share the tokens of each sequence, and their strategy; see
            `ContextParallel`. Inside `jax.shard_map`, operands are the device's tokens and `sequence_offsets`
            describes all tokens.
        return_residual: whether to return the log-sum-exp too.

    Returns:
        The attention output, in the shape and dtype of `query`. With `return_residual`, also the log-sum-exp (natural
        logarithm) of the scaled scores seen: float32 [B, T, N] or [T, N], float64 for float64 arrays, and -inf where a
        query sees nothing. Both are differentiable.

    Raises:
        ValueError: an argument is wrong; the message names it, its value and the remedy.
        NotImplementedError: none of the requested implementations supports this call; the message says why.

    References:
        Lu et al., "MoBA: Mixture of Block Attention for Long-Context LLMs" (2025). Small blocks, and block-major lists
        of queries: Xiao et al., "Optimizing Mixture of Block Attention" (FlashMoBA, 2025).

    Example:
        >>> import jax
        >>> from blockdiag import moba_attention
        >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 100, 4, 32))
        >>> moba_attention(query, key, value, block_size=16, top_k=3).shape
        (2, 100, 4, 32)
    """
    query, key, value = jnp.asarray(query), jnp.asarray(key), jnp.asarray(value)
    check_moba_operands(query, key, value)
    if context_parallel is not None and (routing is not None or key_sequence_offsets is not None):
        raise ValueError("`context_parallel` does not support `routing` or `key_sequence_offsets`; leave them out")
    options: Any = {
        "block_size": block_size,
        "top_k": top_k,
        "scale": scale,
        "is_causal": is_causal,
        "implementation": implementation,
    }
    if context_parallel is not None:
        results = attend_to_shared_tokens(
            context_parallel, Passes(_find_centroids, _route_tokens, _choose_by_centroids, _attend_to_tokens),
            query, key, value, sequence_offsets, key_mask, options, return_residual=return_residual,
        )  # fmt: skip
    else:
        results = _attend_to_tokens(
            query, key, value, sequence_offsets, key_sequence_offsets, key_mask, routing=routing, **options
        )
    return results if return_residual else results[0]


def moba_routing(
    query: Float[Array, "*batch T N H"],
    key: Float[Array, "*batch S K H"],
    *,
    block_size: int,
    top_k: int,
    is_causal: bool = True,
    sequence_offsets: Int[Array, " offsets"] | None = None,
    key_sequence_offsets: Int[Array, " offsets"] | None = None,
    key_mask: Bool[Array, "*batch S"] | None = None,
    implementation: str | Sequence[str] | None = None,
) -> Routing:
    """Return the blocks that each query of each head sees in `moba_attention` with the same arguments.

    The result can be inspected, converted, edited and passed to `moba_attention`, also in several layers. It is
    constant under differentiation.

    Args:
        query, key, block_size, top_k, is_causal, sequence_offsets, key_sequence_offsets, key_mask, implementation: see
            `moba_attention`.

    Returns:
        A `Routing` with indices int32 [B, T, N, top_k] or [T, N, top_k], which number blocks within the sequence. In
        causal calls the query's own block comes first. The other blocks follow by descending score; of equal scores,
        the later block comes first. The remaining entries are -1.

    Raises:
        ValueError: an argument is wrong; the message names it, its value and the remedy.
        NotImplementedError: none of the requested implementations supports this call; the message says why.

    References:
        Lu et al., "MoBA: Mixture of Block Attention for Long-Context LLMs" (2025).

    Example:
        >>> import jax
        >>> from blockdiag import moba_routing
        >>> query, key = jax.random.normal(jax.random.key(0), (2, 100, 4, 32))
        >>> moba_routing(query, key, block_size=16, top_k=3).indices.shape
        (100, 4, 3)
    """
    query, key = jnp.asarray(query), jnp.asarray(key)
    check_moba_operands(query, key)
    call = prepare_moba_call(
        query,
        key,
        block_size=block_size,
        top_k=top_k,
        scale=None,
        is_causal=is_causal,
        sequence_offsets=sequence_offsets,
        key_sequence_offsets=key_sequence_offsets,
        key_mask=key_mask,
        routing=None,
        implementation=implementation,
    )
    arrays = (query, key, sequence_offsets, key_sequence_offsets, key_mask)
    indices = _routing(call, top_k, *arrays)
    return Routing(indices, call.problem.block_size, -(-key.shape[-3] // call.problem.block_size))


@dataclass(frozen=True, slots=True)
class Call:
    """The static part of a call: the problem and the implementations to try (see `dispatch.resolve`).

    Attributes:
        sequences: number of equally long, independent parts of the token axes; 1 for packed sequences.
    """

    problem: MoBAProblem
    implementations: tuple[str, ...] | None
    sequences: int = 1

    @property
    def is_empty(self) -> bool:
        """True if there is no query or no block to see."""
        return self.problem.query_tokens == 0 or self.problem.num_blocks == 0

    @property
    def is_reference(self) -> bool:
        """True if the reference computes the call, so that JAX differentiates and maps it without rules of ours."""
        return resolve(self.problem, self.implementations).elsewhere.name == "reference"


def prepare_moba_call(query: Any, key: Any, *, implementation: str | Sequence[str] | None, **options: Any) -> Call:
    """Check every argument except the operands, and return the static call; see `describe_moba_call`."""
    problem = describe_moba_call(query, key, **options)
    names = normalise_implementation(implementation, MOBA)
    resolve(problem, names)
    # Batched calls have no offsets, and their sequences are equally long.
    return Call(problem, names, math.prod(query.shape[:-3]))


def _attend_to_tokens(
    query: Array,
    key: Array,
    value: Array,
    sequence_offsets: Array | None,
    key_sequence_offsets: Array | None,
    key_mask: Array | None,
    *,
    routing: Routing | None = None,
    chosen: Array | None = None,
    **options: Any,
) -> tuple[Array, Array]:
    """Check the arguments of `moba_attention`, and compute its output and log-sum-exp.

    Args:
        query, key, value, sequence_offsets, key_sequence_offsets, key_mask, routing, options: arguments of the call.
        chosen: the result of `_choose` where it is known already, or None.
    """
    call = prepare_moba_call(
        query,
        key,
        sequence_offsets=sequence_offsets,
        key_sequence_offsets=key_sequence_offsets,
        key_mask=key_mask,
        routing=routing,
        **options,
    )
    query, key, value = whole_but("moba_attention", (query, key, value), batch_and_heads)
    arrays = (query, key, value, sequence_offsets, key_sequence_offsets, key_mask, routing, chosen)
    return _attention(call, *arrays)


def _route_tokens(
    query: Array,
    key: Array,
    sequence_offsets: Array | None,
    key_sequence_offsets: Array | None,
    key_mask: Array | None,
    **options: Any,
) -> Array | None:
    """Return the blocks that `_attend_to_tokens` would choose for the same arguments, its argument `chosen`."""
    call = prepare_moba_call(
        query,
        key,
        sequence_offsets=sequence_offsets,
        key_sequence_offsets=key_sequence_offsets,
        key_mask=key_mask,
        routing=None,
        **options,
    )
    if call.is_empty:
        return None
    query, key = whole_but("moba_attention", (query, key), batch_and_heads)
    chosen, _ = _route(call, query, key, sequence_offsets, key_sequence_offsets, key_mask)
    return chosen


def _find_centroids(
    problem: MoBAProblem,
    implementation: str | Sequence[str] | None,
    key: Array,
    key_mask: Array | None,
    blocks: Array,
) -> Centroids:
    """Compute the mean keys of the blocks of a table, as a call with this problem does."""
    call = Call(problem, normalise_implementation(implementation, MOBA))
    key, key_mask, blocks = on_common_axes(jax.lax.stop_gradient(key), key_mask, blocks)
    return divisible(_plan, call, "centroids")(key, key_mask, blocks)


def _choose_by_centroids(
    query: Array,
    key: jax.ShapeDtypeStruct,
    sequence_offsets: Array,
    key_sequence_offsets: Array,
    key_mask: Array | None,
    centroids: Centroids,
    **options: Any,
) -> Array:
    """Choose the blocks of each query of packed arrays, as `_choose` does, from precomputed mean keys.

    Args:
        query, sequence_offsets, key_sequence_offsets, key_mask, options: arguments of the call.
        key: shape and dtype of the call's keys.
        centroids: mean keys of all blocks.
    """
    call = prepare_moba_call(
        query,
        key,
        sequence_offsets=sequence_offsets,
        key_sequence_offsets=key_sequence_offsets,
        key_mask=key_mask,
        routing=None,
        **options,
    )
    _, queries = _tables(call, query.shape, sequence_offsets, key_sequence_offsets)
    arrays = on_common_axes(*jax.lax.stop_gradient((query, centroids)), queries)
    return divisible(_plan, call, "choose")(*arrays)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _attention(
    call: Call,
    query: Array,
    key: Array,
    value: Array,
    sequence_offsets: Array | None,
    key_sequence_offsets: Array | None,
    key_mask: Array | None,
    routing: Routing | None,
    chosen: Array | None,
) -> tuple[Array, Array]:
    """Compute the array part of `moba_attention`, as one compiled program even outside `jax.jit`."""
    shape = query.shape
    if call.is_empty:
        return jnp.zeros_like(query), jnp.full(shape[:-1], -jnp.inf, accumulation_dtype(query.dtype))
    tables = _tables(call, shape, sequence_offsets, key_sequence_offsets)
    query, key, value = (_flatten(x, shape) for x in (query, key, value))
    key_mask = None if key_mask is None else _flatten(key_mask, shape)
    indices = None if routing is None else _flatten(routing.indices, shape)
    query, key, value, key_mask, tables, indices, chosen = on_common_axes(
        query, key, value, key_mask, tables, indices, chosen
    )
    own = None
    if chosen is None and indices is None:
        chosen = _choose(call, query, key, key_mask, tables)
    elif indices is not None:
        chosen, own = _array_code(call, "choice", given_choice, indices, key_mask, *tables)
    lists = checkpoint_name(_make_lists(call, chosen), MOBA_ROUTING)
    output, log_sum = differentiable_moba(call, query, key, value, (key_mask, *tables, lists, own))
    return output.reshape(shape), log_sum.reshape(shape[:-1])


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _routing(
    call: Call,
    top_k: int,
    query: Array,
    key: Array,
    sequence_offsets: Array | None,
    key_sequence_offsets: Array | None,
    key_mask: Array | None,
) -> Array:
    """Compute the indices of `moba_routing`, as one compiled program even outside `jax.jit`."""
    shape = query.shape
    if call.is_empty:
        return jnp.full((*shape[:-1], top_k), -1, jnp.int32)
    chosen, tables = _route(call, query, key, sequence_offsets, key_sequence_offsets, key_mask)

    def indices(problem: MoBAProblem, chosen: Array, _: Array, queries: Array) -> Array:
        return indices_of_choice(problem, chosen, queries, top_k)

    return _array_code(call, "indices", indices, chosen, *tables).reshape(*shape[:-1], top_k)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _route(
    call: Call,
    query: Array,
    key: Array,
    sequence_offsets: Array | None,
    key_sequence_offsets: Array | None,
    key_mask: Array | None,
) -> tuple[Array, tuple[Array, Array]]:
    """Return the blocks that queries choose, as `_choose` does, and both tables, for a call that is not empty."""
    shape = query.shape
    tables = _tables(call, shape, sequence_offsets, key_sequence_offsets)
    query, key = _flatten(query, shape), _flatten(key, shape)
    key_mask = None if key_mask is None else _flatten(key_mask, shape)
    query, key, key_mask, tables = on_common_axes(query, key, key_mask, tables)
    return _choose(call, query, key, key_mask, tables), tables


def _tables(
    call: Call, shape: Sequence[int], sequence_offsets: Array | None, key_sequence_offsets: Array | None
) -> tuple[Array, Array]:
    """Return the block table and the query table for a query of `shape`."""
    offsets = (None if x is None else jnp.asarray(x) for x in (sequence_offsets, key_sequence_offsets))
    return moba_tables(call.problem, math.prod(shape[:-3]), *offsets)


def _flatten(x: Array, query_shape: Sequence[int]) -> Array:
    """Merge the batch axes and the token axis of an operand."""
    return jnp.asarray(x).reshape(-1, *x.shape[len(query_shape) - 2 :])


def _choose(call: Call, query: Array, key: Array, key_mask: Array | None, tables: tuple) -> Array:
    """Return the blocks that each query chooses, int32 [N, query_tokens, slots]."""
    problem = call.problem
    if problem.slots == 0:
        return jnp.zeros((problem.query_heads, problem.query_tokens, 0), jnp.int32)
    query, key = jax.lax.stop_gradient((query, key))
    return divisible(_plan, call, "route")(query, key, key_mask, *tables)


def _make_lists(call: Call, chosen: Array) -> Lists:
    """Return the block-major lists of the chosen blocks."""
    problem = call.problem
    if problem.slots == 0:
        empty = jnp.zeros((problem.query_heads, problem.num_blocks), jnp.int32)
        degrees = jnp.zeros((problem.query_heads, problem.query_tokens), jnp.int32)
        return Lists(empty, empty, chosen[:, :, 0:0].reshape(problem.query_heads, 0), degrees)
    return divisible(_plan, call, "make_lists")(chosen)


def differentiable_moba(call: Call, query: Array, key: Array, value: Array, constants: tuple) -> tuple[Array, Array]:
    """Compute output and log-sum-exp of the canonical call with its derivative, batching and sharding rules.

    Args:
        call: the static part.
        query: [query_tokens, N, H].
        key, value: [key_tokens, K, H].
        constants: operands without gradients: key mask or None, both tables, lists, and own or None.
    """
    if call.is_reference:

        def compute(problem: MoBAProblem, *operands: Any) -> Any:
            return call_implementation("forward", problem, call.implementations, *operands)

        results = _array_code(call, "forward", compute, query, key, value, *constants)
        return checkpoint_name(results, MOBA_OUTPUT)
    query, key, value, constants = on_common_axes(query, key, value, constants)
    query, key, value = jax.tree.map(reverse_only, (query, key, value))
    return _attend(call, query, key, value, constants)


def _array_code(call: Call, method: str, compute: Callable[..., Any], *operands: Any) -> Any:
    """Compute `compute(problem, *operands)`, which is array code, by the sharding rule of `method`."""

    def local(part: Part) -> Any:
        problem = sharding.local_problem(call.problem, part)
        return sharding.renumbered(problem, method, part, functools.partial(compute, problem))

    rule = sharding.rule(call.problem, call.implementations, call.sequences, method, operands)
    return divide_array_code(rule, local, operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call: Call, query: Array, key: Array, value: Array, constants: tuple) -> tuple[Array, Array]:
    return divisible(_plan, call, "forward")(query, key, value, *constants)


def _attend_forward(
    call: Call, query: Array, key: Array, value: Array, constants: tuple
) -> tuple[tuple[Array, Array], tuple]:
    # Calls `_attend` itself rather than its body, so that a second differentiation finds this rule again. The name
    # must be given inside this rule: a policy cannot see into it from outside.
    results = checkpoint_name(_attend(call, query, key, value, constants), MOBA_OUTPUT)
    return results, (query, key, value, constants, *results)


def _attend_backward(call: Call, residuals: tuple, cotangents: tuple[Array, Array]) -> tuple:
    query, key, value, constants, output, log_sum = residuals
    operands = jax.tree.map(reverse_only, (query, key, value, output, log_sum, *cotangents))
    return *placed_like(_gradients(call, operands, constants), (query, key, value)), None


_attend.defvjp(_attend_forward, _attend_backward)


type Gradients = tuple[Array, Array, Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gradients(call: Call, operands: tuple, constants: tuple) -> Gradients:
    query, key, value, *more = operands
    return divisible(_plan, call, "backward")(query, key, value, *constants, *more)


def _gradients_forward(call: Call, operands: tuple, constants: tuple) -> tuple[Gradients, tuple]:
    return _gradients(call, operands, constants), (operands, constants)


def _gradients_backward(call: Call, residuals: tuple, cotangents: Gradients) -> tuple:
    """Differentiate the gradients through the array code of the xla implementation."""
    operands, constants = residuals

    def gradients(query: Array, key: Array, value: Array, *more: Array) -> Gradients:
        return call_implementation("backward", call.problem, ("xla",), query, key, value, *constants, *more)

    _, pull_back = jax.vjp(gradients, *operands)
    return pull_back(cotangents), None


_gradients.defvjp(_gradients_forward, _gradients_backward)


def _plan(call: Call, method: str, operands: tuple[Any, ...]) -> tuple[Rule, Local[Any]]:
    """Return the sharding rule of a method of the canonical call, and the function that computes a part of it."""

    def local(part: Part) -> Any:
        problem = sharding.local_problem(call.problem, part)
        return sharding.renumbered(problem, method, part, _mappable(Call(problem, call.implementations), method))

    return sharding.rule(call.problem, call.implementations, call.sequences, method, operands), local


@functools.lru_cache(maxsize=1024)
def _mappable(call: Call, method: str) -> Any:
    """Return a method of the canonical call with its batching rule; one function object per call."""

    @jax.custom_batching.custom_vmap
    def compute(*operands: Any) -> Any:
        return call_implementation(method, call.problem, call.implementations, *operands)

    @compute.def_vmap
    def compute_mapped(axis_size: int, is_mapped: Sequence[Any], *operands: Any) -> tuple[Any, Any]:
        problem, folded = fold_moba(method, call.problem, axis_size, is_mapped, operands)
        results = _mappable(Call(problem, call.implementations), method)(*folded)
        results = unfold_moba(method, call.problem, axis_size, results)
        return results, jax.tree.map(lambda _: True, results)

    return compute
