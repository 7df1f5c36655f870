"""XLA implementation of a fused region: a scan over key tiles that never materialises all scores.

The method is that of FlashAttention (Dao et al., 2022): an online softmax forward, and recomputed scores backward.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from blockdiag.common.derivatives import on_common_axes
from blockdiag.fusion.ir.factors import NO_KEY
from blockdiag.fusion.ir.tree import Region
from blockdiag.fusion.lowering.diagonals import distance_tile
from blockdiag.fusion.lowering.tile_program import (
    canonical_result,
    leaf_array,
    mapped,
    region_dtype,
    result_array,
    tile_function,
    value_array,
    value_labels,
)

TILE_KEYS = 256
"""The number of keys in a tile."""

_WITH_KEYS = ("key", "column", "score")


def available() -> None:
    """Return None: this implementation is always available."""


def supports(region: Region) -> None:
    """Return None: this implementation computes every region."""
    del region


def forward(region: Region, leaves: Sequence[Any], value: Any) -> tuple[Any, Any]:
    """Return the result, with the axes of the product that it replaces, and the log-sum-exp [batch.., q].

    Without a softmax, the second result is 0.
    """
    dtype = region_dtype(region)
    labels = [*(leaf.labels for leaf in region.leaves), value_labels(region)]

    def single(*arrays: Any) -> tuple[Any, Any]:
        *given, values = arrays
        count = region.sizes["k"]
        rows, size = region.sizes["q"], min(TILE_KEYS, max(count, 1))
        tiles_of = _key_tiles(region, given, values, size)
        first = _extras(region, given, dtype)

        def step(carry: Any, at: Any) -> tuple[Any, None]:
            largest, total, output = carry
            tile, keys = at
            score, weight = _tile(region, dtype, _merge(region, given, tile[:-1]), keys, count)
            if score is None:
                power = jnp.ones((rows, size), dtype)
            else:
                # A softmax does not depend on the subtracted maximum, so no gradient flows through it. Recomputation
                # for second derivatives may round differently, and then no score equals the maximum.
                new = jnp.maximum(largest, lax.stop_gradient(score.max(axis=1)))
                base = jnp.where(new <= NO_KEY, 0, new)
                power = jnp.exp(score - base[:, None])
                shrink = jnp.exp(largest - base)
                total, output, largest = total * shrink + power.sum(1), output * shrink[:, None], new
            return (largest, total, output + _times(power * weight, tile[-1], dtype)), None

        largest = jnp.full((rows,), -jnp.inf, dtype)
        total = jnp.zeros((rows,), dtype)
        for extra in first:
            logit = jnp.broadcast_to(extra, (rows, 1))[:, 0]
            new = jnp.maximum(largest, logit)
            base = jnp.where(new == -jnp.inf, 0, new)
            total, largest = total * jnp.exp(largest - base) + jnp.exp(logit - base), new
        carry = (largest, total, jnp.zeros((rows, values.shape[1]), dtype))
        # Under `jax.shard_map`, the initial carry must vary over the same mesh axes as the carry in the loop.
        carry, _ = on_common_axes(carry, arrays)
        (largest, total, output), _ = lax.scan(step, carry, tiles_of)
        if region.score is None:
            return output, total
        # Rows that see no key are 0.
        is_empty = total == 0
        total = jnp.where(is_empty, 1, total)
        norm = jnp.where(is_empty, 0, 1 / total)
        return output * norm[:, None], jnp.where(is_empty, -jnp.inf, largest + jnp.log(total))

    arrays = _canonical(region, leaves, value)
    output, log_sum = mapped(single, labels, region.batch, region.sizes)(*arrays)
    return result_array(region, output).astype(region.dtype), log_sum


def backward(
    region: Region,
    leaves: Sequence[Any],
    value: Any,
    output: Any,
    log_sum: Any,
    cotangent: Any,
    log_sum_cotangent: Any = None,
) -> tuple[list[Any], Any]:
    """Return the gradients of the leaves, None for a leaf without one, and the gradient of the values."""
    dtype = region_dtype(region)
    labels = [*(leaf.labels for leaf in region.leaves), value_labels(region), *[region.batch] * 4]
    wanted = [leaf.has_gradient for leaf in region.leaves]

    def single(*arrays: Any) -> tuple[Any, ...]:
        *given, values, out, logs, grad, logs_grad = arrays
        count = region.sizes["k"]
        size = min(TILE_KEYS, max(count, 1))
        grad = grad.astype(dtype)
        delta = ((out.astype(dtype) * grad).sum(1) - logs_grad.astype(dtype))[:, None]
        base = jnp.where(logs == -jnp.inf, 0, logs)[:, None]

        def step(carry: Any, at: Any) -> tuple[Any, Any]:
            tile, keys = at
            whole = _merge(region, given, tile[:-1])
            floating = _floating(region, whole)

            def compute(*some: Any) -> Any:
                rest = iter(some)
                every = [next(rest) if is_wanted else x for x, is_wanted in zip(whole, wanted, strict=True)]
                score, weight = _tile(region, dtype, every, keys, count)
                score = jnp.zeros((1, 1), dtype) if score is None else score
                return on_common_axes(score, weight, arrays)[:2]

            (score, weight), pull = jax.vjp(compute, *floating)
            power = jnp.ones_like(weight) if region.score is None else jnp.exp(score - base)
            product = _times(grad, tile[-1].T, dtype)
            slope = power * (weight * product - delta)
            slopes = pull(
                (jnp.zeros_like(score) if region.score is None else _cut(slope, score), _cut(power * product, weight))
            )
            rows = [x for x, leaf in zip(_spread(slopes, wanted), region.leaves, strict=True)]
            kept = [
                jnp.zeros(()) if x is None or leaf.role in _WITH_KEYS else x
                for x, leaf in zip(rows, region.leaves, strict=True)
            ]
            sent = [
                jnp.zeros(()) if x is None or leaf.role not in _WITH_KEYS else x
                for x, leaf in zip(rows, region.leaves, strict=True)
            ]
            carry = [total + x.astype(total.dtype) for total, x in zip(carry, kept, strict=True)]
            return carry, (sent, _times((power * weight).T, grad, dtype))

        start = [
            jnp.zeros(x.shape, dtype) if is_wanted and leaf.role not in _WITH_KEYS else jnp.zeros((), dtype)
            for x, leaf, is_wanted in zip(given, region.leaves, wanted, strict=True)
        ]
        start, _ = on_common_axes(start, arrays)
        sums, (tiles, value_tiles) = lax.scan(step, start, _key_tiles(region, given, values, size))
        grads = []
        for leaf, x, is_wanted, total, tile in zip(region.leaves, given, wanted, sums, tiles, strict=True):
            if not is_wanted:
                grads.append(jnp.zeros(()))
            elif leaf.role == "key":
                grads.append(tile.reshape(tile.shape[0] * tile.shape[1], x.shape[1])[:count])
            elif leaf.role in _WITH_KEYS:
                grads.append(tile.transpose(1, 0, 2).reshape(x.shape[0], -1)[:, :count])
            else:
                grads.append(total)
        if region.extras:
            floating = _floating(region, given)

            def extras(*some: Any) -> Any:
                rest = iter(some)
                every = [next(rest) if is_wanted else x for x, is_wanted in zip(given, wanted, strict=True)]
                found = [jnp.broadcast_to(x, (region.sizes["q"], 1)) for x in _extras(region, every, dtype)]
                return on_common_axes(found, arrays)[0]

            found, pull = jax.vjp(extras, *floating)
            more = _spread(pull([-jnp.exp(x - base) * delta for x in found]), wanted)
            grads = [x if y is None else x + y.astype(x.dtype) for x, y in zip(grads, more, strict=True)]
        return (*grads, value_tiles.reshape(-1, values.shape[1])[:count])

    arrays = [
        *_canonical(region, leaves, value),
        canonical_result(region, output),
        log_sum,
        canonical_result(region, cotangent),
        jnp.zeros_like(log_sum) if log_sum_cotangent is None else log_sum_cotangent,
    ]
    *grads, value_grad = mapped(single, labels, region.batch, region.sizes)(*arrays)
    return [
        _pulled_back(
            lambda x, leaf=leaf: leaf_array(leaf, x, region.batch, region.sizes),
            array.astype(leaf.gradient_dtype),
            _summed(grad, leaf.labels, region.batch),
        )
        if is_wanted
        else None
        for leaf, array, grad, is_wanted in zip(region.leaves, leaves, grads, wanted, strict=True)
    ], _pulled_back(
        lambda x: value_array(region, x),
        value.astype(region.value_gradient_dtype),
        _summed(value_grad, value_labels(region), region.batch),
    )


def _canonical(region: Region, leaves: Sequence[Any], value: Any) -> list[Any]:
    arrays = [leaf_array(leaf, x, region.batch, region.sizes) for leaf, x in zip(region.leaves, leaves, strict=True)]
    arrays = [_in_order(x) if leaf.role == "query" else x for leaf, x in zip(region.leaves, arrays, strict=True)]
    return [*arrays, value_array(region, value)]


def _in_order(query: Any) -> Any:
    """Keep XLA from changing the axis order of 16-bit queries.

    XLA folds transposes into products after it has rewritten them into products that the CPU supports. The CPU has no
    16-bit product with float32 accumulation and a transposed left operand.
    """
    return lax.optimization_barrier(query) if query.dtype.itemsize < 4 else query


def _pulled_back(function: Any, array: Any, grad: Any) -> Any:
    """Return the gradient of an array, from the gradient of its image under a function that only moves elements."""
    result, pull = jax.vjp(function, array)
    return pull(grad.reshape(result.shape).astype(result.dtype))[0]


def _summed(grad: Any, labels: Sequence[str], batch: Sequence[str]) -> Any:
    """Sum a gradient over the batch labels that its array lacks."""
    return grad.sum(tuple(axis for axis, label in enumerate(batch) if label not in labels))


def _cut(grad: Any, like: Any) -> Any:
    """Return the cotangent of a tile from that of its broadcast."""
    axes = tuple(axis for axis in (0, 1) if like.shape[axis] == 1 and grad.shape[axis] != 1)
    return grad.sum(axes, keepdims=True).astype(like.dtype) if axes else grad.astype(like.dtype)


def _floating(region: Region, arrays: Sequence[Any]) -> list[Any]:
    """Return the arrays, or tiles, of the leaves with a gradient, in the dtype of the gradient."""
    pairs = zip(region.leaves, arrays, strict=True)
    return [x.astype(leaf.gradient_dtype) for leaf, x in pairs if leaf.has_gradient]


def _spread(some: Sequence[Any], wanted: Sequence[bool]) -> list[Any]:
    rest = iter(some)
    return [next(rest) if is_wanted else None for is_wanted in wanted]


def _key_tiles(region: Region, given: Sequence[Any], values: Any, size: int) -> tuple[list[Any], Any]:
    """Return the inputs of the scan: leaves in key tiles, with the values last, and the key positions of each tile.

    A leaf without keys is represented by a scalar.
    """
    count = region.sizes["k"]
    tiles = -(-count // size)
    padded = tiles * size - count
    found = []
    for leaf, x in zip(region.leaves, given, strict=True):
        if leaf.role == "key":
            found.append(jnp.pad(x, ((0, padded), (0, 0))).reshape(tiles, size, x.shape[1]))
        elif leaf.role in _WITH_KEYS:
            found.append(jnp.pad(x, ((0, 0), (0, padded))).reshape(x.shape[0], tiles, size).transpose(1, 0, 2))
        else:
            found.append(jnp.zeros((tiles,)))
    found.append(jnp.pad(values, ((0, padded), (0, 0))).reshape(tiles, size, values.shape[1]))
    return found, jnp.arange(tiles * size).reshape(tiles, size)


def _merge(region: Region, given: Sequence[Any], tile: Sequence[Any]) -> list[Any]:
    return [x if leaf.role in _WITH_KEYS else y for leaf, x, y in zip(region.leaves, tile, given, strict=True)]


def _tile(region: Region, dtype: Any, tiles: Sequence[Any], keys: Any, count: int) -> tuple[Any, Any]:
    """Return the scores and weights of a key tile, [rows, keys of the tile].

    Scores beyond the last key are -inf, and weights are 0. The scores are None without a softmax.
    """
    tiles = [
        distance_tile(x, keys[0], region.sizes["q"], count, keys.size) if leaf.role == "distance" else x
        for leaf, x in zip(region.leaves, tiles, strict=True)
    ]
    score, weight = tile_function((region.score, region.weight), region.leaves, dtype)(*tiles)
    is_key = (keys < count)[None, :]
    weight = jnp.ones((1, 1), dtype) if weight is None else weight
    shape = (region.sizes["q"], keys.size)
    weight = jnp.where(is_key, jnp.broadcast_to(weight, shape), 0)
    if score is not None:
        score = jnp.where(is_key, jnp.broadcast_to(score, shape), -jnp.inf)
    return score, weight


def _extras(region: Region, given: Sequence[Any], dtype: Any) -> list[Any]:
    return list(tile_function(region.extras, region.leaves, dtype)(*given))


def _times(left: Any, right: Any, dtype: Any) -> Any:
    return lax.dot(left, right.astype(left.dtype), precision=lax.Precision.HIGHEST, preferred_element_type=dtype)
