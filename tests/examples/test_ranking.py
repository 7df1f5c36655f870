"""The ranking model of the examples: its JAX and torch versions train alike and reach a high AUC."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 100


def run(name, *arguments, device="cpu"):
    """Run the program in its own process, as users do."""
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), "--device", device, *arguments]
    # torch's threads wait for each other by spinning, which is slow where other tests use the cores; and JAX in this
    # process may hold most of a GPU's memory already.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if device == "cpu":
        environment |= {"JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "error"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


def train(name, file, *arguments, device="cpu"):
    """Return the losses of every step and the printed text."""
    done = run(name, "--steps", str(STEPS), "--losses", str(file), *arguments, device=device)
    assert done.returncode == 0, done.stderr
    return np.array(json.loads(file.read_text())), done.stdout


@pytest.fixture(scope="module")
def trainings(tmp_path_factory):
    """Return the results of `train` for both programs."""
    file = tmp_path_factory.mktemp("losses") / "losses.json"
    return {name: train(name, file) for name in ("torch_ranking_model", "ranking_model")}


def assert_alike(losses, others):
    """Assert that losses differ only by accumulated rounding, as weights and batches are equal."""
    assert len(losses) == len(others) == STEPS
    np.testing.assert_allclose(losses[:20], others[:20], rtol=1e-4)
    np.testing.assert_allclose(losses, others, rtol=1e-3)


@pytest.fixture
def ranking_data(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import ranking_data

    return ranking_data


@pytest.mark.exhaustive
def test_jax_and_torch_trainings_have_the_same_losses(trainings):
    assert_alike(*(losses for losses, _ in trainings.values()))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("arguments", [(), ("--compile",)], ids=["eager", "compiled"])
def test_jax_and_torch_trainings_on_a_gpu_have_the_same_losses(arguments, tmp_path):
    losses, _ = train("torch_ranking_model", tmp_path / "torch.json", *arguments, device="cuda")
    others, _ = train("ranking_model", tmp_path / "jax.json", device="cuda")
    assert_alike(losses, others)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["torch_ranking_model", "ranking_model"])
def test_training_reaches_a_high_auc(trainings, name):
    losses, text = trainings[name]
    assert np.mean(losses[-10:]) < 0.1 * losses[0]
    assert float(re.search(r"AUC ([\d.]+)", text)[1]) > 0.97
    assert float(re.search(r"accuracy ([\d.]+)", text)[1]) > 0.9
    assert float(re.search(r"([\d.]+) rows/s", text)[1]) > 0


def test_invalid_option_exits_with_an_error(monkeypatch, capsys):
    monkeypatch.syspath_prepend(EXAMPLES)
    import ranking_model

    with pytest.raises(SystemExit, match="2"):
        ranking_model.main(["--steps", "0"])
    assert "must be at least 1, got 0" in capsys.readouterr().err


def test_table_from_a_file_equals_the_bundled_table(ranking_data, tmp_path):
    """The file holds the table in scikit-learn's format."""
    from sklearn.datasets import load_breast_cancer

    features, labels = load_breast_cancer(return_X_y=True)
    rows = [",".join([*map(repr, row.tolist()), str(label)]) for row, label in zip(features, labels, strict=True)]
    file = tmp_path / "table.csv"
    file.write_text("\n".join([f"{len(labels)},{features.shape[1]},malignant,benign", *rows]) + "\n")
    bundled, of_file = ranking_data.load_table(None), ranking_data.load_table(file)
    assert bundled.features.shape == (456, 30)
    assert bundled.held_out_features.shape == (113, 30)
    for name, array in vars(bundled).items():
        assert array.dtype == np.float32
        np.testing.assert_array_equal(vars(of_file)[name], array)
    np.testing.assert_allclose(bundled.features.mean(axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(bundled.features.std(axis=0), 1, rtol=1e-5)


def test_batches_visit_every_row_each_epoch(ranking_data):
    batches = ranking_data.batches(rows=3 * ranking_data.BATCH_SIZE, steps=7)
    assert batches.shape == (7, ranking_data.BATCH_SIZE)
    for epoch in (batches[:3], batches[3:6]):
        np.testing.assert_array_equal(np.sort(epoch.reshape(-1)), np.arange(3 * ranking_data.BATCH_SIZE))


def test_area_under_curve_matches_known_values(ranking_data):
    labels = np.array([0, 1, 0, 1])
    assert ranking_data.area_under_curve(labels, np.array([1.0, 2.0, 0.0, 3.0])) == 1.0
    assert ranking_data.area_under_curve(labels, np.array([0.0, 0.0, 1.0, 1.0])) == 0.5


def test_linear_scores_rank_linear_labels_and_not_noise(ranking_data):
    """Labels that are linear in the features are ranked almost perfectly, and noise no better than by chance."""
    generator = np.random.default_rng(0)
    features = generator.normal(size=(400, 5)).astype(np.float32)
    labels = (features @ np.arange(5) > 0).astype(np.float32)
    table = ranking_data.Table(features[:200], labels[:200], features[200:], labels[200:])
    assert ranking_data.area_under_curve(table.held_out_labels, ranking_data.linear_scores(table)) > 0.99
    noise = ranking_data.Table(
        features[:200], generator.integers(0, 2, 200).astype(np.float32), features[200:], labels[200:]
    )
    assert 0.2 < ranking_data.area_under_curve(noise.held_out_labels, ranking_data.linear_scores(noise)) < 0.8
