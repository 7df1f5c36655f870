"""Batching rule of block-diagonal attention: fold an axis mapped by `jax.vmap` into the token axis of a canonical call.

A mapped axis is one more batch axis, and all batch rows share the token axis anyway. A mapped call is therefore the
same call with more tokens. The starts of its tiles and the rows of its tables are shifted for each mapped element.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from blockdiag.common.packing import token_positions
from blockdiag.common.rotary_problem import RotaryProblem
from blockdiag.ops.block_diagonal.problem import BlockDiagonalProblem


def fold_mapped_axis(
    problem: BlockDiagonalProblem, axis_size: int, is_mapped: Any, operands: tuple
) -> tuple[BlockDiagonalProblem, tuple]:
    """Return the canonical call over `axis_size` times as many tokens.

    Args:
        problem: the call of one mapped element.
        axis_size: length of the mapped axis.
        is_mapped: for each operand, a pytree of bools: whether it has the mapped axis as its leading axis.
        operands: query, key, value, tiles, rotary, and in a backward call the cotangent of the output.

    Returns:
        The problem and the operands of the folded call.
    """
    query, key, value, tiles, rotary, *cotangents = operands
    query_mapped, key_mapped, value_mapped, tiles_mapped, rotary_mapped, *cotangents_mapped = is_mapped
    query = fold_rows(query, axis_size, query_mapped)
    key = fold_rows(key, axis_size, key_mapped)
    value = fold_rows(value, axis_size, value_mapped)
    cotangents = [fold_rows(x, axis_size, mapped) for x, mapped in zip(cotangents, cotangents_mapped, strict=True)]
    folded = dataclasses.replace(problem, tokens=axis_size * problem.tokens, num_tiles=axis_size * problem.num_tiles)
    element = jnp.arange(axis_size, dtype=jnp.int32)
    if tiles is not None:
        tiles = fold_rows(tiles, axis_size, tiles_mapped)
        tiles = tiles.at[:, 0].add(jnp.repeat(element * problem.tokens, problem.num_tiles))
    if problem.rotary is not None:
        rotary_problem, rotary = _fold_rotary(problem, problem.rotary, element, tiles, rotary, rotary_mapped)
        folded = dataclasses.replace(folded, rotary=rotary_problem)
    return folded, (query, key, value, tiles, rotary, *cotangents)


def _fold_rotary(
    problem: BlockDiagonalProblem,
    rotary_problem: RotaryProblem,
    element: Array,
    tiles: Array | None,
    rotary: tuple[Array, Array, Array | None],
    is_mapped: tuple[bool, bool, bool | None],
) -> tuple[RotaryProblem, tuple[Array, Array, Array | None]]:
    """Return the tables and positions of the folded call, whose tile table is `tiles`.

    Tables that all elements share and read by position stay as they are. Otherwise positions become explicit.
    """
    cos, sin, positions = rotary
    axis_size = element.shape[0]
    tables_mapped = is_mapped[0] or is_mapped[1]
    if rotary_problem.positions == "sequence" and not tables_mapped:
        return rotary_problem, rotary
    if positions is not None:
        positions = fold_rows(positions, axis_size, bool(is_mapped[2]))
    elif rotary_problem.positions == "token":
        positions = fold_rows(jnp.arange(problem.tokens, dtype=jnp.int32), axis_size, False)
    elif tiles is not None:
        positions = token_positions(tiles, axis_size * problem.tokens, problem.block_size)
    else:
        positions = jnp.arange(axis_size * problem.tokens, dtype=jnp.int32) % (problem.sequence_length or 1)
    rows = rotary_problem.table_rows
    if tables_mapped:
        # Positions are clipped before they are shifted, so that no element reads another element's table.
        shift = jnp.repeat(element * rows, problem.tokens)
        positions = jnp.clip(positions, 0, rows - 1) + shift
        rows = axis_size * rows
        cos, sin = fold_rows(cos, axis_size, is_mapped[0]), fold_rows(sin, axis_size, is_mapped[1])
    return dataclasses.replace(rotary_problem, table_rows=rows, positions="explicit"), (cos, sin, positions)


def fold_rows(x: Any, axis_size: int, is_mapped: Any) -> Any:
    """Fold [axis_size, rows, ...], or a shared [rows, ...], to [axis_size * rows, ...]; None stays None."""
    if x is None:
        return None
    if not is_mapped:
        x = jnp.broadcast_to(x[None], (axis_size, *x.shape))
    return x.reshape(axis_size * x.shape[1], *x.shape[2:])
