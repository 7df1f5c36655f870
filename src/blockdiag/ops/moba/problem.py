"""The static description of a call of MoBA, mixture of block attention, shared by every implementation.

It imports neither jax nor torch.
"""

from dataclasses import dataclass
from typing import ClassVar

from blockdiag.common.dtype_table import SIXTEEN_BIT_FLOATS
from blockdiag.common.operation import Operation

MOBA = Operation("moba_attention", "blockdiag.ops.moba", ("reference", "xla", "triton"))


@dataclass(frozen=True, kw_only=True, slots=True)
class MoBAProblem:
    """One call over flattened token axes: query [query_tokens, N, H], key and value [key_tokens, K, H].

    Two tables describe sequences and blocks (see `moba_tables`). The block table says where each block of keys lies and
    which queries own it. The query table holds the blocks that each query may choose from, and the keys that it sees in
    its own block.

    Attributes:
        query_tokens, key_tokens: rows of the flattened axes, including all batch rows and mapped axes.
        query_heads, key_heads, head_dim: N, K and H; N is a multiple of K.
        dtype: dtype name of query, key, value, output and gradients.
        block_size: maximum keys of a block.
        num_blocks: rows of the block table.
        slots: maximum number of blocks that a query chooses besides its own: `top_k - 1` in causal calls, `top_k` in
            others, in both at most the blocks that a sequence can add; always `top_k` with a given routing.
        is_causal: whether queries own a block, of which they see the keys up to themselves. Chosen blocks are always
            seen whole.
        has_key_mask: whether a key mask, bool [key_tokens], removes keys.
        scale: factor on the scores, before the softmax.
        has_padding: whether rows of key and value may lie in no block, as after packed sequences.
        sequence_blocks: length of the key axis, of one batch row or packed, in blocks; routing chooses its precision by
            it. It is the same for a call and its parts on several devices, and not read after routing.
    """

    operation: ClassVar[Operation] = MOBA

    query_tokens: int
    key_tokens: int
    query_heads: int
    key_heads: int
    head_dim: int
    dtype: str
    block_size: int
    num_blocks: int
    slots: int
    is_causal: bool
    has_key_mask: bool
    scale: float
    has_padding: bool = False
    sequence_blocks: int = 0

    @property
    def is_empty(self) -> bool:
        """True if there are no queries or blocks to compute anything from."""
        return self.query_tokens == 0 or self.num_blocks == 0

    @property
    def group_size(self) -> int:
        """Query heads that share one key head, G = N // K."""
        return self.query_heads // self.key_heads

    @property
    def centroid_parts(self) -> int:
        """Number of `dtype` elements that represent an element of a mean key: 16-bit dtypes need three for float32."""
        return 3 if self.dtype in SIXTEEN_BIT_FLOATS else 1

    @property
    def centroid_scale(self) -> float:
        """The factor on the remainder that each part leaves, which is 2^11 times smaller and could underflow."""
        return 2048.0 if self.dtype == "float16" else 1.0
