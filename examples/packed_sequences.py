"""A training step without padding: sequences of different lengths in one packed array, with rotary embedding.

python examples/packed_sequences.py
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from blockdiag import Rotary, block_diagonal_attention, rotary_tables

HEADS, KEY_HEADS, HEAD_DIM, BLOCK_SIZE = 4, 2, 32, 64
ROOM = 1024  # rows of the packed array; rows after the last sequence are padding


tables = rotary_tables(max_position=ROOM, head_dim=HEAD_DIM)


def pack(lengths: list[int]) -> jax.Array:
    """Return the offsets int32 [sequences + 1] of concatenated sequences."""
    return jnp.asarray(np.cumsum([0, *lengths]), jnp.int32)


@functools.partial(jax.jit, donate_argnums=0)
def training_step(weights: jax.Array, inputs: jax.Array, offsets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Take one step of gradient descent on a projection to query, key and value.

    The offsets are data, so other lengths run the same compiled program.
    """

    def loss(weights: jax.Array) -> jax.Array:
        rows = (inputs @ weights).reshape(ROOM, HEADS + 2 * KEY_HEADS, HEAD_DIM)
        query, key, value = jnp.split(rows, (HEADS, HEADS + KEY_HEADS), axis=1)
        output = block_diagonal_attention(
            query, key, value, block_size=BLOCK_SIZE, sequence_offsets=offsets, rotary=Rotary(*tables), is_causal=True
        )
        return jnp.mean(jnp.square(output))

    value, gradient = jax.value_and_grad(loss)(weights)
    return weights - 0.1 * gradient, value


if __name__ == "__main__":
    width = HEADS * HEAD_DIM
    weights_key, inputs_key = jax.random.split(jax.random.key(0))
    weights = jax.random.normal(weights_key, (width, (HEADS + 2 * KEY_HEADS) * HEAD_DIM)) / np.sqrt(width)
    inputs = jax.random.normal(inputs_key, (ROOM, width))
    # Three batches with the same number of sequences: one compilation. A sequence may be empty.
    for lengths in ([300, 500, 200], [1, 63, 900], [0, 1024, 0]):
        weights, loss = training_step(weights, inputs, pack(lengths))
        print(f"sequences of {lengths}: loss {float(loss):.4f}")
