"""The zigzag order of tokens, which gives every device as much causal attention as any other.

In consecutive parts the last of D devices has (2 D - 1) / D^2 of all causal pairs of a query and a key, where a fair
share is 1 / D. In zigzag order device d has parts d and 2 D - 1 - d of 2 D equal parts: early queries, which see few
keys, and late ones, which see many.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from blockdiag.common.context_sizes import zigzag_owner


def zigzag_order(tokens: int, devices: int) -> np.ndarray:
    """The places of tokens in zigzag order: `x[zigzag_order(len(x), devices)]` is in this order.

    Device d of several that share an axis in consecutive parts then has parts d and 2 devices - 1 - d of 2 devices
    equal parts, so that all devices see equally many keys under a causal mask. Positions, such as those of
    `Rotary(positions=)` or `jnp.take(table, order, axis=0)`, move like the tokens: the order itself is the position of
    each token.

    Args:
        tokens: a multiple of 2 devices.
        devices: that share the tokens.

    Returns:
        int32 [tokens], a permutation. `inverse_zigzag_order` takes it back.

    Raises:
        ValueError: `tokens` is no such multiple.

    References:
        Pairs of an early and a late part: the context parallelism of Llama 3 (2024).

    Example:
        >>> from blockdiag import zigzag_order
        >>> zigzag_order(8, 2)
        array([0, 1, 6, 7, 2, 3, 4, 5], dtype=int32)
    """
    if devices < 1 or tokens % (2 * devices):
        raise ValueError(
            f"zigzag order needs tokens that are a multiple of twice the {devices} devices, got {tokens}; pad them"
        )
    parts = np.arange(tokens, dtype=np.int32).reshape(2 * devices, -1)
    return np.stack([parts[:devices], parts[devices:][::-1]], axis=1).reshape(tokens)


def inverse_zigzag_order(tokens: int, devices: int) -> np.ndarray:
    """The permutation that takes `zigzag_order` back: where in zigzag order each token is.

    Args:
        tokens, devices: see `zigzag_order`.

    Returns:
        int32 [tokens].

    Raises:
        ValueError: see `zigzag_order`.

    References:
        Pairs of an early and a late part: the context parallelism of Llama 3 (2024).

    Example:
        >>> import numpy as np
        >>> from blockdiag import inverse_zigzag_order, zigzag_order
        >>> order, inverse = zigzag_order(8, 2), inverse_zigzag_order(8, 2)
        >>> np.arange(8)[order][inverse]
        array([0, 1, 2, 3, 4, 5, 6, 7])
    """
    return np.argsort(zigzag_order(tokens, devices)).astype(np.int32)


def to_zigzag(x: jax.Array, axis: str, tokens: int) -> jax.Array:
    """A device's consecutive part of an array as its part in zigzag order, by two exchanges of halves.

    Args:
        x: the part; an even number of tokens.
        axis: of the mesh, manual here.
        tokens: which axis of `x` has them.
    """
    devices = jax.lax.axis_size(axis)
    halves = jnp.split(x, 2, axis=tokens)
    # Device d sends parts 2 d and 2 d + 1. Even parts all go to different devices, and so do odd ones.
    even, odd = (
        jax.lax.ppermute(half, axis, [(device, zigzag_owner(2 * device + one, devices)) for device in range(devices)])
        for one, half in enumerate(halves)
    )
    return _ordered(even, odd, axis, tokens)


def from_zigzag(x: jax.Array, axis: str, tokens: int) -> jax.Array:
    """A device's part in zigzag order as its consecutive part; see `to_zigzag`."""
    devices = jax.lax.axis_size(axis)
    first, second = jnp.split(x, 2, axis=tokens)
    is_odd = jax.lax.axis_index(axis) % 2 == 1
    # Device d has parts d and 2 devices - 1 - d, one of them even.
    even, odd = jnp.where(is_odd, second, first), jnp.where(is_odd, first, second)
    halves = [
        jax.lax.ppermute(half, axis, [(zigzag_owner(2 * device + one, devices), device) for device in range(devices)])
        for one, half in enumerate((even, odd))
    ]
    return jnp.concatenate(halves, axis=tokens)


def _ordered(even: Any, odd: Any, axis: str, tokens: int) -> jax.Array:
    """The earlier part first."""
    is_odd = jax.lax.axis_index(axis) % 2 == 1
    return jnp.concatenate([jnp.where(is_odd, odd, even), jnp.where(is_odd, even, odd)], axis=tokens)
