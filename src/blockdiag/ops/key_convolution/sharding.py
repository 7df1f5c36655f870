"""Sharding of key convolution: sequences of equal length, heads and head elements are independent.

The token axis of packed sequences, which a tile table describes, stays whole; only their heads and head elements are
divided. The gradient of weights that devices share is a sum over the sequences of all devices.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from jax import Array

from blockdiag.common.dtypes import accumulation_dtype
from blockdiag.common.rule import Dim, Rule
from blockdiag.common.shards import Part
from blockdiag.ops.key_convolution.problem import KeyConvolutionProblem

_CHANNELS: tuple[Dim, Dim] = (("heads",), ("features",))


def rule(
    problem: KeyConvolutionProblem, implementations: tuple[str, ...] | None, method: str, operands: tuple[Any, ...]
) -> Rule:
    """Return the sharding rule of a canonical call of one group.

    Args:
        problem: the call.
        implementations: names of the implementations to try, or None.
        method: "forward" or "backward".
        operands: key, weights, tile table, and in a backward call the cotangent of the output. The rule has labels for
            those that are not None.
    """
    key = (("sequences", "tokens"), *_CHANNELS)
    weights = ((), (), *_CHANNELS)
    _, _, tiles, *cotangent = operands
    has_sequences = problem.sequence_length is not None and problem.tokens != 0
    sequences = problem.tokens // (problem.sequence_length or 1) if has_sequences else 1
    sizes = {
        "sequences": sequences,
        "tokens": problem.tokens // sequences,
        "heads": problem.key_heads,
        "features": problem.head_dim,
    }
    return Rule(
        "key_convolution",
        repr((problem, implementations, method)),
        (key, weights, *([] if tiles is None else [((), ())]), *([key] if cotangent else [])),
        {"forward": (key,), "backward": (key, weights)}[method],
        tuple(sizes.items()),
        frozenset(("sequences", "heads", "features")),
    )


def local_problem(problem: KeyConvolutionProblem, method: str, part: Part) -> KeyConvolutionProblem:
    """Return the call of one device."""
    if not part.starts:
        return problem
    sizes = part.sizes
    tokens = sizes["sequences"] * sizes["tokens"]
    is_sum = method == "backward" and "sequences" in part.starts
    return dataclasses.replace(
        problem,
        tokens=tokens,
        num_tiles=problem.num_tiles * tokens // max(problem.tokens, 1),
        key_heads=sizes["heads"],
        head_dim=sizes["features"],
        # The gradient of narrower weights is rounded only once, after the sum over devices.
        weights_dtype=accumulation_dtype(problem.dtype).name if is_sum else problem.weights_dtype,
    )


def with_wide_sums(problem: KeyConvolutionProblem, method: str, compute: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the computation of one device: it casts weights to its call's dtype, and returns their gradient wide.

    The gradient of the weights is float32 (float64), so that it is rounded after the sum over devices.

    Args:
        problem: the call of one device.
        method: "forward" or "backward".
        compute: function that computes the method.
    """
    if method != "backward":
        return compute

    def gradients(key: Array, weights: Array, tiles: Array | None, cotangent: Array) -> tuple[Array, Array]:
        d_key, d_weights = compute(key, weights.astype(problem.weights_dtype), tiles, cotangent)
        return d_key, d_weights.astype(accumulation_dtype(problem.dtype))

    return gradients
