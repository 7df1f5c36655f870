"""Mapped axes folded into the batch: what `jax.vmap` makes of a call that appends to a paged cache.

Each mapped element writes to pages of its own, which become one pool; page numbers are shifted for each element.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array

from blockdiag.ops.append.places import find_places
from blockdiag.ops.append.problem import AppendArrays, AppendProblem
from blockdiag.ops.block_diagonal.batching import fold_rows


def fold_append(
    problem: AppendProblem, axis_size: int, is_mapped: AppendArrays, arrays: AppendArrays
) -> tuple[AppendProblem, AppendArrays]:
    """The canonical call over `axis_size` times as many sequences and pages.

    Args:
        problem: the call of one mapped element.
        axis_size: length of the mapped axis.
        is_mapped: for each array, whether it has the mapped axis, in front.
        arrays: the arrays. Pages that are not mapped are repeated, since each element changes its own.

    Returns:
        The problem and the arrays of the folded call.
    """
    folded = AppendArrays(*(fold_rows(x, axis_size, mapped) for x, mapped in zip(arrays, is_mapped, strict=True)))
    element = jnp.arange(axis_size, dtype=jnp.int32)

    def shifted(x: Array, size: int) -> Array:
        """Numbers below `size` as numbers of their element; those that are none as -1."""
        shift = jnp.repeat(element * size, x.shape[0] // axis_size).reshape(-1, *[1] * (x.ndim - 1))
        return jnp.where((x >= 0) & (x < size), x + shift, -1)

    sizes = dict(tokens=axis_size * problem.tokens, batch=axis_size * problem.batch)
    new_problem = dataclasses.replace(problem, **sizes, num_pages=axis_size * problem.num_pages)
    if folded.page_table is not None:
        folded = folded._replace(page_table=shifted(folded.page_table, problem.num_pages))
    if folded.sequences is not None:
        first_rows = folded.first_rows + jnp.repeat(element * problem.tokens, problem.batch)
        folded = folded._replace(sequences=shifted(folded.sequences, problem.batch), first_rows=first_rows)
    if problem.rotary is not None and not (is_mapped.cos or is_mapped.sin):
        return new_problem, folded._replace(cos=arrays.cos, sin=arrays.sin)
    if problem.rotary is not None:
        # Within the element's own table first, so that none reads rows of another's.
        rows = problem.rotary.table_rows
        positions = folded.positions
        positions = find_places(new_problem, folded).position if positions is None else positions
        positions = jnp.clip(positions, 0, rows - 1) + jnp.repeat(element * rows, problem.tokens)
        folded = folded._replace(positions=positions)
        rotary = dataclasses.replace(problem.rotary, table_rows=axis_size * rows, positions="explicit")
        new_problem = dataclasses.replace(new_problem, rotary=rotary)
    return new_problem, folded
