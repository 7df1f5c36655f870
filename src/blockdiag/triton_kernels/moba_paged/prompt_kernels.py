"""Kernels that prepare prompts over a paged cache for MoBA's own kernels: block and query tables, widened queries."""

# Device code is laid out by hand: one argument per line would hide what a kernel does.
# fmt: off

import triton
import triton.language as tl

from blockdiag.triton_kernels.moba_paged.arguments import TableArrays, TableScalars


@triton.jit
def store_columns(table, o_row, m_row, b_0, b_1, b_2, b_3):
    """Store four columns of some rows of a table, int32 [rows, 4]."""
    tl.store(table + o_row * 4, b_0, mask=m_row)
    tl.store(table + o_row * 4 + 1, b_1, mask=m_row)
    tl.store(table + o_row * 4 + 2, b_2, mask=m_row)
    tl.store(table + o_row * 4 + 3, b_3, mask=m_row)


@triton.jit
def moba_paged_tables(arrays: TableArrays, scalars: TableScalars, ROWS: tl.constexpr):
    """Write the tables of `ops.moba.tables` for the lengths of a call. Invalid lengths are clamped.

    Keys are numbered sequence * max_keys + position, and blocks sequence * max_blocks + block. Rows of blocks have only
    the keys, since the backward pass alone reads the queries.
    """
    o_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    m_row = o_row < scalars.rows
    b_sequence = (o_row // scalars.query_tokens).to(tl.int32)
    b_keys = tl.load(arrays.kv_lengths + b_sequence, mask=m_row, other=0)
    b_keys = tl.minimum(tl.maximum(b_keys, 0), scalars.max_keys)
    b_token = (o_row % scalars.query_tokens).to(tl.int32)
    b_queries = b_token * 0 + scalars.query_tokens
    if arrays.query_lengths is not None:
        b_queries = tl.load(arrays.query_lengths + b_sequence, mask=m_row, other=0)
        b_queries = tl.minimum(tl.maximum(b_queries, 0), scalars.query_tokens)
    b_position = b_keys - b_queries + b_token
    m_seen = (b_token < b_queries) & (b_position >= 0)
    b_own = b_position // scalars.block_size
    b_block = b_sequence * scalars.max_blocks
    b_key = b_sequence * scalars.max_keys
    store_columns(arrays.queries, o_row, m_row, tl.where(m_seen, b_block, 0), tl.where(m_seen, b_block + b_own, 0),
                  tl.where(m_seen, b_key + b_own * scalars.block_size, 0),
                  tl.where(m_seen, b_key + b_position + 1, 0))
    if arrays.blocks is not None:
        m_block = o_row < scalars.blocks
        b_sequence = (o_row // scalars.max_blocks).to(tl.int32)
        b_first = (o_row % scalars.max_blocks).to(tl.int32) * scalars.block_size
        b_keys = tl.load(arrays.kv_lengths + b_sequence, mask=m_block, other=0)
        b_keys = tl.minimum(tl.maximum(b_keys, 0), scalars.max_keys)
        b_length = tl.minimum(tl.maximum(b_keys - b_first, 0), scalars.block_size)
        store_columns(arrays.blocks, o_row, m_block, b_sequence * scalars.max_keys + b_first, b_length, b_length * 0,
                      b_length * 0)


@triton.jit
def moba_paged_widen(p_query, p_wide, elements, ELEMENTS: tl.constexpr):
    """Convert eight-bit queries to the output's dtype, which holds all of them."""
    o_element = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    m_element = o_element < elements
    b_query = tl.load(p_query + o_element, mask=m_element, other=0.0)
    tl.store(p_wide + o_element, b_query.to(p_wide.dtype.element_ty), mask=m_element)
