"""Shared code of `evoformer.py` and `torch_evoformer.py`: alignments, attention, initial weights, scores, options.

The task is to find contacts from coevolution. A sample is an alignment of RNA-like sequences with the same fold.
Columns that are paired in the fold mostly keep complementary letters, while the letters themselves change from sequence
to sequence. The model predicts from the alignment alone which columns are paired. With few sequences, many columns look
paired by chance. The model has to learn that pairs form contiguous stems, and that each column has at most one partner.
"""

import argparse
import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

LETTERS, COLUMNS, ROWS = 4, 24, 8
# How often the letters of a pair are complementary; by chance they are in a quarter of all sequences.
CONSERVED = 0.75
BATCH_SIZE, HELD_OUT = 8, 64
CHANNELS, PAIR_CHANNELS, HEADS, HEAD_DIM, PRODUCT, BLOCKS = 24, 24, 2, 12, 12, 2
NORM_EPSILON = 1e-6
# Hyperparameters of Adam, in both frameworks.
LEARNING_RATE, BETAS, EPSILON = 5e-3, (0.9, 0.99), 1e-8
SEED = 0


def gated_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, gate: jax.Array, bias: jax.Array | None = None
) -> jax.Array:
    """Return gated attention along axis 2. Rows and triangles have a pair bias, which is shared along axis 1.

    Args:
        query, key, value, gate: [B, R, T, N, H].
        bias: [B, T, T, N], or None.
    """
    scores = jnp.einsum("brtnh,brsnh->brnts", query, key) * query.shape[-1] ** -0.5
    if bias is not None:
        scores = scores + jnp.transpose(bias, (0, 3, 1, 2))[:, None]
    weights = jax.nn.softmax(scores, axis=-1)
    return jnp.einsum("brnts,brsnh->brtnh", weights, value) * jax.nn.sigmoid(gate)


@dataclasses.dataclass(frozen=True)
class Alignments:
    """Alignments and their folds.

    Attributes:
        letters: int64 [B, ROWS, COLUMNS].
        contacts: float32 [B, COLUMNS, COLUMNS], symmetric, 1 for pairs.
    """

    letters: np.ndarray
    contacts: np.ndarray


def random_fold(generator: np.random.Generator) -> np.ndarray:
    """Return the partner of each column or -1, for two stems of 3 or 4 pairs, side by side or nested."""
    partner = np.full(COLUMNS, -1)
    first, second = generator.integers(3, 5, size=2)
    loops = generator.multinomial(COLUMNS - 2 * (first + second) - 6, [0.25] * 4)  # two hairpins have 3 columns anyway
    left = loops[0]
    if generator.random() < 0.5:
        ends = [(left, left + 2 * first + 3 + loops[1], first)]
        left = ends[0][1] + loops[2]
        ends.append((left, left + 2 * second + 3 + loops[3], second))
    else:
        inner = left + first + loops[1]
        outer_end = inner + 2 * second + 6 + loops[2] + first
        ends = [(left, outer_end, first), (inner, inner + 2 * second + 3, second)]
    for begin, end, pairs in ends:
        for i in range(pairs):
            partner[begin + i], partner[end - 1 - i] = end - 1 - i, begin + i
    return partner


def alignments(count: int, seed: int) -> Alignments:
    """Draw random alignments; letter 3 - x is complementary to x."""
    generator = np.random.default_rng(seed)
    letters = generator.integers(0, LETTERS, size=(count, ROWS, COLUMNS))
    contacts = np.zeros((count, COLUMNS, COLUMNS), np.float32)
    for sample in range(count):
        partner = random_fold(generator)
        for left in np.flatnonzero(partner > np.arange(COLUMNS)):
            right = partner[left]
            contacts[sample, left, right] = contacts[sample, right, left] = 1
            # Letters that are not conserved stay random, and are complementary in a quarter of the cases.
            is_conserved = generator.random(ROWS) < (CONSERVED - 0.25) / 0.75
            letters[sample, :, right] = np.where(is_conserved, 3 - letters[sample, :, left], letters[sample, :, right])
    return Alignments(letters, contacts)


def complementarity(letters: np.ndarray) -> np.ndarray:
    """Count the sequences with complementary letters in two columns, a baseline: [B, COLUMNS, COLUMNS]."""
    return (letters[:, :, :, None] == 3 - letters[:, :, None, :]).mean(axis=1)


def precision(scores: np.ndarray, contacts: np.ndarray) -> float:
    """Return the share of pairs among the highest scores of each sample, as many scores as it has pairs."""
    upper = np.triu_indices(COLUMNS, k=4)  # no hairpin is shorter
    found, pairs = 0.0, 0.0
    for score, contact in zip(scores, contacts, strict=True):
        count = int(contact[upper].sum())
        found += contact[upper][np.argsort(-score[upper], kind="stable")[:count]].sum()
        pairs += count
    return found / pairs


def weight_shapes() -> dict[str, tuple[int, ...]]:
    """Return the shapes of all matrices, [in, out] each, by the name of the parameter in both models."""

    def attention(channels: int) -> dict[str, tuple[int, ...]]:
        width = HEADS * HEAD_DIM
        return {"projection": (channels, 4 * width), "out": (width, channels)}

    def transition(channels: int) -> dict[str, tuple[int, ...]]:
        return {"expand": (channels, 2 * channels), "contract": (2 * channels, channels)}

    parts = {
        "row": attention(CHANNELS) | {"pair_bias": (PAIR_CHANNELS, HEADS)},
        "column": attention(CHANNELS),
        "transition": transition(CHANNELS),
        "outer": {"projection": (CHANNELS, 2 * PRODUCT), "out": (PRODUCT * PRODUCT, PAIR_CHANNELS)},
        "starting": attention(PAIR_CHANNELS) | {"pair_bias": (PAIR_CHANNELS, HEADS)},
        "ending": attention(PAIR_CHANNELS) | {"pair_bias": (PAIR_CHANNELS, HEADS)},
        "pair_transition": transition(PAIR_CHANNELS),
    }
    shapes = {"letters": (LETTERS, CHANNELS), "distances": (2 * COLUMNS - 1, PAIR_CHANNELS)}
    for block in range(BLOCKS):
        for part, matrices in parts.items():
            shapes |= {f"blocks.{block}.{part}.{name}": shape for name, shape in matrices.items()}
    return shapes | {"head": (PAIR_CHANNELS, 1)}


def initial_weights() -> dict[str, np.ndarray]:
    """Return the initial matrices by name, float32. Gains of norms start at 1."""
    generator = np.random.default_rng(SEED)
    weights = {}
    for name, shape in weight_shapes().items():
        # Blocks start close to the identity, except for the products of columns, the only input of the pairs.
        small = name == "distances" or name.endswith(("out", "contract"))
        scale = 1.0 if name == "letters" else (0.1 if small and "outer" not in name else 1.0) * shape[0] ** -0.5
        weights[name] = (scale * generator.normal(size=shape)).astype(np.float32)
    return weights


@dataclasses.dataclass(frozen=True)
class Training:
    """Results of a training.

    Attributes:
        losses: mean loss of each step's batch, before its update.
        scores: scores of the held-out alignments after the last step, [HELD_OUT, COLUMNS, COLUMNS].
    """

    losses: list[float]
    scores: np.ndarray

    def report(self, held_out: Alignments, path: Path | None = None) -> None:
        """Print the figures; write the losses as JSON to `path`."""
        last = np.mean(self.losses[-10:])
        print(f"{len(self.losses)} steps: loss {self.losses[0]:.4f} at first, {last:.4f} over the last ten")
        simple = precision(complementarity(held_out.letters), held_out.contacts)
        print(f"held-out pairs found: {precision(self.scores, held_out.contacts):.1%}, by counting alone {simple:.1%}")
        if path is not None:
            path.write_text(json.dumps(self.losses))


def parser(description: str) -> argparse.ArgumentParser:
    """Return a parser of the options that both programs have."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    options.add_argument("--steps", type=_at_least_one, default=120)
    options.add_argument("--losses", type=Path, metavar="FILE.json", help="where to write the loss of every step")
    return options


def _at_least_one(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)
