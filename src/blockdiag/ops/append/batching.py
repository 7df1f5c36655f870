"""Batching rule of appending to a paged cache: fold an axis mapped by `jax.vmap` into the batch of a call.

Each mapped element writes to its own pages, which become one pool. Page numbers are shifted for each element.
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
    """Return the canonical call over `axis_size` times as many sequences and pages.

    Args:
        problem: the call of one mapped element.
        axis_size: length of the mapped axis.
        is_mapped: for each array, whether it has the mapped axis as its leading axis.
        arrays: the arrays. Pages that are not mapped are repeated, because each element changes its own copy.

    Returns:
        The problem and the arrays of the folded call.
    """
    folded = AppendArrays(*(fold_rows(x, axis_size, mapped) for x, mapped in zip(arrays, is_mapped, strict=True)))
    element = jnp.arange(axis_size, dtype=jnp.int32)

    def shifted(x: Array, size: int) -> Array:
        """Shift indices in [0, size) to the range of their element; others become -1."""
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
        # Positions are clipped before they are shifted, so that no element reads another element's table.
        rows = problem.rotary.table_rows
        positions = folded.positions
        positions = find_places(new_problem, folded).position if positions is None else positions
        positions = jnp.clip(positions, 0, rows - 1) + jnp.repeat(element * rows, problem.tokens)
        folded = folded._replace(positions=positions)
        rotary = dataclasses.replace(problem.rotary, table_rows=axis_size * rows, positions="explicit")
        new_problem = dataclasses.replace(new_problem, rotary=rotary)
    return new_problem, folded
