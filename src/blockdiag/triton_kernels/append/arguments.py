"""Groups of arguments of the kernel that appends to a paged cache.

Arrays and sizes are groups of run-time arguments. The frozen dataclasses are compile-time values.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from blockdiag.triton_kernels.launch.plan import Argument


class AppendArrays(NamedTuple):
    """The arrays of the kernel. Arrays that a call does not have are None.

    The kernel updates the pages, the mean keys, and scales of tokens.
    """

    key: Argument
    value: Argument
    page_table: Argument
    kv_lengths: Argument
    query_lengths: Argument
    sequences: Argument
    first_rows: Argument
    cos: Argument
    sin: Argument
    positions: Argument
    key_scale: Argument
    value_scale: Argument
    key_pages: Argument
    value_pages: Argument
    key_centroids: Argument


class AppendSizes(NamedTuple):
    """The run-time sizes of a call.

    Attributes:
        tokens: new rows of all sequences.
        query_tokens: the most new rows of a sequence.
        max_pages: columns of the page table.
        num_pages: pages of the pool.
        max_keys: the most keys that a sequence can have.
        table_rows: rows of the tables of rotary embedding.
        row_tiles: programs of a head that append rows; the others compute mean keys.
        max_completed: the most blocks of a sequence that a call completes.
        max_blocks: blocks of a sequence with mean keys.
    """

    tokens: Argument
    query_tokens: Argument
    max_pages: Argument
    num_pages: Argument
    max_keys: Argument
    table_rows: Argument
    row_tiles: Argument
    max_completed: Argument
    max_blocks: Argument


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheLayout:
    """Layout of the cache and of the new rows.

    Attributes:
        page_size: tokens of a page.
        block_size: tokens of a block with a mean key; None if no mean keys are computed.
        is_packed: whether the sequences' new rows follow each other without padding.
    """

    page_size: int
    block_size: int | None
    is_packed: bool
    has_page_table: bool
    has_query_lengths: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class AppendTile:
    """Tiles of the kernel.

    Attributes:
        rows: new rows of a program.
        block_rows: keys of a block that are held at once.
    """

    rows: int
    block_rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RowFormat:
    """How the keys or the values of a cache are computed from new rows.

    A row of a head is held as two halves: the first and the second elements of its rotary pairs.

    Attributes:
        heads: key heads.
        dim: elements of a head.
        half: elements of a half.
        columns: `half` padded to a power of two.
        is_interleaved: whether rotary pairs are neighbours; otherwise an element and the one half a head behind it.
        has_rotary: whether rows are rotated.
        has_positions: whether rotary positions are given; otherwise they are positions in the sequence.
        scale: what a scale belongs to.
        largest: the largest number of an eight-bit dtype, otherwise None.
        is_integer: whether the dtype is an integer.
        grid: for integers, the offset that rounds to integers. For floats, the factor of the offset that rounds to the
            dtype's grid, or None if the machine's conversion rounds.
        lowest: the smallest normal number of an eight-bit float, otherwise None.
        smallest_scale: lower bound of scales that are computed from rows.
    """

    heads: int
    dim: int
    half: int
    columns: int
    is_interleaved: bool
    has_rotary: bool
    has_positions: bool
    scale: Literal["none", "head", "token"]
    largest: float | None
    is_integer: bool
    grid: float | None
    lowest: float | None
    smallest_scale: float
