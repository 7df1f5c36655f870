"""Evoformer blocks in Flax with fused attention, trained to find pairs of columns that evolved together.

An alignment [rows, columns] and the pairs of its columns exchange information in four steps: attention along rows with
a pair bias, attention along columns, outer products of columns that update the pairs, and triangle attention over the
pairs. All of these attentions are one function in plain `jax.numpy`, which `fuse` turns into kernels with gradients of
biases and gates. (AlphaFold's block also has triangle multiplications, which are not attention.) `torch_evoformer.py`
trains the same model in PyTorch, with the same losses up to rounding.

python examples/evoformer.py [--steps 400] [--device cuda]
"""

from collections.abc import Sequence

import evoformer_data as shared
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from blockdiag import fuse

attend = fuse(shared.gated_attention)


def empty(*shape: int) -> nnx.Param:
    """Return a matrix [in, out] whose initial value `set_weights` provides."""
    return nnx.Param(jnp.zeros(shape))


def norm(channels: int) -> nnx.RMSNorm:
    return nnx.RMSNorm(channels, epsilon=shared.NORM_EPSILON, rngs=nnx.Rngs(0))


class Attention(nnx.Module):
    """Gated self-attention along axis 2 of [B, R, T, channels], with a bias from pairs [B, T, T, PAIR_CHANNELS]."""

    def __init__(self, channels: int, *, has_bias: bool = True) -> None:
        width = shared.HEADS * shared.HEAD_DIM
        self.norm = norm(channels)
        self.projection = empty(channels, 4 * width)
        self.out = empty(width, channels)
        self.has_bias = has_bias
        if has_bias:
            self.pair_norm = norm(shared.PAIR_CHANNELS)
            self.pair_bias = empty(shared.PAIR_CHANNELS, shared.HEADS)

    def __call__(self, tokens: jax.Array, pairs: jax.Array | None = None) -> jax.Array:
        projected = self.norm(tokens) @ self.projection[...]
        projected = projected.reshape(*tokens.shape[:-1], 4, shared.HEADS, shared.HEAD_DIM)
        operands = (projected[..., i, :, :] for i in range(4))  # query, key, value, gate [B, R, T, N, H]
        bias = self.pair_norm(pairs) @ self.pair_bias[...] if self.has_bias else None
        return attend(*operands, bias).reshape(*tokens.shape[:-1], -1) @ self.out[...]


class Transition(nnx.Module):
    """A feed-forward network."""

    def __init__(self, channels: int) -> None:
        self.norm = norm(channels)
        self.expand = empty(channels, 2 * channels)
        self.contract = empty(2 * channels, channels)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return jax.nn.relu(self.norm(tokens) @ self.expand[...]) @ self.contract[...]


class OuterProduct(nnx.Module):
    """Pairs [B, T, T, PAIR_CHANNELS] from products of columns of [B, R, T, CHANNELS], averaged over rows."""

    def __init__(self) -> None:
        self.norm = norm(shared.CHANNELS)
        self.projection = empty(shared.CHANNELS, 2 * shared.PRODUCT)
        self.out = empty(shared.PRODUCT**2, shared.PAIR_CHANNELS)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        left, right = jnp.split(self.norm(tokens) @ self.projection[...], 2, axis=-1)
        products = jnp.einsum("bric,brjd->bijcd", left, right) / tokens.shape[1]
        return products.reshape(*products.shape[:3], -1) @ self.out[...]


class Block(nnx.Module):
    """An Evoformer block; every part is residual."""

    def __init__(self) -> None:
        self.row = Attention(shared.CHANNELS)
        self.column = Attention(shared.CHANNELS, has_bias=False)
        self.transition = Transition(shared.CHANNELS)
        self.outer = OuterProduct()
        self.starting = Attention(shared.PAIR_CHANNELS)
        self.ending = Attention(shared.PAIR_CHANNELS)
        self.pair_transition = Transition(shared.PAIR_CHANNELS)

    def __call__(self, tokens: jax.Array, pairs: jax.Array) -> tuple[jax.Array, jax.Array]:
        tokens = tokens + self.row(tokens, pairs)
        tokens = tokens + jnp.swapaxes(self.column(jnp.swapaxes(tokens, 1, 2)), 1, 2)
        tokens = tokens + self.transition(tokens)
        pairs = pairs + self.outer(tokens)
        # Pair (i, j) attends to (i, k), with a bias from (j, k); then to (k, j), with one from (k, i).
        pairs = pairs + self.starting(pairs, pairs)
        turned = jnp.swapaxes(pairs, 1, 2)
        pairs = pairs + jnp.swapaxes(self.ending(turned, turned), 1, 2)
        return tokens, pairs + self.pair_transition(pairs)


class ContactModel(nnx.Module):
    """Logits [B, T, T] of contacts from letters int [B, R, T]."""

    def __init__(self) -> None:
        self.letters = empty(shared.LETTERS, shared.CHANNELS)
        self.distances = empty(2 * shared.COLUMNS - 1, shared.PAIR_CHANNELS)
        self.blocks = nnx.List([Block() for _ in range(shared.BLOCKS)])
        self.norm = norm(shared.PAIR_CHANNELS)
        self.head = empty(shared.PAIR_CHANNELS, 1)

    def __call__(self, letters: jax.Array) -> jax.Array:
        column = jnp.arange(shared.COLUMNS)
        distance = self.distances[...][column[:, None] - column[None, :] + shared.COLUMNS - 1]
        pairs = jnp.broadcast_to(distance[None], (len(letters), *distance.shape))
        tokens = self.letters[...][letters]
        for block in self.blocks:
            tokens, pairs = block(tokens, pairs)
        logits = (self.norm(pairs) @ self.head[...])[..., 0]
        return (logits + jnp.swapaxes(logits, 1, 2)) / 2

    def set_weights(self, weights: dict[str, np.ndarray]) -> None:
        """Take the initial weights that both frameworks start from."""
        missing = dict(weights)
        state = nnx.state(self, nnx.Param)
        for path, parameter in nnx.to_flat_state(state):
            name = ".".join(map(str, path))
            if name in missing:
                parameter[...] = jnp.asarray(missing.pop(name))
        assert not missing, f"no parameters for {list(missing)}"
        nnx.update(self, state)


def loss_of(model: ContactModel, letters: jax.Array, contacts: jax.Array) -> jax.Array:
    """Return the mean binary cross entropy of all pairs of columns."""
    return optax.sigmoid_binary_cross_entropy(model(letters), contacts).mean()


@nnx.jit
def training_step(model: ContactModel, optimizer: nnx.Optimizer, letters: jax.Array, contacts: jax.Array) -> jax.Array:
    """Update the model in place; return the loss before the update."""
    loss, gradients = nnx.value_and_grad(loss_of)(model, letters, contacts)
    optimizer.update(model, gradients)
    return loss


def train(steps: int, held_out: shared.Alignments, device: jax.Device) -> shared.Training:
    """Train a new model and score the held-out alignments."""
    # On a GPU, JAX would otherwise multiply float32 matrices in TensorFloat-32, which PyTorch does not.
    with jax.default_device(device), jax.default_matmul_precision("float32"):
        model = ContactModel()
        model.set_weights(shared.initial_weights())
        adam = optax.adam(shared.LEARNING_RATE, b1=shared.BETAS[0], b2=shared.BETAS[1], eps=shared.EPSILON)
        optimizer = nnx.Optimizer(model, adam, wrt=nnx.Param)
        losses = []
        for step in range(steps):
            batch = shared.alignments(shared.BATCH_SIZE, seed=step + 1)
            letters = jnp.asarray(batch.letters, jnp.int32)
            losses.append(float(training_step(model, optimizer, letters, jnp.asarray(batch.contacts))))
        scores = nnx.jit(lambda model, letters: model(letters))(model, jnp.asarray(held_out.letters, jnp.int32))
    return shared.Training(losses, np.asarray(scores))


def main(arguments: Sequence[str] | None = None) -> None:
    chosen = shared.parser("Trains Evoformer blocks to find contacts, in JAX and Flax.").parse_args(arguments)
    device = jax.devices()[0] if chosen.device == "auto" else jax.devices(chosen.device)[0]
    held_out = shared.alignments(shared.HELD_OUT, seed=shared.SEED)
    train(chosen.steps, held_out, device).report(held_out, chosen.losses)


if __name__ == "__main__":
    main()
