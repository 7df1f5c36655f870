"""The zigzag order of tokens, which balances causal attention over devices.

With consecutive parts, the last of D devices has (2 D - 1) / D^2 of all causal pairs of a query and a key; its fair
share is 1 / D. In zigzag order, device d has parts d and 2 D - 1 - d of 2 D equal parts. It then has early queries,
which see few keys, and late queries, which see many.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from blockdiag.common.context_sizes import zigzag_owner


def zigzag_order(tokens: int, devices: int) -> np.ndarray:
    """Return the permutation into zigzag order: `x[zigzag_order(len(x), devices)]` is in this order.

    The reordered axis is then sharded in consecutive parts. Device d holds parts d and 2 devices - 1 - d of 2 devices
    equal parts, so all devices compute equally many scores under a causal mask. Positions move with the tokens: the
    order itself is the position of each token. It is the `positions` of `Rotary`, and `jnp.take(table, order, axis=0)`
    reorders a table.

    Args:
        tokens: number of tokens, a multiple of 2 devices.
        devices: number of devices that share the tokens.

    Returns:
        int32 [tokens], a permutation. `inverse_zigzag_order` inverts it.

    Raises:
        ValueError: `tokens` is not a multiple of 2 devices.

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
    """Return the inverse of `zigzag_order`: the index of each token in zigzag order.

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
    """Exchange a device's consecutive part of an array for its part in zigzag order, by two exchanges of halves.

    Args:
        x: the part, with an even number of tokens.
        axis: name of the mesh axis, manual here.
        tokens: index of the token axis of `x`.
    """
    devices = jax.lax.axis_size(axis)
    halves = jnp.split(x, 2, axis=tokens)
    # Device d sends parts 2 d and 2 d + 1. All even parts go to different devices, and so do all odd parts.
    even, odd = (
        jax.lax.ppermute(half, axis, [(device, zigzag_owner(2 * device + one, devices)) for device in range(devices)])
        for one, half in enumerate(halves)
    )
    return _ordered(even, odd, axis, tokens)


def from_zigzag(x: jax.Array, axis: str, tokens: int) -> jax.Array:
    """Exchange a device's part in zigzag order for its consecutive part; the inverse of `to_zigzag`."""
    devices = jax.lax.axis_size(axis)
    first, second = jnp.split(x, 2, axis=tokens)
    is_odd = jax.lax.axis_index(axis) % 2 == 1
    # Device d has parts d and 2 devices - 1 - d. Exactly one of them is even.
    even, odd = jnp.where(is_odd, second, first), jnp.where(is_odd, first, second)
    halves = [
        jax.lax.ppermute(half, axis, [(zigzag_owner(2 * device + one, devices), device) for device in range(devices)])
        for one, half in enumerate((even, odd))
    ]
    return jnp.concatenate(halves, axis=tokens)


def _ordered(even: Any, odd: Any, axis: str, tokens: int) -> jax.Array:
    """Concatenate a device's even and odd part, the earlier one first."""
    is_odd = jax.lax.axis_index(axis) % 2 == 1
    return jnp.concatenate([jnp.where(is_odd, odd, even), jnp.where(is_odd, even, odd)], axis=tokens)
