"""What `evoformer.py` and `torch_evoformer.py` share: alignments, attention, initial weights, scores, options.

The task is to find contacts from coevolution. A sample is an alignment of RNA-like sequences that fold alike: columns
that are paired in the fold keep complementary letters, mostly, while the letters themselves change from sequence to
sequence. From the alignment alone the model says which columns are paired. With few sequences chance makes many columns
look paired; that pairs come in stems, one after the other, and that each column has one partner at the most, has to be
learned.
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
# Of Adam, in both frameworks.
LEARNING_RATE, BETAS, EPSILON = 5e-3, (0.9, 0.99), 1e-8
SEED = 0


def gated_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, gate: jax.Array, bias: jax.Array | None = None
) -> jax.Array:
    """Attention along axis 2, with a gate and, for rows and triangles, a bias of pairs that all of axis 1 share.

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
    """The partner of each column, -1 for none: two stems of 3 or 4 pairs, side by side or one within the other."""
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
    """Random alignments; letter 3 - x is complementary to x."""
    generator = np.random.default_rng(seed)
    letters = generator.integers(0, LETTERS, size=(count, ROWS, COLUMNS))
    contacts = np.zeros((count, COLUMNS, COLUMNS), np.float32)
    for sample in range(count):
        partner = random_fold(generator)
        for left in np.flatnonzero(partner > np.arange(COLUMNS)):
            right = partner[left]
            contacts[sample, left, right] = contacts[sample, right, left] = 1
            # What is not conserved keeps its random letter, which is complementary in a quarter of the cases.
            is_conserved = generator.random(ROWS) < (CONSERVED - 0.25) / 0.75
            letters[sample, :, right] = np.where(is_conserved, 3 - letters[sample, :, left], letters[sample, :, right])
    return Alignments(letters, contacts)


def complementarity(letters: np.ndarray) -> np.ndarray:
    """How many sequences have complementary letters in two columns, a score without a model: [B, COLUMNS, COLUMNS]."""
    return (letters[:, :, :, None] == 3 - letters[:, :, None, :]).mean(axis=1)


def precision(scores: np.ndarray, contacts: np.ndarray) -> float:
    """Of the highest scores of each sample, as many as it has pairs: the share that are pairs."""
    upper = np.triu_indices(COLUMNS, k=4)  # no hairpin is shorter
    found, pairs = 0.0, 0.0
    for score, contact in zip(scores, contacts, strict=True):
        count = int(contact[upper].sum())
        found += contact[upper][np.argsort(-score[upper], kind="stable")[:count]].sum()
        pairs += count
    return found / pairs


def weight_shapes() -> dict[str, tuple[int, ...]]:
    """Shapes of all matrices by name, [in, out] each; the names are those of the parameters in both models."""

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
    """Initial matrices by name, float32. Gains of norms begin with 1."""
    generator = np.random.default_rng(SEED)
    weights = {}
    for name, shape in weight_shapes().items():
        # Blocks begin by changing little but for the products of columns, which are all that pairs can know.
        small = name == "distances" or name.endswith(("out", "contract"))
        scale = 1.0 if name == "letters" else (0.1 if small and "outer" not in name else 1.0) * shape[0] ** -0.5
        weights[name] = (scale * generator.normal(size=shape)).astype(np.float32)
    return weights


@dataclasses.dataclass(frozen=True)
class Training:
    """Results of a training.

    Attributes:
        losses: mean loss of each step's batch, before its update.
        scores: of the held-out alignments after the last step, [HELD_OUT, COLUMNS, COLUMNS].
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
    """The options that both programs have."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    options.add_argument("--steps", type=_at_least_one, default=120)
    options.add_argument("--losses", type=Path, metavar="FILE.json", help="where to write the loss of every step")
    return options


def _at_least_one(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)
