"""Tile configurations of the MoBA kernels."""

from dataclasses import dataclass

from blockdiag.common.dtype_table import SIXTEEN_BIT_FLOATS
from blockdiag.ops.moba.problem import MoBAProblem
from blockdiag.triton_kernels.launch.compile import shared_limit
from blockdiag.triton_kernels.launch.compiler_versions import Adjustment
from blockdiag.triton_kernels.launch.private_triton import has_hopper_kernels
from blockdiag.triton_kernels.parts.shapes import next_power_of_2, uses_mma_sync

# Rows of keys that the centroid kernel adds at a time. This number fixes the order of the sum.
CENTROID_ROWS = 16

# Maximum number of spans into which the query axis is cut for counting: per head if there are many heads, or for all
# heads together if there are few. One warp handles a span, so too few spans would leave the GPU idle. The last constant
# is the minimum number of rows of a span.
MANY_HEADS_SPANS = 256
_ALL_HEADS_SPANS = 1024
_FEWEST_SPAN_ROWS = 256
# Most counters of all heads, spans and blocks: 1 GiB. Only caches with room for many more blocks than queries have so
# many.
_MOST_COUNTERS = 2**28

# Shortest key axis, of one batch row or packed, with which mean keys are split into two halves; in blocks.
FEWEST_HALVED_BLOCKS = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """The tile configuration of a launch.

    Attributes:
        rows: queries (or rows) of a tile.
        keys: keys of a tile.
        blocks: blocks, or centroids, of a tile.
        pairs: pairs that one step of the counting kernel compares with each other.
        chunk: entries of a block's list that one program handles.
        loop_stages: stages of the main loop's software pipeline.
        max_registers: limit of registers per thread, to fit more warps on a multiprocessor; None leaves it to the
            compiler.
    """

    rows: int = 64
    keys: int = 64
    blocks: int = 64
    pairs: int = 128
    chunk: int = 1024
    num_warps: int = 4
    num_stages: int = 2
    loop_stages: int = 2
    max_registers: int | None = None


# From offline reports; none of these is measured on a GPU.
ADJUSTMENTS = (
    # With capped registers the Hopper kernel spills in its loops. Uncapped it takes 216 registers at heads of 128 (two
    # programs on a multiprocessor) and 175 at heads of 64.
    Adjustment(since=(3, 8), kinds=("choose",), archs=(90,), change={"max_registers": None}),
    # With 8 warps the compiler limits itself to 80 and 64 registers and spills one in the loop.
    Adjustment(
        since=(3, 8),
        kinds=("choose", "blocks_forward"),
        archs=(90,),
        change={"num_warps": 4},
        applies=lambda problem, config: problem.dtype == "float32" and problem.head_dim <= 64,
    ),
    # 206 registers at heads of 128. With 4 warps 356 bytes per thread spill.
    Adjustment(
        since=(3, 8),
        kinds=("merge_forward",),
        archs=(100, 103),
        change={"num_warps": 8},
        applies=lambda problem, config: problem.head_dim > 64,
    ),
)


def span_rows(problem: MoBAProblem) -> int:
    """Return the number of queries of a span."""
    spans = max(MANY_HEADS_SPANS, _ALL_HEADS_SPANS // max(1, problem.query_heads))
    spans = max(1, min(spans, _MOST_COUNTERS // max(1, problem.query_heads * problem.num_blocks)))
    return max(_FEWEST_SPAN_ROWS, 64 * -(-problem.query_tokens // (64 * spans)))


def has_halves(problem: MoBAProblem) -> bool:
    """Return whether queries choose by two float16 halves of each mean key, instead of by its parts."""
    is_long = problem.sequence_blocks >= FEWEST_HALVED_BLOCKS
    return problem.dtype in SIXTEEN_BIT_FLOATS and problem.slots > 0 and is_long


def key_rows(problem: MoBAProblem) -> int:
    """Return the keys of a tile: the whole block if it is small enough."""
    largest = 16 if problem.dtype == "float32" else 128 if problem.head_dim <= 128 else 64
    return min(largest, max(16, next_power_of_2(problem.block_size)))


def key_tiles(problem: MoBAProblem) -> int:
    """Return the number of tiles of a whole block."""
    return -(-problem.block_size // key_rows(problem))


def config_of(problem: MoBAProblem, kind: str, arch: int, *, scales_values: bool = False) -> Config:
    """Return the configuration of a launch with the plain Triton kernel.

    Args:
        problem: the call.
        kind: the kernel.
        arch: the architecture.
        scales_values: whether values of a cache have factors of their tokens.
    """
    keys = key_rows(problem)
    is_wide = problem.head_dim > 128 or problem.dtype == "float32"
    # Rows and warps are chosen so that nothing spills (offline reports). Architectures whose products read both
    # operands from registers have room for fewer rows.
    is_crowded = is_wide or uses_mma_sync(arch)
    rows = 32 if is_crowded else 64
    wide_warps = 8 if is_wide or (scales_values and arch >= 100) else 4
    match kind:
        case "centroids":
            return Config(rows=CENTROID_ROWS, num_warps=1 if problem.head_dim <= 128 else 2)
        case "halves":
            return Config(rows=16)
        case "choose":
            is_large = is_wide or problem.slots > 16
            few_warps = 8 if is_crowded else 4
            return Config(
                rows=64 if is_large else 128, blocks=32 if is_wide else 64, num_warps=8 if is_large else few_warps
            )
        case "count":
            return Config(blocks=512, pairs=32, num_warps=1)
        case "entries":
            return Config(rows=max(16, 1024 // next_power_of_2(max(2, problem.slots))))
        case "items":
            return Config(blocks=1024)
        case "add_spans" | "offsets":
            return Config(blocks=64)
        case "blocks_forward":
            if key_tiles(problem) > 1:
                return Config(rows=rows, keys=min(keys, 64), num_warps=8)
            return Config(rows=rows, keys=keys, num_warps=wide_warps, loop_stages=2 if is_crowded else 3)
        case "merge_forward":
            return Config(rows=rows, keys=min(keys, 64), num_warps=wide_warps, loop_stages=2 if is_crowded else 4)
        case "merge_backward":
            return Config(rows=32, keys=min(keys, 64), num_warps=wide_warps, loop_stages=2 if is_crowded else 3)
        case "query_parts":
            # Consumer GPUs have less shared memory.
            few_keys = 32 if is_wide and (shared_limit(arch) or 0) < 128 << 10 else 64
            return Config(rows=32 if is_wide else 64, keys=min(keys, few_keys), num_warps=8)
        case "starts":
            return Config(rows=32)
        case "blocks_backward":
            num_warps = 8 if keys > 64 or is_crowded else 4
            if uses_mma_sync(arch):
                return Config(rows=16, keys=keys, num_warps=8)
            # More rows would exceed the tensor memory on Blackwell.
            is_small = is_wide or arch >= 100 or problem.slots == 0
            return Config(rows=32 if is_small else 64, keys=keys, num_warps=num_warps, loop_stages=2 if is_small else 3)
    raise KeyError(kind)


def hopper_config(problem: MoBAProblem, kind: str, arch: int) -> Config | None:
    """Return the configuration of the Hopper kernel for a launch, or None if the plain kernel is used.

    The speedups over the plain kernels are recorded in benchmarks/results/runs/2026-11-22-moba-kernels.csv, and other
    forms of "blocks_forward" in 2026-11-29-moba-forward.csv.
    """
    is_written_for = problem.dtype in SIXTEEN_BIT_FLOATS and problem.head_dim in (64, 128)
    if not is_written_for or not has_hopper_kernels(arch):
        return None
    keys = key_rows(problem)
    is_whole = keys in (64, 128) and key_tiles(problem) == 1
    match kind:
        case "choose" if (problem.dtype == "bfloat16" or has_halves(problem)) and 1 <= problem.slots <= 15:
            # Three or four programs per multiprocessor, because a program does not overlap products with its sorting.
            few = 128 if problem.head_dim == 64 and not has_halves(problem) else 168
            return Config(rows=64, blocks=64, num_warps=4, max_registers=few if problem.slots <= 7 else None)
        case "blocks_forward" if is_whole:
            # Two programs of 8 warps on a multiprocessor.
            return Config(rows=64, keys=keys, num_warps=4, max_registers=128)
        case "blocks_backward" if is_whole and keys == 128 and problem.is_causal and problem.slots > 0:
            return Config(rows=64, keys=keys, num_warps=8)
    return None
