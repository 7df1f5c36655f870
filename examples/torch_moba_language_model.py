"""A small language model in PyTorch with mixture of block attention, trained on real text with contexts of 1,024 bytes.

Each query sees its own block of 32 keys and the three earlier blocks with the best mean keys, instead of all earlier
keys. Keys first pass through a learned convolution over three tokens. `moba_language_model.py` trains the same model in
JAX, with the same losses up to rounding.

python examples/torch_moba_language_model.py [--steps 300] [--device cuda]
"""

import time
from collections.abc import Sequence

import language_data as shared
import numpy as np
import torch
from torch import nn

from blockdiag.torch import MoBASelfAttention


class Layer(nn.Module):
    """MoBA, then a feed-forward network; both residual, [B, T, WIDTH] in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shared.WIDTH, eps=shared.NORM_EPSILON)
        self.attention = MoBASelfAttention(
            shared.WIDTH,
            shared.HEADS,
            block_size=shared.BLOCK_SIZE,
            top_k=shared.TOP_K,
            key_convolution_size=shared.KEY_TAPS,
            rotary_max_position=shared.CONTEXT,
            rotary_theta=shared.ROTARY_THETA,
            bias=False,
        )
        self.feed_forward_norm = nn.RMSNorm(shared.WIDTH, eps=shared.NORM_EPSILON)
        self.expand = nn.Linear(shared.WIDTH, shared.HIDDEN, bias=False)
        self.contract = nn.Linear(shared.HIDDEN, shared.WIDTH, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        tokens = tokens + self.attention(self.attention_norm(tokens))
        hidden = nn.functional.gelu(self.expand(self.feed_forward_norm(tokens)), approximate="tanh")
        return tokens + self.contract(hidden)


class LanguageModel(nn.Module):
    """Logits of every next byte: int64 [B, T] -> [B, T, 256]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shared.VOCABULARY, shared.WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(shared.LAYERS))
        self.norm = nn.RMSNorm(shared.WIDTH, eps=shared.NORM_EPSILON)
        self.head = nn.Linear(shared.WIDTH, shared.VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))

    @torch.no_grad()
    def set_weights(self, weights: dict[str, np.ndarray]) -> None:
        """Take the initial weights that both frameworks start from."""
        values = {name: torch.from_numpy(value) for name, value in weights.items()}
        self.embedding.weight.copy_(values["embedding"])
        for index, layer in enumerate(self.layers):
            layer.attention.in_proj_weight.copy_(values[f"layers.{index}.qkv"].t())
            layer.attention.key_convolution_weight.copy_(values[f"layers.{index}.key_taps"])
            layer.attention.out_proj.weight.copy_(values[f"layers.{index}.out"].t())
            layer.expand.weight.copy_(values[f"layers.{index}.expand"].t())
            layer.contract.weight.copy_(values[f"layers.{index}.contract"].t())
        self.head.weight.copy_(values["head"].t())


def losses_of(model: LanguageModel, batch: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy of every byte of `batch` [B, T + 1] after the first, in nats, [B, T]."""
    logits = model(batch[:, :-1])
    return nn.functional.cross_entropy(logits.transpose(1, 2), batch[:, 1:], reduction="none")


def train(steps: int, device: torch.device) -> shared.Training:
    """Train a new model and evaluate it on held-out text."""
    text, held_out = shared.load_text()
    model = LanguageModel()
    model.set_weights(shared.initial_weights())
    model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=shared.LEARNING_RATE, betas=shared.BETAS, eps=shared.EPSILON)
    losses = []
    begin = time.perf_counter()
    for step, batch in enumerate(torch.from_numpy(shared.batches(text, steps, shared.SEED)).to(device)):
        optimizer.zero_grad()
        loss = losses_of(model, batch).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step == 0:
            begin = time.perf_counter()
    seconds = time.perf_counter() - begin
    contexts = torch.from_numpy(shared.batches(held_out, shared.EVALUATION_BATCHES, shared.SEED + 1)).to(device)
    with torch.no_grad():
        found = [losses_of(model, batch).mean().item() for batch in contexts]
    return shared.Training(losses, float(np.mean(found)), seconds)


def main(arguments: Sequence[str] | None = None) -> None:
    chosen = shared.parser("Trains a small language model with MoBA in PyTorch.").parse_args(arguments)
    name = chosen.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    train(chosen.steps, torch.device(name)).report(chosen.losses)


if __name__ == "__main__":
    main()
