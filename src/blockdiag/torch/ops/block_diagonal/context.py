"""Context-parallel block-diagonal attention: the tokens of each sequence are divided over processes."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from blockdiag.common.context_sizes import next_multiple
from blockdiag.torch.context.collectives import gather_whole, with_neighbours
from blockdiag.torch.context.exchange import exchange
from blockdiag.torch.context.parallel import ContextParallel, check_parts, choose_strategy, refuse_ring
from blockdiag.torch.rotary import Rotary


# Handles of transfers and process groups cannot be traced.
@torch.compiler.disable
def attend_to_shared_tokens(
    context: ContextParallel,
    attend: Callable[..., torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sequence_offsets: torch.Tensor | None,
    block_lengths: torch.Tensor | None,
    rotary: Rotary | None,
    *,
    block_size: int,
    is_causal: bool,
) -> torch.Tensor:
    """Return the output for the tokens of this process.

    Batched sequences whose cuts lie between blocks need no communication. If a cut divides a block, a process receives
    the block's rows from its neighbours: at most `block_size - 1` on each side, and no later rows in causal attention.
    If a process has fewer rows than that, tokens are exchanged for heads.

    Args:
        context: the processes that share the tokens, and their strategy.
        attend: `block_diagonal_attention` with all other arguments bound.
        query, key, value, sequence_offsets, block_lengths, rotary, block_size, is_causal: as for the call. Offsets,
            lengths and tables indexed by position cover all tokens; per-token tables and positions cover the process's
            tokens.

    Raises:
        ValueError: the strategy does not support the call.
    """
    refuse_ring(context, "`block_diagonal_attention`", "leave it None, or use 'ulysses'")
    if context.strategy == "gather":
        raise ValueError(
            "strategy 'gather' does not support `block_diagonal_attention`; leave it None, or use 'ulysses'"
        )
    operands = {"query": query, "key": key, "value": value}
    check_parts(context, operands, sequence_offsets, block_lengths, block_size)
    own = query.shape[-3]
    has_equal_sequences = sequence_offsets is None and block_lengths is None
    if has_equal_sequences and context.strategy is None and own % block_size == 0:
        if rotary is not None and rotary.positions is None and not rotary.per_token:
            first = context.rank * own
            positions = torch.arange(first, first + own, dtype=torch.int32, device=query.device)
            rotary = dataclasses.replace(rotary, positions=positions)
        return attend(query, key, value, rotary=rotary)
    if context.strategy is None and block_size - 1 <= own:
        rows = _Rows(context, own, block_size - 1, 0 if is_causal else block_size - 1, tuple(query.shape[:-3]))
        return _attend_to_rows(rows, attend, query, key, value, sequence_offsets, block_lengths, rotary, block_size)
    exchanging = dataclasses.replace(context, strategy="ulysses")
    length = next_multiple(own, block_size) * context.size
    remedy = (
        f"batched sequences of {length} tokens, {own * context.size} here, are cut between blocks and need no exchange"
    )
    if not has_equal_sequences:
        remedy = f"share among fewer processes, so that each has {block_size - 1} tokens or more, {own} here"
    choose_strategy(exchanging, (query.shape[-2], key.shape[-2]), remedy)
    if rotary is not None:
        rotary = _mapped(rotary, functools.partial(_whole, context))
    options: dict[str, Any] = {
        "sequence_offsets": sequence_offsets,
        "block_lengths": block_lengths,
        "rotary": rotary,
    }
    (output,) = exchange(context, lambda *x: (attend(*x, **options),), query, (key, value))
    return output


def _whole(context: ContextParallel, x: torch.Tensor, from_last: int) -> torch.Tensor:
    """Gather the table of all tokens, whose tokens are axis -`from_last`."""
    return gather_whole(context, x, x.ndim - from_last)


def _mapped(rotary: Rotary, function: Callable[[torch.Tensor, int], torch.Tensor]) -> Rotary:
    """Apply a function to each per-token table of a rotary embedding.

    The function also takes the position of the token axis, counted from the last axis. Tables that are indexed by
    position stay as they are.
    """
    changed: dict[str, Any] = {}
    if rotary.per_token:
        changed = {"cos": function(rotary.cos, 2), "sin": function(rotary.sin, 2)}
    if rotary.positions is not None:
        changed["positions"] = function(rotary.positions, 1)
    return dataclasses.replace(rotary, **changed)


def _attend_to_rows(
    rows: "_Rows",
    attend: Callable[..., torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sequence_offsets: torch.Tensor | None,
    block_lengths: torch.Tensor | None,
    rotary: Rotary | None,
    block_size: int,
) -> torch.Tensor:
    """Return the output of a process that receives rows of its neighbours."""
    offsets = sequence_offsets if block_lengths is None else _edges(block_lengths)
    if offsets is None:
        total = rows.own * rows.context.size
        offsets = torch.arange(2, dtype=torch.int32, device=query.device) * total
    places = rows.places(offsets)
    if rotary is not None:
        rotary = _mapped(rotary, lambda x, from_last: rows.longer([x], from_last)[0])
        if rotary.positions is None and not rotary.per_token:
            rotary = dataclasses.replace(rotary, positions=rows.flat(places, 1))
    longer = rows.longer([query, key, value], 3)
    output = attend(*longer, sequence_offsets=rows.offsets(offsets, block_size), rotary=rotary)
    output = rows.own_rows(output)
    if block_lengths is None:
        return output
    # Rows of a block beyond `block_size` are outside of the attention and give 0.
    is_inside = places[rows.before : rows.before + rows.own] < block_size
    return torch.where(is_inside[:, None, None], output, 0)


@dataclasses.dataclass(frozen=True)
class _Rows:
    """The rows of a process, extended by the neighbours' rows that its blocks reach.

    Attributes:
        context: the processes.
        own: number of rows of the process.
        before, after: number of rows from the previous and from the next process.
        batch: sizes of the batch axes of operands. Batch rows lie back to back, as packed sequences.
    """

    context: ContextParallel
    own: int
    before: int
    after: int
    batch: tuple[int, ...]

    @property
    def length(self) -> int:
        return self.before + self.own + self.after

    @property
    def first(self) -> int:
        """Global index of the first extended row; negative in the first process."""
        return self.context.rank * self.own - self.before

    def longer(self, tensors: list[torch.Tensor], from_last: int) -> list[torch.Tensor]:
        """Extend tensors [.., own, ..] by neighbours' rows to [rows, ..]; tokens are axis -`from_last`."""
        found = with_neighbours(self.context, tensors, tensors[0].ndim - from_last, self.before, self.after)
        return [self.flat(x, from_last) for x in found]

    def flat(self, x: torch.Tensor, from_last: int) -> torch.Tensor:
        """Flatten [.., length, ..] to [rows, ..]; a tensor without batch axes is broadcast to all batch rows."""
        rest = x.shape[x.ndim - from_last :]
        return x.expand(*self.batch, *rest).reshape(-1, *rest[1:])

    def own_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Extract the process's own rows: [rows, ..] to [.., own, ..]."""
        x = x.unflatten(0, (*self.batch, self.length))
        return x.narrow(len(self.batch), self.before, self.own).contiguous()

    def offsets(self, offsets: torch.Tensor, block_size: int) -> torch.Tensor:
        """Return the offsets of the sequences in these rows, keeping blocks where they lie among all rows."""
        first = self.first
        # A sequence that began before these rows continues with its first block that begins within them.
        begun = offsets + -((offsets - first) // block_size) * block_size
        ends = torch.cat([offsets[1:], offsets[-1:]]).clamp(min=first)
        starts = torch.where(offsets < first, torch.minimum(begun, ends), offsets)
        starts = (starts - first).clamp(0, self.length).int()
        count = math.prod(self.batch)
        rows = torch.arange(count, dtype=torch.int32, device=offsets.device)[:, None] * self.length
        # Offsets begin with 0: rows before the first block form a sequence whose output is dropped.
        return torch.nn.functional.pad((rows + starts).flatten(), (1, 0))

    def places(self, offsets: torch.Tensor) -> torch.Tensor:
        """Return the position of each row in its sequence, int32 [length]; 0 for rows of no sequence."""
        first = self.first
        rows = torch.arange(first, first + self.length, dtype=torch.int32, device=offsets.device)
        sequence = torch.searchsorted(offsets, rows, right=True) - 1
        places = rows - offsets[sequence.clamp(min=0)]
        return torch.where((rows < 0) | (rows >= offsets[-1]), 0, places).int()


def _edges(block_lengths: torch.Tensor) -> torch.Tensor:
    """Return the offsets of consecutive blocks, which become sequences of their own."""
    return torch.nn.functional.pad(block_lengths.cumsum(0, dtype=torch.int32), (1, 0))
