"""Views, casts and sums of a JAX program that torch computes itself, because a call of JAX would cost more.

Each computes the same numbers as JAX, on tensors with autograd.
"""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from jax.extend import core

from blockdiag.fusion.frontend.trace import aval_of
from blockdiag.interop.dlpack import TENSOR_DTYPES
from blockdiag.torch.fusion.random_keys import is_key

type Computation = Callable[..., Any]
"""Maps a tensor for each operand that is not a literal to a tensor for each result."""


def computation_of(equation: core.JaxprEqn) -> Computation | None:
    """Return the torch function that computes an equation; None if JAX computes it."""
    name = equation.primitive.name
    if any(is_key(aval_of(x)) for x in (*equation.invars, *equation.outvars)):
        return None
    if name in _ARITHMETIC:
        return _arithmetic(equation, _ARITHMETIC[name])
    if name == "concatenate":
        return _concatenate(equation)
    if name == "clamp":
        return _clamp(equation)
    make = _VIEWS.get(name)
    return None if make is None or isinstance(equation.invars[0], core.Literal) else make(equation)


def is_view(equation: core.JaxprEqn) -> bool:
    """Return whether torch's result may share memory with the operand."""
    return equation.primitive.name in _VIEWS


def _reshape(equation: core.JaxprEqn) -> Computation | None:
    if equation.params.get("dimensions") is not None:
        return None
    shape = aval_of(equation.outvars[0]).shape
    return lambda x: (x.reshape(shape),)


def _transpose(equation: core.JaxprEqn) -> Computation:
    permutation = tuple(map(int, equation.params["permutation"]))
    return lambda x: (x.permute(permutation),)


def _broadcast(equation: core.JaxprEqn) -> Computation:
    given, shape = aval_of(equation.invars[0]).shape, aval_of(equation.outvars[0]).shape
    places = dict(zip(map(int, equation.params["broadcast_dimensions"]), given, strict=True))
    ones = [places.get(axis, 1) for axis in range(len(shape))]
    return lambda x: (x.reshape(ones).expand(shape),)


def _slice(equation: core.JaxprEqn) -> Computation:
    starts, limits = equation.params["start_indices"], equation.params["limit_indices"]
    strides = equation.params["strides"] or (1,) * len(starts)
    index = tuple(map(slice, map(int, starts), map(int, limits), map(int, strides)))
    return lambda x: (x[index],)


def _concatenate(equation: core.JaxprEqn) -> Computation | None:
    axis = int(equation.params["dimension"])
    if any(isinstance(x, core.Literal) for x in equation.invars):
        return None
    return lambda *tensors: (torch.cat(tensors, axis),)


def _split(equation: core.JaxprEqn) -> Computation:
    sizes, axis = list(map(int, equation.params["sizes"])), int(equation.params["axis"])
    return lambda x: x.split(sizes, axis)


def _same(equation: core.JaxprEqn) -> Computation:
    del equation
    return lambda x: (x,)


def _stop_gradient(equation: core.JaxprEqn) -> Computation:
    del equation
    return lambda x: (x.detach(),)


def _convert(equation: core.JaxprEqn) -> Computation | None:
    given, wanted = (aval_of(x[0]).dtype for x in (equation.invars, equation.outvars))
    kinds = _kind(given), _kind(wanted)
    # In casts from float to integer JAX saturates, while torch's result depends on the processor.
    if "other" in kinds or (kinds[0] == "float" and kinds[1] != "float") or wanted not in TENSOR_DTYPES:
        return None
    if given == np.bool_ and wanted == np.int8:
        return lambda x: (x.view(torch.int8),)
    dtype = TENSOR_DTYPES[wanted]
    return lambda x: (x.to(dtype),)


def _kind(dtype: Any) -> str:
    """Return "float", "whole" or "other"."""
    if dtype not in TENSOR_DTYPES:
        return "other"
    tensor_dtype = TENSOR_DTYPES[dtype]
    # JAX rounds 8-bit floats differently.
    if tensor_dtype.is_floating_point:
        return "float" if tensor_dtype.itemsize > 1 else "other"
    return "other" if tensor_dtype.is_complex else "whole"


def _arithmetic(equation: core.JaxprEqn, operation: Callable[..., Any]) -> Computation | None:
    # Integers wrap around in both, but torch does not have all of JAX's integer dtypes.
    if _kind(aval_of(equation.outvars[0]).dtype) != "float":
        return None
    numbers = [_number(x) if isinstance(x, core.Literal) else None for x in equation.invars]

    def compute(*tensors: Any) -> tuple[Any]:
        given = iter(tensors)
        return (operation(*(next(given) if number is None else number for number in numbers)),)

    return compute


def _clamp(equation: core.JaxprEqn) -> Computation | None:
    """Return the clamp of an integer between two literals, as `cond` applies it to its index."""
    least, x, most = equation.invars
    is_whole = np.issubdtype(aval_of(x).dtype, np.integer) and aval_of(x).dtype in TENSOR_DTYPES
    if isinstance(x, core.Literal) or not (isinstance(least, core.Literal) and isinstance(most, core.Literal)):
        return None
    low, high = int(least.val), int(most.val)
    return (lambda tensor: (tensor.clamp(low, high),)) if is_whole else None


def _number(literal: core.Literal) -> float:
    """Return a literal rounded to its dtype."""
    return float(np.asarray(literal.val).astype(aval_of(literal).dtype))


_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "add_any": operator.add,
    "mul": operator.mul,
    "neg": operator.neg,
    "sub": operator.sub,
}
_VIEWS: dict[str, Callable[[core.JaxprEqn], Computation | None]] = {
    "broadcast_in_dim": _broadcast,
    "convert_element_type": _convert,
    "copy": _same,
    "copy_p": _same,
    "reshape": _reshape,
    "slice": _slice,
    "split": _split,
    "squeeze": _reshape,
    "stop_gradient": _stop_gradient,
    "transpose": _transpose,
}
