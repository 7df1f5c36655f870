"""The static description of a call of MoBA over a paged cache, shared by every implementation.

It imports neither jax nor torch.
"""

from dataclasses import dataclass
from typing import ClassVar

from blockdiag.common.operation import Operation
from blockdiag.ops.paged.problem import PagedProblem

MOBA_PAGED = Operation("moba_paged_attention", "blockdiag.ops.moba_paged", ("reference", "xla", "triton"))


@dataclass(frozen=True, kw_only=True, slots=True)
class MoBAPagedProblem:
    """One call: queries, caches and lengths as in causal paged attention, and the mean keys of complete blocks, float32
    [batch, max_blocks, K, H].

    A query at position p owns block `p // block_size`, of which it sees the keys up to p. It also chooses up to `slots`
    earlier blocks, which it sees whole.

    Attributes:
        paged: the call without blocks: causal, without window, soft cap and sinks.
        block_size: keys of a block, from the start of each sequence.
        max_blocks: number of blocks per sequence with mean keys, at least `num_candidates`.
        slots: maximum number of blocks that a query chooses besides its own, at most `num_candidates`.
    """

    operation: ClassVar[Operation] = MOBA_PAGED

    paged: PagedProblem
    block_size: int
    max_blocks: int
    slots: int

    @property
    def is_empty(self) -> bool:
        """True if there are no queries or keys to compute anything from."""
        return self.paged.is_empty

    @property
    def num_candidates(self) -> int:
        """Maximum number of blocks before the own block of a sequence's last query."""
        return max(self.paged.max_keys - 1, 0) // self.block_size
