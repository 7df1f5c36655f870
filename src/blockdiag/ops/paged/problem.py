"""The static description of a call of paged attention, shared by every implementation.

It imports neither jax nor torch.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from blockdiag.common.operation import Operation
from blockdiag.common.sizes import is_symbolic

# Form of a cache's scale: none, one per sequence and head [batch, K], or one per token in pages [P, page_size, K].
type CacheScale = Literal["none", "head", "token"]


NO_BOUND = 2**31 - 1
"""`query_tokens` of packed queries whose sequences may have any length."""

WIDE_HEAD = 256
"""Columns of keys or values beyond which one program occupies a multiprocessor."""

# Rows of a tile of queries, over all heads that share a key head: of prompts with a launch of their own, and otherwise.
_PROMPT_ROWS, _TILE_ROWS = 128, 64
# The most rows of sequences that the launch of prompts leaves to the splits' kernel.
_FEW_ROWS = 32

PAGED = Operation("paged_attention", "blockdiag.ops.paged", ("reference", "xla", "triton"))


@dataclass(frozen=True, kw_only=True, slots=True)
class PagedProblem:
    """One call: query [batch, query_tokens, N, H] against pages of keys [P, page_size, K, H] and values
    [P, page_size, K, V], found through a page table int32 [batch, max_pages].

    Sequence b has `kv_lengths[b]` keys, and its last query has the position of its last key. Query i of
    `query_lengths[b]` has position `kv_lengths[b] - query_lengths[b] + i`, up to which a causal call sees keys.

    Implementations compute `tiled`.

    Attributes:
        batch, query_tokens: number of sequences, and maximum number of queries of each.
        has_more_queries: whether query lengths may exceed `query_tokens`; the call then has the first queries of a
            sequence. Otherwise greater lengths are clipped.
        packed_rows: rows of packed queries [packed_rows, N, H], whose sequences offsets give; None for a batch.
        num_tiles: tiles of `query_tokens` packed queries, which a table gives, see `packed`; None without a table.
        most_queries: with a table, the most queries that a sequence of the call may have.
        few_queries: sequences with at most this number of queries are computed apart from the others, in `num_splits`
            splits; the others are computed in one split. None: all sequences are computed alike.
        query_heads, key_heads: N and K; N is a multiple of K.
        head_dim, value_dim: H and V.
        query_dtype, key_dtype, value_dtype, output_dtype: dtype names. The output has the query's dtype, or bfloat16
            for an 8-bit query.
        num_pages, page_size, max_pages: pages of the pool, tokens of a page, maximum pages of a sequence.
        has_page_table: whether there is a table; without one, sequence b is page b.
        has_value_pages: whether values have pages. Otherwise they are the first V columns of the keys, with the keys'
            dtype and scales: `value_scale` is "head" or "token" where keys have such a scale.
        has_query_lengths: whether int32 [batch] says how many of the `query_tokens` queries a sequence has; rows beyond
            give 0.
        is_causal: whether the keys after a query's position are masked.
        window: maximum number of keys seen before and after a query's own position; None for no bound.
        soft_cap: scores s become `soft_cap * tanh(s / soft_cap)` before masking; None for no cap.
        has_sinks: whether each query head has a logit, float32 [N], that takes part in the softmax without a value.
        has_score_scale: whether scores have a factor besides `scale`, float32 [batch, K].
        key_scale, value_scale: forms of the caches' scales. A factor per key head is part of the score scale, so
            `key_scale` is "none" or "token".
        scale: factor on the scores, before the soft cap.
        num_splits: parts that the keys of a sequence are divided into, computed in parallel and merged.
        split_size: fixed number of keys per split, so that results do not depend on the rest of the batch; None divides
            evenly.
    """

    operation: ClassVar[Operation] = PAGED

    batch: int
    query_tokens: int
    query_heads: int
    key_heads: int
    head_dim: int
    value_dim: int
    query_dtype: str
    key_dtype: str
    value_dtype: str
    output_dtype: str
    num_pages: int
    page_size: int
    max_pages: int
    scale: float
    has_page_table: bool = True
    has_value_pages: bool = True
    has_query_lengths: bool = False
    is_causal: bool = True
    window: tuple[int | None, int | None] = (None, None)
    soft_cap: float | None = None
    has_sinks: bool = False
    has_score_scale: bool = False
    key_scale: CacheScale = "none"
    value_scale: CacheScale = "none"
    num_splits: int = 1
    split_size: int | None = None
    has_more_queries: bool = False
    packed_rows: int | None = None
    num_tiles: int | None = None
    most_queries: int | None = None
    few_queries: int | None = None

    @property
    def tiled(self) -> "PagedProblem":
        """The call in the form that implementations compute: a batch, or packed queries with a table of tiles.

        Segments are sequences, or rows between them. Segment s begins tile `start // tokens + s`. So the tiles of all
        segments are at most `rows // tokens + segments`, and their number follows from shapes.
        """
        if self.num_tiles is not None or (self.packed_rows is None and self.few_queries is None):
            return self
        rows, segments = self.packed_rows, self.batch + 2
        if rows is None:
            rows, segments = self.batch * self.query_tokens, self.batch * (2 if self.has_query_lengths else 1)
        tokens = max(1, (_TILE_ROWS if self.few_queries is None else _PROMPT_ROWS) // self.group_size)
        tokens = max(1, min(tokens, self.query_tokens))
        if self.split_size is None and not is_symbolic(rows):
            # With a fixed split size, the tile must not depend on other sequences. Powers of two share kernels.
            tokens = min(tokens, 1 << max(rows - 1, 0).bit_length())
        return replace(
            self,
            packed_rows=rows,
            num_tiles=rows // tokens + segments,
            most_queries=self.query_tokens,
            query_tokens=tokens,
            has_query_lengths=False,
        )

    @property
    def may_have_prompts(self) -> bool:
        """True if a sequence may have more queries than a tile of the splits' kernel."""
        return self.query_tokens * self.group_size > _TILE_ROWS

    @property
    def most_few_queries(self) -> int:
        """`few_queries` of packed queries: all that a sequence may have if they fit into a tile, otherwise a few."""
        if not self.may_have_prompts:
            return self.query_tokens
        return max(1, _FEW_ROWS // self.group_size)

    @property
    def is_empty(self) -> bool:
        """True if there are no queries or keys to compute anything from."""
        return 0 in (self.batch, self.query_tokens, self.packed_rows, self.num_pages, self.max_keys)

    @property
    def group_size(self) -> int:
        """Query heads that share one key head, G = N // K."""
        return self.query_heads // self.key_heads

    @property
    def max_keys(self) -> int:
        """Maximum number of keys of a sequence."""
        return self.max_pages * self.page_size
