"""`fuse` for torch: an attention variant written in plain jax.numpy becomes generated kernels that torch launches."""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from blockdiag.torch.context.parallel import ContextParallel

if TYPE_CHECKING:
    from blockdiag.fusion.explain import Explanation


def fuse(
    function: Callable[..., Any],
    *,
    implementation: str | Sequence[str] | None = None,
    fallback: bool = False,
    via: Literal["jax"] | None = None,
    context_parallel: ContextParallel | None = None,
    token_axes: Any = None,
    deterministic: bool = True,
) -> Callable[..., Any]:
    """Return a function of tensors that computes what a JAX function computes, with fused attention and autograd.

    This is the PyTorch version of `blockdiag.fuse`: `function` is written in plain jax.numpy and called with tensors.
    On CUDA the generated kernels are launched on the current stream, forward and backward. Views, casts, sums and
    factors next to them run in torch. The rest is a jitted JAX function on the same memory (see `wrap_jax`), so
    attention whose query, key and value are arguments needs no JAX after its first call.

    Torch runs `scan`, `cond` and `jax.checkpoint` that contain attention, one step after the other. On the CPU
    everything runs in JAX unless "triton" is requested.

    The function is traced once for each structure of the arguments, shapes and dtypes of their arrays, and values of
    everything else. Whatever depends on no argument is computed then, and kept. All floating tensors that require grad
    get gradients; a second derivative raises NotImplementedError. 64-bit tensors need 64-bit types in JAX
    (`jax.enable_x64`). Results are new tensors.

    Under `torch.func` a gradient recomputes the function, and a mapped call is a loop. Under `torch.compile` the call
    is a graph break. A CUDA graph can capture calls that need no JAX, once the same call and its backward pass have run
    outside of the capture.

    Args:
        function: a function of arrays in pytrees. Calls pass tensors, and arrays and numbers of JAX and numpy, which
            get no gradient. Other arguments are passed unchanged and must be hashable. The function must be pure.
            Tensors that it uses, such as the parameters of a module, must be arguments.
        implementation: which implementation runs. None means the Triton kernels on CUDA where they can compute the
            function, otherwise JAX. "triton" means the kernels, which run in a slow interpreter on the CPU. "xla" means
            JAX. A sequence means the first that can compute the function. "reference" means the unfused function.
        fallback: whether to run the unfused function if it is not fusible; `fused.fallbacks` then lists the reasons.
        via: "jax" to compute everything in JAX, on CUDA too.
        context_parallel: the processes of a group that share the tokens of each sequence; see `ContextParallel`. The
            function is written for whole sequences, with masks and positions of all tokens. Calls take and return the
            tokens of this process.
        token_axes: with `context_parallel`, the axes of arguments along which processes share tokens: one number for
            all arrays, or a tuple like `in_axes` of `jax.vmap`, with a number, None or a pytree of these for each
            argument in order. Arrays with None are whole, and the same in every process. The axes must become the
            queries and the keys of the attention; otherwise a call raises.
        deterministic: whether gradients are bitwise equal in every run; see `blockdiag.fuse`.

    Returns:
        A function of the same arguments. Its `cache_clear()` drops what was traced.

    Raises:
        ValueError: `implementation` or `via` has an unknown name, or `context_parallel` is combined with no
            `token_axes`, with `fallback` or with "reference". (When called) tensors are on several devices, or JAX
            cannot share them. (When called, with `context_parallel`) the strategy does not support the call, processes
            do not divide the tokens, or the function mixes tokens outside of attention. The message has the remedy.
        NotFusible: (when called) the function has no attention, or one that breaks a rule; the message names the rule
            and the line.
        NotImplementedError: (when called) none of the requested implementations can compute it; the message says why.
        TypeError: (when called) an argument is neither an array nor hashable.

    References:
        Attention by tiles: FlashAttention of Dao et al. (2022). Variants as programs: FlexAttention of Dong et al.
        (2024). Detection of attention in the equations of a function: Flashlight of You et al. (2025), for PyTorch.

    Example:
        >>> import jax, jax.numpy as jnp, torch
        >>> from blockdiag.torch import fuse
        >>> @fuse
        ... def attention(query, key, value):
        ...     scores = jnp.einsum("btnh,bsnh->bnts", query, key) / query.shape[-1] ** 0.5
        ...     return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), value)
        >>> x = torch.ones(1, 64, 2, 16, requires_grad=True)
        >>> attention(x, x, x).sum().backward()
        >>> x.grad.shape
        torch.Size([1, 64, 2, 16])
    """
    from blockdiag.fusion.api import marked
    from blockdiag.torch.fusion.call import FusedFunction, plain

    fused_function = FusedFunction(function, implementation, fallback, via, context_parallel, token_axes, deterministic)

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return fused_function(args, kwargs)

    # Dynamo would otherwise trace through JAX's Python code.
    fused: Any = torch.compiler.disable(wrapped, reason="JAX functions are traced outside of torch.compile")
    fused.__wrapped__ = plain(function)
    fused.fallbacks = fused_function.fallbacks
    fused.cache_clear = fused_function.cache_clear
    fused.context_parallel, fused.token_axes = context_parallel, token_axes
    return marked(fused)


def explain(function: Callable[..., Any]) -> "Callable[..., Explanation]":
    """Return a function of tensors that reports what `fuse` finds in a call; only masks are evaluated.

    This is the PyTorch version of `blockdiag.explain`.

    Args:
        function: a function of arrays in jax.numpy, or the result of `fuse`. Tensors on the meta device give shapes and
            dtypes only; it is then unknown which tiles are skipped by a mask that depends on them. A function fused
            with `context_parallel` is explained as the call of all processes, from shapes and dtypes alone.

    Returns:
        A function of the same arguments that returns a `blockdiag.fusion.explain.Explanation`.

    Raises:
        Exception: (when called) errors of `function` itself and of `blockdiag.interop.to_jax`. A `NotFusible` becomes
            the `reason` of the explanation.

    References:
        FlashAttention of Dao et al. (2022), whose tiles are counted and drawn.

    Example:
        >>> import jax, torch
        >>> from blockdiag.torch import explain
        >>> x = torch.empty(2, 256, 64, dtype=torch.bfloat16, device="meta")
        >>> region = explain(lambda query, key, value: jax.nn.softmax(query @ key.mT) @ value)(x, x, x).regions[0]
        >>> region.has_softmax, region.flops
        (True, 33554432)
    """
    import jax

    from blockdiag.fusion.api import fuse as fuse_arrays
    from blockdiag.fusion.api import is_fused
    from blockdiag.fusion.explain import explain as explain_arrays
    from blockdiag.interop._lifetimes import same_device
    from blockdiag.interop._torch_mistakes import explaining
    from blockdiag.torch.fusion.call import as_array, plain, whole_types
    from blockdiag.torch.fusion.context import as_axis

    context: ContextParallel | None = getattr(function, "context_parallel", None) if is_fused(function) else None
    of_arrays = explaining(plain(function))
    if context is not None:
        of_arrays = fuse_arrays(of_arrays, context_parallel=as_axis(context))
    explain_call = explain_arrays(of_arrays)

    @functools.wraps(function)
    def explained(*args: Any, **kwargs: Any) -> "Explanation":
        with same_device():
            if context is None:
                args, kwargs = jax.tree.map(as_array, (args, kwargs))
            else:
                args, kwargs = whole_types(context, getattr(function, "token_axes", None), args, kwargs)
            return explain_call(*args, **kwargs)

    return explained
