"""A small ranking model in PyTorch: the features of a row attend to each other, and to no other row.

Each feature of a row becomes a token. The tokens of all rows of a batch are on one packed axis, in blocks of as many
tokens as there are features, so block-diagonal attention computes feature interactions within a row.
`ranking_model.py` trains the same model in JAX, with the same losses up to rounding.

python examples/torch_ranking_model.py [--device cuda] [--compile]
"""

import time
from collections.abc import Sequence

import numpy as np
import ranking_data as shared
import torch
from torch import nn

from blockdiag.torch import BlockDiagonalSelfAttention


class Layer(nn.Module):
    """Attention within rows, then a feed-forward network; both residual, [tokens, WIDTH] in and out."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shared.WIDTH, eps=shared.NORM_EPSILON)
        self.attention = BlockDiagonalSelfAttention(
            shared.WIDTH, shared.HEADS, head_dim=shared.HEAD_DIM, block_size=features, bias=False
        )
        self.feed_forward_norm = nn.RMSNorm(shared.WIDTH, eps=shared.NORM_EPSILON)
        self.expand = nn.Linear(shared.WIDTH, shared.HIDDEN)
        self.contract = nn.Linear(shared.HIDDEN, shared.WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        tokens = tokens + self.attention(self.attention_norm(tokens))
        hidden = nn.functional.gelu(self.expand(self.feed_forward_norm(tokens)), approximate="tanh")
        return tokens + self.contract(hidden)


class RankingModel(nn.Module):
    """Logits [rows] of rows [rows, F] of numeric features."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.embedding_weight = nn.Parameter(torch.empty(features, shared.WIDTH))
        self.embedding_bias = nn.Parameter(torch.empty(features, shared.WIDTH))
        self.layers = nn.ModuleList(Layer(features) for _ in range(shared.LAYERS))
        self.norm = nn.RMSNorm(shared.WIDTH, eps=shared.NORM_EPSILON)
        self.head = nn.Linear(shared.WIDTH, 1)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        tokens = (values[..., None] * self.embedding_weight + self.embedding_bias).flatten(0, 1)
        for layer in self.layers:
            tokens = layer(tokens)
        rows = self.norm(tokens).unflatten(0, values.shape).mean(dim=1)
        return self.head(rows).squeeze(-1)

    @torch.no_grad()
    def set_weights(self, weights: dict[str, np.ndarray]) -> None:
        """Take the initial weights that both frameworks start from; biases start at 0."""
        values = {name: torch.from_numpy(value) for name, value in weights.items()}
        self.embedding_weight.copy_(values["embedding_weight"])
        self.embedding_bias.copy_(values["embedding_bias"])
        for index, layer in enumerate(self.layers):
            layer.attention.in_proj_weight.copy_(values[f"layers.{index}.qkv"].t())
            layer.attention.out_proj.weight.copy_(values[f"layers.{index}.out"].t())
            layer.expand.weight.copy_(values[f"layers.{index}.expand"].t())
            layer.contract.weight.copy_(values[f"layers.{index}.contract"].t())
        self.head.weight.copy_(values["head"].t())
        for module in self.modules():
            if isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.zero_()


def train(table: shared.Table, steps: int, device: torch.device, *, is_compiled: bool = False) -> shared.Training:
    """Train a new model and score the held-out rows."""
    width = table.features.shape[1]
    model = RankingModel(width)
    model.set_weights(shared.initial_weights(width))
    model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=shared.LEARNING_RATE, betas=shared.BETAS, eps=shared.EPSILON)
    features, labels = (torch.from_numpy(array).to(device) for array in (table.features, table.labels))
    rows_of_step = torch.from_numpy(shared.batches(len(labels), steps)).to(device)

    def loss_of(features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.binary_cross_entropy_with_logits(model(features), labels)

    if is_compiled:
        # "reduce-overhead" replays forward and backward as CUDA graphs.
        mode = "reduce-overhead" if device.type == "cuda" else "default"
        loss_of = torch.compile(loss_of, fullgraph=True, mode=mode)

    losses = torch.empty(steps, device=device)
    begin = time.perf_counter()
    for step, rows in enumerate(rows_of_step):
        if step == shared.WARMUP_STEPS:
            begin = _synchronised_time(device)
        optimizer.zero_grad()
        loss = loss_of(features[rows], labels[rows])
        loss.backward()
        optimizer.step()
        losses[step] = loss.detach()
    seconds = _synchronised_time(device) - begin

    with torch.no_grad():
        scores = model(torch.from_numpy(table.held_out_features).to(device))
    return shared.Training(losses.tolist(), scores.cpu().numpy(), shared.rows_per_second(steps, seconds))


def _synchronised_time(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def main(arguments: Sequence[str] | None = None) -> None:
    options = shared.parser("Trains a small ranking model in PyTorch.")
    options.add_argument("--compile", action="store_true", help="torch.compile, with CUDA graphs on a GPU")
    chosen = options.parse_args(arguments)
    name = chosen.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    table = shared.load_table(chosen.data)
    train(table, chosen.steps, torch.device(name), is_compiled=chosen.compile).report(table, chosen.losses)


if __name__ == "__main__":
    main()
