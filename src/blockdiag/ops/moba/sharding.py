"""Sharding of MoBA: sequences of equal length, and heads, are independent.

Packed sequences share one token axis, which stays whole; only their heads are divided. Blocks and rows are numbered
across all sequences. A device with some of the sequences therefore renumbers them in lists and tables.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from blockdiag.common.rule import Dim, Rule
from blockdiag.common.shards import Part
from blockdiag.ops.moba.lists import Lists
from blockdiag.ops.moba.problem import MoBAProblem
from blockdiag.ops.moba.tables import moba_tables

_QUERIES: Dim = ("sequences", "queries")
_KEYS: Dim = ("sequences", "keys")
_BLOCKS: Dim = ("sequences", "blocks")
_ENTRIES: Dim = ("sequences", "entries")
_QUERY_HEADS: Dim = ("key_heads", "group")


def rule(
    problem: MoBAProblem,
    implementations: tuple[str, ...] | None,
    sequences: int,
    method: str,
    operands: tuple[Any, ...],
) -> Rule:
    """Return the sharding rule of a canonical call.

    Args:
        problem: the call.
        implementations: names of the implementations to try, or None.
        sequences: number of equally long, independent parts of the token axes; 1 for packed sequences.
        method: "route", or its halves "centroids" and "choose"; "make_lists", "forward" or "backward"; "choice" for
            `routing.given_choice`; or "indices" for `routing.indices_of_choice`, whose operands are the chosen blocks
            and both tables.
        operands: operands of the method after the problem. The rule has labels for those that are not None.
    """
    query = (_QUERIES, _QUERY_HEADS, ("features",))
    key = (_KEYS, ("key_heads",), ("features",))
    log_sum = (_QUERIES, _QUERY_HEADS)
    centroids = (_BLOCKS, ("key_heads",), (), ("features",))
    chosen = (_QUERY_HEADS, _QUERIES, ())
    entries = _ENTRIES if problem.slots else ()
    lists = Lists((_QUERY_HEADS, _BLOCKS), (_QUERY_HEADS, _BLOCKS), (_QUERY_HEADS, entries), (_QUERY_HEADS, _QUERIES))
    shared = ((_KEYS,), ((), ()), ((), ()))
    of_lists = (*lists, (_QUERY_HEADS, _QUERIES))
    indices = (_QUERIES, _QUERY_HEADS, ())
    tables = shared[1:]
    given, results = {
        "indices": ((chosen, *tables), (indices,)),
        "choice": ((indices, *shared), (chosen, *([(_QUERY_HEADS, _QUERIES)] if problem.is_causal else []))),
        "route": ((query, key, *shared), (chosen,)),
        "centroids": ((key, *shared[:2]), (centroids,)),
        "choose": ((query, centroids, shared[2]), (chosen,)),
        "make_lists": ((chosen,), tuple(lists)),
        "forward": ((query, key, key, *shared, *of_lists), (query, log_sum)),
        "backward": ((query, key, key, *shared, *of_lists, query, log_sum, query, log_sum), (query, key, key)),
    }[method]
    flat = jax.tree.leaves(operands, is_leaf=lambda x: x is None)
    sizes = {
        "sequences": sequences,
        "queries": problem.query_tokens // sequences,
        "keys": problem.key_tokens // sequences,
        "blocks": problem.num_blocks // sequences,
        "entries": problem.query_tokens // sequences * problem.slots,
        "key_heads": problem.key_heads,
        "group": problem.group_size,
        "features": problem.head_dim,
    }
    return Rule(
        "moba_attention",
        repr((problem, implementations, method)),
        tuple(dims for dims, x in zip(given, flat, strict=True) if x is not None),
        results,
        tuple(sizes.items()),
        frozenset(("sequences", "key_heads", "group")),
    )


def local_problem(problem: MoBAProblem, part: Part) -> MoBAProblem:
    """Return the call of one device."""
    if not part.starts:
        return problem
    sizes = part.sizes
    return dataclasses.replace(
        problem,
        query_tokens=sizes["sequences"] * sizes["queries"],
        key_tokens=sizes["sequences"] * sizes["keys"],
        num_blocks=sizes["sequences"] * sizes["blocks"],
        query_heads=sizes["key_heads"] * sizes["group"],
        key_heads=sizes["key_heads"],
    )


def renumbered(problem: MoBAProblem, method: str, part: Part, compute: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the computation of one device for operands and results that are numbered across all devices.

    Args:
        problem: the call of one device.
        method: see `rule`.
        part: the part of the device.
        compute: computation whose operands and results are numbered within the device's own sequences.
    """
    first = part.starts.get("sequences")
    if first is None:
        return compute
    sizes = part.sizes
    first_block, first_entry = first * sizes["blocks"], first * sizes["entries"]

    def shifted(lists: Lists, shift: Any) -> Lists:
        return lists._replace(offsets=lists.offsets + shift, entries=lists.entries + shift)

    def on_own_numbers(*operands: Any) -> Any:
        if method == "indices":
            chosen, _, _ = operands
            own = jnp.where(chosen < 0, chosen, chosen - first_block)
            return compute(own, *moba_tables(problem, sizes["sequences"]))
        if method == "choice":
            indices, key_mask, _, _ = operands
            chosen, own = compute(indices, key_mask, *moba_tables(problem, sizes["sequences"]))
            return jnp.where(chosen < 0, chosen, chosen + first_block), own
        if method == "make_lists":
            (chosen,) = operands
            return shifted(compute(jnp.where(chosen < 0, chosen, chosen - first_block)), first_entry)
        blocks, queries = tables = moba_tables(problem, sizes["sequences"])
        if method == "centroids":
            key, key_mask, _ = operands
            return compute(key, key_mask, blocks)
        if method in ("route", "choose"):
            query, *others = operands
            given = (others[0], queries) if method == "choose" else (*others[:2], *tables)
            chosen = compute(query, *given)
            return jnp.where(chosen < 0, chosen, chosen + first_block)
        arrays, (key_mask, _, _, *more) = operands[:3], operands[3:]
        lists, *rest = more
        return compute(*arrays, key_mask, *tables, shifted(lists, -first_entry), *rest)

    return on_own_numbers
