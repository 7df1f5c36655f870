"""MoBA on torch tensors through DLPack and JAX, used on the CPU and where JAX is requested."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import torch

from blockdiag.common.dispatch import call_implementation
from blockdiag.interop._lifetimes import same_device
from blockdiag.interop.dlpack import to_torch
from blockdiag.ops.moba.api import Call
from blockdiag.ops.moba.lists import Lists
from blockdiag.ops.moba.problem import MoBAProblem
from blockdiag.ops.moba.routing import given_choice, indices_of_choice
from blockdiag.ops.moba.tables import moba_tables
from blockdiag.torch.bridge import check_call, precision, to_array, to_array_or_none
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


def route(arguments: ListArguments) -> torch.Tensor:
    """Return the indices of the routing, see `Routing.indices`."""
    problem = describe_lists(arguments)
    shape = (*arguments.query.shape[:-1], arguments.top_k)
    call = _prepare(problem, arguments.implementation, arguments.query)
    if is_empty(problem):
        return torch.full(shape, -1, dtype=torch.int32, device=arguments.query.device)
    with same_device(), precision(arguments.query):
        indices = _route(call, arguments.top_k, arguments.num_sequences, *map(to_array_or_none, arguments[:5]))
        return to_torch(indices)


def find_centroids(
    problem: MoBAProblem, implementation: str, key: torch.Tensor, key_mask: torch.Tensor | None, blocks: torch.Tensor
) -> torch.Tensor:
    """Return the mean keys of the blocks of a table, [num_blocks, K, parts, H]."""
    call = _prepare(problem, implementation, key)
    with same_device(), precision(key):
        return to_torch(_find_centroids(call, *map(to_array_or_none, (key, key_mask, blocks))))


def choose(arguments: ListArguments, centroids: torch.Tensor, sequence_blocks: int) -> torch.Tensor:
    """Return the blocks that queries choose by mean keys, int32 [N, query_tokens, slots]; see `passes.choose`."""
    problem, query = dataclasses.replace(describe_lists(arguments), sequence_blocks=sequence_blocks), arguments.query
    call = _prepare(problem, arguments.implementation, query)
    with same_device(), precision(query):
        given = (query, centroids, arguments.sequence_offsets, arguments.key_sequence_offsets)
        return to_torch(_choose_by_centroids(call, arguments.num_sequences, *map(to_array_or_none, given)))


def make_lists(arguments: ListArguments, chosen: torch.Tensor | None = None) -> ListResults:
    """Return the tables, lists and own blocks of a call; keys are not read if `chosen` or a routing is given."""
    problem, device = describe_lists(arguments), arguments.query.device
    call = _prepare(problem, arguments.implementation, arguments.query)
    if is_empty(problem):
        return no_results(problem, arguments)
    with same_device(), precision(arguments.query):
        query, key, *others = arguments[:6]
        given = (query, key if chosen is None and problem.slots > 0 else None, *others, chosen)
        tables, lists, own = _make_lists(call, arguments.num_sequences, *map(to_array_or_none, given))
        results = [to_torch(one) for one in tables]
        results += no_lists(problem, device) if lists is None else [to_torch(one) for one in lists]
        if own is None:
            results.append(torch.empty(own_shape(problem, has_own=False), dtype=torch.bool, device=device))
        else:
            results.append(to_torch(own))
        return ListResults(*results)


def attend(arguments: AttentionArguments) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output in the shape of `query`, and the log-sum-exp in that shape without its last axis."""
    problem, query = describe_attention(arguments), arguments.query
    call = _prepare(problem, arguments.implementation, arguments.query)
    if is_empty(problem):
        wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        return query.new_zeros(query.shape), query.new_full(query.shape[:-1], -torch.inf, dtype=wide)
    with same_device(), precision(query):
        output, log_sum = map(to_torch, _attend(call, *map(to_array_or_none, arguments[:11])))
        return output, log_sum


def differentiate(
    arguments: AttentionArguments,
    output: torch.Tensor,
    log_sum: torch.Tensor,
    output_cotangent: torch.Tensor,
    log_sum_cotangent: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of query, key and value."""
    problem = describe_attention(arguments)
    call = _prepare(problem, arguments.implementation, arguments.query)
    operands = arguments[:3]
    if is_empty(problem):
        return tuple(operand.new_zeros(operand.shape) for operand in operands)
    with same_device(), precision(arguments.query):
        more = map(to_array, (output, log_sum, output_cotangent, log_sum_cotangent))
        gradients = _differentiate(call, *map(to_array_or_none, arguments[:11]), *more)
        return tuple(map(to_torch, gradients))


def _prepare(problem: MoBAProblem, implementation: str, operand: torch.Tensor) -> Call:
    return Call(problem, check_call(problem, implementation, operand.device))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _route(
    call: Call,
    top_k: int,
    num_sequences: int,
    query: jax.Array,
    key: jax.Array,
    key_mask: jax.Array | None,
    sequence_offsets: jax.Array | None,
    key_sequence_offsets: jax.Array | None,
) -> jax.Array:
    tables = moba_tables(call.problem, num_sequences, sequence_offsets, key_sequence_offsets)
    chosen = _choose(call, _rows(query), _rows(key), _mask_rows(key_mask), tables)
    return indices_of_choice(call.problem, chosen, tables[1], top_k).reshape(*query.shape[:-1], top_k)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _make_lists(
    call: Call,
    num_sequences: int,
    query: jax.Array,
    key: jax.Array | None,
    key_mask: jax.Array | None,
    sequence_offsets: jax.Array | None,
    key_sequence_offsets: jax.Array | None,
    indices: jax.Array | None,
    chosen: jax.Array | None,
) -> tuple[tuple[jax.Array, jax.Array], Lists | None, jax.Array | None]:
    problem = call.problem
    tables = moba_tables(problem, num_sequences, sequence_offsets, key_sequence_offsets)
    own = None
    if indices is not None:
        chosen, own = given_choice(problem, _rows(indices), _mask_rows(key_mask), *tables)
    elif key is not None:
        chosen = _choose(call, _rows(query), _rows(key), _mask_rows(key_mask), tables)
    lists = None if problem.slots == 0 else call_implementation("make_lists", problem, call.implementations, chosen)
    return tables, lists, own


@functools.partial(jax.jit, static_argnums=0)
def _attend(
    call: Call,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    key_mask: jax.Array | None,
    blocks: jax.Array,
    queries: jax.Array,
    *more: Any,
) -> tuple[jax.Array, jax.Array]:
    *lists, own = more
    constants = (_mask_rows(key_mask), blocks, queries, Lists(*lists), own)
    operands = map(_rows, (query, key, value))
    output, log_sum = call_implementation("forward", call.problem, call.implementations, *operands, *constants)
    # Reshaped here because autograd refuses in-place writes to views that an operator returns.
    return output.reshape(query.shape), log_sum.reshape(query.shape[:-1])


@functools.partial(jax.jit, static_argnums=0)
def _differentiate(
    call: Call,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    key_mask: jax.Array | None,
    blocks: jax.Array,
    queries: jax.Array,
    *more: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    *lists, own, output, log_sum, output_cotangent, log_sum_cotangent = more
    constants = (_mask_rows(key_mask), blocks, queries, Lists(*lists), own)
    operands = (query, key, value)
    per_row = (_rows(output), _row_sums(log_sum), _rows(output_cotangent), _row_sums(log_sum_cotangent))
    gradients = call_implementation(
        "backward", call.problem, call.implementations, *map(_rows, operands), *constants, *per_row
    )
    d_query, d_key, d_value = (one.reshape(x.shape) for one, x in zip(gradients, operands, strict=True))
    return d_query, d_key, d_value


@functools.partial(jax.jit, static_argnums=0)
def _find_centroids(call: Call, key: jax.Array, key_mask: jax.Array | None, blocks: jax.Array) -> jax.Array:
    return call_implementation("centroids", call.problem, call.implementations, key, key_mask, blocks)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _choose_by_centroids(
    call: Call,
    num_sequences: int,
    query: jax.Array,
    centroids: jax.Array,
    sequence_offsets: jax.Array | None,
    key_sequence_offsets: jax.Array | None,
) -> jax.Array:
    _, queries = moba_tables(call.problem, num_sequences, sequence_offsets, key_sequence_offsets)
    return call_implementation("choose", call.problem, call.implementations, _rows(query), centroids, queries)


def _choose(call: Call, query: jax.Array, key: jax.Array, key_mask: jax.Array | None, tables: tuple) -> jax.Array:
    problem = call.problem
    if problem.slots == 0:
        return jnp.zeros((problem.query_heads, problem.query_tokens, 0), jnp.int32)
    return call_implementation("route", problem, call.implementations, query, key, key_mask, *tables)


def _rows(x: jax.Array) -> jax.Array:
    """Flatten [*batch, T, heads, columns] to one token axis."""
    return x.reshape(-1, *x.shape[-2:])


def _row_sums(x: jax.Array) -> jax.Array:
    """Flatten [*batch, T, heads] to one token axis."""
    return x.reshape(-1, x.shape[-1])


def _mask_rows(key_mask: jax.Array | None) -> jax.Array | None:
    return None if key_mask is None else key_mask.reshape(-1)
