"""Forward pass of MoBA: blocks gather the queries that chose them, then each query's parts are merged.

The first kernel computes the attention of every query on a block's list to that block alone. Its results are normalised
and come with their base-2 log-sum-exp. The second kernel computes the attention to the query's own block and merges.
"""

# Device code is laid out by hand: one argument per line would hide what a kernel does.
# fmt: off

import triton
import triton.language as tl

from blockdiag.triton_kernels.moba.arguments import (
    BlocksForwardArrays,
    BlocksForwardScalars,
    MergeForwardArrays,
    MergeForwardScalars,
)

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
def key_rows(arrays, scalars, o_key, m_key, SHAPE: tl.constexpr):
    """Return the rows of keys in the arrays of keys and values.

    Keys are numbered as in the page table: sequence * max_keys + position. Out-of-range page numbers are clamped.
    """
    if SHAPE.page_size == 0:
        return o_key
    else:
        b_page = tl.load(arrays.page_table + o_key // SHAPE.page_size, mask=m_key, other=0)
        b_page = tl.minimum(tl.maximum(b_page, 0), scalars.num_pages - 1)
        return b_page.to(tl.int64) * SHAPE.page_size + o_key % SHAPE.page_size


@triton.jit
def load_keys(arrays, scalars, first, end, head, SHAPE: tl.constexpr, TILE: tl.constexpr):
    """Load keys and values of rows [first, end), zero beyond, and the bias that excludes absent keys from a softmax.

    Keys and values of a cache get the queries' dtype. Factors of values by token are applied before they are rounded.
    """
    o_key = first + tl.arange(0, TILE.keys)
    m_key = o_key < end
    if SHAPE.has_mask:
        m_key = m_key & (tl.load(arrays.mask + o_key, mask=m_key, other=0) != 0)
    o_row = key_rows(arrays, scalars, o_key, m_key, SHAPE)
    b_key = load_rows(arrays.key, o_row, m_key, head, SHAPE.key_heads, SHAPE.head_dim, TILE.columns)
    b_value = load_rows(arrays.value, o_row, m_key, head, SHAPE.key_heads, SHAPE.head_dim, TILE.columns)
    if SHAPE.value_scale == "token":
        p_scale = arrays.value_scale + o_row.to(tl.int64) * SHAPE.key_heads + head
        b_value = b_value.to(tl.float32) * tl.load(p_scale, mask=m_key, other=0.0)[:, None]
    dtype: tl.constexpr = arrays.query.dtype.element_ty
    return b_key.to(dtype), b_value.to(dtype), tl.where(m_key, 0.0, float("-inf"))


@triton.jit
def score_factor(arrays, scalars, first, head, SHAPE: tl.constexpr):
    """Return the factor of the scores, times log2(e), of the sequence that has key `first`."""
    factor = scalars.scale_log2
    if SHAPE.has_score_scale:
        factor *= tl.load(arrays.score_scale + (first // scalars.max_keys).to(tl.int64) * SHAPE.key_heads + head)
    return factor


@triton.jit
def scale_by_token(b_scores, arrays, scalars, first, end, head, SHAPE: tl.constexpr, TILE: tl.constexpr):
    """Multiply the scores of keys [first, end) by the factors of their tokens, if there are any."""
    if SHAPE.has_key_scale:
        o_key = first + tl.arange(0, TILE.keys)
        o_row = key_rows(arrays, scalars, o_key, o_key < end, SHAPE).to(tl.int64)
        b_scale = tl.load(arrays.key_scale + o_row * SHAPE.key_heads + head, mask=o_key < end, other=0.0)
        b_scores *= b_scale[None, :]
    return b_scores


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
def moba_blocks_forward(arrays: BlocksForwardArrays, scalars: BlocksForwardScalars, SHAPE: tl.constexpr,
                        TILE: tl.constexpr):
    """Compute the partial outputs [query, head, slot, head_dim] of some of the heads.

    Each program handles one item of `lists.moba_items`.

    SHAPE is a ListShape, TILE a BlockTile.
    """
    HEAD_DIM: tl.constexpr = SHAPE.head_dim
    COLUMNS: tl.constexpr = TILE.columns
    SLOTS: tl.constexpr = SHAPE.slots
    ROWS: tl.constexpr = TILE.rows
    KEYS: tl.constexpr = TILE.keys
    PRECISION: tl.constexpr = TILE.precision
    head = scalars.first_head + tl.program_id(1)
    p_item = arrays.items + (head.to(tl.int64) * scalars.num_items + tl.program_id(0)) * 4
    count = tl.load(p_item)
    if count <= 0:
        return
    p_list = arrays.entries + head.to(tl.int64) * (scalars.query_tokens * SLOTS) + tl.load(p_item + 1)
    start = tl.load(p_item + 2)
    end = start + tl.load(p_item + 3)
    key_head = head // SHAPE.group_size
    factor = score_factor(arrays, scalars, start, key_head, SHAPE)
    if TILE.key_tiles == 1:
        b_key, b_value, b_bias = load_keys(arrays, scalars, start, end, key_head, SHAPE, TILE)
    for at in tl.range(0, count, ROWS, num_stages=TILE.loop_stages):
        o_entry = at + tl.arange(0, ROWS)
        m_entry = o_entry < count
        b_pair = tl.load(p_list + o_entry, mask=m_entry, other=0)
        b_token = b_pair // SLOTS
        b_query = load_rows(arrays.query, b_token, m_entry, head, SHAPE.query_heads, HEAD_DIM, COLUMNS)
        b_max = tl.zeros([ROWS], tl.float32) + float("-inf")
        b_sum = tl.zeros([ROWS], tl.float32)
        b_output = tl.zeros([ROWS, COLUMNS], tl.float32)
        if TILE.key_tiles == 1:
            b_scores = tl.dot(b_query, tl.trans(b_key), input_precision=PRECISION)
            b_scores = scale_by_token(b_scores, arrays, scalars, start, end, key_head, SHAPE, TILE)
            b_scores = b_scores * factor + b_bias[None, :]
            b_max = tl.max(b_scores, 1)
            b_base = tl.where(b_max == float("-inf"), 0.0, b_max)
            b_weights = tl.exp2(b_scores - b_base[:, None])
            b_sum = tl.sum(b_weights, 1)
            b_output = tl.dot(b_weights.to(b_value.dtype), b_value, input_precision=PRECISION)
        else:
            for first_key in range(start, end, KEYS):
                b_key, b_value, b_bias = load_keys(arrays, scalars, first_key, end, key_head, SHAPE, TILE)
                b_scores = tl.dot(b_query, tl.trans(b_key), input_precision=PRECISION)
                b_scores = scale_by_token(b_scores, arrays, scalars, first_key, end, key_head, SHAPE, TILE)
                b_scores = b_scores * factor + b_bias[None, :]
                b_max, b_sum, b_output = softmax_step(b_scores, b_value, b_max, b_sum, b_output, PRECISION)
        # `!= 0` instead of `> 0`, so that a row with a NaN score gets NaN as its log-sum-exp.
        m_seen = b_sum != 0
        b_norm = tl.where(m_seen, 1.0 / b_sum, 0.0)
        o_part = (b_token.to(tl.int64) * SHAPE.part_heads + tl.program_id(1)) * SLOTS + b_pair % SLOTS
        tl.store(arrays.part_sum + o_part, tl.where(m_seen, b_max + tl.log2(b_sum), float("-inf")), mask=m_entry)
        o_column = tl.arange(0, COLUMNS)
        tl.store(arrays.part + o_part[:, None] * HEAD_DIM + o_column[None, :],
                 (b_output * b_norm[:, None]).to(arrays.part.dtype.element_ty),
                 mask=m_entry[:, None] & (o_column < HEAD_DIM)[None, :])


@triton.jit
def moba_merge_forward(arrays: MergeForwardArrays, scalars: MergeForwardScalars, SHAPE: tl.constexpr,
                       TILE: tl.constexpr):
    """Merge the parts and the own block: output [query, head, head_dim] and natural log-sum-exp [query, head].

    SHAPE is an OwnShape, TILE a MergeTile.
    """
    HEAD_DIM: tl.constexpr = SHAPE.head_dim
    COLUMNS: tl.constexpr = TILE.columns
    SLOTS: tl.constexpr = SHAPE.slots
    ROWS: tl.constexpr = TILE.rows
    KEYS: tl.constexpr = TILE.keys
    PRECISION: tl.constexpr = TILE.precision
    head = scalars.first_head + tl.program_id(1)
    o_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m_row = o_row < scalars.query_tokens
    b_max = tl.zeros([ROWS], tl.float32) + float("-inf")
    b_sum = tl.zeros([ROWS], tl.float32)
    b_output = tl.zeros([ROWS, COLUMNS], tl.float32)
    if SHAPE.is_causal:
        key_head = head // SHAPE.group_size
        b_first = tl.load(arrays.queries + o_row * 4 + 2, mask=m_row, other=0)
        b_end = tl.load(arrays.queries + o_row * 4 + 3, mask=m_row, other=0)
        if SHAPE.has_own:
            b_own = tl.load(arrays.own + head.to(tl.int64) * scalars.query_tokens + o_row, mask=m_row, other=0)
            b_end = tl.where(b_own != 0, b_end, b_first)
        b_query = load_rows(arrays.query, o_row, m_row, head, SHAPE.query_heads, HEAD_DIM, COLUMNS)
        first = tl.min(tl.where(b_first < b_end, b_first, NEVER), 0)
        # Blocks are handled one by one: a weight of 0 times a NaN of another sequence's block would be NaN.
        while first < NEVER:
            m_own = (b_first == first) & (b_first < b_end)
            end = tl.max(tl.where(m_own, b_end, 0), 0)
            factor = score_factor(arrays, scalars, first, key_head, SHAPE)
            for first_key in range(first, end, KEYS):
                b_key, b_value, b_bias = load_keys(arrays, scalars, first_key, end, key_head, SHAPE, TILE)
                o_key = first_key + tl.arange(0, KEYS)[None, :]
                b_scores = tl.dot(b_query, tl.trans(b_key), input_precision=PRECISION)
                b_scores = scale_by_token(b_scores, arrays, scalars, first_key, end, key_head, SHAPE, TILE)
                b_scores = b_scores * factor + b_bias[None, :]
                b_scores = tl.where(o_key < b_end[:, None], b_scores, float("-inf"))
                b_new_max, b_new_sum, b_new = softmax_step(b_scores, b_value, b_max, b_sum, b_output, PRECISION)
                b_max = tl.where(m_own, b_new_max, b_max)
                b_sum = tl.where(m_own, b_new_sum, b_sum)
                b_output = tl.where(m_own[:, None], b_new, b_output)
            first = tl.min(tl.where((b_first > first) & (b_first < b_end), b_first, NEVER), 0)

    o_head = o_row.to(tl.int64) * SHAPE.query_heads + head
    if SLOTS > 0:
        b_degree = tl.load(arrays.degrees + head.to(tl.int64) * scalars.query_tokens + o_row, mask=m_row, other=0)
        o_part = (o_row.to(tl.int64) * SHAPE.part_heads + tl.program_id(1)) * SLOTS
        o_slot = tl.arange(0, TILE.slot_columns)[None, :]
        m_slot = o_slot < b_degree[:, None]
        b_part_sum = tl.load(arrays.part_sum + o_part[:, None] + o_slot, mask=m_slot, other=float("-inf"))
        b_new_max = tl.maximum(b_max, tl.max(b_part_sum, 1))
        b_base = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
        b_scale = tl.exp2(b_max - b_base)
        b_sum = b_sum * b_scale + tl.sum(tl.exp2(b_part_sum - b_base[:, None]), 1)
        b_output *= b_scale[:, None]
        o_column = tl.arange(0, COLUMNS)[None, :]
        for slot in tl.range(0, tl.max(b_degree, 0), num_stages=TILE.loop_stages):
            m_part = slot < b_degree
            b_weight = tl.exp2(tl.load(arrays.part_sum + o_part + slot, mask=m_part, other=float("-inf")) - b_base)
            b_part = tl.load(arrays.part + (o_part + slot)[:, None] * HEAD_DIM + o_column,
                             mask=m_part[:, None] & (o_column < HEAD_DIM), other=0.0)
            b_output += b_weight[:, None] * b_part.to(tl.float32)
        b_max = b_new_max
    m_seen = b_sum != 0
    b_norm = tl.where(m_seen, 1.0 / b_sum, 0.0)
    if SHAPE.value_scale == "head":
        # A row that sees something sees itself.
        o_scale = (b_first // scalars.max_keys).to(tl.int64) * SHAPE.key_heads + key_head
        b_norm *= tl.load(arrays.value_scale + o_scale, mask=b_first < b_end, other=0.0)
    tl.store(arrays.log_sum + o_head, tl.where(m_seen, (b_max + tl.log2(b_sum)) * 0.6931471805599453, float("-inf")),
             mask=m_row)
    o_column = tl.arange(0, COLUMNS)[None, :]
    tl.store(arrays.output + o_head[:, None] * HEAD_DIM + o_column,
             (b_output * b_norm[:, None]).to(arrays.output.dtype.element_ty),
             mask=m_row[:, None] & (o_column < HEAD_DIM))
