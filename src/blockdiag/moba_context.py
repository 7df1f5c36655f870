"""MoBA over sequences whose tokens several devices share."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from blockdiag._context_sizes import next_multiple
from blockdiag.context_parallel import (
    ContextParallel,
    choose_strategy,
    exchange,
    gather_tokens,
    on_parts,
    roles_of,
)
from blockdiag.zigzag import from_zigzag, to_zigzag


def attend_to_shared_tokens(
    context: ContextParallel,
    attend: Callable[..., tuple[Array, Array]],
    query: Array,
    key: Array,
    value: Array,
    sequence_offsets: Array | None,
    key_mask: Array | None,
    *,
    block_size: int,
    is_causal: bool,
) -> tuple[Array, Array]:
    """MoBA's output and log-sum-exp, each device with its tokens.

    Args:
        context: which devices share the tokens, and how they work together.
        attend: `moba_attention` with everything but these arrays, and with its residual.
        query, key, value, sequence_offsets, key_mask, block_size, is_causal: of the call; offsets count through the
            tokens of all devices.

    Raises:
        ValueError: the strategy cannot serve.
    """
    if query.shape[:-2] != key.shape[:-2]:
        raise ValueError(
            f"`context_parallel` needs as many queries as keys, got {query.shape[:-2]} and {key.shape[:-2]}; gather "
            "the keys instead, and call without it"
        )
    compute = functools.partial(_on_device, context, attend, block_size, is_causal)
    offsets = None if sequence_offsets is None else jnp.asarray(sequence_offsets)
    heads = roles_of(query, "th.")
    arrays = (query, key, value, offsets, key_mask)
    roles = (heads, heads, heads, ".", roles_of(query, "th.")[:-2])
    return on_parts(context, compute, arrays, roles, (heads, heads[:-1]))


def _on_device(
    context: ContextParallel,
    attend: Callable[..., tuple[Array, Array]],
    block_size: int,
    is_causal: bool,
    query: Array,
    key: Array,
    value: Array,
    offsets: Array | None,
    key_mask: Array | None,
) -> tuple[Array, Array]:
    devices = jax.lax.axis_size(context.axis)
    whole_mask = (
        None if key_mask is None else jax.lax.all_gather(key_mask, context.axis, axis=query.ndim - 3, tiled=True)
    )
    if choose_strategy(context, key.shape[-2], devices) == "ulysses":
        of_heads = functools.partial(attend, sequence_offsets=offsets, key_sequence_offsets=None, key_mask=whole_mask)
        output, log_sum = exchange(context.axis, of_heads, query, (key, value), head_axes=(2, 1))
        return output, log_sum
    own = query.shape[-3]
    if own % block_size:
        raise ValueError(
            f"strategy 'gather' cuts between blocks: the {own} tokens of a device must be a multiple of "
            f"`block_size`={block_size}; pad the {own * devices} tokens to "
            f"{next_multiple(own, block_size) * devices}, or use strategy='ulysses'"
        )
    edges = jnp.asarray([0, own * devices], jnp.int32) if offsets is None else offsets
    tokens, place = query.ndim - 3, jax.lax.axis_index(context.axis).astype(jnp.int32)

    def attended(query: Array, key: Array, value: Array, first: Array) -> tuple[Array, Array]:
        """Queries that follow each other, the first of which has this place."""
        count = query.shape[tokens]
        # Of a sequence that goes on, the last query stands beside the last key that it may see.
        key_offsets = jnp.minimum(edges, first + count) if is_causal else edges
        compute: Any = functools.partial(
            attend, sequence_offsets=jnp.clip(edges - first, 0, count), key_sequence_offsets=key_offsets
        )
        function = lambda q, k, v, mask: compute(q, k, v, key_mask=mask)  # noqa: E731
        for _ in range(tokens):
            function = jax.vmap(function, in_axes=(0, 0, 0, None if whole_mask is None else 0))
        return function(query, key, value, whole_mask)

    if not is_causal or own % (2 * block_size):
        (key,), (value,) = (gather_tokens(x, context.axis, tokens) for x in (key, value))
        return attended(query, key, value, place * own)
    # Late queries look at more blocks to choose from than early ones: each device has some of both.
    part = own // 2
    keys, values = (gather_tokens(x, context.axis, tokens, 2) for x in (key, value))
    queries = jnp.split(to_zigzag(query, context.axis, tokens), 2, axis=tokens)
    starts = (place * part, (2 * devices - 1 - place) * part)
    results = [attended(*each) for each in zip(queries, keys, values, starts, strict=True)]
    output, log_sum = (
        from_zigzag(jnp.concatenate(halves, axis=tokens), context.axis, tokens) for halves in zip(*results, strict=True)
    )
    return output, log_sum
