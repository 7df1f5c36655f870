"""Shared code of `moba_language_model.py` and `torch_moba_language_model.py`: text, batches, weights, options.

The text is the language reference that Python's own `help("topics")` shows: a few hundred kilobytes of English,
available in every installation. Tokens are bytes.
"""

import argparse
import dataclasses
import json
import math
from pathlib import Path
from pydoc_data import topics

import numpy as np

VOCABULARY = 256
CONTEXT, BATCH_SIZE = 1024, 4
WIDTH, HEADS, LAYERS, HIDDEN = 96, 3, 2, 256
# Each query sees 4 blocks of 32 keys, its own included: 128 of up to 1,024.
BLOCK_SIZE, TOP_K, KEY_TAPS = 32, 4, 3
ROTARY_THETA = 10000.0
NORM_EPSILON = 1e-6
# Hyperparameters of Adam, in both frameworks.
LEARNING_RATE, BETAS, EPSILON = 4e-3, (0.9, 0.99), 1e-8
EVALUATION_BATCHES = 4
SEED = 0


def load_text() -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes to train on and the held-out tenth, uint8 each."""
    # Topics share paragraphs with different indentation. Each is kept once, so that held-out text is new.
    paragraphs: dict[str, str] = {}
    for topic in topics.topics.values():
        for paragraph in topic.split("\n\n"):
            paragraphs.setdefault(" ".join(paragraph.split()), paragraph)
    text = np.frombuffer("\n\n".join(paragraphs.values()).encode(), np.uint8)
    border = len(text) * 9 // 10
    return text[:border], text[border:]


def batches(text: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Return crops from random positions, int64 [count, BATCH_SIZE, CONTEXT + 1]."""
    starts = np.random.default_rng(seed).integers(0, len(text) - CONTEXT, size=(count, BATCH_SIZE, 1))
    return text[starts + np.arange(CONTEXT + 1)].astype(np.int64)


def bits_of_frequencies(text: np.ndarray, others: np.ndarray) -> float:
    """Return the bits per byte of `others` under the byte frequencies of `text`."""
    counts = np.bincount(text, minlength=VOCABULARY) + 1.0
    return float(-np.mean(np.log2(counts / counts.sum())[others]))


def initial_weights() -> dict[str, np.ndarray]:
    """Return the initial weights by name, float32; matrices are [in, out]. Gains of norms start at 1."""
    generator = np.random.default_rng(SEED)

    def normal(*shape: int, scale: float) -> np.ndarray:
        return (scale * generator.normal(size=shape)).astype(np.float32)

    weights = {"embedding": normal(VOCABULARY, WIDTH, scale=1.0)}
    for layer in range(LAYERS):
        weights |= {
            f"layers.{layer}.qkv": normal(WIDTH, 3 * WIDTH, scale=WIDTH**-0.5),
            f"layers.{layer}.key_taps": normal(KEY_TAPS, HEADS, WIDTH // HEADS, scale=0.1),
            f"layers.{layer}.out": normal(WIDTH, WIDTH, scale=0.5 * WIDTH**-0.5),
            f"layers.{layer}.expand": normal(WIDTH, HIDDEN, scale=WIDTH**-0.5),
            f"layers.{layer}.contract": normal(HIDDEN, WIDTH, scale=0.5 * HIDDEN**-0.5),
        }
    return weights | {"head": normal(WIDTH, VOCABULARY, scale=WIDTH**-0.5)}


@dataclasses.dataclass(frozen=True)
class Training:
    """Results of a training.

    Attributes:
        losses: mean loss of each step's batch in nats per byte, before its update.
        held_out: mean loss on held-out contexts, in nats per byte.
        seconds: time of all steps but the first, which compiles.
    """

    losses: list[float]
    held_out: float
    seconds: float

    def report(self, path: Path | None = None) -> None:
        """Print the figures; write the losses as JSON to `path`."""
        print(f"{len(self.losses)} steps: loss {self.losses[0]:.3f} at first, {np.mean(self.losses[-5:]):.3f} at last")
        print(f"held-out text: {self.held_out / math.log(2):.3f} bits per byte", end=", ")
        print(f"{bits_of_frequencies(*load_text()):.3f} by frequencies of bytes alone")
        if len(self.losses) > 1:
            print(f"{(len(self.losses) - 1) * BATCH_SIZE * CONTEXT / self.seconds:.0f} bytes/s")
        if path is not None:
            path.write_text(json.dumps(self.losses))


def parser(description: str) -> argparse.ArgumentParser:
    """Return a parser of the options that both programs have."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    options.add_argument("--steps", type=_at_least_one, default=80)
    options.add_argument("--losses", type=Path, metavar="FILE.json", help="where to write the loss of every step")
    return options


def _at_least_one(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)
