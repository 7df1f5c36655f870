"""Device helpers in Gluon for Hopper kernels that move tiles with TMA, mainly the block-diagonal kernels.

A program handles one tile of one or a few heads. It starts the loads of all its operands at once and computes on them
in shared memory. It then overwrites operands that are no longer needed with the results, which TMA stores. Meanwhile
other programs on the same multiprocessor keep memory busy, in the order in which the hardware starts them.

On an H200, at 8 heads of 128, the backward pass takes 1.02 times the time of a copy of the same bytes. Persistent
programs that prefetch into a ring of slots take 1.05 to 1.13 times, with or without a producer warp.
"""

# Device code is laid out by hand: one argument per line would hide what a kernel does.
# fmt: off

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from blockdiag.triton_kernels.launch.gluon_names import thread_barrier, tma_load, tma_store


@gluon.jit
def tile_rows_at(p_tiles, tile, sequence_length, ROWS: gl.constexpr, TABLE: gl.constexpr, FULL: gl.constexpr):
    """Return (first row, rows that hold tokens, rows to write, position in the sequence); see tiles.tile_span."""
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
def make_barrier():
    """Return a barrier that completes with a single arrival and the bytes it announces.

    Every barrier has its own allocation, because the compiler inserts program-wide barriers between all uses of one
    allocation. Never make a barrier that is not waited on: the compiler then reuses its memory. With three or more
    programs on a multiprocessor, data placed there was wrong.
    """
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=1)
    return barrier


@gluon.jit
def make_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Return COUNT barriers, [COUNT, 1], each of which completes after ARRIVALS arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def load_tile(source, memory, row, column, barrier, pred=True):
    """Start copying a tile into shared memory that is no longer in use. `barrier` completes when the tile arrives."""
    BYTES: gl.constexpr = memory.shape[0] * memory.shape[1] * 2
    mbarrier.expect(barrier, BYTES, pred)
    tma_load(source, [row, column], barrier, memory, pred)


@gluon.jit
def zero_rows(memory, rows, LAYOUT: gl.constexpr):
    """Zero a tile's rows from `rows` on. TMA loaded other sequences' rows there, and 0 * NaN would be NaN."""
    o_rows = gl.expand_dims(gl.arange(0, memory.shape[0], gl.SliceLayout(1, LAYOUT)), 1)
    b_tile = memory.load(LAYOUT)
    # Each thread writes only what it has read. The compiler would put a barrier here anyway.
    thread_barrier()
    memory.store(gl.where(o_rows < rows, b_tile, gl.full_like(b_tile, 0.0)))


@gluon.jit
def score_mask_at(rows, LAYOUT: gl.constexpr, ROWS: gl.constexpr, CAUSAL: gl.constexpr):
    """Return the mask of (query, key) pairs that attend. Key 0 is always included to keep rows of padding finite."""
    o_query = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)), 1)
    o_key = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT)), 0)
    m_scores = (o_key < gl.maximum(rows, 1)) & (o_query >= 0)
    if CAUSAL:
        m_scores = m_scores & (o_key <= o_query)
    return m_scores


@gluon.jit
def softmax_rows(b_scores, rows, ROWS: gl.constexpr, FULL: gl.constexpr, CAUSAL: gl.constexpr):
    """Return the unnormalised masked softmax of base-2 scores in f32, and the rows' norms, [ROWS, 1]."""
    LAYOUT: gl.constexpr = b_scores.type.layout
    if CAUSAL or not FULL:
        b_scores = gl.where(score_mask_at(rows, LAYOUT, ROWS, CAUSAL), b_scores, float("-inf"))
    b_weights = gl.exp2(b_scores - gl.expand_dims(gl.max(b_scores, 1), 1))
    return b_weights, gl.expand_dims(1.0 / gl.sum(b_weights, 1), 1)


@gluon.jit
def send_tile(target, p_target, memory, b_tile, start, written, column, ROW_STRIDE: gl.constexpr, FULL: gl.constexpr,
              READ_BACK: gl.constexpr = False):
    """Store the first `written` rows of the tile that `memory` (complete and fenced) and `b_tile` both hold.

    TMA has no masks, so the rare partial tile is stored from registers. READ_BACK reloads it from `memory`, so that
    kernels without spare registers need not keep `b_tile`.
    """
    if FULL:
        tma_store(target, [start, column], memory)
    else:
        if written == memory.shape[0]:
            tma_store(target, [start, column], memory)
        else:
            if READ_BACK:
                LAYOUT: gl.constexpr = gl.BlockedLayout(
                    [1, 8], [256 // memory.shape[1], memory.shape[1] // 8], [gl.num_warps(), 1], [1, 0]
                )
            else:
                LAYOUT: gl.constexpr = b_tile.type.layout
            o_rows = gl.expand_dims(gl.arange(0, b_tile.shape[0], gl.SliceLayout(1, LAYOUT)), 1)
            o_columns = gl.expand_dims(gl.arange(0, b_tile.shape[1], gl.SliceLayout(0, LAYOUT)), 0)
            p_block = p_target + start.to(gl.int64) * ROW_STRIDE + column + o_rows * ROW_STRIDE + o_columns
            # Loaded after the addresses are computed, because an earlier load would need more registers.
            if READ_BACK:
                b_written = memory.load(LAYOUT)
            else:
                b_written = b_tile
            gl.store(p_block, b_written, mask=(o_rows < written) & (o_columns >= 0))


@gluon.jit
def put_tile(target, p_target, memory, b_tile, start, written, column, ROW_STRIDE: gl.constexpr, FULL: gl.constexpr,
             READ_BACK: gl.constexpr = False):
    """Store a tile through `memory`, which must no longer be in use."""
    memory.store(b_tile)
    fence_async_shared()
    thread_barrier()
    send_tile(target, p_target, memory, b_tile, start, written, column, ROW_STRIDE, FULL, READ_BACK)


@gluon.jit
def split_pairs(b_tile, INTERLEAVED: gl.constexpr):
    """Return the first and second elements of a tile's rotary pairs. Each thread holds whole pairs; no data moves."""
    ROWS: gl.constexpr = b_tile.shape[0]
    HALF: gl.constexpr = b_tile.shape[1] // 2
    if INTERLEAVED:
        b_pairs = gl.reshape(b_tile, [ROWS, HALF, 2])
    else:
        b_pairs = gl.permute(gl.reshape(b_tile, [ROWS, 2, HALF]), [0, 2, 1])
    return gl.split(b_pairs)


@gluon.jit
def join_pairs(b_first, b_second, INTERLEAVED: gl.constexpr, LAYOUT: gl.constexpr):
    """Inverse of `split_pairs`."""
    ROWS: gl.constexpr = b_first.shape[0]
    HALF: gl.constexpr = b_first.shape[1]
    b_pairs = gl.join(b_first, b_second)
    if not INTERLEAVED:
        b_pairs = gl.permute(b_pairs, [0, 2, 1])
    return gl.convert_layout(gl.reshape(b_pairs, [ROWS, 2 * HALF]), LAYOUT, assert_trivial=True)


@gluon.jit
def pair_zeros(ROWS: gl.constexpr, HEAD_DIM: gl.constexpr, INTERLEAVED: gl.constexpr, LAYOUT: gl.constexpr):
    """Return zeros in the shape and layout of the rotary tables for tiles in `LAYOUT`."""
    b_zero, _b_zero = split_pairs(gl.zeros([ROWS, HEAD_DIM], gl.float32, LAYOUT), INTERLEAVED)
    return b_zero


@gluon.jit
def load_table_lines(p_cos, p_sin, p_positions, start, rows, position, table_rows, ROWS: gl.constexpr,
                     HEAD_DIM: gl.constexpr, POSITIONS: gl.constexpr):
    """Load cos and sin for a tile's rows in the tables' dtype, in whole cache lines.

    Every sequence reads the same rows of the tables. Operands of about 50 MB pass through L2 in between and would evict
    them, which would add 3% of memory traffic. Therefore the loads use the policy evict_last.
    """
    HALF: gl.constexpr = HEAD_DIM // 2
    # 16 bytes per thread for every dtype of the tables.
    VECTOR: gl.constexpr = 128 // p_cos.dtype.element_ty.primitive_bitwidth
    LINES: gl.constexpr = gl.BlockedLayout(
        [1, VECTOR], [32 * VECTOR // HALF, HALF // VECTOR], [gl.num_warps(), 1], [1, 0]
    )
    o_rows = gl.arange(0, ROWS, gl.SliceLayout(1, LINES))
    if POSITIONS == 1:
        o_table = gl.load(p_positions + start + o_rows, mask=o_rows < rows, other=0)
    elif POSITIONS == 2:
        o_table = start + o_rows
    else:
        o_table = position + o_rows
    o_table = gl.minimum(gl.maximum(o_table, 0), table_rows - 1).to(gl.int64)
    o_columns = gl.expand_dims(gl.arange(0, HALF, gl.SliceLayout(0, LINES)), 0)
    o_block = gl.expand_dims(o_table, 1) * HALF + o_columns
    b_cos = gl.load(p_cos + o_block, eviction_policy="evict_last")
    b_sin = gl.load(p_sin + o_block, eviction_policy="evict_last")
    return b_cos, b_sin


@gluon.jit
def spread_tables(b_cos, b_sin, INTERLEAVED: gl.constexpr, LAYOUT: gl.constexpr):
    """Convert cos and sin from `load_table_lines` to f32 and to the layout of a tile's pairs.

    Loading them in this layout directly would touch eight cache lines per instruction.
    """
    PAIR_LAYOUT: gl.constexpr = pair_zeros(b_cos.shape[0], 2 * b_cos.shape[1], INTERLEAVED, LAYOUT).type.layout
    b_cos = gl.convert_layout(b_cos.to(gl.float32), PAIR_LAYOUT)
    b_sin = gl.convert_layout(b_sin.to(gl.float32), PAIR_LAYOUT)
    return b_cos, b_sin


@gluon.jit
def rotate(b_tile, b_cos, b_sin, SIGN: gl.constexpr, INTERLEAVED: gl.constexpr):
    """Apply rotary embedding in f32. SIGN 1.0 rotates; -1.0 applies the transpose."""
    LAYOUT: gl.constexpr = b_tile.type.layout
    b_x, b_y = split_pairs(b_tile, INTERLEAVED)
    b_x = b_x.to(gl.float32)
    b_y = b_y.to(gl.float32)
    b_s = b_sin * SIGN
    return join_pairs(b_x * b_cos - b_y * b_s, b_y * b_cos + b_x * b_s, INTERLEAVED, LAYOUT)


@gluon.jit
def rotate_memory(memory, b_cos, b_sin, INTERLEAVED: gl.constexpr, LAYOUT: gl.constexpr):
    """Rotate a tile in place in shared memory."""
    memory.store(rotate(memory.load(LAYOUT), b_cos, b_sin, 1.0, INTERLEAVED).to(memory.dtype))


@gluon.jit
def finished(PENDING: gl.constexpr, tiles):
    """Return sums once all but the last PENDING products have completed."""
    if len(tiles) == 1:
        return (warpgroup_mma_wait(PENDING, deps=tiles),)
    else:
        return warpgroup_mma_wait(PENDING, deps=tiles)
