"""Groups of arguments of MoBA's kernels.

Every kernel takes its arrays, its run-time scalars, a shape and a tile; kernels without scalars or with a single size
have none or that size instead. Arrays and scalars are groups of run-time arguments; a plan fills them by the names of
their fields. The frozen dataclasses are compile-time values.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from blockdiag.triton_kernels.launch.plan import Argument


class CentroidsArrays(NamedTuple):
    """The arrays of the kernel of mean keys. Arrays that a call does not have are None."""

    key: Argument
    mask: Argument
    blocks: Argument
    centroids: Argument


class HalvesArrays(NamedTuple):
    """The arrays of the kernel that splits mean keys into halves."""

    centroids: Argument
    halves: Argument
    scales: Argument


class ChooseArrays(NamedTuple):
    """The arrays of the kernels that choose blocks. A call has either `centroids`, or `halves` and `scales`."""

    query: Argument
    centroids: Argument
    halves: Argument
    scales: Argument
    queries: Argument
    chosen: Argument


class CountArrays(NamedTuple):
    """The arrays of the kernel that counts choices and ranks pairs."""

    chosen: Argument
    counters: Argument
    ranks: Argument


class AddSpansArrays(NamedTuple):
    """The arrays of the kernel that sums the counts of spans."""

    counters: Argument
    counts: Argument


class OffsetsArrays(NamedTuple):
    """The arrays of the kernel that finds where lists begin."""

    counters: Argument
    counts: Argument
    offsets: Argument
    before: Argument


class EntriesArrays(NamedTuple):
    """The arrays of the kernel that writes lists."""

    chosen: Argument
    ranks: Argument
    before: Argument
    entries: Argument
    degrees: Argument


class ItemsArrays(NamedTuple):
    """The arrays of the kernel that divides lists into work items."""

    counts: Argument
    offsets: Argument
    blocks: Argument
    items: Argument


class StartsArrays(NamedTuple):
    """The arrays of the kernel of initial accumulators."""

    output: Argument
    output_cotangent: Argument
    log_sum: Argument
    log_sum_cotangent: Argument
    score_start: Argument
    weight_start: Argument


class BlocksForwardArrays(NamedTuple):
    """The arrays of the kernel that computes parts of outputs. Arrays that a call does not have are None."""

    query: Argument
    key: Argument
    value: Argument
    mask: Argument
    items: Argument
    entries: Argument
    page_table: Argument
    score_scale: Argument
    key_scale: Argument
    value_scale: Argument
    part: Argument
    part_sum: Argument


class MergeForwardArrays(NamedTuple):
    """The arrays of the kernel that merges parts of outputs. Arrays that a call does not have are None."""

    query: Argument
    key: Argument
    value: Argument
    mask: Argument
    queries: Argument
    own: Argument
    degrees: Argument
    page_table: Argument
    score_scale: Argument
    key_scale: Argument
    value_scale: Argument
    part: Argument
    part_sum: Argument
    output: Argument
    log_sum: Argument


class BlocksBackwardArrays(NamedTuple):
    """The arrays of the kernel of key and value gradients. Arrays that a call does not have are None."""

    query: Argument
    key: Argument
    value: Argument
    output_cotangent: Argument
    mask: Argument
    blocks: Argument
    queries: Argument
    own: Argument
    offsets: Argument
    counts: Argument
    entries: Argument
    score_start: Argument
    weight_start: Argument
    part: Argument
    d_key: Argument
    d_value: Argument


class QueryPartsArrays(NamedTuple):
    """The arrays of the kernel that computes parts of query gradients. Arrays that a call does not have are None."""

    query: Argument
    key: Argument
    value: Argument
    output_cotangent: Argument
    mask: Argument
    items: Argument
    entries: Argument
    score_start: Argument
    weight_start: Argument
    part: Argument


class MergeBackwardArrays(NamedTuple):
    """The arrays of the kernel that sums parts of query gradients. Arrays that a call does not have are None."""

    query: Argument
    key: Argument
    value: Argument
    output_cotangent: Argument
    mask: Argument
    queries: Argument
    own: Argument
    degrees: Argument
    score_start: Argument
    weight_start: Argument
    part: Argument
    d_query: Argument


class HalvesScalars(NamedTuple):
    """The run-time scalars of the kernel that splits mean keys into halves."""

    num_blocks: Argument


class ChooseScalars(NamedTuple):
    """The run-time scalars of the kernels that choose blocks."""

    query_tokens: Argument
    num_blocks: Argument


class CountScalars(NamedTuple):
    """The run-time scalars of the kernel that counts choices.

    Attributes:
        span_rows: queries of a span.
    """

    query_tokens: Argument
    num_blocks: Argument
    span_rows: Argument


class SpansScalars(NamedTuple):
    """The run-time scalars of the kernels that add the counts of spans."""

    num_blocks: Argument
    num_spans: Argument


class EntriesScalars(NamedTuple):
    """The run-time scalars of the kernel that writes lists; see `CountScalars`."""

    query_tokens: Argument
    num_blocks: Argument
    span_rows: Argument
    num_spans: Argument


class ItemsScalars(NamedTuple):
    """The run-time scalars of the kernel of work items.

    Attributes:
        num_items: room for work items of a head.
    """

    num_blocks: Argument
    num_items: Argument


class StartsScalars(NamedTuple):
    """The run-time scalars of the kernel of initial accumulators.

    Attributes:
        num_rows: queries of all heads.
        scale: factor of the scores.
    """

    num_rows: Argument
    scale: Argument


class BlocksForwardScalars(NamedTuple):
    """The run-time scalars of the kernel that computes parts of outputs.

    Attributes:
        num_items: chunks of lists of a head.
        first_head: the first query head of the launch.
        num_pages: pages of the cache; None without one.
        max_keys: the most keys that a sequence of the cache can have; None without one.
        scale_log2: factor of the scores, times log2(e).
    """

    query_tokens: Argument
    num_items: Argument
    first_head: Argument
    num_pages: Argument
    max_keys: Argument
    scale_log2: Argument


class MergeForwardScalars(NamedTuple):
    """The run-time scalars of the kernel that merges parts of outputs; see `BlocksForwardScalars`."""

    query_tokens: Argument
    first_head: Argument
    num_pages: Argument
    max_keys: Argument
    scale_log2: Argument


class BlocksBackwardScalars(NamedTuple):
    """The run-time scalars of the kernel of key and value gradients; see `BlocksForwardScalars`."""

    query_tokens: Argument
    num_blocks: Argument
    first_head: Argument
    scale: Argument
    scale_log2: Argument


class QueryPartsScalars(NamedTuple):
    """The run-time scalars of the kernel that computes parts of query gradients; see `BlocksForwardScalars`."""

    query_tokens: Argument
    num_items: Argument
    first_head: Argument
    scale: Argument
    scale_log2: Argument


class MergeBackwardScalars(NamedTuple):
    """The run-time scalars of the kernel that sums parts of query gradients; see `BlocksForwardScalars`."""

    query_tokens: Argument
    first_head: Argument
    scale: Argument
    scale_log2: Argument


@dataclass(frozen=True, kw_only=True, slots=True)
class CentroidShape:
    """Sizes of mean keys.

    Attributes:
        parts: parts that add up to a mean key.
        part_scale: factor of each part against the one before.
    """

    key_heads: int
    head_dim: int
    parts: int
    part_scale: float


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskedCentroidShape(CentroidShape):
    """Sizes that the kernel of mean keys reads.

    Attributes:
        has_mask: whether keys are masked.
    """

    has_mask: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ChoiceShape(CentroidShape):
    """Sizes that the kernel that chooses blocks reads.

    Attributes:
        slots: blocks that a query chooses besides its own.
    """

    query_heads: int
    slots: int


@dataclass(frozen=True, kw_only=True, slots=True)
class HopperChoiceShape(ChoiceShape):
    """Sizes that the Hopper kernel that chooses blocks reads.

    Attributes:
        has_mask: whether keys are masked, so that blocks may be without keys.
    """

    has_mask: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ListShape:
    """Sizes of a call that kernels over the blocks' lists read.

    Attributes:
        group_size: query heads that share a key head.
        slots: blocks that a query chooses besides its own.
        part_slots: parts of a query's result.
        part_heads: query heads of the launch.
        has_mask: whether keys are masked.
        has_cache: whether keys and values are a cache.
        page_size: tokens of a page, if keys and values are found through a page table; otherwise 0.
        has_score_scale: whether the scores of each sequence and key head have a factor.
        has_key_scale: whether each row of keys has a factor.
        value_scale: what a factor of values belongs to.
    """

    query_heads: int
    key_heads: int
    group_size: int
    head_dim: int
    slots: int
    part_slots: int
    part_heads: int
    has_mask: bool
    has_cache: bool
    page_size: int
    has_score_scale: bool
    has_key_scale: bool
    value_scale: Literal["none", "head", "token"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnShape(ListShape):
    """Sizes of a call that kernels over the queries' own blocks read, too.

    Attributes:
        has_own: whether an array says which queries see their own block; otherwise all do.
    """

    is_causal: bool
    has_own: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class VectorTile:
    """Tiles of kernels that compute each row by itself.

    Attributes:
        rows: rows of a tile.
        columns: `head_dim` padded to a power of two.
    """

    rows: int
    columns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ChoiceTile:
    """Tiles of the kernel that chooses blocks.

    Attributes:
        rows: queries of a tile.
        blocks: mean keys of a tile.
        columns: `head_dim` padded to a power of two.
        slot_columns: slots padded to a power of two.
        precision: `input_precision` of products.
    """

    rows: int
    blocks: int
    columns: int
    slot_columns: int
    precision: Literal["ieee", "tf32"]


@dataclass(frozen=True, kw_only=True, slots=True)
class HopperChoiceTile:
    """Tiles of the Hopper kernel that chooses blocks.

    Attributes:
        rows: queries of a tile.
        blocks: mean keys of a tile.
        keep: entries of the list of the best blocks: one more than the slots, to compare the last selected block with
            the first rejected one.
    """

    rows: int
    blocks: int
    keep: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CountTile:
    """Tiles of the kernel that counts choices.

    Attributes:
        pairs: pairs that one step compares with each other.
        blocks: counters that are cleared at once.
        has_match: whether `match.any` finds equal values within a warp in one instruction. The interpreter does not
            support it.
    """

    pairs: int
    blocks: int
    has_match: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class SpanTile:
    """Tiles of the kernels that add the counts of spans.

    Attributes:
        spans: spans that one program adds up at a time.
        blocks: blocks of a program.
    """

    spans: int
    blocks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class EntryTile:
    """Tiles of the kernel that writes lists.

    Attributes:
        rows: queries of a tile.
        slot_columns: slots padded to a power of two.
    """

    rows: int
    slot_columns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemTile:
    """Tiles of the kernel of work items.

    Attributes:
        chunk: entries of a list that one program handles.
        blocks: blocks, or work items, that are handled at once.
    """

    chunk: int
    blocks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RowTile:
    """Tiles of queries and keys.

    Attributes:
        rows: queries of a tile.
        keys: keys of a tile.
        columns: `head_dim` padded to a power of two.
        loop_stages: depth of the prefetch over tiles.
        precision: `input_precision` of products.
    """

    rows: int
    keys: int
    columns: int
    loop_stages: int
    precision: Literal["ieee", "tf32"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockTile(RowTile):
    """Tiles of kernels that hold a block's keys.

    Attributes:
        key_tiles: tiles of a block's keys.
    """

    key_tiles: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeTile(RowTile):
    """Tiles of the merge of outputs.

    Attributes:
        slot_columns: slots padded to a power of two.
    """

    slot_columns: int
