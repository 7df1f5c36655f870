"""Shared cases for tests of MoBA's public functions, and a dense computation for comparison.

Both are independent of the library. Loops in NumPy determine the keys that a query sees. Attention is a dense softmax
with that mask and its gradients. It also uses NumPy, so that new shapes need no compilation.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from blockdiag import Routing, moba_attention, moba_routing
from tests.support import compiled_quickly, to_array


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoBACase:
    """One call, described by shapes and options; `padding` rows follow the last packed sequence of queries and of keys.

    `mask` is the fraction of keys that the key mask removes, None for no mask.
    """

    lengths: tuple[int, ...]
    key_lengths: tuple[int, ...] | None = None
    layout: Literal["batch", "offsets"] = "batch"
    padding: int = 0
    query_heads: int = 2
    key_heads: int = 2
    head_dim: int = 8
    dtype: str = "float32"
    block_size: int = 16
    top_k: int = 3
    scale: float | None = None
    is_causal: bool = True
    mask: float | None = None

    @property
    def both_lengths(self) -> list[tuple[int, int]]:
        """Return query tokens and key tokens of each sequence."""
        return list(zip(self.lengths, self.key_lengths or self.lengths, strict=True))

    def tokens_shape(self, lengths: tuple[int, ...]) -> tuple[int, ...]:
        return (len(lengths), lengths[0]) if self.layout == "batch" else (sum(lengths) + self.padding,)

    def operands(self, seed: int = 0) -> tuple[jax.Array, ...]:
        """Return random query, key, value, and cotangents of the output and the log-sum-exp."""
        generator = np.random.default_rng(seed)
        query_tokens, key_tokens = self.tokens_shape(self.lengths), self.tokens_shape(self.key_lengths or self.lengths)
        shapes = [
            (*query_tokens, self.query_heads, self.head_dim),
            *[(*key_tokens, self.key_heads, self.head_dim)] * 2,
            (*query_tokens, self.query_heads, self.head_dim),
            (*query_tokens, self.query_heads),
        ]
        *arrays, last = (generator.normal(size=shape).astype(np.float32) for shape in shapes)
        wide = jnp.float64 if self.dtype == "float64" else jnp.float32
        return *(to_array(x, self.dtype) for x in arrays), to_array(last, wide)

    def key_mask(self) -> np.ndarray | None:
        if self.mask is None:
            return None
        shape = self.tokens_shape(self.key_lengths or self.lengths)
        return np.random.default_rng(5).uniform(size=shape) >= self.mask

    @property
    def packing(self) -> dict[str, np.ndarray]:
        if self.layout == "batch":
            return {}
        result = {"sequence_offsets": np.cumsum([0, *self.lengths], dtype=np.int32)}
        if self.key_lengths is not None:
            result["key_sequence_offsets"] = np.cumsum([0, *self.key_lengths], dtype=np.int32)
        return result

    def attend(self, implementation: str | None, **more: Any) -> Callable[..., Any]:
        """Return the operation as a function of query, key and value, with output and log-sum-exp."""
        return functools.partial(
            moba_attention, scale=self.scale, return_residual=True, **self._options(implementation), **more
        )

    def route(self, implementation: str | None) -> Callable[..., Any]:
        return functools.partial(moba_routing, **self._options(implementation))

    def _options(self, implementation: str | None) -> dict[str, Any]:
        return dict(
            block_size=self.block_size,
            top_k=self.top_k,
            is_causal=self.is_causal,
            key_mask=self.key_mask(),
            implementation=implementation,
            **self.packing,
        )

    def results(self, implementation: str | None, routing: Routing | None = None) -> tuple[jax.Array, ...]:
        """Return output, log-sum-exp, and gradients of query, key and value."""
        return compiled_call(self, implementation)(routing, *self.operands())

    def sequences(self) -> list[tuple[tuple[int, ...], slice, tuple[int, ...], slice]]:
        """Return, for each sequence, the batch index and rows of its queries, and those of its keys."""
        if self.layout == "batch":
            return [((b,), slice(0, tq), (b,), slice(0, tk)) for b, (tq, tk) in enumerate(self.both_lengths)]
        result, query_start, key_start = [], 0, 0
        for tq, tk in self.both_lengths:
            result.append(((), slice(query_start, query_start + tq), (), slice(key_start, key_start + tk)))
            query_start, key_start = query_start + tq, key_start + tk
        return result


@functools.cache
def compiled_call(case: MoBACase, implementation: str | None) -> Callable[..., tuple[jax.Array, ...]]:
    """Return a function from a routing or None and operands to results, compiled once for all tests."""

    def compute(routing: Routing | None, *operands: jax.Array) -> tuple[jax.Array, ...]:
        more = {} if routing is None else {"routing": routing}
        return value_and_gradients(case.attend(implementation, **more), *operands)

    return compiled_quickly(compute)


def value_and_gradients(function: Callable[..., Any], *operands: jax.Array) -> tuple[jax.Array, ...]:
    """Return output and log-sum-exp of `function` on query, key and value, and their gradients."""
    *inputs, cotangent, log_sum_cotangent = operands
    (output, log_sum), pull_back = jax.vjp(function, *inputs)
    return output, log_sum, *pull_back((cotangent, log_sum_cotangent))


def dense_routing(case: MoBACase, query: Any, key: Any) -> np.ndarray:
    """Return the blocks that each query sees by definition, int32 [*batch, T, N, k], by loops in float64."""
    query, key = (np.asarray(x).astype(np.float64) for x in (query, key))
    mask = case.key_mask()
    result = np.full((*query.shape[:-1], case.top_k), -1, np.int32)
    for batch, query_rows, key_batch, key_rows in case.sequences():
        q, k = query[batch][query_rows], key[key_batch][key_rows]
        keep = np.ones(len(k), bool) if mask is None else mask[key_batch][key_rows]
        num_blocks = -(-len(k) // case.block_size)
        for i in range(len(q)):
            position = i + len(k) - len(q)
            if case.is_causal and position < 0:
                continue
            own = position // case.block_size
            for n in range(case.query_heads):
                scores = []
                for block in range(own if case.is_causal else num_blocks):
                    rows = np.arange(block * case.block_size, min((block + 1) * case.block_size, len(k)))
                    rows = rows[keep[rows]]
                    if len(rows):
                        mean = k[rows, n // (case.query_heads // case.key_heads)].mean(axis=0)
                        scores.append((-(q[i, n] @ mean), -block))
                blocks = [own] if case.is_causal else []
                blocks += [-block for _, block in sorted(scores)]
                blocks = blocks[: case.top_k]
                result[batch][query_rows.start + i, n, : len(blocks)] = blocks
    return result


def dense_mask(case: MoBACase, routing: np.ndarray) -> np.ndarray:
    """Return the keys that each query sees under a routing, bool [*batch, T, N, S]."""
    key_tokens = case.tokens_shape(case.key_lengths or case.lengths)[-1]
    result = np.zeros((*routing.shape[:-1], key_tokens), bool)
    mask = case.key_mask()
    for batch, query_rows, key_batch, key_rows in case.sequences():
        num_queries, num_keys = query_rows.stop - query_rows.start, key_rows.stop - key_rows.start
        for i in range(num_queries):
            position = i + num_keys - num_queries
            for n in range(case.query_heads):
                for block in routing[batch][query_rows.start + i, n].tolist():
                    end = min((block + 1) * case.block_size, num_keys)
                    if case.is_causal:
                        end = min(end, position + 1)
                    if block >= 0 and end > block * case.block_size:
                        start = key_rows.start + block * case.block_size
                        result[batch][query_rows.start + i, n, start : key_rows.start + end] = True
        if mask is not None:
            result[batch][query_rows] &= mask[key_batch][None, None]
    return result


def dense_results(case: MoBACase, routing: np.ndarray | None = None) -> tuple[np.ndarray, ...]:
    """Return the expected `MoBACase.results` in float64, with the routing by definition or a given one."""
    query, key, value, cotangent, log_sum_cotangent = (np.asarray(x).astype(np.float64) for x in case.operands())
    seen = dense_mask(case, dense_routing(case, query, key) if routing is None else routing)
    group_size = case.query_heads // case.key_heads
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    keys, values = (np.repeat(x, group_size, axis=-2) for x in (key, value))

    def sum_over_group(gradient: np.ndarray) -> np.ndarray:
        return gradient.reshape(*key.shape[:-1], group_size, key.shape[-1]).sum(axis=-2)

    scores = np.where(seen, scale * np.einsum("...inh,...jnh->...inj", query, keys), -np.inf)
    sees = seen.any(axis=-1)
    largest = np.where(sees, scores.max(axis=-1, initial=-np.inf), 0)
    exponentials = np.exp(scores - largest[..., None])
    total = np.where(sees, exponentials.sum(axis=-1), 1)
    weights = exponentials / total[..., None]
    weights_gradient = np.einsum("...inh,...jnh->...inj", cotangent, values)
    mean = (weights * weights_gradient).sum(axis=-1) - log_sum_cotangent
    scores_gradient = scale * weights * (weights_gradient - mean[..., None])
    return (
        np.einsum("...inj,...jnh->...inh", weights, values),
        np.where(sees, largest + np.log(total), -np.inf),
        np.einsum("...inj,...jnh->...inh", scores_gradient, keys),
        sum_over_group(np.einsum("...inj,...inh->...jnh", scores_gradient, query)),
        sum_over_group(np.einsum("...inj,...inh->...jnh", weights, cotangent)),
    )


def assert_accurate(case: MoBACase, actual: tuple[jax.Array, ...], expected: tuple[np.ndarray, ...]) -> None:
    """Assert that output, log-sum-exp and gradients are accurate to the case's dtype."""
    query, key, *_ = case.operands()
    tolerance = {"float64": 1e-11, "float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}[case.dtype]
    shapes = (query.shape, query.shape[:-1], query.shape, key.shape, key.shape)
    names = ("output", "log-sum-exp", "query gradient", "key gradient", "value gradient")
    for name, result, true, shape in zip(names, actual, expected, shapes, strict=True):
        assert result.shape == shape, name
        if name == "log-sum-exp":
            assert result.dtype == (jnp.float64 if case.dtype == "float64" else jnp.float32)
        else:
            assert result.dtype == query.dtype, name
        result = np.asarray(result).astype(np.float64)
        np.testing.assert_array_equal(np.isneginf(result), np.isneginf(true), name)
        finite = np.isfinite(true)
        largest = np.abs(true[finite]).max(initial=1.0)
        np.testing.assert_allclose(result[finite], true[finite], rtol=0, atol=tolerance * largest, err_msg=name)
