"""A kernel that builds the tile table of packed sequences (`common.packing`), for callers without XLA to fuse it.

Every program reads all segments and counts, for each of its tiles, the segments that end before the tile. This takes
more arithmetic than a scan and a search, but only one launch.
"""

# Device code is laid out by hand: one argument per line would hide what a kernel does.
# fmt: off

from dataclasses import dataclass
from typing import Literal

import triton
import triton.language as tl

from blockdiag.triton_kernels.launch.compiler_versions import Adjustment, adjusted
from blockdiag.triton_kernels.launch.plan import (
    CompileOptions,
    Constexpr,
    LaunchPlan,
    Pointer,
    Scalar,
    Target,
    TensorSpec,
)

_TILES = 128
_SEGMENTS = 128

# With 4 warps a thread spills 120 bytes, half of them in the loop (offline reports; not measured on a GPU).
ADJUSTMENTS = (
    Adjustment(since=(3, 8), kinds=("tile_table",), archs=(100, 103), change={"num_warps": 8}),
)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def tile_table(p_values, p_table, num_values, num_tiles, tokens, BLOCK_SIZE: tl.constexpr, LENGTHS: tl.constexpr,
               TILES: tl.constexpr, SEGMENTS: tl.constexpr):
    """Build the tile table from sequence offsets, or from block lengths with LENGTHS.

    A segment is a range of tokens that is cut into tiles: a sequence or block, or the padding before the first sequence
    or after the last one.
    """
    num_segments = num_values + 1
    o_tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    b_segment = tl.zeros([TILES], tl.int32)
    b_prefix = tl.zeros([TILES], tl.int32)
    b_begin = tl.zeros([TILES], tl.int32)
    b_end = tl.zeros([TILES], tl.int32) + tokens
    count_before = 0
    end_before = tl.zeros([], tl.int64)
    for first in range(0, num_segments, SEGMENTS):
        o_segment = first + tl.arange(0, SEGMENTS)
        # The end of each segment. Ends are made monotonic, whatever the offsets are.
        b_values = tl.load(p_values + o_segment, mask=o_segment < num_values, other=0)
        b_values = tl.minimum(tl.maximum(b_values, 0), tokens).to(tl.int64)
        if LENGTHS:
            b_ends = end_before + tl.cumsum(b_values, 0)
            b_ends = tl.where(o_segment < num_values, b_ends, tokens)
            last_end = end_before + tl.sum(b_values, 0)
            b_begins = b_ends - tl.where(o_segment < num_values, b_values, 0)
            b_begins = tl.where(o_segment < num_values, b_begins, last_end)
        else:
            b_ends = tl.maximum(tl.associative_scan(b_values, 0, _larger), end_before)
            last_end = tl.max(b_ends, 0)
            b_ends = tl.where(o_segment < num_values, b_ends, tokens)
            # The begin of each segment is the end of the previous one.
            is_first = o_segment == 0
            b_former = tl.load(p_values + o_segment - 1, mask=(o_segment >= 1) & (o_segment <= num_values), other=0)
            b_former = tl.minimum(tl.maximum(b_former, 0), tokens).to(tl.int64)
            b_begins = tl.maximum(tl.associative_scan(b_former, 0, _larger), end_before)
            b_begins = tl.where(is_first, 0, b_begins)
        end_before = last_end
        b_ends = tl.minimum(b_ends, tokens).to(tl.int32)
        b_begins = tl.minimum(b_begins, tokens).to(tl.int32)
        m_segment = o_segment < num_segments
        b_counts = tl.where(m_segment, (b_ends - b_begins + (BLOCK_SIZE - 1)) // BLOCK_SIZE, 0)
        b_lasts = count_before + tl.cumsum(b_counts, 0)
        count_before += tl.sum(b_counts, 0)
        m_before = (b_lasts[None, :] <= o_tile[:, None]) & m_segment[None, :]  # [TILES, SEGMENTS]
        b_segment += tl.sum(m_before.to(tl.int32), 1)
        b_prefix += tl.sum(tl.where(m_before, b_counts[None, :], 0), 1)
        b_begin = tl.maximum(b_begin, tl.max(tl.where(m_before, b_ends[None, :], 0), 1))
        m_after = ~m_before & m_segment[None, :]
        b_end = tl.minimum(b_end, tl.min(tl.where(m_after, b_ends[None, :], tokens), 1))
    m_used = b_segment < num_segments
    b_position = tl.where(m_used, (o_tile - b_prefix) * BLOCK_SIZE, 0)
    b_start = tl.where(m_used, b_begin + b_position, 0)
    b_length = tl.where(m_used, tl.minimum(b_end - b_start, BLOCK_SIZE), 0)
    if LENGTHS:
        m_block = (b_segment < num_values) & (b_position == 0)
    else:
        m_block = (b_segment >= 1) & (b_segment < num_values)
    b_length = tl.where(m_block, b_length, -b_length)
    m_tile = o_tile < num_tiles
    tl.store(p_table + o_tile * 3, b_start, mask=m_tile)
    tl.store(p_table + o_tile * 3 + 1, b_length, mask=m_tile)
    tl.store(p_table + o_tile * 3 + 2, b_position * 0 if LENGTHS else b_position, mask=m_tile)


# fmt: on
@dataclass(frozen=True, kw_only=True, slots=True)
class TileTableLaunch:
    """The launch that builds a tile table int32 [num_tiles, 3].

    Attributes:
        kind: the content of the one input: "offsets", int32 [num_sequences + 1], or "lengths", int32 [num_blocks].
        num_values: the length of the input.
        num_tiles: rows of the table, from `problem.count_offset_tiles` or `problem.count_length_tiles`.
        tokens: rows of the token axis.
        block_size: the maximum number of rows of a tile.
    """

    kind: Literal["offsets", "lengths"]
    num_values: int
    num_tiles: int
    tokens: int
    block_size: int

    @property
    def name(self) -> str:
        """The name shown by profilers."""
        return "tile_table"

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The offsets or lengths."""
        return (TensorSpec((self.num_values,), "int32"),)

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The table."""
        return (TensorSpec((self.num_tiles, 3), "int32"),)

    def plan(self, target: Target) -> LaunchPlan:
        """Return the launch plan for `target`."""
        return LaunchPlan(
            name=self.name,
            kernel=tile_table,
            grid=(max(1, -(-self.num_tiles // _TILES)), 1, 1),
            inputs=self.inputs,
            outputs=self.outputs,
            arguments={
                "p_values": Pointer("input", 0),
                "p_table": Pointer("output", 0),
                "num_values": Scalar(self.num_values, "i32"),
                "num_tiles": Scalar(self.num_tiles, "i32"),
                "tokens": Scalar(self.tokens, "i32"),
                "BLOCK_SIZE": Constexpr(self.block_size),
                "LENGTHS": Constexpr(self.kind == "lengths"),
                "TILES": Constexpr(_TILES),
                "SEGMENTS": Constexpr(_SEGMENTS),
            },
            options=adjusted(CompileOptions(num_warps=4), ADJUSTMENTS, self, "tile_table", target.arch),
        )
