"""Groups of arguments of the kernels of block-diagonal attention.

Operands and results are parameters of their own, because some plans pass them as descriptors. Tables and scalars are
groups of run-time arguments. The frozen dataclasses are compile-time values.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from blockdiag.triton_kernels.launch.plan import Argument


class Tables(NamedTuple):
    """Optional arrays that a pass reads besides its operands. Arrays that a call does not have are None.

    Attributes:
        tiles: int32 [tiles, 3]: first row, rows, and position of the first row in its sequence.
        cos, sin: tables of rotary embedding [table rows, head_dim // 2].
        positions: int32 [tokens], rows of the tables.
    """

    tiles: Argument
    cos: Argument
    sin: Argument
    positions: Argument


class GradientPointers(NamedTuple):
    """Pointers to gradients that the Hopper kernels otherwise store with TMA; None if all tiles are full."""

    d_query: Argument
    d_key: Argument
    d_value: Argument


class ForwardScalars(NamedTuple):
    """The run-time scalars of a forward pass.

    Attributes:
        sequence_length: tokens of every sequence; ignored with a table of tiles.
        scale_log2: factor of the scores, times log2(e).
        table_rows: rows of the tables of rotary embedding.
    """

    sequence_length: Argument
    scale_log2: Argument
    table_rows: Argument


class BackwardScalars(NamedTuple):
    """The run-time scalars of a backward pass.

    Attributes:
        sequence_length: tokens of every sequence; ignored with a table of tiles.
        scale: factor of the scores.
        scale_log2: factor of the scores, times log2(e).
        table_rows: rows of the tables of rotary embedding.
    """

    sequence_length: Argument
    scale: Argument
    scale_log2: Argument
    table_rows: Argument


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Sizes and memory layout of a call.

    In packed calls one array [tokens, N + 2K, H] holds query, key and value, and another one their gradients. A
    projection then needs no copies around the attention.

    Attributes:
        group_size: query heads that share a key head.
        query_row: heads in a row of the array that holds the queries.
        key_row: heads in a row of the array that holds the keys, and of the one that holds the values.
        first_key: the first key head in its row.
        first_value: the first value head in its row.
        has_tiles: whether a table gives the tiles; otherwise all sequences have one length.
    """

    query_heads: int
    key_heads: int
    group_size: int
    head_dim: int
    is_packed: bool
    query_row: int
    key_row: int
    first_key: int
    first_value: int
    has_tiles: bool
    is_causal: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Rotary:
    """Options of rotary embedding.

    Attributes:
        rotates_query, rotates_key, rotates_value: whether an operand is rotated.
        is_interleaved: whether rotary pairs are neighbours; otherwise they are elements of the two halves of a head.
        positions: 0: positions in the sequence; 1: given positions; 2: rows of the packed arrays.
    """

    rotates_query: bool
    rotates_key: bool
    rotates_value: bool
    is_interleaved: bool
    positions: Literal[0, 1, 2]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """Tiles of the one-tile kernels.

    Attributes:
        block_size: tokens of a block.
        rows: `block_size` padded to a power of two.
        columns: `head_dim` padded to a power of two.
        is_full: whether every block has `rows` tokens.
        is_paired: whether queries and keys are held as the two halves of rotary pairs.
        is_value_paired: the same of values.
        precision: `input_precision` of products.
        has_descriptors: whether TMA loads tiles and stores full ones.
        warp_specialize: whether loads, products and the rest run on separate warps.
        loop_stages: depth of the prefetch over a program's items.
    """

    block_size: int
    rows: int
    columns: int
    is_full: bool
    is_paired: bool
    is_value_paired: bool
    precision: Literal["ieee", "tf32"]
    has_descriptors: bool
    warp_specialize: bool
    loop_stages: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Tiles of the chunked kernels.

    Attributes:
        block_size: tokens of a block.
        rows: rows of a chunk.
        chunks: the most chunks of a block.
        columns: `head_dim` padded to a power of two.
        is_paired: whether queries and keys are held as the two halves of rotary pairs.
        is_value_paired: the same of values.
        precision: `input_precision` of products.
        is_full, has_descriptors: see `Tile`. The last chunk of a block may be short, and chunks are read by pointers.
    """

    block_size: int
    rows: int
    chunks: int
    columns: int
    is_paired: bool
    is_value_paired: bool
    precision: Literal["ieee", "tf32"]
    is_full: Literal[False] = False
    has_descriptors: Literal[False] = False


@dataclass(frozen=True, kw_only=True, slots=True)
class HopperTile:
    """Tiles of the Hopper kernels.

    Attributes:
        rows: rows of a tile, which is a whole block.
        is_full: whether every block has `rows` tokens.
        heads: heads of a tile per program.
    """

    rows: int
    is_full: bool
    heads: int
