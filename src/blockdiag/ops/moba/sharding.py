"""How MoBA divides over devices: sequences of equal length, and heads, are independent.

Packed sequences, which share one token axis, stay whole: their heads alone are divided. Blocks and rows are numbered
through all sequences, so that numbers in lists change where a device has some of the sequences.
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
        sequences: how many equal parts, which share nothing, the token axes have; 1 for packed sequences.
        method: "route", or its halves "centroids" and "choose"; "make_lists", "forward" or "backward"; "indices" for
            `routing.indices_of_choice`, of which the chosen blocks and both tables are the operands, and "choice" for
            `routing.given_choice`.
        operands: what the method takes after the problem; the labels are for those that are not None.
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
    """The computation of one device, between arrays whose numbers count through the sequences of all devices.

    Args:
        problem: the call of one device.
        method: see `rule`.
        part: what the device has.
        compute: takes and gives numbers that count through its own sequences.
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
