"""Tile tables of block-diagonal attention (see `common.packing`)."""

import jax.numpy as jnp

from blockdiag.common.packing import TileTable
from blockdiag.ops.block_diagonal.problem import BlockDiagonalProblem


def uniform_tiles(problem: BlockDiagonalProblem) -> TileTable:
    """Return the tile table that is implicit in a uniform problem."""
    length = problem.sequence_length
    if length is None:
        raise ValueError("`problem` must be uniform, got one with a tile table; use that table")
    per_sequence = -(-length // problem.block_size)
    tile = jnp.arange(problem.num_tiles, dtype=jnp.int32)
    position = tile % per_sequence * problem.block_size
    start = tile // per_sequence * length + position
    return jnp.stack([start, jnp.minimum(length - position, problem.block_size), position], axis=1)
