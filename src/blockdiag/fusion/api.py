"""`fuse`: compile an attention variant written in plain jax.numpy to fused kernels, forward and backward."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from blockdiag.common.context_parallel import ContextParallel
from blockdiag.common.dispatch import normalise_implementation
from blockdiag.fusion.ir.tree import FUSE, SymbolicSizes
from blockdiag.fusion.ir.tree import NotFusible as NotFusible
from blockdiag.fusion.program import trace


def fuse[**P, R](
    function: Callable[P, R],
    *,
    implementation: str | Sequence[str] | None = None,
    fallback: bool = False,
    context_parallel: ContextParallel | None = None,
    token_axes: Any = None,
    deterministic: bool = True,
) -> Callable[P, R]:
    """Return a function that computes the attention of `function` by fused kernels.

    Results equal those of `function` up to rounding, and gradients are fused too. A product of values with a softmax
    of scores, or with another function of scores, becomes one kernel, which creates and discards scores tile by tile.
    Everything else is computed as written. The function is traced with each call, so call it under `jax.jit`.

    Arrays of queries by keys exist in memory only as biases and masks that the function receives or computes by a
    gather or a product. They keep the axes that they have. Their gradients are in memory too; "xla" holds such a
    gradient for each batch index before it sums them.

    Rows that see no key are 0, with gradients of 0. Random bits per query and key are a hash of the `jax.random` key
    and the position, not the sequence of `jax.random`. They have the same distribution, and are the same in all passes
    and implementations.

    Works under `jax.jit` (with donated arguments), `grad` (reverse mode), `vmap`, `checkpoint`, `scan`, `export`,
    jitted `shard_map` over batch and heads, and inside Flax modules. The function itself may contain `checkpoint` and
    `scan`. Derivatives of gradients are computed by XLA, which keeps all scores for them. On a mesh, with automatic or
    explicit axes, devices divide the batch axes of the function as its arrays are sharded. Gradients of arrays that
    lack a divided axis are summed over its devices.

    Args:
        function: a function of arrays of any shape and dtype, in pytrees. The Triton kernels take no 64-bit arrays.
            They multiply float8_e4m3fn and float8_e5m2 in eight bits, forward, on GPUs of compute capability 8.9 and
            higher. Other arguments are passed on unchanged.
        implementation: "triton", "xla", or a sequence of them, of which the first that can compute a region is used.
            None: the Triton kernels where the program is lowered for CUDA, and a scan over key tiles elsewhere.
            "reference": `function` unchanged.
        fallback: run `function` unchanged if it is not fusible; `fused.fallbacks` then lists the reasons. If
            `implementation` is None, a call with symbolic array sizes, as in `jax.export`, always falls back.
        context_parallel: devices along a mesh axis share the tokens of each sequence; see `ContextParallel`. The
            function is written for whole sequences, and results are those of one device. Its arguments are sharded
            along tokens as usual. `explain` says which strategy is chosen.
        token_axes: inside of `jax.shard_map` over the axis of `context_parallel`, where arguments are the device's
            shards: the axis of tokens of all arrays, or a tuple with an axis or None (a whole array) for each argument.
            The function is traced with whole shapes; what it computes around attention must not mix tokens.
        deterministic: whether gradients are bitwise equal in every run. False lets kernels add the float32 parts of the
            gradient of queries in any order. On Hopper, in calls whose gradients one kernel computes, its programs then
            do not wait for each other, and backward passes of long sequences take 2% to 16% less time; other calls are
            the same.

    Returns:
        A function of the same arguments, whose results have the shapes and dtypes of the results of `function`.

    Raises:
        ValueError: `implementation` has an unknown name, or is "reference" with `context_parallel`; (when called) the
            mesh has no such axis, the devices do not divide the queries, the strategy of `context_parallel` does not
            apply, or `token_axes` is missing inside a `jax.shard_map`. The message has the remedy.
        NotFusible: (when called) the function has no attention, has attention that breaks a rule, or mutates an
            argument; the message names the rule and the line.
        NotImplementedError: (when called) none of the requested implementations can compute it; the message says why.

    References:
        Attention by tiles: FlashAttention of Dao et al. (2022). Variants as programs: FlexAttention of Dong et al.
        (2024). Recognition of variants in the equations of a function: Flashlight of You et al. (2025), for PyTorch.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from blockdiag import fuse
        >>> @fuse
        ... def attention(query, key, value):
        ...     scores = jnp.einsum("btnh,bsnh->bnts", query, key) / query.shape[-1] ** 0.5
        ...     causal = jnp.arange(scores.shape[-2])[:, None] >= jnp.arange(scores.shape[-1])[None, :]
        ...     return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(jnp.where(causal, scores, -jnp.inf)), value)
        >>> x = jnp.ones((1, 64, 2, 16))
        >>> attention(x, x, x).shape
        (1, 64, 2, 16)
    """
    if implementation == "reference":
        if context_parallel is not None:
            raise ValueError(
                "implementation='reference' runs the function unchanged, which `context_parallel` cannot divide; "
                "omit one of them, or use implementation='xla'"
            )
        return function
    if is_fused(function):
        # The inner function is fused again, with this call's options.
        function = function.__wrapped__  # pyrefly: ignore[missing-attribute]
    names = normalise_implementation(implementation, FUSE)
    reasons: list[str] = []

    @functools.wraps(function)
    def fused(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            program = trace(function, args, kwargs, context_parallel, token_axes, deterministic=deterministic)
        except NotFusible as failure:
            has_choice = names is None and isinstance(failure, SymbolicSizes)
            if not fallback and not has_choice:
                raise
            reasons.append(str(failure))
            return function(*args, **kwargs)
        return program.run(names)

    fused.fallbacks = reasons  # pyrefly: ignore[missing-attribute]
    fused.context_parallel = context_parallel  # pyrefly: ignore[missing-attribute]
    fused.token_axes = token_axes  # pyrefly: ignore[missing-attribute]
    return marked(fused)


def marked[F: Callable[..., Any]](fused: F) -> F:
    """Mark a function as a result of `fuse`, for `is_fused`, and return it."""
    fused.fused = fused  # pyrefly: ignore[missing-attribute]
    return fused


def is_fused(function: Callable[..., Any]) -> bool:
    """Return whether a function is a result of `fuse`."""
    # `jax.vmap` and others copy the attributes of a fused function to their results.
    return getattr(function, "fused", None) is function
