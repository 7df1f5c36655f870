"""Kernels that invert the selection with a counting sort: from the blocks of each query to the queries of each block.

The query axis is cut into spans. Each span counts how often it chose every block, and ranks its (query, slot) pairs
within each block. Prefix sums of the counts over spans and blocks give the place where a span's pairs begin in a
block's list. No atomics are needed, and the result does not depend on the order in which programs run.
"""

# Device code is laid out by hand: one argument per line would hide what a kernel does.
# fmt: off

import triton
import triton.language as tl

from blockdiag.triton_kernels.moba.arguments import (
    AddSpansArrays,
    CountArrays,
    CountScalars,
    EntriesArrays,
    EntriesScalars,
    ItemsArrays,
    ItemsScalars,
    OffsetsArrays,
    SpansScalars,
)


@triton.jit
def match_pairs(b_id, o_pair):
    """Return how many earlier pairs, and how many of all 32 pairs of a warp, chose the same block as each pair."""
    b_same = tl.inline_asm_elementwise("match.any.sync.b32 $0, $1, 0xffffffff;", "=r,r", [b_id], dtype=tl.uint32,
                                       is_pure=False, pack=1)
    b_before = b_same & ((1 << o_pair.to(tl.uint32)) - 1)
    b_rank = tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [b_before], dtype=tl.int32, is_pure=True, pack=1)
    b_count = tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [b_same], dtype=tl.int32, is_pure=True, pack=1)
    return b_rank, b_count


@triton.jit
def moba_count(arrays: CountArrays, scalars: CountScalars, SLOTS: tl.constexpr, TILE: tl.constexpr):
    """Count how often the queries of a span chose each block, int32 [head, span, block], and rank the pairs.

    The rank of a pair, int32 [head, pair], is the number of earlier pairs of the span with the same block. One program
    goes through the pairs of its span in order.

    TILE is a CountTile.
    """
    PAIRS: tl.constexpr = TILE.pairs
    BLOCKS: tl.constexpr = TILE.blocks
    span = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    p_counter = arrays.counters + (head * tl.num_programs(0) + span) * scalars.num_blocks
    o_block = tl.arange(0, BLOCKS)
    for first in range(0, scalars.num_blocks, BLOCKS):
        tl.store(p_counter + first + o_block, tl.zeros([BLOCKS], tl.int32), mask=first + o_block < scalars.num_blocks)
    tl.debug_barrier()
    num_pairs = scalars.query_tokens * SLOTS
    begin = span * scalars.span_rows * SLOTS
    last = tl.minimum((span + 1) * scalars.span_rows, scalars.query_tokens) * SLOTS
    o_pair = tl.arange(0, PAIRS)
    p_pair = arrays.chosen + head * num_pairs
    b_id = tl.load(p_pair + begin + o_pair, mask=begin + o_pair < last, other=-1)
    for first in range(begin, last, PAIRS):
        # Load the next step's pairs before the stores, which would delay the load.
        b_next = tl.load(p_pair + first + PAIRS + o_pair, mask=first + PAIRS + o_pair < last, other=-1)
        m_chosen = b_id >= 0
        b_counter = tl.load(p_counter + b_id, mask=m_chosen, other=0)
        if TILE.has_match:
            b_rank, b_count = match_pairs(b_id, o_pair)
        else:
            # Load the pairs along the other axis, too, to compare each pair with every other one.
            b_other = tl.load(p_pair + first + o_pair[None, :], mask=(first + o_pair < last)[None, :], other=-1)
            m_same = b_id[:, None] == b_other
            b_rank = tl.sum((m_same & (o_pair[None, :] < o_pair[:, None])).to(tl.int32), 1)
            b_count = tl.sum(m_same.to(tl.int32), 1)
        tl.store(arrays.ranks + head * num_pairs + first + o_pair, b_counter + b_rank, mask=m_chosen)
        tl.debug_barrier()
        tl.store(p_counter + b_id, b_counter + b_count, mask=m_chosen & (b_rank == b_count - 1))
        tl.debug_barrier()
        b_id = b_next


@triton.jit
def moba_add_spans(arrays: AddSpansArrays, scalars: SpansScalars, TILE: tl.constexpr):
    """Sum the counts of all spans, int32 [head, block]. TILE is a SpanTile."""
    SPANS: tl.constexpr = TILE.spans
    BLOCKS: tl.constexpr = TILE.blocks
    num_blocks = scalars.num_blocks
    num_spans = scalars.num_spans
    o_block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    head = tl.program_id(1).to(tl.int64)
    m_block = o_block < num_blocks
    b_total = tl.zeros([BLOCKS], tl.int32)
    for first in range(0, num_spans, SPANS):
        o_span = first + tl.arange(0, SPANS)
        o_counter = (head * num_spans + o_span)[:, None] * num_blocks + o_block[None, :]
        m_counter = (o_span < num_spans)[:, None] & m_block[None, :]
        b_total += tl.sum(tl.load(arrays.counters + o_counter, mask=m_counter, other=0), 0)
    tl.store(arrays.counts + head * num_blocks + o_block, b_total, mask=m_block)


@triton.jit
def moba_offsets(arrays: OffsetsArrays, scalars: SpansScalars, TILE: tl.constexpr):
    """Compute where each block's list begins, int32 [head, block], and each span's part of it, [head, span, block].

    TILE is a SpanTile.
    """
    SPANS: tl.constexpr = TILE.spans
    BLOCKS: tl.constexpr = TILE.blocks
    num_blocks = scalars.num_blocks
    num_spans = scalars.num_spans
    first_block = tl.program_id(0) * BLOCKS
    o_block = first_block + tl.arange(0, BLOCKS)
    head = tl.program_id(1).to(tl.int64)
    m_block = o_block < num_blocks
    p_head = arrays.counts + head * num_blocks
    b_earlier = tl.zeros([BLOCKS], tl.int32)
    for first in range(0, first_block, BLOCKS):
        b_earlier += tl.load(p_head + first + tl.arange(0, BLOCKS))
    b_count = tl.load(p_head + o_block, mask=m_block, other=0)
    b_place = tl.sum(b_earlier, 0) + tl.cumsum(b_count, 0) - b_count
    tl.store(arrays.offsets + head * num_blocks + o_block, b_place, mask=m_block)
    for first in range(0, num_spans, SPANS):
        o_span = first + tl.arange(0, SPANS)
        o_counter = (head * num_spans + o_span)[:, None] * num_blocks + o_block[None, :]
        m_counter = (o_span < num_spans)[:, None] & m_block[None, :]
        b_span_count = tl.load(arrays.counters + o_counter, mask=m_counter, other=0)
        b_until = b_place[None, :] + tl.cumsum(b_span_count, 0)
        tl.store(arrays.before + o_counter, b_until - b_span_count, mask=m_counter)
        b_place += tl.sum(b_span_count, 0)


@triton.jit
def moba_entries(arrays: EntriesArrays, scalars: EntriesScalars, SLOTS: tl.constexpr, TILE: tl.constexpr):
    """Write the lists of all blocks, int32 [head, pair], and the number of blocks of each query, int32 [head, query].

    The entries of a list are query * SLOTS + slot in ascending order.

    TILE is an EntryTile.
    """
    query_tokens = scalars.query_tokens
    head = tl.program_id(1).to(tl.int64)
    o_row = tl.program_id(0) * TILE.rows + tl.arange(0, TILE.rows)
    m_row = o_row < query_tokens
    o_slot = tl.arange(0, TILE.slot_columns)[None, :]
    o_pair = o_row[:, None] * SLOTS + o_slot
    p_pair = head * query_tokens * SLOTS + o_pair
    b_id = tl.load(arrays.chosen + p_pair, mask=m_row[:, None] & (o_slot < SLOTS), other=-1)
    m_chosen = b_id >= 0
    o_span = (head * scalars.num_spans + o_row // scalars.span_rows) * scalars.num_blocks
    b_place = tl.load(arrays.ranks + p_pair, mask=m_chosen, other=0)
    b_place += tl.load(arrays.before + o_span[:, None] + b_id, mask=m_chosen, other=0)
    tl.store(arrays.entries + head * query_tokens * SLOTS + b_place, o_pair, mask=m_chosen)
    tl.store(arrays.degrees + head * query_tokens + o_row, tl.sum(m_chosen.to(tl.int32), 1), mask=m_row)


@triton.jit
def moba_items(arrays: ItemsArrays, scalars: ItemsScalars, TILE: tl.constexpr):
    """Write the work items of each head, int32 [head, item, 4]. An item is a chunk of a block's list.

    Its numbers are the pairs of the chunk, the place of the first one among the head's entries, and the first row and
    the number of the block's keys. Those after the last item are 0.

    TILE is an ItemTile.
    """
    BLOCKS: tl.constexpr = TILE.blocks
    num_blocks = scalars.num_blocks
    num_items = scalars.num_items
    head = tl.program_id(0).to(tl.int64)
    p_item = arrays.items + head * num_items * 4
    total = 0
    for first in range(0, num_blocks, BLOCKS):
        o_block = first + tl.arange(0, BLOCKS)
        m_block = o_block < num_blocks
        b_count = tl.load(arrays.counts + head * num_blocks + o_block, mask=m_block, other=0)
        b_offset = tl.load(arrays.offsets + head * num_blocks + o_block, mask=m_block, other=0)
        b_start = tl.load(arrays.blocks + o_block * 4, mask=m_block, other=0)
        b_length = tl.load(arrays.blocks + o_block * 4 + 1, mask=m_block, other=0)
        b_chunks = (b_count + TILE.chunk - 1) // TILE.chunk
        b_first = total + tl.cumsum(b_chunks, 0) - b_chunks
        for chunk in range(0, tl.max(b_chunks, 0)):
            m_chunk = chunk < b_chunks
            p_chunk = p_item + (b_first + chunk) * 4
            tl.store(p_chunk, tl.minimum(b_count - chunk * TILE.chunk, TILE.chunk), mask=m_chunk)
            tl.store(p_chunk + 1, b_offset + chunk * TILE.chunk, mask=m_chunk)
            tl.store(p_chunk + 2, b_start, mask=m_chunk)
            tl.store(p_chunk + 3, b_length, mask=m_chunk)
        total += tl.sum(b_chunks, 0)
    for first in range(total * 4, num_items * 4, BLOCKS):
        o_number = first + tl.arange(0, BLOCKS)
        tl.store(p_item + o_number, o_number * 0, mask=o_number < num_items * 4)
