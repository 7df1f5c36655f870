"""NaN in one query, key or value of each operation: every implementation makes the same rows NaN as the reference.

Products of tiles multiply keys that a query does not see by weights of 0, and 0 * NaN is NaN. Implementations may
therefore differ in rows of the NaN's block that a causal mask hides from each other, and in no other rows.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag import block_diagonal_attention, key_convolution, moba_attention, moba_paged_attention, paged_attention

HEADS, KEY_HEADS, WIDTH = 4, 2, 16
ROW, HEAD, COLUMN = 20, 1, 3
BLOCK = 16


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation as a function of arrays with rows and of an implementation.

    Attributes:
        shapes: shapes of the operands.
        call: function that returns the results, each with rows.
        poisons: operand and index of each tested NaN.
        block_size: block size of a causal operation, within whose blocks rows may differ; 0 if none may.
        is_differentiated: whether gradients are compared too.
    """

    shapes: tuple[tuple[int, ...], ...]
    call: Callable[..., tuple[jax.Array, ...]]
    poisons: tuple[tuple[int, tuple[int, ...]], ...]
    block_size: int = 0
    is_differentiated: bool = True


def block_diagonal(*operands: jax.Array, implementation: str, **options: Any) -> tuple[jax.Array, ...]:
    return (block_diagonal_attention(*operands, implementation=implementation, **options),)


def moba(*operands: jax.Array, implementation: str, **options: Any) -> tuple[jax.Array, ...]:
    return moba_attention(
        *operands, block_size=BLOCK, top_k=2, return_residual=True, implementation=implementation, **options
    )


def paged(query: jax.Array, *pages: jax.Array, implementation: str, **options: Any) -> tuple[jax.Array, ...]:
    # Sequence 1 has the pages 1, 3 and 5, and its last key is row 2 of page 5.
    table, lengths = jnp.asarray([[0, 2, 4], [1, 3, 5]], jnp.int32), jnp.asarray([40, 35], jnp.int32)
    arguments = (query, *pages, table, lengths)
    return paged_attention(*arguments, return_residual=True, implementation=implementation, **options)


def moba_paged(*operands: jax.Array, implementation: str) -> tuple[jax.Array, ...]:
    *operands, centroids = operands
    table, lengths = jnp.asarray([[0, 2, 4], [1, 3, 5]], jnp.int32), jnp.asarray([40, 35], jnp.int32)
    options = dict(block_size=BLOCK, top_k=2, return_residual=True)
    return moba_paged_attention(*operands, table, lengths, centroids, implementation=implementation, **options)


def convolution(key: jax.Array, weights: jax.Array, *, implementation: str) -> tuple[jax.Array, ...]:
    return (key_convolution(key, weights, implementation=implementation),)


TRAINED = ((64, HEADS, WIDTH), (64, KEY_HEADS, WIDTH), (64, KEY_HEADS, WIDTH))
EACH = tuple((operand, (ROW, HEAD, COLUMN)) for operand in range(3))
CACHE = ((2, 2, HEADS, WIDTH), (6, 16, KEY_HEADS, WIDTH), (6, 16, KEY_HEADS, WIDTH))
# NaN is in a query, in a key of the first and of the last page of sequence 1, or in a value.
CACHED = ((0, (1, 0, 1, 3)), (1, (1, 5, 1, 3)), (1, (5, 1, 0, 0)), (2, (3, 2, 1, 3)))
FULL = functools.partial(block_diagonal, block_size=BLOCK)
LONG = functools.partial(block_diagonal, block_size=512)
OPERATIONS = {
    "block_diagonal": Operation(TRAINED, FULL, EACH),
    "block_diagonal, causal": Operation(TRAINED, functools.partial(FULL, is_causal=True), EACH, BLOCK),
    "block_diagonal, long blocks": Operation(
        tuple((600, *shape[1:]) for shape in TRAINED), functools.partial(LONG, is_causal=True), EACH, 512
    ),
    "moba": Operation(TRAINED, moba, EACH, BLOCK),
    "key_convolution": Operation(((64, 2, 16), (3, 2, 16)), convolution, ((0, (ROW, HEAD, COLUMN)), (1, (1, 1, 3)))),
    "paged": Operation(CACHE, paged, CACHED, is_differentiated=False),
    "paged, one split": Operation(CACHE, functools.partial(paged, num_splits=1), CACHED, is_differentiated=False),
    "paged, three splits": Operation(CACHE, functools.partial(paged, num_splits=3), CACHED, is_differentiated=False),
    # NaN in a mean key only keeps its block from being chosen.
    "moba_paged": Operation((*CACHE, (2, 2, KEY_HEADS, WIDTH)), moba_paged, CACHED, is_differentiated=False),
}


def results_of(operation: Operation, operands: list[jax.Array], implementation: str) -> list[np.ndarray]:
    call = functools.partial(operation.call, implementation=implementation)
    if not operation.is_differentiated:
        return [np.asarray(x) for x in call(*operands)]
    results, pull = jax.vjp(call, *operands)
    return [np.asarray(x) for x in (*results, *pull(tuple(jnp.ones_like(x) for x in results)))]


@pytest.mark.parametrize("implementation", ["xla", "triton"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_with_one_nan_makes_the_rows_of_the_reference_nan(name, implementation):
    operation = OPERATIONS[name]
    generator = np.random.default_rng(0)
    clean = [jnp.asarray(generator.normal(size=shape), jnp.float32) for shape in operation.shapes]
    for operand, index in operation.poisons:
        operands = list(clean)
        operands[operand] = operands[operand].at[index].set(jnp.nan)
        expected = results_of(operation, operands, "reference")
        assert np.isnan(expected[0]).any()
        for one, other in zip(results_of(operation, operands, implementation), expected, strict=True):
            rows = np.argwhere(np.isnan(one) != np.isnan(other))[:, 0]
            is_hidden = rows // max(operation.block_size, 1) == index[0] // max(operation.block_size, 1)
            # A key is hidden from queries before it, and a query from keys after it.
            is_hidden &= (rows < index[0]) if operand else (rows > index[0])
            assert is_hidden.all(), (operand, index, rows)


@pytest.mark.parametrize("implementation", ["reference", "xla", "triton"])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_paged_attention_with_non_finite_sinks_matches_the_reference(implementation, num_splits):
    generator = np.random.default_rng(0)
    query, *pages = (jnp.asarray(generator.normal(size=shape), jnp.float32) for shape in CACHE)
    table, lengths = jnp.asarray([[0, 2, 4], [1, 3, 5]], jnp.int32), jnp.asarray([0, 35], jnp.int32)
    sinks = jnp.asarray([-jnp.inf, jnp.nan, 0.5, jnp.inf])
    options = dict(sinks=sinks, num_splits=num_splits, return_residual=True)
    found = paged_attention(query, *pages, table, lengths, implementation=implementation, **options)
    expected = paged_attention(query, *pages, table, lengths, implementation="reference", **options)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    # Sequence 0 has no keys and attends only to its sink, if it has one.
    assert not np.asarray(found[0])[0, :, 0].any() and np.isneginf(found[1][0, :, 0]).all()
