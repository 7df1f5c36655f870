"""MoBA's routing as a value in torch: the blocks that each query of each head sees."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

from blockdiag.common import validation
from blockdiag.common.arrays import known_values
from blockdiag.ops.moba.checks import check_moba_block_size, check_top_k
from blockdiag.ops.moba.problem import MoBAProblem
from blockdiag.torch.ops.moba.tables import clip_offsets, count_unmasked, rows_to_sequences


@dataclass(frozen=True, eq=False)
class Routing:
    """The blocks that each query of each head sees: `blockdiag.Routing` with a tensor.

    `moba_routing` returns one and `moba_attention` takes one, so layers can share it. It may be edited with
    `dataclasses.replace`. The blocks of a query may stand in any order, and a repeated block counts once. Blocks that a
    query cannot see, such as those after its own in causal calls, are ignored. A query whose own block is missing does
    not see it. Attention treats the routing as constant: it has no gradient.

    Attributes:
        indices: int32 [B, T, N, k] or [T, N, k], block numbers within the sequence of the query, -1 for none.
            `moba_routing` puts the query's own block first in causal calls, then the others by descending score.
        block_size: keys of a block.
        num_blocks: blocks of the longest possible sequence, ceil(S / block_size) for keys with S tokens.

    References:
        Routing: Lu et al., "MoBA: Mixture of Block Attention for Long-Context LLMs" (2025). Lists by block: Xiao et
        al., "Optimizing Mixture of Block Attention" (FlashMoBA, 2025).

    Example:
        >>> import dataclasses
        >>> import torch
        >>> from blockdiag.torch import moba_attention, moba_routing
        >>> query, key, value = torch.randn(3, 48, 2, 16)
        >>> routing = moba_routing(query, key, block_size=16, top_k=2)
        >>> routing.indices.shape, routing.num_blocks, routing.indices[0, 0].tolist()
        (torch.Size([48, 2, 2]), 3, [0, -1])
        >>> indices = routing.indices.clone()
        >>> indices[..., 1] = -1
        >>> own_block = dataclasses.replace(routing, indices=indices)
        >>> moba_attention(query, key, value, block_size=16, top_k=2, routing=own_block).shape
        torch.Size([48, 2, 16])
    """

    indices: torch.Tensor
    block_size: int
    num_blocks: int

    @classmethod
    def from_pattern(cls, pattern: torch.Tensor, *, block_size: int, top_k: int | None = None) -> Self:
        """Return a routing from a mask of the blocks that each query sees.

        Args:
            pattern: bool [B, T, N, num_blocks] or [T, N, num_blocks].
            block_size: keys of a block.
            top_k: slots for blocks of each query; num_blocks when None. If a pattern on a GPU has more blocks, the last
                k are taken.

        Returns:
            The routing, with indices int32 [B, T, N, k] or [T, N, k] from the last block of a query to the first.

        Raises:
            ValueError: an argument is wrong, or a pattern on the CPU has a query with more than `top_k` blocks.

        Example:
            >>> import torch
            >>> from blockdiag.torch import Routing
            >>> pattern = torch.ones(3, 3, dtype=torch.bool).tril()[:, None]
            >>> Routing.from_pattern(pattern, block_size=16).indices[:, 0].tolist()
            [[0, -1, -1], [1, 0, -1], [2, 1, 0]]
        """
        if getattr(pattern, "dtype", None) != torch.bool or pattern.ndim not in (3, 4):
            raise ValueError(
                f"`pattern` must be a bool tensor [B, T, N, num_blocks] or [T, N, num_blocks], got "
                f"{getattr(pattern, 'dtype', type(pattern))} {tuple(getattr(pattern, 'shape', ()))}; compare scores "
                "with a threshold to make one"
            )
        num_blocks = pattern.shape[-1]
        top_k = max(num_blocks, 1) if top_k is None else check_top_k(top_k)
        known = known_values(pattern)
        most = 0 if known is None else int(known.sum(axis=-1).max(initial=0))
        if most > top_k:
            raise ValueError(f"`top_k` must be at least the {most} blocks that `pattern` gives a query, got {top_k}")
        block = torch.arange(num_blocks, dtype=torch.int32, device=pattern.device)
        # From the last block to the first, so that in causal calls a query's own block comes first.
        blocks = torch.where(pattern, block, -1).sort(dim=-1, descending=True).values[..., :top_k]
        indices = torch.nn.functional.pad(blocks, (0, top_k - blocks.shape[-1]), value=-1)
        return cls(indices, check_moba_block_size(block_size), num_blocks)

    def to_pattern(self) -> torch.Tensor:
        """Return a mask of the blocks that each query names.

        Returns:
            bool [B, T, N, num_blocks] or [T, N, num_blocks].

        Example:
            >>> import torch
            >>> from blockdiag.torch import Routing
            >>> indices = torch.tensor([[[0, -1]], [[1, 0]]], dtype=torch.int32)
            >>> Routing(indices, block_size=16, num_blocks=3).to_pattern().tolist()
            [[[True, False, False]], [[True, True, False]]]
        """
        pattern = torch.zeros(
            (*self.indices.shape[:-1], self.num_blocks + 1), dtype=torch.bool, device=self.indices.device
        )
        # Indices that name no block go to an extra column, which is dropped.
        is_block = (self.indices >= 0) & (self.indices < self.num_blocks)
        target = torch.where(is_block, self.indices, self.num_blocks).long()
        return pattern.scatter(-1, target, True)[..., : self.num_blocks]

    def to_block_lists(
        self, sequence_offsets: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return lists of the queries that name each block, in the format of FlashMoBA.

        Args:
            sequence_offsets: int32 [num_sequences + 1] for the routing of packed sequences. Without it each batch row
                is a sequence.

        Returns:
            Offsets and counts, int32 [num_sequences, N, num_blocks] (FlashMoBA takes the offsets as int64), and rows,
            int32 [B * T * N * k]. The list of a sequence, head and block is rows[offset : offset + count], the
            ascending rows of queries within their sequence. Unused entries are -1.

        Raises:
            ValueError: `sequence_offsets` is wrong, or the lists are too long for int32 offsets.

        Example:
            >>> import torch
            >>> from blockdiag.torch import Routing
            >>> routing = Routing(torch.tensor([[[[0]], [[1]], [[1]]]], dtype=torch.int32), block_size=16, num_blocks=2)
            >>> offsets, counts, rows = routing.to_block_lists()
            >>> counts.tolist(), rows.tolist()
            ([[[1, 2]]], [0, 1, 2])
        """
        *tokens_shape, num_heads, top_k = self.indices.shape
        tokens, device = math.prod(tokens_shape), self.indices.device
        _check_size(self.indices.numel())
        edges = _edges(tokens_shape, sequence_offsets, device)
        num_sequences = edges.shape[0] - 1
        num_lists = num_sequences * self.num_blocks
        if tokens == 0 or num_lists == 0:
            offsets = torch.zeros((num_sequences, num_heads, self.num_blocks), dtype=torch.int32, device=device)
            rows = torch.full((self.indices.numel(),), -1, dtype=torch.int32, device=device)
            return offsets, offsets.clone(), rows
        sequence, is_member = rows_to_sequences(edges, tokens)
        indices = self.indices.reshape(tokens, num_heads, top_k)
        is_named = is_member[:, None, None] & (indices >= 0) & (indices < self.num_blocks) & ~_is_repeated(indices)
        number = torch.where(is_named, sequence[:, None, None] * self.num_blocks + indices, num_lists)
        number = number.movedim(1, 0).reshape(num_heads, tokens * top_k).contiguous()
        # A stable sort by list within each head keeps queries ascending; entries without a list come last.
        number, order = number.sort(dim=-1, stable=True)
        row = (torch.arange(tokens, dtype=torch.int32, device=device) - edges[sequence]).repeat_interleave(top_k)
        rows = torch.where(number < num_lists, row[order], -1)
        bounds = torch.arange(num_lists + 1, dtype=torch.int32, device=device).expand(num_heads, -1).contiguous()
        ends = torch.searchsorted(number, bounds, out_int32=True)
        head = torch.arange(num_heads, dtype=torch.int32, device=device)[:, None]
        starts = ends[:, :-1] + head * (tokens * top_k)

        def by_sequence(x: torch.Tensor) -> torch.Tensor:
            return x.reshape(num_heads, num_sequences, self.num_blocks).transpose(0, 1).contiguous()

        return by_sequence(starts), by_sequence(ends.diff(dim=1)), rows.reshape(-1)

    @classmethod
    def from_block_lists(
        cls,
        offsets: torch.Tensor,
        counts: torch.Tensor,
        rows: torch.Tensor,
        *,
        num_queries: int,
        block_size: int,
        top_k: int,
        sequence_offsets: torch.Tensor | None = None,
    ) -> Self:
        """Return a routing from lists in the format of FlashMoBA, see `to_block_lists`.

        The blocks of a query are ordered from the last to the first. If lists on a GPU name more than `top_k` blocks
        for a query, the last ones are taken. Queries beyond the end of their sequence are ignored.

        Args:
            offsets, counts: [num_sequences, N, num_blocks], of any integer dtype.
            rows: [entries], of any integer dtype. Lists must not overlap.
            num_queries: T, the tokens of a sequence, or of all packed sequences together.
            block_size: keys of a block.
            top_k: slots for blocks of each query.
            sequence_offsets: int32 [num_sequences + 1] for packed sequences; the result is then [T, N, k], otherwise
                [num_sequences, T, N, k].

        Returns:
            The routing, with indices int32 [num_sequences, T, N, k], or [T, N, k] with `sequence_offsets`.

        Raises:
            ValueError: an argument is wrong, or lists on the CPU name more than `top_k` blocks for a query.

        Example:
            >>> import torch
            >>> from blockdiag.torch import Routing
            >>> routing = Routing(torch.tensor([[[[0]], [[1]], [[1]]]], dtype=torch.int32), block_size=16, num_blocks=2)
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
                f"{tuple(offsets.shape)}, {tuple(counts.shape)} and {tuple(rows.shape)}"
            )
        num_sequences, num_heads, num_blocks = offsets.shape
        top_k, block_size, device = check_top_k(top_k), check_moba_block_size(block_size), offsets.device
        tokens_shape = (num_sequences, num_queries) if sequence_offsets is None else (num_queries,)
        edges = _edges(tokens_shape, sequence_offsets, device)
        if edges.shape[0] != num_sequences + 1:
            raise ValueError(
                f"`sequence_offsets` must have shape ({num_sequences + 1},), one more than `offsets` has sequences, "
                f"got {tuple(edges.shape)}"
            )
        pairs = math.prod(tokens_shape) * num_heads
        _check_size(pairs * top_k)
        shape = (*tokens_shape, num_heads, top_k)
        if pairs == 0 or offsets.numel() == 0 or rows.numel() == 0:
            indices = torch.full(shape, -1, dtype=torch.int32, device=device)
            return cls(indices, block_size, num_blocks)
        pair, block = _pairs_of_lists(offsets, counts, rows, edges, pairs)
        # Sorted by pair of query and head, and from the last block to the first; the rank within a pair is the slot.
        order = (pair.long() * num_blocks + (num_blocks - 1 - block)).argsort()
        pair, block = pair[order], block[order]
        slot = torch.arange(rows.numel(), dtype=torch.int32, device=device)
        slot = slot - torch.searchsorted(pair, pair, out_int32=True)
        known = known_values(torch.where(pair < pairs, slot, -1).max() + 1)
        if known is not None and known > top_k:
            raise ValueError(f"`top_k` must be at least the {known} blocks that the lists give a query, got {top_k}")
        # Entries without a slot go to an extra element, which is dropped.
        place = torch.where((pair < pairs) & (slot < top_k), pair * top_k + slot, pairs * top_k)
        indices = torch.full((pairs * top_k + 1,), -1, dtype=torch.int32, device=device)
        indices = indices.scatter(0, place.long(), block)
        return cls(indices[:-1].view(shape), block_size, num_blocks)


def given_choice(
    problem: MoBAProblem,
    indices: torch.Tensor,
    key_mask: torch.Tensor | None,
    blocks: torch.Tensor,
    queries: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Convert a routing to the kernels' inputs: chosen blocks, and a mask of the queries that see their own block.

    Args:
        problem: a call with k slots.
        indices: int32 [query_tokens, N, k], numbers of blocks within the sequence of each query.
        key_mask, blocks, queries: the key mask [key_tokens] and the tables of the call.

    Returns:
        chosen: int32 [N, query_tokens, k], global numbers of the chosen blocks that the query may see, in the order of
            `indices`, then -1.
        own: bool [N, query_tokens]; None in calls that are not causal.
    """
    first = queries[:, 0, None, None]
    # Indices are compared before anything is added to them, because large ones would overflow.
    end = queries[:, 1, None, None] - first
    is_chosen = (indices >= 0) & (indices < end) & ~_is_repeated(indices)
    block = first + torch.where(is_chosen, indices, 0)
    if key_mask is not None:
        is_chosen = is_chosen & (count_unmasked(key_mask, blocks) > 0)[block]
    # Valid choices move to the front and keep their order.
    order = (~is_chosen).to(torch.int8).argsort(dim=-1, stable=True)
    chosen = torch.where(is_chosen, block, -1).gather(-1, order)
    own = None
    if problem.is_causal:
        # The end of the blocks that a query may choose is the number of its own block.
        own = (indices == end).any(dim=-1) & (queries[:, 3] > queries[:, 2])[:, None]
        own = own.t().contiguous()
    return chosen.transpose(0, 1).contiguous(), own


def indices_of_choice(problem: MoBAProblem, chosen: torch.Tensor, queries: torch.Tensor, top_k: int) -> torch.Tensor:
    """Return block numbers within the sequence of each query, int32 [query_tokens, N, top_k], own block first.

    Args:
        problem: the call.
        chosen: int32 [N, query_tokens, slots], global numbers.
        queries: the query table.
        top_k: columns of the result.
    """
    first = queries[:, 0, None, None]
    indices = chosen.transpose(0, 1)
    indices = torch.where(indices < 0, -1, indices - first)
    if problem.is_causal:
        has_own = (queries[:, 3] > queries[:, 2])[:, None, None]
        own = torch.where(has_own, queries[:, 1, None, None] - first, -1)
        indices = torch.cat((own.expand(-1, problem.query_heads, 1), indices), dim=-1)
    return torch.nn.functional.pad(indices, (0, top_k - indices.shape[-1]), value=-1).contiguous()


def _is_repeated(indices: torch.Tensor) -> torch.Tensor:
    """Return whether an earlier slot holds the same block, by sorting: comparing all pairs of slots costs too much."""
    ordered, order = indices.sort(dim=-1, stable=True)
    is_repeated = torch.nn.functional.pad(ordered[..., 1:] == ordered[..., :-1], (1, 0))
    return is_repeated.gather(-1, order.argsort(dim=-1))


def _pairs_of_lists(
    offsets: torch.Tensor, counts: torch.Tensor, rows: torch.Tensor, edges: torch.Tensor, pairs: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return, for each entry of `rows`, the query-head pair (row * N + n, or `pairs` for none) and the block."""
    _, num_heads, num_blocks = offsets.shape
    # Among lists with equal starts the longest comes last, and the others are empty.
    number = (offsets.reshape(-1).long() * 2**31 + counts.reshape(-1)).argsort()
    starts, counts = offsets.reshape(-1)[number], counts.reshape(-1)[number]
    entry = torch.arange(rows.numel(), dtype=torch.int32, device=rows.device)
    place = torch.searchsorted(starts, entry, right=True) - 1
    is_listed = place >= 0
    place = place.clamp(min=0)
    is_listed = is_listed & (entry - starts[place] < counts[place])
    number = number[place]
    block, head = number % num_blocks, number // num_blocks % num_heads
    sequence = number // (num_blocks * num_heads)
    is_listed = is_listed & (rows >= 0) & (rows < edges[sequence + 1] - edges[sequence])
    pair = torch.where(is_listed, (edges[sequence] + rows) * num_heads + head, pairs)
    return pair.int(), block.int()


def _edges(tokens_shape: Sequence[int], sequence_offsets: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """Return offsets of sequences in the flattened token axis, int32 [num_sequences + 1]."""
    if sequence_offsets is None:
        num_sequences = math.prod(tokens_shape[:-1])
        return torch.arange(num_sequences + 1, dtype=torch.int32, device=device) * tokens_shape[-1]
    if len(tokens_shape) != 1:
        raise ValueError(
            f"`sequence_offsets` describes one packed token axis, indices [T, N, k], got tokens of shape "
            f"{tuple(tokens_shape)}; leave it out for sequences in batch rows"
        )
    validation.check_sequence_offsets(tokens_shape[0], sequence_offsets, operand="routing")
    return clip_offsets(sequence_offsets.to(device), tokens_shape[0])


def _as_int32(x: torch.Tensor, name: str) -> torch.Tensor:
    if not isinstance(x, torch.Tensor) or x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        found = x.dtype if isinstance(x, torch.Tensor) else type(x)
        raise ValueError(f"`{name}` must be an integer tensor, got {found}; convert it to int32")
    return x.to(torch.int32)


def _check_size(size: int) -> None:
    if size >= 2**31:
        raise ValueError(
            f"`routing` must have fewer than 2**31 indices to be converted from or to lists, got {size}; convert "
            "slices of its heads"
        )
