"""Batching rule of MoBA: fold an axis mapped by `jax.vmap` into the token axes of a canonical call.

A mapped axis is one more batch axis, so a mapped call is the same call with more tokens and blocks. Rows and block
numbers in its tables and lists are shifted for each mapped element. "make_lists" folds the axis into the heads instead,
so that the lists of each element fill a range of their own.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from blockdiag.ops.block_diagonal.batching import fold_rows
from blockdiag.ops.moba.lists import Lists
from blockdiag.ops.moba.problem import MoBAProblem


def fold_moba(
    method: str, problem: MoBAProblem, axis_size: int, is_mapped: Any, operands: tuple
) -> tuple[MoBAProblem, tuple]:
    """Return the canonical call of `method` over `axis_size` elements.

    Args:
        method: "route", "centroids", "choose", "make_lists", "forward" or "backward".
        problem: the call of one mapped element.
        axis_size: length of the mapped axis.
        is_mapped: for each operand, a pytree of bools: whether it has the mapped axis as its leading axis.
        operands: operands of the method after the problem.

    Returns:
        The problem and the operands of the folded call.
    """
    if method == "make_lists":
        (chosen,) = operands
        heads = {"query_heads": axis_size * problem.query_heads, "key_heads": axis_size * problem.key_heads}
        return dataclasses.replace(problem, **heads), (chosen.reshape(-1, *chosen.shape[2:]),)
    folded = dataclasses.replace(
        problem,
        query_tokens=axis_size * problem.query_tokens,
        key_tokens=axis_size * problem.key_tokens,
        num_blocks=axis_size * problem.num_blocks,
    )
    if method == "centroids":
        key, key_mask, blocks = operands
        rows = (fold_rows(x, axis_size, mapped) for x, mapped in zip((key, key_mask), is_mapped[:2], strict=True))
        return folded, (*rows, _fold_blocks(problem, axis_size, blocks, is_mapped[2]))
    if method == "choose":
        query, centroids, queries = operands
        rows = (fold_rows(x, axis_size, mapped) for x, mapped in zip((query, centroids), is_mapped[:2], strict=True))
        return folded, (*rows, _fold_queries(problem, axis_size, queries, is_mapped[2]))
    num_arrays = 2 if method == "route" else 3
    arrays, (key_mask, blocks, queries, *more) = operands[:num_arrays], operands[num_arrays:]
    arrays_mapped = is_mapped[:num_arrays]
    mask_mapped, blocks_mapped, queries_mapped, *more_mapped = is_mapped[num_arrays:]
    results = [
        *(fold_rows(x, axis_size, mapped) for x, mapped in zip(arrays, arrays_mapped, strict=True)),
        fold_rows(key_mask, axis_size, mask_mapped),
        _fold_blocks(problem, axis_size, blocks, blocks_mapped),
        _fold_queries(problem, axis_size, queries, queries_mapped),
    ]
    if method != "route":
        lists, own, *cotangents = more
        lists_mapped, own_mapped, *cotangents_mapped = more_mapped
        results.append(_fold_lists(problem, axis_size, lists, lists_mapped))
        results.append(None if own is None else _fold_behind_heads(_stack(own, axis_size, own_mapped)))
        results += [fold_rows(x, axis_size, mapped) for x, mapped in zip(cotangents, cotangents_mapped, strict=True)]
    return folded, tuple(results)


def unfold_moba(method: str, problem: MoBAProblem, axis_size: int, results: Any) -> Any:
    """Return the results of a folded call with the mapped axis as leading axis."""
    if method in ("route", "choose"):
        chosen = results.reshape(problem.query_heads, axis_size, problem.query_tokens, problem.slots)
        chosen = jnp.moveaxis(chosen, 1, 0)
        shift = _elements(axis_size, 4) * problem.num_blocks
        return jnp.where(chosen < 0, chosen, chosen - shift)
    return jax.tree.map(lambda x: x.reshape(axis_size, x.shape[0] // axis_size, *x.shape[1:]), results)


def _fold_blocks(problem: MoBAProblem, axis_size: int, blocks: Array, is_mapped: bool) -> Array:
    blocks = _stack(blocks, axis_size, is_mapped)
    # Rows of unused blocks stay 0.
    shifts = (problem.key_tokens, 0, problem.query_tokens, 0)
    is_shifted = jnp.repeat(blocks[:, :, 1::2] > 0, 2, axis=2)
    return _shift(blocks, shifts, is_shifted).reshape(-1, 4)


def _fold_queries(problem: MoBAProblem, axis_size: int, queries: Array, is_mapped: bool) -> Array:
    queries = _stack(queries, axis_size, is_mapped)
    has_own = queries[:, :, 3:] > queries[:, :, 2:3]
    sees = has_own | (queries[:, :, 1:2] > queries[:, :, :1])
    # Rows of queries that see nothing stay 0.
    shifts = (problem.num_blocks, problem.num_blocks, problem.key_tokens, problem.key_tokens)
    is_shifted = jnp.concatenate([sees, sees, has_own, has_own], axis=2)
    return _shift(queries, shifts, is_shifted).reshape(-1, 4)


def _fold_lists(problem: MoBAProblem, axis_size: int, lists: Lists, is_mapped: Lists) -> Lists:
    offsets, counts, entries, degrees = (
        _stack(x, axis_size, mapped) for x, mapped in zip(lists, is_mapped, strict=True)
    )
    shift = _elements(axis_size, 3) * (problem.query_tokens * problem.slots)
    return Lists(*(_fold_behind_heads(x) for x in (offsets + shift, counts, entries + shift, degrees)))


def _shift(table: Array, shifts: tuple[int, ...], is_shifted: Array) -> Array:
    """Add element number times column shift to a table [axis_size, rows, columns] where `is_shifted`."""
    by_column = _elements(axis_size=table.shape[0], rank=3) * jnp.asarray(shifts, jnp.int32)[None, None, :]
    return table + jnp.where(is_shifted, by_column, 0)


def _elements(axis_size: int, rank: int) -> Array:
    """Return the mapped elements' numbers, as an array of this rank whose first axis is the mapped axis."""
    return jnp.arange(axis_size, dtype=jnp.int32).reshape(axis_size, *[1] * (rank - 1))


def _stack(x: Array, axis_size: int, is_mapped: bool) -> Array:
    return x if is_mapped else jnp.broadcast_to(x[None], (axis_size, *x.shape))


def _fold_behind_heads(x: Array) -> Array:
    """Reshape [axis_size, N, rows] to [N, axis_size * rows]."""
    return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1)
