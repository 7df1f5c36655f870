"""Shared code of tests of MoBA's implementations: random canonical calls, an exact result, allowed errors.

Loops in NumPy compute tables, routing, lists and attention, independently of the library.
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
import pytest

from blockdiag.ops.moba.lists import Lists
from blockdiag.ops.moba.problem import MoBAProblem
from tests.support import compiled_quickly, largest_error, naive_dense_attention, to_array

RESULTS = ("output", "log_sum", "query gradient", "key gradient", "value gradient")

MODULES = {
    "reference": "blockdiag.ops.moba.reference",
    "xla": "blockdiag.ops.moba.xla",
    "triton": "blockdiag.ops.moba.triton",
}

# Implementations that run on a CPU only through an interpreter of their kernels.
INTERPRETED = frozenset({"triton"})


def load(implementation: str) -> ModuleType:
    """Return the module of an implementation."""
    return importlib.import_module(MODULES[implementation])


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoBACase:
    """One canonical call, described by shapes and options.

    Attributes:
        lengths: tokens of the sequences.
        key_lengths: number of keys of each sequence, if it differs from the number of queries.
        padding: rows after the last sequence of queries and of keys.
        masked: fraction of keys that the key mask removes; None for no mask.
        edits: how the routing differs from that of the scores: "none", "random" (any allowed blocks, in any number and
            order) or "own" (random, and only some queries see their own block).
        spare_blocks: unused rows of the block table.
        is_long: whether queries choose as they do in long sequences, which have at least 512 blocks.
    """

    lengths: tuple[int, ...]
    key_lengths: tuple[int, ...] | None = None
    padding: int = 0
    query_heads: int = 2
    key_heads: int = 2
    head_dim: int = 16
    dtype: str = "float32"
    block_size: int = 16
    slots: int = 2
    is_causal: bool = True
    masked: float | None = None
    scale: float | None = None
    edits: str = "none"
    spare_blocks: int = 0
    is_long: bool = False

    @property
    def sequences(self) -> list[tuple[int, int, int, int]]:
        """Return the first query row, number of queries, first key row and number of keys of each sequence."""
        found, query_row, key_row = [], 0, 0
        for length, key_length in zip(self.lengths, self.key_lengths or self.lengths, strict=True):
            found.append((query_row, length, key_row, key_length))
            query_row, key_row = query_row + length, key_row + key_length
        return found

    @property
    def problem(self) -> MoBAProblem:
        key_lengths = self.key_lengths or self.lengths
        return MoBAProblem(
            query_tokens=sum(self.lengths) + self.padding,
            key_tokens=sum(key_lengths) + self.padding,
            query_heads=self.query_heads,
            key_heads=self.key_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
            block_size=self.block_size,
            num_blocks=sum(-(-length // self.block_size) for length in key_lengths) + self.spare_blocks,
            slots=self.slots,
            is_causal=self.is_causal,
            has_key_mask=self.masked is not None,
            scale=self.head_dim**-0.5 if self.scale is None else self.scale,
            has_padding=self.padding > 0,
            sequence_blocks=512 if self.is_long else 0,
        )

    @functools.cached_property
    def tables(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the block table and the query table, built one token at a time."""
        problem = self.problem
        blocks = np.zeros((problem.num_blocks, 4), np.int32)
        queries = np.zeros((problem.query_tokens, 4), np.int32)
        block = 0
        for query_row, length, key_row, key_length in self.sequences:
            first_block = block
            for start in range(0, key_length, self.block_size):
                blocks[block, :2] = key_row + start, min(self.block_size, key_length - start)
                block += 1
            for i in range(length):
                position = i + key_length - length
                if not self.is_causal:
                    queries[query_row + i, :2] = (first_block, block) if key_length else (0, 0)
                elif position >= 0:
                    own = first_block + position // self.block_size
                    queries[query_row + i] = first_block, own, blocks[own, 0], key_row + position + 1
                    if blocks[own, 3] == 0:
                        blocks[own, 2] = query_row + i
                    blocks[own, 3] += 1
        return blocks, queries

    @functools.cached_property
    def key_mask(self) -> np.ndarray | None:
        if self.masked is None:
            return None
        mask = np.random.default_rng(7).uniform(size=self.problem.key_tokens) >= self.masked
        # One block has no unmasked key.
        mask[self.block_size : 2 * self.block_size] = False
        return mask

    @functools.cached_property
    def chosen(self) -> np.ndarray:
        """Return a routing, int32 [N, query_tokens, slots], of the scores or at random."""
        if self.edits == "none":
            return exact_routing(self, self.operands())[0]
        generator = np.random.default_rng(11)
        _, queries = self.tables
        chosen = np.full((self.query_heads, self.problem.query_tokens, self.slots), -1, np.int32)
        for n, t in np.ndindex(chosen.shape[:2]):
            allowed = generator.permutation(np.arange(queries[t, 0], queries[t, 1]))
            picked = allowed[: generator.integers(0, self.slots + 1)]
            chosen[n, t, : len(picked)] = picked
        return chosen

    @functools.cached_property
    def own(self) -> np.ndarray | None:
        if self.edits != "own":
            return None
        return np.random.default_rng(13).uniform(size=(self.query_heads, self.problem.query_tokens)) < 0.5

    @functools.cached_property
    def lists(self) -> Lists:
        """Return the lists of `chosen`, built one pair at a time; entries that no list covers are garbage."""
        problem = self.problem
        num_pairs = problem.query_tokens * problem.slots
        offsets, counts = (np.zeros((problem.query_heads, problem.num_blocks), np.int32) for _ in range(2))
        entries = np.full((problem.query_heads, num_pairs), np.iinfo(np.int32).max, np.int32)
        for n in range(problem.query_heads):
            filled, pairs = 0, self.chosen[n].reshape(-1)
            for block in range(problem.num_blocks):
                rows = [pair for pair in range(num_pairs) if pairs[pair] == block]
                offsets[n, block], counts[n, block] = filled, len(rows)
                entries[n, filled : filled + len(rows)] = rows
                filled += len(rows)
        return Lists(offsets, counts, entries, (self.chosen >= 0).sum(axis=-1, dtype=np.int32))

    def is_seen(self) -> np.ndarray:
        """Return the keys that each query of each head sees, bool [N, query_tokens, key_tokens]."""
        problem, (blocks, queries) = self.problem, self.tables
        seen = np.zeros((problem.query_heads, problem.query_tokens, problem.key_tokens), bool)
        for n, t in np.ndindex(seen.shape[:2]):
            for block in self.chosen[n, t]:
                if block >= 0:
                    seen[n, t, blocks[block, 0] : blocks[block, 0] + blocks[block, 1]] = True
            if self.own is None or self.own[n, t]:
                seen[n, t, queries[t, 2] : queries[t, 3]] = True
        return seen if self.key_mask is None else seen & self.key_mask

    def operands(self, seed: int = 0) -> tuple[jax.Array, ...]:
        """Return random query, key, value and cotangents of output and log-sum-exp."""
        generator, problem = np.random.default_rng(seed), self.problem
        shapes = [
            (problem.query_tokens, problem.query_heads, problem.head_dim),
            (problem.key_tokens, problem.key_heads, problem.head_dim),
            (problem.key_tokens, problem.key_heads, problem.head_dim),
            (problem.query_tokens, problem.query_heads, problem.head_dim),
        ]
        arrays = (generator.normal(size=shape).astype(np.float32) for shape in shapes)
        log_sum_cotangent = generator.normal(size=shapes[0][:2])
        wide = "float64" if self.dtype == "float64" else "float32"
        return *(to_array(x, self.dtype) for x in arrays), to_array(log_sum_cotangent.astype(wide))

    def arguments(self) -> tuple[Any, ...]:
        """Return the arguments after query, key and value in a call: key mask, tables, lists and own."""
        tree = (self.key_mask, *self.tables, self.lists, self.own)
        return jax.device_put(tree)

    def skip_unless_supported(self, implementation: str) -> None:
        """Skip the test, with the reason, if an implementation cannot compute this case."""
        module = load(implementation)
        reason = module.available() or module.supports(self.problem)
        if reason is not None:
            pytest.skip(reason)

    def compute(self, implementation: str) -> Callable[..., tuple[jax.Array, ...]]:
        """Return a compiled function of operands and arguments: output, log-sum-exp and gradients of the operands."""
        return _compiled_call(self.problem, implementation, implementation in INTERPRETED)

    def results(self, implementation: str) -> tuple[jax.Array, ...]:
        """Return output, log-sum-exp and gradients of query, key and value."""
        return self.compute(implementation)(*self.operands(), self.arguments())

    def route(self, implementation: str, operands: Sequence[jax.Array] | None = None) -> np.ndarray:
        """Return the routing that an implementation computes for this case's operands, or for others."""
        query, key, *_ = self.operands() if operands is None else operands
        key_mask, blocks, queries, *_ = self.arguments()
        route = _compiled_routing(self.problem, implementation, implementation in INTERPRETED)
        return np.asarray(route(query, key, key_mask, blocks, queries))

    def make_lists(self, implementation: str) -> Lists:
        """Return the lists that an implementation makes of this case's routing."""
        options = {"interpret": implementation in INTERPRETED}
        make = functools.partial(load(implementation).make_lists, self.problem, **options)
        return jax.tree.map(np.asarray, compiled_quickly(make)(self.chosen))


# The call is compiled once for all cases, tests and values of one problem, because tables and routings are arguments.


@functools.cache
def _compiled_call(problem: MoBAProblem, implementation: str, interpret: bool) -> Callable[..., tuple[jax.Array, ...]]:
    module = load(implementation)

    def compute(query, key, value, cotangent, log_sum_cotangent, arguments):
        output, log_sum = module.forward(problem, query, key, value, *arguments, interpret=interpret)
        results = output, log_sum, cotangent, log_sum_cotangent
        gradients = module.backward(problem, query, key, value, *arguments, *results, interpret=interpret)
        return output, log_sum, *gradients

    return compiled_quickly(compute)


@functools.cache
def _compiled_routing(problem: MoBAProblem, implementation: str, interpret: bool) -> Callable[..., jax.Array]:
    return compiled_quickly(functools.partial(load(implementation).route, problem, interpret=interpret))


def exact_routing(case: MoBACase, operands: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return routing, int32 [N, query_tokens, slots], and float64 scores [N, query_tokens, num_blocks].

    Scores of blocks that a query may not choose are -inf.
    """
    query, key = (np.asarray(x).astype(np.float64) for x in operands[:2])
    problem, (blocks, queries) = case.problem, case.tables
    chosen = np.full((problem.query_heads, problem.query_tokens, problem.slots), -1, np.int32)
    scores = np.full((problem.query_heads, problem.query_tokens, problem.num_blocks), -np.inf)
    for n, t in np.ndindex(chosen.shape[:2]):
        candidates = []
        for block in range(queries[t, 0], queries[t, 1]):
            rows = np.arange(blocks[block, 0], blocks[block, 0] + blocks[block, 1])
            rows = rows if case.key_mask is None else rows[case.key_mask[rows]]
            if len(rows):
                scores[n, t, block] = query[t, n] @ key[rows, n // problem.group_size].mean(axis=0)
                candidates.append((-scores[n, t, block], -block))
        best = [-block for _, block in sorted(candidates)[: problem.slots]]
        chosen[n, t, : len(best)] = best
    return chosen, scores


def exact_moba(case: MoBACase, operands: Sequence[Any]) -> tuple[np.ndarray, ...]:
    """Return output, log-sum-exp and gradients in float64, query by query and head by head."""
    query, key, value, cotangent, log_sum_cotangent = (np.asarray(x).astype(np.float64) for x in operands)
    problem, seen = case.problem, case.is_seen()
    output, query_gradient, key_gradient, value_gradient = (np.zeros_like(x) for x in (query, query, key, value))
    log_sum = np.full(query.shape[:2], -np.inf)
    for n, t in np.ndindex(seen.shape[:2]):
        k, rows = n // problem.group_size, np.flatnonzero(seen[n, t])
        if not len(rows):
            continue
        scores = problem.scale * key[rows, k] @ query[t, n]
        exponentials = np.exp(scores - scores.max())
        weights = exponentials / exponentials.sum()
        log_sum[t, n] = scores.max() + np.log(exponentials.sum())
        output[t, n] = weights @ value[rows, k]
        weights_gradient = value[rows, k] @ cotangent[t, n]
        mean = weights @ weights_gradient - log_sum_cotangent[t, n]
        scores_gradient = problem.scale * weights * (weights_gradient - mean)
        query_gradient[t, n] = scores_gradient @ key[rows, k]
        key_gradient[rows, k] += np.outer(scores_gradient, query[t, n])
        value_gradient[rows, k] += np.outer(weights, cotangent[t, n])
    return output, log_sum, query_gradient, key_gradient, value_gradient


def naive_moba(case: MoBACase, operands: Sequence[Any]) -> tuple[np.ndarray, ...]:
    """Compute `exact_moba` by dense computations in the case's own dtype, as usual implementations do."""
    return naive_dense_attention(case.is_seen(), case.problem.scale, *(np.asarray(x) for x in operands))


def assert_accurate(case: MoBACase, actual: Sequence[Any], operands: Sequence[jax.Array]) -> None:
    """Assert that each result errs by at most twice the naive computation's error, plus two units in the last place."""
    exact = exact_moba(case, operands)
    problem = case.problem
    naive = naive_moba(case, operands) if problem.query_tokens and problem.key_tokens else exact
    wide = jnp.float64 if case.dtype == "float64" else jnp.float32
    for name, result, true, rough in zip(RESULTS, actual, exact, naive, strict=True):
        assert result.shape == true.shape, name
        if name == "log_sum":
            # The log-sum-exp is float32 for all operands, so the naive computation's error is not used for it.
            assert result.dtype == wide
            blind = true == -np.inf
            np.testing.assert_array_equal(np.asarray(result) == -np.inf, blind, err_msg=f"blind rows of {case}")
            result, true = (np.where(blind, 0, x) for x in (result, true))
            allowed = 64 * float(jnp.finfo(wide).eps) * (1 + np.abs(true).max(initial=0.0))
        else:
            assert result.dtype == operands[0].dtype, name
            unit = float(jnp.finfo(result.dtype).eps) * np.abs(true).max(initial=0.0)
            # An exact 0, such as the query gradient of a row that sees one key, may be off by a rounding error.
            unit += 16 * float(jnp.finfo(wide).eps)
            allowed = 2 * largest_error(rough, true) + 2 * unit
        error = largest_error(result, true)
        assert error <= allowed, f"{name} of {case} errs by {error}, allowed {allowed}"
