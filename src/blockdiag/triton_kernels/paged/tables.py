"""A kernel that builds the table of tiles of paged attention (`ops.paged.packed`), for callers without XLA to fuse it.

Every program reads all segments of rows and finds, for each of its entries, the last segment that begins at or before
it. This takes more arithmetic than a scan and a search, but only one launch.
"""

# Device code is laid out by hand: one argument per line would hide what a kernel does.
# fmt: off

from dataclasses import dataclass
from typing import Literal

import triton
import triton.language as tl

from blockdiag.ops.paged.problem import PagedProblem
from blockdiag.triton_kernels.launch.plan import (
    CompileOptions,
    Constexpr,
    LaunchPlan,
    Target,
    TensorSpec,
    array_group,
    scalar_group,
)
from blockdiag.triton_kernels.paged.arguments import TilesArrays, TilesScalars

_ENTRIES = 32
_SEGMENTS = 128


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def paged_tiles(arrays, scalars, FORM: tl.constexpr, FIRST: tl.constexpr, EACH: tl.constexpr, TOKENS: tl.constexpr,
                ENTRIES: tl.constexpr, SEGMENTS: tl.constexpr):
    """Build the table, and store 0 in `zeros`.

    See `TilesLaunch` for FORM. Segment FIRST is a sequence, and from there every EACH-th segment. The sequences of a
    batch have `longest` rows.

    `arrays` is a TilesArrays, `scalars` a TilesScalars.
    """
    batch = scalars.batch
    num_tiles = scalars.num_tiles
    rows = scalars.rows
    longest = scalars.longest
    o_entry = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    m_whole = o_entry >= num_tiles
    num_segments = batch * EACH + 2 * FIRST
    b_segment = tl.zeros([ENTRIES], tl.int32) - 1
    b_begin = tl.zeros([ENTRIES], tl.int32)
    b_end = tl.zeros([ENTRIES], tl.int32)
    b_tile = tl.zeros([ENTRIES], tl.int32)
    end_before = 0
    for first in range(0, num_segments, SEGMENTS):
        o_segment = first + tl.arange(0, SEGMENTS)
        m_segment = o_segment < num_segments
        if FORM == "offsets":
            # Offsets are clipped, and raised to at least their predecessors. Segment s ends at offset s.
            b_ends = tl.load(arrays.query_offsets + o_segment, mask=o_segment <= batch, other=0)
            b_ends = tl.maximum(tl.associative_scan(tl.minimum(tl.maximum(b_ends, 0), rows), 0, _larger), end_before)
            b_former = tl.load(arrays.query_offsets + o_segment - 1, mask=(o_segment >= 1) & m_segment, other=0)
            b_begins = tl.maximum(tl.associative_scan(tl.minimum(tl.maximum(b_former, 0), rows), 0, _larger),
                                  end_before)
            end_before = tl.max(b_ends, 0)
            b_ends = tl.where(o_segment <= batch, b_ends, rows)
        else:
            b_begins = o_segment // EACH * longest
            b_ends = b_begins + longest
            if FORM == "lengths":
                b_own = tl.load(arrays.query_lengths + o_segment // 2, mask=m_segment, other=0)
                b_middle = b_begins + tl.minimum(tl.maximum(b_own, 0), longest)
                b_begins = tl.where(o_segment % 2 == 0, b_begins, b_middle)
                b_ends = tl.where(o_segment % 2 == 0, b_middle, b_ends)
        b_first_tiles = b_begins // TOKENS + o_segment
        b_wanted = FIRST + (o_entry - num_tiles) * EACH
        m_before = tl.where(m_whole[:, None], o_segment[None, :] <= b_wanted[:, None],
                            b_first_tiles[None, :] <= o_entry[:, None])
        m_before = m_before & m_segment[None, :]
        # Begins, ends and first tiles never decrease, so the last segment has the largest.
        b_segment += tl.sum(m_before.to(tl.int32), 1)
        b_begin = tl.maximum(b_begin, tl.max(tl.where(m_before, b_begins[None, :], 0), 1))
        b_end = tl.maximum(b_end, tl.max(tl.where(m_before, b_ends[None, :], 0), 1))
        b_tile = tl.maximum(b_tile, tl.max(tl.where(m_before, b_first_tiles[None, :], 0), 1))
    b_length = b_end - b_begin
    b_earlier = tl.where(m_whole, 0, (o_entry - b_tile) * TOKENS)
    b_count = tl.minimum(tl.maximum(b_length - b_earlier, 0), TOKENS)
    b_sequence = (b_segment - FIRST) // EACH
    m_inside = (b_segment >= FIRST) & (b_sequence < batch) & ((b_segment - FIRST) % EACH == 0)
    b_keys = tl.load(arrays.kv_lengths + b_sequence, mask=m_inside, other=0)
    b_keys = tl.minimum(tl.maximum(b_keys, 0), scalars.max_keys)
    b_position = tl.where(m_inside, b_keys - b_length, 0) + b_earlier
    m_entry = o_entry < num_tiles + batch
    p_entry = arrays.tiles + o_entry * 4
    tl.store(p_entry, b_begin + b_earlier, mask=m_entry)
    tl.store(p_entry + 1, tl.where(m_whole, b_length, b_count), mask=m_entry)
    tl.store(p_entry + 2, b_position, mask=m_entry)
    tl.store(p_entry + 3, tl.where(m_inside, b_sequence, -1), mask=m_entry)
    if tl.program_id(0) == 0:
        tl.store(arrays.zeros, 0)


# fmt: on
@dataclass(frozen=True, slots=True)
class TilesLaunch:
    """The launch that builds the table of tiles; a KernelSpec. It also returns the zero that `PagedLaunch` takes.

    Attributes:
        problem: the call, not yet in the form of `PagedProblem.tiled`.
    """

    problem: PagedProblem

    @property
    def name(self) -> str:
        """The name shown by profilers."""
        return "paged_tiles"

    @property
    def form(self) -> Literal["offsets", "lengths", "batch"]:
        """The source of the sequences' queries: offsets, lengths, or the shape of the batch."""
        if self.problem.packed_rows is not None:
            return "offsets"
        return "lengths" if self.problem.has_query_lengths else "batch"

    @property
    def input_names(self) -> tuple[str, ...]:
        """The arrays that the launch reads, in order."""
        names = {"offsets": ("query_offsets",), "lengths": ("query_lengths",), "batch": ()}
        return (*names[self.form], "kv_lengths")

    @property
    def output_names(self) -> tuple[str, ...]:
        """The arrays that the launch writes, in order."""
        return ("tiles", "zeros")

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Specs of the arrays that the launch reads."""
        batch = self.problem.batch
        return tuple(TensorSpec((batch + (name == "query_offsets"),), "int32") for name in self.input_names)

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Specs of the arrays that the launch writes."""
        tiles = self.problem.tiled.num_tiles or 0
        return TensorSpec((tiles + self.problem.batch, 4), "int32"), TensorSpec((1,), "int32")

    def plan(self, target: Target) -> LaunchPlan:
        """Return the launch plan for `target`."""
        del target
        problem, tiled = self.problem, self.problem.tiled
        assert tiled.num_tiles is not None and tiled.packed_rows is not None
        entries = tiled.num_tiles + problem.batch
        scalars = scalar_group(
            TilesScalars,
            batch=problem.batch,
            num_tiles=tiled.num_tiles,
            rows=tiled.packed_rows,
            longest=0 if self.form == "offsets" else problem.query_tokens,
            max_keys=problem.max_keys if problem.num_pages else 0,
        )
        return LaunchPlan(
            name=self.name,
            kernel=paged_tiles,
            grid=(-(-entries // _ENTRIES), 1, 1),
            inputs=self.inputs,
            outputs=self.outputs,
            arguments={
                "arrays": array_group(TilesArrays, self.input_names, self.output_names),
                "scalars": scalars,
                "FORM": Constexpr(self.form),
                "FIRST": Constexpr(1 if self.form == "offsets" else 0),
                "EACH": Constexpr(2 if self.form == "lengths" else 1),
                "TOKENS": Constexpr(tiled.query_tokens),
                "ENTRIES": Constexpr(_ENTRIES),
                "SEGMENTS": Constexpr(_SEGMENTS),
            },
            options=CompileOptions(num_warps=8),
        )
