"""Evoformer blocks in PyTorch with fused attention, trained to find pairs of columns that evolved together.

An alignment [rows, columns] and the pairs of its columns exchange information in four steps: attention along rows with
a pair bias, attention along columns, outer products of columns that update the pairs, and triangle attention over the
pairs. All of these attentions are one function in plain `jax.numpy`, which `blockdiag.torch.fuse` turns into kernels
that torch launches, with gradients of biases and gates. `evoformer.py` trains the same model in JAX, with the same
losses up to rounding.

python examples/torch_evoformer.py [--steps 400] [--device cuda]
"""

from collections.abc import Sequence

import evoformer_data as shared
import numpy as np
import torch
from torch import nn

from blockdiag.torch import fuse

attend = fuse(shared.gated_attention)


def empty(*shape: int) -> nn.Parameter:
    """Return a matrix [in, out] whose initial value `set_weights` provides."""
    return nn.Parameter(torch.zeros(shape))


def norm(channels: int) -> nn.RMSNorm:
    return nn.RMSNorm(channels, eps=shared.NORM_EPSILON)


class Attention(nn.Module):
    """Gated self-attention along axis 2 of [B, R, T, channels], with a bias from pairs [B, T, T, PAIR_CHANNELS]."""

    def __init__(self, channels: int, *, has_bias: bool = True) -> None:
        super().__init__()
        width = shared.HEADS * shared.HEAD_DIM
        self.norm = norm(channels)
        self.projection = empty(channels, 4 * width)
        self.out = empty(width, channels)
        self.has_bias = has_bias
        if has_bias:
            self.pair_norm = norm(shared.PAIR_CHANNELS)
            self.pair_bias = empty(shared.PAIR_CHANNELS, shared.HEADS)

    def forward(self, tokens: torch.Tensor, pairs: torch.Tensor | None = None) -> torch.Tensor:
        projected = (self.norm(tokens) @ self.projection).unflatten(-1, (4, shared.HEADS, shared.HEAD_DIM))
        operands = (x.contiguous() for x in projected.unbind(-3))  # query, key, value, gate [B, R, T, N, H]
        bias = self.pair_norm(pairs) @ self.pair_bias if self.has_bias else None
        return attend(*operands, bias).flatten(-2) @ self.out


class Transition(nn.Module):
    """A feed-forward network."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = norm(channels)
        self.expand = empty(channels, 2 * channels)
        self.contract = empty(2 * channels, channels)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return (self.norm(tokens) @ self.expand).relu() @ self.contract


class OuterProduct(nn.Module):
    """Pairs [B, T, T, PAIR_CHANNELS] from products of columns of [B, R, T, CHANNELS], averaged over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = norm(shared.CHANNELS)
        self.projection = empty(shared.CHANNELS, 2 * shared.PRODUCT)
        self.out = empty(shared.PRODUCT**2, shared.PAIR_CHANNELS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        left, right = (self.norm(tokens) @ self.projection).chunk(2, dim=-1)
        products = torch.einsum("bric,brjd->bijcd", left, right) / tokens.shape[1]
        return products.flatten(-2) @ self.out


class Block(nn.Module):
    """An Evoformer block; every part is residual."""

    def __init__(self) -> None:
        super().__init__()
        self.row = Attention(shared.CHANNELS)
        self.column = Attention(shared.CHANNELS, has_bias=False)
        self.transition = Transition(shared.CHANNELS)
        self.outer = OuterProduct()
        self.starting = Attention(shared.PAIR_CHANNELS)
        self.ending = Attention(shared.PAIR_CHANNELS)
        self.pair_transition = Transition(shared.PAIR_CHANNELS)

    def forward(self, tokens: torch.Tensor, pairs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = tokens + self.row(tokens, pairs)
        tokens = tokens + self.column(tokens.transpose(1, 2)).transpose(1, 2)
        tokens = tokens + self.transition(tokens)
        pairs = pairs + self.outer(tokens)
        # Pair (i, j) attends to (i, k), with a bias from (j, k); then to (k, j), with one from (k, i).
        pairs = pairs + self.starting(pairs, pairs)
        turned = pairs.transpose(1, 2)
        pairs = pairs + self.ending(turned, turned).transpose(1, 2)
        return tokens, pairs + self.pair_transition(pairs)


class ContactModel(nn.Module):
    """Logits [B, T, T] of contacts from letters int64 [B, R, T]."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = empty(shared.LETTERS, shared.CHANNELS)
        self.distances = empty(2 * shared.COLUMNS - 1, shared.PAIR_CHANNELS)
        self.blocks = nn.ModuleList(Block() for _ in range(shared.BLOCKS))
        self.norm = norm(shared.PAIR_CHANNELS)
        self.head = empty(shared.PAIR_CHANNELS, 1)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        column = torch.arange(shared.COLUMNS, device=letters.device)
        distance = self.distances[column[:, None] - column[None, :] + shared.COLUMNS - 1]
        pairs = distance.expand(len(letters), *distance.shape)
        tokens = self.letters[letters]
        for block in self.blocks:
            tokens, pairs = block(tokens, pairs)
        logits = (self.norm(pairs) @ self.head).squeeze(-1)
        return (logits + logits.transpose(1, 2)) / 2

    def set_weights(self, weights: dict[str, np.ndarray]) -> None:
        """Take the initial weights that both frameworks start from; gains of norms stay unchanged."""
        found = self.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()}, strict=False)
        assert not found.unexpected_keys, f"no parameters for {found.unexpected_keys}"


def train(steps: int, held_out: shared.Alignments, device: torch.device) -> shared.Training:
    """Train a new model and score the held-out alignments."""
    model = ContactModel()
    model.set_weights(shared.initial_weights())
    model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=shared.LEARNING_RATE, betas=shared.BETAS, eps=shared.EPSILON)
    losses = []
    for step in range(steps):
        batch = shared.alignments(shared.BATCH_SIZE, seed=step + 1)
        letters, contacts = (torch.from_numpy(array).to(device) for array in (batch.letters, batch.contacts))
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(letters), contacts)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        scores = model(torch.from_numpy(held_out.letters).to(device))
    return shared.Training(losses, scores.cpu().numpy())


def main(arguments: Sequence[str] | None = None) -> None:
    chosen = shared.parser("Trains Evoformer blocks to find contacts, in PyTorch.").parse_args(arguments)
    name = chosen.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    held_out = shared.alignments(shared.HELD_OUT, seed=shared.SEED)
    train(chosen.steps, held_out, torch.device(name)).report(held_out, chosen.losses)


if __name__ == "__main__":
    main()
