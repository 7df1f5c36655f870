"""Kernels of MoBA over a paged cache: block scores, selection of the best blocks, attention to tiles, and the merge.

Every query head selects its own blocks, even if several share a key head. So attention handles one query at a time.
Matrix products would have a single row, so the kernels use float32 arithmetic instead of tensor cores.
"""

# Device code is laid out by hand: one argument per line would hide what a kernel does.
# fmt: off

import triton
import triton.language as tl

from blockdiag.triton_kernels.moba_paged.arguments import (
    BlockArrays,
    BlockScalars,
    ChoiceArrays,
    ScoreArrays,
    ScoreScalars,
)
from blockdiag.triton_kernels.paged.attention import LOG2_E, cache_rows, merge_row
from blockdiag.triton_kernels.paged.places import rows_of_heads, sequence_lengths

# Sentinels below every score: as a 32-bit integer, and as a 64-bit key that also holds the block number.
NO_SCORE = tl.constexpr(-(2**31))
NO_KEY = tl.constexpr(-(2**63))


@triton.jit
def query_position(row, arrays, max_keys, SHAPE: tl.constexpr):
    """Return the sequence and position of a row of [batch, query_tokens, query_heads]. Position -1 sees no key."""
    batch = row // (SHAPE.query_tokens * SHAPE.query_heads)
    token = (row // SHAPE.query_heads % SHAPE.query_tokens).to(tl.int32)
    keys, queries = sequence_lengths(arrays, batch, max_keys, SHAPE)
    return batch, tl.where(token < queries, tl.maximum(keys - queries + token, -1), -1)


@triton.jit
def ordered_scores(p_scores, row, o_block, own, num_candidates):
    """Load scores as integers that sort like the floats. NaN and blocks from `own` on become NO_SCORE."""
    b_scores = tl.load(p_scores + row * num_candidates + o_block, mask=o_block < own, other=float("nan"))
    # -0 must sort equal to 0.
    b_bits = tl.where(b_scores == 0, 0.0, b_scores).to(tl.int32, bitcast=True)
    b_bits = b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF)
    # x == x is false only for NaN.
    return tl.where(b_scores == b_scores, b_bits, NO_SCORE)


@triton.jit
def chosen_block(p_scores, row, own, slot, num_candidates, BLOCKS: tl.constexpr):
    """Return the block of `slot`, or -1 if there is none.

    Slot 1 is the best block before the query's own one, slot 2 the second best. There are at most BLOCKS candidates.
    """
    o_block = tl.arange(0, BLOCKS)
    b_order = ordered_scores(p_scores, row, o_block, own, num_candidates)
    top = tl.max(b_order, 0)
    block = tl.max(tl.where(b_order == top, o_block, -1), 0)
    for _ in range(1, slot):
        b_order = tl.where(o_block == block, NO_SCORE, b_order)
        top = tl.max(b_order, 0)
        block = tl.max(tl.where(b_order == top, o_block, -1), 0)
    return tl.where(top == NO_SCORE, -1, block)


@triton.jit
def moba_paged_scores(arrays: ScoreArrays, scalars: ScoreScalars, SHAPE: tl.constexpr, TILE: tl.constexpr):
    """Compute the scores [row, num_candidates] of a sequence's queries and a tile of one head's mean keys.

    Blocks that no query of the sequence may choose are neither read nor written. The kernel also resets the rows'
    counters of arrived parts to 0.

    SHAPE is a ScoreShape, TILE a ScoreTile.
    """
    BLOCKS: tl.constexpr = TILE.blocks
    ROWS: tl.constexpr = TILE.rows
    HEAD_DIM: tl.constexpr = SHAPE.head_dim
    GROUP: tl.constexpr = SHAPE.group_size
    key_head = tl.program_id(1)
    batch = tl.program_id(2)
    if tl.program_id(0) == 0:
        if SHAPE.query_tokens * GROUP <= TILE.all_rows:
            o_row = tl.arange(0, TILE.all_rows)
            b_place = rows_of_heads(o_row, batch.to(tl.int64) * SHAPE.query_tokens, key_head, SHAPE)
            tl.store(arrays.arrived + b_place, 0, mask=o_row < SHAPE.query_tokens * GROUP)
        else:
            for first_reset in range(0, SHAPE.query_tokens * GROUP, TILE.all_rows):
                o_row = first_reset + tl.arange(0, TILE.all_rows)
                b_place = rows_of_heads(o_row, batch.to(tl.int64) * SHAPE.query_tokens, key_head, SHAPE)
                tl.store(arrays.arrived + b_place, 0, mask=o_row < SHAPE.query_tokens * GROUP)
    keys, queries = sequence_lengths(arrays, batch, scalars.max_keys, SHAPE)
    candidates = tl.maximum(keys - 1, 0) // SHAPE.block_size
    first = tl.program_id(0) * BLOCKS
    if first < candidates:
        o_block = first + tl.arange(0, BLOCKS)
        m_block = o_block < candidates
        o_column = tl.arange(0, TILE.columns)
        b_line = (batch.to(tl.int64) * scalars.max_blocks + o_block) * SHAPE.key_heads + key_head
        b_centroid = tl.load(arrays.centroids + b_line[:, None] * HEAD_DIM + o_column[None, :],
                             mask=m_block[:, None] & (o_column < HEAD_DIM)[None, :], other=0.0)
        for first_row in range(0, queries * GROUP, ROWS):
            o_row = first_row + tl.arange(0, ROWS)
            b_scores = tl.zeros([BLOCKS, ROWS], tl.float32)
            for i in tl.static_range(ROWS):
                # One row at a time keeps the sums over columns within a warp.
                b_place = rows_of_heads(first_row + i, batch.to(tl.int64) * SHAPE.query_tokens, key_head, SHAPE)
                b_query = tl.load(arrays.query + b_place * HEAD_DIM + o_column,
                                  mask=(o_column < HEAD_DIM) & (first_row + i < queries * GROUP), other=0.0)
                b_products = tl.sum(b_centroid * b_query.to(tl.float32)[None, :], 1)
                b_scores = tl.where((o_row == first_row + i)[None, :], b_products[:, None], b_scores)
            b_place = rows_of_heads(o_row, batch.to(tl.int64) * SHAPE.query_tokens, key_head, SHAPE)
            tl.store(arrays.scores + b_place[None, :] * scalars.num_candidates + o_block[:, None], b_scores,
                     mask=(o_row < queries * GROUP)[None, :] & m_block[:, None])


@triton.jit
def moba_paged_choose(arrays: ChoiceArrays, max_keys, num_candidates, SHAPE: tl.constexpr, TILE: tl.constexpr):
    """Select the best blocks before a query's own one, int32 [row, slots], by descending score; -1 after the last.

    Score and block number form a unique 64-bit sort key. The largest keys come first, so ties go to the later block.

    SHAPE is a ChoiceShape, TILE a ChoiceTile.
    """
    BLOCKS: tl.constexpr = TILE.blocks
    SLOTS: tl.constexpr = SHAPE.slots
    SLOT_COLUMNS: tl.constexpr = TILE.slot_columns
    row = tl.program_id(0).to(tl.int64)
    _, position = query_position(row, arrays, max_keys, SHAPE)
    own = tl.maximum(position, 0) // SHAPE.block_size
    o_slot = tl.arange(0, SLOT_COLUMNS)
    b_best = tl.zeros([SLOT_COLUMNS], tl.int64) + NO_KEY
    for first in range(0, own, BLOCKS):
        o_block = first + tl.arange(0, BLOCKS)
        b_order = ordered_scores(arrays.scores, row, o_block, own, num_candidates)
        b_keys = tl.where(b_order == NO_SCORE, NO_KEY, (b_order.to(tl.int64) << 32) | o_block)
        b_before = b_best
        b_best = tl.zeros([SLOT_COLUMNS], tl.int64) + NO_KEY
        for slot in range(SLOTS):
            top = tl.maximum(tl.max(b_keys, 0), tl.max(b_before, 0))
            b_best = tl.where(o_slot == slot, top, b_best)
            b_keys = tl.where(b_keys == top, NO_KEY, b_keys)
            b_before = tl.where(b_before == top, NO_KEY, b_before)
    b_chosen = tl.where(b_best == NO_KEY, -1, b_best & 0x7FFFFFFF).to(tl.int32)
    tl.store(arrays.chosen + row * SLOTS + o_slot, b_chosen, mask=o_slot < SLOTS)


@triton.jit
def moba_paged_blocks(arrays: BlockArrays, scalars: BlockScalars, SHAPE: tl.constexpr, TILE: tl.constexpr,
                      OPTIONS: tl.constexpr, MERGE: tl.constexpr):
    """Compute the attention of one row to a tile of its own block (slot 0) or of a selected block.

    The result is a normalised partial output and its base-2 log-sum-exp. With few scores (`selects`) every program
    repeats the selection itself. The last program of a row merges the row's parts in a fixed order.

    SHAPE is a BlockShape, TILE a BlockTile, OPTIONS a BlockOptions, MERGE a MergeConstants.
    """
    KEYS: tl.constexpr = TILE.keys
    BLOCK_SIZE: tl.constexpr = SHAPE.block_size
    HEAD_DIM: tl.constexpr = SHAPE.head_dim
    VALUE_DIM: tl.constexpr = SHAPE.value_dim
    TILES: tl.constexpr = (BLOCK_SIZE + KEYS - 1) // KEYS
    # An unaligned tile may lie in two pages, whatever the page size is. page_size + 1 never divides page_size.
    SPAN: tl.constexpr = KEYS if BLOCK_SIZE % KEYS == 0 else SHAPE.page_size + 1
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    slot = part // TILES
    batch, position = query_position(row, arrays, scalars.max_keys, SHAPE)
    key_head = row % SHAPE.query_heads // (SHAPE.query_heads // SHAPE.key_heads)
    block = tl.maximum(position, 0) // BLOCK_SIZE
    if OPTIONS.selects:
        if slot > 0:
            block = chosen_block(arrays.scores, row, block, slot, scalars.num_candidates, TILE.candidates)
    elif SHAPE.slots > 0:
        b_chosen = tl.load(arrays.chosen + row * SHAPE.slots + slot - 1, mask=slot > 0, other=-1)
        block = tl.where(slot > 0, b_chosen, block)
    o_key = block * BLOCK_SIZE + part % TILES * KEYS + tl.arange(0, KEYS)
    # Nothing is read if there is no block, nor beyond the query's position.
    end = tl.where(block < 0, -BLOCK_SIZE, tl.minimum((block + 1) * BLOCK_SIZE, position + 1))
    m_key = o_key < end

    o_column = tl.arange(0, TILE.columns)
    m_column = o_column < HEAD_DIM
    o_value = tl.arange(0, TILE.value_columns)
    m_value = o_value < VALUE_DIM
    b_query = tl.load(arrays.query + row * HEAD_DIM + o_column, mask=m_column, other=0.0).to(tl.float32)
    b_cache = cache_rows(arrays, scalars, tl.maximum(o_key, 0), m_key, batch, SHAPE, SPAN)
    b_cache = b_cache * SHAPE.key_heads + key_head
    b_key = tl.load(arrays.key + b_cache[:, None] * HEAD_DIM + o_column[None, :],
                    mask=m_key[:, None] & m_column[None, :], other=0.0)
    b_value = tl.load(arrays.value + b_cache[:, None] * VALUE_DIM + o_value[None, :],
                      mask=m_key[:, None] & m_value[None, :], other=0.0)
    factor = scalars.scale * LOG2_E
    if OPTIONS.has_score_scale:
        factor *= tl.load(arrays.score_scale + batch * SHAPE.key_heads + key_head)
    b_scores = tl.sum(b_key.to(tl.float32) * b_query[None, :], 1) * factor
    if OPTIONS.has_key_scale:
        b_scores *= tl.load(arrays.key_scale + b_cache, mask=m_key, other=0.0)
    b_scores = tl.where(m_key, b_scores, float("-inf"))
    largest = tl.max(b_scores, 0)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    b_weights = tl.exp2(b_scores - base)
    total = tl.sum(b_weights, 0)
    if OPTIONS.value_scale == "token":
        b_weights *= tl.load(arrays.value_scale + b_cache, mask=m_key, other=0.0)
    b_output = tl.sum(b_weights[:, None] * b_value.to(tl.float32), 0)
    norm = tl.where(total == 0, 0.0, 1.0 / total)
    if OPTIONS.value_scale == "head":
        norm *= tl.load(arrays.value_scale + batch * SHAPE.key_heads + key_head)
    place = part.to(tl.int64) * scalars.rows + row
    tl.store(arrays.part_sum + place, tl.where(total == 0, float("-inf"), base + tl.log2(total)))
    # A part without a key is not stored, because the merge ignores it.
    tl.store(arrays.part + place * VALUE_DIM + o_value, b_output * norm, mask=m_value & (total != 0))
    # All threads must have written their parts before one thread counts the arrival.
    tl.debug_barrier()
    if tl.atomic_add(arrays.arrived + row, 1, sem="acq_rel") == TILE.parts - 1:
        merge_row(arrays, row, scalars.rows, TILE.parts, 0, MERGE)
