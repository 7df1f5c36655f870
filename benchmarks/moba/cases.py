"""The workloads of the MoBA benchmark, and what each of them cannot do without: products and bytes."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from benchmarks.harness.family import Work, names_of

MoBAPass = Literal["routing", "fwd", "bwd", "fwd+bwd"]
MOBA_PASSES: tuple[MoBAPass, ...] = ("routing", "fwd", "bwd", "fwd+bwd")

ELEMENT_BYTES = 2  # every case is bfloat16


@dataclass(frozen=True, kw_only=True)
class MoBACase:
    """One causal workload in bfloat16.

    Attributes:
        name: what `--cases` takes and the CSV holds.
        tokens, batch: tokens of a sequence, and sequences.
        query_heads, key_heads, head_dim: N, K and H.
        block_size, top_k: keys of a block, and blocks that a query sees, its own included.
    """

    name: str
    tokens: int
    batch: int = 2
    query_heads: int = 16
    key_heads: int = 16
    head_dim: int = 128
    block_size: int = 128
    top_k: int = 8

    @property
    def passes(self) -> tuple[MoBAPass, ...]:
        """Routing, forward, backward and both."""
        return MOBA_PASSES

    def columns(self) -> dict[str, Any]:
        """Return the columns that describe the workload."""
        shape = asdict(self)
        return {"op": "moba", "case": shape.pop("name"), **shape}

    @property
    def num_blocks(self) -> int:
        """Blocks of a sequence."""
        return -(-self.tokens // self.block_size)

    @property
    def is_usual(self) -> bool:
        """Whether heads and blocks are those of the rows by length."""
        usual = MoBACase(name=self.name, tokens=self.tokens, batch=self.batch)
        return self == usual

    @property
    def dense_shape(self) -> tuple[int, ...]:
        """What dense attention sees of the case: cases that agree in it have the same dense baselines."""
        return self.batch, self.tokens, self.query_heads, self.key_heads, self.head_dim

    @cached_property
    def _past_blocks(self) -> np.ndarray:
        """Blocks before its own, of each position of a sequence, int64 [tokens]."""
        return np.arange(self.tokens, dtype=np.int64) // self.block_size

    @property
    def chosen_blocks(self) -> int:
        """Blocks that the queries of one head choose beside their own, over all sequences."""
        return self.batch * int(np.minimum(self._past_blocks, self.top_k - 1).sum())

    @property
    def seen_keys(self) -> int:
        """Pairs of a query and a key that it sees, of one head, over all sequences. Chosen blocks are full."""
        own = np.arange(self.tokens, dtype=np.int64) % self.block_size + 1
        return self.chosen_blocks * self.block_size + self.batch * int(own.sum())

    def array_bytes(self, heads: int) -> int:
        """Bytes of one array [batch, tokens, heads, H]."""
        return ELEMENT_BYTES * self.batch * self.tokens * heads * self.head_dim

    def operand_bytes(self, pass_name: MoBAPass) -> tuple[int, int]:
        """Bytes of what a pass is given and of what it returns."""
        query, key = self.array_bytes(self.query_heads), self.array_bytes(self.key_heads)
        lists = 4 * self.query_heads * self.chosen_blocks
        return {
            "routing": (query + key, lists),
            "fwd": (query + 2 * key, query),
            "bwd": (3 * query + 2 * key, query + 2 * key),
            "fwd+bwd": (2 * query + 2 * key, 2 * query + 2 * key),
        }[pass_name]

    def useful_flops(self, pass_name: MoBAPass) -> float:
        """Multiplications and additions that the pass cannot do without.

        Routing: the product of each query with the mean key of each earlier block. Forward: routing, and two products
        of length H for each pair of a query and a key that it sees. Backward: five such products.
        """
        candidates = self.batch * int(self._past_blocks.sum())
        routing = 2.0 * self.head_dim * self.query_heads * candidates
        product = 2.0 * self.head_dim * self.query_heads * self.seen_keys
        forward, backward = routing + 2 * product, 5 * product
        return {"routing": routing, "fwd": forward, "bwd": backward, "fwd+bwd": forward + backward}[pass_name]

    def useful_bytes(self, pass_name: MoBAPass) -> int:
        """Bytes of operands read once and of results written once; the backward reads the output too."""
        if pass_name == "fwd+bwd":
            return self.useful_bytes("fwd") + self.useful_bytes("bwd")
        return sum(self.operand_bytes(pass_name))

    def floor(self, pass_name: MoBAPass) -> tuple[Work, ...]:
        """Return the useful work; both passes run one after the other."""
        stages: tuple[MoBAPass, ...] = ("fwd", "bwd") if pass_name == "fwd+bwd" else (pass_name,)
        return tuple(Work(self.useful_flops(one), self.useful_bytes(one)) for one in stages)

    def shrunk(self, tokens: int) -> "MoBACase":
        """The same heads and blocks over one short sequence, for the table of errors."""
        return replace(self, tokens=tokens, batch=1)


def _variants(tokens: int) -> tuple[MoBACase, ...]:
    """Other heads and other blocks."""
    suffix = f"{tokens // 1024}k"
    return (
        MoBACase(name=f"d64_n32_{suffix}", tokens=tokens, query_heads=32, key_heads=32, head_dim=64),
        MoBACase(name=f"gqa32_8_{suffix}", tokens=tokens, query_heads=32, key_heads=8),
        MoBACase(name=f"block64_k16_{suffix}", tokens=tokens, block_size=64, top_k=16),
        MoBACase(name=f"block512_k2_{suffix}", tokens=tokens, block_size=512, top_k=2),
    )


# In the order in which a short budget should be spent.
MOBA_CASES: Mapping[str, MoBACase] = {
    case.name: case
    for case in (
        *(MoBACase(name=f"n{count}k", tokens=count * 1024) for count in (64, 8, 32, 128, 16)),
        MoBACase(name="n512k_b1", tokens=512 * 1024, batch=1),
        MoBACase(name="n1024k_b1", tokens=1024 * 1024, batch=1),
        *_variants(16 * 1024),
        *_variants(64 * 1024),
    )
}


SMOKE_CASE = MoBACase(
    name="smoke", tokens=200, batch=2, query_heads=4, key_heads=2, head_dim=32, block_size=16, top_k=4
)


def select_moba_cases(names: str | None) -> list[MoBACase]:
    """Cases of a comma-separated list, all of them for None.

    Raises:
        ValueError: for a name that is no case.
    """
    return [MOBA_CASES[name] for name in names_of(names, MOBA_CASES)]
