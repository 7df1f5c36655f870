"""A small ranking model in JAX and Flax: the features of a row attend to each other, and to no other row.

Each feature of a row becomes a token. The tokens of all rows of a batch are on one packed axis, in blocks of as many
tokens as there are features, so block-diagonal attention computes feature interactions within a row.
`torch_ranking_model.py` trains the same model in PyTorch, with the same losses up to rounding.

python examples/ranking_model.py [--device cuda]
"""

import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
import ranking_data as shared
from flax import nnx

from blockdiag import fused_qkv_block_attention


class Layer(nnx.Module):
    """Attention within rows, then a feed-forward network; both residual, [tokens, WIDTH] in and out."""

    def __init__(self, features: int, *, rngs: nnx.Rngs) -> None:
        self.features = features
        self.attention_norm = nnx.RMSNorm(shared.WIDTH, epsilon=shared.NORM_EPSILON, rngs=rngs)
        self.qkv = nnx.Param(jnp.zeros((shared.WIDTH, 3 * shared.HEADS * shared.HEAD_DIM)))
        self.out = nnx.Param(jnp.zeros((shared.HEADS * shared.HEAD_DIM, shared.WIDTH)))
        self.feed_forward_norm = nnx.RMSNorm(shared.WIDTH, epsilon=shared.NORM_EPSILON, rngs=rngs)
        self.expand = nnx.Linear(shared.WIDTH, shared.HIDDEN, rngs=rngs)
        self.contract = nnx.Linear(shared.HIDDEN, shared.WIDTH, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        attended = fused_qkv_block_attention(
            self.attention_norm(tokens),
            self.qkv[...],
            query_heads=shared.HEADS,
            key_heads=shared.HEADS,
            head_dim=shared.HEAD_DIM,
            block_size=self.features,
        )
        tokens = tokens + attended.reshape(len(tokens), -1) @ self.out[...]
        hidden = nnx.gelu(self.expand(self.feed_forward_norm(tokens)), approximate=True)
        return tokens + self.contract(hidden)


class RankingModel(nnx.Module):
    """Logits [rows] of rows [rows, F] of numeric features."""

    def __init__(self, features: int) -> None:
        rngs = nnx.Rngs(0)
        self.embedding_weight = nnx.Param(jnp.zeros((features, shared.WIDTH)))
        self.embedding_bias = nnx.Param(jnp.zeros((features, shared.WIDTH)))
        self.layers = nnx.List([Layer(features, rngs=rngs) for _ in range(shared.LAYERS)])
        self.norm = nnx.RMSNorm(shared.WIDTH, epsilon=shared.NORM_EPSILON, rngs=rngs)
        self.head = nnx.Linear(shared.WIDTH, 1, rngs=rngs)

    def __call__(self, values: jax.Array) -> jax.Array:
        tokens = values[..., None] * self.embedding_weight[...] + self.embedding_bias[...]
        tokens = tokens.reshape(-1, shared.WIDTH)
        for layer in self.layers:
            tokens = layer(tokens)
        rows = self.norm(tokens).reshape(*values.shape, shared.WIDTH).mean(axis=1)
        return self.head(rows).squeeze(-1)

    def set_weights(self, weights: dict[str, np.ndarray]) -> None:
        """Take the initial weights that both frameworks start from; biases start at 0."""
        values = {name: jnp.asarray(value) for name, value in weights.items()}
        self.embedding_weight[...] = values["embedding_weight"]
        self.embedding_bias[...] = values["embedding_bias"]
        for index, layer in enumerate(self.layers):
            layer.qkv[...] = values[f"layers.{index}.qkv"]
            layer.out[...] = values[f"layers.{index}.out"]
            layer.expand.kernel[...] = values[f"layers.{index}.expand"]
            layer.contract.kernel[...] = values[f"layers.{index}.contract"]
        self.head.kernel[...] = values["head"]


def loss_of(model: RankingModel, features: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the mean binary cross entropy."""
    return optax.sigmoid_binary_cross_entropy(model(features), labels).mean()


@nnx.jit
def training_step(model: RankingModel, optimizer: nnx.Optimizer, features: jax.Array, labels: jax.Array) -> jax.Array:
    """Update the model in place; return the loss before the update."""
    loss, gradients = nnx.value_and_grad(loss_of)(model, features, labels)
    optimizer.update(model, gradients)
    return loss


def train(table: shared.Table, steps: int, device: jax.Device) -> shared.Training:
    """Train a new model and score the held-out rows."""
    # On a GPU, JAX would otherwise multiply float32 matrices in TensorFloat-32, which PyTorch does not.
    with jax.default_device(device), jax.default_matmul_precision("float32"):
        width = table.features.shape[1]
        model = RankingModel(width)
        model.set_weights(shared.initial_weights(width))
        adam = optax.adam(shared.LEARNING_RATE, b1=shared.BETAS[0], b2=shared.BETAS[1], eps=shared.EPSILON)
        optimizer = nnx.Optimizer(model, adam, wrt=nnx.Param)
        features, labels = jnp.asarray(table.features), jnp.asarray(table.labels)
        rows_of_step = shared.batches(len(labels), steps)

        losses = []
        begin = time.perf_counter()
        for step, rows in enumerate(rows_of_step):
            if step == shared.WARMUP_STEPS:
                jax.block_until_ready(losses)
                begin = time.perf_counter()
            losses.append(training_step(model, optimizer, features[rows], labels[rows]))
        jax.block_until_ready(losses)
        seconds = time.perf_counter() - begin
        scores = np.asarray(model(jnp.asarray(table.held_out_features)))
    return shared.Training([float(loss) for loss in losses], scores, shared.rows_per_second(steps, seconds))


def main(arguments: Sequence[str] | None = None) -> None:
    chosen = shared.parser("Trains a small ranking model in JAX and Flax.").parse_args(arguments)
    device = jax.devices()[0] if chosen.device == "auto" else jax.devices(chosen.device)[0]
    table = shared.load_table(chosen.data)
    train(table, chosen.steps, device).report(table, chosen.losses)


if __name__ == "__main__":
    main()
