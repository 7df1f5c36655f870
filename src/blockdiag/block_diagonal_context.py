"""Block-diagonal attention over sequences whose tokens several devices share."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from blockdiag.context_parallel import ContextParallel, choose_strategy, exchange, next_multiple, on_parts, roles_of
from blockdiag.rotary import Rotary


def attend_to_shared_tokens(
    context: ContextParallel,
    attend: Callable[..., Array],
    query: Array,
    key: Array,
    value: Array,
    sequence_offsets: Array | None,
    block_lengths: Array | None,
    rotary: Rotary | None,
    *,
    block_size: int,
) -> Array:
    """The output of each device's tokens.

    Batched sequences whose cuts lie between blocks need nothing of each other; all others exchange tokens for heads.

    Args:
        context: which devices share the tokens.
        attend: `block_diagonal_attention` with everything but these arrays.
        query, key, value, sequence_offsets, block_lengths, rotary, block_size: of the call; offsets, lengths and tables
            of positions are those of all tokens, tables of tokens and positions those of the device's.

    Raises:
        ValueError: the strategy cannot serve.
    """
    if context.strategy == "gather":
        raise ValueError("strategy 'gather' does not serve `block_diagonal_attention`; leave it None, or use 'ulysses'")
    heads = roles_of(query, "th.")
    tables = positions = None
    tables_roles = positions_roles = ""
    if rotary is not None:
        tables, positions = (jnp.asarray(rotary.cos), jnp.asarray(rotary.sin)), rotary.positions
        tables_roles = roles_of(tables[0], "t.") if rotary.per_token else ".."
        positions_roles = "" if positions is None else roles_of(jnp.asarray(positions), "t")
    has_equal_sequences = sequence_offsets is None and block_lengths is None
    compute = functools.partial(
        _on_device, context, attend, rotary, "t" in tables_roles, block_size, has_equal_sequences
    )
    cos, sin = (None, None) if tables is None else tables
    arrays = (query, key, value, sequence_offsets, block_lengths, cos, sin, positions)
    roles = (heads, heads, heads, ".", ".", tables_roles, tables_roles, positions_roles)
    return on_parts(context, compute, [None if x is None else jnp.asarray(x) for x in arrays], roles, heads)


def _on_device(
    context: ContextParallel,
    attend: Callable[..., Array],
    rotary: Rotary | None,
    is_per_token: bool,
    block_size: int,
    has_equal_sequences: bool,
    query: Array,
    key: Array,
    value: Array,
    sequence_offsets: Array | None,
    block_lengths: Array | None,
    cos: Array | None,
    sin: Array | None,
    positions: Array | None,
) -> Array:
    own = query.shape[-3]

    def with_tables(cos: Array | None, sin: Array | None, positions: Array | None) -> Rotary | None:
        # Of the wanted shapes, whatever the public constructor was given.
        return None if rotary is None else dataclasses.replace(rotary, cos=cos, sin=sin, positions=positions)  # pyrefly: ignore[bad-argument-type]

    if has_equal_sequences and context.strategy is None and own % block_size == 0:
        if rotary is not None and positions is None and not is_per_token:
            positions = jax.lax.axis_index(context.axis).astype(jnp.int32) * own + jnp.arange(own, dtype=jnp.int32)
        return attend(query, key, value, rotary=with_tables(cos, sin, positions))
    exchanging = dataclasses.replace(context, strategy="ulysses")
    devices = jax.lax.axis_size(context.axis)
    length = next_multiple(own, block_size) * devices
    remedy = f"batched sequences of {length} tokens, {own * devices} here, are cut between blocks and need no exchange"
    choose_strategy(exchanging, key.shape[-2], devices, remedy)

    def whole(x: Array | None, from_last: int) -> Array | None:
        return None if x is None else jax.lax.all_gather(x, context.axis, axis=x.ndim - from_last, tiled=True)

    if is_per_token:
        cos, sin = whole(cos, 2), whole(sin, 2)
    options: dict[str, Any] = {
        "sequence_offsets": sequence_offsets,
        "block_lengths": block_lengths,
        "rotary": with_tables(cos, sin, whole(positions, 1)),
    }
    (output,) = exchange(context.axis, lambda *x: (attend(*x, **options),), query, (key, value))
    return output
