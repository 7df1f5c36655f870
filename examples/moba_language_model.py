"""A small language model in Flax with mixture of block attention, trained on real text with contexts of 1,024 bytes.

Each query sees its own block of 32 keys and the three earlier blocks with the best mean keys, instead of all earlier
keys. Keys first pass through a learned convolution over three tokens. `torch_moba_language_model.py` trains the same
model in PyTorch, with the same losses up to rounding.

python examples/moba_language_model.py [--steps 300] [--device cuda]
"""

import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import language_data as shared
import numpy as np
import optax
from flax import nnx

from blockdiag import apply_rotary, key_convolution, moba_attention, rotary_tables


class Layer(nnx.Module):
    """MoBA, then a feed-forward network; both residual, [B, T, WIDTH] in and out."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        width, head_dim = shared.WIDTH, shared.WIDTH // shared.HEADS
        self.attention_norm = nnx.RMSNorm(width, epsilon=shared.NORM_EPSILON, rngs=rngs)
        self.qkv = nnx.Linear(width, 3 * width, use_bias=False, rngs=rngs)
        self.key_taps = nnx.Param(jnp.zeros((shared.KEY_TAPS, shared.HEADS, head_dim)))
        self.out = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.feed_forward_norm = nnx.RMSNorm(width, epsilon=shared.NORM_EPSILON, rngs=rngs)
        self.expand = nnx.Linear(width, shared.HIDDEN, use_bias=False, rngs=rngs)
        self.contract = nnx.Linear(shared.HIDDEN, width, use_bias=False, rngs=rngs)

    def attend(self, tokens: jax.Array) -> jax.Array:
        batch, length, width = tokens.shape
        head_dim = width // shared.HEADS
        heads = self.qkv(tokens).reshape(batch, length, 3, shared.HEADS, head_dim)
        query, key, value = heads[:, :, 0], heads[:, :, 1], heads[:, :, 2]  # [B, T, N, H]
        key = key_convolution(key, self.key_taps[...])
        tables = rotary_tables(length, head_dim, shared.ROTARY_THETA)
        query, key = apply_rotary(query, *tables), apply_rotary(key, *tables)
        attended = moba_attention(query, key, value, block_size=shared.BLOCK_SIZE, top_k=shared.TOP_K)
        return self.out(attended.reshape(tokens.shape))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        tokens = tokens + self.attend(self.attention_norm(tokens))
        return tokens + self.contract(nnx.gelu(self.expand(self.feed_forward_norm(tokens)), approximate=True))


class LanguageModel(nnx.Module):
    """Logits of every next byte: int [B, T] -> [B, T, 256]."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.embedding = nnx.Embed(shared.VOCABULARY, shared.WIDTH, rngs=rngs)
        self.layers = nnx.List([Layer(rngs=rngs) for _ in range(shared.LAYERS)])
        self.norm = nnx.RMSNorm(shared.WIDTH, epsilon=shared.NORM_EPSILON, rngs=rngs)
        self.head = nnx.Linear(shared.WIDTH, shared.VOCABULARY, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))

    def set_weights(self, weights: dict[str, np.ndarray]) -> None:
        """Take the initial weights that both frameworks start from."""
        values = {name: jnp.asarray(value) for name, value in weights.items()}
        self.embedding.embedding[...] = values["embedding"]
        for index, layer in enumerate(self.layers):
            layer.key_taps[...] = values[f"layers.{index}.key_taps"]
            for name in ("qkv", "out", "expand", "contract"):
                getattr(layer, name).kernel[...] = values[f"layers.{index}.{name}"]
        self.head.kernel[...] = values["head"]


def losses_of(model: LanguageModel, batch: jax.Array) -> jax.Array:
    """Return the cross entropy of every byte of `batch` [B, T + 1] after the first, in nats, [B, T]."""
    return optax.softmax_cross_entropy_with_integer_labels(model(batch[:, :-1]), batch[:, 1:])


@nnx.jit
def training_step(model: LanguageModel, optimizer: nnx.Optimizer, batch: jax.Array) -> jax.Array:
    """Update the model in place; return the loss before the update."""
    loss, gradients = nnx.value_and_grad(lambda model: losses_of(model, batch).mean())(model)
    optimizer.update(model, gradients)
    return loss


def train(steps: int, device: jax.Device) -> shared.Training:
    """Train a new model and evaluate it on held-out text."""
    text, held_out = shared.load_text()
    # On a GPU, JAX would otherwise multiply float32 matrices in TensorFloat-32, which PyTorch does not.
    with jax.default_device(device), jax.default_matmul_precision("float32"):
        model = LanguageModel()
        model.set_weights(shared.initial_weights())
        adam = optax.adam(shared.LEARNING_RATE, b1=shared.BETAS[0], b2=shared.BETAS[1], eps=shared.EPSILON)
        optimizer = nnx.Optimizer(model, adam, wrt=nnx.Param)
        losses = []
        begin = time.perf_counter()
        for step, batch in enumerate(shared.batches(text, steps, shared.SEED)):
            losses.append(float(training_step(model, optimizer, jnp.asarray(batch, jnp.int32))))
            if step == 0:
                begin = time.perf_counter()
        seconds = time.perf_counter() - begin
        evaluate = nnx.jit(lambda model, batch: losses_of(model, batch).mean())
        contexts = shared.batches(held_out, shared.EVALUATION_BATCHES, shared.SEED + 1)
        found = [float(evaluate(model, jnp.asarray(batch, jnp.int32))) for batch in contexts]
    return shared.Training(losses, float(np.mean(found)), seconds)


def main(arguments: Sequence[str] | None = None) -> None:
    chosen = shared.parser("Trains a small language model with MoBA in JAX and Flax.").parse_args(arguments)
    device = jax.devices()[0] if chosen.device == "auto" else jax.devices(chosen.device)[0]
    train(chosen.steps, device).report(chosen.losses)


if __name__ == "__main__":
    main()
