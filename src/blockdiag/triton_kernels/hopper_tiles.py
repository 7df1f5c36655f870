"""Hopper device helpers in Gluon, shared by the warp-specialised block-diagonal kernels.

A program is persistent. One warp brings tiles into a ring of shared-memory slots with the bulk tensor copy engine;
consumer warpgroups compute on them, write results over the consumed tiles, and let the copy engine carry those out.

Every operand tile is held as two panels of half the head dimension. Products over the head dimension are sums over the
panels, and with half-split rotary pairs the panels are exactly the first and the second elements of the pairs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma


@gluon.jit
def program_units(num_units, CONTIGUOUS: gl.constexpr):
    """Units of this program: (first, step, count).

    Contiguous ranges keep the heads of one tile in one program, so that a rotary row is read once; interleaved units
    keep neighbouring programs on neighbouring memory.
    """
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    if CONTIGUOUS:
        share = num_units // programs
        extra = num_units - share * programs
        first = program * share + gl.minimum(program, extra)
        step = 1
        count = share + gl.where(program < extra, 1, 0)
    else:
        first = program
        step = programs
        count = (num_units - program + programs - 1) // programs
    return first, step, count


@gluon.jit
def tile_rows_at(p_tiles, tile, sequence_length, ROWS: gl.constexpr, TABLE: gl.constexpr, FULL: gl.constexpr):
    """(first row, rows that hold tokens, rows to write, position in the sequence) of a tile; see tiles.tile_span."""
    if TABLE:
        start = gl.load(p_tiles + tile * 3)
        length = gl.load(p_tiles + tile * 3 + 1)
        position = gl.load(p_tiles + tile * 3 + 2)
        rows = gl.minimum(gl.maximum(length, 0), ROWS)
        written = gl.minimum(gl.maximum(length, -length), ROWS)
    else:
        tiles_per_sequence = (sequence_length + ROWS - 1) // ROWS
        sequence = tile // tiles_per_sequence
        position = (tile - sequence * tiles_per_sequence) * ROWS
        start = sequence * sequence_length + position
        if FULL:
            rows = ROWS
        else:
            rows = gl.minimum(sequence_length - position, ROWS)
        written = rows
    return start, rows, written, position


@gluon.jit
def init_barriers(barriers, COUNT: gl.constexpr):
    """Make COUNT barriers that one arrival completes."""
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=1)


@gluon.jit
def load_panels(source, panels, slot, row, column, barrier, PANEL: gl.constexpr):
    """Start copying both panels of a tile into a slot; `barrier` counts the bytes."""
    tma.async_copy_global_to_shared(source, [row, column], barrier, panels.index(slot * 2))
    tma.async_copy_global_to_shared(source, [row, column + PANEL], barrier, panels.index(slot * 2 + 1))


@gluon.jit
def zero_rows(panels, slot, rows, LAYOUT: gl.constexpr, ROWS: gl.constexpr):
    """Zero a slot's rows from `rows` on: the copy engine brought in other sequences, and 0 * NaN would be NaN."""
    o_rows = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    m_rows = gl.expand_dims(o_rows, 1) < rows
    for i in gl.static_range(2):
        panel = panels.index(slot * 2 + i)
        b_panel = panel.load(LAYOUT)
        panel.store(gl.where(m_rows, b_panel, gl.full_like(b_panel, 0.0)))


@gluon.jit
def score_mask_at(rows, LAYOUT: gl.constexpr, ROWS: gl.constexpr, CAUSAL: gl.constexpr):
    """Which (query, key) pairs of a tile attend; key 0 always does, so that rows of padding stay finite."""
    o_query = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)), 1)
    o_key = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT)), 0)
    m_scores = (o_key < gl.maximum(rows, 1)) & (o_query >= 0)
    if CAUSAL:
        m_scores = m_scores & (o_key <= o_query)
    return m_scores


@gluon.jit
def store_panel(p_target, panel, b_panel, start, written, column, ROW_STRIDE: gl.constexpr, ROWS: gl.constexpr,
                PANEL: gl.constexpr, FULL: gl.constexpr):  # fmt: skip
    """Write the first `written` rows of a panel out by way of the shared memory `panel`, which nobody else may use."""
    WIDTH: gl.constexpr = PANEL // 8
    ROWWISE: gl.constexpr = gl.BlockedLayout([1, 8], [32 // WIDTH, WIDTH], [4, 1], [1, 0])
    panel.store(b_panel.to(panel.dtype))
    b_rows = panel.load(ROWWISE)
    o_rows = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, ROWWISE)), 1)
    o_columns = gl.expand_dims(gl.arange(0, PANEL, gl.SliceLayout(0, ROWWISE)), 0)
    p_block = p_target + start.to(gl.int64) * ROW_STRIDE + column + o_rows * ROW_STRIDE + o_columns
    if FULL:
        gl.store(p_block, b_rows)
    else:
        gl.store(p_block, b_rows, mask=(o_rows < written) & (o_columns >= 0))


@gluon.jit
def store_panels(p_target, panels, slot, b_first, b_second, start, written, column, ROW_STRIDE: gl.constexpr,
                 ROWS: gl.constexpr, PANEL: gl.constexpr, FULL: gl.constexpr):  # fmt: skip
    """Write a tile out through a slot that has no reader left, in whole rows of the panel.

    The copy engine could do this too, but there a store queues behind the loads that run ahead, and the slot would be
    held for all that time: measured on an H200, 1.05 against 1.10 times the floor at 8 heads of 128.
    """
    store_panel(p_target, panels.index(slot * 2), b_first, start, written, column, ROW_STRIDE, ROWS, PANEL, FULL)
    store_panel(p_target, panels.index(slot * 2 + 1), b_second, start, written, column + PANEL, ROW_STRIDE, ROWS,
                PANEL, FULL)  # fmt: skip


@gluon.jit
def split_pairs(b_panel, ROWS: gl.constexpr, PANEL: gl.constexpr):
    """Even and odd columns of a panel; adjacent columns lie in one thread, so nothing moves."""
    return gl.split(gl.reshape(b_panel, [ROWS, PANEL // 2, 2]))


@gluon.jit
def join_pairs(b_even, b_odd, ROWS: gl.constexpr, PANEL: gl.constexpr, LAYOUT: gl.constexpr):
    """Inverse of `split_pairs`."""
    return gl.convert_layout(gl.reshape(gl.join(b_even, b_odd), [ROWS, PANEL]), LAYOUT)


@gluon.jit
def load_table(p_table, o_table, column, HALF: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr):
    """Columns [column, column + WIDTH) of a rotary table's rows, f32."""
    o_columns = gl.expand_dims(gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT)), 0)
    return gl.load(p_table + gl.expand_dims(o_table, 1) * HALF + column + o_columns).to(gl.float32)


@gluon.jit
def pair_layout_of(ROWS: gl.constexpr, PANEL: gl.constexpr, INTERLEAVED: gl.constexpr, LAYOUT: gl.constexpr):
    """A zero block with the shape and layout that rotary tables have for panels of `LAYOUT`."""
    b_zero = gl.zeros([ROWS, PANEL], gl.float32, LAYOUT)
    if INTERLEAVED:
        b_zero, _ = split_pairs(b_zero, ROWS, PANEL)
    return b_zero


@gluon.jit
def load_tables(p_cos, p_sin, p_positions, start, rows, position, table_rows, ROWS: gl.constexpr, PANEL: gl.constexpr,
                INTERLEAVED: gl.constexpr, POSITIONS: gl.constexpr, LAYOUT: gl.constexpr):  # fmt: skip
    """(cos, cos, sin, sin) for the two panels, in the layout the pairs have; half-split pairs share one of each."""
    TABLE_LAYOUT: gl.constexpr = pair_layout_of(ROWS, PANEL, INTERLEAVED, LAYOUT).type.layout
    WIDTH: gl.constexpr = PANEL // 2 if INTERLEAVED else PANEL
    o_rows = gl.arange(0, ROWS, gl.SliceLayout(1, TABLE_LAYOUT))
    if POSITIONS == 1:
        o_table = gl.load(p_positions + start + o_rows, mask=o_rows < rows, other=0)
    elif POSITIONS == 2:
        o_table = start + o_rows
    else:
        o_table = position + o_rows
    o_table = gl.minimum(gl.maximum(o_table, 0), table_rows - 1).to(gl.int64)
    b_cos0 = load_table(p_cos, o_table, 0, PANEL, WIDTH, TABLE_LAYOUT)
    b_sin0 = load_table(p_sin, o_table, 0, PANEL, WIDTH, TABLE_LAYOUT)
    b_cos1 = b_cos0
    b_sin1 = b_sin0
    if INTERLEAVED:
        b_cos1 = load_table(p_cos, o_table, WIDTH, PANEL, WIDTH, TABLE_LAYOUT)
        b_sin1 = load_table(p_sin, o_table, WIDTH, PANEL, WIDTH, TABLE_LAYOUT)
    return b_cos0, b_cos1, b_sin0, b_sin1


@gluon.jit
def rotate_panels(b_first, b_second, b_cos0, b_cos1, b_sin0, b_sin1, SIGN: gl.constexpr, ROWS: gl.constexpr,
                  PANEL: gl.constexpr, INTERLEAVED: gl.constexpr, LAYOUT: gl.constexpr):  # fmt: skip
    """Rotary embedding of both panels in f32; SIGN 1.0 rotates, -1.0 is the transpose."""
    b_first = b_first.to(gl.float32)
    b_second = b_second.to(gl.float32)
    if INTERLEAVED:
        b_x, b_y = split_pairs(b_first, ROWS, PANEL)
        b_first = join_pairs(b_x * b_cos0 - b_y * (b_sin0 * SIGN), b_y * b_cos0 + b_x * (b_sin0 * SIGN), ROWS, PANEL,
                             LAYOUT)  # fmt: skip
        b_x, b_y = split_pairs(b_second, ROWS, PANEL)
        b_second = join_pairs(b_x * b_cos1 - b_y * (b_sin1 * SIGN), b_y * b_cos1 + b_x * (b_sin1 * SIGN), ROWS, PANEL,
                              LAYOUT)  # fmt: skip
    else:
        b_x = b_first
        b_y = b_second
        b_first = b_x * b_cos0 - b_y * (b_sin0 * SIGN)
        b_second = b_y * b_cos0 + b_x * (b_sin0 * SIGN)
    return b_first, b_second


@gluon.jit
def rotate_slot(panels, slot, b_cos0, b_cos1, b_sin0, b_sin1, ROWS: gl.constexpr, PANEL: gl.constexpr,
                INTERLEAVED: gl.constexpr, LAYOUT: gl.constexpr):  # fmt: skip
    """Rotate a tile where it lies. Each thread writes the elements it read, so no barrier is needed in between."""
    first = panels.index(slot * 2)
    second = panels.index(slot * 2 + 1)
    b_first, b_second = rotate_panels(first.load(LAYOUT), second.load(LAYOUT), b_cos0, b_cos1, b_sin0, b_sin1, 1.0,
                                      ROWS, PANEL, INTERLEAVED, LAYOUT)  # fmt: skip
    first.store(b_first.to(first.dtype))
    second.store(b_second.to(second.dtype))
