"""Axes of a public function's operands that may stay sharded over explicit mesh axes."""

from collections.abc import Sequence


def batch_and_heads(axes: int) -> Sequence[int]:
    """Return the first batch axis and the heads of [*batch, T, N, H]; other axes before heads are merged into it."""
    return (-2,) if axes == 3 else (0, -2)


def batch(axes: int) -> Sequence[int]:
    """Return the first batch axis of [*batch, T, D]."""
    return () if axes == 2 else (0,)


def batch_and_channels(axes: int) -> Sequence[int]:
    """Return the first batch axis, the heads and the head elements of [*batch, T, K, H]."""
    return (-2, -1) if axes == 3 else (0, -2, -1)
