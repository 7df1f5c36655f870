"""How the kernel of latent caches for Hopper loads keys, and which keys a program has.

A chunk of keys arrives in blocks of columns. There are three ways:

| function | keys | work |
|---|---|---|
| `load_keys` | 16 bits, pages of 8 tokens or more | the copy engine loads boxes of rows that are neighbours in a page |
| `copy_keys` | 16 bits, smaller pages | threads find rows and start copies |
| `widen_keys` | eight bits, pages of any size | threads load rows, widen them in registers and store them |
"""

# Device code is laid out by hand: one argument per line would hide what a kernel does.
# fmt: off

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from blockdiag.triton_kernels.launch.gluon_names import reinterpret, thread_barrier, tma_load
from blockdiag.triton_kernels.paged.hopper_prompts import copy_rows, find_pages, pool_rows
from blockdiag.triton_kernels.paged.places import GRAIN, place_of, split_bounds
from blockdiag.triton_kernels.parts.widened_tiles import fetch_lines, widen_words

# Chunks of keys in shared memory, and blocks of their value columns. Half of these belong to each group of warps.
SLOTS = gl.constexpr(2)
BLOCKS = gl.constexpr(4)
# The order of loads, in which a group's first block comes first.
ORDER = gl.constexpr((0, 2, 1, 3))
# Blocks of eight-bit keys whose loads are in flight, in registers.
AHEAD = gl.constexpr(3)


class Span(NamedTuple):
    """The rows of a program, and the keys that they see.

    Attributes:
        sequence, key_head, batch, split: what the program computes, and how many entries there are to compute.
        first_row: the first of the program's rows, among those of its sequence or tile of queries.
        query_row, position: the row of the first query among all, and its position.
        rows, written: rows with queries, and rows that the launch writes.
        first, end: the keys that any row sees.
    """

    sequence: Any
    key_head: Any
    batch: Any
    entries: Any
    split: Any
    first_row: Any
    query_row: Any
    position: Any
    rows: Any
    written: Any
    first: Any
    end: Any


@gluon.jit
def span_of(arrays, scalars, SHAPE: gl.constexpr, TILE: gl.constexpr, OPTIONS: gl.constexpr):
    """Return the Span of a program."""
    GROUP: gl.constexpr = SHAPE.group_size
    part = gl.program_id(0)
    key_head = gl.program_id(1)
    batch = gl.program_id(2)
    entries = gl.num_programs(2)
    if SHAPE.is_long:
        part = gl.program_id(2)
        batch = gl.program_id(0)
        entries = gl.num_programs(0)
    split = part // TILE.row_tiles
    sequence, keys, queries, written, position, query_row = place_of(arrays, scalars, batch, SHAPE)
    if OPTIONS.is_causal and (SHAPE.entries != "sequences"):
        # The keys after a tile's last query are left out, so that splits divide the others.
        keys = gl.minimum(keys, gl.maximum(position + queries, 0))
    first_row = part % TILE.row_tiles * TILE.rows
    start = 0
    if OPTIONS.left is not None:
        start = gl.maximum(position - OPTIONS.left, 0) // GRAIN * GRAIN
    first, end = split_bounds(split, scalars.num_splits, scalars.split_size, keys, start)
    last_position = position + gl.minimum((first_row + TILE.rows - 1) // GROUP, queries - 1)
    if OPTIONS.left is not None:
        first = gl.maximum(first, gl.maximum(position + first_row // GROUP - OPTIONS.left, 0) // GRAIN * GRAIN)
    if OPTIONS.is_causal:
        end = gl.minimum(end, last_position + 1)
    elif OPTIONS.right is not None:
        end = gl.minimum(end, last_position + OPTIONS.right + 1)
    # Programs may have no rows.
    end = gl.where(first_row < queries * GROUP, end, first)
    return Span(sequence, key_head, batch, entries, split, first_row, query_row, position, queries * GROUP,
                written * GROUP, first, end)


@gluon.jit
def chunks_of(span, TILE: gl.constexpr):
    """Return the number of chunks of keys."""
    return gl.maximum(span.end - span.first + TILE.keys - 1, 0) // TILE.keys


@gluon.jit
def columns_of(memory, block: gl.constexpr):
    """Return a block of columns."""
    WIDTH: gl.constexpr = memory.shape[1] // BLOCKS
    return memory.slice(block * WIDTH, WIDTH, 1)


@gluon.jit
def wait_for_block(memory, slot, block: gl.constexpr, phase):
    """Wait until the group that multiplies a block has freed it. It frees all its blocks of a slot at a time."""
    EACH: gl.constexpr = BLOCKS // 2
    if block % EACH == 0:
        mbarrier.wait(memory.key_empty.index(slot * 2 + block // EACH), phase)


@gluon.jit
def copy_keys(memory, arrays, scalars, SHAPE: gl.constexpr, TILE: gl.constexpr, OPTIONS: gl.constexpr):
    """Copy chunks of keys by threads, from pages of any size."""
    KEYS: gl.constexpr = TILE.keys
    COLUMNS: gl.constexpr = TILE.columns
    MORE: gl.constexpr = TILE.more_columns
    WIDTH: gl.constexpr = SHAPE.key_heads * (COLUMNS + MORE)
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    span = span_of(arrays, scalars, SHAPE, TILE, OPTIONS)
    column = span.key_head * (COLUMNS + MORE)
    row_numbers = memory.row_numbers
    o_key = span.first + gl.arange(0, KEYS, LINE)
    b_page = find_pages(arrays, scalars, o_key, span.end, span.sequence, SHAPE)
    for at in range(chunks_of(span, TILE)):
        slot = at % SLOTS
        b_row = pool_rows(scalars, b_page, o_key, span.end, SHAPE)
        # The pages of the next chunk arrive while this one is copied.
        o_key = o_key + KEYS
        b_page = find_pages(arrays, scalars, o_key, span.end, span.sequence, SHAPE)
        # All threads have read the numbers of the last rows.
        thread_barrier()
        row_numbers.store(b_row)
        thread_barrier()
        for i in gl.static_range(BLOCKS):
            place = slot * BLOCKS + ORDER[i]
            wait_for_block(memory, slot, ORDER[i], at // SLOTS % 2 ^ 1)
            copy_rows(columns_of(memory.key.index(slot), ORDER[i]), arrays.key, row_numbers, WIDTH,
                      column + ORDER[i] * (COLUMNS // BLOCKS), KEYS, COLUMNS // BLOCKS)
            async_copy.mbarrier_arrive(memory.key_full.index(place), increment_count=False)
        # Both groups have read the weights that the slot had, since they have freed all blocks.
        copy_rows(memory.key_more.index(slot), arrays.key, row_numbers, WIDTH, column + COLUMNS, KEYS, MORE)
        async_copy.mbarrier_arrive(memory.more_full.index(slot), increment_count=False)


@gluon.jit
def boxes_of(arrays, scalars, keys, key, span, SHAPE: gl.constexpr, TILE: gl.constexpr):
    """Return the rows in the pool of the boxes of a chunk, whose keys are counted from the start of the sequence.

    Keys beyond the end are loaded, too, if they exist.
    """
    BOX: gl.constexpr = keys.block_shape[0]
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    o_key = gl.maximum(gl.minimum(key + gl.arange(0, TILE.keys // BOX, LINE) * BOX, span.end - 1), 0) // BOX * BOX
    b_page = find_pages(arrays, scalars, o_key, span.end, span.sequence, SHAPE)
    return pool_rows(scalars, b_page, o_key, span.end, SHAPE)


@gluon.jit
def load_boxes(target, full, keys, b_box, column):
    """Have the copy engine load some columns of a chunk."""
    BOX: gl.constexpr = keys.block_shape[0]
    WIDTH: gl.constexpr = keys.block_shape[1]
    BOXES: gl.constexpr = target.shape[0] // BOX
    for i in gl.static_range(BOXES):
        row = gl.max(gl.where(gl.arange(0, BOXES, b_box.type.layout) == i, b_box, 0), 0)
        for j in gl.static_range(target.shape[1] // WIDTH):
            tma_load(keys, [row, column + j * WIDTH], full, target.slice(i * BOX, BOX).slice(j * WIDTH, WIDTH, 1))


@gluon.jit
def load_keys(memory, arrays, scalars, keys, SHAPE: gl.constexpr, TILE: gl.constexpr, OPTIONS: gl.constexpr):
    """Have the copy engine load chunks of keys. They lie in boxes of rows that are neighbours in a page."""
    COLUMNS: gl.constexpr = TILE.columns
    MORE: gl.constexpr = TILE.more_columns
    WIDTH: gl.constexpr = COLUMNS // BLOCKS
    span = span_of(arrays, scalars, SHAPE, TILE, OPTIONS)
    column = span.key_head * (COLUMNS + MORE)
    b_box = boxes_of(arrays, scalars, keys, span.first, span, SHAPE, TILE)
    for at in range(chunks_of(span, TILE)):
        slot = at % SLOTS
        phase = at // SLOTS % 2
        # The pages of the next chunk arrive while this one is loaded.
        b_next = boxes_of(arrays, scalars, keys, span.first + (at + 1) * TILE.keys, span, SHAPE, TILE)
        for i in gl.static_range(BLOCKS):
            place = slot * BLOCKS + ORDER[i]
            full = memory.key_full.index(place)
            wait_for_block(memory, slot, ORDER[i], phase ^ 1)
            mbarrier.expect(full, TILE.keys * WIDTH * 2)
            load_boxes(columns_of(memory.key.index(slot), ORDER[i]), full, keys, b_box, column + ORDER[i] * WIDTH)
        # Both groups have read the weights that the slot had, since they have freed all blocks.
        full = memory.more_full.index(slot)
        mbarrier.expect(full, TILE.keys * MORE * 2)
        load_boxes(memory.key_more.index(slot), full, keys, b_box, column + COLUMNS)
        b_box = b_next


@gluon.jit
def load_narrow(p_row, m_row, piece: gl.constexpr, TILE: gl.constexpr, LINES: gl.constexpr):
    """Return a block of columns of a chunk, as words of four; zeros in rows that are no keys of the sequence.

    Number BLOCKS is the block of the columns that belong to keys alone.
    """
    EACH: gl.constexpr = TILE.columns // BLOCKS // 4
    FIRST: gl.constexpr = TILE.columns // 4 if piece == BLOCKS else ORDER[piece] * EACH
    WIDTH: gl.constexpr = TILE.more_columns // 4 if piece == BLOCKS else EACH
    o_column = gl.expand_dims(FIRST + gl.arange(0, WIDTH, gl.SliceLayout(0, LINES)), 0)
    return gl.load(p_row + o_column, mask=m_row & (o_column >= 0), other=0)


@gluon.jit
def prefetch(p_row, TILE: gl.constexpr):
    """Have rows of eight-bit keys loaded into L2, where registers for the loads that follow wait for less time."""
    WORDS: gl.constexpr = (TILE.columns + TILE.more_columns) // 4
    LINES: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [gl.num_warps(), 1], [1, 0])
    # Lines of 128 bytes.
    o_word = gl.minimum(gl.arange(0, 8, gl.SliceLayout(0, LINES)) * 32, WORDS - 1)
    fetch_lines(gl.convert_layout(p_row, LINES) + gl.expand_dims(o_word, 0))


@gluon.jit
def widen_keys(memory, arrays, scalars, SHAPE: gl.constexpr, TILE: gl.constexpr, OPTIONS: gl.constexpr):
    """Load chunks of eight-bit keys from pages of any size, and widen them to 16 bits.

    Shared memory has no room for narrow keys, so the loads in flight are in registers.
    """
    KEYS: gl.constexpr = TILE.keys
    COLUMNS: gl.constexpr = TILE.columns
    MORE: gl.constexpr = TILE.more_columns
    WORDS: gl.constexpr = (COLUMNS + MORE) // 4
    PIECES: gl.constexpr = BLOCKS + 1
    # Vectors of 16 bytes. Eight threads store two rows of 128 bytes without conflicts of banks.
    LINES: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [gl.num_warps(), 1], [1, 0])
    WIDE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=64, rank=2)
    key = reinterpret(memory.key, gl.int64, [SLOTS, KEYS, COLUMNS // 4], WIDE)
    key_more = reinterpret(memory.key_more, gl.int64, [SLOTS, KEYS, MORE // 4], WIDE)
    ROW: gl.constexpr = gl.SliceLayout(1, LINES)
    span = span_of(arrays, scalars, SHAPE, TILE, OPTIONS)
    chunks = chunks_of(span, TILE)
    p_key = arrays.key.to(gl.pointer_type(gl.int32)) + span.key_head * WORDS
    o_key = span.first + gl.arange(0, KEYS, ROW)
    b_row = pool_rows(scalars, find_pages(arrays, scalars, o_key, span.end, span.sequence, SHAPE), o_key, span.end,
                      SHAPE)
    b_page = find_pages(arrays, scalars, o_key + KEYS, span.end, span.sequence, SHAPE)
    m_row = gl.expand_dims(b_row, 1) >= 0
    p_row = p_key + gl.maximum(gl.expand_dims(b_row, 1), 0).to(gl.int64) * (SHAPE.key_heads * WORDS)
    ahead = ()
    for i in gl.static_range(AHEAD):
        ahead += (load_narrow(p_row, m_row, i, TILE, LINES),)
    for at in range(chunks):
        slot = at % SLOTS
        phase = at // SLOTS % 2
        if OPTIONS.has_key_scale:
            p_scale = arrays.key_scale + gl.maximum(b_row, 0).to(gl.int64) * SHAPE.key_heads + span.key_head
            b_scale = gl.load(p_scale, mask=b_row >= 0, other=0.0)
        o_key = o_key + KEYS
        b_row = pool_rows(scalars, b_page, o_key, span.end, SHAPE)
        b_page = find_pages(arrays, scalars, o_key + KEYS, span.end, span.sequence, SHAPE)
        m_next = gl.expand_dims(b_row, 1) >= 0
        p_next = p_key + gl.maximum(gl.expand_dims(b_row, 1), 0).to(gl.int64) * (SHAPE.key_heads * WORDS)
        prefetch(p_next, TILE)
        for i in gl.static_range(PIECES):
            if i + AHEAD < PIECES:
                ahead += (load_narrow(p_row, m_row, i + AHEAD, TILE, LINES),)
            else:
                ahead += (load_narrow(p_next, m_next, i + AHEAD - PIECES, TILE, LINES),)
            if i < BLOCKS:
                place = slot * BLOCKS + ORDER[i]
                target = columns_of(key.index(slot), ORDER[i])
                full = memory.key_full.index(place)
                wait_for_block(memory, slot, ORDER[i], phase ^ 1)
            else:
                # Both groups have read the weights that the slot had, since they have freed all blocks.
                target = key_more.index(slot)
                full = memory.more_full.index(slot)
                if OPTIONS.has_key_scale:
                    memory.key_scale.index(slot).store(b_scale)
            target.store(widen_words(ahead[0], OPTIONS.key_kind, memory.key.dtype))
            ahead = ahead[1:]
            # The groups fence what they read. A fence here would wait for the loads in flight.
            thread_barrier()
            mbarrier.arrive(full, count=1)
        p_row = p_next
        m_row = m_next
