"""JAX functions as torch functions with autograd, and torch functions as JAX functions.

`wrap_jax` shares memory in both directions (see `blockdiag.interop.dlpack`) and runs one jitted program forward and one
backward. `wrap_torch` copies through the host and is meant for notebooks and tests.
"""

import collections
import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import torch

from blockdiag.interop import private_torch
from blockdiag.interop._lifetimes import same_device
from blockdiag.interop._torch_callback import wrap_torch
from blockdiag.interop._torch_mistakes import explaining
from blockdiag.interop._torch_transforms import call_under_transforms
from blockdiag.interop._wrapped_program import Program, check_operand

__all__ = ["wrap_jax", "wrap_torch"]


class CacheInfo(NamedTuple):
    """Statistics from `wrapped.cache_info()`, with the fields of `functools.lru_cache`."""

    hits: int
    misses: int
    maxsize: int
    currsize: int


def wrap_jax(
    fn: Callable[..., Any],
    *,
    differentiable: bool | int | str | Sequence[int | str] | None = None,
    static_argnames: str | Sequence[str] = (),
    max_compiled: int = 128,
) -> Callable[..., Any]:
    """Return a torch function that computes the JAX function `fn`, with autograd.

    Tensors anywhere in the arguments (tuples, lists, dicts, registered pytrees) reach `fn` as traced arrays, and the
    arrays that it returns become tensors in the same structure. `fn` is jitted once for each structure of the
    arguments, shapes and dtypes of their arrays, set of tensors to differentiate, and values of everything else. If a
    gradient is requested, the forward program also saves the residuals of `jax.vjp`, and a second program computes
    gradients from cotangents. Gradients of inputs that do not require grad are skipped.

    - Python numbers, strings and other hashable leaves are static: each value has a compiled program of its own. Pass a
      number that changes often as a tensor. `None` is an empty pytree.
    - JAX and numpy arrays among the arguments are operands without a gradient.
    - A tensor that DLPack cannot share (strided slices, broadcast dimensions, misaligned memory) is copied once, as are
      such cotangents. 64-bit tensors need 64-bit types in JAX (`jax.enable_x64`).
    - Results are new tensors, also where `fn` returns one of its arguments. Integer and boolean results carry no
      gradient. Complex gradients follow torch's convention.
    - Inputs and results that the backward program needs are saved as torch saves them: writing to them in place before
      the backward pass is an error, and hooks for saved tensors see them. All other residuals stay JAX arrays; for
      rematerialisation use `jax.checkpoint` inside of `fn`.
    - Under `torch.func.grad`, `vjp`, `jacrev` and `vmap` the backward program recomputes the function, and a mapped
      call is a loop. Forward mode (`torch.func.jvp`) raises NotImplementedError.
    - Under `torch.compile` the call is a graph break, and a CUDA graph cannot capture it.
    - The backward pass may run on another thread, where JAX's context managers other than `jax.enable_x64` have no
      effect; set such options for the process, with `jax.config.update`.

    Args:
        fn: a function of arrays and pytrees of arrays, such as `jax.jit` takes. It must be pure.
        differentiable: the tensors that get a gradient. None: all that require grad. False: none. Positions or names of
            arguments: the tensors in these arguments that require grad; others are constants.
        static_argnames: names of arguments that are static as a whole, such as a hashable pytree of options.
        max_compiled: maximum number of pairs of programs in the cache; the least recently used one is dropped first.

    Returns:
        The function. Its `cache_info()` and `cache_clear()` work like those of `functools.lru_cache`.

    Raises:
        ValueError: `differentiable` or `static_argnames` name something that is not an argument of `fn`; and, from
            calls, the errors of `blockdiag.interop.to_jax`.
        TypeError: from calls, for arguments that are neither arrays nor hashable.
        NotImplementedError: from a second derivative: the backward program itself is not differentiable in torch. Wrap
            `jax.grad(fn)` instead.

    References:
        DLPack, the open structure of tensors in memory (2017), and `torch.autograd.Function`.

    Example:
        >>> import jax.numpy as jnp
        >>> import torch
        >>> from blockdiag.interop import wrap_jax
        >>> norm = wrap_jax(lambda x: jnp.sqrt(jnp.sum(x * x)))
        >>> x = torch.tensor([3.0, 4.0], requires_grad=True)
        >>> norm(x).backward()
        >>> x.grad
        tensor([0.6000, 0.8000])
    """
    function = _WrappedFunction(fn, differentiable, static_argnames, max_compiled)

    @functools.wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return function(args, kwargs)

    # Dynamo would otherwise trace through JAX's Python code.
    result = torch.compiler.disable(wrapped, reason="JAX functions run outside of torch.compile")
    result.cache_info = function.cache_info
    result.cache_clear = function.cache_clear
    return result


class _WrappedFunction:
    """One wrapped function and its compiled programs, keyed by structure, signature and static values."""

    def __init__(
        self,
        fn: Callable[..., Any],
        differentiable: bool | int | str | Sequence[int | str] | None,
        static_argnames: str | Sequence[str],
        max_compiled: int,
    ) -> None:
        if max_compiled < 1:
            raise ValueError(f"max_compiled={max_compiled} must be at least 1")
        self._fn = explaining(fn)
        names = (static_argnames,) if isinstance(static_argnames, str) else tuple(static_argnames)
        self._static = _arguments("static_argnames", names, fn)
        if differentiable is None or isinstance(differentiable, bool):
            # True means the same as None: a tensor that does not require grad gets none.
            self._differentiable = frozenset() if differentiable is False else None
        else:
            chosen = (differentiable,) if isinstance(differentiable, int | str) else tuple(differentiable)
            self._differentiable = _arguments("differentiable", chosen, fn)
        self._programs: collections.OrderedDict[Any, Program] = collections.OrderedDict()
        self._lock = threading.Lock()
        self._max_compiled = max_compiled
        self._hits = self._misses = 0

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if private_torch.is_transformed():
            return call_under_transforms(self, args, kwargs)
        statics: tuple[tuple[int | str, Any], ...] = ()
        if self._static:
            args, kwargs, statics = self._split_statics(args, kwargs)
        leaves, structure = jax.tree_util.tree_flatten((args, kwargs))
        grad = torch.is_grad_enabled()
        operands: list[Any] = []
        signature: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                if leaf.is_nested:
                    # Reading the shape of a nested tensor raises an error that asks users to report a bug to torch.
                    check_operand(leaf)
                operands.append(leaf)
                signature.append((leaf.shape, leaf.dtype, leaf.device, grad and leaf.requires_grad))
            elif isinstance(leaf, jax.Array | np.ndarray | np.generic):
                operands.append(leaf)
                signature.append((leaf.shape, leaf.dtype))
            else:
                signature.append(static_key(leaf))
        if private_torch.may_have_tangents() or not private_torch.can_tell_transforms():
            for operand in operands:
                check_operand(operand)
        x64 = jax.config.jax_enable_x64
        key = (structure, tuple(signature), x64, *((name, static_key(value)) for name, value in statics))
        with self._lock:
            program = self._find(key)
            if program is None:
                wanted = self._wanted(args, kwargs, grad)
                program = self._programs[key] = Program(self._fn, leaves, structure, statics, wanted, x64)
                if len(self._programs) > self._max_compiled:
                    self._programs.popitem(last=False)
        with same_device():
            return program(operands)

    def _find(self, key: Any) -> "Program | None":
        try:
            program = self._programs.get(key)
        except TypeError as error:
            raise TypeError(
                f"every argument must be made of tensors, arrays and hashable values ({error}); turn lists of numbers "
                "into tensors, and name options in static_argnames"
            ) from error
        if program is None:
            self._misses += 1
        else:
            self._hits += 1
            self._programs.move_to_end(key)
        return program

    def _split_statics(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
        """Return the arguments with static ones replaced by None, and the static ones by position or name."""
        statics = [(index, value) for index, value in enumerate(args) if index in self._static]
        statics += [(name, value) for name, value in sorted(kwargs.items()) if name in self._static]
        args = tuple(None if index in self._static else value for index, value in enumerate(args))
        kwargs = {name: None if name in self._static else value for name, value in kwargs.items()}
        return args, kwargs, tuple(statics)

    def _wanted(self, args: tuple[Any, ...], kwargs: dict[str, Any], grad: bool) -> list[bool]:
        """Return one flag for each leaf of the arguments, in order: True if its gradient is computed."""
        wanted = []
        # Dicts are flattened in the order of their sorted keys.
        for name, value in [*enumerate(args), *sorted(kwargs.items())]:
            chosen = grad and (self._differentiable is None or name in self._differentiable)
            for leaf in jax.tree_util.tree_leaves(value):
                wanted.append(chosen and isinstance(leaf, torch.Tensor) and leaf.requires_grad)
        return wanted

    def cache_info(self) -> CacheInfo:
        with self._lock:
            return CacheInfo(self._hits, self._misses, self._max_compiled, len(self._programs))

    def cache_clear(self) -> None:
        with self._lock:
            self._programs.clear()
            self._hits = self._misses = 0


def _arguments(option: str, chosen: Sequence[int | str], fn: Callable[..., Any]) -> frozenset[int | str]:
    """Return both the position and the name of each chosen argument of fn, since a caller may use either."""
    if not chosen:
        return frozenset()
    parameters = inspect.signature(fn).parameters.values()
    kinds = {parameter.kind for parameter in parameters}
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    resolved: set[int | str] = set(chosen)
    for each in chosen:
        if isinstance(each, str):
            if each in positional:
                resolved.add(positional.index(each))
            known = each in named or inspect.Parameter.VAR_KEYWORD in kinds
        else:
            resolved.update(positional[each : each + 1])
            known = 0 <= each < len(positional) or (each >= 0 and inspect.Parameter.VAR_POSITIONAL in kinds)
        if not known:
            raise ValueError(f"{option}={each!r} is not an argument of the function, which takes {positional + named}")
    return frozenset(resolved)


def static_key(value: Any) -> Any:
    """Return a cache key for a static value; it separates types and signed zeros, and NaN matches itself."""
    # Equal numbers of different types make different programs, and so do 0.0 and -0.0; NaN equals not even itself.
    if isinstance(value, tuple):
        return type(value), tuple(static_key(each) for each in value)
    return type(value), repr(value) if isinstance(value, float | complex) else value
