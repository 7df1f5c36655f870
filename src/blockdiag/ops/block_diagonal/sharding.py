"""Sharding of block-diagonal attention: sequences of equal length, and heads, are independent.

The token axis of packed sequences, which a tile table describes, stays whole; only their heads are divided.
"""

import dataclasses
from typing import Any

from blockdiag.common.rule import Dim, Rule
from blockdiag.common.shards import Part
from blockdiag.ops.block_diagonal.problem import BlockDiagonalProblem

_ROWS: Dim = ("sequences", "tokens")
_QUERY_HEADS: Dim = ("key_heads", "group")


def rule(
    problem: BlockDiagonalProblem, implementations: tuple[str, ...] | None, method: str, operands: tuple[Any, ...]
) -> Rule:
    """Return the sharding rule of a canonical call.

    Args:
        problem: the call.
        implementations: names of the implementations to try, or None.
        method: "forward", "forward_with_log_sum" or "backward".
        operands: query, key, value, tile table and rotary arrays. A backward call adds the cotangent of the output, and
            optionally output and log-sum-exp. The rule has labels for those that are not None.
    """
    packed = (_ROWS, (), ())
    output = (_ROWS, _QUERY_HEADS, ("features",))
    query = packed if problem.is_packed else output
    key = (_ROWS, ("key_heads",), ("features",))
    log_sum = (_ROWS, _QUERY_HEADS)
    _, _, _, tiles, rotary, *rest = operands
    given = [query] if problem.is_packed else [query, key, key]
    given += [] if tiles is None else [((), ())]
    given += [] if rotary is None else _rotary(problem, has_positions=rotary[2] is not None)
    given += [output, output, log_sum][: len(rest)]
    gradients = (query,) if problem.is_packed else (query, key, key)
    results = {"forward": (output,), "forward_with_log_sum": (output, log_sum), "backward": gradients}[method]
    has_sequences = problem.sequence_length is not None and problem.tokens != 0
    sequences = problem.tokens // (problem.sequence_length or 1) if has_sequences else 1
    sizes = {
        "sequences": sequences,
        "tokens": problem.tokens // sequences,
        "key_heads": problem.key_heads,
        "group": problem.group_size,
        "features": problem.head_dim,
    }
    # In a packed array, a device's heads of query, key and value would not be contiguous, so heads stay whole.
    heads = () if problem.is_packed else ("key_heads", "group")
    return Rule(
        "block_diagonal_attention",
        repr((problem, implementations, method)),
        tuple(given),
        results,
        tuple(sizes.items()),
        frozenset(("sequences", *heads)),
    )


def local_problem(problem: BlockDiagonalProblem, part: Part) -> BlockDiagonalProblem:
    """Return the call of one device."""
    if not part.starts:
        return problem
    sizes = part.sizes
    tokens = sizes["sequences"] * sizes["tokens"]
    rotary = problem.rotary
    if rotary is not None and rotary.positions == "token":
        rotary = dataclasses.replace(rotary, table_rows=tokens)
    return dataclasses.replace(
        problem,
        tokens=tokens,
        num_tiles=problem.num_tiles * tokens // max(problem.tokens, 1),
        query_heads=sizes["key_heads"] * sizes["group"],
        key_heads=sizes["key_heads"],
        rotary=rotary,
    )


def _rotary(problem: BlockDiagonalProblem, *, has_positions: bool) -> list[tuple[Dim, ...]]:
    """Return the labels of cos, sin, and positions if there are any."""
    assert problem.rotary is not None
    table: tuple[Dim, ...] = (_ROWS, ()) if problem.rotary.positions == "token" else ((), ())
    return [table, table, *([(_ROWS,)] if has_positions else [])]
