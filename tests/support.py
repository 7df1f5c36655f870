"""Shared code of tests of block-diagonal attention: cases, an exact result computed by loops, allowed errors.

`exact_attention` is independent of the library: NumPy, float64, one block and one head at a time.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from blockdiag import Rotary, block_diagonal_attention
from blockdiag.ops.block_diagonal.problem import BLOCK_DIAGONAL

RESULTS = ("output", "query gradient", "key gradient", "value gradient")


def to_array(x: Any, dtype: Any = None) -> jax.Array:
    """Return `x` as a JAX array, rounded by NumPy: `jnp.asarray` compiles a program for each shape and dtype."""
    return jax.device_put(np.asarray(x) if dtype is None else np.asarray(x).astype(jnp.dtype(dtype)))


def runnable_implementations() -> list[str]:
    """Return the names of the implementations that can run in this process, including interpreters."""
    return [
        name
        for name, implementation in BLOCK_DIAGONAL.implementations.items()
        if implementation.why_unavailable() is None
    ]


@dataclasses.dataclass(frozen=True)
class Block:
    """Rows [start, start + length) of the flattened token axis; `position` is the position of the first row."""

    start: int
    length: int
    position: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RotaryCase:
    """The rotary tables of a case and the options for their lookup."""

    tables: Literal["position", "explicit", "token"] = "position"
    interleaved: bool = False
    apply_to: tuple[str, ...] = ("query", "key")
    dtype: str = "float32"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One call of the operation, described by shapes and options.

    `layout` determines the meaning of `lengths`: equal sequences of a batch, sequences packed by offsets, or blocks
        packed by lengths. `padding` rows follow the last sequence.
    """

    lengths: tuple[int, ...]
    layout: Literal["batch", "offsets", "lengths"] = "batch"
    padding: int = 0
    query_heads: int = 2
    key_heads: int = 2
    head_dim: int = 16
    dtype: str = "float32"
    block_size: int = 16
    is_causal: bool = False
    scale: float | None = None
    rotary: RotaryCase | None = None

    @property
    def tokens(self) -> int:
        return sum(self.lengths) + self.padding

    @property
    def tokens_shape(self) -> tuple[int, ...]:
        return (len(self.lengths), self.lengths[0]) if self.layout == "batch" else (self.tokens,)

    @property
    def blocks(self) -> list[Block]:
        """Return every block that has rows."""
        blocks, start = [], 0
        for length in self.lengths:
            blocks += [
                Block(start + position, min(self.block_size, length - position), position)
                for position in range(0, length, self.block_size)
            ]
            start += length
        return blocks

    @property
    def packing(self) -> dict[str, np.ndarray]:
        """Return the arguments that describe the packing."""
        if self.layout == "offsets":
            return {"sequence_offsets": np.cumsum([0, *self.lengths], dtype=np.int32)}
        if self.layout == "lengths":
            return {"block_lengths": np.asarray(self.lengths, np.int32)}
        return {}

    def operands(self, seed: int = 0) -> tuple[jax.Array, ...]:
        """Return random query, key, value and cotangent of the output."""
        generator = np.random.default_rng(seed)
        heads = (self.query_heads, self.key_heads, self.key_heads, self.query_heads)
        arrays = (generator.normal(size=(*self.tokens_shape, n, self.head_dim)) for n in heads)
        return tuple(to_array(x.astype(np.float32), self.dtype) for x in arrays)

    def rotary_arguments(self, seed: int = 1) -> Rotary | None:
        """Return random tables (cos² + sin² is not 1) and positions."""
        if self.rotary is None:
            return None
        generator = np.random.default_rng(seed)
        longest = max((block.position + block.length for block in self.blocks), default=1)
        rows = self.tokens_shape if self.rotary.tables == "token" else (longest + 3,)
        cos, sin = (generator.uniform(-1, 1, (*rows, self.head_dim // 2)).astype(np.float32) for _ in range(2))
        positions = None
        if self.rotary.tables == "explicit":
            positions = to_array(generator.integers(0, rows[0], self.tokens_shape), jnp.int32)
        return Rotary(
            to_array(cos, self.rotary.dtype),
            to_array(sin, self.rotary.dtype),
            positions=positions,
            per_token=self.rotary.tables == "token",
            interleaved=self.rotary.interleaved,
            apply_to=self.rotary.apply_to,
        )

    def table_rows(self, rotary: Rotary) -> np.ndarray:
        """Return the row of the flattened tables for every token."""
        if self.rotary.tables == "token":
            return np.arange(self.tokens)
        if self.rotary.tables == "explicit":
            return np.asarray(rotary.positions).reshape(-1)
        rows = np.zeros(self.tokens, np.int64)
        for block in self.blocks:
            rows[block.start : block.start + block.length] = block.position + np.arange(block.length)
        return rows

    def attend(self, implementation: str | None, **more: Any) -> Callable[..., jax.Array]:
        """Return the operation as a function of query, key and value."""
        return functools.partial(
            block_diagonal_attention,
            block_size=self.block_size,
            rotary=self.rotary_arguments(),
            scale=self.scale,
            is_causal=self.is_causal,
            implementation=implementation,
            **self.packing,
            **more,
        )

    def results(self, implementation: str | None, seed: int = 0) -> tuple[jax.Array, ...]:
        """Return the output and the gradients of query, key and value."""
        return compiled_call(self, implementation)(*self.operands(seed))


@functools.cache
def compiled_call(case: Case, implementation: str | None) -> Callable[..., tuple[jax.Array, ...]]:
    """Return a function from operands to output and gradients, compiled once for all operands and tests."""
    return compiled_quickly(functools.partial(value_and_gradients, case.attend(implementation)))


def compiled_quickly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `jax.jit` of a function without expensive optimisations: compilation dominates the time of tests."""
    options = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    return jax.jit(function, compiler_options=options)


def value_and_gradients(function: Callable[..., jax.Array], *operands: jax.Array) -> tuple[jax.Array, ...]:
    """Return the output of `function` and the gradients of its operands; the last operand is the output's cotangent."""
    *inputs, cotangent = operands
    output, pull_back = jax.vjp(function, *inputs)
    return output, *pull_back(cotangent)


def exact_attention(case: Case, operands: Sequence[Any]) -> tuple[np.ndarray, ...]:
    """Return the output and the gradients of query, key and value in float64, block by block and head by head."""
    query, key, value, cotangent = (
        np.asarray(x).astype(np.float64).reshape(case.tokens, *x.shape[-2:]) for x in operands
    )
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    rotations = _exact_rotations(case)
    query, key, value = (_turn(x, rotation) for x, rotation in zip((query, key, value), rotations, strict=True))
    output, query_gradient, key_gradient, value_gradient = (np.zeros_like(x) for x in (query, query, key, value))
    group_size = case.query_heads // case.key_heads
    for block in case.blocks:
        rows = slice(block.start, block.start + block.length)
        for n in range(case.query_heads):
            k = n // group_size
            scores = scale * query[rows, n] @ key[rows, k].T
            if case.is_causal:
                scores = np.where(np.tri(block.length, dtype=bool), scores, -np.inf)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            output[rows, n] = weights @ value[rows, k]
            weights_gradient = cotangent[rows, n] @ value[rows, k].T
            mean = (weights * weights_gradient).sum(axis=1, keepdims=True)
            scores_gradient = scale * weights * (weights_gradient - mean)
            query_gradient[rows, n] += scores_gradient @ key[rows, k]
            key_gradient[rows, k] += scores_gradient.T @ query[rows, n]
            value_gradient[rows, k] += weights.T @ cotangent[rows, n]
    gradients = (
        _turn(x, rotation, back=True)
        for x, rotation in zip((query_gradient, key_gradient, value_gradient), rotations, strict=True)
    )
    shapes = [np.shape(x) for x in (operands[0], *operands[:3])]
    return tuple(x.reshape(shape) for x, shape in zip((output, *gradients), shapes, strict=True))


def _exact_rotations(case: Case) -> tuple[np.ndarray | None, ...]:
    """Return, for query, key and value, a rotation matrix for each token, [tokens, H, H], or None."""
    if case.rotary is None:
        return None, None, None
    rotary = case.rotary_arguments()
    rows, half = case.table_rows(rotary), case.head_dim // 2
    cos, sin = (
        np.asarray(x).astype(np.float64).reshape(math.prod(x.shape[:-1]), half)[rows] for x in (rotary.cos, rotary.sin)
    )
    matrix = np.zeros((case.tokens, case.head_dim, case.head_dim))
    for i in range(half):
        first, second = (2 * i, 2 * i + 1) if rotary.interleaved else (i, i + half)
        matrix[:, first, first], matrix[:, first, second] = cos[:, i], -sin[:, i]
        matrix[:, second, first], matrix[:, second, second] = sin[:, i], cos[:, i]
    return tuple(matrix if name in rotary.apply_to else None for name in ("query", "key", "value"))


def _turn(x: np.ndarray, matrices: np.ndarray | None, back: bool = False) -> np.ndarray:
    if matrices is None:
        return x
    return np.einsum("tji,tnj->tni" if back else "tij,tnj->tni", matrices, x)


def naive_attention(case: Case, operands: Sequence[Any]) -> tuple[np.ndarray, ...]:
    """Return output and gradients of a dense computation in the case's own dtype."""
    dtype = np.asarray(operands[0]).dtype
    *inputs, cotangent = (np.asarray(x).reshape(case.tokens, *x.shape[-2:]) for x in operands)
    rotations = [None if matrix is None else matrix.astype(dtype) for matrix in _exact_rotations(case)]

    def turn(x: np.ndarray, matrix: np.ndarray | None, back: bool = False) -> np.ndarray:
        # Products of 16-bit numbers are summed in float32.
        wide = None if matrix is None else matrix.astype(np.result_type(dtype, np.float32))
        return _turn(x.astype(np.result_type(dtype, np.float32)), wide, back).astype(dtype)

    inputs = [turn(x, rotation) for x, rotation in zip(inputs, rotations, strict=True)]
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    output, _, *gradients = naive_dense_attention(_dense_mask(case), scale, *inputs, cotangent)
    gradients = [turn(x, rotation, back=True) for x, rotation in zip(gradients, rotations, strict=True)]
    shapes = [np.shape(x) for x in (operands[0], *operands[:3])]
    return tuple(x.reshape(shape) for x, shape in zip((output, *gradients), shapes, strict=True))


def naive_dense_attention(
    is_seen: np.ndarray,
    scale: float,
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    cotangent: np.ndarray,
    log_sum_cotangent: np.ndarray | float = 0.0,
) -> tuple[np.ndarray, ...]:
    """Return output, log-sum-exp and gradients of query, key and value, from a mask of all scores, bool [(N,) T, S].

    The computation uses NumPy, so new shapes need no compilation. Products and intermediate results are rounded to the
    dtype of the operands, as by a compiler that keeps sums and the softmax in float32.
    """
    dtype = query.dtype
    wide = np.result_type(dtype, np.float32)
    group_size = query.shape[1] // key.shape[1]

    def heads_first(x: np.ndarray, group_size: int = 1) -> np.ndarray:
        return np.repeat(x.astype(wide).swapaxes(0, 1), group_size, axis=0)

    def rounded(x: np.ndarray) -> np.ndarray:
        return x.astype(dtype).astype(wide)

    def heads_last(x: np.ndarray, group_size: int = 1) -> np.ndarray:
        summed = rounded(x).reshape(-1, group_size, *x.shape[1:]).sum(axis=1)
        return summed.swapaxes(0, 1).astype(dtype)

    q, k, v, do = (
        heads_first(query),
        heads_first(key, group_size),
        heads_first(value, group_size),
        heads_first(cotangent),
    )
    scale = wide.type(np.asarray(scale, dtype))
    scores = np.where(is_seen, rounded(scale * rounded(q @ k.swapaxes(1, 2))), -np.inf)
    largest = np.maximum(scores.max(axis=-1, keepdims=True, initial=-np.inf), np.finfo(wide).min)
    exponentials = np.exp(scores - largest)
    total = exponentials.sum(axis=-1, keepdims=True)
    sees = total > 0
    weights = rounded(exponentials / np.where(sees, total, 1))
    log_sum = np.where(sees, np.log(np.where(sees, total, 1)) + largest, -np.inf)[..., 0]
    weights_gradient = rounded(do @ v.swapaxes(1, 2))
    mean = (weights * weights_gradient).sum(axis=-1, keepdims=True)
    if np.ndim(log_sum_cotangent):
        mean = mean - np.asarray(log_sum_cotangent, wide).T[..., None]
    scores_gradient = rounded(scale * rounded(weights * (weights_gradient - mean)))
    return (
        heads_last(weights @ v),
        log_sum.T,
        heads_last(scores_gradient @ k),
        heads_last(scores_gradient.swapaxes(1, 2) @ q, group_size),
        heads_last(weights.swapaxes(1, 2) @ do, group_size),
    )


def _dense_mask(case: Case) -> np.ndarray:
    mask = np.zeros((case.tokens, case.tokens), bool)
    for block in case.blocks:
        rows = slice(block.start, block.start + block.length)
        mask[rows, rows] = np.tri(block.length, dtype=bool) if case.is_causal else True
    return mask


def largest_error(actual: Any, exact: np.ndarray) -> float:
    """Return the largest absolute difference in float64; infinite if `actual` has a NaN."""
    difference = np.abs(np.asarray(actual).astype(np.float64) - exact)
    return math.inf if np.isnan(difference).any() else float(difference.max(initial=0.0))


def assert_accurate(case: Case, actual: Sequence[Any], operands: Sequence[jax.Array]) -> None:
    """Assert that each result errs by at most twice the naive computation's error, plus two units in the last place."""
    exact = exact_attention(case, operands)
    naive = naive_attention(case, operands) if case.tokens else exact
    for name, result, true, rough in zip(RESULTS, actual, exact, naive, strict=True):
        assert result.shape == true.shape, name
        assert result.dtype == operands[0].dtype, name
        unit = float(jnp.finfo(result.dtype).eps) * np.abs(true).max(initial=0.0)
        # An exact 0, such as the query gradient of a one-row block, may be off by a float32 rounding error.
        unit += 16 * float(jnp.finfo(jnp.float64 if result.dtype == jnp.float64 else jnp.float32).eps)
        allowed = 2 * largest_error(rough, true) + 2 * unit
        error = largest_error(result, true)
        assert error <= allowed, f"{name} of {case} errs by {error}, allowed {allowed}"
