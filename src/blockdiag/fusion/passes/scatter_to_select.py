"""Rewrite scatters of one number (`.at[..].set`) as selects by a mask, or as constants.

A write of one number at known positions selects between that number and the operand. The mask is a function of
positions alone. A write into a constant gives another constant.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from blockdiag.fusion.frontend.trace import aval_of, constants_with, rewritten
from blockdiag.fusion.regions.axis_labels import producers_of

type _Make = Callable[[], Any]

# Constants are evaluated up to this many elements.
_MOST = 2**22


def with_written(
    closed: core.ClosedJaxpr,
    known: Callable[[Any], np.ndarray | None],
    formula: Callable[[np.ndarray], _Make | None],
) -> core.ClosedJaxpr:
    """Return the flat program with selects, or equations of positions, in place of scatters.

    Args:
        known: returns a constant's elements, or None if they may not be inspected.
        formula: returns a function that computes an array from positions, or None if it is not such a function.
    """
    written = [x for x in closed.jaxpr.eqns if x.primitive.name == "scatter"]
    if not written:
        return closed
    value_of = constants_with(
        closed.jaxpr, _MOST, dict(zip(closed.jaxpr.constvars, map(known, closed.consts), strict=True))
    )
    producers = producers_of(closed.jaxpr)
    replaced: dict[int, Callable[[Callable[[Any], Any]], dict[core.Var, Any]]] = {}
    for equation in written:
        operand, indices, updates = equation.invars
        (result,) = equation.outvars
        value = value_of(result)
        number = _one_number(updates, producers)
        if value is not None:
            make = formula(value)
            if make is not None:
                replaced[id(equation)] = lambda _, result=result, make=make: {result: make()}
        elif number is not None and (mask := _places(equation, value_of(indices))) is not None:
            make = formula(mask) or (lambda mask=mask: mask)
            replaced[id(equation)] = lambda read, result=result, operand=operand, number=number, make=make: {
                result: _chosen(make(), read(number), read(operand))
            }
    return rewritten(closed, closed.jaxpr.eqns, replaced) if replaced else closed


def _one_number(var: Any, producers: Mapping[core.Var, core.JaxprEqn]) -> Any:
    """Return the scalar that an array broadcasts, or None if there is none."""
    while isinstance(var, core.Var) and aval_of(var).ndim:
        equation = producers.get(var)
        if equation is None or equation.primitive.name not in ("broadcast_in_dim", "reshape"):
            return None
        var = equation.invars[0]
    return var


def _places(scatter: core.JaxprEqn, indices: np.ndarray | None) -> np.ndarray | None:
    """Return the mask of positions that a scatter writes, or None if it depends on arguments or is too large.

    An axis that is written as a whole has size 1 in the mask.
    """
    numbers = scatter.params["dimension_numbers"]
    if indices is None or numbers.operand_batching_dims:
        return None
    shape, given = (aval_of(x).shape for x in (scatter.invars[0], scatter.invars[2]))
    windows = [axis for axis in range(len(shape)) if axis not in numbers.inserted_window_dims]
    sizes = {axis: given[at] for axis, at in zip(windows, numbers.update_window_dims, strict=True)}
    chosen = numbers.scatter_dims_to_operand_dims
    whole = {axis for axis, size in sizes.items() if size == shape[axis] and axis not in chosen}
    short = tuple(1 if axis in whole else size for axis, size in enumerate(shape))
    if math.prod(short) > _MOST or len(whole) == len(shape):
        return None
    update = list(given)
    for axis, at in zip(windows, numbers.update_window_dims, strict=True):
        update[at] = 1 if axis in whole else update[at]
    with jax.ensure_compile_time_eval():
        mask = lax.scatter(
            jnp.zeros(short, bool),
            jnp.asarray(indices),
            jnp.ones(update, bool),
            numbers,
            indices_are_sorted=scatter.params["indices_are_sorted"],
            unique_indices=scatter.params["unique_indices"],
            mode=scatter.params["mode"],
        )
        return np.asarray(mask)


def _chosen(mask: Any, number: Any, operand: Any) -> jax.Array:
    whole = lax.broadcast_in_dim(mask, operand.shape, range(operand.ndim))
    return lax.select(whole, lax.full(operand.shape, number, operand.dtype), operand)
