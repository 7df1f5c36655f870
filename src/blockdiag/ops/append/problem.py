"""The static description of a call that appends to a paged cache, and its arrays, shared by every implementation.

It imports neither jax nor torch.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from blockdiag.common.operation import Operation
from blockdiag.common.rotary_problem import RotaryProblem
from blockdiag.ops.paged.problem import CacheScale

APPEND = Operation("append_to_pages", "blockdiag.ops.append", ("reference", "xla", "triton"))


@dataclass(frozen=True, kw_only=True, slots=True)
class AppendProblem:
    """One call: new tokens, key [tokens, K, H] and value [tokens, K, V], into pages of keys [P, page_size, K, H] and
    values [P, page_size, K, V], found through a page table int32 [batch, max_pages].

    Token t of the `query_lengths[b]` new ones of sequence b goes to position `kv_lengths[b] - query_lengths[b] + t`.

    Attributes:
        tokens: rows of key and value.
        batch: sequences.
        query_tokens: T, where row b * T + t is token t of sequence b; None where arrays say which row is whose.
        key_heads, head_dim, value_dim: K, H and V.
        dtype: dtype name of key and value.
        key_dtype, value_dtype: dtype names of the pages: `dtype`, or one of eight bits.
        num_pages, page_size, max_pages: pages of the pool, tokens of a page, pages of a sequence at most.
        has_page_table: whether there is a table; without one, sequence b is page b.
        has_query_lengths: whether sequences have fewer than `query_tokens` tokens; always where that is None.
        rotary: the rotation of the key before it is stored; None for none. Table rows are a token's position in its
            sequence, or explicit.
        key_scale, value_scale: what keys and values are divided by before they are rounded: nothing, what is given for
            each sequence and head, or what is computed for each token and head and written to pages of scales.
        block_size: tokens of a block whose mean key is kept; None where no means are.
        max_blocks: blocks of a sequence that there is a mean of.
    """

    operation: ClassVar[Operation] = APPEND

    tokens: int
    batch: int
    query_tokens: int | None
    key_heads: int
    head_dim: int
    value_dim: int
    dtype: str
    key_dtype: str
    value_dtype: str
    num_pages: int
    page_size: int
    max_pages: int
    has_page_table: bool = True
    has_query_lengths: bool = False
    rotary: RotaryProblem | None = None
    key_scale: CacheScale = "none"
    value_scale: CacheScale = "none"
    block_size: int | None = None
    max_blocks: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether there are no tokens or pages to compute anything from."""
        return 0 in (self.batch, self.tokens, self.num_pages, self.max_keys)

    @property
    def is_packed(self) -> bool:
        """Whether arrays say which sequence a row belongs to."""
        return self.query_tokens is None

    @property
    def max_keys(self) -> int:
        """Keys that a sequence can have."""
        return self.max_pages * self.page_size

    @property
    def max_completed(self) -> int:
        """Blocks of a sequence that one call can complete."""
        if self.block_size is None:
            return 0
        tokens = self.tokens if self.query_tokens is None else self.query_tokens
        return min(-(-tokens // self.block_size), self.max_blocks)

    @property
    def written(self) -> tuple[str, ...]:
        """The arrays that the call changes, names of `AppendArrays`, in the order in which they are returned."""
        is_written = {
            "key_pages": True,
            "value_pages": True,
            "key_scale": self.key_scale == "token",
            "value_scale": self.value_scale == "token",
            "key_centroids": self.block_size is not None,
        }
        return tuple(name for name, changes in is_written.items() if changes)


class AppendArrays(NamedTuple):
    """The arrays of a call; None for those that it does not have.

    Attributes:
        key, value: [tokens, K, H] and [tokens, K, V].
        key_pages, value_pages: [P, page_size, K, H] and [P, page_size, K, V].
        page_table: int32 [batch, max_pages], of any content.
        kv_lengths: int32 [batch], keys of each sequence after the append, of any content.
        query_lengths: int32 [batch], new tokens of each sequence.
        sequences: of packed rows, int32 [tokens], the sequence of each, -1 for none.
        first_rows: of packed rows, int32 [batch], where those of each sequence begin.
        cos, sin: [table_rows, H / 2].
        positions: int32 [tokens], the table row of each token where it is explicit.
        key_scale, value_scale: float32 [batch, K], or pages [P, page_size, K].
        key_centroids: float32 [batch, max_blocks, K, H].
    """

    key: Any
    value: Any
    key_pages: Any
    value_pages: Any
    page_table: Any
    kv_lengths: Any
    query_lengths: Any
    sequences: Any
    first_rows: Any
    cos: Any
    sin: Any
    positions: Any
    key_scale: Any
    value_scale: Any
    key_centroids: Any
