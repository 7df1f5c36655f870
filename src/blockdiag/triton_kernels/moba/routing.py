"""Routing of MoBA: centroids of key blocks, scores of queries against them, and the best blocks of each query.

Scores have float32 precision even for 16-bit queries. Each centroid is held as three parts in the query's dtype, which
have 24 bits together: each part is the rounded remainder of the previous ones. Products of two 16-bit numbers are exact
in the float32 accumulator. The order of every sum is fixed, except for the rounding inside one tensor-core product.

Where queries choose among many blocks, two float16 halves take the place of the three parts, and queries become
float16. Powers of two scale each block's mean key and each query, so that its largest element is between 2^14 and 2^15.
An element of a mean key is then off by at most 2^-23 of itself or 2^-39 of the largest one, an element of a query by
2^-39 of the largest one. Mean keys below 2^-66 lose more: their elements may be off by 2^-105. Scores are 2^-32 times
those of a query whose largest element is between 1 and 2, so that none overflows.
"""

# Device code is laid out by hand: one argument per line would hide what a kernel does.
# fmt: off

import triton
import triton.language as tl

from blockdiag.triton_kernels.moba.arguments import (
    CentroidsArrays,
    ChooseArrays,
    ChooseScalars,
    HalvesArrays,
    HalvesScalars,
)


@triton.jit
def moba_centroids(arrays: CentroidsArrays, SHAPE: tl.constexpr, TILE: tl.constexpr):
    """Compute the mean key of one block and head in SHAPE.parts parts, [block, head, part, HEAD_DIM].

    A block without keys gets NaN, which loses every comparison.

    SHAPE is a MaskedCentroidShape, TILE a VectorTile.
    """
    KEY_HEADS: tl.constexpr = SHAPE.key_heads
    HEAD_DIM: tl.constexpr = SHAPE.head_dim
    COLUMNS: tl.constexpr = TILE.columns
    ROWS: tl.constexpr = TILE.rows
    block = tl.program_id(0)
    head = tl.program_id(1)
    start = tl.load(arrays.blocks + block * 4)
    length = tl.load(arrays.blocks + block * 4 + 1)
    o_column = tl.arange(0, COLUMNS)
    m_column = o_column < HEAD_DIM
    b_sum = tl.zeros([ROWS, COLUMNS], tl.float32)
    b_count = tl.zeros([ROWS], tl.float32)
    for first in range(0, length, ROWS):
        o_row = first + tl.arange(0, ROWS)
        m_row = o_row < length
        if SHAPE.has_mask:
            m_row = m_row & (tl.load(arrays.mask + start + o_row, mask=m_row, other=0) != 0)
        p_key = arrays.key + (start + o_row).to(tl.int64)[:, None] * (KEY_HEADS * HEAD_DIM) + head * HEAD_DIM
        b_key = tl.load(p_key + o_column[None, :], mask=m_row[:, None] & m_column[None, :], other=0.0)
        b_sum += b_key.to(tl.float32)
        b_count += m_row.to(tl.float32)
    count = tl.sum(b_count, 0)
    b_rest = tl.sum(b_sum, 0) / tl.where(count > 0, count, float("nan"))
    dtype: tl.constexpr = arrays.centroids.dtype.element_ty
    p_part = arrays.centroids + (block * KEY_HEADS + head).to(tl.int64) * (SHAPE.parts * HEAD_DIM)
    for part in tl.static_range(SHAPE.parts):
        b_part = b_rest.to(dtype)
        tl.store(p_part + part * HEAD_DIM + o_column, b_part, mask=m_column)
        # Scale the remainder so that it does not underflow in float16.
        b_rest = (b_rest - b_part.to(tl.float32)) * SHAPE.part_scale


@triton.jit
def moba_halves(arrays: HalvesArrays, scalars: HalvesScalars, SHAPE: tl.constexpr, TILE: tl.constexpr):
    """Round mean keys to sums of two float16 halves, [block, head, half, HEAD_DIM], times scales [head, block].

    Scales are powers of two, which the module describes. The halves of a block without keys, or whose mean key is not
    finite, have NaN.

    SHAPE is a CentroidShape, TILE a VectorTile.
    """
    HEAD_DIM: tl.constexpr = SHAPE.head_dim
    COLUMNS: tl.constexpr = TILE.columns
    ROWS: tl.constexpr = TILE.rows
    head = tl.program_id(1)
    o_block = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m_block = o_block < scalars.num_blocks
    o_column = tl.arange(0, COLUMNS)
    m_all = m_block[:, None] & (o_column < HEAD_DIM)[None, :]
    o_head = (o_block * SHAPE.key_heads + head).to(tl.int64)[:, None]
    p_part = arrays.centroids + o_head * (SHAPE.parts * HEAD_DIM) + o_column[None, :]
    b_mean = tl.zeros([ROWS, COLUMNS], tl.float32)
    for part in tl.static_range(SHAPE.parts - 1, -1, -1):
        b_part = tl.load(p_part + part * HEAD_DIM, mask=m_all, other=0.0)
        b_mean = b_mean * (1.0 / SHAPE.part_scale) + b_part.to(tl.float32)
    # The bounds keep the exponents of factor and scale in float32's range. Infinity and NaN stay what they are.
    b_exponent = tl.maximum(tl.max(tl.abs(b_mean), 1).to(tl.int32, bitcast=True) & 0x7F800000, 61 << 23)
    b_scale = (b_exponent - (60 << 23)).to(tl.float32, bitcast=True)
    b_mean *= ((127 << 23) - (b_exponent - (141 << 23))).to(tl.float32, bitcast=True)[:, None]
    b_half = b_mean.to(tl.float16)
    p_half = arrays.halves + o_head * (2 * HEAD_DIM) + o_column[None, :]
    tl.store(p_half, b_half, mask=m_all)
    tl.store(p_half + HEAD_DIM, (b_mean - b_half.to(tl.float32)).to(tl.float16), mask=m_all)
    tl.store(arrays.scales + head * scalars.num_blocks + o_block, b_scale, mask=m_block)


@triton.jit
def moba_choose(arrays: ChooseArrays, scalars: ChooseScalars, SHAPE: tl.constexpr, TILE: tl.constexpr):
    """Select the SLOTS best blocks of each query by descending score, int32 [head, query, slot], -1 after the last.

    Blocks are visited from late to early, and only a better block replaces another. So ties go to the later block.

    SHAPE is a ChoiceShape, TILE a ChoiceTile.
    """
    QUERY_HEADS: tl.constexpr = SHAPE.query_heads
    KEY_HEADS: tl.constexpr = SHAPE.key_heads
    HEAD_DIM: tl.constexpr = SHAPE.head_dim
    PARTS: tl.constexpr = SHAPE.parts
    SLOTS: tl.constexpr = SHAPE.slots
    COLUMNS: tl.constexpr = TILE.columns
    SLOT_COLUMNS: tl.constexpr = TILE.slot_columns
    ROWS: tl.constexpr = TILE.rows
    BLOCKS: tl.constexpr = TILE.blocks
    head = tl.program_id(1)
    key_head = head // (QUERY_HEADS // KEY_HEADS)
    # Late queries choose among more blocks. Their programs start first, so that none of them runs alone at the end.
    o_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS + tl.arange(0, ROWS)
    m_row = o_row < scalars.query_tokens
    b_first = tl.load(arrays.queries + o_row * 4, mask=m_row, other=0)
    b_end = tl.load(arrays.queries + o_row * 4 + 1, mask=m_row, other=0)
    lowest = tl.min(tl.where(b_first < b_end, b_first, 2147483647), 0)
    highest = tl.max(b_end, 0)
    o_column = tl.arange(0, COLUMNS)
    p_query = arrays.query + o_row.to(tl.int64)[:, None] * (QUERY_HEADS * HEAD_DIM) + head * HEAD_DIM
    b_query = tl.load(p_query + o_column[None, :], mask=m_row[:, None] & (o_column < HEAD_DIM)[None, :], other=0.0)
    p_parts = arrays.centroids
    if arrays.halves is not None:
        p_parts = arrays.halves
        b_query = b_query.to(tl.float32)
        b_exponent = tl.maximum(tl.max(tl.abs(b_query), 1).to(tl.int32, bitcast=True) & 0x7F800000, 14 << 23)
        b_factor = ((127 << 23) - (b_exponent - (141 << 23))).to(tl.float32, bitcast=True)
        b_query = (b_query * b_factor[:, None]).to(tl.float16)

    # Empty slots have distinct negative ids. Columns beyond SLOTS hold +inf, so they are never the worst slot.
    o_slot = tl.arange(0, SLOT_COLUMNS)[None, :]
    b_ids = tl.zeros([ROWS, SLOT_COLUMNS], tl.int32) - 2 - o_slot
    b_best = tl.where(o_slot < SLOTS, float("-inf"), float("inf")) + tl.zeros([ROWS, SLOT_COLUMNS], tl.float32)
    b_worst = tl.zeros([ROWS], tl.float32) + float("-inf")
    for behind in range(highest, lowest, -BLOCKS):
        o_block = behind - 1 - tl.arange(0, BLOCKS)
        p_part = p_parts + (o_block * KEY_HEADS + key_head).to(tl.int64)[None, :] * (PARTS * HEAD_DIM)
        m_part = (o_block >= lowest)[None, :] & (o_column < HEAD_DIM)[:, None]
        b_scores = tl.zeros([ROWS, BLOCKS], tl.float32)
        for part in tl.static_range(PARTS - 1, -1, -1):
            b_part = tl.load(p_part + part * HEAD_DIM + o_column[:, None], mask=m_part, other=0.0)
            if part < PARTS - 1 and SHAPE.part_scale != 1.0:
                b_scores *= 1.0 / SHAPE.part_scale
            b_scores = tl.dot(b_query, b_part, b_scores, input_precision=TILE.precision)
        if arrays.scales is not None:
            p_scale = arrays.scales + key_head * scalars.num_blocks + o_block
            b_scores *= tl.load(p_scale, mask=o_block >= lowest, other=0.0)[None, :]
        m_candidate = (o_block[None, :] >= b_first[:, None]) & (o_block[None, :] < b_end[:, None])
        # x == x is false only for NaN.
        b_scores = tl.where(m_candidate & (b_scores == b_scores), b_scores, float("-inf"))
        b_top = tl.max(b_scores, 1)
        while tl.max((b_top > b_worst).to(tl.int32), 0) > 0:
            b_id = tl.max(tl.where(b_scores == b_top[:, None], o_block[None, :], -1), 1)
            b_scores = tl.where(o_block[None, :] == b_id[:, None], float("-inf"), b_scores)
            m_at_worst = b_best == b_worst[:, None]
            b_out = tl.min(tl.where(m_at_worst, b_ids, 2147483647), 1)
            m_replaced = m_at_worst & (b_ids == b_out[:, None]) & (b_top > b_worst)[:, None]
            b_best = tl.where(m_replaced, b_top[:, None], b_best)
            b_ids = tl.where(m_replaced, b_id[:, None], b_ids)
            b_worst = tl.min(b_best, 1)
            b_top = tl.max(b_scores, 1)

    b_best = tl.where(o_slot < SLOTS, b_best, float("-inf"))
    b_chosen = tl.zeros([ROWS, SLOT_COLUMNS], tl.int32) - 1
    for slot in range(SLOTS):
        b_top = tl.max(b_best, 1)
        m_top = (b_best == b_top[:, None]) & (b_ids >= 0)
        b_id = tl.max(tl.where(m_top, b_ids, -1), 1)
        b_chosen = tl.where(o_slot == slot, b_id[:, None], b_chosen)
        m_taken = b_ids == b_id[:, None]
        b_best = tl.where(m_taken, float("-inf"), b_best)
        b_ids = tl.where(m_taken, -1, b_ids)
    p_row = arrays.chosen + (head.to(tl.int64) * scalars.query_tokens + o_row)[:, None] * SLOTS
    tl.store(p_row + o_slot, b_chosen, mask=m_row[:, None] & (o_slot < SLOTS))
