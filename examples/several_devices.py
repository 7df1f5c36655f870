"""Attention over all devices of this machine with `jax.shard_map`: the batch is split, gradients of weights are summed.

python examples/several_devices.py
"""

import jax
import jax.numpy as jnp

from blockdiag import block_diagonal_attention

HEADS, HEAD_DIM = 4, 32
WIDTH = HEADS * HEAD_DIM


def loss_of(weights: jax.Array, inputs: jax.Array) -> jax.Array:
    """Mean square of attention over inputs [B, T, width] that weights [3, width, width] project."""
    rows = jnp.einsum("btw,pwv->pbtv", inputs, weights).reshape(3, *inputs.shape[:-1], HEADS, HEAD_DIM)
    return jnp.mean(jnp.square(block_diagonal_attention(*rows, block_size=16)))


def split_loss_of(weights: jax.Array, inputs: jax.Array, mesh: jax.sharding.Mesh) -> jax.Array:
    """The same, each device computing its share of the batch."""

    def on_one_device(weights: jax.Array, inputs: jax.Array) -> jax.Array:
        return jax.lax.pmean(loss_of(weights, inputs), "data")

    share = jax.shard_map(on_one_device, mesh=mesh, in_specs=(jax.P(), jax.P("data")), out_specs=jax.P())
    return share(weights, inputs)


if __name__ == "__main__":
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    weights_key, inputs_key = jax.random.split(jax.random.key(0))
    weights = jax.random.normal(weights_key, (3, WIDTH, WIDTH)) / WIDTH**0.5
    inputs = jax.random.normal(inputs_key, (2 * jax.device_count(), 40, WIDTH))
    alone = jax.jit(jax.value_and_grad(loss_of))(weights, inputs)
    split = jax.jit(jax.value_and_grad(lambda weights, inputs: split_loss_of(weights, inputs, mesh)))(weights, inputs)
    difference = max(float(jnp.abs(one - other).max()) for one, other in zip(alone, split, strict=True))
    print(
        f"{jax.device_count()} device(s): loss {float(split[0]):.6f}, largest difference to one device {difference:.1e}"
    )
