"""The MoBA language model of the examples: its JAX and torch versions train alike and learn."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 4


def run(name, *arguments, device="cpu"):
    """Run the program in its own process, as users do."""
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), "--device", device, *arguments]
    # Training takes longer than compilation, so the tests' own XLA flags would not save time.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_FLAGS": ""}
    if device == "cpu":
        environment |= {"JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "error"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


def train(name, file, steps, device="cpu"):
    """Return the losses of every step and the printed text."""
    done = run(name, "--steps", str(steps), "--losses", str(file), device=device)
    assert done.returncode == 0, done.stderr
    return np.array(json.loads(file.read_text())), done.stdout


@pytest.fixture(scope="module")
def trainings(tmp_path_factory):
    """Return the results of `train` for both programs after a few steps."""
    file = tmp_path_factory.mktemp("losses") / "losses.json"
    return {name: train(name, file, STEPS) for name in ("moba_language_model", "torch_moba_language_model")}


@pytest.mark.exhaustive
def test_jax_and_torch_trainings_have_the_same_losses(trainings):
    losses, others = (losses for losses, _ in trainings.values())
    assert len(losses) == len(others) == STEPS
    np.testing.assert_allclose(losses, others, rtol=1e-3)


@pytest.mark.exhaustive
def test_training_loss_falls(trainings):
    """The loss starts above log(256), as in an untrained model, and falls by more than steps differ from each other."""
    for losses, text in trainings.values():
        assert losses[0] > np.log(256)
        assert losses[-1] < losses[0] - 0.5
        bits, frequencies = (
            float(re.search(pattern, text)[1]) for pattern in (r"([\d.]+) bits per byte", r"([\d.]+) by frequencies")
        )
        assert 0 < bits < 8
        assert 4 < frequencies < 6


@pytest.mark.gpu
@pytest.mark.slow
def test_jax_and_torch_trainings_on_a_gpu_have_the_same_losses(tmp_path):
    losses, text = train("moba_language_model", tmp_path / "jax.json", 200, device="cuda")
    others, _ = train("torch_moba_language_model", tmp_path / "torch.json", 20, device="cuda")
    np.testing.assert_allclose(losses[:20], others, rtol=1e-2)
    assert float(re.search(r"([\d.]+) bits per byte", text)[1]) < 3.5


def test_invalid_option_exits_with_an_error(monkeypatch, capsys):
    monkeypatch.syspath_prepend(EXAMPLES)
    import moba_language_model

    with pytest.raises(SystemExit, match="2"):
        moba_language_model.main(["--steps", "0"])
    assert "must be at least 1, got 0" in capsys.readouterr().err


def test_load_text_returns_documentation_of_python(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import language_data

    text, held_out = language_data.load_text()
    assert len(text) > 200_000 and len(held_out) > 20_000
    assert b"The following" in text.tobytes()
    crops = language_data.batches(text, 3, seed=0)
    assert crops.shape == (3, language_data.BATCH_SIZE, language_data.CONTEXT + 1)
    assert bytes(crops[0, 0].astype(np.uint8)) in text.tobytes()
