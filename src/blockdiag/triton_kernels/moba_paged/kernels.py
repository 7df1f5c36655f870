"""Kernels of MoBA over a paged cache: block scores, selection of the best blocks, attention to tiles, and the merge.

Every query head selects its own blocks, even if several share a key head. So attention handles one query at a time.
Matrix products would have a single row, so the kernels use float32 arithmetic instead of tensor cores.
"""

# Device code is laid out by hand: one argument per line would hide what a kernel does.
# fmt: off

import triton
import triton.language as tl

from blockdiag.triton_kernels.paged.attention import LOG2_E, cache_rows, merge_row, rows_of_heads, sequence_lengths

# Sentinels below every score: as a 32-bit integer, and as a 64-bit key that also holds the block number.
NO_SCORE = tl.constexpr(-(2**31))
NO_KEY = tl.constexpr(-(2**63))


@triton.jit
def query_position(row, p_kv_lengths, p_query_lengths, max_keys, QUERY_TOKENS: tl.constexpr, QUERY_HEADS: tl.constexpr,
                   QUERY_LENGTHS: tl.constexpr):
    """Return the sequence and position of a row of [batch, QUERY_TOKENS, QUERY_HEADS]. Position -1 sees no key."""
    batch = row // (QUERY_TOKENS * QUERY_HEADS)
    token = (row // QUERY_HEADS % QUERY_TOKENS).to(tl.int32)
    keys, queries = sequence_lengths(p_kv_lengths, p_query_lengths, batch, max_keys, QUERY_TOKENS, QUERY_LENGTHS)
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
def moba_paged_scores(query, p_centroids, p_kv_lengths, p_query_lengths, p_scores, p_arrived, max_keys, max_blocks,
                      num_candidates,
                      QUERY_TOKENS: tl.constexpr, QUERY_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr,
                      HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr,
                      ALL_ROWS: tl.constexpr, BLOCKS: tl.constexpr, QUERY_LENGTHS: tl.constexpr):
    """Compute the scores [row, num_candidates] of a sequence's queries and a tile of one head's mean keys.

    Blocks that no query of the sequence may choose are neither read nor written. The kernel also resets the rows'
    counters of arrived parts to 0.
    """
    GROUP: tl.constexpr = QUERY_HEADS // KEY_HEADS
    key_head = tl.program_id(1)
    batch = tl.program_id(2)
    if tl.program_id(0) == 0:
        o_row = tl.arange(0, ALL_ROWS)
        b_place = rows_of_heads(o_row, batch, key_head, QUERY_TOKENS, QUERY_HEADS, GROUP)
        tl.store(p_arrived + b_place, 0, mask=o_row < QUERY_TOKENS * GROUP)
    keys, queries = sequence_lengths(p_kv_lengths, p_query_lengths, batch, max_keys, QUERY_TOKENS, QUERY_LENGTHS)
    candidates = tl.maximum(keys - 1, 0) // BLOCK_SIZE
    first = tl.program_id(0) * BLOCKS
    if first < candidates:
        o_block = first + tl.arange(0, BLOCKS)
        m_block = o_block < candidates
        o_column = tl.arange(0, COLUMNS)
        b_line = (batch.to(tl.int64) * max_blocks + o_block) * KEY_HEADS + key_head
        b_centroid = tl.load(p_centroids + b_line[:, None] * HEAD_DIM + o_column[None, :],
                             mask=m_block[:, None] & (o_column < HEAD_DIM)[None, :], other=0.0)
        for first_row in range(0, queries * GROUP, ROWS):
            o_row = first_row + tl.arange(0, ROWS)
            b_scores = tl.zeros([BLOCKS, ROWS], tl.float32)
            for i in tl.static_range(ROWS):
                # One row at a time keeps the sums over columns within a warp.
                b_place = rows_of_heads(first_row + i, batch, key_head, QUERY_TOKENS, QUERY_HEADS, GROUP)
                b_query = tl.load(query + b_place * HEAD_DIM + o_column,
                                  mask=(o_column < HEAD_DIM) & (first_row + i < queries * GROUP), other=0.0)
                b_products = tl.sum(b_centroid * b_query.to(tl.float32)[None, :], 1)
                b_scores = tl.where((o_row == first_row + i)[None, :], b_products[:, None], b_scores)
            b_place = rows_of_heads(o_row, batch, key_head, QUERY_TOKENS, QUERY_HEADS, GROUP)
            tl.store(p_scores + b_place[None, :] * num_candidates + o_block[:, None], b_scores,
                     mask=(o_row < queries * GROUP)[None, :] & m_block[:, None])


@triton.jit
def moba_paged_choose(p_scores, p_kv_lengths, p_query_lengths, p_chosen, max_keys, num_candidates,
                      QUERY_TOKENS: tl.constexpr, QUERY_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
                      SLOTS: tl.constexpr, SLOT_COLUMNS: tl.constexpr, BLOCKS: tl.constexpr,
                      QUERY_LENGTHS: tl.constexpr):
    """Select the SLOTS best blocks before a query's own one, int32 [row, slot], by descending score; -1 after the last.

    Score and block number form a unique 64-bit sort key. The largest keys come first, so ties go to the later block.
    """
    row = tl.program_id(0).to(tl.int64)
    _, position = query_position(row, p_kv_lengths, p_query_lengths, max_keys, QUERY_TOKENS, QUERY_HEADS, QUERY_LENGTHS)
    own = tl.maximum(position, 0) // BLOCK_SIZE
    o_slot = tl.arange(0, SLOT_COLUMNS)
    b_best = tl.zeros([SLOT_COLUMNS], tl.int64) + NO_KEY
    for first in range(0, own, BLOCKS):
        o_block = first + tl.arange(0, BLOCKS)
        b_order = ordered_scores(p_scores, row, o_block, own, num_candidates)
        b_keys = tl.where(b_order == NO_SCORE, NO_KEY, (b_order.to(tl.int64) << 32) | o_block)
        b_before = b_best
        b_best = tl.zeros([SLOT_COLUMNS], tl.int64) + NO_KEY
        for slot in range(SLOTS):
            top = tl.maximum(tl.max(b_keys, 0), tl.max(b_before, 0))
            b_best = tl.where(o_slot == slot, top, b_best)
            b_keys = tl.where(b_keys == top, NO_KEY, b_keys)
            b_before = tl.where(b_before == top, NO_KEY, b_before)
    b_chosen = tl.where(b_best == NO_KEY, -1, b_best & 0x7FFFFFFF).to(tl.int32)
    tl.store(p_chosen + row * SLOTS + o_slot, b_chosen, mask=o_slot < SLOTS)


@triton.jit
def moba_paged_blocks(query, key, value, p_page_table, p_kv_lengths, p_query_lengths, p_score_scale, p_key_scale,
                      p_value_scale, p_scores, p_chosen, p_arrived, p_part, p_part_sum, output, p_log_sum,
                      rows, max_pages, num_pages, max_keys, num_candidates, scale,
                      QUERY_TOKENS: tl.constexpr, QUERY_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr,
                      HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, VALUE_DIM: tl.constexpr,
                      VALUE_COLUMNS: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
                      SLOTS: tl.constexpr, BLOCKS: tl.constexpr, CHOOSES: tl.constexpr, PARTS: tl.constexpr,
                      PART_COLUMNS: tl.constexpr, KEYS: tl.constexpr, TABLE: tl.constexpr,
                      QUERY_LENGTHS: tl.constexpr, SCORE_SCALE: tl.constexpr, KEY_SCALE: tl.constexpr,
                      VALUE_SCALE: tl.constexpr):
    """Compute the attention of one row to a tile of its own block (slot 0) or of a selected block.

    The result is a normalised partial output and its base-2 log-sum-exp. With few scores (CHOOSES) every program
    repeats the selection itself. The last program of a row merges the row's parts in a fixed order.
    """
    TILES: tl.constexpr = (BLOCK_SIZE + KEYS - 1) // KEYS
    # An unaligned tile may lie in two pages, whatever the page size is. PAGE_SIZE + 1 never divides PAGE_SIZE.
    SPAN: tl.constexpr = KEYS if BLOCK_SIZE % KEYS == 0 else PAGE_SIZE + 1
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    slot = part // TILES
    batch, position = query_position(row, p_kv_lengths, p_query_lengths, max_keys, QUERY_TOKENS, QUERY_HEADS,
                                     QUERY_LENGTHS)
    key_head = row % QUERY_HEADS // (QUERY_HEADS // KEY_HEADS)
    block = tl.maximum(position, 0) // BLOCK_SIZE
    if CHOOSES:
        if slot > 0:
            block = chosen_block(p_scores, row, block, slot, num_candidates, BLOCKS)
    elif SLOTS > 0:
        b_chosen = tl.load(p_chosen + row * SLOTS + slot - 1, mask=slot > 0, other=-1)
        block = tl.where(slot > 0, b_chosen, block)
    o_key = block * BLOCK_SIZE + part % TILES * KEYS + tl.arange(0, KEYS)
    # Nothing is read if there is no block, nor beyond the query's position.
    end = tl.where(block < 0, -BLOCK_SIZE, tl.minimum((block + 1) * BLOCK_SIZE, position + 1))
    m_key = o_key < end

    o_column = tl.arange(0, COLUMNS)
    m_column = o_column < HEAD_DIM
    o_value = tl.arange(0, VALUE_COLUMNS)
    m_value = o_value < VALUE_DIM
    b_query = tl.load(query + row * HEAD_DIM + o_column, mask=m_column, other=0.0).to(tl.float32)
    b_cache = cache_rows(p_page_table, tl.maximum(o_key, 0), m_key, batch, max_pages, num_pages, PAGE_SIZE, TABLE,
                         SPAN) * KEY_HEADS + key_head
    b_key = tl.load(key + b_cache[:, None] * HEAD_DIM + o_column[None, :], mask=m_key[:, None] & m_column[None, :],
                    other=0.0)
    b_value = tl.load(value + b_cache[:, None] * VALUE_DIM + o_value[None, :], mask=m_key[:, None] & m_value[None, :],
                      other=0.0)
    factor = scale * LOG2_E
    if SCORE_SCALE:
        factor *= tl.load(p_score_scale + batch * KEY_HEADS + key_head)
    b_scores = tl.sum(b_key.to(tl.float32) * b_query[None, :], 1) * factor
    if KEY_SCALE:
        b_scores *= tl.load(p_key_scale + b_cache, mask=m_key, other=0.0)
    b_scores = tl.where(m_key, b_scores, float("-inf"))
    largest = tl.max(b_scores, 0)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    b_weights = tl.exp2(b_scores - base)
    total = tl.sum(b_weights, 0)
    if VALUE_SCALE == "token":
        b_weights *= tl.load(p_value_scale + b_cache, mask=m_key, other=0.0)
    b_output = tl.sum(b_weights[:, None] * b_value.to(tl.float32), 0)
    norm = tl.where(total == 0, 0.0, 1.0 / total)
    if VALUE_SCALE == "head":
        norm *= tl.load(p_value_scale + batch * KEY_HEADS + key_head)
    place = part.to(tl.int64) * rows + row
    tl.store(p_part_sum + place, tl.where(total == 0, float("-inf"), base + tl.log2(total)))
    # A part without a key is not stored, because the merge ignores it.
    tl.store(p_part + place * VALUE_DIM + o_value, b_output * norm, mask=m_value & (total != 0))
    # All threads must have written their parts before one thread counts the arrival.
    tl.debug_barrier()
    if tl.atomic_add(p_arrived + row, 1, sem="acq_rel") == PARTS - 1:
        merge_row(p_part, p_part_sum, p_query_lengths, None, output, p_log_sum, row, rows, PARTS, QUERY_TOKENS,
                  QUERY_HEADS, VALUE_DIM, VALUE_COLUMNS, PART_COLUMNS, QUERY_LENGTHS, False)
