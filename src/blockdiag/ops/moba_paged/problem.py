"""The static description of a call of MoBA over a paged cache, shared by every implementation.

Like `problem`, this imports nothing but the standard library.
"""

from dataclasses import dataclass

from blockdiag.ops.paged.problem import PagedProblem


@dataclass(frozen=True, kw_only=True, slots=True)
class MoBAPagedProblem:
    """One call: queries, caches and lengths as in causal paged attention, and the mean keys of complete blocks, float32
    [batch, max_blocks, K, H].

    A query at position p has the own block `p // block_size`, of which it sees the keys up to p, and chooses up to
    `slots` of the blocks before, which it sees whole.

    Attributes:
        paged: the call without blocks: causal, without window, soft cap and sinks.
        block_size: keys of a block, from the start of each sequence.
        max_blocks: blocks that there are mean keys for, `num_candidates` at least.
        slots: blocks that a query may choose, its own not counted, `num_candidates` at most.
    """

    paged: PagedProblem
    block_size: int
    max_blocks: int
    slots: int

    @property
    def num_candidates(self) -> int:
        """Blocks before the own block of the last query that a sequence can have."""
        return max(self.paged.max_keys - 1, 0) // self.block_size
