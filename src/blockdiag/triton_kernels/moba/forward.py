"""Forward pass of MoBA: blocks gather the queries that chose them, then each query's parts are merged.

The first kernel computes the attention of every query on a block's list to that block alone. Its results are normalised
and come with their base-2 log-sum-exp. The second kernel computes the attention to the query's own block and merges.
"""

# Device code is laid out by hand: one argument per line would hide what a kernel does.
# fmt: off

import triton
import triton.language as tl

NEVER = tl.constexpr(2147483647)


@triton.jit
def load_rows(source, o_row, m_row, head, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr):
    """Load one head of some rows of [rows, HEADS, HEAD_DIM] as [rows, COLUMNS]; zero where masked."""
    o_column = tl.arange(0, COLUMNS)
    p_rows = source + o_row.to(tl.int64)[:, None] * (HEADS * HEAD_DIM) + head * HEAD_DIM + o_column[None, :]
    if COLUMNS == HEAD_DIM:
        return tl.load(p_rows, mask=m_row[:, None], other=0.0)
    return tl.load(p_rows, mask=m_row[:, None] & (o_column < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def load_keys(key, value, p_mask, first, end, head, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
              COLUMNS: tl.constexpr, KEYS: tl.constexpr, MASK: tl.constexpr):
    """Load keys and values of rows [first, end), zero beyond, and the bias that excludes absent keys from a softmax."""
    o_key = first + tl.arange(0, KEYS)
    m_key = o_key < end
    if MASK:
        m_key = m_key & (tl.load(p_mask + o_key, mask=m_key, other=0) != 0)
    b_key = load_rows(key, o_key, m_key, head, HEADS, HEAD_DIM, COLUMNS)
    b_value = load_rows(value, o_key, m_key, head, HEADS, HEAD_DIM, COLUMNS)
    return b_key, b_value, tl.where(m_key, 0.0, float("-inf"))


@triton.jit
def softmax_step(b_scores, b_value, b_max, b_sum, b_output, PRECISION: tl.constexpr):
    """Apply one step of the online softmax over keys, in base 2."""
    b_new_max = tl.maximum(b_max, tl.max(b_scores, 1))
    # For rows that have seen no key yet, -inf - -inf would be NaN.
    b_base = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
    b_scale = tl.exp2(b_max - b_base)
    b_weights = tl.exp2(b_scores - b_base[:, None])
    b_sum = b_sum * b_scale + tl.sum(b_weights, 1)
    b_output = tl.dot(b_weights.to(b_value.dtype), b_value, b_output * b_scale[:, None], input_precision=PRECISION)
    return b_new_max, b_sum, b_output


@triton.jit
def moba_blocks_forward(query, key, value, p_mask, p_blocks, p_items, p_offsets, p_counts, p_entries,
                        p_part, p_part_sum, query_tokens, num_blocks, num_items, first_head, scale_log2,
                        QUERY_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
                        COLUMNS: tl.constexpr, SLOTS: tl.constexpr, PART_HEADS: tl.constexpr, ROWS: tl.constexpr,
                        KEYS: tl.constexpr, KEY_TILES: tl.constexpr, CHUNK: tl.constexpr, MASK: tl.constexpr,
                        PRECISION: tl.constexpr,
                        LOOP_STAGES: tl.constexpr):
    """Compute the partial outputs [query, head, slot, HEAD_DIM] of some of the heads.

    Each program handles one chunk of one block's list.
    """
    head = first_head + tl.program_id(1)
    p_item = p_items + (head.to(tl.int64) * num_items + tl.program_id(0)) * 2
    block = tl.load(p_item)
    if block < 0:
        return
    first = tl.load(p_item + 1) * CHUNK
    start = tl.load(p_blocks + block * 4)
    end = start + tl.load(p_blocks + block * 4 + 1)
    o_list = head.to(tl.int64) * num_blocks + block
    p_list = p_entries + head.to(tl.int64) * (query_tokens * SLOTS) + tl.load(p_offsets + o_list)
    last = tl.minimum(tl.load(p_counts + o_list), first + CHUNK)
    key_head = head // (QUERY_HEADS // KEY_HEADS)
    if KEY_TILES == 1:
        b_key, b_value, b_bias = load_keys(key, value, p_mask, start, end, key_head, KEY_HEADS, HEAD_DIM, COLUMNS, KEYS,
                                           MASK)
    for at in tl.range(first, last, ROWS, num_stages=LOOP_STAGES):
        o_entry = at + tl.arange(0, ROWS)
        m_entry = o_entry < last
        b_pair = tl.load(p_list + o_entry, mask=m_entry, other=0)
        b_token = b_pair // SLOTS
        b_query = load_rows(query, b_token, m_entry, head, QUERY_HEADS, HEAD_DIM, COLUMNS)
        b_max = tl.zeros([ROWS], tl.float32) + float("-inf")
        b_sum = tl.zeros([ROWS], tl.float32)
        b_output = tl.zeros([ROWS, COLUMNS], tl.float32)
        if KEY_TILES == 1:
            b_scores = tl.dot(b_query, tl.trans(b_key), input_precision=PRECISION) * scale_log2 + b_bias[None, :]
            b_max = tl.max(b_scores, 1)
            b_base = tl.where(b_max == float("-inf"), 0.0, b_max)
            b_weights = tl.exp2(b_scores - b_base[:, None])
            b_sum = tl.sum(b_weights, 1)
            b_output = tl.dot(b_weights.to(b_value.dtype), b_value, input_precision=PRECISION)
        else:
            for first_key in range(start, end, KEYS):
                b_key, b_value, b_bias = load_keys(key, value, p_mask, first_key, end, key_head, KEY_HEADS, HEAD_DIM,
                                                   COLUMNS, KEYS, MASK)
                b_scores = tl.dot(b_query, tl.trans(b_key), input_precision=PRECISION) * scale_log2 + b_bias[None, :]
                b_max, b_sum, b_output = softmax_step(b_scores, b_value, b_max, b_sum, b_output, PRECISION)
        # `!= 0` instead of `> 0`, so that a row with a NaN score gets NaN as its log-sum-exp.
        m_seen = b_sum != 0
        b_norm = tl.where(m_seen, 1.0 / b_sum, 0.0)
        o_part = (b_token.to(tl.int64) * PART_HEADS + tl.program_id(1)) * SLOTS + b_pair % SLOTS
        tl.store(p_part_sum + o_part, tl.where(m_seen, b_max + tl.log2(b_sum), float("-inf")), mask=m_entry)
        o_column = tl.arange(0, COLUMNS)
        tl.store(p_part + o_part[:, None] * HEAD_DIM + o_column[None, :],
                 (b_output * b_norm[:, None]).to(p_part.dtype.element_ty),
                 mask=m_entry[:, None] & (o_column < HEAD_DIM)[None, :])


@triton.jit
def moba_merge_forward(query, key, value, p_mask, p_queries, p_own, p_degrees, p_part, p_part_sum, output, p_log_sum,
                       query_tokens, first_head, scale_log2,
                       QUERY_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
                       COLUMNS: tl.constexpr, SLOTS: tl.constexpr, PART_HEADS: tl.constexpr,
                       SLOT_COLUMNS: tl.constexpr, ROWS: tl.constexpr,
                       KEYS: tl.constexpr, CAUSAL: tl.constexpr, OWN: tl.constexpr, MASK: tl.constexpr,
                       PRECISION: tl.constexpr, LOOP_STAGES: tl.constexpr):
    """Merge the parts and the own block: output [query, head, HEAD_DIM] and natural log-sum-exp [query, head]."""
    head = first_head + tl.program_id(1)
    o_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m_row = o_row < query_tokens
    b_max = tl.zeros([ROWS], tl.float32) + float("-inf")
    b_sum = tl.zeros([ROWS], tl.float32)
    b_output = tl.zeros([ROWS, COLUMNS], tl.float32)
    if CAUSAL:
        key_head = head // (QUERY_HEADS // KEY_HEADS)
        b_first = tl.load(p_queries + o_row * 4 + 2, mask=m_row, other=0)
        b_end = tl.load(p_queries + o_row * 4 + 3, mask=m_row, other=0)
        if OWN:
            b_own = tl.load(p_own + head.to(tl.int64) * query_tokens + o_row, mask=m_row, other=0)
            b_end = tl.where(b_own != 0, b_end, b_first)
        b_query = load_rows(query, o_row, m_row, head, QUERY_HEADS, HEAD_DIM, COLUMNS)
        first = tl.min(tl.where(b_first < b_end, b_first, NEVER), 0)
        # Blocks are handled one by one: a weight of 0 times a NaN of another sequence's block would be NaN.
        while first < NEVER:
            m_own = (b_first == first) & (b_first < b_end)
            end = tl.max(tl.where(m_own, b_end, 0), 0)
            for first_key in range(first, end, KEYS):
                b_key, b_value, b_bias = load_keys(key, value, p_mask, first_key, end, key_head, KEY_HEADS, HEAD_DIM,
                                                   COLUMNS, KEYS, MASK)
                o_key = first_key + tl.arange(0, KEYS)[None, :]
                b_scores = tl.dot(b_query, tl.trans(b_key), input_precision=PRECISION) * scale_log2 + b_bias[None, :]
                b_scores = tl.where(o_key < b_end[:, None], b_scores, float("-inf"))
                b_new_max, b_new_sum, b_new = softmax_step(b_scores, b_value, b_max, b_sum, b_output, PRECISION)
                b_max = tl.where(m_own, b_new_max, b_max)
                b_sum = tl.where(m_own, b_new_sum, b_sum)
                b_output = tl.where(m_own[:, None], b_new, b_output)
            first = tl.min(tl.where((b_first > first) & (b_first < b_end), b_first, NEVER), 0)

    o_head = o_row.to(tl.int64) * QUERY_HEADS + head
    if SLOTS > 0:
        b_degree = tl.load(p_degrees + head.to(tl.int64) * query_tokens + o_row, mask=m_row, other=0)
        o_part = (o_row.to(tl.int64) * PART_HEADS + tl.program_id(1)) * SLOTS
        o_slot = tl.arange(0, SLOT_COLUMNS)[None, :]
        m_slot = o_slot < b_degree[:, None]
        b_part_sum = tl.load(p_part_sum + o_part[:, None] + o_slot, mask=m_slot, other=float("-inf"))
        b_new_max = tl.maximum(b_max, tl.max(b_part_sum, 1))
        b_base = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
        b_scale = tl.exp2(b_max - b_base)
        b_sum = b_sum * b_scale + tl.sum(tl.exp2(b_part_sum - b_base[:, None]), 1)
        b_output *= b_scale[:, None]
        o_column = tl.arange(0, COLUMNS)[None, :]
        for slot in tl.range(0, tl.max(b_degree, 0), num_stages=LOOP_STAGES):
            m_part = slot < b_degree
            b_weight = tl.exp2(tl.load(p_part_sum + o_part + slot, mask=m_part, other=float("-inf")) - b_base)
            b_part = tl.load(p_part + (o_part + slot)[:, None] * HEAD_DIM + o_column,
                             mask=m_part[:, None] & (o_column < HEAD_DIM), other=0.0)
            b_output += b_weight[:, None] * b_part.to(tl.float32)
        b_max = b_new_max
    m_seen = b_sum != 0
    b_norm = tl.where(m_seen, 1.0 / b_sum, 0.0)
    tl.store(p_log_sum + o_head, tl.where(m_seen, (b_max + tl.log2(b_sum)) * 0.6931471805599453, float("-inf")),
             mask=m_row)
    o_column = tl.arange(0, COLUMNS)[None, :]
    tl.store(output + o_head[:, None] * HEAD_DIM + o_column, (b_output * b_norm[:, None]).to(output.dtype.element_ty),
             mask=m_row[:, None] & (o_column < HEAD_DIM))
