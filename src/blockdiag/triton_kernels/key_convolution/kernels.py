"""Device code of key convolution.

The kernels are memory-bound. The forward pass reads the key and writes the output. The backward pass reads the key and
the output's cotangent and writes the key's gradient.

A program handles some channels of one tile of tokens, which lies in one sequence. Each thread walks along a run of
tokens in a few neighbouring channels, so every element is loaded once except at the ends of runs. All loads of a run
are issued before the first store. The compiler cannot reorder them itself, because it does not know that results and
operands do not alias.
"""

# Device code is laid out by hand: one argument per line would hide what a kernel does.
# fmt: off

import triton
import triton.language as tl

from blockdiag.triton_kernels.key_convolution.arguments import (
    BackwardArrays,
    BackwardScalars,
    ForwardArrays,
    ForwardScalars,
)
from blockdiag.triton_kernels.parts.tiles import tile_span


@triton.jit
def _load_weights(weights, o_channel, m_channel, CHANNELS: tl.constexpr, SIZE: tl.constexpr):
    """Load the weights by lag, each [1, WIDTH] in float32. The last row of the array has lag 0."""
    b_weights = ()
    for lag in tl.static_range(SIZE):
        p_row = weights + (SIZE - 1 - lag) * CHANNELS + o_channel
        b_weights += (tl.load(p_row, mask=m_channel, other=0.0).to(tl.float32),)
    return b_weights


@triton.jit
def _load_rows(source, o_row, first, end, o_channel, m_channel, FIRST: tl.constexpr, END: tl.constexpr,
               CHANNELS: tl.constexpr):
    """Load rows o_row + FIRST .. o_row + END - 1, each [RUNS, WIDTH]. Rows outside [first, end) are 0."""
    b_rows = ()
    for step in tl.static_range(FIRST, END):
        m_row = (o_row + step >= first) & (o_row + step < end)
        p_row = source + (o_row + step) * CHANNELS + o_channel
        b_rows += (tl.load(p_row, mask=m_row & m_channel, other=0.0),)
    return b_rows


@triton.jit
def _weighted_sum(b_weights, b_keys, LAST: tl.constexpr, SIZE: tl.constexpr):
    """Return the sum over lags of weights times keys, with `b_keys[LAST]` at lag 0."""
    b_total = b_weights[0] * b_keys[LAST].to(tl.float32)
    for lag in tl.static_range(1, SIZE):
        b_total += b_weights[lag] * b_keys[LAST - lag].to(tl.float32)
    return b_total


@triton.jit
def key_convolution_forward(arrays: ForwardArrays, scalars: ForwardScalars, SHAPE: tl.constexpr, TILE: tl.constexpr):
    """Compute the output. SHAPE is a Shape, TILE a Tile."""
    CHANNELS: tl.constexpr = SHAPE.channels
    SIZE: tl.constexpr = SHAPE.size
    RUN: tl.constexpr = TILE.run
    WIDTH: tl.constexpr = TILE.width
    BLOCKS: tl.constexpr = (CHANNELS + WIDTH - 1) // WIDTH
    tile = tl.program_id(0) // BLOCKS
    start, rows, written, position = tile_span(arrays.tiles, tile, scalars.sequence_length, TILE.rows, SHAPE.has_tiles,
                                               False)
    o_channel = tl.program_id(0) % BLOCKS * WIDTH + tl.arange(0, WIDTH)[None, :]
    m_channel = o_channel < CHANNELS
    o_row = tl.arange(0, TILE.rows // RUN)[:, None] * RUN
    origin = start.to(tl.int64) * CHANNELS

    group = (tile // scalars.tiles_per_group).to(tl.int64)
    b_weights = _load_weights(arrays.weights + group * SIZE * CHANNELS, o_channel, m_channel, CHANNELS, SIZE)
    # Tiles of padding have positions too, but the rows before them belong to no sequence.
    first = tl.where(rows > 0, -position, 0)
    b_keys = _load_rows(arrays.key + origin, o_row, first, rows, o_channel, m_channel, 1 - SIZE, RUN, CHANNELS)
    for step in tl.static_range(RUN):
        b_total = _weighted_sum(b_weights, b_keys, step + SIZE - 1, SIZE)
        if SHAPE.has_silu:
            b_total = b_total / (1.0 + tl.exp(-b_total))
        if SHAPE.has_residual:
            b_total += b_keys[step + SIZE - 1].to(tl.float32)
        p_row = arrays.output + origin + (o_row + step) * CHANNELS + o_channel
        # Rows of padding are written with 0.
        tl.store(p_row, b_total.to(arrays.output.dtype.element_ty), mask=(o_row + step < written) & m_channel)


@triton.jit
def key_convolution_backward(arrays: BackwardArrays, scalars: BackwardScalars, SHAPE: tl.constexpr,
                             TILE: tl.constexpr):
    """Compute the key's gradient and each tile's part of the weights' gradient, f32 [num_tiles, SIZE, CHANNELS].

    A token's gradient needs the weighted sums of the SIZE - 1 following tokens, which are recomputed.

    SHAPE is a Shape, TILE a Tile.
    """
    CHANNELS: tl.constexpr = SHAPE.channels
    SIZE: tl.constexpr = SHAPE.size
    RUN: tl.constexpr = TILE.run
    WIDTH: tl.constexpr = TILE.width
    BLOCKS: tl.constexpr = (CHANNELS + WIDTH - 1) // WIDTH
    REACH: tl.constexpr = SIZE - 1
    tile = tl.program_id(0) // BLOCKS
    start, rows, written, position = tile_span(arrays.tiles, tile, scalars.sequence_length, TILE.rows, SHAPE.has_tiles,
                                               False)
    if SHAPE.has_tiles:
        # The next tile continues this tile's sequence unless it is the first tile of a sequence (position 0).
        m_next = tile + 1 < scalars.num_tiles
        next_length = tl.load(arrays.tiles + tile * 3 + 4, mask=m_next, other=0)
        next_position = tl.load(arrays.tiles + tile * 3 + 5, mask=m_next, other=0)
        following = tl.where(next_position > 0, tl.maximum(next_length, 0), 0)
    else:
        following = scalars.sequence_length - position - rows
    # Tiles of padding have positions and neighbours too, but these belong to no sequence.
    first = tl.where(rows > 0, -position, 0)
    end = tl.where(rows > 0, rows + following, 0)
    o_channel = tl.program_id(0) % BLOCKS * WIDTH + tl.arange(0, WIDTH)[None, :]
    m_channel = o_channel < CHANNELS
    o_row = tl.arange(0, TILE.rows // RUN)[:, None] * RUN
    origin = start.to(tl.int64) * CHANNELS

    group = (tile // scalars.tiles_per_group).to(tl.int64)
    b_weights = _load_weights(arrays.weights + group * SIZE * CHANNELS, o_channel, m_channel, CHANNELS, SIZE)
    b_keys = _load_rows(arrays.key + origin, o_row, first, end, o_channel, m_channel, -REACH, RUN + REACH, CHANNELS)
    b_outputs = _load_rows(arrays.output_cotangent + origin, o_row, 0, end, o_channel, m_channel, 0, RUN + REACH,
                           CHANNELS)

    b_totals = ()  # cotangents of the weighted sums
    b_d_weights = ()
    for _ in tl.static_range(SIZE):
        b_d_weights += (tl.zeros([TILE.rows // RUN, WIDTH], tl.float32),)
    for step in tl.static_range(RUN + REACH):
        b_total = b_outputs[step].to(tl.float32)
        if SHAPE.has_silu:
            b_sum = _weighted_sum(b_weights, b_keys, step + REACH, SIZE)
            b_sigmoid = 1.0 / (1.0 + tl.exp(-b_sum))
            b_total *= b_sigmoid * (1.0 + b_sum * (1.0 - b_sigmoid))
        b_totals += (b_total,)
        if step < RUN:
            b_sums = ()
            for lag in tl.static_range(SIZE):
                b_sums += (b_d_weights[lag] + b_total * b_keys[step + REACH - lag].to(tl.float32),)
            b_d_weights = b_sums
        if step >= REACH:
            b_d_key = b_weights[0] * b_totals[step - REACH]
            for lag in tl.static_range(1, SIZE):
                b_d_key += b_weights[lag] * b_totals[step - REACH + lag]
            if SHAPE.has_residual:
                b_d_key += b_outputs[step - REACH].to(tl.float32)
            o_target = o_row + (step - REACH)
            p_row = arrays.d_key + origin + o_target * CHANNELS + o_channel
            tl.store(p_row, b_d_key.to(arrays.d_key.dtype.element_ty), mask=(o_target < written) & m_channel)

    o_flat = tl.program_id(0) % BLOCKS * WIDTH + tl.arange(0, WIDTH)
    p_tile = arrays.partials + tile.to(tl.int64) * (SIZE * CHANNELS) + o_flat
    for lag in tl.static_range(SIZE):
        tl.store(p_tile + (SIZE - 1 - lag) * CHANNELS, tl.sum(b_d_weights[lag], 0), mask=o_flat < CHANNELS)


@triton.jit
def key_convolution_weights_gradient(p_partials, d_weights, tiles_per_group, ELEMENTS: tl.constexpr,
                                     ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum p_partials [num_tiles, ELEMENTS] over each group's tiles in order: d_weights [groups, ELEMENTS]."""
    BLOCKS: tl.constexpr = (ELEMENTS + COLUMNS - 1) // COLUMNS
    group = (tl.program_id(0) // BLOCKS).to(tl.int64)
    o_column = tl.program_id(0) % BLOCKS * COLUMNS + tl.arange(0, COLUMNS)
    m_column = o_column < ELEMENTS
    o_tile = tl.arange(0, ROWS)
    b_sum = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, tiles_per_group, ROWS):
        m_tile = first + o_tile < tiles_per_group
        p_part = p_partials + (group * tiles_per_group + first + o_tile)[:, None] * ELEMENTS + o_column[None, :]
        b_sum += tl.load(p_part, mask=m_tile[:, None] & m_column[None, :], other=0.0)
    p_sum = d_weights + group * ELEMENTS + o_column
    tl.store(p_sum, tl.sum(b_sum, 0).to(d_weights.dtype.element_ty), mask=m_column)
