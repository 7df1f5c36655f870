"""Shared code of paged attention tests: random caches filled with poison, an exact result, allowed errors.

Loops in NumPy compute caches, masks and attention, independently of the library.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from blockdiag.ops.paged.problem import PagedProblem
from tests.support import compiled_quickly, largest_error, to_array

MODULES = {
    "reference": "blockdiag.ops.paged.reference",
    "xla": "blockdiag.ops.paged.xla",
    "triton": "blockdiag.ops.paged.triton",
}

# Implementations that run on a CPU only through an interpreter of their kernels.
INTERPRETED = frozenset({"triton"})

EIGHT_BITS = ("float8_e4m3fn", "float8_e5m2")
INTEGERS = ("int8",)
# The scale of integers, which then have a standard deviation of 40. A few are saturated.
INTEGER_UNIT = 1 / 40

# Values of unused entries of a page table.
GARBAGE = (2**31 - 1, -(2**31), -1, 10**6, 0)


def poison_of(dtype: np.dtype) -> float:
    """Return what arrays hold where nothing may be read: NaN, or -128 of integers."""
    return -128 if dtype.name in INTEGERS else np.nan


def load(implementation: str) -> ModuleType:
    """Return the module of an implementation."""
    return importlib.import_module(MODULES[implementation])


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedCase:
    """One canonical call, described by shapes and options.

    Attributes:
        kv_lengths: number of keys of each sequence.
        query_lengths: number of queries of each sequence, if some have fewer than `query_tokens`.
        cache_dtype: dtype of keys, and of values if `value_dtype` is None; None for the query's dtype.
        page_size: tokens of a page; None for a contiguous cache.
        spare_pages: columns of the page table beyond what the longest sequence needs.
        is_latent: whether values are the first `value_dim` columns of the keys, scaled as these are.
        score_scale: whether there is a factor for each sequence and key head.
        eight_bit_products: whether weights may be rounded to eight bits, and scores added with about 14 bits, as the
            kernel of prompts for Hopper does.
    """

    kv_lengths: tuple[int, ...]
    query_lengths: tuple[int, ...] | None = None
    query_tokens: int = 1
    query_heads: int = 2
    key_heads: int = 1
    head_dim: int = 16
    value_dim: int | None = None
    dtype: str = "float32"
    cache_dtype: str | None = None
    value_dtype: str | None = None
    page_size: int | None = 16
    spare_pages: int = 1
    scale: float | None = None
    is_causal: bool = True
    window: tuple[int | None, int | None] = (None, None)
    soft_cap: float | None = None
    sinks: bool = False
    is_latent: bool = False
    score_scale: bool = False
    key_scale: str = "none"
    value_scale: str = "none"
    num_splits: int = 1
    split_size: int | None = None
    eight_bit_products: bool = False

    @property
    def problem(self) -> PagedProblem:
        batch, longest = len(self.kv_lengths), max(self.kv_lengths)
        page_size = self.page_size or longest + self.spare_pages
        max_pages = -(-longest // page_size) + self.spare_pages if self.page_size else 1
        cache_dtype = self.cache_dtype or self.dtype
        return PagedProblem(
            batch=batch,
            query_tokens=self.query_tokens,
            query_heads=self.query_heads,
            key_heads=self.key_heads,
            head_dim=self.head_dim,
            value_dim=self.value_dim or self.head_dim,
            query_dtype=self.dtype,
            key_dtype=cache_dtype,
            value_dtype=self.value_dtype or cache_dtype,
            output_dtype="bfloat16" if self.dtype in EIGHT_BITS else self.dtype,
            num_pages=3 * batch * max_pages if self.page_size else batch,
            page_size=page_size,
            max_pages=max_pages,
            scale=self.head_dim**-0.5 if self.scale is None else self.scale,
            has_page_table=self.page_size is not None,
            has_value_pages=not self.is_latent,
            has_query_lengths=self.query_lengths is not None,
            is_causal=self.is_causal,
            window=self.window,
            soft_cap=self.soft_cap,
            has_sinks=self.sinks,
            has_score_scale=self.score_scale,
            key_scale=self.key_scale,
            value_scale=self.key_scale if self.is_latent else self.value_scale,
            num_splits=self.num_splits,
            split_size=self.split_size,
        )

    @functools.cached_property
    def dense(self) -> dict[str, np.ndarray]:
        """Return the operands without pages: each sequence's keys, values and scales [B, longest, K, ...].

        Integers are normal numbers, divided by `INTEGER_UNIT` and rounded. Their scales are that much smaller.
        """
        problem, generator, longest = self.problem, np.random.default_rng(0), max(self.kv_lengths)
        tokens = (problem.batch, longest, problem.key_heads)
        rows = (problem.batch, problem.query_tokens, problem.query_heads)

        def normal(shape: Sequence[int], dtype: str) -> np.ndarray:
            numbers = generator.normal(size=shape).astype(np.float32)
            if dtype in INTEGERS:
                numbers = np.clip(np.rint(numbers / INTEGER_UNIT), -128, 127)
            return numbers.astype(jnp.dtype(dtype))

        def scales(shape: Sequence[int], unit: float = 1.0) -> np.ndarray:
            return generator.uniform(0.5 * unit, 2 * unit, size=shape).astype(np.float32)

        key_unit, value_unit = (
            INTEGER_UNIT if x in INTEGERS else 1.0 for x in (problem.key_dtype, problem.value_dtype)
        )
        by_token = self.key_scale == "token"

        dense = {
            "query": normal((*rows, problem.head_dim), problem.query_dtype),
            "key": normal((*tokens, problem.head_dim), problem.key_dtype),
            "value": normal((*tokens, problem.value_dim), problem.value_dtype),
            "sinks": generator.normal(size=problem.query_heads).astype(np.float32),
            "score_scale": scales(tokens[::2], 1.0 if by_token else key_unit),
            "key_scale": scales(tokens, key_unit),
            "value_scale": scales(tokens if self.value_scale == "token" else tokens[::2], value_unit),
        }
        if self.is_latent:
            dense |= {"value": dense["key"][..., : problem.value_dim], "value_scale": dense["key_scale"]}
        return dense

    @functools.cached_property
    def table(self) -> np.ndarray:
        """Return the page table: pages in a random permutation of the pool, and garbage in unused entries."""
        problem = self.problem
        if not problem.has_page_table:
            return np.arange(problem.batch, dtype=np.int32)[:, None]
        free = iter(np.random.default_rng(1).permutation(problem.num_pages))
        table = np.empty((problem.batch, problem.max_pages), np.int32)
        for b, length in enumerate(self.kv_lengths):
            for i in range(problem.max_pages):
                table[b, i] = next(free) if i * problem.page_size < length else GARBAGE[(b + i) % len(GARBAGE)]
        return table

    def paged(self, rows: np.ndarray) -> np.ndarray:
        """Return rows [B, longest, ...] of the sequences in the pages of a pool with NaN, or -128, everywhere else."""
        problem = self.problem
        pool = np.full((problem.num_pages, problem.page_size, *rows.shape[2:]), poison_of(rows.dtype), rows.dtype)
        for b, length in enumerate(self.kv_lengths):
            for j in range(length):
                pool[self.table[b, j // problem.page_size], j % problem.page_size] = rows[b, j]
        return pool

    @functools.cached_property
    def _operands(self) -> tuple[np.ndarray | None, ...]:
        problem, dense = self.problem, self.dense
        value_scale = {"none": None, "head": dense["value_scale"], "token": None}[self.value_scale]
        return (
            dense["query"],
            self.paged(dense["key"]),
            None if self.is_latent else self.paged(dense["value"]),
            self.table if problem.has_page_table else None,
            np.asarray(self.kv_lengths, np.int32),
            None if self.query_lengths is None else np.asarray(self.query_lengths, np.int32),
            dense["sinks"] if self.sinks else None,
            dense["score_scale"] if self.score_scale else None,
            self.paged(dense["key_scale"]) if self.key_scale == "token" else None,
            self.paged(dense["value_scale"]) if problem.value_scale == "token" else value_scale,
            None,  # no table of tiles
        )

    def operands(self) -> tuple[jax.Array | None, ...]:
        """Return the operands of an implementation after the problem."""
        return jax.device_put(self._operands)

    def arguments(self) -> dict[str, Any]:
        """Return the call as arguments of the public function."""
        names = ("query", "key_pages", "value_pages", "page_table", "kv_lengths", "query_lengths", "sinks")
        problem, operands = self.problem, self.operands()
        *_, score_scale, key_scales, value_scales, _tiles = operands
        if problem.key_dtype in INTEGERS and key_scales is None:
            # The scale of integers is that of the keys.
            score_scale, key_scales = None, score_scale
        return dict(zip(names, operands, strict=False)) | dict(
            query_scale=score_scale,
            key_scale=key_scales,
            value_scale=None if self.is_latent else value_scales,
            value_dim=problem.value_dim if self.is_latent else None,
            scale=self.scale,
            is_causal=self.is_causal,
            local_window_size=None if problem.window == (None, None) else problem.window,
            logits_soft_cap=self.soft_cap,
        )

    def compute(self, implementation: str) -> Callable[..., tuple[jax.Array, jax.Array]]:
        """Return the compiled function of an implementation."""
        return compiled_call(self.problem, implementation)

    def results(self, implementation: str) -> tuple[jax.Array, jax.Array]:
        """Return output and log-sum-exp."""
        return self.compute(implementation)(*self.operands())


# Prompts beside decoding sequences and a sequence without queries. Tiles have 16 or 32 queries.
MIXED = PagedCase(kv_lengths=(70, 33, 9, 0, 40, 20), query_lengths=(37, 1, 0, 3, 40, 2), query_tokens=40, query_heads=4)
MIXED_CASES = {
    "causal": MIXED,
    "two key heads, pages of 3": dataclasses.replace(MIXED, key_heads=2, page_size=3),
    "contiguous": dataclasses.replace(MIXED, page_size=None, value_dim=24),
    "not causal": dataclasses.replace(MIXED, is_causal=False, window=(20, 3)),
    "all keys": dataclasses.replace(MIXED, is_causal=False, sinks=True),
    "window and sinks": dataclasses.replace(MIXED, window=(11, None), sinks=True, soft_cap=5.0),
    "scales": dataclasses.replace(
        MIXED, score_scale=True, key_scale="token", value_scale="head", dtype="bfloat16", cache_dtype="float8_e4m3fn"
    ),
    "more queries than keys": dataclasses.replace(MIXED, kv_lengths=(30, 1, 9, 0, 7, 1), score_scale=True),
    "queries of eight bits": dataclasses.replace(MIXED, dtype="float8_e5m2", value_scale="token"),
    "int8, scales of tokens": dataclasses.replace(
        MIXED, key_scale="token", value_scale="token", dtype="bfloat16", cache_dtype="int8", key_heads=2, page_size=3
    ),
    "latent": dataclasses.replace(
        MIXED, is_latent=True, head_dim=24, value_dim=16, key_scale="token", dtype="bfloat16",
        cache_dtype="float8_e4m3fn",
    ),
}  # fmt: skip

# Prompts for the kernel of Hopper.
PROMPTS = PagedCase(
    kv_lengths=(300, 700, 9, 0, 129, 40), query_lengths=(150, 1, 0, 3, 129, 33), query_tokens=150, query_heads=8,
    key_heads=2, head_dim=128, dtype="bfloat16", page_size=16,
)  # fmt: skip
PROMPT_CASES = {
    "bfloat16, pages of 16": PROMPTS,
    "float16, pages of 1, heads of 64": dataclasses.replace(PROMPTS, dtype="float16", page_size=1, head_dim=64),
    "heads of 256, pages of 3": dataclasses.replace(PROMPTS, head_dim=256, page_size=3, query_heads=4),
    "group of 6, contiguous": dataclasses.replace(PROMPTS, query_heads=12, page_size=None),
    "no group, pages of 128": dataclasses.replace(PROMPTS, query_heads=2, page_size=128),
    "window": dataclasses.replace(PROMPTS, window=(100, None)),
    "both sides": dataclasses.replace(PROMPTS, is_causal=False, window=(100, 20)),
    "all keys, sinks": dataclasses.replace(PROMPTS, is_causal=False, sinks=True),
    "window, sinks, soft cap, heads of 64": dataclasses.replace(
        PROMPTS, window=(70, None), sinks=True, soft_cap=5.0, head_dim=64
    ),
    "more queries than keys": dataclasses.replace(PROMPTS, kv_lengths=(100, 700, 9, 0, 1, 129)),
    # The plain kernel computes these on Hopper, too.
    "int8, scales by token": dataclasses.replace(
        PROMPTS, cache_dtype="int8", key_scale="token", value_scale="token", window=(100, None), sinks=True
    ),
    "values of another width": dataclasses.replace(PROMPTS, value_dim=64),
    "scales": dataclasses.replace(PROMPTS, score_scale=True, value_scale="head"),
    "e4m3": dataclasses.replace(PROMPTS, dtype="float8_e4m3fn", eight_bit_products=True),
    "e4m3, many chunks, all keys": dataclasses.replace(
        PROMPTS, dtype="float8_e4m3fn", eight_bit_products=True, kv_lengths=(300, 700, 9, 0, 129, 1300), is_causal=False
    ),
    "e4m3, contiguous": dataclasses.replace(
        PROMPTS, dtype="float8_e4m3fn", eight_bit_products=True, page_size=None
    ),
    "e4m3, pages of 128, heads of 64": dataclasses.replace(
        PROMPTS, dtype="float8_e4m3fn", eight_bit_products=True, page_size=128, head_dim=64
    ),
    "e5m2, pages of 1, heads of 64": dataclasses.replace(
        PROMPTS, dtype="float8_e5m2", eight_bit_products=True, page_size=1, head_dim=64
    ),
    "e4m3, window, sinks, soft cap, scales by head": dataclasses.replace(
        PROMPTS, dtype="float8_e4m3fn", eight_bit_products=True, window=(100, None), sinks=True, soft_cap=5.0,
        score_scale=True, value_scale="head",
    ),
    "e4m3, scales by token, group of 6": dataclasses.replace(
        PROMPTS, dtype="float8_e4m3fn", eight_bit_products=True, query_heads=12, key_scale="token",
        value_scale="token", score_scale=True,
    ),
}  # fmt: skip


# The function is compiled once for all cases, tests and values of one problem.
@functools.cache
def compiled_call(problem: PagedProblem, implementation: str) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Return the compiled function of an implementation for `problem`."""
    options = {"interpret": implementation in INTERPRETED}
    return compiled_quickly(functools.partial(load(implementation).forward, problem, **options))


def exact_paged(case: PagedCase) -> tuple[np.ndarray, np.ndarray]:
    """Return output [B, T, N, V] and log-sum-exp [B, T, N] in float64, query by query and head by head."""
    return _by_loops(case, np.float64, lambda x: x)


def naive_output(case: PagedCase) -> np.ndarray:
    """Return the output of dense computations in the output's own dtype, as usual implementations compute it.

    Queries, keys and values with their scales, scores and softmax are each rounded to that dtype; sums are float32.
    Weights of eight-bit products are rounded to e4m3, 256 times as large.
    """
    if case.dtype == "float64":
        return exact_paged(case)[0]
    dtype = jnp.dtype(case.problem.output_dtype)
    return _by_loops(case, np.float32, lambda x: x.astype(dtype).astype(np.float32))[0]


def _by_loops(case: PagedCase, wide: Any, rounded: Callable[[np.ndarray], np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    problem = case.problem
    dense = {name: x.astype(wide) for name, x in case.dense.items()}
    output = np.zeros((problem.batch, problem.query_tokens, problem.query_heads, problem.value_dim), wide)
    log_sum = np.full(output.shape[:-1], -np.inf, wide)
    for b, n in np.ndindex(problem.batch, problem.query_heads):
        k, length = n // problem.group_size, case.kv_lengths[b]
        num_queries = case.query_lengths[b] if case.query_lengths else problem.query_tokens
        key, value = dense["key"][b, :length, k], dense["value"][b, :length, k]
        if case.score_scale:
            key = key * dense["score_scale"][b, k]
        if case.key_scale == "token":
            key = key * dense["key_scale"][b, :length, k, None]
        if problem.value_scale != "none":
            scale = dense["value_scale"][b, k] if problem.value_scale == "head" else dense["value_scale"][b, :length, k]
            value = value * scale.reshape(-1, 1)
        key, value = rounded(key), rounded(value)
        for i in range(num_queries):
            keys = _seen_keys(case, length - num_queries + i, length)
            scores = rounded(wide(problem.scale) * (key[keys] @ rounded(dense["query"][b, i, n])))
            if case.soft_cap is not None:
                scores = rounded(case.soft_cap * np.tanh(scores / wide(case.soft_cap)))
            sink = dense["sinks"][n] if case.sinks else -np.inf
            largest = max(scores.max(initial=-np.inf), sink)
            if largest == -np.inf:
                continue
            exponentials = np.exp(scores - largest)
            weights = exponentials
            if case.eight_bit_products and wide is np.float32:
                weights = (exponentials * 256).astype(jnp.float8_e4m3fn).astype(wide) / 256
            total = exponentials.sum() + np.exp(sink - largest)
            log_sum[b, i, n] = largest + np.log(total)
            output[b, i, n] = rounded(rounded(weights / total) @ value[keys])
    return output, log_sum


def _seen_keys(case: PagedCase, position: int, length: int) -> slice:
    """Return the keys of a sequence that a query at a position sees."""
    left, right = case.window
    last = length - 1 if right is None else min(length - 1, position + right)
    last = min(last, position) if case.is_causal else last
    first = 0 if left is None else max(0, position - left)
    return slice(first, max(first, last + 1))


def assert_accurate(case: PagedCase, actual: Sequence[Any]) -> None:
    """Assert that the output errs by at most twice the naive computation's error, plus two units in the last place."""
    output, log_sum = actual
    assert_output_accurate(case, output)
    wide = jnp.float64 if case.dtype == "float64" else jnp.float32
    true = exact_paged(case)[1]
    assert log_sum.dtype == wide and log_sum.shape == true.shape
    # The log-sum-exp is float32 for all operands, so the naive computation's error is not used for it.
    np.testing.assert_array_equal(np.asarray(log_sum) == -np.inf, true == -np.inf, err_msg=f"blind rows of {case}")
    log_sum, true = (np.where(true == -np.inf, 0, x) for x in (log_sum, true))
    unit = 2**-10 if case.eight_bit_products else 64 * float(jnp.finfo(wide).eps)
    error, allowed = largest_error(log_sum, true), unit * (1 + np.abs(true).max())
    assert error <= allowed, f"log-sum-exp of {case} errs by {error}, allowed {allowed}"


def assert_output_accurate(case: PagedCase, output: Any) -> None:
    """Assert the accuracy of an output alone; see `assert_accurate`."""
    true, rough = exact_paged(case)[0], naive_output(case)
    assert output.dtype == case.problem.output_dtype and output.shape == true.shape
    unit = float(jnp.finfo(output.dtype).eps) * np.abs(true).max(initial=0.0)
    unit += 16 * float(jnp.finfo(jnp.float64 if case.dtype == "float64" else jnp.float32).eps)
    error, allowed = largest_error(output, true), 2 * largest_error(rough, true) + 2 * unit
    assert error <= allowed, f"output of {case} errs by {error}, allowed {allowed}"


def simple_arguments(
    batch: int = 2, tokens: int = 1, *, seed: int = 0, pages: int = 7, dtype=jnp.float32
) -> dict[str, jax.Array]:
    """Return the arguments of a call with up to 12 keys in pages of 4, and two key heads."""
    generator = np.random.default_rng(seed)
    shapes = dict(query=(batch, tokens, 4, 8), key_pages=(pages, 4, 2, 8), value_pages=(pages, 4, 2, 8))
    return dict(
        **{name: to_array(generator.normal(size=shape).astype(np.float32), dtype) for name, shape in shapes.items()},
        page_table=to_array(generator.integers(0, pages, (batch, 3)), jnp.int32),
        kv_lengths=to_array(generator.integers(1, 13, batch), jnp.int32),
    )


def zeros(*shape: int, dtype=jnp.float32) -> jax.Array:
    """Return zeros of a shape."""
    return jnp.zeros(shape, dtype)


def integers(*values: int) -> jax.Array:
    """Return int32 numbers."""
    return jnp.asarray(values, jnp.int32)
