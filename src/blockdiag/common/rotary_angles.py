"""Angles and checks of rotary embedding, shared by JAX and torch. Imports neither."""

from typing import Any

import numpy as np


def rotary_angles(max_position: int, head_dim: int, theta: float) -> np.ndarray:
    """Return the angles position * theta ** (-2i / H), float64 [max_position, head_dim / 2].

    They are computed in float64 on the host, because float32 loses the fraction of a large angle.

    Raises:
        ValueError: an argument is out of range.
    """
    if max_position < 1:
        raise ValueError(f"`max_position` must be at least 1, got {max_position}; pass the longest sequence length")
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"`head_dim` must be even and at least 2, got {head_dim}; rotary embedding rotates pairs")
    if not theta > 0:
        raise ValueError(f"`theta` must be positive, got {theta}; the usual value is 10000.0")
    frequencies = float(theta) ** (-np.arange(0, head_dim, 2) / head_dim)
    return np.arange(max_position)[:, None] * frequencies[None, :]


def check_rotation(x: Any, cos: Any, sin: Any) -> int:
    """Check x [*batch, T, heads, H] against tables [T, H/2] or [*batch, T, H/2], and return H/2.

    Raises:
        ValueError: the shapes do not fit together.
    """
    shape = tuple(x.shape)
    if x.ndim < 3 or shape[-1] % 2:
        raise ValueError(f"`x` must have shape [*batch, T, heads, H] with H even, got {shape}")
    half = shape[-1] // 2
    for name, table in (("cos", cos), ("sin", sin)):
        if tuple(table.shape) not in ((shape[-3], half), (*shape[:-2], half)):
            raise ValueError(
                f"`{name}` must have shape ({shape[-3]}, {half}) or {(*shape[:-2], half)} to rotate `x` of shape "
                f"{shape}, got {tuple(table.shape)}; select the rows of the tokens first"
            )
    return half
