"""The workloads of the benchmark of fused functions, and what each of them cannot do without: products and bytes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from benchmarks.harness.family import Work, names_of

type Group = Literal["evoformer", "diff", "causal", "window", "prefix", "documents", "alibi", "softcap", "full"]
type FusePass = Literal["fwd", "fwd+bwd"]

FUSE_PASSES: tuple[FusePass, ...] = ("fwd", "fwd+bwd")

# In the order in which a short budget should be spent.
GROUPS: dict[Group, str] = {
    "evoformer": "row attention of proteins: a bias of keys and a bias of pairs, gradients of both",
    "diff": "differential attention: one softmax less a fifth of another",
    "causal": "keys up to the query",
    "window": "keys up to 256 before the query, and itself",
    "prefix": "the first 256 keys, and those up to the query",
    "documents": "keys of the query's own document, up to the query; twelve documents of any length",
    "alibi": "a slope of each head times the distance of the key, no mask",
    "softcap": "30 tanh(score / 30), no mask",
}
TOKEN_GROUPS: tuple[Group, ...] = ("causal", "window", "prefix", "documents", "alibi", "softcap")
"""What FlexAttention has arguments for."""

ELEMENT_BYTES = 2  # all floating arrays are bfloat16
DOCUMENTS = 12
SOFT_CAP = 30.0
SECOND_SHARE = 0.2
"""Of the second softmax of differential attention."""


@dataclass(frozen=True, kw_only=True)
class FuseCase:
    """One function on arrays of one size.

    Attributes:
        group: the function.
        batch, tokens: sequences, and tokens of each.
        rows: sequences that share a bias of pairs; of "evoformer" only.
        query_heads, key_heads, head_dim: N, K and H. Of "diff", N counts pairs of heads, and values are 2 H wide.
        window, prefix: of the groups of these names.
        is_causal: "alibi" and "softcap" also mask keys after the query.
    """

    group: Group
    batch: int
    tokens: int
    rows: int = 1
    query_heads: int = 16
    key_heads: int = 16
    head_dim: int = 64
    window: int = 256
    prefix: int = 256
    is_causal: bool = False

    @property
    def name(self) -> str:
        """The name of the case in the CSV, which no other case has."""
        if self.group not in TOKEN_GROUPS:
            return f"{self.group}_d{self.head_dim}"
        heads = "mha" if self.query_heads == self.key_heads else f"gqa{self.query_heads // self.key_heads}"
        return f"{self.group}_{self.batch}x{self.tokens}_{heads}"

    @property
    def passes(self) -> tuple[FusePass, ...]:
        """Forward, and forward with backward."""
        return FUSE_PASSES

    def columns(self) -> dict[str, Any]:
        """Return the columns that describe the workload."""
        return {
            "op": "fuse",
            "group": self.group,
            "case": self.name,
            "batch": self.batch,
            "rows": self.rows,
            "tokens": self.tokens,
            "query_heads": self.query_heads,
            "key_heads": self.key_heads,
            "head_dim": self.head_dim,
            "value_dim": self.value_dim,
        }

    @property
    def value_dim(self) -> int:
        """Columns of a value."""
        return 2 * self.head_dim if self.group == "diff" else self.head_dim

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each argument by name, in the order in which the function takes them.

        "evoformer": query, key, value [B, R, T, N, H], mask_bias [B, R, 1, 1, T], pair_bias [B, 1, N, T, T]. "diff":
        query, key [B, T, 2, N, H], value [B, T, N, 2 H]. Others: query [B, T, N, H], key, value [B, T, K, H], and
        segments int32 [B, T] of "documents".
        """
        lead = (self.batch, self.tokens)
        if self.group == "evoformer":
            whole = (self.batch, self.rows, self.tokens, self.query_heads, self.head_dim)
            pairs = (self.batch, 1, self.query_heads, self.tokens, self.tokens)
            mask = (self.batch, self.rows, 1, 1, self.tokens)
            return {"query": whole, "key": whole, "value": whole, "mask_bias": mask, "pair_bias": pairs}
        if self.group == "diff":
            halves = (*lead, 2, self.query_heads, self.head_dim)
            return {"query": halves, "key": halves, "value": (*lead, self.query_heads, self.value_dim)}
        keys = (*lead, self.key_heads, self.head_dim)
        shapes = {"query": (*lead, self.query_heads, self.head_dim), "key": keys, "value": keys}
        return {**shapes, "segments": lead} if self.group == "documents" else {**shapes}

    @property
    def differentiated(self) -> tuple[str, ...]:
        """Names of the arguments whose gradients are taken."""
        return tuple(name for name in self.shapes if name != "segments")

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Of the result."""
        shapes = self.shapes
        return shapes["value"] if self.group == "diff" else shapes["query"]

    @property
    def score_rows(self) -> int:
        """Rows of scores, over all softmaxes."""
        softmaxes = 2 if self.group == "diff" else 1
        return softmaxes * self.batch * self.rows * self.query_heads * self.tokens

    @property
    def score_elements(self) -> int:
        """Elements of all scores, masked ones too: what is in memory where they are not fused."""
        return self.score_rows * self.tokens

    @property
    def seen_pairs(self) -> int:
        """Scores that are not masked, over all softmaxes."""
        position = np.arange(self.tokens, dtype=np.int64)
        if self.group == "documents":
            lengths = np.concatenate([document_lengths(row, self.tokens) for row in range(self.batch)])
            return self.query_heads * int((lengths * (lengths + 1) // 2).sum())
        by_row: Mapping[str, np.ndarray] = {
            "causal": position + 1,
            "window": np.minimum(position, self.window) + 1,
            "prefix": np.minimum(np.maximum(position + 1, self.prefix), self.tokens),
        }
        mask = "causal" if self.is_causal else self.group
        if mask not in by_row:
            return self.score_elements
        return self.score_rows // self.tokens * int(by_row[mask].sum())

    def bytes_of(self, name: str) -> int:
        """Bytes of an argument, or of "output"."""
        shape = self.output_shape if name == "output" else self.shapes[name]
        return math.prod(shape) * (4 if name == "segments" else ELEMENT_BYTES)

    def operand_bytes(self, pass_name: FusePass) -> tuple[int, int]:
        """Bytes of what a pass is given and of what it returns; both passes take the output's cotangent."""
        given, output = sum(map(self.bytes_of, self.shapes)), self.bytes_of("output")
        if pass_name == "fwd":
            return given, output
        return given + output, output + sum(map(self.bytes_of, self.differentiated))

    def useful_flops(self, pass_name: FusePass) -> float:
        """Multiplications and additions of the products of scores that are seen: two forward, five backward.

        Forward: scores, of length H, and weights with values, of length V (the two softmaxes of "diff" apart, as no
        pass over the keys knows both sums beforehand). Backward: scores again, and the gradients of weights, values,
        queries and keys.
        """
        pairs = 2.0 * self.seen_pairs
        forward = pairs * (self.head_dim + self.value_dim)
        return forward if pass_name == "fwd" else forward + pairs * (3 * self.head_dim + 2 * self.value_dim)

    def useful_bytes(self, pass_name: FusePass) -> int:
        """Bytes of arguments read once and of results written once; the backward reads the output too."""
        given, output = self.operand_bytes("fwd")
        if pass_name == "fwd":
            return given + output
        return 2 * given + 3 * output + sum(map(self.bytes_of, self.differentiated))

    def floor(self, pass_name: FusePass) -> tuple[Work, ...]:
        """Return the useful work; the backward runs after the forward."""
        forward = Work(self.useful_flops("fwd"), self.useful_bytes("fwd"))
        if pass_name == "fwd":
            return (forward,)
        flops, count = self.useful_flops(pass_name), self.useful_bytes(pass_name)
        return forward, Work(flops - forward.flops, count - forward.bytes)

    @property
    def share(self) -> int:
        """How much of the time a case gets, beside others: two of those with few peers, one of the rest."""
        return 1 if self.group in TOKEN_GROUPS else 2


def document_lengths(row: int, tokens: int) -> np.ndarray:
    """Lengths of the twelve documents of one sequence, int64 [12]: the parts between random cuts, none empty."""
    cuts = np.random.default_rng((row, tokens)).choice(np.arange(1, tokens), DOCUMENTS - 1, replace=False)
    return np.diff(np.concatenate([[0], np.sort(cuts), [tokens]]))


def make_segments(case: FuseCase) -> np.ndarray:
    """The document of each token, int32 [B, T]."""
    number = np.arange(DOCUMENTS, dtype=np.int32)
    return np.stack([np.repeat(number, document_lengths(row, case.tokens)) for row in range(case.batch)])


def alibi_slopes(heads: int) -> np.ndarray:
    """ALiBi's slopes 2^(-8 (n + 1) / N), float32 [N] (Press et al., 2022)."""
    return np.exp2(-8 * np.arange(1, heads + 1) / heads).astype(np.float32)


def make_cases() -> list[FuseCase]:
    """All cases, in the order in which a short budget should be spent."""
    cases = [
        FuseCase(group="evoformer", batch=8, rows=256, tokens=256, query_heads=4, key_heads=4, head_dim=size)
        for size in (64, 128)
    ]
    cases += [
        FuseCase(group="diff", batch=1, tokens=16384, query_heads=count, key_heads=count, head_dim=1024 // count)
        for count in (16, 8)
    ]
    return cases + [
        FuseCase(group=group, batch=batch, tokens=tokens, key_heads=heads)
        for heads in (16, 2)
        for batch, tokens in ((4, 4096), (1, 16384))
        for group in TOKEN_GROUPS
    ]


def small_case(group: str, **sizes: Any) -> FuseCase:
    """A case of a group at a size that takes no time; tokens are no multiple of a tile."""
    known = next(name for name in GROUPS if name == group)
    defaults = {"batch": 2, "tokens": 72, "query_heads": 4, "key_heads": 4, "head_dim": 16, "window": 7, "prefix": 9}
    given: dict[str, Any] = {**defaults, "rows": 3 if group == "evoformer" else 1, **sizes}
    return FuseCase(group=known, **given)


SMOKE_CASES = tuple(small_case(group, key_heads=2 if group in TOKEN_GROUPS else 4) for group in GROUPS)
FUSE_CASES: Mapping[str, FuseCase] = {case.name: case for case in make_cases()}


def select_fuse_cases(names: str | None) -> list[FuseCase]:
    """Cases of a comma-separated list of groups and cases, all of them for None.

    Raises:
        ValueError: for a name that is neither.
    """
    wanted = names_of(names, (*GROUPS, *FUSE_CASES), "groups or cases")
    return [case for case in FUSE_CASES.values() if case.group in wanted or case.name in wanted]
