"""Evaluation of JAX functions with NumPy, operation by operation: an oracle that involves no compiler."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core


def traced(function: Callable[..., Any], *arguments: Any) -> Callable[..., Any]:
    """Trace `function` with `arguments`, and return a function that evaluates the trace with NumPy."""
    jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    structure = jax.tree.structure(shapes)

    def compute(*arguments: Any) -> Any:
        with np.errstate(all="ignore"):
            results = _evaluate(jaxpr, [np.asarray(x) for x in jax.tree.leaves(arguments)])
        return jax.tree.unflatten(structure, results)

    return compute


def _evaluate(closed: core.ClosedJaxpr, arguments: Sequence[np.ndarray]) -> list[np.ndarray]:
    jaxpr = closed.jaxpr
    known: dict[Any, np.ndarray] = dict(zip(jaxpr.constvars, map(np.asarray, closed.consts), strict=True))
    known |= dict(zip(jaxpr.invars, arguments, strict=True))

    def read(operand: Any) -> np.ndarray:
        return np.asarray(operand.val, operand.aval.dtype) if isinstance(operand, core.Literal) else known[operand]

    for equation in jaxpr.eqns:
        results = _results(equation, [read(x) for x in equation.invars])
        known |= {var: np.asarray(x, var.aval.dtype) for var, x in zip(equation.outvars, results, strict=True)}
    return [read(x) for x in jaxpr.outvars]


def _results(equation: Any, given: list[np.ndarray]) -> Sequence[Any]:
    """Return the results of an equation. Rare primitives and integer divisions are left to JAX."""
    name, params = equation.primitive.name, equation.params
    if name in _CALLS:
        return _evaluate(params[_CALLS[name]], given)
    if name in _OPERATIONS and not (name == "div" and given[0].dtype.kind != "f"):
        return [_OPERATIONS[name](*given, **params)]
    found = equation.primitive.bind(*given, **equation.primitive.get_bind_params(params))
    return found if equation.primitive.multiple_results else [found]


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the rule of an operation whose parameters do not affect its result."""
    return lambda *given, **_: function(*given)


def _broadcast(x: np.ndarray, *, shape: tuple[int, ...], broadcast_dimensions: tuple[int, ...], **_: Any) -> np.ndarray:
    sizes = dict(zip(broadcast_dimensions, x.shape, strict=True))
    return np.broadcast_to(x.reshape([sizes.get(axis, 1) for axis in range(len(shape))]), shape)


def _dot(left: np.ndarray, right: np.ndarray, *, dimension_numbers: Any, **_: Any) -> np.ndarray:
    """Compute a dot product as a product of matrices [shared, free, summed] and [shared, summed, free]."""
    (left_summed, right_summed), (left_shared, right_shared) = dimension_numbers
    left_free = [axis for axis in range(left.ndim) if axis not in (*left_summed, *left_shared)]
    right_free = [axis for axis in range(right.ndim) if axis not in (*right_summed, *right_shared)]
    shared, rows, summed, columns = (
        [array.shape[axis] for axis in axes]
        for array, axes in ((left, left_shared), (left, left_free), (left, left_summed), (right, right_free))
    )
    left = left.transpose(*left_shared, *left_free, *left_summed)
    right = right.transpose(*right_shared, *right_summed, *right_free)
    count = math.prod(summed)
    product = left.reshape(*shared, -1, count) @ right.reshape(*shared, count, math.prod(columns))
    return product.reshape(*shared, *rows, *columns)


def _select(which: np.ndarray, *cases: np.ndarray) -> np.ndarray:
    return np.choose(which.astype(int), cases)


# The parameter that holds the jaxpr of each call primitive.
_CALLS = {"jit": "jaxpr", "custom_jvp_call": "call_jaxpr"}
_OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": _plain(np.add),
    "add_any": _plain(np.add),
    "sub": _plain(np.subtract),
    "mul": _plain(np.multiply),
    "div": _plain(np.divide),
    "neg": _plain(np.negative),
    "max": _plain(np.maximum),
    "min": _plain(np.minimum),
    "abs": _plain(np.abs),
    "sign": _plain(np.sign),
    "exp": _plain(np.exp),
    "log": _plain(np.log),
    "log1p": _plain(np.log1p),
    "sqrt": _plain(np.sqrt),
    "rsqrt": _plain(lambda x: 1 / np.sqrt(x)),
    "tanh": _plain(np.tanh),
    "sin": _plain(np.sin),
    "cos": _plain(np.cos),
    "square": _plain(np.square),
    "logistic": _plain(lambda x: 1 / (1 + np.exp(-x))),
    "integer_pow": lambda x, *, y: x**y if y >= 0 else 1 / x**-y,
    "eq": _plain(np.equal),
    "ne": _plain(np.not_equal),
    "lt": _plain(np.less),
    "le": _plain(np.less_equal),
    "gt": _plain(np.greater),
    "ge": _plain(np.greater_equal),
    "and": _plain(np.bitwise_and),
    "or": _plain(np.bitwise_or),
    "is_finite": _plain(np.isfinite),
    "stop_gradient": _plain(lambda x: x),
    "select_n": _plain(_select),
    "convert_element_type": lambda x, *, new_dtype, **_: x.astype(new_dtype),
    "broadcast_in_dim": _broadcast,
    "transpose": lambda x, *, permutation: x.transpose(permutation),
    "reshape": lambda x, *, new_sizes, **_: x.reshape(new_sizes),
    "squeeze": lambda x, *, dimensions: np.squeeze(x, dimensions),
    "concatenate": lambda *given, dimension: np.concatenate(given, dimension),
    "reduce_sum": lambda x, *, axes, **_: x.sum(axes),
    "reduce_max": lambda x, *, axes, **_: x.max(axes),
    "dot_general": _dot,
}
