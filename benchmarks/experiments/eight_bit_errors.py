"""Errors of attention to an eight-bit cache against float64, for inputs with and without outliers.

    python -m benchmarks.experiments.eight_bit_errors errors.csv

Each row is the relative root mean square error of one way to round: which dtype and scales the cache has, whether
queries and keys are rotated by a Hadamard matrix first, and whether queries and weights are rounded to e4m3, too. Sums
are exact here, so rounding alone is compared. The inputs are normally distributed, and

- "outliers": 2 of 128 features of queries, 2 other ones of keys, and 1 of 64 tokens of values are 20 times as large;
- "sink of 12", 13 or 14: the scores of one key are that number, and its values are 0. There are 16,384 keys.
"""

import csv
import itertools
import sys
from pathlib import Path

import ml_dtypes
import numpy as np

QUERIES, KEYS, WIDTH = 64, 4096, 128
LARGEST = {"e4m3": 448.0, "int8": 127.0}
E4M3 = ml_dtypes.float8_e4m3fn


def rounded(x, scale, dtype="e4m3"):
    """Return x [rows, width] rounded to a dtype in units of a scale, saturating at the largest number."""
    units = np.clip(x / scale, -LARGEST[dtype], LARGEST[dtype])
    return (np.rint(units) if dtype == "int8" else units.astype(E4M3).astype(np.float64)) * scale


def scale_of(x, form, dtype="e4m3"):
    """Return scales of rows: 1, one that maps the largest element to the largest number, or one for each row."""
    if form == "none":
        return 1.0
    return np.abs(x).max(axis=1 if form == "token" else None, keepdims=True) / LARGEST[dtype]


def hadamard(size):
    """Return an orthogonal Hadamard matrix [size, size], for powers of two."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.sqrt(size)


def make_inputs(kind):
    """Return queries, keys and values, [rows, width] each, in bfloat16."""
    generator = np.random.default_rng(0)
    keys = 4 * KEYS if "sink" in kind else KEYS
    query, key, value = (generator.normal(size=(rows, WIDTH)) for rows in (QUERIES, keys, keys))
    if "sink" in kind:
        score = float(kind.split()[-1])
        query[:, 0], key[:, 0], key[0] = 8, 0, 0
        key[0, 0], value[0] = score * WIDTH**0.5 / 8, 0
    if kind == "outliers":
        features = generator.choice(WIDTH, 4, replace=False)
        query[:, features[:2]] *= 20
        key[:, features[2:]] *= 20
        value[generator.choice(KEYS, KEYS // 64, replace=False)] *= 20
    return tuple(x.astype(ml_dtypes.bfloat16).astype(np.float64) for x in (query, key, value))


def attend(query, key, value, *, rounds_weights):
    """Return the output [queries, width]."""
    scores = query @ key.T * WIDTH**-0.5
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights = (powers * 256).astype(E4M3).astype(np.float64) / 256 if rounds_weights else powers
    return weights @ value / powers.sum(axis=1, keepdims=True)


def error(kind, form, rotates, rounds):
    """Return the relative root mean square error; `rounds` is "cache", "int8 cache" or "everything"."""
    query, key, value = make_inputs(kind)
    exact = attend(query, key, value, rounds_weights=False)
    if rotates:
        query, key = query @ hadamard(WIDTH), key @ hadamard(WIDTH)
    dtype = "int8" if "int8" in rounds else "e4m3"
    key, value = (rounded(x, scale_of(x, form, dtype), dtype) for x in (key, value))
    if rounds == "everything":
        query = rounded(query, scale_of(query, "none" if form == "none" else "head"))
    found = attend(query, key, value, rounds_weights=rounds == "everything")
    return np.sqrt(((found - exact) ** 2).mean() / (exact**2).mean())


def main(path):
    names, rounds = ("inputs", "scales", "rotated", "rounded", "relative_rms_error"), ("cache", "everything")
    ways = [
        *itertools.product(("normal", "outliers"), ("none", "head", "token"), (False, True), rounds),
        *itertools.product(("normal", "outliers"), ("head", "token"), (False, True), ("int8 cache",)),
        *itertools.product(("sink of 12", "sink of 13", "sink of 14"), ("head",), (False,), rounds),
    ]
    rows = [(*one, f"{error(*one):.4f}") for one in ways]
    with Path(path).open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([names, *rows])


if __name__ == "__main__":
    main(sys.argv[1])
