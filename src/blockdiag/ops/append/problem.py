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
        batch: number of sequences.
        query_tokens: T, where row b * T + t is token t of sequence b; None for packed rows, whose sequences are given
            by arrays.
        key_heads, head_dim, value_dim: K, H and V.
        dtype: dtype name of key and value.
        key_dtype, value_dtype: dtype names of the pages: `dtype` or an 8-bit dtype.
        num_pages, page_size, max_pages: pages of the pool, tokens of a page, maximum pages of a sequence.
        has_values: whether there are values and pages of them. A latent cache has none, and `value_dim` is then 0.
        has_page_table: whether there is a table; without one, sequence b is page b.
        has_query_lengths: whether an array says how many new tokens each sequence has; always True for packed rows.
        rotary: the rotation of the key before it is stored, or None. Table rows are a token's position in its sequence,
            or explicit.
        key_scale, value_scale: divisor of keys and values before rounding. It is "none", "head" (given for each
            sequence and head), or "token" (computed for each token and head, and written to pages of scales).
        block_size: tokens of a block whose mean key is maintained; None without mean keys.
        max_blocks: number of blocks per sequence with a mean key.
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
    has_values: bool = True
    has_page_table: bool = True
    has_query_lengths: bool = False
    rotary: RotaryProblem | None = None
    key_scale: CacheScale = "none"
    value_scale: CacheScale = "none"
    block_size: int | None = None
    max_blocks: int = 0

    @property
    def is_empty(self) -> bool:
        """True if there are no tokens or pages to compute anything from."""
        return 0 in (self.batch, self.tokens, self.num_pages, self.max_keys)

    @property
    def is_packed(self) -> bool:
        """True if rows are packed, so that arrays give each row's sequence."""
        return self.query_tokens is None

    @property
    def max_keys(self) -> int:
        """Maximum number of keys of a sequence."""
        return self.max_pages * self.page_size

    @property
    def max_completed(self) -> int:
        """Maximum number of blocks of a sequence that one call can complete."""
        if self.block_size is None:
            return 0
        tokens = self.tokens if self.query_tokens is None else self.query_tokens
        return min(-(-tokens // self.block_size), self.max_blocks)

    @property
    def written(self) -> tuple[str, ...]:
        """Names in `AppendArrays` of the arrays that the call changes, in the order in which they are returned."""
        is_written = {
            "key_pages": True,
            "value_pages": self.has_values,
            "key_scale": self.key_scale == "token",
            "value_scale": self.value_scale == "token",
            "key_centroids": self.block_size is not None,
        }
        return tuple(name for name, changes in is_written.items() if changes)


class AppendArrays(NamedTuple):
    """The arrays of a call; None for arrays that the call does not have.

    Attributes:
        key, value: [tokens, K, H] and [tokens, K, V].
        key_pages, value_pages: [P, page_size, K, H] and [P, page_size, K, V].
        page_table: int32 [batch, max_pages], with arbitrary values.
        kv_lengths: int32 [batch], keys of each sequence after the append, with arbitrary values.
        query_lengths: int32 [batch], new tokens of each sequence.
        sequences: int32 [tokens], the sequence of each packed row, -1 for none.
        first_rows: int32 [batch], the first packed row of each sequence.
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
