"""`fuse` for torch: an attention variant written in plain jax.numpy as generated kernels that torch launches."""

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
) -> Callable[..., Any]:
    """A function of tensors that computes what a JAX function computes, its attention by fused kernels, with autograd.

    The torch twin of `blockdiag.fuse`: `function` is written in plain jax.numpy, and is called with tensors. On CUDA
    the generated kernels are launched on the current stream, forward and backward. Views, casts, sums and factors next
    to them are torch's own, and what is left is a jitted JAX function on the same memory (see `wrap_jax`): attention
    whose query, key and value are arguments needs no JAX after its first call. `scan`, `cond` and `jax.checkpoint` with
    attention inside are run by torch, one step after the other. On the CPU all is JAX's, unless "triton" is asked for.

    The function is traced once for each structure of the arguments, shapes and dtypes of their arrays, and values of
    everything else; what depends on no argument is computed then, and kept. Gradients are those of all floating tensors
    that require grad; a second derivative raises NotImplementedError. 64-bit tensors need 64-bit types in JAX
    (`jax.enable_x64`). Results are new tensors. Under `torch.func` a gradient computes the function again, and a mapped
    call is a loop. Under `torch.compile` the call is a graph break. A CUDA graph can capture calls that need no JAX,
    once the same call, and its backward pass, has run outside of the capture.

    Args:
        function: of arrays, in pytrees: tensors, and arrays and numbers of JAX and numpy, which get no gradient. Other
            arguments are handed on as they are, and must be hashable. It must be pure; what it uses of tensors,
            parameters of a module among them, must be an argument.
        implementation: None: the Triton kernels on CUDA where they can compute the function, otherwise the way through
            JAX; "triton", which on the CPU runs in Triton's interpreter, slowly; "xla"; or a sequence of them: the
            first that can. "reference" is the function as it stands.
        fallback: run the function as it stands where it is not fusible; `fused.fallbacks` then has the reasons.
        via: "jax" computes everything in JAX, on CUDA too.
        context_parallel: the processes of a group share the tokens of each sequence; see `ContextParallel`. The
            function is written for whole sequences, with masks and positions of all tokens. Calls take and return the
            tokens of this process.
        token_axes: with `context_parallel`, the axes of arguments along which processes share tokens: one number for
            all arrays, or a tuple as `in_axes` of `jax.vmap` with a number, None or a pytree of these for each argument
            in order. Arrays of None are whole, and the same in every process. The axes must become the queries and the
            keys of the attention; a call raises otherwise.

    Returns:
        A function of the same arguments. Its `cache_clear()` forgets what was traced.

    Raises:
        ValueError: `implementation` or `via` has an unknown name, or `context_parallel` does not go with `token_axes`,
            `fallback` or "reference"; and, from calls, for tensors of several devices, for tensors that JAX cannot
            share, and, with `context_parallel`, where the strategy cannot serve, where processes do not divide the
            tokens, or where the function mixes tokens outside of attention. The message has the remedy.
        NotFusible: (when called) there is no attention in it, or one that breaks a rule; the message names the rule and
            the line.
        NotImplementedError: (when called) none of the implementations asked for can compute it; the message says why.
        TypeError: (when called) an argument is neither an array nor hashable.

    References:
        Attention by tiles: FlashAttention of Dao et al. (2022). Variants as programs: FlexAttention of Dong et al.
        (2024). Finding them in the equations of a function: Flashlight of You et al. (2025), for PyTorch.

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

    fused_function = FusedFunction(function, implementation, fallback, via, context_parallel, token_axes)

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
    """A function of tensors that says what `fuse` makes of the call, and runs nothing of it but masks.

    The torch twin of `blockdiag.explain`.

    Args:
        function: of arrays, in jax.numpy, or what `fuse` made of it. Tensors on the meta device stand for shapes and
            dtypes; then it is not known which tiles a mask that depends on them leaves out. Of a function that `fuse`
            made with `context_parallel` the call is explained as that of all processes, of shapes and dtypes alone.

    Returns:
        A function of the same arguments that returns a `blockdiag.fusion.explain.Explanation`.

    Raises:
        Exception: (when called) what `function` itself raises, and `blockdiag.interop.to_jax` of its tensors. A
            `NotFusible` is the `reason` of the explanation.

    References:
        FlashAttention of Dao et al. (2022), whose tiles are what is counted and drawn.

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
        if context is None:
            args, kwargs = jax.tree.map(as_array, (args, kwargs))
        else:
            args, kwargs = whole_types(context, getattr(function, "token_axes", None), args, kwargs)
        return explain_call(*args, **kwargs)

    return explained
