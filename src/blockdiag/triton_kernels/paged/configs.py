"""Tile configurations of paged attention."""

from dataclasses import dataclass, replace

from blockdiag.common.dtype_table import EIGHT_BIT_DTYPES, ELEMENT_TYPES
from blockdiag.ops.paged.problem import WIDE_HEAD, PagedProblem
from blockdiag.triton_kernels.launch.compile import shared_limit
from blockdiag.triton_kernels.launch.compiler_versions import Adjustment
from blockdiag.triton_kernels.parts.shapes import next_power_of_2, uses_mma_sync

# Splits begin at multiples of this number of keys unless their size is given.
SPLIT_GRAIN = 64

# Shared memory for what is neither queries nor keys and values, with some room.
_OTHER_BYTES = 6 << 10
# Shared memory for page numbers, scales and alignment beside wide tiles.
_ALIGNMENT_BYTES = 2 << 10
# Splits of at most this many keys are short.
_SHORT_SPLIT = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitConfig:
    """The tile configuration of the split kernel.

    Attributes:
        rows: rows of a tile: queries of all heads that share one key head.
        keys: keys of a tile.
        keys_first: whether keys are the left operand of products and rows the right one.
        loop_stages: stages of the software pipeline over keys.
        masks_edges: whether only tiles with keys that some row does not see are masked, in a branch.
    """

    rows: int
    keys: int
    num_warps: int
    loop_stages: int
    keys_first: bool = True
    masks_edges: bool = False


ADJUSTMENTS = (
    # If the values' columns are padded to a power of two, 24 bytes per thread spill with 2 warps (offline reports; not
    # measured on a GPU).
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


# The kernel for latent caches on Hopper.
LATENT = SplitConfig(rows=64, keys=64, num_warps=4, loop_stages=1, keys_first=False, masks_edges=True)
# Fewer neighbouring keys are copied by threads, not by the copy engine. Eight rows have the pattern of swizzled memory.
FEWEST_BOX_ROWS = 8


def row_tile(problem: PagedProblem) -> int:
    """Return the rows of a tile, at least 8, which is the tensor cores' minimum for the right operand."""
    return min(64, max(8, next_power_of_2(problem.query_tokens * problem.group_size)))


def padded_columns(size: int, dtype: str) -> int:
    """Return the columns of a tile, at least 16 for the tensor cores.

    Eight-bit tiles need at least 32, because their even and odd columns are multiplied separately.
    """
    return max(32 if dtype in EIGHT_BIT_DTYPES else 16, next_power_of_2(size))


def key_columns(problem: PagedProblem) -> tuple[int, int]:
    """Return the columns of the two parts of a tile of keys; the second is 0 for keys in one part.

    Without pages of values, the first part has their columns.
    """
    size, dtype = problem.head_dim, problem.key_dtype
    first = padded_columns(size, dtype)
    if not problem.has_value_pages:
        first = min(first, padded_columns(problem.value_dim, dtype))
    elif size > WIDE_HEAD:
        # Padding the whole to a power of two would take up to twice the memory.
        first = 1 << (size.bit_length() - 1)
    return first, padded_columns(size - first, dtype) if size > first else 0


def value_columns(problem: PagedProblem) -> int:
    """Return the columns of a tile of values."""
    if problem.has_value_pages:
        return padded_columns(problem.value_dim, problem.value_dtype)
    return key_columns(problem)[0]


def split_config(problem: PagedProblem, arch: int) -> SplitConfig:
    """Return the configuration of a launch, with no more stages than fit into shared memory."""
    is_wide = max(problem.head_dim, problem.value_dim) > WIDE_HEAD
    if is_wide and problem.query_dtype != "float32":
        return _wide_config(problem, arch)
    config, limit = _preferred_config(problem, arch), shared_limit(arch)
    if limit is None:
        return config
    query = config.rows * problem.head_dim * ELEMENT_TYPES[problem.query_dtype].bytes
    key, value = ELEMENT_TYPES[problem.key_dtype], ELEMENT_TYPES[problem.value_dtype]
    value_bytes = problem.value_dim * value.bytes if problem.has_value_pages else 0
    each = config.keys * (problem.head_dim * key.bytes + value_bytes)
    # One stage is in registers.
    stages = 1 + max(0, limit - _OTHER_BYTES - query) // each
    return replace(config, loop_stages=min(config.loop_stages, stages))


def _preferred_config(problem: PagedProblem, arch: int) -> SplitConfig:
    """Return the configuration of a launch regardless of shared memory.

    These tiles read the cache fastest among those tried on an H200, with two or three programs on a multiprocessor.
    """
    rows = row_tile(problem)
    if problem.query_dtype == "float32":
        return SplitConfig(rows=min(rows, 16), keys=16, num_warps=4, loop_stages=1)
    widest = max(problem.head_dim, problem.value_dim)
    is_narrow = problem.key_dtype in EIGHT_BIT_DTYPES and problem.value_dtype in EIGHT_BIT_DTYPES
    if rows == 64 and not is_narrow:
        # Enough rows to be the left operand, so that each warp has its own rows.
        num_warps = 8 if uses_mma_sync(arch) else 4  # with mma.sync all of a tile's results are in registers
        return SplitConfig(
            rows=rows, keys=64 if widest <= 128 else 32, num_warps=num_warps, loop_stages=5, keys_first=False
        )
    is_short = problem.max_keys <= _SHORT_SPLIT * problem.num_splits
    if rows <= 16 and is_short:
        # Short splits would not fill a deep pipeline. With fewer stages more programs fit on a multiprocessor.
        return SplitConfig(rows=rows, keys=64, num_warps=4, loop_stages=4)
    if not is_narrow:
        keys, num_warps = 64, 2 if rows <= 16 else 4
    else:
        # With many rows there are not enough registers for both widened tiles and the scales of tokens.
        is_plain = problem.key_scale == "none" and problem.value_scale != "token"
        keys, num_warps = 128 if rows < 32 or (rows == 32 and arch == 90 and is_plain) else 64, 4
        if rows == 64 and arch != 90:
            num_warps = 8  # with 4, a thread spills up to a kilobyte (offline reports; not measured on a GPU)
    return SplitConfig(rows=rows, keys=keys // (1 if widest <= 128 else 2), num_warps=num_warps, loop_stages=5)


def _wide_config(problem: PagedProblem, arch: int) -> SplitConfig:
    """Return the configuration of heads of more than 256 columns.

    On Hopper, tiles of many rows take both products' right operands from shared memory, and 8 warps have the 64 x 512
    results in registers. Everything else has few rows, because mma.sync needs the queries in registers.
    """
    rows, limit = row_tile(problem), shared_limit(arch) or shared_limit(120)
    assert limit is not None
    columns, results = sum(key_columns(problem)), value_columns(problem)
    is_key_narrow, is_value_narrow = problem.key_dtype in EIGHT_BIT_DTYPES, problem.value_dtype in EIGHT_BIT_DTYPES
    key_bytes = columns * (1 if is_key_narrow else 2)
    value_bytes = results * (1 if is_value_narrow else 2) if problem.has_value_pages else 0

    def stages(distance: int) -> int:
        """Return the stages in which the tiles are loaded `distance` iterations before they are used."""
        # Page numbers are loaded as long before the tiles.
        return min(3, max(1, distance)) * (2 if problem.has_page_table else 1) + 1

    if arch == 90 and rows > 16:
        rows = 64
        for keys in (64, 32):
            # Eight-bit keys, then values, are widened in shared memory.
            wide = keys * max(2 * columns if is_key_narrow else 0, 2 * results if is_value_narrow else 0)
            weights = keys * rows * 2
            free = limit - rows * columns * 2 - wide - weights - _ALIGNMENT_BYTES
            tiles = free // (keys * (key_bytes + value_bytes))
            # A tile of 16 bits is an operand until its last product completes.
            distance = tiles if is_key_narrow and is_value_narrow else tiles - 1
            if distance > 0:
                break
        return SplitConfig(
            rows=rows, keys=keys, num_warps=8, loop_stages=stages(distance), keys_first=False, masks_edges=True
        )
    # On Blackwell the results are in tensor memory. With 16 rows a thread gets 128 registers only, and spills.
    rows = 32 if arch in (100, 103, 110) else min(rows, 16)
    tiles = (limit - _OTHER_BYTES - rows * columns * 2) // (32 * (key_bytes + value_bytes))
    return SplitConfig(rows=rows, keys=32, num_warps=8, loop_stages=stages(tiles - 1))


def prompt_slots(head_dim: int) -> tuple[int, int, int]:
    """Return the keys of a chunk, the slots of chunks, and the slots of queries of the kernel of prompts on Hopper.

    They fit into shared memory: 128 queries in each of their slots, and a chunk of keys and values in each of the
    others.
    """
    return {64: (128, 4, 2), 128: (128, 2, 2), 256: (64, 2, 1)}[head_dim]
