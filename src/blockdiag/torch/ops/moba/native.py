"""MoBA on CUDA tensors: the Triton launch plans, on the current stream. Imports no JAX."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Literal

import torch

from blockdiag.ops.moba.lists import Lists
from blockdiag.ops.moba.problem import MoBAProblem
from blockdiag.torch.launches import Launches, dense, reshaped
from blockdiag.torch.operator import Unsupported
from blockdiag.torch.ops.moba.operators import (
    AttentionArguments,
    ListArguments,
    ListResults,
    describe_attention,
    describe_lists,
    is_empty,
    no_lists,
    no_results,
    own_shape,
)
from blockdiag.torch.ops.moba.routing import given_choice, indices_of_choice
from blockdiag.torch.ops.moba.tables import moba_tables
from blockdiag.triton_kernels.moba.plans import MoBALaunch, supports
from blockdiag.triton_kernels.moba.steps import (
    backward_steps,
    centroid_steps,
    choice_steps,
    forward_steps,
    list_steps,
    routing_steps,
)

# A model repeats a few shapes, entries are small, and compiled kernels are shared by entries.
_REMEMBERED_PASSES = 1024

type Pass = Literal["route", "centroids", "choose", "list", "forward", "backward"]

_RESULTS: Mapping[Pass, Sequence[str]] = {
    "route": ("chosen",),
    "centroids": ("centroids",),
    "choose": ("chosen",),
    "list": Lists._fields,
    "forward": ("output", "log_sum"),
    "backward": ("d_query", "d_key", "d_value"),
}


def route(arguments: ListArguments) -> torch.Tensor:
    """Return the indices of the routing, see `Routing.indices`."""
    problem = describe_lists(arguments)
    shape = (*arguments.query.shape[:-1], arguments.top_k)
    if is_empty(problem):
        return torch.full(shape, -1, dtype=torch.int32, device=arguments.query.device)
    _check_support(problem)
    with torch.cuda.device(arguments.query.device):
        tables = _tables(problem, arguments)
        chosen = _choose(problem, arguments, *tables)
        return reshaped(indices_of_choice(problem, chosen, tables[1], arguments.top_k), shape)


def find_centroids(
    problem: MoBAProblem, implementation: str, key: torch.Tensor, key_mask: torch.Tensor | None, blocks: torch.Tensor
) -> torch.Tensor:
    """Return the mean keys of the blocks of a table, [num_blocks, K, parts, H]."""
    del implementation
    _check_support(problem)
    with torch.cuda.device(key.device):
        arrays = {"key": dense(key), "blocks": blocks}
        (centroids,) = _run("centroids", problem, arrays | _flags(mask=key_mask))
        return centroids


def choose(arguments: ListArguments, centroids: torch.Tensor, sequence_blocks: int) -> torch.Tensor:
    """Return the blocks that queries choose by mean keys, int32 [N, query_tokens, slots]; see `passes.choose`."""
    problem = dataclasses.replace(describe_lists(arguments), sequence_blocks=sequence_blocks)
    _check_support(problem)
    with torch.cuda.device(arguments.query.device):
        _, queries = _tables(problem, arguments)
        arrays = {"query": dense(arguments.query), "queries": queries, "centroids": dense(centroids)}
        (chosen,) = _run("choose", problem, arrays)
        return chosen


def make_lists(arguments: ListArguments, chosen: torch.Tensor | None = None) -> ListResults:
    """Return the tables, lists and own blocks of a call; keys are not read if `chosen` or a routing is given."""
    problem = describe_lists(arguments)
    if is_empty(problem):
        return no_results(problem, arguments)
    _check_support(problem)
    with torch.cuda.device(arguments.query.device):
        tables = _tables(problem, arguments)
        own = None
        if arguments.indices is not None:
            indices = arguments.indices.reshape(problem.query_tokens, problem.query_heads, problem.slots)
            key_mask = None if arguments.key_mask is None else arguments.key_mask.reshape(-1)
            chosen, own = given_choice(problem, indices, key_mask, *tables)
        elif chosen is None:
            chosen = _choose(problem, arguments, *tables)
        lists = _list_choices(problem, chosen)
        if own is None:
            own = torch.empty(own_shape(problem, has_own=False), dtype=torch.bool, device=chosen.device)
        return ListResults(*tables, *lists, own)


def attend(arguments: AttentionArguments) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output in the shape of `query`, and the log-sum-exp in that shape without its last axis."""
    problem, query = describe_attention(arguments), arguments.query
    if is_empty(problem):
        return query.new_zeros(query.shape), query.new_full(query.shape[:-1], -torch.inf, dtype=torch.float32)
    _check_support(problem)
    with torch.cuda.device(query.device):
        output, log_sum = _run("forward", problem, _arrays(arguments))
        return reshaped(output, query.shape), reshaped(log_sum, query.shape[:-1])


def differentiate(
    arguments: AttentionArguments,
    output: torch.Tensor,
    log_sum: torch.Tensor,
    output_cotangent: torch.Tensor,
    log_sum_cotangent: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of query, key and value."""
    problem = describe_attention(arguments)
    operands = arguments[:3]
    if is_empty(problem):
        return tuple(operand.new_zeros(operand.shape) for operand in operands)
    _check_support(problem)
    with torch.cuda.device(arguments.query.device):
        arrays = _arrays(arguments) | {
            "output": dense(output),
            "log_sum": dense(log_sum),
            "output_cotangent": dense(output_cotangent),
            "log_sum_cotangent": dense(log_sum_cotangent),
        }
        if problem.has_padding:
            # No kernel writes rows that belong to no block.
            names = {"d_key": arguments.key, "d_value": arguments.value}
            arrays |= {
                name: torch.zeros_like(one, memory_format=torch.contiguous_format) for name, one in names.items()
            }
        gradients = _run("backward", problem, arrays)
        return tuple(reshaped(gradient, operand.shape) for gradient, operand in zip(gradients, operands, strict=True))


def _check_support(problem: MoBAProblem) -> None:
    reason = supports(problem)
    if reason is not None:
        raise Unsupported(reason)


def _tables(problem: MoBAProblem, arguments: ListArguments) -> tuple[torch.Tensor, torch.Tensor]:
    offsets = arguments.sequence_offsets, arguments.key_sequence_offsets
    return moba_tables(problem, arguments.num_sequences, *offsets, arguments.query.device)


def _choose(
    problem: MoBAProblem, arguments: ListArguments, blocks: torch.Tensor, queries: torch.Tensor
) -> torch.Tensor:
    """Return the global numbers of the blocks that each query chooses, int32 [N, query_tokens, slots]."""
    if problem.slots == 0:
        shape = (problem.query_heads, problem.query_tokens, 0)
        return torch.empty(shape, dtype=torch.int32, device=arguments.query.device)
    arrays = {"query": dense(arguments.query), "key": dense(arguments.key), "blocks": blocks, "queries": queries}
    (chosen,) = _run("route", problem, arrays | _flags(mask=arguments.key_mask))
    return chosen


def _list_choices(problem: MoBAProblem, chosen: torch.Tensor) -> Lists:
    """Return the list of queries that chose each block."""
    if problem.slots == 0:
        return no_lists(problem, chosen.device)
    return Lists(*_run("list", problem, {"chosen": chosen}))


def _arrays(arguments: AttentionArguments) -> dict[str, torch.Tensor]:
    """Return the arrays of attention by their names in the launches."""
    names = ("query", "key", "value", "blocks", "queries", *Lists._fields)
    arrays = {name: dense(getattr(arguments, name)) for name in names}
    return arrays | _flags(mask=arguments.key_mask, own=arguments.own)


def _flags(**given: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """View the given bool tensors as int8, which the kernels read; absent ones are left out."""
    return {name: dense(tensor).view(torch.int8) for name, tensor in given.items() if tensor is not None}


def _run(name: Pass, problem: MoBAProblem, arrays: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Run a pass on the current device and return its results."""
    _launches(name, problem, "own" in arrays, torch.cuda.current_device())(arrays)
    return tuple(arrays[name] for name in _RESULTS[name])


@functools.lru_cache(maxsize=_REMEMBERED_PASSES)
def _launches(name: Pass, problem: MoBAProblem, has_own: bool, device_index: int) -> Launches:
    """Return the launches of a pass."""
    steps = {
        "route": lambda: routing_steps(problem),
        "centroids": centroid_steps,
        "choose": lambda: choice_steps(problem),
        "list": list_steps,
        "forward": lambda: forward_steps(problem),
        "backward": lambda: backward_steps(problem),
    }[name]()
    specs = [MoBALaunch(problem, kind, has_own=has_own, heads=heads) for kind, heads in steps]
    return Launches(specs, device_index, _RESULTS[name])
