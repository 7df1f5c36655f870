"""The Evoformer of the examples: its JAX and torch versions train alike, it learns, and its attention is fused."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blockdiag import explain

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = {"evoformer": 25, "torch_evoformer": 5}


def run(name, *arguments, device="cpu"):
    """Run the program in its own process, as users do."""
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), "--device", device, *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if device == "cpu":
        # XLA's optimizations would take longer than the few training steps.
        more = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "PYTHONWARNINGS": "error"}
        environment |= {"JAX_PLATFORMS": "cpu"} | more
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


def train(name, file, steps, device="cpu"):
    """Return the losses, and the percentages of held-out pairs found by the model and by counting alone."""
    done = run(name, "--steps", str(steps), "--losses", str(file), device=device)
    assert done.returncode == 0, done.stderr
    found, counted = re.search(r"found: ([\d.]+)%, by counting alone ([\d.]+)%", done.stdout).groups()
    return np.array(json.loads(file.read_text())), float(found), float(counted)


@pytest.fixture(scope="module")
def trainings(tmp_path_factory):
    """Return the results of `train` for both programs."""
    file = tmp_path_factory.mktemp("losses") / "losses.json"
    return {name: train(name, file, steps) for name, steps in STEPS.items()}


@pytest.fixture
def shared(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import evoformer_data

    return evoformer_data


@pytest.mark.exhaustive
def test_jax_and_torch_trainings_have_the_same_losses(trainings):
    losses, others = trainings["evoformer"][0], trainings["torch_evoformer"][0]
    assert len(others) == STEPS["torch_evoformer"]
    np.testing.assert_allclose(losses[: len(others)], others, rtol=1e-4)


@pytest.mark.exhaustive
def test_training_loss_falls_below_the_entropy_of_contact_frequency(trainings, shared):
    """A model that only knows the share of pairs would reach the entropy of that share."""
    losses, found, _ = trainings["evoformer"]
    share = shared.alignments(shared.HELD_OUT, seed=shared.SEED).contacts.mean()
    entropy = -share * np.log(share) - (1 - share) * np.log(1 - share)
    assert losses[-5:].mean() < 0.6 * entropy
    assert found > 60


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_training_beats_counting_on_a_gpu(name, tmp_path):
    _, found, counted = train(name, tmp_path / "losses.json", 200, device="cuda")
    assert found > counted + 3


@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "plain"])
def test_attention_is_fused(has_bias, shared):
    operands = [jax.ShapeDtypeStruct((2, 64, 64, 4, 32), jnp.bfloat16)] * 4
    bias = jax.ShapeDtypeStruct((2, 64, 64, 4), jnp.bfloat16) if has_bias else None
    found = explain(shared.gated_attention)(*operands, bias)
    assert found.reason is None
    assert len(found.regions) == 1 and found.regions[0].declined is None
    assert any(leaf.role == "score" for leaf in found.regions[0].leaves) == has_bias


def test_random_folds_are_symmetric_and_vary(shared):
    generator = np.random.default_rng(3)
    shapes = set()
    for _ in range(50):
        partner = shared.random_fold(generator)
        paired = np.flatnonzero(partner >= 0)
        assert 12 <= len(paired) <= 16
        np.testing.assert_array_equal(partner[partner[paired]], paired)
        assert np.abs(partner[paired] - paired).min() >= 4
        shapes.add(tuple(partner))
    assert len(shapes) > 25


def test_alignments_keep_pairs_complementary(shared):
    found = shared.alignments(200, seed=1)
    np.testing.assert_array_equal(found.contacts, found.contacts.swapaxes(1, 2))
    counted = shared.complementarity(found.letters)
    assert abs(counted[found.contacts == 1].mean() - shared.CONSERVED) < 0.02
    upper = np.triu(np.ones(found.contacts.shape[1:], bool), k=1)
    assert abs(counted[:, upper][found.contacts[:, upper] == 0].mean() - 1 / shared.LETTERS) < 0.02
    assert shared.precision(found.contacts, found.contacts) == 1
    assert shared.precision(-found.contacts, found.contacts) < 0.1
