"""Shared code of `torch_ranking_model.py` and `ranking_model.py`: table, batches, initial weights, scores, options.

The table is scikit-learn's breast cancer data: 569 rows of 30 numeric features and a binary label.
"""

import argparse
import dataclasses
import json
from pathlib import Path

import numpy as np

WIDTH, HEADS, HEAD_DIM, LAYERS, HIDDEN = 32, 4, 16, 2, 64
BATCH_SIZE = 64
# Hyperparameters of Adam, in both frameworks.
LEARNING_RATE, BETAS, EPSILON = 1e-3, (0.9, 0.999), 1e-8
NORM_EPSILON = 1e-6
SEED = 0
# These steps are not timed, because they compile.
WARMUP_STEPS = 3


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows in random order, with features of mean 0 and standard deviation 1 over the training rows.

    Attributes:
        features, labels: training rows, float32 [rows, F] and [rows].
        held_out_features, held_out_labels: the held-out fifth of all rows, in the same form.
    """

    features: np.ndarray
    labels: np.ndarray
    held_out_features: np.ndarray
    held_out_labels: np.ndarray


def load_table(path: Path | None) -> Table:
    """Load the table from a file in the format that scikit-learn bundles, or scikit-learn's own if `path` is None.

    A file has one line with its number of rows and of features and the names of the two classes, then one line for each
    row: its features and its label, 0 or 1, with commas between them.
    """
    if path is None:
        from sklearn.datasets import load_breast_cancer

        features, labels = load_breast_cancer(return_X_y=True)
    else:
        rows = np.loadtxt(path, delimiter=",", skiprows=1, dtype=np.float64)
        features, labels = rows[:, :-1], rows[:, -1]
    order = np.random.default_rng(SEED).permutation(len(labels))
    held_out, train = np.split(order, [len(order) // 5])
    features = (features - features[train].mean(axis=0)) / features[train].std(axis=0)
    features, labels = features.astype(np.float32), labels.astype(np.float32)
    return Table(features[train], labels[train], features[held_out], labels[held_out])


def batches(rows: int, steps: int) -> np.ndarray:
    """Return the rows of each batch, int64 [steps, BATCH_SIZE]: epochs in random order, whole batches only."""
    generator = np.random.default_rng(SEED)
    per_epoch = rows // BATCH_SIZE
    epochs = [
        generator.permutation(rows)[: per_epoch * BATCH_SIZE].reshape(per_epoch, BATCH_SIZE)
        for _ in range(-(-steps // per_epoch))
    ]
    return np.concatenate([np.empty((0, BATCH_SIZE), np.int64), *epochs])[:steps]


def initial_weights(features: int) -> dict[str, np.ndarray]:
    """Return the initial weights by name, float32; matrices are [in, out]."""
    generator = np.random.default_rng(SEED)

    def normal(*shape: int) -> np.ndarray:
        return (generator.normal(size=shape) / np.sqrt(shape[0])).astype(np.float32)

    weights = {
        "embedding_weight": generator.normal(size=(features, WIDTH)).astype(np.float32),
        "embedding_bias": generator.normal(size=(features, WIDTH)).astype(np.float32),
    }
    for layer in range(LAYERS):
        weights |= {
            f"layers.{layer}.qkv": normal(WIDTH, 3 * HEADS * HEAD_DIM),
            f"layers.{layer}.out": normal(HEADS * HEAD_DIM, WIDTH),
            f"layers.{layer}.expand": normal(WIDTH, HIDDEN),
            f"layers.{layer}.contract": normal(HIDDEN, WIDTH),
        }
    return weights | {"head": normal(WIDTH, 1)}


def area_under_curve(labels: np.ndarray, scores: np.ndarray) -> float:
    """Return the probability that a random row with label 1 scores higher than one with label 0; ties count half."""
    difference = scores[labels == 1][:, None] - scores[labels == 0][None, :]
    return float(np.mean((difference > 0) + 0.5 * (difference == 0)))


def linear_scores(table: Table) -> np.ndarray:
    """Return scores of the held-out rows by least squares on the features, as a baseline."""
    inputs, held_out = (
        np.concatenate([rows, np.ones((len(rows), 1), np.float32)], axis=1)
        for rows in (table.features, table.held_out_features)
    )
    return held_out @ np.linalg.lstsq(inputs, table.labels, rcond=None)[0]


@dataclasses.dataclass(frozen=True)
class Training:
    """Results of a training.

    Attributes:
        losses: mean loss of each step's batch, before its update.
        scores: logits of the held-out rows after the last step.
        rows_per_second: throughput of the steps after the warm-up.
    """

    losses: list[float]
    scores: np.ndarray
    rows_per_second: float

    def report(self, table: Table, path: Path | None = None) -> None:
        """Print the figures; write the losses as JSON to `path`."""
        accuracy = np.mean((self.scores > 0) == (table.held_out_labels == 1))
        area = area_under_curve(table.held_out_labels, self.scores)
        last = np.mean(self.losses[-10:])
        print(f"{len(self.losses)} steps: loss {self.losses[0]:.4f} at first, {last:.4f} over the last ten")
        print(f"held-out rows: AUC {area:.4f}, accuracy {accuracy:.4f}")
        linear = area_under_curve(table.held_out_labels, linear_scores(table))
        print(f"the same rows by a linear fit: AUC {linear:.4f}")
        print(f"{self.rows_per_second:.0f} rows/s")
        if path is not None:
            path.write_text(json.dumps(self.losses))


def rows_per_second(steps: int, seconds: float) -> float:
    """Return the throughput of the steps after the warm-up, or of all steps if there are no others."""
    timed_steps = steps - WARMUP_STEPS if steps > WARMUP_STEPS else steps
    return timed_steps * BATCH_SIZE / seconds


def parser(description: str) -> argparse.ArgumentParser:
    """Return a parser of the options that both programs have."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    options.add_argument("--steps", type=_at_least_one, default=100)
    options.add_argument("--data", type=Path, metavar="FILE.csv", help="default: the file bundled with scikit-learn")
    options.add_argument("--losses", type=Path, metavar="FILE.json", help="where to write the loss of every step")
    return options


def _at_least_one(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)
