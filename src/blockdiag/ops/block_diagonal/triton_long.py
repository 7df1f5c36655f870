"""Block-diagonal attention of blocks too long for one tile of scores, in JAX: the generated kernels of `fuse`.

Blocks of equally long sequences are a batch, which the kernels read in place if it has no partial blocks. Other blocks
are first packed into windows, where each begins at a multiple of a tile's rows. No tile then has rows of two blocks,
and no tile list has tiles of two. Rotary embedding is applied before the kernels.
"""

import functools

from jax import Array

from blockdiag.fusion.ir.tree import Region
from blockdiag.fusion.runtime import kernel_choice
from blockdiag.fusion.runtime import triton as triton_fused
from blockdiag.ops.block_diagonal import region as blocks
from blockdiag.ops.block_diagonal.layouts import (
    EqualSequences,
    Layout,
    RotaryArrays,
    Windows,
    WindowSizes,
    layout_of,
    window_sizes,
)
from blockdiag.ops.block_diagonal.problem import BlockDiagonalProblem


@functools.lru_cache(maxsize=1024)
def supports(problem: BlockDiagonalProblem) -> str | None:
    """Return None if the kernels can compute `problem`, otherwise a sentence with the reason and the remedy."""
    length = problem.sequence_length
    if length is not None:
        layout = EqualSequences(problem, length)
        return triton_fused.supports(blocks.region_of(problem, EqualSequences, layout.lead, layout.rows))
    return triton_fused.supports(region_in_windows(problem, sizes_of_windows(problem)))


def forward(
    problem: BlockDiagonalProblem,
    query: Array,
    key: Array,
    value: Array,
    tiles: Array | None,
    rotary: RotaryArrays | None,
    *,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """Return output [tokens, N, H] and log-sum-exp, float32 [tokens, N], of the canonical call."""
    compute = functools.partial(triton_fused.forward, interpret=interpret)
    return blocks.forward(compute, _layout(problem, tiles), query, key, value, rotary)


def backward(
    problem: BlockDiagonalProblem,
    query: Array,
    key: Array,
    value: Array,
    tiles: Array | None,
    rotary: RotaryArrays | None,
    output_cotangent: Array,
    output: Array | None = None,
    log_sum: Array | None = None,
    *,
    interpret: bool = False,
) -> tuple[Array, Array, Array]:
    """Return the gradients of query, key and value; results of `forward` that are not given are computed again."""
    if output is None or log_sum is None:
        output, log_sum = forward(problem, query, key, value, tiles, rotary, interpret=interpret)
    compute = functools.partial(triton_fused.backward, interpret=interpret)
    layout = _layout(problem, tiles)
    return blocks.backward(compute, layout, query, key, value, rotary, output_cotangent, output, log_sum)


def _layout(problem: BlockDiagonalProblem, tiles: Array | None) -> Layout:
    return layout_of(problem, tiles) if tiles is None else Windows(problem, tiles, sizes_of_windows(problem))


@functools.lru_cache(maxsize=1024)
def sizes_of_windows(problem: BlockDiagonalProblem) -> WindowSizes:
    """Return window sizes in which every block begins at a tile boundary of every kernel."""
    sizes = window_sizes(problem, 32)
    while (most := _largest_tile(problem, sizes)) > sizes.alignment:
        sizes = window_sizes(problem, most)
    return sizes


def _largest_tile(problem: BlockDiagonalProblem, sizes: WindowSizes) -> int:
    """Return the largest number of rows or columns of any kernel's tile; all are powers of two."""
    kernels = kernel_choice.kernels(region_in_windows(problem, sizes))
    return max(size for kernel in kernels for size in (kernel.tile.rows, kernel.tile.columns))


def region_in_windows(problem: BlockDiagonalProblem, sizes: WindowSizes) -> Region:
    """Return the region of blocks in windows."""
    return blocks.region_of(problem, Windows, (sizes.count,), sizes.rows)
