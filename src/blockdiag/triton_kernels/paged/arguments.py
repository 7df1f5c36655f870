"""Groups of arguments of the kernels of paged attention.

Arrays and scalars are groups of run-time arguments. The frozen dataclasses are compile-time values.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from blockdiag.triton_kernels.launch.plan import Argument

# The entries of a table of tiles that programs compute; without a table, sequences.
type Entries = Literal["sequences", "tiles", "wholes"]


class SplitArrays(NamedTuple):
    """The arrays of the split kernel. Arrays that a call does not have are None.

    With a single split the kernel writes `output` and `log_sum`, otherwise `part` and `part_sum`. `tiles` is the table
    of `ops.paged.packed`. `counter` is not used; a launch of prompts has it, since the kernel for Hopper needs it.
    """

    query: Argument
    key: Argument
    value: Argument
    page_table: Argument
    kv_lengths: Argument
    query_lengths: Argument
    tiles: Argument
    sinks: Argument
    score_scale: Argument
    key_scale: Argument
    value_scale: Argument
    output: Argument
    log_sum: Argument
    part: Argument
    part_sum: Argument
    counter: Argument


class SplitScalars(NamedTuple):
    """The run-time scalars of the split kernel.

    Attributes:
        num_tiles: tiles in the table of tiles, after which it has whole sequences; 0 without a table.
        max_pages: columns of the page table.
        num_pages: pages of the pool.
        max_keys: the most keys that a sequence can have.
        num_splits: splits of a sequence's keys.
        split_size: keys of a split; 0 divides the keys of each sequence evenly.
        scale: factor of the scores.
        soft_cap: bound of the scores; ignored without `has_soft_cap`.
    """

    num_tiles: Argument
    max_pages: Argument
    num_pages: Argument
    max_keys: Argument
    num_splits: Argument
    split_size: Argument
    scale: Argument
    soft_cap: Argument


class PromptArrays(NamedTuple):
    """The arrays of the kernels of prompts on Hopper. Arrays that a call does not have are None.

    `tiles` is the table of `ops.paged.packed`, and `counter` counts the items that programs have taken.
    """

    query: Argument
    key: Argument
    value: Argument
    page_table: Argument
    kv_lengths: Argument
    tiles: Argument
    sinks: Argument
    score_scale: Argument
    key_scale: Argument
    value_scale: Argument
    output: Argument
    log_sum: Argument
    counter: Argument


class PromptScalars(NamedTuple):
    """The run-time scalars of the kernels of prompts on Hopper.

    Attributes:
        num_tiles, max_pages, num_pages, max_keys: see `SplitScalars`.
        together: the number of key heads whose items are interleaved; those of one sequence fit into L2.
        slope: factor of products in the soft cap; ignored without one.
        unit: factor that makes scores exponents of 2.
    """

    num_tiles: Argument
    max_pages: Argument
    num_pages: Argument
    max_keys: Argument
    together: Argument
    slope: Argument
    unit: Argument


@dataclass(frozen=True, kw_only=True, slots=True)
class PagedShape:
    """Sizes and optional arrays of a call.

    Attributes:
        query_tokens: queries of a sequence, including those beyond its length.
        group_size: query heads that share a key head.
        page_size: tokens of a page.
        has_values: whether values have pages of their own; otherwise they are the first columns of the keys.
        entries: what programs compute: tiles, whole sequences of a table of tiles, or sequences without a table.
        is_long: whether there may be more entries than the last axis of a grid can have; they are then on the first.
        fewest, most: bounds on the queries of a sequence; the launch skips other sequences. None for no bound.
    """

    query_tokens: int
    query_heads: int
    key_heads: int
    group_size: int
    head_dim: int
    value_dim: int
    page_size: int
    has_values: bool
    has_page_table: bool
    has_query_lengths: bool
    entries: Entries
    is_long: bool
    fewest: int | None
    most: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitTile:
    """Tiles of the split kernel.

    Attributes:
        rows: rows of a tile: queries of all heads that share a key head.
        row_tiles: tiles of the rows of a key head.
        keys: keys of a tile.
        columns: `head_dim`, or its first part, padded to a power of two.
        more_columns: the rest of `head_dim` padded to a power of two, or 0.
        value_columns: `value_dim` padded to a power of two. It is `columns` if values have no pages of their own.
        is_keys_first: whether keys are the left operand of products and rows the right one.
        num_warps: warps that divide a tile's keys.
        is_aligned: whether splits begin at multiples of `keys`.
        masks_edges: whether only tiles with keys that some row does not see are masked, in a branch.
        loop_stages: stages of the software pipeline over keys.
        precision: `input_precision` of products.
    """

    rows: int
    row_tiles: int
    keys: int
    columns: int
    more_columns: int
    value_columns: int
    is_keys_first: bool
    num_warps: int
    is_aligned: bool
    masks_edges: bool
    loop_stages: int
    precision: Literal["ieee", "tf32"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitOptions:
    """Options of a call to the split kernel.

    Attributes:
        left: keys that a query sees before its own position; None is unlimited.
        right: keys that a query sees after its own position; None is unlimited.
        value_scale: what a scale of values belongs to.
        is_whole: whether a single split has all keys, so that its results are final.
        key_kind: Triton's dtype of eight-bit keys, otherwise None.
        value_kind: Triton's dtype of eight-bit values, otherwise None.
        has_machine_code: whether inline PTX may be used, which the interpreter does not support.
    """

    is_causal: bool
    left: int | None
    right: int | None
    has_soft_cap: bool
    has_sinks: bool
    has_score_scale: bool
    has_key_scale: bool
    value_scale: Literal["none", "head", "token"]
    is_whole: bool
    key_kind: Any
    value_kind: Any
    has_machine_code: bool


class MergeArrays(NamedTuple):
    """The arrays of the merge kernel. Arrays that a call does not have are None."""

    part: Argument
    part_sum: Argument
    query_lengths: Argument
    tiles: Argument
    sinks: Argument
    output: Argument
    log_sum: Argument


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeConstants:
    """Compile-time values of the merge of a row's parts.

    Attributes:
        query_tokens: queries of a sequence, including those beyond its length.
        value_columns: `value_dim` padded to a power of two.
        parts: parts that are loaded at once.
        entries: see `PagedShape`; with a table, rows lie in packed results.
        most: upper bound on the queries of a sequence; the launch skips other sequences. None for no bound.
    """

    query_tokens: int
    query_heads: int
    value_dim: int
    value_columns: int
    parts: int
    has_query_lengths: bool
    has_sinks: bool
    entries: Entries = "sequences"
    most: int | None = None


class TilesArrays(NamedTuple):
    """The arrays of the kernel that builds the table of tiles. Arrays that a call does not have are None."""

    query_offsets: Argument
    query_lengths: Argument
    kv_lengths: Argument
    tiles: Argument
    zeros: Argument


class TilesScalars(NamedTuple):
    """The run-time scalars of the kernel that builds the table of tiles.

    Attributes:
        num_tiles: tiles in the table, after which it has whole sequences.
        rows: queries of all sequences.
        longest: rows of a sequence of a batch; ignored with offsets.
        max_keys: the most keys that a sequence can have.
    """

    batch: Argument
    num_tiles: Argument
    rows: Argument
    longest: Argument
    max_keys: Argument
