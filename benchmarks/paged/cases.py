"""The workloads of the benchmark of paged attention, and the bytes that each of them cannot do without reading."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from benchmarks.harness.family import Work, names_of
from blockdiag.ops.append.problem import AppendProblem
from blockdiag.ops.moba_paged.problem import MoBAPagedProblem
from blockdiag.ops.paged.problem import WIDE_HEAD, CacheScale, PagedProblem
from blockdiag.ops.paged.splits import choose_splits

type Group = Literal[
    "decode", "moba", "short", "speculative", "splits", "scales", "append", "prompts", "moba_prompts", "latent"
]

# In the order in which a short budget should be spent.
GROUPS: dict[Group, str] = {
    "decode": "one query of each sequence, by dtype of the cache and size of pages",
    "moba": "one query that reads the blocks it chooses",
    "short": "one query of one sequence with a short cache",
    "speculative": "several queries of each sequence",
    "splits": "by parts that the keys are divided into",
    "scales": "eight-bit caches with scales",
    "append": "one new token of each sequence",
    "prompts": "many new tokens of each sequence",
    "moba_prompts": "many new tokens that read the blocks they choose",
    "latent": "one query of each sequence and a latent cache, whose values are columns of its keys",
}

CACHES = {"bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1}
"""Bytes of an element by dtype name."""

CACHE_LABELS = {"bfloat16": "bf16", "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "int8": "int8"}
# Integers always have scales, so they are in the group of these.
DECODE_CACHES = ("bfloat16", "float8_e4m3fn", "float8_e5m2")
SCALED_CACHES = ("float8_e4m3fn", "int8")

PAGE_SIZES = (1, 16, 64)
SPLITS = (1, 2, 4, 8, 16, 32, 64)
DRAFT_LENGTHS = (4, 8)
SHORT_LENGTHS = (1024, 2048, 4096, 8192)
# Sequences, keys of each, and how many of them are new.
PROMPTS = ((1, 8192, 8192), (1, 16384, 16384), (1, 32768, 512), (8, 8192, 64))
# New tokens of one sequence with so many keys: a whole prompt, and its last chunk.
MOBA_PROMPT_KEYS, MOBA_PROMPTS = 65536, (65536, 2048)
# Sequences and keys of each, query heads, and caches with their scales, of DeepSeek's latent attention.
LATENTS = ((32, 8192), (8, 32768), (4, 65536))
LATENT_HEADS = (64, 128)
LATENT_CACHES: tuple[tuple[str, CacheScale], ...] = (("bfloat16", "none"), ("float8_e4m3fn", "token"))
LATENT_DIM, LATENT_VALUE_DIM = 576, 512

MOBA = "moba-contiguous"
"""The name of `moba_attention` with contiguous keys."""

QUERY_BYTES = 2  # queries are bfloat16
_IN_MEMORY = 2**28  # bytes that do not stay in an L2 of 60 MB


@dataclass(frozen=True, kw_only=True)
class PagedShape:
    """What a workload's cache holds.

    Attributes:
        name: what the CSV holds.
        batch, kv_length: sequences, and keys of each.
        query_heads, key_heads, head_dim: N, K and H.
        latent_values: how many of the keys' first columns are the values; None for values of their own, as wide as
            the keys.
    """

    name: str
    batch: int
    kv_length: int
    query_heads: int = 32
    key_heads: int = 8
    head_dim: int = 128
    latent_values: int | None = None

    @property
    def value_dim(self) -> int:
        """V."""
        return self.latent_values or self.head_dim

    @property
    def cached_tokens(self) -> int:
        """Tokens of all sequences."""
        return self.batch * self.kv_length

    def token_bytes(self, cache: str) -> int:
        """Bytes of the key and the value of one token."""
        return (1 if self.latent_values else 2) * self.key_heads * self.head_dim * CACHES[cache]

    def cache_bytes(self, cache: str) -> int:
        """Bytes of all keys and values."""
        return self.cached_tokens * self.token_bytes(cache)


SHAPES = {
    shape.name: shape
    for shape in (
        PagedShape(name="b1_128k", batch=1, kv_length=131072),
        PagedShape(name="b32_8k", batch=32, kv_length=8192),
        PagedShape(name="b16_32k", batch=16, kv_length=32768),
    )
}


@dataclass(frozen=True, kw_only=True)
class PagedCase:
    """One row of the benchmark: bfloat16 queries, all sequences equally long, causal.

    Attributes:
        group: what it is measured for.
        shape, cache, page_size: the cache.
        query_tokens: queries of each sequence.
        splits: parts of the keys; None for those that the library chooses.
        scales: how the cache's scales are given.
        copies: caches that calls take in turn, disjoint parts of one pool; with one, short caches stay in the L2.
        block_size, top_k: of MoBA; None without.
    """

    group: Group
    shape: PagedShape
    cache: str = "bfloat16"
    page_size: int = 64
    query_tokens: int = 1
    splits: int | None = None
    scales: CacheScale = "none"
    copies: int = 1
    block_size: int | None = None
    top_k: int | None = None

    @property
    def name(self) -> str:
        """The name of the case in the CSV, which no other row of its group has."""
        parts = [self.shape.name, CACHE_LABELS[self.cache], f"p{self.page_size}"]
        if self.query_tokens > 1:
            parts.append(f"t{self.query_tokens}")
        if self.group == "splits":
            parts.append("chosen" if self.splits is None else f"s{self.splits}")
        if self.scales != "none":
            parts.append(self.scales)
        if self.group == "short":
            parts.append("in_l2" if self.copies == 1 else "in_memory")
        if self.top_k is not None:
            parts.append(f"block{self.block_size}_k{self.top_k}")
        return "_".join(parts)

    @property
    def passes(self) -> tuple[str, ...]:
        """One call."""
        return ("call",)

    def columns(self) -> dict[str, Any]:
        """Return the columns that describe the workload."""
        shape = self.shape
        return {
            "op": "paged",
            "group": self.group,
            "case": self.name,
            "workload": shape.name,
            "cache": self.cache,
            "scales": self.scales,
            "page_size": self.page_size,
            "batch": shape.batch,
            "kv_length": shape.kv_length,
            "query_tokens": self.query_tokens,
            "query_heads": shape.query_heads,
            "key_heads": shape.key_heads,
            "head_dim": shape.head_dim,
        }

    def floor(self, pass_name: str) -> tuple[Work, ...]:
        """Return the bytes that must be read, and the products that a causal mask leaves, where they may decide."""
        del pass_name
        return (Work(self.flops if self.counts_products else 0.0, self.read_bytes),)

    @property
    def counts_products(self) -> bool:
        """True if products may take longer than reading the cache."""
        return self.group in ("prompts", "moba_prompts", "latent")

    @property
    def flops(self) -> float:
        """Floating-point operations of both products, for the keys that queries see.

        With MoBA, queries whose position is in one of the first `top_k` blocks see all keys up to it.
        """
        shape, new = self.shape, self.query_tokens
        pairs = new * (shape.kv_length - new) + new * (new + 1) / 2
        if self.block_size is not None:
            pairs = sum(self._seen_keys(position) for position in range(shape.kv_length - new, shape.kv_length))
        return 2.0 * shape.batch * shape.query_heads * (shape.head_dim + shape.value_dim) * pairs

    def _seen_keys(self, position: int) -> int:
        """The keys that a query of MoBA sees: all of its chosen blocks, and its own block up to itself."""
        assert self.block_size is not None and self.top_k is not None
        own, place = divmod(position, self.block_size)
        return min(own, self.top_k - 1) * self.block_size + place + 1

    @property
    def num_splits(self) -> int:
        """Parts of the keys of each sequence."""
        if self.group == "prompts":
            return 1
        if self.splits is not None:
            return self.splits
        shape = self.shape
        return choose_splits(
            batch=shape.batch,
            query_tokens=self.query_tokens,
            group_size=shape.query_heads // shape.key_heads,
            key_heads=shape.key_heads,
            max_keys=shape.kv_length,
            is_wide=max(shape.head_dim, shape.value_dim) > WIDE_HEAD,
        )

    @property
    def max_pages(self) -> int:
        """Pages of a sequence."""
        return -(-self.shape.kv_length // self.page_size)

    @property
    def num_pages(self) -> int:
        """Pages of the pool, those of all copies."""
        return self.copies * self.shape.batch * self.max_pages

    @property
    def calls(self) -> int:
        """Calls of one CUDA graph: ten, or one for every copy."""
        return max(10, self.copies)

    def problem(self) -> PagedProblem:
        """The call of paged attention."""
        shape = self.shape
        return PagedProblem(
            batch=shape.batch,
            query_tokens=self.query_tokens,
            query_heads=shape.query_heads,
            key_heads=shape.key_heads,
            head_dim=shape.head_dim,
            value_dim=shape.value_dim,
            has_value_pages=shape.latent_values is None,
            query_dtype="bfloat16",
            key_dtype=self.cache,
            value_dtype=self.cache,
            output_dtype="bfloat16",
            num_pages=self.num_pages,
            page_size=self.page_size,
            max_pages=self.max_pages,
            scale=shape.head_dim**-0.5,
            has_score_scale=self.scales == "head",
            key_scale="token" if self.scales == "token" else "none",
            value_scale=self.scales,
            num_splits=self.num_splits,
            few_queries=0 if self.group == "prompts" else None,
        )

    def moba_problem(self) -> MoBAPagedProblem:
        """The call of MoBA."""
        assert self.block_size is not None and self.top_k is not None
        candidates = (self.shape.kv_length - 1) // self.block_size
        return MoBAPagedProblem(
            paged=replace(self.problem(), num_splits=1),
            block_size=self.block_size,
            max_blocks=candidates,
            slots=min(self.top_k - 1, candidates),
        )

    def append_problem(self) -> AppendProblem:
        """The call that appends `query_tokens` tokens to each sequence."""
        shape = self.shape
        return AppendProblem(
            tokens=shape.batch * self.query_tokens,
            batch=shape.batch,
            query_tokens=self.query_tokens,
            key_heads=shape.key_heads,
            head_dim=shape.head_dim,
            value_dim=shape.head_dim,
            dtype="bfloat16",
            key_dtype=self.cache,
            value_dtype=self.cache,
            num_pages=self.num_pages,
            page_size=self.page_size,
            max_pages=self.max_pages,
            key_scale=self.scales,
            value_scale=self.scales,
        )

    @property
    def read_bytes(self) -> int:
        """Bytes that a call must read: keys, values and their scales, each once; of an append the new tokens.

        MoBA reads the mean keys and the chosen blocks, which depend on the numbers; see `check.chosen_bytes`.
        """
        shape = self.shape
        if self.group == "append":
            return shape.batch * self.query_tokens * 2 * shape.key_heads * shape.head_dim * QUERY_BYTES
        scales = 4 * shape.cached_tokens * shape.key_heads if self.scales == "token" else 0
        scales *= 1 if shape.latent_values else 2
        return shape.cache_bytes(self.cache) + scales


def short_shape(kv_length: int) -> PagedShape:
    """One sequence with a short cache."""
    return PagedShape(name=f"b1_{kv_length // 1024}k", batch=1, kv_length=kv_length)


def prompt_cases() -> list[PagedCase]:
    """By page size."""
    return [
        PagedCase(
            group="prompts",
            shape=PagedShape(name=f"b{batch}_{length // 1024}k", batch=batch, kv_length=length),
            page_size=size,
            query_tokens=tokens,
        )
        for batch, length, tokens in PROMPTS
        for size in PAGE_SIZES
    ]


def moba_prompt_cases() -> list[PagedCase]:
    """By new tokens, cache and page size."""
    shape = PagedShape(name=f"b1_{MOBA_PROMPT_KEYS // 1024}k", batch=1, kv_length=MOBA_PROMPT_KEYS)
    return [
        PagedCase(
            group="moba_prompts", shape=shape, cache=cache, page_size=size, query_tokens=tokens, block_size=128, top_k=8
        )
        for tokens in MOBA_PROMPTS
        for cache, size in (("bfloat16", 16), ("bfloat16", 64), ("float8_e4m3fn", 64))
    ]


def latent_cases() -> list[PagedCase]:
    """By query heads and cache."""
    cases = []
    for heads in LATENT_HEADS:
        for batch, length in LATENTS:
            shape = PagedShape(
                name=f"mla{heads}_b{batch}_{length // 1024}k",
                batch=batch,
                kv_length=length,
                query_heads=heads,
                key_heads=1,
                head_dim=LATENT_DIM,
                latent_values=LATENT_VALUE_DIM,
            )
            cases += [
                PagedCase(group="latent", shape=shape, cache=cache, scales=scales) for cache, scales in LATENT_CACHES
            ]
    return cases


def decode_cases(shape: PagedShape) -> list[PagedCase]:
    """By cache and page size."""
    pairs = [(cache, size) for cache in DECODE_CACHES for size in PAGE_SIZES]
    return [PagedCase(group="decode", shape=shape, cache=cache, page_size=size) for cache, size in pairs]


def make_cases() -> list[PagedCase]:
    """All rows of this library, in no particular order."""
    long, wide, longest = (SHAPES[name] for name in ("b1_128k", "b32_8k", "b16_32k"))
    cases = [case for shape in SHAPES.values() for case in decode_cases(shape)]
    cases += [
        PagedCase(group="moba", shape=long, cache=cache, page_size=size, block_size=128, top_k=8)
        for cache, size in (("bfloat16", 1), ("bfloat16", 16), ("bfloat16", 64), ("float8_e4m3fn", 64))
    ]
    for shape in map(short_shape, SHORT_LENGTHS):
        for cache, size in (("bfloat16", 1), ("bfloat16", 64), ("float8_e4m3fn", 64)):
            in_turn = -(-_IN_MEMORY // shape.cache_bytes(cache))
            cases += [
                PagedCase(group="short", shape=shape, cache=cache, page_size=size, copies=copies)
                for copies in (1, in_turn)
            ]
    for shape in (long, wide):
        for cache in ("bfloat16", "float8_e4m3fn"):
            cases += [
                PagedCase(group="speculative", shape=shape, cache=cache, query_tokens=count)
                for count in (1, *DRAFT_LENGTHS)
            ]
            cases += [PagedCase(group="splits", shape=shape, cache=cache, splits=count) for count in (*SPLITS, None)]
        for cache in SCALED_CACHES:
            for scales in ("head", "token"):
                cases.append(PagedCase(group="scales", shape=shape, cache=cache, scales=scales))
    cases += [PagedCase(group="splits", shape=longest, splits=count) for count in (*SPLITS, None)]
    cases += [
        PagedCase(group="append", shape=wide, cache=cache, page_size=size, scales=scales)
        for cache, size, scales in (
            ("bfloat16", 1, "none"),
            ("bfloat16", 64, "none"),
            ("float8_e4m3fn", 64, "head"),
            ("float8_e4m3fn", 64, "token"),
            ("int8", 64, "head"),
            ("int8", 64, "token"),
        )
    ]
    return cases + prompt_cases() + moba_prompt_cases() + latent_cases()


def select_groups(names: str | None) -> list[Group]:
    """Groups of a comma-separated list, all of them for None.

    Raises:
        ValueError: for a name that is no group.
    """
    wanted = names_of(names, GROUPS)
    return [group for group in GROUPS if group in wanted]


def by_pool(cases: Sequence[PagedCase]) -> list[list[PagedCase]]:
    """The same cases, those together that read the same keys and values."""
    pools: dict[tuple[int, str], list[PagedCase]] = {}
    for case in cases:
        pools.setdefault((case.copies * case.shape.cached_tokens, case.cache), []).append(case)
    return list(pools.values())


_SMOKE = PagedShape(name="smoke", batch=2, kv_length=96, query_heads=4, key_heads=2, head_dim=16)
_SMOKE_LATENT = replace(_SMOKE, name="smoke_latent", key_heads=1, head_dim=24, latent_values=16)
SMOKE_CASES = (
    PagedCase(group="decode", shape=_SMOKE, page_size=16),
    PagedCase(group="decode", shape=_SMOKE, cache="float8_e5m2", page_size=1),
    PagedCase(group="speculative", shape=_SMOKE, page_size=16, query_tokens=4),
    PagedCase(group="splits", shape=_SMOKE, page_size=16, splits=2),
    PagedCase(group="scales", shape=_SMOKE, cache="float8_e4m3fn", page_size=16, scales="token"),
    PagedCase(group="scales", shape=_SMOKE, cache="int8", page_size=16, scales="token"),
    PagedCase(group="moba", shape=_SMOKE, page_size=16, block_size=16, top_k=3),
    PagedCase(group="append", shape=_SMOKE, cache="float8_e4m3fn", page_size=16, scales="token"),
    PagedCase(group="append", shape=_SMOKE, cache="int8", page_size=16, scales="token"),
    PagedCase(group="prompts", shape=_SMOKE, page_size=16, query_tokens=40),
    PagedCase(group="moba_prompts", shape=_SMOKE, page_size=16, query_tokens=96, block_size=16, top_k=3),
    PagedCase(group="latent", shape=_SMOKE_LATENT, cache="float8_e4m3fn", page_size=16, scales="token"),
)
