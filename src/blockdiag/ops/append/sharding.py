"""Sharding of appending to a paged cache: key heads are divided, and batch rows too with a contiguous cache.

The shardings of the written arrays alone decide the division, because they are large and never gathered. New tokens are
few and are gathered where needed: each device with pages of a pool writes the tokens of all batch rows to them.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from blockdiag.common.rule import Dim, Rule
from blockdiag.common.shards import Part
from blockdiag.ops.append.problem import AppendProblem
from blockdiag.ops.paged.pools import check_tokens, full_spec, unfit_pools

OPERANDS = (
    "key", "value", "key_pages", "value_pages", "page_table", "kv_lengths", "query_lengths", "query_offsets", "cos",
    "sin", "positions", "key_scale", "value_scale", "key_centroids",
)  # fmt: skip
"""The arrays of a call in the order of a rule's operands: its arguments, with the arrays of `rotary` inlined."""

_POOLS = ("key_pages", "value_pages")


def rule(problem: AppendProblem, implementations: tuple[str, ...] | None, operands: Mapping[str, Any]) -> Rule:
    """Return the sharding rule of a call.

    Args:
        problem: the call.
        implementations: names of the implementations to try, or None.
        operands: arrays or None, by name, in the order of `OPERANDS`.
    """
    given = {name: x for name, x in operands.items() if x is not None}
    row: Dim = () if problem.has_page_table else ("rows",)
    pool = (("pages",) if problem.has_page_table else ("rows",), ("page_rows",), ("key_heads",))
    tokens: tuple[Dim, ...] = ((),) if problem.is_packed else (row, ())
    by_rank: dict[str, dict[int, tuple[Dim, ...]]] = {
        "scale": {0: (), 2: (row, ("key_heads",)), 3: pool},
        "table": {2: ((), ()), 3: (row, (), ())},
        "positions": {1: ((),), 2: (row, ())},
    }
    labels: dict[str, tuple[Dim, ...]] = {
        "key": (*tokens, ("key_heads",), ()),
        "value": (*tokens, ("key_heads",), ()),
        "key_pages": (*pool, ("features",)),
        "value_pages": (*pool, ("values",)),
        "page_table": (row, ()),
        "kv_lengths": (row,),
        "query_lengths": (row,),
        "query_offsets": ((),),
        "key_centroids": (row, (), ("key_heads",), ()),
    }
    kinds = {"cos": "table", "sin": "table", "positions": "positions", "key_scale": "scale", "value_scale": "scale"}
    labels |= {name: by_rank[kind][given[name].ndim] for name, kind in kinds.items() if name in given}
    sizes = {
        "rows": problem.batch,
        "key_heads": problem.key_heads,
        "features": problem.head_dim,
        **({"values": problem.value_dim} if problem.has_values else {}),
        "pages": problem.num_pages,
        "page_rows": problem.page_size,
    }
    return Rule(
        "append_to_pages",
        repr((problem, implementations)),
        tuple(labels[name] for name in given),
        tuple(labels[name] for name in problem.written),
        tuple(sizes.items()),
        frozenset(("key_heads", *row)),
        anchors=tuple(list(given).index(name) for name in problem.written),
        is_anchored=True,
    )


def local_problem(problem: AppendProblem, part: Part, operands: Mapping[str, Any]) -> AppendProblem:
    """Return the call of one device, given the operands on it."""
    if not part.starts:
        return problem
    sizes, rotary = part.sizes, problem.rotary
    if rotary is not None:
        rotary = dataclasses.replace(rotary, table_rows=math.prod(operands["cos"].shape[:-1]))
    return dataclasses.replace(
        problem,
        tokens=math.prod(operands["key"].shape[:-2]),
        batch=sizes["rows"],
        key_heads=sizes["key_heads"],
        num_pages=problem.num_pages if problem.has_page_table else sizes["rows"],
        rotary=rotary,
    )


def check(rule: Rule, operands: Mapping[str, Any]) -> None:
    """Refuse shardings that would move or divide pages on a mesh with explicit axes.

    Raises:
        ValueError: the key is sharded over tokens or features, or over batch rows of shared pages; or the pages are
            sharded differently from the key.
    """
    key = operands["key"]
    check_tokens("key", key)
    spec = full_spec(key)
    if key.ndim == 4 and spec[0] is not None and operands["page_table"] is not None:
        raise ValueError(
            f"`key` must not be sharded over batch rows, {spec}, where sequences share the pages of a table: devices "
            "would write different tokens into copies of one pool; call inside jax.shard_map where each has its own"
        )
    # The pages must be divided by everything that the key's sharding would divide, so the rule is not anchored here.
    rule = dataclasses.replace(rule, is_anchored=False)
    for name, (given, wanted) in unfit_pools(rule, operands, _POOLS, is_exact=True).items():
        raise ValueError(
            f"`{name}` must be sharded as `key` is, {wanted}, got {given} for shape {operands[name].shape}; use "
            "jax.sharding.reshard once, before the first append"
        )
