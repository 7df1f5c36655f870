"""Sum the gradient of small tables, such as those of relative positions, row by row and without atomics.

XLA adds the gradients of reads to their row one after the other. A table of 32 rows that 4096 x 4096 scores read takes
seconds that way on a GPU. The order changes between runs, and the sum has the table's own dtype. If reads depend on the
distance alone (`regions/relative_positions.py`), there is only one read for each distance. The sum then takes one small
kernel.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from blockdiag.common.derivatives import on_common_axes
from blockdiag.fusion.frontend.trace import aval_of, bind

# Each pass over the gradients sums some rows, so the work is rows times gradients comparisons. Tables of more than
# a few rows have a limit. It is higher if each row is read often, for which XLA's scatter is slow.
_MOST_ROWS = 512
_MOST_COMPARISONS, _MOST_OF_MANY_READS = 2**30, 2**34
_MANY_READS = 64
_ROWS_AT_ONCE = 8
# If gradients are few, as those by distance are, one step makes up to this many comparisons.
_COMPARED_AT_ONCE = 2**24
# XLA's scatter is fast and deterministic if each row is read once.
_LEAST_READS = 2


def reads_rows(equation: core.JaxprEqn) -> bool:
    """Return whether an equation gathers rows of a small table, each many times."""
    if equation.primitive.name != "gather":
        return False
    table, indices = (aval_of(x) for x in equation.invars)
    numbers = equation.params["dimension_numbers"]
    if (
        len(numbers.start_index_map) != 1
        or numbers.operand_batching_dims
        or not jnp.issubdtype(table.dtype, jnp.floating)
    ):
        return False
    (axis,) = numbers.start_index_map
    whole = tuple(1 if i == axis else size for i, size in enumerate(table.shape))
    if numbers.collapsed_slice_dims != (axis,) or equation.params["slice_sizes"] != whole:
        return False
    rows, size = table.shape[axis], math.prod(aval_of(equation.outvars[0]).shape)
    reads = math.prod(indices.shape)
    most = _MOST_OF_MANY_READS if reads >= _MANY_READS * rows else _MOST_COMPARISONS
    return (rows <= _MOST_ROWS or rows * size <= most) and 0 < _LEAST_READS * rows <= reads


def read_rows(equation: core.JaxprEqn, table: jax.Array, indices: jax.Array) -> jax.Array:
    """Return the rows that an equation reads, with the gradient of this module.

    Args:
        equation: a gather for which `reads_rows` is true.
        table, indices: its operands; indices int32 or int64 [*reads, 1].
    """
    return _rows(_Reads(equation), *on_common_axes(table, indices))


def _wide(dtype: Any) -> Any:
    """Return the dtype of sums: float32, or the dtype itself if it is wider."""
    return dtype if jnp.finfo(dtype).bits >= 32 else jnp.float32


class _Reads:
    """An equation that reads rows.

    Attributes:
        equation: the gather.
        axis: the axis of the table along which rows lie.
        offsets: the axes of the result that come from the other axes of the table.
        is_clipped: whether an index out of bounds reads the nearest row. Otherwise the gradient of such a read is 0.
    """

    def __init__(self, equation: core.JaxprEqn) -> None:
        self.equation = equation
        numbers = equation.params["dimension_numbers"]
        (self.axis,) = numbers.start_index_map
        self.offsets = numbers.offset_dims
        self.is_clipped = equation.params["mode"] == lax.GatherScatterMode.CLIP

    def sum_of(self, row: jax.Array, indices: jax.Array, cotangent: jax.Array) -> jax.Array:
        """Return the gradient of one row, float32 or wider."""
        wide = _wide(cotangent.dtype)
        axes = [axis for axis in range(cotangent.ndim) if axis not in self.offsets]
        is_read = lax.broadcast_in_dim(indices == row, cotangent.shape, axes)
        kept = jnp.where(is_read, cotangent.astype(wide), jnp.zeros((), wide))
        return jnp.sum(kept, axis=tuple(axes))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rows(reads: _Reads, table: jax.Array, indices: jax.Array) -> jax.Array:
    return bind(reads.equation, [table, indices])[0]


def _rows_forward(reads: _Reads, table: jax.Array, indices: jax.Array) -> tuple[jax.Array, Any]:
    return _rows(reads, table, indices), (table, indices)


def _rows_backward(reads: _Reads, saved: Any, cotangent: jax.Array) -> tuple[jax.Array, None]:
    table, indices = saved
    found = lax.platform_dependent(
        table,
        indices,
        cotangent,
        cuda=functools.partial(_by_rows, reads),
        default=functools.partial(_by_reads, reads),
    )
    return found, None


_rows.defvjp(_rows_forward, _rows_backward)


def _by_rows(reads: _Reads, table: jax.Array, indices: jax.Array, cotangent: jax.Array) -> jax.Array:
    """Return the gradient of a table, summed for a group of rows at a time."""
    rows = table.shape[reads.axis]
    flat = indices[..., 0]
    if reads.is_clipped:
        flat = jnp.clip(flat, 0, rows - 1)

    at_once = min(rows, _COMPARED_AT_ONCE // cotangent.size)

    def group(first: jax.Array) -> jax.Array:
        if at_once > _ROWS_AT_ONCE:
            return jax.vmap(lambda i: reads.sum_of(first + i, flat, cotangent))(jnp.arange(at_once, dtype=flat.dtype))
        return jnp.stack([reads.sum_of(first + i, flat, cotangent) for i in range(_ROWS_AT_ONCE)])

    firsts = jnp.arange(0, rows, max(at_once, _ROWS_AT_ONCE), dtype=flat.dtype)
    sums = lax.map(group, firsts).reshape(-1, *(x for i, x in enumerate(table.shape) if i != reads.axis))
    return jnp.moveaxis(sums[:rows], 0, reads.axis).astype(table.dtype)


def _by_reads(reads: _Reads, table: jax.Array, indices: jax.Array, cotangent: jax.Array) -> jax.Array:
    """Return the gradient of a table by XLA's scatter, in float32 or wider."""
    wide = jax.ShapeDtypeStruct(table.shape, _wide(table.dtype))
    (found,) = jax.linear_transpose(lambda x: bind(reads.equation, [x, indices])[0], wide)(cotangent.astype(wide.dtype))
    return found.astype(table.dtype)
