"""Launch plans of block-diagonal attention: which kernel, grid and tile configuration a problem gets on a target."""

from dataclasses import dataclass

from blockdiag.problem import BlockDiagonalProblem
from blockdiag.triton_kernels.plan import (
    Argument,
    CompileOptions,
    Constexpr,
    Descriptor,
    LaunchPlan,
    Pointer,
    Role,
    Scalar,
    Target,
    TensorSpec,
)

LOG2_E = 1.4426950408889634


@dataclass(frozen=True, kw_only=True, slots=True)
class TileConfig:
    """How a one-tile kernel runs.

    Attributes:
        num_warps: warps per program.
        programs_per_sm: size of the persistent grid; 0 gives every item a program of its own.
        loop_stages: depth of the prefetch over a program's items; 1 is none.
        descriptors: load (and store, where tiles are full) through the bulk tensor copy engine.
        warp_specialize: give loads, products and the rest warps of their own (Blackwell).
        maxnreg: cap on registers per thread.
    """

    num_warps: int
    programs_per_sm: int = 0
    loop_stages: int = 1
    descriptors: bool = False
    warp_specialize: bool = False
    maxnreg: int | None = None


def next_power_of_2(size: int) -> int:
    """Smallest power of two not below `size`."""
    return 1 << max(size - 1, 0).bit_length()


def tile_rows(problem: BlockDiagonalProblem) -> int:
    """Rows of the padded tile: a power of two that the matrix instructions take."""
    return max(16, next_power_of_2(problem.block_size))


def tile_columns(problem: BlockDiagonalProblem) -> int:
    """Columns of the padded tile; halves of it must still be wide enough for a product when rotary is fused."""
    return max(32 if problem.rotary else 16, next_power_of_2(problem.head_dim))
