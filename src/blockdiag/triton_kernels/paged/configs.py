"""Tile configurations of paged attention."""

from dataclasses import dataclass

from blockdiag.common.dtype_table import EIGHT_BIT_FLOATS
from blockdiag.ops.paged.problem import PagedProblem
from blockdiag.triton_kernels.launch.compiler_versions import Adjustment
from blockdiag.triton_kernels.parts.shapes import next_power_of_2, uses_mma_sync

# Splits begin at multiples of it, unless their size is given.
SPLIT_GRAIN = 64

# Keys of a split that count as few.
_SHORT_SPLIT = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitConfig:
    """How the splits are computed.

    Attributes:
        rows: queries of a tile, the heads of one key head side by side.
        keys: keys of a tile.
        keys_first: whether keys are the first factor of products, and rows the second one.
        loop_stages: stages of the software pipeline over keys.
    """

    rows: int
    keys: int
    num_warps: int
    loop_stages: int
    keys_first: bool = True


ADJUSTMENTS = (
    # Values whose columns are padded to a power of two: 24 bytes of a thread spill with 2 warps. Offline reports; not
    # measured.
    Adjustment(
        since=(3, 8),
        kinds=("splits",),
        archs=(100, 103),
        change={"num_warps": 4},
        applies=lambda problem, config: (
            config.num_warps == 2 and problem.value_dim != next_power_of_2(problem.value_dim)
        ),
    ),
)


def row_tile(problem: PagedProblem) -> int:
    """Rows of a tile: tensor cores take 8 at least as the second factor of a product."""
    return min(64, max(8, next_power_of_2(problem.query_tokens * problem.group_size)))


def split_config(problem: PagedProblem, arch: int) -> SplitConfig:
    """The configuration of a launch: what reads the cache fastest of the tiles tried on an H200, two programs or three
    to a multiprocessor."""
    rows = row_tile(problem)
    if problem.query_dtype == "float32":
        return SplitConfig(rows=min(rows, 16), keys=16, num_warps=4, loop_stages=1)
    widest = max(problem.head_dim, problem.value_dim)
    is_narrow = problem.key_dtype in EIGHT_BIT_FLOATS and problem.value_dtype in EIGHT_BIT_FLOATS
    if rows == 64 and not is_narrow:
        # Rows enough to be the first factor, so that each warp has rows of its own.
        num_warps = 8 if uses_mma_sync(arch) else 4  # all of a tile's results are in registers there
        return SplitConfig(
            rows=rows, keys=64 if widest <= 128 else 32, num_warps=num_warps, loop_stages=5, keys_first=False
        )
    is_short = problem.max_keys <= _SHORT_SPLIT * problem.num_splits
    if rows <= 16 and is_short:
        # So few keys that a deep pipeline would not fill: more programs fit side by side.
        return SplitConfig(rows=rows, keys=64, num_warps=4, loop_stages=4)
    if not is_narrow:
        keys, num_warps = 64, 2 if rows <= 16 else 4
    else:
        # Both tiles widened, and scales of tokens beside them, take more registers than there are for many rows.
        is_plain = problem.key_scale == "none" and problem.value_scale != "token"
        keys, num_warps = 128 if rows < 32 or (rows == 32 and arch == 90 and is_plain) else 64, 4
    return SplitConfig(rows=rows, keys=keys // (1 if widest <= 128 else 2), num_warps=num_warps, loop_stages=5)
