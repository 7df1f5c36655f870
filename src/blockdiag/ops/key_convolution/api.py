"""Key convolution: the public function, its derivative rule and its batching rule."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from blockdiag.common.context_parallel import (
    ContextParallel,
    check_packing,
    on_parts,
    refuse_ring,
    roles_of,
    rows_before,
)
from blockdiag.common.derivatives import on_common_axes, reverse_only
from blockdiag.common.dispatch import (
    call_implementation,
    normalise_implementation,
    resolve,
)
from blockdiag.common.division import divide_array_code, divisible
from blockdiag.common.meshes import placed_like, whole_but
from blockdiag.common.packing import tiles_from_offsets
from blockdiag.common.rule import Rule
from blockdiag.common.sharded_axes import batch_and_channels
from blockdiag.common.shards import Local, Part
from blockdiag.ops.block_diagonal.batching import fold_rows
from blockdiag.ops.key_convolution import sharding
from blockdiag.ops.key_convolution.checks import describe_key_convolution
from blockdiag.ops.key_convolution.problem import KEY_CONVOLUTION, Activation, KeyConvolutionProblem


def key_convolution(
    key: Float[Array, "*batch T K H"],
    weights: Float[Array, "size K H"],
    *,
    sequence_offsets: Int[Array, " offsets"] | None = None,
    activation: Activation | None = "silu",
    residual: bool = True,
    implementation: str | Sequence[str] | None = None,
    context_parallel: ContextParallel | None = None,
) -> Float[Array, "*batch T K H"]:
    """Convolve each channel of the keys with the few keys before them: a short depthwise causal convolution.

    ``output[t] = key[t] + silu(sum over lags l of weights[size - 1 - l] * key[t - l])``, as MoBA does with keys before
    routing and attention. Tokens before the start of a sequence count as 0. Nothing crosses from one sequence to
    another, not even NaN and infinity. Sums, activation and residual are float32 (float64 for float64 keys). The output
    and each gradient are rounded once. Results are bitwise repeatable.

    Works under `jax.jit`, `jax.grad` (any number of times), `jax.vmap` over any axes, `jax.checkpoint`,
    `jax.shard_map` and `jax.export`. Forward-mode differentiation raises a TypeError except with
    `implementation="reference"`. The residuals of the backward pass are only the arguments.

    On a mesh with automatic or explicit axes, devices divide batch rows, heads and head elements as `key` is sharded.
    One all-reduce in float32 (float64) sums the gradient of weights that devices share.

    Args:
        key: [B, T, K, H], B sequences of T tokens. Or packed [T, K, H]: one sequence, or the sequences that
            `sequence_offsets` describes. float16, bfloat16, float32 or float64.
        weights: [size, K, H] with size 1..8, in the dtype of `key` or in float32, so that parameters of 16-bit keys may
            stay float32. The last row multiplies the current token, the row before it the previous token.
        sequence_offsets: int32 [num_sequences + 1], only for packed keys: sequence s is rows [offsets[s],
            offsets[s + 1]). Offsets start with 0 and do not decrease; sequences may be empty. Rows after the last
            offset belong to no sequence: their output and gradients are 0. Known values are checked; outside `jax.jit`
            the check waits until they are computed. Traced values cannot be checked. They are clipped to [0, T], and
            an offset below its predecessor counts as equal to it. Rows before the first offset then belong to no
            sequence either.
        activation: "silu" (z * sigmoid(z)) or None, applied to the weighted sum.
        residual: whether the key itself is added, after the activation.
        implementation: which implementation runs. None chooses by platform when the program is lowered: "triton" on
            CUDA where it supports the call, "xla" otherwise. A name ("reference", "xla" or "triton") selects that one;
            on a CPU "triton" runs in a slow interpreter. A sequence selects the first that supports the call.
        context_parallel: the mesh axis along which devices share the tokens of each sequence. Each device receives the
            last size - 1 keys of the device before it. The strategy makes no difference, except that "ring" raises a
            ValueError. Inside `jax.shard_map`, `key` is the device's tokens and `sequence_offsets` describes all
            tokens.

    Returns:
        The convolved keys, in the shape and dtype of `key`.

    Raises:
        ValueError: an argument is wrong; the message names it, its value and the remedy.
        NotImplementedError: none of the requested implementations supports this call; the message says why.

    References:
        Xiao et al., "Optimizing Mixture of Block Attention" (FlashMoBA, 2025).

    Example:
        >>> import jax
        >>> from blockdiag import key_convolution
        >>> key, weights = jax.random.normal(jax.random.key(0), (2, 100, 4, 32)), jax.numpy.zeros((3, 4, 32))
        >>> key_convolution(key, weights).shape
        (2, 100, 4, 32)
    """
    key, weights = jnp.asarray(key), jnp.asarray(weights)
    if context_parallel is not None:
        refuse_ring(context_parallel, "`key_convolution`", "leave it None, or use the strategy of the attention")
        convolve = functools.partial(
            key_convolution, activation=activation, residual=residual, implementation=implementation
        )
        return _convolve_shared_tokens(context_parallel, convolve, key, weights, sequence_offsets)
    problem = describe_key_convolution(
        key, weights, sequence_offsets=sequence_offsets, activation=activation, residual=residual
    )
    call = prepare_call(problem, implementation)
    key = whole_but("key_convolution", key, batch_and_channels)
    return _convolve_tokens(call, key, weights, sequence_offsets)


@dataclass(frozen=True, slots=True)
class Call:
    """The static part of a call: the problem and the implementations to try (see `dispatch.resolve`)."""

    problem: KeyConvolutionProblem
    implementations: tuple[str, ...] | None

    @property
    def is_reference(self) -> bool:
        """True if the reference computes the call, so that JAX differentiates and maps it without rules of ours."""
        return resolve(self.problem, self.implementations).elsewhere.name == "reference"


def prepare_call(problem: KeyConvolutionProblem, implementation: str | Sequence[str] | None) -> Call:
    """Return the static call of a problem, after checking that an implementation supports it."""
    names = normalise_implementation(implementation, KEY_CONVOLUTION)
    resolve(problem, names)
    return Call(problem, names)


def _convolve_shared_tokens(
    context: ContextParallel,
    convolve: Callable[..., Array],
    key: Array,
    weights: Array,
    sequence_offsets: Array | None,
) -> Array:
    """Convolve keys whose tokens are divided over devices; each device receives the few keys before its own."""

    def on_device(key: Array, weights: Array, offsets: Array | None) -> Array:
        tokens, before = key.ndim - 3, weights.shape[0] - 1
        if before == 0:
            return convolve(key, weights, sequence_offsets=_own_offsets(context, offsets, key.shape[tokens], 0))
        if before > key.shape[tokens]:
            raise ValueError(
                f"`weights` of {before + 1} rows need at least {before} tokens on each device, got "
                f"{key.shape[tokens]}; pad them, to {before * jax.lax.axis_size(context.axis)} in all"
            )
        # The first device receives 0, the value of keys before a sequence.
        longer = jnp.concatenate([rows_before(key, context.axis, tokens, before), key], axis=tokens)
        offsets = _own_offsets(context, offsets, key.shape[tokens], before)
        return jax.lax.slice_in_dim(convolve(longer, weights, sequence_offsets=offsets), before, None, axis=tokens)

    check_packing(context, key.shape[:-2], sequence_offsets, operand="key")
    offsets = None if sequence_offsets is None else jnp.asarray(sequence_offsets)
    heads = roles_of(key, "th.")
    return on_parts(context, on_device, (key, weights, offsets), (heads, ".h.", "."), heads)


def _own_offsets(context: ContextParallel, offsets: Array | None, own: int, before: int) -> Array | None:
    """Return offsets of packed sequences in a device's rows: `before` rows of the previous device, then `own` rows."""
    if offsets is None:
        return None
    first = jax.lax.axis_index(context.axis).astype(offsets.dtype) * own - before
    return jnp.clip(offsets - first, 0, own + before)


def canonical_arrays(
    call: Call, key: Array, weights: Array, sequence_offsets: Array | None
) -> tuple[Array, Array, Array | None]:
    """Return key [tokens, K, H], weights [1, size, K, H], and the tile table of a packed call."""
    problem = call.problem
    tiles = None
    if sequence_offsets is not None:
        tiles = tiles_from_offsets(jnp.asarray(sequence_offsets), problem.tokens, problem.tile_rows)
    return key.reshape(problem.tokens, *key.shape[-2:]), weights[None], tiles


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _convolve_tokens(call: Call, key: Array, weights: Array, sequence_offsets: Array | None) -> Array:
    """Compute the array part of the public function, as one compiled program even outside `jax.jit`."""
    arrays = canonical_arrays(call, key, weights, sequence_offsets)
    return differentiable_convolution(call, *arrays).reshape(key.shape)


def differentiable_convolution(call: Call, key: Array, weights: Array, tiles: Array | None) -> Array:
    """Compute the canonical call with its derivative, batching and sharding rules."""
    if call.is_reference:
        return _divided_array_code(call, "forward", key, weights, tiles)
    key, weights, tiles = on_common_axes(key, weights, tiles)
    return _convolve(call, reverse_only(key), reverse_only(weights), tiles)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _convolve(call: Call, key: Array, weights: Array, tiles: Array | None) -> Array:
    return divisible(_plan, call, "forward")(key, weights, tiles)


def _convolve_forward(call: Call, key: Array, weights: Array, tiles: Array | None) -> tuple[Array, tuple]:
    # Calls `_convolve` itself rather than its body, so that a second differentiation finds this rule again.
    return _convolve(call, key, weights, tiles), (key, weights, tiles)


def _convolve_backward(call: Call, residuals: tuple, cotangent: Array) -> tuple:
    key, weights, tiles = residuals
    gradients = convolution_gradients(call, key, weights, tiles, cotangent)
    return *placed_like(gradients, (key, weights)), None


_convolve.defvjp(_convolve_forward, _convolve_backward)


def convolution_gradients(
    call: Call, key: Array, weights: Array, tiles: Array | None, cotangent: Array
) -> tuple[Array, Array]:
    """Return the gradients with respect to key and weights, which are themselves differentiable in reverse mode."""
    key, weights, cotangent = map(reverse_only, (key, weights, cotangent))
    return _gradients(call, key, weights, cotangent, tiles)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gradients(call: Call, key: Array, weights: Array, cotangent: Array, tiles: Array | None) -> tuple[Array, Array]:
    d_key, d_weights = divisible(_plan, call, "backward")(key, weights, tiles, cotangent)
    return d_key, d_weights.astype(weights.dtype)


def _gradients_forward(
    call: Call, key: Array, weights: Array, cotangent: Array, tiles: Array | None
) -> tuple[tuple[Array, Array], tuple]:
    return _gradients(call, key, weights, cotangent, tiles), (key, weights, cotangent, tiles)


def _gradients_backward(call: Call, residuals: tuple, cotangents: tuple[Array, Array]) -> tuple:
    """Differentiate the gradients through the array code of the xla implementation."""
    *operands, tiles = residuals

    def gradients(key: Array, weights: Array, cotangent: Array) -> tuple[Array, Array]:
        given = key, weights, tiles, cotangent
        d_key, d_weights = _divided_array_code(Call(call.problem, ("xla",)), "backward", *given)
        return d_key, d_weights.astype(weights.dtype)

    _, pull_back = jax.vjp(gradients, *operands)
    return *placed_like(pull_back(cotangents), tuple(operands)), None


_gradients.defvjp(_gradients_forward, _gradients_backward)


def _divided_array_code(call: Call, method: str, *operands: Any) -> Any:
    """Compute a method of the canonical call that is array code, and divide it over explicit mesh axes."""

    def local(part: Part) -> Any:
        problem = sharding.local_problem(call.problem, method, part)
        compute = functools.partial(call_implementation, method, problem, call.implementations)
        return sharding.with_wide_sums(problem, method, compute)

    return divide_array_code(sharding.rule(call.problem, call.implementations, method, operands), local, operands)


def _plan(call: Call, method: str, operands: tuple[Any, ...]) -> tuple[Rule, Local[Any]]:
    """Return the sharding rule of a method of the canonical call, and the function that computes a part of it.

    Each device's gradient of the weights is float32 (float64), so that it is rounded after the all-reduce.
    """

    def local(part: Part) -> Any:
        problem = sharding.local_problem(call.problem, method, part)
        return sharding.with_wide_sums(problem, method, _mappable(Call(problem, call.implementations), method))

    return sharding.rule(call.problem, call.implementations, method, operands), local


@functools.lru_cache(maxsize=1024)
def _mappable(call: Call, method: str) -> Any:
    """Return a method of the canonical call with its batching rule; one function object per call."""

    @jax.custom_batching.custom_vmap
    def compute(*operands: Any) -> Any:
        return call_implementation(method, call.problem, call.implementations, *operands)

    @compute.def_vmap
    def compute_mapped(axis_size: int, is_mapped: Sequence[Any], *operands: Any) -> tuple[Any, Any]:
        problem, folded = _fold_mapped_axis(call.problem, axis_size, is_mapped, operands)
        results = _mappable(Call(problem, call.implementations), method)(*folded)
        results = jax.tree.map(lambda x: x.reshape(axis_size, x.shape[0] // axis_size, *x.shape[1:]), results)
        return results, jax.tree.map(lambda _: True, results)

    return compute


def _fold_mapped_axis(
    problem: KeyConvolutionProblem, axis_size: int, is_mapped: Sequence[Any], operands: tuple
) -> tuple[KeyConvolutionProblem, tuple]:
    """Fold a mapped axis into the tokens and groups of the canonical call: `axis_size` times as many of both.

    Every element gets its own copy of the weights, even if they are equal, because each has its own weight gradient.
    """
    key, weights, tiles, *cotangents = (
        fold_rows(x, axis_size, mapped) for x, mapped in zip(operands, is_mapped, strict=True)
    )
    if tiles is not None:
        first_rows = jnp.arange(axis_size, dtype=jnp.int32) * problem.tokens
        tiles = tiles.at[:, 0].add(jnp.repeat(first_rows, problem.num_tiles))
    folded = dataclasses.replace(
        problem,
        tokens=axis_size * problem.tokens,
        groups=axis_size * problem.groups,
        num_tiles=axis_size * problem.num_tiles,
    )
    return folded, (key, weights, tiles, *cotangents)
