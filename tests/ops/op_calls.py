"""Small calls of every public operation, as functions of named arrays whose shapes follow from a size."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag import (
    Rotary,
    append_to_pages,
    block_diagonal_attention,
    fuse,
    fused_qkv_block_attention,
    key_convolution,
    merge_attention_states,
    moba_attention,
    moba_paged_attention,
    moba_routing,
    paged_attention,
)

type Shapes = dict[str, tuple[Any, ...]]

TOKENS, HEADS, KEY_HEADS, WIDTH = 40, 4, 2, 16
COMPILED = ("reference", "xla")
IMPLEMENTATIONS = (*COMPILED, "triton")


def _no_integers(size: int) -> dict[str, np.ndarray]:
    del size
    return {}


@dataclasses.dataclass(frozen=True)
class OpCall:
    """A call of a public operation.

    Attributes:
        function: function of the arrays, by name, and of `implementation`.
        shapes: shapes of the float32 arrays, given a batch size or number of sequences, which may be symbolic.
        integer_shapes: shapes of the int32 arrays, likewise.
        integers: function of the size that returns their values.
        differentiated: names of the arrays whose gradients are computed.
        implementations: names of its implementations.
    """

    function: Callable[..., Any]
    shapes: Callable[[Any], Shapes]
    integer_shapes: Callable[[Any], Shapes] = _no_integers
    integers: Callable[[int], dict[str, np.ndarray]] = _no_integers
    differentiated: tuple[str, ...] = ()
    implementations: tuple[str, ...] = IMPLEMENTATIONS

    def arrays(self, size: int, seed: int = 0) -> dict[str, jax.Array]:
        """Return arrays of a size."""
        draw = np.random.default_rng(seed)
        floats = {
            name: jnp.asarray(draw.normal(size=shape).astype(np.float32)) for name, shape in self.shapes(size).items()
        }
        integers = {name: jnp.asarray(x, jnp.int32) for name, x in self.integers(size).items()}
        assert {name: x.shape for name, x in integers.items()} == self.integer_shapes(size)
        return floats | integers

    def types(self, size: Any) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the types of the arrays, for a size that may be symbolic."""
        floats = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in self.shapes(size).items()}
        return floats | {
            name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in self.integer_shapes(size).items()
        }

    def bound(self, implementation: str | None) -> Callable[..., Any]:
        """Return the function of its arrays."""
        return functools.partial(self.function, implementation=implementation)

    def loss(self, implementation: str | None) -> Callable[..., jax.Array]:
        """Return the sum of squares of the results, as a function of the arrays."""

        def compute(**arrays: jax.Array) -> jax.Array:
            return sum(jnp.sum(x**2) for x in jax.tree.leaves(self.function(implementation=implementation, **arrays)))

        return compute

    def gradients(self, implementation: str | None, *, is_checkpointed: bool = False) -> Callable[..., Any]:
        """Return the gradients of `loss` with respect to the differentiated arrays."""
        loss = self.loss(implementation)

        def compute(**arrays: jax.Array) -> Any:
            others = {name: x for name, x in arrays.items() if name not in self.differentiated}
            given = {name: arrays[name] for name in self.differentiated}
            function = lambda given: loss(**given, **others)  # noqa: E731
            return jax.grad(jax.checkpoint(function) if is_checkpointed else function)(given)

        return compute


def _tokens(batch: Any, tokens: Any = TOKENS) -> Shapes:
    return {
        "query": (batch, tokens, HEADS, WIDTH),
        "key": (batch, tokens, KEY_HEADS, WIDTH),
        "value": (batch, tokens, KEY_HEADS, WIDTH),
    }


def _packed(count: Any) -> Shapes:
    return {name: (count * shape[1], *shape[2:]) for name, shape in _tokens(count).items()}


def _offsets(count: int) -> dict[str, np.ndarray]:
    return {"offsets": np.arange(count + 1) * (TOKENS - 3)}


def _offsets_shape(count: Any) -> Shapes:
    return {"offsets": (count + 1,)}


def _cache(batch: Any, queries: int = 1) -> Shapes:
    pages = (2 * batch, 16, KEY_HEADS, WIDTH)
    return {"query": (batch, queries, HEADS, WIDTH), "key_pages": pages, "value_pages": pages}


def _table(batch: int) -> dict[str, np.ndarray]:
    return {"table": np.arange(2 * batch)[::-1].reshape(batch, 2), "lengths": 20 + np.arange(batch) % 7}


def _table_shape(batch: Any) -> Shapes:
    return {"table": (batch, 2), "lengths": (batch,)}


def _packed_table(batch: int) -> dict[str, np.ndarray]:
    return _table(batch) | {"offsets": 2 * np.arange(batch + 1)}


def _packed_table_shape(batch: Any) -> Shapes:
    return _table_shape(batch) | {"offsets": (batch + 1,)}


def _block_diagonal(query: Any, key: Any, value: Any, *, implementation: Any, **options: Any) -> Any:
    options = {"block_size": 16} | options
    return block_diagonal_attention(query, key, value, implementation=implementation, **options)


def _rotated(cos: Any, sin: Any, **arguments: Any) -> Any:
    return _block_diagonal(rotary=Rotary(cos, sin), is_causal=True, **arguments)


def _with_offsets(offsets: Any, **arguments: Any) -> Any:
    return _block_diagonal(sequence_offsets=offsets, **arguments)


def _with_lengths(lengths: Any, **arguments: Any) -> Any:
    return _block_diagonal(block_lengths=lengths, **arguments)


def _projected(x: Any, weights: Any, offsets: Any = None, *, implementation: Any) -> Any:
    sizes = dict(query_heads=HEADS, key_heads=KEY_HEADS, head_dim=WIDTH, block_size=16)
    return fused_qkv_block_attention(x, weights, sequence_offsets=offsets, implementation=implementation, **sizes)


def _moba(query: Any, key: Any, value: Any, offsets: Any = None, mask: Any = None, **options: Any) -> Any:
    mask = None if mask is None else mask > 0
    options = dict(block_size=16, top_k=2, return_residual=True, sequence_offsets=offsets, key_mask=mask) | options
    return moba_attention(query, key, value, **options)


def _routing(query: Any, key: Any, value: Any, *, implementation: Any) -> Any:
    del value
    return moba_routing(query, key, block_size=16, top_k=2, implementation=implementation).indices


def _lists(query: Any, key: Any, value: Any, *, implementation: Any) -> Any:
    del value
    return moba_routing(query, key, block_size=16, top_k=2, implementation=implementation).to_block_lists()


def _convolved(key: Any, weights: Any, offsets: Any = None, *, implementation: Any) -> Any:
    return key_convolution(key, weights, sequence_offsets=offsets, implementation=implementation)


def _paged(query: Any, key_pages: Any, value_pages: Any, table: Any, lengths: Any, **options: Any) -> Any:
    return paged_attention(query, key_pages, value_pages, table, lengths, return_residual=True, **options)


def _contiguous(lengths: Any, **arguments: Any) -> Any:
    return _paged(table=None, lengths=lengths, **arguments)


def _packed_queries(offsets: Any, **arguments: Any) -> Any:
    return _paged(query_offsets=offsets, max_query_length=2, **arguments)


def _scaled(key_scale: Any, **arguments: Any) -> Any:
    return _paged(key_scale=key_scale, num_splits=2, **arguments)


def _appended(key: Any, value: Any, pages: Any, table: Any, lengths: Any, **options: Any) -> Any:
    return append_to_pages(key, value, pages, pages, table, lengths, **options)


def _appended_packed(offsets: Any, **arguments: Any) -> Any:
    return _appended(query_offsets=offsets, **arguments)


def _moba_paged(centroids: Any, query: Any, key_pages: Any, value_pages: Any, table: Any, lengths: Any,
                *, implementation: Any) -> Any:  # fmt: skip
    operands = (query, key_pages, value_pages, table, lengths, centroids)
    return moba_paged_attention(*operands, block_size=16, top_k=2, return_residual=True, implementation=implementation)


def _merged(outputs: Any, log_sums: Any, *, implementation: Any) -> Any:
    del implementation
    return merge_attention_states(outputs, log_sums)


def _attend(query: Any, key: Any, value: Any) -> Any:
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) / WIDTH**0.5
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, axis=-1), value)


def _attend_causally(query: Any, key: Any, value: Any, slopes: Any) -> Any:
    row = jnp.arange(query.shape[1], dtype=jnp.int32)
    away = (row[:, None] - row[None, :]).astype(query.dtype)
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) - slopes[None, :, None, None] * away[None, None]
    scores = jnp.where(away[None, None] >= 0, scores, -jnp.inf)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, axis=-1), value)


def _fused(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*, implementation: Any, **arrays: Any) -> Any:
        return fuse(function, implementation=implementation)(**arrays)

    return call


def _one_head_width(batch: Any) -> Shapes:
    return dict.fromkeys(("query", "key", "value"), (batch, TOKENS, KEY_HEADS, WIDTH))


_TRAINED = ("query", "key", "value")
_TABLES = {"cos": (TOKENS, WIDTH // 2), "sin": (TOKENS, WIDTH // 2)}
_WEIGHTS = {"weights": (24, (HEADS + 2 * KEY_HEADS) * WIDTH)}

CALLS = {
    "block_diagonal": OpCall(_block_diagonal, _tokens, differentiated=_TRAINED),
    "block_diagonal, long blocks": OpCall(
        functools.partial(_block_diagonal, block_size=512, is_causal=True), _tokens, differentiated=_TRAINED
    ),
    "block_diagonal, rotary": OpCall(_rotated, lambda b: _tokens(b) | _TABLES, differentiated=_TRAINED),
    "block_diagonal, offsets": OpCall(_with_offsets, _packed, _offsets_shape, _offsets, _TRAINED),
    "block_diagonal, lengths": OpCall(
        _with_lengths,
        _packed,
        lambda b: {"lengths": (3 * b,)},
        lambda b: {"lengths": np.tile([16, 3, 14], b)},
        _TRAINED,
    ),
    "fused_qkv": OpCall(_projected, lambda b: {"x": (b, TOKENS, 24)} | _WEIGHTS, differentiated=("x", "weights")),
    "fused_qkv, offsets": OpCall(
        _projected, lambda b: {"x": (b * TOKENS, 24)} | _WEIGHTS, _offsets_shape, _offsets, ("x", "weights")
    ),
    "moba": OpCall(_moba, _tokens, differentiated=_TRAINED),
    "moba, key mask": OpCall(_moba, lambda b: _tokens(b) | {"mask": (b, TOKENS)}, differentiated=_TRAINED),
    "moba, not causal": OpCall(functools.partial(_moba, is_causal=False), _tokens, differentiated=_TRAINED),
    "moba, offsets": OpCall(_moba, _packed, _offsets_shape, _offsets, _TRAINED),
    "moba_routing": OpCall(_routing, _tokens),
    "to_block_lists": OpCall(_lists, _tokens),
    "key_convolution": OpCall(
        _convolved,
        lambda b: {"key": (b, TOKENS, KEY_HEADS, WIDTH), "weights": (3, KEY_HEADS, WIDTH)},
        differentiated=("key", "weights"),
    ),
    "key_convolution, offsets": OpCall(
        _convolved,
        lambda b: {"key": (b * TOKENS, KEY_HEADS, WIDTH), "weights": (3, KEY_HEADS, WIDTH)},
        _offsets_shape,
        _offsets,
        ("key", "weights"),
    ),
    "paged": OpCall(_paged, _cache, _table_shape, _table),
    "paged, packed": OpCall(
        _packed_queries,
        lambda b: _cache(b) | {"query": (2 * b, HEADS, WIDTH)},
        _packed_table_shape,
        _packed_table,
    ),
    "paged, scales": OpCall(_scaled, lambda b: _cache(b) | {"key_scale": (b, KEY_HEADS)}, _table_shape, _table),
    "paged, contiguous": OpCall(
        _contiguous,
        lambda b: _cache(b) | dict.fromkeys(("key_pages", "value_pages"), (b, 32, KEY_HEADS, WIDTH)),
        lambda b: {"lengths": (b,)},
        lambda b: {"lengths": 20 + np.arange(b) % 7},
    ),
    "append": OpCall(
        _appended,
        lambda b: dict.fromkeys(("key", "value"), (b, 2, KEY_HEADS, WIDTH)) | {"pages": _cache(b)["key_pages"]},
        _table_shape,
        _table,
    ),
    "append, packed": OpCall(
        _appended_packed,
        lambda b: dict.fromkeys(("key", "value"), (2 * b, KEY_HEADS, WIDTH)) | {"pages": _cache(b)["key_pages"]},
        _packed_table_shape,
        _packed_table,
    ),
    "moba_paged": OpCall(
        _moba_paged, lambda b: _cache(b) | {"centroids": (b, 2, KEY_HEADS, WIDTH)}, _table_shape, _table
    ),
    "merge": OpCall(
        _merged,
        lambda b: {"outputs": (2, b, 3, HEADS, WIDTH), "log_sums": (2, b, 3, HEADS)},
        differentiated=("outputs", "log_sums"),
        implementations=("reference",),
    ),
    "fuse": OpCall(_fused(_attend), _one_head_width, differentiated=_TRAINED, implementations=("xla", "triton")),
    "fuse, causal": OpCall(
        _fused(_attend_causally),
        lambda b: _one_head_width(b) | {"slopes": (KEY_HEADS,)},
        differentiated=_TRAINED,
        implementations=("xla", "triton"),
    ),
}


def pairs(names: tuple[str, ...] | None = None) -> list[tuple[str, str | None]]:
    """Return pairs of call name and implementation, including None for the default implementation."""
    return [(name, x) for name in names or CALLS for x in (None, *CALLS[name].implementations)]


def mark_covered(cases: Iterable[tuple[str, str | None]]) -> list[Any]:
    """Return test parameters for these pairs; those covered by others are marked `exhaustive`.

    Without the marked ones, every operation still runs with every implementation. A name with a comma, such as
    "moba, offsets", is a variant of an operation. Every variant runs with kernels and with the default implementation
    ("xla" on a CPU). Errors of a variant with one of `COMPILED` under the tested transformation are left to
    `./do test-all`.
    """

    def is_covered(name: str, implementation: str | None) -> bool:
        return implementation == "xla" or ("," in name and implementation in COMPILED)

    return [pytest.param(*case, marks=[pytest.mark.exhaustive] if is_covered(*case) else []) for case in cases]


@functools.cache
def expected_results(name: str, size: int, seed: int = 0, *, is_gradient: bool = False) -> Any:
    """Return the results of a call, or its gradients, for `arrays(size, seed)` by its first implementation.

    Test files compare every implementation and transformation with these results, which are computed once.
    """
    call = CALLS[name]
    function = (call.gradients if is_gradient else call.bound)(call.implementations[0])
    return jax.tree.map(np.asarray, jax.jit(function)(**call.arrays(size, seed)))
