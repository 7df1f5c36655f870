"""The choice of kernel family and tile configuration by problem and architecture, with the measurements behind it.

Ratios are times on an H200 relative to a copy of the same bytes, with block 64, bfloat16 and 262,144 tokens.
"""

from dataclasses import dataclass

from blockdiag.ops.block_diagonal.problem import BlockDiagonalProblem
from blockdiag.triton_kernels.launch.compiler_versions import Adjustment
from blockdiag.triton_kernels.launch.private_triton import has_hopper_kernels
from blockdiag.triton_kernels.parts.shapes import next_power_of_2, uses_mma_sync

HOPPER_ROWS = 64
_LARGEST_TILE_ROWS = 64
_LARGEST_TILE_COLUMNS = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class TileConfig:
    """The configuration of a one-tile kernel.

    Attributes:
        num_warps: warps per program, before warp specialisation adds more.
        programs_per_sm: programs per multiprocessor of a persistent grid; 0 launches one program per item.
        loop_stages: depth of the prefetch over a program's items; 1 means no prefetch.
        num_stages: depth of the loads that the compiler pipelines by itself.
        descriptors: whether to load tiles, and store full tiles, with TMA.
        warp_specialize: whether loads, products and the rest run on separate warps (Blackwell).
    """

    num_warps: int
    programs_per_sm: int = 0
    loop_stages: int = 1
    num_stages: int = 3
    descriptors: bool = False
    warp_specialize: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class HopperConfig:
    """The configuration of a Hopper kernel.

    Attributes:
        heads: heads of a tile per program. The next head's operands are loaded while one is computed.
        maxnreg: limit of registers per thread, which determines how many programs fit on a multiprocessor.
    """

    heads: int = 1
    maxnreg: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkConfig:
    """The configuration of a chunked kernel.

    Attributes:
        rows: rows of a chunk.
        num_warps: warps per program.
        num_stages: depth of the loads that the compiler pipelines in its loops.
    """

    rows: int
    num_warps: int
    num_stages: int = 2


# Adjustments of the chunked kernels.
ADJUSTMENTS = (
    # With two stages, addresses take one register too many for two programs, and 8 bytes per thread spill.
    Adjustment(
        since=(3, 8),
        kinds=("forward",),
        archs=(100, 103),
        change={"num_stages": 3},
        applies=lambda problem, config: problem.rotary is not None and config.rows == 32,
    ),
    # Rotated values: with 32 rows a thread takes 255 registers and spills 148 bytes (sm_80) or 236 bytes (sm_120) in
    # the loop. With 16 rows it takes 128 registers. From offline reports; not measured on a GPU.
    Adjustment(
        since=(3, 8),
        kinds=("key_gradient",),
        archs=(80, 86, 87, 89, 120, 121),
        change={"rows": 16},
        applies=lambda problem, config: problem.rotary is not None and problem.rotary.value and config.rows == 32,
    ),
)


def tile_rows(problem: BlockDiagonalProblem) -> int:
    """Return the rows of the padded tile, a power of two that the matrix instructions support."""
    return max(16, next_power_of_2(problem.block_size))


def tile_columns(problem: BlockDiagonalProblem) -> int:
    """Return the columns of the padded tile. With split pairs its halves must be wide enough for a product."""
    return max(32 if problem.rotary else 16, next_power_of_2(problem.head_dim))


def is_hopper_shape(problem: BlockDiagonalProblem) -> bool:
    """Whether the tiles have the shape that the Hopper kernels and the Blackwell configuration support."""
    return (
        problem.block_size == HOPPER_ROWS
        and problem.head_dim in (64, 128)
        and problem.dtype != "float32"
        and not (problem.rotary is not None and problem.rotary.value)
    )


def is_chunked(problem: BlockDiagonalProblem, arch: int) -> bool:
    """Whether a block is computed in chunks, because one tile of it is too large for the registers.

    This always holds for float32, whose products do not use tensor cores. Rotation keeps operands in f32 beside their
    tables. According to offline reports the one-tile kernels then spill at 128 columns on every architecture. They
    always spill on architectures whose products read both operands from registers.
    """
    columns = tile_columns(problem)
    if problem.dtype == "float32" or tile_rows(problem) > _LARGEST_TILE_ROWS or columns > _LARGEST_TILE_COLUMNS:
        return True
    if problem.rotary is None:
        return False
    return uses_mma_sync(arch) or (columns == _LARGEST_TILE_COLUMNS and not is_hopper_shape(problem))


def chunk_config(problem: BlockDiagonalProblem, is_backward: bool, arch: int) -> ChunkConfig:
    """Return a configuration that keeps every accumulator in registers on sm_80 to sm_120.

    Larger chunks spill, according to offline reports. The exceptions in warps and stages keep addresses in registers,
    which ptxas would otherwise spill around the loops to fit one more program on a multiprocessor.
    """
    has_rotary = problem.rotary is not None
    wide = tile_columns(problem) > _LARGEST_TILE_COLUMNS
    if problem.dtype == "float32":
        is_shallow = is_backward or has_rotary or wide or arch not in (100, 103)
        num_warps = 8 if wide or (is_backward and has_rotary) else 4
        return ChunkConfig(rows=16, num_warps=num_warps, num_stages=2 if is_shallow else 3)
    if wide and has_rotary:
        return ChunkConfig(rows=16, num_warps=8)
    # sm_120 has 99 KB of shared memory, too little for chunks of 64 rows.
    if wide or has_rotary or arch >= 120:
        # Even with a third stage the 163 KB of sm_80 hold two programs, which is as many as the registers allow.
        is_deep = arch == 80 and has_rotary and not is_backward
        return ChunkConfig(rows=32, num_warps=8, num_stages=3 if is_deep else 2)
    return ChunkConfig(rows=64, num_warps=8)


def most_chunks(problem: BlockDiagonalProblem, config: ChunkConfig) -> int:
    """Return the number of chunks of the largest block."""
    return -(-problem.block_size // config.rows)


def is_hopper(problem: BlockDiagonalProblem, is_backward: bool, arch: int) -> bool:
    """Whether the call uses the Hopper kernels."""
    if not has_hopper_kernels(arch) or not is_hopper_shape(problem):
        return False
    if is_backward:
        # 16 heads of 64 without rotary: 1.02 with the one-tile kernel, 1.04 with the Hopper kernel.
        return problem.rotary is not None or problem.group_size > 1 or problem.head_dim == 128
    # Multi-head without rotary: 0.97 with both kernels.
    return problem.rotary is not None or problem.group_size > 1


def hopper_config(problem: BlockDiagonalProblem, is_backward: bool) -> HopperConfig:
    """Return the heads per program and the register limit."""
    has_rotary = problem.rotary is not None
    if is_backward and problem.group_size > 1:
        return HopperConfig()
    if is_backward:
        if has_rotary and problem.head_dim == 64:
            return HopperConfig(maxnreg=128)
        # 8 heads of 128 with rotary: 1.03 with two heads per program. Before the tables were kept in L2: 1.06 with two,
        # 1.08 with four, 1.12 with one.
        return HopperConfig(heads=2 if has_rotary and problem.key_heads % 2 == 0 else 1)
    if problem.group_size > 1:
        # 8 query heads of 128 on 2 key heads: 1.02 with two heads per program, 1.04 with four; with rotary 1.22 and
        # 1.13.
        preferred = (4, 2) if has_rotary else (2,)
        heads = next((heads for heads in preferred if problem.group_size % heads == 0), 1)
    else:
        heads = 2 if problem.query_heads % 2 == 0 else 1
    if not has_rotary:
        return HopperConfig(heads=heads)
    return HopperConfig(heads=heads, maxnreg=168 if problem.head_dim == 128 else 112)


def tile_config(problem: BlockDiagonalProblem, is_backward: bool, arch: int) -> TileConfig:
    """Return the configuration of the one-tile kernel on a GPU."""
    has_rotary = problem.rotary is not None
    if arch in (100, 103) and is_hopper_shape(problem):
        return _blackwell_config(problem, is_backward)
    widest = tile_columns(problem) == _LARGEST_TILE_COLUMNS
    crowded = has_rotary and (is_backward or widest)
    if crowded or (is_backward and widest and uses_mma_sync(arch)):
        return TileConfig(num_warps=8)
    return TileConfig(num_warps=4)


def portable_tile_config() -> TileConfig:
    """Return the configuration for the interpreter, with a persistent grid so that it also runs the loop over items."""
    return TileConfig(num_warps=4, programs_per_sm=1)


def _blackwell_config(problem: BlockDiagonalProblem, is_backward: bool) -> TileConfig:
    """Return the configuration for sm_100, which is compiled offline and was never run.

    The grid is always persistent. Warps are specialised where Triton can do so. In the backward pass it cannot do so
    with rotary embedding (registers), or with accumulators that live over a group of heads. Partial tiles would need
    masking between the TMA load and tcgen05.
    """
    num_warps = 8 if problem.rotary is not None else 4
    if (is_backward and not problem.is_full) or (problem.is_packed and problem.rotary is not None):
        return TileConfig(num_warps=num_warps, programs_per_sm=2)
    if is_backward and (problem.rotary is not None or problem.group_size > 1):
        return TileConfig(num_warps=num_warps, programs_per_sm=1, descriptors=True)
    if problem.rotary is not None and not problem.is_full:
        return TileConfig(num_warps=num_warps, programs_per_sm=1, descriptors=True)
    return TileConfig(
        num_warps=4, programs_per_sm=1, loop_stages=2, num_stages=2, descriptors=True, warp_specialize=True
    )
