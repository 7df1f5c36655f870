"""Device functions that locate the queries, keys and results of a program of paged attention.

They compute scalars, or vectors without a layout of their own, so kernels in Gluon call them, too.
"""

# Device code is laid out by hand: one argument per line would hide what a kernel does.
# fmt: off

import triton
import triton.language as tl

from blockdiag.triton_kernels.paged.configs import SPLIT_GRAIN

GRAIN = tl.constexpr(SPLIT_GRAIN)


@triton.jit
def sequence_lengths(arrays, batch, max_keys, SHAPE: tl.constexpr):
    """Return the number of keys and queries of a sequence. Invalid values are clamped."""
    keys = tl.minimum(tl.maximum(tl.load(arrays.kv_lengths + batch), 0), max_keys)
    queries = SHAPE.query_tokens
    if SHAPE.has_query_lengths:
        queries = tl.minimum(tl.maximum(tl.load(arrays.query_lengths + batch), 0), SHAPE.query_tokens)
    return keys, queries


@triton.jit
def entry_of(arrays, batch, num_tiles, ENTRIES: tl.constexpr):
    """Return a pointer to an entry of the table of tiles, which has whole sequences after the tiles."""
    entry = batch
    if ENTRIES == "wholes":
        entry = num_tiles + batch
    return arrays.tiles + entry * 4


@triton.jit
def place_of(arrays, scalars, batch, SHAPE: tl.constexpr):
    """Return where the queries of a program are, and what they see. Invalid lengths are clamped.

    Without a table of tiles, `batch` is a sequence.

    Returns:
        The sequence, its number of keys, the number of queries, the rows that the program writes, the position of the
        first query, and the query's row among all.
    """
    written = SHAPE.query_tokens
    if SHAPE.entries == "sequences":
        sequence = batch
        keys, queries = sequence_lengths(arrays, batch, scalars.max_keys, SHAPE)
        position = keys - queries
        row = batch.to(tl.int64) * SHAPE.query_tokens
    else:
        p_tile = entry_of(arrays, batch, scalars.num_tiles, SHAPE.entries)
        row = tl.load(p_tile).to(tl.int64)
        written = tl.load(p_tile + 1)
        position = tl.load(p_tile + 2)
        sequence = tl.load(p_tile + 3)
        is_inside = sequence >= 0
        sequence = tl.maximum(sequence, 0)
        if (SHAPE.fewest is not None) or (SHAPE.most is not None):
            whole = tl.load(entry_of(arrays, sequence, scalars.num_tiles, "wholes") + 1)
            if SHAPE.fewest is not None:
                written = tl.where(is_inside & (whole < SHAPE.fewest), 0, written)
            if SHAPE.most is not None:
                written = tl.where(whole > SHAPE.most, 0, written)
        keys = tl.minimum(tl.maximum(tl.load(arrays.kv_lengths + sequence), 0), scalars.max_keys)
        # Rows that belong to no sequence have neither queries nor keys.
        queries = tl.where(is_inside, written, 0)
        keys = tl.where(queries > 0, keys, 0)
    return sequence, keys, queries, written, position, row


@triton.jit
def split_bounds(split, num_splits, split_size, keys, start):
    """Return the bounds [first, end) of one split of the keys [start, keys)."""
    if split_size == 0:
        grains = tl.cdiv(tl.maximum(keys - start, 0), GRAIN)
        split_size = tl.cdiv(grains, num_splits) * GRAIN
        first = start + split * split_size
    else:
        first = split * split_size
    return tl.maximum(first, start), tl.minimum(first + split_size, keys)


@triton.jit
def rows_of_heads(o_row, first, key_head, SHAPE: tl.constexpr):
    """Return the rows of [queries, query_heads] for a tile's rows, from the row of its first query.

    The tile's rows go query by query, with the heads of one key head for each.
    """
    b_token = o_row // SHAPE.group_size
    b_head = key_head * SHAPE.group_size + o_row % SHAPE.group_size
    return (first + b_token) * SHAPE.query_heads + b_head
