"""Checks of the arguments of key convolution, of JAX or torch, and the static description of the call."""

import math
from typing import Any

import numpy as np

from blockdiag.common import validation
from blockdiag.common.arrays import dtype_name
from blockdiag.ops.key_convolution.problem import MAX_SIZE, KeyConvolutionProblem, count_tiles


def describe_key_convolution(
    key: Any, weights: Any, *, sequence_offsets: Any, activation: Any, residual: Any
) -> KeyConvolutionProblem:
    """Check every argument and describe the call; reads only shape and dtype of key and weights.

    Raises:
        ValueError: an argument is wrong; the message names it, its value and the remedy.
    """
    _check_key(key)
    _check_weights(key, weights)
    if activation not in (None, "silu"):
        raise ValueError(
            f'`activation` must be "silu" or None, got {activation!r}; apply another activation to the result with '
            "activation=None and residual=False"
        )
    if not isinstance(residual, (bool, np.bool_)):
        raise ValueError(f"`residual` must be True or False, known when tracing, got {residual!r}; pass a bool")
    *tokens_shape, key_heads, head_dim = key.shape
    tokens, length = math.prod(tokens_shape), tokens_shape[-1]
    if sequence_offsets is not None:
        if len(tokens_shape) != 1:
            raise ValueError(
                f"`sequence_offsets` describes one packed token axis, key [T, K, H], got a key of shape "
                f"{tuple(key.shape)}; reshape the batch into the token axis, or map over it with jax.vmap"
            )
        validation.check_sequence_offsets(tokens, sequence_offsets, operand="key")
    num_sequences = None if sequence_offsets is None else sequence_offsets.shape[0] - 1
    tile_rows, num_tiles = count_tiles(tokens, length, num_sequences)
    return KeyConvolutionProblem(
        tokens=tokens,
        key_heads=key_heads,
        head_dim=head_dim,
        size=weights.shape[0],
        groups=1,
        dtype=dtype_name(key.dtype),
        weights_dtype=dtype_name(weights.dtype),
        activation=activation,
        has_residual=bool(residual),
        sequence_length=length if sequence_offsets is None else None,
        tile_rows=tile_rows,
        num_tiles=num_tiles,
    )


def _check_key(key: Any) -> None:
    if key.ndim not in (3, 4):
        raise ValueError(
            f"`key` must have shape [B, T, K, H] or [T, K, H], got {tuple(key.shape)}; "
            "reshape more batch axes into one, or map over them with jax.vmap"
        )
    if key.shape[-2] == 0 or key.shape[-1] == 0:
        raise ValueError(f"`key` must have at least one head of at least one element, got shape {tuple(key.shape)}")
    validation.check_dtype("key", key.dtype)


def _check_weights(key: Any, weights: Any) -> None:
    heads = tuple(key.shape[-2:])
    if weights.ndim != 3 or tuple(weights.shape[1:]) != heads or not 1 <= weights.shape[0] <= MAX_SIZE:
        raise ValueError(
            f"`weights` must have shape (size, {heads[0]}, {heads[1]}) with size 1..{MAX_SIZE} to match `key` of shape "
            f"{tuple(key.shape)}, got {tuple(weights.shape)}; the last row belongs to the current token"
        )
    if dtype_name(weights.dtype) not in ("float32", dtype_name(key.dtype)) or (
        dtype_name(key.dtype) == "float64" != dtype_name(weights.dtype)
    ):
        raise ValueError(
            f"`weights` must have the dtype of `key`, {key.dtype}, or float32 for a narrower key, got {weights.dtype}; "
            "cast one of them"
        )
