"""Context-parallel block-diagonal attention: several devices share the tokens of each sequence."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from blockdiag.common.context_parallel import (
    ContextParallel,
    check_packing,
    choose_strategy,
    on_parts,
    refuse_ring,
    roles_of,
    rows_after,
    rows_before,
)
from blockdiag.common.context_sizes import next_multiple
from blockdiag.common.exchange import exchange
from blockdiag.common.rotary import Rotary


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
    is_causal: bool,
) -> Array:
    """Compute block-diagonal attention of tokens that several devices share.

    Batched sequences that are cut between blocks need no communication. Where a cut divides a block, its devices
    receive each other's rows: at most `block_size - 1` on each side, and no later rows in causal calls. Where a device
    has fewer rows than that, devices exchange tokens for heads.

    Args:
        context: the devices that share the tokens, and their strategy.
        attend: `block_diagonal_attention` with all options except these arrays.
        query, key, value, sequence_offsets, block_lengths, rotary, block_size, is_causal: arguments of the call.
            Offsets, lengths and tables by position are those of all tokens. Inside `jax.shard_map`, positions and
            tables by token are those of the device's tokens.

    Raises:
        ValueError: the strategy does not support the call.
    """
    refuse_ring(context, "`block_diagonal_attention`", "leave it None, or use 'ulysses'")
    if context.strategy == "gather":
        raise ValueError(
            "strategy 'gather' does not support `block_diagonal_attention`; leave it None, or use 'ulysses'"
        )
    check_packing(context, query.shape[:-2], sequence_offsets, block_lengths, block_size)
    heads = roles_of(query, "th.")
    tables = positions = None
    tables_roles = positions_roles = ""
    if rotary is not None:
        tables, positions = (jnp.asarray(rotary.cos), jnp.asarray(rotary.sin)), rotary.positions
        tables_roles = roles_of(tables[0], "t.") if rotary.per_token else ".."
        positions_roles = "" if positions is None else roles_of(jnp.asarray(positions), "t")
    has_equal_sequences = sequence_offsets is None and block_lengths is None
    compute = functools.partial(
        _on_device, context, attend, rotary, "t" in tables_roles, block_size, is_causal, has_equal_sequences
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
    is_causal: bool,
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
        # If there is a rotary embedding, the tables are arrays of the right shapes, which the type checker cannot know.
        return None if rotary is None else dataclasses.replace(rotary, cos=cos, sin=sin, positions=positions)  # pyrefly: ignore[bad-argument-type]

    if has_equal_sequences and context.strategy is None and own % block_size == 0:
        if rotary is not None and positions is None and not is_per_token:
            positions = jax.lax.axis_index(context.axis).astype(jnp.int32) * own + jnp.arange(own, dtype=jnp.int32)
        return attend(query, key, value, rotary=with_tables(cos, sin, positions))
    if context.strategy is None and block_size - 1 <= own:
        after = 0 if is_causal else block_size - 1
        rows = _Rows(context.axis, own, block_size - 1, after, query.shape[:-3])
        offsets = sequence_offsets if block_lengths is None else _edges(block_lengths)
        if offsets is None:
            offsets = jnp.asarray([0, own * jax.lax.axis_size(context.axis)], jnp.int32)
        if is_per_token:
            cos, sin = (None if x is None else rows.longer(x, 2) for x in (cos, sin))
        if positions is not None:
            positions = rows.longer(positions, 1)
        elif rotary is not None and not is_per_token:
            positions = rows.flat(rows.places(offsets), 1)
        longer = [rows.longer(x, 3) for x in (query, key, value)]
        whole_offsets = rows.offsets(offsets, block_size)
        output = attend(*longer, sequence_offsets=whole_offsets, rotary=with_tables(cos, sin, positions))
        output = rows.own_rows(output)
        if block_lengths is None:
            return output
        # Rows beyond `block_size` of a traced length belong to no block.
        is_inside = rows.places(offsets)[rows.before : rows.before + own] < block_size
        return jnp.where(is_inside[:, None, None], output, 0)
    exchanging = dataclasses.replace(context, strategy="ulysses")
    devices = jax.lax.axis_size(context.axis)
    length = next_multiple(own, block_size) * devices
    remedy = f"batched sequences of {length} tokens, {own * devices} here, are cut between blocks and need no exchange"
    if not has_equal_sequences:
        remedy = f"share among fewer devices, so that each has {block_size - 1} tokens or more, {own} here"
    choose_strategy(exchanging, (query.shape[-2], key.shape[-2]), devices, remedy)

    def whole(x: Array | None, from_last: int) -> Array | None:
        return None if x is None else jax.lax.all_gather(x, context.axis, axis=x.ndim - from_last, tiled=True)

    if is_per_token:
        cos, sin = whole(cos, 2), whole(sin, 2)
    others = (sequence_offsets, block_lengths, with_tables(cos, sin, whole(positions, 1)))
    (output,) = exchange(context.axis, functools.partial(_attend_to_heads, attend), query, (key, value), others)
    return output


def _attend_to_heads(
    attend: Callable[..., Array], query: Array, keys: list[Array], others: Any, prepared: tuple[()]
) -> tuple[Array]:
    """Compute attention for some heads over whole sequences."""
    del prepared
    sequence_offsets, block_lengths, rotary = others
    output = attend(query, *keys, sequence_offsets=sequence_offsets, block_lengths=block_lengths, rotary=rotary)
    return (output,)


@dataclasses.dataclass(frozen=True)
class _Rows:
    """A device's rows, extended by the rows of its neighbours that its blocks reach.

    Attributes:
        axis: name of the mesh axis, manual here.
        own: number of the device's own rows.
        before, after: number of rows from the previous and the next device.
        batch: sizes of the batch axes of operands. Batch rows are laid out back to back, as packed sequences.
    """

    axis: str
    own: int
    before: int
    after: int
    batch: tuple[int, ...]

    @property
    def length(self) -> int:
        return self.before + self.own + self.after

    @property
    def first(self) -> Array:
        """Index of the first row among the rows of all devices; negative on the first device."""
        return jax.lax.axis_index(self.axis).astype(jnp.int32) * self.own - self.before

    def longer(self, x: Array, from_last: int) -> Array:
        """Extend an array [.., own, ..], with tokens in axis -`from_last`, by its neighbours' rows to [rows, ..]."""
        tokens = x.ndim - from_last
        rows = [rows_before(x, self.axis, tokens, self.before), x, rows_after(x, self.axis, tokens, self.after)]
        return self.flat(jnp.concatenate(rows, tokens), from_last)

    def flat(self, x: Array, from_last: int) -> Array:
        """Flatten [.., length, ..] to [rows, ..]; an array without batch axes is repeated for all batch rows."""
        rest = x.shape[x.ndim - from_last :]
        return jnp.broadcast_to(x, (*self.batch, *rest)).reshape(-1, *rest[1:])

    def own_rows(self, x: Array) -> Array:
        """Return the device's own rows [.., own, ..] of [rows, ..]."""
        x = x.reshape(*self.batch, self.length, *x.shape[1:])
        return jax.lax.slice_in_dim(x, self.before, self.before + self.own, axis=len(self.batch))

    def offsets(self, offsets: Array, block_size: int) -> Array:
        """Return offsets of the sequences in these rows that keep every block boundary where it is among all rows."""
        first = self.first
        # A sequence that began before these rows continues with its first block that begins within them.
        begun = offsets + -(-(first - offsets) // block_size) * block_size
        ends = jnp.maximum(jnp.concatenate([offsets[1:], offsets[-1:]]), first)
        starts = jnp.where(offsets < first, jnp.minimum(begun, ends), offsets)
        starts = jnp.clip(starts - first, 0, self.length).astype(jnp.int32)
        count = math.prod(self.batch)
        return (jnp.arange(count, dtype=jnp.int32)[:, None] * self.length + starts[None]).reshape(-1)

    def places(self, offsets: Array) -> Array:
        """Return the position of each row in its sequence, int32 [length]."""
        first = self.first
        at = jnp.clip(offsets - first, 0, self.length)
        starts = jnp.zeros(self.length + 1, jnp.int32).at[at].max(offsets.astype(jnp.int32))
        return jnp.maximum(first + jnp.arange(self.length, dtype=jnp.int32) - jax.lax.cummax(starts)[:-1], 0)


def _edges(block_lengths: Array) -> Array:
    """Return the offsets of blocks that lie back to back, each as its own sequence."""
    return jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(block_lengths, dtype=jnp.int32)])
