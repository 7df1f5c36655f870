"""Equations around attention, evaluated on one process's part of the tokens.

A program is traced with the shapes of whole arrays, and each process binds its equations to its own part. The token
axis of an operand is the one whose size differs from that of the traced variable. Whole operands, such as weights or
positions that the program computes itself, are sliced when they are combined with such a part. An equation that needs
tokens of other processes raises an error.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import lax
from jax.extend import core

from blockdiag.common.derivatives import on_common_axes
from blockdiag.fusion.frontend.trace import aval_of, bind, has_effects
from blockdiag.fusion.ir.layout import shape_of
from blockdiag.fusion.ir.tree import COLUMNS, ELEMENTWISE, ROWS, Dim, Region
from blockdiag.fusion.passes.table_lookups import read_rows, reads_rows
from blockdiag.fusion.regions.axis_labels import place_of
from blockdiag.fusion.runtime.rows import axis_of

type _Axes = Sequence[int | None]
"""The token axis of each operand, None for a whole operand."""


class _Mixed(Exception):
    """An equation needs tokens of other processes; the message gives the reason, if one is known."""


@dataclass(frozen=True)
class Parts:
    """The part of one process: number `rank` of `count` equal consecutive parts of the token axis.

    The index may be traced, as that of a device is inside of `jax.shard_map`.
    """

    rank: Any
    count: int

    def bind(self, equation: core.JaxprEqn, given: Sequence[Any]) -> list[Any]:
        """Return the results of an equation for the process's tokens.

        Args:
            given: operands, each whole or the process's part of it.

        Raises:
            ValueError: the equation needs tokens of other processes.
        """
        axes = [token_axis(aval_of(x).shape, array) for x, array in zip(equation.invars, given, strict=True)]
        if all(axis is None for axis in axes):
            return _bind(equation, given)
        name = equation.primitive.name
        rule = _elementwise if name in _ELEMENTWISE else _RULES.get(name)
        try:
            if rule is None:
                raise _Mixed
            return rule(self, equation, list(given), axes)
        except _Mixed as reason:
            more = f": {reason}" if str(reason) else ""
            raise ValueError(
                f"with `context_parallel`, operations outside of attention must not mix tokens, but `{name}` "
                f"{place_of(equation)} may{more}; compute it before or after the fused function"
            ) from None

    def cut(self, x: Any, axis: int) -> Any:
        """Return the process's part of a whole array."""
        size = x.shape[axis] // self.count
        if isinstance(self.rank, int):
            return lax.slice_in_dim(x, self.rank * size, (self.rank + 1) * size, axis=axis)
        x, start = on_common_axes(x, self.rank * size)
        return lax.dynamic_slice_in_dim(x, start, size, axis=axis)

    def smaller(self, sizes: Sequence[int], axis: int) -> tuple[int, ...]:
        """Return the sizes with that of `axis` reduced to the process's part."""
        return tuple(size // self.count if place == axis else size for place, size in enumerate(sizes))

    def cut_like(self, given: Sequence[Any], axes: _Axes) -> tuple[list[Any], int]:
        """Slice the whole operands of an equation like its parts; return them and the token axis. Scalars stay."""
        found = {axis for axis in axes if axis is not None}
        if len(found) > 1:
            raise _Mixed("its operand is queries by keys, or has two axes of tokens")
        (axis,) = found
        cut = [self.cut(x, axis) if own is None and np.ndim(x) else x for x, own in zip(given, axes, strict=True)]
        return cut, axis


def check_program(jaxpr: core.Jaxpr, inner: str | None, remedy: str) -> None:
    """Check that the parts of a program can be computed side by side.

    Args:
        jaxpr: the program around attention.
        inner: the name of a primitive with attention inside; None where there is none.
        remedy: where to call the function in place of that primitive.

    Raises:
        ValueError: attention is inside of another primitive, or an equation has an effect.
    """
    if inner is not None:
        raise ValueError(
            f"`context_parallel` does not support attention inside `{inner}`; fuse the attention alone, and call it "
            f"{remedy}"
        )
    effect = next(filter(has_effects, jaxpr.eqns), None)
    if effect is not None:
        raise ValueError(
            f"with `context_parallel` a function must have no side effects, but it has `{effect.primitive.name}`; "
            "leave it out"
        )


def check_results(jaxpr: core.Jaxpr, results: Sequence[Any], sharers: str) -> None:
    """Check that every result that depends on an argument is a part.

    Args:
        jaxpr: the program.
        results: the results for one part.
        sharers: the devices or processes that share tokens, in words.

    Raises:
        ValueError: a result is whole.
    """
    derived = {*jaxpr.invars}
    for equation in jaxpr.eqns:
        if any(isinstance(x, core.Var) and x in derived for x in equation.invars):
            derived.update(equation.outvars)
    for place, (var, x) in enumerate(zip(jaxpr.outvars, results, strict=True)):
        if isinstance(var, core.Var) and var in derived and token_axis(aval_of(var).shape, x) is None:
            raise ValueError(
                f"result {place} of the function, of shape {x.shape}, has no axis of the tokens that {sharers} "
                "share; compute it outside of the fused function"
            )


def check_token_axes(region: Region, axes: _Axes) -> None:
    """Check that parts are parts of the rows of a region, or of the keys of arrays without rows.

    Args:
        region: the region of all tokens.
        axes: the axis of which each leaf, and the values, is a part.

    Raises:
        ValueError: another axis is divided, or no rows are.
    """
    rows = []
    labels: list[tuple[Dim, ...]] = [*(leaf.dims for leaf in region.leaves), region.value_dims]
    for dims, axis in zip(labels, axes, strict=True):
        if axis is None:
            continue
        label = COLUMNS if axis_of(dims, ROWS) is None else ROWS
        if axis_of(dims, label) != axis:
            is_key = axis_of(dims, COLUMNS) == axis
            found = "keys of an array that has queries, too" if is_key else "neither queries nor keys"
            raise ValueError(
                f"`token_axes` must name axes of queries, or of keys of arrays without queries; the axis {axis} of "
                f"an array that attention reads, of whole shape {shape_of(dims, region.sizes)}, has {found}"
            )
        rows.append(label == ROWS)
    if not any(rows):
        raise ValueError(
            "`token_axes` names no axis that becomes the queries of an attention of the function; name the token "
            "axis of each argument that has a part of the tokens"
        )


def token_axis(shape: Sequence[int], x: Any) -> int | None:
    """Return the axis at which an array is smaller than the whole `shape`, or None if it is whole."""
    return next((axis for axis, (whole, own) in enumerate(zip(shape, np.shape(x), strict=True)) if whole != own), None)


def _bind(equation: core.JaxprEqn, given: Sequence[Any], **params: Any) -> list[Any]:
    """Return the results of an equation, with `params` in place of its own parameters."""
    if params:
        return bind(equation.replace(params={**equation.params, **params}), given)
    return [read_rows(equation, *given)] if reads_rows(equation) else bind(equation, given)


def _elementwise(parts: Parts, equation: core.JaxprEqn, given: list[Any], axes: _Axes) -> list[Any]:
    return _bind(equation, parts.cut_like(given, axes)[0])


def _stays(parts: Parts, equation: core.JaxprEqn, given: list[Any], axes: _Axes) -> list[Any]:
    """Bind an equation that only moves or removes axes."""
    del parts, axes
    return _bind(equation, given)


def _broadcast(parts: Parts, equation: core.JaxprEqn, given: list[Any], axes: _Axes) -> list[Any]:
    place = equation.params["broadcast_dimensions"][_only(axes)]
    return _bind(equation, given, shape=parts.smaller(equation.params["shape"], place))


def _reshape(parts: Parts, equation: core.JaxprEqn, given: list[Any], axes: _Axes) -> list[Any]:
    if equation.params.get("dimensions") is not None:
        raise _Mixed
    before, after, axis = aval_of(equation.invars[0]).shape, equation.params["new_sizes"], _only(axes)
    # Processes divide an axis into consecutive parts, so the process index is its slowest digit. It must stay one.
    outer = math.prod(before[:axis])
    for place, size in enumerate(after):
        if size > 1 and math.prod(after[:place]) == outer and size % parts.count == 0:
            return _bind(equation, given, new_sizes=parts.smaller(after, place))
    raise _Mixed("tokens are not the slowest part of an axis after it")


def _slice(parts: Parts, equation: core.JaxprEqn, given: list[Any], axes: _Axes) -> list[Any]:
    axis, whole = _only(axes), aval_of(equation.invars[0]).shape
    starts, limits, strides = (equation.params[name] for name in ("start_indices", "limit_indices", "strides"))
    if starts[axis] or limits[axis] != whole[axis] or (strides is not None and strides[axis] != 1):
        raise _Mixed("it selects some of the tokens")
    return _bind(equation, given, limit_indices=parts.smaller(limits, axis))


def _pad(parts: Parts, equation: core.JaxprEqn, given: list[Any], axes: _Axes) -> list[Any]:
    del parts
    axis = axes[0]
    if axis is None or tuple(equation.params["padding_config"][axis]) != (0, 0, 0):
        raise _Mixed("it pads tokens")
    return _bind(equation, given)


def _along(name: str) -> Callable[..., list[Any]]:
    """Return the rule of an equation that mixes elements along the axis or axes given by parameter `name`."""

    def rule(parts: Parts, equation: core.JaxprEqn, given: list[Any], axes: _Axes) -> list[Any]:
        given, axis = parts.cut_like(given, axes)
        named = equation.params[name]
        if axis in (named if isinstance(named, tuple | list) else (named,)):
            raise _Mixed("it runs along tokens")
        return _bind(equation, given)

    return rule


def _product(parts: Parts, equation: core.JaxprEqn, given: list[Any], axes: _Axes) -> list[Any]:
    (contracted, shared) = equation.params["dimension_numbers"]
    given, axes = list(given), list(axes)
    for one, other in ((0, 1), (1, 0)):
        axis = axes[one]
        if axis is None:
            continue
        if axis in contracted[one]:
            raise _Mixed("it sums over tokens")
        if axis in shared[one]:
            place = shared[other][tuple(shared[one]).index(axis)]
            if axes[other] is None:
                given[other], axes[other] = parts.cut(given[other], place), place
            if axes[other] != place:
                raise _Mixed("it has two axes of tokens")
        elif axes[other] is not None:
            raise _Mixed("its operand is queries by keys, or has two axes of tokens")
    return _bind(equation, given)


def _gather(parts: Parts, equation: core.JaxprEqn, given: list[Any], axes: _Axes) -> list[Any]:
    numbers = equation.params["dimension_numbers"]
    if numbers.operand_batching_dims:
        raise _Mixed
    (of_table, of_indices), whole = axes, aval_of(equation.invars[0]).shape
    if of_table is None:
        # Each token reads rows of a whole table.
        if of_indices == aval_of(equation.invars[1]).ndim - 1:
            raise _Mixed
        return _bind(equation, given)
    sizes = equation.params["slice_sizes"]
    if of_indices is not None or of_table in numbers.start_index_map or sizes[of_table] != whole[of_table]:
        raise _Mixed("it gathers tokens by index")
    return _bind(equation, given, slice_sizes=parts.smaller(sizes, of_table))


def _only(axes: _Axes) -> int:
    """Return the token axis of an equation with a single divided operand."""
    (axis,) = (axis for axis in axes if axis is not None)
    return axis


_ELEMENTWISE = ELEMENTWISE | {"convert_element_type", "copy", "copy_p", "reduce_precision", "real", "imag", "conj"}
_RULES: dict[str, Callable[[Parts, core.JaxprEqn, list[Any], _Axes], list[Any]]] = {
    "broadcast_in_dim": _broadcast,
    "dot_general": _product,
    "gather": _gather,
    "pad": _pad,
    "reshape": _reshape,
    "slice": _slice,
    "squeeze": _stays,
    "transpose": _stays,
    **dict.fromkeys(("concatenate", "sort"), _along("dimension")),
    "rev": _along("dimensions"),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "split", "unstack"), _along("axis")),
    **{f"reduce_{name}": _along("axes") for name in ("sum", "max", "min", "prod", "and", "or", "xor")},
    **dict.fromkeys(("argmax", "argmin"), _along("axes")),
}
