"""The routing of MoBA as a value: the blocks that each query of each head sees."""

import functools
import math
from dataclasses import dataclass
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from blockdiag.common import validation
from blockdiag.common.arrays import known_values
from blockdiag.common.packing import count_below, count_not_above
from blockdiag.common.sizes import is_symbolic
from blockdiag.ops.moba.checks import check_moba_block_size, check_top_k
from blockdiag.ops.moba.problem import MoBAProblem
from blockdiag.ops.moba.tables import clip_offsets, count_unmasked, rows_to_sequences

type BlockLists = tuple[
    Int[Array, "num_sequences N num_blocks"], Int[Array, "num_sequences N num_blocks"], Int[Array, " entries"]
]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["indices"], meta_fields=["block_size", "num_blocks"])
@dataclass(frozen=True, eq=False)
class Routing:
    """The blocks that each query of each head sees; a pytree whose block size and number of blocks are static.

    `blockdiag.moba_routing` computes a routing and `blockdiag.moba_attention` takes one, so layers can share it. It may
    be edited with `dataclasses.replace`. The blocks of a query may be in any order, and a repeated block counts once.
    Blocks that a query cannot see are ignored, such as later blocks in causal calls. A query does not see its own block
    if the block is missing. The routing has no gradient.

    Attributes:
        indices: int32 [B, T, N, k] or [T, N, k]: block numbers within the query's sequence, -1 for none. In a causal
            result of `moba_routing` the query's own block comes first; the others follow by descending score.
        block_size: keys of a block.
        num_blocks: blocks of the longest possible sequence, ceil(S / block_size) for keys with S tokens.

    References:
        Choice of blocks: Lu et al., "MoBA: Mixture of Block Attention for Long-Context LLMs" (2025). Block-major lists:
        Xiao et al., "Optimizing Mixture of Block Attention" (FlashMoBA, 2025).

    Example:
        >>> import dataclasses
        >>> import jax
        >>> from blockdiag import moba_attention, moba_routing
        >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 100, 4, 32))
        >>> routing = moba_routing(query, key, block_size=16, top_k=3)
        >>> routing.indices.shape, routing.num_blocks, routing.indices[0, 0].tolist()
        ((100, 4, 3), 7, [0, -1, -1])
        >>> own_block = dataclasses.replace(routing, indices=routing.indices.at[..., 1:].set(-1))
        >>> moba_attention(query, key, value, block_size=16, top_k=3, routing=own_block).shape
        (100, 4, 32)
    """

    indices: Int[Array, "*batch T N k"]
    block_size: int
    num_blocks: int

    @classmethod
    def from_pattern(
        cls, pattern: Bool[Array, "*batch T N num_blocks"], *, block_size: int, top_k: int | None = None
    ) -> Self:
        """Create a routing from a mask of the blocks that each query sees.

        Args:
            pattern: bool [B, T, N, num_blocks] or [T, N, num_blocks].
            block_size: keys of a block.
            top_k: maximum number of blocks per query; num_blocks when None. If a traced pattern has more, the last
                `top_k` blocks are kept.

        Returns:
            The routing, with indices int32 [B, T, N, k] or [T, N, k] in descending order.

        Raises:
            ValueError: an argument is wrong, or a known pattern has a query with more than `top_k` blocks.

        Example:
            >>> import jax.numpy as jnp
            >>> from blockdiag import Routing
            >>> pattern = jnp.tri(3, dtype=bool)[:, None]
            >>> Routing.from_pattern(pattern, block_size=16).indices[:, 0].tolist()
            [[0, -1, -1], [1, 0, -1], [2, 1, 0]]
        """
        if getattr(pattern, "dtype", None) != np.dtype(bool) or pattern.ndim not in (3, 4):
            raise ValueError(
                f"`pattern` must be a bool array [B, T, N, num_blocks] or [T, N, num_blocks], got "
                f"{getattr(pattern, 'dtype', type(pattern))} {getattr(pattern, 'shape', '')}; compare scores with a "
                "threshold to make one"
            )
        num_blocks = pattern.shape[-1]
        top_k = max(num_blocks, 1) if top_k is None else check_top_k(top_k)
        known = known_values(pattern)
        most = 0 if known is None else int(known.sum(axis=-1).max(initial=0))
        if most > top_k:
            raise ValueError(f"`top_k` must be at least the {most} blocks that `pattern` gives a query, got {top_k}")
        blocks = jnp.where(pattern, jnp.arange(num_blocks, dtype=jnp.int32), -1)
        # Descending order puts a query's own block first in causal calls.
        blocks, _ = jax.lax.top_k(blocks, min(top_k, num_blocks))
        padding = [(0, 0)] * (blocks.ndim - 1) + [(0, top_k - blocks.shape[-1])]
        indices = jnp.pad(blocks, padding, constant_values=-1)
        return cls(indices, check_moba_block_size(block_size), num_blocks)

    def to_pattern(self) -> Bool[Array, "*batch T N num_blocks"]:
        """Return the mask of the blocks that each query sees; the inverse of `from_pattern`.

        Returns:
            bool [B, T, N, num_blocks] or [T, N, num_blocks].

        Example:
            >>> import jax.numpy as jnp
            >>> from blockdiag import Routing
            >>> indices = jnp.asarray([[[0, -1]], [[1, 0]]], jnp.int32)
            >>> Routing(indices, block_size=16, num_blocks=3).to_pattern().tolist()
            [[[True, False, False]], [[True, True, False]]]
        """
        block = jnp.arange(self.num_blocks, dtype=jnp.int32)
        block = block.reshape(*[1] * (self.indices.ndim - 1), self.num_blocks, 1)
        return jnp.any(self.indices[..., None, :] == block, axis=-1)

    def to_block_lists(self, sequence_offsets: Int[Array, " offsets"] | None = None) -> BlockLists:
        """Return the list of queries that see each block, in the format of FlashMoBA.

        Args:
            sequence_offsets: int32 [num_sequences + 1] for the routing of packed sequences. Without it, each batch row
                is a sequence.

        Returns:
            Offsets and counts, int32 [num_sequences, N, num_blocks] (FlashMoBA takes int64 offsets), and rows, int32
            [B * T * N * k]. The list of a sequence, head and block is rows[offset : offset + count], the ascending rows
            of its queries within their sequence. Unused entries are -1.

        Raises:
            ValueError: `sequence_offsets` is wrong, or the lists are too long for int32 offsets.

        Example:
            >>> import jax.numpy as jnp
            >>> from blockdiag import Routing
            >>> routing = Routing(jnp.asarray([[[[0]], [[1]], [[1]]]], jnp.int32), block_size=16, num_blocks=2)
            >>> offsets, counts, rows = routing.to_block_lists()
            >>> counts.tolist(), rows.tolist()
            ([[[1, 2]]], [0, 1, 2])
        """
        *tokens_shape, num_heads, top_k = self.indices.shape
        tokens = math.prod(tokens_shape)
        _check_size(self.indices.size)
        edges = _edges(tokens_shape, sequence_offsets)
        num_sequences = edges.shape[0] - 1
        num_lists = num_sequences * self.num_blocks
        if tokens == 0 or num_lists == 0:
            zeros = jnp.zeros((num_sequences, num_heads, self.num_blocks), jnp.int32)
            return zeros, zeros, jnp.full(self.indices.size, -1, jnp.int32)
        sequence, is_member = rows_to_sequences(edges, tokens)
        indices = jnp.asarray(self.indices).reshape(tokens, num_heads, top_k)
        is_named = is_member[:, None, None] & (indices >= 0) & (indices < self.num_blocks) & ~_is_repeated(indices)
        number = jnp.where(is_named, sequence[:, None, None] * self.num_blocks + indices, num_lists)
        number = jnp.moveaxis(number, 1, 0).reshape(num_heads, tokens * top_k)
        # A stable sort by list within each head keeps queries ascending. Entries in no list come last.
        row = jnp.repeat(jnp.arange(tokens, dtype=jnp.int32) - edges[sequence], top_k)
        number, rows = jax.lax.sort((number, jnp.broadcast_to(row[None], number.shape)), num_keys=1, is_stable=True)
        rows = jnp.where(number < num_lists, rows, -1)
        bounds = jnp.arange(num_lists + 1, dtype=jnp.int32)
        ends = jax.vmap(lambda ordered: count_below(ordered, bounds))(number)
        starts = ends[:, :-1] + jnp.arange(num_heads, dtype=jnp.int32)[:, None] * (tokens * top_k)

        def by_sequence(x: Array) -> Array:
            return jnp.swapaxes(x.reshape(num_heads, num_sequences, self.num_blocks), 0, 1)

        return by_sequence(starts), by_sequence(jnp.diff(ends, axis=1)), rows.reshape(-1)

    @classmethod
    def from_block_lists(
        cls,
        offsets: Int[Array, "num_sequences N num_blocks"],
        counts: Int[Array, "num_sequences N num_blocks"],
        rows: Int[Array, " entries"],
        *,
        num_queries: int,
        block_size: int,
        top_k: int,
        sequence_offsets: Int[Array, " offsets"] | None = None,
    ) -> Self:
        """Create a routing from lists in the format of FlashMoBA; see `to_block_lists`.

        The blocks of a query are in descending order. If traced lists have more than `top_k` blocks for a query, the
        last `top_k` are kept. Queries beyond the end of their sequence are ignored.

        Args:
            offsets, counts: [num_sequences, N, num_blocks], of any integer dtype.
            rows: [entries], of any integer dtype. Lists must not overlap.
            num_queries: T, tokens of a sequence, or the total over packed sequences.
            block_size: keys of a block.
            top_k: maximum number of blocks per query.
            sequence_offsets: int32 [num_sequences + 1] for packed sequences; the result is then [T, N, k], otherwise
                [num_sequences, T, N, k].

        Returns:
            The routing, with indices int32 [num_sequences, T, N, k], or [T, N, k] with `sequence_offsets`.

        Raises:
            ValueError: an argument is wrong, or known lists have more than `top_k` blocks for a query.

        Example:
            >>> import jax.numpy as jnp
            >>> from blockdiag import Routing
            >>> routing = Routing(jnp.asarray([[[[0]], [[1]], [[1]]]], jnp.int32), block_size=16, num_blocks=2)
            >>> lists = routing.to_block_lists()
            >>> Routing.from_block_lists(*lists, num_queries=3, block_size=16, top_k=1).indices.tolist()
            [[[[0]], [[1]], [[1]]]]
        """
        offsets, counts, rows = (
            _as_int32(x, name) for x, name in ((offsets, "offsets"), (counts, "counts"), (rows, "rows"))
        )
        if offsets.ndim != 3 or counts.shape != offsets.shape or rows.ndim != 1:
            raise ValueError(
                f"`offsets` and `counts` must have one shape [num_sequences, N, num_blocks] and `rows` rank 1, got "
                f"{offsets.shape}, {counts.shape} and {rows.shape}"
            )
        num_sequences, num_heads, num_blocks = offsets.shape
        top_k, block_size = check_top_k(top_k), check_moba_block_size(block_size)
        tokens_shape = (num_sequences, num_queries) if sequence_offsets is None else (num_queries,)
        edges = _edges(tokens_shape, sequence_offsets)
        if edges.shape[0] != num_sequences + 1:
            raise ValueError(
                f"`sequence_offsets` must have shape ({num_sequences + 1},), one more than `offsets` has sequences, "
                f"got {edges.shape}"
            )
        tokens, num_lists = math.prod(tokens_shape), offsets.size
        _check_size(tokens * num_heads * top_k)
        shape = (*tokens_shape, num_heads, top_k)
        if tokens == 0 or num_lists == 0 or rows.size == 0:
            return cls(jnp.full(shape, -1, jnp.int32), block_size, num_blocks)
        pair, block = _pairs_of_lists(offsets, counts, rows, edges, tokens)
        # Sort by (query, head) pair, then by descending block. The rank within a pair is the slot.
        pair, block = jax.lax.sort((pair, -block), num_keys=2)
        slot = jnp.arange(rows.size, dtype=jnp.int32) - count_below(pair, pair)
        most = known_values(jnp.max(jnp.where(pair < tokens * num_heads, slot, -1)) + 1)
        if most is not None and most > top_k:
            raise ValueError(f"`top_k` must be at least the {most} blocks that the lists give a query, got {top_k}")
        indices = jnp.full((tokens * num_heads, top_k), -1, jnp.int32).at[pair, slot].set(-block, mode="drop")
        return cls(indices.reshape(shape), block_size, num_blocks)


def given_choice(
    problem: MoBAProblem,
    indices: Int[Array, "query_tokens N k"],
    key_mask: Bool[Array, " key_tokens"] | None,
    blocks: Int[Array, "num_blocks 4"],
    queries: Int[Array, "query_tokens 4"],
) -> tuple[Int[Array, "N query_tokens k"], Bool[Array, "N query_tokens"] | None]:
    """Convert a given routing to the form that implementations take.

    Args:
        problem: a call with k slots.
        indices: block numbers within the sequence of each query.
        key_mask, blocks, queries: the key mask and the tables of the call.

    Returns:
        chosen: global numbers of the chosen blocks that the query may see, in the order of `indices`, then -1.
        own: whether each query sees its own block; None in calls that are not causal.
    """
    first = queries[:, 0, None, None]
    # Indices are compared before anything is added to them, because huge values would overflow.
    end = queries[:, 1, None, None] - first
    is_chosen = (indices >= 0) & (indices < end) & ~_is_repeated(indices)
    block = first + jnp.where(is_chosen, indices, 0)
    if key_mask is not None:
        has_keys = count_unmasked(key_mask, blocks) > 0
        is_chosen = is_chosen & has_keys[block]
    # Compact the slots: the slot of a chosen block is the number of chosen blocks before it.
    slot = jnp.cumsum(is_chosen, axis=-1, dtype=jnp.int32) - 1
    target = jnp.arange(problem.slots, dtype=jnp.int32).reshape(1, 1, -1, 1)
    is_target = is_chosen[..., None, :] & (slot[..., None, :] == target)
    chosen = jnp.max(jnp.where(is_target, block[..., None, :], -1), axis=-1, initial=-1)
    own = None
    if problem.is_causal:
        # In causal calls, the end of the blocks that a query may choose is the number of its own block.
        own = jnp.any(indices == end, axis=-1) & (queries[:, 3] > queries[:, 2])[:, None]
    return jnp.moveaxis(chosen, 1, 0), None if own is None else own.T


def indices_of_choice(
    problem: MoBAProblem, chosen: Int[Array, "N query_tokens slots"], queries: Int[Array, "query_tokens 4"], top_k: int
) -> Int[Array, "query_tokens N k"]:
    """Convert chosen global block numbers to numbers within each query's sequence, with its own block first."""
    first, own = queries[:, 0, None, None], queries[:, 1, None, None]
    indices = jnp.moveaxis(chosen, 0, 1)
    indices = jnp.where(indices < 0, -1, indices - first)
    if problem.is_causal:
        has_own = (queries[:, 3] > queries[:, 2])[:, None, None]
        own = jnp.broadcast_to(jnp.where(has_own, own - first, -1), (*indices.shape[:-1], 1))
        indices = jnp.concatenate([own, indices], axis=-1)
    return jnp.pad(indices, ((0, 0), (0, 0), (0, top_k - indices.shape[-1])), constant_values=-1)


def _pairs_of_lists(offsets: Array, counts: Array, rows: Array, edges: Array, tokens: int) -> tuple[Array, Array]:
    """Return the (query, head) pair, row * N + n, and the block of each entry of `rows`.

    Entries in no list get the out-of-range pair tokens * N.
    """
    num_sequences, num_heads, num_blocks = offsets.shape
    starts, counts = offsets.reshape(-1), counts.reshape(-1)
    # Where lists have the same start, the longest comes last and the others are empty.
    starts, counts, number = jax.lax.sort(
        (starts, counts, jnp.arange(offsets.size, dtype=jnp.int32)), num_keys=2, is_stable=True
    )
    entry = jnp.arange(rows.size, dtype=jnp.int32)
    place = count_not_above(starts, entry) - 1
    place, is_listed = jnp.maximum(place, 0), place >= 0
    is_listed = is_listed & (entry - starts[place] < counts[place])
    sequence, head, block = jnp.unravel_index(number[place], (num_sequences, num_heads, num_blocks))
    is_listed = is_listed & (rows >= 0) & (rows < edges[sequence + 1] - edges[sequence])
    return jnp.where(is_listed, (edges[sequence] + rows) * num_heads + head, tokens * num_heads), block


def _is_repeated(indices: Array) -> Array:
    """Return whether an earlier slot holds the same block."""
    slot = jnp.arange(indices.shape[-1], dtype=jnp.int32)
    is_earlier = (slot[None, :] < slot[:, None]).reshape(*[1] * (indices.ndim - 1), slot.size, slot.size)
    return jnp.any((indices[..., :, None] == indices[..., None, :]) & is_earlier, axis=-1)


def _edges(tokens_shape: tuple[int, ...] | list[int], sequence_offsets: Array | None) -> Array:
    """Return the offsets of sequences in the flattened token axis, int32 [num_sequences + 1]."""
    tokens = math.prod(tokens_shape)
    if sequence_offsets is None:
        num_sequences = math.prod(tokens_shape[:-1])
        return jnp.arange(num_sequences + 1, dtype=jnp.int32) * tokens_shape[-1]
    if len(tokens_shape) != 1:
        raise ValueError(
            f"`sequence_offsets` describes one packed token axis, indices [T, N, k], got tokens of shape "
            f"{tuple(tokens_shape)}; leave it out for sequences in batch rows"
        )
    validation.check_sequence_offsets(tokens, sequence_offsets, operand="routing")
    return clip_offsets(jnp.asarray(sequence_offsets), tokens)


def _as_int32(x: Array, name: str) -> Array:
    dtype = getattr(x, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(
            f"`{name}` must be an integer array, got {type(x) if dtype is None else dtype}; convert it to int32"
        )
    return jnp.asarray(x, jnp.int32)


def _check_size(size: int) -> None:
    if not is_symbolic(size) and size >= 2**31:
        raise ValueError(
            f"`routing` must have fewer than 2**31 indices to be converted from or to lists, got {size}; convert "
            "slices of its heads"
        )
