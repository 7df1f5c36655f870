"""Comparison of results that devices share with those of one device."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp


def check_shards(results: Sequence[jax.Array], expected: Sequence[jax.Array]) -> None:
    """Compare every device's part of a divided call with the results of one device.

    Raises:
        ArithmeticError: they differ.
    """
    for one, other in zip(results, expected, strict=True):
        for shard in one.addressable_shards:
            if shard.data.shape != other.shape:
                raise ArithmeticError(f"a device has {shard.data.shape} of the results, not {other.shape}")
            difference, norm = map(float, _distance(shard.data, jax.device_put(other, shard.device)))
            if not difference <= 1e-3 * norm:
                raise ArithmeticError(f"results of a device differ by {difference:.3g} of {norm:.3g}")


def check_sequence(results: Sequence[jax.Array], expected: Sequence[jax.Array]) -> None:
    """Compare the parts of a sequence with the results of one device.

    Raises:
        ArithmeticError: they differ.
    """
    for one, other in zip(results, expected, strict=True):
        axis = 1
        for shard in one.addressable_shards:
            start = shard.index[axis].start or 0
            part = jax.lax.slice_in_dim(other, start, start + shard.data.shape[axis], axis=axis)
            difference, norm = map(float, _distance(shard.data, jax.device_put(part, shard.device)))
            # Gradients of keys in bfloat16 are 0.3% from those of float32: those of one device, and those of gathered
            # keys, whose parts MoBA rounds before they are added up.
            if not difference <= 1e-2 * norm:
                raise ArithmeticError(f"results of a device differ by {difference:.3g} of {norm:.3g}")


@jax.jit
def _distance(x: jax.Array, other: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the norms of the difference and of the other."""
    wide, wanted = x.astype(jnp.float32), other.astype(jnp.float32)
    return jnp.linalg.norm((wide - wanted).ravel()), jnp.linalg.norm(wanted.ravel())
