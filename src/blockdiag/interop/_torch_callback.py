"""PyTorch functions wrapped as JAX functions through host callbacks."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from blockdiag.interop import dlpack, private_torch


def wrap_torch(fn: Callable[..., Any], *, result: Any = None, device: str | torch.device = "cpu") -> Callable[..., Any]:
    """Return a JAX function that computes the torch function `fn` and its gradient, for notebooks and tests.

    It works on JAX arrays and within `jax.jit`, `jax.grad` and `jax.vmap`, by means of `jax.pure_callback`. Every call
    copies the arguments to the host, runs `fn` in eager mode there, and copies the results back. JAX's computation
    waits meanwhile. The gradient runs `fn` once more under torch's autograd. So `fn` must be pure (no dropout, no
    state that changes). It may close over modules, but their parameters get no gradient.

    Args:
        fn: takes and returns tensors, in any pytrees. Python numbers and strings among the arguments are passed
            unchanged.
        result: pytree of `jax.ShapeDtypeStruct`, the shapes and dtypes of the results of `fn`. By default they are
            inferred by running `fn` on torch's fake tensors, which have no data.
        device: torch device on which `fn` runs.

    Returns:
        The function, of JAX arrays, numpy arrays, or traced arrays.

    Raises:
        ValueError: from calls, if the shapes of the results depend on data and `result` is not given; if `fn`
            returns 64-bit results while JAX has no 64-bit types; or if the results do not match `result`.
        TypeError: from calls, if `fn` returns something other than tensors, or an array has a dtype unknown to torch.

    References:
        `jax.pure_callback` (2022), and `jax.custom_vjp` for the gradient.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import torch
        >>> from blockdiag.interop import wrap_torch
        >>> softplus = wrap_torch(torch.nn.functional.softplus)
        >>> jax.jit(softplus)(jnp.zeros(2, jnp.float32)).round(3)
        Array([0.693, 0.693], dtype=float32)
        >>> jax.grad(lambda x: softplus(x).sum())(jnp.zeros(2, jnp.float32))
        Array([0.5, 0.5], dtype=float32)
    """
    home = torch.device(device)

    # The bound covers the structures and shapes that one notebook uses at a time. An evicted program only costs
    # another compilation.
    @functools.lru_cache(maxsize=128)
    def build(
        structure: Any, places: tuple[int, ...], statics: tuple[Any, ...], types: tuple[Any, ...], x64: bool
    ) -> Any:
        return _Callback(fn, result, home, structure, places, statics).as_jax(types)

    @functools.wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = jax.tree_util.tree_flatten((args, kwargs))
        is_array = [isinstance(leaf, jax.Array | np.ndarray | np.generic) for leaf in leaves]
        operands = [jnp.asarray(leaf) for leaf, chosen in zip(leaves, is_array, strict=True) if chosen]
        places = tuple(place for place, chosen in enumerate(is_array) if chosen)
        statics = tuple(None if chosen else leaf for leaf, chosen in zip(leaves, is_array, strict=True))
        types = tuple((x.shape, np.dtype(x.dtype)) for x in operands)
        # Types and texts are part of the key: 1, 1.0 and True are one key otherwise, and so are 0.0 and -0.0.
        key = tuple((type(leaf), repr(leaf) if isinstance(leaf, float | complex) else "", leaf) for leaf in statics)
        function, output = build(structure, places, key, types, jax.config.jax_enable_x64)
        return jax.tree_util.tree_unflatten(output, function(*operands))

    return wrapped


class _Callback:
    """The host side of one torch function, for one structure of arguments."""

    def __init__(
        self,
        fn: Callable[..., Any],
        result: Any,
        device: torch.device,
        structure: Any,
        places: tuple[int, ...],
        statics: tuple[tuple[type, str, Any], ...],
    ) -> None:
        self._fn = fn
        self._result = result
        self._device = device
        self._structure = structure
        self._places = places
        self._statics = statics

    def as_jax(self, types: tuple[tuple[tuple[int, ...], np.dtype], ...]) -> tuple[Callable[..., Any], Any]:
        """Return the jitted JAX function of the operands' leaves and the structure of its results."""
        expected = self._infer(types) if self._result is None else self._result
        results, output = jax.tree_util.tree_flatten(expected)
        for x in results:
            if jax.dtypes.canonicalize_dtype(x.dtype) != x.dtype:
                raise ValueError(
                    f"the torch function returns {x.dtype}, which JAX would narrow; cast it within the function, or "
                    "turn on 64-bit types with jax.enable_x64"
                )
        differentiable = [place for place, (_, dtype) in enumerate(types) if jnp.issubdtype(dtype, jnp.inexact)]
        gradients = [jax.ShapeDtypeStruct(*types[place]) for place in differentiable]
        carrying = [place for place, x in enumerate(results) if jnp.issubdtype(x.dtype, jnp.inexact)]

        def run(*operands: Any) -> list[np.ndarray]:
            with torch.no_grad():
                outputs = self._outputs(_tensors(operands, self._device))
            return [_checked(x, expected) for x, expected in zip(outputs, results, strict=True)]

        def pull_back(operands: Any, cotangents: Any) -> list[np.ndarray]:
            tensors = _tensors(operands, self._device)
            with torch.enable_grad():
                chosen = [tensors[place].requires_grad_() for place in differentiable]
                outputs = self._outputs(tensors)
            # Both cotangents and gradients are conjugated, since torch's complex gradients are the conjugates of JAX's.
            given = [x.conj().resolve_conj() for x in _tensors(cotangents, self._device)]
            reached = [(outputs[place], given[i]) for i, place in enumerate(carrying) if outputs[place].requires_grad]
            found: tuple[Any, ...] = (None,) * len(chosen)
            if reached and chosen:
                outputs, given = map(list, zip(*reached, strict=True))
                found = torch.autograd.grad(outputs, chosen, given, allow_unused=True)
            return [
                np.zeros(expected.shape, expected.dtype) if x is None else _checked(x.conj(), expected)
                for x, expected in zip(found, gradients, strict=True)
            ]

        @jax.custom_vjp
        def call(*operands: jax.Array) -> Any:
            return jax.pure_callback(run, results, *operands, vmap_method="sequential")

        def forward(*operands: jax.Array) -> Any:
            return call(*operands), operands

        def backward(operands: tuple[jax.Array, ...], cotangents: list[Any]) -> tuple[Any, ...]:
            chosen = [cotangents[place] for place in carrying]
            found = jax.pure_callback(pull_back, gradients, operands, chosen, vmap_method="sequential")
            every: list[Any] = [np.zeros(shape, jax.dtypes.float0) for shape, _ in types]
            for place, gradient in zip(differentiable, found, strict=True):
                every[place] = gradient
            return tuple(every)

        call.defvjp(forward, backward)
        return jax.jit(call), output

    def _outputs(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return jax.tree_util.tree_leaves(self._call(tensors))

    def _call(self, tensors: list[torch.Tensor]) -> Any:
        leaves = [value for *_, value in self._statics]
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = jax.tree_util.tree_unflatten(self._structure, leaves)
        outputs = self._fn(*args, **kwargs)
        for x in jax.tree_util.tree_leaves(outputs):
            if not isinstance(x, torch.Tensor):
                raise TypeError(f"the torch function must return tensors, got {type(x).__name__}")
        return outputs

    def _infer(self, types: tuple[tuple[tuple[int, ...], np.dtype], ...]) -> Any:
        """Infer the shapes and dtypes of the results from a run on fake tensors."""
        for _, dtype in types:
            if dtype not in dlpack.TENSOR_DTYPES:
                raise TypeError(f"an argument has dtype {dtype}, which torch does not support; cast it")
        try:
            # Modules that the function closes over have real parameters.
            with private_torch.without_data(), torch.no_grad():
                tensors = [
                    torch.zeros(shape, dtype=dlpack.TENSOR_DTYPES[dtype], device=self._device) for shape, dtype in types
                ]
                outputs = self._call(tensors)
        except private_torch.DataDependentShape as error:
            raise ValueError(
                f"the results of the torch function have shapes that depend on data ({error}); give result="
            ) from error
        return jax.tree_util.tree_map(lambda x: jax.ShapeDtypeStruct(x.shape, dlpack.DTYPES[x.dtype]), outputs)


def _tensors(arrays: Any, device: torch.device) -> list[torch.Tensor]:
    """Copy a callback's arguments, which are read-only JAX arrays, into tensors on `device`."""
    tensors = []
    for array in arrays:
        copy = np.array(array, copy=True, order="C")
        # numpy has no dtypes of its own for bfloat16 and float8, so torch receives them as bytes.
        flat = torch.from_numpy(copy.reshape(-1).view(np.uint8))
        tensors.append(flat.view(dlpack.TENSOR_DTYPES[copy.dtype]).reshape(copy.shape).to(device))
    return tensors


def _checked(tensor: torch.Tensor, expected: jax.ShapeDtypeStruct) -> np.ndarray:
    """Return the tensor as a numpy array, after checking it against the shape and dtype that JAX expects."""
    if tuple(tensor.shape) != tuple(expected.shape) or dlpack.DTYPES[tensor.dtype] != expected.dtype:
        raise ValueError(
            f"the torch function returned {tensor.dtype}{list(tensor.shape)}, expected "
            f"{expected.dtype}{list(expected.shape)}; correct result="
        )
    dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return dense.reshape(-1).view(torch.uint8).numpy().view(expected.dtype).reshape(tuple(expected.shape))
