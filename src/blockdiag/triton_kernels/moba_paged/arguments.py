"""Groups of arguments of the kernels of MoBA over a paged cache.

Arrays and scalars are groups of run-time arguments. The frozen dataclasses are compile-time values. Functions that
these kernels share with paged attention read the same names.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from blockdiag.triton_kernels.launch.plan import Argument


class TableArrays(NamedTuple):
    """The arrays of the kernel that writes a prompt's tables. Arrays that a call does not have are None."""

    kv_lengths: Argument
    query_lengths: Argument
    blocks: Argument
    queries: Argument


class TableScalars(NamedTuple):
    """The run-time scalars of the kernel that writes a prompt's tables.

    Attributes:
        rows: queries of all sequences, including those beyond the lengths.
        blocks: blocks of all sequences with mean keys.
        query_tokens: queries of a sequence, including those beyond its length.
        max_keys: the most keys that a sequence can have.
        max_blocks: blocks of a sequence with mean keys.
    """

    rows: Argument
    blocks: Argument
    query_tokens: Argument
    max_keys: Argument
    max_blocks: Argument
    block_size: Argument


class ScoreArrays(NamedTuple):
    """The arrays of the score kernel. Arrays that a call does not have are None."""

    query: Argument
    centroids: Argument
    kv_lengths: Argument
    query_lengths: Argument
    scores: Argument
    arrived: Argument


class ScoreScalars(NamedTuple):
    """The run-time scalars of the score kernel.

    Attributes:
        max_keys: the most keys that a sequence can have.
        max_blocks: blocks of a sequence with mean keys.
        num_candidates: blocks of a sequence that a query may choose.
    """

    max_keys: Argument
    max_blocks: Argument
    num_candidates: Argument


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreShape:
    """Sizes of a call that the score kernel reads.

    Attributes:
        query_tokens: queries of a sequence, including those beyond its length.
        group_size: query heads that share a key head.
    """

    query_tokens: int
    query_heads: int
    key_heads: int
    group_size: int
    head_dim: int
    block_size: int
    has_query_lengths: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreTile:
    """Tiles of the score kernel.

    Attributes:
        blocks: mean keys of a tile.
        rows: queries whose loads are in flight together.
        all_rows: rows of a key head that are reset at a time, a power of two.
        columns: `head_dim` padded to a power of two.
    """

    blocks: int
    rows: int
    all_rows: int
    columns: int


class ChoiceArrays(NamedTuple):
    """The arrays of the selection kernel. Arrays that a call does not have are None."""

    scores: Argument
    kv_lengths: Argument
    query_lengths: Argument
    chosen: Argument


@dataclass(frozen=True, kw_only=True, slots=True)
class ChoiceShape:
    """Sizes of a call that the selection kernel reads.

    Attributes:
        query_tokens: queries of a sequence, including those beyond its length.
        slots: blocks that a query chooses besides its own.
    """

    query_tokens: int
    query_heads: int
    block_size: int
    slots: int
    has_query_lengths: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ChoiceTile:
    """Tiles of the selection kernel.

    Attributes:
        blocks: scores of a query that are held at once.
        slot_columns: slots padded to a power of two.
    """

    blocks: int
    slot_columns: int


class BlockArrays(NamedTuple):
    """The arrays of the attention kernel. Arrays that a call does not have are None."""

    query: Argument
    key: Argument
    value: Argument
    page_table: Argument
    kv_lengths: Argument
    query_lengths: Argument
    score_scale: Argument
    key_scale: Argument
    value_scale: Argument
    scores: Argument
    chosen: Argument
    arrived: Argument
    part: Argument
    part_sum: Argument
    output: Argument
    log_sum: Argument


class BlockScalars(NamedTuple):
    """The run-time scalars of the attention kernel.

    Attributes:
        rows: rows of [batch, query_tokens, query_heads].
        max_pages: columns of the page table.
        num_pages: pages of the pool.
        max_keys: the most keys that a sequence can have.
        num_candidates: blocks of a sequence that a query may choose.
        scale: factor of the scores.
    """

    rows: Argument
    max_pages: Argument
    num_pages: Argument
    max_keys: Argument
    num_candidates: Argument
    scale: Argument


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockShape:
    """Sizes and optional arrays of a call that the attention kernel reads.

    Attributes:
        query_tokens: queries of a sequence, including those beyond its length.
        page_size: tokens of a page.
        slots: blocks that a query chooses besides its own.
    """

    query_tokens: int
    query_heads: int
    key_heads: int
    head_dim: int
    value_dim: int
    page_size: int
    block_size: int
    slots: int
    has_page_table: bool
    has_query_lengths: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockTile:
    """Tiles of the attention kernel.

    Attributes:
        keys: keys of a tile.
        columns: `head_dim` padded to a power of two.
        value_columns: `value_dim` padded to a power of two.
        candidates: scores that a program holds to select a block, a power of two; 0 if it does not select.
        parts: tiles of a row's own block and of its chosen blocks.
    """

    keys: int
    columns: int
    value_columns: int
    candidates: int
    parts: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockOptions:
    """Options of a call to the attention kernel.

    Attributes:
        selects: whether every program repeats the selection, instead of reading `chosen`.
        value_scale: what a scale of values belongs to.
    """

    selects: bool
    has_score_scale: bool
    has_key_scale: bool
    value_scale: Literal["none", "head", "token"]
