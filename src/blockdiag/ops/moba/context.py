"""MoBA with context parallelism: sequences whose tokens are sharded over devices."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from blockdiag.common.context_parallel import (
    ContextParallel,
    check_packing,
    choose_strategy,
    gather_tokens,
    on_parts,
    roles_of,
    rows_after,
)
from blockdiag.common.context_sizes import next_multiple
from blockdiag.common.exchange import exchange
from blockdiag.common.packing import count_below
from blockdiag.common.zigzag import from_zigzag, to_zigzag
from blockdiag.ops.moba.centroids import Centroids
from blockdiag.ops.moba.checks import check_moba_block_size, count_packed_blocks, describe_moba_call
from blockdiag.ops.moba.problem import MoBAProblem
from blockdiag.ops.moba.tables import clip_offsets, moba_tables


class Passes(NamedTuple):
    """The passes of MoBA on one device.

    | pass | arguments | by name | result |
    |---|---|---|---|
    | `find_centroids` | problem, implementation, keys, key mask, block table | | mean keys |
    | `route` | query, key, both offsets, key mask | options | chosen blocks |
    | `choose` | query, shape and dtype of keys, both offsets, key mask, mean keys | options | chosen blocks |
    | `attend` | query, key, value, both offsets, key mask | options, chosen blocks | output, log-sum-exp |
    """

    find_centroids: Callable[[MoBAProblem, Any, Array, Array | None, Array], Centroids]
    route: Callable[..., Array | None]
    choose: Callable[..., Array]
    attend: Callable[..., tuple[Array, Array]]


def attend_to_shared_tokens(
    context: ContextParallel,
    passes: Passes,
    query: Array,
    key: Array,
    value: Array,
    sequence_offsets: Array | None,
    key_mask: Array | None,
    options: dict[str, Any],
    *,
    return_residual: bool,
) -> tuple[Array, ...]:
    """Compute MoBA's output, and its log-sum-exp if requested, each device with its own tokens.

    Strategy "gather": every device computes the mean keys of the blocks that begin among its tokens. Mean keys are
    gathered before keys and values. Queries choose their blocks by mean keys alone, so the transfer of keys and values
    overlaps with routing. Blocks and their mean keys are the same as on one device. In packed sequences, the boundary
    between two devices may divide a block. The device where the block begins then receives the rest of it, at most
    `block_size - 1` keys.

    In causal calls, late queries choose from more blocks than early ones. So routing runs on queries in zigzag order,
    which gives each device both early and late ones. All queries except the first few attend to equally many blocks, so
    attention runs on each device's own consecutive queries.

    Args:
        context: the devices that share the tokens, and their strategy.
        passes: the passes of MoBA.
        query, key, value, sequence_offsets, key_mask: arguments of the call; offsets count the tokens of all devices.
        options: the other arguments of the call.
        return_residual: whether to return the log-sum-exp.

    Raises:
        ValueError: the strategy does not support the call.
    """
    if query.shape[:-2] != key.shape[:-2]:
        raise ValueError(
            f"`context_parallel` needs as many queries as keys, got {query.shape[:-2]} and {key.shape[:-2]}; gather "
            "the keys instead, and call without it"
        )
    check_moba_block_size(options["block_size"])
    check_packing(context, query.shape[:-2], sequence_offsets)
    compute = functools.partial(_on_device, context, passes, options, return_residual)
    offsets = None if sequence_offsets is None else jnp.asarray(sequence_offsets)
    heads = roles_of(query, "th.")
    arrays = (query, key, value, offsets, key_mask)
    roles = (heads, heads, heads, ".", roles_of(query, "th.")[:-2])
    return on_parts(context, compute, arrays, roles, (heads, heads[:-1])[: 1 + return_residual])


def _on_device(
    context: ContextParallel,
    passes: Passes,
    options: dict[str, Any],
    return_residual: bool,
    query: Array,
    key: Array,
    value: Array,
    offsets: Array | None,
    key_mask: Array | None,
) -> tuple[Array, ...]:
    devices, tokens = jax.lax.axis_size(context.axis), query.ndim - 3
    whole_mask = None if key_mask is None else jax.lax.all_gather(key_mask, context.axis, axis=tokens, tiled=True)
    if choose_strategy(context, (query.shape[-2], key.shape[-2]), devices) == "ulysses":
        compute = functools.partial(_attend_to_heads, passes, options, return_residual)
        prepare = functools.partial(_route_heads, passes, options)
        return exchange(context.axis, compute, query, (key, value), (offsets, whole_mask), prepare=prepare)
    own, block_size, is_causal = query.shape[tokens], options["block_size"], options["is_causal"]
    if own % block_size:
        raise ValueError(
            f"strategy 'gather' cuts between blocks: the {own} tokens of a device must be a multiple of "
            f"`block_size`={block_size}; pad the {own * devices} tokens to "
            f"{next_multiple(own, block_size) * devices}, or use strategy='ulysses'"
        )
    edges = jnp.asarray([0, own * devices], jnp.int32) if offsets is None else offsets
    whole_key = jax.ShapeDtypeStruct((own * devices, *key.shape[tokens + 1 :]), key.dtype)
    place = jax.lax.axis_index(context.axis).astype(jnp.int32)

    def offsets_of(first: Array, count: int) -> tuple[Array, Array]:
        """Return the offsets of `count` consecutive queries that start at position `first`, and those of the keys."""
        # Causal masks align the last query of a sequence with its last key, so the keys of a sequence that continues
        # on later devices end at the last query. Keys before the queries stay, so that blocks keep their numbers.
        return jnp.clip(edges - first, 0, count), jnp.minimum(edges, first + count) if is_causal else edges

    def choose(query: Array, first: Array) -> Array:
        """Return the blocks that queries choose, [.., N, rows, slots]."""
        both_offsets = offsets_of(first, query.shape[tokens])

        def one_row(query: Array, mask: Array | None, centroids: Centroids) -> Array:
            return passes.choose(query, whole_key, *both_offsets, mask, centroids, **options)

        return _over_rows(one_row, tokens)(query, whole_mask, centroids)

    def attend(*operands: Array | None) -> tuple[Array, ...]:
        both_offsets = offsets_of(place * own, own)

        def one_row(query: Array, key: Array, value: Array, mask: Array | None, chosen: Array | None) -> Any:
            return passes.attend(query, key, value, *both_offsets, mask, chosen=chosen, **options)

        return _over_rows(one_row, tokens)(*operands)[: 1 + return_residual]

    centroids = _gather_centroids(context, passes, options, query, key, offsets, key_mask)
    if centroids is None:
        key, value = gather_tokens([key, value], context.axis, tokens)
        return attend(query, key, value, whole_mask, None)
    choosing, starts = [query], [place * own]
    is_balanced = is_causal and own % (2 * block_size) == 0
    if is_balanced:
        choosing = jnp.split(to_zigzag(jax.lax.stop_gradient(query), context.axis, tokens), 2, axis=tokens)
        starts = [place * (own // 2), (2 * devices - 1 - place) * (own // 2)]
    # Mean keys and queries arrive first. Then the gather of keys and values starts, and it overlaps with the routing.
    centroids, choosing, key, value = _in_order(centroids, choosing, key, value)
    key, value = gather_tokens([key, value], context.axis, tokens)
    chosen, key, value = _in_order([choose(*each) for each in zip(choosing, starts, strict=True)], key, value)
    if is_balanced:
        chosen = [from_zigzag(jnp.concatenate(chosen, axis=tokens + 1), context.axis, tokens + 1)]
    return attend(query, key, value, whole_mask, *chosen)


def _route_heads(passes: Passes, options: dict[str, Any], query: Array, key: Array, others: Any) -> Array | None:
    """Choose the blocks of some heads' queries over whole sequences."""
    offsets, mask = others
    return passes.route(query, key, offsets, None, mask, **options)


def _attend_to_heads(
    passes: Passes,
    options: dict[str, Any],
    return_residual: bool,
    query: Array,
    keys: list[Array],
    others: Any,
    chosen: Array | None,
) -> tuple[Array, ...]:
    """Compute MoBA for some heads over whole sequences, with the blocks that their queries have chosen."""
    offsets, mask = others
    results = passes.attend(query, *keys, offsets, None, mask, chosen=chosen, **options)
    return results[: 1 + return_residual]


def _gather_centroids(
    context: ContextParallel,
    passes: Passes,
    options: dict[str, Any],
    query: Array,
    key: Array,
    offsets: Array | None,
    key_mask: Array | None,
) -> Centroids | None:
    """Return the mean keys of all blocks, [.., num_blocks, K, parts, H], without a gradient; None without routing."""
    devices, tokens = jax.lax.axis_size(context.axis), key.ndim - 3
    own, key = key.shape[tokens], jax.lax.stop_gradient(key)
    whole = [jax.ShapeDtypeStruct((own * devices, *x.shape[tokens + 1 :]), x.dtype) for x in (query, key)]
    mask = None if key_mask is None else jax.ShapeDtypeStruct((own * devices,), key_mask.dtype)
    described = {name: value for name, value in options.items() if name != "implementation"}
    problem = describe_moba_call(
        *whole, sequence_offsets=offsets, key_sequence_offsets=None, key_mask=mask, **described
    )
    if problem.slots == 0:
        return None
    if offsets is None:
        problem = dataclasses.replace(problem, query_tokens=own, key_tokens=own, num_blocks=own // problem.block_size)
        blocks, _ = moba_tables(problem, 1)
        order = None
    else:
        halo = problem.block_size - 1
        key = jnp.concatenate([key, rows_after(key, context.axis, tokens, halo)], axis=tokens)
        if key_mask is not None:
            key_mask = jnp.concatenate([key_mask, rows_after(key_mask, context.axis, tokens, halo)], axis=tokens)
        edges = clip_offsets(offsets, own * devices)
        all_blocks, _ = moba_tables(problem, 1, edges)
        blocks, order = _own_blocks(context, all_blocks, own, edges.shape[0] - 1, problem.block_size)
        problem = dataclasses.replace(problem, query_tokens=own, key_tokens=own + halo, num_blocks=blocks.shape[0])

    def one_row(key: Array, key_mask: Array | None) -> Centroids:
        return passes.find_centroids(problem, options["implementation"], key, key_mask, blocks)

    found = jax.lax.all_gather(_over_rows(one_row, tokens)(key, key_mask), context.axis, axis=tokens, tiled=True)
    return found if order is None else jnp.take(found, order, axis=tokens, mode="clip")


def _own_blocks(
    context: ContextParallel, blocks: Array, own: int, num_sequences: int, block_size: int
) -> tuple[Array, Array]:
    """Return the table of the blocks that begin on this device, and where each block is once all devices are gathered.

    Args:
        context: names the mesh axis that shards tokens.
        blocks: the block table of all tokens.
        own: number of tokens of a device.
        num_sequences, block_size: sizes of the call.
    """
    devices = jax.lax.axis_size(context.axis)
    most = count_packed_blocks(own, num_sequences, block_size)
    # Unused rows of the table come last and are given a start beyond all devices.
    starts = jnp.where(blocks[:, 1] > 0, blocks[:, 0], own * devices)
    firsts = count_below(starts, jnp.arange(devices + 1, dtype=jnp.int32) * own)
    place = jax.lax.axis_index(context.axis).astype(jnp.int32)
    number = firsts[place] + jnp.arange(most, dtype=jnp.int32)
    start, length = jnp.take(blocks, number, axis=0, mode="clip")[:, :2].T
    # The query columns stay 0, since only mean keys are computed from this table.
    columns = [start - place * own, length, jnp.zeros_like(start), jnp.zeros_like(start)]
    table = jnp.where((number < firsts[place + 1])[:, None], jnp.stack(columns, axis=1), 0)
    device = jnp.minimum(starts // own, devices - 1)
    order = device * most + jnp.arange(blocks.shape[0], dtype=jnp.int32) - firsts[device]
    return table, order


def _over_rows(compute: Callable[..., Any], batch_axes: int) -> Callable[..., Any]:
    """Map a function of packed arrays over leading batch axes that all of them have; arguments may be None."""

    def mapped(*arrays: Array | None) -> Any:
        function = compute
        for _ in range(batch_axes):
            function = jax.vmap(function, in_axes=tuple(None if x is None else 0 for x in arrays))
        return function(*arrays)

    return mapped


@jax.custom_vjp
def _in_order(*arrays: Any) -> Any:
    """Return the arrays behind a barrier: none is used before all are ready. Gradients do not wait for each other."""
    return jax.lax.optimization_barrier(arrays)


_in_order.defvjp(lambda *arrays: (_in_order(*arrays), None), lambda _, cotangents: cotangents)
