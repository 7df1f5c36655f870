"""Which axes of a public function's operands may stay sharded where axes of the mesh are explicit."""

from collections.abc import Sequence


def batch_and_heads(axes: int) -> Sequence[int]:
    """Return the first batch axis and the heads of [*batch, T, N, H]; other axes before heads are merged into it."""
    return (-2,) if axes == 3 else (0, -2)


def batch(axes: int) -> Sequence[int]:
    """Return the first batch axis of [*batch, T, D]."""
    return () if axes == 2 else (0,)


def batch_and_channels(axes: int) -> Sequence[int]:
    """Of [*batch, T, K, H] the first batch axis, heads, and elements of heads."""
    return (-2, -1) if axes == 3 else (0, -2, -1)
