"""Sharding of paged attention, with or without chosen blocks: batch rows and key heads are independent.

All batch rows share a pool of pages, which stays whole along its pages. A contiguous cache is divided with the batch
rows. Packed queries have no batch axis and stay whole: with a divided contiguous cache, each device computes the
queries of its own sequences, and one all-reduce sums the results.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from blockdiag.common.operation import Problem
from blockdiag.common.rule import Dim, Rule
from blockdiag.common.shards import Part
from blockdiag.ops.paged.pools import check_tokens, unfit_pools
from blockdiag.ops.paged.problem import PagedProblem

OPERANDS = (
    "query", "key_pages", "value_pages", "page_table", "kv_lengths", "query_lengths", "query_offsets", "sinks",
    "key_scale", "value_scale", "query_scale", "key_centroids",
)  # fmt: skip
"""Array arguments of the public functions, in the order of a rule's operands."""

_POOLS = ("key_pages", "value_pages")
_QUERY_HEADS: Dim = ("key_heads", "group")


def rule(
    paged: PagedProblem,
    implementations: tuple[str, ...] | None,
    method: str,
    operands: Mapping[str, Any],
    *,
    whole: Problem | None = None,
    blocks: int = 0,
) -> Rule:
    """Return the sharding rule of a call.

    Args:
        paged: the call, or the paged attention that is a part of it.
        implementations: names of the implementations to try, or None.
        method: text that identifies what else the computation depends on.
        operands: arrays or None, by name, in the order of `OPERANDS`.
        whole: the whole call, where paged attention is only a part of it.
        blocks: number of blocks per sequence with mean keys.
    """
    problem = whole or paged
    is_packed = operands.get("query_offsets") is not None
    # With packed queries, tables and lengths are divided only if the cache is contiguous.
    row: Dim = () if is_packed and paged.has_page_table else ("rows",)
    pool = (("pages",) if paged.has_page_table else ("rows",), ("page_rows",), ("key_heads",))
    rows = (("queries",),) if is_packed else (row, ("queries",))
    scales: dict[int, tuple[Dim, ...]] = {0: (), 2: (row, ("key_heads",)), 3: pool}
    labels: dict[str, tuple[Dim, ...]] = {
        "query": (*rows, _QUERY_HEADS, ("features",)),
        "key_pages": (*pool, ("features",)),
        "value_pages": (*pool, ("values",)),
        "page_table": (row, ()),
        "kv_lengths": (row,),
        "query_lengths": (row,),
        "query_offsets": ((),),
        "sinks": (_QUERY_HEADS,),
        "key_centroids": (row, ("blocks",), ("key_heads",), ("features",)),
    }
    given = {name: x for name, x in operands.items() if x is not None}
    labels |= {name: scales[x.ndim] for name, x in given.items() if name.endswith("_scale")}
    sizes = {
        "rows": paged.batch,
        "queries": given["query"].shape[-3],
        "key_heads": paged.key_heads,
        "group": paged.group_size,
        "features": paged.head_dim,
        "values": paged.value_dim,
        "pages": paged.num_pages,
        "page_rows": paged.page_size,
        "blocks": blocks,
    }
    return Rule(
        problem.operation.name,
        repr((problem, implementations, method)),
        tuple(labels[name] for name in given),
        ((*rows, _QUERY_HEADS, ("values",)), (*rows, _QUERY_HEADS)),
        tuple(sizes.items()),
        frozenset(("key_heads", "group", *row)),
        anchors=tuple(list(given).index(name) for name in _POOLS if name in given),
    )


def local_problem(problem: PagedProblem, part: Part) -> PagedProblem:
    """Return the call of one device, with the same number of splits as the whole call."""
    if not part.starts:
        return problem
    sizes = part.sizes
    return dataclasses.replace(
        problem,
        batch=sizes["rows"],
        query_heads=sizes["key_heads"] * sizes["group"],
        key_heads=sizes["key_heads"],
        num_pages=problem.num_pages if problem.has_page_table else sizes["rows"],
    )


def check(rule: Rule, operands: Mapping[str, Any]) -> None:
    """Refuse shardings that would move a pool between devices of a mesh with explicit axes.

    Raises:
        ValueError: the query is sharded over tokens or features, or the pages over an axis that the call cannot divide.
    """
    check_tokens("query", operands["query"])
    for name, (spec, wanted) in unfit_pools(rule, operands, _POOLS, is_exact=False).items():
        raise ValueError(
            f"`{name}` must be sharded as `query` is, {wanted}, got {spec} for shape {operands[name].shape}; use "
            "jax.sharding.reshard, or call inside jax.shard_map where each device has a pool of its own"
        )
