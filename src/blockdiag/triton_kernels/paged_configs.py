"""Tile configurations of paged attention."""

from dataclasses import dataclass

from blockdiag.paged_problem import PagedProblem
from blockdiag.triton_kernels.block_diagonal_configs import next_power_of_2, uses_mma_sync

# Splits begin at multiples of it, unless their size is given.
SPLIT_GRAIN = 64

# Keys of a split that count as few.
_SHORT_SPLIT = 512

EIGHT_BITS = ("float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitConfig:
    """How the splits are computed.

    Attributes:
        rows: queries of a tile, the heads of one key head side by side.
        keys: keys of a tile.
        loop_stages: stages of the software pipeline over keys.
    """

    rows: int
    keys: int
    num_warps: int
    loop_stages: int


def row_tile(problem: PagedProblem) -> int:
    """Rows of a tile: the tensor cores take 16 at least."""
    return min(64, max(16, next_power_of_2(problem.query_tokens * problem.group_size)))


def split_config(problem: PagedProblem, arch: int) -> SplitConfig:
    """The configuration of a launch: what reads the cache fastest of the tiles tried on an H200, two programs to a
    multiprocessor."""
    rows = row_tile(problem)
    if problem.query_dtype == "float32":
        return SplitConfig(rows=16, keys=16, num_warps=4, loop_stages=1)
    widest = max(problem.head_dim, problem.value_dim)
    is_narrow = problem.key_dtype in EIGHT_BITS and problem.value_dtype in EIGHT_BITS
    keys = (128 if is_narrow else 64) // (1 if widest <= 128 else 2)
    if rows == 16 and problem.max_keys <= _SHORT_SPLIT * problem.num_splits:
        # So few keys that a deep pipeline would not fill: more programs fit side by side.
        return SplitConfig(rows=rows, keys=128 if widest <= 128 else 64, num_warps=4, loop_stages=3)
    num_warps = 4 if is_narrow or rows > 16 else 2
    if rows > 32 and uses_mma_sync(arch):
        # All of a tile's results are in registers there.
        num_warps = 8
    return SplitConfig(rows=rows, keys=keys, num_warps=num_warps, loop_stages=5)
