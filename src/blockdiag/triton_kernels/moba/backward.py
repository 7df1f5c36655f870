"""Backward pass of MoBA: each block gathers the queries that attended to it and keeps its gradients in registers.

Weights are recomputed from the forward pass's log-sum-exp. The gradient of a query has one part for each block that it
attended to. The parts are rounded and stored, and a separate kernel sums them. There are no atomics, so results are
repeatable.
"""

# Device code is laid out by hand: one argument per line would hide what a kernel does.
# fmt: off

import triton
import triton.language as tl

from blockdiag.triton_kernels.moba.arguments import (
    BlocksBackwardArrays,
    BlocksBackwardScalars,
    MergeBackwardArrays,
    MergeBackwardScalars,
    QueryPartsArrays,
    QueryPartsScalars,
    StartsArrays,
    StartsScalars,
)
from blockdiag.triton_kernels.moba.forward import NEVER, load_keys, load_rows


@triton.jit
def moba_starts(arrays: StartsArrays, scalars: StartsScalars, HEAD_DIM: tl.constexpr, TILE: tl.constexpr):
    """Compute the initial accumulators of a query's products in the backward pass.

    - `score_start` is for the products with keys: -log_sum / scale. The exponential of the scaled sum is then a
      softmax weight. It is -inf for queries that see no key.
    - `weight_start` is for the cotangent's products with values: the log-sum-exp's cotangent minus delta, which is
      rowsum(O * dO). The weight times the sum is then the gradient of a score.

    TILE is a VectorTile.
    """
    o_row = (tl.program_id(0) * TILE.rows + tl.arange(0, TILE.rows)).to(tl.int64)
    m_row = o_row < scalars.num_rows
    o_column = tl.arange(0, TILE.columns)[None, :]
    m_block = m_row[:, None] & (o_column < HEAD_DIM)
    b_output = tl.load(arrays.output + o_row[:, None] * HEAD_DIM + o_column, mask=m_block, other=0.0)
    b_cotangent = tl.load(arrays.output_cotangent + o_row[:, None] * HEAD_DIM + o_column, mask=m_block, other=0.0)
    b_delta = tl.sum(b_output.to(tl.float32) * b_cotangent.to(tl.float32), 1)
    b_log_sum = tl.load(arrays.log_sum + o_row, mask=m_row, other=0.0)
    b_start = tl.where(b_log_sum == float("-inf"), float("-inf"), -b_log_sum / scalars.scale)
    tl.store(arrays.score_start + o_row, b_start, mask=m_row)
    p_weight_start = arrays.weight_start + o_row
    b_sum_cotangent = tl.load(arrays.log_sum_cotangent + o_row, mask=m_row, other=0.0)
    tl.store(p_weight_start, b_sum_cotangent - b_delta, mask=m_row)


@triton.jit
def list_tile(p_list, arrays, at, listed, own_first, own_rows, own_tiles, head, query_tokens, SHAPE: tl.constexpr,
              TILE: tl.constexpr):
    """Return the queries of a block's tile. The block's own queries come first, then those on its list.

    Returns their rows, the slots of their parts (the one after the last for own queries), the mask of existing queries,
    and the end of the key rows that each one sees.
    """
    ROWS: tl.constexpr = TILE.rows
    SLOTS: tl.constexpr = SHAPE.slots
    is_own = at < own_tiles
    o_own = at * ROWS + tl.arange(0, ROWS)
    m_row = o_own < own_rows
    b_row = own_first + o_own
    b_slot = o_own * 0 + SLOTS
    if SLOTS > 0:
        o_list = (at - own_tiles) * ROWS + tl.arange(0, ROWS)
        m_list = (o_list >= 0) & (o_list < listed)
        b_pair = tl.load(p_list + o_list, mask=m_list, other=0)
        m_row = tl.where(is_own, m_row, m_list)
        b_row = tl.where(is_own, b_row, b_pair // SLOTS)
        b_slot = tl.where(is_own, SLOTS, b_pair % SLOTS)
    b_end = tl.load(arrays.queries + b_row * 4 + 3, mask=m_row & is_own, other=NEVER)
    if SHAPE.has_own:
        b_own = tl.load(arrays.own + head.to(tl.int64) * query_tokens + b_row, mask=m_row & is_own, other=1)
        b_end = tl.where(b_own != 0, b_end, 0)
    return b_row, b_slot, m_row, b_end


@triton.jit
def moba_blocks_backward(arrays: BlocksBackwardArrays, scalars: BlocksBackwardScalars, SHAPE: tl.constexpr,
                         TILE: tl.constexpr):
    """Compute the gradients of one tile of a block's keys and values.

    If the block is a single tile, the kernel also computes the parts of its queries' gradients. Scores and weights are
    transposed, [keys, queries], so that weights and their gradients are left operands in registers.

    SHAPE is an OwnShape, TILE a BlockTile.
    """
    HEAD_DIM: tl.constexpr = SHAPE.head_dim
    COLUMNS: tl.constexpr = TILE.columns
    SLOTS: tl.constexpr = SHAPE.slots
    ROWS: tl.constexpr = TILE.rows
    KEYS: tl.constexpr = TILE.keys
    PRECISION: tl.constexpr = TILE.precision
    tile = tl.program_id(0)
    block = tile // TILE.key_tiles
    GROUP: tl.constexpr = SHAPE.group_size
    key_head = scalars.first_head // GROUP + tl.program_id(1)
    start = tl.load(arrays.blocks + block * 4)
    end = start + tl.load(arrays.blocks + block * 4 + 1)
    start += tile % TILE.key_tiles * KEYS
    if start >= end:
        return
    own_first = tl.load(arrays.blocks + block * 4 + 2)
    own_rows = tl.load(arrays.blocks + block * 4 + 3) if SHAPE.is_causal else 0
    own_tiles = tl.cdiv(own_rows, ROWS)
    b_key, b_value, b_bias = load_keys(arrays, scalars, start, end, key_head, SHAPE, TILE)
    o_key = start + tl.arange(0, KEYS)
    b_d_key = tl.zeros([KEYS, COLUMNS], tl.float32)
    b_d_value = tl.zeros([KEYS, COLUMNS], tl.float32)
    o_column = tl.arange(0, COLUMNS)
    for i in range(GROUP):
        head = key_head * GROUP + i
        o_list = head.to(tl.int64) * scalars.num_blocks + block
        p_list = arrays.entries
        listed = 0
        if SLOTS > 0:
            p_list += head.to(tl.int64) * (scalars.query_tokens * SLOTS) + tl.load(arrays.offsets + o_list)
            listed = tl.load(arrays.counts + o_list)
        for at in tl.range(0, own_tiles + tl.cdiv(listed, ROWS), num_stages=TILE.loop_stages):
            b_row, b_slot, m_row, b_end = list_tile(p_list, arrays, at, listed, own_first, own_rows, own_tiles, head,
                                                    scalars.query_tokens, SHAPE, TILE)
            b_query = load_rows(arrays.query, b_row, m_row, head, SHAPE.query_heads, HEAD_DIM, COLUMNS)
            b_cotangent = load_rows(arrays.output_cotangent, b_row, m_row, head, SHAPE.query_heads, HEAD_DIM, COLUMNS)
            o_head = b_row.to(tl.int64) * SHAPE.query_heads + head
            # Absent rows get weights of 0.
            b_score_start = tl.load(arrays.score_start + o_head, mask=m_row, other=float("-inf"))
            b_weight_start = tl.load(arrays.weight_start + o_head, mask=m_row, other=0.0)
            b_scores = tl.dot(b_key, tl.trans(b_query), input_precision=PRECISION) + b_score_start[None, :]
            b_weights = tl.exp2(b_scores * scalars.scale_log2 + b_bias[:, None])  # [KEYS, ROWS]
            if SHAPE.is_causal:
                b_weights = tl.where(o_key[:, None] < b_end[None, :], b_weights, 0.0)
            b_d_value = tl.dot(b_weights.to(b_cotangent.dtype), b_cotangent, b_d_value, input_precision=PRECISION)
            b_d_weights = tl.dot(b_value, tl.trans(b_cotangent), input_precision=PRECISION)
            b_d_scores = (b_weights * (b_d_weights + b_weight_start[None, :])).to(b_query.dtype)
            b_d_key = tl.dot(b_d_scores, b_query, b_d_key, input_precision=PRECISION)
            if TILE.key_tiles == 1:
                b_part = tl.dot(tl.trans(b_d_scores), b_key, input_precision=PRECISION) * scalars.scale
                o_part = (b_row.to(tl.int64) * SHAPE.part_heads + head - scalars.first_head) * SHAPE.part_slots + b_slot
                tl.store(arrays.part + o_part[:, None] * HEAD_DIM + o_column[None, :],
                         b_part.to(arrays.part.dtype.element_ty),
                         mask=m_row[:, None] & (o_column < HEAD_DIM)[None, :])
    if SHAPE.has_mask:
        # Masked keys have a gradient of 0, even if their queries hold NaN.
        b_d_key = tl.where((b_bias == 0)[:, None], b_d_key, 0.0)
        b_d_value = tl.where((b_bias == 0)[:, None], b_d_value, 0.0)
    o_out = (o_key.to(tl.int64) * SHAPE.key_heads + key_head)[:, None] * HEAD_DIM + o_column[None, :]
    m_out = (o_key < end)[:, None] & (o_column < HEAD_DIM)[None, :]
    tl.store(arrays.d_key + o_out, (b_d_key * scalars.scale).to(arrays.d_key.dtype.element_ty), mask=m_out)
    tl.store(arrays.d_value + o_out, b_d_value.to(arrays.d_value.dtype.element_ty), mask=m_out)


@triton.jit
def query_step(b_query, b_cotangent, b_score_start, b_weight_start, b_key, b_value, b_bias, m_seen, b_d_query,
               scale_log2, PRECISION: tl.constexpr):
    """Add one tile of keys' contribution to the gradient of queries, without the scale."""
    b_scores = tl.dot(b_query, tl.trans(b_key), input_precision=PRECISION) + b_score_start[:, None]
    b_weights = tl.where(m_seen, tl.exp2(b_scores * scale_log2 + b_bias[None, :]), 0.0)
    b_d_weights = tl.dot(b_cotangent, tl.trans(b_value), input_precision=PRECISION)
    b_d_scores = (b_weights * (b_d_weights + b_weight_start[:, None])).to(b_key.dtype)
    return tl.dot(b_d_scores, b_key, b_d_query, input_precision=PRECISION)


@triton.jit
def load_gradient_rows(arrays, b_row, m_row, head, SHAPE: tl.constexpr, TILE: tl.constexpr):
    """Load the query-side operands of a gradient: queries, their cotangents, and the values from `moba_starts`."""
    HEADS: tl.constexpr = SHAPE.query_heads
    b_query = load_rows(arrays.query, b_row, m_row, head, HEADS, SHAPE.head_dim, TILE.columns)
    b_cotangent = load_rows(arrays.output_cotangent, b_row, m_row, head, HEADS, SHAPE.head_dim, TILE.columns)
    o_head = b_row.to(tl.int64) * HEADS + head
    b_score_start = tl.load(arrays.score_start + o_head, mask=m_row, other=float("-inf"))
    return b_query, b_cotangent, b_score_start, tl.load(arrays.weight_start + o_head, mask=m_row, other=0.0)


@triton.jit
def moba_query_parts(arrays: QueryPartsArrays, scalars: QueryPartsScalars, SHAPE: tl.constexpr, TILE: tl.constexpr):
    """Compute the parts of the queries' gradients for blocks of several tiles.

    Each program handles one item of `lists.moba_items`.

    SHAPE is a ListShape, TILE a RowTile.
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
    o_column = tl.arange(0, COLUMNS)
    for at in range(0, count, ROWS):
        o_entry = at + tl.arange(0, ROWS)
        m_entry = o_entry < count
        b_pair = tl.load(p_list + o_entry, mask=m_entry, other=0)
        b_row = b_pair // SLOTS
        b_query, b_cotangent, b_score_start, b_weight_start = load_gradient_rows(
            arrays, b_row, m_entry, head, SHAPE, TILE)
        b_d_query = tl.zeros([ROWS, COLUMNS], tl.float32)
        for first_key in range(start, end, KEYS):
            b_key, b_value, b_bias = load_keys(arrays, scalars, first_key, end, key_head, SHAPE, TILE)
            b_d_query = query_step(b_query, b_cotangent, b_score_start, b_weight_start, b_key, b_value, b_bias,
                                   m_entry[:, None], b_d_query, scalars.scale_log2, PRECISION)
        o_part = (b_row.to(tl.int64) * SHAPE.part_heads + tl.program_id(1)) * SHAPE.part_slots + b_pair % SLOTS
        tl.store(arrays.part + o_part[:, None] * HEAD_DIM + o_column[None, :],
                 (b_d_query * scalars.scale).to(arrays.part.dtype.element_ty),
                 mask=m_entry[:, None] & (o_column < HEAD_DIM)[None, :])


@triton.jit
def moba_merge_backward(arrays: MergeBackwardArrays, scalars: MergeBackwardScalars, SHAPE: tl.constexpr,
                        TILE: tl.constexpr):
    """Sum the parts of the queries' gradients, [query, head, head_dim].

    If the own block's part is not among them (part_slots == slots), it is computed here.

    SHAPE is an OwnShape, TILE a RowTile.
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
    b_d_query = tl.zeros([ROWS, COLUMNS], tl.float32)
    o_head = o_row.to(tl.int64) * SHAPE.query_heads + head
    o_part = (o_row.to(tl.int64) * SHAPE.part_heads + tl.program_id(1)) * SHAPE.part_slots
    o_column = tl.arange(0, COLUMNS)[None, :]
    if SHAPE.is_causal:
        b_first = tl.load(arrays.queries + o_row * 4 + 2, mask=m_row, other=0)
        b_end = tl.load(arrays.queries + o_row * 4 + 3, mask=m_row, other=0)
        if SHAPE.has_own:
            b_own = tl.load(arrays.own + head.to(tl.int64) * scalars.query_tokens + o_row, mask=m_row, other=0)
            b_end = tl.where(b_own != 0, b_end, b_first)
        if SHAPE.part_slots > SLOTS:
            m_part = m_row & (b_first < b_end)
            b_part = tl.load(arrays.part + (o_part + SLOTS)[:, None] * HEAD_DIM + o_column,
                             mask=m_part[:, None] & (o_column < HEAD_DIM), other=0.0)
            b_d_query += b_part.to(tl.float32)
        else:
            key_head = head // SHAPE.group_size
            b_query, b_cotangent, b_score_start, b_weight_start = load_gradient_rows(
                arrays, o_row, m_row, head, SHAPE, TILE)
            first = tl.min(tl.where(b_first < b_end, b_first, NEVER), 0)
            # Blocks are handled one by one: a weight of 0 times a NaN of another sequence's block would be NaN.
            while first < NEVER:
                m_own = (b_first == first) & (b_first < b_end)
                end = tl.max(tl.where(m_own, b_end, 0), 0)
                for first_key in range(first, end, KEYS):
                    b_key, b_value, b_bias = load_keys(arrays, scalars, first_key, end, key_head, SHAPE, TILE)
                    o_key = first_key + tl.arange(0, KEYS)[None, :]
                    m_seen = o_key < b_end[:, None]
                    b_new = query_step(b_query, b_cotangent, b_score_start, b_weight_start, b_key, b_value, b_bias,
                                       m_seen, b_d_query, scalars.scale_log2, PRECISION)
                    b_d_query = tl.where(m_own[:, None], b_new, b_d_query)
                first = tl.min(tl.where((b_first > first) & (b_first < b_end), b_first, NEVER), 0)
            b_d_query *= scalars.scale
    if SLOTS > 0:
        b_degree = tl.load(arrays.degrees + head.to(tl.int64) * scalars.query_tokens + o_row, mask=m_row, other=0)
        for slot in tl.range(0, tl.max(b_degree, 0), num_stages=TILE.loop_stages):
            m_part = slot < b_degree
            b_part = tl.load(arrays.part + (o_part + slot)[:, None] * HEAD_DIM + o_column,
                             mask=m_part[:, None] & (o_column < HEAD_DIM), other=0.0)
            b_d_query += b_part.to(tl.float32)
    tl.store(arrays.d_query + o_head[:, None] * HEAD_DIM + o_column, b_d_query.to(arrays.d_query.dtype.element_ty),
             mask=m_row[:, None] & (o_column < HEAD_DIM))
